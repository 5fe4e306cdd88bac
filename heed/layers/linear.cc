// Linear: packing of weights, and the distribution of rows and panels to threads.
#include "heed/layers/linear.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/layers/linear_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {
namespace {

using mechanism::Fail;

constexpr const char* kOp = "layers::Linear";

void CheckPart(const LinearPart& part, int64_t inputs) {
  const ConstTensorView& w = part.weight;
  mechanism::CheckFloat(kOp, "weight", w);
  if (w.rank() != 2 || w.size(0) < 1 || w.size(1) < 1) {
    Fail(kOp, "weight", "has shape " + w.ShapeString(), "[outputs, inputs], both at least 1");
  }
  const int64_t own = w.size(part.transposed ? 0 : 1), rows = w.size(part.transposed ? 1 : 0);
  if (own != inputs)
    Fail(kOp, "weight", "has " + std::to_string(own) + " inputs", std::to_string(inputs) + " as the first part");
  if (!part.bias) return;
  mechanism::CheckFloat(kOp, "bias", part.bias);
  if (part.bias.rank() != 1 || part.bias.size(0) != rows) {
    Fail(kOp, "bias", "has shape " + part.bias.ShapeString(), "[" + std::to_string(rows) + "]");
  }
}

// Offset of an element of a matrix [outputs, inputs], from its strides.
int64_t At(const LinearPart& part, int64_t output, int64_t input) {
  const ConstTensorView& w = part.weight;
  return part.transposed ? input * w.stride(0) + output * w.stride(1) : output * w.stride(0) + input * w.stride(1);
}

float Element(const ConstTensorView& t, int64_t at) {
  return t.dtype() == DType::kF32 ? t.as<float>()[at] : static_cast<float>(LoadAsDouble(t.dtype(), t.data(), at));
}

// Packs outputs [begin, begin + count) into a zeroed panel, 16 inputs at a time, so that writes stay in the cache. A
// word is an f32, or two bf16 of consecutive inputs.
void Pack(const LinearPart& part, int64_t begin, int64_t count, int64_t inputs, bool pairs, uint32_t* to) {
  constexpr int64_t kStep = 16;
  for (int64_t e0 = 0; e0 < inputs; e0 += kStep) {
    const int64_t end = std::min(inputs, e0 + kStep);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t e = e0; e < end; ++e) {
        const int64_t at = At(part, begin + i, e);
        if (pairs) {
          to[e / 2 * kPanel + i] |= uint32_t{part.weight.as<BF16>()[at].bits} << (16 * (e % 2));
        } else {
          to[e * kPanel + i] = std::bit_cast<uint32_t>(Element(part.weight, at));
        }
      }
    }
  }
}

}  // namespace

Linear::Linear(const ConstTensorView& weight, const ConstTensorView& bias)
    : Linear(std::array{LinearPart{weight, bias}}) {}

Linear::Linear(std::span<const LinearPart> parts) {
  if (parts.empty()) Fail(kOp, "parts", "is empty", "at least one");
  const LinearPart& front = parts.front();
  const int64_t inputs = front.weight.rank() == 2 ? front.weight.size(front.transposed ? 0 : 1) : 0;
  bool all_bf16 = true, any_bias = false;
  int64_t outputs = 0;
  for (const LinearPart& part : parts) {
    CheckPart(part, inputs);
    outputs += part.weight.size(part.transposed ? 1 : 0);
    all_bf16 = all_bf16 && part.weight.dtype() == DType::kBF16;
    any_bias = any_bias || part.bias.present();
  }
  inputs_ = inputs;
  outputs_ = outputs;
  dtype_ = all_bf16 ? DType::kBF16 : DType::kF32;
  const int64_t padded = (outputs + kPanel - 1) / kPanel * kPanel;
  if (any_bias) bias_.assign(static_cast<size_t>(padded), 0.f);
  const int64_t bytes = nbytes();
  void* memory = os::AllocateAligned(bytes);
  panels_ = std::shared_ptr<const void>(memory, [](const void* at) { os::FreeAligned(const_cast<void*>(at)); });
  std::memset(memory, 0, static_cast<size_t>(bytes));
  const int64_t words = all_bf16 ? (inputs + 1) / 2 : inputs;
  int64_t output = 0;
  for (const LinearPart& part : parts) {
    const int64_t rows = part.weight.size(part.transposed ? 1 : 0);
    for (int64_t begin = 0, count; begin < rows; begin += count, output += count) {
      count = std::min(rows - begin, kPanel - output % kPanel);
      Pack(part, begin, count, inputs, all_bf16,
           static_cast<uint32_t*>(memory) + output / kPanel * words * kPanel + output % kPanel);
      for (int64_t i = 0; i < count && part.bias; ++i) {
        bias_[static_cast<size_t>(output + i)] = Element(part.bias, (begin + i) * part.bias.stride(0));
      }
    }
  }
}

