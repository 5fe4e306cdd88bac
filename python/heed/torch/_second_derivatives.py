# Derivatives of heed's backward passes, and of forward mode.
"""Second derivatives of mechanisms.

A mechanism's backward operator is, for PyTorch, one more function. `of_gradients` gives its derivatives in reverse
mode: it differentiates in reverse what forward mode computes along the mechanism's composition (`_compositions.py`).
`Gradients` gives them in forward mode: the same gradients are written as a composition, by the chain rule, and those of
the three recurrences that compositions consist of by the equations below, in which every sum over tokens is one of
these recurrences again. With D_t, the gradient of S_t, as in the README of each mechanism:

  gla     D_t = q_t do_t^T + diag(exp(g_{t+1})) D_{t+1} diag(exp(h_{t+1}))            from the last token to the first
          dq_t = S_t do_t,  dk_t = D_t v_t,  dv_t = D_t^T k_t
          dg_t = sum_{s >= t} (q_s dq_s - k_s dk_s) + rowsum(S_T D_T), and likewise dh
  rwkv7   D_t = r_t do_t^T + diag(exp(g_{t+1})) D_{t+1} + a_{t+1} (D_{t+1}^T b_{t+1})^T
          with x_t = S_{t-1}^T a_t and e_t = D_t^T b_t, S and D are recurrences of gla with two writes per token:
          S of k v^T and b x^T, D of r do^T and a_{t+1} e_{t+1}^T
  hgrn    D_t = do_t + exp(g_{t+1}) D_{t+1},  dx_t = D_t,  dg_t = (h_t - x_t) D_t

Memory is linear in the number of tokens. In forward mode a call is its composition, and the three
recurrences have equations of their own for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from heed import Unsupported
from heed.torch._compositions import COMPOSITIONS, Scan, Sequences, at_most_0, read_key

_LISTS = ("lengths", "starts", "cu_seqlens")


def _from_the_end(x: Tensor) -> Tensor:
    """sum_{s >= t} x_s."""
    return x.flip(1).cumsum(1).flip(1)


def _exp_first(scan: Scan, g: Any) -> Any:
    return torch.exp(scan.first(g))


def _gla(scan: Scan, back: Scan, do: Tensor, dS: Any, q: Tensor, k: Tensor, v: Tensor, g: Any, h: Any, S: Any):
    columns = torch.zeros_like(v) if h is None and g is not None and g.dim() == 4 else h

    def transposed(key_decays: Any, value_decays: Any) -> tuple[Any, Any]:
        """The decays of S^T, of rows and columns: one per token and head decays either."""
        return (key_decays, None) if columns is None else (value_decays, key_decays)

    g_next, h_next, columns_next = (None if x is None else scan.next(x) for x in (g, h, columns))
    dq, last = scan.gla(do, v, k, *transposed(g, columns), None if S is None else S.mT)
    dk, _ = back.gla(v, do, q, *transposed(g_next, columns_next), None if dS is None else dS.mT)
    dv, D = back.gla(k, q, do, g_next, h_next, dS)
    end = 0 if dS is None else last.mT * dS
    dg = dh = None
    if g is not None:
        dg = q * dq - k * dk
        of_end = 0 if dS is None else end.sum(-1)[:, None]
        if g.dim() == 3:
            dg, of_end = dg.sum(-1), 0 if dS is None else of_end.sum(-1)
        dg = (_from_the_end(dg) + of_end) * scan.is_valid(g)
        first = _exp_first(scan, g)
        D = first[(..., *[None] * (D.dim() - first.dim()))] * D
    if h is not None:
        o, _ = scan.gla(q, k, v, g, h, S)
        dh = (_from_the_end(o * do - v * dv) + (0 if dS is None else end.sum(-2)[:, None])) * scan.is_valid(h)
        D = D * _exp_first(scan, h)[..., None, :]
    return dq, dk, dv, dg, dh, D


def _rwkv7(scan: Scan, back: Scan, do: Tensor, dS: Any, r: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor,
           b: Tensor, S: Any):
    none = torch.zeros_like(v)

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


def _hgrn(scan: Scan, back: Scan, do: Tensor, dh: Any, x: Tensor, g: Tensor, h: Any):
    states, _ = scan.hgrn(x, g, h)
    D, first = back.hgrn(do, scan.next(g), dh)
    return D, (states - x) * D * scan.is_valid(x), _exp_first(scan, g) * first


_RECURRENCES = {"linear_attention": _gla, "simple_gla": _gla, "gla": _gla, "rwkv7": _rwkv7, "hgrn": _hgrn}


def _plus(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def _times(x: Any, y: Any) -> Any:
    return None if x is None or y is None else x * y


def _sums_of_decays(scan: Scan, dg: Any) -> Any:
    """The tangents of the logarithms of what a token has decayed since the first, None for zeros."""
    return None if dg is None else (dg * scan.is_valid(dg)).cumsum(1)


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
    q_along, k_along = _plus(dq, _times(c, q)), _plus(dk, _times(c, -k))
    v_along = _plus(dv, _times(e, -v))
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


_ALONG = {"linear_attention": _along_gla, "simple_gla": _along_gla, "gla": _along_gla, "rwkv7": _along_rwkv7, "hgrn": _along_hgrn}


_GLA = ("q", "k", "v", "log_decay", "log_decay_v", "initial_state")
_TENSORS = {"linear_attention": _GLA, "simple_gla": _GLA, "gla": _GLA, "hgrn": ("x", "log_decay", "initial_state"),
            "rwkv7": ("r", "log_decay", "k", "v", "a", "b", "initial_state")}


def _is_plain(mechanism: Any, call: dict[str, Any]) -> bool:
    """Returns whether a call is one that compositions make, whose gradients have equations here."""
    if mechanism.name not in _RECURRENCES or any(call[x] is not None for x in _LISTS[1:]):
        return False
    if call.get("scale", 1.0) != 1.0 or call.get("normalize") or not call.get("causal", True):
        return False
    if call.get("feature_map", "identity") != "identity":
        return False
    first = call[mechanism.inputs[0]]
    same = mechanism.name == "hgrn" or first.shape[2] == call["v"].shape[2]
    return same and first.shape[1] > 0 and first.dtype in (torch.float32, torch.float64)


def _tensors_of(mechanism: Any, call: dict[str, Any]) -> list[Any]:
    """The tensors of a plain call and its initial state, in the order of the recurrence's equations."""
    tensors = {name: call.get(name) for name in _TENSORS[mechanism.name]}
    for name in ("log_decay", "log_decay_v"):
        if tensors.get(name) is not None:
            tensors[name] = at_most_0(tensors[name])
    return list(tensors.values())


