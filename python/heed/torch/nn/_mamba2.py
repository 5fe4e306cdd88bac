# heed.torch.nn.Mamba2: the mixer of Mamba-2.
"""Mamba2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument
from heed.torch.nn import _families
from heed.torch.nn._layer import (GatedRMSNorm, Layer, State, check_multiple, check_sizes, convolved, is_step,
                                  new_convolution)
from heed.torch.nn._layer import new_steps, wide, zero_state


class Mamba2(Layer):
    """The state space of Mamba-2, one decay per head, with its convolution and gated norm.

        [z, u, d] = x W_in;   [u, B, C] = silu(conv(u));   dt = softplus(d + dt_bias), inside time_step_limit
        S_t = exp(dt_t A_h) S_{t-1} + dt_t u_t B_t^T;   y = norm((S_t C_t + D u_t) silu(z_t)) W_out      A = -exp(A_log)

    x, y [B, T, hidden_size]; u, z [B, T, num_heads head_dim]; d [B, T, num_heads]; B, C [B, T, n_groups, state_size],
    which num_heads / n_groups heads share; norm: RMS norm over the channels of each group. Parameters are those of
    Transformers' Mamba2Mixer. Source: Dao and Gu, arXiv:2405.21060.

    State: conv [B, num_heads head_dim + 2 n_groups state_size, conv_kernel - 1] and ssm [B, num_heads, head_dim,
    state_size], float32.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, *, state_size: int = 128, n_groups: int = 1,
                 conv_kernel: int = 4, bias: bool = False, conv_bias: bool = True, eps: float = 1e-5,
                 time_step_limit: tuple[float, float] = (0.0, float("inf")), time_step_min: float = 0.001,
                 time_step_max: float = 0.1, time_step_floor: float = 1e-4, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        name, factory = "Mamba2", {"device": device, "dtype": dtype}
        check_sizes(name, hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, state_size=state_size,
                    n_groups=n_groups, conv_kernel=conv_kernel)
        check_multiple(name, "num_heads", num_heads, "n_groups", n_groups)
        limit = tuple(time_step_limit) if isinstance(time_step_limit, (list, tuple)) else ()
        if len(limit) != 2 or not all(isinstance(x, (int, float)) for x in limit):
            raise InvalidArgument(f"{name}: time_step_limit is {time_step_limit!r}, expected two numbers")
        inner = num_heads * head_dim
        channels = inner + 2 * n_groups * state_size
        self.hidden_size, self.num_heads, self.head_dim, self.state_size = hidden_size, num_heads, head_dim, state_size
        self.n_groups, self.time_step_limit = n_groups, limit
        self.in_proj = nn.Linear(hidden_size, inner + channels + num_heads, bias=bias, **factory)
        self.conv1d = new_convolution(channels, conv_kernel, conv_bias, factory)
        self.dt_bias = nn.Parameter(new_steps(num_heads, time_step_min, time_step_max, time_step_floor, factory))
        self.A_log = nn.Parameter(torch.arange(1, num_heads + 1, device=device,
                                               dtype=dtype or torch.get_default_dtype()).log())
        self.norm = GatedRMSNorm(inner, group=inner // n_groups, eps=eps, gate_first=True, **factory)
        self.D = nn.Parameter(torch.ones(num_heads, **factory))
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias, **factory)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Mamba2:
        """Reads a configuration of `model_type` mamba2, or none."""
        c = _families.MAMBA2.open(config)
        hidden_size, heads, dim = c["hidden_size"], c["num_heads"], c["head_dim"]
        if "expand" in c.given and int(c["expand"] * hidden_size) != heads * dim:
            raise c.refusal("expand", f"num_heads head_dim / hidden_size, {heads * dim / hidden_size}")
        names = ("state_size", "n_groups", "conv_kernel", "time_step_limit", "time_step_min", "time_step_max",
                 "time_step_floor")
        own = {**{name: c[name] for name in names}, "bias": c["use_bias"], "conv_bias": c["use_conv_bias"],
               "eps": c["layer_norm_epsilon"]}
        c.close()
        return cls(hidden_size, heads, dim, **{**own, **options})

    def new_state(self, batch: int) -> State:  # type: ignore[override]
        channels, taps = self.conv1d.weight.shape[0], self.conv1d.weight.shape[2]
        return State(batch, {"conv": zero_state(self.D, batch, channels, taps - 1),
                             "ssm": zero_state(self.D, batch, self.num_heads, self.head_dim, self.state_size)})

    def forward(self, x: Tensor, state: State | None = None, *, lengths: Any = None) -> Tensor:
        x, lengths = self._check(x, state, State, lengths)
        inner, of_groups = self.num_heads * self.head_dim, self.n_groups * self.state_size
        z, u, d = self.in_proj(x).split((inner, inner + 2 * of_groups, self.num_heads), -1)
        u = convolved(u, self.conv1d.weight, self.conv1d.bias, state, lengths)
        u, B, C = u.split((inner, of_groups, of_groups), -1)
        u = u.unflatten(-1, (self.num_heads, self.head_dim))
        B, C = (rows.unflatten(-1, (self.n_groups, self.state_size)) for rows in (B, C))
        A = -torch.exp(wide(self.A_log))
        more = {"D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True, "dt_limit": self.time_step_limit}
        if state is None:
            y = heed.torch.ssd(u, d, A, B, C, lengths=lengths, **more)
        elif is_step(x, lengths):
            y = heed.torch.ssd_step(u[:, 0], d[:, 0], A, B[:, 0], C[:, 0], state.ssm, **more)[:, None]
        else:
            y, state.tensors["ssm"] = heed.torch.ssd(
                u, d, A, B, C, lengths=lengths, initial_state=state.ssm, return_state=True, **more)
        if state is not None:
            state.lengths += x.shape[1] if lengths is None else lengths
        return self.out_proj(self.norm(y.flatten(2), z))
