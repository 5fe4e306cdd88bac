# Derivatives of heed's backward passes, and of forward mode.
"""Second derivatives of mechanisms.

A mechanism's backward operator is, for PyTorch, one more function. `of_gradients` gives its derivatives in reverse
mode. Where a mechanism's composition (`_compositions.py`) ends in a recurrence that has equations for this (`TWICE`),
they are used; otherwise it differentiates in reverse what forward mode computes along the composition. `Gradients`
gives them in forward mode: the same gradients are written as a composition, by the chain rule, and those of the
recurrences that compositions consist of by their equations.

Memory is linear in the number of tokens. In forward mode a call is its composition, and the recurrences have equations
of their own for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heed import Unsupported
from heed.torch import _delta_derivatives, _gla_derivatives, _selective_derivatives
from heed.torch._compositions import COMPOSITIONS
from heed.torch._dispatch import in_forward_mode, is_plain_memory
from heed.torch._recurrences import ALONG, GRADIENTS, TENSORS
from heed.torch._scans import Recurrence, Scan, Sequences, at_last, at_most_0

# By the method of Scan: a function of what arrives at o' and at S_T', of the recurrence's tensors, their tangents, and
# which gradients are needed, that returns o' and S_T', the gradients of the tensors and those of the tangents, None for
# zeros and what is not needed.
TWICE = {"gla": _gla_derivatives.gla_twice, "before": _gla_derivatives.before_twice,
         "normalised": _gla_derivatives.normalised_twice, "delta": _delta_derivatives.twice,
         "selective": _selective_derivatives.twice}
_LISTS = ("lengths", "starts", "cu_seqlens")


def _is_plain(mechanism: Any, call: dict[str, Any]) -> bool:
    """Returns whether a call is one that compositions make, whose gradients have equations here."""
    if mechanism.name not in GRADIENTS or any(call[x] is not None for x in _LISTS[1:]):
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
    tensors = {name: call.get(name) for name in TENSORS[mechanism.name]}
    for name in ("log_decay", "log_decay_v"):
        if tensors.get(name) is not None:
            tensors[name] = at_most_0(tensors[name])
    return list(tensors.values())


class _Layout:
    """The place where a call's tensors have its tokens, and the dtype of its composition."""

    def __init__(self, mechanism: Any, call: dict[str, Any]):
        self.mechanism = mechanism
        self.axes = [_axes(forms, call[name]) for name, forms in zip(mechanism.inputs, mechanism.forms)]
        like, of_output = call[mechanism.inputs[mechanism.output]], self.axes[mechanism.output]
        self.dtype = like.dtype
        self.wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        batch, tokens = (like.shape[of_output.index(axis)] for axis in "BT")
        self.sequences = Sequences(batch, tokens, *(call[x] for x in _LISTS), call.get("reverse", False), like.device)
        self.scan = Scan(self.sequences.lengths, call["threads"])
        self.tokens = [axis for axis in of_output if axis != "n"].index("T")

    def compose(self, call: dict[str, Any]) -> Any:
        """Returns o and the states, as the composition does."""
        mechanism, tensors = self.mechanism, {}
        for name, own in zip(mechanism.inputs, self.axes):
            x = call[name]
            if x is not None:
                x = x.to(self.wide) if x.is_floating_point() else x
                x = self.sequences.gather(_moved(x, own.index("T"), 1)) if "T" in own else x
            tensors[name] = x
        states = [call[f"initial_{state.name}"] for state in mechanism.states]
        settings = SimpleNamespace(scan=self.scan, columns=self.sequences.columns, scale=call.get("scale"),
                                   **{name: call[name] for name in mechanism.settings})
        states = (None if x is None else x.to(self.wide) for x in states)
        return COMPOSITIONS[mechanism.name](SimpleNamespace(**tensors), *states, settings)

    def to_output(self, o: Tensor) -> Tensor:
        """o of a composition as the mechanism has it."""
        return _moved(self.sequences.scatter(o).to(self.dtype), 1, self.tokens)

    def from_output(self, o: Tensor) -> Tensor:
        return self.sequences.gather(_moved(o.to(self.wide), self.tokens, 1))


def _moved(x: Tensor, axis: int, to: int) -> Tensor:
    """The tensor itself where the axis is in its place."""
    return x if axis == to else x.movedim(axis, to)


