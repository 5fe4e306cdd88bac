// Delta rules and their gradients in double, a token and an element at a time, and the rounding errors of kernels.
#include "heed/mechanism/reference/delta_rounding_internal.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/mechanism/reference/reference_tensor_internal.h"

namespace heed::recurrent {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Put;

// One head of one sequence, in which every write counts as a token: per-token data is at one of its writes. r = beta .*
// erase .* key and w = beta .* write .* v, or a, b and v.
struct Head {
  bool before = false;
  double key_error = 0;
  size_t writes = 1;  // per token: the state decays before the first and is read after the last
  size_t T = 0, K = 0, V = 0;
  Doubles q, k, a;                     // [T, K]: q scaled; a: decays
  Doubles r, b;                        // read keys and second write keys
  Doubles w;                           // [T, V]
  Doubles S;                           // [K, V]: initial
  Doubles key, erase, beta, v, write;  // factors of r and w
};

struct Place {
  int64_t sequence, batch, head, key_head;
  std::vector<int64_t> tokens;  // of writes, in the order of processing
};

// Values are [B, T, HV, V], or [B, T, n, HV, V].
int64_t WritesOf(const ReferenceInputs& in, const DeltaMath& math) { return math.several_writes ? in.v.size(2) : 1; }
int64_t ValueHeads(const ReferenceInputs& in, const DeltaMath& math) { return in.v.size(math.several_writes ? 3 : 2); }
size_t ValueSize(const ReferenceInputs& in, const DeltaMath& math) {
  return static_cast<size_t>(in.v.size(math.several_writes ? 4 : 3));
}

// An element of [B, T, H, i], or with `of_write` of [B, T, n, H, i].
template <class F>
void WithIndex(bool of_write, const Place& place, size_t row, size_t writes, int64_t head, size_t i, const F& f) {
  const int64_t token = place.tokens[row], write = static_cast<int64_t>(row % writes);
  const auto channel = static_cast<int64_t>(i);
  of_write ? f({place.batch, token, write, head, channel}) : f({place.batch, token, head, channel});
}
// An element of [B, T, H], or of [B, T, n, H].
template <class F>
void WithIndex(bool of_write, const Place& place, size_t row, size_t writes, int64_t head, const F& f) {
  const int64_t token = place.tokens[row], write = static_cast<int64_t>(row % writes);
  of_write ? f({place.batch, token, write, head}) : f({place.batch, token, head});
}

template <class F>
void ForEachHead(const ReferenceInputs& in, const Options& options, const DeltaMath& math, const F& f) {
  mechanism::RequireRank(in.q, 4);
  mechanism::RequireRank(in.v, math.several_writes ? 5 : 4);
  const int64_t H = in.q.size(2), HV = ValueHeads(in, math);
  const auto ranges = mechanism::SequencesOf(options, in.q.size(0), in.q.size(1));
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (int64_t h = 0; h < HV; ++h) {
      Place place = {static_cast<int64_t>(i), ranges[i].batch, h, h / (HV / H), {}};
      for (int64_t t = ranges[i].begin; t < ranges[i].end; ++t) {
        place.tokens.insert(place.tokens.end(), static_cast<size_t>(WritesOf(in, math)), t);
      }
      if (options.reverse) std::reverse(place.tokens.begin(), place.tokens.end());
      f(place);
    }
  }
}

Doubles StateOf(const ConstTensorView& t, const Place& place, size_t K, size_t V) {
  Doubles state(K * V, 0.0);
  for (size_t i = 0; t.present() && i < K * V; ++i) {
    state[i] = At(t, {place.sequence, place.head, static_cast<int64_t>(i / V), static_cast<int64_t>(i % V)});
  }
  return state;
}

void PutState(const TensorView& t, const Place& place, const Doubles& state, size_t V) {
  for (size_t i = 0; i < state.size(); ++i) {
    Put(t, {place.sequence, place.head, static_cast<int64_t>(i / V), static_cast<int64_t>(i % V)}, state[i]);
  }
}

