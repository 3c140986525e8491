#include "kvbm/router.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kvbm/sha256.hpp"

namespace kvbm {
namespace {

constexpr std::uint64_t kFactor = 0xD6E8FEB86659FD93;
// More than any prompt has; whoever asks may name any number
constexpr std::int64_t kMostBlockTokens = std::int64_t{1} << 40;
constexpr std::size_t kAhead = 16;  // candidates between asking memory for a place and looking at it

std::uint64_t mixed(std::uint64_t word) noexcept {
  word ^= word >> 32;
  word *= kFactor;
  return word ^ word >> 32;
}

constexpr std::uint64_t kAssumedBlockBytes = 2 << 20;  // as core/topology.py has it

double seconds(const WeighedLink& link, std::uint64_t blocks, std::uint64_t block_bytes) noexcept {
  const double size =
      static_cast<double>(blocks) * static_cast<double>(block_bytes != 0 ? block_bytes : kAssumedBlockBytes);
  return size != 0.0 ? (link.latency_s + size / link.bytes_per_s) * link.weight : 0.0;
}

}  // namespace

Router::Router(const ClusterIndex& index, RouterSettings settings)
    : index_(index), settings_(std::move(settings)), soon_(settings_.hold_s) {}

// -- instances --

std::uint64_t Router::word_of(std::string_view name) {
  Sha256 sum(sha256_compress());
  sum.update({reinterpret_cast<const std::uint8_t*>(name.data()), name.size()});
  std::uint64_t word = 0;
  std::memcpy(&word, sum.finish().data(), sizeof word);
  return word;
}

std::uint32_t Router::slot_of(std::string_view instance) {
  std::string name(instance);
  if (const auto known = names_.find(name); known != names_.end()) {
    return known->second;
  }
  std::uint32_t slot = static_cast<std::uint32_t>(slots_.size());
  if (free_.empty()) {
    slots_.emplace_back();
    held_.push_back(0);
  } else {
    slot = free_.back();
    free_.pop_back();
    slots_[slot] = {};
  }
  Slot& made = slots_[slot];
  made.tokens_per_s = made.queue_tokens_per_s = settings_.prefill_tokens_per_s;
  made.salt = soon_.salt_of("instance ", name);
  made.word = word_of(name);
  made.name = name;
  names_.emplace(std::move(name), slot);
  ++names_made_;
  return slot;
}

double Router::believed(double measured, double expected) const noexcept {
  if (!(measured > 0 && std::isfinite(measured))) {
    return expected;
  }
  return std::min(std::max(measured, expected / settings_.measured_within), expected * settings_.measured_within);
}

void Router::hear(std::string_view instance, const ReportedLoad& load) {
  Slot& slot = slots_[slot_of(instance)];
  slot.is_heard = true;
  slot.at_s = load.at_s;
  slot.queued = std::clamp<std::int64_t>(load.queued_tokens, 0, settings_.most_queued);
  slot.running = std::clamp<std::int64_t>(load.running_requests, 0, settings_.most_queued);
  slot.tokens_per_s = believed(load.prefill_tokens_per_s, settings_.prefill_tokens_per_s);
  slot.queue_tokens_per_s =
      believed(believed(load.queue_tokens_per_s, slot.tokens_per_s), settings_.prefill_tokens_per_s);
}

void Router::reads(std::string_view instance, PeerReader reader) {
  if (reader.block_bytes > 0 || names_.contains(std::string(instance))) {
    slots_[slot_of(instance)].reader = std::move(reader);
  }
}

void Router::forget(std::string_view instance) {
  const auto known = names_.find(std::string(instance));
  if (known == names_.end()) {
    return;
  }
  const std::uint32_t slot = known->second;
  for (auto& [name, caller] : callers_) {
    caller.drop(slot);
  }
  for (SeenAs& seen : seen_) {
    seen = seen.slot == slot ? SeenAs{} : seen;
  }
  names_.erase(known);
  slots_[slot] = {};
  free_.push_back(slot);
}

void Router::add(Candidates& candidates, std::string_view instance) {
  const std::uint32_t slot = slot_of(instance);
  if (slot >= candidates.at_.size()) {
    candidates.at_.resize(slots_.size(), Candidates::kAbsent);
  }
  if (candidates.at_[slot] == Candidates::kAbsent) {
    candidates.at_[slot] = static_cast<std::uint32_t>(candidates.slots_.size());
    candidates.slots_.push_back(slot);
  }
}

void Router::remove(Candidates& candidates, std::string_view instance) {
  const auto known = names_.find(std::string(instance));
  const std::uint32_t slot = known != names_.end() ? known->second : kNone;
  if (slot >= candidates.at_.size() || candidates.at_[slot] == Candidates::kAbsent) {
    return;
  }
  const std::uint32_t at = std::exchange(candidates.at_[slot], Candidates::kAbsent);
  const std::uint32_t last = candidates.slots_.back();
  candidates.slots_.pop_back();
  if (last != slot) {
    candidates.slots_[at] = last;
    candidates.at_[last] = at;
  }
}

// -- what was routed --

void Router::InFlight::forget(double oldest_s) {
  std::size_t gone = 0;
  while (gone < routes.size() && routes[gone].first <= oldest_s) {
    ++gone;
  }
  routes.erase(routes.begin(), routes.begin() + static_cast<std::ptrdiff_t>(gone));
}

void Router::Caller::decay(double now_s, double half_life_s) {
  if (has_last && now_s > last_s) {
    const double factor = std::pow(2.0, -(now_s - last_s) / half_life_s);
    for (double& tokens : recent) {
      tokens *= factor;
    }
  }
  last_s = has_last ? std::max(now_s, last_s) : now_s;
  has_last = true;
}

void Router::Caller::drop(std::uint32_t slot) noexcept {
  if (slot < recent.size()) {
    recent[slot] = 0.0;
    flights[slot].reset();
  }
}

void Router::shrink(Caller& caller, double now_s) {
  caller.decay(now_s, settings_.half_life_s);
  for (std::uint32_t slot = 0; slot < caller.recent.size(); ++slot) {
    if (InFlight* const flights = caller.flights[slot].get(); flights != nullptr) {
      flights->forget(now_s - settings_.hold_s);
      if (flights->routes.empty()) {
        caller.flights[slot].reset();
      }
    }
    if (caller.recent[slot] < 1.0 && caller.flights[slot] == nullptr) {
      caller.recent[slot] = 0.0;
    }
  }
  while (!caller.recent.empty() && caller.recent.back() == 0.0 && caller.flights.back() == nullptr) {
    caller.recent.pop_back();
    caller.flights.pop_back();
  }
}

// What a caller has routed, as it counts now. Prompts that are only decoded are remembered apart.
Router::Caller& Router::caller_of(double now_s, std::string_view who, bool is_decode) {
  std::string name(who);
  if (is_decode) {
    name.append("\0decode", 7);
  }
  auto known = callers_.find(name);
  if (known == callers_.end()) {
    known = callers_.emplace(name, Caller{}).first;
    known->second.salt = soon_.salt_of("caller ", who);
    known->second.turn = turns_.insert(turns_.end(), name);
    if (callers_.size() > settings_.most_callers) {
      callers_.erase(turns_.front());
      turns_.pop_front();
    }
  }
  Caller& caller = known->second;
  turns_.splice(turns_.end(), turns_, caller.turn);
  caller.decay(now_s, settings_.half_life_s);
  if (!has_looked_ || now_s >= looked_s_ + kLookS) {
    has_looked_ = true;
    looked_s_ = now_s;
    for (auto& [other_name, other] : callers_) {
      shrink(other, now_s);
    }
  }
  return caller;
}

// -- one question --

void Router::find_candidates(std::span<const Candidates* const> serving,
                             const std::vector<const Candidates*>* visible) {
  wanted_.clear();
  asked_.resize(slots_.size(), 0);
  ++questions_;
  for (const Candidates* const group : serving) {
    for (const std::uint32_t slot : group->slots_) {
      const auto has = [slot](const Candidates* one) { return one->has(slot); };
      if (std::exchange(asked_[slot], questions_) != questions_ && !slots_[slot].name.empty() &&
          (visible == nullptr || std::any_of(visible->begin(), visible->end(), has))) {
        wanted_.push_back(slot);
      }
    }
  }
}

Router::Ranking Router::route(double now_s, const RouteTask& asked, std::span<const Candidates* const> serving,
                              const std::vector<const Candidates*>* visible, std::size_t limit, bool is_noted,
                              const CandidateNumbers& elsewhere, LentBlocks* lent) {
  RouteTask task = asked;
  task.input_tokens = std::min(task.input_tokens, settings_.most_input_tokens);
  task.block_tokens = std::clamp<std::int64_t>(task.block_tokens, 1, kMostBlockTokens);
  Caller& caller = caller_of(now_s, task.caller, task.is_decode);
  soon_.chain(task.id, task.hashes, chain_);
  find_holders(task);
  find_candidates(serving, visible);
  loads_.clear();
  least_s_ = std::numeric_limits<double>::infinity();
  double recent_s = 0.0;
  for (const std::uint32_t slot : wanted_) {
    loads_.push_back(load_of(now_s, task, caller, slot, least_s_));
    recent_s += loads_.back().recent_s;
  }
  const CandidateNumbers together{least_s_, recent_s, static_cast<std::int64_t>(wanted_.size())};
  least_s_ = std::min(least_s_, elsewhere.least_s);
  mean_recent_s_ = (recent_s + elsewhere.recent_s) / static_cast<double>(together.count + elsewhere.count);
  if (!soon_.is_empty(now_s) && !chain_.depths.empty()) {
    for (std::size_t at = 0; at < wanted_.size() + kAhead; ++at) {
      if (at < wanted_.size() && loads_[at].recent > 0) {
        soon_.ask(chain_, caller.salt + slots_[wanted_[at]].salt, loads_[at].depth);
      }
      if (at >= kAhead && loads_[at - kAhead].recent > 0) {  // else the caller has sent nothing there
        Load& load = loads_[at - kAhead];
        load.depth = soon_.depth(now_s, chain_, caller.salt + slots_[wanted_[at - kAhead]].salt, load.depth);
      }
    }
  }
  if (lent != nullptr) {
    for (PeerRun& run : lent->runs) {
      const auto known = names_.find(run.instance);
      run.slot = known != names_.end() ? known->second : kNone;
    }
  }
  peers_.begin(task.is_decode ? nullptr : lent);
  order_.clear();
  for (std::size_t at = 0; at < wanted_.size(); ++at) {
    const RankedInstance one = price(task, at);
    order_.push_back(
        {one.cost_s(), loads_[at].recent, tie(task, one), static_cast<std::uint32_t>(at), one.is_admitted});
  }
  const std::size_t kept = std::min(limit, order_.size());
  std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept), order_.end());
  ranked_.clear();
  for (std::size_t at = 0; at < kept; ++at) {
    ranked_.push_back(price(task, order_[at].at));
    RankedInstance& one = ranked_.back();
    one.is_suspect = index_.is_suspect(slots_[one.slot].name);
  }
  if (is_noted && !ranked_.empty() && ranked_.front().is_admitted) {
    note(now_s, caller, ranked_.front().slot, task.input_tokens, ranked_.front().missing_tokens);
  }
  return {ranked_, order_.size() - kept, together};
}

