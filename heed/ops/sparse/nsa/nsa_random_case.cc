// Random problems of nsa: sizes, memory layouts, windows and blocks beyond the hand-written cases.
#include <algorithm>
#include <utility>

#include "heed/ops/sparse/nsa/nsa_case.h"

namespace heed::nsa {
namespace {

class Generator : sparse::Draw {
 public:
  Generator(DType dtype, uint64_t seed) : Draw(dtype, seed, 4) { p_.note = "seed=" + std::to_string(seed); }

  Problem Make() {
    B_ = Chance(0.03) ? 0 : Integer(1, 3);
    Tk_ = Chance(0.03) ? 0 : Chance(0.85) ? Integer(1, 50) : Chance(0.9) ? Integer(60, 140) : Integer(250, 330);
    Tq_ = Chance(0.6) ? Tk_ : Integer(0, Tk_);
    Hkv_ = Tk_ > 200 ? 1 : Integer(1, 2);
    Hq_ = Hkv_ * random().Pick<int64_t>({1, 1, 2, 3});
    const int64_t D = Channels(), Dv = Chance(0.5) ? D : Channels();
    ChooseOptions();
    p_.in.q = Tensor(Tq_, Hq_, D, random().Pick({1.0, 1.0, 4.0}));
    p_.in.k = Tensor(Tk_, Hkv_, D, 1);
    p_.in.v = Tensor(Tk_, Hkv_, Dv, 1);
    p_.in.gates = Tensor(Tq_, Hq_, 3, 1);
    if (Chance(0.4)) {
      const int64_t stride = p_.options.stride == 0 ? p_.options.block : p_.options.stride;
      const int64_t length = p_.options.length == 0 ? p_.options.block : p_.options.length;
      const int64_t complete = Tk_ < length ? 0 : (Tk_ - length) / stride + 1;
      const int64_t windows = complete + (Chance(0.3) ? Integer(0, 3) : 0);
      p_.in.k_cmp = Tensor(windows, Hkv_, D, 1);
      p_.in.v_cmp = Tensor(windows, Hkv_, Dv, 1);
    }
    if (Chance(0.5)) p_.in.d_o = Tensor(Tq_, Hq_, Dv, 1);
    Describe(p_);
    if (p_.in.d_o && DropsAll(p_.gradients)) p_.in.d_o = {};
    return p_;
  }

 private:
  void ChooseOptions() {
    Options& o = p_.options;
    o.block = Chance(0.6) ? Integer(1, 8) : Chance(0.9) ? random().Pick<int64_t>({16, 24, 64}) : Integer(65, 400);
    o.count = Chance(0.7) ? Integer(3, 7) : Integer(1, 30);
    o.window = Chance(0.6) ? Integer(1, 12) : Integer(1, 400);
    if (Chance(0.5)) {
      o.stride = Chance(0.7) ? Integer(1, o.block) : Integer(1, 2 * o.block);
      o.length = Chance(0.6) ? o.stride * Integer(1, 3) : Integer(1, 3 * o.block);
    }
    if (Chance(0.3)) o.scale = random().Pick({1.0, -0.3, 0.0, 0.5});
  }

  ConstTensorView Tensor(int64_t tokens, int64_t heads, int64_t channels, double deviation) {
    return p_.Keep(Draw::Tensor({B_, tokens, heads, channels}, deviation));
  }

  Problem p_;
  int64_t B_ = 1, Tq_ = 1, Tk_ = 1, Hkv_ = 1, Hq_ = 1;
};

}  // namespace

Problem RandomProblem(DType dtype, uint64_t seed) { return Generator(dtype, seed).Make(); }

}  // namespace heed::nsa
