// Intel AMX: eight tile registers of 16 rows of 64 bytes, and tile products. One function for each instruction that
// heed uses.
//
// A tile is 16 rows of 16 words. A word is an f32 sum, or two bf16 of an operand:
//
//   sum[m][n] += sum_k a[m][k] b[k][n] over 32 values of k
//     a  rows m of 32 bf16
//     b  rows of 16 words, row k / 2 holding the pairs (k, k + 1) of each column n
//
// For each sum, the even and the odd k are one chain of fused products each, from zero; the two chains are added, then
// their sum is added to the old value. Rounding is to nearest even, whatever the floating-point environment, and
// subnormal inputs and results count as 0. Zeros of a or b are therefore no-ops, wherever they are.
//
// For int8, a word is four signed bytes of an operand or a 32-bit integer sum, over 64 values of k; row k / 4 of b
// holds four values of k for each column.
//
// The instructions are inline assembly, because GCC's intrinsics do not say that a load reads memory. volatile keeps
// their order, and with it a kernel's interleaving of tile and vector instructions. Register numbers are literals.
//
// Call only if os::HasAmx(). simd/emulated_amx-inl.h computes the same bits on any CPU.
#ifndef HEED_SIMD_AMX_H_
#define HEED_SIMD_AMX_H_

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define HEED_HAVE_AMX 1
#else
#define HEED_HAVE_AMX 0
#endif

// For lambdas: products and the code between them must be one function, or sums leave their registers.
#if defined(__GNUC__)
#define HEED_INLINE_LAMBDA __attribute__((always_inline))
#else
#define HEED_INLINE_LAMBDA
#endif

namespace heed {

// Rows of a tile, words of a row, and values of k in a bf16 product.
inline constexpr int kTileRows = 16, kTileWords = 16, kTileDepth = 32;
inline constexpr int64_t kTileBytes = 64 * kTileRows;

#if HEED_HAVE_AMX

struct AmxTiles {
  // Configures eight full tiles for this thread while alive. Other code of the process may use AMX too, and a thread
  // without configured tiles is cheaper to switch.
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

  // Loads 16 rows of 64 bytes that are `stride` bytes apart.
  template <int kTile>
  static inline __attribute__((always_inline)) void Load(const void* from, ptrdiff_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }

  // Loads a tile that is not read again soon and need not stay in L1.
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
