# heed.torch's mechanisms without a state: an operator with gradients for each that the extension module knows.
"""Mechanisms that are a function of their tensors and remember nothing, as operators of PyTorch.

There is no list of them here: `heed._core` names the tensors of each that is built in, and each becomes
`torch.ops.heed.<name>`, `torch.ops.heed.<name>_backward` and the function `<name>` of heed.torch. The result has the shape
of v.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch

_OPTIONS = {"scale": "float?", "lengths": "Tensor?", "starts": "Tensor?", "cu_seqlens": "Tensor?", "threads": "int?"}


class _Mechanism:
    """One mechanism: its operators."""

    def __init__(self, name: str, inputs: list[str]):
        self.name, self.inputs = name, tuple(inputs)
        self.forward_kernel = getattr(_core, f"_torch_{name}")
        self.backward_kernel = getattr(_core, f"_torch_{name}_backward")
        rest = ", ".join([*(f"Tensor {x}" for x in inputs), *(f"{kind} {x}=None" for x, kind in _OPTIONS.items())])
        self.backward_operator = _dispatch.define(
            f"{name}_backward", f"(Tensor grad_o, bool[] needed, {rest}) -> Tensor[]", self.backward, self.fake_backward
        )
        self.operator = _dispatch.define(
            name, f"({rest}) -> Tensor", self.forward, self.result, gradients=self.differentiate
        )

    def complete(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """PyTorch leaves trailing defaults away."""
        return (*arguments, *(None,) * (len(self.inputs) + len(_OPTIONS) - len(arguments)))

    def result(self, *arguments: Any) -> Tensor:
        q, v = (arguments[self.inputs.index(name)] for name in "qv")
        for name, x in (("q", q), ("v", v)):
            if x.dim() != 4:
                raise InvalidArgument(f"{self.name}: {name} has shape {list(x.shape)}, expected rank 4: [B, T, H, D]")
        return torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)

    def forward(self, *arguments: Any) -> Tensor:
        o = self.result(*arguments)
        self.forward_kernel(*(x.detach() if isinstance(x, Tensor) else x for x in self.complete(arguments)), o)
        return o

    def new_gradients(self, needed: list[bool], arguments: tuple[Any, ...]) -> list[Tensor | None]:
        return [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(arguments[: len(self.inputs)], needed, strict=True)
        ]

    def backward(self, grad_o: Tensor, needed: list[bool], *arguments: Any) -> list[Tensor]:
        gradients = self.new_gradients(needed, arguments)
        self.backward_kernel(grad_o, *self.complete(arguments), *gradients)
        return [x for x in gradients if x is not None]

    def fake_backward(self, grad_o: Tensor, needed: list[bool], *arguments: Any) -> list[Tensor]:
        return [x for x in self.new_gradients(needed, arguments) if x is not None]

    def differentiate(self, needed: tuple[bool, ...], of_results: tuple[Any, ...], *arguments: Any) -> dict[int, Any]:
        wanted = [bool(need) for need in needed[: len(self.inputs)]]
        found = self.backward_operator(of_results[0], wanted, *arguments)
        return dict(zip((i for i, want in enumerate(wanted) if want), found))

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """The function of heed.torch: heed's own signature, without out."""
        if len(inputs) > len(self.inputs):
            raise TypeError(f"{self.name}() takes {len(self.inputs)} positional arguments but {len(inputs)} were given")
        values = dict(zip(self.inputs, inputs))
        for name in self.inputs[len(inputs):]:
            if name not in options:
                raise TypeError(f"{self.name}() is missing the argument {name!r}")
            values[name] = options.pop(name)
        _dispatch.check_tensors(self.name, **values)
        known = {name: options.pop(name, None) for name in _OPTIONS}
        if options:
            raise _dispatch.unexpected(self.name, next(iter(options)), (*self.inputs, *known))
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            for name, x in values.items():
                if x.is_floating_point() and x.dtype != torch.float64:
                    values[name] = x.to(dtype)
        for name in ("lengths", "starts", "cu_seqlens"):
            known[name] = _dispatch.numbers(self.name, name, known[name], torch.int64)
        return self.operator(*values.values(), *known.values())


def _public(mechanism: _Mechanism) -> Any:
    @functools.wraps(getattr(heed, mechanism.name), assigned=("__name__", "__qualname__"))
    def function(*inputs: Any, **options: Any) -> Tensor:
        return mechanism(*inputs, **options)

    function.__module__ = "heed.torch"
    function.__doc__ = _signatures.text_on_tensors(getattr(heed, mechanism.name))
    function.__signature__ = _signatures.of_tensors(getattr(heed, mechanism.name), without=("out",))
    return function


functions: dict[str, Any] = {name: _public(_Mechanism(name, inputs)) for name, inputs in _core._stateless.items()}
