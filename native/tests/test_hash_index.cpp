#include "kvbm/hash_index.hpp"

#include <algorithm>
#include <map>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

// Hashes of which many fall on few cells: their tags are found by trying.
std::vector<SequenceHash> crowded_hashes(std::size_t count, std::uint64_t seed, std::uint32_t cells) {
  Random random(seed);
  std::vector<SequenceHash> hashes;
  while (hashes.size() < count) {
    SequenceHash hash{};
    const std::uint64_t bits = random.next();
    std::memcpy(hash.data(), &bits, sizeof bits);
    if ((hash_tag(hash.data(), seed) & 63) >= 64 - cells) {  // the last cells, so that searches go around the end
      hashes.push_back(hash);
    }
  }
  return hashes;
}

void equals_a_map(std::uint32_t cells) {
  constexpr std::uint64_t kSeed = 5;
  constexpr std::size_t kEntries = 16;  // 64 cells
  HashIndex index(kEntries, kSeed);
  const auto hashes = crowded_hashes(40, kSeed, cells);
  std::vector<SequenceHash> records(kEntries);
  std::map<SequenceHash, std::uint32_t> known;
  std::vector<std::uint32_t> spare;
  for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
    spare.push_back(entry);
  }
  const auto hash_of = [&](std::uint32_t entry) { return records[entry].data(); };
  Random random(cells);
  for (int step = 0; step < 20'000; ++step) {
    const SequenceHash& hash = hashes[random.below(hashes.size())];
    const std::uint32_t tag = index.tag(hash.data());
    if (const auto found = known.find(hash); found != known.end()) {
      CHECK(index.find(tag, hash.data(), hash_of) == found->second);
      CHECK(index.find_or_insert(tag, hash.data(), 99, hash_of) == found->second);
      if (random.below(2) == 0) {
        index.erase(tag, found->second);
        spare.push_back(found->second);
        known.erase(found);
      }
    } else {
      CHECK(index.find(tag, hash.data(), hash_of) == kNoEntry);
      if (!spare.empty()) {
        const std::uint32_t entry = spare.back();
        spare.pop_back();
        records[entry] = hash;
        if (random.below(2) == 0) {
          index.insert(tag, entry);
        } else {
          CHECK(index.find_or_insert(tag, hash.data(), entry, hash_of) == entry);
        }
        known[hash] = entry;
      }
    }
  }
  for (const auto& [hash, entry] : known) {
    CHECK(index.find(index.tag(hash.data()), hash.data(), hash_of) == entry);
  }
}

void it_is_a_map() { equals_a_map(64); }
void it_is_a_map_when_crowded() { equals_a_map(3); }

void seeds_scatter() {
  Random random(3);
  std::vector<std::uint32_t> one, other;
  SequenceHash hash{};
  for (std::uint8_t number = 0; number < 64; ++number) {
    hash[0] = number;
    one.push_back(hash_tag(hash.data(), random.next()) & 1023);
    other.push_back(hash_tag(hash.data(), 7) & 1023);
  }
  std::ranges::sort(other);
  CHECK(other.end() - std::unique(other.begin(), other.end()) < 16);  // hashes that differ in one byte do not pile up
  CHECK(!std::ranges::equal(one, other));
}

}  // namespace

int main() {
  return tests::run({{"an index finds what a map finds", it_is_a_map},
                     {"also when all searches begin at three cells before the end", it_is_a_map_when_crowded},
                     {"hashes that look alike are scattered", seeds_scatter}});
}
