// ForeignLedger: what is recorded of its changes, and the stream of that.
#include <algorithm>
#include <cstring>

#include "kvbm/error.hpp"
#include "kvbm/foreign_ledger.hpp"
#include "kvbm/recorder.hpp"
#include "kvbm/runs.hpp"

namespace kvbm {
namespace {

constexpr std::size_t kSpareFrames = 16;        // kept for the next events
constexpr std::uint32_t kListLooks = 1U << 14;  // blocks that a step of a snapshot looks at, at most

SequenceHash hash_of(const std::uint8_t* bytes) noexcept {
  SequenceHash hash;
  std::memcpy(hash.data(), bytes, kHashBytes);
  return hash;
}

}  // namespace

void ForeignLedger::record(const Event& event, std::uint32_t namespace_index, std::size_t namespaces) {
  waiting_.add(event, event_bytes(event), namespace_index, applied_, namespaces);
  ++applied_;
  waiting_.set_digest(digest_);
}

// Has digest and counts follow. Nobody counts what lies in a cluster pool.
void ForeignLedger::count(Tier tier, Bytes hashes, bool is_gain) noexcept {
  if (tier == Tier::kObject) {
    return;
  }
  const std::size_t blocks = hashes.size() / kHashBytes;
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < blocks; ++at) {
    sum += residency_mix(tier, hash_at(hashes, at));
  }
  digest_ = is_gain ? digest_ + sum : digest_ - sum;
  std::size_t& held = held_[static_cast<std::size_t>(tier)];
  held = is_gain ? held + blocks : held - blocks;
}

// -- what changes -----------------------------------------------------------------------------------------------------

bool ForeignLedger::is_shared(const std::uint8_t* hash) const noexcept {
  const std::uint32_t position = table_.find_hash(hash);
  return position != ForeignTable::kNone && table_[position].is_shared();
}

// Records a gain of at most kMaxRunBlocks blocks: record(hashes, at) does, of those from the `at`-th on. What a tier
// has already by another key of the engine's is not recorded; the others are then recorded one by one, as by
// HeldLedger.
template <class Record>
void ForeignLedger::record_gain(Tier tier, Bytes hashes, bool has_shared, Record&& record) {
  const std::size_t blocks = hashes.size() / kHashBytes;
  const bool counts = tier != Tier::kObject;  // claims of a cluster pool are not counted
  bool is_twice = has_shared && distinct_.of(hashes).size() != hashes.size();
  for (std::size_t at = 0; has_shared && counts && !is_twice && at < blocks; ++at) {
    const std::uint8_t* const hash = hash_at(hashes, at);
    is_twice = is_shared(hash) && shared_.contains({tier, hash_of(hash)});
  }
  const auto is_new = [&](const std::uint8_t* hash) {
    return !counts || !is_shared(hash) || ++shared_[{tier, hash_of(hash)}] == 1;
  };
  if (!is_twice) {
    for (std::size_t at = 0; has_shared && at < blocks; ++at) {
      is_new(hash_at(hashes, at));
    }
    count(tier, hashes, true);
    record(hashes, 0);
    return;
  }
  for (std::size_t at = 0; at < blocks; ++at) {
    if (is_new(hash_at(hashes, at))) {
      count(tier, blocks_of(hashes, at, at + 1), true);
      record(blocks_of(hashes, at, at + 1), at);
    }
  }
}

void ForeignLedger::gained(const Home& home, Tier tier, const SequenceHash& parent, std::uint32_t start, Bytes hashes,
                           bool has_shared) {
  const std::size_t blocks = hashes.size() / kHashBytes;
  for (std::size_t begin = 0; begin < blocks; begin += kMaxRunBlocks) {
    const Bytes part = blocks_of(hashes, begin, std::min(blocks, begin + kMaxRunBlocks));
    record_gain(tier, part, has_shared, [&](Bytes run, std::size_t at) {
      const std::size_t first = begin + at;
      record(BlocksCreated{.namespace_id = home.id,
                           .tier = tier,
                           .start = static_cast<std::uint32_t>(start + first),
                           .parent = first > 0 ? hash_of(hash_at(hashes, first - 1)) : parent,
                           .hashes = run,
                           .slots = {}},
             home.index);
    });
  }
}

void ForeignLedger::arrived(const Home& home, Tier tier, Bytes hashes, bool has_shared) {
  const std::size_t blocks = hashes.size() / kHashBytes;
  for (std::size_t begin = 0; begin < blocks; begin += kMaxRunBlocks) {
    const Bytes part = blocks_of(hashes, begin, std::min(blocks, begin + kMaxRunBlocks));
    record_gain(tier, part, has_shared, [&](Bytes run, std::size_t) {
      record(BlocksMigrated{.namespace_id = home.id,
                            .source = std::string_view(instance_),
                            .target = tier,
                            .kept = true,
                            .cause = MigrateCause::kOffload,
                            .hashes = run,
                            .slots = {}},
             home.index);
    });
  }
}

void ForeignLedger::lost(const Home& home, Tier tier, EvictReason reason, Bytes hashes, bool has_shared) {
  const std::size_t blocks = hashes.size() / kHashBytes;
  for (std::size_t begin = 0; begin < blocks; begin += kMaxRunBlocks) {
    Bytes run = blocks_of(hashes, begin, std::min(blocks, begin + kMaxRunBlocks));
    if (tier == Tier::kObject) {
      run = distinct_.of(run);
    } else if (has_shared) {
      run = without_others(tier, run);
    }
    if (!run.empty()) {
      count(tier, run, false);
      record(BlocksEvicted{.namespace_id = home.id, .tier = tier, .reason = reason, .hashes = run}, home.index);
    }
  }
}

