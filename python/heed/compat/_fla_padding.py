# Padding and packing as fla has them: fla.layers.utils and the bounds of fla.ops.utils.
"""Plain PyTorch, with gradients: no mechanism of heed is in it, but model files import it beside those that are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heed import Unsupported
from heed.compat import _padding
from heed.compat._padding import bounds, check_mask, longest


def index_first_axis(x, indices):
    """The rows of x [N, ...] that `indices` [n] names."""
    return x[indices]


def index_put_first_axis(x, indices, first_axis_dim):
    """Zeros [first_axis_dim, ...] with the rows of x at `indices` [n]."""
    return _padding.index_put_first_axis(x, indices, first_axis_dim)


def prepare_lens(cu_seqlens):
    """Lengths of packed sequences."""
    return torch.diff(cu_seqlens)


def prepare_lens_from_mask(mask):
    """Tokens per row of a mask [B, T], int32."""
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens, dtype=torch.int32):
    """Bounds of sequences of these lengths."""
    return F.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask, dtype=torch.int32):
    """Bounds of the sequences that a mask [B, T] leaves."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_position_ids(cu_seqlens, cu_seqlens_cpu=None):
    """The position of each packed token in its sequence."""
    at = torch.arange(int(cu_seqlens[-1]))
    return (at - torch.repeat_interleave(cu_seqlens[:-1].long(), torch.diff(cu_seqlens).long())).to(cu_seqlens)


def prepare_sequence_ids(cu_seqlens, cu_seqlens_cpu=None):
    """The index of the sequence of each packed token, counted over the sequences that have tokens."""
    return prepare_position_ids(cu_seqlens).eq(0).cumsum(0) - 1


def prepare_token_indices(cu_seqlens, cu_seqlens_cpu=None):
    """[T, 2]: the sequence and the place in it of each packed token."""
    return torch.stack((prepare_sequence_ids(cu_seqlens), prepare_position_ids(cu_seqlens)), 1).to(cu_seqlens)


def get_unpad_data(attention_mask):
    """Indices of the tokens of a mask [B, T], cu_seqlens, and the longest length."""
    lengths = prepare_lens_from_mask(attention_mask)
    return attention_mask.flatten().nonzero().squeeze(1), bounds(lengths), longest(lengths)


def unpad_input(q, states, attention_mask, q_len, keepdim=False):
    """Rows of q, a tensor or several, and of states, without padding: the mask is of the states.

    q has their length or one token. Returns q, states, indices of q, and for q and states cu_seqlens and longest
    lengths.
    """
    indices, cu, most = get_unpad_data(attention_mask)
    given: Sequence[Any] = (q,) if isinstance(q, Tensor) else q
    B, T = states[0].shape[:2]
    check_mask("unpad_input", "attention_mask", attention_mask, states[0])
    kept = tuple(x.flatten(0, 1)[indices] for x in states)
    if q_len == T:
        rows, cu_q, most_q, of_q = tuple(x.flatten(0, 1)[indices] for x in given), cu, most, indices
    elif q_len == 1:
        cu_q = torch.arange(B + 1, dtype=torch.int32)
        rows, most_q, of_q = tuple(x.squeeze(1) for x in given), 1, cu_q[:-1]
    else:
        raise Unsupported(f"unpad_input: q_len is {q_len}, expected 1 or the length of the states, {T}")
    if keepdim:
        rows, kept = (tuple(x.unsqueeze(0) for x in of) for of in (rows, kept))
    return rows[0] if isinstance(q, Tensor) else rows, kept, of_q, (cu_q, cu), (most_q, most)


def pad_input(hidden_states, indices, batch_size, seq_len):
    """Rows [n, ...] back at their indices of a batch: [batch_size, seq_len, ...], zeros elsewhere."""
    return _padding.pad_input(hidden_states, indices, batch_size, seq_len)


PLACES = dict.fromkeys(
    ("get_unpad_data", "index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"), "layers.utils"
) | dict.fromkeys(
    ("prepare_cu_seqlens_from_lens", "prepare_cu_seqlens_from_mask", "prepare_lens", "prepare_lens_from_mask",
     "prepare_position_ids", "prepare_sequence_ids", "prepare_token_indices"), "ops.utils.index")
