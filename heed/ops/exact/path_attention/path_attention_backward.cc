// Gradients of PaTH attention: within the block of the rows, and through the UT transform of a block of keys.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/path_attention/path_attention_backward.cc"  // this file
#include "hwy/foreach_target.h"                                                        // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/core/carver.h"
#include "heed/ops/exact/common/transitions_backward-inl.h"
#include "heed/ops/exact/path_attention/blocks-inl.h"
#include "heed/simd/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::path_attention::HWY_NAMESPACE {

// Work of a thread that takes a block through its UT transform.
template <class T>
struct TransformScratch {
  T *G, *B, *BT, *dB, *dN, *Z, *dG, *NT;  // [64, 64]
  T *keysT, *PT, *beta, *dbeta;           // [D, 64], [D, Dp], [64]
  int64_t bytes;

  TransformScratch(const Shape& s, void* base) {
    Carver carver(base);
    for (T** square : {&G, &B, &BT, &dB, &dN, &Z, &dG, &NT}) carver.Next(*square, kBlock * kBlock);
    carver.Next(keysT, s.D * kBlock);
    carver.Next(PT, s.D * s.Dp);
    for (T** row : {&beta, &dbeta}) carver.Next(*row, kBlock);
    bytes = carver.bytes();
  }
};

struct PathGradients : Path {
  using BackwardInputs = path_attention::BackwardInputs;
  using Gradients = path_attention::Gradients;
  template <class T>
  using FinishScratch = TransformScratch<T>;

  template <class T>
  struct OwnScratch {
    T *dR, *XT, *YT;  // [64, 64]: of q W^T; [64, 64], [D, 64]

    void LayOut(const Shape& s, Carver& carver) {
      for (T** square : {&dR, &XT}) carver.Next(*square, kBlock * kBlock);
      carver.Next(YT, s.D * kBlock);
    }
  };

  // Gradients of the products within the block of the rows.
  template <class D, class T = hn::TFromD<D>>
  static HWY_NOINLINE void OwnGradients(D d, const Shape& s, const Block<T>& own, int64_t n, const ht::Ticket& ticket,
                                        ht::RowScratch<PathGradients, T>& c) {
    hs::TransposeRows(own.X, kBlock, n, kBlock, c.own.XT, kBlock);
    hs::TransposeRows(own.Y, s.Dp, n, s.D, c.own.YT, kBlock);
    Clear(c.own.dR, n * kBlock);
    hs::Multiply(d, c.own_dS, kBlock, 1, c.own.XT, kBlock, n, n, kBlock, c.own.dR, kBlock);
    hs::Multiply(d, c.dq, s.Dp, 1, c.own.YT, kBlock, s.D, n, kBlock, c.own.dR, kBlock);
    KeepLower(d, n, false, c.own.dR);
    ticket.Wait();
    hs::MultiplyUpper(d, c.own_dS, kBlock, c.own_q, s.Dp, n, s.D, own.d_k, s.Dp);
    hs::MultiplyUpper(d, c.own.dR, kBlock, c.own_q, s.Dp, n, s.D, own.d_w, s.Dp);
    hs::MultiplyUpper(d, c.rows.R, kBlock, c.own_dS, kBlock, n, kBlock, own.d_X, kBlock);
    hs::MultiplyUpper(d, c.rows.R, kBlock, c.dq, s.Dp, n, s.D, own.d_Y, s.Dp);
    ticket.Release();
    hs::MultiplyLower(d, c.own_dS, kBlock, own.k, s.Dp, n, s.D, c.dq, s.Dp);
    hs::MultiplyLower(d, c.own.dR, kBlock, own.w, s.Dp, n, s.D, c.dq, s.Dp);
  }

