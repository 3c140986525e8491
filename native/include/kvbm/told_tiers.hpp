// ToldTiers: which of an engine's blocks lie in which tier, as listeners were last told. Native implementation of
// ReadableToldTiers in kvbm/reference/told_tiers.py; kvbm/engines/vllm/told_tiers.py says what each call means. Made
// empty, told of runs of blocks, asked at each step what to look at and what has changed there. Owner thread only. A
// block has 40 bytes beside an index, each of the engine's hashes 52 beside another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/residency_table.hpp"

namespace kvbm {

class ToldTiers {
 public:
  static constexpr std::size_t kMostDigestBytes = 32;
  static constexpr std::uint32_t kMostRunBlocks = 1U << 24;
  static constexpr std::uint8_t kAbsent = 0xFF;  // among tiers: none holds the block

  // The part of a run that was not known, by what `learn` was given, and the number that it has from now on.
  struct Learned {
    std::uint64_t run;
    std::uint32_t begin;
    std::uint32_t end;
  };
  // Blocks of a run's part that lie in a tier now, or do so no more.
  struct Told {
    std::uint64_t run;
    std::uint32_t begin;
    std::uint32_t end;
    std::uint8_t tier;
    bool is_held;
  };

  // step: blocks that are looked at in turn at each step. seed: makes the places unknown to who chooses hashes.
  ToldTiers(std::size_t step, std::uint64_t seed);

  // digests: as many as there are hashes, or more; each has kMostDigestBytes at most. Throws std::bad_alloc; then
  // nothing has changed.
  std::optional<Learned> learn(Bytes hashes, std::span<const Bytes> digests, std::uint8_t group);
  void tell_anew() noexcept;
  // Chooses what to look at; returns how many blocks that are. Throws std::bad_alloc.
  std::size_t choose_due();
  // The hashes of those, packed.
  void copy_due(std::span<std::uint8_t> out) const noexcept;
  std::size_t due() const noexcept { return due_.size(); }
  // tiers: of each of those, kAbsent or a tier colder than HBM. Appends to both. Throws std::bad_alloc; nothing has
  // changed then.
  void change(Bytes tiers, std::vector<Told>& told, std::vector<std::uint64_t>& ended);

  // How many blocks and hashes of the engine are known.
  std::size_t blocks() const noexcept { return by_hash_.count(); }
  std::size_t digests() const noexcept { return by_digest_.count(); }

 private:
  static constexpr std::uint32_t kNone = PositionIndex::kNone;
  static constexpr std::uint32_t kNowhere = 7;  // as Block::tier

  struct Block {
    SequenceHash hash;           // ours
    std::uint64_t run;           // its number; runs count upwards
    std::uint32_t digest;        // position of the engine's hash
    std::uint32_t before;        // the block that was learned before it, or kNone
    std::uint32_t after;         // the block that was learned next, or kNone; of a free position the next free one
    std::uint32_t at : 24;       // its index in the run's part
    std::uint32_t tier : 3;      // where it was when it was last looked at, or kNowhere
    std::uint32_t is_known : 1;  // it is there
    std::uint32_t is_fresh : 1;  // it is in fresh_
    std::uint32_t unused_ : 3;
  };
  static_assert(sizeof(Block) == 40);

  // One of the engine's hashes in a group: several blocks of ours may have it.
  struct Digest {
    std::array<std::uint8_t, kMostDigestBytes> bytes;  // zeros behind its end
    std::array<std::uint32_t, kTierCount - 1> copies;  // by tier, HBM left out: blocks of ours that lie there
    std::uint32_t blocks;                              // of ours that have it; of a free position the next free one
    std::uint8_t size;                                 // of the bytes
    std::uint8_t group;                                // the KV group
  };
  static_assert(sizeof(Digest) == 52);

  // A block that left a tier, or all of them.
  struct Left {
    std::uint32_t position;
    std::uint32_t from;  // kNowhere: no tier was known to hold it
    bool is_gone;
  };
  struct Gained {
    std::uint32_t position;
    std::uint32_t tier;
  };

  static std::uint64_t hash_mix(const std::uint8_t* hash) noexcept { return residency_mix(Tier::kHbm, hash); }
  std::uint64_t digest_mix(const Digest& digest) const noexcept;
  std::uint32_t& copies(const Block& block, std::uint32_t tier) noexcept {
    return digests_[block.digest].copies[tier - 1];
  }
  std::uint32_t find(const std::uint8_t* hash) const noexcept;
  std::uint32_t insert(const std::uint8_t* hash, Bytes digest, std::uint8_t group, std::uint64_t run, std::uint32_t at);
  std::uint32_t digest_position(Bytes bytes, std::uint8_t group);
  void drop_digest(std::uint32_t position) noexcept;
  void forget(std::uint32_t position) noexcept;
  void make_room();
  void look(Bytes tiers, std::vector<Told>& told);
  void begin_turn() noexcept;

  std::size_t step_;                                       // blocks of a turn at each step
  std::uint64_t seed_;                                     // of digest_mix
  std::vector<Block> blocks_;                              // by position
  std::vector<Digest> digests_;                            // by position
  PositionIndex by_hash_;                                  // ours → position of the block
  PositionIndex by_digest_;                                // the engine's → position of the digest
  std::uint32_t free_block_ = kNone;                       // a position without a block
  std::uint32_t free_digest_ = kNone;                      // a position without a digest
  std::uint32_t first_ = kNone;                            // the block learned first
  std::uint32_t last_ = kNone;                             // … and last
  std::unordered_map<std::uint64_t, std::uint32_t> left_;  // run → blocks known of it
  std::uint64_t next_run_ = 0;                             // number of the next
  std::vector<std::uint32_t> fresh_;                       // blocks learned since the last step
  std::uint32_t cursor_ = kNone;                           // the block that the turn comes to next
  std::uint64_t turn_end_ = 0;                             // runs from this one on are of a later turn
  bool tells_anew_ = false;                                // whether the turn tells also of what has not changed
  std::vector<std::uint32_t> due_;                         // what is looked at, fresh ones first
  std::size_t due_fresh_ = 0;                              // how many of those are fresh
  bool due_anew_ = false;                                  // tells_anew_ of the others
  std::vector<Gained> gained_;                             // of this step
  std::vector<Left> gone_;                                 // of this step
};

}  // namespace kvbm
