#include "kvbm/hmac.hpp"

#include <algorithm>

#include "kvbm/sha256.hpp"

namespace kvbm {

std::array<std::uint8_t, 32> hmac_sha256(Bytes key, std::initializer_list<Bytes> parts) noexcept {
  std::array<std::uint8_t, kSha256ChunkBytes> padded{};
  if (key.size() > padded.size()) {
    Sha256 shorter(sha256_compress());
    shorter.update(key);
    const auto digest = shorter.finish();
    std::copy(digest.begin(), digest.end(), padded.begin());
  } else {
    std::copy(key.begin(), key.end(), padded.begin());
  }
  const auto masked = [&](std::uint8_t mask) {
    auto block = padded;
    for (std::uint8_t& byte : block) {
      byte ^= mask;
    }
    return block;
  };
  Sha256 inner(sha256_compress());
  inner.update(masked(0x36));
  for (const Bytes part : parts) {
    inner.update(part);
  }
  const auto digest = inner.finish();
  Sha256 outer(sha256_compress());
  outer.update(masked(0x5C));
  outer.update(digest);
  return outer.finish();
}

bool equal_in_constant_time(Bytes left, Bytes right) noexcept {
  if (left.size() != right.size()) {
    return false;
  }
  volatile std::uint8_t difference = 0;  // volatile, or the compiler may stop at the first byte that differs
  for (std::size_t at = 0; at < left.size(); ++at) {
    difference = static_cast<std::uint8_t>(difference | (left[at] ^ right[at]));
  }
  return difference == 0;
}

}  // namespace kvbm