bool Router::take(double now_s, const SharedRoute& route) {
  const auto known = names_.find(std::string(route.instance));
  if (known == names_.end() || !slots_[known->second].is_heard ||
      !soon_.marked(route.id, route.first, route.blocks, route.hashes, chain_)) {
    return false;
  }
  note(now_s, caller_of(now_s, route.caller, route.is_decode), known->second,
       std::max<std::int64_t>(0, route.input_tokens), std::max<std::int64_t>(0, route.missing_tokens));
  return true;
}

// Who has how much of the prompt, by slot, and how large their blocks are.
void Router::find_holders(const RouteTask& task) {
  std::fill(held_.begin(), held_.end(), 0);
  index_.prefixes(task.id, task.hashes, 0, answer_, nullptr, Told::kDepths);
  for (std::uint32_t at = 0; at < answer_.instances.size(); ++at) {
    const InstanceDepth& one = answer_.instances[at];
    if (one.instance >= seen_.size()) {
      seen_.resize(std::size_t{one.instance} + 1);
    }
    SeenAs& seen = seen_[one.instance];
    if (seen.incarnation != one.incarnation || (seen.slot == kNone && seen.names != names_made_)) {
      const auto known = names_.find(index_.instance_name(one.instance));
      seen = {one.incarnation, known != names_.end() ? known->second : kNone, names_made_};
    }
    if (seen.slot != kNone) {
      held_[seen.slot] = at + 1;
    }
  }
  numbers_.clear();
  bytes_at_.assign(answer_.instances.size(), 0);
  for (std::uint32_t at = 0; at < answer_.instances.size(); ++at) {
    const InstanceDepth& one = answer_.instances[at];
    if (task.is_decode || one.by_tier[0] != one.depth || one.reach != one.depth) {  // else nothing is to be brought
      numbers_.push_back(one.instance);
      bytes_at_[at] = static_cast<std::uint32_t>(numbers_.size());
    }
  }
  index_.block_bytes(numbers_, bytes_);
}

