#include "kvbm/peer_wire.hpp"

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

nb::str python_text(std::string_view text) { return nb::str(text.data(), text.size()); }

// The fields of a message, as those of its class in kvbm.transport.wire.
struct Fields {
  nb::tuple operator()(const PeerHello& hello) const {
    return nb::make_tuple(copy_bytes(hello.nonce), hello.epoch, hello.transports, hello.flags,
                          python_text(hello.instance));
  }
  nb::tuple operator()(const PeerProve& prove) const { return nb::make_tuple(copy_bytes(prove.proof)); }
  nb::tuple operator()(const PeerOpen& open) const {
    return nb::make_tuple(open.handle, copy_bytes(open.namespace_id), copy_bytes(open.proof));
  }
  nb::tuple operator()(const PeerOpened& opened) const {
    return nb::make_tuple(opened.handle, opened.is_open, opened.block_bytes);
  }
  nb::tuple operator()(const PeerArena& arena) const { return nb::make_tuple(arena.bytes, arena.slots, arena.stride); }
  nb::tuple operator()(const PeerAsk& ask) const {
    return nb::make_tuple(ask.request, ask.handle, static_cast<unsigned>(ask.transport), ask.time_left_ms,
                          copy_bytes(ask.hashes));
  }
  nb::tuple operator()(const PeerGrant& grant) const {
    return nb::make_tuple(grant.request, grant.lease, grant.lease_ms, copy_bytes(grant.tiers), copy_bytes(grant.slots),
                          copy_bytes(grant.checksums));
  }
  nb::tuple operator()(const PeerBusy& busy) const { return nb::make_tuple(busy.request, busy.retry_ms); }
  nb::tuple operator()(const PeerGone& gone) const {
    return nb::make_tuple(gone.request, static_cast<unsigned>(gone.reason));
  }
  nb::tuple operator()(const PeerEnd& end) const {
    return nb::make_tuple(end.lease, end.handle, copy_bytes(end.hashes));
  }
  nb::tuple operator()(const PeerBye& bye) const { return nb::make_tuple(python_text(bye.words)); }
};

// A message from the fields of its class, which it points into.
class Given {
 public:
  explicit Given(nb::tuple fields) : fields_(std::move(fields)) {}

  PeerMessage message(PeerKind kind) {
    switch (kind) {
      case PeerKind::kHello:
        return PeerHello{array<PeerNonce>(0), whole<std::uint64_t>(1), whole<std::uint8_t>(2), whole<std::uint8_t>(3),
                         text(4)};
      case PeerKind::kProve:
        return PeerProve{array<PeerProof>(0)};
      case PeerKind::kOpen:
        return PeerOpen{whole<std::uint32_t>(0), array<NamespaceId>(1), array<PeerProof>(2)};
      case PeerKind::kOpened:
        return PeerOpened{whole<std::uint32_t>(0), is_true(fields_[1]), whole<std::uint32_t>(2)};
      case PeerKind::kArena:
        return PeerArena{whole<std::uint64_t>(0), whole<std::uint32_t>(1), whole<std::uint64_t>(2)};
      case PeerKind::kAsk:
        return PeerAsk{whole<std::uint32_t>(0), whole<std::uint32_t>(1), PeerTransport{whole<std::uint8_t>(2)},
                       whole<std::uint32_t>(3), bytes(4)};
      case PeerKind::kGrant:
        return PeerGrant{
            whole<std::uint32_t>(0), whole<std::uint64_t>(1), whole<std::uint32_t>(2), bytes(3), bytes(4), bytes(5)};
      case PeerKind::kBusy:
        return PeerBusy{whole<std::uint32_t>(0), whole<std::uint32_t>(1)};
      case PeerKind::kGone:
        return PeerGone{whole<std::uint32_t>(0), PeerGoneReason{whole<std::uint8_t>(1)}};
      case PeerKind::kEnd:
        return PeerEnd{whole<std::uint64_t>(0), whole<std::uint32_t>(1), bytes(2)};
      case PeerKind::kBye:
        return PeerBye{text(0)};
    }
    throw Error(ErrorCode::kPeerWire, "no message has this kind");
  }

