// path_attention in the harness: its entry, problems, and the tolerance of kernels against the reference.
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
#include "heed/ops/exact/path_attention/path_attention_internal.h"

namespace heed::path_attention {
namespace {

using mechanism::Shape;
using mechanism::Views;
using Form = mechanism::Form<Inputs, BackwardInputs, Options, Outputs, Gradients>;
using Problem = Form::Problem;

constexpr mechanism::DifferentiableInput<BackwardInputs, Gradients> kInputs[] = {
    {"q", "BTHK", &BackwardInputs::q, &Gradients::dq},
    {"k", "BTGK", &BackwardInputs::k, &Gradients::dk},
    {"v", "BTGV", &BackwardInputs::v, &Gradients::dv},
    {"w", "BTGK", &BackwardInputs::w, &Gradients::dw},
    {"beta", "BTG", &BackwardInputs::beta, &Gradients::dbeta, false, true},
    {"log_forget", "BTH", &BackwardInputs::log_forget, &Gradients::dlog_forget, true, true}};

constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, &mechanism::ShapeOfRows<Problem>, &BackwardInputs::o},
    {"lse", &Outputs::lse, &mechanism::ShapeOfSums<Problem>, &BackwardInputs::lse, true, true}};

constexpr Form kForm = {"path_attention", kInputs, kResults, &Forward, &Backward, &Explain, &BackwardWorkspace};

// The bounds are to first order. u is 2^-24 or 2^-53. The error of a chain of n roundings is bounded by six standard
// deviations of u / sqrt(3), which is chain(n) = 3.5 u sqrt(n). |beta_t| |w_t|^2 <= 2, so that no H_t lengthens a
// vector x, and the factors u_t of w_t that a block subtracts from x have |u_t| <= |beta_t| |w_t| |x|.
//
// A product with H_t in a block is u_t = beta_t (<w_t, x> - sum_s <w_t, w_s> u_s) over earlier tokens of the block: its
// products of D terms err by chain(D) of the lengths, and its sum of 64 by chain(64). Errors pass later tokens without
// growing, so that a block adds the variance
//
//   a_b^2 = sum_t (|beta_t| |w_t|^2 (1 + g_t))^2,  g_t^2 = sum_{s < t of the block} beta_s^2 |w_s|^4
//
// and D for the product with P. Over the blocks from j to i, in units of |q_i| |k_j|, hence of s with the scale:
//
//   path_ij = chain(D + 64) sqrt(1 + sum_b (a_b^2 + D))
//   ds_ij   = |scale| |q_i| |k_j| path_ij + (chain(64) + 8 u) (|F_ij| + |s_ij| + |lse_i|)
//   rel_ij  = ds_ij + sum_j P ds + chain(T) + 12 u                            of P_ij
//   o       by sum_j P |v_j| (rel_ij + chain(T)),  lse by sum_j P ds + chain(T) + 12 u (1 + |lse|)
//
// With M_ij = <|d_o_i|, |v_j|> and m_ij = P_ij (M_ij + sum_j P M + |d_lse_i|), the magnitude of dS_ij,
//
//   E_ij  = m_ij (rel_ij + chain(Dv) + 8 u) + P_ij (u_o <|d_o_i|, |o_i|>)     of dS_ij, u_o: the rounding of o
//   dq_i  by sum_j |scale| |k_j| (E + m (path + chain(64)));  dk_j by the same over i with |q_i| and chain(T)
//   dv_j  by sum_i P |d_o_i| (rel + chain(T))
//   dlog_forget_t by sum_{i >= t > j} (E + m chain(T))
//
// dw and dbeta of a block are sums over all pairs with a path into the block, which the UT transform's own gradient
// passes on with factors up to g = max g_t, twice:
//
//   dw_t  by 2 (1 + g)^2 C max|w|,  dbeta_t by (1 + g)^2 C max|w|^2,
//   C = sum |scale| |q_i| |k_j| (E + m (path + chain(D + 64) (a_b + sqrt(D)) + chain(T)))
class Tolerance {
 public:
  Tolerance(const Problem& p, Views allowed) : p_(p), allowed_(allowed) {
    u_ = p.in.q.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24;
    const DType dtype = p.in.q.dtype();
    rounding_ = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : u_;
  }

