// Mamba-3 in the harness: SISO and MIMO, biases, groups of heads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/ssm/mamba3/mamba3_internal.h"

namespace heed::mamba3 {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::FillEach;
using mechanism::Put;
using mechanism::ReferenceTensor;
using mechanism::Row;
using mechanism::Shape;

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// A call on magnitudes: it has no rotation, and both channels of a pair that is rotated have the length of the pair.
// Its results bound the sums of the magnitudes of all terms, to which rounding errors are relative.
//
// The engine's recurrence has the writes of two tokens in one, so that the reads of a token have beta_{t+1} (q . k) v
// too much, which is subtracted: twice these terms are added.
struct Magnitudes {
  const BackwardInputs& given;
  int64_t B, T, R, H, G, K, V, P;
  double scale, unit, error;  // error: of a sum, relative to magnitudes
  ReferenceTensor q, k, v, dt, theta, S, k_before, v_before, d_o, d_S, d_k, d_v;
  ReferenceTensor angle_error;  // [sequences, G, P]
  std::vector<mechanism::ReferenceSequence> sequences;
  bool reverse;
  BackwardInputs in;
  Options options;

  Magnitudes(const BackwardInputs& of, const Options& call)
      : given(of), B(of.q.size(0)), T(of.q.size(1)), R(of.q.size(2)), H(of.q.size(3)), G(of.v.size(3)), K(of.q.size(4)),
        V(of.v.size(4)), P(of.theta.size(3)), scale(std::abs(call.scale.value_or(1))),
        unit(of.q.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24), q({B, T, R, G, K}), k(q), v({B, T, R, G, V}),
        dt({B, T, G}), theta({B, T, G, P}), S({0}), k_before({0}), v_before({0}), d_o({0}), d_S({0}), d_k({0}),
        d_v({0}), angle_error({0}), sequences(mechanism::SequencesOf(call, B, T)), reverse(call.reverse),
        options(call) {
    Lengths(of.q, of.q_bias, q);
    Lengths(of.k, of.k_bias, k);
    v = Absolute(of.v);
    dt = Absolute(of.dt);
    in.q = q.view();
    in.k = k.view();
    in.v = v.view();
    in.log_decay = of.log_decay;
    in.dt = dt.view();
    in.trap = of.trap;
    in.theta = theta.view();
    const auto given_state = [](const ConstTensorView& t, ReferenceTensor& memory, ConstTensorView& to) {
      if (!t.present()) return;
      memory = Absolute(t);
      to = memory.view();
    };
    given_state(of.initial.S, S, in.initial.S);
    given_state(of.initial.k, k_before, in.initial.k);
    given_state(of.initial.v, v_before, in.initial.v);
    given_state(of.d_o, d_o, in.d_o);
    given_state(of.d_final.S, d_S, in.d_final.S);
    given_state(of.d_final.k, d_k, in.d_final.k);
    given_state(of.d_final.v, d_v, in.d_final.v);
    options.scale = scale;
    // A step of an angle is rounded in f64, and the angle to the dtype of computation; a decay has an error of a few
    // units per token.
    angle_error = ReferenceTensor({static_cast<int64_t>(sequences.size()), G, P});
    double largest = 0;
    ForEachHead([&](int64_t s, int64_t h) {
      for (int64_t p = 0; p < P; ++p) {
        double sum = of.initial.angle.present() ? std::abs(At(of.initial.angle, {s, h, p})) : 0;
        for (int64_t t = Sequence(s).begin; t < Sequence(s).end; ++t) {
          const int64_t b = Sequence(s).batch;
          sum += 4 * (std::numbers::pi + std::abs(At(of.dt, {b, t, h}) * At(of.theta, {b, t, h, p})));
        }
        Put(angle_error.view(), {s, h, p}, 0x1p-53 * sum + 4 * unit);
        largest = std::max(largest, 0x1p-53 * sum);
      }
    });
    error = unit * static_cast<double>(64 + 4 * T + K + V) + 2 * largest;
  }

  const mechanism::ReferenceSequence& Sequence(int64_t s) const { return sequences[static_cast<size_t>(s)]; }

