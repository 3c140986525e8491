#include "kvbm/peer_connection.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "kvbm/checksum.hpp"
#include "kvbm/entropy.hpp"
#include "kvbm/error.hpp"
#include "kvbm/hmac.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

constexpr std::size_t kReceiveBytes = 16 * 1024;          // at a time, beyond what a message is known to need
constexpr std::size_t kMostChecked = 64;                  // blocks of one END that are looked at
constexpr auto kLookUp = std::chrono::milliseconds(100);  // while a lane is waited for: whether the instance closes
constexpr std::array kKindNames{"HELLO", "PROVE", "OPEN", "OPENED", "ARENA", "ASK",
                                "GRANT", "BUSY",  "GONE", "END",    "BYE"};

PeerNonce fresh_nonce() {
  PeerNonce nonce;
  for (std::size_t at = 0; at < nonce.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random_word();
    std::memcpy(nonce.data() + at, &word, sizeof word);
  }
  return nonce;
}

Bytes packed_u32s(std::span<const std::uint32_t> numbers) noexcept { return packed(numbers); }

// What a reader may say, so that its other messages are not even awaited.
bool is_readers(PeerKind kind, bool has_shaken) noexcept {
  switch (kind) {
    case PeerKind::kHello:
    case PeerKind::kProve:
      return !has_shaken;
    case PeerKind::kOpen:
    case PeerKind::kAsk:
    case PeerKind::kEnd:
      return has_shaken;
    case PeerKind::kBye:
      return true;
    default:
      return false;
  }
}

}  // namespace

PeerConnection::PeerConnection(PeerOwner& owner, PeerPresence& presence, int fd, bool is_unix)
    : owner_(owner), presence_(presence), is_unix_(is_unix), leases_(owner.leases), socket_(fd, [this] {
        expire_leases();
        if (is_awaiting_ && leases_.size() == 0 && presence_.idle_since == 0) {
          presence_.idle_since = PeerSocket::Clock::now().time_since_epoch().count();
        }
        return leases_.next_end();
      }) {}

void PeerConnection::run() noexcept {
  const SteadyTime deadline = in_ms(owner_.options.handshake_ms);  // a stranger has no more time, with TLS or without
  try {
    if (speaks_tls()) {
      socket_.secure(*owner_.options.tls, deadline);
    }
    shake_hands(deadline);
    has_shaken_ = true;
    presence_.is_proved = true;
    while (answer(receive(std::nullopt))) {
    }
  } catch (const PeerGoneError& gone) {
    (has_shaken_ ? owner_.counts.broken : owner_.counts.unproved)
        .fetch_add(has_shaken_ ? 0 : 1, std::memory_order_relaxed);
    say_bye(owner_.is_closing ? "the instance closes" : gone.what());
  } catch (const std::exception& error) {
    (has_shaken_ ? owner_.counts.broken : owner_.counts.unproved).fetch_add(1, std::memory_order_relaxed);
    say_bye(error.what());
  }
  for (JoinRequests* const joins : {&owner_.rdma, &owner_.nixl}) {
    if (const std::uint64_t number = joined(*joins).number; number != 0) {
      joins->leave(number);
    }
  }
  if (speaks_tls() && !has_shaken_) {
    socket_.drain(deadline);  // it may have said more than was read, and still has to hear why it is hung up on
  }
}

// -- messages ---------------------------------------------------------------------------------------------------------

