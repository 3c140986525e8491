#include "kvbm/header_scan.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

#include "kvbm/block_io.hpp"

namespace kvbm {
namespace {

constexpr std::uint32_t kMostThreads = 16;

// A read as it ended: what a signal or a short queue has stopped is begun again.
std::int64_t read_page(int file, std::uint8_t* page, std::uint64_t position) noexcept {
  for (;;) {
    const ssize_t done = pread(file, page, kPageBytes, static_cast<off_t>(position));
    if (done >= 0) {
      return done;
    }
    if (errno != EINTR && errno != EAGAIN) {
      return -errno;
    }
  }
}

}  // namespace

HeaderScan::HeaderScan(int file, std::uint32_t depth, bool by_ring)
    : file_(file),
      depth_(std::max<std::uint32_t>(1, depth)),
      room_(static_cast<std::uint8_t*>(::operator new(kPageBytes* depth_, std::align_val_t{kPageBytes}))) {
  int refusal = 0;
  if (by_ring) {
    ring_ = IoRing::open(file, depth_, refusal);
  }
}

HeaderScan::~HeaderScan() { ::operator delete(room_, std::align_val_t{kPageBytes}); }

std::uint8_t* HeaderScan::page(std::size_t place) const noexcept { return room_ + kPageBytes * place; }

void HeaderScan::run(std::span<const Wanted> wanted, const Settle& settle) {
  if (ring_ != nullptr) {
    run_ring(wanted, settle);
  } else {
    run_calls(wanted, settle);
  }
}

void HeaderScan::run_ring(std::span<const Wanted> wanted, const Settle& settle) {
  std::vector<iovec> pieces(depth_);
  std::vector<std::size_t> at(depth_);  // by place: which of `wanted`
  std::size_t next = 0;
  std::size_t under_way = 0;
  const auto begin = [&](std::size_t place) {
    at[place] = next;
    pieces[place] = {page(place), kPageBytes};
    ring_->push(false, &pieces[place], 1, wanted[next++].position, place);
    ++under_way;
  };
  while (next < wanted.size() && under_way < depth_) {
    begin(under_way);
  }
  while (under_way > 0) {
    ring_->submit_and_wait();
    for (IoRing::Completion done; ring_->take(done);) {
      const auto place = static_cast<std::size_t>(done.tag);
      const Wanted& one = wanted[at[place]];
      const bool again = done.result == -EINTR || done.result == -EAGAIN;
      settle(one.index, page(place), again ? read_page(file_, page(place), one.position) : done.result);
      --under_way;
      if (next < wanted.size()) {
        begin(place);
      }
    }
  }
}

void HeaderScan::run_calls(std::span<const Wanted> wanted, const Settle& settle) {
  std::atomic<std::size_t> next{0};
  const auto work = [&](std::size_t place) {
    for (std::size_t at = next.fetch_add(1); at < wanted.size(); at = next.fetch_add(1)) {
      settle(wanted[at].index, page(place), read_page(file_, page(place), wanted[at].position));
    }
  };
  const std::size_t threads = std::min<std::size_t>({depth_, kMostThreads, wanted.size()});
  std::vector<std::jthread> others;
  for (std::size_t place = 1; place < threads; ++place) {
    try {
      others.emplace_back(work, place);
    } catch (const std::system_error&) {  // no thread is to be had: fewer will do
      break;
    }
  }
  work(0);
}

}  // namespace kvbm
