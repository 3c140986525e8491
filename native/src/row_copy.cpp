#include "kvbm/row_copy.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kvbm/checksum.hpp"

namespace kvbm {
namespace {

// Work is handed out in pieces of about this size: small enough that threads end together, large enough that taking one
// is nothing.
constexpr std::size_t kPieceBytes = 256 * 1024;
// A run of fewer bytes is done before a thread has woken up.
constexpr std::size_t kSharedBytes = 192 * 1024;
// From so many bytes on a run is written past the caches, which it would only empty: whoever reads it next is a device,
// or much later.
constexpr std::size_t kStreamedBytes = 1024 * 1024;
// Checksum and copy take turns over so many bytes, which the first leaves in the nearest cache for the second. A
// multiple of the checksum's three lanes.
constexpr std::size_t kFusedBytes = 12 * 1024;
// More threads than this do not make memory faster, and the engine wants the cores.
constexpr unsigned kMostThreads = 8;

unsigned cores() noexcept {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    return static_cast<unsigned>(CPU_COUNT(&set));
  }
#endif
  return std::thread::hardware_concurrency();
}

void copy_bytes(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes, bool streamed) noexcept {
  if (streamed) {
    stream_copy(target, source, bytes);
  } else {
    std::memcpy(target, source, bytes);
  }
}

// Returns the CRC-32C of what was copied.
std::uint32_t copy_and_checksum(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes,
                                bool streamed) noexcept {
  if (streamed) {
    return stream_copy_crc32c(target, source, bytes);
  }
  std::uint32_t crc = 0;
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t step = std::min(kFusedBytes, bytes - done);
    crc = crc32c({source + done, step}, crc);
    std::memcpy(target + done, source + done, step);
    done += step;
  }
  return crc;
}

// memcpy, but for targets that begin at another place of a cache line than their source does: there the processor's own
// instruction for copies, which memcpy uses at these sizes, takes three times as long on some machines.
void copy_near(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64;
  std::size_t done = 0;
#if defined(__SSE2__)
  if ((reinterpret_cast<std::uintptr_t>(target) - reinterpret_cast<std::uintptr_t>(source)) % kLine != 0) {
    for (; done + kLine <= bytes; done += kLine) {
      const auto* const from = reinterpret_cast<const __m128i*>(source + done);
      auto* const to = reinterpret_cast<__m128i*>(target + done);
      const __m128i first = _mm_loadu_si128(from);
      const __m128i second = _mm_loadu_si128(from + 1);
      const __m128i third = _mm_loadu_si128(from + 2);
      const __m128i fourth = _mm_loadu_si128(from + 3);
      _mm_storeu_si128(to, first);
      _mm_storeu_si128(to + 1, second);
      _mm_storeu_si128(to + 2, third);
      _mm_storeu_si128(to + 3, fourth);
    }
  }
#endif
  std::memcpy(target + done, source + done, bytes - done);
}

// Returns the CRC-32C of what lies in the target afterwards.
std::uint32_t copy_then_checksum(std::uint8_t* target, const std::uint8_t* source, std::size_t bytes) noexcept {
  std::uint32_t crc = 0;
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t step = std::min(kFusedBytes, bytes - done);
    copy_near(target + done, source + done, step);
    // Or the compiler might read the source again in the target's place
    std::atomic_signal_fence(std::memory_order_seq_cst);
    crc = crc32c({target + done, step}, crc);
    done += step;
  }
  return crc;
}

}  // namespace

// A run under way. It lies on its caller's stack, who leaves when no thread is at it any more.
struct RowCopier::Run {
  TargetRows target;                             // where to; base is null when only checksums are wanted
  SourceRows source;                             // where from
  std::size_t count = 0;                         // rows
  std::size_t row_bytes = 0;                     // bytes of each
  std::uint32_t* checksums = nullptr;            // of each row; null: not wanted
  bool streamed = false;                         // written past the caches
  bool verified = false;                         // checksums are of the target
  std::size_t rows_in_piece = 1;                 // whole rows of a piece, where rows are small
  std::size_t pieces_in_row = 1;                 // pieces of a row, where rows are large
  std::size_t pieces = 0;                        // in all
  unsigned helpers = 0;                          // threads of the crew at it; under the crew's lock
  Run* younger = nullptr;                        // next in the crew's list; under the crew's lock
  alignas(64) std::atomic<std::size_t> next{0};  // first piece that nobody has taken

  Run(const TargetRows& to, const SourceRows& from, std::size_t rows, std::size_t bytes, std::uint32_t* sums) noexcept
      : target(to), source(from), count(rows), row_bytes(bytes), checksums(sums) {
    streamed = count * row_bytes >= kStreamedBytes;
    pieces_in_row = std::max<std::size_t>(1, row_bytes / kPieceBytes);
    rows_in_piece = pieces_in_row > 1 ? 1 : std::max<std::size_t>(1, kPieceBytes / std::max<std::size_t>(1, row_bytes));
    pieces = pieces_in_row > 1 ? count * pieces_in_row : (count + rows_in_piece - 1) / rows_in_piece;
    if (checksums != nullptr && pieces_in_row > 1) {
      std::fill_n(checksums, count, 0);  // what the parts of each row are added to
    }
  }

  // Takes pieces until none is left.
  void work_off() noexcept {
    for (std::size_t piece = next.fetch_add(1, std::memory_order_relaxed); piece < pieces;
         piece = next.fetch_add(1, std::memory_order_relaxed)) {
      if (pieces_in_row > 1) {
        work_part(piece / pieces_in_row, piece % pieces_in_row);
        continue;
      }
      for (std::size_t row = piece * rows_in_piece; row < std::min(count, (piece + 1) * rows_in_piece); ++row) {
        const std::uint32_t crc = work(row, 0, row_bytes);
        if (checksums != nullptr) {
          checksums[row] = crc;
        }
      }
    }
    streamed_is_seen();
  }

