// A system that gives no thread, or so many: for tests of what cannot begin one. It defines `pthread_create`, so one
// file of a program has it.
#pragma once

#include <atomic>
#include <cerrno>

#include <dlfcn.h>
#include <pthread.h>

namespace kvbm::tests {

inline std::atomic<int> may_begin{-1};  // so many threads; -1: any number

// For its life the system gives so many threads.
class FewThreads {
 public:
  explicit FewThreads(int count) { may_begin = count; }
  ~FewThreads() { may_begin = -1; }
  FewThreads(const FewThreads&) = delete;
  FewThreads& operator=(const FewThreads&) = delete;
};

}  // namespace kvbm::tests

// Stands before the system's, which may give no thread.
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* made, const pthread_attr_t* attributes,
                                                                     void* (*body)(void*), void* given) noexcept {
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  int left = kvbm::tests::may_begin;
  while (left > 0 && !kvbm::tests::may_begin.compare_exchange_weak(left, left - 1)) {
  }
  return left == 0 ? EAGAIN : create(made, attributes, body, given);
}
