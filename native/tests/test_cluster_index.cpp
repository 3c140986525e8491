#include "kvbm/cluster_index.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

#include "check.hpp"
#include "cluster.hpp"

using namespace kvbm;
using namespace kvbm::tests;

namespace kvbm {

// Reaches into the table, as damage does.
class ClusterIndexTest {
 public:
  // The holders of a block as the table has them; it must be there.
  static HolderValue& value_of(ClusterIndex& index, const NamespaceId& id, std::uint64_t number) {
    const SequenceHash hash = hash_of(number);
    const BlockKey key = index.key_of(index.find_space(id), hash.data());
    HolderValue* const value = index.table_.find(key, index.table_.place(key));
    CHECK(value != nullptr);
    return *value;
  }

  // The shard of the table a block of a namespace goes to, and how often that one's entries were all moved.
  static std::size_t shard_of(const ClusterIndex& index, const NamespaceId& id, std::uint64_t number) {
    return index.table_.place(index.key_of(index.find_space(id), hash_of(number).data())) % BlockTable::kShards;
  }
  static std::uint64_t moves(const ClusterIndex& index, std::size_t shard) { return index.table_.moves(shard); }

  // Its key there. A bucket is a line of 64 bytes: three keys of 16, three values of 4.
  static BlockKey& key_of(HolderValue& value) {
    const auto address = reinterpret_cast<std::uintptr_t>(&value);
    const std::uintptr_t bucket = address / 64 * 64;
    return *reinterpret_cast<BlockKey*>(bucket + (address - bucket - 48) / 4 * 16);
  }
};

}  // namespace kvbm

namespace {

constexpr unsigned kStride = kIsUnderTsan ? 10 : 1;  // of long loops of one thread, in which TSan finds nothing

std::vector<Event> snapshot_of(const NamespaceId& id, Tier tier, std::uint32_t snapshot, Bytes hashes) {
  return {listed(id, tier, snapshot, hashes),
          SnapshotEnded{tier, snapshot, static_cast<std::uint32_t>(hashes.size() / kHashBytes)}};
}

std::uint32_t depth_of(const PrefixAnswer& answer, std::uint32_t instance) {
  for (const InstanceDepth& one : answer.instances) {
    if (one.instance == instance) {
      return one.depth;
    }
  }
  return 0;
}

void sweep_all(ClusterIndex& index) {
  while (index.sweep(64)) {
  }
  CHECK(!index.needs_sweep());
}

// -- snapshots and deaths ---------------------------------------------------------------------------------------------

void abandoned_snapshots_leave_everything_in_place() {
  // A generation per snapshot that was begun and not ended: there are four, so the fifth snapshot merges the old ones.
  for (const bool is_pass_under_way : {false, true}) {
    ClusterIndex index(kPlenty, kSecret);
    const std::uint32_t one = index.instance("one");
    const std::uint32_t other = index.instance("other");
    const Buffer all = hashes_between(0, 60);
    apply(index, other, {InstanceStarted{}, created(space_id(0), Tier::kHbm, all)}, {own_pools()});
    apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, all), created(space_id(1), Tier::kHbm, all)},
          {own_pools()});
    const std::uint64_t digest = index.state(one)->digest;
    for (std::uint32_t snapshot = 1; snapshot <= 14; ++snapshot) {
      if (is_pass_under_way && snapshot % 3 == 0) {
        apply(index, other, {InstanceStarted{}, created(space_id(0), Tier::kHbm, all)}, {own_pools()});
        index.sweep(7);
      }
      // Each snapshot comes as far as another few blocks.
      const Buffer some = hashes_between(snapshot * 4 - 4, snapshot * 4);
      apply(index, one, {listed(space_id(0), Tier::kHbm, snapshot, some)});
      CHECK(index.state(one)->digest == digest && index.recomputed_digest(one) == digest);
      CHECK(index.state(one)->counts[0] == 120);
      PrefixAnswer answer;
      index.prefixes(space_id(0), all, 0, answer);
      CHECK(depth_of(answer, one) == 60 && depth_of(answer, other) == 60);
    }
    const Buffer kept = hashes_between(0, 10);
    apply(index, one, snapshot_of(space_id(0), Tier::kHbm, 15, kept));
    CHECK(index.state(one)->counts[0] == 10 && index.recomputed_digest(one) == index.state(one)->digest);
    sweep_all(index);
    CHECK(index.state(one)->counts[0] == 10 && index.recomputed_digest(one) == index.state(one)->digest);
    CHECK(index.residency_count() == 70 && index.block_count() == 60);
  }
}

void snapshots_without_a_sweep_keep_what_each_listed() {
  // Every snapshot withdraws half, so every generation is dead and not swept by the time it is needed again.
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  apply(index, one, {InstanceStarted{}}, {own_pools()});
  for (std::uint32_t snapshot = 1; snapshot <= 12; ++snapshot) {
    const Buffer some = hashes_between(snapshot * 10, snapshot * 10 + 20);
    apply(index, one, snapshot_of(space_id(0), Tier::kHost, snapshot, some));
    CHECK(index.state(one)->counts[1] == 20);
    CHECK(index.recomputed_digest(one) == index.state(one)->digest);
    for (std::uint64_t number = 0; number < 200; ++number) {
      const bool is_held = !index.holders(space_id(0), hash_of(number).data()).empty();
      CHECK(is_held == (number >= snapshot * 10 && number < snapshot * 10 + 20));
    }
  }
}

void the_dead_hold_nothing_before_and_after_a_sweep() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const std::uint32_t other = index.instance("other");
  const Buffer all = hashes_between(0, 500);
  const Buffer shared = hashes_between(0, 100);
  apply(index, other, {InstanceStarted{}, created(space_id(0), Tier::kHbm, shared)}, {own_pools()});
  for (int life = 0; life < 6; ++life) {
    apply(index, one, {InstanceStarted{}}, {own_pools()});
    CHECK(index.state(one)->counts[0] == 0 && index.residency_count() == 100 && index.recomputed_digest(one) == 0);
    CHECK(index.holders(space_id(0), hash_of(5).data()).size() == 1 &&
          index.holders(space_id(0), hash_of(400).data()).empty());
    CHECK(deepest_held(index, space_id(0), all) == 100);
    if (life % 2 == 1) {
      sweep_all(index);
      CHECK(index.block_count() == 100);
    }
    apply(index, one, {created(space_id(0), Tier::kHbm, all)});
    CHECK(index.residency_count() == 600 && index.holders(space_id(0), hash_of(5).data()).size() == 2);
  }
  index.drop(one);
  CHECK(!index.state(one) && index.find_instance("one") == ClusterIndex::kNone && index.instance("one") == one);
  CHECK(index.residency_count() == 100);
}

