#include "kvbm/ledger.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <set>

#include "kvbm/entropy.hpp"
#include "kvbm/error.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

constexpr std::size_t kPrefetchedBlocks = 32;  // of a long run at a time: more would push out what is needed first

// Throws Error: kLedger, when the slot is not the caller's.
void require_own(const TierSlots& tier, std::uint32_t slot, const char* consequence) {
  const SlotState state = slot < tier.size() ? tier.slot(slot).state : SlotState::kFree;
  if (state == SlotState::kReceiving) {
    throw slot_error(tier.tier(), slot, std::string("belongs to a copy, so ") + consequence);
  }
  if (state != SlotState::kAllocated) {
    throw slot_error(tier.tier(), slot, std::string("is not allocated, so ") + consequence);
  }
}

// Empty tables for pools with slots. Throws Error: kLedger, for what is wrong with a ledger's arguments.
Fold<TierSlots>::Tables tables_for(std::span<const Pool> pools, std::string_view eviction, std::size_t event_bytes,
                                   std::uint64_t seed, const SlotAllocator& allocator) {
  if (eviction != "lru" && eviction != "s3fifo") {
    throw ledger_error("there is no eviction policy '" + std::string(eviction) + "'; use one of lru, s3fifo");
  }
  if (event_bytes < kLeastEventBytes) {
    throw ledger_error("event_bytes is " + std::to_string(event_bytes) + "; give waiting events at least " +
                       std::to_string(kLeastEventBytes));
  }
  Fold<TierSlots>::Tables tables;
  for (const Pool& pool : pools) {
    auto& tier = tables[static_cast<std::size_t>(pool.tier)];
    if (tier != nullptr) {
      throw ledger_error("two pools are of tier " + tier_name(pool.tier) + "; an instance has one of each");
    }
    if (pool.is_cluster && pool.slots > 0) {
      throw ledger_error("the " + tier_name(pool.tier) + " pool is of cluster reach and has " +
                         std::to_string(pool.slots) + " slots; such a pool has none");
    }
    if (pool.slots > 0) {
      tier = std::make_unique<TierSlots>(pool.tier, pool.slots, eviction, seed, allocator.shares(),
                                         allocator.share_numbers());
    }
  }
  return tables;
}

std::vector<PoolStated> listed(std::span<const Pool> pools) {
  std::vector<PoolStated> made;
  for (const Pool& pool : pools) {
    made.push_back({.tier = pool.tier,
                    .slots = WireInteger(pool.slots),
                    .block_bytes = {},
                    .reach = pool.is_cluster ? Reach::kCluster : Reach::kInstance,
                    .name = {}});
  }
  return made;
}

// Tiers with slots, in the order of their pools.
std::vector<TierSlots*> tiers_of(std::span<const Pool> pools, const Recorder& recorder) {
  std::vector<TierSlots*> tiers;
  for (const Pool& pool : pools) {
    if (TierSlots* const tier = recorder.fold().table(pool.tier)) {
      tiers.push_back(tier);
    }
  }
  return tiers;
}

// Whose blocks count: those of one namespace, or everybody's.
class Whose {
 public:
  Whose(const NamespaceTable& namespaces, const NamespaceId* namespace_id) noexcept
      : is_one_(namespace_id != nullptr), number_(is_one_ ? namespaces.find(*namespace_id) : NamespaceTable::kNone) {}

  bool has(const TierSlots& tier, std::uint32_t slot) const noexcept {
    return !is_one_ || tier.owner_of(slot) == number_;
  }

 private:
  const bool is_one_;           // else everybody's
  const std::uint32_t number_;  // of the one
};

