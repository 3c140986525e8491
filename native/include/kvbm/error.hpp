// Error: what the C++ core throws off the hot path. Immutable after construction; any thread.
// Each code is one class of kvbm/core/errors.py; the bindings build that class from the fields here.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvbm {

// Which class of kvbm.core.errors an Error becomes.
enum class ErrorCode : std::uint8_t {
  kLayout,          // LayoutError(detail)
  kNotAFrame,       // NotAFrameError(at, detail)
  kNewerFrame,      // NewerFrameError(at, version, supported)
  kTornFrame,       // TornFrameError(at, detail)
  kCorruptFrame,    // CorruptFrameError(at, detail)
  kMalformedFrame,  // MalformedFrameError(at, detail)
  kCheckpoint,      // CheckpointError(at, detail)
  kLedger,          // LedgerError(detail, tier, slot, copy)
  kIllegalEvent,    // IllegalEventError(rule, detail)
  kPeerWire,        // PeerWireError(detail)
  kConfig,          // ConfigError(detail)
};

class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string detail, std::uint64_t at = 0) : code_(code), at_(at), detail_(std::move(detail)) {}

  // A frame that a newer kvbm wrote.
  static Error newer_frame(std::uint64_t at, std::uint32_t version, std::uint32_t supported) {
    Error error(ErrorCode::kNewerFrame, "frame version " + std::to_string(version) + " is too new", at);
    error.version_ = version;
    error.supported_ = supported;
    return error;
  }

  // An event that contradicts what a fold holds. `rule` is a literal.
  static Error illegal_event(std::string_view rule, std::string detail) {
    Error error(ErrorCode::kIllegalEvent, std::move(detail));
    error.rule_ = rule;
    return error;
  }

  // A slot of a tier, by the tier's number, that cannot be used as asked.
  static Error slot(std::uint8_t tier, std::uint32_t slot, std::string detail) {
    Error error(ErrorCode::kLedger, std::move(detail));
    error.tier_ = tier;
    error.slot_ = slot;
    return error;
  }

  // A copy that is not in flight.
  static Error copy(std::uint64_t id, std::string detail) {
    Error error(ErrorCode::kLedger, std::move(detail));
    error.copy_ = id;
    return error;
  }

  ErrorCode code() const noexcept { return code_; }
  std::uint64_t at() const noexcept { return at_; }
  std::uint32_t version() const noexcept { return version_; }
  std::uint32_t supported() const noexcept { return supported_; }
  std::string_view rule() const noexcept { return rule_; }
  std::optional<std::uint8_t> tier() const noexcept { return tier_; }
  std::optional<std::uint32_t> slot() const noexcept { return slot_; }
  std::optional<std::uint64_t> copy() const noexcept { return copy_; }
  const std::string& detail() const noexcept { return detail_; }
  const char* what() const noexcept override { return detail_.c_str(); }

 private:
  ErrorCode code_;                     // which class
  std::uint64_t at_;                   // frame errors: position of the frame in the buffer, in bytes
  std::uint32_t version_ = 0;          // kNewerFrame: the frame's version
  std::uint32_t supported_ = 0;        // kNewerFrame: the newest version this build reads
  std::string_view rule_;              // kIllegalEvent: the rule that was broken, a literal
  std::optional<std::uint8_t> tier_;   // kLedger: of the slot to blame, where one is
  std::optional<std::uint32_t> slot_;  // kLedger: that slot
  std::optional<std::uint64_t> copy_;  // kLedger: the copy to blame, where one is
  std::string detail_;                 // what happened, in numbers
};

}  // namespace kvbm
