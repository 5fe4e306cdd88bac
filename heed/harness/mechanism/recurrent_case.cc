// Problems of recurrent mechanisms: sizes, layouts and values.
#include "heed/harness/mechanism/recurrent_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heed::recurrent {
namespace {

using mechanism::FillEach;
using mechanism::Row;
using mechanism::Shape;

// Fills with 3 + 2 N(0, 1), so that most gates are open after a sigmoid, and a few `extreme` values.
const Buffer& FillGates(const Buffer& buffer, uint64_t seed, double extreme) {
  return FillEach(buffer, seed,
                  [&](Random& random) { return random.Chance(extreme) ? -1e4 : 3 + 2 * random.Normal(); });
}

std::optional<double> Negative(std::optional<double> x) { return x ? std::optional(-*x) : x; }

// Fills with -strength times an exponential deviate, which mixes weak and strong decays.
const Buffer& FillDecays(const Buffer& buffer, uint64_t seed, double strength, double extreme) {
  return FillEach(buffer, seed, [&](Random& random) {
    return random.Chance(extreme) ? -1e4 : strength * std::log(1 - random.Uniform());
  });
}

class Maker : public mechanism::Maker {
 public:
  Maker(const mechanism::Mechanism& m, const Definition& definition, DType dtype, uint64_t seed)
      : mechanism::Maker(m, dtype, seed), d_(definition) {}

 private:
  bool projected() const { return recurrence::IsRandom(d_.feature); }
  bool wide_features() const { return d_.feature == recurrence::Feature::kTaylor; }
  // The gradient of a constant is a sum over all tokens, which can overflow f16.
  bool HoldsSums(const Row& row) const { return row.type != mechanism::kAnyFloat || dtype_ != DType::kF16; }
  // The keys that read and write keys are close to.
  ConstTensorView keys() const {
    for (size_t i = 0; i < p_.inputs.size(); ++i) {
      if (m_.tensors[i].values == mechanism::kUnit) return p_.inputs[i];
    }
    return {};
  }
  ConstTensorView Mask(const Row& row, double kept) {
    return Keep(FillEach(Buffer(DType::kBool, ShapeOf(row.axes)), NextSeed(),
                         [&](Random& random) { return random.Chance(kept) ? 1 : 0; }));
  }

  void DrawSizes() override {
    sizes_.H = Integer(1, 2);
    sizes_.G = d_.channels() ? Channels() + Integer(0, 70) : sizes_.H * random_.Pick<int64_t>({1, 1, 1, 2, 3});
    sizes_.K = wide_features() ? Integer(1, 9) : Channels();
    sizes_.V = Channels();
    sizes_.M = projected() ? Integer(1, 24) : 0;
    sizes_.N = d_.several_writes() ? Integer(1, 5) : 1;
    sizes_.F = FeaturesOf(d_, sizes_);
  }
  ConstTensorView DrawInput(const Row& row) override {
    if (row.optional && !Chance(0.4)) return {};
    if (row.values == mechanism::kMask) return Mask(row, Chance(0.1) ? 0 : 0.7);
    const bool own = row.type != mechanism::kSame && (!HoldsSums(row) || Chance(0.5));
    const bool any = row.type == mechanism::kAnyFloat && Chance(0.3);
    const DType dtype = any ? random_.Pick({DType::kF64, DType::kF32, DType::kBF16}) : own ? wide() : dtype_;
    const Buffer buffer = AnyLayout(dtype, ShapeOf(row.axes), row.contiguous_rows);
    if (row.values == mechanism::kOpenGates) {
      const uint64_t seed = NextSeed();
      return Keep(FillGates(buffer, seed, Chance(0.2) ? 0.02 : 0));
    }
    if (row.values != mechanism::kDecays) {
      return Keep(FillValues(row, buffer, NextSeed(), keys()));
    }
    const double strength = std::exp(random_.Uniform(-7, 2));
    const uint64_t seed = NextSeed();
    const double extreme = Chance(0.2) ? 0.02 : 0;
    return Keep(FillDecays(buffer, seed, Chance(0.1) ? 0 : strength, extreme));
  }
  void DrawOptions() override {
    if (d_.channels() || !Chance(0.3)) return;
    // Random features are exponentials of values that the scale multiplies.
    p_.options.scale = random_.Uniform(0.1, 1.5) / (projected() ? std::sqrt(static_cast<double>(sizes_.K)) : 1);
  }

