#include "kvbm/checkpoint.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "check.hpp"
#include "cluster.hpp"
#include "kvbm/checksum.hpp"

using namespace kvbm;
using namespace kvbm::tests;

namespace {

constexpr std::size_t kHeaderBytes = 20;

// The fields of a checkpoint, written by hand.
class Fields {
 public:
  template <class Number>
  Fields& put(Number value) {
    const std::size_t at = data_.size();
    data_.resize(at + sizeof value);
    std::memcpy(data_.data() + at, &value, sizeof value);
    return *this;
  }
  Fields& text(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    data_.insert(data_.end(), text.begin(), text.end());
    return *this;
  }
  Fields& bytes(Bytes data) {
    data_.insert(data_.end(), data.begin(), data.end());
    return *this;
  }
  const Buffer& data() const { return data_; }

 private:
  Buffer data_;  // what was put
};

// Chunks after one another, numbered and checksummed.
class Chunks {
 public:
  explicit Chunks(std::uint16_t version = 2) : version_(version) {}

  Chunks& add(std::uint16_t kind, const Fields& fields) {
    Fields header;
    header.put(std::uint32_t{0x58564B}).put(version_).put(kind).put(number_++);
    header.put(static_cast<std::uint32_t>(fields.data().size()));
    header.put(crc32c(fields.data(), crc32c(header.data())));
    data_.insert(data_.end(), header.data().begin(), header.data().end());
    data_.insert(data_.end(), fields.data().begin(), fields.data().end());
    return *this;
  }
  const Buffer& end(std::uint64_t blocks) {
    const std::uint32_t before = number_;
    add(3, Fields().put(before).put(blocks));
    return data_;
  }

 private:
  Buffer data_;               // the chunks
  std::uint32_t number_ = 0;  // of the next one
  std::uint16_t version_;     // of all
};

void put_instance(Fields& front, const std::string& name, std::uint32_t pool = ClusterIndex::kNone) {
  front.text(name).put(std::uint64_t{1}).put(std::uint8_t{5}).put(std::uint32_t{1}).text("a pool's words");
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    front.put(std::uint32_t{0}).put(std::uint64_t{0}).put(std::uint8_t{4}).put(pool);
  }
}

// A front with namespaces 0 and 1, pool 0 and instances 0 and 1.
Fields small_front() {
  Fields front;
  front.text("note").put(std::uint64_t{0});
  front.put(std::uint32_t{2}).bytes(space_id(0)).bytes(space_id(1));
  front.put(std::uint32_t{1}).text("pool");
  front.put(std::uint32_t{2});
  put_instance(front, "i0");
  put_instance(front, "i1", 0);
  return front;
}

Fields blocks_of(std::uint32_t space, const std::vector<std::uint32_t>& members,
                 const std::vector<std::uint64_t>& blocks, std::uint32_t position = 0) {
  Fields fields;
  fields.put(std::uint32_t{1}).put(space).put(static_cast<std::uint32_t>(members.size()));
  for (const std::uint32_t member : members) {
    fields.put(member);
  }
  fields.put(static_cast<std::uint32_t>(blocks.size()));
  for (const std::uint64_t block : blocks) {
    fields.bytes(hash_of(block)).put(position);
  }
  return fields;
}

ErrorCode code_of(Bytes data) {
  const Buffer exact(data.begin(), data.end());  // so that ASan sees one byte too far
  return thrown_code([&] {
    ClusterIndex index(kPlenty, kSecret);
    load_checkpoint(index, exact);
  });
}

// An index with everything in it, and its model.
struct Full {
  ClusterIndex index{kPlenty, kSecret};
  Model model{5, kPlenty};

  explicit Full(std::uint64_t blocks) {
    for (std::uint32_t number = 0; number < 5; ++number) {
      index.instance(name_of(number));
      const Buffer mine = hashes_between(number * blocks / 8, blocks);
      const Buffer others = hashes_between(0, blocks / (number + 2));
      const auto mine_count = static_cast<std::uint32_t>(mine.size() / kHashBytes);
      both(frame_of(
          number,
          {InstanceStarted{}, listed(space_id(0), Tier::kHbm, 3, mine), SnapshotEnded{Tier::kHbm, 3, mine_count},
           created(space_id(number % 3), Tier::kHost, others), created(space_id(1), Tier::kObject, others)},
          {shared_pools(number % 2 == 0 ? "pool" : "other")}));
    }
    index.claim("elsewhere", space_id(2), hashes_between(0, 5));
    model.claim("elsewhere", space_id(2), hashes_between(0, 5));
    index.miss(1);
    model.miss(1);
    const auto likely = shared_pools("pool");
    index.begin_blind(2, 4, nullptr, likely);
    model.begin_blind(2, 4, nullptr, likely);
    const Buffer some = hashes_between(3, 9);
    both(frame_of(2, {created(space_id(1), Tier::kNvme, some)}, {}, 4));
    both(frame_of(4, {InstanceStopped{StopReason::kShutdown}}));
    index.drop(3);
    model.drop(3);
  }

