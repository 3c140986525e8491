// Prefix queries of ClusterIndex. A prefix is walked once for everybody: neighbouring blocks mostly have the same
// holders, and then the next block is one comparison. Buckets are asked for ahead. Beside them is what routing asks of
// instances.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#include "kvbm/cluster_index.hpp"

namespace kvbm {

// One walk along a prefix, under the read lock. Exact with holes: nobody is followed beyond the first block they lack.
class PrefixWalk {
 public:
  PrefixWalk(const ClusterIndex& index, std::uint32_t space, Bytes hashes, std::size_t best,
             const std::vector<std::uint32_t>* only, Told told, Tier hottest, PrefixAnswer& answer)
      : index_(index),
        space_(space),
        salt_(index.spaces_[space].salt),
        hashes_(hashes),
        best_(best),
        only_(only),
        told_(told),
        counted_(kAllTiers << static_cast<unsigned>(hottest) & kAllTiers),
        answer_(answer),
        work_(scratch()) {
    work_.alive.clear();
    work_.named.clear();
    work_.stretches.clear();
  }

  void run() {
    const auto count = static_cast<std::uint32_t>(hashes_.size() / kHashBytes);
    HolderValue current = 0;
    std::uint32_t begin = 0;
    std::uint32_t at = 0;
    bool goes_on = true;
    // Three hands along the prefix: one asks for a block's first bucket, one looks into it a while later, one walks
    // behind them. So memory is asked for at an even pace while the rest is computed.
    std::uint32_t asked = 0;
    std::uint32_t looked = 0;
    while (goes_on && at < count) {
      for (const std::uint32_t end = std::min(count, at + kLookAhead + kAskAhead); asked < end; ++asked) {
        ask(asked);
      }
      for (const std::uint32_t end = std::min(count, at + kLookAhead); looked < end; ++looked) {
        look(looked);
      }
      const HolderValue here = finish_looking(at);
      if (here != current || at == 0) {
        if (at != 0) {
          end_run(current, begin, at);
        }
        current = here;
        begin = at;
        goes_on = begin_run(here, at);
      }
      at += goes_on ? 1 : 0;
    }
    if (goes_on && at > begin) {
      end_run(current, begin, at);
    }
    finish(goes_on ? at : begin);
  }

 private:
  static constexpr std::uint32_t kAskAhead = 20;   // blocks between the first hand and the second
  static constexpr std::uint32_t kLookAhead = 12;  // and between the second and the one that walks
  static constexpr std::uint32_t kHands = 64;      // more than all of these, a power of two
  static constexpr unsigned kAllTiers = (1U << kTierCount) - 1;

  // A block that is looked for.
  struct Sought {
    BlockKey key;               // it
    std::uint64_t place;        // where it belongs
    BlockTable::Search search;  // how far the search is
    HolderValue value;          // who holds it
    bool is_over;               // whether that is known
  };

  // An instance that has every block so far.
  struct Alive {
    std::uint32_t holder_space;                     // it, in this namespace
    std::array<std::uint32_t, kTierCount> by_tier;  // its blocks so far
  };

  // Consecutive blocks that a cluster pool has.
  struct Stretch {
    std::uint32_t holder_space;  // the pool, in this namespace
    std::uint32_t begin;         // first block
    std::uint32_t end;           // behind the last
  };

  // Kept by each thread, so that walking allocates nothing.
  struct Scratch {
    std::vector<Alive> alive;          // who has every block, once the holders have changed
    std::vector<std::uint32_t> named;  // holder spaces of those who were alive after the first change, in order
    std::vector<Stretch> stretches;    // of all pools
    std::vector<std::uint32_t> told;   // instances in the answer, sorted
  };

  static Scratch& scratch() {
    thread_local Scratch mine;
    return mine;
  }

  void ask(std::uint32_t at) {
    Sought& sought = found_[at % kHands];
    std::memcpy(&sought.key, hashes_.data() + std::size_t{at} * kHashBytes, sizeof sought.key);
    sought.key.low ^= salt_.low;
    sought.key.high ^= salt_.high;
    sought.place = index_.table_.place(sought.key);
    sought.search = index_.table_.begin_search(sought.place);
  }

  void look(std::uint32_t at) {
    Sought& sought = found_[at % kHands];
    sought.is_over = index_.table_.step_search(sought.search, sought.key, sought.place, sought.value);
  }