void a_dead_ones_ids_are_nobody_elses() {
  // The numbers of the dead one's holder ids are free for others only once no block has them any more.
  ClusterIndex index(kPlenty, kSecret);
  const Buffer all = hashes_between(0, 2000);
  for (std::uint32_t life = 1; life < 40; ++life) {
    const std::uint32_t one = index.instance(name_of(life));
    apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, life))}, {own_pools()});
    CHECK(index.residency_count() == life);
    for (std::uint64_t number = 0; number < 60; ++number) {
      CHECK(index.holders(space_id(0), hash_of(number).data()).size() == (number < life ? 1 : 0));
    }
    index.sweep(1 + 100 * (life % 7));
    index.drop(one);
    CHECK(deepest_held(index, space_id(0), all) == 0);
  }
  const std::uint64_t rest = index.memory().rest;
  for (int life = 0; life < 500; ++life) {
    const std::uint32_t one = index.instance("i0");
    apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, 5))}, {own_pools()});
    index.drop(one);
    sweep_all(index);
  }
  CHECK(index.memory().rest <= rest + 4096 && index.block_count() == 0);
}

void ids_that_a_snapshot_left_behind_are_nobody_elses() {
  // A snapshot withdraws everything, so nothing is counted any more, but the table has it still when the instance
  // begins anew.
  for (const bool is_same : {false, true}) {
    ClusterIndex index(kPlenty, kSecret);
    const std::uint32_t one = index.instance("one");
    const std::uint32_t next = is_same ? one : index.instance("other");
    const Buffer all = hashes_between(0, 100);
    apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, all)}, {own_pools()});
    apply(index, one, {SnapshotEnded{Tier::kHbm, 1, 0}});
    CHECK(index.residency_count() == 0 && index.needs_sweep());
    apply(index, one, {InstanceStarted{}}, {own_pools()});
    const Buffer few = hashes_between(1000, 1003);
    apply(index, next, {InstanceStarted{}, created(space_id(0), Tier::kHbm, few)}, {own_pools()});
    const auto check = [&] {
      for (std::uint64_t number = 0; number < 100; ++number) {
        CHECK(index.holders(space_id(0), hash_of(number).data()).empty());
      }
      CHECK(deepest_held(index, space_id(0), all) == 0 && index.residency_count() == 3);
      CHECK(index.recomputed_digest(next) == index.state(next)->digest);
    };
    check();
    sweep_all(index);
    check();
    CHECK(index.block_count() == 3);
  }
}

void a_sweep_misses_nothing_that_moved_amid_it() {
  // A shard's last entries may go on at its beginning when it has grown, where the sweep has been already.
  for (std::uint64_t seed = 1; seed <= 40; seed += kStride) {
    ClusterIndex index(kPlenty, {seed, 3 * seed, 7 * seed});
    const std::uint32_t dead = index.instance("dead");
    const std::uint32_t live = index.instance("live");
    apply(index, live, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, 1))}, {own_pools()});
    apply(index, dead, {InstanceStarted{}}, {own_pools()});
    std::uint64_t number = 1;
    std::uint64_t added = 0;
    const auto add = [&](std::uint32_t instance) {  // one block more in the shard that a sweep begins with
      while (ClusterIndexTest::shard_of(index, space_id(0), number) != 0) {
        ++number;
      }
      apply(index, instance, {created(space_id(0), Tier::kHbm, hashes_between(number, number + 1))});
      ++number;
      ++added;
    };
    const std::uint64_t begun = ClusterIndexTest::moves(index, 0);
    while (ClusterIndexTest::moves(index, 0) < begun + 3) {
      add(dead);
    }
    index.drop(dead);
    index.sweep(1);
    added = 0;
    const std::uint64_t before = ClusterIndexTest::moves(index, 0);
    while (ClusterIndexTest::moves(index, 0) == before) {
      add(live);
    }
    sweep_all(index);
    CHECK(index.block_count() == added + 1);
  }
}

void a_set_that_was_made_before_a_death_is_not_given_out_after_it() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const std::uint32_t other = index.instance("other");
  for (const std::uint32_t number : {one, other}) {
    apply(index, number, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, 3))}, {own_pools()});
  }
  apply(index, one, {evicted(space_id(0), Tier::kHbm, hashes_between(0, 1))});  // both held it, now the other alone
  index.drop(other);
  apply(index, one, {evicted(space_id(0), Tier::kHbm, hashes_between(1, 2))});  // nobody is left
  CHECK(index.block_count() == 2 && index.residency_count() == 1);
  sweep_all(index);
  CHECK(index.block_count() == 1 && index.residency_count() == 1);
}

// -- excluding -------------------------------------------------------------------------------------------------------

void who_is_excluded_is_in_no_answer_and_is_not_forgotten() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const std::uint32_t other = index.instance("other");
  const Buffer all = hashes_between(0, 60);
  const Buffer half = hashes_between(0, 30);
  std::vector<DeclaredPool> pools = shared_pools("pool");
  pools[2].is_pod = true;
  apply(index, one,
        {InstanceStarted{}, created(space_id(0), Tier::kHbm, all),
         created(space_id(0), Tier::kNvme, hashes_between(0, 10))},
        {pools});
  apply(index, other, {InstanceStarted{}, created(space_id(0), Tier::kHost, half)}, {pools});
  index.claim("pool", space_id(0), hashes_between(0, 20));
  const std::uint64_t digest = index.state(one)->digest;
  index.exclude(one, true);
  PrefixAnswer answer;
  index.prefixes(space_id(0), all, 0, answer);
  CHECK(answer.deepest == 30 && answer.instances.size() == 2 && depth_of(answer, one) == 10 &&
        depth_of(answer, other) == 30);
  for (const InstanceDepth& depth : answer.instances) {
    CHECK(depth.instance == other || (depth.by_tier[2] == 10 && depth.reach == 20));
  }
  index.prefixes(space_id(0), all, 1, answer);
  CHECK(answer.instances.size() == 1 && answer.instances[0].instance == other);
  CHECK(deepest_held(index, space_id(0), all) == 30);
  CHECK(index.holders(space_id(0), hash_of(40).data()).empty());
  CHECK(index.holders(space_id(0), hash_of(40).data(), true).size() == 1);
  CHECK(index.holders(space_id(0), hash_of(5).data()).size() == 3);
  CHECK(index.state(one)->is_excluded && index.state(one)->digest == digest && index.residency_count() == 100);
  // Sweeps, snapshots, new namespaces and new epochs leave it excluded.
  sweep_all(index);
  CHECK(index.residency_count() == 100 && index.block_count() == 60);
  apply(index, one, snapshot_of(space_id(0), Tier::kHbm, 7, half));
  apply(index, one, {created(space_id(2), Tier::kHbm, all)});
  CHECK(deepest_held(index, space_id(2), all) == 0 && index.holders(space_id(0), hash_of(25).data()).size() == 1);
  index.exclude(one, false);
  CHECK(deepest_held(index, space_id(2), all) == 60 && index.holders(space_id(0), hash_of(25).data()).size() == 2);
  index.exclude(one, true);
  apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, all)}, {own_pools()});
  CHECK(index.state(one)->is_excluded && deepest_held(index, space_id(0), all) == 30);
  index.drop(one);
  CHECK(index.instance("one") == one && !index.state(one)->is_excluded);
  apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, all)}, {own_pools()});
  CHECK(deepest_held(index, space_id(0), all) == 60);
}

