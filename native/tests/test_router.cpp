#include "kvbm/router.hpp"

#include "check.hpp"
#include "cluster.hpp"

using namespace kvbm;
using namespace kvbm::tests;

namespace {

RouterSettings settings() {
  RouterSettings settings;
  settings.work_weight = 2;
  settings.half_life_s = 300;
  settings.prior_s = settings.balance_s = 2;
  settings.hold_s = 30;
  settings.prefill_tokens_per_s = 10'000;
  settings.measured_within = 4;
  settings.most_weight = 1000;
  settings.class_weights = {0.5, 1, 2};
  settings.links.fill({0.001, 1e9, 1});
  settings.between = {0.001, 1e9, 1};
  settings.most_tokens = settings.most_input_tokens = 1 << 20;
  settings.most_queued = 1'000'000;
  settings.most_callers = 8;
  return settings;
}

RouteTask task(std::string caller, Bytes hashes) {
  RouteTask task{};
  task.id = space_id(0);
  task.hashes = hashes;
  task.input_tokens = 1000;
  task.block_tokens = 16;
  task.caller = std::move(caller);
  task.deadline_s = 1e9;
  return task;
}

void routes_of_so_many_callers_are_remembered() {
  ClusterIndex index(kPlenty, kSecret);
  Router router(index, settings());
  Candidates candidates;
  router.add(candidates, "a");
  const Candidates* const groups[] = {&candidates};
  for (int caller = 0; caller < 100; ++caller) {
    router.route(0.0, task(name_of(static_cast<std::uint64_t>(caller)), {}), groups, nullptr, 1);
    CHECK(router.callers() == static_cast<std::size_t>(std::min(caller + 1, 8)));
  }
}

void a_name_that_is_forgotten_makes_room_for_another() {
  ClusterIndex index(kPlenty, kSecret);
  Router router(index, settings());
  Candidates candidates;
  const Candidates* const groups[] = {&candidates};
  Random random(7);
  const auto hashes = random.bytes(10 * kHashBytes);
  for (std::uint64_t number = 0; number < 1000; ++number) {
    const std::string name = name_of(number);
    router.add(candidates, name);
    router.hear(name, {.at_s = 1.0,
                       .queued_tokens = 50'000,
                       .running_requests = 1,
                       .prefill_tokens_per_s = 0,
                       .queue_tokens_per_s = 0});
    CHECK(router.route(1.0, task("", hashes), groups, nullptr, 8).best.size() == 1);
    CHECK(router.route(1.0, task("", hashes), groups, nullptr, 8).best.front().queueing_s > 4.9);
    router.remove(candidates, name);
    router.forget(name);
    CHECK(router.route(1.0, task("", hashes), groups, nullptr, 8).best.empty());
  }
  router.add(candidates, "new");  // in a slot that others had
  const auto ranking = router.route(1.0, task("", hashes), groups, nullptr, 8);
  CHECK(router.name(ranking.best.front().slot) == "new");
  CHECK(ranking.best.front().queueing_s == 0.0);
  CHECK(ranking.best.front().depth == 0);
}

void what_nobody_is_admitted_for_is_not_remembered() {
  ClusterIndex index(kPlenty, kSecret);
  Router router(index, settings());
  Candidates candidates;
  const Candidates* const groups[] = {&candidates};
  Random random(7);
  const auto hashes = random.bytes(10 * kHashBytes);
  router.add(candidates, "a");
  router.hear(
      "a",
      {.at_s = 1.0, .queued_tokens = 0, .running_requests = 0, .prefill_tokens_per_s = 0, .queue_tokens_per_s = 0});
  const auto routed = [&](double deadline_s) {
    RouteTask asked = task("", hashes);
    asked.deadline_s = deadline_s;
    return router.route(1.0, asked, groups, nullptr, 8).best.front();
  };
  CHECK(!routed(0).is_admitted);
  const RankedInstance next = routed(1e9);
  CHECK(next.is_admitted && next.queueing_s == 0 && next.depth == 0);
  CHECK(routed(1e9).depth == 10);
}

void a_slot_in_a_set_that_was_not_left_is_nobody() {
  ClusterIndex index(kPlenty, kSecret);
  Router router(index, settings());
  Candidates candidates;
  router.add(candidates, "a");
  router.forget("a");
  const Candidates* const groups[] = {&candidates};
  CHECK(router.route(1.0, task("", {}), groups, nullptr, 8).best.empty());
}

void another_catalogs_route_waits_there_and_its_blocks_will_be_held() {
  ClusterIndex index(kPlenty, kSecret);
  Router router(index, settings());
  Candidates candidates;
  const Candidates* const groups[] = {&candidates};
  Random random(7);
  const auto hashes = random.bytes(10 * kHashBytes);
  for (const char* const name : {"a", "b"}) {
    router.add(candidates, name);
  }
  SharedRoute route{.caller = "one",
                    .is_decode = false,
                    .instance = "a",
                    .input_tokens = 20'000,
                    .missing_tokens = 10'000,
                    .id = space_id(0),
                    .first = 0,
                    .blocks = 10,
                    .hashes = hashes};
  CHECK(!router.take(1.0, route));  // no heartbeat of it came
  for (const char* const name : {"a", "b"}) {
    router.hear(
        name,
        {.at_s = 0.5, .queued_tokens = 0, .running_requests = 0, .prefill_tokens_per_s = 0, .queue_tokens_per_s = 0});
  }
  route.blocks = 9;
  CHECK(!router.take(1.0, route));  // one hash too many
  route.blocks = 10;
  route.instance = "nobody";
  CHECK(!router.take(1.0, route));
  route.instance = "a";
  CHECK(router.take(1.0, route));
  for (const RankedInstance& one : router.route(1.0, task("one", hashes), groups, nullptr, 8, false).best) {
    const bool is_there = router.name(one.slot) == "a";
    CHECK(one.depth == (is_there ? 10U : 0U));
    CHECK((one.queueing_s > 0) == is_there);
  }
  for (const RankedInstance& one : router.route(1.0, task("two", hashes), groups, nullptr, 8, false).best) {
    CHECK(one.depth == 0 && one.queueing_s == 0);
  }
}

}  // namespace

int main() {
  return tests::run(
      {{"routes of so many callers are remembered", routes_of_so_many_callers_are_remembered},
       {"a name that is forgotten makes room for another", a_name_that_is_forgotten_makes_room_for_another},
       {"what nobody is admitted for is not remembered", what_nobody_is_admitted_for_is_not_remembered},
       {"a slot in a set that was not left is nobody", a_slot_in_a_set_that_was_not_left_is_nobody},
       {"another catalog's route waits there, and its blocks will be held",
        another_catalogs_route_waits_there_and_its_blocks_will_be_held}});
}
