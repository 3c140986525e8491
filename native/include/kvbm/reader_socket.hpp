// ReaderSocket: messages and bytes over a socket, each with a moment after which nobody waits any more.
//
// Life: made connected; moved, not copied; the destructor closes. Calls throw PeerTrouble when the other side is gone,
// refuses or is too late, and Error: kPeerWire, when it does not keep to the protocol; the socket is of no use
// afterwards. Threads: one at a time; shut() any thread, while the owner has not ended it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvbm/peer_tls.hpp"
#include "kvbm/peer_wire.hpp"

namespace kvbm {

// Why a connection is of no use any more.
class PeerTrouble : public std::exception {
 public:
  explicit PeerTrouble(std::string words) : words_(std::move(words)) {}
  const char* what() const noexcept override { return words_.c_str(); }

 private:
  std::string words_;  // for people
};

using PeerClock = std::chrono::steady_clock;
using PeerMoment = PeerClock::time_point;

// A descriptor of ours; -1: none.
class PeerDescriptor {
 public:
  explicit PeerDescriptor(int fd = -1) noexcept : fd_(fd) {}
  PeerDescriptor(PeerDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  PeerDescriptor& operator=(PeerDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~PeerDescriptor();

  int get() const noexcept { return fd_; }

 private:
  int fd_;  // closed with this
};

class ReaderSocket {
 public:
  // A connected stream socket.
  explicit ReaderSocket(PeerDescriptor fd, bool is_unix) noexcept : fd_(std::move(fd)), is_unix_(is_unix) {}

  static ReaderSocket to_unix(const std::string& path, PeerMoment deadline);
  // address: of IPv4 or IPv6, in digits.
  static ReaderSocket to_tcp(const std::string& address, std::uint16_t port, PeerMoment deadline);

  // Speaks TLS from now on. Throws PeerTrouble where the other side does not, refuses ours, or has no certificate that
  // counts.
  void secure(PeerTls& tls, PeerMoment deadline);

  bool is_unix() const noexcept { return is_unix_; }

  // All of it.
  void send(Bytes data, PeerMoment deadline);
  void send(const PeerMessage& message, PeerMoment deadline);
  // What can be sent at once, whatever becomes of it: a word before the end.
  void send_last(const PeerMessage& message) noexcept;

  // The next message, which points into this socket until the next call.
  PeerMessage receive(PeerMoment deadline);
  // Bytes behind a message: at least 1, at most so many.
  std::size_t receive_some(std::uint8_t* into, std::size_t most, PeerMoment deadline);
  // The descriptor that came with the last message, if one did. Others that came are closed.
  std::optional<PeerDescriptor> take_descriptor();

  // Whether nothing has come and the other side is still there.
  bool is_quiet() const noexcept;
  // The user at the other end of a unix socket.
  std::uint32_t peer_user() const;
  // Ends what is under way in both directions. Any thread.
  void shut() noexcept;

 private:
  void receive_all(std::uint8_t* into, std::size_t bytes, PeerMoment deadline);
  std::ptrdiff_t receive_with_descriptors(std::uint8_t* into, std::size_t most);
  void wait(short events, PeerMoment deadline) const;
  // Waits as a step says. Throws PeerTrouble where nothing comes of it.
  void wait_for(TlsStep step, PeerMoment deadline) const;
  // What has come is no TLS: throws PeerTrouble, with what it is.
  [[noreturn]] void refuse_plain(PeerMoment deadline);

  PeerDescriptor fd_;                 // the socket
  bool is_unix_;                      // descriptors may come with messages
  std::vector<std::uint8_t> body_;    // of the last message
  std::vector<std::uint8_t> out_;     // of the message that is sent
  std::vector<PeerDescriptor> came_;  // with the last message
  std::unique_ptr<TlsSession> tls_;   // nullptr: bytes go as they are
};

}  // namespace kvbm
