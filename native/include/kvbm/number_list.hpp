// Numbers of a JSON list, read as far as they are plain. core/number_lists.py says what it must do. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvbm/event.hpp"

namespace kvbm {

struct NumbersRead {
  std::size_t count;  // numbers that were read
  std::size_t at;     // where the next element begins; the text's end when all were read
};

// Reads unsigned numbers of 32 bits from `at` on: digits, blanks around them, commas between. It stops where the room
// is full, and before an element that is anything else, or whose comma nothing follows.
NumbersRead read_number_list(Bytes text, std::size_t at, std::span<std::uint32_t> into) noexcept;

}  // namespace kvbm
