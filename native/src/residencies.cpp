#include "kvbm/residencies.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <utility>

#include "kvbm/error.hpp"

namespace kvbm {
namespace {

constexpr std::size_t kLeastPlaces = 16;
// Slots below kLowSlots + kSlotsForEach a residency are looked up in an array, however few of them are taken.
constexpr std::size_t kLowSlots = 1024;
constexpr std::size_t kSlotsForEach = 4;
constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;  // clang deduces it by itself only from 17 on

const char* tier_name(Tier tier) noexcept {
  constexpr const char* kNames[] = {"HBM", "HOST", "NVME", "OBJECT"};
  return kNames[static_cast<std::size_t>(tier)];
}

const char* event_name(const Event& event) noexcept {
  constexpr const char* kNames[] = {"InstanceStarted", "BlocksCreated",  "BlocksMigrated", "BlocksEvicted",
                                    "ResidenciesStated", "RoundEnded", "InstanceStopped"};
  static_assert(std::size(kNames) == std::variant_size_v<Event>);
  return kNames[event.index()];
}

// The first 8 hex digits, for messages.
std::string shortened(const std::uint8_t* id) {
  char text[9];
  std::snprintf(text, sizeof text, "%02x%02x%02x%02x", id[0], id[1], id[2], id[3]);
  return text;
}

std::string shortened(const std::array<std::uint8_t, kHashBytes>& id) { return shortened(id.data()); }

template <class... Pieces>
std::string words(const Pieces&... pieces) {
  std::string made;
  const auto text = [](const auto& piece) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(piece)>>) {
      return std::to_string(piece);
    } else {
      return std::string(piece);
    }
  };
  ((made += text(pieces)), ...);
  return made;
}

std::string slot_text(std::optional<std::uint32_t> slot) { return slot ? std::to_string(*slot) : "None"; }

std::uint32_t load_slot(Bytes slots, std::size_t index) noexcept {
  std::uint32_t slot = 0;
  std::memcpy(&slot, slots.data() + index * kSlotBytes, sizeof slot);
  return slot;
}

std::optional<std::uint32_t> slot_at(Bytes slots, std::size_t index) noexcept {
  return slots.empty() ? std::nullopt : std::optional(load_slot(slots, index));
}

std::optional<std::uint32_t> slot_of(const Residency& one) noexcept {
  return TierTable::has_slot(one) ? std::optional(one.slot) : std::nullopt;
}

std::uint64_t slot_hash(std::uint32_t slot) noexcept {
  const std::uint64_t product = (std::uint64_t{slot} + 1) * kGolden;
  return product ^ (product >> 32);
}

[[noreturn]] void refuse(std::string_view rule, std::string detail) {
  throw Error::illegal_event(rule, std::move(detail));
}

void check_layout(Bytes hashes, Bytes slots) {
  if (hashes.size() % kHashBytes != 0) {
    throw Error(ErrorCode::kLayout, words("a run of hashes has ", hashes.size(), " bytes, which is no multiple of ", kHashBytes));
  }
  if (!slots.empty() && slots.size() / kSlotBytes * kHashBytes != hashes.size()) {
    throw Error(ErrorCode::kLayout, words(slots.size(), " bytes of slots for ", hashes.size() / kHashBytes, " blocks"));
  }
}

}  // namespace

std::string WireInteger::text() const {
  return is_negative_ ? std::to_string(static_cast<std::int64_t>(bits_)) : std::to_string(bits_);
}

// -- tables ------------------------------------------------------------------------------------------------------------

std::uint8_t PositionIndex::tag_of(std::uint64_t hash) noexcept {
  const auto top = static_cast<std::uint8_t>(hash >> 56);
  return top > kErased ? top : static_cast<std::uint8_t>(top + 2);
}

void PositionIndex::insert(std::uint64_t hash, std::uint32_t position) noexcept {
  std::size_t at = home_of(hash);
  while (tags_[at] > kErased) {
    at = after(at);
  }
  used_ += tags_[at] == kEmpty;
  tags_[at] = tag_of(hash);
  positions_[at] = position;
  ++live_;
}

