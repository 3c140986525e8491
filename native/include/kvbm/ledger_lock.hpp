// LedgerLock: the lock around a ledger, which Python's threads and the core's own both take.
//
// Life: made with its ledger and free; after fork() the child makes it anew, for whoever had it may not be there.
// Threads: any. A thread has it at most once, and gives it back itself. Not fair: whoever comes while it is free gets
// it.
//
// The core's threads take it with `lock` and never need the GIL while they have it. A thread of Python needs the GIL to
// go on, so it must not wait for it with the lock in hand: it waits with `wait_free`, which takes nothing, then tries
// again with the GIL. So whoever waits for the lock has not got the GIL, and whoever has the lock waits for nothing
// that a waiter has.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvbm {

class LedgerLock {
 public:
  LedgerLock() = default;
  LedgerLock(const LedgerLock&) = delete;
  LedgerLock& operator=(const LedgerLock&) = delete;

  // Takes it if it is free, or becomes so within about a microsecond; whether it did.
  bool try_lock() noexcept {
    std::uint32_t free = kFree;
    return state_.compare_exchange_strong(free, kTaken, std::memory_order_acquire, std::memory_order_relaxed) || spin();
  }
  void lock() noexcept;
  void unlock() noexcept {
    if (state_.exchange(kFree, std::memory_order_release) == kWaitedFor) [[unlikely]] {
      wake();
    }
  }

  // How a wait for a free lock ended.
  enum class Wait : std::uint8_t { kFree, kTimeout, kSignal };
  // Waits until it was free for a moment, which it may not be any more; at most so long, for ever where it is negative.
  // Takes nothing.
  Wait wait_free(std::int64_t timeout_ns) noexcept;

  bool is_locked() const noexcept { return state_.load(std::memory_order_relaxed) != kFree; }

  // In a forked child, where no other thread is: free, whoever had it.
  void reinitialise() noexcept { state_.store(kFree, std::memory_order_relaxed); }

 private:
  static constexpr std::uint32_t kFree = 0;
  static constexpr std::uint32_t kTaken = 1;
  static constexpr std::uint32_t kWaitedFor = 2;  // taken, and somebody may sleep until it is not

  bool spin() noexcept;
  void wake() noexcept;

  std::atomic<std::uint32_t> state_{kFree};  // one of the above; sleepers sleep on it
};

}  // namespace kvbm
