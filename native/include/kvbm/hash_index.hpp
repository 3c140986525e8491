// HashIndex: sequence hash → number of the record that holds it, by open addressing in one array that never grows.
// Made for a number of entries, lives as long as the records; the hashes themselves lie in the records, so a cell has 8
// bytes. Owner thread only. Nothing allocates after construction and nothing throws.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvbm/event.hpp"
#include "kvbm/large_array.hpp"

namespace kvbm {

inline constexpr std::uint32_t kNoEntry = 0xFFFFFFFF;  // also "no slot": a pool has fewer slots than that

inline bool same_hash(const std::uint8_t* one, const std::uint8_t* other) noexcept {
  return std::memcmp(one, other, kHashBytes) == 0;
}

// Where a hash's search begins, in its low bits, with further bits that tell most other hashes apart.
inline std::uint32_t hash_tag(const std::uint8_t* hash, std::uint64_t seed) noexcept {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::memcpy(&low, hash, sizeof low);
  std::memcpy(&high, hash + sizeof low, sizeof high);
  // Hashes are uniform unless somebody chose them; the seeded multiplications keep also those from piling up.
  low = (low ^ seed) * 0x9E3779B97F4A7C15;
  low = (low ^ (low >> 32) ^ high) * (seed | 1);
  return static_cast<std::uint32_t>(low >> 32);
}

class HashIndex {
 public:
  // entries: how many it can hold at once. seed: makes the cells a hash falls on unknown to who chooses hashes.
  HashIndex(std::size_t entries, std::uint64_t seed)
      : cells_(std::bit_ceil(kCellsAnEntry * std::max<std::size_t>(1, entries))),
        mask_(static_cast<std::uint32_t>(cells_.size() - 1)),
        seed_(seed) {}

  std::uint32_t tag(const std::uint8_t* hash) const noexcept { return hash_tag(hash, seed_); }

  void prefetch(std::uint32_t tag) const noexcept { __builtin_prefetch(&cells_[tag & mask_]); }
  // The entry of a tag's first cell, or kNoEntry: mostly the one that `find` gives.
  std::uint32_t peek(std::uint32_t tag) const noexcept { return cells_[tag & mask_].entry; }

  // The entry whose hash it is, or kNoEntry. hash_of(entry) gives the hash of an entry.
  template <class HashOf>
  std::uint32_t find(std::uint32_t tag, const std::uint8_t* hash, HashOf&& hash_of) const noexcept {
    for (std::uint32_t at = tag & mask_;; at = (at + 1) & mask_) {
      const Cell cell = cells_[at];
      if (cell.entry == kNoEntry || (cell.tag == tag && same_hash(hash_of(cell.entry), hash))) {
        return cell.entry;
      }
    }
  }

  // The entry whose hash it is, or else the one given, which is in the index from now on.
  template <class HashOf>
  std::uint32_t find_or_insert(std::uint32_t tag, const std::uint8_t* hash, std::uint32_t entry,
                               HashOf&& hash_of) noexcept {
    for (std::uint32_t at = tag & mask_;; at = (at + 1) & mask_) {
      const Cell cell = cells_[at];
      if (cell.entry == kNoEntry) {
        cells_[at] = {tag, entry};
        return entry;
      }
      if (cell.tag == tag && same_hash(hash_of(cell.entry), hash)) {
        return cell.entry;
      }
    }
  }

  // Adds an entry whose hash is not in the index.
  void insert(std::uint32_t tag, std::uint32_t entry) noexcept {
    std::uint32_t at = tag & mask_;
    while (cells_[at].entry != kNoEntry) {
      at = (at + 1) & mask_;
    }
    cells_[at] = {tag, entry};
  }

  // Removes an entry that is in the index. Those behind it move up, so that no search meets a hole before its end.
  void erase(std::uint32_t tag, std::uint32_t entry) noexcept {
    std::uint32_t hole = tag & mask_;
    while (cells_[hole].entry != entry) {
      hole = (hole + 1) & mask_;
    }
    for (std::uint32_t at = (hole + 1) & mask_; cells_[at].entry != kNoEntry; at = (at + 1) & mask_) {
      // [home, at] are the cells its search passes, around the end of the array; the hole must be one of them.
      if (((at - cells_[at].tag) & mask_) >= ((at - hole) & mask_)) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole].entry = kNoEntry;
  }

 private:
  struct Cell {
    std::uint32_t tag = 0;           // of the entry's hash
    std::uint32_t entry = kNoEntry;  // the entry, or kNoEntry
  };

  // Most searches then end at their first cell, so that the processor guesses right where they end.
  static constexpr std::size_t kCellsAnEntry = 4;

  LargeArray<Cell> cells_;  // a power of two
  std::uint32_t mask_;      // cells_.size() - 1
  std::uint64_t seed_;      // part of every tag
};

}  // namespace kvbm