// Looks for one block after another in tiers, hottest first, until done(at, tier, slot) says so; tier is nullptr where
// none holds the block for `whose`. A stretch of blocks waits for memory together: for their cells in the hottest
// tier's index, then for the slots that those name.
template <class Done>
void find_blocks(std::span<TierSlots* const> tiers, const Whose& whose, Bytes hashes, Done&& done) {
  const std::size_t count = hashes.size() / kHashBytes;
  std::array<std::uint32_t, kPrefetchedBlocks> tags;
  for (std::size_t begin = 0; begin < count; begin += kPrefetchedBlocks) {
    const std::size_t end = std::min(count, begin + kPrefetchedBlocks);
    for (std::size_t at = begin; at < end && !tiers.empty(); ++at) {
      tags[at - begin] = tiers.front()->tag(hash_at(hashes, at));
      tiers.front()->prefetch(tags[at - begin]);
    }
    for (std::size_t at = begin; at < end && !tiers.empty(); ++at) {
      tiers.front()->prefetch_slot(tags[at - begin]);
    }
    for (std::size_t at = begin; at < end; ++at) {
      const TierSlots* holder = nullptr;
      std::uint32_t slot = kNoSlot;
      for (auto tier = tiers.begin(); slot == kNoSlot && tier != tiers.end(); ++tier) {
        holder = *tier;
        slot = holder->find_tagged(tags[at - begin], hash_at(hashes, at));
        slot = slot == kNoSlot || whose.has(*holder, slot) ? slot : kNoSlot;
      }
      if (done(at, slot == kNoSlot ? nullptr : holder, slot)) {
        return;
      }
    }
  }
}

// Takes back what `index_new` did to blocks [begin, end): new ones are not in the index, slots given are allocated.
void unmark(TierSlots& tier, Bytes slots, std::span<const std::uint32_t> holders, std::size_t begin,
            std::size_t end) noexcept {
  for (std::size_t at = begin; at < end; ++at) {
    const std::uint32_t slot = slot_at(slots, at);
    if (holders[at] == slot) {
      tier.unindex(slot);
    } else if (tier.slot(holders[at]).state == SlotState::kCreating) {
      tier.mark(holders[at], SlotState::kHeld);
    }
    tier.mark(slot, SlotState::kAllocated);
  }
}

// Throws Error: kLedger, for what is wrong with blocks to `create` or `adopt`.
void check_filled(const TierSlots& tier, Bytes hashes, Bytes slots, const char* verb, const char* consequence) {
  const std::size_t count = hashes.size() / kHashBytes;
  std::set<std::string_view> blocks;
  std::set<std::uint32_t> numbers;
  for (std::size_t at = 0; at < count; ++at) {
    blocks.emplace(reinterpret_cast<const char*>(hash_at(hashes, at)), kHashBytes);
    numbers.insert(slot_at(slots, at));
  }
  if (blocks.size() != count || numbers.size() != count) {
    throw ledger_error(std::to_string(count) + " blocks to " + verb + " in " + tier_name(tier.tier()) +
                       " name a hash or a slot twice");
  }
  for (std::size_t at = 0; at < count; ++at) {
    require_own(tier, slot_at(slots, at), consequence);
  }
}

// Finds the slot that holds each block to create: the one given where it is new, which the index knows from now on.
// Whether some block is held already. Throws Error: kLedger, when a slot is not the caller's, or a block or a slot is
// named twice.
bool index_new(TierSlots& tier, Bytes hashes, Bytes slots, std::span<std::uint32_t> holders) {
  const std::size_t count = holders.size();
  bool some_known = false;
  std::array<std::uint32_t, kPrefetchedBlocks> tags;
  for (std::size_t at = 0; at < count; ++at) {
    if (at % kPrefetchedBlocks == 0) {
      for (std::size_t next = at; next < std::min(count, at + kPrefetchedBlocks); ++next) {
        tags[next - at] = tier.tag(hash_at(hashes, next));
        tier.prefetch_gain(tags[next - at], hash_at(hashes, next));
      }
    }
    const std::uint32_t slot = slot_at(slots, at);
    const bool is_own = slot < tier.size() && tier.slot(slot).state == SlotState::kAllocated;
    const std::uint32_t holder = is_own ? tier.index(slot, tags[at % kPrefetchedBlocks], hash_at(hashes, at)) : kNoSlot;
    if (!is_own || (holder != slot && tier.slot(holder).state == SlotState::kCreating)) {
      unmark(tier, slots, holders, 0, at);
      check_filled(tier, hashes, slots, "create", "no block can be created in it");
    }
    some_known = some_known || holder != slot;
    tier.mark(slot, SlotState::kCreating);
    tier.mark(holder, SlotState::kCreating);
    holders[at] = holder;
  }
  for (std::size_t at = 0; some_known && at < count; ++at) {
    if (holders[at] != slot_at(slots, at)) {
      tier.mark(holders[at], SlotState::kHeld);
    }
  }
  return some_known;
}

}  // namespace

