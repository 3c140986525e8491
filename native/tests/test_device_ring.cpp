// DeviceRing on a stand-in for NVIDIA's driver (fake_cuda.cpp), which runs the kernel's own source on the CPU.
#include "kvbm/device_ring.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "kvbm/checksum.hpp"
#include "no_threads.hpp"

namespace {

using kvbm::BlockRows;
using kvbm::CudaDriver;
using kvbm::DeviceRing;
using kvbm::RingOptions;
using kvbm::RowCopier;
using kvbm::RunOrder;
using kvbm::Segment;
using kvbm::tests::Random;

constexpr auto kLong = std::chrono::seconds(60);
constexpr auto kOnce = std::chrono::nanoseconds(0);

template <class Function>
Function* of_fake(const char* name) {
  static void* const library = dlopen(KVBM_FAKE_CUDA, RTLD_NOW);
  CHECK(library != nullptr);
  auto* const function = reinterpret_cast<Function*>(dlsym(library, name));
  CHECK(function != nullptr);
  return function;
}

void reset() { of_fake<void()>("fake_cuda_reset")(); }
void set(const char* name, long long value) { of_fake<void(const char*, long long)>("fake_cuda_set")(name, value); }
void refuse(const char* call, long long which, int result) {
  of_fake<void(const char*, long long, int)>("fake_cuda_fail")(call, which, result);
}
long long count(const char* call) { return of_fake<long long(const char*)>("fake_cuda_count")(call); }
long long live() { return of_fake<long long()>("fake_cuda_live")(); }
std::string log() { return of_fake<const char*()>("fake_cuda_log")(); }

const CudaDriver& driver() { return kvbm::cuda_driver(KVBM_FAKE_CUDA); }

// An engine's tensors, a pool's rows, and a ring between them.
struct Place {
  Place(std::vector<std::size_t> sizes, std::size_t slots, std::size_t rows_there, RingOptions options = small(),
        std::size_t gap = 0, std::size_t odd = 0)
      : slots_there(slots),
        block_bytes(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0})),
        row_stride(block_bytes + gap) {
    reset();
    Random random(7);
    for (const std::size_t size : sizes) {
      auto& tensor = tensors.emplace_back(slots * size + odd + 64);
      for (std::uint8_t& byte : tensor) {
        byte = static_cast<std::uint8_t>(random.next());
      }
      const auto at = reinterpret_cast<std::uint64_t>(tensor.data());
      segments.push_back({(at + 15) / 16 * 16 + odd, size, size});
    }
    rows.resize(rows_there * row_stride);
    ring.emplace(driver(), segments, slots, options);
  }

  static RingOptions small() { return {.device = 0, .ring_bytes = 128 << 10, .lot_bytes = 12 << 10, .programs = 0}; }

  std::vector<std::uint8_t> block(std::int64_t slot) const {
    std::vector<std::uint8_t> bytes;
    for (const Segment& segment : segments) {
      const auto* const begin =
          reinterpret_cast<const std::uint8_t*>(segment.address + static_cast<std::uint64_t>(slot) * segment.stride);
      bytes.insert(bytes.end(), begin, begin + segment.bytes);
    }
    return bytes;
  }
  std::vector<std::uint8_t> row(std::int64_t at) const {
    const auto begin = rows.begin() + at * static_cast<std::int64_t>(row_stride);
    return {begin, begin + static_cast<std::int64_t>(block_bytes)};
  }
  void clear(std::int64_t slot) {
    for (const Segment& segment : segments) {
      std::memset(reinterpret_cast<void*>(segment.address + static_cast<std::uint64_t>(slot) * segment.stride), 0,
                  segment.bytes);
    }
  }
  BlockRows<std::uint8_t> named() { return {rows.data(), row_stride}; }
  BlockRows<const std::uint8_t> read() const { return {rows.data(), row_stride}; }

  void out(const std::vector<std::int64_t>& slots, const std::vector<std::int64_t>& at,
           std::vector<std::uint32_t>& sums) {
    sums.assign(slots.size(), 0);
    ring->gather(slots, named(), at, {}, sums, &copier);
    CHECK(ring->advance(kLong));
  }
  void into(const std::vector<std::int64_t>& slots, const std::vector<std::int64_t>& at) {
    ring->scatter(slots, read(), at, {});
    CHECK(ring->advance(kLong));
  }

  std::size_t slots_there;
  std::size_t block_bytes;
  std::size_t row_stride;
  std::vector<std::vector<std::uint8_t>> tensors;
  std::vector<Segment> segments;
  std::vector<std::uint8_t> rows;
  RowCopier copier{1};
  std::optional<DeviceRing> ring;
};

