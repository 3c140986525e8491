#include "kvbm/peer_server.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "kvbm/peer_wire.hpp"
#include "native_objects.hpp"

namespace kvbm::bindings {
namespace {

using Rows = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double kLongestS = 1e6;

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(1000 * std::clamp(seconds, 0.0, kLongestS)));
}

NamespaceId namespace_id_of(const nb::bytes& value) { return sixteen(value, "a namespace id"); }

// A LendingServer with what it lends from, which it keeps: for good where one of its threads does not end.
class PythonLendingServer {
 public:
  PythonLendingServer(const SharedErrors& errors, nb::handle ledger, nb::handle lock, const Rows& rows,
                      const Sums& checksums, int fd, std::uint64_t mapped_bytes, nb::handle nvme,
                      LendingOptions options)
      : errors_(errors), kept_(nb::make_tuple(ledger, lock, rows, checksums, nvme)) {
    Ledger& lent = ledger_of(ledger);
    LedgerLock& shared = ledger_lock_of(lock);
    BlockIo* const io = nvme.is_none() ? nullptr : &block_io_of(nvme);
    const LentHost host{.rows = rows.data(),
                        .checksums = checksums.data(),
                        .slots = static_cast<std::uint32_t>(rows.shape(0)),
                        .block_bytes = rows.shape(1),
                        .mapped_bytes = mapped_bytes,
                        .fd = fd};
    translated(errors_, [&] {
      if (checksums.shape(0) != rows.shape(0)) {
        throw Error(ErrorCode::kLayout, "HOST has " + std::to_string(rows.shape(0)) + " slots and " +
                                            std::to_string(checksums.shape(0)) + " checksums");
      }
      try {
        server_ = std::make_unique<LendingServer>(std::move(options), lent, shared, host, io);
      } catch (const std::system_error& error) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
        throw nb::python_error();
      }
    });
  }
  PythonLendingServer(const PythonLendingServer&) = delete;
  PythonLendingServer& operator=(const PythonLendingServer&) = delete;
  ~PythonLendingServer() {
    bool has_ended = true;
    if (server_ != nullptr) {
      const GilReleased released;
      has_ended = server_->close(std::chrono::seconds(1));
      server_.reset();  // which waits once more where it has not
    }
    if (!has_ended) {
      kept_.release();
    }
  }

  std::uint16_t tcp_port() const noexcept { return server_->tcp_port(); }

  void admit(const nb::bytes& id, const nb::bytes& root) {
    translated(errors_, [&] {
      if (root.size() == 0) {
        throw Error(ErrorCode::kLayout, "a namespace without a root; nobody could prove it");
      }
      if (!server_->owner().namespaces.admit(namespace_id_of(id), view_of(root))) {
        throw Error(ErrorCode::kLayout, "more than " + std::to_string(kMostAdmitted) + " namespaces are to be lent");
      }
    });
  }
  void withdraw(const nb::bytes& id) {
    translated(errors_, [&] { server_->owner().namespaces.withdraw(namespace_id_of(id)); });
  }
  void fence(bool fenced) noexcept { server_->owner().is_fenced = fenced; }

  nb::list take_corrupt(double timeout_s) {
    std::vector<CorruptBlock> blocks;
    {
      const GilReleased released;
      blocks = server_->owner().corrupt.take(milliseconds_of(timeout_s));
    }
    nb::list taken;
    for (const CorruptBlock& block : blocks) {
      taken.append(nb::make_tuple(copy_bytes(block.namespace_id), nb::int_(static_cast<int>(block.tier)),
                                  copy_bytes(block.hash)));
    }
    return taken;
  }

  void open_joins(unsigned transport) {
    translated(errors_, [&] { joins_of(transport).open(); });
  }

  nb::list take_joins(unsigned transport, double timeout_s) {
    JoinRequests& joins = translated_joins(transport);
    std::vector<JoinRequests::Request> requests;
    {
      const GilReleased released;
      requests = joins.take(milliseconds_of(timeout_s));
    }
    nb::list taken;
    for (const JoinRequests::Request& request : requests) {
      taken.append(
          nb::make_tuple(request.number, request.has_left ? nb::object(nb::none()) : copy_bytes(request.hello)));
    }
    return taken;
  }

  nb::list opened_by(unsigned transport, std::uint64_t number) {
    const AdmittedNamespaces& namespaces = server_->owner().namespaces;
    nb::list opened;
    for (const auto& [id, admission] : translated_joins(transport).openings(number)) {
      if (namespaces.holds(id, admission)) {
        opened.append(copy_bytes(id));
      }
    }
    return opened;
  }

  bool answer_join(unsigned transport, std::uint64_t number, const nb::bytes& ready) {
    return translated(errors_, [&] {
      JoinRequests& joins = joins_of(transport);
      if (ready.size() == 0 || ready.size() > joins.hello().most_ready_bytes) {
        throw Error(ErrorCode::kLayout, "the answer to a HELLO has " + std::to_string(ready.size()) + " bytes");
      }
      return joins.answer(number, view_of(ready));
    });
  }

  void hang_up_on_nixl() noexcept { server_->hang_up_on_nixl(); }

  nb::dict stats() const {
    const PeerOwner& owner = server_->owner();
    const LendingCounts& counts = owner.counts;
    nb::dict told;
    told["connections"] = counts.connections.load();
    told["blocks_lent_now"] = owner.lender.lent_blocks();
    told["accepted"] = counts.accepted.load();
    told["crowded"] = counts.crowded.load();
    told["unproved"] = counts.unproved.load();
    told["broken"] = counts.broken.load();
    told["memory_bytes"] = counts.memory_bytes.load();
    told["rdma_bytes"] = counts.rdma_bytes.load();
    told["nixl_bytes"] = counts.nixl_bytes.load();
    told["unix_bytes"] = counts.unix_bytes.load();
    told["tcp_bytes"] = counts.tcp_bytes.load();
    told["expired"] = counts.expired.load();
    told["unopened"] = counts.unopened.load();
    told["busy"] = counts.busy.load();
    const auto gone = [&](PeerGoneReason why) { return counts.gone[static_cast<std::size_t>(why)].load(); };
    told["not_held"] = gone(PeerGoneReason::kNotHeld);
    told["closing"] = gone(PeerGoneReason::kClosing);
    told["fenced"] = gone(PeerGoneReason::kFenced);
    told["not_opened"] = gone(PeerGoneReason::kNotOpened);
    told["corrupt_blocks"] = counts.corrupt_blocks.load();
    told["refused_pins"] = owner.lender.refused();
    return told;
  }

  bool close(double timeout_s) {
    const GilReleased released;
    return server_->close(milliseconds_of(timeout_s));
  }
  void disown() noexcept { server_->disown(); }

 private:
  // transport: of PeerTransport, one whose readers read HOST by themselves. Throws Error.
  JoinRequests& joins_of(unsigned transport) {
    PeerOwner& owner = server_->owner();
    if (transport == static_cast<unsigned>(PeerTransport::kRdma)) {
      return owner.rdma;
    }
    if (transport == static_cast<unsigned>(PeerTransport::kNixl)) {
      return owner.nixl;
    }
    throw Error(ErrorCode::kLayout, "nobody joins by transport " + std::to_string(transport));
  }
  JoinRequests& translated_joins(unsigned transport) {
    return *translated(errors_, [&] { return &joins_of(transport); });
  }

  SharedErrors errors_;                    // Python's classes
  nb::object kept_;                        // what the server lends from
  std::unique_ptr<LendingServer> server_;  // what lends
};

}  // namespace