  HolderValue finish_looking(std::uint32_t at) {
    Sought& sought = found_[at % kHands];
    while (!sought.is_over) {
      sought.is_over = index_.table_.step_search(sought.search, sought.key, sought.place, sought.value);
    }
    return sought.value;
  }

  // The tiers in which an instance is among the holders, of those that count.
  unsigned counted_tiers_of(const HolderValue& value, std::uint32_t holder_space) const noexcept {
    return tiers_of(value, holder_space) & counted_;
  }

  // The tiers in which a holder space is among the holders: bit t for tier t.
  unsigned tiers_of(const HolderValue& value, std::uint32_t holder_space) const noexcept {
    unsigned tiers = 0;
    for (const HolderId holder_id : index_.sets_.ids_of_holder_space(value, holder_space)) {
      tiers |= index_.is_visible(holder_id) ? 1U << (holder_id >> 2 & 3) : 0;
    }
    return tiers;
  }

  // Calls visit(holder space, tiers) for every instance among the holders, until it returns false.
  template <class Visit>
  void for_instances(const HolderValue& value, Visit&& visit) const {
    const auto holder_ids = index_.sets_.holder_ids(value);
    for (std::size_t at = 0; at < holder_ids.size();) {
      const std::uint32_t holder_space = kvbm::holder_space_of(holder_ids[at]);
      unsigned tiers = 0;
      for (; at < holder_ids.size() && kvbm::holder_space_of(holder_ids[at]) == holder_space; ++at) {
        tiers |= index_.is_visible(holder_ids[at]) ? 1U << (holder_ids[at] >> 2 & 3) : 0;
      }
      tiers &= counted_;
      if (tiers != 0 && !index_.holder_spaces_[holder_space].is_pool && !visit(holder_space, tiers)) {
        return;
      }
    }
  }

  bool has_instance(const HolderValue& value) const {
    bool found = false;
    for_instances(value, [&found](std::uint32_t, unsigned) {
      found = true;
      return false;
    });
    return found;
  }

  // The holders from block `at` on. Whether anybody's run can go on.
  bool begin_run(HolderValue value, std::uint32_t at) {
    if (at == 0) {
      first_ = value;
      is_alive_ = is_all_of_first_ = has_instance(value);
    } else if (is_all_of_first_) {
      leave_first(value, at);
    } else if (is_alive_) {
      keep_alive(value, at);
    }
    bool has_pool = false;
    for (const std::uint32_t holder_space : index_.spaces_[space_].pool_holder_spaces) {
      has_pool = has_pool || tiers_of(value, holder_space) != 0;
    }
    return is_alive_ || has_pool;
  }

  void end_run(HolderValue value, std::uint32_t begin, std::uint32_t end) {
    for (const std::uint32_t holder_space : index_.spaces_[space_].pool_holder_spaces) {
      if (tiers_of(value, holder_space) == 0) {
        continue;
      }
      const auto known =
          std::find_if(work_.stretches.rbegin(), work_.stretches.rend(),
                       [holder_space](const Stretch& stretch) { return stretch.holder_space == holder_space; });
      if (known != work_.stretches.rend() && known->end == begin) {
        known->end = end;
      } else {
        work_.stretches.push_back({holder_space, begin, end});
      }
    }
    for (Alive& one : work_.alive) {
      one.by_tier[hottest(counted_tiers_of(value, one.holder_space))] += end - begin;
    }
  }

  static std::size_t hottest(unsigned tiers) noexcept { return static_cast<std::size_t>(std::countr_zero(tiers)); }

  // The holders change for the first time: whoever is among both goes on by name. The rest stays unnamed until it is
  // asked for.
  void leave_first(HolderValue value, std::uint32_t at) {
    is_all_of_first_ = false;
    first_end_ = at;
    const bool is_smaller = index_.sets_.holder_ids(value).size() < index_.sets_.holder_ids(first_).size();
    const HolderValue fewer = is_smaller ? value : first_;
    const HolderValue others = is_smaller ? first_ : value;
    for_instances(fewer, [&](std::uint32_t holder_space, unsigned tiers) {
      const unsigned tiers_there = counted_tiers_of(others, holder_space);
      if (tiers_there != 0) {
        Alive one{holder_space, {}};
        one.by_tier[hottest(is_smaller ? tiers_there : tiers)] = at;
        work_.alive.push_back(one);
        work_.named.push_back(holder_space);
      }
      return true;
    });
    is_alive_ = !work_.alive.empty();
  }

