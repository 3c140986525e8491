// Residencies: the fold of one instance's events → what it holds, and the digest of that. Twin of kvbm/core/fold.py.
// Made empty, fed events in order, dropped. It reads streams offline: its tables grow, and one thread at a time uses it.
// PositionIndex and TierTable are its parts; a residency keeps its position until it is withdrawn.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/event.hpp"

namespace kvbm {

enum class Reach : std::uint8_t { kInstance = 0, kPod = 1, kCluster = 2 };
inline constexpr std::uint8_t kReachCount = 3;

// Any integer MessagePack can hold, from -2**63 to 2**64 - 1: what Python decodes it does not bound further.
class WireInteger {
 public:
  constexpr WireInteger() noexcept = default;
  constexpr explicit WireInteger(std::uint64_t value) noexcept : bits_(value) {}
  constexpr static WireInteger negative(std::int64_t value) noexcept {
    WireInteger made(static_cast<std::uint64_t>(value));
    made.is_negative_ = value < 0;
    return made;
  }

  constexpr bool is_zero() const noexcept { return bits_ == 0; }
  constexpr bool is_negative() const noexcept { return is_negative_; }
  // The value, modulo 2**64.
  constexpr std::uint64_t bits() const noexcept { return bits_; }
  std::string text() const;

  constexpr bool operator==(const WireInteger&) const noexcept = default;
  constexpr std::strong_ordering operator<=>(const WireInteger& other) const noexcept {
    if (is_negative_ != other.is_negative_) {
      return is_negative_ ? std::strong_ordering::less : std::strong_ordering::greater;
    }
    return bits_ <=> other.bits_;  // of two negative ones, the two's complements compare as the values do
  }

 private:
  bool is_negative_ = false;  // below 0
  std::uint64_t bits_ = 0;    // two's complement
};

// One pool, as an instance's start declares it.
struct PoolStated {
  Tier tier;                          // class of medium
  WireInteger slots;                  // how many blocks fit
  WireInteger block_bytes;            // bytes of one block
  Reach reach = Reach::kInstance;     // who can read it without the owner
  std::string name;                   // of a pool of cluster reach; UTF-8
};

// An InstanceStarted, as far as a fold needs it. Its MessagePack is decoded by the caller.
struct EpochStart {
  WireInteger epoch;              // the new epoch
  std::vector<PoolStated> pools;  // in the order stated
};

// A rule an event broke.
struct Anomaly {
  std::string_view rule;  // its short name, a literal
  std::string detail;     // what was seen
  bool operator==(const Anomaly&) const = default;
};

// What events changed.
struct FoldDelta {
  std::uint64_t added = 0;         // residencies gained
  std::uint64_t withdrawn = 0;     // residencies lost
  std::uint64_t claimed = 0;       // blocks of cluster pools spoken for
  std::uint64_t unclaimed = 0;     // blocks of cluster pools given up
  std::vector<Anomaly> anomalies;  // in the order they were met
};

// How far a frame was folded.
struct FoldedFrame {
  std::uint32_t folded = 0;       // events folded, those before the first asked for included
  FoldDelta delta;                // what they changed together
  std::optional<Anomaly> illegal; // strict: the rule broken by the event after them
};

// One residency.
struct Residency {
  SequenceHash hash;                  // the block
  std::uint32_t slot = 0;             // where, if it has a slot
  std::uint32_t round = 0;            // the round of its tier when it was last gained or stated
  std::uint32_t owner = 0;            // index of its namespace; kNoSlotBit when it has no slot; kGone for none at all
  std::uint32_t sequence = 0;         // rises with each one gained; set by the table
};

// Open addressing from a hash of a key to the position of its residency. The keys themselves are the residencies'.
class PositionIndex {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  // The position whose tag fits and which `is_it` accepts, or kNone.
  template <class IsIt>
  std::uint32_t find(std::uint64_t hash, IsIt&& is_it) const noexcept;
  // Adds a key that is not there. Only while has_room().
  void insert(std::uint64_t hash, std::uint32_t position) noexcept;
  // Removes a key that is there.
  void erase(std::uint64_t hash, std::uint32_t position) noexcept;
  bool has_room() const noexcept { return used_ < tags_.size() - tags_.size() / 5; }
  std::size_t count() const noexcept { return live_; }
  // Empties it, with room for so many keys and some more.
  void reset(std::size_t count);
  void prefetch(std::uint64_t hash) const noexcept;
  std::size_t memory_bytes() const noexcept { return tags_.size() * 5; }

 private:
  static constexpr std::uint8_t kEmpty = 0;
  static constexpr std::uint8_t kErased = 1;
  static std::uint8_t tag_of(std::uint64_t hash) noexcept;
  // Where a key is looked for first. The number of places is no power of two, so that memory follows what is held closely.
  std::size_t home_of(std::uint64_t hash) const noexcept { return ((hash & 0xFFFFFFFF) * tags_.size()) >> 32; }
  std::size_t after(std::size_t at) const noexcept { return at + 1 == tags_.size() ? 0 : at + 1; }

