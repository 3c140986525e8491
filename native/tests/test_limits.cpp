#include "kvbm/limits.hpp"

#include "check.hpp"

namespace {

void every_snapshot_takes_time() {
  const auto taken = kvbm::random_lines_ns(std::size_t{1} << 20, 64, 10, 1);
  CHECK(taken.size() == 10);
  for (const double ns : taken) {
    CHECK(ns > 0);
  }
}

}  // namespace

int main() { return kvbm::tests::run({{"every snapshot takes time", every_snapshot_takes_time}}); }
