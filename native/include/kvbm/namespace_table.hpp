// NamespaceTable: namespace ids as small numbers, so that a slot needs 4 bytes to say whose its block is. Lives as long as its
// ledger and only grows: an engine has few namespaces. Owner thread only; only a new id allocates.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

class NamespaceTable {
 public:
  // The number of an id, a new one if need be.
  std::uint32_t intern(const NamespaceId& id) {
    if (last_ < ids_.size() && ids_[last_] == id) {  // requests that follow each other often share theirs
      return last_;
    }
    const auto [found, is_new] = numbers_.try_emplace(id, static_cast<std::uint32_t>(ids_.size()));
    if (is_new) {
      ids_.push_back(id);
    }
    return last_ = found->second;
  }

  const NamespaceId& operator[](std::uint32_t number) const noexcept { return ids_[number]; }

 private:
  std::vector<NamespaceId> ids_;                  // by number
  std::map<NamespaceId, std::uint32_t> numbers_;  // the other way
  std::uint32_t last_ = 0;                        // the number given last
};

}  // namespace kvbm
