#include "kvbm/nats_messages.hpp"

#include <string>
#include <string_view>

#include "check.hpp"

using namespace kvbm;

namespace {

using Found = NatsScan::Found;

void messages_and_lines_come_in_order() {
  NatsScan scan("PING\r\nMSG a.b 7 3\r\nx\r\n\r\nHMSG a 9 reply 4 6\r\nheadxy\r\nPO");
  CHECK(scan.next() == Found::kLine);
  CHECK(scan.line() == "PING\r\n");
  CHECK(scan.next() == Found::kMessage);
  CHECK(scan.message().subscription == 7 && scan.message().subject == "a.b" && scan.message().reply.empty());
  CHECK(scan.message().headers.empty() && scan.message().payload == "x\r\n");
  CHECK(scan.next() == Found::kMessage);
  CHECK(scan.message().subscription == 9 && scan.message().reply == "reply");
  CHECK(scan.message().headers == "head" && scan.message().payload == "xy");
  CHECK(scan.next() == Found::kPart);
  CHECK(scan.needed() == 0);
}

void a_part_of_a_message_says_how_much_is_missing() {
  const std::string_view whole = "MSG a 7 5\r\n12345\r\n";
  for (std::size_t size = 0; size < whole.size(); ++size) {
    NatsScan scan(whole.substr(0, size));
    CHECK(scan.next() == Found::kPart);
    CHECK(scan.at() == 0);
    CHECK(scan.needed() == (size < 11 ? 0 : whole.size()));
  }
}

void what_no_server_sends_is_malformed() {
  for (const std::string_view line :
       {"MSG a\r\n", "MSG a x 1\r\n", "MSG a 1 2 3 4\r\n", "HMSG a 1 5 2\r\nxx\r\n", "MSG a 1 -5\r\n",
        "MSG a 1 1_0\r\n", "MSG a 1 99999999999999999999999\r\n", "MSG a 1 134217729\r\n"}) {
    CHECK(NatsScan(line).next() == Found::kMalformed);
  }
  CHECK(NatsScan(std::string(5000, 'x')).next() == Found::kMalformed);
  CHECK(NatsScan("INFO " + std::string(5000, 'x')).next() == Found::kPart);
}

void a_reply_subject_says_where_a_message_lies() {
  const auto place = nats_delivery("$JS.ACK.S.C.1.20.10.1700000000000000000.3");
  CHECK(place && place->sequence == 20 && place->count == 10 && place->stored_ns == 1700000000000000000 &&
        place->pending == 3);
  const auto longer = nats_delivery("$JS.ACK.hub.account.S.C.1.20.10.17.3.token");
  CHECK(longer && longer->sequence == 20 && longer->pending == 3);
  for (const std::string_view reply :
       {"", "reply", "$JS.ACK.S.C.1.20.10.17", "$JS.ACK.S.C.1.x.10.17.3", "$JS.ACK.S.C.1..10.17.3",
        "$JS.ACK.S.C.1.9223372036854775808.10.17.3", "$JS.ACK.S.C.1.20.10.17.3.4"}) {
    CHECK(!nats_delivery(reply));
  }
}

void a_fence_is_found_among_headers() {
  CHECK(nats_fence("NATS/1.0\r\nKvbm-Fence: 1:2:run\r\nA: b\r\n\r\n") == "1:2:run");
  CHECK(!nats_fence("NATS/1.0\r\nA: b\r\n\r\n"));
  CHECK(!nats_fence("NATS/1.0\r\nKvbm-Fence: 1:2:run"));
}

}  // namespace

int main() {
  return tests::run({
      {"messages and lines come in order", messages_and_lines_come_in_order},
      {"a part of a message says how much is missing", a_part_of_a_message_says_how_much_is_missing},
      {"what no server sends is malformed", what_no_server_sends_is_malformed},
      {"a reply subject says where a message lies", a_reply_subject_says_where_a_message_lies},
      {"a fence is found among headers", a_fence_is_found_among_headers},
  });
}
