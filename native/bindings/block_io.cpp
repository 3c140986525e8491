#include "kvbm/block_header.hpp"
#include "kvbm/block_io.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>

#include "kvbm/words.hpp"
#include "native_objects.hpp"

namespace kvbm::bindings {
namespace {

using Indexes = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowsToFill = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowsToKeep = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Seals = nb::ndarray<std::uint8_t, nb::shape<-1, kSealBytes>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

IoKind kind_of(std::string_view name) {
  if (name == "auto") {
    return IoKind::kAuto;
  }
  if (name == "io_uring") {
    return IoKind::kIoUring;
  }
  if (name == "threads") {
    return IoKind::kThreads;
  }
  throw Error(ErrorCode::kLayout, "io is " + std::string(name) + "; it is auto, io_uring or threads");
}

// An array of n numbers, of which Python takes possession.
template <class Number, class Element = Number>
nb::object numbers(std::unique_ptr<Element[]> values, std::size_t count) {
  Element* const data = values.get();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<Element*>(array); });
  values.release();
  return nb::cast(nb::ndarray<nb::numpy, Number, nb::ndim<1>>(reinterpret_cast<Number*>(data), {count}, owner));
}

// A BlockIo and what its calls are held to.
class PythonBlockIo {
 public:
  PythonBlockIo(const SharedErrors& errors, const std::vector<int>& files, std::uint64_t slots, std::size_t block_bytes,
                std::string_view io, bool direct, std::uint32_t depth, double offload_share, bool verified)
      : errors_(errors), slots_(slots), block_bytes_(block_bytes) {
    translated(errors_, [&] {
      if (files.empty() || slots == 0 || block_bytes == 0 || block_bytes > 0xFFFFFFFF || depth == 0 || depth > 4096 ||
          !(offload_share > 0 && offload_share <= 1)) {
        throw Error(ErrorCode::kLayout,
                    "an engine needs files, slots, block_bytes and depth (at most 4096) above 0, and an offload_share "
                    "above 0 and "
                    "at most 1");
      }
      try {
        io_ = std::make_unique<BlockIo>(
            BlockIoOptions{files, block_bytes, kind_of(io), direct, depth, offload_share, verified});
      } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
      }
    });
  }

  nb::tuple read(const Indexes& slots, const RowsToFill& rows, const Indexes& at, const nb::bytes& namespace_id,
                 const nb::bytes& hashes, const std::optional<Seals>& seals) {
    const BlockRun run = checked(slots, rows.shape(0), rows.shape(1), at, namespace_id, hashes, seals);
    const std::size_t count = run.slots.size();
    auto outcomes = std::make_unique<BlockOutcome[]>(count);
    auto sums = std::make_unique<std::uint32_t[]>(count);
    {
      const GilReleased released;
      io_->read(run, rows.data(), {outcomes.get(), count}, {sums.get(), count});
    }
    return nb::make_tuple(numbers<std::uint8_t, BlockOutcome>(std::move(outcomes), count),
                          numbers<std::uint32_t>(std::move(sums), count));
  }

  nb::object write(const Indexes& slots, const RowsToKeep& rows, const Indexes& at, const nb::bytes& namespace_id,
                   const nb::bytes& hashes, std::uint64_t epoch, const Sums& checksums, std::uint32_t generation,
                   const std::optional<Seals>& seals) {
    const BlockRun run = checked(slots, rows.shape(0), rows.shape(1), at, namespace_id, hashes, seals);
    const std::size_t count = run.slots.size();
    if (checksums.shape(0) != count) {
      errors_->raise(Error(ErrorCode::kLayout, "a run of " + std::to_string(count) + " blocks comes with " +
                                                   std::to_string(checksums.shape(0)) + " checksums"));
    }
    auto failures = std::make_unique<std::int32_t[]>(count);
    {
      const GilReleased released;
      io_->write(run, rows.data(), epoch, {checksums.data(), count}, {failures.get(), count}, generation);
    }
    return numbers<std::int32_t>(std::move(failures), count);
  }

  nb::tuple scan(const Indexes& slots, std::uint32_t depth) const {
    const std::size_t count = slots.shape(0);
    for (std::size_t index = 0; index < count; ++index) {
      if (static_cast<std::uint64_t>(slots.data()[index]) >= slots_) {
        errors_->raise(Error(ErrorCode::kLayout, "slot " + std::to_string(slots.data()[index]) + " wanted of " +
                                                     std::to_string(slots_) + " slots"));
      }
    }
    auto outcomes = std::make_unique<SlotOutcome[]>(count);
    std::vector<FoundBlock> found(count);
    {
      const GilReleased released;
      io_->scan({slots.data(), count}, depth, {outcomes.get(), count}, found);
    }
    std::string namespaces(16 * count, '\0');
    std::string hashes(16 * count, '\0');
    auto epochs = std::make_unique<std::uint64_t[]>(count);
    auto generations = std::make_unique<std::uint32_t[]>(count);
    auto sealed = std::make_unique<std::uint8_t[]>(count);
    for (std::size_t index = 0; index < count; ++index) {
      std::memcpy(namespaces.data() + 16 * index, found[index].namespace_id.data(), 16);
      std::memcpy(hashes.data() + 16 * index, found[index].hash.data(), 16);
      epochs[index] = found[index].epoch;
      generations[index] = found[index].generation;
      sealed[index] = found[index].is_sealed ? 1 : 0;
    }
    return nb::make_tuple(
        numbers<std::uint8_t, SlotOutcome>(std::move(outcomes), count), nb::bytes(namespaces.data(), namespaces.size()),
        nb::bytes(hashes.data(), hashes.size()), numbers<std::uint64_t>(std::move(epochs), count),
        numbers<std::uint32_t>(std::move(generations), count), numbers<std::uint8_t>(std::move(sealed), count));
  }

  bool close(double timeout_s) {
    const GilReleased released;
    return io_->close(std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000)));
  }

  void withhold(std::int64_t slot) {
    const GilReleased released;
    io_->withhold(slot);
  }

  BlockIo& native() noexcept { return *io_; }
  const char* io() const noexcept { return io_->uses_io_uring() ? "io_uring" : "threads"; }
  std::string refusal() const {
    return io_->refusal() == 0 ? std::string() : words("io_uring_setup: ", std::strerror(io_->refusal()));
  }
  nb::dict counts() const {
    const BlockIoCounts counts = io_->counts();
    nb::dict told;
    told["read"] = counts.read;
    told["corrupt"] = counts.corrupt;
    told["failed"] = counts.failed;
    told["written"] = counts.written;
    told["refused"] = counts.refused;
    told["bounced"] = counts.bounced;
    told["in_flight"] = counts.in_flight;
    return told;
  }

 private:
  // A run in which every block has a slot, a row and a hash, and a seal if any has one. Raises LayoutError.
  BlockRun checked(const Indexes& slots, std::size_t row_count, std::size_t row_bytes, const Indexes& at,
                   const nb::bytes& namespace_id, const nb::bytes& hashes, const std::optional<Seals>& seals) const {
    const std::size_t count = slots.shape(0);
    const auto refuse = [this](const std::string& why) { errors_->raise(Error(ErrorCode::kLayout, why)); };
    if (at.shape(0) != count || hashes.size() != 16 * count || namespace_id.size() != 16 || row_bytes != block_bytes_) {
      refuse("a run of " + std::to_string(count) + " slots comes with " + std::to_string(at.shape(0)) + " rows of " +
             std::to_string(row_bytes) + " bytes and " + std::to_string(hashes.size()) + " bytes of hashes");
    }
    if (seals && seals->shape(0) != count) {
      refuse("a run of " + std::to_string(count) + " blocks comes with " + std::to_string(seals->shape(0)) + " seals");
    }
    for (std::size_t index = 0; index < count; ++index) {
      if (static_cast<std::uint64_t>(slots.data()[index]) >= slots_ ||
          static_cast<std::uint64_t>(at.data()[index]) >= row_count) {
        refuse("slot " + std::to_string(slots.data()[index]) + " and row " + std::to_string(at.data()[index]) +
               " wanted of " + std::to_string(slots_) + " slots and " + std::to_string(row_count) + " rows");
      }
    }
    return {{slots.data(), count},
            {at.data(), count},
            std::span<const std::uint8_t, 16>(static_cast<const std::uint8_t*>(namespace_id.data()), 16),
            static_cast<const std::uint8_t*>(hashes.data()),
            seals ? seals->data() : nullptr};
  }

  SharedErrors errors_;          // Python's classes
  std::uint64_t slots_;          // of the pool
  std::size_t block_bytes_;      // of a row
  std::unique_ptr<BlockIo> io_;  // what moves the bytes
};

}  // namespace