// Tokens that wait: as the heartbeat reported, with what was routed since, less what was worked off since; nothing is
// before it has come.
double Router::queued(double now_s, const Slot& known, const InFlight* flights) {
  double queued = known.is_heard ? static_cast<double>(known.queued) : 0.0;
  double at_s = known.is_heard ? known.at_s : -std::numeric_limits<double>::infinity();
  if (flights != nullptr) {
    for (const auto& [routed_s, missing] : flights->routes) {
      if (routed_s > at_s) {
        queued = std::max(0.0, queued - (routed_s - at_s) * known.queue_tokens_per_s);
        at_s = routed_s;
      }
      queued += static_cast<double>(missing);
    }
  }
  return std::max(0.0, queued - (now_s - at_s) * known.queue_tokens_per_s);
}

Router::Load Router::load_of(double now_s, const RouteTask& task, Caller& caller, std::uint32_t slot,
                             double& least_s) const {
  const Slot& known = slots_[slot];
  InFlight* const flights = caller.flights_at(slot);
  std::int64_t running = known.running;
  if (flights != nullptr) {
    flights->forget(known.is_heard ? known.at_s - settings_.heard_late_s : now_s - settings_.hold_s);
    running += task.is_decode ? static_cast<std::int64_t>(flights->routes.size()) : 0;
  }
  Load load{};
  load.queueing_s = queued(now_s, known, flights) / known.queue_tokens_per_s;
  load.tokens_per_s = known.tokens_per_s;
  load.recent = caller.recent_at(slot);
  load.recent_s = load.recent / known.tokens_per_s;
  load.running = running;
  load.held = held_[slot] != 0 ? held_[slot] - 1 : kNone;
  load.depth = load.held != kNone ? answer_.instances[load.held].depth : 0;
  least_s = std::min(least_s, load.queueing_s);
  return load;
}

