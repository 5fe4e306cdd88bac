// wall_attention in the harness: its entry, problems, and the tolerance of kernels against the reference.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/state_case.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"

namespace heed::wall_attention {
namespace {

using mechanism::Shape;
using mechanism::Views;
using Form = mechanism::Form<Inputs, BackwardInputs, Options, Outputs, Gradients>;
using Problem = Form::Problem;

constexpr mechanism::DifferentiableInput<BackwardInputs, Gradients> kInputs[] = {
    {"q", "BTHK", &BackwardInputs::q, &Gradients::dq},
    {"k", "BTGK", &BackwardInputs::k, &Gradients::dk},
    {"v", "BTGV", &BackwardInputs::v, &Gradients::dv},
    {"log_decay", "BTHK", &BackwardInputs::log_decay, &Gradients::dlog_decay, false, true},
    {"log_forget", "BTH", &BackwardInputs::log_forget, &Gradients::dlog_forget, true, true}};

constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, &mechanism::ShapeOfRows<Problem>, &BackwardInputs::o},
    {"lse", &Outputs::lse, &mechanism::ShapeOfSums<Problem>, &BackwardInputs::lse, true, true}};

constexpr Form kForm = {"wall_attention", kInputs, kResults, &Forward, &Backward, &Explain, &BackwardWorkspace};

// The bounds are to first order. u is 2^-24 or 2^-53. The error of a chain of n roundings is bounded by six standard
// deviations of u / sqrt(3), which is chain(n) = 3.5 u sqrt(n).
//
// W_ijn, the decay between two tokens, is a product of at most 64 a_t of the row's own block, of one factor per block
// in between and of one of the key's block. Each is an exponential, whose own error is 3 u, times a rounded product.
// The last two kinds are exponentials of sums of 64, whose error times W is that of the sum, at most |log W|:
//
//   w_ijn  = W_ijn (3 chain(64) + 3 chain(i / 64 + 2) + chain(64) |log W_ijn|)
//   ds_ij  = |scale| sum_n |q_in k_jn| (w_ijn + chain(D) W_ijn) + (chain(64) + 8 u) (|F_ij| + |s_ij| + |lse_i|)
//   rel_ij = ds_ij + sum_j P ds + chain(T) + 12 u                             of P_ij
//   o      by sum_j P |v_j| (rel_ij + chain(T)),  lse by sum_j P ds + chain(T) + 12 u (1 + |lse|)
//
// With M_ij = <|d_o_i|, |v_j|> and m_ij = P_ij (M_ij + sum_j P M + |d_lse_i|), the magnitude of dS_ij,
//
//   E_ij   = m_ij (rel_ij + chain(Dv) + 8 u) + P_ij (u_o <|d_o_i|, |o_i|>)    of dS_ij, u_o: the rounding of o
//   e_ijn  = |scale| (E_ij W_ijn + m_ij (w_ijn + W_ijn chain(T)))             of scale dS_ij W_ijn and of its sums
//   dq_in  by sum_j |k_jn| e,  dk_jn by sum_i |q_in| e,  dlog_decay_tn by sum_{i >= t > j} |q_in k_jn| e
//   dv_j   by sum_i P |d_o_i| (rel + chain(T)),  dlog_forget_t by sum_{i >= t > j} (E + m chain(T))
class Tolerance {
 public:
  Tolerance(const Problem& p, Views allowed) : p_(p), allowed_(allowed) {
    u_ = p.in.q.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24;
    const DType dtype = p.in.q.dtype();
    rounding_ = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : u_;
  }

  void Compute() {
    for (const TensorView& t : allowed_) {
      if (t.num_elements() == 0) continue;
      Shape index(static_cast<size_t>(t.rank()));
      do SetElement(t, index, 0);
      while (NextIndex(t.sizes(), index));
    }
    constexpr char kOp[] = "wall_attention::Tolerance";
    const bool backward = p_.pass == "backward";
    call_ = backward ? CheckBackward(kOp, p_.in, p_.options, {}, true, false)
                     : CheckForward(kOp, p_.in, p_.options, {allowed_[0], allowed_[1]}, true, false);
    ForReferenceRows(call_, p_.in, [&](const ReferenceRow& row) { backward ? OfGradients(row) : OfResults(row); });
  }

 private:
  double Chain(int64_t n) const { return 3.5 * u_ * std::sqrt(static_cast<double>(n)); }

  std::vector<double> Magnitudes(const ConstTensorView& t, int64_t b, int64_t token, int64_t h) const {
    std::vector<double> row;
    for (int64_t c = 0; c < t.size(3); ++c) row.push_back(std::abs(GetElement(t, Shape{b, token, h, c})));
    return row;
  }
  void Allow(size_t output, const Shape& index, double error) const {
    SetElement(allowed_[output], index, GetElement(allowed_[output], index) + error);
  }

