// Random problems of longformer: sizes, memory layouts, tokens and options beyond the hand-written cases.
#include <algorithm>
#include <cmath>
#include <limits>

#include "heed/ops/sparse/longformer/longformer_case.h"

namespace heed::longformer {
namespace {

using Shape = std::vector<int64_t>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class Generator : sparse::Draw {
 public:
  Generator(DType dtype, uint64_t seed) : Draw(dtype, seed, 3) { p_.note = "seed=" + std::to_string(seed); }

  Problem Make() {
    packed_ = Chance(0.25);
    rank4_ = !packed_ || Chance(0.3);
    B_ = Chance(0.03) ? 0 : Integer(1, 3);
    T_ = Chance(0.03)   ? 0
         : Chance(0.6)  ? Integer(1, 30)
         : Chance(0.92) ? random().Pick<int64_t>({63, 64, 65, 100, 129})
                        : Integer(500, 600);
    Hkv_ = T_ > 400 ? 1 : Integer(1, 2);
    Hq_ = Hkv_ * (T_ > 400 ? 1 : random().Pick<int64_t>({1, 1, 2, 3}));
    D_ = Channels();
    Dv_ = Chance(0.5) ? D_ : Channels();
    own_ = Chance(0.75);
    if (packed_) Pack();
    ChooseTokens();
    const double deviation = random().Pick({1.0, 1.0, 4.0});
    p_.in.q = Tensor(Hq_, D_, deviation);
    p_.in.k = Tensor(Hkv_, D_, 1);
    p_.in.v = Tensor(Hkv_, Dv_, 1);
    if (own_) {
      p_.in.qg = Tensor(Hq_, D_, deviation);
      p_.in.kg = Tensor(Hkv_, D_, 1);
      p_.in.vg = Tensor(Hkv_, Dv_, 1);
    }
    ChooseOptions();
    if (Chance(0.5)) p_.in.d_o = Tensor(Hq_, Dv_, 1);
    Describe(p_);
    if (p_.in.d_o && Chance(0.3)) {
      const OutputSpec& lse = p_.results[1];
      p_.in.d_lse = p_.Keep(Buffer(lse.dtype, lse.sizes).FillNormal(NextSeed()));
    }
    if (own_ && Chance(0.3)) PoisonDiscarded();
    if (p_.in.d_o && DropsAll(p_.gradients)) p_.in.d_o = {};
    return p_;
  }

 private:
  ConstTensorView Ints(const Shape& values, const Shape& shape) {
    const Buffer buffer(random().Pick({DType::kI32, DType::kI64}), shape);
    Shape index(shape.size());
    for (const int64_t value : values) {
      SetElement(buffer.view(), index, static_cast<double>(value));
      NextIndex(shape, index);
    }
    return p_.Keep(buffer);
  }
  ConstTensorView PerSequence(int64_t low, int64_t high) {
    Shape values;
    for (int64_t b = 0; b < B_; ++b) values.push_back(Integer(low, high));
    return Ints(values, {B_});
  }

  void Pack() {
    bounds_ = {0};
    for (int64_t b = 0; b < B_; ++b) bounds_.push_back(Integer(0, T_));
    std::ranges::sort(bounds_);
    if (B_ > 0 && Chance(0.6)) bounds_.back() = T_;
    p_.options.cu_seqlens_q = Ints(bounds_, {B_ + 1});
  }

  // Any number of tokens; some appear twice, are absent, or are beyond the end.
  void ChooseTokens() {
    const bool by_sequence = Chance(0.4);
    const int64_t lists = by_sequence && Chance(0.7) ? B_ : 1;
    const int64_t n = Chance(0.1) ? 0 : Chance(0.1) && T_ < 150 ? Integer(5, 90) : Integer(1, 4);
    Shape values;
    for (int64_t i = 0; i < n * lists; ++i) {
      values.push_back(Chance(0.15)  ? -1
                       : Chance(0.1) ? T_ + Integer(0, 70)
                                     : Integer(0, std::max<int64_t>(T_ - 1, 0)));
    }
    p_.options.tokens = Ints(values, by_sequence ? Shape{lists, n} : Shape{n});
    p_.options.window = Chance(0.2) ? 0 : Chance(0.7) ? Integer(0, 20) : Integer(0, 300);
  }

  ConstTensorView Tensor(int64_t heads, int64_t channels, double deviation) {
    Shape sizes = {T_, heads, channels};
    if (rank4_) sizes.insert(sizes.begin(), packed_ ? 1 : B_);
    return p_.Keep(Draw::Tensor(sizes, deviation));
  }

  void ChooseOptions() {
    Options& o = p_.options;
    if (!packed_) {
      if (Chance(0.25)) o.key_lengths = PerSequence(0, T_);
      if (Chance(0.25)) o.key_starts = PerSequence(0, Chance(0.7) ? T_ / 2 : T_);
      if (Chance(0.2)) o.query_lengths = PerSequence(0, T_);
    }
    if (Chance(0.3)) o.scale = random().Pick({1.0, -0.3, 0.0, 0.5});
    if (Chance(0.15)) o.softcap = random().Pick({1.0, 5.0, 30.0});
    if (Chance(0.2)) {
      o.dropout = random().Pick({0.1, 0.5, 0.9});
      o.seed = random().Word();
      o.dropout_offset = Chance(0.5) ? 0 : random().Word();
    }
    o.invariant = Chance(0.2);
  }

  bool IsToken(int64_t sequence, int64_t token) const {
    const ConstTensorView& t = p_.options.tokens;
    for (int64_t i = 0; i < t.size(t.rank() - 1); ++i) {
      const int64_t at[] = {t.size(0) == 1 ? 0 : sequence, i};
      if (GetElement(t, std::span(at).last(static_cast<size_t>(t.rank()))) == static_cast<double>(token)) return true;
    }
    return false;
  }

  // Writes NaN to q of global tokens and qg of others.
  void PoisonDiscarded() {
    const int64_t sequences = B_;
    for (int64_t s = 0; s < sequences; ++s) {
      const int64_t first = packed_ ? bounds_[static_cast<size_t>(s)] : 0;
      const int64_t end = packed_ ? bounds_[static_cast<size_t>(s) + 1] : T_;
      for (int64_t t = first; t < end; ++t) {
        const ConstTensorView& discarded = IsToken(s, t - first) ? p_.in.q : p_.in.qg;
        const TensorView to(const_cast<void*>(discarded.data()), dtype(), discarded.sizes(), discarded.strides());
        const int64_t at[] = {packed_ ? 0 : s, t, Integer(0, Hq_ - 1), Integer(0, D_ - 1)};
        SetElement(to, std::span(at).last(static_cast<size_t>(to.rank())), kNaN);
      }
    }
    p_.note += " poisoned";
  }

  Problem p_;
  bool packed_ = false, rank4_ = true, own_ = true;
  int64_t B_ = 1, T_ = 1, Hkv_ = 1, Hq_ = 1, D_ = 1, Dv_ = 1;
  Shape bounds_;
};

}  // namespace

Problem RandomProblem(DType dtype, uint64_t seed) { return Generator(dtype, seed).Make(); }

}  // namespace heed::longformer
