// Random problems of compressed attention: sizes, memory layouts, ratios, windows and chosen keys.
#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "heed/ops/sparse/compressed_attention/compressed_attention_case.h"

namespace heed::compressed_attention {
namespace {

class Generator : sparse::Draw {
 public:
  Generator(DType dtype, uint64_t seed) : Draw(dtype, seed, 13) { p_.note = "seed=" + std::to_string(seed); }

  Problem Make() {
    B_ = Chance(0.03) ? 0 : Integer(1, 3);
    Tk_ = Chance(0.03) ? 0 : Chance(0.85) ? Integer(1, 50) : Chance(0.9) ? Integer(60, 140) : Integer(250, 330);
    Tq_ = Chance(0.6) ? Tk_ : Integer(0, Tk_);
    Hkv_ = Tk_ > 200 ? 1 : Integer(1, 2);
    Hq_ = Hkv_ * random().Pick<int64_t>({1, 1, 2, 3, 9, 17});
    if (Tk_ > 140) Hq_ = std::min<int64_t>(Hq_, 3);
    const int64_t D = Channels(), Dv = Chance(0.5) ? D : Channels();
    Options& o = p_.options;
    o.ratio = Chance(0.7) ? Integer(1, 6) : random().Pick<int64_t>({16, 64, 128, 1000});
    o.window = Chance(0.15) ? 0 : Chance(0.7) ? Integer(1, 20) : Integer(1, 400);
    if (Chance(0.2)) o.start = Tk_ - Tq_ + Integer(0, 60);
    if (Chance(0.3)) o.scale = random().Pick({1.0, -0.3, 0.0, 0.5});
    start_ = o.start.value_or(Tk_ - Tq_);
    N_ = (start_ + Tq_) / o.ratio + (Chance(0.3) ? Integer(0, 3) : 0);
    p_.in.q = Tensor(Tq_, Hq_, D, random().Pick({1.0, 1.0, 4.0}));
    p_.in.k = Tensor(Tk_, Hkv_, D, 1);
    p_.in.v = Tensor(Tk_, Hkv_, Dv, 1);
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
    return p_;
  }

 private:
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
          const int64_t complete = std::min((start_ + index[1] + 1) / p_.options.ratio, N_);
          const size_t absent = fills ? 0 : static_cast<size_t>(Integer(0, count));
          std::ranges::fill(row, -1);
          ChooseKeys(random(), complete, std::span(row).subspan(absent));
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
  int64_t B_ = 1, Tq_ = 1, Tk_ = 1, N_ = 0, Hkv_ = 1, Hq_ = 1, start_ = 0;
};

}  // namespace

Problem RandomProblem(DType dtype, uint64_t seed) { return Generator(dtype, seed).Make(); }

}  // namespace heed::compressed_attention
