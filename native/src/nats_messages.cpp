#include "kvbm/nats_messages.hpp"

#include <algorithm>
#include <array>

namespace kvbm {
namespace {

constexpr std::string_view kEnd = "\r\n";
constexpr std::string_view kMessage = "MSG ";
constexpr std::string_view kHeaded = "HMSG ";
constexpr std::string_view kInfo = "INFO";
constexpr std::string_view kAck = "$JS.ACK.";
constexpr std::string_view kFence = "Kvbm-Fence: ";
constexpr std::size_t kMostControlLine = 4096;     // as nats.protocol.parser.MAX_CONTROL_LINE_SIZE
constexpr std::size_t kMostDigits = 18;            // of a number in a line
constexpr std::uint64_t kMostMessage = 128 << 20;  // bytes; no server takes more than 64 MiB
constexpr std::size_t kMostTokens = 16;            // of a reply subject that are looked at

bool is_space(char character) noexcept { return character == ' ' || (character >= '\t' && character <= '\r'); }

// Digits alone, at most so many.
std::optional<std::uint64_t> number_of(std::string_view word, std::size_t most_digits) noexcept {
  if (word.empty() || word.size() > most_digits) {
    return std::nullopt;
  }
  std::uint64_t value = 0;
  for (const char digit : word) {
    if (digit < '0' || digit > '9') {
      return std::nullopt;
    }
    value = value * 10 + static_cast<std::uint64_t>(digit - '0');
  }
  return value;
}

// Words with spaces between; their number, which may be more than there is room for.
template <std::size_t kMost>
std::size_t split_words(std::string_view line, std::array<std::string_view, kMost>& words) noexcept {
  std::size_t count = 0;
  std::size_t at = 0;
  while (true) {
    while (at < line.size() && is_space(line[at])) {
      ++at;
    }
    if (at == line.size()) {
      return count;
    }
    const std::size_t begin = at;
    while (at < line.size() && !is_space(line[at])) {
      ++at;
    }
    if (count < kMost) {
      words[count] = line.substr(begin, at - begin);
    }
    ++count;
  }
}

}  // namespace

NatsScan::Found NatsScan::next() noexcept {
  const std::string_view rest = data_.substr(at_);
  const std::size_t end = rest.find(kEnd);
  if (end == std::string_view::npos) {
    return rest.size() > kMostControlLine && !rest.starts_with(kInfo) ? Found::kMalformed : Found::kPart;
  }
  const bool has_headers = rest.starts_with(kHeaded);
  if (has_headers || rest.starts_with(kMessage)) {
    return find_message(end, has_headers);
  }
  line_ = rest.substr(0, end + kEnd.size());
  at_ += line_.size();
  return Found::kLine;
}

NatsScan::Found NatsScan::find_message(std::size_t end, bool has_headers) noexcept {
  const std::string_view rest = data_.substr(at_);
  std::array<std::string_view, 6> words;  // MSG subject number [reply] size, with headers the size of these before it
  const std::size_t extra = has_headers ? 1 : 0;
  const std::size_t count = split_words(rest.substr(0, end), words);
  if (count != 4 + extra && count != 5 + extra) {
    return Found::kMalformed;
  }
  const auto subscription = number_of(words[2], kMostDigits);
  const auto size = number_of(words[count - 1], kMostDigits);
  const auto head = has_headers ? number_of(words[count - 2], kMostDigits) : std::optional<std::uint64_t>(0);
  if (!subscription || !size || !head || *head > *size || *size > kMostMessage) {
    return Found::kMalformed;
  }
  const std::size_t begin = end + kEnd.size();
  const std::size_t after = begin + *size + kEnd.size();
  if (after > rest.size()) {
    needed_ = after;
    return Found::kPart;
  }
  message_ = {*subscription, words[1], count == 5 + extra ? words[3] : std::string_view(), rest.substr(begin, *head),
              rest.substr(begin + *head, *size - *head)};
  at_ += after;
  return Found::kMessage;
}

std::optional<NatsDelivery> nats_delivery(std::string_view reply) noexcept {
  if (!reply.starts_with(kAck)) {
    return std::nullopt;
  }
  std::array<std::string_view, kMostTokens> tokens;
  std::size_t count = 0;
  for (std::size_t at = 0; at <= reply.size(); ++count) {
    const std::size_t dot = std::min(reply.find('.', at), reply.size());
    if (count < kMostTokens) {
      tokens[count] = reply.substr(at, dot - at);
    }
    at = dot + 1;
  }
  // A longer form has domain and account before the stream, and one more part at its end
  const std::size_t first = count == 9 ? 5 : 7;
  if (count < first + 4) {
    return std::nullopt;
  }
  std::array<std::uint64_t, 4> numbers{};
  for (std::size_t at = 0; at < numbers.size(); ++at) {
    const auto number = number_of(tokens[first + at], kMostDigits + 1);
    if (!number || *number >> 63 != 0) {
      return std::nullopt;
    }
    numbers[at] = *number;
  }
  return NatsDelivery{numbers[0], numbers[1], numbers[2], numbers[3]};
}

std::optional<std::string_view> nats_fence(std::string_view headers) noexcept {
  const std::size_t line = headers.find(kFence);
  if (line == std::string_view::npos) {
    return std::nullopt;
  }
  const std::size_t begin = line + kFence.size();
  const std::size_t end = headers.find(kEnd, begin);
  if (end == std::string_view::npos) {
    return std::nullopt;
  }
  return headers.substr(begin, end - begin);
}

}  // namespace kvbm
