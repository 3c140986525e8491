#include "kvbm/plain_question.hpp"

#include <string>
#include <string_view>
#include <vector>

#include "check.hpp"
#include "kvbm/json_text.hpp"

using namespace kvbm;
using tests::Random;

namespace {

const std::string kId(32, 'a');
const std::string kHash = "000102030405060708090A0b0c0D0e0f";

std::string body_of(const std::string& more = "") {
  return "{\"namespace\":\"" + kId + "\",\"hashes\":\"" + kHash + kHash + "\"" + more + "}";
}

std::string request_of(const std::string& body, const std::string& headers = "",
                       const std::string& line = "POST /v1/lookup HTTP/1.1") {
  return line + "\r\n" + headers + "content-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

// In memory of exactly its size, so that a read beyond it is found.
struct Read {
  explicit Read(std::string_view said) : text(said.begin(), said.end()) {
    is_plain = read_plain_question({text.data(), text.size()}, question);
  }

  std::vector<char> text;
  PlainQuestion question{};
  bool is_plain = false;
};

void a_lookup_is_read() {
  const Read read(request_of(body_of(", \"limit\" : 9\n"), "Host: a:1\r\nAuthorization:Bearer x\r\n") + "POST");
  CHECK(read.is_plain && !read.question.is_route && read.question.limit == 9);
  CHECK(read.question.host == "a:1" && read.question.authorization == "Bearer x");
  CHECK(read.question.namespace_id[0] == 0xAA && read.question.request_bytes + 4 == read.text.size());
  CHECK(read.question.hashes.size() == 2 * kHashBytes);
  for (std::size_t at = 0; at < read.question.hashes.size(); ++at) {
    CHECK(read.question.hashes[at] == at % kHashBytes);
  }
}

void a_route_says_how_many_tokens_there_are() {
  const std::string line = "POST /v1/route HTTP/1.1";
  const Read read(request_of(body_of(",\"input_tokens\":16777216"), "", line));
  CHECK(read.is_plain && read.question.is_route && read.question.input_tokens == 16777216 && read.question.limit == 0);
  CHECK(!Read(request_of(body_of(), "", line)).is_plain);
  CHECK(!Read(request_of(body_of(",\"input_tokens\":16777217"), "", line)).is_plain);
  CHECK(!Read(request_of(body_of(",\"input_tokens\":1"))).is_plain);
}

void what_is_odd_is_left_to_others() {
  for (const char* const more :
       {",\"limit\":0", ",\"limit\":1025", ",\"limit\":1,\"limit\":1", ",\"limit\":01", ",\"limit\":1.0",
        ",\"limit\":-1", ",\"limit\":1e1", ",\"x\":1", ",", "]", "}", ",\"limit\":4294967297", ",\"hashes\":\"\""}) {
    CHECK(!Read(request_of(body_of(more))).is_plain);
  }
  for (const char* const headers :
       {"Expect: 100-continue\r\n", "Transfer-Encoding: chunked\r\n", "content-length: 1\r\n", "Connection: close\r\n",
        "traceparent: 00-1-2-01\r\n", "host: a\r\nhost: a\r\n", "Host : a\r\n", " host: a\r\n", "host:\r\n",
        "host: a \r\n", "host: \x80\r\n", "host: a\n", "host: a\rb: c\r\n", "host\r\n", "Content-Type: text/plain\r\n",
        "Upgrade: h2c\r\n", "\r\n"}) {
    CHECK(!Read(request_of(body_of(), headers)).is_plain);
  }
  for (const char* const line : {"GET /v1/lookup HTTP/1.1", "POST /v1/lookup HTTP/1.0", "POST /v1/lookup?a HTTP/1.1",
                                 "POST  /v1/lookup HTTP/1.1", "POST /v1/presence HTTP/1.1"}) {
    CHECK(!Read(request_of(body_of(), "", line)).is_plain);
  }
  CHECK(!Read(request_of("{\"namespace\":\"" + kId + "\",\"hashes\":[]}")).is_plain);
  CHECK(!Read(request_of("{\"namespace\":\"" + kId + "\",\"hashes\":\"" + kHash + "0\"}")).is_plain);
  CHECK(!Read(request_of("{\"namespace\":\"" + kId + "\",\"hashes\":[\"" + kHash + kHash + "\"]}")).is_plain);
  CHECK(Read(request_of("{\"namespace\":\"" + kId + "\",\"hashes\":[\"" + kHash + "\"]}")).is_plain);
}

void every_letter_but_a_digit_is_no_hash() {
  for (int letter = 0; letter < 256; ++letter) {
    std::string hash = kHash;
    hash[7] = static_cast<char>(letter);
    const bool is_digit = std::string_view("0123456789abcdefABCDEF").find(static_cast<char>(letter)) < 22;
    CHECK(Read(request_of("{\"namespace\":\"" + kId + "\",\"hashes\":\"" + hash + "\"}")).is_plain == is_digit);
  }
}

void a_part_of_a_request_is_none() {
  const std::string whole = request_of(body_of(",\"limit\":3"), "host: a\r\n");
  for (std::size_t end = 0; end < whole.size(); ++end) {
    CHECK(!Read(std::string_view(whole).substr(0, end)).is_plain);
  }
  CHECK(Read(whole).is_plain);
}

void no_change_is_read_beyond_its_end() {
  Random random(7);
  const std::string whole = request_of(body_of(",\"limit\":3"), "host: a\r\nUser-Agent: b\r\n");
  for (int round = 0; round < 20'000; ++round) {
    std::string changed = whole;
    for (std::uint64_t count = 1 + random.below(3); count > 0; --count) {
      changed[random.below(changed.size())] = static_cast<char>(random.below(256));
    }
    changed.resize(changed.size() - random.below(4));
    const Read read(changed);
    CHECK(!read.is_plain || read.question.request_bytes <= changed.size());
  }
}

void json_is_written_as_it_is_read() {
  JsonText json;
  json.begin("a").text("b\xC3\xA9").field("c").open('[');
  json.item().number(0).item().number(18446744073709551615ULL).close(']');
  json.field("d").open('{').key("e").flag(true).key("f").flag(false).close('}').field("g").raw("0.0").close('}');
  CHECK(json.told() == "{\"a\":\"b\xC3\xA9\",\"c\":[0,18446744073709551615],\"d\":{\"e\":true,\"f\":false},\"g\":0.0}");
  CHECK(json.is_plain());
  for (const char* const odd : {"\"", "\\", "\n", "\x01"}) {
    json.clear();
    CHECK(json.is_plain());
    json.text(odd);
    CHECK(!json.is_plain());
  }
}

}  // namespace

int main() {
  return tests::run({
      {"a lookup is read", a_lookup_is_read},
      {"a route says how many tokens there are", a_route_says_how_many_tokens_there_are},
      {"what is odd is left to others", what_is_odd_is_left_to_others},
      {"every letter but a digit is no hash", every_letter_but_a_digit_is_no_hash},
      {"a part of a request is none", a_part_of_a_request_is_none},
      {"no change is read beyond its end", no_change_is_read_beyond_its_end},
      {"JSON is written as it is read", json_is_written_as_it_is_read},
  });
}
