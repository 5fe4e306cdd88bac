// Products of a few rows with many stored ones are the same chains as register tiles, bit
// for bit: every number of rows and storage type, on every SIMD target, between guard pages.
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
#define HWY_TARGET_INCLUDE "heed/simd/row_tile_test.cc"  // this file
#include "hwy/foreach_target.h"                          // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/row_tile-inl.h"

namespace heed::row_tile_test {
#ifndef HEED_SIMD_ROW_TILE_TEST_ONCE
#define HEED_SIMD_ROW_TILE_TEST_ONCE
// Rows stored as `dtype`, `count` of them and `ahead` more, of `columns`; `few` is [.][lanes].
template <class T>
struct Call {
  DType dtype;
  const void* rows;
  ptrdiff_t stride;
  size_t count, ahead, columns;
  const T* few;
  bool clear;       // Sums
  const T* factor;  // Sums, [lanes]
  T* out;           // Dots: [count][lanes]; Sums: [few][row]
  ptrdiff_t out_row;
};

template <class T>
struct Kernels {
  size_t lanes;
  bool fused;
  void (*dots)(int few, const Call<T>&);
  void (*sums)(int few, bool skip_masked, const Call<T>&);
};
#endif
}  // namespace heed::row_tile_test

HWY_BEFORE_NAMESPACE();
namespace heed::row_tile_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

// f(rows, std::integral_constant<int, R>) for the storage type and a number of rows.
template <class T, class F>
void WithShape(int few, const Call<T>& a, const F& f) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  hs::WithStorage<T>(a.dtype, [&](auto stored) {
    using S = decltype(stored);
    const hs::StoredRows<S> rows = {{static_cast<const S*>(a.rows), a.stride, SIZE_MAX}, a.count, a.ahead};
    if (few == 1) f(rows, std::integral_constant<int, 1>());
    if (few == 2) f(rows, std::integral_constant<int, 2>());
    if constexpr (N >= 4) {
      if (few == 4) f(rows, std::integral_constant<int, 4>());
    }
    if constexpr (N >= 8) {
      if (few == 8) f(rows, std::integral_constant<int, 8>());
    }
  });
}

template <class T>
void Dots(int few, const Call<T>& a) {
  WithShape(few, a, [&](const auto& rows, auto r) {
    hs::DotRows<r.value>(hn::ScalableTag<T>(), rows, a.columns, a.few, a.out);
  });
}

template <class T>
void Sums(int few, bool skip_masked, const Call<T>& a) {
  WithShape(few, a, [&](const auto& rows, auto r) {
    const hn::ScalableTag<T> d;
    if (skip_masked) {
      hs::SumRows<r.value, true>(d, rows, a.columns, a.few, a.clear, a.factor, a.out, a.out_row);
    } else {
      hs::SumRows<r.value, false>(d, rows, a.columns, a.few, a.clear, a.factor, a.out, a.out_row);
    }
  });
}

template <class T>
Kernels<T> KernelsOf() {
  return {hn::MaxLanes(hn::ScalableTag<T>()), HWY_NATIVE_FMA != 0, &Dots<T>, &Sums<T>};
}

