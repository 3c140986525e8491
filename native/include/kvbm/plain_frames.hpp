// Plain frames: those that go on exactly where their instance stands, in the epoch it is in, and change nothing but
// blocks. They are nearly all frames there are. Here whole runs of messages of them are applied at once; whatever is
// not plain ends a run and is left to kvbm/catalog/follow/sequencer.py, which decides about it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "kvbm/cluster_index.hpp"
#include "kvbm/event.hpp"

namespace kvbm {

// Where an instance stands in its stream, and what a run has done to it.
struct StreamPlace {
  std::uint32_t instance;          // its number in the index; ClusterIndex::kNone: none of its frames is plain
  std::string name;                // its name, as frames have it
  std::uint64_t epoch;             // its epoch
  std::uint64_t offset;            // of its next event
  std::uint64_t digest = 0;        // in the last frame that was applied
  std::uint64_t wall_time_ns = 0;  // of the newest frame that was applied
  std::size_t last = 0;            // the message that brought the last of them
  std::uint64_t frames = 0;        // how many were applied
};

// A message of a stream.
struct StreamMessage {
  std::size_t place;  // of its instance, among the run's places
  Bytes data;         // its frames
};

// Claims in a frame.
struct PlainClaims {
  std::size_t message;         // which brought them
  std::uint64_t wall_time_ns;  // of their frame
  ClaimRun run;                // points into the message
};

// What a run has done.
struct PlainApplied {
  std::size_t messages = 0;  // applied whole
  // The next message's frames up to `end` are applied; after the last of them the index's digest differs
  bool is_diverged = false;
  std::size_t end = 0;              // a position in that message
  std::uint64_t frames = 0;         // applied
  std::uint64_t events = 0;         // in them
  std::uint64_t blocks = 0;         // that the events name
  std::vector<PlainClaims> claims;  // in order
};

// Applies messages in order, up to the first that is not plain as a whole, or the first frame after which the index's
// digest is another than the frame's. Places are moved on. Any thread; the index's writers take turns frame by frame.
PlainApplied apply_plain(ClusterIndex& index, std::span<const StreamMessage> messages, std::span<StreamPlace> places);

// A thread that applies one run at a time, so that who fetches messages answers questions meanwhile. It never needs the
// interpreter. `begin`, `finish` and `close` belong to one thread.
class ApplyThread {
 public:
  explicit ApplyThread(ClusterIndex& index);
  ApplyThread(const ApplyThread&) = delete;
  ApplyThread& operator=(const ApplyThread&) = delete;
  ~ApplyThread();

  // A file descriptor that becomes readable when the run has ended; `finish` makes it unreadable again.
  int ended_file() const noexcept { return ended_; }

  // Begins a run. What messages and places lie in must stay as it is until `finish`. Throws Error: kLayout: a run is
  // under way, or it is closed.
  void begin(std::span<const StreamMessage> messages, std::span<StreamPlace> places);

  // Waits for the run's end, and gives what it has done. Throws what applying has thrown; Error: kLayout: no run was
  // begun.
  PlainApplied finish();

  // Ends the thread, after the run under way. Idempotent.
  void close() noexcept;

 private:
  enum class State : std::uint8_t { kIdle, kBegun, kEnded };

  void work();

  ClusterIndex& index_;                      // what runs are applied to
  int ended_ = -1;                           // an eventfd
  std::mutex lock_;                          // guards what follows
  std::condition_variable changed_;          // the state has changed
  State state_ = State::kIdle;               // of the run
  bool is_closing_ = false;                  // no further run
  std::span<const StreamMessage> messages_;  // of the run
  std::span<StreamPlace> places_;            // of the run
  PlainApplied applied_;                     // what it has done
  std::exception_ptr thrown_;                // instead
  std::thread thread_;                       // last: it uses all of the above
};

}  // namespace kvbm
