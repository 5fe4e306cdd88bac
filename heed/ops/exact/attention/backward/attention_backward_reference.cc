// attention::BackwardReference: the equations of attention.h in double.
//
// Scalar, one thread, row by row on top of the forward reference. It shares no code
// with the kernels and is to be read beside the header.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"

namespace heed::attention {
namespace {

// A tensor of sums in double; axes of size 1 sum over all indices.
class Sums {
 public:
  explicit Sums(const TensorView& view) : view_(view) {
    if (view.present()) values_.assign(static_cast<size_t>(view.num_elements()), 0.0);
  }

  // The sum at the last indices of `index`.
  double& At(std::initializer_list<int64_t> index) { return values_[Offset(index)]; }
  // The sums from this element to the end of the last axis; null if absent.
  double* Row(std::initializer_list<int64_t> index) {
    return view_.present() ? values_.data() + Offset(index) : nullptr;
  }

  explicit operator bool() const { return view_.present(); }

  void Store() const {
    std::vector<int64_t> index(view_.sizes().size());
    for (const double value : values_) {
      int64_t at = 0;
      for (size_t axis = 0; axis < index.size(); ++axis) {
        at += index[axis] * view_.stride(static_cast<int>(axis));
      }
      StoreDouble(view_.dtype(), view_.data(), at, value);
      for (size_t axis = index.size(); axis-- > 0;) {
        if (++index[axis] < view_.size(static_cast<int>(axis))) break;
        index[axis] = 0;
      }
    }
  }

 private:
  size_t Offset(std::initializer_list<int64_t> index) const {
    const int64_t* last = index.end() - view_.rank();
    int64_t at = 0;
    for (int axis = 0; axis < view_.rank(); ++axis) {
      at = at * view_.size(axis) + (view_.size(axis) == 1 ? 0 : last[axis]);
    }
    return static_cast<size_t>(at);
  }

