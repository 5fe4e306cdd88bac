# Second derivatives of delta rules.
"""The gradients of <u, o'> + <W, S_T'> for a delta rule, in the notation of `_recurrences.py`:

  S~_t = diag(exp(g_t)) S_{t-1},  x_t = v_t - S~_t^T p_t,  y_t = beta_t x_t,  S_t = S~_t + k_t y_t^T

S is a recurrence of gla with the writes k y^T once y is known. With w = k' - c k, which writes, and r = p' + c p, which
reads,

  S' = P + S'' + diag(c) S,  P of the writes (beta w + beta' k) x^T,
  S'' a delta rule of the values v'_t - P~_t^T p_t - S~_t^T r_t,  o' = P^T q + S''^T q + S^T (q' + c q)

and what arrives at x, directly and through y, is brought to v by a delta rule in reverse (`_erased_later`), whose keys
have changed places. p is k except in comba and gdn2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heed.torch._scans import Scan, at_most_0, read_key
from heed.torch._gla_derivatives import gradients_of_gla
from heed.torch._recurrences import Sums, per_channel, plus, plus_product, sums_of_decays

_ops = torch.ops.heed


def _delta(scan: Scan, q: Tensor, k: Tensor, p: Any, v: Tensor, beta: Any, g: Any, S: Any, scale: float = 1.0) -> Any:
    """A delta rule by a kernel of its own."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    if p is None and g is None:
        return _ops.delta_rule.default(q, k, v, beta, scale, S, *scan.rest())
    if g is None or g.dim() == 3:
        if p is None:
            return _ops.gated_delta_rule.default(q, k, v, g, beta, scale, S, *scan.rest())
        g = torch.zeros_like(beta) if g is None else g
        return _ops.comba.default(q, k, v, p.contiguous(), g, beta, scale, S, *scan.rest())
    if p is None:
        return _ops.kda.default(q, k, v, g, beta, scale, S, *scan.rest())
    return _ops.rwkv7.default(q, g, k, v, *_erasing(p, k, g), scale, S, *scan.rest())


