#include "kvbm/entropy.hpp"

#include <set>

#include "check.hpp"

using namespace kvbm;

namespace {

void words_differ_in_every_bit() {
  std::set<std::uint64_t> words;
  std::uint64_t set_once = 0;
  std::uint64_t clear_once = 0;
  for (int pass = 0; pass < 64; ++pass) {
    const std::uint64_t word = random_word();
    words.insert(word);
    set_once |= word;
    clear_once |= ~word;
  }
  CHECK(words.size() == 64);
  CHECK(set_once == ~std::uint64_t{0});
  CHECK(clear_once == ~std::uint64_t{0});
}

}  // namespace

int main() { return tests::run({{"random words differ in every bit", words_differ_in_every_bit}}); }
