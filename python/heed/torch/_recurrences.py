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

TWICE, the gradients of <u, o'> + <W, S_T'> with respect to everything. For gla they are those of these three runs. For

  delta   S~_t = diag(exp(g_t)) S_{t-1},  x_t = v_t - S~_t^T k_t,  y_t = beta_t x_t,  S_t = S~_t + k_t y_t^T

S is a recurrence of gla with the writes k y^T once y is known. With p = k' - c k, which writes, and r = k' + c k, which
reads,

  S' = P + S'' + diag(c) S,  P of the writes (beta p + beta' k) x^T,
  S'' a delta rule of the values v'_t - P~_t^T k_t - S~_t^T r_t,  o' = P^T q + S''^T q + S^T (q' + c q)

and what arrives at x, directly and through y, is brought to v by a delta rule in reverse (`_erased_later`).

Every sum over tokens is again one of the recurrences, so that all of this has derivatives too, except for selective
scans (`_selective_derivatives.py`).
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


class _Sums(dict):
    """Sums by name, None where nothing has been added."""

    def __missing__(self, name: str) -> None:
        return None

    def add(self, names: str, terms: Sequence[Any], c: Any = None, sign: int = 1) -> None:
        """Adds sign c x of each term x, which is a result that nobody else has, to the sum of its name."""
        for name, x in zip(names.split(), terms):
            self[name] = _add(self[name], x, c, sign)


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

    Without decays per channel, a sum over tokens is a run of its own, so that none is computed in vain; decays of
    columns cost too much for that. The gradient of decays is the kernels', which have it without cancellation.
    """
    need_q, need_k, need_v, need_g, need_S = needed
    need_g, need_S = need_g and g is not None, need_S and S is not None
    wanted = [need_q, need_k, need_v, need_g, need_S]
    if not any(wanted):
        return (None,) * 5
    if g is None or g.dim() == 3 and not need_g:
        dq, dk, dv, dg, _, dS = _gla(scan, u, W, q, k, v, g, None, S, (*wanted[:4], False, need_S))
        return dq, dk, dv, dg, dS
    if g.dim() == 3:
        found = _ops.simple_gla_backward.default(u, W, wanted, q, k, v, g, 1.0, S, *scan.rest())
    else:
        found = _ops.gla_backward.default(u, W, [*wanted[:4], False, need_S], q, k, v, g, None, 1.0, S, *scan.rest())
    found = iter(found)
    return [next(found) if want else None for want in wanted]


def _gla_twice(scan: Scan, u: Tensor, W: Any, tensors: Sequence[Any], along: Sequence[Any], needed: Sequence[bool],
               needed_along: Sequence[bool], scale: float):
    q, k, v, g, _, S = tensors
    dq, dk, dv, dg, _, dS = along
    need_q, need_k, need_v, need_g, _, need_S = needed
    need_dq, need_dk, need_dv, need_dg, _, need_dS = needed_along
    c = _per_channel(_sums_of_decays(scan, dg))
    c_end = None if c is None else c[:, -1, ..., None]
    u = u if scale == 1 else scale * u
    total, last = _Sums(), None

    def run(names: str, q: Tensor, k: Tensor, v: Tensor, S: Any, at_end: Any, *needed: bool) -> Tensor:
        """Adds a run to o', and its gradients to these; returns its final state."""
        o, end = scan.gla(q, k, v, g, None, S, scale)
        total.add("o", [o])
        total.add(names, _gradients_of_gla(scan, u, at_end, q, k, v, g, S, needed))
        return end

    if dq is not None or c is not None:
        last = run("dq k v g S", _plus_product(dq, c, q), k, v, S, None if c is None or W is None else c_end * W,
                   need_q and c is not None or need_dq or need_dg, need_k, need_v, need_g, need_S)
        if c is not None:
            total.add("end", [last], c_end)
    if dk is not None or c is not None or dS is not None:
        k_along = _plus_product(dk, c, k, -1)
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
        total["dg"] = (_from_the_end(of_dg) + at_end) * scan.is_valid(g)
    return ((total["o"], total["end"]), [total[x] for x in ("q", "k", "v", "g", "", "S")],
            [total[x] for x in ("dq", "dk", "dv", "dg", "", "dS")])


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
    """Tangents are taken for constants: those of a composition that ends in a delta rule are linear in its tensors."""
    q, k, v, beta, g, S = tensors
    dq, dk, dv, dbeta, dg, dS = along
    need_q, need_k, need_v, need_beta, need_g, need_S = needed
    b, db = beta[..., None], _per_channel(dbeta)
    c = _per_channel(_sums_of_decays(scan, dg))
    c_end = None if c is None else c[:, -1, ..., None]
    factor = None if g is None else torch.exp(_per_channel(at_most_0(g)))
    total = _Sums()

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
        total.add(names, _gradients_of_gla(scan, u, at_end, query, key, value, g, state, needed))

    # x and y: S is a recurrence of gla that writes y.
    a = decayed(k)
    a_next = scan.next(a)
    later, last = _delta(scan, a_next, k, v, beta, g, S)
    x = v - before(later, first(S, a))
    y = b * x
    # P, what is read of S by tangents, and S''.
    q_along = _plus_product(dq, c, q)
    k_write, k_read = _plus_product(dk, c, k, -1), decayed(_plus_product(dk, c, k))
    key = _plus_product(None if k_write is None else b * k_write, db, k)
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
        value = before(total["later"], _plus(first(dS, a), first(S, k_read)))
        value = -value if dv is None else dv - value
    if value is not None:
        total.add("o end", _delta(scan, q, k, value, beta, g, None, scale))

    u = u if scale == 1 else scale * u
    minus = arriving = None
    if value is not None:
        total.add("q k value beta g", _gradients_of_delta(scan, u, W, q, k, value, beta, g))
        if total["later"] is not None:
            minus = -total["value"]
            minus_next = scan.next(minus)
    if key is not None:
        gla("q key x g", u, W, q, key, x, dS, need_q, True, True, need_g, False)
        gla("a_later key x g", minus_next, None, a_next, key, x, dS, True, True, True, need_g, False)
        if db is not None:
            total.add("k", [total["key"]], db)
        if c is not None:
            total.add("k", [total["key"]], c * b, -1)
        if k_write is not None:
            total.add("beta", [(k_write * total["key"]).sum(-1)])
    if q_along is not None:
        gla("q_along k y g S", u, None if c is None or W is None else c_end * W, q_along, k, y, S,
            c is not None and need_q, need_k, True, need_g, need_S)
        if c is not None:
            total.add("q", [total["q_along"]], c)
    if k_read is not None:
        gla("read_later k y g S", minus_next, None, read_next, k, y, S, g is not None, need_k, True, need_g, need_S)
    if total["x"] is not None or total["y"] is not None:
        arriving = _plus_product(total["x"], None if total["y"] is None else b, total["y"])
        erased = _erased_later(scan, arriving, k, beta, g, factor)
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
                of_first = _plus(of_first, torch.einsum("shkv,shv->shk", state, of))
                if state is S and need_S:
                    total.add("S", [query[:, 0, ..., None] * of[..., None, :]])
        if total[name] is None:
            continue
        of_query = before(total[name], of_first)
        if g is not None:
            of_g = query * of_query
            total.add("g", [of_g if g.dim() == 4 else of_g.sum(-1)])
        if name == "a_later" or by is not None:
            total.add("k", [of_query], by)
    return ((total["o"], total["end"]), [total[x] for x in ("q", "k", "v", "beta", "g", "S")], (None,) * 6)


# By the method of Scan: a function of the recurrence's tensors, their tangents, and which gradients are needed, that
# returns o' and S_T', the gradients of the tensors and those of the tangents, None for zeros and what is not needed.
TWICE = {"gla": _gla_twice, "delta": _delta_twice, "selective": _selective_derivatives.twice}


_GLA = ("q", "k", "v", "log_decay", "log_decay_v", "initial_state")
# By operator, the arguments that its equations take, in order.
TENSORS = {"linear_attention": _GLA, "simple_gla": _GLA, "gla": _GLA, "hgrn": ("x", "log_decay", "initial_state"),
           "rwkv7": ("r", "log_decay", "k", "v", "a", "b", "initial_state")}
