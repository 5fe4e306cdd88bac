// Checks of the calls of operations with transitions (transitions_call.h), and their tokens outside sequences.
#ifndef HEED_OPS_EXACT_COMMON_TRANSITIONS_CHECK_H_
#define HEED_OPS_EXACT_COMMON_TRANSITIONS_CHECK_H_

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/mechanism/structs.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/common/transitions_call.h"

namespace heed::transitions {

inline DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

// The dtype of a factor of a token: that of q, or f32 (f64 for f64).
inline DType DTypeOfFactor(const ConstTensorView& t, DType dtype) {
  const DType wide = mechanism::StateDType(dtype);
  return t.present() && t.dtype() == wide ? wide : dtype;
}

// Checks q, k and v. Transitions have the heads of k. Without `data`, pointers may be null.
template <class Inputs>
Call CheckRows(const char* op, const Inputs& in, bool data) {
  using mechanism::Fail;
  for (const auto& [name, view, shape] :
       {std::tuple{"q", in.q, "[B, T, H, D]"}, {"k", in.k, "[B, T, Hkv, D]"}, {"v", in.v, "[B, T, Hkv, Dv]"}}) {
    mechanism::CheckFloat(op, name, view, data);
    if (view.rank() != 4) Fail(op, name, "has shape " + view.ShapeString(), shape);
    for (const int axis : {2, 3}) {
      if (view.size(axis) < 1) {
        Fail(op, name, "has shape " + view.ShapeString(), axis == 2 ? "at least one head" : "at least one channel");
      }
    }
  }
  Call call;
  call.B = in.q.size(0);
  call.T = in.q.size(1);
  call.H = in.q.size(2);
  call.D = in.q.size(3);
  call.Hkv = call.heads = in.k.size(2);
  call.Dv = in.v.size(3);
  if (call.H % call.Hkv != 0) {
    Fail(op, "q", "has " + std::to_string(call.H) + " heads",
         "a multiple of the " + std::to_string(call.Hkv) + " of k");
  }
  mechanism::CheckTensor(op, "k", in.k, {call.B, call.T, call.Hkv, call.D}, in.q.dtype(), data);
  mechanism::CheckTensor(op, "v", in.v, {call.B, call.T, call.Hkv, call.Dv}, in.q.dtype(), data);
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) {
    mechanism::CheckContiguousRows(op, name, view);
  }
  return call;
}

// Checks log_forget and the options, and adds all inputs that every operation has to `apart`.
template <class Inputs, class Options>
void CheckOptions(const char* op, const Inputs& in, const Options& options, bool values, bool data,
                  mechanism::Apart& apart, Call& call) {
  if (in.log_forget.present()) {
    mechanism::CheckTensor(op, "log_forget", in.log_forget, {call.B, call.T, call.H},
                           DTypeOfFactor(in.log_forget, in.q.dtype()), data);
    if (values) mechanism::CheckNotPositive(op, "log_forget", in.log_forget);
  }
  call.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(call.D)));
  if (!std::isfinite(call.scale)) mechanism::Fail(op, "scale", "is " + mechanism::Text(call.scale), "a finite number");
  call.sequences = mechanism::RangesOf(op, "q", in.q, options, 1, data);
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"log_forget", in.log_forget},
                                   {"lengths", options.lengths},
                                   {"starts", options.starts},
                                   {"cu_seqlens", options.cu_seqlens}}) {
    apart.Reads(name, view);
  }
}

// Checks o and lse. With `wide`, they may be f64.
template <class Outputs>
void CheckOutputs(const char* op, const Call& call, DType dtype, const Outputs& out, bool wide,
                  mechanism::Apart& apart) {
  apart.Writes(op, "o", out.o, {call.B, call.T, call.H, call.Dv}, DTypeOf(out.o, dtype, wide));
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (out.lse.present()) {
    apart.Writes(op, "lse", out.lse, {call.B, call.H, call.T}, DTypeOf(out.lse, mechanism::StateDType(dtype), wide));
  }
}

