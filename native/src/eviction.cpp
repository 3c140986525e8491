#include "kvbm/eviction.hpp"

#include <algorithm>

namespace kvbm {
namespace {

constexpr std::uint8_t kMaxUses = 3;  // what S3-FIFO counts up to

}  // namespace

void LeastRecentlyUsed::gain(std::uint32_t slot, bool pinned) noexcept {
  if (!pinned) {
    free(slot);
  }
}

void LeastRecentlyUsed::hold(std::uint32_t slot) noexcept { leave(slot); }

void LeastRecentlyUsed::free(std::uint32_t slot) noexcept {
  order_.append(slots_, slot);
  slots_[slot].queue = Queue::kMain;
}

void LeastRecentlyUsed::lose(std::uint32_t slot) noexcept { leave(slot); }

bool LeastRecentlyUsed::victims(std::span<std::uint32_t> out) noexcept {
  if (out.size() > order_.size()) {
    return false;
  }
  for (std::uint32_t& slot : out) {
    slot = order_.pop(slots_);
    slots_[slot].queue = Queue::kNone;
  }
  return true;
}

void LeastRecentlyUsed::leave(std::uint32_t slot) noexcept {
  if (slots_[slot].queue != Queue::kNone) {
    order_.remove(slots_, slot);
    slots_[slot].queue = Queue::kNone;
  }
}

// -- S3-FIFO ----------------------------------------------------------------------------------------------------------

// One entry more than is remembered: the newest enters before the oldest leaves.
Ghosts::Ghosts(std::size_t capacity, std::uint64_t seed) : entries_(capacity + 1), index_(capacity + 1, seed) {
  for (std::uint32_t entry = 0; entry < entries_.size(); ++entry) {
    spare_.append(entries_, entry);
  }
}

bool Ghosts::take(const SequenceHash& hash) noexcept {
  const std::uint32_t entry =
      index_.find(index_.tag(hash.data()), hash.data(), [this](std::uint32_t at) { return entries_[at].hash.data(); });
  if (entry == kNoEntry) {
    return false;
  }
  order_.remove(entries_, entry);
  unlink(entry);
  return true;
}

void Ghosts::remember(const SequenceHash& hash) noexcept {
  const std::uint32_t entry = spare_.pop(entries_);
  entries_[entry].hash = hash;
  index_.insert(index_.tag(hash.data()), entry);
  order_.append(entries_, entry);
  if (order_.size() == entries_.size()) {
    unlink(order_.pop(entries_));
    prefetch(entries_[order_.size() > 0 ? order_.first() : entry].hash.data());  // the one to go next
  }
}

void Ghosts::unlink(std::uint32_t entry) noexcept {
  index_.erase(index_.tag(entries_[entry].hash.data()), entry);
  spare_.append(entries_, entry);
}

S3Fifo::S3Fifo(std::span<Slot> slots, std::uint64_t seed, std::size_t capacity)
    : slots_(slots), small_slots_(std::max<std::size_t>(1, capacity / 10)), ghosts_(capacity - small_slots_, seed) {}

void S3Fifo::gain(std::uint32_t slot, bool pinned) noexcept {
  Slot& block = slots_[slot];
  block.uses = 0;
  block.is_held_back = pinned;
  held_back_ += pinned ? 1 : 0;
  if (ghosts_.take(block.hash)) {
    append_main(slot);
  } else {
    small_.append(slots_, slot);
    block.queue = Queue::kSmall;
  }
}

void S3Fifo::hold(std::uint32_t slot) noexcept {
  Slot& block = slots_[slot];
  block.uses = std::min<std::uint8_t>(kMaxUses, block.uses + 1);
  hold_back(block, true);
}

void S3Fifo::free(std::uint32_t slot) noexcept { hold_back(slots_[slot], false); }

void S3Fifo::lose(std::uint32_t slot) noexcept {
  const Queue queue = slots_[slot].queue;
  if (queue != Queue::kNone) {
    (queue == Queue::kMain ? main_ : small_).remove(slots_, slot);
    forget(slot);
  }
}

bool S3Fifo::victims(std::span<std::uint32_t> out) noexcept {
  if (out.size() > size()) {
    return false;
  }
  std::ranges::generate(out, [this] { return victim(); });
  return true;
}

// Ends, because at least one block may be evicted: small only gets shorter, and main is looked at only while it has
// such a block, whose uses run out.
std::uint32_t S3Fifo::victim() noexcept {
  for (;;) {
    if (small_.size() > small_slots_ || main_free_ == 0) {
      const std::uint32_t slot = small_.pop(slots_);
      Slot& block = slots_[slot];
      if (!block.is_held_back && block.uses == 0) {
        forget(slot);
        ghosts_.remember(block.hash);
        return slot;
      }
      block.uses = 0;
      append_main(slot);
    } else {
      const std::uint32_t slot = main_.pop(slots_);
      Slot& block = slots_[slot];
      if (!block.is_held_back) {
        if (block.uses == 0) {
          forget(slot);
          return slot;
        }
        --block.uses;
        --main_free_;  // append_main counts it again
      }
      append_main(slot);
    }
  }
}

void S3Fifo::append_main(std::uint32_t slot) noexcept {
  main_.append(slots_, slot);
  slots_[slot].queue = Queue::kMain;
  main_free_ += slots_[slot].is_held_back ? 0 : 1;
}

// The block has left its queue.
void S3Fifo::forget(std::uint32_t slot) noexcept {
  Slot& block = slots_[slot];
  hold_back(block, false);
  main_free_ -= block.queue == Queue::kMain ? 1 : 0;
  block.queue = Queue::kNone;
}

void S3Fifo::hold_back(Slot& slot, bool is_held_back) noexcept {
  if (slot.is_held_back == is_held_back) {
    return;
  }
  slot.is_held_back = is_held_back;
  if (is_held_back) {
    ++held_back_;
    main_free_ -= slot.queue == Queue::kMain ? 1 : 0;
  } else {
    --held_back_;
    main_free_ += slot.queue == Queue::kMain ? 1 : 0;
  }
}

// -- shares of tenants ------------------------------------------------------------------------------------------------

FairShares::FairShares(std::string_view eviction, std::span<Slot> slots, std::uint64_t seed,
                       std::span<const Share> shares, const std::vector<std::uint32_t>& share_of)
    : slots_(slots), share_of_(share_of) {
  std::uint64_t weights = 0;
  for (const Share& share : shares) {
    weights += share.weight;
  }
  for (const Share& share : shares) {
    const std::size_t capacity = std::max<std::size_t>(1, slots.size() * share.weight / weights);
    parts_.push_back({.policy = make_eviction_policy(eviction, slots, seed, capacity), .weight = share.weight});
  }
}

void FairShares::gain(std::uint32_t slot, bool pinned) noexcept {
  Part& part = part_of(slot);
  ++part.held;
  part.policy->gain(slot, pinned);
}

void FairShares::hold(std::uint32_t slot) noexcept { part_of(slot).policy->hold(slot); }

void FairShares::free(std::uint32_t slot) noexcept { part_of(slot).policy->free(slot); }

void FairShares::lose(std::uint32_t slot) noexcept {
  Part& part = part_of(slot);
  --part.held;
  part.policy->lose(slot);
}

bool FairShares::victims(std::span<std::uint32_t> out) noexcept {
  if (out.size() > size()) {
    return false;
  }
  for (Part& part : parts_) {
    part.left = part.held + part.coming;
    part.coming = 0;
  }
  for (std::uint32_t& slot : out) {
    Part& part = farthest_above();
    --part.left;
    part.policy->victims(std::span(&slot, 1));
  }
  return true;
}

std::size_t FairShares::size() const noexcept {
  std::size_t size = 0;
  for (const Part& part : parts_) {
    size += part.policy->size();
  }
  return size;
}

FairShares::Part& FairShares::part_of(std::uint32_t slot) noexcept {
  const std::uint32_t namespace_index = slots_[slot].namespace_index;
  return namespace_index < share_of_.size() ? parts_[share_of_[namespace_index]] : parts_.back();
}

// Of the shares that can give a block up, of which there is one, the one with the most blocks for its weight; of two
// alike the first.
FairShares::Part& FairShares::farthest_above() noexcept {
  Part* farthest = nullptr;
  for (Part& part : parts_) {
    if (part.policy->size() > 0 &&
        (farthest == nullptr || part.left * farthest->weight > farthest->left * part.weight)) {
      farthest = &part;
    }
  }
  return *farthest;
}

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, std::span<Slot> slots, std::uint64_t seed,
                                                     std::size_t capacity) {
  if (name == "lru") {
    return std::make_unique<LeastRecentlyUsed>(slots);
  }
  if (name == "s3fifo") {
    return std::make_unique<S3Fifo>(slots, seed, capacity);
  }
  return nullptr;
}

}  // namespace kvbm