def _composed(mechanism: Any, call: dict[str, Any]) -> tuple[Any, ...]:
    """o and the final states of a call, None for states that it does not have."""
    layout = _Layout(mechanism, call)
    results = layout.compose(call)
    o, *final = results.results(layout.scan) if isinstance(results, Recurrence) else results
    final += [None] * (len(mechanism.states) - len(final))
    existing = {} if mechanism.always else {name: call[name] for name in mechanism.settings}
    return layout.to_output(o), *(x if mechanism.always or state.exists(existing) else None
                                  for x, state in zip(final, mechanism.states))


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
        names = TENSORS[self.mechanism.name]
        incoming = incoming[:2]  # what arrives at o and at the state
        found = dict(zip(names, GRADIENTS[self.mechanism.name](
            scan, *incoming, *_tensors_of(self.mechanism, call))))
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
    if _ends_in_a_recurrence(mechanism, dict(zip(mechanism.names, arguments[count + 1:]))):
        return _of_a_recurrence(mechanism, directions, variables, arguments)

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


def _ends_in_a_recurrence(mechanism: Any, call: dict[str, Any]) -> bool:
    """Returns whether a call's composition ends in a recurrence of `TWICE`, and is differentiated in reverse alone."""
    if mechanism.name == "selective_scan":
        tensors = [x for x in call.values() if isinstance(x, Tensor)]
        return (call["B"].dim() == call["C"].dim() == 3
                and not torch.is_grad_enabled() and is_plain_memory(*tensors) and not in_forward_mode())
    return (mechanism.name in _ENDS_IN_A_RECURRENCE and call.get("causal", True)
            and call.get("log_decay_v") is None and not in_forward_mode())


_ENDS_IN_A_RECURRENCE = (
    "linear_attention", "based", "performer", "retention", "lightning", "simple_gla", "gla", "hgrn2", "mlstm", "rwkv5",
    "rwkv6", "ssd", "delta_rule", "gated_delta_rule", "kda", "gdn2", "comba",
    "delta_product")


def _of_a_recurrence(mechanism: Any, directions: dict[int, Tensor], variables: Sequence[int],
                     arguments: Sequence[Any]) -> dict[int, Any]:
    """`of_gradients` of a call whose composition ends in a recurrence, by the recurrence's equations.

    With o = factor R + added, o' = factor R' + factor' R + added', where R' takes factor u and R takes factor' u.
    """
    count = mechanism.num_incoming
    call = dict(zip(mechanism.names, arguments[count + 1:]))
    layout, inputs = _Layout(mechanism, call), [i for i in variables if i > count]
    prepared = _Prepared(layout, directions, inputs, arguments, count + 1)
    value, along, needed, needed_along = prepared.recurrence, prepared.along, prepared.needed, prepared.needed_along
    u, kind, more = layout.from_output(arguments[0]), value.kind, {}
    W, of_z = value.of_mechanism(arguments[1]), None if count < 3 else arguments[2]
    if along.factor is not None:
        more["of_R"] = along.factor * u
    if value.below is not None:
        kind, of_z = "normalised", of_z if of_z is None else value.of_mechanism(of_z[..., None])[..., 0]
        more |= {"of_z": of_z, "below": value.below}
    (o, state, *others), of_tensors, of_along = TWICE[kind](
        layout.scan.of_steps(value.steps), at_last(u if value.factor is None else value.factor * u, value.steps), W,
        value.tensors, along.tensors, needed.tensors, needed_along.tensors, value.scale, **more)
    o = o if o is None else o[:, value.steps - 1::value.steps]
    o = torch.zeros_like(u) if o is None else o  # where no tensor of the recurrence moves
    of_factor = o * u if needed.factor else None
    o = o if value.factor is None else value.factor * o
    of_factor_along = None
    if along.factor is not None:
        (R,) = others
        o, of_factor_along = torch.addcmul(o, along.factor, R), R * u if needed_along.factor else None
    o = o if along.added is None else o + along.added
    results = [layout.to_output(o), value.of_mechanism(state)]
    if value.below is not None and others[0] is not None:
        results.append(value.of_mechanism(others[0][..., None])[..., 0])
    return {i: x for i, x in enumerate(results) if i in variables} | prepared.gradients(
        [*of_tensors, of_factor, None], [*of_along, of_factor_along, u])


