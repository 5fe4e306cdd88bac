// H3 in the harness.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "heed/harness/mechanism/modes_case.h"
#include "heed/harness/mechanism/scanning_case.h"
#include "heed/ops/ssm/h3/h3_internal.h"

namespace heed::h3 {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Put;
using scanning::Complexes;
using scanning::Doubles;
using scanning::Epsilon;
using scanning::EpsilonOf;
using scanning::Inexact;
using scanning::ModePasses;
using scanning::ModesRow;
using scanning::Stored;

// One head of a sequence, with all intermediate values.
struct Head {
  scanning::ChannelPlace place;       // whose channel is the head
  std::vector<Doubles> q, v, k_plus;  // [d][T]; for k preceded by the W - 1 keys of the tail
  std::vector<Doubles> taps;          // [d][W], including shift_D
  std::vector<Doubles> keys;          // k': [d][T]
  scanning::ModesRow modes;

  size_t T() const { return place.tokens.size(); }
  size_t d() const { return q.size(); }
  size_t tail() const { return d() == 0 ? 0 : taps[0].size() - 1; }
  int64_t ChannelOf(size_t i) const { return place.channel * static_cast<int64_t>(d()) + static_cast<int64_t>(i); }
};

Doubles RowOf(const ConstTensorView& x, const Head& head, size_t i) {
  Doubles row;
  for (const int64_t token : head.place.tokens) {
    row.push_back(At(x, {head.place.batch, token, head.place.channel, static_cast<int64_t>(i)}));
  }
  return row;
}

// [B, W - 1, H, d]; zeros if absent.
Doubles TailOf(const ConstTensorView& x, const Head& head, size_t i, size_t count) {
  Doubles row(count, 0.0);
  for (size_t s = 0; s < count && x.present(); ++s) {
    row[s] = At(x, {head.place.sequence, static_cast<int64_t>(s), head.place.channel, static_cast<int64_t>(i)});
  }
  return row;
}

Complexes StateOf(const ConstTensorView& x, const Head& head, size_t i, size_t j, double sign) {
  Complexes h(head.modes.N());
  for (size_t n = 0; n < h.size() && x.present(); ++n) {
    const auto at = [&](int64_t part) {
      return At(x, {head.place.sequence, head.place.channel, static_cast<int64_t>(i), static_cast<int64_t>(j),
                    static_cast<int64_t>(n), part});
    };
    h[n] = {at(0), sign * at(1)};
  }
  return h;
}

void ForEachHead(const Inputs& in, const Options& options, const std::function<void(const Head&)>& f) {
  const auto d = static_cast<size_t>(in.q.size(3)), W = static_cast<size_t>(in.shift.size(1));
  for (const auto& place : scanning::PlacesOf(in.q.size(0), in.q.size(1), in.q.size(2), options)) {
    Head head;
    head.place = place;
    head.modes = scanning::ModesOf(scanning::ModesIn(in), false, place.channel);
    for (size_t i = 0; i < d; ++i) {
      head.q.push_back(RowOf(in.q, head, i));
      head.v.push_back(RowOf(in.v, head, i));
      Doubles k = TailOf(in.initial.tail, head, i, W - 1);
      for (const double key : RowOf(in.k, head, i)) k.push_back(key);
      head.k_plus.push_back(k);
    }
    for (size_t i = 0; i < d; ++i) {
      Doubles taps, keys(head.T(), 0.0);
      const int64_t channel = head.ChannelOf(i);
      for (size_t s = 0; s < W; ++s) taps.push_back(At(in.shift, {channel, static_cast<int64_t>(s)}));
      if (in.shift_D.present()) taps[0] += At(in.shift_D, {channel});
      for (size_t t = 0; t < head.T(); ++t) {
        for (size_t s = 0; s < W; ++s) keys[t] += taps[s] * head.k_plus[i][t + W - 1 - s];
      }
      head.taps.push_back(taps);
      head.keys.push_back(keys);
    }
    f(head);
  }
}

// Sets `row`, initialised with the head's modes, to that of k'_i v_j, reusing the memory of the previous row.
void SetRow(const Inputs& in, const Head& head, size_t i, size_t j, scanning::ModesRow& row) {
  if (row.h.empty()) row.h.emplace_back();
  row.h[0] = StateOf(in.initial.S, head, i, j, 1);
  row.u.resize(head.T());
  for (size_t t = 0; t < head.T(); ++t) row.u[t] = head.keys[i][t] * head.v[j][t];
  scanning::TakeStatesThrough(row);
}

// Gradients of the outputs, [d][T]; of the final tail, [d][W - 1]; and of the final states of a row.
std::vector<Doubles> IncomingOf(const BackwardInputs& in, const Head& head) {
  std::vector<Doubles> rows;
  for (size_t j = 0; j < head.d(); ++j) rows.push_back(RowOf(in.d_o, head, j));
  return rows;
}
std::vector<Doubles> IncomingTailOf(const BackwardInputs& in, const Head& head) {
  std::vector<Doubles> rows;
  for (size_t i = 0; i < head.d(); ++i) rows.push_back(TailOf(in.d_final.tail, head, i, head.tail()));
  return rows;
}
Complexes IncomingOf(const BackwardInputs& in, const Head& head, size_t i, size_t j) {
  return StateOf(in.d_final.S, head, i, j, -1);
}

bool HasTaps(const Inputs& in, const Options& options, bool states) {
  return scanning::IsConvolved(in.log_A_real.size(1), options.method == Method::kAuto,
                               options.method == Method::kConvolution, states);
}

// Magnitudes of a channel's taps; shift and shift_D are separate, since they may cancel.
Doubles TapSizes(const Inputs& in, const Head& head, size_t i) {
  Doubles sizes;
  const int64_t channel = head.ChannelOf(i);
  for (size_t s = 0; s <= head.tail(); ++s) {
    sizes.push_back(std::abs(At(in.shift, {channel, static_cast<int64_t>(s)})));
  }
  if (in.shift_D.present()) sizes[0] += std::abs(At(in.shift_D, {channel}));
  return sizes;
}

// k' is a chain of taps, each rounded once.
std::vector<Inexact> KeysOf(const Inputs& in, const Head& head, double u) {
  std::vector<Inexact> keys;
  const double chain = (static_cast<double>(head.tail()) + 4) * u;
  for (size_t i = 0; i < head.d(); ++i) {
    Inexact row;
    const Doubles sizes = TapSizes(in, head, i);
    for (size_t t = 0; t < head.T(); ++t) {
      double size = 0;
      for (size_t s = 0; s < sizes.size(); ++s) {
        size += sizes[s] * std::abs(head.k_plus[i][t + head.tail() - s]);
      }
      row.Add(head.keys[i][t], chain * size);
    }
    keys.push_back(row);
  }
  return keys;
}

// x y, where y is exact.
Inexact Product(const Inexact& x, const Doubles& y, double u) {
  Inexact product;
  for (size_t t = 0; t < y.size(); ++t) {
    const double value = x.values[t] * y[t], error = x.errors[t] * std::abs(y[t]);
    product.Add(value, error + u * (std::abs(value) + error));
  }
  return product;
}

// Sums of d products x y, where x has the given errors and y the largest possible.
class Sums {
 public:
  Sums(size_t T, size_t d, double u) : values_(T), errors_(T), chain_((static_cast<double>(d) + 2) * u) {}
  void Add(size_t t, double x, double of_x, double y, double of_y = 0) {
    const double error = of_x * (std::abs(y) + of_y) + std::abs(x) * of_y;
    values_[t] += x * y;
    errors_[t] += error + chain_ * (std::abs(x * y) + error);
  }
  double value(size_t t) const { return values_[t]; }
  double error(size_t t) const { return errors_[t]; }

