// IoRing: one io_uring instance, spoken to by its system calls, because the images that wheels are built in have no
// liburing. Made by any thread; then one thread at a time pushes, submits and takes. Freed once nothing that was pushed
// is under way.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvbm {

class IoRing {
 public:
  // What ended: `tag` as it was pushed, `result` as the system call would have returned it, or minus errno.
  struct Completion {
    std::uint64_t tag;    // whose
    std::int32_t result;  // bytes, or minus errno
  };

  // A ring over a file with room for `entries` pushes at a time; nullptr, and why (errno), where the kernel has or
  // gives none. The file is not registered with it: the kernel takes a ring apart some time after it was closed, and a
  // registered file would keep its locks until then.
  static std::unique_ptr<IoRing> open(int file, std::uint32_t entries, int& error) noexcept;
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  // Reads or writes pieces at a position of the file. The pieces must stay until the completion has been taken.
  void push(bool is_write, const iovec* pieces, std::uint32_t count, std::uint64_t position,
            std::uint64_t tag) noexcept;
  // Completes once the descriptor can be read.
  void push_poll(int fd, std::uint64_t tag) noexcept;

  // Hands over what was pushed and waits until there is a completion, or a signal came.
  void submit_and_wait() noexcept;
  // The next completion; false when there is none yet.
  bool take(Completion& out) noexcept;

 private:
  struct Maps;
  IoRing(std::unique_ptr<Maps> maps, int file) noexcept;

  std::unique_ptr<Maps> maps_;     // memory shared with the kernel
  int file_;                       // of `push`, not owned
  std::uint32_t unsubmitted_ = 0;  // pushed and not handed over
};

}  // namespace kvbm
