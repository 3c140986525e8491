// LeaseTable: what one connection has borrowed, by lease. A lease ends by its reader's word, by time, or with the
// table; its blocks are given back then, once. How much is lent at a time is bounded by the Lender. Life: that of the
// connection. Its thread only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "kvbm/loans.hpp"

namespace kvbm {

using SteadyTime = std::chrono::steady_clock::time_point;

class LeaseTable {
 public:
  // counter: of leases, shared by the tables of a server.
  explicit LeaseTable(std::atomic<std::uint32_t>& counter) noexcept : counter_(counter) {}

  // A lease of blocks until a time. Returns its id, which is never 0: the epoch, and in its low 32 bits a number of its
  // own.
  std::uint64_t add(Loan loan, SteadyTime ends) {
    std::uint64_t id = 0;
    while (id == 0 || leases_.contains(id)) {
      id = loan.epoch() << 32 | counter_.fetch_add(1, std::memory_order_relaxed);
    }
    const auto timed = by_time_.emplace(ends, id).first;
    try {
      leases_.emplace(id, Lease{std::move(loan), ends});
    } catch (...) {
      by_time_.erase(timed);
      throw;
    }
    return id;
  }

  // A lease ends at another time.
  void set_end(std::uint64_t id, SteadyTime ends) {
    const auto found = leases_.find(id);
    if (found != leases_.end()) {
      by_time_.emplace(ends, id);
      by_time_.erase({found->second.ends, id});
      found->second.ends = ends;
    }
  }

  // Ends a lease. Its blocks, pinned for as long as the result lives; nullopt: there is none such, or not any more.
  std::optional<Loan> end(std::uint64_t id) noexcept {
    const auto found = leases_.find(id);
    if (found == leases_.end()) {
      return std::nullopt;
    }
    std::optional<Loan> loan(std::move(found->second.loan));
    by_time_.erase({found->second.ends, id});
    leases_.erase(found);
    return loan;
  }

  // Ends those whose time has come. Returns how many.
  std::size_t expire(SteadyTime now) noexcept {
    std::size_t count = 0;
    for (; !by_time_.empty() && by_time_.begin()->first <= now; ++count) {
      end(by_time_.begin()->second);
    }
    return count;
  }

  // When the next one ends by time.
  std::optional<SteadyTime> next_end() const noexcept {
    return by_time_.empty() ? std::nullopt : std::optional(by_time_.begin()->first);
  }
  std::size_t size() const noexcept { return leases_.size(); }

 private:
  struct Lease {
    Loan loan;        // its blocks
    SteadyTime ends;  // by itself
  };

  std::atomic<std::uint32_t>& counter_;                     // next number
  std::map<std::uint64_t, Lease> leases_;                   // by id
  std::set<std::pair<SteadyTime, std::uint64_t>> by_time_;  // (ends, id), the first to end first
};

}  // namespace kvbm
