// Lossless coding of KV blocks: a Huffman coder for the plane of the elements' bytes that has something to gain. The
// coded bytes are kept for long: kvbm/reference/block_coding.py is their specification, tests/golden fixes them.
//
// Life: BlockEncoder and BlockDecoder hold their scratch memory and are made once for a run of blocks; nothing passes
// from block to block. Threads: owner only, as many objects as one likes. Calls neither allocate nor throw.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvbm {

// How one block is kept; kvbm.pools.object.coding.Coding.
enum class Coding : std::uint8_t {
  kRaw = 0,
  kPlanes16 = 1,
  kPlanes8 = 2,
  kPlanes32 = 3,
};
inline constexpr std::uint8_t kCodings = 4;

// What a processor can do; every kind writes the same bytes.
enum class Isa : std::uint8_t { kPortable, kAvx2, kAvx512 };
Isa best_isa() noexcept;

// Elements of a chunk: what one code table is chosen for and the streams are split over.
inline constexpr std::size_t kChunkElements = 16 * 1024;
// Streams of a chunk, coded apart so that a core has several under way.
inline constexpr std::size_t kStreams = 8;
// Bits of the longest code.
inline constexpr unsigned kMostBits = 11;
// Bytes that may be written behind a coded block of so many bytes while it is not known that it does not shrink.
constexpr std::size_t encode_slack(std::size_t block_bytes) noexcept { return 64 + block_bytes / kChunkElements; }

// The lengths of a prefix code over the 256 symbols; 0: has none, or is the only symbol.
using CodeLengths = std::array<std::uint8_t, 256>;
using SymbolCounts = std::array<std::uint32_t, 256>;

// Lengths of 1 to kMostBits for the symbols that occur, all 0 when only one does. Exact rule: the specification's
// `code_lengths`.
CodeLengths code_lengths(const SymbolCounts& counts) noexcept;

// A block's bytes and how they are coded.
struct CodedBlock {
  std::size_t bytes = 0;         // what was written
  Coding coding = Coding::kRaw;  // as asked for, or kRaw where that gains nothing
};

class BlockEncoder {
 public:
  // isa: no more than best_isa().
  explicit BlockEncoder(Isa isa = best_isa()) noexcept : isa_(isa) {}

  // Writes at most block.size() bytes to `out`, and may spoil encode_slack() bytes behind those.
  CodedBlock encode(std::span<const std::uint8_t> block, Coding coding, std::uint8_t* out) noexcept;

 private:
  // Streams that share a code table.
  struct Group {
    std::size_t least_bits(std::size_t slot) const noexcept { return std::min(own_bits, same_bits[slot]); }

    SymbolCounts counts;                   // of their symbols
    CodeLengths lengths;                   // the best code for those
    std::size_t own_bits;                  // what they take by it, the table included
    std::array<std::size_t, 2> same_bits;  // what they take by the table that a slot has
  };
  // How a chunk is coded.
  struct Plan {
    std::array<Group, 2> groups;  // by slot; only those with a fresh table are looked at
    std::uint8_t slots;           // of each stream, a bit each
    std::uint8_t fresh;           // slots that get a new table, a bit each
    std::size_t bits;             // what tables and streams take
  };
  struct Slot {
    CodeLengths lengths{};                   // of the table in it
    std::array<std::uint32_t, 256> codes{};  // of that: code | length << 16
  };

  std::size_t encode_portable(std::span<const std::uint8_t> block, Coding coding, std::uint8_t* out) noexcept;
  std::size_t encode_avx2(std::span<const std::uint8_t> block, Coding coding, std::uint8_t* out) noexcept;
  std::size_t encode_avx512(std::span<const std::uint8_t> block, Coding coding, std::uint8_t* out) noexcept;
  // Bytes written, or the block's own size when it would not shrink by enough.
  template <Isa kIsa>
  std::size_t encode_as(std::span<const std::uint8_t> block, Coding coding, std::uint8_t* out) noexcept;
  template <unsigned kBytes, Isa kIsa>
  std::size_t encode_chunks(std::span<const std::uint8_t> block, std::uint8_t* out) noexcept;
  template <unsigned kBytes, Isa kIsa>
  std::size_t encode_chunk(const std::uint8_t* elements, std::size_t count, std::uint8_t* out) noexcept;
  // For a chunk whose streams have `most` symbols and are counted: one table for all, or two where that takes less;
  // each the one that a slot has, or a new one.
  Plan plan_of(std::size_t most) const noexcept;
  Group group_of(std::uint8_t streams) const noexcept;

  Isa isa_;                                                              // what the processor can do
  alignas(64) std::array<std::uint8_t, kChunkElements + 64> symbols_{};  // the chunk's coded plane
  alignas(64) std::array<SymbolCounts, kStreams> counts_{};              // of each of its streams
  std::array<Slot, 2> slots_{};                                          // tables in force
  std::size_t newest_ = 1;                                               // slot of the stream before
};

class BlockDecoder {
 public:
  // isa: no more than best_isa().
  explicit BlockDecoder(Isa isa = best_isa()) noexcept : isa_(isa) {}

  // Fills `row` from a block's coded bytes and gives its CRC-32C. Returns whether the bytes could be such a block's;
  // when not, the row holds anything. Bytes no encoder wrote may also give other rows, which their checksum then tells.
  bool decode(std::span<const std::uint8_t> coded, Coding coding, std::span<std::uint8_t> row,
              std::uint32_t& checksum) noexcept;

 private:
  // Symbols of a stream, and what a round writes too far
  static constexpr std::size_t kStreamRoom = kChunkElements / kStreams + 64;

  bool decode_portable(std::span<const std::uint8_t> coded, Coding coding, std::span<std::uint8_t> row,
                       std::uint32_t& checksum) noexcept;
  bool decode_avx2(std::span<const std::uint8_t> coded, Coding coding, std::span<std::uint8_t> row,
                   std::uint32_t& checksum) noexcept;
  bool decode_as(std::span<const std::uint8_t> coded, Coding coding, std::span<std::uint8_t> row,
                 std::uint32_t& checksum) noexcept;
  template <unsigned kBytes>
  bool decode_chunks(std::span<const std::uint8_t> coded, std::span<std::uint8_t> row,
                     std::uint32_t& checksum) noexcept;
  struct Table {
    // By the next w bits: up to six symbols, how many they are, and their bits. Widths 1 to kMostBits, width w from
    // entry 2**w on.
    std::array<std::uint64_t, 2U << kMostBits> entries;
    std::array<std::uint16_t, 1U << kMostBits> ones;  // by the next kMostBits: one symbol and its bits
    bool has_ones;                                    // whether those are filled
  };

  // A table as it is kept → a table to decode by. Returns its bytes, 0 when it is none.
  static std::size_t read_table(std::span<const std::uint8_t> coded, Table& table) noexcept;
  static bool make_table(const CodeLengths& lengths, const std::array<std::uint8_t, 256>& present, std::size_t count,
                         Table& table) noexcept;

  Isa isa_;                                                                 // what the processor can do
  alignas(64) std::array<std::uint8_t, kStreams * kStreamRoom> symbols_{};  // the chunk's coded plane, stream by stream
  alignas(64) std::array<Table, 2> tables_{};                               // of the slots
};

}  // namespace kvbm
