// Lane: the transfers of one file. Made with its threads not yet running, started once, fed and asked from any thread,
// stopped once. Its threads share it, so that it lives as long as the last of them: a device that never answers keeps
// its lane.
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kvbm/block_header.hpp"
#include "kvbm/block_io.hpp"
#include "kvbm/flight_shares.hpp"
#include "kvbm/io_ring.hpp"

namespace kvbm {

struct Flight;
struct Transfer;

// A call and its transfers. Lives on the caller's stack until the last of them has ended.
struct Call {
  bool is_write = false;         // else it reads
  std::mutex mutex;              // guards what follows
  std::condition_variable more;  // something was added to `ended`, and nothing is to be added silently any more
  Transfer* ended = nullptr;     // transfers the device is done with, the latest first
  std::size_t silent = 0;        // that may still be added without a word, for who has nothing to do before the last
};

// One block on its way. The caller's until it is queued and again once it is in `ended`; between, its lane's.
struct Transfer {
  Call* call = nullptr;      // whose
  Transfer* next = nullptr;  // in whichever list it is
  // While it is in flight; after a read, while its bytes are still there and not in the row
  Flight* flight = nullptr;
  std::size_t index = 0;        // of the block in its run
  std::int64_t slot = 0;        // of the pool
  std::uint64_t position = 0;   // of the slot in its file
  std::uint8_t* row = nullptr;  // the block's bytes
  std::int32_t error = 0;       // how it ended: 0, or errno; ENODATA: the device gave or took only a part
  std::uint32_t tries = 0;      // times it was begun again
  std::array<std::uint8_t, kBlockHeaderBytes> header{};  // to write, or as read
  std::array<std::uint8_t, kSealBytes> seal{};           // likewise; zeros where there is none
};

// First in, first out.
struct TransferQueue {
  Transfer* first = nullptr;  // the next to go
  Transfer* last = nullptr;   // where others follow

  void push(Transfer* transfer) noexcept;
  Transfer* pop() noexcept;  // nullptr when empty
};

// Room for one transfer at a time: a page for its header, then the block's pages for those that cannot go to the device
// from their row.
struct Flight {
  std::uint8_t* room = nullptr;   // `stride` aligned bytes
  std::array<iovec, 2> pieces{};  // what goes to the kernel
  std::uint32_t piece_count = 0;  // of them
  bool is_bounced = false;        // whether the block's bytes are in `room`
  Transfer* transfer = nullptr;   // what is on its way
};

class Lane : public std::enable_shared_from_this<Lane> {
 public:
  // `ring` is nullptr for a lane of threads. Throws std::system_error: no memory, or no descriptor to wake it by.
  Lane(std::shared_ptr<BlockIoShared> shared, int file, std::unique_ptr<IoRing> ring);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Begins its threads and returns how many. Throws std::system_error: there is none to be had.
  std::uint32_t start();

  // Any thread. Takes possession of a queue of transfers; all of them end, at once if the lane is stopping.
  void enqueue(TransferQueue& transfers, bool is_urgent);
  // Any thread. Takes back the flight of a read whose bytes have been copied out of it.
  void give_back(Flight* flight);

  // Any thread: fails what is queued; threads leave once nothing is in flight.
  void begin_stop();
  // Waits for them until a time, once. False: some are left to themselves.
  bool end_stop(std::chrono::steady_clock::time_point deadline);

  // Any thread: transfers the device has.
  std::uint32_t in_flight();

  // Any thread: ends what was withheld.
  void release_withheld();

 private:
  Transfer* take() noexcept;  // mutex held: the next that may begin, with a flight; nullptr: none
  void prepare(Transfer& transfer) noexcept;
  bool must_begin_again(Transfer& transfer, std::int64_t result) noexcept;
  void end(Transfer& transfer, std::int64_t result) noexcept;
  void finish(Transfer& transfer) noexcept;
  void wake() noexcept;
  void run_ring() noexcept;
  void run_calls() noexcept;

  const std::shared_ptr<BlockIoShared> shared_;  // options and what tests ask for
  const int file_;                               // not owned
  const std::unique_ptr<IoRing> ring_;           // nullptr: threads call preadv and pwritev
  int wake_fd_ = -1;                             // an eventfd the ring waits for too
  std::uint8_t* room_ = nullptr;                 // of all flights; pages that no transfer uses take no memory
  std::size_t room_bytes_ = 0;                   // of it
  std::vector<Flight> flights_;                  // `depth` of them
  std::vector<Transfer*> begun_;                 // ring thread only: scratch, `depth` long

  std::mutex mutex_;                 // guards what follows
  std::condition_variable changed_;  // for threads without a ring: something may begin, or is to stop
  std::condition_variable left_;     // for end_stop: a thread has left
  TransferQueue urgent_;             // reads that wait
  TransferQueue background_;         // writes that wait
  std::vector<Flight*> free_;        // flights nobody uses
  FlightShares shares_;              // what the device has, and may have
  Transfer* withheld_ = nullptr;     // ended, and taken for not ended
  bool is_sleeping_ = false;         // the ring's thread may be waiting, and must be woken
  bool is_stopping_ = false;         // nothing new begins
  std::uint32_t running_ = 0;        // threads that have not left

  std::mutex stop_mutex_;             // one end_stop at a time
  std::vector<std::thread> threads_;  // guarded by it; empty once stopped
  bool was_left_ = false;             // guarded by it: threads are on their own
};

}  // namespace kvbm
