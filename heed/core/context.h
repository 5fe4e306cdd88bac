// Context: the resources of a call. It has threads, scratch memory, a cap on the SIMD target, and strictness.
//
// A Context is cheap, owned by the caller, and used by one thread at a time. All Contexts share one pool of threads
// unless they bring an Executor.
#ifndef HEED_CORE_CONTEXT_H_
#define HEED_CORE_CONTEXT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "heed/core/export.h"

namespace heed {

// The threads of a host program, as two functions. `run` calls body(argument, worker) with different workers in [0,
// num_workers), in any order, concurrently or not, at least for worker 0, and returns when all calls have returned.
// `body` claims its tasks from a counter, so fewer workers only cost time. `body` never throws.
struct Executor {
  void* self = nullptr;
  int (*num_threads)(void* self) = nullptr;
  void (*run)(void* self, int num_workers, void (*body)(void*, int), void* argument) = nullptr;
};

// heed's own pool. It grows on demand up to the number of usable CPUs, or to 8 threads if there are fewer, whatever a
// Context requests. It sleeps when idle and ends threads that were not needed for seconds. It is rebuilt after fork and
// joined at exit. A second caller that arrives during a job runs on its own thread alone.
HEED_API Executor DefaultExecutor();

class HEED_API Context {
 public:
  // 0 threads means one per CPU that the process may use. Throws InvalidArgument below 0 or above 4096, and for an
  // invalid HEED_ISA, Unsupported if the library was built for the SIMD target of another machine alone.
  explicit Context(int num_threads = 0);
  explicit Context(Executor executor);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int num_threads() const { return num_threads_; }

  // Caps the SIMD target: a Highway target name, or "tiles" for no cap.
  void set_isa(std::string_view name);
  int64_t allowed_targets() const { return allowed_targets_; }

  // A strict Context throws Unsupported for a call that has no fast kernel.
  void set_strict(bool strict) { strict_ = strict; }
  bool strict() const { return strict_; }

  // With checks on, a call reads the values of its inputs too, which costs one pass over them. A log decay that is
  // positive or NaN then throws InvalidArgument.
  void set_checks(bool checks) { checks_ = checks; }
  bool checks() const { return checks_; }

  // Sets the stream of calls on views of a CUDA device: a cudaStream_t of that device, or null for its default stream.
  // Such calls return when their work is enqueued.
  void set_stream(void* stream) { stream_ = stream; }
  void* stream() const { return stream_; }

  // Makes Scratch(worker) hold at least this many bytes for each worker, and
  // keeps it for later calls. May throw std::bad_alloc; call it before
  // ParallelFor, inside which nothing may.
  void ReserveScratch(int64_t bytes_per_worker);
  void* Scratch(int worker) const { return scratch_[static_cast<size_t>(worker)]; }

  // One block of memory that all workers share, with the same rules as Scratch.
  void ReserveShared(int64_t num_bytes);
  void* Shared() const { return shared_; }

  // Another shared block, in which an operation prepares the arguments of an engine.
  void ReserveStaging(int64_t num_bytes);
  void* Staging() const { return staging_; }

  // A third shared block, for tables that an engine derives from its arguments.
  void ReserveTables(int64_t num_bytes);
  void* Tables() const { return tables_; }

  // Calls f(task, worker) once for every task in [0, num_tasks). Tasks are handed out in ascending order, each to the
  // next free worker. The order of completion is undefined, and results must not depend on it. Tasks round to nearest
  // and treat subnormal results as os.h says, whatever mode the host's threads have set.
  template <class F>
  void ParallelFor(int64_t num_tasks, F&& f) {
    struct Shared {
      std::atomic<int64_t> next{0};
      int64_t num_tasks;
      std::remove_reference_t<F>* f;
    } shared;
    shared.num_tasks = num_tasks;
    shared.f = &f;
    Run(
        num_tasks,
        [](void* argument, int worker) {
          Shared& s = *static_cast<Shared*>(argument);
          for (int64_t task; (task = s.next.fetch_add(1, std::memory_order_relaxed)) < s.num_tasks;) {
            (*s.f)(task, worker);
          }
        },
        &shared);
  }

 private:
  void Run(int64_t num_tasks, void (*body)(void*, int), void* argument);

  Executor executor_;
  int num_threads_ = 1;
  int64_t allowed_targets_;
  bool strict_ = false;
  bool checks_ = false;
  void* stream_ = nullptr;
  int64_t scratch_bytes_ = 0;
  std::vector<void*> scratch_;
  int64_t shared_bytes_ = 0;
  void* shared_ = nullptr;
  int64_t staging_bytes_ = 0;
  void* staging_ = nullptr;
  int64_t tables_bytes_ = 0;
  void* tables_ = nullptr;
};

}  // namespace heed

#endif  // HEED_CORE_CONTEXT_H_
