// ForkSafeMutex: the list of all of them, and what fork() does with it.
#include "heed/core/fork_safe_mutex.h"

#include <mutex>
#include <new>

#include "heed/core/os.h"

namespace heed {

struct ForkSafeMutexes {
  std::mutex mutex;  // of what follows
  ForkSafeMutex* newest = nullptr;

  // Never destroyed: caches may outlive every static object.
  static ForkSafeMutexes& Get() {
    static ForkSafeMutexes* const all = [] {
      os::AtFork(&Before, &InParent, &InChild);
      return new ForkSafeMutexes;
    }();
    return *all;
  }

  static void Before() {
    ForkSafeMutexes& all = Get();
    all.mutex.lock();
    for (ForkSafeMutex* m = all.newest; m != nullptr; m = m->older_) m->lock_shared();
  }

  static void InParent() {
    ForkSafeMutexes& all = Get();
    for (ForkSafeMutex* m = all.newest; m != nullptr; m = m->older_) m->unlock_shared();
    all.mutex.unlock();
  }

  // Readers who are not here are counted in the old locks: new ones.
  static void InChild() {
    ForkSafeMutexes& all = Get();
    for (ForkSafeMutex* m = all.newest; m != nullptr; m = m->older_) {
      new (&m->mutex_) std::shared_mutex;
    }
    all.mutex.unlock();
  }
};

ForkSafeMutex::ForkSafeMutex() {
  ForkSafeMutexes& all = ForkSafeMutexes::Get();
  const std::lock_guard lock(all.mutex);
  older_ = all.newest;
  if (older_ != nullptr) older_->newer_ = this;
  all.newest = this;
}

ForkSafeMutex::~ForkSafeMutex() {
  ForkSafeMutexes& all = ForkSafeMutexes::Get();
  const std::lock_guard lock(all.mutex);
  (newer_ != nullptr ? newer_->older_ : all.newest) = older_;
  if (older_ != nullptr) older_->newer_ = newer_;
}

}  // namespace heed
