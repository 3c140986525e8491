// ForeignMessage: a message of vLLM's or SGLang's event publisher, read where it has the usual shape; how both write
// their events stands in kvbm/streams/foreign/wire.py, which reads the others as well. Kept for its memory and read
// into again and again; owner thread only. What it gives points into the message and is valid as long as that is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvbm/event.hpp"
#include "kvbm/foreign_table.hpp"

namespace kvbm {

inline constexpr std::size_t kMostMessageBytes = std::size_t{64} << 20;  // of one that is read here

// What one event says.
struct ForeignEvent {
  enum class Kind : std::uint8_t { kStored, kRemoved, kCleared };

  Kind kind = Kind::kCleared;
  Tier tier = Tier::kHbm;          // of kStored and kRemoved: where
  std::uint8_t group = 0;          // KV group
  bool has_parent = false;         // of kStored: whether a block lies before the first
  std::uint32_t block_tokens = 0;  // of kStored: tokens of a block
  ForeignKey parent;               // that block
  std::size_t first_key = 0;       // of its keys, among the message's
  std::size_t key_count = 0;       // how many it has
  std::size_t first_token = 0;     // of kStored: of its tokens
  std::size_t token_count = 0;     // how many it has
};

class ForeignMessage {
 public:
  // Whether a message is read: well formed, every event a map of a known type with nothing unusual in it. Of one that
  // is not, nothing is known. Throws std::bad_alloc alone.
  bool read(Bytes message);

  const std::vector<ForeignEvent>& events() const noexcept { return events_; }
  std::span<const ForeignKey> keys(const ForeignEvent& event) const noexcept {
    return std::span(keys_).subspan(event.first_key, event.key_count);
  }
  std::span<const std::uint32_t> tokens(const ForeignEvent& event) const noexcept {
    return std::span(tokens_).subspan(event.first_token, event.token_count);
  }
  // Gives the memory of a large message back.
  void trim();
  // The data-parallel rank, where it says one.
  std::optional<std::uint64_t> rank() const noexcept { return rank_; }

 private:
  std::vector<ForeignEvent> events_;   // in order
  std::vector<ForeignKey> keys_;       // of all events
  std::vector<std::uint32_t> tokens_;  // of all events
  std::optional<std::uint64_t> rank_;  // see rank()
};

}  // namespace kvbm
