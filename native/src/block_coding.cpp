#include "kvbm/block_coding.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kvbm/checksum.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVBM_INLINE inline __attribute__((always_inline))

namespace kvbm {
namespace {

// What the first byte of a chunk says.
enum class Chunk : std::uint8_t {
  kRaw = 0,        // the elements follow as they are
  kNewTable = 1,   // the raw planes, a table, the streams
  kSameTable = 2,  // the same by the table of the coded chunk before
};

constexpr std::size_t kBitmapBytes = 32;                // which symbols have a code
constexpr std::size_t kSizesBytes = kStreams * 2;       // of the streams
constexpr std::size_t kPad = 8;                         // zeros at the end of a block, so that words may be read whole
constexpr std::size_t kStreamStep = 64;                 // a stream's symbols are a multiple of it, all but the last ones
constexpr std::size_t kLeastGain = 32;                  // a block that loses less than one part in so many stays raw
constexpr std::size_t kSampledPieces = 16;              // of a block, looked at first
constexpr std::size_t kSampledElements = 256;           // of each piece
constexpr std::size_t kMostInEntry = 6;                 // symbols one lookup gives
constexpr std::size_t kLookups = 5;                     // of a round: 55 of the 57 bits that one load brings

static_assert(kLookups * kMostBits <= 57);
static_assert(kLookups * kMostInEntry + 8 <= 64, "a round stays in the room behind a stream");

template <class Word>
KVBM_INLINE Word load(const std::uint8_t* at) noexcept {
  Word value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

KVBM_INLINE std::uint64_t load_big(const std::uint8_t* at) noexcept { return __builtin_bswap64(load<std::uint64_t>(at)); }
KVBM_INLINE void store_big(std::uint8_t* at, std::uint64_t value) noexcept {
  value = __builtin_bswap64(value);
  std::memcpy(at, &value, sizeof value);
}

// Symbols of each stream of a chunk but the last ones.
constexpr std::size_t stream_symbols(std::size_t elements) noexcept {
  return (elements + kStreams * kStreamStep - 1) / (kStreams * kStreamStep) * kStreamStep;
}
constexpr std::size_t symbols_of(std::size_t stream, std::size_t elements) noexcept {
  const std::size_t most = stream_symbols(elements);
  return std::min(most, elements - std::min(elements, stream * most));
}

// An element's coded symbol: all of a byte; else its exponent's high bits, which a turn by one bit brings into the highest byte.
template <unsigned kBytes>
KVBM_INLINE std::uint8_t symbol_at(const std::uint8_t* element) noexcept {
  if constexpr (kBytes == 1) {
    return *element;
  } else if constexpr (kBytes == 2) {
    return static_cast<std::uint8_t>(std::rotl(load<std::uint16_t>(element), 1) >> 8);
  } else {
    return static_cast<std::uint8_t>(std::rotl(load<std::uint32_t>(element), 1) >> 24);
  }
}

// Elements → the coded plane and the others.
template <unsigned kBytes>
KVBM_INLINE void split(const std::uint8_t* elements, std::size_t count, std::uint8_t* symbols, std::uint8_t* rest) noexcept {
  if constexpr (kBytes == 1) {
    std::memcpy(symbols, elements, count);
  } else if constexpr (kBytes == 2) {
    for (std::size_t at = 0; at < count; ++at) {
      const std::uint16_t turned = std::rotl(load<std::uint16_t>(elements + 2 * at), 1);
      symbols[at] = static_cast<std::uint8_t>(turned >> 8);
      rest[at] = static_cast<std::uint8_t>(turned);
    }
  } else {
    for (std::size_t at = 0; at < count; ++at) {
      const std::uint32_t turned = std::rotl(load<std::uint32_t>(elements + 4 * at), 1);
      symbols[at] = static_cast<std::uint8_t>(turned >> 24);
      rest[3 * at] = static_cast<std::uint8_t>(turned);
      rest[3 * at + 1] = static_cast<std::uint8_t>(turned >> 8);
      rest[3 * at + 2] = static_cast<std::uint8_t>(turned >> 16);
    }
  }
}

// The way back.
template <unsigned kBytes>
KVBM_INLINE void join(const std::uint8_t* symbols, const std::uint8_t* rest, std::size_t count, std::uint8_t* elements) noexcept {
  if constexpr (kBytes == 1) {
    std::memcpy(elements, symbols, count);
  } else if constexpr (kBytes == 2) {
    for (std::size_t at = 0; at < count; ++at) {
      const auto turned = static_cast<std::uint16_t>(symbols[at] << 8 | rest[at]);
      const std::uint16_t element = std::rotr(turned, 1);
      std::memcpy(elements + 2 * at, &element, sizeof element);
    }
  } else {
    for (std::size_t at = 0; at < count; ++at) {
      const std::uint32_t turned = std::uint32_t{symbols[at]} << 24 | std::uint32_t{rest[3 * at + 2]} << 16 |
                                   std::uint32_t{rest[3 * at + 1]} << 8 | rest[3 * at];
      const std::uint32_t element = std::rotr(turned, 1);
      std::memcpy(elements + 4 * at, &element, sizeof element);
    }
  }
}

// Bits that the symbols take by a code; kNoCode when one of them has none.
constexpr std::size_t kNoCode = SIZE_MAX;

std::size_t bits_of(const SymbolCounts& counts, const CodeLengths& lengths) noexcept {
  std::size_t bits = 0;
  std::uint32_t without = 0;
  for (std::size_t symbol = 0; symbol < counts.size(); ++symbol) {
    bits += std::size_t{counts[symbol]} * lengths[symbol];
    without |= lengths[symbol] == 0 ? counts[symbol] : 0;
  }
  return without != 0 ? kNoCode : bits;
}

}  // namespace

CodeLengths code_lengths(const SymbolCounts& counts) noexcept {
  std::array<std::uint64_t, 256> leaves;  // count << 8 | symbol, rarest first
  std::size_t count = 0;
  std::uint64_t total = 0;
  for (std::size_t symbol = 0; symbol < counts.size(); ++symbol) {
    leaves[count] = std::uint64_t{counts[symbol]} << 8 | symbol;
    count += counts[symbol] != 0;
    total += counts[symbol];
  }
  CodeLengths lengths{};
  if (count < 2) {
    return lengths;
  }
  std::sort(leaves.begin(), leaves.begin() + static_cast<std::ptrdiff_t>(count));
  // Where the rarest would get too long a code they count for more, until it is short enough.
  for (std::uint64_t least = 1;; least = std::max(2 * least, total >> 12)) {
    std::array<std::uint64_t, 512> weights;  // leaves, then the nodes over them in the order they are made
    std::array<std::uint16_t, 512> parents;
    for (std::size_t leaf = 0; leaf < count; ++leaf) {
      weights[leaf] = std::max(leaves[leaf] >> 8, least);
    }
    std::size_t leaf = 0;
    std::size_t node = count;
    const std::size_t root = 2 * count - 2;
    for (std::size_t made = count; made <= root; ++made) {
      std::uint64_t weight = 0;
      for (int child = 0; child < 2; ++child) {  // the two lightest; of equals a leaf
        const bool is_leaf = leaf < count && (node == made || weights[leaf] <= weights[node]);
        const std::size_t taken = is_leaf ? leaf++ : node++;
        weight += weights[taken];
        parents[taken] = static_cast<std::uint16_t>(made);
      }
      weights[made] = weight;
    }
    std::array<std::uint16_t, 512> depths;
    depths[root] = 0;
    for (std::size_t below = root; below-- > 0;) {
      depths[below] = static_cast<std::uint16_t>(depths[parents[below]] + 1);
    }
    if (depths[0] <= kMostBits) {  // the rarest has the longest
      for (std::size_t at = 0; at < count; ++at) {
        lengths[leaves[at] & 0xFF] = static_cast<std::uint8_t>(depths[at]);
      }
      return lengths;
    }
  }
}

namespace {

// The codes of lengths: shorter first, among equals by symbol. Entry: code | length << 16.
void make_codes(const CodeLengths& lengths, std::array<std::uint32_t, 256>& codes) noexcept {
  std::array<std::uint32_t, kMostBits + 2> next{};  // by length: the next code
  for (const std::uint8_t length : lengths) {
    next[length + 1U] += length != 0;
  }
  std::uint32_t code = 0;
  for (std::size_t length = 1; length <= kMostBits; ++length) {
    code = (code + next[length]) << 1;  // next[length]: how many have one bit less
    next[length] = code;
  }
  for (std::size_t symbol = 0; symbol < lengths.size(); ++symbol) {
    const std::uint32_t length = lengths[symbol];
    codes[symbol] = (length != 0 ? next[length]++ : 0) | length << 16;
  }
}

// Symbols → their codes, high bits first. Returns the bytes, of which the last is filled up with zeros; spoils 8 behind them.
KVBM_INLINE std::size_t write_stream(const std::uint8_t* symbols, std::size_t count, const std::uint32_t* codes,
                                     std::uint8_t* out) noexcept {
  std::uint8_t* at = out;
  std::uint64_t held = 0;  // in its low `bits`
  unsigned bits = 0;       // below 8 before each group
  std::size_t index = 0;
  for (; index + 4 <= count; index += 4) {
    const auto four = load<std::uint32_t>(symbols + index);
    const std::uint32_t a = codes[four & 0xFF];
    const std::uint32_t b = codes[four >> 8 & 0xFF];
    const std::uint32_t c = codes[four >> 16 & 0xFF];
    const std::uint32_t d = codes[four >> 24];
    const std::uint64_t ab = std::uint64_t{a & 0xFFFF} << (b >> 16) | (b & 0xFFFF);
    const std::uint64_t cd = std::uint64_t{c & 0xFFFF} << (d >> 16) | (d & 0xFFFF);
    const std::uint32_t cd_bits = (c >> 16) + (d >> 16);
    const std::uint32_t all_bits = (a >> 16) + (b >> 16) + cd_bits;
    held = held << all_bits | ab << cd_bits | cd;
    bits += all_bits;
    store_big(at, held << (64 - bits) % 64);
    at += bits / 8;
    bits %= 8;
  }
  for (; index < count; ++index) {
    const std::uint32_t code = codes[symbols[index]];
    held = held << (code >> 16) | (code & 0xFFFF);
    bits += code >> 16;
    store_big(at, held << (64 - bits) % 64);
    at += bits / 8;
    bits %= 8;
  }
  return static_cast<std::size_t>(at - out) + (bits != 0 ? 1 : 0);
}

// Bytes of a table as it is kept.
std::size_t table_bytes(const SymbolCounts& counts) noexcept {
  const auto present = static_cast<std::size_t>(std::count_if(counts.begin(), counts.end(), [](std::uint32_t count) { return count != 0; }));
  return kBitmapBytes + (present + 1) / 2;
}

// A table as it is kept: which symbols occur, then the lengths of their codes, two a byte, low half first. Returns its bytes.
std::size_t write_table(const SymbolCounts& counts, const CodeLengths& lengths, std::uint8_t* out) noexcept {
  const std::size_t bytes = table_bytes(counts);
  std::memset(out, 0, bytes);
  std::size_t half = 0;
  for (std::size_t symbol = 0; symbol < counts.size(); ++symbol) {
    if (counts[symbol] != 0) {
      std::uint8_t& bits = out[symbol / 8];
      bits = static_cast<std::uint8_t>(bits | 1U << symbol % 8);
      std::uint8_t& byte = out[kBitmapBytes + half / 2];
      byte = static_cast<std::uint8_t>(byte | lengths[symbol] << half % 2 * 4);
      ++half;
    }
  }
  return bytes;
}

// How often each symbol occurs. Four parts, for a count that has just been written is slow to read again.
KVBM_INLINE void count_symbols(const std::uint8_t* symbols, std::size_t count, SymbolCounts& counts) noexcept {
  std::array<SymbolCounts, 4> parts{};
  std::size_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const auto eight = load<std::uint64_t>(symbols + at);
    ++parts[0][eight & 0xFF];
    ++parts[1][eight >> 8 & 0xFF];
    ++parts[2][eight >> 16 & 0xFF];
    ++parts[3][eight >> 24 & 0xFF];
    ++parts[0][eight >> 32 & 0xFF];
    ++parts[1][eight >> 40 & 0xFF];
    ++parts[2][eight >> 48 & 0xFF];
    ++parts[3][eight >> 56];
  }
  for (; at < count; ++at) {
    ++parts[0][symbols[at]];
  }
  for (std::size_t symbol = 0; symbol < counts.size(); ++symbol) {
    counts[symbol] = parts[0][symbol] + parts[1][symbol] + parts[2][symbol] + parts[3][symbol];
  }
}

// Of a chunk's own code, by which an only symbol takes no bits.
std::size_t own_bits_of(const SymbolCounts& counts, const CodeLengths& lengths) noexcept {
  const std::size_t bits = bits_of(counts, lengths);
  return bits == kNoCode ? 0 : bits;
}

// Whether a look at some elements says that a block would shrink by enough.
template <unsigned kBytes>
bool would_shrink(std::span<const std::uint8_t> block) noexcept {
  const std::size_t elements = block.size() / kBytes;
  const std::size_t piece = std::min(kSampledElements, elements / kSampledPieces + 1);
  SymbolCounts counts{};
  std::size_t sampled = 0;
  for (std::size_t number = 0; number < kSampledPieces; ++number) {
    const std::size_t first = elements * number / kSampledPieces;
    for (std::size_t at = first; at < std::min(first + piece, elements); ++at, ++sampled) {
      ++counts[symbol_at<kBytes>(block.data() + at * kBytes)];
    }
  }
  const std::size_t gained = 8 * sampled - own_bits_of(counts, code_lengths(counts));
  return gained * kLeastGain >= 8 * kBytes * sampled;
}

}  // namespace

template <unsigned kBytes>
std::size_t BlockEncoder::encode_chunks(std::span<const std::uint8_t> block, std::uint8_t* out) noexcept {
  std::uint8_t* to = out;
  std::size_t left = block.size() / kBytes;
  lengths_.fill(0);
  for (const std::uint8_t* from = block.data(); left != 0;) {
    const std::size_t count = std::min(left, kChunkElements);
    to += encode_chunk<kBytes>(from, count, to);
    from += count * kBytes;
    left -= count;
  }
  std::memset(to, 0, kPad);
  return static_cast<std::size_t>(to - out) + kPad;
}

template <unsigned kBytes>
std::size_t BlockEncoder::encode_chunk(const std::uint8_t* elements, std::size_t count, std::uint8_t* out) noexcept {
  std::uint8_t* const rest = out + 1;
  std::uint8_t* to = rest + count * (kBytes - 1);
  split<kBytes>(elements, count, symbols_.data(), rest);
  SymbolCounts counts;
  count_symbols(symbols_.data(), count, counts);
  const CodeLengths own = code_lengths(counts);
  const std::size_t table = table_bytes(counts);
  const std::size_t own_bits = own_bits_of(counts, own) + 8 * table;
  const std::size_t same_bits = bits_of(counts, lengths_);
  const bool same = same_bits <= own_bits;
  if ((same ? same_bits : own_bits) / 8 + kSizesBytes + kStreams >= count) {
    *out = static_cast<std::uint8_t>(Chunk::kRaw);
    std::memcpy(out + 1, elements, count * kBytes);
    return 1 + count * kBytes;
  }
  *out = static_cast<std::uint8_t>(same ? Chunk::kSameTable : Chunk::kNewTable);
  if (!same) {
    to += write_table(counts, own, to);
    lengths_ = own;
    make_codes(lengths_, codes_);
  }
  std::uint8_t* sizes = to;
  to += kSizesBytes;
  const bool has_bits = same || own_bits != 8 * table;  // an only symbol takes none
  const std::size_t most = stream_symbols(count);
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    const std::size_t of_stream = has_bits ? symbols_of(stream, count) : 0;
    const auto bytes = static_cast<std::uint16_t>(write_stream(symbols_.data() + stream * most, of_stream, codes_.data(), to));
    std::memcpy(sizes, &bytes, sizeof bytes);
    sizes += sizeof bytes;
    to += bytes;
  }
  return static_cast<std::size_t>(to - out);
}

