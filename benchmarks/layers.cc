// Layers: the parts of each layer, and the alternation in which both are timed.
#include "benchmarks/layers.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/format.h"
#include "heed/core/context.h"
#include "heed/core/os.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/timed_case.h"
#include "heed/harness/timing.h"
#include "heed/layers/gated_delta_net.h"
#include "heed/layers/grouped_query_attention.h"
#include "heed/layers/h3_layer.h"
#include "heed/layers/latent_attention.h"
#include "heed/layers/layer_case.h"
#include "heed/layers/linear.h"
#include "heed/layers/linear_attention_layer.h"
#include "heed/layers/mamba.h"
#include "heed/layers/mamba2.h"
#include "heed/layers/multi_head_attention.h"
#include "heed/layers/rwkv4_layer.h"
#include "heed/ops/positions/rotary.h"
#include "heed/state/cache_rotary.h"

namespace heed::bench {
namespace {

using layers::LayerCase;

constexpr int64_t kWidth = 512, kTokens = 1024;
constexpr double kGoal = 1.05;

struct Product {
  int64_t inputs, outputs;
};

// A call of an operator: query heads, key heads, key channels, value channels.
struct Operator {
  const char* name;
  int64_t Hq, Hkv, D, Dv;
  const char* variant = "";
};

// A rotation of heads with this number of channels.
struct Turn {
  int64_t heads, channels;
};

struct Subject {
  LayerCase layer;
  std::vector<Product> products;
  std::vector<Operator> operators;
  std::vector<Turn> turns = {};
};

std::vector<Subject> Subjects() {
  using namespace layers;  // NOLINT(google-build-using-namespace): a table of nothing else
  const CacheRotary rotary = {.pairs = RotaryPairs::kHalfSplit};
  return {
      {CaseOf<MultiHeadAttention>("multi-head attention", {.width = kWidth, .heads = 8, .causal = true}),
       {{kWidth, 3 * kWidth}, {kWidth, kWidth}},
       {{"attention", 8, 8, 64, 64, "causal"}}},
      {CaseOf<GroupedQueryAttention>("grouped-query attention",
                                     {.width = kWidth, .heads = 8, .kv_heads = 4, .rotary = rotary}),
       {{kWidth, 2 * kWidth}, {kWidth, kWidth}},
       {{"attention", 8, 4, 64, 64, "causal"}},
       {{8, 64}, {4, 64}}},
      {CaseOf<LatentAttention>("latent attention", {.width = kWidth,
                                                    .heads = 8,
                                                    .query_rank = 192,
                                                    .latent = 128,
                                                    .nope = 64,
                                                    .rope = 32,
                                                    .value = 64,
                                                    .rotary = {.dim = 32}}),
       {{kWidth, 192}, {192, 8 * 96}, {kWidth, 128 + 32}, {128, 8 * 128}, {kWidth, kWidth}},
       {{"attention", 8, 8, 96, 64, "causal"}},
       {{8, 32}, {1, 32}}},
      {CaseOf<LinearAttention>("gated linear attention", {.mechanism = "gla", .width = kWidth, .heads = 8}),
       {{kWidth, 4 * kWidth + 16}, {16, kWidth}, {kWidth, kWidth}},
       {{"gla", 8, 8, 64, 64}}},
      {CaseOf<LinearAttention>("retention", {.mechanism = "retention", .width = kWidth, .heads = 8}),
       {{kWidth, 4 * kWidth}, {kWidth, kWidth}},
       {{"retention", 8, 8, 64, 64}}},
      {CaseOf<Rwkv4TimeMixing>("RWKV-4 time mixing", {.width = kWidth}),
       {{kWidth, kWidth}, {kWidth, kWidth}, {kWidth, kWidth}, {kWidth, kWidth}},
       {{"rwkv4", kWidth, kWidth, 1, 1}}},
      {CaseOf<Mamba>("Mamba", {.width = kWidth}),
       {{kWidth, 4 * kWidth}, {2 * kWidth, 64}, {32, 2 * kWidth}, {2 * kWidth, kWidth}},
       {{"causal_conv1d", 8, 8, 128, 128, "silu+channels_last"}, {"selective_scan", 8, 8, 128, 128, "mamba+strided"}}},
      {CaseOf<Mamba2>("Mamba-2", {.width = kWidth, .heads = 16}),
       {{kWidth, 4 * kWidth + 2 * 128 + 16}, {2 * kWidth, kWidth}},
       {{"causal_conv1d", 10, 10, 128, 128, "silu+channels_last"}, {"ssd", 16, 1, 128, 64}}},
      {CaseOf<GatedDeltaNet>("gated delta",
                             {.width = kWidth, .key_heads = 4, .value_heads = 8, .key_dim = 64, .value_dim = 64}),
       {{kWidth, 3 * kWidth + 16}, {kWidth, kWidth}},
       {{"causal_conv1d", 8, 8, 128, 128, "silu+channels_last+no_bias"}, {"gated_delta_rule", 8, 8, 64, 64}}},
      {CaseOf<H3>("H3", {.width = kWidth, .heads = 64}),
       {{kWidth, 3 * kWidth}, {kWidth, kWidth}},
       {{"h3", 64, 64, 8, 8}}},
  };
}

Buffer NormalRows(int64_t channels, uint64_t seed) {
  Buffer rows(DType::kF32, {kTokens, channels}, Placement::kAligned);
  rows.FillNormal(seed);
  return rows;
}

// A layer on its own rows.
class WholeLayer {
 public:
  WholeLayer(const LayerCase& layer, Context& ctx) : layer_(layer.make(weights_of(layer).weights())), ctx_(ctx) {
    Run();
    const int64_t few = 160;  // the reference is slow
    const Buffer expected(DType::kF64, {1, few, kWidth});
    layer.reference(weights_of(layer).weights(), X().Slice(1, 0, few), {}, expected.view());
    const double error = layers::Error(Y().Slice(1, 0, few), expected.view());  // all layers are causal
    if (!(error < 1e-4)) throw std::runtime_error(Format("{}: off by {} of its largest output", layer.name, error));
  }