Head HeadOf(const DeltaMath& math, const ReferenceInputs& in, const Place& place) {
  Head h;
  h.before = math.reads_before_decay;
  h.key_error = math.key_error;
  h.T = place.tokens.size();
  h.writes = static_cast<size_t>(WritesOf(in, math));
  h.K = static_cast<size_t>(in.q.size(3));
  h.V = ValueSize(in, math);
  for (size_t row = 0; row < h.T; ++row) {
    const auto at = [&](const ConstTensorView& t, int64_t head, size_t i, bool of_write = false) {
      double value = 0;
      WithIndex(of_write, place, row, h.writes, head, i, [&](mechanism::Index index) { value = At(t, index); });
      return value;
    };
    const bool first = row % h.writes == 0, last = (row + 1) % h.writes == 0, several = math.several_writes;
    double beta = 1;
    if (math.beta) {
      WithIndex(several, place, row, h.writes, place.head, [&](mechanism::Index index) { beta = At(in.beta, index); });
    }
    h.beta.push_back(beta);
    for (size_t i = 0; i < h.K; ++i) {
      const bool own = math.read_key != &ReferenceInputs::k;
      h.q.push_back(last ? math.scale * at(in.q, place.key_head, i) : 0);
      h.k.push_back(at(in.k, place.key_head, i, several));
      h.key.push_back(own ? at(in.*math.read_key, place.key_head, i) : h.k.back());
      h.erase.push_back(math.erase_and_write ? at(in.erase, place.head, i) : 1);
      h.r.push_back(beta * h.erase.back() * h.key.back());
      h.b.push_back(h.before ? at(in.b, place.key_head, i) : 0);
      const bool decays = math.log_decay && first;
      h.a.push_back(
          decays ? std::exp(math.log_decay(place.batch, place.tokens[row], place.head, static_cast<int64_t>(i))) : 1);
    }
    for (size_t j = 0; j < h.V; ++j) {
      h.v.push_back(at(in.v, place.head, j, several));
      h.write.push_back(math.erase_and_write ? at(in.write, place.head, j) : 1);
      h.w.push_back(beta * h.write.back() * h.v.back());
    }
  }
  h.S = StateOf(in.initial.S, place, h.K, h.V);
  return h;
}

// Computes one token: the state after it, and e = w - S~^T r or x = S^T a.
void Advance(const Head& h, size_t t, Doubles& S, Doubles& found) {
  found.assign(h.V, 0.0);
  const double *k = &h.k[t * h.K], *a = &h.a[t * h.K], *r = &h.r[t * h.K], *b = &h.b[t * h.K];
  const double* w = &h.w[t * h.V];
  for (size_t i = 0; i < h.K; ++i) {
    for (size_t j = 0; j < h.V; ++j) {
      double& s = S[i * h.V + j];
      if (h.before) {
        found[j] += s * r[i];
        s *= a[i];
      } else {
        s *= a[i];
        found[j] -= s * r[i];
      }
    }
  }
  for (size_t j = 0; !h.before && j < h.V; ++j) found[j] += w[j];
  for (size_t i = 0; i < h.K; ++i) {
    for (size_t j = 0; j < h.V; ++j) {
      S[i * h.V + j] += h.before ? k[i] * w[j] + b[i] * found[j] : k[i] * found[j];
    }
  }
}

// Calls f(token, state before, state after, e or x) for all tokens, in reverse order.
template <class F>
void AgainstTime(const Head& h, const F& f) {
  constexpr size_t kStretch = 32;  // number of states stored at once
  std::vector<Doubles> kept;
  Doubles S = h.S, found;
  for (size_t t = 0; t < h.T; ++t) {
    if (t % kStretch == 0) kept.push_back(S);
    Advance(h, t, S, found);
  }
  for (size_t stretch = kept.size(); stretch-- > 0;) {
    const size_t begin = stretch * kStretch, end = std::min(begin + kStretch, h.T);
    std::vector<Doubles> states = {kept[stretch]}, all_found;
    for (size_t t = begin; t < end; ++t) {
      states.push_back(states.back());
      Advance(h, t, states.back(), found);
      all_found.push_back(found);
    }
    for (size_t t = end; t-- > begin;) {
      f(t, states[t - begin], states[t - begin + 1], all_found[t - begin]);
    }
  }
}

