// ForeignLedger: what one engine without our code holds, from its own events to the frames that tell of it, in one
// table. Native implementation of ForeignBlocks (kvbm/reference/foreign_blocks.py), which says what an engine's event
// changes, and of HeldLedger (kvbm/reference/foreign_ledger.py), which says what is recorded of that, together: a
// change is recorded as it is made.
// Made without an epoch; `begin` for each one. Owner thread only. A call that throws std::bad_alloc may have done a
// part: another epoch makes that good.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/foreign_message.hpp"
#include "kvbm/foreign_table.hpp"
#include "kvbm/namespace_table.hpp"
#include "kvbm/runs.hpp"
#include "kvbm/waiting_events.hpp"

namespace kvbm {

// Why blocks count for nothing, as EventRefusal in kvbm/streams/foreign/events.py.
struct ForeignCounts {
  std::uint64_t unmapped = 0;  // neither tokens behind a known parent nor a known hash
  std::uint64_t conflict = 0;  // one hash of the engine's for two prefixes
  std::uint64_t beyond = 0;    // beyond the bound of what is held
  std::uint64_t not_held = 0;  // removed, and not known to be held
  std::uint64_t stored = 0;    // blocks that messages taken here have told of
  std::uint64_t removed = 0;   // the same
};

// What is bounded, and how the engine counts.
struct ForeignLimits {
  std::size_t most_blocks = 0;  // held at a time
  std::size_t most_gone = 0;    // remembered though no tier holds them
  bool counts_copies = true;    // whether a block stored again in HBM is another copy
};

// Blocks of one chain that lie in a tier now.
struct ForeignStored {
  std::uint8_t home = 0;                  // number of their namespace
  Tier tier = Tier::kHbm;                 // where
  std::span<const ForeignKey> keys;       // of n blocks, in order
  const ForeignKey* parent = nullptr;     // the block before, nullptr where the first begins its chain
  std::span<const std::uint32_t> tokens;  // n * width, or not: then they are known by their keys alone
  std::size_t width = 1;                  // numbers that are hashed for a block
  std::span<const Bytes> extra_keys;      // n, or none
};

// Whether a tier has a block.
bool holds(const ForeignBlock& block, Tier tier) noexcept;

class ForeignLedger {
 public:
  // instance: whose events these are. tiers: the engine's own, in the order in which snapshots go through them.
  // seed: as ForeignTable takes it.
  ForeignLedger(std::string instance, const ForeignLimits& limits, std::vector<Tier> tiers, std::uint64_t seed);
  ForeignLedger(const ForeignLedger&) = delete;
  ForeignLedger& operator=(const ForeignLedger&) = delete;

  // -- namespaces

  // The next namespace gets the next number, from 0 on, 255 at most. is_plain: messages without an adapter mean it.
  void name(const NamespaceId& id, const SequenceHash& root, std::uint8_t group, std::uint32_t block_tokens,
            bool is_plain);
  std::size_t homes() const noexcept { return homes_.size(); }

  // -- what an engine says. All throw Error, kIllegalEvent, where no epoch has begun or the stream has ended: nothing
  // has changed then.

  // Takes a message whole, or nothing of it: one of an unusual shape, of another rank, or of a namespace that has no
  // number yet is for the caller to take apart. rank: whose messages count; none: anybody's.
  bool take(Bytes message, std::optional<std::uint64_t> rank);
  void store(const ForeignStored& stored);
  // Whether what lies before the first block of a run is known, so that the run's tokens count.
  bool follows(const ForeignStored& stored) const { return before(stored).has_value(); }
  void remove(Tier tier, std::uint8_t group, std::span<const ForeignKey> keys);
  // Removes blocks from each of the engine's tiers that has them.
  void remove_anywhere(std::uint8_t group, std::span<const ForeignKey> keys);
  void clear(Tier tier);
  // Nothing is held any more, and another epoch has to begin. forgets: what the engine's hashes mean is forgotten too.
  void drop(bool forgets);

  bool is_empty() const noexcept { return table_.held() == 0; }
  std::size_t remembered() const noexcept { return table_.size(); }
  const ForeignCounts& counts() const noexcept { return counts_; }

  // -- the stream

  // An epoch begins, with a snapshot of what is held. event: of `namespaces` namespaces.
  void begin(std::uint64_t epoch, const InstanceStarted& event, std::size_t namespaces);
  void stop(StopReason reason);
  std::uint64_t epoch() const noexcept { return epoch_; }
  bool is_stopped() const noexcept { return stopped_; }
  std::uint64_t applied() const noexcept { return applied_; }
  std::uint64_t digest() const noexcept { return digest_; }
  std::size_t held(Tier tier) const noexcept { return held_[static_cast<std::size_t>(tier)]; }
  // Packed hashes of what a tier holds, in no order.
  std::vector<std::uint8_t> hashes(Tier tier) const;
  // False when a snapshot is under way, or the stream has ended.
  bool begin_snapshot() noexcept;
  // Lists up to `limit` blocks more; whether the snapshot goes on.
  bool step_snapshot(std::size_t limit);
  std::span<const FrameBody> waiting_frames() const noexcept { return waiting_.bodies(); }
  void clear_waiting() noexcept;
  std::size_t memory_bytes() const noexcept { return table_.memory_bytes(); }

