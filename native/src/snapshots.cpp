#include "kvbm/snapshots.hpp"

#include <algorithm>
#include <new>
#include <numeric>
#include <string>

#include "kvbm/runs.hpp"

namespace kvbm {

void Snapshots::state_recovered(Recorder& recorder, std::span<const std::vector<Recovered>, kTierCount> recovered) {
  snapshot_ = 1;
  for (TierSlots* const tier : tiers_) {
    recover(recorder, *tier, recovered[static_cast<std::size_t>(tier->tier())]);
  }
}

void Snapshots::recover(Recorder& recorder, TierSlots& tier, std::span<const Recovered> entries) {
  std::vector<std::uint32_t> slots;
  for (const Recovered& entry : entries) {
    slots.push_back(entry.slot);
  }
  if (!slots.empty() && std::ranges::max(slots) >= tier.size()) {
    throw slot_error(tier.tier(), std::ranges::max(slots),
                     "was recovered; the pool has " + std::to_string(tier.size()));
  }
  tier.reserve(slots);
  std::vector<std::uint32_t> fresh;
  for (std::size_t begin = 0, end = 0; begin < entries.size(); begin = end) {
    while (end < entries.size() && end - begin < kMaxRunBlocks &&
           entries[end].namespace_id == entries[begin].namespace_id) {
      ++end;
    }
    state_recovered_run(recorder, tier, entries.subspan(begin, end - begin), fresh);
  }
  end_snapshot(recorder, tier, static_cast<std::uint32_t>(entries.size()), false);
  for (const std::uint32_t slot : fresh) {
    tier.enter(slot, false);
  }
}

// fresh: gets the slots that held nothing before.
void Snapshots::state_recovered_run(Recorder& recorder, const TierSlots& tier, std::span<const Recovered> run,
                                    std::vector<std::uint32_t>& fresh) {
  run_hashes_.clear();
  run_slots_.clear();
  for (const Recovered& entry : run) {
    append(run_hashes_, entry.hash.data());
    run_slots_.push_back(entry.slot);
    if (!tier.is_held(entry.slot)) {
      fresh.push_back(entry.slot);
    }
  }
  const ResidenciesListed listed{.namespace_id = run.front().namespace_id,
                                 .tier = tier.tier(),
                                 .snapshot = snapshot_,
                                 .hashes = run_hashes_,
                                 .slots = packed(run_slots_)};
  const Event event = listed;
  const std::size_t bytes = recorder.admit(event);
  recorder.fold().check(listed);
  recorder.record<ResidenciesListed>(event, bytes, recorder.fold().namespaces().intern(listed.namespace_id),
                                     FindByHash{}, false);
}

void Snapshots::begin_epoch(Recorder& recorder, std::uint64_t epoch, const InstanceStarted& event,
                            std::size_t encoded_bytes, std::size_t namespaces) {
  std::vector<std::vector<std::uint32_t>> held;  // gathered before: nothing is held once the epoch has begun
  for (const TierSlots* const tier : tiers_) {
    held.push_back(by_namespace(recorder, *tier));
  }
  left_.clear();
  snapshot_ = 1;
  recorder.begin(epoch, event, encoded_bytes, namespaces);
  run_hashes_.clear();
  run_slots_.clear();
  for (std::size_t at = 0; at < tiers_.size(); ++at) {
    const TierSlots& tier = *tiers_[at];
    for (const std::uint32_t slot : held[at]) {
      if (!run_slots_.empty() &&
          (run_slots_.size() == kMaxRunBlocks || tier.owner_of(run_slots_.front()) != tier.owner_of(slot))) {
        state_run(recorder, tier, false);
      }
      append(run_hashes_, tier.hash_of(slot));
      run_slots_.push_back(slot);
    }
    state_run(recorder, tier, false);
    end_snapshot(recorder, tier, static_cast<std::uint32_t>(held[at].size()), false);
  }
  for (TierSlots* const tier : tiers_) {
    if (is_durable(tier->tier())) {
      tier->withdraw_unheld(recorder.applied());
    }
  }
}

// The held slots of a tier by namespace id, within one by number.
std::vector<std::uint32_t> Snapshots::by_namespace(const Recorder& recorder, const TierSlots& tier) const {
  const NamespaceTable& namespaces = recorder.fold().namespaces();
  std::vector<std::vector<std::uint32_t>> slots;  // by namespace index
  for (std::uint32_t slot = tier.next_held(0); slot != kNoSlot; slot = tier.next_held(slot + 1)) {
    const std::uint32_t index = tier.owner_of(slot);
    slots.resize(std::max(slots.size(), index + std::size_t{1}));
    slots[index].push_back(slot);
  }
  std::vector<std::uint32_t> order(slots.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](std::uint32_t index) -> const NamespaceId& { return namespaces[index]; });
  std::vector<std::uint32_t> ordered;
  ordered.reserve(tier.count());
  for (const std::uint32_t index : order) {
    ordered.insert(ordered.end(), slots[index].begin(), slots[index].end());
  }
  return ordered;
}

