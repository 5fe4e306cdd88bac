// Context: scratch memory that grows and is kept between calls, and the calls of the executor.
#include "heed/core/context.h"

#include <algorithm>
#include <cstdlib>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"

namespace heed {
namespace {

constexpr int kMaxThreads = 4096;

int CheckedThreads(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw InvalidArgument("Context: threads is " + std::to_string(num_threads) + ", expected 0 (all CPUs) to " +
                          std::to_string(kMaxThreads));
  }
  return num_threads == 0 ? os::NumUsableCpus() : num_threads;
}

// HEED_ISA is the only environment variable that the library reads.
int64_t TargetsFromEnvironment() {
  CheckCpuHasTarget();
  const char* isa = std::getenv("HEED_ISA");
  return isa == nullptr || *isa == '\0' ? kAllTargets : TargetsUpTo(isa);
}

}  // namespace

Context::Context(int num_threads)
    : executor_(DefaultExecutor()), num_threads_(CheckedThreads(num_threads)),
      allowed_targets_(TargetsFromEnvironment()) {}

Context::Context(Executor executor) : executor_(executor), allowed_targets_(TargetsFromEnvironment()) {
  if (executor.num_threads == nullptr || executor.run == nullptr) {
    throw InvalidArgument("Context: executor lacks a function, expected num_threads and run");
  }
  num_threads_ = std::clamp(executor.num_threads(executor.self), 1, kMaxThreads);
}

Context::~Context() {
  for (void* memory : scratch_) os::FreeAligned(memory);
  os::FreeAligned(shared_);
  os::FreeAligned(staging_);
  os::FreeAligned(tables_);
}

void Context::set_isa(std::string_view name) { allowed_targets_ = TargetsUpTo(name); }

void Context::ReserveScratch(int64_t bytes_per_worker) {
  const size_t workers = static_cast<size_t>(num_threads_);
  if (bytes_per_worker <= scratch_bytes_ && scratch_.size() == workers) return;
  for (void* memory : scratch_) os::FreeAligned(memory);
  scratch_.clear();
  scratch_.reserve(workers);
  scratch_bytes_ = bytes_per_worker;
  while (scratch_.size() < workers) {  // incomplete if this throws: the check above sees it
    scratch_.push_back(os::AllocateAligned(bytes_per_worker));
  }
}

namespace {

void Reserve(int64_t num_bytes, int64_t& size, void*& memory) {
  if (num_bytes <= size) return;
  os::FreeAligned(memory);
  memory = nullptr;
  size = 0;
  memory = os::AllocateAligned(num_bytes);
  size = num_bytes;
}

}  // namespace

void Context::ReserveShared(int64_t num_bytes) { Reserve(num_bytes, shared_bytes_, shared_); }

void Context::ReserveStaging(int64_t num_bytes) { Reserve(num_bytes, staging_bytes_, staging_); }

void Context::ReserveTables(int64_t num_bytes) { Reserve(num_bytes, tables_bytes_, tables_); }

void Context::Run(int64_t num_tasks, void (*body)(void*, int), void* argument) {
  if (num_tasks <= 0) return;
  const int workers = static_cast<int>(std::min<int64_t>(num_tasks, num_threads_));
  struct Job {
    void (*body)(void*, int);
    void* argument;
  } job = {body, argument};
  const auto run = [](void* self, int worker) {
    const os::ScopedFloatControl float_control;
    const Job& of = *static_cast<const Job*>(self);
    of.body(of.argument, worker);
  };
  if (workers == 1) {
    run(&job, 0);
  } else {
    executor_.run(executor_.self, workers, run, &job);
  }
}

}  // namespace heed
