#include "kvbm/peer_server.hpp"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "kvbm/peer_client.hpp"
#include "kvbm/peer_wire.hpp"
#include "lent_blocks.hpp"
#include "no_threads.hpp"

namespace kvbm::tests {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLong(60);  // for what is sure to come, however busy the machine is
constexpr std::uint32_t kLongMs = 60'000;
constexpr std::size_t kBytes = 9'001;
constexpr std::uint32_t kSlots = 24;
const SequenceHash kRoot{7, 7, 7};
const std::vector<std::uint8_t> kKey(20, 9);

std::string fresh_path() {
  static std::atomic<int> number{0};
  return "/tmp/kvbm-lend-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

LendingOptions options_of(const std::string& path) {
  LendingOptions options;
  options.instance = "owner";
  options.unix_path = path;
  options.tcp_host = "127.0.0.1";
  options.key = kKey;
  options.most_lease_ms = kLongMs;
  options.most_send_ms = kLongMs;
  options.handshake_ms = kLongMs;
  options.most_connections = 8;
  return options;
}

// An owner with blocks, and who reads from it.
struct Site {
  explicit Site(std::uint32_t count = 16, std::size_t most_blocks = 1000, std::uint32_t handshake_ms = kLongMs)
      : path(fresh_path()), blocks(kSlots, kBytes), hashes(blocks.fill(0, count)) {
    LendingOptions options = options_of(path);
    options.most_blocks = most_blocks;
    options.handshake_ms = handshake_ms;
    server.emplace(std::move(options), blocks.ledger, blocks.lock, blocks.host(), nullptr);
    CHECK(server->owner().namespaces.admit(kSpace, kRoot));
  }
  ~Site() { CHECK(server->close(kLong)); }  // its threads use what goes next

  PeerTarget target(bool is_unix) const {
    return {is_unix ? PeerTransport::kMemory : PeerTransport::kTcp,
            is_unix ? path : "127.0.0.1",
            server->tcp_port(),
            "reader",
            "owner",
            is_unix ? std::vector<std::uint8_t>{} : kKey,
            nullptr,
            kLongMs};
  }

  // How many blocks from the first on are good, and whether all good rows have the bytes of their blocks.
  std::size_t read(PeerClient& client, Bytes wanted, std::uint32_t first) {
    const std::size_t count = hash_count(wanted);
    std::vector<std::uint8_t> rows(count * kBytes, 0xA5);
    std::vector<std::uint8_t> block(kBytes);
    std::vector<PeerOutcome> outcomes(count);
    std::vector<std::uint32_t> checksums(count);
    const TargetRows targets{rows.data(), static_cast<std::ptrdiff_t>(kBytes), nullptr};
    client.read({kSpace, kRoot, wanted, targets, kBytes, std::chrono::steady_clock::now() + kLong}, outcomes,
                checksums);
    std::size_t good = 0;
    for (std::size_t at = 0; at < count; ++at) {
      if (outcomes[at] == PeerOutcome::kGood) {
        ++good;
        fill_row(first + static_cast<std::uint32_t>(at), block);
        CHECK(std::memcmp(rows.data() + at * kBytes, block.data(), kBytes) == 0);
      }
    }
    return good;
  }

  void settle() {
    for (int turn = 0; turn < 60'000 && blocks.pinned() != 0; ++turn) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK(blocks.pinned() == 0 && server->owner().lender.lent_blocks() == 0 && server->owner().lender.refused() == 0);
  }

  std::string path;
  LentBlocks blocks;
  std::vector<std::uint8_t> hashes;
  std::optional<LendingServer> server;
};

// Somebody who sends what he likes.
struct Stranger {
  Stranger(const Site& site, bool is_unix) : fd(socket(is_unix ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval patience{.tv_sec = kLong.count(), .tv_usec = 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (is_unix) {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::memcpy(address.sun_path, site.path.data(), site.path.size());
      CHECK(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    } else {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(site.server->tcp_port());
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      CHECK(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    }
  }

  void say(Bytes bytes) const {
    [[maybe_unused]] const ssize_t sent = send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void say(const PeerMessage& message) const {
    std::vector<std::uint8_t> bytes;
    encode_peer_message(message, bytes);
    say(Bytes(bytes));
  }
  // The next message, head and all.
  std::vector<std::uint8_t> hear() const {
    std::vector<std::uint8_t> heard(kPeerHeadBytes);
    CHECK(recv(fd.get(), heard.data(), heard.size(), MSG_WAITALL) == static_cast<ssize_t>(heard.size()));
    std::uint32_t length = 0;
    std::memcpy(&length, heard.data(), sizeof length);
    const std::size_t body = length - (kPeerHeadBytes - sizeof length);
    heard.resize(kPeerHeadBytes + body);
    CHECK(recv(fd.get(), heard.data() + kPeerHeadBytes, body, MSG_WAITALL) == static_cast<ssize_t>(body));
    return heard;
  }
  // Until the owner hangs up.
  void hear_the_end() const {
    std::array<char, 4096> room{};
    ssize_t got = 0;
    do {
      got = recv(fd.get(), room.data(), room.size(), 0);
    } while (got > 0);
    CHECK(got == 0 || errno == ECONNRESET);
  }

  OwnedFd fd;
};

void blocks_are_read_over_both_sockets() {
  Site site;
  RowCopier copier(2);
  for (const bool is_unix : {true, false}) {
    PeerClient client(site.target(is_unix), 2, copier);
    CHECK(site.read(client, site.hashes, 0) == 16);
    CHECK(site.read(client, blocks_of(site.hashes, 12, 16), 12) == 4);
    const SequenceHash unknown = hash_of(99);
    CHECK(site.read(client, unknown, 99) == 0);
    site.settle();
  }
  CHECK(site.server->owner().counts.memory_bytes == 20 * kBytes &&
        site.server->owner().counts.tcp_bytes == 20 * kBytes);
}

void what_is_evicted_is_not_lent() {
  Site site;
  RowCopier copier(1);
  PeerClient client(site.target(true), 1, copier);
  CHECK(site.read(client, site.hashes, 0) == 16);
  site.blocks.evict(blocks_of(site.hashes, 5, 6));
  CHECK(site.read(client, site.hashes, 0) == 5);
  site.server->owner().namespaces.withdraw(kSpace);
  CHECK(site.read(client, site.hashes, 0) == 0);
}

void an_owner_finds_what_its_reader_found_wrong() {
  for (const bool is_unix : {true, false}) {
    Site site;
    RowCopier copier(1);
    PeerClient client(site.target(is_unix), 1, copier);
    site.blocks.arena.data()[3 * kBytes + 17] ^= 1;
    CHECK(site.read(client, site.hashes, 0) == 15);
    const std::vector<CorruptBlock> found = site.server->owner().corrupt.take(kLong);
    CHECK(found.size() == 1 && found[0].hash == hash_of(3) && found[0].tier == Tier::kHost &&
          found[0].namespace_id == kSpace);
  }
}

void strangers_are_hung_up_on() {
  Site site(16, 1000, 300);
  std::vector<std::uint8_t> hello;
  encode_peer_message(PeerHello{.nonce = {1}, .epoch = 0, .transports = 3, .flags = 0, .instance = "x"}, hello);
  std::vector<std::uint8_t> version = hello;
  version[4] = 9;
  std::vector<std::uint8_t> unproved = hello;
  encode_peer_message(PeerBusy{1, 1}, unproved);
  const std::vector<std::vector<std::uint8_t>> said{{},
                                                    {0xFF, 0xFF, 0xFF, 0xFF, 1, 1, 0, 0},
                                                    std::vector<std::uint8_t>(5000, 'A'),
                                                    {hello.begin(), hello.begin() + 20},
                                                    version,
                                                    unproved};
  for (const bool is_unix : {true, false}) {
    for (const auto& bytes : said) {
      const Stranger stranger(site, is_unix);
      stranger.say(bytes);
      stranger.hear_the_end();
    }
  }
  RowCopier copier(1);
  PeerClient client(site.target(true), 1, copier);
  for (int turn = 0; site.read(client, site.hashes, 0) != 16; ++turn) {
    CHECK(turn < 1'000);  // on a busy machine a reader too may be late for its handshake
  }
  CHECK(site.server->owner().counts.unproved >= 10 && site.server->owner().counts.crowded == 0);
}

void random_bytes_after_a_hello_end_a_connection_alone() {
  Site site;
  Random random(3);
  std::vector<std::uint8_t> hello;
  encode_peer_message(PeerHello{.nonce = {1}, .epoch = 0, .transports = 3, .flags = 0, .instance = "x"}, hello);
  for (int turn = 0; turn < 60; ++turn) {
    const Stranger stranger(site, true);
    std::vector<std::uint8_t> said = hello;
    for (int message = 0; message < 4; ++message) {  // a head that passes, and any body
      const std::array<std::uint8_t, 3> kinds{3, 6, 10};
      const std::uint8_t kind = kinds[random.below(3)];
      const std::size_t body = kind == 3 ? 52 : (kind == 6 ? 36 : 16 + 16 * random.below(2));
      said.insert(said.end(), {static_cast<std::uint8_t>(body + 4), 0, 0, 0, 1, kind, 0, 0});
      for (const std::uint8_t byte : random.bytes(body)) {
        said.push_back(random.below(3) != 0 ? 0 : byte);
      }
    }
    stranger.say(said);
    shutdown(stranger.fd.get(), SHUT_WR);
    stranger.hear_the_end();
  }
  site.settle();
}

void it_answers_busy_and_lends_again() {
  Site site(16, 8);
  RowCopier copier(1);
  PeerClient client(site.target(true), 1, copier);
  CHECK(site.read(client, site.hashes, 0) == 16 && site.server->owner().counts.busy == 0);  // 8 at a time
  site.settle();
  std::optional<Loan> others = site.server->owner().lender.lend(kSpace, site.hashes, Tier::kHost);
  CHECK(others && others->depth() == 8);
  CHECK(site.read(client, site.hashes, 0) == 0 && site.server->owner().counts.busy >= 1);
  others.reset();
  CHECK(site.read(client, site.hashes, 0) == 16);
  site.settle();
}

void blocks_come_and_go_while_many_read() {
  Site site(0);
  RowCopier copier(1);
  std::atomic<bool> is_over{false};
  std::atomic<std::size_t> good{0};
  std::vector<std::thread> threads;
  for (int reader = 0; reader < 4; ++reader) {
    threads.emplace_back([&, reader] {
      PeerClient client(site.target(reader % 2 == 0), 1, copier);
      Random random(static_cast<std::uint64_t>(reader));
      while (!is_over) {
        const auto first = static_cast<std::uint32_t>(8 * random.below(6));
        std::vector<std::uint8_t> wanted;
        for (std::uint32_t block = first; block < first + 8; ++block) {
          append(wanted, hash_of(block).data());
        }
        good += site.read(client, wanted, first);
      }
    });
  }
  Random random(9);
  for (int turn = 0; turn < 400 || good < 200; ++turn) {
    const auto first = static_cast<std::uint32_t>(8 * random.below(6));
    const std::vector<std::uint8_t> run = site.blocks.fill(first, 8);  // evicts others
    if (random.below(4) == 0) {
      site.blocks.evict(run);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  is_over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  site.settle();
  CHECK(site.server->owner().counts.corrupt_blocks == 0);
}

void it_closes_while_it_is_read_from() {
  for (int turn = 0; turn < 5; ++turn) {
    Site site;
    RowCopier copier(1);
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (const bool is_unix : {true, false}) {
      threads.emplace_back([&, target = site.target(is_unix)] {
        while (!is_over) {
          PeerClient client(target, 2, copier);
          site.read(client, site.hashes, 0);
        }
      });
    }
    std::this_thread::sleep_for(milliseconds(5 * turn));
    CHECK(site.server->close(kLong) && site.server->close(kLong));
    CHECK(site.blocks.pinned() == 0 && access(site.path.c_str(), F_OK) != 0);
    is_over = true;
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

PeerMessage decoded(const std::vector<std::uint8_t>& heard) {
  return decode_peer_body(static_cast<PeerKind>(heard[5]), Bytes(heard).subspan(kPeerHeadBytes));
}

std::vector<std::uint8_t> said(const JoinHello& hello) {
  std::vector<std::uint8_t> message{
      static_cast<std::uint8_t>(hello.body_bytes + 4), 0, 0, 0, kPeerVersion, hello.kind, 0, 0};
  message.resize(kPeerHeadBytes + hello.body_bytes, 7);
  return message;
}

// Whom `joins` lets in, until the reader has left.
std::thread letting_in(JoinRequests& joins, std::vector<std::uint8_t> ready) {
  return std::thread([&joins, ready = std::move(ready)] {
    for (bool has_left = false; !has_left;) {
      for (const JoinRequests::Request& request : joins.take(kLong)) {
        has_left = request.has_left;
        if (!has_left) {
          const auto openings = joins.openings(request.number);
          CHECK(request.hello.size() == joins.hello().body_bytes);
          CHECK(openings.size() == 1 && openings[0].first == kSpace);
          CHECK(joins.answer(request.number, ready));
        }
      }
    }
  });
}

// A reader that has proved the key and opened kSpace.
Stranger proved(Site& site, std::uint8_t bit) {
  Stranger reader(site, false);
  const std::vector<std::uint8_t> first = reader.hear();
  const auto owner = std::get<PeerHello>(decoded(first));
  CHECK((owner.transports & bit) != 0);
  const PeerNonce nonce{3};
  reader.say(PeerHello{nonce, 0, bit, 0, "reader"});
  reader.say(PeerProve{peer_key_proof(kKey, PeerRole::kReader, nonce, owner.nonce, "owner")});
  CHECK(std::holds_alternative<PeerProve>(decoded(reader.hear())));
  reader.say(PeerOpen{0, kSpace, peer_open_proof(kRoot, nonce, owner.nonce, kSpace, "owner")});
  CHECK(std::get<PeerOpened>(decoded(reader.hear())).is_open);
  return reader;
}

void who_joins_is_answered_and_granted_slots() {
  for (const bool is_nixl : {false, true}) {
    Site site;
    JoinRequests& joins = is_nixl ? site.server->owner().nixl : site.server->owner().rdma;
    joins.open();
    const auto kind = static_cast<std::uint8_t>(joins.hello().kind + 1);
    const std::vector<std::uint8_t> ready{5, 0, 0, 0, kPeerVersion, kind, 0, 0, 0};  // READY
    const auto over = is_nixl ? PeerTransport::kNixl : PeerTransport::kRdma;
    std::thread answers = letting_in(joins, ready);
    {
      const Stranger reader = proved(site, is_nixl ? kPeerNixl : kPeerRdma);
      reader.say(Bytes(said(joins.hello())));
      CHECK(reader.hear() == ready);
      reader.say(PeerAsk{1, 0, over, kLongMs, site.hashes});
      const std::vector<std::uint8_t> granted = reader.hear();
      const auto grant = std::get<PeerGrant>(decoded(granted));
      CHECK(grant.lease != 0 && grant.tiers.size() == 16 && site.blocks.pinned() == 16);
      reader.say(PeerAsk{2, 0, over, kLongMs, hash_of(99)});
      CHECK(std::get<PeerGone>(decoded(reader.hear())).reason == PeerGoneReason::kNotHeld);
    }
    answers.join();
    site.settle();
    const Stranger second(site, false);  // a stranger's is no message, before the key is proved
    second.say(Bytes(said(joins.hello())));
    second.hear_the_end();
  }
}

void who_has_joined_by_one_way_is_granted_nothing_by_the_other() {
  Site site;
  PeerOwner& owner = site.server->owner();
  owner.nixl.open();
  owner.rdma.open();
  const std::vector<std::uint8_t> ready{5, 0, 0, 0, kPeerVersion, 15, 0, 0, 0};
  std::thread answers = letting_in(owner.nixl, ready);
  {
    const Stranger reader = proved(site, kPeerNixl);
    reader.say(Bytes(said(kNixlHello)));
    CHECK(reader.hear() == ready);
    reader.say(PeerAsk{1, 0, PeerTransport::kRdma, kLongMs, site.hashes});
    reader.hear_the_end();
  }
  answers.join();
  CHECK(site.blocks.pinned() == 0);
}

void who_reads_by_nixl_is_hung_up_on_and_others_are_not() {
  Site site;
  PeerOwner& owner = site.server->owner();
  owner.nixl.open();
  const std::vector<std::uint8_t> ready{5, 0, 0, 0, kPeerVersion, 15, 0, 0, 0};
  std::thread answers = letting_in(owner.nixl, ready);
  const Stranger other = proved(site, kPeerTcp);
  const Stranger reader = proved(site, kPeerNixl);
  reader.say(Bytes(said(kNixlHello)));
  CHECK(reader.hear() == ready);
  site.server->hang_up_on_nixl();
  reader.hear_the_end();
  answers.join();
  other.say(PeerAsk{1, 0, PeerTransport::kTcp, kLongMs, hash_of(99)});
  CHECK(std::get<PeerGone>(decoded(other.hear())).reason == PeerGoneReason::kNotHeld);
}

void only_one_listens_at_a_path() {
  Site site;
  LendingOptions options = options_of(site.path);
  bool is_refused = false;
  try {
    LendingServer(options, site.blocks.ledger, site.blocks.lock, site.blocks.host(), nullptr);
  } catch (const std::system_error& error) {
    is_refused = error.code().value() == EADDRINUSE;
  }
  CHECK(is_refused);
  struct stat there{};
  CHECK(stat(site.path.c_str(), &there) == 0 && (there.st_mode & 0777) == 0600);
  options.unix_path = "/no such folder/a";
  int error = 0;
  try {
    LendingServer(options, site.blocks.ledger, site.blocks.lock, site.blocks.host(), nullptr);
  } catch (const std::system_error& refused) {
    error = refused.code().value();
  }
  CHECK(error == ENOENT);
  options.unix_path.clear();
  options.most_send_ms = 0;
  CHECK(thrown_code([&] {
          LendingServer(options, site.blocks.ledger, site.blocks.lock, site.blocks.host(), nullptr);
        }) == ErrorCode::kLayout);
  options.most_send_ms = 1;
  options.key.resize(3);
  CHECK(thrown_code([&] {
          LendingServer(options, site.blocks.ledger, site.blocks.lock, site.blocks.host(), nullptr);
        }) == ErrorCode::kLayout);
}

void what_a_killed_owner_left_is_replaced() {
  const std::string path = fresh_path();
  OwnedFd gone = listen_unix(path);
  gone.reset();
  CHECK(access(path.c_str(), F_OK) == 0);
  const OwnedFd next = listen_unix(path);
  CHECK(next.get() >= 0);
  unlink(path.c_str());
}

void without_a_thread_it_does_not_listen() {
  LentBlocks blocks(kSlots, kBytes);
  const std::string path = fresh_path();
  int error = 0;
  try {
    const FewThreads few(0);
    LendingServer(options_of(path), blocks.ledger, blocks.lock, blocks.host(), nullptr);
  } catch (const std::system_error& refused) {
    error = refused.code().value();
  }
  CHECK(error == EAGAIN && access(path.c_str(), F_OK) != 0);  // what lies there would look like an owner's
  CHECK(LendingServer(options_of(path), blocks.ledger, blocks.lock, blocks.host(), nullptr).close(kLong));
}

void connections_without_a_thread_end_and_cost_no_place() {
  Site site;
  RowCopier copier(1);
  for (const bool is_unix : {true, false}) {
    {
      const FewThreads few(0);
      for (int turn = 0; turn < 12; ++turn) {  // more than there may be connections
        PeerClient client(site.target(is_unix), 1, copier);
        CHECK(site.read(client, site.hashes, 0) == 0);
      }
    }
    PeerClient client(site.target(is_unix), 1, copier);
    CHECK(site.read(client, site.hashes, 0) == 16);
  }
  CHECK(site.server->owner().counts.crowded == 24);
  site.settle();
}

void a_reader_that_gets_no_thread_reads_over_one_connection() {
  Site site;
  RowCopier copier(1);
  PeerClient client(site.target(false), 2, copier);
  CHECK(site.read(client, site.hashes, 0) == 16);
  const FewThreads few(0);
  for (int turn = 0; turn < 4; ++turn) {  // whoever lends has its threads already
    CHECK(site.read(client, site.hashes, 0) == 16);
  }
}

}  // namespace
}  // namespace kvbm::tests

int main() {
  using namespace kvbm::tests;
  return run({
      {"blocks are read over both sockets", blocks_are_read_over_both_sockets},
      {"what is evicted is not lent", what_is_evicted_is_not_lent},
      {"an owner finds what its reader found wrong", an_owner_finds_what_its_reader_found_wrong},
      {"strangers are hung up on", strangers_are_hung_up_on},
      {"random bytes after a hello end a connection alone", random_bytes_after_a_hello_end_a_connection_alone},
      {"it answers busy, and lends again", it_answers_busy_and_lends_again},
      {"blocks come and go while many read", blocks_come_and_go_while_many_read},
      {"it closes while it is read from", it_closes_while_it_is_read_from},
      {"who joins is answered and granted slots", who_joins_is_answered_and_granted_slots},
      {"who has joined by one way is granted nothing by the other",
       who_has_joined_by_one_way_is_granted_nothing_by_the_other},
      {"who reads by NIXL is hung up on, and others are not", who_reads_by_nixl_is_hung_up_on_and_others_are_not},
      {"only one listens at a path", only_one_listens_at_a_path},
      {"what a killed owner left is replaced", what_a_killed_owner_left_is_replaced},
      {"without a thread it does not listen", without_a_thread_it_does_not_listen},
      {"connections without a thread end and cost no place", connections_without_a_thread_end_and_cost_no_place},
      {"a reader that gets no thread reads over one connection",
       a_reader_that_gets_no_thread_reads_over_one_connection},
  });
}
