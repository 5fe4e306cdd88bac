// deltaformer in the harness: its entry, problems, and the tolerance of kernels against the reference.
#include <algorithm>
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
#include "heed/ops/exact/deltaformer/deltaformer_internal.h"

namespace heed::deltaformer {
namespace {

using mechanism::Shape;
using mechanism::Views;
using Form = mechanism::Form<Inputs, BackwardInputs, Options, Outputs, Gradients>;
using Problem = Form::Problem;
using Vector = std::vector<double>;
using Rows = std::vector<Vector>;

constexpr mechanism::DifferentiableInput<BackwardInputs, Gradients> kInputs[] = {
    {"q", "BTHK", &BackwardInputs::q, &Gradients::dq},
    {"k", "BTGK", &BackwardInputs::k, &Gradients::dk},
    {"v", "BTGV", &BackwardInputs::v, &Gradients::dv},
    {"beta", "BTG", &BackwardInputs::beta, &Gradients::dbeta, true, true},
    {"w", "BTGK", &BackwardInputs::w, &Gradients::dw, true}};

constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, &mechanism::ShapeOfRows<Problem>, &BackwardInputs::o},
    {"u", &Outputs::u, [](const Problem& p) { return mechanism::SizesOf(p.in.v); }, &BackwardInputs::u},
    {"lse", &Outputs::lse, &mechanism::ShapeOfSums<Problem>, &BackwardInputs::lse, true, true}};

constexpr Form kForm = {"deltaformer", kInputs, kResults, &Forward, &Backward, &Explain, &BackwardWorkspace};

// Keeps the gradients that a backward pass starts from, and the results of the reference.
void StartBackward(const Buffer& d_o, const Buffer& d_u, const Buffer& d_lse, Problem& p) {
  if (d_u.present()) p.in.d_u = p.Keep(d_u);
  mechanism::StartBackward(kForm, &Reference, d_o, d_lse, p);
}

// sum_c |a_c b_c|.
double Size(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += std::abs(a[c] * b[c]);
  return sum;
}
void Add(double factor, const Vector& x, Vector& to) {
  for (size_t c = 0; c < x.size(); ++c) to[c] += std::abs(factor * x[c]);
}

// The bounds are to first order. u is 2^-24 or 2^-53. The error of a chain of n roundings is bounded by six standard
// deviations of u / sqrt(3), which is chain(n) = 3.5 u sqrt(n). rho is the rounding of a tensor, at least u. Attention
// may round probabilities too, by pi of each: rho in bf16 and, with dS, in all backward passes of 16 bits, else 0. A
// softmax X, which is W or P, of queries x over keys k has, with |x| |k| for sum_c |x_c k_c|:
//
//   ds_ij  = |scale| |x_i| |k_j| chain(D) + 8 u (|s_ij| + |lse_i|)                          of a logit
//   lse_i  by L_i = sum_j X ds + chain(T) + 12 u (1 + |lse_i|)
//   rel_ij = ds_ij + L_i + chain(T)                                                          of X_ij, and its sums
//
// Forward. u_i has own errors e_i = |beta_i| sum_j W |u_j| rel + 4 u (|v_i| + |beta_i r_i|) + rho |u_i|, which pass on
// to later tokens as u = v - diag(beta) W u does:
//
//   u_i by U_i = sum_j |M_ij| e_j,  M = (I + diag(beta) W)^-1
//   o_i by sum_j P (|u_j| (rel + pi) + U_j)
//
// Backward, of the given u. With m_ij = P_ij (<|d_o_i|, |u_j|> + sum_j P <|d_o_i|, |u_j|> + |d_lse_i|), the magnitude
// of dS_ij, and E_ij = m_ij (rel + chain(Dv) + 8 u) + 2 pi m_ij + P rho <|d_o_i|, |o_i|>:
//
//   dq_i by |scale| sum_j |k_j| (E + m chain(T)),  dk_j by the same over i with |q_i|
//   dv_j has own errors sum_i P |d_o_i| (rel + pi + chain(T)) + sum_i W |dr_i| rel + 4 u |dv_j|, and by those of later
//   tokens in all M^T of them: D_j.  dr_j by |beta_j| D_j
//   r_i  by R_i = sum_j W |u_j| (rel + pi)
//   dbeta_i by <D_i, |r_i|> + <|dv_i|, R_i> + chain(Dv) <|dv_i|, |r_i|>
//
// With n_ij = W_ij (<|dr_i|, |u_j|> + <|dr_i|, |r_i|>), the magnitude of dR_ij, its error is
//
//   F_ij = n_ij (rel + 2 chain(Dv) + 8 u) + W (<|beta_i| D_i, |u_j| + |r_i|> + <|dr_i|, R_i>)
//
// which gives dw_i and the rest of dk_j as E gives dq_i and dk_j.
class Tolerance {
 public:
  Tolerance(const Problem& p, Views allowed) : p_(p), allowed_(allowed) {
    const DType dtype = p.in.q.dtype();
    u_ = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
    rho_ = dtype == DType::kBF16 ? 1.01 * 0x1p-8 : dtype == DType::kF16 ? 1.01 * 0x1p-11 : u_;
    of_forward_ = dtype == DType::kBF16 ? rho_ : 0;
    of_backward_ = SizeOf(dtype) == 2 ? rho_ : 0;
    least_ = dtype == DType::kF16 ? 0x1p-25 : 0;  // rounding of a subnormal
  }

