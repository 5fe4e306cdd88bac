// Attention with ARM's BFDOT and BFMMLA, emulated on x86, agrees with the reference: the compile units of the library
// that have bf16 products, compiled once more in front of its own. heed/simd/pair_tile_test.cc, which is part of this
// program too, tests that the emulation has the bits of QEMU. Whole passes do not: between the products, NEON has FMA
// and the emulation's target has none.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed {
namespace {

// Excludes AMX, and the bf16 products of this CPU for what is not emulated.
class EmulatingContext : public Context {
 public:
  EmulatingContext() : Context(2) { set_isa("sse2"); }
};

void ExpectTheReference(const Case& c, const std::string& what) {
  EmulatingContext ctx;
  const Comparison result = Compare(c, ctx);
  ASSERT_TRUE(result.ok) << what << ": " << result.message;
}

void ExpectTheReference(const char* name, uint64_t seeds) {
  const OpEntry op = FindOp(name);
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    ExpectTheReference(op.random_case(DType::kBF16, seed), std::string(name) + ", seed " + std::to_string(seed));
    if (testing::Test::HasFatalFailure()) return;
  }
}

struct Tensors {
  Buffer q, k, v;

  attention::Inputs UpTo(int64_t begin, int64_t end) const {
    return {q.view().Slice(1, begin, end), k.view().Slice(1, 0, end), v.view().Slice(1, 0, end)};
  }
};

Tensors Normal(int64_t T, int64_t Hq, int64_t Hkv, int64_t D, int64_t Dv) {
  Tensors x = {Buffer(DType::kBF16, {1, T, Hq, D}), Buffer(DType::kBF16, {1, T, Hkv, D}),
               Buffer(DType::kBF16, {1, T, Hkv, Dv})};
  x.q.FillNormal(1);
  x.k.FillNormal(2);
  x.v.FillNormal(3);
  return x;
}

TEST(EmulatedBfmmlaTest, KernelsAreThoseOfTheEmulation) {
  const EmulatingContext ctx;
  EXPECT_FALSE(HasBF16Pairs(ctx.allowed_targets()));  // the library's own passes would be empty
  EXPECT_NE(softmax::BackwardPairs(ctx).backward, nullptr);
  const Tensors x = Normal(20, 2, 1, 8, 8);
  EXPECT_EQ(attention::Explain(ctx, x.UpTo(0, 20), {}).kernel, "softmax_pairs_bf16");
  EXPECT_EQ(attention::Explain(ctx, x.UpTo(19, 20), {}).kernel, "softmax_decode_pairs_bf16");
}

TEST(EmulatedBfmmlaTest, RandomProblemsAgreeWithTheReference) { ExpectTheReference("attention", 400); }

TEST(EmulatedBfmmlaTest, CertifiedAttentionAgreesWithTheReference) { ExpectTheReference("certified_attention", 100); }

// Whole blocks of queries and several tiles of keys, which random problems seldom have.
TEST(EmulatedBfmmlaTest, LargerProblemsAgreeWithTheReference) {
  const OpEntry op = FindOp("attention");
  for (const char* pass : {"forward", "backward", "step"}) {
    for (const char* variant : {"", "causal", "window=50", "softcap=30", "causal+mask", "log_decay=0.05"}) {
      if (std::string_view(pass) == "step" && std::string_view(variant).starts_with("log_decay")) continue;
      for (const Sizes& sizes : {Sizes{1, 150, 150, 4, 2, 64, 64}, Sizes{1, 133, 277, 3, 1, 37, 41}}) {
        ExpectTheReference(op.make_case({sizes, DType::kBF16, 7, pass, variant}),
                           std::string(pass) + " " + variant + " " + ToString(sizes));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A call of one row takes BFDOT, blocks of rows take BFMMLA.
TEST(EmulatedBfmmlaTest, SingleRowsHaveTheBitsOfBlocks) {
  EmulatingContext ctx;
  attention::Options options;
  options.causal = true;
  const auto forward = [&](const attention::Inputs& in) {
    Buffer o(DType::kBF16, {1, in.q.size(1), in.q.size(2), in.v.size(3)});
    attention::Forward(ctx, in, options, {o.view(), {}});
    return o;
  };
  for (const int64_t D : {64, 37}) {
    const int64_t T = 600;
    const Tensors x = Normal(T, 2, 1, D, D + 4);
    const Buffer whole = forward(x.UpTo(0, T));
    for (const int64_t t : {0, 1, 2, 3, 4, 63, 64, 127, 128, 129, 511, 512, 598, 599}) {
      const Buffer one = forward(x.UpTo(t, t + 1));
      EXPECT_TRUE(SameBits(whole.view().Slice(1, t, t + 1), one.view())) << "D " << D << ", row " << t;
    }
  }
}

// A masked key that is not finite changes nothing, though then each row of a gradient is computed by itself.
TEST(EmulatedBfmmlaTest, MaskedKeysNeedNotBeFinite) {
  EmulatingContext ctx;
  for (const int64_t T : {70, 133}) {
    const Tensors x = Normal(T, 2, 1, 37, 21);
    const Buffer mask(DType::kBool, {1, 1, 1, T});
    for (int64_t j = 0; j < T; ++j) mask.Set({0, 0, 0, j}, j % 5 != 2);
    attention::Options options;
    options.causal = true;
    options.mask = mask.view();
    const Buffer o(DType::kBF16, {1, T, 2, 21}), lse(DType::kF32, {1, 2, T}), d_o(DType::kBF16, {1, T, 2, 21});
    d_o.FillNormal(4);
    const auto gradients = [&] {
      std::array<Buffer, 3> of = {Buffer(DType::kBF16, {1, T, 2, 37}), Buffer(DType::kBF16, {1, T, 1, 37}),
                                  Buffer(DType::kBF16, {1, T, 1, 21})};
      attention::Forward(ctx, x.UpTo(0, T), options, {o.view(), lse.view()});
      attention::Backward(ctx, {x.q.view(), x.k.view(), x.v.view(), o.view(), lse.view(), d_o.view()}, options,
                          {of[0].view(), of[1].view(), of[2].view()});
      return of;
    };
    const auto finite = gradients();
    for (int64_t j = 2; j < T; j += 5) {
      for (int64_t e = 0; e < 21; ++e) x.v.Set({0, j, 0, e}, std::numeric_limits<double>::quiet_NaN());
      for (int64_t e = 0; e < 37; ++e) x.k.Set({0, j, 0, e}, std::numeric_limits<double>::infinity());
    }
    const auto with_infinities = gradients();
    for (size_t i = 0; i < finite.size(); ++i) {
      EXPECT_TRUE(SameBits(finite[i].view(), with_infinities[i].view())) << "gradient " << i << ", " << T << " tokens";
    }
  }
}

}  // namespace
}  // namespace heed
