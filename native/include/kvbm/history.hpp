// History: the events of one instance → since when and until when each block was held, and why that began and ended.
// Native implementation of kvbm/reference/history.py, whose docstring says what the fields mean.
// Made empty, fed the frames of one stream in order, rows taken out now and then, dropped. One thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/fold.hpp"
#include "kvbm/residency_table.hpp"

namespace kvbm {

// Why a stay began. The first three are MigrateCause.
enum class StayBegin : std::uint8_t { kOffload = 0, kOnboard = 1, kFetch = 2, kCreated = 3, kListed = 4 };

// Why a stay ended. The first seven are EvictReason. A claim on a block of a cluster's pool is a row by itself, which
// ends as it begins.
enum class StayEnd : std::uint8_t {
  kMoved = 7,
  kRestarted = 8,
  kUnlisted = 9,
  kReplaced = 10,
  kClaimed = 11,
  kLasting = 0xFF
};

// One stay of a block in a tier, as STAY_ROW.
struct StayRow {
  std::uint64_t begin_ns;       // wall time of the frame it began in, by its instance's clock
  std::uint64_t end_ns;         // of that it ended in; 0 while it lasts
  std::uint64_t epoch;          // the instance's incarnation when it began
  std::uint64_t end_epoch;      // when it ended; 0 while it lasts
  std::uint64_t begin_offset;   // of the event it began with
  std::uint64_t end_offset;     // of the event it ended with; 0 while it lasts
  SequenceHash hash;            // the block
  std::uint32_t namespace_row;  // whose it is: index into the namespaces
  std::uint32_t slot;           // where, or kNoSlot
  std::uint32_t position;       // of the block in its chain, or kNoRow where nobody said it
  std::uint32_t from;           // the instance it was fetched from: index into the names; or kNoRow
  std::uint8_t tier;            // where
  std::uint8_t begin;           // StayBegin; kNoCode for the end of a claim
  std::uint8_t source;          // the tier it was copied from, or kNoCode
  std::uint8_t end;             // EvictReason or StayEnd
  std::uint8_t target;          // the tier it moved to, or kNoCode
  std::uint8_t unused[3];       // zero
};
static_assert(sizeof(StayRow) == 88 && std::is_trivially_copyable_v<StayRow>);

// What is known of a tier beside its blocks, as TIER_STATE_ROW.
struct TierStateRow {
  std::uint64_t listed;     // blocks that its snapshot has listed so far
  std::uint32_t snapshot;   // the one last begun
  std::uint8_t is_open;     // it has begun and not ended
  std::uint8_t is_whole;    // nothing was missed since a snapshot ended
  std::uint8_t is_cluster;  // its blocks are claims
  std::uint8_t unused;      // zero
};
static_assert(sizeof(TierStateRow) == 16 && std::is_trivially_copyable_v<TierStateRow>);

class History : private Fold<ResidencyTable> {
 public:
  History();

  // Takes in the events of a good frame. `starts` are those of all its InstanceStarted, in order; an epoch that begins
  // without one begins blind. What makes no sense is left out.
  void evolve_frame(FrameReader reader, std::span<const EpochStart> starts);
  // Events were missed: what is held is as of before, until a snapshot or the next start says more.
  void miss_events() noexcept { Fold::miss_events(); }
  // The stays that have ended since the last call, in the order they ended.
  std::vector<StayRow> take_ended();
  // Those that last.
  std::vector<StayRow> lasting() const;
  // For another one that goes on from here, beside lasting(), namespace_ids() and names(): the epoch, by tier what is
  // known of it, and for each row of lasting() the snapshot its block was last gained or listed in.
  const WireInteger& epoch() const noexcept { return Fold::epoch(); }
  std::vector<TierStateRow> tier_states() const;
  std::vector<std::uint32_t> lasting_snapshots() const;
  // Goes on where that one stood; once, before anything else. Throws Error: kLayout, a row contradicts another or names
  // nothing.
  void resume(WireInteger epoch, std::span<const TierStateRow> tiers, std::span<const NamespaceId> namespaces,
              const std::vector<std::string>& names, std::span<const StayRow> lasting,
              std::span<const std::uint32_t> snapshots);
  // Ids by their row.
  const std::vector<NamespaceId>& namespace_ids() const noexcept { return ids_; }
  // Of instances that blocks were fetched from, by their row.
  const std::vector<std::string>& names() const noexcept { return names_; }
  std::size_t count() const noexcept { return Fold::count(); }

 private:
  struct Listener;

  // What is true of all blocks of the event at hand.
  struct Told {
    Bytes run;             // its hashes
    std::size_t next = 0;  // of those, the first that was not asked for yet
    std::uint64_t wall_time_ns = 0;
    std::uint64_t epoch = 0;
    std::uint64_t offset = 0;
    std::uint32_t namespace_row = 0;
    std::uint32_t start = 0;  // of the run in its chain, or kNoRow
    std::uint32_t from = 0;   // as StayRow
    StayBegin begin = StayBegin::kListed;
    std::uint8_t source = 0;  // as StayRow
    std::uint8_t target = 0;  // as StayRow
    std::uint8_t leaves = 0;  // the tier it withdraws blocks from, or kNoCode
    std::uint8_t end = 0;     // why it does
  };

  void evolve(const Event& event, const EpochStart* start);
  template <class Kind>
  void tell(const Kind& event);
  void claim(Tier tier, StayEnd end);
  void begin_stay(const ResidencyTable& table, std::uint32_t at);
  void end_stay(Tier tier, std::uint32_t position);
  void end_all(StayEnd end);
  std::uint32_t position_of(const std::uint8_t* hash) noexcept;
  std::uint32_t row_of(const NamespaceId& id);
  std::uint32_t row_of(std::string_view name);

  Told told_;                                           // of the event at hand
  std::array<std::vector<StayRow>, kTierCount> stays_;  // by tier and the position in its table; some are over
  std::vector<StayRow> ended_;                          // not taken yet
  NamespaceTable rows_;                                 // of namespaces, for good: a fold forgets them with an epoch
  std::vector<NamespaceId> ids_;                        // by row
  std::vector<std::string> names_;                      // by row
  std::map<std::string, std::uint32_t, std::less<>> name_rows_;  // the other way
};

}  // namespace kvbm
