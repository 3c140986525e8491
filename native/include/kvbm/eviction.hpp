// EvictionPolicy: the order in which a tier's blocks are given up. Native implementation of kvbm/core/policy.py, which
// says what each call means. Made over the slots of one pool, told of every block that enters and leaves, gone before
// the slots. Owner thread only; calls neither allocate nor throw.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/hash_index.hpp"
#include "kvbm/slots.hpp"

namespace kvbm {

// The tenant that stands for all who have no share of their own
inline constexpr const char* kOthers = "*";
inline constexpr std::uint32_t kNoQuota = 0xFFFF'FFFF;  // a tier without one

// What one tenant may have of an instance's pools.
struct Share {
  std::string tenant;                             // whose
  std::uint32_t weight = 1;                       // its part of what is full, at least 1
  std::array<std::uint32_t, kTierCount> quota{};  // slots it may fill at most, by tier, or kNoQuota
};

// How one share of a pool is used right now.
struct ShareCounts {
  std::size_t held;       // blocks
  std::size_t evictable;  // of those, what may be evicted
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // A block of this hash will soon be gained: what is looked up for it may be fetched from memory already.
  virtual void prefetch(const std::uint8_t*) const noexcept {}
  // The block of a slot has entered the tier, held back if pinned. Neither that pin nor the gain counts as a use.
  virtual void gain(std::uint32_t slot, bool pinned) noexcept = 0;
  // It was used, and is held back from now on.
  virtual void hold(std::uint32_t slot) noexcept = 0;
  // Nobody holds it back any more.
  virtual void free(std::uint32_t slot) noexcept = 0;
  // It was withdrawn. One that `victims` has given up is not known any more, and ignored.
  virtual void lose(std::uint32_t slot) noexcept = 0;
  // Gives up out.size() blocks, the first to go first. False, and no change, when fewer may be evicted.
  virtual bool victims(std::span<std::uint32_t> out) noexcept = 0;
  // It may be evicted again: `victims` has given it up, and it was not withdrawn.
  virtual void spare(std::uint32_t slot) noexcept = 0;
  // How many blocks may be evicted now.
  virtual std::size_t size() const noexcept = 0;
};

// Evicts what was let go longest ago.
class LeastRecentlyUsed final : public EvictionPolicy {
 public:
  explicit LeastRecentlyUsed(std::span<Slot> slots) noexcept : slots_(slots) {}

  void gain(std::uint32_t slot, bool pinned) noexcept override;
  void hold(std::uint32_t slot) noexcept override;
  void free(std::uint32_t slot) noexcept override;
  void lose(std::uint32_t slot) noexcept override;
  bool victims(std::span<std::uint32_t> out) noexcept override;
  void spare(std::uint32_t slot) noexcept override { free(slot); }
  std::size_t size() const noexcept override { return order_.size(); }

 private:
  void leave(std::uint32_t slot) noexcept;

  std::span<Slot> slots_;  // of the pool
  SlotList order_;         // those that may be evicted, the next victim first
};

// The hashes S3-FIFO evicted last, oldest first, no more than it was made for.
class Ghosts {
 public:
  Ghosts(std::size_t capacity, std::uint64_t seed);

  void prefetch(const std::uint8_t* hash) const noexcept { index_.prefetch(index_.tag(hash)); }
  // Forgets a hash; false when it was not remembered.
  bool take(const SequenceHash& hash) noexcept;
  // Remembers a hash that it does not remember, in place of the oldest when it is full.
  void remember(const SequenceHash& hash) noexcept;

 private:
  void unlink(std::uint32_t entry) noexcept;

  LargeArray<Slot> entries_;  // hash and links of each; of a ghost nothing else is known
  HashIndex index_;           // hash → entry
  SlotList order_;            // the oldest first
  SlotList spare_;            // entries in no use
};

// Evicts what was used once before what was used again: S3-FIFO (Yang et al., SOSP 2023).
class S3Fifo final : public EvictionPolicy {
 public:
  // capacity: slots it is to share among its two queues; all of them, or what is one tenant's.
  S3Fifo(std::span<Slot> slots, std::uint64_t seed, std::size_t capacity);

  void prefetch(const std::uint8_t* hash) const noexcept override { ghosts_.prefetch(hash); }
  void gain(std::uint32_t slot, bool pinned) noexcept override;
  void hold(std::uint32_t slot) noexcept override;
  void free(std::uint32_t slot) noexcept override;
  void lose(std::uint32_t slot) noexcept override;
  bool victims(std::span<std::uint32_t> out) noexcept override;
  void spare(std::uint32_t slot) noexcept override { gain(slot, false); }
  std::size_t size() const noexcept override { return small_.size() + main_.size() - held_back_; }

 private:
  std::uint32_t victim() noexcept;
  void append_main(std::uint32_t slot) noexcept;
  void forget(std::uint32_t slot) noexcept;
  void hold_back(Slot& slot, bool is_held_back) noexcept;

  std::span<Slot> slots_;      // of the pool
  std::size_t small_slots_;    // the small queue's share
  SlotList small_;             // blocks that came, in order
  SlotList main_;              // those that came back or were used again
  Ghosts ghosts_;              // hashes of those that left from small_, as many as main has slots
  std::size_t held_back_ = 0;  // blocks of both queues that may not be evicted
  std::size_t main_free_ = 0;  // blocks of main_ that may
};

// A policy for each share of a pool: who is farthest above its share gives up first.
class FairShares final : public EvictionPolicy {
 public:
  // shares: there is at least one. share_of: by namespace index; what lies beyond it belongs to the last share. Both
  // outlive this.
  FairShares(std::string_view eviction, std::span<Slot> slots, std::uint64_t seed, std::span<const Share> shares,
             const std::vector<std::uint32_t>& share_of);

  void gain(std::uint32_t slot, bool pinned) noexcept override;
  void hold(std::uint32_t slot) noexcept override;
  void free(std::uint32_t slot) noexcept override;
  void lose(std::uint32_t slot) noexcept override;
  bool victims(std::span<std::uint32_t> out) noexcept override;
  void spare(std::uint32_t slot) noexcept override { part_of(slot).policy->spare(slot); }
  std::size_t size() const noexcept override;

  // The next `victims` are for so many blocks of a share, which count as held there.
  void expect(std::uint32_t share, std::size_t coming) noexcept { parts_[share].coming = coming; }
  // As `victims`, of one share alone.
  bool victims_of(std::uint32_t share, std::span<std::uint32_t> out) noexcept {
    return parts_[share].policy->victims(out);
  }
  ShareCounts counts(std::uint32_t share) const noexcept { return {parts_[share].held, parts_[share].policy->size()}; }

 private:
  // One share.
  struct Part {
    std::unique_ptr<EvictionPolicy> policy;  // within it
    std::uint32_t weight;                    // of it
    std::size_t held = 0;                    // its blocks
    std::size_t coming = 0;                  // blocks of it the next `victims` are for
    std::size_t left = 0;                    // scratch: of both, what `victims` has not given up
  };

  Part& part_of(std::uint32_t slot) noexcept;
  Part& farthest_above() noexcept;

  std::span<Slot> slots_;                       // of the pool
  const std::vector<std::uint32_t>& share_of_;  // by namespace index
  std::vector<Part> parts_;                     // by share
};

// The policy of a name, or nullptr when there is none of that name.
// capacity: how many of the slots its blocks fill, as far as it depends on it.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, std::span<Slot> slots, std::uint64_t seed,
                                                     std::size_t capacity);

}  // namespace kvbm
