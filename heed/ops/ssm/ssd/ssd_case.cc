// SSD in the harness: groups, skips, gates, biases, softplus and limits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/ssm/ssd/ssd.h"
#include "heed/ops/ssm/ssd/ssd_case.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"

namespace heed::ssd {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Clear;
using mechanism::FillEach;
using mechanism::Put;
using mechanism::ReferenceTensor;
using mechanism::Row;
using mechanism::Shape;

// Tolerances are those of the recurrence plus the errors of the computations around it: a time step is a sum, a
// softplus and a product, with an error of a few u and, where the softplus is an exponential, of u times its argument;
// skip and gate are a sum of two terms and a product.

template <class View>
View Transposed(const View& t) {
  if (!t.present()) return t;
  return View(t.data(), t.dtype(), {t.size(0), t.size(1), t.size(3), t.size(2)},
              {t.stride(0), t.stride(1), t.stride(3), t.stride(2)});
}

// Zeros in the shape of t, or nothing.
ReferenceTensor Like(const TensorView& t) {
  const auto sizes = t.present() ? t.sizes() : std::span<const int64_t>();
  return ReferenceTensor({sizes.begin(), sizes.end()});
}

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The tensors of the recurrence, and the tensors around it.
struct Plain {
  const Inputs& in;
  ReferenceTensor delta, slope, log_decay, v;  // slope: derivative of delta by dt
  ReferenceTensor undecided;                   // 1 where rounding decides whether a time step is clamped
  std::vector<float> wide[2];                  // 16-bit C and B, widened so that they are not rounded again
  recurrent::ReferenceBackwardInputs inputs;
  recurrent::Options options;
  recurrent::ReferenceMath math;
  std::vector<mechanism::ReferenceSequence> ranges;
  double delta_error = 0;  // relative error of delta

  Plain(const Inputs& given, const Options& call)
      : in(given), delta({in.x.size(0), in.x.size(1), in.x.size(2)}), slope(delta), log_decay(delta),
        v({in.x.size(0), in.x.size(1), in.x.size(2), in.x.size(3)}), undecided(delta), options(call),
        ranges(mechanism::SequencesOf(call, in.x.size(0), in.x.size(1))) {
    const double u = in.x.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24;
    double largest = 0;
    ForEach([&](int64_t b, int64_t t, int64_t h) {
      const double dt = At(in.dt, {b, t, h});
      const double bias = in.dt_bias.present() ? At(in.dt_bias, {h}) : 0;
      const double x = dt + bias;
      double value = x, derivative = 1;
      if (call.dt_softplus) {
        value = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
        derivative = Sigmoid(x);
      }
      largest = std::max(largest, (std::abs(dt) + std::abs(bias)) * (call.dt_softplus ? 1 : 1 / std::abs(x)));
      for (const double limit : {call.dt_min, call.dt_max}) {
        if (call.dt_softplus && limit == 0) continue;  // unreachable limit
        const double error = 16 * u * (std::abs(dt) + std::abs(bias) + std::abs(value));
        if (std::abs(value - limit) <= error) Put(undecided.view(), {b, t, h}, 1);
      }
      if (value < call.dt_min || value > call.dt_max) {
        value = std::clamp(value, call.dt_min, call.dt_max);
        derivative = 0;
      }
      Put(delta.view(), {b, t, h}, value);
      Put(slope.view(), {b, t, h}, derivative);
      Put(log_decay.view(), {b, t, h}, value * At(in.A, {h}));
      for (int64_t p = 0; p < in.x.size(3); ++p) {
        Put(v.view(), {b, t, h, p}, value * At(in.x, {b, t, h, p}));
      }
    });
    delta_error = u * (6 + largest);
    inputs.q = Wide(in.C, wide[0]);
    inputs.k = Wide(in.B, wide[1]);
    inputs.v = v.view();
    inputs.log_decay = log_decay.view();
    inputs.initial.S = Transposed(in.initial.S);
    math.scale = call.scale.value_or(1);
    math.log_decay = [g = inputs.log_decay](int64_t b, int64_t t, int64_t h, int64_t) { return At(g, {b, t, h}); };
    math.value_error = delta_error + u;
    math.log_decay_error = delta_error + 2 * u;
  }

  // Calls f(b, t, h) for all valid tokens.
  template <class F>
  void ForEach(const F& f) const {
    for (const auto& range : ranges) {
      for (int64_t t = range.begin; t < range.end; ++t) {
        for (int64_t h = 0; h < in.x.size(2); ++h) f(range.batch, t, h);
      }
    }
  }

  double D(int64_t h, int64_t p) const {
    if (!in.D.present()) return 0;
    return in.D.rank() == 2 ? At(in.D, {h, p}) : At(in.D, {h});
  }

