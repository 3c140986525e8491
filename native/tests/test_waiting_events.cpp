#include "kvbm/waiting_events.hpp"

#include "check.hpp"
#include "frames.hpp"

using namespace kvbm;
using tests::frame_of;

namespace {

using Buffer = std::vector<std::uint8_t>;

std::uint32_t events_in(const Buffer& frame) {
  std::uint32_t count = 0;
  tests::each_event(frame, [&](const auto&) { ++count; });
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
      BlocksEvicted event{
          .namespace_id = {}, .tier = Tier::kObject, .reason = EvictReason::kTtl, .hashes = Bytes(hash)};
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
