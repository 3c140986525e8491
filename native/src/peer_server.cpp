#include "kvbm/peer_server.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <system_error>

#include "kvbm/error.hpp"
#include "kvbm/peer_connection.hpp"
#include "kvbm/peer_signals.hpp"
#include "kvbm/tcp_options.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

constexpr auto kLeastIdle = std::chrono::milliseconds(100);    // of a connection that gives its place to another
constexpr auto kMostLeaving = std::chrono::milliseconds(100);  // that is waited for that place
constexpr auto kMostCrowded = std::chrono::milliseconds(500);  // that who is new waits for others to prove themselves
constexpr int kLookMs = 2;                                     // between two looks whether they have
constexpr int kPauseMs = 100;  // after an accept that fails, for want of descriptors say

void check_options(const LendingOptions& options, const LentHost& host) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorCode::kLayout, why); };
  if (options.unix_path.empty() && options.tcp_host.empty()) {
    refuse("lending: neither a unix socket nor a tcp address to listen at");
  }
  const bool needs_key = options.tls == nullptr || !options.key.empty();
  if (!options.tcp_host.empty() && needs_key && options.key.size() < kLeastKeyBytes) {
    refuse(words("lending over tcp: a key of ", options.key.size(), " bytes; it takes at least ", kLeastKeyBytes));
  }
  if (options.most_connections == 0 || options.most_blocks == 0 || options.handshake_ms == 0 ||
      options.most_lease_ms == 0 || options.most_send_ms == 0) {
    refuse("lending: most_connections, most_blocks, handshake_ms, most_lease_ms and most_send_ms are at least 1");
  }
  if (options.instance.size() > kMostPeerNameBytes) {
    refuse(
        words("lending: an instance id of ", options.instance.size(), " bytes; it has at most ", kMostPeerNameBytes));
  }
  if (host.rows == nullptr || host.slots == 0 || host.block_bytes == 0 || host.block_bytes > 0xFFFFFFFF) {
    refuse("lending: there is no HOST memory to lend from");
  }
}

bool is_own_user(int fd) noexcept {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

// To who is not served; it may be lost.
void say_bye(int fd, std::string_view why) noexcept {
  try {
    std::vector<std::uint8_t> bye;
    encode_peer_message(PeerBye{why}, bye);
    [[maybe_unused]] const ssize_t sent = send(fd, bye.data(), bye.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } catch (const std::exception&) {  // no memory for a word
  }
}

// What tools show for a thread.
void name_thread() noexcept { pthread_setname_np(pthread_self(), "kvbm-lend"); }

// The same memory through a descriptor that cannot write it.
OwnedFd read_only(int fd) {
  if (fd < 0) {
    return OwnedFd();
  }
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return OwnedFd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

}  // namespace

// What its threads use; the last of them lets go of it.
struct LendingServer::Shared {
  // One connection's place. The accepting thread fills and clears it; `fd` is closed only when the thread has left.
  struct Place {
    std::atomic<int> fd{-1};            // connected; -1: the place is free
    std::thread thread;                 // that serves it
    std::atomic<bool> has_left{false};  // the thread is about to end
    bool is_tcp = false;                // the accepting thread's
    PeerPresence presence;              // what the thread tells of its peer
  };

  Shared(LendingOptions options, Ledger& ledger, LedgerLock& lock, const LentHost& host, BlockIo* nvme)
      : owner(std::move(options), ledger, lock, host, nvme), places(owner.options.most_connections) {}

  void accept_all() noexcept;
  void accept_one(int listener, bool is_unix) noexcept;
  // A place for one more, which the one that has been idle for longest gives up where there is none; nullptr: there is
  // none.
  Place* free_place() noexcept;
  bool has_room_for_strangers() const noexcept;
  void clear_left() noexcept;
  void end_connections(int how, bool of_nixl_alone = false) noexcept;
  bool wait_left(SteadyTime deadline) {
    std::unique_lock held(mutex);
    return left.wait_until(held, deadline, [this] { return running == 0; });
  }
  void poke() const noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake.get(), &one, sizeof one);
  }

  PeerOwner owner;               // what connections share
  OwnedFd unix_listener;         // -1: none
  OwnedFd tcp_listener;          // -1: none
  OwnedFd wake;                  // an eventfd: a connection has ended, or all is to end
  std::vector<Place> places;     // as many as there may be connections
  std::thread acceptor;          // the accepting thread
  std::mutex mutex;              // guards what follows
  std::condition_variable left;  // a thread has left
  std::uint32_t running = 0;     // threads that have not left
};

