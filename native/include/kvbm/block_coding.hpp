// Lossless coding of KV blocks: a Huffman coder for the plane of the elements' bytes that has something to gain. The coded bytes are
// kept for long: kvbm/pools/coding_reference.py is their specification, tests/golden fixes them.
//
// Life: BlockEncoder and BlockDecoder hold their scratch memory and are made once for a run of blocks; nothing passes from block to
// block. Threads: owner only, as many objects as one likes. Calls neither allocate nor throw.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvbm {

// How one block is kept; kvbm.pools.coding.Coding.
enum class Coding : std::uint8_t {
  kRaw = 0,
  kPlanes16 = 1,
  kPlanes8 = 2,
  kPlanes32 = 3,
};
inline constexpr std::uint8_t kCodings = 4;

// Elements of a chunk: what one code table is chosen for and the streams are split over.
inline constexpr std::size_t kChunkElements = 16 * 1024;
// Streams of a chunk, coded apart so that a core has several under way.
inline constexpr std::size_t kStreams = 8;
// Bits of the longest code.
inline constexpr unsigned kMostBits = 11;
// Bytes that may be written behind a coded block, so that its words go out whole.
inline constexpr std::size_t kEncodeSlack = 64;

// The lengths of a prefix code over the 256 symbols; 0: has none, or is the only symbol.
using CodeLengths = std::array<std::uint8_t, 256>;
using SymbolCounts = std::array<std::uint32_t, 256>;

// Lengths of 1 to kMostBits for the symbols that occur, all 0 when only one does. Exact rule: the specification's `code_lengths`.
CodeLengths code_lengths(const SymbolCounts& counts) noexcept;

// A block's bytes and how they are coded.
struct CodedBlock {
  std::size_t bytes = 0;          // what was written
  Coding coding = Coding::kRaw;   // as asked for, or kRaw where that gains nothing
};

class BlockEncoder {
 public:
  // Writes at most block.size() bytes to `out`, and may spoil kEncodeSlack bytes behind them.
  CodedBlock encode(std::span<const std::uint8_t> block, Coding coding, std::uint8_t* out) noexcept;

 private:
  template <unsigned kBytes>
  std::size_t encode_planes(std::span<const std::uint8_t> block, std::uint8_t* out) noexcept;
  template <unsigned kBytes>
  std::size_t encode_chunks(std::span<const std::uint8_t> block, std::uint8_t* out) noexcept;
  template <unsigned kBytes>
  std::size_t encode_chunk(const std::uint8_t* elements, std::size_t count, std::uint8_t* out) noexcept;

  alignas(64) std::array<std::uint8_t, kChunkElements + 64> symbols_{};  // the chunk's coded plane
  std::array<std::uint32_t, 256> codes_{};                               // of the table in force: code | length << 16
  CodeLengths lengths_{};                                                // of the table in force
};

class BlockDecoder {
 public:
  // Fills `row` from a block's coded bytes and gives its CRC-32C. Returns whether the bytes could be such a block's; when not, the row
  // holds anything. Bytes no encoder wrote may also give other rows, which their checksum then tells.
  bool decode(std::span<const std::uint8_t> coded, Coding coding, std::span<std::uint8_t> row, std::uint32_t& checksum) noexcept;

 private:
  static constexpr std::size_t kStreamRoom = kChunkElements / kStreams + 64;  // symbols of a stream, and what a round writes too far

  template <unsigned kBytes>
  bool decode_chunks(std::span<const std::uint8_t> coded, std::span<std::uint8_t> row, std::uint32_t& checksum) noexcept;
  // A table as it is kept → entries_. Returns its bytes, 0 when it is none.
  std::size_t read_table(std::span<const std::uint8_t> coded) noexcept;
  bool make_table(const CodeLengths& lengths, const std::array<std::uint8_t, 256>& present, std::size_t count) noexcept;

  alignas(64) std::array<std::uint8_t, kStreams * kStreamRoom> symbols_{};    // the chunk's coded plane, stream by stream
  // By the next w bits: up to six symbols, how many they are, and their bits. Widths 1 to kMostBits, width w from entry 2**w on.
  alignas(64) std::array<std::uint64_t, 2U << kMostBits> entries_{};
};

}  // namespace kvbm
