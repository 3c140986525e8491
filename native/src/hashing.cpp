#include "kvbm/hashing.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvbm {
namespace {

// One chain on its way.
struct Lane {
  const std::uint8_t* tokens;  // of its next block
  std::uint8_t* out;           // where that block's hash goes
  std::size_t blocks;          // blocks left
  SequenceHash parent;         // the hash before
};

// Hashes the next `blocks` blocks of each of `live` lanes, whose tokens, out and parent move on.
using Advance = void (*)(Lane* lanes, std::size_t live, std::size_t blocks, std::size_t block_tokens) noexcept;

// Where a block's bytes lie in its message: the parent, the tokens, 0x80, zeros, and the length in bits.
struct BlockShape {
  constexpr explicit BlockShape(std::size_t block_tokens) noexcept
      : token_bytes(block_tokens * sizeof(std::uint32_t)),
        bytes(kHashBytes + token_bytes),
        whole_chunks(bytes / kSha256ChunkBytes),
        rest(bytes % kSha256ChunkBytes),
        tail_chunks(rest + 1 + sizeof(std::uint64_t) > kSha256ChunkBytes ? 2 : 1) {}

  std::size_t token_bytes;   // of one block
  std::size_t bytes;         // parent and tokens
  std::size_t whole_chunks;  // chunks of nothing but these
  std::size_t rest;          // what is left of them for the tail
  std::size_t tail_chunks;   // chunks that the padding is in
};

void advance_portable(Lane* lanes, std::size_t live, std::size_t blocks, std::size_t block_tokens) noexcept {
  const BlockShape shape(block_tokens);
  for (Lane& lane : std::span(lanes, live)) {
    for (std::size_t block = 0; block < blocks; ++block) {
      Sha256 sha(sha256_compress_portable);
      sha.update(lane.parent);
      sha.update({lane.tokens, shape.token_bytes});
      const auto digest = sha.finish();
      std::memcpy(lane.parent.data(), digest.data(), kHashBytes);
      std::memcpy(lane.out, digest.data(), kHashBytes);
      lane.tokens += shape.token_bytes;
      lane.out += kHashBytes;
    }
  }
}

constexpr std::size_t kWholeDigestBytes = 32;  // of a whole SHA-256, as engines have it
constexpr std::size_t kDigestsAhead = 16;      // that are on their way to the cache

#if defined(__x86_64__)

#define KVBM_SHA __attribute__((target("sha,sse4.1,ssse3")))
#define KVBM_SHA_INLINE __attribute__((target("sha,sse4.1,ssse3"), always_inline)) inline

// Folds one chunk of each lane. The states are ABEF and CDGH, as the instructions keep them; the words are used up.
template <std::size_t kLanes>
KVBM_SHA_INLINE void fold_chunk(__m128i (&abef)[kLanes], __m128i (&cdgh)[kLanes],
                                __m128i (&words)[kLanes][4]) noexcept {
  __m128i abef_before[kLanes];
  __m128i cdgh_before[kLanes];
#pragma GCC unroll 2
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    abef_before[lane] = abef[lane];
    cdgh_before[lane] = cdgh[lane];
  }
#pragma GCC unroll 16
  for (std::size_t i = 0; i < 16; ++i) {
    const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(kSha256Rounds + 4 * i));
#pragma GCC unroll 2
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      __m128i(&w)[4] = words[lane];
      const __m128i current = w[i & 3];
      const __m128i sums = _mm_add_epi32(current, constants);
      cdgh[lane] = _mm_sha256rnds2_epu32(cdgh[lane], abef[lane], sums);
      if (i >= 3 && i < 15) {  // the words of the next four rounds are due
        const __m128i tail = _mm_alignr_epi8(current, w[(i + 3) & 3], 4);
        w[(i + 1) & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(w[(i + 1) & 3], tail), current);
      }
      abef[lane] = _mm_sha256rnds2_epu32(abef[lane], cdgh[lane], _mm_shuffle_epi32(sums, 0x0E));
      if (i >= 1 && i < 13) {
        w[(i + 3) & 3] = _mm_sha256msg1_epu32(w[(i + 3) & 3], current);
      }
    }
  }
#pragma GCC unroll 2
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    abef[lane] = _mm_add_epi32(abef[lane], abef_before[lane]);
    cdgh[lane] = _mm_add_epi32(cdgh[lane], cdgh_before[lane]);
  }
}

