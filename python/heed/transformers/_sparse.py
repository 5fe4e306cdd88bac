# Sparse attention layers of Transformers, computed by heed: those of Longformer, LED, BigBird and BigBird-Pegasus.
"""Methods of modeling files, as in _layers, that call heed's attention with a pattern instead of masks and chunks."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

import heed.torch
from heed import patterns
from heed.torch.nn._sparse import attend_counted, counted_patterns
from heed.transformers._layers import Declined, Method


def _declines(wants_weights: bool) -> Declined | None:
    if wants_weights:
        return Declined("output_attentions was asked for, expected False: heed never has the weights")
    if torch.compiler.is_compiling():
        return Declined("is being compiled, expected an eager call")
    return None


def _keys(present: Tensor) -> dict[str, Tensor]:
    """The options of attention that leave out the keys that are absent from bool [B, T]."""
    from heed.transformers._structure import _interval

    if bool(present.all()):
        return {}
    if (interval := _interval(present)) is None:
        return {"mask": present[:, None, None]}
    return {"key_starts": interval[0], "key_lengths": interval[1]}


@functools.lru_cache(maxsize=64)
def _columns(table: bytes, batch: int, tokens: int) -> heed.Pattern:
    """The keys of a table of bools [batch, tokens], seen by every row."""
    keep = np.frombuffer(table, bool).reshape(batch, 1, 1, tokens)
    return patterns.blocks(keep[0] if (keep == keep[0]).all() else keep, (tokens, 1))


def _longformer(self, hidden_states, attention_mask=None, is_index_masked=None, is_index_global_attn=None,
                is_global_attn=None, output_attentions=False):
    """LongformerSelfAttention.forward: every row by its window and the global keys, then global rows by projections of
    their own in the place of what they have got."""
    if (declined := _declines(output_attentions)) is not None:
        return declined
    heads = (self.num_heads, self.head_dim)
    options = {**_keys(~is_index_masked), "dropout": self.dropout if self.training else 0.0}
    q, k, v = (project(hidden_states).unflatten(-1, heads) for project in (self.query, self.key, self.value))
    pattern = patterns.sliding_window(*2 * (self.one_sided_attn_window_size,))
    if is_global_attn:
        pattern = pattern | _columns(is_index_global_attn.numpy().tobytes(), *is_index_global_attn.shape)
    o = heed.torch.attention(q, k, v, pattern=pattern, **options)
    if is_global_attn:
        counts = is_index_global_attn.sum(1)
        # The global rows of the entries follow each other.
        listed = torch.arange(int(counts.max())) < counts[:, None]
        rows = hidden_states.new_zeros(*listed.shape, hidden_states.shape[-1])
        rows[listed] = hidden_states[is_index_global_attn]
        k, v = (project(hidden_states).unflatten(-1, heads) for project in (self.key_global, self.value_global))
        of_global = heed.torch.attention(self.query_global(rows).unflatten(-1, heads), k, v, **options)
        o = o.index_put(is_index_global_attn.nonzero(as_tuple=True), of_global[listed])
    return (o.flatten(2).masked_fill(is_index_masked[..., None], 0),)


def _drawn(self, blocks: int) -> np.ndarray:
    """The random blocks of inner rows, [heads, blocks - 2, r], drawn as in bigbird_block_sparse_attention."""
    size, heads, count, tokens = (self.block_size, self.num_attention_heads, self.num_random_blocks,
                                  blocks * self.block_size)
    before = np.random.get_state()
    try:
        np.random.seed(self.seed)
        if tokens in (1024, 3072, 4096):
            lengths = (self.max_seqlen, self.max_seqlen)
            draws = (self._bigbird_block_rand_mask(*lengths, size, size, count, last_idx=1024) for _ in range(heads))
            return np.stack([draw[: blocks - 2] for draw in draws])
        lengths, counts = self._get_rand_attn_plan(tokens, size, count)
        return np.stack(self._bigbird_block_rand_mask_with_head(tokens, tokens, size, size, heads, lengths, counts))
    finally:
        np.random.set_state(before)


_parts: dict[tuple, list[tuple[heed.Pattern, float]]] = {}  # patterns of recently used layers


def _bigbird_parts(self, tokens: int) -> list[tuple[heed.Pattern, float]]:
    """Sets of pairs that are attended to once, twice and so on, and the logarithms of these numbers."""
    key = (type(self), self.seed, self.training, tokens, self.block_size, self.num_attention_heads,
           self.num_random_blocks, self.max_seqlen)
    if key not in _parts:
        blocks = tokens // self.block_size
        inner, last = np.arange(1, blocks - 1), blocks - 1
        drawn = _drawn(self, blocks) if self.training else np.zeros((1, blocks - 2, self.num_random_blocks), int)
        times = np.zeros((len(drawn), blocks, blocks), int)
        times[:, [0, last]] = 1
        for column in (0, inner - 1, inner, inner + 1, last):
            times[:, inner, column] = 1
        np.add.at(times, (np.arange(len(drawn))[:, None, None], inner[:, None], drawn), 1)
        if len(_parts) >= 64:
            _parts.clear()
        _parts[key] = counted_patterns(times, self.block_size)
    return _parts[key]


def _bigbird(as_the_paper: bool, self, hidden_states, band_mask, from_mask, to_mask, options):
    from heed.transformers._attention import _wants_weights

    if (declined := _declines(_wants_weights(options))) is not None:
        return declined
    if self.training and self.seed is None:
        return Declined("draws other blocks in every call, expected a seed")
    heads = (self.num_attention_heads, self.attention_head_size)
    q, k, v = (project(hidden_states).unflatten(-1, heads) for project in (self.query, self.key, self.value))
    if as_the_paper:
        parts = [(patterns.bigbird(self.block_size, self.num_random_blocks, self.seed or 0), 0.0)]
    else:
        parts = _bigbird_parts(self, hidden_states.shape[1])
    keys = _keys(to_mask[:, 0, 0] != 0)
    return attend_counted(q, k, v, parts, **keys).masked_fill(from_mask.transpose(1, 2) == 0, 0).flatten(2), None


def _bigbird_original(self, hidden_states, band_mask=None, from_mask=None, to_mask=None, from_blocked_mask=None,
                      to_blocked_mask=None, **options):
    """BigBirdBlockSparseAttention.forward: blocks that it gathers twice count twice."""
    return _bigbird(False, self, hidden_states, band_mask, from_mask, to_mask, options)


def _bigbird_paper(self, hidden_states, band_mask=None, from_mask=None, to_mask=None, from_blocked_mask=None,
                   to_blocked_mask=None, **options):
    """BigBirdBlockSparseAttention.forward with the blocks of heed.patterns.bigbird, in training and evaluation.
    Compiled code calls it between two graphs, since the original has other blocks."""
    run = torch._dynamo.disable(_bigbird) if torch.compiler.is_compiling() else _bigbird
    return run(True, self, hidden_states, band_mask, from_mask, to_mask, options)


_LONGFORMER = Method("forward", _longformer, "attention")
_BIGBIRD = {
    "original": Method("forward", _bigbird_original, "attention",
                       "random blocks as Transformers has them: drawn in training, in evaluation block 0 once more "
                       "for each"),
    "paper": Method("forward", _bigbird_paper, "attention",
                    "random blocks are drawn from the layer's seed, in evaluation too, where Transformers has none"),
}


def methods(bigbird: str) -> dict[str, Method]:
    """The replaced methods by class of layer; `bigbird` is "original" or "paper"."""
    return {
        "LongformerSelfAttention": _LONGFORMER,
        "LEDEncoderSelfAttention": _LONGFORMER,
        "BigBirdBlockSparseAttention": _BIGBIRD[bigbird],
        "BigBirdPegasusBlockSparseAttention": _BIGBIRD[bigbird],
    }