  void keep_alive(HolderValue value, std::uint32_t at) {
    std::size_t kept = 0;
    for (const Alive& one : work_.alive) {
      if (counted_tiers_of(value, one.holder_space) != 0) {
        work_.alive[kept++] = one;
      } else {
        tell(one.holder_space, at, one.by_tier);
      }
    }
    work_.alive.resize(kept);
    is_alive_ = kept != 0;
  }

  void tell(std::uint32_t holder_space, std::uint32_t depth, const std::array<std::uint32_t, kTierCount>& by_tier) {
    const ClusterIndex::HolderSpace& space = index_.holder_spaces_[holder_space];
    if (is_wanted(space.holder)) {
      answer_.instances.push_back({space.holder, space.incarnation, depth, by_tier, depth, queued(space.holder),
                                   index_.instances_[space.holder].rank, false});
    }
  }

  bool is_wanted(std::uint32_t number) const {
    return only_ == nullptr || std::binary_search(only_->begin(), only_->end(), number);
  }

  std::uint32_t queued(std::uint32_t number) const {
    if (best_ == 0) {
      return 0;  // nothing is put in order by it
    }
    return std::atomic_ref<std::uint32_t>(index_.instances_[number].queued).load(std::memory_order_relaxed);
  }

  // Where a run of `depth` blocks ends when the instance's cluster pools go on with it.
  std::uint32_t reach(const ClusterIndex::Instance& instance, std::uint32_t depth) const noexcept {
    bool goes_on = !work_.stretches.empty();
    while (goes_on) {
      goes_on = false;
      for (const Stretch& stretch : work_.stretches) {
        if (stretch.begin <= depth && depth < stretch.end &&
            uses(instance, index_.holder_spaces_[stretch.holder_space].holder)) {
          depth = stretch.end;
          goes_on = true;
        }
      }
    }
    return depth;
  }

  static bool uses(const ClusterIndex::Instance& instance, std::uint32_t pool) noexcept {
    return std::any_of(instance.tiers.begin(), instance.tiers.end(),
                       [pool](const ClusterIndex::TierFold& fold) { return fold.pool == pool; });
  }

  bool wants_more() const noexcept { return best_ == 0 || answer_.instances.size() < best_; }

  // Everybody who has not been told of yet. `end`: blocks that were walked.
  void finish(std::uint32_t end) {
    for (const Alive& one : work_.alive) {
      tell(one.holder_space, end, one.by_tier);
    }
    tell_rest_of_first(is_all_of_first_ ? end : first_end_);
    keep_whole_objects();
    for (const Stretch& stretch : work_.stretches) {
      if (stretch.begin == 0) {
        answer_.pools.push_back({index_.holder_spaces_[stretch.holder_space].holder, stretch.end});
        answer_.deepest = std::max(answer_.deepest, stretch.end);
      }
    }
    order_pools();
    if (!work_.stretches.empty()) {  // not before: a pool's stretch may have gone on behind the end of a run
      for (InstanceDepth& one : answer_.instances) {
        one.reach = reach(index_.instances_[one.instance], one.depth);
      }
    }
    tell_who_only_reaches();
    for (const InstanceDepth& one : answer_.instances) {
      answer_.deepest = std::max(answer_.deepest, one.depth);
    }
    if (best_ != 0 && answer_.instances.size() > 1) {
      keep_best();
    }
    if (told_ == Told::kAll) {
      for (InstanceDepth& one : answer_.instances) {
        one.is_suspect = index_.is_suspect(index_.instances_[one.instance]);
      }
    }
  }

  // A pool's blocks are read by whole objects, which begin at multiples of their size: what is left at a stretch's ends
  // nobody can have.
  void keep_whole_objects() {
    std::size_t kept = 0;
    for (Stretch stretch : work_.stretches) {
      const std::uint32_t blocks = index_.object_blocks(index_.holder_spaces_[stretch.holder_space].holder, space_);
      if (const std::uint32_t over = stretch.begin % blocks; over != 0) {
        stretch.begin += blocks - over;
      }
      stretch.end -= stretch.end % blocks;
      if (stretch.begin < stretch.end) {
        work_.stretches[kept++] = stretch;
      }
    }
    work_.stretches.resize(kept);
  }

