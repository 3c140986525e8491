#include "kvbm/http_answer.hpp"

#include <string>
#include <string_view>

#include "check.hpp"

using namespace kvbm;

namespace {

constexpr std::string_view kHead =
    "HTTP/1.1 200 OK\r\nServer: x\r\ncontent-LENGTH:  1234 \r\nETag: \"a:b\"\r\nConnection: Keep-Alive\r\n\r\n";

void a_head_ends_with_its_blank_line() {
  for (std::size_t size = 0; size < kHead.size(); ++size) {
    CHECK(http_head_bytes(kHead.substr(0, size)) == 0);
  }
  CHECK(http_head_bytes(std::string(kHead) + "body\r\n\r\n") == kHead.size());
}

void a_head_says_status_length_and_whether_the_connection_stays() {
  const auto answer = read_http_answer(kHead);
  CHECK(answer && answer->status == 200 && answer->body_bytes == 1234U && answer->stays);
  const auto closes = read_http_answer("HTTP/1.1 404 \r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
  CHECK(closes && closes->status == 404 && closes->body_bytes == 0U && !closes->stays);
  const auto old = read_http_answer("HTTP/1.0 200 OK\r\nContent-Length: 7\r\nConnection: keep-alive\r\n\r\n");
  CHECK(old && old->body_bytes == 7U && !old->stays);
  CHECK(read_http_answer("HTTP/1.1 503\r\n\r\n")->status == 503);
}

void a_body_whose_end_is_not_certain_has_no_length() {
  for (const std::string_view fields :
       {"", "Transfer-Encoding: chunked\r\n", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n", "Content-Length: 5\r\nContent-Encoding: gzip\r\n",
        "Content-Length: -5\r\n", "Content-Length: 5, 5\r\n", "Content-Length: 0x5\r\n", "Content-Length:\r\n",
        "Content-Length: 99999999999999999999\r\n", "Content-Length: 5\r\nContent-Length: x\r\n",
        "Content-Length: x\r\nContent-Length: 5\r\n"}) {
    const auto answer = read_http_answer("HTTP/1.1 200 OK\r\n" + std::string(fields) + "\r\n");
    CHECK(answer && answer->status == 200 && !answer->body_bytes);
  }
  CHECK(read_http_answer("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n")->body_bytes == 5U);
  CHECK(read_http_answer("HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 5\r\n\r\n")->body_bytes ==
        5U);
}

void what_is_no_head_is_refused() {
  for (const std::string_view head :
       {"\r\n\r\n", "HTTP/2 200\r\n\r\n", "HTTP/1.1 20\r\n\r\n", "HTTP/1.1 2000 OK\r\n\r\n", "HTTP/1.1 099 x\r\n\r\n",
        "HTTP/1.1 abc\r\n\r\n", "HTTP/1.1 600 x\r\n\r\n", "ICY 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "HTTP/1.1 200 OK\r\n: x\r\n\r\n", "http/1.1 200 OK\r\n\r\n"}) {
    CHECK(!read_http_answer(head));
  }
}

}  // namespace

int main() {
  return kvbm::tests::run({
      {"a head ends with its blank line", a_head_ends_with_its_blank_line},
      {"a head says status, length and whether the connection stays",
       a_head_says_status_length_and_whether_the_connection_stays},
      {"a body whose end is not certain has no length", a_body_whose_end_is_not_certain_has_no_length},
      {"what is no head is refused", what_is_no_head_is_refused},
  });
}
