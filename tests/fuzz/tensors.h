// Checks of every tensor that a parser returns, and of every message.
#ifndef TESTS_FUZZ_TENSORS_H_
#define TESTS_FUZZ_TENSORS_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/harness/buffer.h"
#include "tests/fuzz/input.h"

namespace heed::fuzz {

// Reads every element, so that sanitizers detect one outside of its memory.
inline void ReadAll(const ConstTensorView& view) {
  Require(view.present(), "an absent tensor");
  if (view.num_elements() == 0) return;
  Require(reinterpret_cast<uintptr_t>(view.data()) % SizeOf(view.dtype()) == 0, "a misaligned tensor");
  std::vector<int64_t> index(view.sizes().size());
  volatile double sink = 0;
  do {
    const double x = GetElement(view, index);
    Require(view.dtype() != DType::kBool || x == 0 || x == 1, "a bad bool");
    sink = x;
  } while (NextIndex(view.sizes(), index));
  (void)sink;
}

// Sets every element to f().
template <class F>
void Each(const TensorView& view, F&& f) {
  if (view.num_elements() == 0) return;
  std::array<int64_t, kMaxRank> index{};
  const std::span<int64_t> at(index.data(), view.sizes().size());
  do {
    SetElement(view, at, f());
  } while (NextIndex(view.sizes(), at));
}

// Sets an element of an i64 or i32 list. SetElement goes through double, which cannot represent every int64.
inline void StoreInteger(const TensorView& view, int64_t i, int64_t value) {
  if (view.dtype() == DType::kI64) {
    view.as<int64_t>()[i * view.stride(0)] = value;
  } else {
    view.as<int32_t>()[i * view.stride(0)] = static_cast<int32_t>(value);
  }
}

// Requires one line of printable ASCII with the expected value.
inline void CheckMessage(std::string_view text) {
  for (const char c : text) {
    if (c < ' ' || c > '~') Fail("not one line of ASCII: " + std::string(text));
  }
  if (text.find("expected ") == std::string_view::npos) {
    Fail("does not say what was expected: " + std::string(text));
  }
}

}  // namespace heed::fuzz

#endif  // TESTS_FUZZ_TENSORS_H_