// Checks what a backward pass reads beside the inputs; the reference, with `wide`, reads no results.
template <class BackwardInputs>
void CheckIncoming(const char* op, const Call& call, const BackwardInputs& in, bool wide, mechanism::Apart& apart) {
  const DType dtype = in.q.dtype(), of_lse = mechanism::StateDType(dtype);
  const mechanism::Axes rows = {call.B, call.T, call.H, call.Dv}, sums = {call.B, call.H, call.T};
  for (const auto& [name, view] : {std::pair{"d_o", in.d_o}, {"o", in.o}}) {
    mechanism::CheckTensor(op, name, view, rows, dtype, true);
    mechanism::CheckContiguousRows(op, name, view);
    apart.Reads(name, view);
    if (wide) break;
  }
  if (!wide) mechanism::CheckTensor(op, "lse", in.lse, sums, of_lse, true);
  if (in.d_lse.present()) mechanism::CheckTensor(op, "d_lse", in.d_lse, sums, of_lse, true);
  apart.Reads("lse", in.lse);
  apart.Reads("d_lse", in.d_lse);
}

struct Gradient {
  const char* name;
  const TensorView& view;
  const ConstTensorView& of;
  bool rows;  // the last axis is contiguous
};
inline void CheckGradients(const char* op, std::initializer_list<Gradient> gradients, bool wide,
                           mechanism::Apart& apart) {
  for (const Gradient& g : gradients) {
    if (!g.view.present()) continue;
    if (!g.of.present()) mechanism::Fail(op, g.name, "is asked for", "none: there is no such input");
    apart.Writes(op, g.name, g.view, g.of.sizes(), DTypeOf(g.view, g.of.dtype(), wide));
    if (g.rows) mechanism::CheckContiguousRows(op, g.name, g.view);
  }
}

// Checks keys [B, at least N, heads, D] that are updated in place by `tokens`, [B, N, heads, D], an input of the name.
inline void CheckKeys(const char* op, const char* name, const ConstTensorView& tokens, const TensorView& keys,
                      mechanism::Apart& apart) {
  using mechanism::Fail;
  if (!keys.present()) Fail(op, "keys", "is absent", "a tensor");
  if (keys.rank() != 4 || keys.size(1) < tokens.size(1)) {
    Fail(op, "keys", "has shape " + keys.ShapeString(),
         "[" + std::to_string(tokens.size(0)) + ", at least " + std::to_string(tokens.size(1)) + ", " +
             std::to_string(tokens.size(2)) + ", " + std::to_string(tokens.size(3)) + "]");
  }
  apart.Reads(name, tokens);
  apart.Writes(op, "keys", keys, {tokens.size(0), keys.size(1), tokens.size(2), tokens.size(3)},
               DTypeOfFactor(keys, tokens.dtype()));
  mechanism::CheckContiguousRows(op, name, tokens);
  mechanism::CheckContiguousRows(op, "keys", keys);
}

// Describes a forward pass with these inputs: flops per pair, and the memory that it reserves.
inline mechanism::Explanation Explained(const Context& ctx, const char* kernel, const char* why, const Call& call,
                                        std::initializer_list<const ConstTensorView*> inputs, double flops,
                                        const mechanism::Reservation& memory) {
  mechanism::Explanation e;
  e.kernel = kernel;
  e.target = TargetName(ctx.allowed_targets());
  e.why = why;
  const auto heads = static_cast<double>(call.H);
  e.flops = heads * mechanism::CausalPairs(call.sequences) * flops;
  e.visited_pairs = heads * token_blocks::VisitedPairs(call.sequences);
  const ConstTensorView& q = **inputs.begin();
  e.bytes = static_cast<double>(call.B * call.T * call.H * call.Dv) * static_cast<double>(SizeOf(q.dtype()));  // of o
  for (const ConstTensorView* t : inputs) e.bytes += mechanism::Bytes(*t);
  e.workspace_bytes = memory.bytes(ctx);
  return e;
}

// Sets the results of tokens that belong to no sequence.
template <class Outputs>
void ClearOutputs(const Call& call, const Outputs& out) {
  mechanism::ClearOthers(call.sequences, out.o);
  if (!out.lse.present()) return;
  mechanism::ForOthers(call.sequences, call.B, call.T, [&](int64_t b, int64_t begin, int64_t end) {
    for (int64_t h = 0; h < call.H; ++h) {
      for (int64_t t = begin; t < end; ++t) {
        StoreDouble(out.lse.dtype(), out.lse.data(),
                    b * out.lse.stride(0) + h * out.lse.stride(1) + t * out.lse.stride(2),
                    -std::numeric_limits<double>::infinity());
      }
    }
  });
}

}  // namespace heed::transitions

#endif  // HEED_OPS_EXACT_COMMON_TRANSITIONS_CHECK_H_
