// Attention on a device of tests, and problems for it.
#ifndef HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_
#define HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_

#include <cmath>
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

// Options whose tensors are on the device: those for which there are kernels, and numbers of heads, unless these stay here.
class OptionsOnDevice {
 public:
  OptionsOnDevice(const TestDevice& device, const Options& options, bool with_numbers)
      : options_(options), bias_(device, options.bias), mask_(device, options.mask), alibi_(device, options.alibi),
        sinks_(device, options.sinks) {
    options_.bias = bias_.view();
    options_.mask = mask_.view();
    if (!with_numbers) return;
    options_.alibi = alibi_.view();
    options_.sinks = sinks_.view();
  }
  const Options& options() const { return options_; }

 private:
  Options options_;
  const DeviceTensor bias_, mask_, alibi_, sinks_;
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
    const OptionsOnDevice on_device(*GetParam(), p.options, p.in.q.size(0) % 2 == 0);
    attention::Forward(ctx_, {q.view(), k.view(), v.view()}, on_device.options(), {o.view(), lse.view()});
    o.Download(results.o.view());
    lse.Download(results.lse.view());
    return results;
  }

  // Whatever the order of threads.
  void ExpectSameBitsInAnyOrder(const Problem& p) {
    const Results first = Run(p);
    for (uint64_t seed = 2; seed < 6; ++seed) {
      cuda::SetEmulatedSeed(seed);
      const Results again = Run(p);
      EXPECT_TRUE(SameBits(first.o.view(), again.o.view()));
      EXPECT_TRUE(SameBits(first.lse.view(), again.lse.view()));
    }
  }
};

// A random problem with what the kernel takes of its options.
inline Problem RandomProblem(DType dtype, uint64_t seed) {
  Problem p = attention::RandomProblem(dtype, seed);
  Options& o = p.options;
  o.segments_q = o.segments_k = o.log_decay = {};
  o.pattern = {};
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

// The problem with other values of the same size.
inline Problem WithAbsoluteValues(const Problem& p) {
  Problem absolute = p;
  Buffer v(p.in.v.dtype(), p.in.v.sizes());
  std::vector<int64_t> index(static_cast<size_t>(p.in.v.rank()), 0);
  if (p.in.v.num_elements() > 0) {
    do {
      SetElement(v.view(), index, std::abs(GetElement(p.in.v, index)));
    } while (NextIndex(p.in.v.sizes(), index));
  }
  absolute.in.v = v.view();
  absolute.memory.push_back(v);
  return absolute;
}

// What an attention may be off: what attention may in general, and of f16 the rounding of weights, of which the case of
// CPUs knows nothing.
inline Comparison CompareWithReference(const Problem& p, const Results& results) {
  const Case c = attention::MakeCase(p);
  const Expected expected = ExpectedOf(c);
  if (p.in.q.dtype() == DType::kF16) {
    const Expected sizes = ExpectedOf(attention::MakeCase(WithAbsoluteValues(p)));
    const TensorView tolerance = expected.tolerance[0].view();
    std::vector<int64_t> index(static_cast<size_t>(tolerance.rank()), 0);
    if (tolerance.num_elements() > 0) {
      do {
        const double size = GetElement(sizes.values[0].view(), index);
        SetElement(tolerance, index, GetElement(tolerance, index) + 1.01 * 0x1p-11 * size);
      } while (NextIndex(tolerance.sizes(), index));
    }
  }
  std::vector<ConstTensorView> views = {results.o.view()};
  if (results.lse.present()) views.push_back(results.lse.view());
  return CompareResults(c, views, expected);
}

}  // namespace heed

#endif  // HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_
