// JoinRequests: readers that want to read HOST's memory by themselves, over RDMA or NIXL, between their connections'
// threads and who lets them, which is Python. What is said, kvbm/transport/rdma_hello.py and nixl_hello.py know; here
// it is bytes.
//
// Life: that of the server's PeerOwner; nobody may ask before `open`, and nobody waits after `close`. Any thread.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/lease_table.hpp"

namespace kvbm {

// How a reader says that it wants to.
struct JoinHello {
  std::uint8_t kind;             // of a message, beside those of peer_wire.hpp
  std::size_t body_bytes;        // of it
  std::size_t most_ready_bytes;  // of the answer, head and all
};

inline constexpr JoinHello kRdmaHello{.kind = 12, .body_bytes = 28, .most_ready_bytes = 256};
inline constexpr JoinHello kNixlHello{.kind = 14, .body_bytes = 0, .most_ready_bytes = (64 << 10) + 256};

class JoinRequests {
 public:
  // A namespace that is open on the reader's connection, and as it was admitted.
  using Opening = std::pair<NamespaceId, std::uint64_t>;
  struct Request {
    std::uint64_t number = 0;         // of the connection
    std::vector<std::uint8_t> hello;  // what the reader said, without the head
    bool has_left = false;            // nothing was said: its connection is over
  };

  explicit JoinRequests(const JoinHello& hello) noexcept : hello_(hello) {}

  const JoinHello& hello() const noexcept { return hello_; }
  // Somebody answers from now on.
  void open();
  bool is_open() const;

  // Waits until a reader's HELLO is answered: what to send to it; empty: nobody has, in time. number: set to the
  // connection's.
  std::vector<std::uint8_t> ask(Bytes hello, std::vector<Opening> openings, SteadyTime deadline, std::uint64_t& number);
  // The connection of a reader that was answered is over.
  void leave(std::uint64_t number);

  // What was asked and who has left since the last call, waiting for one at most so long. Empty at once after `close`.
  std::vector<Request> take(std::chrono::milliseconds timeout);
  // What was open when a request was made; empty: nobody waits for its answer any more.
  std::vector<Opening> openings(std::uint64_t number) const;
  // False: nobody waits for it any more.
  bool answer(std::uint64_t number, Bytes ready);

  // Who waits goes without an answer.
  void close();

 private:
  struct Waiting {
    std::vector<Opening> openings;    // see above
    std::vector<std::uint8_t> ready;  // the answer; empty: not there yet
  };

  const JoinHello hello_;                     // see above
  mutable std::mutex mutex_;                  // guards what follows
  std::condition_variable asked_;             // a request, or the end
  std::condition_variable answered_;          // an answer, or the end
  std::map<std::uint64_t, Waiting> waiting_;  // by number
  std::vector<Request> requests_;             // not taken yet
  std::uint64_t next_ = 1;                    // number
  bool is_open_ = false;                      // see `open`
};

}  // namespace kvbm
