// TierSlots: the slots of one pool, who each belongs to, and which block lies where. Made once with a pool's size,
// lives as long as its ledger, which alone calls it and has checked what it asks: owner thread only. It is the table of
// the ledger's fold, where a residency's position is its slot. Only `keep`, `expire` and `held` allocate. Not to be
// moved: the policy points into the slots.
//
//   free ──take──► allocated ──insert──► held ──erase, vacate──► free, or orphaned while pinned ──unpin──► free
//                      └──give_back──► free
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <tuple>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/eviction.hpp"
#include "kvbm/hash_index.hpp"
#include "kvbm/slots.hpp"

namespace kvbm {

inline constexpr std::uint8_t kHighestPriority = 100;  // of a kept block: never given up

// How a pool's slots are used right now.
struct TierCounts {
  std::uint32_t slots;    // in the pool
  std::size_t free;       // nobody's
  std::size_t held;       // blocks held
  std::size_t evictable;  // of those, neither pinned nor kept
  std::size_t allocated;  // given out to be written, a copy's among them
};

class TierSlots {
 public:
  // eviction: name of a policy that exists. seed: for the positions in hash tables; nothing it changes can be seen.
  // shares, share_of: of tenants, as `FairShares` takes them; all blocks are alike where there are none. Both outlive
  // this.
  TierSlots(Tier tier, std::uint32_t slots, std::string_view eviction, std::uint64_t seed,
            std::span<const Share> shares = {}, const std::vector<std::uint32_t>* share_of = nullptr);

  TierSlots(const TierSlots&) = delete;
  TierSlots& operator=(const TierSlots&) = delete;

  Tier tier() const noexcept { return tier_; }
  std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(slots_.size()); }
  TierCounts counts() const noexcept;
  const Slot& slot(std::uint32_t slot) const noexcept { return slots_[slot]; }

  // -- finding blocks
  // Where a search for a hash begins; the same in all tiers of a ledger.
  std::uint32_t tag(const std::uint8_t* hash) const noexcept { return index_.tag(hash); }
  void prefetch(std::uint32_t tag) const noexcept { index_.prefetch(tag); }
  // The slot that most likely is found for a tag, whose cell is in the cache.
  void prefetch_slot(std::uint32_t tag) const noexcept { prefetch_line(index_.peek(tag)); }
  // What the eviction policy touches of others when it takes a held slot out of its queue.
  void prefetch_neighbours(std::uint32_t slot) const noexcept {
    prefetch_line(slots_[slot].previous);
    prefetch_line(slots_[slot].next);
  }
  // The slot that holds a block, or kNoSlot.
  std::uint32_t find(const std::uint8_t* hash) const noexcept { return find_tagged(tag(hash), hash); }
  std::uint32_t find_tagged(std::uint32_t tag, const std::uint8_t* hash) const noexcept {
    return index_.find(tag, hash, [this](std::uint32_t at) { return slots_[at].hash.data(); });
  }
  // Whether a copy brings the block here.
  bool is_arriving(const std::uint8_t* hash) const noexcept;
  bool is_held(std::uint32_t slot) const noexcept { return slot < size() && slots_[slot].state == SlotState::kHeld; }
  // The first held slot from one on, or kNoSlot.
  std::uint32_t next_held(std::uint32_t from) const noexcept;
  // How many blocks were gained so far: more than the `gained` of any slot.
  std::uint64_t gained() const noexcept { return gained_; }

  // -- slots that hold no block yet
  std::size_t free_count() const noexcept { return free_count_ + size() - unused_; }
  // Takes out.size() free slots, of which there must be enough. Returns the offset after which what they held was
  // withdrawn.
  std::uint64_t take(std::span<std::uint32_t> out) noexcept;
  // A slot that was allocated, and holds no block, is nobody's again.
  void give_back(std::uint32_t slot) noexcept;
  // A copy writes to an allocated slot from now on.
  void receive(std::uint32_t slot, const std::uint8_t* hash) noexcept;
  // The copy has ended; the slot is allocated.
  void end_receiving(std::uint32_t slot) noexcept;
  // What a start finds in use: the slots below `unused` that are not allocated become free.
  void reserve(std::span<const std::uint32_t> taken) noexcept;

