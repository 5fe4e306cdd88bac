// The gradients of attention against finite differences of its forward reference, and identities between gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "heed/ops/exact/attention/attention_reference_internal.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class F>
void ForEachIndex(const ConstTensorView& view, const F& f) {
  if (view.num_elements() == 0) return;
  std::vector<int64_t> index(view.sizes().size());
  do {
    f(index);
  } while (NextIndex(view.sizes(), index));
}

// The input that a gradient belongs to.
ConstTensorView* InputOf(Problem& p, const std::string& gradient) {
  if (gradient == "dq") return &p.in.q;
  if (gradient == "dk") return &p.in.k;
  if (gradient == "dv") return &p.in.v;
  if (gradient == "dbias") return &p.options.bias;
  if (gradient == "dsinks") return &p.options.sinks;
  if (gradient == "dlog_decay") return &p.options.log_decay;
  if (gradient == "drelative_bias") return &p.options.relative_bias;
  return &p.options.alibi;
}

double LargestFinite(const ConstTensorView& view) {
  double largest = 0;
  ForEachIndex(view, [&](const std::vector<int64_t>& at) {
    const double x = std::abs(GetElement(view, at));
    if (x > largest && x < kInfinity) largest = x;
  });
  return largest;
}

// sum <d_o, o> + <d_lse, lse> by the reference, without rows that see no key.
double Loss(const Problem& p) {
  const Result r = RunReference(p);
  double loss = 0;
  ForEachIndex(r.o.view(),
               [&](const std::vector<int64_t>& at) { loss += GetElement(p.d_o, at) * GetElement(r.o.view(), at); });
  if (!p.d_lse) return loss;
  ForEachIndex(r.lse.view(), [&](const std::vector<int64_t>& at) {
    const double lse = GetElement(r.lse.view(), at);
    if (lse != -kInfinity) loss += GetElement(p.d_lse, at) * lse;
  });
  return loss;
}

// Along t, N(0, 1) in one input, the loss F has the slope
//
//   D(h) = (F(x + h t) - F(x - h t)) / 2 h,   (4 D(h) - D(2 h)) / 3 + O(h^4)
//
// A step of h changes logits by up to about e = h a, where a is the largest change of a logit for h = 1. In terms of M,
// the sum of |d_o| |v| / (1 - dropout) and |d_lse| over rows, the fifth derivative of F is some 100 a^5 M at most, so
// with e = 2^-10 the first error is below 4 h^4 100 a^5 M / 120 = 4e-12 a M. F itself has an error of a few 2^-53 (1 +
// S) M, S the largest logit without cancellation: divided by h, 2e-13 (1 + S) (1 + a) M. Kernels in f64 have an error
// of 1e-13 (1 + S / 8) relative to some 2 a M. Together at most:
double Allowed(double a, double S, double M) { return (1 + a) * M * (1e-11 + 1e-12 * S); }

