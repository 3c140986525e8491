#include "kvbm/frame_fold.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "check.hpp"
#include "kvbm/scan.hpp"

using namespace kvbm;
using tests::Random;
using tests::thrown_code;

namespace {

using Buffer = std::vector<std::uint8_t>;

constexpr NamespaceId kOwner{1};
constexpr NamespaceId kStranger{2};

EpochStart start_of(std::uint64_t epoch, std::uint64_t slots = 1'000'000) {
  return {WireInteger(epoch), {{Tier::kHbm, WireInteger(slots), WireInteger(64), Reach::kInstance, ""}}};
}

Buffer hash_of(std::uint64_t number) {
  Buffer hash(kHashBytes);
  std::memcpy(hash.data(), &number, sizeof number);
  return hash;
}

Buffer packed(std::initializer_list<std::uint32_t> slots) {
  Buffer made(slots.size() * kSlotBytes);
  std::memcpy(made.data(), slots.begin(), made.size());
  return made;
}

Event created(Bytes hashes, Bytes slots, Tier tier = Tier::kHbm) {
  return BlocksCreated{.namespace_id = kOwner, .tier = tier, .hashes = hashes, .slots = slots};
}

Event evicted(Bytes hashes, NamespaceId owner = kOwner) {
  return BlocksEvicted{.namespace_id = owner, .tier = Tier::kHbm, .reason = EvictReason::kTtl, .hashes = hashes};
}

void begin(FrameFold& fold, const EpochStart& start) {
  FoldDelta delta;
  fold.evolve(InstanceStarted{}, &start, delta);
}

FoldDelta fold(FrameFold& fold, const Event& event) {
  FoldDelta delta;
  fold.evolve(event, nullptr, delta);
  return delta;
}

std::string refusal(FrameFold& fold, const Event& event) {
  FoldDelta delta;
  try {
    fold.evolve(event, nullptr, delta);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kIllegalEvent && delta.added == 0 && delta.anomalies.empty());
    return std::string(error.rule()) + ": " + error.detail();
  }
  return "";
}

void integers_compare_across_zero() {
  const WireInteger least = WireInteger::negative(INT64_MIN);
  const WireInteger minus = WireInteger::negative(-1);
  const WireInteger most(UINT64_MAX);
  CHECK(least < minus && minus < WireInteger(0) && WireInteger(0) < most && minus != most);
  CHECK(WireInteger::negative(7) == WireInteger(7));
  CHECK(minus.text() == "-1" && most.text() == "18446744073709551615" && least.text() == "-9223372036854775808");
}

void an_index_finds_what_it_has_among_what_it_lost() {
  Random random(7);
  PositionIndex index;
  index.reset(0);
  std::map<std::uint32_t, std::uint64_t> hashes;  // by position
  const auto hash = [&](std::uint32_t position) { return hashes.at(position); };
  for (std::uint32_t step = 0; step < 40'000; ++step) {
    if (hashes.size() > 60 && random.below(2) == 0) {
      auto victim = hashes.begin();
      std::advance(victim, static_cast<std::ptrdiff_t>(random.below(8)));
      index.erase(victim->second, victim->first);
      hashes.erase(victim);
    } else {
      if (!index.has_room()) {
        index.reset(hashes.size() + 1);
        for (const auto& [position, value] : hashes) {
          index.insert(value, position);
        }
      }
      hashes[step] = random.below(3) == 0 ? 5 : random.next();  // some collide entirely
      index.insert(hashes[step], step);
    }
    CHECK(index.count() == hashes.size());
    if (step % 64 == 0) {
      for (const auto& [position, value] : hashes) {
        CHECK(index.find(value, [&, place = position](std::uint32_t at) { return at == place; }) == position);
      }
      CHECK(index.find(random.next(), [&](std::uint32_t at) { return hash(at) == 1; }) == PositionIndex::kNone);
    }
  }
}

void a_table_keeps_the_order_of_gaining_even_when_it_counts_anew() {
  ResidencyTable table(Tier::kHbm, ResidencyTable::kNone - 10);
  std::vector<std::uint64_t> held;
  Random random(1);
  for (std::uint64_t number = 0; number < 3000; ++number) {
    if (held.size() > 100) {
      const std::size_t victim = random.below(held.size());
      const Buffer hash = hash_of(held[victim]);
      const std::uint64_t mix = residency_mix(Tier::kHbm, hash.data());
      const std::uint32_t position = table.find(hash.data(), mix);
      CHECK(position != ResidencyTable::kNone && table.find_slot(table[position].slot) == position);
      table.erase(position, mix);
      CHECK(table.find(hash.data(), mix) == ResidencyTable::kNone);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(victim));
    }
    const Buffer hash = hash_of(number);
    const auto slot = static_cast<std::uint32_t>(number % 2 == 0 ? number : 0xFFFFFFFF - number);  // low and high ones
    CHECK(table.find_slot(slot) == ResidencyTable::kNone);
    table.insert(hash.data(), residency_mix(Tier::kHbm, hash.data()), 0, slot, 0);
    held.push_back(number);
  }
  std::vector<std::uint64_t> found;
  for (const std::uint32_t at : table.held()) {
    std::uint64_t number = 0;
    std::memcpy(&number, table[at].hash.data(), sizeof number);
    found.push_back(number);
  }
  CHECK(found == held && table.count() == held.size());
}

