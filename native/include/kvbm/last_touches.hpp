// LastTouches: the last step whose forward may touch each block of an engine's HBM. Native implementation of the class
// of the same name in kvbm/engines/vllm/forwards.py, which says what each call means. Made for a number of blocks, told
// of each step and of who leaves, asked before a load. Owner thread only. It grows with what requests have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvbm {

class LastTouches {
 public:
  static constexpr std::int64_t kUnknown = -1;

  explicit LastTouches(std::size_t blocks) : steps_(blocks), holders_(blocks) {}

  std::size_t blocks() const noexcept { return steps_.size(); }
  std::int64_t step() const noexcept { return step_; }
  // Another step is planned; returns its number.
  std::int64_t begin_step() noexcept { return ++step_; }
  // A request of the step has got these blocks, each of which exists.
  void hold(const std::string& request, std::span<const std::uint32_t> blocks);
  // A request has lost its blocks.
  void leave(const std::string& request) noexcept;
  // The last step that may touch any of these blocks, each of which exists, or kUnknown.
  std::int64_t of(std::span<const std::uint32_t> blocks) const noexcept;

 private:
  std::int64_t step_ = 0;               // planned last
  std::vector<std::int64_t> steps_;     // by block: the step that was planned last when nobody had it any more
  std::vector<std::uint32_t> holders_;  // by block: how often requests have it
  std::unordered_map<std::string, std::vector<std::uint32_t>> held_;  // request → its blocks, as it got them
};

}  // namespace kvbm
