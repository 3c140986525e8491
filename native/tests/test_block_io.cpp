// BlockIo over real files, with io_uring where the kernel has it and with threads, past the page cache and through it.
#include "kvbm/block_io.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "check.hpp"
#include "kvbm/block_header.hpp"
#include "kvbm/block_lane.hpp"
#include "kvbm/checksum.hpp"
#include "kvbm/flight_shares.hpp"
#include "no_threads.hpp"

namespace {

using namespace kvbm;
using namespace kvbm::tests;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kWait(60);

// A file that is gone when its descriptor is.
class File {
 public:
  explicit File(bool is_direct) {
    char name[] = "./test_block_io.XXXXXX";
    fd_ = mkstemp(name);
    CHECK(fd_ >= 0);
    unlink(name);
    if (is_direct) {
      // Where the file system refuses, alignment is only not needed
      fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_DIRECT);
    }
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;  // of the file
};

// A run of random blocks in memory that is aligned, or off by a little.
struct Blocks {
  Blocks(std::size_t count, std::size_t block_bytes, std::uint64_t seed, std::size_t off = 0) : bytes(block_bytes) {
    Random random(seed);
    memory = static_cast<std::uint8_t*>(
        std::aligned_alloc(kPageBytes, (count * block_bytes + off + 2 * kPageBytes - 1) / kPageBytes * kPageBytes));
    rows = memory + off;
    const std::vector<std::uint8_t> data = random.bytes(count * block_bytes);
    std::memcpy(rows, data.data(), data.size());
    hashes = random.bytes(16 * count);
    sums.resize(count);
    crc32c_rows(rows, block_bytes, sums);
    slots.resize(count);
    std::iota(slots.begin(), slots.end(), 0);
    at = slots;
  }
  ~Blocks() { std::free(memory); }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  BlockRun run() const { return {slots, at, std::span<const std::uint8_t, 16>(name), hashes.data(), nullptr}; }
  bool write(BlockIo& io) const {
    std::vector<std::int32_t> errors(slots.size(), -1);
    io.write(run(), rows, 7, sums, errors);
    return std::ranges::all_of(errors, [](std::int32_t error) { return error == 0; });
  }
  // Outcomes of reading it into other memory; blocks that are GOOD must be its own.
  std::vector<BlockOutcome> read(BlockIo& io, std::size_t off = 0) const {
    const Blocks room(slots.size(), bytes, 99, off);
    std::vector<BlockOutcome> outcomes(slots.size());
    std::vector<std::uint32_t> read_sums(slots.size());
    io.read(run(), room.rows, outcomes, read_sums);
    for (std::size_t index = 0; index < slots.size(); ++index) {
      if (outcomes[index] == BlockOutcome::kGood) {
        CHECK(std::memcmp(room.rows + index * bytes, rows + index * bytes, bytes) == 0);
        CHECK(read_sums[index] == sums[index]);
      }
    }
    return outcomes;
  }
  std::size_t good(BlockIo& io, std::size_t off = 0) const {
    const std::vector<BlockOutcome> outcomes = read(io, off);
    return static_cast<std::size_t>(std::ranges::count(outcomes, BlockOutcome::kGood));
  }