// -- auditing ---------------------------------------------------------------------------------------------------------

AuditPart audit_all(ClusterIndex& index) {
  for (bool is_pass = false;;) {  // the rest of a pass under way, then a whole one
    AuditPart part = index.audit(50);
    if (part.is_whole && std::exchange(is_pass, true)) {
      return part;
    }
  }
}

void an_audit_finds_nothing_while_frames_grow_and_shrink_the_table() {
  ClusterIndex index(kPlenty, kSecret);
  constexpr std::uint32_t kHolders = 5;
  Random random(3);
  for (std::uint32_t number = 0; number < kHolders; ++number) {
    index.instance(name_of(number));
    apply(index, number, {InstanceStarted{}}, {own_pools()});
  }
  int passes = 0;
  std::uint32_t snapshot = 0;
  for (int step = 0; step < 1500; ++step) {
    const auto number = static_cast<std::uint32_t>(random.below(kHolders));
    // Up to three pages a shard, then down again, twice.
    const std::uint64_t begin = random.below(700'000);
    const Buffer some = hashes_between(begin, begin + 1 + random.below(2000));
    const bool is_growing = step / 375 % 2 == 0;
    const auto tier = static_cast<Tier>(random.below(2));
    if (random.below(40) == 0) {
      apply(index, number, snapshot_of(space_id(0), tier, ++snapshot, some));
    } else if (random.below(is_growing ? 400 : 30) == 0) {
      apply(index, number, {InstanceStarted{}}, {own_pools()});
    } else if (random.below(4) == 0) {
      apply(index, number, {listed(space_id(0), tier, ++snapshot, some)});
    } else {
      apply(index, number, {is_growing ? created(space_id(0), tier, some) : evicted(space_id(0), tier, some)});
    }
    index.sweep(random.below(30));
    const AuditPart part = index.audit(random.below(40));
    CHECK(part.differing.empty() && part.damaged == 0);
    passes += part.is_whole ? 1 : 0;
  }
  CHECK(passes > 20);
  sweep_all(index);
  CHECK(audit_all(index).blocks == index.block_count());
}

void a_flipped_bit_of_an_entry_is_found_and_healed_by_a_snapshot() {
  for (unsigned bit = 0; bit < 128 + 15; bit += 5 * kStride) {
    ClusterIndex index(kPlenty, kSecret);
    const Buffer all = hashes_between(0, 20'000);
    for (std::uint32_t number = 0; number < 3; ++number) {
      index.instance(name_of(number));
      const Buffer mine = hashes_between(number * 8000, number * 8000 + 9000);  // some blocks have two holders
      apply(index, number,
            {InstanceStarted{}, created(space_id(0), Tier::kHbm, mine), created(space_id(1), Tier::kHost, mine)},
            {own_pools()});
    }
    index.audit(bit * 2);  // it may be found in this pass or the next one
    HolderValue& value = ClusterIndexTest::value_of(index, space_id(0), 12'345);
    if (bit < 64) {
      ClusterIndexTest::key_of(value).low ^= std::uint64_t{1} << bit;
    } else if (bit < 128) {
      ClusterIndexTest::key_of(value).high ^= std::uint64_t{1} << (bit - 64);
    } else {
      value ^= HolderValue{1} << (bit - 128);
    }
    const AuditPart found = audit_all(index);
    // The flipped holder id may be another instance's.
    CHECK(found.differing == std::vector<std::uint32_t>{1} || (found.differing.size() == 2 && bit >= 128));
    for (std::uint32_t number = 0; number < 3; ++number) {
      const Buffer mine = hashes_between(number * 8000, number * 8000 + 9000);
      apply(index, number,
            {listed(space_id(0), Tier::kHbm, 5, mine), SnapshotEnded{Tier::kHbm, 5, 9000},
             listed(space_id(1), Tier::kHost, 5, mine), SnapshotEnded{Tier::kHost, 5, 9000}});
    }
    CHECK(audit_all(index).differing.empty());
    CHECK(index.holders(space_id(0), hash_of(12'345).data()).size() == 1);
  }
}

void holders_that_cannot_be_are_taken_out_and_counted() {
  for (const unsigned bit : {27U, 30U, 31U}) {
    ClusterIndex index(kPlenty, kSecret);
    const std::uint32_t one = index.instance("one");
    apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, 50))}, {own_pools()});
    ClusterIndexTest::value_of(index, space_id(0), 7) ^= HolderValue{1} << bit;
    AuditPart found;
    while (!(found = index.audit(50)).is_whole) {
    }
    CHECK(found.damaged == 1 && found.differing == std::vector<std::uint32_t>{one} && found.blocks == 50);
    CHECK(deepest_held(index, space_id(0), hashes_between(7, 8)) == 0 && audit_all(index).damaged == 0);
  }
}

// -- capacity and claims ----------------------------------------------------------------------------------------------

void beyond_capacity_is_refused_and_said() {
  ClusterIndex index(50, kSecret);
  const std::uint32_t one = index.instance("one");
  apply(index, one, {InstanceStarted{}}, {shared_pools("pool")});
  index.claim("pool", space_id(0), hashes_between(0, 10));
  apply(index, one, {created(space_id(0), Tier::kHbm, hashes_between(0, 60))});
  CHECK(index.residency_count() == 40 && index.state(one)->counts[0] == 40 && index.state(one)->is_partial);
  CHECK(index.anomalies()[static_cast<std::size_t>(IndexAnomaly::kRefusedAtCapacity)] == 20);
  index.unclaim("pool", space_id(0), hashes_between(0, 10));
  const Buffer fewer = hashes_between(0, 30);
  apply(index, one, snapshot_of(space_id(0), Tier::kHbm, 1, fewer));
  CHECK(index.state(one)->counts[0] == 30 && !index.state(one)->is_partial &&
        index.recomputed_digest(one) == index.state(one)->digest);
}

void claims_of_several_tiers_are_one_blocks() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  apply(index, one, {InstanceStarted{}},
        {{{Tier::kNvme, true, "pool"}, {Tier::kObject, true, "pool"}, {Tier::kHbm, false, ""}}});
  const Buffer all = hashes_between(0, 5);
  const AppliedFrame applied =
      apply(index, one, {created(space_id(0), Tier::kNvme, all), created(space_id(0), Tier::kObject, all)});
  CHECK(applied.claims.size() == 2 && applied.claims[0].hashes.size() == all.size() && !applied.claims[0].is_withdrawn);
  CHECK(claim_counts(index)["pool"] == 5 && index.holders(space_id(0), hash_of(0).data()).size() == 2);
  CHECK(index.residency_count() == 0);
  index.unclaim("pool", space_id(0), hashes_between(0, 2));
  CHECK(claim_counts(index)["pool"] == 3 && index.block_count() == 3);
  apply(index, one, {evicted(space_id(0), Tier::kObject, hashes_between(2, 5))});
  CHECK(claim_counts(index)["pool"] == 0 && index.block_count() == 0);
}

// -- prefixes ---------------------------------------------------------------------------------------------------------

void a_run_goes_on_in_a_pool_that_was_not_walked_yet() {
  // `one` is still followed by name when it ends; where the pool's run ends is known only later.
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const std::uint32_t other = index.instance("other");
  apply(index, other, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, 2))}, {own_pools()});
  apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, 5))},
        {shared_pools("pool")});
  for (const std::uint64_t begin : {0, 4, 5}) {
    index.claim("pool", space_id(0), hashes_between(begin, 9));
    PrefixAnswer answer;
    index.prefixes(space_id(0), hashes_between(0, 12), 0, answer);
    CHECK(answer.instances.size() == 2);
    for (const InstanceDepth& found : answer.instances) {
      CHECK(found.depth == (found.instance == one ? 5 : 2) && found.reach == (found.instance == one ? 9 : 2));
    }
    index.unclaim("pool", space_id(0), hashes_between(0, 12));
  }
}

