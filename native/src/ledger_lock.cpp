#include "kvbm/ledger_lock.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvbm {
namespace {

// Commands last a microsecond or a few; to sleep and to be woken costs more.
constexpr int kSpins = 64;

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) noexcept {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, timeout,
                 nullptr, 0);
}

std::int64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

bool LedgerLock::spin() noexcept {
  for (int turn = 0; turn < kSpins; ++turn) {
    std::uint32_t free = kFree;
    if (state_.load(std::memory_order_relaxed) == kFree &&
        state_.compare_exchange_strong(free, kTaken, std::memory_order_acquire, std::memory_order_relaxed)) {
      return true;
    }
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  return false;
}

void LedgerLock::lock() noexcept {
  if (try_lock()) {
    return;
  }
  // Others may sleep too: whoever slept leaves it marked, at the price of a wake-up that nobody needs.
  while (state_.exchange(kWaitedFor, std::memory_order_acquire) != kFree) {
    futex(state_, FUTEX_WAIT, kWaitedFor, nullptr);
  }
}

LedgerLock::Wait LedgerLock::wait_free(std::int64_t timeout_ns) noexcept {
  const std::int64_t deadline = timeout_ns < 0 ? 0 : now_ns() + timeout_ns;
  while (true) {
    std::uint32_t seen = state_.load(std::memory_order_relaxed);
    if (seen == kFree) {
      return Wait::kFree;
    }
    if (seen == kTaken && !state_.compare_exchange_weak(seen, kWaitedFor, std::memory_order_relaxed)) {
      continue;
    }
    timespec left{};
    if (timeout_ns >= 0) {
      const std::int64_t left_ns = deadline - now_ns();
      if (left_ns <= 0) {
        return Wait::kTimeout;
      }
      left = {static_cast<time_t>(left_ns / 1'000'000'000), static_cast<long>(left_ns % 1'000'000'000)};
    }
    if (futex(state_, FUTEX_WAIT, kWaitedFor, timeout_ns < 0 ? nullptr : &left) != 0 && errno == EINTR) {
      return Wait::kSignal;
    }
  }
}

// All of them: one that only waited to try again would keep the others asleep.
void LedgerLock::wake() noexcept { futex(state_, FUTEX_WAKE, INT_MAX, nullptr); }

}  // namespace kvbm
