#include "kvbm/arena.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace kvbm {
namespace {

// What an address must be a multiple of for transparent huge pages
constexpr std::size_t kHugeBytes = std::size_t{2} << 20;
constexpr std::size_t kTouchedBytes = std::size_t{64} << 20;  // pages are touched in slices of so many bytes
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14, which headers may lack
constexpr int kCollapse = 25;       // MADV_COLLAPSE of Linux 6.1
// slices; a machine whose memory is in pieces would else search for long
constexpr int kMostRefusals = 4;

[[noreturn]] void refuse(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

std::size_t rounded_up(std::size_t bytes, std::size_t to) {
  if (bytes > SIZE_MAX / 2 - to) {  // no address space has as much, and sums below must not wrap
    refuse(ENOMEM, "more bytes than there are addresses");
  }
  return (bytes + to - 1) / to * to;
}

#if defined(__linux__)
// madvise, again when it was disturbed. False: it is refused, errno says why.
bool advised(std::uint8_t* data, std::size_t bytes, int advice) noexcept {
  int result = 0;
  do {
    result = madvise(data, bytes, advice);
  } while (result != 0 && (errno == EAGAIN || errno == EINTR));
  return result == 0;
}

// Makes huge pages of all whole ones in [data, data + bytes), which begins with one. The kernel does so by request also
// where it does not by itself, unless it is denied altogether; but it takes no piece in which no page is there yet.
// False: not all of them.
bool collapse_slice(std::uint8_t* data, std::size_t bytes, std::size_t page_bytes) noexcept {
  const std::size_t whole = bytes / kHugeBytes * kHugeBytes;
  for (std::size_t at = 0; at < whole; at += kHugeBytes) {
    if (!advised(data + at, page_bytes, kPopulateWrite)) {
      return false;
    }
  }
  return whole == 0 || madvise(data, whole, kCollapse) == 0;
}
#endif

// Makes pages of [data, data + bytes) be there; 0, or the errno of a refusal.
int touch_slice(std::uint8_t* data, std::size_t bytes, std::size_t page_bytes) noexcept {
#if defined(__linux__)
  if (advised(data, bytes, kPopulateWrite)) {
    return 0;
  }
  if (errno != EINVAL) {
    return errno == EFAULT ? ENOMEM : errno;  // EFAULT: a write would have been answered by SIGBUS
  }
#endif
  for (std::size_t at = 0; at < bytes; at += page_bytes) {  // an older kernel
    *static_cast<volatile std::uint8_t*>(data + at) = 0;
  }
  return 0;
}

}  // namespace

Arena::Arena(const Wishes& wishes) {
  try {
    map(wishes);
    if (wishes.numa_node >= 0) {
      bind(wishes.numa_node);
    }
    touch(wishes.threads, wishes.advise && !wishes.huge_pages);
  } catch (...) {
    give_back();
    throw;
  }
}

Arena::~Arena() { give_back(); }

#if defined(__linux__)

void Arena::map(const Wishes& wishes) {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (wishes.huge_pages ? MFD_HUGETLB : 0U);
  fd_ = memfd_create(wishes.name.c_str(), flags);
  if (fd_ < 0) {
    refuse(errno, "memfd_create");
  }
  struct stat about{};
  if (fstat(fd_, &about) != 0) {
    refuse(errno, "fstat");
  }
  page_bytes_ =
      wishes.huge_pages ? static_cast<std::size_t>(about.st_blksize) : static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t wanted = rounded_up(wishes.bytes, page_bytes_);
  if (ftruncate(fd_, static_cast<off_t>(wanted)) != 0) {
    refuse(errno, "ftruncate");
  }
  // Whoever shortened the file would have us killed where the bytes were.
  if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    refuse(errno, "F_ADD_SEALS");
  }
  // Addresses first, with room to begin at a whole huge page; then the file over them.
  const std::size_t alignment = wanted >= kHugeBytes ? std::max(kHugeBytes, page_bytes_) : page_bytes_;
  const std::size_t reserved = wanted + alignment;
  void* const room = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    refuse(errno, "mmap");
  }
  auto* const first = static_cast<std::uint8_t*>(room);
  auto* const begin = reinterpret_cast<std::uint8_t*>(rounded_up(reinterpret_cast<std::uintptr_t>(first), alignment));
  if (mmap(begin, wanted, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(room, reserved);
    refuse(error, "mmap");
  }
  if (begin > first) {
    munmap(first, static_cast<std::size_t>(begin - first));
  }
  if (first + reserved > begin + wanted) {
    munmap(begin + wanted, static_cast<std::size_t>(first + reserved - (begin + wanted)));
  }
  data_ = begin;
  bytes_ = wanted;
  madvise(data_, bytes_, MADV_DONTDUMP);
  if (!wishes.huge_pages && wishes.advise) {
    madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: without them all is the same, only slower
  }
}

