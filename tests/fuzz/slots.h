// Memory of a fuzzed call: tensors between inaccessible pages, without system calls after the first use.
#ifndef TESTS_FUZZ_SLOTS_H_
#define TESTS_FUZZ_SLOTS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heed/core/os.h"
#include "heed/core/tensor.h"

namespace heed::fuzz {

// Memory for one tensor, between inaccessible pages, which every call uses again.
class Slot {
 public:
  static constexpr size_t kBytes = size_t{1} << 18;

  Slot() : memory_(kBytes, true) {}

  // A view whose memory ends, or begins, at an inaccessible page, filled with NaN. Throws std::bad_alloc if it does not
  // fit.
  TensorView Place(DType dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, bool at_end);

  // Remember() copies the bytes in use; Unchanged() is true if they are still the same. Elements of `written` may
  // change.
  void Remember() { copy_.assign(begin_, end_); }
  bool Unchanged() const;
  bool UnchangedExcept(const ConstTensorView& written) const;

 private:
  os::GuardedMemory memory_;
  uint8_t *begin_ = nullptr, *end_ = nullptr;  // in use, and some slack
  std::vector<uint8_t> copy_;
};

class Slots {
 public:
  void Clear() { used_ = 0; }
  Slot& Next() {
    if (used_ == slots_.size()) slots_.emplace_back();
    return slots_[used_++];
  }
  std::span<Slot> used() { return {slots_.data(), used_}; }

 private:
  std::vector<Slot> slots_;
  size_t used_ = 0;
};

}  // namespace heed::fuzz

#endif  // TESTS_FUZZ_SLOTS_H_
