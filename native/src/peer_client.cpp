#include "kvbm/peer_client.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <variant>

#include "kvbm/checksum.hpp"
#include "kvbm/error.hpp"
#include "kvbm/peer_signals.hpp"
#include "kvbm/words.hpp"

namespace kvbm {
namespace {

// A question names blocks of about so many bytes at most: between two of them a reader looks at its deadline, and no
// lease lasts longer.
constexpr std::size_t kPieceBytes = 64 << 20;
// A read of fewer bytes is over before a second stream has begun.
constexpr std::size_t kSplitBytes = 1 << 20;
// Bytes are received in pieces of at most this size, which the checksum then finds in the cache.
constexpr std::size_t kReceiveBytes = 256 << 10;

constexpr const char* kClosed = "this reader is closed";

// A lease is taken to end a little early: the clock is read, and the last copy is judged, before it does.
std::chrono::milliseconds margin_of(std::uint32_t lease_ms) noexcept {
  return std::chrono::milliseconds(1 + lease_ms / 64);
}

TargetRows rows_from(const TargetRows& rows, std::size_t first) noexcept {
  if (rows.at != nullptr) {
    return {rows.base, rows.stride, rows.at + first};
  }
  return {rows.base + rows.stride * static_cast<std::ptrdiff_t>(first), rows.stride, nullptr};
}

}  // namespace

// A read under way, which one or two streams work on. Any thread but for what says otherwise.
class PeerClient::Reading {
 public:
  struct Piece {
    std::size_t first;  // of the wish
    std::size_t count;  // blocks
  };

  Reading(const PeerWish& wanted, std::span<PeerOutcome> rows, std::span<std::uint32_t> sums, unsigned streams)
      : wish(wanted), outcomes(rows), checksums(sums), ends_at_(rows.size()) {
    const std::size_t bytes = rows.size() * wanted.row_bytes;
    is_split = streams > 1 && rows.size() > 1 && bytes >= kSplitBytes;
    const std::size_t share = is_split ? (rows.size() + 1) / 2 : rows.size();
    piece_blocks_ =
        std::clamp<std::size_t>(kPieceBytes / std::max<std::size_t>(1, wanted.row_bytes), 1, kMostPeerHashes);
    piece_blocks_ = std::min(piece_blocks_, std::max<std::size_t>(1, share));
  }

  // Blocks that nobody has taken. None: all are taken, something failed, or the owner lacks one before them.
  std::optional<Piece> take() noexcept {
    const std::size_t first = next_.fetch_add(piece_blocks_);
    if (first >= ends_at_.load() || has_failed_.load()) {
      return std::nullopt;
    }
    return Piece{first, std::min(piece_blocks_, outcomes.size() - first)};
  }
  void lacks(std::size_t block) noexcept {
    std::size_t known = ends_at_.load();
    while (block < known && !ends_at_.compare_exchange_weak(known, block)) {
    }
  }
  void fail(std::string trouble, std::uint32_t retry_ms = 0, bool is_shut = false) {
    has_failed_ = true;
    const std::lock_guard held(lock_);
    if (account_.trouble.empty()) {
      account_ = {std::move(trouble), retry_ms, is_shut};
    }
  }
  // As `fail`, where no exception may leave: say makes the words.
  template <class Say>
  void fail_quietly(const Say& say) noexcept {
    try {
      fail(say());
    } catch (const std::exception&) {
      fail("out of memory");  // short enough to take none
    }
  }
  // Once no stream works on it: rows behind what the owner lacks are missing too.
  PeerAccount ended() {
    for (std::size_t block = ends_at_.load(); block < outcomes.size(); ++block) {
      if (outcomes[block] == PeerOutcome::kFailed) {
        outcomes[block] = PeerOutcome::kMissing;
      }
    }
    return account_;
  }

  // Of one block, by whoever has taken it.
  void judge(std::size_t block, std::uint32_t said, std::vector<std::uint8_t>& failed) {
    if (checksums[block] == said) {
      outcomes[block] = PeerOutcome::kGood;
      return;
    }
    outcomes[block] = PeerOutcome::kCorrupt;
    const Bytes hash = wish.hashes.subspan(kHashBytes * block, kHashBytes);
    failed.insert(failed.end(), hash.begin(), hash.end());
  }

  const PeerWish& wish;                      // what is read
  const std::span<PeerOutcome> outcomes;     // failed, until somebody knows better
  const std::span<std::uint32_t> checksums;  // of the rows
  bool is_split;                             // two streams help

