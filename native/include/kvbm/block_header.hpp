// The 64 bytes that prove a block in a slot of NVME. Native implementation of kvbm/pools/nvme/slot_header.py, which
// draws them. Pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvbm {

inline constexpr std::size_t kBlockHeaderBytes = 64;
// Behind it, of a block that is sealed; what they mean is its sealer's affair
inline constexpr std::size_t kSealBytes = 64;

// What a header says of its block.
struct BlockProof {
  std::span<const std::uint8_t, 16> namespace_id;  // whose block
  std::span<const std::uint8_t, 16> hash;          // which block
  std::uint64_t epoch;                             // of its writer
  std::uint32_t block_bytes;                       // bytes that follow
  std::uint32_t checksum;                          // their CRC-32C
  bool is_sealed;                                  // a seal follows the header
  std::uint32_t generation;                        // of the pool when it was written, 0 where the pool keeps none
};

// What a header says by itself.
struct FoundBlock {
  std::array<std::uint8_t, 16> namespace_id{};  // whose block
  std::array<std::uint8_t, 16> hash{};          // which block
  std::uint64_t epoch = 0;                      // of its writer
  std::uint32_t generation = 0;                 // of the pool when it was written
  bool is_sealed = false;                       // a seal follows the header
};

void encode_block_header(const BlockProof& proof, std::span<std::uint8_t, kBlockHeaderBytes> out) noexcept;

// Whether a header is whole and speaks of this block, with any epoch and a seal or none; then `checksum` is what its
// bytes must have.
bool is_header_of(std::span<const std::uint8_t, kBlockHeaderBytes> header,
                  std::span<const std::uint8_t, 16> namespace_id, std::span<const std::uint8_t, 16> hash,
                  std::uint32_t block_bytes, bool is_sealed, std::uint32_t& checksum) noexcept;

// Whether a header is whole and speaks of a block of this size, whichever it is; then `found` is what it says.
bool read_block_header(std::span<const std::uint8_t, kBlockHeaderBytes> header, std::uint32_t block_bytes,
                       FoundBlock& found) noexcept;

}  // namespace kvbm