void there_and_back(Place& place, std::size_t run) {
  Random random(11);
  std::vector<std::int64_t> slots(place.slots_there);
  std::iota(slots.begin(), slots.end(), 0);
  for (std::size_t index = slots.size(); index > 1; --index) {
    std::swap(slots[index - 1], slots[random.next() % index]);
  }
  const std::vector<std::int64_t> from(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(run));
  const std::vector<std::int64_t> to(slots.end() - static_cast<std::ptrdiff_t>(run), slots.end());
  std::vector<std::int64_t> at(place.rows.size() / place.row_stride);
  std::iota(at.begin(), at.end(), 0);
  std::rotate(at.begin(), at.begin() + 1, at.begin() + static_cast<std::ptrdiff_t>(at.size() / 2));
  at.resize(run);
  std::vector<std::vector<std::uint8_t>> meant;
  for (const std::int64_t slot : from) {
    meant.push_back(place.block(slot));
  }
  std::vector<std::uint32_t> sums;
  place.out(from, at, sums);
  for (std::size_t index = 0; index < run; ++index) {
    CHECK(place.row(at[index]) == meant[index]);
    CHECK(sums[index] == kvbm::crc32c(meant[index]));
  }
  for (const std::int64_t slot : to) {
    place.clear(slot);
  }
  place.into(to, at);
  for (std::size_t index = 0; index < run; ++index) {
    CHECK(place.block(to[index]) == meant[index]);
  }
}

void blocks_go_there_and_back() {
  Place in_pieces({2048, 4096, 16, 8192}, 40, 24);
  there_and_back(in_pieces, 18);
  Place apart({512, 512}, 64, 40, Place::small(), 96);
  there_and_back(apart, 30);
  Place longer_than_a_lot({40 << 10, 3 << 10}, 8, 6);
  there_and_back(longer_than_a_lot, 4);
  Place odd({1000, 37, 4, 6}, 30, 20, Place::small(), 3, 1);
  there_and_back(odd, 15);
  Place one({64}, 2, 2);
  there_and_back(one, 1);
}

void without_a_thread_checksums_are_the_callers_work() {
  const kvbm::tests::FewThreads few(0);
  blocks_go_there_and_back();
}

void a_block_longer_than_a_lot_is_whole() {
  Place place({100 << 10}, 4, 4);
  there_and_back(place, 2);
  CHECK(count("cuLaunchKernel") > 20);
}

void rows_in_order_are_one_copy() {
  Place place({1024}, 64, 64);
  std::vector<std::int64_t> slots(8);
  std::iota(slots.begin(), slots.end(), 3);
  std::vector<std::uint32_t> sums;
  place.out(slots, {}, sums);
  CHECK(count("cuMemcpyDtoHAsync") == 1);
  CHECK(place.row(5) == place.block(8));
  place.out(slots, {9, 10, 11, 4, 5, 20, 21, 22}, sums);
  CHECK(count("cuMemcpyDtoHAsync") == 1 && count("cuMemcpyBatchAsync") == 1);
  CHECK(log().find("of a batch 3072") != std::string::npos && log().find("of a batch 2048") != std::string::npos);
}

void a_copy_stays_in_memory_that_was_registered_at_once() {
  Place place({1024}, 64, 64);
  set("rows begin", reinterpret_cast<long long>(place.rows.data()));
  set("rows end", reinterpret_cast<long long>(place.rows.data() + place.rows.size()));
  set("range bytes", 2560);  // two rows and a half
  std::vector<std::int64_t> slots(8);
  std::iota(slots.begin(), slots.end(), 3);
  std::vector<std::uint32_t> sums;
  place.out(slots, {}, sums);
  const std::string words = log();
  std::size_t copies = 0;
  for (std::size_t at = words.find("of a batch "); at != std::string::npos; at = words.find("of a batch ", at + 1)) {
    ++copies;
  }
  CHECK(copies == 4);  // 8192 bytes: three times 2560, and the rest
  CHECK(place.row(2) == place.block(5) && place.row(7) == place.block(10));
  there_and_back(place, 20);
  CHECK(place.ring->reaches(place.rows.data(), place.rows.size()));
  CHECK(!place.ring->reaches(place.rows.data(), place.rows.size() + 1));
}

