// Blocks over TLS, and who does not speak it. Certificates are made with the program `openssl`; without it the test
// fails.
#include "kvbm/peer_tls.hpp"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "kvbm/peer_client.hpp"
#include "kvbm/peer_server.hpp"
#include "lent_blocks.hpp"

namespace {
std::function<void()> nothing_was_there;  // called once, after a look at a socket that found nothing
}

// Stands before the system's, so that something may come between two calls.
extern "C" ssize_t recv(int fd, void* into, std::size_t most, int flags) {
  const auto taken = syscall(SYS_recvfrom, fd, into, most, flags, nullptr, nullptr);
  const int error = errno;
  if (taken < 0 && (flags & MSG_PEEK) != 0 && nothing_was_there) {
    std::exchange(nothing_was_there, nullptr)();
  }
  errno = error;
  return static_cast<ssize_t>(taken);
}

// OpenSSL counts references in ways that TSan does not see; it looks at our own code alone. GCC's TSan is a shared
// library, which finds only what a program shows.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "ignore_noninstrumented_modules=1";
}

namespace kvbm::tests {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLong(60);  // for what is sure to come, however busy the machine is
constexpr std::uint32_t kLongMs = 60'000;
constexpr std::size_t kBytes = 90'001;
constexpr std::uint32_t kSlots = 24;
constexpr std::uint32_t kBlocks = 16;
const SequenceHash kRoot{7, 7, 7};

// A folder of certificates that sign themselves, which goes with it.
struct Certificates {
  Certificates() : folder(std::filesystem::temp_directory_path() / ("kvbm-tls-" + std::to_string(getpid()))) {
    std::filesystem::create_directory(folder);
  }
  ~Certificates() { std::filesystem::remove_all(folder); }

  // Makes one; false: there is no program to make it with.
  bool make(const std::string& name) const {
    const std::string command =
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=" + name +
        " -keyout " + folder + "/" + name + "-key.pem -out " + folder + "/" + name + ".pem 2>/dev/null";
    return std::system(command.c_str()) == 0;
  }
  TlsOptions options(const std::string& name, const std::string& trusted) const {
    TlsOptions made;
    made.cert = folder + "/" + name + ".pem";
    made.key = folder + "/" + name + "-key.pem";
    made.ca = folder + "/" + trusted + ".pem";
    made.rekey_bytes = 30'000;  // more than once a block
    return made;
  }
  std::shared_ptr<PeerTls> tls(const std::string& name, const std::string& trusted) const {
    return std::make_shared<PeerTls>(options(name, trusted));
  }

  std::string folder;
};

const Certificates* made = nullptr;

// An owner with blocks that speaks TLS, and who reads from it.
struct Site {
  explicit Site(std::uint32_t handshake_ms = kLongMs) : blocks(kSlots, kBytes), hashes(blocks.fill(0, kBlocks)) {
    LendingOptions options;
    options.instance = "owner";
    options.tcp_host = "127.0.0.1";
    options.tls = made->tls("one", "one");
    options.most_lease_ms = kLongMs;
    options.most_send_ms = kLongMs;
    options.handshake_ms = handshake_ms;
    options.most_connections = 8;
    server.emplace(std::move(options), blocks.ledger, blocks.lock, blocks.host(), nullptr);
    CHECK(server->owner().namespaces.admit(kSpace, kRoot));
  }
  ~Site() { CHECK(server->close(kLong)); }  // its threads use what goes next

  PeerTarget target(std::shared_ptr<PeerTls> tls) const {
    const bool needs_key = tls == nullptr;
    return {PeerTransport::kTcp,
            "127.0.0.1",
            server->tcp_port(),
            "reader",
            "owner",
            std::vector<std::uint8_t>(needs_key ? 20 : 0),
            std::move(tls),
            kLongMs};
  }
  PeerTarget target() const { return target(made->tls("one", "one")); }

