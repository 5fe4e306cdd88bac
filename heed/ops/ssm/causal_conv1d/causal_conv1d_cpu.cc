// The causal convolution forward, for sequences and for one token.
//
// Memory-bound: 2 W flops, 8 for the usual W, per element read and written. So each input is read once, in whole
// consecutive cache lines, and each output written once, and the arithmetic must take less time than that. The
// contiguous axis is in vector lanes: no shuffles, in either layout.
//
//   tokens in lanes    one channel at a time, 1024 tokens: taps are loads one element apart,
//                      weights broadcasts
//   channels in lanes  16 tokens of 256 channels: taps are rows, weights vectors
//
// Both use a tile in L1, in which 16-bit inputs are widened once instead of W times, the state precedes the first
// token, and strides and direction are uniform. The first W - 1 inputs of a tile are read once more, from cache. Per
// vector of outputs this adds two loads and stores and W loads from L1 to the minimum, which is small against several
// cache lines of memory; four vectors share the load of a weight.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/ssm/causal_conv1d/causal_conv1d_cpu.cc"  // this file
#include "hwy/foreach_target.h"                                               // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/ssm/causal_conv1d/causal_conv1d-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::causal_conv1d::HWY_NAMESPACE {

constexpr int64_t kStepChannels = 1024;  // channels per task

// Tokens per tile: with channels in lanes, at least as many as the inputs before it, which are loaded twice.
int64_t TileTokens(const Problem& p) { return p.channels_in_lanes ? std::max<int64_t>(16, p.W - 1) : kRunTokens; }

template <class T>
int64_t ForwardTileElements(const Problem& p) {
  const int64_t tokens = TileTokens(p) + p.W - 1;
  if (p.channels_in_lanes) return (tokens + kVectors) * static_cast<int64_t>(kTileRow);
  return tokens + static_cast<int64_t>((kVectors + 1) * hn::MaxLanes(hn::ScalableTag<T>()));
}

// Outputs [begin, end), at most a tile.
template <bool kChannels, class T>
HWY_NOINLINE HWY_ATTR void ForwardTile(const Channels& c, const T* HWY_RESTRICT table, int64_t begin, int64_t end,
                                       T* HWY_RESTRICT tile) {
  const Problem& p = c.p;
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  LoadInputs<kChannels>(c, begin - (p.W - 1), end, tile);
  const size_t row = PaddedChannels(p), tokens = static_cast<size_t>(end - begin);
  const T* bias = table + static_cast<size_t>(p.W) * row;
  hs::WithStorage<T>(p.dtype, [&](auto tag) HWY_ATTR {
    auto* out = At<decltype(tag)>(p.o, c, begin);
    ForTiles<kChannels, T>(c, tokens, [&](size_t at, size_t channel, size_t t, size_t i) HWY_ATTR {
      const V b = Weight<kChannels>(d, bias + channel);
      V y[kVectors] = {b, b, b, b};
      AddTaps<kChannels>(d, tile + at, table + channel, static_cast<int64_t>(row), p.W, y);
      if (p.silu) {
        HWY_UNROLL(4)
        for (size_t r = 0; r < kVectors; ++r) y[r] = Silu(d, y[r]);
      }
      StoreVectors<kChannels>(d, p.o, c, out, tokens, t, i, y);
    });
  });
}

// Copies the last W - 1 inputs to the final state; those before the first token come from the initial state.
template <class T>
HWY_NOINLINE void StoreFinal(const Channels& c) {
  const Problem& p = c.p;
  hs::WithStorage<T>(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    for (int64_t i = 0; i < p.W - 1; ++i) {
      const int64_t t = c.s.count - (p.W - 1) + i;
      const S* x = t < 0 ? nullptr : At<S>(p.x, c, t);
      for (int64_t channel = 0; channel < c.channels; ++channel) {
        T value = 0;
        if (t >= 0) {
          value = hs::WideElement<T>(x[channel * p.x.channel]);
        } else if (p.initial.data != nullptr) {
          value = *StateAt<T>(p.initial, c, channel, p.W - 1 + t);
        }
        *StateAt<T>(p.final, c, channel, i) = value;
      }
    }
  });
}

template <bool kChannels, class T>
HWY_ATTR void ForwardRun(const Problem& p, const Run& run, int64_t channel, const T* table, T* tile) {
  const Sequence& s = p.sequences[static_cast<size_t>(run.sequence)];
  const int64_t end_channel = std::min(channel + BlockOf(p), p.D);
  const int64_t end_outputs = p.o.data == nullptr ? channel : end_channel;  // without `o` only the final state
  for (int64_t i = channel; i < end_outputs; i += kChannels ? kLaneChannels : 1) {
    const Channels c = {p, s, i, kChannels ? end_channel - i : 1};
    for (int64_t t = run.begin; t < run.end; t += TileTokens(p)) {
      ForwardTile<kChannels>(c, table, t, std::min(t + TileTokens(p), run.end), tile);
    }
  }
  if (run.end == s.count && p.final.data != nullptr) {
    StoreFinal<T>({p, s, channel, end_channel - channel});
  }
}

template <class T>
int64_t SharedBytes(const Problem& p) {
  return (p.W + 1) * static_cast<int64_t>(PaddedChannels(p) * sizeof(T));
}

