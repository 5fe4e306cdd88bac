# Second derivatives of gla, also before a token's own writes, and divided by a normaliser.
"""The gradients of <u, o'> + <W, S_T'> for three recurrences, in the notation of `_recurrences.py`.

  gla         those of the three runs whose sum is o'
  before      o_t = (S_{t-1} + u k_t v_t^T)^T q_t: gla whose o is read by the token after, and products of a token
  normalised  o = S^T q / b, where b is a function of what q reads of the sums of k: gla of the query q / b, and vectors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heed.torch._scans import Scan, read_key
from heed.torch._recurrences import (
    GRADIENTS, Sums, add, exp_first, from_the_end, per_channel, plus, plus_product, sums_of_decays)

_ops = torch.ops.heed


def gradients_of_gla(scan: Scan, u: Tensor, W: Any, q: Tensor, k: Tensor, v: Tensor, g: Any, S: Any,
                     needed: Sequence[bool]) -> Sequence[Any]:
    """The gradients of q, k, v, g and S of what arrives at o and at the state, None where they are not needed.

    Without decays per channel, a sum over tokens is a run of its own, so that none is computed in vain; decays of
    columns cost too much for that. The gradient of decays is the kernels', which have it without cancellation.
    """
    need_q, need_k, need_v, need_g, need_S = needed
    need_g, need_S = need_g and g is not None, need_S and S is not None
    wanted = [need_q, need_k, need_v, need_g, need_S]
    if not any(wanted):
        return (None,) * 5
    if g is None or g.dim() == 3 and not need_g:
        dq, dk, dv, dg, _, dS = GRADIENTS["gla"](scan, u, W, q, k, v, g, None, S, (*wanted[:4], False, need_S))
        return dq, dk, dv, dg, dS
    if g.dim() == 3:
        found = _ops.simple_gla_backward.default(u, W, wanted, q, k, v, g, 1.0, S, *scan.rest())
    else:
        found = _ops.gla_backward.default(u, W, [*wanted[:4], False, need_S], q, k, v, g, None, 1.0, S, *scan.rest())
    found = iter(found)
    return [next(found) if want else None for want in wanted]


def gla_twice(scan: Scan, u: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any], needed: Sequence[bool],
              needed_along: Sequence[bool], scale: float, of_R: Any = None):
    """With `of_R`, which arrives at o itself, o is a result too."""
    q, k, v, g, _, S = tensors
    dq, dk, dv, dg, _, dS = along
    need_q, need_k, need_v, need_g, _, need_S = needed
    need_dq, need_dk, need_dv, need_dg, _, need_dS = needed_along
    c = per_channel(sums_of_decays(scan, dg))
    c_end = None if c is None else c[:, -1, ..., None]
    u = u if scale == 1 else scale * u
    total, last = Sums(), None

    def run(names: str, q: Tensor, k: Tensor, v: Tensor, S: Any, at_end: Any, *needed: bool) -> Tensor:
        """Adds a run to o', and its gradients to these; returns its final state."""
        o, end = scan.gla(q, k, v, g, None, S, scale)
        total.add("o", [o])
        total.add(names, gradients_of_gla(scan, u, at_end, q, k, v, g, S, needed))
        return end

    if dq is not None or c is not None:
        last = run("dq k v g S", plus_product(dq, c, q), k, v, S, None if c is None or W is None else c_end * W,
                   need_q and c is not None or need_dq or need_dg, need_k, need_v, need_g, need_S)
        if c is not None:
            total.add("end", [last], c_end)
    if dk is not None or c is not None or dS is not None:
        k_along = plus_product(dk, c, k, -1)
        total.add("end", [run("q dk v g dS", q, torch.zeros_like(k) if k_along is None else k_along, v, dS, W, need_q,
                              need_k and c is not None or need_dk or need_dg, need_v, need_g, need_dS)])
    if dv is not None:
        total.add("end", [run("q k dv g -", q, k, dv, None, W, need_q, need_k, need_dv, need_g, False)])
    if c is not None and need_q:
        total.add("q", [total["dq"]], c)
    if c is not None and need_k:
        total.add("k", [total["dk"]], c, -1)
    if need_dg:
        of_dg = q * total["dq"] - k * total["dk"]
        at_end = 0 if W is None else (W * last).sum(-1)[:, None]
        if g.dim() == 3:
            of_dg, at_end = of_dg.sum(-1), 0 if W is None else at_end.sum(-1)
        total["dg"] = (from_the_end(of_dg) + at_end) * scan.is_valid(g)
    results = [total["o"], total["end"]]
    if of_R is not None:
        results.append(scan.gla(q, k, v, g, None, S, scale)[0])
        of_R = of_R if scale == 1 else scale * of_R
        total.add("q k v g S", gradients_of_gla(scan, of_R, None, q, k, v, g, S,
                                                (need_q, need_k, need_v, need_g, need_S)))
    return (results, [total[x] for x in ("q", "k", "v", "g", "", "S")],
            [total[x] for x in ("dq", "dk", "dv", "dg", "", "dS")])


