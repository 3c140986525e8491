// PythonRouter: a Router whose questions and answers are Python's. GIL held.
#pragma once

#include <vector>

#include "kvbm/router.hpp"
#include "python.hpp"

namespace kvbm::bindings {

class PythonRouter {
 public:
  // settings: RoutingSettings of kvbm.catalog.routing_cost.
  PythonRouter(const ClusterIndex& index, nb::handle settings);

  // pulse: LastHeartbeat of kvbm.catalog.liveness.
  void hear(std::string_view instance, nb::handle pulse);
  void forget(std::string_view instance) { router_.forget(instance); }
  // A Ranking of kvbm.catalog.routing. task: RoutingTask of it.
  nb::object route(double now_s, nb::handle task, nb::handle serving, nb::handle visible, std::size_t limit, bool is_noted);

  Router& router() noexcept { return router_; }

 private:
  Router router_;             // what ranks
  const nb::object ranking_;  // Ranking
  const nb::object ranked_;   // RankedInstance
  const nb::object names_;    // of its fields, in the order of `made`
  nb::object made(const RankedInstance& one) const;
};

}  // namespace kvbm::bindings