 private:
  template <class Number>
  Number whole(std::size_t at) {
    try {
      return number<Number>(nb::handle(nb::object(fields_[at])));
    } catch (const Error& error) {
      throw Error(ErrorCode::kPeerWire, error.detail());
    }
  }
  Bytes bytes(std::size_t at) { return kept_bytes(fields_[at], keepers_); }
  std::string_view text(std::size_t at) {
    try {
      return utf8(keepers_.emplace_back(fields_[at]), "a text");
    } catch (const Error& error) {
      throw Error(ErrorCode::kPeerWire, error.detail());
    }
  }
  template <class Array>
  Array array(std::size_t at) {
    const Bytes given = bytes(at);
    Array made;
    if (given.size() != made.size()) {
      throw Error(ErrorCode::kPeerWire, std::to_string(given.size()) + " bytes, not " + std::to_string(made.size()));
    }
    std::copy(given.begin(), given.end(), made.begin());
    return made;
  }

  nb::tuple fields_;  // as they were given
  Keepers keepers_;   // what the message points into
};

nb::tuple decode(const nb::bytes& data) {
  const Bytes all = view_of(data);
  if (all.size() < kPeerHeadBytes) {
    throw Error(ErrorCode::kPeerWire, "half a head");
  }
  const PeerHead head = decode_peer_head(all.first<kPeerHeadBytes>());
  if (all.size() != kPeerHeadBytes + head.body_bytes) {
    throw Error(ErrorCode::kPeerWire, "half a message, or more than one");
  }
  return nb::make_tuple(static_cast<unsigned>(head.kind),
                        std::visit(Fields{}, decode_peer_body(head.kind, all.subspan(kPeerHeadBytes))));
}

nb::bytes encode(unsigned kind, const nb::tuple& fields) {
  std::vector<std::uint8_t> out;
  Given given(fields);
  if (kind > std::variant_size_v<PeerMessage>) {
    throw Error(ErrorCode::kPeerWire, "no message has this kind");
  }
  encode_peer_message(given.message(static_cast<PeerKind>(kind)), out);
  return copy_bytes(out);
}

PeerNonce nonce_of(const nb::bytes& given) {
  PeerNonce nonce;
  if (given.size() != nonce.size()) {
    throw Error(ErrorCode::kPeerWire, "a nonce has 32 bytes");
  }
  const Bytes bytes = view_of(given);
  std::copy(bytes.begin(), bytes.end(), nonce.begin());
  return nonce;
}

}  // namespace

void bind_peer_wire(nb::module_& module, const SharedErrors& errors) {
  module.def(
      "decode_peer_message",
      [errors](const nb::bytes& data) { return translated(errors, [&] { return decode(data); }); }, nb::arg("data"),
      "Kind and fields of one message, as kvbm.transport.wire has them. Raises PeerWireError.");
  module.def(
      "encode_peer_message",
      [errors](unsigned kind, const nb::tuple& fields) {
        return translated(errors, [&] { return encode(kind, fields); });
      },
      nb::arg("kind"), nb::arg("fields"), "As kvbm.transport.wire.encode. Raises PeerWireError.");
  module.def(
      "peer_key_proof",
      [errors](const nb::bytes& key, unsigned role, const nb::bytes& reader, const nb::bytes& owner,
               const std::string& owner_id) {
        return translated(errors, [&] {
          return copy_bytes(
              peer_key_proof(view_of(key), static_cast<PeerRole>(role), nonce_of(reader), nonce_of(owner), owner_id));
        });
      },
      nb::arg("key"), nb::arg("role"), nb::arg("reader_nonce"), nb::arg("owner_nonce"), nb::arg("owner"),
      "As kvbm.transport.wire.key_proof.");
  module.def(
      "peer_open_proof",
      [errors](const nb::bytes& root, const nb::bytes& reader, const nb::bytes& owner, const nb::bytes& namespace_id,
               const std::string& owner_id) {
        return translated(errors, [&] {
          return copy_bytes(peer_open_proof(view_of(root), nonce_of(reader), nonce_of(owner),
                                            sixteen(namespace_id, "a namespace"), owner_id));
        });
      },
      nb::arg("root"), nb::arg("reader_nonce"), nb::arg("owner_nonce"), nb::arg("namespace"), nb::arg("owner"),
      "As kvbm.transport.wire.open_proof.");
}

}  // namespace kvbm::bindings
