#include "kvbm/routed_blocks.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>

#include "kvbm/entropy.hpp"
#include "kvbm/large_array.hpp"
#include "kvbm/sha256.hpp"

namespace kvbm {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();
constexpr double kLong = 1e9;       // seconds
constexpr std::size_t kAhead = 12;  // entries between asking memory for a place and writing to it
constexpr std::uint64_t kFactor = 0xD6E8FEB86659FD93;

// Depths at which a chain is noted: all at first, then 128 between each two powers of two.
std::vector<std::uint32_t> made_marks() {
  std::vector<std::uint32_t> depths;
  for (std::uint32_t depth = 1; depth <= RoutedBlocks::kExactBlocks; ++depth) {
    depths.push_back(depth);
  }
  while (depths.back() < RoutedBlocks::kMostBlocks) {
    const std::uint32_t first = depths.back();
    const std::uint32_t step = 2 * first / RoutedBlocks::kExactBlocks;
    for (std::uint32_t depth = first + step; depth <= 2 * first; depth += step) {
      depths.push_back(depth);
    }
  }
  return depths;
}

const std::vector<std::uint32_t>& marks() {
  static const std::vector<std::uint32_t> made = made_marks();
  return made;
}

// Depths behind `first` at which a prompt of so many blocks is noted.
void mark_depths(std::uint32_t first, std::uint32_t blocks, std::vector<std::uint32_t>& depths) {
  const std::vector<std::uint32_t>& all = marks();
  const auto end = std::upper_bound(all.begin(), all.end(), blocks);
  depths.assign(std::upper_bound(all.begin(), end, first), end);
  if (blocks > first && (end == all.begin() || *std::prev(end) != blocks)) {
    depths.push_back(blocks);
  }
}

std::uint64_t mixed(std::uint64_t word) noexcept {
  word ^= word >> 32;
  word *= kFactor;
  return word ^ word >> 32;
}

struct Halves {
  std::uint64_t low;   // the first 8 bytes
  std::uint64_t high;  // the rest
};

Halves halves_of(const std::uint8_t* bytes) noexcept {
  Halves halves;
  std::memcpy(&halves, bytes, sizeof halves);
  return halves;
}

}  // namespace

RoutedBlocks::RoutedBlocks(double hold_s, std::size_t sets)
    : hold_s_(hold_s),
      mask_(sets - 1),
      sets_(static_cast<Set*>(std::calloc(sets, sizeof(Set)))),
      odd_{random_word() | 1, random_word() | 1, random_word() | 1},
      key_{random_word(), random_word()},
      last_s_(kNever),
      window_s_(kNever) {
  if (sets_ == nullptr) {
    throw std::bad_alloc();
  }
  wish_for_huge_pages(sets_.get(), sets * sizeof(Set));
}

void RoutedBlocks::chain(const NamespaceId& id, Bytes hashes, Chain& chain) const {
  mark_depths(0, static_cast<std::uint32_t>(hashes.size() / kHashBytes), chain.depths);
  const Halves space = halves_of(id.data());
  const std::uint64_t own = (space.low ^ space.high) * odd_[2];
  chain.words.clear();
  for (const std::uint32_t depth : chain.depths) {
    const Halves hash = halves_of(hashes.data() + std::size_t{depth - 1} * kHashBytes);
    chain.words.push_back(hash.low * odd_[0] + hash.high * odd_[1] + own);
  }
}

bool RoutedBlocks::marked(const NamespaceId& id, std::uint32_t first, std::uint32_t blocks, Bytes hashes,
                          Chain& chain) const {
  mark_depths(first, blocks, chain.depths);
  if (hashes.size() != chain.depths.size() * kHashBytes) {
    return false;
  }
  const Halves space = halves_of(id.data());
  const std::uint64_t own = (space.low ^ space.high) * odd_[2];
  chain.words.clear();
  for (std::size_t at = 0; at < chain.depths.size(); ++at) {
    const Halves hash = halves_of(hashes.data() + at * kHashBytes);
    chain.words.push_back(hash.low * odd_[0] + hash.high * odd_[1] + own);
  }
  return true;
}

std::uint64_t RoutedBlocks::salt_of(std::string_view kind, std::string_view name) const {
  Sha256 sum(sha256_compress());
  sum.update({reinterpret_cast<const std::uint8_t*>(key_.data()), sizeof key_});
  sum.update({reinterpret_cast<const std::uint8_t*>(kind.data()), kind.size()});
  sum.update({reinterpret_cast<const std::uint8_t*>(name.data()), name.size()});
  return halves_of(sum.finish().data()).low;
}

