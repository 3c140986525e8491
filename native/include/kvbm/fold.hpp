// Fold: the events of one instance → what it holds, and the digest of that. Native implementation of kvbm/core/fold.py.
// The one place that says what an event changes. A ledger applies the events it decides, as it records them; replay and
// recovery apply those they read. The two differ in the table of a tier: TierSlots for a ledger, ResidencyTable for a
// reader. Made with empty tables, given events in order, dropped. One thread at a time.
//
// A listener is told what changed: on_begun(residencies dropped), before they are; on_gained(table), of the one put in
// last; on_lost(table, position), on_claimed(blocks), on_unclaimed(blocks), and, where events may be illegal,
// on_moved(table, position), of one that has another slot or owner now, and on_anomaly(rule, detail).
// `owner` is the number of an event's namespace, if it has one, in namespaces().
// `where` gives the position of a block that an event names: where(table, index in the run, hash, mix), or the table's
// kNone.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "kvbm/epoch_start.hpp"
#include "kvbm/event.hpp"
#include "kvbm/namespace_table.hpp"
#include "kvbm/runs.hpp"
#include "kvbm/words.hpp"

namespace kvbm {

// Whether events are known to be legal: they were checked, or decided here. Of others, what makes sense is applied.
enum class Legality : bool { kKnown, kUnknown };

// `where` for who knows no more of a block than its hash.
struct FindByHash {
  template <class Table>
  std::uint32_t operator()(const Table& table, std::size_t, const std::uint8_t* hash,
                           std::uint64_t mix) const noexcept {
    return table.find(hash, mix);
  }
};

template <class Table>
class Fold {
 public:
  using Tables = std::array<std::unique_ptr<Table>, kTierCount>;

  // tables: by tier, empty; nullptr where there is nothing to hold. pools: known before the first start.
  explicit Fold(Tables tables, std::vector<PoolStated> pools = {}) : tables_(std::move(tables)) {
    set_pools(std::move(pools));
  }

  // The epoch last begun, 0 before the first.
  const WireInteger& epoch() const noexcept { return epoch_; }
  bool is_stopped() const noexcept { return stopped_; }
  std::uint64_t digest() const noexcept { return digest_; }
  Table* table(Tier tier) const noexcept { return tables_[static_cast<std::size_t>(tier)].get(); }
  std::size_t count() const noexcept;
  std::size_t count(Tier tier) const noexcept { return table(tier) != nullptr ? table(tier)->count() : 0; }
  bool is_whole(Tier tier) const noexcept { return snapshots_[static_cast<std::size_t>(tier)].is_whole; }
  bool is_cluster(Tier tier) const noexcept { return is_cluster_[static_cast<std::size_t>(tier)]; }
  // The pools of the epoch, a tier once, in the order first listed.
  const std::vector<PoolStated>& pools() const noexcept { return pools_; }
  NamespaceTable& namespaces() noexcept { return namespaces_; }
  const NamespaceTable& namespaces() const noexcept { return namespaces_; }

  // -- what an event changes; `event` has whole hashes, and as many slots or none
  template <class Listener>
  void begin(const EpochStart& start, Listener& listener);
  template <Legality kLegality, class Where, class Listener>
  void apply(const BlocksCreated& event, std::uint32_t owner, Where&&, Listener& listener) {
    add<kLegality>(owner, event.tier, event.hashes, event.slots, listener);
  }
  // where: asked of the source tier alone.
  template <Legality kLegality, class Where, class Listener>
  void apply(const BlocksMigrated& event, std::uint32_t owner, Where&& where, Listener& listener);
  template <Legality kLegality, class Where, class Listener>
  void apply(const BlocksEvicted& event, std::uint32_t, Where&& where, Listener& listener) {
    withdraw<kLegality>(event.tier, event.hashes, where, listener);
  }
  template <Legality kLegality, class Where, class Listener>
  void apply(const ResidenciesListed& event, std::uint32_t owner, Where&& where, Listener& listener);
  template <Legality kLegality, class Where, class Listener>
  void apply(const SnapshotEnded& event, std::uint32_t, Where&&, Listener& listener);
  template <Legality kLegality, class Where, class Listener>
  void apply(const InstanceStopped&, std::uint32_t, Where&&, Listener&) {
    stopped_ = true;
  }
  // It changes nothing that is held.
  template <Legality kLegality, class Where, class Listener>
  void apply(const UsageRecorded&, std::uint32_t, Where&&, Listener&) {}
  // Says that events were missed: every tier is suspect until a completed snapshot begins and ends from here on.
  void miss_events() noexcept;

