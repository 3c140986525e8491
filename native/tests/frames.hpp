// What waits to be sent, as the frames it becomes, for tests. One thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/waiting_events.hpp"

namespace kvbm::tests {

// The frame a body becomes, as one that takes it would write it.
inline std::vector<std::uint8_t> frame_of(const FrameBody& body) {
  FrameHeader header;
  header.instance = "i";
  header.first_offset = body.first_offset;
  header.digest = body.digest;
  header.version = body.version;
  std::vector<std::uint8_t> out(frame_bytes(header, body.namespaces.size(), body.used));
  std::copy_n(body.bytes.data(), body.used, write_head(header, body.event_count, body.namespaces, out));
  write_checksum(out);
  return out;
}

// Calls `see` with each event of a frame, to its end, which proves it canonical.
template <class See>
void each_event(const std::vector<std::uint8_t>& frame, See&& see) {
  FrameReader reader(frame, 0);
  while (const auto event = reader.next()) {
    see(*event);
  }
}

}  // namespace kvbm::tests