  void Compute() {
    for (const TensorView& t : allowed_) {
      if (t.num_elements() > 0) Each(t, [&](const Shape& index) { SetElement(t, index, 0); });
    }
    constexpr char kOp[] = "deltaformer::Tolerance";
    const bool backward = p_.pass == "backward";
    call_ = backward ? CheckBackward(kOp, p_.in, p_.options, {}, true)
                     : CheckForward(kOp, p_.in, p_.options, {allowed_[0], allowed_[1], allowed_[2]}, true);
    ForReferenceHeads(call_, ValuesOf(p_.in), p_.in.u, backward ? call_.T : 0, [&](const ReferenceHead& head) {
      Prepare(head);
      backward ? OfGradients(head) : OfResults(head);
    });
  }

 private:
  double Chain(double n) const { return 3.5 * u_ * std::sqrt(n); }

  template <class F>
  static void Each(const TensorView& t, const F& f) {
    Shape index(static_cast<size_t>(t.rank()));
    do f(index);
    while (NextIndex(t.sizes(), index));
  }
  void Allow(size_t output, const Shape& index, double error) const {
    SetElement(allowed_[output], index, GetElement(allowed_[output], index) + error);
  }
  void AllowRow(size_t output, const ReferenceHead& head, size_t i, int64_t h, const Vector& errors) const {
    for (size_t c = 0; c < errors.size(); ++c) {
      Allow(output, {head.sequence.batch, head.sequence.begin + static_cast<int64_t>(i), h, static_cast<int64_t>(c)},
            errors[c]);
    }
  }

  // The relative errors of a softmax's weights, and the error of its lse.
  struct Relative {
    Vector of_weights;
    double of_lse = 0;
  };
  Relative RelativeOf(const ReferenceHead& head, const Vector& query, const ReferenceSoftmax& X) const {
    Relative e;
    const double chain = Chain(static_cast<double>(head.u.size()));
    for (size_t j = 0; j < X.weights.size(); ++j) {
      const double logit = std::abs(call_.scale) * Size(query, head.k[j]) * Chain(static_cast<double>(call_.D)) +
                           8 * u_ * (std::abs(X.logits[j]) + std::abs(X.lse));
      e.of_weights.push_back(logit);
      e.of_lse += X.weights[j] * logit;
    }
    if (X.weights.empty()) return e;
    e.of_lse += chain + 12 * u_ * (1 + std::abs(X.lse));
    for (double& x : e.of_weights) x += e.of_lse + chain;
    return e;
  }