 private:
  Doubles values_, errors_;
  double chain_;
};

void PutStates(const TensorView& to, const Head& head, size_t i, size_t j, size_t n, double error) {
  for (const int64_t part : {0, 1}) {
    Put(to,
        {head.place.sequence, head.place.channel, static_cast<int64_t>(i), static_cast<int64_t>(j),
         static_cast<int64_t>(n), part},
        error);
  }
}
void PutTail(const TensorView& to, const Head& head, size_t i, size_t s, double error) {
  Put(to, {head.place.sequence, static_cast<int64_t>(s), head.place.channel, static_cast<int64_t>(i)}, error);
}
void PutToken(const TensorView& to, const Head& head, size_t t, size_t channel, double error) {
  Put(to, {head.place.batch, head.place.tokens[t], head.place.channel, static_cast<int64_t>(channel)}, error);
}

void Tolerance(const Inputs& in, const Options& options, const Outputs&, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.q.dtype());
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.q.dtype()));
  const bool has_taps = HasTaps(in, options, in.initial.S.present() || tolerance.final.S.present());
  mechanism::Clear(tolerance.o);
  ForEachHead(in, options, [&](const Head& head) {
    const std::vector<Inexact> keys = KeysOf(in, head, e.unit);
    const Inexact taps = has_taps ? TapsOf(head.modes, head.T(), e.unit) : Inexact();
    ModesRow row = head.modes;
    for (size_t j = 0; j < head.d(); ++j) {
      Sums o(head.T(), head.d(), e.unit);
      for (size_t i = 0; i < head.d(); ++i) {
        SetRow(in, head, i, j, row);
        const Inexact x = Product(keys[i], head.v[j], e.unit);
        const ModePasses passes = StatePasses(row, x, e.unit);
        const Doubles errors = has_taps ? ConvolvedErrors(row, taps, x, false, in.q.size(1), e.unit)
                                        : OutputErrors(row, x, false, passes, e.unit);
        for (size_t t = 0; t < head.T(); ++t) o.Add(t, row.OutputAt(t), errors[t], head.q[i][t]);
        for (size_t n = 0; n < row.N(); ++n) {
          const double error = head.T() == 0 ? 0 : StateError(passes[n]) + state.least;
          PutStates(tolerance.final.S, head, i, j, n, error);
        }
      }
      for (size_t t = 0; t < head.T(); ++t) {
        PutToken(tolerance.o, head, t, j, Stored(o.value(t), o.error(t), e));
      }
      for (size_t s = 0; s < head.tail(); ++s) PutTail(tolerance.final.tail, head, j, s, 0);
    }
  });
}

