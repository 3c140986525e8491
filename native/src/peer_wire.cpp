#include "kvbm/peer_wire.hpp"

#include <algorithm>

#include "kvbm/codec.hpp"
#include "kvbm/error.hpp"
#include "kvbm/hmac.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

constexpr std::size_t kKinds = std::variant_size_v<PeerMessage>;

struct KindLimits {
  const char* name;   // for messages
  std::size_t least;  // bytes of a body
  std::size_t most;   // bytes of a body
};

constexpr std::size_t grant_bytes(std::size_t blocks) { return 20 + (blocks + 3) / 4 * 4 + 8 * blocks; }

constexpr std::array<KindLimits, kKinds> kLimits{{
    {"HELLO", 44, 44 + kMostPeerNameBytes},
    {"PROVE", kPeerProofBytes, kPeerProofBytes},
    {"OPEN", 4 + kHashBytes + kPeerProofBytes, 4 + kHashBytes + kPeerProofBytes},
    {"OPENED", 9, 9},
    {"ARENA", 20, 20},
    {"ASK", 20 + kHashBytes, 20 + kHashBytes * kMostPeerHashes},
    {"GRANT", grant_bytes(1), grant_bytes(kMostPeerHashes)},
    {"BUSY", 8, 8},
    {"GONE", 5, 5},
    {"END", 16, 16 + kHashBytes * kMostPeerHashes},
    {"BYE", 2, 2 + kMostPeerWordsBytes},
}};

const KindLimits& limits_of(PeerKind kind) noexcept { return kLimits[static_cast<std::size_t>(kind) - 1]; }

template <class... Pieces>
[[noreturn]] void refuse_peer(const Pieces&... pieces) {
  throw Error(ErrorCode::kPeerWire, words(pieces...));
}

// The words are joined only where they are needed.
template <class... Pieces>
void require(bool is_so, PeerKind kind, const Pieces&... pieces) {
  if (!is_so) {
    refuse_peer(limits_of(kind).name, ": ", pieces...);
  }
}

// Takes a body apart from its beginning. It has the least bytes of its kind, so a fixed field is always there.
class BodyReader {
 public:
  BodyReader(PeerKind kind, Bytes body) noexcept : kind_(kind), rest_(body) {}

