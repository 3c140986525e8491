#include "kvbm/checksum.hpp"

#include <nanobind/ndarray.h>

#include <memory>
#include <optional>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

using Rows = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>;

std::uint32_t checksum(nb::handle data, std::uint32_t initial) {
  const BufferView view(data);
  std::optional<nb::gil_scoped_release> released;
  if (view.bytes().size() > kReleaseGilBytes) {
    released.emplace();
  }
  return crc32c(view.bytes(), initial);
}

Checksums checksum_rows(const Rows& rows) {
  const std::size_t count = rows.shape(0);
  auto values = std::make_unique<std::uint32_t[]>(count);
  {
    const nb::gil_scoped_release released;
    crc32c_rows(rows.data(), rows.shape(1), {values.get(), count});
  }
  std::uint32_t* const data = values.get();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::uint32_t*>(array); });
  values.release();
  return Checksums(data, {count}, owner);
}

}  // namespace

void bind_checksum(nb::module_& module) {
  module.def("crc32c", checksum, nb::arg("data"), nb::arg("initial") = 0,
             "The CRC-32C of a contiguous buffer. `initial` is the CRC of what came before, to continue it.");
  module.def("checksums", checksum_rows, nb::arg("rows").noconvert(),
             "The CRC-32C of each row of a C-contiguous (n, bytes) uint8 array, as a u32 array of n.");
}

}  // namespace kvbm::bindings
