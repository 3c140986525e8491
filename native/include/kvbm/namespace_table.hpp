// NamespaceTable: namespace ids as small numbers, so that a residency needs 4 bytes to say whose its block is. Lives as
// long as its fold. Owner thread only; only a new id allocates.
#pragma once

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

class NamespaceTable {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  // The number of an id, a new one if need be. Throws std::bad_alloc; nothing has changed then.
  std::uint32_t intern(const NamespaceId& id) {
    // Requests that follow each other often share theirs
    if (last_ < ids_.size() && std::memcmp(ids_[last_].data(), id.data(), id.size()) == 0) {
      return last_;
    }
    if (ids_.size() == ids_.capacity()) {
      ids_.reserve(2 * ids_.size() + 8);  // first: a number that two ids had would be taken for one namespace
    }
    const auto [found, is_new] = numbers_.try_emplace(id, static_cast<std::uint32_t>(ids_.size()));
    if (is_new) {
      ids_.push_back(id);
    }
    return last_ = found->second;
  }

  // The number of an id, or kNone where it has none.
  std::uint32_t find(const NamespaceId& id) const noexcept {
    if (last_ < ids_.size() && std::memcmp(ids_[last_].data(), id.data(), id.size()) == 0) {
      return last_;
    }
    const auto found = numbers_.find(id);
    return found == numbers_.end() ? kNone : found->second;
  }

  void clear() noexcept {
    ids_.clear();
    numbers_.clear();
  }

  const NamespaceId& operator[](std::uint32_t number) const noexcept { return ids_[number]; }

 private:
  struct Hash {
    std::size_t operator()(const NamespaceId& id) const noexcept { return residency_mix(Tier::kHbm, id.data()); }
  };

  std::vector<NamespaceId> ids_;                                  // by number
  std::unordered_map<NamespaceId, std::uint32_t, Hash> numbers_;  // the other way
  std::uint32_t last_ = 0;                                        // the number given last
};

}  // namespace kvbm
