// Register tiles are chains of fused products, bit for bit, whatever their shape:
// every shape that the kernels use, on every SIMD target, between guard pages.
#include "heed/core/targets.h"
// After targets.h:
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/harness/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/tile_test.cc"  // this file
#include "hwy/foreach_target.h"                      // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/tile-inl.h"

namespace heed::tile_test {
#ifndef HEED_SIMD_TILE_TEST_ONCE
#define HEED_SIMD_TILE_TEST_ONCE
// A row-major matrix is read as scalars, another has `lanes` columns in vectors.
// Logits: sums over `inner` of rows[r][e] lanes[e][.]; Values: sums over `inner`
// of rows[j][r] lanes[j][.]. `count` outputs rows.
template <class T>
struct Call {
  const T* rows;
  ptrdiff_t stride;
  const T* lanes;
  size_t inner, count;
  bool first;        // Values
  const T* rescale;  // Values, [lanes]
  T* max;            // Logits, [lanes]
  T* out;            // [count][lanes]
};

// The functions of one target. A shape is `vectors` wide, up to max_vectors.
template <class T>
struct Kernels {
  size_t lanes_per_vector;
  int max_vectors;
  bool fused;
  void (*logits)(int vectors, const Call<T>&);
  void (*values)(int vectors, bool skip_masked, const Call<T>&);
};
#endif
}  // namespace heed::tile_test

HWY_BEFORE_NAMESPACE();
namespace heed::tile_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

constexpr int kMaxVectors = hs::kShapes.tile_vectors;

// Logits get their row and vector added, to see that both are right.
template <class T, int C>
void LogitsOf(const Call<T>& a) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  hn::Vec<decltype(d)> max[C];
  for (size_t c = 0; c < C; ++c) max[c] = hn::Load(d, a.max + c * N);
  hs::ForTiles<hs::TileRows<C>()>(0, a.count, [&](auto rows, size_t i) HWY_ATTR {
    hs::LogitTile<rows.value, C>(d, a.lanes, C * N, a.rows + static_cast<ptrdiff_t>(i) * a.stride, a.stride, a.inner,
                                 a.out + i * C * N, max, [&](auto x, int r, int c) HWY_ATTR {
                                   const size_t row = i + static_cast<size_t>(r);
                                   return hn::Add(x, hn::Set(d, static_cast<T>(10 * row + static_cast<size_t>(c))));
                                 });
  });
  for (size_t c = 0; c < C; ++c) hn::Store(max[c], d, a.max + c * N);
}

template <class T, int C, bool kSkipMasked>
void ValuesOf(const Call<T>& a) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  hn::Vec<decltype(d)> rescale[C];
  for (size_t c = 0; c < C; ++c) rescale[c] = hn::Load(d, a.rescale + c * N);
  hs::ForTiles<hs::TileRows<C>()>(0, a.count, [&](auto rows, size_t i) HWY_ATTR {
    hs::ValueTile<rows.value, C, kSkipMasked>(d, a.lanes, C * N, a.rows + i, a.stride, a.inner, a.first, rescale,
                                              a.out + i * C * N);
  });
}

template <class T>
void Logits(int vectors, const Call<T>& a) {
  if (vectors == 1) LogitsOf<T, 1>(a);
  if (vectors == 2) LogitsOf<T, 2>(a);
  if constexpr (kMaxVectors == 4) {
    if (vectors == 3) LogitsOf<T, 3>(a);
    if (vectors == 4) LogitsOf<T, 4>(a);
  }
}

template <class T, bool kSkipMasked>
void ValuesSkipping(int vectors, const Call<T>& a) {
  if (vectors == 1) ValuesOf<T, 1, kSkipMasked>(a);
  if (vectors == 2) ValuesOf<T, 2, kSkipMasked>(a);
  if constexpr (kMaxVectors == 4) {
    if (vectors == 3) ValuesOf<T, 3, kSkipMasked>(a);
    if (vectors == 4) ValuesOf<T, 4, kSkipMasked>(a);
  }
}

