#include "kvbm/engine_chains.hpp"

#include <algorithm>
#include <string>
#include <string_view>

#include "check.hpp"
#include "kvbm/hashing.hpp"

using namespace kvbm;
using tests::Random;

namespace {

using Buffer = std::vector<std::uint8_t>;
constexpr EngineChain kChains[] = {EngineChain::kVllmSha256, EngineChain::kVllmCbor, EngineChain::kSglangSha256};

std::vector<std::uint32_t> random_tokens(Random& random, std::size_t count) {
  std::vector<std::uint32_t> tokens(count);
  std::generate(tokens.begin(), tokens.end(),
                [&] { return static_cast<std::uint32_t>(random.next()) >> (8 * random.below(4)); });
  return tokens;
}

Buffer digests(EngineChain chain, std::span<const std::uint32_t> tokens, std::size_t hash_tokens, Bytes begin,
               std::span<const Bytes> keys = {}) {
  Buffer out(tokens.size() / hash_tokens * kDigestBytes);
  engine_digests(chain, tokens, hash_tokens, begin, keys, out);
  return out;
}

Buffer sha256_of(const Buffer& message) {
  Sha256 sha(sha256_compress_portable);
  sha.update(message);
  const auto digest = sha.finish();
  return {digest.begin(), digest.end()};
}

void append(Buffer& message, std::string_view some) { message.insert(message.end(), some.begin(), some.end()); }

void names_are_those_of_python() {
  CHECK(engine_chain("vllm-sha256") == EngineChain::kVllmSha256);
  CHECK(engine_chain("vllm-sha256_cbor") == EngineChain::kVllmCbor);
  CHECK(engine_chain("sglang-sha256") == EngineChain::kSglangSha256);
  CHECK(!engine_chain("vllm-xxhash") && !engine_chain(""));
}

void messages_are_written_as_pickle_and_cbor_write_them() {
  using namespace std::string_view_literals;
  const Buffer begin(kDigestBytes, 'p');
  const std::vector<std::uint32_t> tokens{1, 300, 70'000, 0x80000000};
  Buffer pickle;
  append(pickle, "\x80\x05\x95\x44\0\0\0\0\0\0\0C\x20"sv);
  append(pickle, std::string(kDigestBytes, 'p'));
  append(pickle, "\x94(K\x01M\x2C\x01J\x70\x11\x01\0\x8A\x05\0\0\0\x80\0t\x94N\x87\x94."sv);
  const auto length = static_cast<std::uint8_t>(pickle.size() - 11);
  pickle[3] = length;
  CHECK(digests(EngineChain::kVllmSha256, tokens, 4, begin) == sha256_of(pickle));
  Buffer cbor;
  append(cbor, "\x83\x58\x20"sv);
  append(cbor, std::string(kDigestBytes, 'p'));
  append(cbor, "\x84\x01\x19\x01\x2C\x1A\0\x01\x11\x70\x1A\x80\0\0\0\xF6"sv);
  CHECK(digests(EngineChain::kVllmCbor, tokens, 4, begin) == sha256_of(cbor));
  Buffer plain;
  append(plain, "\x01\0\0\0\x2C\x01\0\0\x70\x11\x01\0\0\0\0\x80"sv);
  CHECK(digests(EngineChain::kSglangSha256, tokens, 4, {}) == sha256_of(plain));
}

void a_chain_goes_on_from_its_last_digest() {
  Random random(155);
  for (const EngineChain chain : kChains) {
    for (const std::size_t hash_tokens : {std::size_t{1}, std::size_t{3}, std::size_t{16}, kMostHashTokens}) {
      const auto tokens = random_tokens(random, 4 * hash_tokens + hash_tokens / 2);
      const Buffer begin = random.bytes(kDigestBytes);
      const Buffer whole = digests(chain, tokens, hash_tokens, begin);
      Buffer parts = digests(chain, std::span(tokens).first(hash_tokens), hash_tokens, begin);
      const Buffer before(parts.end() - kDigestBytes, parts.end());
      const Buffer rest = digests(chain, std::span(tokens).subspan(hash_tokens), hash_tokens, before);
      parts.insert(parts.end(), rest.begin(), rest.end());
      CHECK(whole == parts && whole.size() == 4 * kDigestBytes);
    }
  }
}

void keys_of_a_block_change_it_and_what_follows() {
  Random random(7);
  const auto tokens = random_tokens(random, 4 * 16);
  const Buffer begin = random.bytes(kDigestBytes), key = random.bytes(kMostKeyBytes);
  const std::vector<Bytes> none(4), third{{}, {}, key, {}};
  for (const EngineChain chain : {EngineChain::kVllmSha256, EngineChain::kVllmCbor}) {
    const Buffer without = digests(chain, tokens, 16, begin);
    const Buffer with = digests(chain, tokens, 16, begin, third);
    CHECK(digests(chain, tokens, 16, begin, none) == without);
    CHECK(std::ranges::equal(Bytes(with).first(2 * kDigestBytes), Bytes(without).first(2 * kDigestBytes)));
    CHECK(!std::ranges::equal(Bytes(with).subspan(2 * kDigestBytes, kDigestBytes),
                              Bytes(without).subspan(2 * kDigestBytes, kDigestBytes)));
    CHECK(!std::ranges::equal(Bytes(with).last(kDigestBytes), Bytes(without).last(kDigestBytes)));
  }
}

void a_block_of_several_digests_has_the_last_ones_hash() {
  Random random(9);
  SequenceHash root;
  std::ranges::copy(random.bytes(kHashBytes), root.begin());
  const Buffer given = random.bytes(200 * kDigestBytes);
  for (const std::size_t scale : {1, 3, 200, 201}) {
    Buffer out(200 / scale * kHashBytes);
    digest_hashes(root, given, scale, false, out);
    for (std::size_t block = 0; block < 200 / scale; ++block) {
      const std::vector<Bytes> last{Bytes(given).subspan(((block + 1) * scale - 1) * kDigestBytes, kDigestBytes)};
      Buffer one(kHashBytes);
      derived_hashes(root, last, one);
      CHECK(std::ranges::equal(one, Bytes(out).subspan(block * kHashBytes, kHashBytes)));
    }
  }
  Buffer in_hex(kHashBytes), of_text(kHashBytes);
  digest_hashes(root, Buffer(kDigestBytes, 0x5A), 1, true, in_hex);
  Buffer text;
  for (std::size_t at = 0; at < kDigestBytes; ++at) {
    append(text, "5a");
  }
  const std::vector<Bytes> views{text};
  derived_hashes(root, views, of_text);
  CHECK(in_hex == of_text);
}

}  // namespace

int main() {
  return tests::run({
      {"names are those of Python", names_are_those_of_python},
      {"messages are written as pickle and CBOR write them", messages_are_written_as_pickle_and_cbor_write_them},
      {"a chain goes on from its last digest", a_chain_goes_on_from_its_last_digest},
      {"keys of a block change it and what follows", keys_of_a_block_change_it_and_what_follows},
      {"a block of several digests has the last one's hash", a_block_of_several_digests_has_the_last_ones_hash},
  });
}
