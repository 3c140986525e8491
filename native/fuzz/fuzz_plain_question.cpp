// Any bytes are a plain question or none; what it names lies in them, and nothing behind it changes it.
#include <string_view>

#include "fuzz.hpp"
#include "kvbm/plain_question.hpp"

using namespace kvbm;

namespace {

bool lies_in(const std::optional<std::string_view>& part, std::string_view whole) {
  return !part || (part->data() >= whole.data() && part->data() + part->size() <= whole.data() + whole.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  PlainQuestion question;
  const fuzz::MemoryMeter meter;
  const bool is_plain = read_plain_question(all, question);
  REQUIRE(meter.bytes() <= 4 * size + 64);
  if (!is_plain) {
    return 0;
  }
  REQUIRE(question.request_bytes <= size && question.body_bytes < question.request_bytes);
  REQUIRE(lies_in(question.authorization, all) && lies_in(question.host, all));
  REQUIRE(!question.hashes.empty() && question.hashes.size() % kHashBytes == 0);
  REQUIRE(2 * question.hashes.size() < question.body_bytes && question.limit <= 1024);
  PlainQuestion alone;
  REQUIRE(read_plain_question(all.substr(0, question.request_bytes), alone));
  REQUIRE(alone.hashes == question.hashes && alone.namespace_id == question.namespace_id);
  REQUIRE(!read_plain_question(all.substr(0, question.request_bytes - 1), alone));
  return 0;
}
