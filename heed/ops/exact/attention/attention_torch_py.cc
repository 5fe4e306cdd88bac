// Functions that heed.torch's operators call: attention on tensors allocated by PyTorch, including the results.
#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "heed/distributed/attention.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_call_py.h"
#include "heed/ops/exact/attention/attention_options_py.h"
#include "python/layout.h"
#include "python/runtime.h"
#include "python/torch_host.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "attention";

// Views [B, H, T, D] as [B, T, H, D].
template <class View>
void SwapHeads(View& x) {
  if (x.rank() != 4) return;
  x = View(x.data(), x.dtype(), {x.size(0), x.size(2), x.size(1), x.size(3)},
           {x.stride(0), x.stride(2), x.stride(1), x.stride(3)}, x.device());
}

void Attention(const nb::args& args) {
  Call call;
  ReadTorchCall(kOp, args.ptr(), call);
  Outputs out = {call.out_view, call.out_lse};
  if (call.heads_first) {
    for (ConstTensorView* x : {&call.in.q, &call.in.k, &call.in.v}) SwapHeads(*x);
    SwapHeads(out.o);
  } else {
    WarnOfHeadsBeforeTokens(kOp, call.in.q, call.in.k, call.in.v);
  }
  Context& ctx = TorchContext(call.num_threads, call.in.q.device());
  ComputeForTorch(kOp, [&] { Forward(ctx, call.in, call.options, out); });
}

void AttentionBackward(const nb::args& args) {
  Call call;
  ReadTorchBackwardCall(kOp, args.ptr(), call);
  BackwardInputs in = {call.in.q, call.in.k, call.in.v, call.o, call.lse, call.d_o, call.d_lse};
  Gradients& out = call.gradients;
  if (call.heads_first) {
    for (ConstTensorView* x : {&in.q, &in.k, &in.v, &in.o, &in.d_o}) SwapHeads(*x);
    for (TensorView* x : {&out.dq, &out.dk, &out.dv}) SwapHeads(*x);
  }
  Context& ctx = TorchContext(call.num_threads, call.in.q.device());
  ComputeForTorch(kOp, [&] { Backward(ctx, in, call.options, out); });
}

// Reads the `count` arguments that a call of a group has before those of the operator, which are returned:
// communicator, method, order, what ranks compare beside the call, whether the seed of dropout is that of rank 0, and
// in the backward pass a capsule with what the forward pass received.
nb::tuple ReadGroup(const nb::args& args, size_t count, Call& call) {
  ReadProcesses(kOp, args[0], args[1], args[2], call);
  call.divided.note = nb::cast<std::string>(args[3]);
  call.divided.seed_of_first = nb::cast<bool>(args[4]);
  return nb::steal<nb::tuple>(
      PyTuple_GetSlice(args.ptr(), static_cast<Py_ssize_t>(count), static_cast<Py_ssize_t>(args.size())));
}

nb::capsule AttentionInGroup(const nb::args& args) {
  Call call;
  const nb::tuple rest = ReadGroup(args, 5, call);
  auto received = std::make_unique<distributed::AttentionReceived>();
  call.divided.received = received.get();
  ReadInGroup([&] { ReadTorchCall(kOp, rest.ptr(), call); }, call.communicator->group());
  const Outputs out = {call.out_view, call.out_lse};
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(
      kOp, [&] { distributed::Forward(ctx, call.communicator->group(), call.in, call.options, out, call.divided); });
  return nb::capsule(received.release(),
                     [](void* x) noexcept { delete static_cast<distributed::AttentionReceived*>(x); });
}

void AttentionBackwardInGroup(const nb::args& args) {
  Call call;
  const nb::tuple rest = ReadGroup(args, 6, call);
  call.divided.received = static_cast<distributed::AttentionReceived*>(nb::cast<nb::capsule>(args[5]).data());
  ReadTorchBackwardCall(kOp, rest.ptr(), call);
  const BackwardInputs in = {call.in.q, call.in.k, call.in.v, call.o, call.lse, call.d_o, call.d_lse};
  Context& ctx = TorchContext(call.num_threads, call.in.q.device());
  ComputeForTorch(kOp, [&] {
    distributed::Backward(ctx, call.communicator->group(), in, call.options, call.gradients, call.divided);
  });
}

void AttentionWeights(const nb::args& args) {
  Call call;
  ReadTorchWeightsCall(kOp, args.ptr(), call);
  if (call.heads_first) {
    for (ConstTensorView* x : {&call.in.q, &call.in.k}) SwapHeads(*x);
  }
  Context& ctx = TorchContext(call.num_threads, call.in.q.device());
  ComputeForTorch(
      kOp, [&] { TileOfWeights(ctx, {call.in.q, call.in.k, call.lse}, call.options, call.tile, call.out_view); });
}

}  // namespace

void BindTorch(nb::module_& m) {
  m.attr("_attention_options") = ForTorch(TorchOptions());
  m.def("_torch_attention", &Attention);
  m.def("_torch_attention_backward", &AttentionBackward);
  m.def("_torch_attention_in_group", &AttentionInGroup);
  m.def("_torch_attention_backward_in_group", &AttentionBackwardInGroup);
  m.def("_torch_attention_weights", &AttentionWeights);
}

}  // namespace heed::attention
