#include "kvbm/foreign_ledger.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "check.hpp"
#include "frames.hpp"
#include "kvbm/frame_fold.hpp"

using namespace kvbm;
using namespace kvbm::tests;

namespace {

constexpr std::uint32_t kBlockTokens = 2;

ForeignKey key(std::uint64_t value) { return {.value = value, .wide = {}, .kind = KeyKind::kNatural}; }

ForeignKey key(const std::string& text) {
  return {
      .value = 0, .wide = {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}, .kind = KeyKind::kWide};
}

// A ledger of one namespace, and a strict reader of all it records.
struct Engine {
  explicit Engine(ForeignLimits limits = {100, 100, true})
      : ledger("i", limits, {Tier::kHbm, Tier::kHost, Tier::kNvme}, 7), fold(true) {
    ledger.name(NamespaceId{1}, SequenceHash{2}, 0, kBlockTokens, true);
    begin();
  }

  void begin() {
    ledger.begin(++epoch, InstanceStarted{.blob = {}}, 1);
    read();
  }

  void store(const std::vector<ForeignKey>& keys, const std::vector<std::uint32_t>& tokens, Tier tier = Tier::kHbm,
             const ForeignKey* parent = nullptr) {
    ledger.store(
        {.home = 0, .tier = tier, .keys = keys, .parent = parent, .tokens = tokens, .width = 2, .extra_keys = {}});
    read();
  }

  void remove(const std::vector<ForeignKey>& keys, Tier tier = Tier::kHbm) {
    ledger.remove(tier, 0, keys);
    read();
  }

  // Folds what waits. What is held is what the ledger says.
  void read() {
    FoldDelta delta;
    for (const FrameBody& body : ledger.waiting_frames()) {
      each_event(frame_of(body), [&](const Event& event) {
        const EpochStart start{WireInteger(epoch), {}};
        fold.evolve(event, &start, delta);
      });
    }
    ledger.clear_waiting();
    CHECK(fold.digest() == ledger.digest());
    for (const Tier tier : {Tier::kHbm, Tier::kHost, Tier::kNvme}) {
      CHECK(fold.count(tier) == ledger.held(tier));
      CHECK(ledger.hashes(tier).size() == ledger.held(tier) * kHashBytes);
    }
  }

