#include "kvbm/cluster_index.hpp"

#include <algorithm>
#include <bit>
#include <bitset>
#include <cstring>
#include <map>
#include <utility>

#include "kvbm/entropy.hpp"

namespace kvbm {
namespace {

constexpr std::uint32_t kSpaceBits = 0x7FFFFFFF;

}  // namespace

std::size_t ClusterIndex::IdHash::operator()(const NamespaceId& id) const noexcept {
  std::array<std::uint64_t, 2> words;
  std::memcpy(words.data(), id.data(), sizeof words);
  __extension__ using Wide = unsigned __int128;
  const Wide product = Wide{words[0] ^ secret[0]} * (words[1] ^ secret[1]);
  return static_cast<std::size_t>(product ^ (product >> 64));
}

NamespaceId ClusterIndex::random_id() {
  const std::array<std::uint64_t, 2> words{random_word(), random_word()};
  NamespaceId id;
  std::memcpy(id.data(), words.data(), id.size());
  return id;
}

std::array<std::uint64_t, 3> ClusterIndex::random_secret() { return {random_word(), random_word(), random_word()}; }

ClusterIndex::ClusterIndex(std::uint64_t capacity, std::array<std::uint64_t, 3> secret)
    : capacity_(capacity),
      salts_(secret[2]),
      table_(secret[0], secret[1]),
      holder_spaces_(1),
      space_numbers_(0, IdHash{{secret[2] ^ secret[0], ~secret[1]}}),
      object_blocks_(0, space_numbers_.hash_function()) {
  pieces_.reserve(kBatchBlocks);
}

// -- names ------------------------------------------------------------------------------------------------------------

std::uint32_t ClusterIndex::instance(std::string_view name) {
  const std::lock_guard turn(writer_);
  const auto known = instance_numbers_.find(name);
  if (known != instance_numbers_.end() && instances_[known->second].is_known) {
    return known->second;
  }
  const WriteGuard change(lock_);
  const std::uint32_t number = known != instance_numbers_.end() ? known->second : new_instance(name);
  instances_[number].is_known = true;
  return number;
}

std::uint32_t ClusterIndex::new_instance(std::string_view name) {
  while (!dropped_.empty()) {
    const std::uint32_t number = dropped_.back();
    Instance& instance = instances_[number];
    dropped_.pop_back();
    instance.is_listed = false;
    if (!instance.is_known) {
      instance_numbers_.erase(instance.name);
      forget_rank(number);
      instance.name = name;
      instance_numbers_.emplace(name, number);
      rank_by_name(number);
      return number;
    }
  }
  const auto number = static_cast<std::uint32_t>(instances_.size());
  instances_.emplace_back().name = name;
  dropped_.reserve(instances_.capacity());
  instance_numbers_.emplace(name, number);
  rank_by_name(number);
  return number;
}

void ClusterIndex::list_dropped(std::uint32_t number) {
  if (!instances_[number].is_listed) {
    instances_[number].is_listed = true;
    dropped_.push_back(number);
  }
}

std::uint32_t ClusterIndex::find_instance(std::string_view name) const {
  const ReadGuard reading(lock_);
  const auto known = instance_numbers_.find(name);
  return known != instance_numbers_.end() && instances_[known->second].is_known ? known->second : kNone;
}

std::string ClusterIndex::instance_name(std::uint32_t instance) const {
  const ReadGuard reading(lock_);
  return instances_[instance].name;
}

std::size_t ClusterIndex::instance_count() const {
  const ReadGuard reading(lock_);
  return instances_.size();
}

std::uint32_t ClusterIndex::find_pool(std::string_view name) const noexcept {
  const auto known = pool_numbers_.find(name);
  return known != pool_numbers_.end() ? known->second : kNone;
}

void ClusterIndex::name_pools(std::uint32_t number, std::span<const DeclaredPool> pools) {
  for (const DeclaredPool& pool : pools) {
    if (pool.is_cluster && find_pool(pool.name) == kNone && instances_[number].made_pools < kMostPoolsOfOne) {
      pool_number(pool.name, number);
    }
  }
}

std::uint32_t ClusterIndex::pool_number(std::string_view name, std::uint32_t maker) {
  if (const std::uint32_t known = find_pool(name); known != kNone) {
    return known;
  }
  const WriteGuard change(lock_);
  const bool is_another = checkpoints_ == 0 && !free_pools_.empty();  // a checkpoint under way names pools by number
  const auto number = is_another ? free_pools_.back() : static_cast<std::uint32_t>(pools_.size());
  // Whatever needs memory comes first: then nothing is half made
  if (!is_another && pools_.size() == pools_.capacity()) {
    pools_.reserve(2 * pools_.size() + 8);
  }
  for (std::vector<std::uint32_t>* const numbers : {&free_pools_, &left_pools_, &rested_pools_}) {
    numbers->reserve(pools_.capacity());
  }
  Pool made{.name = std::string(name), .blocks = named_blocks(name), .maker = maker};
  pool_numbers_.emplace(name, number);
  if (maker != kNone) {
    made.maker_drops = instances_[maker].drops;
    ++instances_[maker].made_pools;
  }
  if (is_another) {
    free_pools_.pop_back();
    pools_[number] = std::move(made);
  } else {
    pools_.push_back(std::move(made));
  }
  return number;
}

void ClusterIndex::name_pool(TierFold& fold, std::uint32_t pool) noexcept {
  if (fold.pool != kNone) {
    --pools_[fold.pool].named;
  }
  fold.pool = pool;
  if (pool != kNone) {
    ++pools_[pool].named;
  }
}

std::string ClusterIndex::pool_name(std::uint32_t pool) const {
  const ReadGuard reading(lock_);
  return pools_[pool].name;
}

std::uint32_t ClusterIndex::find_space(const NamespaceId& id) const noexcept {
  const auto known = space_numbers_.find(id);
  return known != space_numbers_.end() ? known->second : kNone;
}

void ClusterIndex::forget_namespace(const NamespaceId& id) {
  const std::lock_guard turn(writer_);
  const WriteGuard change(lock_);
  object_blocks_.erase(id);
  const auto known = space_numbers_.find(id);
  if (known == space_numbers_.end()) {
    return;
  }
  const std::uint32_t number = known->second;
  const NamespaceId name = spaces_[number].id = random_id();
  space_numbers_.erase(known);
  space_numbers_.emplace(name, number);
  last_instance_ = kNone;
  last_id_ = {};
}

std::vector<NamespaceId> ClusterIndex::namespaces() const {
  const ReadGuard reading(lock_);
  std::vector<NamespaceId> found;
  found.reserve(spaces_.size());
  for (const auto& space : spaces_) {
    if (!space.is_free) {
      found.push_back(space.id);
    }
  }
  return found;
}

std::uint32_t ClusterIndex::space_of(const NamespaceId& id, std::uint32_t maker) {
  if (const std::uint32_t known = find_space(id); known != kNone) {
    return known;
  }
  const WriteGuard change(lock_);
  const bool is_another = checkpoints_ == 0 && !free_spaces_.empty();  // a checkpoint under way names them by number
  const auto number = is_another ? free_spaces_.back() : static_cast<std::uint32_t>(spaces_.size());
  // Whatever needs memory comes first: then nothing is half made
  if (!is_another && spaces_.size() == spaces_.capacity()) {
    spaces_.reserve(2 * spaces_.size() + 8);
  }
  free_spaces_.reserve(spaces_.capacity());
  space_numbers_.emplace(id, number);
  Namespace made{.id = id, .salt = {salts_(), salts_()}, .pool_holder_spaces = {}, .maker = maker};
  if (maker != kNone) {
    made.maker_drops = instances_[maker].drops;
    ++instances_[maker].made_spaces;
  }
  if (is_another) {
    free_spaces_.pop_back();
    spaces_[number] = std::move(made);
  } else {
    spaces_.push_back(std::move(made));
  }
  return number;
}

std::uint32_t ClusterIndex::bounded_space(const NamespaceId& id, std::uint32_t instance) {
  if (const std::uint32_t known = find_space(id); known != kNone) {
    return known;
  }
  const bool has_room =
      spaces_.size() - free_spaces_.size() < kMostSpaces && instances_[instance].made_spaces < kMostSpacesOfOne;
  return has_room ? space_of(id, instance) : kNone;
}

void ClusterIndex::refuse(std::uint32_t instance, Tier tier, std::uint64_t blocks) {
  count(IndexAnomaly::kRefusedAtCapacity, blocks);
  if (instance != kNone) {
    TierFold& fold = instances_[instance].tiers[at_tier(tier)];
    fold.is_partial = fold.has_refused = true;
  }
}

std::uint32_t ClusterIndex::new_holder_space(const HolderSpace& holder_space) {
  if (!free_holder_spaces_.empty()) {
    const std::uint32_t number = free_holder_spaces_.back();
    free_holder_spaces_.pop_back();
    holder_spaces_[number] = holder_space;
    note_use(number);
    return number;
  }
  if (holder_spaces_.size() == kMaxHolderSpaces) {
    throw std::bad_alloc();
  }
  holder_spaces_.push_back(holder_space);
  free_holder_spaces_.reserve(holder_spaces_.capacity());  // not its size, which would move it for every holder space
  return static_cast<std::uint32_t>(holder_spaces_.size() - 1);
}

std::uint32_t ClusterIndex::bounded_holder_space(std::uint32_t number, std::uint32_t space, Work work) {
  const auto known = holder_space_numbers_.find(std::uint64_t{number} << 32 | space);
  if (known != holder_space_numbers_.end()) {
    note_use(known->second);
    return known->second;
  }
  const bool has_room = work != Work::kEvict && instances_[number].holder_spaces.size() < kMostSpacesOfOne;
  return has_room ? holder_space_of_instance(number, space) : kNone;
}

std::uint32_t ClusterIndex::holder_space_of_instance(std::uint32_t number, std::uint32_t space) {
  const std::uint64_t key = std::uint64_t{number} << 32 | space;
  const auto known = holder_space_numbers_.find(key);
  if (known != holder_space_numbers_.end()) {
    note_use(known->second);
    return known->second;
  }
  const WriteGuard change(lock_);
  Instance& instance = instances_[number];
  HolderSpace holder_space{.holder = number, .space = space & kSpaceBits, .incarnation = instance.incarnation};
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    holder_space.live =
        static_cast<std::uint16_t>(holder_space.live | instance.tiers[tier].live << (tier * kGenerations));
  }
  holder_space.visible = holder_space.live & instance.visible;
  const std::uint32_t made = new_holder_space(holder_space);
  instance.holder_spaces.push_back(made);
  holder_space_numbers_.emplace(key, made);
  ++spaces_[space].holder_spaces;
  return made;
}