  void Compute() {
    for (const TensorView& t : allowed_) {
      if (t.num_elements() > 0) Each(t, [&](const Shape& index) { SetElement(t, index, 0); });
    }
    constexpr char kOp[] = "path_attention::Tolerance";
    const bool backward = p_.pass == "backward";
    call_ = backward ? CheckBackward(kOp, p_.in, p_.options, {}, true, false)
                     : CheckForward(kOp, p_.in, p_.options, {allowed_[0], allowed_[1]}, true, false);
    mechanism::TokenRange last = {-1, -1, -1};
    int64_t last_head = -1;
    ForReferenceRows(call_, p_.in, [&](const ReferenceRow& row) {
      const int64_t key_head = row.head / call_.group();
      if (row.sequence.batch != last.batch || row.sequence.begin != last.begin || key_head != last_head) {
        last = row.sequence;
        last_head = key_head;
        Measure(row.sequence, key_head);
      }
      backward ? OfGradients(row) : OfResults(row);
    });
  }

 private:
  static double Chain(double u, double n) { return 3.5 * u * std::sqrt(n); }
  double Chain(int64_t n) const { return Chain(u_, static_cast<double>(n)); }

  template <class F>
  static void Each(const TensorView& t, const F& f) {
    Shape index(static_cast<size_t>(t.rank()));
    do f(index);
    while (NextIndex(t.sizes(), index));
  }

  double Length(const ConstTensorView& t, int64_t token, int64_t h) const {
    double sum = 0;
    for (int64_t c = 0; c < t.size(3); ++c) sum += std::pow(GetElement(t, Shape{batch_, token, h, c}), 2);
    return std::sqrt(sum);
  }
  void Allow(size_t output, const Shape& index, double error) const {
    SetElement(allowed_[output], index, GetElement(allowed_[output], index) + error);
  }
  void AllowRow(size_t output, int64_t token, int64_t h, double error) const {
    for (int64_t c = 0; c < allowed_[output].size(3); ++c) Allow(output, {batch_, token, h, c}, error);
  }

  // Computes lengths of the tokens of a key head, and variances of its blocks.
  void Measure(const mechanism::TokenRange& s, int64_t key_head) {
    batch_ = s.batch;
    keys_.clear();
    variances_.clear();
    gains_.clear();
    longest_w_ = 0;
    double within = 0;
    for (int64_t t = 0; s.begin + t < s.end; ++t) {
      keys_.push_back(Length(p_.in.k, s.begin + t, key_head));
      if (t % kBlock == 0) {
        variances_.push_back(static_cast<double>(call_.D));
        gains_.push_back(0);
        within = 0;
      }
      const double w = Length(p_.in.w, s.begin + t, key_head);
      const double size = std::abs(GetElement(p_.in.beta, Shape{batch_, s.begin + t, key_head})) * w * w;
      longest_w_ = std::max(longest_w_, w);
      variances_.back() += std::pow(size * (1 + std::sqrt(within)), 2);
      gains_.back() = std::max(gains_.back(), std::sqrt(within));
      within += size * size;
    }
  }

  // For each key of a row: the error of its path, of its logit and of its probability.
  struct Errors {
    std::vector<double> path, relative;
    double of_lse = 0, query = 0;
  };
  Errors ErrorsOf(const ReferenceRow& row) const {
    Errors e;
    e.query = Length(p_.in.q, row.sequence.begin + row.i, row.head);
    double variance = 1;
    e.path.resize(row.weights.size());
    for (int64_t b = row.i / kBlock; b >= 0; --b) {
      variance += variances_[static_cast<size_t>(b)];
      for (int64_t j = b * kBlock; j <= std::min(row.i, b * kBlock + kBlock - 1); ++j) {
        e.path[static_cast<size_t>(j)] = Chain(call_.D + 64) * std::sqrt(variance);
      }
    }
    for (size_t j = 0; j < row.weights.size(); ++j) {
      if (row.weights[j] == 0) {  // hidden, or far below the others
        e.relative.push_back(0);
        continue;
      }
      const double logit =
          std::abs(call_.scale) * e.query * keys_[j] * e.path[j] +
          (Chain(64) + 8 * u_) * (std::abs(row.forgotten[j]) + std::abs(row.logits[j]) + std::abs(row.lse));
      e.relative.push_back(logit);
      e.of_lse += row.weights[j] * logit;
    }
    e.of_lse += Chain(row.i + 1) + 12 * u_;
    for (double& x : e.relative) x += e.of_lse;
    return e;
  }

