// The list of kernels of the softmax engine, best first. Dispatch, Explain and Workspace read this one list.
#ifndef HEED_ENGINES_SOFTMAX_KERNELS_H_
#define HEED_ENGINES_SOFTMAX_KERNELS_H_

#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/engines/kernel_list.h"
#include "heed/engines/softmax/backward/backward.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"

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

// kernels.cc defines the kernels of CPUs, cuda/kernels.cc those of GPUs.
extern const Kernel kWgmma, kCuda, kAmx, kDecodeInt8Amx, kDecodeInt8Bytes, kDecodeInt8, kDecodePairs, kPairs,
    kDecodeF32, kDecodeF64, kLanesF32, kLanesF64;

// The passes of CPUs, each from a compile unit of its own (units.cmake, amx/).
Passes ForwardAmx(const Context& ctx);
Passes ForwardPairs(const Context& ctx);
Passes ForwardF32(const Context& ctx);
Passes ForwardF64(const Context& ctx);
Passes DecodeInt8Amx(const Context& ctx);
Passes DecodeInt8Bytes(const Context& ctx);
Passes DecodeInt8(const Context& ctx);
Passes DecodePairs(const Context& ctx);
Passes DecodeF32(const Context& ctx);
Passes DecodeF64(const Context& ctx);
Passes BackwardAmx(const Context& ctx);
Passes BackwardPairs(const Context& ctx);
Passes BackwardF32(const Context& ctx);
Passes BackwardF64(const Context& ctx);

// The target of kernels with bf16 dot products.
std::string PairTarget(const Context& ctx);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_KERNELS_H_
