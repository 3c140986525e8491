// Any bytes are a checkpoint or a typed Error; what loads is written to a checkpoint that loads to the same states; and
// neither asks for more memory than the bytes that are there justify. Chunks are numbered and checksummed, so mutated
// bytes are tried as they are and, repaired, once more: only then does a mutation reach the fields behind the checksum.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz.hpp"
#include "kvbm/checkpoint.hpp"
#include "kvbm/checksum.hpp"
#include "kvbm/error.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

using namespace kvbm;
using fuzz::MemoryMeter;

namespace {

using Buffer = std::vector<std::uint8_t>;

constexpr std::string_view kMagic("KVX\0", 4);
constexpr std::size_t kHeaderBytes = 20;
constexpr std::size_t kKindAt = 6;       // in a chunk
constexpr std::size_t kNumberAt = 8;     // in a chunk
constexpr std::size_t kLengthAt = 12;    // in a chunk
constexpr std::size_t kChecksumAt = 16;  // in a chunk
constexpr std::uint64_t kCapacity = 64;  // few, so that some inputs meet it
// The same each time, or findings could not be tried again
constexpr std::array<std::uint64_t, 3> kSecret{1, 2, 3};
// What loading anything may ask for: a slab of sets, an Error
constexpr std::size_t kLoadBytes = std::size_t{128} << 10;
// And for each byte: an instance, a holder space and its place in a map
constexpr std::size_t kGrowth = 64;

template <class Number>
Number number_at(Bytes data, std::size_t at) noexcept {
  Number value = 0;
  if (at + sizeof value <= data.size()) {
    std::memcpy(&value, data.data() + at, sizeof value);
  }
  return value;
}

template <class Number>
void put(std::span<std::uint8_t> data, std::size_t at, Number value) noexcept {
  if (at + sizeof value <= data.size()) {
    std::memcpy(data.data() + at, &value, sizeof value);
  }
}

// The blocks that a blocks chunk says it has.
std::uint32_t blocks_in(Bytes payload) noexcept {
  std::size_t at = 4;
  for (auto sets = number_at<std::uint32_t>(payload, 0); sets > 0 && at < payload.size(); --sets) {
    at += 8 + std::size_t{4} * number_at<std::uint32_t>(payload, at + 4);
  }
  return number_at<std::uint32_t>(payload, at);
}

// Gives each chunk the number and the length it has now, up to the next magic or the end, and the checksum of its
// bytes; and the end the counts of what is before it.
void repair(std::span<std::uint8_t> data) noexcept {
  const std::string_view text(reinterpret_cast<const char*>(data.data()), data.size());
  std::uint32_t number = 0;
  std::uint64_t blocks = 0;
  for (std::size_t at = text.find(kMagic); at < text.size();) {
    const std::size_t next = std::min(text.find(kMagic, at + 1), text.size());
    if (const std::span<std::uint8_t> chunk = data.subspan(at, next - at); chunk.size() >= kHeaderBytes) {
      const std::span<std::uint8_t> payload = chunk.subspan(kHeaderBytes);
      const auto kind = number_at<std::uint16_t>(chunk, kKindAt);
      if (kind == 2) {
        blocks += blocks_in(payload);
      } else if (kind == 3) {
        put(payload, 0, number);
        put(payload, 4, blocks);
      }
      put(chunk, kNumberAt, number++);
      put(chunk, kLengthAt, static_cast<std::uint32_t>(payload.size()));
      put(chunk, kChecksumAt, crc32c(payload, crc32c(chunk.first(kChecksumAt))));
    }
    at = next;
  }
}

// The note, or nothing after an Error.
std::optional<std::string> load(ClusterIndex& index, Bytes data) {
  const MemoryMeter meter;
  std::optional<std::string> note;
  try {
    note = load_checkpoint(index, data);
  } catch (const Error& error) {
    REQUIRE(error.code() == ErrorCode::kCheckpoint && error.at() <= data.size());
  }
  REQUIRE(meter.bytes() <= kLoadBytes + kGrowth * data.size());
  REQUIRE(index.residency_count() <= kCapacity);
  return note;
}

Buffer written(const ClusterIndex& index, std::string_view note) {
  static const int file = memfd_create("checkpoint", MFD_CLOEXEC);
  REQUIRE(file >= 0 && ftruncate(file, 0) == 0 && lseek(file, 0, SEEK_SET) == 0);
  const CheckpointSize size =
      write_checkpoint(index, file, {reinterpret_cast<const std::uint8_t*>(note.data()), note.size()});
  Buffer data(size.bytes);
  REQUIRE(pread(file, data.data(), data.size(), 0) == static_cast<ssize_t>(data.size()));
  return data;
}

void require_same(const ClusterIndex& one, const ClusterIndex& other) {
  REQUIRE(one.instance_count() == other.instance_count());
  REQUIRE(one.residency_count() == other.residency_count());
  REQUIRE(one.block_count() == other.block_count());
  REQUIRE(one.claim_counts() == other.claim_counts());
  for (std::uint32_t instance = 0; instance < one.instance_count(); ++instance) {
    REQUIRE(one.instance_name(instance) == other.instance_name(instance));
    const std::optional<InstanceState> state = one.state(instance);
    REQUIRE(state == other.state(instance));
    REQUIRE(!state || state->digest == one.recomputed_digest(instance));
    for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
      REQUIRE(one.pool_of(instance, static_cast<Tier>(tier)) == other.pool_of(instance, static_cast<Tier>(tier)));
    }
  }
}

// Whether the bytes loaded.
bool load_and_write(Bytes data) {
  ClusterIndex index(kCapacity, kSecret);
  const std::optional<std::string> note = load(index, data);
  if (!note) {
    return false;
  }
  const Buffer again = written(index, *note);
  ClusterIndex other(kCapacity, kSecret);
  REQUIRE(load(other, again) == note);
  require_same(index, other);
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  MemoryMeter::install();
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);  // a few blocks would make whole huge pages be zeroed
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned int seed) {
  const std::size_t mutated = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 8 != 0) {  // now and then bytes with a wrong length, number or checksum
    repair({data, mutated});
  }
  return mutated;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Bytes bytes(data, size);
  if (!load_and_write(bytes)) {
    Buffer repaired(bytes.begin(), bytes.end());  // of exactly these bytes, so that ASan sees one too far
    repair(repaired);
    if (!std::equal(repaired.begin(), repaired.end(), bytes.begin())) {
      load_and_write(repaired);
    }
  }
  return 0;
}
