// Which SIMD targets heed compiles, chosen once. Include before any Highway
// header.
//
// Each target multiplies compile time and size, so one is kept where it changes
// the instructions that f32 and f64 kernels use:
//   SSE2       every x86-64; also what is left on NEON-less or unknown machines
//              through Highway's own baseline
//   AVX2       the common denominator of the last decade, with FMA
//   AVX3       AVX-512: 32 registers, lane masks, scalef
// Left out: SSSE3 and SSE4 (no FMA either, a few percent over SSE2), AVX3_DL,
// AVX3_ZEN4 and AVX3_SPR (AVX-512 plus 16-bit arithmetic), AVX10.2; SVE and RVV,
// whose vectors cannot stand in arrays.
//
// A file that defines HEED_BF16_PAIRS is compiled for AVX3_ZEN4 besides the
// baseline: AMD CPUs with a bf16 dot product, which do twice the flops of FMA in
// it. Intel's do half of them (107 against 217 GFLOP/s on Sapphire Rapids), and
// Highway does not give them this target.
//
// One that defines HEED_BYTE_PRODUCTS, for AVX3_DL: CPUs, Intel's since Ice Lake and
// AMD's since Zen 4, that multiply and add up four bytes at once.
//
// One that defines HEED_AMX, for AVX3_SPR, which every CPU with matrix tiles has,
// and for AVX2, where the same is emulated for tests (simd/amx.h).
//
// HEED_ONLY_TARGETS are the targets that such a file is for: the baseline, of which Highway cannot
// be rid, has no code there.
#ifndef HEED_CORE_TARGETS_H_
#define HEED_CORE_TARGETS_H_

#ifdef HEED_BF16_PAIRS
#define HEED_ONLY_TARGETS HWY_AVX3_ZEN4
#define HWY_DISABLED_TARGETS                                                                                    \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL | HWY_AVX3_SPR | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | \
   HWY_SVE2_128 | HWY_RVV)
#elif defined(HEED_BYTE_PRODUCTS)
#define HWY_WANT_AVX3_DL
#define HEED_ONLY_TARGETS HWY_AVX3_DL
#define HWY_DISABLED_TARGETS                                                                                      \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX2 | HWY_AVX3 | HWY_AVX3_ZEN4 | HWY_AVX3_SPR | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | \
   HWY_SVE2_128 | HWY_RVV)
#elif defined(HEED_AMX)
#define HEED_ONLY_TARGETS (HWY_AVX3_SPR | HWY_AVX2)
#define HWY_DISABLED_TARGETS                                                                                         \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | \
   HWY_RVV)
#elif !defined(HEED_ALL_TARGETS)
#define HWY_DISABLED_TARGETS                                                                              \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | \
   HWY_SVE2_128 | HWY_RVV)
#else
// All that is attainable, for tests. gcc before 14 miscompiles some 16-bit
// operations of the portable target, which no kernel uses; without it Highway
// would fall back to one that has vectors of a single lane.
#define HWY_BROKEN_EMU128 0
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

// AVX2 alone, for sanitizers, which take tens of minutes for each target; with it as the compiler's own,
// so that there is no baseline below.
#ifdef HEED_ONE_TARGET
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#endif

#endif  // HEED_CORE_TARGETS_H_