  // y, the output of the recurrence, and its error.
  ReferenceTensor Y(ReferenceTensor* tolerance) {
    ReferenceTensor y(v.sizes);
    recurrent::Reference(inputs, options, math, {y.view(), {}});
    if (tolerance != nullptr) {
      recurrent::Tolerance(inputs, options, math, {y.view(), {}}, {tolerance->view(), {}});
    }
    return y;
  }

 private:
  static ConstTensorView Wide(const ConstTensorView& t, std::vector<float>& memory) {
    if (t.dtype() == DType::kF64 || t.dtype() == DType::kF32) return t;
    for (int64_t b = 0; b < t.size(0); ++b) {
      for (int64_t s = 0; s < t.size(1); ++s) {
        for (int64_t g = 0; g < t.size(2); ++g) {
          for (int64_t n = 0; n < t.size(3); ++n) {
            memory.push_back(static_cast<float>(At(t, {b, s, g, n})));
          }
        }
      }
    }
    return ConstTensorView(memory.data(), DType::kF32, {t.size(0), t.size(1), t.size(2), t.size(3)});
  }
};

double Unit(const Inputs& in) { return in.x.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24; }

// Long sums are over groups of 64, then in f64.
constexpr double kSum = 48;  // units of the sum of magnitudes

void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance) {
  Plain plain(in, options);
  const auto e = recurrent::EpsilonOf(in.x.dtype());
  const double u = Unit(in);
  Clear(tolerance.o);
  ReferenceTensor y(plain.v.sizes), y_error(plain.v.sizes);
  recurrent::Reference(plain.inputs, plain.options, plain.math, {y.view(), {}});
  recurrent::Tolerance(plain.inputs, plain.options, plain.math, {y.view(), {Transposed(expected.final.S), {}, {}}},
                       {y_error.view(), {Transposed(tolerance.final.S), {}, {}}});
  plain.ForEach([&](int64_t b, int64_t t, int64_t h) {
    for (int64_t p = 0; p < in.x.size(3); ++p) {
      const double skip = plain.D(h, p) * At(in.x, {b, t, h, p});
      double error = At(y_error.view(), {b, t, h, p}) + 4 * u * (std::abs(At(y.view(), {b, t, h, p})) + std::abs(skip));
      double output = At(expected.o, {b, t, h, p});
      if (in.z.present()) {
        const double z = At(in.z, {b, t, h, p});
        error = std::abs(z) * Sigmoid(z) * error + 8 * u * std::abs(output);
      }
      Put(tolerance.o, {b, t, h, p}, error + std::abs(output) * e.output + e.subnormal);
    }
  });
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  Plain plain(in, options);
  const auto e = recurrent::EpsilonOf(in.x.dtype());
  const double u = Unit(in);
  ReferenceTensor y_error(plain.v.sizes), dy(plain.v.sizes);
  ReferenceTensor y = in.z.present() ? plain.Y(&y_error) : ReferenceTensor(plain.v.sizes);
  plain.ForEach([&](int64_t b, int64_t t, int64_t h) {
    for (int64_t p = 0; p < in.x.size(3); ++p) {
      double factor = 1;
      if (in.z.present()) {
        const double z = At(in.z, {b, t, h, p});
        factor = z * Sigmoid(z);
      }
      Put(dy.view(), {b, t, h, p}, factor * At(in.d_o, {b, t, h, p}));
    }
  });
  plain.inputs.d_o = dy.view();
  plain.inputs.d_final.S = Transposed(in.d_final.S);
  if (in.z.present()) plain.math.value_error += 8 * u;  // error of dy

  // The gradients of the recurrence, whose v and log_decay are inside SSD, and their tolerances.
  ReferenceTensor dv(plain.v.sizes), dg(plain.delta.sizes), dv_error(dv), dg_error(dg);
  ReferenceTensor dB = Like(expected.B), dC = Like(expected.C), dS = Like(Transposed(expected.initial.S));
  recurrent::ReferenceGradients gradients, allowed;
  if (expected.C.present()) gradients.q = dC.view();
  if (expected.B.present()) gradients.k = dB.view();
  gradients.v = dv.view();
  gradients.log_decay = dg.view();
  if (expected.initial.S.present()) gradients.initial.S = dS.view();
  recurrent::BackwardReference(plain.inputs, plain.options, plain.math, gradients);
  allowed.q = tolerance.C;
  allowed.k = tolerance.B;
  allowed.v = dv_error.view();
  allowed.log_decay = dg_error.view();
  allowed.initial.S = Transposed(tolerance.initial.S);
  recurrent::BackwardTolerance(plain.inputs, plain.options, plain.math, gradients, allowed);
  const auto round = [&](const TensorView& to, mechanism::Index index, double error, double value, DType dtype) {
    const auto of = recurrent::EpsilonOf(dtype);
    Put(to, index, error + std::abs(value) * of.output + of.subnormal);
  };
  // dB and dC are rounded to x's dtype, which the widened copies do not show.
  const std::pair<TensorView, TensorView> rounded[] = {{tolerance.B, expected.B}, {tolerance.C, expected.C}};
  for (const auto& [allowed_view, value] : rounded) {
    for (int64_t i = 0; value.present() && i < value.num_elements(); ++i) {
      allowed_view.as<double>()[i] += std::abs(value.as<double>()[i]) * e.output + e.subnormal;
    }
  }

  for (const TensorView* t :
       {&tolerance.x, &tolerance.dt, &tolerance.A, &tolerance.D, &tolerance.z, &tolerance.dt_bias}) {
    Clear(*t);
  }
  plain.ForEach([&](int64_t b, int64_t t, int64_t h) {
    const double delta = At(plain.delta.view(), {b, t, h}), A = At(in.A, {h});
    const double slope = At(plain.slope.view(), {b, t, h});
    const double g = At(dg.view(), {b, t, h});
    double of_delta = A * g, magnitude = std::abs(of_delta);
    double error = std::abs(A) * At(dg_error.view(), {b, t, h});
    for (int64_t p = 0; p < in.x.size(3); ++p) {
      const double x = At(in.x, {b, t, h, p}), dv_p = At(dv.view(), {b, t, h, p});
      const double dy_p = At(dy.view(), {b, t, h, p}), D = plain.D(h, p);
      const double dv_off = At(dv_error.view(), {b, t, h, p});
      of_delta += dv_p * x;
      magnitude += std::abs(dv_p * x);
      error += dv_off * std::abs(x);
      const double off = delta * dv_off + plain.delta_error * std::abs(delta * dv_p) +
                         12 * u * (std::abs(delta * dv_p) + std::abs(D * dy_p));
      round(tolerance.x, {b, t, h, p}, off, delta * dv_p + D * dy_p, in.x.dtype());
      const double of_D = kSum * u * std::abs(dy_p * x);
      tolerance.D.rank() == 2 ? Add(tolerance.D, {h, p}, of_D) : Add(tolerance.D, {h}, of_D);
      if (!in.z.present()) continue;
      const double z = At(in.z, {b, t, h, p}), s = Sigmoid(z);
      const double d_o = At(in.d_o, {b, t, h, p});
      const double whole = At(y.view(), {b, t, h, p}) + D * x;
      const double silu_slope = s * (1 + z * (1 - s));
      const double y_off =
          At(y_error.view(), {b, t, h, p}) + 4 * u * (std::abs(At(y.view(), {b, t, h, p})) + std::abs(D * x));
      const double z_off =
          std::abs(d_o) * (std::abs(silu_slope) * y_off + 12 * u * std::abs(whole) * s * (1 + std::abs(z)));
      round(tolerance.z, {b, t, h, p}, z_off, d_o * whole * silu_slope, in.x.dtype());
    }
    const double ddt = slope * of_delta;
    double off = slope * (error + kSum * u * magnitude) + plain.delta_error * std::abs(ddt);
    off += At(plain.undecided.view(), {b, t, h}) * magnitude;
    round(tolerance.dt, {b, t, h}, off, ddt, in.dt.dtype());
    Add(tolerance.A, {h}, delta * At(dg_error.view(), {b, t, h}) + (plain.delta_error + u) * std::abs(delta * g));
    Add(tolerance.dt_bias, {h}, off + u * std::abs(ddt));
  });
  const auto round_sums = [&](const TensorView& to, const TensorView& value, const ConstTensorView& of) {
    for (int64_t i = 0; value.present() && i < value.num_elements(); ++i) {
      const auto rounding = recurrent::EpsilonOf(of.dtype());
      const double one = of.dtype() == DType::kF32 ? 0x1p-24 : rounding.output;
      to.as<double>()[i] += std::abs(value.as<double>()[i]) * one + rounding.subnormal;
    }
  };
  round_sums(tolerance.A, expected.A, in.A);
  round_sums(tolerance.D, expected.D, in.D);
  round_sums(tolerance.dt_bias, expected.dt_bias, in.dt_bias);
}

