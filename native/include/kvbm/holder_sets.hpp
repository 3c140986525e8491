// HolderSets: who holds a block, as one 32-bit value. Most blocks have one holder, and then the value is its holder id;
// other sets are kept once each, however many blocks have them, and the value is the set's number. So neighbours in a
// chain, which mostly have the same holders, are equal by one comparison. Made empty; lives as long as its index.
// Writers and readers are kept apart by its owner.
//
// A holder id says who holds a block where: bits 4 and up are the number of the *holder space* (a holder in one
// namespace), bits 2 and 3 the tier, bits 0 and 1 the generation. In order, a set has all ids of a holder space side by
// side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

using HolderId = std::uint32_t;     // 0 is nobody's
using HolderValue = std::uint32_t;  // 0: nobody; below kSetBit: one holder id; else a set

inline constexpr std::uint32_t kSetBit = 0x80000000;
inline constexpr std::uint32_t kMaxHolderSpaces = kSetBit >> 4;

constexpr HolderId holder_id_of(std::uint32_t holder_space, Tier tier, std::uint8_t generation) noexcept {
  return holder_space << 4 | static_cast<std::uint32_t>(tier) << 2 | generation;
}
constexpr std::uint32_t holder_space_of(HolderId holder_id) noexcept { return holder_id >> 4; }
constexpr Tier tier_of(HolderId holder_id) noexcept { return static_cast<Tier>(holder_id >> 2 & 3); }
constexpr std::uint8_t generation_of(HolderId holder_id) noexcept { return holder_id & 3; }

class HolderSets {
 public:
  HolderSets();

  // The holder ids of a value, in order. Of a single holder id the span points at `value` itself.
  std::span<const HolderId> holder_ids(const HolderValue& value) const noexcept {
    if ((value & kSetBit) == 0) {
      return {&value, value != 0 ? 1U : 0U};
    }
    const Cell& cell = cell_of(value);
    return {cell.holder_ids(), cell.count};
  }

  // The holder ids of one holder space, in order.
  std::span<const HolderId> ids_of_holder_space(const HolderValue& value, std::uint32_t holder_space) const noexcept;

  // A value for these holder ids, which are in order and distinct; the caller owns one reference to it. Throws
  // std::bad_alloc.
  HolderValue intern(std::span<const HolderId> holder_ids);

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
    std::uint32_t references = 0;    // blocks that have the set; of a free cell, the next free one
    std::uint32_t hash = 0;          // of its holder ids
    std::uint32_t count = 0;         // holder ids; 0 in a free cell
    HolderId inline_ids[kInline]{};  // the holder ids, or from the second on the address of their array

    const HolderId* holder_ids() const noexcept {
      if (count <= kInline) {
        return inline_ids;
      }
      const HolderId* array = nullptr;
      std::memcpy(&array, inline_ids + 1, sizeof array);
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