 private:
  std::size_t piece_blocks_;             // of one question
  std::atomic<std::size_t> next_{0};     // first block that is not taken
  std::atomic<std::size_t> ends_at_;     // first block that the owner lacks
  std::atomic<bool> has_failed_{false};  // nobody begins anew
  std::mutex lock_;                      // over what follows
  PeerAccount account_;                  // of the first trouble
};

// A read that has been counted, until it is over in whatever way. Any thread.
class PeerClient::UnderWay {
 public:
  explicit UnderWay(PeerClient& client) noexcept : client_(client) {}
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
  ~UnderWay() {
    const std::lock_guard held(client_.lock_);
    --client_.reading_;
    client_.changed_.notify_all();
  }

 private:
  PeerClient& client_;  // where it is counted
};

// A place among a client's connections, and the connection of whoever holds it. One thread.
class PeerClient::Held {
 public:
  explicit Held(PeerClient& client) noexcept : client_(client) {}  // a place has been taken
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    put_down(is_good_ ? Ending::kGood : Ending::kBroken);
    client_.leave_place();
  }

  void work_off(Reading& reading) noexcept;

 private:
  struct Asked {
    PeerMessage answer;      // points into the connection
    std::uint32_t handle;    // of the namespace; 0 where it is not open
    PeerMoment lease_began;  // before the question was sent
    bool is_open;            // false: there is no answer
  };
  // How a connection is put down: it may serve again, has no room for a namespace more, or has broken.
  enum class Ending : std::uint8_t { kGood, kFull, kBroken };

  void pick_up(std::unique_ptr<ReaderConnection> connection);
  void put_down(Ending ending) noexcept;
  void connect(const PeerWish& wish, bool anew);
  Asked ask(Reading& reading, std::size_t first, std::size_t count);
  Asked ask_once(Reading& reading, std::size_t first, std::size_t count);
  void fetch(Reading& reading, Reading::Piece piece);
  bool is_granted(Reading& reading, const Asked& asked, std::size_t first);
  void receive(Reading& reading, const Asked& asked, const PeerGrant& grant, std::size_t first);
  void copy(Reading& reading, const Asked& asked, const PeerGrant& grant, std::size_t first);

  PeerClient& client_;                            // whose place
  std::unique_ptr<ReaderConnection> connection_;  // null before the first question and after trouble
  bool is_good_ = true;                           // the connection may serve again
};

void PeerClient::Held::pick_up(std::unique_ptr<ReaderConnection> connection) {
  const std::lock_guard held(client_.lock_);
  if (client_.is_closed_) {
    throw PeerTrouble(kClosed);
  }
  client_.in_use_.push_back(connection.get());
  connection_ = std::move(connection);
}

void PeerClient::Held::put_down(Ending ending) noexcept {
  if (!connection_) {
    return;
  }
  const std::lock_guard held(client_.lock_);
  std::erase(client_.in_use_, connection_.get());
  if (ending == Ending::kGood && !client_.is_closed_) {
    client_.idle_.push_back(std::move(connection_));  // never more than there are places, for which there is room
  } else if (ending == Ending::kBroken && client_.target_.transport == PeerTransport::kTcp) {
    client_.idle_.clear();  // whose machine is gone, or was forgotten on the way, says so on none of them
  } else {  // who has hung up here has often done so everywhere; what it lends is kept mapped by its connections
    std::erase_if(client_.idle_, [](const auto& idle) { return !idle->socket().is_quiet(); });
  }
  connection_.reset();
}

void PeerClient::Held::connect(const PeerWish& wish, bool anew) {
  if (connection_ && !anew && connection_->has_room_for(wish.namespace_id)) {
    return;
  }
  put_down(anew ? Ending::kBroken : Ending::kFull);
  std::unique_ptr<ReaderConnection> found = anew ? nullptr : client_.idle_one(wish.namespace_id);
  if (!found) {
    found = std::make_unique<ReaderConnection>(client_.target_, client_.mapping_, wish.deadline);
  } else {
    found->may_be_stale = true;
  }
  pick_up(std::move(found));
}

PeerClient::Held::Asked PeerClient::Held::ask_once(Reading& reading, std::size_t first, std::size_t count) {
  const PeerWish& wish = reading.wish;
  const PeerOpening opening = connection_->open(wish.namespace_id, wish.root, wish.deadline);
  if (opening.block_bytes == 0) {
    return {PeerBusy{}, 0, {}, false};
  }
  if (opening.block_bytes != wish.row_bytes) {
    throw PeerTrouble(
        words("its blocks have ", opening.block_bytes, " bytes, those of this instance ", wish.row_bytes));
  }
  const PeerMoment began = PeerClock::now();
  const Bytes hashes = wish.hashes.subspan(kHashBytes * first, kHashBytes * count);
  return {connection_->ask(opening.handle, hashes, wish.deadline), opening.handle, began, true};
}

