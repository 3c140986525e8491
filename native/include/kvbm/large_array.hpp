// LargeArray: a vector whose storage asks for huge pages when it is large. Tables that are read at random places spend more time
// on finding pages than on reading them otherwise. Grows and lives as std::vector does; threads as std::vector.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvbm {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

template <class T>
struct LargeAllocator {
  using value_type = T;

  LargeAllocator() noexcept = default;
  template <class U>
  explicit LargeAllocator(const LargeAllocator<U>&) noexcept {}

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    void* const memory = ::operator new(bytes, alignment(count));
#if defined(__linux__)
    if (bytes >= kHugePageBytes) {
      madvise(memory, bytes, MADV_HUGEPAGE);  // a wish: without huge pages all is the same, only slower
    }
#endif
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
