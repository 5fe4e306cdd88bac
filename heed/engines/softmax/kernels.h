// The list of kernels of the softmax engine, best first. Dispatch, Explain and Workspace read this one list.
#ifndef HEED_ENGINES_SOFTMAX_KERNELS_H_
#define HEED_ENGINES_SOFTMAX_KERNELS_H_

#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/engines/kernel_list.h"
#include "heed/engines/softmax/backward/backward.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"

namespace heed::softmax {

using engine::BackwardBytes;
using engine::Pass;
using Passes = engine::Passes<Problem, Gradients>;

struct Kernel : engine::Kernel<Problem, Gradients, std::string> {
  KeyGrid grid = {};      // it determines which pairs are computed
  bool invariant = true;  // the bits do not depend on how queries are split into calls
};

// Returns the first kernel that takes the problem. Throws Unsupported, with every kernel's reason, if none does.
const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem, Pass pass = Pass::kForward);

// Each kernel is defined in the file of its forward pass. Passes that two kernels or another file need are declared
// here on their own.
extern const Kernel kWgmma, kCuda, kAmx, kDecodeInt8Amx, kDecodeInt8Bytes, kDecodeInt8, kDecodePairs, kPairs,
    kDecodeF32, kDecodeF64, kLanesF32, kLanesF64;
Passes BackwardAmx(const Context& ctx);
Passes BackwardPairs(const Context& ctx);
Passes BackwardF32(const Context& ctx);
Passes BackwardF64(const Context& ctx);

// Return why kernels of a dtype decline a problem, given the passes that this CPU has; empty if they do not.
std::string DeclinesF32(const Context& ctx, const Problem& problem);
std::string DeclinesF64(const Context& ctx, const Problem& problem);
std::string DeclinesPairs(const Passes& passes, const Problem& problem);
std::string DeclinesAllButInt8(const Problem& problem);
std::string DeclinesDigits(const Problem& problem);              // whether integer products of bytes fit 32-bit sums
std::string DeclinesRows(const Problem& problem, int64_t most);  // the most rows of a decode kernel
std::string DeclinesWithoutAmx(const Passes& passes);

std::string PairTarget(const Context& ctx);
std::string AmxTarget(const Context& ctx);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_KERNELS_H_
