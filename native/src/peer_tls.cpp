#include "kvbm/peer_tls.hpp"

#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <limits>
#include <system_error>
#include <utility>

#include "kvbm/error.hpp"
#include "kvbm/open_ssl.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

// Numbers of OpenSSL 3, which its macros hide.
constexpr int kSetMode = 33;           // SSL_CTRL_MODE
constexpr int kSetReadAhead = 41;      // SSL_CTRL_SET_READ_AHEAD
constexpr int kSetSessionCache = 44;   // SSL_CTRL_SET_SESS_CACHE_MODE
constexpr int kSetLeastVersion = 123;  // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr int kSetMostVersion = 124;   // SSL_CTRL_SET_MAX_PROTO_VERSION
constexpr long kTls13 = 0x0304;        // TLS1_3_VERSION
constexpr long kPieceByPiece = 1 | 2;  // SSL_MODE_ENABLE_PARTIAL_WRITE, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER
// After which no clock that files are stamped with stands still any more
constexpr std::int64_t kSettledS = 2;
constexpr int kPem = 1;                   // SSL_FILETYPE_PEM
constexpr int kBothShow = 1 | 2;          // SSL_VERIFY_PEER, SSL_VERIFY_FAIL_IF_NO_PEER_CERT
constexpr int kErrorWantsRead = 2;        // SSL_ERROR_WANT_READ
constexpr int kErrorWantsWrite = 3;       // SSL_ERROR_WANT_WRITE
constexpr int kErrorSystem = 5;           // SSL_ERROR_SYSCALL
constexpr int kErrorEnded = 6;            // SSL_ERROR_ZERO_RETURN
constexpr int kKeyUpdate = 0;             // SSL_KEY_UPDATE_NOT_REQUESTED
constexpr int kSourceSink = 0x0400;       // BIO_TYPE_SOURCE_SINK
constexpr int kReadAgain = 1 | 8;         // BIO_FLAGS_READ, BIO_FLAGS_SHOULD_RETRY
constexpr int kWriteAgain = 2 | 8;        // BIO_FLAGS_WRITE, BIO_FLAGS_SHOULD_RETRY
constexpr int kAllAgain = 1 | 2 | 4 | 8;  // BIO_FLAGS_RWS, BIO_FLAGS_SHOULD_RETRY
constexpr int kFlush = 11;                // BIO_CTRL_FLUSH

// The first that both sides have is taken; with the shortest key the bytes are quickest.
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
constexpr std::size_t kReadAheadBytes = 64 << 10;  // taken from the system at a time
constexpr std::int64_t kMostFileBytes = 1 << 20;   // of a file with certificates

// Whether bytes that begin like this may be TLS: a handshake or an alert. A message of kvbm begins with its length,
// which is one of these for names of 229 and 230 bytes alone.
bool may_be_tls(std::uint8_t first) noexcept { return first == 0x16 || first == 0x15; }

// OpenSSL would ask for the words of an encrypted key at the terminal.
int no_password(char*, int, int, void*) { return 0; }

}  // namespace

// What moves bytes for OpenSSL: as its own sockets do, but without a signal where the other side is gone, and without
// ever waiting.
struct TlsWire {
  // Whose call is under way in this thread: OpenSSL hands over nothing else that could be told without its help.
  static thread_local TlsSession* calling;

  static int read(void* bio, char* into, int most);
  static int write(void* bio, const char* data, int bytes);
  static long control(void*, int command, long, void*) { return command == kFlush ? 1 : 0; }
};

thread_local TlsSession* TlsWire::calling = nullptr;

// What sessions have in common: OpenSSL's context with the files as they were.
struct PeerTls::Context {
  explicit Context(std::shared_ptr<const OpenSsl> library) : ssl(std::move(library)) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    if (context != nullptr) {
      ssl->SSL_CTX_free(context);
    }
    if (wire != nullptr) {
      ssl->BIO_meth_free(wire);
    }
  }

  std::shared_ptr<const OpenSsl> ssl;  // the library
  void* context = nullptr;             // an SSL_CTX
  void* wire = nullptr;                // a BIO_METHOD
};

namespace {

// Sets `calling` for its life, and empties this thread's list of errors, by which OpenSSL judges a call.
class Call {
 public:
  Call(TlsSession* session, const OpenSsl& ssl) : before_(std::exchange(TlsWire::calling, session)) {
    ssl.ERR_clear_error();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { TlsWire::calling = before_; }

 private:
  TlsSession* before_;  // none, unless a session is used within another's call
};

}  // namespace

int TlsWire::read(void* bio, char* into, int most) {
  const OpenSsl& ssl = *calling->context_->ssl;
  ssl.BIO_clear_flags(bio, kAllAgain);
  const auto heard = [&](ssize_t taken) {
    if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      ssl.BIO_set_flags(bio, kReadAgain);
    }
    return static_cast<int>(taken);
  };
  if (!calling->has_heard_) {
    std::uint8_t first = 0;
    // Where nothing has come yet nothing is taken: its first byte would go unseen, and what follows may begin
    // otherwise.
    if (const ssize_t seen = recv(calling->fd_, &first, 1, MSG_DONTWAIT | MSG_PEEK); seen != 1) {
      return heard(seen);
    }
    calling->has_heard_ = true;
    calling->is_plain_ = !may_be_tls(first);
  }
  return calling->is_plain_ ? -1 : heard(recv(calling->fd_, into, static_cast<std::size_t>(most), MSG_DONTWAIT));
}

