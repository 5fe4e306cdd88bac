# heed.torch's mechanisms: an operator with gradients for each that the extension module knows.
"""Mechanisms as operators of PyTorch, whatever computes them.

There is no list of them here: `heed._core` describes each that is built in, its tensors, their axes, its states and the
settings that it alone has, and each becomes `torch.ops.heed.<name>`, `torch.ops.heed.<name>_backward` and the functions
`<name>` and, where it has a state, `<name>_step` of heed.torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch, _second_derivatives, _sequence
from heed.torch._functions import _bare_arguments, _without_gradient

_TYPES = {bool: "bool", float: "float", str: "str", type(None): "str?", tuple: "float[]?"}
_IN_A_GROUP = {name: default for name, _, default in _signatures.STATES_IN_A_GROUP}
_SEGMENT_IN_A_GROUP = 4096


def _default(value: Any) -> Any:
    """An operator's default; None for a range, where the mechanism has its own."""
    return None if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    """A default as a schema has it."""
    return f'"{value}"' if isinstance(value, str) else str(_default(value))


class _State:
    """One of the states of a mechanism, and what operators call it."""

    def __init__(self, index: int, name: str, axes: str, has_gradient: bool, setting: str, places: Sequence[Any]):
        self.name, self.axes = name if index else "state", axes
        self.has_gradient, self.setting, self.places = has_gradient, setting, places

    def exists(self, settings: dict[str, Any]) -> bool:
        """Returns whether the state exists: not in calls that are not causal, or without its setting."""
        return settings.get("causal", True) and settings.get(self.setting, True)


def _through_the_sums(*states: Any) -> tuple[Any, ...]:
    """States of which all but the last stand for themselves times its exponential, and of which operators take the last
    for a constant: its gradient, the sum of all x dx, reaches it as that of a factor of the others that is 1."""
    *sums, exponent = states
    if not isinstance(exponent, Tensor) or not exponent.requires_grad or any(x is None for x in sums):
        return states
    fixed = exponent.detach()
    one = torch.exp(torch.where(torch.isfinite(fixed), exponent - fixed, 0))
    return *(x * one[(..., *[None] * (x.dim() - one.dim()))] for x in sums), fixed


