#include "kvbm/lease_table.hpp"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "check.hpp"
#include "kvbm/ledger_lock.hpp"
#include "lent_blocks.hpp"

namespace kvbm::tests {
namespace {

using std::chrono::milliseconds;

void a_lease_ends_once() {
  LentBlocks blocks(8, 64);
  const auto hashes = blocks.fill(0, 4);
  Lender lender(blocks.ledger, blocks.lock, 16);
  std::atomic<std::uint32_t> counter{0};
  LeaseTable table(counter);
  const SteadyTime later = std::chrono::steady_clock::now() + std::chrono::hours(1);
  const std::uint64_t id = table.add(std::move(*lender.lend(kSpace, hashes, Tier::kNvme)), later);
  CHECK(id != 0 && id >> 32 == 1 && lender.lent_blocks() == 4 && blocks.pinned() == 4);
  CHECK(!table.end(id + 1));
  CHECK(table.end(id)->depth() == 4);
  CHECK(blocks.pinned() == 0 && lender.lent_blocks() == 0);
  CHECK(!table.end(id) && table.size() == 0 && !table.next_end());
}

void time_ends_leases_in_its_order() {
  LentBlocks blocks(8, 64);
  const auto hashes = blocks.fill(0, 4);
  Lender lender(blocks.ledger, blocks.lock, 16);
  std::atomic<std::uint32_t> counter{7};
  LeaseTable table(counter);
  const SteadyTime now = std::chrono::steady_clock::now();
  const auto first = table.add(std::move(*lender.lend(kSpace, hashes, Tier::kNvme)), SteadyTime::max());
  table.add(std::move(*lender.lend(kSpace, hashes, Tier::kNvme)), now + milliseconds(20));
  table.set_end(first, now + milliseconds(10));
  CHECK(table.next_end() == now + milliseconds(10) && table.expire(now) == 0);
  CHECK(table.expire(now + milliseconds(10)) == 1 && !table.end(first) && blocks.pinned() == 4);
  CHECK(table.expire(now + milliseconds(30)) == 1 && blocks.pinned() == 0 && lender.lent_blocks() == 0);
}

void what_is_left_ends_with_the_table() {
  LentBlocks blocks(8, 64);
  const auto hashes = blocks.fill(0, 4);
  Lender lender(blocks.ledger, blocks.lock, 16);
  std::atomic<std::uint32_t> counter{0xFFFFFFFF};
  {
    LeaseTable table(counter);
    table.add(std::move(*lender.lend(kSpace, hashes, Tier::kNvme)), SteadyTime::max());
    table.add(std::move(*lender.lend(kSpace, hashes, Tier::kNvme)), SteadyTime::max());
    CHECK(table.size() == 2 && lender.lent_blocks() == 8);
  }
  CHECK(blocks.pinned() == 0 && lender.lent_blocks() == 0 && lender.refused() == 0);
}

void no_more_is_lent_than_may_be() {
  LentBlocks blocks(8, 64);
  const auto hashes = blocks.fill(0, 6);
  Lender lender(blocks.ledger, blocks.lock, 5);
  const auto most = lender.lend(kSpace, hashes, Tier::kNvme);  // of a longer run as much as may ever be lent
  CHECK(most->depth() == 5 && blocks.pinned() == 5 && lender.lent_blocks() == 5);
  CHECK(!lender.lend(kSpace, hashes, Tier::kNvme) && blocks.pinned() == 5 && lender.lent_blocks() == 5);
  CHECK(!lender.lend(kSpace, Bytes(hashes).last(kHashBytes), Tier::kNvme) && blocks.pinned() == 5);
}

void a_run_is_cut_where_it_is_asked_to_be() {
  LentBlocks blocks(8, 64);
  const auto hashes = blocks.fill(0, 6);
  Lender lender(blocks.ledger, blocks.lock, 100);
  auto loan = lender.lend(kSpace, hashes, Tier::kNvme);
  loan->cut(4);
  CHECK(loan->depth() == 4 && blocks.pinned() == 4 && lender.lent_blocks() == 4);
  loan->cut(9);
  CHECK(loan->depth() == 4);
  const auto moved = std::move(*loan);
  loan.reset();
  CHECK(blocks.pinned() == 4 && moved.depth() == 4);
}

void a_slot_that_is_lent_stays_after_its_eviction() {
  LentBlocks blocks(2, 64);
  const auto hashes = blocks.fill(0, 2);
  Lender lender(blocks.ledger, blocks.lock, 100);
  {
    const auto loan = lender.lend(kSpace, hashes, Tier::kNvme);
    blocks.evict(hashes);
    CHECK(!blocks.ledger.allocate(Tier::kHost, 1));
    CHECK(lender.lend(kSpace, hashes, Tier::kNvme)->depth() == 0);
  }
  CHECK(blocks.ledger.allocate(Tier::kHost, 2));
}

void blocks_of_another_namespace_are_not_lent() {
  LentBlocks blocks(8, 64);
  const auto hashes = blocks.fill(0, 6);
  Lender lender(blocks.ledger, blocks.lock, 100);
  const NamespaceId other{9};
  CHECK(lender.lend(other, hashes, Tier::kNvme)->depth() == 0 && lender.lent_blocks() == 0);
}

void threads_lend_and_evict_under_one_lock() {
  LentBlocks blocks(32, 64);
  const auto hashes = blocks.fill(0, 16);
  Lender lender(blocks.ledger, blocks.lock, 64);
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int reader = 0; reader < 3; ++reader) {
    threads.emplace_back([&] {
      std::atomic<std::uint32_t> counter{0};
      LeaseTable table(counter);
      while (!is_over) {
        auto loan = lender.lend(kSpace, hashes, Tier::kNvme);
        if (loan && loan->depth() > 0) {
          table.add(std::move(*loan), std::chrono::steady_clock::now());
        }
        table.expire(std::chrono::steady_clock::now());
      }
    });
  }
  for (int turn = 0; turn < 300; ++turn) {
    blocks.evict(hashes);
    blocks.fill(0, 16);
  }
  is_over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(lender.lent_blocks() == 0 && lender.refused() == 0 && blocks.pinned() == 0);
}

// -- the lock ---------------------------------------------------------------------------------------------------------

void one_thread_has_the_lock_at_a_time() {
  LedgerLock lock;
  std::uint64_t count = 0;
  std::vector<std::thread> threads;
  for (int at = 0; at < 4; ++at) {
    threads.emplace_back([&, at] {
      for (int turn = 0; turn < 20'000; ++turn) {
        if (at % 2 == 0) {
          lock.lock();
        } else {
          while (!lock.try_lock()) {
            CHECK(lock.wait_free(-1) != LedgerLock::Wait::kTimeout);
          }
        }
        ++count;
        lock.unlock();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(count == 80'000 && !lock.is_locked());
}

void who_waits_in_vain_is_told_and_a_fork_frees_it() {
  LedgerLock lock;
  lock.lock();
  CHECK(!lock.try_lock() && lock.is_locked());
  CHECK(lock.wait_free(1'000'000) == LedgerLock::Wait::kTimeout);
  lock.reinitialise();
  CHECK(lock.wait_free(0) == LedgerLock::Wait::kFree && lock.try_lock());
}

}  // namespace
}  // namespace kvbm::tests

int main() {
  using namespace kvbm::tests;
  return run({
      {"a lease ends once", a_lease_ends_once},
      {"time ends leases in its order", time_ends_leases_in_its_order},
      {"what is left ends with the table", what_is_left_ends_with_the_table},
      {"no more is lent than may be", no_more_is_lent_than_may_be},
      {"a run is cut where it is asked to be", a_run_is_cut_where_it_is_asked_to_be},
      {"a slot that is lent stays after its eviction", a_slot_that_is_lent_stays_after_its_eviction},
      {"blocks of another namespace are not lent", blocks_of_another_namespace_are_not_lent},
      {"threads lend and evict under one lock", threads_lend_and_evict_under_one_lock},
      {"one thread has the lock at a time", one_thread_has_the_lock_at_a_time},
      {"who waits in vain is told, and a fork frees it", who_waits_in_vain_is_told_and_a_fork_frees_it},
  });
}
