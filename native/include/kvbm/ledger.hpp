// Ledger: decides commands into events. Native implementation of kvbm/reference/ledger.py, which says what each command
// means; this one is what production runs. Made with an instance's pools, started once, restarted for each later epoch,
// asked until the process ends. Owner's lock around every call: no lock inside, no threads. Tables are sized at
// construction; a command on blocks that are neither kept nor copied allocates nothing once its scratch and the waiting
// frames have grown to what they need. What it decides becomes events, which a Recorder folds as replay and recovery
// fold them. Who gets slots, copies and snapshots are parts of their own: SlotAllocator, Copies, Snapshots. A view that
// a command returns is valid until the next command, and must be copied before it is given to one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/copies.hpp"
#include "kvbm/event.hpp"
#include "kvbm/recorder.hpp"
#include "kvbm/runs.hpp"
#include "kvbm/slot_allocator.hpp"
#include "kvbm/snapshots.hpp"
#include "kvbm/tier_slots.hpp"

namespace kvbm {

// Less room would overflow at the first large command
inline constexpr std::size_t kLeastEventBytes = std::size_t{1} << 20;
// In place of a tier, of a block that none holds
inline constexpr std::uint8_t kNotHeld = 0xFF;
inline constexpr std::size_t kDefaultEventBytes = std::size_t{64} << 20;

// What the ledger has to know of a pool.
struct Pool {
  Tier tier;            // class of medium
  std::uint32_t slots;  // how many blocks fit; 0: the pool has no slots
  bool is_cluster;      // whether it belongs to the cluster, so that its blocks are claims
};

// Blocks that a tier holds, in the order it gained them.
struct HeldBlocks {
  std::vector<std::uint8_t> hashes;  // packed
  std::vector<std::uint32_t> slots;  // of each
};

// The longest run of held blocks, each in its hottest tier.
struct Match {
  std::size_t depth;  // blocks in the run
  Bytes tiers;        // one byte each
  Bytes slots;        // packed
};

class Ledger {
 public:
  // shares: of tenants; without any, all blocks are alike.
  // Throws Error: kLedger, when there is no such policy, too little room for events, a pool of cluster reach with
  // slots, or shares that make no sense.
  Ledger(std::span<const Pool> pools, std::string_view eviction = "lru", std::size_t event_bytes = kDefaultEventBytes,
         std::vector<Share> shares = {});

  std::uint64_t epoch() const noexcept { return recorder_.fold().epoch().bits(); }
  // Offset the next event gets.
  std::uint64_t applied() const noexcept { return recorder_.applied(); }
  std::uint64_t digest() const noexcept { return recorder_.fold().digest(); }
  // Whether the stream has ended, by `stop` or by an overflow.
  bool is_stopped() const noexcept { return recorder_.fold().is_stopped() || has_overflowed(); }
  bool has_overflowed() const noexcept { return recorder_.has_overflowed(); }

  // -- the life of the stream; all throw Error: kLedger, kIllegalEvent
  // started: the InstanceStarted of the epoch, of `namespaces` namespaces. recovered: by tier, in the order to be
  // listed.
  void start(std::uint64_t epoch, Bytes started, std::size_t namespaces,
             std::span<const std::vector<Recovered>, kTierCount> recovered);
  // Another epoch begins in place, with a completed snapshot of what is held. Returns the offset after the snapshot.
  std::uint64_t restart(std::uint64_t epoch, Bytes started, std::size_t namespaces);
  void stop(StopReason reason);
  // report: of a UsageRecorded.
  void record_usage(Bytes report);
  // The frames that wait, but for what depends on who takes them.
  std::span<const FrameBody> waiting_frames() const noexcept { return recorder_.waiting_frames(); }
  void clear_waiting() noexcept { recorder_.clear_waiting(); }