 private:
  // A namespace of the engine's.
  struct Home {
    NamespaceId id;              // whose blocks
    SequenceHash root;           // where chains start
    std::uint32_t index;         // among namespaces_
    std::uint32_t block_tokens;  // of a block
    std::uint8_t group;          // KV group
    bool is_plain;               // without an adapter
  };

  // A residency that several blocks may tell of.
  struct Residency {
    Tier tier;          // where
    SequenceHash hash;  // the blocks
    bool operator==(const Residency&) const noexcept = default;
  };
  struct ResidencyHash {
    std::size_t operator()(const Residency& one) const noexcept { return residency_mix(one.tier, one.hash.data()); }
  };

  // What lies before a run.
  struct Before {
    SequenceHash parent;  // the block before, or kNoParent
    std::uint32_t start;  // position of the run's first in its chain
  };

  // Hashes of one namespace.
  struct Run {
    std::uint8_t home;                 // its number
    bool has_shared = false;           // whether any of them is another block's as well
    std::vector<std::uint8_t> hashes;  // packed
  };

  // A snapshot under way.
  struct Listing {
    std::size_t tier = 0;      // of tiers_, which it is in
    std::uint32_t at = 0;      // position it goes on with
    std::uint32_t listed = 0;  // blocks of the tier so far
  };

  void check_open() const;
  std::optional<std::uint8_t> plain_home(std::uint8_t group, std::uint32_t block_tokens) const noexcept;
  bool knows_homes() const noexcept;
  std::optional<Before> before(const ForeignStored& stored) const;
  void look_up(std::span<const ForeignKey> keys, std::uint8_t group);
  void store_chain(const ForeignStored& stored, const SequenceHash& parent, std::uint32_t start);
  void store_known(const ForeignStored& stored);
  std::uint32_t insert(const ForeignKey& key, const std::uint8_t* hash, std::uint32_t start, std::uint8_t home,
                       Tier tier);
  bool gain(std::uint32_t position, Tier tier);
  bool lose(std::uint32_t position, Tier tier);
  void remove_from(Tier tier, std::uint8_t group, std::span<const ForeignKey> keys);
  void forget_sorted(std::vector<std::uint32_t>& gone);
  Run& run_of(std::uint8_t home);
  void gather(Run& run, const ForeignBlock& block);

  // -- events
  void gained(const Home& home, Tier tier, const SequenceHash& parent, std::uint32_t start, Bytes hashes,
              bool has_shared);
  void arrived(const Home& home, Tier tier, Bytes hashes, bool has_shared);
  void lost(const Home& home, Tier tier, EvictReason reason, Bytes hashes, bool has_shared);
  template <class Record>
  void record_gain(Tier tier, Bytes hashes, bool has_shared, Record&& record);
  bool is_shared(const std::uint8_t* hash) const noexcept;
  Bytes without_others(Tier tier, Bytes hashes);
  std::uint32_t list(Tier tier, std::uint32_t& at, std::size_t limit, bool is_first);
  std::uint32_t list_shared(Tier tier, bool is_first);
  void list_run(Tier tier, Run& run, bool is_first);
  void list_runs(Tier tier, bool is_first);
  void end_listing(Tier tier, std::uint32_t count);
  void trim();
  void count(Tier tier, Bytes hashes, bool is_gain) noexcept;
  void record(const Event& event, std::uint32_t namespace_index, std::size_t namespaces = 0);

  std::string instance_;                                                // its name
  ForeignLimits limits_;                                                // see there
  std::vector<Tier> tiers_;                                             // the engine's own
  ForeignTable table_;                                                  // the blocks
  std::vector<Home> homes_;                                             // by number
  ForeignCounts counts_;                                                // what counts for nothing
  std::unordered_map<Residency, std::uint64_t, ResidencyHash> shared_;  // of shared hashes: how often each is said
  NamespaceTable namespaces_;                                           // as the waiting events number them
  WaitingEvents waiting_;                                               // those that were not taken yet
  std::uint64_t epoch_ = 0;                                             // the epoch last begun, 0 before the first
  std::uint64_t applied_ = 0;                                           // offset the next event gets
  std::uint64_t digest_ = 0;                                            // of what the engine's own tiers hold
  std::array<std::size_t, kTierCount> held_{};                          // hashes in each tier; none of cluster pools
  bool stopped_ = false;                                                // the stream has ended
  std::uint32_t snapshot_ = 0;                                          // the snapshot last begun
  std::optional<Listing> listing_;                                      // the one under way
  DistinctHashes distinct_;                                             // scratch: of a run
  ForeignMessage message_;                                              // scratch: the message at hand
  std::vector<ForeignTable::Place> places_;                             // scratch: of an event's keys
  std::vector<std::uint8_t> hashes_;                                    // scratch: ours of them
  std::vector<Run> runs_;                                               // scratch: by namespace
  std::size_t run_count_ = 0;                                           // of them in use
  std::vector<std::uint8_t> kept_;                                      // scratch: what of a run is recorded
};

}  // namespace kvbm
