#include "kvbm/segment_copy.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "kvbm/row_copy.hpp"
#include "python.hpp"

namespace kvbm::bindings {
namespace {

using Indexes = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstRows = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>;

// A table with the threads that copy through it.
struct Copies {
  SegmentTable table;  // the segments
  nb::object owner;    // keeps the copier
  RowCopier& copier;   // owner's
};

std::span<const std::int64_t> span_of(const Indexes& indexes) noexcept { return {indexes.data(), indexes.shape(0)}; }

void check_below(std::span<const std::int64_t> indexes, std::uint64_t end, const char* what) {
  for (const std::int64_t index : indexes) {
    if (index < 0 || static_cast<std::uint64_t>(index) >= end) {
      throw Error(ErrorCode::kLayout, std::string(what) + " " + std::to_string(index) + " wanted, there are " +
                                          std::to_string(end));
    }
  }
}

// The rows of a call, every index of it looked at. Throws Error: kLayout.
std::span<const std::int64_t> checked(const SegmentTable& table, const Indexes& slots, std::size_t row_count,
                                      std::size_t row_bytes, const std::optional<Indexes>& at) {
  check_below(span_of(slots), table.slots(), "slot");
  if (row_bytes != table.block_bytes()) {
    throw Error(ErrorCode::kLayout, "rows of " + std::to_string(row_bytes) + " bytes for blocks of " +
                                        std::to_string(table.block_bytes()));
  }
  const std::size_t named = at ? at->shape(0) : row_count;
  if (named != slots.shape(0)) {
    throw Error(ErrorCode::kLayout, std::to_string(slots.shape(0)) + " slots come with " + std::to_string(named) + " rows");
  }
  if (!at) {
    return {};
  }
  check_below(span_of(*at), row_count, "row");
  return span_of(*at);
}

Sums sums_of(std::unique_ptr<std::uint32_t[]> values, std::size_t count) {
  std::uint32_t* const data = values.get();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::uint32_t*>(array); });
  values.release();
  return Sums(data, {count}, owner);
}

}  // namespace

void bind_segment_copy(nb::module_& module, const SharedErrors& errors) {
  nb::class_<Copies>(module, "SegmentTable", "Blocks that lie in pieces ↔ contiguous rows; twin of ReferenceCopies.")
      .def(
          "__init__",
          [errors](Copies* self, const Indexes& addresses, const Indexes& strides, const Indexes& sizes,
                   std::uint64_t slots, nb::object copier) {
            translated(errors, [&] {
              const std::size_t count = addresses.shape(0);
              if (strides.shape(0) != count || sizes.shape(0) != count) {
                throw Error(ErrorCode::kLayout, "columns of segments differ in length");
              }
              std::vector<Segment> segments;
              for (std::size_t index = 0; index < count; ++index) {
                segments.push_back({static_cast<std::uint64_t>(addresses.data()[index]),
                                    static_cast<std::uint64_t>(strides.data()[index]),
                                    static_cast<std::uint64_t>(sizes.data()[index])});
              }
              auto& threads = nb::cast<RowCopier&>(copier);
              new (self) Copies{SegmentTable(std::move(segments), slots), std::move(copier), threads};
            });
          },
          nb::arg("addresses").noconvert(), nb::arg("strides").noconvert(), nb::arg("sizes").noconvert(),
          nb::arg("slots"), nb::arg("copier"))
      .def(
          "gather",
          [errors](const Copies& self, const Indexes& slots, const Rows& rows, const std::optional<Indexes>& at) {
            return translated(errors, [&] {
              const auto named = checked(self.table, slots, rows.shape(0), rows.shape(1), at);
              auto sums = std::make_unique<std::uint32_t[]>(slots.shape(0));
              {
                const nb::gil_scoped_release released;
                self.table.gather(self.copier, span_of(slots), rows.data(), named, sums.get());
              }
              return sums_of(std::move(sums), slots.shape(0));
            });
          },
          nb::arg("slots").noconvert(), nb::arg("rows").noconvert(), nb::arg("at").none().noconvert() = nb::none())
      .def(
          "scatter",
          [errors](const Copies& self, const Indexes& slots, const ConstRows& rows,
                   const std::optional<Indexes>& at) {
            translated(errors, [&] {
              const auto named = checked(self.table, slots, rows.shape(0), rows.shape(1), at);
              const nb::gil_scoped_release released;
              self.table.scatter(self.copier, span_of(slots), rows.data(), named);
            });
          },
          nb::arg("slots").noconvert(), nb::arg("rows").noconvert(), nb::arg("at").none().noconvert() = nb::none())
      .def(
          "checksums",
          [errors](const Copies& self, const Indexes& slots) {
            return translated(errors, [&] {
              check_below(span_of(slots), self.table.slots(), "slot");
              auto sums = std::make_unique<std::uint32_t[]>(slots.shape(0));
              {
                const nb::gil_scoped_release released;
                self.table.checksums(self.copier, span_of(slots), sums.get());
              }
              return sums_of(std::move(sums), slots.shape(0));
            });
          },
          nb::arg("slots").noconvert());
}

}  // namespace kvbm::bindings
