#include "kvbm/scan.hpp"

#include <iterator>
#include <utility>
#include <variant>

namespace kvbm {

namespace {

// By the alternative of Event.
constexpr const char* kEventNames[] = {"InstanceStarted",   "BlocksCreated", "BlocksMigrated",  "BlocksEvicted",
                                       "ResidenciesListed", "SnapshotEnded", "InstanceStopped", "UsageRecorded"};
static_assert(std::size(kEventNames) == std::variant_size_v<Event>);

}  // namespace

ScannedFrame scan_frame(FrameReader reader, std::size_t at, std::vector<Bytes>& starts) {
  ScannedFrame frame;
  frame.header = reader.header();
  frame.at = at;
  frame.flaw = frame.header.epoch == 0 ? "epoch 0 does not exist" : "";
  for (std::uint32_t index = 0;; ++index) {
    const std::optional<Event> event = reader.next();
    if (!event) {
      return frame;
    }
    const bool is_first = frame.header.first_offset == 0 && index == 0;
    if (std::holds_alternative<InstanceStarted>(*event) != is_first && frame.flaw.empty()) {
      frame.flaw = "event " + std::to_string(index) + " is " + kEventNames[event->index()] +
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
    } else if (const auto* const listed = std::get_if<ResidenciesListed>(&*event)) {
      frame.blocks[3] += listed->hashes.size() / kHashBytes;
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
