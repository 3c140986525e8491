// Any bytes are messages, lines, a part or malformed, and nothing that is given lies outside of them. Cut in two, they
// are the same.
#include <string_view>

#include "fuzz.hpp"
#include "kvbm/nats_messages.hpp"

using namespace kvbm;

namespace {

bool lies_in(std::string_view part, std::string_view whole) {
  return part.empty() || (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
}

// Takes apart what is there; how many bytes were taken.
std::size_t taken_of(std::string_view data) {
  NatsScan scan(data);
  while (true) {
    const std::size_t before = scan.at();
    const NatsScan::Found found = scan.next();
    REQUIRE(scan.at() <= data.size());
    if (found == NatsScan::Found::kPart || found == NatsScan::Found::kMalformed) {
      REQUIRE(scan.at() == before);
      REQUIRE(scan.needed() == 0 || scan.needed() > data.size() - scan.at());
      return scan.at();
    }
    REQUIRE(scan.at() > before);
    if (found == NatsScan::Found::kLine) {
      REQUIRE(lies_in(scan.line(), data));
      continue;
    }
    const NatsMessage& message = scan.message();
    for (const std::string_view part : {message.subject, message.reply, message.headers, message.payload}) {
      REQUIRE(lies_in(part, data));
    }
    const auto fence = nats_fence(message.headers);
    REQUIRE(!fence || lies_in(*fence, message.headers));
    nats_delivery(message.reply);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const std::size_t taken = taken_of(all);
  const std::size_t half = taken_of(all.substr(0, size / 2));
  REQUIRE(half <= taken);
  REQUIRE(taken_of(all.substr(half)) == taken - half);
  return 0;
}
