#include "kvbm/peer_prices.hpp"

#include <algorithm>
#include <span>

namespace kvbm {
namespace {

constexpr std::uint32_t kObject = 1000;  // the number of the object pool's link
constexpr std::uint32_t kNoLink = 2000;

// As core/topology.py has it.
std::uint32_t distance(const PeerPlace& one, const PeerPlace& other) noexcept {
  const std::size_t most = std::max(one.labels.size(), other.labels.size());
  const std::size_t least = std::min(one.labels.size(), other.labels.size());
  std::size_t same = 0;
  while (same < least && one.labels[same] == other.labels[same]) {
    ++same;
  }
  return static_cast<std::uint32_t>(std::min(most - same, kFarthest));
}

}  // namespace

bool PeerPrices::Usable::operator<(const Usable& other) const noexcept {
  if (is_tcp != other.is_tcp) {
    return other.is_tcp;
  }
  if (apart != other.apart) {
    return apart < other.apart;
  }
  return end != other.end ? end > other.end : run < other.run;
}

void PeerPrices::begin(const LentBlocks* lent) {
  lent_ = lent;
  deepest_ = 0;
  kept_ = 0;
  next_ = 0;
  if (lent != nullptr) {
    for (const PeerRun& run : lent->runs) {
      deepest_ = std::max(deepest_, run.end);
    }
  }
}

// The nearest that lend block `depth`, and the one that has the most from there on among them; how many.
std::size_t PeerPrices::choose(const PeerReader& reader, std::uint32_t slot, std::uint32_t depth) {
  usable_.clear();
  for (std::uint32_t at = 0; at < lent_->runs.size(); ++at) {
    const PeerRun& run = lent_->runs[at];
    if (run.slot == slot || depth < run.begin || depth >= run.end) {
      continue;
    }
    const bool is_memory = reader.place.host != 0 && reader.place.host == run.place.host;
    if (is_memory || (reader.place.has_tcp && run.place.has_tcp)) {
      usable_.push_back({!is_memory, distance(reader.place, run.place), run.end, at});
    }
  }
  const std::size_t count = std::min(kPeers, usable_.size());
  const auto first_others = usable_.begin() + static_cast<std::ptrdiff_t>(count);
  std::partial_sort(usable_.begin(), first_others, usable_.end());
  if (first_others != usable_.end()) {
    const auto deeper = [](const Usable& a, const Usable& b) { return a.end != b.end ? a.end > b.end : a < b; };
    const auto deepest = std::min_element(first_others, usable_.end(), deeper);
    if (deepest->end > std::min_element(usable_.begin(), first_others, deeper)->end) {
      usable_[count - 1] = *deepest;
    }
  }
  return count;
}

const PeerLink& PeerPrices::link_of(std::uint32_t link, const PeerLink& object) const noexcept {
  if (link == kObject) {
    return object;
  }
  return link > kFarthest ? lent_->tcp[link - kFarthest - 1] : lent_->memory[link];
}

const std::vector<FetchLength>& PeerPrices::times(const Key& key, std::size_t count, const PeerLink& object) {
  for (std::size_t at = 0; at < kept_; ++at) {
    if (known_[at].key == key) {
      return known_[at].lengths;
    }
  }
  if (kept_ < kKept && known_.size() <= kept_) {
    known_.emplace_back();
  }
  Known& made = known_[kept_ < kKept ? kept_ : next_++ % kKept];  // when there are many, each in turn gives way
  kept_ += kept_ < kKept ? 1 : 0;
  made.key = key;
  std::array<FetchSource, kMostSources> sources{};
  std::uint32_t longest = key.begin;
  for (std::size_t at = 0; at < count; ++at) {
    const PeerLink& link = link_of(key.links[at], object);
    sources[at] = {key.ends[at], link.latency_s, link.bytes_per_s, link.together_bytes_per_s};
    longest = std::max(longest, key.ends[at]);
  }
  const std::uint32_t lot = std::max(kLot, (longest - key.begin + kLots - 1) / kLots);
  least_times(key.begin, {sources.data(), count}, key.block_bytes, lot, made.lengths);
  return made.lengths;
}

PeerPrice PeerPrices::price(const PeerReader& reader, std::uint32_t slot, std::uint32_t depth, std::uint32_t reach,
                            const PeerLink& object, double block_compute_s) {
  PeerPrice found;
  if (!(reader.block_bytes > 0) || !is_needed(depth)) {
    return found;
  }
  const std::size_t peers = choose(reader, slot, depth);
  if (peers == 0) {
    return found;
  }
  found.has_peers = true;
  Key key{depth, reader.block_bytes, {}, {}};
  key.links.fill(kNoLink);
  for (std::size_t at = 0; at < peers; ++at) {
    key.ends[at] = usable_[at].end;
    key.links[at] = usable_[at].apart + (usable_[at].is_tcp ? static_cast<std::uint32_t>(kFarthest) + 1 : 0);
  }
  std::size_t count = peers;
  if (reach > depth) {
    key.ends[count] = reach;
    key.links[count++] = kObject;
  }
  const FetchLength* const best = quickest(depth, times(key, count, object), block_compute_s);
  if (best == nullptr) {
    return found;
  }
  found.end = best->end;
  found.seconds = best->seconds;
  std::uint32_t most = 0;
  for (std::size_t at = 0; at < peers; ++at) {
    found.peer_blocks += best->blocks[at];
    if (best->blocks[at] > most) {
      most = best->blocks[at];
      found.peer = static_cast<std::int32_t>(usable_[at].run);
    }
  }
  return found;
}

}  // namespace kvbm
