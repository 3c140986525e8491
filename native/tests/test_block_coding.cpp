#include "kvbm/block_coding.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "check.hpp"
#include "kvbm/checksum.hpp"

using namespace kvbm;
using tests::Random;

namespace {

using Buffer = std::vector<std::uint8_t>;
constexpr std::array kAllCodings = {Coding::kRaw, Coding::kPlanes16, Coding::kPlanes8, Coding::kPlanes32};

// Every kind of processor that this one can be.
std::vector<Isa> kinds() {
  std::vector<Isa> found{Isa::kPortable};
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= best_isa()) {
      found.push_back(isa);
    }
  }
  return found;
}

struct Coded {
  Buffer bytes;
  Coding coding;
};

// Room of exactly what may be written, so that ASan sees one byte too far.
Coded encoded(const Buffer& block, Coding coding, Isa isa) {
  Buffer out(block.size() + encode_slack(block.size()));
  const auto found = std::make_unique<BlockEncoder>(isa)->encode(block, coding, out.data());
  CHECK(found.bytes <= block.size() || block.empty());
  out.resize(found.bytes);
  out.shrink_to_fit();
  return {out, found.coding};
}

struct Row {
  bool good;
  Buffer bytes;
  std::uint32_t checksum;
};

Row decoded(const Buffer& coded, Coding coding, std::size_t block_bytes, Isa isa) {
  Row row{false, Buffer(block_bytes, 0xA5), 0};
  row.good = std::make_unique<BlockDecoder>(isa)->decode(coded, coding, row.bytes, row.checksum);
  return row;
}

// Elements whose high bytes are like exponents, or that are anything.
Buffer some_block(Random& random, std::size_t bytes) {
  Buffer block = random.bytes(bytes);
  if (random.below(5) == 0) {
    return block;
  }
  const std::size_t element = std::size_t{1} << random.below(3);
  const std::size_t period = 64U << random.below(10);
  for (std::size_t at = element - 1; at < bytes; at += element) {
    const auto shift = static_cast<std::uint8_t>(at / period % 3 * 9);
    block[at] = static_cast<std::uint8_t>(shift + 60 - std::countr_zero(random.next() | 1ULL << 20));
  }
  return block;
}

void every_processor_writes_the_same_and_reads_it_back() {
  Random random(1);
  for (int round = 0; round < 150; ++round) {
    const Buffer block = some_block(random, random.below(round % 10 == 0 ? 150'000 : 5'000));
    for (const Coding coding : kAllCodings) {
      const Coded first = encoded(block, coding, Isa::kPortable);
      for (const Isa isa : kinds()) {
        const Coded coded = encoded(block, coding, isa);
        CHECK(coded.bytes == first.bytes && coded.coding == first.coding);
        const Row row = decoded(coded.bytes, coded.coding, block.size(), isa);
        CHECK(row.good && row.bytes == block && row.checksum == crc32c(block));
      }
    }
  }
}

void golden_blocks_are_read_and_written_the_same() {
  const Buffer golden = tests::read_golden("coded_blocks_v1.bin");
  std::size_t blocks = 0;
  for (std::size_t at = 0; at < golden.size(); ++blocks) {
    std::array<std::uint32_t, 3> sizes;
    std::memcpy(sizes.data(), golden.data() + at + 2, sizeof sizes);
    const auto asked = static_cast<Coding>(golden[at]);
    const auto got = static_cast<Coding>(golden[at + 1]);
    at += 2 + sizeof sizes;
    const Buffer coded(golden.begin() + static_cast<std::ptrdiff_t>(at),
                       golden.begin() + static_cast<std::ptrdiff_t>(at + sizes[1]));
    at += sizes[1];
    for (const Isa isa : kinds()) {
      const Row row = decoded(coded, got, sizes[0], isa);
      CHECK(row.good && row.checksum == sizes[2] && crc32c(row.bytes) == sizes[2]);
      const Coded again = encoded(row.bytes, asked, isa);
      CHECK(again.bytes == coded && again.coding == got);
    }
  }
  CHECK(blocks == 8);
}