// Gradients of a head, or their errors.
struct HeadGradients {
  Doubles q, k, r, b, log_a;  // [T, K]
  Doubles w;                  // [T, V]
  Doubles S;                  // of the initial state

  explicit HeadGradients(const Head& h) : w(h.T * h.V, 0.0), S(h.K * h.V, 0.0) {
    q = k = r = b = log_a = Doubles(h.T * h.K, 0.0);
  }
};

HeadGradients Backward(const Head& h, const Doubles& d_o, const Doubles& d_final) {
  HeadGradients g(h);
  Doubles D = d_final;
  AgainstTime(h, [&](size_t t, const Doubles& before, const Doubles& after, const Doubles& found) {
    const size_t K = h.K, V = h.V, at = t * K;
    const double* w = &h.w[t * V];
    Doubles d_found(V, 0.0);  // gradient of e, or x
    for (size_t i = 0; i < K; ++i) {
      for (size_t j = 0; j < V; ++j) {
        double& d = D[i * V + j];
        g.q[at + i] += after[i * V + j] * d_o[t * V + j];
        d += h.q[at + i] * d_o[t * V + j];
        g.k[at + i] += d * (h.before ? w[j] : found[j]);
        g.w[t * V + j] += d * h.k[at + i];
        if (h.before) g.b[at + i] += d * found[j];
        d_found[j] += d * (h.before ? h.b[at + i] : h.k[at + i]);
      }
    }
    for (size_t i = 0; i < K; ++i) {
      for (size_t j = 0; j < V; ++j) {
        const double s = before[i * V + j], a = h.a[at + i];
        double& d = D[i * V + j];
        if (!h.before) {
          g.r[at + i] -= a * s * d_found[j];
          d -= h.r[at + i] * d_found[j];
        }
        g.log_a[at + i] += d * s * a;
        d *= a;
        if (h.before) {
          g.r[at + i] += s * d_found[j];
          d += h.r[at + i] * d_found[j];
        }
      }
    }
  });
  g.S = D;
  return g;
}

Doubles GradientsOfO(const ReferenceBackwardInputs& in, const Place& place, size_t writes) {
  Doubles d_o;
  for (size_t row = 0; row < place.tokens.size(); ++row) {
    for (int64_t j = 0; j < in.d_o.size(3); ++j) {
      const bool last = (row + 1) % writes == 0;
      d_o.push_back(last ? At(in.d_o, {place.batch, place.tokens[row], place.head, j}) : 0);
    }
  }
  return d_o;
}

// Adds a head's contribution to the errors of the gradients of a call: g are errors of the gradients `of`, to which the
// roundings of sums of products are added.
void AddGradients(const DeltaMath& math, const Head& h, const Place& place, const HeadGradients& g,
                  const HeadGradients& of, double u, const ReferenceGradients& out) {
  const bool several = math.several_writes;
  const auto put = [&](const TensorView& t, size_t row, int64_t head, size_t i, double x, bool of_write = false) {
    WithIndex(of_write, place, row, h.writes, head, i, [&](mechanism::Index index) { Add(t, index, x); });
  };
  const auto put_one = [&](const TensorView& t, size_t row, double x, bool of_write = false) {
    WithIndex(of_write, place, row, h.writes, place.head, [&](mechanism::Index index) { Add(t, index, x); });
  };
  for (size_t t = 0; t < h.T; ++t) {
    double d_beta = 0, of_decay = 0;
    for (size_t i = 0; i < h.K; ++i) {
      const size_t at = t * h.K + i;
      if ((t + 1) % h.writes == 0) put(out.q, t, place.key_head, i, std::abs(math.scale) * g.q[at]);
      const double factor = h.beta[t] * h.erase[at];
      put(out.k, t, place.key_head, i, g.k[at], several);
      put(out.*math.d_read_key, t, place.key_head, i, std::abs(factor) * g.r[at], several);
      put(out.b, t, place.key_head, i, g.b[at]);
      put(out.erase, t, place.head, i, std::abs(h.beta[t] * h.key[at]) * g.r[at]);
      d_beta += std::abs(h.erase[at] * h.key[at]) * g.r[at] + u * std::abs(h.erase[at] * h.key[at] * of.r[at]);
      of_decay += g.log_a[at];
      if (out.log_decay.present() && out.log_decay.rank() == 4) {
        put(out.log_decay, t, place.head, i, g.log_a[at]);
      }
    }
    for (size_t j = 0; j < h.V; ++j) {
      const size_t at = t * h.V + j;
      put(out.v, t, place.head, j, std::abs(h.beta[t] * h.write[at]) * g.w[at], several);
      put(out.write, t, place.head, j, std::abs(h.beta[t] * h.v[at]) * g.w[at]);
      d_beta += std::abs(h.write[at] * h.v[at]) * g.w[at] + u * std::abs(h.write[at] * h.v[at] * of.w[at]);
    }
    put_one(out.beta, t, d_beta, several);
    if (out.log_decay.present() && out.log_decay.rank() == 3 && t % h.writes == 0) {
      put_one(out.log_decay, t, of_decay);
    }
  }
  PutState(out.initial.S, place, g.S, h.V);
}

