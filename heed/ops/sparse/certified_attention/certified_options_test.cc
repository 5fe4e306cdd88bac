// Certified attention with the options of attention: with any of them, over tensors and caches, bounds hold, and keys
// that a row does not see affect no result. HEED_TEST_SEEDS sets the number of calls, HEED_TEST_FIRST_SEED the first
// seed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/ops/sparse/certified_attention/certified_case.h"
#include "heed/ops/sparse/certified_attention/certified_options_case.h"
#include "heed/state/kv_cache.h"
#include "tests/environment.h"

namespace heed::certified_attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

enum class Form { kPadded, kPacked, kCache };

struct Call {
  Form form;
  Buffer q, k, v;
  Options options;
  std::vector<Buffer> memory;

  Inputs inputs() const { return {q.view(), k.view(), v.view()}; }
  attention::Inputs exact() const { return {q.view(), k.view(), v.view()}; }
  bool packed() const { return form == Form::kPacked; }
};

std::vector<int64_t> Sizes(const Call& call, std::vector<int64_t> sizes) {
  if (!call.packed()) sizes.insert(sizes.begin(), call.q.view().size(0));
  return sizes;
}

struct Result {
  Buffer o, bound, lse, kept;

  Result(const Call& call, bool wide) {
    const TensorView &q = call.q.view(), &k = call.k.view();
    const int r = q.rank();
    const int64_t T = q.size(r - 3), H = q.size(r - 2), heads = call.options.level == Level::kSkip ? H : k.size(r - 2);
    std::vector<int64_t> of_o(q.sizes().begin(), q.sizes().end());
    of_o.back() = call.v.view().size(r - 1);
    o = Buffer(wide ? DType::kF64 : q.dtype(), of_o);
    bound = Buffer(wide ? DType::kF64 : DType::kF32, Sizes(call, {H, T}));
    lse = Buffer(wide ? DType::kF64 : DType::kF32, Sizes(call, {H, T}));
    kept = Buffer(DType::kBool, Sizes(call, {heads, T, (k.size(r - 3) + 63) / 64}));
  }
  Outputs outputs() const { return {o.view(), bound.view(), lse.view(), kept.view()}; }
};

Result Certified(Context& ctx, const Call& call) {
  Result r(call, /*wide=*/false);
  if (call.form != Form::kCache) {
    Forward(ctx, call.inputs(), call.options, r.outputs());
    return r;
  }
  const TensorView &q = call.q.view(), &k = call.k.view(), &v = call.v.view();
  KVCache cache({.batch = q.size(0),
                 .heads = k.size(2),
                 .dim = k.size(3),
                 .value_dim = v.size(3),
                 .capacity = k.size(1) + 64,
                 .page = k.size(1) % 2 == 0 ? 64 : 0,
                 .dtype = q.dtype(),
                 .sketch = call.options.level == Level::kSkip ? Sketch::kNone : Sketch::kInt8});
  const int64_t before = k.size(1) - q.size(1);
  cache.Append(k.Slice(1, 0, before), v.Slice(1, 0, before));
  cache.Append(k.Slice(1, before, k.size(1)), v.Slice(1, before, k.size(1)));
  Attend(ctx, cache.view(), q, call.options, r.outputs());
  return r;
}

