// Selection of blocks by their scores: a given number, or as many as hold a fraction of a softmax.
//
// Compiled once per SIMD target and type.
#if defined(HEED_OPS_SPARSE_SELECT_BLOCK_CHOICE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_SPARSE_SELECT_BLOCK_CHOICE_INL_H_
#undef HEED_OPS_SPARSE_SELECT_BLOCK_CHOICE_INL_H_
#else
#define HEED_OPS_SPARSE_SELECT_BLOCK_CHOICE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "heed/core/carver.h"
#include "heed/patterns/top_blocks-inl.h"
#include "heed/ops/sparse/select/block_scores-inl.h"
#include "heed/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::select::HWY_NAMESPACE {
namespace hp = heed::patterns::HWY_NAMESPACE;

inline constexpr int64_t kRows = 64;  // rows per task

// Scratch memory of one thread.
template <class T>
struct BlockScratch {
  T *features, *scores;
  T *pooled, *ranks;  // for Cumulative: softmax weights of the rows, and a copy for one row
  int64_t* kept;
  int32_t* chosen;
  int64_t stride;

  BlockScratch(const BlockCall& c, void* memory) { LayOut(c, memory); }
  static int64_t Bytes(const BlockCall& c) { return BlockScratch(c, nullptr).bytes_; }

 private:
  void LayOut(const BlockCall& c, void* memory) {
    stride = Panels(c.most_blocks) * kPanel;
    Carver carver(memory);
    carver.Next(features, kRows * c.features());
    carver.Next(scores, kRows * stride);
    carver.Next(pooled, c.mass > 0 ? kRows * stride : 0);
    carver.Next(ranks, c.mass > 0 ? stride : 0);
    carver.Next(kept, 2 * stride + 1);
    carver.Next(chosen, stride);
    bytes_ = carver.bytes();
  }
  int64_t bytes_;
};

// Rows [row, row + rows) of a selecting head, which reads this key head.
struct BlockTask {
  int64_t b, head, key_head, first_query_head, row, rows;
};

// Calls f(task, scratch) for all rows of a call whose blocks are described.
template <class T, class F>
void ForBlockTasks(Context& ctx, const BlockCall& c, const F& f) {
  const int64_t heads = c.heads(), tiles = (c.Tq + kRows - 1) / kRows;
  ctx.ParallelFor(std::ssize(c.problem.sequences) * heads * tiles, [&](int64_t task, int worker) HWY_ATTR {
    const int64_t b = task / tiles / heads, head = task / tiles % heads;
    const int64_t row = (tiles - 1 - task % tiles) * kRows;  // late rows have the most candidates
    const int64_t query_head = head * c.heads_per_choice();
    const BlockScratch<T> scratch(c, ctx.Scratch(worker));
    f(BlockTask{b, head, query_head / c.problem.group(), query_head, row, std::min(kRows, c.Tq - row)}, scratch);
  });
}

template <class T>
void Reserve(Context& ctx, const BlockCall& c, Described<T>* described) {
  ctx.ReserveShared(described->Bytes());
  ctx.ReserveScratch(BlockScratch<T>::Bytes(c));
  described->Compute(ctx, static_cast<T*>(ctx.Shared()));
}

template <class T>
void RunTopBlocks(Context& ctx, const BlockCall& c, int64_t width, int64_t* index) {
  Described<T> described(c);
  Reserve(ctx, c, &described);
  ForBlockTasks<T>(ctx, c, [&](const BlockTask& task, const BlockScratch<T>& s) HWY_ATTR {
    Features(c, task.b, task.first_query_head, c.heads_per_choice(), task.row, task.rows, s.features);
    const int64_t most = BlocksOfRow(c, task.b, task.row + task.rows - 1).count;
    described.Scores(task.b, task.key_head, s.features, task.rows, most, s.scores, s.stride);
    for (int64_t r = 0; r < task.rows; ++r) {
      const RowBlocks row = BlocksOfRow(c, task.b, task.row + r);
      const auto kept = static_cast<size_t>(KeptAnyway(c, row, s.kept));
      const int64_t n = hp::ChooseTop(s.scores + r * s.stride, row.count, c.count - (row.has_own ? 1 : 0),
                                      std::span<const int64_t>(s.kept, kept), s.chosen);
      int64_t* to = index + ((task.b * c.Tq + task.row + r) * c.heads() + task.head) * width;
      for (int64_t i = n; i < width; ++i) *to++ = -1;
      const int64_t first = c.first[static_cast<size_t>(task.b)];
      for (int64_t i = 0; i < n; ++i) to[i] = first + s.chosen[i];
    }
  });
}