 private:
  // All but the last part are kPieceBytes; the last has what is left, less than twice as much.
  void work_part(std::size_t row, std::size_t part) noexcept {
    const std::size_t begin = part * kPieceBytes;
    const std::size_t end = part + 1 == pieces_in_row ? row_bytes : begin + kPieceBytes;
    const std::uint32_t crc = work(row, begin, end - begin);
    if (checksums != nullptr) {
      // A row's checksum is the sum of those of its parts, each carried over the bytes behind it: parts may end in any
      // order.
      std::atomic_ref<std::uint32_t>(checksums[row])
          .fetch_xor(crc32c_carried(crc, row_bytes - end), std::memory_order_relaxed);
    }
  }

  std::uint32_t work(std::size_t row, std::size_t begin, std::size_t bytes) noexcept {
    const std::uint8_t* const from = source[row] + begin;
    if (target.base == nullptr) {
      return crc32c({from, bytes});
    }
    if (verified) {
      return copy_then_checksum(target[row] + begin, from, bytes);
    }
    if (checksums != nullptr) {
      return copy_and_checksum(target[row] + begin, from, bytes, streamed);
    }
    copy_bytes(target[row] + begin, from, bytes, streamed);
    return 0;
  }
};

struct RowCopier::Crew {
  const pid_t process = getpid();    // whose threads they are
  std::mutex lock;                   // over what follows
  std::condition_variable work;      // there is a run, or the end
  std::condition_variable done;      // a thread has left a run
  Run* oldest = nullptr;             // runs with pieces that perhaps nobody has taken, by age
  bool ending = false;               // threads leave
  std::vector<std::thread> workers;  // the threads; changes only while the crew is made and ended

  void add(Run& run) noexcept {
    Run** end = &oldest;
    while (*end != nullptr) {
      end = &(*end)->younger;
    }
    *end = &run;
  }

  // Takes a run off the list, if it is still there.
  void drop(const Run& run) noexcept {
    for (Run** at = &oldest; *at != nullptr; at = &(*at)->younger) {
      if (*at == &run) {
        *at = run.younger;
        return;
      }
    }
  }

  void help() noexcept {
    std::unique_lock held(lock);
    while (true) {
      work.wait(held, [this] { return oldest != nullptr || ending; });
      if (oldest == nullptr) {
        return;
      }
      Run& run = *oldest;
      ++run.helpers;
      held.unlock();
      run.work_off();
      held.lock();
      drop(run);
      if (--run.helpers == 0) {
        done.notify_all();  // under the lock: once it is free the run may be gone
      }
    }
  }

  // Takes as many threads as the system gives, up to a count: whoever copies does what they would have done.
  void hire(unsigned count) {
    // Signals are for the threads of whoever embeds us.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while (workers.size() < count) {
        workers.emplace_back([this] { help(); });
#if defined(__linux__)
        pthread_setname_np(workers.back().native_handle(), "kvbm-copy");
#endif
      }
    } catch (const std::exception&) {  // no thread or no memory is to be had
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void end() noexcept {
    {
      const std::lock_guard held(lock);
      ending = true;
    }
    work.notify_all();
    for (std::thread& worker : workers) {
      worker.join();
    }
    workers.clear();
  }
};

RowCopier::RowCopier(unsigned threads) : crew_(std::make_unique<Crew>()) {
  const unsigned wanted = threads != 0 ? threads : std::clamp(cores(), 1U, kMostThreads);
  crew_->workers.reserve(wanted - 1);
  crew_->hire(wanted - 1);
  lacking_ = wanted - this->threads();
}

RowCopier::~RowCopier() {
  if (crew_->process != getpid()) {
    crew_.release();  // after fork(): its threads are the parent's, and its lock may be held for good
    return;
  }
  crew_->end();
}

unsigned RowCopier::threads() const noexcept { return static_cast<unsigned>(crew_->workers.size()) + 1; }

void RowCopier::share(Run& run) noexcept {
  if (run.count * run.row_bytes < kSharedBytes || run.pieces < 2 || crew_->workers.empty() ||
      crew_->process != getpid()) {
    run.work_off();
    return;
  }
  {
    const std::lock_guard held(crew_->lock);
    crew_->add(run);
  }
  const std::size_t wanted = run.pieces - 1;
  if (wanted < crew_->workers.size()) {
    for (std::size_t woken = 0; woken < wanted; ++woken) {
      crew_->work.notify_one();
    }
  } else {
    crew_->work.notify_all();
  }
  run.work_off();
  std::unique_lock held(crew_->lock);
  crew_->drop(run);
  crew_->done.wait(held, [&run] { return run.helpers == 0; });
}

void RowCopier::copy(const TargetRows& target, const SourceRows& source, std::size_t count, std::size_t row_bytes,
                     std::span<std::uint32_t> checksums) noexcept {
  Run run(target, source, count, row_bytes, checksums.empty() ? nullptr : checksums.data());
  share(run);
}

void RowCopier::copy_verified(const TargetRows& target, const SourceRows& source, std::size_t row_bytes,
                              std::span<std::uint32_t> checksums) noexcept {
  Run run(target, source, checksums.size(), row_bytes, checksums.data());
  run.verified = true;
  share(run);
}

void RowCopier::checksum(const SourceRows& source, std::size_t row_bytes, std::span<std::uint32_t> checksums) noexcept {
  Run run({}, source, checksums.size(), row_bytes, checksums.data());
  share(run);
}

}  // namespace kvbm