void bind_peer_server(nb::module_& module, const SharedErrors& errors) {
  const LendingOptions usual;
  nb::class_<PythonLendingServer>(module, "LendingServer",
                                  "Lends blocks of HOST and NVME to other instances, in threads of its own.")
      .def(
          "__init__",
          [errors](PythonLendingServer* self, nb::handle ledger, nb::handle lock, const Rows& rows,
                   const Sums& checksums, int fd, std::uint64_t mapped_bytes, nb::handle nvme, std::string instance,
                   std::string unix_path, std::string tcp_host, std::uint16_t tcp_port, const nb::bytes& key,
                   std::uint32_t most_connections, std::size_t most_blocks, std::uint32_t most_lease_ms,
                   std::uint32_t most_send_ms, std::uint32_t handshake_ms, std::uint32_t retry_ms,
                   std::size_t lane_bytes, nb::handle tls) {
            const Bytes secret = view_of(key);
            LendingOptions options;
            options.instance = std::move(instance);
            options.unix_path = std::move(unix_path);
            options.tcp_host = std::move(tcp_host);
            options.tcp_port = tcp_port;
            options.key.assign(secret.begin(), secret.end());
            options.most_connections = most_connections;
            options.most_blocks = most_blocks;
            options.most_lease_ms = most_lease_ms;
            options.most_send_ms = most_send_ms;
            options.handshake_ms = handshake_ms;
            options.retry_ms = retry_ms;
            options.lane_bytes = lane_bytes;
            options.tls = peer_tls_of(tls);
            new (self)
                PythonLendingServer(errors, ledger, lock, rows, checksums, fd, mapped_bytes, nvme, std::move(options));
          },
          nb::arg("ledger"), nb::arg("lock"), nb::arg("rows").noconvert(), nb::arg("checksums").noconvert(),
          nb::arg("fd"), nb::arg("mapped_bytes"), nb::arg("nvme").none(), nb::arg("instance"),
          nb::arg("unix_path") = "", nb::arg("tcp_host") = "", nb::arg("tcp_port") = 0,
          nb::arg("key") = nb::bytes("", 0), nb::arg("most_connections") = usual.most_connections,
          nb::arg("most_blocks") = usual.most_blocks, nb::arg("most_lease_ms") = usual.most_lease_ms,
          nb::arg("most_send_ms") = usual.most_send_ms, nb::arg("handshake_ms") = usual.handshake_ms,
          nb::arg("retry_ms") = usual.retry_ms, nb::arg("lane_bytes") = usual.lane_bytes,
          nb::arg("tls").none() = nb::none())
      .def_prop_ro("tcp_port", &PythonLendingServer::tcp_port)
      .def("admit", &PythonLendingServer::admit, nb::arg("namespace"), nb::arg("root"))
      .def("withdraw", &PythonLendingServer::withdraw, nb::arg("namespace"))
      .def("fence", &PythonLendingServer::fence, nb::arg("fenced"))
      .def("take_corrupt", &PythonLendingServer::take_corrupt, nb::arg("timeout_s"))
      .def("open_joins", &PythonLendingServer::open_joins, nb::arg("transport"))
      .def("take_joins", &PythonLendingServer::take_joins, nb::arg("transport"), nb::arg("timeout_s"))
      .def("opened_by", &PythonLendingServer::opened_by, nb::arg("transport"), nb::arg("number"))
      .def("answer_join", &PythonLendingServer::answer_join, nb::arg("transport"), nb::arg("number"), nb::arg("ready"))
      .def("hang_up_on_nixl", &PythonLendingServer::hang_up_on_nixl)
      .def("stats", &PythonLendingServer::stats)
      .def("close", &PythonLendingServer::close, nb::arg("timeout_s"))
      .def("disown", &PythonLendingServer::disown);
}

}  // namespace kvbm::bindings
