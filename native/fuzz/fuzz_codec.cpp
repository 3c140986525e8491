// Any bytes are frames or a typed Error; what reads to its end is written to the same bytes; and neither asks for more
// memory than the bytes that are there justify. A checksum guards a frame, so mutated bytes are tried as they are and,
// repaired, once more: only then does a mutation reach the code behind the checksum.
#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "fuzz.hpp"
#include "kvbm/checksum.hpp"
#include "kvbm/codec.hpp"
#include "kvbm/error.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

using namespace kvbm;
using fuzz::MemoryMeter;

namespace {

using Buffer = std::vector<std::uint8_t>;

constexpr std::string_view kMagic = "KVBM";
constexpr std::size_t kLengthAt = 8;         // frame_bytes, in a frame
constexpr std::size_t kErrorBytes = 4096;    // what an Error and the making of its words may ask for
constexpr std::size_t kLeastEventBytes = 2;  // the shortest event in a frame
constexpr std::size_t kGrowth = 4;           // a vector that doubles asks for less than this many times its end

// Bits from a seed: SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  std::size_t below(std::size_t limit) noexcept {
    std::uint64_t value = (state_ += 0x9E3779B97F4A7C15);
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return static_cast<std::size_t>((value ^ (value >> 31)) % limit);
  }

 private:
  std::uint64_t state_;  // the counter
};

// Gives each frame the length it has now, up to the next magic or the end, and the checksum of its bytes.
void repair(std::span<std::uint8_t> data) noexcept {
  const std::string_view text(reinterpret_cast<const char*>(data.data()), data.size());
  for (std::size_t at = text.find(kMagic); at < text.size();) {
    const std::size_t next = std::min(text.find(kMagic, at + 1), text.size());
    if (const std::size_t size = next - at; size >= kFrameHeaderBytes + kFrameChecksumBytes) {
      const auto length = static_cast<std::uint32_t>(size);
      std::memcpy(data.data() + at + kLengthAt, &length, sizeof length);
      const std::uint32_t checksum = crc32c(data.subspan(at, size - kFrameChecksumBytes));
      std::memcpy(data.data() + next - kFrameChecksumBytes, &checksum, sizeof checksum);
    }
    at = next;
  }
}

// UTF-8 told another way than is_utf8: by the code points and by how each would be written.
bool is_utf8_by_code_points(Bytes data) {
  for (std::size_t at = 0; at < data.size();) {
    const std::uint8_t lead = data[at];
    const std::size_t size = lead < 0x80 ? 1 : lead >> 5 == 0x6 ? 2 : lead >> 4 == 0xE ? 3 : lead >> 3 == 0x1E ? 4 : 0;
    if (size == 0 || size > data.size() - at) {
      return false;
    }
    std::uint32_t point = size == 1 ? lead : lead & (0x7FU >> size);
    for (std::size_t index = 1; index < size; ++index) {
      if (data[at + index] >> 6 != 0x2) {
        return false;
      }
      point = point << 6 | (data[at + index] & 0x3FU);
    }
    const std::size_t shortest = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    if (size != shortest || (point >= 0xD800 && point < 0xE000) || point > 0x10FFFF) {
      return false;
    }
    at += size;
  }
  return true;
}

bool lies_in(Bytes part, Bytes whole) {
  const std::less_equal<> before;
  return part.empty() ||
         (before(whole.data(), part.data()) && before(part.data() + part.size(), whole.data() + whole.size()));
}

Bytes bytes_of(std::string_view text) { return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}; }

void require_name(std::string_view name, Bytes frame) {
  REQUIRE(!name.empty() && name.size() <= kMaxNameBytes && lies_in(bytes_of(name), frame) &&
          is_utf8_by_code_points(bytes_of(name)));
}

void require_run(Bytes hashes, Bytes slots, Bytes frame) {
  REQUIRE(!hashes.empty() && hashes.size() % kHashBytes == 0 && lies_in(hashes, frame) && lies_in(slots, frame));
  REQUIRE(slots.empty() || slots.size() / kSlotBytes == hashes.size() / kHashBytes);
  REQUIRE(slots.size() % kSlotBytes == 0);
}

template <class Enum>
void require_member(Enum value, std::uint8_t count) {
  REQUIRE(static_cast<std::uint8_t>(value) < count);
}

// What the header of event.hpp promises of an event that was read.
struct RequireGood {
  Bytes frame;  // the frame it was read from

  void operator()(const InstanceStarted& started) const { REQUIRE(lies_in(started.blob, frame)); }
  void operator()(const BlocksCreated& created) const {
    require_member(created.tier, kTierCount);
    require_run(created.hashes, created.slots, frame);
  }
  void operator()(const BlocksMigrated& migrated) const {
    require_member(migrated.target, kTierCount);
    require_member(migrated.cause, kMigrateCauseCount);
    if (const auto* const instance = std::get_if<std::string_view>(&migrated.source)) {
      require_name(*instance, frame);
    } else {
      require_member(std::get<Tier>(migrated.source), kTierCount);
    }
    require_run(migrated.hashes, migrated.slots, frame);
  }
  void operator()(const BlocksEvicted& evicted) const {
    require_member(evicted.tier, kTierCount);
    require_member(evicted.reason, kEvictReasonCount);
    require_run(evicted.hashes, {}, frame);
  }
  void operator()(const ResidenciesListed& listed) const {
    require_member(listed.tier, kTierCount);
    require_run(listed.hashes, listed.slots, frame);
  }
  void operator()(const SnapshotEnded& ended) const { require_member(ended.tier, kTierCount); }
  void operator()(const InstanceStopped& stopped) const { require_member(stopped.reason, kStopReasonCount); }
  void operator()(const UsageRecorded& usage) const {
    REQUIRE(lies_in(usage.report, frame) && usage.report.size() >= kUsageFieldBytes);
  }
};

