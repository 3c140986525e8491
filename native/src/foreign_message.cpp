#include "kvbm/foreign_message.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace kvbm {
namespace {

// The bounds of kvbm/streams/foreign/events.py.
constexpr std::size_t kMostEvents = std::size_t{1} << 16;
constexpr std::size_t kMostKeys = std::size_t{1} << 20;
constexpr std::size_t kMostTokens = std::size_t{1} << 24;
// Of all events of a message: what is read of it takes 288 MiB at most.
constexpr std::size_t kMostKeysOfAll = std::size_t{1} << 22;
constexpr std::size_t kMostTokensOfAll = std::size_t{1} << 25;
constexpr std::size_t kMostKeyLength = 64;
constexpr std::uint64_t kMostBlockTokens = std::uint64_t{1} << 16;

// Reads MessagePack from the front. Each function says whether it was there; after one that says no nothing is read.
class Reader {
 public:
  explicit Reader(Bytes data) : at_(data.data()), end_(data.data() + data.size()) {}

  std::size_t left() const noexcept { return static_cast<std::size_t>(end_ - at_); }
  bool is_nil() noexcept { return take_if(0xC0); }

  // An array's length, of `each` bytes at least.
  bool array(std::size_t& count) noexcept {
    std::uint8_t head = 0;
    if (!byte(head)) {
      return false;
    }
    if ((head & 0xF0) == 0x90) {
      count = head & 0x0F;
    } else if (head == 0xDC || head == 0xDD) {
      std::uint64_t wide = 0;
      if (!big_endian(head == 0xDC ? 2 : 4, wide)) {
        return false;
      }
      count = wide;
    } else {
      return false;
    }
    return count <= left();
  }

  bool map(std::size_t& count) noexcept {
    std::uint8_t head = 0;
    if (!byte(head)) {
      return false;
    }
    if ((head & 0xF0) == 0x80) {
      count = head & 0x0F;
      return true;
    }
    std::uint64_t wide = 0;
    if (head != 0xDE || !big_endian(2, wide)) {
      return false;
    }
    count = wide;
    return true;
  }

  // A text of less than 256 bytes; whether it is good UTF-8 is not looked at.
  bool text(std::string_view& value) noexcept {
    std::uint8_t head = 0;
    if (!byte(head)) {
      return false;
    }
    std::uint64_t length = head & 0x1F;
    if ((head & 0xE0) != 0xA0 && (head != 0xD9 || !big_endian(1, length))) {
      return false;
    }
    return take(length, value);
  }

  bool natural(std::uint64_t& value) noexcept {
    std::uint8_t head = 0;
    if (!byte(head)) {
      return false;
    }
    if (head < 0x80) {
      value = head;
      return true;
    }
    return head >= 0xCC && head <= 0xCF && big_endian(std::size_t{1} << (head - 0xCC), value);
  }

  // The head of an event's key and what follows.
  bool key(ForeignKey& key) noexcept {
    if (at_ == end_) {
      return false;
    }
    const std::uint8_t head = *at_;
    if (head == 0xC4) {
      std::uint64_t length = 0;
      std::string_view bytes;
      ++at_;
      if (!big_endian(1, length) || length == 0 || length > kMostKeyLength || !take(length, bytes)) {
        return false;
      }
      key = {.value = 0,
             .wide = {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()},
             .kind = KeyKind::kWide};
      return true;
    }
    key = {};
    if (head >= 0xE0) {
      ++at_;
      key.value = static_cast<std::uint64_t>(static_cast<std::int8_t>(head));
      key.kind = KeyKind::kNegative;
      return true;
    }
    if (head < 0xD0 || head > 0xD3) {
      return natural(key.value);
    }
    ++at_;
    const std::size_t width = std::size_t{1} << (head - 0xD0);
    if (!big_endian(width, key.value)) {
      return false;
    }
    const std::size_t unused = 64 - 8 * width;
    const std::int64_t value = static_cast<std::int64_t>(key.value << unused) >> unused;
    key.value = static_cast<std::uint64_t>(value);
    key.kind = value < 0 ? KeyKind::kNegative : KeyKind::kNatural;
    return true;
  }

  bool token(std::uint32_t& value) noexcept {
    if (at_ == end_) {
      return false;
    }
    const std::uint8_t head = *at_++;
    if (head < 0x80) {
      value = head;
      return true;
    }
    std::uint64_t wide = 0;
    if (head < 0xCC || head > 0xCE || !big_endian(std::size_t{1} << (head - 0xCC), wide)) {
      return false;
    }
    value = static_cast<std::uint32_t>(wide);
    return true;
  }

  bool floating() noexcept {
    std::string_view bits;
    return take_if(0xCB) && take(8, bits);
  }