  // -- what is illegal; all throw Error: kIllegalEvent
  void check(const InstanceStarted&, const EpochStart& start) const;
  void check(const BlocksCreated& event) { check_gain("created-twice", event.tier, event.hashes, event.slots); }
  void check(const BlocksMigrated& event);
  void check(const BlocksEvicted& event) {
    check_distinct(event.tier, event.hashes);
    check_held("evicted-unheld", event.tier, event.hashes, event.namespace_id);
  }
  void check(const ResidenciesListed& event);
  void check(const SnapshotEnded& event) const;
  void check(const InstanceStopped&) const {}
  void check(const UsageRecorded&) const {}
  // Any event but a start, by its number in Event: the epoch has begun and not stopped.
  void check_open(std::size_t event) const {
    if (epoch_.is_zero() || stopped_) [[unlikely]] {
      refuse_closed(event);
    }
  }
  // The parts of a check, for who has seen to the others.
  void check_distinct(Tier tier, Bytes hashes);
  void check_source(const BlocksMigrated& event);

 protected:
  // What is known of one tier's snapshots.
  struct Snapshot {
    std::uint32_t number = 0;  // the snapshot last begun
    std::uint64_t listed = 0;  // blocks it has listed so far
    bool is_open = false;      // it has begun and not ended
    bool is_whole = false;     // nothing was missed since a snapshot ended
  };

  // Forgets what was computed for the last event's run.
  void forget_mixes() noexcept { mixed_.reset(); }
  const Snapshot& snapshot_of(Tier tier) const noexcept { return snapshots_[static_cast<std::size_t>(tier)]; }
  // For a fold that goes on where another one of the same log stood: what of a tier is not in its table. Residencies
  // are put into the tables by the caller, who needs no digest.
  void resume(WireInteger epoch) { epoch_ = std::move(epoch); }
  void resume(Tier tier, bool is_cluster, const Snapshot& snapshot) noexcept {
    is_cluster_[static_cast<std::size_t>(tier)] = is_cluster;
    snapshots_[static_cast<std::size_t>(tier)] = snapshot;
  }

 private:
  Snapshot& snapshot_of(Tier tier) noexcept { return snapshots_[static_cast<std::size_t>(tier)]; }
  void set_pools(std::vector<PoolStated> pools);
  // Computes the mixes of a run in a tier, and has its table's lines come into the cache.
  void mix(Tier tier, Bytes hashes);
  void prepare(Tier tier, Bytes hashes) {
    if constexpr (Table::kMixesFirst) {
      mix(tier, hashes);
    }
  }
  // The mix of a block of the run prepared.
  std::uint64_t mix_of(Tier tier, const std::uint8_t* hash, std::size_t index) const noexcept {
    if constexpr (Table::kMixesFirst) {
      return mixes_[index];
    } else {
      return residency_mix(tier, hash);
    }
  }

