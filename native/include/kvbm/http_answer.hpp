// What an HTTP/1.1 answer says before its body, as far as a reader of whole objects needs it. Pure functions; any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace kvbm {

struct HttpAnswer {
  unsigned status = 0;                      // 100 to 599
  std::optional<std::uint64_t> body_bytes;  // that follow the head; none: they have no length, or are coded
  bool stays = false;                       // the connection may be used again when these have come
};

// Bytes of the head with the blank line at its end; 0: that has not come yet.
std::size_t http_head_bytes(std::string_view came) noexcept;

// What a whole head says; none: it is no head of HTTP/1.0 or 1.1.
std::optional<HttpAnswer> read_http_answer(std::string_view head) noexcept;

}  // namespace kvbm
