#include "kvbm/tier_slots.hpp"

#include <algorithm>
#include <bit>

namespace kvbm {

TierSlots::TierSlots(Tier tier, std::uint32_t slots, std::string_view eviction, std::uint64_t seed,
                     std::span<const Share> shares, const std::vector<std::uint32_t>* share_of)
    : tier_(tier),
      slots_(slots),
      index_(slots, seed),
      arriving_(slots, seed),
      free_(slots),
      held_bits_((slots + std::size_t{63}) / 64) {
  if (shares.empty()) {
    policy_ = make_eviction_policy(eviction, slots_, seed, slots_.size());
  } else {
    auto fair = std::make_unique<FairShares>(eviction, slots_, seed, shares, *share_of);
    fair_ = fair.get();
    policy_ = std::move(fair);
  }
}

TierCounts TierSlots::counts() const noexcept { return {size(), free_count(), held_, policy_->size(), allocated_}; }

bool TierSlots::is_arriving(const std::uint8_t* hash) const noexcept {
  const auto hash_of = [this](std::uint32_t at) { return slots_[at].hash.data(); };
  return receiving_ > 0 && arriving_.find(arriving_.tag(hash), hash, hash_of) != kNoEntry;
}

std::uint32_t TierSlots::next_held(std::uint32_t from) const noexcept {
  std::size_t word = from / 64;
  if (word >= held_bits_.size()) {
    return kNoSlot;
  }
  std::uint64_t bits = held_bits_[word] & ~std::uint64_t{0} << from % 64;
  while (bits == 0) {
    if (++word == held_bits_.size()) {
      return kNoSlot;
    }
    bits = held_bits_[word];
  }
  return static_cast<std::uint32_t>(64 * word + static_cast<std::size_t>(std::countr_zero(bits)));
}

std::vector<std::uint32_t> TierSlots::held() const {
  std::vector<std::uint32_t> held;
  held.reserve(held_);
  for (std::uint32_t slot = next_held(0); slot != kNoSlot; slot = next_held(slot + 1)) {
    held.push_back(slot);
  }
  std::ranges::sort(held, {}, [this](std::uint32_t slot) { return slots_[slot].gained; });
  return held;
}

// -- slots that hold no block yet -------------------------------------------------------------------------------------

std::uint64_t TierSlots::take(std::span<std::uint32_t> out) noexcept {
  std::uint64_t after = 0;
  for (std::uint32_t& slot : out) {
    if (free_count_ > 0) {
      slot = free_[free_first_];
      free_first_ = free_first_ + 1 == free_.size() ? 0 : free_first_ + 1;
      --free_count_;
      after = std::max(after, slots_[slot].withdrawn_before);  // kept: it may come back unwritten
    } else {
      slot = unused_++;
    }
    slots_[slot].state = SlotState::kAllocated;
  }
  allocated_ += out.size();
  return after;
}

void TierSlots::push_free(std::uint32_t slot) noexcept {
  slots_[slot].state = SlotState::kFree;
  const std::size_t end = free_first_ + free_count_;
  free_[end < free_.size() ? end : end - free_.size()] = slot;
  ++free_count_;
}

void TierSlots::give_back(std::uint32_t slot) noexcept {
  --allocated_;
  push_free(slot);
}

void TierSlots::receive(std::uint32_t slot, const std::uint8_t* hash) noexcept {
  Slot& target = slots_[slot];
  target.state = SlotState::kReceiving;
  std::copy_n(hash, kHashBytes, target.hash.begin());
  arriving_.insert(arriving_.tag(hash), slot);
  ++receiving_;
}

void TierSlots::end_receiving(std::uint32_t slot) noexcept {
  slots_[slot].state = SlotState::kAllocated;
  arriving_.erase(arriving_.tag(slots_[slot].hash.data()), slot);
  --receiving_;
}

void TierSlots::reserve(std::span<const std::uint32_t> taken) noexcept {
  for (const std::uint32_t slot : taken) {
    allocated_ += slots_[slot].state == SlotState::kFree ? 1 : 0;
    slots_[slot].state = SlotState::kAllocated;
    unused_ = std::max(unused_, slot + 1);
  }
  for (std::uint32_t slot = 0; slot < unused_; ++slot) {
    if (slots_[slot].state == SlotState::kFree) {
      push_free(slot);
    }
  }
}

// -- residencies ------------------------------------------------------------------------------------------------------

void TierSlots::unindex(std::uint32_t slot) noexcept { index_.erase(index_.tag(slots_[slot].hash.data()), slot); }

void TierSlots::clear() noexcept {
  allocated_ += held_;  // as `insert` expects it of each
  held_ = 0;
  std::ranges::fill(held_bits_, 0);
}

void TierSlots::enter(std::uint32_t slot, bool pinned) noexcept {
  slots_[slot].pins = pinned ? 1 : 0;
  policy_->gain(slot, pinned);
}

void TierSlots::withdraw_unheld(std::uint64_t applied) noexcept {
  for (std::uint32_t slot = 0; slot < unused_; ++slot) {
    if (slots_[slot].state != SlotState::kHeld) {
      slots_[slot].withdrawn_before = applied;
    }
  }
}

void TierSlots::vacate(std::uint32_t slot, std::uint64_t applied) noexcept {
  Slot& block = slots_[slot];
  policy_->lose(slot);
  if (block.priority != kNotKept) {
    release(slot);
  }
  block.withdrawn_before = applied;
  if (block.pins > 0) {
    block.state = SlotState::kOrphaned;
  } else {
    push_free(slot);
  }
}

// -- what may be evicted ----------------------------------------------------------------------------------------------

void TierSlots::pin(std::uint32_t slot) noexcept {
  Slot& block = slots_[slot];
  yielding_ -= yields(block) ? 1 : 0;
  ++block.pins;
  policy_->hold(slot);
}

void TierSlots::unpin(std::uint32_t slot) noexcept {
  if (discount_pin(slot)) {
    settle_unpinned(slot);
  }
}

void TierSlots::settle_unpinned(std::uint32_t slot) noexcept {
  const Slot& block = slots_[slot];
  if (block.state == SlotState::kOrphaned) {
    push_free(slot);
  } else if (block.priority == kNotKept) {
    policy_->free(slot);
  } else {
    yielding_ += yields(block) ? 1 : 0;
  }
}

void TierSlots::keep(std::uint32_t slot, double until_s, std::uint8_t priority, bool until_read) {
  Slot& block = slots_[slot];
  const bool was_kept = block.priority != kNotKept;
  if (was_kept) {
    until_read = until_read && block.until_read;
    until_s = std::max(until_s, block.kept_until_s);
    priority = std::max(priority, block.priority);
    if (until_s == block.kept_until_s && priority == block.priority) {
      block.until_read = until_read;
      return;
    }
  }
  const auto [in_time, is_later] = kept_in_time_.emplace(until_s, slot);  // what may throw comes first
  try {
    kept_in_rank_.emplace(priority, until_s, slot);
  } catch (...) {
    if (is_later) {
      kept_in_time_.erase(in_time);
    }
    throw;
  }
  if (was_kept) {
    yielding_ -= yields(block) ? 1 : 0;
    if (is_later) {
      kept_in_time_.erase({block.kept_until_s, slot});
    }
    kept_in_rank_.erase({block.priority, block.kept_until_s, slot});
  } else if (block.pins == 0) {
    policy_->hold(slot);
  }
  block.until_read = until_read;
  block.kept_until_s = until_s;
  block.priority = priority;
  yielding_ += yields(block) ? 1 : 0;
}

// A kept block is kept no more.
void TierSlots::release(std::uint32_t slot) noexcept {
  yielding_ -= yields(slots_[slot]) ? 1 : 0;
  forget_keep(slot);
}

// … whose pins say nothing: what yields is counted by who calls.
void TierSlots::forget_keep(std::uint32_t slot) noexcept {
  Slot& block = slots_[slot];
  kept_in_time_.erase({block.kept_until_s, slot});
  kept_in_rank_.erase({block.priority, block.kept_until_s, slot});
  block.priority = kNotKept;
}

std::size_t TierSlots::expire(double now_s) {
  std::vector<std::uint32_t> over;
  for (const auto& [until_s, slot] : kept_in_time_) {
    if (!(until_s <= now_s)) {
      break;
    }
    over.push_back(slot);
  }
  std::ranges::sort(over);
  for (const std::uint32_t slot : over) {
    release(slot);
    if (slots_[slot].pins == 0) {
      policy_->free(slot);
    }
  }
  return over.size();
}

bool TierSlots::victims(std::span<std::uint32_t> out) noexcept {
  const std::size_t from_policy = std::min(out.size(), policy_->size());
  if (out.size() - from_policy > yielding_) {
    return false;
  }
  policy_->victims(out.first(from_policy));
  std::size_t at = from_policy;
  for (auto next = kept_in_rank_.begin(); at < out.size(); ++next) {
    const std::uint32_t slot = std::get<2>(*next);
    if (yields(slots_[slot])) {
      out[at++] = slot;
    }
  }
  return true;
}

void TierSlots::spare(std::uint32_t slot) noexcept {
  if (slots_[slot].priority == kNotKept) {
    policy_->spare(slot);
  }
}

}  // namespace kvbm
