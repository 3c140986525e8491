// Slot: what the ledger knows of one slot of a pool, and lists of slots linked through it. Values without threads: who
// owns the slots owns the lists. Nothing here allocates or throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvbm/event.hpp"
#include "kvbm/hash_index.hpp"
#include "kvbm/large_array.hpp"

namespace kvbm {

inline constexpr std::uint32_t kNoSlot = kNoEntry;
inline constexpr std::uint8_t kNotKept = 0xFF;

// Whose a slot's bytes are: nobody's, whoever's it was allocated for, a copy's that writes to it, a held block's, or a
// block's that was withdrawn while pinned. `creating` is a mark that only lasts within a `create`.
enum class SlotState : std::uint8_t { kFree, kAllocated, kCreating, kReceiving, kHeld, kOrphaned };

// Which of an eviction policy's queues a block stands in.
enum class Queue : std::uint8_t { kNone, kSmall, kMain };

// One cache line, so that a command that names a slot waits for memory once.
struct alignas(64) Slot {
  SequenceHash hash{};                 // the block it holds, or the one a copy brings here
  std::uint64_t withdrawn_before = 0;  // offset after the event that last withdrew a block from it
  std::uint64_t gained = 0;            // how many blocks the tier had gained before this one
  double kept_until_s = 0;             // when `kept` ends, on the caller's clock
  std::uint32_t namespace_index = 0;   // whose block, as the namespace table counts
  std::uint32_t pins = 0;              // how often it is pinned
  std::uint32_t previous = kNoSlot;    // in its queue
  std::uint32_t next = kNoSlot;        // in its queue
  SlotState state = SlotState::kFree;  // whose it is
  Queue queue = Queue::kNone;          // which queue `previous` and `next` belong to
  std::uint8_t uses = 0;               // since its policy last looked at it
  bool is_held_back = false;           // what its policy was told: pinned or kept
  std::uint8_t priority = kNotKept;    // of a kept block, else kNotKept
  bool until_read = false;             // a kept block is kept no more once a reader gives it back
};

// Slots in the order they were appended, linked through the slots themselves.
class SlotList {
 public:
  void append(std::span<Slot> slots, std::uint32_t slot) noexcept {
    slots[slot].previous = last_;
    slots[slot].next = kNoSlot;
    (last_ == kNoSlot ? first_ : slots[last_].next) = slot;
    last_ = slot;
    ++size_;
  }

  void remove(std::span<Slot> slots, std::uint32_t slot) noexcept {
    const Slot& gone = slots[slot];
    (gone.previous == kNoSlot ? first_ : slots[gone.previous].next) = gone.next;
    (gone.next == kNoSlot ? last_ : slots[gone.next].previous) = gone.previous;
    --size_;
  }

  // The first slot, which there must be, is removed.
  std::uint32_t pop(std::span<Slot> slots) noexcept {
    const std::uint32_t slot = first_;
    remove(slots, slot);
    return slot;
  }

  // The slot appended before all others, or kNoSlot.
  std::uint32_t first() const noexcept { return first_; }
  std::size_t size() const noexcept { return size_; }

 private:
  std::uint32_t first_ = kNoSlot;  // appended before all others
  std::uint32_t last_ = kNoSlot;   // appended last
  std::size_t size_ = 0;           // how many
};

}  // namespace kvbm
