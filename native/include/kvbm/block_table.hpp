// BlockTable: 128-bit keys → one 32-bit value each. Grows and shrinks by small steps, a shard at a time.
// Made empty; lives as long as its index. Writers and readers are kept apart by its owner: one writer, or many readers.
//
// A bucket is one cache line: three keys and three values, how many entries found it full and went on, and a filter of
// those. A search goes beyond a bucket only when the filter lets it, so a removal leaves no tombstone and what is not
// there mostly costs one line. A removal lets an entry that had gone on come back, so churn does not scatter them.
// Buckets lie in pages of 32 KiB from an arena of huge pages; a shard's buckets are a list of pages, so memory follows
// the number of entries in steps of a page.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvbm {

// What an entry is found by: a sequence hash, blinded by its namespace's secret.
struct BlockKey {
  std::uint64_t low = 0;   // bytes 0 to 7
  std::uint64_t high = 0;  // bytes 8 to 15

  bool operator==(const BlockKey&) const = default;
};

// Fixed-size pages from large, aligned mappings. Freed pages are used again; mappings stay until the end.
class PageArena {
 public:
  static constexpr std::size_t kPageBytes = std::size_t{32} << 10;

  PageArena() = default;
  ~PageArena();
  PageArena(const PageArena&) = delete;
  PageArena& operator=(const PageArena&) = delete;

  // A page of zeros. Throws std::bad_alloc.
  void* take();
  void give_back(void* page) noexcept { free_.push_back(page); }
  // Bytes in pages that are in use.
  std::size_t used_bytes() const noexcept { return (taken_ - free_.size()) * kPageBytes; }

 private:
  static constexpr std::size_t kMappingBytes = std::size_t{8} << 20;

  std::vector<void*> mappings_;  // what was mapped, each kMappingBytes
  // Pages given back, not zeroed; room for all pages is kept, so that giving back cannot fail
  std::vector<void*> free_;
  std::size_t next_ = 0;   // bytes of the last mapping handed out
  std::size_t taken_ = 0;  // pages ever handed out fresh
};

class BlockTable {
 public:
  using Value = std::uint32_t;  // 0 means no entry

  static constexpr std::size_t kShards = 256;

  // seeds: secret, so that nobody can choose keys that meet in one bucket.
  BlockTable(std::uint64_t first_seed, std::uint64_t second_seed) : seeds_{first_seed, second_seed} {}