def before_twice(scan: Scan, w: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any], needed: Sequence[bool],
                 needed_along: Sequence[bool], scale: float):
    """The run of gla whose tokens read what the token after them reads; the first one reads S.

    What a token reads of its own is m_t v_t with m_t = <q_t, u k_t>.
    """
    q, k, v, g, h, u, S = tensors
    dq, dk, dv, dg, dh, du, dS = along
    (o, end), of, of_along = gla_twice(
        scan, scan.next(w), W, (scan.next(q), k, v, g, h, S), (None if dq is None else scan.next(dq), *along[1:5], dS),
        (*needed[:5], needed[6]), (*needed_along[:5], needed_along[6]), scale)
    first, w = None, w if scale == 1 else scale * w
    of, of_along = list(of), list(of_along)
    if dS is not None:
        first = read_key(dS, q[:, 0])
    if S is not None and dq is not None:
        first = plus(first, read_key(S, dq[:, 0]))
        of[5] = plus(of[5], dq[:, 0, ..., None] * w[:, 0, :, None])
    of_along[5] = plus(of_along[5], q[:, 0, ..., None] * w[:, 0, :, None])
    o = scan.previous(torch.zeros_like(w) if o is None else o, torch.zeros_like(w[:, 0]) if first is None else
                      scale * first)

    def of_query(found: Any, state: Any) -> Any:
        if found is None and state is None:
            return None
        first = torch.zeros_like(q[:, 0]) if state is None else torch.einsum("shkv,shv->shk", state, w[:, 0])
        return scan.previous(torch.zeros_like(q) if found is None else found, first)

    of[0], of_along[0] = of_query(of[0], dS), of_query(of_along[0], S)
    # The gradients of <w, m' v + m v'>.
    qu, c = q * u, (w * v).sum(-1, keepdim=True)
    ck, c_along = c * k, None if dv is None else (w * dv).sum(-1, keepdim=True)
    qu_along = plus_product(None if dq is None else dq * u, du, q)
    m_along = plus_product(None if qu_along is None else qu_along * k, dk, qu)
    ck_along = plus_product(None if dk is None else c * dk, c_along, k)
    if m_along is not None:
        m_along = m_along.sum(-1, keepdim=True)
        o = add(o, v, m_along if scale == 1 else scale * m_along)
        of[2] = add(of[2], w, m_along)
    if dv is not None or needed_along[2]:
        m = (qu * k).sum(-1, keepdim=True)
        o = add(o, dv, m if scale == 1 else scale * m)
        of_along[2] = plus_product(of_along[2], m, w)
    of[0] = plus_product(plus_product(of[0], u, ck_along), du, ck)
    of[1] = plus_product(plus_product(of[1], c, qu_along), c_along, qu)
    of_along[0] = plus_product(of_along[0], u, ck)
    of_along[1] = plus_product(of_along[1], c, qu)
    of_u = plus_product(None if dq is None else dq * ck, q, ck_along)
    of.insert(5, None if of_u is None else of_u.sum((0, 1)))
    of_along.insert(5, (q * ck).sum((0, 1)) if needed_along[5] else None)
    return (o, end), of, of_along


def _sums_of_keys(scan: Scan, x: Tensor, decays: Tensor, first: Any) -> tuple[Tensor, Tensor]:
    """z_t = exp(g_t) z_{t-1} + x_t of channels [S, T, H, K], and the last."""
    z, last = scan.hgrn(x.flatten(2), decays.flatten(2), None if first is None else first.flatten(1))
    return z.view(x.shape), last.view(len(x), *x.shape[2:])