// The inputs of delta rules, and their gradients.
constexpr struct {
  ConstTensorView ReferenceInputs::* input;
  TensorView ReferenceGradients::* gradient;
} kTensors[] = {{&ReferenceInputs::q, &ReferenceGradients::q},
                {&ReferenceInputs::k, &ReferenceGradients::k},
                {&ReferenceInputs::v, &ReferenceGradients::v},
                {&ReferenceInputs::log_decay, &ReferenceGradients::log_decay},
                {&ReferenceInputs::beta, &ReferenceGradients::beta},
                {&ReferenceInputs::p, &ReferenceGradients::p},
                {&ReferenceInputs::erase, &ReferenceGradients::erase},
                {&ReferenceInputs::write, &ReferenceGradients::write},
                {&ReferenceInputs::a, &ReferenceGradients::a},
                {&ReferenceInputs::b, &ReferenceGradients::b}};

void ClearAll(const ReferenceGradients& out) {
  for (const auto& tensor : kTensors) mechanism::Clear(out.*tensor.gradient);
}

// Rounding. An element of S is rarely the sum of terms of its own magnitude, because one token removes what another
// wrote. So errors are bounded by norms of columns instead. The error of column j before token t is multiplied by the
// token's transition, Diag(a) - k (a .* r)^T or Diag(a) + b alpha^T, whose norm is found by power iteration; a token
// adds a few roundings of each element of the column, and the error of the sum of K products with its read key. D
// behaves in the same way in reverse order. With several writes per token and no decay between them, the contribution
// of a write to gradients of keys and queries is separate (delta_backward-inl.h), so sums are over states with and
// without it.
struct Rounding {
  double u, chain, decay;
};

Rounding RoundingOf(DType dtype, size_t size) {
  const double u = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
  return {u, u * (3.5 * std::sqrt(static_cast<double>(size)) + 8), 6 * u};
}

double Norm(const double* x, size_t size) {
  double sum = 0;
  for (size_t i = 0; i < size; ++i) sum += x[i] * x[i];
  return std::sqrt(sum);
}

// The norm of each column of a state [K][V].
Doubles ColumnNorms(const Doubles& state, size_t V) {
  Doubles norms(V, 0.0);
  for (size_t i = 0; i < state.size(); i += V) {
    for (size_t j = 0; j < V; ++j) norms[j] += state[i + j] * state[i + j];
  }
  for (double& norm : norms) norm = std::sqrt(norm);
  return norms;
}