PeerMessage PeerConnection::receive(std::optional<SteadyTime> begun_by) {
  in_begin_ += in_used_;
  in_used_ = 0;
  if (in_begin_ == in_end_) {
    in_begin_ = in_end_ = 0;
  }
  const auto have = [&](std::size_t bytes, std::optional<SteadyTime> deadline) {
    if (in_end_ - in_begin_ >= bytes) {
      return;
    }
    if (in_begin_ > 0) {
      std::copy(in_.begin() + static_cast<std::ptrdiff_t>(in_begin_),
                in_.begin() + static_cast<std::ptrdiff_t>(in_end_), in_.begin());
      in_end_ -= std::exchange(in_begin_, 0);
    }
    if (in_.size() < std::max(bytes, kReceiveBytes)) {
      in_.resize(std::max(bytes, kReceiveBytes));
    }
    try {
      in_end_ += socket_.receive(std::span(in_).subspan(in_end_), bytes - in_end_, deadline);
    } catch (const PeerGoneError& gone) {
      if (gone.is_late()) {
        throw Error(ErrorCode::kPeerWire, "half a message, and no more of it in time");
      }
      throw;
    }
  };
  is_awaiting_ = has_shaken_;
  have(1, begun_by);
  is_awaiting_ = false;
  presence_.idle_since = 0;
  const SteadyTime deadline = begun_by.value_or(in_ms(owner_.options.handshake_ms));
  have(kPeerHeadBytes, deadline);
  if (JoinRequests* const joins = wanted_join(); joins != nullptr) {
    in_used_ = kPeerHeadBytes + joins->hello().body_bytes;
    have(in_used_, deadline);
    greet(*joins, deadline);
    return receive(begun_by);
  }
  const PeerHead head =
      decode_peer_head(std::span<const std::uint8_t, kPeerHeadBytes>(in_.data() + in_begin_, kPeerHeadBytes));
  if (!is_readers(head.kind, has_shaken_)) {
    throw Error(ErrorCode::kPeerWire,
                words("a ", kKindNames[static_cast<std::size_t>(head.kind) - 1], " is not awaited"));
  }
  in_used_ = kPeerHeadBytes + head.body_bytes;
  have(in_used_, deadline);
  return decode_peer_body(head.kind, Bytes(in_).subspan(in_begin_ + kPeerHeadBytes, head.body_bytes));
}

void PeerConnection::send(const PeerMessage& message, int passed) {
  out_.clear();
  encode_peer_message(message, out_);
  iovec piece{.iov_base = out_.data(), .iov_len = out_.size()};
  socket_.send({&piece, 1}, in_ms(owner_.options.handshake_ms), passed);
}

void PeerConnection::say_bye(std::string_view why) noexcept {
  try {
    send(PeerBye{why});
  } catch (const std::exception&) {  // it has gone, then
  }
}

// -- the beginning ----------------------------------------------------------------------------------------------------

void PeerConnection::shake_hands(SteadyTime deadline) {
  nonce_ = fresh_nonce();
  const auto transports =
      static_cast<std::uint8_t>(kPeerTcp | (lends_memory() ? kPeerMemory : 0) | (lends(owner_.rdma) ? kPeerRdma : 0) |
                                (lends(owner_.nixl) ? kPeerNixl : 0));
  send(PeerHello{.nonce = nonce_,
                 .epoch = asks_key() ? 0 : owner_.lender.epoch(),  // for who has proved nothing yet
                 .transports = transports,
                 .flags = asks_key() ? kPeerKeyAsked : std::uint8_t{0},
                 .instance = owner_.options.instance});
  const PeerMessage hello = receive(deadline);
  if (!std::holds_alternative<PeerHello>(hello)) {
    throw Error(ErrorCode::kPeerWire, "a HELLO is due first");
  }
  reader_ = std::get<PeerHello>(hello).nonce;
  if (reader_ == nonce_) {
    throw Error(ErrorCode::kPeerWire, "HELLO: the nonce is the owner's own");
  }
  if (!asks_key()) {
    return;
  }
  const PeerMessage prove = receive(deadline);
  if (!std::holds_alternative<PeerProve>(prove)) {
    throw Error(ErrorCode::kPeerWire, "a proof of the key is due");
  }
  const LendingOptions& options = owner_.options;
  const PeerProof wanted = peer_key_proof(options.key, PeerRole::kReader, reader_, nonce_, options.instance);
  if (!equal_in_constant_time(std::get<PeerProve>(prove).proof, wanted)) {
    throw Error(ErrorCode::kPeerWire, "the key is another");
  }
  send(PeerProve{peer_key_proof(options.key, PeerRole::kOwner, reader_, nonce_, options.instance)});
}

