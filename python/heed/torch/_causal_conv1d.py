# heed.torch's short causal convolution: an operator of PyTorch with gradients.
"""causal_conv1d as `torch.ops.heed.causal_conv1d`, and causal_conv1d_step on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, Unsupported, _core
from heed.torch._functions import _without_gradient
from heed.torch._recurrent import _integers

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
    packed = rest[5]
    if x.dim() != 3:
        raise InvalidArgument(f"causal_conv1d: x has shape {list(x.shape)}, expected rank 3: [B, D, T]")
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise InvalidArgument(f"causal_conv1d: weight has shape {list(weight.shape)}, expected [D, W] with W >= 1")
    sequences = x.shape[0] if packed is None else packed.shape[0] - 1
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty_like(x), x.new_empty((sequences, x.shape[1], weight.shape[1] - 1), dtype=dtype)


@torch.library.custom_op(
    "heed::causal_conv1d", mutates_args=(), device_types="cpu", schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def _operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    arguments = _complete(arguments)
    o, state = _results(*arguments)
    _core._torch_causal_conv1d(*(a.detach() if isinstance(a, Tensor) else a for a in arguments), o, state)
    return o, state


def _new_gradients(needed: list[bool], arguments: tuple[Any, ...]) -> list[Tensor | None]:
    arguments = _complete(arguments)
    return [
        torch.empty_like(arguments[i]) if need else None for i, need in zip(_DIFFERENTIABLE, needed, strict=True)
    ]


@torch.library.custom_op(
    "heed::causal_conv1d_backward", mutates_args=(), device_types="cpu",
    schema=f"(Tensor grad_o, Tensor? grad_state, bool[] needed, {_ARGUMENTS}) -> Tensor[]",
)
def _backward_operator(grad_o: Tensor, grad_state: Tensor | None, needed: list[bool], *arguments: Any) -> list[Tensor]:
    gradients = _new_gradients(needed, arguments)
    _core._torch_causal_conv1d_backward(grad_o, grad_state, *_complete(arguments), *gradients)
    return [x for x in gradients if x is not None]


_operator.register_fake(_results)


@_backward_operator.register_fake
def _(grad_o: Any, grad_state: Any, needed: list[bool], *arguments: Any) -> list[Tensor]:
    return [x for x in _new_gradients(needed, arguments) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    inputs = _complete(inputs)
    ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in inputs))
    ctx.others = tuple(None if isinstance(a, Tensor) else a for a in inputs)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_o: Any, grad_state: Any) -> tuple[Any, ...]:
    arguments = [a if tensor is None else tensor for a, tensor in zip(ctx.others, ctx.saved_tensors)]
    needed = [i < len(ctx.needs_input_grad) and ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    if grad_o is None:
        grad_o = torch.zeros_like(arguments[0])
    found = iter(_backward_operator(grad_o, grad_state, needed, *arguments))
    results: list[Any] = [None] * len(arguments)
    for i, need in zip(_DIFFERENTIABLE, needed):
        if need:
            results[i] = next(found)
    return tuple(results)


def _refuse_second(ctx: Any, *gradients: Any) -> None:
    raise Unsupported("causal_conv1d: a second derivative was asked for, which heed does not have")


_operator.register_autograd(_differentiate, setup_context=_keep)
_backward_operator.register_autograd(_refuse_second, setup_context=lambda ctx, inputs, output: None)


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
    if torch.is_autocast_enabled("cpu") and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype("cpu"))  # float32 weights may stay
    o, state = _operator(
        x, weight, bias, activation, initial_state, *(_integers(value) for value in (lengths, starts, cu_seqlens)), reverse,
        threads,
    )
    return (o, state) if return_state else o


causal_conv1d.__doc__ = heed.causal_conv1d.__doc__
causal_conv1d_step = _without_gradient("causal_conv1d_step", "x", "weight", "bias", "state")
