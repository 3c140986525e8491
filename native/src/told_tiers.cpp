#include "kvbm/told_tiers.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvbm {
namespace {

// Blocks that are told of, those that go on with each other together.
class Gathered {
 public:
  Gathered(std::vector<ToldTiers::Told>& told, bool is_held) : told_(told), begin_(told.size()), is_held_(is_held) {}

  void add(std::uint64_t run, std::uint32_t at, std::uint32_t tier) {
    if (told_.size() > begin_) {
      ToldTiers::Told& last = told_.back();
      if (last.run == run && last.end == at && last.tier == tier) {
        ++last.end;
        return;
      }
    }
    told_.push_back({run, at, at + 1, static_cast<std::uint8_t>(tier), is_held_});
  }

 private:
  std::vector<ToldTiers::Told>& told_;  // all of the step
  std::size_t begin_;                   // where those of this kind begin
  bool is_held_;                        // the kind
};

}  // namespace

ToldTiers::ToldTiers(std::size_t step, std::uint64_t seed) : step_(step), seed_(seed) {
  by_hash_.reset(0);
  by_digest_.reset(0);
}

std::uint64_t ToldTiers::digest_mix(const Digest& digest) const noexcept {
  std::uint64_t mix = seed_ ^ (std::uint64_t{digest.group} << 8 | digest.size);
  for (std::size_t at = 0; at < kMostDigestBytes; at += sizeof mix) {
    std::uint64_t word = 0;
    std::memcpy(&word, digest.bytes.data() + at, sizeof word);
    mix = (mix ^ word) * 0x9E3779B97F4A7C15;
    mix ^= mix >> 32;
  }
  return mix * 0x94D049BB133111EB ^ mix >> 29;
}

std::uint32_t ToldTiers::find(const std::uint8_t* hash) const noexcept {
  return by_hash_.find(hash_mix(hash),
                       [&](std::uint32_t at) { return std::memcmp(blocks_[at].hash.data(), hash, kHashBytes) == 0; });
}

std::optional<ToldTiers::Learned> ToldTiers::learn(Bytes hashes, std::span<const Bytes> digests, std::uint8_t group) {
  const auto count = std::min<std::size_t>(hashes.size() / kHashBytes, kMostRunBlocks);
  const std::size_t before = fresh_.size();
  const std::uint64_t run = next_run_;
  fresh_.resize(before + count);
  std::size_t fresh = before;
  Learned learned{run, 0, 0};
  std::uint32_t inserted = 0;
  try {
    std::uint32_t& left = left_[run];
    for (std::uint32_t at = 0; at < count; ++at) {
      const std::uint8_t* const hash = hashes.data() + at * kHashBytes;
      std::uint32_t position = find(hash);
      if (position == kNone) {
        learned.begin = inserted == 0 ? at : learned.begin;
        position = insert(hash, digests[at], group, run, at - learned.begin);
        learned.end = at + 1;
        left = ++inserted;
      }
      if (!blocks_[position].is_fresh) {
        blocks_[position].is_fresh = 1;
        fresh_[fresh++] = position;
      }
    }
  } catch (...) {
    for (std::size_t at = before; at < fresh; ++at) {
      blocks_[fresh_[at]].is_fresh = 0;
      if (blocks_[fresh_[at]].run == run) {
        forget(fresh_[at]);
      }
    }
    fresh_.resize(before);
    left_.erase(run);
    throw;
  }
  fresh_.resize(fresh);
  if (inserted == 0) {
    left_.erase(run);
    return std::nullopt;
  }
  ++next_run_;
  return learned;
}

// Adds a block that is not known. Throws std::bad_alloc; nothing has changed then.
std::uint32_t ToldTiers::insert(const std::uint8_t* hash, Bytes digest, std::uint8_t group, std::uint64_t run,
                                std::uint32_t at) {
  make_room();
  const std::uint32_t known_digest = digest_position(digest, group);
  std::uint32_t position = free_block_;
  if (position == kNone) {
    position = static_cast<std::uint32_t>(blocks_.size());
    blocks_.emplace_back();  // there is room
  } else {
    free_block_ = blocks_[position].after;
  }
  Block& block = blocks_[position];
  block = {.hash = {},
           .run = run,
           .digest = known_digest,
           .before = last_,
           .after = kNone,
           .at = at,
           .tier = kNowhere,
           .is_known = 1,
           .is_fresh = 0,
           .unused_ = 0};
  std::memcpy(block.hash.data(), hash, kHashBytes);
  (last_ == kNone ? first_ : blocks_[last_].after) = position;
  last_ = position;
  by_hash_.insert(hash_mix(hash), position);
  return position;
}

// Where one of the engine's hashes is, which has a block more from now on. There is room for it.
std::uint32_t ToldTiers::digest_position(Bytes bytes, std::uint8_t group) {
  Digest wanted{
      .bytes = {}, .copies = {}, .blocks = 1, .size = static_cast<std::uint8_t>(bytes.size()), .group = group};
  std::copy(bytes.begin(), bytes.end(), wanted.bytes.begin());
  const std::uint64_t mix = digest_mix(wanted);
  std::uint32_t position = by_digest_.find(mix, [&](std::uint32_t at) {
    const Digest& one = digests_[at];
    return one.size == wanted.size && one.group == group && one.bytes == wanted.bytes;
  });
  if (position != kNone) {
    ++digests_[position].blocks;
    return position;
  }
  position = free_digest_;
  if (position == kNone) {
    position = static_cast<std::uint32_t>(digests_.size());
    digests_.push_back(wanted);
  } else {
    free_digest_ = digests_[position].blocks;
    digests_[position] = wanted;
  }
  by_digest_.insert(mix, position);
  return position;
}

