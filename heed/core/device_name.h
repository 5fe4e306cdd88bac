// The name of a device in messages.
#ifndef HEED_CORE_DEVICE_NAME_H_
#define HEED_CORE_DEVICE_NAME_H_

#include <string>

#include "heed/core/tensor.h"

namespace heed {

// Returns "the CPU" or, for example, "cuda:0".
inline std::string NameOf(Device device) {
  if (device.type == DeviceType::kCpu) return "the CPU";
  const std::string index = std::to_string(device.index);
  if (device.type == DeviceType::kCuda) return "cuda:" + index;
  return "device " + std::to_string(static_cast<int>(device.type)) + ":" + index;
}

}  // namespace heed

#endif  // HEED_CORE_DEVICE_NAME_H_
