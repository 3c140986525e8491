// SegmentTable: blocks that lie in pieces (an engine's tensors, one or more a layer) ↔ contiguous rows.
// Made once from a pool's tensors, which outlive it and whose bytes it never owns; then immutable: any thread may copy through it at
// once, as long as no two touch the same slot or row and one of them writes. Twin of kvbm/pools/paged.py's ReferenceCopies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvbm {

// Consecutive bytes that every slot has: slot s has them at address + s * stride.
struct Segment {
  std::uint64_t address;  // of slot 0's bytes
  std::uint64_t stride;   // bytes from one slot's to the next one's
  std::uint64_t bytes;    // how many
};

class SegmentTable {
 public:
  // Segments in the order they have in a block. `threads`: at most so many copy one run; 0 counts as 1.
  // Throws Error: kLayout, without slots or segments, or for a segment without bytes.
  SegmentTable(std::vector<Segment> segments, std::uint64_t slots, unsigned threads);

  std::uint64_t slots() const noexcept { return slots_; }
  std::uint64_t block_bytes() const noexcept { return block_bytes_; }

  // Fills row at[i], or row i where `at` is empty, from slots[i]; checksums[i] becomes the row's CRC-32C. `rows` lie block_bytes()
  // apart. Every slot is below slots(), every row is there: the caller has looked.
  void gather(std::span<const std::int64_t> slots, std::uint8_t* rows, std::span<const std::int64_t> at,
              std::uint32_t* checksums) const noexcept;

  // Fills slots[i] from row at[i], or row i where `at` is empty. A slot named twice holds either row, or some of both.
  void scatter(std::span<const std::int64_t> slots, const std::uint8_t* rows,
               std::span<const std::int64_t> at) const noexcept;

  // The CRC-32C that gather would give each of the slots.
  void checksums(std::span<const std::int64_t> slots, std::uint32_t* out) const noexcept;

 private:
  template <class Block>
  void each_block(std::size_t count, const Block& block) const noexcept;

  std::vector<Segment> segments_;   // in the order of a block
  std::uint64_t slots_;             // how many blocks lie there
  std::uint64_t block_bytes_ = 0;   // the sum of the segments' bytes
  unsigned threads_;                // at most so many copy one run
};

}  // namespace kvbm
