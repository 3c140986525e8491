// UsageMeter: how long blocks of each namespace were held and how many were put, by tier, from the frames of one
// instance. Native implementation of ReadableMeter in kvbm/reference/usage_meter.py, which says what counts. Made
// empty, told of each frame that the instance cuts, in order, and cut now and then. One thread at a time. Memory: some
// bytes a namespace.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/event.hpp"
#include "kvbm/namespace_table.hpp"

namespace kvbm {

using TierNumbers = std::array<std::uint64_t, kTierCount>;

// What blocks of a namespace have used.
struct NamespaceUsage {
  NamespaceId id;            // whose
  TierNumbers block_ms{};    // blocks held, times milliseconds
  TierNumbers put_blocks{};  // created there, or offloaded to it
};

class UsageMeter {
 public:
  // A step of the clock that is longer is none that passed: the clock was set, or the machine slept.
  static constexpr std::uint64_t kLongestStepMs = 24ULL * 3600 * 1000;

  // clusters: by tier, whether its pool is the cluster's: nothing there is held by an instance.
  explicit UsageMeter(const std::array<bool, kTierCount>& clusters) noexcept : clusters_(clusters) {}

  // Takes in a frame. Throws Error: what FrameReader throws; a part of the frame may be taken.
  void take(Bytes data, std::size_t at);
  // What was used until a time by namespace, in the order of their ids, and counting begins anew. Nothing of those that
  // have used nothing.
  std::vector<NamespaceUsage> cut(std::uint64_t until_ms);

 private:
  // One namespace.
  struct Entry {
    NamespaceUsage used;    // since the last cut
    TierNumbers held{};     // blocks it has now
    TierNumbers settled{};  // the time passed up to which `used` has them
  };

  static std::size_t number(Tier tier) noexcept { return static_cast<std::size_t>(tier); }
  void advance(std::uint64_t now_ms) noexcept;
  void settle(Entry& entry, std::size_t tier) const noexcept;
  void gain(Entry& entry, Tier tier, std::uint64_t blocks) const noexcept;
  void lose(Entry& entry, Tier tier, std::uint64_t blocks) const noexcept;
  Entry& entry_of(const NamespaceId& id);
  void take(const Event& event);

  std::array<bool, kTierCount> clusters_;  // by tier
  NamespaceTable rows_;                    // namespace → row of entries_
  std::vector<Entry> entries_;             // by row
  std::uint64_t passed_ms_ = 0;            // time that has passed, which never goes back
  std::uint64_t last_ms_ = 0;              // the clock at the last step; 0 before the first
};

}  // namespace kvbm
