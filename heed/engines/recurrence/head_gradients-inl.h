// The part of a value head that causal and non-causal backward passes share: its sizes, the normaliser, and the
// gradients of q and k through feature maps and over the value heads of a key head.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_RECURRENCE_HEAD_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_HEAD_GRADIENTS_INL_H_
#undef HEED_ENGINES_RECURRENCE_HEAD_GRADIENTS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_HEAD_GRADIENTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "heed/core/ticket.h"
#include "heed/engines/recurrence/backward_buffers-inl.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/rows-inl.h"
#include "heed/engines/recurrence/tasks.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
class HeadGradients {
 protected:
  using D = hn::ScalableTag<T>;
  static constexpr size_t N = hn::MaxLanes(D());
  enum Of { kQueries, kKeys };

  HeadGradients(const Problem& p, const Gradients& g, const Task& task, const BackwardBuffers<T>& buffers,
                const SharedBuffers<T>& shared)
      : p_(p), g_(g), s_(p.sequences[static_cast<size_t>(task.sequence)]), task_(task), head_(task.head), b_(buffers),
        shared_(shared), dq_(buffers.dq), reader_(p, s_, task.head, buffers.rows), row_(Padded<T>(p.features())),
        value_row_(ValueRow<T>(p)), values_(static_cast<size_t>(p.value_size)),
        by_key_{values_ + (p.normalize ? 1 : 0),          values_,
                FirstColumn(task.part, task.parts, row_), FirstColumn(task.part + 1, task.parts, row_),
                static_cast<size_t>(p.features()),        true},
        by_value_{static_cast<size_t>(p.features()),
                  static_cast<size_t>(p.features()),
                  FirstColumn(task.part, task.parts, Padded<T>(p.value_size)),
                  FirstColumn(task.part + 1, task.parts, Padded<T>(p.value_size)),
                  values_,
                  false} {}

  size_t TokensOf(int64_t block) const {
    return static_cast<size_t>(std::min(kBlockTokens, s_.count - block * kBlockTokens));
  }

  // Returns the prefetches of a block: rows of key heads, rows of key heads that only the last value head of a key head
  // stores (the others add to SharedBuffers), rows of key channels per value head, and rows of values. Outputs are
  // prefetched because stores wait for their lines too.
  using ListOfRows = std::initializer_list<const Rows*>;
  HWY_ATTR RowPrefetch RowsOf(int64_t block, ListOfRows keys, ListOfRows d_keys, ListOfRows by_key,
                              ListOfRows values) const {
    RowPrefetch prefetch;
    const auto add = [&](ListOfRows list, int64_t head, int64_t size) {
      for (const Rows* rows : list) {
        if (rows->data != nullptr) AddRows(prefetch, *rows, s_, head, block * kBlockTokens, 0, size);
      }
    };
    const int64_t key_head = head_ / p_.group();
    add(keys, key_head, p_.key_size);
    if ((head_ + 1) % p_.group() == 0) add(d_keys, key_head, p_.key_size);
    add(by_key, head_, p_.key_size);
    add(values, head_, p_.value_size);
    return prefetch;
  }

  // With d_t the denominator: replaces d_o_t by d_o_t / d_t, stores 1 / d_t, and replaces z_t . q_t by the derivative
  // of log d_t with respect to it.
  HWY_ATTR void DivideByDenominators(size_t n, T* inverses) {
    for (size_t t = 0; t < n; ++t) {
      const T product = b_.denominators[t];
      inverses[t] = 1 / Denominator(p_, b_.rows, product, t);
      b_.denominators[t] = inverses[t] * DenominatorSlope(p_, b_.rows, product, t);
      ScaleRow(inverses[t], b_.d_o + t * value_row_);
    }
  }
  HWY_ATTR void ScaleRow(T factor, T* row) {
    for (size_t i = 0; i < value_row_; i += N) {
      hn::Store(hn::Mul(hn::Load(d_, row + i), hn::Set(d_, factor)), d_, row + i);
    }
  }