  void SetSizes(const Sizes& s) override {
    sizes_.H = s.Hkv;
    // Channels count over all value heads.
    sizes_.G = d_.channels() ? s.Hq * s.Dv : s.Hq;
    // Pairs of channels give 300 features at 24 channels, 30,000 at 256, which no model uses.
    sizes_.K = wide_features() ? std::min<int64_t>(s.D, 24) : s.D;
    sizes_.V = s.Dv;
    sizes_.M = projected() ? std::min<int64_t>(4 * sizes_.K, 256) : 0;
    sizes_.N = d_.several_writes() ? 2 : 1;
    sizes_.F = FeaturesOf(d_, sizes_);
  }
  ConstTensorView MakeInput(const Row& row) override {
    // Masks and decays of columns exist if the variant names them; optional decays of tokens are absent with "ungated".
    const bool is_mask = row.values == mechanism::kMask;
    if (is_mask && !words_.Has(row.name)) return {};
    if (is_mask) return Mask(row, 0.7);
    const bool adds = row.name == "log_decay_v";
    if (row.optional && (adds ? !words_.Has("columns") : words_.Has("ungated"))) return {};
    const Buffer buffer(HoldsSums(row) ? dtype_ : wide(), ShapeOf(row.axes), Placement::kAligned);
    const double extreme = words_.Has("strong") ? 0.02 : 0;
    const std::optional<double> decay = words_.Has("vanishing") ? std::log1p(-1e-6)
                                        : words_.Has("faint")   ? -1e-8  // less than half a rounding of 1
                                        : words_.Has("strong")  ? std::nullopt
                                                                : Negative(words_.Number("strong"));
    if (row.values == mechanism::kOpenGates) {  // the same decays before a sigmoid
      return Keep(decay ? buffer.FillConstant(*decay - std::log(-std::expm1(*decay)))
                        : FillGates(buffer, NextSeed(), extreme));
    }
    if (row.values != mechanism::kDecays) {
      return Keep(FillValues(row, buffer, NextSeed(), keys()));
    }
    if (decay) return Keep(buffer.FillConstant(*decay));
    return Keep(FillDecays(buffer, NextSeed(), 0.05, extreme));
  }
  double Flops(int64_t tokens, bool backward) override {
    const double products = d_.channels()                                  ? kFlopsOfChannels * (backward ? 2 : 1)
                            : d_.delta() == recurrence::Delta::kNone       ? (backward ? 12 : 4)
                            : d_.delta() == recurrence::Delta::kAfterDecay ? (backward ? 18 : 6)
                                                                           : (backward ? 22 : 8);
    const int64_t elements = d_.channels() ? 1 : sizes_.F * sizes_.V * sizes_.N;
    double flops = products * static_cast<double>(sizes_.B * tokens * sizes_.G * elements);
    if (projected()) {
      flops += (backward ? 12 : 4) * static_cast<double>(sizes_.B * tokens * sizes_.H * sizes_.F * sizes_.K);
    }
    return flops;
  }

  const Definition& d_;
};

}  // namespace

std::span<const StateTensor> StatesOf(const Definition& d) {
  const auto count = std::ranges::count_if(d.table.states, [&](const StateTensor& state) { return d.Has(state); });
  return d.table.states.first(static_cast<size_t>(count));
}

Mechanism Bound(const std::string& name, const Definition& definition,
                const std::shared_ptr<const mechanism::Calls>& calls, const std::string& options) {
  Mechanism m;
  m.name = name;
  m.definition = definition;
  m.forward = [calls](Context& ctx, const Arguments& in, const Options& common, const Results& out) {
    calls->Forward(ctx, in, common, out);
  };
  m.backward = [calls](Context& ctx, const Arguments& in, const Options& common, const Results& out) {
    calls->Backward(ctx, in, common, out);
  };
  m.step = [calls](Context& ctx, const Arguments& in, const Options& common, const Results& out) {
    calls->Step(ctx, in, common, out);
  };
  m.of_problems.name = name;
  m.of_problems.options = options;
  Describe(definition, m.of_problems);
  mechanism::Bind(definition.table.tensors, StatesOf(definition), definition.o_axes(), calls, m.of_problems);
  return m;
}

void Describe(const Definition& d, mechanism::Mechanism& m) {
  m.causal = d.causal;
  m.has_direction = d.has_direction;
  m.derive = [d](AxisSizes& sizes) { sizes.F = FeaturesOf(d, sizes); };
}

const Buffer& FillValues(const Row& row, const Buffer& buffer, uint64_t seed, const ConstTensorView& keys) {
  using enum mechanism::Values;
  if (row.values == kOpenGates) return FillGates(buffer, seed, 0);
  if (row.values == kFractions) {
    return FillEach(buffer, seed, [](Random& random) { return random.Uniform(0.05, 1); });
  }
  buffer.FillNormal(seed);
  if (row.values == kNormal || buffer.view().num_elements() == 0) return buffer;
  const TensorView view = buffer.view();
  const int64_t size = view.size(view.rank() - 1);
  const bool like_keys = row.values != kUnit;
  Shape at(view.sizes().size());
  do {
    if (at.back() != 0) continue;  // once per row
    std::vector<double> elements;
    double sum = 0;
    for (at.back() = 0; at.back() < size; ++at.back()) {
      const double noise = GetElement(view, at) / std::sqrt(static_cast<double>(size));
      elements.push_back(like_keys ? GetElement(keys, at) + 0.1 * noise : noise);
      sum += elements.back() * elements.back();
    }
    const double sign = row.values == kNegativeKeys ? -1 : 1;
    const double factor = sign * (like_keys ? 0.9 : 1) / std::sqrt(std::max(sum, 1e-12));
    for (at.back() = 0; at.back() < size; ++at.back()) {
      SetElement(view, at, factor * elements[static_cast<size_t>(at.back())]);
    }
    at.back() = size - 1;
  } while (NextIndex(view.sizes(), at));
  return buffer;
}