CodedBlock BlockEncoder::encode(std::span<const std::uint8_t> block, Coding coding, std::uint8_t* out) noexcept {
  std::size_t bytes = block.size();
  switch (coding) {
    case Coding::kPlanes16:
      bytes = encode_planes<2>(block, out);
      break;
    case Coding::kPlanes8:
      bytes = encode_planes<1>(block, out);
      break;
    case Coding::kPlanes32:
      bytes = encode_planes<4>(block, out);
      break;
    case Coding::kRaw:
      break;
  }
  if (bytes + block.size() / kLeastGain < block.size()) {
    return {bytes, coding};
  }
  std::memcpy(out, block.data(), block.size());
  return {block.size(), Coding::kRaw};
}

template <unsigned kBytes>
std::size_t BlockEncoder::encode_planes(std::span<const std::uint8_t> block, std::uint8_t* out) noexcept {
  return block.size() % kBytes == 0 && would_shrink<kBytes>(block) ? encode_chunks<kBytes>(block, out) : block.size();
}

bool BlockDecoder::make_table(const CodeLengths& lengths, const std::array<std::uint8_t, 256>& present,
                              std::size_t count) noexcept {
  constexpr std::size_t kAll = std::size_t{1} << kMostBits;
  std::uint64_t* const widest = entries_.data() + kAll;
  if (count == 1 && lengths[present[0]] == 0) {
    const std::uint64_t symbols = std::uint64_t{present[0]} * 0x0000'0101'0101'0101;
    std::fill(widest, widest + kAll, symbols << 16 | kMostInEntry << 8);
    return true;
  }
  // Symbols by the length of their codes, which is the order of the codes.
  std::array<std::uint16_t, kMostBits + 2> first{};
  std::size_t taken = 0;  // of the codes of kMostBits
  for (std::size_t at = 0; at < count; ++at) {
    const std::uint8_t length = lengths[present[at]];
    if (length == 0 || length > kMostBits) {
      return false;
    }
    ++first[length + 1U];
    taken += kAll >> length;
  }
  if (taken != kAll) {
    return false;
  }
  for (std::size_t length = 1; length < first.size(); ++length) {
    first[length] = static_cast<std::uint16_t>(first[length] + first[length - 1]);
  }
  std::array<std::uint8_t, 256> ordered;
  for (std::size_t at = 0; at < count; ++at) {
    ordered[first[lengths[present[at]]]++] = present[at];
  }
  const unsigned shortest = lengths[ordered[0]];
  // What more than the first symbol an entry has room for: codes of one bit are many in a few bits.
  const unsigned most_behind = shortest == 1 ? kMostInEntry - 1 : kMostBits;
  entries_[1] = 0;  // no bits, no symbol
  for (unsigned width = 1; width <= kMostBits; ++width) {
    if (width + shortest > kMostBits && width != kMostBits) {
      continue;  // nobody looks there
    }
    std::uint64_t* const of_width = entries_.data() + (std::size_t{1} << width);
    std::size_t at = 0;
    for (std::size_t index = 0; index < count && lengths[ordered[index]] <= width; ++index) {
      const std::uint8_t symbol = ordered[index];
      const unsigned length = lengths[symbol];
      const unsigned behind = width - length;
      const unsigned used = std::min(behind, most_behind);
      const std::uint64_t* const then = entries_.data() + (std::size_t{1} << used);
      const std::uint64_t one = std::uint64_t{symbol} << 16 | 1U << 8 | length;
      std::uint64_t* const to = of_width + at;
      const std::size_t entries = std::size_t{1} << behind;
      if (used == behind) {
        for (std::size_t entry = 0; entry < entries; ++entry) {
          to[entry] = ((then[entry] & ~std::uint64_t{0xFFFF}) << 8) + (then[entry] & 0xFFFF) + one;
        }
      } else {
        for (std::size_t entry = 0; entry < entries; ++entry) {
          const std::uint64_t next = then[entry >> (behind - used)];
          to[entry] = ((next & ~std::uint64_t{0xFFFF}) << 8) + (next & 0xFFFF) + one;
        }
      }
      at += entries;
    }
    std::fill(of_width + at, of_width + (std::size_t{1} << width), 0);
  }
  return true;
}

