#include "kvbm/last_touches.hpp"

#include <algorithm>

namespace kvbm {

void LastTouches::hold(const std::string& request, std::span<const std::uint32_t> blocks) {
  std::vector<std::uint32_t>& held = held_[request];
  held.insert(held.end(), blocks.begin(), blocks.end());
  for (const std::uint32_t block : blocks) {
    ++holders_[block];
  }
}

void LastTouches::leave(const std::string& request) noexcept {
  const auto found = held_.find(request);
  if (found == held_.end()) {
    return;
  }
  for (const std::uint32_t block : found->second) {
    if (--holders_[block] == 0) {
      steps_[block] = step_;
    }
  }
  held_.erase(found);
}

std::int64_t LastTouches::of(std::span<const std::uint32_t> blocks) const noexcept {
  std::int64_t last = 0;
  for (const std::uint32_t block : blocks) {
    if (holders_[block] > 0) {
      return kUnknown;
    }
    last = std::max(last, steps_[block]);
  }
  return last;
}

}  // namespace kvbm
