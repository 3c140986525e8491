#include "kvbm/history.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>

#include "kvbm/columns.hpp"
#include "kvbm/error.hpp"
#include "kvbm/runs.hpp"

namespace kvbm {
namespace {

std::array<std::unique_ptr<ResidencyTable>, kTierCount> empty_tables() {
  std::array<std::unique_ptr<ResidencyTable>, kTierCount> tables;
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    tables[tier] = std::make_unique<ResidencyTable>(static_cast<Tier>(tier));
  }
  return tables;
}

std::uint8_t code_of(Tier tier) noexcept { return static_cast<std::uint8_t>(tier); }

template <class Code>
std::uint8_t code_of(Code code) noexcept {
  return static_cast<std::uint8_t>(code);
}

}  // namespace

// Hears from the fold what an event changes. Claims are looked at before: the fold says how many, not which.
struct History::Listener {
  History& history;

  void on_begun(std::size_t) { history.end_all(StayEnd::kRestarted); }
  void on_gained(const ResidencyTable& table) { history.begin_stay(table, table.last()); }
  void on_moved(const ResidencyTable& table, std::uint32_t position) {
    history.end_stay(table.tier(), position);
    history.begin_stay(table, position);
  }
  void on_lost(const ResidencyTable& table, std::uint32_t position) { history.end_stay(table.tier(), position); }
  void on_claimed(std::size_t) noexcept {}
  void on_unclaimed(std::size_t) noexcept {}
  void on_anomaly(std::string_view, const std::string&) noexcept {}
};

History::History() : Fold(empty_tables()) {}

void History::evolve_frame(FrameReader reader, std::span<const EpochStart> starts) {
  const FrameHeader& header = reader.header();
  told_.wall_time_ns = header.wall_time_ns;
  told_.epoch = header.epoch;
  told_.offset = header.first_offset;
  for (std::optional<Event> event = reader.next(); event; event = reader.next(), ++told_.offset) {
    const bool is_start = std::holds_alternative<InstanceStarted>(*event);
    if (is_start && starts.empty()) {
      throw Error(ErrorCode::kLayout, "fewer starts are given than the frame has");
    }
    if (!is_start && epoch() != WireInteger(header.epoch)) {  // its start was missed
      const EpochStart blind{WireInteger(header.epoch), {}};
      evolve(InstanceStarted{}, &blind);
    }
    if (is_start) {
      EpochStart start = starts.front();
      start.epoch = WireInteger(header.epoch);
      starts = starts.subspan(1);
      evolve(*event, &start);
    } else {
      evolve(*event, nullptr);
    }
  }
}

std::vector<StayRow> History::take_ended() { return std::exchange(ended_, {}); }

std::vector<StayRow> History::lasting() const {
  std::vector<StayRow> rows;
  rows.reserve(count());
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    for (const std::uint32_t position : table(static_cast<Tier>(tier))->held()) {
      rows.push_back(stays_[tier][position]);
    }
  }
  return rows;
}

std::vector<TierStateRow> History::tier_states() const {
  std::vector<TierStateRow> rows;
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    const Snapshot& one = snapshot_of(static_cast<Tier>(tier));
    rows.push_back({.listed = one.listed,
                    .snapshot = one.number,
                    .is_open = one.is_open,
                    .is_whole = one.is_whole,
                    .is_cluster = is_cluster(static_cast<Tier>(tier)),
                    .unused = 0});
  }
  return rows;
}

std::vector<std::uint32_t> History::lasting_snapshots() const {
  std::vector<std::uint32_t> snapshots;
  snapshots.reserve(count());
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    const ResidencyTable& here = *table(static_cast<Tier>(tier));
    for (const std::uint32_t position : here.held()) {
      snapshots.push_back(here[position].snapshot);
    }
  }
  return snapshots;
}

