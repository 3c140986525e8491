#include "kvbm/join_requests.hpp"

namespace kvbm {

void JoinRequests::open() {
  const std::lock_guard held(mutex_);
  is_open_ = true;
}

bool JoinRequests::is_open() const {
  const std::lock_guard held(mutex_);
  return is_open_;
}

std::vector<std::uint8_t> JoinRequests::ask(Bytes hello, std::vector<Opening> openings, SteadyTime deadline,
                                            std::uint64_t& number) {
  std::unique_lock held(mutex_);
  if (!is_open_) {
    return {};
  }
  number = next_++;
  const auto waiting = waiting_.emplace(number, Waiting{std::move(openings), {}}).first;
  try {
    requests_.push_back({number, {hello.begin(), hello.end()}, false});
  } catch (...) {
    waiting_.erase(waiting);
    throw;
  }
  asked_.notify_all();
  answered_.wait_until(held, deadline, [&] { return !waiting->second.ready.empty() || !is_open_; });
  std::vector<std::uint8_t> ready = std::move(waiting->second.ready);
  waiting_.erase(waiting);
  return ready;
}

void JoinRequests::leave(std::uint64_t number) {
  const std::lock_guard held(mutex_);
  if (is_open_) {
    requests_.push_back({number, {}, true});
    asked_.notify_all();
  }
}

std::vector<JoinRequests::Request> JoinRequests::take(std::chrono::milliseconds timeout) {
  std::unique_lock held(mutex_);
  asked_.wait_for(held, timeout, [this] { return !requests_.empty() || !is_open_; });
  return std::exchange(requests_, {});
}

std::vector<JoinRequests::Opening> JoinRequests::openings(std::uint64_t number) const {
  const std::lock_guard held(mutex_);
  const auto waiting = waiting_.find(number);
  return waiting == waiting_.end() ? std::vector<Opening>{} : waiting->second.openings;
}

bool JoinRequests::answer(std::uint64_t number, Bytes ready) {
  const std::lock_guard held(mutex_);
  const auto waiting = waiting_.find(number);
  if (waiting == waiting_.end() || !is_open_) {
    return false;
  }
  waiting->second.ready.assign(ready.begin(), ready.end());
  answered_.notify_all();
  return true;
}

void JoinRequests::close() {
  const std::lock_guard held(mutex_);
  is_open_ = false;
  requests_.clear();
  asked_.notify_all();
  answered_.notify_all();
}

}  // namespace kvbm
