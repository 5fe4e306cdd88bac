// The causal convolution backward.
//
// Memory-bound like the forward pass: x and d_o are read once, dx is written once. Tokens are processed in groups of
// 128 whose inputs and preactivation gradients are in tiles, in L1 with tokens in lanes, in L2 with channels; the W - 1
// gradients that follow a group are computed twice.
//
// dw and db must not depend on which axis is in lanes. So a group's sum has the same order for both: token t adds to
// lane t mod N, and lanes are added pairwise by halves. Groups are summed in f64. A task takes a part of all runs and a
// block of channels; the number of parts depends on the runs only, and parts are added in order.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/ssm/causal_conv1d/causal_conv1d_backward_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/ssm/causal_conv1d/causal_conv1d-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::causal_conv1d::HWY_NAMESPACE {

template <class T>
inline constexpr size_t kLanes = hn::MaxLanes(hn::ScalableTag<T>());

// Elements of a tile: 128 tokens, W - 1 more on either side, and padding for whole vectors.
template <class T>
int64_t GroupTileElements(const Problem& p) {
  const int64_t tokens = kGroupTokens + 2 * (p.W - 1);
  if (p.channels_in_lanes) return (tokens + kVectors) * static_cast<int64_t>(kTileRow);
  return tokens + static_cast<int64_t>((kVectors + 1) * kLanes<T>);
}

// Memory of one thread.
template <class T>
struct Buffers {
  T* inputs;     // of the group and of the W - 1 tokens before and after it
  T* gradients;  // dp of the group and of the W - 1 tokens after it, 0 beyond the last
  T* lanes;      // [N][kVectors][N]

  int64_t LayOut(const Problem& p, void* base) {
    Carver carver(base);
    carver.Next(inputs, GroupTileElements<T>(p));
    carver.Next(gradients, GroupTileElements<T>(p));
    carver.Next(lanes, static_cast<int64_t>(kLanes<T> * kVectors * kLanes<T>));
    return carver.bytes();
  }
};

// Memory shared by all threads.
template <class T>
struct Shared {
  T* table;      // [W + 1][padded D]
  double* sums;  // [parts][W + 1][padded D]: sums of dw and db

  int64_t LayOut(const Problem& p, int64_t parts, void* base) {
    const int64_t row = (p.W + 1) * static_cast<int64_t>(PaddedChannels(p));
    Carver carver(base);
    carver.Next(table, row);
    carver.Next(sums, parts * row);
    return carver.bytes();
  }
};

// dp of tokens [begin, end), whose inputs are in the tile.
template <bool kChannels, class T>
HWY_NOINLINE HWY_ATTR void LoadGradients(const Channels& c, const Grid& d_o, const T* table, int64_t begin, int64_t end,
                                         const Buffers<T>& b) {
  const Problem& p = c.p;
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  T* HWY_RESTRICT to = b.gradients;
  hs::WithStorage<T>(p.dtype, [&](auto tag) HWY_ATTR {
    using S = decltype(tag);
    ForVectors<kChannels, T, S>(d_o, c, begin, end, [&](const S* from, size_t at, int64_t stride, size_t n) HWY_ATTR {
      hn::StoreU(hs::LoadStrided(d, from, stride, n), d, to + at);
    });
  });
  if (!p.silu) return;
  const size_t row = PaddedChannels(p);
  const T* bias = table + static_cast<size_t>(p.W) * row;
  ForTiles<kChannels, T>(c, static_cast<size_t>(end - begin), [&](size_t at, size_t channel, size_t, size_t) HWY_ATTR {
    const V first = Weight<kChannels>(d, bias + channel);
    V sum[kVectors] = {first, first, first, first};
    AddTaps<kChannels>(d, b.inputs + at, table + channel, static_cast<int64_t>(row), p.W, sum);
    HWY_UNROLL(4)
    for (size_t r = 0; r < kVectors; ++r) {
      T* HWY_RESTRICT dp = to + at + r * (kChannels ? kTileRow : kLanes<T>);
      hn::StoreU(hn::Mul(hn::LoadU(d, dp), SiluSlope(d, sum[r])), d, dp);
    }
  });
}