// The states stay in registers: a hash becomes the first words of the next block's message as it is.
template <std::size_t kLanes>
KVBM_SHA_INLINE void hash_blocks(Lane* lanes, std::size_t blocks, std::size_t block_tokens) noexcept {
  const BlockShape shape(block_tokens);
  // The last chunks: what is left of the message goes over the zeros. Where no chunk is whole, the parent is in them
  // too; it never goes through memory, so its place stays zero.
  const std::size_t lead = shape.whole_chunks == 0 ? kHashBytes : 0;
  const std::size_t tail_bytes = shape.rest - lead;
  alignas(16) std::uint8_t tails[kLanes][2 * kSha256ChunkBytes] = {};
  const __m128i big_endian = _mm_set_epi64x(0x0C0D0E0F08090A0B, 0x0405060700010203);
  __m128i parents[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    tails[lane][shape.rest] = 0x80;
    const std::uint64_t bits = __builtin_bswap64(std::uint64_t{shape.bytes} * 8);
    std::memcpy(tails[lane] + shape.tail_chunks * kSha256ChunkBytes - sizeof bits, &bits, sizeof bits);
    const auto* const parent = reinterpret_cast<const __m128i*>(lanes[lane].parent.data());
    parents[lane] = _mm_shuffle_epi8(_mm_loadu_si128(parent), big_endian);
  }
  for (std::size_t block = 0; block < blocks; ++block) {
    __m128i abef[kLanes];
    __m128i cdgh[kLanes];
#pragma GCC unroll 2
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      std::memcpy(tails[lane] + lead, lanes[lane].tokens + shape.token_bytes - tail_bytes, tail_bytes);
      abef[lane] = _mm_set_epi32(static_cast<int>(kSha256Initial[0]), static_cast<int>(kSha256Initial[1]),
                                 static_cast<int>(kSha256Initial[4]), static_cast<int>(kSha256Initial[5]));
      cdgh[lane] = _mm_set_epi32(static_cast<int>(kSha256Initial[2]), static_cast<int>(kSha256Initial[3]),
                                 static_cast<int>(kSha256Initial[6]), static_cast<int>(kSha256Initial[7]));
    }
    for (std::size_t chunk = 0; chunk < shape.whole_chunks + shape.tail_chunks; ++chunk) {
      __m128i words[kLanes][4];
#pragma GCC unroll 2
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const bool is_whole = chunk < shape.whole_chunks;
        const std::uint8_t* const base = is_whole ? lanes[lane].tokens : tails[lane];
        const std::size_t at = is_whole ? chunk * kSha256ChunkBytes : (chunk - shape.whole_chunks) * kSha256ChunkBytes;
        const std::size_t before = is_whole ? kHashBytes : 0;  // the tokens begin after the parent
        words[lane][0] = parents[lane];
#pragma GCC unroll 4
        for (std::size_t i = 0; i < 4; ++i) {
          if (chunk > 0 || i > 0) {
            const auto* const quad = reinterpret_cast<const __m128i*>(base + (at + 16 * i - before));
            words[lane][i] = _mm_shuffle_epi8(_mm_loadu_si128(quad), big_endian);
          }
        }
      }
      fold_chunk(abef, cdgh, words);
    }
#pragma GCC unroll 2
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      parents[lane] = _mm_shuffle_epi32(_mm_unpackhi_epi64(abef[lane], cdgh[lane]), 0xB1);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes[lane].out), _mm_shuffle_epi8(parents[lane], big_endian));
      lanes[lane].tokens += shape.token_bytes;
      lanes[lane].out += kHashBytes;
    }
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes[lane].parent.data()),
                     _mm_shuffle_epi8(parents[lane], big_endian));
  }
}

KVBM_SHA void advance_sha(Lane* lanes, std::size_t live, std::size_t blocks, std::size_t block_tokens) noexcept {
  if (live == 2) {
    hash_blocks<2>(lanes, blocks, block_tokens);
  } else {
    hash_blocks<1>(lanes, blocks, block_tokens);
  }
}