std::size_t RoutedBlocks::first_mark(const Chain& chain, std::uint32_t held) const noexcept {
  return static_cast<std::size_t>(std::upper_bound(chain.depths.begin(), chain.depths.end(), held) -
                                  chain.depths.begin());
}

void RoutedBlocks::fetch(std::uint64_t word) const noexcept {
  const Set& set = sets_[word & mask_];
  __builtin_prefetch(&set);
  __builtin_prefetch(reinterpret_cast<const char*>(&set) + sizeof(Set) - 1);
}

void RoutedBlocks::ask(const Chain& chain, std::uint64_t salt, std::uint32_t held) const noexcept {
  if (const std::size_t at = first_mark(chain, held); at < chain.words.size()) {
    fetch(mixed(chain.words[at] + salt));
  }
}

// Looks at marks ever farther apart, then halves what is left between the last two.
std::uint32_t RoutedBlocks::depth(double now_s, const Chain& chain, std::uint64_t salt, std::uint32_t held) const {
  std::size_t first = first_mark(chain, held);
  std::size_t at = first;
  std::size_t step = 1;
  while (at < chain.depths.size() && holds(now_s, chain.words[at] + salt)) {
    first = at + 1;
    at += step;
    step *= 2;
  }
  std::size_t end = std::min(at, chain.depths.size());
  while (first < end) {  // before `first` it is held, from `end` on it is not
    const std::size_t middle = (first + end) / 2;
    if (holds(now_s, chain.words[middle] + salt)) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  return first != 0 ? std::max(held, chain.depths[first - 1]) : held;
}

bool RoutedBlocks::holds(double now_s, std::uint64_t word) const noexcept {
  word = mixed(word);
  const Set& set = sets_[word & mask_];
  for (std::size_t way = 0; way < kWays; ++way) {
    if (set.tags[way] == word) {
      return set.until_s[way] > now_s;
    }
  }
  return false;
}

void RoutedBlocks::note(double now_s, std::uint64_t caller, std::uint64_t instance, const Chain& chain) {
  if (chain.depths.empty()) {
    return;
  }
  const auto owner = static_cast<std::uint16_t>(caller);
  const bool crowds = is_crowding(now_s, owner, chain.depths.size());
  const bool is_shared = crowds || std::max(used_.size(), used_before_.size()) > 1;
  last_s_ = std::max(last_s_, now_s + hold_s_);
  const std::uint64_t salt = caller + instance;
  for (std::size_t at = 0; at < std::min(kAhead, chain.words.size()); ++at) {
    fetch(mixed(chain.words[at] + salt));
  }
  for (std::size_t at = 0; at < chain.words.size(); ++at) {
    if (at + kAhead < chain.words.size()) {
      fetch(mixed(chain.words[at + kAhead] + salt));
    }
    const std::uint64_t word = mixed(chain.words[at] + salt);
    Set& set = sets_[word & mask_];
    std::size_t oldest = 0;
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t way = 0; way < kWays; ++way) {  // what is free, its own, then others'
      double order = set.until_s[way];
      if (set.tags[way] == word) {
        order = kNever;
      } else if (is_shared && order > now_s && set.owners[way] != owner) {
        order += crowds ? std::numeric_limits<double>::infinity() : kLong;
      }
      if (order < least) {
        least = order;
        oldest = way;
      }
    }
    if (least < std::numeric_limits<double>::infinity()) {
      set.tags[oldest] = word;
      set.until_s[oldest] = now_s + hold_s_;
      set.owners[oldest] = owner;
    }
  }
}

std::size_t RoutedBlocks::entries(double now_s) const noexcept {
  std::size_t count = 0;
  for (std::size_t at = 0; at <= mask_; ++at) {
    for (const double until_s : sets_[at].until_s) {
      count += until_s > now_s ? 1 : 0;
    }
  }
  return count;
}

bool RoutedBlocks::is_crowding(double now_s, std::uint16_t owner, std::size_t entries) {
  if (now_s >= window_s_ + hold_s_) {
    const bool is_next = now_s < window_s_ + 2 * hold_s_;
    used_before_ = is_next ? std::move(used_) : std::unordered_map<std::uint16_t, std::size_t>();
    used_.clear();
    window_s_ = now_s;
  }
  used_[owner] += entries;
  const std::size_t share = (mask_ + 1) * kWays / std::max(used_.size(), used_before_.size());
  const auto before = used_before_.find(owner);
  return used_[owner] + (before != used_before_.end() ? before->second : 0) > share;
}

}  // namespace kvbm