std::uint32_t ClusterIndex::holder_space_of_pool(std::uint32_t pool, std::uint32_t space) {
  const std::uint64_t key = kPoolKind | std::uint64_t{pool} << 32 | space;
  const auto known = holder_space_numbers_.find(key);
  if (known != holder_space_numbers_.end()) {
    note_use(known->second);
    return known->second;
  }
  const WriteGuard change(lock_);
  const std::uint32_t made =
      new_holder_space({.holder = pool, .space = space & kSpaceBits, .is_pool = 1, .live = 0x1111, .visible = 0x1111});
  spaces_[space].pool_holder_spaces.push_back(made);
  holder_space_numbers_.emplace(key, made);
  ++spaces_[space].holder_spaces;
  ++pools_[pool].holder_spaces;
  return made;
}

BlockKey ClusterIndex::key_of(std::uint32_t space, const std::uint8_t* hash) const noexcept {
  BlockKey key;
  std::memcpy(&key.low, hash, sizeof key.low);
  std::memcpy(&key.high, hash + sizeof key.low, sizeof key.high);
  const BlockKey& salt = spaces_[space].salt;
  return {key.low ^ salt.low, key.high ^ salt.high};
}

// -- frames → batches -------------------------------------------------------------------------------------------------

AppliedFrame ClusterIndex::apply(std::uint32_t number, Bytes data, std::size_t at, std::uint32_t skip,
                                 std::span<const std::vector<DeclaredPool>> starts) {
  const std::lock_guard turn(writer_);
  forget_batch();
  ++frames_;
  FrameReader reader(data, at);
  AppliedFrame applied;
  std::size_t next_start = 0;
  std::uint32_t position = 0;
  while (const std::optional<Event> event = reader.next()) {
    if (position++ >= skip) {
      take(number, reader.header().epoch, *event, applied, starts, next_start);
    } else {
      next_start += std::holds_alternative<InstanceStarted>(*event) ? 1 : 0;
    }
  }
  flush();
  return applied;
}

