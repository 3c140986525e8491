#include "kvbm/columns.hpp"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "arrays.hpp"
#include "python.hpp"

namespace kvbm::bindings {
namespace {

// What columns are made of in Python. Made once at import, immutable; GIL held.
struct ColumnClasses {
  nb::module_ columns = nb::module_::import_("kvbm.core.columns");
  nb::object frame_columns = columns.attr("FrameColumns");
  nb::object frame_row = columns.attr("FRAME_ROW");
  nb::object event_row = columns.attr("EVENT_ROW");
  nb::object decode_started = nb::module_::import_("kvbm.core.codec").attr("decode_started");
};

using SharedColumnClasses = std::shared_ptr<const ColumnClasses>;

nb::object python_columns(FrameColumns columns, const nb::tuple& starts, const ColumnClasses& classes) {
  nb::list names;
  for (const std::string_view name : columns.names) {
    names.append(nb::str(name.data(), name.size()));
  }
  auto namespaces = std::make_unique_for_overwrite<std::uint8_t[]>(columns.namespaces.size() * kHashBytes);
  for (std::size_t row = 0; row < columns.namespaces.size(); ++row) {
    std::ranges::copy(columns.namespaces[row], namespaces.get() + row * kHashBytes);
  }
  const std::size_t namespace_count = columns.namespaces.size();
  return classes.frame_columns(records_over(std::move(columns.frames), classes.frame_row),
                               records_over(std::move(columns.events), classes.event_row),
                               rows_over(std::move(columns.hashes), {columns.blocks, kHashBytes}),
                               rows_over(std::move(columns.slots), {columns.blocks}),
                               rows_over(std::move(namespaces), {namespace_count, kHashBytes}), nb::tuple(names),
                               starts);
}

nb::object decode(Bytes data, std::size_t at, std::optional<std::size_t> limit, const ColumnClasses& classes) {
  FrameColumns columns;
  std::size_t end = 0;
  std::optional<Error> refusal;
  {
    std::optional<GilReleased> released;
    if (data.size() - std::min(at, data.size()) > kReleaseGilBytes) {
      released.emplace();
    }
    try {
      end = decode_columns(data, at, limit.value_or(std::numeric_limits<std::size_t>::max()), columns);
    } catch (const Error& error) {
      refusal = error;
    }
  }
  nb::list starts;
  for (const FrameColumns::Start& start : columns.starts) {  // they lie before the fault, so theirs comes first
    starts.append(classes.decode_started(copy_bytes(start.blob), start.at));
  }
  if (refusal) {
    throw Error(*refusal);
  }
  return nb::make_tuple(python_columns(std::move(columns), nb::tuple(starts), classes), end);
}

}  // namespace

void bind_columns(nb::module_& module, const SharedErrors& errors) {
  const auto classes = std::make_shared<const ColumnClasses>();
  module.def(
      "decode_columns",
      [errors, classes](nb::handle data, std::size_t at, std::optional<std::size_t> limit) {
        return translated(errors, [&] { return decode(BufferView(data).bytes(), at, limit, *classes); });
      },
      nb::arg("data"), nb::arg("at") = 0, nb::arg("limit") = nb::none(),
      "The frames from a position on as columns, and the position after them. Raises as kvbm.core.codec.decode_frame.");
}

}  // namespace kvbm::bindings