  // Errors of a row: w_ijn, rel_ij and that of lse.
  struct Errors {
    std::vector<std::vector<double>> decays;
    std::vector<double> relative;
    double of_lse = 0;
  };
  Errors ErrorsOf(const ReferenceRow& row) const {
    Errors e;
    const std::vector<double> q = Magnitudes(p_.in.q, row.sequence.batch, row.sequence.begin + row.i, row.head);
    const double of_factors = 3 * Chain(kBlock) + 3 * Chain(row.i / kBlock + 2);
    for (size_t j = 0; j < row.weights.size(); ++j) {
      const std::vector<double> k =
          Magnitudes(p_.in.k, row.sequence.batch, row.sequence.begin + static_cast<int64_t>(j), KeyHead(row));
      double of_logit = 0;
      e.decays.emplace_back();
      for (size_t n = 0; n < q.size(); ++n) {
        const double w = row.decays[j][n];
        e.decays[j].push_back(w == 0 ? 0 : w * (of_factors - Chain(kBlock) * std::log(w)));
        of_logit += q[n] * k[n] * (e.decays[j][n] + Chain(call_.D) * w);
      }
      e.relative.push_back(0);
      if (row.weights[j] == 0) continue;  // hidden, or far below the others
      e.relative[j] = std::abs(call_.scale) * of_logit +
                      (Chain(64) + 8 * u_) * (std::abs(row.forgotten[j]) + std::abs(row.logits[j]) + std::abs(row.lse));
      e.of_lse += row.weights[j] * e.relative[j];
    }
    e.of_lse += Chain(row.i + 1) + 12 * u_;
    for (double& x : e.relative) x += e.of_lse;
    return e;
  }
  int64_t KeyHead(const ReferenceRow& row) const { return row.head / (call_.H / call_.Hkv); }

  void OfResults(const ReferenceRow& row) const {
    const int64_t b = row.sequence.batch, token = row.sequence.begin + row.i;
    const Errors e = ErrorsOf(row);
    for (size_t j = 0; j < row.weights.size(); ++j) {
      const std::vector<double> v = Magnitudes(p_.in.v, b, row.sequence.begin + static_cast<int64_t>(j), KeyHead(row));
      for (int64_t c = 0; c < call_.Dv; ++c) {
        Allow(0, {b, token, row.head, c},
              row.weights[j] * v[static_cast<size_t>(c)] * (e.relative[j] + Chain(row.i + 1)));
      }
    }
    Allow(1, {b, row.head, token}, e.of_lse + 12 * u_ * std::abs(row.lse));
  }

  void OfGradients(const ReferenceRow& row) const {
    const int64_t b = row.sequence.batch, first = row.sequence.begin, token = first + row.i, h = row.head,
                  key_head = KeyHead(row), decay_head = h / call_.group();
    const Errors e = ErrorsOf(row);
    const size_t keys = row.weights.size();
    const std::vector<double> q = Magnitudes(p_.in.q, b, token, h), d_o = Magnitudes(p_.in.d_o, b, token, h),
                              o = Magnitudes(p_.in.o, b, token, h);
    std::vector<double> m(keys), crossing(q.size());
    double mean = p_.in.d_lse.present() ? std::abs(GetElement(p_.in.d_lse, Shape{b, h, token})) : 0, of_o = 0,
           forgotten = 0;
    for (size_t c = 0; c < o.size(); ++c) of_o += rounding_ * d_o[c] * o[c];
    for (size_t j = 0; j < keys; ++j) {
      const std::vector<double> v = Magnitudes(p_.in.v, b, first + static_cast<int64_t>(j), key_head);
      for (size_t c = 0; c < v.size(); ++c) m[j] += d_o[c] * v[c];
      mean += row.weights[j] * m[j];
    }
    const double scale = std::abs(call_.scale), sums = Chain(row.sequence.end - first);
    for (int64_t t = 0; t <= row.i; ++t) {
      const auto j = static_cast<size_t>(t);
      const std::vector<double> k = Magnitudes(p_.in.k, b, first + t, key_head);
      const double size = row.weights[j] * (m[j] + mean),
                   error = size * (e.relative[j] + Chain(call_.Dv) + 8 * u_) + row.weights[j] * of_o;
      if (p_.in.log_forget.present()) Allow(4, {b, first + t, h}, forgotten);
      forgotten += error + size * sums;
      for (int64_t c = 0; c < call_.D; ++c) {
        const auto n = static_cast<size_t>(c);
        const double w = row.decays[j][n], of_product = scale * (error * w + size * (e.decays[j][n] + w * sums));
        Allow(3, {b, first + t, decay_head, c}, crossing[n]);
        crossing[n] += q[n] * k[n] * of_product;
        Allow(0, {b, token, h, c}, k[n] * of_product);
        Allow(1, {b, first + t, key_head, c}, q[n] * of_product);
      }
      for (int64_t c = 0; c < call_.Dv; ++c) {
        Allow(2, {b, first + t, key_head, c}, row.weights[j] * d_o[static_cast<size_t>(c)] * (e.relative[j] + sums));
      }
    }
  }

  const Problem& p_;
  Views allowed_;
  Call call_;
  double u_, rounding_;
};

