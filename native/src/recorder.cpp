#include "kvbm/recorder.hpp"

namespace kvbm {
namespace {

constexpr std::size_t kStoppedBytes = 2;  // of an InstanceStopped, whose room is always kept

}  // namespace

void Recorder::begin(std::uint64_t epoch, const InstanceStarted& event, std::size_t encoded_bytes,
                     std::size_t namespaces) {
  applied_ = 0;
  overflowed_ = false;
  waiting_.add(event, encoded_bytes, 0, applied_, namespaces);
  ++applied_;
  Vacating listener{applied_};
  fold_.begin({WireInteger(epoch), fold_.pools()}, listener);
  waiting_.set_digest(fold_.digest());
}

std::size_t Recorder::admit(const Event& event) const {
  const std::size_t bytes = event_bytes(event);
  fold_.check_open(event.index());
  return bytes;
}

// Whether the event waits; not after an overflow, or where it is one.
bool Recorder::wait(const Event& event, std::size_t encoded_bytes, std::uint32_t namespace_index, bool counted) {
  if (overflowed_) {
    return false;
  }
  const bool fits = !counted || waiting_bytes_ + encoded_bytes + kStoppedBytes <= event_bytes_;
  if (fits) {
    waiting_.add(event, encoded_bytes, namespace_index, applied_);
    waiting_bytes_ += counted ? encoded_bytes : 0;
  } else {
    waiting_.add(InstanceStopped{.reason = StopReason::kOverflow}, kStoppedBytes, 0, applied_);
    waiting_.set_digest(fold_.digest());
    overflowed_ = true;
  }
  ++applied_;
  return fits;
}

void Recorder::clear_waiting() noexcept {
  waiting_.clear();
  waiting_bytes_ = 0;
}

}  // namespace kvbm
