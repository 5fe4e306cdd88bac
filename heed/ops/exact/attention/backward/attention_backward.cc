// Attention backward on the softmax engine: check, choose a kernel, run.
#include <string>
#include <vector>

#include "heed/core/os.h"
#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"

namespace heed::attention {
namespace {

struct Named {
  const char* name;
  ConstTensorView view;
};

softmax::Pairs PairsOf(const ConstTensorView& t, std::array<int64_t, 4>* sizes) {
  int64_t strides[4] = {0, 0, 0, 0};
  sizes->fill(1);
  for (int i = 0; i < t.rank(); ++i) {
    const auto axis = static_cast<size_t>(4 - t.rank() + i);
    (*sizes)[axis] = t.size(i);
    strides[axis] = t.size(i) == 1 ? 0 : t.stride(i);
  }
  return {t.data(), t.dtype(), strides[0], strides[1], strides[2], strides[3]};
}

// Checks the outputs of Forward and their gradients, and lists them. kReference does not read o and lse, kExplain reads
// no data.
std::vector<Named> CheckResults(const Check& check, const BackwardInputs& in, bool packed, Use use) {
  std::vector<int64_t> o_shape(in.q.sizes().begin(), in.q.sizes().end());
  o_shape.back() = in.v.size(in.v.rank() - 1);
  const int heads = in.q.rank() - 2;
  std::vector<int64_t> lse_shape = {in.q.size(heads), in.q.size(heads - 1)};
  if (!packed) lse_shape.insert(lse_shape.begin(), in.q.size(0));
  const DType lse_dtype = in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;

  std::vector<Named> inputs;
  const auto read = [&](const char* name, const ConstTensorView& view, bool rows) {
    const DType dtype = rows ? in.q.dtype() : lse_dtype;
    check.Present(name, view);
    if (view.dtype() != dtype) check.Fail(name, std::string("has dtype ") + Name(view.dtype()), Name(dtype));
    check.Shape(name, view, rows ? o_shape : lse_shape);
    check.Readable(name, view);
    if (rows) check.ContiguousRows(name, view);
    inputs.push_back({name, view});
  };
  if (use == Use::kForward) {
    read("o", in.o, true);
    read("lse", in.lse, false);
  }
  if (use != Use::kExplain) read("d_o", in.d_o, true);
  if (in.d_lse.present()) read("d_lse", in.d_lse, false);
  return inputs;
}

// Checks the requested gradients, which may overlap neither these inputs nor each other.
void CheckGradients(const char* op, const Check& check, const Inputs& in, const Options& options,
                    std::vector<Named> apart, const Gradients& out, Use use) {
  ForEachGradient(
      in, options,
      [&](const char* name, TensorView Gradients::* gradient, const char* of, const ConstTensorView& input) {
        const TensorView& view = out.*gradient;
        if (!view.present()) return;
        if (!input.present()) check.Fail(name, "is asked for", std::string(of) + " with it");
        if (use == Use::kExplain) return check.Shape(name, view, {input.sizes().begin(), input.sizes().end()});
        const bool wide = use == Use::kReference && view.dtype() == DType::kF64;
        CheckOutput(op, name, view, input.sizes(), wide ? DType::kF64 : input.dtype(), in, options, input.device());
        for (const Named& other : apart) check.NoOverlap(name, view, other.name, other.view);
        apart.push_back({name, view});
      });
}

// Views of the gradients for the engine. A described tensor without data gets a non-null address, which marks it as
// present.
softmax::Gradients GradientsIn(const Gradients& out, bool packed, BackwardProblem* b) {
  static char described;
  softmax::Gradients g;
  const auto rows_of = [&](const TensorView& t) {
    softmax::Rows rows = t.present() ? RowsOf(t) : softmax::Rows();
    if (packed) rows.batch_stride = 0;
    if (t.present() && rows.data == nullptr) rows.data = &described;
    return rows;
  };
  g.dq = rows_of(out.dq);
  g.dk = rows_of(out.dk);
  g.dv = rows_of(out.dv);
  if (out.dbias.present()) {
    g.dbias = PairsOf(out.dbias, &g.dbias_sizes);
    if (g.dbias.data == nullptr) g.dbias.data = &described;
  }
  const auto on_device = [](const TensorView& t) { return t.device().type != DeviceType::kCpu; };
  if (on_device(out.dsinks)) {
    g.device_dsinks = HeadNumbersOf(out.dsinks);
  } else if (out.dsinks.present()) {
    b->dsinks.assign(static_cast<size_t>(b->problem.query_heads), 0);
    g.dsinks = b->dsinks.data();
    if (g.dsinks == nullptr) g.dsinks = reinterpret_cast<double*>(&described);
  }
  if (on_device(out.dalibi)) {
    g.device_dalibi = HeadNumbersOf(out.dalibi);
  } else if (out.dalibi.present()) {
    b->dalibi.assign(b->problem.slopes.size(), 0);
    g.dalibi = b->dalibi.data();
  }
  if (out.drelative_bias.present()) {
    b->drelative_bias.assign(static_cast<size_t>(b->problem.query_heads * b->problem.relative_bias.span), 0);
    g.drelative_bias = b->drelative_bias.data();
  }
  if (const TensorView& t = out.dlog_decay; t.present()) {
    const int last = t.rank() - 1;
    g.dlog_decay = {t.data() == nullptr ? &described : t.data(), packed ? 0 : t.stride(0), t.stride(last - 1),
                    t.stride(last)};
  }
  return g;
}

}  // namespace

BackwardProblem CheckedBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out,
                                Use use) {
  const Inputs forward = {in.q, in.k, in.v};
  const Use reads = use == Use::kExplain ? Use::kExplain : Use::kInputs;
  const Device device = use == Use::kReference ? Device() : DeviceOf(forward.q);
  const Check check(op, reads, device);
  const bool packed = options.cu_seqlens_q.present();
  BackwardProblem b;
  b.problem = CheckedProblem(op, forward, options, {}, reads, device);
  CheckGradients(op, check, forward, options, CheckResults(check, in, packed, use), out, use);
  softmax::Gradients& g = b.gradients;
  g = GradientsIn(out, packed, &b);
  if (use == Use::kForward) {
    b.problem.o = RowsOf(in.o);
    b.problem.lse = LseRowsOf(in.lse);
    g.d_o = RowsOf(in.d_o);
    if (in.d_lse.present()) g.d_lse = LseRowsOf(in.d_lse);
    if (packed) {
      for (softmax::Rows* rows : {&b.problem.o, &b.problem.lse, &g.d_o, &g.d_lse}) {
        rows->batch_stride = 0;
      }
    }
  }
  return b;
}

