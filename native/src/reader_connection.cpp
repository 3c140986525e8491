#include "kvbm/reader_connection.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <variant>

#include <unistd.h>

#include "kvbm/entropy.hpp"
#include "kvbm/error.hpp"
#include "kvbm/hmac.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

[[noreturn]] void refuse_answer(std::string why) { throw Error(ErrorCode::kPeerWire, std::move(why)); }

template <class Expected>
Expected expected(const PeerMessage& message, const char* name) {
  const auto* const found = std::get_if<Expected>(&message);
  if (found == nullptr) {
    refuse_answer(words("a message of kind ", message.index() + 1, " where ", name, " is due"));
  }
  return *found;
}

PeerNonce fresh_nonce() {
  PeerNonce nonce;
  for (std::size_t at = 0; at < nonce.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random_word();
    std::memcpy(nonce.data() + at, &word, sizeof word);
  }
  return nonce;
}

std::uint32_t ms_left(PeerMoment deadline) noexcept {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - PeerClock::now()).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 1, std::numeric_limits<std::uint32_t>::max()));
}

PeerMoment handshake_deadline(const PeerTarget& target, PeerMoment deadline) {
  return std::min(deadline, PeerClock::now() + std::chrono::milliseconds(target.handshake_ms));
}

ReaderSocket connected(const PeerTarget& target, PeerMoment deadline) {
  if (target.transport == PeerTransport::kTcp) {
    ReaderSocket plain = ReaderSocket::to_tcp(target.address, target.port, deadline);
    if (target.tls) {
      plain.secure(*target.tls, deadline);
    }
    return plain;
  }
  ReaderSocket socket = ReaderSocket::to_unix(target.address, deadline);
  if (socket.peer_user() != geteuid()) {
    throw PeerTrouble(words("user ", socket.peer_user(), " answers at its socket, this is user ", geteuid()));
  }
  return socket;
}

}  // namespace

ReaderConnection::ReaderConnection(const PeerTarget& target, SharedMapping& mapping, PeerMoment deadline)
    : socket_(connected(target, handshake_deadline(target, deadline))),
      transport_(target.transport),
      shared_(mapping),
      ours_(fresh_nonce()) {
  shake_hands(target, handshake_deadline(target, deadline));
}

void ReaderConnection::shake_hands(const PeerTarget& target, PeerMoment deadline) {
  const std::uint8_t wanted = target.transport == PeerTransport::kTcp ? kPeerTcp : kPeerMemory;
  socket_.send(PeerHello{ours_, 0, wanted, 0, target.reader}, deadline);
  const auto hello = expected<PeerHello>(answer(deadline), "HELLO");
  if (!target.owner.empty() && hello.instance != target.owner) {
    throw PeerTrouble("another instance answers at its address");
  }
  if ((hello.transports & wanted) == 0) {
    throw PeerTrouble("it does not lend in this way");
  }
  if (hello.nonce == ours_) {
    refuse_answer("it sends back what was said to it");
  }
  theirs_ = hello.nonce;
  owner_ = hello.instance;
  const bool is_keyed = (hello.flags & kPeerKeyAsked) != 0;
  if (!is_keyed && target.transport == PeerTransport::kTcp && (target.tls == nullptr || !target.key.empty())) {
    throw PeerTrouble("it asks for no key, so it does not prove that it is itself");
  }
  if (is_keyed) {
    prove(target, deadline);
  }
}

void ReaderConnection::prove(const PeerTarget& target, PeerMoment deadline) {
  if (target.key.empty()) {
    throw PeerTrouble("it asks for a key, and this instance has none");
  }
  socket_.send(PeerProve{peer_key_proof(target.key, PeerRole::kReader, ours_, theirs_, owner_)}, deadline);
  const auto proved = expected<PeerProve>(answer(deadline), "PROVE");
  if (!equal_in_constant_time(proved.proof, peer_key_proof(target.key, PeerRole::kOwner, ours_, theirs_, owner_))) {
    throw PeerTrouble("it does not have the key");
  }
}

PeerMessage ReaderConnection::answer(PeerMoment deadline) {
  while (true) {
    const PeerMessage message = socket_.receive(deadline);
    if (const auto* const bye = std::get_if<PeerBye>(&message)) {
      throw PeerTrouble(words("it hangs up: ", bye->words));
    }
    may_be_stale = false;
    const auto* const arena = std::get_if<PeerArena>(&message);
    if (arena == nullptr) {
      return message;
    }
    const std::optional<PeerDescriptor> file = socket_.take_descriptor();
    if (!file || mapping_ || transport_ != PeerTransport::kMemory) {
      refuse_answer("ARENA without a descriptor, for the second time, or where no memory was asked for");
    }
    mapping_ = shared_.of(*arena, *file);
  }
}

bool ReaderConnection::has_room_for(const NamespaceId& namespace_id) const noexcept {
  return next_handle_ < kMostPeerHandles || open_.contains(namespace_id);
}

PeerOpening ReaderConnection::open(const NamespaceId& namespace_id, const SequenceHash& root, PeerMoment deadline) {
  if (const auto found = open_.find(namespace_id); found != open_.end()) {
    return found->second;
  }
  if (next_handle_ == kMostPeerHandles) {
    throw PeerTrouble(words(kMostPeerHandles, " namespaces are open on a connection already"));
  }
  socket_.send(PeerOpen{next_handle_, namespace_id, peer_open_proof(root, ours_, theirs_, namespace_id, owner_)},
               deadline);
  const auto opened = expected<PeerOpened>(answer(deadline), "OPENED");
  if (opened.handle != next_handle_) {
    refuse_answer(words("OPENED: handle ", opened.handle, ", not ", next_handle_));
  }
  if (!opened.is_open) {
    return {};
  }
  const PeerOpening opening{next_handle_++, opened.block_bytes};
  open_.emplace(namespace_id, opening);
  return opening;
}

PeerMessage ReaderConnection::ask(std::uint32_t handle, Bytes hashes, PeerMoment deadline) {
  const std::uint32_t request = next_request_++;
  socket_.send(PeerAsk{request, handle, transport_, ms_left(deadline), hashes}, deadline);
  const PeerMessage message = answer(deadline);
  std::optional<std::uint32_t> answered;
  if (const auto* const grant = std::get_if<PeerGrant>(&message)) {
    answered = grant->request;
    if (grant->tiers.size() > hashes.size() / kHashBytes) {
      refuse_answer(
          words("GRANT: ", grant->tiers.size(), " blocks of ", hashes.size() / kHashBytes, " that were asked for"));
    }
  } else if (const auto* const busy = std::get_if<PeerBusy>(&message)) {
    answered = busy->request;
  } else {
    answered = expected<PeerGone>(message, "GRANT, BUSY or GONE").request;
  }
  if (*answered != request) {
    refuse_answer(words("request ", *answered, " is answered, ", request, " was asked"));
  }
  return message;
}

void ReaderConnection::end(std::uint64_t lease, std::uint32_t handle, Bytes failed, PeerMoment deadline) {
  socket_.send(PeerEnd{lease, handle, failed}, deadline);
}

const PeerMapping& ReaderConnection::mapping() const {
  if (!mapping_) {
    refuse_answer("GRANT of memory that never came");
  }
  return *mapping_;
}

}  // namespace kvbm
