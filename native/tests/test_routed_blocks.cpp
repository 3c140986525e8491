#include "kvbm/routed_blocks.hpp"

#include <algorithm>

#include "check.hpp"

using namespace kvbm;
using namespace kvbm::tests;

namespace {

constexpr NamespaceId kSpace{1, 2, 3};

std::uint64_t caller(const RoutedBlocks& soon, const char* name) { return soon.salt_of("caller ", name); }
std::uint64_t instance(const RoutedBlocks& soon, const char* name) { return soon.salt_of("instance ", name); }

std::uint32_t depth(const RoutedBlocks& soon, double now_s, const char* who, const char* where, Bytes hashes) {
  Chain chain;
  soon.chain(kSpace, hashes, chain);
  return soon.depth(now_s, chain, caller(soon, who) + instance(soon, where), 0);
}

void note(RoutedBlocks& soon, double now_s, const char* who, const char* where, Bytes hashes) {
  Chain chain;
  soon.chain(kSpace, hashes, chain);
  soon.note(now_s, caller(soon, who), instance(soon, where), chain);
}

void long_prompts_are_found_again_and_cost_few_entries() {
  RoutedBlocks soon(30.0);
  Random random(1);
  for (const std::size_t blocks : {1, 255, 256, 257, 1000, 8191, 65'536}) {
    const auto hashes = random.bytes(blocks * kHashBytes);
    const std::size_t before = soon.entries(0.0);
    note(soon, 0.0, "", "a", hashes);
    CHECK(soon.entries(0.0) - before <= 1300);
    CHECK(depth(soon, 1.0, "", "a", hashes) == blocks);
    CHECK(depth(soon, 1.0, "", "b", hashes) == 0);
    CHECK(depth(soon, 1.0, "other", "a", hashes) == 0);
    auto longer = hashes;
    const auto more = random.bytes(100 * kHashBytes);
    longer.insert(longer.end(), more.begin(), more.end());
    longer.resize(std::min<std::size_t>(longer.size(), std::size_t{65'536} * kHashBytes));
    const std::uint32_t found = depth(soon, 1.0, "", "a", longer);
    CHECK(found <= blocks && found * 100 >= blocks * 99);
    CHECK(depth(soon, 30.0, "", "a", hashes) == 0);
  }
}

void a_caller_that_fills_the_table_pushes_out_nobody_elses_routes() {
  RoutedBlocks soon(30.0, 1U << 10);
  Random random(1);
  std::vector<std::vector<std::uint8_t>> prompts;
  for (int prompt = 0; prompt < 10; ++prompt) {
    prompts.push_back(random.bytes(100 * kHashBytes));
    note(soon, 0.0, "router", "a", prompts.back());
  }
  for (int flood = 0; flood < 100; ++flood) {
    note(soon, 1.0, "flood", "a", random.bytes(5000 * kHashBytes));
  }
  CHECK(soon.entries(1.0) <= (1U << 10) * RoutedBlocks::kWays);
  std::size_t found = 0;
  for (const auto& prompt : prompts) {
    found += depth(soon, 2.0, "router", "a", prompt);
  }
  CHECK(found >= 500);
  const auto again = random.bytes(kHashBytes);
  note(soon, 2.0, "router", "a", again);
  CHECK(depth(soon, 3.0, "router", "a", again) == 1);
}

}  // namespace

int main() {
  return tests::run(
      {{"long prompts are found again and cost few entries", long_prompts_are_found_again_and_cost_few_entries},
       {"a caller that fills the table pushes out nobody else's routes",
        a_caller_that_fills_the_table_pushes_out_nobody_elses_routes}});
}
