// PeerPrices: what a candidate of a route would read from other instances, and how long that takes. Native
// implementation of kvbm/reference/peer_prices.py, to the last bit. Made once by a router and begun anew for each
// question. One thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvbm/fetch_times.hpp"

namespace kvbm {

// Distances beyond it count as it; MOST_DISTANCE of kvbm/catalog/routing/transfers.py
inline constexpr std::size_t kFarthest = 8;

// Where an instance stands, in numbers made of its words; ReadingInstance of kvbm/catalog/routing/router.py.
struct PeerPlace {
  std::vector<std::uint64_t> labels{};  // outermost first
  std::uint64_t host = 0;               // its machine; 0: it shares no memory
  bool has_tcp = false;                 // it reads and lends over TCP
};

struct PeerReader {
  PeerPlace place{};
  double block_bytes = 0;  // of a block; 0: not known, or it reads nothing
};

// LentRun of kvbm/core/answers.py.
struct PeerRun {
  std::string instance;     // who lends
  std::uint32_t begin = 0;  // first block
  std::uint32_t end = 0;    // behind the last
  PeerPlace place{};
  std::uint32_t slot = 0;  // of the router, or kNone of it
};

// What a transfer costs at one distance.
struct PeerLink {
  double latency_s = 0;
  double bytes_per_s = 0;
  double together_bytes_per_s = 0;  // as FetchSource has it
};

// LentPrefix of kvbm/catalog/routing/router.py.
struct LentBlocks {
  std::vector<PeerRun> runs{};                   // the deepest first
  std::array<PeerLink, kFarthest + 1> memory{};  // by distance
  std::array<PeerLink, kFarthest + 1> tcp{};     // the same
};

// What is read of a prompt, and from whom.
struct PeerPrice {
  bool has_peers = false;         // somebody lends what is needed
  std::uint32_t end = 0;          // behind the last block that is read; 0: none is
  double seconds = 0;             // until all are there
  std::uint32_t peer_blocks = 0;  // that come from peers
  std::int32_t peer = -1;         // place in `runs` of the one most come from, the nearest of equals; -1: none
};

class PeerPrices {
 public:
  // Blocks to price by until the next call; nullptr: none. They must live as long.
  void begin(const LentBlocks* lent);
  bool is_needed(std::uint32_t depth) const noexcept { return depth < deepest_; }

  // What a candidate would read that has `depth` blocks and reaches `reach` by its object pool.
  PeerPrice price(const PeerReader& reader, std::uint32_t slot, std::uint32_t depth, std::uint32_t reach,
                  const PeerLink& object, double block_compute_s);

 private:
  static constexpr std::size_t kPeers = kMostSources - 1;  // that are asked of at most
  static constexpr std::size_t kKept = 64;                 // sets of sources whose times are kept
  static constexpr std::uint32_t kLot = 64;                // LOT_BLOCKS of fetching.py
  static constexpr std::uint32_t kLots = 16;               // that a price looks at

  // One that could be read from; the order is that of preference.
  struct Usable {
    bool is_tcp;
    std::uint32_t apart;
    std::uint32_t end;
    std::uint32_t run;

    bool operator<(const Usable& other) const noexcept;
  };

  // What the times depend on.
  struct Key {
    std::uint32_t begin;
    double block_bytes;
    std::array<std::uint32_t, kMostSources> ends;
    std::array<std::uint32_t, kMostSources> links;  // which

    bool operator==(const Key&) const = default;
  };
  struct Known {
    Key key;
    std::vector<FetchLength> lengths;
  };

  std::size_t choose(const PeerReader& reader, std::uint32_t slot, std::uint32_t depth);
  const std::vector<FetchLength>& times(const Key& key, std::size_t count, const PeerLink& object);
  const PeerLink& link_of(std::uint32_t link, const PeerLink& object) const noexcept;

  const LentBlocks* lent_ = nullptr;  // what is lent
  std::uint32_t deepest_ = 0;         // behind the last block of all
  std::vector<Usable> usable_;        // to one candidate
  std::vector<Known> known_;          // of this question, in `kept_` of them
  std::size_t kept_ = 0;
  std::size_t next_ = 0;  // that gives way, when as many are kept as may be
};

}  // namespace kvbm
