#include "kvbm/hashing.hpp"

#include <algorithm>
#include <string>
#include <string_view>
#include <thread>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

std::string hex_digest(std::string_view text, Sha256Compress compress) {
  Sha256 sha(compress);
  sha.update({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  std::string hex;
  for (const std::uint8_t byte : sha.finish()) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    hex += digits;
  }
  return hex;
}

std::vector<Sha256Compress> variants() {
  std::vector<Sha256Compress> found{sha256_compress_portable};
  if (sha256_has_hardware()) {
    found.push_back(sha256_compress_hardware);
  }
  return found;
}

void fips_vectors() {
  for (const Sha256Compress compress : variants()) {
    CHECK(hex_digest("", compress) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex_digest("abc", compress) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hex_digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", compress) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hex_digest(std::string(1'000'000, 'a'), compress) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

void pieces_do_not_matter() {
  Random random(1);
  const auto data = random.bytes(1'000);
  for (int round = 0; round < 300; ++round) {
    const std::size_t size = random.below(data.size());
    Sha256 whole(sha256_compress_portable);
    whole.update(Bytes(data).first(size));
    Sha256 pieces(sha256_compress());
    for (std::size_t at = 0; at < size;) {
      const std::size_t piece = std::min(size - at, random.below(150));
      pieces.update(Bytes(data).subspan(at, piece));
      at += piece;
    }
    CHECK(whole.finish() == pieces.finish());
  }
}

std::vector<std::uint8_t> chain(std::span<const std::uint32_t> tokens, std::size_t block_tokens, const SequenceHash& root,
                                std::span<const Bytes> keys, Sha256Compress compress) {
  std::vector<std::uint8_t> out(tokens.size() / block_tokens * kHashBytes);
  sequence_hashes(tokens, block_tokens, root, keys, out, compress);
  return out;
}

void chains() {
  Random random(2);
  std::vector<std::uint32_t> tokens(500);
  std::generate(tokens.begin(), tokens.end(), [&] { return static_cast<std::uint32_t>(random.next()); });
  const SequenceHash root{1, 2, 3};
  for (std::size_t block_tokens = 1; block_tokens < 70; ++block_tokens) {
    const auto whole = chain(tokens, block_tokens, root, {}, sha256_compress_portable);
    CHECK(whole == chain(tokens, block_tokens, root, {}, sha256_compress()));
    // From the first hash on, the rest of the chain is the chain of the rest.
    SequenceHash first;
    std::copy_n(whole.begin(), kHashBytes, first.begin());
    const auto rest = chain(std::span(tokens).subspan(block_tokens), block_tokens, first, {}, sha256_compress());
    CHECK(std::equal(rest.begin(), rest.end(), whole.begin() + kHashBytes, whole.end()));
  }
  CHECK(chain(tokens, 501, root, {}, sha256_compress()).empty());
}

void extra_keys() {
  const std::vector<std::uint32_t> tokens(12);
  const SequenceHash root{};
  const std::vector<std::uint8_t> key(200, 7);
  const std::vector<Bytes> none(3);
  const std::vector<Bytes> second{Bytes{}, Bytes(key), Bytes{}};
  const auto plain = chain(tokens, 4, root, {}, sha256_compress());
  const auto keyed = chain(tokens, 4, root, second, sha256_compress());
  CHECK(plain == chain(tokens, 4, root, none, sha256_compress()));
  CHECK(std::equal(plain.begin(), plain.begin() + 16, keyed.begin()));
  CHECK(!std::equal(plain.begin() + 16, plain.begin() + 32, keyed.begin() + 16));
  CHECK(!std::equal(plain.begin() + 32, plain.end(), keyed.begin() + 32));
}

void threads_share_it() {
  std::vector<std::vector<std::uint8_t>> results(4);
  std::vector<std::thread> threads;
  const std::vector<std::uint32_t> tokens(4'096, 9);
  for (auto& result : results) {
    threads.emplace_back([&] { result = chain(tokens, 16, SequenceHash{}, {}, sha256_compress()); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(results[0] == results[1] && results[1] == results[2] && results[2] == results[3]);
}

}  // namespace

int main() {
  return tests::run({{"digests are those of FIPS 180-4", fips_vectors},
                     {"the pieces a message comes in do not matter", pieces_do_not_matter},
                     {"a chain continues from any of its hashes", chains},
                     {"an extra key changes its block and all after it", extra_keys},
                     {"threads may hash at once", threads_share_it}});
}