void PositionIndex::erase(std::uint64_t hash, std::uint32_t position) noexcept {
  std::size_t at = home_of(hash);
  while (tags_[at] <= kErased || positions_[at] != position) {
    at = after(at);
  }
  --live_;
  tags_[at] = kErased;
  if (tags_[after(at)] != kEmpty) {
    return;
  }
  // Nothing is behind an empty place, so an erased one before it is no bridge to anything.
  for (; tags_[at] == kErased; at = at == 0 ? tags_.size() - 1 : at - 1) {
    tags_[at] = kEmpty;
    --used_;
  }
}

void PositionIndex::reset(std::size_t count) {
  const std::size_t places = kLeastPlaces + count + count / 2 + count / 4;
  if (places != tags_.size()) {
    tags_ = std::vector<std::uint8_t>(places, kEmpty);
    positions_ = std::vector<std::uint32_t>(places);
  } else {
    std::fill(tags_.begin(), tags_.end(), kEmpty);
  }
  used_ = live_ = 0;
}

void PositionIndex::prefetch(std::uint64_t hash) const noexcept {
  const std::size_t home = home_of(hash);
  __builtin_prefetch(&tags_[home]);
  __builtin_prefetch(&positions_[home]);
}

std::uint32_t TierTable::find(const std::uint8_t* hash, std::uint64_t mix) const noexcept {
  return by_hash_.find(mix, [&](std::uint32_t position) {
    return std::memcmp(residencies_[position].hash.data(), hash, kHashBytes) == 0;
  });
}

std::uint32_t TierTable::find_slot(std::uint32_t slot) const noexcept {
  if (slot < by_slot_.size() && by_slot_[slot] != kNone) {
    return by_slot_[slot];
  }
  if (by_high_slot_.empty()) {
    return kNone;
  }
  const auto found = by_high_slot_.find(slot);
  return found == by_high_slot_.end() ? kNone : found->second;
}

void TierTable::occupy(std::uint32_t slot, std::uint32_t position) {
  if (slot >= by_slot_.size()) {
    if (slot >= kLowSlots + kSlotsForEach * count()) {
      by_high_slot_[slot] = position;
      return;
    }
    if (slot >= by_slot_.capacity()) {
      by_slot_.reserve(slot + slot / 8 + kLeastPlaces);
    }
    by_slot_.resize(slot + std::size_t{1}, kNone);
  }
  by_slot_[slot] = position;
}

void TierTable::vacate(std::uint32_t slot) noexcept {
  if (slot < by_slot_.size() && by_slot_[slot] != kNone) {
    by_slot_[slot] = kNone;
  } else {
    by_high_slot_.erase(slot);
  }
}

void TierTable::insert(const Residency& residency, std::uint64_t mix) {
  if (next_sequence_ == kNone) {
    renumber();
  }
  std::uint32_t position = first_gone_;
  if (position == kNone) {
    if (residencies_.size() == residencies_.capacity()) {
      residencies_.reserve(residencies_.size() + residencies_.size() / 6 + kLeastPlaces);
    }
    position = end();
    residencies_.push_back(residency);
  } else {
    first_gone_ = residencies_[position].slot;
    residencies_[position] = residency;
  }
  residencies_[position].sequence = next_sequence_++;
  if (by_hash_.has_room()) {
    by_hash_.insert(mix, position);
  } else {
    reindex();
  }
  if (has_slot(residency)) {
    occupy(residency.slot, position);
  }
}

void TierTable::erase(std::uint32_t position, std::uint64_t mix) noexcept {
  Residency& one = residencies_[position];
  by_hash_.erase(mix, position);
  if (has_slot(one)) {
    vacate(one.slot);
  }
  one.owner = kGone;
  one.slot = first_gone_;
  first_gone_ = position;
}

void TierTable::move(std::uint32_t position, std::optional<std::uint32_t> slot) {
  Residency& one = residencies_[position];
  if (has_slot(one)) {
    vacate(one.slot);
  }
  one.owner |= kNoSlotBit;
  if (slot) {
    one.slot = *slot;
    one.owner &= ~kNoSlotBit;
    occupy(*slot, position);
  }
}

void TierTable::clear() { *this = TierTable(tier_); }

void TierTable::reindex() {
  by_hash_.reset(count() + 1);
  for (std::uint32_t at = 0; at < end(); ++at) {
    if (!is_gone(residencies_[at])) {
      by_hash_.insert(residency_mix(tier_, residencies_[at].hash.data()), at);
    }
  }
}