 private:
  void both(const Frame& frame) {
    apply(index, frame);
    model.apply(frame);
  }
};

void check_same(const ClusterIndex& index, const Model& model, std::uint64_t blocks) {
  check_states(index, model);
  for (std::size_t space = 0; space < 3; ++space) {
    for (std::uint64_t number = 0; number < blocks; ++number) {
      check_holders(index, model, {space_id(space), hash_of(number)});
    }
    check_prefixes(index, model, space_id(space), hashes_between(0, 20));
  }
}

void check_same_after(ClusterIndex& index, Model& model, const std::vector<Frame>& frames) {
  for (const Frame& frame : frames) {
    apply(index, frame);
    model.apply(frame);
  }
  check_same(index, model, 210);
}

void what_was_written_is_loaded() {
  const Full full(600);
  const Buffer data = written(full.index, "where it was");
  ClusterIndex loaded(kPlenty, {7, 8, 9});
  CHECK(load_checkpoint(loaded, data) == "where it was");
  check_same(loaded, full.model, 610);
  CHECK(loaded.instance_count() == 5 && loaded.instance_name(3) == "i3");
  CHECK(loaded.anomalies() == (std::array<std::uint64_t, kAnomalyCount>{}));
  ClusterIndex again(kPlenty, kSecret);
  CHECK(load_checkpoint(again, written(loaded)).empty());
  check_same(again, full.model, 610);
  CHECK(again.block_count() == loaded.block_count() && !again.needs_sweep());
}

void what_others_can_read_is_known_after_a_load_and_who_was_excluded_is_not() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  std::vector<DeclaredPool> pools = own_pools();
  pools[2].is_pod = true;
  const Buffer all = hashes_between(0, 60);
  apply(index, one,
        {InstanceStarted{}, created(space_id(0), Tier::kHbm, all),
         created(space_id(0), Tier::kNvme, hashes_between(0, 10))},
        {pools});
  index.exclude(one, true);
  index.audit(300);
  ClusterIndex loaded(kPlenty, kSecret);
  loaded.audit(100);  // a pass over nothing, under way
  load_checkpoint(loaded, written(index));
  CHECK(!loaded.state(one)->is_excluded && deepest_held(loaded, space_id(0), all) == 60);
  loaded.exclude(one, true);
  CHECK(deepest_held(loaded, space_id(0), all) == 10);
  AuditPart part;
  while (!(part = loaded.audit(1000)).is_whole) {
  }
  CHECK(part.differing.empty() && part.blocks == 60);
}

// Which blocks the first part has listed is not in the checkpoint, so its end would leave what it has not listed.
void a_snapshot_that_a_checkpoint_cuts_makes_nothing_whole() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, 20))}, {own_pools()});
  index.miss(one);  // the withdrawal of the last ten
  apply(index, one, {listed(space_id(0), Tier::kHbm, 5, hashes_between(0, 6))});
  ClusterIndex loaded(kPlenty, kSecret);
  load_checkpoint(loaded, written(index));
  const Buffer last_four = hashes_between(6, 10);  // events only look at their hashes
  const std::vector<Event> rest{listed(space_id(0), Tier::kHbm, 5, last_four), SnapshotEnded{Tier::kHbm, 5, 10}};
  apply(loaded, one, rest);
  CHECK(loaded.anomalies()[static_cast<std::size_t>(IndexAnomaly::kSnapshotIncomplete)] == 1);
  apply(index, one, rest);
  CHECK(index.anomalies()[static_cast<std::size_t>(IndexAnomaly::kSnapshotIncomplete)] == 0);
  CHECK(deepest_held(index, space_id(0), hashes_between(0, 20)) == 10);
  apply(loaded, one, {listed(space_id(0), Tier::kHbm, 6, hashes_between(0, 10)), SnapshotEnded{Tier::kHbm, 6, 10}});
  CHECK(deepest_held(loaded, space_id(0), hashes_between(0, 20)) == 10);
}

