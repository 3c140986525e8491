// BatchLock: one writer that works in short batches, many readers that ask short questions. A writer that wants in is
// let in before new readers, and readers that waited for a batch before the next one, so neither starves the other. Any
// thread; a thread holds it at most once.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace kvbm {

class BatchLock {
 public:
  // Readers. Each returns the stripe that unlock_shared needs.
  std::size_t lock_shared() noexcept;
  void unlock_shared(std::size_t stripe) noexcept;

  // The writer; writers among each other take turns.
  void lock() noexcept;
  void unlock() noexcept;

 private:
  static constexpr std::size_t kStripes = 16;

  // Readers of one stripe; on a line of its own, so that readers on different cores do not take it from each other.
  struct alignas(64) Stripe {
    std::atomic<std::uint32_t> readers{0};  // how many of them are inside
  };

  std::array<Stripe, kStripes> stripes_;             // readers, by a hash of their thread
  alignas(64) std::atomic<bool> has_writer_{false};  // a writer is inside, or waits for readers to leave
  std::atomic<std::uint32_t> waiting_{0};            // readers that found one, and are not inside yet
  std::mutex writers_;                               // held by the writer inside
};

// The same, held while these exist.
class ReadGuard {
 public:
  explicit ReadGuard(BatchLock& lock) noexcept : lock_(lock), stripe_(lock.lock_shared()) {}
  ~ReadGuard() { lock_.unlock_shared(stripe_); }
  ReadGuard(const ReadGuard&) = delete;
  ReadGuard& operator=(const ReadGuard&) = delete;

 private:
  BatchLock& lock_;           // what is held
  const std::size_t stripe_;  // where this reader is counted
};

using WriteGuard = std::lock_guard<BatchLock>;

}  // namespace kvbm
