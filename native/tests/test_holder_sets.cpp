#include "kvbm/holder_sets.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

using Seats = std::vector<Seat>;

Seats seats_of(const HolderSets& sets, HolderValue value) {
  const auto found = sets.seats(value);
  return {found.begin(), found.end()};
}

// `count` distinct seats, in order, of pairs below `pairs`.
Seats some_seats(Random& random, std::size_t count, std::uint32_t pairs) {
  std::set<Seat> seats;
  while (seats.size() < count) {
    seats.insert(static_cast<Seat>(16 + random.below(std::size_t{pairs} * 16)));
  }
  return {seats.begin(), seats.end()};
}

void nobody_and_one_seat_need_no_set() {
  HolderSets sets;
  CHECK(sets.intern({}) == 0 && sets.seats(0).empty());
  const Seat seat = seat_of(kMaxPairs - 1, Tier::kObject, 3);
  CHECK(pair_of(seat) == kMaxPairs - 1 && tier_of(seat) == Tier::kObject && generation_of(seat) == 3 && (seat & kSetBit) == 0);
  const HolderValue value = sets.intern(Seats{seat});
  CHECK(value == seat && seats_of(sets, value) == Seats{seat});
  sets.retain(value);
  sets.release(value);
  CHECK(sets.count() == 0 && sets.frees() == 0);
}

void equal_sets_are_one_until_the_last_block_lets_go() {
  Random random(1);
  HolderSets sets;
  struct Kept {
    HolderValue value;
    std::uint64_t references;
  };
  std::map<Seats, Kept> model;
  for (int step = 0; step < 60'000; ++step) {
    const std::size_t choice = random.below(8);
    if (choice < 3 || model.empty()) {
      const std::size_t count = random.below(400) == 0 ? 1000 + random.below(3000) : 2 + random.below(7);
      const Seats seats = some_seats(random, count, count > 8 ? 1000 : 3);
      const HolderValue value = sets.intern(seats);
      const auto [known, is_new] = model.try_emplace(seats, Kept{value, 0});
      CHECK(known->second.value == value);
      ++known->second.references;
    } else {
      auto one = model.begin();
      std::advance(one, static_cast<std::ptrdiff_t>(random.below(std::min<std::size_t>(model.size(), 50))));
      if (choice == 3) {
        sets.retain(one->second.value);
        ++one->second.references;
      } else {
        const std::uint64_t frees = sets.frees();
        sets.release(one->second.value);
        const bool is_last = --one->second.references == 0;
        CHECK(sets.frees() == frees + (is_last ? 1 : 0));
        if (is_last) {
          model.erase(one);
        }
      }
    }
    CHECK(sets.count() == model.size());
    if (step % 5000 == 0) {
      std::set<HolderValue> values;
      for (const auto& [seats, kept] : model) {
        CHECK(seats_of(sets, kept.value) == seats && values.insert(kept.value).second);
      }
    }
  }
  for (const auto& [seats, kept] : model) {
    CHECK(seats_of(sets, kept.value) == seats);
    for (std::uint64_t left = kept.references; left > 0; --left) {
      sets.release(kept.value);
    }
  }
  CHECK(sets.count() == 0);
}

void sets_are_found_after_many_others_went() {
  Random random(2);
  HolderSets sets;
  std::map<Seats, HolderValue> kept;
  for (int round = 0; round < 20; ++round) {
    while (kept.size() < 3000) {  // more than a slab
      const Seats seats = some_seats(random, 2 + random.below(5), 40);
      kept.try_emplace(seats, 0);
      if (kept[seats] == 0) {
        kept[seats] = sets.intern(seats);
      }
    }
    for (auto one = kept.begin(); one != kept.end();) {
      if (random.below(4) != 0) {
        sets.release(one->second);
        one = kept.erase(one);
      } else {
        ++one;
      }
    }
    for (const auto& [seats, value] : kept) {
      CHECK(sets.intern(seats) == value);
      sets.release(value);
    }
  }
  CHECK(sets.count() == kept.size());
}

void memory_does_not_grow_when_sets_come_and_go() {
  Random random(3);
  HolderSets sets;
  std::uint64_t first = 0;
  for (int round = 0; round < 10; ++round) {
    std::vector<HolderValue> values;
    for (int at = 0; at < 2000; ++at) {
      values.push_back(sets.intern(some_seats(random, 2 + static_cast<std::size_t>(at) % 8, 100'000)));
    }
    if (round == 0) {
      first = sets.bytes();
    }
    CHECK(sets.bytes() <= first);  // the sizes are the same each time, the seats are not
    for (const HolderValue value : values) {
      sets.release(value);
    }
  }
  CHECK(sets.count() == 0);
}

void the_seats_of_a_pair_lie_side_by_side() {
  Random random(4);
  HolderSets sets;
  for (const std::size_t count : {1, 2, 5, 6, 8, 9, 40, 3000}) {
    const std::uint32_t pairs = static_cast<std::uint32_t>(count / 2 + 1);
    const Seats seats = some_seats(random, count, pairs);
    const HolderValue value = sets.intern(seats);
    for (std::uint32_t pair = 0; pair <= pairs + 1; ++pair) {
      Seats expected;
      std::copy_if(seats.begin(), seats.end(), std::back_inserter(expected), [pair](Seat seat) { return pair_of(seat) == pair; });
      const auto found = sets.seats_of_pair(value, pair);
      CHECK((Seats{found.begin(), found.end()}) == expected);
    }
    sets.release(value);
  }
}

}  // namespace

int main() {
  return tests::run({{"nobody and one seat need no set", nobody_and_one_seat_need_no_set},
                     {"equal sets are one until the last block lets go", equal_sets_are_one_until_the_last_block_lets_go},
                     {"sets are found after many others went", sets_are_found_after_many_others_went},
                     {"memory does not grow when sets come and go", memory_does_not_grow_when_sets_come_and_go},
                     {"the seats of a pair lie side by side", the_seats_of_a_pair_lie_side_by_side}});
}
