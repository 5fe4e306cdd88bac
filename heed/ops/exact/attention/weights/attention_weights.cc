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
softmax::Problem CheckedWeights(const char* op, const WeightsInputs& in, const Options& options) {
  if (options.cu_seqlens_q.present() || options.cu_seqlens_k.present()) {
    Fail(op, "cu_seqlens_q", "is given", "padded sequences");
  }
  softmax::Problem p = CheckedProblem(op, {in.q, in.k, in.k}, options, {}, Use::kInputs);
  PlacePattern(op, options.pattern, /*to_lengths=*/false, &p);
  p.value_depth = 0;
  p.v = {};
  return p;
}

softmax::GivenLse CheckedLse(const char* op, const WeightsInputs& in) {
  const ConstTensorView& lse = in.lse;
  if (!lse.present()) return {};
  const int64_t shape[] = {in.q.size(0), in.q.size(2), in.q.size(1)};
  if (!IsFloat(lse.dtype())) {
    Fail(op, "lse", std::string("has dtype ") + Name(lse.dtype()), "a float dtype");
  }
  if (!std::equal(lse.sizes().begin(), lse.sizes().end(), std::begin(shape), std::end(shape))) {
    Fail(op, "lse", "has shape " + lse.ShapeString(), ShapeString(shape));
  }
  if (lse.device().type != DeviceType::kCpu) {
    Fail(op, "lse", "is on a device", "the CPU");
  }
  if (lse.num_elements() > 0 && lse.data() == nullptr) {
    Fail(op, "lse", "has no data", "a pointer");
  }
  return {{lse.data(), lse.stride(0), lse.stride(2), lse.stride(1)}, lse.dtype()};
}

std::vector<int64_t> CheckedIndices(const char* op, const char* name, const ConstTensorView& t, int64_t count) {
  std::vector<int64_t> indices(static_cast<size_t>(t.present() ? 0 : count));
  std::iota(indices.begin(), indices.end(), 0);
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
  const softmax::GivenLse lse = CheckedLse(kOp, in);
  const auto rows = CheckedIndices(kOp, "rows", selection.rows, in.q.size(1));
  const auto heads = CheckedIndices(kOp, "heads", selection.heads, in.q.size(2));
  const int64_t shape[] = {in.q.size(0), static_cast<int64_t>(heads.size()), static_cast<int64_t>(rows.size()),
                           in.k.size(1)};
  CheckWritten(kOp, out, shape, in, options, Computed(in));
  RefuseSlowPairs(kOp, ctx, p);
  SumLogDecays(kOp, ctx, &p);
  softmax::RowWeights(ctx, p, lse, rows, heads, Out(out));
}

void Map(Context& ctx, const WeightsInputs& in, const Options& options, Reduce reduce, const TensorView& out) {
  constexpr char kOp[] = "attention::Map";
  const os::ScopedFloatControl float_control;
  softmax::Problem p = CheckedWeights(kOp, in, options);
  const softmax::GivenLse lse = CheckedLse(kOp, in);
  CheckBins(kOp, in, out);
  const int64_t shape[] = {in.q.size(0), in.q.size(2), out.size(2), out.size(3)};
  CheckWritten(kOp, out, shape, in, options, Computed(in));
  RefuseSlowPairs(kOp, ctx, p);
  SumLogDecays(kOp, ctx, &p);
  softmax::PooledWeights(ctx, p, lse, {shape[2], shape[3], reduce == Reduce::kMax}, Out(out));
}

}  // namespace heed::attention
