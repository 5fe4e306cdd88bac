// Buffer: memory for one tensor of a test or benchmark, and seeded contents.
//
// Every element starts as NaN (all bits set), so that elements that were never written show.
#ifndef HEED_HARNESS_BUFFER_H_
#define HEED_HARNESS_BUFFER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "heed/core/philox.h"
#include "heed/core/tensor.h"

namespace heed {

// A stream of random numbers that depends on (seed, stream) alone, not even on the standard library. It uses integers
// and sums only, so that bits are the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed, uint32_t stream = 0);

  uint32_t Word();
  double Uniform();                            // in [0, 1)
  double Uniform(double low, double high);     // in [low, high)
  int64_t Integer(int64_t low, int64_t high);  // in [low, high]
  bool Chance(double probability);

  // Mean 0, variance 1: the sum of eight uniform numbers, and therefore within +-4.9.
  double Normal();

  template <class T>
  T Pick(std::initializer_list<T> choices) {
    return choices.begin()[Integer(0, static_cast<int64_t>(choices.size()) - 1)];
  }

 private:
  uint64_t counter_ = 0;
  uint64_t seed_;
  uint32_t stream_;
  std::array<uint32_t, 4> words_{};
  int used_ = 4;
};

// The place of the elements in the allocation.
enum class Placement {
  kAligned,     // on huge pages if large: for benchmarks
  kAfterGuard,  // the lowest element follows an inaccessible page
  kBeforeGuard  // the highest element precedes one
};

class Buffer {
 public:
  // Makes an absent tensor.
  Buffer() = default;

  // Makes a row-major tensor.
  Buffer(DType dtype, std::span<const int64_t> sizes, Placement placement = Placement::kBeforeGuard);
  Buffer(DType dtype, std::initializer_list<int64_t> sizes, Placement placement = Placement::kBeforeGuard);

  // Makes a tensor of any strides, in elements, zero and negative ones included. `gap` elements stay free at the
  // guarded or aligned side, which shifts the alignment.
  Buffer(DType dtype, std::span<const int64_t> sizes, std::span<const int64_t> strides, Placement placement,
         int64_t gap = 0);

  // Returns a buffer on the same memory with another view, for example a slice of a fused buffer.
  Buffer As(const TensorView& view) const;

  const TensorView& view() const { return view_; }
  bool present() const { return view_.present(); }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }

  // All bytes, gaps included.
  std::span<const uint8_t> bytes() const { return {begin_, num_bytes_}; }

  // Get and Set access the element at an index, and convert to and from double.
  double Get(std::initializer_list<int64_t> index) const;
  void Set(std::initializer_list<int64_t> index, double value) const;

  const Buffer& FillNormal(uint64_t seed, double deviation = 1) const;
  const Buffer& FillConstant(double value) const;

  // Sets all bits of all bytes, gaps between rows included.
  void Poison() const;

 private:
  std::shared_ptr<void> memory_;
  uint8_t* begin_ = nullptr;  // beginning of the whole allocation
  size_t num_bytes_ = 0;
  TensorView view_;
};

// Access to the element at an index of any view, integers and bool included.
double GetElement(const ConstTensorView& view, std::span<const int64_t> index);
void SetElement(const TensorView& view, std::span<const int64_t> index, double value);

// All elements in row-major order.
std::vector<double> Elements(const ConstTensorView& view);

// Advances `index` in row-major order; returns false after the last one. Start from zeros, and only if num_elements() >
// 0.
bool NextIndex(std::span<const int64_t> sizes, std::span<int64_t> index);

// True if both have the same dtype, shape and bits.
bool SameBits(const ConstTensorView& a, const ConstTensorView& b);

}  // namespace heed

#endif  // HEED_HARNESS_BUFFER_H_
