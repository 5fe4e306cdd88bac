// titans in the harness: its entry, problems, and the tolerance of kernels against the references.
#include <cstdint>

#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/state_case.h"
#include "heed/ops/delta/common/test_time_training_case.h"
#include "heed/ops/delta/titans/titans_internal.h"

namespace heed::titans {
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
    {"theta", "BTH", &BackwardInputs::theta, &Gradients::dtheta, false, true},
    {"alpha", "BTH", &BackwardInputs::alpha, &Gradients::dalpha, false, true},
    {"eta", "BTH", &BackwardInputs::eta, &Gradients::deta, false, true},
    {"initial_state", "", &BackwardInputs::initial_state, &Gradients::dinitial_state}};

Shape ShapeOfState(const Problem& p) {
  const int64_t K = p.in.q.size(3);
  return {mechanism::NumSequences(p), p.in.q.size(2), 3, K, K};
}
constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, &mechanism::ShapeOfRows<Problem>},
    {"state", &Outputs::final_state, &ShapeOfState, nullptr, true}};

constexpr Form kForm = {"titans", kInputs, kResults, &Forward, &Backward, &Explain, &BackwardWorkspace, &Step};

Case ToCase(const Problem& p) {
  const auto K = static_cast<double>(p.in.q.size(3));
  return test_time_training::ToCase(kForm, p, 10 * K * K);
}

Case MakeCase(const CaseRequest& request) {
  test_time_training::FixedProblem<Form> problem(kForm, request);
  Problem& p = problem.p;
  p.in.theta = problem.Tokens(0, 0.001);
  p.in.alpha = problem.Tokens(0, 0.01);
  p.in.eta = problem.Tokens(0, 0.9);
  p.in.initial_state = problem.State(3, request.sizes.D);
  problem.Finish();
  return ToCase(p);
}

Case RandomCase(DType dtype, uint64_t seed) {
  test_time_training::RandomProblem<Form> problem(kForm, dtype, seed);
  Problem& p = problem.p;
  const double theta = problem.Pick({0.0003, 0.003, 0.03});
  p.in.theta = problem.Tokens(problem.Chance(0.1) ? -theta : 0, theta);
  p.in.eta = problem.Tokens(0, problem.Pick({0.0, 0.5, 0.9, 1.0}));
  const bool with_state = problem.DrawSequences();
  // Weight decay leaves rows of little variance.
  p.in.alpha = problem.Tokens(0, p.options.eps < 0.1 ? problem.Pick({0.0, 0.01}) : problem.Pick({0.1, 1.0}));
  if (with_state) problem.AddState(3, problem.channels());
  problem.Finish(3, problem.channels());
  return ToCase(p);
}

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs({.family = "delta",
                               .variants = {"long_batches"},
                               .flops = "(10 D + 64) D per token and head, backward 3 times this",
                               .bytes = "B Tq Hq (4 D + 3) size",
                               .state = "B Hq 3 D D 4",
                               .make_case = &MakeCase,
                               .random_case = &RandomCase},
                              kForm);
}

}  // namespace heed::titans
