// Problems of mechanisms with tensors on a device.
#ifndef HEED_TESTS_CUDA_PROBLEMS_ON_DEVICES_H_
#define HEED_TESTS_CUDA_PROBLEMS_ON_DEVICES_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdio>
#include <deque>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "tests/cuda/on_devices.h"

namespace heed {

// A problem on a device. Constants per head stay on the host, where arguments are checked.
class OnDevice {
 public:
  OnDevice(const TestDevice& device, const mechanism::Mechanism& m, const mechanism::Problem& p,
           mechanism::Views outputs)
      : problem_(p) {
    const auto move = [&](ConstTensorView& t) { t = tensors_.emplace_back(device, t).view(); };
    for (size_t i = 0; i < m.tensors.size(); ++i) {
      const bool on_host = m.tensors[i].values == mechanism::kDecays && !m.tensors[i].over_tokens();
      if (!on_host) move(problem_.inputs[i]);
    }
    for (ConstTensorView& t : problem_.initial) move(t);
    for (ConstTensorView& t : problem_.d_final) move(t);
    move(problem_.d_o);
    for (const TensorView& t : outputs) outputs_.push_back(tensors_.emplace_back(device, t).view());
    first_output_ = tensors_.size() - outputs.size();
  }

  const mechanism::Problem& problem() const { return problem_; }
  mechanism::Views outputs() const { return outputs_; }
  void Download(mechanism::Views outputs) const {
    for (size_t i = 0; i < outputs.size(); ++i) tensors_[first_output_ + i].Download(outputs[i]);
  }

 private:
  mechanism::Problem problem_;
  std::deque<DeviceTensor> tensors_;
  std::vector<TensorView> outputs_;
  size_t first_output_ = 0;
};

// The mechanism, computed on a device.
inline mechanism::Mechanism Moved(const TestDevice& device, const mechanism::Mechanism& m) {
  mechanism::Mechanism result = m;
  for (auto* pass : {&result.forward, &result.backward, &result.step}) {
    *pass = [&device, m, call = *pass](Context& ctx, const mechanism::Problem& p, mechanism::Views outputs) {
      const OnDevice on_device(device, m, p, outputs);
      call(ctx, on_device.problem(), on_device.outputs());
      on_device.Download(outputs);
    };
  }
  return result;
}

// Compares cases with their references.
class AgreementTest : public DeviceTest {
 protected:
  // Checks a case, and keeps in `closest` the comparison nearest to its tolerance.
  void Agrees(const Case& c, Comparison* closest) {
    const Comparison result = Compare(c, ctx_);
    ASSERT_TRUE(result.ok) << c.title << ": " << result.message;
    if (result.worst_ratio > closest->worst_ratio) *closest = result;
  }
  // The outputs of a case on an emulated device with `num_sms` SMs.
  std::vector<Buffer> RunOn(int32_t num_sms, const Case& c) {
    cuda::SetEmulatedSms(num_sms);
    std::vector<Buffer> buffers;
    std::vector<TensorView> views;
    for (const OutputSpec& output : c.outputs) views.push_back(buffers.emplace_back(output.dtype, output.sizes).view());
    c.run(ctx_, views);
    return buffers;
  }
  static void Print(const std::string& what, const Comparison& closest) {
    std::printf("%s %s: closest to its bound: %.3g of %.3g (%.0f %%) in %s\n", GetParam()->name(), what.c_str(),
                closest.error, closest.tolerance, 100 * closest.worst_ratio, closest.where.c_str());
  }
};

inline std::vector<ConstTensorView> ViewsOf(const std::vector<Buffer>& buffers) {
  std::vector<ConstTensorView> views;
  for (const Buffer& buffer : buffers) views.push_back(buffer.view());
  return views;
}

// The message of the error that a call throws.
template <class Error, class F>
std::string Refusal(const F& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing is thrown";
}

}  // namespace heed

#endif  // HEED_TESTS_CUDA_PROBLEMS_ON_DEVICES_H_
