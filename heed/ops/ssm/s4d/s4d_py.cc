// Bindings of heed.s4d, heed.s4d_backward, heed.s4d_step, heed.s4d_kernel and heed.s4d_kernel_backward.
#include <string>
#include <vector>

#include "docstrings/s4d.h"
#include "python/mechanism/describe.h"
#include "heed/ops/ssm/s4d/s4d.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::s4d {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

const std::vector<std::string> kDiscretizations = {"zoh", "bilinear"};

Options Own(const binding::Settings& settings) {
  Options own;
  own.method = static_cast<Method>(settings.Choice("method"));
  own.discretization = static_cast<Discretization>(settings.Choice("discretization"));
  return own;
}

// Arguments of a call of the kernel's functions.
struct KernelCall {
  Arrays arrays;
  Inputs in;
  ConstTensorView dkernel;
  Options options;
  int64_t length = -1;
  int num_threads = 0;
};

template <ConstTensorView StepInputs::* kField>
void ReadInput(KernelCall& call, const Argument& a) {
  call.in.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}

constexpr Keyword<KernelCall> kLength = {"length", false,
                                         [](KernelCall& c, const Argument& a) { c.length = ToInt(a, 0, 1 << 28); }};
constexpr Keyword<KernelCall> kDKernel = {
    "dkernel", false, [](KernelCall& c, const Argument& a) { c.dkernel = c.arrays.ReadInPlace(a, Kind::kFloat); }};
constexpr Keyword<KernelCall> kLogDt = {"log_dt", false, &ReadInput<&Inputs::log_dt>};
constexpr Keyword<KernelCall> kLogAReal = {"log_A_real", false, &ReadInput<&Inputs::log_A_real>};
constexpr Keyword<KernelCall> kAImag = {"A_imag", false, &ReadInput<&Inputs::A_imag>};
constexpr Keyword<KernelCall> kC = {"C", false, &ReadInput<&Inputs::C>};
constexpr Keyword<KernelCall> kDiscretization = {"discretization", false, [](KernelCall& c, const Argument& a) {
                                                   c.options.discretization = ToChoice(a, kDiscretizations) == "zoh"
                                                                                  ? Discretization::kZeroOrderHold
                                                                                  : Discretization::kBilinear;
                                                 }};
constexpr Keyword<KernelCall> kThreads = {"threads", true, [](KernelCall& c, const Argument& a) {
                                            c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
                                          }};
constexpr Keyword<KernelCall> kForward[] = {kLogDt, kLogAReal, kAImag, kC, kLength, kDiscretization, kThreads};
constexpr Keyword<KernelCall> kBackward[] = {kDKernel, kLogDt, kLogAReal, kAImag, kC, kDiscretization, kThreads};

constexpr char kName[] = "s4d_kernel", kBackwardName[] = "s4d_kernel_backward";

void CheckParameters(const char* op, const KernelCall& call) {
  const std::pair<const char*, const ConstTensorView*> all[] = {
      {"log_dt", &call.in.log_dt}, {"log_A_real", &call.in.log_A_real}, {"A_imag", &call.in.A_imag}, {"C", &call.in.C}};
  for (const auto& [name, view] : all) {
    if (!view->present()) FailMissing(op, name);
    if (IsFloat(view->dtype())) continue;
    Fail(op, name, std::string("has dtype ") + heed::Name(view->dtype()), "f64, f32, bf16 or f16");
  }
}

nb::object RunKernel(const nb::args& args, const nb::kwargs& kwargs) {
  KernelCall call;
  Read<KernelCall>(kName, kForward, 5, args.ptr(), kwargs.ptr(), call);
  CheckParameters(kName, call);
  if (call.length < 0) FailMissing(kName, "length");
  const ConstTensorView& dt = call.in.log_dt;
  const int64_t sizes[] = {dt.rank() == 1 ? dt.size(0) : 0, call.length};
  NewArray kernel(kName, call.in.C.dtype(), sizes);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kName, [&] { Kernel(ctx, call.in, call.options, kernel.view); });
  return kernel.array;
}