// A root and a digest of 32 bytes fill one chunk with their padding, so a message is made in registers.
template <std::size_t kLanes>
KVBM_SHA_INLINE void derive_chunks(const __m128i root, const Bytes* digests, std::uint8_t* out) noexcept {
  const __m128i big_endian = _mm_set_epi64x(0x0C0D0E0F08090A0B, 0x0405060700010203);
  const __m128i padding = _mm_set_epi32((kHashBytes + kWholeDigestBytes) * 8, 0, 0, static_cast<int>(0x80000000U));
  __m128i abef[kLanes];
  __m128i cdgh[kLanes];
  __m128i words[kLanes][4];
#pragma GCC unroll 2
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const auto* const quads = reinterpret_cast<const __m128i*>(digests[lane].data());
    words[lane][0] = root;
    words[lane][1] = _mm_shuffle_epi8(_mm_loadu_si128(quads), big_endian);
    words[lane][2] = _mm_shuffle_epi8(_mm_loadu_si128(quads + 1), big_endian);
    words[lane][3] = padding;
    abef[lane] = _mm_set_epi32(static_cast<int>(kSha256Initial[0]), static_cast<int>(kSha256Initial[1]),
                               static_cast<int>(kSha256Initial[4]), static_cast<int>(kSha256Initial[5]));
    cdgh[lane] = _mm_set_epi32(static_cast<int>(kSha256Initial[2]), static_cast<int>(kSha256Initial[3]),
                               static_cast<int>(kSha256Initial[6]), static_cast<int>(kSha256Initial[7]));
  }
  fold_chunk(abef, cdgh, words);
#pragma GCC unroll 2
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const __m128i hash = _mm_shuffle_epi32(_mm_unpackhi_epi64(abef[lane], cdgh[lane]), 0xB1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + lane * kHashBytes), _mm_shuffle_epi8(hash, big_endian));
  }
}

// Hashes digests of 32 bytes.
KVBM_SHA void derive_sha(const SequenceHash& root, std::span<const Bytes> digests, std::uint8_t* out) noexcept {
  const __m128i big_endian = _mm_set_epi64x(0x0C0D0E0F08090A0B, 0x0405060700010203);
  const __m128i words = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(root.data())), big_endian);
  std::size_t at = 0;
  for (; at + 2 <= digests.size(); at += 2) {
    if (at + kDigestsAhead < digests.size()) {
      __builtin_prefetch(digests[at + kDigestsAhead].data());
      __builtin_prefetch(digests[at + kDigestsAhead - 1].data());
    }
    derive_chunks<2>(words, &digests[at], out + at * kHashBytes);
  }
  if (at < digests.size()) {
    derive_chunks<1>(words, &digests[at], out + at * kHashBytes);
  }
}

#undef KVBM_SHA
#undef KVBM_SHA_INLINE

constexpr std::size_t kWideLanes = 8;

// One word of each lane's message or state.
using Wide = std::uint32_t __attribute__((vector_size(kWideLanes * sizeof(std::uint32_t))));

#define KVBM_AVX2 __attribute__((target("avx2")))
#define KVBM_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline

template <int kBits>
KVBM_AVX2_INLINE Wide rotate_right(Wide value) noexcept {
  return (value >> kBits) | (value << (32 - kBits));
}

