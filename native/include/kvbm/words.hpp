// Words of errors and anomalies: names, shortened hashes, sentences from pieces. Functions without state; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "kvbm/event.hpp"

namespace kvbm {

std::string tier_name(Tier tier);
// By its number in Event.
const char* event_name(std::size_t event) noexcept;
// The first 8 hex digits of a hash or an id.
std::string shortened(const std::uint8_t* id);
std::string slot_text(std::optional<std::uint32_t> slot);
// What contradicts itself in the place of a run, "" where nothing does: `misplaced` in kvbm/core/events.py.
std::string misplaced(const SequenceHash& parent, std::uint64_t start);
// Throws Error: kIllegalEvent.
[[noreturn]] void refuse(std::string_view rule, std::string detail);

template <class... Pieces>
std::string words(const Pieces&... pieces) {
  std::string made;
  const auto text = [](const auto& piece) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(piece)>>) {
      return std::to_string(piece);
    } else {
      return std::string(piece);
    }
  };
  ((made += text(pieces)), ...);
  return made;
}

}  // namespace kvbm
