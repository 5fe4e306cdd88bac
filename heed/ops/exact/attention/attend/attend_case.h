// Common parts of the tests of attention over caches: inputs, calls and comparison of bits.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_CASE_H_
#define HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_CASE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend.h"

namespace heed::attention {

inline Buffer Normal(DType dtype, std::initializer_list<int64_t> sizes, uint64_t seed) {
  Buffer b(dtype, sizes);
  b.FillNormal(seed);
  return b;
}

inline Buffer Integers(const std::vector<int64_t>& values) {
  Buffer b(DType::kI64, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), b.as<int64_t>());
  return b;
}

// [batch, 1, 1, tokens]; each pair is kept at random.
inline Buffer RandomMask(int64_t batch, int64_t tokens) {
  Buffer mask(DType::kBool, {batch, 1, 1, tokens});
  Random random(7);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t j = 0; j < tokens; ++j) mask.Set({b, 0, 0, j}, random.Chance(0.5));
  }
  return mask;
}

inline Options Causal() {
  Options options;
  options.causal = true;
  return options;
}

struct Result {
  Buffer o, lse;
};

inline Result ResultFor(const ConstTensorView& q, int64_t value_dim) {
  const DType wide = q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  return {Buffer(q.dtype(), {q.size(0), q.size(1), q.size(2), value_dim}),
          Buffer(wide, {q.size(0), q.size(2), q.size(1)})};
}

inline Result AttendTo(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                       std::span<const int64_t> tree = {}) {
  const Result r = ResultFor(q, cache.value_dim);
  Attend(ctx, cache, q, options, {r.o.view(), r.lse.view()}, tree);
  return r;
}

inline void ExpectSame(const Result& a, const Result& b) {
  EXPECT_TRUE(SameBits(a.o.view(), b.o.view()));
  EXPECT_TRUE(SameBits(a.lse.view(), b.lse.view()));
}

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_CASE_H_
