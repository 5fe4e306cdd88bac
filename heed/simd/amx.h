// Matrix tiles (Intel AMX): eight registers of 16 rows of 64 bytes, and products of
// them. The instructions that heed uses, one function each.
//
// A tile is 16 rows of 16 words. A word is one number of a sum, or two bf16 of a factor:
//
//   sum[m][n] += sum_k a[m][k] b[k][n] over 32 values of k
//     a  rows m of 32 bf16
//     b  rows of 16 words, row k / 2 holding the pairs (k, k + 1) of each column n
//
// Per element the even and the odd k are one chain of fused products each, from zero;
// the two are added, then their sum to what was there. All rounds to nearest even,
// whatever the floating-point environment says, and subnormal inputs and results count
// as 0. Zeros of a or b are thus no-ops, wherever they stand.
//
// Or a word is four signed bytes of a factor and an integer of 32 bits of a sum, over 64 values of
// k; row k / 4 of b holds four of each column.
//
// Inline assembly, because GCC's intrinsics do not say that a load reads memory. It stays in
// its own order, and with it the order in which a kernel interleaves tiles and vectors.
// Register numbers are literals.
//
// Call only where os::HasAmx(). simd/emulated_amx-inl.h computes the same bits
// anywhere.
#ifndef HEED_SIMD_AMX_H_
#define HEED_SIMD_AMX_H_

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define HEED_HAVE_AMX 1
#else
#define HEED_HAVE_AMX 0
#endif

// On a lambda: products and what stands between them must end up in one function, or sums
// leave their registers.
#if defined(__GNUC__)
#define HEED_INLINE_LAMBDA __attribute__((always_inline))
#else
#define HEED_INLINE_LAMBDA
#endif

namespace heed {

// Words of a row, rows of a tile, values of k in a product.
inline constexpr int kTileRows = 16, kTileWords = 16, kTileDepth = 32;
inline constexpr int64_t kTileBytes = 64 * kTileRows;

#if HEED_HAVE_AMX

struct AmxTiles {
  // While alive, this thread has eight tiles of full size. Other code of the process
  // may use tiles too, and a thread without them saves less when it is switched.
  class Session {
   public:
    Session() {
      struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } const config;
      asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
    }
    ~Session() { asm volatile("tilerelease" : : : "memory"); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <int kTile>
  static inline __attribute__((always_inline)) void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }

  // 16 rows of 64 bytes, `stride` bytes apart.
  template <int kTile>
  static inline __attribute__((always_inline)) void Load(const void* from, ptrdiff_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }

  // Loads what is not read again soon and need not stay in L1.
  template <int kTile>
  static inline __attribute__((always_inline)) void LoadOnce(const void* from, ptrdiff_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kTile>
  static inline __attribute__((always_inline)) void Store(void* to, ptrdiff_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kSum, int kA, int kB>
  static inline __attribute__((always_inline)) void AddProducts() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
  }

  template <int kSum, int kA, int kB>
  static inline __attribute__((always_inline)) void AddByteProducts() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
  }
};

#endif  // HEED_HAVE_AMX

}  // namespace heed

#endif  // HEED_SIMD_AMX_H_
