# Recurrences, delta rules, scans and filters over a sequence that the processes of a group hold in parts.
"""A sequence is cut into segments, at the borders of ranks and at multiples of `segment` tokens. Each rank summarises
its segments (heed/mechanism/structs.h), all ranks receive all summaries and compose the states before their own, and
then compute outputs. Gradients of states go the other way, with the same transitions.

    states before segment i + 1 = transition_i(states before segment i) + state_i
    gradients of the states before segment i = transition_i^T (those after it) + what comes from its outputs

The states depend on where the sequence is cut, and on nothing else. With relay=True each rank waits for the states of
the one before it, and computes what one process computes, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, Unsupported, _core
from heed.torch import _group

TEXT = """With group=, a ProcessGroup or a DeviceMesh of one dimension, each rank gives and receives its part of the
tokens, in the order of ranks; lengths, starts and cu_seqlens are those of the whole. initial_state is that of rank 0
(with reverse=True of the last rank); return_state=True returns the final state on the last rank and None on others,
return_state="all" on every rank. States are composed at every `segment` tokens (4096 by default) and at the borders of
ranks; relay=True passes them from rank to rank instead. Gradients of tensors without tokens are this rank's part.

Without a group, segment=, a multiple of 64, computes segments of so many tokens at once, so that a head occupies more
threads (docs/reproducibility.md)."""
NUMBERS = ("lengths", "starts", "cu_seqlens")  # those of the whole sequence


class Piece(NamedTuple):
    """Tokens [begin, end) of the sequence, which a rank holds."""

    rank: int
    begin: int
    end: int


def cut(counts: Sequence[int], segment: int | None, backwards: bool) -> list[Piece]:
    """The segments of ranks with these numbers of tokens, in the order of processing; at least one."""
    pieces, begin = [], 0
    for rank, count in enumerate(counts):
        end = begin + count
        while begin < end:
            border = end if segment is None else min(end, (begin // segment + 1) * segment)
            pieces.append(Piece(rank, begin, border))
            begin = border
    pieces = pieces or [Piece(0, 0, 0)]
    return pieces[::-1] if backwards else pieces


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors if x is not None])


class _Plan:
    """A call: how the sequence is cut, and the passes on its segments."""

    def __init__(self, mechanism: Any, group: _group.Group, arguments: Sequence[Any], relay: bool, segment: int):
        self.mechanism, self.group = mechanism, group
        self.names = mechanism.names
        settings = {key: arguments[self.names.index(key)] for key in mechanism.settings}
        self.exists = [state.exists(settings) for state in mechanism.states]
        self.first_state = self.names.index(f"initial_{mechanism.states[0].name}")
        self.axes = [self.token_axis(i, x) for i, x in enumerate(arguments[: len(mechanism.inputs)])]
        axis = self.axes[mechanism.output]
        self.tokens = 0 if axis is None else arguments[mechanism.output].shape[axis]
        # A state beside the tail of a filter depends on that tail, so that it has no summary of its own (h3).
        tails = ["W - 1" in state.axes for state in mechanism.states]
        self.relay = relay or (any(tails) and not all(tails))
        self.backwards = "reverse" in self.names and bool(arguments[self.names.index("reverse")])
        self.segment = None if self.relay else segment

    def token_axis(self, i: int, x: Any) -> int | None:
        """The axis of tokens of an input."""
        if x is None:
            return None
        form = next((f for f in self.mechanism.forms[i] if f.count(",") + 1 == x.dim()), "")
        axes = form.split(", ")
        return axes.index("T") if "T" in axes else None

    def describe(self, arguments: Sequence[Any]) -> str:
        name = self.mechanism.name
        if arguments[self.mechanism.output].device.type != "cpu":
            raise Unsupported(f"{name}: group is given, which computes on the CPU alone")
        self.mechanism.check_ranks(arguments)
        for of, x, axis in zip(self.names, arguments, self.axes):
            if axis is not None and x.shape[axis] != self.tokens:
                raise InvalidArgument(f"{name}: {of} has shape {list(x.shape)}, expected {self.tokens} tokens as in "
                                      f"{self.names[self.mechanism.output]}")
        self.mechanism.forward(*self.of(arguments, Piece(0, 0, 0), 0, None))  # checks all but the number of tokens
        states = range(self.first_state, self.first_state + len(self.exists))
        kept = [i for i in range(len(arguments)) if i not in states]

        def without(of: str, x: Tensor) -> int | None:
            i = self.names.index(of)
            return self.axes[i] if i < len(self.axes) else None

        call = _group.described([self.names[i] for i in kept], [arguments[i] for i in kept], without)
        return f"{name}{call} segment={self.segment} heed {heed.__version__}"

    def set_counts(self, agreed: Sequence[Sequence[int]], arguments: Sequence[Any]) -> None:
        if not self.exists[0]:
            raise Unsupported(f"{self.mechanism.name}: group is given with causal=False, expected None: all tokens see "
                              "each other")
        counts = [tokens for tokens, _ in agreed]
        self.check_numbers(arguments, sum(counts))
        rank = self.group.rank
        self.begin = sum(counts[:rank])
        self.pieces = cut(counts, self.segment, self.backwards)
        self.own = [i for i, piece in enumerate(self.pieces) if piece.rank == rank]
        self.last = len(self.pieces) - 1
        first, self.last_rank = (self.group.size - 1, 0) if self.backwards else (0, self.group.size - 1)
        if agreed[first][1] and self.pieces[0].rank != first:
            raise Unsupported(f"{self.mechanism.name}: rank {first} has an initial_state and no tokens, expected some")
        # A sequence of rg_lru without an initial state is not like one with zeros.
        if self.mechanism.name == "rg_lru" and not agreed[first][1] and self.last > 0:
            self.check_first_tokens(arguments, sum(counts))

    def check_first_tokens(self, arguments: Sequence[Any], total: int) -> None:
        """Raises Unsupported unless all sequences begin in the first segment."""
        lengths, starts, packed = (arguments[self.names.index(name)] for name in NUMBERS)
        if packed is not None:
            begins, ends = packed[:-1], packed[1:]
        else:
            batch = arguments[self.mechanism.output].shape[0]
            begins = torch.zeros(batch, dtype=torch.int64) if starts is None else starts
            ends = torch.full((batch,), total) if lengths is None else lengths
        first = self.pieces[0]
        for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist())):
            token = end - 1 if self.backwards else begin
            if begin < end and not first.begin <= token < first.end:
                raise Unsupported(f"{self.mechanism.name}: sequence {i} begins with token {token}, expected one of the "
                                  f"first segment, tokens {first.begin} to {first.end}, without an initial state")

    def check_numbers(self, arguments: Sequence[Any], total: int) -> None:
        """Numbers of the whole, which are the same on every rank."""
        for name in NUMBERS:
            x = arguments[self.names.index(name)]
            if x is None or x.numel() == 0:
                continue
            low, high = int(x.min()), int(x.max())
            expected = f"numbers from 0 to {total}"
            bad = low < 0 or high > total
            if name == "cu_seqlens":
                expected = f"0 to {total} in ascending order"
                bad |= int(x[0]) != 0 or int(x[-1]) != total or bool((x.diff() < 0).any())
            if bad:
                raise InvalidArgument(f"{self.mechanism.name}: {name} is {x.tolist()}, expected {expected}, the tokens "
                                      "of all ranks")

    def of(
        self, arguments: Sequence[Any], piece: Piece, begin: int, states: Sequence[Tensor | None] | None
    ) -> list[Any]:
        """The arguments of a segment; without `states` those that were given remain."""
        result = list(arguments)
        for i, axis in enumerate(self.axes):
            if axis is not None:
                result[i] = arguments[i].narrow(axis, piece.begin - begin, piece.end - piece.begin)
        for name in NUMBERS:
            at = self.names.index(name)
            if result[at] is not None:
                result[at] = (result[at] - piece.begin).clamp(0, piece.end - piece.begin)
        for i, _ in enumerate(self.exists):
            if states is not None:
                result[self.first_state + i] = states[i]
        return result

    def new_states(self, arguments: Sequence[Any]) -> list[Tensor | None]:
        mechanism = self.mechanism
        packed = arguments[self.names.index("cu_seqlens")]
        like = arguments[mechanism.output]
        sequences = like.shape[0] if packed is None else packed.shape[0] - 1
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return [
            like.new_empty(mechanism.shape_of(state, arguments, sequences), dtype=dtype) if exists else None
            for state, exists in zip(mechanism.states, self.exists)
        ]

    def new_transitions(self, states: Sequence[Tensor | None], arguments: Sequence[Any]) -> list[Tensor | None]:
        """Tensors of the shapes in structs.h."""
        mechanism, result = self.mechanism, []
        relative = mechanism.has_exponent and self.exists[-1]
        for state, x in zip(mechanism.states, states):
            if x is None or (relative and state.has_gradient) or state.setting == "normalize":
                result.append(None)
                continue
            axes, shape = state.axes.split(", "), list(x.shape)
            column = next((i for i, axis in enumerate(axes) if axis in ("V", "P")), None)
            decays = "log_decay_v" in mechanism.inputs and arguments[mechanism.inputs.index("log_decay_v")] is not None
            if column is not None and not decays:
                shape[column] = shape[column - 1] if mechanism.is_delta else 1
            result.append(x.new_empty(shape))
        return result

    def summarize(self, arguments: Sequence[Any]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The summary of a segment, whose arguments these are."""
        states = self.new_states(arguments)
        transitions = self.new_transitions(states, arguments)
        given = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        getattr(_core, f"_torch_{self.mechanism.name}_summarize")(*given, *states, *transitions)
        return states, transitions

    def apply(self, segment: Any, before: Sequence[Tensor | None]) -> list[Tensor | None]:
        after = [None if x is None else torch.empty_like(x) for x in before]
        getattr(_core, f"_torch_{self.mechanism.name}_apply")(*segment[0], *segment[1], *before, *after)
        return after

    def apply_backward(self, segment: Any, before: Any, d_after: Any, d_before: Any) -> None:
        lists = (*segment[0], *segment[1], *before, *d_after, *d_before)
        getattr(_core, f"_torch_{self.mechanism.name}_apply_backward")(*lists)

    def share(self, own: dict[int, list[Tensor]], like: Sequence[Tensor | None]) -> dict[int, list[Tensor | None]]:
        """Tensors of segments from the ranks that have them, to all: by the index of the segment."""
        sizes = [0 if x is None else x.numel() for x in like]
        first = next(x for x in like if x is not None)
        most = max(sum(p.rank == r for p in self.pieces) for r in range(self.group.size))
        rows = first.new_zeros((most, sum(sizes)))
        for row, i in enumerate(self.own):
            if i in own:
                rows[row] = _flat(own[i])
        everywhere = self.group.gather(rows)
        place = dict.fromkeys(range(self.group.size), 0)
        result = {}
        for i, piece in enumerate(self.pieces):
            row = everywhere[piece.rank, place[piece.rank]]
            place[piece.rank] += 1
            parts = row.split(sizes)
            result[i] = [None if x is None else part.view(x.shape) for x, part in zip(like, parts)]
        return result

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, arguments: Sequence[Any], everywhere: bool) -> tuple[Tensor, list[Tensor | None], Any]:
        """The outputs here, the final states or None, and what the backward pass needs of the states."""
        results: dict[int, Any] = {}

        def run(i: int, states: Any) -> None:
            given = self.of(arguments, self.pieces[i], self.begin, states)
            found = self.mechanism.forward(*[x.detach() if isinstance(x, Tensor) else x for x in given])
            results[i] = (found[0], [x if exists else None for x, exists in zip(found[1:], self.exists)])

        like = self.new_states(arguments)
        before: dict[int, Any] = {}
        summaries: dict[int, Any] = {}
        if self.relay:
            for i in self.own:
                if i > 0:
                    source = self.pieces[i - 1].rank
                    before[i] = [None if x is None else self.group.receive(x, source) for x in like]
                run(i, before.get(i))
                if i < self.last:
                    for x in results[i][1]:
                        if x is not None:
                            self.group.send(x, self.pieces[i + 1].rank)
        else:
            none = [None] * len(like)
            changes = self.new_transitions(like, arguments)
            for i in self.own:
                if i == 0:
                    run(i, None)
                    summaries[i] = (results[i][1], [None if x is None else torch.zeros_like(x) for x in changes])
                elif i < self.last:
                    given = self.of(arguments, self.pieces[i], self.begin, none)
                    summaries[i] = self.summarize(given)
            if self.last > 0:
                shared = self.share({i: [*s[0], *s[1]] for i, s in summaries.items()}, [*like, *changes])
                summaries = {i: (x[: len(like)], x[len(like):]) for i, x in shared.items()}
                states = summaries[0][0]
                for i in range(1, self.last + 1):
                    before[i] = states
                    if i < self.last:
                        states = self.apply(summaries[i], states)
            for i in self.own:
                if i > 0:
                    run(i, before[i])
        axis = self.axes[self.mechanism.output]
        outputs = [results[i][0] for i in (self.own[::-1] if self.backwards else self.own)]
        if not outputs:
            outputs = [self.mechanism.forward(*self.of(arguments, Piece(0, 0, 0), 0, None))[0]]
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=self.output_axis(axis))
        final = results[self.last][1] if self.last in results else None
        if everywhere or self.pieces[self.last].rank != self.last_rank:
            owner = self.pieces[self.last].rank
            sent = final if final is not None else [None if x is None else torch.zeros_like(x) for x in like]
            final = [None if x is None else self.group.gather(x)[owner].clone() for x in sent]
        return o, final, (before, summaries)

    def output_axis(self, axis: int) -> int:
        return axis - sum(i < axis for i in self.mechanism.dropped)

    def backward(self, kept: Any, arguments: Sequence[Any], d_o: Tensor, d_final: Any, needed: Sequence[bool],
                 everywhere: bool) -> list[Tensor | None]:
        """The gradients of the differentiable arguments, in order."""
        mechanism, (before, summaries) = self.mechanism, kept
        differentiable = [state.has_gradient and exists for state, exists in zip(mechanism.states, self.exists)]
        places = [i for i, state in enumerate(mechanism.states) if state.has_gradient]
        like = self.new_states(arguments)
        if everywhere or self.pieces[self.last].rank != self.last_rank:
            given = [None if x is None or not has else (torch.zeros_like(x) if d is None else d)
                     for x, d, has in zip(like, d_final, differentiable)]
            d_final = [None if x is None else self.group.gather(x).sum(0) for x in given]
        inputs = len(mechanism.inputs)
        is_state = [self.first_state <= i < self.first_state + len(self.exists) for i in mechanism.differentiable]
        axis = self.output_axis(self.axes[mechanism.output])
        sums: list[Any] = [None] * len(needed)

        def run(i: int, d_after: Any, wanted: Sequence[bool]) -> list[Any]:
            """All gradients that are wanted of a segment, and those of its first states."""
            piece = self.pieces[i]
            given = self.of(arguments, piece, self.begin, before.get(i))
            part = d_o.narrow(axis, piece.begin - self.begin, piece.end - piece.begin)
            of_states = [d_after[j] if d_after is not None and differentiable[j] else None for j in places]
            given = [x.detach() if isinstance(x, Tensor) else x for x in given]
            for j, index in enumerate(mechanism.differentiable):  # only present tensors have gradients
                wanted = [*wanted[:j], wanted[j] and given[index] is not None, *wanted[j + 1:]]
            found = iter(mechanism.backward(part, *of_states, wanted, *given))
            return [next(found) if want else None for want in wanted]

        def of_first_states(found: Sequence[Any]) -> list[Any]:
            result: list[Any] = [None] * len(self.exists)
            for x, index in zip(found, mechanism.differentiable):
                if self.first_state <= index < self.first_state + len(self.exists):
                    result[index - self.first_state] = x
            return result

        def add(i: int, found: Sequence[Any]) -> None:
            for j, (x, index) in enumerate(zip(found, mechanism.differentiable)):
                if x is None or not needed[j] or (is_state[j] and i > 0):
                    continue
                divided = index < inputs and self.axes[index] is not None
                if divided:
                    sums[j] = [(i, x)] if sums[j] is None else [*sums[j], (i, x)]
                else:
                    sums[j] = x if sums[j] is None else sums[j] + x

        passed = [need or state for need, state in zip(needed, is_state)]
        if self.relay:
            for i in self.own[::-1]:
                d_after = d_final
                if i < self.last:
                    source = self.pieces[i + 1].rank
                    d_after = [self.group.receive(x, source) if has else None for x, has in zip(like, differentiable)]
                found = run(i, d_after, passed if i > 0 else needed)
                add(i, found)
                if i > 0:
                    for x, has in zip(of_first_states(found), differentiable):
                        if has:
                            self.group.send(x, self.pieces[i - 1].rank)
        else:
            own = {}
            for i in self.own:
                if i == self.last:
                    found = run(i, d_final, passed if i > 0 else needed)
                    add(i, found)
                elif i > 0:
                    found = run(i, None, is_state)
                else:
                    continue
                own[i] = [x for x in of_first_states(found) if x is not None]
            if self.last > 0:
                like_gradients = [x if has else None for x, has in zip(like, differentiable)]
                shared = self.share(own, like_gradients)
                d_after = {}
                d_before = shared[self.last]
                for i in range(self.last - 1, -1, -1):
                    d_after[i] = d_before
                    if i > 0:
                        d_before = shared[i]
                        self.apply_backward(summaries[i], before[i], d_after[i], d_before)
                for i in self.own:
                    if i < self.last:
                        add(i, run(i, d_after[i], [need and not (state and i > 0)
                                                   for need, state in zip(needed, is_state)]))
        result = []
        for j, index in enumerate(mechanism.differentiable):
            x = sums[j]
            if isinstance(x, list):
                parts = [part for _, part in sorted(x, key=lambda of: self.pieces[of[0]].begin)]
                x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axes[index])
            elif x is None and needed[j] and arguments[index] is not None:
                x = torch.zeros_like(arguments[index])
            result.append(x)
        return result


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, everywhere, *arguments):
        o, final, kept = plan.forward(arguments, everywhere)
        ctx.plan, ctx.everywhere, ctx.kept = plan, everywhere, kept
        ctx.given = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.is_tensor = [isinstance(x, Tensor) for x in arguments]
        ctx.save_for_backward(*(x for x in arguments if isinstance(x, Tensor)))
        constants = [x for x, state in zip(final or [], plan.mechanism.states)
                     if x is not None and not state.has_gradient]
        ctx.mark_non_differentiable(*constants)
        ctx.has_final = final is not None
        return o, *(final or [])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, *d_final):
        plan, tensors = ctx.plan, iter(ctx.saved_tensors)
        arguments = [next(tensors) if is_tensor else x for is_tensor, x in zip(ctx.is_tensor, ctx.given)]
        needed = [ctx.needs_input_grad[2 + i] for i in plan.mechanism.differentiable]
        d_final = list(d_final) if ctx.has_final else [None] * len(plan.exists)
        found = plan.backward(ctx.kept, arguments, d_o, d_final, needed, ctx.everywhere)
        gradients: list[Any] = [None] * len(arguments)
        for i, x in zip(plan.mechanism.differentiable, found):
            gradients[i] = x
        return None, None, *gradients


def call(
    mechanism: Any, arguments: Sequence[Any], return_state: Any, *, group: Any, relay: bool, segment: int
) -> Any:
    """o of the tokens here, and the final states: on the last rank, or with return_state="all" everywhere."""
    name = mechanism.name
    of = _group.Group(name, group)
    arguments = mechanism.complete(tuple(arguments))
    plan = _Plan(mechanism, of, arguments, relay, segment)
    initial = int(arguments[plan.first_state] is not None)
    plan.set_counts(of.agree([plan.tokens, initial], lambda: plan.describe(arguments)), arguments)
    o, *final = _Sequence.apply(plan, return_state == "all", *arguments)
    has = bool(final) and (return_state == "all" or of.rank == plan.last_rank)
    return o, (final if has else None)