Ledger::Ledger(std::span<const Pool> pools, std::string_view eviction, std::size_t event_bytes,
               std::vector<Share> shares)
    : seed_(random_word()),
      allocator_(std::move(shares)),
      recorder_(Fold<TierSlots>(tables_for(pools, eviction, event_bytes, seed_, allocator_), listed(pools)),
                event_bytes),
      snapshots_(tiers_of(pools, recorder_)),
      copies_(seed_),
      hottest_first_(tiers_of(pools, recorder_)),
      distinct_(seed_) {
  std::ranges::sort(hottest_first_, {}, &TierSlots::tier);
}

// -- the life of the stream -------------------------------------------------------------------------------------------

void Ledger::start(std::uint64_t epoch, Bytes started, std::size_t namespaces,
                   std::span<const std::vector<Recovered>, kTierCount> recovered) {
  if (applied() > 0) {
    throw ledger_error("the ledger is in epoch " + std::to_string(this->epoch()) + " already; restart begins another");
  }
  const InstanceStarted event{.blob = started};
  const std::size_t bytes = event_bytes(event);
  recorder_.fold().check(event, {WireInteger(epoch), {}});
  recorder_.begin(epoch, event, bytes, namespaces);
  snapshots_.state_recovered(recorder_, recovered);
}

std::uint64_t Ledger::restart(std::uint64_t epoch, Bytes started, std::size_t namespaces) {
  if (this->epoch() == 0) {
    throw ledger_error("the ledger has not started, so it cannot begin another epoch");
  }
  if (!waiting_frames().empty()) {
    std::size_t events = 0;
    for (const FrameBody& body : waiting_frames()) {
      events += body.event_count;
    }
    throw ledger_error(std::to_string(events) + " events of epoch " + std::to_string(this->epoch()) +
                       " wait; take them before another begins");
  }
  if (epoch <= this->epoch()) {
    throw ledger_error("epoch " + std::to_string(epoch) + " is not newer than epoch " + std::to_string(this->epoch()));
  }
  const InstanceStarted event{.blob = started};
  snapshots_.begin_epoch(recorder_, epoch, event, event_bytes(event), namespaces);
  return applied();
}

void Ledger::stop(StopReason reason) {
  if (!has_overflowed()) {
    const Event event = InstanceStopped{.reason = reason};
    recorder_.record<InstanceStopped>(event, recorder_.admit(event), 0, FindByHash{}, false);
  }
}

void Ledger::record_usage(Bytes report) {
  const Event event = UsageRecorded{.report = report};
  recorder_.record<UsageRecorded>(event, recorder_.admit(event), 0);
}

// -- what an engine asks ----------------------------------------------------------------------------------------------

std::span<TierSlots* const> Ledger::not_hotter_than(Tier hottest) const noexcept {
  const auto first =
      std::ranges::find_if(hottest_first_, [=](const TierSlots* tier) { return tier->tier() >= hottest; });
  return {first, hottest_first_.end()};
}

std::size_t Ledger::find_run(std::span<TierSlots* const> tiers, Bytes hashes, const NamespaceId* namespace_id,
                             bool pinned) {
  const std::size_t count = hash_count(hashes);
  if (tier_bytes_.size() < count) {
    tier_bytes_.resize(count);
  }
  const std::span<std::uint32_t> slots = slot_numbers(count);
  const Whose whose(recorder_.fold().namespaces(), namespace_id);
  std::size_t depth = 0;
  find_blocks(tiers, whose, hashes, [&](std::size_t at, const TierSlots* holder, std::uint32_t slot) {
    if (holder == nullptr) {
      return true;
    }
    tier_bytes_[at] = static_cast<std::uint8_t>(holder->tier());
    slots[at] = slot;
    depth = at + 1;
    if (pinned) {
      holder->prefetch_neighbours(slot);
    }
    return false;
  });
  return depth;
}

