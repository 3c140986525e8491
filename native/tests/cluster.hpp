// What the tests of the cluster index share: frames as instances send them, a model that is nothing but maps, and how
// an index is compared with it. One thread.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "check.hpp"
#include "kvbm/checkpoint.hpp"
#include "kvbm/cluster_index.hpp"

namespace kvbm::tests {

using Buffer = std::vector<std::uint8_t>;
using Key = std::pair<NamespaceId, SequenceHash>;

constexpr std::uint64_t kPlenty = std::uint64_t{1} << 40;  // a capacity that nothing here meets
constexpr std::array<std::uint64_t, 3> kSecret{0x1234567, 0x89ABCDE, 0xF0123};

// The name of an instance. Appended, not added: of `"i" + ...` GCC 12 warns without a cause.
inline std::string name_of(std::uint64_t number) {
  std::string name("i");
  return name.append(std::to_string(number));
}

inline NamespaceId space_id(std::size_t number) {
  NamespaceId id{};
  id[0] = static_cast<std::uint8_t>(number + 1);
  return id;
}

inline SequenceHash hash_of(std::uint64_t number) {
  SequenceHash hash{};
  Random random(number);
  const std::array<std::uint64_t, 2> words{random.next(), number};
  std::memcpy(hash.data(), words.data(), hash.size());
  return hash;
}

inline Buffer hashes_of(const std::vector<std::uint64_t>& numbers) {
  Buffer packed;
  for (const std::uint64_t number : numbers) {
    const SequenceHash hash = hash_of(number);
    packed.insert(packed.end(), hash.begin(), hash.end());
  }
  return packed;
}

inline Buffer hashes_between(std::uint64_t begin, std::uint64_t end) {
  std::vector<std::uint64_t> numbers;
  for (; begin < end; ++begin) {
    numbers.push_back(begin);
  }
  return hashes_of(numbers);
}

inline Event created(const NamespaceId& id, Tier tier, Bytes hashes) {
  return BlocksCreated{.namespace_id = id, .tier = tier, .hashes = hashes, .slots = {}};
}
inline Event evicted(const NamespaceId& id, Tier tier, Bytes hashes) {
  return BlocksEvicted{.namespace_id = id, .tier = tier, .reason = EvictReason::kCapacity, .hashes = hashes};
}
inline Event listed(const NamespaceId& id, Tier tier, std::uint32_t snapshot, Bytes hashes) {
  return ResidenciesListed{.namespace_id = id, .tier = tier, .snapshot = snapshot, .hashes = hashes, .slots = {}};
}

// One frame of one instance, its bytes its own.
struct Frame {
  std::uint32_t instance = 0;                     // its number
  std::uint64_t epoch = 1;                        // its epoch
  Buffer data;                                    // the frame
  std::vector<std::vector<DeclaredPool>> starts;  // the pools of its starts
};

inline Frame frame_of(std::uint32_t instance, const std::vector<Event>& events,
                      std::vector<std::vector<DeclaredPool>> starts = {}, std::uint64_t epoch = 1) {
  FrameHeader header;
  header.instance = "i";
  header.epoch = epoch;
  FrameWriter writer(header);
  for (const Event& event : events) {
    writer.add(event);
  }
  Frame frame{instance, epoch, Buffer(writer.frame_bytes()), std::move(starts)};
  writer.write(frame.data);
  return frame;
}

inline AppliedFrame apply(ClusterIndex& index, const Frame& frame) {
  return index.apply(frame.instance, frame.data, 0, 0, frame.starts);
}
inline AppliedFrame apply(ClusterIndex& index, std::uint32_t instance, const std::vector<Event>& events,
                          std::vector<std::vector<DeclaredPool>> starts = {}) {
  return apply(index, frame_of(instance, events, std::move(starts)));
}

inline std::vector<DeclaredPool> own_pools() {
  return {{Tier::kHbm, false, ""}, {Tier::kHost, false, ""}, {Tier::kNvme, false, ""}};
}
inline std::vector<DeclaredPool> shared_pools(const std::string& name) {
  std::vector<DeclaredPool> pools = own_pools();
  pools.push_back({Tier::kObject, true, name});
  return pools;
}

// -- the model --------------------------------------------------------------------------------------------------------

// A cluster as maps. What it does is read off the definition of each event, a block at a time.
class Model {
 public:
  struct TierModel {
    std::uint32_t snapshot = 0;         // last begun
    std::uint64_t told = 0;             // blocks it listed
    bool is_open = false;               // begun and not ended
    bool is_whole = false;              // nothing missed since a snapshot ended
    bool is_declared = false;           // by the start
    bool is_cluster = false;            // and the cluster's
    bool is_partial = false;            // something was refused
    bool has_refused = false;           // the same, since the snapshot began
    std::string pool;                   // of claims, where known
    std::uint64_t era = 0;              // counts begun snapshots
    std::map<Key, std::uint64_t> held;  // and in which era last listed or created
  };
  struct InstanceModel {
    std::uint64_t epoch = 0;
    bool is_known = true;
    bool is_stopped = false;
    bool pools_known = false;
    bool is_proven = false;
    bool is_waiting = false;
    std::array<TierModel, kTierCount> tiers;
  };