  // -- what an engine asks; all throw Error: kLedger, kLayout, kIllegalEvent
  // Tiers hotter than `hottest` are not looked at; what is found in it is pinned, if asked for.
  // namespace_id: whose blocks count, or nullptr for everybody's; so in what follows.
  Match match(Bytes hashes, bool pinned, Tier hottest = Tier::kHbm, const NamespaceId* namespace_id = nullptr);
  // The longest run of a namespace's blocks that are in HOST, else in NVME, and in no tier colder than `coldest`; each
  // is pinned there.
  Match lend(const NamespaceId& namespace_id, Bytes hashes, Tier coldest = Tier::kNvme);
  // One byte for each block: the hottest tier that holds it and is not hotter than `hottest`, or kNotHeld.
  Bytes holders(Bytes hashes, Tier hottest = Tier::kHbm, const NamespaceId* namespace_id = nullptr);
  bool holds(Tier tier, Bytes hash, const NamespaceId* namespace_id = nullptr) const noexcept;
  Bytes lacking(Tier tier, Bytes hashes);
  std::vector<std::uint8_t> held(Tier tier) const;
  // The blocks a tier holds of a namespace, or of all where it is nullptr: hashes, packed, and their slots.
  HeldBlocks held_of(Tier tier, const NamespaceId* namespace_id = nullptr) const;
  void pin(Tier tier, Bytes slots);
  // read: a reader gives them back: what is kept until it was read is kept no more.
  void unpin(Tier tier, Bytes slots, bool read = false);
  // namespace_id: whose blocks will be written, or nullptr.
  std::optional<Allocation> allocate(Tier tier, std::size_t count, const NamespaceId* namespace_id = nullptr);
  void release(Tier tier, Bytes slots);
  // Returns the slot that holds each block, packed.
  Bytes create(const NamespaceId& namespace_id, Tier tier, const SequenceHash& parent, std::uint64_t start,
               Bytes hashes, Bytes slots);
  std::size_t evict(Tier tier, Bytes hashes, EvictReason reason);
  void forget(Tier tier, const NamespaceId& namespace_id, Bytes hashes, EvictReason reason);
  // finder: the instance that found the blocks there, 1 to 255 bytes.
  void claim(Tier tier, const NamespaceId& namespace_id, Bytes hashes, std::string_view finder);
  // Blocks that were found in allocated slots. Returns how many the tier has gained; the slots of others are nobody's.
  std::size_t adopt(const NamespaceId& namespace_id, Tier tier, Bytes hashes, Bytes slots, std::string_view finder);
  // until_read: or until a reader gives them back. most: blocks of the tier that may be kept, and half of a tenant's
  // quota; the run is cut there.
  std::size_t keep(Tier tier, Bytes hashes, double until_s, std::int64_t priority,
                   const NamespaceId* namespace_id = nullptr, bool until_read = false,
                   std::optional<std::size_t> most = std::nullopt);
  std::size_t expire(double now_s);

  // -- copies
  // The copy's number and what it is, valid until it ends; nullopt when nothing is to be copied or nothing fits.
  std::optional<std::pair<std::uint64_t, const Copy*>> begin_copy(const NamespaceId& namespace_id, CopySource source,
                                                                  Tier target, Bytes hashes) {
    return copies_.begin(recorder_, allocator_, namespace_id, std::move(source), target, hashes);
  }
  // Blocks of a copy in flight. Throws Error: kLedger, when it is not.
  std::size_t copy_blocks(std::uint64_t id) const { return copies_.blocks(id); }
  // arrived: one for each block. Returns for each block the target slot that holds it, or kNoSlot.
  std::span<const std::uint32_t> end_copy(std::uint64_t id, std::span<const std::uint8_t> arrived, MigrateCause cause,
                                          bool kept, bool pinned) {
    return copies_.end(recorder_, id, arrived, cause, kept, pinned);
  }
  std::size_t copies_in_flight() const noexcept { return copies_.in_flight(); }

  // -- snapshots
  bool begin_snapshot() { return snapshots_.begin(recorder_); }
  bool step_snapshot(std::size_t limit) { return snapshots_.step(recorder_, limit); }

  TierCounts counts(Tier tier) const { return tier_slots(tier).counts(); }
  std::size_t kept(Tier tier) const { return tier_slots(tier).kept_count(); }

  // -- tenants
  // Says whose a namespace is, and counts its blocks there from now on, as gained anew: the last one first, so that it
  // leaves first.
  void assign(const NamespaceId& namespace_id, std::string_view tenant) {
    allocator_.assign(recorder_, namespace_id, tenant);
  }
  // Those there are, that of all others last; empty when there are none.
  std::span<const Share> shares() const noexcept { return allocator_.shares(); }
  ShareCounts share_counts(Tier tier, std::uint32_t share) const { return tier_slots(tier).counts_of(share); }

 private:
  TierSlots* find_tier(Tier tier) const noexcept { return recorder_.fold().table(tier); }
  TierSlots& tier_slots(Tier tier) const;
  std::span<TierSlots* const> not_hotter_than(Tier hottest) const noexcept;
  // Finds the longest run in some tiers, hottest first, with each block's place in the scratch that a Match is made of.
  // Returns its depth. pinned: what is found will be pinned.
  std::size_t find_run(std::span<TierSlots* const> tiers, Bytes hashes, const NamespaceId* namespace_id, bool pinned);
  Match match_of(std::size_t depth) const noexcept;
  // Slots a command returns, or works on, as many as it needs.
  std::span<std::uint32_t> slot_numbers(std::size_t count);
  void create_run(const TierSlots& tier, const NamespaceId& namespace_id, const SequenceHash& parent,
                  std::uint64_t start, Bytes hashes, Bytes slots);

  std::uint64_t seed_;                       // for positions in hash tables
  SlotAllocator allocator_;                  // who gets slots
  Recorder recorder_;                        // events, and what their fold holds
  Snapshots snapshots_;                      // snapshots
  Copies copies_;                            // in flight
  std::vector<TierSlots*> hottest_first_;    // tiers with slots
  DistinctHashes distinct_;                  // of runs to evict
  std::vector<std::uint8_t> tier_bytes_;     // scratch: tiers a command returns
  std::vector<std::uint32_t> slot_numbers_;  // scratch: see above
  std::vector<std::uint8_t> chosen_hashes_;  // scratch: hashes a command returns
};

}  // namespace kvbm
