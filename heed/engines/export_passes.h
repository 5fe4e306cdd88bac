// HEED_EXPORT(Type, F), for files that are compiled once per SIMD target, defines a function Type F(const Context&
// ctx). It returns the result of HWY_NAMESPACE::F() for the best target that `ctx` allows. In a file with
// HEED_ONLY_TARGETS it returns an empty Type if this build or CPU has none of these targets or `ctx` forbids them, but
// emulated products (HEED_EMULATE_BFMMLA) are always there.
//
// Include this file after foreach_target.h, which defines the targets.
#ifndef HEED_ENGINES_EXPORT_PASSES_H_
#define HEED_ENGINES_EXPORT_PASSES_H_

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#if !defined(HEED_ONLY_TARGETS) || (HWY_TARGETS & HEED_ONLY_TARGETS)
#include "hwy/highway.h"
#endif

#if !defined(HEED_ONLY_TARGETS)
#define HEED_EXPORT(Type, F) \
  HWY_EXPORT(F);             \
  Type F(const Context& ctx) { return HWY_DISPATCH_TABLE(F)[TargetIndex(ctx.allowed_targets())](); }
#elif (HWY_TARGETS & HEED_ONLY_TARGETS) != HEED_ONLY_TARGETS
#define HEED_EXPORT(Type, F) \
  Type F(const Context&) { return {}; }
#elif defined(HEED_BF16_PAIRS) && defined(HEED_EMULATE_BFMMLA)
#define HEED_EXPORT(Type, F) \
  Type F(const Context&) { return HEED_PAIR_NAMESPACE::F(); }
#elif defined(HEED_BF16_PAIRS)
#define HEED_EXPORT(Type, F) \
  Type F(const Context& ctx) { return HasBF16Pairs(ctx.allowed_targets()) ? HEED_PAIR_NAMESPACE::F() : Type{}; }
#elif defined(HEED_BYTE_PRODUCTS) && defined(__aarch64__)
#define HEED_EXPORT(Type, F) \
  Type F(const Context& ctx) { return HasByteProducts(ctx.allowed_targets()) ? N_NEON::F() : Type{}; }
#elif defined(HEED_BYTE_PRODUCTS)
#define HEED_EXPORT(Type, F) \
  Type F(const Context& ctx) { return HasByteProducts(ctx.allowed_targets()) ? N_AVX3_DL::F() : Type{}; }
#elif defined(HEED_AMX) && defined(HEED_NATIVE_TARGET)
#define HEED_EXPORT(Type, F) \
  Type F(const Context& ctx) { return AmxOf(ctx.allowed_targets()) == AmxUnit::kHardware ? N_AVX3_SPR::F() : Type{}; }
#elif defined(HEED_AMX)
#define HEED_EXPORT(Type, F)                                      \
  Type F(const Context& ctx) {                                    \
    const AmxUnit unit = AmxOf(ctx.allowed_targets());            \
    if (unit == AmxUnit::kEmulated) return N_AVX2::F();           \
    return unit == AmxUnit::kHardware ? N_AVX3_SPR::F() : Type{}; \
  }
#endif

#endif  // HEED_ENGINES_EXPORT_PASSES_H_