void History::resume(WireInteger epoch, std::span<const TierStateRow> tiers, std::span<const NamespaceId> namespaces,
                     const std::vector<std::string>& names, std::span<const StayRow> lasting,
                     std::span<const std::uint32_t> snapshots) {
  if (tiers.size() != kTierCount || snapshots.size() != lasting.size() || count() != 0 || !ids_.empty()) {
    throw Error(ErrorCode::kLayout, "a history goes on once, with a row a tier and a snapshot a stay");
  }
  for (const NamespaceId& id : namespaces) {
    row_of(id);
  }
  for (const std::string& name : names) {
    row_of(std::string_view(name));
  }
  if (ids_.size() != namespaces.size() || names_.size() != names.size()) {
    throw Error(ErrorCode::kLayout, "a namespace or a name is there twice");
  }
  Fold::resume(std::move(epoch));
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    const TierStateRow& one = tiers[tier];
    Fold::resume(
        static_cast<Tier>(tier), one.is_cluster != 0,
        {.number = one.snapshot, .listed = one.listed, .is_open = one.is_open != 0, .is_whole = one.is_whole != 0});
  }
  for (std::size_t index = 0; index < lasting.size(); ++index) {
    const StayRow& row = lasting[index];
    if (row.tier >= kTierCount || row.namespace_row >= ids_.size() ||
        (row.from != kNoRow && row.from >= names_.size())) {
      throw Error(ErrorCode::kLayout, "a stay names no tier, namespace or instance");
    }
    ResidencyTable& here = *table(static_cast<Tier>(row.tier));
    const std::uint64_t mix = residency_mix(static_cast<Tier>(row.tier), row.hash.data());
    const bool has_slot = row.slot != kNoSlot;
    if (here.find(row.hash.data(), mix) != ResidencyTable::kNone ||
        (has_slot && here.find_slot(row.slot) != ResidencyTable::kNone)) {
      throw Error(ErrorCode::kLayout, "two stays have one block or one slot");
    }
    here.insert(row.hash.data(), mix, this->namespaces().intern(ids_[row.namespace_row]),
                has_slot ? std::optional(row.slot) : std::nullopt, snapshots[index]);
    std::vector<StayRow>& stays = stays_[row.tier];
    const std::uint32_t at = here.last();
    if (at >= stays.size()) {
      stays.resize(std::max<std::size_t>(at + std::size_t{1}, stays.size() + stays.size() / 6));
    }
    stays[at] = row;
  }
}

void History::evolve(const Event& event, const EpochStart* start) {
  forget_mixes();
  Listener listener{*this};
  std::visit(
      [&](const auto& one) {
        using Kind = std::decay_t<decltype(one)>;
        if constexpr (std::is_same_v<Kind, InstanceStarted>) {
          begin(*start, listener);
        } else {
          tell(one);
          std::uint32_t owner = 0;
          if constexpr (requires { one.slots; }) {
            owner = namespaces().intern(one.namespace_id);
          }
          apply<Legality::kUnknown>(one, owner, FindByHash{}, listener);
        }
      },
      event);
}

// What the blocks of an event have in common, and which of them are claims.
template <class Kind>
void History::tell(const Kind& event) {
  told_.start = told_.from = kNoRow;
  told_.source = told_.target = told_.leaves = kNoCode;
  told_.end = code_of(StayEnd::kReplaced);
  told_.run = {};
  told_.next = 0;
  if constexpr (requires { event.hashes; }) {
    told_.run = event.hashes;
    told_.namespace_row = row_of(event.namespace_id);
  }
  if constexpr (std::is_same_v<Kind, BlocksCreated>) {
    told_.begin = StayBegin::kCreated;
    told_.start = event.start;
    claim(event.tier, StayEnd::kClaimed);
  } else if constexpr (std::is_same_v<Kind, BlocksMigrated>) {
    told_.begin = static_cast<StayBegin>(event.cause);
    const auto* const source = std::get_if<Tier>(&event.source);
    if (source == nullptr) {
      told_.from = row_of(std::get<std::string_view>(event.source));
    } else {
      told_.source = code_of(*source);
    }
    claim(event.target, StayEnd::kClaimed);
    if (source != nullptr && !event.kept) {
      told_.leaves = code_of(*source);
      told_.end = code_of(StayEnd::kMoved);
      told_.target = code_of(event.target);
      claim(*source, StayEnd::kMoved);
    } else if (source != nullptr) {
      claim(*source, StayEnd::kClaimed);  // it was read there, so it is there
    }
  } else if constexpr (std::is_same_v<Kind, BlocksEvicted>) {
    told_.leaves = code_of(event.tier);
    told_.end = code_of(event.reason);
    claim(event.tier, static_cast<StayEnd>(event.reason));
  } else if constexpr (std::is_same_v<Kind, ResidenciesListed>) {
    told_.begin = StayBegin::kListed;
    claim(event.tier, StayEnd::kClaimed);
  } else if constexpr (std::is_same_v<Kind, SnapshotEnded>) {
    told_.leaves = code_of(event.tier);
    told_.end = code_of(StayEnd::kUnlisted);
  }
}

