// Snapshots: an instance says what it holds, run by run between other commands, in snapshots; a whole one at once when
// an epoch begins. Part of a ledger, whose recorder it is given with each command. Owner thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/recorder.hpp"
#include "kvbm/tier_slots.hpp"

namespace kvbm {

inline constexpr std::size_t kSnapshotLooks = 8192;  // held slots a step of a snapshot looks at, at most

// A residency a durable tier has kept across a restart.
struct Recovered {
  SequenceHash hash;         // the block
  NamespaceId namespace_id;  // whose
  std::uint32_t slot;        // where
};

class Snapshots {
 public:
  // tiers: those with slots, in the order snapshots go through them. They outlive this.
  explicit Snapshots(std::vector<TierSlots*> tiers) : tiers_(std::move(tiers)) {}

  // The first snapshot of the first epoch: what tiers have kept, by tier, in the order to be listed.
  // Throws Error: kLedger, a slot does not exist; kIllegalEvent, a block or a slot is named twice.
  void state_recovered(Recorder& recorder, std::span<const std::vector<Recovered>, kTierCount> recovered);
  // A later epoch begins, with a first snapshot of all that is held: by namespace id, within one by slot.
  void begin_epoch(Recorder& recorder, std::uint64_t epoch, const InstanceStarted& event, std::size_t encoded_bytes,
                   std::size_t namespaces);

  // False when a snapshot is under way already, or after an overflow.
  bool begin(const Recorder& recorder);
  // States up to `limit` blocks more. Whether the snapshot goes on. Throws Error: kLedger, limit is 0; kIllegalEvent.
  // Memory that runs out in its middle ends the snapshot.
  bool step(Recorder& recorder, std::size_t limit);

 private:
  // What is left to state of one tier's snapshot.
  struct SnapshotLeft {
    const TierSlots* tier;            // the tier
    bool begun = false;               // whether its first step was made
    std::uint64_t gained_before = 0;  // blocks the tier had gained when it was: later ones need no statement
    std::uint32_t at = 0;             // slot it goes on with
    std::uint32_t count = 0;          // blocks listed so far
  };

  void recover(Recorder& recorder, TierSlots& tier, std::span<const Recovered> entries);
  void state_recovered_run(Recorder& recorder, const TierSlots& tier, std::span<const Recovered> run,
                           std::vector<std::uint32_t>& fresh);
  std::vector<std::uint32_t> by_namespace(const Recorder& recorder, const TierSlots& tier) const;
  void state_some(Recorder& recorder, std::size_t limit);
  void state_run(Recorder& recorder, const TierSlots& tier, bool counted);
  void end_snapshot(Recorder& recorder, const TierSlots& tier, std::uint32_t count, bool counted);

  std::vector<TierSlots*> tiers_;         // those with slots
  std::uint32_t snapshot_ = 0;            // the snapshot begun last
  std::deque<SnapshotLeft> left_;         // tiers it has not ended in
  std::vector<std::uint8_t> run_hashes_;  // scratch: hashes of one event
  std::vector<std::uint32_t> run_slots_;  // scratch: their slots
};

}  // namespace kvbm
