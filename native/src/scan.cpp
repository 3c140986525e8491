#include "kvbm/scan.hpp"

#include <utility>
#include <variant>

namespace kvbm {

ScannedFrame scan_frame(FrameReader reader, std::size_t at, std::vector<Bytes>& starts) {
  ScannedFrame frame;
  frame.header = reader.header();
  frame.at = at;
  while (const std::optional<Event> event = reader.next()) {
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
  return frame;
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
