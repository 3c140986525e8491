#include "kvbm/tier_slots.hpp"

#include "check.hpp"

using namespace kvbm;

namespace {

SequenceHash block(std::uint8_t number) { return SequenceHash{number}; }

std::vector<std::uint32_t> taken(TierSlots& tier, std::size_t count) {
  std::vector<std::uint32_t> slots(count);
  tier.take(slots);
  return slots;
}

// An allocated slot holds a block from now on.
void gain(TierSlots& tier, std::uint32_t slot, const SequenceHash& hash, std::uint32_t owner = 0, bool pinned = false) {
  tier.insert(hash.data(), 0, owner, slot, 0);
  tier.enter(slot, pinned);
}

// The event before `applied` has withdrawn a slot's block.
void lose(TierSlots& tier, std::uint32_t slot, std::uint64_t applied) {
  tier.erase(slot, 0);
  tier.vacate(slot, applied);
}

// Blocks 1.. are held in all slots from 0 on, the first of them gained first, none pinned.
void fill(TierSlots& tier) {
  for (const std::uint32_t slot : taken(tier, tier.size())) {
    gain(tier, slot, block(static_cast<std::uint8_t>(slot + 1)));
  }
}

void slots_go_snapshot() {
  TierSlots tier(Tier::kNvme, 4, "lru", 7);
  fill(tier);
  CHECK(tier.free_count() == 0 && tier.room() == 4);
  lose(tier, 2, 11);
  lose(tier, 0, 15);
  std::vector<std::uint32_t> slots(1);
  CHECK(tier.take(slots) == 11 && slots[0] == 2);  // free first, taken first
  tier.give_back(2);
  CHECK((taken(tier, 2) == std::vector<std::uint32_t>{0, 2}));
  CHECK(tier.find(block(1).data()) == kNoSlot && tier.find(block(2).data()) == 1);
}

void pinned_slots_wait_for_their_last_unpin() {
  TierSlots tier(Tier::kNvme, 2, "lru", 7);
  fill(tier);
  tier.pin(0);
  tier.pin(0);
  lose(tier, 0, 9);
  tier.unpin(0);
  CHECK(tier.free_count() == 0 && tier.counts().held == 1);
  tier.unpin(0);
  CHECK(tier.free_count() == 1);
}

void a_slot_withdrawn_while_pinned_waits_for_that() {
  TierSlots tier(Tier::kNvme, 2, "lru", 7);
  fill(tier);
  tier.pin(0);
  lose(tier, 0, 9);
  tier.unpin(0);
  std::vector<std::uint32_t> slots(1);
  CHECK(tier.take(slots) == 9 && slots[0] == 0);
}

// What came back unwritten is taken behind what was withdrawn after it.
void slots_wait_for_the_last_withdrawal_in_whatever_order_they_are_taken() {
  TierSlots tier(Tier::kNvme, 2, "lru", 7);
  fill(tier);
  lose(tier, 0, 11);
  lose(tier, 1, 15);
  CHECK(taken(tier, 1).front() == 0);
  tier.give_back(0);
  std::vector<std::uint32_t> slots(2);
  CHECK(tier.take(slots) == 15);
  CHECK((slots == std::vector<std::uint32_t>{1, 0}));
}

void kept_blocks_yield_in_order() {
  TierSlots tier(Tier::kNvme, 6, "lru", 7);
  fill(tier);
  tier.keep(0, 5.0, 10);
  tier.keep(1, 9.0, 0);
  tier.keep(2, 4.0, 10);
  tier.keep(3, 1.0, 100);
  tier.keep(4, 0.0, 0);
  tier.pin(4);
  CHECK(tier.counts().evictable == 1 && tier.room() == 4);
  std::vector<std::uint32_t> victims(5);
  CHECK(!tier.victims(victims));
  victims.resize(4);
  CHECK(tier.victims(victims));
  CHECK((victims == std::vector<std::uint32_t>{5, 1, 2, 0}));  // what is not kept, then lowest priority, then earliest
  for (const std::uint32_t slot : victims) {
    lose(tier, slot, 1);
  }
  CHECK(tier.room() == 4);  // all free: 3 is never given up and 4 is pinned
  CHECK(tier.expire(0.5) == 1 && tier.counts().evictable == 0);
  tier.unpin(4);
  CHECK(tier.expire(1.0) == 1 && tier.counts().evictable == 2);
}

void keeping_again_takes_the_later_and_the_higher() {
  TierSlots tier(Tier::kNvme, 2, "lru", 7);
  fill(tier);
  tier.keep(0, 5.0, 10);
  tier.keep(0, 3.0, 20);
  tier.keep(1, 4.0, 15);
  CHECK(tier.expire(4.5) == 1 && tier.counts().evictable == 1);
  CHECK(tier.slot(0).priority == 20 && tier.slot(0).kept_until_s == 5.0);
}

void what_is_kept_until_it_was_read_is_kept_no_more_after() {
  TierSlots tier(Tier::kHost, 4, "lru", 7);
  fill(tier);
  tier.keep(0, 5.0, 10, true);
  tier.keep(1, 5.0, 10);
  tier.keep(2, 5.0, 10, true);
  tier.keep(2, 6.0, 10);  // somebody keeps it for its own sake
  CHECK(tier.kept_count() == 3 && tier.counts().evictable == 1 && tier.room() == 4);
  for (const std::uint32_t slot : {0U, 1U, 2U}) {
    tier.pin(slot);
    tier.pin(slot);
  }
  for (int reader = 0; reader < 2; ++reader) {
    for (const std::uint32_t slot : {0U, 1U, 2U}) {
      const bool is_last = tier.discount_pin(slot);
      tier.end_reading(slot);
      if (is_last) {
        tier.settle_unpinned(slot);
      }
    }
    CHECK(tier.kept_count() == 2);
    CHECK(tier.room() == (reader == 0 ? 1 : 4));
  }
  CHECK(tier.counts().evictable == 2);
  CHECK(tier.expire(5.0) == 1 && tier.expire(6.0) == 1 && tier.counts().evictable == 4);
}

void arriving_blocks_are_not_held() {
  TierSlots tier(Tier::kHost, 3, "s3fifo", 7);
  const auto slots = taken(tier, 2);
  tier.receive(slots[0], block(1).data());
  CHECK(tier.is_arriving(block(1).data()) && !tier.is_arriving(block(2).data()));
  CHECK(tier.find(block(1).data()) == kNoSlot && tier.counts().allocated == 2);
  // Created here while its copy is on its way
  CHECK(tier.index(slots[1], tier.tag(block(1).data()), block(1).data()) == slots[1]);
  tier.mark(slots[1], SlotState::kCreating);
  gain(tier, slots[1], block(1), 0, true);
  tier.end_receiving(slots[0]);
  tier.give_back(slots[0]);
  CHECK(!tier.is_arriving(block(1).data()) && tier.find(block(1).data()) == slots[1]);
}

void recovered_slots_are_reserved() {
  TierSlots tier(Tier::kNvme, 8, "lru", 7);
  const std::vector<std::uint32_t> found{4, 1};
  tier.reserve(found);
  CHECK(tier.counts().allocated == 2 && tier.free_count() == 6);
  CHECK((taken(tier, 6) == std::vector<std::uint32_t>{0, 2, 3, 5, 6, 7}));
}

void held_slots_are_found_in_order() {
  TierSlots tier(Tier::kHbm, 192, "lru", 7);
  CHECK(tier.next_held(0) == kNoSlot && tier.next_held(192) == kNoSlot);
  const auto slots = taken(tier, 192);
  for (const std::uint32_t slot : {0U, 63U, 64U, 191U}) {
    gain(tier, slot, block(1 + slot));
  }
  CHECK(tier.next_held(0) == 0 && tier.next_held(1) == 63 && tier.next_held(64) == 64 && tier.next_held(65) == 191);
  CHECK(tier.next_held(191) == 191 && tier.next_held(192) == kNoSlot);
  lose(tier, 63, 5);
  CHECK(tier.next_held(1) == 64);
  tier.withdraw_unheld(9);
  CHECK(tier.slot(63).withdrawn_before == 9 && tier.slot(5).withdrawn_before == 9 &&
        tier.slot(64).withdrawn_before == 0);
}

void an_epoch_begins_in_place() {
  TierSlots tier(Tier::kNvme, 4, "lru", 7);
  fill(tier);
  tier.pin(1);
  tier.clear();
  CHECK(tier.count() == 0 && tier.next_held(0) == kNoSlot && tier.find_slot(1) == kNoSlot);
  CHECK(tier.find(block(2).data()) == 1);
  for (const std::uint32_t slot : {1U, 0U, 2U, 3U}) {
    tier.insert(block(static_cast<std::uint8_t>(slot + 1)).data(), 0, 0, slot, 1);
  }
  CHECK((tier.held() == std::vector<std::uint32_t>{1, 0, 2, 3}) && tier.counts().allocated == 0);
  CHECK(tier.slot(1).pins == 1 && tier.counts().evictable == 3 && tier.free_count() == 0);
}

// Slots of namespaces 0 and 1 in turn; what is beyond the table belongs to the last share.
void who_is_farthest_above_its_share_gives_up_first() {
  const std::vector<Share> shares = {{.tenant = "a", .weight = 3}, {.tenant = "*"}};
  const std::vector<std::uint32_t> share_of = {0};
  for (const char* const eviction : {"lru", "s3fifo"}) {
    TierSlots tier(Tier::kNvme, 8, eviction, 7, shares, &share_of);
    for (const std::uint32_t slot : taken(tier, 8)) {
      gain(tier, slot, block(static_cast<std::uint8_t>(slot + 1)), slot % 2);
    }
    CHECK(tier.counts_of(0).held == 4 && tier.counts_of(1).evictable == 4);
    std::vector<std::uint32_t> slots(4);
    CHECK(tier.victims(slots));
    CHECK((slots == std::vector<std::uint32_t>{1, 3, 5, 0}));  // 4, 3, 2 for a weight of 1, then 4 for one of 3
    for (const std::uint32_t slot : slots) {
      lose(tier, slot, 1);
    }
    CHECK(tier.counts_of(0).held == 3 && tier.counts_of(1).held == 1);
    const auto one = std::span(slots).first(1);
    tier.victims_of(1, one);
    CHECK(one[0] == 7);
    lose(tier, 7, 2);
    tier.pin(2);
    CHECK(tier.counts_of(0).evictable == 2 && tier.counts().evictable == 2);
    CHECK(!tier.victims(std::span(slots).first(3)));
  }
}

}  // namespace

int main() {
  return tests::run(
      {{"slots are taken in the order they became free", slots_go_snapshot},
       {"a slot withdrawn while pinned is free after its last unpin", pinned_slots_wait_for_their_last_unpin},
       {"a slot withdrawn while pinned waits for that withdrawal", a_slot_withdrawn_while_pinned_waits_for_that},
       {"slots wait for the last of their withdrawals",
        slots_wait_for_the_last_withdrawal_in_whatever_order_they_are_taken},
       {"kept blocks yield by priority, time and slot", kept_blocks_yield_in_order},
       {"keeping again takes the later time and the higher priority", keeping_again_takes_the_later_and_the_higher},
       {"what is kept until it was read is kept no more after", what_is_kept_until_it_was_read_is_kept_no_more_after},
       {"a block on its way is not held", arriving_blocks_are_not_held},
       {"an epoch begins in place", an_epoch_begins_in_place},
       {"held slots are found in order", held_slots_are_found_in_order},
       {"who is farthest above its share gives up first", who_is_farthest_above_its_share_gives_up_first},
       {"what a start finds in use is not given out", recovered_slots_are_reserved}});
}