// pooled += softmax(scale scores) / heads, for scores [0, n) padded to whole vectors. NaN and -inf have no weight, and
// an infinite score has the weight of the largest.
template <class T>
HWY_NOINLINE void AddSoftmax(T* scores, int64_t n, T scale, T heads, T* pooled) {
  const hn::ScalableTag<T> d;
  constexpr int64_t N = hn::MaxLanes(d);
  const auto none = hn::Set(d, -std::numeric_limits<T>::infinity());
  auto largest = none;
  for (int64_t i = 0; i < n; i += N) {
    auto x = hn::Load(d, scores + i);
    if (n - i < N) x = hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(n - i)), x, none);
    x = hn::IfThenElse(hn::IsNaN(x), none, x);
    largest = hn::Max(largest, x);
    hn::Store(x, d, scores + i);
  }
  const auto max = hn::Set(d, hn::ReduceMax(d, largest));
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < n; i += N) {
    const auto x = hn::Load(d, scores + i);
    const auto below = hs::Exp(d, hn::Mul(hn::Sub(x, max), hn::Set(d, scale)));
    const auto weight = hn::IfThenZeroElse(hn::Eq(x, none), hn::IfThenElse(hn::Eq(x, max), hn::Set(d, T{1}), below));
    sum = hn::Add(sum, weight);
    hn::Store(weight, d, scores + i);
  }
  const T total = hn::ReduceSum(d, sum);
  if (total == 0) return;
  const auto factor = hn::Set(d, 1 / (total * heads));
  for (int64_t i = 0; i < n; i += N) {
    hn::Store(hn::MulAdd(hn::Load(d, scores + i), factor, hn::Load(d, pooled + i)), d, pooled + i);
  }
}

// Selects all of `always` and the fewest others by which a fraction `mass` of the weights is reached, larger ones
// first, ties to the lower index. `ranks` has room for the weights. A sum over more weights is never smaller, because
// all are added in one order, so the bisection of top_blocks-inl.h finds the last one that is needed.
template <class T>
HWY_NOINLINE int64_t ChooseMass(const T* weights, int64_t n, T mass, std::span<const int64_t> always, T* ranks,
                                int32_t* chosen) {
  using D = hn::ScalableTag<T>;
  using Keys = hp::Ranked<D>;
  using Key = typename Keys::Key;
  const D d;
  const hn::RebindToSigned<D> di;
  constexpr int64_t N = hn::MaxLanes(d);
  std::memcpy(ranks, weights, static_cast<size_t>(n) * sizeof(T));
  Keys keys(ranks, static_cast<size_t>(n));
  for (const int64_t block : always) keys.Set(static_cast<size_t>(block), Keys::kKept);
  const auto held_from = [&](Key least) HWY_ATTR {
    const auto limit = hn::Set(di, least);
    auto sum = hn::Zero(d);
    for (int64_t i = 0; i < n; i += N) {
      const auto counts = hn::RebindMask(d, hn::Ge(hn::BitCast(di, hn::Load(d, ranks + i)), limit));
      sum = hn::Add(sum, hn::IfThenElseZero(counts, hn::Load(d, weights + i)));
    }
    return hn::ReduceSum(d, sum);
  };
  const T wanted = mass * held_from(0);
  Key least = Keys::kKept, high = keys.largest() + 1;
  T held = held_from(high);
  if (n > 0 && held < wanted) {
    Key low = 0;  // invariant: the weights from `low` on suffice, those from `high` on do not
    while (high - 1 > low) {
      const Key middle = hp::Midpoint(low, high);
      const T sum = held_from(middle);
      if (sum < wanted) {
        high = middle;
        held = sum;
      } else {
        low = middle;
      }
    }
    least = high;
    for (size_t at = 0; held < wanted && at < static_cast<size_t>(n); ++at) {
      if (keys[at] != low) continue;
      keys.Set(at, Keys::kKept);
      held += weights[at];
    }
  }
  return keys.Write(least, chosen);
}

template <class T>
void RunCumulative(Context& ctx, const BlockCall& c, int64_t words, uint64_t* chosen) {
  Described<T> described(c);
  Reserve(ctx, c, &described);
  ForBlockTasks<T>(ctx, c, [&](const BlockTask& task, const BlockScratch<T>& s) HWY_ATTR {
    const int64_t most = BlocksOfRow(c, task.b, task.row + task.rows - 1).count;
    std::memset(s.pooled, 0, static_cast<size_t>(kRows * s.stride) * sizeof(T));
    for (int64_t h = 0; h < c.heads_per_choice(); ++h) {
      Features(c, task.b, task.first_query_head + h, 1, task.row, task.rows, s.features);
      described.Scores(task.b, task.key_head, s.features, task.rows, most, s.scores, s.stride);
      for (int64_t r = 0; r < task.rows; ++r) {
        const RowBlocks row = BlocksOfRow(c, task.b, task.row + r);
        T* scores = s.scores + r * s.stride;
        if (row.has_own) scores[row.at] = -std::numeric_limits<T>::infinity();
        AddSoftmax(scores, row.count, static_cast<T>(c.problem.scale), static_cast<T>(c.heads_per_choice()),
                   s.pooled + r * s.stride);
      }
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      const RowBlocks row = BlocksOfRow(c, task.b, task.row + r);
      const auto kept = static_cast<size_t>(KeptAnyway(c, row, s.kept));
      const int64_t n = ChooseMass(s.pooled + r * s.stride, row.count, static_cast<T>(c.mass),
                                   std::span<const int64_t>(s.kept, kept), s.ranks, s.chosen);
      uint64_t* to = chosen + ((task.b * c.Tq + task.row + r) * c.heads() + task.head) * words;
      for (int64_t i = 0; i < n; ++i) to[s.chosen[i] / 64] |= uint64_t{1} << (s.chosen[i] % 64);
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::select::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_SPARSE_SELECT_BLOCK_CHOICE_INL_H_
