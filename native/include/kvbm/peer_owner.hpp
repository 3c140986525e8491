// What the connections of one lending server share: whose blocks it lends, from which memory, and what was counted.
// Life: made by the server, which outlives its connections' threads or leaves all of it to them. Threads: any; each
// class says how.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvbm/block_io.hpp"
#include "kvbm/event.hpp"
#include "kvbm/lease_table.hpp"
#include "kvbm/loans.hpp"
#include "kvbm/join_requests.hpp"
#include "kvbm/peer_socket.hpp"
#include "kvbm/peer_tls.hpp"
#include "kvbm/peer_wire.hpp"

namespace kvbm {

struct LendingOptions {
  std::string instance;        // its id
  std::string unix_path;       // where it listens for processes of this user; empty: nowhere
  std::string tcp_host;        // where it listens for other machines; empty: nowhere
  std::uint16_t tcp_port = 0;  // 0: a free one
  // What readers over tcp must have, at least kLeastKeyBytes; with `tls` it may be empty
  std::vector<std::uint8_t> key;
  std::shared_ptr<PeerTls> tls;          // what tcp connections are secured with; nullptr: bytes go as they are
  std::uint32_t most_connections = 64;   // at a time, at least 1
  std::size_t most_blocks = 16'384;      // lent at a time, at least 1
  std::uint32_t most_lease_ms = 10'000;  // a lease lasts as long as its reader would wait, and no longer than this
  std::uint32_t most_send_ms = 30'000;   // likewise of bytes that are being sent
  std::uint32_t handshake_ms = 2'000;    // until a peer is known, and for what is left of any message that has begun
  std::uint32_t retry_ms = 10;           // what BUSY says
  std::size_t lane_bytes = 32 << 20;     // of a lane for blocks from NVME; at least one block
  std::uint32_t lanes = 2;               // of them
};

inline constexpr std::size_t kLeastKeyBytes = 16;
inline constexpr std::size_t kMostAdmitted = 65'536;  // namespaces
inline constexpr std::size_t kMostCorrupt = 1'024;    // blocks that wait for who evicts them

// HOST's memory. Row i is slot i.
struct LentHost {
  const std::uint8_t* rows = nullptr;        // of all slots, one after another
  const std::uint32_t* checksums = nullptr;  // CRC-32C of what each slot holds
  std::uint32_t slots = 0;                   // of the pool
  std::size_t block_bytes = 0;               // of a row
  std::size_t mapped_bytes = 0;              // of the descriptor
  int fd = -1;                               // of the memory, -1: none, so that it is not lent as memory
};

// Namespaces that may be opened, each with the root that its readers prove. Any thread.
class AdmittedNamespaces {
 public:
  struct Admitted {
    std::vector<std::uint8_t> root;  // what proves it
    std::uint64_t number = 0;        // of this admission: a handle ends with it
  };

  // False: there are too many.
  bool admit(const NamespaceId& id, Bytes root);
  void withdraw(const NamespaceId& id);
  std::optional<Admitted> find(const NamespaceId& id) const;
  // Whether this admission still holds.
  bool holds(const NamespaceId& id, std::uint64_t number) const;

 private:
  mutable std::mutex mutex_;                  // guards what follows
  std::map<NamespaceId, Admitted> admitted_;  // by id
  std::uint64_t next_ = 1;                    // number
};

struct CorruptBlock {
  NamespaceId namespace_id;  // whose
  Tier tier;                 // where its bytes are not its own any more
  SequenceHash hash;         // which
};

// Blocks whose bytes were found wrong here, for who evicts them; those beyond the bound are found again. Any thread.
class CorruptBlocks {
 public:
  void add(const CorruptBlock& block);
  // Those added since, waiting for one at most so long. Empty at once after `close`.
  std::vector<CorruptBlock> take(std::chrono::milliseconds timeout);
  void close();

 private:
  std::mutex mutex_;                  // guards what follows
  std::condition_variable changed_;   // one was added, or the end
  std::vector<CorruptBlock> blocks_;  // not taken yet
  bool is_closed_ = false;            // nobody waits any more
};

// Memory that blocks pass through on their way from NVME. Any thread.
class StagingLanes {
 public:
  StagingLanes(std::size_t lane_bytes, std::uint32_t lanes) noexcept : lane_bytes_(lane_bytes), left_(lanes) {}
  ~StagingLanes();
  StagingLanes(const StagingLanes&) = delete;
  StagingLanes& operator=(const StagingLanes&) = delete;

