# The operators torch.ops.heed: schemas, kernels, gradients, and what PyTorch's transforms need to know of them.
"""Operators of PyTorch that compute on heed.

`heed::attention` and `heed::attention_backward` are registered once, by hand instead of through
`torch.library.register_autograd`, which costs 60 microseconds more per call and refuses torch.func.grad. Each has a
kernel for CPU tensors, one for tensors without data, an autograd formula, an autocast rule and a rule for vmap; every
other kind of tensor is refused by name.
"""

import ctypes
import os
import pathlib

import torch
from torch import Tensor, _C
from torch._functorch.utils import enable_single_level_autograd_function

from heed import InvalidArgument, Unsupported, _core

# "type name=default, ...": options have the same order in both schemas and in the functions of heed._core.
_OPTIONS = _core._torch_attention_options
OPTIONS = tuple(option.split()[1].partition("=")[0] for option in _OPTIONS.split(", "))
_FORWARD = ("q", "k", "v", *OPTIONS)
_BACKWARD = ("the gradient of o", "the gradient of lse", "q", "k", "v", "o", "lse", "needed", *OPTIONS)
_BIAS, _SINKS, _ALIBI, _PACKED = (OPTIONS.index(name) for name in ("bias", "sinks", "alibi", "cu_seqlens_q"))
_DROPOUT = OPTIONS.index("dropout")

_library = torch.library.Library("heed", "DEF")
_library.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)")
_library.define(
    "attention_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"bool[] needed, {_OPTIONS}) -> Tensor[]"
)
_attention = torch.ops.heed.attention.default
_attention_backward = torch.ops.heed.attention_backward.default


def _connect() -> None:
    """Gives the extension module PyTorch's tensor type and thread pool."""
    library = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    functions = (getattr(library, name, None) for name in ("torch_parallel_for", "torch_get_num_threads"))
    _core._connect_torch(Tensor, *(ctypes.cast(f, ctypes.c_void_p).value if f else 0 for f in functions))
    os.register_at_fork(after_in_child=_core._after_fork)


_connect()


# --- kernels ----------------------------------------------------------------------------------------------------------


def _option(options, index):
    """The option with this index; PyTorch leaves trailing defaults away."""
    return options[index] if index < len(options) else None


def new_results(q, k, v, options):
    """New tensors for o and lse."""
    if q.dim() == 4 and v.dim() == 4:
        batch, rows, heads, _ = q.shape
        width = v.shape[3]
        if options and options[0]:  # heads first: [B, H, T, Dv] in the memory of [B, T, H, Dv]
            rows, heads = heads, rows
            sizes, strides = (batch, heads, rows, width), (rows * heads * width, width, heads * width, 1)
        else:
            sizes, strides = (batch, rows, heads, width), (rows * heads * width, heads * width, width, 1)
        o = q.new_empty_strided(sizes, strides)  # a third faster than new_empty, and than a view of it
        lse_shape = (batch, heads, rows) if _option(options, _PACKED) is None else (heads, rows)
    elif q.dim() == 3 and v.dim() == 3:
        rows, heads, _ = q.shape
        o = q.new_empty((rows, heads, v.shape[2]))
        lse_shape = (heads, rows)
    else:
        name, x = ("v", v) if q.dim() in (3, 4) else ("q", q)
        raise InvalidArgument(
            f"attention: {name} has shape {list(x.shape)}, expected [B, T, H, D], or packed [T_total, H, D]"
        )
    if q.dtype is torch.float32 or q.dtype is torch.float64:
        return o, q.new_empty(lse_shape)
    return o, q.new_empty(lse_shape, dtype=torch.float32)


def _attention_cpu(q, k, v, *options):
    o, lse = new_results(q, k, v, options)
    _core._torch_attention(q, k, v, o, lse, *options)
    return o, lse


def _attention_meta(q, k, v, *options):
    for name, x in zip(_FORWARD, (q, k, v, *options)):
        if isinstance(x, Tensor) and x.device != q.device:
            raise InvalidArgument(f"attention: {name} is on {x.device}, expected {q.device} as q")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise InvalidArgument(f"attention: {name} has dtype {x.dtype}, expected {q.dtype} as q")
    return new_results(q, k, v, options)


