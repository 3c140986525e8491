// What a cluster index does a little at a time beside its frames: dead holder ids are swept out, the table is audited,
// and numbers that nobody uses are freed.
#include <algorithm>
#include <bit>

#include "kvbm/cluster_index.hpp"

namespace kvbm {

// -- sweeping ---------------------------------------------------------------------------------------------------------

bool ClusterIndex::needs_sweep() const {
  const std::lock_guard turn(writer_);
  return has_pass_ || !dead_holder_spaces_.empty() || !dead_generations_.empty();
}

bool ClusterIndex::sweep(std::size_t pages) {
  for (; pages > 0; --pages) {
    const std::lock_guard turn(writer_);  // let go after every page, so that frames are applied in between
    if (!has_pass_) {
      if (dead_holder_spaces_.empty() && dead_generations_.empty()) {
        return false;
      }
      begin_pass();
    }
    if (pass_moves_ != table_.moves(pass_shard_)) {
      pass_moves_ = table_.moves(pass_shard_);
      pass_page_ = 0;
    }
    if (pass_page_ < table_.page_count(pass_shard_)) {
      const WriteGuard change(lock_);
      sweep_page(pass_shard_, pass_page_++);
      continue;
    }
    {
      const WriteGuard change(lock_);
      table_.shrink(pass_shard_);
    }
    pass_page_ = 0;
    if (++pass_shard_ == BlockTable::kShards) {
      end_pass();
    } else {
      pass_moves_ = table_.moves(pass_shard_);
    }
  }
  const std::lock_guard turn(writer_);
  return has_pass_ || !dead_holder_spaces_.empty() || !dead_generations_.empty();
}

void ClusterIndex::begin_pass() {
  has_pass_ = true;
  ++pass_;
  pass_shard_ = pass_page_ = 0;
  pass_moves_ = table_.moves(0);
  pass_holder_spaces_.swap(dead_holder_spaces_);
  pass_generations_.swap(dead_generations_);
}

void ClusterIndex::end_pass() {
  const WriteGuard change(lock_);
  has_pass_ = false;
  free_holder_spaces_.insert(free_holder_spaces_.end(), pass_holder_spaces_.begin(), pass_holder_spaces_.end());
  for (const DeadGeneration& dead : pass_generations_) {
    Instance& instance = instances_[dead.instance];
    if (instance.incarnation == dead.incarnation) {
      TierFold& fold = instance.tiers[at_tier(dead.tier)];
      fold.dirty = static_cast<std::uint8_t>(fold.dirty & ~(1U << dead.generation));
    }
  }
  pass_holder_spaces_.clear();
  pass_generations_.clear();
}

void ClusterIndex::sweep_page(std::size_t shard, std::size_t page) {
  table_.update_page(shard, page, [this](BlockKey, HolderValue value) { return cleaned(value); });
}

HolderValue ClusterIndex::cleaned(HolderValue value) {
  if ((value & kSetBit) == 0) {
    return is_live(value) ? value : 0;
  }
  const std::uint32_t number = value & ~kSetBit;
  if (number >= clean_in_.size()) {
    clean_in_.resize(std::size_t{number} + 1024, 0);
  }
  if (clean_in_[number] == pass_) {
    return value;
  }
  const auto holder_ids = sets_.holder_ids(value);
  if (std::all_of(holder_ids.begin(), holder_ids.end(), [this](HolderId holder_id) { return is_live(holder_id); })) {
    clean_in_[number] = pass_;
    return value;
  }
  const HolderValue now = changed({value, 1, 0, 0});
  sets_.release(value);
  return now;
}

void ClusterIndex::sweep_all(std::uint32_t number, Tier tier) {
  // One generation after the other moves into the first old one: snapshots that were begun and given up left them.
  TierFold& fold = instances_[number].tiers[at_tier(tier)];
  std::uint8_t target = kGenerations;
  for (std::uint8_t generation = 0; generation < kGenerations && target == kGenerations; ++generation) {
    if (generation != fold.generation && (fold.live >> generation & 1) != 0) {
      target = generation;
    }
  }
  // Finish what is under way, then one pass of our own over everything that has died by now.
  for (int passes = has_pass_ ? 2 : 1; passes > 0; --passes) {
    if (!has_pass_) {
      begin_pass();
    }
    for (; pass_shard_ < BlockTable::kShards; ++pass_shard_, pass_page_ = 0) {
      for (pass_page_ = 0; pass_page_ < table_.page_count(pass_shard_); ++pass_page_) {
        const WriteGuard change(lock_);
        table_.update_page(pass_shard_, pass_page_, [&](BlockKey, HolderValue value) {
          value = cleaned(value);
          if (value == 0 || target == kGenerations || passes > 1) {
            return value;
          }
          for (const std::uint32_t holder_space : instances_[number].holder_spaces) {
            for (const HolderId holder_id : sets_.ids_of_holder_space(value, holder_space)) {
              if (tier_of(holder_id) == tier && generation_of(holder_id) != fold.generation &&
                  generation_of(holder_id) != target) {
                const HolderValue now =
                    changed({value, holder_id, holder_id, holder_id_of(holder_space, tier, target)});
                sets_.release(value);
                return now;
              }
            }
          }
          return value;
        });
      }
    }
    end_pass();
  }
  const WriteGuard change(lock_);
  for (std::uint8_t generation = 0; generation < kGenerations; ++generation) {
    if (generation != fold.generation && generation != target && (fold.live >> generation & 1) != 0) {
      fold.counts[target] += std::exchange(fold.counts[generation], 0);
      fold.digests[target] += std::exchange(fold.digests[generation], 0);
      fold.audited[target] += std::exchange(fold.audited[generation], 0);
      retire(number, tier, generation);
    }
  }
}

// -- auditing ---------------------------------------------------------------------------------------------------------

AuditPart ClusterIndex::audit(std::size_t pages) {
  AuditPart part;
  for (; pages > 0 && !part.is_whole; --pages) {
    const std::lock_guard turn(writer_);            // only writers change what is read here; let go after every stretch
    if (audited_before_ == BlockTable::kRankEnd) {  // the table was seen whole
      if (!free_some()) {
        end_audit(part);
      }
      continue;
    }
    if (audited_before_ == 0) {
      begin_audit();
    }
    std::vector<std::pair<BlockKey, std::uint64_t>> damaged;
    audited_before_ =
        table_.visit_ranks(audited_before_, [&](BlockKey key, std::uint64_t place, const HolderValue& value) {
          ++audited_blocks_;
          if ((value & kSetBit) != 0 ? !sets_.has(value) : kvbm::holder_space_of(value) >= holder_spaces_.size()) {
            damaged.emplace_back(key, place);
            return;
          }
          for (const HolderId holder_id : sets_.holder_ids(value)) {
            const HolderSpace& holder_space = holder_spaces_[kvbm::holder_space_of(holder_id)];
            note_use(kvbm::holder_space_of(holder_id));
            if (holder_space.is_pool == 0 && is_live(holder_id)) {
              const BlockKey& salt = spaces_[holder_space.space].salt;
              const std::array<std::uint64_t, 2> hash{key.low ^ salt.low, key.high ^ salt.high};
              instances_[holder_space.holder].tiers[at_tier(tier_of(holder_id))].audited[generation_of(holder_id)] +=
                  residency_mix(tier_of(holder_id), reinterpret_cast<const std::uint8_t*>(hash.data()));
            }
          }
        });
    // Whoever looked these up would follow them out of bounds. Taken out they are missing, which a snapshot heals.
    if (!damaged.empty()) {
      const WriteGuard change(lock_);
      for (const auto& [key, place] : damaged) {
        table_.erase(key, place);
      }
      audited_damaged_ += damaged.size();
    }
  }
  return part;
}

void ClusterIndex::begin_audit() {
  audited_blocks_ = audited_damaged_ = 0;
  used_.assign(holder_spaces_.size(), 0);
  unused_at_ = 1;  // 0 is nobody's
  unused_space_at_ = unused_pool_at_ = 0;
  last_instance_ = kNone;  // so that whoever goes on with a namespace is seen to use it
  for (Instance& instance : instances_) {
    for (TierFold& fold : instance.tiers) {
      fold.audited.fill(0);
    }
  }
}

void ClusterIndex::end_audit(AuditPart& part) {
  part.is_whole = true;
  part.blocks = audited_blocks_;
  part.damaged = audited_damaged_;
  for (std::size_t number = 0; number < instances_.size(); ++number) {
    const Instance& instance = instances_[number];
    if (std::any_of(instance.tiers.begin(), instance.tiers.end(),
                    [](const TierFold& fold) { return fold.audited != fold.digests; })) {
      part.differing.push_back(static_cast<std::uint32_t>(number));
    }
  }
  audited_before_ = 0;
}

// -- what nobody uses -------------------------------------------------------------------------------------------------

bool ClusterIndex::free_some() {
  const std::size_t spaces = checkpoints_ == 0 ? spaces_.size() : 0;  // a checkpoint under way names them by number
  const std::size_t pools = checkpoints_ == 0 ? pools_.size() : 0;    // the same
  if (unused_at_ < used_.size()) {
    const WriteGuard change(lock_);
    last_instance_ = kNone;
    std::vector<std::uint32_t> owners;
    owners.reserve(kFreedAtOnce);
    free_holder_spaces_.reserve(holder_spaces_.size());
    for (const std::size_t end = std::min(unused_at_ + kFreedAtOnce, used_.size()); unused_at_ < end; ++unused_at_) {
      if (used_[unused_at_] == 0) {
        free_holder_space(static_cast<std::uint32_t>(unused_at_), owners);
      }
    }
    std::sort(owners.begin(), owners.end());
    owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
    for (const std::uint32_t owner : owners) {
      std::erase_if(instances_[owner].holder_spaces,
                    [this](std::uint32_t number) { return holder_spaces_[number].live == 0; });
    }
  } else if (unused_space_at_ < spaces) {
    const WriteGuard change(lock_);
    last_instance_ = kNone;
    for (const std::size_t end = std::min(unused_space_at_ + kFreedAtOnce, spaces); unused_space_at_ < end;
         ++unused_space_at_) {
      free_space(static_cast<std::uint32_t>(unused_space_at_));
    }
  } else if (unused_pool_at_ < pools) {
    const WriteGuard change(lock_);
    for (const std::size_t end = std::min(unused_pool_at_ + kFreedAtOnce, pools); unused_pool_at_ < end;
         ++unused_pool_at_) {
      free_pool(static_cast<std::uint32_t>(unused_pool_at_));
    }
  } else {
    free_pools_.insert(free_pools_.end(), rested_pools_.begin(), rested_pools_.end());
    rested_pools_.swap(left_pools_);
    left_pools_.clear();
    used_ = {};
    return false;
  }
  return true;
}

void ClusterIndex::free_holder_space(std::uint32_t number, std::vector<std::uint32_t>& owners) {
  HolderSpace& there = holder_spaces_[number];
  const auto known = holder_space_numbers_.find((there.is_pool != 0 ? kPoolKind : 0) |
                                                std::uint64_t{there.holder} << 32 | there.space);
  if (known == holder_space_numbers_.end() || known->second != number) {
    return;  // it is free, or the sweep's
  }
  if (there.is_pool != 0) {
    std::erase(spaces_[there.space].pool_holder_spaces, number);
    --pools_[there.holder].holder_spaces;
  } else {
    owners.push_back(there.holder);
  }
  holder_space_numbers_.erase(known);
  --spaces_[there.space].holder_spaces;
  there.live = there.visible = 0;
  free_holder_spaces_.push_back(number);
}

void ClusterIndex::free_space(std::uint32_t number) {
  Namespace& space = spaces_[number];
  if (space.holder_spaces != 0 || space.is_free) {
    return;
  }
  if (space.maker != kNone && instances_[space.maker].drops == space.maker_drops) {
    --instances_[space.maker].made_spaces;
  }
  space_numbers_.erase(space.id);
  space = {.id = random_id(), .salt = {}, .pool_holder_spaces = {}, .is_free = true};
  free_spaces_.push_back(number);
}

void ClusterIndex::free_pool(std::uint32_t number) {
  Pool& pool = pools_[number];
  if (pool.claims != 0 || pool.holder_spaces != 0 || pool.named != 0 || pool.is_free) {
    return;
  }
  if (pool.maker != kNone && instances_[pool.maker].drops == pool.maker_drops) {
    --instances_[pool.maker].made_pools;
  }
  pool_numbers_.erase(pool.name);
  // An answer may name it still: its name stays until its number is another's, which is a pass later
  pool.is_free = true;
  left_pools_.push_back(number);
}

}  // namespace kvbm
