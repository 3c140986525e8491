#include "kvbm/device_ring.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include "segment_copy.hpp"

namespace kvbm::bindings {
namespace {

using Handles = std::vector<std::uintptr_t>;

// A ring and what its run names, all of it touched with the GIL only.
class Ring {
 public:
  Ring(const Indexes& addresses, const Indexes& strides, const Indexes& sizes, std::uint64_t slots, nb::object copier,
       const RingOptions& options, const std::string& library)
      : copier_(std::move(copier)),
        table_(segments_of(addresses, strides, sizes), slots),
        driver_(cuda_driver(library)),
        ring_(std::make_unique<DeviceRing>(driver_, segments_of(addresses, strides, sizes), slots, options)) {}

  // What a device may still write stays, for nobody.
  ~Ring() {
    if (ring_->is_under_way()) {
      static_cast<void>(new std::tuple(std::move(slots_), std::move(rows_), std::move(at_)));
    }
    const GilReleased released;  // the driver may wait for the device
    ring_.reset();
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void gather(Indexes slots, Rows rows, std::optional<Indexes> at, const Handles& events, const Handles& streams,
              bool wants_sums) {
    look_at(slots, rows, at);
    const std::size_t count = wants_sums ? slots.shape(0) : 0;
    auto sums = wants_sums ? std::make_unique<std::uint32_t[]>(count) : nullptr;
    const auto [after_events, after_streams] = std::pair(named(events), named(streams));
    ring_->gather(span_of(slots), block_rows<std::uint8_t>(rows), rows_of(at), {after_events, after_streams},
                  {sums.get(), count}, &nb::cast<RowCopier&>(copier_));
    keep(std::move(slots), std::move(rows), std::move(at));
    sums_ = std::move(sums);
  }

  void scatter(Indexes slots, ConstRows rows, std::optional<Indexes> at, const Handles& events,
               const Handles& streams) {
    look_at(slots, rows, at);
    const auto [after_events, after_streams] = std::pair(named(events), named(streams));
    ring_->scatter(span_of(slots), block_rows<const std::uint8_t>(rows), rows_of(at), {after_events, after_streams});
    keep(std::move(slots), std::move(rows), std::move(at));
    sums_ = nullptr;
  }

  bool advance(double timeout_s) {
    const auto timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(timeout_s, 0.0, 1e6) * 1e9));
    bool is_over = false;
    try {
      const GilReleased released;
      is_over = ring_->advance(timeout);
    } catch (...) {
      sums_ = nullptr;
      forget();
      throw;
    }
    if (is_over) {
      forget();
    }
    return is_over;
  }

  nb::object checksums() {
    if (ring_->is_under_way() || sums_ == nullptr) {
      return nb::none();
    }
    return nb::cast(sums_of(std::move(sums_), count_));
  }

  void settle() {
    {
      const GilReleased released;
      ring_->settle();
    }
    forget();
  }

  std::uintptr_t mark(const Handles& events, const Handles& streams) {
    const auto [after_events, after_streams] = std::pair(named(events), named(streams));
    return reinterpret_cast<std::uintptr_t>(ring_->mark({after_events, after_streams}));
  }
  void drop_mark(std::uintptr_t mark) { ring_->drop_mark(reinterpret_cast<CuEvent>(mark)); }

  bool has_passed(std::uintptr_t event) const { return ring_->has_passed_event(reinterpret_cast<CuEvent>(event)); }
  bool reaches(const ConstRows& rows) const {
    const std::size_t count = rows.shape(0);
    if (count == 0 || rows.shape(1) == 0) {
      return false;
    }
    const auto stride = static_cast<std::uint64_t>(count > 1 ? rows.stride(0) : 0);
    return ring_->reaches(rows.data(), (count - 1) * stride + rows.shape(1));
  }

  const DeviceRing& ring() const noexcept { return *ring_; }

 private:
  static std::vector<Segment> segments_of(const Indexes& addresses, const Indexes& strides, const Indexes& sizes) {
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
    return segments;
  }

  static std::vector<void*> named(const Handles& handles) {
    std::vector<void*> pointers;
    for (const std::uintptr_t handle : handles) {
      pointers.push_back(reinterpret_cast<void*>(handle));
    }
    return pointers;
  }

  static std::span<const std::int64_t> rows_of(const std::optional<Indexes>& at) {
    return at ? span_of(*at) : std::span<const std::int64_t>();
  }

