# heed.torch's scans: an operator with gradients for each that the extension module knows.
"""Mechanisms on the scan engine as operators of PyTorch.

There is no list of them here: `heed._core` describes each that is built in (its inputs, their axes and the settings that it
alone has), and each becomes `torch.ops.heed.<name>`, `torch.ops.heed.<name>_backward` and the functions `<name>` and
`<name>_step` of heed.torch.
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

_TYPES = {bool: "bool", float: "float", str: "str"}
_OPTIONS = {"lengths": None, "starts": None, "cu_seqlens": None, "reverse": False, "threads": None}
_SCHEMA = "Tensor? lengths=None, Tensor? starts=None, Tensor? cu_seqlens=None, bool reverse=False, int? threads=None"
_LISTS = ("lengths", "starts", "cu_seqlens")


def _text(value: Any) -> str:
    """A default as a schema has it."""
    return f'"{value}"' if isinstance(value, str) else str(value)


class _Mechanism:
    """One mechanism: its operators, and what they need to know of shapes."""

    def __init__(self, name: str, description: dict[str, Any]):
        self.name = name
        self.inputs = tuple(description["inputs"])
        self.optional = tuple(description["optional"])
        self.positional = description["positional"]
        self.settings = description["settings"]
        self.axes, self.state_axes = description["axes"], list(description["state_axes"])
        self.state_type = description["state_type"]  # of several
        self.forward_kernel = getattr(_core, f"_torch_{name}")
        self.backward_kernel = getattr(_core, f"_torch_{name}_backward")
        # What it lacks where it has no state: the initial one, of which it also wants the gradient.
        names = ("initial_state", "initial_state_2")[: len(self.state_axes)]
        self.options = {**dict.fromkeys(names), **_OPTIONS}
        self.defaults = (*(None for _ in self.inputs), *self.settings.values(), *self.options.values())
        self.num_results = 1 + len(self.state_axes)
        after = len(self.inputs) + len(self.settings)
        self.bounds = after + list(self.options).index("cu_seqlens")  # its place
        self.differentiable = (*range(len(self.inputs)), *range(after, after + len(self.state_axes)))
        tensors = [f"Tensor? {x}=None" if x in self.optional else f"Tensor {x}" for x in self.inputs]
        settings = [f"{_TYPES[type(x)]} {key}={_text(x)}" for key, x in self.settings.items()]
        rest = ", ".join([*tensors, *settings, *(f"Tensor? {x}=None" for x in names), _SCHEMA])
        incoming = ", ".join(["Tensor grad_o", *(f"Tensor? grad_state_{i + 1}" for i in range(len(names)))])
        self.backward_operator = _dispatch.define(
            f"{name}_backward", f"({incoming}, bool[] needed, {rest}) -> Tensor[]", self.backward, self.fake_backward
        )
        returns = f"({', '.join(['Tensor'] * self.num_results)})" if self.state_axes else "Tensor"
        self.operator = _dispatch.define(
            name, f"({rest}) -> {returns}", self.forward, self.results, gradients=self.differentiate
        )

    def complete(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """PyTorch leaves trailing defaults away."""
        return (*arguments, *self.defaults[len(arguments):])

    def results(self, *arguments: Any) -> Any:
        """New tensors for o, in the memory order of the first input, and the final states where there are any."""
        arguments = self.complete(arguments)
        given = dict(zip(self.inputs, arguments))
        sizes: dict[str, int] = {}
        for name, axes in self.axes.items():
            if "|" in axes or given[name] is None:
                continue
            if given[name].dim() != len(axes):
                expected = ", ".join(axes)
                raise InvalidArgument(f"{self.name}: {name} has shape {list(given[name].shape)}, expected [{expected}]")
            for axis, size in zip(axes, given[name].shape):
                sizes.setdefault(axis, size)
        sizes["2"], sizes["w"] = 2, sizes.get("W", 1) - 1  # real and imaginary parts; keys before the first token
        first = arguments[0]
        if not self.state_axes:
            return torch.empty_like(first)
        sizes["B"] = _dispatch.num_sequences(self.name, sizes["B"], arguments[self.bounds])
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        return torch.empty_like(first), *(first.new_empty([sizes[x] for x in axes], dtype=dtype) for axes in self.state_axes)

    def forward(self, *arguments: Any) -> Any:
        arguments = self.complete(arguments)
        results = self.results(*arguments)
        written = results if self.state_axes else (results,)
        self.forward_kernel(*(x.detach() if isinstance(x, Tensor) else x for x in arguments), *written)
        return results

    def new_gradients(self, needed: list[bool], arguments: tuple[Any, ...]) -> list[Tensor | None]:
        """New tensors for what is needed of the inputs and the initial state, in order."""
        arguments = self.complete(arguments)
        return [torch.empty_like(arguments[i]) if need else None for i, need in zip(self.differentiable, needed, strict=True)]

    def backward(self, *arguments: Any) -> list[Tensor]:
        incoming = arguments[: self.num_results]
        needed, *arguments = arguments[self.num_results :]
        gradients = self.new_gradients(needed, arguments)
        self.backward_kernel(*incoming, *self.complete(arguments), *gradients)
        return [x for x in gradients if x is not None]

    def fake_backward(self, *arguments: Any) -> list[Tensor]:
        needed, *arguments = arguments[self.num_results :]
        return [x for x in self.new_gradients(needed, arguments) if x is not None]

    def differentiate(self, needed: tuple[bool, ...], of_results: tuple[Any, ...], *arguments: Any) -> dict[int, Any]:
        wanted = [i < len(needed) and needed[i] for i in self.differentiable]
        grad_o, *grad_state = of_results
        if grad_o is None:
            grad_o = torch.zeros_like(arguments[0])
        found = self.backward_operator(grad_o, *grad_state, wanted, *arguments)
        return dict(zip((i for i, want in zip(self.differentiable, wanted) if want), found))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The function of heed.torch: heed's own signature."""
        if len(inputs) > self.positional:
            raise TypeError(f"{self.name}() takes {self.positional} positional arguments but {len(inputs)} were given")
        values = dict(zip(self.inputs, inputs))
        for name in self.inputs[len(inputs):]:
            if name in options:
                values[name] = options.pop(name)
            elif name not in self.optional:
                raise TypeError(f"{self.name}() is missing the argument {name!r}")
        _dispatch.check_tensors(self.name, **{x: value for x, value in values.items() if value is not None or x not in self.optional})
        return_state = bool(self.state_axes) and options.pop("return_state", False)
        settings = {key: options.pop(key, default) for key, default in self.settings.items()}
        known = {key: options.pop(key, default) for key, default in self.options.items() if key != "initial_state_2"}
        if options:
            keywords = (*self.inputs, *self.settings, *known, *(["return_state"] if self.state_axes else []))
            raise _dispatch.unexpected(self.name, next(iter(options)), keywords)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            for name, x in values.items():  # float32 constants may stay
                if x is not None and x.dim() > 2 and x.is_floating_point() and x.dtype != torch.float64:
                    values[name] = x.to(dtype)
        known |= {key: _dispatch.numbers(self.name, key, known[key], torch.int64) for key in _LISTS}
        initial = ()
        if self.state_axes:
            initial = known.pop("initial_state")
            initial = self.states_of(initial) if len(self.state_axes) > 1 else (initial,)
        results = self.operator(*(values.get(name) for name in self.inputs), *settings.values(), *initial, *known.values())
        if not self.state_axes:
            return results
        o, *states = results
        if not return_state:
            return o
        return o, self.state_type(*states) if len(states) > 1 else states[0]

    def states_of(self, state: Any) -> tuple[Any, ...]:
        """A tuple of states, or none of them."""
        if state is None:
            return (None,) * len(self.state_axes)
        if not isinstance(state, (tuple, list)) or len(state) != len(self.state_axes):
            raise InvalidArgument(
                f"{self.name}: initial_state is {type(state).__name__}, expected arrays ({', '.join(self.state_type._fields)})"
            )
        return tuple(state)


def _public(mechanism: _Mechanism) -> Any:
    function_of_arrays = getattr(heed, mechanism.name)

    @functools.wraps(function_of_arrays, assigned=("__name__", "__qualname__"))
    def function(*inputs: Any, **options: Any) -> Any:
        return mechanism(*inputs, **options)

    function.__module__ = "heed.torch"
    function.__doc__ = _signatures.text_on_tensors(function_of_arrays)
    function.__signature__ = _signatures.of_tensors(function_of_arrays, without=("out",))
    return function


functions: dict[str, Any] = {}
for _name, _description in _core._scanning.items():
    functions[_name] = _public(_Mechanism(_name, _description))
    if not _description["state_axes"]:
        continue
    _given = [x for x in _description["inputs"] if x not in _description["optional"]]
    _more = _description["inputs"][len(_given) : _description["positional"]]
    functions[f"{_name}_step"] = _without_gradient(f"{_name}_step", *_given, "state", *_more)