// -- what a reader says -----------------------------------------------------------------------------------------------

bool PeerConnection::answer(const PeerMessage& message) {
  expire_leases();
  if (const auto* const opening = std::get_if<PeerOpen>(&message)) {
    open(*opening);
  } else if (const auto* const asking = std::get_if<PeerAsk>(&message)) {
    ask(*asking);
  } else if (const auto* const ending = std::get_if<PeerEnd>(&message)) {
    end(*ending);
  } else {
    return false;
  }
  return true;
}

void PeerConnection::open(const PeerOpen& open) {
  // So that an unknown namespace takes as long as a wrong proof
  static constexpr std::array<std::uint8_t, 32> nobodys{};
  const auto admitted = owner_.namespaces.find(open.namespace_id);
  const Bytes root = admitted ? Bytes(admitted->root) : Bytes(nobodys);
  const PeerProof wanted = peer_open_proof(root, reader_, nonce_, open.namespace_id, owner_.options.instance);
  const bool is_open = equal_in_constant_time(open.proof, wanted) && admitted.has_value();
  opened_[open.handle] = is_open ? std::optional(Opened{open.namespace_id, admitted->number}) : std::nullopt;
  owner_.counts.unopened.fetch_add(is_open ? 0 : 1, std::memory_order_relaxed);
  const std::size_t block_bytes = is_open ? owner_.host.block_bytes : 0;
  send(PeerOpened{.handle = open.handle, .is_open = is_open, .block_bytes = static_cast<std::uint32_t>(block_bytes)});
}

void PeerConnection::ask(const PeerAsk& ask) {
  if (owner_.is_closing) {
    return say_gone(ask.request, PeerGoneReason::kClosing);
  }
  if (owner_.is_fenced) {
    return say_gone(ask.request, PeerGoneReason::kFenced);
  }
  const std::optional<Opened>& opened = opened_[ask.handle];
  if (!opened || !owner_.namespaces.holds(opened->namespace_id, opened->admission)) {
    return say_gone(ask.request, PeerGoneReason::kNotOpened);
  }
  if (ask.transport == PeerTransport::kMemory && !is_unix_) {
    throw Error(ErrorCode::kPeerWire, "memory is asked for over tcp");
  }
  if (ask.transport == PeerTransport::kRdma || ask.transport == PeerTransport::kNixl) {
    if (!(ask.transport == PeerTransport::kNixl ? over_nixl_ : over_rdma_).may_read) {
      throw Error(ErrorCode::kPeerWire, "slots are asked for by who cannot read them");
    }
    if (!grant_slots(ask, opened->namespace_id)) {
      say_gone(ask.request, PeerGoneReason::kNotHeld);
    }
    return;
  }
  const bool wants_memory = ask.transport == PeerTransport::kMemory && lends_memory();
  if (!wants_memory || !grant_slots(ask, opened->namespace_id)) {
    grant_bytes(ask, opened->namespace_id);
  }
}

JoinRequests* PeerConnection::wanted_join() noexcept {
  for (JoinRequests* const joins : {&owner_.rdma, &owner_.nixl}) {
    const JoinHello& hello = joins->hello();
    const auto size = static_cast<std::uint8_t>(hello.body_bytes + kPeerHeadBytes - sizeof(std::uint32_t));
    const std::array<std::uint8_t, kPeerHeadBytes> head{size, 0, 0, 0, kPeerVersion, hello.kind, 0, 0};
    if (has_shaken_ && joined(*joins).number == 0 && lends(*joins) &&
        std::equal(head.begin(), head.end(), in_.begin() + static_cast<std::ptrdiff_t>(in_begin_))) {
      return joins;
    }
  }
  return nullptr;
}

