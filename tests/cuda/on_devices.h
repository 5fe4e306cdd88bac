// Shared parts of the device tests: each test runs on an emulated device, and on a GPU if there is one.
//
// The emulated device is slow, so scripts/test takes part of its seeds, dtypes and sizes. HEED_TEST_DEEP, which
// scripts/test --deep sets, takes all of them, and so does a GPU.
#ifndef HEED_TESTS_CUDA_ON_DEVICES_H_
#define HEED_TESTS_CUDA_ON_DEVICES_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "tests/cuda/device.h"
#include "tests/environment.h"
#include "tests/sanitizers.h"

namespace heed {

using cuda::DeviceTensor;
using cuda::TestDevice;

class DeviceTest : public testing::TestWithParam<const TestDevice*> {
 protected:
  static bool IsEmulated() { return GetParam() == &cuda::EmulatedDevice() || GetParam() == &cuda::EmulatedHopper(); }
  static bool TakesAll() { return !IsEmulated() || FromEnvironment("HEED_TEST_DEEP", 0) != 0; }
  // True except for the first of every `every` calls, unless the run takes everything.
  bool LeavesOut(uint64_t every) { return num_cases_++ % every != 0 && !TakesAll(); }
  // The seeds from HEED_TEST_FIRST_SEED (default 1) on, HEED_TEST_SEEDS of them (default `all` or `part`).
  struct Seeds {
    uint64_t first, last;
  };
  static Seeds SeedsOf(int64_t all, int64_t part) {
    const int64_t first = FromEnvironment("HEED_TEST_FIRST_SEED", 1);
    return {static_cast<uint64_t>(first),
            static_cast<uint64_t>(first + FromEnvironment("HEED_TEST_SEEDS", TakesAll() ? all : part))};
  }

  void SetUp() override {
    if (HEED_ADDRESS_SANITIZER || HEED_THREAD_SANITIZER)
      GTEST_SKIP() << "fibers of the emulated device are unknown to sanitizers";
    cuda::Replace(GetParam()->library());
  }
  void TearDown() override {
    cuda::Replace(nullptr);
    cuda::SetEmulatedSeed(1);
    cuda::SetEmulatedSms(2);
  }

  Context ctx_{1};

 private:
  uint64_t num_cases_ = 0;
};

// The devices available on this machine.
inline std::vector<const TestDevice*> Devices() {
  std::vector<const TestDevice*> devices = {&cuda::EmulatedDevice()};
#if defined(HEED_WITH_CUDA)
  if (cuda::Gpu().WhyNot().empty()) devices.push_back(&cuda::Gpu());
#endif
  return devices;
}

// The devices of attention tests: attention has WGMMA kernels on Hopper.
inline std::vector<const TestDevice*> DevicesOfAttention() {
  std::vector<const TestDevice*> devices = Devices();
  devices.push_back(&cuda::EmulatedHopper());
  return devices;
}

inline std::string NameOf(const testing::TestParamInfo<const TestDevice*>& info) { return info.param->name(); }

}  // namespace heed

#endif  // HEED_TESTS_CUDA_ON_DEVICES_H_
