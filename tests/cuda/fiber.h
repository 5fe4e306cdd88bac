// Fibers: the threads of an emulated grid. A fiber continues where it was suspended.
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

// A ucontext starts the fiber, and longjmp resumes it, which unlike ucontexts needs no system call.
class Fiber {
 public:
  explicit Fiber(std::function<void()> body) : body_(std::move(body)), stack_(TakeStack()) {
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    // All stacks begin at the same offset of a page, for which caches have few lines; the tops of stacks are therefore
    // shifted.
    static thread_local unsigned count = 0;
    own_.uc_stack.ss_size = kStackBytes - 320 * (count++ % 64);
    own_.uc_link = nullptr;
    // makecontext passes ints only.
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
  // Values that a GPU thread keeps in registers are in its stack here.
  static constexpr size_t kStackBytes = size_t{256} << 10;

  // Stacks of finished fibers: allocating memory takes longer than most fibers run.
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
