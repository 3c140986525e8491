#include "kvbm/number_list.hpp"

#include <string>
#include <string_view>
#include <vector>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

// In memory of exactly its size, so that a read beyond it is found.
struct Read {
  Read(std::string_view said, std::size_t room, std::size_t at = 0) : text(said.begin(), said.end()), numbers(room) {
    found = read_number_list(text, at, numbers);
    numbers.resize(found.count);
  }

  std::vector<std::uint8_t> text;
  std::vector<std::uint32_t> numbers;
  NumbersRead found{};
};

void plain_numbers_are_read() {
  const Read read("0, 1 ,\n4294967295,22", 9);
  CHECK((read.numbers == std::vector<std::uint32_t>{0, 1, 4294967295, 22}) && read.found.at == read.text.size());
  CHECK(Read("1,2,3", 2).found.at == 4 && Read("1,2,3", 2, 4).numbers == std::vector<std::uint32_t>{3});
}

void it_stops_before_what_is_odd() {
  for (const char* const odd : {"", " ", "-1", "01", "4294967296", "99999999999999999999999999", "1.0", "1e3", "x",
                                "1 2", "[1]", "\"1\"", "1x"}) {
    const Read read("7," + std::string(odd) + ",8", 9);
    CHECK(read.numbers == std::vector<std::uint32_t>{7} && read.found.at == 2);
  }
  CHECK(Read("7,8,", 9).found.at == 2 && Read("7,8, \n", 9).found.at == 2 && Read("", 9).found.count == 0);
}

void any_bytes_stay_within_their_bounds() {
  Random random(11);
  constexpr std::string_view kLikely = "0123456789,, \n\t-.e[x";
  for (int turn = 0; turn < 200'000; ++turn) {
    std::string text;
    for (std::uint64_t left = random.below(24); left > 0; --left) {
      text += kLikely[random.below(kLikely.size())];
    }
    const std::size_t room = random.below(9);
    const std::size_t at = random.below(text.size() + 1);
    const Read read(text, room, at);
    CHECK(read.found.count <= room && read.found.at >= at && read.found.at <= text.size());
  }
}

}  // namespace

int main() {
  return tests::run({
      {"plain numbers are read", plain_numbers_are_read},
      {"it stops before what is odd", it_stops_before_what_is_odd},
      {"any bytes stay within their bounds", any_bytes_stay_within_their_bounds},
  });
}
