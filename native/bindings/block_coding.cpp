#include "kvbm/block_coding.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "kvbm/spare_buffers.hpp"
#include "python.hpp"

namespace kvbm::bindings {
namespace {

using Source = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Target = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Body = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Lengths = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codings = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indexes = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// An array of its own; `values` holds at least `count`.
template <class Value>
nb::ndarray<nb::numpy, Value, nb::ndim<1>> array_of(std::unique_ptr<Value[]> values, std::size_t count) {
  Value* const data = values.release();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<Value*>(array); });
  return nb::ndarray<nb::numpy, Value, nb::ndim<1>>(data, {count}, owner);
}

// Throws Error: kLayout, when a row's bytes are apart or an index is outside; one below 0 is not when `may_skip`.
template <class Array>
void check_rows(const Array& rows, const Indexes& at, bool may_skip) {
  if (rows.shape(0) > 0 && rows.shape(1) > 1 && rows.stride(1) != 1) {
    throw Error(ErrorCode::kLayout, "rows: the bytes of a row lie " + std::to_string(rows.stride(1)) +
                                        " apart; they must lie side by side");
  }
  for (std::size_t entry = 0; entry < at.shape(0); ++entry) {
    const std::int64_t row = at.data()[entry];
    if (row >= static_cast<std::int64_t>(rows.shape(0)) || (row < 0 && !may_skip)) {
      throw Error(ErrorCode::kLayout,
                  "rows: row " + std::to_string(row) + " is wanted of " + std::to_string(rows.shape(0)));
    }
  }
}

constexpr std::size_t kSpareBytes = std::size_t{64} << 20;  // as many as the requests that a store has in flight take

// Of the bodies of all pools. Never destroyed: arrays may be left when the process ends.
SpareBuffers& spare_bodies() {
  static auto* const spare = new SpareBuffers(kSpareBytes);
  return *spare;
}

// As array_of, over the first `count` bytes; the buffer is a spare one again when nobody has the array or a view of it.
nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> array_over(Buffer buffer, std::size_t count) {
  auto owned = std::make_unique<Buffer>(std::move(buffer));
  std::uint8_t* const data = owned->bytes.get();
  const nb::capsule owner(owned.get(), [](void* held) noexcept {
    const std::unique_ptr<Buffer> last(static_cast<Buffer*>(held));
    spare_bodies().give(std::move(*last));
  });
  owned.release();
  return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {count}, owner);
}

nb::object encode_blocks(const Source& rows, const Indexes& at, unsigned coding) {
  check_rows(rows, at, false);
  if (coding >= kCodings || rows.shape(1) > UINT32_MAX) {
    throw Error(ErrorCode::kLayout, "blocks of " + std::to_string(rows.shape(1)) + " bytes cannot be coded by coding " +
                                        std::to_string(coding));
  }
  const std::size_t count = at.shape(0);
  const std::size_t block_bytes = rows.shape(1);
  Buffer body = spare_bodies().take(count * block_bytes + encode_slack(block_bytes));
  auto lengths = std::make_unique_for_overwrite<std::uint32_t[]>(count);
  auto codings = std::make_unique_for_overwrite<std::uint8_t[]>(count);
  std::size_t bytes = 0;
  {
    const GilReleased released;
    const auto encoder = std::make_unique<BlockEncoder>();
    for (std::size_t entry = 0; entry < count; ++entry) {
      const std::span block(rows.data() + at.data()[entry] * rows.stride(0), block_bytes);
      const CodedBlock coded = encoder->encode(block, static_cast<Coding>(coding), body.bytes.get() + bytes);
      lengths[entry] = static_cast<std::uint32_t>(coded.bytes);
      codings[entry] = static_cast<std::uint8_t>(coded.coding);
      bytes += coded.bytes;
    }
  }
  const nb::object encoded = nb::module_::import_("kvbm.pools.object.coding").attr("Encoded");
  return encoded(array_over(std::move(body), bytes), array_of(std::move(lengths), count),
                 array_of(std::move(codings), count));
}

nb::tuple decode_blocks(const Body& body, const Lengths& lengths, const Codings& codings, const Target& rows,
                        const Indexes& at) {
  check_rows(rows, at, true);
  const std::size_t count = at.shape(0);
  if (lengths.shape(0) != count || codings.shape(0) != count) {
    throw Error(ErrorCode::kLayout, std::to_string(count) + " rows are wanted of " + std::to_string(lengths.shape(0)) +
                                        " lengths and " + std::to_string(codings.shape(0)) + " codings");
  }
  auto good = std::make_unique<bool[]>(count);
  auto checksums = std::make_unique<std::uint32_t[]>(count);
  {
    const GilReleased released;
    const auto decoder = std::make_unique<BlockDecoder>();
    std::size_t first = 0;
    for (std::size_t entry = 0; entry < count; ++entry) {
      const std::size_t bytes = lengths.data()[entry];
      if (body.shape(0) - first < bytes) {
        break;  // neither it nor what follows is there
      }
      if (at.data()[entry] >= 0 && codings.data()[entry] < kCodings) {
        good[entry] =
            decoder->decode({body.data() + first, bytes}, static_cast<Coding>(codings.data()[entry]),
                            {rows.data() + at.data()[entry] * rows.stride(0), rows.shape(1)}, checksums[entry]);
      }
      first += bytes;
    }
  }
  return nb::make_tuple(array_of(std::move(good), count), array_of(std::move(checksums), count));
}

}  // namespace

void bind_block_coding(nb::module_& module, const SharedErrors& errors) {
  module.def(
      "encode_blocks",
      [errors](const Source& rows, const Indexes& at, unsigned coding) {
        return translated(errors, [&] { return encode_blocks(rows, at, coding); });
      },
      nb::arg("rows").noconvert(), nb::arg("at").noconvert(), nb::arg("coding"),
      "As kvbm.pools.object.coding.EncodeBlocks. Raises LayoutError.");
  module.def(
      "decode_blocks",
      [errors](const Body& body, const Lengths& lengths, const Codings& codings, const Target& rows,
               const Indexes& at) {
        return translated(errors, [&] { return decode_blocks(body, lengths, codings, rows, at); });
      },
      nb::arg("body").noconvert(), nb::arg("lengths").noconvert(), nb::arg("codings").noconvert(),
      nb::arg("rows").noconvert(), nb::arg("at").noconvert(),
      "As kvbm.pools.object.coding.DecodeBlocks. Raises LayoutError.");
}

}  // namespace kvbm::bindings
