// DeviceRing: runs of an engine's blocks ↔ pinned rows of the host, by way of a small ring of the GPU's own memory.
//
// A run is cut into lots. A lot to the host is packed into the ring by a bounded launch on a stream of the highest
// priority, and the copy engines carry its contiguous bytes to the rows; a lot from the host goes the same way back. A
// launch moves bytes some twenty times as fast as the link, so it is over soon and the engine computes on; but it
// begins only where a multiprocessor is free, which may be when a kernel of the engine's ends. So the ring holds more
// than a link carries meanwhile. Checksums are computed while the next lots are on the link.
//
// Life: made for one pool's tensors, with all memory, streams and events it will ever use: no call allocates any of the
// device's. A run begins, and `advance` carries it on until the device has confirmed its last byte. A destructor that
// comes before that leaves what the device may still write, to nobody; the same where the device is lost. Threads: any,
// one at a time; mark, drop_mark, has_passed_event and reaches at any time.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvbm/cuda_driver.hpp"
#include "kvbm/row_copy.hpp"
#include "kvbm/segment_copy.hpp"

namespace kvbm {

struct RingOptions {
  int device = 0;                        // ordinal
  std::uint64_t ring_bytes = 128 << 20;  // of the GPU's memory
  std::uint64_t lot_bytes = 16 << 20;    // of a lot at most; an eighth of the ring at most
  unsigned programs = 0;                 // of a launch; 0: half as many as the GPU has multiprocessors
};

// What a run waits for, on the device: it begins behind these events, and behind all that is queued on these streams
// now.
struct RunOrder {
  std::span<const CuEvent> events;
  std::span<const CuStream> streams;
};

class DeviceRing {
 public:
  // Throws Error: kLayout, as SegmentTable; std::runtime_error: the device lacks memory, or refuses the kernel.
  DeviceRing(const CudaDriver& driver, std::vector<Segment> segments, std::uint64_t slots, const RingOptions& options);
  ~DeviceRing();
  DeviceRing(const DeviceRing&) = delete;
  DeviceRing& operator=(const DeviceRing&) = delete;

  std::uint64_t slots() const noexcept { return slots_; }
  std::uint64_t block_bytes() const noexcept { return block_bytes_; }
  std::uint64_t ring_bytes() const noexcept { return ring_bytes_; }
  unsigned programs() const noexcept { return programs_; }
  // Whether the device was lost: nothing is copied any more, and nothing that was under way arrives.
  bool is_lost() const noexcept { return is_lost_; }
  // Whether a run has begun that has not ended.
  bool is_under_way() const noexcept { return under_way_; }

  // Waits until the run under way has ended, if there is one, whatever becomes of it; as long as the device takes.
  void settle() noexcept;

  // An event of the ring's own, behind these; to be given back by drop_mark once nobody waits for it anew. So whoever
  // gave an event may record it again. Throws std::runtime_error.
  CuEvent mark(const RunOrder& after);
  void drop_mark(CuEvent mark) noexcept;

  // Whether the device has passed an event of anybody's; false where it does not say.
  bool has_passed_event(CuEvent event) const noexcept;

  // Whether the device reaches all of this memory of the host's: whether it is registered with CUDA, as one piece.
  bool reaches(const void* begin, std::uint64_t bytes) const noexcept;

  // Begins to fill row at[i], or row i where `at` is empty, from slots[i]. What is named stays untouched until the run
  // has ended. checksums: of as many as there are slots, each row's CRC-32C, computed with the copier; or empty. Throws
  // std::runtime_error: one is under way, or the device refuses; nothing has begun then.
  void gather(std::span<const std::int64_t> slots, BlockRows<std::uint8_t> rows, std::span<const std::int64_t> at,
              const RunOrder& after, std::span<std::uint32_t> checksums, RowCopier* copier);

  // Begins to fill slots[i] from row at[i]. As gather.
  void scatter(std::span<const std::int64_t> slots, BlockRows<const std::uint8_t> rows,
               std::span<const std::int64_t> at, const RunOrder& after);

  // Carries the run on; whether it has ended. Throws std::runtime_error: it has ended, and not all of it is there: the
  // device refused a part, and has confirmed the others; or it is lost.
  bool advance(std::chrono::nanoseconds timeout);