mechanism::Mechanism MechanismOf(const Options& own) {
  mechanism::Mechanism m;
  m.name = "ssd";
  m.options = own.dt_softplus ? " softplus" : "";
  mechanism::Bind<Structs, Options>(mechanism::Members(kTensors), mechanism::Members(kStates), kTensors.x.axes, own,
                                    {HEED_FUNCTIONS, &Tolerance, &BackwardTolerance}, m);
  return m;
}

// A of trained models: -1 to -16.
double Rate(Random& random) { return -std::exp(random.Uniform(0, 2.77)); }

class Maker : public mechanism::Maker {
 public:
  Maker(const mechanism::Mechanism& m, bool softplus, DType dtype, uint64_t seed)
      : mechanism::Maker(m, dtype, seed), softplus_(softplus) {}

 private:
  void DrawSizes() override {
    sizes_.G = Integer(1, 2);
    sizes_.H = sizes_.G * random_.Pick<int64_t>({1, 1, 2, 3});
    sizes_.N = Channels();
    sizes_.P = Channels();
    // Gradients of constants are sums over all tokens, which can overflow f16.
    constants_ = dtype_ == DType::kF16 || Chance(0.5) ? wide() : dtype_;
  }
  ConstTensorView DrawInput(const Row& row) override {
    if (row.optional && Chance(0.5)) return {};
    using enum mechanism::Values;
    const std::string axes = row.name == "D" ? (Chance(0.5) ? "HP" : "H") : row.axes;
    if (row.over_tokens() && row.values == kNormal) return Normal(ShapeOf(axes));
    if (row.values == kSteps) {
      const double center = random_.Uniform(-6, 1);
      const Buffer steps = AnyLayout(Chance(0.5) ? dtype_ : wide(), ShapeOf(axes));
      return Keep(FillEach(steps, NextSeed(), [&](Random& random) {
        const double x = center + random.Normal();
        return softplus_ ? x : std::exp(x);
      }));
    }
    const Buffer buffer(constants_, ShapeOf(axes));
    const bool extreme = row.values == kRates && Chance(0.1);
    if (row.values == kNormal) return Keep(buffer.FillNormal(NextSeed()));
    return Keep(FillEach(buffer, NextSeed(), [&](Random& random) {
      if (row.values == kStepBiases) return softplus_ ? random.Normal() : random.Uniform(0, 0.2);
      return extreme && random.Chance(0.3) ? -1e4 : Rate(random) * 0.3;
    }));
  }
  void DrawOptions() override {
    if (Chance(0.2)) p_.options.scale = random_.Uniform(0.1, 1.5);
  }

