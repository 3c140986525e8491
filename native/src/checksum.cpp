#include "kvbm/checksum.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvbm {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected

// kTables[k][b]: the CRC register after byte b and k zero bytes.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    }
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = tables[0][before & 0xFF] ^ (before >> 8);
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint64_t load_u64(const std::uint8_t* at) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

std::uint32_t crc32c_portable(std::span<const std::uint8_t> data, std::uint32_t initial) noexcept {
  std::uint32_t crc = ~initial;
  const std::uint8_t* at = data.data();
  std::size_t left = data.size();
  for (; left >= 8; at += 8, left -= 8) {
    const std::uint64_t word = load_u64(at) ^ crc;
    crc = 0;
    for (std::size_t byte = 0; byte < 8; ++byte) {
      crc ^= kTables[7 - byte][(word >> (8 * byte)) & 0xFF];
    }
  }
  for (; left > 0; ++at, --left) {
    crc = kTables[0][(crc ^ *at) & 0xFF] ^ (crc >> 8);
  }
  return ~crc;
}

#if defined(__x86_64__)

namespace {

// x**n modulo the polynomial, reflected: bit 31 is x**0.
constexpr std::uint32_t power_of_x(std::size_t n) {
  std::uint32_t value = 0x80000000;
  for (; n > 0; --n) {
    value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
  }
  return value;
}

// Three lanes of kLong bytes run at once, for the crc32 instruction starts one a cycle and answers after three; then
// lanes of kShort for what is left. A lane's CRC is carried over the bytes behind it by one carry-less product.
constexpr std::size_t kLong = 4096;
constexpr std::size_t kShort = 256;
constexpr std::size_t kLine = 64;  // of the cache

// Factor that carries a CRC over `bytes` zero bytes: crc32(0, register * factor) == the register after them.
constexpr std::uint32_t carry_factor(std::size_t bytes) { return power_of_x(bytes * 8 - 33); }

constexpr std::uint32_t kCarryLong = carry_factor(kLong);
constexpr std::uint32_t kCarryLongTwice = carry_factor(2 * kLong);
constexpr std::uint32_t kCarryShort = carry_factor(kShort);
constexpr std::uint32_t kCarryShortTwice = carry_factor(2 * kShort);

__attribute__((target("sse4.2,pclmul"))) inline std::uint64_t carry(std::uint32_t crc, std::uint32_t factor) noexcept {
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(crc)), _mm_cvtsi32_si128(static_cast<int>(factor)), 0);
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(product));
}

template <std::size_t kLane, std::uint32_t kOnce, std::uint32_t kTwice>
__attribute__((target("sse4.2,pclmul"))) inline std::uint32_t three_lanes(const std::uint8_t* at,
                                                                          std::uint32_t crc) noexcept {
  std::uint64_t first = crc;
  std::uint64_t second = 0;
  std::uint64_t third = 0;
  for (const std::uint8_t* const end = at + kLane; at != end; at += kLine) {
    // The lanes after these, which memory has ready by then
    for (std::size_t lane = 3; kLane == kLong && lane < 6; ++lane) {
      _mm_prefetch(reinterpret_cast<const char*>(at + lane * kLane), _MM_HINT_T0);
    }
    for (std::size_t word = 0; word < kLine; word += 8) {
      first = _mm_crc32_u64(first, load_u64(at + word));
      second = _mm_crc32_u64(second, load_u64(at + word + kLane));
      third = _mm_crc32_u64(third, load_u64(at + word + 2 * kLane));
    }
  }
  const std::uint64_t carried =
      carry(static_cast<std::uint32_t>(first), kTwice) ^ carry(static_cast<std::uint32_t>(second), kOnce);
  return static_cast<std::uint32_t>(_mm_crc32_u64(0, carried) ^ third);
}

}  // namespace