void ExpectSlopes(const Problem& p, uint64_t seed, double* sharpness = nullptr) {
  const double max_v = LargestFinite(p.in.v) + 5;  // 5: bound of t
  double S = 0, M = 0, distance = 0;
  const Buffer o(DType::kF64, p.o.sizes);
  ReferenceRows(p.in, p.options, {o.view(), {}}, [&](const ReferenceRow& row) {
    for (const ReferencePair& pair : row.pairs) {
      S = std::max(S, pair.magnitude);
      distance = std::max(distance, pair.distance);
    }
    if (!row.pairs.empty() && std::isfinite(row.lse)) S = std::max(S, std::abs(row.lse));
  });
  ForEachIndex(p.d_o, [&](const std::vector<int64_t>& at) {
    M += std::abs(GetElement(p.d_o, at)) * max_v / (1 - p.options.dropout);
  });
  if (p.d_lse) {
    ForEachIndex(p.d_lse, [&](const std::vector<int64_t>& at) { M += std::abs(GetElement(p.d_lse, at)); });
  }
  const int64_t D = p.in.q.size(p.in.q.rank() - 1);
  const double scale = std::abs(p.options.scale.value_or(1 / std::sqrt(static_cast<double>(D))));
  // <t, x>| of a normal t is within 5 |x|.
  const double per_query = 5 * scale * std::sqrt(static_cast<double>(D));

  Context ctx(1);
  const std::vector<Buffer> expected = RunBackwardReference(p);
  const std::vector<Buffer> computed = RunBackward(ctx, p);
  for (size_t g = 0; g < p.gradients.size(); ++g) {
    const std::string& name = p.gradients[g].name;
    Problem moved = p;
    ConstTensorView* input = InputOf(moved, name);
    if (input->num_elements() == 0) continue;
    const double a = name == "dq"                               ? per_query * LargestFinite(p.in.k)
                     : name == "dk"                             ? per_query * LargestFinite(p.in.q)
                     : name == "dv"                             ? 0
                     : name == "dalibi" || name == "dlog_decay" ? 5 * distance
                                                                : 5;
    const double h = 0x1p-10 / (1 + a);
    const Buffer origin(DType::kF64, input->sizes()), t(DType::kF64, input->sizes()),
        at_step(DType::kF64, input->sizes());
    t.FillNormal(seed * 8 + g);
    ForEachIndex(*input,
                 [&](const std::vector<int64_t>& at) { SetElement(origin.view(), at, GetElement(*input, at)); });
    *input = at_step.view();
    const auto loss_at = [&](double step) {
      ForEachIndex(t.view(), [&](const std::vector<int64_t>& at) {
        SetElement(at_step.view(), at, GetElement(origin.view(), at) + step * GetElement(t.view(), at));
      });
      return Loss(moved);
    };
    const double near = (loss_at(h) - loss_at(-h)) / (2 * h);
    const double far = (loss_at(2 * h) - loss_at(-2 * h)) / (4 * h);
    const double slope = (4 * near - far) / 3;
    const double tolerance = Allowed(a, S, M);
    const auto along = [&](const Buffer& gradient) {
      double sum = 0;
      ForEachIndex(t.view(), [&](const std::vector<int64_t>& at) {
        sum += GetElement(gradient.view(), at) * GetElement(t.view(), at);
      });
      return sum;
    };
    EXPECT_NEAR(along(expected[g]), slope, tolerance) << name << " of the reference";
    EXPECT_NEAR(along(computed[g]), slope, tolerance) << name << " of the kernel";
    if (sharpness != nullptr && slope != 0) {
      *sharpness = std::max(*sharpness, std::abs(slope) / tolerance);
    }
  }
}

ConstTensorView Widened(Problem& p, const ConstTensorView& view) {
  const Buffer wide(DType::kF64, view.sizes());
  ForEachIndex(view, [&](const std::vector<int64_t>& at) { SetElement(wide.view(), at, GetElement(view, at)); });
  return Keep(p, wide);
}

// Random problems contain a NaN now and then.
bool IsFinite(const Problem& p) {
  bool finite = true;
  ForEachIndex(p.in.q,
               [&](const std::vector<int64_t>& at) { finite = finite && std::isfinite(GetElement(p.in.q, at)); });
  return finite && std::isfinite(Loss(p));
}

struct Choice {
  std::string name;
  std::function<void(Problem&)> make;
};
void PrintTo(const Choice& choice, std::ostream* os) { *os << choice.name; }

ConstTensorView Normal(Problem& p, std::vector<int64_t> sizes, uint64_t seed) {
  return Keep(p, Buffer(DType::kF64, sizes).FillNormal(seed));
}

ConstTensorView PerSequence(Problem& p, int64_t first, int64_t step) {
  std::vector<int64_t> values;
  for (int64_t b = 0; b < p.in.q.size(0); ++b) values.push_back(first + step * b);
  return KeepInts(p, values);
}

ConstTensorView Segments(Problem& p, int64_t T) {
  const Buffer ids(DType::kI32, {p.in.q.size(0), T});
  ForEachIndex(ids.view(), [&](const std::vector<int64_t>& at) {
    SetElement(ids.view(), at, static_cast<double>((at[1] * 4 + at[0]) / T - 1));
  });
  return Keep(p, ids);
}

void Forget(Problem& p) {
  const Buffer decays(DType::kF64, {p.in.q.size(0), p.in.k.size(1), p.in.q.size(2)});
  Random random(34);
  ForEachIndex(decays.view(), [&](const std::vector<int64_t>& at) {
    SetElement(decays.view(), at, -0.5 * std::abs(random.Normal()));
  });
  p.options.causal = true;
  p.options.log_decay = Keep(p, decays);
}