AppliedFrame ClusterIndex::apply(std::uint32_t number, std::uint64_t epoch, std::span<const Event> events,
                                 std::span<const std::vector<DeclaredPool>> starts) {
  const std::lock_guard turn(writer_);
  forget_batch();
  ++frames_;
  AppliedFrame applied;
  std::size_t next_start = 0;
  for (const Event& event : events) {
    take(number, epoch, event, applied, starts, next_start);
  }
  flush();
  return applied;
}

void ClusterIndex::take(std::uint32_t number, std::uint64_t epoch, const Event& event, AppliedFrame& applied,
                        std::span<const std::vector<DeclaredPool>> starts, std::size_t& next_start) {
  ++applied.events;
  if (std::holds_alternative<InstanceStarted>(event)) {
    start(number, epoch, starts[next_start++]);
  } else {
    fold(number, event, applied);
  }
}

void ClusterIndex::start(std::uint32_t number, std::uint64_t epoch, std::span<const DeclaredPool> pools) {
  flush();
  name_pools(number, pools);
  const WriteGuard change(lock_);
  kill(number);
  instances_[number].epoch = epoch;
  instances_[number].is_stopped = false;
  declare(instances_[number], pools);
}

void ClusterIndex::fold(std::uint32_t number, const Event& event, AppliedFrame& applied) {
  // instances_ grows only in instance(), which takes its turn like us.
  Instance& instance = instances_[number];
  const auto is_cluster = [&](Tier tier) {
    const TierFold& fold = instance.tiers[at_tier(tier)];
    return fold.is_declared ? fold.is_cluster : tier == Tier::kObject;
  };
  const auto run = [&](Work work, const NamespaceId& id, Tier tier, Bytes hashes) {
    const TierFold& fold = instance.tiers[at_tier(tier)];
    if (!is_cluster(tier)) {
      add_run(work, number, id, tier, hashes);
      return;
    }
    const bool is_withdrawn = work == Work::kEvict;
    applied.claims.push_back({tier, id, hashes, is_withdrawn});
    if (fold.pool == kNone) {
      const WriteGuard change(lock_);
      count(IndexAnomaly::kUnnamedClaim, hashes.size() / kHashBytes);
      return;
    }
    const std::uint32_t space = is_withdrawn ? find_space(id) : bounded_space(id, number);
    if (space == kNone) {
      if (!is_withdrawn) {
        const WriteGuard change(lock_);
        refuse(kNone, tier, hashes.size() / kHashBytes);
      }
      return;
    }
    add({is_withdrawn ? Work::kUnclaim : Work::kClaim, kNone, space, holder_space_of_pool(fold.pool, space), tier,
         hashes.data(), static_cast<std::uint32_t>(hashes.size() / kHashBytes)});
  };
  if (const auto* const created = std::get_if<BlocksCreated>(&event)) {
    applied.blocks += created->hashes.size() / kHashBytes;
    run(Work::kCreate, created->namespace_id, created->tier, created->hashes);
  } else if (const auto* const evicted = std::get_if<BlocksEvicted>(&event)) {
    applied.blocks += evicted->hashes.size() / kHashBytes;
    run(Work::kEvict, evicted->namespace_id, evicted->tier, evicted->hashes);
  } else if (const auto* const migrated = std::get_if<BlocksMigrated>(&event)) {
    applied.blocks += migrated->hashes.size() / kHashBytes;
    run(Work::kCreate, migrated->namespace_id, migrated->target, migrated->hashes);
    const auto* const source = std::get_if<Tier>(&migrated->source);
    if (source != nullptr && !migrated->kept) {
      run(Work::kEvict, migrated->namespace_id, *source, migrated->hashes);
    } else if (source != nullptr && is_cluster(*source)) {
      run(Work::kCreate, migrated->namespace_id, *source, migrated->hashes);  // it was read there, so it is there
    }
  } else if (const auto* const listed = std::get_if<ResidenciesListed>(&event)) {
    applied.blocks += listed->hashes.size() / kHashBytes;
    TierFold& fold = instance.tiers[at_tier(listed->tier)];
    if (listed->snapshot != fold.snapshot) {
      flush();
      begin_snapshot(number, listed->tier, listed->snapshot);
    }
    fold.listed += listed->hashes.size() / kHashBytes;
    run(Work::kState, listed->namespace_id, listed->tier, listed->hashes);
  } else if (const auto* const ended = std::get_if<SnapshotEnded>(&event)) {
    flush();
    end_snapshot(number, *ended);
  } else if (const auto* const stopped = std::get_if<InstanceStopped>(&event)) {
    flush();
    const WriteGuard change(lock_);
    instance.is_stopped = true;
    applied.stopped = stopped->reason;
  }
}