// The norm of a token's transition.
double TransitionNorm(const Head& h, size_t t) {
  const double *a = &h.a[t * h.K], *r = &h.r[t * h.K];
  const double* k = h.before ? &h.b[t * h.K] : &h.k[t * h.K];
  Doubles x(h.K);
  for (size_t i = 0; i < h.K; ++i) x[i] = r[i] + k[i] + 0.1;
  double norm = 0;
  for (int step = 0; step < 12; ++step) {
    const double size = Norm(x.data(), h.K);
    if (size == 0) return 1;
    double found = 0;
    for (size_t i = 0; i < h.K; ++i) {
      x[i] /= size;
      found += (h.before ? 1 : a[i]) * r[i] * x[i];
    }
    for (size_t i = 0; i < h.K; ++i) x[i] = a[i] * x[i] + (h.before ? 1 : -1) * k[i] * found;
    norm = Norm(x.data(), h.K);
    double back = 0;
    for (size_t i = 0; i < h.K; ++i) back += k[i] * x[i];
    for (size_t i = 0; i < h.K; ++i) {
      x[i] = a[i] * x[i] + (h.before ? 1 : -a[i]) * r[i] * back;
    }
  }
  return std::max(norm * 1.02, *std::max_element(a, a + h.K));
}

// Errors along a head: of its columns of S, and of e or x, after each token.
struct ForwardErrors {
  std::vector<Doubles> state;  // [T + 1][V]
  Doubles found;               // [T, V]
  Doubles written;             // [T, V]: norms of each token's update, term by term
};

ForwardErrors ErrorsOf(const Head& h, DType dtype) {
  const Rounding e = RoundingOf(dtype, h.K);
  ForwardErrors errors;
  errors.state.push_back(Doubles(h.V, 0.0));
  errors.found.assign(h.T * h.V, 0.0);
  errors.written.assign(h.T * h.V, 0.0);
  Doubles S = h.S, found;
  for (size_t t = 0; t < h.T; ++t) {
    const double norm = TransitionNorm(h, t);
    const double key = Norm(&h.k[t * h.K], h.K), read = Norm(&h.r[t * h.K], h.K);
    const double second = Norm(&h.b[t * h.K], h.K);
    Doubles next(h.V);
    const Doubles sizes = ColumnNorms(S, h.V);
    Advance(h, t, S, found);
    const Doubles sizes_after = ColumnNorms(S, h.V);
    for (size_t j = 0; j < h.V; ++j) {
      const double size = sizes[j], after = sizes_after[j];
      const double w = std::abs(h.w[t * h.V + j]);
      const double last = errors.state[t][j];
      const double of_found = e.chain * (w + read * size) + e.decay * read * size;
      errors.found[t * h.V + j] = read * last + of_found;
      next[j] = norm * last + (h.before ? second : key) * of_found + e.decay * size +
                e.u * (size + 2 * after + key * w + key * std::abs(found[j])) + h.key_error * key * std::abs(found[j]);
      errors.written[t * h.V + j] = h.before ? key * w + second * std::abs(found[j]) : key * std::abs(found[j]);
    }
    errors.state.push_back(next);
  }
  return errors;
}

}  // namespace

void KeyGradients(const ReferenceBackwardInputs& in, const Options& options, const DeltaMath& math,
                  const TensorView& d_written, const TensorView& d_read) {
  mechanism::Clear(d_written);
  mechanism::Clear(d_read);
  ForEachHead(in, options, math, [&](const Place& place) {
    const Head h = HeadOf(math, in, place);
    const HeadGradients g = Backward(h, GradientsOfO(in, place, h.writes), StateOf(in.d_final.S, place, h.K, h.V));
    for (size_t at = 0; at < h.T * h.K; ++at) {
      const size_t t = at / h.K;
      const auto channel = static_cast<int64_t>(at % h.K);
      Add(d_written, {place.batch, place.tokens[t], place.key_head, channel}, g.k[at]);
      Add(d_read, {place.batch, place.tokens[t], place.key_head, channel}, h.beta[t] * h.erase[at] * g.r[at]);
    }
  });
}

