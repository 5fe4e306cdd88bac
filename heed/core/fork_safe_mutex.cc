// ForkSafeMutex: the list of all instances, and their handling in fork().
#include "heed/core/fork_safe_mutex.h"

#include <mutex>
#include <new>

#include "heed/core/os.h"

namespace heed {

struct ForkSafeMutexes {
  std::mutex mutex;  // protects the members below
  ForkSafeMutex* newest = nullptr;

  // The list is never destroyed: caches may outlive every static object. It is made at load time, see below.
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

  // The old locks still count readers that do not exist in the child, so the child makes new locks.
  static void InChild() {
    ForkSafeMutexes& all = Get();
    for (ForkSafeMutex* m = all.newest; m != nullptr; m = m->older_) {
      new (&m->mutex_) std::shared_mutex;
    }
    all.mutex.unlock();
  }
};

namespace {

// A fork while another thread makes the list would leave the child without that thread and without a list. The list is
// therefore made while the library is loaded, before it has threads.
[[maybe_unused]] const ForkSafeMutexes& made_at_load_time = ForkSafeMutexes::Get();

}  // namespace

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
