#include "kvbm/row_copy.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>
#include <string>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

using Source = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Target = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Indexes = std::optional<nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;
using Room = std::optional<nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;
using Checksums = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>;

// What a call names of an array. Throws Error: kLayout, when a row's bytes are apart or an index is outside.
template <class Byte, class Array>
RowsOf<Byte> named(const Array& rows, const Indexes& at, const char* whose) {
  if (rows.shape(0) > 0 && rows.shape(1) > 1 && rows.stride(1) != 1) {
    throw Error(ErrorCode::kLayout, std::string(whose) + ": the bytes of a row lie " + std::to_string(rows.stride(1)) +
                                        " apart; they must lie side by side");
  }
  if (!at) {
    return {rows.data(), rows.stride(0), nullptr};
  }
  const std::int64_t* const indexes = at->data();
  for (std::size_t entry = 0; entry < at->shape(0); ++entry) {
    if (static_cast<std::uint64_t>(indexes[entry]) >= rows.shape(0)) {
      throw Error(ErrorCode::kLayout, std::string(whose) + ": row " + std::to_string(indexes[entry]) +
                                          " is wanted of " + std::to_string(rows.shape(0)));
    }
  }
  return {rows.data(), rows.stride(0), indexes};
}

template <class Array>
std::size_t count_of(const Array& rows, const Indexes& at) {
  return at ? at->shape(0) : rows.shape(0);
}

void copy_rows(RowCopier& copier, const Target& target, const Indexes& target_at, const Source& source,
               const Indexes& source_at, const Room& checksums) {
  const std::size_t count = count_of(source, source_at);
  const std::size_t row_bytes = source.shape(1);
  if (count_of(target, target_at) != count || target.shape(1) != row_bytes) {
    throw Error(ErrorCode::kLayout, std::to_string(count) + " rows of " + std::to_string(row_bytes) +
                                        " bytes cannot become " + std::to_string(count_of(target, target_at)) +
                                        " rows of " + std::to_string(target.shape(1)) + " bytes");
  }
  if (checksums && checksums->shape(0) != count) {
    throw Error(ErrorCode::kLayout, std::to_string(count) + " rows come with room for " +
                                        std::to_string(checksums->shape(0)) + " checksums");
  }
  const auto to = named<std::uint8_t>(target, target_at, "target");
  const auto from = named<const std::uint8_t>(source, source_at, "source");
  std::optional<GilReleased> released;
  if (count * row_bytes > kReleaseGilBytes) {
    released.emplace();
  }
  copier.copy(to, from, count, row_bytes, checksums ? std::span(checksums->data(), count) : std::span<std::uint32_t>());
}

Checksums checksum_rows(RowCopier& copier, const Source& rows, const Indexes& at) {
  const auto from = named<const std::uint8_t>(rows, at, "rows");
  const std::size_t count = count_of(rows, at);
  auto values = std::make_unique<std::uint32_t[]>(count);
  {
    const GilReleased released;
    copier.checksum(from, rows.shape(1), {values.get(), count});
  }
  std::uint32_t* const data = values.get();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::uint32_t*>(array); });
  values.release();
  return Checksums(data, {count}, owner);
}

}  // namespace

void bind_row_copy(nb::module_& module, const SharedErrors& errors) {
  nb::class_<RowCopier>(module, "RowCopier", "Copies and checksums of many rows, on threads of its own.")
      .def(nb::init<unsigned>(), nb::arg("threads") = 0)
      .def_prop_ro("threads", &RowCopier::threads, "Threads that work on one run, its caller among them.")
      .def_prop_ro("lacking", &RowCopier::lacking, "Threads that were wanted and that the system did not give.")
      .def(
          "copy_rows",
          [errors](RowCopier& copier, const Target& target, const Indexes& target_at, const Source& source,
                   const Indexes& source_at, const Room& checksums) {
            translated(errors, [&] { copy_rows(copier, target, target_at, source, source_at, checksums); });
          },
          nb::arg("target").noconvert(), nb::arg("target_at").noconvert().none(), nb::arg("source").noconvert(),
          nb::arg("source_at").noconvert().none(), nb::arg("checksums").noconvert() = nb::none(),
          "Copies row source_at[i] of source to row target_at[i] of target. Raises LayoutError before a byte has "
          "moved.")
      .def(
          "checksum_rows",
          [errors](RowCopier& copier, const Source& rows, const Indexes& at) {
            return translated(errors, [&] { return checksum_rows(copier, rows, at); });
          },
          nb::arg("rows").noconvert(), nb::arg("at").noconvert() = nb::none(),
          "The CRC-32C of each row that is named, as a u32 array. Raises LayoutError.");
}

}  // namespace kvbm::bindings
