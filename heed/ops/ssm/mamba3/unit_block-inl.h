// One block of tokens of one unit of mamba3: rotations, the rows of the engine, and the gradients of both.
//
// Compiled once per SIMD target.
#if defined(HEED_OPS_SSM_MAMBA3_UNIT_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_SSM_MAMBA3_UNIT_BLOCK_INL_H_
#undef HEED_OPS_SSM_MAMBA3_UNIT_BLOCK_INL_H_
#else
#define HEED_OPS_SSM_MAMBA3_UNIT_BLOCK_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numbers>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/ops/ssm/mamba3/mamba3_kernels_internal.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::mamba3::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class T>
HWY_INLINE T* As(void* p) {
  return static_cast<T*>(p);
}

// The row of a token in a tensor [B, T, R, heads, ...].
template <class S>
HWY_INLINE S* RowOf(const ConstTensorView& t, const Unit& u, int64_t token, int64_t r, int64_t head) {
  const int64_t at = u.batch * t.stride(0) + token * t.stride(1) + r * t.stride(2) + head * t.stride(3);
  return const_cast<S*>(static_cast<const S*>(t.data())) + at;
}

// The offset of an element of [B, T, HV], or of a row of [B, T, HV, P].
HWY_INLINE int64_t OffsetOf(const ConstTensorView& t, const Unit& u, int64_t token) {
  return u.batch * t.stride(0) + token * t.stride(1) + u.head * t.stride(2);
}
HWY_INLINE double NumberOf(const ConstTensorView& t, const Unit& u, int64_t token) {
  return LoadAsDouble(t.dtype(), t.data(), OffsetOf(t, u, token));
}
HWY_INLINE void StoreNumber(const TensorView& t, const Unit& u, int64_t token, double x) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), OffsetOf(t, u, token), x);
}

// Element i of a state [B, HV, P], of row r of [B, R, HV, K], or (i, j) of [B, HV, K, V].
template <class T>
HWY_INLINE T* AngleAt(const ConstTensorView& t, const Unit& u, int64_t i) {
  return const_cast<T*>(static_cast<const T*>(t.data())) + u.sequence * t.stride(0) + u.head * t.stride(1) +
         i * t.stride(2);
}
template <class T>
HWY_INLINE T* LastAt(const ConstTensorView& t, const Unit& u, int64_t r, int64_t i) {
  return const_cast<T*>(static_cast<const T*>(t.data())) + u.sequence * t.stride(0) + r * t.stride(1) +
         u.head * t.stride(2) + i * t.stride(3);
}
template <class T>
HWY_INLINE T* StateAt(const ConstTensorView& t, const Unit& u, int64_t i, int64_t j) {
  return const_cast<T*>(static_cast<const T*>(t.data())) + u.sequence * t.stride(0) + u.head * t.stride(1) +
         i * t.stride(2) + j * t.stride(3);
}

template <class D, class S>
HWY_INLINE hn::Vec<D> LoadRow(D d, const S* from, size_t n) {
  return n >= hn::MaxLanes(d) ? hs::LoadWide(d, from) : hs::LoadWideN(d, from, n);
}

// Conversions between T and double, of as many elements as a vector of doubles has.
template <class T, class D>
HWY_INLINE hn::Vec<D> PromoteToDouble(D dd, hn::Vec<hn::Rebind<T, D>> x) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return x;
  } else {
    return hn::PromoteTo(dd, x);
  }
}
template <class T, class D>
HWY_INLINE hn::Vec<hn::Rebind<T, D>> RoundDouble(hn::Vec<D> x) {
  const hn::Rebind<T, D> d;
  if constexpr (sizeof(T) == sizeof(double)) {
    return x;
  } else {
    return hn::DemoteTo(d, x);
  }
}

// [cos, cos] and [-sin, sin] for each pair of channels, so that a rotation is x .* first + reversed(x) .* second, with
// the elements of each pair reversed, and the one back has - instead of +.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> Rotated(D d, hn::Vec<D> x, const T* rotation, int64_t half) {
  return hn::MulAdd(hn::Reverse2(d, x), hn::Load(d, rotation + half), hn::Mul(x, hn::Load(d, rotation)));
}
template <class D, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> RotatedBack(D d, hn::Vec<D> x, const T* rotation, int64_t half) {
  return hn::NegMulAdd(hn::Reverse2(d, x), hn::Load(d, rotation + half), hn::Mul(x, hn::Load(d, rotation)));
}

