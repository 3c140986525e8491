// A lookup or a route as it comes over HTTP/1.1, read in one step where it is plain. core/plain_questions.py says what
// plain is. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

inline constexpr std::size_t kMostPlainBodyBytes = 32 * 1024;

// What a plain request says. Its texts point into the request.
struct PlainQuestion {
  std::size_t request_bytes = 0;                    // head and body
  std::size_t body_bytes = 0;                       // body alone
  bool is_route = false;                            // else a lookup
  std::optional<std::string_view> authorization{};  // the header
  std::optional<std::string_view> host{};           // the header
  NamespaceId namespace_id{};                       // whose blocks
  std::uint32_t limit = 0;                          // 0: not given
  std::uint32_t input_tokens = 0;                   // of a route
  std::vector<std::uint8_t> hashes{};               // packed, at least one; kept from question to question
};

// Reads the request at the beginning of what came. Whether it is plain and all there; what `question` has is only good
// then.
bool read_plain_question(std::string_view came, PlainQuestion& question);

}  // namespace kvbm
