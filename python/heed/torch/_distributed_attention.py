# Exact attention over a sequence that the processes of a group hold in parts.
"""heed.torch.attention(group=): each rank has the queries, keys and values of its tokens.

    all_gather   every rank receives all keys and values and computes its own rows: the bits of one process
    ulysses      ranks exchange tokens for heads, and each computes whole heads: the bits of one process, gradients
                 included; heads must be a multiple of ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heed import InvalidArgument, Unsupported
from heed.torch import _group
from heed.torch.distributed import ExchangeHeads, gather, ranges

_METHODS = ("auto", "all_gather", "ulysses")
# Options that concern the whole sequence, and are the same on every rank.
_ALIKE = ("scale", "causal", "window", "sink_tokens", "prefix", "chunk", "key_lengths", "key_starts", "softcap",
          "precision", "invariant", "threads", "alibi", "sinks")
_OF_ROWS = ("mask", "bias")  # of the rows of a rank, and all keys
_NOT_EXCHANGED = ("alibi", "sinks", "log_decay", *_OF_ROWS)  # which have an axis of heads, or rows


def call(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, group: Any, method: str, order: str,
         return_lse: bool, **options: Any) -> Any:
    name = "attention"
    of = _group.Group(name, group)
    counts = [count for count, in of.agree([_tokens(q)], lambda: _describe(q, k, v, method, order, options))]
    total = sum(counts)
    if order == "zigzag":
        own = ranges(total, of.size, order)[of.rank]
    else:
        begin = sum(counts[: of.rank])
        own = [(begin, begin + counts[of.rank])]
    divides = q.shape[2] % of.size == 0 and k.shape[2] % of.size == 0
    if method == "ulysses" and not divides:
        raise InvalidArgument(f"{name}: method is 'ulysses' with {q.shape[2]} and {k.shape[2]} heads, expected "
                              f"multiples of {of.size} ranks")
    whole = order == "contiguous" and divides and not return_lse and not any(
        options.get(option) is not None for option in _NOT_EXCHANGED)
    if method == "ulysses" and not whole:
        raise Unsupported(f"{name}: method is 'ulysses' with order='zigzag', return_lse or an option of heads or rows, "
                          "expected method='all_gather'")
    if method != "all_gather" and whole and of.size > 1:
        q, k, v = (ExchangeHeads.apply(x, of, counts, False) for x in (q, k, v))
        return ExchangeHeads.apply(function(q, k, v, **options), of, counts, True)

    def gathered(x: Tensor) -> Tensor:
        return gather(x, of, 1, counts, order)

    k, v = gathered(k), gathered(v)
    if options.get("log_decay") is not None:
        options["log_decay"] = gathered(options["log_decay"])
    results, first = [], 0
    for begin, end in own:
        rows = q.narrow(1, first, end - begin)
        here = dict(options)
        for option in _OF_ROWS:
            x = here.get(option)
            if x is not None and x.shape[-2] > 1:
                here[option] = x.narrow(-2, first, end - begin)
        starts = torch.full((q.shape[0],), begin, dtype=torch.int64)
        results.append(function(rows, k, v, align=starts, return_lse=return_lse, **here))
        first += end - begin
    if len(results) == 1:
        return results[0]
    if return_lse:
        return torch.cat([o for o, _ in results], 1), torch.cat([lse for _, lse in results], 2)
    return torch.cat(results, 1)


def check(method: Any, order: Any) -> None:
    if method not in _METHODS:
        raise InvalidArgument(f"attention: method is {method!r}, expected 'auto', 'all_gather' or 'ulysses'")
    if order not in ("contiguous", "zigzag"):
        raise InvalidArgument(f"attention: order is {order!r}, expected 'contiguous' or 'zigzag'")


def _tokens(q: Any) -> int:
    return q.shape[1] if isinstance(q, Tensor) and q.dim() == 4 else 0


def _describe(q: Any, k: Any, v: Any, method: str, order: str, options: dict[str, Any]) -> str:
    name = "attention"
    for key, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            shape = list(x.shape) if isinstance(x, Tensor) else f"type {type(x).__name__}"
            raise Unsupported(f"{name}: {key} has shape {shape}, expected [B, T, H, D] with a group: packed sequences "
                              "are not divided among ranks")
        if x.device.type != "cpu":
            raise Unsupported(f"{name}: {key} is on {x.device}, expected the CPU with a group")
        if x.shape[1] != q.shape[1]:
            raise InvalidArgument(f"{name}: {key} has {x.shape[1]} tokens, expected the {q.shape[1]} of q with a group")
    for option, value in options.items():
        if value is not None and value is not False and option not in (*_ALIKE, *_OF_ROWS, "log_decay"):
            raise Unsupported(f"{name}: {option} is given with a group, which does not divide it among ranks")

    def without(key: str, x: Tensor) -> int | None:
        return x.dim() - 2 if key in _OF_ROWS else 1 if key in ("q", "k", "v", "log_decay") else None

    names = ["q", "k", "v", *options]
    return name + _group.described(names, [q, k, v, *options.values()], without) + f" method={method} order={order}"
