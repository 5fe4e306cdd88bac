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
#include "heed/mechanism/check_internal.h"
#include "heed/ops/gated/mesa/mesa_internal.h"

namespace heed::mesa {
namespace {

using Shape = std::vector<int64_t>;
using Views = std::span<const TensorView>;

// Arguments of one call with their memory, which copies share.
struct Problem {
  BackwardInputs in;  // d_o is absent in a forward pass; in a step, initial_state is the state
  Options options;
  std::string pass = "forward";
  std::vector<OutputSpec> outputs;
  std::vector<Buffer> memory;
  std::string note;

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
  std::vector<std::pair<const char*, ConstTensorView>> Tensors() const {
    return {{"q", in.q},
            {"k", in.k},
            {"v", in.v},
            {"beta", in.beta},
            {"lamb", in.lamb},
            {"log_decay", in.log_decay},
            {"initial_state", in.initial_state},
            {"d_o", in.d_o},
            {"d_state", in.d_final_state},
            {"solution", in.solution},
            {"lengths", options.lengths},
            {"starts", options.starts},
            {"cu_seqlens", options.cu_seqlens}};
  }
};

Shape ShapeOf(const ConstTensorView& t) { return {t.sizes().begin(), t.sizes().end()}; }

void Describe(Problem& p) {
  const BackwardInputs& in = p.in;
  p.outputs.clear();
  if (p.pass == "backward") {
    for (const auto& [name, of] : {std::pair{"dq", in.q},
                                   {"dk", in.k},
                                   {"dv", in.v},
                                   {"dbeta", in.beta},
                                   {"dlamb", in.lamb},
                                   {"dlog_decay", in.log_decay},
                                   {"dinitial_state", in.initial_state}}) {
      if (of.present()) p.outputs.push_back({name, of.dtype(), ShapeOf(of), {}});
    }
    return;
  }
  const int64_t sequences = p.options.cu_seqlens.present() ? p.options.cu_seqlens.size(0) - 1 : in.q.size(0);
  const DType wide = mechanism::StateDType(in.q.dtype());
  Shape o = ShapeOf(in.v);
  if (p.pass == "step") o.erase(o.begin() + 1);
  p.outputs = {{"o", in.v.dtype(), o, {}},
               {"state", wide, {sequences, in.q.size(2), in.q.size(3), in.q.size(3) + in.v.size(3)}, {}}};
  if (p.pass == "forward") p.outputs.push_back({"solution", wide, ShapeOf(in.q), {}});
}

Gradients ToGradients(const Problem& p, Views views) {
  Gradients out;
  const std::map<std::string, TensorView*> places = {{"dq", &out.dq},
                                                     {"dk", &out.dk},
                                                     {"dv", &out.dv},
                                                     {"dbeta", &out.dbeta},
                                                     {"dlamb", &out.dlamb},
                                                     {"dlog_decay", &out.dlog_decay},
                                                     {"dinitial_state", &out.dinitial_state}};
  for (size_t i = 0; i < views.size(); ++i) *places.at(p.outputs[i].name) = views[i];
  return out;
}

// o as a tensor with an axis of one token.
TensorView WithToken(const TensorView& o) {
  return {o.data(), o.dtype(), {o.size(0), 1, o.size(1), o.size(2)}, {o.stride(0), 0, o.stride(1), o.stride(2)}};
}
ConstTensorView WithoutToken(const ConstTensorView& t) {
  if (!t.present()) return {};
  Shape sizes = ShapeOf(t), strides(t.strides().begin(), t.strides().end());
  sizes.erase(sizes.begin() + 1);
  strides.erase(strides.begin() + 1);
  return {t.data(), t.dtype(), sizes, strides};
}

void RunReference(Solver solver, const Problem& p, Views views) {
  if (p.pass == "backward") return BackwardReferenceBy(solver, p.in, p.options, ToGradients(p, views));
  if (p.pass == "step") return ReferenceBy(solver, p.in, p.options, {WithToken(views[0]), views[1], {}});
  ReferenceBy(solver, p.in, p.options, {views[0], views[1], views[2]});
}

void Run(const Problem& p, Context& ctx, Views views) {
  if (p.pass == "backward") return Backward(ctx, p.in, p.options, ToGradients(p, views));
  if (p.pass == "forward") return Forward(ctx, p.in, p.options, {views[0], views[1], views[2]});
  const ConstTensorView& state = p.in.initial_state;
  if (state.num_elements() > 0) {
    Shape index(4);
    do SetElement(views[1], index, GetElement(state, index));
    while (NextIndex(state.sizes(), index));
  }
  StepInputs token;
  token.q = WithoutToken(p.in.q);
  token.k = WithoutToken(p.in.k);
  token.v = WithoutToken(p.in.v);
  token.beta = WithoutToken(p.in.beta);
  token.lamb = p.in.lamb;
  token.log_decay = WithoutToken(p.in.log_decay);
  Step(ctx, token, p.options, views[1], views[0]);
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
  const double u = UnitRoundoff(p);
  for (size_t i = 0; i < allowed.size(); ++i) {
    const DType dtype = p.outputs[i].dtype;
    const double rounding = dtype == DType::kBF16 ? 1.01 * 0x1p-8 : dtype == DType::kF16 ? 1.01 * 0x1p-11 : 2 * u;
    const double least = dtype == DType::kF16 ? 0x1p-24 : p.in.q.dtype() == DType::kF64 ? 0x1p-1000 : 0x1p-110;
    if (allowed[i].num_elements() == 0) continue;
    Shape index(static_cast<size_t>(allowed[i].rank()));
    do {
      const double value = std::abs(GetElement(expected[i], index));
      SetElement(allowed[i], index, share * GetElement(allowed[i], index) + rounding * value + least);
    } while (NextIndex(allowed[i].sizes(), index));
  }
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.pass = p->pass;
  c.title = std::string("mesa ") + Name(p->in.q.dtype());
  for (const auto& [name, view] : p->Tensors()) {
    if (!view.present()) continue;
    c.title += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
    c.bytes += mechanism::Bytes(view);
  }
  c.title +=
      " iterations=" + std::to_string(p->options.iterations) + " eps=" + std::to_string(p->options.eps) + " " + p->note;
  c.outputs = p->outputs;
  c.run = [p](Context& ctx, Views views) { Run(*p, ctx, views); };
  c.reference = [p](Views expected, Views tolerance) {
    const Solver solver = SolverOf(*p);
    RunReference(solver, *p, expected);
    if (!tolerance.empty()) Tolerance(*p, solver, expected, tolerance);
  };
  if (p->pass == "forward") {
    c.timed = [p](Context& ctx, Views views) { Forward(ctx, p->in, p->options, {views[0], {}, {}}); };
  }
  for (const OutputSpec& output : c.outputs) {
    double size = static_cast<double>(SizeOf(output.dtype));
    for (const int64_t axis : output.sizes) size *= static_cast<double>(axis);
    c.bytes += size;
  }
  const double K = static_cast<double>(p->in.q.size(3)), V = static_cast<double>(p->in.v.size(3));
  const double tokens = static_cast<double>(p->in.q.size(0) * p->in.q.size(1) * p->in.q.size(2));
  // Pairs of tokens of a chunk; a step has none.
  const double pairs = p->pass == "step" ? 2 : 32;
  const double solution = static_cast<double>(p->options.iterations) * K * (2 * K + pairs);
  const double around = (4 * K + pairs) * (K + V);
  c.flops =
      tokens * (p->pass != "backward" ? solution + around : (p->in.solution.present() ? 1 : 2) * solution + 4 * around);
  return c;
}

// Fills log decays with exponentials of this mean, negated, and some with -infinity.
void FillDecays(const Buffer& buffer, uint64_t seed, double mean, double cuts = 0) {
  mechanism::FillEach(buffer, seed, [mean, cuts](Random& random) {
    const double x = mean * std::log(1 - random.Uniform(0, 1));
    return random.Chance(cuts) ? -std::numeric_limits<double>::infinity() : x;
  });
}
void FillUniform(const Buffer& buffer, uint64_t seed, double low, double high) {
  mechanism::FillEach(buffer, seed, [low, high](Random& random) { return random.Uniform(low, high); });
}
// Keys of a length of about 1.
void FillKeys(const Buffer& buffer, uint64_t seed) {
  const double scale = 1 / std::sqrt(static_cast<double>(buffer.view().sizes().back()));
  mechanism::FillEach(buffer, seed, [scale](Random& random) { return scale * random.Normal(); });
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
  if (request.pass != "forward" && request.pass != "backward" && request.pass != "step") {
    throw InvalidArgument("mesa: pass is " + request.pass + ", expected forward, backward or step");
  }
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
  FillKeys(k, ++seed);
  p.in.k = p.Keep(k);
  p.in.v = p.Keep(make(dtype, {s.B, T, s.Hq, s.Dv}).FillNormal(++seed));
  FillUniform(beta, ++seed, 0, 1);
  p.in.beta = p.Keep(beta);
  FillUniform(lamb, ++seed, 0.5, 1.5);
  p.in.lamb = p.Keep(lamb);
  if (!mechanism::Words(request.variant).Has("ungated")) {
    const Buffer g = make(dtype, {s.B, T, s.Hq});
    FillDecays(g, ++seed, 0.05);
    p.in.log_decay = p.Keep(g);
  }
  if (request.pass == "step") {
    const Buffer state = make(wide, {s.B, s.Hq, s.D, s.D + s.Dv});
    FillState(state, ++seed);
    p.in.initial_state = p.Keep(state);
  }
  if (request.pass == "backward") {
    p.in.d_o = p.Keep(make(dtype, {s.B, T, s.Hq, s.Dv}).FillNormal(++seed));
    const Buffer o = make(dtype, {s.B, T, s.Hq, s.Dv}), solution = make(wide, {s.B, T, s.Hq, s.D});
    Context ctx(1);
    Forward(ctx, p.in, p.options, {o.view(), {}, solution.view()});
    p.in.solution = p.Keep(solution);
  }
  Describe(p);
  return ToCase(p);
}

class Maker {
 public:
  Maker(DType dtype, uint64_t seed) : dtype_(dtype), random_(seed, 12), seed_(seed * 64) {
    p_.note = "seed=" + std::to_string(seed);
  }