template <class T>
void ForwardTyped(Context& ctx, const Problem& p) {
  ctx.ReserveShared(SharedBytes<T>(p));
  ctx.ReserveScratch(ForwardTileElements<T>(p) * int64_t{sizeof(T)});
  T* table = static_cast<T*>(ctx.Shared());
  LoadWeights(p, table);
  const int64_t blocks = NumBlocks(p);
  const auto num_runs = static_cast<int64_t>(p.runs.size());
  ctx.ParallelFor(num_runs * blocks, [&](int64_t task, int worker) HWY_ATTR {
    const Run& run = p.runs[static_cast<size_t>(task / blocks)];
    const int64_t channel = task % blocks * BlockOf(p);
    T* tile = static_cast<T*>(ctx.Scratch(worker));
    if (p.channels_in_lanes) {
      ForwardRun<true>(p, run, channel, table, tile);
    } else {
      ForwardRun<false>(p, run, channel, table, tile);
    }
  });
}

// Channels [channel, channel + n) of one token, n <= N: weights and state are transposed
// into `columns`, [2 W][N].
template <class T, class S>
HWY_INLINE void StepVector(const Channels& c, size_t n, T* HWY_RESTRICT columns) {
  const Problem& p = c.p;
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(d);
  const auto W = static_cast<size_t>(p.W);
  const auto row = [](const Grid& g, const auto* data, int64_t i) HWY_ATTR { return data + i * g.channel; };
  T* HWY_RESTRICT inputs = columns + W * N;
  hs::WithStorage<T>(p.weight.dtype, [&](auto tag) HWY_ATTR {
    const auto* from = static_cast<const decltype(tag)*>(p.weight.data);
    hs::LoadColumns(d, row(p.weight, from, c.channel), p.weight.channel, p.weight.token, W, n, columns, N);
  });
  T* state = p.W > 1 ? StateAt<T>(p.final, c, 0, 0) : nullptr;
  hs::LoadColumns(d, state, p.final.channel, p.final.token, W - 1, n, inputs, N);
  hn::StoreU(hs::LoadStrided(d, At<S>(p.x, c, 0), p.x.channel, n), d, inputs + (W - 1) * N);
  auto y = hn::Zero(d);
  if (p.bias.data != nullptr) {
    hs::WithStorage<T>(p.bias.dtype, [&](auto tag) HWY_ATTR {
      const auto* from = static_cast<const decltype(tag)*>(p.bias.data);
      y = hs::LoadStrided(d, row(p.bias, from, c.channel), p.bias.channel, n);
    });
  }
  for (size_t j = 0; j < W; ++j) {
    y = hn::MulAdd(hn::LoadU(d, columns + j * N), hn::LoadU(d, inputs + j * N), y);
  }
  if (p.silu) y = Silu(d, y);
  hs::StoreStrided(d, y, At<S>(p.o, c, 0), p.o.channel, n);
  hs::StoreColumns(d, inputs + N, N, W - 1, n, state, p.final.channel, p.final.token);
}

template <class T>
void StepTyped(Context& ctx, const Problem& p) {
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  ctx.ReserveScratch(2 * p.W * N * int64_t{sizeof(T)});
  const int64_t blocks = (p.D + kStepChannels - 1) / kStepChannels;
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  ctx.ParallelFor(sequences * blocks, [&](int64_t task, int worker) HWY_ATTR {
    const Sequence& s = p.sequences[static_cast<size_t>(task / blocks)];
    const int64_t begin = task % blocks * kStepChannels;
    const int64_t end = std::min(begin + kStepChannels, p.D);
    T* columns = static_cast<T*>(ctx.Scratch(worker));
    hs::WithStorage<T>(p.dtype, [&](auto tag) HWY_ATTR {
      for (int64_t i = begin; i < end; i += N) {
        const auto n = static_cast<size_t>(std::min(N, end - i));
        StepVector<T, decltype(tag)>({p, s, i, static_cast<int64_t>(n)}, n, columns);
      }
    });
  });
}

void RunForward(Context& ctx, const Problem& p) {
  p.dtype == DType::kF64 ? ForwardTyped<double>(ctx, p) : ForwardTyped<float>(ctx, p);
}

void RunStep(Context& ctx, const Problem& p) {
  p.dtype == DType::kF64 ? StepTyped<double>(ctx, p) : StepTyped<float>(ctx, p);
}

template <class T>
int64_t ForwardBytesTyped(const Problem& p, int threads) {
  return SharedBytes<T>(p) + threads * ForwardTileElements<T>(p) * static_cast<int64_t>(sizeof(T));
}

int64_t RunBytes(const Problem& p, int threads) {
  return p.dtype == DType::kF64 ? ForwardBytesTyped<double>(p, threads) : ForwardBytesTyped<float>(p, threads);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::causal_conv1d::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::causal_conv1d {

HWY_EXPORT(RunForward);
HWY_EXPORT(RunStep);
HWY_EXPORT(RunBytes);

void ForwardCpu(Context& ctx, const Problem& p) {
  HWY_DISPATCH_TABLE(RunForward)[TargetIndex(ctx.allowed_targets())](ctx, p);
}

void StepCpu(Context& ctx, const Problem& p) {
  HWY_DISPATCH_TABLE(RunStep)[TargetIndex(ctx.allowed_targets())](ctx, p);
}

int64_t ForwardBytes(const Context& ctx, const Problem& p) {
  return HWY_DISPATCH_TABLE(RunBytes)[TargetIndex(ctx.allowed_targets())](p, ctx.num_threads());
}

}  // namespace heed::causal_conv1d
#endif  // HWY_ONCE
