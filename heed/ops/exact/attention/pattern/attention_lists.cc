// A problem's pattern as lists for the engine: of the tiles that hold a kept pair, or of the keys of each row.
//
// Tiles serve most patterns. Where a pattern names the keys of each row (`keys`), they are scattered: a tile of 64 keys
// would be computed for one or two. So each row becomes a sequence of its own whose keys are rows of k and v that need
// not be consecutive; kernels read them in place, and the cost is proportional to the pairs.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/patterns/pattern_internal.h"

namespace heed::attention {
namespace {

using softmax::Problem;
using softmax::Rows;
using softmax::Sequence;

// Calls f(call, sequences) for each call that the pattern is listed for. Batch entries of one shape share a list unless
// an option distinguishes them; where each is a sequence of its own, they are listed separately.
template <class F>
void ForPatternCalls(bool to_lengths, Problem* p, const F& f) {
  if (p->sequences.empty()) return;
  const auto keys_of = [&](const Sequence& s) { return to_lengths ? s.key_end : s.num_keys; };
  const Sequence& first = p->sequences.front();
  const bool alike = std::ranges::all_of(p->sequences, [&](const Sequence& s) {
    return s.num_queries == first.num_queries && keys_of(s) == keys_of(first);
  });
  PatternCall call;
  call.query_heads = p->query_heads;
  call.key_heads = p->key_heads;
  call.batches = 0;
  for (const Sequence& s : p->sequences) call.batches = std::max(call.batches, s.batch + 1);
  const bool together = alike && std::ssize(p->sequences) == call.batches;
  const size_t each = together ? p->sequences.size() : 1;
  for (size_t i = 0; i < p->sequences.size(); i += each) {
    const auto sequences = std::span(p->sequences).subspan(i, each);
    call.Tq = sequences[0].num_queries;
    call.Tk = keys_of(sequences[0]);
    call.batch = together ? 0 : sequences[0].batch;
    call.starts.clear();
    for (const Sequence& s : sequences) call.starts.push_back(s.start);
    f(call, sequences);
  }
}

void SkipHeads(int64_t heads, DType dtype, Rows* rows) {
  if (rows->data == nullptr) return;
  rows->data = static_cast<const char*>(rows->data) + heads * rows->head_stride * static_cast<int64_t>(SizeOf(dtype));
}

// The part of the problem with one key head and its query heads.
Subproblem OfKeyHead(const Problem& whole, const softmax::Gradients& gradients, int64_t head) {
  Subproblem subproblem = {whole, gradients};
  auto& [p, g] = subproblem;
  const int64_t group = whole.group(), first = head * group;
  const DType computed = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  p.key_heads = 1;
  p.query_heads = group;
  SkipHeads(head, p.dtype, &p.k);
  SkipHeads(head, p.dtype, &p.v);
  SkipHeads(first, p.dtype, &p.q);
  SkipHeads(first, p.wide_outputs ? computed : p.dtype, &p.o);
  SkipHeads(first, computed, &p.lse);
  if (!p.sinks.empty()) p.sinks = {whole.sinks.begin() + first, whole.sinks.begin() + first + group};
  SkipHeads(first, p.dtype, &g.d_o);
  SkipHeads(first, computed, &g.d_lse);
  SkipHeads(first, p.dtype, &g.dq);
  SkipHeads(head, p.dtype, &g.dk);
  SkipHeads(head, p.dtype, &g.dv);
  if (g.dsinks != nullptr) g.dsinks += first;
  return subproblem;
}

// A row as a sequence whose keys are those that the pattern lists, limited to those that the call lets it see.
Sequence OfRow(const patterns::Node& node, const patterns::Place& place, const Problem& p, const Sequence& s,
               int64_t row) {
  const bool valid = row < s.query_end;
  const int64_t end = p.causal ? std::min(s.key_end, s.start + row + 1) : s.key_end;
  const auto keys = node.Listed(place, row, s.key_begin, valid ? std::max(end, s.key_begin) : s.key_begin);
  Sequence own;
  own.batch = s.batch;
  own.first_q = s.first_q + row;
  own.first_k = s.first_k;
  own.num_queries = 1;
  own.query_end = valid ? 1 : 0;
  own.num_keys = own.key_end = std::ssize(keys);
  own.start = own.num_keys;
  own.tail = keys.data();
  return own;
}

}  // namespace

void CheckPattern(const char* op, const Pattern& pattern, Problem* p) {
  if (!pattern.present()) return;
  ForPatternCalls(/*to_lengths=*/false, p,
                  [&](const PatternCall& call, std::span<Sequence>) { patterns::CheckPattern(op, pattern, call); });
}

void PlacePattern(const char* op, const Pattern& pattern, bool to_lengths, Problem* p) {
  if (!pattern.present()) return;
  ForPatternCalls(to_lengths, p, [&](const PatternCall& call, std::span<Sequence> sequences) {
    patterns::CheckPattern(op, pattern, call);  // refers to the keys appended so far, for a cache
    p->kept.push_back(patterns::Compile(pattern, call));
    for (Sequence& s : sequences) {
      s.kept = p->kept.back().get();
      s.kept_batch = std::ssize(sequences) > 1 ? s.batch : 0;
    }
    p->has_pattern = true;
  });
}

void PlaceTileRows(const char* op, const Pattern& pattern, Problem* p) {
  // Fewer rows would not fill blocks; and lists count tiles from key 0, while kernels count from the first valid key.
  constexpr int64_t kFewestRows = 2 * patterns::kBlockRows;
  const bool fits = std::ranges::all_of(p->sequences, [&](const Sequence& s) {
    return s.num_queries * p->group() >= kFewestRows && s.key_begin % patterns::kTile == 0;
  });
  p->invariant = true;  // selects kernels of one summation order, whichever path is faster
  std::vector<std::shared_ptr<const softmax::TileRows>> lists;
  bool pays = fits;
  if (fits) {
    ForPatternCalls(/*to_lengths=*/false, p, [&](const PatternCall& call, std::span<Sequence> sequences) {
      patterns::CheckPattern(op, pattern, call);
      lists.push_back(patterns::CompileTileRows(pattern, call));
      pays = pays && lists.back() != nullptr;
      for (Sequence& s : sequences) {
        s.tile_rows = lists.back().get();
        s.kept_batch = std::ssize(sequences) > 1 ? s.batch : 0;
      }
    });
  }
  if (pays) {
    p->tile_rows = std::move(lists);
    return;
  }
  for (Sequence& s : p->sequences) s.tile_rows = nullptr;
  PlacePattern(op, pattern, /*to_lengths=*/false, p);
}

std::vector<Subproblem> ProblemsOfRows(Problem whole, const Pattern& pattern, const softmax::Gradients& gradients) {
  const patterns::Node& node = *pattern.node();
  const std::vector<Sequence> sequences = std::exchange(whole.sequences, {});
  std::vector<Subproblem> subproblems;
  const int64_t heads = node.by_head() ? whole.key_heads : 1;
  for (int64_t head = 0; head < heads; ++head) {
    subproblems.push_back(heads == 1 ? Subproblem{whole, gradients} : OfKeyHead(whole, gradients, head));
    Problem& p = subproblems.back().problem;
    p.causal = false;    // every listed key is visible to its row
    p.invariant = true;  // selects the kernels that read rows by index
    for (const Sequence& s : sequences) {
      const patterns::Place place = {s.batch, head * whole.group(), whole.query_heads, whole.key_heads, s.num_keys};
      for (int64_t row = 0; row < s.num_queries; ++row) p.sequences.push_back(OfRow(node, place, whole, s, row));
    }
  }
  return subproblems;
}

}  // namespace heed::attention
