#include "kvbm/sha256.hpp"

#include <algorithm>
#include <string>
#include <string_view>

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
  for (int pass = 0; pass < 300; ++pass) {
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

}  // namespace

int main() {
  return tests::run({{"digests are those of FIPS 180-4", fips_vectors},
                     {"the pieces a message comes in do not matter", pieces_do_not_matter}});
}
