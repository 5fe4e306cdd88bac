# heed.torch.pattern_from_block_mask: block masks of FlexAttention as patterns.
"""A BlockMask becomes its lists of whole blocks, and bits of its mask function for the blocks that are kept in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from heed import InvalidArgument, Pattern, _core

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_PAIRS_AT_ONCE = 1 << 20  # pairs per call of the mask function


def _listed(counts: Tensor | None, indices: Tensor | None, nq: int, nk: int) -> Tensor:
    """The blocks of a list, one behind the other: their batch entry, head, row and column, int64 [4, n]."""
    if counts is None or indices is None:
        return torch.empty(4, 0, dtype=torch.int64)
    counts, indices = (x.reshape((1,) * (4 - x.dim()) + x.shape) for x in (counts[..., None], indices))
    if counts.shape[2] < nq:
        raise InvalidArgument(
            f"pattern_from_block_mask: block_mask lists {counts.shape[2]} rows of blocks, expected {nq} for its lengths"
        )
    inside = (torch.arange(indices.shape[3], device=counts.device) < counts) & (indices < nk)
    inside[:, :, nq:] = False
    return torch.cat([torch.stack(inside.nonzero(as_tuple=True)[:3]), indices[inside].long()[None]])


def _bits(mask_mod: Any, blocks: Tensor, block: tuple[int, int], lengths: tuple[int, int]) -> np.ndarray:
    """The pairs kept in each of these blocks, int64 [n, rows, ceil(columns / 64)]: a bit per key, the lowest first."""
    from torch.nn.attention.flex_attention import create_mask

    (rows, columns), (Tq, Tk) = block, lengths
    words = np.zeros((blocks.shape[1], rows, -(-columns // 64)), np.int64)
    step = max(1, _PAIRS_AT_ONCE // (rows * columns))
    for begin in range(0, blocks.shape[1], step):
        b, h, i, j = blocks[:, begin : begin + step]

        def of_block(n: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
            # Indices of pairs beyond the lengths are clamped: the tables that the function reads end there.
            q, k = (i[n] * rows + row).clamp(max=Tq - 1), (j[n] * columns + column).clamp(max=Tk - 1)  # noqa: B023
            return mask_mod(b[n], h[n], q, k)  # noqa: B023

        keep = create_mask(of_block, len(b), 1, rows, columns, device=blocks.device)
        packed = np.packbits(keep[:, 0].cpu().numpy(), axis=-1, bitorder="little")
        words[begin : begin + step].view(np.uint8)[..., : packed.shape[-1]] = packed
    return words


@torch.no_grad()
def pattern_from_block_mask(block_mask: BlockMask) -> Pattern:
    """The pattern that a BlockMask of FlexAttention says, for `pattern=` of heed.torch.attention.

    Blocks that it lists as full are kept whole; of those that it lists as partial its mask_mod is asked once, of these
    blocks alone: a bit for each of their pairs stays in memory, no table of all rows and keys is made. Any BLOCK_SIZE,
    lengths that are no multiples of it, batch entries and heads of 1 or as many as the call has query heads. As in
    FlexAttention, the numbers of rows are those of the call, not positions, and a call must have as many rows and keys
    as the mask; elsewhere heed's attention takes [B, T, H, D], FlexAttention [B, H, T, D].

    The pattern combines with others by `|` and `&`. The repr shows sizes, but is no expression that parses, and the
    pattern is equal to itself alone: keep it, instead of making it anew for each call.

    Args:
      block_mask: of torch.nn.attention.flex_attention, by create_block_mask or BlockMask.from_kv_blocks

    Example:

      >>> import torch, heed.torch
      >>> from torch.nn.attention.flex_attention import create_block_mask
      >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 384, 384, device="cpu")
      >>> pattern = heed.torch.pattern_from_block_mask(mask)
      >>> pattern
      block_mask(<384 x 384 in blocks of 128 x 128: 3 whole, 3 in part>)
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        kind = type(block_mask).__name__
        raise InvalidArgument(
            f"pattern_from_block_mask: block_mask is of type {kind}, expected a BlockMask of "
            "torch.nn.attention.flex_attention"
        )
    Tq, Tk = lengths = tuple(block_mask.seq_lengths)
    rows, columns = block = tuple(min(size, max(T, 1)) for size, T in zip(block_mask.BLOCK_SIZE, lengths))
    nq, nk = -(-Tq // rows), -(-Tk // columns)
    B, H = (1, 1, *block_mask.kv_num_blocks.shape[:-1])[-2:]

    whole = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, nq, nk)
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, nq, nk)
    of_whole, of_partial = (
        (((b * H + h) * nq + i) * nk + j).cpu().numpy() for b, h, i, j in (whole, partial)
    )
    # In order; a block of both lists is whole.
    at, first = np.unique(np.concatenate([of_whole, of_partial]), return_index=True)
    parts = np.where(first < len(of_whole), -1, first - len(of_whole))
    begins = np.searchsorted(at, np.arange(B * H * nq + 1) * nk)
    row_ptr = begins[np.arange(B * H)[:, None] * nq + np.arange(nq + 1)].reshape(B, H, nq + 1)
    return _core._block_mask(row_ptr, at % max(nk, 1), parts, _bits(block_mask.mask_mod, partial, block, lengths),
                             block, lengths)
