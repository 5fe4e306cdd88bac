// The list of kernels, the choice from it, and the reasons for which several of them decline a problem.
#include "heed/engines/softmax/kernels.h"

#include <algorithm>
#include <string>

#include "heed/core/os.h"
#include "heed/engines/softmax/forward/forward.h"

namespace heed::softmax {

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

std::string DeclinesDigits(const Problem& problem) {
  if (!problem.quantized) return DeclinesAllButInt8(problem);
  if (problem.depth <= kMostByteChannels) return "";
  return "takes up to " + std::to_string(kMostByteChannels) + " channels, not " + std::to_string(problem.depth);
}

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

std::string PairTarget(const Context&) { return "AVX3_ZEN4"; }
std::string AmxTarget(const Context&) { return "tiles"; }

const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem, Pass pass) {
  static constexpr const Kernel* kKernels[] = {&kWgmma,           &kCuda,       &kAmx,         &kDecodeInt8Amx,
                                               &kDecodeInt8Bytes, &kDecodeInt8, &kDecodePairs, &kPairs,
                                               &kDecodeF32,       &kDecodeF64,  &kLanesF32,    &kLanesF64};
  return engine::Choose(kKernels, op, ctx, problem, pass);
}

}  // namespace heed::softmax
