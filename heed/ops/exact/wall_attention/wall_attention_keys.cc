// Keys of Wall attention decay by tokens, for decoding.
//
// First each head sums log decays from the newest token back, up to the end of every 64 keys; then all keys decay in
// parallel. Bound by reading and writing keys.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/wall_attention/wall_attention_keys.cc"  // this file
#include "hwy/foreach_target.h"                                                    // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/core/carver.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::wall_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class T>
struct KeyScratch {
  T *key, *gates, *factors;  // [padded]
  double* sums;              // [padded]: of log decays after the current key
  int64_t bytes;

  KeyScratch(int64_t padded, void* base) {
    Carver carver(base);
    for (T** row : {&key, &gates, &factors}) carver.Next(*row, padded);
    carver.Next(sums, padded);
    bytes = carver.bytes();
  }
};

// Adds the log decays of a token to sums.
template <class S, class D, class T = hn::TFromD<D>>
HWY_INLINE void AddGates(D d, const ConstTensorView& log_decay, int64_t b, int64_t t, int64_t h, int64_t padded,
                         const KeyScratch<T>& c) {
  const S* gates = log_decay.as<S>() + b * log_decay.stride(0) + t * log_decay.stride(1) + h * log_decay.stride(2);
  hs::LoadRow(d, gates, log_decay.size(3), padded, c.gates);
  for (int64_t i = 0; i < padded; ++i) c.sums[i] += static_cast<double>(c.gates[i]);
}

// S and K: the types of log_decay and of keys.
template <class T, class S, class K>
void TransformAll(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const hn::ScalableTag<T> d;
  const int64_t padded = (keys.size(3) + 15) / 16 * 16, heads = keys.size(2), Tk = keys.size(1),
                tokens = in.log_decay.size(1), oldest = Tk - tokens, blocks = (Tk + kBlock - 1) / kBlock;
  ctx.ReserveScratch(KeyScratch<T>(padded, nullptr).bytes);
  ctx.ReserveShared(keys.size(0) * heads * blocks * padded * int64_t{sizeof(double)});
  double* const after = static_cast<double*>(ctx.Shared());  // [B, heads, blocks, padded]: of log decays after a block
  ctx.ParallelFor(keys.size(0) * heads, [&](int64_t task, int worker) HWY_ATTR {
    const KeyScratch<T> c(padded, ctx.Scratch(worker));
    std::fill(c.sums, c.sums + padded, 0.0);
    for (int64_t block = blocks; block-- > 0;) {
      std::copy(c.sums, c.sums + padded, after + (task * blocks + block) * padded);
      for (int64_t j = std::min(Tk, (block + 1) * kBlock); j-- > std::max(oldest, block * kBlock);) {
        AddGates<S>(d, in.log_decay, task / heads, j - oldest, task % heads, padded, c);
      }
    }
  });
  ctx.ParallelFor(keys.size(0) * heads * blocks, [&](int64_t task, int worker) HWY_ATTR {
    const KeyScratch<T> c(padded, ctx.Scratch(worker));
    const int64_t b = task / blocks / heads, h = task / blocks % heads, begin = task % blocks * kBlock,
                  end = std::min(Tk, begin + kBlock);
    std::copy(after + task * padded, after + (task + 1) * padded, c.sums);
    for (int64_t j = end; j-- > begin;) {
      if (j + 1 == end || j + 1 >= oldest) {  // else as for the key after it
        for (int64_t i = 0; i < padded; i += N) {
          HWY_ALIGN T sums[N];
          for (int64_t lane = 0; lane < N; ++lane) sums[lane] = static_cast<T>(c.sums[i + lane]);
          hn::Store(hs::Exp(d, hn::Load(d, sums)), d, c.factors + i);
        }
      }
      K* const row = keys.as<K>() + b * keys.stride(0) + j * keys.stride(1) + h * keys.stride(2);
      hs::LoadRow(d, row, keys.size(3), padded, c.key);
      for (int64_t i = 0; i < padded; i += N) {
        hn::Store(hn::Mul(hn::Load(d, c.key + i), hn::Load(d, c.factors + i)), d, c.key + i);
      }
      hs::StoreRow(d, c.key, keys.size(3), row);
      if (j >= oldest) AddGates<S>(d, in.log_decay, b, j - oldest, h, padded, c);
    }
  });
}

void KeysImpl(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  if (in.log_decay.dtype() == DType::kF64) return TransformAll<double, double, double>(ctx, in, keys);
  hs::WithStorage<float>(in.log_decay.dtype(), [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    if (keys.dtype() == DType::kF32) return TransformAll<float, S, float>(ctx, in, keys);
    TransformAll<float, S, S>(ctx, in, keys);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::wall_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::wall_attention {

HWY_EXPORT(KeysImpl);

void ComputeKeys(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  HWY_DISPATCH_TABLE(KeysImpl)[TargetIndex(ctx.allowed_targets())](ctx, in, keys);
}

}  // namespace heed::wall_attention
#endif  // HWY_ONCE
