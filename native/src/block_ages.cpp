#include "kvbm/block_ages.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "kvbm/codec.hpp"

namespace kvbm {
namespace {

constexpr std::uint64_t kSecondNs = 1'000'000'000;

std::size_t at_tier(Tier tier) noexcept { return static_cast<std::size_t>(tier); }

std::uint64_t key_of(Tier tier, const std::uint8_t* hash) noexcept {
  const std::uint64_t mix = residency_mix(tier, hash);
  return mix != 0 ? mix : 1;
}

}  // namespace

template <class Visit>
void BlockAges::for_blocks(Bytes hashes, Visit&& visit) const {
  for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
    std::uint64_t word = 0;
    std::memcpy(&word, hashes.data() + at, sizeof word);
    if (every_ == 1 || word % every_ == 0) {
      visit(hashes.data() + at);
    }
  }
}

std::array<TierAges, kAgedTiers> BlockAges::tiers() const noexcept {
  std::array<TierAges, kAgedTiers> told = counts_;
  for (TierAges& one : told) {
    for (std::size_t at = 0; at < one.wanted.size(); ++at) {
      one.wanted[at] *= every_;
      one.evicted[at] *= every_;
    }
    one.wanted_s *= every_;
    one.evicted_s *= every_;
    one.reused *= every_;
    one.unused *= every_;
  }
  return told;
}

void BlockAges::take(Bytes data, std::size_t at) {
  FrameReader reader(data, at);
  const std::uint64_t now_ns = std::min(reader.header().wall_time_ns, kUnseen - 1);
  while (const std::optional<Event> event = reader.next()) {
    take(*event, now_ns);
  }
}

void BlockAges::forget() {
  tables_ = {};
  size_ = 0;
}

void BlockAges::take(const Event& event, std::uint64_t now_ns) {
  if (const auto* const created = std::get_if<BlocksCreated>(&event)) {
    for_blocks(created->hashes, [&](const std::uint8_t* hash) {
      want_colder(created->tier, hash, now_ns);
      gain(created->tier, hash, now_ns, false);
    });
  } else if (const auto* const migrated = std::get_if<BlocksMigrated>(&event)) {
    const auto* const source = std::get_if<Tier>(&migrated->source);
    for_blocks(migrated->hashes, [&](const std::uint8_t* hash) {
      if (source != nullptr && migrated->cause != MigrateCause::kOffload) {
        want(*source, hash, now_ns);
      }
      if (source != nullptr && !migrated->kept) {
        lose(*source, hash, false, now_ns);
      }
      gain(migrated->target, hash, now_ns, false);
    });
  } else if (const auto* const evicted = std::get_if<BlocksEvicted>(&event)) {
    const bool is_evicted = evicted->reason == EvictReason::kCapacity || evicted->reason == EvictReason::kTtl ||
                            evicted->reason == EvictReason::kQuota;
    for_blocks(evicted->hashes, [&](const std::uint8_t* hash) { lose(evicted->tier, hash, is_evicted, now_ns); });
  } else if (const auto* const listed = std::get_if<ResidenciesListed>(&event)) {
    for_blocks(listed->hashes, [&](const std::uint8_t* hash) { gain(listed->tier, hash, kUnseen, true); });
  } else if (const auto* const ended = std::get_if<SnapshotEnded>(&event);
             ended != nullptr && ended->count == 0 && is_followed(ended->tier)) {
    Table& table = tables_[at_tier(ended->tier)];
    size_ -= table.size;
    table = {};
  }
}

BlockAges::Cell* BlockAges::find(Table& table, std::uint64_t key) noexcept {
  const std::size_t mask = table.cells.size() - 1;
  for (std::size_t at = key & mask; !table.cells.empty() && table.cells[at].key != 0; at = (at + 1) & mask) {
    if (table.cells[at].key == key) {
      return &table.cells[at];
    }
  }
  return nullptr;
}