// Rows of one head are far apart, so that they are prefetched some tokens ahead.
constexpr int64_t kAhead = 8;

template <class S>
HWY_INLINE void PrefetchRow(const S* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(S))) hwy::Prefetch(row + i);
}

template <class T>
HWY_INLINE T DotOf(const T* a, const T* b, int64_t size) {
  const hn::ScalableTag<T> d;
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < size; i += static_cast<int64_t>(hn::MaxLanes(d))) {
    sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
  }
  return hn::ReduceSum(d, sum);
}

// The factor of (q_tr . k_tr') v_tr' in o_tr beside those of the recurrence.
template <class T>
HWY_INLINE T Factor(int64_t r, int64_t other, T gamma, T beta) {
  return other <= r ? -beta : gamma;
}

template <class T>
class UnitBlock {
 public:
  UnitBlock(const Elements& e, int64_t unit, int64_t b)
      : e_(e), u_(e.units[static_cast<size_t>(unit)]), unit_(unit), first_(b * kBlock),
        n_(std::max<int64_t>(0, std::min(kBlock, u_.count - first_))), key_head_(u_.head / e.group) {}

  // The memory of a task: rotation, angles, sums over the tokens of a block.
  struct Buffers {
    T *rotation, *angles, *products, *factors, *crossed, *sums;
    int64_t LayOut(const Elements& e, void* base) {
      Carver carver(base);
      carver.Next(rotation, 4 * e.angle_row);
      carver.Next(angles, e.angle_row);
      carver.Next(products, e.R * e.R);
      carver.Next(factors, e.R * e.R);
      carver.Next(crossed, 2 * e.angle_row + e.key_row);
      carver.Next(sums, 2 * e.R * e.key_row);
      return carver.bytes();
    }
  };

  HWY_ATTR void Prepare(const Buffers& scratch, bool reads, bool backward) const {
    if (n_ == 0) return;
    T delta[kBlock + kLanes];
    Gates(delta, backward);
    double* angle = e_.angle + unit_ * e_.angle_row;
    if (e_.angles != nullptr) {  // the backward pass: written without reads, then read
      double* kept = e_.angles + (unit_ * e_.slots + first_ / kBlock) * e_.angle_row;
      std::memcpy(reads ? angle : kept, reads ? kept : angle, static_cast<size_t>(e_.angle_row) * sizeof(double));
      if (!reads && first_ + n_ == u_.count) return;
    }
    if (e_.before != 0) WriteBefore(delta[0]);
    hs::WithStorage<T>(e_.in.q.dtype(), [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      for (int64_t t = 0; t < n_; ++t) {
        if (t + kAhead < n_) {
          if (reads) PrefetchRows<S>(e_.in.q, t + kAhead, key_head_, e_.K);
          PrefetchRows<S>(e_.in.k, t + kAhead, key_head_, e_.K);
          PrefetchRows<S>(e_.in.v, t + kAhead, u_.head, e_.V);
          const void* theta = e_.in.theta.data();
          const int64_t at = OffsetOf(e_.in.theta, u_, Token(t + kAhead));
          const auto size = static_cast<int64_t>(SizeOf(e_.in.theta.dtype()));
          PrefetchRow(static_cast<const char*>(theta) + at * size, e_.P * size);
        }
        T* rotation = backward ? Rotation(t) : scratch.rotation;
        Rotate(Token(t), delta[t], angle, scratch.angles, rotation);
        for (int64_t r = 0; r < e_.R; ++r) {
          if (reads) Load<S>(e_.in.q, t, r, e_.q_bias, rotation, e_.q);
          Load<S>(e_.in.k, t, r, e_.k_bias, rotation, e_.k);
          const S* from = RowOf<S>(e_.in.v, u_, Token(t), r, u_.head);
          T* to = ValueRow(e_.v, t, r);
          for (int64_t j = 0; j < e_.value_row; j += kLanes) {
            hn::Store(j < e_.V ? LoadRow(d_, from + j, Rest(e_.V, j)) : hn::Zero(d_), d_, to + j);
          }
        }
        if (!reads) continue;
        T* dots = Dots(t);
        for (int64_t r = 0; r < e_.R; ++r) {
          for (int64_t other = 0; other < e_.R; ++other) {
            dots[r * e_.R + other] = DotOf(KeyRow(e_.q, t, r), KeyRow(e_.k, t, other), e_.key_row);
          }
        }
      }
    });
  }

