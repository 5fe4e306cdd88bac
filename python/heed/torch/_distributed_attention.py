# Exact attention over a sequence that the processes of a group hold in parts.
"""heed.torch.attention(group=): each rank has the queries, keys and values of its tokens.

    all_gather   every rank receives all keys and values and computes its own rows: the bits of one process
    ulysses      ranks exchange tokens for heads, and each computes whole heads: the bits of one process, gradients
                 included; heads must be a multiple of ranks
    ring         keys and values travel: each rank holds two parts at a time, partial results are merged, to rounding
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, Unsupported
from heed.torch import _group, _operators
from heed.torch._functions import merge_attention
from heed.torch._ring_attention import Ring
from heed.torch.distributed import ExchangeHeads, gather, ranges

_METHODS = ("auto", "all_gather", "ulysses", "ring")
# Options that concern the whole sequence, and are the same on every rank.
_ALIKE = ("scale", "causal", "window", "sink_tokens", "prefix", "chunk", "key_lengths", "key_starts", "softcap",
          "precision", "invariant", "threads", "alibi", "sinks")
_OF_ROWS = ("mask", "bias")  # of the rows of a rank, and all keys
_ON_A_RING = ("scale", "causal", "window", "key_lengths", "softcap", "precision", "invariant", "threads")
_DEFAULTS = {"align": "bottom_right", "dropout": 0.0, "dropout_offset": 0, "sink_tokens": 0, "precision": "highest"}
_NOT_EXCHANGED = ("alibi", "sinks", "log_decay", *_OF_ROWS)  # which have an axis of heads, or rows


def _is_default(option: str, value: Any) -> bool:
    return not isinstance(value, Tensor) and option in _DEFAULTS and value == _DEFAULTS[option]


def call(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, group: Any, method: str, order: str,
         return_lse: bool, **options: Any) -> Any:
    name = "attention"
    of = _group.Group(name, group)
    options = {key: x for key, x in options.items() if x is not None and not _is_default(key, x)}
    counts = [count for count, in of.agree([_tokens(q)], lambda: _describe(q, k, v, method, order, options))]
    total = sum(counts)
    if order == "zigzag":
        own = ranges(total, of.size, order)[of.rank]
    else:
        begin = sum(counts[: of.rank])
        own = [(begin, begin + counts[of.rank])]
    if method == "ring":
        o, lse = Ring.apply(q, k, v, of, counts, _parts_of_ring(of.rank, counts, q, options))
        return (o, lse) if return_lse else o
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


def _parts_of_ring(rank: int, counts: Sequence[int], q: Tensor, options: dict[str, Any]) -> Callable[[int, int], Any]:
    """The operator's options for attention of this rank's rows to the keys of another."""
    begin, end = sum(counts[:rank]), sum(counts[: rank + 1])
    left, right = (x if x is not None and x >= 0 else None for x in options.get("window") or (None, None))
    # Some row sees keys from `first` to `last`.
    first = 0 if left is None else begin - left
    last = end if options.get("causal") else sum(counts) if right is None else end + right

    def of_part(first_key: int, count: int) -> Any:
        outside = first_key >= last or first_key + count <= first
        if outside and first_key != begin:  # the own part is there for rows without keys
            return None
        here = dict(options)
        if options.get("key_lengths") is not None:
            lengths = torch.as_tensor(options["key_lengths"])
            here["key_lengths"] = (lengths - first_key).clamp(0, count)
        if options.get("causal") or options.get("window") is not None:
            here["align"] = torch.full((q.shape[0],), begin - first_key, dtype=torch.int64)
        return _operators.attention_options.given(here, call)

    return of_part


def check(method: Any, order: Any) -> None:
    if method not in _METHODS:
        raise InvalidArgument(f"attention: method is {method!r}, expected 'auto', 'all_gather', 'ulysses' or 'ring'")
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
    if method == "ring" and order == "zigzag":
        raise Unsupported(f"{name}: method is 'ring' with order='zigzag', expected order='contiguous'")
    known = _ON_A_RING if method == "ring" else (*_ALIKE, *_OF_ROWS, "log_decay")
    for option, value in options.items():
        if option not in known:
            how = "on a ring" if method == "ring" else "with a group"
            raise Unsupported(f"{name}: {option} is given {how}, which does not divide it among ranks")

    def without(key: str, x: Tensor) -> int | None:
        return x.dim() - 2 if key in _OF_ROWS else 1 if key in ("q", "k", "v", "log_decay") else None

    names = ["q", "k", "v", *options]
    return name + _group.described(names, [q, k, v, *options.values()], without) + f" method={method} order={order}"
