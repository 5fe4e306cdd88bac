// Problems of mechanisms on the scan engine: sizes, layouts and values.
#include "heed/harness/mechanism/scanning_case.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace heed::scanning {
namespace {

using mechanism::FillEach;
using mechanism::Row;
using mechanism::Shape;

bool TakesTaps(const Definition& d) { return d.method == scan::Method::kConvolution; }

bool Has(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// In a step, only its shape shows whether a tensor is constant.
bool MayBeConstant(bool step, const AxisSizes& sizes) { return !step || sizes.B != sizes.D; }

// Fills steps from 0.001 to 0.2 (through a softplus, or without one), rates from -0.1 to -16, decays from 1 to 0.5;
// `strong` values are 40 times as large now and then, `vanishing` ones a millionth.
const Buffer& Fill(const Row& row, const Buffer& buffer, uint64_t seed, bool softplus, bool strong, bool vanishing) {
  using enum mechanism::Values;
  if (row.values == kNormal || (row.values == kStepBiases && softplus)) return buffer.FillNormal(seed);
  return FillEach(buffer, seed, [&](Random& random) {
    if (row.values == kRates) return -0.1 * std::exp(random.Uniform() * std::log(160.0));
    double value = 0.001 * std::exp(random.Uniform() * std::log(200.0));
    if (strong && random.Chance(0.05)) value *= 40;
    if (vanishing) value *= 1e-6;
    if (row.values == kDecays) value *= -3;
    if (row.values == kSteps && softplus) value = std::log(std::expm1(value));
    return row.values == kLogSteps ? std::log(value) : value;
  });
}

// Row-major strides, with the axes of channels and tokens swapped if `swapped`; heads stay before channels.
Shape StridesOf(std::string_view axes, const Shape& sizes, bool swapped) {
  std::vector<size_t> order(axes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (swapped && axes == "BTHd") {
    std::rotate(order.begin() + 1, order.begin() + 2, order.end());
  } else if (swapped && axes.size() > 2) {
    std::swap(order[axes.size() - 2], order[axes.size() - 1]);
  }
  Shape strides(axes.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

class Maker : public mechanism::Maker {
 public:
  Maker(const Mechanism& m, const Choice& choice, DType dtype, uint64_t seed)
      : mechanism::Maker(m.of_problems, dtype, seed), d_(m.definition), choice_(choice) {}

 private:
  bool swapped() const { return words_.Has("strided") || choice_.swapped; }
  bool has_heads() const { return d_.rule == scan::Rule::kHeads; }

  void DrawSizes() override {
    sizes_.G = Chance(0.6) ? 1 : Integer(2, 3);
    sizes_.D = sizes_.G * Channels();
    if (has_heads()) DrawHeads();
    sizes_.N = Chance(0.4) ? 16 : Chance(0.8) ? Integer(1, 9) : Integer(17, 37);
    if (d_.rule == scan::Rule::kTaps || (!p_.step && TakesTaps(d_))) DrawTaps();
    if (d_.kernels != nullptr) DrawWindow();
    strong_ = Chance(0.2);
    vanishing_ = Chance(0.15);
  }
  // Few channels, since a head has a row for each pair of them.
  void DrawHeads() {
    sizes_.H = Chance(0.2) ? Integer(1, 40) : Integer(1, 3);
    sizes_.d = sizes_.H > 3 ? 1 : Chance(0.3) ? 1 : Integer(1, 5);
    sizes_.D = sizes_.H * sizes_.d;
    sizes_.W = Chance(0.3) ? 1 : Integer(1, 20);
    sizes_.w = sizes_.W - 1;
  }
  // Sequences that are long enough for several blocks have few channels.
  void DrawTaps() {
    if (Chance(0.4)) {
      sizes_.T = Integer(100, 900);
      if (sizes_.H < 0) sizes_.D = Integer(1, 20);
    }
    sizes_.L = Chance(0.3) ? sizes_.T : Chance(0.5) ? Integer(0, sizes_.T) : Integer(0, sizes_.T / 4);
  }
  // Few taps, with about as many tokens and channels as a task has, and more.
  void DrawWindow() {
    sizes_.W = Chance(0.03) ? 140 : Chance(0.5) ? 4 : random_.Pick<int64_t>({1, 2, 3, 5, 7, 8, 9, 20});
    sizes_.w = sizes_.W - 1;
    if (!p_.step && Chance(0.15)) sizes_.T = random_.Pick<int64_t>({127, 129, 260, 1030});
    if (Chance(0.05)) sizes_.D = 257;
  }
  ConstTensorView DrawInput(const Row& row) override {
    if (row.optional && Chance(0.4)) return {};
    std::string_view axes = row.axes;
    if (axes.find('|') != std::string_view::npos) {
      axes = Chance(0.2) && MayBeConstant(p_.step, sizes_)
                 ? axes.substr(axes.rfind('|') + 1)
                 : mechanism::AxesOfRank(axes, sizes_.G == 1 && Chance(0.5) ? 3 : 4);
    }
    const bool over_tokens = axes.find('T') != std::string_view::npos;
    // Gradients of constants are sums over tokens, which float16 holds for a few only.
    const bool fits = over_tokens || dtype_ != DType::kF16 || sizes_.B * sizes_.T <= 64;
    const DType dtype = p_.inputs.empty() || (fits && Chance(0.6)) ? dtype_
                        : over_tokens || row.type == mechanism::kWide
                            ? wide()
                            : random_.Pick({DType::kF64, DType::kF32, DType::kBF16});
    const Buffer buffer = Layout(axes, ShapeOf(axes), dtype);
    return Keep(Fill(row, buffer, NextSeed(), d_.softplus, strong_, vanishing_));
  }
  ConstTensorView DrawOutputGradient(const Shape& sizes) override {
    return Keep(Layout(m_.o_axes, sizes, dtype_).FillNormal(NextSeed()));
  }
  void DrawStates(const std::vector<Shape>& shapes) override {
    p_.stateless = !d_.has_state() || (!p_.step && TakesTaps(d_) && Chance(0.7));
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (p_.step || (!p_.stateless && Chance(0.6))) p_.initial[i] = State(shapes[i]);
      if (!p_.stateless && Chance(0.5)) p_.d_final[i] = State(shapes[i]);
    }
  }
  Shape DrawStrides() override {
    Shape strides = StridesOf(m_.o_axes, OutputShape(), Chance(0.5));
    const int64_t step = d_.kernels != nullptr && Chance(0.2) ? 2 : 1;
    for (int64_t& stride : strides) stride *= step;
    return strides;
  }

  // Contiguous tokens or channels, either reversed, or neither; sometimes the same for all tensors.
  Buffer Layout(std::string_view axes, const Shape& sizes, DType dtype) {
    Shape strides = StridesOf(axes, sizes, Chance(0.5));
    const int64_t step = Chance(0.8) ? 1 : 2;
    for (int64_t& stride : strides) stride *= step;
    if (Chance(0.15)) strides[axes.size() - 1] *= -1;
    if (Chance(0.15) && axes.size() > 2) strides[axes.size() - 2] *= -1;
    if (Chance(0.04)) strides[axes.size() - 1] = 0;
    const int64_t gap = Integer(0, 9);
    return Buffer(dtype, sizes, strides, AnyGuard(), gap);
  }
  ConstTensorView State(const Shape& sizes) {
    Shape strides(sizes.size());
    const bool swapped = Chance(0.3);
    int64_t step = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      strides[i] = step;
      step *= sizes[i];
    }
    if (swapped && sizes.size() == 3) {
      strides[1] = 1;
      strides[2] = sizes[1];
    }
    return Keep(Buffer(wide(), sizes, strides, AnyGuard()).FillNormal(NextSeed()));
  }

  void SetSizes(const Sizes& s) override {
    // The requested number of channels, if heads are no larger than those of scans.
    sizes_.d = std::clamp<int64_t>(s.D, 1, choice_.head_channels);
    sizes_.H = s.Hq * (s.D / sizes_.d);
    sizes_.D = has_heads() ? sizes_.H * sizes_.d : s.Hq * s.D;
    sizes_.N = choice_.states;
    sizes_.L = std::min(choice_.taps, sizes_.T);
    sizes_.W = choice_.shifts;
    sizes_.w = sizes_.W - 1;
    sizes_.G = std::max<int64_t>(choice_.groups, 1);
    if (sizes_.D % sizes_.G != 0) sizes_.G = 1;
    p_.stateless = TakesTaps(d_) && !p_.step;
  }
  ConstTensorView MakeInput(const Row& row) override {
    if (Has(choice_.absent, row.name)) return {};
    std::string_view axes = row.axes;
    if (axes.find('|') != std::string_view::npos) {
      axes = Has(choice_.constant, row.name) && MayBeConstant(p_.step, sizes_)
                 ? axes.substr(axes.rfind('|') + 1)
                 : mechanism::AxesOfRank(axes, choice_.groups == 0 ? 3 : 4);
    }
    const Shape shape = ShapeOf(axes);
    const bool over_tokens = axes.find('T') != std::string_view::npos;
    const DType dtype = over_tokens || dtype_ != DType::kF16 ? dtype_ : DType::kF32;
    const Buffer buffer(dtype, shape, StridesOf(axes, shape, swapped() && over_tokens), Placement::kAligned);
    const auto decay = words_.Has("strong") ? std::nullopt : words_.Number("strong");
    if (decay && row.values == mechanism::kDecays) return Keep(buffer.FillConstant(-*decay));
    return Keep(Fill(row, buffer, NextSeed(), d_.softplus, words_.Has("strong"), words_.Has("vanishing")));
  }
  Shape Strides() override { return StridesOf(m_.o_axes, OutputShape(), swapped()); }
  double Flops(int64_t tokens, bool backward) override {
    return static_cast<double>(sizes_.B) * FlopsOf(d_, sizes_, tokens, backward);
  }

  const Definition& d_;
  const Choice& choice_;
  bool strong_ = false, vanishing_ = false;
};

}  // namespace

Mechanism Bound(const std::string& name, const Definition& definition,
                const std::shared_ptr<const mechanism::Calls>& calls, const std::string& options) {
  Mechanism m;
  m.definition = definition;
  m.of_problems.name = name;
  m.of_problems.options = options;
  Describe(definition, m.of_problems);
  mechanism::Bind(definition.table.tensors, definition.table.states, definition.o_axes(), calls, m.of_problems);
  return m;
}

void Describe(const Definition& d, mechanism::Mechanism& m) {
  m.has_scale = false;
  const bool has_heads = d.rule == scan::Rule::kHeads;
  m.derive = [has_heads](AxisSizes& sizes) {
    if (has_heads) sizes.D = sizes.H * sizes.d;
    sizes.w = sizes.W - 1;
  };
}

std::vector<ChannelPlace> PlacesOf(int64_t B, int64_t T, int64_t D, const Options& options) {
  std::vector<ChannelPlace> places;
  const auto ranges = mechanism::SequencesOf(options, B, T);
  for (size_t i = 0; i < ranges.size(); ++i) {
    ChannelPlace place = {static_cast<int64_t>(i), ranges[i].batch, 0, {}};
    for (int64_t t = ranges[i].begin; t < ranges[i].end; ++t) place.tokens.push_back(t);
    if (options.reverse) std::reverse(place.tokens.begin(), place.tokens.end());
    for (; place.channel < D; ++place.channel) places.push_back(place);
  }
  return places;
}

Epsilon EpsilonOf(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {0x1p-52, 1e-290, 0, 0};
    case DType::kF32: return {0x1p-24, 1e-34, 0x1p-24, 0};
    case DType::kBF16: return {0x1p-24, 1e-34, 1.01 * 0x1p-8, 0};
    default: return {0x1p-24, 1e-34, 1.01 * 0x1p-11, 0x1p-25};
  }
}

void RoundSums(const ConstTensorView& input, const ConstTensorView& expected, const TensorView& tolerance) {
  if (!tolerance.present() || tolerance.num_elements() == 0) return;
  const Epsilon e = EpsilonOf(input.dtype());
  Shape at(tolerance.sizes().size());
  do {
    SetElement(tolerance, at, Stored(GetElement(expected, at), GetElement(tolerance, at), e));
  } while (NextIndex(tolerance.sizes(), at));
}

Case MakeCase(const Mechanism& m, const CaseRequest& request, const Choice& choice) {
  return Maker(m, choice, request.dtype, request.seed).MakeCase(request);
}

Case RandomCase(const Mechanism& m, DType dtype, uint64_t seed) { return Maker(m, {}, dtype, seed).RandomCase(); }

OpEntry EntryOf(const Mechanism& plain, OpEntry said) {
  OpEntry entry = mechanism::EntryOf(std::move(said), plain.of_problems);
  for (const mechanism::StateRow& state : plain.of_problems.states) {
    entry.inputs.push_back({"initial_" + state.name, state.axes, true, true});
  }
  const auto m = std::make_shared<const Mechanism>(plain);
  if (!entry.make_case) {
    entry.make_case = [m](const CaseRequest& request) { return MakeCase(*m, request, {}); };
  }
  if (!entry.random_case) {
    entry.random_case = [m](DType dtype, uint64_t seed) { return RandomCase(*m, dtype, seed); };
  }
  return entry;
}

}  // namespace heed::scanning