// sums[j][channel] += sum_t dp_t x_{t - (W - 1) + j} for R taps from j on, over the tokens of a group. Without
// kProducts, sum_t dp_t.
template <bool kChannels, size_t R, bool kProducts, class T>
HWY_INLINE void AddGroupSums(const Channels& c, size_t tokens, int64_t j, const Buffers<T>& b,
                             double* HWY_RESTRICT sums, size_t row) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr size_t N = kLanes<T>, kToken = kChannels ? kTileRow : 1;
  const T* HWY_RESTRICT x = b.inputs + static_cast<size_t>(j) * kToken;
  const T* HWY_RESTRICT dp = b.gradients;
  const auto add = [&](size_t at, V(&sum)[R]) HWY_ATTR {
    const V gradient = hn::LoadU(d, dp + at);
    HWY_UNROLL(4)
    for (size_t r = 0; r < R; ++r) {
      sum[r] = kProducts ? hn::MulAdd(gradient, hn::LoadU(d, x + at + r * kToken), sum[r]) : hn::Add(gradient, sum[r]);
    }
  };
  const auto zero = hn::Zero(d);
  if constexpr (kChannels) {
    for (size_t i = 0; i < static_cast<size_t>(c.channels); i += N) {
      for (size_t lane = 0; lane < N; ++lane) {
        V sum[R];
        for (size_t r = 0; r < R; ++r) sum[r] = zero;
        for (size_t t = lane; t < tokens; t += N) add(t * kTileRow + i, sum);
        for (size_t r = 0; r < R; ++r) hn::StoreU(sum[r], d, b.lanes + (lane * R + r) * N);
      }
      for (size_t half = N / 2; half > 0; half /= 2) {
        for (size_t k = 0; k < half * R * N; k += N) {
          T* HWY_RESTRICT to = b.lanes + k;
          hn::StoreU(hn::Add(hn::LoadU(d, to), hn::LoadU(d, to + half * R * N)), d, to);
        }
      }
      for (size_t r = 0; r < R; ++r) {
        double* HWY_RESTRICT to = sums + r * row + i;
        for (size_t k = 0; k < N; ++k) to[k] += static_cast<double>(b.lanes[r * N + k]);
      }
    }
  } else {
    V sum[R];
    for (size_t r = 0; r < R; ++r) sum[r] = zero;
    for (size_t t = 0; t < tokens; t += N) add(t, sum);
    for (size_t r = 0; r < R; ++r) {
      T* HWY_RESTRICT lanes = b.lanes;
      hn::StoreU(sum[r], d, lanes);
      for (size_t half = N / 2; half > 0; half /= 2) {
        for (size_t k = 0; k < half; ++k) lanes[k] += lanes[half + k];
      }
      sums[r * row] += static_cast<double>(lanes[0]);
    }
  }
}

template <bool kChannels, class T>
HWY_NOINLINE HWY_ATTR void AddSums(const Channels& c, size_t tokens, const Buffers<T>& b, double* sums) {
  const size_t row = PaddedChannels(c.p);
  const int64_t W = c.p.W;
  int64_t j = 0;
  const auto at = [&](int64_t tap) { return sums + static_cast<size_t>(tap) * row; };
  for (; j + 4 <= W; j += 4) AddGroupSums<kChannels, 4, true>(c, tokens, j, b, at(j), row);
  for (; j < W; ++j) AddGroupSums<kChannels, 1, true>(c, tokens, j, b, at(j), row);
  AddGroupSums<kChannels, 1, false>(c, tokens, 0, b, at(W), row);
}

// dx of tokens [begin, end), plus the final state's gradient for the last W - 1; overwrites the tile of inputs.
template <bool kChannels, class T>
HWY_NOINLINE HWY_ATTR void StoreInputGradients(const Channels& c, const GradientGrids& g, const T* table, int64_t begin,
                                               int64_t end, const Buffers<T>& b) {
  const Problem& p = c.p;
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const size_t row = PaddedChannels(p), tokens = static_cast<size_t>(end - begin);
  const int64_t tail = c.s.count - (p.W - 1);  // the first token in the final state
  const bool from_state = g.d_final.data != nullptr && end > tail;
  if (from_state) {
    std::fill(b.inputs, b.inputs + GroupTileElements<T>(p), T{0});
    for (int64_t t = std::max(begin, tail); t < end; ++t) {
      T* to = b.inputs + static_cast<size_t>(t - begin) * (kChannels ? kTileRow : 1);
      for (int64_t i = 0; i < c.channels; ++i) to[i] = *StateAt<T>(g.d_final, c, i, t - tail);
    }
  }
  // dp_t is multiplied by the last tap, later gradients by earlier taps.
  const T* last = table + static_cast<size_t>(p.W - 1) * row;
  hs::WithStorage<T>(p.dtype, [&](auto tag) HWY_ATTR {
    auto* out = At<decltype(tag)>(g.dx, c, begin);
    ForTiles<kChannels, T>(c, tokens, [&](size_t at, size_t channel, size_t t, size_t i) HWY_ATTR {
      V dx[kVectors];
      HWY_UNROLL(4)
      for (size_t r = 0; r < kVectors; ++r) {
        dx[r] = from_state ? hn::LoadU(d, b.inputs + at + r * (kChannels ? kTileRow : kLanes<T>)) : hn::Zero(d);
      }
      AddTaps<kChannels>(d, b.gradients + at, last + channel, -static_cast<int64_t>(row), p.W, dx);
      StoreVectors<kChannels>(d, g.dx, c, out, tokens, t, i, dx);
    });
  });
}

