#include "kvbm/device_ring.hpp"

#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "kvbm/error.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

constexpr char kKernel[] =
#include "ring_kernel_ptx.inc"
    ;

// Copied by one warp: enough of them to fill a launch, for the smallest run too
constexpr std::uint64_t kPieceBytes = 4096;
constexpr std::uint64_t kAlign = 256;  // of what the ring holds
constexpr std::size_t kParts = 8;      // of a ring: lots under way at once
constexpr unsigned kThreads = 512;     // of a program
constexpr unsigned kMostPrograms = 1024;
constexpr long kNapNs = 10'000;                        // between two looks at what the device has confirmed, at first
constexpr long kLongestNapNs = 200'000;                // and at last
constexpr auto kSpin = std::chrono::microseconds(50);  // after the last move, while somebody waits for the next
constexpr unsigned long kSlackNs = 1'000;              // by which a nap may be longer

// As the kernel's.
struct Lot {
  std::uint64_t ring;
  std::uint64_t begin;
  std::uint64_t block;
  std::uint64_t block_bytes;
  std::uint32_t piece;
  std::uint32_t pieces;
  std::uint32_t pieces_a_block;
  std::uint32_t gathers;
};

// Short naps for its life: by default the system makes them five times as long.
class ShortNaps {
 public:
  ShortNaps() : before_(prctl(PR_GET_TIMERSLACK)) { prctl(PR_SET_TIMERSLACK, kSlackNs); }
  ~ShortNaps() {
    if (before_ > 0) {
      prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(before_));
    }
  }
  ShortNaps(const ShortNaps&) = delete;
  ShortNaps& operator=(const ShortNaps&) = delete;

  // The longer nothing has moved, the longer.
  void nap() noexcept {
    const timespec length{0, length_ns_};
    nanosleep(&length, nullptr);
    length_ns_ = std::min(2 * length_ns_, kLongestNapNs);
  }
  void reset() noexcept { length_ns_ = kNapNs; }

 private:
  int before_;               // the thread's own
  long length_ns_ = kNapNs;  // of the next
};

}  // namespace

// Checksums of a run's rows, computed in a thread of its own: whoever carries the run on never waits for them, and what
// has come meanwhile is shared out among the copier's threads at once. Where the system gives no thread, the caller's
// computes them.
class DeviceRing::Sums {
 public:
  Sums() {
    try {
      thread_ = std::make_unique<std::thread>([this] { work(); });
    } catch (const std::system_error&) {  // the system gives no more
    }
  }
  ~Sums() {
    if (getpid() != process_) {  // a forked child has no such thread
      static_cast<void>(thread_.release());
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      is_closed_ = true;
    }
    changed_.notify_one();
    if (thread_ != nullptr) {
      thread_->join();
    }
  }
  Sums(const Sums&) = delete;
  Sums& operator=(const Sums&) = delete;

  // A run begins; none is under way.
  void begin(const SourceRows& rows, std::size_t row_bytes, std::span<std::uint32_t> out, RowCopier* copier) {
    const std::lock_guard lock(mutex_);
    rows_ = rows;
    row_bytes_ = row_bytes;
    out_ = out;
    copier_ = copier;
    there_ = reached_ = done_ = 0;
  }

  // So many rows are there.
  void advance(std::uint64_t rows) {
    {
      const std::lock_guard lock(mutex_);
      there_ = std::max(there_, rows);
    }
    if (thread_ != nullptr) {
      changed_.notify_one();
    } else {
      sum(done_, there_);
      done_ = there_;
    }
  }

  bool are_there(std::uint64_t rows) {
    const std::lock_guard lock(mutex_);
    return done_ >= rows;
  }

