# Operators of memories that are trained while they read: TTT-Linear and Titans.
"""heed.torch.ttt_linear and heed.torch.titans have these parts in common.

Second derivatives and forward mode are those of a composition of PyTorch's functions, mini-batch by mini-batch, of
calls whose sequences are whole rows of the batch and begin with a mini-batch.
"""

from __future__ import annotations

import functools
import inspect

import torch

from heed import InvalidArgument, Unsupported, _core
from heed.torch import _composed_derivatives, _dispatch

_FIRST = 3  # of the backward operator's arguments that are the forward's


def wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalised(z, eps):
    """LN(z) without weight and bias, and 1 / sqrt(var(z) + eps)."""
    centred = z - z.mean(-1, keepdim=True)
    r = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * r, r


def check_shapes(name, q, shapes):
    """Returns the axes of q. shapes(*axes) has tensors and their shapes by name; absent tensors pass."""
    if q.dim() != 4:
        raise InvalidArgument(f"{name}: q has shape {list(q.shape)}, expected [B, T, H, K]")
    for key, (x, shape) in shapes(*q.shape).items():
        if x is not None and x.shape != shape:
            raise InvalidArgument(f"{name}: {key} has shape {list(x.shape)}, expected {list(shape)}")
    return q.shape


class Memory:
    """`torch.ops.heed.NAME` and its gradients.

    `tensors` and `options` are the arguments in PyTorch's schema, those that are always present and others.
    `composition` computes o and the state: its positional arguments are the differentiable ones, its keywords the
    options that it has. `state_axes(K)` gives the state's axes after B and H.
    """

    def __init__(self, name, tensors, options, state_axes, composition):
        self.name, self.state_axes, self.composition = name, state_axes, composition
        self.names = tuple(argument.split()[-1] for argument in f"{tensors}, {options}".split(", "))
        self.required = tensors.count(",") + 1
        kinds = {key: p.kind for key, p in inspect.signature(composition).parameters.items()}
        self.differentiable = [self.names.index(key) for key, kind in kinds.items()
                               if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]  # fmt: skip
        self.keywords = [key for key, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
        self.backward_operator = _dispatch.define(
            f"{name}_backward",
            f"(Tensor grad_o, Tensor? grad_state, bool[] needed, {tensors}, {options}) -> Tensor[]",
            self._backward,
            lambda grad_o, grad_state, needed, *arguments: self._present(self._new_gradients(arguments, needed)),
            gradients=self._differentiate_twice,
            names=("the gradient of o", "the gradient of the state", "needed", *self.names),
        )
        self.operator = _dispatch.define(
            name,
            f"({tensors}, {options}) -> (Tensor o, Tensor state)",
            self._forward,
            self._results,
            gradients=self._differentiate,
        )

    def __call__(self, return_state, **arguments):
        """o, or o and the state. Arguments are all of the operator's."""
        name = self.name
        _dispatch.check_bools(name, return_state=return_state)
        _dispatch.check_int(name, "mini_batch", arguments["mini_batch"], 1)
        _dispatch.check_tensors(name, **{key: arguments[key] for key in self.names[: self.required]})
        given = (self.names[i] for i in self.differentiable[self.required:])
        _dispatch.check_tensors(name, **{key: arguments[key] for key in given if arguments[key] is not None})
        for key in ("positions", "lengths", "starts", "cu_seqlens"):
            arguments[key] = _dispatch.numbers(name, key, arguments[key], torch.int64)
        values = tuple(arguments[key] for key in self.names)
        if _dispatch.in_forward_mode():
            composed, tensors = self._composed(values)
            o, state = composed(*tensors)
        else:
            o, state = _dispatch.call(name, self.operator, *values)
        return (o, state) if return_state else o

    def _complete(self, arguments):
        """All arguments: PyTorch leaves trailing ones away that have their defaults."""
        return [*arguments, *[None] * (len(self.names) - len(arguments))]

    def _results(self, *arguments):
        """New tensors for o and the state."""
        q, v, *_, cu_seqlens, _ = (arguments[0], *self._complete(arguments)[2:])
        for key, x, axes in (("q", q, "H, K"), ("v", v, "H, V")):
            if x.dim() != 4:
                raise InvalidArgument(f"{self.name}: {key} has shape {list(x.shape)}, expected [B, T, {axes}]")
        sequences = _dispatch.num_sequences(self.name, q.shape[0], cu_seqlens)
        heads, channels = q.shape[2:]
        return q.new_empty(q.shape), q.new_empty((sequences, heads, *self.state_axes(channels)), dtype=wide(q))

    def _forward(self, *arguments):
        results = self._results(*arguments)
        call = getattr(_core, f"_torch_{self.name}")
        call(*arguments[: self.required], *results, *arguments[self.required:])
        return results

    def _new_gradients(self, arguments, needed):
        return [
            torch.empty_like(arguments[i], memory_format=torch.contiguous_format) if need else None
            for i, need in zip(self.differentiable, needed, strict=True)
        ]

    @staticmethod
    def _present(gradients):
        return [x for x in gradients if x is not None]

    def _backward(self, grad_o, grad_state, needed, *arguments):
        gradients = self._new_gradients(arguments, needed)
        call = getattr(_core, f"_torch_{self.name}_backward")
        call(grad_o, grad_state, *arguments[: self.required], *gradients, *arguments[self.required:])
        return self._present(gradients)

    def _composed(self, arguments):
        """The composition as a function of the differentiable arguments, and these."""
        arguments = dict(zip(self.names, self._complete(arguments), strict=True))
        for key in ("positions", "lengths", "starts", "cu_seqlens"):
            if arguments[key] is not None:
                raise Unsupported(f"{self.name}: a second or forward derivative was asked for with {key}, which heed "
                                  "does not have")
        options = {key: arguments[key] for key in self.keywords}
        tensors = [arguments[self.names[i]] for i in self.differentiable]
        return functools.partial(self.composition, **options), tensors

    def _differentiate(self, needed, of_results, *arguments):
        wanted = [i < len(needed) and bool(needed[i]) for i in self.differentiable]
        of_o, of_state = of_results
        if _dispatch.in_forward_mode():
            composed, tensors = self._composed(arguments)
            found = _composed_derivatives.gradients(composed, (of_o, of_state), wanted, tensors, ())
        else:
            of_o = torch.zeros_like(arguments[0]) if of_o is None else of_o
            found = self.backward_operator(of_o, of_state, wanted, *arguments)
        return dict(zip((i for i, want in zip(self.differentiable, wanted) if want), found))

    def _differentiate_twice(self, needed, of_results, of_o, of_state, computed, *arguments):
        composed, tensors = self._composed(arguments)
        places = (0, 1, *(_FIRST + i for i in self.differentiable))
        found = _composed_derivatives.of_gradients(composed, [i < len(needed) and needed[i] for i in places],
                                                   of_results, (of_o, of_state), computed, tensors, ())
        return {places[i]: x for i, x in found.items()}
