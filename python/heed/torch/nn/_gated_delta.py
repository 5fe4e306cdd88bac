# heed.torch.nn.GatedDeltaNet: the gated delta rule as a layer, as Qwen3-Next has it.
"""GatedDeltaNet."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heed.torch
from heed.torch.nn import _families
from heed.torch.nn._layer import (GatedRMSNorm, Layer, State, check_multiple, check_sizes, convolved, is_step,
                                  new_convolution)
from heed.torch.nn._layer import unit, wide, zero_state


class GatedDeltaNet(Layer):
    """The gated delta rule with its convolution, gates and norm.

        [q, k, v, z] = x W_qkvz;   [b, a] = x W_ba;   [q, k, v] = silu(conv([q, k, v]));   q, k of norm 1
        beta = sigmoid(b);   g = -exp(A_log) softplus(a + dt_bias)
        S~ = e^{g_t} S_{t-1};   S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T;   y = (norm(S_t^T q_t) silu(z_t)) W_out

    x, y [B, T, hidden_size]; q, k [B, T, num_key_heads, key_head_dim] with scale key_head_dim^-1/2, v, z [B, T,
    num_value_heads, value_head_dim], a, b [B, T, num_value_heads]; consecutive value heads share a key head; norm: RMS
    norm per head. Parameters are those of Transformers' Qwen3NextGatedDeltaNet. Source: Yang, Kautz and Hatamizadeh,
    arXiv:2412.06464.

    State: conv [B, channels of q, k and v, conv_kernel - 1] and S [B, num_value_heads, key_head_dim, value_head_dim],
    float32.
    """

    def __init__(self, hidden_size: int, num_key_heads: int, num_value_heads: int,
                 *, key_head_dim: int, value_head_dim: int, conv_kernel: int = 4, eps: float = 1e-6, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        name, factory = "GatedDeltaNet", {"device": device, "dtype": dtype}
        check_sizes(name, hidden_size=hidden_size, num_key_heads=num_key_heads, num_value_heads=num_value_heads,
                    key_head_dim=key_head_dim, value_head_dim=value_head_dim, conv_kernel=conv_kernel)
        check_multiple(name, "num_value_heads", num_value_heads, "num_key_heads", num_key_heads)
        self.hidden_size, self.num_key_heads, self.num_value_heads = hidden_size, num_key_heads, num_value_heads
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        of_keys, of_values = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        self.conv1d = new_convolution(2 * of_keys + of_values, conv_kernel, False, factory)
        self.in_proj_qkvz = nn.Linear(hidden_size, 2 * of_keys + 2 * of_values, bias=False, **factory)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * num_value_heads, bias=False, **factory)
        self.dt_bias = nn.Parameter(torch.ones(num_value_heads, **factory))
        self.A_log = nn.Parameter(torch.empty(num_value_heads, **factory).uniform_(0.01, 16).log())
        self.norm = GatedRMSNorm(value_head_dim, eps=eps, gate_first=False, **factory)
        self.out_proj = nn.Linear(of_values, hidden_size, bias=False, **factory)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> GatedDeltaNet:
        """Reads a configuration of `model_type` qwen3_next, or none."""
        c = _families.GATED_DELTA.open(config)
        sizes = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
        own = {"key_head_dim": c["linear_key_head_dim"], "value_head_dim": c["linear_value_head_dim"],
               "conv_kernel": c["linear_conv_kernel_dim"], "eps": c["rms_norm_eps"]}
        c.close()
        return cls(*sizes, **{**own, **options})

    def new_state(self, batch: int) -> State:  # type: ignore[override]
        channels, taps = self.conv1d.weight.shape[0], self.conv1d.weight.shape[2]
        return State(batch, {"conv": zero_state(self.A_log, batch, channels, taps - 1),
                             "S": zero_state(self.A_log, batch, self.num_value_heads, self.key_head_dim,
                                             self.value_head_dim)})

    def forward(self, x: Tensor, state: State | None = None, *, lengths: Any = None) -> Tensor:
        x, lengths = self._check(x, state, State, lengths)
        K, V, group = self.key_head_dim, self.value_head_dim, self.num_value_heads // self.num_key_heads
        # W_qkvz and W_ba have the channels of a key head and of its value heads side by side.
        q, k, v, z = self.in_proj_qkvz(x).unflatten(-1, (self.num_key_heads, -1)).split(
            (K, K, group * V, group * V), -1)
        b, a = (part.flatten(2)
                for part in self.in_proj_ba(x).unflatten(-1, (self.num_key_heads, -1)).split((group, group), -1))
        of_keys = self.num_key_heads * K
        rows = torch.cat([head for part in (q, k, v) for head in part.unbind(2)], -1)
        rows = convolved(rows, self.conv1d.weight, None, state, lengths)
        q, k = unit(rows[..., :2 * of_keys].unflatten(-1, (-1, K))).chunk(2, 2)
        v = rows[..., 2 * of_keys:].unflatten(-1, (-1, V))
        beta, g = b.sigmoid(), -wide(self.A_log).exp() * F.softplus(wide(a) + self.dt_bias)
        inputs = (q, k, v, g.to(x.dtype), beta)
        if state is None:
            o = heed.torch.gated_delta_rule(*inputs, lengths=lengths)
        elif is_step(x, lengths):
            o = heed.torch.gated_delta_rule_step(*(rows[:, 0] for rows in inputs), state.S)[:, None]
        else:
            o, state.tensors["S"] = heed.torch.gated_delta_rule(
                *inputs, lengths=lengths, initial_state=state.S, return_state=True)
        if state is not None:
            state.lengths += x.shape[1] if lengths is None else lengths
        return self.out_proj(self.norm(o.unflatten(2, (-1, group)), z.unflatten(-1, (group, V))).flatten(2))
