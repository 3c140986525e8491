#include "kvbm/foreign_ledger.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "kvbm/hashing.hpp"
#include "kvbm/runs.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

constexpr std::uint32_t kMostStart = 0xFFFFFFFF;
constexpr std::uint16_t kMostCopies = 0xFFFF;
constexpr std::size_t kAhead = 16;  // lines of memory that are on their way
constexpr std::size_t kMostScratch = std::size_t{1} << 16;
constexpr std::array<Tier, 3> kOwn = {Tier::kHbm, Tier::kHost, Tier::kNvme};  // the engine's

}  // namespace

bool holds(const ForeignBlock& block, Tier tier) noexcept {
  const std::uint8_t bit = colder_bit(tier);
  return bit != 0 ? (block.marks & bit) != 0 : block.copies != 0;
}

ForeignLedger::ForeignLedger(std::string instance, const ForeignLimits& limits, std::vector<Tier> tiers,
                             std::uint64_t seed)
    : instance_(std::move(instance)), limits_(limits), tiers_(std::move(tiers)), table_(seed), distinct_(seed) {}

void ForeignLedger::name(const NamespaceId& id, const SequenceHash& root, std::uint8_t group,
                         std::uint32_t block_tokens, bool is_plain) {
  table_.set_group(static_cast<std::uint8_t>(homes_.size()), group);
  homes_.push_back({.id = id,
                    .root = root,
                    .index = namespaces_.intern(id),
                    .block_tokens = block_tokens,
                    .group = group,
                    .is_plain = is_plain});
}

void ForeignLedger::check_open() const {
  if (epoch_ == 0) {
    refuse("not-started", "an engine's events before InstanceStarted");
  }
  if (stopped_) {
    refuse("already-stopped", "an engine's events after InstanceStopped");
  }
}

std::optional<std::uint8_t> ForeignLedger::plain_home(std::uint8_t group, std::uint32_t block_tokens) const noexcept {
  for (std::size_t home = 0; home < homes_.size(); ++home) {
    const Home& one = homes_[home];
    if (one.is_plain && one.group == group && one.block_tokens == block_tokens) {
      return static_cast<std::uint8_t>(home);
    }
  }
  return std::nullopt;
}

bool ForeignLedger::knows_homes() const noexcept {
  return std::ranges::all_of(message_.events(), [&](const ForeignEvent& event) {
    return event.kind != ForeignEvent::Kind::kStored || event.key_count == 0 ||
           plain_home(event.group, event.block_tokens).has_value();
  });
}

bool ForeignLedger::take(Bytes message, std::optional<std::uint64_t> rank) {
  check_open();
  const bool is_mine =
      message_.read(message) && (!rank || !message_.rank() || *rank == *message_.rank()) && knows_homes();
  for (std::size_t at = 0; is_mine && at < message_.events().size(); ++at) {
    const ForeignEvent& event = message_.events()[at];
    const std::span<const ForeignKey> keys = message_.keys(event);
    switch (event.kind) {
      case ForeignEvent::Kind::kStored:
        counts_.stored += keys.size();
        if (!keys.empty()) {
          store({.home = *plain_home(event.group, event.block_tokens),
                 .tier = event.tier,
                 .keys = keys,
                 .parent = event.has_parent ? &event.parent : nullptr,
                 .tokens = message_.tokens(event),
                 .width = event.block_tokens,
                 .extra_keys = {}});
        }
        break;
      case ForeignEvent::Kind::kRemoved:
        counts_.removed += keys.size();
        remove(event.tier, event.group, keys);
        break;
      case ForeignEvent::Kind::kCleared:
        clear(Tier::kHbm);
        break;
    }
  }
  message_.trim();
  return is_mine;
}

// -- stored -----------------------------------------------------------------------------------------------------------