  void Run() { layer_->Forward(ctx_, X(), {}, nullptr, Y()); }

 private:
  static layers::RandomWeights weights_of(const LayerCase& layer) { return {layer.weights, DType::kF32, 1}; }
  ConstTensorView X() const { return {x_.view().data(), DType::kF32, {1, kTokens, kWidth}}; }
  TensorView Y() const { return {y_.view().data(), DType::kF32, {1, kTokens, kWidth}}; }

  std::unique_ptr<layers::Layer> layer_;
  Context& ctx_;
  Buffer x_ = NormalRows(kWidth, 2), y_ = NormalRows(kWidth, 3);
};

// The products and operators of the layer, each on its own rows.
class Parts {
 public:
  Parts(const Subject& subject, Context& ctx) : ctx_(ctx) {
    for (const auto& [inputs, outputs] : subject.products) {
      const Buffer weight(DType::kF32, {outputs, inputs});
      weight.FillNormal(4);
      products_.push_back({layers::Linear(weight.view()), NormalRows(inputs, 5), NormalRows(outputs, 6)});
    }
    for (const auto& [heads, channels] : subject.turns) {
      const Buffer x(DType::kF32, {kTokens, heads, channels}, Placement::kAligned);
      turns_.push_back({x.FillNormal(7), Buffer(DType::kF32, x.view().sizes(), Placement::kAligned)});
    }
    for (int64_t t = 0; t < kTokens; ++t) positions_.as<int64_t>()[t] = t;
    for (const Operator& op : subject.operators) {
      const Sizes sizes = {1, kTokens, kTokens, op.Hq, op.Hkv, op.D, op.Dv};
      operators_.emplace_back(FindOp(op.name), CaseRequest{sizes, DType::kF32, 1, "forward", op.variant},
                              ctx.num_threads());
    }
  }

  void Run() {
    for (const OneProduct& p : products_) p.linear.Forward(ctx_, p.x.view(), p.y.view());
    for (const OneTurn& t : turns_)
      Rotary(ctx_, t.x.view(), positions_.view(), RotaryPairs::kHalfSplit, {}, t.y.view());
    for (TimedCase& op : operators_) op.Run();
  }

 private:
  struct OneProduct {
    layers::Linear linear;
    Buffer x, y;
  };
  struct OneTurn {
    Buffer x, y;
  };

  Context& ctx_;
  std::vector<OneProduct> products_;
  std::vector<OneTurn> turns_;
  Buffer positions_{DType::kI64, {kTokens}};
  std::deque<TimedCase> operators_;
};

}  // namespace

std::vector<GateResult> MeasureLayers(const Rows& rows) {
  std::vector<int> counts = {1};
  if (os::NumUsableCpus() > 1) counts.push_back(2);
  std::vector<GateResult> results;
  for (const Subject& subject : Subjects()) {
    for (const int threads : counts) {
      const std::string name =
          Format("{}, {} thread{}, over its parts", subject.layer.name, threads, threads == 1 ? "" : "s");
      const auto measure = [&] {
        Context ctx(threads);
        WholeLayer layer(subject.layer, ctx);
        Parts parts(subject, ctx);
        return MeasureRatio(name, kGoal, false, [&](bool* clean) {
          const Sample whole = TimeClean(threads, [&] { layer.Run(); });
          const Sample apart = TimeClean(threads, [&] { parts.Run(); });
          *clean = whole.clean && apart.clean;
          return whole.seconds / apart.seconds;
        });
      };
      AddRow(rows, name, measure, results);
    }
  }
  return results;
}

}  // namespace heed::bench
