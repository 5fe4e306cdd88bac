# heed.torch.nn.Rwkv6: the time mixing of RWKV-6, with its token shift.
"""Rwkv6."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed.torch._layer_rows import gated_rows
from heed.torch.nn import _families
from heed.torch.nn._layer import Layer, State, check_multiple, check_sizes, is_step, under_autocast, wide, zero_state


class Rwkv6(Layer):
    """Time mixing of RWKV-6: how much of the token before is mixed into one depends on both, and so does the decay.

        d_t = x_{t-1} - x_t;   m = tanh((x + mu_x d) A), five parts          zeros precede the first token
        x^a = x + (mu_a + m_a B_a) d        a: w, k, v, r, g;   log_decay = -exp(time_decay + tanh(x^w C) D)
        y = (norm_h(rwkv6(x^r W_r, x^k W_k, x^v W_v, log_decay, u)) silu(x^g W_g)) W_o      norm_h: layer norm per head

    x, y [B, T, hidden_size], between them attention_hidden_size channels in heads of head_size; A, B of rank mix_rank,
    C, D of decay_rank. Parameters are those of Rwkv6SelfAttention in the folders that the authors publish for
    Transformers: mu is time_maa, A and B time_maa_w1 and time_maa_w2, C and D time_decay_w1 and time_decay_w2, u
    time_faaaa, norm_h ln_x. Source: Peng et al., arXiv:2404.05892.

    State: shift [B, hidden_size], the last token, and S [B, heads, head_size, head_size], float32.
    """

    def __init__(self, hidden_size: int, *, attention_hidden_size: int | None = None,
                 head_size: int = 64, mix_rank: int = 32, decay_rank: int = 64, eps: float = 64e-5, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = hidden_size if attention_hidden_size is None else attention_hidden_size
        check_sizes("Rwkv6", hidden_size=hidden_size, attention_hidden_size=inner, head_size=head_size,
                    mix_rank=mix_rank, decay_rank=decay_rank)
        check_multiple("Rwkv6", "attention_hidden_size", inner, "head_size", head_size)
        self.hidden_size, self.heads, self.head_size = hidden_size, inner // head_size, head_size
        ramp = (torch.arange(hidden_size, **factory) / hidden_size)[None, None]
        for letter in "xwkvrg":
            self.register_parameter(f"time_maa_{letter}", nn.Parameter(1 - ramp))

        def small(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*sizes, **factory).uniform_(-1e-4, 1e-4))

        self.time_maa_w1, self.time_maa_w2 = small(hidden_size, 5 * mix_rank), small(5, mix_rank, hidden_size)
        ratio = torch.arange(inner, **factory) / max(inner - 1, 1)
        self.time_decay = nn.Parameter((-6 + 5 * ratio**0.7)[None, None])
        self.time_decay_w1, self.time_decay_w2 = small(hidden_size, decay_rank), small(decay_rank, inner)
        self.time_faaaa = nn.Parameter(torch.zeros(self.heads, head_size, **factory))
        for name in ("receptance", "key", "value", "gate"):
            self.add_module(name, nn.Linear(hidden_size, inner, bias=False, **factory))
        self.output = nn.Linear(inner, hidden_size, bias=False, **factory)
        self.ln_x = nn.GroupNorm(self.heads, inner, eps=eps, **factory)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Rwkv6:
        """Reads a configuration of `model_type` rwkv6, as it is published beside its model, or none."""
        c = _families.RWKV6.open(config)
        hidden_size = c["hidden_size"]
        large = hidden_size == 4096  # the published models' ranks depend on this alone
        own = {"attention_hidden_size": c["attention_hidden_size"], "head_size": c["head_size"],
               "mix_rank": 64 if large else 32, "decay_rank": 128 if large else 64,
               "eps": 1e-5 * c["head_size_divisor"] ** 2}
        c.close()
        return cls(hidden_size, **{**own, **options})

    def new_state(self, batch: int) -> State:  # type: ignore[override]
        shift = self.output.weight.new_zeros(batch, self.hidden_size)
        return State(batch, {"shift": shift,
                             "S": zero_state(self.output.weight, batch, self.heads, self.head_size, self.head_size)})

    def _mixed(self, x: Tensor, before: Tensor) -> list[Tensor]:
        """Each token mixed with the one before it, once for each of w, k, v, r and g."""
        common = torch.lerp(x, before, self.time_maa_x) @ self.time_maa_w1
        parts = torch.tanh(common).unflatten(-1, (5, -1)).movedim(-2, 0)
        shares = torch.einsum("abtr,arc->abtc", parts, self.time_maa_w2)
        constants = (self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g)
        return [torch.lerp(x, before, constant + share) for constant, share in zip(constants, shares)]

    def forward(self, x: Tensor, state: State | None = None, *, lengths: Any = None) -> Tensor:
        x, lengths = self._check(x, state, State, lengths)
        x = under_autocast(x, self.time_maa_x)
        first = torch.zeros_like(x[:, :1]) if state is None else state.shift[:, None]
        w, k, v, r, g = self._mixed(x, torch.cat([first, x[:, :-1]], 1))
        w = self.time_decay + torch.tanh(w @ self.time_decay_w1) @ self.time_decay_w2
        r, k, v = self.receptance(r), self.key(k), self.value(v)
        w = -torch.exp(wide(w))
        r, k, v, decay = (y.unflatten(-1, (self.heads, -1)) for y in (r, k, v, w))
        if state is None:
            o = heed.torch.rwkv6(r, k, v, decay, self.time_faaaa, lengths=lengths)
        else:
            if is_step(x, lengths):
                o = heed.torch.rwkv6_step(r[:, 0], k[:, 0], v[:, 0], decay[:, 0], self.time_faaaa, state.S)[:, None]
            else:
                o, state.tensors["S"] = heed.torch.rwkv6(
                    r, k, v, decay, self.time_faaaa, initial_state=state.S, return_state=True, lengths=lengths)
            counts = torch.full((len(x),), x.shape[1]) if lengths is None else lengths
            every = torch.cat([first, x], 1)  # the token that is last now, be it the one from before
            state.tensors["shift"] = every[torch.arange(len(x)), counts]
            state.lengths += counts
        o = self.ln_x(o.flatten(2).flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.output(gated_rows(o, self.gate(g)))
