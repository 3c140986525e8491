#include "kvbm/batch_lock.hpp"

#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvbm {
namespace {

// Batches and questions last microseconds, so a short spin mostly suffices; after it the other side may have lost its
// core.
constexpr int kSpins = 256;

// So long a writer waits for readers that waited for the batch before: one of them may have lost its core.
constexpr int kTurns = 64;

class Patience {
 public:
  void wait() noexcept {
    if (++turns_ < kSpins) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else {
      std::this_thread::yield();
    }
  }

 private:
  int turns_ = 0;  // how often it has waited
};

std::size_t stripe_of_this_thread(std::size_t stripes) noexcept {
  static std::atomic<std::size_t> next{0};
  thread_local const std::size_t mine = next.fetch_add(1, std::memory_order_relaxed);
  return mine % stripes;
}

}  // namespace

std::size_t BatchLock::lock_shared() noexcept {
  const std::size_t stripe = stripe_of_this_thread(kStripes);
  std::atomic<std::uint32_t>& readers = stripes_[stripe].readers;
  Patience patience;
  bool is_waiting = false;
  while (true) {
    // Announce, then look: the writer looks, then waits for those announced. One of the two sees the other.
    readers.fetch_add(1, std::memory_order_seq_cst);
    if (!has_writer_.load(std::memory_order_seq_cst)) {
      if (is_waiting) {
        waiting_.fetch_sub(1, std::memory_order_relaxed);
      }
      return stripe;
    }
    readers.fetch_sub(1, std::memory_order_release);
    if (!is_waiting) {
      is_waiting = true;
      waiting_.fetch_add(1, std::memory_order_relaxed);
    }
    while (has_writer_.load(std::memory_order_relaxed)) {
      patience.wait();
    }
  }
}

void BatchLock::unlock_shared(std::size_t stripe) noexcept {
  stripes_[stripe].readers.fetch_sub(1, std::memory_order_release);
}

void BatchLock::lock() noexcept {
  writers_.lock();
  Patience for_readers;
  for (int turn = 0; turn < kTurns && waiting_.load(std::memory_order_relaxed) != 0; ++turn) {
    for_readers.wait();
  }
  has_writer_.store(true, std::memory_order_seq_cst);
  for (Stripe& stripe : stripes_) {
    Patience patience;
    while (stripe.readers.load(std::memory_order_seq_cst) != 0) {
      patience.wait();
    }
  }
}

void BatchLock::unlock() noexcept {
  has_writer_.store(false, std::memory_order_release);
  writers_.unlock();
}

}  // namespace kvbm