// A connection that was idle may have ended meanwhile, which shows only now; and an owner may open a namespace anew.
PeerClient::Held::Asked PeerClient::Held::ask(Reading& reading, std::size_t first, std::size_t count) {
  connect(reading.wish, false);
  std::optional<Asked> asked;
  try {
    asked = ask_once(reading, first, count);
  } catch (const PeerTrouble&) {
    if (!connection_->may_be_stale || PeerClock::now() >= reading.wish.deadline) {
      throw;
    }
    connect(reading.wish, true);
    asked = ask_once(reading, first, count);
  }
  const auto* const gone = std::get_if<PeerGone>(&asked->answer);
  if (asked->is_open && gone != nullptr && gone->reason == PeerGoneReason::kNotOpened) {
    connection_->forget(reading.wish.namespace_id);
    connect(reading.wish, false);
    asked = ask_once(reading, first, count);
  }
  return *asked;
}

// Whether there are blocks; if not, says why.
bool PeerClient::Held::is_granted(Reading& reading, const Asked& asked, std::size_t first) {
  if (!asked.is_open) {
    reading.lacks(first);
    reading.fail("it does not open the namespace: it does not know it, or its tenant's secret is another", 0, true);
    return false;
  }
  if (const auto* const busy = std::get_if<PeerBusy>(&asked.answer)) {
    reading.fail("it is busy", std::max<std::uint32_t>(1, busy->retry_ms));
    return false;
  }
  const auto* const gone = std::get_if<PeerGone>(&asked.answer);
  if (gone == nullptr) {
    return true;
  }
  switch (gone->reason) {
    case PeerGoneReason::kNotHeld:
      reading.lacks(first);
      break;
    case PeerGoneReason::kClosing:
      reading.fail("it is closing");
      break;
    case PeerGoneReason::kFenced:
      reading.fail("it is fenced");
      break;
    case PeerGoneReason::kNotOpened:
      reading.fail("it has closed the namespace", 0, true);
      break;
  }
  return false;
}

void PeerClient::Held::fetch(Reading& reading, Reading::Piece piece) {
  for (std::size_t first = piece.first; first < piece.first + piece.count;) {
    const std::size_t asked_for = piece.first + piece.count - first;
    const Asked asked = ask(reading, first, asked_for);
    if (!is_granted(reading, asked, first)) {
      return;
    }
    const auto& grant = std::get<PeerGrant>(asked.answer);
    const std::size_t granted = grant.tiers.size();
    if (grant.lease != 0) {
      copy(reading, asked, grant, first);
    } else {
      receive(reading, asked, grant, first);
    }
    // A grant may end where the tier does, or the owner's room for bytes from NVME: what follows is asked for anew
    first += granted;
    if (PeerClock::now() >= reading.wish.deadline && first < piece.first + piece.count) {
      throw PeerTrouble("it does not answer in time");
    }
  }
}

void PeerClient::Held::receive(Reading& reading, const Asked& asked, const PeerGrant& grant, std::size_t first) {
  const PeerWish& wish = reading.wish;
  std::vector<std::uint8_t> failed;
  for (std::size_t entry = 0; entry < grant.tiers.size(); ++entry) {
    const std::size_t block = first + entry;
    std::uint8_t* const row = wish.rows[block];
    std::uint32_t crc = 0;
    for (std::size_t done = 0; done < wish.row_bytes;) {
      const std::size_t most = std::min(kReceiveBytes, wish.row_bytes - done);
      const std::size_t came = connection_->socket().receive_some(row + done, most, wish.deadline);
      crc = crc32c({row + done, came}, crc);
      done += came;
    }
    reading.checksums[block] = crc;
    reading.judge(block, packed_u32(grant.checksums, entry), failed);
  }
  if (!failed.empty()) {
    connection_->end(0, asked.handle, failed, wish.deadline);
  }
}