void ForeignLedger::store(const ForeignStored& stored) {
  check_open();
  const std::size_t count = stored.keys.size();
  const bool has_tokens = stored.tokens.size() == count * stored.width;
  const std::optional<Before> found = has_tokens ? before(stored) : std::nullopt;
  if (found) {
    hashes_.resize(count * kHashBytes);
    sequence_hashes(stored.tokens, stored.width, found->start != 0 ? found->parent : homes_[stored.home].root,
                    stored.extra_keys, hashes_);
    store_chain(stored, found->parent, found->start);
  } else {
    store_known(stored);
  }
  trim();
}

// What lies before a run; none: it is not known.
std::optional<ForeignLedger::Before> ForeignLedger::before(const ForeignStored& stored) const {
  if (stored.parent == nullptr) {
    return Before{kNoParent, 0};
  }
  const std::uint8_t group = homes_[stored.home].group;
  const std::uint32_t position = table_.find(table_.place_of(*stored.parent, group), stored.parent->kind, group);
  if (position == ForeignTable::kNone) {
    return std::nullopt;
  }
  const ForeignBlock& block = table_[position];
  const std::uint32_t start = table_.start_of(block);
  if (block.home != stored.home || start + stored.keys.size() >= kMostStart) {
    return std::nullopt;
  }
  return Before{block.hash, start + 1};
}

// Blocks whose own hashes, in hashes_, are known from their tokens.
void ForeignLedger::store_chain(const ForeignStored& stored, const SequenceHash& parent, std::uint32_t start) {
  const Home& home = homes_[stored.home];
  const std::size_t count = stored.keys.size();
  look_up(stored.keys, home.group);
  std::size_t begin = 0;  // of the run that is being gathered
  bool has_shared = false;
  const auto flush = [&](std::size_t end) {
    if (begin < end) {
      SequenceHash before = parent;
      if (begin > 0) {
        std::copy_n(hash_at(hashes_, begin - 1), kHashBytes, before.begin());
      }
      gained(home, stored.tier, before, static_cast<std::uint32_t>(start + begin), blocks_of(hashes_, begin, end),
             has_shared);
    }
    has_shared = false;
  };
  for (std::size_t at = 0; at < count; ++at) {
    if (at % kAhead == 0) {
      for (std::size_t ahead = at; ahead < std::min(at + kAhead, count); ++ahead) {
        table_.prefetch(places_[ahead]);
        table_.prefetch_hash(hash_at(hashes_, ahead));
      }
    }
    const ForeignKey& key = stored.keys[at];
    const std::uint8_t* const hash = hash_at(hashes_, at);
    // A wide key that had no place may have one by now, for the event may name it twice
    if (!places_[at].is_known) {
      places_[at] = table_.place_of(key, home.group);
    }
    std::uint32_t position = table_.find(places_[at], key.kind, home.group);
    bool is_gained = false;
    if (position == ForeignTable::kNone) {
      is_gained = table_.held() < limits_.most_blocks;
      if (is_gained) {
        position = insert(key, hash, start + static_cast<std::uint32_t>(at), stored.home, stored.tier);
      } else {
        ++counts_.beyond;
      }
    } else if (!same_hash(table_[position].hash.data(), hash)) {
      ++counts_.conflict;
    } else {
      is_gained = gain(position, stored.tier);
    }
    if (is_gained) {
      has_shared = has_shared || table_[position].is_shared();
    } else {
      flush(at);
      begin = at + 1;
    }
  }
  flush(count);
}

// Blocks that only the engine's hashes tell of.
void ForeignLedger::store_known(const ForeignStored& stored) {
  const std::uint8_t group = homes_[stored.home].group;
  look_up(stored.keys, group);
  run_count_ = 0;
  for (std::size_t at = 0; at < stored.keys.size(); ++at) {
    const std::uint32_t position = table_.find(places_[at], stored.keys[at].kind, group);
    if (position == ForeignTable::kNone) {
      ++counts_.unmapped;
    } else if (gain(position, stored.tier)) {
      gather(run_of(table_[position].home), table_[position]);
    }
  }
  for (const Run& run : std::span(runs_).first(run_count_)) {
    arrived(homes_[run.home], stored.tier, run.hashes, run.has_shared);
  }
}