  HWY_ATTR void Finish() const {
    const T scale = static_cast<T>(e_.scale);
    hs::WithStorage<T>(e_.in.q.dtype(), [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      for (int64_t t = 0; t < n_; ++t) {
        const T gamma = OfToken(e_.gamma)[t], beta = OfToken(e_.beta)[t];
        if (t + kAhead < n_) PrefetchRows<S>(e_.o, t + kAhead, u_.head, e_.V);
        for (int64_t r = 0; r < e_.R; ++r) {
          S* to = RowOf<S>(e_.o, u_, Token(t), r, u_.head);
          const T *from = ValueRow(e_.o_rows, t, r), *dots = Dots(t) + r * e_.R;
          for (int64_t j = 0; j < e_.V; j += kLanes) {
            auto x = hn::Load(d_, from + j);
            for (int64_t other = 0; other < e_.R; ++other) {
              const T factor = scale * Factor(r, other, gamma, beta) * dots[other];
              x = hn::MulAdd(hn::Set(d_, factor), hn::Load(d_, ValueRow(e_.v, t, other) + j), x);
            }
            hs::StoreRounded(d_, x, to + j, Rest(e_.V, j));
          }
        }
      }
    });
  }

  HWY_ATTR void PrepareBackward() const {
    hs::WithStorage<T>(e_.in.q.dtype(), [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      for (int64_t t = 0; t < n_; ++t) {
        if (t + kAhead < n_) PrefetchRows<S>(e_.d_o, t + kAhead, u_.head, e_.V);
        for (int64_t r = 0; r < e_.R; ++r) {
          const S* from = RowOf<S>(e_.d_o, u_, Token(t), r, u_.head);
          T* to = ValueRow(e_.d_o_rows, t, r);
          for (int64_t j = 0; j < e_.value_row; j += kLanes) {
            hn::Store(j < e_.V ? LoadRow(d_, from + j, Rest(e_.V, j)) : hn::Zero(d_), d_, to + j);
          }
        }
      }
    });
  }

  HWY_ATTR void FinishBackward(const Buffers& scratch) const {
    if (n_ == 0) return;
    const T scale = static_cast<T>(e_.scale);
    const auto R = static_cast<size_t>(e_.R);
    std::memset(scratch.sums, 0, 2 * R * static_cast<size_t>(e_.key_row) * sizeof(T));
    for (int64_t t = n_; t-- > 0;) {
      const int64_t token = Token(t);
      const T gamma = OfToken(e_.gamma)[t], beta = OfToken(e_.beta)[t], delta = OfToken(e_.delta)[t];
      const bool is_last = first_ + t + 1 == u_.count;
      // factors: c_rr' scale (d_o_r . v_r'), the gradient of q_tr . k_tr'
      double d_gamma = 0, d_beta = 0;
      const T* dots = Dots(t);
      for (size_t r = 0; r < R; ++r) {
        for (size_t other = 0; other < R; ++other) {
          const auto row = static_cast<int64_t>(r), of = static_cast<int64_t>(other);
          const T product = scale * DotOf(ValueRow(e_.d_o_rows, t, row), ValueRow(e_.v, t, of), e_.value_row);
          const size_t at = r * R + other;
          scratch.factors[at] = Factor(row, of, gamma, beta) * product;
          scratch.products[at] = scale * Factor(row, of, gamma, beta) * dots[at];
          const double of_factor = static_cast<double>(dots[at]) * static_cast<double>(product);
          (other <= r ? d_beta : d_gamma) += other <= r ? -of_factor : of_factor;
        }
      }
      const double d_weight = ValueGradients(t, is_last, gamma + beta, scratch.products);
      d_gamma += d_weight;
      d_beta += d_weight;
      KeyGradients(t, is_last, scratch);
      const double d_delta = AngleGradients(token, delta, scratch.crossed);
      StoreNumber(e_.gradients.log_decay, u_, token, static_cast<double>(As<T>(e_.d_log_decay)[Row(t, 0)]));
      Complete(d_beta);
      e_.pending[unit_] = {true,
                           token,
                           static_cast<double>(delta),
                           static_cast<double>(OfToken(e_.lambda)[t]),
                           static_cast<double>(OfToken(e_.rest)[t]),
                           d_gamma,
                           d_delta};
    }
    double* sums = e_.d_biases + unit_ * 2 * e_.R * e_.key_row;
    for (int64_t i = 0; i < 2 * e_.R * e_.key_row; ++i) sums[i] += static_cast<double>(scratch.sums[i]);
  }

