// heed.attention_backward.
#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "docstrings/attention.h"
#include "heed/distributed/attention.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_call_py.h"
#include "heed/ops/exact/attention/attention_options_py.h"
#include "heed/ops/exact/attention/attention_signature_py.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "attention_backward";

constexpr char kBackwardInPython[] = R"(
o and lse are what heed.attention returned for the same q, k, v and options. Arrays whose last
axis is not contiguous are copied. Returns the named tuple heed.AttentionGradients: dq, dk, dv,
dbias, dsinks, dalibi, dlog_decay, drelative_bias, NumPy arrays in the shape and dtype of what
they are the gradients of (float64 for a list); None where that was not given, and dbias without
need_dbias=True.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 6, 2, 16), np.float32)
  >>> o, lse = heed.attention(q, k, v, causal=True, return_lse=True)
  >>> heed.attention_backward(do, q, k, v, o, lse, causal=True).dq.shape
  (1, 6, 2, 16))";

constexpr Said kResults[] = {{"o", "what heed.attention returned"}, {"lse", "what heed.attention returned with it"}};

constexpr char kBackwardSignature[] =
    "def attention_backward(do: Array, q: Array, "
    "k: Array, v: Array, o: Array, "
    "lse: Array, *, "
    "dlse: Array | None = None, "
    "need_dbias: bool = False, "
    "**options) -> AttentionGradients";

nb::object AttentionBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  const Options& options = call.options;
  ReadInGroup(
      [&] {
        ReadBackwardCall(kOp, args.ptr(), kwargs.ptr(), call);
        if (!call.d_o.present()) FailMissing(kOp, "do");
        CheckForResults(kOp, call);
        if (!call.o.present()) FailMissing(kOp, "o");
        if (!call.lse.present()) FailMissing(kOp, "lse");
        if (options.dropout > 0 && !call.seed_given) {
          Fail(kOp, "seed", "is None", "that of the forward pass, whose pairs are dropped again");
        }
        if (call.need_dbias && !options.bias.present()) {
          Fail(kOp, "need_dbias", "is True without a bias", "bias with it");
        }
      },
      kOp, kwargs.ptr());

  Gradients out;
  nb::list gradients;
  ForEachGradient(call.in, options, [&](auto, TensorView Gradients::* gradient, auto, const ConstTensorView& x) {
    if (!x.present() || (gradient == &Gradients::dbias && !call.need_dbias)) return gradients.append(nb::none());
    NewArray array(kOp, x.dtype(), x.sizes());
    out.*gradient = array.view;
    gradients.append(array.array);
  });

  const BackwardInputs in = {call.in.q, call.in.k, call.in.v, call.o, call.lse, call.d_o, call.d_lse};
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, [&] {
    if (!call.communicator) return Backward(ctx, in, options, out);
    distributed::Backward(ctx, call.communicator->group(), in, options, out, call.divided);
  });
  return NewNamedTuple(type, nb::tuple(gradients));
}

}  // namespace

void BindBackward(nb::module_& m) {
  std::string names;
  ForEachGradient({}, {},
                  [&](const std::string& name, auto, auto, auto) { names += (names.empty() ? "" : " ") + name; });
  const nb::object gradients = NamedTupleType(m, "AttentionGradients", names.c_str(),
                                              GradientsDoc(kOp) + " dbias is None without need_dbias=True.");
  m.def(
      kOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) {
        return AttentionBackward(gradients, args, kwargs);
      },
      nb::sig(Spelled(kBackwardSignature, &TakesAll, std::string(kDivided) + kThreads)),
      Docstring(doc::kBackward, kBackwardSignature, {kResults, kArguments, doc::kAttentionFields}, kBackwardInPython)
          .c_str());
}

}  // namespace heed::attention