// A checkpoint is written in the order of a table that a secret decides; so holder spaces are numbered by it when it is
// loaded.
void pools_come_in_one_order_whatever_the_secret() {
  const std::vector<std::pair<std::string, std::uint64_t>> stored{
      {"zone-b", 2}, {"s3", 5}, {"azure", 2}, {"redis", 8}, {"ceph", 2}};
  const std::vector<std::string> wanted{"redis", "s3", "azure", "ceph", "zone-b"};
  const Buffer all = hashes_between(0, 8);
  for (const std::uint64_t secret : {std::uint64_t{1}, std::uint64_t{0x9E3779B97F4A7C15}, ~std::uint64_t{0}}) {
    ClusterIndex index(kPlenty, {secret, secret + 1, secret + 2});
    for (const auto& [pool, depth] : stored) {
      const Buffer held = hashes_between(0, depth);
      const std::vector<DeclaredPool> pools{{Tier::kObject, true, pool}};
      apply(index, index.instance(std::string("writer of ").append(pool)),
            {InstanceStarted{}, created(space_id(0), Tier::kObject, held)}, {pools});
    }
    ClusterIndex loaded(kPlenty, {secret * 3, secret + 5, secret + 9});
    load_checkpoint(loaded, written(index));
    for (const ClusterIndex* asked : {&index, &loaded}) {
      PrefixAnswer answer;
      asked->prefixes(space_id(0), all, 3, answer);
      std::vector<std::string> found;
      for (const PoolDepth& pool : answer.pools) {
        found.emplace_back(asked->pool_name(pool.pool));
      }
      CHECK(found == wanted);
    }
  }
}

void another_version_is_refused() {
  for (const std::uint16_t version : {0, 1, 2, 3}) {
    const Buffer data = Chunks(version).add(1, small_front()).add(2, blocks_of(0, {0}, {1, 2, 3})).end(3);
    if (version == 2) {
      ClusterIndex index(kPlenty, kSecret);
      CHECK(load_checkpoint(index, data) == "note" && index.residency_count() == 3);
    } else {
      CHECK(code_of(data) == ErrorCode::kCheckpoint);
    }
  }
}

void a_loaded_index_goes_on() {
  Full full(200);
  ClusterIndex loaded(kPlenty, kSecret);
  load_checkpoint(loaded, written(full.index));
  const Buffer kept = hashes_between(50, 70);
  for (std::uint32_t snapshot = 4; snapshot < 12; ++snapshot) {
    std::vector<Event> events{listed(space_id(0), Tier::kHbm, snapshot, kept)};
    if (snapshot % 4 == 3) {
      events.emplace_back(SnapshotEnded{Tier::kHbm, snapshot, 20});
    }
    const Frame frame = frame_of(0, events);
    apply(loaded, frame);
    full.model.apply(frame);
    check_same(loaded, full.model, 210);
  }
  const Frame restart = frame_of(4, {InstanceStarted{}}, {own_pools()}, 9);
  apply(loaded, restart);
  full.model.apply(restart);
  while (loaded.sweep(100)) {
  }
  check_same(loaded, full.model, 210);
}

