// ForkSafeMutex: a lock for what must be whole in a forked child.
#ifndef HEED_CORE_FORK_SAFE_MUTEX_H_
#define HEED_CORE_FORK_SAFE_MUTEX_H_

#include <shared_mutex>

#include "heed/core/export.h"

namespace heed {

// A std::shared_mutex for processes that fork while other threads hold it. The child has a
// copy of the lock, but not of the thread that would give it back, and may have what it
// protects half changed. So fork() waits until nobody holds it alone, and in the child it is
// free.
//
// All are known to one list, the newest first, and fork() takes them in that order. Who holds
// one may therefore take older ones only, and neither make nor destroy any.
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
