// BlockIo: moves blocks between rows in memory and slots in files, with their headers, and proves what it reads.
//
// Made over open files, asked from any thread any number of times at once, closed once. Each file has a lane: two
// queues, a bounded number of flights, and threads of its own: one that drives an io_uring, or several that call preadv
// and pwritev. A call cuts its run into transfers of one block each, queues them on their lanes, and checks every block
// as it comes back, in the calling thread, while the device works on the others; it returns when all have ended. Lanes
// outlive this object where the device still has a transfer when `close` gives up: neither their memory nor the rows of
// the call, which stays, may then go. After fork() the child has none of their threads: it may only drop this object,
// and what it has stays.
//
// Reads are urgent, writes are background: see FlightShares for who goes first.
//
// A file is laid out as kvbm/pools/nvme/block_io.py says. With `is_direct`, rows at aligned addresses with whole pages
// go to and from the device as they are, others through the flight's own aligned room.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <unistd.h>

#include "kvbm/block_header.hpp"

namespace kvbm {

inline constexpr std::size_t kPageBytes = 4096;  // what direct transfers are aligned to; the header's own page

enum class IoKind : std::uint8_t { kAuto, kIoUring, kThreads };

// What became of one block's read; numbered as ReadOutcome in kvbm/pools/base.py.
enum class BlockOutcome : std::uint8_t { kGood = 0, kCorrupt = 2, kFailed = 3 };

// What a slot's header is.
enum class SlotOutcome : std::uint8_t {
  kNothing = 0,  // none, or not whole
  kBlock = 1,    // that of a block
  kFailed = 2,   // it cannot be read
};

struct BlockIoOptions {
  std::vector<int> files;       // open files or devices; they stay the caller's
  std::size_t block_bytes = 0;  // of one block, at least 1
  IoKind kind = IoKind::kAuto;  // kAuto: io_uring where the kernel lets us, else threads
  bool is_direct = false;       // whether the files are open with O_DIRECT
  std::uint32_t depth = 32;     // transfers in flight for each file, at least 1
  double offload_share = 0.25;  // of depth, what writes may use while there are reads
  bool is_verified = true;      // false: reads are not checked, for a measurement of what checking costs
};

// The blocks of a call: block i is row at[i] and slot slots[i].
struct BlockRun {
  std::span<const std::int64_t> slots;             // where they lie
  std::span<const std::int64_t> at;                // their rows
  std::span<const std::uint8_t, 16> namespace_id;  // whose they are
  const std::uint8_t* hashes = nullptr;            // 16 bytes each
  // kSealBytes each, to write or to fill; nullptr: the blocks are not sealed.
  std::uint8_t* seals = nullptr;
  // Who opens a seal holds the bytes to it: their checksum is not
  // looked at
};

class Lane;

// What lanes and calls share.
struct BlockIoShared {
  BlockIoOptions options;                       // as given
  std::size_t stride = 0;                       // from one slot to the next
  std::atomic<std::int64_t> withheld_slot{-1};  // see BlockIo::withhold
  std::atomic<std::uint64_t> bounced{0};        // transfers that were copied on their way
};

struct BlockIoCounts {
  std::uint64_t read = 0;       // blocks that were asked for
  std::uint64_t corrupt = 0;    // of them
  std::uint64_t failed = 0;     // of them
  std::uint64_t written = 0;    // blocks that arrived
  std::uint64_t refused = 0;    // blocks whose write did not
  std::uint64_t bounced = 0;    // transfers that were copied on their way
  std::uint32_t in_flight = 0;  // transfers the device has now
};

class BlockIo {
 public:
  // Throws std::system_error: io_uring was asked for by name and the kernel refuses it, or there is no thread to be
  // had.
  explicit BlockIo(BlockIoOptions options);
  ~BlockIo();
  BlockIo(const BlockIo&) = delete;
  BlockIo& operator=(const BlockIo&) = delete;

  // Any thread. Fills rows, and one outcome and one checksum for each block. Once closed everything has failed.
  void read(const BlockRun& run, std::uint8_t* rows, std::span<BlockOutcome> outcomes,
            std::span<std::uint32_t> checksums);

  // Any thread. Puts rows into slots; errors[i] is 0, or the errno that kept block i away (ENODATA: the device took
  // only a part). generation: see BlockProof.
  void write(const BlockRun& run, const std::uint8_t* rows, std::uint64_t epoch,
             std::span<const std::uint32_t> checksums, std::span<std::int32_t> errors, std::uint32_t generation = 0);

  // Any thread. Reads the headers of slots and nothing else, `depth` at a time of each file, in the calling thread and
  // beside the lanes: they neither wait for it nor hold it up. Who closes the files waits for it.
  void scan(std::span<const std::int64_t> slots, std::uint32_t depth, std::span<SlotOutcome> outcomes,
            std::span<FoundBlock> found) const;

  // Any thread. Fails what has not begun and waits for what the device has. False: it still has something after this
  // time, and the lanes concerned are left to themselves; the files must stay open then. Idempotent.
  bool close(std::chrono::milliseconds timeout);

  bool uses_io_uring() const noexcept { return uses_io_uring_; }
  // errno of why io_uring was wanted and is not used; 0 when it is, or was not wanted.
  int refusal() const noexcept { return refusal_; }
  std::uint32_t threads() const noexcept { return threads_; }
  BlockIoCounts counts() const;

  // For tests: transfers of this slot that end from now on are taken for not ended; -1 lets them go.
  void withhold(std::int64_t slot);

 private:
  const pid_t process_ = getpid();            // whose threads its lanes have
  std::shared_ptr<BlockIoShared> shared_;     // also of lanes that outlive this
  std::vector<std::shared_ptr<Lane>> lanes_;  // one for each file
  bool uses_io_uring_ = false;                // else threads
  int refusal_ = 0;                           // why not
  std::uint32_t threads_ = 0;                 // that lanes began with
  std::atomic<std::uint64_t> read_{0};        // as in BlockIoCounts
  std::atomic<std::uint64_t> corrupt_{0};
  std::atomic<std::uint64_t> failed_{0};
  std::atomic<std::uint64_t> written_{0};
  std::atomic<std::uint64_t> refused_{0};
};

}  // namespace kvbm
