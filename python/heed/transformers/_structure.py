# A mask as options of heed's attention: from a pattern and the sizes of a call, and checked against the mask function.
"""Turns patterns of positions into options of torch.ops.heed.attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as hf

from heed.transformers import _recognise
from heed.transformers._recognise import Pattern


class Call(NamedTuple):
    """The call that a mask is made for: query i has position q_offset + i, key j has k_offset + j."""

    batch: int
    rows: int
    keys: int
    q_offset: int
    k_offset: int
    function: Callable
    padding: Tensor | None  # bool [B, T] over all positions; beyond its end there is no key


class Structure(NamedTuple):
    """Options of the operator, in its order."""

    causal: bool = False
    align: str = "bottom_right"
    window: tuple[int, int] | None = None
    query_starts: Tensor | None = None
    key_lengths: Tensor | None = None
    key_starts: Tensor | None = None
    query_lengths: None = None
    mask: Tensor | None = None
    segments_q: Tensor | None = None
    segments_k: Tensor | None = None
    prefix: Tensor | None = None
    chunk: int | None = None


NO_MASK = Structure()  # this object represents a mask that "eager" does not make, and whose shape it does not check


def masks_nothing(s: Structure) -> bool:
    """Returns whether every query sees every key."""
    return not s.causal and s.window is None and all(option is None for option in s[4:])


def _of_keys(table: Tensor, call: Call) -> Tensor:
    return table[:, call.k_offset : call.k_offset + call.keys]


def _of_queries(table: Tensor, call: Call) -> Tensor:
    return table[:, call.q_offset : call.q_offset + call.rows]


def _present(pattern: Pattern, call: Call) -> Tensor | None:
    """True for keys that are not padding, bool [B, keys]; None if no key is padding."""
    present = None
    if call.padding is not None:
        present = _of_keys(call.padding, call)
        if present.shape[1] < call.keys:
            present = torch.nn.functional.pad(present, (0, call.keys - present.shape[1]))
    for table in pattern.padding:
        keys = _of_keys(table, call).expand(call.batch, call.keys)
        present = keys if present is None else present & keys
    return None if present is None or present.all() else present


def _interval(present: Tensor) -> tuple[Tensor, Tensor] | None:
    """First and one past the last key of each row, where these and all between are present."""
    begins = (present[:, 1:] > present[:, :-1]).sum(-1) + present[:, 0]
    if (begins > 1).any():
        return None
    first = present.view(torch.uint8).argmax(-1)
    return first, first + present.sum(-1)


def _restarts_are_distances(segments: Tensor, positions: Tensor) -> bool:
    """Returns whether each segment is one run of tokens whose positions increase by one."""
    step = segments[:, 1:] - segments[:, :-1]
    return bool(((step > 0) | ((step == 0) & (positions[:, 1:] - positions[:, :-1] == 1))).all())


def _from_zero(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, int]:
    """Two tables of numbers moved to begin at 0, and how many numbers there are."""
    low = min(int(queries.min()), int(keys.min()))
    return queries - low, keys - low, max(int(queries.max()), int(keys.max())) - low + 1


def _segments(pattern: Pattern, call: Call, by_chunk: bool) -> tuple[Tensor, Tensor] | None:
    """Segments [B, rows] and [B, keys] that say what the pattern's do, and its chunks if `by_chunk`."""
    parts = []
    if pattern.segments is not None:
        parts.append((_of_queries(pattern.segments, call), _of_keys(pattern.segments, call)))
    if by_chunk:
        size, left_padding, positions = pattern.chunk  # type: ignore[misc]
        if positions is None:
            positions = torch.arange(max(call.q_offset + call.rows, call.k_offset + call.keys))[None]
        chunks = (positions - left_padding[:, None]).div(size, rounding_mode="floor")
        parts.append((_of_queries(chunks, call), _of_keys(chunks, call)))
    joined = None
    for queries, keys in parts:
        if queries.shape[1] != call.rows or keys.shape[1] != call.keys:
            return None
        queries, keys, count = _from_zero(queries, keys)
        joined = (queries, keys) if joined is None else (joined[0] * count + queries, joined[1] * count + keys)
    return joined and tuple(x.expand(call.batch, -1).contiguous() for x in joined)  # type: ignore[return-value]


def _chunk_says_nothing(pattern: Pattern, call: Call, starts: list[int]) -> bool:
    """Returns whether all keys that a query could see without chunks are in its own chunk."""
    size, left_padding, positions = pattern.chunk  # type: ignore[misc]
    last = max(call.q_offset + call.rows, call.k_offset + call.keys) - 1
    spans = zip(left_padding.expand(call.batch).tolist(), starts)
    return pattern.causal and positions is None and pattern.blocks is None and all(
        (call.k_offset + start - padding) // size == (last - padding) // size for padding, start in spans
    )


