# flash_attn.bert_padding: rows of padded batches, taken out and put back.
"""Plain PyTorch, with gradients: no mechanism of heed is in it, but model files import it beside those that are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heed import InvalidArgument


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of input [N, ...] that `indices` [n] names."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with the rows of `values` at `indices` [n]."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as index_first_axis gives them, and the input itself."""
    return input[indices], input.view_as(input)


def bounds(lengths: Tensor) -> Tensor:
    """cu_seqlens, int32, of lengths [B]."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def check_mask(function: str, name: str, mask: Tensor, rows: Tensor) -> None:
    if mask.dim() != 2 or rows.dim() < 2 or mask.shape != rows.shape[:2]:
        raise InvalidArgument(f"{function}: {name} has shape {list(mask.shape)}, expected {list(rows.shape[:2])}")


def longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """The rows of hidden_states [B, T, ...] where one of the masks [B, T] is 1.

    Returns the rows [n, ...], their indices, cu_seqlens, the longest length, and the lengths by attention_mask alone.
    """
    check_mask("unpad_input", "attention_mask", attention_mask, hidden_states)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().squeeze(1)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, bounds(lengths), longest(lengths), used


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """unpad_input of rows that hold several sequences: the mask holds their lengths, followed by zeros."""
    name = "unpad_input_for_concatenated_sequences"
    check_mask(name, "attention_mask_in_length", attention_mask_in_length, hidden_states)
    kept = torch.arange(hidden_states.shape[1]) < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    indices = kept.flatten().nonzero().squeeze(1)
    return hidden_states.flatten(0, 1)[indices], indices, bounds(lengths), longest(lengths)


def pad_input(hidden_states, indices, batch, seqlen):
    """Rows [n, ...] back at their indices of a batch: [batch, seqlen, ...], zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


PLACES = dict.fromkeys(
    ("index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
     "unpad_input_for_concatenated_sequences"), "bert_padding")
