# The recurrences over tokens that compositions and derivatives consist of.
"""Sequences of tokens, and the recurrences over them that `_compositions.py` describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_ops = torch.ops.heed


class Sequences:
    """The places of the tokens of each sequence of a call."""

    def __init__(self, batch: int, tokens: int, lengths: Any, starts: Any, cu_seqlens: Any, reverse: bool, device: Any):
        self.batch, self.tokens, self.reverse = batch, tokens, reverse
        self.lengths = self.index = None
        self.columns = torch.arange(tokens, device=device).expand(batch, tokens)  # of linformer's projections
        if tokens > 0 and lengths is None and starts is None and cu_seqlens is None:
            return
        if cu_seqlens is not None:
            bounds = cu_seqlens.to(device, torch.int64)
            begin, end, row = bounds[:-1], bounds[1:], torch.zeros_like(bounds[:-1])
        else:
            row = torch.arange(batch, device=device)
            begin = torch.zeros_like(row) if starts is None else starts.to(device, torch.int64)
            end = torch.full_like(row, tokens) if lengths is None else lengths.to(device, torch.int64)
        self.lengths = (end - begin).clamp(min=0)
        most = max(int(self.lengths.max()) if len(row) else 0, 1)
        at = torch.arange(most, device=device)
        token = (end - 1)[:, None] - at if reverse else begin[:, None] + at
        valid = at < self.lengths[:, None]
        self.columns = torch.where(valid, token - (begin[:, None] if cu_seqlens is not None else 0), -1)
        nowhere, places = batch * tokens, len(row) * most  # an index behind the last of all tokens, and of all places
        self.index = torch.where(valid, row[:, None] * tokens + token, nowhere).flatten()
        self.inverse = torch.full((nowhere + 1,), places, device=device)
        self.inverse[self.index] = torch.where(valid.flatten(), torch.arange(places, device=device), places)
        self.inverse = self.inverse[:-1]
        self.shape = (len(row), most)

    @staticmethod
    def _rows(x: Tensor, index: Tensor) -> Tensor:
        """Rows of x; zeros for the index behind its last."""
        return torch.cat([x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])]).index_select(0, index)

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, ...] in the order of processing."""
        if self.index is None:
            return x.flip(1) if self.reverse else x
        return self._rows(x, self.index).unflatten(0, self.shape)

    def scatter(self, x: Tensor) -> Tensor:
        """The inverse of `gather`; zeros for tokens of no sequence."""
        if self.index is None:
            return x.flip(1) if self.reverse else x
        return self._rows(x, self.inverse).unflatten(0, (self.batch, self.tokens))


class Recurrence(NamedTuple):
    """The last step of a composition: this method of Scan with a scaled query, whose o is multiplied and added to.

    With `below`, the last tensor is a sum z of keys, as the state is of keys and values: what the query reads of z, by
    this function, which is piecewise linear, divides o.
    """

    kind: str
    tensors: tuple[Any, ...]
    scale: float = 1.0
    factor: Any = None
    added: Any = None
    steps: int = 1  # of the recurrence per token, whose o is that of the last
    below: Callable[[Tensor], Tensor] | None = None
    # The final state, and z as one of a single column: a linear function that is its own adjoint, and constant.
    final: Callable[[Tensor], Tensor] | None = None
    maximum: tuple[Tensor, ...] = ()  # the final state that others are relative to

    @property
    def parts(self) -> list[Any]:
        """All that depends on the tensors of a call."""
        return [*self.tensors, self.factor, self.added]

    def of_parts(self, parts: Sequence[Any]) -> Recurrence:
        """Parts of the same kind, such as tangents or gradients, by the names that they have here."""
        *tensors, factor, added = parts
        return self._replace(tensors=tuple(tensors), factor=factor, added=added)

    def results(self, scan: Scan) -> tuple[Any, ...]:
        scan, (q, *tensors), z = scan.of_steps(self.steps), self.tensors, []
        if self.below is not None:
            *tensors, before = tensors
            read, sums = scan.normaliser(q, tensors[0], tensors[2], before)
            q, z = q / self.below(read), [self.of_mechanism(sums)[..., 0]]
        o, state = getattr(scan, self.kind)(q if self.scale == 1 else q * self.scale, *tensors)
        o = o[:, self.steps - 1::self.steps]
        o = o if self.factor is None else self.factor * o
        o = o if self.added is None else o + self.added
        return o, self.of_mechanism(state), *z, *self.maximum

    def of_mechanism(self, state: Any) -> Any:
        """The final state of the mechanism, or what arrives at that of the recurrence."""
        return state if self.final is None or state is None else self.final(state)