  // Adds the gradients of beta of the token after a block, or of the first one, to those of its dt and trap.
  void Complete(double d_beta) const {
    Pending& of = e_.pending[unit_];
    if (!of.is_set) return;
    StoreNumber(e_.gradients.dt, u_, of.token, of.lambda * of.d_gamma + of.rest * d_beta + of.d_delta);
    StoreNumber(e_.gradients.trap, u_, of.token, of.lambda * of.rest * of.delta * (of.d_gamma - d_beta));
    of.is_set = false;
  }

  // The sums of dq and dk, of staged rows [unit][...], over the heads of this key head that are in the group.
  HWY_ATTR void SumHeads(int64_t units, bool first, bool last) const {
    const struct {
      const TensorView& to;
      void *from, *sums;
    } tensors[] = {{e_.gradients.q, e_.dq, e_.sums[0]}, {e_.gradients.k, e_.dk, e_.sums[1]}};
    for (const auto& [to, from, sums] : tensors) {
      if (!to.present()) continue;
      hs::WithStorage<T>(to.dtype(), [&](auto stored) HWY_ATTR {
        using S = decltype(stored);
        for (int64_t t = 0; t < n_; ++t) {
          if (last && t + kAhead < n_) PrefetchRows<S>(to, t + kAhead, key_head_, e_.K);
          for (int64_t r = 0; r < e_.R; ++r) {
            T* kept = first && last ? nullptr : As<T>(sums) + ((first_ + t) * e_.R + r) * e_.key_row;
            S* row = RowOf<S>(to, u_, Token(t), r, key_head_);
            for (int64_t i = 0; i < e_.K; i += kLanes) {
              auto sum = first ? hn::Zero(d_) : hn::Load(d_, kept + i);
              for (int64_t unit = 0; unit < units; ++unit) {
                const T* of_head = As<T>(from) + ((unit_ + unit) * e_.rows + t * e_.R + r) * e_.key_row;
                sum = hn::Add(sum, hn::Load(d_, of_head + i));
              }
              if (last) {
                hs::StoreRounded(d_, sum, row + i, Rest(e_.K, i));
              } else {
                hn::Store(sum, d_, kept + i);
              }
            }
          }
        }
      });
    }
  }

  int64_t tokens() const { return n_; }

 private:
  using D = hn::ScalableTag<T>;
  static constexpr auto kLanes = static_cast<int64_t>(hn::MaxLanes(D()));

  static size_t Rest(int64_t size, int64_t i) { return static_cast<size_t>(std::min(kLanes, size - i)); }
  int64_t Token(int64_t t) const { return u_.first + e_.direction * (first_ + t); }
  int64_t Row(int64_t t, int64_t r) const { return unit_ * e_.rows + e_.before + t * e_.R + r; }
  T* KeyRow(void* of, int64_t t, int64_t r) const { return As<T>(of) + Row(t, r) * e_.key_row; }
  T* ValueRow(void* of, int64_t t, int64_t r) const { return As<T>(of) + Row(t, r) * e_.value_row; }
  T* OfToken(void* of) const { return As<T>(of) + unit_ * kBlock; }
  T* Dots(int64_t t) const { return As<T>(e_.dots) + (unit_ * kBlock + t) * e_.R * e_.R; }
  T* Rotation(int64_t t) const { return As<T>(e_.rotation) + (unit_ * kBlock + t) * 4 * e_.angle_row; }

