// ForeignTable: the blocks of one engine without our code, by the engine's own hashes and by ours, in 32 bytes each
// beside two indexes. Made empty, grows with what is remembered, dropped; owner thread only. A block keeps its position
// until it is forgotten. What no tier holds any more stands in a list, the longest gone first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/residency_table.hpp"

namespace kvbm {

// How an engine writes the hash of a block.
enum class KeyKind : std::uint8_t {
  kNatural = 0,   // an integer of 64 bits
  kNegative = 1,  // the same, below 0, as its two's complement
  kWide = 2,      // bytes
  kLarge = 3,     // an integer beyond 64 bits, as the text of it
};

inline bool is_wide(KeyKind kind) noexcept { return kind >= KeyKind::kWide; }

// An engine's own hash of a block, as an event has it.
struct ForeignKey {
  std::uint64_t value = 0;           // of an integer
  Bytes wide;                        // of kWide and kLarge: the bytes, the caller's
  KeyKind kind = KeyKind::kNatural;  // which
};

// One block. 32 bytes: there are millions.
struct ForeignBlock {
  static constexpr std::uint8_t kColder = 0x07;      // bits of HOST, NVME and OBJECT: where it lies as well
  static constexpr std::uint8_t kKindShift = 3;      // of the two bits of its key's kind
  static constexpr std::uint8_t kShared = 0x20;      // another block has the same hash of ours, or had
  static constexpr std::uint8_t kRemembered = 0x40;  // it is there

  std::uint64_t key;     // the engine's hash; of kWide and kLarge a number of it
  SequenceHash hash;     // ours
  std::uint32_t start;   // position in its chain, in blocks; while it is gone, the number of its place in the list
  std::uint16_t copies;  // in HBM
  std::uint8_t home;     // number of its namespace
  std::uint8_t marks;    // see above

  KeyKind kind() const noexcept { return static_cast<KeyKind>(marks >> kKindShift & 3); }
  bool is_remembered() const noexcept { return (marks & kRemembered) != 0; }
  bool is_shared() const noexcept { return (marks & kShared) != 0; }
  // Whether no tier holds it.
  bool is_gone() const noexcept { return copies == 0 && (marks & kColder) == 0; }
};
static_assert(sizeof(ForeignBlock) == 32);

// The bit of a tier in ForeignBlock::marks; 0 for HBM, whose copies are counted.
constexpr std::uint8_t colder_bit(Tier tier) noexcept {
  return tier == Tier::kHbm ? 0 : static_cast<std::uint8_t>(1U << (static_cast<unsigned>(tier) - 1));
}

class ForeignTable {
 public:
  static constexpr std::uint32_t kNone = PositionIndex::kNone;
  static constexpr std::size_t kMostHomes = 256;

  // seed: makes the places unknown to who chooses keys.
  explicit ForeignTable(std::uint64_t seed);

  // The KV group of a namespace's blocks: keys are of their group.
  void set_group(std::uint8_t home, std::uint8_t group) noexcept { groups_[home] = group; }

  // What a key is looked up by; another group has another one. A wide key that is nowhere has none.
  struct Place {
    std::uint64_t value = 0;  // as ForeignBlock::key
    std::uint64_t mix = 0;    // for the index
    bool is_known = true;     // whether there may be such a block
  };
  Place place_of(const ForeignKey& key, std::uint8_t group) const;
  void prefetch(const Place& place) const noexcept { by_key_.prefetch(place.mix); }
  // Asks for the block that a place's search meets first.
  void prefetch_block(const Place& place) const noexcept;
  // The position of a block, or kNone.
  std::uint32_t find(const Place& place, KeyKind kind, std::uint8_t group) const noexcept;

