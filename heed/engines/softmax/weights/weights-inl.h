// Attention probabilities P of blocks of rows, tile by tile, for callers that store, pool or sum them.
//
// Compiled once per SIMD target and dtype. There are two passes over the tiles: one for the row statistics, without
// values, unless the caller knows them; and one for P = exp(S - lse). That is twice the first product and twice the
// exponentials, about the time of attention itself.
#if defined(HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/core/context.h"
#include "heed/engines/softmax/block/exponentials-inl.h"
#include "heed/engines/softmax/forward/tasks-inl.h"
#include "heed/engines/softmax/weights/weights.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class O, int C>
class WeightsBlock : ForwardBlock<O, C> {
  using Base = ForwardBlock<O, C>;

 public:
  using typename Base::T;
  using typename Base::V;
  using Base::Base, Base::N, Base::W;

  // Calls use(tile, p) for each tile with a visible key; p[key][lane] has W lanes per key. `dropout` says whether
  // dropout applies to p.
  template <class F>
  HWY_INLINE void ForTiles(const GivenLse& given, bool dropout, const F& use) {
    HWY_ALIGN T lse[W];
    if (given.rows.data == nullptr) {
      this->Accumulate();
      for (size_t lane = 0; lane < W; lane += N) {
        hn::Store(this->LseOf(lane), d_, lse + lane);
      }
    } else {
      this->FindKeys();
      this->Prepare();
    }
    for (size_t lane = 0; lane < W; ++lane) {
      lse[lane] = lane < num_rows_ ? Total(given, lane, lse[lane]) : T{0};
      // A row that sees no key has only logits of -inf; its shift must be finite.
      if (lse[lane] == -std::numeric_limits<T>::infinity()) lse[lane] = 0;
    }
    Block<O, C>::ForTiles([&](const Tile& tile) HWY_ATTR {
      TileOfWeights(tile, lse, dropout);
      use(tile, static_cast<const T*>(w_.logits));
    });
  }

 private:
  using Base::d_, Base::p_, Base::s_, Base::grid_, Base::block_, Base::key_head_, Base::num_rows_, Base::lanes_,
      Base::w_;

  // Returns log(exp(lse) + exp(sink)) of a lane's row.
  T Total(const GivenLse& given, size_t lane, T computed) const {
    const BlockGrid::Row row = grid_.At(block_, static_cast<int64_t>(lane));
    const int64_t head = key_head_ * grid_.heads + row.head;
    double lse = static_cast<double>(computed);
    if (given.rows.data != nullptr) {
      lse = LoadAsDouble(
          given.dtype, given.rows.data,
          s_.batch * given.rows.batch_stride + row.query * given.rows.token_stride + head * given.rows.head_stride);
    }
    if (p_.sinks.empty() || std::isnan(lse)) return static_cast<T>(lse);
    const double sink = p_.sinks[static_cast<size_t>(head)];
    const double larger = std::max(lse, sink);
    if (std::isinf(larger)) return static_cast<T>(larger);
    return static_cast<T>(larger + std::log(std::exp(lse - larger) + std::exp(sink - larger)));
  }

  HWY_INLINE void TileOfWeights(const Tile& tile, const T* HWY_RESTRICT lse, bool dropout) {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    const auto num_keys = static_cast<size_t>(tile.keys.size());
    Run runs[2 * C + 1];
    const int num_runs = this->SplitTile(tile, runs);
    const bool whole = this->IsWhole(tile, runs, num_runs);
    for (size_t at = 0; !whole && at < num_keys * W; at += N) {
      hn::Store(none, d_, w_.logits + at);
    }
    V max[C];
    for (int c = 0; c < C; ++c) max[c] = none;
    this->BeginLogits(tile);
    for (int r = 0; r < num_runs; ++r) {
      this->Logits(runs[r], tile, /*flag_masked=*/true, max);
    }
    V shift[C];
    for (int c = 0; c < C; ++c) {
      const auto vector = static_cast<size_t>(c);
      shift[c] = this->WithoutRow(hn::Load(d_, lse + vector * N), vector);
    }
    for (size_t j = 0; j < num_keys; ++j) {
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        T* HWY_RESTRICT at = w_.logits + j * W + static_cast<size_t>(c) * N;
        const V s = hn::Load(d_, at);
        const V p = Weight(d_, hn::Sub(s, shift[c]));
        hn::Store(hn::IfThenZeroElse(hn::Eq(s, none), p), d_, at);
      }
    }
    if (!dropout) return;
    for (int r = 0; r < num_runs; ++r) ApplyDropout<W>(d_, runs[r], tile.keys.begin, p_, lanes_, w_.logits);
    const V gain = hn::Set(d_, static_cast<T>(1 / (1 - p_.dropout)));
    for (size_t at = 0; at < num_keys * W; at += N) {
      hn::Store(hn::Mul(hn::Load(d_, w_.logits + at), gain), d_, w_.logits + at);
    }
  }
};

