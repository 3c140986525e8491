// Ledger: decides commands into events. Twin of kvbm/core/ledger.py, which says what each command means; this one is what
// production runs. Made with an instance's pools, started once, restarted for each later epoch, asked until the process ends.
// Owner's lock around every call: no lock inside, no threads. Tables are sized at construction; a command on blocks that are
// neither kept nor copied allocates nothing once its scratch and the waiting frames have grown to what they need.
// A view that a command returns is valid until the next command, and must be copied before it is given to one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/event.hpp"
#include "kvbm/namespace_table.hpp"
#include "kvbm/tier_slots.hpp"
#include "kvbm/waiting_events.hpp"

namespace kvbm {

inline constexpr std::size_t kMaxRunBlocks = 1024;                        // of one event: it must fit a frame
inline constexpr std::size_t kRoundLooks = 8192;                          // held slots a step of a round looks at, at most
inline constexpr std::size_t kLeastEventBytes = std::size_t{1} << 20;     // less room would overflow at the first large command
inline constexpr std::uint8_t kNotHeld = 0xFF;                            // in place of a tier, of a block that none holds
inline constexpr std::size_t kDefaultEventBytes = std::size_t{64} << 20;

// What the ledger has to know of a pool.
struct Pool {
  Tier tier;            // class of medium
  std::uint32_t slots;  // how many blocks fit; 0: the pool has no slots
  bool is_cluster;      // whether it belongs to the cluster, so that its blocks are claims
};

// A residency a durable tier has kept across a restart.
struct Recovered {
  SequenceHash hash;         // the block
  NamespaceId namespace_id;  // whose
  std::uint32_t slot;        // where
};

// The longest run of held blocks, each in its hottest tier.
struct Match {
  std::size_t depth;  // blocks in the run
  Bytes tiers;        // one byte each
  Bytes slots;        // packed
};

// Slots to write.
struct Allocation {
  Bytes slots;          // packed
  std::uint64_t after;  // offset that must be durable before they are overwritten; 0 for a tier that dies with the process
};

// Where a copy reads: a tier, or another instance (UTF-8).
using CopySource = std::variant<Tier, std::string>;

// Bytes to move; source and target stay the copy's until it ends.
struct Copy {
  NamespaceId namespace_id;                 // whose blocks
  CopySource source;                        // where they come from
  Tier target;                              // where they go
  std::vector<std::uint8_t> hashes;         // packed
  std::vector<std::uint32_t> source_slots;  // empty when the source has no slots of ours
  std::vector<std::uint32_t> target_slots;  // empty for a target without slots
  std::uint64_t after = 0;                  // offset that must be durable before the target slots are overwritten
  std::uint64_t epoch = 0;                  // in which `after` counts
};

class Ledger {
 public:
  // shares: of tenants; without any, all blocks are alike.
  // Throws Error: kLedger, when there is no such policy, too little room for events, a pool of cluster reach with slots, or shares
  // that make no sense.
  Ledger(std::span<const Pool> pools, std::string_view eviction = "lru", std::size_t event_bytes = kDefaultEventBytes,
         std::vector<Share> shares = {});

  std::uint64_t epoch() const noexcept { return epoch_; }
  // Offset the next event gets.
  std::uint64_t applied() const noexcept { return applied_; }
  std::uint64_t digest() const noexcept { return digest_; }
  // Whether the stream has ended, by `stop` or by an overflow.
  bool is_stopped() const noexcept { return stopped_ || overflowed_; }
  bool has_overflowed() const noexcept { return overflowed_; }

