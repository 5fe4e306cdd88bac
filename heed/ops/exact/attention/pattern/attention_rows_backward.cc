// The backward pass of calls whose rows list their own keys (`keys`).
//
// Some thousand pairs of a row and a key are computed at a time: the keys and values of these rows are copied, row
// after row, the engine's backward pass runs on the copies, and their gradients are added to the sums of the keys that
// were copied. The sum of a key is over rows in order, whatever the threads: threads divide keys, not rows.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/pattern/attention_tables_internal.h"

namespace heed::attention {
namespace {

using softmax::Problem;
using softmax::Rows;
using softmax::Sequence;

constexpr int64_t kMostPairs = 8192, kMostRows = 1024;  // per batch of rows, but at least one row
constexpr int64_t kTasksOfHead = 16;

// Consecutive rows whose keys are copied together.
struct Share {
  size_t first = 0, count = 0;
};

using Sequences = std::span<const Sequence>;

std::vector<Share> SharesOf(Sequences rows) {
  std::vector<Share> shares;
  int64_t pairs = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t own = rows[i].num_keys;
    const bool full = !shares.empty() && (pairs + own > kMostPairs || shares.back().count == kMostRows);
    if (shares.empty() || full) {
      shares.push_back({i, 0});
      pairs = 0;
    }
    ++shares.back().count;
    pairs += own;
  }
  return shares;
}

// Buffers for the whole call, and for one batch of rows.
template <class T>
struct Memory {
  Rows dq, dk, dv;          // of all rows, and the sums of all keys
  Rows keys, values;        // copies
  Rows of_keys, of_values;  // gradients of the copies

  int64_t LayOut(const Problem& whole, const Problem& rows, Sequences listed, const softmax::Gradients& g, void* base) {
    int64_t most = kMostPairs;
    for (const Sequence& s : listed) most = std::max(most, s.num_keys);
    const Extent all = KeysOf(whole), copied = {1, most};
    const auto bytes = static_cast<int64_t>(SizeOf(whole.dtype));
    Carver carver(base);
    if (g.dk.data != nullptr) {
      dk = Table<T>(carver, all, rows.key_heads, whole.depth);
      of_keys = Table<T>(carver, copied, rows.key_heads, whole.depth);
    }
    if (g.dv.data != nullptr) {
      dv = Table<T>(carver, all, rows.key_heads, whole.value_depth);
      of_values = Table<T>(carver, copied, rows.key_heads, whole.value_depth);
    }
    if (g.dq.data != nullptr) dq = Table<T>(carver, QueriesOf(whole), rows.query_heads, whole.depth);
    keys = Copies(carver, copied, rows.key_heads, whole.depth, bytes);
    values = Copies(carver, copied, rows.key_heads, whole.value_depth, bytes);
    return carver.bytes();
  }

 private:
  static Rows Copies(Carver& carver, const Extent& extent, int64_t heads, int64_t depth, int64_t bytes) {
    std::byte* data;
    carver.Next(data, extent.tokens * heads * depth * bytes);
    return {data, 0, heads * depth, depth};
  }
};

// The engine's problem and gradients of a batch of rows, from a problem without sequences.
template <class T>
Subproblem SubproblemOf(const Problem& rows, const softmax::Gradients& gradients, Sequences share,
                        const Memory<T>& memory) {
  Subproblem subproblem = {rows, gradients};
  Problem& p = subproblem.problem;
  p.k = memory.keys;
  p.v = memory.values;
  p.invariant = false;  // copies have a layout that every kernel takes
  p.sequences.assign(share.begin(), share.end());
  int64_t pairs = 0;
  for (Sequence& s : p.sequences) {
    s.first_k = pairs;
    s.tail = nullptr;
    pairs += s.num_keys;
  }
  softmax::Gradients& g = subproblem.gradients;
  g.wide = true;
  g.dk = memory.of_keys;
  g.dv = memory.of_values;
  g.dq = memory.dq;
  return subproblem;
}

template <class T>
class RowsBackward {
 public:
  RowsBackward(const char* op, Context& ctx, const Problem& whole, const Problem& rows, Sequences listed,
               const softmax::Gradients& gradients)
      : op_(op), ctx_(ctx), whole_(whole), rows_(rows), listed_(listed), g_(gradients), keys_(KeysOf(whole)) {}

