#include "kvbm/sha256.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvbm {
namespace {

std::uint32_t load_big_u32(const std::uint8_t* at) noexcept {
  std::uint32_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return __builtin_bswap32(value);
}

}  // namespace

void sha256_compress_portable(std::uint32_t* state, const std::uint8_t* data, std::size_t chunks) noexcept {
  for (; chunks > 0; --chunks, data += 64) {
    std::uint32_t w[64];
    for (int t = 0; t < 16; ++t) {
      w[t] = load_big_u32(data + 4 * t);
    }
    for (int t = 16; t < 64; ++t) {
      const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    std::uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; ++t) {
      const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kSha256Rounds[t] + w[t];
      const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

#if defined(__x86_64__)

// The SHA instructions keep the state as ABEF and CDGH and do four rounds with the four message words of one register.
__attribute__((target("sha,sse4.1,ssse3"))) void sha256_compress_hardware(std::uint32_t* state,
                                                                          const std::uint8_t* data,
                                                                          std::size_t chunks) noexcept {
  const __m128i big_endian = _mm_set_epi64x(0x0C0D0E0F08090A0B, 0x0405060700010203);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
  for (; chunks > 0; --chunks, data += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i words[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      words[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), big_endian);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i current = words[i & 3];
      __m128i sums = _mm_add_epi32(current, _mm_load_si128(reinterpret_cast<const __m128i*>(kSha256Rounds + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sums);
      if (i >= 3 && i < 15) {  // the words of the next four rounds are due
        const __m128i tail = _mm_alignr_epi8(current, words[(i + 3) & 3], 4);
        words[(i + 1) & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(words[(i + 1) & 3], tail), current);
      }
      sums = _mm_shuffle_epi32(sums, 0x0E);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, sums);
      if (i >= 1 && i < 13) {
        words[(i + 3) & 3] = _mm_sha256msg1_epu32(words[(i + 3) & 3], current);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

bool sha256_has_hardware() noexcept {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  const bool has_sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1U << 29)) != 0;
  return has_sha && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

#else

void sha256_compress_hardware(std::uint32_t* state, const std::uint8_t* data, std::size_t chunks) noexcept {
  sha256_compress_portable(state, data, chunks);
}

bool sha256_has_hardware() noexcept { return false; }

#endif

Sha256Compress sha256_compress() noexcept {
  static const Sha256Compress chosen = sha256_has_hardware() ? sha256_compress_hardware : sha256_compress_portable;
  return chosen;  // cpuid traps in virtual machines, so it is asked once
}

void Sha256::update(Bytes data) noexcept {
  total_bytes_ += data.size();
  if (held_ > 0) {
    const std::size_t piece = std::min(data.size(), kSha256ChunkBytes - held_);
    if (piece > 0) {
      std::memcpy(chunk_.data() + held_, data.data(), piece);
    }
    held_ += piece;
    data = data.subspan(piece);
    if (held_ == kSha256ChunkBytes) {
      compress_(state_.data(), chunk_.data(), 1);
      held_ = 0;
    }
  }
  if (const std::size_t chunks = data.size() / kSha256ChunkBytes; chunks > 0) {
    compress_(state_.data(), data.data(), chunks);
    data = data.subspan(chunks * kSha256ChunkBytes);
  }
  if (!data.empty()) {  // chunk_ is empty here, or the data would have been used up
    std::memcpy(chunk_.data(), data.data(), data.size());
    held_ = data.size();
  }
}

std::array<std::uint8_t, 32> Sha256::finish() noexcept {
  chunk_[held_++] = 0x80;
  if (held_ > kSha256ChunkBytes - 8) {
    std::memset(chunk_.data() + held_, 0, kSha256ChunkBytes - held_);
    compress_(state_.data(), chunk_.data(), 1);
    held_ = 0;
  }
  std::memset(chunk_.data() + held_, 0, kSha256ChunkBytes - 8 - held_);
  const std::uint64_t bits = __builtin_bswap64(total_bytes_ * 8);
  std::memcpy(chunk_.data() + kSha256ChunkBytes - 8, &bits, sizeof bits);
  compress_(state_.data(), chunk_.data(), 1);
  std::array<std::uint8_t, 32> digest;
  for (std::size_t word = 0; word < state_.size(); ++word) {
    const std::uint32_t value = __builtin_bswap32(state_[word]);
    std::memcpy(digest.data() + 4 * word, &value, sizeof value);
  }
  return digest;
}

}  // namespace kvbm
