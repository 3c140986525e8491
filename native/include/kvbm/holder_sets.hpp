// HolderSets: who holds a block, as one 32-bit value. Most blocks have one holder, and then the value is that holder's seat; other sets
// are kept once each, however many blocks have them, and the value is the set's number. So neighbours in a chain, which mostly have
// the same holders, are equal by one comparison.
// Made empty; lives as long as its index. Writers and readers are kept apart by its owner.
//
// A seat is a holder's place in a namespace: bits 4 and up are the *pair* (of a holder and a namespace), bits 2 and 3 the tier, bits 0
// and 1 the generation. Ordered by seat, a set has all seats of a pair side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

using Seat = std::uint32_t;        // 0 is nobody's
using HolderValue = std::uint32_t; // 0: nobody; below kSetBit: one seat; else a set

inline constexpr std::uint32_t kSetBit = 0x80000000;
inline constexpr std::uint32_t kMaxPairs = kSetBit >> 4;

constexpr Seat seat_of(std::uint32_t pair, Tier tier, std::uint8_t generation) noexcept {
  return pair << 4 | static_cast<std::uint32_t>(tier) << 2 | generation;
}
constexpr std::uint32_t pair_of(Seat seat) noexcept { return seat >> 4; }
constexpr Tier tier_of(Seat seat) noexcept { return static_cast<Tier>(seat >> 2 & 3); }
constexpr std::uint8_t generation_of(Seat seat) noexcept { return seat & 3; }

class HolderSets {
 public:
  HolderSets();

  // The seats of a value, in order. Of a single seat the span points at `value` itself.
  std::span<const Seat> seats(const HolderValue& value) const noexcept {
    if ((value & kSetBit) == 0) {
      return {&value, value != 0 ? 1U : 0U};
    }
    const Cell& cell = cell_of(value);
    return {cell.seats(), cell.count};
  }

  // The seats of one pair, in order.
  std::span<const Seat> seats_of_pair(const HolderValue& value, std::uint32_t pair) const noexcept;

  // A value for these seats, which are in order and distinct; the caller owns one reference to it. Throws std::bad_alloc.
  HolderValue intern(std::span<const Seat> seats);

  // One more block has this value; one fewer.
  void retain(HolderValue value) noexcept {
    if ((value & kSetBit) != 0) {
      ++cell_of(value).references;
    }
  }
  void release(HolderValue value) noexcept {
    if ((value & kSetBit) != 0 && --cell_of(value).references == 0) {
      free(value);
    }
  }

  // Whether a set of this number is kept. For values that may have been damaged.
  bool has(HolderValue value) const noexcept {
    return (value & ~kSetBit) / kCellsPerSlab < slabs_.size() && cell_of(value).count != 0;
  }

  // Sets kept.
  std::size_t count() const noexcept { return count_; }
  std::size_t bytes() const noexcept;
  // Moves each time a set is freed: a number noted before may stand for another set since.
  std::uint64_t frees() const noexcept { return frees_; }

 private:
  static constexpr std::size_t kInline = 5;
  static constexpr std::size_t kCellsPerSlab = 1024;

  struct Cell {
    std::uint32_t references = 0;   // blocks that have the set; of a free cell, the next free one
    std::uint32_t hash = 0;         // of its seats
    std::uint32_t count = 0;        // seats; 0 in a free cell
    Seat inline_seats[kInline]{};   // the seats, or from the second on the address of their array

    const Seat* seats() const noexcept {
      if (count <= kInline) {
        return inline_seats;
      }
      const Seat* array = nullptr;
      std::memcpy(&array, inline_seats + 1, sizeof array);
      return array;
    }
  };
  static_assert(sizeof(Cell) == 32);

  struct Slab {
    Cell cells[kCellsPerSlab];  // cells of consecutive numbers

    ~Slab();
  };

  Cell& cell_of(HolderValue value) noexcept {
    const std::uint32_t number = value & ~kSetBit;
    return slabs_[number / kCellsPerSlab]->cells[number % kCellsPerSlab];
  }
  const Cell& cell_of(HolderValue value) const noexcept { return const_cast<HolderSets*>(this)->cell_of(value); }

  void free(HolderValue value) noexcept;
  void add_slab();
  void grow_lookup();

  std::vector<std::unique_ptr<Slab>> slabs_;  // the cells
  std::uint32_t next_free_;                   // first free cell, or kSetBit for none
  std::vector<HolderValue> lookup_;           // open addressing by hash; 0 where free; at most half full
  std::size_t count_ = 0;                     // sets kept
  std::size_t array_bytes_ = 0;               // bytes of arrays outside the cells
  std::uint64_t frees_ = 0;                   // sets freed
};

}  // namespace kvbm
