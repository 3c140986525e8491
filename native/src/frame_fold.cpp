#include "kvbm/frame_fold.hpp"

#include <algorithm>

#include "kvbm/error.hpp"

namespace kvbm {
namespace {

Fold<ResidencyTable>::Tables empty_tables() {
  Fold<ResidencyTable>::Tables tables;
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    tables[tier] = std::make_unique<ResidencyTable>(static_cast<Tier>(tier));
  }
  return tables;
}

void check_layout(Bytes hashes, Bytes slots) {
  hash_count(hashes);
  if (!slots.empty() && slots.size() / kSlotBytes * kHashBytes != hashes.size()) {
    throw Error(ErrorCode::kLayout, words(slots.size(), " bytes of slots for ", hashes.size() / kHashBytes, " blocks"));
  }
}

}  // namespace

FrameFold::FrameFold(bool is_strict) : Fold(empty_tables()), strict(is_strict) {}

void FrameFold::evolve(const Event& event, const EpochStart* start, FoldDelta& delta) {
  forget_mixes();
  std::visit(
      [&](const auto& one) {
        if constexpr (requires { one.blob; }) {
          if (strict) {
            check(one, *start);
          }
          begin(*start, delta);
          return;
        } else {
          if constexpr (requires { one.slots; }) {
            check_layout(one.hashes, one.slots);
          } else if constexpr (requires { one.hashes; }) {
            check_layout(one.hashes, {});
          }
          if (strict) {
            check_open(event.index());
            check(one);
          }
          if constexpr (std::is_same_v<std::decay_t<decltype(one)>, BlocksCreated>) {
            if (const std::string why = misplaced(one.parent, one.start); !why.empty()) {
              delta.on_anomaly(kMisplaced, words(tier_name(one.tier), ": ", why));
            }
          }
          std::uint32_t owner = 0;
          if constexpr (requires { one.slots; }) {
            owner = namespaces().intern(one.namespace_id);
          }
          if (strict) {
            apply<Legality::kKnown>(one, owner, FindByHash{}, delta);
          } else {
            apply<Legality::kUnknown>(one, owner, FindByHash{}, delta);
          }
        }
      },
      event);
}

FoldedFrame FrameFold::evolve_frame(FrameReader reader, std::uint32_t first, std::span<const EpochStart> starts) {
  FoldedFrame result;
  const WireInteger frame_epoch(reader.header().epoch);
  while (const std::optional<Event> event = reader.next()) {
    const EpochStart* start = nullptr;
    if (std::holds_alternative<InstanceStarted>(*event)) {
      if (starts.empty()) {
        throw Error(ErrorCode::kLayout, "fewer starts are given than the frame has");
      }
      start = &starts.front();
      starts = starts.subspan(1);
    }
    if (result.folded >= first) {
      if (start != nullptr && start->epoch != frame_epoch) {
        break;
      }
      try {
        evolve(*event, start, result.delta);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kIllegalEvent) {
          throw;
        }
        result.illegal = Anomaly{error.rule(), error.detail()};
        break;
      }
    }
    ++result.folded;
  }
  return result;
}

std::uint64_t FrameFold::tier_digest(Tier tier) const noexcept {
  const ResidencyTable& here = *table(tier);
  std::uint64_t sum = 0;
  for (std::uint32_t at = 0; at < here.end(); ++at) {
    if (!ResidencyTable::is_gone(here[at])) {
      sum += residency_mix(tier, here.hash_of(at));
    }
  }
  return sum;
}

std::vector<Residency> FrameFold::held(Tier tier) const {
  const ResidencyTable& here = *table(tier);
  std::vector<Residency> made;
  made.reserve(here.count());
  for (const std::uint32_t at : here.held()) {
    made.push_back(here[at]);
  }
  std::stable_sort(made.begin(), made.end(), [this](const Residency& one, const Residency& other) {
    return namespace_id(one) < namespace_id(other);
  });
  return made;
}

std::size_t FrameFold::memory_bytes() const noexcept {
  std::size_t sum = sizeof *this;
  for (std::uint8_t tier = 0; tier < kTierCount; ++tier) {
    sum += table(static_cast<Tier>(tier))->memory_bytes();
  }
  return sum;
}

}  // namespace kvbm