// The gradient of the initial state: dx of the W - 1 tokens before the first. Scalar, and one function for both
// layouts, so that its bits are the same.
template <class T>
HWY_NOINLINE void StoreInitialGradients(const Channels& c, const GradientGrids& g, const T* table, const T* gradients,
                                        size_t token) {
  const Problem& p = c.p;
  const size_t row = PaddedChannels(p);
  for (int64_t channel = 0; channel < c.channels; ++channel) {
    const T* w = table + static_cast<size_t>(c.channel + channel);
    for (int64_t i = 0; i < p.W - 1; ++i) {
      T sum = 0;
      if (g.d_final.data != nullptr && i >= c.s.count) {  // still in the final state
        sum = *StateAt<T>(g.d_final, c, channel, i - c.s.count);
      }
      for (int64_t t = 0; t <= i && t < c.s.count; ++t) {
        sum += w[static_cast<size_t>(i - t) * row] *
               gradients[static_cast<size_t>(t) * token + static_cast<size_t>(channel)];
      }
      *StateAt<T>(g.dinitial, c, channel, i) = sum;
    }
  }
}

// Null `sums` are not computed.
template <bool kChannels, class T>
HWY_ATTR void BackwardGroup(const Channels& c, const GradientGrids& g, const T* table, double* sums, int64_t begin,
                            int64_t end, const Buffers<T>& b) {
  const Problem& p = c.p;
  const int64_t ahead = std::min(end + p.W - 1, c.s.count);
  constexpr size_t kToken = kChannels ? kTileRow : 1;
  LoadInputs<kChannels>(c, begin - (p.W - 1), ahead, b.inputs);
  LoadGradients<kChannels>(c, g.d_o, table, begin, ahead, b);
  if (ahead < end + p.W - 1 || (end - begin) % static_cast<int64_t>(kLanes<T>) != 0) {
    // Gradients beyond the last token are zero, also for the lanes of sums.
    const auto rest = static_cast<size_t>(ahead - begin) * kToken;
    const auto size = static_cast<size_t>(GroupTileElements<T>(p));
    const size_t inputs = rest + static_cast<size_t>(p.W - 1) * kToken;
    std::fill(b.gradients + rest, b.gradients + size, T{0});
    if (!kChannels) std::fill(b.inputs + inputs, b.inputs + size, T{0});
  }
  const auto tokens = static_cast<size_t>(end - begin);
  if (sums != nullptr) AddSums<kChannels>(c, tokens, b, sums + c.channel);
  if (begin == 0 && g.dinitial.data != nullptr) {
    StoreInitialGradients<T>(c, g, table, b.gradients, kToken);
  }
  if (g.dx.data != nullptr) StoreInputGradients<kChannels>(c, g, table, begin, end, b);
}

template <bool kChannels, class T>
HWY_ATTR void BackwardRun(const Problem& p, const GradientGrids& g, const Run& run, int64_t channel, const T* table,
                          double* sums, const Buffers<T>& b) {
  const Sequence& s = p.sequences[static_cast<size_t>(run.sequence)];
  const int64_t end_channel = std::min(channel + BlockOf(p), p.D);
  for (int64_t i = channel; i < end_channel; i += kChannels ? kLaneChannels : 1) {
    const Channels c = {p, s, i, kChannels ? end_channel - i : 1};
    for (int64_t t = run.begin; t < run.end; t += kGroupTokens) {
      BackwardGroup<kChannels>(c, g, table, sums, t, std::min(t + kGroupTokens, run.end), b);
    }
    if (s.count == 0 && g.dinitial.data != nullptr) {
      StoreInitialGradients<T>(c, g, table, nullptr, 0);
    }
  }
}

