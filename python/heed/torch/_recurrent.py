# heed.torch's recurrent mechanisms: an operator with gradients for each that the extension module knows.
"""Recurrent mechanisms as operators of PyTorch.

There is no list of them here: `heed._core` describes each that is built in (its inputs and the settings that it alone
has), and each becomes `torch.ops.heed.<name>`, `torch.ops.heed.<name>_backward` and the functions `<name>` and
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

_TYPES = {bool: "bool", float: "float", str: "str", tuple: "float[]?"}
_OPTIONS = (
    "float? scale=None, {states}Tensor? lengths=None, Tensor? starts=None, Tensor? cu_seqlens=None, bool reverse=False, "
    "int? threads=None"
)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "None"  # the operator's default for a range, which stands for the mechanism's
    return f'"{value}"' if isinstance(value, str) else str(value)


class _Mechanism:
    """One mechanism: its operators, and what they need to know of shapes."""

    def __init__(self, name: str, description: dict[str, Any]):
        self.name = name
        self.inputs = tuple(description["inputs"])
        self.settings = description["settings"]
        self.optional = tuple(description["optional"])
        self.nullable = (*self.optional, *description["nullable"])
        self.several_writes = description["several_writes"]
        self.rows = tuple(description["rows"])
        self.query, self.value = description["query"], description["value"]
        self.channels = description["channels"]
        self.axes = "B, T, C" if self.channels else "B, T, H, D"
        self.value_axes = "B, T, n, H, D" if self.several_writes else self.axes
        self.value_first, self.has_state = description["value_first"], description["has_state"]
        self.features, self.state_type = description["features"], description["state_type"]
        self.projected = "projection" in self.inputs
        self.states = ("state", *description["state"][1:])  # of operators: state, z, m
        self.has_maximum = len(self.states) == 3
        self.forward_kernel = getattr(_core, f"_torch_{name}")
        self.backward_kernel = getattr(_core, f"_torch_{name}_backward")
        tensors = [
            f"Tensor? {x}=None" if x in self.optional else f"Tensor{'?' * (x in self.nullable)} {x}" for x in self.inputs
        ]
        settings = [f"{_TYPES[type(x)]} {key}={_text(x)}" for key, x in self.settings.items()]
        states = "".join(f"Tensor? initial_{x}=None, " for x in self.states)
        rest = ", ".join([*tensors, *settings, _OPTIONS.format(states=states)])
        gradients = "Tensor grad_o, Tensor? grad_state, Tensor? grad_z, bool[] needed, "
        self.backward_operator = _dispatch.define(
            f"{name}_backward", f"({gradients}{rest}) -> Tensor[]", self.backward, self.fake_backward
        )
        self.operator = _dispatch.define(
            name, f"({rest}) -> ({', '.join(['Tensor'] * (1 + len(self.states)))})", self.forward, self.results,
            gradients=self.differentiate,
        )
        self.first_option = len(self.inputs) + len(self.settings)
        settings = (None if isinstance(x, tuple) else x for x in self.settings.values())
        self.defaults = (*(None for _ in self.inputs), *settings, *(None,) * (4 + len(self.states)), False, None)

    def output_shape(self, v: Tensor) -> tuple[int, ...]:
        return tuple(v.shape) if self.channels else (*v.shape[:2], *v.shape[-2:])

    def complete(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """PyTorch leaves trailing defaults away."""
        return (*arguments, *self.defaults[len(arguments):])

    def results(self, *arguments: Any) -> tuple[Tensor, ...]:
        """New tensors for o and the final states; states that do not exist are empty."""
        arguments = self.complete(arguments)
        given = dict(zip(self.inputs, arguments))
        q, v = given[self.query], given[self.value]
        for name, x, axes in ((self.query, q, self.axes), (self.value, v, self.value_axes)):
            if x.dim() != axes.count(",") + 1:
                raise InvalidArgument(f"{self.name}: {name} has shape {list(x.shape)}, expected [{axes}]")
        settings = dict(zip(self.settings, arguments[len(self.inputs):]))
        sequences = _dispatch.num_sequences(self.name, q.shape[0], arguments[-3])
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        o = v.new_empty(self.output_shape(v))
        if self.channels:
            whole = sizes = (sequences, v.shape[2])
        else:
            features = given["projection"].shape[0] if self.projected else self.features(int(q.shape[3]))
            sizes = (sequences, v.shape[-2], features)
            whole = (*sizes[:2], v.shape[-1], sizes[2]) if self.value_first else (*sizes, v.shape[-1])
        has_state = self.has_state and settings.get("causal", True)
        state = q.new_empty(whole if has_state else (0,), dtype=dtype)
        z = q.new_empty(sizes if has_state and settings.get("normalize", self.has_maximum) else (0,), dtype=dtype)
        if not self.has_maximum:
            return o, state, z
        return o, state, z, q.new_empty(sizes[:2] if has_state else (0,), dtype=dtype)

    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        arguments = self.complete(arguments)
        o, *states = self.results(*arguments)
        wanted = (x if x.dim() > 1 else None for x in states)
        self.forward_kernel(*(x.detach() if isinstance(x, Tensor) else x for x in arguments), o, *wanted)
        return o, *states

    def new_gradients(self, needed: list[bool], *arguments: Any) -> list[Tensor | None]:
        """New tensors for what is needed of the inputs and the initial states, in order."""
        arguments = self.complete(arguments)
        at = self.first_option + 1
        inputs = (*arguments[: len(self.inputs)], *arguments[at : at + 2])
        return [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(inputs, needed, strict=True)
        ]

    def backward(self, grad_o: Tensor, grad_state: Any, grad_z: Any, needed: list[bool], *arguments: Any) -> list[Tensor]:
        gradients = self.new_gradients(needed, *arguments)
        self.backward_kernel(grad_o, grad_state, grad_z, *self.complete(arguments), *gradients)
        return [x for x in gradients if x is not None]

    def fake_backward(self, grad_o: Any, grad_state: Any, grad_z: Any, needed: list[bool], *arguments: Any) -> list[Tensor]:
        return [x for x in self.new_gradients(needed, *arguments) if x is not None]

    def differentiate(self, needed: tuple[bool, ...], of_results: tuple[Any, ...], *arguments: Any) -> dict[int, Any]:
        arguments = self.complete(arguments)
        at = [*range(len(self.inputs)), self.first_option + 1, self.first_option + 2]
        wanted = [i < len(needed) and needed[i] for i in at]
        grad_o, *of_states = of_results[:3]  # a maximum counts as a constant
        if grad_o is None:
            v = arguments[self.inputs.index(self.value)]
            grad_o = v.new_zeros(self.output_shape(v))
        grad_state, grad_z = (g if g is not None and g.dim() > 1 else None for g in of_states)
        found = self.backward_operator(grad_o, grad_state, grad_z, wanted, *arguments)
        return dict(zip((i for i, want in zip(at, wanted) if want), found))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The function of heed.torch: heed's own signature."""
        positional = len(self.inputs) - len(self.optional)
        if len(inputs) > positional:
            raise TypeError(f"{self.name}() takes {positional} positional arguments but {len(inputs)} were given")
        values = dict(zip(self.inputs, inputs))
        for name in self.inputs[len(inputs):]:
            if name in options:
                values[name] = options.pop(name)
            elif name not in self.optional:
                raise TypeError(f"{self.name}() is missing the argument {name!r}")
        required = {name: x for name, x in values.items() if x is not None or name not in self.nullable}
        _dispatch.check_tensors(self.name, **required)
        return_state = self.has_state and options.pop("return_state", False)
        if return_state and options.get("causal", self.settings.get("causal")) is False:
            raise InvalidArgument(f"{self.name}: return_state is True, expected False: without causal there is no state")
        initial = options.pop("initial_state", None) if self.has_state else None
        initial = tuple(initial) if isinstance(initial, (tuple, list)) else (initial,)
        initial += (None,) * (len(self.states) - len(initial))
        settings = {key: options.pop(key, default) for key, default in self.settings.items()}
        known = dict(_DEFAULTS)
        for key in known:
            if self.has_state or key != "reverse":
                known[key] = options.pop(key, known[key])
        if options:
            states = ("initial_state", "return_state") if self.has_state else ()
            keywords = (*self.inputs, *self.settings, *known, *states)
            raise _dispatch.unexpected(self.name, next(iter(options)), keywords)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            for name in self.rows:
                x = values.get(name)
                if x is not None and x.is_floating_point() and x.dtype != torch.float64:
                    values[name] = x.to(dtype)
        o, *states = self.operator(
            *(values.get(name) for name in self.inputs), *settings.values(), known["scale"], *initial,
            *(_dispatch.numbers(self.name, name, known[name], torch.int64) for name in ("lengths", "starts", "cu_seqlens")),
            known["reverse"], known["threads"],
        )
        if not return_state:
            return o
        states = [x for x in states if x.dim() > 1]
        return o, self.state_type(*states) if len(states) > 1 else states[0]


_DEFAULTS = {"scale": None, "lengths": None, "starts": None, "cu_seqlens": None, "reverse": False, "threads": None}


def _public(mechanism: _Mechanism) -> Any:
    @functools.wraps(getattr(heed, mechanism.name), assigned=("__name__", "__qualname__"))
    def function(*inputs: Any, **options: Any) -> Any:
        return mechanism(*inputs, **options)

    function.__module__ = "heed.torch"
    function.__doc__ = _signatures.text_on_tensors(getattr(heed, mechanism.name))
    function.__signature__ = _signatures.of_tensors(getattr(heed, mechanism.name), without=("out",))
    return function


functions: dict[str, Any] = {}
for _name, _description in _core._recurrent.items():
    functions[_name] = _public(_Mechanism(_name, _description))
    if not _description["has_state"]:
        continue
    _given = (x for x in _description["inputs"] if x not in _description["optional"])
    functions[f"{_name}_step"] = _without_gradient(f"{_name}_step", *_given, "state")
