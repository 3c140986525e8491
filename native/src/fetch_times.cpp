#include "kvbm/fetch_times.hpp"

#include <algorithm>
#include <functional>
#include <limits>

namespace kvbm {
namespace {

using Among = std::array<bool, kMostSources>;

double size_of(std::uint32_t blocks, double block_bytes) noexcept { return static_cast<double>(blocks) * block_bytes; }

// Each lot goes to the source, of these, that is through with it first, the deepest first. Some of them has each.
FetchLength schedule(std::uint32_t begin, std::uint32_t end, std::span<const FetchSource> sources, const Among& among,
                     double block_bytes, std::span<const std::uint32_t> cuts) {
  FetchLength found{end, 0.0, {}};
  std::array<double, kMostSources> busy_s{};
  std::uint32_t last = end;
  for (std::size_t cut = cuts.size(); last > begin;) {
    while (cut > 0 && cuts[cut - 1] >= last) {
      --cut;
    }
    const std::uint32_t first = cut > 0 ? cuts[cut - 1] : begin;  // all cuts lie behind `begin`
    const double size = size_of(last - first, block_bytes);
    std::size_t chosen = kMostSources;
    double least_s = std::numeric_limits<double>::infinity();
    for (std::size_t at = 0; at < sources.size(); ++at) {
      if (among[at] && sources[at].end >= last) {
        const double done_s =
            busy_s[at] + (busy_s[at] != 0.0 ? 0.0 : sources[at].latency_s) + size / sources[at].bytes_per_s;
        if (chosen == kMostSources || done_s < least_s) {
          chosen = at;
          least_s = done_s;
        }
      }
    }
    busy_s[chosen] = least_s;
    found.blocks[chosen] += last - first;
    last = first;
  }
  std::uint32_t shared = 0;
  double latency_s = std::numeric_limits<double>::infinity();
  double together = 0.0;
  for (std::size_t at = 0; at < sources.size(); ++at) {
    found.seconds = std::max(found.seconds, busy_s[at]);
    if (found.blocks[at] != 0 && sources[at].together_bytes_per_s != 0.0) {
      shared += found.blocks[at];
      latency_s = std::min(latency_s, sources[at].latency_s);
      together = std::max(together, sources[at].together_bytes_per_s);
    }
  }
  if (shared != 0) {
    found.seconds = std::max(found.seconds, latency_s + size_of(shared, block_bytes) / together);
  }
  return found;
}

void keep_quicker(FetchLength& best, const FetchLength& other) noexcept {
  if (other.seconds < best.seconds) {
    best = other;
  }
}

FetchLength least_time(std::uint32_t begin, std::uint32_t end, std::span<const FetchSource> sources, double block_bytes,
                       std::span<const std::uint32_t> cuts) {
  Among every{};
  Among free{};
  bool has_shared = false;
  bool has_free = false;
  bool reaches_free = false;
  std::size_t quickest_shared = kMostSources;
  for (std::size_t at = 0; at < sources.size(); ++at) {
    const FetchSource& one = sources[at];
    every[at] = true;
    free[at] = one.together_bytes_per_s == 0.0;
    has_shared = has_shared || !free[at];
    has_free = has_free || free[at];
    reaches_free = reaches_free || (free[at] && one.end >= end);
    if (!free[at] && one.end >= end &&
        (quickest_shared == kMostSources || one.bytes_per_s > sources[quickest_shared].bytes_per_s)) {
      quickest_shared = at;
    }
  }
  FetchLength best = schedule(begin, end, sources, every, block_bytes, cuts);
  if (!has_shared) {
    return best;
  }
  if (reaches_free) {
    keep_quicker(best, schedule(begin, end, sources, free, block_bytes, cuts));
  }
  if (has_free && quickest_shared != kMostSources) {
    Among some = free;
    some[quickest_shared] = true;
    keep_quicker(best, schedule(begin, end, sources, some, block_bytes, cuts));
  }
  for (std::size_t at = 0; at < sources.size(); ++at) {
    if (sources[at].end >= end) {
      FetchLength alone{end, sources[at].latency_s + size_of(end - begin, block_bytes) / sources[at].bytes_per_s, {}};
      alone.blocks[at] = end - begin;
      keep_quicker(best, alone);
    }
  }
  return best;
}

}  // namespace

void least_times(std::uint32_t begin, std::span<const FetchSource> sources, double block_bytes,
                 std::uint32_t lot_blocks, std::vector<FetchLength>& lengths) {
  lengths.clear();
  thread_local std::vector<std::uint32_t> ends;  // the longest first
  ends.clear();
  for (const FetchSource& one : sources) {
    if (one.end > begin) {
      ends.push_back(one.end);
    }
  }
  std::sort(ends.begin(), ends.end(), std::greater<>());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  if (ends.empty()) {
    return;
  }
  // ascending, for the longest; shorter ones have those before their ends
  thread_local std::vector<std::uint32_t> cuts;
  cuts.assign(ends.begin(), ends.end());
  for (std::uint64_t at = std::uint64_t{begin} / lot_blocks * lot_blocks + lot_blocks; at < ends.front();
       at += lot_blocks) {
    cuts.push_back(static_cast<std::uint32_t>(at));
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  for (const std::uint32_t end : ends) {
    lengths.push_back(least_time(begin, end, sources, block_bytes, cuts));
  }
}

const FetchLength* quickest(std::uint32_t begin, std::span<const FetchLength> lengths,
                            double block_compute_s) noexcept {
  if (lengths.empty()) {
    return nullptr;
  }
  const std::uint32_t longest = lengths.front().end;
  double least_s = static_cast<double>(longest - begin) * block_compute_s;
  const FetchLength* best = nullptr;
  for (const FetchLength& one : lengths) {
    const double whole_s = one.seconds + static_cast<double>(longest - one.end) * block_compute_s;
    if (whole_s < least_s || (whole_s == least_s && best == nullptr)) {
      best = &one;
      least_s = whole_s;
    }
  }
  return best;
}

}  // namespace kvbm
