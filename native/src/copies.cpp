#include "kvbm/copies.hpp"

#include <algorithm>
#include <limits>
#include <string_view>

namespace kvbm {
namespace {

// The tier a copy reads from, when it has slots of ours.
TierSlots* source_of(const Recorder& recorder, const Copy& copy) noexcept {
  const auto* const source = std::get_if<Tier>(&copy.source);
  return source != nullptr ? recorder.fold().table(*source) : nullptr;
}

void unpin_run(TierSlots& tier, std::span<const std::uint32_t> slots) {
  for (std::size_t at = slots.size(); at-- > 0;) {
    if (tier.slot(slots[at]).pins == 0) {  // the caller took back a pin that was the copy's
      throw slot_error(tier.tier(), slots[at], "is not pinned, so it cannot be unpinned");
    }
    tier.unpin(slots[at]);
  }
}

// Records the arrival of blocks that the target does not hold. slots: empty for a target without slots. arrived: gets
// how many are recorded, also where memory runs out meanwhile.
void migrate(Recorder& recorder, const Copy& copy, Bytes hashes, std::span<const std::uint32_t> slots, bool kept,
             MigrateCause cause, std::size_t& arrived) {
  const std::size_t count = hashes.size() / kHashBytes;
  while (arrived < count) {
    const std::size_t begin = arrived;
    const std::size_t end = std::min(count, begin + kMaxRunBlocks);
    BlocksMigrated moved{.namespace_id = copy.namespace_id,
                         .source = Tier::kHbm,
                         .target = copy.target,
                         .kept = kept,
                         .cause = cause,
                         .hashes = blocks_of(hashes, begin, end),
                         .slots = {}};
    if (const auto* const instance = std::get_if<std::string>(&copy.source)) {
      moved.source = std::string_view(*instance);
    } else {
      moved.source = std::get<Tier>(copy.source);
    }
    if (!slots.empty()) {
      moved.slots = packed(slots.subspan(begin, end - begin));
    }
    const Event event = moved;
    const std::size_t bytes = recorder.admit(event);
    recorder.fold().check_source(moved);  // of the target, the caller has seen that it does not hold them
    recorder.record<BlocksMigrated>(event, bytes, recorder.fold().namespaces().intern(copy.namespace_id));
    arrived = end;
  }
}

}  // namespace

std::optional<std::pair<std::uint64_t, const Copy*>> Copies::begin(Recorder& recorder, SlotAllocator& allocator,
                                                                   const NamespaceId& namespace_id, CopySource source,
                                                                   Tier target, Bytes hashes) {
  if (recorder.is_closed(target)) {
    return std::nullopt;
  }
  hash_count(hashes);
  Copy chosen{.namespace_id = namespace_id,
              .source = std::move(source),
              .target = target,
              .hashes = {},
              .source_slots = {},
              .target_slots = {}};
  TierSlots* const from = source_of(recorder, chosen);
  TierSlots* const into = recorder.fold().table(target);
  if (into == nullptr && !recorder.fold().is_cluster(target)) {
    throw ledger_error("this instance has no " + tier_name(target) + " pool with slots");
  }
  std::size_t room = into != nullptr ? into->room() : std::numeric_limits<std::size_t>::max();
  std::uint32_t share = 0;
  // Blocks that may come before the tenant's own give way
  std::int64_t within_quota = std::numeric_limits<std::int64_t>::max();
  if (into != nullptr && !allocator.shares().empty()) {
    share = allocator.share_of(recorder, namespace_id);
    within_quota = allocator.quota_left(*into, share, arriving(recorder, allocator, target, share));
    const std::int64_t most = within_quota + static_cast<std::int64_t>(into->counts_of(share).evictable);
    room = std::min(room, static_cast<std::size_t>(std::max<std::int64_t>(0, most)));
  }
  choose(recorder, chosen, hashes, room);
  const std::size_t count = chosen.hashes.size() / kHashBytes;
  if (count == 0) {
    return std::nullopt;
  }
  chosen.target_slots.reserve(into != nullptr ? count : 0);
  chosen.epoch = recorder.fold().epoch().bits();
  // Before it has pins and slots, which somebody must end
  const auto begun = copies_.emplace(next_, std::move(chosen)).first;
  Copy& copy = begun->second;
  for (const std::uint32_t slot : copy.source_slots) {
    from->pin(slot);
  }
  bool has_room = true;
  try {
    if (into != nullptr) {
      if (static_cast<std::int64_t>(count) > within_quota) {
        allocator.withdraw_own(recorder, *into, share,
                               static_cast<std::size_t>(static_cast<std::int64_t>(count) - within_quota));
      }
      const auto allocation = allocator.allocate(recorder, *into, count, &namespace_id);
      has_room = allocation.has_value();  // the room was counted; making it may be an overflow
      for (std::size_t at = 0; has_room && at < count; ++at) {
        copy.target_slots.push_back(slot_at(allocation->slots, at));
        into->receive(copy.target_slots.back(), hash_at(copy.hashes, at));
      }
      copy.after = has_room ? allocation->after : 0;
    }
  } catch (...) {
    if (from != nullptr) {
      unpin_run(*from, copy.source_slots);
    }
    copies_.erase(begun);
    throw;
  }
  if (!has_room) {
    if (from != nullptr) {
      unpin_run(*from, copy.source_slots);
    }
    copies_.erase(begun);
    return std::nullopt;
  }
  return std::pair(next_++, &copy);
}

// Gives a copy those blocks, `most` at most, that its source has under its namespace and its target neither has nor
// awaits.
void Copies::choose(Recorder& recorder, Copy& copy, Bytes hashes, std::size_t most) {
  const TierSlots* const from = source_of(recorder, copy);
  const TierSlots* const into = recorder.fold().table(copy.target);
  const Bytes blocks = distinct_.of(hashes);
  for (std::size_t at = 0; at < blocks.size() / kHashBytes && copy.hashes.size() / kHashBytes < most; ++at) {
    const std::uint8_t* const hash = hash_at(blocks, at);
    const std::uint32_t slot = from != nullptr ? from->find(hash) : kNoSlot;
    if (from != nullptr &&
        (slot == kNoSlot || recorder.fold().namespaces()[from->owner_of(slot)] != copy.namespace_id)) {
      continue;
    }
    if (into != nullptr && (into->find(hash) != kNoSlot || into->is_arriving(hash))) {
      continue;
    }
    append(copy.hashes, hash);
    if (from != nullptr) {
      copy.source_slots.push_back(slot);
    }
  }
}

// Blocks of a share on their way to a tier.
std::size_t Copies::arriving(Recorder& recorder, const SlotAllocator& allocator, Tier target,
                             std::uint32_t share) const {
  std::size_t count = 0;
  for (const auto& [id, copy] : copies_) {
    if (copy.target == target && allocator.share_of(recorder, copy.namespace_id) == share) {
      count += copy.target_slots.size();
    }
  }
  return count;
}

std::size_t Copies::blocks(std::uint64_t id) const {
  const auto found = copies_.find(id);
  if (found == copies_.end()) {
    throw Error::copy(id, "copy " + std::to_string(id) + " is not in flight");
  }
  return found->second.hashes.size() / kHashBytes;
}

std::span<const std::uint32_t> Copies::end(Recorder& recorder, std::uint64_t id, std::span<const std::uint8_t> arrived,
                                           MigrateCause cause, bool kept, bool pinned) {
  const std::size_t count = blocks(id);
  // All room is made while the copy can be ended once more.
  std::vector<std::uint8_t> good(count);  // what counts as arrived: looked up before the source withdraws it
  std::vector<std::uint8_t> fresh_hashes;
  std::vector<std::uint32_t> fresh;
  std::vector<std::uint32_t> known;
  fresh_hashes.reserve(count * kHashBytes);
  fresh.reserve(count);
  known.reserve(count);
  holders_.assign(count, kNoSlot);
  const auto node = copies_.extract(id);
  const Copy& copy = node.mapped();
  TierSlots* const from = source_of(recorder, copy);
  TierSlots* const into = recorder.fold().table(copy.target);
  const std::uint32_t owner = recorder.fold().namespaces().find(copy.namespace_id);
  const auto is_of = [owner](const TierSlots& tier, std::uint32_t slot) { return tier.owner_of(slot) == owner; };
  for (std::size_t at = 0; at < count; ++at) {
    const std::uint32_t source = from != nullptr ? from->find(hash_at(copy.hashes, at)) : kNoSlot;
    const std::uint32_t target = into != nullptr ? into->find(hash_at(copy.hashes, at)) : kNoSlot;
    const bool is_at_source = from == nullptr || (source != kNoSlot && is_of(*from, source));
    const bool may_be_at_target = target == kNoSlot || is_of(*into, target);
    good[at] = arrived[at] != 0 && is_at_source && may_be_at_target ? 1 : 0;
  }
  for (const std::uint32_t slot : copy.target_slots) {
    into->end_receiving(slot);
  }
  for (std::size_t at = 0; at < count; ++at) {
    const std::uint8_t* const hash = hash_at(copy.hashes, at);
    const std::uint32_t holder = into != nullptr ? into->find(hash) : kNoSlot;
    if (good[at] != 0 && holder == kNoSlot) {
      append(fresh_hashes, hash);
      if (into != nullptr) {
        fresh.push_back(copy.target_slots[at]);
      }
      continue;
    }
    if (into != nullptr) {
      into->give_back(copy.target_slots[at]);
    }
    if (good[at] != 0) {
      known.push_back(holder);
    }
  }
  std::size_t gained = 0;
  try {
    migrate(recorder, copy, fresh_hashes, fresh, kept, cause, gained);
  } catch (...) {
    for (std::size_t at = fresh.size(); at-- > 0;) {
      if (at < gained) {
        into->enter(fresh[at], false);
      } else {
        into->give_back(fresh[at]);
      }
    }
    if (from != nullptr) {
      unpin_run(*from, copy.source_slots);
    }
    throw;
  }
  if (from != nullptr) {
    unpin_run(*from, copy.source_slots);
  }
  if (into == nullptr) {
    return holders_;
  }
  for (std::size_t at = 0; at < count; ++at) {
    if (good[at] != 0) {
      holders_[at] = into->find(hash_at(copy.hashes, at));
    }
  }
  for (std::size_t at = fresh.size(); at-- > 0;) {
    into->enter(fresh[at], pinned);
  }
  if (pinned) {
    for (const std::uint32_t slot : known) {
      into->pin(slot);
    }
  }
  return holders_;
}

}  // namespace kvbm
