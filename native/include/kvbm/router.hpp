// Router: which instance should serve a prompt, beside the index that knows who has it. Native implementation of
// kvbm/reference/router.py; costs are those of kvbm/catalog/routing/cost.py, to the last bit.
// One question looks at every candidate once, in flat arrays: at ten thousand of them that takes less than asking for
// it over a socket. One thread; the index is asked under its own lock.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvbm/cluster_index.hpp"
#include "kvbm/peer_prices.hpp"
#include "kvbm/routed_blocks.hpp"

namespace kvbm {

// What moving bytes costs; Link of kvbm/core/topology.py, with the weight of its tier.
struct WeighedLink {
  double latency_s = 0;    // for any bytes
  double bytes_per_s = 0;  // for each
  double weight = 1;       // of the result
};

// RoutingSettings of kvbm/config/settings.py, and the constants of routing/cost.py and routing/router.py.
struct RouterSettings {
  double work_weight = 0;
  double crowding_weight = 0;
  double own_crowding = 0;
  double balance_s = 0;
  double half_life_s = 0;
  double prior_s = 0;
  double hold_s = 0;
  double prefill_tokens_per_s = 0;
  double decode_request_s = 0;
  double batch_wait_s = 0;
  double heard_late_s = 0;                      // of routing.py
  double measured_within = 0;                   // of routing/cost.py
  double most_weight = 0;                       // the same
  std::array<double, 3> class_weights{};        // the same, by LatencyClass
  std::array<WeighedLink, kTierCount> links{};  // by tier
  WeighedLink between{};                        // from one instance to another
  std::int64_t most_tokens = 0;                 // that a route may add
  std::int64_t most_input_tokens = 0;           // of a prompt
  std::int64_t most_queued = 0;                 // that a heartbeat may report
  std::size_t most_callers = 0;                 // whose routes are remembered
};

// Each number of RoutingSettings: its name there, and where it stands here. The bindings read them by this table.
inline constexpr std::array<std::pair<const char*, double RouterSettings::*>, 10> kRoutingNumbers{{
    {"work_weight", &RouterSettings::work_weight},
    {"crowding_weight", &RouterSettings::crowding_weight},
    {"own_crowding", &RouterSettings::own_crowding},
    {"balance_s", &RouterSettings::balance_s},
    {"half_life_s", &RouterSettings::half_life_s},
    {"prior_s", &RouterSettings::prior_s},
    {"hold_s", &RouterSettings::hold_s},
    {"prefill_tokens_per_s", &RouterSettings::prefill_tokens_per_s},
    {"decode_request_s", &RouterSettings::decode_request_s},
    {"batch_wait_s", &RouterSettings::batch_wait_s},
}};

enum class LatencyClass : std::uint8_t { kInteractive = 0, kStandard = 1, kBatch = 2 };

// One prompt to route; RoutingTask of routing.py.
struct RouteTask {
  NamespaceId id;                                  // its namespace
  Bytes hashes;                                    // of its full blocks
  std::int64_t input_tokens;                       // of all of it
  std::int64_t block_tokens;                       // of a block, at least 1
  std::string caller;                              // who asks
  LatencyClass latency = LatencyClass::kStandard;  // what waits more
  double deadline_s = 0;                           // infinity for none
  bool is_decode = false;                          // it was prefilled elsewhere
};

// A route of another catalog; SharedRoute of routing.py.
struct SharedRoute {
  std::string_view caller;      // who asked there
  bool is_decode;               // the prompt was only decoded
  std::string_view instance;    // where it was sent
  std::int64_t input_tokens;    // of the prompt
  std::int64_t missing_tokens;  // that the instance must compute
  NamespaceId id;               // its namespace
  std::uint32_t first;          // blocks that the instance had, or would soon have
  std::uint32_t blocks;         // full ones of the prompt
  Bytes hashes;                 // of those behind `first` at which it is noted
};

// What the last heartbeat of an instance says of its load.
struct ReportedLoad {
  double at_s;                    // when it came
  std::int64_t queued_tokens;     // that wait there
  std::int64_t running_requests;  // that it decodes
  double prefill_tokens_per_s;    // as measured; 0 for none
  double queue_tokens_per_s;      // the same
};

// RankedInstance of kvbm/core/answers.py.
struct RankedInstance {
  std::uint32_t slot;
  double queueing_s;
  double recompute_s;
  double balance_s;
  double fetch_s;
  double ttft_s;
  std::uint32_t depth;
  std::int64_t missing_tokens;
  std::uint32_t fetch_blocks;
  std::uint32_t peer_blocks;  // of those, from other instances
  std::int32_t peer;          // place in LentBlocks::runs of the one most come from; -1: none
  bool is_admitted;
  bool is_suspect;

