#include "kvbm/runs.hpp"

#include <bit>
#include <string>

#include "kvbm/error.hpp"
#include "kvbm/hash_index.hpp"
#include "kvbm/words.hpp"

namespace kvbm {

void refuse_run(const char* what, std::size_t bytes, std::size_t each) {
  throw Error(ErrorCode::kLayout, words("a run of ", what, " has ", bytes, " bytes, which is no multiple of ", each));
}

bool are_slots_distinct(Bytes slots, std::vector<std::uint32_t>& scratch) {
  const auto place_of = [](std::uint32_t slot) {
    const std::uint64_t product = (std::uint64_t{slot} + 1) * 0x9E3779B97F4A7C15;
    return product ^ (product >> 32);
  };
  const std::size_t count = slots.size() / kSlotBytes;
  const std::size_t places = std::bit_ceil(count * 2 + 1);
  scratch.assign(places, 0);
  for (std::size_t index = 0; index < count; ++index) {
    const std::uint32_t slot = slot_at(slots, index);
    std::size_t at = place_of(slot) & (places - 1);
    for (; scratch[at] != 0; at = (at + 1) & (places - 1)) {
      if (slot_at(slots, scratch[at] - 1) == slot) {
        return false;
      }
    }
    scratch[at] = static_cast<std::uint32_t>(index + 1);
  }
  return true;
}

Bytes DistinctHashes::of(Bytes hashes) {
  const std::size_t count = hashes.size() / kHashBytes;
  hashes_.clear();
  seen_.assign(std::bit_ceil(2 * count + 1), kNoEntry);
  for (std::size_t at = 0; at < count; ++at) {
    const std::uint8_t* const hash = hash_at(hashes, at);
    std::size_t cell = hash_tag(hash, seed_) & (seen_.size() - 1);
    while (seen_[cell] != kNoEntry && !same_hash(hash_at(hashes, seen_[cell]), hash)) {
      cell = (cell + 1) & (seen_.size() - 1);
    }
    if (seen_[cell] == kNoEntry) {
      seen_[cell] = static_cast<std::uint32_t>(at);
      append(hashes_, hash);
    }
  }
  return hashes_;
}

}  // namespace kvbm
