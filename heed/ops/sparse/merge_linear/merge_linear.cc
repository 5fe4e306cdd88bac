// Merges exact and linear attention under one denominator: checks, and the sum over rows for the gradient of a gate.
#include "heed/ops/sparse/merge_linear/merge_linear.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/sparse/merge_linear/merge_linear_internal.h"

namespace heed::merge_linear {
namespace {

using mechanism::CheckTensor;
using mechanism::Fail;

// Checks an input: any float dtype, but f64 only together with f64 where `as_o` is set.
void CheckInput(const char* op, const char* name, const ConstTensorView& t, const mechanism::Axes& shape, DType dtype,
                bool as_o) {
  mechanism::CheckFloat(op, name, t);
  CheckTensor(op, name, t, shape, t.dtype(), true);
  if (as_o && (t.dtype() == DType::kF64) != (dtype == DType::kF64)) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()),
         dtype == DType::kF64 ? "f64 as o" : "f32, bf16 or f16 beside " + std::string(Name(dtype)));
  }
}

mechanism::Apart CheckedInputs(const char* op, const Inputs& in) {
  mechanism::CheckFloat(op, "o", in.o);
  if (in.o.rank() != 4) Fail(op, "o", "has shape " + in.o.ShapeString(), "[B, T, H, Dv]");
  mechanism::CheckContiguousRows(op, "o", in.o);
  const int64_t B = in.o.size(0), T = in.o.size(1), H = in.o.size(2);
  const DType dtype = in.o.dtype();
  CheckInput(op, "lse", in.lse, {B, H, T}, dtype, true);
  CheckInput(op, "num", in.num, in.o.sizes(), dtype, true);
  mechanism::CheckContiguousRows(op, "num", in.num);
  CheckInput(op, "den", in.den, {B, T, H}, dtype, false);
  if (in.gate.present()) CheckInput(op, "gate", in.gate, {H}, dtype, false);
  mechanism::Apart apart;
  for (const auto& [name, view] :
       {std::pair{"o", in.o}, {"lse", in.lse}, {"num", in.num}, {"den", in.den}, {"gate", in.gate}}) {
    apart.Reads(name, view);
  }
  return apart;
}

void CheckOutput(const char* op, const char* name, const TensorView& t, const ConstTensorView& like, bool rows,
                 bool wide, mechanism::Apart& apart) {
  apart.Writes(op, name, t, like.sizes(), wide && t.dtype() == DType::kF64 ? DType::kF64 : like.dtype());
  if (rows) mechanism::CheckContiguousRows(op, name, t);
}

}  // namespace

void CheckForward(const char* op, const Inputs& in, const TensorView& out, bool wide) {
  mechanism::Apart apart = CheckedInputs(op, in);
  CheckOutput(op, "out", out, in.o, true, wide, apart);
}

void CheckBackward(const char* op, const BackwardInputs& in, const Gradients& out, bool wide) {
  mechanism::Apart apart = CheckedInputs(op, in);
  CheckTensor(op, "d_o", in.d_o, in.o.sizes(), in.o.dtype(), true);
  mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  apart.Reads("d_o", in.d_o);
  for (const auto& [name, view, of, rows] : {std::tuple{"dexact", out.dexact, in.o, true},
                                             {"dlse", out.dlse, in.lse, false},
                                             {"dnum", out.dnum, in.num, true},
                                             {"dden", out.dden, in.den, false},
                                             {"dgate", out.dgate, in.gate, false}}) {
    if (!view.present()) continue;
    if (!of.present()) Fail(op, name, "is asked for", "gate with it");
    CheckOutput(op, name, view, of, rows, wide, apart);
  }
}

void Forward(Context& ctx, const Inputs& in, const TensorView& out) {
  const os::ScopedFloatControl float_control;
  CheckForward("merge_linear::Forward", in, out, false);
  MergeRows(ctx, in, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  CheckBackward("merge_linear::Backward", in, out, false);
  const int64_t rows = in.o.size(0) * in.o.size(1), H = in.o.size(2);
  std::vector<double> terms(static_cast<size_t>(out.dgate.present() ? rows * H : 0));
  MergeRowsBackward(ctx, in, out, out.dgate.present() ? terms.data() : nullptr);
  for (int64_t h = 0; out.dgate.present() && h < H; ++h) {
    double sum = 0;
    for (int64_t row = 0; row < rows; ++row) sum += terms[static_cast<size_t>(row * H + h)];
    StoreDouble(out.dgate.dtype(), out.dgate.data(), h * out.dgate.stride(0), sum);
  }
}

}  // namespace heed::merge_linear