__attribute__((target("sse4.2,pclmul"))) std::uint32_t crc32c_hardware(std::span<const std::uint8_t> data,
                                                                       std::uint32_t initial) noexcept {
  std::uint32_t crc = ~initial;
  const std::uint8_t* at = data.data();
  std::size_t left = data.size();
  for (; left >= 3 * kLong; at += 3 * kLong, left -= 3 * kLong) {
    crc = three_lanes<kLong, kCarryLong, kCarryLongTwice>(at, crc);
  }
  for (; left >= 3 * kShort; at += 3 * kShort, left -= 3 * kShort) {
    crc = three_lanes<kShort, kCarryShort, kCarryShortTwice>(at, crc);
  }
  for (; left >= 8; at += 8, left -= 8) {
    crc = static_cast<std::uint32_t>(_mm_crc32_u64(crc, load_u64(at)));
  }
  for (; left > 0; ++at, --left) {
    crc = _mm_crc32_u8(crc, *at);
  }
  return ~crc;
}

namespace {

// Writes a line past the caches.
inline void stream_line(std::uint8_t* target, const std::uint8_t* source) noexcept {
  const auto* const from = reinterpret_cast<const __m128i*>(source);
  auto* const to = reinterpret_cast<__m128i*>(target);
  const __m128i first = _mm_loadu_si128(from);
  const __m128i second = _mm_loadu_si128(from + 1);
  const __m128i third = _mm_loadu_si128(from + 2);
  const __m128i fourth = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, first);
  _mm_stream_si128(to + 1, second);
  _mm_stream_si128(to + 2, third);
  _mm_stream_si128(to + 3, fourth);
}

// As three_lanes over lanes of kLong, each line of which is written as well; the next lanes are asked for ahead.
__attribute__((target("sse4.2,pclmul"))) std::uint32_t three_streamed_lanes(std::uint8_t* target,
                                                                            const std::uint8_t* source,
                                                                            std::uint32_t crc) noexcept {
  std::uint64_t first = crc;
  std::uint64_t second = 0;
  std::uint64_t third = 0;
  for (std::size_t at = 0; at < kLong; at += kLine) {
    for (std::size_t lane = 0; lane < 3; ++lane) {
      _mm_prefetch(reinterpret_cast<const char*>(source + at + (3 + lane) * kLong), _MM_HINT_T0);
    }
    for (std::size_t word = at; word < at + kLine; word += 8) {
      first = _mm_crc32_u64(first, load_u64(source + word));
      second = _mm_crc32_u64(second, load_u64(source + word + kLong));
      third = _mm_crc32_u64(third, load_u64(source + word + 2 * kLong));
    }
    for (std::size_t lane = 0; lane < 3; ++lane) {
      stream_line(target + at + lane * kLong, source + at + lane * kLong);
    }
  }
  const std::uint64_t carried =
      carry(static_cast<std::uint32_t>(first), kCarryLongTwice) ^ carry(static_cast<std::uint32_t>(second), kCarryLong);
  return static_cast<std::uint32_t>(_mm_crc32_u64(0, carried) ^ third);
}

// Bytes before the first whole line of a target.
std::size_t head_bytes(const std::uint8_t* target, std::size_t bytes) noexcept {
  return std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine);
}

}  // namespace

void stream_copy(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes) noexcept {
  // Four pages at once: memory answers sooner when it is asked in several places.
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kStep = 2 * kLine;
  std::size_t at = head_bytes(target, bytes);
  std::memcpy(target, source, at);
  for (; at + 4 * kPage <= bytes; at += 4 * kPage) {
    for (std::size_t step = at; step < at + kPage; step += kStep) {
      for (std::size_t place = step; place < step + 4 * kPage; place += kPage) {
        _mm_prefetch(reinterpret_cast<const char*>(source + place + 4 * kPage), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(source + place + 4 * kPage + kLine), _MM_HINT_T0);
      }
      for (std::size_t place = step; place < step + 4 * kPage; place += kPage) {
        stream_line(target + place, source + place);
        stream_line(target + place + kLine, source + place + kLine);
      }
    }
  }
  for (; at + kLine <= bytes; at += kLine) {
    stream_line(target + at, source + at);
  }
  std::memcpy(target + at, source + at, bytes - at);
}

