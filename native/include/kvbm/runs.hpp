// Packed runs of hashes and slots, as commands and events carry them. Functions without state, but for DistinctHashes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

// Throws Error: kLayout. what: what a run is made of, `each` bytes long.
[[noreturn]] void refuse_run(const char* what, std::size_t bytes, std::size_t each);

// Throw Error: kLayout, when a run is no multiple of what it is made of.
inline std::size_t hash_count(Bytes hashes) {
  if (hashes.size() % kHashBytes != 0) [[unlikely]] {
    refuse_run("hashes", hashes.size(), kHashBytes);
  }
  return hashes.size() / kHashBytes;
}

inline std::size_t slot_count(Bytes slots) {
  if (slots.size() % kSlotBytes != 0) [[unlikely]] {
    refuse_run("slots", slots.size(), kSlotBytes);
  }
  return slots.size() / kSlotBytes;
}

inline const std::uint8_t* hash_at(Bytes hashes, std::size_t index) noexcept {
  return hashes.data() + index * kHashBytes;
}

inline std::uint32_t slot_at(Bytes slots, std::size_t index) noexcept {
  std::uint32_t slot = 0;
  std::memcpy(&slot, slots.data() + index * kSlotBytes, kSlotBytes);
  return slot;
}

inline std::optional<std::uint32_t> slot_if_any(Bytes slots, std::size_t index) noexcept {
  return slots.empty() ? std::nullopt : std::optional(slot_at(slots, index));
}

inline Bytes packed(std::span<const std::uint32_t> slots) noexcept {
  return {reinterpret_cast<const std::uint8_t*>(slots.data()), slots.size_bytes()};
}

// The hashes of blocks [begin, end) of a run.
inline Bytes blocks_of(Bytes hashes, std::size_t begin, std::size_t end) noexcept {
  return hashes.subspan(begin * kHashBytes, (end - begin) * kHashBytes);
}

inline void append(std::vector<std::uint8_t>& hashes, const std::uint8_t* hash) {
  hashes.insert(hashes.end(), hash, hash + kHashBytes);
}

// Whether no slot of a run is named twice.
bool are_slots_distinct(Bytes slots, std::vector<std::uint32_t>& scratch);

// Finds the distinct hashes of runs. Kept for its scratch; owner thread only.
class DistinctHashes {
 public:
  // seed: for positions in a hash table.
  explicit DistinctHashes(std::uint64_t seed) : seed_(seed) {}

  // The hashes of a run without repeats, in order. Valid until the next call.
  Bytes of(Bytes hashes);

 private:
  std::vector<std::uint8_t> hashes_;  // what `of` returns
  std::vector<std::uint32_t> seen_;   // scratch: open addressing of their numbers
  std::uint64_t seed_;                // of the positions in seen_
};

}  // namespace kvbm
