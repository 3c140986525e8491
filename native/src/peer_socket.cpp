#include "kvbm/peer_socket.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include "kvbm/error.hpp"

namespace kvbm {
namespace {

constexpr int kBacklog = 64;
constexpr std::size_t kMostPieces = 1024;      // the kernel's IOV_MAX
constexpr std::size_t kMostDrained = 1 << 20;  // bytes of a peer that is hung up on

[[noreturn]] void fail(const char* what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

bool has_listener(const sockaddr_un& address) {
  const OwnedFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (probe.get() < 0) {
    fail("socket");
  }
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 || errno == EAGAIN;
}

// Of a TCP connection; false where it is this side that reads no more, and of a unix socket, whose end nobody has to
// look for.
bool has_peer_closed(int fd) noexcept {
  tcp_info about{};
  socklen_t size = sizeof about;
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &about, &size) == 0 && about.tcpi_state == TCP_CLOSE_WAIT;
}

}  // namespace

void OwnedFd::reset() noexcept {
  if (fd_ >= 0) {
    close(std::exchange(fd_, -1));
  }
}

OwnedFd listen_unix(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path || path.find('\0') != std::string::npos) {
    fail("the path of a unix socket has 1 to 107 bytes", ENAMETOOLONG);
  }
  std::ranges::copy(path, address.sun_path);
  OwnedFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listener.get() < 0) {
    fail("socket");
  }
  fchmod(listener.get(), 0600);  // what the file is made with, so that it is never open to others
  const auto bound = [&] {
    return bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  };
  if (!bound()) {
    const int error = errno;
    struct stat there{};
    if (error != EADDRINUSE || lstat(path.c_str(), &there) != 0 || !S_ISSOCK(there.st_mode)) {
      fail("bind", error);
    }
    if (has_listener(address)) {
      fail("somebody listens there", EADDRINUSE);
    }
    unlink(path.c_str());
    if (!bound()) {
      fail("bind");
    }
  }
  if (chmod(path.c_str(), 0600) != 0 || listen(listener.get(), kBacklog) != 0) {
    fail("listen");
  }
  return listener;
}

OwnedFd listen_tcp(const std::string& host, std::uint16_t& port) {
  addrinfo wanted{};
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* listed = nullptr;
  if (const int error =
          getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &wanted, &listed);
      error != 0) {
    fail(gai_strerror(error), error == EAI_SYSTEM ? errno : EADDRNOTAVAIL);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> found(listed, freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    OwnedFd listener(socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    if (listener.get() < 0) {
      error = errno;
      continue;
    }
    setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener.get(), one->ai_addr, one->ai_addrlen) != 0 || listen(listener.get(), kBacklog) != 0) {
      error = errno;
      continue;
    }
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &size);
    port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(bound).sin_port);
    return listener;
  }
  fail("bind", error);
}

void PeerSocket::wait(short events, std::optional<SteadyTime> deadline) {
  while (true) {
    const std::optional<SteadyTime> again = idle_();
    const SteadyTime now = Clock::now();
    if (deadline && *deadline <= now) {
      throw PeerGoneError("it took too long", true);
    }
    std::optional<SteadyTime> until = deadline;
    if (again && (!until || *again < *until)) {
      until = again;
    }
    timespec left{};
    if (until) {
      const auto ns =
          std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(*until - now).count());
      left = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    }
    // A reader that has hung up with its window shut acknowledges whatever the system tries, until that gives up: no
    // room would come.
    const bool looks_for_end = events == POLLOUT && !has_shut_;
    pollfd waited{.fd = fd_, .events = static_cast<short>(looks_for_end ? events | POLLRDHUP : events), .revents = 0};
    const int ready = ppoll(&waited, 1, until ? &left : nullptr, nullptr);
    if (ready > 0 && (waited.revents & (POLLRDHUP | POLLOUT)) == POLLRDHUP) {
      if (has_peer_closed(fd_)) {
        throw PeerGoneError("the peer has closed");
      }
      has_shut_ = true;
      continue;
    }
    if (ready > 0) {
      return;
    }
    if (ready < 0 && errno != EINTR) {
      throw PeerGoneError("the system does not wait for it");
    }
  }
}