bool is_frame_error(ErrorCode code) {
  return code == ErrorCode::kNotAFrame || code == ErrorCode::kNewerFrame || code == ErrorCode::kTornFrame ||
         code == ErrorCode::kCorruptFrame || code == ErrorCode::kMalformedFrame;
}

// Reads the frame at a position, proves it good and writes it again. Returns where it ends, or nothing after an Error.
std::optional<std::size_t> read_and_write(Bytes data, std::size_t at) {
  std::size_t end = 0;
  std::uint32_t count = 0;
  const MemoryMeter reading;
  try {
    FrameReader reader(data, at);
    end = reader.end();
    REQUIRE(end > at && end <= data.size());
    const Bytes frame = data.subspan(at, end - at);
    require_name(reader.header().instance, frame);
    for (; const auto event = reader.next(); ++count) {
      std::visit(RequireGood{frame}, *event);
    }
    REQUIRE(!reader.next() && reading.bytes() == 0);
    REQUIRE(count > 0 && count == reader.header().event_count);
  } catch (const Error& error) {
    REQUIRE(is_frame_error(error.code()) && error.at() == at && reading.bytes() <= kErrorBytes);
    return std::nullopt;
  }

  // Outside the try: a frame that reads must be written, so an Error from here on is a finding.
  const MemoryMeter writing;
  FrameReader reader(data, at);
  FrameWriter writer(reader.header());
  while (const auto event = reader.next()) {
    writer.add(*event);
  }
  REQUIRE(writer.frame_bytes() == end - at);
  Buffer out(end - at);
  writer.write(out);
  REQUIRE(std::memcmp(out.data(), data.data() + at, out.size()) == 0);
  REQUIRE(writing.bytes() <= out.size() * (1 + kGrowth) + kGrowth * sizeof(Event) * (out.size() / kLeastEventBytes));
  return end;
}

void walk(Bytes data) {
  for (std::optional<std::size_t> at = 0; at;) {
    at = read_and_write(data, *at);  // at the end: a torn frame of no bytes
  }
}

// What decode_header says at a position: an error's code, or nothing for a header.
std::optional<ErrorCode> header_outcome(Bytes data, std::size_t at) {
  const MemoryMeter meter;
  try {
    const FrameHeader header = decode_header(data, at);
    REQUIRE(header.frame_bytes <= kMaxFrameBytes);
    REQUIRE(header.frame_bytes >= kFrameHeaderBytes + header.instance.size() + kFrameChecksumBytes);
    REQUIRE(lies_in(bytes_of(header.instance), data) && meter.bytes() == 0);
    return std::nullopt;
  } catch (const Error& error) {
    REQUIRE(is_frame_error(error.code()) && error.code() != ErrorCode::kCorruptFrame && error.at() == at);
    REQUIRE(meter.bytes() <= kErrorBytes);
    return error.code();
  }
}

void decode_headers_anywhere(Bytes data) {
  Random random(crc32c(data));
  for (int pass = 0; pass < 2; ++pass) {
    const std::size_t at = random.below(data.size() + 2);  // one past the end, too
    REQUIRE(header_outcome(data, at) == header_outcome(data.subspan(std::min(at, data.size())), 0));
  }
  header_outcome(data, ~std::size_t{0} - random.below(64));  // so far behind it that sums would wrap
}

// Drops, repeats or swaps events of the first frame. Returns nothing where that frame does not read.
Buffer with_other_events(Bytes data, Random& random) {
  try {
    FrameReader reader(data, 0);
    FrameWriter writer(reader.header());
    std::vector<Event> events;
    while (const auto event = reader.next()) {
      events.push_back(*event);
    }
    const std::size_t one = random.below(events.size());
    const std::size_t other = random.below(events.size());
    switch (random.below(3)) {
      case 0:
        events.erase(events.begin() + static_cast<std::ptrdiff_t>(one));
        break;
      case 1:
        events.insert(events.begin() + static_cast<std::ptrdiff_t>(one), Event(events[other]));
        break;
      default:
        std::swap(events[one], events[other]);
    }
    for (const Event& event : events) {
      writer.add(event);
    }
    Buffer out(writer.frame_bytes());
    writer.write(out);
    out.insert(out.end(), data.begin() + static_cast<std::ptrdiff_t>(reader.end()), data.end());
    return out;
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  MemoryMeter::install();
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned int seed) {
  Random random(seed);
  if (random.below(4) == 0) {
    const Buffer out = with_other_events({data, size}, random);
    if (!out.empty() && out.size() <= max_size) {
      std::memcpy(data, out.data(), out.size());
      return out.size();
    }
  }
  const std::size_t mutated = LLVMFuzzerMutate(data, size, max_size);
  if (random.below(8) != 0) {  // now and then bytes with a wrong length or checksum
    repair({data, mutated});
  }
  return mutated;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Bytes bytes(data, size);
  walk(bytes);
  decode_headers_anywhere(bytes);
  REQUIRE(is_utf8(bytes) == is_utf8_by_code_points(bytes));
  Buffer repaired(bytes.begin(), bytes.end());  // of exactly these bytes, so that ASan sees one too far
  repair(repaired);
  if (!std::equal(repaired.begin(), repaired.end(), bytes.begin())) {
    walk(repaired);
  }
  return 0;
}
