#include "kvbm/block_lane.hpp"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

namespace kvbm {
namespace {

constexpr std::uint64_t kWakeTag = 0;                                // no flight has this address
constexpr std::size_t kProofBytes = kBlockHeaderBytes + kSealBytes;  // of a header's page; the rest is zeros
// A transfer that is refused for a passing reason, or cut short, begins again
constexpr std::uint32_t kMostTries = 16;
constexpr std::uint32_t kMostThreads = 32;  // for a file, without io_uring

bool is_all_zero(const std::uint8_t* at, std::size_t bytes) noexcept {
  return at[0] == 0 && std::memcmp(at, at + 1, bytes - 1) == 0;
}

// Threads begun while this exists take no signals: those are for the threads of the program.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;  // what this thread took
};

}  // namespace

void TransferQueue::push(Transfer* transfer) noexcept {
  transfer->next = nullptr;
  (first == nullptr ? first : last->next) = transfer;
  last = transfer;
}

Transfer* TransferQueue::pop() noexcept {
  Transfer* const transfer = first;
  if (transfer != nullptr) {
    first = transfer->next;
    transfer->next = nullptr;
  }
  return transfer;
}

Lane::Lane(std::shared_ptr<BlockIoShared> shared, int file, std::unique_ptr<IoRing> ring)
    : shared_(std::move(shared)),
      file_(file),
      ring_(std::move(ring)),
      shares_(ring_ ? shared_->options.depth : std::min(shared_->options.depth, kMostThreads),
              shared_->options.offload_share, shared_->options.block_bytes) {
  const std::uint32_t depth = ring_ ? shared_->options.depth : std::min(shared_->options.depth, kMostThreads);
  flights_.resize(depth);
  begun_.resize(depth);
  free_.reserve(depth);
  room_bytes_ = shared_->stride * depth;
  void* const room =
      mmap(nullptr, room_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "room for transfers");
  }
  room_ = static_cast<std::uint8_t*>(room);
  for (std::uint32_t index = 0; index < depth; ++index) {
    flights_[index].room = room_ + index * shared_->stride;
    free_.push_back(&flights_[index]);
  }
  if (ring_) {
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) {
      const int error = errno;
      munmap(room_, room_bytes_);
      throw std::system_error(error, std::generic_category(), "eventfd");
    }
  }
}

Lane::~Lane() {
  if (wake_fd_ >= 0) {
    close(wake_fd_);
  }
  munmap(room_, room_bytes_);
}

std::uint32_t Lane::start() {
  const SignalsBlocked blocked;
  const std::size_t count = ring_ ? 1 : flights_.size();
  threads_.reserve(count);
  for (std::size_t index = 0; index < count; ++index) {
    {
      const std::lock_guard lock(mutex_);
      ++running_;
    }
    try {
      threads_.emplace_back([self = shared_from_this()] {
        if (self->ring_) {
          self->run_ring();
        } else {
          self->run_calls();
        }
        const std::lock_guard lock(self->mutex_);
        --self->running_;
        self->left_.notify_all();
      });
    } catch (const std::system_error&) {
      {
        const std::lock_guard lock(mutex_);
        --running_;
      }
      if (threads_.empty()) {
        throw;
      }
      break;  // fewer will do
    }
  }
  return static_cast<std::uint32_t>(threads_.size());
}

void Lane::enqueue(TransferQueue& transfers, bool is_urgent) {
  if (transfers.first == nullptr) {
    return;
  }
  bool refused = false;
  {
    const std::lock_guard lock(mutex_);
    refused = is_stopping_;
    TransferQueue& queue = is_urgent ? urgent_ : background_;
    if (!refused) {
      (queue.first == nullptr ? queue.first : queue.last->next) = transfers.first;
      queue.last = transfers.last;
    }
  }
  if (!refused) {
    wake();
    return;
  }
  while (Transfer* const transfer = transfers.pop()) {
    transfer->error = ECANCELED;
    finish(*transfer);
  }
}

void Lane::give_back(Flight* flight) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(flight);
  }
  wake();
}

void Lane::begin_stop() {
  TransferQueue cancelled[2];
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    cancelled[0] = std::exchange(urgent_, {});
    cancelled[1] = std::exchange(background_, {});
  }
  for (TransferQueue& queue : cancelled) {
    while (Transfer* const transfer = queue.pop()) {
      transfer->error = ECANCELED;
      finish(*transfer);
    }
  }
  changed_.notify_all();
  wake();
}