  // Waits until no row is read any more.
  void settle() {
    std::unique_lock lock(mutex_);
    there_ = std::min(there_, reached_ > done_ ? reached_ : done_);
    settled_.wait(lock, [&] { return reached_ <= done_; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return is_closed_ || there_ > done_; });
      if (is_closed_) {
        return;
      }
      const std::uint64_t begin = done_;
      const std::uint64_t end = reached_ = there_;
      lock.unlock();
      sum(begin, end);
      lock.lock();
      done_ = end;
      settled_.notify_one();
    }
  }

  void sum(std::uint64_t begin, std::uint64_t end) noexcept {
    if (begin < end) {
      const bool in_order = rows_.at == nullptr;
      const SourceRows rows{rows_.base + (in_order ? static_cast<std::ptrdiff_t>(begin) * rows_.stride : 0),
                            rows_.stride, in_order ? nullptr : rows_.at + begin};
      copier_->checksum(rows, row_bytes_, out_.subspan(begin, end - begin));
    }
  }

  std::mutex mutex_;                     // guards what follows
  std::condition_variable changed_;      // there is more to do
  std::condition_variable settled_;      // a part is done
  SourceRows rows_;                      // of the run
  std::size_t row_bytes_ = 0;            // of each
  std::span<std::uint32_t> out_;         // where to
  RowCopier* copier_ = nullptr;          // whose threads work
  std::uint64_t there_ = 0;              // rows that have come
  std::uint64_t reached_ = 0;            // rows that are being read, or were
  std::uint64_t done_ = 0;               // rows whose checksum is there
  bool is_closed_ = false;               // the thread ends
  const pid_t process_ = getpid();       // that has the thread
  std::unique_ptr<std::thread> thread_;  // last: it works on the others; null where there is none
};

DeviceRing::DeviceRing(const CudaDriver& driver, std::vector<Segment> segments, std::uint64_t slots,
                       const RingOptions& options)
    : driver_(driver), slots_(slots), ring_bytes_(options.ring_bytes), ordinal_(options.device), process_(getpid()) {
  block_bytes_ = SegmentTable(segments, slots).block_bytes();  // which refuses what is no layout
  std::uint64_t offset = 0;
  for (const Segment& segment : segments) {
    for (std::uint64_t begin = 0; begin < segment.bytes; begin += kPieceBytes) {
      const std::uint64_t bytes = std::min(kPieceBytes, segment.bytes - begin);
      pieces_.push_back({segment.address + begin, segment.stride, offset + begin, bytes});
    }
    offset += segment.bytes;
  }
  const std::uint64_t part_bytes = ring_bytes_ / kParts / kAlign * kAlign;
  if (part_bytes < kPieceBytes + kAlign || pieces_.size() > UINT32_MAX) {
    throw Error(ErrorCode::kLayout,
                words("a ring of ", ring_bytes_, " bytes for blocks of ", pieces_.size(), " pieces: too small"));
  }
  lot_bytes_ = std::clamp(options.lot_bytes, kPieceBytes, part_bytes - kAlign);
  programs_ = std::min(options.programs, kMostPrograms);
  parts_.resize(kParts);
  flying_.reserve(kParts);
  sums_ = std::make_unique<Sums>();
  try {
    open();
  } catch (...) {
    close();
    throw;
  }
}

DeviceRing::~DeviceRing() { close(); }

void DeviceRing::settle() noexcept {
  while (under_way_) {
    try {
      advance(std::chrono::seconds(1));
    } catch (const std::exception&) {  // it has ended, or the next look tells
    }
  }
}