// All calls have one block size: with few rows lanes are wasted, which is better here than compiling every size.
template <class O>
Plan WeightsPlan(const Problem& p) {
  return MakePlan<O>(p, hs::kShapes.block_vectors);
}

// Reserves scratch for the plan and `more` bytes behind it. Returns the plan.
template <class O>
Plan Reserve(Context& ctx, const Problem& p, int64_t more) {
  const Plan plan = WeightsPlan<O>(p);
  ctx.ReserveScratch(Workspace<O>::Bytes(plan) + more);
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<Workspace<O>*>(ctx.Scratch(worker))->Init(plan);
  }
  return plan;
}

// Calls f(block) for these queries, W at most, of one query head of a sequence.
template <class O, class F>
HWY_INLINE void WithBlock(const Problem& p, const Plan& plan, int64_t sequence, int64_t query_head,
                          std::span<const int64_t> queries, Workspace<O>& w, const F& f) {
  const int64_t key_head = query_head / p.group();
  const Head<O> head = HeadOf(p, plan, sequence, key_head, w);
  BlockGrid::Row rows[hs::kShapes.block_vectors * hn::MaxLanes(hn::ScalableTag<typename O::Compute>())];
  for (size_t i = 0; i < queries.size(); ++i) rows[i] = {query_head % p.group(), queries[i]};
  const BlockGrid grid(p, {rows, queries.size()});
  WeightsBlock<O, hs::kShapes.block_vectors> block(p, p.sequences[static_cast<size_t>(sequence)], grid, key_head, 0, w,
                                                   head);
  f(block);
}

template <class O>
void RunRows(Context& ctx, const Problem& p, const GivenLse& lse, std::span<const int64_t> queries,
             std::span<const int64_t> heads, const WeightsOut& out) {
  const Plan plan = Reserve<O>(ctx, p, 0);
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  constexpr size_t W = hs::kShapes.block_vectors * hn::MaxLanes(D());
  const auto num_rows = static_cast<int64_t>(queries.size());
  const auto num_heads = static_cast<int64_t>(heads.size());
  const auto B = static_cast<int64_t>(p.sequences.size());
  const int64_t blocks = (num_rows + int64_t{W} - 1) / int64_t{W};
  ctx.ParallelFor(B * num_heads * blocks, [&](int64_t task, int worker) HWY_ATTR {
    const int64_t b = task / (num_heads * blocks), h = task / blocks % num_heads;
    const int64_t first = task % blocks * int64_t{W};
    const auto count = static_cast<size_t>(std::min<int64_t>(int64_t{W}, num_rows - first));
    T* rows[W];
    HWY_ALIGN T one[W];
    const int64_t num_keys = p.sequences[static_cast<size_t>(b)].num_keys;
    const int64_t end_key = std::min(num_keys, out.end_key);
    for (size_t lane = 0; lane < W; ++lane) {
      one[lane] = 1;
      if (lane >= count) continue;
      rows[lane] = static_cast<T*>(out.data) + b * out.batch_stride + h * out.head_stride +
                   (first + static_cast<int64_t>(lane)) * out.row_stride;
      std::fill(rows[lane], rows[lane] + (end_key - out.first_key), T{0});
    }
    Workspace<O>& w = *static_cast<Workspace<O>*>(ctx.Scratch(worker));
    WithBlock(p, plan, b, heads[static_cast<size_t>(h)], queries.subspan(static_cast<size_t>(first), count), w,
              [&](auto& block) HWY_ATTR {
                block.ForTiles(lse, out.dropout, [&](const Tile& tile, const T* weights) HWY_ATTR {
                  const int64_t begin = std::max(tile.keys.begin, out.first_key);
                  const int64_t end = std::min(tile.keys.end, end_key);
                  if (begin >= end) return;
                  T* at[W] = {};
                  for (size_t lane = 0; lane < count; ++lane) {
                    at[lane] = rows[lane] + (begin - out.first_key);
                  }
                  weights += static_cast<size_t>(begin - tile.keys.begin) * W;
                  LanesToRows(D(), weights, W, static_cast<size_t>(end - begin), one, at, count);
                });
              });
  });
}

