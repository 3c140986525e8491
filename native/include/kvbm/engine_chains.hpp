// Token ids → the digests by which vLLM and SGLang know blocks, and these → our hashes. Native implementation of
// kvbm/core/engine_chains.py, which says what is hashed. Pure functions without state; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "kvbm/event.hpp"

namespace kvbm {

enum class EngineChain : std::uint8_t { kVllmSha256 = 0, kVllmCbor = 1, kSglangSha256 = 2 };

inline constexpr std::size_t kDigestBytes = 32;
inline constexpr std::size_t kMostHashTokens = 8192;     // of one digest
inline constexpr std::size_t kMostKeyBytes = 16 * 1024;  // of the extra keys of one digest

// The chain that Python calls so.
std::optional<EngineChain> engine_chain(std::string_view name) noexcept;

// The digests of the full blocks of `tokens` into `out`.
// hash_tokens: 1 to kMostHashTokens. begin: 32 bytes; of SGLang there may be none. keys: one for each full block, each
// of kMostKeyBytes at most, or none at all. out: (T / hash_tokens) * 32 bytes. Sizes are the caller's to check. Throws
// std::bad_alloc alone.
void engine_digests(EngineChain chain, std::span<const std::uint32_t> tokens, std::size_t hash_tokens, Bytes begin,
                    std::span<const Bytes> keys, std::span<std::uint8_t> out);

// Our hash of each whole block of `scale` digests, from its last one, or from that one's hexadecimal text.
// out: (digests.size() / 32 / scale) * 16 bytes; its size is the caller's to check. Nothing is thrown.
void digest_hashes(const SequenceHash& root, Bytes digests, std::size_t scale, bool in_hex,
                   std::span<std::uint8_t> out) noexcept;

}  // namespace kvbm
