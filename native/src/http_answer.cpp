#include "kvbm/http_answer.hpp"

#include <algorithm>

namespace kvbm {
namespace {

constexpr std::string_view kEnd = "\r\n\r\n";
constexpr std::string_view kLineEnd = "\r\n";
constexpr std::size_t kMostDigits = 18;  // of a length that any object may have

constexpr char lower(char letter) noexcept {
  return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
}
constexpr bool is_digit(char letter) noexcept { return letter >= '0' && letter <= '9'; }

// known: in small letters.
bool is_same(std::string_view said, std::string_view known) noexcept {
  return std::equal(said.begin(), said.end(), known.begin(), known.end(),
                    [](char one, char other) { return lower(one) == other; });
}

std::string_view trimmed(std::string_view text) noexcept {
  const std::size_t first = text.find_first_not_of(" \t");
  return first == std::string_view::npos ? std::string_view()
                                         : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::optional<std::uint64_t> number(std::string_view digits) noexcept {
  if (digits.empty() || digits.size() > kMostDigits || !std::all_of(digits.begin(), digits.end(), is_digit)) {
    return std::nullopt;
  }
  std::uint64_t value = 0;
  for (const char digit : digits) {
    value = value * 10 + static_cast<std::uint64_t>(digit - '0');
  }
  return value;
}

// The lines of a head, one after the other.
class Lines {
 public:
  explicit Lines(std::string_view text) noexcept : rest_(text) {}

  // Empty: the blank line, or the end.
  std::string_view next() noexcept {
    const std::size_t end = rest_.find(kLineEnd);
    const std::string_view line = rest_.substr(0, end);
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + kLineEnd.size());
    return line;
  }

 private:
  std::string_view rest_;  // what follows the lines that were given out
};

}  // namespace

std::size_t http_head_bytes(std::string_view came) noexcept {
  const std::size_t found = came.find(kEnd);
  return found == std::string_view::npos ? 0 : found + kEnd.size();
}

std::optional<HttpAnswer> read_http_answer(std::string_view head) noexcept {
  Lines lines(head);
  const std::string_view first = lines.next();
  const bool is_newer = first.starts_with("HTTP/1.1 ");
  if ((!is_newer && !first.starts_with("HTTP/1.0 ")) || first.size() < 12 || (first.size() > 12 && first[12] != ' ')) {
    return std::nullopt;
  }
  const auto status = number(first.substr(9, 3));
  if (!status || *status < 100 || *status > 599) {
    return std::nullopt;
  }
  HttpAnswer answer{static_cast<unsigned>(*status), std::nullopt, is_newer};
  bool is_counted = true;  // nothing says that the body is coded, or has another length
  for (std::string_view line = lines.next(); !line.empty(); line = lines.next()) {
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos || colon == 0) {
      return std::nullopt;
    }
    const std::string_view name = line.substr(0, colon);
    const std::string_view value = trimmed(line.substr(colon + 1));
    if (is_same(name, "content-length")) {
      const auto bytes = number(value);
      is_counted = is_counted && bytes && answer.body_bytes.value_or(*bytes) == *bytes;
      answer.body_bytes = bytes;
    } else if (is_same(name, "transfer-encoding")) {
      is_counted = false;
    } else if (is_same(name, "content-encoding")) {
      is_counted = is_counted && is_same(value, "identity");
    } else if (is_same(name, "connection")) {
      answer.stays = answer.stays && is_same(value, "keep-alive");
    }
  }
  if (!is_counted) {
    answer.body_bytes.reset();
  }
  return answer;
}

}  // namespace kvbm