  // The deepest first, then by name: stretches come in the order of holder spaces, and a checkpoint is read in that of
  // a hash table.
  void order_pools() {
    std::sort(answer_.pools.begin(), answer_.pools.end(), [this](const PoolDepth& a, const PoolDepth& b) {
      return a.depth != b.depth ? a.depth > b.depth : index_.pools_[a.pool].name < index_.pools_[b.pool].name;
    });
  }

  void keep_best() {
    const auto better = [](const InstanceDepth& a, const InstanceDepth& b) {
      if (a.depth != b.depth) {
        return a.depth > b.depth;
      }
      if (a.reach != b.reach) {
        return a.reach > b.reach;
      }
      return a.queued != b.queued ? a.queued < b.queued : a.rank < b.rank;
    };
    const std::size_t kept = std::min(best_, answer_.instances.size());
    const auto end = answer_.instances.begin() + static_cast<std::ptrdiff_t>(kept);
    std::partial_sort(answer_.instances.begin(), end, answer_.instances.end(), better);
    answer_.more += static_cast<std::uint32_t>(
        std::count_if(end, answer_.instances.end(), [](const InstanceDepth& one) { return one.depth != 0; }));
    answer_.instances.erase(end, answer_.instances.end());
  }

  // Those who had the first blocks and not the next one. All others are deeper, so the best may be known without them.
  void tell_rest_of_first(std::uint32_t depth) {
    const bool is_enough = !wants_more();
    auto named = work_.named.cbegin();  // in order of the holder space, like the set
    for_instances(first_, [&](std::uint32_t holder_space, unsigned tiers) {
      if (named != work_.named.cend() && *named == holder_space) {
        ++named;
        return true;
      }
      std::array<std::uint32_t, kTierCount> by_tier{};
      if (is_enough) {
        answer_.more += is_wanted(index_.holder_spaces_[holder_space].holder) ? 1 : 0;
        return true;
      }
      by_tier[hottest(tiers)] = depth;
      tell(holder_space, depth, by_tier);
      return true;
    });
  }

  // Those who have not even the first block, while a pool of theirs has it.
  void tell_who_only_reaches() {
    if (answer_.pools.empty() || !wants_more()) {
      return;
    }
    work_.told.clear();
    for (const InstanceDepth& one : answer_.instances) {
      work_.told.push_back(one.instance);
    }
    std::sort(work_.told.begin(), work_.told.end());
    for (std::uint32_t number = 0; number < index_.instances_.size(); ++number) {
      const ClusterIndex::Instance& instance = index_.instances_[number];
      if (!instance.is_known || instance.is_excluded || !is_wanted(number) ||
          std::binary_search(work_.told.begin(), work_.told.end(), number)) {
        continue;
      }
      if (const std::uint32_t end = reach(instance, 0); end > 0) {
        answer_.instances.push_back({number, instance.incarnation, 0, {}, end, queued(number), instance.rank, false});
      }
    }
  }

