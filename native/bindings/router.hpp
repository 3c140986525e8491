// PythonRouter: a Router whose questions and answers are Python's. GIL held.
#pragma once

#include <vector>

#include "answer_classes.hpp"
#include "kvbm/router.hpp"
#include "python.hpp"

namespace kvbm::bindings {

class PythonRouter {
 public:
  // settings: RoutingSettings of kvbm.config.settings.
  PythonRouter(const ClusterIndex& index, nb::handle settings);

  // pulse: LastHeartbeat of kvbm.catalog.members.liveness.
  void hear(std::string_view instance, nb::handle pulse);
  void forget(std::string_view instance) { router_.forget(instance); }
  // A Ranking of kvbm.catalog.routing.router. task: RoutingTask of it.
  nb::object route(double now_s, const nb::tuple& task, nb::handle serving, nb::handle visible, std::size_t limit,
                   bool is_noted, nb::handle elsewhere, nb::handle lent);
  // reader: Reader of it, or None.
  void reads(std::string_view instance, nb::handle reader);

  Router& router() noexcept { return router_; }

 private:
  Router router_;                  // what ranks
  const TupleClass ranking_;       // Ranking
  const TupleClass numbers_;       // CandidateNumbers
  const StructClass<14> ranked_;   // RankedInstance
  std::vector<nb::object> names_;  // of instances, by slot; only as good as their slot's name
  nb::object name_of(std::uint32_t slot);
  nb::object made(const RankedInstance& one, const LentBlocks& lent);
  const nb::str no_peer_{""};  // whom nothing is read from
};

}  // namespace kvbm::bindings
