#include "kvbm/plain_question.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace kvbm {
namespace {

constexpr std::string_view kLookup = "POST /v1/lookup HTTP/1.1\r\n";
constexpr std::string_view kRoute = "POST /v1/route HTTP/1.1\r\n";
constexpr std::size_t kHexDigits = 2 * kHashBytes;
constexpr std::uint32_t kMostLimit = 1024;
constexpr std::uint32_t kMostInputTokens = 1 << 24;
constexpr std::size_t kMostDigits = 8;

// What a header is, as far as it counts.
enum class Header : std::uint8_t { kOther, kHost, kContentType, kContentLength, kAuthorization, kConnection, kUnread };

struct KnownHeader {
  std::string_view name;  // in small letters
  Header kind;            // what it is
};

constexpr std::array<KnownHeader, 11> kHeaders{{
    {"host", Header::kHost},
    {"content-type", Header::kContentType},
    {"content-length", Header::kContentLength},
    {"authorization", Header::kAuthorization},
    {"connection", Header::kConnection},
    {"user-agent", Header::kUnread},
    {"accept", Header::kUnread},
    {"accept-encoding", Header::kUnread},
    {"accept-language", Header::kUnread},
    {"cache-control", Header::kUnread},
    {"x-request-id", Header::kUnread},
}};

constexpr char lower(char letter) noexcept {
  return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
}
constexpr bool is_digit(char letter) noexcept { return letter >= '0' && letter <= '9'; }
constexpr bool is_printed(char letter) noexcept { return letter >= ' ' && letter <= '~'; }

// known: in small letters.
bool is_same(std::string_view said, std::string_view known) noexcept {
  return said.size() == known.size() &&
         std::equal(said.begin(), said.end(), known.begin(), [](char one, char other) { return lower(one) == other; });
}

Header header_of(std::string_view name) noexcept {
  for (const KnownHeader& one : kHeaders) {
    if (is_same(name, one.name)) {
      return one.kind;
    }
  }
  return Header::kOther;
}

// A number of JSON without sign, fraction or exponent.
std::optional<std::uint32_t> number_of(std::string_view digits) noexcept {
  if (digits.empty() || digits.size() > kMostDigits || (digits.size() > 1 && digits.front() == '0') ||
      !std::all_of(digits.begin(), digits.end(), is_digit)) {
    return std::nullopt;
  }
  std::uint32_t value = 0;
  for (const char digit : digits) {
    value = value * 10 + static_cast<std::uint32_t>(digit - '0');
  }
  return value;
}

// What the head says beside its texts.
struct Head {
  std::size_t bytes = 0;       // with the blank line at its end
  std::size_t body_bytes = 0;  // that follow
};

// The headers of a request, each of which counts at most once.
class HeadReader {
 public:
  HeadReader(std::string_view came, PlainQuestion& question) noexcept : came_(came), question_(question) {}

  std::optional<Head> read() noexcept {
    if (came_.starts_with(kLookup)) {
      question_.is_route = false;
      at_ = kLookup.size();
    } else if (came_.starts_with(kRoute)) {
      question_.is_route = true;
      at_ = kRoute.size();
    } else {
      return std::nullopt;
    }
    question_.authorization.reset();
    question_.host.reset();
    while (at_ < came_.size() && came_[at_] != '\r') {
      if (!read_line()) {
        return std::nullopt;
      }
    }
    if (!came_.substr(std::min(at_, came_.size())).starts_with("\r\n") || !body_bytes_) {
      return std::nullopt;
    }
    return Head{at_ + 2, *body_bytes_};
  }

 private:
  bool read_line() noexcept {
    const std::size_t end = came_.find('\r', at_);
    if (end == std::string_view::npos || end + 1 >= came_.size() || came_[end + 1] != '\n') {
      return false;
    }
    const std::string_view line = came_.substr(at_, end - at_);
    at_ = end + 2;
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos) {
      return false;
    }
    std::string_view value = line.substr(colon + 1);
    if (value.starts_with(' ')) {
      value.remove_prefix(1);
    }
    if (value.empty() || value.front() == ' ' || value.back() == ' ' ||
        !std::all_of(value.begin(), value.end(), is_printed)) {
      return false;
    }
    return take(header_of(line.substr(0, colon)), value);
  }

  bool take(Header kind, std::string_view value) noexcept {
    const auto bit = static_cast<std::uint32_t>(1U << static_cast<unsigned>(kind));
    if (kind == Header::kOther || (kind != Header::kUnread && (seen_ & bit) != 0)) {
      return false;
    }
    seen_ |= bit;
    switch (kind) {
      case Header::kHost:
        question_.host = value;
        return true;
      case Header::kAuthorization:
        question_.authorization = value;
        return true;
      case Header::kContentType:
        return is_same(value, "application/json");
      case Header::kConnection:
        return is_same(value, "keep-alive");
      case Header::kContentLength: {
        const auto bytes = number_of(value);
        if (bytes && *bytes > 0 && *bytes <= kMostPlainBodyBytes) {
          body_bytes_ = *bytes;
        }
        return body_bytes_.has_value();
      }
      default:
        return true;
    }
  }

  const std::string_view came_;              // all there is
  PlainQuestion& question_;                  // what is read
  std::size_t at_ = 0;                       // where the next line begins
  std::uint32_t seen_ = 0;                   // a bit for each kind of header
  std::optional<std::size_t> body_bytes_{};  // as the content-length says
};