// Converts gradients of k' of one channel to those of taps, keys and the tail.
void KeyTolerance(const Inputs& in, const Head& head, size_t i, const Sums& dkeys, const Doubles& of_tail,
                  const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.q.dtype());
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.q.dtype()));
  const double u = e.unit;
  const size_t tail = head.tail(), T = head.T();
  const Doubles sizes = TapSizes(in, head, i);
  const double chain = (static_cast<double>(tail) + 5) * u;
  const double sums = (132 + (in.q.dtype() == DType::kF64 ? static_cast<double>(T) / 128 : 1)) * u;
  Doubles dk(T + tail, 0.0), errors(T + tail, 0.0);
  for (size_t t = 0; t < T; ++t) {
    const double size = std::abs(dkeys.value(t)), error = dkeys.error(t);
    for (size_t s = 0; s <= tail; ++s) {
      dk[t + tail - s] += head.taps[i][s] * dkeys.value(t);
      errors[t + tail - s] += sizes[s] * (error + chain * (size + error));
      const double of_shift = std::abs(head.k_plus[i][t + tail - s]) * (error + sums * (size + error));
      Add(tolerance.shift, {head.ChannelOf(i), static_cast<int64_t>(s)}, of_shift + e.least);
      if (s == 0) Add(tolerance.shift_D, {head.ChannelOf(i)}, of_shift + e.least);
    }
  }
  for (size_t s = 0; s < tail; ++s) {
    dk[T + s] += of_tail[s];
    errors[T + s] += u * std::abs(of_tail[s]);
  }
  for (size_t t = 0; t < T; ++t) {
    PutToken(tolerance.k, head, t, i, Stored(dk[t + tail], errors[t + tail], e));
  }
  for (size_t s = 0; s < tail; ++s) {
    PutTail(tolerance.initial.tail, head, i, s, T == 0 ? 0 : 1.01 * errors[s] + state.least);
  }
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.q.dtype());
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.q.dtype()));
  const double u = e.unit;
  const bool is_f64 = in.q.dtype() == DType::kF64;
  const bool has_taps =
      HasTaps(in, options, in.initial.S.present() || in.d_final.S.present() || tolerance.initial.S.present());
  for (const TensorView* t :
       {&tolerance.q, &tolerance.k, &tolerance.v, &tolerance.shift, &tolerance.log_dt, &tolerance.log_A_real,
        &tolerance.A_imag, &tolerance.C, &tolerance.D, &tolerance.shift_D}) {
    mechanism::Clear(*t);
  }
  std::map<int64_t, scanning::TapGradients> of_taps;  // per head, over all its rows
  const int64_t most = in.q.size(1);
  const auto rows = static_cast<size_t>(in.q.size(3) * in.q.size(3) * in.q.size(0));
  ForEachHead(in, options, [&](const Head& head) {
    const size_t T = head.T(), d = head.d();
    const int64_t h = head.place.channel;
    const std::vector<Inexact> keys = KeysOf(in, head, u);
    const Inexact taps = has_taps ? TapsOf(head.modes, T, u) : Inexact();
    ModesRow row = head.modes;
    const std::vector<Doubles> d_o = IncomingOf(in, head), of_tail = IncomingTailOf(in, head);
    std::vector<Sums> dv(d, Sums(T, d, u));
    for (size_t i = 0; i < d; ++i) {
      Sums dq(T, d, u), dkeys(T, d, u);
      for (size_t j = 0; j < d; ++j) {
        SetRow(in, head, i, j, row);
        const Inexact x = Product(keys[i], head.v[j], u), dy = Product(Inexact(head.q[i]), d_o[j], u);
        const Inexact back = dy.Reversed();
        const Complexes last = IncomingOf(in, head, i, j);
        const auto l = GradientsOf(row, dy.values, last);
        const ModePasses passes = GradientPasses(row, back, last, u);
        const Doubles of_y = has_taps ? ConvolvedErrors(row, taps, x, false, most, u)
                                      : OutputErrors(row, x, false, StatePasses(row, x, u), u);
        const Doubles of_dx =
            has_taps ? ConvolvedErrors(row, taps, back, true, most, u) : OutputErrors(row, back, true, passes, u);
        for (size_t t = 0; t < T; ++t) {
          const double dx = row.InputGradientAt(t, dy.values, l), error = of_dx[T - 1 - t];
          dq.Add(t, row.OutputAt(t), of_y[t], d_o[j][t]);
          dkeys.Add(t, dx, error, head.v[j][t]);
          dv[j].Add(t, dx, error, keys[i].values[t], keys[i].errors[t]);
          const double of_D = 132 * u * std::abs(x.values[t] * dy.values[t]) + std::abs(dy.values[t]) * x.errors[t] +
                              std::abs(x.values[t]) * dy.errors[t];
          Add(tolerance.D, {h}, 1.01 * of_D + e.least);
        }
        for (size_t n = 0; n < row.N(); ++n) {
          const double error = InitialGradientError(row.modes[n], passes[n], u) + state.least;
          PutStates(tolerance.initial.S, head, i, j, n, T == 0 ? 0 : error);
        }
        if (has_taps) {
          of_taps[h].Add(x, dy, most, is_f64, u);
        } else {
          AddParameterErrors(row, x, dy, last, is_f64, u, scanning::ModesIn(tolerance), rows);
        }
      }
      for (size_t t = 0; t < T; ++t) PutToken(tolerance.q, head, t, i, Stored(dq.value(t), dq.error(t), e));
      KeyTolerance(in, head, i, dkeys, of_tail[i], tolerance);
    }
    for (size_t j = 0; j < d; ++j) {
      for (size_t t = 0; t < T; ++t) {
        PutToken(tolerance.v, head, t, j, Stored(dv[j].value(t), dv[j].error(t), e));
      }
    }
  });
  for (const auto& [h, taps] : of_taps) {
    taps.AddParameterErrors(scanning::ModesOf(scanning::ModesIn(in), false, h), is_f64, u,
                            scanning::ModesIn(tolerance));
  }
  const std::pair<const ConstTensorView&, TensorView Gradients::*> sums[] = {
      {in.shift, &Gradients::shift},    {in.log_dt, &Gradients::log_dt}, {in.log_A_real, &Gradients::log_A_real},
      {in.A_imag, &Gradients::A_imag},  {in.C, &Gradients::C},           {in.D, &Gradients::D},
      {in.shift_D, &Gradients::shift_D}};
  for (const auto& [input, gradient] : sums) {
    scanning::RoundSums(input, expected.*gradient, tolerance.*gradient);
  }
}

