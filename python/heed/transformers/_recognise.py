# Recognises mask functions of Transformers by the code objects of the factories that built them.
"""Reads the mask functions of transformers.masking_utils.

A mask function maps (sequence, head, query position, key position) to bool. Transformers' are closures made by a few
factories; `read` takes them apart by their code objects. It gives None where any part is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf


class Pattern:
    """An intersection of constraints on a query and a key; `codes` are the code objects that it was read from."""

    __slots__ = ("causal", "left", "right", "shift", "chunk", "segments", "restarted", "blocks", "padding", "codes")

    def __init__(self) -> None:
        self.causal = False  # key <= query + shift
        self.left: int | None = None  # key >= query + shift - left
        self.right: int | None = None  # key <= query + shift + right
        self.shift: int | None = None  # None: no constraint counts the distance
        self.chunk: tuple[int, Tensor, Tensor | None] | None = None  # size, left padding [B], positions as `restarted`
        self.segments: Tensor | None = None  # [B, T]: query and key are of one segment
        self.restarted: Tensor | None = None  # [B, T]: positions that restart with each segment
        self.blocks: tuple[Tensor, bool] | None = None  # ids [B, T] that lift `causal` (True), or more than it (False)
        self.padding: tuple[Tensor, ...] = ()  # [B, T]: the key is not padding
        self.codes: tuple[CodeType, ...] = ()


def _cell(function: Callable, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _is_table(x: Any, rank: int) -> bool:
    return isinstance(x, Tensor) and x.dim() == rank and x.device.type == "cpu"


# Readers add what a function says to the pattern and return whether they understood it. `shift` is how far the query's
# position was moved against the key's; `positions` is a table [B, T] that positions were looked up in.


def _bidirectional(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    return True


def _by_distance(pattern: Pattern, shift: int, left: int | None, right: int | None) -> bool:
    """Constraints on the distance join if all of them count it alike."""
    if pattern.shift is None:
        pattern.shift = shift
    if left is not None:
        pattern.left = left if pattern.left is None else min(left, pattern.left)
    if right is not None:
        pattern.right = right if pattern.right is None else min(right, pattern.right)
    return pattern.shift == shift and (left is None or left >= 0)


def _causal(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    pattern.causal = True
    return _by_distance(pattern, shift, None, None)


def _sliding(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    window = _cell(function, "sliding_window")
    return type(window) is int and _by_distance(pattern, shift, window - 1, None)


def _sliding_both_ways(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    window = _cell(function, "sliding_window")
    return type(window) is int and _by_distance(pattern, shift, window, window)


def _chunked(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    size, left_padding = _cell(function, "chunk_size"), _cell(function, "left_padding")
    if pattern.chunk or shift or type(size) is not int or size < 1 or not _is_table(left_padding, 1):
        return False
    pattern.chunk = size, left_padding, positions
    return True


def _packed(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    segments = _cell(function, "packed_sequence_mask")
    if pattern.segments is not None or shift or positions is not None or not _is_table(segments, 2):
        return False
    pattern.segments = segments
    return True


def _restarting(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    table = _cell(function, "position_ids")
    if pattern.restarted is not None or shift or positions is not None or not _is_table(table, 2):
        return False
    pattern.restarted = table
    return _read(_cell(function, "mask_function"), pattern, 0, table)


def _padding(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    mask = _cell(function, "padding_mask")
    if shift or positions is not None or not _is_table(mask, 2) or mask.dtype is not torch.bool:
        return False
    pattern.padding += (mask,)
    return True


def _offsets(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    query, key = _cell(function, "q_offset"), _cell(function, "kv_offset")
    if type(query) is not int or type(key) is not int:
        return False
    before = len(pattern.codes)
    understood = _read(_cell(function, "mask_function"), pattern, shift + query - key, positions)
    # A function that looks a position up in a table does not depend on distances alone: equal offsets change it too.
    return understood and _BY_DISTANCE.issuperset(pattern.codes[before:])


def _and(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    return all(_read(part, pattern, shift, positions) for part in _cell(function, "mask_functions"))


def _or(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    """Reads the one known union: another function, or the same block."""
    parts = _cell(function, "mask_functions")
    if len(parts) != 2 or getattr(parts[1], "__code__", None) is not _BLOCKS:
        return False
    ids = _cell(parts[1], "block_sequence_ids")
    if pattern.blocks is not None or shift or positions is not None or not _is_table(ids, 2):
        return False
    pattern.blocks = ids, parts[0] is hf.causal_mask_function
    pattern.codes += (_BLOCKS,)
    return _read(parts[0], pattern, 0, None)


_TABLE = torch.zeros(1, 1, dtype=torch.int64)
_BLOCKS = hf.blockwise_overlay(_TABLE).__code__
_DISTANCES: dict[CodeType, Callable] = {
    hf.bidirectional_mask_function.__code__: _bidirectional,
    hf.causal_mask_function.__code__: _causal,
    hf.sliding_window_overlay(1).__code__: _sliding,
    hf.sliding_window_bidirectional_overlay(1).__code__: _sliding_both_ways,
    hf.and_masks().__code__: _and,
}
_BY_DISTANCE = frozenset(_DISTANCES)
_READERS = {
    **_DISTANCES,
    hf.chunked_overlay(1, _TABLE[0]).__code__: _chunked,
    hf.packed_sequence_mask_function(_TABLE).__code__: _packed,
    hf.remap_positions_for_packed_sequence(hf.causal_mask_function, _TABLE).__code__: _restarting,
    hf.padding_mask_function(_TABLE).__code__: _padding,
    hf.add_offsets_to_mask_function(hf.causal_mask_function, 0, 0).__code__: _offsets,
    hf.or_masks().__code__: _or,
}


def _read(function: Callable, pattern: Pattern, shift: int, positions: Tensor | None) -> bool:
    code = getattr(function, "__code__", None)
    reader = _READERS.get(code)  # type: ignore[arg-type]
    if reader is None:
        return False
    pattern.codes += (code,)  # type: ignore[operator]
    return reader(function, pattern, shift, positions)


def read(function: Callable) -> Pattern | None:
    """The pattern of a mask function; None if it, or a function that it is made of, is unknown."""
    pattern = Pattern()
    return pattern if _read(function, pattern, 0, None) else None


def forget(codes: tuple[CodeType, ...]) -> None:
    """Functions of these code objects are unknown from now on."""
    for code in codes:
        _READERS.pop(code, None)
