#include "kvbm/reader_socket.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "kvbm/error.hpp"
#include "kvbm/tcp_options.hpp"

namespace kvbm {
namespace {

constexpr const char* kTooLate = "it does not answer in time";
constexpr int kMostDescriptors = 4;                    // of one message, that are taken to be closed
constexpr auto kPause = std::chrono::milliseconds(1);  // before a full listener is asked again

[[noreturn]] void throw_errno(const char* what, int error) {
  throw PeerTrouble(std::string(what) + ": " + std::generic_category().message(error));
}

bool is_for_now(int error) noexcept { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Milliseconds until then, rounded up, for poll().
int ms_until(PeerMoment deadline) noexcept {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - PeerClock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
}

// False: the moment has passed.
bool is_ready(int fd, short events, PeerMoment deadline) {
  while (true) {
    const int left = ms_until(deadline);
    pollfd asked{fd, events, 0};
    const int found = poll(&asked, 1, left);
    if (found > 0) {
      return true;
    }
    if (found < 0 && errno != EINTR) {
      throw_errno("poll", errno);
    }
    if (PeerClock::now() >= deadline) {
      return false;
    }
  }
}

PeerDescriptor new_socket(int family) {
  PeerDescriptor fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) {
    throw_errno("socket", errno);
  }
  return fd;
}

void connect_to(int fd, const void* address, std::size_t size, PeerMoment deadline) {
  while (connect(fd, static_cast<const sockaddr*>(address), static_cast<socklen_t>(size)) != 0) {
    if (errno == EAGAIN) {  // a unix listener whose queue is full
      if (PeerClock::now() + kPause >= deadline) {
        throw PeerTrouble("it takes no connection in time");
      }
      poll(nullptr, 0, static_cast<int>(kPause.count()));
      continue;
    }
    if (errno == EINTR) {
      continue;
    }
    if (errno != EINPROGRESS && errno != EALREADY) {
      throw_errno("it takes no connection", errno);
    }
    if (!is_ready(fd, POLLOUT, deadline)) {
      throw PeerTrouble("it takes no connection in time");
    }
    int error = 0;
    socklen_t error_size = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_size) != 0 || error != 0) {
      throw_errno("it takes no connection", error);
    }
    return;
  }
}

}  // namespace

PeerDescriptor::~PeerDescriptor() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

ReaderSocket ReaderSocket::to_unix(const std::string& path, PeerMoment deadline) {
  sockaddr_un address{};
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    throw PeerTrouble("its socket's path has " + std::to_string(path.size()) + " bytes, above what the system takes");
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  PeerDescriptor fd = new_socket(AF_UNIX);
  connect_to(fd.get(), &address, sizeof address, deadline);
  return ReaderSocket(std::move(fd), true);
}

ReaderSocket ReaderSocket::to_tcp(const std::string& address, std::uint16_t port, PeerMoment deadline) {
  sockaddr_in four{};
  sockaddr_in6 six{};
  const bool is_four = inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1;
  if (!is_four && inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) != 1) {
    throw PeerTrouble("its address is none of IPv4 or IPv6");
  }
  PeerDescriptor fd = new_socket(is_four ? AF_INET : AF_INET6);
  set_peer_tcp_options(fd.get());
  if (is_four) {
    four.sin_family = AF_INET;
    four.sin_port = htons(port);
    connect_to(fd.get(), &four, sizeof four, deadline);
  } else {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(port);
    connect_to(fd.get(), &six, sizeof six, deadline);
  }
  return ReaderSocket(std::move(fd), false);
}

void ReaderSocket::wait(short events, PeerMoment deadline) const {
  if (!is_ready(fd_.get(), events, deadline)) {
    throw PeerTrouble(kTooLate);
  }
}

void ReaderSocket::wait_for(TlsStep step, PeerMoment deadline) const {
  switch (step) {
    case TlsStep::kDone:
      return;
    case TlsStep::kWantsInput:
      return wait(POLLIN, deadline);
    case TlsStep::kWantsRoom:
      return wait(POLLOUT, deadline);
    case TlsStep::kEnded:
      throw PeerTrouble("it has hung up");
    case TlsStep::kPlain:
    case TlsStep::kFailed:
      throw PeerTrouble(tls_ ? tls_->why() : "TLS has failed");
  }
}

void ReaderSocket::refuse_plain(PeerMoment deadline) {
  std::string words =
      "it does not speak TLS, and this instance does; give both transport.tls_cert, tls_key and tls_ca, or neither";
  try {
    const PeerMessage message = receive(deadline);
    if (const auto* const bye = std::get_if<PeerBye>(&message)) {
      words = "it hangs up: " + std::string(bye->words);
    }
  } catch (const Error&) {  // some other program's
  }
  throw PeerTrouble(words);
}

