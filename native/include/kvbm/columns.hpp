// Frames as columns: a whole buffer of frames as a few arrays. Native implementation of kvbm/core/columns.py, which
// says what the fields mean. FrameColumns: made empty, filled once by decode_columns, then read or taken apart; one
// thread at a time. Names and starts point into the buffer that was read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

inline constexpr std::uint8_t kNoCode = 0xFF;
inline constexpr std::uint32_t kNoRow = 0xFFFFFFFF;
inline constexpr std::uint32_t kNoSlot = 0xFFFFFFFF;

// One frame, as FRAME_ROW.
struct FrameRow {
  std::uint64_t at;            // where the frame lies in the buffer
  std::uint64_t epoch;         // the instance's incarnation
  std::uint64_t first_offset;  // offset of its first event
  std::uint64_t wall_time_ns;  // when it was cut
  std::uint64_t digest;        // after its last event
  std::uint64_t first_event;   // its rows of `events` begin here
  std::uint32_t event_count;   // and are so many
  std::uint32_t instance;      // row of `names`
};
static_assert(sizeof(FrameRow) == 56 && std::is_trivially_copyable_v<FrameRow>);

// One event, as EVENT_ROW.
struct EventRow {
  std::uint8_t kind;            // as in the frame
  std::uint8_t tier;            // for BlocksMigrated the target
  std::uint8_t source;          // of BlocksMigrated, when a tier
  std::uint8_t code;            // reason or cause
  std::uint8_t has_slots;       // 0 or 1
  std::uint8_t kept;            // 0 or 1
  std::uint8_t unused[2];       // zero
  std::uint64_t offset;         // in the stream
  std::uint64_t first_block;    // its rows of `hashes` and `slots` begin here
  std::uint32_t frame;          // row of `frames`
  std::uint32_t count;          // its blocks; what SnapshotEnded counted
  std::uint32_t namespace_row;  // row of `namespaces`
  std::uint32_t start;          // of BlocksCreated
  std::uint32_t snapshot;       // of ResidenciesListed and SnapshotEnded
  std::uint32_t other;          // row of `names` or of `starts`
  SequenceHash parent;          // of BlocksCreated
};
static_assert(sizeof(EventRow) == 64 && std::is_trivially_copyable_v<EventRow>);

struct FrameColumns {
  // An InstanceStarted, not yet decoded.
  struct Start {
    Bytes blob;      // MessagePack of the struct
    std::size_t at;  // where its frame lies, for errors
  };

  std::vector<FrameRow> frames;            // in order
  std::vector<EventRow> events;            // in order
  std::unique_ptr<std::uint8_t[]> hashes;  // packed, of all runs; has room for more
  std::unique_ptr<std::uint32_t[]> slots;  // one a block, kNoSlot for those of a run without; has room for more
  std::size_t blocks = 0;                  // how many hashes and slots are set
  std::vector<NamespaceId> namespaces;     // distinct, in the order of their first use
  std::vector<std::string_view> names;     // of instances; distinct, in the order of their first use
  std::vector<Start> starts;               // in order
};

// Reads frames from `at` on, `limit` at most, into empty columns. Returns the position after them.
// Throws Error: as FrameReader, at the first frame it refuses; the columns then hold what came before the fault.
std::size_t decode_columns(Bytes data, std::size_t at, std::size_t limit, FrameColumns& columns);

}  // namespace kvbm