  template <class Number>
  Number number() {
    Number value = 0;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  template <class Array>
  Array array() {
    Array value;
    const Bytes bytes = take(value.size());
    std::copy(bytes.begin(), bytes.end(), value.begin());
    return value;
  }
  Bytes take(std::size_t bytes) {
    require(bytes <= rest_.size(), kind_, bytes, " bytes more are due, ", rest_.size(), " are there");
    const Bytes taken = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return taken;
  }
  void zeros(std::size_t bytes) {
    const Bytes taken = take(bytes);
    require(std::all_of(taken.begin(), taken.end(), [](std::uint8_t byte) { return byte == 0; }), kind_,
            "a byte that is zero is not");
  }
  // A count of blocks, judged before it is multiplied.
  std::size_t count(std::size_t least) {
    const auto blocks = number<std::uint32_t>();
    require(blocks >= least && blocks <= kMostPeerHashes, kind_, blocks, " blocks; ", least, " to ", kMostPeerHashes,
            " may be named");
    return blocks;
  }
  void end() const { require(rest_.empty(), kind_, rest_.size(), " bytes after its end"); }

 private:
  PeerKind kind_;  // for messages
  Bytes rest_;     // not taken yet
};

std::string_view text_of(Bytes bytes) noexcept { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
Bytes bytes_of_text(std::string_view text) noexcept {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

bool is_printable(char character) noexcept { return character >= ' ' && character <= '~'; }

// What a message says must make sense by itself; its numbers are within what its fields can hold. Said of both
// directions.
void check(const PeerHello& hello) {
  require(hello.instance.size() <= kMostPeerNameBytes, PeerKind::kHello, "an instance id above 255 bytes");
  require(is_utf8(bytes_of_text(hello.instance)), PeerKind::kHello, "an instance id that is not UTF-8");
}
void check(const PeerProve&) {}
void check(const PeerOpen& open) { require(open.handle < kMostPeerHandles, PeerKind::kOpen, "handle ", open.handle); }
void check(const PeerOpened& opened) {
  require(opened.handle < kMostPeerHandles, PeerKind::kOpened, "handle ", opened.handle);
  require(opened.is_open == (opened.block_bytes > 0), PeerKind::kOpened, "blocks of ", opened.block_bytes, " bytes");
}
void check(const PeerArena& arena) {
  require(arena.slots > 0 && arena.stride > 0 && arena.stride <= arena.bytes / arena.slots, PeerKind::kArena,
          arena.slots, " slots, ", arena.stride, " bytes apart, in ", arena.bytes, " bytes");
}
void check_hashes(PeerKind kind, Bytes hashes, std::size_t least) {
  const std::size_t blocks = hashes.size() / kHashBytes;
  require(hashes.size() % kHashBytes == 0 && blocks >= least && blocks <= kMostPeerHashes, kind, hashes.size(),
          " bytes of hashes");
}
void check(const PeerAsk& ask) {
  require(ask.handle < kMostPeerHandles, PeerKind::kAsk, "handle ", ask.handle);
  require(ask.transport <= PeerTransport::kNixl, PeerKind::kAsk, "transport ", static_cast<unsigned>(ask.transport));
  check_hashes(PeerKind::kAsk, ask.hashes, 1);
}
void check(const PeerGrant& grant) {
  const std::size_t blocks = grant.tiers.size();
  require(blocks > 0 && blocks <= kMostPeerHashes && grant.slots.size() == 4 * blocks &&
              grant.checksums.size() == 4 * blocks,
          PeerKind::kGrant, blocks, " blocks");
  require(std::all_of(grant.tiers.begin(), grant.tiers.end(),
                      [](std::uint8_t tier) {
                        return tier == static_cast<std::uint8_t>(Tier::kHost) ||
                               tier == static_cast<std::uint8_t>(Tier::kNvme);
                      }),
          PeerKind::kGrant, "a tier that is not lent");
}
void check(const PeerBusy&) {}
void check(const PeerGone& gone) {
  require(gone.reason <= PeerGoneReason::kNotOpened, PeerKind::kGone, "reason ", static_cast<unsigned>(gone.reason));
}
void check(const PeerEnd& end) {
  require(end.handle < kMostPeerHandles, PeerKind::kEnd, "handle ", end.handle);
  check_hashes(PeerKind::kEnd, end.hashes, 0);
}
void check(const PeerBye& bye) {
  require(std::all_of(bye.words.begin(), bye.words.end(), is_printable), PeerKind::kBye,
          "words that are not printable ASCII");
}

PeerMessage decode_grant(BodyReader& body) {
  PeerGrant grant{};
  grant.request = body.number<std::uint32_t>();
  grant.lease = body.number<std::uint64_t>();
  grant.lease_ms = body.number<std::uint32_t>();
  const std::size_t blocks = body.count(1);
  grant.tiers = body.take(blocks);
  body.zeros((4 - blocks % 4) % 4);
  grant.slots = body.take(4 * blocks);
  grant.checksums = body.take(4 * blocks);
  return grant;
}

PeerMessage decode_fields(PeerKind kind, BodyReader& body) {  // braces evaluate from left to right
  switch (kind) {
    case PeerKind::kHello: {
      PeerHello hello{body.array<PeerNonce>(),
                      body.number<std::uint64_t>(),
                      body.number<std::uint8_t>(),
                      body.number<std::uint8_t>(),
                      {}};
      hello.instance = text_of(body.take(body.number<std::uint16_t>()));
      return hello;
    }
    case PeerKind::kProve:
      return PeerProve{body.array<PeerProof>()};
    case PeerKind::kOpen:
      return PeerOpen{body.number<std::uint32_t>(), body.array<NamespaceId>(), body.array<PeerProof>()};
    case PeerKind::kOpened: {
      const auto handle = body.number<std::uint32_t>();
      const auto status = body.number<std::uint8_t>();
      require(status <= 1, kind, "status ", static_cast<unsigned>(status));
      return PeerOpened{handle, status == 0, body.number<std::uint32_t>()};
    }
    case PeerKind::kArena:
      return PeerArena{body.number<std::uint64_t>(), body.number<std::uint32_t>(), body.number<std::uint64_t>()};
    case PeerKind::kAsk: {
      PeerAsk ask{body.number<std::uint32_t>(),
                  body.number<std::uint32_t>(),
                  PeerTransport{body.number<std::uint8_t>()},
                  0,
                  {}};
      body.zeros(3);
      ask.time_left_ms = body.number<std::uint32_t>();
      ask.hashes = body.take(kHashBytes * body.count(1));
      return ask;
    }
    case PeerKind::kGrant:
      return decode_grant(body);
    case PeerKind::kBusy:
      return PeerBusy{body.number<std::uint32_t>(), body.number<std::uint32_t>()};
    case PeerKind::kGone:
      return PeerGone{body.number<std::uint32_t>(), PeerGoneReason{body.number<std::uint8_t>()}};
    case PeerKind::kEnd: {
      PeerEnd end{body.number<std::uint64_t>(), body.number<std::uint32_t>(), {}};
      end.hashes = body.take(kHashBytes * body.count(0));
      return end;
    }
    case PeerKind::kBye:
      return PeerBye{text_of(body.take(body.number<std::uint16_t>()))};
  }
  refuse_peer("no message has kind ", static_cast<unsigned>(kind));
}

// Appends the fields of a message one after the other.
class BodyWriter {
 public:
  explicit BodyWriter(std::vector<std::uint8_t>& out) noexcept : out_(out) {}

  template <class Number>
  BodyWriter& number(Number value) {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&value);
    out_.insert(out_.end(), bytes, bytes + sizeof value);
    return *this;
  }
  BodyWriter& bytes(Bytes data) {
    out_.insert(out_.end(), data.begin(), data.end());
    return *this;
  }
  BodyWriter& zeros(std::size_t count) {
    out_.insert(out_.end(), count, 0);
    return *this;
  }

  void fields(const PeerHello& hello) {
    bytes(hello.nonce).number(hello.epoch).number(hello.transports).number(hello.flags);
    number(static_cast<std::uint16_t>(hello.instance.size())).bytes(bytes_of_text(hello.instance));
  }
  void fields(const PeerProve& prove) { bytes(prove.proof); }
  void fields(const PeerOpen& open) { number(open.handle).bytes(open.namespace_id).bytes(open.proof); }
  void fields(const PeerOpened& opened) {
    number(opened.handle).number(static_cast<std::uint8_t>(opened.is_open ? 0 : 1)).number(opened.block_bytes);
  }
  void fields(const PeerArena& arena) { number(arena.bytes).number(arena.slots).number(arena.stride); }
  void fields(const PeerAsk& ask) {
    number(ask.request)
        .number(ask.handle)
        .number(static_cast<std::uint8_t>(ask.transport))
        .zeros(3)
        .number(ask.time_left_ms);
    hashes(ask.hashes);
  }
  void fields(const PeerGrant& grant) {
    const std::size_t blocks = grant.tiers.size();
    number(grant.request).number(grant.lease).number(grant.lease_ms).number(static_cast<std::uint32_t>(blocks));
    bytes(grant.tiers).zeros((4 - blocks % 4) % 4).bytes(grant.slots).bytes(grant.checksums);
  }
  void fields(const PeerBusy& busy) { number(busy.request).number(busy.retry_ms); }
  void fields(const PeerGone& gone) { number(gone.request).number(static_cast<std::uint8_t>(gone.reason)); }
  void fields(const PeerEnd& end) {
    number(end.lease).number(end.handle);
    hashes(end.hashes);
  }
  void fields(const PeerBye& bye) {
    number(static_cast<std::uint16_t>(bye.words.size())).bytes(bytes_of_text(bye.words));
  }

 private:
  void hashes(Bytes packed) { number(static_cast<std::uint32_t>(packed.size() / kHashBytes)).bytes(packed); }

  std::vector<std::uint8_t>& out_;  // where they go
};

// What can be said of it in a BYE.
std::string sayable(std::string_view given) {
  std::string made(given.substr(0, kMostPeerWordsBytes));
  std::replace_if(made.begin(), made.end(), [](char character) { return !is_printable(character); }, '?');
  return made;
}

}  // namespace

PeerHead decode_peer_head(std::span<const std::uint8_t, kPeerHeadBytes> head) {
  std::uint32_t length = 0;
  std::memcpy(&length, head.data(), sizeof length);
  const unsigned version = head[4];
  const unsigned kind = head[5];
  if (version != kPeerVersion) {
    refuse_peer("version ", version, " of the protocol; this is version ", static_cast<unsigned>(kPeerVersion));
  }
  if (kind == 0 || kind > kKinds) {
    refuse_peer("no message has kind ", kind);
  }
  if (head[6] != 0 || head[7] != 0) {
    refuse_peer("the last two bytes of a head are not zero");
  }
  const KindLimits& limits = kLimits[kind - 1];
  constexpr std::size_t kCounted = kPeerHeadBytes - sizeof length;  // of the head, by its length
  if (length < limits.least + kCounted || length > limits.most + kCounted) {
    refuse_peer(limits.name, ": ", length, " bytes are announced; ", limits.least + kCounted, " to ",
                limits.most + kCounted, " can be");
  }
  return {static_cast<PeerKind>(kind), length - kCounted};
}

PeerMessage decode_peer_body(PeerKind kind, Bytes body) {
  BodyReader reader(kind, body);
  PeerMessage message = decode_fields(kind, reader);
  reader.end();
  std::visit([](const auto& fields) { check(fields); }, message);
  return message;
}

void encode_peer_message(const PeerMessage& message, std::vector<std::uint8_t>& out) {
  if (const auto* const bye = std::get_if<PeerBye>(&message)) {
    const std::string said = sayable(bye->words);
    if (said != bye->words) {
      return encode_peer_message(PeerBye{said}, out);
    }
  }
  std::visit([](const auto& fields) { check(fields); }, message);
  const std::size_t begin = out.size();
  out.insert(out.end(), {0, 0, 0, 0, kPeerVersion, static_cast<std::uint8_t>(message.index() + 1), 0, 0});
  BodyWriter writer(out);
  std::visit([&](const auto& fields) { writer.fields(fields); }, message);
  const auto length = static_cast<std::uint32_t>(out.size() - begin - sizeof(std::uint32_t));
  std::memcpy(out.data() + begin, &length, sizeof length);
}

PeerProof peer_key_proof(Bytes key, PeerRole role, const PeerNonce& reader, const PeerNonce& owner,
                         std::string_view owner_id) noexcept {
  const std::uint8_t who = static_cast<std::uint8_t>(role);
  return hmac_sha256(key, {bytes_of_text("kvbm-peer-1"), Bytes(&who, 1), reader, owner, bytes_of_text(owner_id)});
}

PeerProof peer_open_proof(Bytes root, const PeerNonce& reader, const PeerNonce& owner, const NamespaceId& namespace_id,
                          std::string_view owner_id) noexcept {
  return hmac_sha256(root, {bytes_of_text("kvbm-open-1"), reader, owner, namespace_id, bytes_of_text(owner_id)});
}

}  // namespace kvbm