  std::size_t bytes;                           // of a block
  std::uint8_t* memory;                        // that is freed
  std::uint8_t* rows;                          // in it
  std::array<std::uint8_t, 16> name{1, 2, 3};  // namespace
  std::vector<std::uint8_t> hashes;            // 16 bytes each
  std::vector<std::uint32_t> sums;             // CRC-32C
  std::vector<std::int64_t> slots;             // where they go
  std::vector<std::int64_t> at;                // their rows
};

bool has_io_uring() {
  static const bool has = [] {
    const File file(false);
    try {
      const BlockIo io({{file.fd()}, 4096, IoKind::kIoUring, false, 4});
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }();
  return has;
}

// Calls a test with each engine, and with files open in each way.
template <class Body>
void in_each_way(Body&& body) {
  for (const IoKind kind : {IoKind::kIoUring, IoKind::kThreads}) {
    if (kind == IoKind::kIoUring && !has_io_uring()) {
      continue;
    }
    for (const bool is_direct : {false, true}) {
      body(kind, is_direct);
    }
  }
}

void test_blocks_come_back() {
  in_each_way([](IoKind kind, bool is_direct) {
    for (const std::size_t block_bytes :
         {std::size_t{1}, std::size_t{6000}, std::size_t{4096}, std::size_t{64 * 1024}}) {
      const File first(is_direct);
      const File second(is_direct);
      BlockIo io({{first.fd(), second.fd()}, block_bytes, kind, is_direct, 4});
      CHECK(io.uses_io_uring() == (kind == IoKind::kIoUring));
      for (const std::size_t off : {std::size_t{0}, std::size_t{8}}) {
        const Blocks blocks(37, block_bytes, off, off);
        CHECK(blocks.write(io));
        CHECK(blocks.good(io) == 37);
        CHECK(blocks.good(io, 16) == 37);
      }
      const BlockIoCounts counts = io.counts();
      CHECK(counts.written == 74 && counts.read == 148 && counts.corrupt == 0 && counts.failed == 0 &&
            counts.in_flight == 0);
      CHECK((counts.bounced == 0) == !is_direct);
      CHECK(io.close(kWait));
    }
  });
}

void test_other_bytes_are_corrupt() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    BlockIo io({{file.fd()}, 4096, kind, is_direct, 4});
    Blocks blocks(8, 4096, 1);
    CHECK(blocks.write(io));
    blocks.hashes[16 * 2] ^= 1;
    std::vector<BlockOutcome> outcomes = blocks.read(io);
    CHECK(outcomes[2] == BlockOutcome::kCorrupt);
    CHECK(std::ranges::count(outcomes, BlockOutcome::kGood) == 7);
    blocks.name[0] ^= 1;
    CHECK(blocks.good(io) == 0);
    blocks.name[0] ^= 1;
    blocks.hashes[16 * 2] ^= 1;
    std::swap(blocks.slots[0], blocks.slots[1]);
    CHECK(blocks.good(io) == 6);
    std::swap(blocks.slots[0], blocks.slots[1]);
    blocks.sums[3] ^= 1;  // a checksum that never fitted
    CHECK(blocks.write(io));
    blocks.sums[3] ^= 1;
    CHECK(blocks.good(io) == 7);
    for (std::int64_t& slot : blocks.slots) {
      slot += 1000;  // beyond the end of the file
    }
    outcomes = blocks.read(io);
    CHECK(std::ranges::count(outcomes, BlockOutcome::kCorrupt) == 8);
    CHECK(io.counts().failed == 0);
    CHECK(io.close(kWait));
  });
}

void test_a_page_with_more_than_its_header_proves_nothing() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    BlockIo io({{file.fd()}, 4096, kind, is_direct, 4});
    const Blocks blocks(1, 4096, 1);
    const int direct = fcntl(file.fd(), F_GETFL);
    for (const std::size_t at :
         {kBlockHeaderBytes, kBlockHeaderBytes + kSealBytes, kBlockHeaderBytes + kSealBytes + 1, kPageBytes - 1}) {
      CHECK(blocks.write(io));
      CHECK(blocks.good(io) == 1);
      fcntl(file.fd(), F_SETFL, direct & ~O_DIRECT);
      const std::uint8_t more = 1;
      CHECK(pwrite(file.fd(), &more, 1, static_cast<off_t>(kPageBytes + at)) == 1);
      fcntl(file.fd(), F_SETFL, direct);
      CHECK(blocks.read(io)[0] == BlockOutcome::kCorrupt);
    }
    CHECK(io.close(kWait));
  });
}

