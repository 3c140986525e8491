// PeerConnection: what an owner says to one reader, from HELLO to BYE. See kvbm/transport/wire.py for the messages.
//
// Life: made over a connected socket, run once in a thread of its own; when `run` returns nothing of it is lent any
// more. Its thread only. It waits for the peer without using the CPU, and for everything else within a time. What a
// peer says wrongly ends the connection.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvbm/lease_table.hpp"
#include "kvbm/peer_owner.hpp"
#include "kvbm/peer_socket.hpp"
#include "kvbm/peer_wire.hpp"

namespace kvbm {

// What a connection's thread tells the one that accepts. Any thread.
struct PeerPresence {
  std::atomic<bool> is_proved{false};                    // the peer has proved itself
  std::atomic<bool> wants_nixl{false};                   // it has said NIXL_HELLO
  std::atomic<SteadyTime::duration::rep> idle_since{0};  // its time; 0: it is served or has a lease
};

class PeerConnection {
 public:
  // fd: connected, not owned. is_unix: of a process on this machine, whose user was looked at. presence: outlives this.
  PeerConnection(PeerOwner& owner, PeerPresence& presence, int fd, bool is_unix);

  void run() noexcept;

 private:
  // What a reader that reads HOST by itself was told.
  struct Joined {
    std::uint64_t number = 0;  // of its HELLO, which was answered; 0: none was
    bool may_read = false;     // that answer was READY: leases of slots are of use to it
  };
  struct Opened {
    NamespaceId namespace_id;     // what is open
    std::uint64_t admission = 0;  // as it was admitted
  };
  // Blocks of a run that are to be sent as bytes.
  struct Outgoing {
    Loan loan;                               // pinned
    std::optional<StagingLanes::Lane> lane;  // those of NVME, in their order
    std::vector<std::uint32_t> checksums;    // of each block
  };

  SteadyTime in_ms(std::uint32_t ms) const noexcept { return PeerSocket::Clock::now() + std::chrono::milliseconds(ms); }
  bool asks_key() const noexcept { return !is_unix_ && !owner_.options.key.empty(); }
  bool lends_memory() const noexcept { return is_unix_ && owner_.arena.get() >= 0; }
  // Bytes over RDMA and NIXL are not encrypted, so not where connections are.
  bool lends(const JoinRequests& joins) const noexcept {
    return !is_unix_ && owner_.options.tls == nullptr && joins.is_open();
  }

  // The next message; valid until the one after it. first_by: when it must have begun, if ever.
  PeerMessage receive(std::optional<SteadyTime> begun_by);
  void send(const PeerMessage& message, int passed = -1);
  void say_bye(std::string_view why) noexcept;

  // TLS comes first, where the owner has it and the socket is no unix socket.
  bool speaks_tls() const noexcept { return !is_unix_ && owner_.options.tls != nullptr; }
  void shake_hands(SteadyTime deadline);
  bool answer(const PeerMessage& message);  // false: it was the last
  void open(const PeerOpen& open);
  void ask(const PeerAsk& ask);
  void end(const PeerEnd& end);
  // How the reader wants to read HOST by itself, where the next message says that; nullptr: it is another.
  JoinRequests* wanted_join() noexcept;
  // That message is handed to who answers it.
  void greet(JoinRequests& joins, SteadyTime deadline);

  Joined& joined(const JoinRequests& joins) noexcept { return &joins == &owner_.nixl ? over_nixl_ : over_rdma_; }
  void say_busy(std::uint32_t request);
  void say_gone(std::uint32_t request, PeerGoneReason reason);
  // A lease of slots. Whether it was answered; false: nothing of it is in HOST.
  bool grant_slots(const PeerAsk& ask, const NamespaceId& namespace_id);
  void grant_bytes(const PeerAsk& ask, const NamespaceId& namespace_id);
  // What of a run comes from NVME is read; the run ends where that fails, or no lane has room.
  void stage(Outgoing& run, const NamespaceId& namespace_id, Bytes hashes, SteadyTime deadline);
  void send_rows(const PeerGrant& grant, const Outgoing& run, SteadyTime deadline);
  void check_own(const NamespaceId& namespace_id, Bytes hash, SteadyTime deadline);
  // A lane, waited for while leases run out as they should. nullopt: none in time, or the instance closes.
  std::optional<StagingLanes::Lane> take_lane(SteadyTime deadline);
  void expire_leases() noexcept;
  void report(const NamespaceId& namespace_id, Tier tier, const std::uint8_t* hash);

  PeerOwner& owner_;                                            // what it shares
  PeerPresence& presence_;                                      // see above
  const bool is_unix_;                                          // see above
  bool is_awaiting_ = false;                                    // no message has begun
  LeaseTable leases_;                                           // that the reader has
  PeerSocket socket_;                                           // what it is said over
  PeerNonce nonce_{};                                           // of this owner
  PeerNonce reader_{};                                          // of the reader
  bool has_shaken_ = false;                                     // the reader has proved itself
  bool has_arena_ = false;                                      // the reader has the descriptor
  Joined over_rdma_;                                            // see above
  Joined over_nixl_;                                            // see above
  std::array<std::optional<Opened>, kMostPeerHandles> opened_;  // by handle
  std::size_t checkable_ = 0;                                   // blocks of the last bytes sent, whose END has not come
  std::vector<std::uint8_t> in_;                                // bytes received
  std::size_t in_begin_ = 0;                                    // of them, where the next message begins
  std::size_t in_end_ = 0;                                      // of them, how many there are
  std::size_t in_used_ = 0;                                     // bytes of the message that was handed out
  std::vector<std::uint8_t> out_;                               // a message to send
};

}  // namespace kvbm