  void Run() {
    Memory<T> unplaced;
    ctx_.ReserveTables(unplaced.LayOut(whole_, rows_, listed_, g_, nullptr));
    memory_.LayOut(whole_, rows_, listed_, g_, ctx_.Tables());
    Clear(memory_.dk, whole_.depth);
    Clear(memory_.dv, whole_.value_depth);
    for (const Share& share : SharesOf(listed_)) {
      const Sequences listed = listed_.subspan(share.first, share.count);
      const auto [problem, gradients] = SubproblemOf(rows_, g_, listed, memory_);
      Copy(listed, problem.sequences);
      softmax::Choose(op_, ctx_, problem, softmax::Pass::kBackward).backward(ctx_, problem, gradients);
      AddUp(listed, problem.sequences);
    }
    StoreAll(memory_.dq, whole_.depth, rows_.query_heads, &Sequence::first_q, &Sequence::num_queries, g_.dq);
    StoreAll(memory_.dk, whole_.depth, rows_.key_heads, &Sequence::first_k, &Sequence::num_keys, g_.dk);
    StoreAll(memory_.dv, whole_.value_depth, rows_.key_heads, &Sequence::first_k, &Sequence::num_keys, g_.dv);
  }

 private:
  void Clear(const Rows& sums, int64_t depth) {
    if (sums.data == nullptr) return;
    std::fill_n(At<T>(sums, 0, 0, 0), keys_.batches * keys_.tokens * rows_.key_heads * depth, T{0});
  }

  // Copies the keys and values that rows list into the layout of `copied`.
  void Copy(Sequences listed, Sequences copied) {
    const size_t element = SizeOf(rows_.dtype);
    const auto place = [&](const Rows& rows, int64_t batch, int64_t token, int64_t head) {
      return static_cast<std::byte*>(const_cast<void*>(rows.data)) +
             static_cast<ptrdiff_t>(element) *
                 (batch * rows.batch_stride + token * rows.token_stride + head * rows.head_stride);
    };
    const auto copy = [&](const Rows& from, const Rows& to, const Sequence& s, int64_t key, int64_t pair,
                          int64_t depth) {
      for (int64_t head = 0; head < rows_.key_heads; ++head) {
        std::memcpy(place(to, 0, pair, head), place(from, s.batch, s.first_k + key, head),
                    static_cast<size_t>(depth) * element);
      }
    };
    ctx_.ParallelFor(std::ssize(listed), [&](int64_t i, int) {
      const Sequence& s = listed[static_cast<size_t>(i)];
      int64_t pair = copied[static_cast<size_t>(i)].first_k;
      for (int64_t j = 0; j < s.num_keys; ++j, ++pair) {
        copy(rows_.k, memory_.keys, s, s.tail[j], pair, whole_.depth);
        copy(rows_.v, memory_.values, s, s.tail[j], pair, whole_.value_depth);
      }
    });
  }

