// Weights from files, embeddings, and configurations that contradict themselves.
#include "heed/layers/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/layers/embedding.h"
#include "heed/layers/grouped_query_attention.h"
#include "heed/layers/h3_layer.h"
#include "heed/layers/linear_attention_layer.h"
#include "heed/layers/mamba2.h"
#include "heed/layers/multi_head_attention.h"

namespace heed::layers {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

auto Says(const std::string& what) { return ThrowsMessage<InvalidArgument>(HasSubstr(what)); }

TEST(WeightsTest, ShardsOfAModelAreOneAndPrefixesAddUp) {
  const std::string folder = testing::TempDir();
  const Buffer a = Buffer(DType::kF32, {2, 3}).FillNormal(1), b = Buffer(DType::kBF16, {2}).FillNormal(2);
  const std::string first = folder + "heed_weights_1.safetensors", second = folder + "heed_weights_2.safetensors";
  WriteSafetensors(first, std::array{NamedTensor{"model.0.up.weight", a.view()}});
  WriteSafetensors(second, std::array{NamedTensor{"model.0.up.bias", b.view()}});
  const SafetensorsFile one(first), two(second);
  const Weights weights = Weights({&one, &two}).At("model.").At("0.");
  EXPECT_TRUE(weights.Contains("up.bias"));
  EXPECT_FALSE(Weights(one).At("model.0.").Contains("up.bias"));
  const Linear up = weights.Matrix({"up", 2, true}, 3);
  EXPECT_EQ(up.outputs(), 2);
  EXPECT_EQ(weights.Floats("up.bias", {2})[1], static_cast<float>(b.Get({1})));
  EXPECT_THAT([&] { weights.Matrix({"up", 3, true}, 2); },
              Says("layers::Weights: model.0.up.weight has shape [2,3], expected [3,2]"));
  EXPECT_THAT([&] { weights.Matrix({"down", 3, false}, 2); },
              Says("layers::Weights: model.0.down.weight is missing, expected a tensor of shape [3,2]"));
}

TEST(WeightsTest, TheTableOfALayerIsTheListOfItsWeights) {
  GroupedQueryAttention::Config config;
  config.width = 8;
  config.heads = 4;
  config.kv_heads = 2;
  config.bias = true;
  config.qk_norm = true;
  std::vector<std::string> names;
  for (const WeightName& tensor : WeightsOf<GroupedQueryAttention>(config))
    names.push_back(tensor.name + " " + ShapeString(tensor.sizes));
  EXPECT_THAT(names, testing::ElementsAre("q_proj.weight [8,8]", "q_proj.bias [8]", "k_proj.weight [4,8]",
                                          "k_proj.bias [4]", "v_proj.weight [4,8]", "v_proj.bias [4]",
                                          "q_norm.weight [2]", "k_norm.weight [2]", "o_proj.weight [8,8]"));
}

TEST(WeightsTest, H3TakesTheWeightsThatItsHeaderLists) {
  H3::Config config;
  config.width = 6;
  config.heads = 2;
  std::vector<std::string> names;
  for (const WeightName& tensor : WeightsOf<H3>(config)) names.push_back(tensor.name + " " + ShapeString(tensor.sizes));
  EXPECT_THAT(names,
              testing::UnorderedElementsAre("q_proj.weight [6,6]", "q_proj.bias [6]", "k_proj.weight [6,6]",
                                            "k_proj.bias [6]", "v_proj.weight [6,6]", "v_proj.bias [6]",
                                            "out_proj.weight [6,6]", "out_proj.bias [6]", "shift [6,4]", "shift_D [6]",
                                            "log_dt [2]", "log_A_real [2,32]", "A_imag [2,32]", "C [2,32,2]", "D [2]"));
}

TEST(WeightsTest, ConfigurationsThatContradictThemselvesAreRefused) {
  GroupedQueryAttention::Config grouped;
  grouped.width = 12;
  grouped.heads = 4;
  grouped.kv_heads = 3;
  EXPECT_THAT([&] { WeightsOf<GroupedQueryAttention>(grouped); },
              Says("layers::GroupedQueryAttention: config.kv_heads is 3, expected a divisor of heads, 4"));
  grouped.heads = 5;
  grouped.kv_heads = 5;
  EXPECT_THAT([&] { WeightsOf<GroupedQueryAttention>(grouped); },
              Says("config.heads is 5, expected a divisor of width, 12"));
  grouped.heads = 0;
  EXPECT_THAT([&] { WeightsOf<GroupedQueryAttention>(grouped); }, Says("config.heads is 0, expected 1 to 2147483648"));
  MultiHeadAttention::Config attention;
  attention.width = 12;
  attention.heads = 4;
  attention.memory_width = 3;
  attention.names = MultiHeadAttention::Gpt2();
  EXPECT_THAT([&] { WeightsOf<MultiHeadAttention>(attention); }, Says("config.names.fused is given"));
  Mamba2::Config mamba;
  mamba.width = 4;
  mamba.heads = 3;
  mamba.groups = 2;
  EXPECT_THAT([&] { WeightsOf<Mamba2>(mamba); },
              Says("layers::Mamba2: config.groups is 2, expected a divisor of heads, 3"));
  mamba.groups = 1;
  mamba.step_min = 2;
  mamba.step_max = 1;
  EXPECT_THAT([&] { WeightsOf<Mamba2>(mamba); }, Says("config.step_min is 2"));
  LinearAttention::Config linear;
  linear.width = linear.heads = 4;
  linear.mechanism = "attention";
  EXPECT_THAT([&] { WeightsOf<LinearAttention>(linear); },
              Says("config.mechanism is 'attention', expected one of 'linear_attention', "));
}

TEST(EmbeddingTest, RowsAreThoseOfTheTable) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Buffer table = Buffer(dtype, {5, 7}).FillNormal(1), y(DType::kF32, {3, 7});
    const Weights weights(
        [&](const std::string& name) { return name == "weight" ? ConstTensorView(table.view()) : ConstTensorView(); });
    const Embedding embedding({5, 7}, weights);
    const std::vector<int64_t> ids = {4, 0, 4};
    const std::vector<int32_t> few = {1, 2, 3}, bad = {1, 5, 0};
    Context ctx(1);
    embedding.Forward(ctx, ConstTensorView(ids.data(), DType::kI64, {3}), y.view());
    for (int64_t i = 0; i < 7; ++i) {
      EXPECT_EQ(y.Get({0, i}), table.Get({4, i}));
      EXPECT_EQ(y.Get({1, i}), table.Get({0, i}));
    }
    embedding.Forward(ctx, ConstTensorView(few.data(), DType::kI32, {3}), y.view(), true);
    EXPECT_EQ(y.Get({2, 3}), static_cast<float>(table.Get({4, 3})) + static_cast<float>(table.Get({3, 3})));
    EXPECT_THAT([&] { embedding.Forward(ctx, ConstTensorView(bad.data(), DType::kI32, {3}), y.view()); },
                Says("layers::Embedding::Forward: ids has an element 5, expected 0 to 4"));
    EXPECT_THAT([&] { embedding.Forward(ctx, ConstTensorView(bad.data(), DType::kI32, {2}), y.view()); },
                Says("y has shape [3,7], expected [2,7]"));
  }
}

}  // namespace
}  // namespace heed::layers
