// Sockets of the peer transport: listening ones, and one connection's with times for all it waits for.
// PeerSocket: owns no descriptor; its connection's thread only. Functions: any thread.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/lease_table.hpp"
#include "kvbm/peer_tls.hpp"

namespace kvbm {

// A descriptor that is closed with it.
class OwnedFd {
 public:
  explicit OwnedFd(int fd = -1) noexcept : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedFd() { reset(); }

  int get() const noexcept { return fd_; }
  void reset() noexcept;
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_;  // -1: none
};

// A unix socket at a path, for this user alone; what is left there by a process that is gone is replaced.
// Throws std::system_error: EADDRINUSE where somebody listens there or no socket lies there, ENAMETOOLONG above 107
// bytes, and what the system says of the folder.
OwnedFd listen_unix(const std::string& path);
// Throws std::system_error. `port` 0 takes a free one; it is set to the port taken.
OwnedFd listen_tcp(const std::string& host, std::uint16_t& port);

// Why a connection ends, where that is nobody's fault: the peer has gone, or was too slow.
class PeerGoneError : public std::exception {
 public:
  explicit PeerGoneError(const char* why, bool is_late = false) noexcept : why_(why), is_late_(is_late) {}
  const char* what() const noexcept override { return why_; }
  // Whether it is there, but was too slow.
  bool is_late() const noexcept { return is_late_; }

 private:
  const char* why_;  // a literal
  bool is_late_;     // see above
};

class PeerSocket {
 public:
  using Clock = std::chrono::steady_clock;

  // idle: called before each wait; says when the wait must be over so that it is called again.
  PeerSocket(int fd, std::function<std::optional<SteadyTime>()> idle) : fd_(fd), idle_(std::move(idle)) {}

  // Speaks TLS from now on. Throws PeerGoneError, and Error: kPeerWire, where the peer does not speak it, or has no
  // certificate that counts: nothing can be said any more then, but for what is said to who has said nothing of TLS.
  void secure(PeerTls& tls, SteadyTime deadline);
  // Sends no more, and throws away what still comes until the peer hangs up: else the system may throw away what was
  // said to it.
  void drain(SteadyTime deadline) noexcept;

  // Fills `out` with at least `least` of its bytes, at most all; returns how many. Throws PeerGoneError: the peer has
  // closed, or the time is over.
  std::size_t receive(std::span<std::uint8_t> out, std::size_t least, std::optional<SteadyTime> deadline);

  // Sends all pieces, which it changes; `passed` rides along with the first byte unless it is -1. Throws PeerGoneError.
  void send(std::span<iovec> pieces, SteadyTime deadline, int passed = -1);

 private:
  void wait(short events, std::optional<SteadyTime> deadline);
  // Waits as a step says. Throws PeerGoneError where nothing comes of it.
  void wait_for(TlsStep step, std::optional<SteadyTime> deadline);
  std::size_t receive_tls(std::span<std::uint8_t> out, std::size_t least, std::optional<SteadyTime> deadline);
  void send_tls(std::span<iovec> pieces, SteadyTime deadline);

  int fd_;                                           // not owned
  std::function<std::optional<SteadyTime>()> idle_;  // see above
  std::unique_ptr<TlsSession> tls_;                  // nullptr: bytes go as they are
  bool has_shut_ = false;                            // this side reads no more, which looks like the end of the other
};

}  // namespace kvbm