  // A lane, given back with the object.
  class Lane {
   public:
    Lane(StagingLanes& lanes, std::uint8_t* rows) noexcept : lanes_(&lanes), rows_(rows) {}
    Lane(Lane&& other) noexcept : lanes_(std::exchange(other.lanes_, nullptr)), rows_(other.rows_) {}
    Lane& operator=(Lane&&) = delete;
    ~Lane();
    std::uint8_t* rows() const noexcept { return rows_; }  // begins at a page

   private:
    StagingLanes* lanes_;  // whose; nullptr: moved from
    std::uint8_t* rows_;   // lane_bytes of them
  };

  // nullopt: none was free in time, or there is no memory.
  std::optional<Lane> take(SteadyTime deadline);
  std::size_t lane_bytes() const noexcept { return lane_bytes_; }

 private:
  const std::size_t lane_bytes_;     // of each
  std::mutex mutex_;                 // guards what follows
  std::condition_variable changed_;  // one was given back
  std::vector<std::uint8_t*> free_;  // mapped and nobody's
  std::uint32_t left_;               // that were never mapped
};

// Since the start, but for `connections`. Any thread.
struct LendingCounts {
  std::atomic<std::uint32_t> connections{0};     // now
  std::atomic<std::uint64_t> accepted{0};        // connections
  std::atomic<std::uint64_t> crowded{0};         // of them: hung up on for want of a place or a thread
  std::atomic<std::uint64_t> unproved{0};        // of them: ended before their peer had proved itself
  std::atomic<std::uint64_t> broken{0};          // of them: ended by what their peer said later
  std::atomic<std::uint64_t> memory_bytes{0};    // of blocks that were leased as memory
  std::atomic<std::uint64_t> rdma_bytes{0};      // … for READs over RDMA
  std::atomic<std::uint64_t> nixl_bytes{0};      // … for reads by NIXL
  std::atomic<std::uint64_t> unix_bytes{0};      // … that were sent to processes of this machine
  std::atomic<std::uint64_t> tcp_bytes{0};       // … to others
  std::atomic<std::uint64_t> expired{0};         // leases that time has ended
  std::atomic<std::uint64_t> unopened{0};        // OPENs of what is not lent, or without the proof of its root
  std::atomic<std::uint64_t> busy{0};            // questions that were answered so
  std::atomic<std::uint64_t> corrupt_blocks{0};  // found here
  std::array<std::atomic<std::uint64_t>, kPeerGoneReasons> gone{};  // questions that were answered so, by the reason
};

struct PeerOwner {
  PeerOwner(LendingOptions given, Ledger& ledger, LedgerLock& lock, LentHost host_memory, BlockIo* nvme_io)
      : options(std::move(given)),
        host(host_memory),
        nvme(nvme_io),
        lender(ledger, lock, options.most_blocks),
        lanes(std::max(options.lane_bytes, host_memory.block_bytes), options.lanes) {}

  const LendingOptions options;          // as given
  const LentHost host;                   // HOST's memory
  BlockIo* const nvme;                   // what reads NVME; nullptr: it is not lent
  Lender lender;                         // takes pins
  AdmittedNamespaces namespaces;         // that may be opened
  CorruptBlocks corrupt;                 // found by readers or here
  StagingLanes lanes;                    // for NVME
  JoinRequests rdma{kRdmaHello};         // of readers, for who makes queue pairs
  JoinRequests nixl{kNixlHello};         // of readers, for who tells how NIXL reaches HOST
  LendingCounts counts;                  // what was counted
  OwnedFd arena;                         // HOST's memory, to be read only; -1: it is not lent as memory
  std::atomic<std::uint32_t> leases{0};  // number of the next
  std::atomic<bool> is_closing{false};   // nothing is granted any more
  std::atomic<bool> is_fenced{false};    // nothing is granted while it is
};

}  // namespace kvbm
