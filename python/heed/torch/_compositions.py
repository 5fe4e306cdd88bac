# Mechanisms as compositions of three recurrences and functions of PyTorch, which has all derivatives of these.
"""Mechanisms as functions that PyTorch differentiates as often as it likes.

A mechanism's own kernels have one derivative. Here each is written with three recurrences instead, whose backward
passes are recurrences of the same kinds (`_recurrences.py`), so that the chain rule never ends:

  gla     S_t = diag(exp(g_t)) S_{t-1} diag(exp(h_t)) + k_t v_t^T,                    o_t = S_t^T q_t
  rwkv7   S_t = diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,           o_t = S_t^T r_t
  hgrn    h_t = exp(g_t) h_{t-1} + x_t                                                per channel

gla without decays is linear_attention, and with one decay per head simple_gla, which are faster. A composition whose
last step is a recurrence returns this step instead of its results (`Recurrence`). Among such steps are two that rwkv7
and hgrn express, delta rules and selective scans: a second derivative uses their own kernels.

A composition takes its tensors with the tokens of each sequence in the order of processing, [S, T, ...] with the first
token at 0 and zeros behind the last (`Sequences`), the initial states, None where they are absent, and the settings. It
returns o and the final states, unless it ends in a recurrence.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
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
    """The last step of a composition, whose results are those of this method of Scan, with a scaled query."""

    kind: str
    tensors: tuple[Any, ...]
    scale: float = 1.0


class Scan:
    """The three recurrences over tokens in the order of processing, or `reverse` to it."""

    def __init__(self, lengths: Tensor | None, threads: Any, reverse: bool = False):
        self.lengths, self.threads, self.reverse = lengths, threads, reverse

    def reversed(self) -> Scan:
        return Scan(self.lengths, self.threads, not self.reverse)

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

    def rwkv7(self, r: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Any) -> tuple[Tensor, Tensor]:
        r, k, v, a, b = (x.contiguous() for x in (r, k, v, a, b))
        return _ops.rwkv7.default(r, g, k, v, a, b, 1.0, S, *self.rest())

    def delta(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Any, S: Any) -> tuple[Tensor, Tensor]:
        """S~ = diag(exp(g)) S; S += k beta (v - S~^T k)^T, with `g` as for gla."""
        r, w = beta[..., None] * k, beta[..., None] * v
        return self.erasing(q, k, w, r, None if g is None else at_most_0(g), S)

    def erasing(self, q: Tensor, k: Tensor, w: Tensor, r: Tensor, g: Any, S: Any) -> tuple[Tensor, Tensor]:
        """S~ = diag(exp(g)) S; S += k (w - S~^T r)^T."""
        g = torch.zeros_like(k) if g is None else g if g.dim() == 4 else g[..., None].expand(k.shape)
        return self.rwkv7(q, g, k, w, torch.exp(g) * r, -k, S)

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


def _heads(x: Tensor, like: Tensor) -> Tensor:
    """Key heads, each repeated for the value heads that read it."""
    count = like.shape[2] // x.shape[2]
    return x if count == 1 else x.repeat_interleave(count, 2)


def _channels(g: Tensor, like: Tensor) -> Tensor:
    """[H, K] or [S, T, H, K] as a log decay per token, head and channel; [H] or [S, T, H] as one per token and head."""
    shape = like.shape[:3] if g.dim() in (1, 3) else like.shape
    return g if g.shape == shape else g.expand(shape)


def _scale(o: SimpleNamespace, K: int) -> float:
    return K**-0.5 if o.scale is None else o.scale


# --- recurrences ------------------------------------------------------------------------------------------------------


def _decayed(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> Recurrence:
    q, k = _heads(t.q, t.v), _heads(t.k, t.v)
    g = t.log_decay
    if g is None:  # retention's
        g = torch.log1p(-(2.0 ** (-5 - torch.arange(t.v.shape[2], dtype=q.dtype, device=q.device))))
    return Recurrence("gla", (q, k, t.v, _channels(g, k), getattr(t, "log_decay_v", None), S), _scale(o, k.shape[-1]))


def _hgrn2(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> Recurrence:
    g = at_most_0(t.log_decay)
    return Recurrence("gla", (_heads(t.q, t.i), -torch.expm1(g), t.i, g, None, S), _scale(o, g.shape[-1]))


def _rwkv56(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    r, k = _heads(t.r, t.v) * (1 if o.scale is None else o.scale), _heads(t.k, t.v)
    read, final = o.scan.gla(o.scan.next(r), k, t.v, _channels(t.log_decay, k), None, S)
    before = torch.zeros_like(t.v[:, 0]) if S is None else read_key(S, r[:, 0])
    return o.scan.previous(read, before) + (r * t.u * k).sum(-1, keepdim=True) * t.v, final


def _sums(q: Tensor, k: Tensor, v: Tensor, states: Any, o: SimpleNamespace, causal: bool) -> tuple[Tensor, ...]:
    """The sums of k v^T and of k that q reads, and the final ones."""
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    S, z = states
    S = None if S is None else torch.cat([S, (torch.zeros_like(S[..., 0]) if z is None else z)[..., None]], -1)
    if causal:
        read, S = o.scan.gla(q, k, v, None, None, S)
        return read[..., :-1], read[..., -1:], S[..., :-1], S[..., -1]
    S = torch.einsum("sthk,sthv->shkv", k * o.scan.is_valid(k), v)
    read = torch.einsum("sthk,shkv->sthv", q, S) * o.scan.is_valid(q)
    return read[..., :-1], read[..., -1:], S[..., :-1], S[..., -1]


_FEATURES = {
    "elu1": lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0))),
    "relu": torch.relu,
    "relu_sq": lambda x: torch.relu(x) ** 2,
    "exp": lambda x: torch.exp(x.clamp(max=80)),
    "identity": lambda x: x,
    "softmax": lambda x: torch.softmax(x, -1),
}


def _linear_attention(t: SimpleNamespace, S: Any, z: Any, o: SimpleNamespace) -> Any:
    phi = _FEATURES[o.feature_map]
    q, k, scale = _heads(phi(t.q), t.v), _heads(phi(t.k), t.v), 1 if o.scale is None else o.scale
    if o.causal and not o.normalize and z is None:
        return Recurrence("gla", (q, k, t.v, None, None, S), scale)
    q = q * scale
    sums, product, S, z = _sums(q, k, t.v, (S, z), o, o.causal)
    return sums / (product + o.eps) * o.scan.is_valid(sums) if o.normalize else sums, S, z


def _based(t: SimpleNamespace, S: Any, z: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    scale = _scale(o, t.q.shape[-1])
    first, second = torch.triu_indices(t.q.shape[-1], t.q.shape[-1], 1, device=t.q.device)

    def phi(x: Tensor) -> Tensor:
        products = scale * x[..., first] * x[..., second]
        return torch.cat([torch.ones_like(x[..., :1]), scale**0.5 * x, scale * x**2 / 2**0.5, products], -1)

    sums, product, S, z = _sums(_heads(phi(t.q), t.v), _heads(phi(t.k), t.v), t.v, (S, z), o, True)
    return sums / (product + o.eps) * o.scan.is_valid(sums) if o.normalize else sums, S, z


def _performer(t: SimpleNamespace, S: Any, z: Any, m: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    scale, causal, M = _scale(o, t.q.shape[-1]), o.causal, t.projection.shape[0]
    y_q, y_k = math.copysign(abs(scale) ** 0.5, scale) * t.q, abs(scale) ** 0.5 * t.k
    q, k = (_heads(y @ t.projection.mT, t.v) for y in (y_q, y_k))
    if o.kernel == "relu":
        q, k, final = torch.relu(q) + 1e-3, torch.relu(k) + 1e-3, t.v.new_zeros(len(t.v), t.v.shape[2])
    else:
        # Maxima are constants: they cancel in the causal form, and otherwise heed takes them for such.
        final = torch.where(o.scan.is_valid(k) > 0, k.detach(), -math.inf).amax((1, 3))
        final = final if m is None else torch.maximum(final, m)
        shift = torch.where(torch.isfinite(final), final, 0)
        square_q, square_k = (_heads(y.square().sum(-1, keepdim=True) / 2, t.v) for y in (y_q, y_k))
        eps = 0 if causal else o.eps
        q = M**-0.5 * (torch.exp(q - square_q - q.detach().amax(-1, keepdim=True)) + eps)
        k = M**-0.5 * (torch.exp(k - square_k - shift[:, None, :, None]) + eps)
        if S is not None:
            before = torch.exp(m - shift)
            S, z = S * before[..., None, None], z * before[..., None]
    sums, product, S, z = _sums(q, k, t.v, (S, z), o, causal)
    below = product.clamp(min=torch.finfo(product.dtype).tiny)
    return torch.where(o.scan.is_valid(sums) > 0, sums / below, 0), S, z, final


def _mlstm(t: SimpleNamespace, S: Any, z: Any, m: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    q, k = _heads(t.q, t.v) * _scale(o, t.q.shape[-1]), _heads(t.k, t.v)
    g = F.logsigmoid(t.f)
    valid = o.scan.is_valid(g)
    before = torch.zeros_like(g[:, 0]) if m is None else m.detach()
    # m_t = max(m_{t-1} + g_t, i_t), with sums of g from the first token on; all m are constants, which cancel.
    total = (g.detach() * valid).cumsum(1)
    m_t = torch.maximum(torch.where(valid > 0, t.i.detach() - total, -math.inf).cummax(1)[0], before[:, None]) + total
    largest, final = torch.maximum(m_t.amax(1), before), m_t[:, -1]
    k = k * torch.exp(t.i - largest[:, None])[..., None]
    into = torch.exp(before - largest)
    S, z = (None, None) if S is None else (S * into[..., None, None], z * into[..., None])
    v = torch.cat([t.v, torch.ones_like(t.v[..., :1])], -1)
    S = None if S is None else torch.cat([S, z[..., None]], -1)
    read, S = o.scan.gla(q, k, v, _channels(g, k), None, S)
    floor = torch.exp(-largest)[:, None, :, None]
    below = torch.maximum(read[..., -1:].abs(), floor) + (o.eps * torch.exp(m_t - largest[:, None]))[..., None]
    S = S * torch.exp(largest - final)[..., None, None]
    return read[..., :-1] / below * o.scan.is_valid(read), S[..., :-1], S[..., -1], final


def _rwkv4(t: SimpleNamespace, num: Any, den: Any, most: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    k, v, g, u = (x.double() for x in (t.k, t.v, at_most_0(t.log_decay), t.u))  # as one maximum serves all tokens
    valid = o.scan.is_valid(k) > 0
    nothing = float(torch.tensor(-1e38, dtype=torch.float32))  # the maximum of no tokens
    before = torch.full_like(k[:, 0], nothing) if most is None else most.detach().double()
    common = torch.maximum(torch.where(valid, torch.maximum(k, k + u), nothing).detach().amax(1), before)
    common = torch.where(common > nothing, common, 0)
    count = valid.cumsum(1) * g.detach()
    final = torch.maximum(torch.where(valid, k.detach() - count, -math.inf).cummax(1)[0], before[:, None]) + count
    final = final[:, -1]
    written, token = torch.exp(k - common[:, None]), torch.exp(k + u - common[:, None])
    sums = []
    for x, state in ((written * v, num), (written, den)):
        state = torch.zeros_like(before) if state is None else state.double() * torch.exp(before - common)
        after, end = o.scan.hgrn(x, g.expand(x.shape), state)
        sums.append((o.scan.previous(after, state), end * torch.exp(torch.where(final > nothing, common - final, 0))))
    (above, num), (below, den) = sums
    return tuple(x.to(t.k.dtype) for x in ((above + token * v) / (below + token) * valid, num, den, final))


# --- delta rules ------------------------------------------------------------------------------------------------------


def _delta(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> Any:
    q, k = _heads(t.q, t.v), _heads(t.k, t.v)
    g = None if getattr(t, "log_decay", None) is None else _channels(t.log_decay, k)
    return Recurrence("delta", (q, k, t.v, t.beta, g, S), _scale(o, k.shape[-1]))


def _erasing(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    """S~ = diag(exp(g)) S; S += k (w - S~^T r)^T, with r of a key of its own or with factors per channel."""
    q, k = _heads(t.q, t.v) * _scale(o, t.q.shape[-1]), _heads(t.k, t.v)
    if hasattr(t, "erase"):
        r, w = t.erase * k, t.write * t.v
    else:
        r, w = t.beta[..., None] * _heads(t.p, t.v), t.beta[..., None] * t.v
    return o.scan.erasing(q, k, w, r, _channels(at_most_0(t.log_decay), k), S)


def _delta_product(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    """Each of a token's n writes is a token of a delta rule, the first with the decay, the last with the query."""
    n = t.k.shape[2]
    k, v = t.k.flatten(1, 2), t.v.flatten(1, 2)
    q = F.pad(t.q[:, :, None], (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
    g = None if t.log_decay is None else F.pad(t.log_decay[:, :, None], (0, 0, 0, n - 1)).flatten(1, 2)
    scan = Scan(None if o.scan.lengths is None else n * o.scan.lengths, o.scan.threads)
    q, k = _heads(q, v) * _scale(o, q.shape[-1]), _heads(k, v)
    read, S = scan.delta(q, k, v, t.beta.flatten(1, 2), g if g is None else _channels(g, k), S)
    return read[:, n - 1::n], S


def _rwkv7(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    r, k, a, b = (_heads(x, t.v) for x in (t.r, t.k, t.a, t.b))
    return o.scan.rwkv7(r * (1 if o.scale is None else o.scale), at_most_0(t.log_decay), k, t.v, a, b, S)


# --- scans and convolutions -------------------------------------------------------------------------------------------


def _hgrn(t: SimpleNamespace, h: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    return o.scan.hgrn(t.x, at_most_0(t.log_decay), h)


class _Root(torch.autograd.Function):
    """sqrt(x) with a derivative of at most 1000, and 0 of a limited derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sqrt()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        return dy * _slope_of_root(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx, dx):
        return dx * _slope_of_root(ctx.saved_tensors[0])


def _slope_of_root(x: Tensor) -> Tensor:
    free = x > 0.25e-6
    return torch.where(free, 0.5 * torch.where(free, x, 1).rsqrt(), 1000)


def _rg_lru(t: SimpleNamespace, h: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    g = -o.c * F.softplus(t.a) * torch.sigmoid(t.recurrence_gate)
    root = _Root.apply(-torch.expm1(2 * g))
    if h is None:
        root = torch.cat([torch.ones_like(root[:, :1]), root[:, 1:]], 1)
    return o.scan.hgrn(root * torch.sigmoid(t.input_gate) * t.x, g, h)


def _selective_scan(t: SimpleNamespace, h: Any, o: SimpleNamespace) -> Any:
    s = t.delta if t.delta_bias is None else t.delta + t.delta_bias
    s = F.softplus(s) if o.delta_softplus else s
    return Recurrence("selective", (t.u, s, t.A, t.B, t.C, h, t.D, t.z))


def _ssd(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    dt = t.dt if t.dt_bias is None else t.dt + t.dt_bias
    dt = F.softplus(dt) if o.dt_softplus else dt
    low, high = (0.0, math.inf) if o.dt_limit is None else o.dt_limit
    dt = dt.clamp(low, high)
    k, q = _heads(t.B, t.x), _heads(t.C, t.x) * (1 if o.scale is None else o.scale)
    y, S = o.scan.gla(q, k, dt[..., None] * t.x, _channels(dt * t.A, k), None, None if S is None else S.mT)
    if t.D is not None:
        y = y + (t.D if t.D.dim() == 2 else t.D[:, None]) * t.x
    return (y if t.z is None else y * F.silu(t.z)) * o.scan.is_valid(y), S.mT


def _taps(x: Tensor, weight: Tensor, state: Any, o: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """sum_j weight[c, j] x[t - (W - 1) + j] of channels [S, T, D], and the last W - 1 inputs, [S, W - 1, D]."""
    W = weight.shape[1]
    state = x.new_zeros(x.shape[0], W - 1, x.shape[2]) if state is None else state
    all_of = torch.cat([state, x], 1)
    y = sum(all_of[:, j:j + x.shape[1]] * weight[:, j] for j in range(W))
    n = torch.full((len(x),), x.shape[1], device=x.device) if o.scan.lengths is None else o.scan.lengths
    last = (n[:, None] + torch.arange(W - 1, device=x.device))[..., None].expand(-1, -1, x.shape[2])
    return y * o.scan.is_valid(x), all_of.gather(1, last)


def _causal_conv1d(t: SimpleNamespace, state: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    y, final = _taps(t.x, t.weight, None if state is None else state.mT, o)
    y = y if t.bias is None else y + t.bias
    return (y if o.activation is None else F.silu(y)) * o.scan.is_valid(y), final.mT


def _convolved(u: Tensor, taps: Tensor) -> Tensor:
    """sum_s taps[..., s] u[..., t - s] over the last axis."""
    n = 2 * u.shape[-1]
    product = torch.fft.rfft(u, n) * torch.fft.rfft(taps[..., : u.shape[-1]], n)
    return torch.fft.irfft(product, n)[..., : u.shape[-1]]


def _long_convolution(t: SimpleNamespace, o: SimpleNamespace) -> tuple[Tensor, ...]:
    y = _convolved(t.u.mT, t.kernel).mT
    return ((y if t.D is None else y + t.D * t.u) * o.scan.is_valid(y),)


def _modes(t: SimpleNamespace, bilinear: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The logarithm of a, b and C of complex modes."""
    dt = torch.exp(t.log_dt)[:, None]
    z = dt * torch.complex(-torch.exp(t.log_A_real), t.A_imag)
    C = torch.view_as_complex(t.C.contiguous())
    if bilinear:
        return torch.log((1 + z / 2) / (1 - z / 2)), dt / (1 - z / 2), C
    # (e^z - 1) / z, by its series near 0
    small = z.abs() < 0.5
    inside, outside = torch.where(small, z, 0), torch.where(small, 1, z)
    series, term = torch.ones_like(z), torch.ones_like(z)
    for i in range(2, 18):
        term = term * inside / i
        series = series + term
    return z, dt * torch.where(small, series, (torch.exp(outside) - 1) / outside), C


def _powers(log_a: Tensor, exponents: Tensor) -> Tensor:
    return torch.exp(log_a[..., None] * exponents)


def _spectral(u: Tensor, t: SimpleNamespace, h: Any, bilinear: bool, lengths: Any) -> tuple[Tensor, Tensor]:
    """h_t = a h_{t-1} + b u_t, y_t = 2 Re <C, h_t> + D u_t for u [S, D, T], with h [S, D, N] complex."""
    log_a, b, C = _modes(t, bilinear)
    T = u.shape[-1]
    at = torch.arange(T, device=u.device, dtype=u.dtype)
    taps = 2 * torch.einsum("dn,dnt->dt", C * b, _powers(log_a, at)).real
    y = _convolved(u, taps)
    n = torch.full((len(u),), T, device=u.device) if lengths is None else lengths
    back = (n[:, None] - 1 - torch.arange(T, device=u.device)).clamp(min=0).to(u.dtype)  # u is 0 behind the last token
    final = torch.stack([torch.einsum("dnt,dt->dn", _powers(log_a, e), x.to(log_a.dtype)) for e, x in zip(back, u)])
    final = b * final
    if h is not None:
        y = y + 2 * torch.einsum("sdn,dnt->sdt", C * h, _powers(log_a, at + 1)).real
        final = final + torch.exp(log_a * n[:, None, None]) * h
    return y if t.D is None else y + t.D[:, None] * u, final


def _complex(h: Any) -> Any:
    return None if h is None else torch.view_as_complex(h.contiguous())


def _s4d(t: SimpleNamespace, h: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    y, final = _spectral(t.u.mT, t, _complex(h), o.discretization == "bilinear", o.scan.lengths)
    return y.mT * o.scan.is_valid(t.u), torch.view_as_real(final)


def _h3(t: SimpleNamespace, tail: Any, h: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    _, T, H, d = t.q.shape
    taps = t.shift.flip(1)  # of the newest key first
    if t.shift_D is not None:
        taps = torch.cat([taps[:, :-1], taps[:, -1:] + t.shift_D[:, None]], 1)
    keys, tail = _taps(t.k.flatten(2), taps, None if tail is None else tail.flatten(2), o)
    x = torch.einsum("sthi,sthj->shijt", keys.unflatten(2, (H, d)), t.v).flatten(2, 3)  # [S, H, d d, T]
    h = None if h is None else _complex(h).flatten(2, 3)
    ys, finals = [], []
    for i in range(d * d):
        y, final = _spectral(x[:, :, i], t, None if h is None else h[:, :, i], False, o.scan.lengths)
        ys.append(y)
        finals.append(final)
    y = torch.stack(ys, 2).unflatten(2, (d, d))
    out = torch.einsum("sthi,shijt->sthj", t.q, y) * o.scan.is_valid(t.q)
    return out, tail.unflatten(2, (H, d)), torch.view_as_real(torch.stack(finals, 2).unflatten(2, (d, d)))


# --- without a recurrence ---------------------------------------------------------------------------------------------


def _efficient_attention(t: SimpleNamespace, o: SimpleNamespace) -> tuple[Tensor, ...]:
    valid = o.scan.is_valid(t.k) > 0
    if t.kv_mask is not None:
        valid = valid & (t.kv_mask > 0)[..., None, None]
    k = torch.where(valid, t.k, -math.inf)
    k = torch.where(valid, torch.exp(k - torch.where(valid, k, -math.inf).amax(1, keepdim=True).detach()), 0)
    total = k.sum(1, keepdim=True)
    k = k / torch.where(total > 0, total, 1)
    v = torch.where(valid[..., :1], t.v, 0)
    q = torch.softmax(t.q, -1) * _scale(o, t.q.shape[-1])
    S = torch.einsum("sthk,sthv->shkv", _heads(k, v), v)
    return (torch.einsum("sthk,shkv->sthv", _heads(q, v), S) * o.scan.is_valid(v),)


def _linformer(t: SimpleNamespace, o: SimpleNamespace) -> tuple[Tensor, ...]:
    e, f = (F.pad(x, (0, 1))[:, o.columns].movedim(1, 0) for x in (t.e, t.f))  # [S, R, T]
    k, v = torch.einsum("srt,sthk->srhk", e, t.k), torch.einsum("srt,sthv->srhv", f, t.v)
    q, k = _heads(t.q, t.v) * _scale(o, t.q.shape[-1]), _heads(k, t.v)
    p = torch.softmax(torch.einsum("sthk,srhk->shtr", q, k), -1)
    return (torch.einsum("shtr,srhv->sthv", p, v) * o.scan.is_valid(t.q),)


COMPOSITIONS = {
    "linear_attention": _linear_attention, "based": _based, "performer": _performer, "linformer": _linformer,
    "efficient_attention": _efficient_attention, "retention": _decayed, "lightning": _decayed, "simple_gla": _decayed,
    "gla": _decayed, "hgrn2": _hgrn2, "mlstm": _mlstm, "rwkv4": _rwkv4, "rwkv5": _rwkv56, "rwkv6": _rwkv56,
    "rg_lru": _rg_lru, "hgrn": _hgrn, "delta_rule": _delta, "gated_delta_rule": _delta, "kda": _delta, "gdn2": _erasing,
    "comba": _erasing, "delta_product": _delta_product, "rwkv7": _rwkv7, "causal_conv1d": _causal_conv1d, "ssd": _ssd,
    "selective_scan": _selective_scan, "long_convolution": _long_convolution, "s4d": _s4d, "h3": _h3,
}
