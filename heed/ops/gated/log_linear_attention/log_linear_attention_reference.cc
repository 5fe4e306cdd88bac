// Log-linear attention as it is defined, and its gradient, pair by pair of tokens: levels are counted from the bits of
// positions, and no state is kept in parts.
//
// They share only the checks with the kernels, and are to be read beside the header.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "heed/ops/gated/log_linear_attention/log_linear_attention_internal.h"

namespace heed::log_linear_attention {
namespace {

using Index = std::initializer_list<int64_t>;

int64_t OffsetAt(const ConstTensorView& t, Index index) {
  int64_t at = 0;
  for (int axis = 0; axis < t.rank(); ++axis) at += index.begin()[axis] * t.stride(axis);
  return at;
}
double At(const ConstTensorView& t, Index index) { return LoadAsDouble(t.dtype(), t.data(), OffsetAt(t, index)); }
void Set(const TensorView& t, Index index, double value) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), OffsetAt(t, index), value);
}

// The number of bits up to the highest one in which two positions differ.
int64_t LevelOf(int64_t t, int64_t s) {
  int64_t level = 0;
  for (int64_t differ = t ^ s; differ != 0; differ /= 2) ++level;
  return level;
}

// The runs of tokens that are states after n tokens: one for each bit of n.
struct Run {
  int64_t state, begin, end;
};
std::vector<Run> RunsOf(int64_t n) {
  std::vector<Run> runs;
  for (int64_t j = 0; n >> j != 0; ++j) {
    const int64_t size = int64_t{1} << j, end = n / size * size;
    if ((n & size) != 0) runs.push_back({j, end - size, end});
  }
  return runs;
}

// One value head of a sequence in doubles, and its gradients. Positions count from the first token of all.
struct Head {
  const Call& call;
  Sequence s;
  int64_t n, b, h, kh, before, after;

  Head(const Call& c, int64_t sequence, int64_t head)
      : call(c), s(c.sequences[static_cast<size_t>(sequence)]), n(sequence), b(s.batch), h(head),
        kh(head / (c.G / c.H)), before(s.position), after(s.position + s.end - s.begin) {}

  int64_t Place(int64_t position) const { return s.begin + position - before; }  // in the tensors
  static double Decay(const Inputs& in, Index index) {
    if (!in.log_decay.present()) return 1;
    const double g = At(in.log_decay, index);
    return std::exp(g > 0 ? 0 : g);
  }
  // The product of the decays of tokens [from, to).
  double Decays(const Inputs& in, int64_t from, int64_t to) const {
    double product = 1;
    for (int64_t t = from; t < to; ++t) product *= Decay(in, {b, Place(t), h});
    return product;
  }
};