  void OfResults(const ReferenceRow& row) const {
    const int64_t token = row.sequence.begin + row.i, key_head = row.head / call_.group();
    const Errors e = ErrorsOf(row);
    for (int64_t c = 0; c < call_.Dv; ++c) {
      double error = 0;
      for (size_t j = 0; j < row.weights.size(); ++j) {
        const double v = GetElement(p_.in.v, Shape{batch_, row.sequence.begin + static_cast<int64_t>(j), key_head, c});
        error += row.weights[j] * std::abs(v) * (e.relative[j] + Chain(row.i + 1));
      }
      Allow(0, {batch_, token, row.head, c}, error);
    }
    Allow(1, {batch_, row.head, token}, e.of_lse + 12 * u_ * std::abs(row.lse));
  }

  void OfGradients(const ReferenceRow& row) {
    const int64_t first = row.sequence.begin, token = first + row.i, h = row.head, key_head = h / call_.group();
    const Errors e = ErrorsOf(row);
    const size_t keys = row.weights.size();
    std::vector<double> m(keys), d_o;
    double mean = p_.in.d_lse.present() ? std::abs(GetElement(p_.in.d_lse, Shape{batch_, h, token})) : 0, of_o = 0;
    for (int64_t c = 0; c < call_.Dv; ++c) {
      d_o.push_back(std::abs(GetElement(p_.in.d_o, Shape{batch_, token, h, c})));
      of_o += rounding_ * d_o.back() * std::abs(GetElement(p_.in.o, Shape{batch_, token, h, c}));
    }
    for (size_t j = 0; j < keys; ++j) {
      for (int64_t c = 0; c < call_.Dv; ++c) {
        m[j] += d_o[static_cast<size_t>(c)] *
                std::abs(GetElement(p_.in.v, Shape{batch_, first + static_cast<int64_t>(j), key_head, c}));
      }
      mean += row.weights[j] * m[j];
    }
    const double scale = std::abs(call_.scale), sums = Chain(row.sequence.end - first);
    double of_query = 0, crossing = 0, entering = 0, sizes = 0;  // sizes: of pairs that cross a block
    const int64_t blocks = row.i / kBlock + 1;
    for (int64_t b = 0; b < blocks; ++b) {
      const auto block = static_cast<size_t>(b);
      const int64_t end = std::min(row.i + 1, (b + 1) * kBlock);
      for (int64_t t = b * kBlock; t < end; ++t) {
        const auto j = static_cast<size_t>(t);
        if (p_.in.log_forget.present()) Allow(5, {batch_, first + t, h}, crossing);
        const double size = row.weights[j] * (m[j] + mean);
        const double error = size * (e.relative[j] + Chain(call_.Dv) + 8 * u_) + row.weights[j] * of_o;
        crossing += error + size * sums;
        of_query += scale * keys_[j] * (error + size * (e.path[j] + Chain(64)));
        AllowRow(1, first + t, key_head, scale * e.query * (error + size * (e.path[j] + sums)));
        for (int64_t c = 0; c < call_.Dv; ++c) {
          Allow(2, {batch_, first + t, key_head, c},
                row.weights[j] * d_o[static_cast<size_t>(c)] * (e.relative[j] + sums));
        }
        entering += scale * e.query * keys_[j] * (error + size * (e.path[j] + sums));
        sizes += scale * e.query * keys_[j] * size;
      }
      const double amplified =
          std::pow(1 + gains_[block], 2) * (entering + sizes * Chain(call_.D + 64) * std::sqrt(variances_[block]));
      for (int64_t t = b * kBlock; t < std::min(row.sequence.end - first, (b + 1) * kBlock); ++t) {
        AllowRow(3, first + t, key_head, 2 * amplified * longest_w_);
        Allow(4, {batch_, first + t, key_head}, amplified * longest_w_ * longest_w_);
      }
    }
    AllowRow(0, token, h, of_query);
  }

  const Problem& p_;
  Views allowed_;
  Call call_;
  double u_, rounding_, longest_w_ = 0;
  int64_t batch_ = 0;
  std::vector<double> keys_, variances_, gains_;
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
  c.flops = p->pass == "backward" ? c.pairs * (8 * D + 6 * Dv + 6 * D * D / kBlock)
                                  : Explain(Context(1), p->in, p->options).flops;
  return c;
}

