#include "kvbm/usage_meter.hpp"

#include <vector>

#include "check.hpp"
#include "kvbm/error.hpp"

using namespace kvbm;

namespace {

using Buffer = std::vector<std::uint8_t>;

constexpr NamespaceId kFirst{1};
constexpr NamespaceId kSecond{2};
constexpr std::uint8_t kAnyBlob[] = {0x90};  // C++ does not look into a start

Buffer frame_of(std::uint64_t wall_ms, std::initializer_list<Event> events) {
  FrameHeader header;
  header.instance = "i";
  header.epoch = 1;
  header.wall_time_ns = wall_ms * 1'000'000 + 999'999;  // below a millisecond nothing counts
  FrameWriter writer(header);
  for (const Event& event : events) {
    writer.add(event);
  }
  Buffer out(writer.frame_bytes());
  writer.write(out);
  return out;
}

constexpr std::array<bool, kTierCount> kClusters{false, false, false, true};

void blocks_count_for_as_long_as_they_are_held() {
  const Buffer hashes(3 * kHashBytes, 7);
  const Bytes one = Bytes(hashes).first(kHashBytes);
  UsageMeter meter(kClusters);
  meter.take(
      frame_of(1000, {InstanceStarted{.blob = kAnyBlob},
                      BlocksCreated{.namespace_id = kSecond, .tier = Tier::kHbm, .hashes = hashes, .slots = {}}}),
      0);
  meter.take(frame_of(1010, {BlocksMigrated{.namespace_id = kSecond,
                                            .source = Tier::kHbm,
                                            .target = Tier::kHost,
                                            .kept = false,
                                            .cause = MigrateCause::kOffload,
                                            .hashes = one,
                                            .slots = {}},
                             BlocksMigrated{.namespace_id = kFirst,
                                            .source = Tier::kHost,
                                            .target = Tier::kObject,
                                            .kept = true,
                                            .cause = MigrateCause::kOffload,
                                            .hashes = one,
                                            .slots = {}}}),
             0);
  const std::vector<NamespaceUsage> used = meter.cut(1030);
  CHECK(used.size() == 2 && used[0].id == kFirst && used[1].id == kSecond);
  CHECK((used[0].block_ms == TierNumbers{} && used[0].put_blocks == TierNumbers{0, 0, 0, 1}));
  CHECK((used[1].block_ms == TierNumbers{3 * 10 + 2 * 20, 20, 0, 0}));
  CHECK((used[1].put_blocks == TierNumbers{3, 1, 0, 0}));
  CHECK(meter.cut(1030).empty());
}

void a_clock_that_was_set_is_no_time() {
  const Buffer hashes(kHashBytes, 7);
  UsageMeter meter(kClusters);
  meter.take(frame_of(5000, {InstanceStarted{.blob = kAnyBlob},
                             BlocksCreated{.namespace_id = kFirst, .tier = Tier::kHbm, .hashes = hashes, .slots = {}}}),
             0);
  static_cast<void>(meter.cut(5000));
  CHECK(meter.cut(4000).empty());
  CHECK(meter.cut(4000 + UsageMeter::kLongestStepMs + 1).empty());
  CHECK((meter.cut(4000 + UsageMeter::kLongestStepMs + 8)[0].block_ms == TierNumbers{7, 0, 0, 0}));
}

void an_epoch_begins_with_what_its_first_snapshot_lists() {
  const Buffer hashes(2 * kHashBytes, 7);
  UsageMeter meter(kClusters);
  const auto listed = [&](std::uint32_t snapshot) {
    return ResidenciesListed{
        .namespace_id = kFirst, .tier = Tier::kNvme, .snapshot = snapshot, .hashes = hashes, .slots = {}};
  };
  meter.take(frame_of(100, {InstanceStarted{.blob = kAnyBlob}, listed(1)}), 0);
  meter.take(frame_of(110, {listed(2)}), 0);
  CHECK((meter.cut(120)[0].block_ms == TierNumbers{0, 0, 40, 0}));
  meter.take(frame_of(130, {InstanceStarted{.blob = kAnyBlob}}), 0);
  CHECK((meter.cut(150)[0].block_ms == TierNumbers{0, 0, 20, 0}));
  meter.take(
      frame_of(160,
               {BlocksEvicted{
                   .namespace_id = kFirst, .tier = Tier::kNvme, .reason = EvictReason::kCapacity, .hashes = hashes}}),
      0);
  CHECK(meter.cut(170).empty());  // what is not held cannot be lost
}

void bytes_that_are_no_frame_are_refused() {
  const Buffer golden = tests::read_golden("frame_v3.bin");
  UsageMeter meter(kClusters);
  meter.take(golden, 0);
  for (std::size_t at = 0; at < golden.size(); ++at) {
    Buffer damaged = golden;
    damaged[at] ^= 0x10;
    bool is_refused = false;
    try {
      UsageMeter(kClusters).take(damaged, 0);
    } catch (const Error&) {
      is_refused = true;
    }
    CHECK(is_refused);
  }
}

}  // namespace

int main() {
  return tests::run({
      {"blocks count for as long as they are held", blocks_count_for_as_long_as_they_are_held},
      {"a clock that was set is no time", a_clock_that_was_set_is_no_time},
      {"an epoch begins with what its first snapshot lists", an_epoch_begins_with_what_its_first_snapshot_lists},
      {"bytes that are no frame are refused", bytes_that_are_no_frame_are_refused},
  });
}
