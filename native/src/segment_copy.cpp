#include "kvbm/segment_copy.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "kvbm/checksum.hpp"
#include "kvbm/error.hpp"

namespace kvbm {

// Pieces of one size that are copied as one run. They lie on the stack, so a long run of blocks is copied in several.
struct SegmentTable::Pieces {
  static constexpr std::size_t kMost = 1024;

  std::array<std::int64_t, kMost> from_slots;  // where the engine has each, in bytes after the first segment's address
  std::array<std::int64_t, kMost> in_rows;     // where the rows have it, in bytes after the first row
  std::array<std::size_t, kMost> blocks;       // whose it is, as an index of the run of blocks
  std::array<std::uint32_t, kMost> checksums;  // room for each one's
  std::size_t count = 0;                       // how many there are

  std::span<std::uint32_t> room() noexcept { return {checksums.data(), count}; }
};

SegmentTable::SegmentTable(std::vector<Segment> segments, std::uint64_t slots)
    : segments_(std::move(segments)), slots_(slots) {
  if (segments_.empty() || slots_ == 0) {
    throw Error(ErrorCode::kLayout, std::to_string(slots_) + " slots of " + std::to_string(segments_.size()) +
                                        " segments; both must be at least 1");
  }
  for (std::size_t index = 0; index < segments_.size(); ++index) {
    const Segment& segment = segments_[index];
    if (segment.bytes == 0 || segment.address == 0) {
      throw Error(ErrorCode::kLayout, "a segment of " + std::to_string(segment.bytes) + " bytes at address " +
                                          std::to_string(segment.address) + "; neither may be 0");
    }
    if (index == 0 || segments_[index - 1].bytes != segment.bytes) {
      stretches_.push_back({index, index, block_bytes_});
    }
    stretches_.back().end = index + 1;
    block_bytes_ += segment.bytes;
  }
}

// Calls move(pieces, bytes of each) until every piece of every block was in one call; those of one block come in their
// order.
template <class Move>
void SegmentTable::each_run(std::span<const std::int64_t> slots, std::span<const std::int64_t> at,
                            std::uint64_t row_stride, const Move& move) const noexcept {
  Pieces pieces;
  for (const Stretch& stretch : stretches_) {
    const std::uint64_t bytes = segments_[stretch.begin].bytes;
    for (std::size_t block = 0; block < slots.size(); ++block) {
      const auto slot = static_cast<std::uint64_t>(slots[block]);
      const auto row = at.empty() ? block : static_cast<std::uint64_t>(at[block]);
      for (std::size_t index = stretch.begin; index < stretch.end; ++index) {
        const Segment& segment = segments_[index];
        const std::uint64_t address = segment.address + slot * segment.stride;
        const std::uint64_t offset = stretch.offset + (index - stretch.begin) * bytes;
        pieces.from_slots[pieces.count] = static_cast<std::int64_t>(address - segments_.front().address);
        pieces.in_rows[pieces.count] = static_cast<std::int64_t>(row * row_stride + offset);
        pieces.blocks[pieces.count] = block;
        if (++pieces.count == Pieces::kMost) {
          move(pieces, bytes);
          pieces.count = 0;
        }
      }
    }
    if (pieces.count != 0) {
      move(pieces, bytes);
      pieces.count = 0;
    }
  }
}

void SegmentTable::gather(RowCopier& copier, std::span<const std::int64_t> slots, BlockRows<std::uint8_t> rows,
                          std::span<const std::int64_t> at, std::uint32_t* checksums) const noexcept {
  const auto* const first = reinterpret_cast<const std::uint8_t*>(segments_.front().address);
  std::fill_n(checksums, slots.size(), 0);
  each_run(slots, at, rows.stride, [&](Pieces& pieces, std::uint64_t bytes) noexcept {
    copier.copy({rows.first, 1, pieces.in_rows.data()}, {first, 1, pieces.from_slots.data()}, pieces.count, bytes,
                pieces.room());
    for (std::size_t piece = 0; piece < pieces.count; ++piece) {
      std::uint32_t& sum = checksums[pieces.blocks[piece]];
      sum = crc32c_carried(sum, bytes) ^ pieces.checksums[piece];
    }
  });
}

void SegmentTable::scatter(RowCopier& copier, std::span<const std::int64_t> slots, BlockRows<const std::uint8_t> rows,
                           std::span<const std::int64_t> at) const noexcept {
  auto* const first = reinterpret_cast<std::uint8_t*>(segments_.front().address);
  each_run(slots, at, rows.stride, [&](Pieces& pieces, std::uint64_t bytes) noexcept {
    copier.copy({first, 1, pieces.from_slots.data()}, {rows.first, 1, pieces.in_rows.data()}, pieces.count, bytes, {});
  });
}

void SegmentTable::checksums(RowCopier& copier, std::span<const std::int64_t> slots,
                             std::uint32_t* out) const noexcept {
  const auto* const first = reinterpret_cast<const std::uint8_t*>(segments_.front().address);
  std::fill_n(out, slots.size(), 0);
  each_run(slots, {}, 0, [&](Pieces& pieces, std::uint64_t bytes) noexcept {
    copier.checksum({first, 1, pieces.from_slots.data()}, bytes, pieces.room());
    for (std::size_t piece = 0; piece < pieces.count; ++piece) {
      std::uint32_t& sum = out[pieces.blocks[piece]];
      sum = crc32c_carried(sum, bytes) ^ pieces.checksums[piece];
    }
  });
}

}  // namespace kvbm