  Model(std::size_t instances, std::uint64_t capacity) : capacity_(capacity), instances_(instances) {}

  void apply(const Frame& frame) {
    FrameReader reader(frame.data, 0);
    std::size_t starts = 0;
    while (const auto event = reader.next()) {
      if (std::holds_alternative<InstanceStarted>(*event)) {
        begin(frame.instance, frame.epoch);
        declare(frame.instance, frame.starts[starts++]);
      } else {
        fold(instances_[frame.instance], *event);
      }
    }
  }
  void begin_blind(std::uint32_t number, std::uint64_t epoch, const std::vector<DeclaredPool>* pools,
                   const std::vector<DeclaredPool>& likely) {
    for (const DeclaredPool& pool : pools != nullptr ? *pools : likely) {
      if (pool.is_cluster) {
        claims_[pool.name];
      }
    }
    std::array<std::string, kTierCount> names;
    bool has_names = false;
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      names[tier] = instances_[number].tiers[tier].pool;
      has_names = has_names || !names[tier].empty();
    }
    begin(number, epoch);
    if (pools != nullptr) {
      declare(number, *pools);
      return;
    }
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      instances_[number].tiers[tier].pool = names[tier];
    }
    for (const DeclaredPool& pool : has_names ? std::vector<DeclaredPool>{} : likely) {
      instances_[number].tiers[static_cast<std::size_t>(pool.tier)].pool = pool.is_cluster ? pool.name : "";
    }
    instances_[number].pools_known = instances_[number].is_proven = false;
  }
  void miss(std::uint32_t number) {
    for (TierModel& tier : instances_[number].tiers) {
      tier.is_open = tier.is_whole = false;
    }
    instances_[number].is_proven = false;
  }
  void wait(std::uint32_t number, bool is_waiting) { instances_[number].is_waiting = is_waiting; }
  bool agrees(std::uint32_t number, std::uint64_t digest) {
    InstanceModel& instance = instances_[number];
    const bool is_same = state(number).digest == digest;
    const bool has_snapshot =
        std::any_of(instance.tiers.begin(), instance.tiers.end(), [](const TierModel& tier) { return tier.is_whole; });
    instance.is_proven = instance.is_proven || (!instance.pools_known && is_same && has_snapshot);
    return is_same || state(number).is_partial || !is_whole(instance);
  }
  void drop(std::uint32_t number) {
    instances_[number] = InstanceModel{};
    instances_[number].is_known = false;
  }
  void revive(std::uint32_t number) { instances_[number].is_known = true; }
  void claim(const std::string& pool, const NamespaceId& id, Bytes hashes) {
    claims_[pool];
    for_blocks(id, hashes, [&](const Key& key) { claim_one(pool, Tier::kObject, key); });
  }
  void unclaim(const std::string& pool, const NamespaceId& id, Bytes hashes) {
    claims_[pool];
    for_blocks(id, hashes, [&](const Key& key) { claims_[pool].erase(key); });
  }

  // -- what should be answered --

  const InstanceModel& instance(std::uint32_t number) const { return instances_[number]; }
  std::size_t instance_count() const { return instances_.size(); }
  const std::map<std::string, std::map<Key, std::set<Tier>>>& claims() const { return claims_; }
  const std::array<std::uint64_t, kAnomalyCount>& anomalies() const { return anomalies_; }

  std::uint64_t residency_count() const {
    std::uint64_t count = 0;
    for (const InstanceModel& instance : instances_) {
      for (const TierModel& tier : instance.tiers) {
        count += tier.held.size();
      }
    }
    return count;
  }

  InstanceState state(std::uint32_t number) const {
    const InstanceModel& instance = instances_[number];
    InstanceState state;
    state.epoch = instance.epoch;
    state.is_stopped = instance.is_stopped;
    for (std::size_t at = 0; at < kTierCount; ++at) {
      const TierModel& tier = instance.tiers[at];
      state.is_partial = state.is_partial || tier.is_partial;
      state.counts[at] = tier.held.size();
      state.is_listed[at] = (tier.is_declared && !tier.is_cluster) || !tier.held.empty();
      for (const auto& [key, era] : tier.held) {
        state.digest += residency_mix(static_cast<Tier>(at), key.second.data());
      }
    }
    state.is_waiting = instance.is_waiting;
    state.is_missed = !is_whole(instance);
    state.is_suspect = instance.is_waiting || state.is_partial || !is_whole(instance);
    return state;
  }

  // (is a pool, its name or the instance's number as text, tier) of each holder.
  std::set<std::tuple<bool, std::string, Tier>> holders(const Key& key) const {
    std::set<std::tuple<bool, std::string, Tier>> found;
    for (std::size_t number = 0; number < instances_.size(); ++number) {
      for (std::size_t tier = 0; tier < kTierCount; ++tier) {
        if (instances_[number].tiers[tier].held.contains(key)) {
          found.emplace(false, std::to_string(number), static_cast<Tier>(tier));
        }
      }
    }
    for (const auto& [name, blocks] : claims_) {
      if (const auto known = blocks.find(key); known != blocks.end()) {
        for (const Tier tier : known->second) {
          found.emplace(true, name, tier);
        }
      }
    }
    return found;
  }

  // (depth, by tier, reach, is suspect) of each instance that has or reaches the first block.
  using Depth = std::tuple<std::uint32_t, std::array<std::uint32_t, kTierCount>, std::uint32_t, bool>;
  std::map<std::uint32_t, Depth> prefixes(const NamespaceId& id, Bytes hashes) const {
    const std::vector<Key> keys = keys_of(id, hashes);
    std::map<std::uint32_t, Depth> found;
    for (std::uint32_t number = 0; number < instances_.size(); ++number) {
      const InstanceModel& instance = instances_[number];
      std::uint32_t depth = 0;
      std::array<std::uint32_t, kTierCount> by_tier{};
      for (; depth < keys.size(); ++depth) {
        const auto hottest = std::find_if(instance.tiers.begin(), instance.tiers.end(),
                                          [&](const TierModel& tier) { return tier.held.contains(keys[depth]); });
        if (hottest == instance.tiers.end()) {
          break;
        }
        ++by_tier[static_cast<std::size_t>(hottest - instance.tiers.begin())];
      }
      std::uint32_t reach = depth;
      while (reach < keys.size() && std::any_of(
                                        instance.tiers.begin(), instance.tiers.end(),
                                        [&](const TierModel& tier) {
                                          const auto pool = claims_.find(tier.pool);
                                          return pool != claims_.end() && pool->second.contains(keys[reach]);
                                        })) {
        ++reach;
      }
      if (reach > 0 && instance.is_known) {
        found[number] = {depth, by_tier, reach, state(number).is_suspect};
      }
    }
    return found;
  }

  std::map<std::string, std::uint32_t> pool_prefixes(const NamespaceId& id, Bytes hashes) const {
    const std::vector<Key> keys = keys_of(id, hashes);
    std::map<std::string, std::uint32_t> found;
    for (const auto& [name, blocks] : claims_) {
      std::uint32_t depth = 0;
      while (depth < keys.size() && blocks.contains(keys[depth])) {
        ++depth;
      }
      if (depth > 0) {
        found[name] = depth;
      }
    }
    return found;
  }

  std::uint32_t deepest_held(const NamespaceId& id, Bytes hashes) const {
    const std::vector<Key> keys = keys_of(id, hashes);
    auto end = static_cast<std::uint32_t>(keys.size());
    while (end > 0 && holders(keys[end - 1]).empty()) {
      --end;
    }
    return end;
  }

 private:
  template <class Visit>
  static void for_blocks(const NamespaceId& id, Bytes hashes, Visit&& visit) {
    for (const Key& key : keys_of(id, hashes)) {
      visit(key);
    }
  }

  static std::vector<Key> keys_of(const NamespaceId& id, Bytes hashes) {
    std::vector<Key> keys;
    for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
      keys.emplace_back(id, SequenceHash{});
      std::memcpy(keys.back().second.data(), hashes.data() + at, kHashBytes);
    }
    return keys;
  }

  static bool is_whole(const InstanceModel& instance) {
    return !instance.pools_known ? instance.is_proven
                                 : std::all_of(instance.tiers.begin(), instance.tiers.end(), [](const TierModel& tier) {
                                     return tier.is_whole || !tier.is_declared || tier.is_cluster;
                                   });
  }

  void count(IndexAnomaly anomaly, std::uint64_t times = 1) { anomalies_[static_cast<std::size_t>(anomaly)] += times; }

  bool is_full() {
    if (capacity_ == kPlenty) {
      return false;
    }
    std::uint64_t count = residency_count();
    for (const auto& [name, blocks] : claims_) {
      for (const auto& [key, tiers] : blocks) {
        count += tiers.size();
      }
    }
    if (count >= capacity_) {
      this->count(IndexAnomaly::kRefusedAtCapacity);
    }
    return count >= capacity_;
  }

  void begin(std::uint32_t number, std::uint64_t epoch) {
    InstanceModel& instance = instances_[number];
    instance.tiers = {};
    instance.epoch = epoch;
    instance.is_stopped = false;
  }

  void declare(std::uint32_t number, const std::vector<DeclaredPool>& pools) {
    InstanceModel& instance = instances_[number];
    for (const DeclaredPool& pool : pools) {
      TierModel& tier = instance.tiers[static_cast<std::size_t>(pool.tier)];
      tier.is_declared = true;
      tier.is_cluster = pool.is_cluster;
      tier.pool = pool.is_cluster ? pool.name : "";
      if (pool.is_cluster) {
        claims_[pool.name];
      }
    }
    instance.pools_known = true;
    instance.is_proven = false;
  }

  void claim_one(const std::string& pool, Tier tier, const Key& key) {
    const auto known = claims_[pool].find(key);
    const bool is_there = known != claims_[pool].end() && known->second.contains(tier);
    if (!is_there && !is_full()) {
      claims_[pool][key].insert(tier);
    }
  }

  void fold(InstanceModel& instance, const Event& event) {
    if (const auto* const made = std::get_if<BlocksCreated>(&event)) {
      gain(instance, made->namespace_id, made->tier, made->hashes, false);
    } else if (const auto* const gone = std::get_if<BlocksEvicted>(&event)) {
      withdraw(instance, gone->namespace_id, gone->tier, gone->hashes);
    } else if (const auto* const moved = std::get_if<BlocksMigrated>(&event)) {
      gain(instance, moved->namespace_id, moved->target, moved->hashes, false);
      const auto* const source = std::get_if<Tier>(&moved->source);
      if (source != nullptr && !moved->kept) {
        withdraw(instance, moved->namespace_id, *source, moved->hashes);
      } else if (source != nullptr) {
        const TierModel& from = instance.tiers[static_cast<std::size_t>(*source)];
        if (from.is_declared ? from.is_cluster : *source == Tier::kObject) {  // it was read there, so it is there
          gain(instance, moved->namespace_id, *source, moved->hashes, false);
        }
      }
    } else if (const auto* const told = std::get_if<ResidenciesListed>(&event)) {
      TierModel& tier = instance.tiers[static_cast<std::size_t>(told->tier)];
      if (told->snapshot != tier.snapshot) {
        begin_snapshot(tier, told->snapshot);
      }
      tier.told += told->hashes.size() / kHashBytes;
      gain(instance, told->namespace_id, told->tier, told->hashes, true);
    } else if (const auto* const ended = std::get_if<SnapshotEnded>(&event)) {
      TierModel& tier = instance.tiers[static_cast<std::size_t>(ended->tier)];
      if (ended->snapshot != tier.snapshot) {
        begin_snapshot(tier, ended->snapshot);
      }
      if (!tier.is_open || tier.told != ended->count) {
        count(IndexAnomaly::kSnapshotIncomplete);
        return;
      }
      const std::size_t withdrawn = std::erase_if(tier.held, [&](const auto& one) { return one.second < tier.era; });
      count(IndexAnomaly::kSnapshotWithdrew, tier.is_whole && ended->count != 0 ? withdrawn : 0);
      tier.is_open = false;
      tier.is_whole = true;
      tier.is_partial = tier.has_refused;
    } else if (std::holds_alternative<InstanceStopped>(event)) {
      instance.is_stopped = true;
    }
  }

  static void begin_snapshot(TierModel& tier, std::uint32_t snapshot) {
    tier.snapshot = snapshot;
    tier.told = 0;
    tier.is_open = true;
    tier.has_refused = false;
    ++tier.era;
  }

  static bool is_claim(const TierModel& model, Tier tier) {
    return model.is_declared ? model.is_cluster : tier == Tier::kObject;
  }

  void gain(InstanceModel& instance, const NamespaceId& id, Tier at, Bytes hashes, bool is_listed) {
    TierModel& tier = instance.tiers[static_cast<std::size_t>(at)];
    for_blocks(id, hashes, [&](const Key& key) {
      if (is_claim(tier, at)) {
        tier.pool.empty() ? count(IndexAnomaly::kUnnamedClaim) : claim_one(tier.pool, at, key);
      } else if (const auto known = tier.held.find(key); known != tier.held.end()) {
        count(IndexAnomaly::kCreatedTwice, is_listed ? 0 : 1);
        known->second = tier.era;
      } else {
        count(IndexAnomaly::kSnapshotAdded, is_listed && tier.is_whole ? 1 : 0);
        if (is_full()) {
          tier.is_partial = tier.has_refused = true;
        } else {
          tier.held[key] = tier.era;
        }
      }
    });
  }

  void withdraw(InstanceModel& instance, const NamespaceId& id, Tier at, Bytes hashes) {
    TierModel& tier = instance.tiers[static_cast<std::size_t>(at)];
    for_blocks(id, hashes, [&](const Key& key) {
      if (is_claim(tier, at)) {
        tier.pool.empty() ? count(IndexAnomaly::kUnnamedClaim) : static_cast<void>(claims_[tier.pool].erase(key));
      } else if (tier.held.erase(key) == 0) {
        count(IndexAnomaly::kEvictedUnheld);
      }
    });
  }

  std::uint64_t capacity_;                                       // residencies and claims at most
  std::vector<InstanceModel> instances_;                         // by number
  std::map<std::string, std::map<Key, std::set<Tier>>> claims_;  // by pool and block
  std::array<std::uint64_t, kAnomalyCount> anomalies_{};         // by rule
};

