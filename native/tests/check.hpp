// CHECK and a list of named tests: all the framework these tests need. One thread.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <vector>

#include "kvbm/error.hpp"

// Ends the program with the place and the words of what does not hold.
#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

namespace kvbm::tests {

#ifdef KVBM_UNDER_TSAN
inline constexpr bool kIsUnderTsan = true;
#else
inline constexpr bool kIsUnderTsan = false;
#endif

struct Test {
  const char* name;  // a sentence about behaviour
  void (*body)();    // ends the program when it is not so
};

inline int run(std::initializer_list<Test> tests) {
  for (const Test& test : tests) {
    test.body();
    std::printf("ok  %s\n", test.name);
  }
  return 0;
}

// The code of the Error a call throws.
template <class Function>
ErrorCode thrown_code(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.code();
  }
  CHECK(!"an Error was due");
  std::abort();
}

// Pseudo-random bits from a seed, the same everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  std::uint64_t next() noexcept {
    std::uint64_t value = (state_ += 0x9E3779B97F4A7C15);
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
  }
  std::size_t below(std::size_t limit) noexcept { return static_cast<std::size_t>(next() % limit); }
  std::vector<std::uint8_t> bytes(std::size_t count) {
    std::vector<std::uint8_t> data(count);
    for (std::uint8_t& byte : data) {
      byte = static_cast<std::uint8_t>(next());
    }
    return data;
  }

 private:
  std::uint64_t state_;  // SplitMix64's counter
};

inline std::vector<std::uint8_t> read_golden(const std::string& name) {
  std::ifstream file(std::filesystem::path(KVBM_GOLDEN_DIR) / name, std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace kvbm::tests
