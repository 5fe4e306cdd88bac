# heed.torch's mechanisms: an operator with gradients for each that the extension module knows.
"""Mechanisms as operators of PyTorch, whatever computes them.

There is no list of them here: `heed._core` describes each that is built in (its tensors, their axes, its states and the
settings that it alone has), and each becomes `torch.ops.heed.<name>`, `torch.ops.heed.<name>_backward` and the functions
`<name>` and, where it has a state, `<name>_step` of heed.torch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch
from heed.torch._functions import _without_gradient

_TYPES = {bool: "bool", float: "float", str: "str", type(None): "str?", tuple: "float[]?"}
_LISTS = ("lengths", "starts", "cu_seqlens")


def _default(value: Any) -> Any:
    """An operator's, which for a range is None, which stands for the mechanism's."""
    return None if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    """A default as a schema has it."""
    return f'"{value}"' if isinstance(value, str) else str(_default(value))


class _State:
    """One of the states of a mechanism, and what operators call it."""

    def __init__(self, index: int, name: str, axes: str, has_gradient: bool, setting: str):
        self.name = name if index else "state"
        self.axes, self.has_gradient, self.setting = axes.split(", "), has_gradient, setting

    def exists(self, settings: dict[str, Any]) -> bool:
        """Where there is causality, or no word of it."""
        return settings.get("causal", True) and settings.get(self.setting, True)


class _Mechanism:
    """One mechanism: its operators, and what they need to know of shapes."""

    def __init__(self, name: str, description: dict[str, Any]):
        self.name = name
        self.inputs, self.optional = tuple(description["inputs"]), tuple(description["optional"])
        self.positional, self.cast = description["positional"], tuple(description["cast"])
        self.left_out = [x for x in self.inputs[description["required"]:] if x in self.optional]
        forms = {key: [form.split(", ") for form in axes.split("|")] for key, axes in description["axes"].items()}
        self.forms = {key: {len(form): form for form in several} for key, several in forms.items()}  # by rank
        self.output, self.output_axes = description["output"], description["output_axes"].split(", ")
        self.as_it_lies, self.features = description["as_it_lies"], description["features"]
        self.settings = description["settings"]
        self.states = [_State(i, *state) for i, state in enumerate(description["states"])]
        self.states_together, self.state_type = description["states_together"], description["state_type"]
        self.forward_kernel = getattr(_core, f"_torch_{name}")
        self.backward_kernel = getattr(_core, f"_torch_{name}_backward")

        scale = {"scale": ("float?", None)} if description["scale"] else {}
        reverse = {"reverse": ("bool", False)} if description["direction"] else {}
        initial = {f"initial_{state.name}": ("Tensor?", None) for state in self.states}
        rest = {**dict.fromkeys(_LISTS, ("Tensor?", None)), **reverse, "threads": ("int?", None)}
        self.before, self.after = tuple(scale), tuple(rest)  # options on both sides of the states
        settings = {key: (_TYPES[type(x)], x) for key, x in self.settings.items()}
        options = {**settings, **scale, **initial, **rest}
        self.options = {key: value for key, (_, value) in {**scale, **rest}.items()}
        self.defaults = (*(None for _ in self.inputs), *(_default(value) for _, value in options.values()))
        places = (*self.inputs, *options)
        self.bounds = places.index("cu_seqlens")
        differentiable = [state for state in self.states if state.has_gradient]
        masks = description["masks"]
        self.differentiable = (
            *(i for i, x in enumerate(self.inputs) if x not in masks),
            *(places.index(f"initial_{state.name}") for state in differentiable),
        )
        self.num_incoming = 1 + len(differentiable)

        tensors = [f"Tensor{'?' * (x in self.optional)} {x}{'=None' * (x in self.left_out)}" for x in self.inputs]
        arguments = ", ".join([*tensors, *(f"{kind} {key}={_text(value)}" for key, (kind, value) in options.items())])
        incoming = ", ".join(["Tensor grad_o", *(f"Tensor? grad_{state.name}" for state in differentiable)])
        self.backward_operator = _dispatch.define(
            f"{name}_backward", f"({incoming}, bool[] needed, {arguments}) -> Tensor[]", self.backward, self.fake_backward
        )
        returns = f"({', '.join(['Tensor'] * (1 + len(self.states)))})" if self.states else "Tensor"
        self.operator = _dispatch.define(
            name, f"({arguments}) -> {returns}", self.forward, self.results, gradients=self.differentiate
        )

    def complete(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """PyTorch leaves trailing defaults away."""
        return (*arguments, *self.defaults[len(arguments):])

    def sizes(self, arguments: tuple[Any, ...]) -> dict[str, int]:
        """Those of axes, by their names."""
        sizes: dict[str, int] = {"2": 2}
        for name, x in zip(self.inputs, arguments):
            forms = self.forms[name]
            if x is None or (len(forms) > 1 and x.dim() not in forms):
                continue  # the kernel says what it may be
            if x.dim() not in forms:
                raise InvalidArgument(f"{self.name}: {name} has shape {list(x.shape)}, expected [{', '.join(*forms.values())}]")
            for axis, size in zip(forms[x.dim()], x.shape):
                sizes.setdefault(axis, size)
        sizes["W - 1"] = max(sizes.get("W", 1), 1) - 1
        if self.features is not None:
            sizes["F"] = self.features(int(sizes["K"]))
        return sizes

    def new_output(self, like: Tensor, sizes: dict[str, int]) -> Tensor:
        return torch.empty_like(like) if self.as_it_lies else like.new_empty([sizes[axis] for axis in self.output_axes])

    def results(self, *arguments: Any) -> Any:
        """New tensors for o and the final states; states that a call does not have are empty."""
        arguments = self.complete(arguments)
        sizes = self.sizes(arguments)
        like = arguments[self.inputs.index(self.output)]
        o = self.new_output(like, sizes)
        if not self.states:
            return o
        sizes["B"] = _dispatch.num_sequences(self.name, sizes["B"], arguments[self.bounds])
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        settings = dict(zip(self.settings, arguments[len(self.inputs):]))
        return o, *(
            like.new_empty([sizes[axis] for axis in state.axes] if state.exists(settings) else (0,), dtype=dtype)
            for state in self.states
        )

    def forward(self, *arguments: Any) -> Any:
        arguments = self.complete(arguments)
        results = self.results(*arguments)
        o, *states = results if self.states else (results,)
        wanted = (x if x.dim() > 1 else None for x in states)
        self.forward_kernel(*(x.detach() if isinstance(x, Tensor) else x for x in arguments), o, *wanted)
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
        grad_o, *of_states = of_results[: self.num_incoming]  # what comes behind counts as a constant
        if grad_o is None:
            grad_o = self.new_output(arguments[self.inputs.index(self.output)], self.sizes(arguments)).zero_()
        of_states = [x if x is not None and x.dim() > 1 else None for x in of_states]
        found = self.backward_operator(grad_o, *of_states, wanted, *arguments)
        return dict(zip((i for i, want in zip(self.differentiable, wanted) if want), found))

    def initial_states(self, given: Any) -> tuple[Any, ...]:
        """As many as there are, of an array, of a tuple of some, or of None."""
        number, together = len(self.states), self.states_together
        several = isinstance(given, (tuple, list)) and not (together and number == 1)
        states = tuple(given) if several else (given,)
        states += (None,) * (number - len(states) if given is None or not together else 0)
        if len(states) < number or any(x is not None for x in states[number:]):
            names = "" if number == 1 else f"arrays ({', '.join(self.state_type._fields)})"
            expected = names if together else " or ".join(filter(None, ("an array", names)))
            raise InvalidArgument(f"{self.name}: initial_state is {type(given).__name__}, expected {expected}")
        return states[:number]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The function of heed.torch: heed's own signature, without out."""
        if len(inputs) > self.positional:
            raise TypeError(f"{self.name}() takes {self.positional} positional arguments but {len(inputs)} were given")
        values = dict(zip(self.inputs, inputs))
        for name in self.inputs[len(inputs):]:
            if name in options:
                values[name] = options.pop(name)
            elif name not in self.left_out:
                raise TypeError(f"{self.name}() is missing the argument {name!r}")
        required = {name: x for name, x in values.items() if x is not None or name not in self.optional}
        _dispatch.check_tensors(self.name, **required)
        return_state = bool(self.states) and options.pop("return_state", False)
        if return_state and options.get("causal", self.settings.get("causal")) is False:
            raise InvalidArgument(f"{self.name}: return_state is True, expected False: without causal there is no state")
        initial = self.initial_states(options.pop("initial_state", None)) if self.states else ()
        settings = [options.pop(key, default) for key, default in self.settings.items()]
        known = {key: options.pop(key, default) for key, default in self.options.items()}
        if options:
            states = ("initial_state", "return_state") if self.states else ()
            raise _dispatch.unexpected(self.name, next(iter(options)), (*self.inputs, *self.settings, *known, *states))
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            for name in self.cast:
                x = values.get(name)
                if x is not None and x.is_floating_point() and x.dtype != torch.float64 and self.is_cast(name, x):
                    values[name] = x.to(dtype)
        known |= {key: _dispatch.numbers(self.name, key, known[key], torch.int64) for key in _LISTS}
        results = self.operator(
            *(values.get(name) for name in self.inputs), *settings, *(known[key] for key in self.before), *initial,
            *(known[key] for key in self.after),
        )
        if not self.states:
            return results
        o, *states = results
        if not return_state:
            return o
        states = [x for x in states if x.dim() > 1]
        return o, self.state_type(*states) if len(states) > 1 else states[0]

    def is_cast(self, name: str, x: Tensor) -> bool:
        """What may be of tokens or a constant is cast where it is of tokens."""
        return x.dim() > 2 or len(self.forms[name]) == 1


def _public(mechanism: _Mechanism) -> Any:
    function_of_arrays = getattr(heed, mechanism.name)

    @functools.wraps(function_of_arrays, assigned=("__name__", "__qualname__"))
    def function(*inputs: Any, **options: Any) -> Any:
        return mechanism(*inputs, **options)

    function.__module__ = "heed.torch"
    function.__doc__ = _signatures.text_on_tensors(function_of_arrays)
    function.__signature__ = _signatures.of_tensors(function_of_arrays, without=("out",))
    return function


def _step(name: str, description: dict[str, Any]) -> Any:
    names = list(description["inputs"][: description["positional"]])
    names.insert(description["state_place"], "state")
    return _without_gradient(name, *names)


functions: dict[str, Any] = {}
for _name, _description in _core._mechanisms.items():
    functions[_name] = _public(_Mechanism(_name, _description))
    if _description["states"]:
        functions[f"{_name}_step"] = _step(f"{_name}_step", _description)
