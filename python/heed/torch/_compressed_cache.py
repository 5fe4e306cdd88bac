# Decoding of compressed attention: the tokens and compressed keys that it reads, and tokens on their way to one.
"""heed.torch.CompressedKVCache and heed.torch.Compressor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import heed
from heed import InvalidArgument
from heed.torch import _caches, _dispatch
from heed.torch._compress import compress
from heed.torch._compressed_attention import compressed_attention


class Compressor:
    """heed.torch.compress of a sequence that grows: keeps the tokens that no compressed one represents yet.

    Results are those of `compress` on the whole sequence, for any division into appends, up to rounding. Gradients are
    PyTorch's, through the kept tokens too.

    Args:
      `ratio`, `overlap`, `bias`: as in compress"""

    def __init__(self, *, ratio: int, overlap: bool = False, bias: Tensor | None = None) -> None:
        _dispatch.check_int("Compressor", "ratio", ratio, 1)
        _dispatch.check_bools("Compressor", overlap=overlap)
        if bias is not None:
            _dispatch.check_tensors("Compressor", bias=bias)
        self.ratio, self.overlap, self.bias = ratio, overlap, bias
        self._values: Tensor | None = None  # tokens of the incomplete window, with overlap behind those of the last one
        self._gates: Tensor | None = None

    def append(self, values: Tensor, gates: Tensor) -> Tensor:
        """Takes T more tokens, and compresses the windows that they complete.

        Args:
          `values`, `gates`: [B, T, ..., D], with overlap [B, T, ..., 2 D], as in compress

        Returns [B, n, ..., D]: one row per completed window, n may be 0. On an error nothing has changed."""
        _dispatch.check_tensors("Compressor.append", values=values, gates=gates)
        held = self._values
        if held is not None and self._gates is not None:
            for name, x, before in (("values", values, held), ("gates", gates, self._gates)):
                if x.dim() != held.dim() or (x.shape[0], *x.shape[2:]) != (held.shape[0], *held.shape[2:]):
                    raise InvalidArgument(f"Compressor.append: {name} has shape {list(x.shape)}, expected "
                                          f"[{held.shape[0]}, T, {', '.join(map(str, held.shape[2:]))}] as before")
                if x.dtype != before.dtype:
                    raise InvalidArgument(f"Compressor.append: {name} is {x.dtype}, expected {before.dtype} as before")
            values, gates = torch.cat([held, values], 1), torch.cat([self._gates, gates], 1)
        rows = compress(values, gates, self.bias, ratio=self.ratio, overlap=self.overlap)
        whole = values.shape[1] // self.ratio * self.ratio
        first = max(whole - self.ratio, 0) if self.overlap else whole
        # With overlap, what is held begins with a whole window from the first one on.
        seen = self.overlap and held is not None and held.shape[1] >= self.ratio
        self._values, self._gates = values[:, first:].clone(), gates[:, first:].clone()
        return rows[:, 1:] if seen else rows

    def fork(self) -> Compressor:
        """A compressor with equal content."""
        other = Compressor(ratio=self.ratio, overlap=self.overlap, bias=self.bias)
        other._values, other._gates = self._values, self._gates  # which append replaces and never writes to
        return other


class _Rows:
    """[B, n, H, C], to whose end rows are appended, and whose first ones may be dropped."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._all = torch.empty(shape, dtype=dtype)
        self._begin = self._end = 0

    def append(self, x: Tensor, keep: int | None = None) -> None:
        """Appends x; of the rows before it at least the last `keep` stay, or all."""
        rows = self._end + x.shape[1]
        if rows > self._all.shape[1]:
            before = self.last(len(self) if keep is None else min(keep, len(self)))
            batch, count, heads, channels = before.shape
            self._all = before.new_empty((batch, max(2 * (count + x.shape[1]), 64), heads, channels))
            self._all[:, :count] = before
            self._begin, self._end, rows = 0, count, count + x.shape[1]
        self._all[:, self._end:rows] = x
        self._end = rows

    def last(self, count: int) -> Tensor:
        return self._all[:, self._end - count:self._end]

    def __len__(self) -> int:
        return self._end - self._begin

    def fork(self) -> _Rows:
        other = _Rows((), self._all.dtype)
        other._all, other._begin, other._end = self._all.clone(), self._begin, self._end
        return other

    @property
    def nbytes(self) -> int:
        return self._all.nbytes