Match Ledger::match_of(std::size_t depth) const noexcept {
  return {depth, Bytes(tier_bytes_).first(depth), packed(std::span(slot_numbers_).first(depth))};
}

Match Ledger::match(Bytes hashes, bool pinned, Tier hottest, const NamespaceId* namespace_id) {
  const std::size_t depth = find_run(not_hotter_than(hottest), hashes, namespace_id, pinned);
  TierSlots* const own = find_tier(hottest);
  if (pinned && own != nullptr) {
    for (std::size_t at = 0; at < depth; ++at) {
      if (tier_bytes_[at] == static_cast<std::uint8_t>(hottest)) {
        own->pin(slot_numbers_[at]);
      }
    }
  }
  return match_of(depth);
}

Match Ledger::lend(const NamespaceId& namespace_id, Bytes hashes, Tier coldest) {
  const std::span<TierSlots* const> colder = not_hotter_than(Tier::kHost);
  const auto end = std::ranges::find_if(
      colder, [=](const TierSlots* tier) { return tier->tier() > Tier::kNvme || tier->tier() > coldest; });
  const std::size_t depth = find_run({colder.begin(), end}, hashes, &namespace_id, true);
  for (std::size_t at = 0; at < depth; ++at) {
    find_tier(static_cast<Tier>(tier_bytes_[at]))->pin(slot_numbers_[at]);
  }
  return match_of(depth);
}

Bytes Ledger::holders(Bytes hashes, Tier hottest, const NamespaceId* namespace_id) {
  const std::size_t count = hash_count(hashes);
  if (tier_bytes_.size() < count) {
    tier_bytes_.resize(count);
  }
  const Whose whose(recorder_.fold().namespaces(), namespace_id);
  find_blocks(not_hotter_than(hottest), whose, hashes, [&](std::size_t at, const TierSlots* holder, std::uint32_t) {
    tier_bytes_[at] = holder == nullptr ? kNotHeld : static_cast<std::uint8_t>(holder->tier());
    return false;
  });
  return Bytes(tier_bytes_).first(count);
}

bool Ledger::holds(Tier tier, Bytes hash, const NamespaceId* namespace_id) const noexcept {
  const TierSlots* const slots = find_tier(tier);
  const std::uint32_t slot = slots != nullptr && hash.size() == kHashBytes ? slots->find(hash.data()) : kNoSlot;
  return slot != kNoSlot && Whose(recorder_.fold().namespaces(), namespace_id).has(*slots, slot);
}

Bytes Ledger::lacking(Tier tier, Bytes hashes) {
  const std::size_t count = hash_count(hashes);
  const TierSlots* const slots = find_tier(tier);
  if (slots == nullptr) {
    return hashes;
  }
  chosen_hashes_.clear();
  for (std::size_t at = 0; at < count; ++at) {
    if (slots->find(hash_at(hashes, at)) == kNoSlot) {
      append(chosen_hashes_, hash_at(hashes, at));
    }
  }
  return chosen_hashes_;
}

std::vector<std::uint8_t> Ledger::held(Tier tier) const {
  std::vector<std::uint8_t> hashes;
  if (const TierSlots* const slots = find_tier(tier)) {
    for (const std::uint32_t slot : slots->held()) {
      append(hashes, slots->hash_of(slot));
    }
  }
  return hashes;
}

HeldBlocks Ledger::held_of(Tier tier, const NamespaceId* namespace_id) const {
  HeldBlocks found;
  if (const TierSlots* const slots = find_tier(tier)) {
    const NamespaceTable& namespaces = recorder_.fold().namespaces();
    for (const std::uint32_t slot : slots->held()) {
      if (namespace_id == nullptr || namespaces[slots->owner_of(slot)] == *namespace_id) {
        append(found.hashes, slots->hash_of(slot));
        found.slots.push_back(slot);
      }
    }
  }
  return found;
}

