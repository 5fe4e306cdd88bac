// A user of the installed library: computes attention, checks it, and catches an error thrown inside the library.
#include <cmath>
#include <cstdio>
#include <vector>

#include "heed/heed.h"

namespace {

// Largest difference between Forward and Reference on a small causal problem.
double MaxError() {
  constexpr int64_t B = 2, T = 19, H = 4, D = 24;
  std::vector<float> q(B * T * H * D), k(q.size()), v(q.size()), o(q.size());
  std::vector<double> expected(q.size());
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<float>(std::sin(0.37 * static_cast<double>(i)));
    k[i] = static_cast<float>(std::cos(0.11 * static_cast<double>(i)));
    v[i] = static_cast<float>(std::sin(1.7 * static_cast<double>(i)));
  }
  using heed::DType;
  const heed::attention::Inputs in{{q.data(), DType::kF32, {B, T, H, D}},
                                   {k.data(), DType::kF32, {B, T, H, D}},
                                   {v.data(), DType::kF32, {B, T, H, D}}};
  heed::attention::Options options;
  options.causal = true;

  heed::Context ctx(2);
  heed::attention::Forward(ctx, in, options, {{o.data(), DType::kF32, {B, T, H, D}}, {}});
  heed::attention::Reference(in, options, {{expected.data(), DType::kF64, {B, T, H, D}}, {}});
  std::printf("kernel %s\n", heed::attention::Explain(ctx, in, options).kernel.c_str());

  // The last token again, from a cache.
  heed::KVCache cache({.batch = B, .heads = H, .dim = D});
  cache.Append(in.k, in.v);
  heed::KVView view = cache.view();
  const std::vector<int64_t> one(B, 1);
  view.appended = one;
  std::vector<float> last(B * H * D);
  heed::attention::Attend(ctx, view, in.q.Slice(1, T - 1, T), options, {{last.data(), DType::kF32, {B, 1, H, D}}, {}});

  double worst = 0;
  for (size_t i = 0; i < last.size(); ++i) {
    const size_t at = (i / (H * D) * T + T - 1) * H * D + i % (H * D);
    worst = std::fmax(worst, std::fabs(last[i] - o[at]));
  }
  for (size_t i = 0; i < o.size(); ++i) {
    worst = std::fmax(worst, std::fabs(o[i] - expected[i]));
  }
  return worst;
}

bool ErrorsCrossTheLibraryBoundary() {
  try {
    heed::AlibiSlopes(0);
  } catch (const heed::InvalidArgument& e) {
    std::printf("expected: %s\n", e.what());
    return true;
  }
  return false;
}

}  // namespace

int main() {
  const double error = MaxError();
  std::printf("max error %g\n", error);
  return error < 1e-5 && ErrorsCrossTheLibraryBoundary() ? 0 : 1;
}
