# heed.patterns: the builders of patterns for sparse attention.
"""Patterns: the keys that each row of sparse attention sees.

A pattern is a set of pairs (p, j) of a query's position p and a key j, both absolute: query i of a call has position
p = start + i, as heed.attention says; keys count from 0 to Tk, whatever key_starts says. Neighbours outside do not
exist. `|` unites two patterns, `&` keeps what both have. No builder is causal by itself: causal=True is. Every
size is an int of 0 or more, where 0 would mean nothing of 1 or more; an axis B of a table is the batch entries of a
call, or 1. Errors are heed.InvalidArgument.

    o = heed.attention(q, k, v, causal=True, pattern=heed.patterns.longformer(512, [0]))
"""

from __future__ import annotations

from heed._core import Pattern, _parse_pattern, _pattern

TYPE_CHECKING = False  # typing's own, without the import of typing
if TYPE_CHECKING:
    from collections.abc import Sequence

    from heed._typing import Array, Ints

__all__ = [
    "Pattern", "atrous", "bigbird", "blocks", "csr", "dilated", "fixed", "global_tokens", "keys", "longformer",
    "neighborhood", "parse", "per_head", "random_blocks", "row_blocks", "sliding_window", "streaming", "strided",
]


def parse(expression: str) -> Pattern:
    """The pattern of an expression, as repr writes it and the command line reads it.

    Args:
      expression: builders with their arguments, `|`, `&`, which binds closer, and parentheses

    Example:

      >>> import heed
      >>> heed.patterns.parse("longformer(512, [0]) & atrous(2)")
      longformer(window=512, tokens=[0]) & atrous(step=2)
    """
    return _parse_pattern(expression)


def sliding_window(left: int, right: int = 0) -> Pattern:
    """p - left <= j <= p + right.

    Args:
      left: keys before a row's position
      right: keys after it
    """
    return _pattern("sliding_window", left, right)


def dilated(reach: int, step: int) -> Pattern:
    """j = p + step c with |c| <= reach.

    Args:
      reach: keys on either side
      step: from one to the next, 1 or more
    """
    return _pattern("dilated", reach, step)


def atrous(step: int) -> Pattern:
    """(p - j) mod step = 0.

    Args:
      step: from one key to the next, 1 or more
    """
    return _pattern("atrous", step)


def strided(step: int) -> Pattern:
    """sliding_window(step - 1) | atrous(step), as in Sparse Transformers (arXiv:1904.10509).

    Args:
      step: from one key to the next, and the width of the window, 1 or more
    """
    return _pattern("strided", step)


def fixed(block: int, summary: int) -> Pattern:
    """The keys of a row's own block, and the last `summary` of any block (arXiv:1904.10509): j mod block >= block -
    summary.

    Args:
      block: keys of a block, 1 or more
      summary: at most `block`
    """
    return _pattern("fixed", block, summary)


def global_tokens(tokens: Ints | Sequence[Sequence[int]]) -> Pattern:
    """Rows and columns of some tokens, whole.

    Args:
      tokens: positions, [n], or [B, n] by batch entry; -1 is absent
    """
    return _pattern("global_tokens", tokens)


def longformer(window: int, tokens: Ints | Sequence[Sequence[int]]) -> Pattern:
    """sliding_window(window // 2, window // 2) | global_tokens(tokens), as in Longformer (arXiv:2004.05150).

    Args:
      window: keys on both sides
      tokens: positions, [n], or [B, n] by batch entry; -1 is absent
    """
    return _pattern("longformer", window, tokens)


def random_blocks(count: int, block: int = 64, seed: int = 0) -> Pattern:
    """For each query head and block of rows, `count` blocks of keys, all equally likely.

    Args:
      count: of blocks, 1 or more; all there are where those are fewer
      block: rows and keys of a block, 1 or more
      seed: of the draw, from 0 to 2^64 - 1
    """
    return _pattern("random_blocks", count, block, seed)


def bigbird(block: int = 64, random: int = 3, seed: int = 0) -> Pattern:
    """BigBird's internal global construction (arXiv:2007.14062): of nb blocks the first and the last see and are seen
    by all, the others see their neighbours and `random` more, drawn once for each head; all is kept where nb <= 5 + 2
    random.

    Args:
      block: rows and keys of a block, 1 or more
      random: drawn blocks of each
      seed: of the draw, from 0 to 2^64 - 1
    """
    return _pattern("bigbird", block, random, seed)


def streaming(sinks: int, window: int) -> Pattern:
    """The first `sinks` keys and the last `window` (arXiv:2309.17453): j < sinks, or p - window < j <= p.

    Args:
      sinks: keys that all rows see
      window: keys up to a row's own, which is one of them, 1 or more
    """
    return _pattern("streaming", sinks, window)


def neighborhood(window: int) -> Pattern:
    """The `window` keys nearest to a row, shifted inwards at the ends (arXiv:2204.07143); an even window has one more
    on the left.

    Args:
      window: keys of every row, 1 or more
    """
    return _pattern("neighborhood", window)


def blocks(keep: Array | Sequence[Sequence[bool]], block: int | tuple[int, int] = 64) -> Pattern:
    """keep[floor(p / rows)][floor(j / columns)]; what lies beyond the table is not kept.

    Args:
      keep: bool [nq, nk], [Hp, nq, nk] or [B, Hp, nq, nk]; Hp is 1, the key heads or the query heads
      block: rows and columns of a block, 1 or more: an int, or a pair
    """
    return _pattern("blocks", keep, block)


def csr(row_ptr: Ints | Sequence[Sequence[int]], columns: Ints, block: int | tuple[int, int] = 64) -> Pattern:
    """Blocks as lists: block row i keeps columns[row_ptr[i]:row_ptr[i + 1]], which ascend.

    Args:
      row_ptr: [nq + 1], or [Hp, nq + 1], ascending from 0 to n, a head's numbers behind those of the one before; Hp is
        1, the key heads or the query heads
      columns: [n]: blocks of keys
      block: rows and columns of a block, 1 or more: an int, or a pair
    """
    return _pattern("csr", row_ptr, columns, block)


def row_blocks(index: Array | Sequence[object], block: int = 64) -> Pattern:
    """The blocks of keys of each row of the call, not of a position: what selectors return.

    Args:
      index: int [B, Tq, n] or [B, Tq, Hp, n]; Hp is 1, the key heads or the query heads; -1 is absent
      block: keys in a block, 1 or more
    """
    return _pattern("row_blocks", index, block)


def keys(index: Array | Sequence[object]) -> Pattern:
    """The keys of each row of the call, not of a position.

    Args:
      index: int [B, Tq, n] or [B, Tq, Hkv, n]; -1 is absent, none comes twice
    """
    return _pattern("keys", index)


def per_head(heads: Sequence[Pattern]) -> Pattern:
    """A pattern for each query head.

    Args:
      heads: as many as the call has query heads
    """
    return _pattern("per_head", heads)