class Scan:
    """The three recurrences over tokens in the order of processing, or `reverse` to it."""

    def __init__(self, lengths: Tensor | None, threads: Any, reverse: bool = False):
        self.lengths, self.threads, self.reverse = lengths, threads, reverse

    def reversed(self) -> Scan:
        return Scan(self.lengths, self.threads, not self.reverse)

    def of_steps(self, n: int) -> Scan:
        """The recurrences over n steps per token."""
        return self if n == 1 or self.lengths is None else Scan(n * self.lengths, self.threads, self.reverse)

    def rest(self) -> tuple[Any, ...]:
        return self.lengths, None, None, self.reverse, self.threads

    def gla(self, q: Tensor, k: Tensor, v: Tensor, g: Any, h: Any = None, S: Any = None,
            scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """`g` has a log decay per channel, or one per head, or is None."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        if g is None:
            return _ops.linear_attention.default(q, k, v, "identity", True, False, 0.0, scale, S, None,
                                                 *self.rest())[:2]
        if g.dim() == 3:
            return _ops.simple_gla.default(q, k, v, g, scale, S, *self.rest())
        return _ops.gla.default(q, k, v, g, h, scale, S, *self.rest())

    def normaliser(self, q: Tensor, k: Tensor, g: Any, z: Any) -> tuple[Tensor, Tensor]:
        """Reads the sums of k: gla with a value of 1, whose state has one column."""
        return self.gla(q, k, torch.ones_like(k[..., :1]), g, None, None if z is None else z[..., None])

    def before(self, q: Tensor, k: Tensor, v: Tensor, g: Any, h: Any, u: Tensor, S: Any) -> tuple[Tensor, Tensor]:
        """gla whose tokens read the state before their own writes, and these by u: o_t = (S_{t-1} + u k v^T)^T q_t."""
        read, final = self.gla(self.next(q), k, v, g, h, S)
        read = self.previous(read, torch.zeros_like(v[:, 0]) if S is None else read_key(S, q[:, 0]))
        return read + (q * u * k).sum(-1, keepdim=True) * v, final

    def rwkv7(self, r: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Any) -> tuple[Tensor, Tensor]:
        r, k, v, a, b = (x.contiguous() for x in (r, k, v, a, b))
        return _ops.rwkv7.default(r, g, k, v, a, b, 1.0, S, *self.rest())

    def delta(self, q: Tensor, k: Tensor, p: Any, v: Tensor, beta: Any, g: Any, S: Any) -> tuple[Tensor, Tensor]:
        """S~ = diag(exp(g)) S; S += k beta (v - S~^T p)^T, with `g` as for gla; p is k, and beta 1, where absent."""
        p = k if p is None else p
        p, v = (p, v) if beta is None else (beta[..., None] * p, beta[..., None] * v)
        g = torch.zeros_like(k) if g is None else at_most_0(g if g.dim() == 4 else g[..., None].expand(k.shape))
        return self.rwkv7(q, g, k, v, torch.exp(g) * p, -k, S)

    def hgrn(self, x: Tensor, g: Tensor, h: Any) -> tuple[Tensor, Tensor]:
        return _ops.hgrn.default(x.contiguous(), g.contiguous(), h, *self.rest())

    def selective(self, u: Tensor, s: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Any, skip: Any,
                  z: Any) -> tuple[Tensor, Tensor]:
        """h = exp(s A) h + s u B; o = silu(z) (<C, h> + skip u), by hgrn with a channel per state."""

        def weights(x: Tensor) -> Tensor:  # of each channel: [S, T, D, N] or what it is expanded from
            return x if x.dim() == 2 else x[:, :, None] if x.dim() == 3 else x.repeat_interleave(D // x.shape[2], 2)

        D = s.shape[2]
        g = at_most_0(s[..., None] * A)
        x = (s * u)[..., None] * weights(B)
        states, final = self.hgrn(x.flatten(2), g.flatten(2), None if h is None else h.flatten(1))
        y = (states.unflatten(2, g.shape[2:]) * weights(C)).sum(-1)
        y = y if skip is None else y + skip * u
        return (y if z is None else y * F.silu(z)) * self.is_valid(y), final.unflatten(1, g.shape[2:])

    def is_valid(self, x: Tensor) -> Tensor:
        """1 for tokens of sequences, 0 behind them, to be multiplied with [S, T, ...]."""
        at = torch.arange(x.shape[1], device=x.device)
        valid = x.new_ones(1, len(at)) if self.lengths is None else (at < self.lengths[:, None]).to(x.dtype)
        return valid[(..., *[None] * (x.dim() - 2))]

    def next(self, x: Tensor) -> Tensor:
        """x of the token after each; zeros for the last."""
        later = torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)
        if self.lengths is None:
            return later
        at = torch.arange(x.shape[1] - 1, -1, -1, device=x.device).flip(0)
        inside = (at < self.lengths[:, None] - 1)[(..., *[None] * (x.dim() - 2))]
        return torch.where(inside, later, 0)

    def previous(self, x: Tensor, first: Tensor) -> Tensor:
        """x of the token before each, and `first` for the first."""
        return torch.cat([first[:, None], x[:, :-1]], 1)

    def first(self, x: Tensor) -> Tensor:
        """x of the first token of each sequence; zeros where it has none."""
        if self.lengths is None:
            return x[:, 0]
        return torch.where((self.lengths > 0)[(..., *[None] * (x.dim() - 2))], x[:, 0], 0)


def at_most_0(g: Tensor) -> Tensor:
    """A positive log decay counts as 0; its derivative is that of the exponential."""
    return g - g.detach().clamp(min=0)


def read_key(S: Any, key: Tensor) -> Tensor:
    """S^T key, of one token: [S, H, V]."""
    return torch.einsum("shkv,shk->shv", S, key)


def at_last(x: Tensor, n: int) -> Tensor:
    """x at the last of each n tokens, and zeros at the others."""
    return x if n == 1 else F.pad(x[:, :, None], (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
