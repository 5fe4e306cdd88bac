# The modules of mamba_ssm: Mamba, Mamba2 and their norms, with the originals' state dicts.
"""mamba_ssm.modules.mamba_simple and mamba2, ops.triton.layernorm_gated and ops.triton.layer_norm."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heed import InvalidArgument
from heed.compat._door import Arguments, door, refuse
from heed.compat._mamba_functions import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update
from heed.compat._norms import NormBase, norm, normed, wide
from heed.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from heed.torch.nn._layer import check_choice, check_multiple, check_sizes, new_convolution, new_steps

# --- norms ------------------------------------------------------------------------------------------------------------


def layernorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, is_rms_norm=False):
    """norm(x) silu(z), or norm(x silu(z)) where the gate comes first, of groups of channels."""
    if group_size is not None and x.shape[-1] % group_size:
        raise InvalidArgument(f"layernorm_fn: group_size is {group_size}, expected a divisor of {x.shape[-1]} channels")
    gate = 1 if z is None else F.silu(z.to(wide(x)))
    if norm_before_gate:
        y = normed(x, weight, bias, eps, is_rms_norm, group_size) * gate
    else:
        y = normed(x.to(wide(x)) * gate, weight, bias, eps, is_rms_norm, group_size)
    return y.to(x.dtype)


def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """layernorm_fn with RMS norms."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


class _GatedNorm(NormBase):
    rms = False

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__(hidden_size, True, not self.rms, eps, device, dtype)
        self.group_size, self.norm_before_gate = group_size, norm_before_gate

    def forward(self, x, z=None):
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate, self.rms)


class LayerNormGated(_GatedNorm):
    """layernorm_fn as a module."""


class RMSNormGated(_GatedNorm):
    """rmsnorm_fn as a module."""

    rms = True


def _plain_norm(name: str, rms: bool, a: Arguments) -> Any:
    rms = a.pop("is_rms_norm", rms)
    keys = ("x", "weight", "bias", "residual", "eps", "prenorm", "residual_in_fp32")
    arguments = [a.pop(key) for key in keys]
    return lambda: norm(name, *arguments, rms)


_PLAIN = (
    "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None, "
    "prenorm=False, residual_in_fp32=False, {}return_dropout_mask=False"
)
layer_norm_fn = door("layer_norm_fn",
                     _PLAIN.format("is_rms_norm=False, "), lambda a: _plain_norm("layer_norm_fn", False, a),
                     "Layer norm, or RMS norm, of x + residual; with prenorm also that sum.")
rms_norm_fn = door("rms_norm_fn", _PLAIN.format(""), lambda a: _plain_norm("rms_norm_fn", True, a),
                   "RMS norm of x + residual; with prenorm also that sum.")


class RMSNorm(NormBase):
    """rms_norm_fn as a module."""

    def __init__(self, hidden_size, eps=1e-5, dropout_p=0.0, device=None, dtype=None):
        refuse("RMSNorm", "dropout_p", dropout_p, 0.0)
        super().__init__(hidden_size, True, False, eps, device, dtype)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        return norm("RMSNorm", x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32, True)


# --- mixers -----------------------------------------------------------------------------------------------------------


class _Mixer(nn.Module):
    """The base class of both mixers: inference states, by layer, in the caller's inference_params."""

    A_log: Tensor
    layer_idx: int | None

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        """States of `batch_size` sequences without a token: the last inputs of the convolution, and the state space."""
        raise NotImplementedError

    def _rates(self):
        return -self.A_log.to(wide(self.A_log)).exp()

    def _get_states_from_cache(self, inference_params, batch_size, initialize_states=False):
        if self.layer_idx is None:
            raise InvalidArgument(f"{type(self).__name__}: layer_idx is None, expected a number beside "
                                  "inference_params")
        states = inference_params.key_value_memory_dict
        if self.layer_idx not in states:
            states[self.layer_idx] = self.allocate_inference_cache(batch_size, 0)
        elif initialize_states:
            for state in states[self.layer_idx]:
                state.zero_()
        return states[self.layer_idx]


def _bare(*tensors: Tensor | None) -> list[Tensor | None]:
    return [x if x is None else x.detach() for x in tensors]