  TensorView view_;
  std::vector<double> values_;
};

double Element(const ConstTensorView& view, std::initializer_list<int64_t> index) {
  const int64_t* last = index.end() - view.rank();
  int64_t at = 0;
  for (int axis = 0; axis < view.rank(); ++axis) at += last[axis] * view.stride(axis);
  return LoadAsDouble(view.dtype(), view.data(), at);
}

}  // namespace

void ReferenceGradients(const BackwardInputs& in, const Options& options, const Gradients& out,
                        const Gradients& magnitudes, const Roundoff& roundoff) {
  const Inputs forward = {in.q, in.k, in.v};
  const int rank = in.q.rank();
  const int64_t D = in.q.size(rank - 1), Dv = in.v.size(rank - 1);
  const int64_t group = in.q.size(rank - 2) / std::max<int64_t>(in.k.size(rank - 2), 1);
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  const bool packed = options.cu_seqlens_q.present();

  // The gradients, and the sums of their terms' magnitudes.
  Sums dq(out.dq), dk(out.dk), dv(out.dv), dbias(out.dbias), dsinks(out.dsinks), dalibi(out.dalibi),
      drelative(out.drelative_bias), ddecay(out.dlog_decay);
  Sums mq(magnitudes.dq), mk(magnitudes.dk), mv(magnitudes.dv), mbias(magnitudes.dbias), msinks(magnitudes.dsinks),
      malibi(magnitudes.dalibi), mrelative(magnitudes.drelative_bias), mdecay(magnitudes.dlog_decay);

  std::vector<int64_t> o_sizes(in.q.sizes().begin(), in.q.sizes().end());
  o_sizes.back() = Dv;
  std::vector<int64_t> o_strides(o_sizes.size(), 1);
  for (size_t axis = o_sizes.size() - 1; axis-- > 0;) {
    o_strides[axis] = o_strides[axis + 1] * o_sizes[axis + 1];
  }
  std::vector<double> o(static_cast<size_t>(o_sizes[0] * o_strides[0]));
  const TensorView o_view(o.data(), DType::kF64, o_sizes, o_strides);

  ReferenceRows(forward, options, {o_view, {}}, [&](const ReferenceRow& row) {
    const int64_t b = row.sequence, h = row.head, i = row.query;
    const int64_t batch = packed ? 0 : b, token = row.output_row;
    std::vector<double> d_o;
    for (int64_t d = 0; d < Dv; ++d) d_o.push_back(Element(in.d_o, {batch, token, h, d}));
    const double d_lse = in.d_lse ? Element(in.d_lse, {batch, h, token}) : 0;
    if (row.pairs.empty()) return;

    const double relative = roundoff.relative ? roundoff.relative(row) : 0;
    double dot = 0, dot_magnitude = 0;  // <d_o, o>
    for (const ReferencePair& pair : row.pairs) {
      for (int64_t d = 0; d < Dv; ++d) {
        const double product = pair.weight * d_o[static_cast<size_t>(d)] * pair.v[d];
        dot += product;
        dot_magnitude += std::abs(product);
      }
    }
    double dot_floor = 0;
    for (const double x : d_o) dot_floor += std::abs(x) * roundoff.of_o;
    const double dot_error = dot_magnitude * relative + dot_floor;
    const double w = row.w;
    if (dsinks) dsinks.At({h}) -= row.sink_probability * dot;
    if (msinks) msinks.At({h}) += row.sink_probability * dot_error;

    double forgotten = 0, forgotten_magnitude = 0;  // sum of dS over the keys so far
    for (const ReferencePair& pair : row.pairs) {
      const int64_t j = row.first_key + pair.key;  // row of k and v
      const int64_t key_head = h / group;
      double along_v = 0, along_v_magnitude = 0;  // <d_o, v>
      for (int64_t d = 0; d < Dv; ++d) {
        const double product = d_o[static_cast<size_t>(d)] * pair.v[d];
        along_v += product;
        along_v_magnitude += std::abs(product);
      }
      const double P = pair.probability;
      const double dS = pair.weight * along_v - P * (w * dot - d_lse);
      const double mS = (pair.weight * along_v_magnitude + P * std::abs(d_lse)) * relative + P * w * dot_error;
      double *const dv_row = dv.Row({batch, j, key_head, 0}), *const mv_row = mv.Row({batch, j, key_head, 0});
      for (int64_t d = 0; d < Dv; ++d) {
        const double term = pair.weight * d_o[static_cast<size_t>(d)];
        if (dv_row) dv_row[d] += term;
        if (mv_row) mv_row[d] += std::abs(term) * relative;
      }
      const double dS0 = scale * dS * pair.slope;
      const double mS0 = std::abs(scale) * mS * (pair.slope + (options.softcap > 0));
      double *const dq_row = dq.Row({batch, token, h, 0}), *const mq_row = mq.Row({batch, token, h, 0});
      double *const dk_row = dk.Row({batch, j, key_head, 0}), *const mk_row = mk.Row({batch, j, key_head, 0});
      for (int64_t d = 0; d < D; ++d) {
        if (dq_row) dq_row[d] += dS0 * pair.k[d];
        if (mq_row) mq_row[d] += mS0 * std::abs(pair.k[d]);
        if (dk_row) dk_row[d] += dS0 * row.q[d];
        if (mk_row) mk_row[d] += mS0 * std::abs(row.q[d]);
      }
      if (dbias) dbias.At({b, h, i, pair.key}) += dS;
      if (mbias) mbias.At({b, h, i, pair.key}) += mS;
      if (dalibi) dalibi.At({b, h}) -= dS * pair.distance;
      if (malibi) malibi.At({b, h}) += mS * pair.distance;
      if (options.relative_bias && 0 <= pair.keys_before && pair.keys_before < options.relative_bias.size(1)) {
        if (drelative) drelative.At({h, pair.keys_before}) += dS;
        if (mrelative) mrelative.At({h, pair.keys_before}) += mS;
      }
      forgotten += dS;
      forgotten_magnitude += mS;
      const int64_t next = &pair == &row.pairs.back() ? row.stands_at : (&pair)[1].key;
      for (int64_t s = pair.key + 1; s <= std::min(next, row.stands_at); ++s) {
        if (ddecay) ddecay.At({batch, row.first_key + s, h}) += forgotten;
        if (mdecay) mdecay.At({batch, row.first_key + s, h}) += forgotten_magnitude;
      }
    }
  });
  for (const Sums* sums : {&dq, &dk, &dv, &dbias, &dsinks, &dalibi, &drelative, &ddecay, &mq, &mk, &mv, &mbias, &msinks,
                           &malibi, &mrelative, &mdecay}) {
    if (*sums) sums->Store();
  }
}

}  // namespace heed::attention