  std::vector<std::uint8_t> tags_;        // kEmpty, kErased, or bits of the key's hash
  std::vector<std::uint32_t> positions_;  // where tags_ has a key, its position
  std::size_t used_ = 0;                  // places not kEmpty
  std::size_t live_ = 0;                  // keys
};

// What one tier holds, by hash, by slot, and in the order it was gained.
class TierTable {
 public:
  static constexpr std::uint32_t kNone = PositionIndex::kNone;
  static constexpr std::uint32_t kGone = 0xFFFFFFFF;
  static constexpr std::uint32_t kNoSlotBit = 0x80000000;

  // next_sequence: where counting begins; only tests begin elsewhere than at 0.
  explicit TierTable(Tier tier, std::uint32_t next_sequence = 0) : tier_(tier), next_sequence_(next_sequence) {
    by_hash_.reset(0);
  }

  // mix: residency_mix of the tier and the hash.
  std::uint32_t find(const std::uint8_t* hash, std::uint64_t mix) const noexcept;
  std::uint32_t find_slot(std::uint32_t slot) const noexcept;
  // Adds a residency that is not there, in a slot nothing is in. Its sequence is set here.
  void insert(const Residency& residency, std::uint64_t mix);
  void erase(std::uint32_t position, std::uint64_t mix) noexcept;
  // Puts a residency into another slot, in which nothing is, or into none.
  void move(std::uint32_t position, std::optional<std::uint32_t> slot);
  void clear();

  static bool has_slot(const Residency& one) noexcept { return (one.owner & kNoSlotBit) == 0; }
  static bool is_gone(const Residency& one) noexcept { return one.owner == kGone; }
  std::size_t count() const noexcept { return by_hash_.count(); }
  Residency& operator[](std::uint32_t position) noexcept { return residencies_[position]; }
  const Residency& operator[](std::uint32_t position) const noexcept { return residencies_[position]; }
  // All positions lie below; at some of them is nothing.
  std::uint32_t end() const noexcept { return static_cast<std::uint32_t>(residencies_.size()); }
  // The positions of those that `is_wanted` accepts, in the order they were gained.
  template <class IsWanted>
  std::vector<std::uint32_t> in_order(IsWanted&& is_wanted) const;
  void prefetch(std::uint64_t mix) const noexcept { by_hash_.prefetch(mix); }
  std::size_t memory_bytes() const noexcept;

 private:
  void occupy(std::uint32_t slot, std::uint32_t position);
  void vacate(std::uint32_t slot) noexcept;
  void reindex();
  void renumber();

  Tier tier_;                            // for the mixes
  std::uint32_t next_sequence_;          // of the residency gained next
  std::uint32_t first_gone_ = kNone;     // a position with nothing in it; each names the next in its `slot`
  std::vector<Residency> residencies_;   // by position
  PositionIndex by_hash_;                // hash → position
  std::vector<std::uint32_t> by_slot_;   // slot → position or kNone, for the low slots
  std::unordered_map<std::uint32_t, std::uint32_t> by_high_slot_;  // the same for slots too high for so few blocks
};

class Residencies {
 public:
  explicit Residencies(bool is_strict);

  bool strict;  // whether an event that contradicts what is held is refused; may change between events

  // Applies one event. `start` is that of an InstanceStarted, and not looked at otherwise.
  // Throws Error: kIllegalEvent, strict, and the event contradicts what is held; kLayout, a run is no run. Nothing has
  // changed then.
  void evolve(const Event& event, const EpochStart* start, FoldDelta& delta);

  // Applies the events of a good frame from `first` on, up to the first that is illegal, or to a start of another epoch
  // than the frame's, which is the caller's to judge. `starts` are those of all its InstanceStarted, in order.
  FoldedFrame evolve_frame(FrameReader reader, std::uint32_t first, std::span<const EpochStart> starts);

  // Says that events were missed: every tier is doubtful until a whole round begins and ends from here on.
  void miss_events() noexcept;
  // Enters an epoch whose start was missed.
  void begin_blind(WireInteger epoch, FoldDelta& delta);

  const WireInteger& epoch() const noexcept { return epoch_; }
  bool is_stopped() const noexcept { return stopped_; }
  std::uint64_t digest() const noexcept { return digest_; }
  std::uint64_t tier_digest(Tier tier) const noexcept;
  std::size_t count() const noexcept;
  std::size_t count(Tier tier) const noexcept { return state(tier).table.count(); }
  bool is_whole(Tier tier) const noexcept { return state(tier).is_whole; }
  bool is_cluster(Tier tier) const noexcept;
  // The pools of the epoch, a tier once, in the order first stated.
  const std::vector<PoolStated>& pools() const noexcept { return pools_; }
  // What a tier holds, by namespace id, and within one in the order it was gained.
  std::vector<Residency> held(Tier tier) const;
  const NamespaceId& namespace_id(const Residency& one) const noexcept {
    return namespaces_[one.owner & ~TierTable::kNoSlotBit];
  }
  std::size_t memory_bytes() const noexcept;

