// Which blocks of a prompt instances could lend to others: the part of ClusterIndex that routing prices reading from
// them by.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "kvbm/cluster_index.hpp"

namespace kvbm {

namespace {

// Holders that one walk looks at: hashes may repeat, so holders may change with every block
constexpr std::size_t kMostVisited = 4U << 20U;
constexpr std::size_t kLeastKept = 4096;  // runs before those that are not an instance's longest are dropped

}  // namespace

// One walk along a prompt, under the read lock. Unlike a prefix's it follows whoever joins on the way.
class LentWalk {
 public:
  LentWalk(const ClusterIndex& index, std::uint32_t space, Bytes hashes, bool is_whole)
      : index_(index), salt_(index.spaces_[space].salt), hashes_(hashes), is_whole_(is_whole) {
    work_.open.clear();  // an earlier walk may have ended for want of memory
    work_.runs.clear();
  }

  void run(std::size_t most, std::vector<LendableRun>& runs) {
    const auto count = static_cast<std::uint32_t>(hashes_.size() / kHashBytes);
    std::uint32_t at = 0;
    for (bool goes_on = true; goes_on && at < count;) {
      const std::uint32_t end = std::min<std::uint32_t>(count, at + BlockTable::kMostAtOnce);
      find(at, end);
      for (const std::uint32_t begin = at; goes_on && at < end;) {
        goes_on = step(values_[at - begin], at);
        at += goes_on ? 1 : 0;
      }
    }
    change(0, at);
    keep_best(most, runs);
  }

 private:
  // A run that goes on.
  struct Open {
    std::uint32_t holder_space;  // its instance, in this namespace
    std::uint32_t begin;         // first block
  };

  // Kept by each thread, so that walking allocates nothing.
  struct Scratch {
    std::vector<Open> open;         // in order of the holder space
    std::vector<Open> next;         // the same, being made
    std::vector<LendableRun> runs;  // that have ended
  };

  static Scratch& scratch() {
    thread_local Scratch mine;
    return mine;
  }

  void find(std::uint32_t begin, std::uint32_t end) {
    std::array<BlockKey, BlockTable::kMostAtOnce> keys;
    std::array<std::uint64_t, BlockTable::kMostAtOnce> places;
    for (std::uint32_t at = begin; at < end; ++at) {
      BlockKey& key = keys[at - begin];
      std::memcpy(&key, hashes_.data() + std::size_t{at} * kHashBytes, sizeof key);
      key.low ^= salt_.low;
      key.high ^= salt_.high;
      places[at - begin] = index_.table_.place(key);
    }
    index_.table_.find_all({keys.data(), end - begin}, {places.data(), end - begin}, values_.data());
  }

  // The holders of block `at`. Whether the walk goes on with it.
  bool step(HolderValue value, std::uint32_t at) {
    if (value != current_ || at == 0) {
      if ((!is_whole_ && !is_held(value)) || visited_ > kMostVisited) {
        return false;
      }
      change(value, at);
    }
    return true;
  }

  bool is_held(const HolderValue& value) const {
    const auto ids = index_.sets_.holder_ids(value);
    return std::any_of(ids.begin(), ids.end(), [this](HolderId id) { return index_.is_visible(id); });
  }

  // From block `at` on these are the holders: runs of those that are not among them end there, and others begin.
  void change(HolderValue value, std::uint32_t at) {
    current_ = value;
    Scratch& work = work_;
    work.next.clear();
    auto known = work.open.cbegin();
    const auto ids = index_.sets_.holder_ids(current_);
    visited_ += ids.size() + work.open.size();
    for (std::size_t first = 0; first < ids.size();) {
      const std::uint32_t holder_space = kvbm::holder_space_of(ids[first]);
      unsigned tiers = 0;
      for (; first < ids.size() && kvbm::holder_space_of(ids[first]) == holder_space; ++first) {
        tiers |= index_.is_visible(ids[first]) ? 1U << (ids[first] >> 2 & 3) : 0;
      }
      if ((tiers & lent_tiers(holder_space)) == 0) {
        continue;
      }
      for (; known != work.open.cend() && known->holder_space < holder_space; ++known) {
        end(*known, at);
      }
      const bool goes_on = known != work.open.cend() && known->holder_space == holder_space;
      work.next.push_back({holder_space, goes_on ? known->begin : at});
      known += goes_on ? 1 : 0;
    }
    for (; known != work.open.cend(); ++known) {
      end(*known, at);
    }
    std::swap(work.open, work.next);
  }

