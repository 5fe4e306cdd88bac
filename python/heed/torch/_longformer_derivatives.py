# The tangents of longformer, and the derivative of its backward pass, from those of its two calls of attention.
"""Each row belongs to one of two calls, whose results and gradients are added: attention under the pattern, where rows
of tokens are replaced by zeros, and attention of the rows of tokens, gathered, over all keys.

Derivatives of attention compute tiles of all pairs, whatever a pattern leaves out. Where windows are short, rows are
therefore cut into blocks, and each is a sequence of its own, with the keys of its windows and the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import heed
from heed.torch import _dispatch
from heed.torch._branch_derivatives import Branch
from heed.torch._recurrences import plus

_FIRST_POSITION = 2**31  # of a gathered row: where no other row draws for dropout
_ROWS = 64  # of a block, at least


class _TokenRows:
    """The rows of global tokens of [B, T, ...], or of packed [T_total, ...]."""

    def __init__(self, q: Tensor, tokens: Tensor, bounds: Any, query_lengths: Any):
        self.shape = q.shape[:-2]
        packed = bounds is not None
        ends = [int(x) for x in query_lengths] if query_lengths is not None else None
        starts = bounds.tolist() if packed else [q.shape[1] * i for i in range(q.shape[0] + 1)]
        lists, self.counts = tokens.tolist() if tokens.dim() == 2 else [tokens.tolist()], []
        rows, places = [], []
        for i, (begin, end) in enumerate(zip(starts, starts[1:])):
            last = end - begin if ends is None else min(ends[i], end - begin)
            of = sorted({x for x in lists[i if len(lists) > 1 else 0] if 0 <= x < last})
            rows += [begin + x for x in of]
            places += [(i, j) for j in range(len(of))]
            self.counts.append(len(of))
        self.rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        # Sequences of a batch have as many rows as that with the most, and zeros behind their last.
        most = max(self.counts, default=0)
        self.gathered = (len(rows),) if packed else (q.shape[0], most)
        self.places = self.rows.new_tensor(range(len(rows)) if packed else [most * i + j for i, j in places])

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if len(self.shape) == 2 else x

    def gather(self, x: Any) -> Any:
        if x is None:
            return None
        x = self._flat(x)
        found = x.new_zeros((torch.Size(self.gathered).numel(), *x.shape[1:]))
        return found.index_copy(0, self.places, x[self.rows]).unflatten(0, self.gathered)

    def put_back(self, x: Tensor) -> Tensor:
        """Zeros for all other rows."""
        x = x.flatten(0, 1) if len(self.gathered) == 2 else x
        found = x.new_zeros((self.shape.numel(), *x.shape[1:]))
        return found.index_copy(0, self.rows, x[self.places]).unflatten(0, self.shape)

    def others(self, x: Any) -> Any:
        """The tensor with zeros for the rows of tokens."""
        if x is None:
            return None
        return self._flat(x).index_fill(0, self.rows, 0).unflatten(0, self.shape)


def _turned(x: Any) -> Any:
    """lse, or its gradient, [B, H, T] or [H, T], as rows [B, T, H] or [T, H], or back."""
    return None if x is None else x.mT.contiguous()


class _Blocks:
    """Blocks of rows of [B, T, ...] as sequences of `size` rows, each with the tokens and with the keys that are at
    most `half` from a row."""

    def __init__(self, q: Tensor, tokens: Tensor, half: int, options: dict[str, Any]):
        self.batch, self.tokens = batch, T = q.shape[:2]
        self.size = max(_ROWS, half)
        count = -(-T // self.size)
        self.padding = count * self.size - T
        lists = [sorted({x for x in of if 0 <= x < T}) for of in (tokens.tolist() if tokens.dim() == 2 else
                                                                   [tokens.tolist()])]
        most = max((len(of) for of in lists), default=0)
        ends, starts, rows_end = (None if x is None else x.to(torch.int64)[:, None] for x in (
            options["key_lengths"], options["key_starts"], options["query_lengths"]))
        of_tokens = torch.tensor([of + [-1] * (most - len(of)) for of in lists], dtype=torch.int64, device="cpu")
        of_tokens = of_tokens.view(len(lists), most).expand(batch, most)
        at = torch.arange(T + self.padding, device="cpu")
        first = at[::self.size, None] - half
        near = (first + torch.arange(self.size + 2 * half, device="cpu")).expand(batch, -1, -1)
        keys = torch.cat([of_tokens[:, None].expand(batch, count, most), near], -1)
        self._place(keys, of_tokens, ends, starts)
        rows = at.view(count, self.size, 1)
        seen = self.valid[:, :, None].expand(batch, count, self.size, -1).clone()
        seen[..., most:] &= (rows - near[:, :, None]).abs() <= half
        seen[..., most:] &= ~self.is_token[:, :, None, most:]
        if rows_end is not None:
            seen &= rows < rows_end[..., None, None]
        self.mask = seen.flatten(0, 1)[:, None]

    def _place(self, keys: Tensor, of_tokens: Tensor, ends: Any, starts: Any) -> None:
        """Finds the places of the keys of each block, whether they exist, and whether they are tokens."""
        self.valid = (keys >= 0) & (keys < self.tokens)
        keys = keys.clamp(0, max(self.tokens - 1, 0))
        for bound, is_inside in ((ends, torch.lt), (starts, torch.ge)):
            if bound is not None:
                self.valid &= is_inside(keys, bound[..., None])
        tokens = torch.zeros((self.batch, self.tokens + 1), dtype=torch.bool, device="cpu")
        tokens.scatter_(1, torch.where(of_tokens < 0, self.tokens, of_tokens), True)
        self.is_token = tokens.gather(1, keys.flatten(1)).view(keys.shape)
        sequence = torch.arange(self.batch, device="cpu").view(-1, 1, 1) * self.tokens
        self.places = (keys + sequence).flatten(0, 1)

    def rows(self, x: Any) -> Any:
        """[B, T, ...] as blocks; zeros behind the last row."""
        if x is None:
            return None
        return F.pad(x, (*[0, 0] * (x.dim() - 2), 0, self.padding)).unflatten(1, (-1, self.size)).flatten(0, 1)

    def of_rows(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.batch, -1)).flatten(1, 2)[:, :self.tokens]

    def keys(self, x: Any) -> Any:
        return None if x is None else x.flatten(0, 1)[self.places]

    def of_keys(self, x: Any) -> Any:
        """The gradient of keys, given that of the keys of blocks."""
        if x is None:
            return None
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)
        found = wide.new_zeros((self.batch * self.tokens, *x.shape[2:]))
        return found.index_add_(0, self.places.flatten(), wide).unflatten(0, (self.batch, self.tokens))


def _windows(rows: _TokenRows, along: Sequence[Any], do: Any, dlse: Any, tensors: Sequence[Any],
             saved: Sequence[Tensor], needed: Sequence[bool], window: int, tokens: Tensor, in_blocks: bool,
             options: dict[str, Any]) -> tuple[Tensor, Tensor, list[Any]]:
    """The derivatives of all rows but those of tokens; lse, and what arrives at it, by row as o is."""
    (q, k, v), (dq, dk, dv) = tensors, along
    q, dq, do, dlse, o, lse = map(rows.others, (q, dq, do, dlse, *saved))
    if not in_blocks:
        pattern = heed.patterns.longformer(window, tokens)
        o_along, lse_along, (of_q, of_k, of_v) = Branch(
            q, k, v, o, _turned(lse), options | {"pattern": _dispatch.pattern_key(pattern)}).derivatives(
            [dq, dk, dv], do, _turned(dlse), needed)
        lse_along = _turned(lse_along)
    else:
        blocks = _Blocks(q, tokens, window // 2, options)
        own = {key: x for key, x in options.items() if key not in ("key_lengths", "key_starts", "query_lengths")}
        o_along, lse_along, (of_q, of_k, of_v) = Branch(
            blocks.rows(q), blocks.keys(k), blocks.keys(v), blocks.rows(o), _turned(blocks.rows(lse)),
            own | {"mask": blocks.mask}).derivatives(
            [blocks.rows(dq), blocks.keys(dk), blocks.keys(dv)], blocks.rows(do), _turned(blocks.rows(dlse)), needed)
        o_along, lse_along = blocks.of_rows(o_along), blocks.of_rows(_turned(lse_along))
        of_q = None if of_q is None else blocks.of_rows(of_q)
        of_k, of_v = blocks.of_keys(of_k), blocks.of_keys(of_v)
    return rows.others(o_along), rows.others(lse_along), [rows.others(of_q), of_k, of_v]


def _tokens(rows: _TokenRows, along: Sequence[Any], do: Any, dlse: Any, tensors: Sequence[Any],
            saved: Sequence[Tensor], needed: Sequence[bool],
            options: dict[str, Any]) -> tuple[Tensor, Tensor, list[Any]]:
    """The derivatives of the rows of tokens."""
    counts, bounds = rows.rows.new_tensor(rows.counts), options["cu_seqlens_q"]
    if bounds is not None:
        sizes = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(bounds.dtype)
        own = {"cu_seqlens_q": sizes, "cu_seqlens_k": bounds}
    else:
        own = {"query_lengths": counts}
    own |= {"query_starts": torch.full_like(counts, _FIRST_POSITION)}
    (q, k, v), (dq, dk, dv) = tensors, along
    o, lse = map(rows.gather, saved)
    o_along, lse_along, (of_q, of_k, of_v) = Branch(rows.gather(q), k, v, o, _turned(lse), options | own).derivatives(
        [rows.gather(dq), dk, dv], rows.gather(do), _turned(rows.gather(dlse)), needed)
    of_q = None if of_q is None else rows.put_back(of_q)
    return rows.put_back(o_along), rows.put_back(_turned(lse_along)), [of_q, of_k, of_v]


def kernel(along: Sequence[Any], incoming: Sequence[Any], tensors: Sequence[Any], saved: Sequence[Tensor],
           needed: Sequence[bool], window: int, tokens: Tensor, *, options: dict[str, Any]) -> Any:
    do, dlse = incoming
    o, lse = saved
    shared, packed = tensors[3] is None, options["cu_seqlens_q"] is not None
    at_once = max(_ROWS, window // 2) + window + tokens.shape[-1]  # keys of a block
    # Dropout draws by position, which blocks do not have.
    in_blocks = not packed and not options["dropout"] and 0 < at_once < o.shape[1] and o.shape[0] > 0
    if shared and not in_blocks:
        pattern = heed.patterns.longformer(window, tokens)
        o_along, lse_along, found = Branch(
            *tensors[:3], o, lse, options | {"pattern": _dispatch.pattern_key(pattern)}).derivatives(
            along[:3], do, dlse, needed[:3])
        return [o_along, lse_along], [*found, None, None, None]
    outer = o.dim() == 4 and packed  # packed sequences as a batch of one
    if outer:
        along, tensors, (o, do) = ([None if x is None else x[0] for x in xs] for xs in (along, tensors, (o, do)))
    rows = _TokenRows(tensors[0], tokens, options["cu_seqlens_q"], options["query_lengths"])
    arriving, saved = (do, _turned(dlse)), (o, _turned(lse))
    o_along, lse_along, found = _windows(rows, along[:3], *arriving, tensors[:3], saved, needed[:3], window, tokens,
                                         in_blocks, options)
    more: list[Any] = [None] * 3
    if len(rows.rows):
        of = slice(0, 3) if shared else slice(3, 6)
        of_o, of_lse, more = _tokens(rows, along[of], *arriving, tensors[of], saved, needed[of], options)
        o_along, lse_along = o_along + of_o, lse_along + of_lse
    if shared:
        wide = torch.promote_types(o.dtype, torch.float32)
        found = [x if y is None else plus(x.to(wide), y) for x, y in zip(found, more)]
        more = [None] * 3
    found = [*found, *more]
    if outer:
        o_along, found = o_along[None], [None if x is None else x[None] for x in found]
    return [o_along, _turned(lse_along)], found