def _composed(mechanism: Any, call: dict[str, Any]) -> tuple[Any, ...]:
    """o and the final states of a call, None for states that it does not have."""
    axes = [_axes(forms, call[name]) for name, forms in zip(mechanism.inputs, mechanism.forms)]
    like = call[mechanism.inputs[mechanism.output]]
    of_output = axes[mechanism.output]
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    batch, tokens = (like.shape[of_output.index(axis)] for axis in "BT")
    sequences = Sequences(batch, tokens, *(call[x] for x in _LISTS), call.get("reverse", False), like.device)
    tensors = {}
    for name, own in zip(mechanism.inputs, axes):
        x = call[name]
        if x is not None:
            x = x.to(wide) if x.is_floating_point() else x
            x = sequences.gather(x.movedim(own.index("T"), 1)) if "T" in own else x
        tensors[name] = x
    states = [call[f"initial_{state.name}"] for state in mechanism.states]
    settings = SimpleNamespace(scan=Scan(sequences.lengths, call["threads"]), columns=sequences.columns,
                               scale=call.get("scale"), **{name: call[name] for name in mechanism.settings})
    compose = COMPOSITIONS[mechanism.name]
    o, *final = compose(SimpleNamespace(**tensors), *(None if x is None else x.to(wide) for x in states), settings)
    o = sequences.scatter(o).to(like.dtype)
    o = o.movedim(1, [axis for axis in of_output if axis != "n"].index("T"))
    existing = {} if mechanism.always else {name: call[name] for name in mechanism.settings}
    return o, *(x if mechanism.always or state.exists(existing) else None for x, state in zip(final, mechanism.states))


def _axes(forms: Sequence[str], x: Any) -> list[str]:
    """The axes of a tensor, by its rank where it may have several forms."""
    return next((form.split(", ") for form in forms if x is None or form.count(",") + 1 == x.dim()), [])


