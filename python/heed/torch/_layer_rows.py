# Gated rows and token shift as operators of PyTorch: what layers of heed.torch.nn compute between matrix products.
"""`torch.ops.heed.gated_rows`, `torch.ops.heed.token_shift` and their gradients. `_dispatch.py` describes operators.

gated_rows, for norms and gates:

  y = r(x) x w a(gate)            r of a row: 1 / sqrt(mean of squares + eps) for norm="rms", of the sum for "unit",
  y = r(z) z w,  z = x a(gate)    the constant `factor` for "none"; a: silu, sigmoid, log_sigmoid

token_shift, with mix [M, C]:

  y_m,t = x_{t-1} + mix_m (x_t - x_{t-1})         x_{-1} = first, or zeros
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heed import _core
from heed.torch import _composed_derivatives, _dispatch

_ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid, "log_sigmoid": F.logsigmoid}


def composed_gated_rows(x: Any, gate: Any, weight: Any, norm: str, activation: str, gate_first: bool, eps: float,
                        factor: float) -> Tensor:
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


def composed_token_shift(x: Tensor, first: Any, mix: Tensor) -> Tensor:
    first = torch.zeros_like(x[:, :1]) if first is None else first[:, None]
    before = torch.cat([first, x], 1)[:, :-1]
    return torch.lerp(before, x, mix[:, None, None])


def _contiguous(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _define(name: str, arguments: str, new_result: Callable[..., Tensor], composed: Callable[..., Tensor]) -> Any:
    """The operator of three tensors, some of which may be None, and options, and that of its gradients. Derivatives of
    those are the derivatives of a composition, which PyTorch has."""
    kernel, backward_kernel = (getattr(_core, f"_torch_{name}{suffix}") for suffix in ("", "_backward"))

    def results(*given):
        return (composed(*given),)

    def forward(*given):
        y = new_result(*given[:3])
        kernel(*given, y)
        return y

    def new_gradients(needed, tensors):
        return [_contiguous(x) if need else None for x, need in zip(tensors, needed, strict=True)]

    def backward(grad, needed, *given):
        gradients = new_gradients(needed, given[:3])
        backward_kernel(grad, *given, *gradients)
        return [x for x in gradients if x is not None]

    def differentiate(needed, of_results, *given):
        wanted = [bool(need) for need in needed[:3]]
        if _dispatch.in_forward_mode():
            found = _composed_derivatives.gradients(results, of_results, wanted, given[:3], given[3:])
        else:
            found = backward_operator(of_results[0], wanted, *given)
        return dict(zip((i for i, want in enumerate(wanted) if want), found))

    def differentiate_twice(needed, of_results, grad, computed, *given):
        found = _composed_derivatives.of_gradients(results, (needed[0], *needed[2:5]), of_results, [grad], computed,
                                                   given[:3], given[3:])
        return {i + (i > 0): x for i, x in found.items()}

    backward_operator = _dispatch.define(
        f"{name}_backward", f"(Tensor grad, bool[] needed, {arguments}) -> Tensor[]", backward,
        lambda grad, needed, *given: [x for x in new_gradients(needed, given[:3]) if x is not None],
        gradients=differentiate_twice)
    return _dispatch.define(name, f"({arguments}) -> Tensor", forward, lambda *given: new_result(*given[:3]),
                            gradients=differentiate)


_gated_rows = _define(
    "gated_rows", "Tensor? x, Tensor? gate, Tensor? weight, str norm, str activation, bool gate_first, float eps, "
    "float factor", lambda x, gate, weight: _contiguous(gate if x is None else x), composed_gated_rows)
_token_shift = _define(
    "token_shift", "Tensor x, Tensor? first, Tensor mix", lambda x, first, mix: x.new_empty((len(mix), *x.shape)),
    composed_token_shift)


def _call(operator: Any, composed: Any, tensors: Sequence[Any], *options: Any) -> Tensor:
    """The operator on tensors of the dtype that all promote to, or its composition where it has no kernel."""
    given = [x for x in tensors if x is not None]
    dtype = given[0].dtype
    for x in given[1:]:
        if x.dtype != dtype:
            dtype = torch.promote_types(dtype, x.dtype)
    tensors = [x if x is None or x.dtype == dtype else x.to(dtype) for x in tensors]
    has_kernel = given[0].device.type == "cpu" and not _dispatch.in_forward_mode()
    return (operator if has_kernel else composed)(*tensors, *options)


def gated_rows(x: Tensor | None, gate: Tensor | None = None, weight: Tensor | None = None, *, norm: str = "none",
               activation: str = "silu", gate_first: bool = False, eps: float = 0.0, factor: float = 1.0) -> Tensor:
    """x and gate [..., N] of one shape, weight [N] or [H, N] for [..., H, N]. Returns y of that shape."""
    options = (norm, activation, gate_first, eps, factor)
    return _call(_gated_rows, composed_gated_rows, (x, gate, weight), *options)


def token_shift(x: Tensor, first: Tensor | None, mix: Tensor) -> Tensor:
    """x [B, T, C], first [B, C] and mix [M, C]. Returns y [M, B, T, C]."""
    return _call(_token_shift, composed_token_shift, (x, first, mix))
