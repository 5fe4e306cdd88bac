// attention_residual in the harness: its entry, problems, and the tolerance of kernels against the reference.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
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
#include "heed/ops/exact/attention_residual/attention_residual_internal.h"

namespace heed::attention_residual {
namespace {

using Doubles = std::vector<double>;
using Shape = std::vector<int64_t>;

using Form = mechanism::Form<Inputs, BackwardInputs, Options, Outputs, Gradients>;
using Problem = Form::Problem;

constexpr mechanism::DifferentiableInput<BackwardInputs, Gradients> kInputs[] = {
    {"residuals", "LBTD", &BackwardInputs::residuals, &Gradients::dresiduals},
    {"query", "D", &BackwardInputs::query, &Gradients::dquery, false, true},
    {"weight", "D", &BackwardInputs::weight, &Gradients::dweight, true, true}};

Shape ShapeOfResiduals(const Problem& p, int first, int end) {
  const auto sizes = p.in.residuals.sizes();
  return {sizes.begin() + first, sizes.end() - end};
}
constexpr mechanism::Result<BackwardInputs, Options, Outputs> kResults[] = {
    {"o", &Outputs::o, [](const Problem& p) { return ShapeOfResiduals(p, 1, 0); }},
    {"weights", &Outputs::weights, [](const Problem& p) { return ShapeOfResiduals(p, 0, 1); }, nullptr, true, true}};

constexpr Form kForm = {"attention_residual", kInputs, kResults, &Forward, &Backward, &Explain, &BackwardWorkspace};

// The bounds are to first order. u is 2^-24 or 2^-53. A chain of n roundings is a random walk, bounded by six standard
// deviations of u / sqrt(3), which is chain(n) = 3.5 u sqrt(n). With A_l = |scale| r_l sum_c |u_c v_lc|:
//
//   s_l      by ds_l = A_l (2 chain(D) + 4 u)                         two sums, and the rounding of weight .* query
//   p_l      by p_l rel_l,  rel_l = ds_l + sum p ds + 2 chain(L) + 8 u
//   o        by sum_l p_l |v_l| (rel_l + chain(L))
//   t_l      by E_l = p_l (M_l + sum p M) (2 rel_l + 2 sum p rel + 2 chain(D) + 8 u),  M_l = <|d_o|, |v_l|>
//   dv_l     by p_l rel_l |d_o| + |scale| r_l E_l W_l + a_l W_l (3 chain(D) + 8 u) + 4 u of all terms,
//            a_l = |scale| r_l p_l (M_l + sum p M),  W_l = |u| + r_l^2 sum_c |u_c v_lc| / D |v_l|
//   du       by sum over layers and tokens of (|scale| r_l E_l + a_l chain(16 L)) |v_l|
//
// Magnitudes are those of the terms without cancellation. Results of 16 bits are rounded once more.
struct Epsilon {
  double u, output, subnormal;
  double Chain(int64_t n) const { return 3.5 * u * std::sqrt(static_cast<double>(n)); }
};
Epsilon EpsilonOf(DType compute, DType output) {
  const double u = compute == DType::kF64 ? 0x1p-53 : 0x1p-24;
  switch (output) {
    case DType::kBF16: return {u, 1.01 * 0x1p-8, 0x1p-120};
    case DType::kF16: return {u, 1.01 * 0x1p-11, 0x1p-24};
    case DType::kF64: return {u, 0x1p-52, 0x1p-1000};
    default: return {u, 0x1p-23, 0x1p-110};
  }
}

// The token at this place in row-major order, as the last axis of a tensor or a column of its first axis.
Doubles RowOf(const ConstTensorView& t, int first, int64_t layer, int64_t token) {
  Doubles row;
  const int64_t begin = (first == 0 ? 0 : layer * t.stride(0)) + TokenOffset(t, first, t.rank() - 1, token);
  for (int64_t c = 0; c < t.size(t.rank() - 1); ++c) row.push_back(LoadAsDouble(t.dtype(), t.data(), begin + c));
  return row;
}

class Tolerance {
 public:
  // `expected` and `allowed` are contiguous.
  Tolerance(const Problem& p, std::span<const TensorView> expected, std::span<const TensorView> allowed)
      : p_(p), expected_(expected), allowed_(allowed) {
    const ConstTensorView& v = p.in.residuals;
    layers_ = v.size(0);
    tokens_ = NumTokens(p.in);
    channels_ = p.in.query.size(0);
    for (int64_t c = 0; c < channels_; ++c) {
      weight_.push_back(p.in.weight.present() ? GetElement(p.in.weight, Shape{c}) : 1);
      query_.push_back(GetElement(p.in.query, Shape{c}));
      u_.push_back(std::abs(weight_.back() * query_.back()));
      signed_u_.push_back(weight_.back() * query_.back());
    }
    du_.assign(u_.size(), 0);
    for (int64_t n = 0; n < tokens_; ++n) OfToken(n);
    for (size_t i = 0; i < allowed.size(); ++i) {
      const std::string& name = p.outputs[i].name;
      if (name == "dquery" || name == "dweight") {
        const Doubles& factor = name == "dquery" ? weight_ : query_;
        for (size_t c = 0; c < u_.size(); ++c) Set(i, static_cast<int64_t>(c), std::abs(factor[c]) * du_[c]);
      }
    }
  }