  ForeignBlock& operator[](std::uint32_t position) noexcept {
    return chunks_[position / kChunkBlocks][position % kChunkBlocks];
  }
  const ForeignBlock& operator[](std::uint32_t position) const noexcept {
    return chunks_[position / kChunkBlocks][position % kChunkBlocks];
  }
  // All positions lie below; at some of them is nothing.
  std::uint32_t end() const noexcept { return end_; }

  // Remembers a block that is not there; its tiers are the caller's to set at once. A block that has the same hash of
  // ours becomes shared with it: `twin` gets the first of them, or kNone. Throws std::bad_alloc; nothing has changed
  // then.
  std::uint32_t insert(const ForeignKey& key, std::uint8_t group, const std::uint8_t* hash, std::uint32_t start,
                       std::uint8_t home, std::uint32_t& twin);
  void prefetch_hash(const std::uint8_t* hash) const noexcept { by_hash_.prefetch(hash_mix(hash)); }

  // The position of a block of a hash of ours, or kNone.
  std::uint32_t find_hash(const std::uint8_t* hash) const noexcept;

  // -- what no tier holds

  // A block that has become gone is the last of the list.
  void note_gone(std::uint32_t position);
  // A gone block is to be held again.
  void note_back(std::uint32_t position) noexcept;
  std::uint32_t start_of(const ForeignBlock& block) const noexcept {
    return block.is_gone() ? gone_[block.start].start : block.start;
  }
  std::size_t gone() const noexcept { return gone_count_; }
  // Forgets the longest gone until so many are left.
  void forget_gone(std::size_t most) noexcept;

  // Forgets everything, and gives the memory back.
  void clear();

  std::size_t size() const noexcept { return by_key_.count(); }
  std::size_t held() const noexcept { return size() - gone_count_; }
  std::size_t memory_bytes() const noexcept;
  // Whether one key comes before another: they are of one group.
  bool is_before(const ForeignBlock& one, const ForeignBlock& other) const noexcept;

 private:
  static constexpr std::uint32_t kChunkBlocks = 8192;
  using Chunk = std::unique_ptr<ForeignBlock[]>;

  // A place in the list of what is gone.
  struct Gone {
    std::uint32_t before;    // the one that has been gone longer
    std::uint32_t after;     // the one gone next; of a free place, the next free one
    std::uint32_t position;  // the block
    std::uint32_t start;     // its position in its chain
  };
  // Group, kind and bytes of a wide key → its number. The map keeps the places of its keys.
  using Wide = std::unordered_map<std::string, std::uint64_t>;

  std::uint64_t mix_of(std::uint64_t value, KeyKind kind, std::uint8_t group) const noexcept;
  static std::uint64_t hash_mix(const std::uint8_t* hash) noexcept { return residency_mix(Tier::kHbm, hash); }
  void forget(std::uint32_t position) noexcept;
  void unlink(std::uint32_t at) noexcept;
  std::uint32_t free_position();
  std::uint64_t number_wide(std::string name);
  void make_room();

  std::uint64_t seed_;                             // of mix_of
  std::array<std::uint8_t, kMostHomes> groups_{};  // by home
  std::vector<Chunk> chunks_;                      // the blocks, by position
  std::uint32_t end_ = 0;                          // positions ever used
  std::uint32_t first_free_ = kNone;               // a position with nothing in it; each names the next in its `start`
  PositionIndex by_key_;                           // an engine's hash → position
  PositionIndex by_hash_;                          // ours → position; the same hash may be there more than once
  std::vector<Gone> gone_;                         // places of the list
  std::uint32_t first_gone_ = kNone;               // the longest gone
  std::uint32_t last_gone_ = kNone;                // the one gone last
  std::uint32_t free_gone_ = kNone;                // a place that is in no list
  std::size_t gone_count_ = 0;                     // how many are in the list
  Wide wide_;                                      // wide keys → their numbers
  std::vector<const std::string*> wide_names_;     // by number; nullptr where there is none
  std::vector<std::uint64_t> free_wide_;           // numbers that mean nothing
};

}  // namespace kvbm