class Gradients:
    """The gradients of one call as a function of the tensors that they depend on.

    `arguments` are those of the backward operator: what arrives at o and at the states, which gradients are needed, and
    the arguments of the mechanism.
    """

    def __init__(self, mechanism: Any, arguments: Sequence[Any]):
        self.mechanism = mechanism
        count = mechanism.num_incoming
        self.needed = list(arguments[count])
        self.arguments = [*arguments[:count + 1], *mechanism.complete(tuple(arguments[count + 1:]))]

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        mechanism, count = self.mechanism, self.mechanism.num_incoming
        incoming, given = arguments[:count], arguments[count + 1:]
        call = dict(zip(mechanism.names, given))
        if _is_plain(mechanism, call) and not call["reverse"]:
            found = self._by_equations(incoming, call)
        else:
            found = self._by_the_chain_rule(incoming, given)
        kept = [x for x, need in zip(found, self.needed) if need]
        like = [given[i] for i, need in zip(mechanism.differentiable, self.needed) if need]
        return tuple(torch.zeros_like(y) if x is None else x.to(y.dtype) for x, y in zip(kept, like))

    def _by_equations(self, incoming: Sequence[Any], call: dict[str, Any]) -> tuple[Any, ...]:
        scan = Scan(call["lengths"], call["threads"])
        back = Scan(scan.lengths, scan.threads, reverse=True)
        names = _TENSORS[self.mechanism.name]
        incoming = incoming[:2]  # what arrives at o and at the state
        found = dict(zip(names, _RECURRENCES[self.mechanism.name](
            scan, back, *incoming, *_tensors_of(self.mechanism, call))))
        return [found.get(self.mechanism.names[i]) for i in self.mechanism.differentiable]

    def _by_the_chain_rule(self, incoming: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        mechanism = self.mechanism
        wanted = [i for i, need in zip(mechanism.differentiable, self.needed) if need]

        def results(*tensors: Tensor) -> tuple[Any, ...]:
            arguments = list(given)
            for i, x in zip(wanted, tensors):
                arguments[i] = x
            o, *states = _composed(mechanism, dict(zip(mechanism.names, arguments)))
            return o, *(x for x, state in zip(states, mechanism.states) if state.has_gradient)

        found = dict(zip(wanted, vjp(results, [given[i] for i in wanted], incoming)))
        return [found.get(i) for i in mechanism.differentiable]


def vjp(function: Callable[..., Sequence[Any]], tensors: Sequence[Tensor], incoming: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of a function's tensors, given those of its results, None for zeros."""

    def product(*tensors: Tensor) -> Tensor:
        terms = [(x * dx.to(x.dtype)).sum() for x, dx in zip(function(*tensors), incoming)
                 if x is not None and dx is not None]
        return sum(terms[1:], terms[0])

    # Not torch.func.vjp, which calls heed's operators after it has closed its level.
    return torch.func.grad(product, argnums=tuple(range(len(tensors))))(*tensors)


def _of_variables(function: Callable[..., Any], arguments: Sequence[Any], variables: Sequence[int]) -> Any:
    """`function` as one of the arguments at these places alone."""

    def inner(*tensors: Tensor) -> Any:
        complete = list(arguments)
        for i, x in zip(variables, tensors):
            complete[i] = x
        return function(*complete)

    return inner


def of_gradients(mechanism: Any, needed: Sequence[bool], of_results: Sequence[Any], arguments: Sequence[Any]) -> dict:
    """The gradients of a backward operator: of what arrived and of the tensors of the mechanism, by argument.

    The product of the gradients J^T u with directions x' is <u, J x'>: what is differentiated in reverse is forward
    mode, whose sums over tokens have kernels for their gradients.
    """
    count = mechanism.num_incoming
    arguments = [*arguments[:count + 1], *mechanism.complete(tuple(arguments[count + 1:]))]
    places = [count + 1 + i for i, need in zip(mechanism.differentiable, arguments[count]) if need]
    directions = {i: x for i, x in zip(places, of_results) if x is not None}
    variables = [i for i, need in enumerate(needed) if need]

    def product(*given: Any) -> Tensor:
        def results(*tensors: Tensor) -> tuple[Any, ...]:
            call = list(given[count + 1:])
            for i, x in zip(directions, tensors):
                call[i - count - 1] = x
            o, *states = _composed(mechanism, dict(zip(mechanism.names, call)))
            states = [x for x, state in zip(states, mechanism.states) if state.has_gradient]
            # Nothing arrives at a state that the call does not have.
            return tuple(x for x, u in zip((o, *states), given[:count]) if u is not None)

        primals = tuple(given[i] for i in directions)
        along = torch.func.jvp(results, primals, tuple(directions.values()))[1]
        incoming = [u for u in given[:count] if u is not None]
        terms = [(x * u.to(x.dtype)).sum() for x, u in zip(along, incoming, strict=True)]
        return sum(terms[1:], terms[0])

    function = _of_variables(product, arguments, variables)
    found = torch.func.grad(function, argnums=tuple(range(len(variables))))(*(arguments[i] for i in variables))
    return dict(zip(variables, found))


def tangents(mechanism: Any, of_arguments: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """The derivative in forward mode of a call that a composition makes."""
    call = dict(zip(mechanism.names, mechanism.complete(tuple(arguments))))
    if not _is_plain(mechanism, call):
        raise Unsupported(f"{mechanism.name}: a forward derivative of torch.ops.heed.{mechanism.name} was asked for, "
                          f"which heed.torch.{mechanism.name} has")
    of = dict(zip(mechanism.names, of_arguments))
    along, tensors = [of.get(name) for name in _TENSORS[mechanism.name]], _tensors_of(mechanism, call)
    first = tensors[0]
    sequences = Sequences(*first.shape[:2], *(call[x] for x in _LISTS), call["reverse"], first.device)

    def in_order(tensors: Sequence[Any]) -> list[Any]:
        *inputs, state = tensors
        return [*(None if x is None else sequences.gather(x) for x in inputs), state]

    scan = Scan(sequences.lengths, call["threads"])
    o, state = _ALONG[mechanism.name](scan, in_order(along), *in_order(tensors))
    return sequences.scatter(o), state, *(state.new_empty(0) for _ in mechanism.states[1:])  # absent in a plain call


def results(mechanism: Any, arguments: Sequence[Any]) -> Any:
    """A call as its composition, through which tangents of forward mode flow."""
    call = dict(zip(mechanism.names, mechanism.complete(tuple(arguments))))
    o, *states = _composed(mechanism, call)
    states = [torch.empty(0) if x is None else x for x in states]
    return (o, *states) if mechanism.states else o
