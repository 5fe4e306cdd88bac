# heed.torch.nn.Mamba: the mixer of Mamba-1.
"""Mamba."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed.torch.nn import _families
from heed.torch.nn._layer import Layer, State, check_sizes, convolved, is_step, new_convolution, new_steps
from heed.torch.nn._layer import wide, zero_state


class Mamba(Layer):
    """The selective state space of Mamba-1 with its convolution and gate.

        [u, z] = x W_in;   u = silu(conv(u));   [d, B, C] = u W_x;   dt = softplus(d W_dt + b_dt)
        h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t;   y = ((C_t h_t + D u_t) silu(z_t)) W_out           A = -exp(A_log)

    x, y [B, T, hidden_size]; u, z, dt [B, T, intermediate_size]; B, C [B, T, state_size]; d [B, T, time_step_rank].
    Parameters are those of Transformers' MambaMixer. Source: Gu and Dao, arXiv:2312.00752.

    State: conv [B, intermediate_size, conv_kernel - 1] and ssm [B, intermediate_size, state_size], float32.
    """

    def __init__(self, hidden_size: int, *, intermediate_size: int | None = None, state_size: int = 16,
                 conv_kernel: int = 4, time_step_rank: int | None = None, bias: bool = False, conv_bias: bool = True,
                 time_step_min: float = 0.001, time_step_max: float = 0.1, time_step_floor: float = 1e-4,
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = 2 * hidden_size if intermediate_size is None else intermediate_size
        rank = math.ceil(hidden_size / 16) if time_step_rank is None else time_step_rank
        check_sizes("Mamba", hidden_size=hidden_size, intermediate_size=inner, state_size=state_size,
                    conv_kernel=conv_kernel, time_step_rank=rank)
        self.hidden_size, self.sizes = hidden_size, (rank, state_size, state_size)
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=bias, **factory)
        self.conv1d = new_convolution(inner, conv_kernel, conv_bias, factory)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False, **factory)
        self.dt_proj = nn.Linear(rank, inner, bias=True, **factory)
        rates = torch.arange(1, state_size + 1, device=device, dtype=dtype or torch.get_default_dtype())
        self.A_log = nn.Parameter(rates.log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner, **factory))
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias, **factory)
        with torch.no_grad():
            nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
            self.dt_proj.bias.copy_(new_steps(inner, time_step_min, time_step_max, time_step_floor, factory))

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Mamba:
        """Reads a configuration of `model_type` mamba, or none."""
        c = _families.MAMBA.open(config)
        hidden_size, inner, rank = c["hidden_size"], c["intermediate_size"], c["time_step_rank"]
        expanded = int(c["expand"] * hidden_size)
        if "expand" in c.given or inner is None:
            if inner not in (None, expanded):
                raise c.refusal("intermediate_size", f"expand hidden_size, {expanded},")
            inner = expanded
        names = ("state_size", "conv_kernel", "time_step_min", "time_step_max", "time_step_floor")
        own = {**{name: c[name] for name in names}, "intermediate_size": inner, "bias": c["use_bias"],
               "conv_bias": c["use_conv_bias"], "time_step_rank": None if rank == "auto" else rank}
        c.close()
        return cls(hidden_size, **{**own, **options})

    def new_state(self, batch: int) -> State:  # type: ignore[override]
        inner, taps = self.conv1d.weight.shape[0], self.conv1d.weight.shape[2]
        return State(batch, {"conv": zero_state(self.D, batch, inner, taps - 1),
                             "ssm": zero_state(self.D, batch, inner, self.sizes[1])})

    def forward(self, x: Tensor, state: State | None = None, *, lengths: Any = None) -> Tensor:
        x, lengths = self._check(x, state, State, lengths)
        u, z = self.in_proj(x).chunk(2, -1)
        u = convolved(u, self.conv1d.weight, self.conv1d.bias, state, lengths)
        d, B, C = self.x_proj(u).split(self.sizes, -1)
        dt = d @ self.dt_proj.weight.T
        A = -torch.exp(wide(self.A_log))
        more = {"delta_bias": self.dt_proj.bias, "delta_softplus": True}
        if state is not None and is_step(x, lengths):
            u, dt, z, B, C = u[:, 0], dt[:, 0], z[:, 0], B[:, 0, None], C[:, 0, None]
            y = heed.torch.selective_scan_step(u, dt, A, B, C, state.ssm, self.D, z, **more)[:, None]
        else:
            sequences = [rows.transpose(1, 2) for rows in (u, dt, B, C, z)]
            more |= {"lengths": lengths}
            if state is None:
                y = heed.torch.selective_scan(*sequences[:2], A, *sequences[2:4], self.D, sequences[4], **more)
            else:
                y, state.tensors["ssm"] = heed.torch.selective_scan(
                    *sequences[:2], A, *sequences[2:4], self.D, sequences[4], initial_state=state.ssm,
                    return_state=True, **more)
            y = y.transpose(1, 2)
        if state is not None:
            state.lengths += x.shape[1] if lengths is None else lengths
        return self.out_proj(y)