// -- an index against the model ---------------------------------------------------------------------------------------

inline std::map<std::string, std::uint64_t> claim_counts(const ClusterIndex& index) {
  const auto counts = index.claim_counts();
  return {counts.begin(), counts.end()};
}

inline void check_states(const ClusterIndex& index, const Model& model) {
  for (std::uint32_t number = 0; number < model.instance_count(); ++number) {
    const auto state = index.state(number);
    CHECK(state.has_value() == model.instance(number).is_known);
    if (state) {
      CHECK(*state == model.state(number));
      CHECK(index.recomputed_digest(number) == state->digest);
      for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
        const std::uint32_t pool = index.pool_of(number, static_cast<Tier>(tier));
        CHECK((pool == ClusterIndex::kNone ? "" : index.pool_name(pool)) == model.instance(number).tiers[tier].pool);
      }
    }
  }
  CHECK(index.residency_count() == model.residency_count());
  std::map<std::string, std::uint64_t> claims;
  for (const auto& [name, blocks] : model.claims()) {
    if (!blocks.empty()) {
      claims[name] = blocks.size();
    }
  }
  std::map<std::string, std::uint64_t> counted = claim_counts(index);
  std::erase_if(counted, [](const auto& pool) { return pool.second == 0; });  // an audit has forgotten some of these
  CHECK(counted == claims);
}

