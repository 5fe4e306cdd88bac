// The backward pass of non-causal linear attention: every token reads the sums over all tokens.
//
// Compiled once per SIMD target. With S = sum_t k_t v_t^T and D = sum_t q_t d_o_t^T,
//
//   dq_t = S d_o_t,  dk_t = D v_t,  dv_t = D^T k_t
//
// in three passes over the tokens: S; dq and D; dk and dv. This takes 10 K V flops per token.
#if defined(HEED_ENGINES_RECURRENCE_SUMS_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_SUMS_BACKWARD_INL_H_
#undef HEED_ENGINES_RECURRENCE_SUMS_BACKWARD_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_SUMS_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/gradients-inl.h"
#include "heed/engines/recurrence/head_gradients-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
class SumsBackwardHead : HeadGradients<T> {
  using Base = HeadGradients<T>;
  using Base::d_, Base::N, Base::p_, Base::g_, Base::s_, Base::head_, Base::b_, Base::reader_, Base::row_,
      Base::value_row_, Base::values_, Base::by_key_, Base::by_value_;

 public:
  SumsBackwardHead(const Problem& p, const Gradients& g, const Task& task, const BackwardBuffers<T>& buffers,
                   const SharedBuffers<T>& shared)
      : Base(p, g, task, buffers, shared) {}

  HWY_NOINLINE HWY_ATTR void Compute() {
    if (s_.count == 0) return;
    StateShape sums = by_key_;
    sums.rows = values_;
    T* S = b_.BoundaryState(0);
    LoadState(d_, {}, 0, 0, sums, S);
    LoadState(d_, {}, 0, 0, by_key_, b_.d_transposed);
    LoadState(d_, {}, 0, 0, by_value_, b_.d_state);
    if (p_.normalize) std::memset(b_.z, 0, row_ * sizeof(T));
    reader_.Begin();
    reader_.ReduceKeys();
    ForBlocks([&](int64_t block, size_t n) HWY_ATTR {
      ReadKeys(block, n);
      RowPrefetch prefetch = NextRows(block, {&p_.k}, {}, {&p_.v}, NumSumPrefetches<T>(sums));
      AddOuterProducts(d_, b_.v, value_row_, b_.rows.k, row_, n, sums, S, prefetch);
      if (p_.normalize) AddUp(b_.rows.k, n, b_.z);
    });
    ForBlocks([&](int64_t block, size_t n) HWY_ATTR {
      const int64_t first = block * kBlockTokens;
      reader_.Queries(first, n);
      LoadRows(d_, g_.d_o, s_, head_, first, n, values_, b_.d_o, value_row_);
      if (p_.normalize) Normalize(n);
      RowPrefetch prefetch =
          NextRows(block, {&p_.q}, {&g_.dq}, {&g_.d_o},
                   NumReadPrefetches<T>(sums) + NumSumPrefetches<T>(by_key_) + NumSumPrefetches<T>(by_value_));
      ReadState(d_, b_.d_o, value_row_, n, sums, S, b_.dq, row_, prefetch);
      if (p_.normalize) this->AddNormalizer(n, b_.z, 0);
      AddOuterProducts(d_, b_.d_o, value_row_, b_.rows.q, row_, n, by_key_, b_.d_transposed, prefetch);
      AddOuterProducts(d_, b_.rows.q, row_, b_.d_o, value_row_, n, by_value_, b_.d_state, prefetch);
      this->AddToHead(Base::kQueries, block, n);
    });
    // The gradient of the softmax over tokens is k .* (dk - c) with c = sum_t k_t .* dk_t = rowsum(S .* D).
    const bool over_tokens = p_.key_feature == Feature::kSoftmaxOfTokens;
    if (over_tokens) StateProducts(d_, S, sums, b_.d_transposed, by_key_, b_.suffix);
    ForBlocks([&](int64_t block, size_t n) HWY_ATTR {
      ReadKeys(block, n);
      for (size_t t = 0; t < n && p_.normalize; ++t) b_.v[t * value_row_ + values_] = 1;
      RowPrefetch prefetch = NextRows(block, {&p_.k}, {&g_.dk}, {&p_.v, &g_.dv},
                                      NumReadPrefetches<T>(by_key_) + NumReadPrefetches<T>(by_value_));
      ReadState(d_, b_.v, value_row_, n, by_key_, b_.d_transposed, b_.dk, row_, prefetch);
      ReadState(d_, b_.rows.k, row_, n, by_value_, b_.d_state, b_.dv, value_row_, prefetch);
      if (over_tokens) SoftmaxBackward(n);
      this->AddToHead(Base::kKeys, block, n);
      if (g_.dv.data != nullptr) this->StoreValueGradients(block * kBlockTokens, n);
    });
  }

 private:
  template <class F>
  HWY_INLINE void ForBlocks(const F& f) {
    for (int64_t block = 0; block < NumBlocks(s_.count); ++block) f(block, this->TokensOf(block));
  }

  // Returns the prefetches of the next block in this many calls.
  HWY_ATTR RowPrefetch NextRows(int64_t block, typename Base::ListOfRows keys, typename Base::ListOfRows d_keys,
                                typename Base::ListOfRows values, size_t calls) const {
    if (block + 1 >= NumBlocks(s_.count)) return {};
    RowPrefetch prefetch = this->RowsOf(block + 1, keys, d_keys, {}, values);
    prefetch.Begin(this->TokensOf(block + 1), calls);
    return prefetch;
  }

  HWY_ATTR void ReadKeys(int64_t block, size_t n) {
    const int64_t first = block * kBlockTokens;
    reader_.Keys(first, n);
    reader_.Values(first, n, b_.v, value_row_);
  }

  HWY_ATTR void SoftmaxBackward(size_t n) {
    for (size_t t = 0; t < n; ++t) {
      for (size_t i = by_key_.begin; i < by_key_.end; i += N) {
        const size_t at = t * row_ + i;
        const auto centered = hn::Sub(hn::Load(d_, b_.dk + at), hn::Load(d_, b_.suffix + i));
        hn::Store(hn::Mul(hn::Load(d_, b_.rows.k + at), centered), d_, b_.dk + at);
      }
    }
  }

  HWY_ATTR void AddUp(const T* rows, size_t n, T* to) {
    for (size_t t = 0; t < n; ++t, rows += row_) {
      for (size_t i = 0; i < row_; i += N) {
        hn::Store(hn::Add(hn::Load(d_, to + i), hn::Load(d_, rows + i)), d_, to + i);
      }
    }
  }

  HWY_ATTR void Normalize(size_t n) {
    for (size_t t = 0; t < n; ++t) {
      auto sum = hn::Zero(d_);
      for (size_t i = 0; i < row_; i += N) {
        sum = hn::MulAdd(hn::Load(d_, b_.z + i), hn::Load(d_, b_.rows.q + t * row_ + i), sum);
      }
      b_.denominators[t] = hn::ReduceSum(d_, sum);
    }
    this->DivideByDenominators(n, b_.inverses);
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_SUMS_BACKWARD_INL_H_