  // Computes the errors of W, and the columns of M, the inverse of I + diag(beta) W.
  void Prepare(const ReferenceHead& head) {
    const size_t n = head.u.size();
    relative_.clear();
    M_.assign(n, Vector(n));
    for (size_t i = 0; i < n; ++i) {
      relative_.push_back(RelativeOf(head, head.w[i], head.W[i]).of_weights);
      M_[i][i] = 1;
      for (size_t j = 0; j < i; ++j) {
        const double weight = head.beta[i] * head.W[i].weights[j];
        for (size_t l = 0; l <= j; ++l) M_[i][l] -= weight * M_[j][l];
      }
    }
  }

  void OfResults(const ReferenceHead& head) const {
    const size_t n = head.u.size(), channels = head.u.empty() ? 0 : head.u[0].size();
    Rows own;
    for (size_t i = 0; i < n; ++i) {
      Vector e(channels);
      for (size_t j = 0; j < i; ++j) Add(head.beta[i] * head.W[i].weights[j] * relative_[i][j], head.u[j], e);
      Add(4 * u_ + rho_, head.u[i], e);  // |v| <= |u| + |beta r|
      Add(8 * u_ * head.beta[i], head.r[i], e);
      for (double& x : e) x += least_;
      own.push_back(e);
    }
    Rows of_u;
    for (size_t i = 0; i < n; ++i) {
      Vector e(channels);
      for (size_t j = 0; j <= i; ++j) Add(M_[i][j], own[j], e);
      AllowRow(1, head, i, head.key_head, e);
      of_u.push_back(e);
    }
    for (int64_t h = head.key_head * call_.group(); h < (head.key_head + 1) * call_.group(); ++h) {
      for (size_t i = 0; i < n; ++i) {
        const int64_t token = head.sequence.begin + static_cast<int64_t>(i);
        const Vector q = ReferenceRow(p_.in.q, head.sequence.batch, token, h);
        const ReferenceSoftmax P = head.Softmax(q, i + 1);
        const Relative e = RelativeOf(head, q, P);
        Vector of_o(channels);
        for (size_t j = 0; j <= i; ++j) {
          Add(P.weights[j] * (e.of_weights[j] + of_forward_), head.u[j], of_o);
          Add(P.weights[j], of_u[j], of_o);
        }
        AllowRow(0, head, i, h, of_o);
        Allow(2, {head.sequence.batch, h, token}, e.of_lse);
      }
    }
  }

