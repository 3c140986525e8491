// FlightShares: how many transfers of a file may be in flight, and whose. Made once for a file, then told what begins
// and ends. No clock and no lock inside: the owner of a lane's mutex calls it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvbm {

class FlightShares {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // After a read has ended another is likely for so long: a prompt is read in several runs, and a burst of writes would
  // meet the next. Offloads lose little by it, for what they keep nearly fills a device.
  static constexpr auto kQuiet = std::chrono::milliseconds(50);

  // A read that comes waits for the writes the device has, so what matters of those is their bytes. A device is kept
  // busy by these many, however large its blocks are: more only wait in its queue, where no read gets past them.
  static constexpr std::size_t kIdleBytes = std::size_t{16} << 20;  // of writes in flight, when nobody reads
  static constexpr std::size_t kBusyBytes = std::size_t{2} << 20;   // when somebody does

  FlightShares(std::uint32_t depth, double offload_share, std::size_t block_bytes) noexcept
      : depth_(depth),
        idle_limit_(at_most(depth - depth / 4, kIdleBytes, block_bytes)),
        busy_limit_(at_most(static_cast<std::uint32_t>(offload_share * depth), kBusyBytes, block_bytes)) {}

  // Writes leave a quarter of the flights free for a read that comes; while reads are in flight, and shortly after,
  // they have only their share.
  bool may_write(Time now) const noexcept {
    const bool has_reads = reads_ > 0 || (was_read_ && now - last_read_ < kQuiet);
    return writes_ < (has_reads ? std::min(busy_limit_, idle_limit_) : idle_limit_);
  }

  // Reads without end leave the last free flight to a write that waits, if none is under way, so that offloads go on.
  bool must_write(std::size_t free_flights) const noexcept { return depth_ > 1 && writes_ == 0 && free_flights == 1; }

  void begin_read() noexcept { ++reads_; }
  void begin_write() noexcept { ++writes_; }
  void end_read(Time now) noexcept {
    --reads_;
    was_read_ = true;
    last_read_ = now;
  }
  void end_write() noexcept { --writes_; }

  std::uint32_t in_flight() const noexcept { return reads_ + writes_; }

 private:
  // Transfers: so many, but not of more bytes, and at least one.
  static std::uint32_t at_most(std::uint32_t count, std::size_t bytes, std::size_t block_bytes) noexcept {
    return static_cast<std::uint32_t>(std::max<std::size_t>(std::min<std::size_t>(count, bytes / block_bytes), 1));
  }

  std::uint32_t depth_;       // of the file
  std::uint32_t idle_limit_;  // of writes, when nobody reads
  std::uint32_t busy_limit_;  // of writes, when somebody does
  std::uint32_t reads_ = 0;   // in flight
  std::uint32_t writes_ = 0;  // in flight
  bool was_read_ = false;     // whether a read has ended yet
  Time last_read_{};          // when the last one did
};

}  // namespace kvbm