namespace {

// Where the streams of a chunk stand.
struct Streams {
  std::array<std::uint64_t, kStreams> at;       // next bit, from the start of the block
  std::array<std::uint8_t*, kStreams> to;       // next symbol
  std::array<std::uint8_t*, kStreams> end;      // behind the last one
};

// Decodes all streams to their ends. Reads 8 bytes from base + last_word at the latest, writes at most a round behind an end.
KVBM_INLINE void read_streams(Streams& streams, const std::uint8_t* base, std::uint64_t last_word, const std::uint64_t* table) noexcept {
  for (;;) {
    bool done = true;
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const std::uint64_t bit = streams.at[stream];
      std::uint8_t* to = streams.to[stream];
      std::uint64_t bits = load_big(base + std::min(bit / 8, last_word)) << bit % 8;
      std::uint64_t sum = 0;
      for (std::size_t lookup = 0; lookup < kLookups; ++lookup) {
        const std::uint64_t entry = table[bits >> (64 - kMostBits)];
        const std::uint64_t symbols = entry >> 16;
        std::memcpy(to, &symbols, sizeof symbols);
        to += entry >> 8 & 0xFF;
        bits <<= entry & 63;
        sum += entry & 63;
      }
      streams.at[stream] = bit + sum;
      streams.to[stream] = std::min(to, streams.end[stream]);
      done &= to >= streams.end[stream];
    }
    if (done) {
      return;
    }
  }
}

}  // namespace