nb::object RunKernelBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  KernelCall call;
  Read<KernelCall>(kBackwardName, kBackward, 5, args.ptr(), kwargs.ptr(), call);
  if (!call.dkernel.present()) FailMissing(kBackwardName, "dkernel");
  CheckParameters(kBackwardName, call);
  Gradients out;
  nb::list results;
  const auto add = [&](const ConstTensorView& x, TensorView& view) {
    NewArray array(kBackwardName, x.dtype(), x.sizes());
    view = array.view;
    results.append(array.array);
  };
  add(call.in.log_dt, out.log_dt);
  add(call.in.log_A_real, out.log_A_real);
  add(call.in.A_imag, out.A_imag);
  add(call.in.C, out.C);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kBackwardName, [&] { KernelBackward(ctx, call.in, call.dkernel, call.options, out); });
  return NewNamedTuple(type, nb::tuple(results));
}

constexpr char kKernelSignature[] =
    "def s4d_kernel(log_dt: Array, log_A_real: Array, A_imag: Array, C: Array, length: int, *, "
    "discretization: typing.Literal['zoh', 'bilinear'] = 'zoh', threads: int | None = None) -> Result";
constexpr char kKernelBackwardSignature[] =
    "def s4d_kernel_backward(dkernel: Array, log_dt: Array, log_A_real: Array, A_imag: Array, "
    "C: Array, *, discretization: typing.Literal['zoh', 'bilinear'] = 'zoh', "
    "threads: int | None = None) -> S4dKernelGradients";

constexpr Said kKernelArguments[] = {{"length", "L: taps"}, {"dkernel", "[D, L]: the gradient of the kernel"}};

constexpr char kKernelInPython[] = R"(
Returns K as a NumPy array [D, L] in the dtype of C.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> log_dt, log_A_real, A_imag = rng.random(4), rng.random((4, 8)), rng.random((4, 8))
  >>> C = rng.standard_normal((4, 8, 2))
  >>> K = heed.s4d_kernel(log_dt, log_A_real, A_imag, C, 32)
  >>> u = rng.standard_normal((1, 4, 32))
  >>> bool(np.allclose(heed.long_convolution(u, K), heed.s4d(u, log_dt, log_A_real, A_imag, C)))
  True)";

constexpr char kKernelBackwardInPython[] = R"(
Returns the named tuple heed.S4dKernelGradients: dlog_dt dlog_A_real dA_imag dC, NumPy arrays in the
shape and dtype of what they are the gradients of.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> log_dt, log_A_real, A_imag = rng.random(4), rng.random((4, 8)), rng.random((4, 8))
  >>> C = rng.standard_normal((4, 8, 2))
  >>> heed.s4d_kernel_backward(np.ones((4, 32)), log_dt, log_A_real, A_imag, C).dC.shape
  (4, 8, 2))";

}  // namespace

void Bind(nb::module_& m) {
  binding::Bind<Structs, Options>(m,
                                  {.name = "s4d",
                                   .settings = {{"discretization", std::string("zoh"), kDiscretizations},
                                                {"method", std::string("auto"), {"auto", "recurrent", "convolution"}}},
                                   .docs = doc::kDocs},
                                  DefinitionOf({}), HEED_FUNCTIONS, &Own);
  const auto docs = [](const char* about, const char* signature, const char* in_python) {
    return Docstring(about, signature, {kKernelArguments, doc::kS4dFields}, in_python);
  };
  m.def(kName, &RunKernel, nb::sig(kKernelSignature), docs(doc::kKernel, kKernelSignature, kKernelInPython).c_str());
  const nb::object type =
      NamedTupleType(m, "S4dKernelGradients", "dlog_dt dlog_A_real dA_imag dC", GradientsDoc(kBackwardName));
  m.def(
      kBackwardName,
      [type](const nb::args& args, const nb::kwargs& kwargs) { return RunKernelBackward(type, args, kwargs); },
      nb::sig(kKernelBackwardSignature),
      docs(doc::kKernelBackward, kKernelBackwardSignature, kKernelBackwardInPython).c_str());
}

}  // namespace heed::s4d
