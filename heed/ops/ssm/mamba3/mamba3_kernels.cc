// The computations of mamba3 beside its recurrence, for every SIMD target.
//
// A task is a unit, and tokens follow one another for the sake of the running angle. Per token and head there are P
// sines and cosines, about 8 instructions per vector of q and k, and one pass over v and o, where the recurrence has
// 4 K V flops per write: a fifth of its time at K = 128, V = 64.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "heed/core/dispatch.h"
#include "heed/ops/ssm/mamba3/mamba3_kernels_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/ssm/mamba3/mamba3_kernels.cc"  // this file
#include "hwy/foreach_target.h"                                     // IWYU pragma: keep
// After foreach_target.h:
#include "heed/ops/ssm/mamba3/unit_block-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::mamba3::HWY_NAMESPACE {

template <class T>
void Biases(const Elements& e) {
  const struct {
    const ConstTensorView& from;
    void* to;
  } biases[] = {{e.in.q_bias, e.q_bias}, {e.in.k_bias, e.k_bias}};
  for (const auto& [from, to] : biases) {
    T* next = As<T>(to);
    for (int64_t h = 0; h < e.heads; ++h) {
      for (int64_t r = 0; r < e.R; ++r) {
        for (int64_t i = 0; i < e.key_row; ++i) {
          const bool has = from.present() && i < e.K;
          *next++ = !has ? T{0}
                         : static_cast<T>(LoadAsDouble(from.dtype(), from.data(),
                                                       h * from.stride(0) + r * from.stride(1) + i * from.stride(2)));
        }
      }
    }
  }
}

// (1 - lambda) delta of the first token.
double FirstBeta(const Elements& e, const Unit& u) {
  if (u.count == 0) return 0;
  const double trap = NumberOf(e.in.trap, u, u.first), small = std::exp(-std::abs(trap));
  return (trap >= 0 ? small : 1) / (1 + small) * NumberOf(e.in.dt, u, u.first);
}

template <class T>
HWY_ATTR void BeginUnit(const Elements& e, int64_t unit, bool with_states) {
  const Unit& u = e.units[static_cast<size_t>(unit)];
  double* angle = e.angle + unit * e.angle_row;
  for (int64_t p = 0; p < e.angle_row; ++p) {
    const bool has = e.initial.angle.present() && p < e.P;
    angle[p] = has ? static_cast<double>(*AngleAt<T>(e.initial.angle, u, p)) : 0;
  }
  if (!with_states) return;
  T* state = As<T>(e.state) + unit * e.slots * e.K * e.V;
  const bool writes = e.initial.k.present() && e.initial.v.present();
  const T beta = static_cast<T>(writes ? FirstBeta(e, u) : 0);
  for (int64_t i = 0; i < e.K; ++i) {
    T* row = state + i * e.V;
    for (int64_t j = 0; j < e.V; ++j) row[j] = e.initial.S.present() ? *StateAt<T>(e.initial.S, u, i, j) : T{0};
    for (int64_t r = 0; writes && r < e.R; ++r) {
      const T k = beta * *LastAt<T>(e.initial.k, u, r, i);
      for (int64_t j = 0; j < e.V; ++j) row[j] += k * *LastAt<T>(e.initial.v, u, r, j);
    }
  }
}

// A copy of one state of a unit, or zeros; nothing if `to` is absent.
template <class T, class At>
void CopyState(const ConstTensorView& from, const TensorView& to, const At& at) {
  if (to.present()) *at(to) = from.present() ? *at(from) : T{0};
}