void ClusterIndex::add_run(Work work, std::uint32_t instance, const NamespaceId& id, Tier tier, Bytes hashes) {
  if (instance != last_instance_ || id != last_id_) {
    const std::uint32_t space = work == Work::kEvict ? find_space(id) : bounded_space(id, instance);
    const std::uint32_t holder_space = space == kNone ? kNone : bounded_holder_space(instance, space, work);
    if (holder_space == kNone) {
      const WriteGuard change(lock_);
      if (work == Work::kEvict) {
        count(IndexAnomaly::kEvictedUnheld, hashes.size() / kHashBytes);
      } else {
        refuse(instance, tier, hashes.size() / kHashBytes);
      }
      return;
    }
    last_space_ = space;
    last_holder_space_ = holder_space;
    last_instance_ = instance;
    last_id_ = id;
  }
  add({work, instance, last_space_, last_holder_space_, tier, hashes.data(),
       static_cast<std::uint32_t>(hashes.size() / kHashBytes)});
}

void ClusterIndex::add(const Piece& piece) {
  Piece rest = piece;
  while (rest.count > 0) {
    const auto room = static_cast<std::uint32_t>(kBatchBlocks - piece_blocks_);
    Piece part = rest;
    part.count = std::min(room, rest.count);
    pieces_.push_back(part);
    piece_blocks_ += part.count;
    rest.hashes += std::size_t{part.count} * kHashBytes;
    rest.count -= part.count;
    if (piece_blocks_ == kBatchBlocks) {
      flush();
    }
  }
}

void ClusterIndex::flush() {
  if (!pieces_.empty()) {
    run_batch();
    forget_batch();
  }
}

void ClusterIndex::forget_batch() noexcept {
  pieces_.clear();
  piece_blocks_ = 0;
}

void ClusterIndex::run_batch() {
  // The buckets of the whole batch are fetched before the first is needed. Only writers move them, so this needs no
  // lock.
  std::array<BlockKey, kBatchBlocks> keys;
  std::array<std::uint64_t, kBatchBlocks> places;
  std::array<HolderValue, kBatchBlocks> values;
  std::size_t block = 0;
  for (const Piece& piece : pieces_) {
    for (std::uint32_t index = 0; index < piece.count; ++index, ++block) {
      keys[block] = key_of(piece.space, piece.hashes + std::size_t{index} * kHashBytes);
      places[block] = table_.place(keys[block]);
    }
  }
  table_.find_all({keys.data(), block}, {places.data(), block}, values.data());
  // A key that was not there is not there still, unless this batch has brought it: then its place is marked.
  std::bitset<1024> brought;
  block = 0;
  const std::uint64_t audited_before = audited_before_;
  const WriteGuard change(lock_);
  for (const Piece& piece : pieces_) {
    const std::uint8_t* hash = piece.hashes;
    // What most blocks are, counted here and told once: new to the table, or leaving it.
    TierFold* const fold = piece.instance != kNone ? &instances_[piece.instance].tiers[at_tier(piece.tier)] : nullptr;
    const HolderId holder_id = fold != nullptr ? holder_id_of(piece.holder_space, piece.tier, fold->generation) : 0;
    const bool may_add = fold != nullptr && residencies_ + claims_ + piece.count <= capacity_ &&
                         (piece.work == Work::kCreate || !fold->is_whole);
    std::uint64_t added = 0;
    std::uint64_t mixes = 0;
    std::uint64_t audited = 0;
    for (std::uint32_t index = 0; index < piece.count; ++index, ++block, hash += kHashBytes) {
      const std::size_t mark = places[block] >> 54;
      switch (piece.work) {
        case Work::kCreate:
        case Work::kState: {
          const bool is_new = values[block] == 0 && !brought[mark];
          brought.set(mark);
          if (is_new && may_add) {
            *table_.insert(keys[block], places[block]) = holder_id;
            ++added;
            const std::uint64_t mix = residency_mix(piece.tier, hash);
            mixes += mix;
            audited += BlockTable::rank(places[block]) < audited_before ? mix : 0;
          } else {
            gain(piece, keys[block], places[block], hash, is_new);
          }
          break;
        }
        case Work::kEvict:
          if (HolderValue* const at = values[block] == holder_id ? table_.find(keys[block], places[block]) : nullptr;
              at != nullptr && *at == holder_id) {
            table_.erase(at, places[block]);
            --added;
            const std::uint64_t mix = residency_mix(piece.tier, hash);
            mixes -= mix;
            audited -= BlockTable::rank(places[block]) < audited_before ? mix : 0;
          } else {
            withdraw(piece, keys[block], places[block], hash);
          }
          break;
        case Work::kClaim:
          gain_claim(piece, keys[block], places[block]);
          brought.set(mark);
          break;
        case Work::kUnclaim:
          withdraw_claim(piece, keys[block], places[block]);
          break;
      }
    }
    if (fold != nullptr) {
      residencies_ += added;
      fold->counts[fold->generation] += added;
      fold->digests[fold->generation] += mixes;
      fold->audited[fold->generation] += audited;
    }
  }
}

// -- blocks -----------------------------------------------------------------------------------------------------------

HolderId ClusterIndex::find_holder_id(const HolderValue& value, std::uint32_t holder_space, Tier tier) const noexcept {
  for (const HolderId holder_id : sets_.ids_of_holder_space(value, holder_space)) {
    if (tier_of(holder_id) == tier && is_live(holder_id)) {
      return holder_id;
    }
  }
  return 0;
}

