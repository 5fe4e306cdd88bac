// Keys of PaTH attention pass tokens one by one, for decoding.
//
// With one token it is bound by reading and writing keys; with many, tasks of 16 keys stay in L1 and read w once.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/path_attention/path_attention_keys.cc"  // this file
#include "hwy/foreach_target.h"                                                    // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/core/carver.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::path_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

constexpr int64_t kKeys = 16;  // of a task

template <class T>
struct KeyScratch {
  T *keys, *w;
  int64_t bytes;

  KeyScratch(int64_t padded, void* base) {
    Carver carver(base);
    carver.Next(keys, kKeys * padded);
    carver.Next(w, padded);
    bytes = carver.bytes();
  }
};

// key -= beta <w, key> w, in whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void Transform(D d, const T* HWY_RESTRICT w, T beta, int64_t padded, T* HWY_RESTRICT key) {
  constexpr int64_t N = hn::MaxLanes(D());
  auto even = hn::Zero(d), odd = hn::Zero(d);
  for (int64_t c = 0; c < padded; c += 2 * N) {  // rows have an even number of vectors
    even = hn::MulAdd(hn::Load(d, w + c), hn::Load(d, key + c), even);
    odd = hn::MulAdd(hn::Load(d, w + c + N), hn::Load(d, key + c + N), odd);
  }
  const auto factor = hn::Set(d, beta * hn::ReduceSum(d, hn::Add(even, odd)));
  for (int64_t c = 0; c < padded; c += N) {
    hn::Store(hn::NegMulAdd(factor, hn::Load(d, w + c), hn::Load(d, key + c)), d, key + c);
  }
}

// S and K: the types of w and of keys.
template <class S, class K, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void TransformBlock(D d, const KeyInputs& in, const TensorView& keys, int64_t b, int64_t h, int64_t begin,
                                 int64_t padded, const KeyScratch<T>& c) {
  const int64_t channels = keys.size(3), count = std::min(kKeys, keys.size(1) - begin), tokens = in.w.size(1),
                first = keys.size(1) - tokens;
  K* const rows = keys.as<K>() + b * keys.stride(0) + begin * keys.stride(1) + h * keys.stride(2);
  for (int64_t j = 0; j < count; ++j) {
    hs::LoadRow(d, rows + j * keys.stride(1), channels, padded, c.keys + j * padded);
  }
  for (int64_t t = std::max<int64_t>(begin + 1 - first, 0); t < tokens; ++t) {
    const S* w = in.w.as<S>() + b * in.w.stride(0) + t * in.w.stride(1) + h * in.w.stride(2);
    const double beta = LoadAsDouble(in.beta.dtype(), in.beta.data(),
                                     b * in.beta.stride(0) + t * in.beta.stride(1) + h * in.beta.stride(2));
    hs::LoadRow(d, w, channels, padded, c.w);
    const int64_t earlier = std::min(count, first + t - begin);  // keys before the token
    for (int64_t j = 0; j < earlier; ++j) Transform(d, c.w, static_cast<T>(beta), padded, c.keys + j * padded);
  }
  for (int64_t j = 0; j < count; ++j) {
    hs::StoreRow(d, c.keys + j * padded, channels, rows + j * keys.stride(1));
  }
}

template <class T, class S, class K>
void TransformAll(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  const hn::ScalableTag<T> d;
  const int64_t padded = (keys.size(3) + 31) / 32 * 32, heads = keys.size(2),
                blocks = (keys.size(1) + kKeys - 1) / kKeys;
  ctx.ReserveScratch(KeyScratch<T>(padded, nullptr).bytes);
  ctx.ParallelFor(keys.size(0) * heads * blocks, [&](int64_t task, int worker) HWY_ATTR {
    const int64_t b = task / blocks / heads, h = task / blocks % heads, begin = task % blocks * kKeys;
    TransformBlock<S, K>(d, in, keys, b, h, begin, padded, KeyScratch<T>(padded, ctx.Scratch(worker)));
  });
}

void KeysImpl(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  if (in.w.dtype() == DType::kF64) return TransformAll<double, double, double>(ctx, in, keys);
  hs::WithStorage<float>(in.w.dtype(), [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    if (keys.dtype() == DType::kF32) return TransformAll<float, S, float>(ctx, in, keys);
    TransformAll<float, S, S>(ctx, in, keys);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::path_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::path_attention {

HWY_EXPORT(KeysImpl);

void ComputeKeys(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  HWY_DISPATCH_TABLE(KeysImpl)[TargetIndex(ctx.allowed_targets())](ctx, in, keys);
}

}  // namespace heed::path_attention
#endif  // HWY_ONCE
