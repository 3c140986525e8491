#include "kvbm/peer_client.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <variant>

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.hpp"
#include "kvbm/arena.hpp"
#include "kvbm/checksum.hpp"
#include "kvbm/hmac.hpp"

using namespace kvbm;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kBlock = 100'003;
constexpr std::size_t kBlocks = 40;
const std::vector<std::uint8_t> kKey(20, 7);
const SequenceHash kRoot{1, 2, 3};
const NamespaceId kNamespace{9, 9, 9};
const std::string kOwner = "owner";

SequenceHash hash_of(std::size_t block) {
  SequenceHash hash{};
  hash[0] = static_cast<std::uint8_t>(block + 1);
  return hash;
}

// An owner of kBlocks blocks, block i in slot i, as simple as can be: a thread for each connection, no pins.
class SmallOwner {
 public:
  explicit SmallOwner(bool is_unix) : is_unix_(is_unix), arena_({.name = "kvbm-test", .bytes = kBlock * kBlocks}) {
    tests::Random random(5);
    for (std::size_t at = 0; at < kBlock * kBlocks; ++at) {
      arena_.data()[at] = static_cast<std::uint8_t>(random.next());
    }
    for (std::size_t block = 0; block < kBlocks; ++block) {
      checksums_[block] = crc32c({slot(block), kBlock});
    }
    if (is_unix) {
      static std::atomic<int> number{0};
      path_ = "/tmp/kvbm-test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::memcpy(address.sun_path, path_.data(), path_.size());
      listener_ = socket(AF_UNIX, SOCK_STREAM, 0);
      CHECK(bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    } else {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      listener_ = socket(AF_INET, SOCK_STREAM, 0);
      CHECK(bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
      socklen_t size = sizeof address;
      CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
      port_ = ntohs(address.sin_port);
    }
    CHECK(listen(listener_, 16) == 0);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~SmallOwner() {
    shutdown(listener_, SHUT_RDWR);
    accepting_.join();
    hang_up();
    for (std::thread& thread : threads_) {
      thread.join();
    }
    close(listener_);
    if (is_unix_) {
      unlink(path_.c_str());
    }
  }

  PeerTarget target() const {
    return {is_unix_ ? PeerTransport::kMemory : PeerTransport::kTcp,
            is_unix_ ? path_ : "127.0.0.1",
            port_,
            "reader",
            kOwner,
            is_unix_ ? std::vector<std::uint8_t>{} : kKey,
            nullptr,
            60'000};
  }
  const std::uint8_t* slot(std::size_t block) const { return arena_.data() + kBlock * block; }
  std::uint8_t* slot(std::size_t block) { return arena_.data() + kBlock * block; }
  // Ends all connections that there are.
  void hang_up() {
    const std::lock_guard held(lock_);
    for (const auto& connection : connections_) {
      connection->shut();
    }
  }

  std::atomic<std::uint32_t> lease_ms{60'000};
  std::atomic<std::size_t> held{kBlocks};   // blocks that it has
  std::atomic<std::size_t> suspected{0};    // blocks that readers found wrong
  std::atomic<std::size_t> ended{0};        // leases
  std::atomic<std::size_t> accepted{0};     // connections
  std::atomic<std::size_t> cut_after{~0U};  // bytes of blocks it sends before it hangs up

 private:
  void accept_all() {
    while (true) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) {
        return;
      }
      ++accepted;
      const std::lock_guard held_lock(lock_);
      connections_.push_back(std::make_unique<ReaderSocket>(PeerDescriptor(fd), is_unix_));
      threads_.emplace_back([this, &socket = *connections_.back(), fd] { serve(socket, fd); });
    }
  }
  void serve(ReaderSocket& socket, int fd) {
    try {
      converse(socket, fd);
    } catch (const PeerTrouble&) {
      socket.shut();
    } catch (const Error&) {  // some other program's, at a port of this machine; were it ours, its read would fail
      socket.shut();
    }
  }
  void converse(ReaderSocket& socket, int fd) {
    const PeerMoment never = PeerClock::now() + 1h;
    PeerNonce ours{};
    ours[0] = 77;
    socket.send(
        PeerHello{ours, 1, kPeerMemory | kPeerTcp, static_cast<std::uint8_t>(is_unix_ ? 0 : kPeerKeyAsked), kOwner},
        never);
    const PeerNonce theirs = std::get<PeerHello>(socket.receive(never)).nonce;
    if (!is_unix_) {
      const auto prove = std::get<PeerProve>(socket.receive(never));
      CHECK(equal_in_constant_time(prove.proof, peer_key_proof(kKey, PeerRole::kReader, theirs, ours, kOwner)));
      socket.send(PeerProve{peer_key_proof(kKey, PeerRole::kOwner, theirs, ours, kOwner)}, never);
    }
    bool is_known = false;
    while (true) {
      const PeerMessage message = socket.receive(never);
      if (const auto* const open = std::get_if<PeerOpen>(&message)) {
        CHECK(open->proof == peer_open_proof(kRoot, theirs, ours, open->namespace_id, kOwner));
        socket.send(PeerOpened{open->handle, true, kBlock}, never);
      } else if (const auto* const end = std::get_if<PeerEnd>(&message)) {
        suspected += end->hashes.size() / kHashBytes;
        ended += end->lease != 0;
      } else {
        answer(socket, fd, std::get<PeerAsk>(message), is_known);
      }
    }
  }
  void answer(ReaderSocket& socket, int fd, const PeerAsk& ask, bool& is_known) {
    const PeerMoment never = PeerClock::now() + 1h;
    const std::size_t first = ask.hashes[0] - 1U;
    const std::size_t end = std::min<std::size_t>(held, first + ask.hashes.size() / kHashBytes);
    if (first >= end) {
      return socket.send(PeerGone{ask.request, PeerGoneReason::kNotHeld}, never);
    }
    std::vector<std::uint8_t> tiers(end - first, static_cast<std::uint8_t>(Tier::kHost)), slots, sums;
    for (std::size_t block = first; block < end; ++block) {
      const auto number = static_cast<std::uint32_t>(block);
      const auto append = [](std::vector<std::uint8_t>& column, std::uint32_t value) {
        const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&value);
        column.insert(column.end(), bytes, bytes + sizeof value);
      };
      append(slots, number);
      append(sums, checksums_[block]);
    }
    if (ask.transport == PeerTransport::kMemory && !is_known) {
      send_arena(fd);
      is_known = true;
    }
    const bool is_memory = ask.transport == PeerTransport::kMemory;
    socket.send(PeerGrant{ask.request, is_memory ? 5U : 0U, lease_ms, tiers, slots, sums}, never);
    std::size_t left = cut_after;
    for (std::size_t block = first; block < end && !is_memory; ++block) {
      const std::size_t bytes = std::min(left, kBlock);
      socket.send(Bytes(slot(block), bytes), never);
      left -= bytes;
      if (left == 0) {
        return socket.shut();
      }
    }
  }
  void send_arena(int fd) {
    std::vector<std::uint8_t> message;
    encode_peer_message(PeerArena{arena_.bytes(), kBlocks, kBlock}, message);
    const PeerDescriptor file(open(("/proc/self/fd/" + std::to_string(arena_.fd())).c_str(), O_RDONLY | O_CLOEXEC));
    iovec place{message.data(), message.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
    msghdr about{};
    about.msg_iov = &place;
    about.msg_iovlen = 1;
    about.msg_control = control;
    about.msg_controllen = sizeof control;
    cmsghdr* const part = CMSG_FIRSTHDR(&about);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    const int number = file.get();
    std::memcpy(CMSG_DATA(part), &number, sizeof number);
    if (sendmsg(fd, &about, MSG_NOSIGNAL) != static_cast<std::ptrdiff_t>(message.size())) {
      throw PeerTrouble("the reader has hung up");
    }
  }

  const bool is_unix_;                                      // else TCP
  Arena arena_;                                             // its blocks
  std::array<std::uint32_t, kBlocks> checksums_{};          // of them
  int listener_ = -1;                                       // where it listens
  std::string path_;                                        // of the unix socket
  std::uint16_t port_ = 0;                                  // of TCP
  std::mutex lock_;                                         // over what follows
  std::vector<std::unique_ptr<ReaderSocket>> connections_;  // all there were
  std::vector<std::thread> threads_;                        // that serve them
  std::thread accepting_;                                   // takes connections
};

struct Read {
  std::vector<std::uint8_t> rows = std::vector<std::uint8_t>(kBlock * kBlocks, 0xA5);
  std::vector<PeerOutcome> outcomes = std::vector<PeerOutcome>(kBlocks);
  std::vector<std::uint32_t> checksums = std::vector<std::uint32_t>(kBlocks);
  PeerAccount account;

  std::size_t count(PeerOutcome outcome) const {
    return static_cast<std::size_t>(std::count(outcomes.begin(), outcomes.end(), outcome));
  }
  bool is_right(const SmallOwner& owner) const {
    for (std::size_t block = 0; block < kBlocks; ++block) {
      if (outcomes[block] == PeerOutcome::kGood && std::memcmp(&rows[kBlock * block], owner.slot(block), kBlock) != 0) {
        return false;
      }
    }
    return true;
  }
};

Read read_all(PeerClient& client, std::chrono::milliseconds within = 60s) {
  Read read;
  std::vector<std::uint8_t> hashes;
  for (std::size_t block = 0; block < kBlocks; ++block) {
    const SequenceHash hash = hash_of(block);
    hashes.insert(hashes.end(), hash.begin(), hash.end());
  }
  const PeerWish wish{
      kNamespace, kRoot, hashes, {read.rows.data(), kBlock, nullptr}, kBlock, PeerClock::now() + within};
  read.account = client.read(wish, read.outcomes, read.checksums);
  return read;
}

void on_both(const std::function<void(SmallOwner&, PeerClient&)>& test) {
  RowCopier copier(2);
  for (const bool is_unix : {true, false}) {
    SmallOwner owner(is_unix);
    PeerClient client(owner.target(), 2, copier);
    test(owner, client);
  }
}

void reads_whole_runs() {
  on_both([](SmallOwner& owner, PeerClient& client) {
    for (int turn = 0; turn < 5; ++turn) {
      const Read read = read_all(client);
      CHECK(read.count(PeerOutcome::kGood) == kBlocks && read.is_right(owner) && read.account.trouble.empty());
    }
    CHECK(owner.accepted <= 2);
  });
}

void what_is_not_held_is_missing() {
  on_both([](SmallOwner& owner, PeerClient& client) {
    for (const std::size_t held : {0U, 1U, 19U, 20U, 21U, 39U}) {
      owner.held = held;
      const Read read = read_all(client);
      CHECK(read.count(PeerOutcome::kGood) == held && read.count(PeerOutcome::kMissing) == kBlocks - held);
      CHECK(read.is_right(owner) && read.account.trouble.empty());
    }
  });
}

void flipped_bits_are_corrupt() {
  on_both([](SmallOwner& owner, PeerClient& client) {
    owner.slot(3)[kBlock - 1] ^= 1;
    const Read read = read_all(client);
    CHECK(read.outcomes[3] == PeerOutcome::kCorrupt && read.count(PeerOutcome::kGood) == kBlocks - 1);
    for (int turn = 0; owner.suspected == 0; ++turn) {
      CHECK(turn < 60'000);
      std::this_thread::sleep_for(1ms);
    }
    CHECK(owner.suspected == 1);
  });
}

void threads_share_a_client_while_connections_end() {
  on_both([](SmallOwner& owner, PeerClient& client) {
    std::atomic<bool> is_over{false};
    std::thread cutter([&] {
      while (!is_over) {
        std::this_thread::sleep_for(3ms);
        owner.hang_up();
      }
    });
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number) {
      threads.emplace_back([&] {
        for (int turn = 0; turn < 12; ++turn) {
          const Read read = read_all(client);
          CHECK(read.is_right(owner));
          CHECK(read.count(PeerOutcome::kGood) + read.count(PeerOutcome::kFailed) == kBlocks);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    is_over = true;
    cutter.join();
    for (int turn = 0; read_all(client).count(PeerOutcome::kGood) != kBlocks; ++turn) {
      CHECK(turn < 10);
    }
  });
}

void close_ends_reads() {
  on_both([](SmallOwner& owner, PeerClient& client) {
    std::vector<std::thread> threads;
    std::atomic<int> begun{0};
    for (int number = 0; number < 4; ++number) {
      threads.emplace_back([&] {
        while (true) {
          const Read read = read_all(client);
          CHECK(read.is_right(owner));
          ++begun;
          if (!read.account.trouble.empty()) {
            return;
          }
        }
      });
    }
    while (begun < 4) {
      std::this_thread::yield();
    }
    client.close();
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK(read_all(client).count(PeerOutcome::kFailed) == kBlocks);
  });
}

void bytes_cut_at_any_place_fail() {
  RowCopier copier(1);
  SmallOwner owner(false);
  PeerClient client(owner.target(), 1, copier);
  for (const std::size_t cut : {std::size_t{1}, kBlock - 1, kBlock, kBlock + 1, 7 * kBlock + 5, kBlocks * kBlock - 1}) {
    owner.cut_after = cut;
    const Read read = read_all(client);
    CHECK(read.count(PeerOutcome::kGood) == cut / kBlock && read.count(PeerOutcome::kFailed) == kBlocks - cut / kBlock);
    CHECK(read.is_right(owner) && !read.account.trouble.empty());
  }
}

void a_lease_that_is_over_does_not_count() {
  RowCopier copier(1);
  SmallOwner owner(true);
  PeerClient client(owner.target(), 1, copier);
  owner.lease_ms = 1;  // the margin alone
  const Read read = read_all(client);
  CHECK(read.count(PeerOutcome::kFailed) == kBlocks && !read.account.trouble.empty());
  owner.lease_ms = 60'000;
  CHECK(read_all(client).count(PeerOutcome::kGood) == kBlocks);
}

void deadlines_end_reads() {
  on_both([](SmallOwner&, PeerClient& client) {
    CHECK(read_all(client, 0ms).count(PeerOutcome::kFailed) == kBlocks);
    const Read read = read_all(client);
    CHECK(read.count(PeerOutcome::kGood) == kBlocks);
  });
}

void copies_are_verified_in_the_target() {
  RowCopier copier(2);
  tests::Random random(3);
  for (const std::size_t row_bytes : {1UL, 100UL, 12'288UL, 300'001UL}) {
    for (const std::size_t ahead : {0UL, 1UL, 16UL, 64UL}) {
      const auto source = random.bytes(5 * row_bytes);
      std::vector<std::uint8_t> target(ahead + 5 * row_bytes);
      std::array<std::uint32_t, 5> sums{};
      const auto stride = static_cast<std::ptrdiff_t>(row_bytes);
      copier.copy_verified({target.data() + ahead, stride, nullptr}, {source.data(), stride, nullptr}, row_bytes, sums);
      CHECK(std::equal(source.begin(), source.end(), target.begin() + static_cast<std::ptrdiff_t>(ahead)));
      for (std::size_t row = 0; row < sums.size(); ++row) {
        CHECK(sums[row] == crc32c({source.data() + row * row_bytes, row_bytes}));
      }
    }
  }
}

}  // namespace

int main() {
  return tests::run({{"copies are verified in their target", copies_are_verified_in_the_target},
                     {"whole runs are read over few connections", reads_whole_runs},
                     {"what is not held is missing", what_is_not_held_is_missing},
                     {"flipped bits are corrupt, and the owner hears of them", flipped_bits_are_corrupt},
                     {"bytes cut at any place fail", bytes_cut_at_any_place_fail},
                     {"a lease that is over does not count", a_lease_that_is_over_does_not_count},
                     {"deadlines end reads", deadlines_end_reads},
                     {"threads share a client while connections end", threads_share_a_client_while_connections_end},
                     {"close ends reads and waits for them", close_ends_reads}});
}
