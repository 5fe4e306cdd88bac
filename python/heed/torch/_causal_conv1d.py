# heed.torch's short causal convolution: an operator of PyTorch with gradients.
"""causal_conv1d as `torch.ops.heed.causal_conv1d`, and causal_conv1d_step on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch
from heed.torch._functions import _without_gradient

_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias=None, str? activation=None, Tensor? initial_state=None, Tensor? lengths=None, "
    "Tensor? starts=None, Tensor? cu_seqlens=None, bool reverse=False, int? threads=None"
)
_DEFAULTS = (None, None, None, None, None, None, None, None, False, None)
_DIFFERENTIABLE = (0, 1, 2, 4)  # x, weight, bias, initial_state


def _complete(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """PyTorch leaves trailing defaults away."""
    return (*arguments, *_DEFAULTS[len(arguments):])


def _results(*arguments: Any) -> tuple[Tensor, Tensor]:
    """New tensors for o, in the memory order of x, and the final state."""
    x, weight, *rest = _complete(arguments)
    if x.dim() != 3:
        raise InvalidArgument(f"causal_conv1d: x has shape {list(x.shape)}, expected rank 3: [B, D, T]")
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise InvalidArgument(f"causal_conv1d: weight has shape {list(weight.shape)}, expected [D, W] with W >= 1")
    sequences = _dispatch.num_sequences("causal_conv1d", x.shape[0], rest[5])
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty_like(x), x.new_empty((sequences, x.shape[1], weight.shape[1] - 1), dtype=dtype)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    arguments = _complete(arguments)
    o, state = _results(*arguments)
    _core._torch_causal_conv1d(*(a.detach() if isinstance(a, Tensor) else a for a in arguments), o, state)
    return o, state


def _new_gradients(needed: list[bool], arguments: tuple[Any, ...]) -> list[Tensor | None]:
    arguments = _complete(arguments)
    return [
        torch.empty_like(arguments[i]) if need else None for i, need in zip(_DIFFERENTIABLE, needed, strict=True)
    ]


def _backward(grad_o: Tensor, grad_state: Tensor | None, needed: list[bool], *arguments: Any) -> list[Tensor]:
    gradients = _new_gradients(needed, arguments)
    _core._torch_causal_conv1d_backward(grad_o, grad_state, *_complete(arguments), *gradients)
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o: Any, grad_state: Any, needed: list[bool], *arguments: Any) -> list[Tensor]:
    return [x for x in _new_gradients(needed, arguments) if x is not None]


def _differentiate(needed: tuple[bool, ...], of_results: tuple[Any, ...], *arguments: Any) -> dict[int, Any]:
    grad_o, grad_state = of_results
    wanted = [i < len(needed) and needed[i] for i in _DIFFERENTIABLE]
    if grad_o is None:
        grad_o = torch.zeros_like(arguments[0])
    found = _backward_operator(grad_o, grad_state, wanted, *arguments)
    return dict(zip((i for i, want in zip(_DIFFERENTIABLE, wanted) if want), found))


_backward_operator = _dispatch.define(
    "causal_conv1d_backward", f"(Tensor grad_o, Tensor? grad_state, bool[] needed, {_ARGUMENTS}) -> Tensor[]",
    _backward, _fake_backward,
)
_operator = _dispatch.define(
    "causal_conv1d", f"({_ARGUMENTS}) -> (Tensor, Tensor)", _forward, _results, gradients=_differentiate
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    reverse: bool = False,
    threads: int | None = None,
) -> Any:
    _dispatch.check_tensors("causal_conv1d", x=x, weight=weight)
    if torch.is_autocast_enabled("cpu") and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype("cpu"))  # float32 weights may stay
    o, state = _operator(
        x, weight, bias, activation, initial_state, *(
            _dispatch.numbers("causal_conv1d", name, value, torch.int64)
            for name, value in (("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
        ), reverse, threads,
    )
    return (o, state) if return_state else o


causal_conv1d.__doc__ = _signatures.text_on_tensors(heed.causal_conv1d)
causal_conv1d_step = _without_gradient("causal_conv1d_step", "x", "weight", "bias", "state")