  void SetSizes(const Sizes& s) override {
    sizes_.G = s.Hkv;
    sizes_.H = s.Hq;
    sizes_.N = s.D;
    sizes_.P = s.Dv;
  }
  ConstTensorView MakeInput(const Row& row) override {
    if ((row.name == "D" && !words_.Has("skip")) || (row.name == "z" && !words_.Has("gate"))) return {};
    const Shape shape = ShapeOf(row.name == "D" ? "H" : row.axes);
    const Buffer buffer(row.over_tokens() ? dtype_ : wide(), shape, Placement::kAligned);
    if (row.values == mechanism::kRates) return Keep(FillEach(buffer, NextSeed(), &Rate));
    if (row.values == mechanism::kStepBiases) return Keep(buffer.FillConstant(-4));
    return Keep(buffer.FillNormal(NextSeed()));
  }
  double Flops(int64_t tokens, bool backward) override {
    return (backward ? 12 : 4) * static_cast<double>(sizes_.B * tokens * sizes_.H * sizes_.N * sizes_.P);
  }

  bool softplus_;
  DType constants_ = DType::kF32;
};

mechanism::Mechanism AsItIs(const mechanism::Mechanism& m) { return m; }
Case MakeCase(const CaseRequest& request) { return MakeCaseOf(&AsItIs, request); }
Case RandomCase(DType dtype, uint64_t seed) { return RandomCaseOf(&AsItIs, dtype, seed); }

}  // namespace

Case MakeCaseOf(const Moving& moved, const CaseRequest& request) {
  Options options;
  options.dt_softplus = true;
  return Maker(moved(MechanismOf(options)), true, request.dtype, request.seed).MakeCase(request);
}

Case RandomCaseOf(const Moving& moved, DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  options.dt_softplus = random.Chance(0.7);
  if (random.Chance(0.3)) options.dt_min = random.Uniform(0, 0.05);
  if (random.Chance(0.3)) options.dt_max = random.Uniform(0.06, 0.5);
  return Maker(moved(MechanismOf(options)), options.dt_softplus, dtype, seed).RandomCase();
}

OpEntry Entry() {
  std::vector<std::string> variants = recurrent::kVariants;
  variants.insert(variants.end(), {"skip", "gate"});
  OpEntry entry = mechanism::EntryOf({.family = "ssm",
                                      .variants = variants,
                                      .flops = "4 D Dv per token and value head, backward 12 D Dv",
                                      .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
                                      .state = "B Hq D Dv 4",
                                      .make_case = &MakeCase,
                                      .random_case = &RandomCase},
                                     MechanismOf({}));
  entry.inputs[5].axes = "H";  // the form of D in checkpoints
  return entry;
}

}  // namespace heed::ssd
