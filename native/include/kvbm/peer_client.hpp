// PeerClient: reads blocks that one other instance lends, over a few connections that it keeps.
//
// Life: made without a connection; the first read makes one. close(), and the destructor, end reads under way and wait
// for them. After fork() the child must not destroy it, and reads nothing through it: its connections are the parent's.
// Threads: any; reads that find all connections in use wait for one until their deadline. Trouble is an outcome, never
// an exception. When read() returns, nobody writes the rows any more, whatever has happened.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <unistd.h>

#include "kvbm/reader_connection.hpp"
#include "kvbm/row_copy.hpp"

namespace kvbm {

// As kvbm.core.reads.ReadOutcome.
enum class PeerOutcome : std::uint8_t { kGood = 0, kMissing = 1, kCorrupt = 2, kFailed = 3 };

// Blocks that are wanted, in the order of their chain, and where they go.
struct PeerWish {
  NamespaceId namespace_id;  // whose blocks
  SequenceHash root;         // of the namespace
  Bytes hashes;              // packed
  TargetRows rows;           // one for each block, apart from each other
  std::size_t row_bytes;     // of each
  PeerMoment deadline;       // after which nobody waits
};

// How a read went; the rows' outcomes say the rest.
struct PeerAccount {
  std::string trouble;         // why something failed, for people; empty: nothing did
  std::uint32_t retry_ms = 0;  // the owner was busy, and said when to come again
  bool is_shut = false;        // the owner does not lend this namespace; others it may
};

class PeerClient {
 public:
  // streams: connections, at least 1, of which one read over tcp uses two. The copier must outlive this.
  PeerClient(PeerTarget target, unsigned streams, RowCopier& copier);
  ~PeerClient();
  PeerClient(const PeerClient&) = delete;
  PeerClient& operator=(const PeerClient&) = delete;

  // outcomes, checksums: one for each block; the checksum of a row that is not good means nothing.
  PeerAccount read(const PeerWish& wish, std::span<PeerOutcome> outcomes, std::span<std::uint32_t> checksums);

  // Idempotent. Reads end with trouble from now on. Does nothing in a forked child.
  void close() noexcept;

  bool is_of_this_process() const noexcept { return process_ == getpid(); }

 private:
  class Reading;
  class Held;
  class UnderWay;
  using Place = std::list<std::unique_ptr<ReaderConnection>>;

  std::unique_ptr<ReaderConnection> idle_one(const NamespaceId& namespace_id);
  bool take_place(PeerMoment deadline, bool waits);
  void leave_place() noexcept;
  void read_on_streams(Reading& reading);

  const pid_t process_ = getpid();                       // whose connections they are
  const PeerTarget target_;                              // whom
  const unsigned streams_;                               // connections at most
  RowCopier& copier_;                                    // copies from a mapping
  SharedMapping mapping_;                                // of the owner's memory
  std::mutex lock_;                                      // over what follows
  std::condition_variable changed_;                      // a place is free, or a read has ended
  std::vector<std::unique_ptr<ReaderConnection>> idle_;  // connections nobody uses; the last is the one used last
  std::vector<ReaderConnection*> in_use_;                // to be shut when all ends
  unsigned places_ = 0;                                  // taken: of connections that are in use or being made
  unsigned reading_ = 0;                                 // reads under way
  bool is_closed_ = false;                               // since close()
};

}  // namespace kvbm
