#include "kvbm/columns.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <variant>

#include "check.hpp"
#include "kvbm/checksum.hpp"
#include "kvbm/codec.hpp"

using namespace kvbm;
using tests::Random;
using tests::thrown_code;

namespace {

using Buffer = std::vector<std::uint8_t>;

constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

Buffer repeated(const Buffer& frame, std::size_t count) {
  Buffer data;
  for (std::size_t number = 0; number < count; ++number) {
    data.insert(data.end(), frame.begin(), frame.end());
  }
  return data;
}

// Every event's run, one after the other, as the reader of single events has them.
struct Runs {
  std::size_t events = 0;
  Buffer hashes;
  std::vector<std::uint32_t> slots;
};

Runs runs_of(Bytes data) {
  Runs runs;
  const auto add = [&](Bytes hashes, Bytes slots) {
    runs.hashes.insert(runs.hashes.end(), hashes.begin(), hashes.end());
    std::vector<std::uint32_t> numbers(hashes.size() / kHashBytes, kNoSlot);
    if (!slots.empty()) {
      std::memcpy(numbers.data(), slots.data(), slots.size());
    }
    runs.slots.insert(runs.slots.end(), numbers.begin(), numbers.end());
  };
  for (std::size_t at = 0; at < data.size();) {
    FrameReader reader(data, at);
    while (const auto event = reader.next()) {
      ++runs.events;
      if (const auto* const created = std::get_if<BlocksCreated>(&*event)) {
        add(created->hashes, created->slots);
      } else if (const auto* const migrated = std::get_if<BlocksMigrated>(&*event)) {
        add(migrated->hashes, migrated->slots);
      } else if (const auto* const evicted = std::get_if<BlocksEvicted>(&*event)) {
        add(evicted->hashes, {});
      } else if (const auto* const listed = std::get_if<ResidenciesListed>(&*event)) {
        add(listed->hashes, listed->slots);
      }
    }
    at = reader.end();
  }
  return runs;
}

void check_columns(Bytes data, const FrameColumns& columns) {
  const Runs runs = runs_of(data);
  CHECK(columns.events.size() == runs.events);
  CHECK(columns.blocks == runs.slots.size());
  CHECK(std::equal(runs.hashes.begin(), runs.hashes.end(), columns.hashes.get()));
  CHECK(std::equal(runs.slots.begin(), runs.slots.end(), columns.slots.get()));
  std::uint64_t blocks = 0;
  for (const EventRow& row : columns.events) {
    CHECK(row.first_block == blocks && row.frame < columns.frames.size());
    blocks += row.namespace_row == kNoRow ? 0 : row.count;
    CHECK(row.namespace_row == kNoRow || row.namespace_row < columns.namespaces.size());
  }
  CHECK(blocks == columns.blocks);
}

void frames_become_columns() {
  const Buffer golden = tests::read_golden("frame_v1.bin");
  for (std::size_t count = 0; count < 5; ++count) {
    const Buffer data = repeated(golden, count);
    FrameColumns columns;
    CHECK(decode_columns(data, 0, kAll, columns) == data.size());
    CHECK(columns.frames.size() == count);
    check_columns(data, columns);
    for (std::size_t number = 0; number < count; ++number) {
      CHECK(columns.frames[number].at == number * golden.size());
      CHECK(columns.names[columns.frames[number].instance] == "w\xC3\xB6rker-1");
    }
  }
}

void a_limit_stops_the_reader() {
  const Buffer golden = tests::read_golden("frame_v1.bin");
  Buffer data = repeated(golden, 3);
  data.back() ^= 1;
  for (std::size_t limit = 0; limit < 3; ++limit) {
    FrameColumns columns;
    CHECK(decode_columns(data, 0, limit, columns) == limit * golden.size());
    CHECK(columns.frames.size() == limit);
  }
  FrameColumns columns;
  CHECK(thrown_code([&] { decode_columns(data, 0, 3, columns); }) == ErrorCode::kCorruptFrame);
  CHECK(columns.frames.size() == 2);
  CHECK(decode_columns(data, data.size() + 9, kAll, columns) == data.size() + 9);
}

void hostile_bytes_never_crash() {
  const Buffer golden = tests::read_golden("frame_v1.bin");
  Random random(1);
  std::size_t accepted = 0;
  std::size_t refused = 0;
  for (int pass = 0; pass < 20'000; ++pass) {
    Buffer frame = golden;
    for (std::size_t change = random.below(4) + 1; change > 0; --change) {
      const std::size_t at = 12 + random.below(frame.size() - 16);
      frame[at] = random.below(2) == 0 ? static_cast<std::uint8_t>(random.next()) : std::uint8_t{0xFF};
    }
    const std::uint32_t checksum = crc32c({frame.data(), frame.size() - kFrameChecksumBytes});
    std::memcpy(frame.data() + frame.size() - kFrameChecksumBytes, &checksum, sizeof checksum);
    const Buffer exact(frame.begin(), frame.end());  // no spare room behind it, so that ASan sees one byte too far
    FrameColumns columns;
    try {
      decode_columns(exact, 0, kAll, columns);
      check_columns(exact, columns);
      ++accepted;
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kMalformedFrame);
      ++refused;
    }
  }
  CHECK(accepted > 100 && refused > 100);  // or the changes test nothing
}

}  // namespace

int main() {
  return tests::run({{"a buffer of frames becomes the columns of its events", frames_become_columns},
                     {"a limit stops the reader before what lies behind it", a_limit_stops_the_reader},
                     {"hostile bytes are refused or read, and never crash", hostile_bytes_never_crash}});
}