void TierTable::renumber() {
  next_sequence_ = 0;
  for (const std::uint32_t at : in_order([](const Residency&) { return true; })) {
    residencies_[at].sequence = next_sequence_++;
  }
}

std::size_t TierTable::memory_bytes() const noexcept {
  return residencies_.capacity() * sizeof(Residency) + by_hash_.memory_bytes() +
         by_slot_.capacity() * sizeof(std::uint32_t) + by_high_slot_.size() * 32;
}

// -- the fold ----------------------------------------------------------------------------------------------------------

Residencies::Residencies(bool is_strict)
    : strict(is_strict),
      tiers_{TierState{TierTable(Tier::kHbm)}, TierState{TierTable(Tier::kHost)}, TierState{TierTable(Tier::kNvme)},
             TierState{TierTable(Tier::kObject)}} {}

std::size_t Residencies::NamespaceHash::operator()(const NamespaceId& id) const noexcept {
  return residency_mix(Tier::kHbm, id.data());
}

const PoolStated* Residencies::pool(Tier tier) const noexcept {
  const auto found = std::find_if(pools_.begin(), pools_.end(), [&](const PoolStated& pool) { return pool.tier == tier; });
  return found == pools_.end() ? nullptr : &*found;
}

bool Residencies::is_cluster(Tier tier) const noexcept {
  const PoolStated* const stated = pool(tier);
  return stated != nullptr ? stated->reach == Reach::kCluster : tier == Tier::kObject;
}

std::uint32_t Residencies::namespace_index(const NamespaceId& id) {
  if (last_namespace_ < namespaces_.size() && namespaces_[last_namespace_] == id) {
    return last_namespace_;
  }
  const auto [entry, is_new] = namespace_indexes_.try_emplace(id, static_cast<std::uint32_t>(namespaces_.size()));
  if (is_new) {
    namespaces_.push_back(id);
  }
  return last_namespace_ = entry->second;
}

void Residencies::mix(Tier tier, Bytes hashes) {
  if (mixed_ == tier) {
    return;
  }
  mixed_ = tier;
  const TierTable& table = state(tier).table;
  mixes_.resize(hashes.size() / kHashBytes);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    mixes_[index] = residency_mix(tier, hashes.data() + index * kHashBytes);
    table.prefetch(mixes_[index]);
  }
}

void Residencies::evolve(const Event& event, const EpochStart* start, FoldDelta& delta) {
  std::visit(
      [](const auto& one) {
        if constexpr (requires { one.slots; }) {
          check_layout(one.hashes, one.slots);
        } else if constexpr (requires { one.hashes; }) {
          check_layout(one.hashes, {});
        }
      },
      event);
  mixed_.reset();
  if (strict) {
    check(event, start);
  }
  std::visit(Overloaded{
                 [&](const InstanceStarted&) { begin(*start, delta); },
                 [&](const BlocksCreated& one) { add(one.namespace_id, one.tier, one.hashes, one.slots, strict, delta); },
                 [&](const BlocksMigrated& one) {
                   add(one.namespace_id, one.target, one.hashes, one.slots, strict, delta);
                   const auto* const source = std::get_if<Tier>(&one.source);
                   if (source != nullptr && !one.kept) {
                     withdraw(*source, one.hashes, delta);
                   } else if (source != nullptr && is_cluster(*source)) {
                     delta.claimed += one.hashes.size() / kHashBytes;  // it was read there, so it is there
                   }
                 },
                 [&](const BlocksEvicted& one) { withdraw(one.tier, one.hashes, delta); },
                 [&](const ResidenciesStated& one) { state_run(one, delta); },
                 [&](const RoundEnded& one) { end_round(one, delta); },
                 [&](const InstanceStopped&) { stopped_ = true; },
             },
             event);
}

