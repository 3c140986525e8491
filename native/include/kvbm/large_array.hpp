// LargeArray: a vector whose storage asks for huge pages when it is large. Tables that are read at random places spend
// more time on finding pages than on reading them otherwise. Grows and lives as std::vector does; threads as
// std::vector.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvbm {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Asks for huge pages where whole ones lie in this memory. A wish: without them all is the same, only slower.
inline void wish_for_huge_pages(void* memory, std::size_t bytes) noexcept {
#if defined(__linux__)
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const std::uintptr_t end = (address + bytes) / kHugePageBytes * kHugePageBytes;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
}

template <class T>
struct LargeAllocator {
  using value_type = T;

  LargeAllocator() noexcept = default;
  template <class U>
  explicit LargeAllocator(const LargeAllocator<U>&) noexcept {}

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    void* const memory = ::operator new(bytes, alignment(count));
    wish_for_huge_pages(memory, bytes);
    return static_cast<T*>(memory);
  }

  void deallocate(T* memory, std::size_t count) noexcept { ::operator delete(memory, alignment(count)); }

  template <class U>
  bool operator==(const LargeAllocator<U>&) const noexcept {
    return true;
  }

 private:
  static std::align_val_t alignment(std::size_t count) noexcept {
    return std::align_val_t{count * sizeof(T) >= kHugePageBytes ? kHugePageBytes : alignof(T)};
  }
};

template <class T>
using LargeArray = std::vector<T, LargeAllocator<T>>;

}  // namespace kvbm
