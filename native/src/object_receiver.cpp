#include "kvbm/object_receiver.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "kvbm/block_coding.hpp"
#include "kvbm/checksum.hpp"
#include "kvbm/http_answer.hpp"
#include "kvbm/object_header.hpp"
#include "kvbm/peer_signals.hpp"

namespace kvbm {
namespace {

// Bytes are received in pieces of at most this size, which the checksum then finds in the cache.
constexpr std::size_t kReceiveBytes = 256 << 10;
// Of an answer's head; no store of ours sends a tenth of it.
constexpr std::size_t kMostHeadBytes = 16 << 10;
// First read of an answer: what comes with the head is copied once more.
constexpr std::size_t kFirstBytes = 2 << 10;
// A connection that was idle for longer may be gone without a word, for all that stands between.
constexpr auto kIdle = std::chrono::seconds(20);
constexpr std::size_t kMostIdle = 64;  // connections
constexpr std::string_view kBegin = "HTTP/1.";
constexpr unsigned kOk = 200;
constexpr unsigned kAbsent = 404;

}  // namespace

struct ObjectReceiver::Connection {
  ReaderSocket socket;                 // to the store
  std::string address;                 // of it
  PeerMoment used = PeerClock::now();  // last
  bool may_be_stale = false;           // it was idle, and has not answered since
  std::vector<std::uint8_t> came{};    // an answer's head, and what came with it
  std::size_t read = 0;                // bytes of that which were taken
};

// The objects of one call, which one or more threads work off. Any thread.
class ObjectReceiver::Call {
 public:
  Call(const ObjectWish& wanted, std::span<ObjectAnswer> all, std::span<std::uint32_t> sums) noexcept
      : wish(wanted), answers(all), checksums(sums), blocks(all.empty() ? 0 : sums.size() / all.size()) {}

  // An object that nobody has begun; none: all are, or the store is in trouble.
  std::optional<std::size_t> take() noexcept {
    if (has_failed_.load() || PeerClock::now() >= wish.deadline) {
      return std::nullopt;
    }
    const std::size_t next = next_.fetch_add(1);
    return next < answers.size() ? std::optional(next) : std::nullopt;
  }
  void fail() noexcept { has_failed_ = true; }
  // Addresses in turn.
  const std::string& address() noexcept { return wish.addresses[connected_.fetch_add(1) % wish.addresses.size()]; }

  const ObjectWish& wish;                    // what is wanted
  const std::span<ObjectAnswer> answers;     // of each object, written by whoever has taken it
  const std::span<std::uint32_t> checksums;  // of each block, the same
  const std::size_t blocks;                  // of an object

 private:
  std::atomic<std::size_t> next_{0};       // first object that nobody has begun
  std::atomic<std::size_t> connected_{0};  // connections that were made
  std::atomic<bool> has_failed_{false};    // nobody begins anew
};

// One thread's share of a call. Its thread only.
class ObjectReceiver::Worker {
 public:
  Worker(ObjectReceiver& receiver, Call& call) noexcept : receiver_(receiver), call_(call), wish_(call.wish) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() {
    drop(true);
    receiver_.spare_.give(std::move(room_));
  }

  void work_off() noexcept {
    while (const auto object = call_.take()) {
      try {
        ask(*object);
        receive(*object);
      } catch (const std::exception&) {  // of the socket, the protocol or memory: somebody else will tell
        call_.answers[*object] = {};
        call_.fail();
        drop(false);
      }
    }
  }

 private:
  PeerMoment until() const { return std::min(wish_.deadline, PeerClock::now() + wish_.is_silent); }
  void drop(bool is_good) noexcept {
    if (connection_) {
      receiver_.put_down(std::move(connection_), is_good);
    }
  }
  void connect(bool anew);
  void ask(std::size_t object);
  HttpAnswer ask_once(std::size_t object);
  void receive(std::size_t object);
  bool take_blocks(std::size_t object, std::span<const KeptBlock> kept);
  bool take_block(const KeptBlock& kept, std::int64_t row, std::uint32_t& checksum);
  std::uint32_t take(std::span<std::uint8_t> into);
  std::size_t take_some(std::span<std::uint8_t> into);
  void pass_over(std::size_t bytes);
  std::span<std::uint8_t> room(std::size_t bytes);

