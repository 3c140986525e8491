#include "kvbm/block_header.hpp"

#include <algorithm>
#include <array>

#include "kvbm/checksum.hpp"

namespace kvbm {
namespace {

constexpr std::array<std::uint8_t, 4> kMagic = {'K', 'V', 'B', 'S'};
constexpr std::uint16_t kVersion = 1;
constexpr std::uint16_t kSealedVersion = 2;
constexpr std::uint16_t kBlockCount = 1;
constexpr std::size_t kVersionAt = 4;
constexpr std::size_t kBlockCountAt = 6;
constexpr std::size_t kNamespaceAt = 8;
constexpr std::size_t kHashAt = 24;
constexpr std::size_t kEpochAt = 40;
constexpr std::size_t kBlockBytesAt = 48;
constexpr std::size_t kChecksumAt = 52;
constexpr std::size_t kGenerationAt = 56;
constexpr std::size_t kProvedBytes = 60;  // what the header's own CRC covers; it follows them

template <class Number>
void put(std::uint8_t* at, Number value) noexcept {
  for (std::size_t byte = 0; byte < sizeof value; ++byte) {
    at[byte] = static_cast<std::uint8_t>(value >> (8 * byte));
  }
}

template <class Number>
Number get(const std::uint8_t* at) noexcept {
  Number value = 0;
  for (std::size_t byte = 0; byte < sizeof value; ++byte) {
    value = static_cast<Number>(value | static_cast<Number>(at[byte]) << (8 * byte));
  }
  return value;
}

}  // namespace

void encode_block_header(const BlockProof& proof, std::span<std::uint8_t, kBlockHeaderBytes> out) noexcept {
  std::ranges::fill(out, std::uint8_t{0});
  std::ranges::copy(kMagic, out.data());
  put(out.data() + kVersionAt, proof.is_sealed ? kSealedVersion : kVersion);
  put(out.data() + kBlockCountAt, kBlockCount);
  std::ranges::copy(proof.namespace_id, out.data() + kNamespaceAt);
  std::ranges::copy(proof.hash, out.data() + kHashAt);
  put(out.data() + kEpochAt, proof.epoch);
  put(out.data() + kBlockBytesAt, proof.block_bytes);
  put(out.data() + kChecksumAt, proof.checksum);
  put(out.data() + kGenerationAt, proof.generation);
  put(out.data() + kProvedBytes, crc32c(out.first(kProvedBytes)));
}

bool is_header_of(std::span<const std::uint8_t, kBlockHeaderBytes> header,
                  std::span<const std::uint8_t, 16> namespace_id, std::span<const std::uint8_t, 16> hash,
                  std::uint32_t block_bytes, bool is_sealed, std::uint32_t& checksum) noexcept {
  const std::uint8_t* const at = header.data();
  checksum = get<std::uint32_t>(at + kChecksumAt);
  return get<std::uint32_t>(at + kProvedBytes) == crc32c(header.first(kProvedBytes)) &&
         std::equal(kMagic.begin(), kMagic.end(), at) &&
         get<std::uint16_t>(at + kVersionAt) == (is_sealed ? kSealedVersion : kVersion) &&
         get<std::uint16_t>(at + kBlockCountAt) == kBlockCount &&
         std::equal(namespace_id.begin(), namespace_id.end(), at + kNamespaceAt) &&
         std::equal(hash.begin(), hash.end(), at + kHashAt) && get<std::uint32_t>(at + kBlockBytesAt) == block_bytes;
}

bool read_block_header(std::span<const std::uint8_t, kBlockHeaderBytes> header, std::uint32_t block_bytes,
                       FoundBlock& found) noexcept {
  const std::uint8_t* const at = header.data();
  const auto version = get<std::uint16_t>(at + kVersionAt);
  if (!std::equal(kMagic.begin(), kMagic.end(), at) || (version != kVersion && version != kSealedVersion) ||
      get<std::uint16_t>(at + kBlockCountAt) != kBlockCount || get<std::uint32_t>(at + kBlockBytesAt) != block_bytes ||
      get<std::uint32_t>(at + kProvedBytes) != crc32c(header.first(kProvedBytes))) {
    return false;
  }
  std::copy_n(at + kNamespaceAt, found.namespace_id.size(), found.namespace_id.begin());
  std::copy_n(at + kHashAt, found.hash.size(), found.hash.begin());
  found.epoch = get<std::uint64_t>(at + kEpochAt);
  found.generation = get<std::uint32_t>(at + kGenerationAt);
  found.is_sealed = version == kSealedVersion;
  return true;
}

}  // namespace kvbm
