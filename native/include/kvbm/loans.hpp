// Blocks lent to another instance: a Lender takes pins from a ledger, a Loan gives them back, once.
//
// Life: a Lender is made over a ledger and its lock, which outlive it, and outlives its loans. Threads: a Lender's any;
// a Loan's its owner's. None of them needs the GIL.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/ledger.hpp"
#include "kvbm/ledger_lock.hpp"

namespace kvbm {

class Lender;

// A run of pinned blocks. Ends with the object.
class Loan {
 public:
  Loan(Loan&& other) noexcept
      : lender_(std::exchange(other.lender_, nullptr)),
        tiers_(std::move(other.tiers_)),
        slots_(std::move(other.slots_)),
        epoch_(other.epoch_),
        is_read_(other.is_read_) {}
  Loan& operator=(Loan&& other) noexcept {
    if (this != &other) {
      cut(0);
      lender_ = std::exchange(other.lender_, nullptr);
      tiers_ = std::move(other.tiers_);
      slots_ = std::move(other.slots_);
      epoch_ = other.epoch_;
      is_read_ = other.is_read_;
    }
    return *this;
  }
  ~Loan() { cut(0); }

  std::size_t depth() const noexcept { return slots_.size(); }
  std::span<const std::uint8_t> tiers() const noexcept { return tiers_; }
  std::span<const std::uint32_t> slots() const noexcept { return slots_; }
  Tier tier(std::size_t block) const noexcept { return static_cast<Tier>(tiers_[block]); }
  // Of the ledger, when it was made.
  std::uint64_t epoch() const noexcept { return epoch_; }

  // Gives back the blocks from one on.
  void cut(std::size_t depth) noexcept;
  // Its reader has had all of it, so what is kept until it was read is kept no more once this ends.
  void mark_read() noexcept { is_read_ = true; }

 private:
  friend class Lender;
  explicit Loan(Lender& lender) noexcept : lender_(&lender) {}

  Lender* lender_;                    // whose; nullptr: moved from
  std::vector<std::uint8_t> tiers_;   // of each block
  std::vector<std::uint32_t> slots_;  // of each block
  std::uint64_t epoch_ = 0;           // see above
  bool is_read_ = false;              // by its reader, to the end
};

class Lender {
 public:
  // most_blocks: lent at a time.
  Lender(Ledger& ledger, LedgerLock& lock, std::size_t most_blocks) noexcept
      : ledger_(ledger), lock_(lock), most_blocks_(most_blocks) {}
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;

  // The longest run, as Ledger::lend, of at most most_blocks. nullopt: so many are lent now that these may not be too.
  // Throws std::bad_alloc.
  std::optional<Loan> lend(const NamespaceId& namespace_id, Bytes hashes, Tier coldest);

  std::uint64_t epoch() const;
  std::size_t lent_blocks() const noexcept { return lent_blocks_.load(std::memory_order_relaxed); }
  // Pins that the ledger would not take back, which is a bug.
  std::uint64_t refused() const noexcept { return refused_.load(std::memory_order_relaxed); }

 private:
  friend class Loan;
  void give_back(std::span<const std::uint8_t> tiers, std::span<const std::uint32_t> slots, bool read) noexcept;
  void unpin(std::span<const std::uint8_t> tiers, std::span<const std::uint32_t> slots, bool read);  // under the lock

  Ledger& ledger_;                           // under lock_
  LedgerLock& lock_;                         // that of its owner
  const std::size_t most_blocks_;            // see above
  std::atomic<std::size_t> lent_blocks_{0};  // those of loans; changed under the lock
  std::atomic<std::uint64_t> refused_{0};    // see above
};

}  // namespace kvbm
