// ttt_linear in the harness: its entry, problems, and the tolerance of kernels against the references.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/state_case.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

namespace heed::ttt_linear {
namespace {

using mechanism::Shape;
using mechanism::Views;
using Form = mechanism::Form<Inputs, BackwardInputs, Options, Outputs, Gradients>;
using Problem = Form::Problem;

constexpr mechanism::DifferentiableInput<BackwardInputs, Gradients> kInputs[] = {
    {"q", "BTHK", &BackwardInputs::q, &Gradients::dq},
    {"k", "BTHK", &BackwardInputs::k, &Gradients::dk},
    {"v", "BTHV", &BackwardInputs::v, &Gradients::dv},
    {"weight", "HV", &BackwardInputs::weight, &Gradients::dweight, false, true},
    {"bias", "HV", &BackwardInputs::bias, &Gradients::dbias, false, true},
    {"eta", "BTH", &BackwardInputs::eta, &Gradients::deta, false, true},
    {"lr", "BTH", &BackwardInputs::lr, &Gradients::dlr, true, true},
    {"initial_state", "", &BackwardInputs::initial_state, &Gradients::dinitial_state}};

Shape ShapeOfState(const Problem& p) {
  const int64_t K = p.in.q.size(3);
  return {mechanism::NumSequences(p), p.in.q.size(2), 2, K + 1, K};
}
constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, &mechanism::ShapeOfRows<Problem>},
    {"state", &Outputs::final_state, &ShapeOfState, nullptr, true}};

constexpr Form kForm = {"ttt_linear", kInputs, kResults, &Forward, &Backward, &Explain, &BackwardWorkspace, &Step};

// The running error of the reference bounds the kernel's: sums count in any order, and differences by the magnitudes of
// both sides. The kernel reads W and the tokens of a chunk where the reference reads W_t, in terms of the same
// magnitudes; the factor of 2 is for its own operations, such as the product of eta and lr.
void RunReference(const Problem& p, Views expected, Views tolerance) {
  const bool backward = p.pass == "backward";
  if (backward) {
    BackwardReference(p.in, p.options, mechanism::GradientsOf(kForm, p, expected));
  } else {
    Reference(p.in, p.options, mechanism::OutputsOf(kForm, p, expected));
  }
  if (tolerance.empty()) return;
  if (backward) {
    BackwardReferenceBounds(p.in, p.options, mechanism::GradientsOf(kForm, p, tolerance));
  } else {
    ReferenceBounds(p.in, p.options, mechanism::OutputsOf(kForm, p, tolerance));
  }
  const double u = p.in.q.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24;
  mechanism::AllowErrors(p.in.q.dtype(), 2 * u, p.outputs, expected, tolerance);
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c = mechanism::CaseOf(kForm, p);
  c.title += " mini_batch=" + std::to_string(p->options.mini_batch) + " eps=" + std::to_string(p->options.eps) +
             " scale=" + std::to_string(p->options.scale) +
             (p->options.residual == Residual::kQuery ? " residual=query " : " residual=output ") + p->note;
  c.reference = [p](Views expected, Views tolerance) { RunReference(*p, expected, tolerance); };
  if (p->pass == "step") {
    const double K = static_cast<double>(p->in.q.size(3));
    c.flops = static_cast<double>(p->in.q.size(0) * p->in.q.size(2)) * 8 * K * (K + 1);
  } else {  // the backward pass makes the states again
    c.flops = (p->pass == "forward" ? 1 : 3) * Explain(Context(1), p->in, p->options).flops;
  }
  return c;
}

Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  mechanism::CheckPass(kForm, request);
  Problem p;
  p.pass = request.pass;
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const int64_t T = request.pass == "step" ? 1 : s.Tq;
  const DType dtype = request.dtype, wide = mechanism::StateDType(dtype);
  const auto tensor = [&](DType of, const Shape& sizes, const auto& fill) {
    const Buffer buffer(of, sizes, Placement::kAligned);
    fill(buffer, ++seed);
    return ConstTensorView(p.Keep(buffer));
  };
  const auto uniform = [](double low, double high) {
    return [low, high](const Buffer& buffer, uint64_t of) { mechanism::FillUniform(buffer, of, low, high); };
  };
  const auto scaled = [](double scale) {
    return [scale](const Buffer& buffer, uint64_t of) { mechanism::FillScaled(buffer, of, scale); };
  };
  p.in.q = tensor(dtype, {s.B, T, s.Hq, s.D}, mechanism::FillRows);
  p.in.k = tensor(dtype, {s.B, T, s.Hq, s.D}, mechanism::FillRows);
  p.in.v = tensor(dtype, {s.B, T, s.Hq, s.D}, scaled(1));
  p.in.weight = tensor(dtype, {s.Hq, s.D}, uniform(0.5, 1.5));
  p.in.bias = tensor(dtype, {s.Hq, s.D}, scaled(0.1));
  p.in.eta = tensor(dtype, {s.B, T, s.Hq}, uniform(0, 0.005));
  p.in.initial_state = tensor(wide, {s.B, s.Hq, 2, s.D + 1, s.D}, scaled(0.5));
  if (request.pass == "step") {
    const Buffer positions(DType::kI64, Shape{s.B}, Placement::kAligned);
    std::fill_n(positions.as<int64_t>(), s.B, s.Tk);
    p.options.positions = p.Keep(positions);
  }
  if (mechanism::Words(request.variant).Has("long_batches")) p.options.mini_batch = 64;
  if (request.pass == "backward") p.in.d_o = tensor(dtype, {s.B, T, s.Hq, s.D}, scaled(1));
  mechanism::DescribeOutputs(kForm, p);
  return ToCase(p);
}

