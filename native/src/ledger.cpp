#include "kvbm/ledger.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <type_traits>

#include "kvbm/entropy.hpp"
#include "kvbm/error.hpp"

namespace kvbm {
namespace {

constexpr const char* kTierNames[kTierCount] = {"HBM", "HOST", "NVME", "OBJECT"};
constexpr const char* kEventNames[] = {"InstanceStarted",   "BlocksCreated", "BlocksMigrated", "BlocksEvicted",
                                       "ResidenciesStated", "RoundEnded",    "InstanceStopped"};
constexpr std::size_t kStoppedBytes = 2;       // of an InstanceStopped, whose room is always kept
constexpr std::size_t kPrefetchedBlocks = 32;  // of a long run at a time: more would push out what is needed first

std::string name(Tier tier) { return kTierNames[static_cast<std::size_t>(tier)]; }

bool is_durable(Tier tier) noexcept { return tier == Tier::kNvme || tier == Tier::kObject; }

Error ledger_error(std::string detail) { return {ErrorCode::kLedger, std::move(detail)}; }

// The first 8 hex digits, for messages.
std::string shortened(const std::uint8_t* hash_or_id) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (int byte = 0; byte < 4; ++byte) {
    text += kDigits[hash_or_id[byte] >> 4];
    text += kDigits[hash_or_id[byte] & 15];
  }
  return text;
}

std::size_t hash_count(Bytes hashes) {
  if (hashes.size() % kHashBytes != 0) {
    throw Error(ErrorCode::kLayout, "a run of hashes has " + std::to_string(hashes.size()) +
                                        " bytes, which is no multiple of " + std::to_string(kHashBytes));
  }
  return hashes.size() / kHashBytes;
}

std::size_t slot_count(Bytes slots) {
  if (slots.size() % kSlotBytes != 0) {
    throw Error(ErrorCode::kLayout, "a run of slots has " + std::to_string(slots.size()) +
                                        " bytes, which is no multiple of " + std::to_string(kSlotBytes));
  }
  return slots.size() / kSlotBytes;
}

const std::uint8_t* hash_at(Bytes hashes, std::size_t index) noexcept { return hashes.data() + index * kHashBytes; }

std::uint32_t slot_at(Bytes slots, std::size_t index) noexcept {
  std::uint32_t slot = 0;
  std::memcpy(&slot, slots.data() + index * kSlotBytes, kSlotBytes);
  return slot;
}

Bytes packed(std::span<const std::uint32_t> slots) noexcept {
  return {reinterpret_cast<const std::uint8_t*>(slots.data()), slots.size_bytes()};
}

Bytes blocks_of(Bytes hashes, std::size_t begin, std::size_t end) noexcept {
  return hashes.subspan(begin * kHashBytes, (end - begin) * kHashBytes);
}

void append(std::vector<std::uint8_t>& hashes, const std::uint8_t* hash) {
  hashes.insert(hashes.end(), hash, hash + kHashBytes);
}

// The sum of a run's residencies, as the digest counts them.
std::uint64_t mixes(Tier tier, Bytes hashes) noexcept {
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
    sum += residency_mix(tier, hashes.data() + at);
  }
  return sum;
}

// Throws Error: kLedger, when the slot is not the caller's.
void require_own(const TierSlots& tier, std::uint32_t slot, const char* consequence) {
  const SlotState state = slot < tier.size() ? tier.slot(slot).state : SlotState::kFree;
  if (state == SlotState::kReceiving) {
    throw ledger_error(name(tier.tier()) + " slot " + std::to_string(slot) + " belongs to a copy, so " + consequence);
  }
  if (state != SlotState::kAllocated) {
    throw ledger_error(name(tier.tier()) + " slot " + std::to_string(slot) + " is not allocated, so " + consequence);
  }
}

// Shares with that of all others last. Throws Error: kLedger, when a tenant is named twice or a weight is none.
std::vector<Share> with_others(std::vector<Share> shares) {
  if (shares.empty()) {
    return shares;
  }
  std::set<std::string_view> tenants;
  for (const Share& share : shares) {
    if (share.weight < 1) {
      throw ledger_error("the share of tenant '" + share.tenant + "' has weight 0; a weight is at least 1");
    }
    tenants.insert(share.tenant);
  }
  if (tenants.size() < shares.size()) {
    throw ledger_error(std::to_string(shares.size()) + " shares name " + std::to_string(tenants.size()) +
                       " tenants; a tenant has one share");
  }
  const auto others = std::ranges::find(shares, kOthers, &Share::tenant);
  if (others != shares.end()) {
    std::rotate(others, others + 1, shares.end());
  } else {
    shares.push_back({.tenant = kOthers});
    shares.back().quota.fill(kNoQuota);
  }
  return shares;
}

Error repeated_in_run(Tier tier, const char* what) {
  return Error::illegal_event("repeated-in-run", "a run in " + name(tier) + " names a " + what + " twice");
}

// Looks for one block after another in tiers, hottest first, until done(at, tier, slot) says so; tier is nullptr where none
// holds the block.
template <class Done>
void find_blocks(std::span<TierSlots* const> tiers, Bytes hashes, Done&& done) {
  const std::size_t count = hashes.size() / kHashBytes;
  for (std::size_t begin = 0; begin < count; begin += kPrefetchedBlocks) {
    const std::size_t end = std::min(count, begin + kPrefetchedBlocks);
    for (std::size_t at = begin; at < end && !tiers.empty(); ++at) {
      tiers.front()->prefetch(hash_at(hashes, at));
    }
    for (std::size_t at = begin; at < end; ++at) {
      const TierSlots* holder = nullptr;
      std::uint32_t slot = kNoSlot;
      for (auto tier = tiers.begin(); slot == kNoSlot && tier != tiers.end(); ++tier) {
        holder = *tier;
        slot = holder->find(hash_at(hashes, at));
      }
      if (done(at, slot == kNoSlot ? nullptr : holder, slot)) {
        return;
      }
    }
  }
}

}  // namespace