void prefixes_are_right_for_thousands() {
  constexpr std::uint32_t kInstances = 7000;
  constexpr std::uint32_t kDepth = 2;
  ClusterIndex index(kPlenty, kSecret);
  Model model(kInstances, kPlenty);
  Random random(8);
  std::vector<Frame> frames;
  for (std::uint32_t number = 0; number < kInstances; ++number) {
    CHECK(index.instance(name_of(number)) == number);
    const Buffer begin = hashes_between(0, random.below(kDepth + 1));
    std::vector<Event> events{InstanceStarted{}};
    if (!begin.empty()) {
      events.push_back(created(space_id(0), static_cast<Tier>(random.below(3)), begin));
    }
    Frame frame = frame_of(number, events, {number % 3 == 0 ? shared_pools("pool") : own_pools()});
    apply(index, frame);
    model.apply(frame);
  }
  const Buffer claimed = hashes_between(1, 7);
  index.claim("pool", space_id(0), claimed);
  model.claim("pool", space_id(0), claimed);
  const Buffer asked = hashes_between(0, 8);
  check_prefixes(index, model, space_id(0), asked);
  for (std::uint32_t number = 0; number < kInstances; number += 5) {
    const Frame frame = frame_of(number, {InstanceStarted{}}, {own_pools()}, 2);
    apply(index, frame);
    model.apply(frame);
  }
  check_prefixes(index, model, space_id(0), asked);
  while (index.sweep(100)) {
  }
  check_prefixes(index, model, space_id(0), asked);
  check_holders(index, model, {space_id(0), hash_of(1)});
}

// -- anything against the model ---------------------------------------------------------------------------------------

constexpr std::uint32_t kInstances = 6;
constexpr std::size_t kSpaces = 3;
constexpr std::uint64_t kBlocks = 40;

// Frames of a few instances that do anything, legal or not.
class Script {
 public:
  explicit Script(std::uint64_t seed, std::uint64_t blocks = kBlocks, std::size_t longest = 12)
      : random(seed), blocks_(blocks), longest_(longest) {}

  Random random;

  std::vector<DeclaredPool> some_pools() {
    switch (random.below(4)) {
      case 0:
        return own_pools();
      case 1:
        return {{Tier::kHbm, false, ""}, {Tier::kNvme, true, "other"}, {Tier::kObject, true, "pool"}};
      case 2:
        return {};
      default:
        return shared_pools("pool");
    }
  }

  Buffer some_hashes() {
    const std::uint64_t begin = random.below(blocks_);
    const std::uint64_t end = begin + 1 + random.below(longest_);
    if (random.below(3) != 0) {
      return hashes_between(begin, end);
    }
    std::vector<std::uint64_t> numbers;
    for (std::uint64_t at = begin; at < end; ++at) {
      numbers.push_back(random.below(blocks_));
    }
    return hashes_of(numbers);
  }