  double cost_s() const noexcept { return queueing_s + recompute_s + balance_s + fetch_s; }
};

// What prices depend on of candidates together; CandidateNumbers of routing.py.
struct CandidateNumbers {
  double least_s = std::numeric_limits<double>::infinity();  // the shortest wait
  double recent_s = 0;                                       // what was routed to them lately, all together
  std::int64_t count = 0;
};

// A set of instances, by the slots of one router.
class Candidates {
 public:
  std::size_t size() const noexcept { return slots_.size(); }
  bool has(std::uint32_t slot) const noexcept { return slot < at_.size() && at_[slot] != kAbsent; }

 private:
  friend class Router;
  static constexpr std::uint32_t kAbsent = 0xFFFFFFFF;

  std::vector<std::uint32_t> slots_;  // in no order
  std::vector<std::uint32_t> at_;     // by slot: where it is in slots_, or kAbsent
};

class Router {
 public:
  // The index must live as long as the router.
  Router(const ClusterIndex& index, RouterSettings settings);

  // A heartbeat came.
  void hear(std::string_view instance, const ReportedLoad& load);
  // Where an instance stands and how large its blocks are, so that it can read what others lend. The default: it reads
  // nothing.
  void reads(std::string_view instance, PeerReader reader);
  // Nothing is known of an instance, and nothing was routed to it. It must have left all sets of candidates: its slot
  // becomes another's.
  void forget(std::string_view instance);

  void add(Candidates& candidates, std::string_view instance);
  void remove(Candidates& candidates, std::string_view instance);

  // The best of the candidates, best first, how many others are worse, and what they are together.
  struct Ranking {
    const std::vector<RankedInstance>& best;
    std::size_t more;
    CandidateNumbers together;
  };
  // serving: a candidate is in one of these; visible: and in one of these, if it is given.
  // limit: at most so many are told. is_noted: the first is remembered as chosen, if it is admitted.
  // elsewhere: candidates that others rank; prices are those among all together. lent: what can be read from other
  // instances, if anything.
  Ranking route(double now_s, const RouteTask& task, std::span<const Candidates* const> serving,
                const std::vector<const Candidates*>* visible, std::size_t limit, bool is_noted = true,
                const CandidateNumbers& elsewhere = {}, LentBlocks* lent = nullptr);

  // Remembers another catalog's route as an own one. now_s: when it was made.
  // Returns: false where no heartbeat of the instance came, or the hashes are too few or too many; nothing is
  // remembered then.
  bool take(double now_s, const SharedRoute& route);

  // A number made of a name: the same everywhere.
  static std::uint64_t word_of(std::string_view name);
  // Callers whose routes are remembered.
  std::size_t callers() const noexcept { return callers_.size(); }
  const std::string& name(std::uint32_t slot) const { return slots_[slot].name; }

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;
  static constexpr double kMostRecent = 1e15;
  static constexpr double kSameTimeS = 0.05;              // routes so close to each other are remembered as one
  static constexpr std::size_t kRememberedRoutes = 1024;  // of an instance; older ones cannot matter for long
  // Between two looks at what is remembered of instances nobody asks for
  static constexpr double kLookS = 5.0;

  // One instance.
  struct Slot {
    std::string name;               // its id; empty when the slot is free
    double tokens_per_s = 0;        // as believed
    double queue_tokens_per_s = 0;  // the same, of its queue
    double at_s = 0;                // when its last heartbeat came
    std::int64_t queued = 0;        // tokens, as that says
    std::int64_t running = 0;       // requests, as that says
    bool is_heard = false;          // a heartbeat has come
    PeerReader reader{};            // what it can read from others
    std::uint64_t salt = 0;         // its number in `soon_`
    std::uint64_t word = 0;         // decides among equals
  };

  // What one caller has routed to one instance and is not known to have begun.
  struct InFlight {
    std::vector<std::pair<double, std::int64_t>> routes{};  // when, and missing tokens; oldest first

    void forget(double oldest_s);
  };

  // What one caller routed, by slot.
  struct Caller {
    std::uint64_t salt = 0;                            // its number in `soon_`
    double last_s = 0;                                 // when time last passed
    bool has_last = false;                             // it ever has
    std::vector<double> recent{};                      // tokens, decaying
    std::vector<std::unique_ptr<InFlight>> flights{};  // where there are any
    std::list<std::string>::iterator turn{};           // in `turns_`