  // Where a key belongs; computed once for each key of a run, so that its bucket can be fetched ahead.
  std::uint64_t place(BlockKey key) const noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(key.low ^ seeds_[0]) * (key.high ^ seeds_[1]);
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }

  // A search under way: begun for many keys at once, so that they wait for memory together.
  struct Search {
    const void* bucket = nullptr;  // what is looked into next; nullptr when there is nothing
    const void* shard = nullptr;   // where it lies
    std::uint32_t at = 0;          // and which of the shard's buckets it is
  };

  // Begins a search: asks for its first bucket.
  Search begin_search(std::uint64_t place) const noexcept {
    const Shard& shard = shards_[place % kShards];
    if (shard.buckets == 0) {
      return {};
    }
    const std::uint32_t first = home(shard, place);
    const Bucket* const here = &bucket(shard, first);
    __builtin_prefetch(here);
    return {here, &shard, first};
  }

  // Looks into the bucket asked for last. Whether the search is over, with the key's value or 0; if not, the next
  // bucket is asked for.
  bool step_search(Search& search, BlockKey key, std::uint64_t place, Value& value) const noexcept {
    const auto* const here = static_cast<const Bucket*>(search.bucket);
    value = 0;
    if (here == nullptr) {
      return true;
    }
    const std::size_t slot = here->find(key);
    if (slot < kSlots) {
      value = here->values[slot];
      return true;
    }
    if (!here->may_have_passed(place)) {
      return true;
    }
    const Shard& shard = *static_cast<const Shard*>(search.shard);
    search.at = next(shard, search.at);
    search.bucket = &bucket(shard, search.at);
    __builtin_prefetch(search.bucket);
    return false;
  }

  // Up to kMostAtOnce keys looked for side by side. values[i]: of keys[i], 0 for none. What was looked at is in the
  // cache afterwards, so a writer calls it before it works through a batch.
  static constexpr std::size_t kMostAtOnce = 64;
  void find_all(std::span<const BlockKey> keys, std::span<const std::uint64_t> places, Value* values) const noexcept {
    std::array<Search, kMostAtOnce> searches;
    std::array<std::uint8_t, kMostAtOnce> waiting;
    std::size_t count = keys.size();
    for (std::size_t index = 0; index < count; ++index) {
      searches[index] = begin_search(places[index]);
      waiting[index] = static_cast<std::uint8_t>(index);
    }
    while (count > 0) {
      std::size_t kept = 0;
      for (std::size_t position = 0; position < count; ++position) {
        const std::uint8_t index = waiting[position];
        waiting[kept] = index;
        kept += step_search(searches[index], keys[index], places[index], values[index]) ? 0 : 1;
      }
      count = kept;
    }
  }

  // The value of a key, or nullptr. Valid until the table changes.
  Value* find(BlockKey key, std::uint64_t place) noexcept {
    return const_cast<Value*>(static_cast<const BlockTable*>(this)->find(key, place));
  }
  const Value* find(BlockKey key, std::uint64_t place) const noexcept {
    const Shard& shard = shards_[place % kShards];
    if (shard.buckets == 0) {
      return nullptr;
    }
    std::uint32_t at = home(shard, place);
    for (std::uint32_t looked = 0; looked < shard.buckets; ++looked) {
      const Bucket& here = bucket(shard, at);
      const std::size_t slot = here.find(key);
      if (slot < kSlots) {
        return &here.values[slot];
      }
      if (!here.may_have_passed(place)) {
        return nullptr;
      }
      at = next(shard, at);
    }
    return nullptr;
  }

  // The value of a key that is not in the table yet, to be set to something other than 0 at once. Throws
  // std::bad_alloc.
  Value* insert(BlockKey key, std::uint64_t place);

  // Removes the entry whose value `find` gave. Other entries may move, but not to another page.
  void erase(const Value* value, std::uint64_t place) noexcept;
  // Removes a key that is in the table.
  void erase(BlockKey key, std::uint64_t place) noexcept { erase(find(key, place), place); }

  // Makes room for this many entries altogether, so that their insertion moves nothing. Throws std::bad_alloc.
  void reserve(std::size_t entries);

  std::size_t size() const noexcept;
  // Bytes of pages in use.
  std::size_t bytes() const noexcept { return arena_.used_bytes(); }

  // -- going through all of it, a page at a time --

  std::size_t page_count(std::size_t shard) const noexcept { return shards_[shard].pages.size(); }
  // Counts a shard's moves: pages seen before the last one say nothing about the entries now.
  std::uint64_t moves(std::size_t shard) const noexcept { return shards_[shard].moves; }

  // Calls visit(key, value) for each entry of a page; what it returns becomes the value, and 0 removes the entry.
  template <class Visit>
  void update_page(std::size_t shard, std::size_t page, Visit&& visit) {
    Bucket* const buckets = shards_[shard].pages[page];
    for (std::size_t at = 0; at < kPageBuckets; ++at) {
      for (std::size_t slot = 0; slot < kSlots; ++slot) {
        Value& value = buckets[at].values[slot];
        if (buckets[at].values[slot] != 0) {
          const Value now = visit(buckets[at].keys[slot], value);
          if (now == 0) {
            erase(&value, place(buckets[at].keys[slot]));
            slot -= value != 0 ? 1 : 0;  // another entry came to this place: it is next
          } else {
            value = now;
          }
        }
      }
    }
  }

  // Calls visit(key, value) for each entry of a page.
  template <class Visit>
  void visit_page(std::size_t shard, std::size_t page, Visit&& visit) const {
    const Bucket* const buckets = shards_[shard].pages[page];
    for (std::size_t at = 0; at < kPageBuckets; ++at) {
      for (std::size_t slot = 0; slot < kSlots; ++slot) {
        if (buckets[at].values[slot] != 0) {
          visit(buckets[at].keys[slot], buckets[at].values[slot]);
        }
      }
    }
  }

  // -- going through all of it in an order that nothing changes, a stretch at a time --

  // The place of a block in that order: by shard, and in it as homes are, whatever size the shard has.
  static constexpr std::uint64_t rank(std::uint64_t place) noexcept { return place % kShards << 32 | place >> 32; }
  static constexpr std::uint64_t kRankEnd = std::uint64_t{kShards} << 32;

  // Calls visit(key, place, value) for each entry whose rank is at least `first` and below what is returned: about a
  // page of them, or the rest of a shard. An entry that lies where its key does not belong is not visited.
  template <class Visit>
  std::uint64_t visit_ranks(std::uint64_t first, Visit&& visit) const {
    const Shard& shard = shards_[first >> 32];
    const std::uint64_t shard_end = ((first >> 32) + 1) << 32;
    if (shard.buckets == 0) {
      return shard_end;
    }
    const std::uint32_t begin = home(shard, first << 32);
    const std::uint64_t end = begin + kPageBuckets;
    // The first rank whose home is `end`, rounded up.
    const std::uint64_t stop =
        end < shard.buckets ? (first >> 32 << 32) + ((end << 32) + shard.buckets - 1) / shard.buckets : shard_end;
    std::uint32_t at = begin;
    for (std::uint32_t looked = 0; looked < shard.buckets; ++looked) {
      const Bucket& here = bucket(shard, at);
      for (std::size_t slot = 0; slot < kSlots; ++slot) {
        if (here.values[slot] != 0) {
          const std::uint64_t belongs = place(here.keys[slot]);
          if (rank(belongs) >= first && rank(belongs) < stop) {
            visit(here.keys[slot], belongs, here.values[slot]);
          }
        }
      }
      if (looked + 1 >= kPageBuckets && here.passed == 0) {
        break;  // beyond the stretch, and nothing of it went on
      }
      at = next(shard, at);
    }
    return stop;
  }

  // Gives pages back where a shard has become much emptier than it was.
  void shrink(std::size_t shard);

 private:
  static constexpr std::size_t kSlots = 3;
  static constexpr std::uint32_t kManyPassed = 0xFF;  // a count that stays: it was not kept exactly from here on

  struct alignas(64) Bucket {
    std::array<BlockKey, kSlots> keys;  // set where the value is not 0
    std::array<Value, kSlots> values;   // 0: free
    // Low byte: entries whose search goes beyond this bucket; above it a filter of their places
    std::uint32_t passed;

    static std::uint32_t filter_bit(std::uint64_t place) noexcept {
      return 0x100U << (static_cast<std::uint32_t>(place >> 8 & 0xFFFF) * 24 >> 16);
    }

    bool may_have_passed(std::uint64_t place) const noexcept { return (passed & filter_bit(place)) != 0; }
    void pass(std::uint64_t place) noexcept {
      passed = (passed | filter_bit(place)) + ((passed & 0xFF) != kManyPassed ? 1 : 0);
    }
    void unpass() noexcept {
      if ((passed & 0xFF) != kManyPassed) {
        passed = (passed & 0xFF) == 1 ? 0 : passed - 1;
      }
    }

    // The slot of a key, or kSlots.
    std::size_t find(BlockKey key) const noexcept {
#if defined(__SSE2__)
      // All three are compared, always: which one it is cannot be foreseen.
      const __m128i wanted = _mm_set_epi64x(static_cast<long long>(key.high), static_cast<long long>(key.low));
      const auto differs = [&](std::size_t slot) {
        const __m128i here = _mm_load_si128(reinterpret_cast<const __m128i*>(&keys[slot]));
        return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(here, wanted))) ^ 0xFFFF;
      };
      const std::uint32_t found = static_cast<std::uint32_t>(differs(0) == 0 && values[0] != 0) |
                                  static_cast<std::uint32_t>(differs(1) == 0 && values[1] != 0) << 1 |
                                  static_cast<std::uint32_t>(differs(2) == 0 && values[2] != 0) << 2;