void the_digest_is_that_of_what_is_held() {
  Random random(3);
  FrameFold residencies(true);
  begin(residencies, start_of(1));
  std::map<std::uint32_t, Buffer> held;  // by slot
  for (int step = 0; step < 20'000; ++step) {
    const auto slot = static_cast<std::uint32_t>(random.below(3000));
    const auto entry = held.find(slot);
    if (entry != held.end()) {
      const FoldDelta delta = fold(residencies, evicted(entry->second));
      CHECK(delta.withdrawn == 1 && delta.anomalies.empty());
      held.erase(entry);
    } else {
      const Buffer hash = random.bytes(kHashBytes);
      CHECK(fold(residencies, created(hash, packed({slot}))).added == 1);
      held[slot] = hash;
    }
  }
  std::uint64_t digest = 0;
  for (const auto& [slot, hash] : held) {
    digest += residency_mix(Tier::kHbm, hash.data());
  }
  CHECK(residencies.digest() == digest && residencies.tier_digest(Tier::kHbm) == digest);
  CHECK(residencies.count() == held.size() && residencies.held(Tier::kHbm).size() == held.size());
  CHECK(residencies.count(Tier::kHost) == 0);
  begin(residencies, start_of(2));
  CHECK(residencies.count() == 0 && residencies.digest() == 0);
}

void strict_refuses_and_changes_nothing() {
  FrameFold residencies(true);
  const Buffer one = hash_of(1);
  const Buffer two = hash_of(2);
  Buffer twice = one;
  twice.insert(twice.end(), one.begin(), one.end());
  CHECK(refusal(residencies, evicted(one)) == "not-started: BlocksEvicted before InstanceStarted");
  begin(residencies, start_of(1, 8));
  CHECK(refusal(residencies, created(twice, {})) == "repeated-in-run: a run in HBM names a block twice");
  CHECK(refusal(residencies, created(one, packed({8}))) == "slot-outside: HBM has 8 slots, not slot 8");
  CHECK(fold(residencies, created(one, packed({3}))).added == 1);
  const std::uint64_t digest = residencies.digest();
  CHECK(refusal(residencies, created(one, packed({4}))) == "created-twice: HBM already holds 01000000");
  CHECK(refusal(residencies, created(two, packed({3}))) == "slot-reused: HBM slot 3 still holds 01000000");
  CHECK(refusal(residencies, evicted(two)) == "evicted-unheld: HBM does not hold 02000000");
  CHECK(refusal(residencies, evicted(one, kStranger)) ==
        "foreign-namespace: 01000000 belongs to namespace 01000000, not 02000000");
  CHECK(refusal(residencies, SnapshotEnded{Tier::kHbm, 1, 1}) ==
        "snapshot-incomplete: HBM snapshot 1 listed 0 blocks, its end says 1");
  CHECK(residencies.digest() == digest && residencies.count() == 1);
  CHECK(thrown_code([&] { fold(residencies, created(Bytes(one).first(15), {})); }) == ErrorCode::kLayout);
  CHECK(thrown_code([&] { fold(residencies, created(two, Bytes(one).first(3))); }) == ErrorCode::kLayout);
}

void a_place_that_contradicts_itself_is_named_and_counts() {
  FrameFold residencies(true);
  begin(residencies, start_of(1));
  const auto placed = [](const SequenceHash& parent, std::uint32_t start, Bytes hashes) {
    return BlocksCreated{
        .namespace_id = kOwner, .tier = Tier::kHbm, .start = start, .parent = parent, .hashes = hashes, .slots = {}};
  };
  SequenceHash parent{};
  parent[0] = 0xab;
  CHECK(fold(residencies, placed(kNoParent, 7, hash_of(1))).anomalies ==
        (std::vector<Anomaly>{{kMisplaced, "HBM: start is 7, and there is no parent"}}));
  CHECK(fold(residencies, placed(parent, 0, hash_of(2))).anomalies ==
        (std::vector<Anomaly>{{kMisplaced, "HBM: start is 0, and there is a parent, ab000000"}}));
  CHECK(fold(residencies, placed(parent, 7, hash_of(3))).anomalies.empty() && residencies.count() == 3);
}

