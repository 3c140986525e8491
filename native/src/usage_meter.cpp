#include "kvbm/usage_meter.hpp"

#include <algorithm>
#include <optional>
#include <variant>

namespace kvbm {

void UsageMeter::take(Bytes data, std::size_t at) {
  FrameReader reader(data, at);
  advance(reader.header().wall_time_ns / 1'000'000);
  while (const std::optional<Event> event = reader.next()) {
    take(*event);
  }
}

std::vector<NamespaceUsage> UsageMeter::cut(std::uint64_t until_ms) {
  advance(until_ms);
  std::vector<NamespaceUsage> made;
  for (Entry& entry : entries_) {
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      settle(entry, tier);
    }
    if (entry.used.block_ms != TierNumbers{} || entry.used.put_blocks != TierNumbers{}) {
      made.push_back(entry.used);
      entry.used.block_ms = entry.used.put_blocks = {};
    }
  }
  std::ranges::sort(made, {}, &NamespaceUsage::id);
  return made;
}

void UsageMeter::advance(std::uint64_t now_ms) noexcept {
  if (last_ms_ != 0 && now_ms > last_ms_ && now_ms - last_ms_ <= kLongestStepMs) {
    passed_ms_ += now_ms - last_ms_;
  }
  last_ms_ = now_ms;
}

void UsageMeter::settle(Entry& entry, std::size_t tier) const noexcept {
  entry.used.block_ms[tier] += entry.held[tier] * (passed_ms_ - entry.settled[tier]);
  entry.settled[tier] = passed_ms_;
}

void UsageMeter::gain(Entry& entry, Tier tier, std::uint64_t blocks) const noexcept {
  if (!clusters_[number(tier)]) {
    settle(entry, number(tier));
    entry.held[number(tier)] += blocks;
  }
}

void UsageMeter::lose(Entry& entry, Tier tier, std::uint64_t blocks) const noexcept {
  if (!clusters_[number(tier)]) {
    settle(entry, number(tier));
    entry.held[number(tier)] -= std::min(blocks, entry.held[number(tier)]);
  }
}

UsageMeter::Entry& UsageMeter::entry_of(const NamespaceId& id) {
  const std::uint32_t row = rows_.intern(id);
  if (row == entries_.size()) {
    entries_.emplace_back().used.id = id;
  }
  return entries_[row];
}

void UsageMeter::take(const Event& event) {
  if (const auto* const created = std::get_if<BlocksCreated>(&event)) {
    const std::uint64_t blocks = created->hashes.size() / kHashBytes;
    Entry& entry = entry_of(created->namespace_id);
    gain(entry, created->tier, blocks);
    entry.used.put_blocks[number(created->tier)] += blocks;
  } else if (const auto* const migrated = std::get_if<BlocksMigrated>(&event)) {
    const std::uint64_t blocks = migrated->hashes.size() / kHashBytes;
    Entry& entry = entry_of(migrated->namespace_id);
    const auto* const source = std::get_if<Tier>(&migrated->source);
    gain(entry, migrated->target, blocks);
    if (source != nullptr && !migrated->kept) {
      lose(entry, *source, blocks);
    }
    if (migrated->cause == MigrateCause::kOffload) {
      entry.used.put_blocks[number(migrated->target)] += blocks;
    }
  } else if (const auto* const evicted = std::get_if<BlocksEvicted>(&event)) {
    lose(entry_of(evicted->namespace_id), evicted->tier, evicted->hashes.size() / kHashBytes);
  } else if (const auto* const listed = std::get_if<ResidenciesListed>(&event); listed != nullptr) {
    if (listed->snapshot == 1) {  // with which an epoch begins; later ones list what is held
      gain(entry_of(listed->namespace_id), listed->tier, listed->hashes.size() / kHashBytes);
    }
  } else if (std::holds_alternative<InstanceStarted>(event)) {
    for (Entry& entry : entries_) {
      for (std::size_t tier = 0; tier < kTierCount; ++tier) {
        settle(entry, tier);
        entry.held[tier] = 0;
      }
    }
  }
}

}  // namespace kvbm
