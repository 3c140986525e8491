// SHA-256 of FIPS 180-4.
// Sha256: made on the stack, fed, finished once; its owner's thread only. The functions are pure; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvbm/event.hpp"

namespace kvbm {

// The round constants.
alignas(16) inline constexpr std::uint32_t kSha256Rounds[64] = {
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
    0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
    0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
    0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
    0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
    0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
    0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
    0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2};

// The state before the first chunk.
inline constexpr std::array<std::uint32_t, 8> kSha256Initial{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                                             0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

inline constexpr std::size_t kSha256ChunkBytes = 64;

// Folds whole 64-byte chunks into a SHA-256 state.
using Sha256Compress = void (*)(std::uint32_t* state, const std::uint8_t* data, std::size_t chunks) noexcept;

// The variants, so that tests can hold each to the other. sha256_compress() is the fastest this CPU has.
void sha256_compress_portable(std::uint32_t* state, const std::uint8_t* data, std::size_t chunks) noexcept;
bool sha256_has_hardware() noexcept;
// Only when sha256_has_hardware().
void sha256_compress_hardware(std::uint32_t* state, const std::uint8_t* data, std::size_t chunks) noexcept;
Sha256Compress sha256_compress() noexcept;

// One SHA-256 over bytes given in pieces.
class Sha256 {
 public:
  explicit Sha256(Sha256Compress compress) noexcept : compress_(compress) {}

  void update(Bytes data) noexcept;
  // The digest. Nothing may be fed after it.
  std::array<std::uint8_t, 32> finish() noexcept;

 private:
  Sha256Compress compress_;                              // the variant in use
  std::array<std::uint32_t, 8> state_ = kSha256Initial;  // the eight working words
  std::array<std::uint8_t, kSha256ChunkBytes> chunk_;    // the bytes of a chunk not yet whole
  std::size_t held_ = 0;                                 // how many bytes of chunk_ are set
  std::uint64_t total_bytes_ = 0;                        // bytes fed so far
};

}  // namespace kvbm