Kernels<float> KernelsF32() { return KernelsOf<float>(); }
Kernels<double> KernelsF64() { return KernelsOf<double>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::row_tile_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::row_tile_test {

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
  Check(const Kernels<T>& kernels, int few, DType stored, size_t count, size_t columns, uint64_t seed)
      : kernels_(kernels), few_(few), count_(count), columns_(columns), lanes_(kernels.lanes), random_(seed) {
    const int64_t n = static_cast<int64_t>(columns);
    stride_ = random_.Pick<int64_t>({n, n, n + 3, -n, 2 * n + 1});
    // Rows beyond the last one are prefetched but not read.
    rows_ = Buffer(stored, std::vector<int64_t>{static_cast<int64_t>(count), n}, std::vector<int64_t>{stride_, 1},
                   random_.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard);
    rows_.FillNormal(random_.Word());
  }

  void Dots() {
    const Buffer x = Lanes(columns_), out = Lanes(count_);
    Call<T> call = CallOf(x);
    call.out = out.as<T>();
    kernels_.dots(few_, call);
    for (size_t j = 0; j < count_; ++j) {
      for (size_t r = 0; r < static_cast<size_t>(few_); ++r) {
        T sum = 0;
        for (size_t e = 0; e < columns_; ++e) sum = Fused(Row(j, e), At(x, e, r), sum);
        ASSERT_TRUE(Same(At(out, j, r), sum)) << "row " << j << " column " << r;
      }
    }
  }

  void Sums(bool clear, bool skip_masked) {
    const Buffer weights = Lanes(count_), factor = Lanes(1);
    const size_t row = (columns_ + lanes_ - 1) / lanes_ * lanes_;
    const Buffer out(kType, {few_, static_cast<int64_t>(row)});
    out.FillNormal(random_.Word());
    for (size_t j = 0; j < count_; ++j) {
      for (size_t r = 0; r < lanes_; ++r) {
        T& weight = weights.as<T>()[j * lanes_ + r];
        weight = random_.Chance(0.2) ? T{-0.0} : std::abs(weight);
      }
      if (skip_masked && columns_ > 0 && random_.Chance(0.2)) {
        rows_.Set({static_cast<int64_t>(j), 0}, random_.Chance(0.5) ? std::numeric_limits<double>::quiet_NaN()
                                                                    : std::numeric_limits<double>::infinity());
      }
    }
    if (clear) out.FillConstant(std::numeric_limits<double>::quiet_NaN());
    const std::vector<T> before(out.as<T>(), out.as<T>() + static_cast<size_t>(few_) * row);
    Call<T> call = CallOf(weights);
    call.clear = clear;
    call.factor = factor.as<T>();
    call.out = out.as<T>();
    call.out_row = static_cast<ptrdiff_t>(row);
    kernels_.sums(few_, skip_masked, call);
    for (size_t r = 0; r < static_cast<size_t>(few_); ++r) {
      for (size_t e = 0; e < columns_; ++e) {
        T sum = clear ? 0 : before[r * row + e] * factor.as<T>()[r];
        for (size_t j = 0; j < count_; ++j) {
          const T weight = At(weights, j, r);
          if (skip_masked && std::signbit(weight)) continue;
          sum = Fused(Row(j, e), weight, sum);
        }
        ASSERT_TRUE(Same(out.as<T>()[r * row + e], sum)) << "row " << r << " column " << e;
      }
    }
  }

 private:
  static constexpr DType kType = sizeof(T) == 4 ? DType::kF32 : DType::kF64;

  T Fused(T a, T b, T c) const { return kernels_.fused ? std::fma(a, b, c) : a * b + c; }

  T Row(size_t j, size_t e) const {
    return static_cast<T>(rows_.Get({static_cast<int64_t>(j), static_cast<int64_t>(e)}));
  }
  T At(const Buffer& buffer, size_t row, size_t lane) const { return buffer.as<T>()[row * lanes_ + lane]; }

  Call<T> CallOf(const Buffer& few) {
    Call<T> call = {};
    call.dtype = rows_.view().dtype();
    call.rows = rows_.view().data();
    call.stride = static_cast<ptrdiff_t>(stride_);
    call.count = count_;
    call.ahead = random_.Pick<size_t>({0, 1, 7, 1000});
    call.columns = columns_;
    call.few = few.as<T>();
    return call;
  }

  // Whole vectors, which leaves them aligned before a guard page.
  Buffer Lanes(size_t rows) {
    const Buffer buffer(kType, {static_cast<int64_t>(rows), static_cast<int64_t>(lanes_)});
    buffer.FillNormal(random_.Word());
    return buffer;
  }

  const Kernels<T> kernels_;
  const int few_;
  const size_t count_, columns_, lanes_;
  int64_t stride_ = 0;
  Buffer rows_;
  Random random_;
};

template <class T>
void CheckAllShapes(std::initializer_list<DType> stored) {
  for (const std::string& target : AvailableTargets()) {
    const Kernels<T> kernels = KernelsFor<T>(target);
    uint64_t seed = 1;
    for (const int few : {1, 2, 4, 8}) {
      if (static_cast<size_t>(few) > kernels.lanes) continue;
      for (const DType dtype : stored) {
        for (const size_t count : {0, 1, 3, 16, 17, 64, 67}) {
          for (const size_t columns : {1, 5, 16, 32, 33, 64, 71, 160}) {
            SCOPED_TRACE(target + " rows " + std::to_string(few) + " " + Name(dtype) + " count " +
                         std::to_string(count) + " columns " + std::to_string(columns));
            Check<T> check(kernels, few, dtype, count, columns, seed++);
            check.Dots();
            for (const bool clear : {false, true}) {
              check.Sums(clear, /*skip_masked=*/false);
              check.Sums(clear, /*skip_masked=*/true);
            }
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(RowTileTest, F32ProductsAreChainsOfFusedProducts) {
  CheckAllShapes<float>({DType::kF32, DType::kBF16, DType::kF16});
}
TEST(RowTileTest, F64ProductsAreChainsOfFusedProducts) { CheckAllShapes<double>({DType::kF64}); }

}  // namespace
}  // namespace heed::row_tile_test
#endif  // HWY_ONCE