Ledger::Ledger(std::span<const Pool> pools, std::string_view eviction, std::size_t event_bytes, std::vector<Share> shares)
    : shares_(with_others(std::move(shares))),
      share_of_(std::make_unique<std::vector<std::uint32_t>>()),
      event_bytes_(event_bytes),
      seed_(random_word()) {
  if (eviction != "lru" && eviction != "s3fifo") {
    throw ledger_error("there is no eviction policy '" + std::string(eviction) + "'; use one of lru, s3fifo");
  }
  if (event_bytes < kLeastEventBytes) {
    throw ledger_error("event_bytes is " + std::to_string(event_bytes) + "; give waiting events at least " +
                       std::to_string(kLeastEventBytes));
  }
  is_cluster_[static_cast<std::size_t>(Tier::kObject)] = true;  // unless a pool says otherwise
  for (const Pool& pool : pools) {
    auto& tier = tiers_[static_cast<std::size_t>(pool.tier)];
    if (tier != nullptr) {
      throw ledger_error("two pools are of tier " + name(pool.tier) + "; an instance has one of each");
    }
    if (pool.is_cluster && pool.slots > 0) {
      throw ledger_error("the " + name(pool.tier) + " pool is of cluster reach and has " + std::to_string(pool.slots) +
                         " slots; such a pool has none");
    }
    is_cluster_[static_cast<std::size_t>(pool.tier)] = pool.is_cluster;
    if (pool.slots > 0) {
      tier = std::make_unique<TierSlots>(pool.tier, pool.slots, eviction, seed_, shares_, share_of_.get());
      in_order_.push_back(tier.get());
    }
  }
  for (const auto& tier : tiers_) {
    if (tier != nullptr) {
      hottest_first_.push_back(tier.get());
    }
  }
}

// -- the life of the stream --------------------------------------------------------------------------------------------

void Ledger::start(std::uint64_t epoch, Bytes started, std::size_t namespaces,
                   std::span<const std::vector<Recovered>, kTierCount> recovered) {
  if (applied_ > 0) {
    throw ledger_error("the ledger is in epoch " + std::to_string(epoch_) + " already; restart begins another");
  }
  const InstanceStarted event{.blob = started};
  const std::size_t bytes = admit(event);
  if (epoch == 0) {
    throw Error::illegal_event("epoch-not-newer", "epoch 0 begins after epoch 0");
  }
  epoch_ = epoch;
  record(event, bytes, 0, digest_, false, namespaces);
  round_ = 1;
  for (TierSlots* const tier : in_order_) {
    recover(*tier, recovered[static_cast<std::size_t>(tier->tier())]);
  }
}

void Ledger::recover(TierSlots& tier, std::span<const Recovered> entries) {
  std::vector<std::uint32_t> slots;
  for (const Recovered& entry : entries) {
    slots.push_back(entry.slot);
  }
  if (!slots.empty() && std::ranges::max(slots) >= tier.size()) {
    throw ledger_error(name(tier.tier()) + " slot " + std::to_string(std::ranges::max(slots)) +
                       " was recovered; the pool has " + std::to_string(tier.size()));
  }
  tier.reserve(slots);
  std::vector<std::uint32_t> fresh;
  for (std::size_t begin = 0, end = 0; begin < entries.size(); begin = end) {
    while (end < entries.size() && end - begin < kMaxRunBlocks &&
           entries[end].namespace_id == entries[begin].namespace_id) {
      ++end;
    }
    state_recovered(tier, entries.subspan(begin, end - begin), fresh);
  }
  const RoundEnded ended{.tier = tier.tier(), .round = round_, .count = static_cast<std::uint32_t>(entries.size())};
  record(ended, admit(ended), 0, digest_, false);
  for (const std::uint32_t slot : fresh) {
    tier.enter(slot, false);
  }
}

void Ledger::state_recovered(TierSlots& tier, std::span<const Recovered> run, std::vector<std::uint32_t>& fresh) {
  run_hashes_.clear();
  slot_numbers_.clear();
  for (const Recovered& entry : run) {
    append(run_hashes_, entry.hash.data());
    slot_numbers_.push_back(entry.slot);
  }
  const ResidenciesStated event{.namespace_id = run.front().namespace_id,
                                .tier = tier.tier(),
                                .round = round_,
                                .hashes = run_hashes_,
                                .slots = packed(slot_numbers_)};
  const std::size_t bytes = admit(event);
  if (distinct(run_hashes_).size() != run_hashes_.size()) {
    throw repeated_in_run(tier.tier(), "block");
  }
  std::uint64_t digest = digest_;
  for (const Recovered& entry : run) {
    const std::uint32_t holder = tier.find(entry.hash.data());
    if (holder == kNoSlot) {
      digest += residency_mix(tier.tier(), entry.hash.data());
    } else if (holder != entry.slot || namespaces_[tier.slot(holder).namespace_index] != entry.namespace_id) {
      throw Error::illegal_event("moved-silently", name(tier.tier()) + " round states " + shortened(entry.hash.data()) +
                                                       " in slot " + std::to_string(entry.slot) + "; it is in slot " +
                                                       std::to_string(holder));
    }
  }
  if (std::set<std::uint32_t>(slot_numbers_.begin(), slot_numbers_.end()).size() != slot_numbers_.size()) {
    throw repeated_in_run(tier.tier(), "slot");
  }
  for (const Recovered& entry : run) {
    const Slot& slot = tier.slot(entry.slot);
    if (slot.state == SlotState::kHeld && slot.hash != entry.hash) {
      throw Error::illegal_event("slot-reused", name(tier.tier()) + " slot " + std::to_string(entry.slot) +
                                                    " still holds " + shortened(slot.hash.data()));
    }
  }
  const std::uint32_t namespace_index = namespaces_.intern(event.namespace_id);
  record(event, bytes, namespace_index, digest, false);
  for (const Recovered& entry : run) {
    if (!tier.is_held(entry.slot)) {
      tier.index(entry.slot, entry.hash.data());
      tier.gain(entry.slot, namespace_index);
      fresh.push_back(entry.slot);
    }
  }
}