  unsigned lent_tiers(std::uint32_t holder_space) const {
    const ClusterIndex::HolderSpace& space = index_.holder_spaces_[holder_space];
    if (space.is_pool != 0) {
      return 0;
    }
    return std::atomic_ref<std::uint8_t>(index_.instances_[space.holder].lent_tiers).load(std::memory_order_relaxed);
  }

  void end(const Open& open, std::uint32_t at) {
    work_.runs.push_back({index_.holder_spaces_[open.holder_space].holder, open.begin, at});
    if (work_.runs.size() >= full_) {
      keep_longest();
      full_ = std::max(kLeastKept, 2 * work_.runs.size());
    }
  }

  // One run an instance.
  void keep_longest() {
    std::vector<LendableRun>& all = work_.runs;
    std::sort(all.begin(), all.end(), [](const LendableRun& a, const LendableRun& b) {
      if (a.instance != b.instance) {
        return a.instance < b.instance;
      }
      const std::uint32_t one = a.end - a.begin;
      const std::uint32_t other = b.end - b.begin;
      return one != other ? one > other : a.begin < b.begin;
    });
    const auto same = [](const LendableRun& a, const LendableRun& b) { return a.instance == b.instance; };
    all.erase(std::unique(all.begin(), all.end(), same), all.end());
  }

  void keep_best(std::size_t most, std::vector<LendableRun>& runs) {
    keep_longest();
    std::vector<LendableRun>& all = work_.runs;
    const std::size_t kept = std::min(most, all.size());
    std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept), all.end(),
                      [this](const LendableRun& a, const LendableRun& b) {
                        if (a.end != b.end) {
                          return a.end > b.end;
                        }
                        return a.begin != b.begin
                                   ? a.begin < b.begin
                                   : index_.instances_[a.instance].rank < index_.instances_[b.instance].rank;
                      });
    runs.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept));
    work_.open.clear();
    all.clear();
  }

  const ClusterIndex& index_;                                  // what is asked
  const BlockKey salt_;                                        // of the namespace
  const Bytes hashes_;                                         // the prompt
  const bool is_whole_;                                        // also behind a block that nobody holds
  Scratch& work_ = scratch();                                  // this thread's
  HolderValue current_ = 0;                                    // the holders of the last block
  std::size_t visited_ = 0;                                    // holders, of all changes together
  std::size_t full_ = kLeastKept;                              // runs at which only the longest are kept
  std::array<HolderValue, BlockTable::kMostAtOnce> values_{};  // of the blocks under way
};

void ClusterIndex::lent(const NamespaceId& id, Bytes hashes, std::size_t most, bool is_whole,
                        std::vector<LendableRun>& runs) const {
  runs.clear();
  const ReadGuard reading(lock_);
  const std::uint32_t space = find_space(id);
  if (space != kNone && !hashes.empty()) {
    LentWalk(*this, space, hashes, is_whole).run(most, runs);
  }
}

void ClusterIndex::report_lent_tiers(std::uint32_t number, std::uint8_t tiers) const {
  const ReadGuard reading(lock_);
  if (instances_[number].is_known) {
    std::atomic_ref<std::uint8_t>(instances_[number].lent_tiers).store(tiers, std::memory_order_relaxed);
  }
}

}  // namespace kvbm