int TlsWire::write(void* bio, const char* data, int bytes) {
  const OpenSsl& ssl = *calling->context_->ssl;
  ssl.BIO_clear_flags(bio, kAllAgain);
  const ssize_t sent = send(calling->fd_, data, static_cast<std::size_t>(bytes), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    ssl.BIO_set_flags(bio, kWriteAgain);
  }
  return static_cast<int>(sent);
}

// -- files ------------------------------------------------------------------------------------------------------------

PeerTls::PeerTls(TlsOptions options) : options_(std::move(options)), ssl_(OpenSsl::load(options_.library)) {
  loaded_ = stamps();
  context_ = load();
}

PeerTls::Stamps PeerTls::stamps() const {
  Stamps found{};
  const std::array<const std::string*, 3> paths{&options_.cert, &options_.key, &options_.ca};
  for (std::size_t at = 0; at < paths.size(); ++at) {
    struct stat about{};
    if (stat(paths[at]->c_str(), &about) != 0) {
      throw Error(ErrorCode::kConfig,
                  words(*paths[at], " cannot be read (", std::generic_category().message(errno), ")"));
    }
    if (!S_ISREG(about.st_mode) || about.st_size > kMostFileBytes) {
      throw Error(ErrorCode::kConfig, words(*paths[at], " is no file of at most 1 MiB; give one with PEM"));
    }
    const std::int64_t changed_ns = about.st_ctim.tv_sec * 1'000'000'000LL + about.st_ctim.tv_nsec;
    found[at] = {changed_ns, std::time(nullptr) - about.st_ctim.tv_sec > kSettledS, about.st_ino, about.st_size};
  }
  return found;
}

std::shared_ptr<const PeerTls::Context> PeerTls::load() const {
  auto made = std::make_shared<Context>(ssl_);
  const OpenSsl& ssl = *ssl_;
  ssl.ERR_clear_error();
  made->context = ssl.SSL_CTX_new(ssl.TLS_method());
  made->wire = ssl.BIO_meth_new(ssl.BIO_get_new_index() | kSourceSink, "kvbm");
  const auto require = [&](bool is_so, const auto&... what) {
    if (!is_so) {
      throw Error(ErrorCode::kConfig, words(what..., " (", ssl.take_error(), ")"));
    }
  };
  require(made->context != nullptr && made->wire != nullptr, "OpenSSL makes no connections");
  void* const context = made->context;
  require(ssl.SSL_CTX_ctrl(context, kSetLeastVersion, kTls13, nullptr) == 1 &&
              ssl.SSL_CTX_ctrl(context, kSetMostVersion, kTls13, nullptr) == 1 &&
              ssl.SSL_CTX_set_ciphersuites(context, kCiphers) == 1,
          "this OpenSSL does not speak TLS 1.3");
  ssl.SSL_CTX_ctrl(context, kSetMode, kPieceByPiece, nullptr);
  ssl.SSL_CTX_ctrl(context, kSetReadAhead, 1, nullptr);
  ssl.SSL_CTX_set_default_read_buffer_len(context, kReadAheadBytes);
  // Connections last; what could be resumed later would lie unread on them, and look like a word of the other side.
  ssl.SSL_CTX_set_num_tickets(context, 0);
  ssl.SSL_CTX_ctrl(context, kSetSessionCache, 0, nullptr);
  ssl.SSL_CTX_set_default_passwd_cb(context, no_password);
  require(ssl.SSL_CTX_use_certificate_chain_file(context, options_.cert.c_str()) == 1, options_.cert,
          " has no certificate that can be used");
  require(ssl.SSL_CTX_use_PrivateKey_file(context, options_.key.c_str(), kPem) == 1, options_.key,
          " has no key that can be used; it is in PEM, fits the certificate, and has no password");
  require(ssl.SSL_CTX_check_private_key(context) == 1, options_.key, " is not the key of ", options_.cert);
  require(ssl.SSL_CTX_load_verify_locations(context, options_.ca.c_str(), nullptr) == 1, options_.ca,
          " has no certificate that can be used");
  ssl.SSL_CTX_set_verify(context, kBothShow, nullptr);
  require(ssl.BIO_meth_set_read(made->wire, TlsWire::read) == 1 &&
              ssl.BIO_meth_set_write(made->wire, TlsWire::write) == 1 &&
              ssl.BIO_meth_set_ctrl(made->wire, TlsWire::control) == 1,
          "OpenSSL takes no connection");
  return made;
}

