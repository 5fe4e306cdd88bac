# heed.torch's other functions: positions with gradients, and functions without.
"""rotary and t5_bias as operators with gradients; functions without gradients on tensors."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _signatures
from heed.torch import _dispatch


def _to_tensor(array: Any) -> Any:
    """heed's results as tensors that share their memory."""
    if isinstance(array, tuple):
        return tuple(_to_tensor(x) for x in array)
    if array is None or isinstance(array, Tensor):  # `out`
        return array
    if array.dtype.name == "bfloat16":  # known to PyTorch, but not by that name of NumPy's
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


_WRITTEN = ("state", "keys", "out")  # arguments that functions change


def _bare_arguments(
    operation: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any],
    changed: Sequence[str] = _WRITTEN
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a function without gradients, by position and by name."""

    def bare(name, x):
        return _dispatch.bare(operation, name, x, written=name in changed)

    names = (*names, *("argument" for _ in args[len(names):]))
    return list(map(bare, names, args)), {key: bare(key, x) for key, x in kwargs.items()}


def _without_gradient(name: str, *arguments: str, changed: Sequence[str] = _WRITTEN) -> Any:
    """heed.<name> on tensors; `arguments` are those that may be given by position, `changed` those that it changes."""
    function = getattr(heed, name)

    @functools.wraps(function, assigned=("__name__", "__qualname__"))
    def on_tensors(*args: Any, **kwargs: Any) -> Any:
        positional, named = _bare_arguments(name, arguments, args, kwargs, changed)
        result = function(*positional, **named)
        _dispatch.wrote(*(x for of, x in (*zip(arguments, args), *kwargs.items()) if of in changed))
        return _to_tensor(result)

    on_tensors.__module__ = "heed.torch"
    on_tensors.__doc__ = _signatures.text_on_tensors(function)
    on_tensors.__signature__ = _signatures.of_tensors(function)
    return on_tensors


attention_weights = _without_gradient("attention_weights", "q", "k")
attention_map = _without_gradient("attention_map", "q", "k")
merge_attention = _without_gradient("merge_attention", "parts")
certified_attention = _without_gradient("certified_attention", "q", "k", "v")
sinusoidal = _without_gradient("sinusoidal", "T", "D")
alibi_slopes = _without_gradient("alibi_slopes", "heads")
orthogonal_features = _without_gradient("orthogonal_features", "m", "d", "seed")


# Both operators are linear: each is its own derivative and the gradient of its own gradient, so that all orders exist.


def _rotary_cpu(x, positions, base, dim, interleaved, scaling, inverse):
    options = {"base": base, "dim": dim, "interleaved": interleaved, "scaling": ast.literal_eval(scaling),
               "inverse": inverse}
    return _to_tensor(heed.rotary(x.detach(), positions, **options))


_rotary = _dispatch.define(
    "rotary",
    "(Tensor x, Tensor positions, float base, int? dim, bool interleaved, str scaling, bool inverse) -> Tensor",
    _rotary_cpu,
    lambda x, *options: torch.empty_like(x, memory_format=torch.contiguous_format),
    gradients=lambda needed, gradient, x, *options: {0: _rotary(*gradient, *options[:-1], not options[-1])},
    tangents=lambda tangents, x, *options: _rotary(tangents[0], *options),
    unread=(0,),
)


def _text(value: Any) -> str:
    """A configuration dict as operators take it; written out, as torch.compile traces no library's encoder."""
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
    _dispatch.check_tensors("rotary", x=x)
    _dispatch.check_bools("rotary", interleaved=interleaved, inverse=inverse)
    positions = _dispatch.numbers("rotary", "positions", positions)
    if scaling is not None and not isinstance(scaling, dict):
        raise InvalidArgument(f"rotary: scaling is of type {type(scaling).__name__}, expected a dict or None")
    return _dispatch.call("rotary", _rotary, x, positions, base, dim, interleaved, _text(scaling), inverse)


def _t5_bias_cpu(table, Tq, Tk, bidirectional, max_distance, align):
    options = {"bidirectional": bidirectional, "max_distance": max_distance, "align": align}
    return _to_tensor(heed.t5_bias(table.detach(), Tq, Tk, **options))


def _t5_bias_backward_cpu(dbias, buckets, Tq, Tk, bidirectional, max_distance, align):
    options = {"bidirectional": bidirectional, "max_distance": max_distance, "align": align}
    return _to_tensor(heed.t5_bias_backward(dbias.detach(), Tq, Tk, buckets=buckets, **options))


_t5_bias = _dispatch.define(
    "t5_bias",
    "(Tensor table, int Tq, int Tk, bool bidirectional, int max_distance, str align) -> Tensor",
    _t5_bias_cpu,
    lambda table, Tq, Tk, *options: table.new_empty((table.shape[1], Tq, Tk)),
    gradients=lambda needed, gradient, table, *options: {0: _t5_bias_backward(*gradient, table.shape[0], *options)},
    tangents=lambda tangents, table, *options: _t5_bias(tangents[0], *options),
)
_t5_bias_backward = _dispatch.define(
    "t5_bias_backward",
    "(Tensor dbias, int buckets, int Tq, int Tk, bool bidirectional, int max_distance, str align) -> Tensor",
    _t5_bias_backward_cpu,
    lambda dbias, buckets, *options: dbias.new_empty((buckets, dbias.shape[0])),
    gradients=lambda needed, gradient, dbias, buckets, *options: {0: _t5_bias(*gradient, *options)},
    tangents=lambda tangents, dbias, *options: _t5_bias_backward(tangents[0], *options),
    unread=(0,),
)


def t5_bias(
    table: Tensor, Tq: int, Tk: int, *, bidirectional: bool, max_distance: int = 128, align: str = "bottom_right"
) -> Tensor:
    _dispatch.check_tensors("t5_bias", table=table)
    _dispatch.check_bools("t5_bias", bidirectional=bidirectional)
    return _dispatch.call("t5_bias", _t5_bias, table, Tq, Tk, bidirectional, max_distance, align)


def s4d_kernel(
    log_dt: Tensor,
    log_A_real: Tensor,
    A_imag: Tensor,
    C: Tensor,
    length: int,
    *,
    discretization: str = "zoh",
    threads: int | None = None,
) -> Tensor:
    name = "s4d_kernel"
    _dispatch.check_tensors(name, log_dt=log_dt, log_A_real=log_A_real, A_imag=A_imag, C=C)
    if log_dt.dim() != 1:
        raise InvalidArgument(f"{name}: log_dt has shape {list(log_dt.shape)}, expected [D]")
    if not C.is_floating_point():
        raise InvalidArgument(f"{name}: C has dtype {C.dtype}, expected a float dtype")
    _dispatch.check_int(name, "length", length, 0)
    impulse = torch.zeros(length, dtype=C.dtype).index_fill(0, torch.arange(min(length, 1)), 1)
    u = impulse.expand(1, log_dt.shape[0], length)
    # The kernel is the impulse response of the modes.
    options = {"discretization": discretization, "method": "recurrent", "threads": threads}
    s4d = functools.partial(torch.ops.heed.s4d.default, **options)
    try:
        return _dispatch.call(name, s4d, u, log_dt, log_A_real, A_imag, C)[0][0]
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace("s4d: ", f"{name}: ", 1)) from None


for _own, _of_arrays in ((rotary, heed.rotary), (s4d_kernel, heed.s4d_kernel), (t5_bias, heed.t5_bias)):
    _own.__doc__ = _signatures.text_on_tensors(_of_arrays)
