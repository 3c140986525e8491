#include "kvbm/segment_copy.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "kvbm/checksum.hpp"

using namespace kvbm;
using tests::Random;

namespace {

// Buffers that stand for an engine's tensors, and the segments of a block over them, each buffer with gaps of its own.
struct Engine {
  std::size_t slots;
  std::vector<std::vector<std::uint8_t>> tensors;
  std::vector<Segment> segments;

  Engine(Random& random, std::size_t slot_count, const std::vector<std::size_t>& sizes) : slots(slot_count) {
    for (const std::size_t size : sizes) {
      const std::size_t stride = size + random.below(40);
      const std::size_t begin = random.below(20);
      tensors.push_back(random.bytes(begin + slots * stride));
      segments.push_back({reinterpret_cast<std::uint64_t>(tensors.back().data() + begin), stride, size});
    }
  }

  std::vector<std::uint8_t> block(std::int64_t slot) const {
    std::vector<std::uint8_t> bytes;
    for (const Segment& segment : segments) {
      const auto* const at =
          reinterpret_cast<const std::uint8_t*>(segment.address + static_cast<std::uint64_t>(slot) * segment.stride);
      bytes.insert(bytes.end(), at, at + segment.bytes);
    }
    return bytes;
  }
};

std::vector<std::int64_t> some_of(Random& random, std::size_t end, std::size_t count) {
  std::vector<std::int64_t> all(end);
  for (std::size_t index = 0; index < end; ++index) {
    all[index] = static_cast<std::int64_t>(index);
    std::swap(all[index], all[random.below(index + 1)]);
  }
  all.resize(count);
  return all;
}

std::vector<std::size_t> sizes_of(Random& random) {
  std::vector<std::size_t> sizes;
  const std::size_t layers = 1 + random.below(40);
  const std::size_t even = 1 + random.below(3'000);
  const bool mixed = random.below(2) == 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    sizes.push_back(mixed && random.below(3) == 0 ? 1 + random.below(500) : even);
  }
  return sizes;
}

void blocks_are_gathered() {
  RowCopier copier(3);
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const Engine engine(random, 1 + random.below(80), sizes_of(random));
    const SegmentTable table(engine.segments, engine.slots);
    const auto slots = some_of(random, engine.slots, 1 + random.below(engine.slots));
    const std::size_t row_count = slots.size() + random.below(10);
    const auto at = some_of(random, row_count, slots.size());
    const std::size_t begin = random.below(30);  // the rows may be a part of wider ones
    const std::size_t stride = table.block_bytes() + random.below(2) * random.below(3'000);
    std::vector<std::uint8_t> rows(begin + row_count * stride, 0xA5);
    std::vector<std::uint32_t> sums(slots.size());
    table.gather(copier, slots, {rows.data() + begin, stride}, at, sums.data());
    std::vector<std::uint8_t> expected(rows.size(), 0xA5);
    for (std::size_t index = 0; index < slots.size(); ++index) {
      const auto block = engine.block(slots[index]);
      CHECK(block.size() == table.block_bytes());
      std::copy(block.begin(), block.end(),
                expected.begin() + static_cast<std::ptrdiff_t>(begin + static_cast<std::size_t>(at[index]) * stride));
      CHECK(sums[index] == crc32c(block));
    }
    CHECK(rows == expected);
    std::vector<std::uint32_t> in_place(slots.size());
    table.checksums(copier, slots, in_place.data());
    CHECK(in_place == sums);
  }
}

void only_named_slots_change() {
  RowCopier copier(3);
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    Engine engine(random, 1 + random.below(80), sizes_of(random));
    const SegmentTable table(engine.segments, engine.slots);
    const auto slots = some_of(random, engine.slots, 1 + random.below(engine.slots));
    const std::size_t stride = table.block_bytes() + random.below(2) * random.below(3'000);
    const auto rows = random.bytes(slots.size() * stride);
    auto expected = engine.tensors;
    for (std::size_t index = 0; index < slots.size(); ++index) {
      const std::uint8_t* from = rows.data() + index * stride;
      for (std::size_t tensor = 0; tensor < expected.size(); ++tensor) {
        const Segment& segment = engine.segments[tensor];
        const std::uint64_t begin = segment.address - reinterpret_cast<std::uint64_t>(engine.tensors[tensor].data());
        std::memcpy(expected[tensor].data() + begin + static_cast<std::uint64_t>(slots[index]) * segment.stride, from,
                    segment.bytes);
        from += segment.bytes;
      }
    }
    table.scatter(copier, slots, {rows.data(), stride}, {});
    CHECK(engine.tensors == expected);
  }
}

void threads_share_a_table() {
  RowCopier copier(2);
  Random random(7);
  Engine engine(random, 64, std::vector<std::size_t>(12, 4'096));
  const SegmentTable table(engine.segments, engine.slots);
  std::vector<std::thread> threads;
  for (std::int64_t worker = 0; worker < 4; ++worker) {
    threads.emplace_back([&, worker] {
      Random own(static_cast<std::uint64_t>(worker));
      std::vector<std::int64_t> slots;
      for (std::int64_t slot = worker; slot < 64; slot += 4) {
        slots.push_back(slot);
      }
      for (int pass = 0; pass < 10; ++pass) {
        const auto rows = own.bytes(slots.size() * table.block_bytes());
        table.scatter(copier, slots, {rows.data(), table.block_bytes()}, {});
        std::vector<std::uint8_t> back(rows.size());
        std::vector<std::uint32_t> sums(slots.size());
        table.gather(copier, slots, {back.data(), table.block_bytes()}, {}, sums.data());
        CHECK(back == rows);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

void what_is_no_table_is_refused() {
  std::uint8_t byte = 0;
  const auto address = reinterpret_cast<std::uint64_t>(&byte);
  CHECK(tests::thrown_code([] { SegmentTable({}, 1); }) == ErrorCode::kLayout);
  CHECK(tests::thrown_code([&] { SegmentTable({{address, 1, 1}}, 0); }) == ErrorCode::kLayout);
  CHECK(tests::thrown_code([&] { SegmentTable({{address, 1, 0}}, 1); }) == ErrorCode::kLayout);
  CHECK(tests::thrown_code([] { SegmentTable({{0, 1, 1}}, 1); }) == ErrorCode::kLayout);
}

}  // namespace

int main() {
  return tests::run(
      {{"a block is gathered from its pieces into rows any distance apart, with its checksum", blocks_are_gathered},
       {"only the slots that are named change", only_named_slots_change},
       {"threads copy other slots at once", threads_share_a_table},
       {"a table without slots or bytes is refused", what_is_no_table_is_refused}});
}
