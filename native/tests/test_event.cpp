#include "kvbm/event.hpp"

#include <string>

#include "check.hpp"

using namespace kvbm;

namespace {

// The value after `"key": "` from a position on, in a file that tools/write_golden.py wrote.
std::string field(const std::string& text, const std::string& key, std::size_t& at) {
  at = text.find("\"" + key + "\": \"", at);
  CHECK(at != std::string::npos);
  at += key.size() + 5;
  return text.substr(at, text.find('"', at) - at);
}

void golden_digests() {
  const auto bytes = tests::read_golden("digests.json");
  const std::string text(bytes.begin(), bytes.end());
  const std::string tiers[] = {"HBM", "HOST", "NVME", "OBJECT"};
  std::size_t at = 0;
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    for (int index = 0; index < 4; ++index) {
      CHECK(field(text, "tier", at) == tiers[tier]);
      const std::string hex = field(text, "hash", at);
      SequenceHash hash;
      for (std::size_t byte = 0; byte < kHashBytes; ++byte) {
        hash[byte] = static_cast<std::uint8_t>(std::stoul(hex.substr(2 * byte, 2), nullptr, 16));
      }
      CHECK(residency_mix(static_cast<Tier>(tier), hash.data()) == std::stoull(field(text, "mix", at), nullptr, 16));
    }
  }
}

}  // namespace

int main() { return tests::run({{"residencies mix to the golden bits", golden_digests}}); }
