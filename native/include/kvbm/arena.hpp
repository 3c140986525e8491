// Arena: shared memory that other processes can map by its file descriptor, all of it there before the constructor
// returns.
//
// Life: the constructor maps, binds and touches; the destructor unmaps and closes. The size never changes, and no
// process that has the descriptor can change it. Core dumps leave it out. Threads: any, once constructed; the bytes are
// the callers' matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvbm {

class Arena {
 public:
  struct Wishes {
    std::string name;         // what tools show for it
    std::size_t bytes = 0;    // at least 1; whole pages are taken
    bool huge_pages = false;  // from the system's pool of huge pages, or not at all
    bool advise = true;       // else transparent huge pages, as far as the machine has them
    int numa_node = -1;       // node every page must be of; -1: any
    unsigned threads = 1;     // that touch the pages
  };

  // Throws std::system_error: the system refuses, and nothing is taken. With a NUMA node it is EPERM where it may not
  // be chosen.
  explicit Arena(const Wishes& wishes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The descriptor, -1 where the system has no memfd.
  int fd() const noexcept { return fd_; }
  // Whole pages, so at least what was asked for. Begins at a multiple of 4,096, of 2 MiB when it is as large.
  std::size_t bytes() const noexcept { return bytes_; }
  std::uint8_t* data() const noexcept { return data_; }
  // Bytes of a page as it was asked for: one of the pool of huge pages, or the system's.
  std::size_t page_bytes() const noexcept { return page_bytes_; }

 private:
  void map(const Wishes& wishes);
  void bind(int numa_node);
  void touch(unsigned threads, bool advise);
  void give_back() noexcept;

  int fd_ = -1;                   // the memfd
  std::size_t page_bytes_ = 0;    // bytes of a page
  std::size_t bytes_ = 0;         // bytes of the mapping
  std::uint8_t* data_ = nullptr;  // the mapping
};

}  // namespace kvbm
