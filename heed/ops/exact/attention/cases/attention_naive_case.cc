// The error of plain attention in 16 bits.
#include <algorithm>
#include <cmath>
#include <vector>

#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"

namespace heed::attention {

double PlainBound(const Problem& p) {
  const DType dtype = p.in.q.dtype();
  const auto rounded = [dtype](double x) {
    double bits = 0;  // large enough for any dtype
    StoreDouble(dtype, &bits, 0, x);
    return LoadAsDouble(dtype, &bits, 0);
  };
  const auto Dv = static_cast<size_t>(p.in.v.size(p.in.v.rank() - 1));
  const Buffer o(DType::kF64, p.o.sizes, Placement::kAligned);
  double worst = 0, rounding = 0;
  std::vector<double> exact, naive, weights;
  ReferenceRows(p.in, p.options, {o.view(), {}}, [&](const ReferenceRow& row) {
    // Each probability changes by the factor that its rounded logit brings, before all are normalised again.
    double moved = 0, kept = 0;
    weights.clear();
    for (const ReferencePair& pair : row.pairs) {
      const double P = std::exp(pair.logit - row.lse);
      const double factor = std::exp(rounded(pair.logit) - pair.logit);
      moved += P * factor;
      kept += P;
      weights.push_back(pair.weight * factor);
    }
    exact.assign(Dv, 0);
    naive.assign(Dv, 0);
    for (size_t j = 0; j < weights.size(); ++j) {
      const ReferencePair& pair = row.pairs[j];
      const double weight = rounded(weights[j] * kept / moved);
      for (size_t d = 0; d < Dv; ++d) {
        exact[d] += pair.weight * pair.v[d];
        naive[d] += weight * pair.v[d];
      }
    }
    for (size_t d = 0; d < Dv; ++d) {
      if (!std::isfinite(exact[d])) continue;
      const double error = std::abs(rounded(naive[d]) - exact[d]);
      worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
      rounding = std::max(rounding, std::abs(rounded(exact[d]) - exact[d]));
    }
  });
  return 2 * worst + rounding;
}

}  // namespace heed::attention