  // Stores the gradient of z_t . q_t, which is -<d_o_t, o_t> / d_t, in the extra column of d_o, and adds its part to
  // dq. <d_o_t, o_t> equals <q_t, dq_t> before that. z_t is at z + t * stride.
  HWY_ATTR void AddNormalizer(size_t n, const T* z, size_t stride) {
    for (size_t t = 0; t < n; ++t, z += stride) {
      const T* q = b_.rows.q + t * row_;
      T* dq = dq_ + t * row_;
      auto sum = hn::Zero(d_);
      for (size_t i = 0; i < row_; i += N) {
        sum = hn::MulAdd(hn::Load(d_, q + i), hn::Load(d_, dq + i), sum);
      }
      const T d_denominator = -hn::ReduceSum(d_, sum) * b_.denominators[t];
      b_.d_o[t * value_row_ + values_] = d_denominator;
      for (size_t i = 0; i < row_; i += N) {
        hn::Store(hn::MulAdd(hn::Set(d_, d_denominator), hn::Load(d_, z + i), hn::Load(d_, dq + i)), d_, dq + i);
      }
    }
  }

  // Adds dq or dk to the sums of the key head's value heads, and finishes it after the last of them.
  HWY_ATTR void AddToHead(Of of, int64_t block, size_t n) {
    const int64_t first = block * kBlockTokens;
    const int64_t group = p_.group(), mine = head_ % group;
    if (IsRandom(p_.feature)) ProjectionGradients(of, n);
    if (p_.exp_gates && of == kKeys) InputGateBackward(first, n);
    if (group == 1) return Finish(of, first, n);
    T* rows = of == kQueries ? dq_ : b_.dk;
    T* sums = of == kQueries ? shared_.dq : shared_.dk;
    TicketCounter& counter = shared_.CounterOf(p_, task_, block, of);
    WaitForTicket(counter, mine);
    const int64_t stride = static_cast<int64_t>(row_) * p_.key_heads;
    const int64_t offset = shared_.TokenOf(p_, task_, first) * static_cast<int64_t>(row_);
    for (size_t t = 0; t < n; ++t) {
      for (size_t i = by_key_.begin; i < by_key_.end; i += N) {
        const int64_t at = offset + static_cast<int64_t>(t) * stride + static_cast<int64_t>(i);
        auto sum = hn::Load(d_, rows + t * row_ + i);
        if (mine > 0) sum = hn::Add(hn::Load(d_, sums + at), sum);
        hn::Store(sum, d_, mine + 1 < group ? sums + at : rows + t * row_ + i);
      }
    }
    if (mine + 1 == group) Finish(of, first, n);
    ReleaseTicket(counter);
  }

  // Computes and stores the gradient of the caller's rows, before the scale and the feature map.
  HWY_ATTR void Finish(Of of, int64_t first, size_t n) {
    const bool queries = of == kQueries;
    const Rows& from = queries ? p_.q : p_.k;
    const Rows& to = queries ? g_.dq : g_.dk;
    T* rows = queries ? dq_ : b_.dk;
    const double scale = queries ? p_.outer_scale() : 1;
    if (IsRandom(p_.feature)) return FinishRandom(of, first, n);
    if (to.data == nullptr) return;
    const int64_t key_head = head_ / p_.group();
    const auto size = static_cast<size_t>(p_.key_size);
    const auto factor = hn::Set(d_, static_cast<T>(scale));
    const auto scaled = [&](auto v, size_t, size_t) HWY_ATTR { return hn::Mul(v, factor); };
    const Feature feature = queries ? p_.feature : p_.key_feature;
    if (feature == Feature::kIdentity || feature == Feature::kSoftmaxOfTokens) {
      return StoreRows(d_, rows, row_, to, s_, key_head, first, n, by_key_.begin, std::min(by_key_.end, by_key_.size),
                       scaled);
    }
    const auto unchanged = [](auto v, size_t, size_t) HWY_ATTR { return v; };
    const T* features = queries ? b_.rows.q : b_.rows.k;
    if (IsElementwise(feature)) {
      LoadRows(d_, from, s_, key_head, first, n, size, b_.unmapped, row_);
      MapFeaturesBackward(d_, feature, b_.unmapped, features, rows, static_cast<T>(scale), n * row_, rows);
      return StoreRows(d_, rows, row_, to, s_, key_head, first, n, by_key_.begin, std::min(by_key_.end, size),
                       unchanged);
    }
    const auto inner = static_cast<T>(queries ? p_.query_scale() : p_.key_scale());
    for (size_t t = 0; t < n; ++t, features += row_, rows += row_) {
      const int64_t token = first + static_cast<int64_t>(t);
      const T* y = features;
      if (scale != 1) {  // recomputes phi, because (scale phi) / scale is rounded: softmax of one channel is exactly 1
        LoadRows(d_, from, s_, key_head, token, 1, size, b_.rows.raw, Padded<T>(p_.key_size));
        MapFeatures(d_, feature, b_.rows.raw, inner, size, row_, b_.scratch_row);
        y = b_.scratch_row;
      }
      MapFeaturesBackward<D, T>(d_, feature, nullptr, y, rows, inner, size, b_.suffix);
      StoreRows(d_, b_.suffix, row_, to, s_, key_head, token, 1, 0, size, scaled);
    }
  }

