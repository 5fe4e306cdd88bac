# attention as an operator of PyTorch: its kernels, gradients, autocast and vmap.
"""`torch.ops.heed.attention` and its gradients. How an operator is made is in `_dispatch.py`."""

import ctypes
import os
import pathlib

import torch
from torch import Tensor

from heed import InvalidArgument, _core
from heed.torch import _attention_derivatives, _dispatch
from heed.torch._options import Options

_HEADS_FIRST = ("heads_first", "bool heads_first=False", False, False, False)
attention_options = Options("attention", [_HEADS_FIRST, *_core._attention_options])
OPTIONS, _OPTIONS = attention_options.names, attention_options.schema
_FORWARD = ("q", "k", "v", *OPTIONS)
_BACKWARD = ("the gradient of o", "the gradient of lse", "q", "k", "v", "o", "lse", "needed", *OPTIONS)
_PACKED, _DROPOUT, _PATTERN = (OPTIONS.index(name) for name in ("cu_seqlens_q", "dropout", "pattern"))
_DIFFERENTIABLE = [i for i, option in enumerate(attention_options.table) if option.has_gradient]


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


def _attention_kernel(q, k, v, *options):
    o, lse = new_results(q, k, v, options)
    _core._torch_attention(q, k, v, o, lse, *options)
    return o, lse


def _attention_meta(q, k, v, *options):
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
    inputs = (q, k, v, *(_option(options, i) for i in _DIFFERENTIABLE))
    return [_gradient_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]


def _attention_backward_kernel(grad_o, grad_lse, q, k, v, o, lse, needed, *options):
    gradients = _gradients(q, k, v, needed, options)
    _core._torch_attention_backward(grad_o, grad_lse, q, k, v, o, lse, *gradients, *options)
    return [gradient for gradient in gradients if gradient is not None]


def _attention_backward_meta(grad_o, grad_lse, q, k, v, o, lse, needed, *options):
    return [gradient for gradient in _gradients(q, k, v, needed, options) if gradient is not None]


# --- gradients --------------------------------------------------------------------------------------------------------


# Places of q, k, v and of the options that have a gradient, among the arguments of the operator and of its gradients.
_AT = [0, 1, 2] + [3 + i for i in _DIFFERENTIABLE]
_AT_BACKWARD = [2, 3, 4] + [8 + i for i in _DIFFERENTIABLE]


def _at(places, values):
    return [values[i] if i < len(values) else None for i in places]


def _differentiate(needed, of_results, q, k, v, *options_and_results):
    *options, o, lse = options_and_results
    grad_o, grad_lse = of_results
    if grad_o is None:
        grad_o = torch.zeros_like(o)
    wanted = [bool(x) for x in _at(_AT, needed)]
    found = _attention_backward(grad_o, grad_lse, q, k, v, o, lse, wanted, *options)
    return dict(zip((i for i, want in zip(_AT, wanted) if want), found))


def _tangents(of_arguments, q, k, v, *options_and_results):
    *options, o, lse = options_and_results
    none = [False] * len(_AT)
    return tuple(_derivatives(*_at(_AT, of_arguments), None, None, q, k, v, o, lse, none, *options))


def _differentiate_twice(needed, of_results, *arguments):
    grad_o, grad_lse, q, k, v, o, lse, computed, *options = arguments
    along, of_results = [], iter(of_results)
    for has_result in computed:
        along.append(next(of_results) if has_result else None)
    wanted = [bool(x) for x in _at(_AT_BACKWARD, needed)]
    o_along, lse_along, *found = _derivatives(*along, grad_o, grad_lse, q, k, v, o, lse, wanted, *options)
    found = dict(zip((i for i, want in zip(_AT_BACKWARD, wanted) if want), found))
    return found | {0: o_along, 1: lse_along}


def _tangents_of_gradients(of_arguments, *arguments):
    grad_o, grad_lse, *tensors, computed = arguments[:8]
    options = arguments[8:]
    _, _, *found = _derivatives(*_at(_AT_BACKWARD, of_arguments), grad_o, grad_lse, *tensors, computed, *options)
    of_o, of_lse = of_arguments[:2]
    if of_o is not None or of_lse is not None:  # the gradients are linear in these
        of_o = torch.zeros_like(grad_o) if of_o is None else of_o
        more = _attention_backward(of_o, of_lse, *tensors, computed, *options)
        found = [x + y for x, y in zip(found, more)]
    return tuple(found)


# --- vmap -------------------------------------------------------------------------------------------------------------


def _attention_vmap(info, in_dims, *arguments):
    q, k, v, *options = arguments
    by_sequence = any(isinstance(x, Tensor) for x in options) or _option(options, _PATTERN) is not None
    if by_sequence or q.dim() - (in_dims[0] is not None) != 4 or _option(options, _DROPOUT) or not info.batch_size:
        return _dispatch.over_slices(_attention, _attention_meta, info, in_dims, arguments)
    # Sequences of the mapped axis are sequences of the batch.
    size = info.batch_size
    flat = []
    for x, dim in zip((q, k, v), in_dims):
        x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        flat.append(x.flatten(0, 1))
    return tuple(x.unflatten(0, (size, -1)) for x in _attention(*flat, *options)), (0, 0)


_attention_backward = _dispatch.define(
    "attention_backward",
    "(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"bool[] needed, {_OPTIONS}) -> Tensor[]",
    _attention_backward_kernel,
    _attention_backward_meta,
    gradients=_differentiate_twice,
    tangents=_tangents_of_gradients,
    names=_BACKWARD,
    on_gpus=True,
)
_derivatives = _attention_derivatives.define(attention_options, _attention_backward, _gradient_like)
_attention = _dispatch.define(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    _attention_kernel,
    _attention_meta,
    gradients=_differentiate,
    tangents=_tangents,
    keeps_results=True,
    vmap=_attention_vmap,
    num_cast=3,
    on_gpus=True,
)