  template <class S>
  HWY_INLINE void PrefetchRows(const ConstTensorView& of, int64_t t, int64_t head, int64_t size) const {
    for (int64_t r = 0; r < e_.R; ++r) PrefetchRow(RowOf<S>(of, u_, Token(t), r, head), size);
  }

  // delta of the tokens; gamma, beta, weights and log decays of the rows.
  HWY_ATTR void Gates(T* delta, bool backward) const {
    HWY_ALIGN T trap[kBlock + kLanes] = {}, lambda[kBlock + kLanes], rest[kBlock + kLanes];
    const int64_t known = std::min(n_ + 1, u_.count - first_);
    for (int64_t t = 0; t < known; ++t) {
      delta[t] = static_cast<T>(NumberOf(e_.in.dt, u_, Token(t)));
      trap[t] = static_cast<T>(NumberOf(e_.in.trap, u_, Token(t)));
    }
    for (int64_t t = 0; t < known; t += kLanes) {
      const auto x = hn::Load(d_, trap + t), one = hn::Set(d_, T{1});
      const auto small = hs::Exp(d_, hn::Neg(hn::Abs(x))), below = hn::Add(one, small);
      const auto positive = hn::Ge(x, hn::Zero(d_));
      hn::Store(hn::Div(hn::IfThenElse(positive, one, small), below), d_, lambda + t);
      hn::Store(hn::Div(hn::IfThenElse(positive, small, one), below), d_, rest + t);
    }
    T *gamma = OfToken(e_.gamma), *beta = OfToken(e_.beta);
    T *weight = As<T>(e_.weight) + Row(0, 0), *log_decay = As<T>(e_.log_decay) + Row(0, 0);
    for (int64_t t = 0; t < n_; ++t) {
      gamma[t] = lambda[t] * delta[t];
      beta[t] = t + 1 < known ? rest[t + 1] * delta[t + 1] : T{0};
      for (int64_t r = 0; r < e_.R; ++r) {
        weight[t * e_.R + r] = gamma[t] + beta[t];
        log_decay[t * e_.R + r] = r == 0 ? static_cast<T>(NumberOf(e_.in.log_decay, u_, Token(t))) : T{0};
      }
    }
    for (int64_t r = 0; r < e_.before; ++r) As<T>(e_.weight)[unit_ * e_.rows + r] = rest[0] * delta[0];
    if (!backward) return;
    const auto size = static_cast<size_t>(n_) * sizeof(T);
    std::memcpy(OfToken(e_.lambda), lambda, size);
    std::memcpy(OfToken(e_.rest), rest, size);
    std::memcpy(OfToken(e_.delta), delta, size);
  }

  // In a step the writes of the token before are rows of the block, which decay with the state.
  HWY_ATTR void WriteBefore(T /*delta*/) const {
    for (int64_t r = 0; r < e_.before; ++r) {
      const int64_t row = unit_ * e_.rows + r;
      As<T>(e_.log_decay)[row] = 0;
      std::memset(As<T>(e_.q) + row * e_.key_row, 0, static_cast<size_t>(e_.key_row) * sizeof(T));
      T *k = As<T>(e_.k) + row * e_.key_row, *v = As<T>(e_.v) + row * e_.value_row;
      for (int64_t i = 0; i < e_.key_row; ++i) k[i] = i < e_.K ? *LastAt<T>(e_.final.k, u_, r, i) : T{0};
      for (int64_t j = 0; j < e_.value_row; ++j) v[j] = j < e_.V ? *LastAt<T>(e_.final.v, u_, r, j) : T{0};
    }
  }