std::vector<Choice> Choices() {
  using P = Problem;
  std::vector<Choice> all = {
      {"Plain", [](P&) {}},
      {"Softcap", [](P& p) { p.options.softcap = 1.5; }},
      {"SoftcapFarAbove", [](P& p) { p.options.softcap = 3.4e38; }},
      {"Alibi", [](P& p) { p.options.alibi = Normal(p, {p.in.q.size(2)}, 30); }},
      {"AlibiPerSequence", [](P& p) { p.options.alibi = Normal(p, {p.in.q.size(0), p.in.q.size(2)}, 30); }},
      {"AlibiCausalSoftcap",
       [](P& p) {
         p.options.alibi = Normal(p, {p.in.q.size(2)}, 30);
         p.options.causal = true;
         p.options.softcap = 1.5;
       }},
      {"RelativeBias", [](P& p) { p.options.relative_bias = Normal(p, {p.in.q.size(2), 6}, 34); }},
      {"RelativeBiasOfOneDistance", [](P& p) { p.options.relative_bias = Normal(p, {p.in.q.size(2), 1}, 34); }},
      {"RelativeBiasBeyondTheKeys",
       [](P& p) {
         p.options.relative_bias = Normal(p, {p.in.q.size(2), 700}, 34);
         p.options.query_starts = PerSequence(p, 3, -5);
       }},
      {"RelativeBiasOfEverything",
       [](P& p) {
         p.options.relative_bias = Normal(p, {p.in.q.size(2), 5}, 34);
         p.options.alibi = Normal(p, {p.in.q.size(2)}, 30);
         p.options.bias = Normal(p, {p.in.q.size(1), p.in.k.size(1)}, 33);
         p.options.sinks = Normal(p, {p.in.q.size(2)}, 31);
         p.options.softcap = 1.5;
         p.options.dropout = 0.3;
         p.options.window = {7, 2};
       }},
      {"PackedRelativeBias",
       [](P& p) {
         p = *Packed(p);
         p.options.relative_bias = Normal(p, {p.in.q.size(1), 6}, 34);
       }},
      {"LogDecay", [](P& p) { Forget(p); }},
      {"LogDecayOfEverything",
       [](P& p) {
         Forget(p);
         p.options.alibi = Normal(p, {p.in.q.size(2)}, 30);
         p.options.sinks = Normal(p, {p.in.q.size(2)}, 31);
         p.options.bias = Normal(p, {p.in.q.size(1), p.in.k.size(1)}, 33);
         p.options.softcap = 1.5;
         p.options.dropout = 0.3;
         p.options.prefix = PerSequence(p, 3, 2);
       }},
      {"LogDecayLengths",
       [](P& p) {
         Forget(p);
         p.options.key_lengths = PerSequence(p, 4, 2);
         p.options.key_starts = PerSequence(p, 2, -1);
       }},
      {"LogDecayTopLeft",
       [](P& p) {
         Forget(p);
         p.options.align = Align::kTopLeft;
         p.options.window.left = 3;
         p.options.sink_tokens = 2;
       }},
      {"LogDecayPacked",
       [](P& p) {
         Forget(p);
         p = *Packed(p);
       }},
      {"Sinks", [](P& p) { p.options.sinks = Normal(p, {p.in.q.size(2)}, 31); }},
      {"SinksOfInfinity",
       [](P& p) {
         const Buffer sinks(DType::kF64, {p.in.q.size(2)});
         sinks.FillConstant(-kInfinity);
         sinks.Set({0}, kInfinity);
         p.options.sinks = Keep(p, sinks);
       }},
      {"Dropout",
       [](P& p) {
         p.options.dropout = 0.3;
         p.options.seed = 77;
       }},
      {"DropoutSinks",
       [](P& p) {
         p.options.dropout = 0.6;
         p.options.sinks = Normal(p, {p.in.q.size(2)}, 31);
       }},
      {"Causal", [](P& p) { p.options.causal = true; }},
      {"TopLeft",
       [](P& p) {
         p.options.causal = true;
         p.options.align = Align::kTopLeft;
       }},
      {"Window", [](P& p) { p.options.window = {3, 1}; }},
      {"WindowLeft", [](P& p) { p.options.window.left = 2; }},
      {"SinkTokens",
       [](P& p) {
         p.options.window = {2, 0};
         p.options.sink_tokens = 2;
       }},
      {"Prefix",
       [](P& p) {
         p.options.causal = true;
         p.options.prefix = PerSequence(p, 3, 2);
       }},
      {"Chunk", [](P& p) { p.options.chunk = 4; }},
      {"Segments",
       [](P& p) {
         p.options.segments_q = Segments(p, p.in.q.size(1));
         p.options.segments_k = Segments(p, p.in.k.size(1));
       }},
      {"Mask",
       [](P& p) {
         const Buffer mask(DType::kBool, {p.in.q.size(2), p.in.q.size(1), p.in.k.size(1)});
         Random random(32);
         ForEachIndex(mask.view(), [&](const std::vector<int64_t>& at) {
           SetElement(mask.view(), at, at[1] != 2 && random.Chance(0.5));
         });
         p.options.mask = Keep(p, mask);
       }},
      {"Lengths", [](P& p) { p.options.key_lengths = PerSequence(p, 4, 2); }},
      {"Starts", [](P& p) { p.options.key_starts = PerSequence(p, 5, -2); }},
      {"QueryLengths", [](P& p) { p.options.query_lengths = PerSequence(p, 3, 3); }},
      {"QueryStarts",
       [](P& p) {
         p.options.causal = true;
         p.options.query_starts = PerSequence(p, -2, 5);
       }},
      {"ScaleOfZero", [](P& p) { p.options.scale = 0; }},
      {"ScaleBelowZero", [](P& p) { p.options.scale = -0.7; }},
      {"Packed", [](P& p) { p = *Packed(p); }},
      {"PackedCausal",
       [](P& p) {
         p = *Packed(p);
         p.options.causal = true;
         p.options.alibi = Normal(p, {p.options.cu_seqlens_q.size(0) - 1, p.in.q.size(1)}, 30);
       }},
  };
  // A bias of rank 4 broadcasts in sixteen ways; lower ranks follow.
  for (int axes = 0; axes < 16; ++axes) {
    all.push_back({"Bias" + std::to_string(axes), [axes](P& p) {
                     std::vector<int64_t> sizes = {p.in.q.size(0), p.in.q.size(2), p.in.q.size(1), p.in.k.size(1)};
                     for (size_t i = 0; i < 4; ++i) {
                       if (axes >> i & 1) sizes[i] = 1;
                     }
                     p.options.bias = Normal(p, sizes, 33);
                   }});
  }
  for (size_t rank = 1; rank < 4; ++rank) {
    all.push_back({"BiasOfRank" + std::to_string(rank), [rank](P& p) {
                     std::vector<int64_t> sizes = {p.in.q.size(2), p.in.q.size(1), p.in.k.size(1)};
                     sizes.erase(sizes.begin(), sizes.end() - static_cast<int>(rank));
                     p.options.bias = Normal(p, sizes, 33);
                   }});
  }
  all.push_back({"BiasThatMasks", [](P& p) {
                   p.options.bias = Normal(p, {p.in.q.size(1), p.in.k.size(1)}, 33);
                   const Buffer& bias = p.memory.back();
                   for (int64_t j = 0; j < p.in.k.size(1); ++j) bias.Set({1, j}, -kInfinity);
                   bias.Set({0, 0}, -kInfinity);
                 }});
  return all;
}