double Router::work_weight(double own_s, LatencyClass latency) const noexcept {
  const double crowding_s = least_s_ + settings_.own_crowding * (own_s - least_s_);
  const double weight = settings_.work_weight + settings_.crowding_weight * crowding_s;
  return std::min(settings_.most_weight, weight * settings_.class_weights[static_cast<std::size_t>(latency)]);
}

// What it would read from peers and its object pool behind its own blocks, which it decides by its time alone.
void Router::price_beyond(const RouteTask& task, const Load& load, std::uint32_t reach, std::uint64_t object_bytes,
                          RankedInstance& one) {
  const WeighedLink& object = settings_.links[kTierCount - 1];
  const double block_tokens = static_cast<double>(task.block_tokens);
  if (peers_.is_needed(one.depth)) {
    const PeerPrice priced =
        peers_.price(slots_[one.slot].reader, one.slot, one.depth, reach, {object.latency_s, object.bytes_per_s, 0.0},
                     block_tokens / load.tokens_per_s);
    if (priced.end > one.depth) {
      one.fetch_s += priced.seconds;
      one.fetch_blocks += priced.end - one.depth;
      one.peer_blocks = priced.peer_blocks;
      one.peer = priced.peer;
      one.depth = priced.end;
    }
    if (priced.has_peers) {
      return;
    }
  }
  if (reach > one.depth) {
    const std::uint32_t beyond = reach - one.depth;
    const double pool_s = seconds(object, beyond, object_bytes);
    if (task.is_decode || pool_s < static_cast<double>(beyond) * block_tokens / load.tokens_per_s) {
      one.fetch_s += pool_s;
      one.fetch_blocks += beyond;
      one.depth = reach;
    }
  }
}