HolderValue ClusterIndex::changed(const SetChange& change) {
  if (change == last_change_ && last_frees_ == sets_.frees() && last_deaths_ == deaths_) {
    sets_.retain(last_result_);
    return last_result_;
  }
  scratch_.clear();
  HolderId added = change.added;
  for (const HolderId holder_id : sets_.holder_ids(change.value)) {
    if ((holder_id >= change.first_removed && holder_id <= change.last_removed) || !is_live(holder_id)) {
      continue;
    }
    if (added != 0 && added < holder_id) {
      scratch_.push_back(std::exchange(added, 0));
    }
    scratch_.push_back(holder_id);
  }
  if (added != 0) {
    scratch_.push_back(added);
  }
  last_result_ = sets_.intern(scratch_);
  last_change_ = change;
  last_frees_ = sets_.frees();
  last_deaths_ = deaths_;
  return last_result_;
}

void ClusterIndex::set_value(HolderValue* at, std::uint64_t place, HolderValue now) {
  const HolderValue before = *at;
  if (now != 0) {
    *at = now;
  } else {
    table_.erase(at, place);
  }
  sets_.release(before);
}

bool ClusterIndex::is_full(const Piece& piece) {
  if (residencies_ + claims_ < capacity_) {
    return false;
  }
  refuse(piece.instance, piece.tier, 1);
  return true;
}

void ClusterIndex::gain(const Piece& piece, BlockKey key, std::uint64_t place, const std::uint8_t* hash, bool is_new) {
  TierFold& fold = instances_[piece.instance].tiers[at_tier(piece.tier)];
  const HolderId holder_id = holder_id_of(piece.holder_space, piece.tier, fold.generation);
  HolderValue* const at = is_new ? nullptr : table_.find(key, place);
  const HolderId old = at == nullptr      ? 0
                       : *at == holder_id ? holder_id
                                          : find_holder_id(*at, piece.holder_space, piece.tier);
  if (old != 0 && piece.work == Work::kCreate) {
    count(IndexAnomaly::kCreatedTwice);
  }
  if (old == holder_id) {
    return;
  }
  const std::uint64_t mix = residency_mix(piece.tier, hash);
  if (old != 0) {  // listed or created again since a snapshot began: it moves to the generation that stays
    set_value(at, place, changed({*at, old, old, holder_id}));
    --fold.counts[generation_of(old)];
    fold.digests[generation_of(old)] -= mix;
    audit_change(fold, generation_of(old), place, -mix);
  } else {
    if (piece.work == Work::kState && fold.is_whole) {
      count(IndexAnomaly::kSnapshotAdded);
    }
    if (is_full(piece)) {
      return;
    }
    if (at == nullptr) {
      *table_.insert(key, place) = holder_id;
    } else {
      set_value(at, place, changed({*at, 1, 0, holder_id}));
    }
    ++residencies_;
  }
  ++fold.counts[fold.generation];
  fold.digests[fold.generation] += mix;
  audit_change(fold, fold.generation, place, mix);
}

void ClusterIndex::withdraw(const Piece& piece, BlockKey key, std::uint64_t place, const std::uint8_t* hash) {
  TierFold& fold = instances_[piece.instance].tiers[at_tier(piece.tier)];
  HolderValue* const at = table_.find(key, place);
  const HolderId holder_id = at == nullptr ? 0 : find_holder_id(*at, piece.holder_space, piece.tier);
  if (holder_id == 0) {
    count(IndexAnomaly::kEvictedUnheld);
    return;
  }
  if (*at == holder_id) {
    table_.erase(at, place);
  } else {
    set_value(at, place, changed({*at, holder_id, holder_id, 0}));
  }
  --residencies_;
  --fold.counts[generation_of(holder_id)];
  const std::uint64_t mix = residency_mix(piece.tier, hash);
  fold.digests[generation_of(holder_id)] -= mix;
  audit_change(fold, generation_of(holder_id), place, -mix);
}

void ClusterIndex::gain_claim(const Piece& piece, BlockKey key, std::uint64_t place) {
  const HolderId holder_id = holder_id_of(piece.holder_space, piece.tier, 0);
  HolderValue* const at = table_.find(key, place);
  if (at != nullptr && find_holder_id(*at, piece.holder_space, piece.tier) != 0) {
    return;
  }
  if (is_full(piece)) {
    return;
  }
  ++claims_;
  if (at == nullptr || sets_.ids_of_holder_space(*at, piece.holder_space).empty()) {
    ++pools_[holder_spaces_[piece.holder_space].holder].claims;
  }
  if (at == nullptr) {
    *table_.insert(key, place) = holder_id;
  } else {
    set_value(at, place, changed({*at, 1, 0, holder_id}));
  }
}

void ClusterIndex::withdraw_claim(const Piece& piece, BlockKey key, std::uint64_t place) {
  HolderValue* const at = table_.find(key, place);
  if (at == nullptr) {
    return;
  }
  const std::size_t claimed = sets_.ids_of_holder_space(*at, piece.holder_space).size();
  if (claimed == 0) {
    return;
  }
  claims_ -= claimed;
  --pools_[holder_spaces_[piece.holder_space].holder].claims;
  const HolderId first = piece.holder_space << 4;
  set_value(at, place, changed({*at, first, first | 15, 0}));
}

// -- epochs and snapshots ---------------------------------------------------------------------------------------------