  Case Make() {
    const DType wide = mechanism::StateDType(dtype_);
    const bool packed = Chance(0.25);
    const int64_t B = packed ? 1 : Chance(0.03) ? 0 : Integer(1, 2);
    const int64_t T = Chance(0.03) ? 0 : Chance(0.8) ? Integer(1, 50) : Integer(60, 140);
    const int64_t H = Integer(1, 2), N = packed ? Integer(1, 4) : B, K = Channels(), V = Channels();
    const auto of_token = [&] { return Chance(0.5) ? dtype_ : wide; };
    p_.in.q = Normal(dtype_, {B, T, H, K}, true);
    const Buffer k = Layout(dtype_, {B, T, H, K}, true), beta = Layout(of_token(), {B, T, H}, false),
                 lamb = Layout(of_token(), {H, K}, false);
    FillKeys(k, ++seed_);
    p_.in.k = p_.Keep(k);
    p_.in.v = Normal(dtype_, {B, T, H, V}, true);
    FillUniform(beta, ++seed_, 0, 1);
    p_.in.beta = p_.Keep(beta);
    FillUniform(lamb, ++seed_, 0.5, 2);
    p_.in.lamb = p_.Keep(lamb);
    if (Chance(0.75)) {
      const Buffer g = Layout(of_token(), {B, T, H}, false);
      FillDecays(g, ++seed_, random_.Pick({0.05, 0.3, 3.0}), Chance(0.2) ? 0.05 : 0);
      p_.in.log_decay = p_.Keep(g);
    }
    if (packed) {
      const Buffer bounds(DType::kI64, Shape{N + 1});
      std::vector<int64_t> cuts = {0, T};
      while (static_cast<int64_t>(cuts.size()) <= N) cuts.push_back(Integer(0, T));
      std::sort(cuts.begin(), cuts.end());
      std::copy(cuts.begin(), cuts.end(), bounds.as<int64_t>());
      p_.options.cu_seqlens = p_.Keep(bounds);
    } else if (Chance(0.3) && B > 0) {
      const Buffer lengths(DType::kI32, Shape{B}), starts(DType::kI32, Shape{B});
      for (int64_t b = 0; b < B; ++b) {
        lengths.as<int32_t>()[b] = static_cast<int32_t>(Integer(0, T));
        starts.as<int32_t>()[b] = static_cast<int32_t>(Integer(0, T / 2));
      }
      p_.options.lengths = p_.Keep(lengths);
      p_.options.starts = p_.Keep(starts);
    }
    if (Chance(0.5)) {
      const Buffer state = Layout(wide, {N, H, K, K + V}, false);
      FillState(state, ++seed_);
      p_.in.initial_state = p_.Keep(state);
    }
    p_.options.iterations = random_.Pick<int64_t>({1, 2, 5, 30, 30, 64, 100});
    if (Chance(0.2)) p_.options.eps = random_.Pick({1e-5, 1e-2});
    if (Chance(0.5)) {
      p_.pass = "backward";
      p_.in.d_o = Normal(dtype_, {B, T, H, V}, true);
      if (Chance(0.5)) p_.in.d_final_state = Normal(wide, {N, H, K, K + V}, false);
      if (Chance(0.5)) {
        const Buffer o(DType::kF64, p_.in.v.sizes()), solution = Layout(wide, {B, T, H, K}, true);
        Reference(p_.in, p_.options, {o.view(), {}, solution.view()});
        p_.in.solution = p_.Keep(solution);
      }
    }
    Describe(p_);
    return ToCase(p_);
  }

