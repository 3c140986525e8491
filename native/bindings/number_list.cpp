#include "kvbm/number_list.hpp"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

using Numbers = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple read(nb::handle text, std::size_t at, const Numbers& into) {
  NumbersRead found{};
  {
    const BufferView view(text);
    const Bytes bytes = view.bytes();
    const std::size_t begin = std::min(at, bytes.size());
    std::optional<GilReleased> released;
    if (bytes.size() - begin > kReleaseGilBytes) {
      released.emplace();
    }
    found = read_number_list(bytes, begin, {into.data(), into.shape(0)});
  }
  return nb::make_tuple(found.count, found.at);
}

}  // namespace

void bind_number_list(nb::module_& module) {
  module.def(
      "read_number_list", &read, nb::arg("text"), nb::arg("at"), nb::arg("into").noconvert(),
      "Reads numbers of a JSON list into a u32 array, as far as they are plain: how many, and where it stopped.");
}

}  // namespace kvbm::bindings
