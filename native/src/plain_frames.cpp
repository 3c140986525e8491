#include "kvbm/plain_frames.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <variant>

#include "kvbm/codec.hpp"
#include "kvbm/error.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

// A frame that was read whole: its events are [begin, end) of those kept.
struct ReadFrame {
  std::uint64_t wall_time_ns;
  std::uint64_t digest;
  std::size_t events_begin;
  std::size_t events_end;
  std::size_t end;  // its last byte's next, in the message
};

// Reads messages, and knows which are plain. Kept for a run, so that reading allocates nothing in the end.
class MessageReader {
 public:
  // Whether a message is plain for an instance that stands there; if so, `frames` and `events` have all of it.
  bool read(const StreamMessage& message, const StreamPlace& place) {
    frames.clear();
    events.clear();
    if (place.instance == ClusterIndex::kNone || message.data.empty()) {
      return false;
    }
    std::uint64_t offset = place.offset;
    std::size_t at = 0;
    try {
      while (at < message.data.size()) {
        FrameReader reader(message.data, at);
        const FrameHeader& header = reader.header();
        if (header.instance != place.name || header.epoch != place.epoch || header.first_offset != offset ||
            std::numeric_limits<std::uint64_t>::max() - offset < header.event_count) {
          return false;
        }
        const std::size_t begin = events.size();
        while (std::optional<Event> event = reader.next()) {
          if (std::holds_alternative<InstanceStarted>(*event) || std::holds_alternative<InstanceStopped>(*event) ||
              std::holds_alternative<UsageRecorded>(*event)) {
            return false;
          }
          events.push_back(*std::move(event));
        }
        offset += header.event_count;
        at = reader.end();
        frames.push_back({header.wall_time_ns, header.digest, begin, events.size(), at});
      }
    } catch (const Error&) {
      return false;  // who reads it again says what is wrong with it
    }
    return true;
  }

  std::vector<ReadFrame> frames;  // of the message read last
  std::vector<Event> events;      // of all of them
};

}  // namespace

PlainApplied apply_plain(ClusterIndex& index, std::span<const StreamMessage> messages, std::span<StreamPlace> places) {
  PlainApplied applied;
  MessageReader reader;
  for (std::size_t number = 0; number < messages.size(); ++number) {
    StreamPlace& place = places[messages[number].place];
    if (!reader.read(messages[number], place)) {
      return applied;
    }
    for (const ReadFrame& frame : reader.frames) {
      const auto events = std::span(reader.events).subspan(frame.events_begin, frame.events_end - frame.events_begin);
      AppliedFrame done = index.apply(place.instance, place.epoch, events, {});
      for (const ClaimRun& run : done.claims) {
        applied.claims.push_back({number, frame.wall_time_ns, run});
      }
      applied.frames += 1;
      applied.events += done.events;
      applied.blocks += done.blocks;
      place.offset += events.size();
      place.digest = frame.digest;
      place.wall_time_ns = std::max(place.wall_time_ns, frame.wall_time_ns);
      place.last = number;
      place.frames += 1;
      if (!index.agrees(place.instance, frame.digest)) {
        applied.is_diverged = true;
        applied.end = frame.end;
        return applied;
      }
    }
    applied.messages += 1;
  }
  return applied;
}

ApplyThread::ApplyThread(ClusterIndex& index) : index_(index), ended_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (ended_ < 0) {
    throw Error(ErrorCode::kLayout, words("no eventfd can be made (", std::strerror(errno), ")"));
  }
  // Signals are for the threads of whoever embeds us.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { work(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::close(ended_);
    throw;
  }
  pthread_setname_np(thread_.native_handle(), "kvbm-apply");
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ApplyThread::~ApplyThread() {
  close();
  ::close(ended_);
}

void ApplyThread::begin(std::span<const StreamMessage> messages, std::span<StreamPlace> places) {
  {
    const std::lock_guard held(lock_);
    if (is_closing_ || state_ != State::kIdle) {
      throw Error(ErrorCode::kLayout, is_closing_ ? "the thread that applies events is closed" : "a run is under way");
    }
    messages_ = messages;
    places_ = places;
    state_ = State::kBegun;
  }
  changed_.notify_all();
}

PlainApplied ApplyThread::finish() {
  std::unique_lock held(lock_);
  if (state_ == State::kIdle) {
    throw Error(ErrorCode::kLayout, "no run was begun");
  }
  changed_.wait(held, [this] { return state_ == State::kEnded; });
  state_ = State::kIdle;
  std::uint64_t told = 0;
  [[maybe_unused]] const ssize_t read = ::read(ended_, &told, sizeof told);
  if (thrown_ != nullptr) {
    std::rethrow_exception(std::exchange(thrown_, nullptr));
  }
  return std::exchange(applied_, {});
}

void ApplyThread::close() noexcept {
  {
    const std::lock_guard held(lock_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void ApplyThread::work() {
  std::unique_lock held(lock_);
  while (true) {
    changed_.wait(held, [this] { return is_closing_ || state_ == State::kBegun; });
    if (state_ != State::kBegun) {
      return;
    }
    held.unlock();
    try {
      applied_ = apply_plain(index_, messages_, places_);
    } catch (...) {
      thrown_ = std::current_exception();
    }
    held.lock();
    state_ = State::kEnded;
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(ended_, &one, sizeof one);
    changed_.notify_all();
  }
}

}  // namespace kvbm
