#include "kvbm/slot_allocator.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <vector>

#include "kvbm/runs.hpp"

namespace kvbm {
namespace {

// Shares with that of all others last. Throws Error: kLedger, when a tenant is named twice or a weight is none.
std::vector<Share> with_others(std::vector<Share> shares) {
  if (shares.empty()) {
    return shares;
  }
  std::set<std::string_view> tenants;
  for (const Share& share : shares) {
    if (share.weight < 1) {
      throw ledger_error("the share of tenant '" + share.tenant + "' has weight 0; a weight is at least 1");
    }
    tenants.insert(share.tenant);
  }
  if (tenants.size() < shares.size()) {
    throw ledger_error(std::to_string(shares.size()) + " shares name " + std::to_string(tenants.size()) +
                       " tenants; a tenant has one share");
  }
  const auto others = std::ranges::find(shares, kOthers, &Share::tenant);
  if (others != shares.end()) {
    std::rotate(others, others + 1, shares.end());
  } else {
    shares.push_back({.tenant = kOthers});
    shares.back().quota.fill(kNoQuota);
  }
  return shares;
}

void each_slot(Recorder& recorder, const std::array<std::vector<std::uint32_t>, kTierCount>& slots,
               void (*act)(TierSlots&, std::uint32_t)) {
  for (std::size_t number = 0; number < kTierCount; ++number) {
    for (const std::uint32_t slot : slots[number]) {
      act(*recorder.fold().table(static_cast<Tier>(number)), slot);
    }
  }
}

}  // namespace

SlotAllocator::SlotAllocator(std::vector<Share> shares)
    : shares_(with_others(std::move(shares))), share_of_(std::make_unique<std::vector<std::uint32_t>>()) {}

void SlotAllocator::assign(Recorder& recorder, const NamespaceId& namespace_id, std::string_view tenant) {
  if (shares_.empty()) {
    return;
  }
  const auto others = static_cast<std::uint32_t>(shares_.size() - 1);
  const auto named = static_cast<std::uint32_t>(std::ranges::find(shares_, tenant, &Share::tenant) - shares_.begin());
  const std::uint32_t share = std::min(named, others);
  const std::uint32_t index = recorder.fold().namespaces().intern(namespace_id);
  std::array<std::vector<std::uint32_t>, kTierCount> moved;
  if (share_of(recorder, namespace_id) != share) {
    for (std::size_t number = 0; number < kTierCount; ++number) {
      if (const TierSlots* const tier = recorder.fold().table(static_cast<Tier>(number))) {
        moved[number] = tier->held();
        std::erase_if(moved[number], [&](std::uint32_t slot) { return tier->owner_of(slot) != index; });
        std::ranges::reverse(moved[number]);  // as blocks of a prompt enter, the deepest first
      }
    }
  }
  share_of_->reserve(index + std::size_t{1});  // what may throw has been
  each_slot(recorder, moved, [](TierSlots& tier, std::uint32_t slot) { tier.leave_share(slot); });
  share_of_->resize(std::max<std::size_t>(share_of_->size(), index + std::size_t{1}), others);
  (*share_of_)[index] = share;
  each_slot(recorder, moved, [](TierSlots& tier, std::uint32_t slot) { tier.enter_share(slot); });
}

std::uint32_t SlotAllocator::share_of(Recorder& recorder, const NamespaceId& namespace_id) const {
  const std::uint32_t index = recorder.fold().namespaces().intern(namespace_id);
  return index < share_of_->size() ? (*share_of_)[index] : static_cast<std::uint32_t>(shares_.size() - 1);
}

bool SlotAllocator::holds_half(const TierSlots& tier, std::uint32_t slot) const noexcept {
  if (shares_.empty()) {
    return false;
  }
  const std::uint32_t index = tier.owner_of(slot);
  const std::size_t share = index < share_of_->size() ? (*share_of_)[index] : shares_.size() - 1;
  const std::uint32_t quota = shares_[share].quota[static_cast<std::size_t>(tier.tier())];
  const ShareCounts counts = tier.counts_of(static_cast<std::uint32_t>(share));
  return quota != kNoQuota && 2 * (counts.held - counts.evictable) >= quota;
}

std::int64_t SlotAllocator::quota_left(const TierSlots& tier, std::uint32_t share,
                                       std::size_t arriving) const noexcept {
  const std::uint32_t quota = shares_[share].quota[static_cast<std::size_t>(tier.tier())];
  if (quota == kNoQuota) {
    return tier.size();
  }
  return static_cast<std::int64_t>(quota) - static_cast<std::int64_t>(tier.counts_of(share).held + arriving);
}

std::optional<Allocation> SlotAllocator::allocate(Recorder& recorder, TierSlots& tier, std::size_t count,
                                                  const NamespaceId* namespace_id) {
  if (recorder.is_closed(tier.tier()) || count > tier.room()) {
    return std::nullopt;
  }
  if (const std::size_t free = tier.free_count(); count > free) {
    recorder.fold().check_open(kEvicted);  // before the policy has given up anything
    victims_.resize(count - free);
    if (!shares_.empty() && namespace_id != nullptr) {
      tier.expect(share_of(recorder, *namespace_id), count);
    }
    tier.victims(victims_);
    withdraw_victims(recorder, tier, EvictReason::kCapacity);
    // By that very eviction: a slot whose withdrawal nobody hears of must not be written
    if (recorder.is_closed(tier.tier())) {
      return std::nullopt;
    }
  }
  if (taken_.size() < count) {
    taken_.resize(count);
  }
  const auto taken = std::span(taken_).first(count);
  const std::uint64_t after = tier.take(taken);
  return Allocation{packed(taken), is_durable(tier.tier()) ? after : 0};
}

void SlotAllocator::withdraw_own(Recorder& recorder, TierSlots& tier, std::uint32_t share, std::size_t count) {
  recorder.fold().check_open(kEvicted);  // before the policy has given up anything
  victims_.resize(count);
  tier.victims_of(share, victims_);
  withdraw_victims(recorder, tier, EvictReason::kQuota);
}

// Withdraws what was given up; where memory runs out meanwhile, what is held still may be evicted again.
void SlotAllocator::withdraw_victims(Recorder& recorder, TierSlots& tier, EvictReason reason) {
  try {
    withdraw(recorder, tier, victims_, reason);
  } catch (...) {
    for (std::size_t at = victims_.size(); at-- > 0;) {
      if (tier.is_held(victims_[at])) {
        tier.spare(victims_[at]);
      }
    }
    throw;
  }
}

void SlotAllocator::withdraw(Recorder& recorder, TierSlots& tier, std::span<const std::uint32_t> slots,
                             EvictReason reason) {
  for (std::size_t begin = 0, end = 0; begin < slots.size(); begin = end) {
    const std::uint32_t namespace_index = tier.owner_of(slots[begin]);
    run_hashes_.clear();
    while (end < slots.size() && end - begin < kMaxRunBlocks && tier.owner_of(slots[end]) == namespace_index) {
      const std::uint8_t* const hash = tier.hash_of(slots[end++]);
      tier.prefetch(tier.tag(hash));
      append(run_hashes_, hash);
    }
    const Event event = BlocksEvicted{.namespace_id = recorder.fold().namespaces()[namespace_index],
                                      .tier = tier.tier(),
                                      .reason = reason,
                                      .hashes = run_hashes_};
    const std::size_t bytes = recorder.admit(event);
    recorder.record<BlocksEvicted>(
        event, bytes, namespace_index,
        [&](const TierSlots&, std::size_t at, const std::uint8_t*, std::uint64_t) { return slots[begin + at]; });
  }
}

}  // namespace kvbm
