// LendingServer: lends an instance's blocks to others, over a unix socket to processes of its user and over TCP to
// those that have its key or, where it speaks TLS, a certificate.
//
// Life: made listening; `close` or the destructor ends its threads. After fork() the child has none of them: it may
// only `disown`, which closes its descriptors, and drop it. Threads: one accepts, one more for each connection; none of
// them ever needs the GIL, so it answers while Python is busy. Calls from any thread.
//
// What it lends from (ledger, lock, memory, BlockIo) outlives it; where `close` gives up on a thread, it must stay for
// good.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "kvbm/peer_owner.hpp"

namespace kvbm {

class LendingServer {
 public:
  // nvme: nullptr: what lies in NVME is not lent.
  // Throws std::system_error: it cannot listen there, or no thread is to be had. Throws Error: kLayout, for options
  // that make no sense.
  LendingServer(LendingOptions options, Ledger& ledger, LedgerLock& lock, const LentHost& host, BlockIo* nvme);
  ~LendingServer();
  LendingServer(const LendingServer&) = delete;
  LendingServer& operator=(const LendingServer&) = delete;

  // Where it listens; 0: not over TCP.
  std::uint16_t tcp_port() const noexcept { return tcp_port_; }
  PeerOwner& owner() const noexcept;

  // Grants nothing more, ends all connections, and waits for their threads. False: one is still there after this time,
  // and what it uses must stay. Idempotent.
  bool close(std::chrono::milliseconds timeout);

  // Ends the connections of those who have said NIXL_HELLO: what they were told counts no more.
  void hang_up_on_nixl() noexcept;

  // In a forked child: closes its descriptors, so that peers see when the parent is gone.
  void disown() noexcept;

 private:
  struct Shared;

  const pid_t process_ = getpid();  // whose threads it has
  std::shared_ptr<Shared> shared_;  // also of threads that outlive this
  std::uint16_t tcp_port_ = 0;      // see above
  std::string unix_path_;           // to be removed
  std::mutex closing_;              // one `close` at a time
  bool was_closed_ = false;         // guarded by it: nothing of it runs any more
};

}  // namespace kvbm
