// attention::Reference: the equations of attention.h in double, one line each.
//
// Scalar, one thread, two passes over the keys of a row. It shares no code with
// the kernels and is to be read beside the header; speed is no concern.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <vector>

#include "heed/core/philox.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"
#include "heed/patterns/pattern_internal.h"

namespace heed::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Offset of an element of `view`, whose axes are the last ones of `index`; an
// axis of size 1 repeats. The other axes of `index` must be left out by
// broadcasting (mask, bias, slopes) or be 0 (packed tensors).
int64_t Offset(const ConstTensorView& view, std::initializer_list<int64_t> index) {
  const int64_t* last = index.end() - view.rank();
  int64_t offset = 0;
  for (int axis = 0; axis < view.rank(); ++axis) {
    if (view.size(axis) != 1) offset += last[axis] * view.stride(axis);
  }
  return offset;
}

double Load(const ConstTensorView& view, std::initializer_list<int64_t> index) {
  return LoadAsDouble(view.dtype(), view.data(), Offset(view, index));
}

int64_t LoadInt(const ConstTensorView& view, std::initializer_list<int64_t> index) {
  return LoadAsInt64(view.dtype(), view.data(), Offset(view, index));
}

void Store(const TensorView& view, std::initializer_list<int64_t> index, double value) {
  StoreDouble(view.dtype(), view.data(), Offset(view, index), value);
}

// Quotient rounded down; C++ rounds towards zero.
int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b != 0 && a < 0 ? 1 : 0); }

// The rows of a sequence. Not packed: batch index b, rows from 0. Packed: batch index 0, and rows from cu_seqlens.
struct Sequence {
  int64_t b = 0;                // number of the sequence
  int64_t batch = 0;            // index of axis 0 of the tensors
  int64_t q_begin = 0, Tq = 0;  // rows of q, o and lse
  int64_t k_begin = 0, Tk = 0;  // rows of k and v
  PatternCall call = {};        // for patterns
};

std::vector<Sequence> Sequences(const Inputs& in, const Options& options) {
  const int rows = in.q.rank() - 3;  // the axis of tokens
  std::vector<Sequence> sequences;
  if (!options.cu_seqlens_q) {
    for (int64_t b = 0; b < in.q.size(0); ++b) {
      sequences.push_back({b, b, 0, in.q.size(rows), 0, in.k.size(rows)});
    }
    return sequences;
  }
  const ConstTensorView& cu_q = options.cu_seqlens_q;
  const ConstTensorView& cu_k = options.cu_seqlens_k ? options.cu_seqlens_k : cu_q;
  for (int64_t b = 0; b + 1 < cu_q.size(0); ++b) {
    const int64_t q = LoadInt(cu_q, {b}), k = LoadInt(cu_k, {b});
    sequences.push_back({b, 0, q, LoadInt(cu_q, {b + 1}) - q, k, LoadInt(cu_k, {b + 1}) - k});
  }
  return sequences;
}

// p_0: the position of a sequence's first query.
int64_t Start(const Options& options, const Sequence& seq) {
  if (options.query_starts) return LoadInt(options.query_starts, {seq.b});
  return options.align == Align::kBottomRight ? seq.Tk - seq.Tq : 0;
}

// keep_ij for the query i at position p of head h. A bias of -inf is a mask.
bool Keep(const Options& options, const Sequence& seq, int64_t h, int64_t i, int64_t p, int64_t j) {
  const int64_t b = seq.b;
  const int64_t s = options.key_starts ? LoadInt(options.key_starts, {b}) : 0;
  const int64_t n = options.key_lengths ? LoadInt(options.key_lengths, {b}) : seq.Tk;
  if (j < s || j >= n) return false;

  if (options.segments_q) {
    const int64_t id = LoadInt(options.segments_q, {b, i});
    if (id < 0 || id != LoadInt(options.segments_k, {b, j})) return false;
  }
  if (options.pattern.present()) {
    if (!patterns::Keeps(options.pattern, seq.call, 0, h, i, j)) return false;
  }
  if (options.mask && LoadInt(options.mask, {b, h, i, j}) == 0) return false;
  if (options.bias && Load(options.bias, {b, h, i, j}) == -kInfinity) {
    return false;
  }
  if (options.relative_bias && p >= j && p - j < options.relative_bias.size(1) &&
      Load(options.relative_bias, {h, p - j}) == -kInfinity) {
    return false;
  }
  if (options.causal && j > p) {
    const int64_t prefix = options.prefix ? LoadInt(options.prefix, {b}) : 0;
    if (j - s >= prefix) return false;
  }
  const auto [left, right] = options.window;
  const bool inside = (left < 0 || p - j <= left) && (right < 0 || j - p <= right);
  if (!inside && j - s >= options.sink_tokens) return false;

  return options.chunk == 0 || FloorDivide(j - s, options.chunk) == FloorDivide(p - s, options.chunk);
}

