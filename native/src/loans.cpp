#include "kvbm/loans.hpp"

#include <algorithm>
#include <mutex>

namespace kvbm {
void Loan::cut(std::size_t depth) noexcept {
  if (lender_ == nullptr || depth >= slots_.size()) {
    return;
  }
  lender_->give_back(std::span(tiers_).subspan(depth), std::span(slots_).subspan(depth), is_read_);
  tiers_.resize(depth);
  slots_.resize(depth);
}

std::optional<Loan> Lender::lend(const NamespaceId& namespace_id, Bytes hashes, Tier coldest) {
  // A longer run could never be lent; its reader asks on
  hashes = blocks_of(hashes, 0, std::min(hash_count(hashes), most_blocks_));
  Loan loan(*this);
  loan.tiers_.resize(hash_count(hashes));  // what is allocated is allocated without the lock
  loan.slots_.resize(hash_count(hashes));
  std::size_t depth = 0;
  try {
    const std::lock_guard held(lock_);
    const Match found = ledger_.lend(namespace_id, hashes, coldest);
    std::ranges::copy(found.tiers, loan.tiers_.begin());
    std::ranges::copy(found.slots, reinterpret_cast<std::uint8_t*>(loan.slots_.data()));
    loan.epoch_ = ledger_.epoch();
    depth = found.depth;
    const std::size_t lent = lent_blocks_.load(std::memory_order_relaxed);
    if (depth > most_blocks_ - lent) {
      unpin(std::span(loan.tiers_).first(depth), std::span(loan.slots_).first(depth), false);
      loan.lender_ = nullptr;
      return std::nullopt;
    }
    lent_blocks_.store(lent + depth, std::memory_order_relaxed);
  } catch (...) {
    loan.lender_ = nullptr;  // it has no pins
    throw;
  }
  loan.tiers_.resize(depth);
  loan.slots_.resize(depth);
  return loan;
}

std::uint64_t Lender::epoch() const {
  const std::lock_guard held(lock_);
  return ledger_.epoch();
}

void Lender::give_back(std::span<const std::uint8_t> tiers, std::span<const std::uint32_t> slots, bool read) noexcept {
  const std::lock_guard held(lock_);
  try {
    unpin(tiers, slots, read);
  } catch (...) {  // nothing a destructor could do
    refused_.fetch_add(slots.size(), std::memory_order_relaxed);
  }
  lent_blocks_.fetch_sub(slots.size(), std::memory_order_relaxed);
}

// A stretch of one tier at a time, the deepest first, as `unpin` does within a stretch. A run rarely has more than two.
void Lender::unpin(std::span<const std::uint8_t> tiers, std::span<const std::uint32_t> slots, bool read) {
  for (std::size_t end = tiers.size(), begin = end; end > 0; end = begin) {
    while (begin > 0 && tiers[begin - 1] == tiers[end - 1]) {
      --begin;
    }
    ledger_.unpin(static_cast<Tier>(tiers[end - 1]), packed(slots.subspan(begin, end - begin)), read);
  }
}

}  // namespace kvbm
