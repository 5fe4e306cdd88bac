# Gated rows as an operator of PyTorch: norms, gates and their products in one pass, for layers of heed.torch.nn.
"""`torch.ops.heed.gated_rows` and its gradients. `_dispatch.py` describes operators.

  y = r(x) x w a(gate)            r of a row: 1 / sqrt(mean of squares + eps) for norm="rms", of the sum for "unit",
  y = r(z) z w,  z = x a(gate)    the constant `factor` for "none"; a: silu, sigmoid, log_sigmoid
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heed import _core
from heed.torch import _dispatch, _second_derivatives

_ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid, "log_sigmoid": F.logsigmoid}
_ARGUMENTS = ("Tensor? x, Tensor? gate, Tensor? weight, str norm, str activation, bool gate_first, float eps, "
              "float factor")


def composed(x: Any, gate: Any, weight: Any, norm: str, activation: str, gate_first: bool, eps: float,
             factor: float) -> Tensor:
    """The operator as a composition of functions of PyTorch, which has all derivatives of these."""
    y, a = x, None if gate is None else _ACTIVATIONS[activation](gate)
    if a is not None and (gate_first or y is None):
        y, a = a if y is None else y * a, None
    if norm == "none":
        y = y * factor
    else:
        # Without a tensor of squares, which torch's own makes.
        size = torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=torch.promote_types(y.dtype, torch.float32))
        squares = size * size
        y = y * torch.rsqrt((squares / y.shape[-1] if norm == "rms" else squares) + eps).to(y.dtype)
    y = y if weight is None else y * weight
    return y if a is None else y * a


def _new_result(x, gate):
    return torch.empty_like(gate if x is None else x, memory_format=torch.contiguous_format)


def _forward(x, gate, weight, *options):
    y = _new_result(x, gate)
    _core._torch_gated_rows(x, gate, weight, *options, y)
    return y


def _fake(x, gate, weight, *options):
    return _new_result(x, gate)


def _new_gradients(inputs, needed):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(inputs, needed, strict=True)
    ]


def _backward(grad, needed, x, gate, weight, *options):
    gradients = _new_gradients((x, gate, weight), needed)
    _core._torch_gated_rows_backward(grad, x, gate, weight, *options, *gradients)
    return [x for x in gradients if x is not None]


def _fake_backward(grad, needed, x, gate, weight, *options):
    return [x for x in _new_gradients((x, gate, weight), needed) if x is not None]


def _composed_gradients(grad, needed, tensors, options):
    """The gradients of those of the three tensors that are needed, as a composition."""
    places = [i for i, need in enumerate(needed) if need]

    def product(*wanted):
        given = list(tensors)
        for i, x in zip(places, wanted):
            given[i] = x
        return (composed(*given, *options),)

    return _second_derivatives.vjp(product, [tensors[i] for i in places], (grad,))


def _differentiate(needed, of_results, *arguments):
    tensors, options = arguments[:3], arguments[3:]
    wanted = [bool(need) for need in needed[:3]]
    if _dispatch.in_forward_mode():
        found = _composed_gradients(of_results[0], wanted, tensors, options)
    else:
        found = _backward_operator(of_results[0], wanted, *arguments)
    return dict(zip((i for i, want in enumerate(wanted) if want), found))


def _differentiate_twice(needed, of_results, grad, computed, *arguments):
    options, given = arguments[3:], (grad, *arguments[:3])
    places = [i for i, need in zip((0, 1, 2, 3), (needed[0], *needed[2:5])) if need]

    def gradients(*wanted):
        tensors = list(given)
        for i, x in zip(places, wanted):
            tensors[i] = x
        return _composed_gradients(tensors[0], computed, tensors[1:], options)

    found = _second_derivatives.vjp(gradients, [given[i] for i in places], of_results)
    return dict(zip((i + (i > 0) for i in places), found))


_backward_operator = _dispatch.define(
    "gated_rows_backward", f"(Tensor grad, bool[] needed, {_ARGUMENTS}) -> Tensor[]", _backward, _fake_backward,
    gradients=_differentiate_twice,
)
_operator = _dispatch.define("gated_rows", f"({_ARGUMENTS}) -> Tensor", _forward, _fake, gradients=_differentiate)


def gated_rows(x: Tensor | None, gate: Tensor | None = None, weight: Tensor | None = None, *, norm: str = "none",
               activation: str = "silu", gate_first: bool = False, eps: float = 0.0, factor: float = 1.0) -> Tensor:
    """x and gate [..., N] of one shape, weight [N] or [H, N] for [..., H, N]. The result has the dtype that all promote
    to."""
    tensors = [y for y in (x, gate, weight) if y is not None]
    dtype = tensors[0].dtype
    for y in tensors[1:]:
        if y.dtype != dtype:
            dtype = torch.promote_types(dtype, y.dtype)
    x, gate, weight = (y if y is None or y.dtype == dtype else y.to(dtype) for y in (x, gate, weight))
    if tensors[0].device.type != "cpu" or _dispatch.in_forward_mode():
        return composed(x, gate, weight, norm, activation, gate_first, eps, factor)
    return _operator(x, gate, weight, norm, activation, gate_first, eps, factor)