// The last valid key at or before position p.
int64_t StandsAt(const Options& options, const Sequence& seq, int64_t p) {
  const int64_t end = options.key_lengths ? LoadInt(options.key_lengths, {seq.b}) : seq.Tk;
  return std::min(p, end - 1);
}

// F_ij of a row at position p for each key, summed from the row backwards.
std::vector<double> Forgotten(const Options& options, const Sequence& seq, int64_t h, int64_t p) {
  std::vector<double> forgotten(static_cast<size_t>(seq.Tk), 0.0);
  if (!options.log_decay) return forgotten;
  const int64_t begin = options.key_starts ? LoadInt(options.key_starts, {seq.b}) : 0;
  for (int64_t j = StandsAt(options, seq, p) - 1; j >= begin; --j) {
    forgotten[static_cast<size_t>(j)] =
        forgotten[static_cast<size_t>(j + 1)] + Load(options.log_decay, {seq.batch, seq.k_begin + j + 1, h});
  }
  return forgotten;
}

// Z_ij, the dropout keep bit.
bool Survives(const Options& options, int64_t b, int64_t h, int64_t heads, int64_t p, int64_t j) {
  if (options.dropout == 0) return true;
  const std::array<uint32_t, 4> words =
      Philox({static_cast<uint32_t>(j >> 2), static_cast<uint32_t>(p), static_cast<uint32_t>(b * heads + h),
              options.dropout_offset},
             {static_cast<uint32_t>(options.seed), static_cast<uint32_t>(options.seed >> 32)});
  return words[static_cast<size_t>(j & 3)] < std::round((1 - options.dropout) * 0x1p32);
}

// Rows [begin, begin + count) of one head as doubles, one after the other.
std::vector<double> Widen(const ConstTensorView& view, int64_t batch, int64_t begin, int64_t count, int64_t head) {
  const int64_t channels = view.size(view.rank() - 1);
  std::vector<double> rows;
  rows.reserve(static_cast<size_t>(count * channels));
  for (int64_t t = begin; t < begin + count; ++t) {
    for (int64_t d = 0; d < channels; ++d) {
      rows.push_back(Load(view, {batch, t, head, d}));
    }
  }
  return rows;
}

// <q, k>, with the sum of the magnitudes of its terms and the sum of squares of terms and partial sums, both scaled.
struct DotProduct {
  double dot = 0, magnitude = 0, squares = 0;
};

// Not inlined, so that its sums stay in registers: this is half of the cost of a row.
[[gnu::noinline]] DotProduct Product(const double* q, const double* k, int64_t D, double scale) {
  DotProduct sums;
  for (int64_t d = 0; d < D; ++d) {
    const double product = q[d] * k[d];
    sums.dot += product;
    sums.magnitude += std::abs(scale * product);
    sums.squares += scale * scale * (product * product + sums.dot * sums.dot);
  }
  return sums;
}

}  // namespace

