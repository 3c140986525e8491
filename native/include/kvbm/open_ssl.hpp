// OpenSsl: the functions of the system's OpenSSL that the peer transport uses, found by their names when TLS is first
// asked for.
//
// Life: the library stays mapped until the process ends, because it may have begun things of its own. Immutable; any
// thread. They are declared here as OpenSSL 3 has them, so that neither its headers nor the library are needed where
// nobody asks for TLS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace kvbm {

struct OpenSsl {
  // Throws Error: kConfig, the library is not there, lacks a function, or is older than version 3.
  static std::shared_ptr<const OpenSsl> load(const std::string& library);
  // The oldest error of this thread in words; empties the thread's list of them.
  std::string take_error() const;

  // The library.
  unsigned (*OPENSSL_version_major)();
  int (*OPENSSL_init_ssl)(std::uint64_t options, const void* settings);
  void (*ERR_clear_error)();
  unsigned long (*ERR_get_error)();
  void (*ERR_error_string_n)(unsigned long error, char* words, std::size_t bytes);
  const char* (*X509_verify_cert_error_string)(long result);

  // What connections have in common.
  const void* (*TLS_method)();
  void* (*SSL_CTX_new)(const void* method);
  void (*SSL_CTX_free)(void* context);
  long (*SSL_CTX_ctrl)(void* context, int command, long number, void* more);
  int (*SSL_CTX_set_num_tickets)(void* context, std::size_t tickets);
  int (*SSL_CTX_set_ciphersuites)(void* context, const char* names);
  void (*SSL_CTX_set_default_read_buffer_len)(void* context, std::size_t bytes);
  void (*SSL_CTX_set_default_passwd_cb)(void* context, int (*ask)(char*, int, int, void*));
  int (*SSL_CTX_use_certificate_chain_file)(void* context, const char* path);
  int (*SSL_CTX_use_PrivateKey_file)(void* context, const char* path, int type);
  int (*SSL_CTX_check_private_key)(const void* context);
  int (*SSL_CTX_load_verify_locations)(void* context, const char* file, const char* folder);
  void (*SSL_CTX_set_verify)(void* context, int mode, void* callback);

  // A connection.
  void* (*SSL_new)(void* context);
  void (*SSL_free)(void* ssl);
  void (*SSL_set_bio)(void* ssl, void* from, void* to);
  void (*SSL_set_accept_state)(void* ssl);
  void (*SSL_set_connect_state)(void* ssl);
  int (*SSL_do_handshake)(void* ssl);
  int (*SSL_read_ex)(void* ssl, void* into, std::size_t most, std::size_t* taken);
  int (*SSL_write_ex)(void* ssl, const void* data, std::size_t bytes, std::size_t* sent);
  int (*SSL_get_error)(const void* ssl, int returned);
  int (*SSL_has_pending)(const void* ssl);
  int (*SSL_key_update)(void* ssl, int type);
  long (*SSL_get_verify_result)(const void* ssl);

  // What it reads and writes.
  int (*BIO_get_new_index)();
  void* (*BIO_meth_new)(int type, const char* name);
  void (*BIO_meth_free)(void* method);
  int (*BIO_meth_set_read)(void* method, int (*read)(void*, char*, int));
  int (*BIO_meth_set_write)(void* method, int (*write)(void*, const char*, int));
  int (*BIO_meth_set_ctrl)(void* method, long (*control)(void*, int, long, void*));
  void* (*BIO_new)(const void* method);
  void (*BIO_set_init)(void* bio, int is_ready);
  void (*BIO_set_flags)(void* bio, int flags);
  void (*BIO_clear_flags)(void* bio, int flags);
};

}  // namespace kvbm
