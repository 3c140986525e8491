#include "kvbm/copy_queue.hpp"

#include <algorithm>
#include <numeric>
#include <system_error>
#include <thread>

#include <signal.h>

#include "check.hpp"
#include "kvbm/checksum.hpp"
#include "no_threads.hpp"

using namespace kvbm;
using tests::Random;

namespace {

constexpr std::chrono::seconds kLong{60};

// An engine's slots in two pieces each, and rows that are wider than a block.
struct Place {
  static constexpr std::size_t kSlots = 32;
  static constexpr std::size_t kPiece = 96;
  static constexpr std::size_t kBlock = 2 * kPiece;
  static constexpr std::size_t kStride = kBlock + 64;

  std::vector<std::uint8_t> engine;
  std::vector<std::uint8_t> rows;
  RowCopier copier{2};
  SegmentTable table;

  explicit Place(Random& random)
      : engine(random.bytes(2 * kSlots * kPiece)), rows(kSlots * kStride, 0xA5), table(segments(engine), kSlots) {}

  static std::vector<Segment> segments(const std::vector<std::uint8_t>& engine) {
    const auto address = reinterpret_cast<std::uint64_t>(engine.data());
    return {{address, kPiece, kPiece}, {address + kSlots * kPiece, kPiece, kPiece}};
  }

  std::vector<std::uint8_t> block(std::size_t slot) const {
    std::vector<std::uint8_t> bytes;
    for (std::size_t piece = 0; piece < 2; ++piece) {
      const auto at = engine.begin() + static_cast<std::ptrdiff_t>((piece * kSlots + slot) * kPiece);
      bytes.insert(bytes.end(), at, at + kPiece);
    }
    return bytes;
  }