// Calls f(state run, level) for the runs of the initial state that token t sees, all of them.
template <class F>
void ForInitialRuns(const Head& head, int64_t t, const F& f) {
  for (const Run& run : RunsOf(head.before)) f(run, LevelOf(t, run.begin));
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  const Call call = CheckForward("log_linear_attention::Reference", in, options, out, true, false);
  for (int64_t b = 0; b < call.B; ++b) {
    for (int64_t t = 0; t < call.T; ++t) {
      for (int64_t h = 0; h < call.G; ++h) {
        for (int64_t j = 0; j < call.V; ++j) Set(out.o, {b, t, h, j}, 0);
      }
    }
  }
  for (int64_t n = 0; n < static_cast<int64_t>(call.sequences.size()); ++n) {
    for (int64_t h = 0; h < call.G; ++h) {
      const Head head(call, n, h);
      for (int64_t t = head.before; t < head.after; ++t) {
        const int64_t at = head.Place(t);
        std::vector<double> o(static_cast<size_t>(call.V));
        double decay = 1;
        for (int64_t s = t; s >= head.before; --s) {
          double product = 0;
          for (int64_t i = 0; i < call.K; ++i) {
            product += At(in.q, {head.b, at, head.kh, i}) * At(in.k, {head.b, head.Place(s), head.kh, i});
          }
          const double weight = call.scale * At(in.level_scales, {head.b, at, h, LevelOf(t, s)}) * decay * product;
          for (int64_t j = 0; j < call.V; ++j) {
            o[static_cast<size_t>(j)] += weight * At(in.v, {head.b, head.Place(s), h, j});
          }
          decay *= Head::Decay(in, {head.b, head.Place(s), h});
        }
        ForInitialRuns(head, t, [&](const Run& run, int64_t level) {
          const double weight = call.scale * At(in.level_scales, {head.b, at, h, level}) * decay;
          for (int64_t j = 0; j < call.V; ++j) {
            for (int64_t i = 0; i < call.K; ++i) {
              o[static_cast<size_t>(j)] +=
                  weight * At(in.q, {head.b, at, head.kh, i}) * At(in.initial_state, {n, h, run.state, i, j});
            }
          }
        });
        for (int64_t j = 0; j < call.V; ++j) Set(out.o, {head.b, at, h, j}, o[static_cast<size_t>(j)]);
      }
      if (!out.final_state.present()) continue;
      for (int64_t state = 0; state < call.L; ++state) {
        for (int64_t i = 0; i < call.K; ++i) {
          for (int64_t j = 0; j < call.V; ++j) Set(out.final_state, {n, h, state, i, j}, 0);
        }
      }
      for (const Run& run : RunsOf(head.after)) {
        for (int64_t i = 0; i < call.K; ++i) {
          for (int64_t j = 0; j < call.V; ++j) {
            double sum = 0, decay = 1;
            for (int64_t s = head.after - 1; s >= head.before; --s) {
              if (run.begin <= s && s < run.end) {
                const int64_t at = head.Place(s);
                sum += decay * At(in.k, {head.b, at, head.kh, i}) * At(in.v, {head.b, at, h, j});
              }
              decay *= Head::Decay(in, {head.b, head.Place(s), h});
            }
            for (const Run& old : RunsOf(head.before)) {
              if (run.begin <= old.begin && old.begin < run.end) {
                sum += decay * At(in.initial_state, {n, h, old.state, i, j});
              }
            }
            Set(out.final_state, {n, h, run.state, i, j}, sum);
          }
        }
      }
    }
  }
}

namespace {

// Row-major doubles of a tensor's shape, for gradients that are sums.
struct Sums {
  TensorView to;
  std::vector<double> values;
  std::vector<int64_t> strides;

