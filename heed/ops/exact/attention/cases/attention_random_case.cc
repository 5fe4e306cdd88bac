// Random problems of attention: sizes, memory layouts and combinations of options beyond the hand-written cases.
#include <algorithm>
#include <cmath>
#include <limits>

#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/patterns/pattern_case.h"

namespace heed::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The reference needs about 1.5 ns per pair and channel and 0.1 us per pair.
constexpr double kMaxPairs = 60e3, kMaxProducts = 3e6;

class Generator {
 public:
  Generator(DType dtype, uint64_t seed) : seed_(seed), random_(seed), dtype_(dtype) {
    p_.note = "seed=" + std::to_string(seed);
  }

  Problem Make() {
    ChooseSizes();
    if (packed_) Pack();
    MakeTensors();
    ChooseMasks();
    if (Chance(0.2)) ChoosePattern();
    if (!packed_) ChoosePaddedOptions();
    ChooseTerms();
    ChooseRelativeBias();
    ChooseOutputs();
    ChooseGradients();
    return p_;
  }

 private:
  bool Chance(double probability) { return random_.Chance(probability); }
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }
  TensorView Keep(const Buffer& buffer) {
    p_.memory.push_back(buffer);
    return buffer.view();
  }
  uint64_t Seed() {
    const uint64_t high = random_.Word();
    return high << 32 | random_.Word();
  }

  int64_t Tokens() {
    if (Chance(0.04)) return 0;
    if (Chance(0.1)) return 1;
    if (Chance(0.65)) return Integer(1, 40);
    return Integer(41, 200);
  }

  void ChooseSizes() {
    do {
      s_.B = Chance(0.03) ? 0 : Integer(1, 3);
      s_.Tq = Tokens();
      s_.Tk = Chance(0.4) ? s_.Tq : Tokens();
      if (s_.Tq > s_.Tk && Chance(0.7)) std::swap(s_.Tq, s_.Tk);
      if (Chance(0.1)) {  // more than the 512 keys of a segment, or of two
        s_.Tq = Integer(1, 20);
        s_.Tk = Integer(480, 1300);
      }
      s_.Hkv = Integer(1, 3);
      s_.Hq = s_.Hkv * random_.Pick<int64_t>({1, 1, 1, 2, 3, 4, 8});
      s_.D = Channels();
      s_.Dv = Chance(0.5) ? s_.D : Channels();
    } while (Pairs() > kMaxPairs || Pairs() * static_cast<double>(s_.D + s_.Dv) > kMaxProducts);
    packed_ = Chance(0.2);
  }

  double Pairs() const { return static_cast<double>(s_.B * s_.Hq) * static_cast<double>(s_.Tq * s_.Tk); }

  int64_t Channels() {
    return Chance(0.5) ? Integer(1, 40) : random_.Pick<int64_t>({1, 2, 8, 16, 31, 32, 33, 48, 64, 65, 80, 96, 128});
  }

  // Strides of any order of the outer axes, with gaps. Strides of inputs may be negative or zero; the last axis is
  // contiguous where the tensor requires it.
  std::vector<int64_t> Strides(const std::vector<int64_t>& sizes, bool input, bool contiguous) {
    std::vector<size_t> order(sizes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
    for (size_t i = contiguous ? 1 : 0; i + 1 < order.size(); ++i) {
      if (Chance(0.4)) {
        std::swap(order[i],
                  order[static_cast<size_t>(Integer(static_cast<int64_t>(i), static_cast<int64_t>(order.size()) - 1))]);
      }
    }
    std::vector<int64_t> strides(sizes.size());
    int64_t next = 1;
    for (size_t i = 0; i < order.size(); ++i) {
      const size_t axis = order[i];
      if ((i > 0 || !contiguous) && Chance(0.2)) next += Integer(1, 5);
      strides[axis] = next;
      next *= std::max<int64_t>(sizes[axis], 1);
      if (!input || (contiguous && i == 0)) continue;
      if (Chance(0.1)) strides[axis] = -strides[axis];
      if (Chance(0.07)) {
        strides[axis] = 0;
        next = std::max<int64_t>(next / std::max<int64_t>(sizes[axis], 1), 1);
      }
    }
    return strides;
  }

  Buffer Make(DType dtype, const std::vector<int64_t>& sizes, bool contiguous) {
    const Placement placement = Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard;
    const int64_t gap = Chance(0.5) ? 0 : Integer(1, 17);
    if (Chance(0.4)) {
      std::vector<int64_t> row_major(sizes.size(), 1);
      for (size_t i = sizes.size(); i-- > 1;) {
        row_major[i - 1] = row_major[i] * std::max<int64_t>(sizes[i], 1);
      }
      return Buffer(dtype, sizes, row_major, placement, gap);
    }
    return Buffer(dtype, sizes, Strides(sizes, true, contiguous), placement, gap);
  }

  std::vector<int64_t> Shape(int64_t T, int64_t H, int64_t D) {
    if (packed_ && !packed_rank4_) return {T, H, D};
    return {packed_ ? 1 : s_.B, T, H, D};
  }

  // Sequences of random lengths, including zero, and rows beyond the last one. Afterwards Tq and Tk are totals.
  void Pack() {
    packed_rank4_ = Chance(0.3);
    const bool same = Chance(0.5);
    const DType dtype = random_.Pick({DType::kI32, DType::kI64});
    const auto fill = [&](int64_t total) {
      const Buffer cu = Make(dtype, {s_.B + 1}, false);
      std::vector<int64_t> cuts(static_cast<size_t>(s_.B) + 1, 0);
      for (size_t b = 1; b < cuts.size(); ++b) cuts[b] = Integer(0, total);
      std::sort(cuts.begin(), cuts.end());
      if (Chance(0.6)) cuts.back() = s_.B == 0 ? 0 : total;
      // Written in reverse order, in case a stride is zero.
      for (size_t b = cuts.size(); b-- > 0;) {
        cu.Set({static_cast<int64_t>(b)}, static_cast<double>(cuts[b]));
      }
      return Keep(cu);
    };
    if (same) s_.Tk = s_.Tq;
    p_.options.cu_seqlens_q = fill(s_.Tq);
    if (!same) p_.options.cu_seqlens_k = fill(s_.Tk);
  }

  void MakeTensors() {
    // Logits of plain problems are within +-5, those of these within about +-50.
    const double deviation = random_.Pick({1.0, 1.0, 1.0, 4.0, 12.0});
    const bool fused = !packed_ && Chance(0.15);
    const auto shape_q = Shape(s_.Tq, s_.Hq, s_.D);
    const auto shape_k = Shape(s_.Tk, s_.Hkv, s_.D);
    const auto shape_v = Shape(s_.Tk, s_.Hkv, s_.Dv);
    if (fused && s_.Tq == s_.Tk) {
      // The output of one projection: [B, T, Hq D + Hkv D + Hkv Dv].
      const int64_t width = s_.Hq * s_.D + s_.Hkv * (s_.D + s_.Dv);
      const Buffer all(dtype_, {s_.B, s_.Tq, width});
      all.FillNormal(Seed());
      const auto view = [&](int64_t offset, const std::vector<int64_t>& sizes) {
        const int64_t strides[] = {s_.Tq * width, width, sizes[3], 1};
        return Keep(
            all.As(TensorView(all.as<char>() + offset * static_cast<int64_t>(SizeOf(dtype_)), dtype_, sizes, strides)));
      };
      p_.in.q = view(0, shape_q);
      p_.in.k = view(s_.Hq * s_.D, shape_k);
      p_.in.v = view((s_.Hq + s_.Hkv) * s_.D, shape_v);
      return;
    }
    const Buffer q = Make(dtype_, shape_q, true);
    const Buffer k = Make(dtype_, shape_k, true);
    const Buffer v = Make(dtype_, shape_v, true);
    p_.in.q = Keep(q.FillNormal(Seed(), deviation));
    p_.in.k = Keep(k.FillNormal(Seed()));
    p_.in.v = Keep(v.FillNormal(Seed()));
    if (Chance(0.06)) {  // visible, unless a mask happens to hide it
      const Buffer& tensor = *random_.Pick<const Buffer*>({&q, &k, &v});
      std::vector<int64_t> at;
      for (const int64_t size : tensor.view().sizes()) {
        at.push_back(size > 0 ? Integer(0, size - 1) : -1);
      }
      // An infinite v times a weight that underflows in f32 only would give different results.
      const double value = &tensor != &v && Chance(0.5) ? random_.Pick({kInfinity, -kInfinity}) : kNaN;
      if (tensor.view().num_elements() > 0) {
        SetElement(tensor.view(), at, value);
      }
    }
  }

  // An integer per sequence.
  TensorView PerSequence(int64_t low, int64_t high) {
    const Buffer values = Make(random_.Pick({DType::kI32, DType::kI64}), {s_.B}, false);
    for (int64_t b = 0; b < s_.B; ++b) {
      values.Set({b}, static_cast<double>(Integer(low, high)));
    }
    return Keep(values);
  }

  int64_t Span(int64_t size) { return Chance(0.5) ? Integer(0, 8) : Integer(0, std::max<int64_t>(size, 1)); }

  void ChooseMasks() {
    Options& o = p_.options;
    o.causal = Chance(0.5);
    if (Chance(0.3)) o.align = Align::kTopLeft;
    if (Chance(0.15)) {
      const Buffer starts = Make(DType::kI64, {s_.B}, false);
      far_ = Chance(0.1);  // positions beyond 32 bits
      for (int64_t b = 0; b < s_.B; ++b) {
        int64_t start = Integer(-s_.Tq - 3, s_.Tk + 3);
        if (far_) start += random_.Pick({int64_t{1}, int64_t{-1}}) << 33;
        starts.Set({b}, static_cast<double>(start));
      }
      o.query_starts = Keep(starts);
    }
    if (Chance(0.3)) {
      if (Chance(0.7)) o.window.left = Span(s_.Tk);
      if (Chance(0.6)) o.window.right = Span(s_.Tk);
    }
    if (Chance(0.2)) o.sink_tokens = Span(s_.Tk);
    if (Chance(0.15)) o.chunk = 1 + Span(s_.Tk);
  }

  void ChoosePattern() {
    PatternCall call = {s_.Tq, s_.Tk, s_.Hq, s_.Hkv, {}, 0, s_.B};
    if (packed_) call.Tq = -1;  // rules out keys per row, which fit one call only
    p_.options.pattern =
        patterns::RandomPattern(call, static_cast<int>(Integer(0, 3)), [&](int64_t n) { return Integer(0, n - 1); });
  }

  void ChoosePaddedOptions() {
    Options& o = p_.options;
    if (Chance(0.2)) o.key_lengths = PerSequence(0, s_.Tk);
    if (Chance(0.2)) {
      o.key_starts = PerSequence(0, Chance(0.7) ? s_.Tk / 2 : s_.Tk);
    }
    if (Chance(0.15)) o.query_lengths = PerSequence(0, s_.Tq);
    if (Chance(0.15)) o.prefix = PerSequence(0, s_.Tk);
    if (Chance(0.15)) {
      o.segments_q = Segments(s_.Tq);
      o.segments_k = s_.Tq == s_.Tk && Chance(0.5) ? o.segments_q : Segments(s_.Tk);
    }
    if (Chance(0.2)) {
      const Buffer mask = Broadcast(DType::kBool);
      const double keep = random_.Pick({0.1, 0.5, 0.9, 1.0});
      Each(mask, [&](const std::vector<int64_t>&) { return Chance(keep); });
      o.mask = Keep(mask);
    }
    if (Chance(0.2)) ChooseBias();
    if ((o.key_lengths || o.key_starts) && Chance(0.5)) PoisonPadding();
  }

  TensorView Segments(int64_t T) {
    const Buffer ids = Make(random_.Pick({DType::kI32, DType::kI64}), {s_.B, T}, false);
    const bool runs = Chance(0.5);
    int64_t id = 0;
    Each(ids, [&](const std::vector<int64_t>&) {
      if (!runs || Chance(0.1)) id = Integer(-1, 3);
      return static_cast<double>(id);
    });
    return Keep(ids);
  }

  // A tensor that broadcasts to [B, Hq, Tq, Tk]: any rank, axes of 1, any strides.
  Buffer Broadcast(DType dtype) {
    std::vector<int64_t> sizes = {s_.B, s_.Hq, s_.Tq, s_.Tk};
    sizes.erase(sizes.begin(), sizes.begin() + (Chance(0.6) ? 0 : Integer(1, 3)));
    for (int64_t& size : sizes) {
      if (Chance(0.35)) size = 1;
    }
    return Make(dtype, sizes, false);
  }

  template <class F>
  void Each(const Buffer& buffer, F&& value) {
    if (buffer.view().num_elements() == 0) return;
    std::vector<int64_t> index(buffer.view().sizes().size());
    do {
      SetElement(buffer.view(), index, static_cast<double>(value(index)));
    } while (NextIndex(buffer.view().sizes(), index));
  }

  void ChooseBias() {
    const DType dtype = random_.Pick({dtype_, dtype_, DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
    // The most negative number of the narrower dtype, the bias's or the computation's.
    double lowest = -std::numeric_limits<double>::max();
    if (dtype == DType::kF32 || dtype_ != DType::kF64) {
      lowest = -std::numeric_limits<float>::max();
    }
    if (dtype == DType::kBF16) lowest = -0x1.FEp127;
    if (dtype == DType::kF16) lowest = -65504;
    const Buffer bias = Broadcast(dtype);
    const double minus_infinity = random_.Pick({0.0, 0.1, 0.6});
    const double finite_minimum = random_.Pick({0.0, 0.0, 0.1});
    const double deviation = random_.Pick({1.0, 5.0});
    Each(bias, [&](const std::vector<int64_t>&) {
      if (Chance(minus_infinity)) return -kInfinity;
      if (Chance(finite_minimum)) return lowest;
      return deviation * random_.Normal();
    });
    p_.options.bias = Keep(bias);
  }

  // Writes NaN and infinities to the keys and values that lengths and starts hide.
  void PoisonPadding() {
    const Options& o = p_.options;
    const auto element = [&](const ConstTensorView& view, int64_t b) {
      return LoadAsInt64(view.dtype(), view.data(), b * view.stride(0));
    };
    for (const ConstTensorView& view : {p_.in.k, p_.in.v}) {
      if (view.stride(0) == 0 || view.stride(1) == 0) continue;  // the row is visible elsewhere
      const TensorView writable(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides());
      for (int64_t b = 0; b < s_.B; ++b) {
        const int64_t begin = o.key_starts ? element(o.key_starts, b) : 0;
        const int64_t end = o.key_lengths ? element(o.key_lengths, b) : s_.Tk;
        for (int64_t j = 0; j < s_.Tk; ++j) {
          if (j >= begin && j < end) continue;
          for (int64_t h = 0; h < s_.Hkv; ++h) {
            for (int64_t d = 0; d < view.size(3); ++d) {
              const int64_t at[] = {b, j, h, d};
              SetElement(writable, at, random_.Pick({kNaN, kInfinity}));
            }
          }
        }
      }
    }
    p_.note += " poisoned_padding";
  }

  TensorView PerHead(double deviation) {
    const Buffer values = Make(random_.Pick({dtype_, DType::kF32, DType::kF64, DType::kBF16}), {s_.Hq}, false);
    return Keep(values.FillNormal(Seed(), deviation));
  }

  // Decays from none to total: steps near 0 beside steps that decay everything, including -inf.
  TensorView LogDecay() {
    std::vector<int64_t> sizes = {s_.Tk, s_.Hq};
    if (!packed_ || Chance(0.3)) sizes.insert(sizes.begin(), packed_ ? 1 : s_.B);
    const Buffer decays = Make(random_.Pick({dtype_, DType::kF32, DType::kF64, DType::kBF16}), sizes, false);
    const double size = random_.Pick({0.003, 0.05, 1.0, 30.0});
    const double strong = random_.Pick({0.0, 0.0, 0.02});
    Each(decays, [&](const std::vector<int64_t>&) {
      if (Chance(0.05)) return 0.0;
      if (Chance(strong)) return random_.Pick({-100.0, -10000.0, -kInfinity});
      return -size * std::abs(random_.Normal());
    });
    return Keep(decays);
  }

  void ChooseTerms() {
    Options& o = p_.options;
    for (const OptionRow& row : kOptionRows) {
      if (row.takes_number() && Chance(0.2)) SetNumber(row, row.tried[static_cast<size_t>(Integer(0, 4))], &o);
    }
    if (o.dropout != 0) {
      o.seed = Seed();
      o.dropout_offset = Chance(0.5) ? 0 : random_.Word();
    }
    if (Chance(0.2) && !far_) {  // logits of 1e9 have no significant digits left to compare
      const bool each = Chance(0.4);
      const Buffer slopes = Make(random_.Pick({DType::kF32, DType::kF64}),
                                 each ? std::vector<int64_t>{s_.B, s_.Hq} : std::vector<int64_t>{s_.Hq}, false);
      Each(slopes, [&](const std::vector<int64_t>&) { return random_.Pick({0.5, 0.0625, 0.00390625, -0.03, 0.707}); });
      o.alibi = Keep(slopes);
    }
    if (o.causal && Chance(0.3)) o.log_decay = LogDecay();
    if (Chance(0.2)) {
      o.sinks = PerHead(3);
      if (Chance(0.2)) {
        const int64_t at[] = {Integer(0, s_.Hq - 1)};
        SetElement(TensorView(const_cast<void*>(o.sinks.data()), o.sinks.dtype(), o.sinks.sizes(), o.sinks.strides()),
                   at, random_.Pick({kInfinity, -kInfinity}));
      }
    }
    o.invariant = Chance(0.3);
  }

  // From numbers of its own, so that problems without it are those of earlier versions. Spans reach from the diagonal
  // alone to beyond all keys.
  void ChooseRelativeBias() {
    Random own(seed_, 0x4E1);
    if (!own.Chance(0.2)) return;
    const int64_t span = own.Pick({int64_t{1}, own.Integer(2, 20), own.Integer(21, 100), own.Integer(101, 1400)});
    const DType dtype = own.Pick({dtype_, DType::kF32, DType::kF64, DType::kBF16, DType::kF16});
    const int64_t gap = own.Pick<int64_t>({0, 3}), step = own.Pick<int64_t>({1, 1, 2});
    const int64_t sizes[] = {s_.Hq, span};
    const int64_t strides[] = {span * step + gap, step};
    const Buffer bias(dtype, sizes, strides, own.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard);
    const double deviation = own.Pick({0.5, 3.0}), masked = own.Pick({0.0, 0.0, 0.1});
    Each(bias, [&](const std::vector<int64_t>&) { return own.Chance(masked) ? -kInfinity : deviation * own.Normal(); });
    p_.options.relative_bias = Keep(bias);
  }

  void ChooseOutputs() {
    DescribeOutputs(p_);
    if (Chance(0.3)) p_.o.strides = Strides(p_.o.sizes, false, true);
    if (Chance(0.3)) p_.lse.strides = Strides(p_.lse.sizes, false, false);
    if (Chance(0.15)) p_.lse = {};
  }

  void ChooseGradients() {
    if (Chance(0.5)) return;
    DescribeGradients(p_, Seed());
    if (Chance(0.3)) {
      const Buffer d_o = Make(dtype_, p_.o.sizes, true);
      p_.d_o = Keep(d_o.FillNormal(Seed()));
    }
    if (Chance(0.3)) {
      const Buffer d_lse = Make(dtype_ == DType::kF64 ? DType::kF64 : DType::kF32, p_.LseSizes(), false);
      p_.d_lse = Keep(d_lse.FillNormal(Seed()));
    }
    for (OutputSpec& spec : p_.gradients) {
      const bool rows = spec.name == "dq" || spec.name == "dk" || spec.name == "dv";
      if (rows && Chance(0.2)) spec.strides = Strides(spec.sizes, false, true);
    }
    if (Chance(0.25)) {  // a subset
      std::erase_if(p_.gradients, [&](const OutputSpec&) { return Chance(0.5); });
    }
  }

  uint64_t seed_;
  Random random_;
  DType dtype_;
  Sizes s_;
  bool packed_ = false, packed_rank4_ = false;
  bool far_ = false;  // positions beyond 32 bits
  Problem p_;
};

}  // namespace

Problem RandomProblem(DType dtype, uint64_t seed) { return Generator(dtype, seed).Make(); }

}  // namespace heed::attention
