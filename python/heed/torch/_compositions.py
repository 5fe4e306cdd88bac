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
token at 0 and zeros behind the last (`_scans.py`), the initial states, None where they are absent, and the settings. It
returns o and the final states, unless it ends in a recurrence.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heed.torch._scans import Recurrence, at_last, at_most_0


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


def _rwkv56(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> Recurrence:
    r, k = _heads(t.r, t.v), _heads(t.k, t.v)
    return Recurrence("before", (r, k, t.v, _channels(t.log_decay, k), None, t.u, S), 1 if o.scale is None else o.scale)


def _sums_of_all(q: Tensor, k: Tensor, v: Tensor, o: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """q is multiplied with the sums over all tokens of k v^T and of k."""
    v, valid = torch.cat([v, torch.ones_like(v[..., :1])], -1), o.scan.is_valid(k)
    read = torch.einsum("sthk,shkv->sthv", q, torch.einsum("sthk,sthv->shkv", k * valid, v)) * valid
    return read[..., :-1], read[..., -1:]


def _elu1(x: Tensor) -> Tensor:
    """x + 1 above 0 and exp(x) below it, without torch.where, which takes five times as long as its neighbours."""
    above = torch.relu(x)
    return above + torch.exp(x - above)


_FEATURES = {
    "elu1": _elu1,
    "relu": torch.relu,
    "relu_sq": lambda x: torch.relu(x) ** 2,
    "exp": lambda x: torch.exp(x.clamp(max=80)),
    "identity": lambda x: x,
    "softmax": lambda x: torch.softmax(x, -1),
}


def _linear_attention(t: SimpleNamespace, S: Any, z: Any, o: SimpleNamespace) -> Any:
    phi = _FEATURES[o.feature_map]
    q, k, scale = _heads(phi(t.q), t.v), _heads(phi(t.k), t.v), 1 if o.scale is None else o.scale
    if o.causal:
        return _normalised(q, k, t.v, S, z, scale, o)
    sums, product = _sums_of_all(scale * q, k, t.v, o)
    return (sums / (product + o.eps) * o.scan.is_valid(sums) if o.normalize else sums,)


def _normalised(q: Tensor, k: Tensor, v: Tensor, S: Any, z: Any, scale: float, o: SimpleNamespace) -> Recurrence:
    """Sums of k v^T, which with `normalize` are divided by those of k."""
    if not o.normalize:
        return Recurrence("gla", (q, k, v, None, None, S), scale)
    return Recurrence("gla", (q, k, v, None, None, S, z), scale, below=lambda read: scale * read + o.eps)


def _based(t: SimpleNamespace, S: Any, z: Any, o: SimpleNamespace) -> Recurrence:
    scale = _scale(o, t.q.shape[-1])
    first, second = torch.triu_indices(t.q.shape[-1], t.q.shape[-1], 1, device=t.q.device)

    def phi(x: Tensor) -> Tensor:
        products = scale * x.index_select(-1, first) * x.index_select(-1, second)
        return torch.cat([torch.ones_like(x[..., :1]), scale**0.5 * x, scale * x**2 / 2**0.5, products], -1)

    return _normalised(_heads(phi(t.q), t.v), _heads(phi(t.k), t.v), t.v, S, z, 1, o)


def _performer(t: SimpleNamespace, S: Any, z: Any, m: Any, o: SimpleNamespace) -> Any:
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
    if causal:
        return Recurrence("gla", (q, k, t.v, None, None, S, z), below=_positive, maximum=(final,))
    sums, product = _sums_of_all(q, k, t.v, o)
    return (torch.where(o.scan.is_valid(sums) > 0, sums / _positive(product), 0),)


def _positive(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def _mlstm(t: SimpleNamespace, S: Any, z: Any, m: Any, o: SimpleNamespace) -> Recurrence:
    q, k, scale = _heads(t.q, t.v), _heads(t.k, t.v), _scale(o, t.q.shape[-1])
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
    floor, out = torch.exp(-largest)[:, None, :, None], torch.exp(largest - final)[..., None, None]
    eps = (o.eps * torch.exp(m_t - largest[:, None]))[..., None]
    return Recurrence("gla", (q, k, t.v, _channels(g, k), None, S, z), scale, final=lambda S: S * out, maximum=(final,),
                      below=lambda read: torch.maximum((scale * read).abs(), floor) + eps)


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


def _delta(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> Recurrence:
    q, k = _heads(t.q, t.v), _heads(t.k, t.v)
    g = None if getattr(t, "log_decay", None) is None else _channels(t.log_decay, k)
    p = _heads(t.p, t.v) if hasattr(t, "p") else None
    return Recurrence("delta", (q, k, p, t.v, t.beta, g, S), _scale(o, k.shape[-1]))


def _gdn2(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> Recurrence:
    q, k = _heads(t.q, t.v), _heads(t.k, t.v)
    g = _channels(t.log_decay, k)
    return Recurrence("delta", (q, k, t.erase * k, t.write * t.v, None, g, S), _scale(o, k.shape[-1]))


def _preconditioned(t: SimpleNamespace, S: Any, A: Any, o: SimpleNamespace) -> tuple[Tensor, ...]:
    """A is a sum per channel; keys that write are multiplied by a function of it."""
    g, shape = at_most_0(t.log_decay_A)[..., None].expand(t.k.shape), t.k.shape[2:]
    x = t.beta_A[..., None] * t.k.square()
    after, A = o.scan.hgrn(x.flatten(2), g.flatten(2), None if A is None else A.flatten(1))
    r = torch.log(after.unflatten(2, shape) + o.eps) - (-0.2 if t.center is None else t.center[:, None])
    written = t.k * torch.exp(-math.log(o.bound) * r / (1 + r.abs()))
    q, k, p = (_heads(x, t.v) for x in (t.q, written, t.k))
    rule = Recurrence("delta", (q, k, p, t.v, t.beta, _channels(t.log_decay, k), S), _scale(o, k.shape[-1]))
    return *rule.results(o.scan), A.unflatten(1, shape)


def _delta_product(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> Recurrence:
    """Each of a token's n writes is a token of a delta rule, the first with the decay, the last with the query."""
    n = t.k.shape[2]
    k, v = t.k.flatten(1, 2), t.v.flatten(1, 2)
    g = None if t.log_decay is None else F.pad(t.log_decay[:, :, None], (0, 0, 0, n - 1)).flatten(1, 2)
    q, k = _heads(at_last(t.q, n), v), _heads(k, v)
    g = g if g is None else _channels(g, k)
    return Recurrence("delta", (q, k, None, v, t.beta.flatten(1, 2), g, S), _scale(o, q.shape[-1]), steps=n)


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


def _ssd(t: SimpleNamespace, S: Any, o: SimpleNamespace) -> Recurrence:
    dt = t.dt if t.dt_bias is None else t.dt + t.dt_bias
    dt = F.softplus(dt) if o.dt_softplus else dt
    low, high = (0.0, math.inf) if o.dt_limit is None else o.dt_limit
    dt = dt.clamp(low, high)
    k, q = _heads(t.B, t.x), _heads(t.C, t.x)
    gate = None if t.z is None else F.silu(t.z)
    own = None if t.D is None else (t.D if t.D.dim() == 2 else t.D[:, None]) * t.x
    own = own if own is None or gate is None else gate * own
    tensors = (q, k, dt[..., None] * t.x, _channels(dt * t.A, k), None, None if S is None else S.mT)
    return Recurrence("gla", tensors, 1 if o.scale is None else o.scale, gate, own, final=lambda S: S.mT)


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    """Channels 2 i and 2 i + 1 of [..., K] rotated by angle i of [..., P]."""
    pairs, rest = x[..., : 2 * angle.shape[-1]].unflatten(-1, (-1, 2)), x[..., 2 * angle.shape[-1]:]
    a, b, c, s = pairs[..., 0], pairs[..., 1], torch.cos(angle), torch.sin(angle)
    return torch.cat([torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2), rest], -1)


def _mamba3(t: SimpleNamespace, S: Any, angle: Any, k_before: Any, v_before: Any,
            o: SimpleNamespace) -> tuple[Tensor, ...]:
    """Each of a token's R writes is a token of gla, with the weight that later tokens give it. What the reads of the
    token itself should have is added, see the README of the operation."""
    R, heads, scale = t.v.shape[2], t.v.shape[3] // t.q.shape[3], 1 if o.scale is None else o.scale
    q, k = (x if heads == 1 else x.repeat_interleave(heads, 3) for x in (t.q, t.k))
    q = q if t.q_bias is None else q + t.q_bias.movedim(0, 1)
    k = k if t.k_bias is None else k + t.k_bias.movedim(0, 1)
    sums = (t.dt[..., None] * t.theta).double().cumsum(1)
    sums = sums if angle is None else sums + angle[:, None].double()
    angles = (sums - 2 * math.pi * torch.round(sums.detach() / (2 * math.pi))).to(q.dtype)
    q, k = _rotated(q, angles[:, :, None]), _rotated(k, angles[:, :, None])
    gamma, beta = torch.sigmoid(t.trap) * t.dt, torch.sigmoid(-t.trap) * t.dt
    after = o.scan.next(beta)
    if k_before is not None:
        S = S + torch.einsum("sh,srhk,srhv->shkv", beta[:, 0], k_before, v_before)
    written = (gamma + after)[:, :, None, :, None] * t.v
    g = F.pad(at_most_0(t.log_decay)[:, :, None], (0, 0, 0, R - 1)).flatten(1, 2)
    read, S = o.scan.of_steps(R).gla(scale * q.flatten(1, 2), k.flatten(1, 2), written.flatten(1, 2), g, None, S)
    # A read has the writes of its own token up to itself with gamma + after instead of gamma, and no later ones.
    up_to = torch.ones(R, R, dtype=q.dtype, device=q.device).tril()
    factor = gamma[..., None, None] * (1 - up_to) - after[..., None, None] * up_to
    own = torch.einsum("strhk,stuhk,sthru,stuhv->strhv", q, k, factor, t.v)
    angle, k, v = (_last(x, before, o) for x, before in ((angles, angle), (k, k_before), (t.v, v_before)))
    return (read.unflatten(1, (-1, R)) + scale * own) * o.scan.is_valid(own), S, angle, k, v


def _last(x: Tensor, before: Any, o: SimpleNamespace) -> Tensor:
    """x of the last token of each sequence; `before`, or zeros, where it has none."""
    if o.scan.lengths is None:
        return x[:, -1]
    x = torch.cat([(torch.zeros_like(x[:, 0]) if before is None else before)[:, None], x], 1)
    return x[torch.arange(len(x), device=x.device), o.scan.lengths]


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
    "rg_lru": _rg_lru, "hgrn": _hgrn, "delta_rule": _delta, "gated_delta_rule": _delta, "kda": _delta, "gdn2": _gdn2,
    "comba": _delta, "precond_delta_rule": _preconditioned, "precond_kda": _preconditioned,
    "delta_product": _delta_product, "rwkv7": _rwkv7, "causal_conv1d": _causal_conv1d, "ssd": _ssd,
    "mamba3": _mamba3,
    "selective_scan": _selective_scan, "long_convolution": _long_convolution, "s4d": _s4d, "h3": _h3,
}
