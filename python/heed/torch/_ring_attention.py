# Exact attention of one part of a sequence to all parts, which travel around a ring of processes.
"""Keys and values move to the next rank after each step, so that a rank holds two parts at a time and not all of them.
The partial results of a row are merged by their log-sum-exps; gradients are those of each part with the log-sum-exp of
all of them, and those of keys and values travel with them until they are home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heed.torch import _group, _operators

_forward, _backward = torch.ops.heed.attention.default, torch.ops.heed.attention_backward.default
_NEEDED = [True] * 3 + [False] * (len(_operators._AT) - 3)


def _shift(group: _group.Group, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Sends tensors to the next rank, and returns those of the previous one, of these shapes."""
    after, before = (dist.get_global_rank(group.group, (group.rank + by) % group.size) for by in (1, -1))
    sent = [_group.as_bytes(x) for x in tensors]
    sizes = [torch.Size(shape).numel() * x.element_size() for x, shape in zip(tensors, shapes)]
    received = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    calls = [dist.P2POp(dist.isend, x, after, group.group) for x in sent if x.numel()]
    calls += [dist.P2POp(dist.irecv, x, before, group.group) for x in received if x.numel()]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return [x.view(of.dtype).view(*shape) for x, of, shape in zip(received, tensors, shapes)]


class Ring(torch.autograd.Function):
    """(o, lse) of this rank's rows. options(begin of the keys, count) are those of attention to a part, or None if no
    row sees it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: _group.Group, counts: Sequence[int],
                options: Callable[[int, int], Any]) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        total = lse = None
        held = [k, v]
        for step in range(group.size):
            source = (group.rank - step) % group.size
            given = options(sum(counts[:source]), counts[source])
            if given is not None:
                o_part, lse_part = _forward(q, *held, *given)
                if total is None:
                    total, lse = o_part.to(wide), lse_part
                else:
                    both = torch.logaddexp(lse, lse_part)
                    seen = both.masked_fill(both == -torch.inf, 0)  # no key seen so far
                    total = total * _factor(lse - seen) + o_part * _factor(lse_part - seen)
                    lse = both
            if step + 1 < group.size:
                held = _shift(group, held, _shapes(held, counts[(source - 1) % group.size]))
        o = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.group, ctx.counts, ctx.options = group, counts, options
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_lse: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        group, counts = ctx.group, ctx.counts
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        dq = torch.zeros_like(q, dtype=wide)
        held = [k, v, torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)]
        for step in range(group.size):
            source = (group.rank - step) % group.size
            given = ctx.options(sum(counts[:source]), counts[source])
            if given is not None:
                parts = _backward(d_o.contiguous(), d_lse.contiguous(), q, *held[:2], o, lse, _NEEDED, *given)
                dq += parts[0]
                held[2] = held[2] + parts[1]
                held[3] = held[3] + parts[2]
            held = _shift(group, held, _shapes(held, counts[(source - 1) % group.size]))
        return dq.to(q.dtype), held[2].to(k.dtype), held[3].to(v.dtype), None, None, None


def _factor(log: Tensor) -> Tensor:
    """exp of [B, H, T], as a factor of [B, T, H, D]."""
    return log.exp().transpose(1, 2).unsqueeze(-1)


def _shapes(held: Sequence[Tensor], tokens: int) -> list[tuple[int, ...]]:
    return [(x.shape[0], tokens, *x.shape[2:]) for x in held]
