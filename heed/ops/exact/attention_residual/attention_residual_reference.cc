// attention_residual::Reference and BackwardReference: the equations, token by token.
//
// They share only the checks with the kernels, and are to be read beside the header.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "heed/ops/exact/attention_residual/attention_residual_internal.h"

namespace heed::attention_residual {
namespace {

using Doubles = std::vector<double>;

// The offset of an index in the given axes of a tensor, counted in row-major order.
int64_t OffsetOf(const ConstTensorView& t, int first, int end, int64_t index) {
  if (first == end) return 0;
  const int64_t size = t.size(end - 1);
  return index % size * t.stride(end - 1) + OffsetOf(t, first, end - 1, index / size);
}
double Load(const ConstTensorView& t, int64_t offset) { return LoadAsDouble(t.dtype(), t.data(), offset); }
void Store(const TensorView& t, int64_t offset, double value) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), offset, value);
}

// u = weight .* query.
Doubles ScaledQuery(const Inputs& in) {
  Doubles u;
  for (int64_t c = 0; c < in.query.size(0); ++c) {
    const double w = in.weight.present() ? Load(in.weight, c * in.weight.stride(0)) : 1;
    u.push_back(w * Load(in.query, c * in.query.stride(0)));
  }
  return u;
}

// One token: rows v, the inverse of their root mean squares, <u, v>, and probabilities.
struct Token {
  std::vector<Doubles> v;
  Doubles inverse, product, p, o;

  Token(const Inputs& in, const Options& options, const Doubles& u, int64_t token) {
    const ConstTensorView& t = in.residuals;
    const size_t D = u.size();
    double most = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int64_t l = 0; l < t.size(0); ++l) {
      Doubles row(D);
      double squares = 0, with_u = 0;
      const int64_t begin = l * t.stride(0) + OffsetOf(t, 1, t.rank() - 1, token);
      for (size_t c = 0; c < D; ++c) {
        row[c] = Load(t, begin + static_cast<int64_t>(c));
        squares += row[c] * row[c];
        with_u += row[c] * u[c];
      }
      const double mean = squares / static_cast<double>(D) + options.eps;
      v.push_back(row);
      inverse.push_back(mean == 0 ? 0 : 1 / std::sqrt(mean));
      product.push_back(with_u);
      p.push_back(options.scale * inverse.back() * with_u);
      most = std::max(most, p.back());
    }
    for (double& x : p) sum += x = std::exp(x - most);
    for (double& x : p) x /= sum;
    o.assign(D, 0);
    for (size_t l = 0; l < p.size(); ++l) {
      for (size_t c = 0; c < D; ++c) o[c] += p[l] * v[l][c];
    }
  }
};

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  CheckForward("attention_residual::Reference", in, options, out, true);
  const Doubles u = ScaledQuery(in);
  for (int64_t n = 0; n < NumTokens(in); ++n) {
    const Token token(in, options, u, n);
    const int64_t begin = OffsetOf(out.o, 0, out.o.rank() - 1, n);
    for (size_t c = 0; c < u.size(); ++c) Store(out.o, begin + static_cast<int64_t>(c), token.o[c]);
    for (size_t l = 0; l < token.p.size() && out.weights.present(); ++l) {
      const int64_t layer = static_cast<int64_t>(l) * out.weights.stride(0);
      Store(out.weights, layer + OffsetOf(out.weights, 1, out.weights.rank(), n), token.p[l]);
    }
  }
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  CheckBackward("attention_residual::BackwardReference", in, options, out, true);
  const Doubles u = ScaledQuery(in);
  const size_t D = u.size();
  Doubles du(D);
  for (int64_t n = 0; n < NumTokens(in); ++n) {
    const Token token(in, options, u, n);
    Doubles d_o(D);
    double with_o = 0;
    const int64_t begin = OffsetOf(in.d_o, 0, in.d_o.rank() - 1, n);
    for (size_t c = 0; c < D; ++c) {
      d_o[c] = Load(in.d_o, begin + static_cast<int64_t>(c));
      with_o += d_o[c] * token.o[c];
    }
    for (size_t l = 0; l < token.p.size(); ++l) {
      const Doubles& v = token.v[l];
      double with_v = 0;
      for (size_t c = 0; c < D; ++c) with_v += d_o[c] * v[c];
      const double r = token.inverse[l], a = options.scale * r * token.p[l] * (with_v - with_o);
      const double of_norm = r * r * token.product[l] / static_cast<double>(D);
      const TensorView& dv = out.dresiduals;
      const int64_t at = dv.present() ? static_cast<int64_t>(l) * dv.stride(0) + OffsetOf(dv, 1, dv.rank() - 1, n) : 0;
      for (size_t c = 0; c < D; ++c) {
        Store(dv, at + static_cast<int64_t>(c), token.p[l] * d_o[c] + a * (u[c] - of_norm * v[c]));
        du[c] += a * v[c];
      }
    }
  }
  for (int64_t c = 0; c < in.query.size(0); ++c) {
    const double sum = du[static_cast<size_t>(c)], q = Load(in.query, c * in.query.stride(0));
    const double w = in.weight.present() ? Load(in.weight, c * in.weight.stride(0)) : 1;
    if (out.dquery.present()) Store(out.dquery, c * out.dquery.stride(0), w * sum);
    if (out.dweight.present()) Store(out.dweight, c * out.dweight.stride(0), q * sum);
  }
}

}  // namespace heed::attention_residual
