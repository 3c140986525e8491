#include "kvbm/fold.hpp"

#include <cstdio>

namespace kvbm {

std::string WireInteger::text() const {
  return is_negative_ ? std::to_string(static_cast<std::int64_t>(bits_)) : std::to_string(bits_);
}

std::string tier_name(Tier tier) {
  constexpr const char* kNames[kTierCount] = {"HBM", "HOST", "NVME", "OBJECT"};
  return kNames[static_cast<std::size_t>(tier)];
}

const char* event_name(std::size_t event) noexcept {
  constexpr const char* kNames[] = {"InstanceStarted",   "BlocksCreated", "BlocksMigrated", "BlocksEvicted",
                                    "ResidenciesStated", "RoundEnded",    "InstanceStopped"};
  static_assert(std::size(kNames) == std::variant_size_v<Event>);
  return kNames[event];
}

std::string shortened(const std::uint8_t* id) {
  char text[9];
  std::snprintf(text, sizeof text, "%02x%02x%02x%02x", id[0], id[1], id[2], id[3]);
  return text;
}

std::string slot_text(std::optional<std::uint32_t> slot) { return slot ? std::to_string(*slot) : "None"; }

void refuse(std::string_view rule, std::string detail) { throw Error::illegal_event(rule, std::move(detail)); }

bool are_slots_distinct(Bytes slots, std::vector<std::uint32_t>& scratch) {
  const auto place_of = [](std::uint32_t slot) {
    const std::uint64_t product = (std::uint64_t{slot} + 1) * 0x9E3779B97F4A7C15;
    return product ^ (product >> 32);
  };
  const std::size_t count = slots.size() / kSlotBytes;
  const std::size_t places = std::bit_ceil(count * 2 + 1);
  scratch.assign(places, 0);
  for (std::size_t index = 0; index < count; ++index) {
    const std::uint32_t slot = slot_at(slots, index);
    std::size_t at = place_of(slot) & (places - 1);
    for (; scratch[at] != 0; at = (at + 1) & (places - 1)) {
      if (slot_at(slots, scratch[at] - 1) == slot) {
        return false;
      }
    }
    scratch[at] = static_cast<std::uint32_t>(index + 1);
  }
  return true;
}

}  // namespace kvbm
