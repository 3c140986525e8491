#include "kvbm/columns.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <variant>

#include "kvbm/codec.hpp"

namespace kvbm {
namespace {

bool same(std::string_view one, std::string_view other) noexcept { return one == other; }

bool same(const NamespaceId& one, const NamespaceId& other) noexcept {
  return std::memcmp(one.data(), other.data(), kHashBytes) == 0;  // of a known size: two comparisons, not a call
}

// Rows of distinct values, in the order they come. A tree, because the values are anybody's to choose.
template <class Value>
class Rows {
 public:
  explicit Rows(std::vector<Value>& values) noexcept : values_(values) {}

  std::uint32_t row_of(const Value& value) {
    if (values_.empty() || !same(value, values_[last_])) {
      const auto [found, is_new] = rows_.try_emplace(value, static_cast<std::uint32_t>(values_.size()));
      if (is_new) {
        values_.push_back(value);
      }
      last_ = found->second;
    }
    return last_;
  }

 private:
  std::vector<Value>& values_;           // the column
  std::map<Value, std::uint32_t> rows_;  // where each is in it
  std::uint32_t last_ = 0;               // the row given last; mostly it is wanted again
};

// Adds events to columns, one kind at a time.
class EventAdder {
 public:
  explicit EventAdder(FrameColumns& columns) noexcept
      : columns_(columns), namespaces_(columns.namespaces), names_(columns.names) {}

  void begin_frame(const FrameHeader& header, std::size_t at) {
    columns_.frames.push_back({.at = at,
                               .epoch = header.epoch,
                               .first_offset = header.first_offset,
                               .wall_time_ns = header.wall_time_ns,
                               .digest = header.digest,
                               .first_event = columns_.events.size(),
                               .event_count = header.event_count,
                               .instance = names_.row_of(header.instance)});
    at_ = at;
    offset_ = header.first_offset;
  }

  void operator()(const InstanceStarted& event) {
    EventRow& row = add(1, kNoCode);
    row.other = static_cast<std::uint32_t>(columns_.starts.size());
    columns_.starts.push_back({.blob = event.blob, .at = at_});
  }

  void operator()(const BlocksCreated& event) {
    EventRow& row = add(2, static_cast<std::uint8_t>(event.tier));
    row.start = event.start;
    row.parent = event.parent;
    add_run(row, event.namespace_id, event.hashes, event.slots);
  }

  void operator()(const BlocksMigrated& event) {
    EventRow& row = add(3, static_cast<std::uint8_t>(event.target));
    if (const auto* const tier = std::get_if<Tier>(&event.source)) {
      row.source = static_cast<std::uint8_t>(*tier);
    } else {
      row.other = names_.row_of(std::get<std::string_view>(event.source));
    }
    row.code = static_cast<std::uint8_t>(event.cause);
    row.kept = event.kept ? 1 : 0;
    add_run(row, event.namespace_id, event.hashes, event.slots);
  }

  void operator()(const BlocksEvicted& event) {
    EventRow& row = add(4, static_cast<std::uint8_t>(event.tier));
    row.code = static_cast<std::uint8_t>(event.reason);
    add_run(row, event.namespace_id, event.hashes, {});
  }

  void operator()(const ResidenciesListed& event) {
    EventRow& row = add(5, static_cast<std::uint8_t>(event.tier));
    row.snapshot = event.snapshot;
    add_run(row, event.namespace_id, event.hashes, event.slots);
  }

  void operator()(const SnapshotEnded& event) {
    EventRow& row = add(6, static_cast<std::uint8_t>(event.tier));
    row.snapshot = event.snapshot;
    row.count = event.count;
  }

  void operator()(const InstanceStopped& event) { add(7, kNoCode).code = static_cast<std::uint8_t>(event.reason); }

  void operator()(const UsageRecorded&) { add(8, kNoCode); }

 private:
  EventRow& add(std::uint8_t kind, std::uint8_t tier) {
    // zero, and then set where it lies: a copy would wait for its stores
    EventRow& row = columns_.events.emplace_back();
    row.kind = kind;
    row.tier = tier;
    row.source = kNoCode;
    row.code = kNoCode;
    row.offset = offset_++;
    row.first_block = columns_.blocks;
    row.frame = static_cast<std::uint32_t>(columns_.frames.size() - 1);
    row.namespace_row = kNoRow;
    row.other = kNoRow;
    return row;
  }

  void add_run(EventRow& row, const NamespaceId& id, Bytes hashes, Bytes slots) {
    const std::size_t count = hashes.size() / kHashBytes;
    row.namespace_row = namespaces_.row_of(id);
    row.count = static_cast<std::uint32_t>(count);
    row.has_slots = slots.empty() ? 0 : 1;
    std::memcpy(columns_.hashes.get() + columns_.blocks * kHashBytes, hashes.data(), hashes.size());
    std::uint32_t* const to = columns_.slots.get() + columns_.blocks;
    if (slots.empty()) {
      std::fill_n(to, count, kNoSlot);
    } else {
      std::memcpy(to, slots.data(), slots.size());
    }
    columns_.blocks += count;
  }

  FrameColumns& columns_;         // what is filled
  Rows<NamespaceId> namespaces_;  // their rows
  Rows<std::string_view> names_;  // their rows
  std::size_t at_ = 0;            // where the frame lies
  std::uint64_t offset_ = 0;      // of the next event
};

}  // namespace

std::size_t decode_columns(Bytes data, std::size_t at, std::size_t limit, FrameColumns& columns) {
  const std::size_t left = data.size() - std::min(at, data.size());
  const std::size_t readable = limit < left / kMaxFrameBytes ? limit * kMaxFrameBytes : left;
  const std::size_t most_blocks = readable / kHashBytes;  // each has its hash there; pages not needed are never touched
  columns.hashes = std::make_unique_for_overwrite<std::uint8_t[]>(most_blocks * kHashBytes);
  columns.slots = std::make_unique_for_overwrite<std::uint32_t[]>(most_blocks);
  EventAdder add(columns);
  for (std::size_t count = 0; count < limit && at < data.size(); ++count) {
    FrameReader reader(data, at);
    add.begin_frame(reader.header(), at);
    while (const std::optional<Event> event = reader.next()) {
      std::visit(add, *event);
    }
    at = reader.end();
    if (count == 0) {  // the other frames will be like it; never more room than the frames have themselves
      const std::size_t alike = readable / reader.header().frame_bytes;
      columns.events.reserve(std::min(columns.events.size() * alike, readable / sizeof(EventRow)));
    }
  }
  return at;
}

}  // namespace kvbm