void launches_are_bounded_and_come_first() {
  Place place({64 << 10}, 64, 64, {.device = 0, .ring_bytes = 64 << 20, .lot_bytes = 8 << 20, .programs = 0});
  CHECK(place.ring->programs() == 66);
  std::vector<std::uint32_t> sums;
  std::vector<std::int64_t> slots(64);
  std::iota(slots.begin(), slots.end(), 0);
  place.out(slots, {}, sums);
  CHECK(log().find("pack 1024 by 64 on ") != std::string::npos);  // no more programs than have anything to do
  CHECK(log().find("priority -5") != std::string::npos);
  Place given({64 << 10}, 8, 8, {.device = 0, .ring_bytes = 16 << 20, .lot_bytes = 1 << 20, .programs = 5});
  CHECK(given.ring->programs() == 5);
  given.out({1, 2, 3, 4, 5, 6, 7}, {}, sums);
  CHECK(log().find("pack 112 by 5 on ") != std::string::npos);
}

void lots_are_packed_while_others_are_copied() {
  Place place({4096}, 64, 64, {.device = 0, .ring_bytes = 128 << 10, .lot_bytes = 8 << 10, .programs = 0});
  std::vector<std::int64_t> slots(32);
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<std::uint32_t> sums(32);
  set("held", 1);
  place.ring->gather(slots, place.named(), {}, {}, sums, &place.copier);
  CHECK(!place.ring->advance(kOnce));
  CHECK(count("cuLaunchKernel") == 8);  // as many as the ring has parts, and not one into a part in use
  CHECK(!place.ring->advance(kOnce));
  CHECK(count("cuLaunchKernel") == 8);
  set("held", 0);
  CHECK(place.ring->advance(kLong));
  CHECK(count("cuLaunchKernel") == 16);
}

// Waits for what is named, and for nothing else.
void runs_wait_for_what_is_named() {
  Place place({256}, 16, 16);
  void* engine = nullptr;
  void* other = nullptr;
  void* event = nullptr;
  of_fake<int(void*)>("cuCtxPushCurrent_v2")(&place);
  CHECK(driver().cuStreamCreateWithPriority(&engine, 1, 0) == 0);
  CHECK(driver().cuStreamCreateWithPriority(&other, 1, 0) == 0);
  CHECK(driver().cuEventCreate(&event, 2) == 0);
  of_fake<void(void*)>("fake_cuda_block")(other);  // unrelated
  std::vector<std::uint32_t> sums(2);
  const std::vector<std::int64_t> slots{3, 4};
  place.ring->gather(slots, place.named(), {}, {}, sums, &place.copier);
  CHECK(place.ring->advance(kLong));
  CHECK(driver().cuEventRecord(event, other) == 0);
  for (const bool by_event : {true, false}) {
    const std::vector<void*> events{event};
    const std::vector<void*> streams{other};
    const RunOrder after{by_event ? std::span(events) : std::span<void* const>(),
                         by_event ? std::span<void* const>() : std::span(streams)};
    place.ring->gather(slots, place.named(), {}, after, sums, &place.copier);
    for (int turn = 0; turn < 50; ++turn) {
      CHECK(!place.ring->advance(kOnce));
    }
    of_fake<void()>("fake_cuda_unblock")();
    CHECK(place.ring->advance(kLong));
    of_fake<void(void*)>("fake_cuda_block")(other);
  }
  // bytes to the device come over the link meanwhile; only the slots wait
  const std::vector<void*> streams{other};
  const std::string before = log();
  place.ring->scatter(slots, place.read(), {}, {{}, streams});
  for (int turn = 0; turn < 50; ++turn) {
    CHECK(!place.ring->advance(kOnce));
  }
  CHECK(log().substr(before.size()).find("to device 512") != std::string::npos);
  CHECK(log().substr(before.size()).find("unpack") == std::string::npos);
  of_fake<void()>("fake_cuda_unblock")();
  CHECK(place.ring->advance(kLong));
  driver().cuEventDestroy_v2(event);
  driver().cuStreamDestroy_v2(engine);
  driver().cuStreamDestroy_v2(other);
  void* left = nullptr;
  driver().cuCtxPopCurrent_v2(&left);
}