// A row for each block of the event, where the tier's pool is the cluster's.
void History::claim(Tier tier, StayEnd end) {
  if (!is_cluster(tier)) {
    return;
  }
  const bool is_over = end != StayEnd::kClaimed;
  told_.next = 0;
  for (std::size_t index = 0; index < told_.run.size() / kHashBytes; ++index) {
    StayRow row{};
    row.begin_ns = row.end_ns = told_.wall_time_ns;
    row.epoch = row.end_epoch = told_.epoch;
    row.begin_offset = row.end_offset = told_.offset;
    std::memcpy(row.hash.data(), hash_at(told_.run, index), kHashBytes);
    row.namespace_row = told_.namespace_row;
    row.slot = kNoSlot;
    row.position = is_over || told_.start == kNoRow ? kNoRow : told_.start + static_cast<std::uint32_t>(index);
    row.from = is_over ? kNoRow : told_.from;
    row.tier = code_of(tier);
    row.begin = is_over ? kNoCode : code_of(told_.begin);
    row.source = is_over || told_.source == row.tier ? kNoCode : told_.source;
    row.end = code_of(end);
    row.target = is_over ? told_.target : kNoCode;
    ended_.push_back(row);
  }
}

void History::begin_stay(const ResidencyTable& table, std::uint32_t at) {
  std::vector<StayRow>& stays = stays_[code_of(table.tier())];
  if (at >= stays.size()) {
    stays.resize(std::max<std::size_t>(at + std::size_t{1}, stays.size() + stays.size() / 6));
  }
  StayRow& row = stays[at];
  row = {};
  row.begin_ns = told_.wall_time_ns;
  row.epoch = told_.epoch;
  row.begin_offset = told_.offset;
  std::memcpy(row.hash.data(), table.hash_of(at), kHashBytes);
  row.namespace_row = told_.namespace_row;
  row.slot = table.slot_of(at).value_or(kNoSlot);
  row.position = position_of(row.hash.data());
  row.from = told_.from;
  row.tier = code_of(table.tier());
  row.begin = code_of(told_.begin);
  row.source = told_.source;
  row.end = code_of(StayEnd::kLasting);
  row.target = kNoCode;
}

void History::end_stay(Tier tier, std::uint32_t position) {
  StayRow row = stays_[code_of(tier)][position];
  const bool is_meant = told_.leaves == code_of(tier);  // else it was in the way of another
  row.end_ns = told_.wall_time_ns;
  row.end_epoch = told_.epoch;
  row.end_offset = told_.offset;
  row.end = is_meant ? told_.end : code_of(StayEnd::kReplaced);
  row.target = is_meant ? told_.target : kNoCode;
  ended_.push_back(row);
}

void History::end_all(StayEnd end) {
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    for (const std::uint32_t position : table(static_cast<Tier>(tier))->held()) {
      StayRow row = stays_[tier][position];
      row.end_ns = told_.wall_time_ns;
      row.end_epoch = told_.epoch;
      row.end_offset = told_.offset;
      row.end = code_of(end);
      ended_.push_back(row);
    }
  }
}

// Where a block of the event lies in its chain. Blocks are asked for in the order of the run.
std::uint32_t History::position_of(const std::uint8_t* hash) noexcept {
  if (told_.start == kNoRow) {
    return kNoRow;
  }
  while (!same_hash(hash_at(told_.run, told_.next), hash)) {
    ++told_.next;
  }
  return told_.start + static_cast<std::uint32_t>(told_.next);
}

std::uint32_t History::row_of(const NamespaceId& id) {
  const std::uint32_t row = rows_.intern(id);
  if (row == ids_.size()) {
    ids_.push_back(id);
  }
  return row;
}

std::uint32_t History::row_of(std::string_view name) {
  if (const auto found = name_rows_.find(name); found != name_rows_.end()) {
    return found->second;
  }
  const auto row = static_cast<std::uint32_t>(names_.size());
  names_.emplace_back(name);
  name_rows_.emplace(name, row);
  return row;
}

}  // namespace kvbm