def _gradient_like(x):
    """A new tensor for the gradient of x: in the order of x's axes in memory, the last one contiguous."""
    gradient = torch.empty_like(x)
    if x.dim() and gradient.stride(-1) != 1 and gradient.shape[-1] > 1:
        gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    return gradient


def _gradients(q, k, v, needed, options):
    inputs = (q, k, v, _option(options, _BIAS), _option(options, _SINKS), _option(options, _ALIBI))
    return [_gradient_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]


def _attention_backward_cpu(grad_o, grad_lse, q, k, v, o, lse, needed, *options):
    gradients = _gradients(q, k, v, needed, options)
    _core._torch_attention_backward(grad_o, grad_lse, q, k, v, o, lse, *gradients, *options)
    return [gradient for gradient in gradients if gradient is not None]


def _attention_backward_meta(grad_o, grad_lse, q, k, v, o, lse, needed, *options):
    return [gradient for gradient in _gradients(q, k, v, needed, options) if gradient is not None]


def _kind(x):
    """What is special about a tensor that heed cannot read, or None."""
    if x.is_nested:
        return "nested"
    if x.is_quantized:
        return "quantized"
    return None if x.layout == torch.strided and x.device.type == "cpu" else str(x.layout).removeprefix("torch.")


def refuse(names, arguments, operation="attention"):
    """Raises InvalidArgument for the first tensor that heed cannot read."""
    for name, x in zip(names, arguments):
        if isinstance(x, Tensor) and _kind(x) is not None:
            raise InvalidArgument(
                f"{operation}: {name} is a {_kind(x)} tensor on {x.device}, expected a strided tensor on cpu"
            )


# --- gradients --------------------------------------------------------------------------------------------------------

_PLAIN = _C.DispatchKeySet(_C.DispatchKey.CPU).raw_repr()
_is_plain = {}  # by the keys of a call: nothing but a CPU kernel is left after autograd


def _below_autograd(operator, kernel, keyset, arguments):
    """Goes on with whatever comes after autograd; where that is the CPU kernel, without another dispatch."""
    plain = _is_plain.get(keyset.raw_repr())
    if plain:
        return kernel(*arguments)
    if plain is None:
        plain = (keyset & _C._after_autograd_keyset).raw_repr() == _PLAIN
        _is_plain[keyset.raw_repr()] = plain
    if plain:
        return kernel(*arguments)
    with _C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & _C._after_autograd_keyset, *arguments)


def _apply(function, keyset, arguments):
    """Records `function` for this level of torch.func, or of plain autograd."""
    if _is_plain.get(keyset.raw_repr()):
        return function.apply(keyset, *arguments)
    with enable_single_level_autograd_function():
        return function.apply(keyset, *arguments)


_forward_ad = torch.autograd.forward_ad  # its derivatives are refused by _Attention.jvp
_any_requires_grad, _is_grad_enabled = _C._any_requires_grad, _C.is_grad_enabled


def _needs_gradient(arguments):
    return (_is_grad_enabled() and _any_requires_grad(*arguments)) or _forward_ad._current_level >= 0


# One level of torch.func at a time, as operators written in C++ do: hence not torch.autograd.Function itself.
class _Attention(torch.autograd.function._SingleLevelFunction):
    @staticmethod
    def forward(ctx, keyset, q, k, v, *options):
        with _C._AutoDispatchBelowAutograd():
            o, lse = _below_autograd(_attention, _attention_cpu, keyset, (q, k, v, *options))
        tensors = [x if isinstance(x, Tensor) else None for x in options]
        ctx.save_for_backward(q, k, v, o, lse, *tensors)
        ctx.options = tuple(None if isinstance(x, Tensor) else x for x in options)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        options = [x if tensor is None else tensor for x, tensor in zip(ctx.options, tensors)]
        if grad_o is None:
            grad_o = torch.zeros_like(o)
        wanted = ctx.needs_input_grad
        at = [1, 2, 3] + [4 + i for i in (_BIAS, _SINKS, _ALIBI)]
        needed = [i < len(wanted) and wanted[i] for i in at]
        found = iter(_attention_backward(grad_o, grad_lse, q, k, v, o, lse, needed, *options))
        gradients = [None] * len(wanted)
        for i, need in zip(at, needed):
            if need:
                gradients[i] = next(found)
        return tuple(gradients)


    @staticmethod
    def jvp(ctx, *tangents):
        raise Unsupported("attention: a forward derivative was asked for, which heed does not have")


