// The probe of AMX.
#include <algorithm>
#include <cstdint>

#include "heed/core/os.h"
#include "heed/harness/buffer.h"
#include "heed/harness/probe.h"
#include "heed/simd/amx.h"

namespace heed::probe {
namespace {

// Four sums from two operands each, as in the kernels.
void Multiply(int64_t iterations, const void* factors, void* sums) {
#if HEED_HAVE_AMX
  const AmxTiles::Session session;
  const char* at = static_cast<const char*>(factors);
  AmxTiles::Load<4>(at, 64);
  AmxTiles::Load<5>(at + kTileBytes, 64);
  AmxTiles::Load<6>(at + 2 * kTileBytes, 64);
  AmxTiles::Load<7>(at + 3 * kTileBytes, 64);
  AmxTiles::Zero<0>();
  AmxTiles::Zero<1>();
  AmxTiles::Zero<2>();
  AmxTiles::Zero<3>();
  for (int64_t i = 0; i < iterations; ++i) {
    AmxTiles::AddProducts<0, 4, 6>();
    AmxTiles::AddProducts<1, 4, 7>();
    AmxTiles::AddProducts<2, 5, 6>();
    AmxTiles::AddProducts<3, 5, 7>();
  }
  AmxTiles::Store<0>(sums, 64);  // so that all products are computed
#else
  (void)iterations, (void)factors, (void)sums;
#endif
}

}  // namespace

double AmxFlopsPerSecond(int repeats) {
  if (!os::HasAmx()) return 0;
  // Uses random numbers, and runs long enough for the clock to drop: with zeros, or in less than 10 ms, the figure is a
  // quarter too high.
  const Buffer factors(DType::kBF16, {4, kTileBytes / 2}, Placement::kAligned);
  factors.FillNormal(1);
  const Buffer sums(DType::kF32, {16, 16}, Placement::kAligned);
  constexpr int64_t kIterations = 200'000;
  constexpr double kFlops = 4.0 * 2 * 16 * 16 * 32;
  Multiply(2 * kIterations, factors.view().data(), sums.view().data());
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const double start = os::ThreadCpuSeconds();
    Multiply(kIterations, factors.view().data(), sums.view().data());
    best = std::max(best, kFlops * static_cast<double>(kIterations) / (os::ThreadCpuSeconds() - start));
  }
  return best;
}

}  // namespace heed::probe
