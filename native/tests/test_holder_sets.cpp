#include "kvbm/holder_sets.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

using HolderIds = std::vector<HolderId>;

HolderIds holder_ids_of(const HolderSets& sets, HolderValue value) {
  const auto found = sets.holder_ids(value);
  return {found.begin(), found.end()};
}

// `count` distinct holder ids, in order, of holder spaces below `holder_spaces`.
HolderIds some_holder_ids(Random& random, std::size_t count, std::uint32_t holder_spaces) {
  std::set<HolderId> holder_ids;
  while (holder_ids.size() < count) {
    holder_ids.insert(static_cast<HolderId>(16 + random.below(std::size_t{holder_spaces} * 16)));
  }
  return {holder_ids.begin(), holder_ids.end()};
}

void nobody_and_one_id_need_no_set() {
  HolderSets sets;
  CHECK(sets.intern({}) == 0 && sets.holder_ids(0).empty());
  const HolderId holder_id = holder_id_of(kMaxHolderSpaces - 1, Tier::kObject, 3);
  CHECK(holder_space_of(holder_id) == kMaxHolderSpaces - 1 && tier_of(holder_id) == Tier::kObject);
  CHECK(generation_of(holder_id) == 3 && (holder_id & kSetBit) == 0);
  const HolderValue value = sets.intern(HolderIds{holder_id});
  CHECK(value == holder_id && holder_ids_of(sets, value) == HolderIds{holder_id});
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
  std::map<HolderIds, Kept> model;
  for (int step = 0; step < 60'000; ++step) {
    const std::size_t choice = random.below(8);
    if (choice < 3 || model.empty()) {
      const std::size_t count = random.below(400) == 0 ? 1000 + random.below(3000) : 2 + random.below(7);
      const HolderIds holder_ids = some_holder_ids(random, count, count > 8 ? 1000 : 3);
      const HolderValue value = sets.intern(holder_ids);
      const auto [known, is_new] = model.try_emplace(holder_ids, Kept{value, 0});
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
      for (const auto& [holder_ids, kept] : model) {
        CHECK(holder_ids_of(sets, kept.value) == holder_ids && values.insert(kept.value).second);
      }
    }
  }
  for (const auto& [holder_ids, kept] : model) {
    CHECK(holder_ids_of(sets, kept.value) == holder_ids);
    for (std::uint64_t left = kept.references; left > 0; --left) {
      sets.release(kept.value);
    }
  }
  CHECK(sets.count() == 0);
}

void sets_are_found_after_many_others_went() {
  Random random(2);
  HolderSets sets;
  std::map<HolderIds, HolderValue> kept;
  for (int pass = 0; pass < 20; ++pass) {
    while (kept.size() < 3000) {  // more than a slab
      const HolderIds holder_ids = some_holder_ids(random, 2 + random.below(5), 40);
      kept.try_emplace(holder_ids, 0);
      if (kept[holder_ids] == 0) {
        kept[holder_ids] = sets.intern(holder_ids);
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
    for (const auto& [holder_ids, value] : kept) {
      CHECK(sets.intern(holder_ids) == value);
      sets.release(value);
    }
  }
  CHECK(sets.count() == kept.size());
}

void memory_does_not_grow_when_sets_come_and_go() {
  Random random(3);
  HolderSets sets;
  std::uint64_t first = 0;
  for (int pass = 0; pass < 10; ++pass) {
    std::vector<HolderValue> values;
    for (int at = 0; at < 2000; ++at) {
      values.push_back(sets.intern(some_holder_ids(random, 2 + static_cast<std::size_t>(at) % 8, 100'000)));
    }
    if (pass == 0) {
      first = sets.bytes();
    }
    CHECK(sets.bytes() <= first);  // the sizes are the same each time, the holder ids are not
    for (const HolderValue value : values) {
      sets.release(value);
    }
  }
  CHECK(sets.count() == 0);
}

void the_ids_of_a_holder_space_lie_side_by_side() {
  Random random(4);
  HolderSets sets;
  for (const std::size_t count : {1, 2, 5, 6, 8, 9, 40, 3000}) {
    const std::uint32_t holder_spaces = static_cast<std::uint32_t>(count / 2 + 1);
    const HolderIds holder_ids = some_holder_ids(random, count, holder_spaces);
    const HolderValue value = sets.intern(holder_ids);
    for (std::uint32_t holder_space = 0; holder_space <= holder_spaces + 1; ++holder_space) {
      HolderIds expected;
      std::copy_if(holder_ids.begin(), holder_ids.end(), std::back_inserter(expected),
                   [holder_space](HolderId holder_id) { return holder_space_of(holder_id) == holder_space; });
      const auto found = sets.ids_of_holder_space(value, holder_space);
      CHECK((HolderIds{found.begin(), found.end()}) == expected);
    }
    sets.release(value);
  }
}

}  // namespace

int main() {
  return tests::run(
      {{"nobody and one holder id need no set", nobody_and_one_id_need_no_set},
       {"equal sets are one until the last block lets go", equal_sets_are_one_until_the_last_block_lets_go},
       {"sets are found after many others went", sets_are_found_after_many_others_went},
       {"memory does not grow when sets come and go", memory_does_not_grow_when_sets_come_and_go},
       {"the holder ids of a holder space lie side by side", the_ids_of_a_holder_space_lie_side_by_side}});
}