 private:
  // Sets the allowed error of an element by its place in row-major order, and adds that of rounding it.
  void Set(size_t output, int64_t at, double error) const {
    const Epsilon e = EpsilonOf(mechanism::StateDType(p_.in.residuals.dtype()), p_.outputs[output].dtype);
    const double value = std::abs(expected_[output].as<double>()[at]);
    allowed_[output].as<double>()[at] = error + e.output * value + e.subnormal;
  }

  void OfToken(int64_t n) {
    const Epsilon e = EpsilonOf(mechanism::StateDType(p_.in.residuals.dtype()), DType::kF32);
    const bool backward = p_.in.d_o.present();
    const Doubles d_o = backward ? RowOf(p_.in.d_o, 0, 0, n) : Doubles(u_.size());
    std::vector<Doubles> rows;
    const auto L = static_cast<size_t>(layers_);
    Doubles p(L), rel(L), inverse(L), with_u(L), M(L);
    double most = -INFINITY, total = 0, mean_rel = 0, mean_M = 0;
    for (size_t l = 0; l < L; ++l) {
      rows.push_back(RowOf(p_.in.residuals, 1, static_cast<int64_t>(l), n));
      double squares = 0, logit = 0;
      for (size_t c = 0; c < u_.size(); ++c) {
        const double x = rows[l][c];
        squares += x * x;
        logit += x * signed_u_[c];
        with_u[l] += std::abs(x) * u_[c];
        M[l] += std::abs(x * d_o[c]);
      }
      const double mean = squares / static_cast<double>(channels_) + p_.options.eps;
      inverse[l] = mean == 0 ? 0 : 1 / std::sqrt(mean);
      p[l] = p_.options.scale * inverse[l] * logit;
      rel[l] = std::abs(p_.options.scale) * inverse[l] * with_u[l] * (2 * e.Chain(channels_) + 4 * e.u);
      most = std::max(most, p[l]);
    }
    for (double& x : p) total += x = std::exp(x - most);
    for (size_t l = 0; l < L; ++l) {
      p[l] /= total;
      mean_rel += p[l] * rel[l];
      mean_M += p[l] * M[l];
    }
    double sum_rel = 0;
    for (size_t l = 0; l < L; ++l) sum_rel += p[l] * (rel[l] += mean_rel + 2 * e.Chain(layers_) + 8 * e.u);
    if (!backward) {
      for (size_t c = 0; c < u_.size(); ++c) {
        double error = 0;
        for (size_t l = 0; l < L; ++l) error += p[l] * std::abs(rows[l][c]) * (rel[l] + e.Chain(layers_));
        Set(0, n * channels_ + static_cast<int64_t>(c), error);
      }
      for (size_t l = 0; l < L; ++l) Set(1, static_cast<int64_t>(l) * tokens_ + n, p[l] * rel[l]);
      return;
    }
    for (size_t l = 0; l < L; ++l) {
      const double r = std::abs(p_.options.scale) * inverse[l], a = r * p[l] * (M[l] + mean_M);
      const double error = a * (2 * rel[l] + 2 * sum_rel + 2 * e.Chain(channels_) + 8 * e.u);
      const double of_norm = inverse[l] * inverse[l] * with_u[l] / static_cast<double>(channels_);
      for (size_t c = 0; c < u_.size(); ++c) {
        const double x = std::abs(rows[l][c]), W = u_[c] + of_norm * x, first = p[l] * std::abs(d_o[c]);
        du_[c] += x * (error + a * e.Chain(16 * layers_));
        for (size_t i = 0; i < allowed_.size(); ++i) {
          if (p_.outputs[i].name != "dresiduals") continue;
          Set(i, (static_cast<int64_t>(l) * tokens_ + n) * channels_ + static_cast<int64_t>(c),
              first * (rel[l] + 4 * e.u) + W * (error + a * (3 * e.Chain(channels_) + 12 * e.u)));
        }
      }
    }
  }