void what_happens_after_the_front_comes_by_the_events() {
  // The note is longer than a pipe takes, so the writer waits behind the front until it is read.
  Full full(200);
  int ends[2];
  CHECK(::pipe(ends) == 0);
  const std::string note(300'000, 'n');
  std::thread writer([&] {
    write_checkpoint(full.index, ends[1], {reinterpret_cast<const std::uint8_t*>(note.data()), note.size()});
    ::close(ends[1]);
  });
  Buffer data(1);
  CHECK(::read(ends[0], data.data(), 1) == 1);
  const Buffer newer = hashes_between(0, 90);
  std::vector<Frame> frames;
  frames.push_back(frame_of(0, {InstanceStarted{}, created(space_id(1), Tier::kHbm, newer)}, {own_pools()}, 5));
  frames.push_back(
      frame_of(4, {InstanceStarted{}, created(space_id(9), Tier::kObject, newer)}, {shared_pools("new")}, 5));
  frames.push_back(frame_of(2, {created(space_id(8), Tier::kHost, newer)}, {}, 4));
  for (const Frame& frame : frames) {
    apply(full.index, frame);
  }
  Buffer part(65'536);
  for (ssize_t got = 0; (got = ::read(ends[0], part.data(), part.size())) > 0;) {
    data.insert(data.end(), part.begin(), part.begin() + got);
  }
  writer.join();
  ::close(ends[0]);
  ClusterIndex loaded(kPlenty, kSecret);
  CHECK(load_checkpoint(loaded, data) == note);
  CHECK(loaded.state(0)->counts[0] == 0 && loaded.state(4)->counts[0] == 0);  // what they hold is of a later life
  CHECK(loaded.claim_counts().size() == 3);
  check_same_after(loaded, full.model, frames);
}

void an_empty_index_has_a_checkpoint_too() {
  const ClusterIndex index(kPlenty, kSecret);
  ClusterIndex loaded(kPlenty, kSecret);
  CHECK(load_checkpoint(loaded, written(index, "n")) == "n");
  CHECK(loaded.block_count() == 0 && loaded.instance_count() == 0 && loaded.memory().table == 0);
}

// Walks the chunks of a checkpoint; how many there are of each kind.
std::array<int, 4> chunks_of(const Buffer& data) {
  std::array<int, 4> kinds{};
  for (std::size_t at = 0; at < data.size();) {
    std::uint16_t kind = 0;
    std::uint32_t bytes = 0;
    std::memcpy(&kind, data.data() + at + 6, sizeof kind);
    std::memcpy(&bytes, data.data() + at + 12, sizeof bytes);
    CHECK(kHeaderBytes + bytes <= kMaxChunkBytes && kind < 4);
    ++kinds[kind];
    at += kHeaderBytes + bytes;
  }
  return kinds;
}

void no_chunk_is_longer_than_a_mebibyte() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  apply(index, one, {InstanceStarted{}}, {own_pools()});
  constexpr std::uint64_t kBlocks = 120'000;
  for (std::uint64_t at = 0; at < kBlocks; at += 10'000) {
    apply(index, one, {created(space_id(0), Tier::kHbm, hashes_between(at, at + 10'000))});
  }
  const std::string note(3 * kMaxChunkBytes, 'n');
  const Buffer data = written(index, note);
  const auto kinds = chunks_of(data);
  CHECK(kinds[1] == 4 && kinds[2] >= 3 && kinds[3] == 1);
  ClusterIndex loaded(kPlenty, kSecret);
  CHECK(load_checkpoint(loaded, data) == note);
  CHECK(loaded.block_count() == kBlocks && loaded.state(0)->digest == index.state(one)->digest);
  CHECK(loaded.recomputed_digest(0) == index.state(one)->digest);
}

void a_set_of_more_holders_than_a_chunk_tells_comes_in_parts() {
  constexpr std::uint32_t kInstances = 16'400;
  Fields front;
  front.text("").put(std::uint64_t{2}).put(std::uint32_t{1}).bytes(space_id(0)).put(std::uint32_t{0}).put(kInstances);
  std::vector<std::uint32_t> members;
  for (std::uint32_t number = 0; number < kInstances; ++number) {
    put_instance(front, std::to_string(number));
    for (std::uint32_t tier = 0; tier < kTierCount; ++tier) {
      members.push_back(number << 3 | tier);
    }
  }
  const Fields first = Fields().bytes(Bytes(front.data()).first(1'000'000));
  const Fields second = Fields().bytes(Bytes(front.data()).subspan(1'000'000));
  ClusterIndex index(kPlenty, kSecret);
  load_checkpoint(index, Chunks().add(1, first).add(1, second).add(2, blocks_of(0, members, {1, 2})).end(2));
  CHECK(index.residency_count() == 2 * members.size());
  const Buffer data = written(index);
  std::uint64_t told = 0;
  std::memcpy(&told, data.data() + data.size() - sizeof told, sizeof told);
  CHECK(told == 4);  // each block twice
  ClusterIndex loaded(kPlenty, kSecret);
  load_checkpoint(loaded, data);
  CHECK(loaded.residency_count() == 2 * members.size() && loaded.block_count() == 2);
  CHECK(loaded.holders(space_id(0), hash_of(2).data()).size() == members.size());
  for (const std::uint32_t number : {0U, 1U, kInstances - 1}) {
    CHECK(*loaded.state(number) == *index.state(number) &&
          loaded.recomputed_digest(number) == index.state(number)->digest);
  }
}

void damage_is_an_error_and_never_a_crash() {
  const Full full(40);
  const Buffer data = written(full.index, "where it was");
  CHECK(data.size() > 1000);
  for (std::size_t size = 0; size < data.size(); size += size < 300 ? 1 : 7) {
    CHECK(code_of(Bytes(data).first(size)) == ErrorCode::kCheckpoint);
  }
  Random random(5);
  for (int flip = 0; flip < 1500; ++flip) {
    Buffer damaged = data;
    damaged[random.below(damaged.size())] ^= static_cast<std::uint8_t>(1U << random.below(8));
    CHECK(code_of(damaged) == ErrorCode::kCheckpoint);
  }
  for (int swap = 0; swap < 500; ++swap) {
    Buffer damaged = data;
    std::swap(damaged[random.below(damaged.size())], damaged[random.below(damaged.size())]);
    if (damaged != data) {
      CHECK(code_of(damaged) == ErrorCode::kCheckpoint);
    }
  }
  Buffer longer = data;
  longer.push_back(0);
  CHECK(code_of(longer) == ErrorCode::kCheckpoint);
  longer = data;
  longer.insert(longer.end(), data.begin(), data.end());
  CHECK(code_of(longer) == ErrorCode::kCheckpoint);
}

void fields_that_contradict_each_other_are_an_error() {
  const auto refused = [](const Buffer& data) { return code_of(data) == ErrorCode::kCheckpoint; };
  const Fields front = small_front();
  const Fields blocks = blocks_of(0, {0, 1 << 3, 4}, {1, 2});
  ClusterIndex index(kPlenty, kSecret);
  CHECK(load_checkpoint(index, Chunks().add(1, front).add(2, blocks).end(2)) == "note");
  CHECK(index.residency_count() == 4 && claim_counts(index) == (std::map<std::string, std::uint64_t>{{"pool", 2}}) &&
        index.block_count() == 2);

  CHECK(refused(Chunks().add(2, blocks).end(2)));                              // no front
  CHECK(refused(Chunks().end(0)));                                             // nothing at all
  CHECK(refused(Chunks().add(1, front).add(2, blocks).add(1, front).end(2)));  // a front after blocks
  // Other blocks than it says
  CHECK(refused(Chunks().add(1, front).add(2, blocks).end(3)));
  // Other chunks than it says
  CHECK(refused(Chunks().add(1, front).add(2, blocks).add(3, Fields().put(9U).put(2UL)).end(2)));
  CHECK(refused(Chunks().add(1, front).add(4, blocks).end(2)));  // a kind there is not
  // A namespace there is not
  CHECK(refused(Chunks().add(1, front).add(2, blocks_of(2, {0}, {1})).end(1)));
  // An instance there is not
  CHECK(refused(Chunks().add(1, front).add(2, blocks_of(0, {2 << 3}, {1})).end(1)));
  CHECK(refused(Chunks().add(1, front).add(2, blocks_of(0, {1 << 3 | 4}, {1})).end(1)));      // a pool there is not
  CHECK(refused(Chunks().add(1, front).add(2, blocks_of(0, {0}, {1}, 1)).end(1)));            // a set there is not
  CHECK(refused(Chunks().add(1, front).add(2, blocks_of(0, {}, {1})).end(1)));                // a set of nobody
  CHECK(refused(Chunks().add(1, front).add(2, Fields().put(0xFFFFFFFFU)).end(0)));            // more sets than bytes
  CHECK(refused(Chunks().add(1, front).add(2, Fields().put(0U).put(0xFFFFFFFFU)).end(0)));    // more blocks than bytes
  CHECK(refused(Chunks().add(1, Fields().bytes(front.data()).put(std::uint8_t{0})).end(0)));  // bytes too many
  // A note longer than its data
  CHECK(refused(Chunks().add(1, Fields().put(0xFFFFFFFFU)).end(0)));
  Fields twice;
  twice.text("").put(std::uint64_t{0}).put(std::uint32_t{2}).bytes(space_id(0)).bytes(space_id(0)).put(0U).put(0U);
  CHECK(refused(Chunks().add(1, twice).end(0)));
  Fields names;
  names.text("").put(std::uint64_t{0}).put(0U).put(0U).put(2U);
  put_instance(names, "i");
  put_instance(names, "i");
  CHECK(refused(Chunks().add(1, names).end(0)));
  Fields pool;
  pool.text("").put(std::uint64_t{0}).put(0U).put(0U).put(1U);
  put_instance(pool, "i", 0);
  CHECK(refused(Chunks().add(1, pool).end(0)));
}

void blocks_that_are_told_twice_count_once() {
  ClusterIndex index(kPlenty, kSecret);
  const Fields blocks = blocks_of(0, {0, 0, 1, 1 << 3, 4, 7}, {1, 1, 2});
  load_checkpoint(
      index, Chunks().add(1, small_front()).add(2, blocks).add(2, blocks).add(2, blocks_of(0, {2, 4}, {1})).end(7));
  CHECK(index.residency_count() == 7 && index.block_count() == 2 &&
        claim_counts(index) == (std::map<std::string, std::uint64_t>{{"pool", 2}}));
  for (const std::uint32_t number : {0, 1}) {
    CHECK(index.recomputed_digest(number) == index.state(number)->digest);
  }
}

void a_checkpoint_beyond_capacity_is_loaded_as_far_as_it_goes() {
  ClusterIndex index(5, kSecret);
  load_checkpoint(index, Chunks().add(1, small_front()).add(2, blocks_of(0, {0, 1 << 3, 4}, {1, 2, 3})).end(3));
  CHECK(index.residency_count() + index.claim_counts()[0].second == 5 && index.state(1)->is_partial);
  CHECK(index.anomalies()[static_cast<std::size_t>(IndexAnomaly::kRefusedAtCapacity)] == 4);
}

void only_an_empty_index_loads_one() {
  const Full full(10);
  const Buffer data = written(full.index);
  ClusterIndex index(kPlenty, kSecret);
  index.instance("i");
  CHECK(thrown_code([&] { load_checkpoint(index, data); }) == ErrorCode::kCheckpoint);
}

void a_file_that_takes_nothing_is_an_error() {
  const Full full(10);
  const int file = ::open("/dev/full", O_WRONLY);
  CHECK(file >= 0);
  CHECK(thrown_code([&] { write_checkpoint(full.index, file, {}); }) == ErrorCode::kCheckpoint);
  ::close(file);
  const std::uint8_t byte = 0;
  const Bytes endless(&byte, kMaxNoteBytes + 1);  // refused before it is read
  CHECK(thrown_code([&] { write_checkpoint(full.index, -1, endless); }) == ErrorCode::kCheckpoint);
}

void audit_whole(ClusterIndex& index) {
  while (!index.audit(50).is_whole) {
  }
}

// A checkpoint whose front was written before something happened, and whose blocks were written after it.
template <class Happening>
Buffer written_around(const ClusterIndex& index, const Happening& happening) {
  std::array<int, 2> pipe{};
  CHECK(::pipe(pipe.data()) == 0);
  // More than a pipe takes: the writer waits behind its front
  const std::vector<std::uint8_t> note(std::size_t{1} << 20);
  std::thread writer([&] { write_checkpoint(index, pipe[1], note); });
  const int held = ::fcntl(pipe[0], F_GETPIPE_SZ);
  for (int waiting = 0; waiting < held;) {
    CHECK(::ioctl(pipe[0], FIONREAD, &waiting) == 0);
    std::this_thread::yield();
  }
  happening();
  Buffer data(std::size_t{4} << 20);
  std::size_t size = 0;
  std::thread reader([&] {
    while (const ssize_t count = ::read(pipe[0], data.data() + size, data.size() - size)) {
      CHECK(count > 0);
      size += static_cast<std::size_t>(count);
    }
  });
  writer.join();
  ::close(pipe[1]);
  reader.join();
  ::close(pipe[0]);
  data.resize(size);
  return data;
}

void a_namespace_that_is_forgotten_amid_a_checkpoint_is_no_others_in_it() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const Buffer hashes = hashes_between(0, 5);
  apply(index, one,
        {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes), created(space_id(1), Tier::kHbm, hashes)},
        {own_pools()});
  const Buffer data = written_around(index, [&] {
    apply(index, one, {evicted(space_id(1), Tier::kHbm, hashes)});
    audit_whole(index);
    apply(index, one, {created(space_id(2), Tier::kHbm, hashes)});
  });
  ClusterIndex loaded(kPlenty, kSecret);
  load_checkpoint(loaded, data);
  CHECK(loaded.holders(space_id(0), hashes.data()).size() == 1 && loaded.holders(space_id(1), hashes.data()).empty());
  audit_whole(index);  // now that none is written
  CHECK(index.namespaces().size() == 2);
}

// Numbers of namespaces and pools that were forgotten before a checkpoint are nobody's in it, and nobody's until it is
// written.
void numbers_that_were_free_before_a_checkpoint_are_nobodys_in_it() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const std::uint32_t other = index.instance("other");
  const Buffer hashes = hashes_between(0, 5);
  apply(index, one, {InstanceStarted{}}, {shared_pools("gone")});
  apply(index, other,
        {InstanceStarted{}, created(space_id(0), Tier::kObject, hashes), created(space_id(1), Tier::kHbm, hashes)},
        {shared_pools("kept")});
  apply(index, one, {InstanceStarted{}}, {own_pools()});
  apply(index, other, {evicted(space_id(1), Tier::kHbm, hashes)});
  for (int pass = 0; pass < 3; ++pass) {
    audit_whole(index);
  }
  CHECK(claim_counts(index) == (std::map<std::string, std::uint64_t>{{"kept", 5}}) && index.namespaces().size() == 1);
  const std::vector<Event> since{created(space_id(2), Tier::kHbm, hashes), created(space_id(2), Tier::kObject, hashes)};
  const Buffer data = written_around(index, [&] {
    index.claim("new", space_id(3), hashes);
    apply(index, other, since);
  });
  ClusterIndex loaded(kPlenty, kSecret);
  load_checkpoint(loaded, data);
  CHECK(claim_counts(loaded).size() == 1 && loaded.pool_name(loaded.pool_of(other, Tier::kObject)) == "kept");
  loaded.claim("new", space_id(3), hashes);
  apply(loaded, other, since);
  CHECK(claim_counts(loaded) == (std::map<std::string, std::uint64_t>{{"kept", 10}, {"new", 5}}) &&
        claim_counts(loaded) == claim_counts(index));
  CHECK(loaded.residency_count() == 5 && loaded.state(other) == index.state(other));
  audit_whole(loaded);
  CHECK(loaded.namespaces().size() == 3);
  ClusterIndex next(kPlenty, kSecret);
  apply(index, one, {InstanceStarted{}}, {shared_pools("newer")});  // the number is free now
  load_checkpoint(next, written(index));
  CHECK(claim_counts(next) == claim_counts(index) && next.pool_name(next.pool_of(one, Tier::kObject)) == "newer");
}

}  // namespace

int main() {
  return tests::run(
      {{"what was written is loaded", what_was_written_is_loaded},
       {"a namespace that is forgotten amid a checkpoint is no other's in it",
        a_namespace_that_is_forgotten_amid_a_checkpoint_is_no_others_in_it},
       {"numbers that were free before a checkpoint are nobody's in it",
        numbers_that_were_free_before_a_checkpoint_are_nobodys_in_it},
       {"what others can read is known after a load, and who was excluded is not",
        what_others_can_read_is_known_after_a_load_and_who_was_excluded_is_not},
       {"a snapshot that a checkpoint cuts makes nothing whole", a_snapshot_that_a_checkpoint_cuts_makes_nothing_whole},
       {"pools come in one order, whatever the secret", pools_come_in_one_order_whatever_the_secret},
       {"another version is refused", another_version_is_refused},
       {"a loaded index goes on", a_loaded_index_goes_on},
       {"what happens after the front comes by the events", what_happens_after_the_front_comes_by_the_events},
       {"an empty index has a checkpoint, too", an_empty_index_has_a_checkpoint_too},
       {"no chunk is longer than a mebibyte", no_chunk_is_longer_than_a_mebibyte},
       {"a set of more holders than a chunk tells comes in parts",
        a_set_of_more_holders_than_a_chunk_tells_comes_in_parts},
       {"damage is an error and never a crash", damage_is_an_error_and_never_a_crash},
       {"fields that contradict each other are an error", fields_that_contradict_each_other_are_an_error},
       {"blocks that are told twice count once", blocks_that_are_told_twice_count_once},
       {"a checkpoint beyond capacity is loaded as far as it goes",
        a_checkpoint_beyond_capacity_is_loaded_as_far_as_it_goes},
       {"only an empty index loads one", only_an_empty_index_loads_one},
       {"a file that takes nothing is an error", a_file_that_takes_nothing_is_an_error}});
}