def normalised_twice(scan: Scan, u: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any],
                     needed: Sequence[bool], needed_along: Sequence[bool], scale: float, of_z: Any, below: Any):
    """The run of gla whose query is p = q / b, where b = below(n), n_t = <q_t, z_t> and z_t = exp(g_t) z_{t-1} + k_t.

    With rho = b' / b, p' = q' / b - rho p, so that P, which arrives at p, and P', which arrives at p', bring

      to q   (P - rho P') / b      to b   -(<P, p> + <P', p' - rho p>) / b
      to q'  P' / b                to b'  -<P', p> / b

    and b brings what arrives at it to n, b' to n'. With y_t = exp(g_t) z_{t-1} and x_t = exp(g_t) z'_{t-1},

      z'_t = x_t + g'_t y_t + k'_t,   n'_t = <q'_t, z_t> + <q_t, z'_t>

    If m arrives at n and m' at n', Z_t = exp(g_{t+1}) Z_{t+1} + m'_t q_t arrives at z', and at z
    Y_t = exp(g_{t+1}) (Y_{t+1} + g'_{t+1} Z_{t+1}) + m_t q_t + m'_t q'_t. They are the gradients of k' and k, <Z, y> is
    that of g' and <Y + g' Z, y> + <Z, x> that of g.
    """
    q, k, v, g, h, S, first = tensors
    dq, dk, dv, dg, dh, dS, first_along = along
    decays = torch.zeros_like(k) if g is None else g[..., None].expand(k.shape).contiguous()
    factor, dg_each = None if g is None else torch.exp(g)[..., None], per_channel(dg)

    def decayed(z: Tensor, first: Any) -> Tensor:
        """exp(g_t) z_{t-1}"""
        return factor * scan.previous(z, torch.zeros_like(z[:, 0]) if first is None else first)

    sources = (0, 1, 3, 6)
    moves = any(along[i] is not None for i in sources)
    wanted = any(needed[i] or needed_along[i] for i in sources)
    z, _ = _sums_of_keys(scan, k, decays, first)
    b, slope = torch.func.jvp(below, ((q * z).sum(-1, keepdim=True),), (torch.ones_like(q[..., :1]),))
    b = 1 / b
    slope = b * slope
    p, dp, last_along = b * q, None, None
    y = decayed(z, first) if g is not None and (moves or wanted) else None
    if moves:
        writes = plus_product(dk, dg_each, y)
        writes = torch.zeros_like(k) if writes is None else writes
        z_along, last_along = _sums_of_keys(scan, writes, decays, first_along)
        rho = slope * plus_product(q * z_along, dq, z).sum(-1, keepdim=True)
        dp = plus_product(None if dq is None else b * dq, rho, p, -1)
    (o, end), (of_p, *of), (of_dp, *of_along) = gla_twice(
        scan, u, W, (p, k, v, g, h, S), (dp, dk, dv, dg, dh, dS), (wanted, *needed[1:6]),
        (wanted and moves, *needed_along[1:6]), scale)
    if not wanted:
        return (o, end, last_along), (None, *of, None), (None, *of_along, None)
    m = torch.zeros_like(b) if of_p is None else (p * of_p).sum(-1, keepdim=True)
    m_along = Z = of_first_along = None
    back, later = scan.reversed(), decays if g is None else scan.next(decays)
    if moves:
        m = m + (torch.addcmul(dp, rho, p, value=-1) * of_dp).sum(-1, keepdim=True)
        m_along = -slope * (p * of_dp).sum(-1, keepdim=True)
        of_p = plus_product(of_p, rho, of_dp, -1)
        Z, of_first_along = _sums_of_keys(back, m_along * q, later, of_z)
        of_dp = torch.addcmul(b * of_dp, m_along, z)
    m = -slope * m
    arriving = plus_product(m * q, m_along, dq)
    if dg is not None:
        arriving = add(arriving, scan.next(factor * dg_each * Z))
    Y, _ = _sums_of_keys(back, arriving, later, None)
    of_q = add(add(m * z, b, of_p), m_along, z_along if moves else None)
    of_y = plus_product(Y, dg_each, Z)
    of_first, of_g, of_dg = scan.first(of_y), of[2], of_along[2]
    if g is not None:
        of_g = plus(of_g, (of_y * y).sum(-1))
        if moves:
            of_g = of_g + (Z * decayed(z_along, first_along)).sum(-1)
            of_dg = plus(of_dg, (Z * y).sum(-1))
            of_first_along = exp_first(scan, g)[..., None] * of_first_along
        of_first = exp_first(scan, g)[..., None] * of_first
    return ((o, end, last_along), (of_q, plus(of[0], Y), of[1], of_g, *of[3:], of_first),
            (of_dp, plus(of_along[0], Z), of_along[1], of_dg, *of_along[3:], of_first_along))