void ClusterIndex::kill(std::uint32_t number) {
  Instance& instance = instances_[number];
  bool is_referenced = false;
  for (TierFold& fold : instance.tiers) {
    for (const std::uint64_t held : fold.counts) {
      residencies_ -= held;
      is_referenced = is_referenced || held != 0;
    }
    is_referenced = is_referenced || fold.dirty != 0;
    name_pool(fold, kNone);
    fold = TierFold{};
  }
  for (const std::uint32_t holder_space : instance.holder_spaces) {
    holder_space_numbers_.erase(std::uint64_t{number} << 32 | holder_spaces_[holder_space].space);
    --spaces_[holder_spaces_[holder_space].space].holder_spaces;
    holder_spaces_[holder_space].live = holder_spaces_[holder_space].visible = 0;
    (is_referenced ? dead_holder_spaces_ : free_holder_spaces_).push_back(holder_space);
  }
  instance.holder_spaces.clear();
  last_instance_ = kNone;
  instance.declared.clear();
  show(instance);
  ++instance.incarnation;
  ++deaths_;
}

void ClusterIndex::show(Instance& instance) {
  instance.visible = kAllVisible;
  for (std::size_t tier = 0; instance.is_excluded && tier < kTierCount; ++tier) {
    if (!instance.tiers[tier].is_pod) {
      instance.visible = static_cast<std::uint16_t>(instance.visible & ~(0xFU << (tier * kGenerations)));
    }
  }
  for (const std::uint32_t holder_space : instance.holder_spaces) {
    holder_spaces_[holder_space].visible = holder_spaces_[holder_space].live & instance.visible;
  }
}

void ClusterIndex::exclude(std::uint32_t number, bool is_excluded) {
  const std::lock_guard turn(writer_);
  const WriteGuard change(lock_);
  instances_[number].is_excluded = is_excluded;
  show(instances_[number]);
}

void ClusterIndex::declare(Instance& instance, std::span<const DeclaredPool> pools) {
  for (TierFold& fold : instance.tiers) {
    fold.is_declared = fold.is_cluster = fold.is_pod = false;
    name_pool(fold, kNone);
    fold.block_bytes = 0;
  }
  for (const DeclaredPool& pool : pools) {
    TierFold& fold = instance.tiers[at_tier(pool.tier)];
    fold.is_declared = true;
    fold.is_cluster = pool.is_cluster;
    fold.is_pod = pool.is_pod;
    fold.block_bytes = pool.block_bytes;
    name_pool(fold, pool.is_cluster ? find_pool(pool.name) : kNone);
    instance.declared.push_back(pool.words);
  }
  instance.pools_known = true;
  instance.is_proven = false;
  show(instance);
}

void ClusterIndex::begin_blind(std::uint32_t number, std::uint64_t epoch, const std::vector<DeclaredPool>* pools,
                               std::span<const DeclaredPool> likely) {
  const std::lock_guard turn(writer_);
  name_pools(number, pools != nullptr ? std::span<const DeclaredPool>(*pools) : likely);
  const WriteGuard change(lock_);
  Instance& instance = instances_[number];
  std::array<std::uint32_t, kTierCount> names{};
  bool has_names = false;
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    names[tier] = instance.tiers[tier].pool;
    has_names = has_names || names[tier] != kNone;
  }
  kill(number);
  instance.epoch = epoch;
  instance.is_stopped = false;
  if (pools != nullptr) {
    declare(instance, *pools);
    return;
  }
  // Which tiers are the cluster's is not known, so the rule of thumb holds; the names of the last known start are the
  // best guess.
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    name_pool(instance.tiers[tier], names[tier]);
  }
  if (!has_names) {
    for (const DeclaredPool& pool : likely) {
      name_pool(instance.tiers[at_tier(pool.tier)], pool.is_cluster ? find_pool(pool.name) : kNone);
    }
  }
  instance.pools_known = instance.is_proven = false;
}

void ClusterIndex::miss(std::uint32_t number) {
  const std::lock_guard turn(writer_);
  const WriteGuard change(lock_);
  for (TierFold& fold : instances_[number].tiers) {
    fold.is_open = fold.is_whole = false;
  }
  instances_[number].is_proven = false;
}

void ClusterIndex::wait(std::uint32_t number, bool is_waiting) {
  const std::lock_guard turn(writer_);
  const WriteGuard change(lock_);
  instances_[number].is_waiting = is_waiting;
}

bool ClusterIndex::is_whole(const Instance& instance) const noexcept {
  if (!instance.pools_known) {
    return instance.is_proven;
  }
  return std::all_of(instance.tiers.begin(), instance.tiers.end(),
                     [](const TierFold& fold) { return fold.is_whole || !fold.is_declared || fold.is_cluster; });
}

bool ClusterIndex::is_partial(const Instance& instance) const noexcept {
  return std::any_of(instance.tiers.begin(), instance.tiers.end(),
                     [](const TierFold& fold) { return fold.is_partial; });
}

bool ClusterIndex::agrees(std::uint32_t number, std::uint64_t digest) {
  const std::lock_guard turn(writer_);
  Instance& instance = instances_[number];
  std::uint64_t own = 0;
  bool has_snapshot = false;
  for (const TierFold& fold : instance.tiers) {
    for (const std::uint64_t part : fold.digests) {
      own += part;
    }
    has_snapshot = has_snapshot || fold.is_whole;
  }
  const bool is_same = own == digest;
  if (!instance.pools_known && is_same && has_snapshot && !instance.is_proven) {
    const WriteGuard change(lock_);
    instance.is_proven = true;
  }
  return is_same || !is_whole(instance) || is_partial(instance);
}

void ClusterIndex::drop(std::uint32_t number) {
  const std::lock_guard turn(writer_);
  const WriteGuard change(lock_);
  Instance& instance = instances_[number];
  instance.is_excluded = false;
  instance.queued = 0;
  instance.lent_tiers = 0;
  kill(number);
  instance.is_known = instance.is_stopped = instance.pools_known = instance.is_proven = instance.is_waiting = false;
  instance.epoch = 0;
  ++instance.drops;
  instance.made_spaces = instance.made_pools = 0;
  list_dropped(number);
}

