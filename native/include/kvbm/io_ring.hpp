// IoRing: one io_uring instance, spoken to by its system calls, because the images that wheels are built in have no liburing.
// Made by any thread; then one thread at a time pushes, submits and takes. Freed once nothing that was pushed is under way.
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

  // A ring with room for `entries` pushes at a time; nullptr, and why (errno), where the kernel has or gives none.
  static std::unique_ptr<IoRing> open(std::uint32_t entries, int& error) noexcept;
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  // Makes known the one file that `push` uses, so that the kernel need not look it up each time. It may refuse; nothing changes then.
  void set_file(int fd) noexcept;

  // Reads or writes pieces at a position of the file. The pieces must stay until the completion has been taken.
  void push(bool is_write, const iovec* pieces, std::uint32_t count, std::uint64_t position, std::uint64_t tag) noexcept;
  // Completes once the descriptor can be read.
  void push_poll(int fd, std::uint64_t tag) noexcept;

  // Hands over what was pushed and waits until there is a completion, or a signal came.
  void submit_and_wait() noexcept;
  // The next completion; false when there is none yet.
  bool take(Completion& out) noexcept;

 private:
  struct Maps;
  explicit IoRing(std::unique_ptr<Maps> maps) noexcept;

  std::unique_ptr<Maps> maps_;       // memory shared with the kernel
  int file_ = -1;                    // of `push`
  bool is_registered_ = false;       // whether the kernel knows it as its file 0
  std::uint32_t unsubmitted_ = 0;    // pushed and not handed over
};

}  // namespace kvbm
