// The protocol of NATS as a client reads it: messages are taken apart, other lines are given as they came. As
// kvbm/streams/nats/messages.py, which says what each of these is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace kvbm {

// A message; everything points into the bytes that were scanned.
struct NatsMessage {
  std::uint64_t subscription;  // its number
  std::string_view subject;    // it was sent to
  std::string_view reply;      // where an answer goes; empty for none
  std::string_view headers;    // as they came; empty for none
  std::string_view payload;    // what it holds
};

// What JetStream says of a message in its reply subject.
struct NatsDelivery {
  std::uint64_t sequence;   // in the stream
  std::uint64_t count;      // of what the consumer was given
  std::uint64_t stored_ns;  // when it was stored
  std::uint64_t pending;    // that the consumer had left
};

// Takes bytes apart from their beginning. Any thread; the bytes must stay as they are.
class NatsScan {
 public:
  enum class Found : std::uint8_t { kLine, kMessage, kPart, kMalformed };

  explicit NatsScan(std::string_view data) noexcept : data_(data) {}

  // What comes next. kPart: the rest is not all of anything; kMalformed: no server sends such.
  Found next() noexcept;

  const NatsMessage& message() const noexcept { return message_; }  // after kMessage
  std::string_view line() const noexcept { return line_; }          // after kLine, its end included
  std::size_t at() const noexcept { return at_; }                   // bytes that were taken
  // After kPart: of the rest, before it is worth a look; 0: not known
  std::size_t needed() const noexcept { return needed_; }

 private:
  Found find_message(std::size_t end, bool has_headers) noexcept;

  std::string_view data_;   // all of it
  std::size_t at_ = 0;      // what was taken
  std::size_t needed_ = 0;  // see `needed`
  NatsMessage message_{};   // see `message`
  std::string_view line_;   // see `line`
};

// What JetStream says in a reply subject; none: it is another one.
std::optional<NatsDelivery> nats_delivery(std::string_view reply) noexcept;

// The value of the header Kvbm-Fence; none: it is not there.
std::optional<std::string_view> nats_fence(std::string_view headers) noexcept;

}  // namespace kvbm
