// What the bindings of segment_copy.hpp and copy_queue.hpp share: a table with its threads, and a call's arrays, looked
// at.
#pragma once

#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kvbm/segment_copy.hpp"
#include "python.hpp"

namespace kvbm::bindings {

using Indexes = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using ConstRows = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Sums = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>;

// A table with the threads that copy through it.
struct Copies {
  SegmentTable table;  // the segments
  nb::object owner;    // keeps the copier
  RowCopier& copier;   // owner's
};

inline std::span<const std::int64_t> span_of(const Indexes& indexes) noexcept {
  return {indexes.data(), indexes.shape(0)};
}

inline void check_below(std::span<const std::int64_t> indexes, std::uint64_t end, const char* what) {
  for (const std::int64_t index : indexes) {
    if (index < 0 || static_cast<std::uint64_t>(index) >= end) {
      throw Error(ErrorCode::kLayout,
                  std::string(what) + " " + std::to_string(index) + " wanted, there are " + std::to_string(end));
    }
  }
}

// The rows of a call, every index of it looked at. Throws Error: kLayout.
template <class Array>
std::span<const std::int64_t> checked(const SegmentTable& table, const Indexes& slots, const Array& rows,
                                      const std::optional<Indexes>& at) {
  check_below(span_of(slots), table.slots(), "slot");
  const std::size_t row_count = rows.shape(0);
  if (rows.shape(1) != table.block_bytes()) {
    throw Error(ErrorCode::kLayout, "rows of " + std::to_string(rows.shape(1)) + " bytes for blocks of " +
                                        std::to_string(table.block_bytes()));
  }
  const auto row_bytes = static_cast<std::int64_t>(rows.shape(1));
  if ((row_bytes > 1 && row_count > 0 && rows.stride(1) != 1) || (row_count > 1 && rows.stride(0) < row_bytes)) {
    throw Error(ErrorCode::kLayout, "rows lie " + std::to_string(rows.stride(0)) + " bytes apart, their bytes " +
                                        std::to_string(rows.stride(1)) +
                                        "; the bytes of a row must lie side by side, and in no other row");
  }
  const std::size_t named = at ? at->shape(0) : row_count;
  if (named != slots.shape(0)) {
    throw Error(ErrorCode::kLayout,
                std::to_string(slots.shape(0)) + " slots come with " + std::to_string(named) + " rows");
  }
  if (!at) {
    return {};
  }
  check_below(span_of(*at), row_count, "row");
  return span_of(*at);
}

template <class Byte, class Array>
BlockRows<Byte> block_rows(const Array& rows) {
  return {rows.data(), static_cast<std::uint64_t>(rows.stride(0))};
}

inline Sums sums_of(std::unique_ptr<std::uint32_t[]> values, std::size_t count) {
  std::uint32_t* const data = values.get();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::uint32_t*>(array); });
  values.release();
  return Sums(data, {count}, owner);
}

}  // namespace kvbm::bindings