bool Lane::end_stop(std::chrono::steady_clock::time_point deadline) {
  const std::lock_guard one(stop_mutex_);
  if (was_left_) {
    const std::lock_guard lock(mutex_);
    return running_ == 0;
  }
  bool all_left = false;
  {
    std::unique_lock lock(mutex_);
    all_left = left_.wait_until(lock, deadline, [this] { return running_ == 0; });
  }
  for (std::thread& thread : threads_) {
    if (all_left) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  threads_.clear();
  was_left_ = !all_left;
  return all_left;
}

void Lane::release_withheld() {
  Transfer* transfer = nullptr;
  {
    const std::lock_guard lock(mutex_);
    transfer = std::exchange(withheld_, nullptr);
  }
  while (transfer != nullptr) {
    Transfer* const next = transfer->next;
    end(*transfer, transfer->error);  // `error` keeps its result meanwhile
    transfer = next;
  }
  wake();
}

// Reads first, as many as there are flights but for one that a write may need; then writes, as many as their share.
Transfer* Lane::take() noexcept {
  if (free_.empty()) {
    return nullptr;
  }
  Transfer* transfer = background_.first != nullptr && shares_.must_write(free_.size()) ? nullptr : urgent_.pop();
  if (transfer != nullptr) {
    shares_.begin_read();
  } else {
    if (background_.first == nullptr || !shares_.may_write(std::chrono::steady_clock::now())) {
      return nullptr;
    }
    transfer = background_.pop();
    shares_.begin_write();
  }
  transfer->flight = free_.back();
  transfer->flight->transfer = transfer;
  free_.pop_back();
  return transfer;
}

std::uint32_t Lane::in_flight() {
  const std::lock_guard lock(mutex_);
  return shares_.in_flight();
}

void Lane::prepare(Transfer& transfer) noexcept {
  const BlockIoOptions& options = shared_->options;
  const std::size_t block_bytes = options.block_bytes;
  Flight& flight = *transfer.flight;
  flight.is_bounced = options.is_direct && (block_bytes % kPageBytes != 0 ||
                                            reinterpret_cast<std::uintptr_t>(transfer.row) % kPageBytes != 0);
  if (transfer.call->is_write) {
    std::memcpy(flight.room, transfer.header.data(), kBlockHeaderBytes);
    std::memcpy(flight.room + kBlockHeaderBytes, transfer.seal.data(), kSealBytes);
    std::memset(flight.room + kProofBytes, 0, kPageBytes - kProofBytes);
    if (flight.is_bounced) {
      std::memcpy(flight.room + kPageBytes, transfer.row, block_bytes);
      std::memset(flight.room + kPageBytes + block_bytes, 0, shared_->stride - kPageBytes - block_bytes);
    }
  } else {
    // Zeros prove nothing, so neither does what a short read leaves out
    std::memset(flight.room, 0, kBlockHeaderBytes);
  }
  if (flight.is_bounced) {
    shared_->bounced.fetch_add(1, std::memory_order_relaxed);
    flight.pieces[0] = {flight.room, shared_->stride};
    flight.piece_count = 1;
  } else {
    flight.pieces[0] = {flight.room, kPageBytes};
    flight.pieces[1] = {transfer.row, block_bytes};
    flight.piece_count = 2;
  }
}

// Whether a transfer that came back with this result is worth another try.
bool Lane::must_begin_again(Transfer& transfer, std::int64_t result) noexcept {
  const Flight& flight = *transfer.flight;
  const std::size_t wanted = flight.pieces[0].iov_len + (flight.piece_count == 2 ? flight.pieces[1].iov_len : 0);
  const bool was_cut = result > 0 && static_cast<std::size_t>(result) < wanted;
  if ((!was_cut && result != -EINTR && result != -EAGAIN) || transfer.tries >= kMostTries) {
    return false;
  }
  transfer.tries += was_cut ? kMostTries / 2 : 1;  // the end of a file is cut every time
  return true;
}

// The device is done with a transfer: its result is bytes, or minus errno. Any thread.
void Lane::end(Transfer& transfer, std::int64_t result) noexcept {
  Flight* const flight = transfer.flight;
  if (transfer.slot == shared_->withheld_slot.load(std::memory_order_relaxed)) {
    const std::lock_guard lock(mutex_);
    transfer.error = static_cast<std::int32_t>(result);
    transfer.next = std::exchange(withheld_, &transfer);
    return;
  }
  const std::size_t wanted = flight->pieces[0].iov_len + (flight->piece_count == 2 ? flight->pieces[1].iov_len : 0);
  const bool is_write = transfer.call->is_write;
  transfer.error = result < 0                                  ? static_cast<std::int32_t>(-result)
                   : static_cast<std::size_t>(result) < wanted ? ENODATA
                                                               : 0;
  if (!is_write && transfer.error == 0) {
    std::memcpy(transfer.header.data(), flight->room, kBlockHeaderBytes);
    std::memcpy(transfer.seal.data(), flight->room + kBlockHeaderBytes, kSealBytes);
    if (!is_all_zero(flight->room + kProofBytes, kPageBytes - kProofBytes)) {
      transfer.header.fill(0);  // somebody else wrote into this page: it proves nothing
    }
  }
  const bool keeps_flight = !is_write && transfer.error == 0 && flight->is_bounced;
  {
    const std::lock_guard lock(mutex_);
    if (is_write) {
      shares_.end_write();
    } else {
      shares_.end_read(std::chrono::steady_clock::now());
    }
    if (!keeps_flight) {
      transfer.flight = nullptr;
      free_.push_back(flight);
    }
    if (is_stopping_) {
      changed_.notify_all();  // else the thread that calls this looks again by itself
    }
  }
  finish(transfer);
}

// Gives a transfer back to its call; it must not be touched afterwards.
void Lane::finish(Transfer& transfer) noexcept {
  Call& call = *transfer.call;
  const std::lock_guard lock(call.mutex);
  transfer.next = std::exchange(call.ended, &transfer);
  if (call.silent > 0) {
    --call.silent;
    return;
  }
  call.more.notify_one();  // under the lock: the call may be gone as soon as it is free
}

// Something may begin now, or is to stop.
void Lane::wake() noexcept {
  if (!ring_) {
    changed_.notify_one();  // who takes something wakes the next
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!is_sleeping_) {
      return;
    }
    is_sleeping_ = false;
  }
  const std::uint64_t one = 1;
  while (write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void Lane::run_ring() noexcept {
  ring_->push_poll(wake_fd_, kWakeTag);
  for (;;) {
    std::size_t count = 0;
    {
      const std::lock_guard lock(mutex_);
      while (Transfer* const transfer = take()) {
        begun_[count++] = transfer;
      }
      if (is_stopping_ && shares_.in_flight() == 0) {
        return;
      }
      is_sleeping_ = true;  // from here on whoever brings something wakes us
    }
    const auto push = [this](Transfer& transfer) {
      prepare(transfer);
      const Flight& flight = *transfer.flight;
      ring_->push(transfer.call->is_write, flight.pieces.data(), flight.piece_count, transfer.position,
                  reinterpret_cast<std::uint64_t>(&flight));
    };
    for (std::size_t index = 0; index < count; ++index) {
      push(*begun_[index]);
    }
    ring_->submit_and_wait();
    IoRing::Completion done;
    while (ring_->take(done)) {
      if (done.tag == kWakeTag) {
        std::uint64_t wakes = 0;
        if (read(wake_fd_, &wakes, sizeof wakes) < 0 && errno != EAGAIN) {
          continue;
        }
        ring_->push_poll(wake_fd_, kWakeTag);
        continue;
      }
      Transfer& transfer = *reinterpret_cast<Flight*>(done.tag)->transfer;
      if (must_begin_again(transfer, done.result)) {
        push(transfer);
      } else {
        end(transfer, done.result);
      }
    }
  }
}

void Lane::run_calls() noexcept {
  for (;;) {
    Transfer* transfer = nullptr;
    bool is_last = false;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] {
        transfer = take();
        return transfer != nullptr || (is_stopping_ && shares_.in_flight() == 0);
      });
      is_last = free_.empty() || (urgent_.first == nullptr && background_.first == nullptr);
    }
    if (transfer == nullptr) {
      return;
    }
    if (!is_last) {
      changed_.notify_one();
    }
    std::int64_t result = 0;
    do {
      prepare(*transfer);
      const Flight& flight = *transfer->flight;
      const auto position = static_cast<off_t>(transfer->position);
      const int count = static_cast<int>(flight.piece_count);
      result = transfer->call->is_write ? pwritev(file_, flight.pieces.data(), count, position)
                                        : preadv(file_, flight.pieces.data(), count, position);
      if (result < 0) {
        result = -errno;
      }
    } while (must_begin_again(*transfer, result));
    end(*transfer, result);
  }
}

}  // namespace kvbm
