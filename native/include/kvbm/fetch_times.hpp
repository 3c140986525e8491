// How long reading a run from several sources takes at least, for each length it can have: native implementation of
// kvbm/core/fetching.py (`least_times`, `quickest`), to the last bit. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvbm {

inline constexpr std::size_t kMostSources = 5;  // four peers and the object pool

// Source of fetching.py.
struct FetchSource {
  std::uint32_t end;                // behind the last block it has
  double latency_s;                 // for any bytes
  double bytes_per_s;               // for each
  double together_bytes_per_s = 0;  // what comes at most from all such sources together; 0: it comes another way
};

// Length of fetching.py.
struct FetchLength {
  std::uint32_t end;                                 // behind the last block that is read
  double seconds;                                    // until all are there
  std::array<std::uint32_t, kMostSources> blocks{};  // from each source
};

// sources: at most kMostSources. lot_blocks: no source is asked for less, but at the ends of what it has.
// Returns: for each end of a source behind `begin` the least time, the longest first, in `lengths`.
void least_times(std::uint32_t begin, std::span<const FetchSource> sources, double block_bytes,
                 std::uint32_t lot_blocks, std::vector<FetchLength>& lengths);

// Of these, with which reading and computing the rest takes the least time; nullptr: computing everything does.
const FetchLength* quickest(std::uint32_t begin, std::span<const FetchLength> lengths, double block_compute_s) noexcept;

}  // namespace kvbm