namespace {

// Clears rows of a packed gradient that belong to no sequence.
void FillSurplus(const TensorView& t, int64_t used) {
  if (!t.present()) return;
  const int rank = t.rank();
  for (int64_t token = used; token < t.size(rank - 3); ++token) {
    for (int64_t h = 0; h < t.size(rank - 2); ++h) {
      for (int64_t e = 0; e < t.size(rank - 1); ++e) {
        StoreDouble(t.dtype(), t.data(), token * t.stride(rank - 3) + h * t.stride(rank - 2) + e, 0);
      }
    }
  }
}

// Clears the gradients of log decays of tokens that belong to no sequence.
void FillSurplusDecays(const TensorView& t, int64_t used) {
  if (!t.present()) return;
  const int heads = t.rank() - 1;
  for (int64_t token = used; token < t.size(heads - 1); ++token) {
    for (int64_t h = 0; h < t.size(heads); ++h) {
      StoreDouble(t.dtype(), t.data(), token * t.stride(heads - 1) + h * t.stride(heads), 0);
    }
  }
}

// Sums in double into a tensor of rank 1 or 2.
void StoreSums(const TensorView& t, const std::vector<double>& sums) {
  if (!t.present()) return;
  const int64_t columns = t.size(t.rank() - 1);
  for (size_t i = 0; i < sums.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const int64_t row = t.rank() == 2 ? at / columns * t.stride(0) : 0;
    StoreDouble(t.dtype(), t.data(), row + at % columns * t.stride(t.rank() - 1), sums[i]);
  }
}

// Stores sums [Hq, distances that pairs can have] in a tensor with the sums of all distances.
void StoreDistances(const TensorView& t, const std::vector<double>& sums) {
  if (!t.present()) return;
  const int64_t span = std::ssize(sums) / std::max<int64_t>(t.size(0), 1);
  for (int64_t h = 0; h < t.size(0); ++h) {
    for (int64_t d = 0; d < t.size(1); ++d) {
      StoreDouble(t.dtype(), t.data(), h * t.stride(0) + d * t.stride(1),
                  d < span ? sums[static_cast<size_t>(h * span + d)] : 0);
    }
  }
}

}  // namespace

void ClearSurplusRows(const softmax::Problem& p, const Gradients& out) {
  int64_t queries = 0, keys = 0;
  for (const softmax::Sequence& s : p.sequences) {
    queries = std::max(queries, s.first_q + s.num_queries);
    keys = std::max(keys, s.first_k + s.num_keys);
  }
  FillSurplus(out.dq, queries);
  FillSurplus(out.dk, keys);
  FillSurplus(out.dv, keys);
  FillSurplusDecays(out.dlog_decay, keys);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "attention::Backward";
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  BackwardProblem b = CheckedBackward(kOp, in, options, out, Use::kForward);
  if (b.problem.device.type != DeviceType::kCpu) {
    return ForDevice(kOp, ctx, options, in.q, in.k.size(in.k.rank() - 3), /*to_lengths=*/false, &b.problem,
                     softmax::Pass::kBackward)
        .backward(ctx, b.problem, b.gradients);
  }
  RefuseSlowPairs(kOp, ctx, b.problem);
  SumLogDecays(kOp, ctx, &b.problem);
  RunBackward(kOp, ctx, options, b.gradients, &b.problem);
  StoreSums(out.dsinks, b.dsinks);
  StoreSums(out.dalibi, b.dalibi);
  StoreDistances(out.drelative_bias, b.drelative_bias);
  if (options.cu_seqlens_q.present()) ClearSurplusRows(b.problem, out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  CheckedBackward("attention::BackwardReference", in, options, out, Use::kReference);
  ReferenceGradients(in, options, out, {}, {});
}

int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "attention::BackwardWorkspace";
  const BackwardProblem b = CheckedBackward(kOp, in, options, out, Use::kExplain);
  return BackwardBytesOf(kOp, ctx, b.problem, options, b.gradients);
}

}  // namespace heed::attention