void ClusterIndex::retire(std::uint32_t number, Tier tier, std::uint8_t generation) {
  Instance& instance = instances_[number];
  TierFold& fold = instance.tiers[at_tier(tier)];
  const auto bit = static_cast<std::uint8_t>(1U << generation);
  fold.live = static_cast<std::uint8_t>(fold.live & ~bit);
  const auto visibility_bit = static_cast<std::uint16_t>(1U << (at_tier(tier) * kGenerations + generation));
  for (const std::uint32_t holder_space : instance.holder_spaces) {
    holder_spaces_[holder_space].live = static_cast<std::uint16_t>(holder_spaces_[holder_space].live & ~visibility_bit);
    holder_spaces_[holder_space].visible =
        static_cast<std::uint16_t>(holder_spaces_[holder_space].visible & ~visibility_bit);
  }
  fold.audited[generation] = 0;
  if (fold.counts[generation] != 0) {
    residencies_ -= fold.counts[generation];
    fold.counts[generation] = fold.digests[generation] = 0;
    fold.dirty = static_cast<std::uint8_t>(fold.dirty | bit);
    dead_generations_.push_back({number, instance.incarnation, tier, generation});
  }
  ++deaths_;
}

void ClusterIndex::begin_snapshot(std::uint32_t number, Tier tier, std::uint32_t snapshot) {
  TierFold& fold = instances_[number].tiers[at_tier(tier)];
  {
    const WriteGuard change(lock_);
    fold.snapshot = snapshot;
    fold.listed = 0;
    fold.is_open = true;
    fold.has_refused = false;
    // Generations that are empty by now are as good as never used.
    for (std::uint8_t generation = 0; generation < kGenerations; ++generation) {
      if (generation != fold.generation && (fold.live >> generation & 1) != 0 && fold.counts[generation] == 0) {
        retire(number, tier, generation);
      }
    }
    if (fold.counts[fold.generation] == 0) {
      return;
    }
  }
  if ((fold.live | fold.dirty) == (1U << kGenerations) - 1) {
    sweep_all(number, tier);
  }
  const auto generation = static_cast<std::uint8_t>(std::countr_one(static_cast<std::uint8_t>(fold.live | fold.dirty)));
  const WriteGuard change(lock_);
  fold.live = static_cast<std::uint8_t>(fold.live | 1U << generation);
  fold.generation = generation;
  const auto visibility_bit = static_cast<std::uint16_t>(1U << (at_tier(tier) * kGenerations + generation));
  for (const std::uint32_t holder_space : instances_[number].holder_spaces) {
    holder_spaces_[holder_space].live = static_cast<std::uint16_t>(holder_spaces_[holder_space].live | visibility_bit);
    HolderSpace& there = holder_spaces_[holder_space];
    there.visible = static_cast<std::uint16_t>(there.visible | (visibility_bit & instances_[number].visible));
  }
}

void ClusterIndex::end_snapshot(std::uint32_t number, const SnapshotEnded& event) {
  TierFold& fold = instances_[number].tiers[at_tier(event.tier)];
  if (event.snapshot != fold.snapshot) {
    begin_snapshot(number, event.tier, event.snapshot);
  }
  const WriteGuard change(lock_);
  if (!fold.is_open || fold.listed != event.count) {
    count(IndexAnomaly::kSnapshotIncomplete);
    return;
  }
  for (std::uint8_t generation = 0; generation < kGenerations; ++generation) {
    if (generation != fold.generation && (fold.live >> generation & 1) != 0) {
      if (fold.is_whole && event.count != 0) {
        count(IndexAnomaly::kSnapshotWithdrew, fold.counts[generation]);
      }
      retire(number, event.tier, generation);
    }
  }
  fold.is_open = false;
  fold.is_whole = true;
  fold.is_partial = fold.has_refused;
}

// -- claims from elsewhere --------------------------------------------------------------------------------------------

void ClusterIndex::claim_all(std::string_view pool, const NamespaceId& id, Bytes hashes, Work work) {
  const std::lock_guard turn(writer_);
  forget_batch();
  const std::uint32_t space = space_of(id);
  add({work, kNone, space, holder_space_of_pool(pool_number(pool), space), Tier::kObject, hashes.data(),
       static_cast<std::uint32_t>(hashes.size() / kHashBytes)});
  flush();
}

void ClusterIndex::claim(std::string_view pool, const NamespaceId& id, Bytes hashes) {
  claim_all(pool, id, hashes, Work::kClaim);
}

void ClusterIndex::unclaim(std::string_view pool, const NamespaceId& id, Bytes hashes) {
  claim_all(pool, id, hashes, Work::kUnclaim);
}

ClaimPart ClusterIndex::claims(std::uint64_t first, std::size_t pages) const {
  ClaimPart part;
  part.next = std::min(first, BlockTable::kRankEnd);
  std::map<std::uint32_t, std::size_t> runs;  // holder space of a pool → its run
  for (; pages > 0 && part.next != BlockTable::kRankEnd; --pages) {
    const std::lock_guard turn(writer_);  // only writers change what is read here; let go after every stretch
    part.next = table_.visit_ranks(part.next, [&](BlockKey key, std::uint64_t, const HolderValue& value) {
      if ((value & kSetBit) != 0 ? !sets_.has(value) : kvbm::holder_space_of(value) >= holder_spaces_.size()) {
        return;  // damaged: an audit takes it out
      }
      std::uint32_t before = kNone;
      for (const HolderId holder_id : sets_.holder_ids(value)) {
        const auto number = static_cast<std::uint32_t>(kvbm::holder_space_of(holder_id));
        const HolderSpace& holder_space = holder_spaces_[number];
        if (holder_space.is_pool == 0 || number == before) {
          continue;  // a block claimed in two tiers is one claim: holder ids are sorted
        }
        before = number;
        const Namespace& space = spaces_[holder_space.space];
        const auto [run, is_new] = runs.try_emplace(number, part.runs.size());
        if (is_new) {
          part.runs.push_back({holder_space.holder, space.id, {}});
        }
        const std::array<std::uint64_t, 2> hash{key.low ^ space.salt.low, key.high ^ space.salt.high};
        const auto* const bytes = reinterpret_cast<const std::uint8_t*>(hash.data());
        std::vector<std::uint8_t>& hashes = part.runs[run->second].hashes;
        hashes.insert(hashes.end(), bytes, bytes + kHashBytes);
      }
    });
  }
  return part;
}

