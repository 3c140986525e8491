// HMAC-SHA256 of RFC 2104, and a comparison whose time tells nothing. Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "kvbm/event.hpp"

namespace kvbm {

// Of the parts one after another.
std::array<std::uint8_t, 32> hmac_sha256(Bytes key, std::initializer_list<Bytes> parts) noexcept;

// Whether bytes are the same; the time it takes depends on their number alone.
bool equal_in_constant_time(Bytes left, Bytes right) noexcept;

}  // namespace kvbm
