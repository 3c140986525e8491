#include "kvbm/block_table.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace kvbm {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// A shard is resized when it is fuller than kMostFull, or emptier than kLeastFull, to kResized of its slots.
constexpr double kMostFull = 0.67;
constexpr double kResized = 0.58;
constexpr double kLeastFull = 0.38;

}  // namespace

PageArena::~PageArena() {
  for (void* const mapping : mappings_) {
    munmap(mapping, kMappingBytes);
  }
}

void* PageArena::take() {
  if (!free_.empty()) {
    void* const page = free_.back();
    free_.pop_back();
    std::memset(page, 0, kPageBytes);
    return page;
  }
  if (mappings_.empty() || next_ == kMappingBytes) {
    mappings_.reserve(mappings_.size() + 1);
    free_.reserve(taken_ + kMappingBytes / kPageBytes);
    // Mapped one huge page larger than needed and cut to its alignment, so that the kernel can use huge pages.
    void* const mapped = mmap(nullptr, kMappingBytes + kHugePageBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      throw std::bad_alloc();
    }
    auto* const begin = static_cast<std::uint8_t*>(mapped);
    const std::size_t skip =
        (kHugePageBytes - reinterpret_cast<std::uintptr_t>(begin) % kHugePageBytes) % kHugePageBytes;
    if (skip > 0) {
      munmap(begin, skip);
    }
    munmap(begin + skip + kMappingBytes, kHugePageBytes - skip);
    madvise(begin + skip, kMappingBytes, MADV_HUGEPAGE);  // a wish: without huge pages it is slower, not wrong
    mappings_.push_back(begin + skip);
    next_ = 0;
  }
  void* const page = static_cast<std::uint8_t*>(mappings_.back()) + next_;
  next_ += kPageBytes;
  ++taken_;
  return page;
}

BlockTable::Value* BlockTable::put(Shard& shard, BlockKey key, std::uint64_t place) noexcept {
  std::uint32_t at = home(shard, place);
  while (true) {
    Bucket& here = bucket(shard, at);
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      if (here.values[slot] == 0) {
        here.keys[slot] = key;
        ++shard.entries;
        return &here.values[slot];
      }
    }
    here.pass(place);
    at = next(shard, at);
  }
}

BlockTable::Value* BlockTable::insert(BlockKey key, std::uint64_t place) {
  Shard& shard = shards_[place % kShards];
  if (shard.entries == shard.most) {
    resize(shard, shard.entries + 1);
  }
  return put(shard, key, place);
}

void BlockTable::erase(const Value* value, std::uint64_t place) noexcept {
  Shard& shard = shards_[place % kShards];
  const auto address = reinterpret_cast<std::uintptr_t>(value);
  const std::uintptr_t found = address / sizeof(Bucket) * sizeof(Bucket);
  const std::size_t slot = (address - found - offsetof(Bucket, values)) / sizeof(Value);
  std::uint32_t at = home(shard, place);
  while (reinterpret_cast<std::uintptr_t>(&bucket(shard, at)) != found) {
    bucket(shard, at).unpass();
    at = next(shard, at);
  }
  Bucket& here = bucket(shard, at);
  here.values[slot] = 0;
  --shard.entries;
  if (here.passed != 0) {
    pull_back(shard, at, slot);
  }
}

// Fills a free slot with an entry that found its bucket full and went on, then that entry's slot, and so on. Entries
// stay in their page, so that whoever goes through the table page by page misses none.
void BlockTable::pull_back(Shard& shard, std::uint32_t at, std::size_t slot) noexcept {
  const std::uint32_t page_end = (at / kPageBuckets + 1) * kPageBuckets;
  std::uint32_t from = at;
  while (bucket(shard, from).passed != 0 && from + 1 < page_end) {
    ++from;
    Bucket& there = bucket(shard, from);
    for (std::size_t other = 0; other < kSlots; ++other) {
      if (there.values[other] == 0) {
        continue;
      }
      const std::uint32_t ideal = home(shard, place(there.keys[other]));
      const std::uint32_t distance = from >= ideal ? from - ideal : from + shard.buckets - ideal;
      if (distance < from - at) {
        continue;
      }
      Bucket& here = bucket(shard, at);
      here.keys[slot] = there.keys[other];
      here.values[slot] = there.values[other];
      there.values[other] = 0;
      for (std::uint32_t passed = at; passed < from; ++passed) {
        bucket(shard, passed).unpass();
      }
      at = from;
      slot = other;
      break;
    }
  }
}

void BlockTable::resize(Shard& shard, std::size_t entries) {
  const auto wanted = static_cast<std::size_t>(static_cast<double>(entries) / (kResized * kSlots)) + 1;
  const std::size_t pages = (wanted + kPageBuckets - 1) / kPageBuckets;
  if (pages == shard.pages.size()) {
    return;
  }
  Shard moved;
  moved.pages.reserve(pages);
  try {
    for (std::size_t page = 0; page < pages; ++page) {
      moved.pages.push_back(static_cast<Bucket*>(arena_.take()));
    }
  } catch (...) {
    for (Bucket* const page : moved.pages) {
      arena_.give_back(page);
    }
    throw;
  }
  moved.buckets = static_cast<std::uint32_t>(pages * kPageBuckets);
  moved.most = static_cast<std::uint32_t>(kMostFull * static_cast<double>(kSlots) * moved.buckets);
  moved.moves = shard.moves + 1;
  for (const Bucket* const page : shard.pages) {
    for (std::size_t at = 0; at < kPageBuckets; ++at) {
      for (std::size_t slot = 0; slot < kSlots; ++slot) {
        if (page[at].values[slot] != 0) {
          *put(moved, page[at].keys[slot], place(page[at].keys[slot])) = page[at].values[slot];
        }
      }
    }
  }
  for (Bucket* const page : shard.pages) {
    arena_.give_back(page);
  }
  shard = std::move(moved);
}

void BlockTable::reserve(std::size_t entries) {
  // A shard gets its share and a little more: shares differ by a few standard deviations. What fits in a shard's first
  // page needs no room made: that page comes with the first entry.
  constexpr auto kFirstPage = static_cast<std::size_t>(kResized * static_cast<double>(kSlots * kPageBuckets));
  const std::size_t share = entries / kShards;
  for (Shard& shard : shards_) {
    const std::size_t wanted = std::max<std::size_t>(shard.entries, share + share / 64 + 1);
    if (wanted > kFirstPage && wanted > shard.most) {
      resize(shard, wanted);
    }
  }
}

void BlockTable::shrink(std::size_t index) {
  Shard& shard = shards_[index];
  if (static_cast<double>(shard.entries) < kLeastFull * static_cast<double>(kSlots) * shard.buckets) {
    resize(shard, shard.entries + 1);
  }
}

std::size_t BlockTable::size() const noexcept {
  std::size_t entries = 0;
  for (const Shard& shard : shards_) {
    entries += shard.entries;
  }
  return entries;
}

}  // namespace kvbm
