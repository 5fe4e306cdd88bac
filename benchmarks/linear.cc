// Products of rows with a matrix of weights, compared with the CPU's roofline and with libraries that the build found:
// OpenBLAS and oneDNN, which are measured here and used nowhere else.
//
//   bench_ops --benchmark_filter=^linear/
//
// One thread. If the weights would stay in the caches, each call uses another copy of the matrix. `roof` is the time of
// the flops at the CPU's peak or of reading the weights at its memory bandwidth, whichever is longer, divided by the
// measured time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "heed/harness/buffer.h"
#include "heed/harness/probe.h"
#include "heed/layers/linear.h"

#ifdef HEED_BENCH_OPENBLAS
#include "cblas.h"
extern "C" void openblas_set_num_threads(int threads);
#endif
#ifdef HEED_BENCH_DNNL
#include "dnnl.h"
#endif

namespace heed::bench {
namespace {

struct Problem {
  int64_t rows, inputs, outputs;
};

constexpr Problem kProblems[] = {{1, 384, 1536},    {64, 384, 1536},   {1024, 384, 1536}, {1, 512, 512},
                                 {1024, 512, 512},  {1, 4096, 4096},   {4, 4096, 4096},   {16, 4096, 4096},
                                 {128, 4096, 4096}, {1024, 4096, 4096}};

// Multiplies x by copy i of the weights.
using Multiply = std::function<void(size_t copy, const float* x, float* y)>;

void Measure(benchmark::State& state, const Problem& p, DType dtype, size_t copies, const Multiply& multiply,
             const ConstTensorView& weights) {
  const Buffer x = Buffer(DType::kF32, {p.rows, p.inputs}, Placement::kAligned).FillNormal(1);
  const Buffer y(DType::kF32, {p.rows, p.outputs}, Placement::kAligned), expected(DType::kF64, {1, p.outputs});
  multiply(0, x.as<float>(), y.as<float>());
  layers::Linear::Reference(x.view().Slice(0, p.rows - 1, p.rows), weights, {}, expected.view());
  for (int64_t i = 0; i < p.outputs; ++i) {
    if (std::abs(y.Get({p.rows - 1, i}) - expected.Get({0, i})) > 1e-3 * (1 + std::abs(expected.Get({0, i})))) {
      return state.SkipWithError("disagrees with its reference");
    }
  }
  size_t copy = 0;
  for (auto _ : state) {
    multiply(copy++ % copies, x.as<float>(), y.as<float>());
    benchmark::ClobberMemory();
  }
  static const double peak = probe::PeakFlopsPerSecond(DType::kF32), bandwidth = probe::DramBytesPerSecond();
  const double flops = 2.0 * static_cast<double>(p.rows * p.inputs * p.outputs);
  const double bytes = static_cast<double>(p.inputs * p.outputs) * static_cast<double>(SizeOf(dtype));
  using benchmark::Counter;
  state.counters["FLOP/s"] = Counter(flops, Counter::kIsIterationInvariantRate, Counter::kIs1000);
  state.counters["B/s"] = Counter(bytes, Counter::kIsIterationInvariantRate, Counter::kIs1000);
  state.counters["roof"] = Counter(std::max(flops / peak, bytes / bandwidth), Counter::kIsIterationInvariantRate);
}

// The number of copies of a matrix that exceeds every cache, if a call is bound by reading it.
size_t Copies(const Problem& p, DType dtype) {
  const size_t bytes = static_cast<size_t>(p.inputs * p.outputs) * SizeOf(dtype);
  return p.rows > 32 ? 1 : std::clamp<size_t>((256 << 20) / bytes, 1, 512);
}

void Own(benchmark::State& state, const Problem& p, DType dtype) {
  const Buffer w = Buffer(dtype, {p.outputs, p.inputs}, Placement::kAligned).FillNormal(2);
  std::vector<layers::Linear> copies;
  for (size_t i = 0; i < Copies(p, dtype); ++i) copies.emplace_back(w.view());
  Context ctx(1);
  Measure(
      state, p, dtype, copies.size(),
      [&](size_t copy, const float* x, float* y) { copies[copy].Rows(ctx, x, p.inputs, p.rows, y, p.outputs); },
      w.view());
}

#if defined(HEED_BENCH_OPENBLAS) || defined(HEED_BENCH_DNNL)
// sgemm(x, w, y) with y = x w^T.
template <class Sgemm>
void Library(benchmark::State& state, const Problem& p, const Sgemm& sgemm) {
  std::vector<Buffer> copies;
  for (size_t i = 0; i < Copies(p, DType::kF32); ++i) {
    copies.push_back(Buffer(DType::kF32, {p.outputs, p.inputs}, Placement::kAligned).FillNormal(2));
  }
  Measure(
      state, p, DType::kF32, copies.size(),
      [&](size_t copy, const float* x, float* y) { sgemm(x, copies[copy].as<float>(), y); }, copies[0].view());
}
#endif

const int registered = [] {
  for (const Problem& p : kProblems) {
    const std::string size = std::to_string(p.rows) + "x" + std::to_string(p.inputs) + "x" + std::to_string(p.outputs);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      benchmark::RegisterBenchmark(("linear/heed/" + std::string(Name(dtype)) + "/" + size).c_str(),
                                   [=](benchmark::State& state) { Own(state, p, dtype); });
    }
#ifdef HEED_BENCH_OPENBLAS
    benchmark::RegisterBenchmark(("linear/openblas/f32/" + size).c_str(), [=](benchmark::State& state) {
      openblas_set_num_threads(1);
      Library(state, p, [&](const float* x, const float* w, float* y) {
        const int m = static_cast<int>(p.rows), n = static_cast<int>(p.outputs), k = static_cast<int>(p.inputs);
        if (m == 1) {
          cblas_sgemv(CblasRowMajor, CblasNoTrans, n, k, 1, w, k, x, 1, 0, y, 1);
        } else {
          cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1, x, k, w, k, 0, y, n);
        }
      });
    });
#endif
#ifdef HEED_BENCH_DNNL
    benchmark::RegisterBenchmark(("linear/onednn/f32/" + size).c_str(), [=](benchmark::State& state) {
      Library(state, p, [&](const float* x, const float* w, float* y) {
        dnnl_sgemm('N', 'T', p.rows, p.outputs, p.inputs, 1, x, p.inputs, w, p.inputs, 0, y, p.outputs);
      });
    });
#endif
  }
  return 0;
}();

}  // namespace
}  // namespace heed::bench
