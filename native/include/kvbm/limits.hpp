// What the machine itself can do, for benchmarks to stand beside. Pure but for the clock; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvbm {

// Nanoseconds of each of `snapshots` snapshots in which `lines` random cache lines of `bytes` of memory (in huge pages,
// where they can be had) are asked for at once and then read: what a lookup of so many keys in so large a table cannot
// be faster than. bytes: at least 64 * lines. Throws std::bad_alloc.
std::vector<double> random_lines_ns(std::size_t bytes, std::size_t lines, std::size_t snapshots, std::uint64_t seed);

}  // namespace kvbm
