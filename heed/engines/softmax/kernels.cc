// The list of kernels and the choice from it: the entries of all kernels of CPUs, and why they decline problems.
#include "heed/engines/softmax/kernels.h"

#include <algorithm>
#include <string>

#include "heed/core/os.h"
#include "heed/engines/softmax/forward/forward.h"

namespace heed::softmax {
namespace {

// These functions return why kernels decline a problem, given the passes that this CPU has; empty if they do not.

std::string DeclinesF64(const Context&, const Problem& problem) { return engine::DeclinesAllButF64(problem.dtype); }

std::string DeclinesF32(const Context&, const Problem& problem) {
  if (problem.quantized) return "computes no int8 keys";
  return engine::DeclinesAllButF32(problem.dtype);
}

std::string DeclinesPairs(const Passes& passes, const Problem& problem) {
  if (problem.dtype != DType::kBF16) return engine::DeclinesAllButBF16(problem.dtype);
  if (problem.quantized) return "computes no int8 keys";
  return passes.forward != nullptr ? "" : "needs a CPU whose bf16 dot product is faster than its FMA";
}

std::string DeclinesAllButInt8(const Problem& problem) {
  return problem.quantized ? "" : "computes int8 keys and values";
}

// Sums of integer products of bytes must fit 32 bits.
std::string DeclinesDigits(const Problem& problem) {
  if (!problem.quantized) return DeclinesAllButInt8(problem);
  if (problem.depth <= kMostByteChannels) return "";
  return "takes up to " + std::to_string(kMostByteChannels) + " channels, not " + std::to_string(problem.depth);
}

// `most` is the most rows of a decode kernel.
std::string DeclinesRows(const Problem& problem, int64_t most) {
  int64_t rows = 0;
  for (const Sequence& s : problem.sequences) rows = std::max(rows, s.num_queries * problem.group());
  if (rows > 0 && rows <= most) return "";
  return "takes 1 to " + std::to_string(most) + " rows per key head, not " + std::to_string(rows);
}

std::string DeclinesWithoutAmx(const Passes& passes) {
  if (passes.forward != nullptr) return "";
  return "needs AMX: " + (os::HasAmx() ? "isa does not allow it" : os::WhyNoAmx());
}

std::string AmxTarget(const Context&) { return "tiles"; }

}  // namespace

std::string PairTarget(const Context&) {
#if defined(__aarch64__)
  return "NEON_BF16";
#else
  return "AVX3_ZEN4";
#endif
}

std::string ByteTarget(const Context&) {
#if defined(__aarch64__)
  return "NEON_DOTPROD";
#else
  return "AVX3_DL";
#endif
}

const Kernel kAmx = {{
                         .name = "softmax_tiles",
                         .why = "AMX products of bf16, query rows in lanes; f32 as splits of three, f16 of two",
                         .declines = [](const Context& ctx, const Problem& p) -> std::string {
                           const std::string reason = DeclinesF32(ctx, p);
                           if (!reason.empty()) return reason;
                           if (p.invariant) return "adds up otherwise than the kernels that caches take";
                           return DeclinesWithoutAmx(ForwardAmx(ctx));
                         },
                         .forward_passes = &ForwardAmx,
                         .backward_passes = &BackwardAmx,
                         .target = &AmxTarget,
                     },
                     kAmxGrid,
                     /*invariant=*/false};

const Kernel kDecodeInt8Amx = {{
    .name = "softmax_decode_int8_tiles",
    .why = "16 query rows per key head at once, queries and weights in fixed point, integer products with AMX, "
           "a factor per row of logits and weights",
    .declines = [](const Context& ctx, const Problem& p) -> std::string {
      const std::string reason = DeclinesDigits(p);
      if (!reason.empty()) return reason;
      if (p.group() < kFewestAmxHeads) {
        return "gains from " + std::to_string(kFewestAmxHeads) + " query heads per key head on";
      }
      return DeclinesWithoutAmx(DecodeInt8Amx(ctx));
    },
    .forward_passes = &DecodeInt8Amx,
    .target = &AmxTarget,
}};

const Kernel kDecodeInt8Bytes = {{
    .name = "softmax_decode_int8_bytes",
    .why = "8 query rows per key head at once, queries in fixed point, integer products of keys, a factor per row of "
           "logits and weights",
    .declines = [](const Context& ctx, const Problem& p) -> std::string {
      const std::string reason = DeclinesDigits(p);
      if (!reason.empty()) return reason;
      return DecodeInt8Bytes(ctx).forward != nullptr ? "" : "needs a CPU that multiplies bytes";
    },
    .forward_passes = &DecodeInt8Bytes,
    .target = &ByteTarget,
}};

const Kernel kDecodeInt8 = {{
    .name = "softmax_decode_int8",
    .why = "8 query rows per key head at once, keys and values widened as they are read, a factor per row of logits "
           "and weights",
    .declines = [](const Context&, const Problem& p) { return DeclinesAllButInt8(p); },
    .forward_passes = &DecodeInt8,
}};

const Kernel kDecodePairs = {
    {
        .name = "softmax_decode_pairs_bf16",
        .why =
            "up to 8 query rows per key head, one pass over the keys and values as they are stored, bf16 dot products "
            "of pairs",
        .declines =
            [](const Context& ctx, const Problem& p) {
              const std::string reason = DeclinesPairs(DecodePairs(ctx), p);
              return reason.empty() ? DeclinesRows(p, DecodePairs(ctx).lanes(p)) : reason;
            },
        .forward_passes = &DecodePairs,
        .target = &PairTarget,
    },
    kPairGrid};

const Kernel kPairs = {
    {
        .name = "softmax_pairs_bf16",
        .why = "bf16 dot products of pairs, query rows in lanes, online softmax over tiles of 128 keys",
        .declines = [](const Context& ctx, const Problem& p) { return DeclinesPairs(ForwardPairs(ctx), p); },
        .forward_passes = &ForwardPairs,
        .backward_passes = &BackwardPairs,
        .target = &PairTarget,
    },
    kPairGrid};

const Kernel kDecodeF32 = {{
    .name = "softmax_decode_f32",
    .why = "up to 8 query rows per key head, one pass over the keys and values as they are stored",
    .declines =
        [](const Context& ctx, const Problem& p) {
          const std::string reason = DeclinesF32(ctx, p);
          return reason.empty() ? DeclinesRows(p, DecodeF32(ctx).lanes(p)) : reason;
        },
    .forward_passes = &DecodeF32,
}};

const Kernel kDecodeF64 = {{
    .name = "softmax_decode_f64",
    .why = "up to 8 query rows per key head, one pass over the keys and values as they are stored",
    .declines =
        [](const Context& ctx, const Problem& p) {
          const std::string reason = DeclinesF64(ctx, p);
          return reason.empty() ? DeclinesRows(p, DecodeF64(ctx).lanes(p)) : reason;
        },
    .forward_passes = &DecodeF64,
}};

const Kernel kLanesF32 = {{
    .name = "softmax_lanes_f32",
    .why = "query rows in lanes, online softmax over tiles of 64 keys, 16-bit tensors widened",
    .declines = &DeclinesF32,
    .forward_passes = &ForwardF32,
    .backward_passes = &BackwardF32,
}};

const Kernel kLanesF64 = {{
    .name = "softmax_lanes_f64",
    .why = "query rows in lanes, online softmax over tiles of 64 keys",
    .declines = &DeclinesF64,
    .forward_passes = &ForwardF64,
    .backward_passes = &BackwardF64,
}};

const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem, Pass pass) {
  static constexpr const Kernel* kKernels[] = {&kWgmma,           &kCuda,       &kAmx,         &kDecodeInt8Amx,
                                               &kDecodeInt8Bytes, &kDecodeInt8, &kDecodePairs, &kPairs,
                                               &kDecodeF32,       &kDecodeF64,  &kLanesF32,    &kLanesF64};
  return engine::Choose(kKernels, op, ctx, problem, pass);
}

}  // namespace heed::softmax