  // How many blocks are good, all with their own bytes; why not more.
  std::size_t read(PeerClient& client, std::string* trouble = nullptr) {
    std::vector<std::uint8_t> rows(kBlocks * kBytes, 0xA5);
    std::vector<std::uint8_t> block(kBytes);
    std::vector<PeerOutcome> outcomes(kBlocks);
    std::vector<std::uint32_t> checksums(kBlocks);
    const TargetRows targets{rows.data(), static_cast<std::ptrdiff_t>(kBytes), nullptr};
    const PeerAccount account = client.read(
        {kSpace, kRoot, hashes, targets, kBytes, std::chrono::steady_clock::now() + kLong}, outcomes, checksums);
    if (trouble != nullptr) {
      *trouble = account.trouble;
    }
    std::size_t good = 0;
    for (std::uint32_t at = 0; at < kBlocks; ++at) {
      if (outcomes[at] == PeerOutcome::kGood) {
        ++good;
        fill_row(at, block);
        CHECK(std::memcmp(rows.data() + at * kBytes, block.data(), kBytes) == 0);
      }
    }
    return good;
  }

  LentBlocks blocks;
  std::vector<std::uint8_t> hashes;
  std::optional<LendingServer> server;
};

// Somebody who connects and sends what he likes.
OwnedFd stranger(const Site& site) {
  OwnedFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{.tv_sec = kLong.count(), .tv_usec = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(site.server->tcp_port());
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  return fd;
}

std::size_t heard_until_the_end(const OwnedFd& fd) {
  std::array<char, 4096> room{};
  std::size_t heard = 0;
  ssize_t got = 0;
  while ((got = recv(fd.get(), room.data(), room.size(), 0)) > 0) {
    heard += static_cast<std::size_t>(got);
  }
  CHECK(got == 0 || errno == ECONNRESET);
  return heard;
}

void blocks_are_read_and_keys_change_meanwhile() {
  Site site;
  RowCopier copier(1);
  PeerClient client(site.target(), 2, copier);
  for (int turn = 0; turn < 5; ++turn) {
    CHECK(site.read(client) == kBlocks);
  }
  CHECK(site.server->owner().counts.tcp_bytes == 5 * kBlocks * kBytes && site.server->owner().counts.accepted <= 2);
}

void two_of_whom_one_trusts_another_read_nothing() {
  Site site;
  RowCopier copier(1);
  std::string trouble;
  PeerClient untrusted(site.target(made->tls("two", "one")), 1, copier);
  CHECK(site.read(untrusted, &trouble) == 0 && trouble.find("alert") != std::string::npos);
  PeerClient distrusting(site.target(made->tls("one", "two")), 1, copier);
  CHECK(site.read(distrusting, &trouble) == 0 && trouble.find("its certificate is refused") != std::string::npos);
  PeerClient plain(site.target(nullptr), 1, copier);
  CHECK(site.read(plain, &trouble) == 0 && trouble.find("it speaks TLS here") != std::string::npos);
  PeerClient good(site.target(), 1, copier);
  CHECK(site.read(good) == kBlocks);
}

void what_comes_right_after_a_look_is_tls_too() {
  std::array<int, 2> fds{};
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) == 0);
  const OwnedFd first(fds[0]);
  const OwnedFd second(fds[1]);
  const std::shared_ptr<PeerTls> tls = made->tls("one", "one");
  const auto owner = tls->session(PeerRole::kOwner, first.get());
  const auto reader = tls->session(PeerRole::kReader, second.get());
  nothing_was_there = [&] { CHECK(reader->shake() == TlsStep::kWantsInput); };  // its first bytes are sent
  CHECK(owner->shake() == TlsStep::kWantsInput && nothing_was_there == nullptr);
  for (int turn = 0; turn < 4 && !(owner->is_up() && reader->is_up()); ++turn) {
    for (const auto& session : {owner.get(), reader.get()}) {
      const TlsStep step = session->is_up() ? TlsStep::kDone : session->shake();
      CHECK(step == TlsStep::kDone || step == TlsStep::kWantsInput);
    }
  }
  CHECK(owner->is_up() && reader->is_up());
}

void strangers_hear_nothing_and_leave_their_places() {
  Site site(300);
  Random random(3);
  for (int turn = 0; turn < 30; ++turn) {
    const OwnedFd fd = stranger(site);
    std::vector<std::uint8_t> said{0x16, 3, 1, 0, static_cast<std::uint8_t>(random.below(256)), 1, 0, 0};
    said.resize(random.below(9));
    const std::vector<std::uint8_t> more = random.bytes(random.below(300));
    said.insert(said.end(), more.begin(), more.end());
    [[maybe_unused]] const ssize_t sent = send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL);
    CHECK(heard_until_the_end(fd) < 200);  // an alert, or that TLS is spoken here
  }
  for (int turn = 0; turn < 60'000 && site.server->owner().counts.connections != 0; ++turn) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  CHECK(site.server->owner().counts.unproved == 30 && site.server->owner().counts.connections == 0);
}