std::shared_ptr<const PeerTls::Context> PeerTls::latest() {
  const std::lock_guard held(mutex_);
  try {
    const Stamps now = stamps();
    if (now != loaded_) {
      context_ = load();
      loaded_ = now;
    }
  } catch (const Error&) {  // half replaced, or not usable: it is looked at again by the next connection
  }
  return context_;
}

std::unique_ptr<TlsSession> PeerTls::session(PeerRole role, int fd) {
  return std::make_unique<TlsSession>(latest(), role, fd, options_.rekey_bytes);
}

// -- a connection -----------------------------------------------------------------------------------------------------

TlsSession::TlsSession(std::shared_ptr<const PeerTls::Context> context, PeerRole role, int fd,
                       std::uint64_t rekey_bytes)
    : context_(std::move(context)), fd_(fd), rekey_bytes_(rekey_bytes) {
  const OpenSsl& ssl = *context_->ssl;
  const Call call(this, ssl);
  ssl_ = ssl.SSL_new(context_->context);
  void* const bio = ssl_ == nullptr ? nullptr : ssl.BIO_new(context_->wire);
  if (bio == nullptr) {
    if (ssl_ != nullptr) {
      ssl.SSL_free(ssl_);
    }
    throw Error(ErrorCode::kConfig, words("OpenSSL makes no connection (", ssl.take_error(), ")"));
  }
  ssl.BIO_set_init(bio, 1);
  ssl.SSL_set_bio(ssl_, bio, bio);
  if (role == PeerRole::kOwner) {
    ssl.SSL_set_accept_state(ssl_);
  } else {
    ssl.SSL_set_connect_state(ssl_);
  }
}

TlsSession::~TlsSession() {
  const OpenSsl& ssl = *context_->ssl;
  const Call call(this, ssl);
  ssl.SSL_free(ssl_);
  ssl.ERR_clear_error();  // who uses OpenSSL in this thread next finds nothing of ours
}

TlsStep TlsSession::ended(TlsStep step, std::string why) {
  is_up_ = false;
  why_ = std::move(why);
  return step;
}

TlsStep TlsSession::failed_or_waits(int returned) {
  const OpenSsl& ssl = *context_->ssl;
  if (is_plain_) {
    ssl.ERR_clear_error();
    return ended(TlsStep::kPlain, "the other side does not speak TLS");
  }
  switch (ssl.SSL_get_error(ssl_, returned)) {
    case kErrorWantsRead:
      return TlsStep::kWantsInput;
    case kErrorWantsWrite:
      return TlsStep::kWantsRoom;
    case kErrorEnded:
      return ended(TlsStep::kEnded, "the other side has closed");
    case kErrorSystem:  // it has hung up without a word, or the connection has broken
      ssl.ERR_clear_error();
      return ended(TlsStep::kEnded, "the connection has ended");
    default:
      break;
  }
  const std::string error = ssl.take_error();
  const long judged = ssl.SSL_get_verify_result(ssl_);
  if (judged != 0) {
    return ended(TlsStep::kFailed, words("its certificate is refused: ", ssl.X509_verify_cert_error_string(judged)));
  }
  return ended(TlsStep::kFailed, words("TLS: ", error));
}

TlsStep TlsSession::shake() {
  const OpenSsl& ssl = *context_->ssl;
  const Call call(this, ssl);
  const int returned = ssl.SSL_do_handshake(ssl_);
  if (returned != 1) {
    return failed_or_waits(returned);
  }
  is_up_ = true;
  return TlsStep::kDone;
}

TlsMoved TlsSession::read(std::span<std::uint8_t> into) {
  if (!is_up_) {
    return {0, TlsStep::kFailed};
  }
  const OpenSsl& ssl = *context_->ssl;
  const Call call(this, ssl);
  std::size_t taken = 0;
  const int returned = ssl.SSL_read_ex(ssl_, into.data(), into.size(), &taken);
  return returned == 1 ? TlsMoved{taken, TlsStep::kDone} : TlsMoved{0, failed_or_waits(returned)};
}

TlsMoved TlsSession::write(Bytes data) {
  if (!is_up_) {
    return {0, TlsStep::kFailed};
  }
  const OpenSsl& ssl = *context_->ssl;
  const Call call(this, ssl);
  if (sent_bytes_ >= rekey_bytes_ && !is_writing_) {
    if (const int returned = ssl.SSL_key_update(ssl_, kKeyUpdate); returned != 1) {
      return {0, failed_or_waits(returned)};
    }
    sent_bytes_ = 0;
  }
  std::size_t sent = 0;
  const int returned = ssl.SSL_write_ex(ssl_, data.data(), data.size(), &sent);
  is_writing_ = returned != 1;
  if (returned != 1) {
    return {0, failed_or_waits(returned)};
  }
  sent_bytes_ += sent;
  return {sent, TlsStep::kDone};
}

bool TlsSession::has_unread() const noexcept { return is_up_ && context_->ssl->SSL_has_pending(ssl_) != 0; }

}  // namespace kvbm
