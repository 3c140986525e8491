// Any bytes decode to a row or to nothing, the same on every processor, inside the row, without asking for memory; and
// any block comes back from its coded bytes. Input: coding (1 byte), bytes of the row (2, times 9), coded bytes; the
// whole input, repeated, is a block.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "fuzz.hpp"
#include "kvbm/block_coding.hpp"
#include "kvbm/checksum.hpp"

using namespace kvbm;
using fuzz::MemoryMeter;

namespace {

using Buffer = std::vector<std::uint8_t>;

constexpr std::size_t kHead = 3;
constexpr std::size_t kRowStep = 9;  // rows of up to 576 KiB, of several chunks

struct Coders {
  std::unique_ptr<BlockEncoder> encoder;
  std::unique_ptr<BlockDecoder> decoder;
};

std::vector<Coders> coders() {
  std::vector<Coders> found;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= best_isa()) {
      found.push_back({std::make_unique<BlockEncoder>(isa), std::make_unique<BlockDecoder>(isa)});
    }
  }
  return found;
}

void decode_anything(const std::vector<Coders>& all, const std::uint8_t* data, std::size_t size) {
  const Buffer coded(data + kHead, data + size);  // of exactly these bytes, so that ASan sees one too far
  const auto coding = static_cast<Coding>(data[0] % kCodings);
  const std::size_t row_bytes = (data[1] + 256U * data[2]) * kRowStep % (std::size_t{1} << (data[2] % 20));
  bool first_good = false;
  Buffer first_row;
  for (const Coders& coder : all) {
    Buffer row(row_bytes, 0xA5);
    std::uint32_t checksum = 0;
    const MemoryMeter meter;
    const bool good = coder.decoder->decode(coded, coding, row, checksum);
    REQUIRE(meter.bytes() == 0);
    REQUIRE(!good || checksum == crc32c(row));
    if (&coder == &all.front()) {
      first_good = good;
      first_row = std::move(row);
    } else {
      REQUIRE(good == first_good && row == first_row);
    }
  }
}

void come_back(const std::vector<Coders>& all, const std::uint8_t* data, std::size_t size) {
  const auto coding = static_cast<Coding>(data[0] % kCodings);
  Buffer block(size * (1 + data[1] % 16));
  for (std::size_t at = 0; at < block.size(); ++at) {
    block[at] = data[at * (1 + data[2] % 7) % size];
  }
  Buffer first;
  for (const Coders& coder : all) {
    Buffer out(block.size() + encode_slack(block.size()));
    const MemoryMeter meter;
    const CodedBlock coded = coder.encoder->encode(block, coding, out.data());
    REQUIRE(meter.bytes() == 0 && coded.bytes <= block.size());
    out.resize(coded.bytes);
    out.shrink_to_fit();
    REQUIRE(&coder == &all.front() || out == first);
    first = out;
    Buffer row(block.size());
    std::uint32_t checksum = 0;
    REQUIRE(coder.decoder->decode(out, coded.coding, row, checksum));
    REQUIRE(row == block && checksum == crc32c(block));
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  MemoryMeter::install();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<Coders> all = coders();
  if (size >= kHead) {
    decode_anything(all, data, size);
    come_back(all, data, size);
  }
  return 0;
}
