// TLS 1.3 between instances, by the system's OpenSSL: each side shows a certificate that one authority has signed.
//
// PeerTls: an instance's certificate and whom it trusts; made once, shared by its connections. Any thread. Files that
// are replaced are read anew by the next connection; what cannot be used then is left, and those before stay in use.
// TlsSession: one connection over a socket it does not own; one thread at a time. It never waits: who calls waits as a
// step says.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "kvbm/event.hpp"
#include "kvbm/peer_wire.hpp"

namespace kvbm {

struct OpenSsl;

struct TlsOptions {
  // File (PEM) with this instance's certificate, and those between it and the authority's
  std::string cert;
  std::string key;                          // file (PEM) with the certificate's key
  std::string ca;                           // file (PEM) of who signs all instances' certificates
  std::string library = "libssl.so.3";      // OpenSSL's
  std::uint64_t rekey_bytes = 32ULL << 30;  // sent under one key; AES-GCM is safe for ten times as many
};

// What became of a call.
enum class TlsStep : std::uint8_t {
  kDone,        // it has done something
  kWantsInput,  // again, once the socket can be read
  kWantsRoom,   // again with the same bytes, once the socket can be written
  kEnded,       // the other side has closed
  kPlain,       // of a handshake: what came first is no TLS, and lies where it came; nothing can be done any more
  kFailed,      // `why` says why; nothing can be done any more
};

// How many bytes were moved; 0 unless the step is kDone.
struct TlsMoved {
  std::size_t bytes;
  TlsStep step;
};

class TlsSession;

class PeerTls {
 public:
  // Throws Error: kConfig: there is no OpenSSL 3, or a file cannot be used.
  explicit PeerTls(TlsOptions options);

  // A connection over a connected stream socket, with the files as they are now. Throws Error: kConfig, there is no
  // memory.
  std::unique_ptr<TlsSession> session(PeerRole role, int fd);

 private:
  friend class TlsSession;
  struct Context;
  struct Stamp {
    std::int64_t changed_ns;  // when it was last written, or its owner, rights or times set
    // Long ago: within a tick of the clock it can be written again without another stamp, so it is read once more
    bool is_settled;
    std::uint64_t file;  // its number in its file system
    std::int64_t bytes;  // its size
    bool operator==(const Stamp&) const = default;
  };
  using Stamps = std::array<Stamp, 3>;  // of cert, key and ca

  Stamps stamps() const;
  std::shared_ptr<const Context> load() const;
  std::shared_ptr<const Context> latest();

  const TlsOptions options_;                // as given
  std::shared_ptr<const OpenSsl> ssl_;      // OpenSSL
  std::mutex mutex_;                        // over what follows
  Stamps loaded_;                           // of the files that were last looked into
  std::shared_ptr<const Context> context_;  // of those that could last be used
};

class TlsSession {
 public:
  TlsSession(std::shared_ptr<const PeerTls::Context> context, PeerRole role, int fd, std::uint64_t rekey_bytes);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // The handshake: again until it is done.
  TlsStep shake();
  TlsMoved read(std::span<std::uint8_t> into);
  // Of bytes, at least one; at most a record of them goes at a time.
  TlsMoved write(Bytes data);

  // The handshake is done, and nothing has failed since.
  bool is_up() const noexcept { return is_up_; }
  // Something has come that was not read yet.
  bool has_unread() const noexcept;
  // Why it failed, for people.
  const std::string& why() const noexcept { return why_; }

 private:
  friend struct TlsWire;

  TlsStep failed_or_waits(int returned);
  TlsStep ended(TlsStep step, std::string why);

  std::shared_ptr<const PeerTls::Context> context_;  // what it is made with
  const int fd_;                                     // the socket
  const std::uint64_t rekey_bytes_;                  // as in TlsOptions
  void* ssl_ = nullptr;                              // OpenSSL's part
  bool is_up_ = false;                               // see is_up
  bool has_heard_ = false;                           // something has come
  bool is_plain_ = false;                            // it is no TLS
  bool is_writing_ = false;                          // a record is half sent
  std::uint64_t sent_bytes_ = 0;                     // under this key
  std::string why_;                                  // see why
};

}  // namespace kvbm