Case MakeCase(const mechanism::Mechanism& m, const Definition& definition, const CaseRequest& request) {
  return Maker(m, definition, request.dtype, request.seed).MakeCase(request);
}

Case RandomCase(const mechanism::Mechanism& m, const Definition& definition, DType dtype, uint64_t seed) {
  return Maker(m, definition, dtype, seed).RandomCase();
}

namespace {

OpEntry PlainEntry(const Mechanism& m, OpEntry said) {
  OpEntry entry = mechanism::EntryOf(std::move(said), m.of_problems);
  for (InputSpec& input : entry.inputs) {  // value heads are heads too
    std::replace(input.axes.begin(), input.axes.end(), 'G', 'H');
  }
  return entry;
}

// The product of a tensor's axes per token, or of a state's per sequence, in the letters of Sizes.
std::string SizeText(std::string_view axes) {
  std::string text;
  for (const char letter : axes) {
    const std::string size = letter == 'H'                    ? "Hkv"
                             : letter == 'G'                  ? "Hq"
                             : letter == 'C'                  ? "Hq Dv"
                             : letter == 'K' || letter == 'F' ? "D"
                             : letter == 'V'                  ? "Dv"
                             : letter == 'N'                  ? "n"
                                                              : "";
    if (!size.empty()) text += (text.empty() ? "" : " ") + size;
  }
  return text;
}

// "(2 Hkv D + 2 Hq Dv)" of the products that are added.
std::string SumText(const std::vector<std::string>& terms) {
  std::string text;
  for (size_t i = 0; i < terms.size(); ++i) {
    const auto here = terms.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find(terms.begin(), here, terms[i]) != here) continue;
    const auto count = std::count(terms.begin(), terms.end(), terms[i]);
    text += (text.empty() ? "" : " + ") + (count > 1 ? std::to_string(count) + " " : "") + terms[i];
  }
  return terms.size() > 1 ? "(" + text + ")" : text;
}

std::string BytesText(const Definition& d) {
  std::vector<std::string> terms;
  for (const Tensor& tensor : d.table.tensors) {
    if (tensor.over_tokens()) terms.push_back(SizeText(tensor.axes));
  }
  terms.push_back(SizeText(d.o_axes()));
  return "B Tq " + SumText(terms) + " size";
}

std::string StateText(const Definition& d) {
  std::vector<std::string> terms;
  for (const StateTensor& state : d.table.states) terms.push_back(SizeText(state.axes));
  return "B " + SumText(terms) + " 4";
}

std::string FlopsText(const Definition& d) {
  if (d.channels()) return "60 per token and channel, backward 120";
  const std::string n = d.several_writes() ? "n " : "";
  const auto [forward, backward] = d.delta() == recurrence::Delta::kNone         ? std::pair("4 ", "12 ")
                                   : d.delta() == recurrence::Delta::kAfterDecay ? std::pair("6 ", "18 ")
                                                                                 : std::pair("8 ", "22 ");
  return forward + n + "D Dv per token and value head, backward " + backward + n + "D Dv" +
         (n.empty() ? "" : "; n = 2");
}

}  // namespace

OpEntry LinearEntry(const Mechanism& plain, const std::vector<std::string>& more_variants) {
  OpEntry entry = PlainEntry(plain, {.family = "linear",
                                     .variants = kVariants,
                                     .flops = FlopsText(plain.definition),
                                     .bytes = BytesText(plain.definition),
                                     .state = "B Hq D (Dv + 1) 4"});
  entry.variants.insert(entry.variants.end(), more_variants.begin(), more_variants.end());
  return entry;
}

OpEntry EntryOf(const Mechanism& m, const char* family) {
  const Definition& d = m.definition;
  const Tensor* const decay = d.table.Find(Role::kLogDecay);
  OpEntry entry = PlainEntry(m, {.family = family,
                                 .variants = decay != nullptr || d.exp_gates() ? kGatedVariants : kVariants,
                                 .flops = FlopsText(d),
                                 .bytes = BytesText(d),
                                 .state = StateText(d)});
  if (decay != nullptr && decay->optional && decay->over_tokens()) entry.variants.emplace_back("ungated");
  if (d.table.Has(Role::kLogValueDecay)) {
    entry.variants.insert(entry.variants.end(), {"columns", "columns+strong", "columns+vanishing"});
  }
  entry.recurrent = &m;
  entry.make_case = [&m](const CaseRequest& request) { return MakeCase(m, request); };
  entry.random_case = [&m](DType dtype, uint64_t seed) { return RandomCase(m, dtype, seed); };
  return entry;
}

}  // namespace heed::recurrent
