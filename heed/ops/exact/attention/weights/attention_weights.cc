// Weights and Map: check, select, run. No arithmetic.
#include "heed/ops/exact/attention/weights/attention_weights.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/weights/weights.h"
#include "heed/ops/exact/attention/attention_internal.h"

namespace heed::attention {
namespace {

[[noreturn]] void Fail(const char* op, const std::string& name, const std::string& got, const std::string& expected) {
  throw InvalidArgument(std::string(op) + ": " + name + " " + got + ", expected " + expected);
}

// Checks q and k and returns the problem without values.
softmax::Problem CheckedWeights(const char* op, const WeightsInputs& in, const Options& options,
                                bool may_be_packed = false) {
  if (!may_be_packed && (options.cu_seqlens_q.present() || options.cu_seqlens_k.present())) {
    Fail(op, "cu_seqlens_q", "is given", "padded sequences");
  }
  softmax::Problem p = CheckedProblem(op, {in.q, in.k, in.k}, options, {}, Use::kInputs);
  PlacePattern(op, options.pattern, /*to_lengths=*/false, &p);
  p.value_depth = 0;
  p.v = {};
  return p;
}

// Returns the lse of a problem's first sequence, from which others are a stride of the batch away.
softmax::GivenLse CheckedLse(const char* op, const WeightsInputs& in, const softmax::Problem& p) {
  const ConstTensorView& lse = in.lse;
  if (!lse.present()) return {};
  const int rank = in.q.rank();
  std::vector<int64_t> shape = {in.q.size(rank - 2), in.q.size(rank - 3)};
  if (!p.packed) shape.insert(shape.begin(), in.q.size(0));
  if (!IsFloat(lse.dtype())) {
    Fail(op, "lse", std::string("has dtype ") + Name(lse.dtype()), "a float dtype");
  }
  if (!std::ranges::equal(lse.sizes(), shape)) {
    Fail(op, "lse", "has shape " + lse.ShapeString(), ShapeString(shape));
  }
  if (lse.device().type != DeviceType::kCpu) {
    Fail(op, "lse", "is on a device", "the CPU");
  }
  if (lse.num_elements() > 0 && lse.data() == nullptr) {
    Fail(op, "lse", "has no data", "a pointer");
  }
  const int heads = lse.rank() - 2;
  return {{lse.data(), p.packed ? 0 : lse.stride(0), lse.stride(heads + 1), lse.stride(heads)}, lse.dtype()};
}

// Returns the indices in a tensor, or `count` of them where it is absent.
std::vector<int64_t> CheckedIndices(const char* op, const char* name, const ConstTensorView& t, int64_t count,
                                    int64_t first = 0) {
  std::vector<int64_t> indices(static_cast<size_t>(t.present() ? 0 : count));
  std::iota(indices.begin(), indices.end(), first);
  if (!t.present()) return indices;
  if (t.dtype() != DType::kI32 && t.dtype() != DType::kI64) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()), "i32 or i64");
  }
  if (t.rank() != 1) Fail(op, name, "has shape " + t.ShapeString(), "one axis");
  if (t.size(0) > 0 && t.data() == nullptr) Fail(op, name, "has no data", "a pointer");
  for (int64_t i = 0; i < t.size(0); ++i) {
    const int64_t index = LoadAsInt64(t.dtype(), t.data(), i * t.stride(0));
    if (index < 0 || index >= count) {
      Fail(op, name, "contains " + std::to_string(index),
           count == 0 ? "nothing: there is none" : "0 to " + std::to_string(count - 1));
    }
    indices.push_back(index);
  }
  return indices;
}

void CheckWritten(const char* op, const TensorView& out, std::span<const int64_t> shape, const WeightsInputs& in,
                  const Options& options, DType dtype) {
  CheckOutput(op, "out", out, shape, dtype, {in.q, in.k, {}}, options);
  if (Overlap(out, in.lse)) Fail(op, "out", "overlaps lse", "memory of its own");
}

void CheckBins(const char* op, const WeightsInputs& in, const TensorView& out) {
  const auto check = [&](int axis, const char* what, int64_t tokens) {
    const int64_t bins = out.size(axis);
    if (bins > tokens || (bins == 0 && tokens > 0)) {
      Fail(op, "out", "has " + std::to_string(bins) + " " + what, tokens == 0 ? "0" : "1 to " + std::to_string(tokens));
    }
  };
  if (out.rank() != 4) Fail(op, "out", "has shape " + out.ShapeString(), "[B, Hq, r, c]");
  check(2, "rows", in.q.size(1));
  check(3, "columns", in.k.size(1));
  if (in.q.size(1) > std::numeric_limits<int32_t>::max()) {
    Fail(op, "q", "has " + std::to_string(in.q.size(1)) + " queries", "less than 2^31");
  }
}

