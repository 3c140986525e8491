#include "kvbm/peer_client.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "native_objects.hpp"

namespace kvbm::bindings {
namespace {

using Rows = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using Indexes = std::optional<nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;
using Sums = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>;

// The rows a call names, one for each block. Throws Error: kLayout, before anything is asked.
TargetRows named_rows(const Rows& rows, const Indexes& at, std::size_t count) {
  if (rows.shape(0) > 0 && rows.shape(1) > 1 && rows.stride(1) != 1) {
    throw Error(ErrorCode::kLayout,
                "the bytes of a row lie " + std::to_string(rows.stride(1)) + " apart; they must lie side by side");
  }
  const std::size_t named = at ? at->shape(0) : rows.shape(0);
  if (named != count) {
    throw Error(ErrorCode::kLayout, std::to_string(count) + " hashes come with " + std::to_string(named) + " rows");
  }
  for (std::size_t entry = 0; at && entry < named; ++entry) {
    if (static_cast<std::uint64_t>(at->data()[entry]) >= rows.shape(0)) {
      throw Error(ErrorCode::kLayout,
                  "row " + std::to_string(at->data()[entry]) + " is wanted of " + std::to_string(rows.shape(0)));
    }
  }
  return {rows.data(), rows.stride(0), at ? at->data() : nullptr};
}

class PythonPeerClient {
 public:
  PythonPeerClient(PeerTarget target, unsigned streams, nb::object copier)
      : copier_(std::move(copier)),
        client_(std::make_unique<PeerClient>(std::move(target), streams, nb::cast<RowCopier&>(copier_))) {}
  PythonPeerClient(const PythonPeerClient&) = delete;
  PythonPeerClient& operator=(const PythonPeerClient&) = delete;
  ~PythonPeerClient() {
    close();
    if (!client_->is_of_this_process()) {
      client_.release();  // its locks may be held for good, by threads that are not here
    }
  }

  void close() {
    const GilReleased released;
    client_->close();
  }

  nb::tuple read(const nb::bytes& namespace_id, const nb::bytes& root, const nb::bytes& hashes, const Rows& rows,
                 const Indexes& at, double deadline_s) {
    const Bytes packed = view_of(hashes);
    if (packed.size() % kHashBytes != 0) {
      throw Error(ErrorCode::kLayout, "a run of hashes has " + std::to_string(packed.size()) + " bytes");
    }
    const std::size_t count = packed.size() / kHashBytes;
    const auto within = std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(deadline_s, 0.0, 1e6) * 1e9));
    const PeerWish wish{sixteen(namespace_id, "a namespace"), sixteen(root, "a root"), packed,
                        named_rows(rows, at, count),          rows.shape(1),           PeerClock::now() + within};
    nb::bytes outcomes = new_bytes(count);
    auto sums = std::make_unique<std::uint32_t[]>(count);
    PeerAccount account;
    {
      const std::span<PeerOutcome> room(reinterpret_cast<PeerOutcome*>(writable(outcomes).data()), count);
      const GilReleased released;
      account = client_->read(wish, room, {sums.get(), count});
    }
    std::uint32_t* const data = sums.get();
    const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::uint32_t*>(array); });
    sums.release();
    const nb::object trouble = nb::steal(
        PyUnicode_DecodeUTF8(account.trouble.data(), static_cast<Py_ssize_t>(account.trouble.size()), "replace"));
    return nb::make_tuple(std::move(outcomes), Sums(data, {count}, owner), trouble, account.retry_ms / 1000.0,
                          account.is_shut);
  }

 private:
  nb::object copier_;                   // keeps the threads that copy
  std::unique_ptr<PeerClient> client_;  // ends before them
};

}  // namespace

void bind_peer_client(nb::module_& module, const SharedErrors& errors) {
  using Self = PythonPeerClient;
  nb::class_<Self>(module, "PeerClient",
                   "Reads blocks that another instance lends. As kvbm.transport.native.PeerClient.")
      .def(
          "__init__",
          [errors](Self* self, bool is_tcp, std::string address, unsigned port, std::string reader, std::string owner,
                   const nb::bytes& key, unsigned streams, nb::object copier, nb::handle tls) {
            translated(errors, [&] {
              if (port > 0xFFFF) {
                throw Error(ErrorCode::kLayout, "port " + std::to_string(port) + "; there are 65536");
              }
              if (reader.size() > kMostPeerNameBytes) {
                throw Error(ErrorCode::kLayout,
                            "an instance id has " + std::to_string(reader.size()) + " bytes; it has at most 255");
              }
              const Bytes secret = view_of(key);
              PeerTarget target{is_tcp ? PeerTransport::kTcp : PeerTransport::kMemory,
                                std::move(address),
                                static_cast<std::uint16_t>(port),
                                std::move(reader),
                                std::move(owner),
                                {secret.begin(), secret.end()},
                                peer_tls_of(tls)};
              new (self) Self(std::move(target), streams, std::move(copier));
            });
          },
          nb::arg("is_tcp"), nb::arg("address"), nb::arg("port"), nb::arg("reader"), nb::arg("owner"), nb::arg("key"),
          nb::arg("streams"), nb::arg("copier"), nb::arg("tls").none() = nb::none())
      .def(
          "read",
          [errors](Self& self, const nb::bytes& namespace_id, const nb::bytes& root, const nb::bytes& hashes,
                   const Rows& rows, const Indexes& at, double deadline_s) {
            return translated(errors, [&] { return self.read(namespace_id, root, hashes, rows, at, deadline_s); });
          },
          nb::arg("namespace"), nb::arg("root"), nb::arg("hashes"), nb::arg("rows").noconvert(),
          nb::arg("at").noconvert().none(), nb::arg("deadline_s"),
          "Outcomes as bytes, checksums, what went wrong, seconds until to come again. Raises LayoutError.")
      .def("close", &Self::close, "Ends reads under way and waits for them. Idempotent.");
}

}  // namespace kvbm::bindings
