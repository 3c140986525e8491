#include "kvbm/peer_wire.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "check.hpp"
#include "kvbm/hmac.hpp"

using namespace kvbm;

namespace {

using Buffer = std::vector<std::uint8_t>;

Buffer counted(std::uint8_t first, std::size_t size) {
  Buffer bytes(size);
  std::iota(bytes.begin(), bytes.end(), first);
  return bytes;
}

template <class Array>
Array counted_array(std::uint8_t first) {
  Array array;
  std::iota(array.begin(), array.end(), first);
  return array;
}

Bytes bytes_of(std::string_view text) { return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}; }

Buffer column(std::initializer_list<std::uint32_t> entries) {
  Buffer packed(4 * entries.size());
  std::memcpy(packed.data(), std::data(entries), packed.size());
  return packed;
}

std::string hex(Bytes bytes) {
  std::string text;
  for (const std::uint8_t byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

const auto kReaderNonce = counted_array<PeerNonce>(0);
const auto kOwnerNonce = counted_array<PeerNonce>(32);
const std::string kOwner = "pod-\xC3\xBC/3";

// The messages of tests/golden/peer_wire_v1.bin, which the readable twin wrote. What they point into lives as long as
// the program.
std::vector<PeerMessage> golden_messages() {
  static const Buffer hashes48 = counted(1, 48), hashes16 = counted(2, 16), failed = counted(17, 32),
                      root = counted(200, 16);
  static const Buffer host3{1, 1, 1}, mixed{2, 1, 2, 1};
  static const Buffer slots3 = column({4, 2, 0xFFFFFFFF}), sums3 = column({1, 2, 0xDEADBEEF});
  static const Buffer slots4 = column({0, 1, 2, 3}), sums4 = column({10, 11, 12, 13});
  constexpr std::uint64_t kLease = (std::uint64_t{7} << 32) | 1;
  const auto id = counted_array<NamespaceId>(96);
  return {PeerHello{kReaderNonce, 0, kPeerMemory | kPeerTcp, 0, ""},
          PeerHello{kOwnerNonce, 7, kPeerMemory | kPeerTcp, kPeerKeyAsked, kOwner},
          PeerProve{counted_array<PeerProof>(64)},
          PeerOpen{5, id, peer_open_proof(root, kReaderNonce, kOwnerNonce, id, kOwner)},
          PeerOpened{5, true, 65'536},
          PeerOpened{6, false, 0},
          PeerArena{std::uint64_t{1} << 40, 1 << 20, 1 << 20},
          PeerAsk{9, 5, PeerTransport::kMemory, 250, hashes48},
          PeerAsk{10, 5, PeerTransport::kTcp, 0, hashes16},
          PeerGrant{9, kLease, 2'000, host3, slots3, sums3},
          PeerGrant{10, 0, 0, mixed, slots4, sums4},
          PeerBusy{11, 20},
          PeerGone{12, PeerGoneReason::kFenced},
          PeerEnd{kLease, 5, failed},
          PeerEnd{0, 5, {}},
          PeerBye{"closing: 3 s are over"}};
}

PeerHead head_of(Bytes message) { return decode_peer_head(message.first<kPeerHeadBytes>()); }

PeerMessage decoded(Bytes message) {
  const PeerHead head = head_of(message);
  CHECK(message.size() == kPeerHeadBytes + head.body_bytes);
  return decode_peer_body(head.kind, message.subspan(kPeerHeadBytes));
}

Buffer encoded(const PeerMessage& message) {
  Buffer out;
  encode_peer_message(message, out);
  return out;
}

bool refuses(const PeerMessage& message) {
  Buffer out{1, 2, 3};
  const bool is_refused = tests::thrown_code([&] { encode_peer_message(message, out); }) == ErrorCode::kPeerWire;
  return is_refused && out.size() == 3;
}

bool refuses_body(PeerKind kind, Bytes body) {
  return tests::thrown_code([&] { decode_peer_body(kind, body); }) == ErrorCode::kPeerWire;
}

void golden_bytes() {
  const Buffer golden = tests::read_golden("peer_wire_v1.bin");
  Buffer written;
  for (const PeerMessage& message : golden_messages()) {
    encode_peer_message(message, written);
  }
  CHECK(written == golden);
  std::size_t at = 0;
  std::size_t count = 0;
  std::size_t kinds = 0;
  for (; at < golden.size(); ++count) {
    const Bytes rest = Bytes(golden).subspan(at);
    const std::size_t size = kPeerHeadBytes + head_of(rest).body_bytes;
    const PeerMessage message = decoded(rest.first(size));
    CHECK(encoded(message) == Buffer(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(size)));
    kinds |= std::size_t{1} << message.index();
    at += size;
  }
  CHECK(count == golden_messages().size());
  CHECK(kinds == (std::size_t{1} << std::variant_size_v<PeerMessage>)-1);
}

void fields_survive() {
  const Buffer bytes = encoded(golden_messages()[9]);
  const auto grant = std::get<PeerGrant>(decoded(bytes));
  CHECK(grant.request == 9 && grant.lease == ((std::uint64_t{7} << 32) | 1) && grant.lease_ms == 2'000);
  CHECK(grant.tiers.size() == 3 && packed_u32(grant.slots, 2) == 0xFFFFFFFF &&
        packed_u32(grant.checksums, 2) == 0xDEADBEEF);
  const auto hello_bytes = encoded(golden_messages()[1]);
  const auto hello = std::get<PeerHello>(decoded(hello_bytes));
  CHECK(hello.nonce == kOwnerNonce && hello.epoch == 7 && hello.flags == kPeerKeyAsked && hello.instance == kOwner);
}

void proofs() {
  const Buffer root = counted(200, 16);
  const Bytes key = bytes_of("secret key");
  CHECK(hex(peer_key_proof(key, PeerRole::kReader, kReaderNonce, kOwnerNonce, kOwner)) ==
        "3c131883519c3b3f4eaa253a53e5f59b91fad95f95ade1647039bda465371161");
  CHECK(hex(peer_key_proof(key, PeerRole::kOwner, kReaderNonce, kOwnerNonce, kOwner)) ==
        "ff695ba64eded91238ad2efe41fa01456f437d69dadc6bc23a7917ec3d523642");
  CHECK(hex(peer_open_proof(root, kReaderNonce, kOwnerNonce, counted_array<NamespaceId>(96), kOwner)) ==
        "323db6ac6b8a9a66720fee9e6dbba2dc08628653d8f4a1bb44bca51cb0a663a4");
}

void rfc_4231() {
  CHECK(hex(hmac_sha256(Buffer(20, 0x0B), {bytes_of("Hi "), bytes_of("There")})) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256(bytes_of("Jefe"), {bytes_of("what do ya want for nothing?")})) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(Buffer(131, 0xAA), {bytes_of("Test Using Larger Than Block-Size Key - Hash Key First")})) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(equal_in_constant_time(counted(1, 32), counted(1, 32)));
  CHECK(!equal_in_constant_time(counted(1, 32), counted(2, 32)));
  CHECK(!equal_in_constant_time(counted(1, 32), counted(1, 31)));
}

void bad_heads() {
  const Buffer good = encoded(PeerBusy{1, 2});
  const auto refuses_with = [&](std::size_t at, std::uint8_t value) {
    Buffer bad = good;
    bad[at] = value;
    return tests::thrown_code([&] { head_of(bad); }) == ErrorCode::kPeerWire;
  };
  CHECK(head_of(good).kind == PeerKind::kBusy && head_of(good).body_bytes == 8);
  CHECK(refuses_with(0, 11) && refuses_with(0, 13) && refuses_with(0, 0));  // a length that a BUSY cannot have
  CHECK(refuses_with(3, 0xFF));                                             // nearly 4 GiB
  CHECK(refuses_with(4, 0) && refuses_with(4, 2));
  CHECK(refuses_with(5, 0) && refuses_with(5, 12) && refuses_with(5, 255));
  CHECK(refuses_with(6, 1) && refuses_with(7, 1));
  for (std::uint8_t kind = 1; kind <= std::variant_size_v<PeerMessage>; ++kind) {
    for (const std::uint32_t length : {0u, 3u, 1u << 20, 0xFFFFFFFFu}) {
      std::uint8_t head[kPeerHeadBytes]{0, 0, 0, 0, kPeerVersion, kind, 0, 0};
      std::memcpy(head, &length, sizeof length);
      CHECK(tests::thrown_code([&] { decode_peer_head(head); }) == ErrorCode::kPeerWire);
    }
  }
}

void bad_bodies() {
  for (const PeerMessage& message : golden_messages()) {
    Buffer body = encoded(message);
    const PeerKind kind = head_of(body).kind;
    body.erase(body.begin(), body.begin() + kPeerHeadBytes);
    for (std::size_t size = 0; size < body.size(); ++size) {
      CHECK(refuses_body(kind, Bytes(body).first(size)));
    }
    body.push_back(0);
    CHECK(refuses_body(kind, body));
  }
  const auto with = [](const PeerMessage& message, std::size_t at, std::uint8_t value) {
    Buffer body = encoded(message);
    body.erase(body.begin(), body.begin() + kPeerHeadBytes);
    body[at] = value;
    return body;
  };
  const auto golden = golden_messages();
  CHECK(refuses_body(PeerKind::kHello, with(golden[1], 44, 0xFF)));  // no UTF-8
  CHECK(refuses_body(PeerKind::kOpen, with(golden[3], 0, 64)));      // handle
  CHECK(refuses_body(PeerKind::kOpened, with(golden[4], 4, 2)));     // status
  CHECK(refuses_body(PeerKind::kOpened, with(golden[4], 4, 1)));     // not open, but blocks have a size
  CHECK(refuses_body(PeerKind::kOpened, with(golden[5], 4, 0)));     // open, but blocks have none
  CHECK(refuses_body(PeerKind::kArena, with(golden[6], 19, 0x80)));  // slots * stride is past 2**64
  CHECK(refuses_body(PeerKind::kAsk, with(golden[7], 8, 4)));        // transport
  CHECK(refuses_body(PeerKind::kAsk, with(golden[7], 9, 1)));        // a byte that is zero
  CHECK(refuses_body(PeerKind::kAsk, with(golden[7], 19, 0xFF)));    // 4 billion hashes
  CHECK(refuses_body(PeerKind::kGrant, with(golden[9], 19, 0xFF)));  // 4 billion blocks
  CHECK(refuses_body(PeerKind::kGrant, with(golden[9], 20, 0)));     // HBM is not lent
  CHECK(refuses_body(PeerKind::kGrant, with(golden[9], 20, 3)));     // nor OBJECT
  CHECK(refuses_body(PeerKind::kGrant, with(golden[9], 23, 1)));     // the padding
  CHECK(refuses_body(PeerKind::kGone, with(golden[12], 4, 4)));      // reason
  CHECK(refuses_body(PeerKind::kBye, with(golden[15], 5, '\n')));
}

void bad_messages() {
  const std::string long_name(256, 'a');
  const Buffer one_more = counted(0, kHashBytes * (kMostPeerHashes + 1));
  const Buffer four(4);
  CHECK(refuses(PeerHello{kReaderNonce, 0, 1, 0, long_name}));
  CHECK(refuses(PeerHello{kReaderNonce, 0, 1, 0, "\xFF"}));
  CHECK(refuses(PeerAsk{1, 0, PeerTransport::kTcp, 1, {}}));
  CHECK(refuses(PeerAsk{1, 0, PeerTransport::kTcp, 1, one_more}));
  CHECK(refuses(PeerAsk{1, 0, PeerTransport::kTcp, 1, Bytes(one_more).first(17)}));
  CHECK(refuses(PeerAsk{1, 64, PeerTransport::kTcp, 1, Bytes(one_more).first(16)}));
  CHECK(refuses(PeerGrant{1, 0, 0, {}, {}, {}}));
  CHECK(refuses(PeerGrant{1, 0, 0, Bytes(four).first(1), Bytes(four), Bytes(four)}));
  CHECK(refuses(PeerArena{100, 11, 10}));
  CHECK(refuses(PeerArena{100, 0, 10}));
  const Buffer most =
      encoded(PeerAsk{1, 0, PeerTransport::kTcp, 1, Bytes(one_more).first(kHashBytes * kMostPeerHashes)});
  CHECK(std::get<PeerAsk>(decoded(most)).hashes.size() == kHashBytes * kMostPeerHashes);
}

void words_are_made_sayable() {
  const std::string words = "a\nb\xC3\xBC" + std::string(2'000, 'c');
  const Buffer bytes = encoded(PeerBye{words});
  const std::string_view said = std::get<PeerBye>(decoded(bytes)).words;
  CHECK(said.substr(0, 7) == "a?b??cc");
  CHECK(said.size() == kMostPeerWordsBytes);
}

}  // namespace

int main() {
  return tests::run({{"messages are the golden bytes, and come back from them", golden_bytes},
                     {"fields survive the wire", fields_survive},
                     {"proofs are those of the readable twin", proofs},
                     {"HMAC is that of RFC 4231", rfc_4231},
                     {"a head that no message has is refused before its body", bad_heads},
                     {"a body cut short, too long or senseless is refused", bad_bodies},
                     {"a senseless message is not sent", bad_messages},
                     {"what a BYE cannot say is replaced", words_are_made_sayable}});
}
