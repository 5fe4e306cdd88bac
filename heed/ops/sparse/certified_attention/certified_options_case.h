// Random options of attention for certified attention, with their memory, for its case and tests.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_OPTIONS_CASE_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_OPTIONS_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/patterns/pattern_case.h"

namespace heed::certified_attention {

struct OptionSizes {
  int64_t B, Tq, Tk, Hq, Hkv;
};

class OptionDraw {
 public:
  OptionDraw(Random& random, const OptionSizes& sizes, std::vector<Buffer>* memory)
      : random_(random), n_(sizes), memory_(*memory) {}

  // Draws the options that both a call and a cache take.
  void Draw(attention::Options* o) {
    if (Chance()) o->window.left = Tokens();
    if (Chance()) o->window.right = Tokens();
    if (Chance()) o->sink_tokens = random_.Integer(0, 70);
    if (Chance(0.1)) o->chunk = random_.Integer(1, std::max<int64_t>(n_.Tk, 1));
    if (Chance(0.1)) o->prefix = List(0, n_.Tk);
    if (Chance()) o->key_starts = List(0, random_.Chance(0.5) ? 70 : n_.Tk, n_.Tk);
    if (Chance(0.1)) {
      o->segments_q = Segments(n_.Tq);
      o->segments_k = Segments(n_.Tk);
    }
    if (Chance()) o->mask = Mask();
    if (Chance(0.1)) {
      const PatternCall call = {n_.Tq, n_.Tk, n_.Hq, n_.Hkv, {}, 0, n_.B};
      o->pattern = patterns::RandomPattern(call, static_cast<int>(random_.Integer(0, 2)),
                                           [&](int64_t n) { return random_.Integer(0, n - 1); });
    }
    DrawTerms(o);
  }

  // Draws terms that are added to logits, and the soft cap; a packed call takes all but a bias by pair.
  void DrawTerms(attention::Options* o, bool packed = false) {
    if (Chance()) o->softcap = random_.Pick({1e-3, 1.0, 5.0, 30.0, 1e30});
    if (Chance()) o->sinks = Sinks();
    if (Chance()) o->alibi = Slopes(packed);
    if (!packed && Chance()) o->bias = Bias();
    if (Chance(0.1)) o->relative_bias = RelativeBias();
  }

  // Draws log decays, which given keys take at every level but skip.
  void DrawLogDecay(attention::Options* o, bool packed = false) {
    if (!o->causal || !Chance()) return;
    const Buffer x(DType::kF32, packed ? std::vector<int64_t>{n_.Tk, n_.Hq} : std::vector<int64_t>{n_.B, n_.Tk, n_.Hq});
    const double size = random_.Pick({0.003, 0.05, 1.0, 30.0}), ends = random_.Pick({0.0, 0.0, 0.01});
    for (int64_t i = 0; i < x.view().num_elements(); ++i) {
      x.as<float>()[i] = random_.Chance(ends) ? -INFINITY : static_cast<float>(-size * std::abs(random_.Normal()));
    }
    o->log_decay = Keep(x);
  }

  // Draws positions and lengths of rows, which a cache knows itself.
  void DrawPlaces(attention::Options* o) {
    if (Chance(0.3)) o->key_lengths = List(0, n_.Tk);
    if (Chance(0.3)) o->query_lengths = List(0, n_.Tq);
    if (Chance(0.3)) o->query_starts = List(-50, n_.Tk + 50);
    if (Chance(0.3)) o->align = attention::Align::kTopLeft;
  }

  // Boundaries of packed sequences, which may leave tokens over.
  ConstTensorView Boundaries(int64_t sequences, int64_t tokens) {
    std::vector<int64_t> cuts = {0};
    for (int64_t i = 0; i < sequences; ++i) cuts.push_back(random_.Integer(0, tokens));
    std::ranges::sort(cuts);
    const Buffer x(DType::kI64, {sequences + 1});
    for (int64_t i = 0; i <= sequences; ++i) x.Set({i}, static_cast<double>(cuts[static_cast<size_t>(i)]));
    return Keep(x);
  }

 private:
  bool Chance(double probability = 0.2) { return random_.Chance(probability); }
  ConstTensorView Keep(const Buffer& x) {
    memory_.push_back(x);
    return x.view();
  }
  int64_t Tokens() {
    return random_.Chance(0.3) ? random_.Integer(0, 100) : random_.Integer(0, std::max<int64_t>(n_.Tk, 1));
  }