// Rows of this length.
void FillDirections(const Buffer& buffer, uint64_t seed, double length) {
  const TensorView& t = buffer.view();
  buffer.FillNormal(seed);
  if (t.num_elements() == 0) return;
  Shape index(4);
  const Shape rows = {t.size(0), t.size(1), t.size(2), 1};
  do {
    double sum = 0;
    for (index[3] = 0; index[3] < t.size(3); ++index[3]) sum += std::pow(GetElement(t, index), 2);
    for (index[3] = 0; index[3] < t.size(3); ++index[3]) {
      SetElement(t, index, sum == 0 ? 0 : length * GetElement(t, index) / std::sqrt(sum));
    }
    index[3] = 0;
  } while (NextIndex(rows, index));
}

// Below 1 by more than the rounding of w to 16 bits, so that |beta| |w|^2 < 2.
constexpr double kLength = 0.98;

Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  mechanism::CheckPass(kForm, request);
  Problem p;
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const DType dtype = request.dtype, wide = mechanism::StateDType(dtype);
  const auto make = [&](DType of, const Shape& sizes) { return Buffer(of, sizes, Placement::kAligned); };
  const Buffer w = make(dtype, {s.B, s.Tq, s.Hkv, s.D}), beta = make(dtype, {s.B, s.Tq, s.Hkv});
  p.in.q = p.Keep(make(dtype, {s.B, s.Tq, s.Hq, s.D}).FillNormal(++seed));
  p.in.k = p.Keep(make(dtype, {s.B, s.Tq, s.Hkv, s.D}).FillNormal(++seed));
  p.in.v = p.Keep(make(dtype, {s.B, s.Tq, s.Hkv, s.Dv}).FillNormal(++seed));
  FillDirections(w, ++seed, kLength);
  p.in.w = p.Keep(w);
  mechanism::FillUniform(beta, ++seed, 0, 2);
  p.in.beta = p.Keep(beta);
  if (!mechanism::Words(request.variant).Has("ungated")) {
    const Buffer g = make(wide, {s.B, s.Tq, s.Hq});
    mechanism::FillDecays(g, ++seed, 0.05);
    p.in.log_forget = p.Keep(g);
  }
  if (request.pass == "backward") {
    const Buffer d_o = make(dtype, mechanism::ShapeOfRows(p)).FillNormal(++seed);
    mechanism::StartBackward(kForm, &Reference, d_o, make(wide, mechanism::ShapeOfSums(p)).FillNormal(++seed), p);
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
    const int64_t Hkv = Integer(1, 2), H = Hkv * Integer(1, 3), N = packed ? Integer(1, 4) : B, D = Channels(),
                  Dv = Channels();
    const auto of_token = [&] { return Chance(0.5) ? dtype_ : wide; };
    const Buffer w = Layout(dtype_, {B, T, Hkv, D}, true), beta = Layout(of_token(), {B, T, Hkv}, false);
    p_.in.q = Tensor(dtype_, {B, T, H, D}, true);
    p_.in.k = Tensor(dtype_, {B, T, Hkv, D}, true);
    p_.in.v = Tensor(dtype_, {B, T, Hkv, Dv}, true);
    FillDirections(w, ++seed_, random_.Pick({kLength, kLength, 0.5}));
    p_.in.w = p_.Keep(w);
    mechanism::FillUniform(beta, ++seed_, 0, random_.Pick({1.0, 2.0}));
    p_.in.beta = p_.Keep(beta);
    if (Chance(0.6)) {
      const Buffer g = Layout(of_token(), {B, T, H}, false);
      mechanism::FillDecays(g, ++seed_, random_.Pick({0.01, 0.1, 2.0}), Chance(0.2) ? 0.05 : 0);
      p_.in.log_forget = p_.Keep(g);
    }
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

  DType dtype_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs(
      {.family = "exact",
       .variants = {"ungated"},
       .flops = "(2 D + 2 Dv + 2 D D / 64) B Hq Tq (Tq + 1) / 2, backward (8 D + 6 Dv + 6 D D / 64) of the same",
       .bytes = "B Tq (Hq (D + Dv) + Hkv (2 D + Dv + 1)) size",
       .state = "none: whole sequences only",
       .make_case = &MakeCase,
       .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }},
      kForm);
}

}  // namespace heed::path_attention
