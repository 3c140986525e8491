#include "kvbm/peer_owner.hpp"

#include <sys/mman.h>

#include <algorithm>

namespace kvbm {

bool AdmittedNamespaces::admit(const NamespaceId& id, Bytes root) {
  const std::lock_guard held(mutex_);
  const auto found = admitted_.find(id);
  if (found != admitted_.end() && std::ranges::equal(found->second.root, root)) {
    return true;
  }
  if (found == admitted_.end() && admitted_.size() >= kMostAdmitted) {
    return false;
  }
  admitted_[id] = {{root.begin(), root.end()}, next_++};
  return true;
}

void AdmittedNamespaces::withdraw(const NamespaceId& id) {
  const std::lock_guard held(mutex_);
  admitted_.erase(id);
}

std::optional<AdmittedNamespaces::Admitted> AdmittedNamespaces::find(const NamespaceId& id) const {
  const std::lock_guard held(mutex_);
  const auto found = admitted_.find(id);
  return found == admitted_.end() ? std::nullopt : std::optional(found->second);
}

bool AdmittedNamespaces::holds(const NamespaceId& id, std::uint64_t number) const {
  const std::lock_guard held(mutex_);
  const auto found = admitted_.find(id);
  return found != admitted_.end() && found->second.number == number;
}

void CorruptBlocks::add(const CorruptBlock& block) {
  {
    const std::lock_guard held(mutex_);
    if (blocks_.size() >= kMostCorrupt) {
      return;
    }
    blocks_.push_back(block);
  }
  changed_.notify_one();
}

std::vector<CorruptBlock> CorruptBlocks::take(std::chrono::milliseconds timeout) {
  std::unique_lock held(mutex_);
  changed_.wait_for(held, timeout, [this] { return is_closed_ || !blocks_.empty(); });
  return std::exchange(blocks_, {});
}

void CorruptBlocks::close() {
  {
    const std::lock_guard held(mutex_);
    is_closed_ = true;
  }
  changed_.notify_all();
}

StagingLanes::~StagingLanes() {
  for (std::uint8_t* const rows : free_) {
    munmap(rows, lane_bytes_);
  }
}

StagingLanes::Lane::~Lane() {
  if (lanes_ == nullptr) {
    return;
  }
  {
    const std::lock_guard held(lanes_->mutex_);
    lanes_->free_.push_back(rows_);  // never more than it has had
  }
  lanes_->changed_.notify_one();
}

std::optional<StagingLanes::Lane> StagingLanes::take(SteadyTime deadline) {
  std::unique_lock held(mutex_);
  if (!changed_.wait_until(held, deadline, [this] { return !free_.empty() || left_ > 0; })) {
    return std::nullopt;
  }
  if (free_.empty()) {
    void* const mapped = mmap(nullptr, lane_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      return std::nullopt;
    }
    free_.reserve(free_.capacity() + 1);
    --left_;
    return std::optional<Lane>(std::in_place, *this, static_cast<std::uint8_t*>(mapped));
  }
  std::uint8_t* const rows = free_.back();
  free_.pop_back();
  return std::optional<Lane>(std::in_place, *this, rows);
}

}  // namespace kvbm
