// Grids of threads on the CPU, for tests of kernels: the collective operations of a GPU, in any order that it allows.
//
// The threads of a block are fibers. Between two synchronisation points they run one after the other, in an order drawn
// from a seed, with one warp delayed, so that a kernel that lacks a barrier gives other results under another seed. A
// copy arrives when it is waited for. Its destination is NaN until then, as all shared memory is at first, and stays
// NaN if the copy is not aligned. WGMMA products are likewise computed when they are waited for, from the content that
// shared memory has then, and their accumulators are NaN until then.
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
  int threads = kWarp;  // per block, whole warps
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
  void LoadMatrices(const void* row, uint32_t (&r)[4]) {
    LoadMatrices(kTransposed, row, r);
  }
  template <DType kDType>
  void Multiply(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4]) {
    Multiply(kDType, a, b, c);
  }
  void PublishShared();
  void InitBarrier(uint64_t* barrier);
  void BeginBulk(uint64_t* barrier, int bytes);
  void CopyBulk(const RowMap& map, int channel, int token, int head, int batch, void* to, uint64_t* barrier);
  void WaitBulk(uint64_t* barrier, int phase);
  template <class... Registers>
  void BeginProducts(Registers&...) {
    BeginProducts();
  }
  template <DType kDType, bool kTransposed, int kTiles>
  void MultiplyGroup(const uint32_t (&a)[4], const GroupOperand& b, float (&c)[kTiles][4], bool adds) {
    MultiplyGroup({.dtype = kDType,
                   .transposed = kTransposed,
                   .adds = adds,
                   .tiles = kTiles,
                   .a = {a[0], a[1], a[2], a[3]},
                   .shared_a = {},
                   .b = b,
                   .c = &c[0][0]});
  }
  template <DType kDType, bool kTransposed, int kTiles>
  void MultiplyGroup(const GroupOperand& a, const GroupOperand& b, float (&c)[kTiles][4], bool adds) {
    MultiplyGroup({.dtype = kDType,
                   .transposed = kTransposed,
                   .adds = adds,
                   .tiles = kTiles,
                   .a = {},
                   .shared_a = a,
                   .b = b,
                   .c = &c[0][0]});
  }
  void CommitProducts();
  template <int kPending, class... Sums>
  void WaitProducts(Sums&...) {
    WaitProducts(kPending);
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

  // A product under way: a thread's part of 16 rows by 16, and of 16 rows by 8 columns per tile.
  struct GroupProduct {
    DType dtype;
    bool transposed, adds;
    int tiles;
    uint32_t a[4];
    GroupOperand shared_a;  // replaces the registers, if present
    GroupOperand b;
    float* c;
  };

 private:
  static uint16_t Bits(DType dtype, float x);
  void WaitCopies(int pending);
  void LoadMatrices(bool transposed, const void* row, uint32_t* r);
  void Multiply(DType dtype, const uint32_t* a, const uint32_t* b, float* c);
  void BeginProducts();
  void MultiplyGroup(const GroupProduct& product);
  void WaitProducts(int pending);
  void Land(const GroupProduct& product);
  // An element of the first 64 columns of an operand, or of those behind them.
  float ElementOf(DType dtype, const GroupOperand& operand, int row, int column) const;
  // The values that all threads of the warp pass, by lane; valid until the next call but one.
  const void* Exchange(const void* mine, size_t bytes);

  EmulatedBlock& block_;
  const int thread_;
};

// Runs the kernel on every thread of the grid.
void RunEmulated(const EmulatedGrid& grid, const std::function<void(EmulatedMachine&)>& kernel);

}  // namespace heed::cuda

#endif  // HEED_TESTS_CUDA_EMULATED_MACHINE_H_