class Maker : mechanism::RandomArguments {
 public:
  Maker(DType dtype, uint64_t seed) : RandomArguments(seed), dtype_(dtype) { p_.note = "seed=" + std::to_string(seed); }

  Case Make() {
    const DType wide = mechanism::StateDType(dtype_);
    const bool packed = Chance(0.25);
    const int64_t B = packed ? 1 : Chance(0.03) ? 0 : Integer(1, 2);
    p_.options.mini_batch = random_.Pick<int64_t>({1, 2, 3, 5, 8, 16, 16, 16, 16, 19, 32, 40, 1000});
    // Rounding errors grow with the number of mini-batches.
    const int64_t most = std::min<int64_t>(8 * p_.options.mini_batch, 70);
    const int64_t T = Chance(0.03) ? 0 : Integer(1, most), H = Integer(1, 2), N = packed ? Integer(1, 4) : B;
    const int64_t K = Chance(0.9) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33});
    const auto of_token = [&] { return Chance(0.5) ? dtype_ : wide; };
    const auto rows = [&] {
      const Buffer buffer = Layout(dtype_, {B, T, H, K}, true);
      mechanism::FillRows(buffer, ++seed_);
      return ConstTensorView(p_.Keep(buffer));
    };
    const auto uniform = [&](const Shape& sizes, double low, double high) {
      const Buffer buffer = Layout(of_token(), sizes, false);
      mechanism::FillUniform(buffer, ++seed_, low, high);
      return ConstTensorView(p_.Keep(buffer));
    };
    p_.in.q = rows();
    p_.in.k = rows();
    p_.in.v = Tensor(dtype_, {B, T, H, K}, true, 1);
    p_.in.weight = uniform({H, K}, 0.5, 1.5);
    p_.in.bias = Tensor(of_token(), {H, K}, false, 0.3);
    const double eta = random_.Pick({0.001, 0.01, 0.1});
    p_.in.eta = uniform({B, T, H}, Chance(0.1) ? -eta : 0, eta);
    if (Chance(0.5)) p_.in.lr = uniform({B, T, H}, 0, 1.5);
    DrawSequences(packed, N, T, p_);
    // Without a state, rows of the first mini-batch have no variance.
    const bool with_state = Chance(0.7);
    p_.options.eps = with_state ? random_.Pick({1e-6, 1e-2, 0.3}) : random_.Pick({1e-2, 0.3});
    if (with_state) {
      p_.in.initial_state = Tensor(wide, {N, H, 2, K + 1, K}, false, 0.5);
      if (Chance(0.5)) {
        const Buffer positions(Chance(0.5) ? DType::kI32 : DType::kI64, Shape{N});
        for (int64_t n = 0; n < N; ++n) positions.Set({n}, static_cast<double>(Integer(0, 40)));
        p_.options.positions = p_.Keep(positions);
      }
    }
    if (Chance(0.4)) p_.options.residual = Residual::kOutput;
    if (Chance(0.5)) p_.options.scale = random_.Pick({0.3, -1.0, 2.0});
    if (Chance(0.5)) {
      p_.pass = "backward";
      const double loss = dtype_ == DType::kF16 ? 0x1p-6 : 1;  // keeps gradients in the range of f16
      p_.in.d_o = Tensor(dtype_, {B, T, H, K}, true, loss);
      if (Chance(0.5)) p_.in.d_final_state = Tensor(wide, {N, H, 2, K + 1, K}, false, loss);
    }
    mechanism::DescribeOutputs(kForm, p_);
    return ToCase(p_);
  }

 private:
  ConstTensorView Tensor(DType dtype, const Shape& sizes, bool rows, double scale) {
    const Buffer buffer = Layout(dtype, sizes, rows);
    mechanism::FillScaled(buffer, ++seed_, scale);
    return p_.Keep(buffer);
  }

  DType dtype_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs({.family = "delta",
                               .variants = {"long_batches"},
                               .flops = "(6 D + 32) (2 D + 1) / 2 per token and head, backward 3 times this",
                               .bytes = "B Tq Hq (4 D + 1) size",
                               .state = "B Hq 2 D (D + 1) 4",
                               .make_case = &MakeCase,
                               .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }},
                              kForm);
}

}  // namespace heed::ttt_linear
