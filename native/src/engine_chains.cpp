#include "kvbm/engine_chains.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "kvbm/hashing.hpp"
#include "kvbm/sha256.hpp"

namespace kvbm {
namespace {

constexpr std::size_t kMostTokenBytes = 7;   // of one as pickle writes it
constexpr std::size_t kMostFrameBytes = 64;  // of a message beside its tokens and extra keys

static_assert(std::endian::native == std::endian::little);

// What is hashed of one block, written from front to end. Owner thread only.
class Message {
 public:
  explicit Message(std::size_t most_bytes) : bytes_(most_bytes) {}

  void clear() noexcept { end_ = bytes_.data(); }
  void byte(unsigned value) noexcept { *end_++ = static_cast<std::uint8_t>(value); }
  void bytes(Bytes some) noexcept {
    if (!some.empty()) {
      std::memcpy(end_, some.data(), some.size());
      end_ += some.size();
    }
  }
  // The low `count` bytes of a number, the lowest first.
  void little(std::uint64_t value, std::size_t count) noexcept {
    std::memcpy(end_, &value, count);
    end_ += count;
  }
  // The low 2 or 4 bytes of a number, the highest first.
  void big16(std::uint32_t value) noexcept { little(__builtin_bswap16(static_cast<std::uint16_t>(value)), 2); }
  void big32(std::uint32_t value) noexcept { little(__builtin_bswap32(value), 4); }
  std::uint8_t* end() noexcept { return end_; }
  Bytes all() const noexcept { return {bytes_.data(), static_cast<std::size_t>(end_ - bytes_.data())}; }

 private:
  std::vector<std::uint8_t> bytes_;    // room for the longest
  std::uint8_t* end_ = bytes_.data();  // where the next byte goes
};

using Tokens = std::span<const std::uint32_t>;

void write_pickle(Message& message, Bytes before, Tokens tokens, Bytes keys) noexcept {
  constexpr unsigned kMemoize = 0x94;
  const bool is_long = tokens.size() > 3;  // the opcodes of shorter tuples say how many there are
  message.byte(0x80), message.byte(5), message.byte(0x95);
  std::uint8_t* const length = message.end();
  message.little(0, 8);
  message.byte('C'), message.byte(kDigestBytes), message.bytes(before), message.byte(kMemoize);
  if (is_long) {
    message.byte('(');
  }
  for (const std::uint32_t token : tokens) {
    if (token <= 0xFF) {
      message.byte('K'), message.byte(token);
    } else if (token <= 0xFFFF) {
      message.byte('M'), message.little(token, 2);
    } else if (token <= 0x7FFFFFFF) {
      message.byte('J'), message.little(token, 4);
    } else {
      message.byte(0x8A), message.byte(5), message.little(token, 5);
    }
  }
  message.byte(is_long ? 't' : 0x84 + static_cast<unsigned>(tokens.size())), message.byte(kMemoize);
  keys.empty() ? message.byte('N') : message.bytes(keys);
  message.byte(0x87), message.byte(kMemoize), message.byte('.');
  const auto body = static_cast<std::uint64_t>(message.end() - length - 8);
  std::memcpy(length, &body, sizeof body);
}

// The head of a value of CBOR.
void write_head(Message& message, unsigned major, std::uint32_t value) noexcept {
  const unsigned head = major << 5;
  if (value < 24) {
    message.byte(head | value);
  } else if (value <= 0xFF) {
    message.byte(head | 24), message.byte(value);
  } else if (value <= 0xFFFF) {
    message.byte(head | 25), message.big16(value);
  } else {
    message.byte(head | 26), message.big32(value);
  }
}

void write_cbor(Message& message, Bytes before, Tokens tokens, Bytes keys) noexcept {
  message.byte(0x83), message.byte(0x58), message.byte(kDigestBytes), message.bytes(before);
  write_head(message, 4, static_cast<std::uint32_t>(tokens.size()));
  for (const std::uint32_t token : tokens) {
    write_head(message, 0, token);
  }
  keys.empty() ? message.byte(0xF6) : message.bytes(keys);
}

void write_plain(Message& message, Bytes before, Tokens tokens, Bytes keys) noexcept {
  message.bytes(before);
  message.bytes({reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size_bytes()});
  message.bytes(keys);
}

using Write = void (*)(Message& message, Bytes before, Tokens tokens, Bytes keys) noexcept;
constexpr std::array<Write, 3> kWrites{write_pickle, write_cbor, write_plain};

}  // namespace

std::optional<EngineChain> engine_chain(std::string_view name) noexcept {
  constexpr std::array<std::string_view, 3> kNames{"vllm-sha256", "vllm-sha256_cbor", "sglang-sha256"};
  const auto found = std::ranges::find(kNames, name);
  if (found == kNames.end()) {
    return std::nullopt;
  }
  return static_cast<EngineChain>(found - kNames.begin());
}

void engine_digests(EngineChain chain, std::span<const std::uint32_t> tokens, std::size_t hash_tokens, Bytes begin,
                    std::span<const Bytes> keys, std::span<std::uint8_t> out) {
  std::size_t key_bytes = 0;
  for (const Bytes key : keys) {
    key_bytes = std::max(key_bytes, key.size());
  }
  Message message(kMostFrameBytes + kMostTokenBytes * hash_tokens + key_bytes);
  const Write write = kWrites[static_cast<std::size_t>(chain)];
  const Sha256Compress compress = sha256_compress();
  Bytes before = begin;
  for (std::size_t at = 0; at < tokens.size() / hash_tokens; ++at) {
    message.clear();
    write(message, before, tokens.subspan(at * hash_tokens, hash_tokens), keys.empty() ? Bytes() : keys[at]);
    Sha256 sha(compress);
    sha.update(message.all());
    const auto digest = sha.finish();
    const auto place = out.subspan(at * kDigestBytes, kDigestBytes);
    std::ranges::copy(digest, place.begin());
    before = place;
  }
}

void digest_hashes(const SequenceHash& root, Bytes digests, std::size_t scale, bool in_hex,
                   std::span<std::uint8_t> out) noexcept {
  constexpr std::size_t kAtOnce = 64;
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::array<Bytes, kAtOnce> views;
  std::array<std::array<std::uint8_t, 2 * kDigestBytes>, kAtOnce> texts;
  const std::size_t blocks = digests.size() / kDigestBytes / scale;
  for (std::size_t begin = 0; begin < blocks; begin += kAtOnce) {
    const std::size_t some = std::min(kAtOnce, blocks - begin);
    for (std::size_t at = 0; at < some; ++at) {
      views[at] = digests.subspan(((begin + at + 1) * scale - 1) * kDigestBytes, kDigestBytes);
      if (in_hex) {
        for (std::size_t byte = 0; byte < kDigestBytes; ++byte) {
          texts[at][2 * byte] = static_cast<std::uint8_t>(kDigits[views[at][byte] >> 4]);
          texts[at][2 * byte + 1] = static_cast<std::uint8_t>(kDigits[views[at][byte] & 15]);
        }
        views[at] = texts[at];
      }
    }
    derived_hashes(root, std::span(views).first(some), out.subspan(begin * kHashBytes, some * kHashBytes));
  }
}

}  // namespace kvbm
