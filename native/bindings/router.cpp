#include "router.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>

namespace kvbm::bindings {
namespace {

double real(nb::handle owner, const char* name) { return nb::cast<double>(nb::float_(owner.attr(name))); }

// As far as 64 bits can say it.
std::int64_t whole(nb::handle value) {
  int overflow = 0;
  const long long narrow = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (narrow == -1 && overflow == 0 && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  if (overflow != 0) {
    return overflow > 0 ? std::numeric_limits<std::int64_t>::max() : std::numeric_limits<std::int64_t>::min();
  }
  return narrow;
}

WeighedLink link_of(nb::handle link, double weight) {
  return {real(link, "latency_s"), real(link, "bytes_per_s"), weight};
}

RouterSettings settings_of(nb::handle given) {
  const auto costs = nb::module_::import_("kvbm.catalog.routing.cost");
  const auto routing = nb::module_::import_("kvbm.catalog.routing.router");
  const auto answers = nb::module_::import_("kvbm.core.answers");
  RouterSettings settings;
  for (const auto& [name, number] : kRoutingNumbers) {
    settings.*number = real(given, name);
  }
  settings.heard_late_s = real(routing, "HEARD_LATE_S");
  settings.measured_within = real(costs, "MEASURED_WITHIN");
  settings.most_weight = real(costs, "MOST_WEIGHT");
  const nb::object weights = costs.attr("CLASS_WEIGHTS");
  settings.class_weights = {nb::cast<double>(weights["interactive"]), nb::cast<double>(weights["standard"]),
                            nb::cast<double>(weights["batch"])};
  for (const nb::handle tier : nb::module_::import_("kvbm.core.ids").attr("Tier")) {
    const nb::object name = tier.attr("name").attr("lower")();
    const nb::object weight = nb::getattr(given.attr("tier_weights"), name, nb::float_(1.0));  // HBM has none
    const nb::object link = nb::module_::import_("kvbm.core.topology").attr("TIER_LINKS")[tier];
    settings.links[static_cast<std::size_t>(whole(tier))] = link_of(link, nb::cast<double>(nb::float_(weight)));
    settings.between = link_of(link, 1.0);  // the last one's: as far as a pool all can reach
  }
  settings.most_tokens = whole(answers.attr("MAX_TOKENS"));
  settings.most_input_tokens = whole(answers.attr("MAX_INPUT_TOKENS"));
  settings.most_queued = whole(routing.attr("MOST_QUEUED"));
  settings.most_callers = static_cast<std::size_t>(whole(routing.attr("MOST_CALLERS")));
  return settings;
}

LatencyClass latency_of(std::string_view name) {
  if (name == "interactive") {
    return LatencyClass::kInteractive;
  }
  return name == "batch" ? LatencyClass::kBatch : LatencyClass::kStandard;
}

// A RoutingTask, whose fields are taken by their place.
RouteTask task_of(const nb::tuple& given) {
  constexpr std::size_t kTaskFields = 8;
  if (given.size() != kTaskFields) {
    throw Error(ErrorCode::kLayout, "a task has 8 fields");
  }
  const auto id = nb::cast<nb::bytes>(given[0]);
  const auto hashes = nb::cast<nb::bytes>(given[1]);  // the task holds it
  RouteTask task{};
  if (id.size() != task.id.size() || hashes.size() % kHashBytes != 0) {
    throw Error(ErrorCode::kLayout, "a task has a namespace of 16 bytes and packed hashes of 16 each");
  }
  std::memcpy(task.id.data(), id.c_str(), id.size());
  task.hashes = {static_cast<const std::uint8_t*>(hashes.data()), hashes.size()};
  task.input_tokens = whole(given[2]);
  task.block_tokens = whole(given[3]);
  task.caller = nb::cast<std::string>(given[4]);
  task.latency = latency_of(nb::cast<std::string_view>(given[5]));
  const nb::object deadline = given[6];
  task.deadline_s =
      deadline.is_none() ? std::numeric_limits<double>::infinity() : nb::cast<double>(nb::float_(deadline));
  task.is_decode = nb::cast<std::string_view>(given[7]) == "decode";
  return task;
}

SharedRoute shared_of(nb::handle given) {
  const auto id = nb::cast<nb::bytes>(given.attr("namespace"));
  const auto hashes = nb::cast<nb::bytes>(given.attr("hashes"));  // the route holds it, and its names
  const std::int64_t first = whole(given.attr("first"));
  const std::int64_t blocks = whole(given.attr("blocks"));
  SharedRoute route{};
  if (id.size() != route.id.size() || first < 0 || blocks < 0 || blocks > RoutedBlocks::kMostBlocks) {
    throw Error(ErrorCode::kLayout, "a route has a namespace of 16 bytes, and at most 65,536 blocks");
  }
  std::memcpy(route.id.data(), id.c_str(), id.size());
  route.hashes = {static_cast<const std::uint8_t*>(hashes.data()), hashes.size()};
  route.first = static_cast<std::uint32_t>(std::min(first, blocks));
  route.blocks = static_cast<std::uint32_t>(blocks);
  route.caller = nb::cast<std::string_view>(given.attr("caller"));
  route.is_decode = nb::cast<bool>(given.attr("is_decode"));
  route.instance = nb::cast<std::string_view>(given.attr("instance"));
  route.input_tokens = whole(given.attr("input_tokens"));
  route.missing_tokens = whole(given.attr("missing_tokens"));
  return route;
}

PeerPlace place_of(nb::handle labels, nb::handle host, nb::handle has_tcp) {
  const auto word_of = [](nb::handle text) { return Router::word_of(nb::cast<std::string_view>(text)); };
  PeerPlace place{.labels = {}, .host = nb::len(host) != 0 ? word_of(host) : 0, .has_tcp = nb::cast<bool>(has_tcp)};
  for (const nb::handle label : labels) {
    place.labels.push_back(word_of(label));
  }
  return place;
}

// What instances lend, and what reading it costs: a Lent.
LentBlocks lent_of(nb::handle given) {
  LentBlocks lent;
  for (const nb::handle run : given.attr("runs")) {
    const auto block = [&run](const char* name) {
      return static_cast<std::uint32_t>(std::clamp<std::int64_t>(whole(run.attr(name)), 0, RoutedBlocks::kMostBlocks));
    };
    lent.runs.push_back({.instance = nb::cast<std::string>(run.attr("instance")),
                         .begin = block("begin"),
                         .end = block("end"),
                         .place = place_of(run.attr("place"), run.attr("host"), run.attr("tcp")),
                         .slot = 0});
  }
  const auto take = [](nb::handle links, std::array<PeerLink, kFarthest + 1>& taken) {
    if (nb::len(links) != taken.size()) {
      throw Error(ErrorCode::kLayout, "there is a link for each distance, 0 to 8");
    }
    std::size_t at = 0;
    for (const nb::handle link : links) {
      taken[at++] = {real(link, "latency_s"), real(link, "bytes_per_s"), real(link, "together_bytes_per_s")};
    }
  };
  take(given.attr("memory"), lent.memory);
  take(given.attr("tcp"), lent.tcp);
  return lent;
}

std::vector<const Candidates*> groups_of(nb::handle given) {
  std::vector<const Candidates*> groups;
  for (const nb::handle group : given) {
    groups.push_back(nb::cast<const Candidates*>(group));
  }
  return groups;
}

}  // namespace

PythonRouter::PythonRouter(const ClusterIndex& index, nb::handle settings)
    : router_(index, settings_of(settings)),
      ranking_(nb::module_::import_("kvbm.catalog.routing.router"), "Ranking"),
      numbers_(nb::module_::import_("kvbm.catalog.routing.router"), "CandidateNumbers"),
      ranked_(nb::module_::import_("kvbm.core.answers"), "RankedInstance",
              {"instance", "cost_s", "queueing_s", "recompute_s", "balance_s", "fetch_s", "depth", "missing_tokens",
               "fetch_blocks", "suspect", "ttft_s", "admitted", "peer", "peer_blocks"}) {}

void PythonRouter::hear(std::string_view instance, nb::handle pulse) {
  const nb::object heartbeat = pulse.attr("heartbeat");
  router_.hear(instance, {.at_s = real(pulse, "at_s"),
                          .queued_tokens = whole(heartbeat.attr("queued_tokens")),
                          .running_requests = whole(heartbeat.attr("running_requests")),
                          .prefill_tokens_per_s = real(heartbeat, "prefill_tokens_per_s"),
                          .queue_tokens_per_s = real(heartbeat, "queue_tokens_per_s")});
}

void PythonRouter::reads(std::string_view instance, nb::handle reader) {
  PeerReader taken{};
  if (!reader.is_none()) {
    taken = {.place = place_of(reader.attr("place"), reader.attr("host"), reader.attr("tcp")),
             .block_bytes = static_cast<double>(whole(reader.attr("block_bytes")))};
  }
  router_.reads(instance, std::move(taken));
}

nb::object PythonRouter::route(double now_s, const nb::tuple& task, nb::handle serving, nb::handle visible,
                               std::size_t limit, bool is_noted, nb::handle elsewhere, nb::handle lent) {
  const std::vector<const Candidates*> groups = groups_of(serving);
  const std::vector<const Candidates*> seen = visible.is_none() ? std::vector<const Candidates*>() : groups_of(visible);
  CandidateNumbers others;
  if (!elsewhere.is_none()) {
    const std::int64_t count = whole(elsewhere.attr("candidates"));
    if (count > 0) {
      others = {real(elsewhere, "least_s"), real(elsewhere, "recent_s"), count};
    }
  }
  LentBlocks blocks;
  if (!lent.is_none()) {
    blocks = lent_of(lent);
  }
  const Router::Ranking ranking = router_.route(now_s, task_of(task), groups, visible.is_none() ? nullptr : &seen,
                                                limit, is_noted, others, lent.is_none() ? nullptr : &blocks);
  nb::list best;
  for (const RankedInstance& one : ranking.best) {
    best.append(made(one, blocks));
  }
  const CandidateNumbers& own = ranking.together;
  nb::object together = numbers_(PyFloat_FromDouble(own.count > 0 ? own.least_s : 0.0),
                                 PyFloat_FromDouble(own.recent_s), PyLong_FromLongLong(own.count), PyTuple_New(0));
  return ranking_(best.release().ptr(), PyLong_FromSize_t(ranking.more), together.release().ptr());
}

// The string of an instance's name: the same one for all answers, while the slot is its.
nb::object PythonRouter::name_of(std::uint32_t slot) {
  const std::string& name = router_.name(slot);
  if (slot >= names_.size()) {
    names_.resize(std::size_t{slot} + 1);
  }
  nb::object& known = names_[slot];
  if (!known.is_valid() || utf8(known, "an instance") != name) {
    known = nb::str(name.data(), name.size());
  }
  return known;
}

nb::object PythonRouter::made(const RankedInstance& one, const LentBlocks& lent) {
  const std::string_view peer =
      one.peer >= 0 ? std::string_view(lent.runs[static_cast<std::size_t>(one.peer)].instance) : std::string_view();
  return ranked_(name_of(one.slot).release().ptr(), PyFloat_FromDouble(one.cost_s()),
                 PyFloat_FromDouble(one.queueing_s), PyFloat_FromDouble(one.recompute_s),
                 PyFloat_FromDouble(one.balance_s), PyFloat_FromDouble(one.fetch_s), PyLong_FromUnsignedLong(one.depth),
                 PyLong_FromLongLong(one.missing_tokens), PyLong_FromUnsignedLong(one.fetch_blocks),
                 Py_NewRef(one.is_suspect ? Py_True : Py_False), PyFloat_FromDouble(one.ttft_s),
                 Py_NewRef(one.is_admitted ? Py_True : Py_False),
                 peer.empty() ? Py_NewRef(no_peer_.ptr()) : nb::str(peer.data(), peer.size()).release().ptr(),
                 PyLong_FromUnsignedLong(one.peer_blocks));
}

void bind_router(nb::module_& module, const SharedErrors& errors) {
  nb::class_<Candidates>(module, "Candidates", "A set of instances, for one router.").def("__len__", &Candidates::size);
  nb::class_<PythonRouter>(module, "Router",
                           "Which instance should serve a prompt, as kvbm.catalog.routing.router.Router.")
      .def("hear", &PythonRouter::hear, nb::arg("instance"), nb::arg("pulse"))
      .def("reads", &PythonRouter::reads, nb::arg("instance"), nb::arg("reader").none())
      .def("forget", &PythonRouter::forget, nb::arg("instance"))
      .def("candidates", [](PythonRouter&) { return Candidates(); })
      .def(
          "add",
          [](PythonRouter& self, Candidates& candidates, std::string_view name) {
            self.router().add(candidates, name);
          },
          nb::arg("candidates"), nb::arg("instance"))
      .def(
          "remove",
          [](PythonRouter& self, Candidates& candidates, std::string_view name) {
            self.router().remove(candidates, name);
          },
          nb::arg("candidates"), nb::arg("instance"))
      .def(
          "take",
          [errors](PythonRouter& self, double now_s, nb::handle route) {
            return translated(errors, [&] { return self.router().take(now_s, shared_of(route)); });
          },
          nb::arg("now_s"), nb::arg("route"))
      .def(
          "route",
          [errors](PythonRouter& self, double now_s, const nb::tuple& task, nb::handle serving, nb::handle visible,
                   std::size_t limit, bool noted, nb::handle elsewhere, nb::handle lent) {
            return translated(errors,
                              [&] { return self.route(now_s, task, serving, visible, limit, noted, elsewhere, lent); });
          },
          nb::arg("now_s"), nb::arg("task"), nb::arg("serving"), nb::arg("visible").none(), nb::arg("limit"),
          nb::arg("noted") = true, nb::arg("elsewhere") = nb::none(), nb::arg("lent") = nb::none());
}

}  // namespace kvbm::bindings