  template <Legality kLegality, class Listener>
  void add(std::uint32_t owner, Tier tier, Bytes hashes, Bytes slots, Listener& listener);
  template <Legality kLegality, class Where, class Listener>
  void withdraw(Tier tier, Bytes hashes, Where&& where, Listener& listener);
  template <class Listener>
  void gain(Table& here, const std::uint8_t* hash, std::uint64_t mix, std::uint32_t owner,
            std::optional<std::uint32_t> slot, std::uint32_t snapshot, Listener& listener);
  template <class Listener>
  void lose(Table& here, std::uint32_t position, std::uint64_t mix, Listener& listener);
  template <class Listener>
  void take_snapshot(Tier tier, std::uint32_t position, std::uint32_t owner, std::optional<std::uint32_t> slot,
                     bool is_twice, Listener& listener);
  template <class Listener>
  void vacate(Tier tier, std::uint32_t slot, Listener& listener);
  // Whether a snapshot begins here.
  bool enter_snapshot(Tier tier, std::uint32_t number) noexcept;

  [[noreturn]] void refuse_closed(std::size_t event) const;
  void check_held(const char* rule, Tier tier, Bytes hashes, const NamespaceId& id);
  void check_gain(const char* rule, Tier tier, Bytes hashes, Bytes slots);
  void check_slots(Tier tier, Bytes hashes, Bytes slots);
  void check_snapshot_number(Tier tier, std::uint32_t number) const;