// A digit's value in `value`; whether it is one.
inline std::uint8_t digit_of(std::uint8_t letter, std::uint8_t& value) noexcept {
  const auto decimal = static_cast<std::uint8_t>(letter - '0');
  const auto other = static_cast<std::uint8_t>((letter | 0x20) - 'a');
  value = decimal < 10 ? decimal : static_cast<std::uint8_t>(other + 10);
  return static_cast<std::uint8_t>(decimal < 10) | static_cast<std::uint8_t>(other < 6);
}

// Whether 32 letters are hex digits, which become 16 bytes. Without branches, so that it is done several at a time.
bool read_hash(const char* text, std::uint8_t* hash) noexcept {
  std::array<std::uint8_t, kHexDigits> letters;
  std::memcpy(letters.data(), text, letters.size());
  std::array<std::uint8_t, kHexDigits> values;
  std::uint8_t are_digits = 1;
  for (std::size_t at = 0; at < letters.size(); ++at) {
    are_digits &= digit_of(letters[at], values[at]);
  }
  for (std::size_t at = 0; at < kHashBytes; ++at) {
    hash[at] = static_cast<std::uint8_t>(values[2 * at] << 4 | values[2 * at + 1]);
  }
  return are_digits != 0;
}

// The JSON object of a body: texts without escapes, numbers without signs, each field once.
class BodyReader {
 public:
  BodyReader(std::string_view body, PlainQuestion& question) noexcept : body_(body), question_(question) {}

  bool read() {
    question_.hashes.clear();
    question_.limit = 0;
    question_.input_tokens = 0;
    if (!take('{')) {
      return false;
    }
    do {
      const auto name = text();
      if (!name || !take(':') || !read_field(*name)) {
        return false;
      }
    } while (take(','));
    if (!take('}')) {
      return false;
    }
    skip();
    const unsigned wanted = kNamespace | kHashes | (question_.is_route ? kInputTokens : 0U);
    return at_ == body_.size() && (seen_ & wanted) == wanted && !question_.hashes.empty();
  }

 private:
  enum Field : unsigned { kNamespace = 1, kHashes = 2, kLimit = 4, kInputTokens = 8 };

  bool read_field(std::string_view name) {
    if (name == "hashes") {
      return is_first(kHashes) && read_hashes();
    }
    if (name == "namespace") {
      const auto given = is_first(kNamespace) ? text() : std::nullopt;
      return given && given->size() == kHexDigits && read_hash(given->data(), question_.namespace_id.data());
    }
    const bool is_limit = name == "limit";
    if (!is_limit && !(name == "input_tokens" && question_.is_route)) {
      return false;
    }
    const auto given = is_first(is_limit ? kLimit : kInputTokens) ? number() : std::nullopt;
    if (!given) {
      return false;
    }
    (is_limit ? question_.limit : question_.input_tokens) = *given;
    return is_limit ? *given >= 1 && *given <= kMostLimit : *given <= kMostInputTokens;
  }

  bool read_hashes() {
    if (!take('[')) {
      const auto given = text();
      if (!given || given->size() % kHexDigits != 0) {
        return false;
      }
      question_.hashes.resize(given->size() / 2);
      bool are_hashes = true;
      for (std::size_t at = 0; at < given->size(); at += kHexDigits) {
        are_hashes = read_hash(given->data() + at, question_.hashes.data() + at / 2) && are_hashes;
      }
      return are_hashes;
    }
    do {
      const auto given = text();
      if (!given || given->size() != kHexDigits) {
        return false;
      }
      question_.hashes.resize(question_.hashes.size() + kHashBytes);
      if (!read_hash(given->data(), question_.hashes.data() + question_.hashes.size() - kHashBytes)) {
        return false;
      }
    } while (take(','));
    return take(']');
  }

  bool is_first(Field field) noexcept {
    const bool found = (seen_ & field) == 0;
    seen_ |= field;
    return found;
  }

  // What stands between quotes: whoever asks for it compares it, or takes it for hex, so an escape is never taken for a
  // letter.
  std::optional<std::string_view> text() noexcept {
    if (!take('"')) {
      return std::nullopt;
    }
    const std::size_t end = body_.find('"', at_);
    if (end == std::string_view::npos) {
      return std::nullopt;
    }
    const std::string_view found = body_.substr(at_, end - at_);
    at_ = end + 1;
    return found;
  }

  std::optional<std::uint32_t> number() noexcept {
    skip();
    const std::size_t begin = at_;
    while (at_ < body_.size() && is_digit(body_[at_])) {
      ++at_;
    }
    return number_of(body_.substr(begin, at_ - begin));
  }

  bool take(char wanted) noexcept {
    skip();
    if (at_ < body_.size() && body_[at_] == wanted) {
      ++at_;
      return true;
    }
    return false;
  }

  void skip() noexcept {
    while (at_ < body_.size() &&
           (body_[at_] == ' ' || body_[at_] == '\n' || body_[at_] == '\t' || body_[at_] == '\r')) {
      ++at_;
    }
  }

  const std::string_view body_;  // all of it
  PlainQuestion& question_;      // what is read
  std::size_t at_ = 0;           // how far it is read
  unsigned seen_ = 0;            // a bit for each Field
};

}  // namespace

bool read_plain_question(std::string_view came, PlainQuestion& question) {
  const auto head = HeadReader(came, question).read();
  if (!head || came.size() - head->bytes < head->body_bytes) {
    return false;
  }
  question.body_bytes = head->body_bytes;
  question.request_bytes = head->bytes + head->body_bytes;
  return BodyReader(came.substr(head->bytes, head->body_bytes), question).read();
}

}  // namespace kvbm