FoldedFrame Residencies::evolve_frame(FrameReader reader, std::uint32_t first, std::span<const EpochStart> starts) {
  FoldedFrame result;
  const WireInteger frame_epoch(reader.header().epoch);
  while (const std::optional<Event> event = reader.next()) {
    const EpochStart* start = nullptr;
    if (std::holds_alternative<InstanceStarted>(*event)) {
      if (starts.empty()) {
        throw Error(ErrorCode::kLayout, "fewer starts are given than the frame has");
      }
      start = &starts.front();
      starts = starts.subspan(1);
    }
    if (result.folded >= first) {
      if (start != nullptr && start->epoch != frame_epoch) {
        break;
      }
      try {
        evolve(*event, start, result.delta);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kIllegalEvent) {
          throw;
        }
        result.illegal = Anomaly{error.rule(), error.detail()};
        break;
      }
    }
    ++result.folded;
  }
  return result;
}

void Residencies::miss_events() noexcept {
  for (TierState& tier : tiers_) {
    tier.is_open = tier.is_whole = false;
  }
}

void Residencies::begin_blind(WireInteger epoch, FoldDelta& delta) { begin(EpochStart{epoch, {}}, delta); }

std::uint64_t Residencies::tier_digest(Tier tier) const noexcept {
  const TierTable& table = state(tier).table;
  std::uint64_t sum = 0;
  for (std::uint32_t at = 0; at < table.end(); ++at) {
    if (!TierTable::is_gone(table[at])) {
      sum += residency_mix(tier, table[at].hash.data());
    }
  }
  return sum;
}

std::size_t Residencies::count() const noexcept {
  std::size_t sum = 0;
  for (const TierState& tier : tiers_) {
    sum += tier.table.count();
  }
  return sum;
}

std::vector<Residency> Residencies::held(Tier tier) const {
  const TierTable& table = state(tier).table;
  std::vector<Residency> made;
  made.reserve(table.count());
  for (const std::uint32_t at : table.in_order([](const Residency&) { return true; })) {
    made.push_back(table[at]);
  }
  std::stable_sort(made.begin(), made.end(), [this](const Residency& one, const Residency& other) {
    return namespace_id(one) < namespace_id(other);
  });
  return made;
}

std::size_t Residencies::memory_bytes() const noexcept {
  std::size_t sum = sizeof *this;
  for (const TierState& tier : tiers_) {
    sum += tier.table.memory_bytes();
  }
  return sum;
}

// -- the work of each event --------------------------------------------------------------------------------------------

void Residencies::begin(const EpochStart& start, FoldDelta& delta) {
  delta.withdrawn += count();
  digest_ = 0;
  for (TierState& tier : tiers_) {
    tier.table.clear();
    tier.round = 0;
    tier.stated = 0;
    tier.is_open = tier.is_whole = false;
  }
  namespaces_.clear();
  namespace_indexes_.clear();
  epoch_ = start.epoch;
  stopped_ = false;
  pools_.clear();
  for (const PoolStated& stated : start.pools) {
    const auto same = std::find_if(pools_.begin(), pools_.end(), [&](const PoolStated& one) { return one.tier == stated.tier; });
    if (same == pools_.end()) {
      pools_.push_back(stated);
    } else {
      *same = stated;
    }
  }
}

void Residencies::add(const NamespaceId& id, Tier tier, Bytes hashes, Bytes slots, bool is_legal, FoldDelta& delta) {
  if (is_cluster(tier)) {
    delta.claimed += hashes.size() / kHashBytes;
    return;
  }
  mix(tier, hashes);
  TierState& here = state(tier);
  const std::uint32_t name = namespace_index(id);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    const std::uint8_t* const hash = hashes.data() + index * kHashBytes;
    const Slot slot = slot_at(slots, index);
    if (is_legal) {
      gain(tier, hash, mixes_[index], name, slot, delta);
      continue;
    }
    const std::uint32_t position = here.table.find(hash, mixes_[index]);
    if (position != TierTable::kNone) {
      restate(tier, position, name, slot, true, delta);
      continue;
    }
    if (slot) {
      vacate(tier, *slot, delta);
    }
    gain(tier, hash, mixes_[index], name, slot, delta);
  }
}

void Residencies::withdraw(Tier tier, Bytes hashes, FoldDelta& delta) {
  if (is_cluster(tier)) {
    delta.unclaimed += hashes.size() / kHashBytes;
    return;
  }
  mix(tier, hashes);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    const std::uint8_t* const hash = hashes.data() + index * kHashBytes;
    const std::uint32_t position = state(tier).table.find(hash, mixes_[index]);
    if (position != TierTable::kNone) {
      lose(tier, position, mixes_[index], delta);
    } else {
      delta.anomalies.push_back({"evicted-unheld", words(tier_name(tier), " does not hold ", shortened(hash))});
    }
  }
}