void Tolerance(const ReferenceInputs& in, const Options& options, const DeltaMath& math,
               const ReferenceOutputs& expected, const ReferenceOutputs& tolerance) {
  const Epsilon e = EpsilonOf(in.q.dtype());
  mechanism::Clear(tolerance.o);
  ForEachHead(in, options, math, [&](const Place& place) {
    const Head h = HeadOf(math, in, place);
    const Rounding rounding = RoundingOf(in.q.dtype(), h.K);
    const ForwardErrors errors = ErrorsOf(h, in.q.dtype());
    Doubles S = h.S, found;
    for (size_t t = 0; t < h.T; ++t) {
      Advance(h, t, S, found);
      const double query = Norm(&h.q[t * h.K], h.K);
      const Doubles sizes = ColumnNorms(S, h.V);
      for (size_t j = 0; (t + 1) % h.writes == 0 && j < h.V; ++j) {
        const auto column = static_cast<int64_t>(j);
        const double value = At(expected.o, {place.batch, place.tokens[t], place.head, column});
        const double size = sizes[j];
        Put(tolerance.o, {place.batch, place.tokens[t], place.head, column},
            query * (errors.state[t + 1][j] + rounding.chain * size) + e.underflow + std::abs(value) * e.output +
                e.subnormal);
      }
    }
    Doubles of_state(h.K * h.V);
    for (size_t i = 0; i < of_state.size(); ++i) {
      of_state[i] = errors.state[h.T][i % h.V] + rounding.u * std::abs(S[i]) + e.underflow;
    }
    PutState(tolerance.final.S, place, of_state, h.V);
  });
}

