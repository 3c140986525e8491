// Token ids → sequence hashes. Twin of kvbm/core/hashing.py.
// Sha256: made on the stack, fed, finished once; its owner's thread only. The functions are pure; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvbm/event.hpp"

namespace kvbm {

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
  static constexpr std::size_t kChunkBytes = 64;

  Sha256Compress compress_;  // the variant in use
  // The eight working words, from the initial value of FIPS 180-4.
  std::array<std::uint32_t, 8> state_{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                      0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
  std::array<std::uint8_t, kChunkBytes> chunk_;  // the bytes of a chunk not yet whole
  std::size_t held_ = 0;                         // how many bytes of chunk_ are set
  std::uint64_t total_bytes_ = 0;                // bytes fed so far
};

// Chain-hash the full blocks of `tokens` into `out`.
// tokens: T ids. block_tokens: at least 1. extra_keys: one for each full block, or none at all.
// out: (T / block_tokens) * 16 bytes. Sizes are the caller's to check; nothing is thrown.
void sequence_hashes(std::span<const std::uint32_t> tokens, std::size_t block_tokens, const SequenceHash& root,
                     std::span<const Bytes> extra_keys, std::span<std::uint8_t> out,
                     Sha256Compress compress = sha256_compress()) noexcept;

}  // namespace kvbm
