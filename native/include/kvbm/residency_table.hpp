// ResidencyTable: what one tier of an instance holds, for who reads its events. Made empty, told of each residency
// gained and lost, dropped. It grows with what is held, and one thread at a time uses it. PositionIndex is its part; a
// residency keeps its position until it is withdrawn. A ledger, whose pools have a fixed size, uses TierSlots instead.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/hash_index.hpp"

namespace kvbm {

// One residency.
struct Residency {
  SequenceHash hash;           // the block
  std::uint32_t slot = 0;      // where, if it has a slot
  std::uint32_t snapshot = 0;  // the snapshot of its tier when it was last gained or listed
  std::uint32_t owner = 0;     // index of its namespace; kNoSlotBit when it has no slot; kGone for none at all
  std::uint32_t sequence = 0;  // rises with each one gained; set by the table
};

// Open addressing from a hash of a key to the position of its residency. The keys themselves are the residencies'.
class PositionIndex {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  // The position whose tag fits and which `is_it` accepts, or kNone.
  template <class IsIt>
  std::uint32_t find(std::uint64_t hash, IsIt&& is_it) const noexcept;
  // Adds a key that is not there. Only while has_room().
  void insert(std::uint64_t hash, std::uint32_t position) noexcept;
  // Removes a key that is there.
  void erase(std::uint64_t hash, std::uint32_t position) noexcept;
  bool has_room() const noexcept { return used_ < tags_.size() - tags_.size() / 5; }
  std::size_t count() const noexcept { return live_; }
  // Empties it, with room for so many keys and some more.
  void reset(std::size_t count);
  void prefetch(std::uint64_t hash) const noexcept;
  std::size_t memory_bytes() const noexcept { return tags_.size() * 5; }

 private:
  static constexpr std::size_t kLeastPlaces = 16;
  static constexpr std::uint8_t kEmpty = 0;
  static constexpr std::uint8_t kErased = 1;
  static std::uint8_t tag_of(std::uint64_t hash) noexcept;
  // Where a key is looked for first. The number of places is no power of two, so that memory follows what is held
  // closely.
  std::size_t home_of(std::uint64_t hash) const noexcept { return ((hash & 0xFFFFFFFF) * tags_.size()) >> 32; }
  std::size_t after(std::size_t at) const noexcept { return at + 1 == tags_.size() ? 0 : at + 1; }

  std::vector<std::uint8_t> tags_;        // kEmpty, kErased, or bits of the key's hash
  std::vector<std::uint32_t> positions_;  // where tags_ has a key, its position
  std::size_t used_ = 0;                  // places not kEmpty
  std::size_t live_ = 0;                  // keys
};

// What one tier holds, by hash, by slot, and in the order it was gained. The first group is what Fold asks of a table.
class ResidencyTable {
 public:
  static constexpr std::uint32_t kNone = PositionIndex::kNone;
  static constexpr std::uint32_t kGone = 0xFFFFFFFF;
  static constexpr std::uint32_t kNoSlotBit = 0x80000000;
  static constexpr bool kMixesFirst = true;    // its lines are far away: a run's are asked for together
  static constexpr bool kKeepsBlocks = false;  // an epoch begins with nothing

  // next_sequence: where counting begins; only tests begin elsewhere than at 0.
  explicit ResidencyTable(Tier tier, std::uint32_t next_sequence = 0) : tier_(tier), next_sequence_(next_sequence) {
    by_hash_.reset(0);
  }

