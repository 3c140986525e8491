// Token ids → sequence hashes. Native implementation of kvbm/core/hashing.py. Pure functions without state; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvbm/event.hpp"
#include "kvbm/sha256.hpp"

namespace kvbm {

// How blocks without extra keys are hashed. A chain waits for itself from block to block, so only other chains can fill
// the time: a batch is hashed in as many lanes as the kernel has.
enum class HashKernel : std::uint8_t {
  kPortable = 0,  // one lane, any CPU
  kAvx2 = 1,      // eight lanes of a vector; a chain alone is hashed as by kPortable
  kSha = 2,       // the SHA instructions, two lanes
};

// Whether this CPU can run a kernel; asking for one it cannot is the caller's error.
bool has_hash_kernel(HashKernel kernel) noexcept;
HashKernel fastest_hash_kernel() noexcept;

// Chain-hash the full blocks of `tokens` into `out`.
// tokens: T ids. block_tokens: at least 1. extra_keys: one for each full block, or none at all.
// out: (T / block_tokens) * 16 bytes. Sizes are the caller's to check; nothing is thrown.
void sequence_hashes(std::span<const std::uint32_t> tokens, std::size_t block_tokens, const SequenceHash& root,
                     std::span<const Bytes> extra_keys, std::span<std::uint8_t> out,
                     HashKernel kernel = fastest_hash_kernel()) noexcept;

// The first 16 bytes of SHA-256(root, digest) for each of some digests, of any lengths: no chain, so they fill the
// lanes of the kernel where neighbours have one length. out: digests.size() * 16 bytes; its size is the caller's to
// check. Nothing is thrown.
void derived_hashes(const SequenceHash& root, std::span<const Bytes> digests, std::span<std::uint8_t> out,
                    HashKernel kernel = fastest_hash_kernel()) noexcept;

// One prompt of a batch.
struct HashJob {
  std::span<const std::uint32_t> tokens;  // T ids, in prompt order
  SequenceHash root;                      // the hash its chain starts from
  std::uint8_t* out;                      // room for (T / block_tokens) * 16 bytes
};

// What sequence_hashes gives for each job without extra keys, hashed side by side. The jobs are sorted, longest first,
// for lanes are full as long as chains are left.
void sequence_hashes_batch(std::span<HashJob> jobs, std::size_t block_tokens,
                           HashKernel kernel = fastest_hash_kernel()) noexcept;

}  // namespace kvbm
