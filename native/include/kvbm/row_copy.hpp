// RowCopier: copies and checksums many rows of one size, split over threads that it keeps.
//
// Life: made with its threads; they sleep until a run comes; the destructor ends them, and no run may be under way
// then. After fork() the child has none of the threads: its runs are copied by their caller. Threads: any; runs of
// several callers are under way at once, the oldest is helped first, and every caller works on its own. A call returns
// when the last byte is in place. Calls neither allocate nor throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace kvbm {

// Rows of one buffer, in the order of a run.
template <class Byte>
struct RowsOf {
  Byte* base = nullptr;              // first byte of row 0
  std::ptrdiff_t stride = 0;         // bytes from the start of a row to that of the next
  const std::int64_t* at = nullptr;  // row of each entry of the run; null: 0, 1, 2, …

  Byte* operator[](std::size_t entry) const noexcept {
    return base +
           stride * (at == nullptr ? static_cast<std::ptrdiff_t>(entry) : static_cast<std::ptrdiff_t>(at[entry]));
  }
};
using TargetRows = RowsOf<std::uint8_t>;
using SourceRows = RowsOf<const std::uint8_t>;

class RowCopier {
 public:
  // threads: that work on one run, its caller among them; 0: as many as help on this machine. Where the system gives
  // fewer, fewer work.
  explicit RowCopier(unsigned threads);
  ~RowCopier();
  RowCopier(const RowCopier&) = delete;
  RowCopier& operator=(const RowCopier&) = delete;

  unsigned threads() const noexcept;
  // Threads that were wanted and that the system did not give.
  unsigned lacking() const noexcept { return lacking_; }

  // Copies `count` rows of row_bytes; rows of the target are apart from each other and from those of the source.
  // checksums: empty, or the CRC-32C of each row that was copied.
  void copy(const TargetRows& target, const SourceRows& source, std::size_t count, std::size_t row_bytes,
            std::span<std::uint32_t> checksums) noexcept;

  // As copy, but the checksums are of the target's own bytes once they are there: of a source that others may write
  // meanwhile, they tell whether what arrived is what was meant.
  void copy_verified(const TargetRows& target, const SourceRows& source, std::size_t row_bytes,
                     std::span<std::uint32_t> checksums) noexcept;

  // The CRC-32C of each of checksums.size() rows.
  void checksum(const SourceRows& source, std::size_t row_bytes, std::span<std::uint32_t> checksums) noexcept;

 private:
  struct Run;
  struct Crew;

  // Works a run off, with the crew's help where that pays.
  void share(Run& run) noexcept;

  std::unique_ptr<Crew> crew_;  // the threads and what they share
  unsigned lacking_ = 0;        // threads that the system did not give
};

}  // namespace kvbm