  std::uint64_t epoch = 0;  // the one begun last
  ForeignLedger ledger;     // under test
  FrameFold fold;           // of its events
};

void what_two_keys_mean_is_held_until_both_are_gone() {
  Engine engine;
  engine.store({key(1), key(2)}, {1, 2, 3, 4});
  engine.store({key(3)}, {1, 2});
  engine.store({key(1), key(3)}, {}, Tier::kHost);
  CHECK(engine.ledger.held(Tier::kHbm) == 2 && engine.ledger.held(Tier::kHost) == 1);
  engine.begin();
  CHECK(engine.ledger.held(Tier::kHbm) == 2 && engine.ledger.held(Tier::kHost) == 1);
  engine.remove({key(1)});
  CHECK(engine.ledger.held(Tier::kHbm) == 2);
  engine.remove({key(3)});
  engine.remove({key(3), key(1)}, Tier::kHost);
  CHECK(engine.ledger.held(Tier::kHbm) == 1 && engine.ledger.held(Tier::kHost) == 0);
}

void keys_of_every_kind_and_group_are_apart() {
  Engine engine;
  engine.ledger.name(NamespaceId{9}, SequenceHash{8}, 1, kBlockTokens, true);
  const std::string wide(32, 'w');
  const ForeignKey negative{.value = ~std::uint64_t{0}, .wide = {}, .kind = KeyKind::kNegative};
  std::uint32_t token = 0;
  for (const ForeignKey& one : {key(~std::uint64_t{0}), negative, key(wide), key(0)}) {
    for (const std::uint8_t home : {0, 1}) {
      const std::vector<std::uint32_t> tokens{++token, 0};
      engine.ledger.store({.home = home,
                           .tier = Tier::kHbm,
                           .keys = {&one, 1},
                           .parent = nullptr,
                           .tokens = tokens,
                           .width = 2,
                           .extra_keys = {}});
    }
  }
  engine.read();
  CHECK(engine.ledger.held(Tier::kHbm) == 8 && engine.ledger.counts().conflict == 0);
  engine.remove({key(wide), negative});
  CHECK(engine.ledger.held(Tier::kHbm) == 6);
}

void what_is_gone_is_forgotten_the_longest_gone_first() {
  Engine engine({2, 3, true});
  std::vector<std::string> texts;
  for (std::uint64_t number = 0; number < 200; ++number) {
    texts.push_back(std::to_string(number));
  }
  for (std::uint32_t number = 0; number < 200; ++number) {
    const bool is_wide = number % 2 == 0;
    const ForeignKey one = is_wide ? key(texts[number]) : key(number);
    engine.store({one}, {number, 1});
    engine.remove({one});
    CHECK(engine.ledger.remembered() == std::min<std::size_t>(3, number + 1));
  }
  engine.store({key(197), key(199)}, {});
  CHECK(engine.ledger.held(Tier::kHbm) == 2 && engine.ledger.counts().unmapped == 0);
  engine.store({key(195)}, {});
  CHECK(engine.ledger.counts().unmapped == 1);
  engine.store({key(7)}, {7, 7});
  CHECK(engine.ledger.counts().beyond == 1);
}

void a_snapshot_lists_what_is_held_while_it_goes_on() {
  Engine engine({1 << 20, 50, true});
  Random random(3);
  std::map<std::uint64_t, std::uint32_t> known;
  for (std::size_t round = 0; round < 3000; ++round) {
    const std::uint64_t one = random.below(300);
    const auto token = static_cast<std::uint32_t>(one / 2);  // two keys mean one block
    switch (random.below(5)) {
      case 0:
        engine.remove({key(one)});
        break;
      case 1:
        engine.store({key(one)}, {}, Tier::kHost);
        break;
      case 2:
        engine.remove({key(one)}, Tier::kHost);
        break;
      case 3:
        engine.ledger.begin_snapshot();
        engine.ledger.step_snapshot(1 + random.below(20));
        engine.read();
        break;
      default:
        engine.store({key(one)}, {token, token});
    }
    if (round % 1000 == 999) {
      engine.ledger.clear(Tier::kHbm);
      engine.read();
      engine.ledger.drop(round % 2000 == 999);
      if (engine.ledger.homes() == 0) {
        engine.ledger.name(NamespaceId{1}, SequenceHash{2}, 0, kBlockTokens, true);
      }
      engine.begin();
    }
  }
}

void nothing_is_recorded_before_an_epoch_or_after_its_end() {
  ForeignLedger ledger("i", {1, 1, true}, {Tier::kHbm}, 1);
  CHECK(thrown_code([&] { ledger.clear(Tier::kHbm); }) == ErrorCode::kIllegalEvent);
  ledger.begin(1, InstanceStarted{.blob = {}}, 0);
  ledger.stop(StopReason::kShutdown);
  CHECK(thrown_code([&] { ledger.take({}, std::nullopt); }) == ErrorCode::kIllegalEvent);
  CHECK(!ledger.begin_snapshot());
}

void a_held_block_costs_less_than_64_bytes_however_often_all_are_replaced() {
  constexpr std::uint64_t kHeld = 200'000;
  Engine engine({kHeld, 1000, true});
  std::uint64_t next = 0;
  const auto replace = [&](std::uint64_t count) {
    for (const std::uint64_t end = next + count; next < end; ++next) {
      const ForeignKey one = key(next * 0x9E3779B97F4A7C15);
      const std::uint32_t tokens[] = {static_cast<std::uint32_t>(next), 0};
      if (next >= kHeld) {
        const ForeignKey last = key((next - kHeld) * 0x9E3779B97F4A7C15);
        engine.ledger.remove(Tier::kHbm, 0, {&last, 1});
      }
      engine.ledger.store({.home = 0,
                           .tier = Tier::kHbm,
                           .keys = {&one, 1},
                           .parent = nullptr,
                           .tokens = tokens,
                           .width = 2,
                           .extra_keys = {}});
      engine.ledger.clear_waiting();
    }
    CHECK(engine.ledger.held(Tier::kHbm) == kHeld);
    CHECK(engine.ledger.memory_bytes() < kHeld * 56);
  };
  replace(kHeld);
  replace(2 * kHeld);
}

}  // namespace

int main() {
  return run({
      {"what two keys mean is held until both are gone", what_two_keys_mean_is_held_until_both_are_gone},
      {"keys of every kind and group are apart", keys_of_every_kind_and_group_are_apart},
      {"what is gone is forgotten, the longest gone first", what_is_gone_is_forgotten_the_longest_gone_first},
      {"a snapshot lists what is held while it goes on", a_snapshot_lists_what_is_held_while_it_goes_on},
      {"nothing is recorded before an epoch or after its end", nothing_is_recorded_before_an_epoch_or_after_its_end},
      {"a held block costs less than 64 bytes, however often all are replaced",
       a_held_block_costs_less_than_64_bytes_however_often_all_are_replaced},
  });
}
