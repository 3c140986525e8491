#include "kvbm/block_io.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "kvbm/block_header.hpp"
#include "kvbm/block_lane.hpp"
#include "kvbm/checksum.hpp"
#include "kvbm/header_scan.hpp"

namespace kvbm {
namespace {

std::size_t whole_pages(std::size_t bytes) noexcept { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

std::span<const std::uint8_t, 16> hash_at(const BlockRun& run, std::size_t index) noexcept {
  return std::span<const std::uint8_t, 16>(run.hashes + 16 * index, 16);
}

// Queues a run's blocks and gives each to `settle` in the calling thread until all have come back: those of reads,
// which are to be checked, as they come; those of writes together, since waking this thread for each takes time from
// who drives the device.
template <class Prepare, class Settle>
void run_blocks(const BlockRun& run, std::uint8_t* rows, bool is_write, const BlockIoShared& shared,
                const std::vector<std::shared_ptr<Lane>>& lanes, Prepare&& prepare, Settle&& settle) {
  const std::size_t count = run.slots.size();
  std::vector<Transfer> transfers(count);
  std::vector<TransferQueue> queues(lanes.size());
  Call call;
  call.is_write = is_write;
  call.silent = is_write && count > 0 ? count - 1 : 0;
  for (std::size_t index = 0; index < count; ++index) {
    Transfer& transfer = transfers[index];
    const auto slot = static_cast<std::uint64_t>(run.slots[index]);
    transfer.call = &call;
    transfer.index = index;
    transfer.slot = run.slots[index];
    transfer.position = kPageBytes + slot / lanes.size() * shared.stride;
    transfer.row = rows + static_cast<std::size_t>(run.at[index]) * shared.options.block_bytes;
    prepare(transfer);
    queues[slot % lanes.size()].push(&transfer);
  }
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    lanes[lane]->enqueue(queues[lane], !is_write);
  }
  for (std::size_t left = count; left > 0;) {
    Transfer* ended = nullptr;
    {
      std::unique_lock lock(call.mutex);
      call.more.wait(lock, [&call] { return call.ended != nullptr && call.silent == 0; });
      ended = std::exchange(call.ended, nullptr);
    }
    for (; ended != nullptr; --left) {
      Transfer& transfer = *ended;
      ended = ended->next;
      settle(transfer, *lanes[static_cast<std::uint64_t>(transfer.slot) % lanes.size()]);
    }
  }
}

// Whether a block lies as its run wants it: with a seal, which is handed on, or without.
bool takes_seal(const BlockRun& run, const Transfer& transfer) noexcept {
  if (run.seals == nullptr) {
    return std::ranges::all_of(transfer.seal, [](std::uint8_t byte) { return byte == 0; });
  }
  std::memcpy(run.seals + kSealBytes * transfer.index, transfer.seal.data(), kSealBytes);
  return true;
}

}  // namespace

BlockIo::BlockIo(BlockIoOptions options) : shared_(std::make_shared<BlockIoShared>()) {
  shared_->stride = kPageBytes + whole_pages(options.block_bytes);
  shared_->options = std::move(options);
  const BlockIoOptions& given = shared_->options;
  try {
    for (const int file : given.files) {
      std::unique_ptr<IoRing> ring;
      if (given.kind != IoKind::kThreads && refusal_ == 0) {
        ring = IoRing::open(file, given.depth + 1, refusal_);  // one more: what wakes it
        if (!ring && given.kind == IoKind::kIoUring) {
          throw std::system_error(refusal_, std::generic_category(), "io_uring_setup");
        }
      }
      uses_io_uring_ = uses_io_uring_ || ring != nullptr;
      lanes_.push_back(std::make_shared<Lane>(shared_, file, std::move(ring)));
    }
    for (const std::shared_ptr<Lane>& lane : lanes_) {
      threads_ += lane->start();
    }
  } catch (...) {
    close(std::chrono::seconds(10));  // nothing is in flight: threads that have begun leave at once
    throw;
  }
}

BlockIo::~BlockIo() {
  if (process_ != getpid()) {
    // After fork(): their threads are the parent's, and their locks may be held for good
    new std::vector(std::move(lanes_));
    return;
  }
  close(std::chrono::seconds(1));
}

void BlockIo::read(const BlockRun& run, std::uint8_t* rows, std::span<BlockOutcome> outcomes,
                   std::span<std::uint32_t> checksums) {
  const std::size_t block_bytes = shared_->options.block_bytes;
  const bool is_verified = shared_->options.is_verified;
  std::uint64_t corrupt = 0;
  std::uint64_t failed = 0;
  run_blocks(
      run, rows, false, *shared_, lanes_, [](Transfer&) {},
      [&](Transfer& transfer, Lane& lane) {
        const std::size_t index = transfer.index;
        BlockOutcome outcome = BlockOutcome::kGood;
        checksums[index] = 0;
        if (transfer.error == 0) {
          if (transfer.flight != nullptr) {
            std::memcpy(transfer.row, transfer.flight->room + kPageBytes, block_bytes);
            lane.give_back(transfer.flight);
          }
          std::uint32_t wanted = 0;
          const bool is_ours = is_header_of(transfer.header, run.namespace_id, hash_at(run, index),
                                            static_cast<std::uint32_t>(block_bytes), run.seals != nullptr, wanted) &&
                               takes_seal(run, transfer);
          // A seal proves more
          checksums[index] = is_verified && run.seals == nullptr ? crc32c({transfer.row, block_bytes}) : wanted;
          outcome = is_ours && checksums[index] == wanted ? BlockOutcome::kGood : BlockOutcome::kCorrupt;
        } else {
          outcome = transfer.error == ENODATA ? BlockOutcome::kCorrupt : BlockOutcome::kFailed;
        }
        outcomes[index] = outcome;
        corrupt += outcome == BlockOutcome::kCorrupt ? 1 : 0;
        failed += outcome == BlockOutcome::kFailed ? 1 : 0;
      });
  read_.fetch_add(run.slots.size(), std::memory_order_relaxed);
  corrupt_.fetch_add(corrupt, std::memory_order_relaxed);
  failed_.fetch_add(failed, std::memory_order_relaxed);
}

void BlockIo::write(const BlockRun& run, const std::uint8_t* rows, std::uint64_t epoch,
                    std::span<const std::uint32_t> checksums, std::span<std::int32_t> errors,
                    std::uint32_t generation) {
  const auto block_bytes = static_cast<std::uint32_t>(shared_->options.block_bytes);
  std::uint64_t refused = 0;
  run_blocks(
      run, const_cast<std::uint8_t*>(rows), true, *shared_, lanes_,  // a write only reads its rows
      [&](Transfer& transfer) {
        const bool is_sealed = run.seals != nullptr;
        encode_block_header({run.namespace_id, hash_at(run, transfer.index), epoch, block_bytes,
                             checksums[transfer.index], is_sealed, generation},
                            transfer.header);
        if (is_sealed) {
          std::memcpy(transfer.seal.data(), run.seals + kSealBytes * transfer.index, kSealBytes);
        }
      },
      [&](Transfer& transfer, Lane&) {
        errors[transfer.index] = transfer.error;
        refused += transfer.error != 0 ? 1 : 0;
      });
  written_.fetch_add(run.slots.size() - refused, std::memory_order_relaxed);
  refused_.fetch_add(refused, std::memory_order_relaxed);
}

void BlockIo::scan(std::span<const std::int64_t> slots, std::uint32_t depth, std::span<SlotOutcome> outcomes,
                   std::span<FoundBlock> found) const {
  const std::size_t files = shared_->options.files.size();
  std::vector<std::vector<HeaderScan::Wanted>> wanted(files);
  for (std::size_t index = 0; index < slots.size(); ++index) {
    const auto slot = static_cast<std::uint64_t>(slots[index]);
    wanted[slot % files].push_back({index, kPageBytes + slot / files * shared_->stride});
  }
  const auto block_bytes = static_cast<std::uint32_t>(shared_->options.block_bytes);
  const auto settle = [&](std::size_t index, const std::uint8_t* header, std::int64_t result) {
    if (result < 0) {
      outcomes[index] = SlotOutcome::kFailed;
      return;
    }
    const bool is_block = result >= static_cast<std::int64_t>(kBlockHeaderBytes) &&
                          read_block_header(std::span<const std::uint8_t, kBlockHeaderBytes>(header, kBlockHeaderBytes),
                                            block_bytes, found[index]);
    outcomes[index] = is_block ? SlotOutcome::kBlock : SlotOutcome::kNothing;
  };
  std::vector<std::unique_ptr<HeaderScan>> scans;
  for (const int file : shared_->options.files) {
    scans.push_back(std::make_unique<HeaderScan>(file, depth, uses_io_uring_));
  }
  std::vector<std::exception_ptr> troubles(files);
  const auto read = [&](std::size_t file) noexcept {
    try {
      scans[file]->run(wanted[file], settle);
    } catch (...) {
      troubles[file] = std::current_exception();
    }
  };
  std::vector<std::size_t> own{0};
  own.reserve(files);
  {
    std::vector<std::jthread> others;  // each file's device goes at its own pace
    for (std::size_t file = 1; file < files; ++file) {
      try {
        others.emplace_back(read, file);
      } catch (const std::system_error&) {  // no thread is to be had: one file after the other
        own.push_back(file);
      }
    }
    std::ranges::for_each(own, read);
  }
  for (const std::exception_ptr& trouble : troubles) {
    if (trouble) {
      std::rethrow_exception(trouble);
    }
  }
}

bool BlockIo::close(std::chrono::milliseconds timeout) {
  if (process_ != getpid()) {
    return true;
  }
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (const std::shared_ptr<Lane>& lane : lanes_) {
    lane->begin_stop();
  }
  bool is_over = true;
  for (const std::shared_ptr<Lane>& lane : lanes_) {
    is_over = lane->end_stop(deadline) && is_over;
  }
  return is_over;
}

BlockIoCounts BlockIo::counts() const {
  BlockIoCounts counts;
  counts.read = read_.load(std::memory_order_relaxed);
  counts.corrupt = corrupt_.load(std::memory_order_relaxed);
  counts.failed = failed_.load(std::memory_order_relaxed);
  counts.written = written_.load(std::memory_order_relaxed);
  counts.refused = refused_.load(std::memory_order_relaxed);
  counts.bounced = shared_->bounced.load(std::memory_order_relaxed);
  for (const std::shared_ptr<Lane>& lane : lanes_) {
    counts.in_flight += lane->in_flight();
  }
  return counts;
}

void BlockIo::withhold(std::int64_t slot) {
  shared_->withheld_slot.store(slot, std::memory_order_relaxed);
  if (slot < 0) {
    for (const std::shared_ptr<Lane>& lane : lanes_) {
      lane->release_withheld();
    }
  }
}

}  // namespace kvbm