// Queries of one head, about, whose rows of the picture are one task.
inline constexpr int64_t kPooledRows = 256;

inline int64_t RowsPerTask(const Problem& p, const Pool& pool) {
  const int64_t Tq = p.sequences.empty() ? 1 : p.sequences[0].num_queries;
  return std::clamp<int64_t>(kPooledRows * pool.rows / std::max<int64_t>(Tq, 1), 1, std::max<int64_t>(pool.rows, 1));
}

// Returns the first index of a bin.
inline int64_t BinBegin(int64_t bin, int64_t count, int64_t bins) { return (bin * count + bins - 1) / bins; }

// Returns the larger one, or NaN if one is NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Larger(D /*d*/, V x, V y) {
  return hn::IfThenElse(hn::Or(hn::Gt(x, y), hn::IsNaN(x)), x, y);
}

// Returns the bytes of a task's part of the picture and of the pooled columns of one block of rows by lane.
template <class O>
int64_t PoolBytes(const Problem& p, const Pool& pool) {
  using T = typename O::Compute;
  constexpr int64_t kLanes = hs::kShapes.block_vectors * hn::MaxLanes(hn::ScalableTag<T>());
  return pool.columns * (RowsPerTask(p, pool) * int64_t{sizeof(double)} + kLanes * int64_t{sizeof(T)});
}

template <class O>
void RunPooled(Context& ctx, const Problem& p, const GivenLse& lse, const Pool& pool, const WeightsOut& out) {
  const Plan plan = Reserve<O>(ctx, p, PoolBytes<O>(p, pool));
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  const D d;
  constexpr size_t N = hn::MaxLanes(d), W = hs::kShapes.block_vectors * N;
  const auto B = static_cast<int64_t>(p.sequences.size());
  const int64_t per_task = RowsPerTask(p, pool);
  const int64_t tasks = (pool.rows + per_task - 1) / per_task;
  const int64_t H = p.query_heads;
  ctx.ParallelFor(B * H * tasks, [&](int64_t task, int worker) HWY_ATTR {
    const int64_t b = task / (H * tasks), h = task / tasks % H;
    // The last rows are taken first, because under the causal diagonal these see the most keys.
    const int64_t first_bin = (tasks - 1 - task % tasks) * per_task;
    const int64_t last_bin = std::min(first_bin + per_task, pool.rows);
    const Sequence& s = p.sequences[static_cast<size_t>(b)];
    char* scratch = static_cast<char*>(ctx.Scratch(worker));
    Workspace<O>& w = *reinterpret_cast<Workspace<O>*>(scratch);
    T* columns = reinterpret_cast<T*>(scratch + Workspace<O>::Bytes(plan));
    double* picture = reinterpret_cast<double*>(columns + pool.columns * int64_t{W});
    std::fill(picture, picture + (last_bin - first_bin) * pool.columns, 0.0);

    const int64_t end = BinBegin(last_bin, s.num_queries, pool.rows);
    int64_t bin = first_bin;  // of the current row
    for (int64_t row = BinBegin(first_bin, s.num_queries, pool.rows); row < end;) {
      int64_t queries[W];
      const auto count = static_cast<size_t>(std::min<int64_t>(int64_t{W}, end - row));
      for (size_t lane = 0; lane < count; ++lane) {
        queries[lane] = row + static_cast<int64_t>(lane);
      }
      std::fill(columns, columns + pool.columns * int64_t{W}, T{0});
      WithBlock(p, plan, b, h, {queries, count}, w, [&](auto& block) HWY_ATTR {
        int64_t column = 0;
        block.ForTiles(lse, /*dropout=*/false, [&](const Tile& tile, const T* weights) HWY_ATTR {
          for (int64_t j = tile.keys.begin; j < tile.keys.end;) {
            while (BinBegin(column + 1, s.num_keys, pool.columns) <= j) ++column;
            const int64_t stop = std::min(tile.keys.end, BinBegin(column + 1, s.num_keys, pool.columns));
            const T* from = weights + static_cast<size_t>(j - tile.keys.begin) * W;
            T* to = columns + column * int64_t{W};
            for (size_t lane = 0; lane < W; lane += N) {
              auto pooled = hn::Load(d, to + lane);
              for (size_t k = 0; k < static_cast<size_t>(stop - j); ++k) {
                const auto x = hn::Load(d, from + k * W + lane);
                pooled = pool.maximum ? Larger(d, x, pooled) : hn::Add(pooled, x);
              }
              hn::Store(pooled, d, to + lane);
            }
            j = stop;
          }
        });
      });
      for (size_t lane = 0; lane < count; ++lane, ++row) {
        while (BinBegin(bin + 1, s.num_queries, pool.rows) <= row) ++bin;
        double* to = picture + (bin - first_bin) * pool.columns;
        for (int64_t c = 0; c < pool.columns; ++c) {
          const double x = static_cast<double>(columns[c * int64_t{W} + static_cast<int64_t>(lane)]);
          if (!pool.maximum) {
            to[c] += x;
          } else if (x > to[c] || std::isnan(x)) {  // a NaN stays in place
            to[c] = x;
          }
        }
      }
    }
    for (int64_t r = first_bin; r < last_bin; ++r) {
      const int64_t rows = BinBegin(r + 1, s.num_queries, pool.rows) - BinBegin(r, s.num_queries, pool.rows);
      T* to = static_cast<T*>(out.data) + b * out.batch_stride + h * out.head_stride + r * out.row_stride;
      for (int64_t c = 0; c < pool.columns; ++c) {
        const int64_t keys = BinBegin(c + 1, s.num_keys, pool.columns) - BinBegin(c, s.num_keys, pool.columns);
        const double pairs = pool.maximum ? 1 : static_cast<double>(rows) * static_cast<double>(keys);
        to[c] = static_cast<T>(picture[(r - first_bin) * pool.columns + c] / pairs);
      }
    }
  });
}