  // -- residencies, as Fold asks for them
  static constexpr std::uint32_t kNone = kNoSlot;
  static constexpr bool kMixesFirst = false;  // what a command names is in the cache already
  static constexpr bool kKeepsBlocks = true;  // an epoch begins in place

  std::uint32_t find(const std::uint8_t* hash, std::uint64_t) const noexcept { return find(hash); }
  std::uint32_t find_slot(std::uint32_t slot) const noexcept {
    return slot < size() && (held_bits_[slot / 64] >> slot % 64 & 1) != 0 ? slot : kNone;
  }
  const std::uint8_t* hash_of(std::uint32_t slot) const noexcept { return slots_[slot].hash.data(); }
  std::uint32_t owner_of(std::uint32_t slot) const noexcept { return slots_[slot].namespace_index; }
  std::optional<std::uint32_t> slot_of(std::uint32_t slot) const noexcept { return slot; }
  // A slot holds a block from now on: one that was allocated, or a `create` has indexed, or had the block before
  // `clear`. What the policy is told follows with `enter`.
  void insert(const std::uint8_t* hash, std::uint64_t, std::uint32_t owner, std::optional<std::uint32_t> slot,
              std::uint32_t) noexcept {
    Slot& block = slots_[*slot];
    if (block.state == SlotState::kAllocated) {
      std::memcpy(block.hash.data(), hash, kHashBytes);
      index_.insert(index_.tag(hash), *slot);
    }
    block.state = SlotState::kHeld;
    block.namespace_index = owner;
    block.gained = gained_++;
    held_bits_[*slot / 64] |= std::uint64_t{1} << *slot % 64;
    --allocated_;
    ++held_;
  }
  // A held block is withdrawn. Its slot is nobody's yet: `vacate` follows.
  void erase(std::uint32_t slot, std::uint64_t) noexcept {
    index_.erase(index_.tag(slots_[slot].hash.data()), slot);
    held_bits_[slot / 64] &= ~(std::uint64_t{1} << slot % 64);
    --held_;
  }
  // It was listed in a snapshot. Nothing to do: `gained` tells what came since one began.
  void set_snapshot(std::uint32_t, std::uint32_t) noexcept {}
  // An epoch begins: nothing is held until it is listed again, by `insert`. Blocks stay where they are, in the index,
  // and as they are pinned and kept.
  void clear() noexcept;
  std::size_t count() const noexcept { return held_; }
  // Held slots in the order their blocks were gained.
  std::vector<std::uint32_t> held() const;

  // -- what else becomes of residencies
  // As `prefetch`, for a block that is about to be gained.
  void prefetch_gain(std::uint32_t tag, const std::uint8_t* hash) const noexcept {
    prefetch(tag);
    policy_->prefetch(hash);
  }
  // A `create` marks what it looks at as `creating`, so that it finds what it was given twice, and takes the mark back.
  void mark(std::uint32_t slot, SlotState state) noexcept { slots_[slot].state = state; }
  // `find` gives this slot for the hash from now on, though it is not held yet; the slot that had it already, if one
  // has.
  std::uint32_t index(std::uint32_t slot, std::uint32_t tag, const std::uint8_t* hash) noexcept {
    const std::uint32_t holder =
        index_.find_or_insert(tag, hash, slot, [this](std::uint32_t at) { return slots_[at].hash.data(); });
    if (holder == slot) {
      std::memcpy(slots_[slot].hash.data(), hash, kHashBytes);
    }
    return holder;
  }
  void unindex(std::uint32_t slot) noexcept;
  // A gained block may be evicted from now on, or is pinned once for whoever gained it.
  void enter(std::uint32_t slot, bool pinned) noexcept;
  // Used slots that hold nothing count as withdrawn by the event before `applied`.
  void withdraw_unheld(std::uint64_t applied) noexcept;
  // The slot of a block that the event before `applied` has withdrawn is free, or orphaned while it is pinned.
  void vacate(std::uint32_t slot, std::uint64_t applied) noexcept;