  const Problem& p_;
  std::span<const TensorView> expected_, allowed_;
  int64_t layers_ = 0, tokens_ = 0, channels_ = 0;
  Doubles weight_, query_, u_, signed_u_, du_;
};

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c = mechanism::CaseOf(kForm, p);
  c.title += " eps=" + std::to_string(p->options.eps) + " scale=" + std::to_string(p->options.scale) + " " + p->note;
  const bool backward = p->pass == "backward";
  c.reference = [p, backward](std::span<const TensorView> expected, std::span<const TensorView> tolerance) {
    if (backward) {
      BackwardReference(p->in, p->options, mechanism::GradientsOf(kForm, *p, expected));
    } else {
      Reference(p->in, p->options, mechanism::OutputsOf(kForm, *p, expected));
    }
    if (!tolerance.empty()) Tolerance(*p, expected, tolerance);
  };
  c.flops = backward ? 14 * static_cast<double>(p->in.residuals.num_elements())
                     : Explain(Context(1), p->in, p->options).flops;
  return c;
}

// L = 8 layers or as many as the variant says, B Tq tokens, and Hq D channels.
Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  const mechanism::Words words(request.variant);
  mechanism::CheckPass(kForm, request);
  Problem p;
  p.pass = request.pass;
  p.note = request.variant;
  const auto layers = static_cast<int64_t>(words.Number("layers").value_or(8));
  uint64_t seed = request.seed * 16;
  const auto tensor = [&](const Shape& sizes) {
    return p.Keep(Buffer(request.dtype, sizes, Placement::kAligned).FillNormal(++seed));
  };
  p.in.query = tensor({s.Hq * s.D});
  p.in.residuals = tensor({layers, s.B, s.Tq, s.Hq * s.D});
  p.in.weight = tensor({s.Hq * s.D});
  if (request.pass == "backward") p.in.d_o = tensor({s.B, s.Tq, s.Hq * s.D});
  p.options.scale = 1 / std::sqrt(static_cast<double>(s.Hq * s.D));
  mechanism::DescribeOutputs(kForm, p);
  return ToCase(p);
}

class Maker {
 public:
  Maker(DType dtype, uint64_t seed) : dtype_(dtype), random_(seed, 11), seed_(seed * 64) {
    p_.note = "seed=" + std::to_string(seed);
  }

  Case Make() {
    const int64_t channels = Chance(0.8) ? Integer(1, 40) : random_.Pick<int64_t>({63, 64, 65, 130, 257});
    Shape sizes = {Chance(0.9) ? Integer(1, 9) : Integer(10, 40)};
    const int64_t axes = Integer(1, 4);
    for (int64_t axis = 0; axis < axes; ++axis) {
      sizes.push_back(Chance(0.03) ? 0 : axis == 0 ? Integer(1, 40) : Integer(1, 3));
    }
    sizes.push_back(channels);
    const bool wide = dtype_ == DType::kF64;
    const auto other = [&] {
      return wide ? random_.Pick<DType>({DType::kF64, DType::kF32}) : Chance(0.5) ? dtype_ : DType::kF32;
    };
    p_.in.query = Tensor(other(), {channels}, random_.Pick({0.1, 1.0, 3.0}));
    p_.in.residuals = Tensor(dtype_, sizes, random_.Pick({1.0, 1.0, 0.01, 30.0}));
    if (Chance(0.6)) p_.in.weight = Tensor(other(), {channels}, 1);
    if (Chance(0.5)) {
      p_.pass = "backward";
      p_.in.d_o = Tensor(dtype_, Shape(sizes.begin() + 1, sizes.end()), 1);
    }
    if (Chance(0.5)) p_.options.eps = random_.Pick({1e-5, 0.0, 1.0});
    p_.options.scale = random_.Pick({1.0, 0.3, -0.5, 0.0});
    mechanism::DescribeOutputs(kForm, p_);
    return ToCase(p_);
  }

 private:
  bool Chance(double probability) { return random_.Chance(probability); }
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }

  // N(0, deviation^2) with axes in any order but the last, gaps between rows, against either guard page.
  ConstTensorView Tensor(DType dtype, const Shape& sizes, double deviation) {
    std::vector<size_t> order;  // from the innermost axis outwards
    for (size_t axis = sizes.size(); axis-- > 0;) order.push_back(axis);
    if (order.size() > 2 && Chance(0.4)) std::swap(order[1], order[order.size() - 1]);
    Shape strides(sizes.size());
    int64_t next = 1;
    for (const size_t axis : order) {
      strides[axis] = next;
      next = next * std::max<int64_t>(sizes[axis], 1) + (Chance(0.3) ? Integer(1, 3) : 0);
    }
    const Placement placement = Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard;
    return p_.Keep(Buffer(dtype, sizes, strides, placement, Integer(0, 5)).FillNormal(++seed_, deviation));
  }

  DType dtype_;
  Random random_;
  uint64_t seed_;
  Problem p_;
};

}  // namespace

OpEntry Entry() {
  return mechanism::WithVerbs({.family = "exact",
                               .variants = {"layers=32"},
                               .flops = "6 L Hq D per token, backward 14 L Hq D; L = 8 layers",
                               .bytes = "B Tq (L + 1) Hq D size",
                               .state = "none: each token sees its own layers alone",
                               .make_case = &MakeCase,
                               .random_case = [](DType dtype, uint64_t seed) { return Maker(dtype, seed).Make(); }},
                              kForm);
}

}  // namespace heed::attention_residual
