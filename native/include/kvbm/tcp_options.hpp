// set_peer_tcp_options: what both ends of a TCP connection between instances set. Small messages leave at once; and
// where the other side's machine has vanished the system ends the connection, also one that is idle. Any thread.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace kvbm {

inline void set_peer_tcp_options(int fd) noexcept {
  constexpr int on = 1;
  constexpr int unacked_ms = 20'000;  // what a peer that has vanished may leave unanswered
  constexpr int quiet_s = 30;         // of a connection, before it is asked whether its peer is still there
  constexpr int probe_s = 10;         // between such questions
  constexpr int probes = 3;           // of them that remain unanswered
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &quiet_s, sizeof quiet_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_s, sizeof probe_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacked_ms, sizeof unacked_ms);
}

}  // namespace kvbm
