// certified_attention::Reference: attention over marked blocks, and the probability of the others, in double.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"

namespace heed::certified_attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Offset of element (..., i, j) of a tensor whose first axis may be absent, then [b, ...] or, if packed, none.
int64_t At(const ConstTensorView& t, int64_t b, std::initializer_list<int64_t> last) {
  const auto n = static_cast<int>(last.size());
  int64_t at = t.rank() > n ? b * t.stride(0) : 0;
  for (int axis = 0; axis < n; ++axis) at += last.begin()[axis] * t.stride(t.rank() - n + axis);
  return at;
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const ConstTensorView& kept, const Outputs& out) {
  constexpr char kOp[] = "certified_attention::Reference";
  const attention::Inputs inputs = {in.q, in.k, in.v};
  // The rows of attention over all keys, divided here into kept and dropped keys.
  std::vector<double> all(
      static_cast<size_t>(in.q.num_elements() / in.q.size(in.q.rank() - 1) * in.v.size(in.v.rank() - 1)));
  std::vector<int64_t> sizes(in.q.sizes().begin(), in.q.sizes().end());
  sizes.back() = in.v.size(in.v.rank() - 1);
  const attention::Outputs of_all = {TensorView(all.data(), DType::kF64, sizes), {}};
  attention::CheckedProblem(kOp, inputs, options, of_all, attention::Use::kReference);
  const bool packed = options.cu_seqlens_q.present(), skips = options.level == Level::kSkip;
  const int r = in.q.rank();
  const int64_t Hq = in.q.size(r - 2), Hkv = in.k.size(r - 2), kept_heads = skips ? Hq : Hkv, T = in.q.size(r - 3);
  std::vector<int64_t> marks = {kept_heads, T, (in.k.size(r - 3) + 63) / 64};
  if (!packed) marks.insert(marks.begin(), in.q.size(0));
  mechanism::CheckTensor(kOp, "kept", kept, mechanism::Axes(marks), DType::kBool, true);
  const auto put = [](const TensorView& t, int64_t at, double x) { StoreDouble(t.dtype(), t.data(), at, x); };
  const auto put_row = [&](int64_t b, int64_t h, int64_t row, const std::vector<double>& o, double bound, double lse) {
    for (size_t e = 0; out.o.present() && e < o.size(); ++e)
      put(out.o, At(out.o, b, {row, h, static_cast<int64_t>(e)}), o[e]);
    if (out.bound.present()) put(out.bound, At(out.bound, b, {h, row}), bound);
    if (out.lse.present()) put(out.lse, At(out.lse, b, {h, row}), lse);
  };
  const std::vector<double> zeros(static_cast<size_t>(sizes.back()));
  for (int64_t b = 0; b < (packed ? 1 : in.q.size(0)); ++b) {
    for (int64_t row = 0; row < T * Hq; ++row) put_row(b, row % Hq, row / Hq, zeros, 0, -kInfinity);
  }
  attention::ReferenceRows(inputs, options, of_all, [&](const attention::ReferenceRow& row) {
    const int64_t b = packed ? 0 : row.sequence;
    int64_t origin = 0;  // first key of block 0
    if (skips && options.key_starts.present()) {
      origin = LoadAsInt64(options.key_starts.dtype(), options.key_starts.data(),
                           row.sequence * options.key_starts.stride(0));
    }
    const auto is_kept = [&](const attention::ReferencePair& pair) {
      return kept.as<bool>()[At(kept, b, {row.head * kept_heads / Hq, row.output_row, (pair.key - origin) / 64})];
    };
    double most = -kInfinity, most_kept = -kInfinity;
    for (const attention::ReferencePair& pair : row.pairs) {
      const auto raise = [&](double& x) { x = std::isnan(pair.logit) || pair.logit > x ? pair.logit : x; };
      raise(most);
      if (is_kept(pair)) raise(most_kept);
    }
    double of_kept = 0, of_others = 0, of_lse = 0, sink = 0;
    if (options.sinks.present()) {
      sink = std::exp(LoadAsDouble(options.sinks.dtype(), options.sinks.data(), row.head * options.sinks.stride(0)) -
                      most);
    }
    std::vector<double> o = zeros;
    for (const attention::ReferencePair& pair : row.pairs) {
      const double weight = std::exp(pair.logit - most);
      if (!is_kept(pair)) {
        of_others += weight;
        continue;
      }
      of_kept += weight;
      of_lse += std::exp(pair.logit - most_kept);
      for (size_t e = 0; e < o.size(); ++e) o[e] += weight * pair.v[e];
    }
    const bool keeps = of_lse != 0;  // a NaN is kept
    for (double& x : o) x = keeps ? x / (of_kept + sink) : 0;
    const double sum = of_kept + of_others + sink;  // propagates a NaN
    put_row(b, row.head, row.output_row, o, sum == 0 ? 0 : of_others / sum,
            keeps ? most_kept + std::log(of_lse) : -kInfinity);
  });
}

}  // namespace heed::certified_attention
