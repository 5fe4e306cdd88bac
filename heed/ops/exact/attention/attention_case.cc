// Attention in the harness: its entry, simple problems of any size, and the tolerances of kernels against the
// reference.
#include "heed/ops/exact/attention/cases/attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <string_view>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"
#include "heed/ops/positions/alibi.h"

namespace heed::attention {
namespace {

// The allowed error of one row.
//
//   |o - o_ref| <= V (base (1 + log2(n) / 8 + S / 8) + chain sqrt(min(n, 512)) + decay F)
//   |lse - lse_ref| <= lse max(1, |lse_ref|) + chain max(S, 1.75 R) + decay F
//
// n: keys that the row sees. V: their largest |v| in this channel, / (1 -
// dropout): o is a weighted mean of v, channel by channel. S: the largest sum_d |scale q_d k_d| + |alibi| +
// |biases| of these keys, the size of a logit without cancellation; its rounding error is S times the unit roundoff,
// which the exponential makes a relative error of the weight.
//
// R: the largest root of the sum of squares of the products and partial sums of
// a logit. A row that one key dominates has that logit's error in its lse, without averaging. The error of a chain is a
// sum of independent roundings, each with a standard deviation of at most u / sqrt(3) times the rounded value, u =
// chain / 2; six standard deviations are 6 / sqrt(3) u R = 1.75 chain R. S alone is about three standard deviations
// where products have random signs (R = 1.1 S), and fewer where a bias cancels a large product: too few for the rows of
// a million problems.
//
// F: the largest |F_ij| of these keys, a part of S. It is a sum of two rounded parts of one
// sign, each from sums in f64 of up to 64 log decays: 3 u F, and in f64 64 u F more.
//
// Keys whose weight underflows whatever that error is cannot change the result and do not count in S. So one finfo.min
// beside ordinary logits does not make the tolerance infinite; a row of only finfo.min has a test of its own.
//
// The square root is that of a random walk: the roundings of a chain over different values are nearly independent.
// Where v repeats one value over all tokens (stride 0) they can all have one sign, and the bound is Higham's n u =
// chain n / 2.
//
// 16-bit tensors are computed as f32. Their results are rounded once more, to a
// unit roundoff u of 2^-8 or 2^-11, and a bf16 kernel may round the weights too:
//
//   |o - o_ref| <= the above + 1.01 u (|o_ref| + [bf16] sum_j |weight_j v_j|)
//                  + [f16] 2^-25, half of the least subnormal
//
// With precision = high a product of two f32 may be three products of their bf16 splits. Each factor loses 2^-18, and
// the omitted product of the second terms is another 2^-18. A logit then has an additional error of 3 2^-18 S, a mean
// of v of 3 2^-18 V.
//
// A learned sink multiplies by w = sigmoid(lse - sink), whose relative error is
// (1 - w) times the error of lse - sink: that of lse, and of rounding both.
struct Epsilon {
  double base, chain, lse;
  double underflow;  // exp(-underflow) is 0 beside 1
  double decay;
  double output = 0, weight = 0, subnormal = 0;  // of rounding to 16 bits
};

constexpr Epsilon EpsilonOf(DType dtype) {
  constexpr Epsilon kF32 = {1e-6, 1.2e-7, 2e-6, 110, 3 * 0x1p-24 + 64 * 0x1p-53};
  Epsilon e = kF32;
  switch (dtype) {
    case DType::kF64: return {1e-14, 2.2e-16, 2e-14, 750, 67 * 0x1p-53};
    case DType::kBF16: e.output = e.weight = 1.01 * 0x1p-8; return e;
    case DType::kF16:
      e.output = 1.01 * 0x1p-11;
      e.subnormal = 0x1p-25;
      return e;
    default: return e;
  }
}

void StoreTolerance(const Problem& problem, const ReferenceRow& row, const Outputs& expected,
                    const Outputs& tolerance) {
  const Epsilon eps = EpsilonOf(problem.in.q.dtype());
  const bool three_products = problem.options.precision == Precision::kHigh && problem.in.q.dtype() == DType::kF32;
  // Two bf16 terms represent each factor within 2^-16, and the product of the second terms, at most 2^-16, is omitted.
  const double splits = three_products ? 3 * 0x1p-16 : 0;
  const bool packed = problem.options.cu_seqlens_q.present();
  const int64_t batch = packed ? 0 : row.sequence;
  const int64_t Dv = problem.in.v.size(problem.in.v.rank() - 1);

  double S = 0, R = 0, F = 0;
  std::vector<double> V(static_cast<size_t>(Dv), 0.0), weighted = V;
  for (const ReferencePair& pair : row.pairs) {
    if (pair.logit + eps.base * pair.magnitude >= row.lse - eps.underflow) {
      S = std::max(S, pair.magnitude);
      R = std::max(R, pair.partial_norm);
      F = std::max(F, std::abs(pair.forgotten));
    }
    for (size_t d = 0; d < V.size(); ++d) {
      V[d] = std::max(V[d], std::abs(pair.v[d]));
      weighted[d] += std::abs(pair.weight * pair.v[d]);
    }
  }
  const double n = static_cast<double>(std::max<size_t>(row.pairs.size(), 1));
  const double of_lse =
      eps.lse * std::max(1.0, std::abs(row.lse)) + eps.chain * std::max(S, 1.75 * R) + eps.decay * F + splits * S;
  const double length = std::min(n, 512.0);  // length of a chain
  const bool repeats = problem.in.v.stride(problem.in.v.rank() - 3) == 0;
  const double of_mean = eps.base * (1 + std::log2(n) / 8 + S / 8) + eps.decay * F + splits * (1 + S) +
                         eps.chain * std::max(std::sqrt(length), repeats ? length / 2 : 0);
  double of_sink = 0;
  if (problem.options.sinks && !row.pairs.empty()) {
    const ConstTensorView& sinks = problem.options.sinks;
    const double sink = LoadAsDouble(sinks.dtype(), sinks.data(), row.head * sinks.stride(0));
    if (std::isfinite(sink)) {
      const double w = 1 / (1 + std::exp(sink - row.lse));
      of_sink = (1 - w) * (of_lse + eps.chain * std::abs(sink));
    }
  }

  const auto index = [&](std::initializer_list<int64_t> all, int rank) {
    return std::vector<int64_t>(all.end() - rank, all.end());
  };
  for (int64_t d = 0; d < Dv; ++d) {
    const auto at = index({batch, row.output_row, row.head, d}, tolerance.o.rank());
    const double o = std::abs(GetElement(expected.o, at));
    SetElement(tolerance.o, at,
               V[static_cast<size_t>(d)] * of_mean / (1 - problem.options.dropout) + o * (of_sink + eps.output) +
                   weighted[static_cast<size_t>(d)] * eps.weight + eps.subnormal);
  }
  if (tolerance.lse) {
    SetElement(tolerance.lse, index({batch, row.head, row.output_row}, tolerance.lse.rank()),
               row.pairs.empty() ? 0 : of_lse);
  }
}

Outputs ToOutputs(std::span<const TensorView> views) { return {views[0], views.size() > 1 ? views[1] : TensorView()}; }

void FillZero(const TensorView& view) {
  if (view.num_elements() == 0) return;
  std::vector<int64_t> index(view.sizes().size());
  do {
    SetElement(view, index, 0);
  } while (NextIndex(view.sizes(), index));
}

double Bytes(const ConstTensorView& view) {
  return static_cast<double>(view.num_elements()) * static_cast<double>(SizeOf(view.dtype()));
}

std::string Format(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", value);
  return text;
}

// "[3,0,5] i32" for a short list of integers, else shape, dtype and strides.
std::string Text(const ConstTensorView& view) {
  if (!IsFloat(view.dtype()) && view.rank() == 1 && view.size(0) <= 8) {
    std::string text = "[";
    for (int64_t i = 0; i < view.size(0); ++i) {
      text += (i ? "," : "") + std::to_string(LoadAsInt64(view.dtype(), view.data(), i * view.stride(0)));
    }
    return text + "]";
  }
  return std::string(Name(view.dtype())) + view.ShapeString() + "/" + ShapeString(view.strides());
}

std::string Text(bool) { return ""; }  // present, without a value
std::string Text(double value) { return Format(value); }
std::string Text(const std::optional<double>& value) { return Format(*value); }
std::string Text(int64_t value) { return std::to_string(value); }
std::string Text(uint64_t value) { return std::to_string(value); }
std::string Text(uint32_t value) { return std::to_string(value); }
std::string Text(Align) { return "top_left"; }
std::string Text(Precision) { return "high"; }
std::string Text(const Window& value) { return std::to_string(value.left) + "," + std::to_string(value.right); }
std::string Text(const Pattern& value) { return value.ToString(); }

// The part of `variant` after "word=", or `missing` if it is just "word".
bool Match(std::string_view variant, std::string_view word, double missing, double* value) {
  if (variant.substr(0, word.size()) != word) return false;
  variant.remove_prefix(word.size());
  *value = missing;
  if (variant.empty()) return true;
  if (variant[0] != '=') return false;
  *value = std::stod(std::string(variant.substr(1)));
  return true;
}

constexpr Placement kAligned = Placement::kAligned;

// The pattern of a word "pattern=EXPRESSION", in which # is a number that each run may choose: a number beyond the
// keys.
constexpr std::string_view kPatternWord = "pattern=";

Pattern PatternOf(std::string_view word, int64_t number) {
  std::string expression(word.substr(kPatternWord.size()));
  if (const size_t at = expression.find('#'); at != std::string::npos) {
    expression.replace(at, 1, std::to_string((int64_t{1} << 40) + number));
  }
  return Pattern::Parse(expression);
}

void ApplyWord(Problem& p, const CaseRequest& request, std::string_view word) {
  const Sizes& s = request.sizes;
  Options& o = p.options;
  const auto keep = [&](const Buffer& buffer) {
    p.memory.push_back(buffer);
    return buffer.view();
  };
  double x;
  if (word == "causal") {
    o.causal = true;
  } else if (Match(word, "window", 512, &x)) {  // width in keys, including the row's own
    o.causal = true;
    o.window = {static_cast<int64_t>(x) - 1, 0};
  } else if (Match(word, "softcap", 30, &x)) {
    o.softcap = x;
  } else if (Match(word, "dropout", 0.1, &x)) {
    o.dropout = x;
    o.seed = request.seed;
  } else if (word == "alibi") {
    const Buffer slopes(DType::kF32, {s.Hq}, kAligned);
    const std::vector<double> values = AlibiSlopes(s.Hq);
    for (int64_t h = 0; h < s.Hq; ++h) {
      slopes.Set({h}, values[static_cast<size_t>(h)]);
    }
    o.alibi = keep(slopes);
  } else if (Match(word, "relative_bias", 1024, &x)) {  // distances
    o.relative_bias = keep(Buffer(DType::kF32, {s.Hq, static_cast<int64_t>(x)}, kAligned).FillNormal(request.seed + 9));
  } else if (Match(word, "log_decay", 0.05, &x)) {  // per token, on average
    o.causal = true;
    const Buffer decays(DType::kF32, {s.B, s.Tk, s.Hq}, kAligned);
    Random random(request.seed, 8);
    float* to = decays.as<float>();
    for (int64_t i = 0; i < s.B * s.Tk * s.Hq; ++i) {
      to[i] = static_cast<float>(-1.25 * x * std::abs(random.Normal()));
    }
    o.log_decay = keep(decays);
  } else if (word == "sinks") {
    o.sinks = keep(Buffer(DType::kF32, {s.Hq}, kAligned).FillNormal(request.seed + 5));
  } else if (word == "bias") {
    o.bias = keep(Buffer(request.dtype, {1, s.Hq, s.Tq, s.Tk}, kAligned).FillNormal(request.seed + 6));
  } else if (Match(word, "lengths", 62, &x) || Match(word, "padding", 62, &x)) {
    // Keeps the first x percent of the keys, by lengths or a boolean mask.
    const int64_t n = static_cast<int64_t>(static_cast<double>(s.Tk) * x / 100);
    if (word[0] == 'l') {
      o.key_lengths = keep(Buffer(DType::kI64, {s.B}, kAligned).FillConstant(static_cast<double>(n)));
    } else {
      const Buffer mask(DType::kBool, {s.B, 1, 1, s.Tk}, kAligned);
      for (int64_t b = 0; b < s.B; ++b) {
        for (int64_t j = 0; j < s.Tk; ++j) mask.Set({b, 0, 0, j}, j < n);
      }
      o.mask = keep(mask);
    }
  } else if (word == "mask") {  // keeps three of four pairs
    const Buffer mask(DType::kBool, {1, 1, s.Tq, s.Tk}, kAligned);
    Random random(request.seed, 7);
    for (int64_t i = 0; i < s.Tq; ++i) {
      for (int64_t j = 0; j < s.Tk; ++j) {
        mask.Set({0, 0, i, j}, random.Chance(0.75));
      }
    }
    o.mask = keep(mask);
  } else if (Match(word, "logits", 50, &x)) {  // within about +-x, 4.2 standard deviations
    p.memory[0].FillNormal(request.seed * 16, x / 4.2);
  } else if (word == "invariant") {
    o.invariant = true;
  } else if (word.starts_with(kPatternWord)) {
    o.pattern = PatternOf(word, 0);
  } else if (word != "bhtd" && !Match(word, "map", 64, &x)) {  // handled by MakePlainCase
    throw InvalidArgument("attention: variant is " + std::string(word) + ", expected one of Entry().variants");
  }
}

// Counts the keys kept by the options that ApplyWord knows, over all rows and heads; a pattern and options other than
// `causal` are taken as independent. Throws InvalidArgument if the pattern does not fit.
double CountPairs(const Problem& p, const Sizes& s) {
  const Options& o = p.options;
  double share = 1;
  if (o.pattern.present()) {
    const std::vector<int64_t> starts(static_cast<size_t>(s.B), s.Tk - s.Tq);
    share = Density(o.pattern, {s.Tq, s.Tk, s.Hq, s.Hkv, starts}, o.causal);
  }
  double pairs = 0;
  for (int64_t b = 0; b < s.B; ++b) {
    const int64_t n = o.key_lengths ? o.key_lengths.as<int64_t>()[b] : s.Tk;
    for (int64_t i = 0; i < s.Tq; ++i) {
      const int64_t position = s.Tk - s.Tq + i;
      int64_t begin = 0, end = n;
      if (o.causal) end = std::min(end, position + 1);
      if (o.window.left >= 0) begin = std::max(begin, position - o.window.left);
      if (!o.mask) {
        pairs += static_cast<double>(std::max<int64_t>(end - begin, 0));
      }
      for (int64_t j = begin; o.mask && j < end; ++j) {
        const int64_t row = o.mask.size(2) == 1 ? 0 : i;
        const int64_t batch = o.mask.size(0) == 1 ? 0 : b;
        pairs += o.mask.as<bool>()[batch * o.mask.stride(0) + row * o.mask.stride(2) + j];
      }
    }
  }
  return share * pairs * static_cast<double>(s.Hq);
}

// The probabilities pooled into at most bins x bins, instead of attention.
Case MapCase(const Problem& problem, const Case& attention, int64_t bins) {
  const auto p = std::make_shared<const Problem>(problem);
  const ConstTensorView& q = p->in.q;
  const std::vector<int64_t> sizes = {q.size(0), q.size(2), std::min(bins, q.size(1)), std::min(bins, p->in.k.size(1))};
  Case c = attention;
  c.outputs = {{"map", q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, sizes, {}}};
  c.run = [p](Context& ctx, std::span<const TensorView> outputs) {
    Map(ctx, {p->in.q, p->in.k, {}}, p->options, Reduce::kMean, outputs[0]);
  };
  c.reference = [p](std::span<const TensorView> expected, std::span<const TensorView> tolerance) {
    MapReference({p->in.q, p->in.k, {}}, p->options, Reduce::kMean, expected[0]);
    for (int64_t i = 0; !tolerance.empty() && i < expected[0].num_elements(); ++i) {
      // A probability has the errors of a logit and of the lse, some 10^-6 each.
      const double x = expected[0].as<double>()[i];
      tolerance[0].as<double>()[i] = (p->in.q.dtype() == DType::kF64 ? 1e-12 : 2e-5) * x;
    }
  };
  return c;
}

Case MakePlainCase(const CaseRequest& request) {
  const bool backward = request.pass == "backward", step = request.pass == "step";
  if (!backward && !step && request.pass != "forward") {
    throw InvalidArgument("attention: pass is " + request.pass + ", expected forward, backward or step");
  }
  CaseRequest one = request;
  if (step) one.sizes.Tq = 1;
  const Sizes& s = one.sizes;
  std::vector<std::string> words;
  for (size_t begin = 0; begin < request.variant.size();) {
    const size_t end = std::min(request.variant.find('+', begin), request.variant.size());
    words.push_back(request.variant.substr(begin, end - begin));
    begin = end + 1;
  }
  const bool head_first = std::find(words.begin(), words.end(), "bhtd") != words.end();

  Problem p;
  const auto normal = [&](int64_t T, int64_t H, int64_t D, uint64_t seed) {
    const int64_t sizes[] = {s.B, T, H, D};
    const int64_t bthd[] = {T * H * D, H * D, D, 1};
    const int64_t bhtd[] = {T * H * D, D, T * D, 1};
    Buffer buffer(request.dtype, sizes, head_first ? bhtd : bthd, kAligned);
    p.memory.push_back(buffer.FillNormal(request.seed * 16 + seed));
    return buffer.view();
  };
  p.in.q = normal(s.Tq, s.Hq, s.D, 0);
  p.in.k = normal(s.Tk, s.Hkv, s.D, 1);
  p.in.v = normal(s.Tk, s.Hkv, s.Dv, 2);
  for (const std::string& word : words) ApplyWord(p, one, word);
  DescribeOutputs(p);
  if (head_first) {
    p.o.strides = {s.Tq * s.Hq * s.Dv, s.Dv, s.Tq * s.Dv, 1};
  }
  p.note = request.variant.empty() ? "" : "variant=" + request.variant;

  if (backward) DescribeGradients(p, request.seed);
  Case c = backward ? MakeBackwardCase(p, false) : step ? MakeStepCase(p) : MakeCase(p);
  c.pairs = CountPairs(p, s);
  c.flops = 2.0 * static_cast<double>(backward ? 3 * s.D + 2 * s.Dv : s.D + s.Dv) * c.pairs;
  for (const std::string& word : words) {
    double bins;
    if (Match(word, "map", 64, &bins)) return MapCase(p, c, static_cast<int64_t>(bins));
    if (!word.starts_with(kPatternWord) || word.find('#') == std::string::npos || backward) continue;
    // Each timed run builds the lists again.
    c.timed = [p, word, number = int64_t{0}](Context& ctx, std::span<const TensorView> outputs) mutable {
      Options options = p.options;
      options.pattern = PatternOf(word, ++number);
      Forward(ctx, p.in, options, ToOutputs(outputs));
    };
  }
  return c;
}

// Adds the backward pass to every second problem.
Case CaseOfRandom(const Problem& problem) {
  return problem.gradients.empty() ? MakeCase(problem) : MakeBackwardCase(problem, true);
}

}  // namespace

Case MakeRandomCase(DType dtype, uint64_t seed, const Pattern& pattern) {
  Problem problem = RandomProblem(dtype, seed);
  problem.options.pattern = pattern;
  const ConstTensorView& packed = problem.options.cu_seqlens_q;
  if ((packed ? packed.size(0) - 1 : problem.in.q.size(0)) == 0) {
    throw InvalidArgument("attention: pattern has no sequence to fit, expected one");
  }
  Explain(Context(1), problem.in, problem.options);  // throws if the arguments are invalid
  return CaseOfRandom(problem);
}

void DescribeOutputs(Problem& p) {
  const ConstTensorView& q = p.in.q;
  p.o = {"o", q.dtype(), {q.sizes().begin(), q.sizes().end()}, {}};
  p.o.sizes.back() = p.in.v.size(p.in.v.rank() - 1);
  p.lse = {"lse", q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, {}, {}};
  p.lse.sizes = p.LseSizes();
}

std::vector<int64_t> Problem::LseSizes() const {
  const ConstTensorView& q = in.q;
  const int last = q.rank() - 1;
  std::vector<int64_t> sizes = {q.size(last - 1), q.size(last - 2)};
  if (!options.cu_seqlens_q) sizes.insert(sizes.begin(), q.size(0));
  return sizes;
}

std::string Title(const Problem& p) {
  const Options& o = p.options;
  std::string text = "attention " + std::string(Name(p.in.q.dtype()));
  for (const auto& [name, view] : {std::pair{"q", p.in.q}, {"k", p.in.k}, {"v", p.in.v}}) {
    text += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
  }
  if (!p.o.strides.empty()) text += " o/" + ShapeString(p.o.strides);
  if (p.lse.sizes.empty()) text += " no_lse";
  for (const OptionRow& row : kOptionRows) {
    if (!IsGiven(row, o)) continue;
    text += std::string(" ") + row.name;
    const std::string value = std::visit([&](auto field) { return Text(o.*field); }, row.field);
    if (!value.empty()) text += "=" + value;
  }
  return p.note.empty() ? text : text + " " + p.note;
}

Case MakeCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(problem);
  c.outputs = {problem.o};
  if (!problem.lse.sizes.empty()) c.outputs.push_back(problem.lse);
  c.run = [p](Context& ctx, std::span<const TensorView> outputs) {
    Forward(ctx, p->in, p->options, ToOutputs(outputs));
  };
  c.reference = [p](std::span<const TensorView> expected, std::span<const TensorView> tolerance) {
    const Outputs out = ToOutputs(expected);
    if (tolerance.empty()) return Reference(p->in, p->options, out);
    const Outputs allowed = ToOutputs(tolerance);
    for (const TensorView& view : tolerance) FillZero(view);
    ReferenceRows(p->in, p->options, out, [&](const ReferenceRow& row) { StoreTolerance(*p, row, out, allowed); });
  };
  c.bytes = Bytes(p->in.q) + Bytes(p->in.k) + Bytes(p->in.v);
  for (const OutputSpec& spec : c.outputs) {
    double bytes = static_cast<double>(SizeOf(spec.dtype));
    for (const int64_t size : spec.sizes) bytes *= static_cast<double>(size);
    c.bytes += bytes;
  }
  return c;
}

OpEntry Entry() {
  return {.name = "attention",
          .family = "exact",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = {"causal", "window=512", "softcap=30", "alibi", "relative_bias=1024", "log_decay=0.05", "bias",
                       "mask", "padding=62", "lengths=62", "sinks", "dropout=0.1", "logits=50", "invariant", "bhtd",
                       "pattern=longformer(16, [0, 40])"},
          .flops =
              "2 (D + Dv) per kept pair, backward 2 (3 D + 2 Dv); B Hq Tq Tk pairs if "
              "none is masked",
          .bytes = "(B Tq Hq (D + Dv) + B Tk Hkv (D + Dv)) size + lse",
          .state = "B Tk Hkv (D + Dv) size (the keys and values so far)",
          .make_case = &MakePlainCase,
          .random_case = [](DType dtype, uint64_t seed) { return CaseOfRandom(RandomProblem(dtype, seed)); }};
}

}  // namespace heed::attention