std::uint64_t Ledger::restart(std::uint64_t epoch, Bytes started, std::size_t namespaces) {
  if (epoch_ == 0) {
    throw ledger_error("the ledger has not started, so it cannot begin another epoch");
  }
  if (!waiting_.bodies().empty()) {
    std::size_t events = 0;
    for (const FrameBody& body : waiting_.bodies()) {
      events += body.event_count;
    }
    throw ledger_error(std::to_string(events) + " events of epoch " + std::to_string(epoch_) +
                       " wait; take them before another begins");
  }
  if (epoch <= epoch_) {
    throw ledger_error("epoch " + std::to_string(epoch) + " is not newer than epoch " + std::to_string(epoch_));
  }
  const InstanceStarted event{.blob = started};
  const std::size_t bytes = admit(event);
  epoch_ = epoch;
  applied_ = 0;
  stopped_ = overflowed_ = false;
  round_left_.clear();
  record(event, bytes, 0, 0, false, namespaces);
  round_ = 1;
  for (TierSlots* const tier : in_order_) {
    state_held(*tier);
  }
  for (TierSlots* const tier : in_order_) {
    if (is_durable(tier->tier())) {
      tier->withdraw_unheld(applied_);
    }
  }
  return applied_;
}

// States all a tier holds, by namespace id, within one by slot, and ends the round there.
void Ledger::state_held(TierSlots& tier) {
  std::vector<std::vector<std::uint32_t>> by_namespace;
  for (std::uint32_t slot = tier.next_held(0); slot != kNoSlot; slot = tier.next_held(slot + 1)) {
    const std::uint32_t namespace_index = tier.slot(slot).namespace_index;
    by_namespace.resize(std::max(by_namespace.size(), namespace_index + std::size_t{1}));
    by_namespace[namespace_index].push_back(slot);
  }
  std::vector<std::uint32_t> order;
  for (std::uint32_t namespace_index = 0; namespace_index < by_namespace.size(); ++namespace_index) {
    order.push_back(namespace_index);
  }
  std::ranges::sort(order, {}, [this](std::uint32_t index) -> const NamespaceId& { return namespaces_[index]; });
  std::uint32_t count = 0;
  run_hashes_.clear();
  slot_numbers_.clear();
  for (const std::uint32_t namespace_index : order) {
    const std::span<const std::uint32_t> slots = by_namespace[namespace_index];
    for (std::size_t begin = 0; begin < slots.size(); begin += kMaxRunBlocks) {
      for (const std::uint32_t slot : slots.subspan(begin, std::min(kMaxRunBlocks, slots.size() - begin))) {
        append(run_hashes_, tier.slot(slot).hash.data());
        slot_numbers_.push_back(slot);
        tier.gain_again(slot);
        ++count;
      }
      state_run(tier, false, digest_ + mixes(tier.tier(), run_hashes_));
    }
  }
  const RoundEnded ended{.tier = tier.tier(), .round = round_, .count = count};
  record(ended, admit(ended), 0, digest_, false);
}

void Ledger::stop(StopReason reason) {
  if (!overflowed_) {
    const InstanceStopped event{.reason = reason};
    record(event, admit(event), 0, digest_, false);
    stopped_ = true;
  }
}

void Ledger::clear_waiting() noexcept {
  waiting_.clear();
  waiting_bytes_ = 0;
}

// The encoded size of an event that may be recorded now. Throws Error: kLayout, kIllegalEvent.
std::size_t Ledger::admit(const Event& event) const {
  const std::size_t bytes = event_bytes(event);
  if (!std::holds_alternative<InstanceStarted>(event)) {
    require_open(kEventNames[event.index()]);
  }
  return bytes;
}

// Throws Error: kIllegalEvent, when no event of that name may be recorded now.
void Ledger::require_open(const char* event_name) const {
  if (epoch_ == 0) {
    throw Error::illegal_event("not-started", std::string(event_name) + " before InstanceStarted");
  }
  if (stopped_) {
    throw Error::illegal_event("already-stopped", std::string(event_name) + " after InstanceStopped");
  }
}

// Lets an admitted event wait, or overflows. The caller changes the tables; `digest` is the one after that.
// counted: whether it counts against the room for waiting events.
void Ledger::record(const Event& event, std::size_t encoded_bytes, std::uint32_t namespace_index, std::uint64_t digest,
                    bool counted, std::size_t started_namespaces) {
  if (!overflowed_) {
    if (counted && waiting_bytes_ + encoded_bytes + kStoppedBytes > event_bytes_) {
      overflowed_ = true;
      waiting_.add(InstanceStopped{.reason = StopReason::kOverflow}, kStoppedBytes, 0, applied_, digest_);
    } else {
      waiting_.add(event, encoded_bytes, namespace_index, applied_, digest, started_namespaces);
      waiting_bytes_ += counted ? encoded_bytes : 0;
    }
    ++applied_;
  }
  digest_ = digest;
}

// -- what an engine asks -----------------------------------------------------------------------------------------------

std::span<TierSlots* const> Ledger::not_hotter_than(Tier hottest) const noexcept {
  const auto first = std::ranges::find_if(hottest_first_, [=](const TierSlots* tier) { return tier->tier() >= hottest; });
  return {first, hottest_first_.end()};
}