// Where the keys of an event are looked for, in places_.
void ForeignLedger::look_up(std::span<const ForeignKey> keys, std::uint8_t group) {
  places_.resize(keys.size());
  for (std::size_t at = 0; at < keys.size(); ++at) {
    places_[at] = table_.place_of(keys[at], group);
  }
}

std::uint32_t ForeignLedger::insert(const ForeignKey& key, const std::uint8_t* hash, std::uint32_t start,
                                    std::uint8_t home, Tier tier) {
  std::uint32_t twin = ForeignTable::kNone;
  const std::uint32_t position = table_.insert(key, homes_[home].group, hash, start, home, twin);
  ForeignBlock& block = table_[position];
  block.marks |= colder_bit(tier);
  block.copies = tier == Tier::kHbm ? 1 : 0;
  if (twin != ForeignTable::kNone) {
    for (const Tier own : kOwn) {
      if (holds(table_[twin], own)) {
        shared_.try_emplace({own, block.hash}, 1);
      }
    }
  }
  return position;
}

// Notes that a tier has a known block; whether it had none before.
bool ForeignLedger::gain(std::uint32_t position, Tier tier) {
  ForeignBlock& block = table_[position];
  const std::uint8_t bit = colder_bit(tier);
  if (bit != 0 ? (block.marks & bit) != 0 : block.copies != 0 && !limits_.counts_copies) {
    return false;
  }
  if (block.is_gone()) {
    table_.note_back(position);
  }
  block.marks |= bit;
  const bool is_first = bit != 0 || block.copies == 0;
  if (bit == 0 && block.copies < kMostCopies) {
    ++block.copies;
  }
  return is_first;
}

// -- removed ----------------------------------------------------------------------------------------------------------

void ForeignLedger::remove(Tier tier, std::uint8_t group, std::span<const ForeignKey> keys) {
  check_open();
  remove_from(tier, group, keys);
}

void ForeignLedger::remove_anywhere(std::uint8_t group, std::span<const ForeignKey> keys) {
  check_open();
  std::vector<ForeignKey> there;
  for (const Tier tier : kOwn) {
    there.clear();
    for (const ForeignKey& key : keys) {
      const std::uint32_t position = table_.find(table_.place_of(key, group), key.kind, group);
      if (position != ForeignTable::kNone && holds(table_[position], tier)) {
        there.push_back(key);
      }
    }
    remove_from(tier, group, there);
  }
}

void ForeignLedger::remove_from(Tier tier, std::uint8_t group, std::span<const ForeignKey> keys) {
  look_up(keys, group);
  run_count_ = 0;
  for (std::size_t at = 0; at < keys.size(); ++at) {
    if (at % kAhead == 0) {
      const std::size_t end = std::min(at + kAhead, keys.size());
      for (std::size_t ahead = at; ahead < end; ++ahead) {
        table_.prefetch(places_[ahead]);
      }
      for (std::size_t ahead = at; ahead < end; ++ahead) {
        table_.prefetch_block(places_[ahead]);
      }
    }
    const std::uint32_t position = table_.find(places_[at], keys[at].kind, group);
    if (position == ForeignTable::kNone) {
      ++counts_.not_held;
    } else if (lose(position, tier)) {
      gather(run_of(table_[position].home), table_[position]);
    }
  }
  for (const Run& run : std::span(runs_).first(run_count_)) {
    lost(homes_[run.home], tier, EvictReason::kCapacity, run.hashes, run.has_shared);
  }
  table_.forget_gone(limits_.most_gone);
  trim();
}

// Notes that a tier has one copy of a known block less; whether it has none now.
bool ForeignLedger::lose(std::uint32_t position, Tier tier) {
  ForeignBlock& block = table_[position];
  // a claim of an object is everybody's, whatever this engine was known to have put
  if (tier != Tier::kObject && !holds(block, tier)) {
    ++counts_.not_held;
    return false;
  }
  const bool was_gone = block.is_gone();
  const std::uint8_t bit = colder_bit(tier);
  if (bit != 0) {
    block.marks = static_cast<std::uint8_t>(block.marks & ~bit);
  } else {
    --block.copies;
  }
  if (!was_gone && block.is_gone()) {
    table_.note_gone(position);
  }
  return bit != 0 || block.copies == 0;
}