  Frame next(const Model& model) {
    const auto number = static_cast<std::uint32_t>(random.below(model.instance_count()));
    std::vector<Event> events;
    std::vector<std::vector<DeclaredPool>> starts;
    std::vector<Buffer> kept(8);  // the hashes of each event
    const std::uint64_t epoch = model.instance(number).epoch + 1;
    for (Buffer& hashes : kept) {
      hashes = some_hashes();
      const NamespaceId id = space_id(random.below(kSpaces));
      const auto tier = static_cast<Tier>(random.below(kTierCount));
      const std::uint32_t snapshot = model.instance(number).tiers[static_cast<std::size_t>(tier)].snapshot;
      switch (random.below(16)) {
        case 0:
          if (random.below(4) == 0) {
            events.emplace_back(InstanceStarted{});
            starts.push_back(some_pools());
          }
          break;
        case 1:
        case 2:
          events.push_back(evicted(id, tier, hashes));
          break;
        case 3:
        case 4:
          events.emplace_back(BlocksMigrated{.namespace_id = id,
                                             .source = static_cast<Tier>(random.below(kTierCount)),
                                             .target = tier,
                                             .kept = random.below(2) == 0,
                                             .cause = MigrateCause::kOffload,
                                             .hashes = hashes,
                                             .slots = {}});
          break;
        case 5:
        case 6:
          events.push_back(listed(id, tier, snapshot + static_cast<std::uint32_t>(random.below(2)), hashes));
          break;
        case 7:
        case 8: {
          events.push_back(listed(id, tier, snapshot + 1, hashes));
          events.emplace_back(
              SnapshotEnded{tier, snapshot + 1, static_cast<std::uint32_t>(hashes.size() / kHashBytes)});
          break;
        }
        case 9:
          events.emplace_back(SnapshotEnded{tier, snapshot + static_cast<std::uint32_t>(random.below(2)), 0});
          break;
        case 10:
          if (random.below(8) == 0) {
            events.emplace_back(InstanceStopped{StopReason::kShutdown});
          }
          break;
        default:
          events.push_back(created(id, tier, hashes));
      }
    }
    if (events.empty()) {
      events.push_back(created(space_id(0), Tier::kHbm, kept[0]));
    }
    return frame_of(number, events, std::move(starts), epoch);
  }

 private:
  std::uint64_t blocks_;  // distinct hashes
  std::size_t longest_;   // run
};

void check_all(const ClusterIndex& index, const Model& model, std::uint64_t blocks) {
  check_states(index, model);
  for (std::size_t space = 0; space < kSpaces; ++space) {
    for (std::uint64_t number = 0; number < blocks; ++number) {
      check_holders(index, model, {space_id(space), hash_of(number)});
    }
  }
}

void whatever_happens_the_index_is_the_model() {
  for (const std::uint64_t seed : {1, 2, 3, 4}) {
    const std::uint64_t capacity = seed % 3 == 0 ? 200 : kPlenty;
    Script script(seed);
    Random& random = script.random;
    ClusterIndex index(capacity, kSecret);
    Model model(kInstances, capacity);
    for (std::uint32_t number = 0; number < kInstances; ++number) {
      CHECK(index.instance(name_of(number)) == number);
    }
    for (int step = 0; step < 500; ++step) {
      const auto number = static_cast<std::uint32_t>(random.below(kInstances));
      const Buffer hashes = script.some_hashes();
      const NamespaceId id = space_id(random.below(kSpaces));
      switch (random.below(24)) {
        case 0: {
          const auto pools = script.some_pools();
          const auto likely = script.some_pools();
          const bool is_known = random.below(2) == 0;
          index.instance(name_of(number));
          model.revive(number);
          index.begin_blind(number, 9, is_known ? &pools : nullptr, likely);
          model.begin_blind(number, 9, is_known ? &pools : nullptr, likely);
          break;
        }
        case 1:
          index.miss(number);
          model.miss(number);
          break;
        case 2:
          index.wait(number, step % 2 == 0);
          model.wait(number, step % 2 == 0);
          break;
        case 3:
          if (random.below(3) == 0) {
            index.drop(number);
            model.drop(number);
          }
          break;
        case 4:
          index.claim("pool", id, hashes);
          model.claim("pool", id, hashes);
          break;
        case 5:
          index.unclaim("pool", id, hashes);
          model.unclaim("pool", id, hashes);
          break;
        case 6: {
          const std::uint64_t digest = model.state(number).digest + random.below(2);
          CHECK(index.agrees(number, digest) == model.agrees(number, digest));
          break;
        }
        case 7:
        case 8:
          index.sweep(random.below(700));
          break;
        case 9:
          check_all(index, model, kBlocks + 12);
          break;
        case 10: {
          const AuditPart part = index.audit(random.below(300));
          CHECK(part.differing.empty() && part.damaged == 0);
          break;
        }
        case 11:
        case 12:
          check_prefixes(index, model, id, hashes);
          break;
        case 13:
          check_prefixes(index, model, id, hashes_between(0, kBlocks));
          break;
        default: {
          const Frame frame = script.next(model);
          index.instance(name_of(frame.instance));
          model.revive(frame.instance);
          apply(index, frame);
          model.apply(frame);
        }
      }
      CHECK(index.anomalies() == model.anomalies());
    }
    check_all(index, model, kBlocks + 12);
    sweep_all(index);
    check_all(index, model, kBlocks + 12);
  }
}

// -- memory -----------------------------------------------------------------------------------------------------------

void memory_stays_when_everything_is_replaced() {
  ClusterIndex index(kPlenty, kSecret);
  constexpr std::uint32_t kHolders = 8;
  constexpr std::uint64_t kSize = 4000;
  for (std::uint32_t number = 0; number < kHolders; ++number) {
    index.instance(name_of(number));
  }
  std::uint64_t first = 0;
  for (std::uint64_t snapshot = 0; snapshot < 10; ++snapshot) {
    for (std::uint32_t number = 0; number < kHolders; ++number) {
      // Each holds a part of it, so that there are many sets.
      const Buffer hashes = hashes_between(snapshot * kSize + number * 100, (snapshot + 1) * kSize);
      if (snapshot % 2 == 0) {
        apply(index, number, {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes)}, {own_pools()});
      } else {
        apply(index, number, snapshot_of(space_id(0), Tier::kHbm, static_cast<std::uint32_t>(snapshot), hashes));
      }
      index.sweep(40);  // some of it in between
    }
    sweep_all(index);
    CHECK(index.block_count() == kSize);
    const IndexMemory memory = index.memory();
    const std::uint64_t bytes = memory.table + memory.sets + memory.rest;
    first = snapshot == 1 ? bytes : first;  // by then both ways have been gone
    CHECK(snapshot < 2 || bytes <= first + first / 10);
  }
}

// A namespace for each number.
NamespaceId wide_id(std::uint64_t number) {
  NamespaceId id{};
  std::memcpy(id.data() + 8, &number, sizeof number);
  return id;
}

