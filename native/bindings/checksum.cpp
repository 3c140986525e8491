#include "kvbm/checksum.hpp"

#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

using Rows = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Parts = nb::ndarray<const std::uint32_t, nb::ndim<2>, nb::device::cpu>;
using Checksums = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>;

std::uint32_t checksum(nb::handle data, std::uint32_t initial) {
  const BufferView view(data);
  std::optional<GilReleased> released;
  if (view.bytes().size() > kReleaseGilBytes) {
    released.emplace();
  }
  return crc32c(view.bytes(), initial);
}

// An array that owns its values.
Checksums given_away(std::unique_ptr<std::uint32_t[]> values, std::size_t count) {
  std::uint32_t* const data = values.get();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::uint32_t*>(array); });
  values.release();
  return Checksums(data, {count}, owner);
}

Checksums checksum_rows(const Rows& rows) {
  const std::size_t count = rows.shape(0);
  auto values = std::make_unique<std::uint32_t[]>(count);
  {
    const GilReleased released;
    crc32c_rows(rows.data(), rows.shape(1), {values.get(), count});
  }
  return given_away(std::move(values), count);
}

// As str() has it.
std::string shown(const nb::object& value) { return nb::str(value).c_str(); }

Checksums join_checksums(nb::handle checksums, std::int64_t part_bytes) {
  Parts parts;
  if (!nb::try_cast(checksums, parts, false)) {
    throw Error(ErrorCode::kLayout, "checksums are " + shown(checksums.attr("dtype")) + " in " +
                                        shown(checksums.attr("ndim")) + " dimensions; give uint32 as (parts, blocks)");
  }
  if (part_bytes < 1) {
    throw Error(ErrorCode::kLayout, "part_bytes is " + std::to_string(part_bytes) + "; a part has at least 1 byte");
  }
  const std::size_t count = parts.shape(1);
  auto values = std::make_unique<std::uint32_t[]>(count);
  if (parts.shape(0) > 0) {
    const Crc32cCarrier carried(static_cast<std::size_t>(part_bytes));
    for (std::size_t part = 0; part < parts.shape(0); ++part) {
      const std::uint32_t* const of_part = parts.data() + static_cast<std::int64_t>(part) * parts.stride(0);
      for (std::size_t block = 0; block < count; ++block) {
        values[block] = carried(values[block]) ^ of_part[static_cast<std::int64_t>(block) * parts.stride(1)];
      }
    }
  }
  return given_away(std::move(values), count);
}

}  // namespace

void bind_checksum(nb::module_& module, const SharedErrors& errors) {
  module.def("crc32c", checksum, nb::arg("data"), nb::arg("initial") = 0,
             "The CRC-32C of a contiguous buffer. `initial` is the CRC of what came before, to continue it.");
  module.def("checksums", checksum_rows, nb::arg("rows").noconvert(),
             "The CRC-32C of each row of a C-contiguous (n, bytes) uint8 array, as a u32 array of n.");
  module.def(
      "joined_checksums",
      [errors](nb::handle checksums, std::int64_t part_bytes) {
        return translated(errors, [&] { return join_checksums(checksums, part_bytes); });
      },
      nb::arg("checksums"), nb::arg("part_bytes"),
      "CRC-32Cs of blocks in equal parts, from those of the parts: a (parts, n) u32 array gives one of n.");
}

}  // namespace kvbm::bindings
