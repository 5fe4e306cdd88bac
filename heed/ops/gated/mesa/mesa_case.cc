// mesa in the harness: its entry, problems, and the tolerance of kernels against the references.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
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
#include "heed/ops/gated/mesa/mesa_internal.h"

namespace heed::mesa {
namespace {

using mechanism::Shape;
using mechanism::Views;
using Form = mechanism::Form<Inputs, BackwardInputs, Options, Outputs, Gradients>;
using Problem = Form::Problem;

constexpr mechanism::DifferentiableInput<BackwardInputs, Gradients> kInputs[] = {
    {"q", "BTHK", &BackwardInputs::q, &Gradients::dq},
    {"k", "BTHK", &BackwardInputs::k, &Gradients::dk},
    {"v", "BTHV", &BackwardInputs::v, &Gradients::dv},
    {"beta", "BTH", &BackwardInputs::beta, &Gradients::dbeta, false, true},
    {"lamb", "HK", &BackwardInputs::lamb, &Gradients::dlamb, false, true},
    {"log_decay", "BTH", &BackwardInputs::log_decay, &Gradients::dlog_decay, true, true},
    {"initial_state", "", &BackwardInputs::initial_state, &Gradients::dinitial_state}};

Shape ShapeOfState(const Problem& p) {
  const int64_t K = p.in.q.size(3);
  return {mechanism::NumSequences(p), p.in.q.size(2), K, K + p.in.v.size(3)};
}
constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, &mechanism::ShapeOfRows<Problem>},
    {"state", &Outputs::final_state, &ShapeOfState, nullptr, true},
    {"solution", &Outputs::solution, [](const Problem& p) { return mechanism::SizesOf(p.in.q); },
     &BackwardInputs::solution, true, true}};

constexpr Form kForm = {"mesa", kInputs, kResults, &Forward, &Backward, &Explain, &BackwardWorkspace, &Step};

void RunReference(Solver solver, const Problem& p, Views views) {
  if (p.pass == "backward") {
    return BackwardReferenceBy(solver, p.in, p.options, mechanism::GradientsOf(kForm, p, views));
  }
  ReferenceBy(solver, p.in, p.options, mechanism::OutputsOf(kForm, p, views));
}

double UnitRoundoff(const Problem& p) { return p.in.q.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24; }

// The relative error of one term. The roundings of a chain are a random walk, bounded by six standard deviations of u /
// sqrt(3). Sums over K, V and the tokens have one rounding per step, a decay has two; each step of the solver rounds
// four vectors, which add up in the worst case.
double ShareOf(const Problem& p) {
  const auto root = [](int64_t n) { return std::sqrt(static_cast<double>(n)); };
  const double walk = root(p.in.q.size(3)) + root(p.in.v.size(3)) + 3 * root(p.in.q.size(1) + 64) + 16;
  return UnitRoundoff(p) * (3.5 * walk + 4 * static_cast<double>(p.options.iterations));
}

// The error of conjugate gradients after all steps is at most 2 f^steps of the solution in the norm of A, hence 2
// f^steps sqrt(c) in the Euclidean norm, with f = (sqrt(c) - 1) / (sqrt(c) + 1) and a condition number of at most c.
// Magnitudes of solutions are c times their norm. Twice that, since gradients have products of two solutions.
double TruncationOf(const Problem& p) {
  if (p.options.eps != 0) return std::numeric_limits<double>::infinity();
  const double root = std::sqrt(ConditionBound(p.in, p.options));
  return 4 * std::pow((root - 1) / (root + 1), static_cast<double>(p.options.iterations));
}

// Problems on which the solver converges to the accuracy of the dtype are compared with direct solutions, others with
// as many steps of conjugate gradients in f64.
Solver SolverOf(const Problem& p) {
  return TruncationOf(p) < ShareOf(p) ? Solver::kCholesky : Solver::kConjugateGradients;
}

// Every result is a sum of products of up to two solutions and of inputs. Its error is at most that of one term times
// the sum of the terms' magnitudes. The magnitude of a solution is its norm times the condition number, by which the
// relative error of A may grow, and that of y counts the error of its right-hand side besides.
void Tolerance(const Problem& p, Solver solver, Views expected, Views allowed) {
  RunReference(Solver::kMagnitudes, p, allowed);
  double share = ShareOf(p);
  if (solver == Solver::kCholesky) share += TruncationOf(p);
  mechanism::AllowErrors(p.in.q.dtype(), share, p.outputs, expected, allowed);
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c = mechanism::CaseOf(kForm, p);
  c.title +=
      " iterations=" + std::to_string(p->options.iterations) + " eps=" + std::to_string(p->options.eps) + " " + p->note;
  c.reference = [p](Views expected, Views tolerance) {
    const Solver solver = SolverOf(*p);
    RunReference(solver, *p, expected);
    if (!tolerance.empty()) Tolerance(*p, solver, expected, tolerance);
  };
  const double tokens = static_cast<double>(p->in.q.size(0) * p->in.q.size(1) * p->in.q.size(2));
  const Flops each =
      FlopsOf(p->in.q.size(3), p->in.v.size(3), p->options.iterations, p->pass == "step" ? 1 : kChunkTokens);
  c.flops = tokens * (p->pass != "backward" ? each.solution + each.around
                                            : (p->in.solution.present() ? 1 : 2) * each.solution + 4 * each.around);
  return c;
}