  WireInteger epoch_;                           // the epoch last begun, 0 before the first
  std::vector<PoolStated> pools_;               // its pools
  std::array<bool, kTierCount> is_cluster_{};   // whose blocks are claims
  bool stopped_ = false;                        // it has ended cleanly
  std::uint64_t digest_ = 0;                    // sum of the mixes of all residencies
  Tables tables_;                               // what each tier holds
  std::array<Snapshot, kTierCount> snapshots_;  // by tier
  NamespaceTable namespaces_;                   // of what is held
  std::vector<std::uint64_t> mixes_;            // of the run at hand
  std::optional<Tier> mixed_;                   // the tier they are for, while they are those of the event at hand
  std::vector<std::uint32_t> seen_;             // scratch for finding what a run repeats: open addressing of index + 1
};

// -- the work of each event -------------------------------------------------------------------------------------------

template <class Table>
template <class Listener>
void Fold<Table>::begin(const EpochStart& start, Listener& listener) {
  listener.on_begun(count());
  digest_ = 0;
  for (const auto& table : tables_) {
    if (table != nullptr) {
      table->clear();
    }
  }
  snapshots_.fill({});
  if constexpr (!Table::kKeepsBlocks) {
    namespaces_.clear();
  }
  epoch_ = start.epoch;
  stopped_ = false;
  set_pools(start.pools);
}

template <class Table>
template <Legality kLegality, class Where, class Listener>
void Fold<Table>::apply(const BlocksMigrated& event, std::uint32_t owner, Where&& where, Listener& listener) {
  add<kLegality>(owner, event.target, event.hashes, event.slots, listener);
  const auto* const source = std::get_if<Tier>(&event.source);
  if (source != nullptr && !event.kept) {
    withdraw<kLegality>(*source, event.hashes, where, listener);
  } else if (source != nullptr && is_cluster(*source)) {
    listener.on_claimed(event.hashes.size() / kHashBytes);  // it was read there, so it is there
  }
}

template <class Table>
template <Legality kLegality, class Where, class Listener>
void Fold<Table>::apply(const ResidenciesListed& event, std::uint32_t owner, Where&& where, Listener& listener) {
  const Tier tier = event.tier;
  const std::size_t count = event.hashes.size() / kHashBytes;
  enter_snapshot(tier, event.snapshot);
  Snapshot& snapshot = snapshot_of(tier);
  snapshot.listed += count;
  if (is_cluster(tier)) {
    listener.on_claimed(count);
    return;
  }
  prepare(tier, event.hashes);
  Table& here = *table(tier);
  for (std::size_t index = 0; index < count; ++index) {
    const std::uint8_t* const hash = hash_at(event.hashes, index);
    const std::uint64_t mix = mix_of(tier, hash, index);
    const std::uint32_t position = where(here, index, hash, mix);
    const std::optional<std::uint32_t> slot = slot_if_any(event.slots, index);
    if constexpr (kLegality == Legality::kUnknown) {
      if (position != Table::kNone) {
        take_snapshot(tier, position, owner, slot, false, listener);
        continue;
      }
      if (snapshot.is_whole) {
        listener.on_anomaly("snapshot-added", words(tier_name(tier), " had not held ", shortened(hash)));
      }
      if (slot) {
        vacate(tier, *slot, listener);
      }
    } else if (position != Table::kNone) {
      here.set_snapshot(position, snapshot.number);
      continue;
    }
    gain(here, hash, mix, owner, slot, snapshot.number, listener);
  }
}

template <class Table>
template <Legality kLegality, class Where, class Listener>
void Fold<Table>::apply(const SnapshotEnded& event, std::uint32_t, Where&&, Listener& listener) {
  const Tier tier = event.tier;
  const bool is_new = enter_snapshot(tier, event.snapshot);
  Snapshot& snapshot = snapshot_of(tier);
  if constexpr (kLegality == Legality::kUnknown) {
    if (!snapshot.is_open || snapshot.listed != event.count) {
      listener.on_anomaly("snapshot-incomplete",
                          words(tier_name(tier), " snapshot ", event.snapshot, " listed ", snapshot.listed,
                                " blocks here, ", event.count, " at its source"));
      return;
    }
    if (Table* const here = table(tier)) {
      for (const std::uint32_t at : here->in_order([&](const auto& one) { return one.snapshot != event.snapshot; })) {
        if (snapshot.is_whole && event.count != 0) {
          listener.on_anomaly("snapshot-withdrew", words(tier_name(tier), " snapshot ", event.snapshot,
                                                         " had not listed ", shortened(here->hash_of(at))));
        }
        lose(*here, at, residency_mix(tier, here->hash_of(at)), listener);
      }
    }
  } else if (is_new && event.count == 0 && count(tier) > 0) {  // any other has listed all that is held
    Table& here = *table(tier);
    for (const std::uint32_t at : here.held()) {
      lose(here, at, residency_mix(tier, here.hash_of(at)), listener);
    }
  }
  snapshot.is_open = false;
  snapshot.is_whole = true;
}

template <class Table>
template <Legality kLegality, class Listener>
void Fold<Table>::add(std::uint32_t owner, Tier tier, Bytes hashes, Bytes slots, Listener& listener) {
  const std::size_t count = hashes.size() / kHashBytes;
  if (is_cluster(tier)) {
    listener.on_claimed(count);
    return;
  }
  prepare(tier, hashes);
  Table& here = *table(tier);
  const std::uint32_t snapshot = snapshot_of(tier).number;
  for (std::size_t index = 0; index < count; ++index) {
    const std::uint8_t* const hash = hash_at(hashes, index);
    const std::uint64_t mix = mix_of(tier, hash, index);
    const std::optional<std::uint32_t> slot = slot_if_any(slots, index);
    if constexpr (kLegality == Legality::kUnknown) {
      const std::uint32_t position = here.find(hash, mix);
      if (position != Table::kNone) {
        take_snapshot(tier, position, owner, slot, true, listener);
        continue;
      }
      if (slot) {
        vacate(tier, *slot, listener);
      }
    }
    gain(here, hash, mix, owner, slot, snapshot, listener);
  }
}

template <class Table>
template <Legality kLegality, class Where, class Listener>
void Fold<Table>::withdraw(Tier tier, Bytes hashes, Where&& where, Listener& listener) {
  const std::size_t count = hashes.size() / kHashBytes;
  if (is_cluster(tier)) {
    listener.on_unclaimed(count);
    return;
  }
  prepare(tier, hashes);
  Table& here = *table(tier);
  for (std::size_t index = 0; index < count; ++index) {
    const std::uint8_t* const hash = hash_at(hashes, index);
    const std::uint64_t mix = mix_of(tier, hash, index);
    const std::uint32_t position = where(here, index, hash, mix);
    if constexpr (kLegality == Legality::kUnknown) {
      if (position == Table::kNone) {
        listener.on_anomaly("evicted-unheld", words(tier_name(tier), " does not hold ", shortened(hash)));
        continue;
      }
    }
    lose(here, position, mix, listener);
  }
}

template <class Table>
template <class Listener>
void Fold<Table>::gain(Table& here, const std::uint8_t* hash, std::uint64_t mix, std::uint32_t owner,
                       std::optional<std::uint32_t> slot, std::uint32_t snapshot, Listener& listener) {
  here.insert(hash, mix, owner, slot, snapshot);
  digest_ += mix;
  listener.on_gained(here);
}

template <class Table>
template <class Listener>
void Fold<Table>::lose(Table& here, std::uint32_t position, std::uint64_t mix, Listener& listener) {
  here.erase(position, mix);
  digest_ -= mix;
  listener.on_lost(here, position);
}

template <class Table>
template <class Listener>
void Fold<Table>::take_snapshot(Tier tier, std::uint32_t position, std::uint32_t owner,
                                std::optional<std::uint32_t> slot, bool is_twice, Listener& listener) {
  Table& here = *table(tier);
  if (is_twice) {
    listener.on_anomaly("created-twice", words(tier_name(tier), " already holds ", shortened(here.hash_of(position))));
  }
  const std::optional<std::uint32_t> before = here.slot_of(position);
  if (slot != before || here.owner_of(position) != owner) {
    listener.on_anomaly("moved-silently", words(tier_name(tier), " held ", shortened(here.hash_of(position)),
                                                " in slot ", slot_text(before), ", not ", slot_text(slot)));
    if (slot && slot != before) {
      vacate(tier, *slot, listener);
    }
    here.move(position, owner, slot);
    listener.on_moved(here, position);
  }
  here.set_snapshot(position, snapshot_of(tier).number);
}

template <class Table>
template <class Listener>
void Fold<Table>::vacate(Tier tier, std::uint32_t slot, Listener& listener) {
  Table& here = *table(tier);
  const std::uint32_t other = here.find_slot(slot);
  if (other != Table::kNone) {
    const std::uint8_t* const hash = here.hash_of(other);
    listener.on_anomaly("slot-reused", words(tier_name(tier), " slot ", slot, " still held ", shortened(hash)));
    lose(here, other, residency_mix(tier, hash), listener);
  }
}

template <class Table>
bool Fold<Table>::enter_snapshot(Tier tier, std::uint32_t number) noexcept {
  Snapshot& snapshot = snapshot_of(tier);
  if (number == snapshot.number) {
    return false;
  }
  snapshot.number = number;
  snapshot.listed = 0;
  snapshot.is_open = true;
  return true;
}

template <class Table>
void Fold<Table>::miss_events() noexcept {
  for (Snapshot& snapshot : snapshots_) {
    snapshot.is_open = snapshot.is_whole = false;
  }
}

template <class Table>
std::size_t Fold<Table>::count() const noexcept {
  std::size_t sum = 0;
  for (const auto& table : tables_) {
    sum += table != nullptr ? table->count() : 0;
  }
  return sum;
}

template <class Table>
void Fold<Table>::set_pools(std::vector<PoolStated> pools) {
  pools_.clear();
  is_cluster_.fill(false);
  is_cluster_[static_cast<std::size_t>(Tier::kObject)] = true;  // unless a pool says otherwise
  for (PoolStated& listed : pools) {
    is_cluster_[static_cast<std::size_t>(listed.tier)] = listed.reach == Reach::kCluster;
    const auto same = std::ranges::find(pools_, listed.tier, &PoolStated::tier);
    if (same == pools_.end()) {
      pools_.push_back(std::move(listed));
    } else {
      *same = std::move(listed);
    }
  }
}

template <class Table>
void Fold<Table>::mix(Tier tier, Bytes hashes) {
  const Table* const here = table(tier);
  if constexpr (Table::kMixesFirst) {
    if (mixed_ == tier) {
      return;
    }
    mixed_ = tier;
  }
  mixes_.resize(hashes.size() / kHashBytes);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    mixes_[index] = residency_mix(tier, hash_at(hashes, index));
    if constexpr (Table::kMixesFirst) {
      here->prefetch(mixes_[index]);
    }
  }
}