  ConstTensorView List(int64_t low, int64_t high, int64_t most = std::numeric_limits<int64_t>::max()) {
    const Buffer x(DType::kI64, {n_.B});
    for (int64_t b = 0; b < n_.B; ++b) x.Set({b}, static_cast<double>(std::min(random_.Integer(low, high), most)));
    return Keep(x);
  }
  ConstTensorView Segments(int64_t tokens) {
    const Buffer x(DType::kI32, {n_.B, tokens});
    for (int64_t b = 0; b < n_.B; ++b) {
      for (int64_t t = 0, id = 0; t < tokens; ++t) {
        if (random_.Chance(0.02)) id = random_.Integer(-1, 2);
        x.Set({b, t}, static_cast<double>(id));
      }
    }
    return Keep(x);
  }
  // Fills a tensor that broadcasts to [B, Hq, Tq, Tk] with f(), in runs of equal values.
  template <class F>
  ConstTensorView Pairs(DType dtype, const F& f) {
    const auto axis = [&](int64_t size) { return random_.Chance(0.4) ? int64_t{1} : size; };
    const Buffer x(dtype, std::vector<int64_t>{axis(n_.B), axis(n_.Hq), axis(n_.Tq), random_.Chance(0.1) ? 1 : n_.Tk});
    if (x.view().num_elements() == 0) return Keep(x);
    std::vector<int64_t> index(4);
    do SetElement(x.view(), index, f());
    while (NextIndex(x.view().sizes(), index));
    return Keep(x);
  }
  ConstTensorView Mask() {
    const double turns = random_.Pick({0.005, 0.05, 0.5});
    bool keeps = true;
    return Pairs(DType::kBool, [&] {
      if (random_.Chance(turns)) keeps = random_.Chance(0.6);
      return keeps ? 1.0 : 0.0;
    });
  }
  ConstTensorView Bias() {
    const double deviation = random_.Pick({0.5, 3.0}), masked = random_.Pick({0.0, 0.3, 0.6}),
                 lowest = random_.Pick({0.0, 0.0, 0.3});
    const double turns = random_.Pick({0.01, 0.3});
    const DType dtype = random_.Pick({DType::kF32, DType::kF32, DType::kBF16, DType::kF64});
    double state = 0;
    return Pairs(dtype, [&] {
      if (random_.Chance(turns)) {
        state = random_.Chance(masked)   ? -std::numeric_limits<double>::infinity()
                : random_.Chance(lowest) ? -0x1.FEp127
                                         : 0;
      }
      return state == 0 ? deviation * random_.Normal() : state;
    });
  }
  ConstTensorView RelativeBias() {
    const double deviation = random_.Pick({0.5, 3.0}), masked = random_.Pick({0.0, 0.0, 0.2});
    const Buffer x(DType::kF32, std::vector<int64_t>{n_.Hq, random_.Integer(1, 300)});
    for (int64_t i = 0; i < x.view().num_elements(); ++i) {
      x.as<float>()[i] = random_.Chance(masked) ? -INFINITY : static_cast<float>(deviation * random_.Normal());
    }
    return Keep(x);
  }
  ConstTensorView Slopes(bool packed) {
    const bool each = !packed && random_.Chance(0.4);
    const Buffer x(DType::kF32, each ? std::vector<int64_t>{n_.B, n_.Hq} : std::vector<int64_t>{n_.Hq});
    for (int64_t i = 0; i < x.view().num_elements(); ++i) {
      x.as<float>()[i] = random_.Pick({0.5f, 0.0625f, 0.00390625f, -0.03f, 0.707f, 0.0f});
    }
    return Keep(x);
  }
  ConstTensorView Sinks() {
    const Buffer x(DType::kF32, {n_.Hq});
    for (int64_t h = 0; h < n_.Hq; ++h)
      x.Set({h}, random_.Chance(0.05) ? random_.Pick({INFINITY, -INFINITY}) : 4.0 * random_.Normal());
    return Keep(x);
  }

  Random& random_;
  const OptionSizes n_;
  std::vector<Buffer>& memory_;
};

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_OPTIONS_CASE_H_