  // dk, dv, dw and dbeta of a block of keys.
  template <class S, class Blocks, class D, class T = hn::TFromD<D>>
  static HWY_NOINLINE void Finish(D d, const Shape& s, const BackwardInputs& in, const Gradients& out, const Task& task,
                                  const Blocks& blocks, const TransformScratch<T>& c) {
    const Block<T> block = blocks(0);
    constexpr int64_t L = hn::MaxLanes(D());
    const Unit& u = *task.unit;
    const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, b = u.tokens.batch;
    LoadBeta(in, u, token, n, c.beta);
    hs::MultiplyPairs(d, block.w, s.Dp, block.wT, s.D, n, c.G, kBlock);
    hs::MultiplyPairs(d, block.w, s.Dp, block.kT, s.D, n, c.B, kBlock);
    KeepLower(d, n, true, c.B);
    if (task.block + 1 < u.blocks) {
      // keys = K + X^T W and P = I + W^T Y.
      hs::TransposeRows(block.d_keys, s.Dp, n, s.D, c.keysT, kBlock);
      hs::Multiply(d, block.w, s.Dp, 1, c.keysT, kBlock, s.D, n, kBlock, block.d_X, kBlock);
      hs::Multiply(d, block.X, kBlock, 1, block.d_keys, s.Dp, n, n, s.D, block.d_w, s.Dp);
      for (int64_t i = 0; i < s.D; ++i) {
        for (int64_t j = 0; j < s.Dp; ++j) c.PT[i * s.Dp + j] = j < s.D ? block.d_P[j * s.Dp + i] : T{0};
      }
      hs::Multiply(d, block.Y, s.Dp, 1, c.PT, s.Dp, s.D, n, s.D, block.d_w, s.Dp);
      hs::Multiply(d, block.w, s.Dp, 1, block.d_P, s.Dp, s.D, n, s.D, block.d_Y, s.Dp);
      for (int64_t i = 0; i < n * s.Dp; i += L) {
        hn::Store(hn::Add(hn::Load(d, block.d_k + i), hn::Load(d, block.d_keys + i)), d, block.d_k + i);
      }
    }
    KeepLower(d, n, true, block.d_X);
    // X = N B with B = tril(W K^T, -1), and Y = N W.
    Clear(c.dB, n * kBlock);
    hs::MultiplyUpper(d, block.N, kBlock, block.d_X, kBlock, n, kBlock, c.dB, kBlock);
    KeepLower(d, n, true, c.dB);
    hs::TransposeRows(c.B, kBlock, n, kBlock, c.BT, kBlock);
    Clear(c.dN, n * kBlock);
    hs::Multiply(d, block.d_X, kBlock, 1, c.BT, kBlock, n, n, kBlock, c.dN, kBlock);
    hs::Multiply(d, block.d_Y, s.Dp, 1, block.wT, kBlock, s.D, n, kBlock, c.dN, kBlock);
    hs::MultiplyUpper(d, block.N, kBlock, block.d_Y, s.Dp, n, s.D, block.d_w, s.Dp);
    hs::MultiplyLower(d, c.dB, kBlock, block.k, s.Dp, n, s.D, block.d_w, s.Dp);
    hs::MultiplyUpper(d, c.dB, kBlock, block.w, s.Dp, n, s.D, block.d_k, s.Dp);
    // A N = -diag(beta): Z = -A^-T dN is the gradient of diag(beta), Z N^T that of A. A_ts = beta_t G_ts.
    for (int64_t t = n; t-- > 0;) {
      T* HWY_RESTRICT row = c.Z + t * kBlock;
      for (int64_t j = 0; j < kBlock; j += L) hn::Store(hn::Neg(hn::Load(d, c.dN + t * kBlock + j)), d, row + j);
      for (int64_t later = t + 1; later < n; ++later) {
        const auto factor = hn::Set(d, c.beta[later] * c.G[later * kBlock + t]);
        for (int64_t j = 0; j < kBlock; j += L) {
          hn::Store(hn::NegMulAdd(factor, hn::Load(d, c.Z + later * kBlock + j), hn::Load(d, row + j)), d, row + j);
        }
      }
      c.dbeta[t] = row[t];
    }
    KeepLower(d, n, false, c.Z);
    hs::TransposeRows(block.N, kBlock, n, kBlock, c.NT, kBlock);
    Clear(c.dG, n * kBlock);
    hs::Multiply(d, c.Z, kBlock, 1, c.NT, kBlock, n, n, kBlock, c.dG, kBlock);
    for (int64_t t = 0; t < n; ++t) {
      T sum = 0;
      for (int64_t j = 0; j < t; ++j) {
        sum += c.dG[t * kBlock + j] * c.G[t * kBlock + j];
        c.dG[t * kBlock + j] *= c.beta[t];
      }
      c.dbeta[t] += sum;
    }
    KeepLower(d, n, true, c.dG);
    hs::MultiplyLower(d, c.dG, kBlock, block.w, s.Dp, n, s.D, block.d_w, s.Dp);
    hs::MultiplyUpper(d, c.dG, kBlock, block.w, s.Dp, n, s.D, block.d_w, s.Dp);

    ht::StoreRows<S>(d, block.d_k, s.Dp, out.dk, b, token, n, u.key_head);
    ht::StoreRows<S>(d, block.d_v, s.Vp, out.dv, b, token, n, u.key_head);
    ht::StoreRows<S>(d, block.d_w, s.Dp, out.dw, b, token, n, u.key_head);
    for (int64_t t = 0; t < n; ++t) {
      ht::SetNumber(out.dbeta, b, token + t, u.key_head, static_cast<double>(c.dbeta[t]));
    }
  }
};

mechanism::Reservation BackwardMemoryImpl(const Call& call, DType dtype) {
  return ht::BackwardMemoryOf<PathGradients>(call, dtype);
}

void BackwardImpl(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  ht::BackwardAll<PathGradients>(ctx, call, in, out);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::path_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::path_attention {

HWY_EXPORT(BackwardImpl);
HWY_EXPORT(BackwardMemoryImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(BackwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::path_attention
#endif  // HWY_ONCE