  explicit Sums(const TensorView& t, const ConstTensorView& like) : to(t), strides(static_cast<size_t>(like.rank())) {
    int64_t next = 1;
    for (int axis = like.rank(); axis-- > 0;) {
      strides[static_cast<size_t>(axis)] = next;
      next *= like.size(axis);
    }
    values.assign(static_cast<size_t>(like.present() ? next : 0), 0);
  }
  double& operator()(Index index) {
    int64_t at = 0;
    for (size_t axis = 0; axis < strides.size(); ++axis) at += index.begin()[axis] * strides[axis];
    return values[static_cast<size_t>(at)];
  }
  ~Sums() {
    if (!to.present()) return;
    for (size_t n = 0; n < values.size(); ++n) {
      int64_t at = 0, rest = static_cast<int64_t>(n);
      for (size_t axis = 0; axis < strides.size(); ++axis) {
        at += rest / strides[axis] * to.stride(static_cast<int>(axis));
        rest %= strides[axis];
      }
      StoreDouble(to.dtype(), to.data(), at, values[n]);
    }
  }
};

}  // namespace

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  const Call call = CheckBackward("log_linear_attention::BackwardReference", in, options, out, true, false);
  Sums dq(out.dq, in.q), dk(out.dk, in.k), dv(out.dv, in.v), dscales(out.dlevel_scales, in.level_scales),
      dg(out.dlog_decay, in.log_decay), dinitial(out.dinitial_state, in.initial_state);
  // Adds a term of the result to the gradients of the log decays of tokens [from, to).
  const auto add_decays = [&](const Head& head, int64_t from, int64_t to, double term) {
    for (int64_t r = from; r < to && in.log_decay.present(); ++r) dg({head.b, head.Place(r), head.h}) += term;
  };
  for (int64_t n = 0; n < static_cast<int64_t>(call.sequences.size()); ++n) {
    for (int64_t h = 0; h < call.G; ++h) {
      const Head head(call, n, h);
      const int64_t b = head.b, kh = head.kh;
      for (int64_t t = head.before; t < head.after; ++t) {
        const int64_t at = head.Place(t);
        for (int64_t s = head.before; s <= t; ++s) {
          const int64_t from = head.Place(s), level = LevelOf(t, s);
          double product = 0, with_v = 0;
          for (int64_t i = 0; i < call.K; ++i) product += At(in.q, {b, at, kh, i}) * At(in.k, {b, from, kh, i});
          for (int64_t j = 0; j < call.V; ++j) with_v += At(in.d_o, {b, at, h, j}) * At(in.v, {b, from, h, j});
          const double decay = call.scale * head.Decays(in, s + 1, t + 1);
          const double lambda = At(in.level_scales, {b, at, h, level});
          dscales({b, at, h, level}) += decay * product * with_v;
          add_decays(head, s + 1, t + 1, lambda * decay * product * with_v);
          for (int64_t i = 0; i < call.K; ++i) {
            dq({b, at, kh, i}) += lambda * decay * with_v * At(in.k, {b, from, kh, i});
            dk({b, from, kh, i}) += lambda * decay * with_v * At(in.q, {b, at, kh, i});
          }
          for (int64_t j = 0; j < call.V; ++j) {
            dv({b, from, h, j}) += lambda * decay * product * At(in.d_o, {b, at, h, j});
          }
        }
        const double decay = call.scale * head.Decays(in, head.before, t + 1);
        ForInitialRuns(head, t, [&](const Run& run, int64_t level) {
          const double lambda = At(in.level_scales, {b, at, h, level});
          double term = 0;
          for (int64_t i = 0; i < call.K; ++i) {
            for (int64_t j = 0; j < call.V; ++j) {
              const double S = At(in.initial_state, {n, h, run.state, i, j}), d = At(in.d_o, {b, at, h, j});
              const double q = At(in.q, {b, at, kh, i});
              term += q * S * d;
              dq({b, at, kh, i}) += lambda * decay * S * d;
              dinitial({n, h, run.state, i, j}) += lambda * decay * q * d;
            }
          }
          dscales({b, at, h, level}) += decay * term;
          add_decays(head, head.before, t + 1, lambda * decay * term);
        });
      }
      if (!in.d_final_state.present()) continue;
      for (const Run& run : RunsOf(head.after)) {
        for (int64_t i = 0; i < call.K; ++i) {
          for (int64_t j = 0; j < call.V; ++j) {
            const double d = At(in.d_final_state, {n, h, run.state, i, j});
            for (int64_t s = std::max(run.begin, head.before); s < run.end; ++s) {
              const int64_t at = head.Place(s);
              const double decay = head.Decays(in, s + 1, head.after);
              const double k = At(in.k, {b, at, kh, i}), v = At(in.v, {b, at, h, j});
              dk({b, at, kh, i}) += decay * d * v;
              dv({b, at, h, j}) += decay * d * k;
              add_decays(head, s + 1, head.after, decay * d * k * v);
            }
            for (const Run& old : RunsOf(head.before)) {
              if (old.begin < run.begin || old.begin >= run.end) continue;
              const double decay = head.Decays(in, head.before, head.after);
              dinitial({n, h, old.state, i, j}) += decay * d;
              add_decays(head, head.before, head.after, decay * d * At(in.initial_state, {n, h, old.state, i, j}));
            }
          }
        }
      }
    }
  }
}

}  // namespace heed::log_linear_attention
