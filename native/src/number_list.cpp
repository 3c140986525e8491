#include "kvbm/number_list.hpp"

namespace kvbm {
namespace {

constexpr std::uint64_t kLargest = 0xFFFF'FFFF;

bool is_blank(std::uint8_t character) noexcept {
  return character == ' ' || character == '\n' || character == '\t' || character == '\r';
}

bool is_digit(std::uint8_t character) noexcept { return character >= '0' && character <= '9'; }

}  // namespace

NumbersRead read_number_list(Bytes text, std::size_t at, std::span<std::uint32_t> into) noexcept {
  const std::uint8_t* const end = text.data() + text.size();
  const std::uint8_t* begin = text.data() + at;  // of the element
  const auto skip_blanks = [end](const std::uint8_t* next) {
    while (next != end && is_blank(*next)) {
      ++next;
    }
    return next;
  };
  std::size_t count = 0;
  while (count < into.size()) {
    const std::uint8_t* const first = skip_blanks(begin);
    const std::uint8_t* next = first;
    std::uint64_t value = 0;
    for (; next != end && is_digit(*next) && value <= kLargest; ++next) {
      value = 10 * value + (*next - '0');
    }
    const bool is_number = next != first && value <= kLargest && (*first != '0' || next == first + 1);
    next = skip_blanks(next);
    const bool is_last = next == end;
    if (!is_number || (!is_last && (*next != ',' || skip_blanks(next + 1) == end))) {
      break;
    }
    into[count++] = static_cast<std::uint32_t>(value);
    begin = is_last ? end : next + 1;
    if (is_last) {
      break;
    }
  }
  return {count, static_cast<std::size_t>(begin - text.data())};
}

}  // namespace kvbm