// Folds one chunk of each lane: the portable rounds, a lane in each element.
KVBM_AVX2_INLINE void fold_wide(Wide (&state)[8], Wide (&w)[16]) noexcept {
  Wide a = state[0], b = state[1], c = state[2], d = state[3];
  Wide e = state[4], f = state[5], g = state[6], h = state[7];
  for (std::size_t group = 0; group < 64; group += 16) {
#pragma GCC unroll 16
    for (std::size_t t = 0; t < 16; ++t) {
      if (group > 0) {  // w[t] is sixteen rounds old, and the others lie around it
        const Wide early = w[(t + 1) & 15];
        const Wide late = w[(t + 14) & 15];
        const Wide s0 = rotate_right<7>(early) ^ rotate_right<18>(early) ^ (early >> 3);
        const Wide s1 = rotate_right<17>(late) ^ rotate_right<19>(late) ^ (late >> 10);
        w[t] += s0 + w[(t + 9) & 15] + s1;
      }
      const Wide s1 = rotate_right<6>(e) ^ rotate_right<11>(e) ^ rotate_right<25>(e);
      const Wide t1 = h + s1 + (g ^ (e & (f ^ g))) + kSha256Rounds[group + t] + w[t];
      const Wide s0 = rotate_right<2>(a) ^ rotate_right<13>(a) ^ rotate_right<22>(a);
      const Wide t2 = s0 + ((a & b) | (c & (a | b)));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
  }
  state[0] += a, state[1] += b, state[2] += c, state[3] += d;
  state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

KVBM_AVX2 void advance_wide(Lane* lanes, std::size_t live, std::size_t blocks, std::size_t block_tokens) noexcept {
  const BlockShape shape(block_tokens);
  const std::size_t words = (shape.whole_chunks + shape.tail_chunks) * 16;
  const std::uint64_t bits = std::uint64_t{shape.bytes} * 8;
  const std::uint8_t* tokens[kWideLanes];
  Wide parents[4];
  for (std::size_t lane = 0; lane < kWideLanes; ++lane) {
    const Lane& source = lanes[lane < live ? lane : 0];  // elements without a lane repeat the first and are not stored
    tokens[lane] = source.tokens;
    for (std::size_t word = 0; word < 4; ++word) {
      std::uint32_t value = 0;
      std::memcpy(&value, source.parent.data() + 4 * word, sizeof value);
      parents[word][lane] = __builtin_bswap32(value);
    }
  }
  for (std::size_t block = 0; block < blocks; ++block) {
    Wide state[8];
    for (std::size_t word = 0; word < 8; ++word) {
      state[word] = Wide{} + kSha256Initial[word];
    }
    for (std::size_t first = 0; first < words; first += 16) {
      Wide w[16];
      for (std::size_t t = 0; t < 16; ++t) {
        // A message's words: [0, 4) parent, [4, 4 + B) tokens, 4 + B the end mark, zeros, the last two the length.
        const std::size_t word = first + t;
        if (word < 4) {
          w[t] = parents[word];
        } else if (word < 4 + block_tokens) {
          std::uint32_t column[kWideLanes];
          for (std::size_t lane = 0; lane < kWideLanes; ++lane) {
            std::memcpy(&column[lane], tokens[lane] + 4 * (word - 4), sizeof column[lane]);
            column[lane] = __builtin_bswap32(column[lane]);
          }
          std::memcpy(&w[t], column, sizeof column);
        } else if (word == 4 + block_tokens) {
          w[t] = Wide{} + 0x80000000U;
        } else if (word == words - 2) {
          w[t] = Wide{} + static_cast<std::uint32_t>(bits >> 32);
        } else if (word == words - 1) {
          w[t] = Wide{} + static_cast<std::uint32_t>(bits);
        } else {
          w[t] = Wide{};
        }
      }
      fold_wide(state, w);
    }
    for (std::size_t word = 0; word < 4; ++word) {
      parents[word] = state[word];
      for (std::size_t lane = 0; lane < live; ++lane) {
        const std::uint32_t value = __builtin_bswap32(state[word][lane]);
        std::memcpy(lanes[lane].out + 4 * word, &value, sizeof value);
      }
    }
    for (std::size_t lane = 0; lane < live; ++lane) {
      lanes[lane].out += kHashBytes;
    }
    for (const std::uint8_t*& at : tokens) {
      at += shape.token_bytes;
    }
  }
  for (std::size_t lane = 0; lane < live; ++lane) {
    lanes[lane].tokens = tokens[lane];
    std::memcpy(lanes[lane].parent.data(), lanes[lane].out - kHashBytes, kHashBytes);
  }
}

void advance_avx2(Lane* lanes, std::size_t live, std::size_t blocks, std::size_t block_tokens) noexcept {
  if (live == 1) {
    advance_portable(lanes, live, blocks, block_tokens);
  } else {
    advance_wide(lanes, live, blocks, block_tokens);
  }
}

#undef KVBM_AVX2
#undef KVBM_AVX2_INLINE

#endif

// A kernel's lanes, at most kMaxLanes, and how they move on.
struct Lanes {
  std::size_t count;  // chains at once
  Advance advance;    // hashes up to so many
};

constexpr std::size_t kMaxLanes = 8;

Lanes lanes_of(HashKernel kernel) noexcept {
  switch (kernel) {
#if defined(__x86_64__)
    case HashKernel::kSha:
      return {2, advance_sha};
    case HashKernel::kAvx2:
      return {kWideLanes, advance_avx2};
#endif
    default:
      return {1, advance_portable};
  }
}

Lane lane_of(std::span<const std::uint32_t> tokens, std::size_t block_tokens, const SequenceHash& root,
             std::uint8_t* out) noexcept {
  return {.tokens = reinterpret_cast<const std::uint8_t*>(tokens.data()),
          .out = out,
          .blocks = tokens.size() / block_tokens,
          .parent = root};
}

}  // namespace

bool has_hash_kernel(HashKernel kernel) noexcept {
  switch (kernel) {
    case HashKernel::kPortable:
      return true;
    case HashKernel::kSha:
      return sha256_has_hardware();
    case HashKernel::kAvx2:
#if defined(__x86_64__)
      return __builtin_cpu_supports("avx2") != 0;
#else
      return false;
#endif
  }
  return false;
}

HashKernel fastest_hash_kernel() noexcept {
  static const HashKernel fastest = [] {  // cpuid traps in virtual machines, so it is asked once
    for (const HashKernel kernel : {HashKernel::kSha, HashKernel::kAvx2}) {
      if (has_hash_kernel(kernel)) {
        return kernel;
      }
    }
    return HashKernel::kPortable;
  }();
  return fastest;
}

void sequence_hashes(std::span<const std::uint32_t> tokens, std::size_t block_tokens, const SequenceHash& root,
                     std::span<const Bytes> extra_keys, std::span<std::uint8_t> out, HashKernel kernel) noexcept {
  Lane lane = lane_of(tokens, block_tokens, root, out.data());
  if (extra_keys.empty()) {
    lanes_of(kernel).advance(&lane, 1, lane.blocks, block_tokens);
    return;
  }
  const std::size_t token_bytes = block_tokens * sizeof(std::uint32_t);
  const Sha256Compress compress = kernel == HashKernel::kSha ? sha256_compress_hardware : sha256_compress_portable;
  for (const Bytes key : extra_keys.first(lane.blocks)) {
    Sha256 sha(compress);
    sha.update(lane.parent);
    sha.update({lane.tokens, token_bytes});
    sha.update(key);
    const auto digest = sha.finish();
    std::memcpy(lane.parent.data(), digest.data(), kHashBytes);
    std::memcpy(lane.out, digest.data(), kHashBytes);
    lane.tokens += token_bytes;
    lane.out += kHashBytes;
  }
}

void derived_hashes(const SequenceHash& root, std::span<const Bytes> digests, std::span<std::uint8_t> out,
                    HashKernel kernel) noexcept {
  constexpr std::size_t kWord = sizeof(std::uint32_t);
  const Lanes kind = lanes_of(kernel);
  const Sha256Compress compress = kernel == HashKernel::kSha ? sha256_compress_hardware : sha256_compress_portable;
  std::uint8_t* to = out.data();
  Lane lanes[kMaxLanes];
  while (!digests.empty()) {
    const std::size_t bytes = digests.front().size();
#if defined(__x86_64__)
    if (kernel == HashKernel::kSha && bytes == kWholeDigestBytes) {
      const auto other = std::ranges::find_if(digests, [](Bytes digest) { return digest.size() != kWholeDigestBytes; });
      const auto count = static_cast<std::size_t>(other - digests.begin());
      derive_sha(root, digests.first(count), to);
      to += count * kHashBytes;
      digests = digests.subspan(count);
      continue;
    }
#endif
    if (bytes == 0 || bytes % kWord != 0) {
      Sha256 sha(compress);
      sha.update(root);
      sha.update(digests.front());
      const auto digest = sha.finish();
      std::memcpy(to, digest.data(), kHashBytes);
      to += kHashBytes;
      digests = digests.subspan(1);
      continue;
    }
    // A digest of whole words is hashed as the only block of a chain, whose tokens it stands for.
    std::size_t live = 0;
    for (; live < std::min(kind.count, digests.size()) && digests[live].size() == bytes; ++live) {
      lanes[live] = {.tokens = digests[live].data(), .out = to, .blocks = 1, .parent = root};
      to += kHashBytes;
    }
    kind.advance(lanes, live, 1, bytes / kWord);
    digests = digests.subspan(live);
  }
}

void sequence_hashes_batch(std::span<HashJob> jobs, std::size_t block_tokens, HashKernel kernel) noexcept {
  const Lanes kind = lanes_of(kernel);
  std::ranges::sort(jobs, std::ranges::greater{}, [](const HashJob& job) { return job.tokens.size(); });
  Lane lanes[kMaxLanes];
  std::size_t live = 0;
  for (std::size_t next = 0;;) {
    for (; live < kind.count && next < jobs.size(); ++next) {
      const HashJob& job = jobs[next];
      lanes[live] = lane_of(job.tokens, block_tokens, job.root, job.out);
      live += lanes[live].blocks > 0 ? 1 : 0;
    }
    if (live == 0) {
      return;
    }
    const auto shortest = std::ranges::min_element(std::span(lanes, live), {}, &Lane::blocks);
    const std::size_t blocks = shortest->blocks;
    kind.advance(lanes, live, blocks, block_tokens);
    for (Lane& lane : std::span(lanes, live)) {
      lane.blocks -= blocks;
    }
    Lane* const end = std::remove_if(lanes, lanes + live, [](const Lane& lane) { return lane.blocks == 0; });
    live = static_cast<std::size_t>(end - lanes);
  }
}

}  // namespace kvbm