class _Mechanism:
    """One mechanism: its operators, and what they need to know of shapes."""

    def __init__(self, name: str, description: dict[str, Any]):
        self.name = name
        self.inputs, self.optional = tuple(description["inputs"]), tuple(description["optional"])
        self.positional = description["positional"]
        self.left_out = [x for x in self.inputs[description["required"]:] if x in self.optional]
        self.cast = [x in description["cast"] for x in self.inputs]
        self.forms = [description["axes"][x].split("|") for x in self.inputs]
        self.ranks = [(i, forms[0].count(",") + 1) for i, forms in enumerate(self.forms) if len(forms) == 1]
        self.output, self.as_it_lies = self.inputs.index(description["output"]), description["as_it_lies"]
        kept = description["output_axes"].split(", ")
        self.dropped = [i for i, axis in enumerate(self.forms[self.output][0].split(", ")) if axis not in kept]
        self.settings, self.features = description["settings"], description["features"]
        self.states = [_State(i, *state) for i, state in enumerate(description["states"])]
        self.has_exponent = any(not state.has_gradient for state in self.states)
        self.always = not any(state.setting for state in self.states) and "causal" not in self.settings
        self.states_together, self.state_type = description["states_together"], description["state_type"]
        self.forward_kernel = getattr(_core, f"_torch_{name}")
        self.backward_kernel = getattr(_core, f"_torch_{name}_backward")
        if self.states:
            self.in_group = getattr(_core, f"_torch_{name}_in_group")
            self.backward_in_group = getattr(_core, f"_torch_{name}_backward_in_group")

        # {keyword: (type, default)} in the order of operators, which take each state by itself.
        options = {key: (_TYPES[type(x)], x) for key, x in self.settings.items()}
        options |= {"scale": ("float?", None)} if description["scale"] else {}
        options |= {f"initial_{state.name}": ("Tensor?", None) for state in self.states}
        options |= dict.fromkeys(_sequence.NUMBERS, ("Tensor?", None))
        options |= {"reverse": ("bool", False)} if description["direction"] else {}
        options |= {"threads": ("int?", None)}
        options |= {"segment": ("int", 0)} if self.states else {}
        more = [f"initial_{state.name}" for state in self.states[1:]]
        self.options = {key: value for key, (_, value) in options.items() if key not in more}
        self.defaults = (*(None for _ in self.inputs), *(_default(value) for _, value in options.values()))
        self.names = arguments = (*self.inputs, *options)
        self.bounds = arguments.index("cu_seqlens")
        self.first_state = arguments.index("initial_state") if self.states else len(arguments)
        differentiable = [state for state in self.states if state.has_gradient]
        self.differentiable = (
            *(i for i, x in enumerate(self.inputs) if x not in description["masks"]),
            *(arguments.index(f"initial_{state.name}") for state in differentiable),
        )
        self.num_incoming = 1 + len(differentiable)

        tensors = [f"Tensor{'?' * (x in self.optional)} {x}{'=None' * (x in self.left_out)}" for x in self.inputs]
        rest = ", ".join([*tensors, *(f"{kind} {key}={_text(value)}" for key, (kind, value) in options.items())])
        incoming = ", ".join(["Tensor grad_o", *(f"Tensor? grad_{state.name}" for state in differentiable)])
        self.backward_operator = _dispatch.define(
            f"{name}_backward", f"({incoming}, bool[] needed, {rest}) -> Tensor[]", self.backward, self.fake_backward,
            gradients=self.differentiate_twice, on_gpus=True,
        )
        returns = f"({', '.join(['Tensor'] * (1 + len(self.states)))})" if self.states else "Tensor"
        self.operator = _dispatch.define(
            name, f"({rest}) -> {returns}", self.forward, self.results, gradients=self.differentiate,
            tangents=self.tangents, on_gpus=True
        )

    def complete(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """PyTorch leaves trailing defaults away."""
        return (*arguments, *self.defaults[len(arguments):])

    def check_ranks(self, arguments: tuple[Any, ...]) -> None:
        """Checks tensors that have one form; the kernel checks the others."""
        for i, rank in self.ranks:
            x = arguments[i]
            if x is not None and x.dim() != rank:
                name, form = self.inputs[i], self.forms[i][0]
                raise InvalidArgument(f"{self.name}: {name} has shape {list(x.shape)}, expected [{form}]")

    def new_output(self, like: Tensor) -> Tensor:
        if self.as_it_lies:
            return torch.empty_like(like)
        if self.dropped:
            return like.new_empty([size for i, size in enumerate(like.shape) if i not in self.dropped])
        return like.new_empty(like.shape)

    def new_output_of_a_token(self, like: Tensor) -> Tensor:
        """The output of a step, whose tensors have no axis of tokens."""
        tokens = self.forms[self.output][0].split(", ").index("T")
        kept = [size for i, size in enumerate(like.shape) if i + (i >= tokens) not in self.dropped]
        return torch.empty_like(like) if self.as_it_lies else like.new_empty(kept)

    def shape_of(self, state: _State, arguments: tuple[Any, ...], sequences: int) -> list[int]:
        """The sizes of a state, each of which is an axis of a tensor."""
        shape = []
        for tensor, place, others, of_batch, features in state.places:
            size = sequences if of_batch else arguments[tensor].shape[place] if place >= 0 else 0
            shape.append(self.features(int(size)) if features else max(size + others, 0))
        return shape

    def new_results(self, arguments: tuple[Any, ...]) -> Any:
        """New tensors for o and the final states; states that a call does not have are empty."""
        self.check_ranks(arguments)
        like = arguments[self.output]
        sequences = _dispatch.num_sequences(self.name, like.shape[0], arguments[self.bounds])
        o = self.new_output(like)
        if not self.states:
            return o
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        settings = {} if self.always else dict(zip(self.settings, arguments[len(self.inputs):]))
        shapes = [
            self.shape_of(x, arguments, sequences) if self.always or x.exists(settings) else (0,) for x in self.states
        ]
        return o, *[like.new_empty(shape, dtype=dtype) for shape in shapes]

    def results(self, *arguments: Any) -> Any:
        return self.new_results(self.complete(arguments))

    def forward(self, *arguments: Any) -> Any:
        arguments = self.complete(arguments)
        results = self.new_results(arguments)
        o, *states = results if self.states else (results,)
        wanted = [x if x.dim() > 1 else None for x in states]
        self.forward_kernel(*[x.detach() if isinstance(x, Tensor) else x for x in arguments], o, *wanted)
        return results

    def new_gradients(self, needed: list[bool], arguments: tuple[Any, ...]) -> list[Tensor | None]:
        """New tensors for what is needed of the inputs and the initial states, in order."""
        arguments = self.complete(arguments)
        memory = torch.preserve_format if self.as_it_lies else torch.contiguous_format
        return [
            torch.empty_like(arguments[i], memory_format=memory) if need else None
            for i, need in zip(self.differentiable, needed, strict=True)
        ]

    def backward(self, *arguments: Any) -> list[Tensor]:
        incoming, (needed, *arguments) = arguments[: self.num_incoming], arguments[self.num_incoming :]
        gradients = self.new_gradients(needed, arguments)
        self.backward_kernel(*incoming, *self.complete(arguments), *gradients)
        return [x for x in gradients if x is not None]

    def fake_backward(self, *arguments: Any) -> list[Tensor]:
        needed, *arguments = arguments[self.num_incoming :]
        return [x for x in self.new_gradients(needed, arguments) if x is not None]

    def differentiate(self, needed: tuple[bool, ...], of_results: tuple[Any, ...], *arguments: Any) -> dict[int, Any]:
        wanted = [i < len(needed) and needed[i] for i in self.differentiable]
        grad_o, *of_states = of_results[: self.num_incoming]  # later results count as constants
        if grad_o is None:
            grad_o = self.new_output(arguments[self.output]).zero_()
        of_states = [x if x is not None and x.dim() > 1 else None for x in of_states]
        if _dispatch.in_forward_mode():
            given = (grad_o, *of_states, wanted, *self.complete(arguments))
            found = _second_derivatives.Gradients(self, given)(*given)
        else:
            found = self.backward_operator(grad_o, *of_states, wanted, *arguments)
        return dict(zip((i for i, want in zip(self.differentiable, wanted) if want), found))

    def differentiate_twice(self, needed: tuple[bool, ...], of_results: Any, *arguments: Any) -> dict[int, Any]:
        return _second_derivatives.of_gradients(self, needed, of_results, arguments)

    def tangents(self, of_arguments: Sequence[Any], *arguments: Any) -> Any:
        return _second_derivatives.tangents(self, of_arguments, arguments)

    def initial_states(self, given: Any) -> tuple[Any, ...]:
        """All initial states, from an array, a tuple of some of them, or None; a missing one is None."""
        number, together = len(self.states), self.states_together
        several = isinstance(given, (tuple, list)) and not (together and number == 1)
        states = tuple(given) if several else (given,)
        states += (None,) * (number - len(states) if given is None or not together else 0)
        if len(states) < number or any(x is not None for x in states[number:]):
            names = "" if number == 1 else f"arrays ({', '.join(self.state_type._fields)})"
            expected = names if together else " or ".join(filter(None, ("an array", names)))
            raise InvalidArgument(f"{self.name}: initial_state is of type {type(given).__name__}, expected {expected}")
        parts = [f".{field}" for field in self.state_type._fields] if several and number > 1 else [""] * number
        for part, x in zip(parts, states):
            if x is not None:
                _dispatch.check_tensors(self.name, **{f"initial_state{part}": x})
        return states[:number]

    def to_autocast(self, tensors: list[Any], dtype: torch.dtype) -> list[Any]:
        """Casts tensors of tokens; one that may be of tokens or constant is cast if it is of tokens."""

        def is_cast(x: Any, cast: bool, forms: list[str]) -> bool:
            wide = x is None or not x.is_floating_point() or x.dtype == torch.float64
            return cast and not wide and (x.dim() > 2 or len(forms) == 1)

        return [x.to(dtype) if is_cast(x, *of) else x for x, *of in zip(tensors, self.cast, self.forms)]

    def group_options(self, options: dict[str, Any]) -> dict[str, Any] | None:
        """Takes what concerns a group out of the options; None without a group."""
        if not self.states or not [key for key in _IN_A_GROUP if key in options]:
            return None
        given = {key: options.pop(key, value) for key, value in _IN_A_GROUP.items()}
        _dispatch.check_bools(self.name, relay=given["relay"])
        alone = given["group"] is None
        if given["segment"] is None:
            given["segment"] = 0 if alone else _SEGMENT_IN_A_GROUP
        _dispatch.check_int(self.name, "segment", given["segment"], 0 if alone else 1)
        if not alone:
            return given
        if given["segment"]:
            options["segment"] = given["segment"]
        return None

    def rest(self, options: dict[str, Any]) -> list[Any]:
        """All that an operator takes behind its tensors."""
        result = []
        is_relative = self.has_exponent and options.get("kernel") != "relu"  # Performer's relu kernel has no maximum
        for key, default in self.options.items():
            value = options.pop(key, default)
            if isinstance(default, bool) and value.__class__ is not bool:
                _dispatch.check_bools(self.name, **{key: value})
            if key in _sequence.NUMBERS:
                value = _dispatch.numbers(self.name, key, value, torch.int64)
            if key == "initial_state":
                states = self.initial_states(value)
                result += _through_the_sums(*states) if is_relative else states
            else:
                result.append(value)
        if options:
            of_states = ["return_state"] if self.states else []
            raise _dispatch.unexpected(self.name, next(iter(options)), (*self.inputs, *self.options, *of_states))
        return result

    def call(self, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
        """The function of heed.torch: heed's own signature, without out."""
        if len(tensors) > self.positional:
            raise TypeError(f"{self.name}() takes {self.positional} positional arguments but {len(tensors)} were given")
        tensors = list(tensors)
        for name in self.inputs[len(tensors):]:
            if name not in options and name not in self.left_out:
                raise TypeError(f"{self.name}() is missing the argument {name!r}")
            tensors.append(options.pop(name, None))
        for name, x in zip(self.inputs, tensors):
            if not isinstance(x, Tensor) and (x is not None or name not in self.optional):
                _dispatch.check_tensors(self.name, **{name: x})
        return_state = bool(self.states) and options.pop("return_state", False)
        group = self.group_options(options) if options else None
        if return_state.__class__ is not bool and not (group and return_state == "all"):
            _dispatch.check_bools(self.name, return_state=return_state)
        if return_state and options.get("causal", self.settings.get("causal")) is False:
            raise InvalidArgument(
                f"{self.name}: return_state is True, expected False: without causal there is no state"
            )
        dtype = _dispatch.autocast_dtype(tensors[self.output])
        if dtype is not None:
            tensors = self.to_autocast(tensors, dtype)
        rest = self.rest(options) if options or group else ()
        if group:
            o, states = _sequence.call(self, (*tensors, *rest), return_state, **group)
            if not return_state:
                return o
            states = [x for x in states or () if x is not None]
            return o, self.state_type(*states) if len(states) > 1 else states[0] if states else None
        if _dispatch.in_forward_mode():
            self.check_ranks((*tensors, *rest))
            results = _second_derivatives.results(self, (*tensors, *rest))
        else:
            results = _dispatch.call(self.name, self.operator, *tensors, *rest)
        if not self.states:
            return results
        o, *states = results
        if not return_state:
            return o
        states = [x for x in states if x.dim() > 1]
        return o, self.state_type(*states) if len(states) > 1 else states[0]


def _public(mechanism: _Mechanism) -> Any:
    function_of_arrays = getattr(heed, mechanism.name)

    @functools.wraps(function_of_arrays, assigned=("__name__", "__qualname__"))
    def function(*tensors: Any, **options: Any) -> Any:
        return mechanism.call(tensors, options)

    function.__module__ = "heed.torch"
    # relay and segment are in the text of _sequence.
    function.__doc__ = _signatures.text_on_tensors(function_of_arrays, without=_signatures.STATES_OF_ARRAYS)
    keywords = _signatures.STATES_IN_A_GROUP if mechanism.states else ()
    if keywords:
        function.__doc__ += "\n\n" + _sequence.TEXT
    without = ("out", *_signatures.STATES_OF_ARRAYS)
    function.__signature__ = _signatures.of_tensors(function_of_arrays, without=without, keywords=keywords)
    return function


def _step(mechanism: _Mechanism, state_place: int) -> Any:
    name = f"{mechanism.name}_step"
    names = list(mechanism.inputs[: mechanism.positional])
    names.insert(state_place, "state")
    on_cpu, kernel = _without_gradient(name, *names), getattr(_core, f"_torch_{name}")

    @functools.wraps(on_cpu)
    def function(*tensors: Any, **options: Any) -> Any:
        given = dict(zip(names, tensors)) | options
        like = given.get(mechanism.inputs[mechanism.output])
        if not isinstance(like, Tensor) or like.device.type == "cpu":
            return on_cpu(*tensors, **options)
        out = options.pop("out", None)
        if out is None:
            out = mechanism.new_output_of_a_token(like)
        positional, named = _bare_arguments(name, names, tensors, options)
        kernel(*positional, **named, out=out)
        _dispatch.wrote(given["state"], out)
        return out

    return function


mechanisms = {name: _Mechanism(name, description) for name, description in _core._mechanisms.items()}
functions: dict[str, Any] = {}
for _name, _description in _core._mechanisms.items():
    functions[_name] = _public(mechanisms[_name])
    if _description["states"]:
        functions[f"{_name}_step"] = _step(mechanisms[_name], _description["state_place"])
