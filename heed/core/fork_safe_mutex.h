// ForkSafeMutex: a lock for data that must be consistent in a forked child.
#ifndef HEED_CORE_FORK_SAFE_MUTEX_H_
#define HEED_CORE_FORK_SAFE_MUTEX_H_

#include <shared_mutex>

#include "heed/core/export.h"

namespace heed {

// A std::shared_mutex for processes that fork while other threads hold it. A child inherits a copy of the lock, but not
// the thread that would release it, and the protected data may be half changed. Therefore fork() waits until no thread
// holds the lock exclusively, and the lock is free in the child.
//
// All instances are in one list, the newest first, and fork() takes them in that order. A thread that holds one may
// therefore take older ones only, and may neither make nor destroy any.
class HEED_API ForkSafeMutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  void lock_shared() { mutex_.lock_shared(); }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  friend struct ForkSafeMutexes;

  std::shared_mutex mutex_;
  ForkSafeMutex* older_ = nullptr;
  ForkSafeMutex* newer_ = nullptr;
};

}  // namespace heed

#endif  // HEED_CORE_FORK_SAFE_MUTEX_H_
