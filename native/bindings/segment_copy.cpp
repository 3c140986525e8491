#include "segment_copy.hpp"

#include <nanobind/stl/optional.h>

#include <vector>

#include "kvbm/row_copy.hpp"

namespace kvbm::bindings {

void bind_segment_copy(nb::module_& module, const SharedErrors& errors) {
  nb::class_<Copies>(module, "SegmentTable",
                     "Blocks that lie in pieces ↔ rows; native implementation of ReferenceCopies.")
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
              const auto named = checked(self.table, slots, rows, at);
              auto sums = std::make_unique<std::uint32_t[]>(slots.shape(0));
              {
                const GilReleased released;
                self.table.gather(self.copier, span_of(slots), block_rows<std::uint8_t>(rows), named, sums.get());
              }
              return sums_of(std::move(sums), slots.shape(0));
            });
          },
          nb::arg("slots").noconvert(), nb::arg("rows").noconvert(), nb::arg("at").none().noconvert() = nb::none())
      .def(
          "scatter",
          [errors](const Copies& self, const Indexes& slots, const ConstRows& rows, const std::optional<Indexes>& at) {
            translated(errors, [&] {
              const auto named = checked(self.table, slots, rows, at);
              const GilReleased released;
              self.table.scatter(self.copier, span_of(slots), block_rows<const std::uint8_t>(rows), named);
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
                const GilReleased released;
                self.table.checksums(self.copier, span_of(slots), sums.get());
              }
              return sums_of(std::move(sums), slots.shape(0));
            });
          },
          nb::arg("slots").noconvert());
}

}  // namespace kvbm::bindings