CuEvent DeviceRing::mark(const RunOrder& after) {
  const std::lock_guard lock(marks_mutex_);
  const InContext inside(driver_, context_);
  require_no_capture(after.streams);
  if (free_marks_.empty()) {
    all_marks_.reserve(all_marks_.size() + 1);
    free_marks_.reserve(all_marks_.size() + 1);  // so that each can be given back
    CuEvent made = nullptr;
    if (const CuResult result = driver_.cuEventCreate(&made, kCuEventDisableTiming); result != kCuSuccess) {
      throw CudaError(driver_, "cuEventCreate", result);
    }
    all_marks_.push_back(made);
    free_marks_.push_back(made);
  }
  const CuEvent made = free_marks_.back();
  const auto done = [this](CuResult result, const char* call) {
    if (result != kCuSuccess) {
      throw CudaError(driver_, call, result);
    }
  };
  if (after.events.empty() && after.streams.size() == 1) {
    done(driver_.cuEventRecord(made, after.streams[0]), "cuEventRecord");
  } else {
    const CuStream stream = behind_[next_behind_++ % behind_.size()];
    for (const CuEvent event : after.events) {
      done(driver_.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
    }
    for (const CuStream other : after.streams) {
      done(driver_.cuEventRecord(made, other), "cuEventRecord");
      done(driver_.cuStreamWaitEvent(stream, made, 0), "cuStreamWaitEvent");
    }
    done(driver_.cuEventRecord(made, stream), "cuEventRecord");
  }
  free_marks_.pop_back();
  return made;
}

void DeviceRing::drop_mark(CuEvent mark) noexcept {
  const std::lock_guard lock(marks_mutex_);
  free_marks_.push_back(mark);
}

bool DeviceRing::has_passed_event(CuEvent event) const noexcept {
  try {
    const InContext inside(driver_, context_);
    return driver_.cuEventQuery(event) == kCuSuccess;
  } catch (const CudaError&) {
    return false;
  }
}

bool DeviceRing::reaches(const void* begin, std::uint64_t bytes) const noexcept {
  try {
    const InContext inside(driver_, context_);
    const auto first = reinterpret_cast<CuAddress>(begin);
    std::array<CuAddress, 2> there{};
    for (std::size_t end = 0; end < there.size(); ++end) {
      const CuAddress at = end == 0 ? first : first + bytes - 1;
      unsigned kind = 0;
      if (driver_.cuPointerGetAttribute(&kind, kCuMemoryType, at) != kCuSuccess || kind != kCuHostMemory ||
          driver_.cuPointerGetAttribute(&there[end], kCuDevicePointer, at) != kCuSuccess) {
        return false;
      }
    }
    return there[1] - there[0] == bytes - 1;
  } catch (const CudaError&) {
    return false;
  }
}

void DeviceRing::gather(std::span<const std::int64_t> slots, BlockRows<std::uint8_t> rows,
                        std::span<const std::int64_t> at, const RunOrder& after, std::span<std::uint32_t> checksums,
                        RowCopier* copier) {
  begin(slots, rows.first, rows.stride, at, after, true);
  has_sums_ = !checksums.empty();
  if (has_sums_) {
    sums_->begin({rows.first, static_cast<std::ptrdiff_t>(rows.stride), at.empty() ? nullptr : at.data()}, block_bytes_,
                 checksums, copier);
  }
}

void DeviceRing::scatter(std::span<const std::int64_t> slots, BlockRows<const std::uint8_t> rows,
                         std::span<const std::int64_t> at, const RunOrder& after) {
  begin(slots, const_cast<std::uint8_t*>(rows.first), rows.stride, at, after, false);  // a scatter only reads them
}

bool DeviceRing::advance(std::chrono::nanoseconds timeout) {
  if (!under_way_) {
    return true;
  }
  const auto until = std::chrono::steady_clock::now() + timeout;
  ShortNaps naps;
  auto moved_at = std::chrono::steady_clock::now();
  std::optional<InContext> inside;
  try {
    while (!inside) {
      try {
        inside.emplace(driver_, context_);
      } catch (const CudaError& error) {
        check(error.result(), "cuCtxPushCurrent", true);
        if (std::chrono::steady_clock::now() >= until) {
          return false;
        }
        naps.nap();
      }
    }
    while (true) {
      while (why_.empty() && next_.block < blocks_ && flying_.size() < parts_.size()) {
        queue_lot();
      }
      const bool moved = why_.empty() ? collect() : confirm_rest();
      if (!under_way_) {
        break;
      }
      const auto now = std::chrono::steady_clock::now();
      if (moved) {
        moved_at = now;
        naps.reset();
      } else if (now >= until) {
        return false;
      } else if (next_.block == blocks_ &&
                 now - moved_at < kSpin) {  // lots that are queued keep the device busy; for the last somebody waits
        std::this_thread::yield();
      } else {
        naps.nap();
      }
    }
  } catch (...) {
    if (is_lost_) {  // nothing moves any more
      under_way_ = false;
      sums_->settle();
    }
    throw;
  }
  if (!why_.empty()) {
    throw std::runtime_error(why_);
  }
  return true;
}

void DeviceRing::open() {
  check(driver_.cuDeviceGet(&device_, ordinal_), "cuDeviceGet");
  if (programs_ == 0) {
    int multiprocessors = 0;
    check(driver_.cuDeviceGetAttribute(&multiprocessors, kCuMultiprocessors, device_), "cuDeviceGetAttribute");
    programs_ = static_cast<unsigned>(std::max(1, multiprocessors / 2));
  }
  check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  const InContext inside(driver_, context_);
  check(driver_.cuModuleLoadData(&module_, kKernel), "cuModuleLoadData");
  check(driver_.cuModuleGetFunction(&kernel_, module_, "kvbm_ring"), "cuModuleGetFunction");
  int least = 0;
  int greatest = 0;
  check(driver_.cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
  check(driver_.cuStreamCreateWithPriority(&kernels_, kCuStreamNonBlocking, greatest), "cuStreamCreateWithPriority");
  for (CuStream& stream : copies_) {
    check(driver_.cuStreamCreateWithPriority(&stream, kCuStreamNonBlocking, greatest), "cuStreamCreateWithPriority");
  }
  for (CuStream& stream : behind_) {
    check(driver_.cuStreamCreateWithPriority(&stream, kCuStreamNonBlocking, greatest), "cuStreamCreateWithPriority");
  }
  const auto event = [this](CuEvent& made) {
    check(driver_.cuEventCreate(&made, kCuEventDisableTiming), "cuEventCreate");
  };
  event(engine_);
  std::for_each(tails_.begin(), tails_.end(), event);
  const std::uint64_t part_bytes = ring_bytes_ / kParts / kAlign * kAlign;
  check(driver_.cuMemAlloc_v2(&ring_, part_bytes * kParts), "cuMemAlloc");
  for (std::size_t index = 0; index < parts_.size(); ++index) {
    parts_[index].begin = ring_ + index * part_bytes;
    event(parts_[index].is_half);
    event(parts_[index].is_over);
  }
  const std::size_t table_bytes = pieces_.size() * sizeof(Piece);
  check(driver_.cuMemAlloc_v2(&pieces_at_, table_bytes), "cuMemAlloc");
  check(driver_.cuMemAlloc_v2(&slots_at_, slots_ * sizeof(std::int64_t)), "cuMemAlloc");
  void* room = nullptr;
  check(driver_.cuMemHostAlloc(&room, slots_ * sizeof(std::int64_t), 0), "cuMemHostAlloc");
  slots_room_ = static_cast<std::int64_t*>(room);
  // Copied from memory that is not pinned: the call has read it when it returns.
  check(driver_.cuMemcpyHtoDAsync_v2(pieces_at_, pieces_.data(), table_bytes, kernels_), "cuMemcpyHtoDAsync");
}

void DeviceRing::close() noexcept {
  if (context_ == nullptr || under_way_ || is_lost_ || getpid() != process_) {
    return;
  }
  try {
    const InContext inside(driver_, context_);
    for (const CuEvent event : {engine_, tails_[0], tails_[1], tails_[2]}) {
      if (event != nullptr) {
        driver_.cuEventDestroy_v2(event);
      }
    }
    for (const Part& part : parts_) {
      for (const CuEvent event : {part.is_half, part.is_over}) {
        if (event != nullptr) {
          driver_.cuEventDestroy_v2(event);
        }
      }
    }
    for (const CuEvent mark : all_marks_) {
      driver_.cuEventDestroy_v2(mark);
    }
    for (const CuStream stream : {kernels_, copies_[0], copies_[1], behind_[0], behind_[1], behind_[2], behind_[3]}) {
      if (stream != nullptr) {
        driver_.cuStreamDestroy_v2(stream);
      }
    }
    for (const CuAddress memory : {ring_, pieces_at_, slots_at_}) {
      if (memory != 0) {
        driver_.cuMemFree_v2(memory);
      }
    }
    if (slots_room_ != nullptr) {
      driver_.cuMemFreeHost(slots_room_);
    }
    if (module_ != nullptr) {
      driver_.cuModuleUnload(module_);
    }
  } catch (const CudaError&) {  // the context is gone, and with it all of that
  }
  driver_.cuDevicePrimaryCtxRelease_v2(device_);
  context_ = nullptr;
}

void DeviceRing::begin(std::span<const std::int64_t> slots, std::uint8_t* rows, std::uint64_t row_stride,
                       std::span<const std::int64_t> at, const RunOrder& after, bool gathers) {
  if (is_lost_) {
    throw std::runtime_error("the GPU is lost; nothing is copied any more");
  }
  if (under_way_) {
    throw std::runtime_error("a run is under way in this ring already");
  }
  if (slots.size() > slots_) {
    throw std::runtime_error(words(slots.size(), " slots in a run, the pool has ", slots_));
  }
  const InContext inside(driver_, context_);
  why_.clear();
  gathers_ = gathers;
  blocks_ = slots.size();
  rows_ = rows;
  row_stride_ = row_stride;
  at_ = at;
  has_sums_ = false;
  next_ = {};
  lots_ = 0;
  flying_.clear();
  has_tail_ = {};
  ranges_.clear();
  std::copy(slots.begin(), slots.end(), slots_room_);
  try {
    wait_for(after);
  } catch (const CudaError& error) {
    is_lost_ = is_lost_ || means_lost(error.result());
    throw;
  }
  under_way_ = true;
  try {
    check(driver_.cuMemcpyHtoDAsync_v2(slots_at_, slots_room_, slots.size() * sizeof(std::int64_t), kernels_),
          "cuMemcpyHtoDAsync");
  } catch (const CudaError& error) {
    under_way_ = !is_lost_;
    if (is_lost_) {
      throw;
    }
    fail(error.what());
  }
}

// Behind the engine's work come the launches, which touch its slots; for a run to the host the copies come behind
// those.
void DeviceRing::wait_for(const RunOrder& after) {
  require_no_capture(after.streams);
  for (const CuEvent event : after.events) {
    check(driver_.cuStreamWaitEvent(kernels_, event, 0), "cuStreamWaitEvent");
  }
  for (const CuStream stream : after.streams) {
    check(driver_.cuEventRecord(engine_, stream), "cuEventRecord");
    check(driver_.cuStreamWaitEvent(kernels_, engine_, 0), "cuStreamWaitEvent");
  }
}

// To wait for a stream that is captured would make this a part of the graph.
void DeviceRing::require_no_capture(std::span<const CuStream> streams) const {
  for (const CuStream stream : streams) {
    int status = 0;
    if (const CuResult result = driver_.cuStreamIsCapturing(stream, &status); result != kCuSuccess) {
      throw CudaError(driver_, "cuStreamIsCapturing", result);
    }
    if (status != 0) {
      throw std::runtime_error(
          "the engine's stream is captured into a graph; name an event of before to copy meanwhile");
    }
  }
}

// Where a lot that begins there ends: whole blocks where one fits, else pieces of one.
DeviceRing::Place DeviceRing::after_lot(const Place& begin) const noexcept {
  if (begin.piece == 0 && block_bytes_ <= lot_bytes_) {
    const std::uint64_t blocks = std::min(blocks_ - begin.block, lot_bytes_ / block_bytes_);
    return {begin.block + blocks, 0, begin.byte + blocks * block_bytes_};
  }
  Place end = begin;
  std::uint64_t bytes = 0;
  while (end.piece < pieces_.size() && bytes + pieces_[end.piece].bytes <= lot_bytes_) {
    bytes += pieces_[end.piece].bytes;
    ++end.piece;
  }
  end.byte += bytes;
  if (end.piece == pieces_.size()) {
    end.piece = 0;
    ++end.block;
  }
  return end;
}

void DeviceRing::queue_lot() {
  const std::size_t number = lots_ % parts_.size();
  const Part& part = parts_[number];
  const CuStream copies = copies_[lots_ % copies_.size()];
  const Place end = after_lot(next_);
  try {
    if (gathers_) {
      launch(part, next_, end);
      check(driver_.cuEventRecord(part.is_half, kernels_), "cuEventRecord");
      check(driver_.cuStreamWaitEvent(copies, part.is_half, 0), "cuStreamWaitEvent");
      copy(part, next_, end, copies);
      check(driver_.cuEventRecord(part.is_over, copies), "cuEventRecord");
    } else {
      copy(part, next_, end, copies);
      check(driver_.cuEventRecord(part.is_half, copies), "cuEventRecord");
      check(driver_.cuStreamWaitEvent(kernels_, part.is_half, 0), "cuStreamWaitEvent");
      launch(part, next_, end);
      check(driver_.cuEventRecord(part.is_over, kernels_), "cuEventRecord");
    }
  } catch (const CudaError& error) {
    if (is_lost_) {
      throw;
    }
    fail(error.what());
    return;
  } catch (const std::bad_alloc&) {  // a part of the lot may be queued: the run ends once that was confirmed
    fail("no memory");
    return;
  }
  flying_.emplace_back(number, end.byte);  // there is room: a lot that was queued is known
  next_ = end;
  ++lots_;
}

void DeviceRing::launch(const Part& part, const Place& begin, const Place& end) {
  const std::uint64_t pieces = (end.block - begin.block) * pieces_.size() + end.piece - begin.piece;
  Lot lot{part.begin + begin.byte % kAlign,
          begin.byte,
          begin.block,
          block_bytes_,
          static_cast<std::uint32_t>(begin.piece),
          static_cast<std::uint32_t>(pieces),
          static_cast<std::uint32_t>(pieces_.size()),
          gathers_ ? 1U : 0U};
  void* parameters[] = {&pieces_at_, &slots_at_, &lot};
  const auto useful = static_cast<unsigned>((pieces + kThreads / 32 - 1) / (kThreads / 32));
  check(driver_.cuLaunchKernel(kernel_, std::min(programs_, useful), 1, 1, kThreads, 1, 1, 0, kernels_, parameters,
                               nullptr),
        "cuLaunchKernel");
}

// One copy for each stretch of the rows' memory without a gap.
void DeviceRing::copy(const Part& part, const Place& begin, const Place& end, CuStream stream) {
  CuAddress ring = part.begin + begin.byte % kAlign;
  auto& [targets, sources, sizes] = stretches_;
  targets.clear();
  sources.clear();
  sizes.clear();
  auto& rows = gathers_ ? targets : sources;
  auto& rings = gathers_ ? sources : targets;
  for (std::uint64_t byte = begin.byte; byte < end.byte;) {
    const std::uint64_t block = byte / block_bytes_;
    const std::uint64_t inside = byte % block_bytes_;
    const std::uint64_t row = at_.empty() ? block : static_cast<std::uint64_t>(at_[block]);
    const auto there = reinterpret_cast<CuAddress>(rows_) + row * row_stride_ + inside;
    const CuAddress range_end = end_of_range(there);
    const std::uint64_t size = std::min({block_bytes_ - inside, end.byte - byte, range_end - there});
    if (!sizes.empty() && rows.back() + sizes.back() == there && end_of_range(rows.back()) == range_end) {
      sizes.back() += size;
    } else {
      rows.push_back(there);
      rings.push_back(ring);
      sizes.push_back(size);
    }
    ring += size;
    byte += size;
  }
  copy_stretches(stream);
}

// Where the memory ends that was registered with CUDA in one call: a copy reaches into no other.
CuAddress DeviceRing::end_of_range(CuAddress at) {
  auto found = ranges_.upper_bound(at);
  if (found != ranges_.begin() && at < std::prev(found)->second) {
    return std::prev(found)->second;
  }
  CuAddress begin = 0;
  std::size_t size = 0;
  if (driver_.cuPointerGetAttribute(&begin, kCuRangeBegin, at) != kCuSuccess ||
      driver_.cuPointerGetAttribute(&size, kCuRangeSize, at) != kCuSuccess || at < begin || at - begin >= size) {
    return UINT64_MAX;  // it does not say
  }
  ranges_[begin] = begin + size;
  return begin + size;
}

void DeviceRing::copy_stretches(CuStream stream) {
  auto& [targets, sources, sizes] = stretches_;
  if (sizes.size() > 1 && driver_.cuMemcpyBatchAsync != nullptr) {
    CuCopyAttributes attributes;
    attributes.order = gathers_ ? kCuInStreamOrder : kCuAtAnyTime;  // rows are as they are until the run has ended
    std::size_t first = 0;
    std::size_t failed = 0;
    check(driver_.cuMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                                     &failed, stream),
          "cuMemcpyBatchAsync");
    return;
  }
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    if (gathers_) {
      check(driver_.cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(targets[index]), sources[index], sizes[index], stream),
            "cuMemcpyDtoHAsync");
    } else {
      check(driver_.cuMemcpyHtoDAsync_v2(targets[index], reinterpret_cast<const void*>(sources[index]), sizes[index],
                                         stream),
            "cuMemcpyHtoDAsync");
    }
  }
}

