#include "kvbm/object_header.hpp"

#include <algorithm>
#include <array>

#include "kvbm/checksum.hpp"

namespace kvbm {
namespace {

constexpr std::array<std::uint8_t, 4> kMagic = {'K', 'V', 'B', 'O'};
constexpr std::uint16_t kVersion = 2;
constexpr std::size_t kVersionAt = 4;
constexpr std::size_t kBlockCountAt = 6;
constexpr std::size_t kNamespaceAt = 8;
constexpr std::size_t kHashAt = 24;
constexpr std::size_t kBlockBytesAt = 48;
constexpr std::size_t kHeaderBytesAt = 52;
constexpr std::size_t kBodyBytesAt = 56;
constexpr std::size_t kTableAt = 64;
constexpr std::size_t kEntryBytes = 28;
constexpr std::size_t kEntryChecksumAt = 16;
constexpr std::size_t kEntryLengthAt = 20;
constexpr std::size_t kEntryCodingAt = 24;
constexpr std::size_t kCrcBytes = 4;

template <class Number>
Number get(const std::uint8_t* at) noexcept {
  Number value = 0;
  for (std::size_t byte = 0; byte < sizeof value; ++byte) {
    value = static_cast<Number>(value | static_cast<Number>(at[byte]) << (8 * byte));
  }
  return value;
}

bool is_equal(Bytes expected, const std::uint8_t* at) noexcept {
  return std::equal(expected.begin(), expected.end(), at);
}

}  // namespace

bool is_object_of(Bytes header, Bytes namespace_id, Bytes hashes, std::size_t block_bytes, std::uint64_t object_bytes,
                  std::vector<KeptBlock>& kept) {
  const std::size_t blocks = hashes.size() / kHashBytes;
  kept.clear();
  if (blocks == 0 || header.size() != object_header_bytes(blocks)) {
    return false;
  }
  const std::uint8_t* const at = header.data();
  const Bytes proved = header.first(header.size() - kCrcBytes);
  const auto body_bytes = get<std::uint64_t>(at + kBodyBytesAt);
  if (!is_equal(kMagic, at) || get<std::uint16_t>(at + kVersionAt) != kVersion ||
      get<std::uint32_t>(at + proved.size()) != crc32c(proved) || get<std::uint16_t>(at + kBlockCountAt) != blocks ||
      get<std::uint32_t>(at + kBlockBytesAt) != block_bytes ||
      get<std::uint32_t>(at + kHeaderBytesAt) != header.size() || !is_equal(namespace_id, at + kNamespaceAt) ||
      !is_equal(hashes.last(kHashBytes), at + kHashAt) || body_bytes != object_bytes - header.size()) {
    return false;
  }
  std::uint64_t all_bytes = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::uint8_t* const entry = at + kTableAt + kEntryBytes * block;
    const std::uint8_t coding = entry[kEntryCodingAt];
    const auto bytes = get<std::uint32_t>(entry + kEntryLengthAt);
    const bool is_raw = coding == static_cast<std::uint8_t>(Coding::kRaw);
    if (!is_equal(hashes.subspan(kHashBytes * block, kHashBytes), entry) || coding >= kCodings ||
        (is_raw ? bytes != block_bytes : bytes > block_bytes)) {
      return false;
    }
    all_bytes += bytes;
    kept.push_back({get<std::uint32_t>(entry + kEntryChecksumAt), bytes, static_cast<Coding>(coding)});
  }
  return all_bytes == body_bytes;
}

}  // namespace kvbm