  template <class Array>
  void look_at(const Indexes& slots, const Array& rows, const std::optional<Indexes>& at) const {
    if (at) {
      checked(table_, slots, rows, at);
      return;
    }
    check_below(span_of(slots), table_.slots(), "slot");
    const auto row_bytes = static_cast<std::int64_t>(rows.shape(1));
    if ((row_bytes > 1 && rows.shape(0) > 0 && rows.stride(1) != 1) ||
        (rows.shape(0) > 1 && rows.stride(0) < row_bytes)) {
      throw Error(ErrorCode::kLayout, "rows lie " + std::to_string(rows.stride(0)) + " bytes apart, their bytes " +
                                          std::to_string(rows.stride(1)) +
                                          "; the bytes of a row must lie side by side, and in no other row");
    }
    if (rows.shape(1) != table_.block_bytes() || rows.shape(0) < slots.shape(0)) {
      throw Error(ErrorCode::kLayout, std::to_string(slots.shape(0)) + " slots of " +
                                          std::to_string(table_.block_bytes()) + " bytes come with " +
                                          std::to_string(rows.shape(0)) + " rows of " + std::to_string(rows.shape(1)));
    }
  }

  void keep(Indexes slots, std::variant<Rows, ConstRows> rows, std::optional<Indexes> at) {
    count_ = slots.shape(0);
    slots_ = std::move(slots);
    rows_ = std::move(rows);
    at_ = std::move(at);
  }

  void forget() {
    if (!ring_->is_under_way()) {
      slots_.reset();
      rows_.reset();
      at_.reset();
    }
  }

  nb::object copier_;                                  // computes checksums
  SegmentTable table_;                                 // what calls are held to
  const CudaDriver& driver_;                           // never unloaded
  std::optional<Indexes> slots_;                       // of the run under way
  std::optional<std::variant<Rows, ConstRows>> rows_;  // likewise
  std::optional<Indexes> at_;                          // likewise
  std::unique_ptr<std::uint32_t[]> sums_;              // of the last gather
  std::size_t count_ = 0;                              // of its blocks
  std::unique_ptr<DeviceRing> ring_;                   // ends before what its run names
};

}  // namespace

void bind_device_ring(nb::module_& module, const SharedErrors& errors) {
  nb::class_<Ring>(module, "DeviceRing",
                   "Runs of blocks between a GPU and pinned rows; as `kvbm.pools.hbm.rings.Ring`.")
      .def(
          "__init__",
          [errors](Ring* self, const Indexes& addresses, const Indexes& strides, const Indexes& sizes,
                   std::uint64_t slots, nb::object copier, int device, std::uint64_t ring_bytes,
                   std::uint64_t lot_bytes, unsigned programs, const std::string& library) {
            if (!nb::isinstance<RowCopier>(copier)) {
              throw nb::type_error("a ring computes checksums with a RowCopier");
            }
            translated(errors, [&] {
              const RingOptions options{device, ring_bytes, lot_bytes, programs};
              new (self) Ring(addresses, strides, sizes, slots, std::move(copier), options, library);
            });
          },
          nb::arg("addresses").noconvert(), nb::arg("strides").noconvert(), nb::arg("sizes").noconvert(),
          nb::arg("slots"), nb::arg("copier"), nb::arg("device"), nb::arg("ring_bytes") = RingOptions{}.ring_bytes,
          nb::arg("lot_bytes") = RingOptions{}.lot_bytes, nb::arg("programs") = 0U, nb::arg("library") = "libcuda.so.1")
      .def(
          "gather",
          [errors](Ring& self, Indexes slots, Rows rows, std::optional<Indexes> at, const Handles& events,
                   const Handles& streams, bool wants_sums) {
            translated(errors, [&] {
              self.gather(std::move(slots), std::move(rows), std::move(at), events, streams, wants_sums);
            });
          },
          nb::arg("slots").noconvert(), nb::arg("rows").noconvert(), nb::arg("at").none().noconvert(),
          nb::arg("events"), nb::arg("streams"), nb::arg("wants_sums") = true)
      .def(
          "scatter",
          [errors](Ring& self, Indexes slots, ConstRows rows, std::optional<Indexes> at, const Handles& events,
                   const Handles& streams) {
            translated(errors,
                       [&] { self.scatter(std::move(slots), std::move(rows), std::move(at), events, streams); });
          },
          nb::arg("slots").noconvert(), nb::arg("rows").noconvert(), nb::arg("at").none().noconvert(),
          nb::arg("events"), nb::arg("streams"))
      .def("advance", &Ring::advance, nb::arg("timeout_s"))
      .def("checksums", &Ring::checksums)
      .def("settle", &Ring::settle)
      .def("mark", &Ring::mark, nb::arg("events"), nb::arg("streams"))
      .def("drop_mark", &Ring::drop_mark, nb::arg("mark"))
      .def("has_passed", &Ring::has_passed, nb::arg("event"))
      .def("reaches", &Ring::reaches, nb::arg("rows"))
      .def_prop_ro("is_under_way", [](const Ring& self) { return self.ring().is_under_way(); })
      .def_prop_ro("is_lost", [](const Ring& self) { return self.ring().is_lost(); })
      .def_prop_ro("programs", [](const Ring& self) { return self.ring().programs(); })
      .def_prop_ro("ring_bytes", [](const Ring& self) { return self.ring().ring_bytes(); });
}

}  // namespace kvbm::bindings