void ReaderSocket::secure(PeerTls& tls, PeerMoment deadline) {
  auto session = tls.session(PeerRole::kReader, fd_.get());
  while (true) {
    const TlsStep step = session->shake();
    if (step == TlsStep::kDone) {
      break;
    }
    if (step == TlsStep::kPlain) {
      refuse_plain(deadline);
    }
    if (step == TlsStep::kFailed) {
      throw PeerTrouble(session->why());
    }
    if (step == TlsStep::kEnded) {
      throw PeerTrouble("it hangs up before TLS has begun");
    }
    wait_for(step, deadline);
  }
  tls_ = std::move(session);
}

void ReaderSocket::send(Bytes data, PeerMoment deadline) {
  while (tls_ && !data.empty()) {
    const TlsMoved sent = tls_->write(data);
    data = data.subspan(sent.bytes);
    wait_for(sent.step, deadline);
  }
  while (!data.empty()) {
    const std::ptrdiff_t sent = ::send(fd_.get(), data.data(), data.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      data = data.subspan(static_cast<std::size_t>(sent));
    } else if (!is_for_now(errno)) {
      throw_errno("sending", errno);
    } else {
      wait(POLLOUT, deadline);
    }
  }
}

void ReaderSocket::send(const PeerMessage& message, PeerMoment deadline) {
  out_.clear();
  encode_peer_message(message, out_);
  send(Bytes(out_), deadline);
}

void ReaderSocket::send_last(const PeerMessage& message) noexcept {
  try {
    out_.clear();
    encode_peer_message(message, out_);
    if (tls_) {
      tls_->write(out_);
      return;
    }
    [[maybe_unused]] const auto sent = ::send(fd_.get(), out_.data(), out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } catch (const std::exception&) {  // it goes unsaid
  }
}

std::ptrdiff_t ReaderSocket::receive_with_descriptors(std::uint8_t* into, std::size_t most) {
  iovec place{into, most};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)];
  msghdr about{};
  about.msg_iov = &place;
  about.msg_iovlen = 1;
  about.msg_control = control;
  about.msg_controllen = sizeof control;
  const std::ptrdiff_t found = recvmsg(fd_.get(), &about, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (found < 0) {
    return found;
  }
  for (cmsghdr* part = CMSG_FIRSTHDR(&about); part != nullptr; part = CMSG_NXTHDR(&about, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    for (std::size_t at = 0; at + sizeof(int) <= part->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + at, sizeof fd);
      PeerDescriptor owned(fd);
      if (came_.size() < kMostDescriptors) {
        came_.push_back(std::move(owned));
      }
    }
  }
  return found;
}

std::size_t ReaderSocket::receive_some(std::uint8_t* into, std::size_t most, PeerMoment deadline) {
  while (true) {
    if (PeerClock::now() >= deadline) {  // also of one whose bytes never run dry
      throw PeerTrouble(kTooLate);
    }
    if (tls_) {
      const TlsMoved got = tls_->read({into, most});
      if (got.step == TlsStep::kDone && got.bytes > 0) {
        return got.bytes;
      }
      wait_for(got.step, deadline);
      continue;
    }
    const std::ptrdiff_t found =
        is_unix_ ? receive_with_descriptors(into, most) : recv(fd_.get(), into, most, MSG_DONTWAIT);
    if (found > 0) {
      return static_cast<std::size_t>(found);
    }
    if (found == 0) {
      throw PeerTrouble("it has hung up");
    }
    if (!is_for_now(errno)) {
      throw_errno("receiving", errno);
    }
    wait(POLLIN, deadline);
  }
}

void ReaderSocket::receive_all(std::uint8_t* into, std::size_t bytes, PeerMoment deadline) {
  for (std::size_t done = 0; done < bytes;) {
    done += receive_some(into + done, bytes - done, deadline);
  }
}

PeerMessage ReaderSocket::receive(PeerMoment deadline) {
  came_.clear();
  std::array<std::uint8_t, kPeerHeadBytes> head;
  receive_all(head.data(), head.size(), deadline);
  const PeerHead found = decode_peer_head(head);
  if (body_.size() < found.body_bytes) {
    body_.resize(found.body_bytes);
  }
  receive_all(body_.data(), found.body_bytes, deadline);
  return decode_peer_body(found.kind, Bytes(body_).first(found.body_bytes));
}

std::optional<PeerDescriptor> ReaderSocket::take_descriptor() {
  if (came_.empty()) {
    return std::nullopt;
  }
  std::optional<PeerDescriptor> taken(std::move(came_.front()));
  came_.clear();
  return taken;
}

bool ReaderSocket::is_quiet() const noexcept {
  std::uint8_t byte = 0;
  if (tls_ && tls_->has_unread()) {
    return false;
  }
  return recv(fd_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && is_for_now(errno);
}

std::uint32_t ReaderSocket::peer_user() const {
  ucred who{};
  socklen_t size = sizeof who;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) {
    throw_errno("SO_PEERCRED", errno);
  }
  return who.uid;
}

void ReaderSocket::shut() noexcept { shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace kvbm
