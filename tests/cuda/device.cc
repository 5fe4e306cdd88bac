// Tensors on test devices, and the emulated devices.
#include "tests/cuda/device.h"

#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "heed/core/os.h"
#include "tests/cuda/emulated_engines.h"
#include "tests/cuda/emulated_machine.h"

namespace heed::cuda {
namespace {

std::atomic<uint64_t> emulated_seed = 1;
std::atomic<int32_t> emulated_sms = 2;

template <int kMajor>
const char* Examine(int32_t device, DeviceFacts* facts) {
  if (device != 0) return "there is no device of this index";
  *facts = {kMajor, 0, int64_t{227} << 10, emulated_sms};
  return nullptr;
}

const char* CheckStream(int32_t, void* stream) { return stream == nullptr ? nullptr : "is of another device"; }

const char* Allocate(int32_t, void*, size_t num_bytes, void** memory) {
  *memory = os::AllocateAligned(num_bytes);
  std::memset(*memory, 0xFF, num_bytes);  // NaN
  return nullptr;
}
void Free(int32_t, void*, void* memory) { os::FreeAligned(memory); }
const char* EncodeTensorMap(int32_t, const TensorMapSource& rows, TensorMap* map) {
  static_assert(sizeof(rows) <= sizeof(*map));
  if (rows.token_stride <= 0 || rows.head_stride <= 0 || rows.batch_stride <= 0)
    throw std::logic_error("rows that no tensor map describes");
  const auto is_multiple = [](int64_t stride) { return stride % 8 == 0; };
  if (reinterpret_cast<uintptr_t>(rows.data) % 16 != 0 || !is_multiple(rows.token_stride) ||
      !is_multiple(rows.head_stride) || !is_multiple(rows.batch_stride)) {
    return "rows do not begin at multiples of 16 bytes";
  }
  new (map) TensorMapSource(rows);
  return nullptr;
}
const char* Upload(int32_t, void*, void* to, const void* from, size_t num_bytes) {
  std::memcpy(to, from, num_bytes);
  return nullptr;
}

template <int kMajor>
const Library kEmulated = {.version = HEED_VERSION,
                           .examine = &Examine<kMajor>,
                           .check_stream = &CheckStream,
                           .allocate = &Allocate,
                           .free = &Free,
                           .upload = &Upload,
                           .encode_tensor_map = &EncodeTensorMap,
                           .softmax = &EmulatedSoftmax(),
                           .recurrence = &EmulatedRecurrence(),
                           .ssd = &EmulatedSsd(),
                           .scan = &EmulatedScan()};

class Emulated : public TestDevice {
 public:
  Emulated(const char* name, const Library* library) : name_(name), library_(library) {}
  const char* name() const override { return name_; }
  std::string WhyNot() const override { return ""; }
  const Library* library() const override { return library_; }
  // An access beyond either end faults.
  std::shared_ptr<void> Allocate(size_t num_bytes) const override {
    auto memory = std::make_shared<os::GuardedMemory>(num_bytes, /*at_end=*/true);
    return {memory, memory->data()};
  }
  void Upload(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  void Download(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }

 private:
  const char* const name_;
  const Library* const library_;
};

}  // namespace

const TestDevice& EmulatedDevice() {
  static const Emulated device("emulated", &kEmulated<8>);
  return device;
}
const TestDevice& EmulatedHopper() {
  static const Emulated device("emulated_hopper", &kEmulated<9>);
  return device;
}

uint64_t EmulatedSeed() { return emulated_seed; }
void SetEmulatedSeed(uint64_t seed) { emulated_seed = seed; }
void SetEmulatedSms(int32_t count) { emulated_sms = count; }

DeviceTensor::DeviceTensor(const TestDevice& device, const ConstTensorView& host) : device_(device) {
  if (!host.present()) return;
  const auto size = static_cast<ptrdiff_t>(SizeOf(host.dtype()));
  ptrdiff_t above = size;  // bytes from element 0 to the end of the highest element
  for (int axis = 0; axis < host.rank(); ++axis) {
    const ptrdiff_t span = (host.size(axis) - 1) * host.stride(axis) * size;
    (span < 0 ? below_ : above) += span < 0 ? -span : span;
  }
  if (host.num_elements() == 0) below_ = above = 0;
  num_bytes_ = static_cast<size_t>(below_ + above);
  const auto* from = static_cast<const char*>(host.data()) - below_;
  const size_t shift = reinterpret_cast<uintptr_t>(from) % 16;
  memory_ = device.Allocate((num_bytes_ + shift + 15) / 16 * 16);
  lowest_ = static_cast<char*>(memory_.get()) + shift;
  if (num_bytes_ > 0) device.Upload(lowest_, from, num_bytes_);
  view_ = TensorView(lowest_ + below_, host.dtype(), host.sizes(), host.strides(), {DeviceType::kCuda, 0});
}

void DeviceTensor::Download(const TensorView& host) const {
  if (num_bytes_ > 0) device_.Download(static_cast<char*>(host.data()) - below_, lowest_, num_bytes_);
}

}  // namespace heed::cuda
