// FrameFold: the fold of a stream that is read, frame by frame: replay and recovery. Python calls it Residencies.
// Made empty, fed events in order, dropped. Its tables grow, and one thread at a time uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/fold.hpp"
#include "kvbm/residency_table.hpp"

namespace kvbm {

// The rule of `misplaced`, which contradicts nothing that is held: the event counts, also where a fold is strict.
inline constexpr std::string_view kMisplaced = "start-contradicts-parent";

// A rule an event broke.
struct Anomaly {
  std::string_view rule;  // its short name, a literal
  std::string detail;     // what was seen
  bool operator==(const Anomaly&) const = default;
};

// What events changed. A fold's listener that counts.
struct FoldDelta {
  std::uint64_t added = 0;         // residencies gained
  std::uint64_t withdrawn = 0;     // residencies lost
  std::uint64_t claimed = 0;       // blocks of cluster pools spoken for
  std::uint64_t unclaimed = 0;     // blocks of cluster pools given up
  std::vector<Anomaly> anomalies;  // in the order they were met

  void on_begun(std::size_t dropped) noexcept { withdrawn += dropped; }
  void on_gained(const ResidencyTable&) noexcept { ++added; }
  void on_lost(const ResidencyTable&, std::uint32_t) noexcept { ++withdrawn; }
  void on_moved(const ResidencyTable&, std::uint32_t) noexcept {}
  void on_claimed(std::size_t blocks) noexcept { claimed += blocks; }
  void on_unclaimed(std::size_t blocks) noexcept { unclaimed += blocks; }
  void on_anomaly(std::string_view rule, std::string detail) { anomalies.push_back({rule, std::move(detail)}); }
};

// How far a frame was folded.
struct FoldedFrame {
  std::uint32_t folded = 0;        // events folded, those before the first asked for included
  FoldDelta delta;                 // what they changed together
  std::optional<Anomaly> illegal;  // strict: the rule broken by the event after them
};

class FrameFold : public Fold<ResidencyTable> {
 public:
  explicit FrameFold(bool is_strict);

  bool strict;  // whether an event that contradicts what is held is refused; may change between events

  // Applies one event. `start` is that of an InstanceStarted, and not looked at otherwise.
  // Throws Error: kIllegalEvent, strict, and the event contradicts what is held; kLayout, a run is no run. Nothing has
  // changed then.
  void evolve(const Event& event, const EpochStart* start, FoldDelta& delta);

  // Applies the events of a good frame from `first` on, up to the first that is illegal, or to a start of another epoch
  // than the frame's, which is the caller's to judge. `starts` are those of all its InstanceStarted, in order.
  FoldedFrame evolve_frame(FrameReader reader, std::uint32_t first, std::span<const EpochStart> starts);

  // Enters an epoch whose start was missed.
  void begin_blind(WireInteger epoch, FoldDelta& delta) { begin(EpochStart{epoch, {}}, delta); }

  // The part of the digest that is one tier's.
  std::uint64_t tier_digest(Tier tier) const noexcept;
  // What a tier holds, by namespace id, and within one in the order it was gained.
  std::vector<Residency> held(Tier tier) const;
  const NamespaceId& namespace_id(const Residency& one) const noexcept {
    return namespaces()[one.owner & ~ResidencyTable::kNoSlotBit];
  }
  std::size_t memory_bytes() const noexcept;
};

}  // namespace kvbm
