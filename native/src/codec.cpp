#include "kvbm/codec.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>

#include "kvbm/checksum.hpp"
#include "kvbm/error.hpp"

namespace kvbm {
namespace {

constexpr std::uint8_t kMagic[4] = {'K', 'V', 'B', 'M'};

constexpr std::uint8_t kFlagSlots = 1;
constexpr std::uint8_t kFlagParent = 2;
constexpr std::uint8_t kFlagKept = 4;
constexpr std::uint8_t kFlagLast = 1;        // of a UsageRecorded
constexpr std::size_t kMaxUsageRows = 1024;  // of one; kvbm/core/events.py has it too
constexpr std::uint8_t kFromInstance = 255;

// Encoded bytes of each kind of event, its kind included, before its variable part.
constexpr std::size_t kStartedBytes = 5;
constexpr std::size_t kCreatedBytes = 12;
constexpr std::size_t kMigratedBytes = 10;
constexpr std::size_t kEvictedBytes = 8;
constexpr std::size_t kListedBytes = 12;
constexpr std::size_t kSnapshotEndedBytes = 10;
constexpr std::size_t kStoppedBytes = 2;

enum class Kind : std::uint8_t {
  kStarted = 1,
  kCreated = 2,
  kMigrated = 3,
  kEvicted = 4,
  kListed = 5,
  kSnapshotEnded = 6,
  kStopped = 7,
  kUsage = 8,
};

template <class Value>
Value load(const std::uint8_t* at) noexcept {
  Value value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

bool is_no_parent(const std::uint8_t* hash) noexcept {
  return (load<std::uint64_t>(hash) | load<std::uint64_t>(hash + 8)) == 0;
}

std::string hex(std::uint32_t value, const char* format) {
  char text[16];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

Error malformed(std::size_t at, const std::string& why) { return {ErrorCode::kMalformedFrame, why, at}; }

template <class Member>
Member member(std::uint8_t value, std::uint8_t count, const char* name, std::size_t at) {
  if (value >= count) {
    throw malformed(at, std::string(name) + " " + std::to_string(value) + " does not exist");
  }
  return static_cast<Member>(value);
}

Tier tier_of(std::uint8_t value, std::size_t at) { return member<Tier>(value, kTierCount, "Tier", at); }

void check_flags(std::uint8_t flags, std::uint8_t known, std::size_t at) {
  if ((flags & ~known) != 0) {
    throw malformed(at, "unknown flags " + hex(flags, "%#x"));
  }
}

// Appends fields to a buffer that was sized for them.
class Pen {
 public:
  explicit Pen(std::uint8_t* at) noexcept : at_(at) {}

  template <class Integer>
  void number(Integer value) noexcept {
    static_assert(std::is_unsigned_v<Integer>);
    std::memcpy(at_, &value, sizeof value);
    at_ += sizeof value;
  }

  template <class Enum>
  void code(Enum value) noexcept {
    number(static_cast<std::uint8_t>(value));
  }

  void bytes(Bytes data) noexcept {
    if (!data.empty()) {
      std::memcpy(at_, data.data(), data.size());
      at_ += data.size();
    }
  }

  void text(std::string_view data) noexcept {
    bytes({reinterpret_cast<const std::uint8_t*>(data.data()), data.size()});
  }

  std::uint8_t* at() const noexcept { return at_; }

 private:
  std::uint8_t* at_;  // where the next field goes
};

std::uint32_t block_count(Bytes hashes) noexcept { return static_cast<std::uint32_t>(hashes.size() / kHashBytes); }

void check_run(Bytes hashes, Bytes slots) {
  if (hashes.empty() || hashes.size() % kHashBytes != 0) {
    throw Error(ErrorCode::kLayout, "a run of " + std::to_string(hashes.size()) +
                                        " bytes of hashes; it needs a positive multiple of " +
                                        std::to_string(kHashBytes));
  }
  const std::size_t count = hashes.size() / kHashBytes;
  if (!slots.empty() && slots.size() != count * kSlotBytes) {
    throw Error(ErrorCode::kLayout, std::to_string(slots.size()) + " bytes of slots for " + std::to_string(count) +
                                        " blocks; give " + std::to_string(kSlotBytes) + " a block, or none");
  }
}

void check_name(std::string_view name, const char* whose) {
  if (name.empty() || name.size() > kMaxNameBytes) {
    throw Error(ErrorCode::kLayout, std::string(whose) + " has " + std::to_string(name.size()) +
                                        " bytes; it needs 1 to " + std::to_string(kMaxNameBytes));
  }
}

// A new event of a kind, where next() returns it from.
template <class Kind>
Kind& emplaced(std::optional<Event>& event) noexcept {
  return *std::get_if<Kind>(&event.emplace(std::in_place_type<Kind>));
}

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;  // clang deduces aggregates by itself only from 17 on

}  // namespace

bool is_utf8(Bytes data) noexcept {
  std::size_t at = 0;
  while (at < data.size()) {
    const std::uint8_t lead = data[at];
    if (lead < 0x80) {
      ++at;
      continue;
    }
    // How many bytes follow, and the range the first of them must lie in; the others lie in 80..BF.
    std::size_t more = 0;
    std::uint8_t low = 0x80;
    std::uint8_t high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      more = 1;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      more = 2;
      low = lead == 0xE0 ? 0xA0 : 0x80;
      high = lead == 0xED ? 0x9F : 0xBF;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      more = 3;
      low = lead == 0xF0 ? 0x90 : 0x80;
      high = lead == 0xF4 ? 0x8F : 0xBF;
    } else {
      return false;
    }
    if (data.size() - at <= more || data[at + 1] < low || data[at + 1] > high) {
      return false;
    }
    for (std::size_t index = 2; index <= more; ++index) {
      if ((data[at + index] & 0xC0) != 0x80) {
        return false;
      }
    }
    at += more + 1;
  }
  return true;
}

FrameHeader decode_header(Bytes data, std::size_t at) {
  const std::size_t left = at < data.size() ? data.size() - at : 0;
  const std::uint8_t* const frame = data.data() + std::min(at, data.size());
  if (const std::size_t known = std::min(left, sizeof kMagic); known > 0 && std::memcmp(frame, kMagic, known) != 0) {
    throw Error(ErrorCode::kNotAFrame, "no frame begins here", at);
  }
  if (left < kFrameHeaderBytes) {
    throw Error(ErrorCode::kTornFrame,
                std::to_string(left) + " bytes are left, a header has " + std::to_string(kFrameHeaderBytes), at);
  }
  const auto version = load<std::uint16_t>(frame + 4);
  if (version > kFrameVersion) {
    throw Error::newer_frame(at, version, kFrameVersion);
  }
  if (version == 0) {
    throw malformed(at, "frame version 0 does not exist");
  }
  const std::size_t name_bytes = frame[6];
  const std::size_t least = kFrameHeaderBytes + name_bytes + kFrameChecksumBytes;
  FrameHeader header;
  header.version = version;
  header.namespace_count = frame[7];
  header.frame_bytes = load<std::uint32_t>(frame + 8);
  header.event_count = load<std::uint32_t>(frame + 12);
  header.epoch = load<std::uint64_t>(frame + 16);
  header.first_offset = load<std::uint64_t>(frame + 24);
  header.wall_time_ns = load<std::uint64_t>(frame + 32);
  header.digest = load<std::uint64_t>(frame + 40);
  if (header.frame_bytes < least || header.frame_bytes > kMaxFrameBytes) {
    throw malformed(at, "a frame of " + std::to_string(header.frame_bytes) + " bytes; " + std::to_string(least) +
                            " to " + std::to_string(kMaxFrameBytes) + " are possible");
  }
  if (left < kFrameHeaderBytes + name_bytes) {
    throw Error(ErrorCode::kTornFrame,
                std::to_string(left) + " of " + std::to_string(header.frame_bytes) + " bytes are there", at);
  }
  const Bytes name(frame + kFrameHeaderBytes, name_bytes);
  if (!is_utf8(name)) {
    throw malformed(at, "the instance's name is not UTF-8");
  }
  header.instance = {reinterpret_cast<const char*>(name.data()), name.size()};
  return header;
}

// -- reading ----------------------------------------------------------------------------------------------------------

FrameReader::FrameReader(Bytes data, std::size_t at) : data_(data), at_(at), header_(decode_header(data, at)) {
  if (data_.size() - at_ < header_.frame_bytes) {
    throw Error(ErrorCode::kTornFrame,
                std::to_string(data_.size() - at_) + " of " + std::to_string(header_.frame_bytes) + " bytes are there",
                at_);
  }
  end_ = at_ + header_.frame_bytes - kFrameChecksumBytes;
  const auto stored = load<std::uint32_t>(data_.data() + end_);
  const std::uint32_t computed = crc32c(data_.subspan(at_, end_ - at_));
  if (stored != computed) {
    throw Error(ErrorCode::kCorruptFrame,
                "checksum " + hex(computed, "%08x") + " of the bytes, " + hex(stored, "%08x") + " in the frame", at_);
  }
  if (header_.instance.empty() || header_.event_count == 0) {
    throw malformed(at_, "a frame needs an instance and at least one event");
  }
  position_ = at_ + kFrameHeaderBytes + header_.instance.size();
  table_ = take(header_.namespace_count * kHashBytes);
}

Bytes FrameReader::take(std::size_t count) {
  if (count > end_ - position_) {
    throw malformed(at_, "an event is longer than its frame");
  }
  const Bytes piece = data_.subspan(position_, count);
  position_ += count;
  return piece;
}

Bytes FrameReader::take_hashes(std::uint32_t count) {
  if (count == 0) {
    throw malformed(at_, "a run without blocks");
  }
  return take(std::size_t{count} * kHashBytes);
}

Bytes FrameReader::take_slots(std::uint32_t count, std::uint8_t flags) {
  return (flags & kFlagSlots) != 0 ? take(std::size_t{count} * kSlotBytes) : Bytes{};
}

NamespaceId FrameReader::namespace_at(std::uint8_t index) {
  if (index >= header_.namespace_count) {
    throw malformed(at_, "namespace " + std::to_string(index) + " of " + std::to_string(header_.namespace_count));
  }
  if (index == namespaces_seen_) {
    ++namespaces_seen_;
  } else if (index > namespaces_seen_) {
    in_order_ = false;
  }
  return load<NamespaceId>(table_.data() + index * kHashBytes);
}

std::optional<Event> FrameReader::next() {
  std::optional<Event> event;  // filled in place: copying one waits for the stores that made it
  if (events_read_ == header_.event_count) {
    finish();
    return event;
  }
  if (position_ >= end_) {
    throw malformed(at_, "fewer events than the header says");
  }
  ++events_read_;
  const std::uint8_t kind = data_[position_];
  switch (static_cast<Kind>(kind)) {
    case Kind::kStarted:
      read(emplaced<InstanceStarted>(event));
      return event;
    case Kind::kCreated:
      read(emplaced<BlocksCreated>(event));
      return event;
    case Kind::kMigrated:
      read(emplaced<BlocksMigrated>(event));
      return event;
    case Kind::kEvicted:
      read(emplaced<BlocksEvicted>(event));
      return event;
    case Kind::kListed:
      read(emplaced<ResidenciesListed>(event));
      return event;
    case Kind::kSnapshotEnded:
      read(emplaced<SnapshotEnded>(event));
      return event;
    case Kind::kStopped:
      read(emplaced<InstanceStopped>(event));
      return event;
    case Kind::kUsage:
      read(emplaced<UsageRecorded>(event));
      return event;
  }
  throw malformed(at_, "event kind " + std::to_string(kind) + " does not exist");
}

void FrameReader::read(InstanceStarted& event) {
  const Bytes fields = take(kStartedBytes);
  event.blob = take(load<std::uint32_t>(fields.data() + 1));
  version_ = std::max(version_, frame_version(event));
}

void FrameReader::read(BlocksCreated& event) {
  // fields: [0] kind, [1] namespace, [2] tier, [3] flags, [4, 8) start, [8, 12) count
  const Bytes fields = take(kCreatedBytes);
  const std::uint8_t flags = fields[3];
  check_flags(flags, kFlagSlots | kFlagParent, at_);
  if ((flags & kFlagParent) != 0) {
    const Bytes parent = take(kHashBytes);
    if (is_no_parent(parent.data())) {
      throw malformed(at_, "a parent that is no parent");
    }
    event.parent = load<SequenceHash>(parent.data());
  }
  const auto count = load<std::uint32_t>(fields.data() + 8);
  event.hashes = take_hashes(count);
  event.slots = take_slots(count, flags);
  event.namespace_id = namespace_at(fields[1]);
  event.tier = tier_of(fields[2], at_);
  event.start = load<std::uint32_t>(fields.data() + 4);
}

void FrameReader::read(BlocksMigrated& event) {
  // fields: [0] kind, [1] namespace, [2] source, [3] target, [4] flags, [5] cause, [6, 10) count
  const Bytes fields = take(kMigratedBytes);
  const std::uint8_t flags = fields[4];
  check_flags(flags, kFlagSlots | kFlagKept, at_);
  if (fields[2] == kFromInstance) {
    event.source = take_source_instance();
  } else {
    event.source = tier_of(fields[2], at_);
  }
  const auto count = load<std::uint32_t>(fields.data() + 6);
  event.hashes = take_hashes(count);
  event.slots = take_slots(count, flags);
  event.namespace_id = namespace_at(fields[1]);
  event.target = tier_of(fields[3], at_);
  event.kept = (flags & kFlagKept) != 0;
  event.cause = member<MigrateCause>(fields[5], kMigrateCauseCount, "MigrateCause", at_);
}

std::string_view FrameReader::take_source_instance() {
  const std::size_t length = take(1)[0];
  const Bytes name = take(length);
  if (!is_utf8(name)) {
    throw malformed(at_, "the source instance's name is not UTF-8");
  }
  if (name.empty()) {
    throw malformed(at_, "the source instance has no name");
  }
  return {reinterpret_cast<const char*>(name.data()), name.size()};
}

void FrameReader::read(BlocksEvicted& event) {
  // fields: [0] kind, [1] namespace, [2] tier, [3] reason, [4, 8) count
  const Bytes fields = take(kEvictedBytes);
  event.hashes = take_hashes(load<std::uint32_t>(fields.data() + 4));
  event.namespace_id = namespace_at(fields[1]);
  event.tier = tier_of(fields[2], at_);
  event.reason = member<EvictReason>(fields[3], kEvictReasonCount, "EvictReason", at_);
}

void FrameReader::read(ResidenciesListed& event) {
  // fields: [0] kind, [1] namespace, [2] tier, [3] flags, [4, 8) snapshot, [8, 12) count
  const Bytes fields = take(kListedBytes);
  const std::uint8_t flags = fields[3];
  check_flags(flags, kFlagSlots, at_);
  const auto count = load<std::uint32_t>(fields.data() + 8);
  event.hashes = take_hashes(count);
  event.slots = take_slots(count, flags);
  event.namespace_id = namespace_at(fields[1]);
  event.tier = tier_of(fields[2], at_);
  event.snapshot = load<std::uint32_t>(fields.data() + 4);
}

void FrameReader::read(SnapshotEnded& event) {
  // fields: [0] kind, [1] tier, [2, 6) snapshot, [6, 10) count
  const Bytes fields = take(kSnapshotEndedBytes);
  event.tier = tier_of(fields[1], at_);
  event.snapshot = load<std::uint32_t>(fields.data() + 2);
  event.count = load<std::uint32_t>(fields.data() + 6);
}

void FrameReader::read(InstanceStopped& event) {
  const Bytes fields = take(kStoppedBytes);
  event.reason = member<StopReason>(fields[1], kStopReasonCount, "StopReason", at_);
}

void FrameReader::read(UsageRecorded& event) {
  // fields: [0] flags, [1, 3) rows, [3, 11) since, [11, 19) until, [19, 51) bytes of a block by tier
  take(1);
  const std::size_t begin = position_;
  const Bytes fields = take(kUsageFieldBytes);
  check_flags(fields[0], kFlagLast, at_);
  if (load<std::uint64_t>(fields.data() + 11) < load<std::uint64_t>(fields.data() + 3)) {
    throw malformed(at_, "a usage ends before it begins");
  }
  const std::size_t rows = load<std::uint16_t>(fields.data() + 1);
  if (rows > kMaxUsageRows) {
    throw malformed(at_,
                    "a usage of " + std::to_string(rows) + " rows; at most " + std::to_string(kMaxUsageRows) + " fit");
  }
  Bytes before;
  for (std::size_t row = 0; row < rows; ++row) {
    const Bytes tenant = take(take(1)[0]);
    take(kUsageNumberBytes);
    if (!is_utf8(tenant) || std::ranges::find(tenant, 0) != tenant.end()) {
      throw malformed(at_, "a tenant's name in a usage is not UTF-8 without NUL");
    }
    if (row > 0 && !std::ranges::lexicographical_compare(before, tenant)) {
      throw malformed(at_, "the tenants of a usage are not in order");
    }
    before = tenant;
  }
  event.report = data_.subspan(begin, position_ - begin);
  version_ = std::max<std::uint16_t>(version_, 3);
}

void FrameReader::finish() {
  if (position_ != end_) {
    throw malformed(at_, std::to_string(end_ - position_) + " bytes after the last event");
  }
  bool distinct = true;
  for (std::size_t one = 0; one < table_.size(); one += kHashBytes) {
    for (std::size_t other = 0; other < one; other += kHashBytes) {
      distinct = distinct && std::memcmp(table_.data() + one, table_.data() + other, kHashBytes) != 0;
    }
  }
  if (!in_order_ || !distinct || namespaces_seen_ != header_.namespace_count) {
    throw malformed(at_, "the namespace table is not in the order the events use it");
  }
  if (version_ != header_.version) {
    throw malformed(at_, "a frame of version " + std::to_string(header_.version) +
                             " whose events are written as version " + std::to_string(version_));
  }
}

// -- writing ----------------------------------------------------------------------------------------------------------

std::size_t event_bytes(const Event& event) {
  return std::visit(Overloaded{
                        [](const InstanceStarted& started) { return kStartedBytes + started.blob.size(); },
                        [](const BlocksCreated& created) {
                          check_run(created.hashes, created.slots);
                          const std::size_t parent_bytes = is_no_parent(created.parent.data()) ? 0 : kHashBytes;
                          return kCreatedBytes + parent_bytes + created.hashes.size() + created.slots.size();
                        },
                        [](const BlocksMigrated& migrated) {
                          check_run(migrated.hashes, migrated.slots);
                          std::size_t name_bytes = 0;
                          if (const auto* const instance = std::get_if<std::string_view>(&migrated.source)) {
                            check_name(*instance, "a source instance's name");
                            name_bytes = 1 + instance->size();
                          }
                          return kMigratedBytes + name_bytes + migrated.hashes.size() + migrated.slots.size();
                        },
                        [](const BlocksEvicted& evicted) {
                          check_run(evicted.hashes, {});
                          return kEvictedBytes + evicted.hashes.size();
                        },
                        [](const ResidenciesListed& listed) {
                          check_run(listed.hashes, listed.slots);
                          return kListedBytes + listed.hashes.size() + listed.slots.size();
                        },
                        [](const SnapshotEnded&) { return kSnapshotEndedBytes; },
                        [](const InstanceStopped&) { return kStoppedBytes; },
                        [](const UsageRecorded& usage) { return 1 + usage.report.size(); },
                    },
                    event);
}

const NamespaceId* namespace_of(const Event& event) noexcept {
  return std::visit(
      [](const auto& fact) -> const NamespaceId* {
        if constexpr (requires { fact.namespace_id; }) {
          return &fact.namespace_id;
        } else {
          return nullptr;
        }
      },
      event);
}

std::uint16_t frame_version(const Event& event) noexcept {
  constexpr std::uint8_t kWithAttributes = 0x97;  // an array of 7: the fields of version 1, and attributes
  if (std::holds_alternative<UsageRecorded>(event)) {
    return 3;
  }
  const auto* const started = std::get_if<InstanceStarted>(&event);
  return started != nullptr && !started->blob.empty() && started->blob[0] == kWithAttributes ? 2 : 1;
}

std::uint8_t* write_event(const Event& event, std::uint8_t namespace_index, std::uint8_t* out) noexcept {
  Pen pen(out);
  const auto slots_flag = [](Bytes slots) { return slots.empty() ? std::uint8_t{0} : kFlagSlots; };
  std::visit(Overloaded{
                 [&](const InstanceStarted& started) {
                   pen.code(Kind::kStarted);
                   pen.number(static_cast<std::uint32_t>(started.blob.size()));
                   pen.bytes(started.blob);
                 },
                 [&](const BlocksCreated& created) {
                   const bool has_parent = !is_no_parent(created.parent.data());
                   pen.code(Kind::kCreated);
                   pen.number(namespace_index);
                   pen.code(created.tier);
                   pen.code(slots_flag(created.slots) | (has_parent ? kFlagParent : 0));
                   pen.number(created.start);
                   pen.number(block_count(created.hashes));
                   pen.bytes(has_parent ? Bytes(created.parent) : Bytes{});
                   pen.bytes(created.hashes);
                   pen.bytes(created.slots);
                 },
                 [&](const BlocksMigrated& migrated) {
                   const auto* const instance = std::get_if<std::string_view>(&migrated.source);
                   const auto* const tier = std::get_if<Tier>(&migrated.source);
                   pen.code(Kind::kMigrated);
                   pen.number(namespace_index);
                   pen.number(tier != nullptr ? static_cast<std::uint8_t>(*tier) : kFromInstance);
                   pen.code(migrated.target);
                   pen.code(slots_flag(migrated.slots) | (migrated.kept ? kFlagKept : 0));
                   pen.code(migrated.cause);
                   pen.number(block_count(migrated.hashes));
                   if (instance != nullptr) {
                     pen.number(static_cast<std::uint8_t>(instance->size()));
                     pen.text(*instance);
                   }
                   pen.bytes(migrated.hashes);
                   pen.bytes(migrated.slots);
                 },
                 [&](const BlocksEvicted& evicted) {
                   pen.code(Kind::kEvicted);
                   pen.number(namespace_index);
                   pen.code(evicted.tier);
                   pen.code(evicted.reason);
                   pen.number(block_count(evicted.hashes));
                   pen.bytes(evicted.hashes);
                 },
                 [&](const ResidenciesListed& listed) {
                   pen.code(Kind::kListed);
                   pen.number(namespace_index);
                   pen.code(listed.tier);
                   pen.code(slots_flag(listed.slots));
                   pen.number(listed.snapshot);
                   pen.number(block_count(listed.hashes));
                   pen.bytes(listed.hashes);
                   pen.bytes(listed.slots);
                 },
                 [&](const SnapshotEnded& ended) {
                   pen.code(Kind::kSnapshotEnded);
                   pen.code(ended.tier);
                   pen.number(ended.snapshot);
                   pen.number(ended.count);
                 },
                 [&](const InstanceStopped& stopped) {
                   pen.code(Kind::kStopped);
                   pen.code(stopped.reason);
                 },
                 [&](const UsageRecorded& usage) {
                   pen.code(Kind::kUsage);
                   pen.bytes(usage.report);
                 },
             },
             event);
  return pen.at();
}

std::size_t frame_bytes(const FrameHeader& header, std::size_t namespaces, std::size_t body_bytes) {
  check_name(header.instance, "the instance's name");
  const std::size_t bytes =
      kFrameHeaderBytes + header.instance.size() + namespaces * kHashBytes + body_bytes + kFrameChecksumBytes;
  if (bytes > kMaxFrameBytes) {
    throw Error(ErrorCode::kLayout, "the frame has " + std::to_string(bytes) + " bytes; at most " +
                                        std::to_string(kMaxFrameBytes) + " fit: cut it");
  }
  return bytes;
}

std::uint8_t* write_head(const FrameHeader& header, std::size_t event_count, std::span<const NamespaceId> namespaces,
                         std::span<std::uint8_t> out) noexcept {
  Pen pen(out.data());
  pen.bytes(kMagic);
  pen.number(header.version);
  pen.number(static_cast<std::uint8_t>(header.instance.size()));
  pen.number(static_cast<std::uint8_t>(namespaces.size()));
  pen.number(static_cast<std::uint32_t>(out.size()));
  pen.number(static_cast<std::uint32_t>(event_count));
  pen.number(header.epoch);
  pen.number(header.first_offset);
  pen.number(header.wall_time_ns);
  pen.number(header.digest);
  pen.text(header.instance);
  for (const NamespaceId& id : namespaces) {
    pen.bytes(id);
  }
  return pen.at();
}

void write_checksum(std::span<std::uint8_t> frame) noexcept {
  const std::size_t covered = frame.size() - kFrameChecksumBytes;
  Pen(frame.data() + covered).number(crc32c(frame.first(covered)));
}

FrameWriter::FrameWriter(const FrameHeader& header, std::size_t event_count) : header_(header) {
  check_name(header.instance, "the instance's name");
  header_.version = 1;  // until an event needs more
  events_.reserve(event_count);
}

void FrameWriter::register_namespace(const NamespaceId& id) {
  if (std::find(namespaces_.begin(), namespaces_.end(), id) != namespaces_.end()) {
    return;
  }
  if (namespaces_.size() == kMaxFrameNamespaces) {
    throw Error(ErrorCode::kLayout,
                "more than " + std::to_string(kMaxFrameNamespaces) + " namespaces in one frame: cut it");
  }
  namespaces_.push_back(id);
}

std::uint8_t FrameWriter::namespace_index(const NamespaceId& id) const noexcept {
  return static_cast<std::uint8_t>(std::find(namespaces_.begin(), namespaces_.end(), id) - namespaces_.begin());
}

void FrameWriter::add(const Event& event) {
  header_.version = std::max(header_.version, frame_version(event));
  body_bytes_ += event_bytes(event);
  if (const NamespaceId* const id = namespace_of(event)) {
    register_namespace(*id);
  }
  events_.push_back(event);
}

std::size_t FrameWriter::frame_bytes() const {
  if (events_.empty()) {
    throw Error(ErrorCode::kLayout, "a frame needs at least one event");
  }
  return kvbm::frame_bytes(header_, namespaces_.size(), body_bytes_);
}

void FrameWriter::write(std::span<std::uint8_t> out) const {
  std::uint8_t* at = write_head(header_, events_.size(), namespaces_, out);
  for (const Event& event : events_) {
    const NamespaceId* const id = namespace_of(event);
    at = write_event(event, id != nullptr ? namespace_index(*id) : std::uint8_t{0}, at);
  }
  write_checksum(out);
}

}  // namespace kvbm