Call Draw(uint64_t seed) {
  Random random(seed, 3);
  Call call;
  call.form = random.Pick({Form::kPadded, Form::kPadded, Form::kPacked, Form::kCache});
  const int64_t Tk = random.Integer(1, 900);
  int64_t Tq = random.Chance(0.6) ? random.Integer(1, 6) : random.Integer(1, 90);
  if (call.form == Form::kCache) Tq = std::min(Tq, Tk);
  const int64_t B = call.packed() ? 1 : random.Integer(1, 2), Hkv = random.Integer(1, 2),
                Hq = Hkv * random.Pick<int64_t>({1, 1, 2, 5});
  const int64_t D = random.Pick<int64_t>({4, 16, 33});
  const DType dtype = random.Pick({DType::kF32, DType::kF32, DType::kBF16, DType::kF16});
  call.q = Buffer(dtype, {B, Tq, Hq, D});
  call.k = Buffer(dtype, {B, Tk, Hkv, D});
  call.v = Buffer(dtype, {B, Tk, Hkv, 3});
  FillKeys(kAllKeys[seed % std::size(kAllKeys)], random, call.k);
  FillQueries(random, call.k.view(), call.q);
  if (random.Chance(0.7)) call.q.FillNormal(seed, 3);  // a single row of zeros makes all rows keep every block
  call.v.FillNormal(random.Word());
  Options& o = call.options;
  o.epsilon = random.Pick({0.01, 0.1, 0.6});
  o.level = random.Pick({Level::kSketch, Level::kSkip, Level::kSkip, Level::kBox, Level::kAuto});
  o.causal = random.Chance(0.6);
  if (random.Chance(0.2)) o.scale = random.Pick({-0.5, 0.0, 1.0});
  OptionDraw draw(random, {B, Tq, Tk, Hq, Hkv}, &call.memory);
  if (call.packed()) {
    const int64_t sequences = random.Integer(1, 3);
    o.cu_seqlens_q = draw.Boundaries(sequences, Tq);
    o.cu_seqlens_k = draw.Boundaries(sequences, Tk);
    if (random.Chance(0.3)) o.window.left = random.Integer(0, 200);
    draw.DrawTerms(&o, /*packed=*/true);
    if (o.level != Level::kSkip) draw.DrawLogDecay(&o, /*packed=*/true);
    if (random.Chance(0.5)) {  // without the axes of size 1
      for (Buffer* x : {&call.q, &call.k, &call.v}) {
        const TensorView& t = x->view();
        *x = x->As(TensorView(t.data(), t.dtype(), {t.size(1), t.size(2), t.size(3)}));
      }
    }
  } else {
    draw.Draw(&o);
    if (call.form == Form::kPadded) {
      draw.DrawPlaces(&o);
      if (o.level != Level::kSkip) draw.DrawLogDecay(&o);
    }
  }
  return call;
}

int64_t OffsetOf(const ConstTensorView& t, int64_t b, int64_t h, int64_t i) {
  const int r = t.rank();
  return (r > 2 ? b * t.stride(0) : 0) + h * t.stride(r - 2) + i * t.stride(r - 1);
}
double At(const Buffer& x, int64_t b, int64_t h, int64_t i) {
  return LoadAsDouble(x.view().dtype(), x.view().data(), OffsetOf(x.view(), b, h, i));
}

// Sets keys and values that no row of a head sees to NaN and infinity; false if there are none.
bool Poison(const Call& call, Random& random) {
  const TensorView& k = call.k.view();
  const int r = k.rank();
  const int64_t B = r == 4 ? k.size(0) : 1, T = k.size(r - 3), H = k.size(r - 2), group = call.q.view().size(r - 2) / H;
  std::vector<char> seen(static_cast<size_t>(B * T * H));
  const Result unused(call, /*wide=*/true);
  // Queries of zeros have no logit of -infinity; the reference has no pair for such a logit, although its key is
  // visible.
  const Buffer zeros(call.q.view().dtype(), call.q.view().sizes());
  zeros.FillConstant(0);
  const attention::Inputs in = {zeros.view(), call.k.view(), call.v.view()};
  attention::ReferenceRows(in, call.options, {unused.o.view(), {}}, [&](const attention::ReferenceRow& row) {
    for (const attention::ReferencePair& pair : row.pairs) {
      const int64_t b = call.packed() ? 0 : row.sequence;
      seen[static_cast<size_t>((b * T + row.first_key + pair.key) * H + row.head / group)] = 1;
    }
  });
  bool any = false;
  for (int64_t at = 0; at < B * T * H; ++at) {
    if (seen[static_cast<size_t>(at)] != 0) continue;
    any = true;
    for (const Buffer* x : {&call.k, &call.v}) {
      const TensorView& t = x->view();
      const int64_t D = t.size(r - 1);  // row-major
      for (int64_t e = 0; e < D; ++e) {
        StoreDouble(t.dtype(), t.data(), at * D + e,
                    random.Pick({std::nan(""), std::numeric_limits<double>::infinity()}));
      }
    }
  }
  return any;
}

// The magnitude of the terms of each row's logits, [b, h, i], where they have weight: f32 rounding is proportional to
// it.
Buffer SizesOfLogits(const Call& call, int64_t batch, int64_t heads, int64_t rows) {
  const Buffer sizes(DType::kF64, {batch, heads, rows});
  sizes.FillConstant(0);
  const Result unused(call, /*wide=*/true);
  attention::ReferenceRows(call.exact(), call.options, {unused.o.view(), {}}, [&](const attention::ReferenceRow& row) {
    double size = 0;
    for (const attention::ReferencePair& pair : row.pairs) {
      if (!(pair.probability < 1e-12)) size = std::max(size, pair.magnitude);
    }
    sizes.Set({call.packed() ? 0 : row.sequence, row.head, row.output_row}, size);
  });
  return sizes;
}