std::uint32_t stream_copy_crc32c(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes) noexcept {
  const std::size_t head = head_bytes(target, bytes);
  std::memcpy(target, source, head);
  std::uint32_t crc = crc32c({source, head}, 0);
  std::size_t at = head;
  if (crc32c_has_hardware()) {
    crc = ~crc;
    for (; at + 3 * kLong <= bytes; at += 3 * kLong) {
      crc = three_streamed_lanes(target + at, source + at, crc);
    }
    crc = ~crc;
  }
  crc = crc32c({source + at, bytes - at}, crc);
  stream_copy(target + at, source + at, bytes - at);
  return crc;
}

void streamed_is_seen() noexcept { _mm_sfence(); }

bool crc32c_has_hardware() noexcept { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

#else

void stream_copy(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes) noexcept {
  std::memcpy(target, source, bytes);
}

std::uint32_t stream_copy_crc32c(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes) noexcept {
  std::memcpy(target, source, bytes);
  return crc32c({source, bytes}, 0);
}

void streamed_is_seen() noexcept {}

std::uint32_t crc32c_hardware(std::span<const std::uint8_t> data, std::uint32_t initial) noexcept {
  return crc32c_portable(data, initial);
}

bool crc32c_has_hardware() noexcept { return false; }

#endif

std::uint32_t crc32c(std::span<const std::uint8_t> data, std::uint32_t initial) noexcept {
  return crc32c_has_hardware() ? crc32c_hardware(data, initial) : crc32c_portable(data, initial);
}

namespace {

// Product modulo the polynomial, reflected: bit 31 is x**0.
constexpr std::uint32_t product(std::uint32_t left, std::uint32_t right) {
  std::uint32_t sum = 0;
  for (int bit = 31; bit >= 0; --bit) {
    sum ^= right & (0U - ((left >> bit) & 1U));
    right = (right >> 1) ^ (kPolynomial & (0U - (right & 1U)));
  }
  return sum;
}

// kCarries[k]: x**(8 * 2**k), which carries a checksum over 2**k bytes.
constexpr std::array<std::uint32_t, 64> make_carries() {
  std::array<std::uint32_t, 64> carries{};
  std::uint32_t value = 0x00800000;  // x**8
  for (std::uint32_t& carry : carries) {
    carry = value;
    value = product(value, value);
  }
  return carries;
}

constexpr std::array<std::uint32_t, 64> kCarries = make_carries();

}  // namespace

std::uint32_t crc32c_carried(std::uint32_t crc, std::size_t bytes) noexcept {
  for (std::size_t power = 0; bytes != 0; ++power, bytes >>= 1) {
    if ((bytes & 1) != 0) {
      crc = product(crc, kCarries[power]);
    }
  }
  return crc;
}

Crc32cCarrier::Crc32cCarrier(std::size_t bytes) noexcept {
  std::uint32_t carried = crc32c_carried(0x80000000, bytes);  // of x**0, then of x**1 and so on
  for (std::size_t byte = tables_.size(); byte-- > 0;) {
    auto& table = tables_[byte];
    table[0] = 0;
    for (std::size_t bit = 0x80; bit > 0; bit >>= 1) {
      table[bit] = carried;
      carried = (carried >> 1) ^ (kPolynomial & (0U - (carried & 1U)));
    }
    for (std::size_t value = 1; value < table.size(); ++value) {
      table[value] = table[value & (value - 1)] ^ table[value & ~(value - 1)];
    }
  }
}

void crc32c_rows(const std::uint8_t* rows, std::size_t row_bytes, std::span<std::uint32_t> out) noexcept {
  for (std::size_t index = 0; index < out.size(); ++index) {
    out[index] = crc32c({rows + index * row_bytes, row_bytes});
  }
}

}  // namespace kvbm