void Ledger::pin(Tier tier, Bytes slots) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = slot_count(slots);
  for (std::size_t at = 0; at < count; ++at) {
    if (const std::uint32_t slot = slot_at(slots, at); !state.is_held(slot)) {
      throw slot_error(tier, slot, "holds no block, so it cannot be pinned");
    }
  }
  for (std::size_t at = 0; at < count; ++at) {
    state.pin(slot_at(slots, at));
  }
}

void Ledger::unpin(Tier tier, Bytes slots, bool read) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = slot_count(slots);
  // Slots that have lost their last pin, in the order they lost it
  const std::span<std::uint32_t> last = slot_numbers(count);
  std::size_t unpinned = 0;
  // In numbers alone, until it is known that each slot has the pins it is to lose
  for (std::size_t at = count; at-- > 0;) {
    const std::uint32_t slot = slot_at(slots, at);
    if (slot >= state.size() || state.slot(slot).pins == 0) {
      for (std::size_t before = at + 1; before < count; ++before) {
        state.count_pin(slot_at(slots, before));
      }
      throw slot_error(tier, slot, "is not pinned, so it cannot be unpinned");
    }
    if (state.discount_pin(slot)) {
      last[unpinned++] = slot;
    }
  }
  for (std::size_t at = 0; read && at < count; ++at) {
    state.end_reading(slot_at(slots, at));
  }
  for (std::size_t at = 0; at < unpinned; ++at) {
    state.settle_unpinned(last[at]);
  }
}

std::optional<Allocation> Ledger::allocate(Tier tier, std::size_t count, const NamespaceId* namespace_id) {
  return allocator_.allocate(recorder_, tier_slots(tier), count, namespace_id);
}

void Ledger::release(Tier tier, Bytes slots) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = slot_count(slots);
  // marked, so that a slot named twice is seen before anything is given back
  for (std::size_t at = 0; at < count; ++at) {
    const std::uint32_t slot = slot_at(slots, at);
    try {
      require_own(state, slot, "it cannot be released");
    } catch (const Error&) {
      for (std::size_t before = 0; before < at; ++before) {
        state.mark(slot_at(slots, before), SlotState::kAllocated);
      }
      throw;
    }
    state.mark(slot, SlotState::kCreating);
  }
  for (std::size_t at = 0; at < count; ++at) {
    state.give_back(slot_at(slots, at));
  }
}

// A block that is held already keeps its slot, and the one given goes back. The others are new: an event for each run
// of them.
Bytes Ledger::create(const NamespaceId& namespace_id, Tier tier, const SequenceHash& parent, std::uint64_t start,
                     Bytes hashes, Bytes slots) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = hash_count(hashes);
  const std::size_t given = slot_count(slots);
  if (const std::string why = misplaced(parent, start); !why.empty()) {
    throw ledger_error("blocks to create in " + tier_name(tier) + ": " + why +
                       "; give NO_PARENT with start 0, and the hash of the block before with a later start");
  }
  if (count != given) {
    throw ledger_error(std::to_string(count) + " hashes for " + std::to_string(given) +
                       " slots; give one slot a block");
  }
  if (start + count > std::uint64_t{1} << 32) {
    throw Error(ErrorCode::kLayout, "a number does not fit the frame: " + std::to_string(start));
  }
  const std::span<std::uint32_t> holders = slot_numbers(count);  // the slot given where the block is new
  const bool some_known = index_new(state, hashes, slots, holders);
  const auto is_new = [&](std::size_t at) { return holders[at] == slot_at(slots, at); };
  const Whose whose(recorder_.fold().namespaces(), &namespace_id);
  for (std::size_t at = 0; some_known && at < count; ++at) {
    if (!is_new(at) && !whose.has(state, holders[at])) {
      unmark(state, slots, holders, 0, count);
      throw ledger_error("block " + std::to_string(at) + " of " + std::to_string(count) + " to create in " +
                         tier_name(tier) +
                         " is held there under another namespace; hash each prompt from its own namespace's root");
    }
  }
  for (std::size_t begin = 0, end = 0; begin < count; begin = end) {
    const bool fresh = is_new(begin);
    while (end < count && is_new(end) == fresh && !(fresh && end - begin == kMaxRunBlocks)) {
      ++end;
    }
    if (!fresh) {
      for (std::size_t at = begin; at < end; ++at) {
        state.give_back(slot_at(slots, at));
      }
      continue;
    }
    SequenceHash before = parent;
    if (begin > 0) {
      std::copy_n(hash_at(hashes, begin - 1), kHashBytes, before.begin());
    }
    try {
      create_run(state, namespace_id, before, start + begin, blocks_of(hashes, begin, end),
                 slots.subspan(begin * kSlotBytes, (end - begin) * kSlotBytes));
    } catch (...) {
      unmark(state, slots, holders, begin, count);
      for (std::size_t at = begin; at-- > 0;) {  // what is recorded is held, by nobody
        if (is_new(at)) {
          state.enter(holders[at], false);
        }
      }
      throw;
    }
  }
  for (std::size_t at = count; at-- > 0;) {  // the deepest enters the policy first, so that it leaves first
    if (is_new(at)) {
      state.enter(holders[at], true);
    }
  }
  for (std::size_t at = 0; some_known && at < count; ++at) {
    if (!is_new(at)) {
      state.pin(holders[at]);
    }
  }
  return packed(holders);
}

