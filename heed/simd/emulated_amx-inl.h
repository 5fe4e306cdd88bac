// Emulated AMX: the bits of simd/amx.h on any CPU, for tests.
//
// Compiled once per SIMD target.
#if defined(HEED_SIMD_EMULATED_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_EMULATED_AMX_INL_H_
#undef HEED_SIMD_EMULATED_AMX_INL_H_
#else
#define HEED_SIMD_EMULATED_AMX_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/os.h"
#include "heed/simd/amx.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The interface of AmxTiles. The environment, which every task of a Context sets, flushes subnormal results; subnormal
// inputs are flushed here.
struct EmulatedAmxTiles {
  struct Session {
    os::ScopedFloatControl flush;
  };

  template <int kTile>
  static void Zero() {
    ZeroTile(kTile);
  }

  template <int kTile>
  static void Load(const void* from, ptrdiff_t stride) {
    LoadTile(kTile, from, stride);
  }

  template <int kTile>
  static void LoadOnce(const void* from, ptrdiff_t stride) {
    Load<kTile>(from, stride);
  }

  template <int kTile>
  static void Store(void* to, ptrdiff_t stride) {
    StoreTile(kTile, to, stride);
  }

  template <int kSum, int kA, int kB>
  static void AddProducts() {
    AddProductsOf(kSum, kA, kB);
  }

  template <int kSum, int kA, int kB>
  static void AddByteProducts() {
    AddByteProductsOf(kSum, kA, kB);
  }

 private:
  using D = hn::CappedTag<float, kTileWords>;

  // Each instruction is a function call, so that kernels compile quickly.
  static HWY_NOINLINE void ZeroTile(int tile) { std::memset(tiles_[tile], 0, sizeof(tiles_[tile])); }

  static HWY_NOINLINE void LoadTile(int tile, const void* from, ptrdiff_t stride) {
    for (int row = 0; row < kTileRows; ++row) {
      std::memcpy(tiles_[tile][row], static_cast<const char*>(from) + row * stride, 64);
    }
  }

  static HWY_NOINLINE void StoreTile(int tile, void* to, ptrdiff_t stride) {
    for (int row = 0; row < kTileRows; ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, tiles_[tile][row], 64);
    }
  }

  static HWY_NOINLINE HWY_ATTR void AddProductsOf(int to, int of, int by) {
    const D d;
    const hn::RebindToUnsigned<D> words;
    constexpr size_t N = hn::MaxLanes(D());
    for (int m = 0; m < kTileRows; ++m) {
      for (size_t n = 0; n < kTileWords; n += N) {
        auto even = hn::Zero(d), odd = hn::Zero(d);
        for (int k = 0; k < kTileRows; ++k) {
          const auto a = hn::Set(words, tiles_[of][m][k]);
          const auto b = hn::LoadU(words, tiles_[by][k] + n);
          even = hn::MulAdd(Lower(a), Lower(b), even);
          odd = hn::MulAdd(Upper(a), Upper(b), odd);
        }
        float* sum = reinterpret_cast<float*>(tiles_[to][m]) + n;
        hn::StoreU(hn::Add(hn::LoadU(d, sum), hn::Add(even, odd)), d, sum);
      }
    }
  }

  static HWY_NOINLINE void AddByteProductsOf(int to, int of, int by) {
    for (int m = 0; m < kTileRows; ++m) {
      for (int k = 0; k < kTileRows; ++k) {
        const uint32_t a = tiles_[of][m][k];
        for (int n = 0; n < kTileWords; ++n) {
          const uint32_t b = tiles_[by][k][n];
          uint32_t sum = 0;
          for (int byte = 0; byte < 32; byte += 8) {
            sum += static_cast<uint32_t>(static_cast<int8_t>(a >> byte) * static_cast<int8_t>(b >> byte));
          }
          tiles_[to][m][n] += sum;
        }
      }
    }
  }

  template <class Words>
  static HWY_INLINE hn::Vec<D> Lower(Words words) {
    return Flushed(hn::ShiftLeft<16>(words));
  }
  template <class Words>
  static HWY_INLINE hn::Vec<D> Upper(Words words) {
    return Flushed(hn::And(words, hn::Set(hn::RebindToUnsigned<D>(), 0xFFFF0000u)));
  }
  template <class Words>
  static HWY_INLINE hn::Vec<D> Flushed(Words bits) {
    const D d;
    const hn::RebindToUnsigned<D> words;
    const auto exponent = hn::And(bits, hn::Set(words, 0x7F800000u));
    return hn::BitCast(d, hn::IfThenZeroElse(hn::Eq(exponent, hn::Zero(words)), bits));
  }

  static inline thread_local uint32_t tiles_[8][kTileRows][kTileWords];
};

// The AMX of this target, for the targets that files with HEED_AMX are compiled for.
#if HWY_TARGET == HWY_AVX3_SPR
using AmxTilesOfTarget = AmxTiles;
#else
using AmxTilesOfTarget = EmulatedAmxTiles;
#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_EMULATED_AMX_INL_H_