  const ClusterIndex& index_;                     // what is asked
  const std::uint32_t space_;                     // in which namespace
  const BlockKey salt_;                           // of the namespace
  const Bytes hashes_;                            // the prefix
  const std::size_t best_;                        // how many instances are wanted, 0 for all
  const std::vector<std::uint32_t>* const only_;  // the instances to look at, sorted; none for all
  const Told told_;                               // of each
  const unsigned counted_;                        // tiers in which blocks of instances count: bit t for tier t
  PrefixAnswer& answer_;                          // what is found
  Scratch& work_;                                 // this thread's
  HolderValue first_ = 0;                         // the holders of the first blocks
  std::uint32_t first_end_ = 0;                   // where they change
  bool is_all_of_first_ = false;                  // they have not changed yet, and some are instances
  bool is_alive_ = false;                         // an instance has every block so far
  std::array<Sought, kHands> found_;              // the blocks under way
};

void ClusterIndex::prefixes(const NamespaceId& id, Bytes hashes, std::size_t best, PrefixAnswer& answer,
                            const std::vector<std::uint32_t>* only, Told told, Tier hottest) const {
  answer.instances.clear();
  answer.pools.clear();
  answer.deepest = answer.more = 0;
  const ReadGuard reading(lock_);
  const std::uint32_t space = find_space(id);
  if (space != kNone && !hashes.empty()) {
    PrefixWalk(*this, space, hashes, best, only, told, hottest, answer).run();
  }
}

bool ClusterIndex::is_suspect(std::string_view name) const {
  const ReadGuard reading(lock_);
  const auto known = instance_numbers_.find(name);
  return known == instance_numbers_.end() || !instances_[known->second].is_known ||
         is_suspect(instances_[known->second]);
}

// Names come seldom and are compared by every query, so what comes later in their order moves on when one comes.
void ClusterIndex::rank_by_name(std::uint32_t number) {
  const auto place =
      std::lower_bound(by_name_.begin(), by_name_.end(), number,
                       [this](std::uint32_t a, std::uint32_t b) { return instances_[a].name < instances_[b].name; });
  for (auto at = by_name_.insert(place, number); at != by_name_.end(); ++at) {
    instances_[*at].rank = static_cast<std::uint32_t>(at - by_name_.begin());
  }
}

void ClusterIndex::forget_rank(std::uint32_t number) {
  for (auto at = by_name_.erase(by_name_.begin() + instances_[number].rank); at != by_name_.end(); ++at) {
    --instances_[*at].rank;
  }
}

void ClusterIndex::report_queued(std::uint32_t number, std::uint32_t tokens) const {
  const ReadGuard reading(lock_);
  if (instances_[number].is_known) {
    std::atomic_ref<std::uint32_t>(instances_[number].queued).store(tokens, std::memory_order_relaxed);
  }
}

void ClusterIndex::block_bytes(std::span<const std::uint32_t> numbers,
                               std::vector<std::array<std::uint64_t, kTierCount>>& bytes) const {
  const ReadGuard reading(lock_);
  bytes.assign(numbers.size(), {});
  for (std::size_t at = 0; at < numbers.size(); ++at) {
    if (numbers[at] < instances_.size() && instances_[numbers[at]].is_known) {
      for (std::size_t tier = 0; tier < kTierCount; ++tier) {
        bytes[at][tier] = instances_[numbers[at]].tiers[tier].block_bytes;
      }
    }
  }
}

std::uint32_t ClusterIndex::named_blocks(std::string_view pool) noexcept {
  constexpr std::string_view kMark = "blocks=";
  constexpr std::size_t kMostDigits = 7;
  const std::size_t hash = pool.rfind('#');
  for (std::size_t at = hash == std::string_view::npos ? pool.size() : hash + 1; at < pool.size();) {
    const std::size_t end = std::min(pool.find(',', at), pool.size());
    const std::string_view mark = pool.substr(at, end - at);
    const std::string_view digits = mark.starts_with(kMark) ? mark.substr(kMark.size()) : std::string_view();
    const bool is_number =
        std::all_of(digits.begin(), digits.end(), [](char digit) { return digit >= '0' && digit <= '9'; });
    if (is_number && !digits.empty() && digits.size() <= kMostDigits && digits.front() != '0') {
      std::uint32_t blocks = 0;
      for (const char digit : digits) {
        blocks = blocks * 10 + static_cast<std::uint32_t>(digit - '0');
      }
      return blocks;
    }
    at = end + 1;
  }
  return 0;
}

std::uint32_t ClusterIndex::object_blocks(std::uint32_t pool, std::uint32_t space) const noexcept {
  if (pools_[pool].blocks != 0) {
    return pools_[pool].blocks;
  }
  const auto told = object_blocks_.find(spaces_[space].id);
  return told != object_blocks_.end() ? told->second : 1;
}

void ClusterIndex::size_objects(const NamespaceId& id, std::uint32_t blocks) {
  const auto is_news = [&] {
    const auto known = object_blocks_.find(id);
    return blocks != 0 && (known != object_blocks_.end() ? blocks < known->second : object_blocks_.size() < kMostSized);
  };
  {
    const ReadGuard reading(lock_);  // mostly it was said before, and then no writer waits
    if (!is_news()) {
      return;
    }
  }
  const std::lock_guard turn(writer_);
  const WriteGuard change(lock_);
  if (is_news()) {
    object_blocks_.insert_or_assign(id, blocks);
  }
}

void ClusterIndex::size_blocks(std::uint32_t number, Tier tier, std::uint64_t block_bytes) {
  const std::lock_guard turn(writer_);
  const WriteGuard change(lock_);
  instances_[number].tiers[static_cast<std::size_t>(tier)].block_bytes = block_bytes;
}

}  // namespace kvbm