// What an instance says of one block in each of some namespaces, as frames hold it.
void say_each(ClusterIndex& index, std::uint32_t instance, std::uint64_t begin, std::uint64_t end,
              Event (*event)(const NamespaceId&, Tier, Bytes), Tier tier) {
  const Buffer hashes = hashes_between(0, 1);
  while (begin < end) {
    std::vector<Event> events;
    for (; begin < end && events.size() < 200; ++begin) {
      events.push_back(event(wide_id(begin), tier, hashes));
    }
    apply(index, instance, events);
  }
}

void namespaces_without_blocks_are_gone_after_an_audit() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const std::uint32_t other = index.instance("other");
  const Buffer hashes = hashes_between(0, 3);
  apply(index, one, {InstanceStarted{}}, {shared_pools("pool")});
  apply(index, other, {InstanceStarted{}, created(wide_id(7), Tier::kHbm, hashes)}, {own_pools()});
  index.claim("pool", wide_id(9), hashes);
  std::uint64_t bytes = 0;
  for (std::uint64_t round = 0; round < 40; ++round) {
    const std::uint64_t begin = 100 + round * 500;
    say_each(index, one, begin, begin + 500, created, Tier::kHost);
    say_each(index, one, begin, begin + 500, created, Tier::kObject);
    CHECK(index.namespaces().size() >= 502);
    say_each(index, one, begin, begin + 500, evicted, Tier::kObject);
    say_each(index, one, begin, begin + 499, evicted, Tier::kHost);
    CHECK(audit_all(index).differing.empty());
    const std::vector<NamespaceId> left = index.namespaces();
    CHECK(left.size() == 3 + round);  // one more stays in use each time
    CHECK(index.holders(wide_id(begin + 499), hashes.data()).size() == 1 &&
          index.holders(wide_id(begin), hashes.data()).empty());
    CHECK(deepest_held(index, wide_id(7), hashes) == 3 && deepest_held(index, wide_id(9), hashes) == 3);
    const IndexMemory memory = index.memory();
    bytes = round == 0 ? memory.rest : bytes;
    CHECK(memory.rest < 4 * bytes);  // and not 40 times
  }
  // What is named once more is a namespace like any other, and the dead leave theirs behind.
  say_each(index, one, 100, 101, created, Tier::kHbm);
  CHECK(index.holders(wide_id(100), hashes.data()).size() == 1);
  index.drop(one);
  sweep_all(index);
  audit_all(index);
  CHECK(index.namespaces().size() == 2);
}

void a_namespace_that_is_named_behind_an_audit_stays() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const Buffer hashes = hashes_between(0, 9);
  for (const Tier tier : {Tier::kHost, Tier::kObject}) {
    apply(index, one, {InstanceStarted{}}, {shared_pools("pool")});
    apply(index, one, {created(wide_id(1), tier, hashes), evicted(wide_id(1), tier, hashes)});
    index.audit(BlockTable::kShards - 1);  // nearly all of it: the blocks come where it has been
    apply(index, one, {created(wide_id(1), tier, hashes)});
    audit_all(index);
    CHECK(deepest_held(index, wide_id(1), hashes) == 9);
    apply(index, one, {evicted(wide_id(1), tier, hashes)});
    audit_all(index);
    audit_all(index);
    CHECK(index.namespaces().empty());
  }
}

void namespaces_that_somebody_uses_amid_an_audit_stay() {
  Random random(5);
  for (unsigned round = 0; round < 30 / kStride; ++round) {
    ClusterIndex index(kPlenty, kSecret);
    const std::uint32_t one = index.instance("one");
    apply(index, one, {InstanceStarted{}}, {shared_pools("pool")});
    const Buffer many = hashes_between(0, 3000);
    apply(index, one, {created(wide_id(1), Tier::kHbm, many)});
    for (std::uint64_t step = 0; step < 400; ++step) {
      const std::uint64_t number = 2 + random.below(20);
      const Buffer hashes = hashes_between(number * 10, number * 10 + 1 + random.below(9));
      const Tier tier = random.below(2) == 0 ? Tier::kHost : Tier::kObject;
      apply(index, one,
            {random.below(2) == 0 ? created(wide_id(number), tier, hashes) : evicted(wide_id(number), tier, hashes)});
      CHECK(index.audit(random.below(40)).differing.empty());
    }
    const InstanceState state = *index.state(one);
    CHECK(state.digest == index.recomputed_digest(one) && !state.is_partial);
    for (std::uint64_t number = 2; number < 22; ++number) {  // what was said last holds
      const Buffer hashes = hashes_between(number * 10, number * 10 + 9);
      apply(index, one,
            {created(wide_id(number), Tier::kHost, hashes), created(wide_id(number), Tier::kObject, hashes)});
      CHECK(deepest_held(index, wide_id(number), hashes) == 9);
      apply(index, one, {evicted(wide_id(number), Tier::kHost, hashes)});
      PrefixAnswer answer;
      index.prefixes(wide_id(number), hashes, 0, answer);
      CHECK(answer.pools.size() == 1 && answer.pools[0].depth == 9 && depth_of(answer, one) == 0);
    }
    CHECK(deepest_held(index, wide_id(1), many) == 3000);
  }
}

