// Assumed gates and projections for files that have none.
#include "heed/harness/assumed_tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>

#include "heed/harness/buffer.h"
#include "heed/ops/linear/performer/orthogonal_features.h"

namespace heed {
namespace {

constexpr uint64_t kSeed = 1;

double LogSigmoid(double x) { return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x)); }

// Fills rows [R, C] so that each averages a stretch of tokens.
void FillMeans(const Buffer& x) {
  const int64_t rows = x.view().size(0), tokens = x.view().size(1);
  x.FillConstant(0);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t begin = r * tokens / rows, end = (r + 1) * tokens / rows;
    for (int64_t t = begin; t < end; ++t) {
      x.Set({r, t}, 1 / static_cast<double>(end - begin));
    }
  }
}

void Fill(Context& ctx, const std::string& name, const Buffer& x) {
  if (name == "e" || name == "f") return FillMeans(x);
  if (name == "projection") return OrthogonalFeatures(ctx, kSeed, {}, x.view());
  const bool decays = name == "log_decay", scales = name == "level_scales";
  Random random(kSeed, decays ? 0 : 1);
  for (int64_t i = 0; i < x.view().num_elements(); ++i) {
    const double normal = random.Normal();
    x.as<double>()[i] = decays ? LogSigmoid(normal) / 16 : scales ? -LogSigmoid(-normal) : normal;
  }
}

ConstTensorView Assume(Context& ctx, const InputSpec& spec, NamedTensors& set) {
  const ConstTensorView &q = set.tensors.at("q"), &k = set.tensors.at("k"), &v = set.tensors.at("v");
  const std::map<char, int64_t> letters =
      AssumedAxes({q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)});
  std::vector<int64_t> sizes;
  for (const char letter : spec.axes) sizes.push_back(letters.at(letter));
  const Buffer exact(DType::kF64, sizes, Placement::kAligned);
  Fill(ctx, spec.name, exact);
  const bool widen = spec.wide && SizeOf(set.dtype) == 2;
  const auto rounded = std::make_shared<Buffer>(widen ? DType::kF32 : set.dtype, sizes, Placement::kAligned);
  for (int64_t i = 0; i < exact.view().num_elements(); ++i) {
    StoreDouble(rounded->view().dtype(), rounded->view().data(), i, exact.as<double>()[i]);
  }
  set.owners.push_back(rounded);
  return rounded->view();
}

}  // namespace

std::string WhatIsAssumed(const std::string& name) {
  if (name == "log_decay") return "drawn from log sigmoid(N(0, 1)) / 16, where gates of GLA begin";
  if (name == "level_scales") return "drawn from softplus(N(0, 1))";
  if (name == "u") return "drawn from N(0, 1)";
  if (name == "e" || name == "f") return "means of four tokens, of more where these are over 1024";
  if (name == "projection") return "orthogonal random features, four per channel";
  return "";
}

std::map<char, int64_t> AssumedAxes(const Sizes& s) {
  return {{'B', s.B},
          {'T', s.Tk},
          {'H', s.Hq},
          {'G', s.Hkv},
          {'K', s.D},
          {'V', s.Dv},
          {'C', s.Tk},
          {'M', 4 * s.D},
          {'E', 3},
          {'R', std::clamp<int64_t>((s.Tk + 3) / 4, 1, 256)},
          {'L', s.Tk < 2 ? 1 : std::bit_width(static_cast<uint64_t>(s.Tk - 1)) + 1}};
}

bool TakesQkv(const OpEntry& op) {
  const auto has = [&](const char* name) { return std::ranges::count(op.inputs, name, &InputSpec::name) > 0; };
  return (has("q") || has("r")) && has("k") && has("v");
}

std::vector<InputSpec> SpecsBesideQkv(const OpEntry& op) {
  std::vector<InputSpec> specs = {{"q", "BTHK"}, {"k", "BTHK"}, {"v", "BTHV"}};
  for (InputSpec spec : op.inputs) {
    const auto there = std::ranges::find(specs, spec.name, &InputSpec::name);
    if (there != specs.end() && spec.axes.find('G') != std::string::npos) there->axes = spec.axes;
    if (there != specs.end() || spec.optional) continue;
    spec.optional = true;
    specs.push_back(spec);
  }
  return specs;
}

std::vector<std::string> Complete(Context& ctx, const OpEntry& op, NamedTensors& set,
                                  std::vector<std::string>& assumed) {
  // RWKV's r are queries. Beside q, r is a tensor of its own.
  const ConstTensorView& q = set.tensors.at("q");
  if (std::ranges::count(op.inputs, "q", &InputSpec::name) == 0) {
    set.tensors.try_emplace("r", q);
  } else if (const auto r = set.tensors.find("r"); r != set.tensors.end() && r->second.data() == q.data()) {
    set.tensors.erase(r);
  }
  std::vector<const InputSpec*> absent;
  std::vector<std::string> names;
  for (const InputSpec& spec : op.inputs) {
    if (spec.optional || set.tensors.contains(spec.name)) continue;
    absent.push_back(&spec);
    names.push_back(spec.name);
  }
  const bool known =
      std::none_of(names.begin(), names.end(), [](const std::string& name) { return WhatIsAssumed(name).empty(); });
  if (!known) return names;
  for (const InputSpec* spec : absent) set.tensors[spec->name] = Assume(ctx, *spec, set);
  assumed = names;
  return {};
}

}  // namespace heed