void spoilt_bytes_stay_inside_and_mean_the_same_everywhere() {
  Random random(2);
  for (int round = 0; round < 400; ++round) {
    const Buffer block = some_block(random, 256 + random.below(40'000));
    const Coding coding = kAllCodings[1 + random.below(3)];
    Coded coded = encoded(block, coding, best_isa());
    for (std::size_t left = 1 + random.below(4); left > 0; --left) {
      const std::size_t within =
          random.below(2) == 0 ? std::min<std::size_t>(coded.bytes.size(), 200) : coded.bytes.size();
      coded.bytes[random.below(within)] = static_cast<std::uint8_t>(random.next());
    }
    if (random.below(3) == 0) {
      coded.bytes.resize(random.below(coded.bytes.size() + 1));
      coded.bytes.shrink_to_fit();
    }
    const std::size_t row_bytes = random.below(4) == 0 ? random.below(60'000) : block.size();
    const Row first = decoded(coded.bytes, coding, row_bytes, Isa::kPortable);
    CHECK(!first.good || first.checksum == crc32c(first.bytes));
    for (const Isa isa : kinds()) {
      const Row row = decoded(coded.bytes, coding, row_bytes, isa);
      CHECK(row.good == first.good && row.bytes == first.bytes);
    }
  }
}

void codes_are_whole_and_short() {
  Random random(3);
  for (int round = 0; round < 3'000; ++round) {
    SymbolCounts counts{};
    const std::size_t present = random.below(257);
    for (std::size_t number = 0; number < present; ++number) {
      counts[random.below(256)] = static_cast<std::uint32_t>(random.next() >> (32 + random.below(32)));
    }
    const CodeLengths lengths = code_lengths(counts);
    std::size_t symbols = 0;
    std::size_t taken = 0;
    for (std::size_t symbol = 0; symbol < counts.size(); ++symbol) {
      symbols += counts[symbol] != 0;
      CHECK(lengths[symbol] <= kMostBits && (lengths[symbol] == 0 || counts[symbol] != 0));
      taken += lengths[symbol] == 0 ? 0 : (std::size_t{1} << kMostBits) >> lengths[symbol];
    }
    CHECK(taken == (symbols < 2 ? 0 : std::size_t{1} << kMostBits));
  }
}

void a_block_whose_chunks_do_not_shrink_keeps_to_its_room() {
  Random random(4);
  Buffer block = random.bytes(4 << 20);  // 256 chunks, each a byte larger when it is coded as it is
  for (std::size_t at = 0; at < block.size(); at += block.size() / 16) {
    std::fill_n(block.begin() + static_cast<std::ptrdiff_t>(at), 256, std::uint8_t{0});  // what the first look sees
  }
  for (const Isa isa : kinds()) {
    const Coded coded = encoded(block, Coding::kPlanes8, isa);
    CHECK(coded.coding == Coding::kRaw && coded.bytes == block);
  }
}

void nothing_is_a_block_of_nothing() {
  for (const Coding coding : kAllCodings) {
    const Coded coded = encoded({}, coding, best_isa());
    CHECK(coded.bytes.empty() && coded.coding == Coding::kRaw);
    CHECK(decoded({}, Coding::kRaw, 0, best_isa()).good);
    CHECK(!decoded({}, coding, 8, best_isa()).good);
  }
}

void several_threads_have_coders_of_their_own() {
  std::vector<std::thread> threads;
  for (std::uint64_t number = 0; number < 3; ++number) {
    threads.emplace_back([number] {
      Random random(10 + number);
      for (int round = 0; round < 10; ++round) {
        const Buffer block = some_block(random, 50'000);
        const Coded coded = encoded(block, Coding::kPlanes16, best_isa());
        CHECK(decoded(coded.bytes, coded.coding, block.size(), best_isa()).bytes == block);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace

int main() {
  return tests::run(
      {{"every processor writes the same bytes and reads them back", every_processor_writes_the_same_and_reads_it_back},
       {"golden blocks are read and written the same", golden_blocks_are_read_and_written_the_same},
       {"spoilt bytes stay inside and mean the same everywhere", spoilt_bytes_stay_inside_and_mean_the_same_everywhere},
       {"codes are whole and short", codes_are_whole_and_short},
       {"a block whose chunks do not shrink keeps to its room", a_block_whose_chunks_do_not_shrink_keeps_to_its_room},
       {"nothing is a block of nothing", nothing_is_a_block_of_nothing},
       {"several threads have coders of their own", several_threads_have_coders_of_their_own}});
}