class Slopes : public testing::TestWithParam<Choice> {};
INSTANTIATE_TEST_SUITE_P(Options, Slopes, testing::ValuesIn(Choices()),
                         [](const auto& value) { return value.param.name; });

// Covers grouped heads, Dv other than D and other lengths; then more queries than keys; then several blocks of rows and
// groups of keys.
TEST_P(Slopes, AreDifferencesOfTheForwardPass) {
  for (const Sizes& s : {Sizes{2, 7, 9, 4, 2, 5, 3}, Sizes{2, 11, 8, 2, 2, 3, 6}, Sizes{1, 40, 530, 2, 1, 9, 10}}) {
    SCOPED_TRACE(ToString(s));
    Problem p = MakeProblem(DType::kF64, s);
    GetParam().make(p);
    DescribeOutputs(p);
    ExpectSlopes(WithGradients(p, 40), 50);
  }
}

// Skips problems with a NaN, problems with a bias near finfo.min, beside which the steps round away, and large ones,
// for time.
TEST(BackwardSlopes, OfRandomProblemsAreDifferencesOfTheForwardPass) {
  int problems = 0, sharp = 0;
  for (uint64_t seed = 1; problems < 500; ++seed) {
    Problem p = RandomProblem(DType::kF64, seed);
    const double pairs = static_cast<double>(p.in.q.num_elements()) * static_cast<double>(p.in.k.num_elements());
    if (p.options.bias && LargestFinite(p.options.bias) > 1e4) continue;
    if (pairs > 1e7) continue;
    p.o.strides.clear();
    DescribeOutputs(p);
    for (ConstTensorView* option :
         {&p.options.bias, &p.options.sinks, &p.options.alibi, &p.options.relative_bias, &p.options.log_decay}) {
      if (*option) *option = Widened(p, *option);  // and its gradient too
    }
    const ConstTensorView d_lse = p.d_lse;
    p = WithGradients(p, seed);
    if (seed % 2 == 0) p.d_lse = d_lse;
    if (!IsFinite(p)) continue;
    SCOPED_TRACE(Title(p));
    double sharpness = 0;
    ExpectSlopes(p, seed, &sharpness);
    if (HasFailure()) return;
    ++problems;
    sharp += sharpness > 1e6;
  }
  EXPECT_GT(2 * sharp, problems);  // most differences agree to six digits
}

