// What proves an object of k blocks: the first bytes of it. Native implementation of the part of
// kvbm/pools/object/header.py, which draws them, that readers need. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvbm/block_coding.hpp"
#include "kvbm/event.hpp"

namespace kvbm {

// Of a header, before the blocks.
constexpr std::size_t object_header_bytes(std::size_t blocks) noexcept { return 68 + 28 * blocks; }

// One block of an object as it is kept.
struct KeptBlock {
  std::uint32_t checksum = 0;    // CRC-32C of the block's bytes, decoded
  std::uint32_t bytes = 0;       // in the object
  Coding coding = Coding::kRaw;  // of these
};

// Whether a header is whole, and of an object of these blocks that has so many bytes; then `kept` is how it keeps them,
// none in more bytes than the block has.
// header: object_header_bytes(k); hashes: k, packed. Allocates where `kept` has no room.
bool is_object_of(Bytes header, Bytes namespace_id, Bytes hashes, std::size_t block_bytes, std::uint64_t object_bytes,
                  std::vector<KeptBlock>& kept);

}  // namespace kvbm