 private:
  bool Chance(double probability) { return random_.Chance(probability); }
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }
  int64_t Channels() { return Chance(0.9) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33, 48}); }

  // Two axes in either order, gaps between rows, and columns too without `rows`; against either guard page.
  Buffer Layout(DType dtype, const Shape& sizes, bool rows) {
    std::vector<size_t> order;  // from the innermost axis outwards
    for (size_t axis = sizes.size(); axis-- > 0;) order.push_back(axis);
    if (Chance(0.4)) std::swap(order[rows ? 1 : 0], order[rows ? 2 : 1]);
    Shape strides(sizes.size());
    int64_t next = 1;
    for (const size_t axis : order) {
      strides[axis] = next;
      next = next * std::max<int64_t>(sizes[axis], 1) + (Chance(0.3) ? Integer(1, 3) : 0);
    }
    const Placement placement = Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard;
    return Buffer(dtype, sizes, strides, placement, Integer(0, 5));
  }
  ConstTensorView Normal(DType dtype, const Shape& sizes, bool rows) {
    return p_.Keep(Layout(dtype, sizes, rows).FillNormal(++seed_));
  }

  DType dtype_;
  Random random_;
  uint64_t seed_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return {
      .name = "mesa",
      .family = "gated",
      .passes = {"forward", "backward", "step"},
      .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
      .variants = {"ungated"},
      .flops =
          "30 D (2 D + 32) + (4 D + 32) (D + Dv) per token and head, backward with x 30 D (2 D + 32) + 4 (4 D + 32) "
          "(D + Dv)",
      .bytes = "B Tq Hq (2 D + 2 Dv + 2) size",
      .state = "B Hq D (D + Dv) 4",
      .make_case = &MakeCase,
      .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }};
}

}  // namespace heed::mesa
