# Exact attention over a sequence that the processes of a group hold in parts.
"""heed.torch.attention(group=): each rank has the queries, keys and values of its tokens. heed/distributed/attention.h
divides the call, checks what ranks agree on, and sends by the methods of _group.Transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, Unsupported, _core
from heed.torch import _dispatch, _group, _operators
from heed.torch._functions import merge_attention

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
results are merged by their log-sum-exps, on every rank alike."""
_OF_CACHES = ("scale", "causal", "softcap", "sinks", "precision", "invariant", "threads")


def attend_cache(cache: Any, name: str, q: Tensor, group: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(o, lse) of the keys in the caches of all ranks."""
    of = _group.Group(name, group)

    def describe() -> str:
        if isinstance(cache, heed.RingKVCache):
            raise Unsupported(f"{name}: group is given, expected None: a ring keeps the last keys alone")
        for option in options:
            if option not in _OF_CACHES:
                raise Unsupported(f"{name}: {option} is given with a group, whose caches take {', '.join(_OF_CACHES)}")
        if q.dim() != 4:
            raise InvalidArgument(f"{name}: q has shape {list(q.shape)}, expected [B, T, H, D]")
        if of.rank + 1 < of.size and int(cache.appended.min()) == 0 < int(cache.lengths.max()):
            raise Unsupported(f"{name}: appended is {cache.appended.tolist()}, expected tokens of every sequence, or "
                              "no keys at all")
        return name + _group.described(["q", *options], [q, *options.values()], lambda key, x: None)

    of.agree([], describe)
    here = {key: x for key, x in options.items() if key != "sinks"}
    if of.rank + 1 == of.size:
        o, lse = cache.attend(q, return_lse=True, **here)
    else:
        o, lse = _attend_to_earlier(cache, q, here | {"causal": False})
    parts = list(zip(of.gather(o), of.gather(lse)))
    merged, lse = merge_attention(parts, sinks=options.get("sinks"))
    return merged.to(q.dtype), lse


def _attend_to_earlier(cache: Any, q: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attention to keys before all rows. A cache takes at most as many rows as it was given tokens last."""
    least = int(cache.appended.min())
    if least > 0:
        parts = [cache.attend(rows, return_lse=True, **options) for rows in q.split(least, 1)]
        return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)
    batch, rows, heads, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_zeros(batch, rows, heads, cache.value_dim), q.new_full((batch, heads, rows), -torch.inf, dtype=wide)


def check(method: Any, order: Any) -> None:
    if method not in _METHODS:
        raise InvalidArgument(f"attention: method is {method!r}, expected 'auto', 'all_gather', 'ulysses' or 'ring'")
    if order not in ("contiguous", "zigzag"):
        raise InvalidArgument(f"attention: order is {order!r}, expected 'contiguous' or 'zigzag'")
