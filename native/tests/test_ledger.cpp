#include "kvbm/ledger.hpp"

#include <algorithm>
#include <string>

#include "check.hpp"
#include "ledgers.hpp"

using namespace kvbm;
using tests::Buffer;
using tests::copied;
using tests::kStarted;
using tests::numbered;
using tests::Random;
using tests::started;
using tests::thrown_code;

namespace {

constexpr NamespaceId kNamespace{1};
constexpr NamespaceId kOther{2};
const std::vector<Pool> kPools{{Tier::kHbm, 8, false}, {Tier::kNvme, 4, false}, {Tier::kObject, 0, true}};

// Creates blocks and unpins them; gives their slots.
Buffer filled(Ledger& ledger, Tier tier, const NamespaceId& id, const Buffer& hashes) {
  const auto allocation = ledger.allocate(tier, hashes.size() / kHashBytes);
  CHECK(allocation.has_value());
  const Buffer slots = copied(ledger.create(id, tier, kNoParent, 0, hashes, copied(allocation->slots)));
  ledger.unpin(tier, slots);
  return slots;
}

// What all waiting frames say: names of events in order. Reads every frame to its end.
std::vector<std::string> recorded(Ledger& ledger) {
  constexpr const char* kNames[] = {"started", "created", "migrated", "evicted", "listed", "ended", "stopped"};
  std::vector<std::string> names;
  tests::take_waiting(ledger, [&](const auto& event) { names.emplace_back(kNames[event.index()]); });
  return names;
}

void create_match_evict() {
  Ledger ledger = started(kPools);
  const Buffer six = numbered(0, 6);
  filled(ledger, Tier::kHbm, kNamespace, six);
  CHECK(ledger.match(numbered(0, 8), false).depth == 6);
  CHECK(ledger.match(six, true).depth == 6);
  CHECK(ledger.counts(Tier::kHbm).evictable == 0);
  CHECK(!ledger.allocate(Tier::kHbm, 3).has_value());
  ledger.unpin(Tier::kHbm, copied(ledger.match(six, false).slots));
  CHECK(ledger.allocate(Tier::kHbm, 3).has_value());
  CHECK(ledger.match(six, false).depth == 5);  // the deepest went first
  CHECK((recorded(ledger) == std::vector<std::string>{"started", "ended", "ended", "created", "evicted"}));
  CHECK(ledger.applied() == 5);
}

void colder_tiers_are_looked_at_alone() {
  Ledger ledger = started({{Tier::kNvme, 70, false}, {Tier::kHbm, 8, false}, {Tier::kHost, 90, false}});
  filled(ledger, Tier::kHbm, kNamespace, numbered(0, 6));
  filled(ledger, Tier::kNvme, kNamespace, numbered(0, 70));
  filled(ledger, Tier::kHost, kNamespace, numbered(4, 80));
  const Buffer run = numbered(0, 90);  // HBM holds [0, 6), HOST [4, 84), NVME [0, 70)
  Buffer tiers(90, kNotHeld);
  std::fill(tiers.begin(), tiers.begin() + 70, static_cast<std::uint8_t>(Tier::kNvme));
  CHECK(copied(ledger.holders(run, Tier::kNvme)) == tiers);
  CHECK(ledger.match(run, false, Tier::kNvme).depth == 70);
  std::fill(tiers.begin() + 4, tiers.begin() + 84, static_cast<std::uint8_t>(Tier::kHost));
  CHECK(copied(ledger.holders(run, Tier::kHost)) == tiers);
  const Match found = ledger.match(run, true, Tier::kHost);
  CHECK(found.depth == 84 && std::equal(found.tiers.begin(), found.tiers.end(), tiers.begin()));
  CHECK(ledger.counts(Tier::kHbm).evictable == 6);  // pinned is what lies in HOST, and nothing else
  CHECK(ledger.counts(Tier::kHost).evictable == 0);
  CHECK(ledger.counts(Tier::kNvme).evictable == 70);
  std::fill(tiers.begin(), tiers.begin() + 6, static_cast<std::uint8_t>(Tier::kHbm));
  CHECK(copied(ledger.holders(run)) == tiers);
  CHECK(ledger.holders({}).empty());
  CHECK(ledger.match(run, true, Tier::kObject).depth == 0);
  CHECK(copied(ledger.holders(run, Tier::kObject)) == Buffer(90, kNotHeld));
  CHECK(copied(ledger.holders(numbered(200, 1))) == Buffer(1, kNotHeld));
  CHECK(copied(ledger.holders(numbered(88, 2))).size() == 2);
  CHECK(thrown_code([&] { ledger.holders(Bytes(run).first(17)); }) == ErrorCode::kLayout);
}

void refusals_change_nothing() {
  Ledger ledger = started(kPools);
  const Buffer two = numbered(0, 2);
  const auto code = [](auto&& call) { return thrown_code(call); };
  CHECK(code([&] { ledger.pin(Tier::kHost, {}); }) == ErrorCode::kLedger);
  CHECK(code([&] { ledger.match(Bytes(two).first(17), false); }) == ErrorCode::kLayout);
  const Buffer slots = copied(ledger.allocate(Tier::kHbm, 2)->slots);
  Buffer twice = two;
  std::copy_n(two.begin(), kHashBytes, twice.begin() + kHashBytes);
  Buffer same_slot = slots;
  std::copy_n(slots.begin(), kSlotBytes, same_slot.begin() + kSlotBytes);
  const std::uint64_t applied = ledger.applied();
  const auto create = [&](const Buffer& hashes, const Buffer& given) {
    return code([&] { ledger.create(kNamespace, Tier::kHbm, kNoParent, 0, hashes, given); });
  };
  CHECK(create(twice, slots) == ErrorCode::kLedger && create(two, same_slot) == ErrorCode::kLedger);
  CHECK(create(numbered(0, 1), slots) == ErrorCode::kLedger);
  const Buffer no_slot(2 * kSlotBytes, 0xFF);
  CHECK(create(two, no_slot) == ErrorCode::kLedger);
  CHECK(ledger.applied() == applied && ledger.counts(Tier::kHbm).allocated == 2);
  ledger.create(kNamespace, Tier::kHbm, kNoParent, 0, two, slots);
  CHECK(ledger.match(two, false).depth == 2);
}

void a_run_refused_in_its_middle_changes_nothing() {
  Ledger ledger = started(kPools);
  const Buffer two = copied(ledger.allocate(Tier::kHbm, 2)->slots);
  Buffer run = two;
  run.insert(run.end(), {7, 0, 0, 0});  // nobody's
  CHECK(thrown_code([&] { ledger.release(Tier::kHbm, run); }) == ErrorCode::kLedger);
  CHECK(ledger.counts(Tier::kHbm).allocated == 2 && ledger.counts(Tier::kHbm).free == 6);
  ledger.release(Tier::kHbm, two);  // the caller's still, each of them
  CHECK(ledger.counts(Tier::kHbm).free == 8);
  const Buffer three = filled(ledger, Tier::kHbm, kNamespace, numbered(0, 3));
  const Buffer last_two(three.begin() + kSlotBytes, three.end());
  ledger.pin(Tier::kHbm, last_two);
  // From the last on, so the first is looked at last
  CHECK(thrown_code([&] { ledger.unpin(Tier::kHbm, three); }) == ErrorCode::kLedger);
  CHECK(ledger.counts(Tier::kHbm).evictable == 1);
  ledger.unpin(Tier::kHbm, last_two);
  CHECK(ledger.counts(Tier::kHbm).evictable == 3);
}

// NVME is full, and there is room for many events but not for the one that would withdraw a block there.
void a_copy_that_overflows_pins_nothing() {
  bool has_overflowed = false;
  for (std::uint32_t less = 1; less < 64 && !has_overflowed; ++less) {
    Ledger ledger = started(kPools, "lru", kLeastEventBytes);
    filled(ledger, Tier::kHbm, kNamespace, numbered(0, 1));
    filled(ledger, Tier::kNvme, kNamespace, numbered(4, 4));
    ledger.forget(Tier::kObject, kNamespace, numbered(0, kLeastEventBytes / kHashBytes - less), EvictReason::kMissing);
    if (!ledger.has_overflowed()) {
      const bool has_begun = ledger.begin_copy(kNamespace, Tier::kHbm, Tier::kNvme, numbered(0, 1)).has_value();
      has_overflowed = ledger.has_overflowed();
      CHECK(has_begun != has_overflowed);
      CHECK(ledger.counts(Tier::kHbm).evictable == (has_begun ? 0 : 1));
    }
  }
  CHECK(has_overflowed);
}

void overflow_ends_the_stream() {
  Ledger ledger = started(kPools, "lru", kLeastEventBytes);
  CHECK(thrown_code([] { Ledger(kPools, "lru", kLeastEventBytes - 1); }) == ErrorCode::kLedger);
  const Buffer many = numbered(0, kLeastEventBytes / kHashBytes - 4);
  ledger.forget(Tier::kObject, kNamespace, many, EvictReason::kMissing);
  CHECK(!ledger.has_overflowed());
  filled(ledger, Tier::kHbm, kNamespace, numbered(0, 4));
  CHECK(ledger.has_overflowed() && ledger.is_stopped() && ledger.match(numbered(0, 4), false).depth == 4);
  const std::uint64_t applied = ledger.applied();
  filled(ledger, Tier::kHbm, kNamespace, numbered(9, 8));  // the engine goes on
  CHECK(ledger.applied() == applied && !ledger.begin_snapshot());
  CHECK(!ledger.allocate(Tier::kNvme, 1).has_value());
  CHECK(recorded(ledger).back() == "stopped");
}

void another_epoch_begins_in_place() {
  Ledger ledger = started(kPools, "lru", kLeastEventBytes);
  CHECK(thrown_code([&] { ledger.restart(2, kStarted, 0); }) == ErrorCode::kLedger);  // events wait
  recorded(ledger);
  CHECK(thrown_code([&] { ledger.restart(1, kStarted, 0); }) == ErrorCode::kLedger);
  ledger.forget(Tier::kObject, kNamespace, numbered(0, kLeastEventBytes / kHashBytes - 4), EvictReason::kMissing);
  filled(ledger, Tier::kHbm, kOther, numbered(0, 4));
  CHECK(ledger.has_overflowed());
  filled(ledger, Tier::kHbm, kNamespace, numbered(4, 3));
  ledger.clear_waiting();
  const std::uint64_t digest = ledger.digest();
  const std::uint64_t after = ledger.restart(7, kStarted, 0);
  CHECK(after == ledger.applied() && ledger.epoch() == 7 && ledger.digest() == digest && !ledger.is_stopped());
  CHECK((recorded(ledger) == std::vector<std::string>{"started", "listed", "listed", "ended", "ended"}));
  CHECK(ledger.allocate(Tier::kNvme, 1).has_value() && ledger.begin_snapshot());
}

// A namespace that has a smaller number than the one which a tenant is given, as NVME may keep it from an earlier run.
void who_is_assigned_to_nobody_shares_with_all_others() {
  Ledger ledger = started(kPools, "lru", kDefaultEventBytes, {{.tenant = "a"}});
  const auto held = [&](std::uint32_t share) { return ledger.share_counts(Tier::kHbm, share).held; };
  filled(ledger, Tier::kHbm, kNamespace, numbered(0, 2));
  CHECK(held(0) == 0 && held(1) == 2);
  ledger.assign(kOther, "a");
  filled(ledger, Tier::kHbm, kNamespace, numbered(2, 2));
  filled(ledger, Tier::kHbm, kOther, numbered(4, 1));
  CHECK(held(0) == 1 && held(1) == 4);
  ledger.evict(Tier::kHbm, numbered(0, 4), EvictReason::kCleared);
  CHECK(held(0) == 1 && held(1) == 0);
}

void steady_state_reuses_what_it_grew_to() {
  Ledger ledger = started({{Tier::kHbm, 64, false}});
  std::uint64_t digest = 0;
  for (std::uint32_t snapshot = 0; snapshot < 200; ++snapshot) {
    filled(ledger, Tier::kHbm, snapshot % 2 == 0 ? kNamespace : kOther, numbered(snapshot * 16, 16));
    if (snapshot % 16 == 0) {
      recorded(ledger);
    }
    digest = ledger.digest();
  }
  std::uint64_t sum = 0;
  const Buffer held = ledger.held(Tier::kHbm);
  for (std::size_t at = 0; at < held.size(); at += kHashBytes) {
    sum += residency_mix(Tier::kHbm, held.data() + at);
  }
  CHECK(held == numbered(196 * 16, 64));
  CHECK(sum == digest);
}

// Random commands: no slot is lost or given twice, and the digest is that of what is held.
void no_slot_is_lost(const char* eviction) {
  Random random(4);
  const std::vector<Pool> pools{{Tier::kHbm, 9, false}, {Tier::kHost, 5, false}, {Tier::kObject, 0, true}};
  Ledger ledger = started(pools, eviction);
  std::vector<std::pair<Tier, Buffer>> pinned;
  std::vector<std::pair<std::uint64_t, std::size_t>> copies;
  const Tier tiers[] = {Tier::kHbm, Tier::kHost, Tier::kObject};
  for (int step = 0; step < 30'000; ++step) {
    const bool is_other = random.below(4) == 0;
    const NamespaceId& id = is_other ? kOther : kNamespace;
    const std::size_t first = random.below(12) + (is_other ? 100 : 0);
    const Buffer run = numbered(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(1 + random.below(5)));
    const Tier tier = tiers[random.below(2)];
    switch (random.below(9)) {
      case 0:
        if (const auto allocation = ledger.allocate(tier, run.size() / kHashBytes)) {
          pinned.emplace_back(tier, copied(ledger.create(id, tier, kNoParent, 0, run, copied(allocation->slots))));
        }
        break;
      case 1:
      case 2:
        if (!pinned.empty()) {
          std::swap(pinned[random.below(pinned.size())], pinned.back());
          ledger.unpin(pinned.back().first, pinned.back().second, random.below(2) == 0);
          pinned.pop_back();
        }
        break;
      case 3:
        ledger.evict(tier, run, EvictReason::kCleared);
        break;
      case 4:
        ledger.keep(tier, run, static_cast<double>(random.below(20)), static_cast<std::int64_t>(random.below(101)),
                    nullptr, random.below(2) == 0, 3);
        break;
      case 5:
        ledger.expire(static_cast<double>(random.below(20)));
        break;
      case 6: {
        const Tier target = tiers[random.below(3)];
        if (const auto begun = target == tier ? std::nullopt : ledger.begin_copy(id, CopySource(tier), target, run)) {
          copies.emplace_back(begun->first, begun->second->hashes.size() / kHashBytes);
        }
        break;
      }
      case 7:
        if (!copies.empty()) {
          const auto [copy, count] = copies.back();
          copies.pop_back();
          Buffer arrived(count);
          std::ranges::generate(arrived, [&] { return static_cast<std::uint8_t>(random.below(2)); });
          ledger.end_copy(copy, arrived, MigrateCause::kOffload, random.below(2) == 0, false);
        }
        break;
      default:
        ledger.begin_snapshot();
        ledger.step_snapshot(1 + random.below(4));
        ledger.clear_waiting();
        if (random.below(8) == 0) {
          ledger.restart(ledger.epoch() + 1, kStarted, 0);
          ledger.clear_waiting();
        }
    }
    std::uint64_t digest = 0;
    for (const Tier each : {Tier::kHbm, Tier::kHost}) {
      const TierCounts counts = ledger.counts(each);
      CHECK(counts.free + counts.held + counts.allocated <= counts.slots);  // the rest is withdrawn but pinned
      CHECK(counts.evictable <= counts.held);
      const Buffer held = ledger.held(each);
      CHECK(held.size() == counts.held * kHashBytes);
      for (std::size_t at = 0; at < held.size(); at += kHashBytes) {
        digest += residency_mix(each, held.data() + at);
      }
    }
    CHECK(digest == ledger.digest());
  }
  while (!pinned.empty()) {
    ledger.unpin(pinned.back().first, pinned.back().second);
    pinned.pop_back();
  }
  for (const auto& [copy, count] : copies) {
    ledger.end_copy(copy, Buffer(count), MigrateCause::kOffload, true, false);
  }
  for (const Tier each : {Tier::kHbm, Tier::kHost}) {
    const TierCounts counts = ledger.counts(each);
    CHECK(counts.free + counts.held == counts.slots && counts.allocated == 0);
  }
}

void no_slot_is_lost_by_either_policy() {
  no_slot_is_lost("lru");
  no_slot_is_lost("s3fifo");
}

}  // namespace

int main() {
  return tests::run(
      {{"blocks are created, matched, pinned and evicted", create_match_evict},
       {"tiers hotter than asked for are not looked at", colder_tiers_are_looked_at_alone},
       {"what is refused has changed nothing", refusals_change_nothing},
       {"a run that is refused in its middle is as it was", a_run_refused_in_its_middle_changes_nothing},
       {"a copy that overflows pins nothing", a_copy_that_overflows_pins_nothing},
       {"an overflow ends the stream and not the engine", overflow_ends_the_stream},
       {"another epoch begins in place, with a snapshot of what is held", another_epoch_begins_in_place},
       {"who is assigned to nobody shares with all others", who_is_assigned_to_nobody_shares_with_all_others},
       {"the digest is that of what is held, snapshot after snapshot", steady_state_reuses_what_it_grew_to},
       {"no slot is lost, whatever is asked", no_slot_is_lost_by_either_policy}});
}