class _Prepared:
    """The parts of a recurrence and their tangents as functions of the inputs of a call."""

    def __init__(self, layout: _Layout, directions: dict[int, Tensor], inputs: Sequence[int], arguments: Sequence[Any],
                 first: int):
        self.inputs, self.pull, names = inputs, None, layout.mechanism.names
        recurrence = layout.compose(dict(zip(names, arguments[first:])))
        parts = recurrence.parts
        self.places = [i for i, x in enumerate(parts) if x is not None]
        numbers = {id(x): i for i, x in enumerate(arguments) if i >= first and isinstance(x, Tensor)}
        self.origins = [numbers.get(id(x)) for x in parts]
        passed_on = {self.origins[i] for i in self.places} - {None}
        if len(passed_on) == len(self.places):
            # A composition that passes the call's tensors on has no derivative.
            self.recurrence, self.along = recurrence, recurrence.of_parts([directions.get(i) for i in self.origins])
            self.needed = recurrence.of_parts([i in inputs for i in self.origins])
            self.needed_along = recurrence.of_parts([False] * len(parts))
            return
        moves: list[bool] = []

        def function(*given: Tensor) -> tuple[Tensor, ...]:
            complete = list(arguments)
            for i, x in zip(inputs, given):
                complete[i] = x

            def parts(*given: Tensor) -> tuple[Tensor, ...]:
                moved = list(complete)
                for i, x in zip(directions, given):
                    moved[i] = x
                found = layout.compose(dict(zip(names, moved[first:]))).parts
                found = tuple(found[i] for i in self.places)
                moves[:] = [forward_ad.unpack_dual(x).tangent is not None for x in found]
                return found

            primals = tuple(complete[i] for i in directions)
            found = torch.func.jvp(parts, primals, tuple(directions.values()))
            needed = [x.requires_grad for part in found for x in part]
            self.needed, self.needed_along = spread(needed[:len(moves)]), spread(needed[len(moves):])
            return (*found[0], *found[1])

        def spread(x: Sequence[Any]) -> Recurrence:
            by_place = dict(zip(self.places, x))
            return recurrence.of_parts([by_place.get(i) for i in range(len(parts))])

        if inputs:
            self.results, self.pull = torch.func.vjp(function, *(arguments[i] for i in inputs))
        else:
            self.results = function()
        self.recurrence = spread(self.results[:len(moves)])
        self.along = spread([x if moving else None for x, moving in zip(self.results[len(moves):], moves)])

    def gradients(self, of_parts: Sequence[Any], of_along: Sequence[Any]) -> dict[int, Any]:
        """The gradients of the inputs, by number."""
        if not self.inputs:
            return {}
        if self.pull is None:
            found = dict(zip(self.origins, of_parts))
            return {i: found.get(i) for i in self.inputs}
        found = [x[i] for x in (of_parts, of_along) for i in self.places]
        found = [x.new_zeros(()).expand(x.shape) if dx is None else dx for x, dx in zip(self.results, found)]
        return dict(zip(self.inputs, self.pull(tuple(found))))


def tangents(mechanism: Any, of_arguments: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """The derivative in forward mode of a call that a composition makes."""
    call = dict(zip(mechanism.names, mechanism.complete(tuple(arguments))))
    if not _is_plain(mechanism, call):
        raise Unsupported(f"{mechanism.name}: a forward derivative of torch.ops.heed.{mechanism.name} was asked for, "
                          f"which heed.torch.{mechanism.name} has")
    of = dict(zip(mechanism.names, of_arguments))
    along, tensors = [of.get(name) for name in TENSORS[mechanism.name]], _tensors_of(mechanism, call)
    first = tensors[0]
    sequences = Sequences(*first.shape[:2], *(call[x] for x in _LISTS), call["reverse"], first.device)

    def in_order(tensors: Sequence[Any]) -> list[Any]:
        *inputs, state = tensors
        return [*(None if x is None else sequences.gather(x) for x in inputs), state]

    scan = Scan(sequences.lengths, call["threads"])
    o, state = ALONG[mechanism.name](scan, in_order(along), *in_order(tensors))
    # A plain call does not have other states.
    return sequences.scatter(o), state, *(state.new_empty(0) for _ in mechanism.states[1:])


def results(mechanism: Any, arguments: Sequence[Any]) -> Any:
    """A call as its composition, through which tangents of forward mode flow."""
    call = dict(zip(mechanism.names, mechanism.complete(tuple(arguments))))
    o, *states = _composed(mechanism, call)
    states = [torch.empty(0) if x is None else x for x in states]
    return (o, *states) if mechanism.states else o
