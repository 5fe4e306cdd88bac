// Buffer and Random.
#include "heed/harness/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "heed/core/os.h"

namespace heed {
namespace {

std::vector<int64_t> RowMajor(std::span<const int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

void* Address(const ConstTensorView& view, std::span<const int64_t> index, int64_t* offset) {
  *offset = 0;
  for (size_t i = 0; i < index.size(); ++i) {
    *offset += index[i] * view.stride(static_cast<int>(i));
  }
  return const_cast<void*>(view.data());
}

// Calls f(offset of its first element) for each row of the last axis, in row-major order.
template <class F>
void ForEachRow(const ConstTensorView& view, F f) {
  if (view.num_elements() == 0) return;
  const auto sizes = view.sizes().first(view.sizes().empty() ? 0 : view.sizes().size() - 1);
  std::vector<int64_t> index(sizes.size());
  do {
    int64_t offset;
    Address(view, index, &offset);
    f(offset);
  } while (NextIndex(sizes, index));
}

int64_t RowSize(const ConstTensorView& view) { return view.rank() == 0 ? 1 : view.size(view.rank() - 1); }
int64_t RowStride(const ConstTensorView& view) { return view.rank() == 0 ? 1 : view.stride(view.rank() - 1); }

double Load(DType dtype, const void* data, int64_t offset) {
  return IsFloat(dtype) ? LoadAsDouble(dtype, data, offset) : static_cast<double>(LoadAsInt64(dtype, data, offset));
}

void Store(DType dtype, void* data, int64_t offset, double value) {
  switch (dtype) {
    case DType::kI64: static_cast<int64_t*>(data)[offset] = static_cast<int64_t>(value); break;
    case DType::kI32: static_cast<int32_t*>(data)[offset] = static_cast<int32_t>(value); break;
    case DType::kBool: static_cast<uint8_t*>(data)[offset] = value != 0 ? 1 : 0; break;
    default: StoreDouble(dtype, data, offset, value);
  }
}

// Fills the elements in row-major order, each with a call of `next`.
template <class F>
void Fill(const TensorView& view, F next) {
  const int64_t count = RowSize(view), stride = RowStride(view);
  ForEachRow(view, [&](int64_t at) {
    for (int64_t i = 0; i < count; ++i) Store(view.dtype(), view.data(), at + i * stride, next());
  });
}

}  // namespace

Random::Random(uint64_t seed, uint32_t stream) : seed_(seed), stream_(stream) {}

uint32_t Random::Word() {
  if (used_ == 4) {
    words_ = Philox({static_cast<uint32_t>(counter_), static_cast<uint32_t>(counter_ >> 32), stream_, 0x68656564},
                    {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
    ++counter_;
    used_ = 0;
  }
  return words_[static_cast<size_t>(used_++)];
}

double Random::Uniform() { return Word() * 0x1p-32; }

double Random::Uniform(double low, double high) { return low + (high - low) * Uniform(); }

int64_t Random::Integer(int64_t low, int64_t high) {
  const uint64_t count = static_cast<uint64_t>(high - low) + 1;
  return low + static_cast<int64_t>((Word() * count) >> 32);
}

bool Random::Chance(double probability) { return Uniform() < probability; }

double Random::Normal() {
  int64_t sum = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = Word();
    sum += (word & 0xFFFF) + (word >> 16);
  }
  constexpr double kDeviation = 0.8164965809277260;  // standard deviation of the sum: sqrt(8 / 12)
  return (static_cast<double>(sum) * 0x1p-16 - (4 - 4 * 0x1p-16)) / kDeviation;
}

Buffer::Buffer(DType dtype, std::span<const int64_t> sizes, Placement placement)
    : Buffer(dtype, sizes, RowMajor(sizes), placement) {}

Buffer::Buffer(DType dtype, std::initializer_list<int64_t> sizes, Placement placement)
    : Buffer(dtype, std::span<const int64_t>(sizes.begin(), sizes.size()), placement) {}

Buffer::Buffer(DType dtype, std::span<const int64_t> sizes, std::span<const int64_t> strides, Placement placement,
               int64_t gap) {
  int64_t below = 0, above = 1;  // offsets from the first element, 0 <= below
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t reach = strides[i] * std::max<int64_t>(sizes[i] - 1, 0);
    (reach < 0 ? below : above) += std::abs(reach);
  }
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    below = 0;
    above = 0;
  }
  const size_t element = SizeOf(dtype);
  num_bytes_ = static_cast<size_t>(below + above + gap) * element;
  if (placement == Placement::kAligned) {
    memory_ = {os::AllocateAligned(num_bytes_), &os::FreeAligned};
    begin_ = static_cast<uint8_t*>(memory_.get());
  } else {
    const auto guarded = std::make_shared<os::GuardedMemory>(num_bytes_, placement == Placement::kBeforeGuard);
    begin_ = guarded->data();
    memory_ = guarded;
  }
  Poison();
  const int64_t first = below + (placement == Placement::kBeforeGuard ? 0 : gap);
  view_ = TensorView(begin_ + static_cast<size_t>(first) * element, dtype, sizes, strides);
}

Buffer Buffer::As(const TensorView& view) const {
  Buffer other = *this;
  other.view_ = view;
  return other;
}

void Buffer::Poison() const {
  if (num_bytes_ > 0) std::memset(begin_, 0xFF, num_bytes_);
}

double Buffer::Get(std::initializer_list<int64_t> index) const {
  return GetElement(view_, {index.begin(), index.size()});
}

void Buffer::Set(std::initializer_list<int64_t> index, double value) const {
  SetElement(view_, {index.begin(), index.size()}, value);
}

const Buffer& Buffer::FillNormal(uint64_t seed, double deviation) const {
  Random random(seed, /*stream=*/0xF111);
  Fill(view_, [&] { return deviation * random.Normal(); });
  return *this;
}

const Buffer& Buffer::FillConstant(double value) const {
  Fill(view_, [&] { return value; });
  return *this;
}

double GetElement(const ConstTensorView& view, std::span<const int64_t> index) {
  int64_t offset;
  const void* data = Address(view, index, &offset);
  return Load(view.dtype(), data, offset);
}

void SetElement(const TensorView& view, std::span<const int64_t> index, double value) {
  int64_t offset;
  void* data = Address(view, index, &offset);
  Store(view.dtype(), data, offset, value);
}

bool NextIndex(std::span<const int64_t> sizes, std::span<int64_t> index) {
  for (size_t i = sizes.size(); i-- > 0;) {
    if (++index[i] < sizes[i]) return true;
    index[i] = 0;
  }
  return false;
}

std::vector<double> Elements(const ConstTensorView& view) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(view.num_elements()));
  const int64_t count = RowSize(view), stride = RowStride(view);
  ForEachRow(view, [&](int64_t at) {
    for (int64_t i = 0; i < count; ++i) values.push_back(Load(view.dtype(), view.data(), at + i * stride));
  });
  return values;
}

bool SameBits(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.dtype() != b.dtype() || !std::equal(a.sizes().begin(), a.sizes().end(), b.sizes().begin(), b.sizes().end())) {
    return false;
  }
  std::vector<int64_t> rows;  // rows of b
  ForEachRow(b, [&](int64_t at) { rows.push_back(at); });
  const int64_t element = static_cast<int64_t>(SizeOf(a.dtype())), count = RowSize(a);
  const bool contiguous = RowStride(a) == 1 && RowStride(b) == 1;
  const int64_t steps = contiguous ? 1 : count;
  const auto bytes = static_cast<size_t>(contiguous ? count * element : element);
  bool same = true;
  size_t row = 0;
  ForEachRow(a, [&](int64_t at) {
    const char* x = a.as<char>() + at * element;
    const char* y = b.as<char>() + rows[row++] * element;
    for (int64_t i = 0; i < steps && same; ++i) {
      same = std::memcmp(x + i * RowStride(a) * element, y + i * RowStride(b) * element, bytes) == 0;
    }
  });
  return same;
}

}  // namespace heed
