// Reference of SSD, in double: time steps and gates written out; the recurrence is that of the shared reference.
//
// Tolerances are those of the recurrence plus the errors of this file's computations: a time step is a sum, a softplus
// and a product, with an error of a few u and, where the softplus is an exponential, of u times its argument; skip and
// gate are a sum of two terms and a product.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/ssm/ssd/ssd.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"

namespace heed::ssd {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Clear;
using mechanism::Put;
using mechanism::ReferenceTensor;

template <class View>
View Transposed(const View& t) {
  if (!t.present()) return t;
  return View(t.data(), t.dtype(), {t.size(0), t.size(1), t.size(3), t.size(2)},
              {t.stride(0), t.stride(1), t.stride(3), t.stride(2)});
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

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  Plain plain(in, options);
  Clear(out.o);
  ReferenceTensor y(plain.v.sizes);
  recurrent::Reference(plain.inputs, plain.options, plain.math, {y.view(), {Transposed(out.final.S), {}, {}}});
  plain.ForEach([&](int64_t b, int64_t t, int64_t h) {
    for (int64_t p = 0; p < in.x.size(3); ++p) {
      double value = At(y.view(), {b, t, h, p}) + plain.D(h, p) * At(in.x, {b, t, h, p});
      if (in.z.present()) {
        const double z = At(in.z, {b, t, h, p});
        value *= z * Sigmoid(z);
      }
      Put(out.o, {b, t, h, p}, value);
    }
  });
}

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

namespace {

// Computes the backward pass or, with `tolerance`, also its errors.
void RunBackward(const BackwardInputs& in, const Options& options, const Gradients& out, const Gradients* tolerance) {
  Plain plain(in, options);
  const auto e = recurrent::EpsilonOf(in.x.dtype());
  const double u = Unit(in);
  const bool errors = tolerance != nullptr;
  ReferenceTensor y_error(plain.v.sizes), dy(plain.v.sizes);
  ReferenceTensor y = in.z.present() ? plain.Y(errors ? &y_error : nullptr) : ReferenceTensor(plain.v.sizes);
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

  ReferenceTensor dv(plain.v.sizes), dg(plain.delta.sizes), dv_error(dv), dg_error(dg);
  recurrent::ReferenceGradients gradients;
  gradients.q = out.C;
  gradients.k = out.B;
  gradients.v = dv.view();
  gradients.log_decay = dg.view();
  gradients.initial.S = Transposed(out.initial.S);
  recurrent::BackwardReference(plain.inputs, plain.options, plain.math, gradients);
  const auto round = [&](const TensorView& to, mechanism::Index index, double error, double value, DType dtype) {
    const auto of = recurrent::EpsilonOf(dtype);
    Put(to, index, error + std::abs(value) * of.output + of.subnormal);
  };
  if (errors) {
    recurrent::ReferenceGradients allowed;
    allowed.q = tolerance->C;
    allowed.k = tolerance->B;
    allowed.v = dv_error.view();
    allowed.log_decay = dg_error.view();
    allowed.initial.S = Transposed(tolerance->initial.S);
    recurrent::BackwardTolerance(plain.inputs, plain.options, plain.math, gradients, allowed);
    // dB and dC are rounded to x's dtype, which the widened copies do not show.
    const std::pair<TensorView, TensorView> rounded[] = {{tolerance->B, out.B}, {tolerance->C, out.C}};
    for (const auto& [allowed_view, value] : rounded) {
      for (int64_t i = 0; value.present() && i < value.num_elements(); ++i) {
        allowed_view.as<double>()[i] += std::abs(value.as<double>()[i]) * e.output + e.subnormal;
      }
    }
  }

  const Gradients& to = errors ? *tolerance : out;
  for (const TensorView* t : {&to.x, &to.dt, &to.A, &to.D, &to.z, &to.dt_bias}) {
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
      const double dx = delta * dv_p + D * dy_p;
      const auto add_D = [&](double value) {
        if (to.D.present() && to.D.rank() == 2) return Add(to.D, {h, p}, value);
        Add(to.D, {h}, value);
      };
      if (!errors) {
        Put(to.x, {b, t, h, p}, dx);
        add_D(dy_p * x);
      } else {
        const double off = delta * dv_off + plain.delta_error * std::abs(delta * dv_p) +
                           12 * u * (std::abs(delta * dv_p) + std::abs(D * dy_p));
        round(to.x, {b, t, h, p}, off, dx, in.x.dtype());
        add_D(kSum * u * std::abs(dy_p * x));
      }
      if (!in.z.present()) continue;
      const double z = At(in.z, {b, t, h, p}), s = Sigmoid(z);
      const double d_o = At(in.d_o, {b, t, h, p});
      const double whole = At(y.view(), {b, t, h, p}) + D * x;
      const double silu_slope = s * (1 + z * (1 - s));
      const double dz = d_o * whole * silu_slope;
      if (!errors) {
        Put(to.z, {b, t, h, p}, dz);
      } else {
        const double y_off =
            At(y_error.view(), {b, t, h, p}) + 4 * u * (std::abs(At(y.view(), {b, t, h, p})) + std::abs(D * x));
        const double off =
            std::abs(d_o) * (std::abs(silu_slope) * y_off + 12 * u * std::abs(whole) * s * (1 + std::abs(z)));
        round(to.z, {b, t, h, p}, off, dz, in.x.dtype());
      }
    }
    const double ddt = slope * of_delta;
    if (!errors) {
      Put(to.dt, {b, t, h}, ddt);
      Add(to.A, {h}, delta * g);
      Add(to.dt_bias, {h}, ddt);
    } else {
      double off = slope * (error + kSum * u * magnitude) + plain.delta_error * std::abs(ddt);
      off += At(plain.undecided.view(), {b, t, h}) * magnitude;
      round(to.dt, {b, t, h}, off, ddt, in.dt.dtype());
      Add(to.A, {h}, delta * At(dg_error.view(), {b, t, h}) + (plain.delta_error + u) * std::abs(delta * g));
      Add(to.dt_bias, {h}, off + u * std::abs(ddt));
    }
  });
  if (!errors) return;
  const auto round_sums = [&](const TensorView& allowed, const TensorView& value, const ConstTensorView& of) {
    for (int64_t i = 0; value.present() && i < value.num_elements(); ++i) {
      const auto rounding = recurrent::EpsilonOf(of.dtype());
      const double one = of.dtype() == DType::kF32 ? 0x1p-24 : rounding.output;
      allowed.as<double>()[i] += std::abs(value.as<double>()[i]) * one + rounding.subnormal;
    }
  };
  round_sums(to.A, out.A, in.A);
  round_sums(to.D, out.D, in.D);
  round_sums(to.dt_bias, out.dt_bias, in.dt_bias);
}

}  // namespace

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  RunBackward(in, options, out, nullptr);
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  RunBackward(in, options, expected, &tolerance);
}

}  // namespace heed::ssd