  void OfGradients(const ReferenceHead& head) const {
    const size_t n = head.u.size();
    const auto D = static_cast<size_t>(call_.D), Dv = static_cast<size_t>(call_.Dv);
    const int64_t b = head.sequence.batch, first = head.sequence.begin, kh = head.key_head;
    const double scale = std::abs(call_.scale), of_values = Chain(static_cast<double>(Dv)),
                 of_sums = Chain(static_cast<double>(n) * static_cast<double>(call_.group()));
    Rows du, own(n, Vector(Dv)), dk(n, Vector(D));
    for (size_t i = 0; i < n; ++i) {
      const int64_t token = first + static_cast<int64_t>(i);
      du.push_back(p_.in.d_u.present() ? ReferenceRow(p_.in.d_u, b, token, kh) : Vector(Dv));
    }
    for (int64_t h = kh * call_.group(); h < (kh + 1) * call_.group(); ++h) {
      for (size_t i = 0; i < n; ++i) {
        const int64_t token = first + static_cast<int64_t>(i);
        const Vector q = ReferenceRow(p_.in.q, b, token, h), d_o = ReferenceRow(p_.in.d_o, b, token, h);
        const ReferenceSoftmax P = head.Softmax(q, i + 1);
        const Vector relative = RelativeOf(head, q, P).of_weights;
        const double of_o = rho_ * Size(d_o, ReferenceRow(p_.in.o, b, token, h));
        double mean = p_.in.d_lse.present() ? std::abs(GetElement(p_.in.d_lse, Shape{b, h, token})) : 0;
        for (const double x : d_o) mean += std::abs(x) * least_;
        for (size_t j = 0; j <= i; ++j) mean += P.weights[j] * Size(d_o, head.u[j]);
        Vector dq(D);
        for (size_t j = 0; j <= i; ++j) {
          const double m = P.weights[j] * (Size(d_o, head.u[j]) + mean);
          const double error =
              m * (relative[j] + of_values + 8 * u_ + 2 * of_backward_ + of_sums) + P.weights[j] * of_o;
          Add(scale * error, head.k[j], dq);
          Add(scale * error, q, dk[j]);
          Add(P.weights[j] * (relative[j] + of_backward_ + of_sums), d_o, own[j]);
          for (size_t c = 0; c < Dv; ++c) du[j][c] += P.weights[j] * d_o[c];
        }
        AllowRow(0, head, i, h, dq);
      }
    }
    Rows dr(n, Vector(Dv));
    for (size_t i = n; i-- > 0;) {
      for (size_t c = 0; c < Dv; ++c) dr[i][c] = -head.beta[i] * du[i][c];
      Add(4 * u_, du[i], own[i]);
      for (size_t j = 0; j < i; ++j) {
        Add(head.W[i].weights[j] * relative_[i][j], dr[i], own[j]);
        for (size_t c = 0; c < Dv; ++c) du[j][c] += head.W[i].weights[j] * dr[i][c];
      }
    }
    for (size_t i = 0; i < n; ++i) {
      Vector of_du(Dv), of_r(Dv), dw(D);
      for (size_t l = i; l < n; ++l) Add(M_[l][i], own[l], of_du);
      for (size_t j = 0; j < i; ++j) Add(head.W[i].weights[j] * (relative_[i][j] + of_forward_), head.u[j], of_r);
      AllowRow(2, head, i, kh, of_du);
      const double of_mean = Size(dr[i], of_r) + std::abs(head.beta[i]) * Size(of_du, head.r[i]),
                   mean = Size(dr[i], head.r[i]);
      for (size_t j = 0; j < i; ++j) {
        const double weight = head.W[i].weights[j], m = weight * (Size(dr[i], head.u[j]) + mean);
        const double error = m * (relative_[i][j] + 2 * of_values + 8 * u_ + of_sums) +
                             weight * (std::abs(head.beta[i]) * Size(of_du, head.u[j]) + of_mean);
        Add(scale * error, head.k[j], dw);
        Add(scale * error, head.w[i], dk[j]);
      }
      size_t output = 3;
      if (p_.in.beta.present()) {
        Allow(output++, {b, first + static_cast<int64_t>(i), kh},
              Size(of_du, head.r[i]) + Size(du[i], of_r) + of_values * Size(du[i], head.r[i]));
      }
      if (p_.in.w.present()) {
        AllowRow(output, head, i, kh, dw);
      } else {
        AllowRow(1, head, i, kh, dw);
      }
    }
    for (size_t i = 0; i < n; ++i) AllowRow(1, head, i, kh, dk[i]);
  }

