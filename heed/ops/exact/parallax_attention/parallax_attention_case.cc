// parallax_attention in the harness: its entry, problems, and the tolerance of kernels against the reference.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/state_case.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/exact/parallax_attention/parallax_attention_internal.h"

namespace heed::parallax_attention {
namespace {

using mechanism::Shape;
using mechanism::Views;
using Form = mechanism::Form<Inputs, BackwardInputs, Options, Outputs, Gradients>;
using Problem = Form::Problem;

constexpr mechanism::DifferentiableInput<BackwardInputs, Gradients> kInputs[] = {
    {"q", "BTHK", &BackwardInputs::q, &Gradients::dq},
    {"r", "BTHK", &BackwardInputs::r, &Gradients::dr},
    {"k", "BTGK", &BackwardInputs::k, &Gradients::dk},
    {"v", "BTGV", &BackwardInputs::v, &Gradients::dv}};

constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, &mechanism::ShapeOfRows<Problem>, &BackwardInputs::o},
    {"m", &Outputs::m, &mechanism::ShapeOfRows<Problem>, &BackwardInputs::m, true, true},
    {"a", &Outputs::a, &mechanism::ShapeOfSums<Problem>, &BackwardInputs::a, true, true},
    {"lse", &Outputs::lse, &mechanism::ShapeOfSums<Problem>, &BackwardInputs::lse, true, true}};

constexpr Form kForm = {"parallax_attention", kInputs, kResults, &Forward, &Backward, &Explain, &BackwardWorkspace};

// The bounds are to first order. u is 2^-24 or 2^-53. The error of a chain of n roundings is bounded by six standard
// deviations of u / sqrt(3), which is chain(n) = 3.5 u sqrt(n). N is the number of keys of a row.
//
//   ds_ij  = |scale| chain(D) sum_n |q_in k_jn| + 8 u (|s_ij| + |lse_i|)       of the first logit
//   dt_ij  = chain(D) sum_n |r_in k_jn|                                        of the second
//   rel_ij = ds_ij + sum_j P ds + chain(N) + 12 u                              of P_ij
//   da_i   = sum_j P (dt + (rel + chain(N) + 8 u) |t - a|)                     of a, and 2 u |a|
//   m      by sum_j P |v_j| (rel + chain(N)),  lse by sum_j P ds + chain(N) + 12 u (1 + |lse|)
//   o      by sum_j P |v_j| ((rel + chain(N) + 4 u) (1 + |t - a|) + dt + da) + chain(N) max_j |v_j| sum_j P |t - a|
//
// The last term is for sums over some of the keys, whose mean is not a. None of these has the size of the mean of t but
// for the rounding of t itself.
//
// Gradients start from o, m, a and lse, as they are rounded, u_o for o. With G = <|d_o|, |v_j|>, M = <|d_o|, |m|>,
// O = <|d_o|, |o|>, E = 1 + a - t, b = <d_o, m - o> + d_lse and y = x E + b,
//
//   dx  = chain(Dv) G + (chain(Dv) + 2 u) M + u |x|,  dE = dt + 3 u (1 + |a| + |t|),  dP = ds + 4 u
//   db  = u_o O + (chain(Dv) + 2 u) (M + O) + 2 u |d_lse|
//   eW  = P (|E| (dP + 4 u) + dE),  eU = P (|x| (dP + 3 u) + dx)                       of the weights of dv and of dt
//   eS  = P (|y| (dP + 4 u) + dx |E| + |x| dE + db + 4 u (|x E| + |b|))                of dS
//
// and sums add chain(their length) of the magnitude of their terms. For f64 the given m, a and o, and the expected
// gradients, are sums of the reference in f64, which is no more precise: dx has chain(N) sum_j P G more, dE chain(N)
// sum_j P |t|, and db chain(N) sum_j P (1 + |E|) G. |o| does not bound the last, as E has either sign.
class Tolerance {
 public:
  Tolerance(const Problem& p, Views allowed) : p_(p), allowed_(allowed) {
    const DType dtype = p.in.q.dtype();
    u_ = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
    rounding_ = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : u_;
  }