LendingServer::LendingServer(LendingOptions options, Ledger& ledger, LedgerLock& lock, const LentHost& host,
                             BlockIo* nvme) {
  check_options(options, host);
  shared_ = std::make_shared<Shared>(std::move(options), ledger, lock, host, nvme);
  const LendingOptions& given = shared_->owner.options;
  shared_->wake = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (shared_->wake.get() < 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  shared_->owner.arena = given.unix_path.empty() ? OwnedFd() : read_only(host.fd);
  if (!given.tcp_host.empty()) {
    tcp_port_ = given.tcp_port;
    shared_->tcp_listener = listen_tcp(given.tcp_host, tcp_port_);
  }
  if (!given.unix_path.empty()) {
    shared_->unix_listener = listen_unix(given.unix_path);
    unix_path_ = given.unix_path;
  }
  shared_->running = 1;
  const AllSignalsMasked masked;  // also for the threads that it begins
  try {
    shared_->acceptor = std::thread([shared = shared_] {
      name_thread();
      shared->accept_all();
      const std::lock_guard held(shared->mutex);
      --shared->running;
      shared->left.notify_all();
    });
  } catch (...) {
    if (!unix_path_.empty()) {
      unlink(unix_path_.c_str());  // nobody will ever answer there
    }
    throw;
  }
}

LendingServer::~LendingServer() {
  if (process_ != getpid()) {
    new std::shared_ptr(std::move(shared_));  // after fork(): its threads are the parent's
    return;
  }
  if (!close(std::chrono::seconds(1))) {
    new std::shared_ptr(std::move(shared_));  // a device or a peer keeps a thread, and that what it uses
  }
}

PeerOwner& LendingServer::owner() const noexcept { return shared_->owner; }

// -- connections ------------------------------------------------------------------------------------------------------

void LendingServer::Shared::accept_all() noexcept {
  auto crowded_since = SteadyTime::max();
  while (!owner.is_closing) {
    // Many peers may come at once, and are let in one after the other; who keeps the others waiting for longer has them
    // refused.
    const SteadyTime now = std::chrono::steady_clock::now();
    crowded_since = has_room_for_strangers() ? SteadyTime::max() : std::min(crowded_since, now);
    const bool leaves_waiting = crowded_since != SteadyTime::max() && now - crowded_since < kMostCrowded;
    std::array<pollfd, 3> waited{{{.fd = wake.get(), .events = POLLIN, .revents = 0},
                                  {.fd = unix_listener.get(), .events = POLLIN, .revents = 0},
                                  {.fd = leaves_waiting ? -1 : tcp_listener.get(), .events = POLLIN, .revents = 0}}};
    if (poll(waited.data(), waited.size(), leaves_waiting ? kLookMs : -1) < 0) {
      continue;
    }
    std::uint64_t pokes = 0;
    [[maybe_unused]] const ssize_t taken = read(wake.get(), &pokes, sizeof pokes);
    clear_left();
    if (has_room_for_strangers()) {
      crowded_since = SteadyTime::max();  // what comes now may begin another crowd
    }
    for (std::size_t at = 1; at < waited.size() && !owner.is_closing; ++at) {
      if (waited[at].revents != 0) {
        accept_one(waited[at].fd, at == 1);
      }
    }
  }
}

void LendingServer::Shared::accept_one(int listener, bool is_unix) noexcept {
  OwnedFd peer(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (peer.get() < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      pollfd pause{.fd = wake.get(), .events = POLLIN, .revents = 0};
      poll(&pause, 1, kPauseMs);
    }
    return;
  }
  owner.counts.accepted.fetch_add(1, std::memory_order_relaxed);
  const bool is_stranger = is_unix && !is_own_user(peer.get());
  Place* const free = is_stranger || (!is_unix && !has_room_for_strangers()) ? nullptr : free_place();
  if (free == nullptr || is_stranger) {
    (is_stranger ? owner.counts.unproved : owner.counts.crowded).fetch_add(1, std::memory_order_relaxed);
    return say_bye(peer.get(), is_stranger ? "another user's process" : "as many connections as there may be");
  }
  if (!is_unix) {
    set_peer_tcp_options(peer.get());
  }
  const int fd = peer.get();
  {
    const std::lock_guard held(mutex);
    ++running;
  }
  free->has_left = false;
  free->is_tcp = !is_unix;
  free->presence.is_proved = false;
  free->presence.wants_nixl = false;
  free->presence.idle_since = 0;
  owner.counts.connections.fetch_add(1, std::memory_order_relaxed);
  free->fd = peer.release();
  if (owner.is_closing) {  // `end_connections` may have looked before
    shutdown(fd, SHUT_RD);
  }
  try {
    free->thread = std::thread([this, place = free, fd, is_unix] {
      name_thread();
      try {
        PeerConnection(owner, place->presence, fd, is_unix).run();
      } catch (const std::exception&) {  // there was not even memory to begin
      }
      shutdown(fd, SHUT_RDWR);
      owner.counts.connections.fetch_sub(1, std::memory_order_relaxed);
      place->has_left = true;
      poke();
      const std::lock_guard held(mutex);
      --running;
      left.notify_all();
    });
  } catch (const std::exception&) {  // no thread or no memory is to be had
    owner.counts.crowded.fetch_add(1, std::memory_order_relaxed);
    owner.counts.connections.fetch_sub(1, std::memory_order_relaxed);
    say_bye(fd, "no thread is to be had");
    const std::lock_guard held(mutex);
    --running;
    ::close(free->fd.exchange(-1));
  }
}

// Who has not proved anything may take half of the places, so that those who have are not kept out.
bool LendingServer::Shared::has_room_for_strangers() const noexcept {
  std::size_t strangers = 0;
  for (const Place& place : places) {
    strangers +=
        place.fd.load(std::memory_order_relaxed) >= 0 && place.is_tcp && !place.presence.is_proved && !place.has_left
            ? 1
            : 0;
  }
  return 2 * strangers < places.size();
}

LendingServer::Shared::Place* LendingServer::Shared::free_place() noexcept {
  const auto is_free = [](const Place& place) { return place.fd.load(std::memory_order_relaxed) < 0; };
  if (const auto found = std::ranges::find_if(places, is_free); found != places.end()) {
    return &*found;
  }
  Place* idlest = nullptr;
  auto since = (std::chrono::steady_clock::now() - kLeastIdle).time_since_epoch().count();
  for (Place& place : places) {
    const auto idle = place.presence.idle_since.load();
    if (place.presence.is_proved && idle != 0 && idle < since) {
      idlest = &place;
      since = idle;
    }
  }
  if (idlest == nullptr) {
    return nullptr;
  }
  shutdown(idlest->fd, SHUT_RDWR);  // its reader connects anew when it needs it
  {
    std::unique_lock held(mutex);
    left.wait_for(held, kMostLeaving, [&] { return idlest->has_left.load() || owner.is_closing; });
  }
  clear_left();
  return is_free(*idlest) ? idlest : nullptr;
}

void LendingServer::Shared::clear_left() noexcept {
  for (Place& place : places) {
    if (place.fd.load(std::memory_order_relaxed) >= 0 && place.has_left) {
      place.thread.join();
      const std::lock_guard held(mutex);  // `end_connections` may be looking at it
      ::close(place.fd.exchange(-1));
    }
  }
}

void LendingServer::Shared::end_connections(int how, bool of_nixl_alone) noexcept {
  const std::lock_guard held(mutex);
  for (const Place& place : places) {
    if (const int fd = place.fd; fd >= 0 && (!of_nixl_alone || place.presence.wants_nixl)) {
      shutdown(fd, how);
    }
  }
}

// -- the end ----------------------------------------------------------------------------------------------------------

bool LendingServer::close(std::chrono::milliseconds timeout) {
  if (process_ != getpid()) {
    return true;
  }
  const std::lock_guard alone(closing_);
  Shared& shared = *shared_;
  if (was_closed_) {
    return true;
  }
  const auto now = std::chrono::steady_clock::now();
  if (!shared.owner.is_closing.exchange(true) && !unix_path_.empty()) {
    unlink(unix_path_.c_str());
  }
  shared.owner.corrupt.close();
  shared.owner.rdma.close();
  shared.owner.nixl.close();
  shared.poke();
  shared.end_connections(SHUT_RD);  // who sends still has half of the time
  if (!shared.wait_left(now + timeout / 2)) {
    shared.end_connections(SHUT_RDWR);
    if (!shared.wait_left(now + timeout)) {
      return false;
    }
  }
  shared.acceptor.join();
  shared.clear_left();
  shared.unix_listener.reset();
  shared.tcp_listener.reset();
  shared.owner.arena.reset();
  was_closed_ = true;
  return true;
}

void LendingServer::hang_up_on_nixl() noexcept {
  if (process_ == getpid()) {
    shared_->end_connections(SHUT_RDWR, true);
  }
}

void LendingServer::disown() noexcept {
  if (process_ == getpid() || shared_ == nullptr) {
    return;
  }
  for (Shared::Place& place : shared_->places) {
    if (const int fd = place.fd.exchange(-1); fd >= 0) {
      ::close(fd);
    }
  }
  shared_->unix_listener.reset();
  shared_->tcp_listener.reset();
  shared_->wake.reset();
  shared_->owner.arena.reset();
}

}  // namespace kvbm