void Arena::bind(int numa_node) {
  constexpr long kBind = 2;  // MPOL_BIND
  constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 1024 / kBits> nodes{};
  const auto node = static_cast<std::size_t>(numa_node);
  if (node >= 1024) {
    refuse(EINVAL, "mbind");
  }
  nodes[node / kBits] |= 1UL << (node % kBits);
  // The kernel reads one bit less than it is told.
  if (syscall(SYS_mbind, data_, bytes_, kBind, nodes.data(), 1024UL + 1, 0UL) != 0) {
    refuse(errno, "mbind");
  }
}

#else

void Arena::map(const Wishes& wishes) {
  if (wishes.huge_pages) {
    refuse(ENOTSUP, "huge pages");
  }
  page_bytes_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t wanted = rounded_up(wishes.bytes, page_bytes_);
  void* const memory = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    refuse(errno, "mmap");
  }
  data_ = static_cast<std::uint8_t*>(memory);
  bytes_ = wanted;
}

void Arena::bind(int) { refuse(ENOTSUP, "mbind"); }

#endif

void Arena::touch(unsigned threads, [[maybe_unused]] bool advise) {
  const std::size_t slice = rounded_up(kTouchedBytes, page_bytes_);
  std::atomic<std::size_t> next{0};
  std::atomic<int> refusal{0};
  [[maybe_unused]] std::atomic<int> scattered{advise && bytes_ >= kHugeBytes ? 0 : kMostRefusals};
  const auto work = [&]() noexcept {
    while (refusal.load(std::memory_order_relaxed) == 0) {
      const std::size_t at = next.fetch_add(slice, std::memory_order_relaxed);
      if (at >= bytes_) {
        return;
      }
#if defined(__linux__)
      if (scattered.load(std::memory_order_relaxed) < kMostRefusals &&
          !collapse_slice(data_ + at, std::min(slice, bytes_ - at), page_bytes_)) {
        scattered.fetch_add(1, std::memory_order_relaxed);
      }
#endif
      if (const int error = touch_slice(data_ + at, std::min(slice, bytes_ - at), page_bytes_); error != 0) {
        refusal.store(error, std::memory_order_relaxed);
      }
    }
  };
  std::vector<std::thread> helpers;
  const std::size_t useful = std::min<std::size_t>(threads, (bytes_ + slice - 1) / slice);
  helpers.reserve(useful);
  try {
    while (helpers.size() + 1 < useful) {
      helpers.emplace_back(work);
    }
  } catch (const std::exception&) {  // no thread or no memory is to be had: fewer will do
  }
  work();
  for (std::thread& helper : helpers) {
    helper.join();
  }
  if (const int error = refusal.load(); error != 0) {
    refuse(error, "touching its pages");
  }
}

void Arena::give_back() noexcept {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
    data_ = nullptr;
  }
  if (fd_ >= 0) {
    close(fd_);
    fd_ = -1;
  }
}

}  // namespace kvbm
