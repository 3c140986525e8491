// SegmentTable: blocks that lie in pieces (an engine's tensors, one or more a layer) ↔ rows, each whole, any distance
// apart. Made once from a pool's tensors, which outlive it and whose bytes it never owns; then immutable. Any thread
// may copy through it at once, each with a RowCopier, as long as no two touch the same slot or row and one of them
// writes. Native implementation of kvbm/pools/hbm/paged.py's ReferenceCopies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvbm/row_copy.hpp"

namespace kvbm {

// Consecutive bytes that every slot has: slot s has them at address + s * stride.
struct Segment {
  std::uint64_t address;  // of slot 0's bytes
  std::uint64_t stride;   // bytes from one slot's to the next one's
  std::uint64_t bytes;    // how many
};

// Rows of block_bytes() bytes each, any distance apart, as where a row of a pool holds more than a table's block.
template <class Byte>
struct BlockRows {
  Byte* first = nullptr;     // first byte of row 0
  std::uint64_t stride = 0;  // bytes from the start of a row to that of the next
};

class SegmentTable {
 public:
  // Segments in the order they have in a block. Throws Error: kLayout, without slots or segments, or for a segment
  // without bytes.
  SegmentTable(std::vector<Segment> segments, std::uint64_t slots);

  std::uint64_t slots() const noexcept { return slots_; }
  std::uint64_t block_bytes() const noexcept { return block_bytes_; }

  // Fills row at[i], or row i where `at` is empty, from slots[i]; checksums[i] becomes the row's CRC-32C. Rows do
  // not reach into each other, every slot is below slots(), every row is there: the caller has looked.
  void gather(RowCopier& copier, std::span<const std::int64_t> slots, BlockRows<std::uint8_t> rows,
              std::span<const std::int64_t> at, std::uint32_t* checksums) const noexcept;

  // Fills slots[i] from row at[i], or row i where `at` is empty. No slot is named twice.
  void scatter(RowCopier& copier, std::span<const std::int64_t> slots, BlockRows<const std::uint8_t> rows,
               std::span<const std::int64_t> at) const noexcept;

  // The CRC-32C that gather would give each of the slots.
  void checksums(RowCopier& copier, std::span<const std::int64_t> slots, std::uint32_t* out) const noexcept;

 private:
  // Segments of one size that follow one another in a block: their pieces are rows of one run.
  struct Stretch {
    std::size_t begin;     // first segment
    std::size_t end;       // one past the last
    std::uint64_t offset;  // of the first in the block
  };
  struct Pieces;

  template <class Move>
  void each_run(std::span<const std::int64_t> slots, std::span<const std::int64_t> at, std::uint64_t row_stride,
                const Move& move) const noexcept;

  std::vector<Segment> segments_;   // in the order of a block
  std::vector<Stretch> stretches_;  // all of them, in order
  std::uint64_t slots_;             // how many blocks lie there
  std::uint64_t block_bytes_ = 0;   // the sum of the segments' bytes
};

}  // namespace kvbm
