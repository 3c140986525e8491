// What every fuzz target needs: REQUIRE, and a meter of the memory that one call asks for. One thread.
#pragma once

#include <sanitizer/allocator_interface.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Ends the program with the place and the words of what does not hold: libFuzzer then keeps the input.
#define REQUIRE(condition)                                                         \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

namespace kvbm::fuzz {

// Made before a call, asked after it: bytes its thread has asked the allocator for in between, freed or not. A count in
// the input that sizes an allocation shows here long before it would hurt. Other threads do not count: libFuzzer has
// one that watches the memory, and begins it, on a busy machine, while the first inputs run.
class MemoryMeter {
 public:
  MemoryMeter() noexcept : before_(asked()) {}

  std::size_t bytes() const noexcept { return asked() - before_; }

  // Once, before the first meter. Without it every meter would stand at 0, so a program that cannot install it ends.
  static void install() {
    REQUIRE(__sanitizer_install_malloc_and_free_hooks([](const volatile void*, std::size_t size) { asked() += size; },
                                                      [](const volatile void*) {}) != 0);
    const MemoryMeter meter;
    void* volatile seen = std::malloc(std::size_t{1} << 10);  // volatile, or the compiler drops the pair
    std::free(seen);
    REQUIRE(meter.bytes() >= std::size_t{1} << 10);
  }

 private:
  static std::size_t& asked() noexcept {
    static thread_local std::size_t bytes = 0;  // since the hooks were installed
    return bytes;
  }

  std::size_t before_;  // asked for when the meter was made
};

}  // namespace kvbm::fuzz
