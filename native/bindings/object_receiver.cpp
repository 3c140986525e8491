#include "kvbm/object_receiver.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvbm/object_header.hpp"
#include "native_objects.hpp"

namespace kvbm::bindings {
namespace {

using Rows = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Indexes = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class Value>
nb::ndarray<nb::numpy, Value, nb::ndim<1>> array_of(std::unique_ptr<Value[]> values, std::size_t count) {
  Value* const data = values.get();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<Value*>(array); });
  values.release();
  return nb::ndarray<nb::numpy, Value, nb::ndim<1>>(data, {count}, owner);
}

std::chrono::nanoseconds within(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e6) * 1e9));
}

// Throws Error: kLayout: the parts of a call do not fit each other.
void check_call(std::size_t requests, std::size_t addresses, std::size_t port, std::size_t hash_bytes, const Rows& rows,
                const Indexes& at) {
  if (rows.shape(0) > 0 && rows.shape(1) > 1 && rows.stride(1) != 1) {
    throw Error(ErrorCode::kLayout, "rows: the bytes of a row lie " + std::to_string(rows.stride(1)) +
                                        " apart; they must lie side by side");
  }
  if (at.shape(0) != requests || at.shape(1) == 0 || hash_bytes != at.shape(0) * at.shape(1) * kHashBytes) {
    throw Error(ErrorCode::kLayout, std::to_string(requests) + " requests come with " + std::to_string(at.shape(0)) +
                                        " times " + std::to_string(at.shape(1)) + " rows and " +
                                        std::to_string(hash_bytes) + " bytes of hashes");
  }
  if (addresses == 0 || port > 0xFFFF) {
    throw Error(ErrorCode::kLayout, std::to_string(addresses) + " addresses, port " + std::to_string(port));
  }
  for (std::size_t entry = 0; entry < at.shape(0) * at.shape(1); ++entry) {
    if (at.data()[entry] >= static_cast<std::int64_t>(rows.shape(0))) {
      throw Error(ErrorCode::kLayout,
                  "rows: row " + std::to_string(at.data()[entry]) + " is wanted of " + std::to_string(rows.shape(0)));
    }
  }
}

class PythonObjectReceiver {
 public:
  PythonObjectReceiver() : receiver_(std::make_unique<ObjectReceiver>()) {}
  PythonObjectReceiver(const PythonObjectReceiver&) = delete;
  PythonObjectReceiver& operator=(const PythonObjectReceiver&) = delete;
  ~PythonObjectReceiver() {
    close();
    if (!receiver_->is_of_this_process()) {
      receiver_.release();  // its locks may be held for good, by threads that are not here
    }
  }

  void close() {
    const GilReleased released;
    receiver_->close();
  }

  nb::tuple receive(const std::vector<std::string>& addresses, unsigned port, const std::vector<nb::bytes>& requests,
                    const nb::bytes& namespace_id, const nb::bytes& hashes, const Rows& rows, const Indexes& at,
                    unsigned connections, double deadline_s, double connect_s, double silence_s) {
    const Bytes packed = view_of(hashes);
    check_call(requests.size(), addresses.size(), port, packed.size(), rows, at);
    const std::size_t count = requests.size();
    const std::size_t blocks = at.shape(0) * at.shape(1);
    const NamespaceId whose = sixteen(namespace_id, "a namespace");
    std::vector<Bytes> said;
    said.reserve(count);
    for (const nb::bytes& request : requests) {
      said.push_back(view_of(request));
    }
    const ObjectWish wish{addresses,
                          static_cast<std::uint16_t>(port),
                          said,
                          whose,
                          packed,
                          rows.data(),
                          rows.stride(0),
                          rows.shape(1),
                          {at.data(), blocks},
                          connections,
                          PeerClock::now() + within(deadline_s),
                          within(connect_s),
                          within(silence_s)};
    std::vector<ObjectAnswer> answers(count);
    auto sums = std::make_unique<std::uint32_t[]>(blocks);
    {
      const GilReleased released;
      receiver_->receive(wish, answers, {sums.get(), blocks});
    }
    auto statuses = std::make_unique<std::uint16_t[]>(count);
    auto whole = std::make_unique<bool[]>(count);
    auto sizes = std::make_unique<std::uint64_t[]>(count);
    for (std::size_t object = 0; object < count; ++object) {
      statuses[object] = answers[object].status;
      whole[object] = answers[object].is_whole;
      sizes[object] = answers[object].object_bytes;
    }
    return nb::make_tuple(array_of(std::move(whole), count), array_of(std::move(statuses), count),
                          array_of(std::move(sizes), count), array_of(std::move(sums), blocks));
  }

 private:
  std::unique_ptr<ObjectReceiver> receiver_;  // never null
};

}  // namespace

void bind_object_receiver(nb::module_& module, const SharedErrors& errors) {
  using Self = PythonObjectReceiver;
  nb::class_<Self>(module, "ObjectReceiver",
                   "Receives objects straight into rows. As kvbm.pools.object.direct.ObjectReceiver.")
      .def(nb::init<>())
      .def(
          "receive",
          [errors](Self& self, const std::vector<std::string>& addresses, unsigned port,
                   const std::vector<nb::bytes>& requests, const nb::bytes& namespace_id, const nb::bytes& hashes,
                   const Rows& rows, const Indexes& at, unsigned connections, double deadline_s, double connect_s,
                   double silence_s) {
            return translated(errors, [&] {
              return self.receive(addresses, port, requests, namespace_id, hashes, rows, at, connections, deadline_s,
                                  connect_s, silence_s);
            });
          },
          nb::arg("addresses"), nb::arg("port"), nb::arg("requests"), nb::arg("namespace"), nb::arg("hashes"),
          nb::arg("rows").noconvert(), nb::arg("at").noconvert(), nb::arg("connections"), nb::arg("deadline_s"),
          nb::arg("connect_s"), nb::arg("silence_s"),
          "Whether each object is whole in its rows, its status, its bytes, the checksums of its blocks. Raises "
          "LayoutError.")
      .def("close", &Self::close, "Ends calls under way and waits for them. Idempotent.");
  module.def(
      "kept_blocks",
      [errors](const nb::bytes& header, const nb::bytes& namespace_id, const nb::bytes& hashes, std::size_t block_bytes,
               std::uint64_t object_bytes) -> nb::object {
        return translated(errors, [&]() -> nb::object {
          const NamespaceId whose = sixteen(namespace_id, "a namespace");
          std::vector<KeptBlock> kept;
          if (!is_object_of(view_of(header), whose, view_of(hashes), block_bytes, object_bytes, kept)) {
            return nb::none();
          }
          nb::list found;
          for (const KeptBlock& block : kept) {
            found.append(nb::make_tuple(block.checksum, block.bytes, static_cast<unsigned>(block.coding)));
          }
          return found;
        });
      },
      nb::arg("header"), nb::arg("namespace"), nb::arg("hashes"), nb::arg("block_bytes"), nb::arg("object_bytes"),
      "How an object keeps its blocks, by a header that is whole and of these; None: it is not. For tests.");
}

}  // namespace kvbm::bindings
