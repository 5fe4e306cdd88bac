# Norms of fla and mamba_ssm: layer and RMS norms of rows or groups, with a gate, a residual or a product behind.
"""Plain PyTorch, in float32 or float64: model files import them beside the functions that heed has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heed import InvalidArgument

GATES = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


def wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool,
           group: int | None = None) -> Tensor:
    """Rows, or groups of so many channels, of norm 1, times weight, plus bias; in the wide dtype."""
    y = x.to(wide(x)).unflatten(-1, (-1, group or x.shape[-1]))
    size = y.shape[-1:]
    y = (F.rms_norm(y, size, None, eps) if rms else F.layer_norm(y, size, None, None, eps)).flatten(-2)
    y = y if weight is None else y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def norm(function: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
         prenorm: bool, residual_in_fp32: bool, rms: bool, groups: int = 1, gate: Tensor | None = None,
         activation: str = "swish", linear: tuple[Tensor, Tensor | None] | None = None) -> Any:
    """norm(x + residual), times the gate's activation, times a matrix; with prenorm also x + residual."""
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{function}: x is of type {type(x).__name__}, expected a tensor")
    if x.shape[-1] % groups:
        raise InvalidArgument(f"{function}: num_groups is {groups}, expected a divisor of {x.shape[-1]} channels")
    check_gate(function, activation)
    if residual is None:
        whole, past = x, x.to(torch.float32) if residual_in_fp32 else x
    elif residual.shape != x.shape:
        raise InvalidArgument(f"{function}: residual has shape {list(residual.shape)}, expected {list(x.shape)} as x")
    else:
        whole = x.to(wide(x)) + residual.to(wide(x))
        past = whole.to(residual.dtype)
    y = normed(whole, weight, bias, eps, rms, x.shape[-1] // groups)
    if gate is not None:
        y = y * GATES[activation](gate.to(y.dtype))
    y = y.to(x.dtype)
    if linear is not None:
        y = F.linear(y.to(linear[0].dtype), *linear)
    return (y, past) if prenorm else y


def check_gate(function: str, activation: str) -> None:
    if activation not in GATES:
        raise InvalidArgument(f"{function}: activation is {activation!r}, "
                              f"expected one of {', '.join(map(repr, GATES))}")


class NormBase(nn.Module):
    """Weight and bias of a norm, which may be absent."""

    bias: Tensor | None
    weight: Tensor | None

    def __init__(self, hidden_size: int, elementwise_affine: bool, bias: bool, eps: float, device: Any,
                 dtype: Any) -> None:
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        factory = {"device": device, "dtype": dtype}
        self.register_parameter("weight",
                                nn.Parameter(torch.ones(hidden_size, **factory)) if elementwise_affine else None)
        has_bias = elementwise_affine and bias
        self.register_parameter("bias", nn.Parameter(torch.zeros(hidden_size, **factory)) if has_bias else None)

    def reset_parameters(self) -> None:
        for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"
