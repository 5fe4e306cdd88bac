// Problems of mechanisms with their tensors on a device.
#ifndef HEED_TESTS_CUDA_PROBLEMS_ON_DEVICES_H_
#define HEED_TESTS_CUDA_PROBLEMS_ON_DEVICES_H_

#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/mechanism/problem_case.h"
#include "tests/cuda/on_devices.h"

namespace heed {

// All but constants of heads, which are read while arguments are checked.
class OnDevice {
 public:
  OnDevice(const TestDevice& device, const mechanism::Mechanism& m, const mechanism::Problem& p, mechanism::Views outputs)
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

inline std::vector<ConstTensorView> ViewsOf(const std::vector<Buffer>& buffers) {
  std::vector<ConstTensorView> views;
  for (const Buffer& buffer : buffers) views.push_back(buffer.view());
  return views;
}

// What a call on a device throws.
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