  // Advances the angle past a token, and computes its rotation.
  HWY_ATTR void Rotate(int64_t token, T delta, double* angle, T* reduced, T* rotation) const {
    const hn::ScalableTag<double> dd;
    const hn::Rebind<T, decltype(dd)> dt;
    constexpr auto kDoubles = static_cast<int64_t>(hn::MaxLanes(dd));
    const auto step = hn::Set(dd, static_cast<double>(delta));
    const auto period = hn::Set(dd, 2 * std::numbers::pi), inverse = hn::Set(dd, 0.5 / std::numbers::pi);
    hs::WithStorage<T>(e_.in.theta.dtype(), [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      const S* theta = static_cast<const S*>(e_.in.theta.data()) + OffsetOf(e_.in.theta, u_, token);
      for (int64_t p = 0; p < e_.P; p += kDoubles) {
        const auto lanes = static_cast<size_t>(std::min(kDoubles, e_.P - p));
        auto x = hn::MulAdd(step, PromoteToDouble<T>(dd, LoadRow(dt, theta + p, lanes)), hn::Load(dd, angle + p));
        x = hn::NegMulAdd(hn::Round(hn::Mul(x, inverse)), period, x);
        hn::Store(x, dd, angle + p);
        hn::StoreU(RoundDouble<T, decltype(dd)>(x), dt, reduced + p);
      }
    });
    for (int64_t p = 0; p < e_.P; p += kLanes) {
      auto x = hn::Load(d_, reduced + p);
      if (p + kLanes > e_.P) x = hn::IfThenElseZero(hn::FirstN(d_, static_cast<size_t>(e_.P - p)), x);
      hn::Vec<D> sine, cosine;
      hn::SinCos(d_, x, sine, cosine);
      hn::StoreInterleaved2(cosine, cosine, d_, rotation + 2 * p);
      hn::StoreInterleaved2(hn::Neg(sine), sine, d_, rotation + 2 * e_.angle_row + 2 * p);
    }
  }

  // The rotated row of a query or a key.
  template <class S>
  HWY_INLINE void Load(const ConstTensorView& of, int64_t t, int64_t r, void* bias, const T* rotation, void* to) const {
    const S* from = RowOf<S>(of, u_, Token(t), r, key_head_);
    const T* added = As<T>(bias) + (u_.head * e_.R + r) * e_.key_row;
    T* row = KeyRow(to, t, r);
    for (int64_t i = 0; i < e_.key_row; i += kLanes) {
      auto x = i < e_.K ? LoadRow(d_, from + i, Rest(e_.K, i)) : hn::Zero(d_);
      x = hn::Add(x, hn::Load(d_, added + i));
      if (i < 2 * e_.P) x = Rotated(d_, x, rotation + i, 2 * e_.angle_row);
      hn::Store(x, d_, row + i);
    }
  }

  // dv, from the engine's gradient of weight .* v. Returns the gradient of the weight.
  HWY_ATTR double ValueGradients(int64_t t, bool is_last, T weight, const T* products) const {
    auto of_weight = hn::Zero(d_);
    hs::WithStorage<T>(e_.in.q.dtype(), [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      if (t >= kAhead && e_.gradients.v.present()) PrefetchRows<S>(e_.gradients.v, t - kAhead, u_.head, e_.V);
      for (int64_t r = 0; r < e_.R; ++r) {
        const T *dv = ValueRow(e_.dv, t, r), *v = ValueRow(e_.v, t, r);
        S* to = e_.gradients.v.present() ? RowOf<S>(e_.gradients.v, u_, Token(t), r, u_.head) : nullptr;
        for (int64_t j = 0; j < e_.V; j += kLanes) {
          const auto x = hn::Load(d_, dv + j);
          of_weight = hn::MulAdd(x, hn::Load(d_, v + j), of_weight);
          if (to == nullptr) continue;
          auto y = hn::Mul(hn::Set(d_, weight), x);
          for (int64_t other = 0; other < e_.R; ++other) {
            const auto d_o = hn::Load(d_, ValueRow(e_.d_o_rows, t, other) + j);
            y = hn::MulAdd(hn::Set(d_, products[other * e_.R + r]), d_o, y);
          }
          if (is_last && e_.d_final.v.present()) y = hn::Add(y, FromState(e_.d_final.v, r, j, e_.V));
          hs::StoreRounded(d_, y, to + j, Rest(e_.V, j));
        }
      }
    });
    return static_cast<double>(hn::ReduceSum(d_, of_weight));
  }

  HWY_INLINE hn::Vec<D> FromState(const ConstTensorView& state, int64_t r, int64_t i, int64_t size) const {
    HWY_ALIGN T row[kLanes] = {};
    for (int64_t lane = 0; lane < std::min(kLanes, size - i); ++lane) row[lane] = *LastAt<T>(state, u_, r, i + lane);
    return hn::Load(d_, row);
  }

