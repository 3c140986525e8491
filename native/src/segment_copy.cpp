#include "kvbm/segment_copy.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "kvbm/checksum.hpp"
#include "kvbm/error.hpp"

namespace kvbm {
namespace {

constexpr std::size_t kPieceBytes = 12 * 1024;  // copied, then summed while the cache has it: three lanes of the checksum

// Copies bytes and continues the checksum over them.
std::uint32_t copy_summed(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes, std::uint32_t sum) noexcept {
  for (std::size_t done = 0; done < bytes; done += kPieceBytes) {
    const std::size_t piece = std::min(kPieceBytes, bytes - done);
    std::memcpy(to + done, from + done, piece);
    sum = crc32c({to + done, piece}, sum);  // of what arrived, for that is what the row holds
  }
  return sum;
}

std::uint8_t* piece_of(const Segment& segment, std::int64_t slot) noexcept {
  return reinterpret_cast<std::uint8_t*>(segment.address + static_cast<std::uint64_t>(slot) * segment.stride);
}

std::size_t row_of(std::span<const std::int64_t> at, std::size_t index) noexcept {
  return at.empty() ? index : static_cast<std::size_t>(at[index]);
}

}  // namespace

SegmentTable::SegmentTable(std::vector<Segment> segments, std::uint64_t slots, unsigned threads)
    : segments_(std::move(segments)), slots_(slots), threads_(std::max(threads, 1U)) {
  if (segments_.empty() || slots_ == 0) {
    throw Error(ErrorCode::kLayout, std::to_string(slots_) + " slots of " + std::to_string(segments_.size()) +
                                        " segments; both must be at least 1");
  }
  for (const Segment& segment : segments_) {
    if (segment.bytes == 0 || segment.address == 0) {
      throw Error(ErrorCode::kLayout, "a segment of " + std::to_string(segment.bytes) + " bytes at address " +
                                          std::to_string(segment.address) + "; neither may be 0");
    }
    block_bytes_ += segment.bytes;
  }
}

template <class Block>
void SegmentTable::each_block(std::size_t count, const Block& block) const noexcept {
  for (std::size_t index = 0; index < count; ++index) {
    block(index);
  }
}

void SegmentTable::gather(std::span<const std::int64_t> slots, std::uint8_t* rows, std::span<const std::int64_t> at,
                          std::uint32_t* checksums) const noexcept {
  each_block(slots.size(), [&](std::size_t index) {
    std::uint8_t* to = rows + row_of(at, index) * block_bytes_;
    std::uint32_t sum = 0;
    for (const Segment& segment : segments_) {
      sum = copy_summed(to, piece_of(segment, slots[index]), segment.bytes, sum);
      to += segment.bytes;
    }
    checksums[index] = sum;
  });
}

void SegmentTable::scatter(std::span<const std::int64_t> slots, const std::uint8_t* rows,
                           std::span<const std::int64_t> at) const noexcept {
  each_block(slots.size(), [&](std::size_t index) {
    const std::uint8_t* from = rows + row_of(at, index) * block_bytes_;
    for (const Segment& segment : segments_) {
      std::memcpy(piece_of(segment, slots[index]), from, segment.bytes);
      from += segment.bytes;
    }
  });
}

void SegmentTable::checksums(std::span<const std::int64_t> slots, std::uint32_t* out) const noexcept {
  each_block(slots.size(), [&](std::size_t index) {
    std::uint32_t sum = 0;
    for (const Segment& segment : segments_) {
      sum = crc32c({piece_of(segment, slots[index]), segment.bytes}, sum);
    }
    out[index] = sum;
  });
}

}  // namespace kvbm
