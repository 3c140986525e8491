// Frames of what waits in a ledger, as Python's bytes. GIL held.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kvbm/waiting_events.hpp"
#include "python.hpp"

namespace kvbm::bindings {

// header: instance, epoch and time; the rest is the frame's.
inline nb::bytes framed(const FrameBody& body, FrameHeader header) {
  header.first_offset = body.first_offset;
  header.digest = body.digest;
  header.version = body.version;
  const nb::bytes data = new_bytes(frame_bytes(header, body.namespaces.size(), body.used));
  const std::span<std::uint8_t> out = writable(data);
  std::uint8_t* const events = write_head(header, body.event_count, body.namespaces, out);
  std::copy_n(body.bytes.data(), body.used, events);
  write_checksum(out);
  return data;
}

}  // namespace kvbm::bindings