class Mamba(_Mixer):
    """The mixer of Mamba-1: [B, T, d_model] to the same, with the parameters and states of mamba_ssm's."""

    def __init__(self, d_model, d_state=16, d_conv=4, expand=2, dt_rank="auto", dt_min=0.001, dt_max=0.1,
                 dt_init="random", dt_scale=1.0, dt_init_floor=1e-4, conv_bias=True, bias=False, use_fast_path=True,
                 layer_idx=None, device=None, dtype=None):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        check_sizes("Mamba", d_model=d_model, d_state=d_state, d_conv=d_conv)
        check_choice("Mamba", "dt_init", dt_init, ("random", "constant"))
        self.d_model, self.d_state, self.d_conv, self.expand, self.layer_idx = (
            d_model, d_state, d_conv, expand, layer_idx)
        self.d_inner = inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias, **factory)
        self.conv1d = new_convolution(inner, d_conv, conv_bias, factory)
        self.x_proj = nn.Linear(inner, self.dt_rank + 2 * d_state, bias=False, **factory)
        self.dt_proj = nn.Linear(self.dt_rank, inner, bias=True, **factory)
        scale = dt_scale * self.dt_rank**-0.5
        with torch.no_grad():
            nn.init.uniform_(self.dt_proj.weight, -scale if dt_init == "random" else scale, scale)
            self.dt_proj.bias.copy_(new_steps(inner, dt_min, dt_max, dt_init_floor, factory))
        rates = torch.arange(1, d_state + 1, dtype=torch.float32, device=device)
        self.A_log = nn.Parameter(rates.log().repeat(inner, 1))  # these two of 32 bits, whatever the others are
        self.D = nn.Parameter(torch.ones(inner, device=device, dtype=torch.float32))
        self.out_proj = nn.Linear(inner, d_model, bias=bias, **factory)

    def forward(self, hidden_states, inference_params=None):
        """With inference_params the first call fills the states of this layer there, later ones take a token each."""
        states = None
        if inference_params is not None:
            states = self._get_states_from_cache(inference_params, hidden_states.shape[0])
            if inference_params.seqlen_offset > 0:
                return self.step(hidden_states, *states)[0]
        x, z = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
        if states is not None:
            states[0].copy_(F.pad(x.detach(), (self.d_conv - x.shape[-1], 0)))
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        sizes = (self.dt_rank, self.d_state, self.d_state)
        d, B, C = self.x_proj(x.transpose(1, 2)).split(sizes, dim=-1)
        dt, B, C = (y.transpose(1, 2) for y in (d @ self.dt_proj.weight.T, B, C))
        y = selective_scan_fn(x, dt, self._rates(), B, C, self.D, z, self.dt_proj.bias, True, states is not None)
        if states is not None:
            y, last = y
            states[1].copy_(last.detach())
        return self.out_proj(y.transpose(1, 2))

    @torch.no_grad()
    def step(self, hidden_states, conv_state, ssm_state):
        """One token of each sequence, [B, 1, d_model]; the states change in place and are returned too."""
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, dim=-1)
        weight, bias, D, dt_bias = _bare(self.conv1d.weight.squeeze(1), self.conv1d.bias, self.D, self.dt_proj.bias)
        x = causal_conv1d_update(x, conv_state, weight, bias, "silu")
        d, B, C = self.x_proj(x).split((self.dt_rank, self.d_state, self.d_state), dim=-1)
        y = selective_state_update(ssm_state, x, d @ self.dt_proj.weight.T, self._rates(), B, C, D, z, dt_bias, True)
        return self.out_proj(y).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        conv, ssm = (weight.dtype if dtype is None else dtype for weight in (self.conv1d.weight, self.dt_proj.weight))
        return (torch.zeros(batch_size, self.d_inner, self.d_conv, dtype=conv),
                torch.zeros(batch_size, self.d_inner, self.d_state, dtype=ssm))


