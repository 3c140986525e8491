#include "kvbm/event.hpp"

#include <cstring>

namespace kvbm {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;

// The finaliser of SplitMix64.
std::uint64_t finalise(std::uint64_t value) noexcept {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

}  // namespace

std::uint64_t residency_mix(Tier tier, const std::uint8_t* hash) noexcept {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::memcpy(&low, hash, sizeof low);
  std::memcpy(&high, hash + sizeof low, sizeof high);
  return finalise(finalise(low + kGolden * (static_cast<std::uint64_t>(tier) + 1)) + high);
}

}  // namespace kvbm
