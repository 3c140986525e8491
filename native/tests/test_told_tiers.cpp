#include "kvbm/told_tiers.hpp"

#include <string>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

constexpr std::uint8_t kHost = 1;
constexpr std::uint8_t kNvme = 2;
constexpr std::uint8_t kNone = ToldTiers::kAbsent;

// Hashes of ours for some numbers, packed.
std::vector<std::uint8_t> hashes_of(std::uint32_t first, std::uint32_t count) {
  std::vector<std::uint8_t> made(count * kHashBytes);
  for (std::uint32_t at = 0; at < count; ++at) {
    const std::uint32_t number = (first + at) * 2654435761U;
    std::memcpy(made.data() + at * kHashBytes, &number, sizeof number);
  }
  return made;
}

// Blocks, and what was told of them last.
class Checked {
 public:
  explicit Checked(std::size_t step) : blocks(step, 0x1D2C3B4A59687766) {}

  ToldTiers blocks;
  std::vector<ToldTiers::Told> told;
  std::vector<std::uint64_t> ended;

  // Learns blocks that have the engine's hashes `digest`, `digest` + 1, …
  std::optional<ToldTiers::Learned> learn(std::uint32_t first, std::uint32_t count, std::uint32_t digest) {
    const std::vector<std::uint8_t> digests = hashes_of(digest, count);
    std::vector<Bytes> views;
    for (std::uint32_t at = 0; at < count; ++at) {
      views.push_back(Bytes(digests).subspan(at * kHashBytes, kHashBytes));
    }
    return blocks.learn(hashes_of(first, count), views, 0);
  }
  // A step in which all that is looked at lies in a tier.
  std::size_t step(std::uint8_t tier) {
    const std::size_t count = blocks.choose_due();
    std::vector<std::uint8_t> out(count * kHashBytes);
    blocks.copy_due(out);
    told.clear();
    ended.clear();
    blocks.change(std::vector<std::uint8_t>(count, tier), told, ended);
    return count;
  }
};

void blocks_that_go_on_are_told_together() {
  Checked checked(8);
  const auto learned = checked.learn(0, 100, 0);
  CHECK(learned && learned->run == 0 && learned->begin == 0 && learned->end == 100);
  CHECK(!checked.learn(10, 20, 10));
  CHECK(checked.step(kHost) == 100);
  CHECK(checked.told.size() == 1 && checked.told[0].begin == 0 && checked.told[0].end == 100);
  CHECK(checked.told[0].tier == kHost && checked.told[0].is_held && checked.ended.empty());
  CHECK(checked.step(kHost) == 8 && checked.told.empty());
  CHECK(checked.step(kNvme) == 8 && checked.told.size() == 2);
  CHECK(checked.told[0].is_held && checked.told[0].begin == 8 && checked.told[0].end == 16);
  CHECK(!checked.told[1].is_held && checked.told[1].tier == kHost);
}

void a_run_ends_with_its_last_block_and_leaves_nothing() {
  Checked checked(16);
  checked.learn(0, 40, 0);
  checked.step(kHost);
  const auto more = checked.learn(30, 20, 30);
  CHECK(more && more->run == 1 && more->begin == 10 && more->end == 20);
  std::vector<std::uint64_t> ended;
  for (int step = 0; step < 10 && checked.blocks.blocks() > 0; ++step) {
    checked.step(kNone);
    ended.insert(ended.end(), checked.ended.begin(), checked.ended.end());
  }
  CHECK(ended == (std::vector<std::uint64_t>{1, 0}) || ended == (std::vector<std::uint64_t>{0, 1}));
  CHECK(checked.blocks.blocks() == 0 && checked.blocks.digests() == 0);
}

void a_block_that_two_have_is_told_once() {
  Checked checked(0);
  checked.learn(0, 10, 0);
  CHECK(checked.step(kHost) == 10 && checked.told.size() == 1);
  checked.learn(100, 10, 0);
  CHECK(checked.step(kHost) == 10 && checked.told.empty());
  CHECK(checked.blocks.blocks() == 20 && checked.blocks.digests() == 10);
  checked.learn(100, 10, 0);
  CHECK(checked.step(kNone) == 10 && checked.told.empty() && checked.ended.size() == 1);
  checked.learn(0, 10, 0);
  CHECK(checked.step(kNone) == 10 && checked.told.size() == 1 && !checked.told[0].is_held);
  CHECK(checked.blocks.digests() == 0);
}

void what_is_learned_between_a_question_and_its_answer_is_forgotten_with_it() {
  Checked checked(4);
  checked.learn(0, 4, 0);
  const std::size_t count = checked.blocks.choose_due();
  checked.learn(0, 4, 0);
  checked.blocks.change(std::vector<std::uint8_t>(count, kNone), checked.told, checked.ended);
  CHECK(checked.blocks.blocks() == 0 && checked.ended.size() == 1);
  CHECK(checked.step(kHost) == 0);
  checked.learn(50, 4, 50);
  CHECK(checked.step(kHost) == 4 && checked.told.size() == 1);
}

void places_are_used_again() {
  Checked checked(64);
  Random random(7);
  for (int round = 0; round < 300; ++round) {
    checked.learn(static_cast<std::uint32_t>(random.below(5000)), 50, static_cast<std::uint32_t>(random.below(3000)));
    checked.step(random.below(3) == 0 ? kNone : kHost);
  }
  for (int step = 0; step < 1000 && checked.blocks.blocks() > 0; ++step) {
    checked.step(kNone);
  }
  CHECK(checked.blocks.blocks() == 0 && checked.blocks.digests() == 0);
}

}  // namespace

int main() {
  return tests::run({
      {"blocks that go on with each other are told together", blocks_that_go_on_are_told_together},
      {"a run ends with its last block and leaves nothing", a_run_ends_with_its_last_block_and_leaves_nothing},
      {"a block that two have is told once", a_block_that_two_have_is_told_once},
      {"what is learned between a question and its answer is forgotten with it",
       what_is_learned_between_a_question_and_its_answer_is_forgotten_with_it},
      {"places are used again", places_are_used_again},
  });
}