  std::vector<std::uint8_t> row(std::size_t row) const {
    const auto at = rows.begin() + static_cast<std::ptrdiff_t>(row * kStride);
    return {at, at + kBlock};
  }
};

std::vector<std::int64_t> numbers(std::int64_t first, std::size_t count) {
  std::vector<std::int64_t> all(count);
  std::iota(all.begin(), all.end(), first);
  return all;
}

void runs_end_with_their_bytes_in_place() {
  Random random(1);
  Place place(random);
  CopyQueue queue(place.table, place.copier);
  const auto slots = numbers(3, 10);
  const auto at = numbers(20, 10);
  std::vector<std::uint32_t> sums(10);
  queue.add({7, slots, at, {place.rows.data(), Place::kStride}, sums.data()});
  CHECK(queue.wait(kLong));
  CHECK(queue.under_way() == 0);
  auto ended = queue.ended();
  CHECK(ended.size() == 1 && ended[0].id == 7);
  CHECK(queue.ended().empty());
  for (std::size_t index = 0; index < 10; ++index) {
    CHECK(place.row(20 + index) == place.block(3 + index));
    CHECK(sums[index] == crc32c(place.block(3 + index)));
  }
  const auto others = numbers(16, 10);
  queue.add({8, others, at, {place.rows.data(), Place::kStride}, nullptr});
  CHECK(queue.wait(kLong));
  for (std::size_t index = 0; index < 10; ++index) {
    CHECK(place.block(16 + index) == place.row(20 + index));
  }
}

void callers_share_a_queue() {
  Random random(2);
  Place place(random);
  CopyQueue queue(place.table, place.copier);
  std::vector<std::thread> threads;
  std::vector<std::vector<std::uint32_t>> sums(4, std::vector<std::uint32_t>(8));
  std::vector<std::vector<std::int64_t>> slots;
  for (std::int64_t caller = 0; caller < 4; ++caller) {
    slots.push_back(numbers(8 * caller, 8));
  }
  for (std::size_t caller = 0; caller < 4; ++caller) {
    threads.emplace_back([&, caller] {
      queue.add({caller, slots[caller], slots[caller], {place.rows.data(), Place::kStride}, sums[caller].data()});
      CHECK(queue.wait(kLong));
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  auto ended = queue.ended();
  CHECK(ended.size() == 4);
  for (std::size_t slot = 0; slot < Place::kSlots; ++slot) {
    CHECK(place.row(slot) == place.block(slot));
    CHECK(sums[slot / 8][slot % 8] == crc32c(place.block(slot)));
  }
}

void scatters_overtake_gathers() {
  Random random(3);
  // Blocks larger than a slice, so that a gather of several is never copied at once.
  constexpr std::size_t kBytes = 17 * 1024 * 1024;
  std::vector<std::uint8_t> engine(4 * kBytes, 0x11);
  std::vector<std::uint8_t> rows(4 * kBytes, 0x22);
  RowCopier copier(1);
  const SegmentTable table({{reinterpret_cast<std::uint64_t>(engine.data()), kBytes, kBytes}}, 4);
  CopyQueue queue(table, copier);
  const auto gathered = numbers(0, 3);
  const auto scattered = numbers(3, 1);
  std::vector<std::uint32_t> sums(3);
  std::vector<std::uint32_t> more(3);
  for (int tries = 0;; ++tries) {
    CHECK(tries < 1'000);
    queue.add({1, gathered, gathered, {rows.data(), kBytes}, sums.data()});
    queue.add({2, gathered, gathered, {rows.data(), kBytes}, more.data()});
    queue.add({3, scattered, scattered, {rows.data(), kBytes}, nullptr});
    auto ended = queue.ended();
    const bool in_time = ended.empty();  // the scatter was there before the second gather began, which has three slices
    CHECK(queue.wait(kLong));
    const auto later = queue.ended();
    ended.insert(ended.end(), later.begin(), later.end());
    CHECK(ended.size() == 3);
    if (in_time) {
      CHECK(ended.back().id == 2);
      break;
    }
  }
  CHECK(std::all_of(engine.begin() + 3 * static_cast<std::ptrdiff_t>(kBytes), engine.end(),
                    [](std::uint8_t byte) { return byte == 0x22; }));
}

void a_closed_queue_takes_nothing() {
  Random random(4);
  Place place(random);
  CopyQueue queue(place.table, place.copier);
  queue.close();
  queue.close();
  const auto slots = numbers(0, 1);
  CHECK(tests::thrown_code([&] { queue.add({1, slots, slots, {place.rows.data(), Place::kStride}, nullptr}); }) ==
        ErrorCode::kLayout);
  CHECK(!queue.wait(std::chrono::seconds{0}));
  CHECK(queue.ended().empty());
}

void a_queue_ends_with_runs_under_way() {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Random random(seed);
    Place place(random);
    const auto slots = numbers(0, Place::kSlots);
    std::vector<std::uint32_t> sums(Place::kSlots);
    CopyQueue queue(place.table, place.copier);
    for (std::uint64_t id = 0; id < random.below(5); ++id) {
      queue.add({id, slots, slots, {place.rows.data(), Place::kStride}, sums.data()});
    }
  }
}

// Whether this thread takes signals as before.
bool takes_signals() {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return sigismember(&blocked, SIGTERM) == 0;
}

void a_queue_without_a_thread_is_none() {
  Random random(6);
  Place place(random);
  bool is_refused = false;
  try {
    const tests::FewThreads few(0);
    const CopyQueue queue(place.table, place.copier);
  } catch (const std::system_error& error) {
    is_refused = error.code().value() == EAGAIN;
  }
  CHECK(is_refused && takes_signals());
  runs_end_with_their_bytes_in_place();
}

}  // namespace

int main() {
  return tests::run({{"a run ends with its bytes and checksums in place", runs_end_with_their_bytes_in_place},
                     {"several callers share a queue", callers_share_a_queue},
                     {"what somebody waits for overtakes the rest", scatters_overtake_gathers},
                     {"a closed queue takes nothing", a_closed_queue_takes_nothing},
                     {"a queue may end before its runs", a_queue_ends_with_runs_under_way},
                     {"a queue without a thread is none, and the next one is", a_queue_without_a_thread_is_none}});
}
