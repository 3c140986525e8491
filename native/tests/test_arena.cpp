#include "kvbm/arena.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "no_threads.hpp"

using namespace kvbm;

namespace {

constexpr std::size_t kMegabyte = 1 << 20;

// The errno of the refusal that was due.
int refusal(const Arena::Wishes& wishes) {
  try {
    const Arena arena(wishes);
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  CHECK(!"a refusal was due");
  return 0;
}

std::size_t descriptors() {
  std::size_t open = 0;
  for (int fd = 0; fd < 256; ++fd) {
    open += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  }
  return open;
}

void every_page_is_there() {
  const Arena arena({.name = "test", .bytes = 66 * kMegabyte + 5, .threads = 3});
  const std::size_t page = arena.page_bytes();
  CHECK(arena.bytes() >= 66 * kMegabyte + 5 && arena.bytes() % page == 0 && arena.bytes() < 67 * kMegabyte);
  CHECK(reinterpret_cast<std::uintptr_t>(arena.data()) % (2 * kMegabyte) == 0);
  std::vector<unsigned char> there(arena.bytes() / page);
  CHECK(mincore(arena.data(), arena.bytes(), there.data()) == 0);
  CHECK(std::all_of(there.begin(), there.end(), [](unsigned char bits) { return (bits & 1) != 0; }));
  struct stat about{};
  CHECK(fstat(arena.fd(), &about) == 0);
  CHECK(static_cast<std::size_t>(about.st_blocks) * 512 >= arena.bytes());
  CHECK(std::all_of(arena.data(), arena.data() + arena.bytes(), [](std::uint8_t byte) { return byte == 0; }));
}

// Bytes of an arena in huge pages, as the kernel tells; 0 where it does not.
std::size_t joined_bytes(const Arena& arena) {
  std::ifstream maps("/proc/self/smaps");
  char begins[32];
  std::snprintf(begins, sizeof begins, "%lx-", reinterpret_cast<unsigned long>(arena.data()));
  std::string line;
  bool is_ours = false;
  while (std::getline(maps, line)) {
    is_ours = is_ours || line.starts_with(begins);
    if (is_ours && line.starts_with("ShmemPmdMapped:")) {
      return std::stoul(line.substr(15)) << 10;
    }
  }
  return 0;
}

// Whether the kernel joins pages of shared memory when it is asked to: not before Linux 6.1, nor where the system
// forbids it.
bool joins_by_request() {
  const std::size_t bytes = 4 * kMegabyte;
  void* const room = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(room != MAP_FAILED);
  const std::uintptr_t begin =
      (reinterpret_cast<std::uintptr_t>(room) + 2 * kMegabyte - 1) / (2 * kMegabyte) * (2 * kMegabyte);
  auto* const whole = reinterpret_cast<std::uint8_t*>(begin);
  *whole = 1;
  const bool joins = madvise(whole, 2 * kMegabyte, 25) == 0;
  munmap(room, bytes);
  return joins;
}

void its_pages_are_joined_by_request() {
  const Arena joined({.name = "test", .bytes = 20 * kMegabyte + 5, .threads = 2});
  CHECK(joined_bytes(joined) == (joins_by_request() ? 20 * kMegabyte : 0));
  CHECK(std::all_of(joined.data(), joined.data() + joined.bytes(), [](std::uint8_t byte) { return byte == 0; }));
}

void another_process_sees_the_bytes() {
  const Arena arena({.name = "test", .bytes = 3 * 4096});
  std::memcpy(arena.data() + 5000, "bytes", 5);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    void* const theirs = mmap(nullptr, arena.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd(), 0);
    const bool sees = theirs != MAP_FAILED && std::memcmp(static_cast<char*>(theirs) + 5000, "bytes", 5) == 0;
    if (sees) {
      std::memcpy(static_cast<char*>(theirs) + 9000, "answer", 6);
    }
    _exit(sees ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(std::memcmp(arena.data() + 9000, "answer", 6) == 0);
}

void nobody_changes_its_size() {
  const Arena arena({.name = "test", .bytes = 2 * 4096});
  CHECK(ftruncate(arena.fd(), 4096) != 0 && errno == EPERM);
  CHECK(ftruncate(arena.fd(), 8 * 4096) != 0 && errno == EPERM);
  CHECK((fcntl(arena.fd(), F_GETFD) & FD_CLOEXEC) != 0);
}

void refusals_leave_nothing() {
  const std::size_t before = descriptors();
  CHECK(refusal({.name = "test", .bytes = std::size_t{1} << 60}) == ENOMEM);
  CHECK(refusal({.name = "test", .bytes = SIZE_MAX}) == ENOMEM);
  CHECK(refusal({.name = "test", .bytes = 0}) == EINVAL);
  CHECK(refusal({.name = "test", .bytes = 4096, .numa_node = 1000}) != 0);
  CHECK(refusal({.name = "test", .bytes = 4096, .numa_node = 5000}) == EINVAL);
  // No machine has set so many aside; where they cannot be had at all, that is a refusal as well.
  CHECK(refusal({.name = "test", .bytes = std::size_t{1} << 46, .huge_pages = true}) != 0);
  CHECK(descriptors() == before);
}

void it_is_given_back() {
  const std::size_t before = descriptors();
  for (int pass = 0; pass < 50; ++pass) {
    const Arena arena({.name = "test", .bytes = 4 * kMegabyte, .advise = pass % 2 == 0, .threads = 2});
    arena.data()[arena.bytes() - 1] = 1;
  }
  CHECK(descriptors() == before);
}

void fewer_threads_touch_it() {
  for (const int given : {0, 1}) {
    const tests::FewThreads few(given);
    every_page_is_there();
  }
}

}  // namespace

int main() {
  return tests::run(
      {{"every page of an arena is there", every_page_is_there},
       {"its pages are joined to huge ones where the kernel does so by request", its_pages_are_joined_by_request},
       {"another process that maps it sees the bytes", another_process_sees_the_bytes},
       {"nobody changes its size", nobody_changes_its_size},
       {"a refused arena leaves nothing behind", refusals_leave_nothing},
       {"an arena is given back", it_is_given_back},
       {"without threads every page of an arena is there", fewer_threads_touch_it}});
}
