#include "kvbm/join_requests.hpp"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"

namespace kvbm::tests {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

const std::vector<std::uint8_t> kHello(kRdmaHello.body_bytes, 5);
const NamespaceId kSpace{1};

SteadyTime in_long() { return Clock::now() + std::chrono::seconds(60); }

void nobody_is_asked_before_it_is_open() {
  JoinRequests requests(kRdmaHello);
  std::uint64_t number = 0;
  CHECK(!requests.is_open() && requests.ask(kHello, {}, in_long(), number).empty() && number == 0);
}

void an_answer_reaches_who_asked() {
  JoinRequests requests(kRdmaHello);
  requests.open();
  std::vector<std::uint8_t> ready;
  std::uint64_t number = 0;
  std::thread reader([&] { ready = requests.ask(kHello, {{kSpace, 7}}, in_long(), number); });
  std::vector<JoinRequests::Request> taken;
  while (taken.empty()) {
    taken = requests.take(milliseconds(100));
  }
  CHECK(taken.size() == 1 && taken[0].hello == kHello && !taken[0].has_left);
  const auto openings = requests.openings(taken[0].number);
  CHECK(openings.size() == 1 && openings[0] == JoinRequests::Opening(kSpace, 7));
  CHECK(!requests.answer(taken[0].number + 1, kHello));
  const std::vector<std::uint8_t> answer{1, 2, 3};
  CHECK(requests.answer(taken[0].number, answer));
  reader.join();
  CHECK(ready == answer && number == taken[0].number && requests.openings(number).empty());
  requests.leave(number);
  taken = requests.take(milliseconds(0));
  CHECK(taken.size() == 1 && taken[0].number == number && taken[0].has_left);
}

void who_waits_too_long_goes_and_is_answered_no_more() {
  JoinRequests requests(kRdmaHello);
  requests.open();
  std::uint64_t number = 0;
  CHECK(requests.ask(kHello, {}, Clock::now() + milliseconds(1), number).empty());
  CHECK(requests.take(milliseconds(0)).size() == 1 && !requests.answer(number, kHello));
}

void closing_ends_all_that_wait() {
  JoinRequests requests(kRdmaHello);
  requests.open();
  std::uint64_t number = 0;
  std::thread reader([&] { CHECK(requests.ask(kHello, {}, in_long(), number).empty()); });
  std::thread taker([&] {
    while (requests.is_open()) {
      requests.take(milliseconds(60'000));
    }
  });
  std::this_thread::sleep_for(milliseconds(5));
  requests.close();
  reader.join();
  taker.join();
  requests.leave(number);
  CHECK(requests.take(milliseconds(60'000)).empty());
}

void many_ask_at_once() {
  JoinRequests requests(kRdmaHello);
  requests.open();
  std::atomic<int> answered{0};
  std::thread taker([&] {
    while (requests.is_open()) {
      for (const auto& request : requests.take(milliseconds(100))) {
        if (!request.has_left) {
          const std::vector<std::uint8_t> same(request.hello.begin(), request.hello.begin() + 1);
          requests.answer(request.number, same);
        }
      }
    }
  });
  std::vector<std::thread> readers;
  for (std::uint8_t reader = 0; reader < 8; ++reader) {
    readers.emplace_back([&, reader] {
      for (int turn = 0; turn < 200; ++turn) {
        const std::vector<std::uint8_t> hello(kRdmaHello.body_bytes, reader);
        std::uint64_t number = 0;
        const auto ready = requests.ask(hello, {}, in_long(), number);
        answered += ready.size() == 1 && ready[0] == reader ? 1 : 0;
        requests.leave(number);
      }
    });
  }
  for (std::thread& reader : readers) {
    reader.join();
  }
  requests.close();
  taker.join();
  CHECK(answered == 1600);
}

}  // namespace
}  // namespace kvbm::tests

int main() {
  using namespace kvbm::tests;
  return run({
      {"nobody is asked before it is open", nobody_is_asked_before_it_is_open},
      {"an answer reaches who asked", an_answer_reaches_who_asked},
      {"who waits too long goes and is answered no more", who_waits_too_long_goes_and_is_answered_no_more},
      {"closing ends all that wait", closing_ends_all_that_wait},
      {"many ask at once", many_ask_at_once},
  });
}