void PeerConnection::greet(JoinRequests& joins, SteadyTime deadline) {
  std::vector<JoinRequests::Opening> openings;
  for (const auto& opened : opened_) {
    if (opened) {
      openings.emplace_back(opened->namespace_id, opened->admission);
    }
  }
  if (&joins == &owner_.nixl) {
    presence_.wants_nixl = true;  // before it is let in: who is to be hung up on is found
  }
  Joined& joined = this->joined(joins);
  std::uint64_t number = 0;
  std::vector<std::uint8_t> ready = joins.ask(Bytes(in_).subspan(in_begin_ + kPeerHeadBytes, joins.hello().body_bytes),
                                              std::move(openings), deadline, number);
  if (ready.empty()) {
    throw Error(ErrorCode::kPeerWire,
                words("nobody has answered message ", static_cast<unsigned>(joins.hello().kind), " in time"));
  }
  joined.number = number;
  joined.may_read = ready.size() > kPeerHeadBytes && ready[kPeerHeadBytes] == 0;  // its status: READY
  iovec piece{.iov_base = ready.data(), .iov_len = ready.size()};
  socket_.send({&piece, 1}, in_ms(owner_.options.handshake_ms));
}

void PeerConnection::say_busy(std::uint32_t request) {
  owner_.counts.busy.fetch_add(1, std::memory_order_relaxed);
  send(PeerBusy{.request = request, .retry_ms = owner_.options.retry_ms});
}