scanning::Mechanism MechanismOf(const Options& options) {
  const char* const methods[] = {"", " recurrent", " convolution"};
  return scanning::Bound<Structs, Options>(
      "h3", DefinitionOf(options), options,
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS, &Tolerance, &BackwardTolerance},
      methods[static_cast<int>(options.method)]);
}

// Hq D channels in heads of d = 8, or of D where it is less, T = Tq tokens, N = 32 modes, W = 4 taps.
Case MakeCase(const CaseRequest& request) {
  Options options;
  scanning::Choice choice;
  choice.states = 32;
  const mechanism::Words words(request.variant);
  if (words.Has("convolution")) options.method = Method::kConvolution;
  if (const auto number = words.Number("modes")) choice.states = static_cast<int64_t>(*number);
  if (words.Has("taps=1")) choice.shifts = 1;
  if (words.Has("heads=1")) choice.head_channels = 1;
  return scanning::MakeCase(MechanismOf(options), request, choice);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Options options;
  options.method = static_cast<Method>(seed % 3);
  return scanning::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  std::vector<std::string> variants = scanning::kVariants;
  variants.insert(variants.end(), {"convolution", "modes=5", "taps=1", "heads=1"});
  return scanning::EntryOf(
      MechanismOf({}), {.family = "ssm",
                        .variants = variants,
                        .flops = "8 N d per token and channel, backward 24 N d; Hq D channels, heads of d <= 8, N = 32",
                        .bytes = "4 B Tq Hq D size",
                        .state = "B Hq D (d N 8 + 12)",
                        .make_case = &MakeCase,
                        .random_case = &RandomCase});
}

}  // namespace heed::h3