// Adds parts in order; the result is rounded once.
void StoreSums(Context& ctx, const Problem& p, const GradientGrids& g, int64_t parts, const double* sums) {
  const size_t row = PaddedChannels(p);
  constexpr int64_t kBlock = 512;
  ctx.ParallelFor((p.D + kBlock - 1) / kBlock, [&](int64_t task, int) HWY_ATTR {
    const int64_t begin = task * kBlock, end = std::min(begin + kBlock, p.D);
    double total[kBlock];
    for (int64_t j = 0; j <= p.W; ++j) {
      const Grid& to = j < p.W ? g.dweight : g.dbias;
      if (to.data == nullptr) continue;
      std::fill(total, total + kBlock, 0.0);
      for (int64_t part = 0; part < parts; ++part) {
        const double* from = sums + static_cast<size_t>(part * (p.W + 1) + j) * row + begin;
        for (int64_t c = 0; c < end - begin; ++c) total[c] += from[c];
      }
      for (int64_t c = begin; c < end; ++c) {
        StoreDouble(to.dtype, const_cast<void*>(to.data), c * to.channel + (j < p.W ? j * to.token : 0),
                    total[c - begin]);
      }
    }
  });
}

int64_t NumParts(const Problem& p) { return std::min(kMaxParts, static_cast<int64_t>(p.runs.size())); }

template <class T>
void BackwardTyped(Context& ctx, const Problem& p, const GradientGrids& g) {
  Shared<T> shared = {};
  const bool summed = g.dweight.data != nullptr || g.dbias.data != nullptr;
  const auto num_runs = static_cast<int64_t>(p.runs.size());
  const int64_t parts = summed ? NumParts(p) : num_runs;
  ctx.ReserveShared(Shared<T>().LayOut(p, summed ? parts : 0, nullptr));
  ctx.ReserveScratch(Buffers<T>().LayOut(p, nullptr));
  shared.LayOut(p, summed ? parts : 0, ctx.Shared());
  LoadWeights(p, shared.table);
  const int64_t blocks = NumBlocks(p);
  const size_t sums_of_part = static_cast<size_t>(p.W + 1) * PaddedChannels(p);
  ctx.ParallelFor(parts * blocks, [&](int64_t task, int worker) HWY_ATTR {
    Buffers<T> b = {};
    b.LayOut(p, ctx.Scratch(worker));
    const int64_t part = task / blocks, channel = task % blocks * BlockOf(p);
    double* sums = nullptr;
    if (summed) {
      sums = shared.sums + static_cast<size_t>(part) * sums_of_part;
      // Vectors of a row may end in the padding beyond the last channel.
      const auto begin = static_cast<size_t>(channel);
      const size_t end = channel + BlockOf(p) < p.D ? begin + static_cast<size_t>(BlockOf(p)) : PaddedChannels(p);
      for (int64_t j = 0; j <= p.W; ++j) {
        double* of_tap = sums + static_cast<size_t>(j) * PaddedChannels(p);
        std::fill(of_tap + begin, of_tap + end, 0.0);
      }
    }
    for (int64_t i = part * num_runs / parts; i < (part + 1) * num_runs / parts; ++i) {
      const Run& run = p.runs[static_cast<size_t>(i)];
      if (p.channels_in_lanes) {
        BackwardRun<true>(p, g, run, channel, shared.table, sums, b);
      } else {
        BackwardRun<false>(p, g, run, channel, shared.table, sums, b);
      }
    }
  });
  if (summed) StoreSums(ctx, p, g, parts, shared.sums);
}

void RunBackward(Context& ctx, const Problem& p, const GradientGrids& g) {
  p.dtype == DType::kF64 ? BackwardTyped<double>(ctx, p, g) : BackwardTyped<float>(ctx, p, g);
}

template <class T>
int64_t BackwardBytesTyped(const Problem& p, int threads) {
  return Shared<T>().LayOut(p, NumParts(p), nullptr) + threads * Buffers<T>().LayOut(p, nullptr);
}

int64_t RunBackwardBytes(const Problem& p, int threads) {
  return p.dtype == DType::kF64 ? BackwardBytesTyped<double>(p, threads) : BackwardBytesTyped<float>(p, threads);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::causal_conv1d::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::causal_conv1d {

HWY_EXPORT(RunBackward);
HWY_EXPORT(RunBackwardBytes);

void BackwardCpu(Context& ctx, const Problem& p, const GradientGrids& g) {
  HWY_DISPATCH_TABLE(RunBackward)[TargetIndex(ctx.allowed_targets())](ctx, p, g);
}

int64_t BackwardBytes(const Context& ctx, const Problem& p) {
  return HWY_DISPATCH_TABLE(RunBackwardBytes)[TargetIndex(ctx.allowed_targets())](p, ctx.num_threads());
}

}  // namespace heed::causal_conv1d
#endif  // HWY_ONCE
