// compressed_attention::Reference and BackwardReference: each row's keys in one list, and one softmax over it, in
// double.
//
// It shares only the checks with compressed_attention.cc, and is to be read beside the header.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "heed/ops/sparse/compressed_attention/compressed_attention_internal.h"

namespace heed::compressed_attention {
namespace {

int64_t OffsetAt(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  int64_t at = 0;
  for (int axis = 0; axis < t.rank(); ++axis) at += index.begin()[axis] * t.stride(axis);
  return at;
}

double At(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  return LoadAsDouble(t.dtype(), t.data(), OffsetAt(t, index));
}

void Set(const TensorView& t, std::initializer_list<int64_t> index, double value) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), OffsetAt(t, index), value);
}

// Sums in double for a tensor, in its row-major order.
class Sums {
 public:
  explicit Sums(const ConstTensorView& like)
      : like_(like), sums_(static_cast<size_t>(like.present() ? like.num_elements() : 0)) {}

  double& operator()(std::initializer_list<int64_t> index) {
    int64_t at = 0;
    for (int axis = 0; axis < like_.rank(); ++axis) at = at * like_.size(axis) + index.begin()[axis];
    return sums_[static_cast<size_t>(at)];
  }
  void Store(const TensorView& to) const {
    if (!to.present()) return;
    std::vector<int64_t> index(to.sizes().size());
    for (const double sum : sums_) {
      int64_t at = 0;
      for (int axis = 0; axis < to.rank(); ++axis) at += index[static_cast<size_t>(axis)] * to.stride(axis);
      StoreDouble(to.dtype(), to.data(), at, sum);
      for (size_t axis = index.size(); axis-- > 0 && ++index[axis] == to.size(static_cast<int>(axis));) index[axis] = 0;
    }
  }

 private:
  ConstTensorView like_;
  std::vector<double> sums_;
};

// A key that a row sees: a token, or a compressed key.
struct Key {
  bool is_compressed;
  int64_t at;
  double logit = 0, P = 0;  // P is its probability without the sink
};

// A row: the keys that it sees, the log-sum-exp of their logits, the factor of its output, which a sink reduces, and
// the probability of the sink, 1 - w.
struct Row {
  int64_t b, i, h, key_head;
  std::vector<Key> keys;
  double lse, w, of_sink;
};

Row RowOf(const Inputs& in, const Options& options, int64_t b, int64_t i, int64_t h) {
  const DefinedPlace place = PlaceByDefinition(in, options, b, i);
  const int64_t Tk = in.k.size(1), last = in.q.size(1) - 1;
  Row row = {b, i, h, h / (in.q.size(2) / in.k.size(2)), {}, -std::numeric_limits<double>::infinity(), 1, 0};
  for (int64_t j = 0; j < Tk && place.is_valid(); ++j) {
    const int64_t token = place.token + (last - i) - (Tk - 1 - j);  // the last row and key are the same token
    const bool is_near = place.token - options.window < token && token <= place.token;
    if (is_near && place.begin <= token) row.keys.push_back({false, j});
  }
  if (!in.chosen.present()) {
    for (int64_t c = 0; c < place.num_complete(options.ratio); ++c) row.keys.push_back({true, place.first_key + c});
  } else {
    for (int64_t n = 0; n < in.chosen.size(in.chosen.rank() - 1) && place.is_valid(); ++n) {
      const int64_t at =
          in.chosen.rank() == 4 ? OffsetAt(in.chosen, {b, i, row.key_head, n}) : OffsetAt(in.chosen, {b, i, n});
      const int64_t c = LoadAsInt64(in.chosen.dtype(), in.chosen.data(), at);
      if (c >= 0) row.keys.push_back({true, place.first_key + c});
    }
  }
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(in.q.size(3))));
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (Key& key : row.keys) {
    const ConstTensorView& k = key.is_compressed ? in.k_cmp : in.k;
    for (int64_t e = 0; e < in.q.size(3); ++e)
      key.logit += At(in.q, {b, i, h, e}) * At(k, {b, key.at, row.key_head, e});
    key.logit *= scale;
  }
  std::erase_if(row.keys, [](const Key& key) { return key.logit == -std::numeric_limits<double>::infinity(); });
  for (const Key& key : row.keys) largest = std::isnan(key.logit) || key.logit > largest ? key.logit : largest;
  for (const Key& key : row.keys) sum += std::exp(key.logit - largest);
  if (!row.keys.empty()) row.lse = largest + std::log(sum);
  for (Key& key : row.keys) key.P = std::exp(key.logit - row.lse);
  if (in.sinks.present() && !row.keys.empty()) {
    const double sink = At(in.sinks, {h});
    row.w = 1 / (1 + std::exp(sink - row.lse));
    row.of_sink = 1 / (1 + std::exp(row.lse - sink));
  }
  return row;
}