// No lot is queued any more; the run ends once all that is queued was confirmed.
void DeviceRing::fail(const char* why) noexcept {
  try {
    why_ = why;
  } catch (const std::bad_alloc&) {
    why_ = "no memory";  // short enough to need none
  }
  flying_.clear();
}

// An error that is no loss of the device says nothing of what it does: whoever waits asks again.
bool DeviceRing::has_passed(CuEvent event) {
  const CuResult result = driver_.cuEventQuery(event);
  check(result, "cuEventQuery", true);
  return result == kCuSuccess;
}

// Of a run that failed: everything on the three streams.
bool DeviceRing::confirm_rest() {
  const std::array<CuStream, 3> streams{kernels_, copies_[0], copies_[1]};
  for (std::size_t index = 0; index < streams.size(); ++index) {
    if (!has_tail_[index]) {
      const CuResult result = driver_.cuEventRecord(tails_[index], streams[index]);
      check(result, "cuEventRecord", true);
      has_tail_[index] = result == kCuSuccess;
    }
    if (!has_tail_[index] || !has_passed(tails_[index])) {
      return false;
    }
  }
  under_way_ = false;
  sums_->settle();
  return true;
}

// Whether something has moved: the oldest lot was confirmed, or the run is over.
bool DeviceRing::collect() {
  if (flying_.empty()) {
    under_way_ = has_sums_ && !sums_->are_there(blocks_);
    return !under_way_;
  }
  const auto [part, byte] = flying_.front();
  if (!has_passed(parts_[part].is_over)) {
    return false;
  }
  flying_.erase(flying_.begin());
  if (has_sums_) {
    sums_->advance(byte / block_bytes_);
  }
  return true;
}

void DeviceRing::check(CuResult result, const char* call, bool only_loss) {
  const bool lost = means_lost(result);
  is_lost_ = is_lost_ || lost;
  if (lost || (result != kCuSuccess && !only_loss)) {
    throw CudaError(driver_, call, result);
  }
}

}  // namespace kvbm
