#include "kvbm/words.hpp"

#include <cstdio>
#include <utility>
#include <variant>

#include "kvbm/error.hpp"

namespace kvbm {

std::string tier_name(Tier tier) {
  constexpr const char* kNames[kTierCount] = {"HBM", "HOST", "NVME", "OBJECT"};
  return kNames[static_cast<std::size_t>(tier)];
}

const char* event_name(std::size_t event) noexcept {
  constexpr const char* kNames[] = {"InstanceStarted",   "BlocksCreated", "BlocksMigrated",  "BlocksEvicted",
                                    "ResidenciesListed", "SnapshotEnded", "InstanceStopped", "UsageRecorded"};
  static_assert(std::size(kNames) == std::variant_size_v<Event>);
  return kNames[event];
}

std::string shortened(const std::uint8_t* id) {
  char text[9];
  std::snprintf(text, sizeof text, "%02x%02x%02x%02x", id[0], id[1], id[2], id[3]);
  return text;
}

std::string slot_text(std::optional<std::uint32_t> slot) { return slot ? std::to_string(*slot) : "None"; }

std::string misplaced(const SequenceHash& parent, std::uint64_t start) {
  if ((parent == kNoParent) == (start == 0)) {
    return "";
  }
  return start > 0 ? words("start is ", start, ", and there is no parent")
                   : words("start is 0, and there is a parent, ", shortened(parent.data()));
}

void refuse(std::string_view rule, std::string detail) { throw Error::illegal_event(rule, std::move(detail)); }

}  // namespace kvbm
