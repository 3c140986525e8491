#include "kvbm/open_ssl.hpp"

#include <dlfcn.h>

#include <array>

#include "kvbm/error.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

constexpr unsigned kLeastMajor = 3;
// OPENSSL_INIT_NO_ATEXIT: threads may lend still while the process ends
constexpr std::uint64_t kNoAtExit = 0x00080000;

// Finds functions in a library and in those it needs.
class Finder {
 public:
  Finder(void* library, const std::string& name) : library_(library), name_(name) {}

  template <class Function>
  void operator()(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr) {
      throw Error(ErrorCode::kConfig,
                  words("TLS between instances needs OpenSSL 3, and ", name_, " lacks ", name, "; install libssl3"));
    }
  }

 private:
  void* library_;            // as dlopen gave it
  const std::string& name_;  // for messages
};

void find_library(OpenSsl& made, const Finder& find) {
  find(made.OPENSSL_version_major, "OPENSSL_version_major");
  find(made.OPENSSL_init_ssl, "OPENSSL_init_ssl");
  find(made.ERR_clear_error, "ERR_clear_error");
  find(made.ERR_get_error, "ERR_get_error");
  find(made.ERR_error_string_n, "ERR_error_string_n");
  find(made.X509_verify_cert_error_string, "X509_verify_cert_error_string");
}

void find_contexts(OpenSsl& made, const Finder& find) {
  find(made.TLS_method, "TLS_method");
  find(made.SSL_CTX_new, "SSL_CTX_new");
  find(made.SSL_CTX_free, "SSL_CTX_free");
  find(made.SSL_CTX_ctrl, "SSL_CTX_ctrl");
  find(made.SSL_CTX_set_num_tickets, "SSL_CTX_set_num_tickets");
  find(made.SSL_CTX_set_ciphersuites, "SSL_CTX_set_ciphersuites");
  find(made.SSL_CTX_set_default_read_buffer_len, "SSL_CTX_set_default_read_buffer_len");
  find(made.SSL_CTX_set_default_passwd_cb, "SSL_CTX_set_default_passwd_cb");
  find(made.SSL_CTX_use_certificate_chain_file, "SSL_CTX_use_certificate_chain_file");
  find(made.SSL_CTX_use_PrivateKey_file, "SSL_CTX_use_PrivateKey_file");
  find(made.SSL_CTX_check_private_key, "SSL_CTX_check_private_key");
  find(made.SSL_CTX_load_verify_locations, "SSL_CTX_load_verify_locations");
  find(made.SSL_CTX_set_verify, "SSL_CTX_set_verify");
}

void find_connections(OpenSsl& made, const Finder& find) {
  find(made.SSL_new, "SSL_new");
  find(made.SSL_free, "SSL_free");
  find(made.SSL_set_bio, "SSL_set_bio");
  find(made.SSL_set_accept_state, "SSL_set_accept_state");
  find(made.SSL_set_connect_state, "SSL_set_connect_state");
  find(made.SSL_do_handshake, "SSL_do_handshake");
  find(made.SSL_read_ex, "SSL_read_ex");
  find(made.SSL_write_ex, "SSL_write_ex");
  find(made.SSL_get_error, "SSL_get_error");
  find(made.SSL_has_pending, "SSL_has_pending");
  find(made.SSL_key_update, "SSL_key_update");
  find(made.SSL_get_verify_result, "SSL_get_verify_result");
  find(made.BIO_get_new_index, "BIO_get_new_index");
  find(made.BIO_meth_new, "BIO_meth_new");
  find(made.BIO_meth_free, "BIO_meth_free");
  find(made.BIO_meth_set_read, "BIO_meth_set_read");
  find(made.BIO_meth_set_write, "BIO_meth_set_write");
  find(made.BIO_meth_set_ctrl, "BIO_meth_set_ctrl");
  find(made.BIO_new, "BIO_new");
  find(made.BIO_set_init, "BIO_set_init");
  find(made.BIO_set_flags, "BIO_set_flags");
  find(made.BIO_clear_flags, "BIO_clear_flags");
}

}  // namespace

std::shared_ptr<const OpenSsl> OpenSsl::load(const std::string& library) {
  void* const mapped = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (mapped == nullptr) {
    const char* const why = dlerror();
    throw Error(ErrorCode::kConfig,
                words("TLS between instances needs the system's OpenSSL 3, and ", library, " cannot be loaded (",
                      why == nullptr ? "no reason is given" : why, "); install libssl3"));
  }
  auto made = std::make_shared<OpenSsl>();
  const Finder find(mapped, library);
  find_library(*made, find);
  if (made->OPENSSL_version_major() < kLeastMajor) {
    throw Error(ErrorCode::kConfig, words("TLS between instances needs OpenSSL 3, and ", library, " is version ",
                                          made->OPENSSL_version_major(), "; install libssl3"));
  }
  find_contexts(*made, find);
  find_connections(*made, find);
  if (made->OPENSSL_init_ssl(kNoAtExit, nullptr) != 1) {
    throw Error(ErrorCode::kConfig, words("OpenSSL does not begin: ", made->take_error()));
  }
  return made;
}

std::string OpenSsl::take_error() const {
  const unsigned long error = ERR_get_error();
  ERR_clear_error();
  if (error == 0) {
    return "no reason is given";
  }
  std::array<char, 256> line{};
  ERR_error_string_n(error, line.data(), line.size());
  const std::string whole(line.data());  // error:NUMBER:LIBRARY:FUNCTION:REASON
  std::size_t at = 0;
  for (int colon = 0; colon < 4 && at != std::string::npos; ++colon) {
    at = whole.find(':', at + (colon > 0 ? 1 : 0));
  }
  return at == std::string::npos || at + 1 == whole.size() ? whole : whole.substr(at + 1);
}

}  // namespace kvbm
