// The SIMD targets that heed compiles, chosen once. Include this file before any Highway header.
//
// Each target multiplies compile time and size, so one is kept where it changes the instructions that f32 and f64
// kernels use:
//   SSE2       every x86-64; what is left on unknown machines is Highway's own baseline
//   AVX2       the common denominator of the last decade, with FMA
//   AVX3       AVX-512: 32 registers, lane masks, scalef
//   NEON       every 64-bit ARM, Highway's NEON_WITHOUT_AES: 32 registers, FMA
// Targets left out are SSSE3 and SSE4 (they have no FMA either and gain a few percent over SSE2), AVX3_DL, AVX3_ZEN4
// and AVX3_SPR (AVX-512 plus 16-bit arithmetic), AVX10.2, and SVE and RVV, whose vectors cannot be elements of arrays.
//
// A file that defines HEED_BF16_PAIRS is compiled for AVX3_ZEN4 besides the baseline: AMD CPUs with a bf16 dot product
// have twice the flops of FMA in it. Intel's have half of them (107 against 217 GFLOP/s on Sapphire Rapids), and
// Highway does not give them this target. On ARM it is compiled for CPUs with bf16 products (Neoverse V1 and N2 and
// later), in the place of Highway's target NEON: heed names it NEON_BF16 (simd/pair_products-inl.h).
//
// A file that defines HEED_BYTE_PRODUCTS is compiled for AVX3_DL too: Intel CPUs since Ice Lake and AMD CPUs since Zen
// 4, which have a dot product of four bytes. On ARM it is compiled for CPUs with DotProd (Cortex-A75 and -A76, Neoverse
// N1 and later), as Highway's target NEON, which heed names NEON_DOTPROD (simd/dot_products-inl.h).
//
// A file that defines HEED_AMX is compiled for AVX3_SPR, which every CPU with AMX has, and for AVX2, where AMX
// is emulated for tests (simd/amx.h).
//
// A file that defines HEED_BF16_PAIRS and HEED_EMULATE_BFMMLA is for tests on x86: it emulates ARM's bf16 products
// (simd/emulated_bfmmla-inl.h) and is compiled for SSE4 alone, whose vectors have as many lanes as ARM's. The library
// has no code for SSE4, so that no function of its own has the name of one with emulated products.
//
// HEED_ONLY_TARGETS lists the targets that such a file is for. The baseline, which Highway always compiles, has no code
// in it. HEED_EXTRA_TARGETS lists all targets that only such files have.
//
// CMake's option HEED_TARGETS=native defines HEED_NATIVE_TARGET, the one of SSE2, AVX2 and AVX3 that this machine runs
// best, and HEED_NATIVE_EXTRA, the sum of those of the other targets that it has (0 if it has none). Each file is then
// compiled once. Code outside kernels stays code for every x86-64, so that the library can say on another CPU what it
// lacks. AMX is not emulated.
#ifndef HEED_CORE_TARGETS_H_
#define HEED_CORE_TARGETS_H_

#ifdef HEED_NATIVE_TARGET
#define HEED_EXTRA_TARGETS (HEED_NATIVE_EXTRA)
#elif defined(__aarch64__)
#define HEED_EXTRA_TARGETS (HWY_NEON | HWY_NEON_BF16)
#else
#define HEED_EXTRA_TARGETS (HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#endif

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
#ifdef HEED_NATIVE_TARGET
#define HEED_ONLY_TARGETS HWY_AVX3_SPR
#else
#define HEED_ONLY_TARGETS (HWY_AVX3_SPR | HWY_AVX2)
#endif
#define HWY_DISABLED_TARGETS                                                                                         \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | \
   HWY_RVV)
#elif !defined(HEED_ALL_TARGETS)
#define HWY_DISABLED_TARGETS                                                                              \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | \
   HWY_SVE2_128 | HWY_RVV)
#else
// Tests compile every attainable target. gcc before 14 miscompiles some 16-bit operations of the portable target, which
// no kernel uses; without that target Highway would fall back to one whose vectors have a single lane.
#define HWY_BROKEN_EMU128 0
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

// Sanitizer builds compile AVX2 alone, because each target takes them tens of minutes. AVX2 is also the compiler's own
// target there, so that no lower baseline is compiled.
#ifdef HEED_ONE_TARGET
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#endif

#if defined(__aarch64__)
#undef HWY_DISABLED_TARGETS
#define HWY_BASELINE_TARGETS HWY_NEON_WITHOUT_AES
#if defined(HEED_BYTE_PRODUCTS) || defined(HEED_BF16_PAIRS)
#undef HEED_ONLY_TARGETS
#define HEED_ONLY_TARGETS HWY_NEON
#define HWY_DISABLED_TARGETS (~(HWY_BASELINE_TARGETS | HWY_NEON))
#else
#define HWY_DISABLED_TARGETS (~HWY_BASELINE_TARGETS)
#endif
#endif

#if defined(HEED_BF16_PAIRS) && defined(HEED_EMULATE_BFMMLA)
#undef HEED_ONLY_TARGETS
#define HEED_ONLY_TARGETS HWY_SSE4
#undef HWY_DISABLED_TARGETS
#define HWY_BASELINE_TARGETS HWY_SSE4
#define HWY_DISABLED_TARGETS (~HWY_SSE4)
#endif

// The target whose code has bf16 products, the namespace that Highway gives it, and the targets of CPUs that run it.
// Intel's have the instructions too, if not the speed.
#if defined(HEED_BF16_PAIRS) && defined(HEED_EMULATE_BFMMLA)
#define HEED_PAIR_TARGET HWY_SSE4
#define HEED_PAIR_NAMESPACE N_SSE4
#define HEED_PAIR_CPUS HWY_SSE4
#elif !defined(__aarch64__)
#define HEED_PAIR_TARGET HWY_AVX3_ZEN4
#define HEED_PAIR_NAMESPACE N_AVX3_ZEN4
#define HEED_PAIR_CPUS (HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#elif defined(HEED_BF16_PAIRS)
#define HEED_PAIR_TARGET HWY_NEON
#define HEED_PAIR_NAMESPACE N_NEON
#define HEED_PAIR_CPUS HWY_NEON_BF16
#else
#define HEED_PAIR_TARGET 0
#endif

// Highway's names are defined by headers that follow this one, so these macros may contain them but no #if here may.
#ifdef HEED_NATIVE_TARGET
#ifdef HEED_ONLY_TARGETS
#define HEED_WANTED_TARGETS (HEED_ONLY_TARGETS & HEED_EXTRA_TARGETS)
#else
#define HEED_WANTED_TARGETS 0
#endif
#undef HWY_DISABLED_TARGETS
#define HWY_BASELINE_TARGETS (HEED_WANTED_TARGETS ? HEED_WANTED_TARGETS : HEED_NATIVE_TARGET)
#define HWY_DISABLED_TARGETS (~HWY_BASELINE_TARGETS)
#endif

#endif  // HEED_CORE_TARGETS_H_
