#include "kvbm/plain_frames.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>

#include <atomic>
#include <system_error>
#include <thread>

#include "check.hpp"
#include "cluster.hpp"
#include "no_threads.hpp"

using namespace kvbm;
using namespace kvbm::tests;

namespace {

constexpr std::size_t kInstances = 4;
constexpr std::uint64_t kBlocks = 64;  // of each frame

// Frames of a few instances that go on one after the other, in messages.
struct Streams {
  std::vector<Buffer> bytes;
  std::vector<StreamMessage> messages;
  std::vector<StreamPlace> places;

  Streams(ClusterIndex& index, std::size_t count) {
    for (std::size_t number = 0; number < kInstances; ++number) {
      const std::uint32_t instance = index.instance(name_of(number));
      apply(index, instance, {InstanceStarted{.blob = {}}}, {own_pools()});
      places.push_back({instance, name_of(number), 1, 1});
    }
    std::vector<std::uint64_t> offsets(kInstances, 1);
    for (std::size_t number = 0; number < count; ++number) {
      const std::size_t place = number % kInstances;
      bytes.push_back(frame(place, offsets[place]++, number * kBlocks));
    }
    for (std::size_t number = 0; number < count; ++number) {
      messages.push_back({number % kInstances, bytes[number]});
    }
  }

