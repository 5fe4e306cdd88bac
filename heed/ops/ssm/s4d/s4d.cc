// S4D on the scan engine.
#include "heed/ops/ssm/s4d/s4d.h"

#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/define_internal.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"

namespace heed::s4d {
namespace {

// One unit impulse, the same for all channels, in the dtype and length of a kernel.
struct Impulse {
  std::vector<char> memory;
  ConstTensorView u;

  Impulse(const char* op, const char* name, const Inputs& in, const ConstTensorView& kernel) {
    if (!kernel.present()) mechanism::Fail(op, name, "is absent", "a tensor");
    const bool known = in.log_dt.present() && in.log_dt.rank() == 1;
    if (kernel.rank() != 2 || (known && kernel.size(0) != in.log_dt.size(0))) {
      const std::string channels = known ? std::to_string(in.log_dt.size(0)) : "D";
      mechanism::Fail(op, name, "has shape " + kernel.ShapeString(), "[" + channels + ", L]");
    }
    if (!IsFloat(kernel.dtype())) {
      mechanism::Fail(op, name, std::string("has dtype ") + heed::Name(kernel.dtype()), "f64, f32, bf16 or f16");
    }
    const int64_t L = kernel.size(1);
    memory.resize(static_cast<size_t>(L) * SizeOf(kernel.dtype()));
    if (L > 0) StoreDouble(kernel.dtype(), memory.data(), 0, 1);
    const std::vector<int64_t> sizes = {1, kernel.size(0), L}, strides = {0, 0, 1};
    u = ConstTensorView(memory.data(), kernel.dtype(), sizes, strides);
  }
};

// [D, L] as [1, D, L].
template <class View>
View WithBatch(const View& t) {
  const std::vector<int64_t> sizes = {1, t.size(0), t.size(1)};
  const std::vector<int64_t> strides = {0, t.stride(0), t.stride(1)};
  return View(t.data(), t.dtype(), sizes, strides, t.device());
}

using Of = mechanism::Lists<Structs>;

Options OfKernel(Options options) {
  static_cast<scanning::Options&>(options) = {};
  options.method = Method::kRecurrent;
  return options;
}

}  // namespace

scanning::Definition DefinitionOf(const Options& options) {
  return {.table = mechanism::TableOf(kTensors, kStates),
          .rule = scan::Rule::kModes,
          .flops = 8,
          .bilinear = options.discretization == Discretization::kBilinear,
          .method = options.method == Method::kRecurrent     ? scan::Method::kRecurrent
                    : options.method == Method::kConvolution ? scan::Method::kConvolution
                                                             : scan::Method::kAuto};
}

void Kernel(Context& ctx, const Inputs& in, const Options& options, const TensorView& kernel) {
  constexpr const char* kOp = "s4d::Kernel";
  const Impulse impulse(kOp, "kernel", in, kernel);
  Inputs of = in;
  of.u = impulse.u;
  scanning::Passes::Forward(kOp, ctx, DefinitionOf(OfKernel(options)), Of::Of(of), {}, {.o = WithBatch(kernel)});
}

void KernelBackward(Context& ctx, const Inputs& in, const ConstTensorView& dkernel, const Options& options,
                    const Gradients& out) {
  constexpr const char* kOp = "s4d::KernelBackward";
  const Impulse impulse(kOp, "dkernel", in, dkernel);
  BackwardInputs of;
  static_cast<Inputs&>(of) = in;
  of.u = impulse.u;
  of.d_o = WithBatch(dkernel);
  scanning::Passes::Backward(kOp, ctx, DefinitionOf(OfKernel(options)), Of::Of(of), {}, Of::Of(out));
}

HEED_DEFINE_RECURRENT(scanning, s4d)

}  // namespace heed::s4d