def _erasing(p: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of a rwkv7 that is a delta rule."""
    return torch.exp(at_most_0(g)) * p, -k


def _gradients_of_delta(scan: Scan, u: Tensor, W: Any, q: Tensor, k: Tensor, p: Any, v: Tensor, beta: Any,
                        g: Any) -> Sequence[Any]:
    """The gradients of q, k, p, v, beta and g, without an initial state."""
    if p is None and g is None:
        dq, dk, dv, dbeta = _ops.delta_rule_backward.default(u, W, [True] * 4 + [False], q, k, v, beta, 1.0, None,
                                                             *scan.rest())
        return dq, dk, None, dv, dbeta, None
    if p is None:
        operator = _ops.gated_delta_rule_backward if g.dim() == 3 else _ops.kda_backward
        dq, dk, dv, dg, dbeta = operator.default(u, W, [True] * 5 + [False], q, k, v, g, beta, 1.0, None, *scan.rest())
        return dq, dk, None, dv, dbeta, dg
    if g.dim() == 3:
        dq, dk, dv, dp, dg, dbeta = _ops.comba_backward.default(u, W, [True] * 6 + [False], q, k, v, p, g, beta, 1.0,
                                                                None, *scan.rest())
        return dq, dk, dp, dv, dbeta, dg
    a, b = _erasing(p, k, g)
    dq, dg, dk, dv, da, db = _ops.rwkv7_backward.default(u, W, [True] * 6 + [False], q, g, k, v, a, b, 1.0, None,
                                                         *scan.rest())
    return dq, dk - db, torch.exp(at_most_0(g)) * da, dv, None, torch.addcmul(dg, a, da)


def _erased_later(scan: Scan, x: Tensor, k: Tensor, p: Any, beta: Any, g: Any, factor: Any) -> Tensor:
    """M_t^T k_t with M_t = sum_{s > t} exp(g_{t+1} + .. + g_s) p_s h_s^T and h_t = x_t - beta_t M_t^T k_t."""
    query = scan.previous(k, torch.zeros_like(k[:, 0]))
    query = query if factor is None else factor * query
    back = scan.reversed().rest()
    one = torch.ones_like(x[..., 0])
    if g is None or g.dim() == 3:
        g = torch.zeros_like(one) if g is None else scan.next(g)
        erasing = k if beta is None else beta[..., None] * k
        o, _ = _ops.comba.default(query, k if p is None else p, x, erasing, g, one, 1.0, None, *back)
    elif p is None:
        erase = beta[..., None].expand(k.shape).contiguous()
        o, _ = _ops.gdn2.default(query, k, x, scan.next(g), erase, torch.ones_like(x), 1.0, None, *back)
    else:
        g = scan.next(g)
        o, _ = _ops.rwkv7.default(query, g, p, x, *_erasing(k, p, g), 1.0, None, *back)
    return scan.next(o)


def twice(scan: Scan, u: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any], needed: Sequence[bool],
          needed_along: Sequence[bool], scale: float):
    """Tangents of all but p and v are taken for constants: compositions are linear in the others."""
    q, k, p, v, beta, g, S = tensors
    dq, dk, dp, dv, dbeta, dg, dS = along
    need_q, need_k, need_p, need_v, need_beta, need_g, need_S = needed
    b, db = per_channel(beta), per_channel(dbeta)
    reading, of_reading, d_reading = (k, "k", dk) if p is None else (p, "p", dp)
    c = per_channel(sums_of_decays(scan, dg))
    c_end = None if c is None else c[:, -1, ..., None]
    factor = None if g is None else torch.exp(per_channel(at_most_0(g)))
    total = Sums()

    def decayed(x: Any) -> Any:
        return x if factor is None or x is None else factor * x

    def first(state: Any, key: Any) -> Any:
        """Returns what the first token's key reads."""
        return None if state is None or key is None else read_key(state, key[:, 0])

    def before(later: Tensor, first: Any) -> Tensor:
        return scan.previous(later, torch.zeros_like(later[:, 0]) if first is None else first)

    def gla(names: str, u: Tensor, at_end: Any, query: Tensor, key: Tensor, value: Tensor, state: Any,
            *needed: bool) -> None:
        """Adds gradients of a recurrence of gla."""
        total.add(names, gradients_of_gla(scan, u, at_end, query, key, value, g, state, needed))

    # x and y: S is a recurrence of gla that writes y.
    a = decayed(reading)
    a_next = scan.next(a)
    later, last = _delta(scan, a_next, k, p, v, beta, g, S)
    x = v - before(later, first(S, a))
    y = x if b is None else b * x
    # P, what is read of S by tangents, and S''.
    q_along = plus_product(dq, c, q)
    k_write, k_read = plus_product(dk, c, k, -1), decayed(plus_product(d_reading, c, reading))
    key = plus_product(k_write if k_write is None or b is None else b * k_write, db, k)
    if key is None and dS is not None:
        key = torch.zeros_like(k)
    if key is not None:
        total.add("o end", scan.gla(q, key, x, g, None, dS, scale))
        total.add("later", scan.gla(a_next, key, x, g, None, dS))
    if k_read is not None:
        read_next = scan.next(k_read)
        total.add("later", scan.gla(read_next, k, y, g, None, S))
    if q_along is not None:
        total.add("o", scan.gla(q_along, k, y, g, None, S, scale))
    if c is not None:
        total.add("end", [last], c_end)
    value = dv
    if total["later"] is not None:
        value = before(total["later"], plus(first(dS, a), first(S, k_read)))
        value = -value if dv is None else dv - value
    if value is not None:
        total.add("o end", _delta(scan, q, k, p, value, beta, g, None, scale))

    u = u if scale == 1 else scale * u
    minus = arriving = None
    if value is not None:
        total.add("q k p value beta g", _gradients_of_delta(scan, u, W, q, k, p, value, beta, g))
        if total["later"] is not None:
            minus = -total["value"]
            minus_next = scan.next(minus)
    if key is not None:
        gla("q key x g", u, W, q, key, x, dS, need_q, True, True, need_g, False)
        gla("a_later key x g", minus_next, None, a_next, key, x, dS, True, True, True, need_g, False)
        if db is not None:
            total.add("k", [total["key"]], db)
        if c is not None:
            total.add("k", [total["key"]], c if b is None else c * b, -1)
        if k_write is not None and b is not None:
            total.add("beta", [(k_write * total["key"]).sum(-1)])
    if q_along is not None:
        gla("q_along k y g S", u, None if c is None or W is None else c_end * W, q_along, k, y, S,
            c is not None and need_q, need_k, True, need_g, need_S)
        if c is not None:
            total.add("q", [total["q_along"]], c)
    if k_read is not None:
        gla("read_later k y g S", minus_next, None, read_next, k, y, S, g is not None, need_k, True, need_g, need_S)
    if total["x"] is not None or total["y"] is not None:
        arriving = plus(total["x"], total["y"]) if b is None else plus_product(total["x"], b, total["y"])
        erased = _erased_later(scan, arriving, k, p, beta, g, factor)
        if b is None:
            total["v"] = arriving - erased
        else:
            total["v"] = torch.addcmul(arriving, b, erased, value=-1)
            total.add("beta", [(x * (-erased if total["y"] is None else total["y"] - erased)).sum(-1)])
        arriving = -total["v"]
        gla("a_later k - g S", scan.next(arriving), None, a_next, k, y, S, True, need_k, False, need_g, need_S)
    # From keys that read to k, g and S; the first token's read initial states.
    reads = [("a_later", a, factor, [(dS, minus), (S, arriving)])]
    if k_read is not None:
        reads.append(("read_later", k_read, None if c is None else c * factor, [(S, minus)]))
    for name, query, by, of_states in reads:
        of_first = None
        for state, of in of_states:
            if state is not None and of is not None:
                of = scan.first(of)
                of_first = plus(of_first, torch.einsum("shkv,shv->shk", state, of))
                if state is S and need_S:
                    total.add("S", [query[:, 0, ..., None] * of[..., None, :]])
        if total[name] is None:
            continue
        of_query = before(total[name], of_first)
        if g is not None:
            of_g = query * of_query
            total.add("g", [of_g if g.dim() == 4 else of_g.sum(-1)])
        if name == "a_later" or by is not None:
            total.add(of_reading, [of_query], by)
        if name == "read_later" and needed_along[2]:
            total["dp"] = decayed(of_query)
    return ((total["o"], total["end"]), [total[x] for x in ("q", "k", "p", "v", "beta", "g", "S")],
            (None, None, total["dp"], total["value"], None, None, None))
