// SlotAllocator: who gets a tier's slots: free ones first, then those of blocks that give way, within tenants' shares
// and quotas. Part of a ledger, whose recorder it is given with each command. Owner thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/eviction.hpp"
#include "kvbm/recorder.hpp"
#include "kvbm/tier_slots.hpp"

namespace kvbm {

// Slots to write.
struct Allocation {
  Bytes slots;  // packed; valid until the next command
  // Offset that must be durable before they are overwritten; 0 for a tier that dies with the process
  std::uint64_t after;
};

class SlotAllocator {
 public:
  // shares: of tenants; without any, all blocks are alike. Throws Error: kLedger, when they make no sense.
  explicit SlotAllocator(std::vector<Share> shares);

  // Those there are, that of all others last; empty when there are none.
  std::span<const Share> shares() const noexcept { return shares_; }
  // By namespace index, as `FairShares` takes it; stays where it is.
  const std::vector<std::uint32_t>* share_numbers() const noexcept { return share_of_.get(); }
  // Says whose a namespace is, and counts its blocks there from now on, as gained anew: the last one first, so that it
  // leaves first.
  void assign(Recorder& recorder, const NamespaceId& namespace_id, std::string_view tenant);
  // The number of the share a namespace belongs to; there are shares.
  std::uint32_t share_of(Recorder& recorder, const NamespaceId& namespace_id) const;
  // What is left of a quota, below 0 beyond it; the pool's size where there is none. arriving: blocks of the share on
  // their way.
  std::int64_t quota_left(const TierSlots& tier, std::uint32_t share, std::size_t arriving) const noexcept;

  // Whether half of the quota of a held block's share is kept or pinned; false where there is no quota.
  bool holds_half(const TierSlots& tier, std::uint32_t slot) const noexcept;

  // namespace_id: whose blocks will be written, or nullptr. nullopt when too few slots can be had.
  std::optional<Allocation> allocate(Recorder& recorder, TierSlots& tier, std::size_t count,
                                     const NamespaceId* namespace_id);
  // Has a share's own blocks give way, of which there are so many.
  void withdraw_own(Recorder& recorder, TierSlots& tier, std::uint32_t share, std::size_t count);
  // Withdraws held blocks, a run of one namespace an event.
  void withdraw(Recorder& recorder, TierSlots& tier, std::span<const std::uint32_t> slots, EvictReason reason);

 private:
  void withdraw_victims(Recorder& recorder, TierSlots& tier, EvictReason reason);

  std::vector<Share> shares_;                             // of tenants, that of all others last
  std::unique_ptr<std::vector<std::uint32_t>> share_of_;  // by namespace index; what lies beyond it is the others'
  std::vector<std::uint32_t> taken_;                      // scratch: slots that are returned
  std::vector<std::uint32_t> victims_;                    // scratch: slots of blocks that give way
  std::vector<std::uint8_t> run_hashes_;                  // scratch: hashes of one event
};

}  // namespace kvbm