// -- numbers ----------------------------------------------------------------------------------------------------------

std::optional<InstanceState> ClusterIndex::state(std::uint32_t number) const {
  const ReadGuard reading(lock_);
  if (number >= instances_.size() || !instances_[number].is_known) {
    return std::nullopt;
  }
  const Instance& instance = instances_[number];
  InstanceState state;
  state.epoch = instance.epoch;
  state.is_stopped = instance.is_stopped;
  state.is_partial = is_partial(instance);
  state.is_excluded = instance.is_excluded;
  state.is_waiting = instance.is_waiting;
  state.is_missed = !is_whole(instance);
  state.is_suspect = state.is_waiting || state.is_partial || state.is_missed;
  for (std::size_t tier = 0; tier < kTierCount; ++tier) {
    const TierFold& fold = instance.tiers[tier];
    for (std::size_t generation = 0; generation < kGenerations; ++generation) {
      state.counts[tier] += fold.counts[generation];
      state.digest += fold.digests[generation];
    }
    state.is_listed[tier] = (fold.is_declared && !fold.is_cluster) || state.counts[tier] != 0;
  }
  return state;
}

std::vector<std::string> ClusterIndex::declared_pools(std::uint32_t number) const {
  const ReadGuard reading(lock_);
  return number < instances_.size() ? instances_[number].declared : std::vector<std::string>();
}

std::uint32_t ClusterIndex::pool_of(std::uint32_t number, Tier tier) const {
  const ReadGuard reading(lock_);
  return number < instances_.size() && instances_[number].is_known ? instances_[number].tiers[at_tier(tier)].pool
                                                                   : kNone;
}

std::vector<BlockHolder> ClusterIndex::holders(const NamespaceId& id, const std::uint8_t* hash,
                                               bool is_excluded) const {
  const ReadGuard reading(lock_);
  std::vector<BlockHolder> found;
  const std::uint32_t space = find_space(id);
  if (space == kNone) {
    return found;
  }
  const BlockKey key = key_of(space, hash);
  const HolderValue* const value = table_.find(key, table_.place(key));
  if (value != nullptr) {
    for (const HolderId holder_id : sets_.holder_ids(*value)) {
      if (is_live(holder_id) && is_visible(holder_id) != is_excluded) {
        const HolderSpace& holder_space = holder_spaces_[kvbm::holder_space_of(holder_id)];
        found.push_back({holder_space.holder, holder_space.is_pool != 0, tier_of(holder_id)});
      }
    }
  }
  return found;
}

std::vector<std::pair<std::string, std::uint64_t>> ClusterIndex::claim_counts() const {
  const ReadGuard reading(lock_);
  std::vector<std::pair<std::string, std::uint64_t>> counts;
  counts.reserve(pools_.size());
  for (const Pool& pool : pools_) {
    if (!pool.is_free) {
      counts.emplace_back(pool.name, pool.claims);
    }
  }
  return counts;
}

std::uint64_t ClusterIndex::residency_count() const {
  const ReadGuard reading(lock_);
  return residencies_;
}

std::uint64_t ClusterIndex::block_count() const {
  const ReadGuard reading(lock_);
  return table_.size();
}

std::array<std::uint64_t, kAnomalyCount> ClusterIndex::anomalies() const {
  const ReadGuard reading(lock_);
  return anomalies_;
}

IndexMemory ClusterIndex::memory() const {
  const ReadGuard reading(lock_);
  const std::size_t maps = (space_numbers_.size() + holder_space_numbers_.size()) * 48 + instance_numbers_.size() * 96;
  return {table_.bytes(), sets_.bytes(),
          instances_.capacity() * sizeof(Instance) + holder_spaces_.capacity() * sizeof(HolderSpace) +
              spaces_.capacity() * sizeof(Namespace) + clean_in_.capacity() * sizeof(std::uint32_t) + maps};
}

std::uint64_t ClusterIndex::recomputed_digest(std::uint32_t number) const {
  std::uint64_t digest = 0;
  const std::lock_guard turn(writer_);
  const ReadGuard reading(lock_);
  for (std::size_t shard = 0; shard < BlockTable::kShards; ++shard) {
    for (std::size_t page = 0; page < table_.page_count(shard); ++page) {
      table_.visit_page(shard, page, [&](BlockKey key, const HolderValue& value) {
        for (const HolderId holder_id : sets_.holder_ids(value)) {
          const HolderSpace& holder_space = holder_spaces_[kvbm::holder_space_of(holder_id)];
          if (!holder_space.is_pool && holder_space.holder == number && is_live(holder_id)) {
            const BlockKey& salt = spaces_[holder_space.space].salt;
            const std::array<std::uint64_t, 2> hash{key.low ^ salt.low, key.high ^ salt.high};
            digest += residency_mix(tier_of(holder_id), reinterpret_cast<const std::uint8_t*>(hash.data()));
          }
        }
      });
    }
  }
  return digest;
}

}  // namespace kvbm