void test_refusals_are_told() {
  in_each_way([](IoKind kind, bool) {
    const int fd = open("/dev/null", O_RDONLY);
    BlockIo io({{fd}, 4096, kind, false, 4});
    const Blocks blocks(5, 4096, 1);
    std::vector<std::int32_t> errors(5);
    io.write(blocks.run(), blocks.rows, 1, blocks.sums, errors);
    CHECK(std::ranges::count(errors, EBADF) == 5);
    CHECK(io.counts().refused == 5);
    CHECK(io.close(kWait));
    CHECK(io.close(kWait));
    CHECK(std::ranges::count(blocks.read(io), BlockOutcome::kFailed) == 5);
    io.write(blocks.run(), blocks.rows, 1, blocks.sums, errors);
    CHECK(std::ranges::count(errors, ECANCELED) == 5);
    close(fd);
  });
}

// While it exists no file of this process grows beyond a size: a write across it is cut short there.
class MostFileBytes {
 public:
  explicit MostFileBytes(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    CHECK(getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit most{bytes, before_.rlim_max};
    CHECK(setrlimit(RLIMIT_FSIZE, &most) == 0);
  }
  ~MostFileBytes() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  MostFileBytes(const MostFileBytes&) = delete;
  MostFileBytes& operator=(const MostFileBytes&) = delete;

 private:
  void (*handler_)(int);  // what it was
  rlimit before_;         // of this process
};

void test_a_write_cut_short_is_told() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    const Blocks blocks(4, 4 * kPageBytes, 1);  // five pages each with its header
    {
      // The limit is that of the process when the engine opens, also for the kernel's own threads: it lies within the
      // third slot.
      const MostFileBytes most(kPageBytes + (2 * 5 + 3) * kPageBytes);
      BlockIo io({{file.fd()}, 4 * kPageBytes, kind, is_direct, 4});
      std::vector<std::int32_t> errors(4, -1);
      io.write(blocks.run(), blocks.rows, 7, blocks.sums, errors);
      CHECK(errors[0] == 0 && errors[1] == 0);
      CHECK(errors[2] == ENODATA);  // a part was taken
      CHECK(errors[3] == EFBIG);    // nothing was
      CHECK(io.counts().written == 2 && io.counts().refused == 2);
      CHECK(io.close(kWait));
    }
    struct stat found{};
    CHECK(fstat(file.fd(), &found) == 0 && found.st_size == static_cast<off_t>(kPageBytes + 13 * kPageBytes));
    BlockIo io({{file.fd()}, 4 * kPageBytes, kind, is_direct, 4});
    const std::vector<BlockOutcome> outcomes = blocks.read(io);
    CHECK(outcomes[0] == BlockOutcome::kGood && outcomes[1] == BlockOutcome::kGood);
    CHECK(outcomes[2] == BlockOutcome::kCorrupt && outcomes[3] == BlockOutcome::kCorrupt);
    CHECK(io.close(kWait));
  });
}