// The states of a unit without tokens are copied.
template <class T>
void CopyStates(const Elements& e, const Unit& u, const States<ConstTensorView>& from, const States<TensorView>& to) {
  for (int64_t i = 0; i < e.K; ++i) {
    for (int64_t j = 0; j < e.V; ++j) {
      CopyState<T>(from.S, to.S, [&](const ConstTensorView& t) { return StateAt<T>(t, u, i, j); });
    }
  }
  for (int64_t p = 0; p < e.P; ++p) {
    CopyState<T>(from.angle, to.angle, [&](const ConstTensorView& t) { return AngleAt<T>(t, u, p); });
  }
  for (int64_t r = 0; r < e.R; ++r) {
    for (int64_t i = 0; i < e.K; ++i) {
      CopyState<T>(from.k, to.k, [&](const ConstTensorView& t) { return LastAt<T>(t, u, r, i); });
    }
    for (int64_t j = 0; j < e.V; ++j) {
      CopyState<T>(from.v, to.v, [&](const ConstTensorView& t) { return LastAt<T>(t, u, r, j); });
    }
  }
}

template <class T>
HWY_ATTR void EndUnit(const Elements& e, int64_t unit, int64_t b, bool with_states) {
  const Unit& u = e.units[static_cast<size_t>(unit)];
  if (u.blocks() - 1 != b) return;
  if (b < 0) return CopyStates<T>(e, u, e.initial, e.final);
  if (with_states && e.final.S.present()) {
    const T* state = As<T>(e.state) + unit * e.slots * e.K * e.V;
    for (int64_t i = 0; i < e.K; ++i) {
      for (int64_t j = 0; j < e.V; ++j) *StateAt<T>(e.final.S, u, i, j) = state[i * e.V + j];
    }
  }
  for (int64_t p = 0; e.final.angle.present() && p < e.P; ++p) {
    *AngleAt<T>(e.final.angle, u, p) = static_cast<T>(e.angle[unit * e.angle_row + p]);
  }
  const int64_t last = unit * e.rows + e.before + (u.count - 1 - b * kBlock) * e.R;
  for (int64_t r = 0; r < e.R; ++r) {
    const T *k = As<T>(e.k) + (last + r) * e.key_row, *v = As<T>(e.v) + (last + r) * e.value_row;
    for (int64_t i = 0; e.final.k.present() && i < e.K; ++i) *LastAt<T>(e.final.k, u, r, i) = k[i];
    for (int64_t j = 0; e.final.v.present() && j < e.V; ++j) *LastAt<T>(e.final.v, u, r, j) = v[j];
  }
}

template <class T>
void BeginUnitBackward(const Elements& e, int64_t unit) {
  const Unit& u = e.units[static_cast<size_t>(unit)];
  e.pending[unit] = {};
  for (int64_t p = 0; p < e.angle_row; ++p) {
    const bool has = e.d_final.angle.present() && p < e.P;
    e.d_angle[unit * e.angle_row + p] = has ? static_cast<double>(*AngleAt<T>(e.d_final.angle, u, p)) : 0;
  }
  std::memset(e.d_biases + unit * 2 * e.R * e.key_row, 0, static_cast<size_t>(2 * e.R * e.key_row) * sizeof(double));
  T* d_state = As<T>(e.d_states[u.blocks() & 1]) + unit * e.K * e.V;
  for (int64_t i = 0; i < e.K; ++i) {
    for (int64_t j = 0; j < e.V; ++j) {
      d_state[i * e.V + j] = e.d_final.S.present() ? *StateAt<T>(e.d_final.S, u, i, j) : T{0};
    }
  }
}