// H_kk = sum_i w_i w_i^T of K random rows of a length of about 1, H_kv = sum_i w_i u_i^T.
void FillState(const Buffer& buffer, uint64_t seed) {
  const TensorView& t = buffer.view();
  const int64_t K = t.size(2), W = t.size(3);
  if (t.num_elements() == 0) return;
  Random random(seed);
  for (int64_t n = 0; n < t.size(0) * t.size(1); ++n) {
    std::vector<double> rows(static_cast<size_t>(K * W));
    for (double& x : rows) x = random.Normal() / std::sqrt(static_cast<double>(K));
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < W; ++j) {
        double sum = 0;
        for (int64_t l = 0; l < K; ++l)
          sum += rows[static_cast<size_t>(l * W + i)] * rows[static_cast<size_t>(l * W + j)];
        SetElement(t, Shape{n / t.size(1), n % t.size(1), i, j}, sum);
      }
    }
  }
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
  const auto make = [&](DType of, const Shape& sizes) { return Buffer(of, sizes, Placement::kAligned); };
  p.in.q = p.Keep(make(dtype, {s.B, T, s.Hq, s.D}).FillNormal(++seed));
  const Buffer k = make(dtype, {s.B, T, s.Hq, s.D}), beta = make(dtype, {s.B, T, s.Hq}),
               lamb = make(dtype, {s.Hq, s.D});
  mechanism::FillRows(k, ++seed);
  p.in.k = p.Keep(k);
  p.in.v = p.Keep(make(dtype, {s.B, T, s.Hq, s.Dv}).FillNormal(++seed));
  mechanism::FillUniform(beta, ++seed, 0, 1);
  p.in.beta = p.Keep(beta);
  mechanism::FillUniform(lamb, ++seed, 0.5, 1.5);
  p.in.lamb = p.Keep(lamb);
  if (!mechanism::Words(request.variant).Has("ungated")) {
    const Buffer g = make(dtype, {s.B, T, s.Hq});
    mechanism::FillDecays(g, ++seed, 0.05);
    p.in.log_decay = p.Keep(g);
  }
  if (request.pass == "step") {
    const Buffer state = make(wide, {s.B, s.Hq, s.D, s.D + s.Dv});
    FillState(state, ++seed);
    p.in.initial_state = p.Keep(state);
  }
  if (request.pass == "backward") {
    p.in.d_o = p.Keep(make(dtype, {s.B, T, s.Hq, s.Dv}).FillNormal(++seed));
    Context ctx(1);
    const auto forward = [&](const auto&... arguments) { Forward(ctx, arguments...); };
    mechanism::KeepResults(kForm, forward, p);
  }
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
    const int64_t T = Chance(0.03) ? 0 : Chance(0.8) ? Integer(1, 50) : Integer(60, 140);
    const int64_t H = Integer(1, 2), N = packed ? Integer(1, 4) : B, K = Channels(), V = Channels();
    const auto of_token = [&] { return Chance(0.5) ? dtype_ : wide; };
    p_.in.q = Tensor(dtype_, {B, T, H, K}, true);
    const Buffer k = Layout(dtype_, {B, T, H, K}, true), beta = Layout(of_token(), {B, T, H}, false),
                 lamb = Layout(of_token(), {H, K}, false);
    mechanism::FillRows(k, ++seed_);
    p_.in.k = p_.Keep(k);
    p_.in.v = Tensor(dtype_, {B, T, H, V}, true);
    mechanism::FillUniform(beta, ++seed_, 0, 1);
    p_.in.beta = p_.Keep(beta);
    mechanism::FillUniform(lamb, ++seed_, 0.5, 2);
    p_.in.lamb = p_.Keep(lamb);
    if (Chance(0.75)) {
      const Buffer g = Layout(of_token(), {B, T, H}, false);
      mechanism::FillDecays(g, ++seed_, random_.Pick({0.05, 0.3, 3.0}), Chance(0.2) ? 0.05 : 0);
      p_.in.log_decay = p_.Keep(g);
    }
    DrawSequences(packed, N, T, p_);
    if (Chance(0.5)) {
      const Buffer state = Layout(wide, {N, H, K, K + V}, false);
      FillState(state, ++seed_);
      p_.in.initial_state = p_.Keep(state);
    }
    p_.options.iterations = random_.Pick<int64_t>({1, 2, 5, 30, 30, 64, 100});
    if (Chance(0.2)) p_.options.eps = random_.Pick({1e-5, 1e-2});
    if (Chance(0.5)) {
      p_.pass = "backward";
      p_.in.d_o = Tensor(dtype_, {B, T, H, V}, true);
      if (Chance(0.5)) p_.in.d_final_state = Tensor(wide, {N, H, K, K + V}, false);
      if (Chance(0.5)) {
        const Buffer o(DType::kF64, p_.in.v.sizes()), solution = Layout(wide, {B, T, H, K}, true);
        Reference(p_.in, p_.options, {o.view(), {}, solution.view()});
        p_.in.solution = p_.Keep(solution);
      }
    }
    mechanism::DescribeOutputs(kForm, p_);
    return ToCase(p_);
  }

 private:
  int64_t Channels() { return Chance(0.9) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33, 48}); }

  ConstTensorView Tensor(DType dtype, const Shape& sizes, bool rows) { return p_.Keep(Normal(dtype, sizes, rows)); }

  DType dtype_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs(
      {.family = "gated",
       .variants = {"ungated"},
       .flops =
           "30 D (2 D + 32) + (4 D + 32) (D + Dv) per token and head, backward with x 30 D (2 D + 32) + 4 (4 D + 32) "
           "(D + Dv)",
       .bytes = "B Tq Hq (2 D + 2 Dv + 2) size",
       .state = "B Hq D (D + Dv) 4",
       .make_case = &MakeCase,
       .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }},
      kForm);
}

}  // namespace heed::mesa