  template <class F>
  void ForEachHead(const F& f) const {
    for (size_t s = 0; s < sequences.size(); ++s) {
      for (int64_t h = 0; h < G; ++h) f(static_cast<int64_t>(s), h);
    }
  }
  // Calls f(s, b, t, next, h) for all tokens, from the last to the first of each head; next is -1 after the last one.
  template <class F>
  void ForEachToken(const F& f) const {
    ForEachHead([&](int64_t s, int64_t h) {
      const auto& range = Sequence(s);
      int64_t next = -1;
      for (int64_t i = 0; i < range.end - range.begin; ++i) {
        const int64_t t = reverse ? range.begin + i : range.end - 1 - i;
        f(s, range.batch, t, next, h);
        next = t;
      }
    });
  }
  DType state_dtype() const { return mechanism::StateDType(given.q.dtype()); }
  double Rest(int64_t b, int64_t t, int64_t h) const { return Sigmoid(-At(in.trap, {b, t, h})); }
  double Lambda(int64_t b, int64_t t, int64_t h) const { return Sigmoid(At(in.trap, {b, t, h})); }
  double NextBeta(int64_t b, int64_t next, int64_t h) const {
    return next < 0 ? 0 : Rest(b, next, h) * At(in.dt, {b, next, h});
  }
  double Dot(const ReferenceTensor& x, const ReferenceTensor& y, int64_t b, int64_t t, int64_t r, int64_t of,
             int64_t h) const {
    double sum = 0;
    for (int64_t i = 0; i < x.sizes[4]; ++i) sum += At(x.view(), {b, t, r, h, i}) * At(y.view(), {b, t, of, h, i});
    return sum;
  }

  static ReferenceTensor Absolute(const ConstTensorView& t) {
    ReferenceTensor result({t.sizes().begin(), t.sizes().end()});
    Shape at(t.sizes().size());
    for (double& value : result.values) {
      value = std::abs(GetElement(t, at));
      NextIndex(t.sizes(), at);
    }
    return result;
  }

 private:
  void Lengths(const ConstTensorView& x, const ConstTensorView& bias, ReferenceTensor& lengths) const {
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t r = 0; r < R; ++r) {
          for (int64_t h = 0; h < G; ++h) {
            const auto element = [&](int64_t i) {
              const double added = bias.present() ? std::abs(At(bias, {h, r, i})) : 0;
              return std::abs(At(x, {b, t, r, h / (G / H), i})) + added;
            };
            for (int64_t i = 0; i < K; ++i) {
              // std::hypot is glibc 2.35's where it is newest, and programs that call it need that glibc.
              const double own = element(i), other = i < 2 * P ? element(i ^ 1) : 0.0;
              Put(lengths.view(), {b, t, r, h, i}, std::sqrt(own * own + other * other));
            }
          }
        }
      }
    }
  }
};

// Adds to a tolerance what rounding to the dtype of a tensor adds.
void Round(DType dtype, const TensorView& expected, const TensorView& tolerance) {
  const auto e = recurrent::EpsilonOf(dtype);
  for (int64_t i = 0; tolerance.present() && i < tolerance.num_elements(); ++i) {
    tolerance.as<double>()[i] += std::abs(expected.as<double>()[i]) * e.output + e.subnormal;
  }
}
void Fill(const TensorView& t, const ReferenceTensor& from, double factor) {
  for (int64_t i = 0; t.present() && i < t.num_elements(); ++i) {
    t.as<double>()[i] = factor * from.values[static_cast<size_t>(i)];
  }
}