template <class T>
HWY_ATTR void EndUnitBackward(const Elements& e, int64_t unit) {
  const Unit& u = e.units[static_cast<size_t>(unit)];
  if (u.count == 0) return CopyStates<T>(e, u, e.d_final, e.d_initial);
  const T* d_state = As<T>(e.d_states[0]) + unit * e.K * e.V;
  for (int64_t i = 0; e.d_initial.S.present() && i < e.K; ++i) {
    for (int64_t j = 0; j < e.V; ++j) *StateAt<T>(e.d_initial.S, u, i, j) = d_state[i * e.V + j];
  }
  for (int64_t p = 0; e.d_initial.angle.present() && p < e.P; ++p) {
    *AngleAt<T>(e.d_initial.angle, u, p) = static_cast<T>(e.d_angle[unit * e.angle_row + p]);
  }
  const double beta = FirstBeta(e, u);
  const auto element = [&](const ConstTensorView& t, int64_t r, int64_t i) {
    return t.present() ? static_cast<double>(*LastAt<T>(t, u, r, i)) : 0.0;
  };
  double d_beta = 0;
  for (int64_t r = 0; r < e.R; ++r) {
    for (int64_t i = 0; i < e.K; ++i) {
      double dk = 0;
      for (int64_t j = 0; j < e.V; ++j) dk += static_cast<double>(d_state[i * e.V + j]) * element(e.initial.v, r, j);
      d_beta += element(e.initial.k, r, i) * dk;
      if (e.d_initial.k.present()) *LastAt<T>(e.d_initial.k, u, r, i) = static_cast<T>(beta * dk);
    }
    for (int64_t j = 0; e.d_initial.v.present() && j < e.V; ++j) {
      double dv = 0;
      for (int64_t i = 0; i < e.K; ++i) dv += static_cast<double>(d_state[i * e.V + j]) * element(e.initial.k, r, i);
      *LastAt<T>(e.d_initial.v, u, r, j) = static_cast<T>(beta * dv);
    }
  }
  UnitBlock<T>(e, unit, 0).Complete(d_beta);
}

// Calls f(T(), unit, scratch) for each unit in parallel.
template <class T, class F>
void ForUnits(Context& ctx, const Elements& e, const F& f) {
  typename UnitBlock<T>::Buffers sizes;
  ctx.ReserveScratch(sizes.LayOut(e, nullptr));
  ctx.ParallelFor(static_cast<int64_t>(e.units.size()), [&](int64_t unit, int worker) HWY_ATTR {
    typename UnitBlock<T>::Buffers scratch;
    scratch.LayOut(e, ctx.Scratch(worker));
    f(T(), unit, scratch);
  });
}
template <class F>
void ForAllUnits(Context& ctx, const Elements& e, const F& f) {
  e.compute == DType::kF64 ? ForUnits<double>(ctx, e, f) : ForUnits<float>(ctx, e, f);
}