void it_closes_while_it_is_read_from() {
  for (int turn = 0; turn < 4; ++turn) {
    Site site;
    RowCopier copier(1);
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (int reader = 0; reader < 2; ++reader) {
      threads.emplace_back([&, target = site.target()] {
        while (!is_over) {
          PeerClient client(target, 2, copier);
          site.read(client);
        }
      });
    }
    const OwnedFd silent = stranger(site);
    std::this_thread::sleep_for(milliseconds(20 * turn));
    CHECK(site.server->close(kLong));
    CHECK(site.blocks.pinned() == 0);
    is_over = true;
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

void a_reader_closes_while_it_reads() {
  Site site;
  RowCopier copier(1);
  for (int turn = 0; turn < 4; ++turn) {
    PeerClient client(site.target(), 2, copier);
    std::thread reading([&] {
      std::string trouble;
      while (trouble.empty()) {
        site.read(client, &trouble);
      }
    });
    std::this_thread::sleep_for(milliseconds(20 * turn));
    client.close();
    reading.join();
  }
}

void files_that_are_replaced_are_used_and_broken_ones_are_not() {
  CHECK(made->make("changing"));
  Site site;
  RowCopier copier(1);
  const std::shared_ptr<PeerTls> changing = made->tls("changing", "one");
  PeerClient client(site.target(changing), 1, copier);
  CHECK(site.read(client) == 0);
  const auto copy = [](const std::string& from, const std::string& to) {
    std::filesystem::copy_file(made->folder + "/" + from, made->folder + "/" + to,
                               std::filesystem::copy_options::overwrite_existing);
  };
  copy("one.pem", "changing.pem");  // whose key is another still
  CHECK(site.read(client) == 0);
  const std::filesystem::path key = made->folder + "/changing-key.pem";
  const auto written = std::filesystem::last_write_time(key);
  copy("one-key.pem", "changing-key.pem");         // in place, of the same size,
  std::filesystem::last_write_time(key, written);  // and as if it were as old
  CHECK(site.read(client) == kBlocks);
  std::filesystem::remove(made->folder + "/changing.pem");
  PeerClient another(site.target(changing), 1, copier);
  CHECK(site.read(another) == kBlocks);
}

void what_cannot_be_used_is_said() {
  const auto code = [](const TlsOptions& options) { return thrown_code([&] { PeerTls made_of(options); }); };
  TlsOptions options = made->options("one", "one");
  options.library = "libssl.so.none";
  CHECK(code(options) == ErrorCode::kConfig);
  options.library = "libc.so.6";
  CHECK(code(options) == ErrorCode::kConfig);
  options = made->options("one", "one");
  options.key = made->options("two", "two").key;
  CHECK(code(options) == ErrorCode::kConfig);
  for (std::string TlsOptions::* const path : {&TlsOptions::cert, &TlsOptions::key, &TlsOptions::ca}) {
    for (const char* const wrong : {"/tmp", "/dev/zero", "/proc/self/exe-not-there", "/etc/hostname"}) {
      options = made->options("one", "one");
      options.*path = wrong;
      CHECK(code(options) == ErrorCode::kConfig);
    }
  }
}

}  // namespace
}  // namespace kvbm::tests

int main() {
  using namespace kvbm::tests;
  const Certificates certificates;
  if (!certificates.make("one") || !certificates.make("two")) {
    std::fputs("the program openssl makes no certificates; install it: apt-get install openssl\n", stderr);
    return 1;
  }
  made = &certificates;
  return run({
      {"blocks are read and keys change meanwhile", blocks_are_read_and_keys_change_meanwhile},
      {"two of whom one trusts another read nothing", two_of_whom_one_trusts_another_read_nothing},
      {"strangers hear nothing and leave their places", strangers_hear_nothing_and_leave_their_places},
      {"it closes while it is read from", it_closes_while_it_is_read_from},
      {"a reader closes while it reads", a_reader_closes_while_it_reads},
      {"files that are replaced are used, and broken ones are not",
       files_that_are_replaced_are_used_and_broken_ones_are_not},
      {"what comes right after a look is TLS too", what_comes_right_after_a_look_is_tls_too},
      {"what cannot be used is said", what_cannot_be_used_is_said},
  });
}
