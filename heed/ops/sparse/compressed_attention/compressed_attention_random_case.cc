// Random problems of compressed attention: sizes, memory layouts, ratios, windows, chosen keys, padding and packing.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/ops/sparse/compressed_attention/compressed_attention_case.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention_internal.h"

namespace heed::compressed_attention {
namespace {

class Generator : sparse::Draw {
 public:
  Generator(DType dtype, uint64_t seed) : Draw(dtype, seed, 13) { p_.note = "seed=" + std::to_string(seed); }

  Problem Make() {
    const bool packed = Chance(0.125), padded = !packed && Chance(0.28);
    B_ = packed ? 1 : Chance(0.03) ? 0 : Integer(1, 3);
    Tk_ = Chance(0.03) ? 0 : Chance(0.85) ? Integer(1, 50) : Chance(0.9) ? Integer(60, 140) : Integer(250, 330);
    Tq_ = packed || Chance(0.6) ? Tk_ : Integer(0, Tk_);
    Hkv_ = Tk_ > 200 ? 1 : Integer(1, 2);
    Hq_ = Hkv_ * random().Pick<int64_t>({1, 1, 2, 3, 9, 17});
    if (Tk_ > 140) Hq_ = std::min<int64_t>(Hq_, 3);
    const int64_t D = Channels(), Dv = Chance(0.5) ? D : Channels();
    Options& o = p_.options;
    o.ratio = Chance(0.7) ? Integer(1, 6) : random().Pick<int64_t>({16, 64, 128, 1000});
    o.window = Chance(0.15) ? 0 : Chance(0.7) ? Integer(1, 20) : Integer(1, 400);
    if (Chance(0.2) && !packed) o.start = Tk_ - Tq_ + Integer(0, 60);
    if (Chance(0.3)) o.scale = random().Pick({1.0, -0.3, 0.0, 0.5});
    p_.in.q = Tensor(Tq_, Hq_, D, random().Pick({1.0, 1.0, 4.0}));
    p_.in.k = Tensor(Tk_, Hkv_, D, 1);
    p_.in.v = Tensor(Tk_, Hkv_, Dv, 1);
    if (packed) o.cu_seqlens = Ints(Boundaries());
    if (padded) Pad(o.start.value_or(Tk_ - Tq_) + Tq_);
    N_ = 0;
    ForRows([&](const DefinedPlace& place, int64_t, int64_t) {
      N_ = std::max(N_, place.first_key + place.num_complete(o.ratio));
    });
    N_ += Chance(0.3) ? Integer(0, 3) : 0;
    p_.in.k_cmp = Tensor(N_, Hkv_, D, 1);
    p_.in.v_cmp = Tensor(N_, Hkv_, Dv, 1);
    if (Chance(0.6)) Choose();
    if (Chance(0.5)) Sinks();
    if (Chance(0.5)) {
      p_.in.d_o = Tensor(Tq_, Hq_, Dv, 1);
      if (Chance(0.3)) {
        const Buffer d_lse(dtype() == DType::kF64 ? DType::kF64 : DType::kF32, {B_, Hq_, Tq_});
        p_.in.d_lse = p_.Keep(d_lse.FillNormal(NextSeed()));
      }
    }
    Describe(p_);
    if (p_.in.d_o && DropsAll(p_.gradients)) p_.in.d_o = p_.in.d_lse = {};
    if ((packed || padded) && Chance(0.5)) Poison();
    return p_;
  }

 private:
  // Calls f(place, b, i) for all rows.
  template <class F>
  void ForRows(const F& f) {
    for (int64_t b = 0; b < B_; ++b) {
      for (int64_t i = 0; i < Tq_; ++i) f(PlaceByDefinition(p_.in, p_.options, b, i), b, i);
    }
  }

  ConstTensorView Ints(const std::vector<int64_t>& values) {
    const Buffer buffer(Chance(0.5) ? DType::kI32 : DType::kI64, {std::ssize(values)});
    for (int64_t i = 0; i < std::ssize(values); ++i) {
      buffer.Set({i}, static_cast<double>(values[static_cast<size_t>(i)]));
    }
    return p_.Keep(buffer);
  }

  // Up to four packed sequences, some empty, which may end before the last token.
  std::vector<int64_t> Boundaries() {
    std::vector<int64_t> all = {0};
    for (int64_t count = Integer(0, 4); count > 0; --count) all.push_back(Chance(0.3) ? Tk_ : Integer(0, Tk_));
    std::ranges::sort(all);
    return all;
  }

