#include "router.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <limits>
#include <string>

namespace kvbm::bindings {
namespace {

constexpr std::array<const char*, 12> kFields{"instance",       "cost_s",       "queueing_s", "recompute_s", "balance_s", "fetch_s",
                                              "depth",          "missing_tokens", "fetch_blocks", "suspect",   "ttft_s",    "admitted"};

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

WeighedLink link_of(nb::handle link, double weight) { return {real(link, "latency_s"), real(link, "bytes_per_s"), weight}; }

RouterSettings settings_of(nb::handle given) {
  const auto costs = nb::module_::import_("kvbm.catalog.routing_cost");
  const auto routing = nb::module_::import_("kvbm.catalog.routing");
  const auto answers = nb::module_::import_("kvbm.core.answers");
  RouterSettings settings;
  settings.work_weight = real(given, "work_weight");
  settings.crowding_weight = real(given, "crowding_weight");
  settings.own_crowding = real(given, "own_crowding");
  settings.balance_s = real(given, "balance_s");
  settings.half_life_s = real(given, "half_life_s");
  settings.prior_s = real(given, "prior_s");
  settings.hold_s = real(given, "hold_s");
  settings.prefill_tokens_per_s = real(given, "prefill_tokens_per_s");
  settings.decode_request_s = real(given, "decode_request_s");
  settings.batch_wait_s = real(given, "batch_wait_s");
  settings.heard_late_s = real(routing, "HEARD_LATE_S");
  settings.measured_within = real(costs, "MEASURED_WITHIN");
  settings.most_weight = real(costs, "MOST_WEIGHT");
  const nb::object weights = costs.attr("CLASS_WEIGHTS");
  settings.class_weights = {nb::cast<double>(weights["interactive"]), nb::cast<double>(weights["standard"]),
                            nb::cast<double>(weights["batch"])};
  for (const nb::handle tier : nb::module_::import_("kvbm.core.ids").attr("Tier")) {
    const nb::object weight = given.attr("tier_weights").attr("get")(tier.attr("name"), 1.0);
    const nb::object link = nb::module_::import_("kvbm.core.topology").attr("TIER_LINKS")[tier];
    settings.links[static_cast<std::size_t>(whole(tier))] = link_of(link, nb::cast<double>(nb::float_(weight)));
    settings.between = link_of(link, 1.0);  // the last one's: as far as a pool all can reach
  }
  settings.most_tokens = whole(answers.attr("MAX_TOKENS"));
  settings.most_input_tokens = whole(answers.attr("MAX_INPUT_TOKENS"));
  settings.most_queued = whole(routing.attr("MOST_QUEUED"));
  settings.most_callers = static_cast<std::size_t>(whole(routing.attr("MOST_CALLERS")));
  for (const nb::handle entry : given.attr("prefill_by_instance").attr("items")()) {
    settings.prefill_by_instance.emplace(nb::cast<std::string>(entry[0]), nb::cast<double>(nb::float_(entry[1])));
  }
  return settings;
}

LatencyClass latency_of(std::string_view name) {
  if (name == "interactive") {
    return LatencyClass::kInteractive;
  }
  return name == "batch" ? LatencyClass::kBatch : LatencyClass::kStandard;
}

RouteTask task_of(nb::handle given) {
  const auto id = nb::cast<nb::bytes>(given.attr("namespace"));
  const auto hashes = nb::cast<nb::bytes>(given.attr("hashes"));  // the task holds it
  RouteTask task{};
  if (id.size() != task.id.size() || hashes.size() % kHashBytes != 0) {
    throw Error(ErrorCode::kLayout, "a task has a namespace of 16 bytes and packed hashes of 16 each");
  }
  std::memcpy(task.id.data(), id.c_str(), id.size());
  task.hashes = {static_cast<const std::uint8_t*>(hashes.data()), hashes.size()};
  task.input_tokens = whole(given.attr("input_tokens"));
  task.block_tokens = whole(given.attr("block_tokens"));
  task.caller = nb::cast<std::string>(given.attr("caller"));
  task.latency = latency_of(nb::cast<std::string_view>(given.attr("latency")));
  const nb::object deadline = given.attr("deadline_s");
  task.deadline_s = deadline.is_none() ? std::numeric_limits<double>::infinity() : nb::cast<double>(nb::float_(deadline));
  task.is_decode = nb::cast<std::string_view>(given.attr("phase")) == "decode";
  return task;
}

std::vector<const Candidates*> groups_of(nb::handle given) {
  std::vector<const Candidates*> groups;
  for (const nb::handle group : given) {
    groups.push_back(nb::cast<const Candidates*>(group));
  }
  return groups;
}

nb::tuple fields() {
  nb::list names;
  for (const char* const name : kFields) {
    names.append(nb::str(name));
  }
  return nb::tuple(names);
}

}  // namespace

PythonRouter::PythonRouter(const ClusterIndex& index, nb::handle settings)
    : router_(index, settings_of(settings)), ranking_(nb::module_::import_("kvbm.catalog.routing").attr("Ranking")), ranked_(nb::module_::import_("kvbm.core.answers").attr("RankedInstance")), names_(fields()) {}

void PythonRouter::hear(std::string_view instance, nb::handle pulse) {
  const nb::object heartbeat = pulse.attr("heartbeat");
  router_.hear(instance, {.at_s = real(pulse, "at_s"),
                          .queued_tokens = whole(heartbeat.attr("queued_tokens")),
                          .running_requests = whole(heartbeat.attr("running_requests")),
                          .prefill_tokens_per_s = real(heartbeat, "prefill_tokens_per_s"),
                          .queue_tokens_per_s = real(heartbeat, "queue_tokens_per_s")});
}

nb::object PythonRouter::route(double now_s, nb::handle task, nb::handle serving, nb::handle visible, std::size_t limit, bool is_noted) {
  const std::vector<const Candidates*> groups = groups_of(serving);
  const std::vector<const Candidates*> seen = visible.is_none() ? std::vector<const Candidates*>() : groups_of(visible);
  const Router::Ranking ranking = router_.route(now_s, task_of(task), groups, visible.is_none() ? nullptr : &seen, limit, is_noted);
  nb::list best;
  for (const RankedInstance& one : ranking.best) {
    best.append(made(one));
  }
  return ranking_(best, ranking.more);
}

nb::object PythonRouter::made(const RankedInstance& one) const {
  const std::string& name = router_.name(one.slot);
  const std::array<nb::object, kFields.size()> values{
      nb::str(name.data(), name.size()), nb::float_(one.cost_s()),        nb::float_(one.queueing_s),  nb::float_(one.recompute_s),
      nb::float_(one.balance_s),         nb::float_(one.fetch_s),         nb::int_(one.depth),         nb::int_(one.missing_tokens),
      nb::int_(one.fetch_blocks),        nb::bool_(one.is_suspect),       nb::float_(one.ttft_s),      nb::bool_(one.is_admitted)};
  std::array<PyObject*, kFields.size()> arguments{};
  for (std::size_t at = 0; at < values.size(); ++at) {
    arguments[at] = values[at].ptr();
  }
  PyObject* const ranked = PyObject_Vectorcall(ranked_.ptr(), arguments.data(), 0, names_.ptr());
  if (ranked == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(ranked);
}

void bind_router(nb::module_& module, const SharedErrors& errors) {
  nb::class_<Candidates>(module, "Candidates", "A set of instances, for one router.").def("__len__", &Candidates::size);
  nb::class_<PythonRouter>(module, "Router", "Which instance should serve a prompt, as kvbm.catalog.routing.Router.")
      .def("hear", &PythonRouter::hear, nb::arg("instance"), nb::arg("pulse"))
      .def("forget", &PythonRouter::forget, nb::arg("instance"))
      .def("candidates", [](PythonRouter&) { return Candidates(); })
      .def("add", [](PythonRouter& self, Candidates& candidates, std::string_view name) { self.router().add(candidates, name); },
           nb::arg("candidates"), nb::arg("instance"))
      .def("remove", [](PythonRouter& self, Candidates& candidates, std::string_view name) { self.router().remove(candidates, name); },
           nb::arg("candidates"), nb::arg("instance"))
      .def(
          "route",
          [errors](PythonRouter& self, double now_s, nb::handle task, nb::handle serving, nb::handle visible, std::size_t limit,
                   bool noted) {
            return translated(errors, [&] { return self.route(now_s, task, serving, visible, limit, noted); });
          },
          nb::arg("now_s"), nb::arg("task"), nb::arg("serving"), nb::arg("visible").none(), nb::arg("limit"), nb::arg("noted") = true);
}

}  // namespace kvbm::bindings