  // Replaces the gradient of random features phi by the gradient t of W y. This is done per value head, because each
  // may have its own maximum and features.
  HWY_ATTR void ProjectionGradients(Of of, size_t n) {
    const T* features = of == kQueries ? b_.rows.q : b_.rows.k;
    T* rows = of == kQueries ? dq_ : b_.dk;
    for (size_t t = 0; t < n; ++t) {
      RandomFeaturesBackward(p_, features + t * row_, rows + t * row_);
    }
  }

  // Computes di, and dk from the gradient of exp(i - m) k.
  HWY_NOINLINE HWY_ATTR void InputGateBackward(int64_t first, size_t n) {
    for (size_t t = 0; t < n; ++t) {
      const T* k = b_.rows.k + t * row_;
      T* dk = b_.dk + t * row_;
      const auto factor = hn::Set(d_, b_.rows.key_factors[t]);
      auto sum = hn::Zero(d_);
      for (size_t i = 0; i < row_; i += N) {
        const auto gradient = hn::Load(d_, dk + i);
        sum = hn::MulAdd(hn::Load(d_, k + i), gradient, sum);
        hn::Store(hn::Mul(factor, gradient), d_, dk + i);
      }
      if (g_.d_input_gate.data == nullptr) continue;
      StoreNumber(g_.d_input_gate, s_, head_, first + static_cast<int64_t>(t),
                  static_cast<double>(hn::ReduceSum(d_, sum)));
    }
  }

  // Finishes random features: the gradient of y is W^T t - (sum of t) y, and the gradient of W is the sum of t y^T.
  HWY_ATTR void FinishRandom(Of of, int64_t first, size_t n) {
    const bool queries = of == kQueries;
    const Rows& from = queries ? p_.q : p_.k;
    const Rows& to = queries ? g_.dq : g_.dk;
    const T* rows = queries ? dq_ : b_.dk;
    const double scale = queries ? p_.query_scale() : p_.key_scale();
    const size_t raw_row = Padded<T>(p_.key_size);
    const bool has_norm = p_.feature == Feature::kRandomExp && !(queries && p_.factors_cancel());
    for (size_t t = 0; t < n; ++t) {
      b_.feature_sums[t] = has_norm ? RowSum(rows + t * row_, row_) : 0;
    }
    reader_.Scaled(from, scale, first, n);
    if (g_.d_projection.data != nullptr) {
      AddOuterProducts(d_, rows, row_, b_.rows.raw, raw_row, n, ProjectionShape<T>(p_), b_.d_projection);
    }
    if (to.data == nullptr) return;
    ReadState(d_, rows, row_, n, ProjectionShape<T>(p_), b_.projection, b_.d_raw, raw_row);
    const auto factor = hn::Set(d_, static_cast<T>(scale));
    StoreRows(d_, b_.d_raw, raw_row, to, s_, head_ / p_.group(), first, n, 0, static_cast<size_t>(p_.key_size),
              [&](auto v, size_t t, size_t i) HWY_ATTR {
                const auto y = hn::Load(d_, b_.rows.raw + t * raw_row + i);
                return hn::Mul(factor, hn::NegMulAdd(hn::Set(d_, b_.feature_sums[t]), y, v));
              });
  }

  HWY_ATTR void StoreValueGradients(int64_t first, size_t n) {
    StoreRows(d_, b_.dv, value_row_, g_.dv, s_, head_, first, n, by_value_.begin, std::min(by_value_.end, values_),
              [](auto v, size_t, size_t) HWY_ATTR { return v; });
  }

  const D d_;
  const Problem& p_;
  const Gradients& g_;
  const Sequence& s_;
  const Task& task_;
  const int64_t head_;
  const BackwardBuffers<T>& b_;
  const SharedBuffers<T>& shared_;
  T* dq_;  // dq of the current block
  const RowReader<T> reader_;
  const size_t row_, value_row_, values_;
  const StateShape by_key_, by_value_;  // shapes of S^T and D^T, and of D
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_HEAD_GRADIENTS_INL_H_
