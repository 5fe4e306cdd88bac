// The reference of Linformer, in double: one element at a time, every sum written out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/linear/linformer/linformer.h"

namespace heed::linformer {
namespace {

double At(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  int64_t at = 0;
  int axis = 0;
  for (const int64_t i : index) at += i * t.stride(axis++);
  return LoadAsDouble(t.dtype(), t.data(), at);
}

void Put(const TensorView& t, std::initializer_list<int64_t> index, double value) {
  int64_t at = 0;
  int axis = 0;
  for (const int64_t i : index) at += i * t.stride(axis++);
  StoreDouble(t.dtype(), t.data(), at, value);
}

// A table in the shape of a tensor, stored to it when complete.
struct Table {
  std::vector<int64_t> sizes;
  std::vector<double> values;

  explicit Table(std::span<const int64_t> shape) : sizes(shape.begin(), shape.end()) {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    values.assign(static_cast<size_t>(count), 0.0);
  }
  double& operator()(std::initializer_list<int64_t> index) {
    int64_t at = 0;
    size_t axis = 0;
    for (const int64_t i : index) at = at * sizes[axis++] + i;
    return values[static_cast<size_t>(at)];
  }
  void Write(const TensorView& t) const {
    if (!t.present()) return;
    for (size_t i = 0; i < values.size(); ++i) {
      auto rest = static_cast<int64_t>(i);
      int64_t at = 0;
      for (int axis = t.rank() - 1; axis >= 0; --axis) {
        at += rest % t.size(axis) * t.stride(axis);
        rest /= t.size(axis);
      }
      StoreDouble(t.dtype(), t.data(), at, values[i]);
    }
  }
};

// Value head h of the tokens of one sequence, and their columns.
struct Head {
  int64_t b, h, key_head, R, K, V;
  std::vector<int64_t> tokens, columns;
  std::vector<std::vector<double>> keys, values;  // K~ and V~

  std::vector<double> Weights(const Inputs& in, double scale, int64_t t) const {
    std::vector<double> p;
    double most = -INFINITY, sum = 0;
    for (int64_t r = 0; r < R; ++r) {
      double s = 0;
      for (int64_t c = 0; c < K; ++c) {
        s += At(in.q, {b, t, key_head, c}) * keys[static_cast<size_t>(r)][static_cast<size_t>(c)];
      }
      p.push_back(scale * s);
      most = std::fmax(most, p.back());
    }
    for (double& x : p) sum += x = std::exp(x - most);
    for (double& x : p) x /= sum;
    return p;
  }
};

template <class F>
void ForEachHead(const Inputs& in, const Options& options, const F& f) {
  for (const auto& range : mechanism::SequencesOf(options, in.q.size(0), in.q.size(1))) {
    for (int64_t h = 0; h < in.v.size(2); ++h) {
      Head head = {range.batch, h, h / (in.v.size(2) / in.q.size(2)), in.e.size(0), in.q.size(3), in.v.size(3), {}, {},
                   {},          {}};
      for (int64_t t = range.begin; t < range.end; ++t) {
        head.tokens.push_back(t);
        head.columns.push_back(options.cu_seqlens.present() ? t - range.begin : t);
      }
      for (int64_t r = 0; r < head.R; ++r) {
        std::vector<double> key(static_cast<size_t>(head.K)), value(static_cast<size_t>(head.V));
        for (size_t i = 0; i < head.tokens.size(); ++i) {
          const int64_t t = head.tokens[i], column = head.columns[i];
          for (int64_t c = 0; c < head.K; ++c) {
            key[static_cast<size_t>(c)] += At(in.e, {r, column}) * At(in.k, {range.batch, t, head.key_head, c});
          }
          for (int64_t c = 0; c < head.V; ++c) {
            value[static_cast<size_t>(c)] += At(in.f, {r, column}) * At(in.v, {range.batch, t, h, c});
          }
        }
        head.keys.push_back(key);
        head.values.push_back(value);
      }
      f(head);
    }
  }
}

double ScaleOf(const Inputs& in, const Options& options) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(in.q.size(3))));
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  const double scale = ScaleOf(in, options);
  Table(out.o.sizes()).Write(out.o);
  ForEachHead(in, options, [&](const Head& head) {
    for (const int64_t t : head.tokens) {
      const auto p = head.Weights(in, scale, t);
      for (int64_t c = 0; c < head.V; ++c) {
        double sum = 0;
        for (size_t r = 0; r < p.size(); ++r) sum += p[r] * head.values[r][static_cast<size_t>(c)];
        Put(out.o, {head.b, t, head.h, c}, sum);
      }
    }
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  const double scale = ScaleOf(in, options);
  Table dq(in.q.sizes()), dk(in.k.sizes()), dv(in.v.sizes()), de(in.e.sizes()), df(in.f.sizes());
  ForEachHead(in, options, [&](const Head& head) {
    auto d_keys = head.keys, d_values = head.values;
    for (auto* rows : {&d_keys, &d_values}) {
      for (auto& row : *rows) std::fill(row.begin(), row.end(), 0.0);
    }
    for (const int64_t t : head.tokens) {
      const auto p = head.Weights(in, scale, t);
      std::vector<double> dp(p.size());
      double mean = 0;
      for (size_t r = 0; r < p.size(); ++r) {
        for (int64_t c = 0; c < head.V; ++c) {
          const double d_o = At(in.d_o, {head.b, t, head.h, c});
          dp[r] += d_o * head.values[r][static_cast<size_t>(c)];
          d_values[r][static_cast<size_t>(c)] += p[r] * d_o;
        }
        mean += p[r] * dp[r];
      }
      for (size_t r = 0; r < p.size(); ++r) {
        const double ds = scale * p[r] * (dp[r] - mean);
        for (int64_t c = 0; c < head.K; ++c) {
          const auto i = static_cast<size_t>(c);
          dq({head.b, t, head.key_head, c}) += ds * head.keys[r][i];
          d_keys[r][i] += ds * At(in.q, {head.b, t, head.key_head, c});
        }
      }
    }
    for (int64_t r = 0; r < head.R; ++r) {
      for (size_t i = 0; i < head.tokens.size(); ++i) {
        const int64_t t = head.tokens[i], column = head.columns[i];
        for (int64_t c = 0; c < head.K; ++c) {
          const double d = d_keys[static_cast<size_t>(r)][static_cast<size_t>(c)];
          dk({head.b, t, head.key_head, c}) += At(in.e, {r, column}) * d;
          de({r, column}) += d * At(in.k, {head.b, t, head.key_head, c});
        }
        for (int64_t c = 0; c < head.V; ++c) {
          const double d = d_values[static_cast<size_t>(r)][static_cast<size_t>(c)];
          dv({head.b, t, head.h, c}) += At(in.f, {r, column}) * d;
          df({r, column}) += d * At(in.v, {head.b, t, head.h, c});
        }
      }
    }
  });
  dq.Write(out.q);
  dk.Write(out.k);
  dv.Write(out.v);
  de.Write(out.e);
  df.Write(out.f);
}

}  // namespace heed::linformer
