// Memory that runs out in the middle of a call: what the call was about is as it was, or is done, and nothing is lost.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <new>

#include "check.hpp"
#include "kvbm/copy_queue.hpp"
#include "kvbm/told_tiers.hpp"
#include "ledgers.hpp"

using namespace kvbm;
using tests::Buffer;
using tests::copied;
using tests::numbered;
using tests::Random;
using tests::started;

namespace {

thread_local long left = -1;  // allocations of this thread before one fails; below 0: none does

void* taken(std::size_t bytes) {
  if (left >= 0 && left-- == 0) {
    throw std::bad_alloc();
  }
  void* const memory = std::malloc(bytes != 0 ? bytes : 1);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

}  // namespace

// Not inlined: GCC takes one half that is for another allocator's than the other half that is not.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return taken(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return taken(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

constexpr std::uint32_t kSpaces = 40;         // namespaces
constexpr std::uint32_t kSpaceBlocks = 1000;  // numbers of blocks each has

NamespaceId space(std::uint32_t number) { return {static_cast<std::uint8_t>(number + 1)}; }

// Blocks [first, first + count) of a namespace, packed; their numbers tell whose they are.
Buffer blocks(std::uint32_t of, std::uint32_t first, std::size_t count) {
  return numbered(of * kSpaceBlocks + first, count);
}

// Whether a call was done, and not ended by the want of memory, which comes after so many allocations.
template <class Call>
bool done(long allocations, Call&& call) {
  left = allocations;
  try {
    call();
  } catch (const std::bad_alloc&) {
    left = -1;
    return false;
  }
  left = -1;
  return true;
}

void a_queue_copies_nothing_that_it_has_refused() {
  std::vector<std::uint8_t> engine(64 * 128);
  std::vector<std::uint8_t> rows(64 * 128);
  RowCopier copier(1);
  const SegmentTable table({{reinterpret_cast<std::uint64_t>(engine.data()), 128, 128}}, 64);
  const std::vector<std::int64_t> none;
  CopyQueue queue(table, copier);
  std::size_t added = 0;
  std::size_t refused = 0;
  for (std::uint64_t id = 0; id < 2'000; ++id) {
    const bool is_taken =
        done(static_cast<long>(id % 3), [&] { queue.add({id, none, none, {rows.data(), 128}, nullptr}); });
    added += is_taken ? 1 : 0;
    refused += is_taken ? 0 : 1;
  }
  CHECK(refused > 0);
  CHECK(queue.wait(std::chrono::seconds(60)));
  CHECK(queue.ended().size() == added);  // of a run that ends after it was refused, the caller has the memory back
}

void no_two_namespaces_have_one_number() {
  for (long allocations = 0; allocations < 4; ++allocations) {
    NamespaceTable table;
    std::map<std::uint32_t, NamespaceId> found;
    for (std::uint32_t number = 0; number < 200; ++number) {
      const NamespaceId id = space(number);
      std::uint32_t given = NamespaceTable::kNone;
      done(allocations, [&] { given = table.intern(id); });
      given = table.intern(id);
      CHECK(given == table.find(id) && table[given] == id);
      CHECK(found.emplace(given, id).second);
    }
  }
}

// Reads all that waits to its end; how many events it is. Each names blocks of its own namespace.
std::uint64_t read(Ledger& ledger) {
  std::uint64_t count = 0;
  tests::take_waiting(ledger, [&](const auto& event) {
    ++count;
    std::visit(
        [](const auto& fact) {
          if constexpr (requires {
                          fact.hashes;
                          fact.namespace_id;
                        }) {
            for (std::size_t at = 0; at < fact.hashes.size(); at += kHashBytes) {
              std::uint32_t number = 0;
              std::memcpy(&number, fact.hashes.data() + at, sizeof number);
              CHECK(fact.namespace_id == space((number - 1) / kSpaceBlocks));
            }
          }
        },
        event);
  });
  return count;
}

// Random commands, of which every other one has memory for a few allocations alone.
void a_ledger_loses_nothing(const char* eviction, std::vector<Share> shares) {
  const std::vector<Pool> pools{{Tier::kHbm, 9, false}, {Tier::kHost, 5, false}, {Tier::kObject, 0, true}};
  const Tier tiers[] = {Tier::kHbm, Tier::kHost, Tier::kObject};
  std::size_t failed = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {  // a new one has nothing that it has grown to
    Random random(seed);
    Ledger ledger = started(pools, eviction, kDefaultEventBytes, shares);
    std::uint64_t applied = 0;
    std::vector<std::pair<Tier, Buffer>> pinned;
    std::vector<std::uint64_t> copies;
    const auto give_back = [&](Tier tier, const Buffer& slots) {
      for (std::size_t at = 0; at < slots.size(); at += kSlotBytes) {
        try {
          ledger.release(tier, Bytes(slots).subspan(at, kSlotBytes));
        } catch (const Error&) {  // it is nobody's, or holds a block
        }
      }
    };
    const auto end_copy = [&](std::uint64_t copy, long allocations) {
      const Buffer arrived(ledger.copy_blocks(copy), 1);
      const std::size_t before = ledger.copies_in_flight();
      return done(allocations,
                  [&] { ledger.end_copy(copy, arrived, MigrateCause::kOffload, random.below(2) == 0, false); }) ||
             ledger.copies_in_flight() < before;
    };
    for (int step = 0; step < 120; ++step) {
      const auto of = static_cast<std::uint32_t>(random.below(kSpaces));
      const Buffer run = blocks(of, static_cast<std::uint32_t>(random.below(4)), 1 + random.below(5));
      const Tier tier = tiers[random.below(2)];
      const long allocations = random.below(2) == 0 ? -1 : static_cast<long>(random.below(8));
      bool was_done = true;
      switch (random.below(8)) {
        case 0:
        case 1: {
          Buffer slots;
          const NamespaceId id = space(of);
          was_done = done(allocations, [&] {
            if (const auto allocation = ledger.allocate(tier, run.size() / kHashBytes, &id)) {
              left = -1;
              slots = copied(allocation->slots);
            }
          });
          Buffer holders(slots.size());
          if (!slots.empty()) {
            const long more = static_cast<long>(random.below(8));
            if (done(more,
                     [&] { std::ranges::copy(ledger.create(id, tier, kNoParent, 0, run, slots), holders.begin()); })) {
              pinned.emplace_back(tier, holders);
            } else {
              ++failed;
              give_back(tier, slots);
            }
          }
          break;
        }
        case 2:
          if (!pinned.empty()) {
            const auto& [where, slots] = pinned.back();
            was_done = done(allocations, [&] { ledger.unpin(where, slots); });
            if (was_done) {
              pinned.pop_back();
            }
          }
          break;
        case 3:
          was_done = done(allocations, [&] { ledger.evict(tier, run, EvictReason::kCleared); });
          break;
        case 4:
          was_done = done(allocations, [&] {
            ledger.keep(tier, run, static_cast<double>(random.below(20)), static_cast<std::int64_t>(random.below(101)));
          });
          break;
        case 5: {
          const Tier target = tiers[random.below(3)];
          was_done = target == tier || done(allocations, [&] {
                       if (const auto begun = ledger.begin_copy(space(of), CopySource(tier), target, run)) {
                         left = -1;
                         copies.push_back(begun->first);
                       }
                     });
          break;
        }
        case 6:
          if (!copies.empty()) {
            const std::uint64_t copy = copies.back();
            was_done = end_copy(copy, allocations);
            if (was_done) {
              copies.pop_back();
            }
          }
          break;
        default:
          was_done = done(allocations, [&] {
            ledger.begin_snapshot();
            ledger.step_snapshot(1 + random.below(4));
          });
          applied += read(ledger);
          CHECK(applied == ledger.applied());
      }
      failed += was_done ? 0 : 1;
      std::uint64_t digest = 0;
      for (const Tier each : {Tier::kHbm, Tier::kHost}) {
        const Buffer held = ledger.held(each);
        CHECK(held.size() == ledger.counts(each).held * kHashBytes);
        for (std::size_t at = 0; at < held.size(); at += kHashBytes) {
          digest += residency_mix(each, held.data() + at);
        }
      }
      CHECK(digest == ledger.digest());
    }
    for (const auto& [tier, slots] : pinned) {
      ledger.unpin(tier, slots);
    }
    for (const std::uint64_t copy : copies) {
      CHECK(end_copy(copy, -1));
    }
    ledger.expire(1e9);
    applied += read(ledger);
    CHECK(applied == ledger.applied());
    for (const Tier each : {Tier::kHbm, Tier::kHost}) {  // each slot is nobody's, or may be
      const TierCounts counts = ledger.counts(each);
      CHECK(counts.allocated == 0 && counts.free + counts.held == counts.slots && counts.evictable == counts.held);
      CHECK(ledger.allocate(each, counts.slots).has_value());
    }
  }
  CHECK(failed > 1'000);
}

void a_ledger_loses_nothing_by_any_policy() {
  a_ledger_loses_nothing("lru", {});
  a_ledger_loses_nothing("s3fifo", {});
  a_ledger_loses_nothing("s3fifo", {{.tenant = "a", .weight = 2}});
}

// More blocks than one event names.
void a_run_of_which_a_part_is_recorded_is_held_by_nobody() {
  constexpr std::uint32_t kSlots = 3 * kMaxRunBlocks;
  for (const char* const eviction : {"lru", "s3fifo"}) {
    std::size_t parts = 0;
    for (long allocations = 0; allocations < 40; ++allocations) {
      const std::vector<Pool> pools{{Tier::kHbm, kSlots, false}, {Tier::kHost, kSlots, false}};
      Ledger ledger = started(pools, eviction);
      const Buffer run = numbered(0, kSlots);
      const auto is_whole = [&](Tier tier) {
        const TierCounts counts = ledger.counts(tier);
        parts += counts.held > 0 && counts.held < kSlots ? 1 : 0;
        return counts.evictable == counts.held && counts.free + counts.held + counts.allocated == kSlots;
      };
      const Buffer slots = copied(ledger.allocate(Tier::kHbm, kSlots)->slots);
      Buffer holders(slots.size());
      if (!done(allocations, [&] {
            std::ranges::copy(ledger.create(space(0), Tier::kHbm, kNoParent, 0, run, slots), holders.begin());
          })) {
        CHECK(is_whole(Tier::kHbm));
        continue;
      }
      ledger.unpin(Tier::kHbm, slots);
      ledger.clear_waiting();
      const auto begun = ledger.begin_copy(space(0), CopySource(Tier::kHbm), Tier::kHost, run);
      CHECK(begun.has_value());
      const Buffer arrived(kSlots, 1);
      if (!done(allocations, [&] { ledger.end_copy(begun->first, arrived, MigrateCause::kOffload, true, false); }) &&
          ledger.copies_in_flight() > 0) {
        ledger.end_copy(begun->first, arrived, MigrateCause::kOffload, true, false);
      }
      CHECK(is_whole(Tier::kHbm) && is_whole(Tier::kHost) && ledger.counts(Tier::kHost).allocated == 0);
      Ledger other = started(pools, eviction);
      const Buffer there = copied(other.allocate(Tier::kHost, kSlots)->slots);
      if (!done(allocations, [&] { other.adopt(space(0), Tier::kHost, run, there, "another"); })) {
        const TierCounts counts = other.counts(Tier::kHost);
        CHECK(counts.evictable == counts.held);
        // Not begun: they are the caller's
        CHECK(counts.allocated == 0 || (counts.allocated == kSlots && counts.held == 0));
      }
    }
    CHECK(parts > 0);
  }
}

// Blocks of some runs, which are learned, told and forgotten.
void what_was_told_of_blocks_stays_as_it_was() {
  constexpr std::uint32_t kRunBlocks = 40;
  ToldTiers blocks(64, 7);
  std::size_t failed = 0;
  std::size_t told_blocks = 0;
  std::size_t ended_runs = 0;
  const auto step = [&](std::uint8_t tier) {
    std::vector<ToldTiers::Told> told;
    std::vector<std::uint64_t> ended;
    long allocations = 0;
    for (; !done(allocations, [&] { blocks.choose_due(); }); ++allocations) {
    }
    const Buffer tiers(blocks.due(), tier);
    const std::size_t held = blocks.blocks();
    for (allocations = 0; !done(allocations, [&] { blocks.change(tiers, told, ended); }); ++allocations) {
      CHECK(blocks.blocks() == held && blocks.due() == tiers.size() && told.empty() && ended.empty());
      ++failed;
    }
    for (const ToldTiers::Told& one : told) {
      told_blocks += one.is_held ? one.end - one.begin : 0;
    }
    ended_runs += ended.size();
  };
  for (std::uint32_t run = 0; run < 60; ++run) {
    const Buffer hashes = numbered(run * kRunBlocks, kRunBlocks);
    std::vector<Bytes> digests;
    for (std::uint32_t at = 0; at < kRunBlocks; ++at) {
      digests.push_back(Bytes(hashes).subspan(at * kHashBytes, kHashBytes));
    }
    const std::size_t before = blocks.blocks();
    std::optional<ToldTiers::Learned> learned;
    for (long allocations = 0; !done(allocations, [&] { learned = blocks.learn(hashes, digests, 0); }); ++allocations) {
      CHECK(blocks.blocks() == before && blocks.digests() == before);
      ++failed;
    }
    CHECK(learned && learned->run == run && learned->end == kRunBlocks);
    step(1);
  }
  CHECK(told_blocks == 60 * kRunBlocks && failed > 100);
  while (blocks.blocks() > 0) {
    step(ToldTiers::kAbsent);
  }
  CHECK(ended_runs == 60 && blocks.digests() == 0);
}

}  // namespace

int main() {
  return tests::run(
      {{"a queue copies nothing that it has refused", a_queue_copies_nothing_that_it_has_refused},
       {"no two namespaces have one number", no_two_namespaces_have_one_number},
       {"a ledger loses no slot, pin or event", a_ledger_loses_nothing_by_any_policy},
       {"a run of which a part is recorded is held by nobody", a_run_of_which_a_part_is_recorded_is_held_by_nobody},
       {"what was told of blocks stays as it was", what_was_told_of_blocks_stays_as_it_was}});
}
