#include "kvbm/eviction.hpp"

#include <algorithm>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

// Slots whose blocks have distinct hashes.
LargeArray<Slot> slots_of(std::size_t count) {
  LargeArray<Slot> slots(count);
  for (std::size_t slot = 0; slot < count; ++slot) {
    slots[slot].hash[0] = static_cast<std::uint8_t>(slot + 1);
  }
  return slots;
}

std::vector<std::uint32_t> given_up(EvictionPolicy& policy, std::size_t count) {
  std::vector<std::uint32_t> out(count);
  CHECK(policy.victims(out));
  return out;
}

void lru_order() {
  auto slots = slots_of(5);
  LeastRecentlyUsed policy(slots);
  for (std::uint32_t slot = 0; slot < 5; ++slot) {
    policy.gain(slot, slot == 1);
  }
  policy.hold(0);
  policy.free(0);
  CHECK(policy.size() == 4);
  std::vector<std::uint32_t> too_many(5);
  CHECK(!policy.victims(too_many) && policy.size() == 4);
  policy.lose(3);
  CHECK((given_up(policy, 3) == std::vector<std::uint32_t>{2, 4, 0}));
  policy.lose(2);  // given up already
  policy.free(1);
  CHECK((given_up(policy, 1) == std::vector<std::uint32_t>{1}));
}

void s3fifo_scan_resistance() {
  constexpr std::uint32_t kSlots = 20;  // two of them are the small queue's
  auto slots = slots_of(kSlots);
  S3Fifo policy(slots, 1, slots.size());
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    policy.gain(slot, true);
    policy.free(slot);
  }
  policy.hold(0);  // used again
  policy.free(0);
  CHECK((given_up(policy, 3) == std::vector<std::uint32_t>{1, 2, 3}));  // 0 has moved on to main
  policy.gain(2, false);                                                // comes back as a ghost, to main
  // Small is emptied down to its share before main gives up anything.
  const std::vector<std::uint32_t> rest = given_up(policy, policy.size());
  CHECK(rest.size() == kSlots - 2 && rest.front() == 4 && rest[13] == 17);
  CHECK((std::vector<std::uint32_t>(rest.end() - 4, rest.end()) == std::vector<std::uint32_t>{0, 2, 18, 19}));
}

void s3fifo_passes_over_what_is_held_back() {
  auto slots = slots_of(4);
  S3Fifo policy(slots, 1, slots.size());
  for (std::uint32_t slot = 0; slot < 4; ++slot) {
    policy.gain(slot, slot < 3);
  }
  CHECK(policy.size() == 1);
  CHECK((given_up(policy, 1) == std::vector<std::uint32_t>{3}));
  std::vector<std::uint32_t> one(1);
  CHECK(!policy.victims(one));
  policy.free(1);
  CHECK((given_up(policy, 1) == std::vector<std::uint32_t>{1}));
}

// Whatever is asked, each victim may be evicted, none is named twice, and the count of those that may be is right.
void policies_keep_count(EvictionPolicy& policy, LargeArray<Slot>& slots) {
  Random random(11);
  enum class Is { kOut, kHeld, kFree };
  std::vector<Is> is(slots.size(), Is::kOut);
  for (int step = 0; step < 50'000; ++step) {
    const auto slot = static_cast<std::uint32_t>(random.below(slots.size()));
    switch (is[slot]) {
      case Is::kOut: {
        slots[slot].hash[0] = static_cast<std::uint8_t>(random.below(4) * 64 + slot);  // at times a ghost
        const bool pinned = random.below(2) == 0;
        policy.gain(slot, pinned);
        is[slot] = pinned ? Is::kHeld : Is::kFree;
        break;
      }
      case Is::kHeld:
        if (random.below(3) == 0) {
          policy.hold(slot);
        } else {
          policy.free(slot);
          is[slot] = Is::kFree;
        }
        break;
      case Is::kFree:
        if (random.below(2) == 0) {
          policy.hold(slot);
          is[slot] = Is::kHeld;
        } else {
          policy.lose(slot);
          is[slot] = Is::kOut;
        }
    }
    CHECK(policy.size() == static_cast<std::size_t>(std::ranges::count(is, Is::kFree)));
    if (random.below(8) == 0 && policy.size() > 0) {
      for (const std::uint32_t victim : given_up(policy, 1 + random.below(policy.size()))) {
        CHECK(is[victim] == Is::kFree);
        is[victim] = Is::kOut;
        policy.lose(victim);
      }
    }
  }
}

void both_keep_count() {
  for (const std::size_t count : {1, 2, 11, 40}) {
    for (const char* const name : {"lru", "s3fifo"}) {
      auto slots = slots_of(count);
      const auto policy = make_eviction_policy(name, slots, 3, slots.size());
      policies_keep_count(*policy, slots);
    }
  }
  auto slots = slots_of(1);
  CHECK(make_eviction_policy("mru", slots, 3, slots.size()) == nullptr);
}

void ghosts_are_bounded() {
  Ghosts ghosts(2, 9);
  const auto hash = [](std::uint8_t number) { return SequenceHash{number}; };
  for (std::uint8_t number = 1; number <= 4; ++number) {
    ghosts.remember(hash(number));
  }
  CHECK(!ghosts.take(hash(2)) && ghosts.take(hash(3)) && !ghosts.take(hash(3)));
  ghosts.remember(hash(5));
  CHECK(ghosts.take(hash(4)) && ghosts.take(hash(5)));
  Ghosts none(0, 9);
  none.remember(hash(1));
  CHECK(!none.take(hash(1)));
}

}  // namespace

int main() {
  return tests::run({{"the least recently used goes first", lru_order},
                     {"what was used again outlives a scan, and a ghost comes back to main", s3fifo_scan_resistance},
                     {"what is held back is passed over", s3fifo_passes_over_what_is_held_back},
                     {"policies count what may be evicted, whatever is asked", both_keep_count},
                     {"ghosts are forgotten, the oldest first", ghosts_are_bounded}});
}
