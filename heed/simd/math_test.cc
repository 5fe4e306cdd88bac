// exp2, exp and tanh against wider arithmetic: the error bounds that math-inl.h documents, on every SIMD target, and
// special values.
//
// f32 covers every 1009th bit pattern, f64 random ones. With HEED_TEST_ALL_FLOATS = 1, as in scripts/test --deep, f32
// covers all and f64 256 times as many (minutes).
#include "heed/core/targets.h"
// After targets.h:
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/math_test.cc"  // this file
#include "hwy/foreach_target.h"                      // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::math_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

// out[i] = f(in[i]); n is a multiple of every vector length.
template <class T, class F>
void Map(const T* in, T* out, size_t n, const F& f) {
  const hn::ScalableTag<T> d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::StoreU(f(d, hn::LoadU(d, in + i)), d, out + i);
  }
}

template <class T>
void MapExp2(const T* in, T* out, size_t n) {
  Map(in, out, n, [](auto d, auto x) HWY_ATTR { return hs::Exp2(d, x); });
}
template <class T>
void MapExp2NonPositive(const T* in, T* out, size_t n) {  // of -x above 127
  Map(in, out, n, [](auto d, auto x) HWY_ATTR {
    const auto is_above = hn::Gt(x, hn::Set(d, T{127}));
    return hs::Exp2NonPositive(d, hn::IfThenElse(is_above, hn::Neg(x), x));
  });
}
template <class T>
void MapExp(const T* in, T* out, size_t n) {
  Map(in, out, n, [](auto d, auto x) HWY_ATTR { return hs::Exp(d, x); });
}
template <class T>
void MapExpNonPositive(const T* in, T* out, size_t n) {  // of -|x|
  Map(in, out, n, [](auto d, auto x) HWY_ATTR { return hs::ExpNonPositive(d, hn::Neg(hn::Abs(x))); });
}
template <class T>
void MapTanh(const T* in, T* out, size_t n) {
  Map(in, out, n, [](auto d, auto x) HWY_ATTR { return hs::Tanh(d, x); });
}

template <class T>
void MapExpm1(const T* in, T* out, size_t n) {  // expm1 of -|x|
  Map(in, out, n, [](auto d, auto x) HWY_ATTR { return hs::Expm1(d, hn::Neg(hn::Abs(x))); });
}

