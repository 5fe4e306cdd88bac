// Random calls of selectors by seed, for tests.
#ifndef HEED_OPS_SPARSE_SELECT_SELECT_CASE_H_
#define HEED_OPS_SPARSE_SELECT_SELECT_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/sparse/select/select.h"

namespace heed::select {

inline Buffer Ints(const std::vector<int64_t>& values) {
  const Buffer buffer(DType::kI64, {std::ssize(values)});
  std::ranges::copy(values, buffer.as<int64_t>());
  return buffer;
}

// Queries, keys and all arguments of block selectors. Every fourth problem has small integers whose scores have no
// rounding and are often equal, so that every SIMD target selects the same.
struct RandomBlocks {
  explicit RandomBlocks(uint64_t seed) : random(seed) {
    exact = seed % 4 == 0;
    dtype = random.Pick({DType::kF32, DType::kF32, DType::kF64, DType::kBF16, DType::kF16});
    B = random.Integer(1, 3);
    Hkv = random.Integer(1, 3);
    Hq = Hkv * random.Integer(1, 3);
    D = exact ? random.Pick<int64_t>({4, 16, 64}) : random.Integer(1, 70);
    block = exact ? random.Pick<int64_t>({1, 4, 16, 64}) : random.Integer(1, 70);
    Tk = exact ? block * random.Integer(0, 400 / block) : random.Integer(0, 500);
    Tq = random.Chance(0.3) ? random.Integer(0, 3) : random.Integer(0, 150);
    q = Fill({B, Tq, Hq, D}, 2 * seed);
    k = Fill({B, Tk, Hkv, D}, 2 * seed + 1);
    if (!exact && random.Chance(0.3)) {
      for (int64_t i = random.Integer(1, 4); i > 0; --i) Spoil(random.Chance(0.5) ? q : k);
    }
    options.block = block;
    options.causal = random.Chance(0.7);
    options.sinks = random.Chance(0.5) ? 0 : random.Integer(0, 3);
    options.local = random.Chance(0.5) ? 1 : random.Integer(0, 4);
    options.share = random.Chance(0.5) ? Share::kGroup : Share::kHead;
    options.align = random.Chance(0.7) ? attention::Align::kBottomRight : attention::Align::kTopLeft;
    const auto each = [&](int64_t low, int64_t high) {
      std::vector<int64_t> values;
      for (int64_t b = 0; b < B; ++b) values.push_back(random.Integer(low, std::max(low, high)));
      return Ints(values);
    };
    if (random.Chance(0.2)) query_starts = each(-20, Tk + 20);
    if (!exact && random.Chance(0.3)) key_starts = each(0, Tk / 3);
    if (!exact && random.Chance(0.3)) key_lengths = each(0, Tk);
    options.query_starts = query_starts.view();
    options.key_starts = key_starts.view();
    options.key_lengths = key_lengths.view();
  }
  TopBlocksOptions top_blocks() {
    TopBlocksOptions top;
    static_cast<BlockOptions&>(top) = options;
    top.count = random.Chance(0.1) ? int64_t{1} << 50 : random.Integer(1, 9);
    top.score = random.Chance(0.5) ? Score::kMean : Score::kBox;
    return top;
  }
  CumulativeOptions cumulative() {
    CumulativeOptions held;
    static_cast<BlockOptions&>(held) = options;
    held.mass = random.Chance(0.2) ? 1 : random.Uniform(0.01, 1);
    return held;
  }

  Random random;
  bool exact;
  DType dtype;
  int64_t B, Hkv, Hq, D, block, Tk, Tq;
  Buffer q, k, query_starts, key_starts, key_lengths;
  BlockOptions options;

 private:
  Buffer Fill(const std::vector<int64_t>& shape, uint64_t seed) {
    const Buffer buffer(dtype, shape);
    buffer.FillNormal(seed);
    if (exact) {
      std::vector<int64_t> index(shape.size());
      if (buffer.view().num_elements() == 0) return buffer;
      do SetElement(buffer.view(), index, std::round(GetElement(buffer.view(), index)));
      while (NextIndex(buffer.view().sizes(), index));
    }
    return buffer;
  }
  void Spoil(const Buffer& x) {
    if (x.view().num_elements() == 0) return;
    std::vector<int64_t> index;
    for (const int64_t size : x.view().sizes()) index.push_back(random.Integer(0, size - 1));
    SetElement(x.view(), index, std::numeric_limits<double>::quiet_NaN());
  }
};

}  // namespace heed::select

#endif  // HEED_OPS_SPARSE_SELECT_SELECT_CASE_H_