void test_what_pads_a_block_is_zeros() {
  // What pads another slot, from before it was ours, comes into memory with a read and must not go out with a write.
  in_each_way([](IoKind kind, bool is_direct) {
    if (!is_direct) {
      return;  // without direct transfers nothing pads: the device gets a block's own bytes alone
    }
    constexpr std::size_t kBlockBytes = 5000;
    constexpr std::size_t kSlotBytes = 3 * kPageBytes;
    const File file(is_direct);
    Blocks blocks(1, kBlockBytes, 1);
    const std::vector<std::uint8_t> others(kSlotBytes, 0xAA);
    const int plain = fcntl(file.fd(), F_GETFL) & ~O_DIRECT;
    BlockIo io({{file.fd()}, kBlockBytes, kind, is_direct, 1});  // one flight, so one room
    CHECK(blocks.write(io));
    fcntl(file.fd(), F_SETFL, plain);
    const off_t padding = static_cast<off_t>(kPageBytes + kPageBytes + kBlockBytes);
    const std::size_t padding_bytes = kSlotBytes - kPageBytes - kBlockBytes;
    CHECK(pwrite(file.fd(), others.data(), padding_bytes, padding) == static_cast<ssize_t>(padding_bytes));
    CHECK(pwrite(file.fd(), others.data(), kSlotBytes, padding + static_cast<off_t>(padding_bytes)) ==
          static_cast<ssize_t>(kSlotBytes));
    CHECK(blocks.good(io) == 1);
    blocks.slots[0] = 1;
    CHECK(blocks.write(io));
    std::vector<std::uint8_t> found(kSlotBytes);
    CHECK(pread(file.fd(), found.data(), kSlotBytes, static_cast<off_t>(kPageBytes + kSlotBytes)) ==
          static_cast<ssize_t>(kSlotBytes));
    const auto is_zero = [](std::uint8_t byte) { return byte == 0; };
    CHECK(std::all_of(found.begin() + kBlockHeaderBytes, found.begin() + kPageBytes, is_zero));
    CHECK(std::memcmp(found.data() + kPageBytes, blocks.rows, kBlockBytes) == 0);
    CHECK(std::all_of(found.begin() + kPageBytes + kBlockBytes, found.end(), is_zero));
    CHECK(io.close(kWait));
  });
}

void test_many_callers() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    BlockIo io({{file.fd()}, 4096, kind, is_direct, 6});
    std::vector<std::thread> callers;
    for (std::int64_t caller = 0; caller < 6; ++caller) {
      callers.emplace_back([&io, caller] {
        for (std::uint64_t turn = 0; turn < 15; ++turn) {
          Blocks blocks(10, 4096, 100 * static_cast<std::uint64_t>(caller) + turn, caller % 2 == 0 ? 0 : 64);
          for (std::int64_t& slot : blocks.slots) {
            slot += 10 * caller;
          }
          CHECK(blocks.write(io));
          CHECK(blocks.good(io, turn % 2 == 0 ? 0 : 24) == 10);
        }
      });
    }
    for (std::thread& caller : callers) {
      caller.join();
    }
    CHECK(io.close(kWait));
  });
}

void test_close_amid_calls() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    BlockIo io({{file.fd()}, 4096, kind, is_direct, 4});
    const Blocks blocks(16, 4096, 1);
    CHECK(blocks.write(io));
    std::atomic<int> turns{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&] {
        while (blocks.good(io) == 16) {
          ++turns;
        }
      });
    }
    while (turns < 20) {
      std::this_thread::yield();
    }
    CHECK(io.close(kWait));
    for (std::thread& caller : callers) {
      caller.join();
    }
  });
}

void test_a_device_that_never_answers() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    auto io = std::make_unique<BlockIo>(BlockIoOptions{{file.fd()}, 4096, kind, is_direct, 4});
    const Blocks blocks(1, 4096, 1);
    CHECK(blocks.write(*io));
    io->withhold(0);
    std::atomic<bool> has_ended{false};
    std::size_t good = 0;
    std::thread caller([&] {
      good = blocks.good(*io);
      has_ended = true;
    });
    while (io->counts().in_flight != 1) {
      std::this_thread::yield();
    }
    CHECK(!io->close(milliseconds(20)));
    CHECK(!io->close(milliseconds(20)));
    CHECK(!has_ended);
    io->withhold(-1);
    caller.join();
    CHECK(good == 1);
    io.reset();  // its lanes go with their last thread
  });
}

