#include "kvbm/row_copy.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "kvbm/checksum.hpp"
#include "no_threads.hpp"

using namespace kvbm;
using tests::Random;

namespace {

// 0 … count - 1 in some order.
std::vector<std::int64_t> shuffled(std::size_t count, Random& random) {
  std::vector<std::int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t left = count; left > 1; --left) {
    std::swap(order[left - 1], order[random.below(left)]);
  }
  return order;
}

// A run of random size is copied between random places; every byte of the target must be the one it should, also beside
// the rows.
void copy_once(RowCopier& copier, Random& random, std::size_t row_bytes, std::size_t count, bool wants_checksums) {
  const std::size_t source_rows = count + random.below(3);
  const std::size_t target_rows = count + random.below(3);
  const std::size_t source_stride = row_bytes + random.below(70);
  const std::size_t target_stride = row_bytes + random.below(70);
  const auto source = random.bytes(source_rows * source_stride + 64);
  std::vector<std::uint8_t> target(target_rows * target_stride + 64, 0x5A);
  const std::size_t source_begin = random.below(64);
  const std::size_t target_begin = random.below(64);
  auto from = shuffled(source_rows, random);
  auto to = shuffled(target_rows, random);
  if (random.below(4) == 0 && count > 1) {
    from[0] = from[1];  // the same row twice
  }
  auto expected = target;
  std::vector<std::uint32_t> expected_sums(count);
  for (std::size_t entry = 0; entry < count; ++entry) {
    const std::uint8_t* const row =
        source.data() + source_begin + static_cast<std::size_t>(from[entry]) * source_stride;
    std::memcpy(expected.data() + target_begin + static_cast<std::size_t>(to[entry]) * target_stride, row, row_bytes);
    expected_sums[entry] = crc32c_portable({row, row_bytes}, 0);
  }
  std::vector<std::uint32_t> sums(wants_checksums ? count : 0, 0xDEADBEEF);
  const SourceRows source_view{source.data() + source_begin, static_cast<std::ptrdiff_t>(source_stride), from.data()};
  copier.copy({target.data() + target_begin, static_cast<std::ptrdiff_t>(target_stride), to.data()}, source_view, count,
              row_bytes, sums);
  CHECK(target == expected);
  CHECK(!wants_checksums || sums == expected_sums);
  std::fill(sums.begin(), sums.end(), 0xDEADBEEF);
  copier.checksum(source_view, row_bytes, sums);
  CHECK(!wants_checksums || sums == expected_sums);
}

void rows_arrive() {
  for (const unsigned threads : {1U, 3U}) {
    RowCopier copier(threads);
    CHECK(copier.threads() == threads);
    Random random(threads);
    for (int pass = 0; pass < 40; ++pass) {
      copy_once(copier, random, 1 + random.below(9'000), random.below(60), pass % 2 == 0);
    }
  }
}

void large_rows_are_shared() {
  RowCopier copier(3);
  Random random(7);
  for (const std::size_t row_bytes : {512U * 1024 - 1, 512U * 1024, 800'001U}) {
    for (const std::size_t count : {1U, 3U}) {
      copy_once(copier, random, row_bytes, count, true);
      copy_once(copier, random, row_bytes, count, false);
    }
  }
}

void rows_in_order_need_no_indexes() {
  RowCopier copier(2);
  Random random(8);
  const auto source = random.bytes(40 * 10'000);
  std::vector<std::uint8_t> target(source.size());
  copier.copy({target.data(), 10'000, nullptr}, {source.data(), 10'000, nullptr}, 40, 10'000, {});
  CHECK(target == source);
}

void empty_runs_are_no_trouble() {
  RowCopier copier(2);
  std::vector<std::uint32_t> sums(3, 7);
  copier.copy({}, {}, 0, 4096, {});
  std::uint8_t byte = 0;
  copier.copy({&byte, 0, nullptr}, {&byte, 0, nullptr}, 3, 0, sums);
  CHECK(std::all_of(sums.begin(), sums.end(), [](std::uint32_t sum) { return sum == 0; }));
}

void callers_share_the_threads() {
  RowCopier copier(3);
  std::vector<std::thread> callers;
  for (std::uint64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&copier, caller] {
      Random random(100 + caller);
      for (int pass = 0; pass < 4; ++pass) {
        copy_once(copier, random, 1 + random.below(300'000), 1 + random.below(4), true);
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

void a_forked_child_copies_alone() {
  RowCopier copier(3);
  Random random(9);
  copy_once(copier, random, 100'000, 10, true);  // the threads have been at work
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that waits for threads it does not have is killed
    copy_once(copier, random, 100'000, 10, true);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void a_forked_child_may_end_it() {
  auto* const copier = new RowCopier(3);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    delete copier;
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  delete copier;
}

void fewer_threads_will_do() {
  Random random(10);
  for (const int given : {0, 1, 3}) {
    const tests::FewThreads few(given);
    RowCopier copier(4);
    CHECK(copier.threads() == static_cast<unsigned>(given) + 1 && copier.lacking() == 3 - static_cast<unsigned>(given));
    for (int pass = 0; pass < 10; ++pass) {
      copy_once(copier, random, 1 + random.below(300'000), 1 + random.below(4), pass % 2 == 0);
    }
  }
}

}  // namespace

int main() {
  return tests::run({{"rows arrive where they should, with their checksums", rows_arrive},
                     {"a large row is copied in parts whose checksums add up", large_rows_are_shared},
                     {"rows in order need no indexes", rows_in_order_need_no_indexes},
                     {"empty runs and empty rows are no trouble", empty_runs_are_no_trouble},
                     {"several callers share the threads", callers_share_the_threads},
                     {"a forked child copies alone", a_forked_child_copies_alone},
                     {"a forked child may end a copier of its parent", a_forked_child_may_end_it},
                     {"where the system gives few threads, few copy", fewer_threads_will_do}});
}
