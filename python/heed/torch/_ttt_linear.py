# ttt_linear as an operator of PyTorch, and the functions of heed.torch.
"""`torch.ops.heed.ttt_linear`, its gradients, heed.torch.ttt_linear and its step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import heed
from heed import InvalidArgument, _signatures
from heed.torch._functions import _without_gradient
from heed.torch._test_time_training import Memory, check_shapes, normalised, wide


def _composition(q, k, v, weight, bias, eta, lr, initial_state, *, mini_batch, eps, scale, residual):
    """o and the final state, in the equations of ttt_linear.h."""
    B, T, H, K = check_shapes("ttt_linear", q, lambda B, T, H, K: {
        "k": (k, q.shape), "v": (v, q.shape), "weight": (weight, (H, K)), "bias": (bias, (H, K)),
        "eta": (eta, (B, T, H)), "lr": (lr, (B, T, H)),
        "initial_state": (initial_state, (B, H, 2, K + 1, K))})  # fmt: skip
    if residual not in ("query", "output"):
        raise InvalidArgument(f"ttt_linear: residual is {residual!r}, expected 'query' or 'output'")
    dtype, of_state = q.dtype, wide(q)
    q, k, v = (x.to(of_state).transpose(1, 2) for x in (q, k, v))  # [B, H, T, K]
    eta, lr = (None if x is None else x.to(of_state).transpose(1, 2)[..., None] for x in (eta, lr))
    w, c = (x.to(of_state)[:, None] for x in (weight, bias))
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
        x, r = normalised(keys @ W, eps)
        y = w * (w * x + c - (own_v - own_k))
        g = r * (y - y.mean(-1, keepdim=True) - x * (x * y).mean(-1, keepdim=True))
        if lr is not None:
            g = lr[:, :, begin:end] * g
        read = queries @ W - own_eta * ((queries @ keys.mT).tril() @ g)
        o.append((own_q if residual == "query" else read) + w * normalised(read, eps)[0] + c)
        G = keys.mT @ g
        if end - begin == mini_batch:
            W, G = W - own_eta[:, :, -1:] * G, torch.zeros_like(W)
    o = torch.cat(o, 2) if o else torch.zeros_like(q)
    return o.transpose(1, 2).to(dtype), torch.stack([W, G], 2)


_memory = Memory(
    "ttt_linear",
    "Tensor q, Tensor k, Tensor v, Tensor weight, Tensor bias, Tensor eta",
    "Tensor? lr, int mini_batch, float eps, float scale, str residual, Tensor? positions, Tensor? initial_state, "
    "Tensor? lengths, Tensor? starts, Tensor? cu_seqlens, int? threads",
    lambda K: (2, K + 1, K),
    _composition,
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
    return _memory(return_state, q=q, k=k, v=v, weight=weight, bias=bias, eta=eta, lr=lr, mini_batch=mini_batch,
                   eps=eps, scale=scale, residual=residual, positions=positions, initial_state=initial_state,
                   lengths=lengths, starts=starts, cu_seqlens=cu_seqlens, threads=threads)


ttt_linear.__module__ = "heed.torch"
ttt_linear.__doc__ = _signatures.text_on_tensors(heed.ttt_linear) + """

In PyTorch. Gradients reach q, k, v, weight, bias, eta, lr and initial_state; also second ones and those of forward
mode, without positions, lengths, starts and cu_seqlens. The operator is torch.ops.heed.ttt_linear."""
ttt_linear.__signature__ = _signatures.of_tensors(heed.ttt_linear)

ttt_linear_step = _without_gradient("ttt_linear_step", "q", "k", "v", "weight", "bias", "eta", "state")