#else
      std::uint32_t found = 0;
      for (std::size_t slot = 0; slot < kSlots; ++slot) {
        const bool is_here = ((keys[slot].low ^ key.low) | (keys[slot].high ^ key.high)) == 0 && values[slot] != 0;
        found |= static_cast<std::uint32_t>(is_here) << slot;
      }
#endif
      return static_cast<std::size_t>(std::countr_zero(found | 1U << kSlots));
    }
  };
  static_assert(sizeof(Bucket) == 64);

  static constexpr std::size_t kPageBuckets = PageArena::kPageBytes / sizeof(Bucket);

  struct Shard {
    std::vector<Bucket*> pages;  // its buckets, kPageBuckets a page
    std::uint32_t buckets = 0;   // pages.size() * kPageBuckets
    std::uint32_t entries = 0;   // keys in it
    std::uint32_t most = 0;      // keys beyond which it grows
    std::uint64_t moves = 0;     // how often its entries were all moved
  };

  static Bucket& bucket(const Shard& shard, std::uint32_t at) noexcept {
    return shard.pages[at / kPageBuckets][at % kPageBuckets];
  }
  // Places map to buckets in order, so that moving a shard to another size runs through both sizes once.
  static std::uint32_t home(const Shard& shard, std::uint64_t place) noexcept {
    return static_cast<std::uint32_t>((place >> 32) * shard.buckets >> 32);
  }
  static std::uint32_t next(const Shard& shard, std::uint32_t at) noexcept {
    return at + 1 == shard.buckets ? 0 : at + 1;
  }

  void pull_back(Shard& shard, std::uint32_t at, std::size_t slot) noexcept;
  static Value* put(Shard& shard, BlockKey key, std::uint64_t place) noexcept;
  void resize(Shard& shard, std::size_t entries);

  std::array<std::uint64_t, 2> seeds_;  // of `place`
  PageArena arena_;                     // the pages
  std::array<Shard, kShards> shards_;   // by the lowest bits of the place
};

}  // namespace kvbm