void what_one_instance_may_name_has_bounds() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const std::uint32_t other = index.instance("other");
  const Buffer hashes = hashes_between(0, 1);
  apply(index, one, {InstanceStarted{}}, {shared_pools("pool")});
  apply(index, other, {InstanceStarted{}}, {own_pools()});
  const std::uint64_t most = kMostSpacesOfOne;
  say_each(index, one, 0, most, created, Tier::kHbm);
  CHECK(!index.state(one)->is_partial);
  say_each(index, one, most, most + 3, created, Tier::kHbm);
  CHECK(index.state(one)->is_partial &&
        index.anomalies()[static_cast<std::size_t>(IndexAnomaly::kRefusedAtCapacity)] == 3);
  say_each(index, one, most + 3, most + 5, created, Tier::kObject);  // nor by claims
  CHECK(index.anomalies()[static_cast<std::size_t>(IndexAnomaly::kRefusedAtCapacity)] == 5);
  apply(index, other, {created(wide_id(most + 9), Tier::kHbm, hashes)});  // others go on
  CHECK(!index.state(other)->is_partial && index.holders(wide_id(most + 9), hashes.data()).size() == 1);
  // It is there already, but one holds of as many as it may
  say_each(index, one, most + 9, most + 10, created, Tier::kHbm);
  CHECK(index.holders(wide_id(most + 9), hashes.data()).size() == 1);
  say_each(index, one, most + 9, most + 10, created, Tier::kObject);
  CHECK(index.holders(wide_id(most + 9), hashes.data()).size() == 2);

  // Another epoch gives it none of them back before an audit has seen that they are not used.
  apply(index, one, {InstanceStarted{}}, {own_pools()});
  say_each(index, one, most + 20, most + 21, created, Tier::kHbm);
  CHECK(index.holders(wide_id(most + 20), hashes.data()).empty());
  sweep_all(index);
  audit_all(index);
  say_each(index, one, most + 20, most + 21, created, Tier::kHbm);
  CHECK(index.holders(wide_id(most + 20), hashes.data()).size() == 1);

  for (std::uint32_t number = 0; number < 2 * kMostPoolsOfOne; ++number) {
    apply(index, other, {InstanceStarted{}}, {shared_pools(name_of(number))});
  }
  CHECK(index.claim_counts().size() == 1 + kMostPoolsOfOne &&
        index.pool_of(other, Tier::kObject) == ClusterIndex::kNone);
  apply(index, other, {created(wide_id(most + 9), Tier::kObject, hashes)});
  CHECK(index.anomalies()[static_cast<std::size_t>(IndexAnomaly::kUnnamedClaim)] == 1);
  apply(index, other, {InstanceStarted{}}, {shared_pools("pool")});
  CHECK(index.pool_of(other, Tier::kObject) != ClusterIndex::kNone);
}

void pools_that_nobody_claims_or_names_are_gone_after_an_audit() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const Buffer hashes = hashes_between(0, 3);
  index.claim("stored", space_id(1), hashes);
  // One after the other, as a name that changes with each start
  for (std::uint32_t number = 0; number < 2 * kMostPoolsOfOne; ++number) {
    apply(index, one,
          {InstanceStarted{}, created(space_id(0), Tier::kObject, hashes), evicted(space_id(0), Tier::kObject, hashes)},
          {shared_pools(name_of(number))});
    CHECK(index.pool_of(one, Tier::kObject) != ClusterIndex::kNone &&
          index.pool_name(index.pool_of(one, Tier::kObject)) == name_of(number));
    audit_all(index);
    CHECK(claim_counts(index) == (std::map<std::string, std::uint64_t>{{"stored", 3}, {name_of(number), 0}}));
  }
  // What is claimed of a pool stays, whoever has brought it and goes.
  apply(index, one, {created(space_id(0), Tier::kObject, hashes)});
  index.drop(one);
  audit_all(index);
  CHECK(claim_counts(index).size() == 2 && deepest_held(index, space_id(0), hashes) == 3);
  index.unclaim(name_of(2 * kMostPoolsOfOne - 1), space_id(0), hashes);
  index.unclaim("stored", space_id(1), hashes);
  CHECK(claim_counts(index).size() == 2);
  audit_all(index);
  CHECK(claim_counts(index).empty());
}

void the_number_of_one_that_was_dropped_brings_as_much_as_any_other() {
  ClusterIndex index(kPlenty, kSecret);
  const std::uint32_t one = index.instance("one");
  const Buffer hashes = hashes_between(0, 1);
  for (std::uint32_t number = 0; number < kMostPoolsOfOne; ++number) {
    apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kObject, hashes)},
          {shared_pools(name_of(number))});
  }
  apply(index, one, {InstanceStarted{}}, {shared_pools("too many")});
  CHECK(index.pool_of(one, Tier::kObject) == ClusterIndex::kNone);
  index.drop(one);
  CHECK(index.instance("next") == one);
  for (std::uint32_t number = 0; number < kMostPoolsOfOne; ++number) {
    apply(index, one, {InstanceStarted{}, created(space_id(0), Tier::kObject, hashes)},
          {shared_pools(name_of(1000 + number))});
    CHECK(index.pool_of(one, Tier::kObject) != ClusterIndex::kNone);
  }
  // What the first had brought goes without making room for the next.
  for (std::uint32_t number = 0; number < kMostPoolsOfOne; ++number) {
    index.unclaim(name_of(number), space_id(0), hashes);
  }
  audit_all(index);
  CHECK(claim_counts(index).size() == kMostPoolsOfOne);
  apply(index, one, {InstanceStarted{}}, {shared_pools("too many")});
  CHECK(index.pool_of(one, Tier::kObject) == ClusterIndex::kNone);
}

// -- threads ----------------------------------------------------------------------------------------------------------

