// Events as columns: the native form of kvbm/core/events.py.
// An event is a view: its spans point into the frame it was read from, or into the caller's buffers, and are valid only
// as long as those bytes are. Values without identity; any thread that may read the bytes may read the event.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <variant>

namespace kvbm {

static_assert(std::endian::native == std::endian::little, "hashes, slots and frames are little-endian in memory");

inline constexpr std::size_t kHashBytes = 16;
inline constexpr std::size_t kSlotBytes = 4;

using Bytes = std::span<const std::uint8_t>;
using SequenceHash = std::array<std::uint8_t, kHashBytes>;
using NamespaceId = std::array<std::uint8_t, kHashBytes>;

inline constexpr SequenceHash kNoParent{};  // the parent of a chain's first block

enum class Tier : std::uint8_t { kHbm = 0, kHost = 1, kNvme = 2, kObject = 3 };
inline constexpr std::uint8_t kTierCount = 4;

enum class EvictReason : std::uint8_t {
  kCapacity = 0,
  kTtl = 1,
  kQuota = 2,
  kCleared = 3,
  kCorrupt = 4,
  kMissing = 5,
  kShutdown = 6
};
inline constexpr std::uint8_t kEvictReasonCount = 7;

enum class MigrateCause : std::uint8_t { kOffload = 0, kOnboard = 1, kFetch = 2 };
inline constexpr std::uint8_t kMigrateCauseCount = 3;

enum class StopReason : std::uint8_t { kShutdown = 0, kOverflow = 1, kFenced = 2 };
inline constexpr std::uint8_t kStopReasonCount = 3;

// A new epoch begins and nothing is held in any tier.
struct InstanceStarted {
  Bytes blob;  // MessagePack of the struct, opaque to C++ but for its first byte, which tells whether it has attributes
};

// Blocks are full, immutable and addressable.
struct BlocksCreated {
  NamespaceId namespace_id;         // whose blocks
  Tier tier;                        // where they are
  std::uint32_t start = 0;          // position of the run's first block in its chain, in blocks
  SequenceHash parent = kNoParent;  // hash of the block before the run, or kNoParent
  Bytes hashes;                     // packed, 16 bytes a block, never empty
  Bytes slots;                      // packed little-endian u32, one a block, or empty
};

// Bytes have arrived in another tier, or from another instance.
struct BlocksMigrated {
  NamespaceId namespace_id;                     // whose blocks
  std::variant<Tier, std::string_view> source;  // the tier, or the instance (UTF-8, 1 to 255 bytes), they came from
  Tier target;                                  // where they are now
  bool kept;                                    // whether the source tier still holds them
  MigrateCause cause;                           // why they moved
  Bytes hashes;                                 // packed, never empty
  Bytes slots;                                  // in the target tier, or empty
};

// Residencies are withdrawn.
struct BlocksEvicted {
  NamespaceId namespace_id;  // whose blocks
  Tier tier;                 // where they were
  EvictReason reason;        // why
  Bytes hashes;              // packed, never empty
};

// Held at this very offset, as part of a snapshot.
struct ResidenciesListed {
  NamespaceId namespace_id;  // whose blocks
  Tier tier;                 // where they are
  std::uint32_t snapshot;    // the snapshot
  Bytes hashes;              // packed, never empty
  Bytes slots;               // packed, or empty
};

// What this tier neither listed nor gained since the snapshot began is not held.
struct SnapshotEnded {
  Tier tier;               // the tier
  std::uint32_t snapshot;  // the snapshot
  std::uint32_t count;     // blocks the snapshot listed in this tier
};

// The instance ended cleanly.
struct InstanceStopped {
  StopReason reason;  // why
};

// What tenants have used in a stretch of time.
struct UsageRecorded {
  Bytes report;  // as kvbm/core/codec.py draws it, from its flags on; proven good where it was read from a frame
};
inline constexpr std::size_t kUsageFieldBytes = 51;    // of a report, before its rows
inline constexpr std::size_t kUsageNumberBytes = 120;  // of a row, behind the tenant's name

using Event = std::variant<InstanceStarted, BlocksCreated, BlocksMigrated, BlocksEvicted, ResidenciesListed,
                           SnapshotEnded, InstanceStopped, UsageRecorded>;
inline constexpr std::size_t kEvicted = 3;  // number of BlocksEvicted in Event
static_assert(std::is_same_v<std::variant_alternative_t<kEvicted, Event>, BlocksEvicted>);

// 64 well-mixed bits of one residency; a digest is their sum modulo 2**64. Native implementation of residency_mix in
// kvbm/core/fold.py.
inline std::uint64_t residency_mix(Tier tier, const std::uint8_t* hash) noexcept {
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;
  const auto finalise = [](std::uint64_t value) {  // as SplitMix64 does
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
  };
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::memcpy(&low, hash, sizeof low);
  std::memcpy(&high, hash + sizeof low, sizeof high);
  return finalise(finalise(low + kGolden * (static_cast<std::uint64_t>(tier) + 1)) + high);
}

}  // namespace kvbm
