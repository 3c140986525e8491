// Random words from the system, for secrets and seeds. Any thread.
// std::random_device is not used: the C++ runtime's own needs a newer glibc than a portable wheel may ask for.
#pragma once

#include <cstdint>

namespace kvbm {

// Throws std::system_error where the system gives none.
std::uint64_t random_word();

}  // namespace kvbm