void PeerConnection::say_gone(std::uint32_t request, PeerGoneReason reason) {
  owner_.counts.gone[static_cast<std::size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  send(PeerGone{.request = request, .reason = reason});
}

bool PeerConnection::grant_slots(const PeerAsk& ask, const NamespaceId& namespace_id) {
  std::optional<Loan> loan = owner_.lender.lend(namespace_id, ask.hashes, Tier::kHost);
  if (!loan) {
    say_busy(ask.request);
    return true;
  }
  const std::size_t depth = loan->depth();
  if (depth == 0) {
    return false;
  }
  std::vector<std::uint32_t> checksums(depth);
  for (std::size_t at = 0; at < depth; ++at) {
    checksums[at] = owner_.host.checksums[loan->slots()[at]];
  }
  if (ask.transport == PeerTransport::kMemory && !has_arena_) {
    send(PeerArena{.bytes = owner_.host.mapped_bytes, .slots = owner_.host.slots, .stride = owner_.host.block_bytes},
         owner_.arena.get());
    has_arena_ = true;
  }
  const std::uint32_t lease_ms = std::clamp<std::uint32_t>(ask.time_left_ms, 1, owner_.options.most_lease_ms);
  PeerGrant grant{.request = ask.request,
                  .lease = 0,
                  .lease_ms = lease_ms,
                  .tiers = loan->tiers(),
                  .slots = packed_u32s(loan->slots()),
                  .checksums = packed_u32s(checksums)};
  // A lease is counted from after its grant here, so that it ends for the reader first: it is given its time when that
  // is sent.
  const std::uint64_t lease = leases_.add(std::move(*loan), SteadyTime::max());
  loan.reset();
  grant.lease = lease;
  send(grant);
  leases_.set_end(lease, in_ms(lease_ms));
  LendingCounts& counts = owner_.counts;
  std::atomic<std::uint64_t>& lent = ask.transport == PeerTransport::kRdma   ? counts.rdma_bytes
                                     : ask.transport == PeerTransport::kNixl ? counts.nixl_bytes
                                                                             : counts.memory_bytes;
  lent.fetch_add(depth * owner_.host.block_bytes, std::memory_order_relaxed);
  return true;
}

void PeerConnection::grant_bytes(const PeerAsk& ask, const NamespaceId& namespace_id) {
  const SteadyTime deadline = in_ms(std::clamp<std::uint32_t>(ask.time_left_ms, 1, owner_.options.most_send_ms));
  checkable_ = 0;
  std::optional<Loan> loan =
      owner_.lender.lend(namespace_id, ask.hashes, owner_.nvme != nullptr ? Tier::kNvme : Tier::kHost);
  if (!loan) {
    return say_busy(ask.request);
  }
  Outgoing run{std::move(*loan), std::nullopt, {}};
  run.checksums.resize(run.loan.depth());
  const bool held_some = run.loan.depth() > 0;
  stage(run, namespace_id, ask.hashes, deadline);
  const std::size_t depth = run.loan.depth();
  if (depth == 0) {
    const bool has_no_lane = held_some && !run.lane;
    return has_no_lane ? say_busy(ask.request) : say_gone(ask.request, PeerGoneReason::kNotHeld);
  }
  send_rows({.request = ask.request,
             .lease = 0,
             .lease_ms = 0,
             .tiers = run.loan.tiers(),
             .slots = packed_u32s(run.loan.slots()),
             .checksums = packed_u32s(std::span(run.checksums).first(depth))},
            run, deadline);
  run.loan.mark_read();
  checkable_ = depth;
  auto& sent = is_unix_ ? owner_.counts.unix_bytes : owner_.counts.tcp_bytes;
  sent.fetch_add(depth * owner_.host.block_bytes, std::memory_order_relaxed);
}

void PeerConnection::stage(Outgoing& run, const NamespaceId& namespace_id, Bytes hashes, SteadyTime deadline) {
  const std::size_t room = owner_.lanes.lane_bytes() / owner_.host.block_bytes;
  std::vector<std::size_t> blocks;  // of the run, those that lie in NVME
  for (std::size_t at = 0; at < run.loan.depth(); ++at) {
    if (run.loan.tier(at) == Tier::kHost) {
      run.checksums[at] = owner_.host.checksums[run.loan.slots()[at]];
    } else if (blocks.size() < room) {
      blocks.push_back(at);
    } else {
      run.loan.cut(at);
    }
  }
  if (blocks.empty()) {
    return;
  }
  auto lane = take_lane(deadline);
  if (!lane) {
    return run.loan.cut(blocks.front());
  }
  run.lane.emplace(std::move(*lane));
  std::vector<std::int64_t> slots;
  std::vector<std::int64_t> at;
  std::vector<std::uint8_t> wanted;
  for (const std::size_t block : blocks) {
    at.push_back(static_cast<std::int64_t>(slots.size()));
    slots.push_back(run.loan.slots()[block]);
    append(wanted, hash_at(hashes, block));
  }
  std::vector<BlockOutcome> outcomes(blocks.size());
  std::vector<std::uint32_t> checksums(blocks.size());
  owner_.nvme->read({slots, at, namespace_id, wanted.data(), nullptr}, run.lane->rows(), outcomes, checksums);
  std::size_t good_end = run.loan.depth();
  for (std::size_t index = blocks.size(); index-- > 0;) {
    run.checksums[blocks[index]] = checksums[index];
    if (outcomes[index] != BlockOutcome::kGood) {
      good_end = blocks[index];
      if (outcomes[index] == BlockOutcome::kCorrupt) {
        report(namespace_id, Tier::kNvme, hash_at(hashes, blocks[index]));
      }
    }
  }
  run.loan.cut(good_end);
}

std::optional<StagingLanes::Lane> PeerConnection::take_lane(SteadyTime deadline) {
  while (!owner_.is_closing) {
    expire_leases();
    const SteadyTime until =
        std::min({deadline, leases_.next_end().value_or(deadline), PeerSocket::Clock::now() + kLookUp});
    auto lane = owner_.lanes.take(until);
    const SteadyTime now = PeerSocket::Clock::now();
    if (lane || now >= deadline || now < until) {  // before the time: there is no memory for one
      return lane;
    }
  }
  return std::nullopt;
}

void PeerConnection::expire_leases() noexcept {
  owner_.counts.expired.fetch_add(leases_.expire(PeerSocket::Clock::now()), std::memory_order_relaxed);
}

void PeerConnection::send_rows(const PeerGrant& grant, const Outgoing& run, SteadyTime deadline) {
  out_.clear();
  encode_peer_message(grant, out_);
  const std::size_t block_bytes = owner_.host.block_bytes;
  std::vector<iovec> pieces{{.iov_base = out_.data(), .iov_len = out_.size()}};
  const std::uint8_t* staged = run.lane ? run.lane->rows() : nullptr;
  for (std::size_t at = 0; at < run.loan.depth(); ++at) {
    const std::uint8_t* row = owner_.host.rows + run.loan.slots()[at] * block_bytes;
    if (run.loan.tier(at) != Tier::kHost) {
      row = staged;
      staged += block_bytes;
    }
    iovec& last = pieces.back();
    if (static_cast<std::uint8_t*>(last.iov_base) + last.iov_len == row && pieces.size() > 1) {
      last.iov_len += block_bytes;
    } else {
      pieces.push_back({.iov_base = const_cast<std::uint8_t*>(row), .iov_len = block_bytes});
    }
  }
  socket_.send(pieces, deadline);
}

// -- what a reader found wrong ----------------------------------------------------------------------------------------

void PeerConnection::end(const PeerEnd& end) {
  std::optional<Loan> ended;
  std::size_t most = std::exchange(checkable_, 0);
  if (end.lease != 0) {
    checkable_ = most;
    ended = leases_.end(end.lease);
    most = ended ? ended->depth() : 0;
    if (ended && hash_count(end.hashes) == 0) {
      ended->mark_read();
    }
  }
  const std::optional<Opened>& opened = opened_[end.handle];
  if (!opened) {
    return;
  }
  const std::size_t count = std::min({hash_count(end.hashes), most, kMostChecked});
  const SteadyTime deadline = in_ms(owner_.options.handshake_ms);  // of all: what is left is found again
  for (std::size_t at = 0; at < count && !owner_.is_closing && PeerSocket::Clock::now() < deadline; ++at) {
    expire_leases();
    check_own(opened->namespace_id, blocks_of(end.hashes, at, at + 1), deadline);
  }
}

void PeerConnection::check_own(const NamespaceId& namespace_id, Bytes hash, SteadyTime deadline) {
  const std::optional<Loan> own =
      owner_.lender.lend(namespace_id, hash, owner_.nvme != nullptr ? Tier::kNvme : Tier::kHost);
  if (!own || own->depth() == 0) {
    return;
  }
  const std::uint32_t slot = own->slots()[0];
  if (own->tier(0) == Tier::kHost) {
    const std::size_t block_bytes = owner_.host.block_bytes;
    if (crc32c({owner_.host.rows + slot * block_bytes, block_bytes}) != owner_.host.checksums[slot]) {
      report(namespace_id, Tier::kHost, hash.data());
    }
    return;
  }
  auto lane = take_lane(deadline);
  if (!lane) {
    return;
  }
  const std::int64_t from = slot;
  const std::int64_t at = 0;
  BlockOutcome outcome = BlockOutcome::kGood;
  std::uint32_t checksum = 0;
  owner_.nvme->read({{&from, 1}, {&at, 1}, namespace_id, hash.data(), nullptr}, lane->rows(), {&outcome, 1},
                    {&checksum, 1});
  if (outcome == BlockOutcome::kCorrupt) {
    report(namespace_id, Tier::kNvme, hash.data());
  }
}

void PeerConnection::report(const NamespaceId& namespace_id, Tier tier, const std::uint8_t* hash) {
  CorruptBlock block{.namespace_id = namespace_id, .tier = tier, .hash = {}};
  std::copy_n(hash, kHashBytes, block.hash.begin());
  owner_.corrupt.add(block);
  owner_.counts.corrupt_blocks.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace kvbm
