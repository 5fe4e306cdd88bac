# Derivatives of the recurrences that compositions consist of.
"""The equations of recurrences that `_second_derivatives.py` needs, in the notation of `_compositions.py`.

GRADIENTS, what the backward pass computes. With D_t, the gradient of S_t, as in the README of each mechanism:

  gla     D_t = q_t do_t^T + diag(exp(g_{t+1})) D_{t+1} diag(exp(h_{t+1}))            from the last token to the first
          dq_t = S_t do_t,  dk_t = D_t v_t,  dv_t = D_t^T k_t
          dg_t = sum_{s >= t} (q_s dq_s - k_s dk_s) + rowsum(S_T D_T), and likewise dh
  rwkv7   D_t = r_t do_t^T + diag(exp(g_{t+1})) D_{t+1} + a_{t+1} (D_{t+1}^T b_{t+1})^T
          with x_t = S_{t-1}^T a_t and e_t = D_t^T b_t, S and D are recurrences of gla with two writes per token:
          S of k v^T and b x^T, D of r do^T and a_{t+1} e_{t+1}^T
  hgrn    D_t = do_t + exp(g_{t+1}) D_{t+1},  dx_t = D_t,  dg_t = (h_t - x_t) D_t

ALONG, the derivative of o and of the final state in a direction (q', k', v', g'). With c_t = sum_{s <= t} g'_s, what
decays contribute is moved to the other tensors,

  gla     o' = R(q' + c q, k, v) + R(q, k' - c k, v) + R(q, k, v'),

where R(q, k, v) is the recurrence's o: decays between s and t have the tangent c_t - c_s.

Every sum over tokens is again one of the recurrences, so that all of this has derivatives too. The derivative of a
backward pass has equations of its own in `_gla_derivatives.py`, `_delta_derivatives.py` and, for selective scans, in
`_selective_derivatives.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heed.torch._scans import Scan, read_key
from heed.torch._dispatch import is_plain_memory


def from_the_end(x: Tensor) -> Tensor:
    """sum_{s >= t} x_s."""
    return x.flip(1).cumsum(1).flip(1)


def exp_first(scan: Scan, g: Any) -> Any:
    return torch.exp(scan.first(g))


def plus(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def plus_product(x: Any, c: Any, y: Any, sign: int = 1) -> Any:
    """x + sign c y, where None is 0."""
    if c is None or y is None:
        return x
    return sign * c * y if x is None else torch.addcmul(x, c, y, value=sign)


def add(total: Any, x: Any, c: Any = None, sign: int = 1) -> Any:
    """total + x, or total + sign c x, where None is 0, in the memory of `total`, which is a result of a recurrence."""
    if x is None:
        return total
    if total is None:
        return x if c is None else sign * c * x
    if torch.is_grad_enabled() or not is_plain_memory(*(y for y in (total, x, c) if y is not None)):
        return total + x if c is None else torch.addcmul(total, c, x, value=sign)
    return total.add_(x) if c is None else total.addcmul_(c, x, value=sign)


class Sums(dict):
    """Sums by name, None where nothing has been added."""

    def __missing__(self, name: str) -> None:
        return None

    def add(self, names: str, terms: Sequence[Any], c: Any = None, sign: int = 1) -> None:
        """Adds sign c x of each term x, which is a result that nobody else has, to the sum of its name."""
        for name, x in zip(names.split(), terms):
            self[name] = add(self[name], x, c, sign)


def _gla(scan: Scan, do: Tensor, dS: Any, q: Tensor, k: Tensor, v: Tensor, g: Any, h: Any, S: Any,
         needed: Sequence[bool] = (True,) * 6):
    need_q, need_k, need_v, need_g, need_h, need_S = needed
    need_g, need_h, need_S = need_g and g is not None, need_h and h is not None, need_S
    back = scan.reversed()
    columns = torch.zeros_like(v) if h is None and g is not None and g.dim() == 4 else h

    def transposed(key_decays: Any, value_decays: Any) -> tuple[Any, Any]:
        """The decays of S^T, of rows and columns; one per head decays either."""
        return (key_decays, None) if columns is None else (value_decays, key_decays)

    g_next, h_next, columns_next = (None if x is None else scan.next(x) for x in (g, h, columns))
    dq = dk = dv = dg = dh = D = None
    if need_q or need_g or need_h and dS is not None:
        dq, last = scan.gla(do, v, k, *transposed(g, columns), None if S is None else S.mT)
    if need_k or need_g:
        dk, _ = back.gla(v, do, q, *transposed(g_next, columns_next), None if dS is None else dS.mT)
    if need_v or need_h or need_S:
        dv, D = back.gla(k, q, do, g_next, h_next, dS)
    end = last.mT * dS if (need_g or need_h) and dS is not None else None
    if need_g:
        dg = q * dq - k * dk
        of_end = 0 if end is None else end.sum(-1)[:, None]
        if g.dim() == 3:
            dg, of_end = dg.sum(-1), 0 if end is None else of_end.sum(-1)
        dg = (from_the_end(dg) + of_end) * scan.is_valid(g)
    if need_h:
        o, _ = scan.gla(q, k, v, g, h, S)
        dh = (from_the_end(o * do - v * dv) + (0 if end is None else end.sum(-2)[:, None])) * scan.is_valid(h)
    if need_S:
        if g is not None:
            first = exp_first(scan, g)
            D = first[(..., *[None] * (D.dim() - first.dim()))] * D
        D = D if h is None else D * exp_first(scan, h)[..., None, :]
    return dq, dk, dv, dg, dh, D


def _rwkv7(scan: Scan, do: Tensor, dS: Any, r: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor,
           b: Tensor, S: Any):
    none, back = torch.zeros_like(v), scan.reversed()

    def read(by: Scan, query: Tensor, writes: Sequence[tuple[Tensor, Tensor]], decay: Tensor, state: Any) -> Tensor:
        """Sum over writes of key value^T, by the values that a query of their size meets: [.., K]."""
        (key, value), (other_key, other_value) = writes
        first, _ = by.gla(query, value, key, none, decay, None if state is None else state.mT)
        return first + by.gla(query, other_value, other_key, none, decay)[0]

    a_next, b_next, g_next = scan.next(a), scan.next(b), scan.next(g)
    zero = torch.zeros_like(v[:, 0])
    later, last = scan.rwkv7(a_next, g, k, v, a, b, S)
    x = scan.previous(later, zero if S is None else read_key(S, a[:, 0]))
    dv, D = back.rwkv7(k, g_next, r, do, b_next, a_next, dS)
    e, _ = back.rwkv7(b, g_next, r, do, b_next, a_next, dS)
    written, arriving = ((k, v), (b, x)), ((r, do), (a_next, scan.next(e)))
    dr = read(scan, do, written, g, S)
    dk, db = read(back, v, arriving, g_next, dS), read(back, x, arriving, g_next, dS)
    first = torch.zeros_like(a[:, 0]) if S is None else torch.einsum("shkv,shv->shk", S, scan.first(e))
    da = scan.previous(read(scan, scan.next(e), written, g, S), first) * scan.is_valid(a)
    end = 0 if dS is None else (last * dS).sum(-1)[:, None]
    dg = (from_the_end(r * dr + scan.next(a * da) - k * dk - b * db) + end) * scan.is_valid(g)
    D = exp_first(scan, g)[..., None] * D + scan.first(a)[..., None] * scan.first(e)[..., None, :]
    return dr, dg, dk, dv, da, db, D


def _hgrn(scan: Scan, do: Tensor, dh: Any, x: Tensor, g: Tensor, h: Any):
    states, _ = scan.hgrn(x, g, h)
    D, first = scan.reversed().hgrn(do, scan.next(g), dh)
    return D, (states - x) * D * scan.is_valid(x), exp_first(scan, g) * first


GRADIENTS = {"linear_attention": _gla, "simple_gla": _gla, "gla": _gla, "rwkv7": _rwkv7, "hgrn": _hgrn}


def sums_of_decays(scan: Scan, dg: Any) -> Any:
    """The tangents of the logarithms of what a token has decayed since the first, None for zeros."""
    if dg is None:
        return None
    return (dg if scan.lengths is None else dg * scan.is_valid(dg)).cumsum(1)


def per_channel(c: Any) -> Any:
    """Numbers of channels, or of heads, to be multiplied with channels."""
    return c if c is None or c.dim() == 4 else c[..., None]


def _sum_over_runs(runs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    reads, states = zip(*runs)
    return sum(reads[1:], reads[0]), sum(states[1:], states[0])


def along_gla(scan: Scan, of: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, g: Any, h: Any, S: Any):
    dq, dk, dv, dg, dh, dS = of
    c, e = (per_channel(sums_of_decays(scan, x)) for x in (dg, dh))
    # S' = C + diag(c) S + S diag(e), where C is a recurrence of gla with the writes k' v^T + k v'^T.
    q_along, k_along = plus_product(dq, c, q), plus_product(dk, c, k, -1)
    v_along = plus_product(dv, e, v, -1)
    writes = [(key, value) for key, value in ((k_along, v), (k, v_along)) if key is not None and value is not None]
    runs = [scan.gla(q, key, value, g, h, dS if i == 0 else None)
            for i, (key, value) in enumerate(writes or [(torch.zeros_like(k), v)])]
    along, final = _sum_over_runs(runs)
    if q_along is not None:
        read, last = scan.gla(q_along, k, v, g, h, S)
        along = along + read
        final = final if c is None else final + c[:, -1, ..., None] * last
    if e is not None:
        read, last = scan.gla(q, k, v, g, h, S)
        along, final = along + e * read, final + last * e[:, -1, :, None, :]
    return along, final


def _along_rwkv7(scan: Scan, of: Sequence[Any], r: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
                 S: Any):
    dr, dg, dk, dv, da, db, dS = of
    c = torch.zeros_like(g) if dg is None else sums_of_decays(scan, dg)
    before = scan.previous(c, torch.zeros_like(c[:, 0]))
    # S' = C + diag(c) S, where C has the transitions of S and four writes per token.
    r_along, k_along, b_along = plus(dr, c * r), plus(dk, -c * k), plus(db, -c * b)
    a_along = plus(da, before * a)

    def read_before(key: Tensor) -> Tensor:
        """S_{t-1}^T key_t."""
        later, _ = scan.rwkv7(scan.next(key), g, k, v, a, b, S)
        return scan.previous(later, torch.zeros_like(v[:, 0]) if S is None else read_key(S, key[:, 0]))

    writes = [(k_along, v), (b_along, read_before(a)), (b, read_before(a_along))] + ([] if dv is None else [(k, dv)])
    runs = [scan.rwkv7(r, g, key, value, a, b, dS if i == 0 else None) for i, (key, value) in enumerate(writes)]
    along, final = _sum_over_runs(runs)
    read, last = scan.rwkv7(r_along, g, k, v, a, b, S)
    return along + read, final + c[:, -1, ..., None] * last


def _along_hgrn(scan: Scan, of: Sequence[Any], x: Tensor, g: Tensor, h: Any):
    dx, dg, dh = of
    forcing = dx
    if dg is not None:
        states, _ = scan.hgrn(x, g, h)
        forcing = plus(dx, dg * (states - x))
    return scan.hgrn(torch.zeros_like(x) if forcing is None else forcing, g, dh)


ALONG = {"linear_attention": along_gla, "simple_gla": along_gla, "gla": along_gla, "rwkv7": _along_rwkv7,
         "hgrn": _along_hgrn}


_GLA = ("q", "k", "v", "log_decay", "log_decay_v", "initial_state")
# By operator, the arguments that its equations take, in order.
TENSORS = {"linear_attention": _GLA, "simple_gla": _GLA, "gla": _GLA, "hgrn": ("x", "log_decay", "initial_state"),
           "rwkv7": ("r", "log_decay", "k", "v", "a", "b", "initial_state")}
