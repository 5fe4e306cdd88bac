# heed.select: patterns chosen by content, for attention to few keys.
"""Selectors: the keys that each row sees, chosen by queries and keys.

Each returns a pattern (heed.patterns), which heed.attention(..., pattern=p) and heed.torch.attention take, and which
can be looked at, combined and used again. Queries have positions as in attention: row i of the call p_i = start + i, by
default at Tk - Tq + i. Larger scores come first, equal ones by the lower index; a score that is NaN counts as -inf. No
choice has a gradient: tensors of PyTorch are read as they are, and training goes through attention with the pattern.
Errors are heed.InvalidArgument.

    p = heed.select.top_blocks(q, k, count=8)
    o = heed.attention(q, k, v, causal=True, pattern=p)
"""

from __future__ import annotations

from heed._core import _certified, _cumulative, _indexer, _top_blocks, _vertical_slash

TYPE_CHECKING = False  # typing's own, without the import of typing
if TYPE_CHECKING:
    from typing import Any, Literal

    from heed._core import KVCache, Pattern
    from heed._typing import Align, Array, Ints

__all__ = ["certified", "cumulative", "indexer", "top_blocks", "vertical_slash"]


def top_blocks(q: Array, k: Array | KVCache, *, count: int, block: int = 64, score: Literal["mean", "box"] = "mean",
               causal: bool = True, sinks: int = 0, local: int = 1, share: Literal["group", "head"] = "group",
               align: Align = "bottom_right", key_lengths: Ints | None = None, key_starts: Ints | None = None,
               threads: int | None = None) -> Pattern:
    """The `count` best blocks of keys of each row, its own among them: MoBA (arXiv:2502.13189) by default, Quest
    (arXiv:2406.10774) with score="box".

    Args:
      q: [B, Tq, Hq, D]
      k: [B, Tk, Hkv, D], or a KVCache made with sketch="int8", whose last tokens q is of: its statistics are read
        instead of its keys, and block is a multiple of 64; blocks without a valid key are no blocks, and scores know
        valid keys alone
      count: blocks that a row keeps, 1 or more; its own counts and is always kept
      block: keys of a block, 1 or more
      score: 'mean', <q, mean of the keys>, or 'box', a bound of all <q, k>: sum_d max(q_d min k_d, q_d max k_d)
      causal: whether a row chooses among the blocks before its own; else among all
      sinks: first blocks, kept besides
      local: blocks up to a row's own; those before it are kept besides
      share: 'group', the query heads of a key head choose together, by the sum of their scores, or 'head', each chooses
      align: position of row 0: 'bottom_right' (Tk - Tq), 'top_left' (0), or an int array [B]
      key_lengths: [B]: keys at or beyond it are not valid
      key_starts: [B]: keys before it are not valid
      threads: how many; None: heed.set_num_threads, or as many as the process may use

    Example:

      >>> import heed, numpy as np
      >>> rng = np.random.default_rng(0)
      >>> q, k = rng.standard_normal((2, 1, 512, 2, 16), np.float32)
      >>> p = heed.select.top_blocks(q, k, count=3)
      >>> p
      row_blocks(index=<int[1,512,2,3]>, block=64)
      >>> int(p.mask(512, 512, heads=2, causal=True)[0, 0, 511].sum())
      192
    """
    return _top_blocks(_plain(q), _plain(k), count, score, block, causal, sinks, local, share, align, key_lengths,
                       key_starts, threads)


def cumulative(q: Array, k: Array | KVCache, *, mass: float = 0.95, block: int = 64, causal: bool = True,
               sinks: int = 0, local: int = 1, share: Literal["group", "head"] = "group", align: Align = "bottom_right",
               key_lengths: Ints | None = None, key_starts: Ints | None = None, threads: int | None = None) -> Pattern:
    """The fewest blocks that hold a share `mass` of each row's pooled softmax, the one that crosses it included: the
    softmax of D^-1/2 <q, mean of the keys> over all blocks but the row's own, which is kept besides.

    Args:
      q: [B, Tq, Hq, D]
      k: [B, Tk, Hkv, D], or a KVCache made with sketch="int8", whose last tokens q is of: its statistics are read
        instead of its keys, and block is a multiple of 64; blocks without a valid key are no blocks, and scores know
        valid keys alone
      mass: above 0, 1 at most
      block: keys of a block, 1 or more
      causal: whether a row chooses among the blocks before its own; else among all
      sinks: first blocks, kept whatever they hold, which counts
      local: blocks up to a row's own, kept too
      share: 'group', the query heads of a key head choose together, by the mean of their softmaxes, or 'head', each
        chooses
      align: position of row 0: 'bottom_right' (Tk - Tq), 'top_left' (0), or an int array [B]
      key_lengths: [B]: keys at or beyond it are not valid
      key_starts: [B]: keys before it are not valid
      threads: how many; None: heed.set_num_threads, or as many as the process may use
    """
    return _cumulative(_plain(q), _plain(k), mass, block, causal, sinks, local, share, align, key_lengths, key_starts,
                       threads)