// Records one run of new blocks, whose hashes the index knows.
void Ledger::create_run(const TierSlots& tier, const NamespaceId& namespace_id, const SequenceHash& parent,
                        std::uint64_t start, Bytes hashes, Bytes slots) {
  const Event event = BlocksCreated{.namespace_id = namespace_id,
                                    .tier = tier.tier(),
                                    .start = static_cast<std::uint32_t>(start),
                                    .parent = parent,
                                    .hashes = hashes,
                                    .slots = slots};
  const std::size_t bytes = recorder_.admit(event);
  recorder_.record<BlocksCreated>(event, bytes, recorder_.fold().namespaces().intern(namespace_id));
}

std::size_t Ledger::evict(Tier tier, Bytes hashes, EvictReason reason) {
  TierSlots& state = tier_slots(tier);
  hash_count(hashes);
  const Bytes blocks = distinct_.of(hashes);
  const std::span<std::uint32_t> victims = slot_numbers(blocks.size() / kHashBytes);
  std::size_t count = 0;
  for (std::size_t at = 0; at < victims.size(); ++at) {
    if (const std::uint32_t slot = state.find(hash_at(blocks, at)); slot != kNoSlot) {
      victims[count++] = slot;
    }
  }
  allocator_.withdraw(recorder_, state, victims.first(count), reason);
  return count;
}

void Ledger::forget(Tier tier, const NamespaceId& namespace_id, Bytes hashes, EvictReason reason) {
  if (!recorder_.fold().is_cluster(tier)) {
    throw ledger_error(tier_name(tier) + " is not a pool of cluster reach; use evict");
  }
  const Event event = BlocksEvicted{.namespace_id = namespace_id, .tier = tier, .reason = reason, .hashes = hashes};
  const std::size_t bytes = recorder_.admit(event);
  recorder_.fold().check_distinct(tier, hashes);
  recorder_.record<BlocksEvicted>(event, bytes, recorder_.fold().namespaces().intern(namespace_id));
}

void Ledger::claim(Tier tier, const NamespaceId& namespace_id, Bytes hashes, std::string_view finder) {
  if (!recorder_.fold().is_cluster(tier)) {
    throw ledger_error(tier_name(tier) + " is not a pool of cluster reach; its blocks are created or copied");
  }
  const Event event = BlocksMigrated{.namespace_id = namespace_id,
                                     .source = finder,
                                     .target = tier,
                                     .kept = true,
                                     .cause = MigrateCause::kOffload,
                                     .hashes = hashes,
                                     .slots = {}};
  const std::size_t bytes = recorder_.admit(event);
  recorder_.fold().check_distinct(tier, hashes);
  recorder_.record<BlocksMigrated>(event, bytes, recorder_.fold().namespaces().intern(namespace_id));
}