  void Compute() {
    for (const TensorView& t : allowed_) {
      if (t.num_elements() == 0) continue;
      Shape index(static_cast<size_t>(t.rank()));
      do SetElement(t, index, 0);
      while (NextIndex(t.sizes(), index));
    }
    constexpr char kOp[] = "parallax_attention::Tolerance";
    const bool backward = p_.pass == "backward";
    call_ = backward ? CheckBackward(kOp, p_.in, p_.options, {}, true)
                     : CheckForward(kOp, p_.in, p_.options, mechanism::OutputsOf(kForm, p_, allowed_), true);
    ForReferenceRows(call_, p_.in, [&](const ReferenceRow& row) { backward ? OfGradients(row) : OfResults(row); });
  }

 private:
  using Vector = std::vector<double>;

  double Chain(int64_t n) const { return 3.5 * u_ * std::sqrt(static_cast<double>(n)); }
  int64_t KeyHead(const ReferenceRow& row) const { return row.head / call_.group(); }

  Vector RowOf(const ConstTensorView& t, int64_t b, int64_t token, int64_t h) const {
    Vector row;
    for (int64_t c = 0; c < t.size(3); ++c) row.push_back(GetElement(t, Shape{b, token, h, c}));
    return row;
  }
  static double Magnitude(const Vector& a, const Vector& b) {
    double sum = 0;
    for (size_t c = 0; c < a.size(); ++c) sum += std::abs(a[c] * b[c]);
    return sum;
  }
  void Allow(size_t output, const Shape& index, double error) const {
    SetElement(allowed_[output], index, GetElement(allowed_[output], index) + error);
  }

  // ds and dt of the logits of a row with key j.
  std::pair<double, double> OfLogits(const ReferenceRow& row, size_t j) const {
    const Vector q = RowOf(p_.in.q, row.batch, row.row, row.head), r = RowOf(p_.in.r, row.batch, row.row, row.head),
                 k = RowOf(p_.in.k, row.batch, row.first_key + static_cast<int64_t>(j), KeyHead(row));
    return {std::abs(call_.scale) * Chain(call_.D) * Magnitude(q, k) +
                8 * u_ * (std::abs(row.logits[j]) + std::abs(row.lse)),
            Chain(call_.D) * Magnitude(r, k)};
  }

  void OfResults(const ReferenceRow& row) const {
    const size_t keys = row.weights.size();
    const double chain = Chain(static_cast<int64_t>(keys));
    Vector relative(keys), of_second(keys);
    double of_lse = chain + 12 * u_, of_mean = 0, spread = 0;
    for (size_t j = 0; j < keys; ++j) {
      std::tie(relative[j], of_second[j]) = OfLogits(row, j);
      of_lse += row.weights[j] * relative[j];
    }
    for (size_t j = 0; j < keys; ++j) {
      relative[j] += of_lse;
      const double P = row.weights[j], distance = std::abs(row.second[j] - row.mean);
      of_mean += P * (of_second[j] + (relative[j] + chain + 8 * u_) * distance);
      spread += P * distance;
    }
    Vector largest(static_cast<size_t>(call_.Dv));
    for (size_t j = 0; j < keys; ++j) {
      const Vector v = RowOf(p_.in.v, row.batch, row.first_key + static_cast<int64_t>(j), KeyHead(row));
      const double P = row.weights[j], distance = std::abs(row.second[j] - row.mean);
      for (int64_t c = 0; c < call_.Dv; ++c) {
        const double size = std::abs(v[static_cast<size_t>(c)]);
        largest[static_cast<size_t>(c)] = std::max(largest[static_cast<size_t>(c)], size);
        Allow(0, {row.batch, row.row, row.head, c},
              P * size * ((relative[j] + chain + 4 * u_) * (1 + distance) + of_second[j] + of_mean));
        Allow(1, {row.batch, row.row, row.head, c}, P * size * (relative[j] + chain));
      }
    }
    for (int64_t c = 0; c < call_.Dv; ++c) {
      Allow(0, {row.batch, row.row, row.head, c}, chain * largest[static_cast<size_t>(c)] * spread);
    }
    Allow(2, {row.batch, row.head, row.row}, of_mean + 2 * u_ * std::abs(row.mean));
    Allow(3, {row.batch, row.head, row.row}, of_lse + 12 * u_ * std::abs(row.lse));
  }

