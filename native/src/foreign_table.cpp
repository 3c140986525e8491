#include "kvbm/foreign_table.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace kvbm {
namespace {

// A wide key under which no other group has anything.
std::string wide_name(const ForeignKey& key, std::uint8_t group) {
  std::string name{static_cast<char>(group), static_cast<char>(key.kind)};
  name.append(reinterpret_cast<const char*>(key.wide.data()), key.wide.size());
  return name;
}

}  // namespace

ForeignTable::ForeignTable(std::uint64_t seed) : seed_(seed) {
  by_key_.reset(0);
  by_hash_.reset(0);
}

std::uint64_t ForeignTable::mix_of(std::uint64_t value, KeyKind kind, std::uint8_t group) const noexcept {
  std::uint64_t mix = value ^ seed_;
  mix = (mix ^ (mix >> 30)) * 0xBF58476D1CE4E5B9;
  mix += (std::uint64_t{group} << 2 | static_cast<std::uint64_t>(kind)) * 0x9E3779B97F4A7C15;
  mix = (mix ^ (mix >> 27)) * 0x94D049BB133111EB;
  return mix ^ (mix >> 31);
}

ForeignTable::Place ForeignTable::place_of(const ForeignKey& key, std::uint8_t group) const {
  Place place{.value = key.value};
  if (is_wide(key.kind)) {
    const auto found = wide_.find(wide_name(key, group));
    place.is_known = found != wide_.end();
    place.value = place.is_known ? found->second : 0;
  }
  place.mix = mix_of(place.value, key.kind, group);
  return place;
}

std::uint32_t ForeignTable::find(const Place& place, KeyKind kind, std::uint8_t group) const noexcept {
  if (!place.is_known) {
    return kNone;
  }
  return by_key_.find(place.mix, [&](std::uint32_t position) {
    const ForeignBlock& block = (*this)[position];
    return block.key == place.value && block.kind() == kind && groups_[block.home] == group;
  });
}

void ForeignTable::prefetch_block(const Place& place) const noexcept {
  by_key_.find(place.mix, [&](std::uint32_t position) {
    __builtin_prefetch(&(*this)[position]);
    return true;
  });
}

std::uint32_t ForeignTable::find_hash(const std::uint8_t* hash) const noexcept {
  return by_hash_.find(hash_mix(hash),
                       [&](std::uint32_t position) { return same_hash((*this)[position].hash.data(), hash); });
}

std::uint32_t ForeignTable::insert(const ForeignKey& key, std::uint8_t group, const std::uint8_t* hash,
                                   std::uint32_t start, std::uint8_t home, std::uint32_t& twin) {
  make_room();
  const std::uint64_t value = is_wide(key.kind) ? number_wide(wide_name(key, group)) : key.value;
  const std::uint32_t position = free_position();
  ForeignBlock& block = (*this)[position];
  block = {.key = value,
           .hash = {},
           .start = start,
           .copies = 0,
           .home = home,
           .marks = static_cast<std::uint8_t>(ForeignBlock::kRemembered | static_cast<unsigned>(key.kind)
                                                                              << ForeignBlock::kKindShift)};
  std::memcpy(block.hash.data(), hash, kHashBytes);
  twin = find_hash(hash);
  if (twin != kNone) {
    (*this)[twin].marks |= ForeignBlock::kShared;
    block.marks |= ForeignBlock::kShared;
  }
  by_key_.insert(mix_of(value, key.kind, group), position);
  by_hash_.insert(hash_mix(hash), position);
  return position;
}

// The number of a wide key that has none.
std::uint64_t ForeignTable::number_wide(std::string name) {
  free_wide_.reserve(wide_names_.size() + 1);  // so that forgetting needs no memory
  if (free_wide_.empty()) {
    free_wide_.push_back(wide_names_.size());
    wide_names_.push_back(nullptr);
  }
  const std::uint64_t number = free_wide_.back();
  wide_names_[number] = &wide_.emplace(std::move(name), number).first->first;
  free_wide_.pop_back();
  return number;
}

// A position with nothing in it. Room for it was made.
std::uint32_t ForeignTable::free_position() {
  if (first_free_ == kNone) {
    return end_++;
  }
  const std::uint32_t position = first_free_;
  first_free_ = (*this)[position].start;
  return position;
}