template <class T>
void Values(int vectors, bool skip_masked, const Call<T>& a) {
  if (skip_masked) return ValuesSkipping<T, true>(vectors, a);
  ValuesSkipping<T, false>(vectors, a);
}

template <class T>
Kernels<T> KernelsOf() {
  return {hn::MaxLanes(hn::ScalableTag<T>()), kMaxVectors, HWY_NATIVE_FMA != 0, &Logits<T>, &Values<T>};
}

Kernels<float> KernelsF32() { return KernelsOf<float>(); }
Kernels<double> KernelsF64() { return KernelsOf<double>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::tile_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::tile_test {

HWY_EXPORT(KernelsF32);
HWY_EXPORT(KernelsF64);

namespace {

template <class T>
Kernels<T> KernelsFor(const std::string& target) {
  const size_t i = TargetIndex(TargetsUpTo(target));
  if constexpr (sizeof(T) == 4) {
    return HWY_DISPATCH_TABLE(KernelsF32)[i]();
  } else {
    return HWY_DISPATCH_TABLE(KernelsF64)[i]();
  }
}

// True if two have the same bits; any NaN equals any NaN.
template <class T>
bool Same(T a, T b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(T)) == 0;
}

// One random call of both kinds and what it should give.
template <class T>
class Check {
 public:
  Check(const Kernels<T>& kernels, int vectors, size_t inner, size_t count, uint64_t seed)
      : kernels_(kernels), vectors_(vectors), inner_(inner), count_(count),
        width_(kernels.lanes_per_vector * static_cast<size_t>(vectors)), random_(seed) {}

  void Logits() {
    const auto [k, stride] = Rows(count_, inner_);
    const Buffer q = Lanes(inner_), s = Lanes(count_), max = Lanes(1);
    for (size_t lane = 0; lane < width_; ++lane) {
      max.as<T>()[lane] = lane % 3 == 0 ? T{1000} : -std::numeric_limits<T>::infinity();
    }
    std::vector<T> expected_max(max.as<T>(), max.as<T>() + width_);
    kernels_.logits(vectors_, {k.template as<T>(), stride, q.as<T>(), inner_, count_,
                               /*first=*/false, nullptr, max.as<T>(), s.as<T>()});
    for (size_t r = 0; r < count_; ++r) {
      for (size_t lane = 0; lane < width_; ++lane) {
        T sum = 0;
        for (size_t e = 0; e < inner_; ++e) {
          sum = Fused(k.template as<T>()[static_cast<ptrdiff_t>(r) * stride + static_cast<ptrdiff_t>(e)],
                      q.as<T>()[e * width_ + lane], sum);
        }
        sum += static_cast<T>(10 * r + lane / kernels_.lanes_per_vector);
        ASSERT_TRUE(Same(s.as<T>()[r * width_ + lane], sum)) << "row " << r << " lane " << lane;
        expected_max[lane] = std::max(expected_max[lane], sum);
      }
    }
    for (size_t lane = 0; lane < width_; ++lane) {
      ASSERT_EQ(max.as<T>()[lane], expected_max[lane]) << "lane " << lane;
    }
  }

  void Values(bool first, bool skip_masked) {
    const auto [v, stride] = Rows(inner_, count_);
    const Buffer p = Lanes(inner_), o = Lanes(count_), rescale = Lanes(1);
    for (size_t j = 0; j < inner_; ++j) {
      // Masked pairs and values that are not finite; where masks are not told
      // apart, a weight of -0 is a weight.
      for (size_t lane = 0; lane < width_; ++lane) {
        T& weight = p.as<T>()[j * width_ + lane];
        weight = random_.Chance(0.2) ? T{-0.0} : std::abs(weight);
      }
      if (skip_masked && count_ > 0 && random_.Chance(0.2)) {
        v.template as<T>()[static_cast<ptrdiff_t>(j) * stride] =
            random_.Chance(0.5) ? std::numeric_limits<T>::quiet_NaN() : std::numeric_limits<T>::infinity();
      }
    }
    if (first) o.FillConstant(std::numeric_limits<double>::quiet_NaN());
    const std::vector<T> before(o.as<T>(), o.as<T>() + count_ * width_);
    kernels_.values(
        vectors_, skip_masked,
        {v.template as<T>(), stride, p.as<T>(), inner_, count_, first, rescale.as<T>(), nullptr, o.as<T>()});
    for (size_t r = 0; r < count_; ++r) {
      for (size_t lane = 0; lane < width_; ++lane) {
        T sum = first ? 0 : before[r * width_ + lane] * rescale.as<T>()[lane];
        for (size_t j = 0; j < inner_; ++j) {
          const T weight = p.as<T>()[j * width_ + lane];
          if (skip_masked && std::signbit(weight)) continue;
          sum = Fused(v.template as<T>()[static_cast<ptrdiff_t>(j) * stride + static_cast<ptrdiff_t>(r)], weight, sum);
        }
        ASSERT_TRUE(Same(o.as<T>()[r * width_ + lane], sum))
            << "row " << r << " lane " << lane << ": " << o.as<T>()[r * width_ + lane] << ", expected " << sum;
      }
    }
  }

 private:
  static constexpr DType kType = sizeof(T) == 4 ? DType::kF32 : DType::kF64;

  T Fused(T a, T b, T c) const { return kernels_.fused ? std::fma(a, b, c) : a * b + c; }

  // A matrix of scalars with any stride, the reverse order among them.
  std::pair<Buffer, ptrdiff_t> Rows(size_t rows, size_t columns) {
    const int64_t n = static_cast<int64_t>(columns);
    const int64_t stride = random_.Pick<int64_t>({n, n, n + 3, -n, 2 * n + 1});
    const int64_t sizes[] = {static_cast<int64_t>(rows), n};
    const int64_t strides[] = {stride, 1};
    const Buffer buffer(kType, sizes, strides, random_.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard);
    buffer.FillNormal(random_.Word());
    return {buffer, stride};
  }

  // Whole vectors, which leaves them aligned before a guard page.
  Buffer Lanes(size_t rows) {
    const Buffer buffer(kType, {static_cast<int64_t>(rows), static_cast<int64_t>(width_)});
    buffer.FillNormal(random_.Word());
    return buffer;
  }

  const Kernels<T> kernels_;
  const int vectors_;
  const size_t inner_, count_, width_;
  Random random_;
};

template <class T>
void CheckAllShapes() {
  for (const std::string& target : AvailableTargets()) {
    const Kernels<T> kernels = KernelsFor<T>(target);
    for (int vectors = 1; vectors <= kernels.max_vectors; ++vectors) {
      uint64_t seed = 1;
      for (const size_t inner : {0, 1, 2, 3, 7, 64, 65}) {
        // 15 rows take tiles of 8, 4, 2 and 1, or of 4, 2 and 1.
        for (const size_t count : {0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17}) {
          SCOPED_TRACE(target + " vectors " + std::to_string(vectors) + " inner " + std::to_string(inner) + " count " +
                       std::to_string(count));
          Check<T> check(kernels, vectors, inner, count, seed++);
          check.Logits();
          for (const bool first : {false, true}) {
            check.Values(first, /*skip_masked=*/false);
            check.Values(first, /*skip_masked=*/true);
          }
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(TileTest, F32TilesAreChainsOfFusedProducts) { CheckAllShapes<float>(); }
TEST(TileTest, F64TilesAreChainsOfFusedProducts) { CheckAllShapes<double>(); }

}  // namespace
}  // namespace heed::tile_test
#endif  // HWY_ONCE