  ObjectReceiver& receiver_;                // whose connections
  Call& call_;                              // what is worked off
  const ObjectWish& wish_;                  // of the call
  std::unique_ptr<Connection> connection_;  // null before the first object and after trouble
  HttpAnswer answer_;                       // to the object that is received
  std::vector<std::uint8_t> header_;        // of it
  std::vector<KeptBlock> kept_;             // as the header says
  Buffer room_;                             // for what does not go into a row as it comes
  std::unique_ptr<BlockDecoder> decoder_;   // made when it is needed
};

void ObjectReceiver::Worker::connect(bool anew) {
  if (connection_ && !anew) {
    return;
  }
  drop(false);
  std::unique_ptr<Connection> found = anew ? nullptr : receiver_.idle_one(wish_);
  if (!found) {
    const std::string& address = call_.address();
    const PeerMoment stands = std::min(wish_.deadline, PeerClock::now() + wish_.connects);
    found.reset(new Connection{ReaderSocket::to_tcp(address, wish_.port, stands), address});
    found->came.resize(kMostHeadBytes);
  }
  if (!receiver_.pick_up(*found)) {
    throw PeerTrouble("it is closed here");
  }
  connection_ = std::move(found);
}

// A connection that was idle may have ended meanwhile, which shows only now.
void ObjectReceiver::Worker::ask(std::size_t object) {
  connect(false);
  try {
    answer_ = ask_once(object);
  } catch (const PeerTrouble&) {
    if (!connection_->may_be_stale || PeerClock::now() >= wish_.deadline) {
      throw;
    }
    connect(true);
    answer_ = ask_once(object);
  }
}

HttpAnswer ObjectReceiver::Worker::ask_once(std::size_t object) {
  Connection& connection = *connection_;
  connection.socket.send(wish_.requests[object], until());
  std::vector<std::uint8_t>& came = connection.came;
  came.resize(kMostHeadBytes);
  for (std::size_t bytes = 0; bytes < kMostHeadBytes;) {
    const std::size_t most = bytes == 0 ? kFirstBytes : kMostHeadBytes - bytes;
    bytes += connection.socket.receive_some(came.data() + bytes, most, until());
    connection.may_be_stale = false;
    const std::string_view text(reinterpret_cast<const char*>(came.data()), bytes);
    if (!text.starts_with(kBegin.substr(0, text.size()))) {
      break;
    }
    const std::size_t head_bytes = http_head_bytes(text);
    if (head_bytes == 0) {
      continue;
    }
    const auto answer = read_http_answer(text.substr(0, head_bytes));
    if (!answer) {
      break;
    }
    came.resize(bytes);
    connection.read = head_bytes;
    return *answer;
  }
  throw PeerTrouble("its answer has no head");
}

void ObjectReceiver::Worker::receive(std::size_t object) {
  ObjectAnswer& answer = call_.answers[object];
  answer.status = static_cast<std::uint16_t>(answer_.status);
  const std::size_t header_bytes = object_header_bytes(call_.blocks);
  const std::uint64_t most_bytes = header_bytes + std::uint64_t{call_.blocks} * wish_.row_bytes;
  const std::uint64_t bytes = answer_.body_bytes.value_or(0);
  if (answer_.status != kOk || bytes < header_bytes || bytes > most_bytes) {
    if (answer_.status != kOk && answer_.status != kAbsent) {
      call_.fail();
    }
    return drop(false);
  }
  header_.resize(header_bytes);
  take(header_);
  const Bytes hashes = wish_.hashes.subspan(object * call_.blocks * kHashBytes, call_.blocks * kHashBytes);
  if (!is_object_of(header_, wish_.namespace_id, hashes, wish_.row_bytes, bytes, kept_)) {
    return drop(false);
  }
  answer.is_whole = take_blocks(object, kept_);
  answer.object_bytes = bytes;
  if (!answer_.stays || connection_->read != connection_->came.size()) {
    drop(false);
  }
}

bool ObjectReceiver::Worker::take_blocks(std::size_t object, std::span<const KeptBlock> kept) {
  bool is_whole = true;
  for (std::size_t block = 0; block < kept.size(); ++block) {
    const std::size_t at = object * call_.blocks + block;
    is_whole &= take_block(kept[block], wish_.rows[at], call_.checksums[at]);
  }
  return is_whole;
}

bool ObjectReceiver::Worker::take_block(const KeptBlock& kept, std::int64_t row, std::uint32_t& checksum) {
  if (row < 0) {
    pass_over(kept.bytes);
    return true;
  }
  const std::span target(wish_.base + wish_.stride * row, wish_.row_bytes);
  if (kept.coding == Coding::kRaw) {
    checksum = take(target);
    return checksum == kept.checksum;
  }
  const std::span coded = room(kept.bytes);
  for (std::size_t done = 0; done < coded.size();) {
    const std::span piece = coded.subspan(done, std::min(kReceiveBytes, coded.size() - done));
    done += take_some(piece);
  }
  if (!decoder_) {
    decoder_ = std::make_unique<BlockDecoder>();
  }
  return decoder_->decode(coded, kept.coding, target, checksum) && checksum == kept.checksum;
}

void ObjectReceiver::Worker::pass_over(std::size_t bytes) {
  const std::span piece = room(std::min(bytes, kReceiveBytes));
  while (bytes > 0) {
    bytes -= take_some(piece.first(std::min(bytes, piece.size())));
  }
}

std::uint32_t ObjectReceiver::Worker::take(std::span<std::uint8_t> into) {
  std::uint32_t crc = 0;
  while (!into.empty()) {
    const std::size_t came = take_some(into.first(std::min(kReceiveBytes, into.size())));
    crc = crc32c(into.first(came), crc);
    into = into.subspan(came);
  }
  return crc;
}

std::size_t ObjectReceiver::Worker::take_some(std::span<std::uint8_t> into) {
  Connection& connection = *connection_;
  const std::size_t left = connection.came.size() - connection.read;
  if (left == 0) {
    return connection.socket.receive_some(into.data(), into.size(), until());
  }
  const std::size_t taken = std::min(left, into.size());
  std::copy_n(connection.came.data() + connection.read, taken, into.data());
  connection.read += taken;
  return taken;
}

std::span<std::uint8_t> ObjectReceiver::Worker::room(std::size_t bytes) {
  if (room_.size < bytes) {
    receiver_.spare_.give(std::exchange(room_, {}));
    room_ = receiver_.spare_.take(std::max(bytes, wish_.row_bytes));
  }
  return {room_.bytes.get(), bytes};
}

ObjectReceiver::ObjectReceiver() = default;

ObjectReceiver::~ObjectReceiver() { close(); }

// A connection to one of the store's addresses that nobody uses and that seems to be alive.
std::unique_ptr<ObjectReceiver::Connection> ObjectReceiver::idle_one(const ObjectWish& wish) {
  const PeerMoment oldest = PeerClock::now() - kIdle;
  const std::lock_guard held(lock_);
  while (!idle_.empty()) {
    std::unique_ptr<Connection> found = std::move(idle_.back());
    idle_.pop_back();
    const bool is_there = std::ranges::find(wish.addresses, found->address) != wish.addresses.end();
    if (is_there && found->used > oldest && found->socket.is_quiet()) {
      found->may_be_stale = true;
      return found;
    }
  }
  return nullptr;
}

// False: all ends.
bool ObjectReceiver::pick_up(Connection& connection) {
  const std::lock_guard held(lock_);
  if (!is_closed_) {
    in_use_.push_back(&connection);
  }
  return !is_closed_;
}

void ObjectReceiver::put_down(std::unique_ptr<Connection> connection, bool is_good) noexcept {
  const std::lock_guard held(lock_);
  std::erase(in_use_, connection.get());
  if (is_good && !is_closed_ && idle_.size() < kMostIdle) {
    connection->used = PeerClock::now();
    idle_.push_back(std::move(connection));  // room for it was made when the first call came
  }
}

void ObjectReceiver::receive(const ObjectWish& wish, std::span<ObjectAnswer> answers,
                             std::span<std::uint32_t> checksums) {
  std::ranges::fill(answers, ObjectAnswer{});
  std::ranges::fill(checksums, 0U);
  if (!is_of_this_process() || answers.empty()) {
    return;
  }
  {
    const std::lock_guard held(lock_);
    if (is_closed_) {
      return;
    }
    idle_.reserve(kMostIdle);
    ++calls_;
  }
  Call call(wish, answers, checksums);
  std::vector<std::thread> helpers;
  const std::size_t most = std::min<std::size_t>(std::max(1U, wish.connections), answers.size());
  try {
    const AllSignalsMasked masked;
    helpers.reserve(most - 1);
    while (helpers.size() + 1 < most) {
      helpers.emplace_back([this, &call] { Worker(*this, call).work_off(); });
    }
  } catch (const std::exception&) {  // no thread or no memory is to be had: with fewer then
  }
  Worker(*this, call).work_off();
  for (std::thread& helper : helpers) {
    helper.join();
  }
  const std::lock_guard held(lock_);
  --calls_;
  changed_.notify_all();
}

void ObjectReceiver::close() noexcept {
  if (!is_of_this_process()) {
    return;
  }
  std::unique_lock held(lock_);
  is_closed_ = true;
  for (Connection* const connection : in_use_) {
    connection->socket.shut();
  }
  idle_.clear();
  changed_.wait(held, [this] { return calls_ == 0; });
}

}  // namespace kvbm
