#include "kvbm/block_coding.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kvbm/checksum.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVBM_INLINE inline __attribute__((always_inline))
// What is always inlined is compiled once for each of these.
#if defined(__x86_64__)
#define KVBM_AVX2 __attribute__((target("avx2,bmi,bmi2")))
#define KVBM_AVX512 __attribute__((target("avx2,bmi,bmi2,avx512f,avx512bw,avx512vl,avx512vbmi")))
// GCC 12 takes what its own intrinsics leave undefined on purpose for a mistake.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#else
#define KVBM_AVX2
#define KVBM_AVX512
#endif

namespace kvbm {
namespace {

// The first byte of a chunk is 0 when its elements follow as they are; else the raw planes follow, one byte that says
// of each stream which of two slots has its table, the tables that are new (slot 0 first), the sizes of the streams,
// the streams.
constexpr std::uint8_t kCoded = 1;
constexpr std::uint8_t kFreshTables = 2 | 4;  // of slot 0, of slot 1

constexpr std::size_t kBitmapBytes = 32;              // which symbols have a code
constexpr std::size_t kSizesBytes = kStreams * 2;     // of the streams
constexpr std::size_t kFixedBytes = 2 + kSizesBytes;  // of a coded chunk
constexpr std::size_t kPad = 8;                       // zeros at the end of a block, so that words may be read whole
// A stream's symbols are a multiple of it, all but the last ones
constexpr std::size_t kStreamStep = 64;
constexpr std::size_t kLeastGain = 32;         // a block that loses less than one part in so many stays raw
constexpr std::size_t kSampledPieces = 16;     // of a block, looked at first
constexpr std::size_t kSampledElements = 256;  // of each piece
constexpr std::size_t kMostInEntry = 6;        // symbols one lookup gives
constexpr std::size_t kLine = 64;              // of the cache
constexpr unsigned kLongCodes = 5;             // where no code is shorter, a lookup seldom gives two symbols
constexpr std::size_t kLookups = 5;            // of a round: 55 of the 57 bits that one load brings

static_assert(kLookups * kMostBits <= 57);
static_assert(kLookups * kMostInEntry + 8 <= 64, "a round stays in the room behind a stream");

template <class Word>
KVBM_INLINE Word load(const std::uint8_t* at) noexcept {
  Word value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

KVBM_INLINE std::uint64_t load_big(const std::uint8_t* at) noexcept {
  return __builtin_bswap64(load<std::uint64_t>(at));
}
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

// An element's coded symbol: all of a byte; else its exponent's high bits, which a turn by one bit brings into the
// highest byte.
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
KVBM_INLINE void split(const std::uint8_t* elements, std::size_t count, std::uint8_t* symbols,
                       std::uint8_t* rest) noexcept {
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
KVBM_INLINE void join(const std::uint8_t* symbols, const std::uint8_t* rest, std::size_t count,
                      std::uint8_t* elements) noexcept {
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
  // The rarest count for more than they are, and for more again until their codes are short enough.
  for (std::uint64_t least = 1 + (total >> 12);; least *= 2) {
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

// Symbols → their codes, high bits first. Returns the bytes, of which the last is filled up with zeros; spoils 8 behind
// them.
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

#if defined(__x86_64__)

// As write_stream, 64 symbols at a time: their codes are looked up in registers and joined by fours, which alone is
// done one by one.
KVBM_AVX512 std::size_t write_stream_avx512(const std::uint8_t* symbols, std::size_t count, const std::uint32_t* codes,
                                            std::uint8_t* out) noexcept {
  alignas(64) std::array<std::uint8_t, 256> low;   // eight bits of a symbol's code
  alignas(64) std::array<std::uint8_t, 256> high;  // three bits of it, then four of its length
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    low[symbol] = static_cast<std::uint8_t>(codes[symbol]);
    high[symbol] = static_cast<std::uint8_t>((codes[symbol] >> 8 & 7) | codes[symbol] >> 16 << 3);
  }
  const __m512i low_a = _mm512_load_si512(low.data());
  const __m512i low_b = _mm512_load_si512(low.data() + 64);
  const __m512i low_c = _mm512_load_si512(low.data() + 128);
  const __m512i low_d = _mm512_load_si512(low.data() + 192);
  const __m512i high_a = _mm512_load_si512(high.data());
  const __m512i high_b = _mm512_load_si512(high.data() + 64);
  const __m512i high_c = _mm512_load_si512(high.data() + 128);
  const __m512i high_d = _mm512_load_si512(high.data() + 192);
  const __m512i code_bits = _mm512_set1_epi32((1 << kMostBits) - 1);
  std::uint8_t* at = out;
  std::uint64_t held = 0;
  unsigned bits = 0;
  std::size_t index = 0;
  for (; index + 64 <= count; index += 64) {
    const __m512i from = _mm512_loadu_si512(symbols + index);
    const __mmask64 upper = _mm512_movepi8_mask(from);
    const __m512i lows = _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(low_a, from, low_b),
                                                _mm512_permutex2var_epi8(low_c, from, low_d));
    const __m512i highs = _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(high_a, from, high_b),
                                                 _mm512_permutex2var_epi8(high_c, from, high_d));
    alignas(64) std::array<std::uint64_t, 16> words;    // codes of four symbols each
    alignas(64) std::array<std::uint64_t, 16> lengths;  // and their bits
    for (int half = 0; half < 2; ++half) {
      // The first or last eight symbols of each lane of 16, for unpacking works within those.
      const __m512i entries = half == 0 ? _mm512_unpacklo_epi8(lows, highs) : _mm512_unpackhi_epi8(lows, highs);
      const __m512i first = _mm512_and_si512(entries, code_bits);
      const __m512i first_bits = _mm512_and_si512(_mm512_srli_epi32(entries, kMostBits), _mm512_set1_epi32(15));
      const __m512i second = _mm512_and_si512(_mm512_srli_epi32(entries, 16), code_bits);
      const __m512i second_bits = _mm512_srli_epi32(entries, 16 + kMostBits);
      const __m512i two = _mm512_or_si512(_mm512_sllv_epi32(first, second_bits), second);
      const __m512i two_bits = _mm512_add_epi32(first_bits, second_bits);
      const __m512i later = _mm512_srli_epi64(two, 32);
      const __m512i later_bits = _mm512_srli_epi64(two_bits, 32);
      const __m512i sooner = _mm512_and_si512(two, _mm512_set1_epi64(0xFFFFFFFF));
      const __m512i four = _mm512_or_si512(_mm512_sllv_epi64(sooner, later_bits), later);
      const __m512i four_bits = _mm512_and_si512(_mm512_add_epi64(two_bits, later_bits), _mm512_set1_epi64(63));
      _mm512_store_si512(words.data() + 8 * half, four);
      _mm512_store_si512(lengths.data() + 8 * half, four_bits);
    }
    // Of lane l the first eight symbols are words 2l and 2l + 1, the others words 8 + 2l and 9 + 2l.
    for (std::size_t lane = 0; lane < 4; ++lane) {
      for (const std::size_t word : {2 * lane, 2 * lane + 1, 8 + 2 * lane, 9 + 2 * lane}) {
        held = held << lengths[word] | words[word];
        bits += static_cast<unsigned>(lengths[word]);
        store_big(at, held << (64 - bits) % 64);
        at += bits / 8;
        bits %= 8;
      }
    }
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

#endif

template <Isa kIsa>
KVBM_INLINE std::size_t write_stream_as(const std::uint8_t* symbols, std::size_t count, const std::uint32_t* codes,
                                        std::uint8_t* out) noexcept {
#if defined(__x86_64__)
  if constexpr (kIsa == Isa::kAvx512) {
    return write_stream_avx512(symbols, count, codes, out);
  }
#endif
  return write_stream(symbols, count, codes, out);
}

// How many symbols occur.
std::size_t present_in(const SymbolCounts& counts) noexcept {
  return static_cast<std::size_t>(
      std::count_if(counts.begin(), counts.end(), [](std::uint32_t count) { return count != 0; }));
}

// Bytes of a table as it is kept.
std::size_t table_bytes(const SymbolCounts& counts) noexcept { return kBitmapBytes + (present_in(counts) + 1) / 2; }

// A table as it is kept: which symbols occur, then the lengths of their codes, two a byte, low half first. Returns its
// bytes.
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

// How often each symbol occurs in each stream. All streams at once, for a count that has just been written is slow to
// read again.
KVBM_INLINE void count_symbols(const std::uint8_t* symbols, std::size_t count,
                               std::array<SymbolCounts, kStreams>& counts) noexcept {
  counts = {};
  const std::size_t most = stream_symbols(count);
  if (count == kStreams * most) {
    for (std::size_t at = 0; at < most; at += 8) {
      for (std::size_t half = 0; half < kStreams; half += 4) {
        const std::uint8_t* const from = symbols + at + half * most;
        auto a = load<std::uint64_t>(from);
        auto b = load<std::uint64_t>(from + most);
        auto c = load<std::uint64_t>(from + 2 * most);
        auto d = load<std::uint64_t>(from + 3 * most);
        for (std::size_t symbol = 0; symbol < 8; ++symbol) {
          ++counts[half][a & 0xFF];
          ++counts[half + 1][b & 0xFF];
          ++counts[half + 2][c & 0xFF];
          ++counts[half + 3][d & 0xFF];
          a >>= 8;
          b >>= 8;
          c >>= 8;
          d >>= 8;
        }
      }
    }
    return;
  }
  for (std::size_t at = 0; at < count; ++at) {
    ++counts[at / most][symbols[at]];
  }
}

// Of symbols by the code made for them, by which an only symbol takes no bits.
std::size_t own_bits_of(const SymbolCounts& counts, const CodeLengths& lengths) noexcept {
  const std::size_t bits = bits_of(counts, lengths);
  return bits == kNoCode ? 0 : bits;
}

std::size_t distance(const SymbolCounts& one, const SymbolCounts& other) noexcept {
  std::size_t sum = 0;
  for (std::size_t symbol = 0; symbol < one.size(); ++symbol) {
    const std::uint32_t most = std::max(one[symbol], other[symbol]);
    sum += most - std::min(one[symbol], other[symbol]);
  }
  return sum;
}

// Which streams (bits) are rather like the one that is least like the first; 0 when all are alike, but for what chance
// makes of so many symbols.
std::uint8_t second_group(const std::array<SymbolCounts, kStreams>& counts, std::size_t most,
                          std::size_t present) noexcept {
  std::array<std::size_t, kStreams> from_first{};
  for (std::size_t stream = 1; stream < kStreams; ++stream) {
    from_first[stream] = distance(counts[0], counts[stream]);
  }
  const auto farthest =
      static_cast<std::size_t>(std::max_element(from_first.begin(), from_first.end()) - from_first.begin());
  if (2 * from_first[farthest] <= most + 4 * present) {
    return 0;
  }
  std::uint8_t group = 0;
  for (std::size_t stream = 1; stream < kStreams; ++stream) {
    if (distance(counts[farthest], counts[stream]) < from_first[stream]) {
      group = static_cast<std::uint8_t>(group | 1U << stream);
    }
  }
  return group;
}

// The sum of the counts of some streams.
SymbolCounts sum_of(const std::array<SymbolCounts, kStreams>& counts, std::uint8_t streams) noexcept {
  SymbolCounts sum{};
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    for (std::size_t symbol = 0; symbol < sum.size() && (streams >> stream & 1) != 0; ++symbol) {
      sum[symbol] += counts[stream][symbol];
    }
  }
  return sum;
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

template <unsigned kBytes, Isa kIsa>
KVBM_INLINE std::size_t BlockEncoder::encode_chunks(std::span<const std::uint8_t> block, std::uint8_t* out) noexcept {
  std::uint8_t* to = out;
  std::size_t left = block.size() / kBytes;
  slots_ = {};
  newest_ = 1;
  for (const std::uint8_t* from = block.data(); left != 0;) {
    const std::size_t count = std::min(left, kChunkElements);
    to += encode_chunk<kBytes, kIsa>(from, count, to);
    from += count * kBytes;
    left -= count;
  }
  std::memset(to, 0, kPad);
  return static_cast<std::size_t>(to - out) + kPad;
}

BlockEncoder::Group BlockEncoder::group_of(std::uint8_t streams) const noexcept {
  Group group;
  group.counts = sum_of(counts_, streams);
  group.lengths = code_lengths(group.counts);
  group.own_bits = own_bits_of(group.counts, group.lengths) + 8 * table_bytes(group.counts);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    group.same_bits[slot] = bits_of(group.counts, slots_[slot].lengths);
  }
  return group;
}

template <unsigned kBytes, Isa kIsa>
KVBM_INLINE std::size_t BlockEncoder::encode_chunk(const std::uint8_t* elements, std::size_t count,
                                                   std::uint8_t* out) noexcept {
  std::uint8_t* const rest = out + 1;
  split<kBytes>(elements, count, symbols_.data(), rest);
  count_symbols(symbols_.data(), count, counts_);
  const std::size_t most = stream_symbols(count);

  const Plan plan = plan_of(most);
  if (plan.bits / 8 + kFixedBytes + kStreams >= count) {
    *out = 0;
    std::memcpy(out + 1, elements, count * kBytes);
    return 1 + count * kBytes;
  }
  *out = static_cast<std::uint8_t>(kCoded | plan.fresh << 1);
  std::uint8_t* to = rest + count * (kBytes - 1);
  *to++ = plan.slots;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if ((plan.fresh >> slot & 1) != 0) {
      const Group& group = plan.groups[slot];
      to += write_table(group.counts, group.lengths, to);
      slots_[slot].lengths = group.lengths;
      make_codes(group.lengths, slots_[slot].codes);
    }
  }
  newest_ = plan.slots >> (kStreams - 1);
  std::uint8_t* sizes = to;
  to += kSizesBytes;
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    const auto bytes = static_cast<std::uint16_t>(write_stream_as<kIsa>(
        symbols_.data() + stream * most, symbols_of(stream, count), slots_[plan.slots >> stream & 1].codes.data(), to));
    std::memcpy(sizes, &bytes, sizeof bytes);
    sizes += sizeof bytes;
    to += bytes;
  }
  return static_cast<std::size_t>(to - out);
}

BlockEncoder::Plan BlockEncoder::plan_of(std::size_t most) const noexcept {
  Plan plan;
  const Group all = group_of(0xFF);
  const std::size_t alike = all.same_bits[1] < all.same_bits[0] ? 1 : 0;
  const bool fresh = all.own_bits < all.same_bits[alike];
  const std::size_t slot = fresh ? 1 - newest_ : alike;
  plan.groups[slot] = all;
  plan.slots = slot == 0 ? 0 : 0xFF;
  plan.fresh = static_cast<std::uint8_t>(fresh << slot);
  plan.bits = all.least_bits(slot);
  const std::uint8_t second = second_group(counts_, most, present_in(all.counts));
  if (second == 0) {
    return plan;
  }
  const Group one = group_of(static_cast<std::uint8_t>(~second));
  const Group other = group_of(second);
  const std::size_t straight = one.least_bits(0) + other.least_bits(1);
  const std::size_t crossed = one.least_bits(1) + other.least_bits(0);
  if (std::min(straight, crossed) < plan.bits) {
    plan.groups = crossed < straight ? std::array{other, one} : std::array{one, other};
    plan.slots = crossed < straight ? static_cast<std::uint8_t>(~second) : second;
    plan.fresh = 0;
    for (std::size_t at = 0; at < plan.groups.size(); ++at) {
      plan.fresh =
          static_cast<std::uint8_t>(plan.fresh | (plan.groups[at].own_bits < plan.groups[at].same_bits[at]) << at);
    }
    plan.bits = std::min(straight, crossed);
  }
  return plan;
}

template <Isa kIsa>
KVBM_INLINE std::size_t BlockEncoder::encode_as(std::span<const std::uint8_t> block, Coding coding,
                                                std::uint8_t* out) noexcept {
  switch (coding) {
    case Coding::kPlanes16:
      return block.size() % 2 == 0 && would_shrink<2>(block) ? encode_chunks<2, kIsa>(block, out) : block.size();
    case Coding::kPlanes8:
      return would_shrink<1>(block) ? encode_chunks<1, kIsa>(block, out) : block.size();
    case Coding::kPlanes32:
      return block.size() % 4 == 0 && would_shrink<4>(block) ? encode_chunks<4, kIsa>(block, out) : block.size();
    case Coding::kRaw:
      break;
  }
  return block.size();
}

std::size_t BlockEncoder::encode_portable(std::span<const std::uint8_t> block, Coding coding,
                                          std::uint8_t* out) noexcept {
  return encode_as<Isa::kPortable>(block, coding, out);
}
KVBM_AVX2 std::size_t BlockEncoder::encode_avx2(std::span<const std::uint8_t> block, Coding coding,
                                                std::uint8_t* out) noexcept {
  return encode_as<Isa::kAvx2>(block, coding, out);
}
KVBM_AVX512 std::size_t BlockEncoder::encode_avx512(std::span<const std::uint8_t> block, Coding coding,
                                                    std::uint8_t* out) noexcept {
  return encode_as<Isa::kAvx512>(block, coding, out);
}

CodedBlock BlockEncoder::encode(std::span<const std::uint8_t> block, Coding coding, std::uint8_t* out) noexcept {
  std::size_t bytes = 0;
  switch (isa_) {
    case Isa::kPortable:
      bytes = encode_portable(block, coding, out);
      break;
    case Isa::kAvx2:
      bytes = encode_avx2(block, coding, out);
      break;
    case Isa::kAvx512:
      bytes = encode_avx512(block, coding, out);
      break;
  }
  if (bytes + block.size() / kLeastGain < block.size()) {
    return {bytes, coding};
  }
  std::copy(block.begin(), block.end(), out);
  return {block.size(), Coding::kRaw};
}

bool BlockDecoder::make_table(const CodeLengths& lengths, const std::array<std::uint8_t, 256>& present,
                              std::size_t count, Table& table) noexcept {
  constexpr std::size_t kAll = std::size_t{1} << kMostBits;
  std::uint64_t* const widest = table.entries.data() + kAll;
  if (count == 1 && lengths[present[0]] == 0) {
    const std::uint64_t symbols = std::uint64_t{present[0]} * 0x0000'0101'0101'0101;
    std::fill(widest, widest + kAll, symbols << 16 | kMostInEntry << 8);
    table.has_ones = false;
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
  if (shortest >= kLongCodes) {
    std::uint16_t* to = table.ones.data();
    for (std::size_t index = 0; index < count; ++index) {
      const std::uint8_t symbol = ordered[index];
      std::fill_n(to, kAll >> lengths[symbol], static_cast<std::uint16_t>(symbol << 8 | lengths[symbol]));
      to += kAll >> lengths[symbol];
    }
  }
  table.has_ones = shortest >= kLongCodes;
  // What more than the first symbol an entry has room for: codes of one bit are many in a few bits.
  const unsigned most_behind = shortest == 1 ? kMostInEntry - 1 : kMostBits;
  table.entries[1] = 0;  // no bits, no symbol
  for (unsigned width = 1; width <= kMostBits; ++width) {
    if (width + shortest > kMostBits && width != kMostBits) {
      continue;  // nobody looks there
    }
    std::uint64_t* const of_width = table.entries.data() + (std::size_t{1} << width);
    std::size_t at = 0;
    for (std::size_t index = 0; index < count && lengths[ordered[index]] <= width; ++index) {
      const std::uint8_t symbol = ordered[index];
      const unsigned length = lengths[symbol];
      const unsigned behind = width - length;
      const unsigned used = std::min(behind, most_behind);
      const std::uint64_t* const then = table.entries.data() + (std::size_t{1} << used);
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

// Where a stream of a chunk stands.
struct Stream {
  std::uint64_t at;   // next bit, from the start of the block
  std::uint8_t* to;   // next symbol
  std::uint8_t* end;  // behind the last one
  const std::uint64_t* table;
};

// One round of a stream: several lookups of up to kMostInEntry symbols each. Reads 8 bytes from base + last_word at the
// latest.
KVBM_INLINE void read_round(Stream& stream, const std::uint8_t* base, std::uint64_t last_word) noexcept {
  std::uint64_t bits = load_big(base + std::min(stream.at / 8, last_word)) << stream.at % 8;
  std::uint64_t sum = 0;
  std::uint8_t* to = stream.to;
  for (std::size_t lookup = 0; lookup < kLookups; ++lookup) {
    const std::uint64_t entry = stream.table[bits >> (64 - kMostBits)];
    const std::uint64_t symbols = entry >> 16;
    std::memcpy(to, &symbols, sizeof symbols);
    to += entry >> 8 & 0xFF;
    bits <<= entry & 63;
    sum += entry;
  }
  stream.at += sum & 0xFF;
  stream.to = std::min(to, stream.end);
}

// Decodes four streams to their ends; writes at most a round behind those. Four, for so many have their state in
// registers. What lies at `ahead` is asked of memory meanwhile, as the many short streams of a chunk are over before
// hardware has learned to.
KVBM_INLINE std::uintptr_t read_streams(const Stream* streams, const std::uint8_t* base, std::uint64_t last_word,
                                        std::uintptr_t ahead) noexcept {
  Stream a = streams[0];
  Stream b = streams[1];
  Stream c = streams[2];
  Stream d = streams[3];
  while (a.to != a.end || b.to != b.end || c.to != c.end || d.to != d.end) {
    read_round(a, base, last_word);
    read_round(b, base, last_word);
    read_round(c, base, last_word);
    read_round(d, base, last_word);
    __builtin_prefetch(reinterpret_cast<const void*>(ahead));
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + kLine));
    ahead += 2 * kLine;
  }
  return ahead;
}

// As read_streams, one symbol a lookup, all streams in step: `most` symbols of each and up to a round behind those.
template <bool kOneTable>
KVBM_INLINE void read_ones(const std::array<Stream, kStreams>& streams,
                           const std::array<const std::uint16_t*, kStreams>& tables, std::size_t most,
                           const std::uint8_t* base, std::uint64_t last_word, std::uintptr_t ahead) noexcept {
  std::array<std::uint64_t, kStreams> at;
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    at[stream] = streams[stream].at;
  }
  std::uint8_t* const to = streams[0].to;
  const auto room = static_cast<std::size_t>(streams[1].to - to);
  for (std::size_t index = 0; index < most; index += kLookups) {
#pragma GCC unroll 8
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      std::uint64_t bits = load_big(base + std::min(at[stream] / 8, last_word)) << at[stream] % 8;
      std::uint64_t sum = 0;
      for (std::size_t lookup = 0; lookup < kLookups; ++lookup) {
        const std::uint64_t entry = tables[kOneTable ? 0 : stream][bits >> (64 - kMostBits)];
        to[stream * room + index + lookup] = static_cast<std::uint8_t>(entry >> 8);
        bits <<= entry & 63;
        sum += entry;
      }
      at[stream] += sum & 0xFF;
    }
    __builtin_prefetch(reinterpret_cast<const void*>(ahead));
    ahead += kLine;
  }
}

}  // namespace

template <unsigned kBytes>
KVBM_INLINE bool BlockDecoder::decode_chunks(std::span<const std::uint8_t> coded, std::span<std::uint8_t> row,
                                             std::uint32_t& checksum) noexcept {
  if (row.size() % kBytes != 0 || coded.size() < kPad) {
    return false;
  }
  const std::uint8_t* const base = coded.data();
  const std::size_t size = coded.size() - kPad;
  std::size_t at = 0;
  unsigned made = 0;  // which slots have a table
  std::uint32_t crc = 0;
  for (std::size_t done = 0; done < row.size();) {
    const std::size_t count = std::min((row.size() - done) / kBytes, kChunkElements);
    std::uint8_t* const elements = row.data() + done;
    done += count * kBytes;
    if (size - at < 1 + count * (kBytes - 1)) {
      return false;
    }
    const std::uint8_t kind = base[at++];
    if (kind == 0) {
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
    if ((kind & ~kFreshTables) != kCoded || size == at) {
      return false;
    }
    const std::uint8_t slots = base[at++];
    for (std::size_t slot = 0; slot < tables_.size(); ++slot) {
      if ((kind >> (slot + 1) & 1) != 0) {
        const std::size_t read = read_table({base + at, size - at}, tables_[slot]);
        if (read == 0) {
          return false;
        }
        at += read;
        made |= 1U << slot;
      }
    }
    if (((slots != 0xFF ? 1U : 0U) | (slots != 0 ? 2U : 0U)) & ~made || size - at < kSizesBytes) {
      return false;
    }
    const std::uint8_t* const sizes = base + at;
    at += kSizesBytes;
    std::array<Stream, kStreams> streams;
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      std::uint8_t* const to = symbols_.data() + stream * kStreamRoom;
      streams[stream] = {8 * at, to, to + symbols_of(stream, count),
                         tables_[slots >> stream & 1].entries.data() + (std::size_t{1} << kMostBits)};
      const std::size_t bytes = load<std::uint16_t>(sizes + 2 * stream);
      if (size - at < bytes) {
        return false;
      }
      at += bytes;
    }
    const std::size_t most = stream_symbols(count);
    const auto ahead = reinterpret_cast<std::uintptr_t>(base + at);
    const std::size_t last_word = coded.size() - sizeof(std::uint64_t);
    if ((slots == 0xFF || tables_[0].has_ones) && (slots == 0 || tables_[1].has_ones)) {
      std::array<const std::uint16_t*, kStreams> tables;
      for (std::size_t stream = 0; stream < kStreams; ++stream) {
        tables[stream] = tables_[slots >> stream & 1].ones.data();
      }
      if (slots == 0 || slots == 0xFF) {
        read_ones<true>(streams, tables, most, base, last_word, ahead);
      } else {
        read_ones<false>(streams, tables, most, base, last_word, ahead);
      }
    } else {
      read_streams(streams.data() + 4, base, last_word, read_streams(streams.data(), base, last_word, ahead));
    }
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

std::size_t BlockDecoder::read_table(std::span<const std::uint8_t> coded, Table& table) noexcept {
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
  return make_table(lengths, present, count, table) ? bytes : 0;
}

KVBM_INLINE bool BlockDecoder::decode_as(std::span<const std::uint8_t> coded, Coding coding,
                                         std::span<std::uint8_t> row, std::uint32_t& checksum) noexcept {
  switch (coding) {
    case Coding::kPlanes16:
      return decode_chunks<2>(coded, row, checksum);
    case Coding::kPlanes8:
      return decode_chunks<1>(coded, row, checksum);
    case Coding::kPlanes32:
      return decode_chunks<4>(coded, row, checksum);
    case Coding::kRaw:
      break;
  }
  return false;
}

bool BlockDecoder::decode_portable(std::span<const std::uint8_t> coded, Coding coding, std::span<std::uint8_t> row,
                                   std::uint32_t& checksum) noexcept {
  return decode_as(coded, coding, row, checksum);
}
KVBM_AVX2 bool BlockDecoder::decode_avx2(std::span<const std::uint8_t> coded, Coding coding,
                                         std::span<std::uint8_t> row, std::uint32_t& checksum) noexcept {
  return decode_as(coded, coding, row, checksum);
}

bool BlockDecoder::decode(std::span<const std::uint8_t> coded, Coding coding, std::span<std::uint8_t> row,
                          std::uint32_t& checksum) noexcept {
  checksum = 0;
  if (coding != Coding::kRaw) {
    return isa_ == Isa::kPortable ? decode_portable(coded, coding, row, checksum)
                                  : decode_avx2(coded, coding, row, checksum);
  }
  if (coded.size() != row.size()) {
    return false;
  }
  if (!row.empty()) {
    checksum = stream_copy_crc32c(row.data(), coded.data(), row.size());
    streamed_is_seen();
  }
  return true;
}

Isa best_isa() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
    return wide ? Isa::kAvx512 : Isa::kAvx2;
  }
#endif
  return Isa::kPortable;
}

}  // namespace kvbm