def _chunks_begin_with_keys(pattern: Pattern, call: Call, starts: list[int]) -> bool:
    """Returns whether chunks counted from a row's first key are the pattern's chunks."""
    size, left_padding, positions = pattern.chunk  # type: ignore[misc]
    spans = zip(left_padding.expand(call.batch).tolist(), starts)
    return positions is None and not pattern.shift and pattern.segments is None and all(
        (call.k_offset + start - padding) % size == 0 for padding, start in spans
    )


def _prefix(ids: Tensor, call: Call, present: Tensor | None, starts: list[int]) -> Tensor | None:
    """Blocks that lift causality, as the length of a prefix: where each row has one block, at its first keys."""
    keys = _of_keys(ids, call)
    if keys.shape != (call.batch, call.keys):
        return None
    inside = keys >= 0 if present is None else (keys >= 0) & present
    first, count, at = torch.tensor(starts), inside.sum(-1), torch.arange(call.keys)
    run = (at >= first[:, None]) & (at < (first + count)[:, None])
    one_id = (count == 0) | (keys.where(inside, keys.amax()).amin(-1) == keys.where(inside, keys.amin()).amax(-1))
    late = call.q_offset - call.k_offset >= first  # no query before the block, which would see it too
    return count if torch.equal(inside, run) and bool((one_id & late).all()) else None


def resolve(pattern: Pattern, call: Call) -> Structure | None:
    """The options that mask what the pattern and padding mask; None where heed has no such options."""
    present = _present(pattern, call)
    key_starts = key_lengths = mask = prefix = None
    starts = [0] * call.batch
    if present is not None:
        if (interval := _interval(present)) is not None:
            starts, lengths = (x.tolist() for x in interval)
            key_starts = interval[0] if any(starts) else None
            key_lengths = interval[1] if min(lengths) < call.keys else None
        else:
            mask = present[:, None, None]

    if pattern.blocks is not None:
        ids, lifts_causal_only = pattern.blocks
        queries = _of_queries(ids, call)
        if queries.shape[1] != call.rows:
            return None
        if queries.amax() >= 0:  # else no query is in a block
            if not lifts_causal_only or pattern.shift or pattern.chunk or pattern.segments is not None:
                return None
            if (prefix := _prefix(ids, call, present, starts)) is None:
                return None

    first = call.q_offset + (pattern.shift or 0) - call.k_offset  # position of query 0 among the keys
    causal = pattern.causal and first < call.keys - 1
    left = pattern.left if pattern.left is not None and first + call.rows - 1 > pattern.left else -1
    right = -1
    if pattern.right is not None and first + pattern.right < call.keys - 1 and (prefix is not None or not causal):
        right = pattern.right

    if pattern.restarted is not None and (
        pattern.segments is None or not _restarts_are_distances(pattern.segments, pattern.restarted)
    ):
        return None
    chunk = segments = None
    by_chunk = pattern.chunk is not None and not _chunk_says_nothing(pattern, call, starts)
    if by_chunk and _chunks_begin_with_keys(pattern, call, starts):
        chunk, by_chunk = pattern.chunk[0], False  # type: ignore[index]
    if by_chunk or pattern.segments is not None:
        segments = _segments(pattern, call, by_chunk)
        if segments is None:
            return None

    align, query_starts = "bottom_right", None
    if first != call.keys - call.rows and (causal or left >= 0 or right >= 0 or chunk is not None):
        if first == 0:
            align = "top_left"
        else:
            query_starts = torch.full((call.batch,), first)
    window = None if left == right == -1 else (left, right)
    segments_q, segments_k = segments or (None, None)
    return Structure(causal, align, window, query_starts, key_lengths, key_starts, None, mask, segments_q, segments_k,
                     prefix, chunk)