  // mix: residency_mix of the tier and the hash.
  std::uint32_t find(const std::uint8_t* hash, std::uint64_t mix) const noexcept;
  std::uint32_t find_slot(std::uint32_t slot) const noexcept;
  const std::uint8_t* hash_of(std::uint32_t position) const noexcept { return residencies_[position].hash.data(); }
  std::uint32_t owner_of(std::uint32_t position) const noexcept { return residencies_[position].owner & ~kNoSlotBit; }
  std::optional<std::uint32_t> slot_of(std::uint32_t position) const noexcept {
    return has_slot(residencies_[position]) ? std::optional(residencies_[position].slot) : std::nullopt;
  }
  // Adds a residency that is not there, in a slot nothing is in, or in none.
  void insert(const std::uint8_t* hash, std::uint64_t mix, std::uint32_t owner, std::optional<std::uint32_t> slot,
              std::uint32_t snapshot);
  void erase(std::uint32_t position, std::uint64_t mix) noexcept;
  // It was listed in a snapshot.
  void set_snapshot(std::uint32_t position, std::uint32_t snapshot) noexcept {
    residencies_[position].snapshot = snapshot;
  }
  void clear();
  std::size_t count() const noexcept { return by_hash_.count(); }
  Tier tier() const noexcept { return tier_; }
  // Where the last one was put.
  std::uint32_t last() const noexcept { return last_; }
  // All positions, in the order they were gained.
  std::vector<std::uint32_t> held() const {
    return in_order([](const Residency&) { return true; });
  }
  void prefetch(std::uint64_t mix) const noexcept { by_hash_.prefetch(mix); }

  // Puts a residency of another namespace, maybe, into another slot, in which nothing is, or into none.
  void move(std::uint32_t position, std::uint32_t owner, std::optional<std::uint32_t> slot);
  static bool has_slot(const Residency& one) noexcept { return (one.owner & kNoSlotBit) == 0; }
  static bool is_gone(const Residency& one) noexcept { return one.owner == kGone; }
  const Residency& operator[](std::uint32_t position) const noexcept { return residencies_[position]; }
  // All positions lie below; at some of them is nothing.
  std::uint32_t end() const noexcept { return static_cast<std::uint32_t>(residencies_.size()); }
  // The positions of those that `is_wanted` accepts, in the order they were gained.
  template <class IsWanted>
  std::vector<std::uint32_t> in_order(IsWanted&& is_wanted) const;
  std::size_t memory_bytes() const noexcept;

 private:
  // Slots below kLowSlots + kSlotsForEach a residency are looked up in an array, however few of them are taken.
  static constexpr std::size_t kLowSlots = 1024;
  static constexpr std::size_t kSlotsForEach = 4;
  static constexpr std::size_t kLeastPlaces = 16;

  void occupy(std::uint32_t slot, std::uint32_t position);
  void vacate(std::uint32_t slot) noexcept;
  void reindex();
  void renumber();