class Mamba2(_Mixer):
    """The mixer of Mamba-2: [B, T, d_model] to the same, with the parameters and states of mamba_ssm's."""

    def __init__(self, d_model, d_state=128, d_conv=4, conv_init=None, expand=2, headdim=64, d_ssm=None, ngroups=1,
                 A_init_range=(1, 16), D_has_hdim=False, rmsnorm=True, norm_before_gate=False, dt_min=0.001, dt_max=0.1,
                 dt_init_floor=1e-4, dt_limit=(0.0, float("inf")), bias=False, conv_bias=True, chunk_size=256,
                 use_mem_eff_path=True, layer_idx=None, process_group=None, sequence_parallel=True, device=None,
                 dtype=None):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        refuse("Mamba2", "process_group", process_group, None)
        check_sizes("Mamba2", d_model=d_model, d_state=d_state, d_conv=d_conv, headdim=headdim, ngroups=ngroups)
        self.d_model, self.d_state, self.d_conv, self.expand, self.layer_idx = (
            d_model, d_state, d_conv, expand, layer_idx)
        self.d_inner, self.headdim, self.ngroups = expand * d_model, headdim, ngroups
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        check_multiple("Mamba2", "d_ssm", self.d_ssm, "headdim", headdim)
        self.nheads = self.d_ssm // headdim
        check_multiple("Mamba2", "nheads", self.nheads, "ngroups", ngroups)
        self.D_has_hdim, self.rmsnorm, self.dt_limit, self.chunk_size = D_has_hdim, rmsnorm, tuple(dt_limit), chunk_size
        mixed = self.d_ssm + 2 * ngroups * d_state
        # The product holds a gated part beside the state space, its gate and values, and of that z, x B C and dt.
        rest = self.d_inner - self.d_ssm
        self.sizes = (rest, rest, self.d_ssm, mixed, self.nheads)
        self.in_proj = nn.Linear(d_model, sum(self.sizes), bias=bias, **factory)
        self.conv1d = new_convolution(mixed, d_conv, conv_bias, factory)
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        self.dt_bias = nn.Parameter(new_steps(self.nheads, dt_min, dt_max, dt_init_floor, factory))
        rates = torch.empty(self.nheads, dtype=torch.float32, device=device).uniform_(*A_init_range)
        self.A_log = nn.Parameter(rates.log().to(dtype=dtype))
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        if rmsnorm:
            self.norm = RMSNormGated(self.d_ssm, 1e-5, self.d_ssm // ngroups, norm_before_gate, **factory)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)

    def forward(self, u, seqlen=None, seq_idx=None, cu_seqlens=None, inference_params=None):
        """u [B, T, d_model], or [B T, d_model] with seqlen. With inference_params the first call fills the states of
        this layer there, later ones take a token each."""
        rows = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        states = None
        if inference_params is not None:
            states = self._get_states_from_cache(inference_params,
                                                 rows.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1)
            if inference_params.seqlen_offset > 0:
                return self.step(u, *states)[0]
        gate, beside, z, xBC, dt = self.in_proj(rows).split(self.sizes, dim=-1)
        if states is not None and cu_seqlens is None:
            states[0].copy_(F.pad(xBC.detach().transpose(1, 2), (self.d_conv - xBC.shape[1], 0)))
        elif states is not None:
            states[0].copy_(causal_conv1d_varlen_states(xBC.detach().squeeze(0), cu_seqlens, self.d_conv))
        weight = self.conv1d.weight.squeeze(1)
        xBC = causal_conv1d_fn(xBC.transpose(1, 2), weight, self.conv1d.bias, seq_idx,
                               activation="silu").transpose(1, 2)
        x, B, C = self._parts(xBC)
        result = mamba_chunk_scan_combined(
            x, dt, self._rates(), B, C, self.chunk_size, D=self._skip(), z=None if self.rmsnorm else self._heads(z),
            dt_bias=self.dt_bias, seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=True, dt_limit=self.dt_limit,
            return_final_states=states is not None, return_varlen_states=states is not None and cu_seqlens is not None)
        if states is not None:
            result, *last = result
            states[1].copy_(last[-1].detach())
        y = self._joined(gate, beside, z, result.flatten(2))
        return y if seqlen is None else y.flatten(0, 1)

    @torch.no_grad()
    def step(self, hidden_states, conv_state, ssm_state):
        """One token of each sequence, [B, 1, d_model]; the states change in place and are returned too."""
        gate, beside, z, xBC, dt = self.in_proj(hidden_states.squeeze(1)).split(self.sizes, dim=-1)
        weight, bias, D = _bare(self.conv1d.weight.squeeze(1), self.conv1d.bias, self._skip())
        x, B, C = self._parts(causal_conv1d_update(xBC, conv_state, weight, bias, "silu"))
        heads = (self.nheads, self.headdim)
        A = self._rates()[:, None, None].expand(*heads, self.d_state)
        dt = F.softplus(dt.to(wide(dt)) + self.dt_bias.to(wide(dt))).clamp(*self.dt_limit)[..., None].expand(-1, *heads)
        z_heads = None if self.rmsnorm else self._heads(z)
        y = selective_state_update(ssm_state, x, dt, A, B, C, D.reshape(self.nheads, -1).expand(heads), z_heads)
        return self._joined(gate, beside, z, y.flatten(1)).unsqueeze(1), conv_state, ssm_state

    def _heads(self, x):
        return x.unflatten(-1, (self.nheads, self.headdim))

    def _skip(self):
        return self.D.unflatten(0, (self.nheads, self.headdim)) if self.D_has_hdim else self.D

    def _parts(self, xBC):
        shared = self.ngroups * self.d_state
        x, B, C = xBC.split((self.d_ssm, shared, shared), dim=-1)
        return self._heads(x), B.unflatten(-1, (self.ngroups, -1)), C.unflatten(-1, (self.ngroups, -1))

    def _joined(self, gate, beside, z, y):
        y = self.norm(y, z) if self.rmsnorm else y
        return self.out_proj(torch.cat((F.silu(gate) * beside, y), dim=-1))

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        conv, ssm = (weight.dtype if dtype is None else dtype for weight in (self.conv1d.weight, self.in_proj.weight))
        return (torch.zeros(batch_size, self.d_conv, self.conv1d.weight.shape[0], dtype=conv).transpose(1, 2),
                torch.zeros(batch_size, self.nheads, self.headdim, self.d_state, dtype=ssm))


PLACES = {
    "LayerNormGated": "ops.triton.layernorm_gated:LayerNorm",
    "Mamba": "modules.mamba_simple",
    "Mamba2": "modules.mamba2",
    "RMSNorm": "ops.triton.layer_norm",
    "RMSNormGated": "ops.triton.layernorm_gated:RMSNorm",
    "layer_norm_fn": "ops.triton.layer_norm",
    "layernorm_fn": "ops.triton.layernorm_gated",
    "rms_norm_fn": "ops.triton.layer_norm",
    "rmsnorm_fn": "ops.triton.layernorm_gated",
}
