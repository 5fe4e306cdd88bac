// A thread of control that goes on where it left off: what the threads of an emulated grid are.
#ifndef HEED_TESTS_CUDA_FIBER_H_
#define HEED_TESTS_CUDA_FIBER_H_

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include <ucontext.h>

namespace heed::cuda {

// A context begins it and jumps go on, which unlike contexts ask the system for nothing.
class Fiber {
 public:
  explicit Fiber(std::function<void()> body) : body_(std::move(body)), stack_(std::make_unique_for_overwrite<char[]>(kStackBytes)) {
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    own_.uc_stack.ss_size = kStackBytes;
    own_.uc_link = nullptr;
    // makecontext passes on ints.
    const auto address = reinterpret_cast<uintptr_t>(this);
    makecontext(&own_, reinterpret_cast<void (*)()>(&Begin), 2, static_cast<unsigned>(address),
                static_cast<unsigned>(address >> 32));
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Goes on until the body suspends itself or ends.
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
  // What a thread of a GPU has in registers, here stands in its stack.
  static constexpr size_t kStackBytes = size_t{256} << 10;

  static void Begin(unsigned low, unsigned high) {
    auto* fiber = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(low) | static_cast<uintptr_t>(high) << 32);
    fiber->body_();
    _longjmp(fiber->caller_, 1);
  }

  std::function<void()> body_;
  std::unique_ptr<char[]> stack_;
  ucontext_t own_;
  std::jmp_buf here_, caller_;
  bool has_begun_ = false;
};

}  // namespace heed::cuda

#endif  // HEED_TESTS_CUDA_FIBER_H_
