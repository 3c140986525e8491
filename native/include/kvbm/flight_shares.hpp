// FlightShares: how many transfers of a file may be in flight, and whose. Made once for a file, then told what begins and ends.
// No clock and no lock inside: the owner of a lane's mutex calls it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvbm {

class FlightShares {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // After a read has ended another is likely for so long: a prompt is read in several runs, and a burst of writes would meet the next.
  // Offloads lose little by it, for a quarter of the usual depth nearly fills a device.
  static constexpr auto kQuiet = std::chrono::milliseconds(50);

  FlightShares(std::uint32_t depth, double offload_share) noexcept
      : idle_limit_(std::max<std::uint32_t>(depth - depth / 4, 1)),
        busy_limit_(std::max<std::uint32_t>(static_cast<std::uint32_t>(offload_share * depth), 1)) {}

  // Writes leave a quarter of the flights free for a read that comes; while reads are in flight, and shortly after, they have
  // only their share. At least one always may begin, so that offloads go on.
  bool may_write(Time now) const noexcept {
    const bool has_reads = reads_ > 0 || (was_read_ && now - last_read_ < kQuiet);
    return writes_ < (has_reads ? std::min(busy_limit_, idle_limit_) : idle_limit_);
  }

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
  std::uint32_t idle_limit_;  // of writes, when nobody reads
  std::uint32_t busy_limit_;  // of writes, when somebody does
  std::uint32_t reads_ = 0;   // in flight
  std::uint32_t writes_ = 0;  // in flight
  bool was_read_ = false;     // whether a read has ended yet
  Time last_read_{};          // when the last one did
};

}  // namespace kvbm
