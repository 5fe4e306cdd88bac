// The limit of WGMMA: back-to-back products on a Hopper GPU's tensor cores.
#include "heed/cuda/hopper_machine.h"
#include "heed/cuda/shared_tile.h"

namespace heed::bench {
namespace {

using Tile = heed::cuda::SharedTile<64, 128>;
constexpr int kThreads = 128, kSteps = 1024, kProducts = 4;  // threads of a warpgroup; steps; products per step

__global__ void __launch_bounds__(kThreads, 2) Products(float* out) {
  __shared__ __align__(1024) char shared[Tile::kBytes];
  heed::cuda::HopperMachine machine(shared);
  const Tile tile(shared);
  for (int i = machine.thread(); i < 64 * 128; i += kThreads) tile.Put(i / 128, i % 128, 0x3F80);  // ones
  machine.FenceProxyAsync();
  machine.Sync();
  uint32_t ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
  float sums[16][4] = {};
  for (int step = 0; step < kSteps; ++step) {
    machine.WgmmaFence(ones, sums);
    HEED_DEVICE_UNROLL
    for (int i = 0; i < kProducts; ++i) machine.Wgmma<DType::kBF16, true>(ones, tile.MnMajor(16 * i), sums, true);
    machine.WgmmaCommit();
    machine.WgmmaWait<0>(sums);
  }
  if (sums[0][0] == 1) *out = sums[0][0];  // never true, which the compiler does not know
}

}  // namespace

const char* LaunchWgmma(int num_sms) {
  Products<<<4 * num_sms, kThreads>>>(nullptr);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
double WgmmaFlops(int num_sms) { return 2.0 * 64 * 128 * 16 * kProducts * kSteps * 4 * num_sms; }

}  // namespace heed::bench