    double recent_at(std::uint32_t slot) const noexcept { return slot < recent.size() ? recent[slot] : 0.0; }
    InFlight* flights_at(std::uint32_t slot) const noexcept {
      return slot < flights.size() ? flights[slot].get() : nullptr;
    }
    void decay(double now_s, double half_life_s);
    void drop(std::uint32_t slot) noexcept;
  };

  // What an instance has to do, and what is there of the prompt.
  struct Load {
    double queueing_s;
    double tokens_per_s;
    double recent_s;
    double recent;        // tokens
    std::uint32_t depth;  // it has, or will soon have
    std::uint32_t held;   // its place in `answer_`, or kNone
    std::int64_t running;
  };

  // A candidate's place in the order.
  struct Place {
    double cost_s;
    double recent;
    std::uint64_t tie;
    std::uint32_t at;  // which candidate
    bool is_admitted;

    bool operator<(const Place& other) const noexcept {
      if (is_admitted != other.is_admitted) {
        return is_admitted;
      }
      if (cost_s != other.cost_s) {
        return cost_s < other.cost_s;
      }
      return recent != other.recent ? recent < other.recent : tie < other.tie;
    }
  };

  struct SeenAs {
    std::uint32_t incarnation = 0;  // of the index's instance
    std::uint32_t slot = kNone;     // what it is here
    std::uint64_t names = 0;        // `names_made_` then
  };

  std::uint32_t slot_of(std::string_view instance);
  void believe(Slot& slot, const ReportedLoad& load);
  double believed(double measured, double expected) const noexcept;
  Caller& caller_of(double now_s, std::string_view who, bool is_decode);
  void shrink(Caller& caller, double now_s);
  void find_candidates(std::span<const Candidates* const> serving, const std::vector<const Candidates*>* visible);
  void find_holders(const RouteTask& task);
  static double queued(double now_s, const Slot& known, const InFlight* flights);
  Load load_of(double now_s, const RouteTask& task, Caller& caller, std::uint32_t slot, double& least_s) const;
  double work_weight(double own_s, LatencyClass latency) const noexcept;
  RankedInstance price(const RouteTask& task, std::size_t at);
  void price_beyond(const RouteTask& task, const Load& load, std::uint32_t reach, std::uint64_t object_bytes,
                    RankedInstance& one);
  std::uint64_t hbm_bytes(std::uint32_t slot) const;
  std::uint64_t tie(const RouteTask& task, const RankedInstance& one) const noexcept;
  // A prompt was sent to an instance; its blocks are in `chain_`.
  void note(double now_s, Caller& caller, std::uint32_t slot, std::int64_t input_tokens, std::int64_t missing_tokens);

  const ClusterIndex& index_;                             // who has what
  const RouterSettings settings_;                         // what the cost is made of
  RoutedBlocks soon_;                                     // what was routed where, by blocks
  std::vector<Slot> slots_;                               // instances
  std::vector<std::uint32_t> free_;                       // slots to use again
  std::unordered_map<std::string, std::uint32_t> names_;  // to slots
  std::uint64_t names_made_ = 1;                          // counts slots that were given a name
  std::unordered_map<std::string, Caller> callers_;       // by what they are remembered as
  std::list<std::string> turns_;                          // who has asked last is last
  double looked_s_ = 0;                                   // when the last look was
  bool has_looked_ = false;                               // there was one
  std::vector<SeenAs> seen_;                              // by the index's number

  // Of the question under way; kept, so that asking allocates nothing.
  Chain chain_;                                               // the prompt's blocks
  PrefixAnswer answer_;                                       // who has it
  std::vector<std::uint32_t> held_;                           // by slot: place in `answer_` + 1, or 0
  std::vector<std::uint32_t> numbers_;                        // of the index, where bytes of blocks are wanted
  std::vector<std::array<std::uint64_t, kTierCount>> bytes_;  // of a block, by place in `numbers_`
  PeerPrices peers_;                                          // what is read from other instances
  std::vector<std::uint32_t> bytes_at_;                       // by place in `answer_`: place in `bytes_` + 1, or 0
  std::vector<Load> loads_;                                   // by candidate
  std::vector<std::uint32_t> wanted_;                         // slots, by candidate
  std::vector<std::uint64_t> asked_;                          // by slot: the question it was made a candidate of last
  std::uint64_t questions_ = 0;                               // so far
  std::vector<Place> order_;                                  // candidates
  std::vector<RankedInstance> ranked_;                        // the answer
  double least_s_ = 0;                                        // the shortest wait
  double mean_recent_s_ = 0;                                  // of what was routed lately
};

}  // namespace kvbm
