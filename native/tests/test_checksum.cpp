#include "kvbm/checksum.hpp"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <thread>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

void rfc_3720_vectors() {
  std::vector<std::uint8_t> data(32);
  CHECK(crc32c(data) == 0x8A9136AA);
  std::fill(data.begin(), data.end(), std::uint8_t{0xFF});
  CHECK(crc32c(data) == 0x62A8AB43);
  std::iota(data.begin(), data.end(), std::uint8_t{0});
  CHECK(crc32c(data) == 0x46DD794E);
  std::reverse(data.begin(), data.end());
  CHECK(crc32c(data) == 0x113FDB5C);
  const std::string_view digits = "123456789";
  CHECK(crc32c({reinterpret_cast<const std::uint8_t*>(digits.data()), digits.size()}) == 0xE3069283);
  CHECK(crc32c({}) == 0);
}

void variants_agree() {
  if (!crc32c_has_hardware()) {
    return;
  }
  Random random(1);
  const auto data = random.bytes(70'000);
  for (int pass = 0; pass < 2'000; ++pass) {
    const std::size_t start = random.below(64);
    const std::size_t size = random.below(pass % 8 == 0 ? data.size() - 64 : 3'000);
    const auto initial = static_cast<std::uint32_t>(random.next());
    const std::span piece(data.data() + start, size);
    CHECK(crc32c_hardware(piece, initial) == crc32c_portable(piece, initial));
  }
}

void continues() {
  Random random(2);
  const auto data = random.bytes(30'000);
  for (int pass = 0; pass < 200; ++pass) {
    const std::size_t cut = random.below(data.size());
    const std::span whole(data);
    CHECK(crc32c(whole.subspan(cut), crc32c(whole.first(cut))) == crc32c(whole));
  }
}

void parts_add_up() {
  Random random(5);
  const auto data = random.bytes(70'000);
  for (int pass = 0; pass < 500; ++pass) {
    const std::span whole = std::span(data).first(random.below(pass % 4 == 0 ? data.size() : 40));
    const std::size_t cut = random.below(whole.size() + 1);
    const std::span behind = whole.subspan(cut);
    CHECK((crc32c_carried(crc32c(whole.first(cut)), behind.size()) ^ crc32c(behind)) == crc32c(whole));
  }
  CHECK(crc32c_carried(0x12345678, 0) == 0x12345678);
}

void many_are_carried_as_one() {
  Random random(7);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{4'097},
                                  std::size_t{1} << 31, std::size_t{1} << 60, ~std::size_t{0}}) {
    const Crc32cCarrier carried(bytes);
    CHECK(carried(0) == 0);
    for (int bit = 0; bit < 32; ++bit) {
      CHECK(carried(1U << bit) == crc32c_carried(1U << bit, bytes));
    }
    for (int pass = 0; pass < 300; ++pass) {
      const auto crc = static_cast<std::uint32_t>(random.next());
      CHECK(carried(crc) == crc32c_carried(crc, bytes));
    }
  }
}

void streamed_copies_are_whole() {
  Random random(6);
  const auto data = random.bytes(60'000);
  for (int pass = 0; pass < 600; ++pass) {
    const std::size_t begin = random.below(70);
    const std::size_t to = random.below(70);
    const std::size_t size = random.below(pass % 3 == 0 ? data.size() - 70 : 300);
    std::vector<std::uint8_t> expected(data.size() + 70, 0x5A);
    std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(begin), size,
                expected.begin() + static_cast<std::ptrdiff_t>(to));
    std::vector<std::uint8_t> target(expected.size(), 0x5A);
    std::vector<std::uint8_t> checked(target);
    stream_copy(target.data() + to, data.data() + begin, size);
    const std::uint32_t crc = stream_copy_crc32c(checked.data() + to, data.data() + begin, size);
    streamed_is_seen();
    CHECK(target == expected && checked == expected);
    CHECK(crc == crc32c_portable({data.data() + begin, size}, 0));
  }
}

void rows_are_apart() {
  Random random(3);
  const auto data = random.bytes(8 * 1'000);
  std::vector<std::uint32_t> out(8);
  crc32c_rows(data.data(), 1'000, out);
  for (std::size_t row = 0; row < out.size(); ++row) {
    CHECK(out[row] == crc32c(std::span(data).subspan(row * 1'000, 1'000)));
  }
  crc32c_rows(data.data(), 0, out);
  CHECK(std::all_of(out.begin(), out.end(), [](std::uint32_t value) { return value == 0; }));
}

void threads_share_it() {
  const auto data = Random(4).bytes(100'000);
  const std::uint32_t expected = crc32c_portable(data, 0);
  std::vector<std::thread> threads;
  std::vector<std::uint32_t> results(4);
  for (std::uint32_t& result : results) {
    threads.emplace_back([&] { result = crc32c(data); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(std::all_of(results.begin(), results.end(), [&](std::uint32_t result) { return result == expected; }));
}

}  // namespace

int main() {
  return tests::run({{"checksums are those of RFC 3720", rfc_3720_vectors},
                     {"the hardware's checksum is the portable one", variants_agree},
                     {"a checksum continues over a cut", continues},
                     {"checksums of parts add up to that of the whole", parts_add_up},
                     {"many checksums are carried as each alone", many_are_carried_as_one},
                     {"copies past the caches are whole, with their checksum", streamed_copies_are_whole},
                     {"each row has its own checksum", rows_are_apart},
                     {"threads may compute at once", threads_share_it}});
}