template <class O>
void RunSums(Context& ctx, const Problem& p, int64_t first_query, int64_t num_queries, const SumsOut& out) {
  const Plan plan = Reserve<O>(ctx, p, 0);
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  const D d;
  constexpr int64_t N = hn::MaxLanes(d), W = hs::kShapes.block_vectors * N;
  static_assert(W <= kSumsMargin);
  const int64_t H = p.query_heads;
  ctx.ParallelFor(std::ssize(p.sequences) * H, [&](int64_t task, int worker) HWY_ATTR {
    const Sequence& s = p.sequences[static_cast<size_t>(task / H)];
    T* by_key = static_cast<T*>(out.by_key) + task * out.stride;
    T* by_distance = static_cast<T*>(out.by_distance) + task * out.stride;
    for (int64_t first = first_query; first < first_query + num_queries; first += W) {
      const int64_t count = std::min(W, first_query + num_queries - first);
      int64_t queries[W];
      for (int64_t lane = 0; lane < count; ++lane) queries[lane] = first + lane;
      Workspace<O>& w = *static_cast<Workspace<O>*>(ctx.Scratch(worker));
      WithBlock(p, plan, task / H, task % H, {queries, static_cast<size_t>(count)}, w, [&](auto& block) HWY_ATTR {
        block.ForTiles(GivenLse(), /*dropout=*/false, [&](const Tile& tile, const T* weights) HWY_ATTR {
          for (int64_t j = tile.keys.begin; j < tile.keys.end; ++j, weights += W) {
            // The distances of the first lane; each further lane is one key further away.
            T* distances = by_distance + (s.start + first - j);
            auto sum = hn::Zero(d);
            for (int64_t lane = 0; lane < count; lane += N) {
              auto x = hn::Load(d, weights + lane);
              if (count - lane < N) x = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(count - lane)), x);
              sum = hn::Add(sum, x);
              hn::StoreU(hn::Add(hn::LoadU(d, distances + lane), x), d, distances + lane);
            }
            by_key[j] += hn::ReduceSum(d, sum);
          }
        });
      });
    }
  });
}

template <class O>
int64_t WeightsScratch(const Problem& p, const Pool* pool) {
  return Workspace<O>::Bytes(WeightsPlan<O>(p)) + (pool == nullptr ? 0 : PoolBytes<O>(p, *pool));
}

template <class O>
WeightsPasses PassesOfWeights() {
  return {&RunRows<O>, &RunPooled<O>, &RunSums<O>, &WeightsScratch<O>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_INL_H_
