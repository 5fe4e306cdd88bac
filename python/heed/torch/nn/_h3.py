# heed.torch.nn.H3: linear attention through a shift and a diagonal state space, as a layer.
"""H3."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed.torch.nn._layer import Layer, State, check_multiple, check_sizes, is_step, zero_state


class H3(Layer):
    """The H3 layer: q, k and v by linear maps, keys through a shift, their products with values through a diagonal
    state space.

        q = x W_q + b_q,  k, v likewise;   k' = shift(k);   h_t = the diagonal state space of k'_t v_t^T, per head
        y = (q_t^T h_t) W_o + b_o                                                            heed.h3 has the recurrence

    x, y [B, T, hidden_size] in heads of head_dim channels. Parameters: q_proj, k_proj, v_proj, out_proj; shift
    [hidden_size, taps] and shift_D [hidden_size]; log_dt [H], log_A_real, A_imag [H, N/2], C [H, N/2, 2] and D [H] of
    heed.h3. Transformers has no such module. `method` is heed.h3's. Source: Fu et al., arXiv:2212.14052.

    State: tail [B, taps - 1, H, head_dim] and S [B, H, head_dim, head_dim, N/2, 2], float32.
    """

    def __init__(self, hidden_size: int, *, head_dim: int = 1, state_size: int = 64, taps: int = 4, bias: bool = True,
                 method: str = "auto", time_step_min: float = 0.001, time_step_max: float = 0.1, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        check_sizes("H3", hidden_size=hidden_size, head_dim=head_dim, state_size=state_size, taps=taps)
        check_multiple("H3", "hidden_size", hidden_size, "head_dim", head_dim)
        check_multiple("H3", "state_size", state_size, "a pair of modes", 2)
        self.hidden_size, self.num_heads, self.head_dim, self.method = (
            hidden_size, hidden_size // head_dim, head_dim, method)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(hidden_size, hidden_size, bias=bias, **factory))
        H, modes = self.num_heads, state_size // 2
        self.shift = nn.Parameter(torch.randn(hidden_size, taps, **factory) * taps**-0.5)
        self.shift_D = nn.Parameter(torch.randn(hidden_size, **factory))
        spread = torch.rand(H, **factory) * math.log(time_step_max / time_step_min)
        self.log_dt = nn.Parameter(spread + math.log(time_step_min))
        self.log_A_real = nn.Parameter(torch.full((H, modes), math.log(0.5), **factory))
        self.A_imag = nn.Parameter((math.pi * torch.arange(modes, **factory)).repeat(H, 1))
        self.C = nn.Parameter(torch.randn(H, modes, 2, **factory) * 0.5**0.5)
        self.D = nn.Parameter(torch.randn(H, **factory))

    def new_state(self, batch: int) -> State:  # type: ignore[override]
        H, dim = self.num_heads, self.head_dim
        return State(batch, {"tail": zero_state(self.D, batch, self.shift.shape[1] - 1, H, dim),
                             "S": zero_state(self.D, batch, H, dim, dim, self.C.shape[1], 2)})

    def forward(self, x: Tensor, state: State | None = None, *, lengths: Any = None) -> Tensor:
        x, lengths = self._check(x, state, State, lengths)
        heads = (self.num_heads, self.head_dim)
        q, k, v = (project(x).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        constants = (self.shift, self.log_dt, self.log_A_real, self.A_imag, self.C)
        more = {"shift_D": self.shift_D, "method": self.method}
        if state is None:
            o = heed.torch.h3(q, k, v, *constants, self.D, lengths=lengths, **more)
        else:
            carried = (state.tail, state.S)
            if is_step(x, lengths):
                o = heed.torch.h3_step(q[:, 0], k[:, 0], v[:, 0], *constants, carried, self.D, **more)[:, None]
            else:
                o, carried = heed.torch.h3(
                    q, k, v, *constants, self.D, lengths=lengths, initial_state=carried, return_state=True, **more)
            state.tensors.update(zip(("tail", "S"), carried))
            state.lengths += x.shape[1] if lengths is None else lengths
        return self.out_proj(o.flatten(2))
