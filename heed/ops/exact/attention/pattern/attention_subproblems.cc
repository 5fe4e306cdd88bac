// The problems that a call is divided into: one with its pattern's lists of tiles, or problems that need no lists.
//
// Where a pattern keeps j = p + step c only, positions of different residues modulo `step` never form a pair. Rows and
// keys of one residue, every step-th of the call's, are a sequence of their own, in which the pattern is a window, or
// all keys: dense, where tiles of consecutive keys would hold 1 / step of kept pairs. For the tensors, this is a matter
// of strides. Where such a pattern is united with a window, the pairs beyond the window are a layer of their own, and
// attention_layers.cc merges the layers.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/patterns/pattern_internal.h"

namespace heed::attention {
namespace {

using softmax::Problem;
using softmax::Rows;
using softmax::Sequence;

constexpr int64_t kMostResidues = 4096;

// p - left <= j <= p + right.
struct Window {
  int64_t left, right;
};

// j = p + step c, |c| <= reach.
struct Residues {
  int64_t step, reach;
};

std::optional<Window> WindowOf(const patterns::Node& node) {
  const auto size = [&](size_t i) { return std::get<int64_t>(node.values[i]); };
  if (node.builder != "sliding_window") return std::nullopt;
  return Window{size(0), size(1)};
}

std::optional<Residues> ResiduesOf(const patterns::Node& node) {
  const auto size = [&](size_t i) { return std::get<int64_t>(node.values[i]); };
  Residues residues;
  if (node.builder == "atrous") {
    residues = {size(0), softmax::kUnlimited};
  } else if (node.builder == "dilated") {
    residues = {size(1), size(0)};
  } else {
    return std::nullopt;
  }
  if (residues.step < 2 || residues.step > kMostResidues) return std::nullopt;
  return residues;
}

// Window and residues, if the node is a union of both, or a builder that means both.
std::optional<std::pair<Window, Residues>> UnionOf(const patterns::Node& node) {
  if (node.builder == "strided") {
    const int64_t step = std::get<int64_t>(node.values[0]);
    if (step < 2 || step > kMostResidues) return std::nullopt;
    return std::pair{Window{step - 1, 0}, Residues{step, softmax::kUnlimited}};
  }
  if (node.builder != "|") return std::nullopt;
  const auto& sides = std::get<std::vector<Pattern>>(node.values[0]);
  for (const size_t first : {0, 1}) {
    const auto window = WindowOf(*sides[first].node());
    const auto residues = ResiduesOf(*sides[1 - first].node());
    if (window && residues) return std::pair{*window, *residues};
  }
  return std::nullopt;
}

// True if an option depends on a pair's own position, or on neighbours that are not of its residue, or requires the
// bits of decoding. The path is chosen by options only, so that it never depends on sizes or data.
bool NeedsTiles(const Options& options) {
  const auto needs = [&](const OptionRow& row) { return !row.Is(kAnyResidue) && IsGiven(row, options); };
  return std::ranges::any_of(kOptionRows, needs);
}

int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// Counts the numbers r, r + step, r + 2 step, ... below `end`.
int64_t CountBelow(int64_t end, int64_t r, int64_t step) {
  return std::max<int64_t>(FloorDivide(end - r + step - 1, step), 0);
}

// Takes every step-th row from this one on, as "batch entries" that begin one row apart.
void TakeEvery(int64_t step, int64_t batch, int64_t token, DType dtype, Rows* rows) {
  const int64_t first = batch * rows->batch_stride + token * rows->token_stride;
  if (rows->data != nullptr) {
    rows->data = static_cast<const char*>(rows->data) + first * static_cast<int64_t>(SizeOf(dtype));
  }
  rows->batch_stride = rows->token_stride;
  rows->token_stride *= step;
}

// Divides a sequence of the call into one sequence per residue.
Subproblem ResiduesOfSequence(const Problem& whole, const softmax::Gradients& gradients, const Sequence& s,
                              const Layer& layer) {
  const int64_t step = layer.step;
  const int64_t first_residue = s.start - FloorDivide(s.start, step) * step;
  Subproblem subproblem = {whole, gradients};
  Problem& p = subproblem.problem;
  const DType computed = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const DType of_o = p.wide_outputs ? computed : p.dtype, of_gradients = gradients.wide ? computed : p.dtype;
  const auto of_rows = [&](Rows* rows, DType dtype) { TakeEvery(step, s.batch, s.first_q, dtype, rows); };
  const auto of_keys = [&](Rows* rows, DType dtype) {
    TakeEvery(step, s.batch, s.first_k + first_residue, dtype, rows);
  };
  of_rows(&p.q, p.dtype);
  of_rows(&p.o, of_o);
  of_rows(&p.lse, computed);
  of_rows(&subproblem.gradients.d_o, p.dtype);
  of_rows(&subproblem.gradients.d_lse, computed);
  of_rows(&subproblem.gradients.dq, of_gradients);
  of_keys(&p.k, p.dtype);
  of_keys(&p.v, p.dtype);
  of_keys(&subproblem.gradients.dk, of_gradients);
  of_keys(&subproblem.gradients.dv, of_gradients);
  p.window_left = layer.left;
  p.window_right = layer.right;
  p.causal = p.causal && layer.shift == 0;  // otherwise the window ends before the row, or the layer does not exist
  p.sequences.clear();
  for (int64_t row = 0; row < step; ++row) {
    const int64_t r = (first_residue + row) % step;
    Sequence own;
    own.batch = row;
    own.first_k = first_residue + row < step ? 0 : -1;  // -1: the residue has wrapped around
    own.num_queries = CountBelow(s.num_queries, row, step);
    own.query_end = CountBelow(s.query_end, row, step);
    own.num_keys = CountBelow(s.num_keys, r, step);
    own.key_begin = CountBelow(s.key_begin, r, step);
    own.key_end = std::max(CountBelow(s.key_end, r, step), own.key_begin);
    own.prefix_end = own.sink_end = own.key_begin;
    own.start = FloorDivide(s.start + row, step) + layer.shift;
    p.sequences.push_back(own);
  }
  return subproblem;
}

}  // namespace

std::vector<Layer> LayersOf(const Problem& p, const Options& options) {
  const Layer tiles = {Layer::kTiles};
  if (!options.pattern.present() || p.sequences.empty() || p.device.type != DeviceType::kCpu) return {tiles};
  const patterns::Node& node = *options.pattern.node();
  Options others = options;
  if (node.builder == "row_blocks") others.invariant = false;  // results are bitwise equal with or without tiles
  if (NeedsTiles(others)) return {tiles};
  if (node.builder == "keys") return {{Layer::kRows}};
  if (node.builder == "row_blocks") return {{Layer::kTileRows}};
  if (const auto alone = ResiduesOf(node)) {
    return {{Layer::kResidues, alone->step, 0, alone->reach, alone->reach}};
  }
  const auto both = UnionOf(node);
  if (!both) return {tiles};
  const auto& [window, residues] = *both;
  std::vector<Layer> layers = {{Layer::kWindow, 1, 0, window.left, window.right}};
  // Multiples of the step inside the window belong to the window. Multiples before the window end `before` steps before
  // a row.
  const int64_t before = window.left / residues.step + 1, after = window.right / residues.step + 1;
  const auto less = [&](int64_t steps) {
    return residues.reach == softmax::kUnlimited ? residues.reach : residues.reach - steps;
  };
  if (less(before) >= 0) layers.push_back({Layer::kResidues, residues.step, -before, less(before), 0});
  if (less(after) >= 0 && !p.causal) layers.push_back({Layer::kResidues, residues.step, after, 0, less(after)});
  return layers;
}

std::vector<Subproblem> SubproblemsOf(const char* op, Problem whole, const Options& options, const Layer& layer,
                                      const softmax::Gradients& gradients) {
  std::vector<Subproblem> subproblems;
  switch (layer.kind) {
    case Layer::kTiles: PlacePattern(op, options.pattern, /*to_lengths=*/false, &whole); break;
    case Layer::kWindow:
      whole.window_left = layer.left;
      whole.window_right = layer.right;
      for (Sequence& s : whole.sequences) s.sink_end = s.key_begin;
      break;
    case Layer::kTileRows: PlaceTileRows(op, options.pattern, &whole); break;
    case Layer::kRows: return ProblemsOfRows(std::move(whole), options.pattern, gradients);
    case Layer::kResidues:
      for (const Sequence& s : whole.sequences) subproblems.push_back(ResiduesOfSequence(whole, gradients, s, layer));
      return subproblems;
  }
  subproblems.push_back({std::move(whole), gradients});
  return subproblems;
}

}  // namespace heed::attention