std::string thrown(Place& place) {
  try {
    place.ring->advance(kLong);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// While another thread captures a graph, calls of a thread that is not relaxed are refused, and end the capture.
void captures_and_copies_leave_each_other_alone() {
  Place place({4096, 512}, 64, 64);
  set("capturing", 1);
  there_and_back(place, 20);
  CHECK(count("broken captures") == 0);
  int mode = 0;
  driver().cuThreadExchangeStreamCaptureMode(&mode);  // the thread's own is what it was
  CHECK(mode == 0);
  driver().cuThreadExchangeStreamCaptureMode(&mode);
  void* const stream = &place;
  set("captured stream", reinterpret_cast<long long>(stream));
  const std::vector<void*> streams{stream};
  std::vector<std::uint32_t> sums(1);
  const std::vector<std::int64_t> slots{1};
  bool refused = false;
  try {
    place.ring->gather(slots, place.named(), {}, {{}, streams}, sums, &place.copier);
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused && !place.ring->is_under_way() && count("cuEventRecord") > 0);
  there_and_back(place, 3);
}

// An error of a question says nothing: the run goes on until the device confirms it.
void questions_that_fail_are_asked_again() {
  for (const int result : {900, 800, 999}) {
    Place place({4096}, 32, 32);
    std::vector<std::uint32_t> sums(16);
    std::vector<std::int64_t> slots(16);
    std::iota(slots.begin(), slots.end(), 0);
    refuse("cuEventQuery", -1, result);
    place.ring->gather(slots, place.named(), {}, {}, sums, &place.copier);
    CHECK(!place.ring->advance(std::chrono::milliseconds(5)));
    CHECK(place.ring->is_under_way());
    refuse("cuEventQuery", 0, 0);
    CHECK(place.ring->advance(kLong));
    CHECK(place.row(7) == place.block(7) && sums[7] == kvbm::crc32c(place.block(7)));
  }
}

// Whatever call is refused, in whatever lot: the run ends only once everything that was queued is confirmed, and the
// next is right.
void a_refused_call_ends_a_run_once_the_rest_is_confirmed() {
  const char* const calls[] = {"cuLaunchKernel",    "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord",
                               "cuStreamWaitEvent", "cuCtxPushCurrent",  "cuMemcpyBatchAsync"};
  for (const char* const call : calls) {
    for (const bool gathers : {true, false}) {
      for (int which = 1; which < 14; ++which) {
        Place place({4096}, 32, 32);
        std::vector<std::uint32_t> sums(32);
        std::vector<std::int64_t> slots(32);
        std::iota(slots.begin(), slots.end(), 0);
        const std::vector<std::uint8_t> kept = place.rows;
        refuse(call, which, 800);
        set("steps", 0);
        bool begun = true;
        try {
          if (gathers) {
            place.ring->gather(slots, place.named(), {}, {}, sums, &place.copier);
          } else {
            place.ring->scatter(slots, place.read(), {}, {});
          }
        } catch (const std::runtime_error&) {
          begun = false;  // then nothing was
        }
        CHECK(begun == place.ring->is_under_way());
        if (begun) {
          for (int turn = 0; turn < 3; ++turn) {
            CHECK(!place.ring->advance(kOnce));  // whoever is told of an end gives the slots to others
          }
          set("steps", 1);
          const std::string why = thrown(place);
          CHECK(why.empty() || why.find(std::string("CUDA error: ") + call) != std::string::npos);
          CHECK(!place.ring->is_under_way());
        }
        refuse(call, 0, 0);
        set("steps", 1);
        const std::string before = log();
        there_and_back(place, 9);
        place.ring.reset();
        CHECK(live() == 0);
      }
    }
  }
}

// A device that dies after any number of steps: the run ends with the reason, at once, and nothing is freed that it may
// still write.
void a_lost_device_ends_its_run_and_takes_no_other() {
  for (int steps = 0; steps < 40; ++steps) {
    Place place({4096}, 32, 32);
    std::vector<std::uint32_t> sums(32);
    std::vector<std::int64_t> slots(32);
    std::iota(slots.begin(), slots.end(), 0);
    set("die_after", steps);
    place.ring->gather(slots, place.named(), {}, {}, sums, &place.copier);
    const std::string why = thrown(place);
    CHECK(why.find("the GPU is lost") == 0 && why.find("CUDA_ERROR_ILLEGAL_ADDRESS") != std::string::npos);
    CHECK(place.ring->is_lost() && !place.ring->is_under_way());
    bool refused = false;
    try {
      place.ring->scatter(slots, place.read(), {}, {});
    } catch (const std::runtime_error&) {
      refused = true;
    }
    CHECK(refused);
    const long long before = live();
    place.ring.reset();
    CHECK(live() == before);
  }
}

void a_ring_that_goes_amid_a_run_leaves_its_memory() {
  Place place({4096}, 32, 32);
  std::vector<std::uint32_t> sums(4);
  const std::vector<std::int64_t> slots{0, 1, 2, 3};
  set("held", 1);
  place.ring->gather(slots, place.named(), {}, {}, sums, &place.copier);
  CHECK(!place.ring->advance(kOnce));
  const long long before = live();
  place.ring.reset();
  CHECK(live() == before);
}

void a_ring_that_cannot_be_opened_leaves_nothing() {
  reset();
  const long long before = live();  // what the lost devices of other tests left
  const char* const calls[] = {"cuDevicePrimaryCtxRetain",
                               "cuModuleLoadData",
                               "cuModuleGetFunction",
                               "cuStreamCreateWithPriority",
                               "cuEventCreate",
                               "cuMemAlloc",
                               "cuMemHostAlloc",
                               "cuMemcpyHtoDAsync"};
  for (const char* const call : calls) {
    for (int which = 1; which < 4; ++which) {
      refuse(call, which, 2);
      try {
        const DeviceRing ring(driver(), {{4096, 64, 64}}, 4, Place::small());
      } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()).find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
      }
      CHECK(live() == before);
      refuse(call, 0, 0);
    }
  }
  CHECK(kvbm::tests::thrown_code([] { const DeviceRing ring(driver(), {}, 4, Place::small()); }) ==
        kvbm::ErrorCode::kLayout);
  RingOptions tiny = Place::small();
  tiny.ring_bytes = 1024;
  CHECK(kvbm::tests::thrown_code([&] { const DeviceRing ring(driver(), {{4096, 64, 64}}, 4, tiny); }) ==
        kvbm::ErrorCode::kLayout);
  bool thrown = false;
  try {
    kvbm::cuda_driver("libnothing-of-the-kind.so");
  } catch (const std::runtime_error& error) {
    thrown = std::string(error.what()).find("libnothing-of-the-kind.so") != std::string::npos;
  }
  CHECK(thrown);
}

}  // namespace

