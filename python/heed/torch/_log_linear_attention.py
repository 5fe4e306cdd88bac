# log_linear_attention as an operator of PyTorch, and the functions of heed.torch.
"""`torch.ops.heed.log_linear_attention`, its gradients, heed.torch.log_linear_attention and its step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch
from heed.torch._functions import _without_gradient

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor level_scales"
_OPTIONS = (
    "Tensor? log_decay, float? scale, Tensor? positions, Tensor? initial_state, Tensor? lengths, Tensor? starts, "
    "Tensor? cu_seqlens, int? threads"
)
_NAMES = ("q", "k", "v", "level_scales", "log_decay", "scale", "positions", "initial_state", "lengths", "starts",
          "cu_seqlens", "threads")  # fmt: skip
_DIFFERENTIABLE = (0, 1, 2, 3, 4, 7)


def _wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _results(q, k, v, level_scales, *options):
    """New tensors for o and the states."""
    for name, x, axes in (("q", q, "H, K"), ("v", v, "HV, V"), ("level_scales", level_scales, "HV, L")):
        if x.dim() != 4:
            raise InvalidArgument(f"log_linear_attention: {name} has shape {list(x.shape)}, expected [B, T, {axes}]")
    cu_seqlens = options[6]
    sequences = _dispatch.num_sequences("log_linear_attention", q.shape[0], cu_seqlens)
    shape = (sequences, v.shape[2], level_scales.shape[3], q.shape[3], v.shape[3])
    return v.new_empty(v.shape), q.new_empty(shape, dtype=_wide(q))


def _forward(*arguments):
    results = _results(*arguments)
    _core._torch_log_linear_attention(*arguments[:4], *results, *arguments[4:])
    return results


def _new_gradients(arguments, needed):
    return [
        torch.empty_like(arguments[i], memory_format=torch.contiguous_format) if need else None
        for i, need in zip(_DIFFERENTIABLE, needed, strict=True)
    ]


def _backward(grad_o, grad_state, needed, *arguments):
    gradients = _new_gradients(arguments, needed)
    _core._torch_log_linear_attention_backward(grad_o, grad_state, *arguments[:4], *gradients, *arguments[4:])
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_state, needed, *arguments):
    return [x for x in _new_gradients(arguments, needed) if x is not None]


def _differentiate(needed, of_results, *arguments):
    wanted = [bool(needed[i]) for i in _DIFFERENTIABLE]
    of_o, of_state = of_results
    if of_o is None:
        of_o = torch.zeros_like(arguments[2])
    found = _backward_operator(of_o, of_state, wanted, *arguments)
    return dict(zip((i for i, want in zip(_DIFFERENTIABLE, wanted) if want), found))


_backward_operator = _dispatch.define(
    "log_linear_attention_backward",
    f"(Tensor grad_o, Tensor? grad_state, bool[] needed, {_TENSORS}, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    names=("the gradient of o", "the gradient of the state", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "log_linear_attention",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor state)",
    _forward,
    _results,
    gradients=_differentiate,
)


@functools.wraps(heed.log_linear_attention, assigned=("__name__",))
def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scales: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    positions: Any = None,
    initial_state: Tensor | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
    threads: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    name = "log_linear_attention"
    _dispatch.check_bools(name, return_state=return_state)
    _dispatch.check_tensors(name, q=q, k=k, v=v, level_scales=level_scales)
    given = {"log_decay": log_decay, "initial_state": initial_state}
    _dispatch.check_tensors(name, **{key: x for key, x in given.items() if x is not None})
    positions, lengths, starts, cu_seqlens = (
        _dispatch.numbers(name, key, x, torch.int64)
        for key, x in (("positions", positions), ("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    o, state = _dispatch.call(name, _operator, q, k, v, level_scales, log_decay, scale, positions, initial_state,
                              lengths, starts, cu_seqlens, threads)
    return (o, state) if return_state else o


log_linear_attention.__module__ = "heed.torch"
log_linear_attention.__doc__ = _signatures.text_on_tensors(heed.log_linear_attention) + """

In PyTorch. Gradients reach q, k, v, level_scales, log_decay and initial_state; there is no second derivative. The
operator is torch.ops.heed.log_linear_attention."""
log_linear_attention.__signature__ = _signatures.of_tensors(heed.log_linear_attention)

log_linear_attention_step = _without_gradient("log_linear_attention_step", "q", "k", "v", "level_scales", "state")
