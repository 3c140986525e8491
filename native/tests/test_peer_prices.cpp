// What is read from peers, and who could lend what: against the plainest way to say it.
#include "kvbm/peer_prices.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cluster.hpp"

using namespace kvbm;
using namespace kvbm::tests;

namespace {

void no_length_is_quicker_than_its_links_or_slower_than_one_source() {
  Random random(5);
  std::vector<FetchLength> lengths;
  for (int round = 0; round < 3000; ++round) {
    const auto begin = static_cast<std::uint32_t>(random.next() % 300);
    std::vector<FetchSource> sources;
    for (std::size_t count = random.next() % (kMostSources + 1); count > 0; --count) {
      const double rate = 1e6 * static_cast<double>(1 + random.next() % 4000);
      sources.push_back({static_cast<std::uint32_t>(random.next() % 2000),
                         1e-4 * static_cast<double>(random.next() % 100), rate, random.next() % 2 != 0 ? rate : 0.0});
    }
    least_times(begin, sources, 1e6, static_cast<std::uint32_t>(1 + random.next() % 100), lengths);
    std::uint32_t before = 0xFFFFFFFF;
    for (const FetchLength& one : lengths) {
      CHECK(one.end < before && one.end > begin);
      before = one.end;
      std::uint32_t blocks = 0;
      for (std::size_t at = 0; at < sources.size(); ++at) {
        blocks += one.blocks[at];
        CHECK(one.blocks[at] == 0 ||
              one.seconds >= static_cast<double>(one.blocks[at]) * 1e6 / sources[at].bytes_per_s * (1 - 1e-9));
        if (sources[at].end >= one.end) {
          const double alone_s =
              sources[at].latency_s + static_cast<double>(one.end - begin) * 1e6 / sources[at].bytes_per_s;
          CHECK(one.seconds <= alone_s * (1 + 1e-9) ||
                std::none_of(sources.begin(), sources.end(),
                             [](const FetchSource& source) { return source.together_bytes_per_s != 0.0; }));
        }
      }
      CHECK(blocks == one.end - begin);
    }
    const FetchLength* const best = quickest(begin, lengths, 1e-3);
    CHECK(best == nullptr || best->seconds <= static_cast<double>(best->end - begin) * 1e-3 + 1e-12);
  }
}

void one_question_after_the_other_prices_alike() {
  Random random(6);
  LentBlocks lent;
  for (std::uint32_t at = 0; at < 16; ++at) {
    PeerRun run;
    run.instance = name_of(at);
    run.slot = at;
    run.begin = static_cast<std::uint32_t>(random.next() % 4);
    run.end = run.begin + 1 + static_cast<std::uint32_t>(random.next() % 300);
    run.place = {{random.next() % 2, random.next() % 3, at}, random.next() % 3, random.next() % 4 != 0};
    lent.runs.push_back(run);
  }
  for (std::size_t apart = 0; apart <= kFarthest; ++apart) {
    lent.memory[apart] = {1e-4, 8e9, 0};
    lent.tcp[apart] = {1e-4, 4e9 / static_cast<double>(1 + apart), 4e9 / static_cast<double>(1 + apart)};
  }
  PeerPrices prices;
  PeerPrices fresh;
  prices.begin(&lent);
  for (int round = 0; round < 2000; ++round) {  // more sets of sources than are kept
    const PeerReader reader{
        {{random.next() % 2, random.next() % 3, random.next() % 16}, random.next() % 3, random.next() % 4 != 0},
        static_cast<double>(random.next() % 3) * 1e6};
    const auto slot = static_cast<std::uint32_t>(random.next() % 20);
    const auto depth = static_cast<std::uint32_t>(random.next() % 320);
    const auto reach = depth + static_cast<std::uint32_t>(random.next() % 2 * 100);
    const PeerPrice one = prices.price(reader, slot, depth, reach, {0.02, 5e8, 0}, 1e-3);
    fresh.begin(&lent);
    const PeerPrice other = fresh.price(reader, slot, depth, reach, {0.02, 5e8, 0}, 1e-3);
    CHECK(one.has_peers == other.has_peers && one.end == other.end && one.seconds == other.seconds &&
          one.peer == other.peer);
    CHECK(one.peer < 0 || (lent.runs[static_cast<std::size_t>(one.peer)].slot != slot && one.peer_blocks != 0));
    CHECK(!one.has_peers || reader.block_bytes > 0);
  }
  prices.begin(nullptr);
  CHECK(!prices.is_needed(0));
}

void runs_are_found_wherever_they_begin_while_others_write() {
  ClusterIndex index(kPlenty, kSecret);
  const Buffer hashes = hashes_between(0, 200);
  constexpr std::uint32_t kInstances = 12;
  std::map<std::uint32_t, LendableRun> wanted;
  for (std::uint32_t at = 0; at < kInstances; ++at) {
    const std::uint32_t number = index.instance(name_of(at));
    const std::uint32_t begin = at * 7;
    const std::uint32_t end = begin + 10 + at;
    apply(index, number,
          {InstanceStarted{}, created(space_id(0), Tier::kHbm, hashes_between(0, 200)),
           created(space_id(0), at % 2 != 0 ? Tier::kHost : Tier::kNvme, hashes_between(begin, end))},
          {own_pools()});
    index.report_lent_tiers(number, at % 3 == 0 ? 0 : 6);
    if (at % 3 != 0) {
      wanted[number] = {number, begin, end};
    }
  }
  std::thread writer([&index] {
    const std::uint32_t number = index.instance("writer");
    for (std::uint64_t round = 0; round < 200; ++round) {
      apply(index, number, {created(space_id(0), Tier::kHost, hashes_between(0, 200))});
      apply(index, number, {evicted(space_id(0), Tier::kHost, hashes_between(0, 200))});
      index.report_lent_tiers(number, static_cast<std::uint8_t>(round % 2 * 2));
    }
    index.report_lent_tiers(number, 0);
  });
  std::vector<LendableRun> runs;
  for (int round = 0; round < 200; ++round) {
    index.lent(space_id(0), hashes, 100, round % 2 == 0, runs);
    CHECK(runs.size() >= wanted.size());
  }
  writer.join();
  index.lent(space_id(0), hashes, 100, false, runs);
  CHECK(runs.size() == wanted.size());
  for (const LendableRun& one : runs) {
    CHECK(wanted[one.instance].begin == one.begin && wanted[one.instance].end == one.end);
  }
  CHECK(std::is_sorted(runs.begin(), runs.end(),
                       [](const LendableRun& a, const LendableRun& b) { return a.end > b.end; }));
  index.lent(space_id(0), hashes, 2, false, runs);
  CHECK(runs.size() == 2);
  index.lent(space_id(7), hashes, 2, false, runs);
  CHECK(runs.empty());
}

}  // namespace

int main() {
  return tests::run({{"no length is quicker than its links, or slower than one source",
                      no_length_is_quicker_than_its_links_or_slower_than_one_source},
                     {"one question after the other prices alike", one_question_after_the_other_prices_alike},
                     {"runs are found wherever they begin, while others write",
                      runs_are_found_wherever_they_begin_while_others_write}});
}
