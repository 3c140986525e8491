// ReaderConnection: one connection of a reader to an instance that lends blocks: who is there, what is open, one
// question at a time.
//
// Life: the constructor connects, proves and hears; the destructor hangs up, also where a forked child still has the
// descriptor. Calls throw PeerTrouble and Error (kPeerWire); the connection is of no use afterwards. Threads: one at a
// time; shut() any thread.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvbm/peer_mapping.hpp"
#include "kvbm/reader_socket.hpp"
#include "kvbm/peer_wire.hpp"

namespace kvbm {

// Whom a reader reads from, and as whom. Immutable.
struct PeerTarget {
  PeerTransport transport = PeerTransport::kTcp;  // how bytes come
  std::string address;            // path of a unix socket where bytes come by memory; else an IP address in digits
  std::uint16_t port = 0;         // with an IP address
  std::string reader;             // our instance id
  std::string owner;              // whoever else answers is refused; empty: anyone may
  std::vector<std::uint8_t> key;  // shared with the owner; needed over tcp without tls
  std::shared_ptr<PeerTls> tls = nullptr;  // what tcp connections are secured with; nullptr: bytes come as they are
  // Until it is connected, and again until each is known, whatever a read's deadline
  std::uint32_t handshake_ms = 2'000;
};

// A namespace as it is open on a connection.
struct PeerOpening {
  std::uint32_t handle = 0;       // its number there
  std::uint32_t block_bytes = 0;  // of its blocks; 0: the owner does not open it
};

class ReaderConnection {
 public:
  ReaderConnection(const PeerTarget& target, SharedMapping& mapping, PeerMoment deadline);
  ~ReaderConnection() { socket_.shut(); }
  ReaderConnection(const ReaderConnection&) = delete;
  ReaderConnection& operator=(const ReaderConnection&) = delete;

  // Opens a namespace, or says that it is open.
  PeerOpening open(const NamespaceId& namespace_id, const SequenceHash& root, PeerMoment deadline);
  // What the owner has said that it does not serve any more.
  void forget(const NamespaceId& namespace_id) noexcept { open_.erase(namespace_id); }
  // Whether one more namespace can be opened, or this one is.
  bool has_room_for(const NamespaceId& namespace_id) const noexcept;

  // A PeerGrant, PeerBusy or PeerGone to this question; it points into the socket until its next message.
  PeerMessage ask(std::uint32_t handle, Bytes hashes, PeerMoment deadline);
  void end(std::uint64_t lease, std::uint32_t handle, Bytes failed, PeerMoment deadline);

  // The owner's memory. Throws Error when it has sent none.
  const PeerMapping& mapping() const;
  ReaderSocket& socket() noexcept { return socket_; }

  // Whether it was used before, and this time has not been answered yet: its end may then be an old one.
  bool may_be_stale = false;

 private:
  void shake_hands(const PeerTarget& target, PeerMoment deadline);
  void prove(const PeerTarget& target, PeerMoment deadline);
  PeerMessage answer(PeerMoment deadline);

  ReaderSocket socket_;                         // the connection
  PeerTransport transport_;                     // how bytes come
  SharedMapping& shared_;                       // where mappings are kept
  std::shared_ptr<const PeerMapping> mapping_;  // the owner's memory, once it has come
  PeerNonce ours_;                              // of our HELLO
  PeerNonce theirs_{};                          // of the owner's
  std::string owner_;                           // its instance id, as it says
  std::map<NamespaceId, PeerOpening> open_;     // what is open
  std::uint32_t next_handle_ = 0;               // the first that was not used
  std::uint32_t next_request_ = 1;              // of the next question
};

}  // namespace kvbm