  // A value that has nothing in it.
  bool skip_scalar() noexcept {
    std::uint8_t head = 0;
    if (!byte(head)) {
      return false;
    }
    std::string_view skipped;
    if (head < 0x80 || head >= 0xE0 || head == 0xC0 || head == 0xC2 || head == 0xC3) {
      return true;
    }
    if ((head & 0xE0) == 0xA0) {
      return take(head & 0x1F, skipped);
    }
    if (head == 0xCA || head == 0xCB) {
      return take(head == 0xCA ? 4 : 8, skipped);
    }
    if (head >= 0xCC && head <= 0xD3) {
      return take(std::size_t{1} << (head & 3), skipped);
    }
    std::uint64_t length = 0;
    return head == 0xD9 && big_endian(1, length) && take(length, skipped);
  }

 private:
  bool byte(std::uint8_t& value) noexcept {
    if (at_ == end_) {
      return false;
    }
    value = *at_++;
    return true;
  }

  bool take_if(std::uint8_t head) noexcept {
    const bool is_it = at_ != end_ && *at_ == head;
    at_ += is_it ? 1 : 0;
    return is_it;
  }

  bool take(std::uint64_t length, std::string_view& bytes) noexcept {
    if (length > left()) {
      return false;
    }
    bytes = {reinterpret_cast<const char*>(at_), static_cast<std::size_t>(length)};
    at_ += length;
    return true;
  }

  bool big_endian(std::size_t width, std::uint64_t& value) noexcept {
    if (width > left()) {
      return false;
    }
    value = 0;
    for (std::size_t index = 0; index < width; ++index) {
      value = value << 8 | at_[index];
    }
    at_ += width;
    return true;
  }

  const std::uint8_t* at_;   // what is read next
  const std::uint8_t* end_;  // of the message
};

// The fields that say something, in vLLM's order.
constexpr std::array<std::string_view, 12> kFields = {
    "block_hashes", "parent_block_hash", "token_ids",  "block_size", "lora_id",   "medium",
    "lora_name",    "extra_keys",        "cache_salt", "group_idx",  "ownership", "lookahead_token_ids",
};
enum Field : std::uint8_t {
  kBlockHashes,
  kParent,
  kTokenIds,
  kBlockSize,
  kLoraId,
  kMedium,
  kLoraName,
  kExtraKeys,
  kCacheSalt,
  kGroup,
  kOwnership,
  kLookahead,
  kOther
};

Field field_of(std::string_view name, std::size_t expected) noexcept {
  for (std::size_t index = 0; index < kFields.size(); ++index, ++expected) {
    const std::size_t at = expected % kFields.size();
    if (kFields[at] == name) {
      return static_cast<Field>(at);
    }
  }
  return kOther;
}

// Reads the events of one message.
class EventReader {
 public:
  EventReader(Reader& reader, std::vector<ForeignKey>& keys, std::vector<std::uint32_t>& tokens)
      : reader_(reader), keys_(keys), tokens_(tokens) {}

  bool read(ForeignEvent& event) {
    std::size_t fields = 0;
    std::string_view name;
    if (!reader_.map(fields) || fields == 0 || !reader_.text(name) || name != "type" || !reader_.text(name)) {
      return false;
    }
    using Kind = ForeignEvent::Kind;
    if (name == "BlockStored") {
      event.kind = Kind::kStored;
    } else if (name == "BlockRemoved") {
      event.kind = Kind::kRemoved;
    } else if (name != "AllBlocksCleared") {
      return false;
    }
    event.first_key = keys_.size();
    event.first_token = tokens_.size();
    std::uint32_t seen = 0;
    std::size_t expected = 0;
    has_extra_keys_ = false;
    for (std::size_t index = 1; index < fields; ++index) {
      if (!reader_.text(name) || name == "type") {
        return false;
      }
      const Field field = field_of(name, expected);
      expected = field + std::size_t{1};
      if (field != kOther && (seen >> field & 1) != 0) {
        return false;
      }
      seen |= 1U << field;
      if (!(means(event.kind, field) ? read_field(event, field) : reader_.skip_scalar())) {
        return false;
      }
    }
    constexpr std::uint32_t kNeeded = 1U << kBlockHashes | 1U << kTokenIds | 1U << kBlockSize;
    switch (event.kind) {
      case Kind::kStored:
        return (seen & kNeeded) == kNeeded && (!has_extra_keys_ || extra_keys_ == event.key_count);
      case Kind::kRemoved:
        return (seen >> kBlockHashes & 1) != 0;
      case Kind::kCleared:
        return true;
    }
    return false;
  }

 private:
  static bool means(ForeignEvent::Kind kind, Field field) noexcept {
    if (kind == ForeignEvent::Kind::kRemoved) {
      return field == kBlockHashes || field == kMedium || field == kGroup || field == kOwnership;
    }
    return kind == ForeignEvent::Kind::kStored && field != kOther;
  }

