# heed.torch.nn.LongformerAttention and BigBirdAttention: attention of encoders over patterns.
"""LongformerAttention and BigBirdAttention."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument, patterns
from heed.torch.nn import _families
from heed.torch.nn._layer import Layer, check_choice, check_multiple, check_sizes


class LongformerAttention(Layer):
    """Attention through a window and through global tokens, whose own rows have projections of their own.

        y_i = concat_h sum over j of softmax(head_dim^-1/2 <q_i, k_j>) v_j        |i - j| <= window // 2, or j global
        y_i = the same by query_global, key_global, value_global over all j       for global i

    x, y [B, T, hidden_size]; global_tokens bool [B, T]. Parameters are those of Transformers' LongformerSelfAttention,
    whose rows have no output projection; T need be no multiple of the window. Rows beyond `lengths` are 0. Source:
    Beltagy et al., arXiv:2004.05150. `options` of a call are those of heed.torch.longformer.
    """

    def __init__(self, hidden_size: int, num_heads: int, window: int, *, bias: bool = True, dropout: float = 0.0,
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_sizes("LongformerAttention", hidden_size=hidden_size, num_heads=num_heads, window=window)
        check_multiple("LongformerAttention", "hidden_size", hidden_size, "num_heads", num_heads)
        self.hidden_size, self.num_heads, self.window, self.dropout = hidden_size, num_heads, window, dropout
        for name in ("query", "key", "value", "query_global", "key_global", "value_global"):
            self.add_module(name, nn.Linear(hidden_size, hidden_size, bias=bias, device=device, dtype=dtype))

    @classmethod
    def from_config(cls, config: Any, layer: int = 0, **options: Any) -> LongformerAttention:
        """Reads a configuration of `model_type` longformer, or none; `layer` says whose, as windows may differ."""
        c = _families.LONGFORMER.open(config)
        hidden_size, heads, window = c["hidden_size"], c["num_attention_heads"], c["attention_window"]
        own = {"dropout": c["attention_probs_dropout_prob"]}
        c.close()
        if not isinstance(window, int):
            window = c.by_layer("attention_window", layer)
        return cls(hidden_size, heads, window, **{**own, **options})

    def forward(self, x: Tensor, state: None = None, *, global_tokens: Tensor | None = None, lengths: Any = None,
                **options: Any) -> Tensor:
        x, lengths = self._check(x, state, type(None), lengths)
        shape = list(x.shape[:2])
        if global_tokens is not None and (global_tokens.dtype != torch.bool or list(global_tokens.shape) != shape):
            given = f"{global_tokens.dtype} {list(global_tokens.shape)}"
            raise InvalidArgument(f"LongformerAttention: global_tokens is {given}, expected bool {shape}")
        names, tokens = ["query", "key", "value"], torch.empty((shape[0], 0), dtype=torch.int64)
        if global_tokens is not None and bool(global_tokens.any()):
            names += ["query_global", "key_global", "value_global"]
            count = global_tokens.sum(1, keepdim=True)
            most = int(count.max())
            tokens = global_tokens.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
            tokens = tokens.where(torch.arange(most) < count, -1)
        heads = [self._modules[name](x).unflatten(-1, (self.num_heads, -1)) for name in names]  # type: ignore[misc]
        o = heed.torch.longformer(*heads, window=self.window, tokens=tokens, key_lengths=lengths, query_lengths=lengths,
                                  dropout=self.dropout if self.training else 0.0, **options)
        return o.flatten(2)


@functools.lru_cache(maxsize=64)
def _counted(blocks: int, block: int, random: int) -> list[tuple[heed.Pattern, float]]:
    """Sets of blocks that inner rows of BigBird attend to once, twice, ... in evaluation, and logs of these counts."""
    times = np.zeros((blocks, blocks), int)
    times[[0, -1]] = 1
    inner = np.arange(1, blocks - 1)
    for column in (0, inner - 1, inner, inner + 1, blocks - 1):
        times[inner, column] = 1
    times[inner, 0] += random
    return counted_patterns(times, block)


def counted_patterns(times: np.ndarray, block: int) -> list[tuple[heed.Pattern, float]]:
    """Patterns of the blocks that are attended to n times, and log n, for each n above 0."""
    return [(patterns.blocks(times == n, block), math.log(n)) for n in np.unique(times[times > 0])]


def attend_counted(q: Tensor, k: Tensor, v: Tensor, parts: list[tuple[heed.Pattern, float]], **options: Any) -> Tensor:
    """Attention in which some pairs count more than once: one softmax over all parts, from their logs of sums. A part
    without keys has one of -inf and counts for nothing."""
    o = of_all = None
    for pattern, log in parts:
        part, lse = heed.torch.attention(q, k, v, pattern=pattern, return_lse=True, **options)
        lse = (lse + log).clamp(min=torch.finfo(lse.dtype).min)
        if o is None:
            o, of_all = part, lse
            continue
        share = torch.sigmoid(lse - of_all).transpose(1, 2)[..., None]
        o = torch.lerp(o.to(share.dtype), part.to(share.dtype), share).to(q.dtype)
        of_all = torch.logaddexp(of_all, lse)
    return o  # type: ignore[return-value]


class BigBirdAttention(Layer):
    """Attention of blocks to the first and the last block, to their neighbours and to random ones; those two see
    everything.

        y_i = concat_h sum over j of softmax(head_dim^-1/2 <q_i, k_j>) v_j        j in blocks that the block of i keeps

    x, y [B, T, hidden_size]. Parameters are those of Transformers' BigBirdBlockSparseAttention, whose rows have no
    output projection. random="original": as that evaluates, where the first block counts once more for each random
    block, T a multiple of block and at least 3 of them, in training too; "paper": random blocks are drawn from `seed`,
    and T is any. Rows beyond `lengths` are 0. Source: Zaheer et al., arXiv:2007.14062. `options` of a call are those of
    heed.torch.attention.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, block: int = 64,
                 num_random: int = 3, random: str = "original", seed: int = 0, bias: bool = True, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        check_sizes("BigBirdAttention", hidden_size=hidden_size, num_heads=num_heads, block=block,
                    num_random=num_random)
        check_multiple("BigBirdAttention", "hidden_size", hidden_size, "num_heads", num_heads)
        check_choice("BigBirdAttention", "random", random, ("original", "paper"))
        self.hidden_size, self.num_heads, self.block, self.num_random = hidden_size, num_heads, block, num_random
        self.random, self.seed = random, seed
        for name in ("query", "key", "value"):
            self.add_module(name, nn.Linear(hidden_size, hidden_size, bias=bias, device=device, dtype=dtype))

    @classmethod
    def from_config(cls, config: Any, layer: int = 0, **options: Any) -> BigBirdAttention:
        """Reads a configuration of `model_type` big_bird with block-sparse attention, or none; `layer` is the seed."""
        c = _families.BIG_BIRD.open(config)
        hidden_size, heads = c["hidden_size"], c["num_attention_heads"]
        own = {"block": c["block_size"], "num_random": c["num_random_blocks"], "bias": c["use_bias"], "seed": layer}
        c.close()
        return cls(hidden_size, heads, **{**own, **options})

    def forward(self, x: Tensor, state: None = None, *, lengths: Any = None, **options: Any) -> Tensor:
        x, lengths = self._check(x, state, type(None), lengths)
        q, k, v = (project(x).unflatten(-1, (self.num_heads, -1)) for project in (self.query, self.key, self.value))
        if self.random == "paper":
            parts = [(patterns.bigbird(self.block, self.num_random, self.seed), 0.0)]
        else:
            if x.shape[1] % self.block or x.shape[1] < 3 * self.block:
                expected = f"a multiple of block, {self.block}, of at least {3 * self.block}"
                raise InvalidArgument(f"BigBirdAttention: x has {x.shape[1]} tokens, expected {expected}; "
                                      "random='paper' takes any")
            parts = _counted(x.shape[1] // self.block, self.block, self.num_random)
        return attend_counted(q, k, v, parts, key_lengths=lengths, query_lengths=lengths, **options).flatten(2)