// Room for one block and one digest more everywhere. Throws std::bad_alloc; nothing has changed then.
void ToldTiers::make_room() {
  if (free_block_ == kNone && blocks_.size() == blocks_.capacity()) {
    blocks_.reserve(std::max<std::size_t>(64, 2 * blocks_.size()));
  }
  if (free_digest_ == kNone && digests_.size() == digests_.capacity()) {
    digests_.reserve(std::max<std::size_t>(64, 2 * digests_.size()));
  }
  if (!by_hash_.has_room()) {
    PositionIndex larger;
    larger.reset(blocks() + 1);
    for (std::uint32_t at = first_; at != kNone; at = blocks_[at].after) {
      larger.insert(hash_mix(blocks_[at].hash.data()), at);
    }
    by_hash_ = std::move(larger);
  }
  if (!by_digest_.has_room()) {
    std::vector<bool> is_there(digests_.size(), true);
    for (std::uint32_t at = free_digest_; at != kNone; at = digests_[at].blocks) {
      is_there[at] = false;
    }
    PositionIndex larger;
    larger.reset(digests() + 1);
    for (std::uint32_t at = 0; at < digests_.size(); ++at) {
      if (is_there[at]) {
        larger.insert(digest_mix(digests_[at]), at);
      }
    }
    by_digest_ = std::move(larger);
  }
}

void ToldTiers::drop_digest(std::uint32_t position) noexcept {
  Digest& digest = digests_[position];
  if (--digest.blocks == 0) {
    by_digest_.erase(digest_mix(digest), position);
    digest.blocks = free_digest_;
    free_digest_ = position;
  }
}

void ToldTiers::forget(std::uint32_t position) noexcept {
  Block& block = blocks_[position];
  if (block.is_fresh) {  // it was learned again since it was chosen to be looked at
    std::erase(fresh_, position);
  }
  by_hash_.erase(hash_mix(block.hash.data()), position);
  drop_digest(block.digest);
  if (cursor_ == position) {
    cursor_ = block.after;
  }
  (block.before == kNone ? first_ : blocks_[block.before].after) = block.after;
  (block.after == kNone ? last_ : blocks_[block.after].before) = block.before;
  block.is_known = 0;
  block.after = free_block_;
  free_block_ = position;
}

void ToldTiers::begin_turn() noexcept {
  cursor_ = first_;
  turn_end_ = next_run_;
}

void ToldTiers::tell_anew() noexcept {
  begin_turn();
  tells_anew_ = true;
}

std::size_t ToldTiers::choose_due() {
  due_.reserve(fresh_.size() + step_);
  due_.assign(fresh_.begin(), fresh_.end());
  due_fresh_ = fresh_.size();
  for (const std::uint32_t position : fresh_) {
    blocks_[position].is_fresh = 0;
  }
  fresh_.clear();
  due_anew_ = tells_anew_;
  while (due_.size() - due_fresh_ < step_ && cursor_ != kNone && blocks_[cursor_].run < turn_end_) {
    due_.push_back(cursor_);
    cursor_ = blocks_[cursor_].after;
  }
  if (due_.size() - due_fresh_ < step_) {
    begin_turn();
    tells_anew_ = false;
  }
  return due_.size();
}

void ToldTiers::copy_due(std::span<std::uint8_t> out) const noexcept {
  std::uint8_t* to = out.data();
  for (const std::uint32_t position : due_) {
    std::memcpy(to, blocks_[position].hash.data(), kHashBytes);
    to += kHashBytes;
  }
}

void ToldTiers::change(Bytes tiers, std::vector<Told>& told, std::vector<std::uint64_t>& ended) {
  gained_.clear();
  gone_.clear();
  gained_.reserve(due_.size());
  gone_.reserve(due_.size());
  told.reserve(told.size() + 2 * due_.size());
  ended.reserve(ended.size() + due_.size());
  look(tiers, told);
  due_.clear();
  Gathered lost(told, false);
  for (const Left& left : gone_) {
    const Block& block = blocks_[left.position];
    if (left.from != kNowhere && --copies(block, left.from) == 0) {
      lost.add(block.run, block.at, left.from);
    }
    if (left.is_gone) {
      const auto found = left_.find(block.run);
      if (--found->second == 0) {
        ended.push_back(block.run);
        left_.erase(found);
      }
      forget(left.position);
    }
  }
}

// Finds what has changed, and tells of what is held. What is gone is counted once all that has come is.
void ToldTiers::look(Bytes tiers, std::vector<Told>& told) {
  Gathered held(told, true);
  for (std::size_t at = 0; at < due_.size(); ++at) {
    Block& block = blocks_[due_[at]];
    const std::uint32_t now = tiers[at] == kAbsent ? kNowhere : tiers[at];
    if (!block.is_known) {  // it was looked at twice in this step
      continue;
    }
    if (now == block.tier && now != kNowhere) {
      if (due_anew_ && at >= due_fresh_) {
        held.add(block.run, block.at, now);
      }
      continue;
    }
    if (now != kNowhere) {
      gained_.push_back({due_[at], now});
    }
    if (block.tier != kNowhere || now == kNowhere) {
      gone_.push_back({due_[at], block.tier, now == kNowhere});
    }
    block.tier = now & kNowhere;
    block.is_known = now != kNowhere;
  }
  for (const Gained& one : gained_) {
    const Block& block = blocks_[one.position];
    if (++copies(block, one.tier) == 1) {
      held.add(block.run, block.at, one.tier);
    }
  }
}

}  // namespace kvbm