// What serving the prompt at a candidate costs.
RankedInstance Router::price(const RouteTask& task, std::size_t at) {
  const Load& load = loads_[at];
  RankedInstance one{};
  one.slot = wanted_[at];
  one.depth = load.depth;
  one.peer = -1;
  std::uint32_t reach = one.depth;
  std::array<std::uint64_t, kTierCount> bytes{};
  if (load.held != kNone) {
    const InstanceDepth& held = answer_.instances[load.held];
    if (bytes_at_[load.held] != 0) {
      bytes = bytes_[bytes_at_[load.held] - 1];
    }
    for (std::size_t tier = 1; tier < kTierCount; ++tier) {
      one.fetch_s += seconds(settings_.links[tier], held.by_tier[tier], bytes[tier]);
      one.fetch_blocks += held.by_tier[tier];
    }
    reach = std::max(reach, held.reach);
  }
  if (reach > one.depth || peers_.is_needed(one.depth)) {
    price_beyond(task, load, reach, bytes[kTierCount - 1], one);
  }
  one.missing_tokens = std::max<std::int64_t>(0, task.input_tokens - one.depth * task.block_tokens);
  if (task.is_decode) {  // what neither it nor its pools have is brought from where it was prefilled
    const auto brought = static_cast<std::uint32_t>((one.missing_tokens + task.block_tokens - 1) / task.block_tokens);
    one.fetch_s += seconds(settings_.between, brought, load.held != kNone ? bytes[0] : hbm_bytes(one.slot));
    one.fetch_blocks += brought;
    one.missing_tokens = 0;
    one.queueing_s = settings_.decode_request_s * static_cast<double>(load.running);
    one.ttft_s = one.queueing_s + one.fetch_s;
  } else {
    const double compute_s = static_cast<double>(one.missing_tokens) / load.tokens_per_s;
    one.queueing_s = load.queueing_s;
    one.recompute_s = work_weight(load.queueing_s, task.latency) * compute_s;
    one.ttft_s = load.queueing_s + compute_s + one.fetch_s;
  }
  const double over_s = load.recent_s - mean_recent_s_;
  one.balance_s = settings_.balance_s * over_s / (mean_recent_s_ + settings_.prior_s);
  one.is_admitted =
      !(one.ttft_s > task.deadline_s) && (task.latency != LatencyClass::kBatch || least_s_ <= settings_.batch_wait_s);
  return one;
}

std::uint64_t Router::hbm_bytes(std::uint32_t slot) const {
  const std::uint32_t number = index_.find_instance(slots_[slot].name);
  if (number == ClusterIndex::kNone) {
    return 0;
  }
  thread_local std::vector<std::array<std::uint64_t, kTierCount>> bytes;
  index_.block_bytes({&number, 1}, bytes);
  return bytes.front()[0];
}

// Equal costs are decided by content: the same prompt goes to the same instance, different ones spread.
std::uint64_t Router::tie(const RouteTask& task, const RankedInstance& one) const noexcept {
  std::array<std::uint64_t, 2> block{};
  if (!task.hashes.empty()) {
    const std::size_t at = one.depth * kHashBytes;
    std::memcpy(block.data(), task.hashes.data() + (at < task.hashes.size() ? at : 0), sizeof block);
  }
  return mixed(block[0] + mixed(block[1] + slots_[one.slot].word));
}

void Router::note(double now_s, Caller& caller, std::uint32_t slot, std::int64_t input_tokens,
                  std::int64_t missing_tokens) {
  if (slot >= caller.recent.size()) {
    caller.recent.resize(std::size_t{slot} + 1, 0.0);
    caller.flights.resize(caller.recent.size());
  }
  const auto missing = std::min(missing_tokens, settings_.most_tokens);
  double& recent = caller.recent[slot];
  recent = std::min(recent + static_cast<double>(std::min(input_tokens, settings_.most_tokens)), kMostRecent);
  std::unique_ptr<InFlight>& flights = caller.flights[slot];
  if (flights == nullptr) {
    flights = std::make_unique<InFlight>();
  }
  if (!flights->routes.empty() && now_s - flights->routes.back().first < kSameTimeS) {
    flights->routes.back().second += missing;
  } else {
    flights->routes.emplace_back(now_s, missing);
    if (flights->routes.size() > kRememberedRoutes) {
      flights->forget(flights->routes.front().first);
    }
  }
  soon_.note(now_s, caller.salt, slots_[slot].salt, chain_);
}

}  // namespace kvbm
