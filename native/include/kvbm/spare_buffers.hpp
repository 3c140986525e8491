// Large buffers that were used before: a fresh page costs a fault and is cleared first, which takes longer than filling
// it.
//
// Life: whoever takes a buffer owns it, and may give it back or not. Threads: any; each call takes the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace kvbm {

struct Buffer {
  std::unique_ptr<std::uint8_t[]> bytes;
  std::size_t size = 0;
};

class SpareBuffers {
 public:
  // most_bytes: kept of what is given; the one that was given first goes first.
  explicit SpareBuffers(std::size_t most_bytes) noexcept : most_bytes_(most_bytes) {}

  // One of at least so many bytes with anything in them, and of no more than twice as many when it was used before.
  // Throws bad_alloc.
  Buffer take(std::size_t least_bytes) {
    {
      const std::lock_guard held(lock_);
      for (std::size_t at = spare_.size(); at-- > 0;) {  // the one given last may still be in a cache
        if (spare_[at].size >= least_bytes && spare_[at].size / 2 <= least_bytes) {
          Buffer buffer = std::move(spare_[at]);
          spare_.erase(spare_.begin() + static_cast<std::ptrdiff_t>(at));
          kept_bytes_ -= buffer.size;
          return buffer;
        }
      }
    }
    return {std::make_unique_for_overwrite<std::uint8_t[]>(least_bytes), least_bytes};
  }

  // Small ones are not kept: for those the allocator does as well.
  void give(Buffer buffer) noexcept {
    if (buffer.size < kLeastBytes || buffer.size > most_bytes_) {
      return;
    }
    std::vector<Buffer> gone;  // freed without the lock
    const std::lock_guard held(lock_);
    try {
      spare_.reserve(spare_.size() + 1);
      gone.reserve(spare_.size());
    } catch (const std::bad_alloc&) {
      return;
    }
    kept_bytes_ += buffer.size;
    spare_.push_back(std::move(buffer));
    while (kept_bytes_ > most_bytes_) {  // never the new one: it is no larger than that
      kept_bytes_ -= spare_.front().size;
      gone.push_back(std::move(spare_.front()));
      spare_.erase(spare_.begin());
    }
  }

  std::size_t kept_bytes() const {
    const std::lock_guard held(lock_);
    return kept_bytes_;
  }

 private:
  static constexpr std::size_t kLeastBytes = std::size_t{1} << 20;

  const std::size_t most_bytes_;
  mutable std::mutex lock_;
  std::vector<Buffer> spare_;
  std::size_t kept_bytes_ = 0;
};

}  // namespace kvbm
