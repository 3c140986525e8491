// Frames: events ↔ bytes. Native implementation of kvbm/core/codec.py, whose docstring draws the layout.
// FrameReader: made over the bytes of one frame, `next` until it is empty, gone before those bytes. It allocates
// nothing. FrameWriter: made for one frame, events added, written once; the events' bytes stay the caller's until then.
// Both belong to one thread at a time. What a reader reads to its end, a writer writes to the same bytes again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

inline constexpr std::uint16_t kFrameVersion = 3;  // the newest that is read; the lowest that suffices is written
inline constexpr std::size_t kMaxFrameBytes = std::size_t{1} << 26;  // a length beyond this is damage, not a frame
inline constexpr std::size_t kMaxFrameNamespaces = 255;
inline constexpr std::size_t kFrameHeaderBytes = 48;   // before the instance's name
inline constexpr std::size_t kFrameChecksumBytes = 4;  // after the events
inline constexpr std::size_t kMaxNameBytes = 255;

// What a frame says of itself before its events.
struct FrameHeader {
  std::string_view instance;         // UTF-8, points into the frame
  std::uint64_t epoch = 0;           // the instance's incarnation
  std::uint64_t first_offset = 0;    // offset of the first event
  std::uint64_t wall_time_ns = 0;    // when the frame was cut, Unix time
  std::uint64_t digest = 0;          // of the instance's residencies after the last event
  std::uint32_t event_count = 0;     // events in the frame
  std::uint32_t frame_bytes = 0;     // the whole frame, checksum included
  std::uint16_t version = 1;         // of the format
  std::uint8_t namespace_count = 0;  // entries of the namespace table
};

// The header of the frame at a position, without proof that the rest is good.
// Throws Error: kNotAFrame, kNewerFrame, kTornFrame, kMalformedFrame.
FrameHeader decode_header(Bytes data, std::size_t at);

// Whether bytes are well-formed UTF-8 as Python decodes it: shortest forms only, no surrogates, at most U+10FFFF.
bool is_utf8(Bytes data) noexcept;

class FrameReader {
 public:
  // Reads the header and verifies the checksum of the frame at `at`.
  // Throws Error: what decode_header throws, kCorruptFrame, kMalformedFrame.
  FrameReader(Bytes data, std::size_t at);

  // The next event, or nothing after the last one, once the frame has proven canonical up to its end.
  // Throws Error: kMalformedFrame. The events before it were good, but the frame is not.
  std::optional<Event> next();

  const FrameHeader& header() const noexcept { return header_; }
  // Position after the frame.
  std::size_t end() const noexcept { return at_ + header_.frame_bytes; }

 private:
  Bytes take(std::size_t count);
  Bytes take_slots(std::uint32_t count, std::uint8_t flags);
  Bytes take_hashes(std::uint32_t count);
  std::string_view take_source_instance();
  NamespaceId namespace_at(std::uint8_t index);
  void read(InstanceStarted& event);
  void read(BlocksCreated& event);
  void read(BlocksMigrated& event);
  void read(BlocksEvicted& event);
  void read(ResidenciesListed& event);
  void read(SnapshotEnded& event);
  void read(InstanceStopped& event);
  void read(UsageRecorded& event);
  void finish();

  Bytes data_;                         // the caller's buffer
  std::size_t at_;                     // where the frame begins in data_
  FrameHeader header_;                 // its header
  std::size_t position_;               // next byte to read, in data_
  std::size_t end_;                    // where the checksum begins, in data_
  Bytes table_;                        // namespace ids, packed
  std::uint32_t events_read_ = 0;      // events returned so far
  std::uint32_t namespaces_seen_ = 0;  // table entries used so far, when they are used in order
  std::uint16_t version_ = 1;          // the lowest that suffices for the events so far
  bool in_order_ = true;               // whether the events have used the table in order so far
};

// The pieces a frame is written from, for who keeps events encoded while they wait. The pieces of one frame follow each
// other: write_head, write_event for each event, write_checksum, into exactly frame_bytes() bytes.

// Encoded size of an event. Throws Error: kLayout, when a run is empty or its slots do not count as its hashes.
std::size_t event_bytes(const Event& event);
// The namespace of an event that covers a run, else nullptr.
const NamespaceId* namespace_of(const Event& event) noexcept;
// The lowest version of a frame that suffices for an event.
std::uint16_t frame_version(const Event& event) noexcept;
// Writes event_bytes(event) bytes; namespace_index is its namespace's place in the frame's table. Returns where they
// end.
std::uint8_t* write_event(const Event& event, std::uint8_t namespace_index, std::uint8_t* out) noexcept;
// Bytes of a frame whose events have body_bytes. Throws Error: kLayout, when the name does not fit or the frame is too
// long.
std::size_t frame_bytes(const FrameHeader& header, std::size_t namespaces, std::size_t body_bytes);
// Writes header, name and namespace table; `out` is the whole frame. Returns where the events go.
std::uint8_t* write_head(const FrameHeader& header, std::size_t event_count, std::span<const NamespaceId> namespaces,
                         std::span<std::uint8_t> out) noexcept;
// Writes the checksum of everything before it.
void write_checksum(std::span<std::uint8_t> frame) noexcept;

class FrameWriter {
 public:
  // header: instance, epoch, first_offset, wall_time_ns and digest are written, the rest is computed.
  // event_count: how many events will come, as far as is known; room is made for them at once.
  // Throws Error: kLayout, when the name's length does not fit.
  explicit FrameWriter(const FrameHeader& header, std::size_t event_count = 0);

  // Adds an event. Throws Error: kLayout, when a run is empty, its slots do not count as its hashes, or a limit is
  // passed.
  void add(const Event& event);

  // Bytes the frame will have. Throws Error: kLayout, when there is no event or the frame is too long.
  std::size_t frame_bytes() const;

  // Writes the frame into exactly frame_bytes() bytes.
  void write(std::span<std::uint8_t> out) const;

 private:
  std::uint8_t namespace_index(const NamespaceId& id) const noexcept;
  void register_namespace(const NamespaceId& id);

  FrameHeader header_;                   // what the frame says of itself
  std::vector<Event> events_;            // in order
  std::vector<NamespaceId> namespaces_;  // in the order the events first use them
  std::size_t body_bytes_ = 0;           // encoded size of events_
};

}  // namespace kvbm