void ReferenceRows(const Inputs& in, const Options& options, const Outputs& out,
                   const std::function<void(const ReferenceRow&)>& f) {
  const int rank = in.q.rank();
  const int64_t heads = in.q.size(rank - 2), D = in.q.size(rank - 1);
  const int64_t group = heads / std::max<int64_t>(in.k.size(rank - 2), 1);
  const int64_t Dv = in.v.size(rank - 1);
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  const double cap = options.softcap;

  // Fills rows beyond the last packed sequence, which the loop below does not write.
  for (int64_t b = 0; b < (rank == 4 ? in.q.size(0) : 1); ++b) {
    for (int64_t t = 0; t < in.q.size(rank - 3); ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < Dv; ++d) Store(out.o, {b, t, h, d}, 0);
        if (out.lse) Store(out.lse, {b, h, t}, -kInfinity);
      }
    }
  }

  std::vector<Sequence> sequences = Sequences(in, options);
  for (Sequence& seq : sequences) {
    seq.call = {seq.Tq, seq.Tk, heads, in.k.size(rank - 2), {Start(options, seq)}, seq.b, std::ssize(sequences)};
    const int64_t b = seq.b, start = Start(options, seq);
    const int64_t queries = options.query_lengths ? LoadInt(options.query_lengths, {b}) : seq.Tq;
    for (int64_t h = 0; h < heads; ++h) {
      const auto q = Widen(in.q, seq.batch, seq.q_begin, seq.Tq, h);
      const auto k = Widen(in.k, seq.batch, seq.k_begin, seq.Tk, h / group);
      const auto v = Widen(in.v, seq.batch, seq.k_begin, seq.Tk, h / group);

      for (int64_t i = 0; i < std::min(seq.Tq, queries); ++i) {
        const int64_t p = start + i;

        const std::vector<double> forgotten = Forgotten(options, seq, h, p);

        // The logits of the row, and the largest.
        std::vector<ReferencePair> pairs;
        double greatest = -kInfinity;
        for (int64_t j = 0; j < seq.Tk; ++j) {
          if (!Keep(options, seq, h, i, p, j)) continue;
          auto [dot, magnitude, squares] = Product(q.data() + i * D, k.data() + j * D, D, scale);
          double s = scale * dot, slope = 1;
          if (cap > 0) {
            if (std::isinf(s)) {  // infinite and exact
              magnitude = cap;
              squares = 0;
            }
            const double tanh = std::tanh(s / cap);
            s = cap * tanh;
            slope = 1 - tanh * tanh;
          }
          const double distance = std::abs(static_cast<double>(p - j));
          if (options.alibi) {
            const double alibi = -Load(options.alibi, {b, h}) * distance;
            s += alibi;
            magnitude += std::abs(alibi);
          }
          if (options.relative_bias && p >= j && p - j < options.relative_bias.size(1)) {
            const double bias = Load(options.relative_bias, {h, p - j});
            s += bias;
            magnitude += std::abs(bias);
          }
          const double decay = forgotten[static_cast<size_t>(j)];
          if (decay == -kInfinity) continue;  // masked
          s += decay;
          magnitude += std::abs(decay);
          if (options.bias) {
            const double bias = Load(options.bias, {b, h, i, j});
            s += bias;
            magnitude += std::abs(bias);
          }
          if (s == -kInfinity) continue;  // masked
          greatest = std::max(greatest, s);
          pairs.push_back({j, s, magnitude, std::sqrt(squares), slope, distance, p - j, decay, k.data() + j * D,
                           v.data() + j * Dv});
        }

        // lse = log sum exp(s), o = w sum P Z v / (1 - dropout). A logit that is NaN or +inf makes the sum NaN and with
        // it the row. P is not computed from lse, because lse loses log(sum) if all logits are about finfo.min.
        double sum = 0;
        for (const ReferencePair& pair : pairs) {
          sum += std::exp(pair.logit - greatest);
        }
        const double lse = pairs.empty() ? -kInfinity : greatest + std::log(sum);
        double w = 1, sink_probability = 0;
        if (options.sinks && !pairs.empty()) {
          const double excess = Load(options.sinks, {h}) - lse;
          w = 1 / (1 + std::exp(excess));
          sink_probability = 1 / (1 + std::exp(-excess));
        }
        std::vector<double> o(static_cast<size_t>(Dv), 0.0);
        for (ReferencePair& pair : pairs) {
          pair.probability = std::exp(pair.logit - greatest) / sum;
          const double Z = Survives(options, b, h, heads, p, pair.key) ? 1 : 0;
          pair.weight = w * pair.probability * Z / (1 - options.dropout);
          for (size_t d = 0; d < o.size(); ++d) o[d] += pair.weight * pair.v[d];
        }

        const int64_t row = seq.q_begin + i;
        for (int64_t d = 0; d < Dv; ++d) {
          Store(out.o, {seq.batch, row, h, d}, o[static_cast<size_t>(d)]);
        }
        if (out.lse) Store(out.lse, {seq.batch, h, row}, lse);
        if (f) {
          f({b, h, i, row, seq.k_begin, StandsAt(options, seq, p), lse, w, sink_probability, q.data() + i * D, pairs});
        }
      }
    }
  }
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  CheckedProblem("attention::Reference", in, options, out, Use::kReference);
  ReferenceRows(in, options, out, nullptr);
}

}  // namespace heed::attention
