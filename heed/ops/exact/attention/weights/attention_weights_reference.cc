// WeightsReference and MapReference: P from the reference's logits, in double.
#include <cmath>
#include <limits>
#include <vector>

#include "heed/ops/exact/attention/attention_reference_internal.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"

namespace heed::attention {
namespace {

double At(const ConstTensorView& t, int64_t i, int64_t j, int64_t k) {
  return LoadAsDouble(t.dtype(), t.data(), i * t.stride(0) + j * t.stride(1) + k * t.stride(2));
}

// Calls f(b, head, query, key, P) for every kept pair.
template <class F>
void ForEachWeight(const WeightsInputs& in, const Options& options, const F& f) {
  // The reference needs values and outputs.
  const int64_t B = in.q.size(0), Tq = in.q.size(1), H = in.q.size(2), D = in.q.size(3);
  std::vector<double> o(static_cast<size_t>(B * Tq * H * D));
  const Outputs unused = {TensorView(o.data(), DType::kF64, {B, Tq, H, D}), {}};
  ReferenceRows({in.q, in.k, in.k}, options, unused, [&](const ReferenceRow& row) {
    double lse = row.lse;
    if (in.lse) lse = At(in.lse, row.sequence, row.head, row.query);
    double sink = -std::numeric_limits<double>::infinity();
    if (options.sinks) {
      sink = LoadAsDouble(options.sinks.dtype(), options.sinks.data(), row.head * options.sinks.stride(0));
    }
    const double w = 1 / (1 + std::exp(sink - lse));
    for (const ReferencePair& pair : row.pairs) {
      f(row.sequence, row.head, row.query, pair.key, w * std::exp(pair.logit - lse));
    }
  });
}

void SetZero(const TensorView& out) {
  for (int64_t b = 0; b < out.size(0); ++b) {
    for (int64_t h = 0; h < out.size(1); ++h) {
      for (int64_t r = 0; r < out.size(2); ++r) {
        for (int64_t c = 0; c < out.size(3); ++c) {
          out.as<double>()[b * out.stride(0) + h * out.stride(1) + r * out.stride(2) + c * out.stride(3)] = 0;
        }
      }
    }
  }
}

// The values of an index tensor, or 0 to count - 1.
std::vector<int64_t> Indices(const ConstTensorView& t, int64_t count) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < (t ? t.size(0) : count); ++i) {
    all.push_back(t ? LoadAsInt64(t.dtype(), t.data(), i * t.stride(0)) : i);
  }
  return all;
}

}  // namespace

void WeightsReference(const WeightsInputs& in, const Options& options, const WeightsSelection& selection,
                      const TensorView& out) {
  SetZero(out);
  const auto rows = Indices(selection.rows, in.q.size(1));
  const auto heads = Indices(selection.heads, in.q.size(2));
  ForEachWeight(in, options, [&](int64_t b, int64_t h, int64_t i, int64_t j, double P) {
    for (size_t x = 0; x < heads.size(); ++x) {
      for (size_t y = 0; heads[x] == h && y < rows.size(); ++y) {
        if (rows[y] != i) continue;
        out.as<double>()[b * out.stride(0) + static_cast<int64_t>(x) * out.stride(1) +
                         static_cast<int64_t>(y) * out.stride(2) + j * out.stride(3)] = P;
      }
    }
  });
}

void MapReference(const WeightsInputs& in, const Options& options, Reduce reduce, const TensorView& out) {
  SetZero(out);
  const int64_t Tq = in.q.size(1), Tk = in.k.size(1);
  const int64_t r = out.size(2), c = out.size(3);
  // All pairs of a bin, kept or not.
  std::vector<double> rows(static_cast<size_t>(r)), columns(static_cast<size_t>(c));
  for (int64_t i = 0; i < Tq; ++i) ++rows[static_cast<size_t>(i * r / Tq)];
  for (int64_t j = 0; j < Tk; ++j) ++columns[static_cast<size_t>(j * c / Tk)];
  ForEachWeight(in, options, [&](int64_t b, int64_t h, int64_t i, int64_t j, double P) {
    const int64_t y = i * r / Tq, x = j * c / Tk;
    double& bin = out.as<double>()[b * out.stride(0) + h * out.stride(1) + y * out.stride(2) + x * out.stride(3)];
    if (reduce == Reduce::kMean) {
      bin += P / (rows[static_cast<size_t>(y)] * columns[static_cast<size_t>(x)]);
    } else if (P > bin || std::isnan(P)) {
      bin = P;
    }
  });
}

}  // namespace heed::attention