// Identities between gradients, whatever the options. The tolerance of a sum is the sum of its terms' tolerances in the
// other tests.
class Identities : public testing::TestWithParam<DType> {
 protected:
  struct Gradient {
    Buffer value, tolerance;
    explicit operator bool() const { return value.present(); }
  };

  void Compute(const Problem& p) {
    Context ctx(2);
    const Case c = MakeBackwardCase(p, true);
    std::vector<Buffer> expected, tolerances, results;
    std::vector<TensorView> views[3];
    for (const OutputSpec& spec : c.outputs) {
      expected.emplace_back(DType::kF64, spec.sizes);
      tolerances.emplace_back(DType::kF64, spec.sizes);
      results.emplace_back(spec.dtype, spec.sizes);
      views[0].push_back(expected.back().view());
      views[1].push_back(tolerances.back().view());
      views[2].push_back(results.back().view());
    }
    c.reference(views[0], views[1]);
    c.run(ctx, views[2]);
    for (size_t i = 0; i < c.outputs.size(); ++i) {
      by_name_[c.outputs[i].name] = {results[i], tolerances[i]};
    }
  }
  const Gradient& operator[](const std::string& name) { return by_name_[name]; }

  // Problems that are not packed and have no NaN, with all gradients.
  template <class F>
  void ForProblems(int count, const F& f) {
    for (uint64_t seed = 9000; count > 0; ++seed) {
      Problem p = RandomProblem(GetParam(), seed);
      if (p.options.cu_seqlens_q || p.in.q.num_elements() == 0) continue;
      p.o.strides.clear();
      DescribeOutputs(p);
      const ConstTensorView d_lse = p.d_lse;
      p = WithGradients(p, seed);
      if (seed % 2 == 0) p.d_lse = d_lse;
      if (!IsFinite(p)) continue;
      SCOPED_TRACE(Title(p));
      by_name_.clear();
      Compute(p);
      f(p);
      if (HasFailure()) return;
      --count;
    }
  }

 private:
  std::map<std::string, Gradient> by_name_;
};

INSTANTIATE_TEST_SUITE_P(DTypes, Identities, testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& value) { return std::string(Name(value.param)); });

struct Sum {
  double value = 0, tolerance = 0;
  void Add(double x, double error) {
    value += x;
    tolerance += error + std::abs(x) * 0x1p-50;
  }
};
void ExpectZero(const Sum& sum, const char* what) { EXPECT_LE(std::abs(sum.value), sum.tolerance) << what; }