  bool read_field(ForeignEvent& event, Field field) {
    switch (field) {
      case kBlockHashes:
        return read_keys(event);
      case kTokenIds:
        return read_tokens(event);
      case kParent:
        event.has_parent = !reader_.is_nil();
        return !event.has_parent || reader_.key(event.parent);
      case kBlockSize: {
        std::uint64_t size = 0;
        const bool is_good = reader_.natural(size) && size >= 1 && size <= kMostBlockTokens;
        event.block_tokens = static_cast<std::uint32_t>(size);
        return is_good;
      }
      case kMedium:
        return read_medium(event.tier);
      case kGroup: {
        std::uint64_t group = 0;
        const bool is_good = reader_.is_nil() || (reader_.natural(group) && group <= 0xFF);
        event.group = static_cast<std::uint8_t>(group);
        return is_good;
      }
      case kLoraId:
        return reader_.is_nil();
      case kExtraKeys:
        return read_extra_keys();
      case kLookahead:
        return read_nothing();
      case kLoraName:
      case kCacheSalt:
      case kOwnership: {
        std::string_view text;
        return reader_.is_nil() || (reader_.text(text) && text.empty());
      }
      case kOther:
        break;
    }
    return false;
  }

  bool read_keys(ForeignEvent& event) {
    if (!reader_.array(event.key_count) || event.key_count > kMostKeys ||
        event.first_key + event.key_count > kMostKeysOfAll) {
      return false;
    }
    keys_.resize(event.first_key + event.key_count);
    for (std::size_t index = 0; index < event.key_count; ++index) {
      if (!reader_.key(keys_[event.first_key + index])) {
        return false;
      }
    }
    return true;
  }

  bool read_tokens(ForeignEvent& event) {
    if (!reader_.array(event.token_count) || event.token_count > kMostTokens ||
        event.first_token + event.token_count > kMostTokensOfAll) {
      return false;
    }
    tokens_.resize(event.first_token + event.token_count);
    std::uint32_t* const tokens = tokens_.data() + event.first_token;
    for (std::size_t index = 0; index < event.token_count; ++index) {
      if (!reader_.token(tokens[index])) {
        return false;
      }
    }
    return true;
  }

  bool read_medium(Tier& tier) {
    std::string_view word;
    if (reader_.is_nil()) {
      return true;
    }
    if (!reader_.text(word)) {
      return false;
    }
    if (word == "CPU" || word == "CPU_PINNED") {
      tier = Tier::kHost;
    } else if (word == "STORAGE" || word == "DISK") {
      tier = Tier::kNvme;
    } else if (!word.empty() && word != "GPU") {
      return false;
    }
    return true;
  }

  // Extra keys of which each is none.
  bool read_extra_keys() {
    if (reader_.is_nil()) {
      return true;
    }
    std::size_t count = 0;
    if (!reader_.array(count)) {
      return false;
    }
    for (std::size_t index = 0; index < count; ++index) {
      if (!reader_.is_nil()) {
        return false;
      }
    }
    extra_keys_ = count;
    return has_extra_keys_ = true;
  }

  bool read_nothing() {
    std::size_t count = 0;
    return reader_.is_nil() || (reader_.array(count) && count == 0);
  }

  Reader& reader_;                      // of the message
  std::vector<ForeignKey>& keys_;       // of all its events
  std::vector<std::uint32_t>& tokens_;  // of all its events
  bool has_extra_keys_ = false;         // whether the event has a list of extra keys
  std::size_t extra_keys_ = 0;          // how many are in it
};

}  // namespace

bool ForeignMessage::read(Bytes message) {
  events_.clear();
  keys_.clear();
  tokens_.clear();
  rank_.reset();
  Reader reader(message);
  std::size_t parts = 0;
  std::size_t count = 0;
  if (message.size() > kMostMessageBytes || !reader.array(parts) || parts < 2 || parts > 3 || !reader.floating() ||
      !reader.array(count) || count > kMostEvents) {
    return false;
  }
  EventReader events(reader, keys_, tokens_);
  for (std::size_t index = 0; index < count; ++index) {
    if (!events.read(events_.emplace_back())) {
      return false;
    }
  }
  if (parts == 3 && !reader.is_nil()) {
    std::uint64_t rank = 0;
    if (!reader.natural(rank)) {
      return false;
    }
    rank_ = rank;
  }
  return reader.left() == 0;
}

void ForeignMessage::trim() {
  constexpr std::size_t kMost = std::size_t{1} << 15;
  if (keys_.capacity() > kMost || tokens_.capacity() > kMost * 16 || events_.capacity() > kMost) {
    *this = ForeignMessage();
  }
}

}  // namespace kvbm
