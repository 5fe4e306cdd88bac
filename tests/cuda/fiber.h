// A fiber, which suspends and resumes: a thread of an emulated grid.
#ifndef HEED_TESTS_CUDA_FIBER_H_
#define HEED_TESTS_CUDA_FIBER_H_

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ucontext.h>

namespace heed::cuda {

// A context starts the fiber and jumps resume it; unlike contexts, jumps make no system calls.
class Fiber {
 public:
  explicit Fiber(std::function<void()> body) : body_(std::move(body)), stack_(TakeStack()) {
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    // Stacks start at the same offset in a page and would compete for the same cache sets, so their tops differ.
    static thread_local unsigned count = 0;
    own_.uc_stack.ss_size = kStackBytes - 320 * (count++ % 64);
    own_.uc_link = nullptr;
    // makecontext passes ints.
    const auto address = reinterpret_cast<uintptr_t>(this);
    makecontext(&own_, reinterpret_cast<void (*)()>(&Begin), 2, static_cast<unsigned>(address),
                static_cast<unsigned>(address >> 32));
  }
  ~Fiber() { free_stacks_.push_back(std::move(stack_)); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs until the body suspends itself or ends.
  void Resume() {
    if (_setjmp(caller_) != 0) return;
    if (has_begun_) _longjmp(here_, 1);
    has_begun_ = true;
    setcontext(&own_);
  }
  void Suspend() {
    if (_setjmp(here_) == 0) _longjmp(caller_, 1);
  }

 private:
  // The stack holds what a GPU thread has in registers.
  static constexpr size_t kStackBytes = size_t{256} << 10;

  // Stacks of ended fibers are reused: allocating one takes longer than most fibers run.
  using Stack = std::unique_ptr<char[]>;
  inline static thread_local std::vector<Stack> free_stacks_;

  static Stack TakeStack() {
    if (free_stacks_.empty()) return std::make_unique_for_overwrite<char[]>(kStackBytes);
    Stack stack = std::move(free_stacks_.back());
    free_stacks_.pop_back();
    return stack;
  }

  static void Begin(unsigned low, unsigned high) {
    auto* fiber = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(low) | static_cast<uintptr_t>(high) << 32);
    fiber->body_();
    _longjmp(fiber->caller_, 1);
  }

  std::function<void()> body_;
  Stack stack_;
  ucontext_t own_;
  std::jmp_buf here_, caller_;
  bool has_begun_ = false;
};

}  // namespace heed::cuda

#endif  // HEED_TESTS_CUDA_FIBER_H_
