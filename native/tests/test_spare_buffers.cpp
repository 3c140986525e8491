#include "kvbm/spare_buffers.hpp"

#include <cstring>
#include <thread>

#include "check.hpp"

using namespace kvbm;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

void what_was_given_is_taken_again() {
  SpareBuffers spare(8 * kMiB);
  Buffer first = spare.take(3 * kMiB);
  CHECK(first.size == 3 * kMiB);
  std::uint8_t* const bytes = first.bytes.get();
  spare.give(std::move(first));
  CHECK(spare.kept_bytes() == 3 * kMiB);
  CHECK(spare.take(4 * kMiB).bytes.get() != bytes);  // too small
  CHECK(spare.take(kMiB).bytes.get() != bytes);      // more than twice as large
  const Buffer again = spare.take(2 * kMiB);
  CHECK(again.bytes.get() == bytes && again.size == 3 * kMiB && spare.kept_bytes() == 0);
}

void no_more_is_kept_than_was_said_and_the_oldest_goes() {
  SpareBuffers spare(4 * kMiB);
  Buffer small = spare.take(kMiB / 2);
  spare.give(std::move(small));
  Buffer huge = spare.take(5 * kMiB);
  spare.give(std::move(huge));
  CHECK(spare.kept_bytes() == 0);
  std::vector<Buffer> taken;
  for (int number = 0; number < 3; ++number) {
    taken.push_back(spare.take(2 * kMiB));
  }
  std::uint8_t* const last = taken.back().bytes.get();
  for (Buffer& buffer : taken) {
    spare.give(std::move(buffer));
    CHECK(spare.kept_bytes() <= 4 * kMiB);
  }
  CHECK(spare.kept_bytes() == 4 * kMiB);
  CHECK(spare.take(2 * kMiB).bytes.get() == last);
}

void threads_never_share_one() {
  SpareBuffers spare(8 * kMiB);
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&spare, number] {
      for (int turn = 0; turn < 50; ++turn) {
        Buffer buffer = spare.take(kMiB);
        std::memset(buffer.bytes.get(), number, 4096);
        std::this_thread::yield();
        for (std::size_t at = 0; at < 4096; ++at) {
          CHECK(buffer.bytes[at] == number);
        }
        spare.give(std::move(buffer));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(spare.kept_bytes() <= 8 * kMiB);
}

}  // namespace

int main() {
  return tests::run(
      {{"what was given is taken again", what_was_given_is_taken_again},
       {"no more is kept than was said, and the oldest goes", no_more_is_kept_than_was_said_and_the_oldest_goes},
       {"threads never share a buffer", threads_never_share_one}});
}
