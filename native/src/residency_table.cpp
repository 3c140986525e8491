#include "kvbm/residency_table.hpp"

namespace kvbm {

void PositionIndex::reset(std::size_t count) {
  const std::size_t places = kLeastPlaces + count + count / 2 + count / 4;
  if (places != tags_.size()) {
    tags_ = std::vector<std::uint8_t>(places, kEmpty);
    positions_ = std::vector<std::uint32_t>(places);
  } else {
    std::fill(tags_.begin(), tags_.end(), kEmpty);
  }
  used_ = live_ = 0;
}

void ResidencyTable::move(std::uint32_t position, std::uint32_t owner, std::optional<std::uint32_t> slot) {
  Residency& one = residencies_[position];
  if (has_slot(one)) {
    vacate(one.slot);
  }
  one.owner = slot ? owner : owner | kNoSlotBit;
  if (slot) {
    one.slot = *slot;
    occupy(*slot, position);
  }
}

void ResidencyTable::clear() { *this = ResidencyTable(tier_); }

void ResidencyTable::reindex() {
  by_hash_.reset(count() + 1);
  for (std::uint32_t at = 0; at < end(); ++at) {
    if (!is_gone(residencies_[at])) {
      by_hash_.insert(residency_mix(tier_, residencies_[at].hash.data()), at);
    }
  }
}

void ResidencyTable::renumber() {
  next_sequence_ = 0;
  for (const std::uint32_t at : in_order([](const Residency&) { return true; })) {
    residencies_[at].sequence = next_sequence_++;
  }
}

std::size_t ResidencyTable::memory_bytes() const noexcept {
  return residencies_.capacity() * sizeof(Residency) + by_hash_.memory_bytes() +
         by_slot_.capacity() * sizeof(std::uint32_t) + by_high_slot_.size() * 32;
}

}  // namespace kvbm