Match Ledger::match(Bytes hashes, bool pinned, Tier hottest) {
  const std::size_t count = hash_count(hashes);
  if (tier_bytes_.size() < count) {
    tier_bytes_.resize(count);
  }
  if (slot_numbers_.size() < count) {
    slot_numbers_.resize(count);
  }
  std::size_t depth = 0;
  find_blocks(not_hotter_than(hottest), hashes, [&](std::size_t at, const TierSlots* holder, std::uint32_t slot) {
    if (holder == nullptr) {
      return true;
    }
    tier_bytes_[at] = static_cast<std::uint8_t>(holder->tier());
    slot_numbers_[at] = slot;
    depth = at + 1;
    return false;
  });
  TierSlots* const own = find_tier(hottest);
  if (pinned && own != nullptr) {
    for (std::size_t at = 0; at < depth; ++at) {
      if (tier_bytes_[at] == static_cast<std::uint8_t>(hottest)) {
        own->pin(slot_numbers_[at]);
      }
    }
  }
  return {depth, Bytes(tier_bytes_).first(depth), packed(std::span(slot_numbers_).first(depth))};
}

Bytes Ledger::holders(Bytes hashes, Tier hottest) {
  const std::size_t count = hash_count(hashes);
  if (tier_bytes_.size() < count) {
    tier_bytes_.resize(count);
  }
  find_blocks(not_hotter_than(hottest), hashes, [&](std::size_t at, const TierSlots* holder, std::uint32_t) {
    tier_bytes_[at] = holder == nullptr ? kNotHeld : static_cast<std::uint8_t>(holder->tier());
    return false;
  });
  return Bytes(tier_bytes_).first(count);
}

bool Ledger::holds(Tier tier, Bytes hash) const noexcept {
  const TierSlots* const slots = find_tier(tier);
  return slots != nullptr && hash.size() == kHashBytes && slots->find(hash.data()) != kNoSlot;
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
    for (const std::uint32_t slot : slots->held_slots()) {
      append(hashes, slots->slot(slot).hash.data());
    }
  }
  return hashes;
}

void Ledger::pin(Tier tier, Bytes slots) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = slot_count(slots);
  for (std::size_t at = 0; at < count; ++at) {
    if (const std::uint32_t slot = slot_at(slots, at); !state.is_held(slot)) {
      throw ledger_error(name(tier) + " slot " + std::to_string(slot) + " holds no block, so it cannot be pinned");
    }
  }
  for (std::size_t at = 0; at < count; ++at) {
    state.pin(slot_at(slots, at));
  }
}

void Ledger::unpin(Tier tier, Bytes slots) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = slot_count(slots);
  if (slot_numbers_.size() < count) {
    slot_numbers_.resize(count);
  }
  std::size_t unpinned = 0;                  // slots that have lost their last pin, in the order they lost it
  for (std::size_t at = count; at-- > 0;) {  // in numbers alone, until it is known that each slot has the pins it is to lose
    const std::uint32_t slot = slot_at(slots, at);
    if (slot >= state.size() || state.slot(slot).pins == 0) {
      for (std::size_t before = at + 1; before < count; ++before) {
        state.count_pin(slot_at(slots, before));
      }
      throw ledger_error(name(tier) + " slot " + std::to_string(slot) + " is not pinned, so it cannot be unpinned");
    }
    if (state.discount_pin(slot)) {
      slot_numbers_[unpinned++] = slot;
    }
  }
  for (std::size_t at = 0; at < unpinned; ++at) {
    state.settle_unpinned(slot_numbers_[at]);
  }
}

std::optional<Allocation> Ledger::allocate(Tier tier, std::size_t count, const NamespaceId* namespace_id) {
  TierSlots& state = tier_slots(tier);
  if (is_closed(tier) || count > state.room()) {
    return std::nullopt;
  }
  if (const std::size_t free = state.free_count(); count > free) {
    require_open("BlocksEvicted");  // before the policy has given up anything
    victims_.resize(count - free);
    if (!shares_.empty() && namespace_id != nullptr) {
      state.expect(share_of(*namespace_id), count);
    }
    state.victims(victims_);
    withdraw(state, victims_, EvictReason::kCapacity);
    if (is_closed(tier)) {  // by that very eviction: a slot whose withdrawal nobody hears of must not be written
      return std::nullopt;
    }
  }
  if (slot_numbers_.size() < count) {
    slot_numbers_.resize(count);
  }
  const auto taken = std::span(slot_numbers_).first(count);
  const std::uint64_t after = state.take(taken);
  return Allocation{packed(taken), is_durable(tier) ? after : 0};
}

