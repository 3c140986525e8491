#include "kvbm/io_ring.hpp"

#include <cerrno>
#include <utility>

#if __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <ctime>

namespace kvbm {
namespace {

std::uint32_t* word_at(void* map, std::uint32_t offset) noexcept {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(map) + offset);
}

std::uint32_t acquired(std::uint32_t* word) noexcept { return std::atomic_ref(*word).load(std::memory_order_acquire); }

void release(std::uint32_t* word, std::uint32_t value) noexcept {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

void* mapped(int fd, std::size_t bytes, std::uint64_t offset) noexcept {
  void* const map =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  return map == MAP_FAILED ? nullptr : map;
}

}  // namespace

struct IoRing::Maps {
  int fd = -1;                  // of the ring
  io_uring_params params{};     // what the kernel made
  void* submissions = nullptr;  // head, tail and array of the submission queue
  std::size_t submissions_bytes = 0;
  void* completions = nullptr;  // head, tail and entries of the completion queue
  std::size_t completions_bytes = 0;
  io_uring_sqe* entries = nullptr;  // what is submitted
  std::size_t entries_bytes = 0;

  ~Maps() {
    if (submissions != nullptr) {
      munmap(submissions, submissions_bytes);
    }
    if (completions != nullptr) {
      munmap(completions, completions_bytes);
    }
    if (entries != nullptr) {
      munmap(entries, entries_bytes);
    }
    if (fd >= 0) {
      close(fd);
    }
  }
};

IoRing::IoRing(std::unique_ptr<Maps> maps, int file) noexcept : maps_(std::move(maps)), file_(file) {}

IoRing::~IoRing() = default;

std::unique_ptr<IoRing> IoRing::open(int file, std::uint32_t entries, int& error) noexcept {
  auto maps = std::make_unique<Maps>();
  io_uring_params& params = maps->params;
#ifdef IORING_SETUP_COOP_TASKRUN
  // Completions wait until the ring's thread asks: no interrupts of its checks
  params.flags = IORING_SETUP_COOP_TASKRUN;
  maps->fd = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
  if (maps->fd < 0 && errno == EINVAL) {
    params = {};
  }
#endif
  if (maps->fd < 0) {
    maps->fd = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
  }
  if (maps->fd < 0) {
    error = errno;
    return nullptr;
  }
  maps->submissions_bytes = params.sq_off.array + params.sq_entries * sizeof(std::uint32_t);
  maps->completions_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  maps->entries_bytes = params.sq_entries * sizeof(io_uring_sqe);
  maps->submissions = mapped(maps->fd, maps->submissions_bytes, IORING_OFF_SQ_RING);
  maps->completions = mapped(maps->fd, maps->completions_bytes, IORING_OFF_CQ_RING);
  maps->entries = static_cast<io_uring_sqe*>(mapped(maps->fd, maps->entries_bytes, IORING_OFF_SQES));
  if (maps->submissions == nullptr || maps->completions == nullptr || maps->entries == nullptr) {
    error = ENOMEM;
    return nullptr;
  }
  return std::unique_ptr<IoRing>(new IoRing(std::move(maps), file));
}

namespace {

// The entry at the queue's tail, zeroed; the caller never pushes more than the queue holds.
io_uring_sqe& next_entry(void* submissions, io_uring_sqe* entries, const io_uring_params& params) noexcept {
  std::uint32_t* const tail = word_at(submissions, params.sq_off.tail);
  const std::uint32_t mask = *word_at(submissions, params.sq_off.ring_mask);
  const std::uint32_t place = *tail & mask;
  word_at(submissions, params.sq_off.array)[place] = place;
  io_uring_sqe& entry = entries[place];
  std::memset(&entry, 0, sizeof entry);
  return entry;
}

void publish(void* submissions, const io_uring_params& params) noexcept {
  std::uint32_t* const tail = word_at(submissions, params.sq_off.tail);
  release(tail, *tail + 1);
}

}  // namespace

void IoRing::push(bool is_write, const iovec* pieces, std::uint32_t count, std::uint64_t position,
                  std::uint64_t tag) noexcept {
  io_uring_sqe& entry = next_entry(maps_->submissions, maps_->entries, maps_->params);
  entry.opcode = is_write ? IORING_OP_WRITEV : IORING_OP_READV;
  entry.fd = file_;
  entry.addr = reinterpret_cast<std::uint64_t>(pieces);
  entry.len = count;
  entry.off = position;
  entry.user_data = tag;
  publish(maps_->submissions, maps_->params);
  ++unsubmitted_;
}

void IoRing::push_poll(int fd, std::uint64_t tag) noexcept {
  io_uring_sqe& entry = next_entry(maps_->submissions, maps_->entries, maps_->params);
  entry.opcode = IORING_OP_POLL_ADD;
  entry.fd = fd;
  entry.poll32_events = POLLIN;
  entry.user_data = tag;
  publish(maps_->submissions, maps_->params);
  ++unsubmitted_;
}

void IoRing::submit_and_wait() noexcept {
  const long submitted =
      syscall(SYS_io_uring_enter, maps_->fd, unsubmitted_, 1, IORING_ENTER_GETEVENTS, nullptr, std::size_t{0});
  if (submitted >= 0) {
    unsubmitted_ -= static_cast<std::uint32_t>(submitted);
  } else if (errno != EINTR) {  // the kernel is short of memory: what was pushed stays pushed, and is handed over again
    const timespec pause{0, 1'000'000};
    nanosleep(&pause, nullptr);
  }
}

bool IoRing::take(Completion& out) noexcept {
  const io_uring_params& params = maps_->params;
  std::uint32_t* const head = word_at(maps_->completions, params.cq_off.head);
  if (*head == acquired(word_at(maps_->completions, params.cq_off.tail))) {
    return false;
  }
  const std::uint32_t mask = *word_at(maps_->completions, params.cq_off.ring_mask);
  const auto* const entries = reinterpret_cast<const io_uring_cqe*>(word_at(maps_->completions, params.cq_off.cqes));
  const io_uring_cqe& entry = entries[*head & mask];
  out = {entry.user_data, entry.res};
  release(head, *head + 1);
  return true;
}

}  // namespace kvbm

#else  // kernel headers from before io_uring: there is none

namespace kvbm {

struct IoRing::Maps {};

IoRing::IoRing(std::unique_ptr<Maps> maps, int file) noexcept : maps_(std::move(maps)), file_(file) {}
IoRing::~IoRing() = default;

std::unique_ptr<IoRing> IoRing::open(int, std::uint32_t, int& error) noexcept {
  error = ENOSYS;
  return nullptr;
}
void IoRing::push(bool, const iovec*, std::uint32_t, std::uint64_t, std::uint64_t) noexcept { file_ = -1; }
void IoRing::push_poll(int, std::uint64_t) noexcept { unsubmitted_ = 0; }
void IoRing::submit_and_wait() noexcept {}
bool IoRing::take(Completion&) noexcept { return false; }

}  // namespace kvbm

#endif
