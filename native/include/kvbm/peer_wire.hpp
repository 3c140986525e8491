// What instances say to one another when one lends blocks to another: version 1. Native implementation of
// kvbm/transport/wire.py, which says what each message means.
//
// A message is a head of 8 bytes and a body; all numbers are little-endian. A head is judged before its body is
// awaited, so a stranger can announce no more than a message of its kind may have. What was decoded points into the
// bytes it was read from. Pure functions and values; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

inline constexpr std::uint8_t kPeerVersion = 1;
inline constexpr std::size_t kPeerHeadBytes = 8;        // u32 length of what follows it, u8 version, u8 kind, u16 zero
inline constexpr std::size_t kMostPeerHashes = 8'192;   // of one ASK, GRANT or END
inline constexpr std::uint32_t kMostPeerHandles = 64;   // namespaces open on one connection
inline constexpr std::size_t kMostPeerNameBytes = 255;  // of an instance id
inline constexpr std::size_t kMostPeerWordsBytes = 1'024;  // of a BYE
inline constexpr std::size_t kPeerProofBytes = 32;
inline constexpr std::uint8_t kPeerMemory = 1;  // bits of PeerHello::transports
inline constexpr std::uint8_t kPeerTcp = 2;
inline constexpr std::uint8_t kPeerRdma = 4;
inline constexpr std::uint8_t kPeerNixl = 8;
inline constexpr std::uint8_t kPeerKeyAsked = 1;  // bit of PeerHello::flags

using PeerNonce = std::array<std::uint8_t, 32>;
using PeerProof = std::array<std::uint8_t, kPeerProofBytes>;

enum class PeerRole : std::uint8_t { kReader = 0, kOwner = 1 };
enum class PeerTransport : std::uint8_t { kMemory = 0, kTcp = 1, kRdma = 2, kNixl = 3 };
enum class PeerGoneReason : std::uint8_t { kNotHeld = 0, kClosing = 1, kFenced = 2, kNotOpened = 3 };
inline constexpr std::size_t kPeerGoneReasons = 4;

enum class PeerKind : std::uint8_t {
  kHello = 1,
  kProve = 2,
  kOpen = 3,
  kOpened = 4,
  kArena = 5,
  kAsk = 6,
  kGrant = 7,
  kBusy = 8,
  kGone = 9,
  kEnd = 10,
  kBye = 11
};

struct PeerHello {
  PeerNonce nonce;            // fresh for this connection
  std::uint64_t epoch;        // of the owner; 0 from a reader, and where a key is asked for
  std::uint8_t transports;    // kPeerMemory, kPeerTcp, kPeerRdma, kPeerNixl
  std::uint8_t flags;         // kPeerKeyAsked
  std::string_view instance;  // UTF-8, at most 255 bytes
};
struct PeerProve {
  PeerProof proof;  // peer_key_proof
};
struct PeerOpen {
  std::uint32_t handle;      // the reader's choice, below kMostPeerHandles
  NamespaceId namespace_id;  // what is opened
  PeerProof proof;           // peer_open_proof
};
struct PeerOpened {
  std::uint32_t handle;       // of the PeerOpen
  bool is_open;               // false: unknown, or the proof is wrong; the two are not told apart
  std::uint32_t block_bytes;  // of its blocks, at least 1; 0 where it is not open
};
struct PeerArena {
  std::uint64_t bytes;   // of the mapping
  std::uint32_t slots;   // of HOST, at least 1
  std::uint64_t stride;  // bytes from the start of a slot to that of the next; slots * stride <= bytes
};
struct PeerAsk {
  std::uint32_t request;       // the reader's number
  std::uint32_t handle;        // of an open namespace
  PeerTransport transport;     // how the bytes are to come
  std::uint32_t time_left_ms;  // after which nobody waits for an answer
  Bytes hashes;                // packed, 1 to kMostPeerHashes
};
struct PeerGrant {
  std::uint32_t request;   // of the PeerAsk
  std::uint64_t lease;     // 0: the bytes of the blocks follow the message at once
  std::uint32_t lease_ms;  // how long it lasts
  Bytes tiers;             // a byte for each block, HOST or NVME; at least 1 block
  Bytes slots;             // packed u32
  Bytes checksums;         // packed u32, CRC-32C
};
struct PeerBusy {
  std::uint32_t request;   // of the PeerAsk
  std::uint32_t retry_ms;  // when to ask again
};
struct PeerGone {
  std::uint32_t request;  // of the PeerAsk
  PeerGoneReason reason;  // why there is nothing
};
struct PeerEnd {
  std::uint64_t lease;   // that ends; 0: of a grant whose bytes came behind it
  std::uint32_t handle;  // of the namespace of the hashes
  Bytes hashes;          // packed: blocks whose checksum failed, none to kMostPeerHashes
};
struct PeerBye {
  std::string_view words;  // why, printable ASCII
};

// In the order of PeerKind, from 1 on.
using PeerMessage = std::variant<PeerHello, PeerProve, PeerOpen, PeerOpened, PeerArena, PeerAsk, PeerGrant, PeerBusy,
                                 PeerGone, PeerEnd, PeerBye>;

struct PeerHead {
  PeerKind kind;
  std::size_t body_bytes;  // no more than a message of this kind may have
};

// Throws Error: kPeerWire, another version, no kind, or a length that no such message has.
PeerHead decode_peer_head(std::span<const std::uint8_t, kPeerHeadBytes> head);

// The body of a message, all of it. Throws Error: kPeerWire.
PeerMessage decode_peer_body(PeerKind kind, Bytes body);

// Appends a message, head and all. What a BYE cannot say becomes '?', and its end is cut. Throws Error: kPeerWire, and
// appends nothing, when decoding it would.
void encode_peer_message(const PeerMessage& message, std::vector<std::uint8_t>& out);

// What shows that both have the key: HMAC-SHA256(key, "kvbm-peer-1", role, both nonces, the owner's instance id).
PeerProof peer_key_proof(Bytes key, PeerRole role, const PeerNonce& reader, const PeerNonce& owner,
                         std::string_view owner_id) noexcept;

// What shows that a reader has a namespace's root, to this owner alone: HMAC-SHA256(root, "kvbm-open-1", both nonces,
// the namespace, the owner's instance id).
PeerProof peer_open_proof(Bytes root, const PeerNonce& reader, const PeerNonce& owner, const NamespaceId& namespace_id,
                          std::string_view owner_id) noexcept;

// Entry of a packed column of u32.
inline std::uint32_t packed_u32(Bytes column, std::size_t entry) noexcept {
  std::uint32_t value = 0;
  std::memcpy(&value, column.data() + sizeof value * entry, sizeof value);
  return value;
}

}  // namespace kvbm
