// Grids of threads on the CPU, for tests of kernels, with the asynchrony and the freedom of order of a GPU.
//
// The threads of a block are fibers. Between barriers they run one after the other, in an order drawn from a seed, with
// one delayed warp, so that a kernel with a missing barrier gives different results under different seeds. A copy lands
// when it is waited for; until then its destination is NaN, as all shared memory is at first. A copy that is not
// aligned never lands. WGMMA likewise is computed when it is waited for, from shared memory at that time, and its sums
// are NaN until then.
#ifndef HEED_TESTS_CUDA_EMULATED_MACHINE_H_
#define HEED_TESTS_CUDA_EMULATED_MACHINE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"

namespace heed::cuda {

struct EmulatedGrid {
  int blocks[3] = {1, 1, 1};
  int threads = kWarp;  // per block, in whole warps
  size_t shared_bytes = 0;
  uint64_t seed = 1;
};

class EmulatedBlock;

class EmulatedMachine {
 public:
  EmulatedMachine(EmulatedBlock& block, int thread) : block_(block), thread_(thread) {}

  int thread() const { return thread_; }
  int num_threads() const;
  int block(int axis) const;
  char* shared() const;

  void Sync();
  bool SyncOr(bool flag);
  bool Any(bool flag);
  float ShuffleXor(float x, int mask) { return Shuffle(x, (thread_ % kWarp) ^ mask); }
  float Shuffle(float x, int lane);

  void CopyAsync(void* to, const void* from, bool exists);
  void CommitCopies();
  template <int kPending>
  void WaitCopies() {
    WaitCopies(kPending);
  }

  template <bool kTransposed>
  void LdMatrix(const void* row, uint32_t (&r)[4]) {
    LdMatrix(kTransposed, row, r);
  }
  template <DType kDType>
  void MmaSync(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4]) {
    MmaSync(kDType, a, b, c);
  }
  void FenceProxyAsync();
  void MbarrierInit(uint64_t* barrier);
  void MbarrierExpectTx(uint64_t* barrier, int bytes);
  void TmaLoad(const TensorMap& map, int channel, int token, int head, int batch, void* to, uint64_t* barrier);
  void MbarrierWait(uint64_t* barrier, int phase);
  template <class... Registers>
  void WgmmaFence(Registers&...) {
    WgmmaFence();
  }
  template <DType kDType, bool kTransposed, int kTiles>
  void Wgmma(const uint32_t (&a)[4], const WgmmaOperand& b, float (&c)[kTiles][4], bool adds) {
    Wgmma({.dtype = kDType,
           .transposed = kTransposed,
           .adds = adds,
           .tiles = kTiles,
           .a = {a[0], a[1], a[2], a[3]},
           .shared_a = {},
           .b = b,
           .c = &c[0][0]});
  }
  template <DType kDType, bool kTransposed, int kTiles>
  void Wgmma(const WgmmaOperand& a, const WgmmaOperand& b, float (&c)[kTiles][4], bool adds) {
    Wgmma({.dtype = kDType,
           .transposed = kTransposed,
           .adds = adds,
           .tiles = kTiles,
           .a = {},
           .shared_a = a,
           .b = b,
           .c = &c[0][0]});
  }
  void WgmmaCommit();
  template <int kPending, class... Sums>
  void WgmmaWait(Sums&...) {
    WgmmaWait(kPending);
  }

  template <DType kDType>
  static uint32_t Pack(float low, float high) {
    return Bits(kDType, low) | static_cast<uint32_t>(Bits(kDType, high)) << 16;
  }
  template <DType kDType>
  static float Widen(uint16_t bits) {
    return kDType == DType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
  }
  static float Exp2(float x);

  // A WGMMA in flight: a thread's part of a, 16 rows by 16, and of b, 16 rows by 8 columns per tile.
  struct PendingWgmma {
    DType dtype;
    bool transposed, adds;
    int tiles;
    uint32_t a[4];
    WgmmaOperand shared_a;  // used instead of a, if present
    WgmmaOperand b;
    float* c;
  };

 private:
  static uint16_t Bits(DType dtype, float x);
  void WaitCopies(int pending);
  void LdMatrix(bool transposed, const void* row, uint32_t* r);
  void MmaSync(DType dtype, const uint32_t* a, const uint32_t* b, float* c);
  void WgmmaFence();
  void Wgmma(const PendingWgmma& product);
  void WgmmaWait(int pending);
  void Land(const PendingWgmma& product);
  // An element of an operand, in its swizzle atoms.
  float ElementOf(DType dtype, const WgmmaOperand& operand, int row, int column) const;
  // Exchanges `bytes` bytes per thread of the warp, by lane. The result is valid until the next call but one.
  const void* Exchange(const void* mine, size_t bytes);

  EmulatedBlock& block_;
  const int thread_;
};

// Runs the kernel on every thread of the grid.
void RunEmulated(const EmulatedGrid& grid, const std::function<void(EmulatedMachine&)>& kernel);

}  // namespace heed::cuda

#endif  // HEED_TESTS_CUDA_EMULATED_MACHINE_H_
