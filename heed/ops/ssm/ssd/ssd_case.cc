// SSD in the harness: groups, skips, gates, biases, softplus and limits.
#include <cmath>
#include <string>

#include "heed/harness/mechanism/problem_case.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/ssm/ssd/ssd.h"
#include "heed/ops/ssm/ssd/ssd_case.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"

namespace heed::ssd {
namespace {

using mechanism::FillEach;
using mechanism::Row;
using mechanism::Shape;

mechanism::Mechanism MechanismOf(const Options& own) {
  mechanism::Mechanism m;
  m.name = "ssd";
  m.options = own.dt_softplus ? " softplus" : "";
  mechanism::Bind<Structs, Options>(mechanism::Members(kTensors), mechanism::Members(kStates), kTensors.x.axes, own,
                                    {HEED_FUNCTIONS, &Tolerance, &BackwardTolerance}, m);
  return m;
}

// A of trained models: -1 to -16.
double Rate(Random& random) { return -std::exp(random.Uniform(0, 2.77)); }

class Maker : public mechanism::Maker {
 public:
  Maker(const mechanism::Mechanism& m, bool softplus, DType dtype, uint64_t seed)
      : mechanism::Maker(m, dtype, seed), softplus_(softplus) {}

 private:
  void DrawSizes() override {
    sizes_.G = Integer(1, 2);
    sizes_.H = sizes_.G * random_.Pick<int64_t>({1, 1, 2, 3});
    sizes_.N = Channels();
    sizes_.P = Channels();
    // Gradients of constants are sums over all tokens, which can overflow f16.
    constants_ = dtype_ == DType::kF16 || Chance(0.5) ? wide() : dtype_;
  }
  ConstTensorView DrawInput(const Row& row) override {
    if (row.optional && Chance(0.5)) return {};
    using enum mechanism::Values;
    const std::string axes = row.name == "D" ? (Chance(0.5) ? "HP" : "H") : row.axes;
    if (row.over_tokens() && row.values == kNormal) return Normal(ShapeOf(axes));
    if (row.values == kSteps) {
      const double center = random_.Uniform(-6, 1);
      const Buffer steps = AnyLayout(Chance(0.5) ? dtype_ : wide(), ShapeOf(axes));
      return Keep(FillEach(steps, NextSeed(), [&](Random& random) {
        const double x = center + random.Normal();
        return softplus_ ? x : std::exp(x);
      }));
    }
    const Buffer buffer(constants_, ShapeOf(axes));
    const bool extreme = row.values == kRates && Chance(0.1);
    if (row.values == kNormal) return Keep(buffer.FillNormal(NextSeed()));
    return Keep(FillEach(buffer, NextSeed(), [&](Random& random) {
      if (row.values == kStepBiases) return softplus_ ? random.Normal() : random.Uniform(0, 0.2);
      return extreme && random.Chance(0.3) ? -1e4 : Rate(random) * 0.3;
    }));
  }
  void DrawOptions() override {
    if (Chance(0.2)) p_.options.scale = random_.Uniform(0.1, 1.5);
  }

  void SetSizes(const Sizes& s) override {
    sizes_.G = s.Hkv;
    sizes_.H = s.Hq;
    sizes_.N = s.D;
    sizes_.P = s.Dv;
  }
  ConstTensorView MakeInput(const Row& row) override {
    if ((row.name == "D" && !words_.Has("skip")) || (row.name == "z" && !words_.Has("gate"))) return {};
    const Shape shape = ShapeOf(row.name == "D" ? "H" : row.axes);
    const Buffer buffer(row.over_tokens() ? dtype_ : wide(), shape, Placement::kAligned);
    if (row.values == mechanism::kRates) return Keep(FillEach(buffer, NextSeed(), &Rate));
    if (row.values == mechanism::kStepBiases) return Keep(buffer.FillConstant(-4));
    return Keep(buffer.FillNormal(NextSeed()));
  }
  double Flops(int64_t tokens, bool backward) override {
    return (backward ? 12 : 4) * static_cast<double>(sizes_.B * tokens * sizes_.H * sizes_.N * sizes_.P);
  }

  bool softplus_;
  DType constants_ = DType::kF32;
};

mechanism::Mechanism AsItIs(const mechanism::Mechanism& m) { return m; }
Case MakeCase(const CaseRequest& request) { return MakeCaseOf(&AsItIs, request); }
Case RandomCase(DType dtype, uint64_t seed) { return RandomCaseOf(&AsItIs, dtype, seed); }

}  // namespace

Case MakeCaseOf(const Moving& moved, const CaseRequest& request) {
  Options options;
  options.dt_softplus = true;
  return Maker(moved(MechanismOf(options)), true, request.dtype, request.seed).MakeCase(request);
}

Case RandomCaseOf(const Moving& moved, DType dtype, uint64_t seed) {
  Random random(seed, 1);
  Options options;
  options.dt_softplus = random.Chance(0.7);
  if (random.Chance(0.3)) options.dt_min = random.Uniform(0, 0.05);
  if (random.Chance(0.3)) options.dt_max = random.Uniform(0.06, 0.5);
  return Maker(moved(MechanismOf(options)), options.dt_softplus, dtype, seed).RandomCase();
}

OpEntry Entry() {
  std::vector<std::string> variants = recurrent::kVariants;
  variants.insert(variants.end(), {"skip", "gate"});
  OpEntry entry = mechanism::EntryOf({.family = "ssm",
                                      .variants = variants,
                                      .flops = "4 D Dv per token and value head, backward 12 D Dv",
                                      .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
                                      .state = "B Hq D Dv 4",
                                      .make_case = &MakeCase,
                                      .random_case = &RandomCase},
                                     MechanismOf({}));
  entry.inputs[5].axes = "H";  // the form of D in checkpoints
  return entry;
}

}  // namespace heed::ssd
