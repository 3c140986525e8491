#include "kvbm/entropy.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace kvbm {

std::uint64_t random_word() {
  std::uint64_t word = 0;
  if (getentropy(&word, sizeof word) != 0) {
    throw std::system_error(errno, std::generic_category(), "the system gives no random bytes");
  }
  return word;
}

}  // namespace kvbm