BlockIo& block_io_of(nb::handle object) {
  if (!nb::isinstance<PythonBlockIo>(object)) {
    throw nb::type_error("what moves NVME's blocks is no kvbm._native.BlockIo");
  }
  return nb::cast<PythonBlockIo&>(object).native();
}

void bind_block_io(nb::module_& module, const SharedErrors& errors) {
  nb::class_<PythonBlockIo>(module, "BlockIo",
                            "Moves blocks between rows and slots of files, and proves what it reads.")
      .def(
          "__init__",
          [errors](PythonBlockIo* self, const std::vector<int>& fds, std::uint64_t slots, std::size_t block_bytes,
                   std::string_view io, bool direct, std::uint32_t depth, double offload_share, bool verified) {
            new (self) PythonBlockIo(errors, fds, slots, block_bytes, io, direct, depth, offload_share, verified);
          },
          nb::arg("fds"), nb::arg("slots"), nb::arg("block_bytes"), nb::arg("io") = "auto", nb::arg("direct") = false,
          nb::arg("depth") = 32, nb::arg("offload_share") = 0.25, nb::arg("verified") = true)
      .def_prop_ro("io", &PythonBlockIo::io)
      .def_prop_ro("refusal", &PythonBlockIo::refusal)
      .def("read", &PythonBlockIo::read, nb::arg("slots").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("at").noconvert(), nb::arg("namespace"), nb::arg("hashes"),
           nb::arg("seals").noconvert() = nb::none())
      .def("write", &PythonBlockIo::write, nb::arg("slots").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("at").noconvert(), nb::arg("namespace"), nb::arg("hashes"), nb::arg("epoch"),
           nb::arg("checksums").noconvert(), nb::arg("generation") = 0, nb::arg("seals").noconvert() = nb::none())
      .def("scan", &PythonBlockIo::scan, nb::arg("slots").noconvert(), nb::arg("depth"))
      .def("close", &PythonBlockIo::close, nb::arg("timeout_s"))
      .def("withhold", &PythonBlockIo::withhold, nb::arg("slot"))
      .def("counts", &PythonBlockIo::counts);
}

}  // namespace kvbm::bindings
