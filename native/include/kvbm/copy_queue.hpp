// CopyQueue: runs of blocks gathered and scattered in a thread of its own, scatters first, for a caller that may not
// wait.
//
// Life: made over a table and a copier that outlive it, with its thread; close() or the destructor ends the thread once
// the slice under way is over, and what is left of its runs is never copied. After fork() the child has no thread:
// nothing ends there. Threads: close() and the destructor from one, when no other call is under way; the others from
// any; the copies run in its own. What a run names stays there until it has ended or the queue is closed. Native
// implementation of kvbm/pools/hbm/copy_queue.py's ThreadedQueue.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include <unistd.h>

#include "kvbm/segment_copy.hpp"

namespace kvbm {

class CopyQueue {
 public:
  // Blocks to copy between slots and rows; at[i] is the row of slots[i].
  struct Run {
    std::uint64_t id;                     // the caller's name for it
    std::span<const std::int64_t> slots;  // below the table's slots()
    std::span<const std::int64_t> at;     // as many
    BlockRows<std::uint8_t> rows;         // a scatter only reads them
    std::uint32_t* checksums;             // room for each block's CRC-32C, which makes it a gather; null: a scatter
  };
  struct Ended {
    std::uint64_t id;               // the run's
    std::chrono::nanoseconds busy;  // time spent on it
  };

  // Throws std::system_error: no thread is to be had.
  CopyQueue(const SegmentTable& table, RowCopier& copier);
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Every index was looked at. Throws Error: kLayout, once closed; std::bad_alloc. Nothing is copied then.
  void add(const Run& run);

  // The runs that have ended since the last call, in that order.
  std::vector<Ended> ended();

  // Runs added that have not ended.
  std::size_t under_way() const;

  // Waits until nothing is under way; whether that is so.
  bool wait(std::chrono::nanoseconds timeout);

  // Idempotent.
  void close() noexcept;

 private:
  // A run with what is left of it.
  struct Part {
    Run run;                           // as added
    std::size_t done = 0;              // its first blocks, copied
    std::chrono::nanoseconds busy{0};  // time spent on those
  };

  void work() noexcept;
  // Copies the next blocks of a run, as many as one slice has.
  void copy_slice(Part& part) const noexcept;

  const SegmentTable& table_;       // where the slots lie
  RowCopier& copier_;               // whose threads help
  mutable std::mutex lock_;         // over what follows
  std::condition_variable work_;    // there is a run, or the end
  std::condition_variable idle_;    // nothing is under way any more
  std::deque<Part> scatters_;       // not ended, by age
  std::deque<Part> gathers_;        // not ended, by age
  std::vector<Ended> ended_;        // not asked for yet
  bool closed_ = false;             // the thread leaves
  const pid_t process_ = getpid();  // whose thread it is
  std::thread thread_;              // last, so that it starts when all else is there
};

}  // namespace kvbm