// -- what is illegal --------------------------------------------------------------------------------------------------

template <class Table>
void Fold<Table>::check(const InstanceStarted&, const EpochStart& start) const {
  if (start.epoch <= epoch_) {
    refuse("epoch-not-newer", words("epoch ", start.epoch.text(), " begins after epoch ", epoch_.text()));
  }
}

template <class Table>
void Fold<Table>::refuse_closed(std::size_t event) const {
  if (epoch_.is_zero()) {
    refuse("not-started", words(event_name(event), " before InstanceStarted"));
  }
  refuse("already-stopped", words(event_name(event), " after InstanceStopped"));
}

template <class Table>
void Fold<Table>::check(const BlocksMigrated& event) {
  const auto* const source = std::get_if<Tier>(&event.source);
  if (source != nullptr && *source != event.target) {
    check_distinct(*source, event.hashes);
  }
  check_source(event);
  check_gain("migrated-twice", event.target, event.hashes, event.slots);
}

template <class Table>
void Fold<Table>::check_source(const BlocksMigrated& event) {
  const auto* const source = std::get_if<Tier>(&event.source);
  if (source == nullptr) {
    return;
  }
  if (*source == event.target) {
    refuse("moved-nowhere", words("source and target are both ", tier_name(event.target)));
  }
  check_held("migrated-unheld", *source, event.hashes, event.namespace_id);
}

