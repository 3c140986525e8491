// BlockAges: how old blocks are when they are wanted again and when they are evicted, by tier. Native implementation of
// ReadableAges in kvbm/core/ages.py, which says what counts. Made for a number of blocks, told of each frame of one
// instance, asked now and then. One thread at a time. Its table grows with what is held: 16 bytes a cell, of which a
// quarter to a half are in use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

inline constexpr std::array<std::uint64_t, 8> kAgeBoundsS{1, 10, 60, 300, 1800, 7200, 43200, 259200};
inline constexpr std::size_t kAgedTiers = 3;  // HBM, HOST, NVME
using AgeCounts = std::array<std::uint64_t, kAgeBoundsS.size() + 1>;

// What is counted of one tier; TierAges of kvbm/core/ages.py.
struct TierAges {
  AgeCounts wanted{};           // by age: blocks wanted again
  AgeCounts evicted{};          // by age: blocks evicted for want of room or time
  std::uint64_t wanted_s = 0;   // ages of the first together
  std::uint64_t evicted_s = 0;  // of the second
  std::uint64_t reused = 0;     // of the evicted: wanted again before
  std::uint64_t unused = 0;     // of the evicted: never
};

class BlockAges {
 public:
  // most: blocks whose ages are followed; of more the newest are not. every: one block of so many is followed, chosen
  // by its hash, and counts for as many; at least 1.
  BlockAges(std::size_t most, std::uint64_t every) : most_(most), every_(every) {}

  // Throws Error: what FrameReader throws; a part of the frame may be taken.
  void take(Bytes data, std::size_t at);
  void forget();
  std::array<TierAges, kAgedTiers> tiers() const noexcept;

 private:
  static constexpr std::size_t kFirstCells = 1024;
  // Since when, of a block whose gain was not seen
  static constexpr std::uint64_t kUnseen = (std::uint64_t{1} << 63) - 1;

  // A block in a tier.
  struct Cell {
    std::uint64_t key = 0;            // of the block; 0: the cell is empty
    std::uint64_t since_ns : 63 = 0;  // when it was gained, or kUnseen
    std::uint64_t is_wanted : 1 = 0;  // it was wanted again since
  };
  static_assert(sizeof(Cell) == 16);

  // The blocks of a tier, by open addressing; the cells are a power of two, or none.
  struct Table {
    std::vector<Cell> cells;  // all
    std::size_t size = 0;     // in use
  };

  static bool is_followed(Tier tier) noexcept { return static_cast<std::size_t>(tier) < kAgedTiers; }
  static void count(AgeCounts& counts, std::uint64_t& sum, std::uint64_t since_ns, std::uint64_t now_ns) noexcept;
  static Cell* find(Table& table, std::uint64_t key) noexcept;
  static Cell& insert(Table& table, std::uint64_t key);
  static void erase(Table& table, Cell* cell) noexcept;

  template <class Visit>
  void for_blocks(Bytes hashes, Visit&& visit) const;
  void take(const Event& event, std::uint64_t now_ns);
  void gain(Tier tier, const std::uint8_t* hash, std::uint64_t since_ns, bool is_listed);
  void want(Tier tier, const std::uint8_t* hash, std::uint64_t now_ns) noexcept;
  void want_colder(Tier tier, const std::uint8_t* hash, std::uint64_t now_ns) noexcept;
  void lose(Tier tier, const std::uint8_t* hash, bool is_evicted, std::uint64_t now_ns) noexcept;

  const std::size_t most_;                     // blocks that are followed at most
  const std::uint64_t every_;                  // one of so many is
  std::size_t size_ = 0;                       // that are
  std::array<Table, kAgedTiers> tables_{};     // by tier
  std::array<TierAges, kAgedTiers> counts_{};  // by tier
};

}  // namespace kvbm
