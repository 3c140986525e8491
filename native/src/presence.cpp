// Which of some blocks are held, and by whom. Each block counts by itself, so there may be holes: a window keeps what
// it still reads, and recurrent layers keep states at a few boundaries.
//
// Blocks with the same holders are one group, so a set of holders is walked once however often it is met: what a
// question costs is bounded by its blocks and by the sets the index keeps. The first pass counts whose blocks they are,
// so that only who is named gets masks.
#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>

#include "kvbm/cluster_index.hpp"

namespace kvbm {

class PresenceScan {
 public:
  PresenceScan(const ClusterIndex& index, std::uint32_t space, Bytes hashes)
      : index_(index), space_(space), blocks_(hashes.size() / kHashBytes) {
    std::vector<HolderValue> values(blocks_);
    std::array<BlockKey, BlockTable::kMostAtOnce> keys;
    std::array<std::uint64_t, BlockTable::kMostAtOnce> places;
    for (std::size_t begin = 0; begin < blocks_; begin += keys.size()) {
      const std::size_t count = std::min(keys.size(), blocks_ - begin);
      for (std::size_t at = 0; at < count; ++at) {
        keys[at] = index_.key_of(space, hashes.data() + (begin + at) * kHashBytes);
        places[at] = index_.table_.place(keys[at]);
      }
      index_.table_.find_all(std::span(keys).first(count), std::span(places).first(count), values.data() + begin);
    }
    for (std::uint32_t at = 0; at < blocks_; ++at) {
      if (stretches_.empty() || stretches_.back().value != values[at]) {
        stretches_.push_back({values[at], at, at});
      }
      stretches_.back().end = at + 1;
    }
    std::sort(stretches_.begin(), stretches_.end(),
              [](const Stretch& a, const Stretch& b) { return a.value < b.value; });
  }

  void run(std::size_t best, const std::vector<std::uint32_t>* only, PresenceAnswer& answer) {
    const std::unordered_map<std::uint32_t, std::uint32_t> counts = count();
    std::vector<Counted> instances;
    for (const auto& [holder_space, blocks] : counts) {
      const ClusterIndex::HolderSpace& space = index_.holder_spaces_[holder_space];
      if (space.is_pool == 0 && (only == nullptr || std::binary_search(only->begin(), only->end(), space.holder))) {
        instances.push_back({holder_space, blocks, index_.instances_[space.holder].rank});
      }
    }
    std::sort(instances.begin(), instances.end(), [](const Counted& a, const Counted& b) {
      return a.blocks != b.blocks ? a.blocks > b.blocks : a.rank < b.rank;
    });
    const std::size_t named = best == 0 ? instances.size() : std::min(best, instances.size());
    answer.more = static_cast<std::uint32_t>(instances.size() - named);
    for (std::size_t at = 0; at < named; ++at) {
      name(instances[at].holder_space);
    }
    std::vector<std::uint32_t> pools(index_.spaces_[space_].pool_holder_spaces);
    std::sort(pools.begin(), pools.end(),
              [this](std::uint32_t a, std::uint32_t b) { return pool_name(a) < pool_name(b); });
    for (const std::uint32_t holder_space : pools) {
      if (counts.contains(holder_space)) {
        name(holder_space);
      }
    }
    mark();
    tell(answer);
  }

 private:
  // Consecutive blocks with the same holders.
  struct Stretch {
    HolderValue value;    // who
    std::uint32_t begin;  // the first
    std::uint32_t end;    // behind the last
  };

  // How many of the blocks a holder has, in whichever tier.
  struct Counted {
    std::uint32_t holder_space;  // it, in this namespace
    std::uint32_t blocks;        // so many
    std::uint32_t rank;          // of the instance's name
  };

  // A holder that the answer names.
  struct Named {
    std::uint32_t holder_space;                              // it, in this namespace
    std::array<std::vector<std::uint8_t>, kTierCount> held;  // by tier a bit for each block, empty while there is none
  };

