#include "kvbm/waiting_events.hpp"

#include <algorithm>

#include "check.hpp"
#include "kvbm/codec.hpp"

using namespace kvbm;

namespace {

using Buffer = std::vector<std::uint8_t>;

// The frame a body becomes, as one that takes it would write it.
Buffer frame_of(const FrameBody& body) {
  FrameHeader header;
  header.instance = "i";
  header.first_offset = body.first_offset;
  header.digest = body.digest;
  Buffer out(frame_bytes(header, body.namespaces.size(), body.used));
  std::uint8_t* const at = write_head(header, body.event_count, body.namespaces, out);
  std::copy_n(body.bytes.data(), body.used, at);
  write_checksum(out);
  return out;
}

// Reads a frame to its end, which proves it canonical.
std::uint32_t events_in(const Buffer& frame) {
  FrameReader reader(frame, 0);
  std::uint32_t count = 0;
  while (reader.next()) {
    ++count;
  }
  return count;
}

void frames_are_cut_at_their_size() {
  WaitingEvents waiting;
  const Buffer hashes(1024 * kHashBytes);
  const BlocksEvicted event{
      .namespace_id = {}, .tier = Tier::kHbm, .reason = EvictReason::kTtl, .hashes = Bytes(hashes)};
  for (std::uint64_t offset = 0; offset < 9; ++offset) {
    waiting.add(event, event_bytes(event), 0, offset);
    waiting.set_digest(100 + offset);
  }
  // 32 + 16 384 bytes each by the estimate: the fourth reaches 64 KiB, the fifth begins the next frame.
  CHECK(waiting.bodies().size() == 3);
  CHECK(waiting.bodies()[1].first_offset == 4 && waiting.bodies()[1].digest == 107);
  std::uint64_t offset = 0;
  for (const FrameBody& body : waiting.bodies()) {
    CHECK(body.first_offset == offset);
    offset += events_in(frame_of(body));
  }
  CHECK(offset == 9);
}

void frames_are_cut_before_a_256th_namespace() {
  WaitingEvents waiting;
  const Buffer hash(kHashBytes);
  for (std::uint32_t snapshot = 0; snapshot < 3; ++snapshot) {  // the same bodies serve again after each clear
    for (std::uint32_t index = 0; index < 300; ++index) {
      BlocksEvicted event{.namespace_id = {}, .tier = Tier::kObject, .reason = EvictReason::kTtl, .hashes = Bytes(hash)};
      event.namespace_id[0] = static_cast<std::uint8_t>(index);
      event.namespace_id[1] = static_cast<std::uint8_t>(index >> 8);
      waiting.add(event, event_bytes(event), index, index);
      waiting.add(event, event_bytes(event), index, index);
    }
    CHECK(waiting.bodies().size() == 2);
    CHECK(waiting.bodies()[0].namespaces.size() == 255 && waiting.bodies()[1].namespaces.size() == 45);
    CHECK(events_in(frame_of(waiting.bodies()[0])) == 510 && events_in(frame_of(waiting.bodies()[1])) == 90);
    waiting.clear();
    CHECK(waiting.bodies().empty());
  }
}

}  // namespace

int main() {
  return tests::run({{"a frame ends when its events have reached 64 KiB", frames_are_cut_at_their_size},
                     {"a frame ends before a namespace too many", frames_are_cut_before_a_256th_namespace}});
}