void RunReference(const Problem& p, Views expected, Views tolerance) {
  if (p.pass == "backward") {
    BackwardReference(p.in, p.options, mechanism::GradientsOf(kForm, p, expected));
  } else {
    Reference(p.in, p.options, mechanism::OutputsOf(kForm, p, expected));
  }
  if (tolerance.empty()) return;
  Tolerance(p, tolerance).Compute();
  mechanism::AllowErrors(p.in.q.dtype(), 1, p.outputs, expected, tolerance);
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c = mechanism::CaseOf(kForm, p);
  if (p->options.scale) c.title += " scale=" + std::to_string(*p->options.scale);
  c.title += " " + p->note;
  c.reference = [p](Views expected, Views tolerance) { RunReference(*p, expected, tolerance); };
  c.pairs = mechanism::CausalPairs(mechanism::RangesOf(kForm.name, "q", p->in.q, p->options)) *
            static_cast<double>(p->in.q.size(2));
  const double D = static_cast<double>(p->in.q.size(3)), Dv = static_cast<double>(p->in.v.size(3));
  c.flops = p->pass == "backward" ? c.pairs * (6 * D + 4 * Dv) : Explain(Context(1), p->in, p->options).flops;
  return c;
}

Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  mechanism::CheckPass(kForm, request);
  const mechanism::Words words(request.variant);
  Problem p;
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const DType dtype = request.dtype, wide = mechanism::StateDType(dtype);
  const auto make = [&](DType of, const Shape& sizes) { return Buffer(of, sizes, Placement::kAligned); };
  const Buffer decays = make(wide, {s.B, s.Tq, words.Has("shared") ? s.Hkv : s.Hq, s.D});
  p.in.q = p.Keep(make(dtype, {s.B, s.Tq, s.Hq, s.D}).FillNormal(++seed));
  p.in.k = p.Keep(make(dtype, {s.B, s.Tq, s.Hkv, s.D}).FillNormal(++seed));
  p.in.v = p.Keep(make(dtype, {s.B, s.Tq, s.Hkv, s.Dv}).FillNormal(++seed));
  mechanism::FillDecays(decays, ++seed, 0.05);
  p.in.log_decay = p.Keep(decays);
  if (words.Has("gated")) {
    const Buffer g = make(wide, {s.B, s.Tq, s.Hq});
    mechanism::FillDecays(g, ++seed, 0.05);
    p.in.log_forget = p.Keep(g);
  }
  if (request.pass == "backward") {
    mechanism::StartBackward(kForm, &Reference, make(dtype, mechanism::ShapeOfRows(p)).FillNormal(seed + 1),
                             make(wide, mechanism::ShapeOfSums(p)).FillNormal(seed + 2), p);
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
    const int64_t T = Chance(0.03) ? 0 : Chance(0.9) ? Integer(1, 70) : Integer(120, 210);
    const int64_t Hkv = Integer(1, 2), Hg = Hkv * Integer(1, 2), H = Hg * Integer(1, 2), N = packed ? Integer(1, 4) : B,
                  D = Channels(), Dv = Channels();
    const auto of_token = [&] { return Chance(0.5) ? dtype_ : wide; };
    p_.in.q = Tensor(dtype_, {B, T, H, D}, true);
    p_.in.k = Tensor(dtype_, {B, T, Hkv, D}, true);
    p_.in.v = Tensor(dtype_, {B, T, Hkv, Dv}, true);
    p_.in.log_decay = Decays(of_token(), {B, T, Hg, D}, true);
    if (Chance(0.4)) p_.in.log_forget = Decays(of_token(), {B, T, H}, false);
    DrawSequences(packed, N, T, p_);
    if (Chance(0.4)) p_.options.scale = random_.Pick({0.0, -0.5, 0.1, 1.0});
    if (Chance(0.5)) {
      const Buffer d_o = Normal(dtype_, {B, T, H, Dv}, true);
      mechanism::StartBackward(kForm, &Reference, d_o, Chance(0.5) ? Normal(wide, {B, H, T}, false) : Buffer(), p_);
    }
    mechanism::DescribeOutputs(kForm, p_);
    return ToCase(p_);
  }

 private:
  int64_t Channels() { return Chance(0.9) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33, 64}); }

  ConstTensorView Tensor(DType dtype, const Shape& sizes, bool rows) { return p_.Keep(Normal(dtype, sizes, rows)); }

  // From hardly any decay to decays that underflow within a block, with or without hidden channels.
  ConstTensorView Decays(DType dtype, const Shape& sizes, bool rows) {
    const Buffer g = Layout(dtype, sizes, rows);
    mechanism::FillDecays(g, ++seed_, random_.Pick({0.001, 0.01, 0.1, 2.0, 20.0}), Chance(0.2) ? 0.05 : 0);
    return p_.Keep(g);
  }

  DType dtype_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs({.family = "exact",
                               .variants = {"gated", "shared"},
                               .flops = "(2 D + 2 Dv) B Hq Tq (Tq + 1) / 2, backward (6 D + 4 Dv) of the same",
                               .bytes = "B Tq (Hq (2 D + Dv) + Hkv (D + Dv)) size",
                               .state = "none: whole sequences only",
                               .make_case = &MakeCase,
                               .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }},
                              kForm);
}

}  // namespace heed::wall_attention
