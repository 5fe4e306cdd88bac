// log_linear_attention in the harness: its entry, problems, and the tolerance of kernels against the reference.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
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
#include "heed/ops/gated/log_linear_attention/log_linear_attention_internal.h"

namespace heed::log_linear_attention {
namespace {

using mechanism::Shape;
using mechanism::Views;
using Form = mechanism::Form<Inputs, BackwardInputs, Options, Outputs, Gradients>;
using Problem = Form::Problem;

// Value heads are heads too.
constexpr mechanism::DifferentiableInput<BackwardInputs, Gradients> kInputs[] = {
    {"q", "BTHK", &BackwardInputs::q, &Gradients::dq},
    {"k", "BTHK", &BackwardInputs::k, &Gradients::dk},
    {"v", "BTHV", &BackwardInputs::v, &Gradients::dv},
    {"level_scales", "BTHL", &BackwardInputs::level_scales, &Gradients::dlevel_scales, false, true},
    {"log_decay", "BTH", &BackwardInputs::log_decay, &Gradients::dlog_decay, true, true},
    {"initial_state", "", &BackwardInputs::initial_state, &Gradients::dinitial_state}};

Shape ShapeOfState(const Problem& p) {
  return {mechanism::NumSequences(p), p.in.v.size(2), p.in.level_scales.size(3), p.in.q.size(3), p.in.v.size(3)};
}
constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, [](const Problem& p) { return mechanism::SizesOf(p.in.v); }},
    {"state", &Outputs::final_state, &ShapeOfState, nullptr, true}};

constexpr Form kForm = {"log_linear_attention", kInputs, kResults, &Forward, &Backward, &Explain,
                        &BackwardWorkspace,     &Step};

void RunReference(const Problem& p, Views views) {
  if (p.pass == "backward") return BackwardReference(p.in, p.options, mechanism::GradientsOf(kForm, p, views));
  Reference(p.in, p.options, mechanism::OutputsOf(kForm, p, views));
}

// |x| in f64; log decays as they are.
ConstTensorView Magnitudes(Problem& p, const ConstTensorView& t, bool negative = false) {
  if (!t.present()) return {};
  const Buffer buffer(DType::kF64, t.sizes());
  if (t.num_elements() > 0) {
    Shape index(static_cast<size_t>(t.rank()));
    do SetElement(buffer.view(), index, negative ? GetElement(t, index) : std::abs(GetElement(t, index)));
    while (NextIndex(t.sizes(), index));
  }
  return p.Keep(buffer);
}

// Every result is a sum of products of a query, a key, a value, a level and decays. Its error is at most that of one
// term times the sum of their magnitudes, which the reference computes from the magnitudes of all inputs. The roundings
// of a term are a random walk, bounded by six standard deviations of u / sqrt(3). Sums over K, V and the tokens have
// one rounding per step, a decay has two, its exponential and its product. The gradient of a log decay has terms of all
// later tokens, which cancel except for those that the decay is a factor of.
void Tolerance(const Problem& p, Views expected, Views allowed) {
  Problem m;
  m.pass = p.pass;
  m.options = p.options;
  m.options.scale = std::abs(p.options.scale.value_or(1));
  m.in.q = Magnitudes(m, p.in.q);
  m.in.k = Magnitudes(m, p.in.k);
  m.in.v = Magnitudes(m, p.in.v);
  m.in.level_scales = Magnitudes(m, p.in.level_scales);
  m.in.log_decay = Magnitudes(m, p.in.log_decay, true);
  m.in.initial_state = Magnitudes(m, p.in.initial_state);
  m.in.d_o = Magnitudes(m, p.in.d_o);
  m.in.d_final_state = Magnitudes(m, p.in.d_final_state);
  mechanism::DescribeOutputs(kForm, m);
  RunReference(m, allowed);

  const int64_t T = p.in.q.size(1), G = p.in.v.size(2), L = p.in.level_scales.size(3);
  std::map<std::string, TensorView> by_name;
  for (size_t i = 0; i < allowed.size(); ++i) by_name[p.outputs[i].name] = allowed[i];
  if (const auto of = by_name.find("dlog_decay"); of != by_name.end()) {
    double of_states = 0;
    if (p.in.d_final_state.present()) {
      const Buffer o(DType::kF64, p.in.v.sizes()), state(DType::kF64, p.in.d_final_state.sizes());
      Reference(m.in, m.options, {o.view(), state.view()});
      const std::vector<double> S = Elements(state.view()), d = Elements(m.in.d_final_state);
      for (size_t i = 0; i < S.size(); ++i) of_states += S[i] * d[i];
    }
    for (int64_t b = 0; b < p.in.q.size(0); ++b) {
      for (int64_t h = 0; h < G; ++h) {
        double sum = of_states;
        for (int64_t t = T; t-- > 0;) {
          for (int64_t l = 0; l < L; ++l) {
            sum += GetElement(m.in.level_scales, Shape{b, t, h, l}) *
                   GetElement(by_name.at("dlevel_scales"), Shape{b, t, h, l});
          }
          SetElement(of->second, Shape{b, t, h}, sum);
        }
      }
    }
  }
  const double u = p.in.q.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24;
  const auto root = [](int64_t n) { return std::sqrt(static_cast<double>(n)); };
  const double share = 3.5 * u * (root(p.in.q.size(3)) + root(p.in.v.size(3)) + 3 * root(T + 64) + 16);
  mechanism::AllowErrors(p.in.q.dtype(), share, p.outputs, expected, allowed);
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c = mechanism::CaseOf(kForm, p);
  c.title += " scale=" + std::to_string(p->options.scale.value_or(1)) + " " + p->note;
  c.reference = [p](Views expected, Views tolerance) {
    RunReference(*p, expected);
    if (!tolerance.empty()) Tolerance(*p, expected, tolerance);
  };
  if (p->pass == "step") {
    c.flops = 6 * static_cast<double>(p->in.q.size(0) * p->in.v.size(2) * p->in.q.size(3) * p->in.v.size(3));
  } else {
    c.flops = (p->pass == "forward" ? 1 : 3) * Explain(Context(1), p->in, p->options).flops;
  }
  return c;
}

