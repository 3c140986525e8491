// Ledgers that have started, blocks to put into them, and what they have recorded, for tests. One thread.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "frames.hpp"
#include "kvbm/ledger.hpp"

namespace kvbm::tests {

using Buffer = std::vector<std::uint8_t>;

inline const Buffer kStarted(3);  // opaque to C++

inline Buffer copied(Bytes bytes) { return {bytes.begin(), bytes.end()}; }

// Blocks [first, first + count), packed; a hash begins with its block's number and 1.
inline Buffer numbered(std::uint32_t first, std::size_t count) {
  Buffer hashes(count * kHashBytes);
  for (std::uint32_t at = 0; at < count; ++at) {
    const std::uint32_t number = first + at + 1;
    std::memcpy(hashes.data() + at * kHashBytes, &number, sizeof number);
  }
  return hashes;
}

// A ledger in its first epoch, which holds nothing.
inline Ledger started(const std::vector<Pool>& pools, const char* eviction = "lru",
                      std::size_t event_bytes = kDefaultEventBytes, std::vector<Share> shares = {}) {
  Ledger ledger(pools, eviction, event_bytes, std::move(shares));
  ledger.start(1, kStarted, 0, std::array<std::vector<Recovered>, kTierCount>{});
  return ledger;
}

// Calls `see` with each event that waits, and clears them.
template <class See>
void take_waiting(Ledger& ledger, See&& see) {
  for (const FrameBody& body : ledger.waiting_frames()) {
    each_event(frame_of(body), see);
  }
  ledger.clear_waiting();
}

}  // namespace kvbm::tests