template <class Table>
void Fold<Table>::check(const ResidenciesListed& event) {
  const Tier tier = event.tier;
  check_distinct(tier, event.hashes);
  check_snapshot_number(tier, event.snapshot);
  if (is_cluster(tier)) {
    return;
  }
  const Table& here = *table(tier);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    const std::uint8_t* const hash = hash_at(event.hashes, index);
    const std::uint32_t position = here.find(hash, mixes_[index]);
    if (position == Table::kNone) {
      if (is_whole(tier)) {
        refuse("snapshot-added",
               words(tier_name(tier), " snapshot states ", shortened(hash), ", which it does not hold"));
      }
      continue;
    }
    const std::optional<std::uint32_t> slot = slot_if_any(event.slots, index);
    if (here.slot_of(position) != slot || namespaces_[here.owner_of(position)] != event.namespace_id) {
      refuse("moved-silently", words(tier_name(tier), " snapshot states ", shortened(hash), " in slot ",
                                     slot_text(slot), "; it is in slot ", slot_text(here.slot_of(position))));
    }
  }
  check_slots(tier, event.hashes, event.slots);
}

template <class Table>
void Fold<Table>::check_distinct(Tier tier, Bytes hashes) {
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
          std::memcmp(hash_at(hashes, other), hash_at(hashes, index), kHashBytes) == 0) {
        refuse("repeated-in-run", words("a run in ", tier_name(tier), " names a block twice"));
      }
    }
    seen_[at] = static_cast<std::uint32_t>(index + 1);
  }
}

