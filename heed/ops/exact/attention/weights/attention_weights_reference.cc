// WeightsReference and MapReference: P from the reference's logits, in double.
#include <cmath>
#include <limits>
#include <vector>

#include "heed/ops/exact/attention/attention_reference_internal.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"

namespace heed::attention {
namespace {

// An element of lse [B, Hq, Tq], or packed [Hq, Tq_total].
double LseOf(const ConstTensorView& lse, const ReferenceRow& row) {
  const int64_t offset = lse.rank() == 2
                             ? row.head * lse.stride(0) + row.output_row * lse.stride(1)
                             : row.sequence * lse.stride(0) + row.head * lse.stride(1) + row.query * lse.stride(2);
  return LoadAsDouble(lse.dtype(), lse.data(), offset);
}

// Calls f(b, head, query, key, P, g Z) for every kept pair, with the factor of dropout.
template <class F>
void ForEachWeight(const WeightsInputs& in, const Options& options, const F& f) {
  // The reference needs values and outputs.
  const std::vector<int64_t> sizes(in.q.sizes().begin(), in.q.sizes().end());
  std::vector<double> o(static_cast<size_t>(in.q.num_elements()));
  const Outputs unused = {TensorView(o.data(), DType::kF64, sizes), {}};
  ReferenceRows({in.q, in.k, in.k}, options, unused, [&](const ReferenceRow& row) {
    double lse = row.lse;
    if (in.lse) lse = LseOf(in.lse, row);
    double sink = -std::numeric_limits<double>::infinity();
    if (options.sinks) {
      sink = LoadAsDouble(options.sinks.dtype(), options.sinks.data(), row.head * options.sinks.stride(0));
    }
    const double w = 1 / (1 + std::exp(sink - lse));
    for (const ReferencePair& pair : row.pairs) {
      const double kept = pair.weight == 0 ? 0 : 1 / (1 - options.dropout);
      f(row.sequence, row.head, row.query, pair.key, w * std::exp(pair.logit - lse), kept);
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
  ForEachWeight(in, options, [&](int64_t b, int64_t h, int64_t i, int64_t j, double P, double /*kept*/) {
    for (size_t x = 0; x < heads.size(); ++x) {
      for (size_t y = 0; heads[x] == h && y < rows.size(); ++y) {
        if (rows[y] != i) continue;
        out.as<double>()[b * out.stride(0) + static_cast<int64_t>(x) * out.stride(1) +
                         static_cast<int64_t>(y) * out.stride(2) + j * out.stride(3)] = P;
      }
    }
  });
}

void TileOfWeightsReference(const WeightsInputs& in, const Options& options, const Tile& tile, const TensorView& out) {
  SetZero(TensorView(out.data(), DType::kF64, {1, out.size(0), out.size(1), out.size(2)},
                     {0, out.stride(0), out.stride(1), out.stride(2)}));
  ForEachWeight(in, options, [&](int64_t b, int64_t h, int64_t i, int64_t j, double P, double kept) {
    const int64_t head = h - tile.first_head, row = i - tile.first_row, key = j - tile.first_key;
    if (b != tile.sequence || head < 0 || head >= out.size(0) || row < 0 || row >= out.size(1) || key < 0 ||
        key >= out.size(2))
      return;
    out.as<double>()[head * out.stride(0) + row * out.stride(1) + key * out.stride(2)] = tile.dropout ? P * kept : P;
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
  ForEachWeight(in, options, [&](int64_t b, int64_t h, int64_t i, int64_t j, double P, double /*kept*/) {
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