  void OfGradients(const ReferenceRow& row) const {
    const size_t keys = row.weights.size();
    const int64_t b = row.batch, token = row.row, h = row.head, key_head = KeyHead(row);
    const Vector q = RowOf(p_.in.q, b, token, h), r = RowOf(p_.in.r, b, token, h), d_o = RowOf(p_.in.d_o, b, token, h),
                 o = RowOf(p_.in.o, b, token, h), m = RowOf(p_.in.m, b, token, h);
    const double scale = std::abs(call_.scale),
                 d_lse = p_.in.d_lse.present() ? GetElement(p_.in.d_lse, Shape{b, h, token}) : 0,
                 chain = Chain(static_cast<int64_t>(keys)), sums = Chain(call_.Tq * call_.group()),
                 of_values = Chain(call_.Dv), M = Magnitude(d_o, m), O = Magnitude(d_o, o);
    double offset = d_lse, given_mean = 0, given_second = 0, given_offset = 0;
    for (size_t c = 0; c < o.size(); ++c) offset += d_o[c] * (m[c] - o[c]);
    for (size_t j = 0; j < keys && p_.in.q.dtype() == DType::kF64; ++j) {
      const double P = chain * row.weights[j],
                   G = Magnitude(d_o, RowOf(p_.in.v, b, row.first_key + static_cast<int64_t>(j), key_head));
      given_mean += P * G;
      given_second += P * std::abs(row.second[j]);
      given_offset += P * (1 + std::abs(1 + row.mean - row.second[j])) * G;
    }
    const double of_offset = rounding_ * O + (of_values + 2 * u_) * (M + O) + 2 * u_ * std::abs(d_lse) + given_offset;
    for (size_t j = 0; j < keys; ++j) {
      const int64_t key = row.first_key + static_cast<int64_t>(j);
      const Vector k = RowOf(p_.in.k, b, key, key_head), v = RowOf(p_.in.v, b, key, key_head);
      const auto [of_first, of_second] = OfLogits(row, j);
      double x = 0;
      for (size_t c = 0; c < v.size(); ++c) x += d_o[c] * (v[c] - m[c]);
      const double P = row.weights[j], E = 1 + row.mean - row.second[j], y = x * E + offset, of_P = of_first + 4 * u_,
                   of_x = of_values * Magnitude(d_o, v) + (of_values + 2 * u_) * M + u_ * std::abs(x) + given_mean,
                   of_E = of_second + 3 * u_ * (1 + std::abs(row.mean) + std::abs(row.second[j])) + given_second,
                   eW = P * (std::abs(E) * (of_P + 4 * u_) + of_E), eU = P * (std::abs(x) * (of_P + 3 * u_) + of_x),
                   eS = P * (std::abs(y) * (of_P + 4 * u_) + of_x * std::abs(E) + std::abs(x) * of_E + of_offset +
                             4 * u_ * (std::abs(x * E) + std::abs(offset)));
      const double dS = P * std::abs(y), dt = P * std::abs(x);
      for (int64_t c = 0; c < call_.D; ++c) {
        const auto n = static_cast<size_t>(c);
        Allow(0, {b, token, h, c}, scale * std::abs(k[n]) * (eS + dS * chain));
        Allow(1, {b, token, h, c}, std::abs(k[n]) * (eU + dt * chain));
        Allow(2, {b, key, key_head, c}, scale * std::abs(q[n]) * (eS + dS * sums) + std::abs(r[n]) * (eU + dt * sums));
      }
      for (int64_t c = 0; c < call_.Dv; ++c) {
        Allow(3, {b, key, key_head, c}, std::abs(d_o[static_cast<size_t>(c)]) * (eW + P * std::abs(E) * sums));
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
  if (p->options.window > 0) c.title += " window=" + std::to_string(p->options.window);
  c.title += " " + p->note;
  c.reference = [p](Views expected, Views tolerance) { RunReference(*p, expected, tolerance); };
  const double D = static_cast<double>(p->in.q.size(3)), Dv = static_cast<double>(p->in.v.size(3));
  c.flops = Explain(Context(1), p->in, p->options).flops;
  c.pairs = c.flops / (4 * (D + Dv));
  if (p->pass == "backward") c.flops = c.pairs * (12 * D + 4 * Dv);
  return c;
}

Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  mechanism::CheckPass(kForm, request);
  const int64_t Tk = std::max(s.Tq, s.Tk);
  Problem p;
  p.note = request.variant;
  p.options.window = static_cast<int64_t>(mechanism::Words(request.variant).Number("window").value_or(0));
  uint64_t seed = request.seed * 16;
  const DType dtype = request.dtype;
  const auto normal = [&](DType of, const Shape& sizes) {
    return Buffer(of, sizes, Placement::kAligned).FillNormal(++seed);
  };
  p.in.q = p.Keep(normal(dtype, {s.B, s.Tq, s.Hq, s.D}));
  p.in.r = p.Keep(normal(dtype, {s.B, s.Tq, s.Hq, s.D}));
  p.in.k = p.Keep(normal(dtype, {s.B, Tk, s.Hkv, s.D}));
  p.in.v = p.Keep(normal(dtype, {s.B, Tk, s.Hkv, s.Dv}));
  if (request.pass == "backward") {
    const Buffer d_o = normal(dtype, mechanism::ShapeOfRows(p));
    mechanism::StartBackward(kForm, &Reference, d_o, normal(mechanism::StateDType(dtype), mechanism::ShapeOfSums(p)),
                             p);
  }
  mechanism::DescribeOutputs(kForm, p);
  return ToCase(p);
}

class Maker : mechanism::RandomArguments {
 public:
  Maker(DType dtype, uint64_t seed) : RandomArguments(seed), dtype_(dtype) { p_.note = "seed=" + std::to_string(seed); }

  Case Make() {
    const bool packed = Chance(0.25);
    const int64_t B = packed ? 1 : Chance(0.03) ? 0 : Integer(1, 2);
    const int64_t Tk = Chance(0.03)   ? 0
                       : Chance(0.93) ? Integer(1, 70)
                                      : Integer(120, 210),
                  Tq = packed || Chance(0.6) ? Tk
                       : Chance(0.3)         ? std::min<int64_t>(Tk, 1)
                                             : Integer(0, Tk);
    const int64_t Hkv = Integer(1, 2), H = Hkv * Integer(1, 3), N = packed ? Integer(1, 4) : B, D = Channels(),
                  Dv = Channels();
    p_.in.q = Tensor({B, Tq, H, D});
    p_.in.r = Tensor({B, Tq, H, D});
    p_.in.k = Tensor({B, Tk, Hkv, D});
    p_.in.v = Tensor({B, Tk, Hkv, Dv});
    DrawSequences(packed, N, Tk, p_);
    if (Chance(0.3)) p_.options.scale = random_.Pick({0.0, -0.5, 0.1, 1.0});
    if (Chance(0.3)) p_.options.window = Chance(0.8) ? Integer(1, 80) : INT64_MAX;
    if (Chance(0.5)) {
      const Buffer d_o = Normal(dtype_, mechanism::ShapeOfRows(p_), true);
      mechanism::StartBackward(
          kForm, &Reference, d_o,
          Chance(0.5) ? Normal(mechanism::StateDType(dtype_), mechanism::ShapeOfSums(p_), false) : Buffer(), p_);
    }
    mechanism::DescribeOutputs(kForm, p_);
    return ToCase(p_);
  }

 private:
  int64_t Channels() { return Chance(0.9) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33, 64}); }
  ConstTensorView Tensor(const Shape& sizes) { return p_.Keep(Normal(dtype_, sizes, true)); }

  DType dtype_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs(
      {.family = "exact",
       .variants = {"window=16"},
       .flops = "4 (D + Dv) per pair that is seen, backward 12 D + 4 Dv; B Hq Tq (Tk - (Tq - 1) / 2) pairs",
       .bytes = "(B Tq Hq (2 D + Dv) + B Tk Hkv (D + Dv)) size",
       .state = "B Tk Hkv (D + Dv) size (the keys and values so far)",
       .make_case = &MakeCase,
       .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }},
      kForm);
}

}  // namespace heed::parallax_attention
