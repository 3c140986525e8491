// CRC-32C (Castagnoli): the checksum of frames and of blocks that leave HBM. Native implementation of
// kvbm/core/checksum.py. Pure functions; any thread. The fastest variant the CPU has is chosen at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvbm {

// The CRC-32C of a buffer; `initial` is the CRC of what came before, to continue it.
std::uint32_t crc32c(std::span<const std::uint8_t> data, std::uint32_t initial = 0) noexcept;

// The CRC-32C of each of out.size() rows of row_bytes bytes that lie one after another in `rows`.
void crc32c_rows(const std::uint8_t* rows, std::size_t row_bytes, std::span<std::uint32_t> out) noexcept;

// What a checksum becomes over so many bytes more: crc32c(a and b) == crc32c_carried(crc32c(a), size of b) ^ crc32c(b).
std::uint32_t crc32c_carried(std::uint32_t crc, std::size_t bytes) noexcept;

// Carries many checksums over equally many bytes more, as crc32c_carried carries one: what depends on the bytes is
// computed once.
class Crc32cCarrier {
 public:
  explicit Crc32cCarrier(std::size_t bytes) noexcept;

  std::uint32_t operator()(std::uint32_t crc) const noexcept {
    return tables_[0][crc & 0xFF] ^ tables_[1][crc >> 8 & 0xFF] ^ tables_[2][crc >> 16 & 0xFF] ^ tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_;  // by byte of a checksum: what each value of it becomes
};

// memcpy past the caches, for much memory that nobody reads again soon; and the same with the CRC-32C of what was
// copied, in one pass. Other threads may see the bytes once streamed_is_seen() has been called by this one.
void stream_copy(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes) noexcept;
std::uint32_t stream_copy_crc32c(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes) noexcept;
void streamed_is_seen() noexcept;

// The variants themselves, so that tests can hold each to the others.
std::uint32_t crc32c_portable(std::span<const std::uint8_t> data, std::uint32_t initial) noexcept;
bool crc32c_has_hardware() noexcept;
// Only when crc32c_has_hardware().
std::uint32_t crc32c_hardware(std::span<const std::uint8_t> data, std::uint32_t initial) noexcept;

}  // namespace kvbm