void BackwardTolerance(const ReferenceBackwardInputs& in, const Options& options, const DeltaMath& math,
                       const ReferenceGradients& expected, const ReferenceGradients& tolerance) {
  const Epsilon e = EpsilonOf(in.q.dtype());
  ClearAll(tolerance);
  ForEachHead(in, options, math, [&](const Place& place) {
    const Head h = HeadOf(math, in, place);
    const size_t K = h.K, V = h.V;
    const Rounding by_key = RoundingOf(in.q.dtype(), K), by_value = RoundingOf(in.q.dtype(), V);
    const ForwardErrors forward = ErrorsOf(h, in.q.dtype());
    const Doubles d_o = GradientsOfO(in, place, h.writes);
    Doubles D = StateOf(in.d_final.S, place, K, V);
    const HeadGradients true_values = Backward(h, d_o, D);
    HeadGradients g(h);
    Doubles off(V, 0.0);    // errors of the columns of D
    Doubles late(V, 0.0);   // norms of the contribution of the next token's read key to them
    Doubles later(K, 0.0);  // errors of sums over later writes of a chunk
    size_t block = 64;
    while (block > 1 && block * h.writes > 64) block /= 2;
    block *= h.writes;
    AgainstTime(h, [&](size_t t, const Doubles& before, const Doubles& after, const Doubles& found) {
      const size_t at = t * K;
      const double query = Norm(&h.q[at], K), key = Norm(&h.k[at], K), read = Norm(&h.r[at], K);
      const double second = Norm(&h.b[at], K), norm = TransitionNorm(h, t);
      Doubles d_found(V, 0.0);
      if ((t + 1) % block == 0 || t + 1 == h.T) {  // <S, D> at the end of a chunk
        for (size_t i = 0; i < K; ++i) {
          later[i] = 0;
          for (size_t j = 0; j < V; ++j) {
            const double s = std::abs(after[i * V + j]), x = std::abs(D[i * V + j]);
            later[i] += s * off[j] + x * forward.state[t + 1][j] + by_value.chain * s * x;
          }
        }
      }
      const Doubles sizes_before = ColumnNorms(D, V);
      for (size_t i = 0; i < K; ++i) {
        for (size_t j = 0; j < V; ++j) {
          D[i * V + j] += h.q[at + i] * d_o[t * V + j];
          d_found[j] += D[i * V + j] * (h.before ? h.b[at + i] : h.k[at + i]);
        }
      }
      const Doubles sizes = ColumnNorms(D, V);
      const Doubles old_states = ColumnNorms(before, V);
      double of_q = 0, of_k = 0, of_r = 0, of_b = 0;
      for (size_t j = 0; j < V; ++j) {
        const double x = std::abs(d_o[t * V + j]), size = sizes[j], old = old_states[j];
        // The scale and the scaled query are rounded, and so are products on targets without FMA.
        off[j] += by_key.u * (2 * size + 3 * query * x);
        const double w = std::abs(h.w[t * V + j]), e_or_x = std::abs(found[j]);
        const double found_error = forward.found[t * V + j];
        const double apart = sizes_before[j] + query * x + 2 * late[j];  // instead of |D|
        of_q += x * (forward.state[t + 1][j] + by_value.chain * (old + forward.written[t * V + j]));
        const double of_w = key * (off[j] + (by_key.chain + h.key_error) * size);
        g.w[t * V + j] = of_w;
        const double found_off = h.before ? second * (off[j] + by_key.chain * size) : of_w;
        if (h.before) {
          of_k += w * (off[j] + by_value.chain * apart);
          of_b += e_or_x * (off[j] + by_value.chain * apart) + size * found_error;
        } else {
          of_k += e_or_x * (off[j] + by_value.chain * apart) + size * found_error;
        }
        const double written = std::abs(d_found[j]);
        const double last = h.before && t > 0 ? 2 * forward.written[(t - 1) * V + j] : 0;
        of_r += written * (forward.state[t][j] + by_value.chain * (old + last) + by_key.decay * old) + old * found_off;
        late[j] = h.before ? read * written : 0;
        off[j] = norm * off[j] + read * (h.before ? second : key) * (by_key.chain + h.key_error) * size +
                 by_key.decay * size + by_key.u * (2 * size + read * written);
      }
      for (size_t i = 0; i < K; ++i) {  // D before the token
        for (size_t j = 0; j < V; ++j) {
          double& d_ij = D[i * V + j];
          if (!h.before) d_ij -= h.r[at + i] * d_found[j];
          d_ij *= h.a[at + i];
          if (h.before) d_ij += h.r[at + i] * d_found[j];
        }
      }
      for (size_t i = 0; i < K; ++i) {
        g.q[at + i] = of_q + e.underflow;
        g.k[at + i] = of_k + e.underflow;
        g.r[at + i] = of_r + e.underflow;
        g.b[at + i] = of_b + e.underflow;
        const auto product = [&](const Doubles& x, const Doubles& dx, const Doubles& error) {
          return std::abs(x[at + i]) * (error[at + i] + 8 * by_key.u * std::abs(dx[at + i]));
        };
        later[i] += h.key_error * std::abs(h.k[at + i] * true_values.k[at + i]);
        later[i] +=
            product(h.q, true_values.q, g.q) + product(h.k, true_values.k, g.k) + product(h.r, true_values.r, g.r);
        if (h.before) later[i] += product(h.b, true_values.b, g.b);
        g.log_a[at + i] = later[i] + e.underflow;
      }
    });
    for (size_t i = 0; i < K * V; ++i) {
      g.S[i] = off[i % V] + by_key.u * std::abs(D[i]) + e.underflow;
    }
    AddGradients(math, h, place, g, true_values, by_key.chain, tolerance);
  });
  // Sums over value heads and the conversion to the result's dtype add one rounding each.
  const double u = RoundingOf(in.q.dtype(), 1).u;
  for (const auto& tensor : kTensors) {
    const TensorView& t = tolerance.*tensor.gradient;
    if (!t.present()) continue;
    const DType dtype = (in.*tensor.input).dtype();
    const Epsilon rounded = EpsilonOf(dtype);
    std::vector<int64_t> index(t.sizes().size(), 0);
    for (int64_t i = 0; i < t.num_elements(); ++i) {
      int64_t rest = i, to = 0, from = 0;
      for (int axis = t.rank() - 1; axis >= 0; --axis) {
        to += rest % t.size(axis) * t.stride(axis);
        from += rest % t.size(axis) * (expected.*tensor.gradient).stride(axis);
        rest /= t.size(axis);
      }
      const TensorView& values = expected.*tensor.gradient;
      const double value = std::abs(LoadAsDouble(values.dtype(), values.data(), from));
      const double error = LoadAsDouble(t.dtype(), t.data(), to);
      StoreDouble(t.dtype(), t.data(), to, error + value * (4 * u + rounded.output) + rounded.subnormal);
    }
  }
}

}  // namespace heed::recurrent
