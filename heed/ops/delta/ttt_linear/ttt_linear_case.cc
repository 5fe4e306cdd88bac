// ttt_linear in the harness: its entry, problems, and the tolerance of kernels against the references.
#include <cstdint>

#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/state_case.h"
#include "heed/ops/delta/common/test_time_training_case.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

namespace heed::ttt_linear {
namespace {

using mechanism::Shape;
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

Case ToCase(const Problem& p) {
  const auto K = static_cast<double>(p.in.q.size(3));
  return test_time_training::ToCase(kForm, p, 8 * K * (K + 1),
                                    p.options.residual == Residual::kQuery ? " residual=query" : " residual=output");
}

Case MakeCase(const CaseRequest& request) {
  test_time_training::FixedProblem<Form> problem(kForm, request);
  Problem& p = problem.p;
  p.in.eta = problem.Tokens(0, 0.005);
  p.in.initial_state = problem.State(2, request.sizes.D + 1);
  problem.Finish();
  return ToCase(p);
}

Case RandomCase(DType dtype, uint64_t seed) {
  test_time_training::RandomProblem<Form> problem(kForm, dtype, seed);
  Problem& p = problem.p;
  const double eta = problem.Pick({0.001, 0.01, 0.1});
  p.in.eta = problem.Tokens(problem.Chance(0.1) ? -eta : 0, eta);
  if (problem.Chance(0.5)) p.in.lr = problem.Tokens(0, 1.5);
  if (problem.DrawSequences()) problem.AddState(2, problem.channels() + 1);
  if (problem.Chance(0.4)) p.options.residual = Residual::kOutput;
  problem.Finish(2, problem.channels() + 1);
  return ToCase(p);
}

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs({.family = "delta",
                               .variants = {"long_batches"},
                               .flops = "(6 D + 32) (2 D + 1) / 2 per token and head, backward 3 times this",
                               .bytes = "B Tq Hq (4 D + 1) size",
                               .state = "B Hq 2 D (D + 1) 4",
                               .make_case = &MakeCase,
                               .random_case = &RandomCase},
                              kForm);
}

}  // namespace heed::ttt_linear