template <unsigned kBytes>
bool BlockDecoder::decode_chunks(std::span<const std::uint8_t> coded, std::span<std::uint8_t> row, std::uint32_t& checksum) noexcept {
  if (row.size() % kBytes != 0 || coded.size() < kPad) {
    return false;
  }
  const std::uint8_t* const base = coded.data();
  const std::size_t size = coded.size() - kPad;
  std::size_t at = 0;
  bool has_table = false;
  std::uint32_t crc = 0;
  for (std::size_t done = 0; done < row.size();) {
    const std::size_t count = std::min((row.size() - done) / kBytes, kChunkElements);
    std::uint8_t* const elements = row.data() + done;
    done += count * kBytes;
    if (size - at < 1 + count * (kBytes - 1)) {
      return false;
    }
    const std::uint8_t kind = base[at++];
    if (kind == static_cast<std::uint8_t>(Chunk::kRaw)) {
      if (size - at < count * kBytes) {
        return false;
      }
      std::memcpy(elements, base + at, count * kBytes);
      at += count * kBytes;
      crc = crc32c({elements, count * kBytes}, crc);
      continue;
    }
    const std::uint8_t* const rest = base + at;
    at += count * (kBytes - 1);
    if (kind == static_cast<std::uint8_t>(Chunk::kNewTable)) {
      const std::size_t read = read_table({base + at, size - at});
      if (read == 0) {
        return false;
      }
      at += read;
      has_table = true;
    } else if (kind != static_cast<std::uint8_t>(Chunk::kSameTable) || !has_table) {
      return false;
    }
    if (size - at < kSizesBytes) {
      return false;
    }
    const std::uint8_t* const sizes = base + at;
    at += kSizesBytes;
    Streams streams;
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      streams.at[stream] = 8 * at;
      streams.to[stream] = symbols_.data() + stream * kStreamRoom;
      streams.end[stream] = streams.to[stream] + symbols_of(stream, count);
      const std::size_t bytes = load<std::uint16_t>(sizes + 2 * stream);
      if (size - at < bytes) {
        return false;
      }
      at += bytes;
    }
    read_streams(streams, base, coded.size() - 8, entries_.data() + (std::size_t{1} << kMostBits));
    const std::size_t most = stream_symbols(count);
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const std::size_t first = std::min(count, stream * most);
      join<kBytes>(symbols_.data() + stream * kStreamRoom, rest + first * (kBytes - 1), symbols_of(stream, count),
                   elements + first * kBytes);
    }
    crc = crc32c({elements, count * kBytes}, crc);
  }
  checksum = crc;
  return at == size;
}