// Room for one block more everywhere. Throws std::bad_alloc; the indexes may be empty then and are filled at the next
// try, for a place that was not filled has no room.
void ForeignTable::make_room() {
  if (first_free_ == kNone && end_ == chunks_.size() * kChunkBlocks) {
    chunks_.push_back(std::make_unique_for_overwrite<ForeignBlock[]>(kChunkBlocks));
  }
  const std::size_t count = size();
  if (!by_key_.has_room()) {
    PositionIndex fresh;
    fresh.reset(count + 1);
    for (std::uint32_t at = 0; at < end_; ++at) {
      const ForeignBlock& block = (*this)[at];
      if (block.is_remembered()) {
        fresh.insert(mix_of(block.key, block.kind(), groups_[block.home]), at);
      }
    }
    by_key_ = std::move(fresh);
  }
  if (!by_hash_.has_room()) {
    PositionIndex fresh;
    fresh.reset(count + 1);
    for (std::uint32_t at = 0; at < end_; ++at) {
      if ((*this)[at].is_remembered()) {
        fresh.insert(hash_mix((*this)[at].hash.data()), at);
      }
    }
    by_hash_ = std::move(fresh);
  }
}

void ForeignTable::note_gone(std::uint32_t position) {
  std::uint32_t at = free_gone_;
  if (at == kNone) {
    at = static_cast<std::uint32_t>(gone_.size());
    gone_.emplace_back();
  } else {
    free_gone_ = gone_[at].after;
  }
  ForeignBlock& block = (*this)[position];
  gone_[at] = {.before = last_gone_, .after = kNone, .position = position, .start = block.start};
  block.start = at;
  (last_gone_ == kNone ? first_gone_ : gone_[last_gone_].after) = at;
  last_gone_ = at;
  ++gone_count_;
}

void ForeignTable::note_back(std::uint32_t position) noexcept {
  ForeignBlock& block = (*this)[position];
  const std::uint32_t at = block.start;
  block.start = gone_[at].start;
  unlink(at);
}

void ForeignTable::unlink(std::uint32_t at) noexcept {
  const Gone& place = gone_[at];
  (place.before == kNone ? first_gone_ : gone_[place.before].after) = place.after;
  (place.after == kNone ? last_gone_ : gone_[place.after].before) = place.before;
  gone_[at].after = free_gone_;
  free_gone_ = at;
  --gone_count_;
}

void ForeignTable::forget_gone(std::size_t most) noexcept {
  constexpr std::size_t kAtOnce = 16;
  std::array<std::uint32_t, kAtOnce> found;
  while (gone_count_ > most) {
    const std::size_t count = std::min(kAtOnce, gone_count_ - most);
    std::uint32_t at = first_gone_;
    for (std::size_t index = 0; index < count; ++index, at = gone_[at].after) {
      found[index] = gone_[at].position;
      __builtin_prefetch(&(*this)[found[index]]);
    }
    for (std::size_t index = 0; index < count; ++index) {
      const ForeignBlock& block = (*this)[found[index]];
      by_key_.prefetch(mix_of(block.key, block.kind(), groups_[block.home]));
      prefetch_hash(block.hash.data());
    }
    for (std::size_t index = 0; index < count; ++index) {
      unlink((*this)[found[index]].start);
      forget(found[index]);
    }
  }
}

// A block that is in no list is nowhere any more.
void ForeignTable::forget(std::uint32_t position) noexcept {
  ForeignBlock& block = (*this)[position];
  by_key_.erase(mix_of(block.key, block.kind(), groups_[block.home]), position);
  by_hash_.erase(hash_mix(block.hash.data()), position);
  if (is_wide(block.kind())) {
    wide_.erase(*wide_names_[block.key]);
    wide_names_[block.key] = nullptr;
    free_wide_.push_back(block.key);
  }
  block.marks = 0;
  block.start = first_free_;
  first_free_ = position;
}

void ForeignTable::clear() {
  ForeignTable fresh(seed_);
  fresh.groups_ = groups_;
  *this = std::move(fresh);
}

bool ForeignTable::is_before(const ForeignBlock& one, const ForeignBlock& other) const noexcept {
  constexpr std::array<std::uint8_t, 4> kOrder = {1, 0, 3, 2};  // numbers below 0 first, bytes last
  const std::uint8_t first = kOrder[static_cast<std::size_t>(one.kind())];
  const std::uint8_t second = kOrder[static_cast<std::size_t>(other.kind())];
  if (first != second) {
    return first < second;
  }
  return is_wide(one.kind()) ? *wide_names_[one.key] < *wide_names_[other.key] : one.key < other.key;
}

std::size_t ForeignTable::memory_bytes() const noexcept {
  return chunks_.size() * kChunkBlocks * sizeof(ForeignBlock) + by_key_.memory_bytes() + by_hash_.memory_bytes() +
         gone_.capacity() * sizeof(Gone);
}

}  // namespace kvbm