void Exp2F32(const float* in, float* out, size_t n) { MapExp2(in, out, n); }
void Exp2F64(const double* in, double* out, size_t n) { MapExp2(in, out, n); }
void Exp2NonPositiveF32(const float* in, float* out, size_t n) { MapExp2NonPositive(in, out, n); }
void Exp2NonPositiveF64(const double* in, double* out, size_t n) { MapExp2NonPositive(in, out, n); }
void ExpF32(const float* in, float* out, size_t n) { MapExp(in, out, n); }
void ExpF64(const double* in, double* out, size_t n) { MapExp(in, out, n); }
void ExpNonPositiveF32(const float* in, float* out, size_t n) { MapExpNonPositive(in, out, n); }
void ExpNonPositiveF64(const double* in, double* out, size_t n) { MapExpNonPositive(in, out, n); }
void TanhF32(const float* in, float* out, size_t n) { MapTanh(in, out, n); }
void TanhF64(const double* in, double* out, size_t n) { MapTanh(in, out, n); }
void Expm1F32(const float* in, float* out, size_t n) { MapExpm1(in, out, n); }
void Expm1F64(const double* in, double* out, size_t n) { MapExpm1(in, out, n); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::math_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::math_test {

HWY_EXPORT(Exp2F32);
HWY_EXPORT(Exp2F64);
HWY_EXPORT(Exp2NonPositiveF32);
HWY_EXPORT(Exp2NonPositiveF64);
HWY_EXPORT(ExpF32);
HWY_EXPORT(ExpF64);
HWY_EXPORT(ExpNonPositiveF32);
HWY_EXPORT(ExpNonPositiveF64);
HWY_EXPORT(TanhF32);
HWY_EXPORT(TanhF64);
HWY_EXPORT(Expm1F32);
HWY_EXPORT(Expm1F64);

namespace {

enum class Kind { kExp2, kExp2NonPositive, kExp, kExpNonPositive, kTanh, kExpm1 };

constexpr const char* kNames[] = {"Exp2", "Exp2NonPositive", "Exp", "ExpNonPositive", "Tanh", "Expm1"};
// The table of math-inl.h, but for tanh in f64, which exceeds its 4 ulp there.
template <class T>
constexpr double MaxUlp(Kind kind) {
  if (kind == Kind::kTanh || kind == Kind::kExpm1) return sizeof(T) == 8 ? 5 : 4;
  return sizeof(T) == 8 ? 2 : 3;
}

bool AllFloats() {
  const char* all = std::getenv("HEED_TEST_ALL_FLOATS");
  return all != nullptr && std::string(all) == "1";
}

template <class T>
using Wide = std::conditional_t<sizeof(T) == 4, double, long double>;

template <class T>
void Compute(Kind kind, const std::string& target, const T* in, T* out, size_t n) {
  const size_t i = TargetIndex(TargetsUpTo(target));
  if constexpr (sizeof(T) == 4) {
    switch (kind) {
      case Kind::kExp2: return HWY_DISPATCH_TABLE(Exp2F32)[i](in, out, n);
      case Kind::kExp2NonPositive: return HWY_DISPATCH_TABLE(Exp2NonPositiveF32)[i](in, out, n);
      case Kind::kExp: return HWY_DISPATCH_TABLE(ExpF32)[i](in, out, n);
      case Kind::kExpNonPositive: return HWY_DISPATCH_TABLE(ExpNonPositiveF32)[i](in, out, n);
      case Kind::kTanh: return HWY_DISPATCH_TABLE(TanhF32)[i](in, out, n);
      default: return HWY_DISPATCH_TABLE(Expm1F32)[i](in, out, n);
    }
  } else {
    switch (kind) {
      case Kind::kExp2: return HWY_DISPATCH_TABLE(Exp2F64)[i](in, out, n);
      case Kind::kExp2NonPositive: return HWY_DISPATCH_TABLE(Exp2NonPositiveF64)[i](in, out, n);
      case Kind::kExp: return HWY_DISPATCH_TABLE(ExpF64)[i](in, out, n);
      case Kind::kExpNonPositive: return HWY_DISPATCH_TABLE(ExpNonPositiveF64)[i](in, out, n);
      case Kind::kTanh: return HWY_DISPATCH_TABLE(TanhF64)[i](in, out, n);
      default: return HWY_DISPATCH_TABLE(Expm1F64)[i](in, out, n);
    }
  }
}

template <class W>
W Expected(Kind kind, W x) {
  switch (kind) {
    case Kind::kExp2: return std::exp2(x);
    case Kind::kExp2NonPositive: return std::exp2(x > 127 ? -x : x);
    case Kind::kExp: return std::exp(x);
    case Kind::kExpNonPositive: return std::exp(-std::abs(x));
    case Kind::kTanh: return std::tanh(x);
    default: return std::expm1(-std::abs(x));
  }
}

// Errors of one function on every target, with and without the kernels' mode of flushing subnormal numbers to zero.
template <class T>
class Sweep {
  using W = Wide<T>;
  using Limits = std::numeric_limits<T>;
  static constexpr size_t kBatch = 1 << 14;

 public:
  explicit Sweep(Kind kind) : kind_(kind), worst_(2 * AvailableTargets().size()) {}

  void Add(T x) {
    in_[size_++] = x;
    if (size_ == kBatch) Flush();
  }

  // Prints the table and checks it.
  void Finish() {
    Flush();
    size_t i = 0;
    for (const std::string& target : AvailableTargets()) {
      for (const bool flush : {false, true}) {
        const Worst& w = worst_[i++];
        const std::string name = std::string(kNames[static_cast<int>(kind_)]) + (sizeof(T) == 4 ? "_f32_" : "_f64_") +
                                 target + (flush ? "_flush" : "");
        std::printf("  %-22s max %.3f ulp at %.17g, of %lld values\n", name.c_str(), static_cast<double>(w.ulp),
                    static_cast<double>(w.at), static_cast<long long>(count_));
        testing::Test::RecordProperty(name, std::to_string(static_cast<double>(w.ulp)));
        EXPECT_LE(w.ulp, MaxUlp<T>(kind_)) << name << " at " << w.at;
        EXPECT_EQ(w.wrong, 0) << name << ", the last one at " << w.wrong_at;
      }
    }
  }

 private:
  struct Worst {
    W ulp = 0;  // of normal results
    T at = 0;
    int64_t wrong = 0;  // NaN, subnormal or overflowing results
    T wrong_at = 0;
  };

  void Flush() {
    count_ += static_cast<int64_t>(size_);
    std::fill(in_.begin() + static_cast<ptrdiff_t>(size_), in_.end(), T{0});
    for (size_t i = 0; i < size_; ++i) {
      const W top = std::ldexp(W{1}, Limits::max_exponent);
      W& e = expected_[i] = Expected<W>(kind_, in_[i]);
      e = std::min(e, top);
      int exponent = 0;
      std::frexp(e, &exponent);
      per_ulp_[i] = std::ldexp(W{1}, Limits::digits - exponent);
    }
    size_t i = 0;
    for (const std::string& target : AvailableTargets()) {
      Compute(kind_, target, in_.data(), out_.data(), kBatch);
      Judge(worst_[i++], /*flush=*/false);
      {
        const os::ScopedFloatControl float_control;
        Compute(kind_, target, in_.data(), out_.data(), kBatch);
      }
      Judge(worst_[i++], /*flush=*/true);
    }
    size_ = 0;
  }

  void Judge(Worst& worst, bool flush) const {
    const W bound = MaxUlp<T>(kind_);
    const W top = std::ldexp(W{1}, Limits::max_exponent);
    // The largest result that a last rounding may flush. tanh's quotient has a residual, far smaller than the result,
    // which is flushed first.
    const W smallest = Limits::min() * (!flush                 ? W{1}
                                        : kind_ == Kind::kTanh ? W{1} / Limits::epsilon()
                                                               : 1 + 8 * W{Limits::epsilon()});
    for (size_t i = 0; i < size_; ++i) {
      const W e = expected_[i];
      const W got = std::isinf(out_[i]) ? std::copysign(top, W{out_[i]}) : W{out_[i]};
      const W error = std::abs(got - e);
      bool ok = true;
      if (std::isnan(e)) {
        ok = std::isnan(got);
      } else if (std::abs(e) < smallest) {
        ok = got == 0 || error <= (bound + W{0.5}) * Limits::denorm_min() || (flush && error <= std::abs(e) / 1024);
      } else if (!(error * per_ulp_[i] <= worst.ulp)) {  // NaN comes here too
        worst.ulp = error * per_ulp_[i];
        worst.at = in_[i];
        ok = !std::isnan(error);
      }
      if (!ok) {
        ++worst.wrong;
        worst.wrong_at = in_[i];
      }
    }
  }

  const Kind kind_;
  std::vector<Worst> worst_;
  std::vector<T> in_ = std::vector<T>(kBatch), out_ = std::vector<T>(kBatch);
  std::vector<W> expected_ = std::vector<W>(kBatch), per_ulp_ = std::vector<W>(kBatch);
  size_t size_ = 0;
  int64_t count_ = 0;
};

class Math : public testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Functions, Math,
                         testing::Values(Kind::kExp2, Kind::kExp2NonPositive, Kind::kExp, Kind::kExpNonPositive,
                                         Kind::kTanh, Kind::kExpm1),
                         [](const auto& value) { return kNames[static_cast<int>(value.param)]; });

TEST_P(Math, F32IsWithinItsBoundOverAllFloats) {
  const uint64_t step = AllFloats() ? 1 : 1009;
  Sweep<float> sweep(GetParam());
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += step) {
    sweep.Add(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  // The range in which results are neither constant nor infinite.
  Random random(1);
  for (int i = 0; i < 1 << 19; ++i) {
    sweep.Add(static_cast<float>(random.Uniform(-160, 135)));
    sweep.Add(static_cast<float>(random.Uniform(-1, 1)));
  }
  sweep.Finish();
}

TEST_P(Math, F64IsWithinItsBoundOverRandomNumbers) {
  Sweep<double> sweep(GetParam());
  sweep.Add(0.0077908874326605782);  // 4.56 ulp in tanh, the worst of 2^28
  Random random(2);
  for (int i = 0; i < (AllFloats() ? 1 << 26 : 1 << 18); ++i) {
    const uint64_t high = random.Word();
    sweep.Add(std::bit_cast<double>(high << 32 | random.Word()));
    sweep.Add(random.Uniform(-1080, 1030));
    sweep.Add(random.Uniform(-20, 20));
    sweep.Add(random.Uniform(-1, 1) * std::exp2(-random.Uniform(0, 60)));
  }
  sweep.Finish();
}

// Puts every special argument in every lane, among ordinary ones.
template <class T>
void ForSpecial(Kind kind, T x, void (*check)(T x, T y)) {
  for (const std::string& target : AvailableTargets()) {
    SCOPED_TRACE(target);
    for (const bool flush : {false, true}) {
      SCOPED_TRACE(flush ? "subnormals flushed" : "subnormals kept");
      T in[64], out[64], ordinary[64];
      for (size_t i = 0; i < 64; ++i) in[i] = T{0.25};
      Compute(kind, target, in, ordinary, 64);
      for (size_t i = 0; i < 64; i += 3) in[i] = x;
      {
        const os::ScopedFloatControl float_control;
        if (flush) Compute(kind, target, in, out, 64);
      }
      if (!flush) Compute(kind, target, in, out, 64);
      for (size_t i = 0; i < 64; ++i) {
        if (i % 3 == 0) {
          check(x, out[i]);
        } else {
          EXPECT_EQ(out[i], ordinary[i]) << "beside " << x;
        }
      }
    }
  }
}

template <class T>
void CheckSpecialValues() {
  using Limits = std::numeric_limits<T>;
  constexpr T kInf = Limits::infinity();
  const auto is_nan = [](T, T y) { EXPECT_TRUE(std::isnan(y)) << y; };
  const auto is_inf = [](T x, T y) { EXPECT_TRUE(std::isinf(y) && y > 0) << x; };
  const auto is_zero = [](T x, T y) { EXPECT_TRUE(y == 0 && !std::signbit(y)) << x << " gives " << y; };
  const auto is_plus_one = [](T x, T y) { EXPECT_EQ(y, 1) << x; };
  const auto is_minus_one = [](T x, T y) { EXPECT_EQ(y, -1) << x; };
  for (const Kind kind :
       {Kind::kExp2, Kind::kExp2NonPositive, Kind::kExp, Kind::kExpNonPositive, Kind::kTanh, Kind::kExpm1}) {
    SCOPED_TRACE(kNames[static_cast<int>(kind)]);
    for (const T nan : {Limits::quiet_NaN(), -Limits::quiet_NaN()}) {
      ForSpecial<T>(kind, nan, is_nan);
    }
  }
  for (const Kind kind : {Kind::kExp2, Kind::kExp}) {
    SCOPED_TRACE(kNames[static_cast<int>(kind)]);
    ForSpecial<T>(kind, kInf, is_inf);
    ForSpecial<T>(kind, Limits::max(), is_inf);
    ForSpecial<T>(kind, T{Limits::max_exponent}, is_inf);
    const T far = T{-4} * Limits::max_exponent;
    for (const T x : {-kInf, Limits::lowest(), T{-1e30}, far}) {
      ForSpecial<T>(kind, x, is_zero);
    }
    for (const T x : {T{0}, Limits::denorm_min(), Limits::min()}) {
      ForSpecial<T>(kind, x, is_plus_one);
      ForSpecial<T>(kind, -x, is_plus_one);
    }
  }
  for (const T x : {kInf, Limits::max(), T{1e30}, T{4} * Limits::max_exponent}) {
    ForSpecial<T>(Kind::kExp2NonPositive, x, is_zero);
    ForSpecial<T>(Kind::kExpNonPositive, x, is_zero);
  }
  for (const T x : {T{0}, Limits::denorm_min(), Limits::min()}) {
    ForSpecial<T>(Kind::kExp2NonPositive, x, is_plus_one);
    ForSpecial<T>(Kind::kExpNonPositive, x, is_plus_one);
  }
  // Just below and at overflow.
  ForSpecial<T>(Kind::kExp2, std::nextafter(T{Limits::max_exponent}, T{0}),
                [](T x, T y) { EXPECT_TRUE(std::isfinite(y)) << x; });
  for (const T x : {kInf, Limits::max(), T{1e10}, T{25}}) {
    ForSpecial<T>(Kind::kTanh, x, is_plus_one);
    ForSpecial<T>(Kind::kTanh, -x, is_minus_one);
  }
  for (const T x : {T{0}, T{-0.0}}) ForSpecial<T>(Kind::kTanh, x, is_zero);
  for (const T x : {kInf, Limits::max(), T{100}}) {
    ForSpecial<T>(Kind::kExpm1, x, is_minus_one);
  }
}

TEST(MathTest, F32SpecialValues) { CheckSpecialValues<float>(); }
TEST(MathTest, F64SpecialValues) { CheckSpecialValues<double>(); }

}  // namespace
}  // namespace heed::math_test
#endif  // HWY_ONCE
