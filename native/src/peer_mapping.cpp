#include "kvbm/peer_mapping.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace kvbm {
namespace {

constexpr std::size_t kHugeBytes = 2 << 20;  // where the owner has huge pages, whole ones are mapped

[[noreturn]] void refuse_mapping(const std::string& why) { throw PeerTrouble("its memory cannot be used: " + why); }

struct stat about_file(const PeerDescriptor& file) {
  struct stat about{};
  if (fstat(file.get(), &about) != 0) {
    refuse_mapping(std::generic_category().message(errno));
  }
  return about;
}

}  // namespace

PeerMapping::PeerMapping(const PeerArena& shape, const PeerDescriptor& file) : shape_(shape) {
  const struct stat about = about_file(file);
  device_ = about.st_dev;
  file_ = about.st_ino;
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    refuse_mapping("the file could be shortened");
  }
  if (about.st_size < 0 || static_cast<std::uint64_t>(about.st_size) < shape.bytes) {
    refuse_mapping(std::to_string(shape.bytes) + " bytes are said to be there, the file has " +
                   std::to_string(about.st_size));
  }
  const auto bytes = static_cast<std::size_t>(about.st_size);
  // 1 GiB in a pool of such pages
  const std::size_t alignment = std::max(kHugeBytes, static_cast<std::size_t>(about.st_blksize));
  room_bytes_ = bytes + alignment;
  void* const room = mmap(nullptr, room_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    refuse_mapping(std::generic_category().message(errno));
  }
  room_ = static_cast<std::uint8_t*>(room);
  const std::size_t ahead = (alignment - reinterpret_cast<std::uintptr_t>(room_) % alignment) % alignment;
  void* const mapped = mmap(room_ + ahead, bytes, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file.get(), 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    munmap(room_, room_bytes_);
    refuse_mapping(std::generic_category().message(error));
  }
  madvise(mapped, bytes, MADV_DONTDUMP);
  madvise(mapped, bytes, MADV_DONTFORK);  // a child would keep it for as long as it lives
  data_ = static_cast<const std::uint8_t*>(mapped);
}

PeerMapping::~PeerMapping() { munmap(room_, room_bytes_); }

bool PeerMapping::is_of(const PeerArena& shape, const PeerDescriptor& file) const {
  const struct stat about = about_file(file);
  return about.st_dev == device_ && about.st_ino == file_ && shape.bytes == shape_.bytes &&
         shape.slots == shape_.slots && shape.stride == shape_.stride;
}

std::shared_ptr<const PeerMapping> SharedMapping::of(const PeerArena& shape, const PeerDescriptor& file) {
  const std::lock_guard held(lock_);
  std::shared_ptr<const PeerMapping> found = latest_.lock();
  if (!found || !found->is_of(shape, file)) {
    found = std::make_shared<const PeerMapping>(shape, file);
    latest_ = found;
  }
  return found;
}

}  // namespace kvbm