  static Buffer frame(std::size_t place, std::uint64_t offset, std::uint64_t first, std::uint64_t epoch = 1) {
    const std::string name = name_of(place);
    const Buffer hashes = hashes_between(first, first + kBlocks);
    FrameHeader header;
    header.instance = name;
    header.epoch = epoch;
    header.first_offset = offset;
    header.wall_time_ns = first;
    FrameWriter writer(header);
    writer.add(created(space_id(0), Tier::kHost, hashes));
    Buffer data(writer.frame_bytes());
    writer.write(data);
    return data;
  }
};

void wait_until_readable(int file) {
  pollfd wanted{file, POLLIN, 0};
  CHECK(::poll(&wanted, 1, 60'000) == 1);
}

bool is_readable(int file) {
  pollfd wanted{file, POLLIN, 0};
  return ::poll(&wanted, 1, 0) == 1;
}

void a_run_ends_before_what_is_not_plain() {
  for (int what = 0; what < 7; ++what) {
    ClusterIndex index(kPlenty, kSecret);
    Streams streams(index, 12);
    Buffer& seventh = streams.bytes[7];
    switch (what) {
      case 0:
        seventh[seventh.size() / 2] ^= 1;
        break;  // damaged
      case 1:
        seventh = Streams::frame(3, 3, 7 * kBlocks);
        break;  // beyond a hole
      case 2:
        seventh = Streams::frame(3, 1, 7 * kBlocks);
        break;  // a repeat
      case 3:
        seventh = Streams::frame(0, 2, 7 * kBlocks);
        break;  // another's
      case 4:
        seventh = Streams::frame(3, 2, 7 * kBlocks, 2);
        break;  // of the next epoch
      case 5:
        seventh.pop_back();
        break;    // cut short
      default: {  // good, and then what is not
        const Buffer more = Streams::frame(3, 9, 0);
        seventh.insert(seventh.end(), more.begin(), more.end());
      }
    }
    streams.messages[7].data = seventh;
    const PlainApplied applied = apply_plain(index, streams.messages, streams.places);
    CHECK(applied.messages == 7 && !applied.is_diverged && applied.frames == 7 && applied.blocks == 7 * kBlocks);
    CHECK(streams.places[0].offset == 3 && streams.places[3].offset == 2 && streams.places[3].last == 3);
    CHECK(index.residency_count() == 7 * kBlocks);
  }
}

void a_run_ends_behind_a_digest_that_differs() {
  ClusterIndex index(kPlenty, kSecret);
  Streams streams(index, 12);
  // An instance in step is one whose snapshots have ended
  for (std::size_t number = 0; number < kInstances; ++number) {
    for (const Tier tier : {Tier::kHbm, Tier::kHost, Tier::kNvme}) {
      apply(index, streams.places[number].instance, {SnapshotEnded{.tier = tier, .snapshot = 1, .count = 0}});
    }
  }
  const PlainApplied applied = apply_plain(index, streams.messages, streams.places);  // their digests are 0
  CHECK(applied.messages == 0 && applied.is_diverged && applied.end == streams.bytes[0].size() && applied.frames == 1);
  CHECK(streams.places[0].offset == 2 && streams.places[1].offset == 1);
}

void runs_in_the_thread_are_those_in_place() {
  ClusterIndex here(kPlenty, kSecret);
  ClusterIndex there(kPlenty, kSecret);
  Streams in_place(here, 400);
  Streams threaded(there, 400);
  const PlainApplied expected = apply_plain(here, in_place.messages, in_place.places);
  ApplyThread thread(there);
  CHECK(!is_readable(thread.ended_file()));
  std::atomic<bool> is_over{false};
  std::vector<std::thread> others;
  for (int reader = 0; reader < 2; ++reader) {
    others.emplace_back([&] {
      PrefixAnswer answer;
      const Buffer asked = hashes_between(0, kBlocks);
      while (!is_over) {
        there.prefixes(space_id(0), asked, 0, answer);
        CHECK(answer.deepest == 0 || answer.deepest <= kBlocks);
      }
    });
  }
  others.emplace_back([&] {
    for (std::uint32_t turn = 0; !is_over; ++turn) {
      there.exclude(turn % kInstances, turn % 3 == 0);
      there.sweep(4);
      there.audit(4);
    }
  });
  PlainApplied sum;
  for (std::size_t at = 0; at < threaded.messages.size(); at += 50) {
    thread.begin(std::span(threaded.messages).subspan(at, 50), threaded.places);
    wait_until_readable(thread.ended_file());
    const PlainApplied applied = thread.finish();
    CHECK(!is_readable(thread.ended_file()));
    CHECK(applied.messages == 50 && !applied.is_diverged);
    sum.frames += applied.frames;
    sum.blocks += applied.blocks;
  }
  is_over = true;
  for (std::thread& one : others) {
    one.join();
  }
  CHECK(sum.frames == expected.frames && sum.blocks == expected.blocks);
  for (std::uint32_t number = 0; number < kInstances; ++number) {
    CHECK(there.state(number)->digest == here.state(number)->digest &&
          threaded.places[number].offset == in_place.places[number].offset);
  }
}

void a_thread_may_end_with_a_run_under_way() {
  for (int turn = 0; turn < 20; ++turn) {
    ClusterIndex index(kPlenty, kSecret);
    Streams streams(index, 40);
    ApplyThread thread(index);
    thread.begin(streams.messages, streams.places);
    if (turn % 2 == 0) {
      thread.close();
      CHECK(thread.finish().messages == 40);
      CHECK(thrown_code([&] { thread.begin(streams.messages, streams.places); }) == ErrorCode::kLayout);
    }
  }
}

std::size_t descriptors() {
  std::size_t open = 0;
  for (int fd = 0; fd < 256; ++fd) {
    open += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  }
  return open;
}

void without_a_thread_there_is_none() {
  ClusterIndex index(kPlenty, kSecret);
  const std::size_t before = descriptors();
  bool is_refused = false;
  try {
    const FewThreads few(0);
    const ApplyThread thread(index);
  } catch (const std::system_error& error) {
    is_refused = error.code().value() == EAGAIN;
  }
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  CHECK(is_refused && descriptors() == before && sigismember(&blocked, SIGTERM) == 0);
}

}  // namespace

int main() {
  return tests::run(
      {{"a run ends before what is not plain", a_run_ends_before_what_is_not_plain},
       {"a run ends behind a digest that differs", a_run_ends_behind_a_digest_that_differs},
       {"runs in the thread are those in place, whoever asks meanwhile", runs_in_the_thread_are_those_in_place},
       {"a thread may end with a run under way", a_thread_may_end_with_a_run_under_way},
       {"a thread that cannot be had leaves nothing", without_a_thread_there_is_none}});
}
