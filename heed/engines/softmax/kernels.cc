// The list of kernels and the choice from it.
#include "heed/engines/softmax/kernels.h"

#include <algorithm>
#include <string>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/forward.h"

namespace heed::softmax {
namespace {

std::string Declines(const Problem& problem, const char* computes) {
  return std::string("computes ") + computes + ", not " + Name(problem.dtype);
}

std::string DeclinesF64(const Context&, const Problem& problem) {
  return problem.dtype == DType::kF64 ? "" : Declines(problem, "f64");
}

std::string DeclinesF32(const Context&, const Problem& problem) {
  if (problem.quantized) return "computes no int8 keys";
  const bool computes = IsFloat(problem.dtype) && problem.dtype != DType::kF64;
  return computes ? "" : Declines(problem, "f32, bf16 and f16");
}

std::string DeclinesPairs(const Context& ctx, const Problem& problem) {
  if (problem.dtype != DType::kBF16) return Declines(problem, "bf16");
  if (problem.quantized) return "computes no int8 keys";
  if (HasForwardBF16Pairs() && HasBF16Pairs(ctx.allowed_targets())) return "";
  return "needs a CPU whose bf16 dot product is faster than its FMA";
}

std::string NeedsTiles(const Context& ctx) {
  if (HasForwardTiles() && TilesOf(ctx.allowed_targets()) != TileUnit::kNone) return "";
  return "needs matrix tiles: " + (os::HasMatrixTiles() ? "isa does not allow them"
                                                        : os::WhyNoMatrixTiles());
}

std::string DeclinesTiles(const Context& ctx, const Problem& problem) {
  if (!IsFloat(problem.dtype) || problem.dtype == DType::kF64) {
    return Declines(problem, "f32, bf16 and f16");
  }
  if (problem.quantized) return "computes no int8 keys";
  if (problem.invariant) return "adds up otherwise than the kernels that caches take";
  return NeedsTiles(ctx);
}

std::string DeclinesInt8(const Context&, const Problem& problem) {
  return problem.quantized ? "" : "computes int8 keys and values";
}

// What integer products cannot add up.
std::string DeclinesDigits(const Context& ctx, const Problem& problem) {
  if (!problem.quantized) return DeclinesInt8(ctx, problem);
  if (problem.depth <= kMostByteChannels) return "";
  return "takes up to " + std::to_string(kMostByteChannels) + " channels, not " +
         std::to_string(problem.depth);
}

std::string DeclinesInt8Tiles(const Context& ctx, const Problem& problem) {
  const std::string reason = DeclinesDigits(ctx, problem);
  if (!reason.empty()) return reason;
  if (problem.group() < kFewestTileHeads) {
    return "gains from " + std::to_string(kFewestTileHeads) + " query heads per key head on";
  }
  return NeedsTiles(ctx);
}

std::string DeclinesInt8Bytes(const Context& ctx, const Problem& problem) {
  const std::string reason = DeclinesDigits(ctx, problem);
  if (!reason.empty()) return reason;
  if (HasDecodeInt8Bytes() && HasByteProducts(ctx.allowed_targets())) return "";
  return "needs a CPU that multiplies bytes";
}

// Why decoding declines a problem that it could compute.
std::string DeclinesRows(const Problem& problem, int64_t most) {
  int64_t rows = 0;
  for (const Sequence& s : problem.sequences) {
    rows = std::max(rows, s.num_queries * problem.group());
  }
  if (rows > 0 && rows <= most) return "";
  return "takes 1 to " + std::to_string(most) + " rows per key head, not " +
         std::to_string(rows);
}

std::string DeclinesDecodeF64(const Context& ctx, const Problem& problem) {
  const std::string reason = DeclinesF64(ctx, problem);
  return reason.empty() ? DeclinesRows(problem, DecodeRowsF64(ctx, problem)) : reason;
}

std::string DeclinesDecodeF32(const Context& ctx, const Problem& problem) {
  const std::string reason = DeclinesF32(ctx, problem);
  return reason.empty() ? DeclinesRows(problem, DecodeRowsF32(ctx, problem)) : reason;
}

std::string DeclinesDecodePairs(const Context& ctx, const Problem& problem) {
  const std::string reason = DeclinesPairs(ctx, problem);
  return reason.empty() ? DeclinesRows(problem, DecodeRowsBF16Pairs(ctx, problem)) : reason;
}

std::string SimdTarget(const Context& ctx) {
  return TargetName(ctx.allowed_targets());
}

std::string PairTarget(const Context&) { return "AVX3_ZEN4"; }

std::string ByteTarget(const Context&) { return "AVX3_DL"; }

std::string MatrixTarget(const Context&) { return "tiles"; }

constexpr Kernel kKernels[] = {
    {"softmax_tiles", &DeclinesTiles, &ForwardWorkspaceTiles, &ForwardLanesTiles, kMatrixGrid,
     &MatrixTarget, &ForwardTiles, /*invariant=*/false,
     "matrix tiles of bf16, query rows in lanes; f32 as sums of three, f16 of two",
     &BackwardTiles, &BackwardWorkspaceTiles},
    {"softmax_decode_int8_tiles", &DeclinesInt8Tiles, &DecodeWorkspaceInt8Tiles,
     &DecodeRowsInt8Tiles, {}, &MatrixTarget, &DecodeInt8Tiles, /*invariant=*/true,
     "16 query rows per key head at once, queries and weights in fixed point, integer "
     "products in matrix tiles, a factor per row of logits and weights",
     nullptr, nullptr},
    {"softmax_decode_int8_bytes", &DeclinesInt8Bytes, &DecodeWorkspaceInt8Bytes,
     &DecodeRowsInt8Bytes, {}, &ByteTarget, &DecodeInt8Bytes, /*invariant=*/true,
     "8 query rows per key head at once, queries in fixed point, integer products of "
     "keys, a factor per row of logits and weights",
     nullptr, nullptr},
    {"softmax_decode_int8", &DeclinesInt8, &DecodeWorkspaceInt8, &DecodeRowsInt8,
     {}, &SimdTarget, &DecodeInt8, /*invariant=*/true,
     "8 query rows per key head at once, keys and values widened as they are read, a "
     "factor per row of logits and weights",
     nullptr, nullptr},
    {"softmax_decode_pairs_bf16", &DeclinesDecodePairs, &DecodeWorkspaceBF16Pairs,
     &DecodeRowsBF16Pairs, kPairGrid, &PairTarget, &DecodeBF16Pairs, /*invariant=*/true,
     "up to 8 query rows per key head, one pass over the keys and values as they are "
     "stored, bf16 dot products of pairs",
     nullptr, nullptr},
    {"softmax_pairs_bf16", &DeclinesPairs, &ForwardWorkspaceBF16Pairs,
     &ForwardLanesBF16Pairs, kPairGrid, &PairTarget, &ForwardBF16Pairs,
     /*invariant=*/true,
     "bf16 dot products of pairs, query rows in lanes, online softmax over tiles of "
     "128 keys",
     &BackwardBF16Pairs, &BackwardWorkspaceBF16Pairs},
    {"softmax_decode_f32", &DeclinesDecodeF32, &DecodeWorkspaceF32, &DecodeRowsF32,
     {}, &SimdTarget, &DecodeF32, /*invariant=*/true,
     "up to 8 query rows per key head, one pass over the keys and values as they are "
     "stored",
     nullptr, nullptr},
    {"softmax_decode_f64", &DeclinesDecodeF64, &DecodeWorkspaceF64, &DecodeRowsF64,
     {}, &SimdTarget, &DecodeF64, /*invariant=*/true,
     "up to 8 query rows per key head, one pass over the keys and values as they are "
     "stored",
     nullptr, nullptr},
    {"softmax_lanes_f32", &DeclinesF32, &ForwardWorkspaceF32, &ForwardLanesF32,
     {}, &SimdTarget, &ForwardF32, /*invariant=*/true,
     "query rows in lanes, online softmax over tiles of 64 keys, 16-bit tensors "
     "widened",
     &BackwardF32, &BackwardWorkspaceF32},
    {"softmax_lanes_f64", &DeclinesF64, &ForwardWorkspaceF64, &ForwardLanesF64,
     {}, &SimdTarget, &ForwardF64, /*invariant=*/true,
     "query rows in lanes, online softmax over tiles of 64 keys", &BackwardF64,
     &BackwardWorkspaceF64},
};

}  // namespace

const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem,
                     Pass pass) {
  std::string reasons;
  for (const Kernel& kernel : kKernels) {
    const bool has_pass = pass == Pass::kForward || kernel.backward != nullptr;
    const std::string reason =
        has_pass ? kernel.declines(ctx, problem) : "has no backward pass";
    if (reason.empty()) return kernel;
    reasons += std::string(reasons.empty() ? "" : "; ") + kernel.name + " " + reason;
  }
  throw Unsupported(std::string(op) + ": no kernel for this problem: " + reasons);
}

}  // namespace heed::softmax