void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance) {
  BackwardInputs given;
  static_cast<Inputs&>(given) = in;
  const Magnitudes m(given, options);
  const auto sequences = static_cast<int64_t>(m.sequences.size());
  ReferenceTensor o(m.v.sizes), S({sequences, m.G, m.K, m.V}), k({sequences, m.R, m.G, m.K});
  Reference(m.in, m.options, {o.view(), {S.view(), {}, k.view(), {}}});
  m.ForEachToken([&](int64_t, int64_t b, int64_t t, int64_t next, int64_t h) {
    const double beta = m.NextBeta(b, next, h);
    for (int64_t r = 0; r < m.R; ++r) {
      for (int64_t of = 0; of < m.R; ++of) {
        const double own = 2 * m.scale * beta * m.Dot(m.q, m.k, b, t, r, of, h);
        for (int64_t j = 0; j < m.V; ++j) Add(o.view(), {b, t, r, h, j}, own * At(m.in.v, {b, t, of, h, j}));
      }
    }
  });
  Fill(tolerance.o, o, m.error);
  Round(in.q.dtype(), expected.o, tolerance.o);
  Fill(tolerance.final.S, S, m.error);
  Fill(tolerance.final.k, k, m.error);
  mechanism::Clear(tolerance.final.v);  // a copy
  Round(m.state_dtype(), expected.final.S, tolerance.final.S);
  Round(m.state_dtype(), expected.final.k, tolerance.final.k);
  m.ForEachHead([&](int64_t s, int64_t h) {
    for (int64_t p = 0; tolerance.final.angle.present() && p < m.P; ++p) {
      const double error = At(m.angle_error.view(), {s, h, p});
      const bool at_the_end = std::numbers::pi - std::abs(At(expected.final.angle, {s, h, p})) <= 2 * error;
      Put(tolerance.final.angle, {s, h, p}, error + (at_the_end ? 2 * std::numbers::pi : 0));
    }
  });
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Magnitudes m(in, options);
  const auto sequences = static_cast<int64_t>(m.sequences.size());
  ReferenceTensor dq(m.q.sizes), dk(dq), dv(m.v.sizes), dg(m.dt.sizes), ddt(dg), dtrap(dg), d_gamma(dg), d_beta(dg);
  ReferenceTensor S({sequences, m.G, m.K, m.V}), k({sequences, m.R, m.G, m.K}), v({sequences, m.R, m.G, m.V});
  Gradients gradients;
  gradients.q = dq.view();
  gradients.k = dk.view();
  gradients.v = dv.view();
  gradients.log_decay = dg.view();
  gradients.dt = ddt.view();
  gradients.trap = dtrap.view();
  gradients.initial = {S.view(), {}, k.view(), v.view()};
  BackwardReference(m.in, m.options, gradients);

  // dgamma and dbeta, from ddt = lambda dgamma + rest dbeta and dtrap = lambda rest dt (dgamma - dbeta).
  m.ForEachToken([&](int64_t, int64_t b, int64_t t, int64_t, int64_t h) {
    const double rest = m.Rest(b, t, h), lambda = m.Lambda(b, t, h), factor = lambda * rest * At(m.in.dt, {b, t, h});
    const double difference = factor == 0 ? 0 : At(dtrap.view(), {b, t, h}) / factor;
    Put(d_gamma.view(), {b, t, h}, At(ddt.view(), {b, t, h}) + rest * difference);
    Put(d_beta.view(), {b, t, h}, At(ddt.view(), {b, t, h}) - lambda * difference);
  });
  m.ForEachToken([&](int64_t, int64_t b, int64_t t, int64_t next, int64_t h) {
    const double beta = m.NextBeta(b, next, h);
    for (int64_t r = 0; r < m.R; ++r) {
      for (int64_t of = 0; of < m.R; ++of) {
        const double product = 2 * m.scale * m.Dot(m.d_o, m.v, b, t, r, of, h), dot = m.Dot(m.q, m.k, b, t, r, of, h);
        for (int64_t i = 0; i < m.K; ++i) {
          Add(dq.view(), {b, t, r, h, i}, beta * product * At(m.in.k, {b, t, of, h, i}));
          Add(dk.view(), {b, t, of, h, i}, beta * product * At(m.in.q, {b, t, r, h, i}));
        }
        for (int64_t j = 0; j < m.V; ++j) {
          Add(dv.view(), {b, t, of, h, j}, 2 * m.scale * beta * dot * At(m.in.d_o, {b, t, r, h, j}));
        }
        Add(d_gamma.view(), {b, t, h}, dot * product);
        if (next >= 0) Add(d_beta.view(), {b, next, h}, dot * product);
      }
    }
  });
  // The pairs of channels that the rotation mixes.
  for (ReferenceTensor* x : {&dq, &dk}) {
    ReferenceTensor pairs = *x;
    for (size_t row = 0; row < x->values.size(); row += static_cast<size_t>(m.K)) {
      for (size_t i = 0; i < static_cast<size_t>(2 * m.P); ++i) pairs.values[row + i] += x->values[row + (i ^ 1)];
    }
    *x = pairs;
  }

  for (const TensorView* t : {&tolerance.q, &tolerance.k, &tolerance.q_bias, &tolerance.k_bias}) mechanism::Clear(*t);
  std::vector<double> angle(static_cast<size_t>(m.P));
  double in_block = 0, earlier = 0;
  int64_t tokens = 0;
  m.ForEachToken([&](int64_t s, int64_t b, int64_t t, int64_t next, int64_t h) {
    const double e = m.error;
    if (next < 0) {
      for (int64_t p = 0; p < m.P; ++p) {
        angle[static_cast<size_t>(p)] = in.d_final.angle.present() ? std::abs(At(in.d_final.angle, {s, h, p})) : 0;
      }
      in_block = earlier = 0;
      tokens = 0;
    }
    double products = 0;
    for (int64_t r = 0; r < m.R; ++r) {
      for (int64_t i = 0; i < m.K; ++i) {
        const double of_q = At(dq.view(), {b, t, r, h, i}), of_k = At(dk.view(), {b, t, r, h, i});
        Add(tolerance.q, {b, t, r, h / (m.G / m.H), i}, e * of_q);
        Add(tolerance.k, {b, t, r, h / (m.G / m.H), i}, e * of_k);
        Add(tolerance.q_bias, {h, r, i}, e * of_q);
        Add(tolerance.k_bias, {h, r, i}, e * of_k);
        const double both = At(m.in.q, {b, t, r, h, i}) * of_q + At(m.in.k, {b, t, r, h, i}) * of_k;
        products += both;
        if (i < 2 * m.P) angle[static_cast<size_t>(i / 2)] += both;
      }
    }
    // The gradient of a decay is a sum over the tokens of a block, of which those of the same block may cancel.
    if (tokens++ % 64 == 0) earlier = std::exchange(in_block, 0);
    in_block += products;
    Put(tolerance.log_decay, {b, t, h}, e * (At(dg.view(), {b, t, h}) + in_block + earlier));
    const double delta = At(m.in.dt, {b, t, h}), rest = m.Rest(b, t, h), lambda = m.Lambda(b, t, h);
    double of_delta = lambda * At(d_gamma.view(), {b, t, h}) + rest * At(d_beta.view(), {b, t, h});
    for (int64_t p = 0; p < m.P; ++p) {
      const double sum = angle[static_cast<size_t>(p)];
      of_delta += std::abs(At(in.theta, {b, t, h, p})) * sum;
      Put(tolerance.theta, {b, t, h, p}, e * delta * sum);
    }
    Put(tolerance.dt, {b, t, h}, e * of_delta);
    Put(tolerance.trap, {b, t, h},
        e * lambda * rest * delta * (At(d_gamma.view(), {b, t, h}) + At(d_beta.view(), {b, t, h})));
    const auto& range = m.Sequence(s);
    if (t != (m.reverse ? range.end - 1 : range.begin)) return;
    for (int64_t p = 0; p < m.P; ++p) Put(tolerance.initial.angle, {s, h, p}, e * angle[static_cast<size_t>(p)]);
  });
  Fill(tolerance.v, dv, m.error);
  Fill(tolerance.initial.S, S, m.error);
  Fill(tolerance.initial.k, k, m.error);
  Fill(tolerance.initial.v, v, m.error);
  m.ForEachHead([&](int64_t s, int64_t h) {  // gradients of states of sequences without tokens are copies
    const auto& range = m.Sequence(s);
    for (int64_t p = 0; range.end == range.begin && p < m.P; ++p) Put(tolerance.initial.angle, {s, h, p}, 0);
  });
  const auto round = [](const ConstTensorView& of, const TensorView& value, const TensorView& to) {
    if (to.present()) Round(of.dtype(), value, to);
  };
  round(in.q, expected.q, tolerance.q);
  round(in.k, expected.k, tolerance.k);
  round(in.v, expected.v, tolerance.v);
  round(in.log_decay, expected.log_decay, tolerance.log_decay);
  round(in.dt, expected.dt, tolerance.dt);
  round(in.trap, expected.trap, tolerance.trap);
  round(in.theta, expected.theta, tolerance.theta);
  round(in.q_bias, expected.q_bias, tolerance.q_bias);
  round(in.k_bias, expected.k_bias, tolerance.k_bias);
  for (const auto& [value, to] :
       {std::pair(&expected.initial.S, &tolerance.initial.S),
        std::pair(&expected.initial.angle, &tolerance.initial.angle),
        std::pair(&expected.initial.k, &tolerance.initial.k), std::pair(&expected.initial.v, &tolerance.initial.v)}) {
    if (to->present()) Round(m.state_dtype(), *value, *to);
  }
}