int64_t Linear::nbytes() const {
  const int64_t words = dtype_ == DType::kBF16 ? (inputs_ + 1) / 2 : inputs_;
  return (outputs_ + kPanel - 1) / kPanel * kPanel * words * 4;
}

struct LinearAccess {
  // The product of rows [0, rows) of x with panels [first, first + panels).
  static PanelProduct Product(const Linear& linear, const float* x, int64_t x_stride, int64_t rows, float* y,
                              int64_t y_stride, int64_t first, int64_t panels) {
    PanelProduct p;
    p.weights = linear.panels_.get();
    p.bias = linear.bias_.empty() ? nullptr : linear.bias_.data();
    p.inputs = static_cast<size_t>(linear.inputs_);
    p.outputs = static_cast<size_t>(linear.outputs_);
    p.x = x;
    p.x_stride = static_cast<ptrdiff_t>(x_stride);
    p.y = y;
    p.y_stride = static_cast<ptrdiff_t>(y_stride);
    p.rows = static_cast<size_t>(rows);
    p.first = static_cast<size_t>(first);
    p.panels = static_cast<size_t>(panels);
    return p;
  }
};

namespace {

// A block of rows stays in L2 while it is multiplied with all panels.
constexpr int64_t kRowBlock = 192, kFewRows = 6;

auto KernelFor(const Context& ctx, DType dtype) {
  const PanelKernels kernels = PanelKernelsFor(ctx);
  return dtype == DType::kBF16 ? kernels.bf16 : kernels.f32;
}

}  // namespace

void Linear::Rows(Context& ctx, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride) const {
  if (rows == 0) return;
  const auto kernel = KernelFor(ctx, dtype_);
  const int64_t panels = (outputs_ + kPanel - 1) / kPanel;
  // A task is a block of rows and several panels; with few rows (small-M), it has enough weights to be worth a task.
  constexpr int64_t kTaskBytes = 128 << 10;
  int64_t row_block = std::min(rows, kRowBlock), group = 4;
  if (rows <= kFewRows) group = std::clamp<int64_t>(kTaskBytes / (nbytes() / panels), 1, panels);
  const auto tasks = [&] { return (rows + row_block - 1) / row_block * ((panels + group - 1) / group); };
  if (rows > kFewRows && ctx.num_threads() > 1) {
    while (group > 1 && tasks() < 4 * ctx.num_threads()) group /= 2;
    while (row_block > 48 && tasks() < 4 * ctx.num_threads()) row_block /= 2;
  }
  const int64_t groups = (panels + group - 1) / group;
  ctx.ParallelFor(tasks(), [&](int64_t task, int) {
    const int64_t row = task / groups * row_block, first = task % groups * group;
    kernel(LinearAccess::Product(*this, x + row * x_stride, x_stride, std::min(row_block, rows - row),
                                 y + row * y_stride, y_stride, first, std::min(group, panels - first)));
  });
}

void MultiplyHeads(Context& ctx, std::span<const Linear> heads, const OfHeads<const float>& x, int64_t rows,
                   const OfHeads<float>& y) {
  if (heads.empty() || rows == 0) return;
  const auto kernel = KernelFor(ctx, heads.front().dtype());
  const int64_t panels = (heads.front().outputs() + kPanel - 1) / kPanel, count = std::ssize(heads);
  ctx.ParallelFor((rows + kRowBlock - 1) / kRowBlock * count, [&](int64_t task, int) {
    const int64_t row = task / count * kRowBlock, head = task % count;
    kernel(LinearAccess::Product(heads[static_cast<size_t>(head)], x.data + row * x.row_stride + head * x.head_stride,
                                 x.row_stride, std::min(kRowBlock, rows - row),
                                 y.data + row * y.row_stride + head * y.head_stride, y.row_stride, 0, panels));
  });
}

void Linear::Forward(Context& ctx, const ConstTensorView& x, const TensorView& y) const {
  constexpr const char* op = "layers::Linear::Forward";
  if (!present()) throw InvalidArgument(std::string(op) + ": there are no weights, expected a loaded matrix");
  mechanism::CheckReadable(op, "x", x);
  if (x.rank() != 2) Fail(op, "x", "has shape " + x.ShapeString(), "[rows, " + std::to_string(inputs_) + "]");
  mechanism::CheckTensor(op, "x", x, {x.size(0), inputs_}, DType::kF32, true);
  mechanism::CheckTensor(op, "y", y, {x.size(0), outputs_}, DType::kF32, true);
  mechanism::CheckContiguousRows(op, "x", x);
  mechanism::CheckContiguousRows(op, "y", y);
  mechanism::CheckWritable(op, "y", y, "x", x);
  Rows(ctx, x.as<float>(), x.stride(0), x.size(0), y.as<float>(), y.stride(0));
}

}  // namespace heed::layers