  // -- what may be evicted
  // A held slot gets one more pin.
  void pin(std::uint32_t slot) noexcept;
  // A pinned slot loses one.
  void unpin(std::uint32_t slot) noexcept;
  // `unpin` in two steps: a pin less in number alone, whether it was the last; then what follows from the last.
  // `count_pin` takes the first back.
  bool discount_pin(std::uint32_t slot) noexcept { return --slots_[slot].pins == 0; }
  void count_pin(std::uint32_t slot) noexcept { ++slots_[slot].pins; }
  void settle_unpinned(std::uint32_t slot) noexcept;
  // A held block stays until a time, or until it was read; a repetition takes the later time and the higher priority,
  // and a reader ends it only where both said so.
  void keep(std::uint32_t slot, double until_s, std::uint8_t priority, bool until_read = false);
  // Blocks that are kept now, pinned or not.
  std::size_t kept_count() const noexcept { return kept_in_time_.size(); }
  // A reader gives back a block: between `discount_pin` and `settle_unpinned`.
  void end_reading(std::uint32_t slot) noexcept {
    if (slots_[slot].priority != kNotKept && slots_[slot].until_read) {
      forget_keep(slot);
    }
  }
  // Lets go of kept blocks whose time has come, lowest slot first. Returns how many.
  std::size_t expire(double now_s);
  // Slots that can be had at most.
  std::size_t room() const noexcept { return free_count() + policy_->size() + yielding_; }
  // Gives up out.size() blocks: the policy's victims, then kept ones. False, and no change, when there are too few.
  bool victims(std::span<std::uint32_t> out) noexcept;
  // A block that was given up, and is held still, may be evicted again.
  void spare(std::uint32_t slot) noexcept;
  // As `FairShares::expect`; there are shares.
  void expect(std::uint32_t share, std::size_t coming) noexcept { fair_->expect(share, coming); }
  // Gives up out.size() blocks of one share, which has so many that may be evicted.
  void victims_of(std::uint32_t share, std::span<std::uint32_t> out) noexcept { fair_->victims_of(share, out); }
  // A held block leaves its share; `enter_share` follows, once its namespace is another's. There are shares.
  void leave_share(std::uint32_t slot) noexcept { fair_->lose(slot); }
  // … and enters that of its namespace, pinned and kept as it is.
  void enter_share(std::uint32_t slot) noexcept {
    fair_->gain(slot, slots_[slot].pins > 0 || slots_[slot].priority != kNotKept);
  }
  // How a share is used; there are shares.
  ShareCounts counts_of(std::uint32_t share) const noexcept { return fair_->counts(share); }

 private:
  void prefetch_line(std::uint32_t slot) const noexcept {
    if (slot != kNoSlot) {
      __builtin_prefetch(&slots_[slot]);
    }
  }
  static bool yields(const Slot& slot) noexcept { return slot.priority < kHighestPriority && slot.pins == 0; }
  void release(std::uint32_t slot) noexcept;
  void forget_keep(std::uint32_t slot) noexcept;
  void push_free(std::uint32_t slot) noexcept;

  using InTime = std::tuple<double, std::uint32_t>;                // (until_s, slot)
  using InRank = std::tuple<std::uint8_t, double, std::uint32_t>;  // (priority, until_s, slot)

  Tier tier_;                               // of the pool
  LargeArray<Slot> slots_;                  // by number
  HashIndex index_;                         // hash → slot that holds it
  HashIndex arriving_;                      // hash → slot a copy brings it to
  std::unique_ptr<EvictionPolicy> policy_;  // which block is given up first
  FairShares* fair_ = nullptr;              // the same, where there are shares
  // A ring of slots that were used and are free, next to be taken at free_first_
  std::vector<std::uint32_t> free_;
  std::size_t free_first_ = 0;            // place in free_
  std::size_t free_count_ = 0;            // how many of free_
  std::uint32_t unused_ = 0;              // slots from here on were never used
  std::size_t allocated_ = 0;             // how many slots are allocated or receiving
  std::size_t receiving_ = 0;             // how many are receiving
  std::size_t held_ = 0;                  // how many are held
  std::vector<std::uint64_t> held_bits_;  // a bit for each slot: whether it is held
  std::uint64_t gained_ = 0;              // blocks gained so far
  std::set<InTime> kept_in_time_;         // kept slots, the first to expire first
  std::set<InRank> kept_in_rank_;         // the same, the first to be given up first
  std::size_t yielding_ = 0;              // of those, how many may be given up
};

}  // namespace kvbm
