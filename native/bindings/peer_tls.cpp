#include "kvbm/peer_tls.hpp"

#include <memory>
#include <string>
#include <utility>

#include "native_objects.hpp"

namespace kvbm::bindings {
namespace {

// An instance's certificate, which its server and its readers share.
struct PythonPeerTls {
  std::shared_ptr<PeerTls> tls;  // also of connections that outlive this
};

}  // namespace

std::shared_ptr<PeerTls> peer_tls_of(nb::handle object) {
  if (object.is_none()) {
    return nullptr;
  }
  if (!nb::isinstance<PythonPeerTls>(object)) {
    throw nb::type_error("what connections are secured with is no kvbm._native.PeerTls");
  }
  return nb::cast<PythonPeerTls&>(object).tls;
}

void bind_peer_tls(nb::module_& module, const SharedErrors& errors) {
  const TlsOptions usual;
  nb::class_<PythonPeerTls>(module, "PeerTls",
                            "An instance's certificate and whom it trusts. As kvbm.transport.native.PeerTls.")
      .def(
          "__init__",
          [errors](PythonPeerTls* self, std::string cert, std::string key, std::string ca, std::string library) {
            TlsOptions options;
            options.cert = std::move(cert);
            options.key = std::move(key);
            options.ca = std::move(ca);
            options.library = std::move(library);
            new (self) PythonPeerTls{translated(errors, [&] { return std::make_shared<PeerTls>(std::move(options)); })};
          },
          nb::arg("cert"), nb::arg("key"), nb::arg("ca"), nb::arg("library") = usual.library, "Raises ConfigError.");
}

}  // namespace kvbm::bindings
