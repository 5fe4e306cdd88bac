# Rotary positions by tables of cosines and sines, as flash_attn and fla take them.
"""apply_rotary_emb and its relatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heed import InvalidArgument


def turned(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., H, D] with its first 2 * width channels rotated by the angles of these positions [...]."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[positions].unsqueeze(-2).to(wide) for table in (cos, sin))
    width = cos.shape[-1]
    y = x[..., : 2 * width].to(wide)
    first, second = (y[..., 0::2], y[..., 1::2]) if interleaved else (y[..., :width], y[..., width:])
    pair = (first * c - second * s, first * s + second * c)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * width :]), -1)


def check_tables(function: str, cos: Any, sin: Any, rows: int, dim: int, prefix: str = "") -> None:
    """Throws InvalidArgument unless both are tables of at least so many rows, whose angles fit into heads of `dim`."""
    for key, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            raise InvalidArgument(f"{function}: {prefix}{key} is of type {type(table).__name__}, expected a tensor")
        if table.dim() != 2 or table.shape[0] < rows or 2 * table.shape[1] > dim or table.shape != cos.shape:
            raise InvalidArgument(
                f"{function}: {prefix}{key} has shape {list(table.shape)}, expected at least {rows} rows, at most "
                f"{dim // 2} columns, and the same as the other"
            )


def apply(function: str, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool, offsets: Any,
          cu_seqlens: Tensor | None) -> Tensor:
    """x [B, T, H, D], or packed [T_total, H, D] with the bounds of its sequences, which begin at their offsets."""
    rank = 4 if cu_seqlens is None else 3
    if not isinstance(x, Tensor) or x.dim() != rank:
        got = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is of type {type(x).__name__}"
        raise InvalidArgument(f"{function}: x {got}, "
                              f"expected {'[B, T, H, D]' if rank == 4 else '[T, H, D] of packed sequences'}")
    if cu_seqlens is None:
        counts, at = x.shape[0], torch.arange(x.shape[1]).expand(x.shape[:2])
    else:
        lengths = torch.diff(cu_seqlens).long()
        counts = len(lengths)
        at = torch.arange(x.shape[0]) - torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
    begin = torch.as_tensor(offsets)
    if begin.is_floating_point() or (begin.dim() != 0 and tuple(begin.shape) != (counts,)) or bool((begin < 0).any()):
        raise InvalidArgument(f"{function}: seqlen_offsets is {offsets!r}, expected an int of at least 0, "
                              f"or one for each of {counts} sequences")
    begin = begin.long().expand(counts)
    at = at + (begin[:, None] if cu_seqlens is None else torch.repeat_interleave(begin, lengths))
    check_tables(function, cos, sin, int(at.max()) + 1 if at.numel() else 0, x.shape[-1])
    y = turned(x, at, cos, sin, interleaved)
    return x.copy_(y) if inplace else y


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):
    """Rotates the first 2 * width channels of x by tables [rows, width].

    x is [B, T, H, D], or packed [T_total, H, D] with cu_seqlens.
    """
    return apply("apply_rotary_emb", x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)


PLACES = {"apply_rotary_emb": ("layers.rotary", "layers.rotary:apply_rotary_emb_func")}
