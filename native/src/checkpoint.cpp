#include "kvbm/checkpoint.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kvbm/checksum.hpp"
#include "kvbm/error.hpp"

namespace kvbm {
namespace {

constexpr std::uint32_t kMagic = 0x58564B;  // "KVX"
constexpr std::uint16_t kVersion = 2;
constexpr std::size_t kHeaderBytes = 20;
constexpr std::size_t kMaxPayloadBytes = kMaxChunkBytes - kHeaderBytes;
constexpr std::size_t kBlockBytes = kHashBytes + 4;
constexpr std::size_t kMaxMembers = 65536;  // of a set in one chunk; a larger set is told in parts

enum class Kind : std::uint16_t { kFront = 1, kBlocks = 2, kEnd = 3 };

enum InstanceFlag : std::uint8_t { kKnown = 1, kStopped = 2, kPoolsKnown = 4, kProven = 8 };
enum TierFlag : std::uint8_t {
  kOpen = 1,
  kWhole = 2,
  kDeclared = 4,
  kCluster = 8,
  kPartial = 16,
  kRefused = 32,
  kPod = 64
};

class Out {
 public:
  template <class Integer>
  void number(Integer value) {
    static_assert(std::is_unsigned_v<Integer>);
    bytes({reinterpret_cast<const std::uint8_t*>(&value), sizeof value});
  }
  void bytes(Bytes data) { data_.insert(data_.end(), data.begin(), data.end()); }
  void text(std::string_view text) {
    number(static_cast<std::uint32_t>(text.size()));
    bytes({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  }
  std::vector<std::uint8_t>& data() noexcept { return data_; }
  std::size_t size() const noexcept { return data_.size(); }

 private:
  std::vector<std::uint8_t> data_;  // what was written
};

class In {
 public:
  In(Bytes data, std::uint64_t at) : data_(data), at_(at) {}

  template <class Integer>
  Integer number() {
    Integer value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view text() {
    const Bytes found = take(number<std::uint32_t>());
    return {reinterpret_cast<const char*>(found.data()), found.size()};
  }
  std::string_view name() {
    const std::string_view found = text();
    if (!is_utf8({reinterpret_cast<const std::uint8_t*>(found.data()), found.size()})) {
      fail("a name that is not UTF-8");
    }
    return found;
  }
  Bytes take(std::size_t count) {
    if (count > data_.size() - position_) {
      fail("a field ends beyond its data");
    }
    const Bytes found = data_.subspan(position_, count);
    position_ += count;
    return found;
  }
  // A count of things of at least this many bytes each, so that nobody allocates for more than there can be.
  std::uint32_t count(std::size_t least_bytes) {
    const auto value = number<std::uint32_t>();
    if (value > (data_.size() - position_) / least_bytes) {
      fail("a count of " + std::to_string(value) + " is more than its data holds");
    }
    return value;
  }
  void finish() const {
    if (position_ != data_.size()) {
      fail(std::to_string(data_.size() - position_) + " bytes too many");
    }
  }
  [[noreturn]] void fail(const std::string& why) const { throw Error(ErrorCode::kCheckpoint, why, at_); }

 private:
  Bytes data_;                // the fields
  std::size_t position_ = 0;  // next byte
  std::uint64_t at_;          // where they lie in the checkpoint, for errors
};

}  // namespace

// -- writing ----------------------------------------------------------------------------------------------------------

class CheckpointWriter {
 public:
  CheckpointWriter(const ClusterIndex& index, int file) : index_(index), file_(file), memo_(kMemo) {
    const std::lock_guard turn(index_.writer_);
    ++index_.checkpoints_;
  }
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  ~CheckpointWriter() {
    const std::lock_guard turn(index_.writer_);
    --index_.checkpoints_;
  }

  CheckpointSize write(Bytes note) {
    write_front(note);
    // No lock is held from one page to the next. A shard whose blocks were all moved meanwhile is begun again; blocks
    // that are told twice are harmless.
    for (std::size_t shard = 0; shard < BlockTable::kShards; ++shard) {
      std::uint64_t moves = 0;
      for (std::size_t page = 0;; ++page) {
        {
          const ReadGuard reading(index_.lock_);
          if (page == 0) {
            moves = index_.table_.moves(shard);
          } else if (moves != index_.table_.moves(shard)) {
            moves = index_.table_.moves(shard);
            page = 0;
          }
          if (page >= index_.table_.page_count(shard)) {
            break;
          }
          ++generation_;
          index_.table_.visit_page(shard, page, [this](BlockKey key, HolderValue value) { add(key, value); });
        }
        write_ready();
      }
    }
    cut_blocks();
    write_ready();
    Out end;
    end.number(number_);
    end.number(size_.blocks);
    write_chunk(Kind::kEnd, end.data());
    return size_;
  }

 private:
  static constexpr std::size_t kMemo = 4096;  // more than a page has blocks

  struct Memo {
    std::uint64_t generation = 0;  // the page and chunk it was noted for
    HolderValue value = 0;         // a set
    std::uint32_t position = 0;    // where the chunk has it
  };

  static constexpr std::uint32_t kNowhere = 0xFFFFFFFF;  // position of a set without members that matter

  void write_front(Bytes note) {
    if (note.size() > kMaxNoteBytes) {
      throw Error(ErrorCode::kCheckpoint, "a note of " + std::to_string(note.size()) + " bytes; at most " +
                                              std::to_string(kMaxNoteBytes) + " are possible");
    }
    Out front;
    {
      // Instances, pools and namespaces only; what lies in the table is not touched, so this is short.
      const std::lock_guard turn(index_.writer_);
      const ReadGuard reading(index_.lock_);
      size_.frames = index_.frames_;
      front.text({reinterpret_cast<const char*>(note.data()), note.size()});
      front.number(static_cast<std::uint64_t>(index_.table_.size()));
      front.number(static_cast<std::uint32_t>(index_.spaces_.size()));
      for (const auto& space : index_.spaces_) {
        front.bytes(space.id);
      }
      number_pools();
      front.number(pool_count_);
      for (const auto& pool : index_.pools_) {
        if (!pool.is_free) {
          front.text(pool.name);
        }
      }
      front.number(static_cast<std::uint32_t>(index_.instances_.size()));
      for (const auto& instance : index_.instances_) {
        add_instance(front, instance);
        incarnations_.push_back(instance.incarnation);
      }
      spaces_ = index_.spaces_.size();
    }
    const Bytes data(front.data());
    for (std::size_t at = 0; at < data.size(); at += kMaxPayloadBytes) {
      write_chunk(Kind::kFront, data.subspan(at, std::min(kMaxPayloadBytes, data.size() - at)));
    }
  }

  // Pools in the order of their numbers, those left out that nobody claims or names.
  void number_pools() {
    pools_.reserve(index_.pools_.size());
    for (const auto& pool : index_.pools_) {
      pools_.push_back(pool.is_free ? ClusterIndex::kNone : pool_count_++);
    }
  }

  void add_instance(Out& front, const ClusterIndex::Instance& instance) const {
    const auto flag = [](bool is_set, std::uint8_t bit) { return is_set ? bit : std::uint8_t{0}; };
    front.text(instance.name);
    front.number(instance.epoch);
    front.number(static_cast<std::uint8_t>(flag(instance.is_known, kKnown) | flag(instance.is_stopped, kStopped) |
                                           flag(instance.pools_known, kPoolsKnown) |
                                           flag(instance.is_proven, kProven)));
    front.number(static_cast<std::uint32_t>(instance.declared.size()));
    for (const std::string& words : instance.declared) {
      front.text(words);
    }
    for (const auto& fold : instance.tiers) {
      front.number(fold.snapshot);
      front.number(fold.listed);
      front.number(static_cast<std::uint8_t>(flag(fold.is_open, kOpen) | flag(fold.is_whole, kWhole) |
                                             flag(fold.is_declared, kDeclared) | flag(fold.is_cluster, kCluster) |
                                             flag(fold.is_partial, kPartial) | flag(fold.has_refused, kRefused) |
                                             flag(fold.is_pod, kPod)));
      front.number(fold.pool == ClusterIndex::kNone ? fold.pool : pools_[fold.pool]);
    }
  }

  void add(BlockKey key, HolderValue value) {
    const auto holder_ids = index_.sets_.holder_ids(value);
    for (std::size_t first = 0; first < holder_ids.size(); first += kMaxMembers) {
      const auto part = holder_ids.subspan(first, std::min(kMaxMembers, holder_ids.size() - first));
      if (block_count_ != 0 && bytes_ + kBlockBytes + 8 + part.size() * 4 > kMaxPayloadBytes) {
        cut_blocks();
      }
      // A set is told once a page: between pages its number may have come to mean another one.
      Memo& memo = memo_[(value * 0x9E3779B1U) >> 20];
      if (holder_ids.size() > kMaxMembers || memo.generation != generation_ || memo.value != value) {
        memo = {generation_, value, add_set(part)};
      }
      if (memo.position == kNowhere) {
        continue;
      }
      const BlockKey& salt = index_.spaces_[index_.holder_spaces_[holder_space_of(part.front())].space].salt;
      blocks_.number(key.low ^ salt.low);
      blocks_.number(key.high ^ salt.high);
      blocks_.number(memo.position);
      bytes_ += kBlockBytes;
      ++block_count_;
    }
  }

  // Adds the members that were there when the checkpoint began; the events since then tell of the others.
  std::uint32_t add_set(std::span<const HolderId> holder_ids) {
    members_.clear();
    std::uint32_t space = 0;
    for (const HolderId holder_id : holder_ids) {
      const ClusterIndex::HolderSpace& holder_space = index_.holder_spaces_[holder_space_of(holder_id)];
      const bool is_old = holder_space.is_pool ? holder_space.holder < pools_.size() &&
                                                     pools_[holder_space.holder] != ClusterIndex::kNone
                                               : holder_space.holder < incarnations_.size() &&
                                                     incarnations_[holder_space.holder] == holder_space.incarnation;
      if (is_old && holder_space.space < spaces_ && index_.is_live(holder_id)) {
        const std::uint32_t holder = holder_space.is_pool ? pools_[holder_space.holder] : holder_space.holder;
        members_.push_back(holder << 3 | (holder_space.is_pool ? 4U : 0U) |
                           static_cast<std::uint32_t>(tier_of(holder_id)));
        space = holder_space.space;
      }
    }
    if (members_.empty()) {
      return kNowhere;
    }
    sets_.number(space);
    sets_.number(static_cast<std::uint32_t>(members_.size()));
    sets_.bytes({reinterpret_cast<const std::uint8_t*>(members_.data()), members_.size() * 4});
    bytes_ += 8 + members_.size() * 4;
    return set_count_++;
  }

  // Ends the chunk; it is written when no lock is held.
  void cut_blocks() {
    if (block_count_ == 0) {
      return;
    }
    Out payload;
    payload.data().reserve(bytes_);
    payload.number(set_count_);
    payload.bytes(sets_.data());
    payload.number(block_count_);
    payload.bytes(blocks_.data());
    size_.blocks += block_count_;
    ready_.push_back(std::move(payload.data()));
    sets_.data().clear();
    blocks_.data().clear();
    set_count_ = block_count_ = 0;
    bytes_ = 8;
    ++generation_;
  }

  void write_ready() {
    for (const auto& payload : ready_) {
      write_chunk(Kind::kBlocks, payload);
    }
    ready_.clear();
  }

  void write_chunk(Kind kind, Bytes payload) {
    Out header;
    header.number(kMagic);
    header.number(kVersion);
    header.number(static_cast<std::uint16_t>(kind));
    header.number(number_++);
    header.number(static_cast<std::uint32_t>(payload.size()));
    header.number(crc32c(payload, crc32c(header.data())));
    put(header.data());
    put(payload);
  }

  void put(Bytes data) {
    while (!data.empty()) {
      const ssize_t written = ::write(file_, data.data(), data.size());
      if (written < 0 && errno == EINTR) {
        continue;
      }
      if (written <= 0) {
        throw Error(ErrorCode::kCheckpoint,
                    "writing failed (" + std::string(std::strerror(written < 0 ? errno : ENOSPC)) + ")", size_.bytes);
      }
      size_.bytes += static_cast<std::uint64_t>(written);
      data = data.subspan(static_cast<std::size_t>(written));
    }
  }

  const ClusterIndex& index_;                     // what is written
  const int file_;                                // where to
  std::vector<std::uint32_t> incarnations_;       // of the instances, when the checkpoint began
  std::size_t spaces_ = 0;                        // namespaces then
  std::vector<std::uint32_t> pools_;              // by number of a pool then: its place in the front; kNone: nobody's
  std::uint32_t pool_count_ = 0;                  // in the front
  std::uint32_t number_ = 0;                      // of the next chunk
  std::uint64_t generation_ = 0;                  // counts pages and chunks: what was noted before is forgotten
  std::vector<Memo> memo_;                        // sets of this page, by a hash of their number
  Out sets_;                                      // of the chunk being made
  Out blocks_;                                    // the same
  std::uint32_t set_count_ = 0;                   // in sets_
  std::uint32_t block_count_ = 0;                 // in blocks_
  std::size_t bytes_ = 8;                         // of the payload being made
  std::vector<std::uint32_t> members_;            // of the set being told
  std::vector<std::vector<std::uint8_t>> ready_;  // payloads to write when no lock is held
  CheckpointSize size_{};                         // so far
};

CheckpointSize write_checkpoint(const ClusterIndex& index, int file, Bytes note) {
  return CheckpointWriter(index, file).write(note);
}

// -- loading ----------------------------------------------------------------------------------------------------------

class CheckpointLoader {
 public:
  CheckpointLoader(ClusterIndex& index, Bytes data) : index_(index), data_(data) {}

  std::string load() {
    const std::lock_guard turn(index_.writer_);
    index_.audited_before_ = 0;
    if (!index_.instances_.empty() || !index_.spaces_.empty() || !index_.pools_.empty()) {
      throw Error(ErrorCode::kCheckpoint, "a checkpoint is loaded into an empty index only", 0);
    }
    std::vector<std::uint8_t> front;
    bool has_front = false;
    std::string note;
    while (true) {
      const std::uint64_t begin = at_;
      const auto [kind, payload] = next_chunk();
      if (kind == Kind::kFront && !has_front) {
        front.insert(front.end(), payload.begin(), payload.end());
        continue;
      }
      if (!has_front) {
        has_front = true;
        note = load_front(In(front, 0));
      }
      if (kind == Kind::kBlocks) {
        load_blocks(In(payload, begin));
      } else if (kind == Kind::kEnd) {
        In end(payload, begin);
        if (end.number<std::uint32_t>() != number_ - 1 || end.number<std::uint64_t>() != blocks_) {
          end.fail("the end counts other chunks or blocks than there are");
        }
        end.finish();
        if (at_ != data_.size()) {
          throw Error(ErrorCode::kCheckpoint, "bytes after the end", at_);
        }
        return note;
      } else {
        throw Error(ErrorCode::kCheckpoint, "a front after blocks", begin);
      }
    }
  }

 private:
  struct Chunk {
    Kind kind;      // what it holds
    Bytes payload;  // its bytes
  };

  struct Set {
    HolderValue value;               // interned, with one reference of ours
    std::uint32_t space;             // namespace
    std::uint32_t first_member = 0;  // in holder_ids_
    std::uint32_t members = 0;       // how many
  };

  Chunk next_chunk() {
    const Bytes rest = data_.subspan(at_);
    if (rest.size() < kHeaderBytes) {
      throw Error(ErrorCode::kCheckpoint, "cut off: " + std::to_string(rest.size()) + " bytes where a chunk begins",
                  at_);
    }
    In header(rest.first(kHeaderBytes), at_);
    if (header.number<std::uint32_t>() != kMagic) {
      header.fail("no chunk of a checkpoint begins here");
    }
    if (const auto version = header.number<std::uint16_t>(); version != kVersion) {
      const std::string read = "; this build reads version " + std::to_string(kVersion);
      header.fail(version > kVersion
                      ? "written by a newer kvbm, as version " + std::to_string(version) + read + "; upgrade kvbm"
                      : "version " + std::to_string(version) + ", which no kvbm writes" + read);
    }
    const auto kind = header.number<std::uint16_t>();
    const auto number = header.number<std::uint32_t>();
    const auto bytes = header.number<std::uint32_t>();
    const auto checksum = header.number<std::uint32_t>();
    if (bytes > kMaxPayloadBytes) {
      header.fail("a chunk of " + std::to_string(bytes) + " bytes; at most " + std::to_string(kMaxPayloadBytes) +
                  " are possible");
    }
    if (bytes > rest.size() - kHeaderBytes) {
      header.fail("cut off: " + std::to_string(rest.size() - kHeaderBytes) + " of " + std::to_string(bytes) +
                  " bytes are there");
    }
    const Bytes payload = rest.subspan(kHeaderBytes, bytes);
    if (checksum != crc32c(payload, crc32c(rest.first(kHeaderBytes - 4)))) {
      header.fail("a chunk's checksum does not fit its bytes");
    }
    if (number != number_ || kind < 1 || kind > 3) {
      header.fail("chunk " + std::to_string(number) + " of kind " + std::to_string(kind) + " where chunk " +
                  std::to_string(number_) + " was expected");
    }
    ++number_;
    at_ += kHeaderBytes + bytes;
    return {static_cast<Kind>(kind), payload};
  }

  std::string load_front(In front) {
    const std::string note(front.text());
    const auto blocks = front.number<std::uint64_t>();
    for (std::uint32_t left = front.count(kHashBytes); left > 0; --left) {
      NamespaceId id;
      std::memcpy(id.data(), front.take(kHashBytes).data(), kHashBytes);
      const std::size_t before = index_.spaces_.size();
      if (index_.space_of(id) != before) {
        front.fail("a namespace twice");
      }
    }
    for (std::uint32_t left = front.count(4); left > 0; --left) {
      const std::size_t before = index_.pools_.size();
      if (index_.pool_number(front.name()) != before) {
        front.fail("a pool twice");
      }
    }
    for (std::uint32_t left = front.count(13); left > 0; --left) {
      load_instance(front);
    }
    front.finish();
    index_.table_.reserve(static_cast<std::size_t>(std::min<std::uint64_t>(blocks, data_.size() / kBlockBytes)));
    return note;
  }

  void load_instance(In& front) {
    const std::string_view name = front.name();
    const WriteGuard change(index_.lock_);
    if (!index_.instance_numbers_.emplace(name, static_cast<std::uint32_t>(index_.instances_.size())).second) {
      front.fail("an instance twice");
    }
    ClusterIndex::Instance& instance = index_.instances_.emplace_back();
    instance.name = name;
    index_.rank_by_name(static_cast<std::uint32_t>(index_.instances_.size() - 1));
    instance.epoch = front.number<std::uint64_t>();
    const auto flags = front.number<std::uint8_t>();
    instance.is_known = (flags & kKnown) != 0;
    if (!instance.is_known) {
      index_.list_dropped(static_cast<std::uint32_t>(index_.instances_.size() - 1));
    }
    instance.is_stopped = (flags & kStopped) != 0;
    instance.pools_known = (flags & kPoolsKnown) != 0;
    instance.is_proven = (flags & kProven) != 0;
    for (std::uint32_t left = front.count(4); left > 0; --left) {
      instance.declared.emplace_back(front.text());
    }
    for (ClusterIndex::TierFold& fold : instance.tiers) {
      fold.snapshot = front.number<std::uint32_t>();
      fold.listed = front.number<std::uint64_t>();
      const auto tier_flags = front.number<std::uint8_t>();
      // What a snapshot that was under way had listed is not told apart here, so its end will not withdraw anything.
      fold.is_open = false;
      fold.is_whole = (tier_flags & kWhole) != 0;
      fold.is_declared = (tier_flags & kDeclared) != 0;
      fold.is_cluster = (tier_flags & kCluster) != 0;
      fold.is_pod = (tier_flags & kPod) != 0;
      fold.is_partial = (tier_flags & kPartial) != 0;
      fold.has_refused = (tier_flags & kRefused) != 0;
      const auto pool = front.number<std::uint32_t>();
      if (pool != ClusterIndex::kNone && pool >= index_.pools_.size()) {
        front.fail("a pool that does not exist");
      }
      index_.name_pool(fold, pool);
    }
  }

  void load_blocks(In blocks) {
    holder_ids_.clear();
    sets_.clear();
    for (std::uint32_t left = blocks.count(12); left > 0; --left) {
      load_set(blocks);
    }
    const WriteGuard change(index_.lock_);
    for (Set& set : sets_) {
      set.value = index_.sets_.intern({holder_ids_.data() + set.first_member, set.members});
    }
    try {
      const std::uint32_t count = blocks.count(kBlockBytes);
      const Bytes packed = blocks.take(std::size_t{count} * kBlockBytes);
      blocks.finish();
      for (std::size_t at = 0; at < packed.size(); at += kBatch * kBlockBytes) {
        load_batch(packed.subspan(at, std::min(kBatch * kBlockBytes, packed.size() - at)), blocks);
      }
      blocks_ += count;
    } catch (...) {
      release_sets();
      throw;
    }
    release_sets();
  }

  void release_sets() {
    for (const Set& set : sets_) {
      index_.sets_.release(set.value);
    }
  }

  void load_set(In& blocks) {
    const auto space = blocks.number<std::uint32_t>();
    if (space >= index_.spaces_.size()) {
      blocks.fail("a namespace that does not exist");
    }
    Set set{.value = 0, .space = space, .first_member = static_cast<std::uint32_t>(holder_ids_.size())};
    for (std::uint32_t left = blocks.count(4); left > 0; --left) {
      const auto member = blocks.number<std::uint32_t>();
      const std::uint32_t holder = member >> 3;
      const bool is_pool = (member & 4) != 0;
      if (holder >= (is_pool ? index_.pools_.size() : index_.instances_.size())) {
        blocks.fail("a holder that does not exist");
      }
      const std::uint32_t holder_space =
          is_pool ? index_.holder_space_of_pool(holder, space) : index_.holder_space_of_instance(holder, space);
      holder_ids_.push_back(holder_id_of(holder_space, static_cast<Tier>(member & 3), 0));
    }
    const auto begin = holder_ids_.begin() + set.first_member;
    std::sort(begin, holder_ids_.end());
    holder_ids_.erase(std::unique(begin, holder_ids_.end()), holder_ids_.end());
    set.members = static_cast<std::uint32_t>(holder_ids_.size()) - set.first_member;
    if (set.members == 0) {
      blocks.fail("a set without members");
    }
    sets_.push_back(set);
  }

  void load_batch(Bytes packed, const In& blocks) {
    std::array<BlockKey, kBatch> keys;
    std::array<std::uint64_t, kBatch> places;
    std::array<std::uint32_t, kBatch> positions;
    const std::size_t count = packed.size() / kBlockBytes;
    for (std::size_t index = 0; index < count; ++index) {
      const std::uint8_t* const block = packed.data() + index * kBlockBytes;
      std::memcpy(&positions[index], block + kHashBytes, sizeof positions[index]);
      if (positions[index] >= sets_.size()) {
        blocks.fail("a set that does not exist");
      }
      keys[index] = index_.key_of(sets_[positions[index]].space, block);
      places[index] = index_.table_.place(keys[index]);
    }
    std::array<HolderValue, kBatch> values;
    index_.table_.find_all({keys.data(), count}, {places.data(), count}, values.data());
    for (std::size_t index = 0; index < count; ++index) {
      const Set& set = sets_[positions[index]];
      const std::span<const HolderId> holder_ids(holder_ids_.data() + set.first_member, set.members);
      const std::uint8_t* const hash = packed.data() + index * kBlockBytes;
      HolderValue* const known = index_.table_.find(keys[index], places[index]);
      if (known == nullptr && index_.residencies_ + index_.claims_ + holder_ids.size() <= index_.capacity_) {
        index_.sets_.retain(set.value);
        *index_.table_.insert(keys[index], places[index]) = set.value;
        std::uint32_t last_pool = 0;
        for (const HolderId holder_id : holder_ids) {
          count_holder_id(holder_id, hash, holder_space_of(holder_id) != last_pool);
          last_pool = holder_space_of(holder_id);
        }
      } else {
        for (const HolderId holder_id : holder_ids) {
          merge(holder_id, keys[index], places[index], hash);
        }
      }
    }
  }

  // A block that is told twice, or too many of them: holder id by holder id.
  void merge(HolderId holder_id, BlockKey key, std::uint64_t place, const std::uint8_t* hash) {
    const ClusterIndex::HolderSpace& holder_space = index_.holder_spaces_[holder_space_of(holder_id)];
    const ClusterIndex::Piece piece{holder_space.is_pool ? ClusterIndex::Work::kClaim : ClusterIndex::Work::kState,
                                    holder_space.is_pool ? ClusterIndex::kNone : holder_space.holder,
                                    holder_space.space,
                                    holder_space_of(holder_id),
                                    tier_of(holder_id),
                                    hash,
                                    1};
    if (holder_space.is_pool) {
      index_.gain_claim(piece, key, place);
    } else {
      bool& is_whole =
          index_.instances_[holder_space.holder].tiers[static_cast<std::size_t>(tier_of(holder_id))].is_whole;
      const bool was_whole = std::exchange(is_whole, false);  // it is no anomaly here
      index_.gain(piece, key, place, hash, false);
      is_whole = was_whole;
    }
  }

  void count_holder_id(HolderId holder_id, const std::uint8_t* hash, bool is_first_of_holder_space) {
    const ClusterIndex::HolderSpace& holder_space = index_.holder_spaces_[holder_space_of(holder_id)];
    if (holder_space.is_pool) {
      ++index_.claims_;
      index_.pools_[holder_space.holder].claims += is_first_of_holder_space ? 1 : 0;
      return;
    }
    ClusterIndex::TierFold& fold =
        index_.instances_[holder_space.holder].tiers[static_cast<std::size_t>(tier_of(holder_id))];
    ++index_.residencies_;
    ++fold.counts[0];
    fold.digests[0] += residency_mix(tier_of(holder_id), hash);
  }

  static constexpr std::size_t kBatch = 64;

  ClusterIndex& index_;               // what is filled
  const Bytes data_;                  // the checkpoint
  std::size_t at_ = 0;                // next chunk
  std::uint32_t number_ = 0;          // its number
  std::uint64_t blocks_ = 0;          // loaded so far
  std::vector<HolderId> holder_ids_;  // members of the chunk's sets
  std::vector<Set> sets_;             // the chunk's sets
};

std::string load_checkpoint(ClusterIndex& index, Bytes data) { return CheckpointLoader(index, data).load(); }

}  // namespace kvbm
