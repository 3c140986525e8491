#include "kvbm/holder_sets.hpp"

#include <algorithm>

namespace kvbm {
namespace {

std::uint32_t hash_of(std::span<const HolderId> holder_ids) noexcept {
  std::uint64_t hash = holder_ids.size();
  for (const HolderId holder_id : holder_ids) {
    hash = (hash ^ holder_id) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 29;
  }
  return static_cast<std::uint32_t>(hash ^ hash >> 32);
}

}  // namespace

HolderSets::Slab::~Slab() {
  for (Cell& cell : cells) {
    if (cell.count > kInline) {
      delete[] cell.holder_ids();
    }
  }
}

HolderSets::HolderSets() : next_free_(kSetBit), lookup_(64, 0) {}

std::span<const HolderId> HolderSets::ids_of_holder_space(const HolderValue& value,
                                                          std::uint32_t holder_space) const noexcept {
  const auto all = holder_ids(value);
  const HolderId* begin = all.data();
  const HolderId* const end = all.data() + all.size();
  const HolderId first = holder_space << 4;
  if (all.size() <= 8) {
    while (begin != end && *begin < first) {
      ++begin;
    }
  } else {
    begin = std::lower_bound(begin, end, first);
  }
  const HolderId* stop = begin;
  while (stop != end && holder_space_of(*stop) == holder_space) {
    ++stop;
  }
  return {begin, stop};
}

HolderValue HolderSets::intern(std::span<const HolderId> holder_ids) {
  if (holder_ids.empty()) {
    return 0;
  }
  if (holder_ids.size() == 1) {
    return holder_ids.front();
  }
  const std::uint32_t hash = hash_of(holder_ids);
  std::size_t at = hash & (lookup_.size() - 1);
  for (; lookup_[at] != 0; at = (at + 1) & (lookup_.size() - 1)) {
    Cell& cell = cell_of(lookup_[at]);
    if (cell.hash == hash && cell.count == holder_ids.size() &&
        std::equal(holder_ids.begin(), holder_ids.end(), cell.holder_ids())) {
      ++cell.references;
      return lookup_[at];
    }
  }
  if (2 * (count_ + 1) > lookup_.size()) {
    grow_lookup();
    at = hash & (lookup_.size() - 1);
    while (lookup_[at] != 0) {
      at = (at + 1) & (lookup_.size() - 1);
    }
  }
  if (next_free_ == kSetBit) {
    add_slab();
  }
  HolderId* const array = holder_ids.size() > kInline ? new HolderId[holder_ids.size()] : nullptr;
  const HolderValue value = kSetBit | next_free_;
  Cell& cell = cell_of(value);
  next_free_ = cell.references;
  cell.references = 1;
  cell.hash = hash;
  cell.count = static_cast<std::uint32_t>(holder_ids.size());
  std::copy(holder_ids.begin(), holder_ids.end(), array != nullptr ? array : cell.inline_ids);
  if (array != nullptr) {
    std::memcpy(cell.inline_ids + 1, &array, sizeof array);
    array_bytes_ += holder_ids.size_bytes();
  }
  lookup_[at] = value;
  ++count_;
  return value;
}

void HolderSets::free(HolderValue value) noexcept {
  Cell& cell = cell_of(value);
  std::size_t hole = cell.hash & (lookup_.size() - 1);
  while (lookup_[hole] != value) {
    hole = (hole + 1) & (lookup_.size() - 1);
  }
  // What lies behind the hole and would not be found any more moves into it.
  for (std::size_t at = (hole + 1) & (lookup_.size() - 1); lookup_[at] != 0; at = (at + 1) & (lookup_.size() - 1)) {
    const std::size_t ideal = cell_of(lookup_[at]).hash & (lookup_.size() - 1);
    if (((at - ideal) & (lookup_.size() - 1)) >= ((at - hole) & (lookup_.size() - 1))) {
      lookup_[hole] = lookup_[at];
      hole = at;
    }
  }
  lookup_[hole] = 0;
  if (cell.count > kInline) {
    array_bytes_ -= cell.count * sizeof(HolderId);
    delete[] cell.holder_ids();
  }
  cell.count = 0;
  cell.references = next_free_;
  next_free_ = value & ~kSetBit;
  --count_;
  ++frees_;
}

void HolderSets::add_slab() {
  const auto first = static_cast<std::uint32_t>(slabs_.size() * kCellsPerSlab);
  slabs_.push_back(std::make_unique<Slab>());
  for (std::uint32_t at = kCellsPerSlab; at-- > 0;) {
    slabs_.back()->cells[at].references = next_free_;
    next_free_ = first + at;
  }
}

void HolderSets::grow_lookup() {
  std::vector<HolderValue> larger(lookup_.size() * 2, 0);
  for (const HolderValue value : lookup_) {
    if (value != 0) {
      std::size_t at = cell_of(value).hash & (larger.size() - 1);
      while (larger[at] != 0) {
        at = (at + 1) & (larger.size() - 1);
      }
      larger[at] = value;
    }
  }
  lookup_ = std::move(larger);
}

std::size_t HolderSets::bytes() const noexcept {
  return slabs_.size() * sizeof(Slab) + lookup_.size() * sizeof(HolderValue) + array_bytes_;
}

}  // namespace kvbm