void Residencies::state_run(const ResidenciesStated& event, FoldDelta& delta) {
  const Tier tier = event.tier;
  TierState& here = state(tier);
  if (event.round != here.round) {
    here.round = event.round;
    here.stated = 0;
    here.is_open = true;
  }
  here.stated += event.hashes.size() / kHashBytes;
  if (is_cluster(tier)) {
    delta.claimed += event.hashes.size() / kHashBytes;
    return;
  }
  mix(tier, event.hashes);
  const std::uint32_t name = namespace_index(event.namespace_id);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    const std::uint8_t* const hash = event.hashes.data() + index * kHashBytes;
    const std::uint32_t position = here.table.find(hash, mixes_[index]);
    if (position != TierTable::kNone) {
      restate(tier, position, name, slot_at(event.slots, index), false, delta);
      continue;
    }
    if (here.is_whole) {
      delta.anomalies.push_back({"round-added", words(tier_name(tier), " had not held ", shortened(hash))});
    }
    const Slot slot = slot_at(event.slots, index);
    if (slot) {
      vacate(tier, *slot, delta);
    }
    gain(tier, hash, mixes_[index], name, slot, delta);
  }
}

void Residencies::end_round(const RoundEnded& event, FoldDelta& delta) {
  const Tier tier = event.tier;
  TierState& here = state(tier);
  if (event.round != here.round) {
    here.round = event.round;
    here.stated = 0;
    here.is_open = true;
  }
  if (!here.is_open || here.stated != event.count) {
    delta.anomalies.push_back(
        {"round-incomplete", words(tier_name(tier), " round ", event.round, " stated ", here.stated, " blocks here, ",
                                   event.count, " at its source")});
    return;
  }
  for (const std::uint32_t at : here.table.in_order([&](const Residency& one) { return one.round != event.round; })) {
    const Residency& one = here.table[at];
    if (here.is_whole && event.count != 0) {
      delta.anomalies.push_back({"round-withdrew", words(tier_name(tier), " round ", event.round, " had not stated ",
                                                         shortened(one.hash))});
    }
    lose(tier, at, residency_mix(tier, one.hash.data()), delta);
  }
  here.is_open = false;
  here.is_whole = true;
}

void Residencies::gain(Tier tier, const std::uint8_t* hash, std::uint64_t mix, std::uint32_t name, Slot slot,
                       FoldDelta& delta) {
  TierState& here = state(tier);
  Residency made{.hash = {},
                 .slot = slot.value_or(0),
                 .round = here.round,
                 .owner = slot ? name : name | TierTable::kNoSlotBit,
                 .sequence = 0};
  std::memcpy(made.hash.data(), hash, kHashBytes);
  here.table.insert(made, mix);
  digest_ += mix;
  ++delta.added;
}

void Residencies::lose(Tier tier, std::uint32_t position, std::uint64_t mix, FoldDelta& delta) {
  state(tier).table.erase(position, mix);
  digest_ -= mix;
  ++delta.withdrawn;
}

void Residencies::restate(Tier tier, std::uint32_t position, std::uint32_t name, Slot slot, bool is_twice,
                          FoldDelta& delta) {
  TierState& here = state(tier);
  Residency& one = here.table[position];
  if (is_twice) {
    delta.anomalies.push_back({"created-twice", words(tier_name(tier), " already holds ", shortened(one.hash))});
  }
  const Slot before = slot_of(one);
  const bool is_other_namespace = (one.owner & ~TierTable::kNoSlotBit) != name;
  if (slot != before || is_other_namespace) {
    delta.anomalies.push_back({"moved-silently", words(tier_name(tier), " held ", shortened(one.hash), " in slot ",
                                                       slot_text(before), ", not ", slot_text(slot))});
  }
  if (slot != before) {
    if (slot) {
      vacate(tier, *slot, delta);
    }
    here.table.move(position, slot);
  }
  one.owner = slot ? name : name | TierTable::kNoSlotBit;
  one.round = here.round;
}