void test_header_is_held_to_every_bit() {
  Random random(3);
  const std::vector<std::uint8_t> name = random.bytes(16);
  const std::vector<std::uint8_t> hash = random.bytes(16);
  const std::span<const std::uint8_t, 16> named(name.data(), 16);
  const std::span<const std::uint8_t, 16> hashed(hash.data(), 16);
  std::array<std::uint8_t, kBlockHeaderBytes> header;
  encode_block_header({named, hashed, 12, 4096, 77, false, 5}, header);
  std::uint32_t sum = 0;
  CHECK(is_header_of(header, named, hashed, 4096, false, sum) && sum == 77);
  CHECK(!is_header_of(header, named, hashed, 4095, false, sum));
  CHECK(!is_header_of(header, hashed, hashed, 4096, false, sum));
  CHECK(!is_header_of(header, named, named, 4096, false, sum));
  for (std::size_t bit = 0; bit < 8 * kBlockHeaderBytes; ++bit) {
    header[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    CHECK(!is_header_of(header, named, hashed, 4096, false, sum));
    header[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
  }
  CHECK(!is_header_of(header, named, hashed, 4096, true, sum));
  encode_block_header({named, hashed, 12, 4096, 0, true, 0}, header);
  CHECK(is_header_of(header, named, hashed, 4096, true, sum) && !is_header_of(header, named, hashed, 4096, false, sum));
}

void test_a_scan_tells_what_headers_say() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    BlockIo io({{file.fd()}, 4096, kind, is_direct, 4});
    const Blocks blocks(6, 4096, 1);
    const std::vector<std::uint32_t> sums(6, 0);
    std::vector<std::int32_t> errors(6, -1);
    io.write(blocks.run(), blocks.rows, 7, sums, errors, 0xfedcba98);
    std::vector<std::int64_t> slots(40);  // those behind the file's end too
    std::iota(slots.begin(), slots.end(), std::int64_t{0});
    for (const std::uint32_t depth : {1U, 3U, 64U}) {
      std::vector<SlotOutcome> outcomes(slots.size(), SlotOutcome::kFailed);
      std::vector<FoundBlock> found(slots.size());
      io.scan(slots, depth, outcomes, found);
      CHECK(std::ranges::count(outcomes, SlotOutcome::kBlock) == 6 &&
            std::ranges::count(outcomes, SlotOutcome::kNothing) == 34);
      const BlockRun run = blocks.run();
      for (std::size_t at = 0; at < run.slots.size(); ++at) {
        const FoundBlock& one = found[static_cast<std::size_t>(run.slots[at])];
        CHECK(one.epoch == 7 && one.generation == 0xfedcba98 && !one.is_sealed);
        CHECK(std::equal(one.hash.begin(), one.hash.end(), run.hashes + 16 * at));
        CHECK(std::ranges::equal(one.namespace_id, run.namespace_id));
      }
    }
    CHECK(io.close(kWait));
  });
}

void test_a_scan_needs_no_thread() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File first(is_direct);
    const File second(is_direct);
    BlockIo io({{first.fd(), second.fd()}, 4096, kind, is_direct, 4});
    const Blocks blocks(6, 4096, 1);
    std::vector<std::int32_t> errors(6, -1);
    io.write(blocks.run(), blocks.rows, 7, std::vector<std::uint32_t>(6), errors);
    std::vector<std::int64_t> slots(40);
    std::iota(slots.begin(), slots.end(), std::int64_t{0});
    for (const int most : {0, 1, 2, 5}) {
      std::vector<SlotOutcome> outcomes(slots.size(), SlotOutcome::kFailed);
      std::vector<FoundBlock> found(slots.size());
      may_begin = most;
      io.scan(slots, 8, outcomes, found);
      may_begin = -1;
      CHECK(std::ranges::count(outcomes, SlotOutcome::kBlock) == 6 &&
            std::ranges::count(outcomes, SlotOutcome::kNothing) == 34);
    }
    CHECK(io.close(kWait));
  });
}