  // -- the life of the stream; all throw Error: kLedger, kIllegalEvent
  // started: the InstanceStarted of the epoch, of `namespaces` namespaces. recovered: by tier, in the order to be stated.
  void start(std::uint64_t epoch, Bytes started, std::size_t namespaces,
             std::span<const std::vector<Recovered>, kTierCount> recovered);
  // Another epoch begins in place, with a whole round of what is held. Returns the offset after the round.
  std::uint64_t restart(std::uint64_t epoch, Bytes started, std::size_t namespaces);
  void stop(StopReason reason);
  // The frames that wait, but for what depends on who takes them.
  std::span<const FrameBody> waiting_frames() const noexcept { return waiting_.bodies(); }
  void clear_waiting() noexcept;

  // -- what an engine asks; all throw Error: kLedger, kLayout, kIllegalEvent
  // Tiers hotter than `hottest` are not looked at; what is found in it is pinned, if asked for.
  Match match(Bytes hashes, bool pinned, Tier hottest = Tier::kHbm);
  // One byte for each block: the hottest tier that holds it and is not hotter than `hottest`, or kNotHeld.
  Bytes holders(Bytes hashes, Tier hottest = Tier::kHbm);
  bool holds(Tier tier, Bytes hash) const noexcept;
  Bytes lacking(Tier tier, Bytes hashes);
  std::vector<std::uint8_t> held(Tier tier) const;
  void pin(Tier tier, Bytes slots);
  void unpin(Tier tier, Bytes slots);
  // namespace_id: whose blocks will be written, or nullptr.
  std::optional<Allocation> allocate(Tier tier, std::size_t count, const NamespaceId* namespace_id = nullptr);
  void release(Tier tier, Bytes slots);
  // Returns the slot that holds each block, packed.
  Bytes create(const NamespaceId& namespace_id, Tier tier, const SequenceHash& parent, std::uint64_t start, Bytes hashes,
               Bytes slots);
  std::size_t evict(Tier tier, Bytes hashes, EvictReason reason);
  void forget(Tier tier, const NamespaceId& namespace_id, Bytes hashes, EvictReason reason);
  // finder: the instance that found the blocks there, 1 to 255 bytes.
  void claim(Tier tier, const NamespaceId& namespace_id, Bytes hashes, std::string_view finder);
  std::size_t keep(Tier tier, Bytes hashes, double until_s, std::int64_t priority);
  std::size_t expire(double now_s);

  // -- copies
  // The copy's number and what it is, valid until it ends; nullopt when nothing is to be copied or nothing fits.
  std::optional<std::pair<std::uint64_t, const Copy*>> begin_copy(const NamespaceId& namespace_id, CopySource source,
                                                                  Tier target, Bytes hashes);
  // Blocks of a copy in flight. Throws Error: kLedger, when it is not.
  std::size_t copy_blocks(std::uint64_t id) const;
  // arrived: one for each block. Returns for each block the target slot that holds it, or kNoSlot.
  std::span<const std::uint32_t> end_copy(std::uint64_t id, std::span<const std::uint8_t> arrived, MigrateCause cause,
                                          bool kept, bool pinned);
  std::size_t copies_in_flight() const noexcept { return copies_.size(); }

  // -- rounds
  bool begin_round();
  bool step_round(std::size_t limit);

  TierCounts counts(Tier tier) const;

  // -- tenants
  // Says whose a namespace is. Throws Error: kLedger, when blocks of it are counted for another share already.
  void assign(const NamespaceId& namespace_id, std::string_view tenant);
  // Those there are, that of all others last; empty when there are none.
  std::span<const Share> shares() const noexcept { return shares_; }
  ShareCounts share_counts(Tier tier, std::uint32_t share) const { return tier_slots(tier).counts_of(share); }

 private:
  // What is left to state of one tier's round.
  struct RoundLeft {
    Tier tier;                        // the tier
    bool begun = false;               // whether its first step was made
    std::uint64_t gained_before = 0;  // blocks the tier had gained when it was: later ones need no statement
    std::uint32_t at = 0;             // slot it goes on with
    std::uint32_t count = 0;          // blocks stated so far
  };