inline void check_holders(const ClusterIndex& index, const Model& model, const Key& key) {
  std::set<std::tuple<bool, std::string, Tier>> found;
  for (const BlockHolder& one : index.holders(key.first, key.second.data())) {
    CHECK(found.emplace(one.is_pool, one.is_pool ? index.pool_name(one.holder) : std::to_string(one.holder), one.tier)
              .second);
  }
  CHECK(found == model.holders(key));
}

// Position after the last block of the run that anybody holds, holes or not; 0 when nobody holds any.
inline std::uint32_t deepest_held(const ClusterIndex& index, const NamespaceId& id, Bytes hashes) {
  std::size_t end = hashes.size() / kHashBytes;
  while (end > 0 && index.holders(id, hashes.data() + (end - 1) * kHashBytes).empty()) {
    --end;
  }
  return static_cast<std::uint32_t>(end);
}

// Asks for all and for the best few.
inline void check_prefixes(const ClusterIndex& index, const Model& model, const NamespaceId& id, Bytes hashes) {
  const auto expected = model.prefixes(id, hashes);
  const auto pools = model.pool_prefixes(id, hashes);
  std::uint32_t deepest = 0;
  std::vector<std::uint32_t> depths;
  for (const auto& [number, depth] : expected) {
    depths.push_back(std::get<0>(depth));
    deepest = std::max(deepest, depths.back());
  }
  for (const auto& [name, depth] : pools) {
    deepest = std::max(deepest, depth);
  }
  std::sort(depths.rbegin(), depths.rend());
  PrefixAnswer answer;
  for (const std::size_t best : {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{5}, depths.size() + 1}) {
    index.prefixes(id, hashes, best, answer);
    CHECK(answer.deepest == deepest);
    CHECK(answer.instances.size() == (best == 0 ? depths.size() : std::min(best, depths.size())));
    std::set<std::uint32_t> told;
    for (std::size_t at = 0; at < answer.instances.size(); ++at) {
      const InstanceDepth& one = answer.instances[at];
      CHECK(told.insert(one.instance).second && expected.contains(one.instance));
      CHECK(expected.at(one.instance) == Model::Depth(one.depth, one.by_tier, one.reach, one.is_suspect));
      CHECK(best == 0 || one.depth == depths[at]);
    }
    std::map<std::string, std::uint32_t> told_pools;
    for (const PoolDepth& one : answer.pools) {
      CHECK(told_pools.emplace(index.pool_name(one.pool), one.depth).second);
    }
    CHECK(told_pools == pools);
  }
  CHECK(deepest_held(index, id, hashes) == model.deepest_held(id, hashes));
}

// -- checkpoints in memory --------------------------------------------------------------------------------------------

// A file without a name, gone with this object.
class ScratchFile {
 public:
  ScratchFile() : file_(std::tmpfile()) { CHECK(file_ != nullptr); }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile() { std::fclose(file_); }

  int descriptor() const { return fileno(file_); }
  Buffer bytes() const {
    Buffer data(static_cast<std::size_t>(::lseek(descriptor(), 0, SEEK_END)));
    CHECK(::pread(descriptor(), data.data(), data.size(), 0) == static_cast<ssize_t>(data.size()));
    return data;
  }

 private:
  std::FILE* file_;  // it
};

// frames: set to how many were applied before it.
inline Buffer written(const ClusterIndex& index, std::string_view note = "", std::uint64_t* frames = nullptr) {
  const ScratchFile file;
  const CheckpointSize size =
      write_checkpoint(index, file.descriptor(), {reinterpret_cast<const std::uint8_t*>(note.data()), note.size()});
  Buffer data = file.bytes();
  CHECK(data.size() == size.bytes);
  if (frames != nullptr) {
    *frames = size.frames;
  }
  return data;
}

}  // namespace kvbm::tests