void RunBiases(const Elements& e) { e.compute == DType::kF64 ? Biases<double>(e) : Biases<float>(e); }
void RunBegin(Context& ctx, const Elements& e, bool with_states) {
  ForAllUnits(ctx, e, [&](auto type, int64_t unit, const auto&) { BeginUnit<decltype(type)>(e, unit, with_states); });
}
void RunPrepare(Context& ctx, const Elements& e, int64_t b, bool reads, bool backward) {
  ForAllUnits(ctx, e, [&](auto type, int64_t unit, const auto& scratch) {
    UnitBlock<decltype(type)>(e, unit, b).Prepare(scratch, reads, backward);
  });
}
void RunFinish(Context& ctx, const Elements& e, int64_t b) {
  ForAllUnits(ctx, e, [&](auto type, int64_t unit, const auto&) { UnitBlock<decltype(type)>(e, unit, b).Finish(); });
}
void RunEnd(Context& ctx, const Elements& e, int64_t b, bool with_states) {
  ForAllUnits(ctx, e, [&](auto type, int64_t unit, const auto&) { EndUnit<decltype(type)>(e, unit, b, with_states); });
}
void RunBeginBackward(Context& ctx, const Elements& e) {
  ForAllUnits(ctx, e, [&](auto type, int64_t unit, const auto&) { BeginUnitBackward<decltype(type)>(e, unit); });
}
void RunEndBackward(Context& ctx, const Elements& e) {
  ForAllUnits(ctx, e, [&](auto type, int64_t unit, const auto&) { EndUnitBackward<decltype(type)>(e, unit); });
}
void RunPrepareBackward(Context& ctx, const Elements& e, int64_t b) {
  ForAllUnits(ctx, e,
              [&](auto type, int64_t unit, const auto&) { UnitBlock<decltype(type)>(e, unit, b).PrepareBackward(); });
}
void RunFinishBackward(Context& ctx, const Elements& e, int64_t b) {
  ForAllUnits(ctx, e, [&](auto type, int64_t unit, const auto& scratch) {
    UnitBlock<decltype(type)>(e, unit, b).FinishBackward(scratch);
  });
}
void RunSumHeads(Context& ctx, const Elements& e, int64_t b, bool first, bool last) {
  // Heads of one key head of one sequence are neighbours.
  ForAllUnits(ctx, e, [&](auto type, int64_t unit, const auto&) {
    const auto key_of = [&](int64_t of) {
      const Unit& u = e.units[static_cast<size_t>(of)];
      return std::pair(u.sequence, u.head / e.group);
    };
    if (unit > 0 && key_of(unit - 1) == key_of(unit)) return;
    int64_t count = 1;
    while (unit + count < static_cast<int64_t>(e.units.size()) && key_of(unit + count) == key_of(unit)) ++count;
    UnitBlock<decltype(type)>(e, unit, b).SumHeads(count, first, last);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::mamba3::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::mamba3 {

HWY_EXPORT(RunBiases);
HWY_EXPORT(RunBegin);
HWY_EXPORT(RunPrepare);
HWY_EXPORT(RunFinish);
HWY_EXPORT(RunEnd);
HWY_EXPORT(RunBeginBackward);
HWY_EXPORT(RunEndBackward);
HWY_EXPORT(RunPrepareBackward);
HWY_EXPORT(RunFinishBackward);
HWY_EXPORT(RunSumHeads);

void LoadBiases(const Context& ctx, const Elements& e) {
  HWY_DISPATCH_TABLE(RunBiases)[TargetIndex(ctx.allowed_targets())](e);
}
void Begin(Context& ctx, const Elements& e, bool with_states) {
  HWY_DISPATCH_TABLE(RunBegin)[TargetIndex(ctx.allowed_targets())](ctx, e, with_states);
}
void Prepare(Context& ctx, const Elements& e, int64_t b, bool reads, bool backward) {
  HWY_DISPATCH_TABLE(RunPrepare)[TargetIndex(ctx.allowed_targets())](ctx, e, b, reads, backward);
}
void Finish(Context& ctx, const Elements& e, int64_t b) {
  HWY_DISPATCH_TABLE(RunFinish)[TargetIndex(ctx.allowed_targets())](ctx, e, b);
}
void End(Context& ctx, const Elements& e, int64_t b, bool with_states) {
  HWY_DISPATCH_TABLE(RunEnd)[TargetIndex(ctx.allowed_targets())](ctx, e, b, with_states);
}
void BeginBackward(Context& ctx, const Elements& e) {
  HWY_DISPATCH_TABLE(RunBeginBackward)[TargetIndex(ctx.allowed_targets())](ctx, e);
}
void EndBackward(Context& ctx, const Elements& e) {
  HWY_DISPATCH_TABLE(RunEndBackward)[TargetIndex(ctx.allowed_targets())](ctx, e);
}
void PrepareBackward(Context& ctx, const Elements& e, int64_t b) {
  HWY_DISPATCH_TABLE(RunPrepareBackward)[TargetIndex(ctx.allowed_targets())](ctx, e, b);
}
void FinishBackward(Context& ctx, const Elements& e, int64_t b) {
  HWY_DISPATCH_TABLE(RunFinishBackward)[TargetIndex(ctx.allowed_targets())](ctx, e, b);
}
void SumHeads(Context& ctx, const Elements& e, int64_t b, bool first, bool last) {
  HWY_DISPATCH_TABLE(RunSumHeads)[TargetIndex(ctx.allowed_targets())](ctx, e, b, first, last);
}

}  // namespace heed::mamba3
#endif  // HWY_ONCE