void all_at_once_comes_to_what_one_thread_comes_to() {
  constexpr std::uint64_t kMany = 300;
  Script script(11, kMany, 60);
  Model model(kInstances, kPlenty);
  std::vector<Frame> frames;
  for (std::uint32_t number = 0; number < kInstances; ++number) {
    frames.push_back(frame_of(number, {InstanceStarted{}}, {shared_pools("pool")}));
    model.apply(frames.back());
  }
  for (int step = 0; step < 300; ++step) {
    frames.push_back(script.next(model));
    model.apply(frames.back());
    if (step % 50 == 0) {  // one that dies again and again
      frames.push_back(frame_of(0, {InstanceStarted{}}, {shared_pools("pool")}, model.instance(0).epoch + 1));
      model.apply(frames.back());
    }
  }
  // At the end everybody states what they have, so that a checkpoint may end anywhere before.
  const std::size_t end = frames.size();
  for (std::uint32_t number = 0; number < kInstances; ++number) {
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      const auto& held = model.instance(number).tiers[tier].held;
      std::vector<Buffer> hashes;
      std::vector<Event> events;
      hashes.reserve(held.size());
      for (const auto& [key, era] : held) {
        hashes.emplace_back(key.second.begin(), key.second.end());
        events.push_back(listed(key.first, static_cast<Tier>(tier), 1'000'000, hashes.back()));
      }
      events.emplace_back(SnapshotEnded{static_cast<Tier>(tier), 1'000'000, static_cast<std::uint32_t>(held.size())});
      frames.push_back(frame_of(number, events));
    }
  }

  ClusterIndex index(kPlenty, kSecret);
  for (std::uint32_t number = 0; number < kInstances; ++number) {
    index.instance(name_of(number));
  }
  std::atomic<bool> is_done{false};
  std::vector<std::pair<std::size_t, Buffer>> checkpoints;  // and how many frames were applied before
  std::vector<std::thread> threads;
  for (std::uint64_t reader = 0; reader < 3; ++reader) {
    threads.emplace_back([&, reader] {
      Random random(reader);
      PrefixAnswer answer;
      while (!is_done) {
        const std::uint64_t begin = random.below(kMany);
        const Buffer hashes = hashes_between(begin, begin + 1 + random.below(100));
        const std::size_t best = random.below(3);
        index.prefixes(space_id(random.below(kSpaces)), hashes, best, answer);
        for (const InstanceDepth& one : answer.instances) {
          std::uint32_t depth = 0;
          for (const std::uint32_t blocks : one.by_tier) {
            depth += blocks;
          }
          CHECK(one.instance < kInstances && depth == one.depth && one.depth <= one.reach &&
                one.reach <= hashes.size() / kHashBytes);
          CHECK(one.depth <= answer.deepest);
        }
        CHECK(deepest_held(index, space_id(0), hashes) <= hashes.size() / kHashBytes);
        CHECK(index.holders(space_id(1), hashes.data()).size() <= kInstances * kTierCount + 2 * kTierCount);
        const auto number = static_cast<std::uint32_t>(random.below(kInstances));
        CHECK(index.state(number) && index.find_instance(name_of(number)) == number);
        index.pool_of(number, Tier::kObject);
        index.anomalies();
        index.memory();
        claim_counts(index);
        CHECK(index.residency_count() <= kInstances * kTierCount * kSpaces * (kMany + 60));
        if (random.below(16) == 0) {  // it keeps the writer out
          index.recomputed_digest(number);
        }
        std::this_thread::yield();
      }
    });
  }
  threads.emplace_back([&] {
    while (!is_done) {
      index.sweep(50);
      index.needs_sweep();
      std::this_thread::yield();
    }
  });
  threads.emplace_back([&] {
    for (std::uint32_t number = 0; !is_done; number = (number + 1) % kInstances) {
      const AuditPart part = index.audit(20);
      CHECK(part.differing.empty() && part.damaged == 0);
      index.exclude(number, true);
      std::this_thread::yield();
      index.exclude(number, false);
    }
  });
  threads.emplace_back([&] {
    while (!is_done) {
      std::uint64_t before = 0;
      Buffer data = written(index, "", &before);
      checkpoints.emplace_back(before, std::move(data));
      std::this_thread::yield();
    }
  });
  for (std::size_t at = 0; at < frames.size(); ++at) {
    apply(index, frames[at]);
    if (at % 4 == 0) {
      std::this_thread::yield();
    }
  }
  is_done = true;
  for (std::thread& thread : threads) {
    thread.join();
  }

  for (std::size_t at = end; at < frames.size(); ++at) {
    model.apply(frames[at]);
  }
  ClusterIndex alone(kPlenty, kSecret);
  for (std::uint32_t number = 0; number < kInstances; ++number) {
    alone.instance(name_of(number));
  }
  for (const Frame& frame : frames) {
    apply(alone, frame);
  }
  CHECK(index.anomalies() == alone.anomalies() && alone.anomalies() == model.anomalies());
  for (const ClusterIndex* const one : {&index, &alone}) {
    check_all(*one, model, kMany + 60);
    check_prefixes(*one, model, space_id(1), hashes_between(0, kMany));
  }
  // The last checkpoint that was begun before the snapshots at the end, and the frames since.
  const auto usable =
      std::find_if(checkpoints.rbegin(), checkpoints.rend(), [&](const auto& one) { return one.first <= end; });
  if (usable != checkpoints.rend()) {
    ClusterIndex loaded(kPlenty, kSecret);
    CHECK(load_checkpoint(loaded, usable->second).empty());
    for (std::size_t at = usable->first; at < frames.size(); ++at) {
      apply(loaded, frames[at]);
    }
    check_all(loaded, model, kMany + 60);
  }
}

}  // namespace

int main() {
  return tests::run(
      {{"abandoned snapshots leave everything in place", abandoned_snapshots_leave_everything_in_place},
       {"snapshots without a sweep keep what each listed", snapshots_without_a_sweep_keep_what_each_listed},
       {"the dead hold nothing before and after a sweep", the_dead_hold_nothing_before_and_after_a_sweep},
       {"a dead one's holder ids are nobody else's", a_dead_ones_ids_are_nobody_elses},
       {"holder ids that a snapshot left behind are nobody else's", ids_that_a_snapshot_left_behind_are_nobody_elses},
       {"a sweep misses nothing that moved amid it", a_sweep_misses_nothing_that_moved_amid_it},
       {"a set that was made before a death is not given out after it",
        a_set_that_was_made_before_a_death_is_not_given_out_after_it},
       {"who is excluded is in no answer and is not forgotten", who_is_excluded_is_in_no_answer_and_is_not_forgotten},
       {"an audit finds nothing while frames grow and shrink the table",
        an_audit_finds_nothing_while_frames_grow_and_shrink_the_table},
       {"a flipped bit of an entry is found and healed by a snapshot",
        a_flipped_bit_of_an_entry_is_found_and_healed_by_a_snapshot},
       {"holders that cannot be are taken out and counted", holders_that_cannot_be_are_taken_out_and_counted},
       {"beyond capacity is refused and said", beyond_capacity_is_refused_and_said},
       {"claims of several tiers are one block's", claims_of_several_tiers_are_one_blocks},
       {"a run goes on in a pool that was not walked yet", a_run_goes_on_in_a_pool_that_was_not_walked_yet},
       {"prefixes are right for thousands", prefixes_are_right_for_thousands},
       {"whatever happens, the index is the model", whatever_happens_the_index_is_the_model},
       {"memory stays when everything is replaced", memory_stays_when_everything_is_replaced},
       {"namespaces without blocks are gone after an audit", namespaces_without_blocks_are_gone_after_an_audit},
       {"a namespace that is named behind an audit stays", a_namespace_that_is_named_behind_an_audit_stays},
       {"namespaces that somebody uses amid an audit stay", namespaces_that_somebody_uses_amid_an_audit_stay},
       {"what one instance may name has bounds", what_one_instance_may_name_has_bounds},
       {"pools that nobody claims or names are gone after an audit",
        pools_that_nobody_claims_or_names_are_gone_after_an_audit},
       {"the number of one that was dropped brings as much as any other",
        the_number_of_one_that_was_dropped_brings_as_much_as_any_other},
       {"all at once comes to what one thread comes to", all_at_once_comes_to_what_one_thread_comes_to}});
}
