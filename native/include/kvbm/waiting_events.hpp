// WaitingEvents: events from being recorded until they are taken as frames. Each is encoded once, into the body of the
// frame it will be in; the cutting rule is that of `cut_frames` in kvbm/core/codec.py. Bodies are kept for reuse: once
// as many have been filled as ever wait at a time, nothing allocates. Owner thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvbm/codec.hpp"
#include "kvbm/event.hpp"
#include "kvbm/namespace_table.hpp"

namespace kvbm {

// A frame is cut once its events reach this size
inline constexpr std::size_t kFrameEventBytes = std::size_t{64} << 10;

// A frame but for its head and its checksum.
struct FrameBody {
  std::vector<std::uint8_t> bytes;      // encoded events, and room for more
  std::size_t used = 0;                 // bytes of them that are set
  std::size_t estimated_bytes = 0;      // what decides where the frame ends
  std::uint64_t first_offset = 0;       // of its first event
  std::uint32_t event_count = 0;        // events in it
  std::uint64_t digest = 0;             // after its last event
  std::uint16_t version = 1;            // the lowest that suffices for its events
  std::vector<NamespaceId> namespaces;  // in the order its events first use them
};

class WaitingEvents {
 public:
  // Adds the event at an offset. encoded_bytes: event_bytes(event). namespace_index: of its namespace in the ledger's
  // table, if it has one. started_namespaces: how many an InstanceStarted names. What follows is `set_digest`. Throws
  // std::bad_alloc; nothing has changed then.
  void add(const Event& event, std::size_t encoded_bytes, std::uint32_t namespace_index, std::uint64_t offset,
           std::size_t started_namespaces = 0);
  // The digest after the event added last.
  void set_digest(std::uint64_t digest) noexcept { bodies_[used_ - 1].digest = digest; }

  // The frames that wait, in order.
  std::span<const FrameBody> bodies() const noexcept { return {bodies_.data(), used_}; }
  // They were taken.
  void clear() noexcept { used_ = 0; }
  // Gives back the memory of spare frames, but for so many in all.
  void shrink(std::size_t most) noexcept {
    while (bodies_.size() > most && bodies_.size() > used_) {
      bodies_.pop_back();
    }
  }

 private:
  // Where a namespace stands in the table of the frame that used it last.
  struct Place {
    std::uint64_t frame = 0;  // the frame, as frames_begun_ counts
    std::uint8_t index = 0;   // in its table
  };

  // The next body to be used, empty.
  FrameBody& spare();

  std::vector<FrameBody> bodies_;   // those that wait, then spare ones
  std::size_t used_ = 0;            // how many wait
  std::uint64_t frames_begun_ = 0;  // so far
  std::vector<Place> places_;       // by namespace index
};

}  // namespace kvbm