  // dq and dk before the rotation, in place of those of the engine, and q x dq + k x dk of each pair of channels.
  HWY_ATTR void KeyGradients(int64_t t, bool is_last, const Buffers& scratch) const {
    const T *factors = scratch.factors, *rotation = Rotation(t);
    const int64_t R = e_.R;
    for (int64_t i = 0; i < e_.key_row; i += kLanes) {
      auto crossed = hn::Zero(d_);
      for (int64_t r = 0; r < R; ++r) {
        const auto add = [&](void* gradient, void* own, void* others, int64_t step, int64_t from, T* sums,
                             bool state) HWY_ATTR {
          T* row = KeyRow(gradient, t, r) + i;
          auto x = hn::Load(d_, row);
          for (int64_t other = 0; other < R; ++other) {
            x = hn::MulAdd(hn::Set(d_, factors[from + other * step]), hn::Load(d_, KeyRow(others, t, other) + i), x);
          }
          if (state && i < e_.K) x = hn::Add(x, FromState(e_.d_final.k, r, i, e_.K));
          if (i < 2 * e_.P) {
            crossed = hn::MulAdd(hn::Load(d_, KeyRow(own, t, r) + i), hn::Reverse2(d_, x), crossed);
            x = RotatedBack(d_, x, rotation + i, 2 * e_.angle_row);
          }
          hn::Store(x, d_, row);
          T* sum = sums + r * e_.key_row + i;
          hn::Store(hn::Add(hn::Load(d_, sum), x), d_, sum);
        };
        add(e_.dq, e_.q, e_.k, 1, r * R, scratch.sums, false);
        add(e_.dk, e_.k, e_.q, R, r, scratch.sums + R * e_.key_row, is_last && e_.d_final.k.present());
      }
      hn::Store(crossed, d_, scratch.crossed + i);
    }
  }

  // Adds the gradient of a token's angle to the sum over later ones; returns what the angle adds to that of delta.
  HWY_ATTR double AngleGradients(int64_t token, T delta, const T* crossed) const {
    const hn::ScalableTag<double> dd;
    const hn::Rebind<T, decltype(dd)> dt;
    constexpr auto kDoubles = static_cast<int64_t>(hn::MaxLanes(dd));
    double* sums = e_.d_angle + unit_ * e_.angle_row;
    auto of_delta = hn::Zero(dd);
    hs::WithStorage<T>(e_.in.theta.dtype(), [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      const int64_t at = OffsetOf(e_.in.theta, u_, token);
      const S* theta = static_cast<const S*>(e_.in.theta.data()) + at;
      S* to = e_.gradients.theta.present()
                  ? static_cast<S*>(e_.gradients.theta.data()) + OffsetOf(e_.gradients.theta, u_, token)
                  : nullptr;
      for (int64_t p = 0; p < e_.P; p += kDoubles) {
        const auto lanes = static_cast<size_t>(std::min(kDoubles, e_.P - p));
        hn::Vec<decltype(dt)> even, odd;
        hn::LoadInterleaved2(dt, crossed + 2 * p, even, odd);
        auto sum = hn::Add(hn::Load(dd, sums + p), PromoteToDouble<T>(dd, hn::Sub(even, odd)));
        if (lanes < static_cast<size_t>(kDoubles)) sum = hn::IfThenElseZero(hn::FirstN(dd, lanes), sum);
        hn::Store(sum, dd, sums + p);
        of_delta = hn::MulAdd(sum, PromoteToDouble<T>(dd, LoadRow(dt, theta + p, lanes)), of_delta);
        if (to == nullptr) continue;
        const auto x = RoundDouble<T, decltype(dd)>(hn::Mul(sum, hn::Set(dd, static_cast<double>(delta))));
        hs::StoreRounded(dt, x, to + p, lanes);
      }
    });
    return hn::ReduceSum(dd, of_delta);
  }

  static constexpr D d_{};
  const Elements& e_;
  const Unit& u_;
  const int64_t unit_, first_, n_, key_head_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::mamba3::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_SSM_MAMBA3_UNIT_BLOCK_INL_H_