// Calls f(row) for all rows.
template <class F>
void ForRows(const Inputs& in, const Options& options, const F& f) {
  for (int64_t b = 0; b < in.q.size(0); ++b) {
    for (int64_t i = 0; i < in.q.size(1); ++i) {
      for (int64_t h = 0; h < in.q.size(2); ++h) f(RowOf(in, options, b, i, h));
    }
  }
}

double Value(const Inputs& in, const Row& row, const Key& key, int64_t e) {
  return At(key.is_compressed ? in.v_cmp : in.v, {row.b, key.at, row.key_head, e});
}

int64_t IntAt(const ConstTensorView& t, int64_t n) { return LoadAsInt64(t.dtype(), t.data(), n * t.stride(0)); }

}  // namespace

DefinedPlace PlaceByDefinition(const Inputs& in, const Options& options, int64_t b, int64_t i) {
  const int64_t Tq = in.q.size(1), start = options.start.value_or(in.k.size(1) - Tq);
  DefinedPlace place = {start + i, 0, start + Tq, 0};
  if (options.starts.present()) place.begin = IntAt(options.starts, b);
  if (options.lengths.present()) place.end = IntAt(options.lengths, b);
  if (!options.cu_seqlens.present()) return place;
  place.end = 0;  // of no sequence so far
  int64_t first_key = 0;
  for (int64_t n = 0; n + 1 < options.cu_seqlens.size(0); ++n) {
    const int64_t begin = IntAt(options.cu_seqlens, n), end = IntAt(options.cu_seqlens, n + 1);
    if (begin <= i && i < end) place = {i, begin, end, first_key};
    first_key += (end - begin) / options.ratio;
  }
  return place;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  CheckedCall("compressed_attention::Reference", nullptr, in, options, out, attention::Use::kReference);
  ForRows(in, options, [&](const Row& row) {
    for (int64_t e = 0; e < in.v.size(3); ++e) {
      double o = 0;
      for (const Key& key : row.keys) o += row.w * key.P * Value(in, row, key, e);
      Set(out.o, {row.b, row.i, row.h, e}, o);
    }
    Set(out.lse, {row.b, row.h, row.i}, row.lse);
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  CheckedBackward("compressed_attention::BackwardReference", nullptr, in, options, out, attention::Use::kReference);
  Sums dq(in.q), dk(in.k), dv(in.v), dk_cmp(in.k_cmp), dv_cmp(in.v_cmp), dsinks(in.sinks);
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(in.q.size(3))));
  ForRows(in, options, [&](const Row& row) {
    const auto& [b, i, h, key_head, keys, lse, w, of_sink] = row;
    const auto d_o = [&](int64_t e) { return At(in.d_o, {b, i, h, e}); };
    std::vector<double> of_value;  // <d_o, v> of each key
    double mean = 0;               // <d_o, o> without the sink
    for (const Key& key : keys) {
      double dot = 0;
      for (int64_t e = 0; e < in.v.size(3); ++e) dot += d_o(e) * Value(in, row, key, e);
      of_value.push_back(dot);
      mean += key.P * dot;
    }
    // o = w sum P v, with dw = w (1 - w) (dlse - dsink).
    const double of_lse = w * of_sink * mean + (in.d_lse.present() ? At(in.d_lse, {b, h, i}) : 0);
    for (size_t n = 0; n < keys.size(); ++n) {
      const Key& key = keys[n];
      const double dS = key.P * (w * (of_value[n] - mean) + of_lse);
      Sums &of_k = key.is_compressed ? dk_cmp : dk, &of_v = key.is_compressed ? dv_cmp : dv;
      for (int64_t e = 0; e < in.v.size(3); ++e) of_v({b, key.at, key_head, e}) += w * key.P * d_o(e);
      for (int64_t e = 0; e < in.q.size(3); ++e) {
        dq({b, i, h, e}) += scale * dS * At(key.is_compressed ? in.k_cmp : in.k, {b, key.at, key_head, e});
        of_k({b, key.at, key_head, e}) += scale * dS * At(in.q, {b, i, h, e});
      }
    }
    if (in.sinks.present()) dsinks({h}) -= w * of_sink * mean;
  });
  dq.Store(out.dq);
  dk.Store(out.dk);
  dv.Store(out.dv);
  dk_cmp.Store(out.dk_cmp);
  dv_cmp.Store(out.dv_cmp);
  dsinks.Store(out.dsinks);
}

}  // namespace heed::compressed_attention