  void AddUp(Sequences listed, Sequences copied) {
    const int64_t keys_of_task = (keys_.tokens + kTasksOfHead - 1) / kTasksOfHead;
    ctx_.ParallelFor(kTasksOfHead * rows_.key_heads, [&](int64_t task, int) {
      const int64_t begin = task / rows_.key_heads * keys_of_task, head = task % rows_.key_heads;
      for (size_t i = 0; i < listed.size(); ++i) {
        const Sequence& s = listed[i];
        const auto keys = std::span(s.tail, static_cast<size_t>(s.num_keys));
        // Tokens of a packed call are counted from its beginning.
        const auto first = std::ranges::lower_bound(keys, begin - s.first_k);
        const auto last = std::ranges::lower_bound(keys, begin + keys_of_task - s.first_k);
        for (auto key = first; key != last; ++key) {
          const int64_t copy = copied[i].first_k + (key - keys.begin()), token = s.first_k + *key;
          Add(memory_.of_keys, copy, memory_.dk, s.batch, token, head, whole_.depth);
          Add(memory_.of_values, copy, memory_.dv, s.batch, token, head, whole_.value_depth);
        }
      }
    });
  }
  static void Add(const Rows& from, int64_t copy, const Rows& sums, int64_t batch, int64_t token, int64_t head,
                  int64_t depth) {
    if (sums.data == nullptr) return;
    const T* part = At<T>(from, 0, copy, head);
    T* sum = At<T>(sums, batch, token, head);
    for (int64_t e = 0; e < depth; ++e) sum[e] += part[e];
  }

  // Rounds sums to the dtype of the result.
  void StoreAll(const Rows& from, int64_t depth, int64_t heads, int64_t Sequence::* first, int64_t Sequence::* count,
                const Rows& out) {
    if (out.data == nullptr) return;
    for (const Sequence& s : whole_.sequences) {
      ctx_.ParallelFor(s.*count, [&](int64_t i, int) {
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t token = s.*first + i;
          Store<T>(rows_.dtype, At<T>(from, s.batch, token, head), depth, out, s.batch, token, head);
        }
      });
    }
  }

  const char* op_;
  Context& ctx_;
  const Problem &whole_, &rows_;  // the problem of rows, without sequences
  Sequences listed_;
  const softmax::Gradients& g_;
  Extent keys_;
  Memory<T> memory_;
};

template <class T>
int64_t BytesOf(const char* op, const Context& ctx, const Problem& whole, const Problem& rows, Sequences listed,
                const softmax::Gradients& gradients) {
  Memory<T> memory;
  const int64_t kept = memory.LayOut(whole, rows, listed, gradients, nullptr);
  int64_t most = 0;
  for (const Share& share : SharesOf(listed)) {
    Subproblem subproblem = SubproblemOf(rows, gradients, listed.subspan(share.first, share.count), memory);
    softmax::Gradients& g = subproblem.gradients;  // the tables do not exist yet
    g.dq = gradients.dq;
    g.dk = gradients.dk;
    g.dv = gradients.dv;
    const softmax::BackwardBytes bytes = softmax::Choose(op, ctx, subproblem.problem, softmax::Pass::kBackward)
                                             .backward_workspace(ctx, subproblem.problem, g);
    most = std::max(most, bytes.per_thread * ctx.num_threads() + bytes.shared);
  }
  return kept + most;
}

}  // namespace

void RunBackwardOfRows(const char* op, Context& ctx, const Pattern& pattern, const softmax::Gradients& gradients,
                       const Problem& whole) {
  for (auto& [rows, own] : ProblemsOfRows(whole, pattern, gradients)) {
    const std::vector<Sequence> listed = std::exchange(rows.sequences, {});
    if (rows.dtype == DType::kF64) {
      RowsBackward<double>(op, ctx, whole, rows, listed, own).Run();
    } else {
      RowsBackward<float>(op, ctx, whole, rows, listed, own).Run();
    }
  }
}

int64_t BackwardBytesOfRows(const char* op, const Context& ctx, const Pattern& pattern,
                            const softmax::Gradients& gradients, const Problem& whole) {
  int64_t most = 0;
  for (auto& [rows, own] : ProblemsOfRows(whole, pattern, gradients)) {
    const std::vector<Sequence> listed = std::exchange(rows.sequences, {});
    most = std::max(most, rows.dtype == DType::kF64 ? BytesOf<double>(op, ctx, whole, rows, listed, own)
                                                    : BytesOf<float>(op, ctx, whole, rows, listed, own));
  }
  return most;
}

}  // namespace heed::attention