void Ledger::release(Tier tier, Bytes slots) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = slot_count(slots);
  for (std::size_t at = 0; at < count; ++at) {  // marked, so that a slot named twice is seen before anything is given back
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

Bytes Ledger::create(const NamespaceId& namespace_id, Tier tier, const SequenceHash& parent, std::uint64_t start,
                     Bytes hashes, Bytes slots) {
  TierSlots& state = tier_slots(tier);
  const std::size_t count = hash_count(hashes);
  if (count != slot_count(slots)) {
    throw ledger_error(std::to_string(count) + " hashes for " + std::to_string(slots.size() / kSlotBytes) +
                       " slots; give one slot a block");
  }
  // holders[i] is slots[i] where the block is new, else the slot that holds it already.
  if (slot_numbers_.size() < count) {
    slot_numbers_.resize(count);
  }
  const auto holders = std::span(slot_numbers_).first(count);
  const auto is_new = [&](std::size_t at) { return holders[at] == slot_at(slots, at); };
  const auto unmark = [&](std::size_t begin, std::size_t end, bool also_holders) noexcept {
    for (std::size_t at = begin; at < end; ++at) {
      if (is_new(at)) {
        state.unindex(holders[at]);
      } else if (also_holders) {
        state.mark(holders[at], SlotState::kHeld);
      }
      state.mark(slot_at(slots, at), SlotState::kAllocated);
    }
  };
  if (start + count > std::uint64_t{1} << 32) {
    throw Error(ErrorCode::kLayout, "a number does not fit the frame: " + std::to_string(start));
  }
  bool some_known = false;
  for (std::size_t at = 0; at < count; ++at) {
    if (at % kPrefetchedBlocks == 0) {
      for (std::size_t next = at; next < std::min(count, at + kPrefetchedBlocks); ++next) {
        state.prefetch_gain(hash_at(hashes, next));
      }
    }
    const std::uint32_t slot = slot_at(slots, at);
    const bool is_own = slot < state.size() && state.slot(slot).state == SlotState::kAllocated;
    const std::uint32_t holder = is_own ? state.index(slot, hash_at(hashes, at)) : kNoSlot;
    if (!is_own || (holder != slot && state.slot(holder).state == SlotState::kCreating)) {
      unmark(0, at, true);
      check_create(state, hashes, slots);
    }
    some_known = some_known || holder != slot;
    state.mark(slot, SlotState::kCreating);
    state.mark(holder, SlotState::kCreating);
    holders[at] = holder;
  }
  for (std::size_t at = 0; some_known && at < count; ++at) {
    if (!is_new(at)) {
      state.mark(holders[at], SlotState::kHeld);
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
      create_run(state, namespace_id, start + begin > 0 ? before : kNoParent, start + begin,
                 blocks_of(hashes, begin, end), slots.subspan(begin * kSlotBytes, (end - begin) * kSlotBytes));
    } catch (...) {
      unmark(begin, count, false);
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

// Throws Error: kLedger, for what is wrong with blocks to create. Something is.
void Ledger::check_create(const TierSlots& tier, Bytes hashes, Bytes slots) const {
  const std::size_t count = hashes.size() / kHashBytes;
  std::set<std::string_view> blocks;
  std::set<std::uint32_t> numbers;
  for (std::size_t at = 0; at < count; ++at) {
    blocks.emplace(reinterpret_cast<const char*>(hash_at(hashes, at)), kHashBytes);
    numbers.insert(slot_at(slots, at));
  }
  if (blocks.size() != count || numbers.size() != count) {
    throw ledger_error(std::to_string(count) + " blocks to create in " + name(tier.tier()) +
                       " name a hash or a slot twice");
  }
  for (std::size_t at = 0; at < count; ++at) {
    require_own(tier, slot_at(slots, at), "no block can be created in it");
  }
}

// Records one run of new blocks, whose hashes the index knows.
void Ledger::create_run(TierSlots& tier, const NamespaceId& namespace_id, const SequenceHash& parent, std::uint64_t start,
                        Bytes hashes, Bytes slots) {
  const BlocksCreated event{.namespace_id = namespace_id,
                            .tier = tier.tier(),
                            .start = static_cast<std::uint32_t>(start),
                            .parent = parent,
                            .hashes = hashes,
                            .slots = slots};
  const std::size_t bytes = admit(event);
  const std::uint32_t namespace_index = namespaces_.intern(namespace_id);
  record(event, bytes, namespace_index, digest_ + mixes(tier.tier(), hashes));
  for (std::size_t at = 0; at < slots.size() / kSlotBytes; ++at) {
    tier.gain(slot_at(slots, at), namespace_index);
  }
}

std::size_t Ledger::evict(Tier tier, Bytes hashes, EvictReason reason) {
  TierSlots& state = tier_slots(tier);
  hash_count(hashes);
  const Bytes blocks = distinct(hashes);
  victims_.clear();
  for (std::size_t at = 0; at < blocks.size() / kHashBytes; ++at) {
    if (const std::uint32_t slot = state.find(hash_at(blocks, at)); slot != kNoSlot) {
      victims_.push_back(slot);
    }
  }
  withdraw(state, victims_, reason);
  return victims_.size();
}

// Withdraws held blocks, a run of one namespace an event.
void Ledger::withdraw(TierSlots& tier, std::span<const std::uint32_t> slots, EvictReason reason) {
  for (std::size_t begin = 0, end = 0; begin < slots.size(); begin = end) {
    const std::uint32_t namespace_index = tier.slot(slots[begin]).namespace_index;
    run_hashes_.clear();
    while (end < slots.size() && end - begin < kMaxRunBlocks && tier.slot(slots[end]).namespace_index == namespace_index) {
      const std::uint8_t* const hash = tier.slot(slots[end++]).hash.data();
      tier.prefetch(hash);
      append(run_hashes_, hash);
    }
    const BlocksEvicted event{
        .namespace_id = namespaces_[namespace_index], .tier = tier.tier(), .reason = reason, .hashes = run_hashes_};
    record(event, admit(event), namespace_index, digest_ - mixes(tier.tier(), run_hashes_));
    for (std::size_t at = begin; at < end; ++at) {
      tier.lose(slots[at], applied_);
    }
  }
}

void Ledger::forget(Tier tier, const NamespaceId& namespace_id, Bytes hashes, EvictReason reason) {
  if (!is_cluster(tier)) {
    throw ledger_error(name(tier) + " is not a pool of cluster reach; use evict");
  }
  const BlocksEvicted event{.namespace_id = namespace_id, .tier = tier, .reason = reason, .hashes = hashes};
  const std::size_t bytes = admit(event);
  if (distinct(hashes).size() != hashes.size()) {
    throw repeated_in_run(tier, "block");
  }
  record(event, bytes, namespaces_.intern(namespace_id), digest_);
}

void Ledger::claim(Tier tier, const NamespaceId& namespace_id, Bytes hashes, std::string_view finder) {
  if (!is_cluster(tier)) {
    throw ledger_error(name(tier) + " is not a pool of cluster reach; its blocks are created or copied");
  }
  const BlocksMigrated event{.namespace_id = namespace_id,
                             .source = finder,
                             .target = tier,
                             .kept = true,
                             .cause = MigrateCause::kOffload,
                             .hashes = hashes,
                             .slots = {}};
  const std::size_t bytes = admit(event);
  if (distinct(hashes).size() != hashes.size()) {
    throw repeated_in_run(tier, "block");
  }
  record(event, bytes, namespaces_.intern(namespace_id), digest_);
}

std::size_t Ledger::keep(Tier tier, Bytes hashes, double until_s, std::int64_t priority) {
  TierSlots& state = tier_slots(tier);
  if (priority < 0 || priority > kHighestPriority) {
    throw ledger_error("priority is " + std::to_string(priority) + "; give 0 to " + std::to_string(kHighestPriority));
  }
  if (std::isnan(until_s)) {
    throw ledger_error("until_s is not a number; give a time on the clock that expire is told");
  }
  std::size_t count = 0;
  const std::size_t blocks = hash_count(hashes);
  for (std::size_t at = 0; at < blocks; ++at) {
    if (const std::uint32_t slot = state.find(hash_at(hashes, at)); slot != kNoSlot) {
      state.keep(slot, until_s, static_cast<std::uint8_t>(priority));
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

// -- copies ------------------------------------------------------------------------------------------------------------

std::optional<std::pair<std::uint64_t, const Copy*>> Ledger::begin_copy(const NamespaceId& namespace_id,
                                                                        CopySource source, Tier target, Bytes hashes) {
  if (is_closed(target)) {
    return std::nullopt;
  }
  hash_count(hashes);
  Copy copy{.namespace_id = namespace_id,
            .source = std::move(source),
            .target = target,
            .hashes = {},
            .source_slots = {},
            .target_slots = {}};
  TierSlots* const from = source_slots(copy);
  TierSlots* const into = find_tier(target);
  if (into == nullptr && !is_cluster(target)) {
    throw ledger_error("this instance has no " + name(target) + " pool with slots");
  }
  std::size_t room = into != nullptr ? into->room() : std::numeric_limits<std::size_t>::max();
  std::uint32_t share = 0;
  std::int64_t within_quota = 0;  // blocks that may come before the tenant's own give way
  if (into != nullptr && !shares_.empty()) {
    share = share_of(namespace_id);
    within_quota = quota_left(target, share);
    const std::int64_t most = within_quota + static_cast<std::int64_t>(into->counts_of(share).evictable);
    room = std::min(room, static_cast<std::size_t>(std::max<std::int64_t>(0, most)));
  }
  const Bytes blocks = distinct(hashes);
  for (std::size_t at = 0; at < blocks.size() / kHashBytes && copy.hashes.size() / kHashBytes < room; ++at) {
    const std::uint8_t* const hash = hash_at(blocks, at);
    const std::uint32_t slot = from != nullptr ? from->find(hash) : kNoSlot;
    if (from != nullptr && (slot == kNoSlot || namespaces_[from->slot(slot).namespace_index] != namespace_id)) {
      continue;
    }
    if (into != nullptr && (into->find(hash) != kNoSlot || into->is_arriving(hash))) {
      continue;
    }
    append(copy.hashes, hash);
    if (from != nullptr) {
      copy.source_slots.push_back(slot);
    }
  }
  if (copy.hashes.empty()) {
    return std::nullopt;
  }
  for (const std::uint32_t slot : copy.source_slots) {
    from->pin(slot);
  }
  if (into != nullptr) {
    const std::size_t count = copy.hashes.size() / kHashBytes;
    if (const std::int64_t beyond = static_cast<std::int64_t>(count) - within_quota; !shares_.empty() && beyond > 0) {
      require_open("BlocksEvicted");  // before the policy has given up anything
      victims_.resize(static_cast<std::size_t>(beyond));
      into->victims_of(share, victims_);
      withdraw(*into, victims_, EvictReason::kQuota);
    }
    const auto allocation = allocate(target, count, &namespace_id);
    if (!allocation.has_value()) {  // the room was counted; making it was an overflow
      if (from != nullptr) {
        unpin_run(*from, copy.source_slots);
      }
      return std::nullopt;
    }
    for (std::size_t at = 0; at < count; ++at) {
      copy.target_slots.push_back(slot_at(allocation->slots, at));
      into->receive(copy.target_slots.back(), hash_at(copy.hashes, at));
    }
    copy.after = allocation->after;
  }
  copy.epoch = epoch_;
  const std::uint64_t id = next_copy_++;
  return std::pair(id, &copies_.emplace(id, std::move(copy)).first->second);
}

std::size_t Ledger::copy_blocks(std::uint64_t id) const {
  const auto found = copies_.find(id);
  if (found == copies_.end()) {
    throw ledger_error("copy " + std::to_string(id) + " is not in flight");
  }
  return found->second.hashes.size() / kHashBytes;
}

std::span<const std::uint32_t> Ledger::end_copy(std::uint64_t id, std::span<const std::uint8_t> arrived,
                                                MigrateCause cause, bool kept, bool pinned) {
  const std::size_t count = copy_blocks(id);
  const auto node = copies_.extract(id);
  const Copy& copy = node.mapped();
  TierSlots* const from = source_slots(copy);
  TierSlots* const into = find_tier(copy.target);
  const auto has_arrived = [&](std::size_t at) {
    return arrived[at] != 0 && (from == nullptr || from->find(hash_at(copy.hashes, at)) != kNoSlot);
  };
  std::vector<std::uint8_t> good(count);  // what counts as arrived: looked up before the source withdraws it
  for (std::size_t at = 0; at < count; ++at) {
    good[at] = has_arrived(at) ? 1 : 0;
  }
  for (const std::uint32_t slot : copy.target_slots) {
    into->end_receiving(slot);
  }
  std::vector<std::uint8_t> fresh_hashes;
  std::vector<std::uint32_t> fresh;
  std::vector<std::uint32_t> known;
  for (std::size_t at = 0; at < count; ++at) {
    const std::uint8_t* const hash = hash_at(copy.hashes, at);
    const std::uint32_t holder = into != nullptr ? into->find(hash) : kNoSlot;
    if (good[at] != 0 && holder == kNoSlot) {
      append(fresh_hashes, hash);
      if (into != nullptr) {
        fresh.push_back(copy.target_slots[at]);
      }
      continue;
    }
    if (into != nullptr) {
      into->give_back(copy.target_slots[at]);
    }
    if (good[at] != 0) {
      known.push_back(holder);
    }
  }
  migrate(copy, fresh_hashes, fresh, kept, cause);
  if (from != nullptr) {
    unpin_run(*from, copy.source_slots);
  }
  slot_numbers_.assign(count, kNoSlot);
  if (into == nullptr) {
    return slot_numbers_;
  }
  for (std::size_t at = 0; at < count; ++at) {
    if (good[at] != 0) {
      slot_numbers_[at] = into->find(hash_at(copy.hashes, at));
    }
  }
  for (std::size_t at = fresh.size(); at-- > 0;) {
    into->enter(fresh[at], pinned);
  }
  if (pinned) {
    for (const std::uint32_t slot : known) {
      into->pin(slot);
    }
  }
  return slot_numbers_;
}

// Records the arrival of blocks that the target does not hold. slots: empty for a target without slots.
void Ledger::migrate(const Copy& copy, Bytes hashes, std::span<const std::uint32_t> slots, bool kept, MigrateCause cause) {
  TierSlots* const from = kept ? nullptr : source_slots(copy);
  TierSlots* const into = find_tier(copy.target);
  const auto* const instance = std::get_if<std::string>(&copy.source);
  const std::size_t count = hashes.size() / kHashBytes;
  for (std::size_t begin = 0; begin < count; begin += kMaxRunBlocks) {
    const std::size_t end = std::min(count, begin + kMaxRunBlocks);
    const Bytes run = blocks_of(hashes, begin, end);
    BlocksMigrated event{.namespace_id = copy.namespace_id,
                         .source = Tier::kHbm,
                         .target = copy.target,
                         .kept = kept,
                         .cause = cause,
                         .hashes = run,
                         .slots = {}};
    if (instance != nullptr) {
      event.source = std::string_view(*instance);
    } else {
      event.source = std::get<Tier>(copy.source);
    }
    if (into != nullptr) {
      event.slots = packed(slots.subspan(begin, end - begin));
    }
    const std::size_t bytes = admit(event);
    check_migrate(copy, run);
    std::uint64_t digest = digest_;
    digest += into != nullptr ? mixes(into->tier(), run) : 0;
    digest -= from != nullptr ? mixes(from->tier(), run) : 0;
    const std::uint32_t namespace_index = namespaces_.intern(copy.namespace_id);
    record(event, bytes, namespace_index, digest);
    for (std::size_t at = begin; at < end && into != nullptr; ++at) {
      into->index(slots[at], hash_at(hashes, at));
      into->gain(slots[at], namespace_index);
    }
    for (std::size_t at = begin; at < end && from != nullptr; ++at) {
      from->lose(from->find(hash_at(hashes, at)), applied_);
    }
  }
}

// Throws Error: kIllegalEvent, when the source does not hold a run under the copy's namespace.
void Ledger::check_migrate(const Copy& copy, Bytes hashes) const {
  const auto* const source = std::get_if<Tier>(&copy.source);
  if (source == nullptr) {
    return;
  }
  if (*source == copy.target) {
    throw Error::illegal_event("moved-nowhere", "source and target are both " + name(copy.target));
  }
  if (is_cluster(*source)) {
    return;
  }
  const TierSlots* const from = find_tier(*source);
  for (std::size_t at = 0; at < hashes.size() / kHashBytes; ++at) {
    const std::uint8_t* const hash = hash_at(hashes, at);
    const std::uint32_t slot = from != nullptr ? from->find(hash) : kNoSlot;
    if (slot == kNoSlot) {
      throw Error::illegal_event("migrated-unheld", name(*source) + " does not hold " + shortened(hash));
    }
    const NamespaceId& owner = namespaces_[from->slot(slot).namespace_index];
    if (owner != copy.namespace_id) {
      throw Error::illegal_event("foreign-namespace", shortened(hash) + " belongs to namespace " + shortened(owner.data()) +
                                                          ", not " + shortened(copy.namespace_id.data()));
    }
  }
}

// The tier a copy reads from, when it has slots of ours.
TierSlots* Ledger::source_slots(const Copy& copy) const noexcept {
  const auto* const source = std::get_if<Tier>(&copy.source);
  return source != nullptr ? find_tier(*source) : nullptr;
}

void Ledger::unpin_run(TierSlots& tier, std::span<const std::uint32_t> slots) {
  for (std::size_t at = slots.size(); at-- > 0;) {
    if (tier.slot(slots[at]).pins == 0) {  // the caller took back a pin that was the copy's
      throw ledger_error(name(tier.tier()) + " slot " + std::to_string(slots[at]) +
                         " is not pinned, so it cannot be unpinned");
    }
    tier.unpin(slots[at]);
  }
}

// -- rounds ------------------------------------------------------------------------------------------------------------

bool Ledger::begin_round() {
  if (!round_left_.empty() || overflowed_) {
    return false;
  }
  ++round_;
  for (const TierSlots* const tier : in_order_) {
    round_left_.push_back({.tier = tier->tier()});
  }
  return true;
}

bool Ledger::step_round(std::size_t limit) {
  if (limit == 0) {
    throw ledger_error("limit is 0; a step of a round states at least 1 block");
  }
  if (overflowed_) {
    round_left_.clear();
  }
  if (round_left_.empty()) {
    return false;
  }
  limit = std::min(limit, kMaxRunBlocks);
  RoundLeft left = round_left_.front();
  round_left_.pop_front();
  const TierSlots& tier = tier_slots(left.tier);
  if (!left.begun) {
    left.begun = true;
    left.gained_before = tier.gained();
  }
  run_hashes_.clear();
  slot_numbers_.clear();
  std::size_t looks = 0;
  std::uint32_t stated = 0;
  std::uint32_t slot = tier.next_held(left.at);
  for (; slot != kNoSlot && stated < limit && looks < kRoundLooks; ++looks, slot = tier.next_held(slot + 1)) {
    const Slot& block = tier.slot(slot);
    if (block.gained >= left.gained_before) {
      continue;
    }
    if (!slot_numbers_.empty() && tier.slot(slot_numbers_.front()).namespace_index != block.namespace_index) {
      state_run(tier, true, digest_);
    }
    append(run_hashes_, block.hash.data());
    slot_numbers_.push_back(slot);
    ++stated;
  }
  state_run(tier, true, digest_);
  left.at = slot;
  left.count += stated;
  if (slot != kNoSlot) {
    round_left_.push_front(left);
  } else {
    const RoundEnded event{.tier = left.tier, .round = round_, .count = left.count};
    record(event, admit(event), 0, digest_);
  }
  return !round_left_.empty() && !overflowed_;
}

// Records the statement of a run of one namespace, gathered in run_hashes_ and slot_numbers_, which are empty afterwards.
void Ledger::state_run(const TierSlots& tier, bool counted, std::uint64_t digest) {
  if (slot_numbers_.empty()) {
    return;
  }
  const std::uint32_t namespace_index = tier.slot(slot_numbers_.front()).namespace_index;
  const ResidenciesStated event{.namespace_id = namespaces_[namespace_index],
                                .tier = tier.tier(),
                                .round = round_,
                                .hashes = run_hashes_,
                                .slots = packed(slot_numbers_)};
  record(event, admit(event), namespace_index, digest, counted);
  run_hashes_.clear();
  slot_numbers_.clear();
}

// -- inside ------------------------------------------------------------------------------------------------------------

TierCounts Ledger::counts(Tier tier) const { return tier_slots(tier).counts(); }

// -- tenants -----------------------------------------------------------------------------------------------------------

void Ledger::assign(const NamespaceId& namespace_id, std::string_view tenant) {
  if (shares_.empty()) {
    return;
  }
  const auto others = static_cast<std::uint32_t>(shares_.size() - 1);
  const auto named = static_cast<std::uint32_t>(std::ranges::find(shares_, tenant, &Share::tenant) - shares_.begin());
  const std::uint32_t share = std::min(named, others);
  const std::uint32_t index = namespaces_.intern(namespace_id);
  if (share_of(namespace_id) != share) {
    for (const TierSlots* const tier : in_order_) {
      for (std::uint32_t slot = tier->next_held(0); slot != kNoSlot; slot = tier->next_held(slot + 1)) {
        if (tier->slot(slot).namespace_index == index) {
          throw ledger_error("namespace " + shortened(namespace_id.data()) +
                             " holds blocks already, so it cannot be assigned to tenant '" + std::string(tenant) +
                             "'; assign it before its first block");
        }
      }
    }
  }
  share_of_->resize(std::max<std::size_t>(share_of_->size(), index + std::size_t{1}), others);
  (*share_of_)[index] = share;
}

std::uint32_t Ledger::share_of(const NamespaceId& namespace_id) {
  const std::uint32_t index = namespaces_.intern(namespace_id);
  return index < share_of_->size() ? (*share_of_)[index] : static_cast<std::uint32_t>(shares_.size() - 1);
}

// What is left of a quota, below 0 beyond it; the pool's size where there is none. What is on its way counts.
std::int64_t Ledger::quota_left(Tier tier, std::uint32_t share) {
  const TierSlots& slots = tier_slots(tier);
  const std::uint32_t quota = shares_[share].quota[static_cast<std::size_t>(tier)];
  if (quota == kNoQuota) {
    return slots.size();
  }
  std::size_t used = slots.counts_of(share).held;
  for (const auto& [id, copy] : copies_) {
    used += copy.target == tier && share_of(copy.namespace_id) == share ? copy.target_slots.size() : 0;
  }
  return static_cast<std::int64_t>(quota) - static_cast<std::int64_t>(used);
}

TierSlots& Ledger::tier_slots(Tier tier) const {
  TierSlots* const slots = find_tier(tier);
  if (slots == nullptr) {
    throw ledger_error("this instance has no " + name(tier) + " pool with slots");
  }
  return *slots;
}

// Whether a tier takes nothing any more, because nothing about it would be durable.
bool Ledger::is_closed(Tier tier) const noexcept { return overflowed_ && is_durable(tier); }

// The hashes of a run without repeats, in order.
Bytes Ledger::distinct(Bytes hashes) {
  const std::size_t count = hashes.size() / kHashBytes;
  chosen_hashes_.clear();
  seen_.assign(std::bit_ceil(2 * count + 1), kNoEntry);
  for (std::size_t at = 0; at < count; ++at) {
    const std::uint8_t* const hash = hash_at(hashes, at);
    std::size_t cell = hash_tag(hash, seed_) & (seen_.size() - 1);
    while (seen_[cell] != kNoEntry && !same_hash(hash_at(hashes, seen_[cell]), hash)) {
      cell = (cell + 1) & (seen_.size() - 1);
    }
    if (seen_[cell] == kNoEntry) {
      seen_[cell] = static_cast<std::uint32_t>(at);
      append(chosen_hashes_, hash);
    }
  }
  return chosen_hashes_;
}

}  // namespace kvbm