  const Problem& p_;
  Views allowed_;
  Call call_;
  double u_, rho_, least_;
  double of_forward_, of_backward_;  // rounding of probabilities
  Rows relative_, M_;
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
  const auto D = static_cast<double>(p->in.q.size(3)), Dv = static_cast<double>(p->in.v.size(3)),
             H = static_cast<double>(p->in.q.size(2)), Hkv = static_cast<double>(p->in.k.size(2));
  const double pairs = mechanism::CausalPairs(mechanism::RangesOf(kForm.name, "q", p->in.q, p->options));
  c.pairs = pairs * (H + Hkv);
  c.flops = p->pass == "backward" ? pairs * (H * (6 * D + 4 * Dv) + Hkv * (8 * D + 6 * Dv))
                                  : Explain(Context(1), p->in, p->options).flops;
  return c;
}

Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  mechanism::CheckPass(kForm, request);
  Problem p;
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const DType dtype = request.dtype;
  const auto normal = [&](DType of, const Shape& sizes) {
    return Buffer(of, sizes, Placement::kAligned).FillNormal(++seed);
  };
  const Buffer beta(dtype, {s.B, s.Tq, s.Hkv}, Placement::kAligned);
  p.in.q = p.Keep(normal(dtype, {s.B, s.Tq, s.Hq, s.D}));
  p.in.k = p.Keep(normal(dtype, {s.B, s.Tq, s.Hkv, s.D}));
  p.in.v = p.Keep(normal(dtype, {s.B, s.Tq, s.Hkv, s.Dv}));
  mechanism::FillUniform(beta, ++seed, 0, 1);
  p.in.beta = p.Keep(beta);
  if (mechanism::Words(request.variant).Has("w")) p.in.w = p.Keep(normal(dtype, {s.B, s.Tq, s.Hkv, s.D}));
  if (request.pass == "backward") {
    const Buffer d_o = normal(dtype, mechanism::ShapeOfRows(p)),
                 d_lse = normal(mechanism::StateDType(dtype), mechanism::ShapeOfSums(p));
    StartBackward(d_o, {}, d_lse, p);
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
    const int64_t T = Chance(0.03) ? 0 : Chance(0.7) ? Integer(1, 70) : Integer(120, 210);
    const int64_t Hkv = Integer(1, 2), H = Hkv * Integer(1, 3), N = packed ? Integer(1, 4) : B, D = Channels(),
                  Dv = Channels();
    p_.in.q = Tensor(dtype_, {B, T, H, D});
    p_.in.k = Tensor(dtype_, {B, T, Hkv, D});
    p_.in.v = Tensor(dtype_, {B, T, Hkv, Dv});
    if (Chance(0.5)) p_.in.w = Tensor(dtype_, {B, T, Hkv, D});
    if (Chance(0.8)) {
      const Buffer beta = Layout(Chance(0.5) ? dtype_ : wide, {B, T, Hkv}, false);
      const double most = random_.Pick({0.5, 1.0});
      mechanism::FillUniform(beta, ++seed_, Chance(0.2) ? -most : 0, most);
      p_.in.beta = p_.Keep(beta);
    }
    DrawSequences(packed, N, T, p_);
    if (Chance(0.4)) p_.options.scale = random_.Pick({0.0, -0.5, 0.1, 1.0});
    if (Chance(0.5)) {
      const Buffer d_o = Normal(dtype_, {B, T, H, Dv}, true);
      const Buffer d_u = Chance(0.5) ? Normal(dtype_, {B, T, Hkv, Dv}, true) : Buffer();
      StartBackward(d_o, d_u, Chance(0.5) ? Normal(wide, {B, H, T}, false) : Buffer(), p_);
    }
    mechanism::DescribeOutputs(kForm, p_);
    return ToCase(p_);
  }

 private:
  int64_t Channels() { return Chance(0.9) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33, 64}); }

  ConstTensorView Tensor(DType dtype, const Shape& sizes) { return p_.Keep(Normal(dtype, sizes, true)); }

  DType dtype_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs(
      {.family = "exact",
       .variants = {"w"},
       .flops = "2 (D + Dv) B (Hq + Hkv) Tq (Tq + 1) / 2, backward ((6 D + 4 Dv) Hq + (8 D + 6 Dv) Hkv) B Tq (Tq + "
                "1) / 2",
       .bytes = "B Tq (Hq (D + Dv) + Hkv (D + 2 Dv + 1)) size",
       .state = "B Tq Hkv (D + Dv) size (the keys and values u so far)",
       .make_case = &MakeCase,
       .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }},
      kForm);
}

}  // namespace heed::deltaformer
