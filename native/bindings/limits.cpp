#include "kvbm/limits.hpp"

#include <nanobind/stl/vector.h>

#include "python.hpp"

namespace kvbm::bindings {

void bind_limits(nb::module_& module) {
  module.def("random_lines_ns", &random_lines_ns, nb::arg("bytes"), nb::arg("lines"), nb::arg("snapshots"),
             nb::arg("seed"), nb::call_guard<GilReleased>(),
             "Nanoseconds of each snapshot of reading random cache lines of so much memory, asked for at once.");
}

}  // namespace kvbm::bindings