bool Snapshots::begin(const Recorder& recorder) {
  if (!left_.empty() || recorder.has_overflowed()) {
    return false;
  }
  ++snapshot_;
  for (const TierSlots* const tier : tiers_) {
    left_.push_back({.tier = tier});
  }
  return true;
}

bool Snapshots::step(Recorder& recorder, std::size_t limit) {
  if (limit == 0) {
    throw ledger_error("limit is 0; a step of a snapshot states at least 1 block");
  }
  if (recorder.has_overflowed()) {
    left_.clear();
  }
  if (left_.empty()) {
    return false;
  }
  try {
    state_some(recorder, std::min(limit, kMaxRunBlocks));
  } catch (const std::bad_alloc&) {
    left_.clear();  // what it has stated of a tier is not known: the next begins anew
    throw;
  }
  return !left_.empty() && !recorder.has_overflowed();
}

void Snapshots::state_some(Recorder& recorder, std::size_t limit) {
  SnapshotLeft left = left_.front();
  left_.pop_front();
  const TierSlots& tier = *left.tier;
  if (!left.begun) {
    left.begun = true;
    left.gained_before = tier.gained();
  }
  run_hashes_.clear();
  run_slots_.clear();
  std::size_t looks = 0;
  std::uint32_t listed = 0;
  std::uint32_t slot = tier.next_held(left.at);
  for (; slot != kNoSlot && listed < limit && looks < kSnapshotLooks; ++looks, slot = tier.next_held(slot + 1)) {
    if (tier.slot(slot).gained >= left.gained_before) {
      continue;
    }
    if (!run_slots_.empty() && tier.owner_of(run_slots_.front()) != tier.owner_of(slot)) {
      state_run(recorder, tier, true);
    }
    append(run_hashes_, tier.hash_of(slot));
    run_slots_.push_back(slot);
    ++listed;
  }
  state_run(recorder, tier, true);
  left.at = slot;
  left.count += listed;
  if (slot != kNoSlot) {
    left_.push_front(left);
  } else {
    end_snapshot(recorder, tier, left.count, true);
  }
}

// Records the statement of a run of one namespace, gathered in run_hashes_ and run_slots_, which are empty afterwards.
void Snapshots::state_run(Recorder& recorder, const TierSlots& tier, bool counted) {
  if (run_slots_.empty()) {
    return;
  }
  const std::uint32_t namespace_index = tier.owner_of(run_slots_.front());
  const Event event = ResidenciesListed{.namespace_id = recorder.fold().namespaces()[namespace_index],
                                        .tier = tier.tier(),
                                        .snapshot = snapshot_,
                                        .hashes = run_hashes_,
                                        .slots = packed(run_slots_)};
  const std::size_t bytes = recorder.admit(event);
  recorder.record<ResidenciesListed>(
      event, bytes, namespace_index,
      [this](const TierSlots& here, std::size_t at, const std::uint8_t*, std::uint64_t) {
        return here.find_slot(run_slots_[at]);
      },
      counted);
  run_hashes_.clear();
  run_slots_.clear();
}

void Snapshots::end_snapshot(Recorder& recorder, const TierSlots& tier, std::uint32_t count, bool counted) {
  const Event event = SnapshotEnded{.tier = tier.tier(), .snapshot = snapshot_, .count = count};
  recorder.record<SnapshotEnded>(event, recorder.admit(event), 0, FindByHash{}, counted);
}

}  // namespace kvbm