void Residencies::vacate(Tier tier, std::uint32_t slot, FoldDelta& delta) {
  const TierTable& table = state(tier).table;
  const std::uint32_t other = table.find_slot(slot);
  if (other == TierTable::kNone) {
    return;
  }
  const SequenceHash hash = table[other].hash;
  delta.anomalies.push_back({"slot-reused", words(tier_name(tier), " slot ", slot, " still held ", shortened(hash))});
  lose(tier, other, residency_mix(tier, hash.data()), delta);
}

// -- what strict refuses, before anything changes ----------------------------------------------------------------------

void Residencies::check(const Event& event, const EpochStart* start) {
  if (std::holds_alternative<InstanceStarted>(event)) {
    if (start->epoch <= epoch_) {
      refuse("epoch-not-newer", words("epoch ", start->epoch.text(), " begins after epoch ", epoch_.text()));
    }
    return;
  }
  if (epoch_.is_zero()) {
    refuse("not-started", words(event_name(event), " before InstanceStarted"));
  }
  if (stopped_) {
    refuse("already-stopped", words(event_name(event), " after InstanceStopped"));
  }
  std::visit(Overloaded{
                 [](const InstanceStarted&) {},
                 [&](const BlocksCreated& one) { check_gain("created-twice", one.tier, one.hashes, one.slots); },
                 [&](const BlocksMigrated& one) {
                   const auto* const source = std::get_if<Tier>(&one.source);
                   if (source != nullptr && *source == one.target) {
                     refuse("moved-nowhere", words("source and target are both ", tier_name(one.target)));
                   }
                   if (source != nullptr) {
                     check_held("migrated-unheld", *source, one.hashes, one.namespace_id);
                   }
                   check_gain("migrated-twice", one.target, one.hashes, one.slots);
                 },
                 [&](const BlocksEvicted& one) { check_held("evicted-unheld", one.tier, one.hashes, one.namespace_id); },
                 [&](const ResidenciesStated& one) { check_state(one); },
                 [&](const RoundEnded& one) { check_round(one); },
                 [](const InstanceStopped&) {},
             },
             event);
}

void Residencies::check_distinct(Tier tier, Bytes hashes) {
  mix(tier, hashes);
  if (mixes_.size() < 2) {
    return;
  }
  const std::size_t places = std::bit_ceil(mixes_.size() * 2);
  seen_.assign(places, 0);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    std::size_t at = mixes_[index] & (places - 1);
    for (; seen_[at] != 0; at = (at + 1) & (places - 1)) {
      const std::size_t other = seen_[at] - 1;
      if (mixes_[other] == mixes_[index] &&
          std::memcmp(hashes.data() + other * kHashBytes, hashes.data() + index * kHashBytes, kHashBytes) == 0) {
        refuse("repeated-in-run", words("a run in ", tier_name(tier), " names a block twice"));
      }
    }
    seen_[at] = static_cast<std::uint32_t>(index + 1);
  }
}

bool Residencies::are_slots_distinct(Bytes slots) {
  const std::size_t count = slots.size() / kSlotBytes;
  const std::size_t places = std::bit_ceil(count * 2 + 1);
  seen_.assign(places, 0);
  for (std::size_t index = 0; index < count; ++index) {
    const std::uint32_t slot = load_slot(slots, index);
    std::size_t at = slot_hash(slot) & (places - 1);
    for (; seen_[at] != 0; at = (at + 1) & (places - 1)) {
      if (load_slot(slots, seen_[at] - 1) == slot) {
        return false;
      }
    }
    seen_[at] = static_cast<std::uint32_t>(index + 1);
  }
  return true;
}

void Residencies::check_held(const char* rule, Tier tier, Bytes hashes, const NamespaceId& id) {
  check_distinct(tier, hashes);
  if (is_cluster(tier)) {
    return;
  }
  const TierTable& table = state(tier).table;
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    const std::uint8_t* const hash = hashes.data() + index * kHashBytes;
    const std::uint32_t position = table.find(hash, mixes_[index]);
    if (position == TierTable::kNone) {
      refuse(rule, words(tier_name(tier), " does not hold ", shortened(hash)));
    }
    const NamespaceId& held_by = namespace_id(table[position]);
    if (held_by != id) {
      refuse("foreign-namespace",
             words(shortened(hash), " belongs to namespace ", shortened(held_by), ", not ", shortened(id)));
    }
  }
}