DType Computed(const WeightsInputs& in) { return in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }

softmax::WeightsOut Out(const TensorView& out) { return {out.data(), out.stride(0), out.stride(1), out.stride(2)}; }

}  // namespace

void Weights(Context& ctx, const WeightsInputs& in, const Options& options, const WeightsSelection& selection,
             const TensorView& out) {
  constexpr char kOp[] = "attention::Weights";
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  softmax::Problem p = CheckedWeights(kOp, in, options);
  const softmax::GivenLse lse = CheckedLse(kOp, in, p);
  const auto rows = CheckedIndices(kOp, "rows", selection.rows, in.q.size(1));
  const auto heads = CheckedIndices(kOp, "heads", selection.heads, in.q.size(2));
  const int64_t shape[] = {in.q.size(0), static_cast<int64_t>(heads.size()), static_cast<int64_t>(rows.size()),
                           in.k.size(1)};
  CheckWritten(kOp, out, shape, in, options, Computed(in));
  RefuseSlowPairs(kOp, ctx, p);
  SumLogDecays(kOp, ctx, &p);
  softmax::RowWeights(ctx, p, lse, rows, heads, Out(out));
}

void TileOfWeights(Context& ctx, const WeightsInputs& in, const Options& options, const Tile& tile,
                   const TensorView& out) {
  constexpr char kOp[] = "attention::TileOfWeights";
  const os::ScopedFloatControl float_control;
  softmax::Problem p = CheckedWeights(kOp, in, options, /*may_be_packed=*/true);
  softmax::GivenLse lse = CheckedLse(kOp, in, p);
  if (tile.sequence < 0 || tile.sequence >= std::ssize(p.sequences)) {
    Fail(kOp, "sequence", "is " + std::to_string(tile.sequence),
         "an index below " + std::to_string(p.sequences.size()));
  }
  const softmax::Sequence sequence = p.sequences[static_cast<size_t>(tile.sequence)];
  if (out.rank() != 3) Fail(kOp, "out", "has shape " + out.ShapeString(), "[heads, rows, keys]");
  const int64_t shape[] = {out.size(0), out.size(1), out.size(2)};
  CheckWritten(kOp, out, shape, in, options, Computed(in));
  const auto check = [&](const char* name, int64_t first, int64_t count, int64_t all) {
    if (first >= 0 && first <= all - count) return;
    Fail(kOp, name, "is " + std::to_string(first) + " of " + std::to_string(count),
         "a place for them among " + std::to_string(all));
  };
  check("first_head", tile.first_head, out.size(0), p.query_heads);
  check("first_row", tile.first_row, out.size(1), sequence.num_queries);
  check("first_key", tile.first_key, out.size(2), sequence.num_keys);
  RefuseSlowPairs(kOp, ctx, p);
  p.sequences = {sequence};  // of which alone decays are summed
  SumLogDecays(kOp, ctx, &p);
  if (lse.rows.data != nullptr) {
    const auto offset = static_cast<size_t>(sequence.first_q * lse.rows.token_stride) * SizeOf(lse.dtype);
    lse.rows.data = static_cast<const char*>(lse.rows.data) + offset;
  }
  const auto rows = CheckedIndices(kOp, "rows", {}, out.size(1), tile.first_row);
  const auto heads = CheckedIndices(kOp, "heads", {}, out.size(0), tile.first_head);
  softmax::RowWeights(ctx, p, lse, rows, heads,
                      {.data = out.data(),
                       .head_stride = out.stride(0),
                       .row_stride = out.stride(1),
                       .first_key = tile.first_key,
                       .end_key = tile.first_key + out.size(2),
                       .dropout = tile.dropout && options.dropout > 0});
}

void Map(Context& ctx, const WeightsInputs& in, const Options& options, Reduce reduce, const TensorView& out) {
  constexpr char kOp[] = "attention::Map";
  const os::ScopedFloatControl float_control;
  softmax::Problem p = CheckedWeights(kOp, in, options);
  const softmax::GivenLse lse = CheckedLse(kOp, in, p);
  CheckBins(kOp, in, out);
  const int64_t shape[] = {in.q.size(0), in.q.size(2), out.size(2), out.size(3)};
  CheckWritten(kOp, out, shape, in, options, Computed(in));
  RefuseSlowPairs(kOp, ctx, p);
  SumLogDecays(kOp, ctx, &p);
  softmax::PooledWeights(ctx, p, lse, {shape[2], shape[3], reduce == Reduce::kMax}, Out(out));
}

}  // namespace heed::attention
