// The long convolution in the harness.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heed/engines/scan/convolution.h"
#include "heed/ops/parts/scanning_case.h"
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"
#include "heed/ops/ssm/long_convolution/long_convolution_reference_internal.h"

namespace heed::long_convolution {
namespace {

using parts::Put;
using scanning::Epsilon;
using scanning::EpsilonOf;
using scanning::Stored;

Doubles Magnitudes(Doubles x) {
  for (double& value : x) value = std::abs(value);
  return x;
}

double Norm(const Doubles& x, size_t begin, size_t end) {
  double sum = 0;
  for (size_t i = begin; i < std::min(end, x.size()); ++i) sum += x[i] * x[i];
  return std::sqrt(sum);
}

// The elements of a block of this channel; 0: directly.
size_t LengthOf(const Inputs& in, const ReferenceChannel& c) {
  return static_cast<size_t>(
      scan::TransformLength(in.kernel.size(1), static_cast<int64_t>(c.T())));
}

// What fourier.h derives, over the product of norms.
double TransformError(size_t n, double u) {
  return 13 * (std::log2(static_cast<double>(n)) + 4) * u;
}

// Of a convolution of x with the taps and D x: chains of sums, or blocks that see two blocks. What is
// read from its end is completed by zeros before it.
Doubles ErrorsOf(const Inputs& in, const ReferenceChannel& c, const Doubles& x, bool from_end,
                 double u) {
  const size_t n = LengthOf(in, c);
  Doubles errors(c.T());
  if (n == 0) {
    const Doubles sizes = Convolved(Magnitudes(c.taps), Magnitudes(x), c.T());
    for (size_t t = 0; t < c.T(); ++t) {
      const double size = sizes[t] + std::abs(c.D * x[t]);
      errors[t] = (static_cast<double>(c.taps.size()) + 2) * u * size;
    }
    return errors;
  }
  // Taps beyond the sequence stand in its spectrum too.
  Doubles taps = c.taps;
  for (auto s = static_cast<int64_t>(taps.size());
       s < std::min<int64_t>(in.kernel.size(1), static_cast<int64_t>(n)); ++s) {
    taps.push_back(parts::At(in.kernel, {c.place.channel, s}));
  }
  const double of_taps = Norm(taps, 0, taps.size());
  const size_t zeros = from_end ? (n - c.T() % n) % n : 0;
  for (size_t t = 0; t < c.T(); ++t) {
    const size_t block = (t + zeros) / n * n;
    const double of_x = Norm(x, block < n + zeros ? 0 : block - n - zeros, block + n - zeros);
    const double error = TransformError(n, u) * of_taps * of_x;
    errors[t] = error + 4 * u * (of_taps * of_x + std::abs(c.D * x[t]));
  }
  return errors;
}

void Tolerance(const Inputs& in, const Options& options, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  parts::Clear(tolerance.o);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const Doubles sums = Convolved(c.taps, c.u, c.T()), errors = ErrorsOf(in, c, c.u, false, e.unit);
    for (size_t t = 0; t < c.T(); ++t) {
      Put(tolerance.o, {c.place.batch, c.place.channel, c.place.tokens[t]},
          Stored(sums[t] + c.D * c.u[t], errors[t], e));
    }
  });
}

// Of the gradients of taps: chunks of 128 products, or as many blocks' as one transform adds up.
Doubles TapErrors(const Inputs& in, const ReferenceChannel& c, const Doubles& dy, double u) {
  const size_t n = LengthOf(in, c), T = c.T();
  Doubles errors(c.taps.size());
  if (n == 0) {
    const Doubles sizes = Convolved(Magnitudes(FromItsEnd(dy)), Magnitudes(c.u), T);
    const double of_sums = in.u.dtype() == DType::kF64 ? static_cast<double>(T) / 128 : 1;
    for (size_t s = 0; s < errors.size(); ++s) {
      errors[s] = (131 + of_sums) * u * sizes[T - 1 - s];
    }
    return errors;
  }
  double error = 0;
  for (size_t begin = 0; begin < T; begin += n) {  // each block of u with two of dy
    const double of_dy = Norm(dy, begin, begin + 2 * n), of_u = Norm(c.u, begin, begin + n);
    error += (TransformError(n, u) + (scan::kBlocksPerSum + 2) * u) * of_dy * of_u;
  }
  std::fill(errors.begin(), errors.end(), error);
  return errors;
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  for (const TensorView* t : {&tolerance.du, &tolerance.dkernel, &tolerance.dD}) parts::Clear(*t);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const int64_t d = c.place.channel;
    const Doubles dy = IncomingOf(in, c);
    const Doubles back = FromItsEnd(dy), sums = Convolved(c.taps, back, c.T());
    const Doubles errors = ErrorsOf(in, c, back, true, e.unit),
                  of_taps = TapErrors(in, c, dy, e.unit);
    for (size_t t = 0; t < c.T(); ++t) {
      const size_t r = c.T() - 1 - t;
      Put(tolerance.du, {c.place.batch, d, c.place.tokens[t]},
          Stored(sums[r] + c.D * dy[t], errors[r], e));
      parts::Add(tolerance.dD, {d}, 132 * e.unit * std::abs(dy[t] * c.u[t]) + e.least);
    }
    for (size_t s = 0; s < of_taps.size(); ++s) {
      parts::Add(tolerance.dkernel, {d, static_cast<int64_t>(s)}, of_taps[s] + e.least);
    }
  });
  scanning::RoundSums(in.kernel, expected.dkernel, tolerance.dkernel);
  scanning::RoundSums(in.D, expected.dD, tolerance.dD);
}

scanning::Mechanism MechanismOf() {
  return scanning::Bound<Options>("long_convolution", DefinitionOf({}), {},
                                  {&Forward, &Backward, &Reference, &BackwardReference, nullptr,
                                   &Tolerance, &BackwardTolerance});
}

// D = Hq D channels, T = Tq tokens and taps.
Case MakeCase(const CaseRequest& request) {
  scanning::Choice choice;
  const std::string words = "+" + request.variant + "+";
  if (const size_t at = words.find("+taps="); at != std::string::npos) {
    choice.taps = std::stoll(words.substr(at + 6));
  }
  return scanning::MakeCase(MechanismOf(), request, choice);
}

Case RandomCase(DType dtype, uint64_t seed) {
  return scanning::RandomCase(MechanismOf(), dtype, seed);
}

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  return scanning::CallOn(MechanismOf(), ctx, tensors, scale);
}

}  // namespace

OpEntry Entry() {
  return {.name = "long_convolution",
          .family = "ssm",
          .passes = {"forward", "backward"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = {"taps=7", "taps=100", "lengths=62", "reverse", "strided"},
          .flops = "15 (log2 Tq + 2) per token and channel, backward 25 (log2 Tq + 2); Hq D channels",
          .bytes = "(2 B + 1) Tq Hq D size",
          .state = "none",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = scanning::InputsOf(DefinitionOf({})),
          .call = &CallOn};
}

}  // namespace heed::long_convolution