void Residencies::check_gain(const char* rule, Tier tier, Bytes hashes, Bytes slots) {
  check_distinct(tier, hashes);
  if (is_cluster(tier)) {
    return;
  }
  const TierTable& table = state(tier).table;
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    const std::uint8_t* const hash = hashes.data() + index * kHashBytes;
    if (table.find(hash, mixes_[index]) != TierTable::kNone) {
      refuse(rule, words(tier_name(tier), " already holds ", shortened(hash)));
    }
  }
  check_slots(tier, hashes, slots);
}

void Residencies::check_slots(Tier tier, Bytes hashes, Bytes slots) {
  if (!are_slots_distinct(slots)) {
    refuse("repeated-in-run", words("a run in ", tier_name(tier), " names a slot twice"));
  }
  const PoolStated* const stated = pool(tier);
  const TierTable& table = state(tier).table;
  for (std::size_t index = 0; index < slots.size() / kSlotBytes; ++index) {
    const std::uint32_t slot = load_slot(slots, index);
    if (stated != nullptr && WireInteger(slot) >= stated->slots) {
      refuse("slot-outside", words(tier_name(tier), " has ", stated->slots.text(), " slots, not slot ", slot));
    }
    const std::uint32_t other = table.find_slot(slot);
    if (other != TierTable::kNone &&
        std::memcmp(table[other].hash.data(), hashes.data() + index * kHashBytes, kHashBytes) != 0) {
      refuse("slot-reused", words(tier_name(tier), " slot ", slot, " still holds ", shortened(table[other].hash)));
    }
  }
}

void Residencies::check_state(const ResidenciesStated& event) {
  const Tier tier = event.tier;
  check_distinct(tier, event.hashes);
  check_round_number(tier, event.round);
  if (is_cluster(tier)) {
    return;
  }
  const TierState& here = state(tier);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    const std::uint8_t* const hash = event.hashes.data() + index * kHashBytes;
    const std::uint32_t position = here.table.find(hash, mixes_[index]);
    if (position == TierTable::kNone) {
      if (here.is_whole) {
        refuse("round-added", words(tier_name(tier), " round states ", shortened(hash), ", which it does not hold"));
      }
      continue;
    }
    const Residency& one = here.table[position];
    const Slot slot = slot_at(event.slots, index);
    if (slot_of(one) != slot || namespace_id(one) != event.namespace_id) {
      refuse("moved-silently", words(tier_name(tier), " round states ", shortened(hash), " in slot ", slot_text(slot),
                                     "; it is in slot ", slot_text(slot_of(one))));
    }
  }
  check_slots(tier, event.hashes, event.slots);
}

void Residencies::check_round_number(Tier tier, std::uint32_t number) const {
  const TierState& here = state(tier);
  if (number < here.round || (number == here.round && !here.is_open)) {
    refuse("round-went-back", words(tier_name(tier), " round ", number, " after round ", here.round));
  }
}

void Residencies::check_round(const RoundEnded& event) const {
  const TierState& here = state(event.tier);
  check_round_number(event.tier, event.round);
  const std::uint64_t stated = event.round == here.round ? here.stated : 0;
  if (stated != event.count) {
    refuse("round-incomplete", words(tier_name(event.tier), " round ", event.round, " stated ", stated,
                                     " blocks, its end says ", event.count));
  }
  if (event.count == 0 && event.round > here.round) {
    return;
  }
  std::size_t unstated = 0;
  const Residency* first = nullptr;
  for (std::uint32_t at = 0; at < here.table.end(); ++at) {
    const Residency& one = here.table[at];
    if (!TierTable::is_gone(one) && one.round != event.round) {
      first = first == nullptr || one.sequence < first->sequence ? &one : first;
      ++unstated;
    }
  }
  if (first != nullptr) {
    refuse("round-withdrew", words(tier_name(event.tier), " round ", event.round, " skipped ", unstated,
                                   " held blocks, the first ", shortened(first->hash)));
  }
}

}  // namespace kvbm
