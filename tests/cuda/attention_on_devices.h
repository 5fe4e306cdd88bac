// Attention on a device of tests, and problems for it.
#ifndef HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_
#define HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_

#include <tuple>
#include <vector>

#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "tests/cuda/on_devices.h"

namespace heed {

using attention::Inputs;
using attention::Options;
using attention::Problem;

// What a call on the device left: o and lse.
struct Results {
  Buffer o, lse;
};

class CudaTest : public DeviceTest {
 protected:
  // Attention of the problem, computed on the device.
  Results Run(const Problem& p) {
    const DeviceTensor q(*GetParam(), p.in.q), k(*GetParam(), p.in.k), v(*GetParam(), p.in.v);
    Results results = {Buffer(p.o.dtype, p.o.sizes), Buffer()};
    const DeviceTensor o(*GetParam(), results.o.view());
    if (!p.lse.sizes.empty()) results.lse = Buffer(p.lse.dtype, p.lse.sizes);
    const DeviceTensor lse(*GetParam(), results.lse.view());
    const DeviceTensor bias(*GetParam(), p.options.bias), mask(*GetParam(), p.options.mask);
    Options options = p.options;
    options.bias = bias.view();
    options.mask = mask.view();
    attention::Forward(ctx_, {q.view(), k.view(), v.view()}, options, {o.view(), lse.view()});
    o.Download(results.o.view());
    lse.Download(results.lse.view());
    return results;
  }
};

// A random problem with what the kernel takes of its options.
inline Problem RandomProblem(DType dtype, uint64_t seed) {
  Problem p = attention::RandomProblem(dtype, seed);
  Options& o = p.options;
  o.segments_q = o.segments_k = o.log_decay = {};
  o.pattern = {};
  if (o.bias.present() && o.bias.dtype() == DType::kF64) o.bias = {};
  return p;
}

// Options of every kind of mask that is an interval of keys, none at all, and a soft cap.
inline std::vector<Options> MasksAndCap() {
  Options causal, window, sinks, chunks, capped;
  causal.causal = window.causal = sinks.causal = chunks.causal = true;
  window.window = {40, 0};
  sinks.window = {20, 0};
  sinks.sink_tokens = 3;
  chunks.chunk = 48;
  capped.softcap = 1.5;
  return {Options(), causal, window, sinks, chunks, capped};
}

// Padded, with a batch of B.
inline Problem Plain(DType dtype, const Sizes& n, uint64_t seed) {
  Problem p;
  for (const auto& [view, T, H, D, i] :
       {std::tuple{&p.in.q, n.Tq, n.Hq, n.D, 0}, {&p.in.k, n.Tk, n.Hkv, n.D, 1}, {&p.in.v, n.Tk, n.Hkv, n.Dv, 2}}) {
    p.memory.emplace_back(dtype, std::initializer_list<int64_t>{n.B, T, H, D}, Placement::kAligned);
    p.memory.back().FillNormal(seed + static_cast<uint64_t>(i));
    *view = p.memory.back().view();
  }
  DescribeOutputs(p);
  return p;
}

}  // namespace heed

#endif  // HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_
