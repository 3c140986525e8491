// Copies: bytes on their way between tiers or from another instance, and the slots that are theirs until they end.
// Part of a ledger, whose recorder and allocator it is given with each command. Owner thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/recorder.hpp"
#include "kvbm/runs.hpp"
#include "kvbm/slot_allocator.hpp"
#include "kvbm/tier_slots.hpp"

namespace kvbm {

// Where a copy reads: a tier, or another instance (UTF-8).
using CopySource = std::variant<Tier, std::string>;

// Bytes to move; source and target stay the copy's until it ends.
struct Copy {
  NamespaceId namespace_id;                 // whose blocks
  CopySource source;                        // where they come from
  Tier target;                              // where they go
  std::vector<std::uint8_t> hashes;         // packed
  std::vector<std::uint32_t> source_slots;  // empty when the source has no slots of ours
  std::vector<std::uint32_t> target_slots;  // empty for a target without slots
  std::uint64_t after = 0;                  // offset that must be durable before the target slots are overwritten
  std::uint64_t epoch = 0;                  // in which `after` counts
};

class Copies {
 public:
  // seed: for positions in hash tables.
  explicit Copies(std::uint64_t seed) : distinct_(seed) {}

  // The copy's number and what it is, valid until it ends; nullopt when nothing is to be copied or nothing fits.
  // Throws Error: kLedger, kLayout, kIllegalEvent; std::bad_alloc. Nothing is pinned or taken then.
  std::optional<std::pair<std::uint64_t, const Copy*>> begin(Recorder& recorder, SlotAllocator& allocator,
                                                             const NamespaceId& namespace_id, CopySource source,
                                                             Tier target, Bytes hashes);
  // Blocks of a copy in flight. Throws Error: kLedger, when it is not.
  std::size_t blocks(std::uint64_t id) const;
  // arrived: one for each block. Returns for each block the target slot that holds it, or kNoSlot; valid until the next
  // end. Throws std::bad_alloc: the copy is in flight still, or has ended, and has no pins or slots any more.
  std::span<const std::uint32_t> end(Recorder& recorder, std::uint64_t id, std::span<const std::uint8_t> arrived,
                                     MigrateCause cause, bool kept, bool pinned);
  std::size_t in_flight() const noexcept { return copies_.size(); }

 private:
  std::size_t arriving(Recorder& recorder, const SlotAllocator& allocator, Tier target, std::uint32_t share) const;
  void choose(Recorder& recorder, Copy& copy, Bytes hashes, std::size_t most);

  std::unordered_map<std::uint64_t, Copy> copies_;  // in flight
  std::uint64_t next_ = 1;                          // number of the next
  DistinctHashes distinct_;                         // of runs to copy
  std::vector<std::uint32_t> holders_;              // what `end` returns
};

}  // namespace kvbm