void test_sealed_blocks_are_others_than_plain_ones() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    BlockIo io({{file.fd()}, 4096, kind, is_direct, 4});
    const Blocks blocks(6, 4096, 1);
    std::vector<std::uint8_t> seals(6 * kSealBytes);
    std::iota(seals.begin(), seals.end(), std::uint8_t{1});
    BlockRun sealed = blocks.run();
    sealed.seals = seals.data();
    std::vector<std::int32_t> errors(6, -1);
    const std::vector<std::uint32_t> no_sums(6, 0);  // a seal proves its block by itself
    io.write(sealed, blocks.rows, 7, no_sums, errors);
    CHECK(std::ranges::all_of(errors, [](std::int32_t error) { return error == 0; }));
    CHECK(blocks.good(io) == 0);
    const Blocks room(6, 4096, 99);
    std::vector<std::uint8_t> found(6 * kSealBytes);
    BlockRun back = blocks.run();
    back.seals = found.data();
    std::vector<BlockOutcome> outcomes(6, BlockOutcome::kFailed);
    std::vector<std::uint32_t> sums(6);
    io.read(back, room.rows, outcomes, sums);
    CHECK(std::ranges::count(outcomes, BlockOutcome::kGood) == 6 && found == seals);
    CHECK(std::memcmp(room.rows, blocks.rows, 6 * 4096) == 0);
    CHECK(blocks.write(io) && blocks.good(io) == 6);  // plain ones in the same slots: no seal is left there
    io.read(back, room.rows, outcomes, sums);
    CHECK(std::ranges::count(outcomes, BlockOutcome::kCorrupt) == 6);
    CHECK(io.close(kWait));
  });
}

std::uint32_t begun_writes(FlightShares& shares, FlightShares::Time now) {
  std::uint32_t count = 0;
  while (shares.may_write(now)) {
    shares.begin_write();
    ++count;
  }
  return count;
}

void test_writes_make_way_for_reads() {
  const FlightShares::Time now{seconds(1000)};
  FlightShares alone(32, 0.25, 4096);
  CHECK(begun_writes(alone, now) == 24);  // a read that comes finds room
  FlightShares busy(32, 0.25, 4096);
  busy.begin_read();
  CHECK(begun_writes(busy, now) == 8);
  busy.end_read(now);
  CHECK(begun_writes(busy, now + FlightShares::kQuiet / 2) == 0);
  CHECK(begun_writes(busy, now + 2 * FlightShares::kQuiet) == 16);
  CHECK(busy.in_flight() == 24);
  busy.end_write();
  CHECK(busy.in_flight() == 23);
  FlightShares least(1, 0.01, 4096);
  least.begin_read();
  CHECK(begun_writes(least, now) == 1);
  FlightShares all(8, 1.0, 4096);
  all.begin_read();
  CHECK(begun_writes(all, now) == 6);  // no more than without reads
}

void test_a_read_meets_few_bytes_of_writes() {
  const FlightShares::Time now{seconds(1000)};
  for (const std::size_t block_bytes :
       {std::size_t{64} << 10, std::size_t{512} << 10, std::size_t{1} << 20, std::size_t{4} << 20}) {
    FlightShares alone(128, 1.0, block_bytes);
    CHECK(begun_writes(alone, now) == std::min<std::size_t>(96, FlightShares::kIdleBytes / block_bytes));
    FlightShares busy(128, 1.0, block_bytes);
    busy.begin_read();
    CHECK(begun_writes(busy, now) == std::max<std::size_t>(1, FlightShares::kBusyBytes / block_bytes));
    busy.end_read(now);  // no read for a while: all of them may go again
    CHECK(begun_writes(busy, now + 2 * FlightShares::kQuiet) > 0);
    CHECK(busy.in_flight() == alone.in_flight());
  }
  FlightShares huge(32, 0.25, std::size_t{1} << 30);
  CHECK(begun_writes(huge, now) == 1);
}

void test_reads_leave_writes_a_flight() {
  FlightShares shares(4, 0.25, 4096);
  CHECK(!shares.must_write(4) && !shares.must_write(2) && shares.must_write(1));
  shares.begin_write();
  CHECK(!shares.must_write(1));  // one is under way
  shares.end_write();
  CHECK(shares.must_write(1));
  CHECK(!FlightShares(1, 0.25, 4096).must_write(1));
}

