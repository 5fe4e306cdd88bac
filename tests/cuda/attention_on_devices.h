// Attention on a test device, and problems for it.
#ifndef HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_
#define HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"
#include "tests/cuda/on_devices.h"

namespace heed {

using attention::Inputs;
using attention::Options;
using attention::Problem;

// Outputs of a call on the device.
struct Results {
  Buffer o, lse;
};

// Options with bias and mask on the device and, with `with_numbers`, also ALiBi slopes and sinks.
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
  // Computes the problem's attention on the device.
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

  // Computes the problem's gradients, forward and backward on the device, in the order of `p.gradients`.
  std::vector<Buffer> Gradients(const Problem& p) {
    const TestDevice& device = *GetParam();
    std::vector<int64_t> o_sizes = p.o.sizes;
    const Buffer host_o(p.in.q.dtype(), o_sizes), host_lse(DType::kF32, p.LseSizes());
    const DeviceTensor q(device, p.in.q), k(device, p.in.k), v(device, p.in.v), d_o(device, p.d_o),
        d_lse(device, p.d_lse);
    const DeviceTensor o(device, host_o.view()), lse(device, host_lse.view());
    const OptionsOnDevice moved(device, p.options, /*with_numbers=*/true);
    const Options& options = moved.options();
    attention::Forward(ctx_, {q.view(), k.view(), v.view()}, options, {o.view(), lse.view()});
    std::vector<Buffer> results;
    std::vector<DeviceTensor> on_device;
    std::vector<TensorView> views;
    for (const OutputSpec& spec : p.gradients) {
      results.emplace_back(spec.dtype, spec.sizes);
      on_device.emplace_back(device, results.back().view());
      views.push_back(on_device.back().view());
    }
    attention::Backward(ctx_, {q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), d_lse.view()}, options,
                        attention::ToGradients(p.gradients, views));
    for (size_t i = 0; i < results.size(); ++i) on_device[i].Download(results[i].view());
    return results;
  }

  // True if the emulated Hopper device runs the same kernels as the other emulated device, so that one test suffices.
  bool IsRepeated(DType dtype, int64_t channels, int64_t rows = 64) const {
    const bool has_own = dtype != DType::kF32 && channels <= softmax::cuda::kMostWgmmaChannels && rows > 32;
    return GetParam() == &cuda::EmulatedHopper() && !has_own;
  }
  // The kernel of large-M blocks of bf16 and f16, up to 128 channels.
  std::string KernelOfManyRows() const {
    std::string why_not;
    const cuda::Library& library = *cuda::Find(&why_not);
    cuda::DeviceFacts facts;
    library.examine(0, &facts);
    return facts.major == 9 && library.softmax->wgmma.forward != nullptr ? "softmax_wgmma" : "softmax_cuda";
  }

  // Calls compare(seed), which returns an empty Comparison for problems that it skips.
  template <class Compare>
  void AgreesOnSeeds(const std::string& what, const Seeds& seeds, const Compare& compare) {
    Comparison closest;
    for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
      cuda::SetEmulatedSeed(seed);
      const Comparison result = compare(seed);
      ASSERT_TRUE(result.ok) << what << " seed " << seed << ": " << result.message;
      if (result.worst_ratio > closest.worst_ratio) closest = result;
    }
    std::printf("%s %s: closest to its bound: %.3g of %.3g (%.0f %%) in %s\n", GetParam()->name(), what.c_str(),
                closest.error, closest.tolerance, 100 * closest.worst_ratio, closest.where.c_str());
  }

  // Outputs do not depend on the order of threads.
  void ExpectSameBitsInAnyOrder(const Problem& p) {
    const Results first = Run(p);
    for (uint64_t seed = 2; seed < (TakesAll() ? 6 : 4); ++seed) {
      cuda::SetEmulatedSeed(seed);
      const Results again = Run(p);
      EXPECT_TRUE(SameBits(first.o.view(), again.o.view()));
      EXPECT_TRUE(SameBits(first.lse.view(), again.lse.view()));
    }
  }
};

// A random problem whose options the kernel takes.
inline Problem RandomProblem(DType dtype, uint64_t seed) {
  Problem p = attention::RandomProblem(dtype, seed);
  Options& o = p.options;
  o.log_decay = {};
  o.relative_bias = {};
  return p;
}

// Options with each kind of interval mask, without a mask, and with a soft cap.
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

// A padded problem with batch size B.
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

// The problem with the absolute values of v.
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

// Compares with the reference. f16 has a larger tolerance for the rounding of P, which the CPU case does not include.
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

inline Comparison CompareGradients(const Problem& p, const std::vector<Buffer>& results) {
  std::vector<ConstTensorView> views;
  for (const Buffer& buffer : results) views.push_back(buffer.view());
  return CompareResults(attention::MakeBackwardCase(p, /*with_forward=*/false), views);
}

}  // namespace heed

#endif  // HEED_TESTS_CUDA_ATTENTION_ON_DEVICES_H_