class CompressedKVCache:
    """The cache of compressed_attention, for sequences of one length that grow together.

    It keeps keys and values of the last `window` tokens, and all compressed ones. attend's results are those of
    heed.torch.compressed_attention on the whole sequence, up to rounding. A layer of DeepSeek-V4
    with compression has one; DeepSeek-V3.2 (DSA) is ratio 1 and window 0, with compressed=(k, v).

    Tensors are on the CPU. Nothing that is computed on a cache has a gradient: a tensor that requires one is refused
    unless gradients are off. A cache cannot be shortened: fork it before drafts.

    Args:
      `batch`, `heads`, `dim`, `value_dim`: B sequences, H key heads, D channels of keys and Dv of values, by default D
      `ratio`: tokens per compressed key
      `window`: last keys that a row sees, its own included; 0: none
      `dtype`: of keys, values and queries: one of PyTorch's, or its name here"""

    def __init__(self, batch: int, heads: int, dim: int, value_dim: int | None = None, *, ratio: int, window: int,
                 dtype: torch.dtype | str = torch.float32) -> None:
        value_dim = dim if value_dim is None else value_dim
        sizes = {"batch": batch, "heads": heads, "dim": dim, "value_dim": value_dim, "ratio": ratio}
        for name, size in sizes.items():
            _dispatch.check_int("CompressedKVCache", name, size, 1)
        _dispatch.check_int("CompressedKVCache", "window", window, 0)
        of = _caches._DTYPES.get(_caches._dtype_name("CompressedKVCache", dtype))
        if of is None:
            raise InvalidArgument(f"CompressedKVCache: dtype is {dtype!r}, expected {', '.join(_caches._DTYPES)}")
        self.batch, self.heads, self.dim, self.value_dim, self.ratio = batch, heads, dim, value_dim, ratio
        self.window, self.dtype = window, of
        self._length = self._appended = 0
        # Keys and values of tokens, then compressed ones.
        self._rows = [_Rows((batch, 0, heads, channels), of) for channels in (dim, value_dim, dim, value_dim)]

    def append(self, k: Tensor, v: Tensor, *, compressed: tuple[Tensor, Tensor] | None = None) -> None:
        """Appends T tokens, and the compressed keys and values that they complete.

        Args:
          `k`, `v`: [B, T, H, D] and [B, T, H, Dv]
          `compressed`: (k_cmp, v_cmp), [B, n, H, D] and [B, n, H, Dv], which a Compressor returns,
            n = (length + T) // ratio - length // ratio; None if n is 0

        On an error nothing has changed."""
        operation = "CompressedKVCache.append"
        given = {"k": k, "v": v}
        if compressed is not None:
            if not isinstance(compressed, (tuple, list)) or len(compressed) != 2:
                raise InvalidArgument(f"{operation}: compressed is of type {type(compressed).__name__}, "
                                      "expected a pair (k_cmp, v_cmp), or None")
            given |= {"k_cmp": compressed[0], "v_cmp": compressed[1]}
        _dispatch.check_tensors(operation, **given)
        tokens = k.shape[1] if k.dim() == 4 else 0
        count = (self._length + tokens) // self.ratio - self._length // self.ratio
        for (name, x), rows, channels in zip(given.items(), (tokens, tokens, count, count),
                                             (self.dim, self.value_dim) * 2):
            expected = (self.batch, rows, self.heads, channels)
            if tuple(x.shape) != expected or x.dtype != self.dtype:
                raise InvalidArgument(f"{operation}: {name} is {x.dtype} {list(x.shape)}, "
                                      f"expected {self.dtype} {list(expected)}")
        if count and compressed is None:
            raise InvalidArgument(f"{operation}: compressed is None, expected {count} rows, as {self._length + tokens} "
                                  f"tokens complete as many windows of {self.ratio}")
        bare = [_dispatch.bare(operation, name, x) for name, x in given.items()]
        with torch.no_grad():
            for rows, x, keep in zip(self._rows, bare, (max(self.window - 1, 0),) * 2 + (None, None)):
                rows.append(x, keep)
        self._length += tokens
        self._appended = tokens

    def attend(self, q: Tensor, *, chosen: Tensor | heed.Pattern | None = None,
               sinks: Tensor | Sequence[float] | None = None, scale: float | None = None, return_lse: bool = False,
               threads: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """heed.torch.compressed_attention for the last Tq tokens, all of which the last append added.

        Args:
          `q`: [B, Tq, Hq, D]
          `chosen`, `sinks`, `scale`, `return_lse`, `threads`: as in compressed_attention

        Returns o [B, Tq, Hq, Dv], and lse [B, Hq, Tq] if return_lse."""
        operation = "CompressedKVCache.attend"
        _dispatch.check_tensors(operation, q=q)
        if q.dim() != 4 or (q.shape[0], q.shape[3]) != (self.batch, self.dim) or q.dtype != self.dtype:
            raise InvalidArgument(f"{operation}: q is {q.dtype} {list(q.shape)}, expected {self.dtype} "
                                  f"[{self.batch}, Tq, Hq, {self.dim}]")
        rows = q.shape[1]
        if rows > self._appended:
            raise InvalidArgument(f"{operation}: q has {rows} rows, expected at most the {self._appended} tokens that "
                                  "the last append added")
        q = _dispatch.bare(operation, "q", q)
        tokens = min(len(self._rows[0]), max(self.window - 1, 0) + rows)
        k, v = (x.last(tokens) for x in self._rows[:2])
        k_cmp, v_cmp = (x.last(len(x)) for x in self._rows[2:])
        with torch.no_grad():
            return compressed_attention(q, k, v, k_cmp, v_cmp, ratio=self.ratio, window=self.window, chosen=chosen,
                                        sinks=sinks, start=self._length - rows, scale=scale, return_lse=return_lse,
                                        threads=threads)

    def fork(self) -> CompressedKVCache:
        """A cache with equal content, of its own memory."""
        other = CompressedKVCache(self.batch, self.heads, self.dim, self.value_dim, ratio=self.ratio,
                                  window=self.window, dtype=self.dtype)
        other._length, other._appended = self._length, self._appended
        other._rows = [x.fork() for x in self._rows]
        return other

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, and of the room for those to come."""
        return sum(x.nbytes for x in self._rows)

    def __repr__(self) -> str:
        return (f"heed.torch.CompressedKVCache(batch={self.batch}, heads={self.heads}, dim={self.dim}, "
                f"value_dim={self.value_dim}, ratio={self.ratio}, window={self.window}, dtype={self.dtype}, "
                f"length={self._length})")


for _class in (Compressor, CompressedKVCache):
    _class.__module__ = "heed.torch"
