# Exact attention over a sequence that the processes of a group hold in parts.
"""heed.torch.attention(group=): each rank has the queries, keys and values of its tokens. heed/distributed/attention.h
divides the call, checks what ranks agree on, and sends by the methods of _group.Transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heed import InvalidArgument, Unsupported, _core
from heed.torch import _dispatch, _group, _operators

_METHODS = ("auto", "all_gather", "ulysses", "ring")


class _InGroup(torch.autograd.Function):
    """(o, lse) of this rank's rows. `how` are the arguments of heed._core that a call of one process has not."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        o, lse = _operators.new_results(q, k, v, options)
        ctx.received = _core._torch_attention_in_group(*how, q, k, v, o, lse, *options)
        ctx.how, ctx.options = how, [None if isinstance(x, Tensor) else x for x in options]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse, *(x for x in options if isinstance(x, Tensor)))
        ctx.is_tensor = [isinstance(x, Tensor) for x in options]
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> Any:
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        tensors = iter(tensors)
        options = [next(tensors) if is_tensor else x for is_tensor, x in zip(ctx.is_tensor, ctx.options)]
        needed = [bool(x) for x in _operators._at(_operators._AT, ctx.needs_input_grad[1:])]
        gradients = _operators._gradients(q, k, v, needed, options)
        d_o = torch.zeros_like(o) if d_o is None else d_o
        _core._torch_attention_backward_in_group(*ctx.how, ctx.received, d_o, d_lse, q, k, v, o, lse, *gradients,
                                                 *options)
        found = dict(zip(_operators._AT, gradients))
        return None, *(found.get(i) for i in range(3 + len(options)))


def call(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, group: Any, method: str, order: str,
         return_lse: bool, **keywords: Any) -> Any:
    of = _group.Group("attention", group)
    if "out" in keywords:
        raise Unsupported("attention: out is given with a group, expected None")
    _dispatch.check_tensors("attention", q=q, k=k, v=v)
    if _dispatch.autocast_dtype(q) is not None:
        q, k, v = map(_dispatch.to_autocast, (q, k, v))
    options = _operators.attention_options.given(keywords, function)
    tensors = dict(zip(("q", "k", "v", *_operators.OPTIONS), (q, k, v, *options)))
    with_gradients = [name for name, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad]
    note = f"gradients of {', '.join(with_gradients)}" if with_gradients and torch.is_grad_enabled() else ""
    how = (_group.Transport(of), method, order, note, keywords.get("seed") is None)
    o, lse = _InGroup.apply(how, q, k, v, *options)
    return (o, lse) if return_lse else o


TEXT_OF_CACHES = """With group=, each rank's cache holds a part of the keys of every sequence, in the order of ranks,
and all ranks give the same q, whose rows are the last tokens: their keys are in the cache of the last rank. Partial
results are merged by their log-sum-exps, on every rank alike. Options are then scale, causal, softcap, sinks, precision
and invariant."""


def check(method: Any, order: Any) -> None:
    if method not in _METHODS:
        raise InvalidArgument(f"attention: method is {method!r}, expected 'auto', 'all_gather', 'ulysses' or 'ring'")
    if order not in ("contiguous", "zigzag"):
        raise InvalidArgument(f"attention: order is {order!r}, expected 'contiguous' or 'zigzag'")