void a_lenient_fold_applies_what_makes_sense() {
  FrameFold residencies(false);
  const Buffer one = hash_of(1);
  const Buffer two = hash_of(2);
  fold(residencies, created(one, packed({3})));
  const FoldDelta reused = fold(residencies, created(two, packed({3})));
  CHECK(reused.anomalies == (std::vector<Anomaly>{{"slot-reused", "HBM slot 3 still held 01000000"}}));
  CHECK(reused.added == 1 && reused.withdrawn == 1 && residencies.count() == 1);
  const FoldDelta moved = fold(residencies, created(two, {}));
  CHECK(moved.anomalies == (std::vector<Anomaly>{{"created-twice", "HBM already holds 02000000"},
                                                 {"moved-silently", "HBM held 02000000 in slot 3, not None"}}));
  CHECK(fold(residencies, created(one, packed({3}))).anomalies.empty());  // so the slot is free again
  const FoldDelta ended = fold(residencies, SnapshotEnded{Tier::kHbm, 1, 0});
  CHECK(ended.withdrawn == 2 && residencies.is_whole(Tier::kHbm) && residencies.digest() == 0);
  residencies.miss_events();
  CHECK(!residencies.is_whole(Tier::kHbm));
}

void claims_pass_through() {
  FrameFold residencies(true);
  begin(residencies, start_of(1));
  const Buffer one = hash_of(1);
  CHECK(residencies.is_cluster(Tier::kObject) && !residencies.is_cluster(Tier::kNvme));
  for (int time = 0; time < 2; ++time) {
    const FoldDelta delta = fold(residencies, created(one, {}, Tier::kObject));
    CHECK(delta.claimed == 1 && delta.added == 0);
  }
  CHECK(residencies.count() == 0 && residencies.digest() == 0);
}

void a_frame_folds_up_to_its_illegal_event() {
  const Buffer one = hash_of(1);
  const Buffer slot = packed({3});
  const std::vector<Event> events = {InstanceStarted{}, created(one, slot), created(one, slot), evicted(one)};
  FrameHeader header;
  header.instance = "i";
  header.epoch = 4;
  FrameWriter writer(header);
  for (const Event& event : events) {
    writer.add(event);
  }
  Buffer data(writer.frame_bytes());
  writer.write(data);
  const FrameReader reader(data, 0);
  const EpochStart start = start_of(4);
  FrameFold residencies(true);
  FoldedFrame folded = residencies.evolve_frame(reader, 0, {&start, 1});
  CHECK(folded.folded == 2 && folded.illegal && folded.illegal->rule == "created-twice");
  CHECK(folded.delta.added == 1 && residencies.count() == 1);
  folded = residencies.evolve_frame(reader, 3, {&start, 1});
  CHECK(folded.folded == 4 && !folded.illegal && residencies.count() == 0);
  const EpochStart other = start_of(5);
  folded = residencies.evolve_frame(reader, 0, {&other, 1});
  CHECK(folded.folded == 0 && !folded.illegal);  // the caller's to judge
}

void a_scan_ends_at_the_first_bad_frame() {
  const Buffer golden = tests::read_golden("frame_v1.bin");
  Buffer data = golden;
  data.insert(data.end(), golden.begin(), golden.end());
  FrameScan scan = scan_frames(data, 0);
  CHECK(scan.frames.size() == 2 && !scan.error && scan.frames[1].at == golden.size());
  CHECK(scan.frames[1].end() == data.size() && scan.frames[0].blocks == scan.frames[1].blocks);
  data[data.size() - 1] ^= 1;
  scan = scan_frames(data, 0);
  CHECK(scan.frames.size() == 1 && scan.error && scan.error->code() == ErrorCode::kCorruptFrame);
  CHECK(scan.error->at() == golden.size());
  CHECK(scan_frames(data, data.size() + 5).frames.empty());
}

}  // namespace

int main() {
  return tests::run(
      {{"integers compare across zero", integers_compare_across_zero},
       {"an index finds what it has among what it lost", an_index_finds_what_it_has_among_what_it_lost},
       {"a table keeps the order of gaining", a_table_keeps_the_order_of_gaining_even_when_it_counts_anew},
       {"the digest is that of what is held", the_digest_is_that_of_what_is_held},
       {"strict refuses and changes nothing", strict_refuses_and_changes_nothing},
       {"a place that contradicts itself is named and counts", a_place_that_contradicts_itself_is_named_and_counts},
       {"a lenient fold applies what makes sense", a_lenient_fold_applies_what_makes_sense},
       {"claims pass through", claims_pass_through},
       {"a frame folds up to its illegal event", a_frame_folds_up_to_its_illegal_event},
       {"a scan ends at the first bad frame", a_scan_ends_at_the_first_bad_frame}});
}
