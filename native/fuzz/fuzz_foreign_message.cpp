// Any bytes are a message or not, in memory that their number bounds, and what a message says lies in it. A ledger
// takes it whole or not at all, as often as it comes, and all it records is legal for a strict reader.
#include <array>
#include <cstring>
#include <vector>

#include "../tests/frames.hpp"
#include "fuzz.hpp"
#include "kvbm/foreign_ledger.hpp"
#include "kvbm/frame_fold.hpp"

using namespace kvbm;

namespace {

constexpr std::size_t kMostBytesForOne = 256;  // of memory, all allocations of growing arrays together

bool lies_in(Bytes part, Bytes whole) {
  return part.empty() || (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
}

bool is_message(Bytes data) {
  ForeignMessage message;
  const fuzz::MemoryMeter meter;
  const bool is_read = message.read(data);
  REQUIRE(meter.bytes() <= kMostBytesForOne * (data.size() + 1));
  if (!is_read) {
    return false;
  }
  for (const ForeignEvent& event : message.events()) {
    REQUIRE(message.keys(event).size() == event.key_count && message.tokens(event).size() == event.token_count);
    REQUIRE(event.kind != ForeignEvent::Kind::kStored || event.block_tokens > 0);
    REQUIRE(lies_in(event.parent.wide, data));
    for (const ForeignKey& key : message.keys(event)) {
      REQUIRE(lies_in(key.wide, data) && key.wide.empty() == !is_wide(key.kind));
    }
  }
  return true;
}

// Folds what waits; what is held is what the ledger says.
void read(ForeignLedger& ledger, FrameFold& fold) {
  FoldDelta delta;
  const EpochStart start{WireInteger(ledger.epoch()), {}};
  for (const FrameBody& body : ledger.waiting_frames()) {
    tests::each_event(tests::frame_of(body), [&](const Event& event) { fold.evolve(event, &start, delta); });
  }
  ledger.clear_waiting();
  REQUIRE(fold.digest() == ledger.digest());
  for (const Tier tier : {Tier::kHbm, Tier::kHost, Tier::kNvme}) {
    REQUIRE(fold.count(tier) == ledger.held(tier));
    REQUIRE(ledger.hashes(tier).size() == ledger.held(tier) * kHashBytes);
  }
}

void take(Bytes data, bool is_read) {
  ForeignLedger ledger("i", {12, 3, true}, {Tier::kHbm, Tier::kHost, Tier::kNvme}, 5);
  FrameFold fold(true);
  for (const std::uint8_t group : {0, 1}) {
    for (const std::uint32_t block_tokens : {1U, 2U, 4U, 16U}) {
      ledger.name(NamespaceId{group, static_cast<std::uint8_t>(block_tokens)},
                  SequenceHash{static_cast<std::uint8_t>(block_tokens), group}, group, block_tokens, true);
    }
  }
  ledger.begin(1, InstanceStarted{.blob = {}}, 8);
  for (int time = 0; time < 2; ++time) {
    const std::uint64_t applied = ledger.applied();
    const bool is_taken = ledger.take(data, std::nullopt);
    REQUIRE(!is_taken || is_read);
    REQUIRE(is_taken || (ledger.applied() == applied && ledger.remembered() == 0));
    read(ledger, fold);
    ledger.begin_snapshot();
    ledger.step_snapshot(2);
    read(ledger, fold);
  }
  ledger.begin(2, InstanceStarted{.blob = {}}, 8);
  read(ledger, fold);
  ledger.drop(false);
  REQUIRE(ledger.is_empty() && ledger.remembered() <= 3);
  ledger.begin(3, InstanceStarted{.blob = {}}, 8);
  ledger.take(data, std::nullopt);
  read(ledger, fold);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  fuzz::MemoryMeter::install();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Bytes bytes{data, size};
  take(bytes, is_message(bytes));
  return 0;
}