std::size_t Ledger::adopt(const NamespaceId& namespace_id, Tier tier, Bytes hashes, Bytes slots,
                          std::string_view finder) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = hash_count(hashes);
  if (count != slot_count(slots)) {
    throw ledger_error(std::to_string(count) + " hashes for " + std::to_string(slots.size() / kSlotBytes) +
                       " slots; give one slot a block");
  }
  check_filled(state, hashes, slots, "adopt", "no block can be adopted in it");
  chosen_hashes_.clear();
  chosen_hashes_.reserve(count * kHashBytes);  // before slots are given back
  const std::span<std::uint32_t> fresh = slot_numbers(count);
  std::size_t fresh_count = 0;
  for (std::size_t at = 0; at < count; ++at) {
    if (state.find(hash_at(hashes, at)) == kNoSlot) {
      append(chosen_hashes_, hash_at(hashes, at));
      fresh[fresh_count++] = slot_at(slots, at);
    } else {
      state.give_back(slot_at(slots, at));
    }
  }
  std::size_t gained = 0;
  const auto settle = [&]() noexcept {
    for (std::size_t at = gained; at < fresh_count; ++at) {
      state.give_back(fresh[at]);
    }
    for (std::size_t at = gained; at-- > 0;) {  // the deepest enters the policy first, so that it leaves first
      state.enter(fresh[at], false);
    }
  };
  while (gained < fresh_count && !recorder_.is_closed(tier) && !recorder_.fold().is_stopped()) {
    const std::size_t end = std::min(fresh_count, gained + kMaxRunBlocks);
    const BlocksMigrated found{.namespace_id = namespace_id,
                               .source = finder,
                               .target = tier,
                               .kept = true,
                               .cause = MigrateCause::kOffload,
                               .hashes = blocks_of(chosen_hashes_, gained, end),
                               .slots = packed(fresh.subspan(gained, end - gained))};
    try {
      const Event event = found;
      const std::size_t bytes = recorder_.admit(event);
      recorder_.fold().check_source(found);  // of the tier, it is known that it does not hold them
      recorder_.record<BlocksMigrated>(event, bytes, recorder_.fold().namespaces().intern(namespace_id));
    } catch (...) {
      settle();
      throw;
    }
    gained = end;
  }
  settle();
  return gained;
}

std::size_t Ledger::keep(Tier tier, Bytes hashes, double until_s, std::int64_t priority,
                         const NamespaceId* namespace_id, bool until_read, std::optional<std::size_t> most) {
  TierSlots& state = tier_slots(tier);
  if (priority < 0 || priority > kHighestPriority) {
    throw ledger_error("priority is " + std::to_string(priority) + "; give 0 to " + std::to_string(kHighestPriority));
  }
  if (std::isnan(until_s)) {
    throw ledger_error("until_s is not a number; give a time on the clock that expire is told");
  }
  std::size_t count = 0;
  const std::size_t blocks = hash_count(hashes);
  const Whose whose(recorder_.fold().namespaces(), namespace_id);
  for (std::size_t at = 0; at < blocks; ++at) {
    if (const std::uint32_t slot = state.find(hash_at(hashes, at)); slot != kNoSlot && whose.has(state, slot)) {
      if (most && state.slot(slot).priority == kNotKept &&
          (state.kept_count() >= *most || allocator_.holds_half(state, slot))) {
        break;
      }
      state.keep(slot, until_s, static_cast<std::uint8_t>(priority), until_read);
      ++count;
    }
  }
  return count;
}

std::size_t Ledger::expire(double now_s) {
  std::size_t count = 0;
  for (TierSlots* const tier : hottest_first_) {
    count += tier->expire(now_s);
  }
  return count;
}

// -- inside -----------------------------------------------------------------------------------------------------------

TierSlots& Ledger::tier_slots(Tier tier) const {
  TierSlots* const slots = find_tier(tier);
  if (slots == nullptr) {
    throw ledger_error("this instance has no " + tier_name(tier) + " pool with slots");
  }
  return *slots;
}

std::span<std::uint32_t> Ledger::slot_numbers(std::size_t count) {
  if (slot_numbers_.size() < count) {
    slot_numbers_.resize(count);
  }
  return std::span(slot_numbers_).first(count);
}

}  // namespace kvbm
