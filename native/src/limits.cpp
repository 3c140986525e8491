#include "kvbm/limits.hpp"

#include <sys/mman.h>

#include <chrono>
#include <new>
#include <random>

namespace kvbm {

std::vector<double> random_lines_ns(std::size_t bytes, std::size_t lines, std::size_t snapshots, std::uint64_t seed) {
  constexpr std::size_t kLine = 64;
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw std::bad_alloc();
  }
  madvise(mapped, bytes, MADV_HUGEPAGE);
  auto* const memory = static_cast<std::uint8_t*>(mapped);
  for (std::size_t at = 0; at < bytes; at += 4096) {
    memory[at] = 1;
  }
  std::mt19937_64 random(seed);
  std::vector<std::size_t> places(lines);
  std::vector<double> taken;
  taken.reserve(snapshots);
  std::uint64_t sum = 0;
  for (std::size_t snapshot = 0; snapshot < snapshots; ++snapshot) {
    for (std::size_t& place : places) {
      place = random() % (bytes / kLine) * kLine;
    }
    const auto begin = std::chrono::steady_clock::now();
    for (const std::size_t place : places) {
      __builtin_prefetch(memory + place);
    }
    for (const std::size_t place : places) {
      sum += *static_cast<const volatile std::uint8_t*>(memory + place);
    }
    taken.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count());
  }
  munmap(mapped, bytes);
  return sum != ~std::uint64_t{0} ? taken : std::vector<double>{};  // the sum is used, so the reads are made
}

}  // namespace kvbm