// A constant vector added to all keys adds scale <q_i, c> to all logits of a row, which leaves o and adds it to lse:
// sum_j dk_j = scale sum_i d_lse_i q_i, over the rows that see a key. This fails with a soft cap and with sinks.
TEST_P(Identities, AShiftOfAllKeysReachesTheLseAlone) {
  ForProblems(40, [&](const Problem& p) {
    if (p.options.softcap > 0 || p.options.sinks) return;
    const Sizes s = SizesOf(p);
    const double scale = p.options.scale.value_or(1 / std::sqrt(static_cast<double>(s.D)));
    std::vector<std::vector<bool>> sees(static_cast<size_t>(s.B * s.Hq), std::vector<bool>(static_cast<size_t>(s.Tq)));
    ForEachRow(p, [&](int64_t b, int64_t h, int64_t i, const std::vector<int64_t>& keys) {
      sees[static_cast<size_t>(b * s.Hq + h)][static_cast<size_t>(i)] = !keys.empty();
    });
    const Gradient& dk = (*this)["dk"];
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t key_head = 0; key_head < s.Hkv; ++key_head) {
        for (int64_t d = 0; d < s.D; ++d) {
          Sum sum;
          for (int64_t j = 0; j < s.Tk; ++j) {
            sum.Add(dk.value.Get({b, j, key_head, d}), dk.tolerance.Get({b, j, key_head, d}));
          }
          const int64_t group = s.Hq / s.Hkv;
          for (int64_t h = key_head * group; p.d_lse && h < (key_head + 1) * group; ++h) {
            for (int64_t i = 0; i < s.Tq; ++i) {
              if (!sees[static_cast<size_t>(b * s.Hq + h)][static_cast<size_t>(i)]) continue;
              const int64_t at_lse[] = {b, h, i}, at_q[] = {b, i, h, d};
              sum.Add(-scale * GetElement(p.d_lse, at_lse) * GetElement(p.in.q, at_q), 0);
            }
          }
          ExpectZero(sum, "keys");
        }
      }
    }
  });
}

// A constant added to all logits of a head, its sink included, changes nothing: sum dS + dsink = sum d_lse. Row by row
// this needs no sinks.
TEST_P(Identities, AShiftOfAllLogitsReachesTheLseAlone) {
  ForProblems(40, [&](Problem p) {
    const Sizes s = SizesOf(p);
    Buffer bias(p.in.q.dtype(), {s.B, s.Hq, s.Tq, s.Tk});
    bias.FillNormal(7);
    p.options.bias = Keep(p, bias);
    const ConstTensorView d_lse = p.d_lse;
    p = WithGradients(p, 8);
    p.d_lse = d_lse;
    Compute(p);
    std::vector<Sum> heads(static_cast<size_t>(s.Hq));
    ForEachRow(p, [&](int64_t b, int64_t h, int64_t i, const std::vector<int64_t>& keys) {
      Sum row;
      const Gradient& dbias = (*this)["dbias"];
      for (int64_t j = 0; j < s.Tk; ++j) {
        row.Add(dbias.value.Get({b, h, i, j}), dbias.tolerance.Get({b, h, i, j}));
      }
      const int64_t at[] = {b, h, i};
      if (p.d_lse && !keys.empty()) row.Add(-GetElement(p.d_lse, at), 0);
      if (!p.options.sinks) ExpectZero(row, "row");
      heads[static_cast<size_t>(h)].Add(row.value, row.tolerance);
    });
    for (int64_t h = 0; p.options.sinks && h < s.Hq; ++h) {
      Sum& sum = heads[static_cast<size_t>(h)];
      sum.Add((*this)["dsinks"].value.Get({h}), (*this)["dsinks"].tolerance.Get({h}));
      ExpectZero(sum, "head");
    }
  });
}

// o is linear in v, and logits depend on products of q and k: scaling q up and k down by the same factor changes
// nothing.
TEST_P(Identities, ValuesAreLinearAndQueriesTradeWithKeys) {
  ForProblems(60, [&](const Problem& p) {
    const auto add = [&](Sum* sum, const char* name, const ConstTensorView& of, double sign) {
      const Gradient& g = (*this)[name];
      ForEachIndex(of, [&](const std::vector<int64_t>& at) {
        const double x = GetElement(of, at);
        if (!std::isfinite(x)) return;  // not visible to any row
        sum->Add(sign * x * GetElement(g.value.view(), at), std::abs(x) * GetElement(g.tolerance.view(), at));
      });
    };
    Sum values;
    add(&values, "dv", p.in.v, 1);
    add(&values, "o", p.d_o, -1);
    ExpectZero(values, "v");
    Sum products;
    add(&products, "dq", p.in.q, 1);
    add(&products, "dk", p.in.k, -1);
    ExpectZero(products, "q and k");
  });
}

}  // namespace
}  // namespace heed::attention
