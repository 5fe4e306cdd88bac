# heed.torch's other functions: positions with gradients, and what has none.
"""rotary and t5_bias as operators with gradients; functions without gradients on tensors."""

from __future__ import annotations

import ast
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

import heed
from heed import InvalidArgument


def _to_tensor(array: Any) -> Any:
    """heed's results as tensors that share their memory."""
    if isinstance(array, tuple):
        return tuple(_to_tensor(x) for x in array)
    if array.dtype.name == "bfloat16":  # known to PyTorch, but not by that name of NumPy's
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _detached(function: str, name: str, value: Any) -> Any:
    """`value` without its graph, of which there must be none."""
    if isinstance(value, (tuple, list)):
        return type(value)(_detached(function, name, x) for x in value)
    if not isinstance(value, Tensor):
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{function}: {name} requires a gradient, which this function does not have, expected a detached tensor"
        )
    return value.detach()


def _without_gradient(name: str, *arguments: str) -> Any:
    """heed.<name> on tensors; `arguments` are those that may be given by position."""
    function = getattr(heed, name)

    @functools.wraps(function, assigned=("__doc__", "__name__"))
    def on_tensors(*args: Any, **kwargs: Any) -> Any:
        names = (*arguments, *("argument" for _ in args[len(arguments):]))
        args = tuple(_detached(name, of, x) for of, x in zip(names, args))
        return _to_tensor(function(*args, **{key: _detached(name, key, x) for key, x in kwargs.items()}))

    return on_tensors


attention_weights = _without_gradient("attention_weights", "q", "k")
attention_map = _without_gradient("attention_map", "q", "k")
merge_attention = _without_gradient("merge_attention", "parts")
sinusoidal = _without_gradient("sinusoidal", "T", "D")
alibi_slopes = _without_gradient("alibi_slopes", "heads")
orthogonal_features = _without_gradient("orthogonal_features", "m", "d", "seed")


# Both operators are linear: each is the gradient of its own gradient, so that all derivatives exist.


@torch.library.custom_op("heed::rotary", mutates_args=(), device_types="cpu")
def _rotary(
    x: Tensor, positions: Tensor, base: float, dim: int | None, interleaved: bool, scaling: str, inverse: bool
) -> Tensor:
    options = {"base": base, "dim": dim, "interleaved": interleaved, "scaling": ast.literal_eval(scaling), "inverse": inverse}
    return _to_tensor(heed.rotary(x.detach(), positions, **options))


@_rotary.register_fake
def _(x, positions, base, dim, interleaved, scaling, inverse):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rotary_context(ctx, inputs, output):
    _, positions, *ctx.options, ctx.inverse = inputs
    ctx.save_for_backward(positions)


def _rotary_backward(ctx, gradient):
    (positions,) = ctx.saved_tensors
    return _rotary(gradient, positions, *ctx.options, not ctx.inverse), *(None,) * 6


_rotary.register_autograd(_rotary_backward, setup_context=_rotary_context)


def _text(value: Any) -> str:
    """A dict of a model's configuration as operators take it; spelt out, as torch.compile follows no library's encoder."""
    if isinstance(value, dict):
        return "{" + ", ".join([_text(key) + ": " + _text(item) for key, item in value.items()]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_text(item) for item in value]) + "]"
    return repr(value)


def rotary(
    x: Tensor,
    positions: Any,
    *,
    base: float = 10000.0,
    dim: int | None = None,
    interleaved: bool,
    scaling: dict[str, Any] | None = None,
    inverse: bool = False,
) -> Tensor:
    if not isinstance(positions, Tensor):
        positions = torch.as_tensor(positions)
    return _rotary(x, positions, base, dim, interleaved, _text(scaling), inverse)


@torch.library.custom_op("heed::t5_bias", mutates_args=(), device_types="cpu")
def _t5_bias(table: Tensor, Tq: int, Tk: int, bidirectional: bool, max_distance: int, align: str) -> Tensor:
    options = {"bidirectional": bidirectional, "max_distance": max_distance, "align": align}
    return _to_tensor(heed.t5_bias(table.detach(), Tq, Tk, **options))


@torch.library.custom_op("heed::t5_bias_backward", mutates_args=(), device_types="cpu")
def _t5_bias_backward(
    dbias: Tensor, buckets: int, Tq: int, Tk: int, bidirectional: bool, max_distance: int, align: str
) -> Tensor:
    options = {"bidirectional": bidirectional, "max_distance": max_distance, "align": align}
    return _to_tensor(heed.t5_bias_backward(dbias.detach(), Tq, Tk, buckets=buckets, **options))


@_t5_bias.register_fake
def _(table, Tq, Tk, *options):
    return table.new_empty((table.shape[1], Tq, Tk))


@_t5_bias_backward.register_fake
def _(dbias, buckets, *options):
    return dbias.new_empty((buckets, dbias.shape[0]))


def _keep_options(ctx, inputs, output):
    if len(inputs) == 6:
        ctx.buckets, ctx.options = inputs[0].shape[0], inputs[1:]
    else:
        ctx.options = inputs[2:]


_t5_bias.register_autograd(
    lambda ctx, gradient: (_t5_bias_backward(gradient, ctx.buckets, *ctx.options), *(None,) * 5),
    setup_context=_keep_options,
)
_t5_bias_backward.register_autograd(
    lambda ctx, gradient: (_t5_bias(gradient, *ctx.options), *(None,) * 6), setup_context=_keep_options
)


def t5_bias(
    table: Tensor, Tq: int, Tk: int, *, bidirectional: bool, max_distance: int = 128, align: str = "bottom_right"
) -> Tensor:
    return _t5_bias(table, Tq, Tk, bidirectional, max_distance, align)


rotary.__doc__, t5_bias.__doc__ = heed.rotary.__doc__, heed.t5_bias.__doc__
