#include "kvbm/block_table.hpp"

#include <map>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

constexpr std::uint64_t kFirstSeed = 0x1D2C3B4A59687766;
constexpr std::uint64_t kSecondSeed = 0x8877665544332211;

// The key whose place is a chosen one: its first factor is 1.
BlockKey key_at(std::uint64_t place) { return {kFirstSeed ^ 1, kSecondSeed ^ place}; }

// A table and what it should hold.
class Checked {
 public:
  BlockTable table{kFirstSeed, kSecondSeed};

  std::size_t size() const { return model_.size(); }
  void put(BlockKey key, BlockTable::Value value) {
    const std::uint64_t place = table.place(key);
    BlockTable::Value* at = table.find(key, place);
    const auto known = model_.find({key.low, key.high});
    CHECK((at != nullptr) == (known != model_.end()) && (at == nullptr || *at == known->second));
    *(at != nullptr ? at : table.insert(key, place)) = value;
    model_[{key.low, key.high}] = value;
  }
  void erase(BlockKey key) {
    const std::uint64_t place = table.place(key);
    CHECK((table.find(key, place) != nullptr) == (model_.erase({key.low, key.high}) == 1));
    if (table.find(key, place) != nullptr) {
      table.erase(key, place);
    }
    CHECK(table.find(key, place) == nullptr);
  }
  // Odd values become even ones, those that three divides go.
  void update_all() {
    for (std::size_t shard = 0; shard < BlockTable::kShards; ++shard) {
      for (std::size_t page = 0; page < table.page_count(shard); ++page) {
        table.update_page(shard, page, [this](BlockKey key, BlockTable::Value value) {
          CHECK((model_.at({key.low, key.high}) == value));
          return updated(value);
        });
      }
      table.shrink(shard);
    }
    std::erase_if(model_, [](const auto& one) { return updated(one.second) == 0; });
    for (auto& [key, value] : model_) {
      value = updated(value);
    }
  }
  void check() const {
    CHECK(table.size() == model_.size());
    for (const auto& [key, value] : model_) {
      const BlockKey wanted{key.first, key.second};
      const std::uint64_t place = table.place(wanted);
      const BlockTable::Value* const found = table.find(wanted, place);
      CHECK(found != nullptr && *found == value);
      BlockTable::Value beside = 0;
      table.find_all({&wanted, 1}, {&place, 1}, &beside);
      CHECK(beside == value);
    }
    std::size_t visited = 0;
    for (std::size_t shard = 0; shard < BlockTable::kShards; ++shard) {
      for (std::size_t page = 0; page < table.page_count(shard); ++page) {
        table.visit_page(shard, page, [&](BlockKey key, BlockTable::Value value) {
          const auto known = model_.find({key.low, key.high});
          CHECK(known != model_.end() && known->second == value && table.place(key) % BlockTable::kShards == shard);
          ++visited;
        });
      }
    }
    CHECK(visited == model_.size());
  }

 private:
  static BlockTable::Value updated(BlockTable::Value value) {
    return value % 3 == 0 ? 0 : value % 2 == 1 ? value + 1 : value;
  }

  std::map<std::pair<std::uint64_t, std::uint64_t>, BlockTable::Value> model_;  // by low and high
};

void an_empty_table_has_nothing_and_no_pages() {
  BlockTable table(kFirstSeed, kSecondSeed);
  const BlockKey key = key_at(77);
  CHECK(table.place(key) == 77);
  const std::uint64_t place = 77;
  BlockTable::Value value = 5;
  table.find_all({&key, 1}, {&place, 1}, &value);
  CHECK(value == 0);
  CHECK(table.find(key, 77) == nullptr && table.size() == 0 && table.bytes() == 0 && table.page_count(77) == 0);
  table.shrink(77);
  table.reserve(0);
  CHECK(table.bytes() == 0);
}