std::size_t BlockDecoder::read_table(std::span<const std::uint8_t> coded) noexcept {
  if (coded.size() < kBitmapBytes) {
    return 0;
  }
  std::array<std::uint8_t, 256> present;
  std::size_t count = 0;
  for (std::size_t symbol = 0; symbol < present.size(); ++symbol) {
    present[count] = static_cast<std::uint8_t>(symbol);
    count += coded[symbol / 8] >> symbol % 8 & 1;
  }
  const std::size_t bytes = kBitmapBytes + (count + 1) / 2;
  if (count == 0 || coded.size() < bytes) {
    return 0;
  }
  CodeLengths lengths{};
  for (std::size_t at = 0; at < count; ++at) {
    lengths[present[at]] = coded[kBitmapBytes + at / 2] >> at % 2 * 4 & 15;
  }
  return make_table(lengths, present, count) ? bytes : 0;
}

bool BlockDecoder::decode(std::span<const std::uint8_t> coded, Coding coding, std::span<std::uint8_t> row,
                          std::uint32_t& checksum) noexcept {
  checksum = 0;
  switch (coding) {
    case Coding::kRaw:
      if (coded.size() != row.size()) {
        return false;
      }
      checksum = stream_copy_crc32c(row.data(), coded.data(), row.size());
      streamed_is_seen();
      return true;
    case Coding::kPlanes16:
      return decode_chunks<2>(coded, row, checksum);
    case Coding::kPlanes8:
      return decode_chunks<1>(coded, row, checksum);
    case Coding::kPlanes32:
      return decode_chunks<4>(coded, row, checksum);
  }
  return false;
}

}  // namespace kvbm
