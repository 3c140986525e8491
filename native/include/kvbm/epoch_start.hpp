// EpochStart: what an InstanceStarted says, as far as a fold needs it. Values without identity.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "kvbm/event.hpp"

namespace kvbm {

enum class Reach : std::uint8_t { kInstance = 0, kPod = 1, kCluster = 2 };
inline constexpr std::uint8_t kReachCount = 3;

// Any integer MessagePack can hold, from -2**63 to 2**64 - 1: what Python decodes it does not bound further.
class WireInteger {
 public:
  constexpr WireInteger() noexcept = default;
  constexpr explicit WireInteger(std::uint64_t value) noexcept : bits_(value) {}
  constexpr static WireInteger negative(std::int64_t value) noexcept {
    WireInteger made(static_cast<std::uint64_t>(value));
    made.is_negative_ = value < 0;
    return made;
  }

  constexpr bool is_zero() const noexcept { return bits_ == 0; }
  constexpr bool is_negative() const noexcept { return is_negative_; }
  // The value, modulo 2**64.
  constexpr std::uint64_t bits() const noexcept { return bits_; }
  std::string text() const;

  constexpr bool operator==(const WireInteger&) const noexcept = default;
  constexpr std::strong_ordering operator<=>(const WireInteger& other) const noexcept {
    if (is_negative_ != other.is_negative_) {
      return is_negative_ ? std::strong_ordering::less : std::strong_ordering::greater;
    }
    return bits_ <=> other.bits_;  // of two negative ones, the two's complements compare as the values do
  }

 private:
  bool is_negative_ = false;  // below 0
  std::uint64_t bits_ = 0;    // two's complement
};

// One pool, as an instance's start declares it.
struct PoolStated {
  Tier tier;                       // class of medium
  WireInteger slots;               // how many blocks fit
  WireInteger block_bytes;         // bytes of one block
  Reach reach = Reach::kInstance;  // who can read it without the owner
  std::string name;                // of a pool of cluster reach; UTF-8
};

// An InstanceStarted, as far as a fold needs it. Its MessagePack is decoded by the caller.
struct EpochStart {
  WireInteger epoch;              // the new epoch
  std::vector<PoolStated> pools;  // in the order listed
};

}  // namespace kvbm
