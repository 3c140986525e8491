#include "kvbm/block_table.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace kvbm {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// A shard is resized when it is fuller than kMostFull, or emptier than kLeastFull, to kResized of its slots.
constexpr double kMostFull = 0.74;
constexpr double kResized = 0.62;
constexpr double kLeastFull = 0.40;

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
    const std::size_t skip = (kHugePageBytes - reinterpret_cast<std::uintptr_t>(begin) % kHugePageBytes) % kHugePageBytes;
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
  if (static_cast<double>(shard.entries + 1) > kMostFull * static_cast<double>(kSlots) * shard.buckets) {
    resize(shard, shard.entries + 1);
  }
  return put(shard, key, place);
}

void BlockTable::erase(BlockKey key, std::uint64_t place) noexcept {
  Shard& shard = shards_[place % kShards];
  std::uint32_t at = home(shard, place);
  while (true) {
    Bucket& here = bucket(shard, at);
    if (const std::size_t slot = here.find(key); slot < kSlots) {
      here.values[slot] = 0;
      --shard.entries;
      return;
    }
    here.unpass();
    at = next(shard, at);
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
  // A shard gets its share and a little more: shares differ by a few standard deviations. What fits in a shard's first page needs no
  // room made: that page comes with the first entry.
  constexpr auto kFirstPage = static_cast<std::size_t>(kResized * static_cast<double>(kSlots * kPageBuckets));
  const std::size_t share = entries / kShards;
  for (Shard& shard : shards_) {
    const std::size_t wanted = std::max<std::size_t>(shard.entries, share + share / 64 + 1);
    if (wanted > kFirstPage && static_cast<double>(wanted) > kMostFull * static_cast<double>(kSlots) * shard.buckets) {
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