// Waits until a call has got something back and returns how many; 0: it was too long.
std::size_t ended(Call& call) {
  std::unique_lock lock(call.mutex);
  call.more.wait_for(lock, kWait, [&call] { return call.ended != nullptr; });
  std::size_t count = 0;
  for (const Transfer* transfer = std::exchange(call.ended, nullptr); transfer != nullptr; transfer = transfer->next) {
    ++count;
  }
  return count;
}

// More reads than flights, of a slot that never ends: the write that waits behind them has its flight all the same.
void test_writes_go_on_amid_reads_without_end() {
  in_each_way([](IoKind kind, bool is_direct) {
    const File file(is_direct);
    const auto shared = std::make_shared<BlockIoShared>();
    shared->options = {{file.fd()}, 4096, kind, is_direct, 2};
    shared->stride = 2 * kPageBytes;
    shared->withheld_slot = 0;
    int error = 0;
    const auto lane = std::make_shared<Lane>(
        shared, file.fd(), kind == IoKind::kIoUring ? IoRing::open(file.fd(), 3, error) : std::unique_ptr<IoRing>());
    const Blocks rows(9, 4096, 1);
    Call calls[2];  // reads, and a write
    calls[1].is_write = true;
    std::vector<Transfer> transfers(9);
    TransferQueue queues[2];
    for (std::size_t index = 0; index < transfers.size(); ++index) {
      Transfer& transfer = transfers[index];
      const std::size_t which = index == 8 ? 1 : 0;
      transfer.call = &calls[which];
      transfer.slot = static_cast<std::int64_t>(which);
      transfer.position = kPageBytes + which * shared->stride;
      transfer.row = rows.rows + index * 4096;
      queues[which].push(&transfer);
    }
    lane->enqueue(queues[0], true);
    lane->enqueue(queues[1], false);
    lane->start();
    CHECK(ended(calls[1]) == 1);
    shared->withheld_slot = -1;
    lane->release_withheld();
    for (std::size_t count = 0; count < 8;) {
      const std::size_t more = ended(calls[0]);
      CHECK(more > 0);
      count += more;
    }
    lane->begin_stop();
    CHECK(lane->end_stop(std::chrono::steady_clock::now() + kWait));
  });
}

}  // namespace

int main() {
  return run({
      {"blocks come back from any memory to any memory, by every engine", test_blocks_come_back},
      {"other bytes, another hash, another namespace and no bytes are corrupt", test_other_bytes_are_corrupt},
      {"a page with more than its header proves nothing", test_a_page_with_more_than_its_header_proves_nothing},
      {"what the device or a closed engine refuses is told for each block", test_refusals_are_told},
      {"a write that is cut short is told for its block", test_a_write_cut_short_is_told},
      {"what pads a block is zeros, whatever lay there", test_what_pads_a_block_is_zeros},
      {"callers do not disturb each other", test_many_callers},
      {"a close amid calls ends them all", test_close_amid_calls},
      {"a device that never answers keeps its call, and nothing else", test_a_device_that_never_answers},
      {"a header is held to every bit", test_header_is_held_to_every_bit},
      {"a scan tells what headers say", test_a_scan_tells_what_headers_say},
      {"a scan needs no thread", test_a_scan_needs_no_thread},
      {"sealed blocks are others than plain ones", test_sealed_blocks_are_others_than_plain_ones},
      {"writes make way for reads and still go on", test_writes_make_way_for_reads},
      {"a read meets few bytes of writes, whatever the size of blocks", test_a_read_meets_few_bytes_of_writes},
      {"reads leave a flight to a write that waits", test_reads_leave_writes_a_flight},
      {"reads that never end leave a write its flight", test_writes_go_on_amid_reads_without_end},
  });
}