std::size_t PeerSocket::receive(std::span<std::uint8_t> out, std::size_t least, std::optional<SteadyTime> deadline) {
  if (tls_) {
    return receive_tls(out, least, deadline);
  }
  std::size_t taken = 0;
  while (taken < least) {
    const ssize_t got = recv(fd_, out.data() + taken, out.size() - taken, MSG_DONTWAIT);
    if (got > 0) {
      taken += static_cast<std::size_t>(got);
    } else if (got == 0) {
      throw PeerGoneError("the peer has closed");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait(POLLIN, deadline);
    } else if (errno != EINTR) {
      throw PeerGoneError("the connection has broken");
    }
  }
  return taken;
}

void PeerSocket::send(std::span<iovec> pieces, SteadyTime deadline, int passed) {
  if (tls_) {
    return send_tls(pieces, deadline);
  }
  std::size_t left = 0;
  for (const iovec& piece : pieces) {
    left += piece.iov_len;
  }
  while (left > 0) {
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = std::min(pieces.size(), kMostPieces);
    if (passed >= 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* const head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(head), &passed, sizeof passed);
    }
    // It never waits in the call: over a unix socket the time of SO_SNDTIMEO begins anew with each piece that the
    // kernel takes.
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        wait(POLLOUT, deadline);
      } else if (errno != EINTR) {
        throw PeerGoneError("the connection has broken");
      }
      continue;
    }
    passed = -1;
    left -= static_cast<std::size_t>(sent);
    for (auto gone = static_cast<std::size_t>(sent); gone > 0;) {
      iovec& first = pieces.front();
      const std::size_t step = std::min(gone, first.iov_len);
      first.iov_base = static_cast<char*>(first.iov_base) + step;
      first.iov_len -= step;
      gone -= step;
      if (first.iov_len == 0) {
        pieces = pieces.subspan(1);
      }
    }
    if (left > 0 && deadline <= Clock::now()) {
      throw PeerGoneError("it took too long", true);
    }
  }
}

// -- TLS --------------------------------------------------------------------------------------------------------------

void PeerSocket::secure(PeerTls& tls, SteadyTime deadline) {
  tls_ = tls.session(PeerRole::kOwner, fd_);
  while (true) {
    const TlsStep step = tls_->shake();
    if (step == TlsStep::kDone) {
      return;
    }
    if (step == TlsStep::kPlain) {
      tls_.reset();  // who speaks plainly understands a plain answer alone
      throw Error(ErrorCode::kPeerWire, "it speaks TLS here; set transport.tls_cert, tls_key and tls_ca");
    }
    if (step == TlsStep::kFailed) {
      throw Error(ErrorCode::kPeerWire, tls_->why());
    }
    wait_for(step, deadline);
  }
}

void PeerSocket::drain(SteadyTime deadline) noexcept {
  shutdown(fd_, SHUT_WR);
  std::array<std::uint8_t, 4096> rest;
  for (std::size_t taken = 0; taken < kMostDrained;) {
    const ssize_t got = recv(fd_, rest.data(), rest.size(), MSG_DONTWAIT);
    if (got > 0) {
      taken += static_cast<std::size_t>(got);
      continue;
    }
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      return;
    }
    try {
      wait(POLLIN, deadline);
    } catch (const std::exception&) {  // it does not hang up in time
      return;
    }
  }
}

void PeerSocket::wait_for(TlsStep step, std::optional<SteadyTime> deadline) {
  switch (step) {
    case TlsStep::kDone:
      return;
    case TlsStep::kWantsInput:
      return wait(POLLIN, deadline);
    case TlsStep::kWantsRoom:
      return wait(POLLOUT, deadline);
    case TlsStep::kEnded:
      throw PeerGoneError("the peer has closed");
    case TlsStep::kPlain:
    case TlsStep::kFailed:
      throw PeerGoneError("the connection has broken");
  }
}

std::size_t PeerSocket::receive_tls(std::span<std::uint8_t> out, std::size_t least,
                                    std::optional<SteadyTime> deadline) {
  std::size_t taken = 0;
  while (taken < least) {
    const TlsMoved got = tls_->read(out.subspan(taken));
    taken += got.bytes;
    wait_for(got.step, deadline);
  }
  return taken;
}

void PeerSocket::send_tls(std::span<iovec> pieces, SteadyTime deadline) {
  for (const iovec& piece : pieces) {
    Bytes left(static_cast<const std::uint8_t*>(piece.iov_base), piece.iov_len);
    while (!left.empty()) {
      const TlsMoved sent = tls_->write(left);
      left = left.subspan(sent.bytes);
      wait_for(sent.step, deadline);
      if (!left.empty() && deadline <= Clock::now()) {
        throw PeerGoneError("it took too long", true);
      }
    }
  }
}

}  // namespace kvbm
