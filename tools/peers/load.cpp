// Asks an HTTP/1.1 service prepared questions on some connections for some time, each connection one question after the
// answer to the one before, and says in one line of JSON how many answers came and how long they took.
//
//   load ask PORT FILE CONNECTIONS SECONDS    FILE: questions as they go over the wire, each behind its length (u32)
//   load answer                               answers everything with 200 on a port of its own, which it prints: what
//                                             `ask` can ask at most
//
// One thread for each. A question is sent with one call, an answer is read until its content-length is there. An answer
// that is not 200 ends the program.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kWaitMs = 20'000;
constexpr std::size_t kRoom = 1 << 18;
constexpr std::string_view kHeadEnd = "\r\n\r\n";

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "Error: %s (%s)\n", what, std::strerror(errno));
  std::exit(1);
}

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

void without_delay(int socket) {
  const int yes = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

void send_all(int socket, std::string_view data) {
  while (!data.empty()) {
    const ssize_t sent = send(socket, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent <= 0) {
      fail("the other end does not take what is sent");
    }
    data.remove_prefix(static_cast<std::size_t>(sent));
  }
}

// Bytes of the whole message at the beginning of `data`, its head and what the content-length says; 0: not yet there.
std::size_t message_bytes(std::string_view data) {
  const std::size_t end = data.find(kHeadEnd);
  if (end == std::string_view::npos) {
    return 0;
  }
  for (const std::string_view name : {"content-length: ", "Content-Length: "}) {
    const std::size_t at = data.substr(0, end).find(name);
    if (at != std::string_view::npos) {
      const std::size_t whole = end + kHeadEnd.size() + std::strtoul(data.data() + at + name.size(), nullptr, 10);
      return data.size() >= whole ? whole : 0;
    }
  }
  std::fprintf(stderr, "Error: a message without content-length: %.200s\n", data.data());
  std::exit(1);
}

struct Connection {
  int socket = -1;
  std::string came;           // of the answer, so far
  Clock::time_point asked{};  // when its question was sent
};

std::vector<std::string> questions_of(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::string> found;
  for (std::size_t at = 0; at + sizeof(std::uint32_t) <= all.size();) {
    std::uint32_t size = 0;
    std::memcpy(&size, all.data() + at, sizeof size);
    found.push_back(all.substr(at + sizeof size, size));
    at += sizeof size + size;
  }
  if (found.empty()) {
    fail("there are no questions");
  }
  return found;
}

int ask(std::uint16_t port, const char* path, std::size_t count, double seconds) {
  const std::vector<std::string> questions = questions_of(path);
  std::vector<Connection> connections(count);
  const int poll = epoll_create1(EPOLL_CLOEXEC);
  for (std::size_t at = 0; at < count; ++at) {
    const int taken = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = loopback(port);
    if (connect(taken, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      fail("nobody takes connections there");
    }
    without_delay(taken);
    connections[at].socket = taken;
    epoll_event event{EPOLLIN, {.u64 = at}};
    epoll_ctl(poll, EPOLL_CTL_ADD, taken, &event);
  }
  std::size_t asked = 0;
  std::vector<double> times_us;
  times_us.reserve(1 << 20);
  std::vector<char> room(kRoom);
  const auto began = Clock::now();
  const auto end = began + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const auto put = [&](Connection& one, Clock::time_point now) {
    one.asked = now;
    send_all(one.socket, questions[asked++ % questions.size()]);
  };
  for (Connection& one : connections) {
    put(one, Clock::now());
  }
  auto last = began;
  for (std::size_t waiting = count; waiting > 0;) {
    std::array<epoll_event, 64> events;
    const int ready = epoll_wait(poll, events.data(), static_cast<int>(events.size()), kWaitMs);
    if (ready <= 0) {
      fail("no answer came in time");
    }
    for (int at = 0; at < ready; ++at) {
      Connection& one = connections[events[static_cast<std::size_t>(at)].data.u64];
      const ssize_t got = recv(one.socket, room.data(), room.size(), 0);
      if (got <= 0) {
        fail("the service has ended a connection");
      }
      one.came.append(room.data(), static_cast<std::size_t>(got));
      if (message_bytes(one.came) == 0) {
        continue;
      }
      if (one.came.compare(0, 12, "HTTP/1.1 200") != 0) {
        std::fprintf(stderr, "Error: %.300s\n", one.came.c_str());
        return 1;
      }
      one.came.clear();
      last = Clock::now();
      times_us.push_back(std::chrono::duration<double, std::micro>(last - one.asked).count());
      if (last < end) {
        put(one, last);
      } else {
        --waiting;
      }
    }
  }
  std::sort(times_us.begin(), times_us.end());
  const auto place = [&](double part) { return times_us[static_cast<std::size_t>(part * (times_us.size() - 1))]; };
  std::printf("{\"answers\": %zu, \"wall_s\": %.6f, \"p50_us\": %.2f, \"p99_us\": %.2f}\n", times_us.size(),
              std::chrono::duration<double>(last - began).count(), place(0.5), place(0.99));
  return 0;
}

int answer() {
  static constexpr std::string_view kAnswer =
      "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), size) != 0 || listen(listener, 128) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    fail("there is no port to listen on");
  }
  std::printf("%u\n", ntohs(address.sin_port));
  std::fflush(stdout);
  const int poll = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{EPOLLIN, {.fd = listener}};
  epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event);
  std::vector<std::string> came;
  std::vector<char> room(kRoom);
  while (true) {
    std::array<epoll_event, 64> events;
    const int ready = epoll_wait(poll, events.data(), static_cast<int>(events.size()), -1);
    for (int at = 0; at < ready; ++at) {
      const int one = events[static_cast<std::size_t>(at)].data.fd;
      if (one == listener) {
        event.data.fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        without_delay(event.data.fd);
        came.resize(std::max(came.size(), static_cast<std::size_t>(event.data.fd) + 1));
        epoll_ctl(poll, EPOLL_CTL_ADD, event.data.fd, &event);
        continue;
      }
      std::string& held = came[static_cast<std::size_t>(one)];
      const ssize_t got = recv(one, room.data(), room.size(), 0);
      if (got <= 0) {
        close(one);
        held.clear();
        continue;
      }
      held.append(room.data(), static_cast<std::size_t>(got));
      if (message_bytes(held) != 0) {
        held.clear();
        send_all(one, kAnswer);
      }
    }
  }
}

}  // namespace

int main(int count, char** words) {
  const std::string_view what = count > 1 ? words[1] : "";
  if (what == "answer") {
    return answer();
  }
  if (what != "ask" || count != 6) {
    std::fprintf(stderr, "usage: load answer | load ask PORT FILE CONNECTIONS SECONDS\n");
    return 2;
  }
  return ask(static_cast<std::uint16_t>(std::strtoul(words[2], nullptr, 10)), words[3],
             std::strtoul(words[4], nullptr, 10), std::strtod(words[5], nullptr));
}
