// What tests of kernels on devices share: each runs on an emulated one, and on a GPU where there is one.
#ifndef HEED_TESTS_CUDA_ON_DEVICES_H_
#define HEED_TESTS_CUDA_ON_DEVICES_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "tests/cuda/device.h"
#include "tests/sanitizers.h"

namespace heed {

using cuda::DeviceTensor;
using cuda::TestDevice;

class DeviceTest : public testing::TestWithParam<const TestDevice*> {
 protected:
  void SetUp() override {
    if (HEED_ADDRESS_SANITIZER || HEED_THREAD_SANITIZER) GTEST_SKIP() << "fibers of the emulated device are unknown to sanitizers";
    cuda::Replace(GetParam()->library());
  }
  void TearDown() override {
    cuda::Replace(nullptr);
    cuda::SetEmulatedSeed(1);
    cuda::SetEmulatedMultiprocessors(2);
  }

  Context ctx_{1};
};

// Problems with seeds from HEED_TEST_FIRST_SEED on, HEED_TEST_SEEDS of them.
inline uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

// Those that there are here.
inline std::vector<const TestDevice*> Devices() {
  std::vector<const TestDevice*> devices = {&cuda::EmulatedDevice()};
#if defined(HEED_WITH_CUDA)
  if (cuda::Gpu().WhyNot().empty()) devices.push_back(&cuda::Gpu());
#endif
  return devices;
}

// Attention has kernels of its own on Hopper.
inline std::vector<const TestDevice*> DevicesOfAttention() {
  std::vector<const TestDevice*> devices = Devices();
  devices.push_back(&cuda::EmulatedHopper());
  return devices;
}

inline std::string NameOf(const testing::TestParamInfo<const TestDevice*>& info) { return info.param->name(); }

}  // namespace heed

#endif  // HEED_TESTS_CUDA_ON_DEVICES_H_
