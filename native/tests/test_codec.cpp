#include "kvbm/codec.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "check.hpp"
#include "kvbm/checksum.hpp"

using namespace kvbm;
using tests::Random;
using tests::thrown_code;

namespace {

using Buffer = std::vector<std::uint8_t>;

// Reads a frame to its end and writes what it said again. Throws as FrameReader.
Buffer rewritten(Bytes data, std::size_t at = 0) {
  FrameReader reader(data, at);
  FrameWriter writer(reader.header());
  while (const auto event = reader.next()) {
    writer.add(*event);
  }
  Buffer out(writer.frame_bytes());
  writer.write(out);
  return out;
}

void fix_checksum(Buffer& data) {
  const auto size = static_cast<std::uint32_t>(data.size());
  std::memcpy(data.data() + 8, &size, sizeof size);
  const std::uint32_t checksum = crc32c({data.data(), data.size() - kFrameChecksumBytes});
  std::memcpy(data.data() + data.size() - kFrameChecksumBytes, &checksum, sizeof checksum);
}

Buffer written(std::initializer_list<Event> events) {
  FrameHeader header;
  header.instance = "worker-0";
  header.epoch = 3;
  FrameWriter writer(header);
  for (const Event& event : events) {
    writer.add(event);
  }
  Buffer out(writer.frame_bytes());
  writer.write(out);
  return out;
}

void golden_frame_snapshot_trips() {
  const Buffer golden = tests::read_golden("frame_v1.bin");
  CHECK(rewritten(golden) == golden);
  const Buffer with_attributes = tests::read_golden("frame_v2.bin");
  CHECK(rewritten(with_attributes) == with_attributes && decode_header(with_attributes, 0).version == 2);
  const Buffer with_usage = tests::read_golden("frame_v3.bin");
  CHECK(rewritten(with_usage) == with_usage && decode_header(with_usage, 0).version == 3);
  const FrameHeader header = decode_header(golden, 0);
  CHECK(header.instance == "w\xC3\xB6rker-1" && header.epoch == 7 && header.digest == 0xFEDCBA9876543210);
  Buffer shifted(5 + golden.size() + 1, 'x');
  std::copy(golden.begin(), golden.end(), shifted.begin() + 5);
  CHECK(rewritten(shifted, 5) == golden);
  CHECK(FrameReader(shifted, 5).end() == 5 + golden.size());
}

void every_truncation_is_torn() {
  const Buffer golden = tests::read_golden("frame_v1.bin");
  for (std::size_t size = 0; size < golden.size(); ++size) {
    const Buffer cut(golden.begin(), golden.begin() + static_cast<std::ptrdiff_t>(size));  // its own end, for ASan
    CHECK(thrown_code([&] { FrameReader(cut, 0); }) == ErrorCode::kTornFrame);
  }
  CHECK(thrown_code([&] { FrameReader(golden, golden.size() + 100); }) == ErrorCode::kTornFrame);
}

void every_flipped_bit_is_found() {
  Buffer golden = tests::read_golden("frame_v1.bin");
  for (std::size_t bit = 0; bit < golden.size() * 8; ++bit) {
    const auto mask = static_cast<std::uint8_t>(1 << (bit % 8));
    golden[bit / 8] ^= mask;
    thrown_code([&] { FrameReader(golden, 0); });
    golden[bit / 8] ^= mask;
  }
}

void hostile_bytes_never_crash() {
  const Buffer golden = tests::read_golden("frame_v1.bin");
  Random random(1);
  std::size_t accepted = 0;
  std::size_t refused = 0;
  for (int pass = 0; pass < 60'000; ++pass) {
    Buffer data = golden;
    for (std::size_t change = random.below(4) + 1; change > 0; --change) {
      const std::size_t at = 6 + random.below(data.size() - 10);
      switch (random.below(5)) {
        case 0:
          data[at] = static_cast<std::uint8_t>(random.next());
          break;
        case 1:
          data[at] ^= static_cast<std::uint8_t>(1 << random.below(8));
          break;
        case 2:  // a count, or a length, near a limit
          for (std::size_t byte = at; byte < std::min(at + 4, data.size() - 4); ++byte) {
            data[byte] = random.below(2) == 0 ? 0xFF : 0x00;
          }
          break;
        case 3:
          data.erase(data.begin() + static_cast<std::ptrdiff_t>(at),
                     data.begin() + static_cast<std::ptrdiff_t>(at + random.below(data.size() - 4 - at)));
          break;
        default:
          data.insert(data.begin() + static_cast<std::ptrdiff_t>(at), random.below(40),
                      static_cast<std::uint8_t>(random.next()));
      }
      if (data.size() < 64) {
        data.resize(64);
      }
    }
    fix_checksum(data);
    const Buffer exact(data.begin(), data.end());  // no spare room behind it, so that ASan sees one byte too far
    try {
      CHECK(rewritten(exact) == exact);
      ++accepted;
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kMalformedFrame);
      ++refused;
    }
  }
  CHECK(accepted > 100 && refused > 100);  // or the changes test nothing
}