BlockAges::Cell& BlockAges::insert(Table& table, std::uint64_t key) {
  if (2 * (table.size + 1) > table.cells.size()) {
    std::vector<Cell> before(std::max(kFirstCells, 2 * table.cells.size()));
    before.swap(table.cells);
    table.size = 0;
    for (const Cell& cell : before) {
      if (cell.key != 0) {
        insert(table, cell.key) = cell;
      }
    }
  }
  const std::size_t mask = table.cells.size() - 1;
  std::size_t at = key & mask;
  while (table.cells[at].key != 0) {
    at = (at + 1) & mask;
  }
  ++table.size;
  table.cells[at].key = key;
  return table.cells[at];
}

// Those behind it move up, so that no search meets a hole before its end.
void BlockAges::erase(Table& table, Cell* cell) noexcept {
  const std::size_t mask = table.cells.size() - 1;
  auto hole = static_cast<std::size_t>(cell - table.cells.data());
  for (std::size_t at = (hole + 1) & mask; table.cells[at].key != 0; at = (at + 1) & mask) {
    if (((at - table.cells[at].key) & mask) >= ((at - hole) & mask)) {
      table.cells[hole] = table.cells[at];
      hole = at;
    }
  }
  table.cells[hole] = Cell{};
  --table.size;
}

void BlockAges::gain(Tier tier, const std::uint8_t* hash, std::uint64_t since_ns, bool is_listed) {
  if (!is_followed(tier)) {
    return;
  }
  Table& table = tables_[at_tier(tier)];
  const std::uint64_t key = key_of(tier, hash);
  Cell* cell = find(table, key);
  if (cell == nullptr) {
    if (size_ >= most_) {
      return;
    }
    cell = &insert(table, key);
    ++size_;
  } else if (is_listed) {
    return;
  }
  cell->since_ns = since_ns;
  cell->is_wanted = 0;
}

void BlockAges::want(Tier tier, const std::uint8_t* hash, std::uint64_t now_ns) noexcept {
  Cell* const cell = is_followed(tier) ? find(tables_[at_tier(tier)], key_of(tier, hash)) : nullptr;
  if (cell == nullptr) {
    return;
  }
  cell->is_wanted = 1;
  TierAges& counts = counts_[at_tier(tier)];
  count(counts.wanted, counts.wanted_s, cell->since_ns, now_ns);
}

void BlockAges::want_colder(Tier tier, const std::uint8_t* hash, std::uint64_t now_ns) noexcept {
  for (std::size_t colder = at_tier(tier) + 1; colder < kAgedTiers; ++colder) {
    const auto other = static_cast<Tier>(colder);
    if (tables_[colder].size != 0 && find(tables_[colder], key_of(other, hash)) != nullptr) {
      want(other, hash, now_ns);
      return;
    }
  }
}

void BlockAges::lose(Tier tier, const std::uint8_t* hash, bool is_evicted, std::uint64_t now_ns) noexcept {
  if (!is_followed(tier)) {
    return;
  }
  Table& table = tables_[at_tier(tier)];
  Cell* const cell = find(table, key_of(tier, hash));
  if (cell == nullptr) {
    return;
  }
  if (is_evicted && cell->since_ns != kUnseen) {
    TierAges& counts = counts_[at_tier(tier)];
    count(counts.evicted, counts.evicted_s, cell->since_ns, now_ns);
    ++(cell->is_wanted != 0 ? counts.reused : counts.unused);
  }
  erase(table, cell);
  --size_;
}

void BlockAges::count(AgeCounts& counts, std::uint64_t& sum, std::uint64_t since_ns, std::uint64_t now_ns) noexcept {
  if (since_ns == kUnseen) {
    return;
  }
  const std::uint64_t age_s = now_ns > since_ns ? (now_ns - since_ns + kSecondNs - 1) / kSecondNs : 0;
  const auto bound = std::lower_bound(kAgeBoundsS.begin(), kAgeBoundsS.end(), age_s);
  ++counts[static_cast<std::size_t>(bound - kAgeBoundsS.begin())];
  sum += age_s;
}

}  // namespace kvbm