  // Calls visit(value, stretches) for each group of blocks with the same holders.
  template <class Visit>
  void for_groups(Visit&& visit) const {
    const std::span<const Stretch> all(stretches_);
    for (std::size_t begin = 0; begin < all.size();) {
      std::size_t end = begin + 1;
      while (end < all.size() && all[end].value == all[begin].value) {
        ++end;
      }
      visit(all[begin].value, all.subspan(begin, end - begin));
      begin = end;
    }
  }

  std::unordered_map<std::uint32_t, std::uint32_t> count() const {
    std::unordered_map<std::uint32_t, std::uint32_t> counts;  // holder space → blocks it has
    for_groups([&](const HolderValue& value, std::span<const Stretch> stretches) {
      std::uint32_t blocks = 0;
      for (const Stretch& stretch : stretches) {
        blocks += stretch.end - stretch.begin;
      }
      std::uint32_t last = ClusterIndex::kNone;  // ids of one holder stand together
      for (const HolderId holder_id : index_.sets_.holder_ids(value)) {
        const std::uint32_t holder_space = kvbm::holder_space_of(holder_id);
        if (holder_space != last && index_.is_visible(holder_id)) {
          counts[holder_space] += blocks;
          last = holder_space;
        }
      }
    });
    return counts;
  }

  const std::string& pool_name(std::uint32_t holder_space) const {
    return index_.pools_[index_.holder_spaces_[holder_space].holder].name;
  }

  void name(std::uint32_t holder_space) {
    place_of_.emplace(holder_space, named_.size());
    named_.push_back({holder_space, {}});
  }

  void mark() {
    for_groups([this](const HolderValue& value, std::span<const Stretch> stretches) {
      for (const HolderId holder_id : index_.sets_.holder_ids(value)) {
        const auto place = place_of_.find(kvbm::holder_space_of(holder_id));
        if (place == place_of_.end() || !index_.is_visible(holder_id)) {
          continue;
        }
        std::vector<std::uint8_t>& mask = named_[place->second].held[static_cast<std::size_t>(tier_of(holder_id))];
        mask.resize((blocks_ + 7) / 8);
        for (const Stretch& stretch : stretches) {
          for (std::uint32_t at = stretch.begin; at < stretch.end; ++at) {
            mask[at / 8] = static_cast<std::uint8_t>(mask[at / 8] | 1U << at % 8);
          }
        }
      }
    });
  }

  // A row for each tier in which a holder has any of the blocks, hottest first.
  void tell(PresenceAnswer& answer) {
    for (Named& one : named_) {
      const ClusterIndex::HolderSpace& space = index_.holder_spaces_[one.holder_space];
      const bool is_suspect = space.is_pool == 0 && index_.is_suspect(index_.instances_[space.holder]);
      for (std::size_t tier = 0; tier < kTierCount; ++tier) {
        if (!one.held[tier].empty()) {
          answer.rows.push_back(
              {{space.holder, space.is_pool != 0, static_cast<Tier>(tier)}, is_suspect, std::move(one.held[tier])});
        }
      }
    }
  }

  const ClusterIndex& index_;                                // what is asked
  const std::uint32_t space_;                                // in which namespace
  const std::size_t blocks_;                                 // asked for
  std::vector<Stretch> stretches_;                           // all of them, those of one group together
  std::vector<Named> named_;                                 // in the order of the answer
  std::unordered_map<std::uint32_t, std::size_t> place_of_;  // holder space → its place there
};

void ClusterIndex::presence(const NamespaceId& id, Bytes hashes, std::size_t best, PresenceAnswer& answer,
                            const std::vector<std::uint32_t>* only) const {
  answer.rows.clear();
  answer.more = 0;
  const ReadGuard reading(lock_);
  const std::uint32_t space = find_space(id);
  if (space != kNone) {
    PresenceScan(*this, space, hashes).run(best, only, answer);
  }
}

}  // namespace kvbm
