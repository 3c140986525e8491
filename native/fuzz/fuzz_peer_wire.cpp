// Any bytes are messages or an Error, what is read lies within them, is written as it was, and asks for no memory.
#include <algorithm>
#include <string_view>
#include <variant>
#include <vector>

#include "fuzz.hpp"
#include "kvbm/error.hpp"
#include "kvbm/peer_wire.hpp"

using namespace kvbm;

namespace {

constexpr std::size_t kWordsBytes = 4'096;  // what the words of an Error may ask for

bool lies_in(Bytes part, Bytes whole) {
  return part.empty() || (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
}

Bytes bytes_of(std::string_view text) { return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}; }

struct PartsOf {
  std::vector<Bytes> operator()(const PeerHello& hello) const { return {bytes_of(hello.instance)}; }
  std::vector<Bytes> operator()(const PeerAsk& ask) const { return {ask.hashes}; }
  std::vector<Bytes> operator()(const PeerGrant& grant) const { return {grant.tiers, grant.slots, grant.checksums}; }
  std::vector<Bytes> operator()(const PeerEnd& end) const { return {end.hashes}; }
  std::vector<Bytes> operator()(const PeerBye& bye) const { return {bytes_of(bye.words)}; }
  template <class Message>
  std::vector<Bytes> operator()(const Message&) const {
    return {};
  }
};

// Bytes of the message that begins there; 0: none does.
std::size_t message_bytes(Bytes data) {
  const fuzz::MemoryMeter meter;
  std::size_t size = 0;
  std::vector<std::uint8_t> written;
  try {
    const PeerHead head = decode_peer_head(data.first<kPeerHeadBytes>());
    size = kPeerHeadBytes + head.body_bytes;
    if (size > data.size()) {
      return 0;
    }
    const Bytes body = data.subspan(kPeerHeadBytes, head.body_bytes);
    const PeerMessage message = decode_peer_body(head.kind, body);
    REQUIRE(meter.bytes() == 0);
    for (const Bytes part : std::visit(PartsOf{}, message)) {
      REQUIRE(lies_in(part, body));
    }
    encode_peer_message(message, written);
  } catch (const Error& error) {
    REQUIRE(error.code() == ErrorCode::kPeerWire);
    REQUIRE(meter.bytes() <= kWordsBytes);
    return 0;
  }
  REQUIRE(written.size() == size && std::equal(written.begin(), written.end(), data.begin()));
  return size;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  fuzz::MemoryMeter::install();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes rest(data, size);
  while (rest.size() >= kPeerHeadBytes) {
    const std::size_t taken = message_bytes(rest);
    if (taken == 0) {
      break;
    }
    rest = rest.subspan(taken);
  }
  return 0;
}