int64_t LevelsFor(int64_t tokens) { return tokens < 2 ? 1 : std::bit_width(static_cast<uint64_t>(tokens - 1)) + 1; }

Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  mechanism::CheckPass(kForm, request);
  Problem p;
  p.pass = request.pass;
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const int64_t T = request.pass == "step" ? 1 : s.Tq, before = request.pass == "step" ? s.Tk : 0;
  const auto tensor = [&](const Shape& sizes) {
    return p.Keep(Buffer(request.dtype, sizes, Placement::kAligned).FillNormal(++seed));
  };
  const int64_t L = LevelsFor(T + before);
  p.in.q = tensor({s.B, T, s.Hkv, s.D});
  p.in.k = tensor({s.B, T, s.Hkv, s.D});
  p.in.v = tensor({s.B, T, s.Hq, s.Dv});
  p.in.level_scales = tensor({s.B, T, s.Hq, L});
  if (!mechanism::Words(request.variant).Has("ungated")) {
    const Buffer g(request.dtype, Shape{s.B, T, s.Hq}, Placement::kAligned);
    mechanism::FillDecays(g, ++seed, 0.05);
    p.in.log_decay = p.Keep(g);
  }
  if (request.pass == "step") {
    const Buffer state(mechanism::StateDType(request.dtype), Shape{s.B, s.Hq, L, s.D, s.Dv}, Placement::kAligned);
    p.in.initial_state = p.Keep(state.FillNormal(++seed));
    const Buffer positions(DType::kI64, Shape{s.B}, Placement::kAligned);
    std::fill_n(positions.as<int64_t>(), s.B, before);
    p.options.positions = p.Keep(positions);
    // States of bits that are not set are zeros.
    for (int64_t j = 0; j < L; ++j) {
      const TensorView of = state.view().Slice(2, j, j + 1);
      if ((before >> j & 1) != 0 || of.num_elements() == 0) continue;
      Shape index(5);
      do SetElement(of, index, 0);
      while (NextIndex(of.sizes(), index));
    }
  }
  if (request.pass == "backward") p.in.d_o = tensor({s.B, T, s.Hq, s.Dv});
  p.options.scale = 1 / std::sqrt(static_cast<double>(s.D));
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
    const int64_t T = Chance(0.03) ? 0 : Chance(0.9) ? Integer(1, 70) : Integer(100, 200);
    const int64_t H = Integer(1, 2), G = H * random_.Pick<int64_t>({1, 1, 2, 3}), N = packed ? Integer(1, 4) : B;
    const int64_t K = Channels(), V = Channels(), L = 9 + Integer(0, 2);
    const auto of_token = [&] { return Chance(0.5) ? dtype_ : wide; };
    p_.in.q = Tensor(dtype_, {B, T, H, K}, true);
    p_.in.k = Tensor(dtype_, {B, T, H, K}, true);
    p_.in.v = Tensor(dtype_, {B, T, G, V}, true);
    p_.in.level_scales = Tensor(of_token(), {B, T, G, L}, false);
    if (Chance(0.75)) {
      const Buffer g = Layout(of_token(), {B, T, G}, false);
      mechanism::FillDecays(g, ++seed_, random_.Pick({0.01, 0.1, 3.0}));
      p_.in.log_decay = p_.Keep(g);
    }
    DrawSequences(packed, N, T, p_);
    if (Chance(0.5)) {
      p_.in.initial_state = Tensor(wide, {N, G, L, K, V}, false);
      const Buffer positions(DType::kI64, Shape{N});
      for (int64_t n = 0; n < N; ++n) positions.as<int64_t>()[n] = Chance(0.3) ? Integer(0, 3) * 16 : Integer(0, 45);
      p_.options.positions = p_.Keep(positions);
    }
    if (Chance(0.5)) {
      p_.pass = "backward";
      p_.in.d_o = Tensor(dtype_, {B, T, G, V}, true);
      if (Chance(0.5)) p_.in.d_final_state = Tensor(wide, {N, G, L, K, V}, false);
    }
    if (Chance(0.5)) p_.options.scale = random_.Pick({0.3, -1.0, 0.0});
    mechanism::DescribeOutputs(kForm, p_);
    return ToCase(p_);
  }

 private:
  int64_t Channels() { return Chance(0.8) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33, 64}); }

  ConstTensorView Tensor(DType dtype, const Shape& sizes, bool rows) { return p_.Keep(Normal(dtype, sizes, rows)); }

  DType dtype_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs(
      {.family = "gated",
       .variants = {"ungated"},
       .flops = "64 (D + Dv) + 2 D Dv (1 + log2(Tq / 64) / 2) per token and head of Hq, backward three times as many",
       .bytes = "(B Tq (2 Hkv D + 2 Hq Dv + Hq log2 Tq)) size",
       .state = "B Hq log2(Tq) D Dv 4",
       .make_case = &MakeCase,
       .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }},
      kForm);
}

}  // namespace heed::log_linear_attention
