// AllSignalsMasked: threads that are begun while it lives take no signals, which are for the threads of whoever embeds
// us. Its thread only.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace kvbm {

class AllSignalsMasked {
 public:
  AllSignalsMasked() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsMasked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsMasked(const AllSignalsMasked&) = delete;
  AllSignalsMasked& operator=(const AllSignalsMasked&) = delete;

 private:
  sigset_t before_;  // what its thread blocked before
};

}  // namespace kvbm
