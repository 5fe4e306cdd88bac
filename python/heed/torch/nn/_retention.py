# heed.torch.nn.MultiScaleRetention: the mixing layer of RetNet.
"""MultiScaleRetention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument
from heed.torch._layer_rows import gated_rows
from heed.torch.nn._layer import Layer, State, check_multiple, check_sizes, is_step, zero_state


class MultiScaleRetention(Layer):
    """Retention: linear attention with a constant decay per head, rotary encoding and a gate.

        q = rotary(x W_q)   k = rotary(x W_k)   v = x W_v   g = x W_g
        S_t = e^{log_decay_h} S_{t-1} + k_t v_t^T;   y = (silu(g) norm_h(head_dim^-1/2 S_t^T q_t)) W_o

    x, y [B, T, hidden_size]; q, k [B, T, num_heads, hidden_size / num_heads], v and g value_factor times as wide;
    norm_h: RMS norm per head without weights; log_decay: log(1 - 2^(-5-h)) unless given. Transformers has no such
    module; the names are q_proj, k_proj, v_proj, g_proj, out_proj, as in torchscale's MultiScaleRetention with RMS
    norm, whose interleaved rotary encoding ends at another frequency. Source: Sun et al., arXiv:2307.08621.

    State: S [B, num_heads, K, V], float32.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, value_factor: int = 2, log_decay: Any = None,
                 base: float = 10000.0, eps: float = 1e-6, bias: bool = False, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        name, factory = "MultiScaleRetention", {"device": device, "dtype": dtype}
        check_sizes(name, hidden_size=hidden_size, num_heads=num_heads, value_factor=value_factor)
        check_multiple(name, "hidden_size", hidden_size, "2 num_heads", 2 * num_heads)
        self.hidden_size, self.num_heads, self.key_dim, self.eps = hidden_size, num_heads, hidden_size // num_heads, eps
        self.rotary = {"base": base, "interleaved": False}
        if log_decay is None:
            log_decay = [math.log1p(-(2.0 ** (-5 - head))) for head in range(num_heads)]
        decay = torch.as_tensor(log_decay, dtype=torch.float64, device="cpu")
        if decay.shape != (num_heads,):
            raise InvalidArgument(f"{name}: log_decay has shape {list(decay.shape)}, expected [{num_heads}]")
        self._log_decay = decay.tolist()  # no buffer, which .bfloat16() would round and .to_empty() lose
        for key, factor in (("q_proj", 1), ("k_proj", 1), ("v_proj", value_factor), ("g_proj", value_factor)):
            self.add_module(key, nn.Linear(hidden_size, factor * hidden_size, bias=bias, **factory))
        self.out_proj = nn.Linear(value_factor * hidden_size, hidden_size, bias=bias, **factory)

    @property
    def log_decay(self) -> Tensor:
        """[num_heads], float32 (float64 of a float64 layer), on the layer's device."""
        weight = self.out_proj.weight
        return torch.tensor(self._log_decay, dtype=torch.promote_types(weight.dtype, torch.float32),
                            device=weight.device)

    def new_state(self, batch: int) -> State:  # type: ignore[override]
        sizes = (self.num_heads, self.key_dim, self.out_proj.in_features // self.num_heads)
        return State(batch, {"S": zero_state(self.out_proj.weight, batch, *sizes)})

    def forward(self, x: Tensor, state: State | None = None, *, lengths: Any = None) -> Tensor:
        x, lengths = self._check(x, state, State, lengths)
        at = torch.arange(x.shape[1])
        at = at if state is None else state.lengths[:, None] + at
        q, k, v = (project(x).unflatten(-1, (self.num_heads, -1))
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (heed.torch.rotary(rows, at, **self.rotary) for rows in (q, k))
        if state is None:
            o = heed.torch.retention(q, k, v, log_decay=self.log_decay, lengths=lengths)
        elif is_step(x, lengths):
            o = heed.torch.retention_step(q[:, 0], k[:, 0], v[:, 0], state.S, log_decay=self.log_decay)[:, None]
        else:
            o, state.tensors["S"] = heed.torch.retention(
                q, k, v, log_decay=self.log_decay, lengths=lengths, initial_state=state.S, return_state=True)
        if state is not None:
            state.lengths += x.shape[1] if lengths is None else lengths
        gate = self.g_proj(x).unflatten(-1, (self.num_heads, -1))
        return self.out_proj(gated_rows(o, gate, norm="rms", eps=self.eps).flatten(2))
