# Sequences that are longer than one process has memory for: how tensors are divided, and what is sent.
"""Tokens divided among processes.

Every function of heed.torch that has tokens takes `group=`: a ProcessGroup of torch.distributed, or a DeviceMesh of one
dimension. Each rank then gives its part of the tokens, in the order of ranks, and receives its part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heed import InvalidArgument
from heed.torch import _group

__all__ = ["shard", "unshard"]

_ORDERS = ("contiguous", "zigzag")
_GRID = 64  # tokens


def _borders(tokens: int, parts: int) -> list[int]:
    """The borders of parts of nearly the same size, at multiples of 64 tokens if there are that many."""
    grid = _GRID if tokens >= _GRID * parts else 1
    return [tokens * i // parts // grid * grid for i in range(parts)] + [tokens]


def _parts(order: str, ranks: int) -> list[list[int]]:
    """The parts of the sequence that each rank holds."""
    if order == "contiguous":
        return [[rank] for rank in range(ranks)]
    return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]


def ranges(tokens: int, ranks: int, order: str) -> list[list[tuple[int, int]]]:
    """The tokens [begin, end) of each rank's parts."""
    parts = _parts(order, ranks)
    borders = _borders(tokens, ranks * len(parts[0]))
    return [[(borders[part], borders[part + 1]) for part in of_rank] for of_rank in parts]


def _check(operation: str, x: Any, group: Any, dim: int, order: str) -> _group.Group:
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{operation}: x is of type {type(x).__name__}, expected a Tensor")
    if dim.__class__ is not int or not -x.dim() <= dim < x.dim():
        raise InvalidArgument(f"{operation}: dim is {dim!r}, expected an axis of x, which has {x.dim()}")
    if order not in _ORDERS:
        raise InvalidArgument(f"{operation}: order is {order!r}, expected 'contiguous' or 'zigzag'")
    return _group.Group(operation, group)


def shard(x: Tensor, group: Any, *, dim: int = 1, order: str = "contiguous") -> Tensor:
    """This rank's part of a tensor that all ranks have, along the axis of tokens `dim`.

    Parts have nearly the same number of tokens, and begin at multiples of 64 where there are enough of them. With
    order="zigzag" rank r of R holds parts r and 2 R - 1 - r of 2 R, one after the other, so that all ranks see about as
    many keys in causal attention. Sends nothing. Ids, labels and positions are divided alike.
    """
    of = _check("shard", x, group, dim, order)
    own = ranges(x.shape[dim], of.size, order)[of.rank]
    parts = [x.narrow(dim, begin, end - begin) for begin, end in own]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(x: Tensor, group: Any, *, dim: int = 1, order: str = "contiguous") -> Tensor:
    """The whole tensor, on every rank, from parts as `shard` divides it; contiguous parts may have any sizes.

    The gradient of a part is the sum over all ranks, as the loss is the sum of their losses.
    """
    of = _check("unshard", x, group, dim, order)
    counts = [count for count, in of.agree([x.shape[dim]], lambda: _described(x, dim, order))]
    expected = [sum(end - begin for begin, end in own) for own in ranges(sum(counts), of.size, order)]
    if order == "zigzag" and counts != expected:
        raise InvalidArgument(f"unshard: ranks have {counts} tokens, expected {expected} in zigzag order")
    return gather(x, of, dim, counts, order)


def _described(x: Tensor, dim: int, order: str) -> str:
    return "unshard" + _group.described(["x", "order"], [x, order], lambda name, of: dim % x.dim())


def gather(x: Tensor, group: _group.Group, dim: int, counts: Sequence[int], order: str) -> Tensor:
    """The whole tensor, in the order of its tokens, with gradients."""
    whole = GatherRows.apply(x, group, dim, counts)
    if order == "contiguous":
        return whole
    parts, first = {}, 0
    for own in ranges(sum(counts), group.size, order):
        for begin, end in own:
            if end > begin:
                parts[begin] = whole.narrow(dim, first, end - begin)
            first += end - begin
    return torch.cat([parts[begin] for begin in sorted(parts)], dim) if parts else whole


class GatherRows(torch.autograd.Function):
    """The parts of all ranks, one after the other. Gradients go to their ranks, and are added in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _group.Group, dim: int, counts: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.counts, ctx.shape = group, dim, counts, x.shape
        return torch.cat(group.gather_rows(x, dim, counts), dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = gradient.split(ctx.counts, ctx.dim)
        received = ctx.group.exchange(parts, [ctx.shape] * ctx.group.size)
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total, None, None, None
