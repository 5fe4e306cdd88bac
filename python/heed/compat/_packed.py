# Sequences that are given by an index per token, as packed sequences.
"""`seq_idx` of mamba_ssm and causal_conv1d: in a row of tokens a sequence begins wherever the index changes."""

from __future__ import annotations

import torch
from torch import Tensor

from heed import InvalidArgument


class Sequences:
    """The sequences of seq_idx [B, T], numbered through the batch."""

    def __init__(self, function: str, seq_idx: Tensor, batch: int, tokens: int):
        if tuple(seq_idx.shape) != (batch, tokens):
            raise InvalidArgument(f"{function}: seq_idx has shape {list(seq_idx.shape)}, expected [{batch}, {tokens}]")
        begins = torch.ones(batch, tokens, dtype=torch.bool)
        begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        at = begins.flatten().nonzero().squeeze(1)
        self.bounds = torch.cat((at, at.new_tensor([batch * tokens])))
        self.last = begins.sum(1).cumsum(0) - 1  # in each row of the batch
        self.first = torch.cat((self.last.new_zeros(1), self.last[:-1] + 1))
        self.shape = (batch, tokens)

    def pack(self, x: Tensor, axis: int) -> Tensor:
        """[B, ..., T, ...] with T at `axis` as [1, ..., B * T, ...]; a view where tokens lie behind one another."""
        return x.movedim(axis, 1).flatten(0, 1).unsqueeze(0).movedim(1, axis)

    def unpack(self, x: Tensor, axis: int) -> Tensor:
        return x.movedim(axis, 1).squeeze(0).unflatten(0, self.shape).movedim(1, axis)