  std::uint32_t share_of(const NamespaceId& namespace_id);
  std::int64_t quota_left(Tier tier, std::uint32_t share);
  TierSlots* find_tier(Tier tier) const noexcept { return tiers_[static_cast<std::size_t>(tier)].get(); }
  TierSlots& tier_slots(Tier tier) const;
  std::span<TierSlots* const> not_hotter_than(Tier hottest) const noexcept;
  bool is_cluster(Tier tier) const noexcept { return is_cluster_[static_cast<std::size_t>(tier)]; }
  bool is_closed(Tier tier) const noexcept;
  std::size_t admit(const Event& event) const;
  void require_open(const char* event_name) const;
  void record(const Event& event, std::size_t encoded_bytes, std::uint32_t namespace_index, std::uint64_t digest,
              bool counted = true, std::size_t started_namespaces = 0);
  void withdraw(TierSlots& tier, std::span<const std::uint32_t> slots, EvictReason reason);
  void recover(TierSlots& tier, std::span<const Recovered> entries);
  void state_held(TierSlots& tier);
  void state_run(const TierSlots& tier, bool counted, std::uint64_t digest);
  void state_recovered(TierSlots& tier, std::span<const Recovered> run, std::vector<std::uint32_t>& fresh);
  void check_create(const TierSlots& tier, Bytes hashes, Bytes slots) const;
  void create_run(TierSlots& tier, const NamespaceId& namespace_id, const SequenceHash& parent, std::uint64_t start,
                  Bytes hashes, Bytes slots);
  void migrate(const Copy& copy, Bytes hashes, std::span<const std::uint32_t> slots, bool kept, MigrateCause cause);
  void check_migrate(const Copy& copy, Bytes hashes) const;
  TierSlots* source_slots(const Copy& copy) const noexcept;
  void unpin_run(TierSlots& tier, std::span<const std::uint32_t> slots);
  Bytes distinct(Bytes hashes);

  std::vector<Share> shares_;                                 // of tenants, that of all others last
  std::unique_ptr<std::vector<std::uint32_t>> share_of_;      // by namespace index; what lies beyond it is the others'
  std::array<std::unique_ptr<TierSlots>, kTierCount> tiers_;  // by tier; those with slots
  std::vector<TierSlots*> in_order_;                          // the same, in the order the pools were given
  std::vector<TierSlots*> hottest_first_;                     // the same, by tier
  std::array<bool, kTierCount> is_cluster_{};                 // whose blocks are claims
  std::size_t event_bytes_;                                   // room for waiting events
  std::size_t waiting_bytes_ = 0;                             // encoded size of those, but for what start and stop recorded
  WaitingEvents waiting_;                                     // events that were not taken yet
  NamespaceTable namespaces_;                                 // of held blocks and waiting events
  std::uint64_t epoch_ = 0;                                   // 0 before start
  std::uint64_t applied_ = 0;                                 // offset the next event gets
  std::uint64_t digest_ = 0;                                  // of what is held
  bool stopped_ = false;                                      // by `stop`
  bool overflowed_ = false;                                   // nothing is recorded any more
  std::unordered_map<std::uint64_t, Copy> copies_;            // in flight
  std::uint64_t next_copy_ = 1;                               // number of the next
  std::uint32_t round_ = 0;                                   // the round begun last
  std::deque<RoundLeft> round_left_;                          // tiers it has not ended in
  std::vector<std::uint8_t> tier_bytes_;                      // scratch: tiers a command returns
  std::vector<std::uint32_t> slot_numbers_;                   // scratch: slots a command returns, or works on
  std::vector<std::uint32_t> victims_;                        // scratch: slots a command withdraws
  std::vector<std::uint8_t> run_hashes_;                      // scratch: hashes of one event
  std::vector<std::uint8_t> chosen_hashes_;                   // scratch: hashes a command goes on with
  std::vector<std::uint32_t> seen_;                           // scratch: a hash table of `distinct`
  std::uint64_t seed_;                                        // for positions in hash tables
};

}  // namespace kvbm
