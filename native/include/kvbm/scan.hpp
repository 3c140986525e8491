// The frames of a buffer, proven good but not taken apart. Native implementation of scan_frames in kvbm/core/codec.py.
// A pure function; any thread. What it returns points into the buffer and is valid as long as that is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/error.hpp"
#include "kvbm/event.hpp"

namespace kvbm {

// Blocks created, migrated, evicted and listed.
using BlockCounts = std::array<std::uint64_t, 4>;

// One whole frame.
struct ScannedFrame {
  FrameHeader header;         // what it says of itself
  std::size_t at = 0;         // where it begins in the buffer
  BlockCounts blocks{};       // blocks its events cover
  std::vector<Bytes> starts;  // MessagePack of each InstanceStarted in it, which only Python can prove
  std::string flaw;           // why it cannot be part of a stream, "" when it can; a start's epoch is not looked at
  std::size_t end() const noexcept { return at + header.frame_bytes; }
};

// What was read, and why reading ended early if it did.
struct FrameScan {
  std::vector<ScannedFrame> frames;  // in order, without gaps
  std::optional<Error> error;        // of the frame that begins where the last good one ends
  std::vector<Bytes> starts;         // of that frame, those before its first fault
};

// Reads a frame to its end. Throws Error as FrameReader does; `starts` has those before the fault then.
ScannedFrame scan_frame(FrameReader reader, std::size_t at, std::vector<Bytes>& starts);

// The whole frames from a position on, up to the buffer's end or the first that is not good.
FrameScan scan_frames(Bytes data, std::size_t at);

}  // namespace kvbm
