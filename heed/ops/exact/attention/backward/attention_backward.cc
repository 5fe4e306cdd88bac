// Attention backward on the softmax engine: check, choose a kernel, run.
#include <string>
#include <vector>

#include "heed/core/os.h"
#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"
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

}  // namespace

BackwardProblem CheckedBackward(const char* op, const BackwardInputs& in,
                                const Options& options, const Gradients& out, Use use) {
  const Inputs forward = {in.q, in.k, in.v};
  const bool explain = use == Use::kExplain;
  BackwardProblem b;
  b.problem = CheckedProblem(op, forward, options, {},
                             explain ? Use::kExplain : Use::kInputs);
  const Check check(op, explain ? Use::kExplain : Use::kInputs);

  std::vector<int64_t> o_shape(in.q.sizes().begin(), in.q.sizes().end());
  o_shape.back() = in.v.size(in.v.rank() - 1);
  const int heads = in.q.rank() - 2;
  std::vector<int64_t> lse_shape = {in.q.size(heads), in.q.size(heads - 1)};
  const bool packed = options.cu_seqlens_q.present();
  if (!packed) lse_shape.insert(lse_shape.begin(), in.q.size(0));
  const DType lse_dtype = in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;

  const auto read = [&](const Named& input, const std::vector<int64_t>& shape, DType dtype,
                        bool rows) {
    check.Present(input.name, input.view);
    if (input.view.dtype() != dtype) {
      check.Fail(input.name, std::string("has dtype ") + Name(input.view.dtype()),
                 Name(dtype));
    }
    check.Shape(input.name, input.view, shape);
    check.Readable(input.name, input.view);
    if (rows) check.ContiguousRows(input.name, input.view);
  };
  std::vector<Named> inputs;
  if (use == Use::kForward) {
    inputs = {{"o", in.o}, {"lse", in.lse}};
    read(inputs[0], o_shape, in.q.dtype(), true);
    read(inputs[1], lse_shape, lse_dtype, false);
  }
  if (!explain) {
    inputs.push_back({"d_o", in.d_o});
    read(inputs.back(), o_shape, in.q.dtype(), true);
  }
  if (in.d_lse.present()) {
    inputs.push_back({"d_lse", in.d_lse});
    read(inputs.back(), lse_shape, lse_dtype, false);
  }

  std::vector<Named> written;
  const auto write = [&](const char* name, const TensorView& view, const char* of,
                         const ConstTensorView& input) {
    if (!view.present()) return;
    if (!input.present()) check.Fail(name, "is asked for", std::string(of) + " with it");
    const DType dtype =
        use == Use::kReference && view.dtype() == DType::kF64 ? DType::kF64 : input.dtype();
    if (explain) {
      check.Shape(name, view, {input.sizes().begin(), input.sizes().end()});
      return;
    }
    CheckOutput(op, name, view, input.sizes(), dtype, forward, options);
    for (const Named& other : inputs) {
      check.NoOverlap(name, view, other.name, other.view);
    }
    for (const Named& other : written) {
      check.NoOverlap(name, view, other.name, other.view);
    }
    written.push_back({name, view});
  };
  write("dq", out.dq, "q", in.q);
  write("dk", out.dk, "k", in.k);
  write("dv", out.dv, "v", in.v);
  write("dbias", out.dbias, "bias", options.bias);
  write("dsinks", out.dsinks, "sinks", options.sinks);
  write("dalibi", out.dalibi, "alibi", options.alibi);
  write("dlog_decay", out.dlog_decay, "log_decay", options.log_decay);

  softmax::Gradients& g = b.gradients;
  // Of what is only described, an address that is not null says that it is there.
  static char described;
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
  if (out.dsinks.present()) {
    b.dsinks.assign(static_cast<size_t>(in.q.size(heads)), 0);
    g.dsinks = b.dsinks.data();
    if (g.dsinks == nullptr) g.dsinks = reinterpret_cast<double*>(&described);
  }
  if (out.dalibi.present()) {
    b.dalibi.assign(b.problem.slopes.size(), 0);
    g.dalibi = b.dalibi.data();
  }
  if (const TensorView& t = out.dlog_decay; t.present()) {
    const int last = t.rank() - 1;
    g.dlog_decay = {t.data() == nullptr ? &described : t.data(), packed ? 0 : t.stride(0),
                    t.stride(last - 1), t.stride(last)};
  }
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

// Rows of a packed gradient that belong to no sequence.
void FillSurplus(const TensorView& t, int64_t used) {
  if (!t.present()) return;
  const int rank = t.rank();
  for (int64_t token = used; token < t.size(rank - 3); ++token) {
    for (int64_t h = 0; h < t.size(rank - 2); ++h) {
      for (int64_t e = 0; e < t.size(rank - 1); ++e) {
        StoreDouble(t.dtype(), t.data(),
                    token * t.stride(rank - 3) + h * t.stride(rank - 2) + e, 0);
      }
    }
  }
}

// The same for log decays.
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

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  constexpr char kOp[] = "attention::Backward";
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  BackwardProblem b = CheckedBackward(kOp, in, options, out, Use::kForward);
  SumLogDecays(kOp, ctx, &b.problem);
  RunBackward(kOp, ctx, options, b.gradients, &b.problem);
  StoreSums(out.dsinks, b.dsinks);
  StoreSums(out.dalibi, b.dalibi);
  if (options.cu_seqlens_q.present()) ClearSurplusRows(b.problem, out);
}

void BackwardReference(const BackwardInputs& in, const Options& options,
                       const Gradients& out) {
  CheckedBackward("attention::BackwardReference", in, options, out, Use::kReference);
  ReferenceGradients(in, options, out, {}, {});
}

int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in,
                          const Options& options, const Gradients& out) {
  constexpr char kOp[] = "attention::BackwardWorkspace";
  const BackwardProblem b = CheckedBackward(kOp, in, options, out, Use::kExplain);
  return BackwardBytesOf(kOp, ctx, b.problem, options, b.gradients);
}

}  // namespace heed::attention
