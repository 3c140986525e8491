#include "kvbm/batch_lock.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace kvbm;

namespace {

void readers_never_see_a_batch_half_done() {
  constexpr int kBatches = 200;
  BatchLock lock;
  std::uint64_t first = 0;  // plain on purpose: only the lock keeps these two together
  std::uint64_t second = 0;
  std::atomic<int> writing{2};
  std::atomic<std::uint64_t> reads{0};
  std::vector<std::thread> threads;
  for (int writer = 0; writer < 2; ++writer) {
    threads.emplace_back([&] {
      for (int batch = 0; batch < kBatches; ++batch) {
        {
          const WriteGuard change(lock);
          ++first;
          ++second;
        }
        std::this_thread::yield();
      }
      --writing;
    });
  }
  for (int reader = 0; reader < 3; ++reader) {
    threads.emplace_back([&] {
      std::uint64_t before = 0;
      do {
        const ReadGuard reading(lock);
        CHECK(first == second && first >= before);
        before = first;
        ++reads;
      } while (writing != 0);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(first == 2 * kBatches && second == first && reads >= 3);
}

void readers_are_inside_together() {
  // More than there are stripes, so some share one. Each waits until all are inside: with readers one at a time this
  // never ends.
  constexpr int kReaders = 20;
  BatchLock lock;
  std::atomic<int> inside{0};
  std::vector<std::thread> threads;
  for (int reader = 0; reader < kReaders; ++reader) {
    threads.emplace_back([&] {
      const ReadGuard reading(lock);
      ++inside;
      while (inside != kReaders) {
        std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const WriteGuard change(lock);  // and they have all left
}

void a_waiting_writer_goes_before_new_readers() {
  // Two readers overlap for ever unless a writer that waits keeps new ones out.
  BatchLock lock;
  std::atomic<bool> is_written{false};
  std::atomic<int> inside{0};
  std::vector<std::thread> threads;
  for (int reader = 0; reader < 2; ++reader) {
    threads.emplace_back([&] {
      while (!is_written) {
        const ReadGuard reading(lock);
        ++inside;
        for (int turn = 0; turn < 100 && inside < 2 && !is_written; ++turn) {
          std::this_thread::yield();
        }
        --inside;
      }
    });
  }
  {
    const WriteGuard change(lock);
    CHECK(inside == 0);
    is_written = true;
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace

int main() {
  return tests::run({{"readers never see a batch half done", readers_never_see_a_batch_half_done},
                     {"readers are inside together", readers_are_inside_together},
                     {"a waiting writer goes before new readers", a_waiting_writer_goes_before_new_readers}});
}
