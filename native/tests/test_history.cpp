#include "kvbm/history.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "check.hpp"
#include "kvbm/columns.hpp"

using namespace kvbm;
using tests::Random;

namespace {

using Buffer = std::vector<std::uint8_t>;

constexpr NamespaceId kOwner{1};
constexpr std::uint8_t kAnyBlob[] = {0x90};  // C++ does not look into a start

EpochStart start_of(std::uint64_t epoch) {
  return {WireInteger(epoch), {{Tier::kHbm, WireInteger(64), WireInteger(64), Reach::kInstance, ""}}};
}

Buffer hashes_of(std::initializer_list<std::uint64_t> numbers) {
  Buffer hashes(numbers.size() * kHashBytes);
  std::size_t at = 0;
  for (const std::uint64_t number : numbers) {
    std::memcpy(hashes.data() + at, &number, sizeof number);
    at += kHashBytes;
  }
  return hashes;
}

std::uint64_t number_of(const StayRow& row) {
  std::uint64_t number = 0;
  std::memcpy(&number, row.hash.data(), sizeof number);
  return number;
}

// A frame of events, cut at a time.
Buffer frame_of(std::uint64_t epoch, std::uint64_t offset, std::uint64_t time, const std::vector<Event>& events) {
  FrameHeader header;
  header.instance = "i";
  header.epoch = epoch;
  header.first_offset = offset;
  header.wall_time_ns = time;
  FrameWriter writer(header, events.size());
  for (const Event& event : events) {
    writer.add(event);
  }
  Buffer out(writer.frame_bytes());
  writer.write(out);
  return out;
}

void take(History& history, const Buffer& frame, std::vector<EpochStart> starts = {}) {
  history.evolve_frame(FrameReader(frame, 0), starts);
}

Event created(Bytes hashes, std::uint32_t start = 0) {
  SequenceHash parent = kNoParent;
  parent[0] = start > 0 ? 1 : 0;
  return BlocksCreated{
      .namespace_id = kOwner, .tier = Tier::kHbm, .start = start, .parent = parent, .hashes = hashes, .slots = {}};
}

Event evicted(Bytes hashes) {
  return BlocksEvicted{.namespace_id = kOwner, .tier = Tier::kHbm, .reason = EvictReason::kTtl, .hashes = hashes};
}

void a_stay_has_its_begin_and_its_end() {
  History history;
  const Buffer two = hashes_of({1, 2});
  const Buffer second = hashes_of({2});
  take(history, frame_of(1, 0, 10, {InstanceStarted{kAnyBlob}, created(two, 5)}), {start_of(1)});
  take(history, frame_of(1, 2, 20, {evicted(second)}));
  const std::vector<StayRow> ended = history.take_ended();
  CHECK(ended.size() == 1 && history.take_ended().empty());
  const StayRow& row = ended[0];
  CHECK(number_of(row) == 2 && row.position == 6 && row.slot == kNoSlot);
  CHECK(row.begin_ns == 10 && row.begin_offset == 1 && row.end_ns == 20 && row.end_offset == 2);
  CHECK(row.begin == static_cast<std::uint8_t>(StayBegin::kCreated));
  CHECK(row.end == static_cast<std::uint8_t>(EvictReason::kTtl));
  const std::vector<StayRow> lasting = history.lasting();
  CHECK(lasting.size() == 1 && number_of(lasting[0]) == 1 && lasting[0].end_ns == 0);
  CHECK(history.count() == 1 && history.namespace_ids().size() == 1);
}

void a_start_ends_all_and_an_epoch_without_one_too() {
  History history;
  const Buffer one = hashes_of({1});
  take(history, frame_of(1, 0, 10, {InstanceStarted{kAnyBlob}, created(one)}), {start_of(1)});
  take(history, frame_of(2, 7, 30, {created(one)}));
  std::vector<StayRow> ended = history.take_ended();
  CHECK(ended.size() == 1 && ended[0].end_epoch == 2 && ended[0].end_offset == 7);
  CHECK(ended[0].end == static_cast<std::uint8_t>(StayEnd::kRestarted));
  take(history, frame_of(3, 0, 40, {InstanceStarted{kAnyBlob}}), {start_of(3)});
  ended = history.take_ended();
  CHECK(ended.size() == 1 && ended[0].epoch == 2 && ended[0].end_ns == 40 && history.count() == 0);
}

void stays_of_many_blocks_are_those_of_a_map() {
  Random random(11);
  History history;
  std::map<std::uint64_t, std::uint64_t> held;  // block → when it came
  take(history, frame_of(1, 0, 1, {InstanceStarted{kAnyBlob}}), {start_of(1)});
  for (std::uint64_t step = 1; step < 4000; ++step) {
    const std::uint64_t block = random.below(300);
    const Buffer hash = hashes_of({block});
    const bool is_held = held.contains(block);
    take(history, frame_of(1, step, step + 1, {is_held ? evicted(hash) : created(hash)}));
    for (const StayRow& row : history.take_ended()) {
      CHECK(number_of(row) == block && row.begin_ns == held.at(block) && row.end_ns == step + 1);
    }
    if (is_held) {
      held.erase(block);
    } else {
      held[block] = step + 1;
    }
    CHECK(history.count() == held.size());
  }
  for (const StayRow& row : history.lasting()) {
    CHECK(row.begin_ns == held.at(number_of(row)));
  }
}

}  // namespace

int main() {
  return tests::run({
      {"a stay has its begin and its end", a_stay_has_its_begin_and_its_end},
      {"a start ends all, and an epoch without one too", a_start_ends_all_and_an_epoch_without_one_too},
      {"stays of many blocks are those of a map", stays_of_many_blocks_are_those_of_a_map},
  });
}
