// RoutedBlocks: which blocks instances will soon hold, because prompts were routed to them lately. Native
// implementation of kvbm/reference/routed_blocks.py, which says why; a table of fixed size, whatever is routed. One
// thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

// A prompt's blocks as the table knows them. Kept by its owner from prompt to prompt, so that asking allocates nothing.
struct Chain {
  std::vector<std::uint32_t> depths;  // where it is noted, ascending; the last is all of it
  std::vector<std::uint64_t> words;   // a number for each, of its hash and namespace
};

class RoutedBlocks {
 public:
  static constexpr std::size_t kWays = 4;
  static constexpr std::size_t kSets = 1U << 17;
  static constexpr std::uint32_t kExactBlocks = 256;  // the first of a chain, each of which is noted
  static constexpr std::uint32_t kMostBlocks = 65'536;

  // sets: a power of two; each has kWays entries.
  explicit RoutedBlocks(double hold_s, std::size_t sets = kSets);

  // What stands for a prompt's blocks.
  void chain(const NamespaceId& id, Bytes hashes, Chain& chain) const;

  // The same of the blocks behind `first` alone, of a prompt of so many. hashes: of those at the depths where it is
  // noted. Returns: false where there are not as many.
  bool marked(const NamespaceId& id, std::uint32_t first, std::uint32_t blocks, Bytes hashes, Chain& chain) const;

  // A number for a name that nobody outside can know. Callers and instances have numbers of two kinds.
  std::uint64_t salt_of(std::string_view kind, std::string_view name) const;

  // Whether anything is held.
  bool is_empty(double now_s) const noexcept { return now_s >= last_s_; }

  // How far an instance will soon have the chain. salt: the caller's and the instance's numbers, summed. held: how far
  // it has it now; never less is answered.
  std::uint32_t depth(double now_s, const Chain& chain, std::uint64_t salt, std::uint32_t held) const;

  // Asks memory for the first place that `depth` looks at.
  void ask(const Chain& chain, std::uint64_t salt, std::uint32_t held) const noexcept;

  // The prompt was sent to an instance.
  void note(double now_s, std::uint64_t caller, std::uint64_t instance, const Chain& chain);

  // How many are in the table.
  std::size_t entries(double now_s) const noexcept;

 private:
  // An entry: the word of a block, the caller's and the instance's numbers, mixed.
  struct Set {
    std::array<std::uint64_t, kWays> tags;    // 0 for none
    std::array<double, kWays> until_s;        // on the clock of its owner
    std::array<std::uint16_t, kWays> owners;  // callers
  };

  struct Free {
    void operator()(Set* sets) const noexcept { std::free(sets); }
  };

  std::size_t first_mark(const Chain& chain, std::uint32_t held) const noexcept;
  bool holds(double now_s, std::uint64_t word) const noexcept;
  // Asks memory for the place of a mixed word.
  void fetch(std::uint64_t word) const noexcept;
  // Whether the caller has used more than its share of the table.
  bool is_crowding(double now_s, std::uint16_t owner, std::size_t entries);

  const double hold_s_;     // for how long an entry counts
  const std::size_t mask_;  // sets, less one
  // The table; memory that nobody has written to costs nothing
  const std::unique_ptr<Set[], Free> sets_;
  const std::array<std::uint64_t, 3> odd_;                      // secret: nobody can aim at others' entries
  const std::array<std::uint64_t, 2> key_;                      // secret, of names
  double last_s_;                                               // nothing is held any more from then on
  double window_s_;                                             // when shares began to be counted
  std::unordered_map<std::uint16_t, std::size_t> used_;         // caller to entries noted in this window
  std::unordered_map<std::uint16_t, std::size_t> used_before_;  // and in the one before
};

}  // namespace kvbm
