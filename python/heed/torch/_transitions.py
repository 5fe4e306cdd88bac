# The operators of PaTH and Wall attention, in what they share: softmax attention with transitions.
"""Operators of inputs that begin with q, k, v and end with log_forget, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from heed import InvalidArgument, _core
from heed.torch import _composed_derivatives, _dispatch

_OPTIONS = "float? scale, Tensor? lengths, Tensor? starts, Tensor? cu_seqlens, int? threads"
_OPTION_NAMES = ("scale", "lengths", "starts", "cu_seqlens", "threads")
_FIRST = 5  # of the backward operator's arguments that are the forward's


class Operator:
    """torch.ops.heed.<name> and <name>_backward. `tensors` declares the inputs, which have gradients; `composition`
    computes o and lse by PyTorch's functions, for second derivatives and forward mode."""

    def __init__(self, name, tensors, composition):
        self.name, self.composition = name, composition
        names = (*(x.split()[1] for x in tensors.split(", ")), *_OPTION_NAMES)
        self.inputs = len(names) - len(_OPTION_NAMES)
        self._backward_operator = _dispatch.define(
            f"{name}_backward",
            f"(Tensor grad_o, Tensor? grad_lse, Tensor o, Tensor lse, bool[] needed, {tensors}, {_OPTIONS})"
            " -> Tensor[]",
            self._backward,
            self._fake_backward,
            gradients=self._differentiate_twice,
            names=("the gradient of o", "the gradient of lse", "o", "lse", "needed", *names),
        )
        self._operator = _dispatch.define(
            name,
            f"({tensors}, {_OPTIONS}) -> (Tensor o, Tensor lse)",
            self._forward,
            self._results,
            gradients=self._differentiate,
            keeps_results=True,
        )

    def __call__(self, tensors, scale, lengths, starts, cu_seqlens, threads, return_lse) -> Any:
        """o, or o and lse; `tensors` by their names, the last one optional."""
        _dispatch.check_bools(self.name, return_lse=return_lse)
        given = dict(tensors)
        if given["log_forget"] is None:
            del given["log_forget"]
        _dispatch.check_tensors(self.name, **given)
        sequences = (
            _dispatch.numbers(self.name, key, x, torch.int64)
            for key, x in (("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
        )
        arguments = (*tensors.values(), scale, *sequences, threads)
        if _dispatch.in_forward_mode():
            results = self.composition(*arguments)
        else:
            results = _dispatch.call(self.name, self._operator, *arguments)
        return tuple(results) if return_lse else results[0]

    def _results(self, q, k, v, *others):
        """New tensors for o and lse."""
        for name, x, axes in (("q", q, "H, D"), ("v", v, "Hkv, Dv")):
            if x.dim() != 4:
                raise InvalidArgument(f"{self.name}: {name} has shape {list(x.shape)}, expected [B, T, {axes}]")
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        batch, tokens, heads, _ = q.shape
        return q.new_empty((batch, tokens, heads, v.shape[3])), q.new_empty((batch, heads, tokens), dtype=wide)

    def _forward(self, *arguments):
        results = self._results(*arguments)
        getattr(_core, f"_torch_{self.name}")(*arguments[:self.inputs], *results, *arguments[self.inputs:])
        return results

    def _new_gradients(self, inputs, needed):
        return [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(inputs, needed, strict=True)
        ]

    def _backward(self, grad_o, grad_lse, o, lse, needed, *arguments):
        inputs, options = arguments[:self.inputs], arguments[self.inputs:]
        gradients = self._new_gradients(inputs, needed)
        getattr(_core, f"_torch_{self.name}_backward")(grad_o, grad_lse, *inputs, o, lse, *gradients, *options)
        return [x for x in gradients if x is not None]

    def _fake_backward(self, grad_o, grad_lse, o, lse, needed, *arguments):
        return [x for x in self._new_gradients(arguments[:self.inputs], needed) if x is not None]

    def _differentiate(self, needed, of_results, *arguments_and_results):
        *arguments, o, lse = arguments_and_results
        wanted = [bool(need) for need in needed[:self.inputs]]
        tensors, options = arguments[:self.inputs], arguments[self.inputs:]
        of_o, of_lse = of_results
        if _dispatch.in_forward_mode():
            found = _composed_derivatives.gradients(self.composition, (of_o, of_lse), wanted, tensors, options)
        else:
            of_o = torch.zeros_like(o) if of_o is None else of_o
            found = self._backward_operator(of_o, of_lse, o, lse, wanted, *arguments)
        return dict(zip((i for i, want in enumerate(wanted) if want), found))

    def _differentiate_twice(self, needed, of_results, of_o, of_lse, o, lse, computed, *arguments):
        tensors, options = arguments[:self.inputs], arguments[self.inputs:]
        places = (0, 1, *range(_FIRST, _FIRST + self.inputs))
        found = _composed_derivatives.of_gradients(self.composition, [needed[i] for i in places], of_results,
                                                   (of_o, of_lse), computed, tensors, options)
        return {places[i]: x for i, x in found.items()}