def vertical_slash(q: Array, k: Array, *, verticals: int = 1000, slashes: int = 6096, last: int = 64, sinks: int = 30,
                   local: int = 100, threads: int | None = None) -> Pattern:
    """The columns and diagonals with the most weight in the causal attention of the last queries, for each query head:
    MInference (arXiv:2407.02490). The pattern keeps pairs up to a row's position, and fits any call with as many
    sequences and heads.

    Args:
      q: [B, Tq, Hq, D]; the last one has the position of key Tk - 1
      k: [B, Tk, Hkv, D]
      verticals: columns of each head
      slashes: distances p - j of each head
      last: queries that the choice is made by, 1 or more
      sinks: first columns, which come first
      local: smallest distances, which come first
      threads: how many; None: heed.set_num_threads, or as many as the process may use
    """
    return _vertical_slash(_plain(q), _plain(k), verticals, slashes, last, sinks, local, threads)


def indexer(q_index: Array, k_index: Array, weights: Array, *, count: int = 2048, causal: bool = True, ratio: int = 1,
            start: int | None = None, threads: int | None = None) -> Pattern:
    """The `count` keys of each row with the largest sum_h w_h relu(<q_h, k>), for all heads: the indexer of DSA
    (arXiv:2512.02556) and, with ratio > 1, of DeepSeek-V4, for heed.compressed_attention.

    Args:
      q_index: [B, Tq, Hi, Di]
      k_index: [B, Tk, Di]
      weights: [B, Tq, Hi]
      count: keys of a row, 1 or more
      causal: whether a row chooses among the keys whose last token is at or before its position; else among all
      ratio: tokens per key: key c consists of tokens c * ratio to (c + 1) * ratio - 1
      start: position of row 0; None: Tk - Tq; needed by causal if ratio > 1
      threads: how many; None: heed.set_num_threads, or as many as the process may use
    """
    return _indexer(_plain(q_index), _plain(k_index), _plain(weights), count, causal, ratio, start, threads)


def certified(q: Array, k: Array | KVCache,
              *, epsilon: float = 0.02, level: Literal["sketch", "auto", "box", "skip"] = "sketch", causal: bool = True,
              scale: float | None = None, align: Align = "bottom_right", key_lengths: Ints | None = None,
              query_lengths: Ints | None = None, threads: int | None = None, **options: Any) -> Pattern:
    """The blocks of 64 keys outside of which provably at most a share epsilon of each row's attention lies: what
    heed.certified_attention and attend(epsilon=...) of a cache attend to.

    The query heads of a key head share their blocks, and of keys that are given rows whose positions have the same
    quotient by 64 do; at level 'skip' each row and query head has its own. Costs what certified attention costs.

    Args:
      q: [B, Tq, Hq, D], not float64
      k: [B, Tk, Hkv, D], or a KVCache, made with sketch="int8" unless level is 'skip', whose last tokens q is of
      epsilon: the most that a row may do without, from 0 on and below 1
      level: 'sketch'; 'auto', which keeps every block of heads where little could be left out: with a cache, a call
        counts as one of attend's; 'box', bounds from the range of each channel; or 'skip', the weights themselves
      causal: whether a row sees no key after its position; attention with the pattern is told so too
      scale: factor of the logits; None: D^-1/2. Attention with the pattern takes the same
      align: position of row 0: 'bottom_right' (Tk - Tq), 'top_left' (0), or an int array [B]; a cache knows it
      key_lengths: [B]: keys at or beyond it are not seen; a cache knows it
      query_lengths: [B]: rows at or beyond it see nothing; a cache knows it
      threads: how many; None: heed.set_num_threads, or as many as the process may use
      **options: others of heed.certified_attention, which attention with the pattern takes too: window, mask, sinks,
        ...

    Example:

      >>> import heed, numpy as np
      >>> rng = np.random.default_rng(0)
      >>> k = np.repeat(4 * rng.standard_normal((8, 1, 16)), 128, 0)[None].astype(np.float32)   # topics of 128 keys
      >>> q = k[:, 300:301]
      >>> p = heed.select.certified(q, k, causal=False)
      >>> p
      row_blocks(index=[[[[0, 4, 5, 15]]]], block=64)
      >>> o, _ = heed.certified_attention(q, k, k, level='sketch')
      >>> bool(np.allclose(heed.attention(q, k, k, pattern=p), o, atol=1e-6))
      True
    """
    return _certified(_plain(k), q=_plain(q), epsilon=epsilon, level=level,
                      causal=causal, scale=scale, align=align, key_lengths=key_lengths, query_lengths=query_lengths,
                      threads=threads, **{name: _plain(x) for name, x in options.items()})


def _plain(x: Array) -> Array:
    """A tensor of PyTorch without its gradient; anything else as it is."""
    return x.detach() if getattr(x, "requires_grad", False) is True else x