void ForeignLedger::clear(Tier tier) {
  check_open();
  const std::uint8_t bit = colder_bit(tier);
  std::vector<std::uint32_t> gone;
  run_count_ = 0;
  for (std::uint32_t at = 0; at < table_.end(); ++at) {
    ForeignBlock& block = table_[at];
    if (!block.is_remembered() || !holds(block, tier)) {
      continue;
    }
    if (!block.is_shared() || shared_.erase({tier, block.hash}) != 0) {
      gather(run_of(block.home), block);
    }
    block.marks = static_cast<std::uint8_t>(block.marks & ~bit);
    block.copies = bit != 0 ? block.copies : 0;
    if (block.is_gone()) {
      gone.push_back(at);
    }
  }
  const std::span<Run> runs = std::span(runs_).first(run_count_);
  std::ranges::sort(runs,
                    [this](const Run& one, const Run& other) { return homes_[one.home].id < homes_[other.home].id; });
  for (const Run& run : runs) {
    lost(homes_[run.home], tier, EvictReason::kCleared, run.hashes, false);
  }
  forget_sorted(gone);
  trim();
}

void ForeignLedger::drop(bool forgets) {
  shared_.clear();
  listing_.reset();
  held_.fill(0);
  digest_ = 0;
  if (forgets) {
    table_.clear();
    homes_.clear();
    return;
  }
  std::vector<std::uint32_t> gone;
  for (std::uint32_t at = 0; at < table_.end(); ++at) {
    ForeignBlock& block = table_[at];
    if (block.is_remembered() && !block.is_gone()) {
      block.copies = 0;
      block.marks = static_cast<std::uint8_t>(block.marks & ~ForeignBlock::kColder);
      gone.push_back(at);
    }
  }
  forget_sorted(gone);
}

// Notes blocks as gone of which no list tells yet. The deepest are forgotten first: what is stored next is more often
// behind the others.
void ForeignLedger::forget_sorted(std::vector<std::uint32_t>& gone) {
  std::ranges::sort(gone, [this](std::uint32_t first, std::uint32_t second) {
    const ForeignBlock& one = table_[first];
    const ForeignBlock& other = table_[second];
    if (one.start != other.start) {
      return one.start > other.start;
    }
    return one.hash != other.hash ? one.hash < other.hash : table_.is_before(one, other);
  });
  for (const std::uint32_t position : gone) {
    table_.note_gone(position);
    table_.forget_gone(limits_.most_gone);
  }
}

// -- scratch ----------------------------------------------------------------------------------------------------------

// The run of a namespace among runs_, empty where it is new.
ForeignLedger::Run& ForeignLedger::run_of(std::uint8_t home) {
  for (std::size_t at = 0; at < run_count_; ++at) {
    if (runs_[at].home == home) {
      return runs_[at];
    }
  }
  if (run_count_ == runs_.size()) {
    runs_.emplace_back();
  }
  Run& run = runs_[run_count_++];
  run.home = home;
  run.has_shared = false;
  run.hashes.clear();
  return run;
}

void ForeignLedger::gather(Run& run, const ForeignBlock& block) {
  append(run.hashes, block.hash.data());
  run.has_shared = run.has_shared || block.is_shared();
}

// Gives the memory of a large event back.
void ForeignLedger::trim() {
  if (places_.capacity() > kMostScratch || hashes_.capacity() > kMostScratch * kHashBytes) {
    places_ = {};
    hashes_ = {};
  }
  if (std::ranges::any_of(runs_, [](const Run& run) { return run.hashes.capacity() > kMostScratch * kHashBytes; })) {
    runs_.clear();
    run_count_ = 0;
  }
}

}  // namespace kvbm