  Tier tier_;                           // for the mixes
  std::uint32_t next_sequence_;         // of the residency gained next
  std::uint32_t first_gone_ = kNone;    // a position with nothing in it; each names the next in its `slot`
  std::uint32_t last_ = kNone;          // the position put something into last
  std::vector<Residency> residencies_;  // by position
  PositionIndex by_hash_;               // hash → position
  std::vector<std::uint32_t> by_slot_;  // slot → position or kNone, for the low slots
  std::unordered_map<std::uint32_t, std::uint32_t> by_high_slot_;  // the same for slots too high for so few blocks
};

template <class IsIt>
std::uint32_t PositionIndex::find(std::uint64_t hash, IsIt&& is_it) const noexcept {
  const std::uint8_t tag = tag_of(hash);
  for (std::size_t at = home_of(hash);; at = after(at)) {
    if (tags_[at] == tag && is_it(positions_[at])) {
      return positions_[at];
    }
    if (tags_[at] == kEmpty) {
      return kNone;
    }
  }
}

template <class IsWanted>
std::vector<std::uint32_t> ResidencyTable::in_order(IsWanted&& is_wanted) const {
  std::vector<std::uint32_t> positions;
  for (std::uint32_t at = 0; at < end(); ++at) {
    if (!is_gone(residencies_[at]) && is_wanted(residencies_[at])) {
      positions.push_back(at);
    }
  }
  std::sort(positions.begin(), positions.end(), [this](std::uint32_t one, std::uint32_t other) {
    return residencies_[one].sequence < residencies_[other].sequence;
  });
  return positions;
}

inline std::uint8_t PositionIndex::tag_of(std::uint64_t hash) noexcept {
  const auto top = static_cast<std::uint8_t>(hash >> 56);
  return top > kErased ? top : static_cast<std::uint8_t>(top + 2);
}

inline void PositionIndex::insert(std::uint64_t hash, std::uint32_t position) noexcept {
  std::size_t at = home_of(hash);
  while (tags_[at] > kErased) {
    at = after(at);
  }
  used_ += tags_[at] == kEmpty;
  tags_[at] = tag_of(hash);
  positions_[at] = position;
  ++live_;
}

inline void PositionIndex::erase(std::uint64_t hash, std::uint32_t position) noexcept {
  std::size_t at = home_of(hash);
  while (tags_[at] <= kErased || positions_[at] != position) {
    at = after(at);
  }
  --live_;
  tags_[at] = kErased;
  if (tags_[after(at)] != kEmpty) {
    return;
  }
  // Nothing is behind an empty place, so an erased one before it is no bridge to anything.
  for (; tags_[at] == kErased; at = at == 0 ? tags_.size() - 1 : at - 1) {
    tags_[at] = kEmpty;
    --used_;
  }
}

inline void PositionIndex::prefetch(std::uint64_t hash) const noexcept {
  const std::size_t home = home_of(hash);
  __builtin_prefetch(&tags_[home]);
  __builtin_prefetch(&positions_[home]);
}

inline std::uint32_t ResidencyTable::find(const std::uint8_t* hash, std::uint64_t mix) const noexcept {
  return by_hash_.find(mix,
                       [&](std::uint32_t position) { return same_hash(residencies_[position].hash.data(), hash); });
}

inline std::uint32_t ResidencyTable::find_slot(std::uint32_t slot) const noexcept {
  if (slot < by_slot_.size() && by_slot_[slot] != kNone) {
    return by_slot_[slot];
  }
  if (by_high_slot_.empty()) {
    return kNone;
  }
  const auto found = by_high_slot_.find(slot);
  return found == by_high_slot_.end() ? kNone : found->second;
}

inline void ResidencyTable::occupy(std::uint32_t slot, std::uint32_t position) {
  if (slot >= by_slot_.size()) {
    if (slot >= kLowSlots + kSlotsForEach * count()) {
      by_high_slot_[slot] = position;
      return;
    }
    if (slot >= by_slot_.capacity()) {
      by_slot_.reserve(slot + slot / 8 + kLeastPlaces);
    }
    by_slot_.resize(slot + std::size_t{1}, kNone);
  }
  by_slot_[slot] = position;
}

inline void ResidencyTable::vacate(std::uint32_t slot) noexcept {
  if (slot < by_slot_.size() && by_slot_[slot] != kNone) {
    by_slot_[slot] = kNone;
  } else {
    by_high_slot_.erase(slot);
  }
}

inline void ResidencyTable::insert(const std::uint8_t* hash, std::uint64_t mix, std::uint32_t owner,
                                   std::optional<std::uint32_t> slot, std::uint32_t snapshot) {
  if (next_sequence_ == kNone) {
    renumber();
  }
  Residency made{.hash = {},
                 .slot = slot.value_or(0),
                 .snapshot = snapshot,
                 .owner = slot ? owner : owner | kNoSlotBit,
                 .sequence = next_sequence_};
  std::memcpy(made.hash.data(), hash, kHashBytes);
  std::uint32_t position = first_gone_;
  if (position == kNone) {
    if (residencies_.size() == residencies_.capacity()) {
      residencies_.reserve(residencies_.size() + residencies_.size() / 6 + kLeastPlaces);
    }
    position = end();
    residencies_.push_back(made);
  } else {
    first_gone_ = residencies_[position].slot;
    residencies_[position] = made;
  }
  last_ = position;
  ++next_sequence_;
  if (by_hash_.has_room()) {
    by_hash_.insert(mix, position);
  } else {
    reindex();
  }
  if (slot) {
    occupy(*slot, position);
  }
}

inline void ResidencyTable::erase(std::uint32_t position, std::uint64_t mix) noexcept {
  Residency& one = residencies_[position];
  by_hash_.erase(mix, position);
  if (has_slot(one)) {
    vacate(one.slot);
  }
  one.owner = kGone;
  one.slot = first_gone_;
  first_gone_ = position;
}

}  // namespace kvbm
