# ttt_linear as an operator of PyTorch, and the functions of heed.torch.
"""`torch.ops.heed.ttt_linear`, its gradients, heed.torch.ttt_linear and its step.

Second derivatives and forward mode are those of a composition of PyTorch's functions, mini-batch by mini-batch, of
calls whose sequences are whole rows of the batch and begin with a mini-batch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import heed
from heed import InvalidArgument, Unsupported, _core, _signatures
from heed.torch import _composed_derivatives, _dispatch
from heed.torch._functions import _without_gradient

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor weight, Tensor bias, Tensor eta"
_OPTIONS = (
    "Tensor? lr, int mini_batch, float eps, float scale, str residual, Tensor? positions, Tensor? initial_state, "
    "Tensor? lengths, Tensor? starts, Tensor? cu_seqlens, int? threads"
)
_NAMES = ("q", "k", "v", "weight", "bias", "eta", "lr", "mini_batch", "eps", "scale", "residual", "positions",
          "initial_state", "lengths", "starts", "cu_seqlens", "threads")  # fmt: skip
_REQUIRED = 6
_DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 6, 12)
_FIRST = 3  # of the backward operator's arguments that are the forward's


def _wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _complete(arguments):
    """All arguments: PyTorch leaves trailing ones away that have their defaults."""
    return [*arguments, *[None] * (len(_NAMES) - len(arguments))]


def _results(*arguments):
    """New tensors for o and the state."""
    q, v, *_, cu_seqlens, _ = (arguments[0], *_complete(arguments)[2:])
    for name, x, axes in (("q", q, "H, K"), ("v", v, "H, V")):
        if x.dim() != 4:
            raise InvalidArgument(f"ttt_linear: {name} has shape {list(x.shape)}, expected [B, T, {axes}]")
    sequences = _dispatch.num_sequences("ttt_linear", q.shape[0], cu_seqlens)
    heads, channels = q.shape[2:]
    return q.new_empty(q.shape), q.new_empty((sequences, heads, 2, channels + 1, channels), dtype=_wide(q))


def _forward(*arguments):
    results = _results(*arguments)
    _core._torch_ttt_linear(*arguments[:_REQUIRED], *results, *arguments[_REQUIRED:])
    return results


def _new_gradients(arguments, needed):
    return [
        torch.empty_like(arguments[i], memory_format=torch.contiguous_format) if need else None
        for i, need in zip(_DIFFERENTIABLE, needed, strict=True)
    ]


def _backward(grad_o, grad_state, needed, *arguments):
    gradients = _new_gradients(arguments, needed)
    _core._torch_ttt_linear_backward(grad_o, grad_state, *arguments[:_REQUIRED], *gradients, *arguments[_REQUIRED:])
    return [x for x in gradients if x is not None]


def _fake_backward(grad_o, grad_state, needed, *arguments):
    return [x for x in _new_gradients(arguments, needed) if x is not None]


def _normalised(z, eps):
    """LN(z) without weight and bias, and 1 / sqrt(var(z) + eps)."""
    centred = z - z.mean(-1, keepdim=True)
    r = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * r, r


def _composition(q, k, v, weight, bias, eta, lr, initial_state, *, mini_batch, eps, scale, residual):
    """o and the final state, in the equations of ttt_linear.h."""
    if q.dim() != 4:
        raise InvalidArgument(f"ttt_linear: q has shape {list(q.shape)}, expected [B, T, H, K]")
    B, T, H, K = q.shape
    for name, x, shape in (("k", k, q.shape), ("v", v, q.shape), ("weight", weight, (H, K)), ("bias", bias, (H, K)),
                           ("eta", eta, (B, T, H)), ("lr", lr, (B, T, H)),
                           ("initial_state", initial_state, (B, H, 2, K + 1, K))):
        if x is not None and x.shape != shape:
            raise InvalidArgument(f"ttt_linear: {name} has shape {list(x.shape)}, expected {list(shape)}")
    if residual not in ("query", "output"):
        raise InvalidArgument(f"ttt_linear: residual is {residual!r}, expected 'query' or 'output'")
    dtype, wide = q.dtype, _wide(q)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))  # [B, H, T, K]
    eta, lr = (None if x is None else x.to(wide).transpose(1, 2)[..., None] for x in (eta, lr))
    w, c = (x.to(wide)[:, None] for x in (weight, bias))
    q = scale * q
    with_one = functools.partial(F.pad, pad=(0, 1), value=1.0)  # the input of b
    if initial_state is None:
        W = q.new_zeros((B, H, K + 1, K))
    else:
        W = initial_state[:, :, 0]
    G, o = torch.zeros_like(W), []
    for begin in range(0, T, mini_batch):
        end = min(begin + mini_batch, T)
        own_q, own_k, own_v, own_eta = (x[:, :, begin:end] for x in (q, k, v, eta))
        keys, queries = with_one(own_k), with_one(own_q)
        x, r = _normalised(keys @ W, eps)
        y = w * (w * x + c - (own_v - own_k))
        g = r * (y - y.mean(-1, keepdim=True) - x * (x * y).mean(-1, keepdim=True))
        if lr is not None:
            g = lr[:, :, begin:end] * g
        read = queries @ W - own_eta * ((queries @ keys.mT).tril() @ g)
        o.append((own_q if residual == "query" else read) + w * _normalised(read, eps)[0] + c)
        G = keys.mT @ g
        if end - begin == mini_batch:
            W, G = W - own_eta[:, :, -1:] * G, torch.zeros_like(W)
    o = torch.cat(o, 2) if o else torch.zeros_like(q)
    return o.transpose(1, 2).to(dtype), torch.stack([W, G], 2)


def _composed(arguments):
    """The composition as a function of the differentiable arguments, and these."""
    arguments = _complete(arguments)
    options = dict(zip(_NAMES[7:11], arguments[7:11]))
    for i in (11, 13, 14, 15):
        if arguments[i] is not None:
            raise Unsupported(f"ttt_linear: a second or forward derivative was asked for with {_NAMES[i]}, which heed "
                              "does not have")
    return functools.partial(_composition, **options), [arguments[i] for i in _DIFFERENTIABLE]


def _differentiate(needed, of_results, *arguments):
    wanted = [i < len(needed) and bool(needed[i]) for i in _DIFFERENTIABLE]
    of_o, of_state = of_results
    if _dispatch.in_forward_mode():
        composed, tensors = _composed(arguments)
        found = _composed_derivatives.gradients(composed, (of_o, of_state), wanted, tensors, ())
    else:
        of_o = torch.zeros_like(arguments[0]) if of_o is None else of_o
        found = _backward_operator(of_o, of_state, wanted, *arguments)
    return dict(zip((i for i, want in zip(_DIFFERENTIABLE, wanted) if want), found))


def _differentiate_twice(needed, of_results, of_o, of_state, computed, *arguments):
    composed, tensors = _composed(arguments)
    places = (0, 1, *(_FIRST + i for i in _DIFFERENTIABLE))
    found = _composed_derivatives.of_gradients(composed, [i < len(needed) and needed[i] for i in places], of_results,
                                               (of_o, of_state), computed, tensors, ())
    return {places[i]: x for i, x in found.items()}


_backward_operator = _dispatch.define(
    "ttt_linear_backward",
    f"(Tensor grad_o, Tensor? grad_state, bool[] needed, {_TENSORS}, {_OPTIONS}) -> Tensor[]",
    _backward,
    _fake_backward,
    gradients=_differentiate_twice,
    names=("the gradient of o", "the gradient of the state", "needed", *_NAMES),
)
_operator = _dispatch.define(
    "ttt_linear",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor o, Tensor state)",
    _forward,
    _results,
    gradients=_differentiate,
)


@functools.wraps(heed.ttt_linear, assigned=("__name__",))
def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor,
    eta: Tensor,
    *,
    lr: Tensor | None = None,
    mini_batch: int = 16,
    eps: float = 1e-6,
    scale: float = 1.0,
    residual: str = "query",
    positions: Any = None,
    initial_state: Tensor | None = None,
    lengths: Any = None,
    starts: Any = None,
    cu_seqlens: Any = None,
    return_state: bool = False,
    threads: int | None = None,
) -> Any:
    name = "ttt_linear"
    _dispatch.check_bools(name, return_state=return_state)
    _dispatch.check_int(name, "mini_batch", mini_batch, 1)
    _dispatch.check_tensors(name, q=q, k=k, v=v, weight=weight, bias=bias, eta=eta)
    given = {"lr": lr, "initial_state": initial_state}
    _dispatch.check_tensors(name, **{key: x for key, x in given.items() if x is not None})
    positions, lengths, starts, cu_seqlens = (
        _dispatch.numbers(name, key, x, torch.int64)
        for key, x in (("positions", positions), ("lengths", lengths), ("starts", starts), ("cu_seqlens", cu_seqlens))
    )
    arguments = (q, k, v, weight, bias, eta, lr, mini_batch, eps, scale, residual, positions, initial_state, lengths,
                 starts, cu_seqlens, threads)
    if _dispatch.in_forward_mode():
        composed, tensors = _composed(arguments)
        o, state = composed(*tensors)
    else:
        o, state = _dispatch.call(name, _operator, *arguments)
    return (o, state) if return_state else o


ttt_linear.__module__ = "heed.torch"
ttt_linear.__doc__ = _signatures.text_on_tensors(heed.ttt_linear) + """

In PyTorch. Gradients reach q, k, v, weight, bias, eta, lr and initial_state; also second ones and those of forward
mode, without positions, lengths, starts and cu_seqlens. The operator is torch.ops.heed.ttt_linear."""
ttt_linear.__signature__ = _signatures.of_tensors(heed.ttt_linear)

ttt_linear_step = _without_gradient("ttt_linear_step", "q", "k", "v", "weight", "bias", "eta", "state")
