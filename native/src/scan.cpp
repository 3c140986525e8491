#include "kvbm/scan.hpp"

#include <iterator>
#include <utility>
#include <variant>

namespace kvbm {

namespace {

// By the alternative of Event.
constexpr const char* kEventNames[] = {"InstanceStarted", "BlocksCreated", "BlocksMigrated",  "BlocksEvicted",
                                       "ResidenciesStated", "RoundEnded",    "InstanceStopped"};
static_assert(std::size(kEventNames) == std::variant_size_v<Event>);

// The offset of an event; of the last frame there can be, it takes more than 64 bits.
std::string decimal_offset(std::uint64_t first, std::uint64_t index) {
  __extension__ using Wide = unsigned __int128;
  const Wide offset = Wide{first} + index;
  if (offset >> 64 == 0) {
    return std::to_string(static_cast<std::uint64_t>(offset));
  }
  return std::to_string(static_cast<std::uint64_t>(offset / 10)) + static_cast<char>('0' + static_cast<int>(offset % 10));
}

}  // namespace

ScannedFrame scan_frame(FrameReader reader, std::size_t at, std::vector<Bytes>& starts) {
  ScannedFrame frame;
  frame.header = reader.header();
  frame.at = at;
  frame.flaw = frame.header.epoch == 0 ? "epoch 0 does not exist" : "";
  for (std::uint64_t index = 0;; ++index) {
    const std::optional<Event> event = reader.next();
    if (!event) {
      return frame;
    }
    const bool is_first = index == 0 && frame.header.first_offset == 0;
    if (std::holds_alternative<InstanceStarted>(*event) != is_first && frame.flaw.empty()) {
      frame.flaw = "offset " + decimal_offset(frame.header.first_offset, index) + " is " + kEventNames[event->index()] +
                   "; InstanceStarted is at offset 0 alone";
    }
    if (const auto* const start = std::get_if<InstanceStarted>(&*event)) {
      starts.push_back(start->blob);
    } else if (const auto* const created = std::get_if<BlocksCreated>(&*event)) {
      frame.blocks[0] += created->hashes.size() / kHashBytes;
    } else if (const auto* const migrated = std::get_if<BlocksMigrated>(&*event)) {
      frame.blocks[1] += migrated->hashes.size() / kHashBytes;
    } else if (const auto* const evicted = std::get_if<BlocksEvicted>(&*event)) {
      frame.blocks[2] += evicted->hashes.size() / kHashBytes;
    } else if (const auto* const stated = std::get_if<ResidenciesStated>(&*event)) {
      frame.blocks[3] += stated->hashes.size() / kHashBytes;
    }
  }
}

FrameScan scan_frames(Bytes data, std::size_t at) {
  FrameScan scan;
  try {
    while (at < data.size()) {
      ScannedFrame frame = scan_frame(FrameReader(data, at), at, scan.starts);
      frame.starts = std::exchange(scan.starts, {});
      at = frame.end();
      scan.frames.push_back(std::move(frame));
    }
  } catch (const Error& error) {
    scan.error = error;
  }
  return scan;
}

}  // namespace kvbm