  // Padding on either side of the tokens of a sequence, up to all of it.
  void Pad(int64_t tokens) {
    std::vector<int64_t> starts, lengths;
    for (int64_t b = 0; b < B_; ++b) {
      starts.push_back(Integer(0, Chance(0.7) ? tokens / 3 : tokens));
      lengths.push_back(Chance(0.7) ? Integer(2 * tokens / 3, tokens) : Integer(0, tokens));
    }
    const bool left = Chance(0.7);
    if (left) p_.options.starts = Ints(starts);
    if (!left || Chance(0.7)) p_.options.lengths = Ints(lengths);
  }

  // Writes NaN to all that no sequence has.
  void Poison() {
    std::vector<int64_t> seen(static_cast<size_t>(B_));  // compressed keys
    std::vector<bool> is_valid(static_cast<size_t>(B_ * Tk_));
    const int64_t first = Tk_ - Tq_;
    ForRows([&](const DefinedPlace& place, int64_t b, int64_t i) {
      int64_t& most = seen[static_cast<size_t>(b)];
      most = std::max(most, place.first_key + place.num_complete(p_.options.ratio));
      if (!place.is_valid()) {
        Spoil(p_.in.q, b, i);
        Spoil(p_.in.d_o, b, i);
      }
      for (int64_t j = 0; place.is_valid() && j <= first + i; ++j) {
        if (place.token - (first + i - j) >= place.begin) is_valid[static_cast<size_t>(b * Tk_ + j)] = true;
      }
    });
    for (int64_t b = 0; b < B_; ++b) {
      for (int64_t j = 0; j < Tk_; ++j) {
        if (is_valid[static_cast<size_t>(b * Tk_ + j)]) continue;
        Spoil(p_.in.k, b, j);
        Spoil(p_.in.v, b, j);
      }
      for (int64_t c = seen[static_cast<size_t>(b)]; c < N_; ++c) {
        Spoil(p_.in.k_cmp, b, c);
        Spoil(p_.in.v_cmp, b, c);
      }
    }
    p_.note += " poisoned_padding";
  }
  void Spoil(const ConstTensorView& t, int64_t b, int64_t token) {
    if (!t) return;
    const TensorView to(const_cast<void*>(t.data()), t.dtype(), t.sizes(), t.strides());
    for (int64_t h = 0; h < t.size(2); ++h) {
      for (int64_t e = 0; e < t.size(3); ++e) {
        SetElement(to, std::vector<int64_t>{b, token, h, e}, std::numeric_limits<double>::quiet_NaN());
      }
    }
  }

  // Chosen keys in any order, with -1 among them.
  void Choose() {
    const bool by_head = Chance(0.4);
    const int64_t count = Chance(0.05) ? 0 : Chance(0.7) ? Integer(1, 12) : Integer(1, N_ + 3);
    std::vector<int64_t> sizes = {B_, Tq_, count};
    if (by_head) sizes.insert(sizes.begin() + 2, Hkv_);
    const Buffer chosen(Chance(0.5) ? DType::kI32 : DType::kI64, sizes);
    std::vector<int64_t> index(sizes.size()), row(static_cast<size_t>(count));
    const bool shuffles = Chance(0.7), fills = Chance(0.5);
    if (chosen.view().num_elements() > 0) {
      do {
        const auto n = static_cast<size_t>(index.back());
        if (n == 0) {
          const DefinedPlace place = PlaceByDefinition(p_.in, p_.options, index[0], index[1]);
          const size_t absent = fills ? 0 : static_cast<size_t>(Integer(0, count));
          std::ranges::fill(row, place.is_valid() ? -1 : 1000);  // choices of rows outside are not read
          if (place.is_valid()) {
            ChooseKeys(random(), place.num_complete(p_.options.ratio), std::span(row).subspan(absent));
          }
          for (size_t i = row.size(); shuffles && i > 1; --i) {
            std::swap(row[i - 1], row[static_cast<size_t>(Integer(0, static_cast<int64_t>(i) - 1))]);
          }
        }
        SetElement(chosen.view(), index, static_cast<double>(row[n]));
      } while (NextIndex(sizes, index));
    }
    p_.in.chosen = p_.Keep(chosen);
  }

  void Sinks() {
    const DType of = Chance(0.5) ? dtype() : random().Pick<DType>({DType::kF32, DType::kF64, DType::kBF16});
    p_.in.sinks = p_.Keep(Buffer(of, {Hq_}).FillNormal(NextSeed(), random().Pick({1.0, 5.0})));
  }

  ConstTensorView Tensor(int64_t tokens, int64_t heads, int64_t channels, double deviation) {
    return p_.Keep(Draw::Tensor({B_, tokens, heads, channels}, deviation));
  }

  Problem p_;
  int64_t B_ = 1, Tq_ = 1, Tk_ = 1, N_ = 0, Hkv_ = 1, Hq_ = 1;
};

}  // namespace

Problem RandomProblem(DType dtype, uint64_t seed) { return Generator(dtype, seed).Make(); }

}  // namespace heed::compressed_attention
