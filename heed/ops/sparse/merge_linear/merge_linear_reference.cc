// merge_linear::Reference and BackwardReference: the formula, row by row.
//
// They share only the checks with the kernels, and are to be read beside the header.
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "heed/ops/sparse/merge_linear/merge_linear_internal.h"

namespace heed::merge_linear {
namespace {

int64_t OffsetAt(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  int64_t at = 0;
  for (int axis = 0; axis < t.rank(); ++axis) at += index.begin()[axis] * t.stride(axis);
  return at;
}
double ElementAt(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  return LoadAsDouble(t.dtype(), t.data(), OffsetAt(t, index));
}
void Store(const TensorView& t, std::initializer_list<int64_t> index, double value) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), OffsetAt(t, index), value);
}

// One row: E = exp(lse) and the other terms of the formula times exp(-shift), where nonzero.
struct Row {
  long double E = 0, scale = 1, W = 0;
  double gate = 1;
  std::vector<double> o, num, out;
};

Row RowOf(const Inputs& in, int64_t b, int64_t i, int64_t h) {
  Row row;
  const double lse = ElementAt(in.lse, {b, h, i}), den = ElementAt(in.den, {b, i, h});
  if (in.gate.present()) row.gate = ElementAt(in.gate, {h});
  const long double shift = lse > 0 ? lse : 0;
  row.E = std::exp(static_cast<long double>(lse) - shift);
  row.scale = std::exp(-shift);
  row.W = row.gate * row.E + row.scale * den;
  for (int64_t e = 0; e < in.o.size(3); ++e) {
    row.o.push_back(std::isinf(lse) && lse < 0 ? 0 : ElementAt(in.o, {b, i, h, e}));
    row.num.push_back(ElementAt(in.num, {b, i, h, e}));
    const long double above = row.gate * row.E * row.o.back() + row.scale * row.num.back();
    row.out.push_back(row.W == 0 ? 0 : static_cast<double>(above / row.W));
  }
  return row;
}

template <class F>
void ForRows(const Inputs& in, const F& f) {
  for (int64_t b = 0; b < in.o.size(0); ++b) {
    for (int64_t i = 0; i < in.o.size(1); ++i) {
      for (int64_t h = 0; h < in.o.size(2); ++h) f(b, i, h, RowOf(in, b, i, h));
    }
  }
}

}  // namespace

void Reference(const Inputs& in, const TensorView& out) {
  CheckForward("merge_linear::Reference", in, out, true);
  ForRows(in, [&](int64_t b, int64_t i, int64_t h, const Row& row) {
    for (int64_t e = 0; e < in.o.size(3); ++e) Store(out, {b, i, h, e}, row.out[static_cast<size_t>(e)]);
  });
}

void BackwardReference(const BackwardInputs& in, const Gradients& out) {
  CheckBackward("merge_linear::BackwardReference", in, out, true);
  std::vector<long double> dgate(static_cast<size_t>(in.o.size(2)), 0);
  ForRows(in, [&](int64_t b, int64_t i, int64_t h, const Row& row) {
    const long double one = row.W == 0 ? 0 : 1 / row.W;
    long double with_out = 0, with_difference = 0;
    for (int64_t e = 0; e < in.o.size(3); ++e) {
      const double arriving = ElementAt(in.d_o, {b, i, h, e});
      const auto at = static_cast<size_t>(e);
      with_out += arriving * row.out[at];
      with_difference += static_cast<long double>(arriving) * (row.o[at] - row.out[at]);
      Store(out.dexact, {b, i, h, e}, static_cast<double>(row.gate * row.E * one * arriving));
      Store(out.dnum, {b, i, h, e}, static_cast<double>(row.scale * one * arriving));
    }
    Store(out.dlse, {b, h, i}, static_cast<double>(row.gate * row.E * one * with_difference));
    Store(out.dden, {b, i, h}, static_cast<double>(-row.scale * one * with_out));
    dgate[static_cast<size_t>(h)] += row.E * one * with_difference;
  });
  for (int64_t h = 0; h < in.o.size(2); ++h) Store(out.dgate, {h}, static_cast<double>(dgate[static_cast<size_t>(h)]));
}

}  // namespace heed::merge_linear
