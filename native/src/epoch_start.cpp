#include "kvbm/epoch_start.hpp"

namespace kvbm {

std::string WireInteger::text() const {
  return is_negative_ ? std::to_string(static_cast<std::int64_t>(bits_)) : std::to_string(bits_);
}

}  // namespace kvbm