def visible(s: Structure, rows: int, keys: int, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """heed's rule of visibility without `mask`, for sequences b, rows i and keys j: bool [b, 1, i, j]."""
    b, i = b[:, None, None, None], i[:, None]
    p = i + (0 if s.align == "top_left" else keys - rows) if s.query_starts is None else i + s.query_starts[b]
    start = s.key_starts[b] if s.key_starts is not None else torch.zeros_like(b)
    keep = (j >= start) & (j < (keys if s.key_lengths is None else s.key_lengths[b]))
    if s.segments_q is not None and s.segments_k is not None:
        keep = keep & (s.segments_q[b, i] == s.segments_k[b, j])
    if s.causal:
        keep = keep & ((j <= p) | (j - start < (0 if s.prefix is None else s.prefix[b])))
    if s.window is not None:
        left, right = s.window
        keep = keep & ((j >= p - left) | (left < 0)) & ((j <= p + right) | (right < 0))
    if s.chunk is not None:
        chunk_of_key, chunk_of_query = ((x - start).div(s.chunk, rounding_mode="floor") for x in (j, p))
        keep = keep & (chunk_of_key == chunk_of_query)
    return keep.expand(b.shape[0], 1, i.shape[0], -1)


def _probes(size: int, *marks: int) -> Tensor:
    """Some of 0 .. size - 1: both ends, the middle, and what lies beside the marks."""
    near = {m + d for m in (0, size // 2, size - 1, *marks) for d in (-1, 0, 1)}
    return torch.tensor(sorted(n for n in near if 0 <= n < size))


def agrees(structure: Structure, pattern: Pattern, call: Call) -> bool:
    """Returns whether the structure masks the same pairs as the mask function and the padding mask, on probes."""
    at = call.q_offset - call.k_offset
    spans = {n for n in (pattern.left, pattern.right, pattern.chunk and pattern.chunk[0]) if n}
    i = _probes(call.rows, *(n - at for n in spans), *(2 * n - at for n in spans))
    marks = {row + at + sign * n for row in i.tolist() for n in (0, *spans) for sign in (-1, 1)}
    j, b = _probes(call.keys, *marks), _probes(call.batch)
    keep = call.function(
        b[:, None, None, None], torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        (call.q_offset + i)[:, None], call.k_offset + j,
    )
    if call.padding is not None:
        padded = torch.nn.functional.pad(call.padding, (0, max(0, call.k_offset + call.keys - call.padding.shape[1])))
        keep = keep & padded[b[:, None, None, None], call.k_offset + j]
    ours = visible(structure, call.rows, call.keys, b, i, j)
    if structure.mask is not None:
        ours = ours & structure.mask[b][..., j]
    return torch.equal(keep.expand_as(ours), ours)


_agreed: dict[tuple, bool] = {}  # by code objects: whether structures read from them were right


def structure(call: Call) -> Structure | None:
    """The structure of a call's mask; None where it is not known for sure."""
    if not _agreed:
        _check_readers()
    pattern = _recognise.read(call.function)
    if pattern is None:
        return None
    found = resolve(pattern, call)
    if found is None:
        return None
    agreed = _agreed.get(pattern.codes)
    if agreed is None:
        agreed = _agreed[pattern.codes] = agrees(found, pattern, call)
    return found if agreed else None


def _examples() -> list[Callable]:
    """One mask function of each kind, over 8 positions of 2 sequences."""
    packed = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [4, 5, 6, 7, 8, 9, 0, 1]])
    blocks = torch.tensor([[0, 0, 0, -1, -1, -1, -1, -1], [-1] * 8])
    keys = torch.tensor([[True] * 8, [False] * 2 + [True] * 5 + [False]])
    sliding = hf.sliding_window_causal_mask_function(3)
    padding = hf.padding_mask_function(keys)
    chunked = hf.chunked_causal_mask_function(2, torch.tensor([0, 0]))
    return [
        hf.bidirectional_mask_function,
        hf.causal_mask_function,
        sliding,
        hf.sliding_window_bidirectional_mask_function(2),
        hf.and_masks(hf.chunked_causal_mask_function(3, torch.tensor([0, 2])), padding),
        hf.packed_sequence_compatibility_function(sliding, positions, packed),
        hf.packed_sequence_compatibility_function(chunked, positions, packed),
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(blocks)),
        hf.add_offsets_to_mask_function(sliding, 2, 1),
    ]


def _check_readers() -> None:
    """Checks, once in a process, that this version's factories make the masks that they are read as; forgets others."""
    _agreed[()] = True
    for function in _examples():
        for rows, keys, q_offset, k_offset in ((8, 8, 0, 0), (3, 8, 5, 0), (2, 5, 5, 2)):
            call = Call(2, rows, keys, q_offset, k_offset, function, None)
            pattern = _recognise.read(function)
            found = pattern and resolve(pattern, call)
            if pattern and found and not agrees(found, pattern, call):
                warnings.warn("heed.transformers: a mask function has changed in this version of Transformers; "
                              "such masks are dense", stacklevel=2)
                _recognise.forget(pattern.codes)