template <class Table>
void Fold<Table>::check_held(const char* rule, Tier tier, Bytes hashes, const NamespaceId& id) {
  if (is_cluster(tier)) {
    return;
  }
  prepare(tier, hashes);
  const Table* const here = table(tier);
  for (std::size_t index = 0; index < hashes.size() / kHashBytes; ++index) {
    const std::uint8_t* const hash = hash_at(hashes, index);
    const std::uint32_t position = here != nullptr ? here->find(hash, mix_of(tier, hash, index)) : Table::kNone;
    if (position == Table::kNone) {
      refuse(rule, words(tier_name(tier), " does not hold ", shortened(hash)));
    }
    const NamespaceId& owner = namespaces_[here->owner_of(position)];
    if (std::memcmp(owner.data(), id.data(), id.size()) != 0) {
      refuse("foreign-namespace",
             words(shortened(hash), " belongs to namespace ", shortened(owner.data()), ", not ", shortened(id.data())));
    }
  }
}

template <class Table>
void Fold<Table>::check_gain(const char* rule, Tier tier, Bytes hashes, Bytes slots) {
  check_distinct(tier, hashes);
  if (is_cluster(tier)) {
    return;
  }
  const Table& here = *table(tier);
  for (std::size_t index = 0; index < mixes_.size(); ++index) {
    const std::uint8_t* const hash = hash_at(hashes, index);
    if (here.find(hash, mixes_[index]) != Table::kNone) {
      refuse(rule, words(tier_name(tier), " already holds ", shortened(hash)));
    }
  }
  check_slots(tier, hashes, slots);
}

template <class Table>
void Fold<Table>::check_slots(Tier tier, Bytes hashes, Bytes slots) {
  if (!are_slots_distinct(slots, seen_)) {
    refuse("repeated-in-run", words("a run in ", tier_name(tier), " names a slot twice"));
  }
  const auto pool = std::ranges::find(pools_, tier, &PoolStated::tier);
  const Table& here = *table(tier);
  for (std::size_t index = 0; index < slots.size() / kSlotBytes; ++index) {
    const std::uint32_t slot = slot_at(slots, index);
    if (pool != pools_.end() && WireInteger(slot) >= pool->slots) {
      refuse("slot-outside", words(tier_name(tier), " has ", pool->slots.text(), " slots, not slot ", slot));
    }
    const std::uint32_t other = here.find_slot(slot);
    if (other != Table::kNone && std::memcmp(here.hash_of(other), hash_at(hashes, index), kHashBytes) != 0) {
      refuse("slot-reused", words(tier_name(tier), " slot ", slot, " still holds ", shortened(here.hash_of(other))));
    }
  }
}

template <class Table>
void Fold<Table>::check_snapshot_number(Tier tier, std::uint32_t number) const {
  const Snapshot& snapshot = snapshot_of(tier);
  if (number < snapshot.number || (number == snapshot.number && !snapshot.is_open)) {
    refuse("snapshot-went-back", words(tier_name(tier), " snapshot ", number, " after snapshot ", snapshot.number));
  }
}

template <class Table>
void Fold<Table>::check(const SnapshotEnded& event) const {
  const Snapshot& snapshot = snapshot_of(event.tier);
  check_snapshot_number(event.tier, event.snapshot);
  const std::uint64_t listed = event.snapshot == snapshot.number ? snapshot.listed : 0;
  if (listed != event.count) {
    refuse("snapshot-incomplete", words(tier_name(event.tier), " snapshot ", event.snapshot, " listed ", listed,
                                        " blocks, its end says ", event.count));
  }
  if (event.count == 0 && event.snapshot > snapshot.number) {
    return;
  }
  const Table& here = *table(event.tier);
  std::size_t unlisted = 0;
  std::uint32_t first = 0;
  for (std::uint32_t at = 0; at < here.end(); ++at) {
    if (!Table::is_gone(here[at]) && here[at].snapshot != event.snapshot) {
      first = unlisted == 0 || here[at].sequence < here[first].sequence ? at : first;
      ++unlisted;
    }
  }
  if (unlisted > 0) {
    refuse("snapshot-withdrew", words(tier_name(event.tier), " snapshot ", event.snapshot, " skipped ", unlisted,
                                      " held blocks, the first ", shortened(here.hash_of(first))));
  }
}

}  // namespace kvbm