std::string Described(const Call& call, uint64_t seed) {
  std::string text = "seed " + std::to_string(seed) + " level " + std::to_string(static_cast<int>(call.options.level)) +
                     " form " + std::to_string(static_cast<int>(call.form)) + " " + Name(call.q.view().dtype());
  for (const attention::OptionRow& row : attention::kOptionRows) {
    if (attention::IsGiven(row, call.options)) text += std::string(" ") + row.name;
  }
  return text;
}

TEST(CertifiedOptions, NoBoundLies) {
  const int64_t count = FromEnvironment("HEED_TEST_SEEDS", 500), first = FromEnvironment("HEED_TEST_FIRST_SEED", 1);
  int64_t dropping = 0, poisoned = 0;  // number of calls
  for (uint64_t seed = static_cast<uint64_t>(first); seed < static_cast<uint64_t>(first + count); ++seed) {
    const Call call = Draw(seed);
    SCOPED_TRACE(Described(call, seed));
    Context ctx(1 + static_cast<int>(seed % 3));
    const DType dtype = call.q.view().dtype();
    ctx.set_isa(TargetOf(dtype, seed));
    const Result r = Certified(ctx, call), truth(call, /*wide=*/true);
    Reference(call.inputs(), call.options, r.kept.view(), truth.outputs());
    bool drops = false;
    const double rounding = dtype == DType::kF32 ? 1e-5 : dtype == DType::kBF16 ? 3e-2 : 4e-3;
    const int rank = call.q.view().rank();
    const int64_t batch = rank == 4 ? call.q.view().size(0) : 1, rows = call.q.view().size(rank - 3),
                  heads = call.q.view().size(rank - 2);
    const Buffer sizes = SizesOfLogits(call, batch, heads, rows);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < rows; ++i) {
          const double bound = At(r.bound, b, h, i), mass = At(truth.bound, b, h, i), lse = At(truth.lse, b, h, i);
          drops = drops || bound != 0;
          if (std::isnan(mass)) {
            ASSERT_TRUE(bound == 0 || std::isnan(bound)) << b << " " << h << " " << i << ": " << bound;
            continue;
          }
          ASSERT_GE(bound, mass) << b << " " << h << " " << i;
          ASSERT_LE(bound, call.options.epsilon) << b << " " << h << " " << i;
          // Logits of thousands have an error of their f32 rounding, and probabilities the same relative error.
          const double size = std::max(sizes.Get({b, h, i}), std::isinf(lse) ? 0 : std::abs(lse));
          if (!(size < 300)) continue;
          if (std::isinf(lse)) {
            ASSERT_EQ(At(r.lse, b, h, i), lse) << b << " " << h << " " << i;
          } else {
            ASSERT_NEAR(At(r.lse, b, h, i), lse, 2e-5 * (1 + size) + rounding) << b << " " << h << " " << i;
          }
          for (int64_t e = 0; e < 3; ++e) {
            const auto o_at = [&](const Buffer& x) {
              const TensorView& t = x.view();
              return LoadAsDouble(t.dtype(), t.data(), ((b * rows + i) * heads + h) * 3 + e);
            };
            ASSERT_NEAR(o_at(r.o), o_at(truth.o), 6 * (rounding + 2e-6 * size * 64)) << b << " " << h << " " << i;
          }
        }
      }
    }
    dropping += drops ? 1 : 0;
    if (!drops && call.form == Form::kPadded && call.options.level != Level::kSkip) {
      const Result dense(call, /*wide=*/false);
      attention::Forward(ctx, call.exact(), call.options, {dense.o.view(), dense.lse.view()});
      ASSERT_EQ(
          attention::Difference(r.o.view(), dense.o.view()) + attention::Difference(r.lse.view(), dense.lse.view()),
          "");
    }
    Random random(seed, 4);
    if (!Poison(call, random)) continue;
    ++poisoned;
    const Result again = Certified(ctx, call);
    for (const auto& [before, after] : {std::pair{&r.o, &again.o}, {&r.bound, &again.bound}, {&r.lse, &again.lse}}) {
      ASSERT_EQ(attention::Difference(before->view(), after->view()), "");
    }
    ASSERT_TRUE(SameBits(r.kept.view(), again.kept.view()));
  }
  EXPECT_GT(dropping, count / 10);
  EXPECT_GT(poisoned, count / 10);
}

}  // namespace
}  // namespace heed::certified_attention
