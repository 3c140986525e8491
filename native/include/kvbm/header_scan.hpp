// HeaderScan: reads pages at many places of one file, some at a time, and hands each to who asked. Made, run once by
// one thread, gone. Reads that the device never ends keep the thread that runs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "kvbm/io_ring.hpp"

namespace kvbm {

class HeaderScan {
 public:
  // A page to read.
  struct Wanted {
    std::size_t index;       // whose
    std::uint64_t position;  // in the file
  };
  // What was read: how many bytes, or minus errno. Called by the thread that runs the scan, or by several with indexes
  // of their own.
  using Settle = std::function<void(std::size_t index, const std::uint8_t* page, std::int64_t result)>;

  // depth: pages at a time. by_ring: over io_uring where the kernel gives one; else threads of its own call pread.
  HeaderScan(int file, std::uint32_t depth, bool by_ring);
  ~HeaderScan();
  HeaderScan(const HeaderScan&) = delete;
  HeaderScan& operator=(const HeaderScan&) = delete;

  void run(std::span<const Wanted> wanted, const Settle& settle);

 private:
  void run_ring(std::span<const Wanted> wanted, const Settle& settle);
  void run_calls(std::span<const Wanted> wanted, const Settle& settle);
  std::uint8_t* page(std::size_t place) const noexcept;

  const int file_;                // not owned
  const std::uint32_t depth_;     // at least 1
  std::unique_ptr<IoRing> ring_;  // nullptr: threads call pread
  std::uint8_t* room_ = nullptr;  // a page for each of `depth`, aligned
};

}  // namespace kvbm