// What of a run no other block tells of any more. Valid until the next call.
Bytes ForeignLedger::without_others(Tier tier, Bytes hashes) {
  kept_.clear();
  for (std::size_t at = 0; at < hashes.size() / kHashBytes; ++at) {
    const std::uint8_t* const hash = hash_at(hashes, at);
    const auto found = shared_.find({tier, hash_of(hash)});
    if (found == shared_.end() || --found->second == 0) {
      append(kept_, hash);
      if (found != shared_.end()) {
        shared_.erase(found);
      }
    }
  }
  return kept_;
}

// -- the stream -------------------------------------------------------------------------------------------------------

void ForeignLedger::begin(std::uint64_t epoch, const InstanceStarted& event, std::size_t namespaces) {
  waiting_.clear();
  epoch_ = epoch;
  applied_ = digest_ = 0;
  stopped_ = false;
  snapshot_ = 1;
  listing_.reset();
  held_.fill(0);
  record(event, 0, namespaces);
  for (const Tier tier : tiers_) {
    std::uint32_t at = 0;
    const std::uint32_t listed = list(tier, at, table_.size(), true);
    end_listing(tier, listed + list_shared(tier, true));
  }
}

void ForeignLedger::stop(StopReason reason) {
  check_open();
  record(InstanceStopped{.reason = reason}, 0);
  stopped_ = true;
  listing_.reset();
}

void ForeignLedger::clear_waiting() noexcept {
  waiting_.clear();
  waiting_.shrink(kSpareFrames);
}

bool ForeignLedger::begin_snapshot() noexcept {
  if (listing_ || stopped_ || tiers_.empty()) {
    return false;
  }
  ++snapshot_;
  listing_ = Listing{};
  return true;
}

bool ForeignLedger::step_snapshot(std::size_t limit) {
  if (!listing_) {
    return false;
  }
  const Tier tier = tiers_[listing_->tier];
  listing_->listed += list(tier, listing_->at, std::clamp(limit, std::size_t{1}, kMaxRunBlocks), false);
  if (listing_->at >= table_.end()) {
    end_listing(tier, listing_->listed + list_shared(tier, false));
    listing_ = Listing{.tier = listing_->tier + 1};
    if (listing_->tier == tiers_.size()) {
      listing_.reset();
    }
  }
  return listing_.has_value();
}

// Lists blocks of a tier from a position on, but for the shared ones, which may come to be held by a block that was
// passed. is_first: of an epoch, so nothing counts as held before, and all is looked at.
std::uint32_t ForeignLedger::list(Tier tier, std::uint32_t& at, std::size_t limit, bool is_first) {
  const std::uint32_t end = is_first ? table_.end() : std::min(table_.end(), at + std::min(kListLooks, ~at));
  std::uint32_t listed = 0;
  run_count_ = 0;
  for (; at < end && listed < limit; ++at) {
    const ForeignBlock& block = table_[at];
    if (!block.is_remembered() || block.is_shared() || !holds(block, tier)) {
      continue;
    }
    Run& run = run_of(block.home);
    gather(run, block);
    ++listed;
    if (run.hashes.size() == kMaxRunBlocks * kHashBytes) {
      list_run(tier, run, is_first);
    }
  }
  list_runs(tier, is_first);
  return listed;
}

// Lists the shared blocks of a tier.
std::uint32_t ForeignLedger::list_shared(Tier tier, bool is_first) {
  std::uint32_t listed = 0;
  run_count_ = 0;
  for (const auto& [one, times] : shared_) {
    if (one.tier == tier) {
      Run& run = run_of(table_[table_.find_hash(one.hash.data())].home);
      append(run.hashes, one.hash.data());
      ++listed;
      if (run.hashes.size() == kMaxRunBlocks * kHashBytes) {
        list_run(tier, run, is_first);
      }
    }
  }
  list_runs(tier, is_first);
  return listed;
}

void ForeignLedger::list_runs(Tier tier, bool is_first) {
  for (Run& run : std::span(runs_).first(run_count_)) {
    if (!run.hashes.empty()) {
      list_run(tier, run, is_first);
    }
  }
}

void ForeignLedger::list_run(Tier tier, Run& run, bool is_first) {
  if (is_first) {
    count(tier, run.hashes, true);
  }
  const Home& home = homes_[run.home];
  record(
      ResidenciesListed{
          .namespace_id = home.id, .tier = tier, .snapshot = snapshot_, .hashes = run.hashes, .slots = {}},
      home.index);
  run.hashes.clear();
}

void ForeignLedger::end_listing(Tier tier, std::uint32_t count) {
  record(SnapshotEnded{.tier = tier, .snapshot = snapshot_, .count = count}, 0);
}

std::vector<std::uint8_t> ForeignLedger::hashes(Tier tier) const {
  std::vector<std::uint8_t> found;
  for (std::uint32_t at = 0; at < table_.end(); ++at) {
    const ForeignBlock& block = table_[at];
    if (block.is_remembered() && !block.is_shared() && holds(block, tier)) {
      append(found, block.hash.data());
    }
  }
  for (const auto& [one, times] : shared_) {
    if (one.tier == tier) {
      append(found, one.hash.data());
    }
  }
  return found;
}

}  // namespace kvbm