int main() {
  return kvbm::tests::run({
      {"blocks go to rows and back", blocks_go_there_and_back},
      {"without a thread checksums are the caller's work", without_a_thread_checksums_are_the_callers_work},
      {"a block longer than a lot is whole", a_block_longer_than_a_lot_is_whole},
      {"rows in order are one copy", rows_in_order_are_one_copy},
      {"a copy stays in memory that was registered at once", a_copy_stays_in_memory_that_was_registered_at_once},
      {"launches are bounded, on a stream of the highest priority", launches_are_bounded_and_come_first},
      {"lots are packed while others are copied", lots_are_packed_while_others_are_copied},
      {"a run waits for what is named and for nothing else", runs_wait_for_what_is_named},
      {"captures and copies leave each other alone", captures_and_copies_leave_each_other_alone},
      {"questions that fail are asked again", questions_that_fail_are_asked_again},
      {"a refused call ends a run once the rest is confirmed", a_refused_call_ends_a_run_once_the_rest_is_confirmed},
      {"a lost device ends its run and takes no other", a_lost_device_ends_its_run_and_takes_no_other},
      {"a ring that goes amid a run leaves its memory", a_ring_that_goes_amid_a_run_leaves_its_memory},
      {"a ring that cannot be opened leaves nothing", a_ring_that_cannot_be_opened_leaves_nothing},
  });
}