void headers_are_refused_in_order() {
  Buffer golden = tests::read_golden("frame_v1.bin");
  const auto with = [&](std::size_t at, std::uint8_t value) {
    Buffer changed = golden;
    changed[at] = value;
    return thrown_code([&] { FrameReader(changed, 0); });
  };
  CHECK(with(0, 'X') == ErrorCode::kNotAFrame);
  CHECK(with(4, kFrameVersion + 1) == ErrorCode::kNewerFrame);
  CHECK(with(4, 2) == ErrorCode::kCorruptFrame);  // a version that is read, and not the one that was written
  CHECK(with(4, 0) == ErrorCode::kMalformedFrame);
  CHECK(with(11, 0xFF) == ErrorCode::kMalformedFrame);  // longer than any frame
  CHECK(with(10, 0x01) == ErrorCode::kTornFrame);       // longer than this one
  CHECK(with(60, 0x01) == ErrorCode::kCorruptFrame);
}

void writer_refuses_what_does_not_fit() {
  const Buffer bytes(64);
  const Bytes two = Bytes(bytes).first(32);
  const auto refuses = [](const Event& event) { return thrown_code([&] { written({event}); }) == ErrorCode::kLayout; };
  CHECK(thrown_code([] { written({}); }) == ErrorCode::kLayout);
  CHECK(thrown_code([] { FrameWriter writer{FrameHeader{}}; }) == ErrorCode::kLayout);
  CHECK(refuses(BlocksEvicted{.namespace_id = {}, .tier = Tier::kHbm, .reason = EvictReason::kTtl, .hashes = {}}));
  CHECK(refuses(BlocksEvicted{
      .namespace_id = {}, .tier = Tier::kHbm, .reason = EvictReason::kTtl, .hashes = Bytes(bytes).first(17)}));
  CHECK(refuses(ResidenciesListed{
      .namespace_id = {}, .tier = Tier::kHbm, .snapshot = 1, .hashes = two, .slots = Bytes(bytes).first(4)}));
  BlocksMigrated migrated{};
  migrated.hashes = two;
  migrated.source = std::string_view{};
  CHECK(refuses(migrated));
  const Buffer huge(kMaxFrameBytes);
  CHECK(refuses(BlocksEvicted{.namespace_id = {}, .tier = Tier::kHbm, .reason = EvictReason::kTtl, .hashes = huge}));
}

void namespaces_are_counted() {
  const Buffer hash(16);
  FrameHeader header;
  header.instance = "i";
  FrameWriter writer(header);
  BlocksEvicted evicted{.namespace_id = {}, .tier = Tier::kHbm, .reason = EvictReason::kTtl, .hashes = hash};
  for (std::size_t index = 0; index < kMaxFrameNamespaces; ++index) {
    evicted.namespace_id[3] = static_cast<std::uint8_t>(index);
    writer.add(evicted);
  }
  Buffer out(writer.frame_bytes());
  writer.write(out);
  CHECK(rewritten(out) == out);
  evicted.namespace_id[4] = 1;
  CHECK(thrown_code([&] { writer.add(evicted); }) == ErrorCode::kLayout);
}

void utf8_is_strict() {
  const auto good = [](std::string_view text) {
    return is_utf8({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  };
  CHECK(good("") && good("worker-1") && good("\xC3\xB6") && good("\xE6\x97\xA5") && good("\xF0\x9F\xA6\x8A"));
  CHECK(good("\xF4\x8F\xBF\xBF") && good("\xEF\xBF\xBF") && good("\xED\x9F\xBF"));
  for (const std::string_view bad : {"\x80", "\xC3", "\xC0\x80", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
                                     "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xE6\x97", "a\xE6\x97\x41"}) {
    CHECK(!good(bad));
  }
}

}  // namespace

int main() {
  return tests::run({{"the golden frame reads and writes to itself", golden_frame_snapshot_trips},
                     {"a frame cut anywhere is torn", every_truncation_is_torn},
                     {"every flipped bit is found", every_flipped_bit_is_found},
                     {"hostile bytes are refused or canonical, and never crash", hostile_bytes_never_crash},
                     {"a header's faults are told apart", headers_are_refused_in_order},
                     {"a writer refuses what does not fit", writer_refuses_what_does_not_fit},
                     {"a frame has room for 255 namespaces", namespaces_are_counted},
                     {"names are UTF-8 as Python has it", utf8_is_strict}});
}
