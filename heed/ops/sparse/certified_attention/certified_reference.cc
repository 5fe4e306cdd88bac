// certified_attention::Reference: attention over marked blocks and the mass of the others, in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "heed/ops/mechanism/check_internal.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"

namespace heed::certified_attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double At(const ConstTensorView& t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return LoadAsDouble(t.dtype(), t.data(), a * t.stride(0) + b * t.stride(1) + c * t.stride(2) + d * t.stride(3));
}

int64_t IntOr(const ConstTensorView& t, int64_t b, int64_t absent) {
  return t.present() ? LoadAsInt64(t.dtype(), t.data(), b * t.stride(0)) : absent;
}

void Put(const TensorView& t, int64_t b, int64_t h, int64_t i, double x) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), b * t.stride(0) + h * t.stride(1) + i * t.stride(2), x);
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const ConstTensorView& kept, const Outputs& out) {
  constexpr char kOp[] = "certified_attention::Reference";
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}, {"kept", kept}}) {
    mechanism::CheckReadable(kOp, name, view);
  }
  const int64_t B = in.q.size(0), Tq = in.q.size(1), Hq = in.q.size(2), D = in.q.size(3), Tk = in.k.size(1);
  const int64_t Dv = in.v.size(3), group = Hq / in.k.size(2);
  const int64_t kept_heads = options.level == Level::kSkip ? Hq : in.k.size(2);
  const mechanism::Axes marks = {B, kept_heads, Tq, (Tk + 63) / 64};
  mechanism::CheckTensor(kOp, "kept", kept, marks, DType::kBool, true);
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  for (int64_t b = 0; b < B; ++b) {
    const int64_t aligned = options.align == attention::Align::kTopLeft ? 0 : Tk - Tq;
    const int64_t start = IntOr(options.query_starts, b, aligned);
    const int64_t keys = IntOr(options.key_lengths, b, Tk), rows = IntOr(options.query_lengths, b, Tq);
    for (int64_t h = 0; h < Hq; ++h) {
      for (int64_t i = 0; i < Tq; ++i) {
        std::vector<double> s(static_cast<size_t>(i < rows ? keys : 0), -kInfinity);
        double most = -kInfinity;
        for (int64_t j = 0; j < std::ssize(s); ++j) {
          if (options.causal && j > start + i) continue;
          double sum = 0;
          for (int64_t e = 0; e < D; ++e) sum += At(in.q, b, i, h, e) * At(in.k, b, j, h / group, e);
          double& logit = s[static_cast<size_t>(j)] = scale * sum;
          most = std::isnan(logit) || logit > most ? logit : most;
        }
        double of_kept = 0, of_others = 0;
        std::vector<double> o(static_cast<size_t>(Dv));
        for (int64_t j = 0; j < std::ssize(s); ++j) {
          const double logit = s[static_cast<size_t>(j)];
          if (logit == -kInfinity) continue;
          const double weight = std::exp(logit - most);
          const int64_t mark = b * kept.stride(0) + h * kept_heads / Hq * kept.stride(1) + i * kept.stride(2) + j / 64 * kept.stride(3);
          if (!kept.as<bool>()[mark]) {
            of_others += weight;
            continue;
          }
          of_kept += weight;
          for (int64_t e = 0; e < Dv; ++e) o[static_cast<size_t>(e)] += weight * At(in.v, b, j, h / group, e);
        }
        const bool sees = of_kept != 0;  // a NaN is seen
        for (int64_t e = 0; e < Dv; ++e) {
          const TensorView& t = out.o;
          if (!t.present()) break;
          StoreDouble(t.dtype(), t.data(), b * t.stride(0) + i * t.stride(1) + h * t.stride(2) + e * t.stride(3),
                      sees ? o[static_cast<size_t>(e)] / of_kept : 0);
        }
        Put(out.bound, b, h, i, of_kept + of_others != 0 ? of_others / (of_kept + of_others) : 0);
        Put(out.lse, b, h, i, sees ? most + std::log(of_kept) : -kInfinity);
      }
    }
  }
}

}  // namespace heed::certified_attention
