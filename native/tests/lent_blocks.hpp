// A ledger with blocks in HOST to lend, and their bytes in shared memory. One thread, but for what `lock` guards.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "check.hpp"
#include "kvbm/arena.hpp"
#include "kvbm/checksum.hpp"
#include "kvbm/ledger.hpp"
#include "kvbm/ledger_lock.hpp"
#include "kvbm/peer_owner.hpp"

namespace kvbm::tests {

inline constexpr NamespaceId kSpace{1, 2, 3};

// A hash that names its block.
inline SequenceHash hash_of(std::uint32_t block) {
  SequenceHash hash{};
  std::memcpy(hash.data(), &block, sizeof block);
  hash[15] = 1;
  return hash;
}

// The bytes of a block, which only that block has.
inline void fill_row(std::uint32_t block, std::span<std::uint8_t> row) {
  std::uint64_t word = 0x9E3779B97F4A7C15 * (block + 1);
  for (std::uint8_t& byte : row) {
    word = word * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<std::uint8_t>(word >> 56);
  }
}

struct LentBlocks {
  LentBlocks(std::uint32_t slots, std::size_t block_bytes)
      : block_bytes(block_bytes),
        ledger(std::array{Pool{Tier::kHbm, 1, false}, Pool{Tier::kHost, slots, false}, Pool{Tier::kNvme, 4, false}}),
        arena({.name = "test", .bytes = slots * block_bytes}),
        checksums(slots) {
    const std::array<std::uint8_t, 1> started{0};
    ledger.start(1, started, 0, std::array<std::vector<Recovered>, kTierCount>{});
  }

  LentHost host() const {
    return {.rows = arena.data(),
            .checksums = checksums.data(),
            .slots = static_cast<std::uint32_t>(checksums.size()),
            .block_bytes = block_bytes,
            .mapped_bytes = arena.bytes(),
            .fd = arena.fd()};
  }

  // Creates those of the blocks [first, first + count) that are not held, with their bytes. Returns the hashes of all.
  std::vector<std::uint8_t> fill(std::uint32_t first, std::uint32_t count) {
    std::vector<std::uint8_t> hashes;
    for (std::uint32_t block = first; block < first + count; ++block) {
      const SequenceHash hash = hash_of(block);
      append(hashes, hash.data());
      std::vector<std::uint8_t> slots;
      {
        const std::lock_guard held(lock);
        const auto given = ledger.holds(Tier::kHost, hash) ? std::nullopt : ledger.allocate(Tier::kHost, 1);
        if (!given) {
          continue;
        }
        slots.assign(given->slots.begin(), given->slots.end());
      }
      const std::uint32_t slot = slot_at(slots, 0);
      fill_row(block, {arena.data() + slot * block_bytes, block_bytes});
      checksums[slot] = crc32c({arena.data() + slot * block_bytes, block_bytes});
      const std::lock_guard held(lock);
      ledger.create(kSpace, Tier::kHost, kNoParent, 0, hash, slots);
      ledger.unpin(Tier::kHost, slots);
      ledger.clear_waiting();
    }
    return hashes;
  }

  void evict(Bytes hashes) {
    const std::lock_guard held(lock);
    ledger.evict(Tier::kHost, hashes, EvictReason::kCleared);
    ledger.clear_waiting();
  }

  // Slots that somebody pins.
  std::size_t pinned() {
    const std::lock_guard held(lock);
    const TierCounts counts = ledger.counts(Tier::kHost);
    return counts.slots - counts.free - counts.evictable - counts.allocated;
  }

  const std::size_t block_bytes;
  LedgerLock lock;
  Ledger ledger;
  Arena arena;
  std::vector<std::uint32_t> checksums;
};

}  // namespace kvbm::tests