mechanism::Mechanism MechanismOf() {
  mechanism::Mechanism m;
  m.name = "mamba3";
  mechanism::Bind<Structs, Options>(mechanism::Members(kTensors), mechanism::Members(kStates), kTensors.v.axes, {},
                                    {HEED_FUNCTIONS, &Tolerance, &BackwardTolerance}, m);
  return m;
}

class Maker : public mechanism::Maker {
 public:
  using mechanism::Maker::Maker;

 private:
  // Gradients of constants are sums over all tokens, which can overflow f16.
  DType OfConstants() { return dtype_ == DType::kF16 || Chance(0.5) ? wide() : dtype_; }

  void DrawSizes() override {
    sizes_.H = Integer(1, 2);
    sizes_.G = sizes_.H * random_.Pick<int64_t>({1, 1, 2, 3});
    sizes_.N = random_.Pick<int64_t>({1, 1, 2, 3});
    sizes_.K = std::max<int64_t>(Channels(), 2);
    sizes_.V = Channels();
    sizes_.P = Chance(0.3) ? sizes_.K / 2 : Integer(1, sizes_.K / 2);
    if (sizes_.N > 1) sizes_.T = std::min<int64_t>(sizes_.T, 67);
  }
  ConstTensorView DrawInput(const Row& row) override {
    if (row.optional && Chance(0.5)) return {};
    const bool per_token = row.over_tokens();
    const DType dtype = !per_token ? OfConstants() : row.type == mechanism::kWide && Chance(0.5) ? wide() : dtype_;
    if (!per_token) return Keep(Buffer(dtype, ShapeOf(row.axes)).FillNormal(NextSeed()));
    const bool rows = row.axes.back() != 'G';
    return Keep(FillInput(row, AnyLayout(dtype, ShapeOf(row.axes), rows), Chance(0.2) ? 8 : 1));
  }
  // `strong` values are larger.
  const Buffer& FillInput(const Row& row, const Buffer& buffer, double strong) {
    if (row.values == mechanism::kDecays) {
      return FillEach(buffer, NextSeed(),
                      [=](Random& random) { return 0.2 * strong * std::log(1 - random.Uniform()); });
    }
    if (row.values == mechanism::kFractions) {
      return FillEach(buffer, NextSeed(), [](Random& random) { return std::exp(random.Uniform(-4, 0)); });
    }
    if (row.name == "trap" || row.name == "theta") {
      return FillEach(buffer, NextSeed(), [=](Random& random) { return strong * random.Normal(); });
    }
    return buffer.FillNormal(NextSeed());
  }
  void DrawOptions() override {
    if (Chance(0.3)) p_.options.scale = random_.Uniform(-1, 1.5);
  }

