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

TWICE, the gradients of <u, o'> + <W, S_T'> with respect to everything, which are those of these three runs.

Every sum over tokens is again one of the recurrences, so that all of this has derivatives too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heed.torch import _selective_derivatives
from heed.torch._compositions import Scan, at_most_0, read_key
from heed.torch._dispatch import is_plain_memory

_ops = torch.ops.heed


def _from_the_end(x: Tensor) -> Tensor:
    """sum_{s >= t} x_s."""
    return x.flip(1).cumsum(1).flip(1)


def _exp_first(scan: Scan, g: Any) -> Any:
    return torch.exp(scan.first(g))


def _plus(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def _plus_product(x: Any, c: Any, y: Any, sign: int = 1) -> Any:
    """x + sign c y, where None is 0."""
    if c is None or y is None:
        return x
    return sign * c * y if x is None else torch.addcmul(x, c, y, value=sign)


def _add(total: Any, x: Any, c: Any = None, sign: int = 1) -> Any:
    """total + x, or total + sign c x, where None is 0, in the memory of `total`, which is a result of a recurrence."""
    if x is None:
        return total
    if total is None:
        return x if c is None else sign * c * x
    if torch.is_grad_enabled() or not is_plain_memory(*(y for y in (total, x, c) if y is not None)):
        return total + x if c is None else torch.addcmul(total, c, x, value=sign)
    return total.add_(x) if c is None else total.addcmul_(c, x, value=sign)


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
        dg = (_from_the_end(dg) + of_end) * scan.is_valid(g)
    if need_h:
        o, _ = scan.gla(q, k, v, g, h, S)
        dh = (_from_the_end(o * do - v * dv) + (0 if end is None else end.sum(-2)[:, None])) * scan.is_valid(h)
    if need_S:
        if g is not None:
            first = _exp_first(scan, g)
            D = first[(..., *[None] * (D.dim() - first.dim()))] * D
        D = D if h is None else D * _exp_first(scan, h)[..., None, :]
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
    dg = (_from_the_end(r * dr + scan.next(a * da) - k * dk - b * db) + end) * scan.is_valid(g)
    D = _exp_first(scan, g)[..., None] * D + scan.first(a)[..., None] * scan.first(e)[..., None, :]
    return dr, dg, dk, dv, da, db, D


def _hgrn(scan: Scan, do: Tensor, dh: Any, x: Tensor, g: Tensor, h: Any):
    states, _ = scan.hgrn(x, g, h)
    D, first = scan.reversed().hgrn(do, scan.next(g), dh)
    return D, (states - x) * D * scan.is_valid(x), _exp_first(scan, g) * first


GRADIENTS = {"linear_attention": _gla, "simple_gla": _gla, "gla": _gla, "rwkv7": _rwkv7, "hgrn": _hgrn}


def _sums_of_decays(scan: Scan, dg: Any) -> Any:
    """The tangents of the logarithms of what a token has decayed since the first, None for zeros."""
    if dg is None:
        return None
    return (dg if scan.lengths is None else dg * scan.is_valid(dg)).cumsum(1)


def _per_channel(c: Any) -> Any:
    """Numbers of channels, or of heads, to be multiplied with channels."""
    return c if c is None or c.dim() == 4 else c[..., None]


def _sum_over_runs(runs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    reads, states = zip(*runs)
    return sum(reads[1:], reads[0]), sum(states[1:], states[0])


def _along_gla(scan: Scan, of: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, g: Any, h: Any, S: Any):
    dq, dk, dv, dg, dh, dS = of
    c, e = (_per_channel(_sums_of_decays(scan, x)) for x in (dg, dh))
    # S' = C + diag(c) S + S diag(e), where C is a recurrence of gla with the writes k' v^T + k v'^T.
    q_along, k_along = _plus_product(dq, c, q), _plus_product(dk, c, k, -1)
    v_along = _plus_product(dv, e, v, -1)
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
    c = torch.zeros_like(g) if dg is None else _sums_of_decays(scan, dg)
    before = scan.previous(c, torch.zeros_like(c[:, 0]))
    # S' = C + diag(c) S, where C has the transitions of S and four writes per token.
    r_along, k_along, b_along = _plus(dr, c * r), _plus(dk, -c * k), _plus(db, -c * b)
    a_along = _plus(da, before * a)

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
        forcing = _plus(dx, dg * (states - x))
    return scan.hgrn(torch.zeros_like(x) if forcing is None else forcing, g, dh)


ALONG = {"linear_attention": _along_gla, "simple_gla": _along_gla, "gla": _along_gla, "rwkv7": _along_rwkv7,
         "hgrn": _along_hgrn}


def _gradients_of_gla(scan: Scan, u: Tensor, W: Any, q: Tensor, k: Tensor, v: Tensor, g: Any, S: Any,
                      needed: Sequence[bool]) -> Sequence[Any]:
    """The gradients of q, k, v, g and S of what arrives at o and at the state, None where they are not needed.

    Where a state has one decay, a sum over tokens is a run of its own, so that none is computed in vain. Decays of
    columns cost too much for that.
    """
    need_q, need_k, need_v, need_g, need_S = needed
    if g is None or g.dim() == 3:
        dq, dk, dv, dg, _, dS = _gla(scan, u, W, q, k, v, g, None, S, (need_q, need_k, need_v, need_g, False, need_S))
        return dq, dk, dv, dg, dS
    need_S = need_S and S is not None
    if not any((need_q, need_k, need_v, need_g, need_S)):
        return (None,) * 5
    wanted = [need_q, need_k, need_v, need_g, False, need_S]
    found = iter(_ops.gla_backward.default(u, W, wanted, q, k, v, g, None, 1.0, S, *scan.rest()))
    return [next(found) if need else None for need in (need_q, need_k, need_v, need_g, need_S)]


def _gla_twice(scan: Scan, u: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any], needed: Sequence[bool],
               needed_along: Sequence[bool], scale: float):
    q, k, v, g, _, S = tensors
    dq, dk, dv, dg, _, dS = along
    need_q, need_k, need_v, need_g, _, need_S = needed
    need_dq, need_dk, need_dv, need_dg, _, need_dS = needed_along
    c = _per_channel(_sums_of_decays(scan, dg))
    c_end = None if c is None else c[:, -1, ..., None]
    q_along, k_along = _plus_product(dq, c, q), _plus_product(dk, c, k, -1)
    if k_along is None and dS is not None:
        k_along = torch.zeros_like(k)
    u = u if scale == 1 else scale * u
    results, gradients, of_along = [None] * 2, [None] * 5, [None] * 5
    last = None

    def add_run(q: Tensor, k: Tensor, v: Tensor, S: Any, at_end: Any, *needed: bool) -> tuple[Sequence[Any], Tensor]:
        """Adds a run to o', and its gradients to those of the tensors that are not tangents."""
        o, end = scan.gla(q, k, v, g, None, S, scale)
        results[0] = _add(results[0], o)
        return _gradients_of_gla(scan, u, at_end, q, k, v, g, S, needed), end

    if q_along is not None:
        found, last = add_run(q_along, k, v, S, None if c is None or W is None else c_end * W,
                              need_q and c is not None or need_dq or need_dg, need_k, need_v, need_g, need_S)
        of_along[0], gradients[1:] = found[0], found[1:]
        results[1] = None if c is None else c_end * last
    if k_along is not None:
        found, end = add_run(q, k_along, v, dS, W, need_q, need_k and c is not None or need_dk or need_dg, need_v,
                             need_g, need_dS)
        of_along[1], of_along[4], results[1] = found[1], found[4], _add(results[1], end)
        for i in (0, 2, 3):
            gradients[i] = _add(gradients[i], found[i])
    if dv is not None:
        found, end = add_run(q, k, dv, None, W, need_q, need_k, need_dv, need_g, False)
        of_along[2], results[1] = found[2], _add(results[1], end)
        for i in (0, 1, 3):
            gradients[i] = _add(gradients[i], found[i])
    if c is not None:
        if need_q:
            gradients[0] = _add(gradients[0], of_along[0], c)
        if need_k:
            gradients[1] = _add(gradients[1], of_along[1], c, -1)
    if need_dg:
        of_dg = q * of_along[0] - k * of_along[1]
        at_end = 0 if W is None else (W * last).sum(-1)[:, None]
        if g.dim() == 3:
            of_dg, at_end = of_dg.sum(-1), 0 if W is None else at_end.sum(-1)
        of_along[3] = (_from_the_end(of_dg) + at_end) * scan.is_valid(g)
    return results, (*gradients[:4], None, gradients[4]), (*of_along[:4], None, of_along[4])


def _delta(scan: Scan, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Any, S: Any, scale: float = 1.0) -> Any:
    """A delta rule by a kernel of its own."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    if g is None:
        return _ops.delta_rule.default(q, k, v, beta, scale, S, *scan.rest())
    operator = _ops.gated_delta_rule if g.dim() == 3 else _ops.kda
    return operator.default(q, k, v, g, beta, scale, S, *scan.rest())


def _gradients_of_delta(scan: Scan, u: Tensor, W: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
                        g: Any) -> Sequence[Any]:
    """The gradients of q, k, v, beta and g, without an initial state."""
    if g is None:
        return *_ops.delta_rule_backward.default(u, W, [True] * 4 + [False], q, k, v, beta, 1.0, None,
                                                 *scan.rest()), None
    operator = _ops.gated_delta_rule_backward if g.dim() == 3 else _ops.kda_backward
    dq, dk, dv, dg, dbeta = operator.default(u, W, [True] * 5 + [False], q, k, v, g, beta, 1.0, None, *scan.rest())
    return dq, dk, dv, dbeta, dg


def _read_before(scan: Scan, query: Tensor, k: Tensor, v: Tensor, g: Any, S: Any) -> Tensor:
    """S_{t-1}^T query_t of gla."""
    o, _ = scan.gla(scan.next(query), k, v, g, None, S)
    return scan.previous(o, torch.zeros_like(v[:, 0]) if S is None else read_key(S, query[:, 0]))


def _gradients_before(scan: Scan, u: Tensor, query: Tensor, k: Tensor, v: Tensor, g: Any, S: Any,
                      needed: Sequence[bool]) -> list[Any]:
    """The gradients of `query`, k, v, g and S of what arrives at `_read_before`."""
    found = list(_gradients_of_gla(scan, scan.next(u), None, scan.next(query), k, v, g, S, needed))
    first = torch.zeros_like(query[:, 0])
    if S is not None:
        arriving = scan.first(u)
        first = torch.einsum("shkv,shv->shk", S, arriving)
        if needed[4]:
            found[4] = _add(found[4], query[:, 0, ..., None] * arriving[..., None, :])
    if needed[0]:
        found[0] = scan.previous(found[0], first)
    return found


def _erased_later(scan: Scan, x: Tensor, k: Tensor, beta: Tensor, g: Any, factor: Any) -> Tensor:
    """M_t^T k_t with M_t = sum_{s > t} exp(g_{t+1} + .. + g_s) k_s h_s^T and h_t = x_t - beta_t M_t^T k_t."""
    query = scan.previous(k, torch.zeros_like(k[:, 0]))
    query = query if factor is None else factor * query
    back = scan.reversed().rest()
    if g is None or g.dim() == 3:
        g = torch.zeros_like(beta) if g is None else scan.next(g)
        o, _ = _ops.comba.default(query, k, x, beta[..., None] * k, g, torch.ones_like(beta), 1.0, None, *back)
    else:
        erase = beta[..., None].expand(k.shape).contiguous()
        o, _ = _ops.gdn2.default(query, k, x, scan.next(g), erase, torch.ones_like(x), 1.0, None, *back)
    return scan.next(o)


def _delta_twice(scan: Scan, u: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any], needed: Sequence[bool],
                 needed_along: Sequence[bool], scale: float):
    q, k, v, beta, g, S = tensors
    dq, dk, dv, dbeta, dg, dS = along
    need_q, need_k, need_v, need_beta, need_g, need_S = needed
    b, db = beta[..., None], _per_channel(dbeta)
    c = _per_channel(_sums_of_decays(scan, dg))
    c_end = None if c is None else c[:, -1, ..., None]
    factor = None if g is None else torch.exp(_per_channel(at_most_0(g)))

    def decayed(x: Any) -> Any:
        return x if factor is None or x is None else factor * x

    # x_t = v_t - S~_t^T k_t, with which S is a recurrence of gla that writes y_t = beta_t x_t.
    a = decayed(k)
    read, last = _delta(scan, scan.next(a), k, v, beta, g, S)
    x = v - scan.previous(read, torch.zeros_like(v[:, 0]) if S is None else read_key(S, a[:, 0]))
    y = b * x
    # S' = P + S'' + diag(c) S: P writes key x^T, S'' is a delta rule.
    q_along = _plus_product(dq, c, q)
    k_write, k_read = _plus_product(dk, c, k, -1), decayed(_plus_product(dk, c, k))
    key = _plus_product(None if k_write is None else b * k_write, db, k)
    if key is None and dS is not None:
        key = torch.zeros_like(k)
    o = final = value = None
    if key is not None:
        o, final = scan.gla(q, key, x, g, None, dS, scale)
        value = _add(value, _read_before(scan, a, key, x, g, dS))
    if k_read is not None:
        value = _add(value, _read_before(scan, k_read, k, y, g, S))
    value = dv if value is None else -value if dv is None else dv - value
    if q_along is not None:
        o = _add(o, scan.gla(q_along, k, y, g, None, S, scale)[0])
    if c is not None:
        final = _add(final, last, c_end)
    if value is not None:
        read, end = _delta(scan, q, k, value, beta, g, None, scale)
        o, final = _add(o, read), _add(final, end)

    u = u if scale == 1 else scale * u
    of_q = of_k = of_v = of_beta = of_g = of_S = of_key = of_x = of_y = of_a = minus = None
    if value is not None:
        of_q, of_k, minus, of_beta, of_g = _gradients_of_delta(scan, u, W, q, k, value, beta, g)
        minus = -minus
    if key is not None:
        of_q_, of_key, of_x, of_g_, _ = _gradients_of_gla(scan, u, W, q, key, x, g, dS,
                                                          (need_q, True, True, need_g, False))
        of_q, of_g = _add(of_q, of_q_), _add(of_g, of_g_)
        of_a, of_key_, of_x_, of_g_, _ = _gradients_before(scan, minus, a, key, x, g, dS,
                                                           (True, True, True, need_g, False))
        of_key, of_x, of_g = _add(of_key, of_key_), _add(of_x, of_x_), _add(of_g, of_g_)
    if q_along is not None:
        of_q_, of_k_, of_y, of_g_, of_S = _gradients_of_gla(
            scan, u, None if c is None or W is None else c_end * W, q_along, k, y, g, S,
            (c is not None and need_q, need_k, True, need_g, need_S))
        of_q = of_q if c is None else _add(of_q, of_q_, c)
        of_k, of_g = _add(of_k, of_k_), _add(of_g, of_g_)
    of_k_read = None
    if k_read is not None:
        of_k_read, of_k_, of_y_, of_g_, of_S_ = _gradients_before(scan, minus, k_read, k, y, g, S,
                                                                  (g is not None, need_k, True, need_g, need_S))
        of_k, of_y, of_g, of_S = _add(of_k, of_k_), _add(of_y, of_y_), _add(of_g, of_g_), _add(of_S, of_S_)
    if key is not None:
        of_k = of_k if db is None else _add(of_k, of_key, db)
        of_k = of_k if c is None else _add(of_k, of_key, c * b, -1)
        if k_write is not None:
            of_beta = _add(of_beta, (k_write * of_key).sum(-1))
    if of_x is not None or of_y is not None:
        arriving = _plus_product(of_x, None if of_y is None else b, of_y)
        later = _erased_later(scan, arriving, k, beta, g, factor)
        of_v = torch.addcmul(arriving, b, later, value=-1)
        of_beta = _add(of_beta, (x * (-later if of_y is None else of_y - later)).sum(-1))
        of_a_, of_k_, _, of_g_, of_S_ = _gradients_before(scan, -of_v, a, k, y, g, S,
                                                          (True, need_k, False, need_g, need_S))
        of_a, of_k, of_g, of_S = _add(of_a_, of_a), _add(of_k, of_k_), _add(of_g, of_g_), _add(of_S, of_S_)
    if of_a is not None:
        of_k = _add(of_k, of_a) if factor is None else _add(of_k, of_a, factor)
    if g is not None and need_g:
        for query, of_query in ((a, of_a), (k_read, of_k_read)):
            if of_query is not None:
                product = query * of_query
                of_g = _add(of_g, product if g.dim() == 4 else product.sum(-1))
    if c is not None and of_k_read is not None:
        of_k = _add(of_k, of_k_read, c * factor)
    return (o, final), (of_q, of_k, of_v, of_beta, of_g, of_S), (None,) * 6


TWICE = {"gla": _gla_twice, "delta": _delta_twice, "selective": _selective_derivatives.twice}


_GLA = ("q", "k", "v", "log_decay", "log_decay_v", "initial_state")
TENSORS = {"linear_attention": _GLA, "simple_gla": _GLA, "gla": _GLA, "hgrn": ("x", "log_decay", "initial_state"),
            "rwkv7": ("r", "log_decay", "k", "v", "a", "b", "initial_state")}