void PeerClient::Held::copy(Reading& reading, const Asked& asked, const PeerGrant& grant, std::size_t first) {
  const PeerWish& wish = reading.wish;
  if (client_.target_.transport != PeerTransport::kMemory) {
    throw Error(ErrorCode::kPeerWire, "GRANT: memory is lent where bytes were asked for");
  }
  const PeerMapping& mapping = connection_->mapping();
  if (wish.row_bytes > mapping.stride()) {
    throw Error(ErrorCode::kPeerWire,
                words("GRANT: blocks of ", wish.row_bytes, " bytes in slots of ", mapping.stride()));
  }
  const std::size_t count = grant.tiers.size();
  std::vector<std::int64_t> slots(count);
  for (std::size_t entry = 0; entry < count; ++entry) {
    slots[entry] = packed_u32(grant.slots, entry);
    if (grant.tiers[entry] != static_cast<std::uint8_t>(Tier::kHost) || slots[entry] >= mapping.slots()) {
      throw Error(ErrorCode::kPeerWire, words("GRANT: slot ", slots[entry], " of ", mapping.slots(), " in HOST"));
    }
  }
  const PeerMoment lease_ends =
      asked.lease_began + std::chrono::milliseconds(grant.lease_ms) - margin_of(grant.lease_ms);
  const auto is_over = [&] { return PeerClock::now() >= lease_ends; };
  std::vector<std::uint8_t> failed;
  if (!is_over()) {
    client_.copier_.copy_verified(rows_from(wish.rows, first), mapping.rows(slots.data()), wish.row_bytes,
                                  reading.checksums.subspan(first, count));
  }
  if (is_over()) {  // the slots may hold other blocks by now, so nothing can be said of these
    connection_->end(grant.lease, asked.handle, {}, wish.deadline);
    throw PeerTrouble(words("its lease of ", grant.lease_ms, " ms was over before the copy was"));
  }
  for (std::size_t entry = 0; entry < count; ++entry) {
    reading.judge(first + entry, packed_u32(grant.checksums, entry), failed);
  }
  connection_->end(grant.lease, asked.handle, failed, wish.deadline);
}

void PeerClient::Held::work_off(Reading& reading) noexcept {
  try {
    while (const auto piece = reading.take()) {
      fetch(reading, *piece);
    }
    return;
  } catch (const Error& error) {
    reading.fail_quietly([&] { return words("it does not keep to the protocol: ", error.detail()); });
    if (connection_) {
      connection_->socket().send_last(PeerBye{error.detail()});
    }
  } catch (const std::exception& trouble) {
    reading.fail_quietly([&] { return std::string(trouble.what()); });
  }
  is_good_ = false;
}

PeerClient::PeerClient(PeerTarget target, unsigned streams, RowCopier& copier)
    : target_(std::move(target)), streams_(std::max(1U, streams)), copier_(copier) {
  idle_.reserve(streams_);
  in_use_.reserve(streams_);
}

PeerClient::~PeerClient() { close(); }

void PeerClient::close() noexcept {
  if (!is_of_this_process()) {
    return;
  }
  std::unique_lock held(lock_);
  is_closed_ = true;
  for (ReaderConnection* const connection : in_use_) {
    connection->socket().shut();
  }
  idle_.clear();
  changed_.notify_all();
  changed_.wait(held, [this] { return reading_ == 0; });
}

// A connection that nobody uses and that seems to be alive.
std::unique_ptr<ReaderConnection> PeerClient::idle_one(const NamespaceId& namespace_id) {
  const std::lock_guard held(lock_);
  while (!idle_.empty()) {
    std::unique_ptr<ReaderConnection> found = std::move(idle_.back());
    idle_.pop_back();
    if (found->socket().is_quiet() && found->has_room_for(namespace_id)) {
      return found;
    }
  }
  return nullptr;
}

bool PeerClient::take_place(PeerMoment deadline, bool waits) {
  std::unique_lock held(lock_);
  const auto is_free = [this] { return places_ < streams_ || is_closed_; };
  if (waits ? !changed_.wait_until(held, deadline, is_free) : !is_free()) {
    return false;
  }
  if (is_closed_) {
    return false;
  }
  ++places_;
  return true;
}

void PeerClient::leave_place() noexcept {
  const std::lock_guard held(lock_);
  --places_;
  changed_.notify_all();
}

void PeerClient::read_on_streams(Reading& reading) {
  if (!take_place(reading.wish.deadline, true)) {
    return reading.fail("all connections to it are in use");
  }
  Held mine(*this);
  std::thread helper;
  if (reading.is_split && target_.transport == PeerTransport::kTcp && take_place(reading.wish.deadline, false)) {
    const AllSignalsMasked masked;
    try {
      helper = std::thread([this, &reading] { Held(*this).work_off(reading); });
    } catch (const std::exception&) {  // no thread or no memory is to be had: without it then
      leave_place();
    }
  }
  mine.work_off(reading);
  if (helper.joinable()) {
    helper.join();
  }
}

PeerAccount PeerClient::read(const PeerWish& wish, std::span<PeerOutcome> outcomes,
                             std::span<std::uint32_t> checksums) {
  std::fill(outcomes.begin(), outcomes.end(), PeerOutcome::kFailed);
  std::fill(checksums.begin(), checksums.end(), 0);
  if (!is_of_this_process()) {
    return {"this process was forked from the one that this reader is of", 0};
  }
  {
    const std::lock_guard held(lock_);
    if (is_closed_) {
      return {kClosed, 0};
    }
    ++reading_;
  }
  const UnderWay counted(*this);
  Reading reading(wish, outcomes, checksums, target_.transport == PeerTransport::kTcp ? streams_ : 1);
  read_on_streams(reading);
  return reading.ended();
}

}  // namespace kvbm