class _AttentionBackward(torch.autograd.function._SingleLevelFunction):
    @staticmethod
    def forward(ctx, keyset, *arguments):
        with _C._AutoDispatchBelowAutograd():
            return tuple(_below_autograd(_attention_backward, _attention_backward_cpu, keyset, arguments))

    @staticmethod
    def backward(ctx, *grads):
        raise Unsupported("attention: a second derivative was asked for, which heed does not have")

    jvp = backward


def _attention_autograd(keyset, *arguments):
    if _needs_gradient(arguments):
        return _apply(_Attention, keyset, arguments)
    return _below_autograd(_attention, _attention_cpu, keyset, arguments)


def _attention_backward_autograd(keyset, *arguments):
    if _needs_gradient(arguments):
        return list(_apply(_AttentionBackward, keyset, arguments))
    return _below_autograd(_attention_backward, _attention_backward_cpu, keyset, arguments)


# --- autocast and vmap ------------------------------------------------------------------------------------------------


def _attention_autocast(q, k, v, *options):
    dtype = torch.get_autocast_dtype("cpu")
    with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C.DispatchKey.AutocastCPU)):
        return _attention(*(x.to(dtype) if _is_cast(x) else x for x in (q, k, v)), *options)


def _is_cast(x):
    return x.is_floating_point() and x.dtype != torch.float64 and x.device.type == "cpu"


def _over_slices(operator, info, in_dims, arguments):
    """vmap as a loop: one call per slice. Options mean the same in it, whatever they are."""
    calls = []
    for i in range(info.batch_size):
        sliced = (x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims))
        calls.append(operator(*sliced))
    return [torch.stack(results) for results in zip(*calls)]


def _attention_vmap(info, in_dims, *arguments):
    q, k, v, *options = arguments
    options_batched = any(dim is not None for dim in in_dims[3:])
    by_sequence = any(isinstance(x, Tensor) for x in options)
    if options_batched or by_sequence or q.dim() - (in_dims[0] is not None) != 4 or _option(options, _DROPOUT):
        return tuple(_over_slices(_attention, info, in_dims, arguments)), (0, 0)
    # Sequences of the mapped axis are sequences of the batch.
    size = info.batch_size
    flat = []
    for x, dim in zip((q, k, v), in_dims):
        x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        flat.append(x.flatten(0, 1))
    return tuple(x.unflatten(0, (size, -1)) for x in _attention(*flat, *options)), (0, 0)


def _attention_backward_vmap(info, in_dims, *arguments):
    needed = arguments[7]
    # A list counts as an axis of its own for vmap's bookkeeping.
    dims = tuple(None if isinstance(dim, (list, tuple)) else dim for dim in in_dims)
    results = _over_slices(_attention_backward, info, dims, arguments)
    return results, [0] * sum(needed)


def _register() -> None:
    kernels = {
        "attention": (_FORWARD, _attention_cpu, _attention_meta, _attention_autograd, _attention_vmap),
        "attention_backward": (
            _BACKWARD,
            _attention_backward_cpu,
            _attention_backward_meta,
            _attention_backward_autograd,
            _attention_backward_vmap,
        ),
    }
    for name, (arguments, cpu, meta, autograd, vmap) in kernels.items():
        _library.impl(name, cpu, "CPU")
        _library.impl(name, lambda *given, names=arguments: refuse(names, given), "CompositeExplicitAutograd")
        _library.impl(name, autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"heed::{name}", meta, lib=_library)
        torch.library.register_vmap(f"heed::{name}", vmap, lib=_library)
    _library.impl("attention", _attention_autocast, "AutocastCPU")


_register()