 private:
  struct TierState {
    TierTable table;           // what it holds
    std::uint32_t round = 0;   // the round last begun
    std::uint64_t stated = 0;  // blocks it has stated so far
    bool is_open = false;      // it has begun and not ended
    bool is_whole = false;     // nothing was missed since a round ended
  };
  struct NamespaceHash {
    std::size_t operator()(const NamespaceId& id) const noexcept;
  };
  using Slot = std::optional<std::uint32_t>;

  TierState& state(Tier tier) noexcept { return tiers_[static_cast<std::size_t>(tier)]; }
  const TierState& state(Tier tier) const noexcept { return tiers_[static_cast<std::size_t>(tier)]; }
  const PoolStated* pool(Tier tier) const noexcept;
  std::uint32_t namespace_index(const NamespaceId& id);
  // The mixes of a run in a tier, and its table's lines on their way into the cache.
  void mix(Tier tier, Bytes hashes);

  void begin(const EpochStart& start, FoldDelta& delta);
  // is_legal: nothing of the run is held and its slots are free.
  void add(const NamespaceId& id, Tier tier, Bytes hashes, Bytes slots, bool is_legal, FoldDelta& delta);
  void withdraw(Tier tier, Bytes hashes, FoldDelta& delta);
  void state_run(const ResidenciesStated& event, FoldDelta& delta);
  void end_round(const RoundEnded& event, FoldDelta& delta);
  void gain(Tier tier, const std::uint8_t* hash, std::uint64_t mix, std::uint32_t name, Slot slot, FoldDelta& delta);
  void lose(Tier tier, std::uint32_t position, std::uint64_t mix, FoldDelta& delta);
  void restate(Tier tier, std::uint32_t position, std::uint32_t name, Slot slot, bool is_twice, FoldDelta& delta);
  void vacate(Tier tier, std::uint32_t slot, FoldDelta& delta);

  void check(const Event& event, const EpochStart* start);
  void check_held(const char* rule, Tier tier, Bytes hashes, const NamespaceId& id);
  void check_gain(const char* rule, Tier tier, Bytes hashes, Bytes slots);
  void check_slots(Tier tier, Bytes hashes, Bytes slots);
  void check_state(const ResidenciesStated& event);
  void check_round_number(Tier tier, std::uint32_t number) const;
  void check_round(const RoundEnded& event) const;
  void check_distinct(Tier tier, Bytes hashes);
  bool are_slots_distinct(Bytes slots);

  WireInteger epoch_;                    // the epoch last begun, 0 before the first
  std::vector<PoolStated> pools_;        // its pools
  bool stopped_ = false;                 // it has ended cleanly
  std::uint64_t digest_ = 0;             // sum of the mixes of all residencies
  std::array<TierState, kTierCount> tiers_;
  std::vector<NamespaceId> namespaces_;  // met in this epoch, by index
  std::unordered_map<NamespaceId, std::uint32_t, NamespaceHash> namespace_indexes_;  // and back
  std::uint32_t last_namespace_ = 0;     // index of the one last asked for; mostly the next one, too
  std::vector<std::uint64_t> mixes_;     // of the run at hand
  std::optional<Tier> mixed_;            // the tier they are for, while they are those of the event at hand
  std::vector<std::uint32_t> seen_;      // scratch for finding what a run repeats: open addressing of index + 1
};

template <class IsIt>
std::uint32_t PositionIndex::find(std::uint64_t hash, IsIt&& is_it) const noexcept {
  const std::uint8_t tag = tag_of(hash);
  for (std::size_t at = home_of(hash);; at = after(at)) {
    if (tags_[at] == tag && is_it(positions_[at])) {
      return positions_[at];
    }
    if (tags_[at] == kEmpty) {
      return kNone;
    }
  }
}

template <class IsWanted>
std::vector<std::uint32_t> TierTable::in_order(IsWanted&& is_wanted) const {
  std::vector<std::uint32_t> positions;
  for (std::uint32_t at = 0; at < end(); ++at) {
    if (!is_gone(residencies_[at]) && is_wanted(residencies_[at])) {
      positions.push_back(at);
    }
  }
  std::sort(positions.begin(), positions.end(), [this](std::uint32_t one, std::uint32_t other) {
    return residencies_[one].sequence < residencies_[other].sequence;
  });
  return positions;
}

}  // namespace kvbm
