#include "kvbm/event.hpp"

#include <cstring>

#include "python.hpp"

namespace kvbm::bindings {

void bind_event(nb::module_& module) {
  module.def(
      "residency_mix",
      [](std::uint8_t tier, const nb::bytes& block_hash) {
        if (block_hash.size() != kHashBytes) {
          throw nb::value_error("a sequence hash has 16 bytes");
        }
        return residency_mix(static_cast<Tier>(tier), static_cast<const std::uint8_t*>(block_hash.data()));
      },
      nb::arg("tier"), nb::arg("block_hash"),
      "64 well-mixed bits of one residency; a digest is the sum of them modulo 2**64.");
}

}  // namespace kvbm::bindings