void a_table_has_what_was_put_and_not_erased() {
  Random random(1);
  Checked checked;
  for (int pass = 0; pass < 4; ++pass) {
    // Few of the shards, so that some grow over several pages; few keys, so that most come back.
    for (int step = 0; step < 30'000; ++step) {
      const BlockKey key{random.below(20'000), (kSecondSeed & ~std::uint64_t{0xFF}) ^ random.below(2)};
      if (random.below(3) == 0) {
        checked.erase(key);
      } else {
        checked.put(key, static_cast<BlockTable::Value>(1 + random.below(1000)));
      }
    }
    checked.check();
    checked.update_all();
    checked.check();
  }
  checked.table.reserve(200'000);
  checked.check();
}

void a_shard_grows_and_shrinks_by_pages() {
  Random random(2);
  Checked checked;
  std::vector<BlockKey> keys;
  std::size_t pages = 0;
  for (std::size_t entries = 0; entries < 12'000; ++entries) {
    keys.push_back(key_at((random.next() & ~std::uint64_t{0xFF}) | 5));
    checked.put(keys.back(), 1);
    const std::size_t now = checked.table.page_count(5);
    CHECK(now >= pages && now <= pages + 1 + pages / 4);
    CHECK(now == pages || checked.table.moves(5) > 0);
    pages = now;
  }
  CHECK(pages > 6 && checked.table.bytes() == pages * PageArena::kPageBytes);
  checked.check();
  while (keys.size() > 100) {
    checked.erase(keys.back());
    keys.pop_back();
  }
  checked.table.shrink(5);
  CHECK(checked.table.page_count(5) == 1 && checked.table.bytes() == PageArena::kPageBytes);
  checked.check();
}

void keys_that_meet_in_one_bucket_are_all_found() {
  // A shard's first page has 512 buckets of 3. These places differ in 24 bits only, so all begin in the same bucket:
  // the last one.
  Random random(3);
  Checked checked;
  std::vector<BlockKey> keys;
  for (std::uint64_t number = 0; number < 1500; ++number) {
    keys.push_back(key_at(0xFFFFFFFF00000009 | number << 8));
    checked.put(keys.back(), static_cast<BlockTable::Value>(number + 1));
  }
  CHECK(checked.table.page_count(9) > 1);
  checked.check();
  // By now far more searches went on than a bucket can count. What goes, goes; the rest stays found.
  for (int step = 0; step < 3000; ++step) {
    const std::size_t at = random.below(keys.size());
    checked.erase(keys[at]);
    if (random.below(2) == 0) {
      checked.put(keys[at], 7);
    }
  }
  checked.check();
  for (const BlockKey key : keys) {
    checked.erase(key);
  }
  checked.check();
  CHECK(checked.table.find(key_at(0xFFFFFFFF12345609), 0xFFFFFFFF12345609) == nullptr);
}

void a_search_goes_past_a_full_shards_end() {
  // The last buckets overflow into the first ones, which have keys of their own.
  Checked checked;
  for (std::uint64_t number = 0; number < 300; ++number) {
    checked.put(key_at(0xFFFFFFF000000003 | number << 8), 1);
    checked.put(key_at(0x0000000100000003 | number << 8), 2);
  }
  CHECK(checked.table.page_count(3) == 1);
  checked.check();
  checked.update_all();
  checked.check();
  for (std::uint64_t number = 0; number < 300; number += 2) {
    checked.erase(key_at(0xFFFFFFF000000003 | number << 8));
    checked.erase(key_at(0x0000000100000003 | number << 8));
  }
  checked.check();
}

void what_was_reserved_moves_nothing_when_it_comes() {
  Random random(4);
  BlockTable table(kFirstSeed, kSecondSeed);
  constexpr std::size_t kEntries = 300'000;
  table.reserve(kEntries);
  const std::size_t bytes = table.bytes();
  std::size_t moves = 0;
  for (std::size_t shard = 0; shard < BlockTable::kShards; ++shard) {
    moves += table.moves(shard);
  }
  for (std::size_t entry = 0; entry < kEntries; ++entry) {
    const BlockKey key{random.next(), random.next()};
    *table.insert(key, table.place(key)) = 1;
  }
  std::size_t moves_now = 0;
  for (std::size_t shard = 0; shard < BlockTable::kShards; ++shard) {
    moves_now += table.moves(shard);
  }
  CHECK(table.bytes() == bytes && moves_now == moves && table.size() == kEntries);
}

void a_small_reservation_takes_no_page() {
  BlockTable table(kFirstSeed, kSecondSeed);
  table.reserve(1000);
  CHECK(table.bytes() == 0);
}

void churn_at_one_size_takes_no_more_memory() {
  Random random(5);
  Checked checked;
  std::vector<BlockKey> keys;
  const auto next_key = [&] { return key_at((random.next() & ~std::uint64_t{0xFF}) | random.below(4)); };
  for (std::size_t entry = 0; entry < 8000; ++entry) {
    keys.push_back(next_key());
    checked.put(keys.back(), 1);
  }
  // A shard may have begun close below a size at which it grows; after one pass all have been everywhere they will be.
  std::size_t bytes = 0;
  for (int pass = 0; pass < 6; ++pass) {
    for (BlockKey& key : keys) {
      checked.erase(key);
      key = next_key();
      checked.put(key, 1);
    }
    for (std::size_t shard = 0; shard < 4; ++shard) {
      checked.table.shrink(shard);
    }
    bytes = pass == 0 ? checked.table.bytes() : bytes;
    CHECK(checked.table.bytes() <= bytes + 4 * PageArena::kPageBytes);
  }
  checked.check();
}

void an_arena_uses_pages_again_and_zeroes_them() {
  PageArena arena;
  std::vector<std::uint8_t*> pages;
  for (int page = 0; page < 600; ++page) {  // more than two mappings
    pages.push_back(static_cast<std::uint8_t*>(arena.take()));
    CHECK(pages.back()[0] == 0 && pages.back()[PageArena::kPageBytes - 1] == 0);
    pages.back()[0] = pages.back()[PageArena::kPageBytes - 1] = 1;
  }
  CHECK(arena.used_bytes() == 600 * PageArena::kPageBytes);
  for (std::uint8_t* const page : pages) {
    arena.give_back(page);
  }
  CHECK(arena.used_bytes() == 0);
  std::map<void*, int> again;
  for (int page = 0; page < 600; ++page) {
    auto* const taken = static_cast<std::uint8_t*>(arena.take());
    CHECK(taken[0] == 0 && taken[PageArena::kPageBytes - 1] == 0);
    ++again[taken];
  }
  for (std::uint8_t* const page : pages) {
    CHECK(again[page] == 1);
  }
}

}  // namespace

int main() {
  return tests::run({{"an empty table has nothing and no pages", an_empty_table_has_nothing_and_no_pages},
                     {"a table has what was put and not erased", a_table_has_what_was_put_and_not_erased},
                     {"a shard grows and shrinks by pages", a_shard_grows_and_shrinks_by_pages},
                     {"keys that meet in one bucket are all found", keys_that_meet_in_one_bucket_are_all_found},
                     {"a search goes past a full shard's end", a_search_goes_past_a_full_shards_end},
                     {"what was reserved moves nothing when it comes", what_was_reserved_moves_nothing_when_it_comes},
                     {"a small reservation takes no page", a_small_reservation_takes_no_page},
                     {"churn at one size takes no more memory", churn_at_one_size_takes_no_more_memory},
                     {"an arena uses pages again and zeroes them", an_arena_uses_pages_again_and_zeroes_them}});
}
