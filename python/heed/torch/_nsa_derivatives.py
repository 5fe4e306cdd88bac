# The tangents of nsa, and the derivative of its backward pass, from those of its three branches.
"""With the branches b_c and their gates g_c, o' = sum_c g_c b_c' + g_c' b_c, and L = <do, o'> has the gradients of
<g_c do, b_c'>, those of <g_c' do, b_c>, and <do, b_c'> for a gate. The choice of blocks counts as constant."""

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


class _Windows:
    """Windows of tokens, and the rows that see them.

    Row i sees the windows that end at or before its position p: (p - length + 1) // stride + 1 of them. Rows that see
    as many are `stride` neighbours. As heads of one row, they see the windows of a causal mask.
    """

    def __init__(self, rows: int, keys: int, heads: int, key_heads: int, length: int, stride: int):
        self.length, self.stride, self.keys, self.rows = length, stride, keys, rows
        self.group, self.key_heads = heads // max(key_heads, 1), key_heads
        self.count = max(0, (keys - length) // stride + 1)
        first = keys - rows - length + 1  # of the first row: windows are complete from 0 on
        self.before = min(max(0, -first), rows)  # rows that see none
        self.front = max(first, 0) % stride
        self.back = -(self.front + rows - self.before) % stride

    def together(self, x: Tensor) -> Tensor:
        """[B, Tq, Hq, ..] as [B, Tq / stride, Hq stride, ..], with zeros for rows that are missing."""
        x = F.pad(x[:, self.before:], (*[0, 0] * (x.dim() - 2), self.front, self.back))
        x = x.unflatten(2, (self.key_heads, self.group)).unflatten(1, (-1, self.stride))
        return x.movedim(2, 3).flatten(2, 4)

    def apart(self, x: Tensor) -> Tensor:
        x = x.unflatten(2, (self.key_heads, self.stride, self.group)).movedim(3, 2).flatten(3, 4).flatten(1, 2)
        x = x[:, self.front:x.shape[1] - self.back]
        return F.pad(x, (*[0, 0] * (x.dim() - 2), self.before, 0))

    def means(self, x: Any) -> Any:
        if x is None:
            return None
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide.unfold(1, self.length, self.stride).mean(-1).to(x.dtype)

    def to_tokens(self, of_means: Tensor) -> Tensor:
        """The gradient of tokens, given that of their means."""
        share = of_means.to(torch.promote_types(of_means.dtype, torch.float32)) / self.length
        found = share.new_zeros((share.shape[0], self.keys, *share.shape[2:]))
        for i in range(self.length):
            found[:, i:i + (self.count - 1) * self.stride + 1:self.stride] += share
        return found


def _compressed(along: Sequence[Any], tensors: Sequence[Any], o: Tensor, lse: Tensor, windows: _Windows,
                options: dict[str, Any]) -> tuple[Branch, list[Any]]:
    """The branch of windows, whose rows are together, and its direction."""
    q, k, v, _, k_cmp, v_cmp = tensors
    dq, dk, dv, _, dk_cmp, dv_cmp = along

    def of_windows(x: Any, given: Any) -> Any:
        return windows.means(x) if k_cmp is None else None if given is None else given[:, :windows.count]

    branch = Branch(windows.together(q), of_windows(k, k_cmp), of_windows(v, v_cmp), windows.together(o),
                    windows.together(lse.mT).mT.contiguous(), options)
    return branch, [None if dq is None else windows.together(dq), of_windows(dk, dk_cmp), of_windows(dv, dv_cmp)]


def kernel(along: Sequence[Any], incoming: Sequence[Any], tensors: Sequence[Any], saved: Sequence[Tensor],
           needed: Sequence[bool], block: int, stride: Any, count: int, window: int, length: Any = None,
           scale: Any = None, threads: Any = None) -> tuple[list[Tensor], list[Any]]:
    q, k, v, gates, k_cmp, _ = tensors
    branches, lse, blocks = saved
    (do,) = incoming
    windows = _Windows(q.shape[1], k.shape[1], q.shape[2], k.shape[2], length or block, stride or block)
    chosen = heed.patterns.row_blocks(blocks, block)
    own = {"causal": True, "scale": scale, "threads": threads}
    wide = torch.promote_types(q.dtype, torch.float32)
    o_along = q.new_zeros(branches.shape[1:], dtype=wide)
    found: list[Any] = [None] * 6
    of_gates = []
    for c, more in enumerate(({}, {"pattern": _dispatch.pattern_key(chosen)}, {"window": [window - 1, 0]})):
        gate, moved = gates[..., c, None], None if along[3] is None else along[3][..., c, None]
        if c == 0 and windows.count == 0 or not q.numel() or not k.numel():
            of_gates.append(gates.new_zeros(gates.shape[:-1]))
            continue
        places, branch, of = (0, 1, 2), Branch(q, k, v, branches[c], lse[c], own | more), along[:3]
        if c == 0:
            branch, of = _compressed(along, tensors, branches[c], lse[c], windows, own)
            places = (0, 1, 2) if k_cmp is None else (0, 4, 5)

        def rows(x: Tensor) -> Tensor:
            return windows.together(x) if c == 0 else x

        need = [needed[i] for i in places]
        b_along, _, gradients = branch.derivatives(of, None if do is None else rows(do * gate), None, need)
        b_along = (windows.apart(b_along) if c == 0 else b_along).to(wide)
        o_along += gate * b_along
        if moved is not None:
            o_along += moved * branches[c]
        if do is None:
            continue
        of_gates.append((do * b_along).sum(-1))
        terms = [gradients]
        if moved is not None and any(need):
            terms.append(branch.gradients(rows(do * moved), need))
        for i, x in ((i, x) for term in terms for i, x in zip(places, term) if x is not None):
            if c == 0:
                x = windows.apart(x) if i == 0 else windows.to_tokens(x) if k_cmp is None else F.pad(
                    x, (0, 0, 0, 0, 0, tensors[i].shape[1] - windows.count))
            found[i] = plus(found[i], x.to(wide))
    if do is not None and needed[3]:
        found[3] = torch.stack([x.to(wide) for x in of_gates], -1)
    return [o_along.to(q.dtype)], found
