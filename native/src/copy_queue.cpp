#include "kvbm/copy_queue.hpp"

#include <algorithm>
#include <string>

#include <pthread.h>
#include <signal.h>

#include "kvbm/error.hpp"

namespace kvbm {
namespace {

// A run is copied in slices of about this size, so that a scatter that somebody waits for is soon next.
constexpr std::uint64_t kSliceBytes = 16 * 1024 * 1024;

}  // namespace

CopyQueue::CopyQueue(const SegmentTable& table, RowCopier& copier) : table_(table), copier_(copier) {
  // Signals are for the threads of whoever embeds us.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { work(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
#if defined(__linux__)
  pthread_setname_np(thread_.native_handle(), "kvbm-queue");
#endif
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

CopyQueue::~CopyQueue() { close(); }

void CopyQueue::add(const Run& run) {
  {
    const std::lock_guard held(lock_);
    if (closed_) {
      throw Error(ErrorCode::kLayout,
                  "the queue of copies is closed; " + std::to_string(run.slots.size()) + " blocks were not copied");
    }
    ended_.reserve(ended_.size() + scatters_.size() + gathers_.size() + 1);  // first: the thread does not allocate
    (run.checksums == nullptr ? scatters_ : gathers_).push_back({run});
  }
  work_.notify_one();
}

std::vector<CopyQueue::Ended> CopyQueue::ended() {
  const std::lock_guard held(lock_);
  std::vector<Ended> ended;
  ended.reserve(scatters_.size() + gathers_.size());
  ended.swap(ended_);
  return ended;
}

std::size_t CopyQueue::under_way() const {
  const std::lock_guard held(lock_);
  return scatters_.size() + gathers_.size();
}

bool CopyQueue::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock held(lock_);
  return idle_.wait_for(held, timeout, [this] { return (scatters_.empty() && gathers_.empty()) || closed_; }) &&
         !closed_;
}

void CopyQueue::close() noexcept {
  if (process_ != getpid()) {
    if (thread_.joinable()) {
      thread_.detach();  // after fork(): it is the parent's, and the lock may be held for good
    }
    return;
  }
  {
    const std::lock_guard held(lock_);
    closed_ = true;
  }
  work_.notify_all();
  idle_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void CopyQueue::work() noexcept {
  std::unique_lock held(lock_);
  while (true) {
    work_.wait(held, [this] { return closed_ || !scatters_.empty() || !gathers_.empty(); });
    if (closed_) {
      return;
    }
    // Only this thread takes parts out, and adding one to a deque moves none of the others.
    std::deque<Part>& parts = scatters_.empty() ? gathers_ : scatters_;
    Part& part = parts.front();
    held.unlock();
    copy_slice(part);
    held.lock();
    if (part.done == part.run.slots.size()) {
      ended_.push_back({part.run.id, part.busy});
      parts.pop_front();
      if (scatters_.empty() && gathers_.empty()) {
        idle_.notify_all();
      }
    }
  }
}

void CopyQueue::copy_slice(Part& part) const noexcept {
  const auto begin = std::chrono::steady_clock::now();
  const Run& run = part.run;
  const std::uint64_t most = std::max<std::uint64_t>(1, kSliceBytes / table_.block_bytes());
  const std::size_t count = std::min<std::size_t>(run.slots.size() - part.done, most);
  const auto slots = run.slots.subspan(part.done, count);
  const auto at = run.at.subspan(part.done, count);
  if (run.checksums == nullptr) {
    table_.scatter(copier_, slots, {run.rows.first, run.rows.stride}, at);
  } else if (count != 0) {
    table_.gather(copier_, slots, run.rows, at, run.checksums + part.done);
  }
  part.done += count;
  part.busy += std::chrono::steady_clock::now() - begin;
}

}  // namespace kvbm