 private:
  struct Piece {
    std::uint64_t address;  // of slot 0's bytes
    std::uint64_t stride;   // bytes from one slot's to the next one's
    std::uint64_t offset;   // in a block
    std::uint64_t bytes;    // of it
  };
  struct Place {              // in the bytes of a run
    std::uint64_t block = 0;  // of the run
    std::uint64_t piece = 0;  // of that block
    std::uint64_t byte = 0;   // of the run
  };
  struct Stretches {  // of a lot's rows, without a gap each
    std::vector<CuAddress> targets;
    std::vector<CuAddress> sources;
    std::vector<std::size_t> sizes;
  };
  class Sums;
  struct Part {                 // a place of the ring, for one lot at a time
    CuAddress begin = 0;        // of the ring
    CuEvent is_half = nullptr;  // behind the first of the lot's two steps
    CuEvent is_over = nullptr;  // behind the second
  };

  void open();
  void close() noexcept;
  void begin(std::span<const std::int64_t> slots, std::uint8_t* rows, std::uint64_t row_stride,
             std::span<const std::int64_t> at, const RunOrder& after, bool gathers);
  void wait_for(const RunOrder& after);
  void require_no_capture(std::span<const CuStream> streams) const;
  Place after_lot(const Place& begin) const noexcept;
  void queue_lot();
  void launch(const Part& part, const Place& begin, const Place& end);
  void copy(const Part& part, const Place& begin, const Place& end, CuStream stream);
  void copy_stretches(CuStream stream);
  CuAddress end_of_range(CuAddress at);
  void fail(const char* why) noexcept;
  bool has_passed(CuEvent event);
  bool confirm_rest();
  bool collect();
  // Throws CudaError; where only a loss of the device is one, others pass.
  void check(CuResult result, const char* call, bool only_loss = false);

  const CudaDriver& driver_;            // outlives it
  int device_ = -1;                     // of the driver
  CuContext context_ = nullptr;         // its primary one
  CuModule module_ = nullptr;           // the kernel's
  CuFunction kernel_ = nullptr;         // packs and unpacks
  CuStream kernels_ = nullptr;          // of the highest priority
  std::array<CuStream, 2> copies_{};    // lots in turn: one's calls are prepared while the other's bytes move
  std::array<CuEvent, 3> tails_{};      // behind all that is queued on each stream, where a run fails
  std::array<bool, 3> has_tail_{};      // recorded
  CuEvent engine_ = nullptr;            // behind an engine's stream
  CuAddress ring_ = 0;                  // all parts of it
  CuAddress pieces_at_ = 0;             // `pieces_`, on the device
  CuAddress slots_at_ = 0;              // the run's slots, on the device
  std::int64_t* slots_room_ = nullptr;  // the same, pinned
  std::array<CuStream, 4> behind_{};    // in turn, for marks behind events
  std::size_t next_behind_ = 0;         // whose turn it is
  std::mutex marks_mutex_;              // guards the two before and after this
  std::vector<CuEvent> all_marks_;      // made so far
  std::vector<CuEvent> free_marks_;     // of them, that nobody has
  std::vector<Part> parts_;             // of the ring
  std::unique_ptr<Sums> sums_;          // computes checksums

  std::vector<Piece> pieces_;      // of a block, in order
  std::uint64_t slots_;            // of the pool
  std::uint64_t block_bytes_ = 0;  // of a block
  std::uint64_t ring_bytes_;       // as given
  std::uint64_t lot_bytes_;        // of one lot at most
  unsigned programs_;              // of a launch
  int ordinal_;                    // of the device
  const int process_;              // that made it: a forked child has nothing of it

  // The run under way.
  bool under_way_ = false;                 // there is one
  bool gathers_ = false;                   // to the host
  bool is_lost_ = false;                   // the device is
  std::string why_;                        // it failed; "" while it has not
  std::uint64_t blocks_ = 0;               // of it
  std::uint8_t* rows_ = nullptr;           // row 0
  std::uint64_t row_stride_ = 0;           // from a row to the next
  std::span<const std::int64_t> at_;       // rows of its blocks; empty: in order
  bool has_sums_ = false;                  // its checksums are wanted
  Stretches stretches_;                    // of the lot that is queued
  std::map<CuAddress, CuAddress> ranges_;  // of the rows' memory, as it was registered: begin → end
  Place next_;                             // where the next lot begins
  std::uint64_t lots_ = 0;                 // queued so far
  // Lots that are not confirmed, oldest first: their part, the run's byte behind them
  std::vector<std::pair<std::size_t, std::uint64_t>> flying_;
};

}  // namespace kvbm