  void SetSizes(const Sizes& s) override {
    sizes_.H = s.Hkv;
    sizes_.G = s.Hq;
    sizes_.K = std::max<int64_t>(s.D, 2);
    sizes_.V = s.Dv;
    sizes_.P = std::max<int64_t>(sizes_.K / 4, 1);
    sizes_.N = static_cast<int64_t>(words_.Number("rank", 4).value_or(1));
  }
  ConstTensorView MakeInput(const Row& row) override {
    if (row.optional && !words_.Has("bias")) return {};
    const Buffer buffer(row.over_tokens() || dtype_ != DType::kF16 ? dtype_ : wide(), ShapeOf(row.axes),
                        Placement::kAligned);
    return Keep(FillInput(row, buffer, words_.Has("strong") ? 8 : 1));
  }
  double Flops(int64_t tokens, bool backward) override {
    return (backward ? 14 : 4) * static_cast<double>(sizes_.B * tokens * sizes_.G * sizes_.N * sizes_.K * sizes_.V);
  }
};

const mechanism::Mechanism& Plain() {
  static const mechanism::Mechanism mechanism = MechanismOf();
  return mechanism;
}
Case MakeCase(const CaseRequest& request) { return Maker(Plain(), request.dtype, request.seed).MakeCase(request); }
Case RandomCase(DType dtype, uint64_t seed) { return Maker(Plain(), dtype, seed).RandomCase(); }

}  // namespace

OpEntry Entry() {
  std::vector<std::string> variants = recurrent::kVariants;
  variants.insert(variants.end(), {"bias", "rank=4", "rank=2+bias", "strong"});
  OpEntry entry = mechanism::EntryOf({.family = "ssm",
                                      .variants = variants,
                                      .flops = "4 R D Dv per token and value head, backward 14 R D Dv",
                                      .bytes = "B Tq R (2 Hkv D + 2 Hq Dv) size",
                                      .state = "B Hq (D Dv + R (D + Dv) + P) 4",
                                      .make_case = &MakeCase,
                                      .random_case = &RandomCase},
                                     Plain());
  for (InputSpec& input : entry.inputs) {  // value heads are heads too
    std::replace(input.axes.begin(), input.axes.end(), 'G', 'H');
  }
  return entry;
}

}  // namespace heed::mamba3
