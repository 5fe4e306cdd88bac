# heed.torch.nn.Rwkv4: the time mixing of RWKV-4, with its token shift.
"""Rwkv4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed.torch._layer_rows import gated_rows, token_shift
from heed.torch.nn import _families
from heed.torch.nn._layer import Layer, State, check_sizes, is_step, under_autocast, wide, zero_state


class Rwkv4(Layer):
    """Time mixing of RWKV-4: each token is mixed with the one before it, then heed.rwkv4.

        x^a_t = m_a x_t + (1 - m_a) x_{t-1}        a: k, v, r; zeros precede the first token
        y = (sigmoid(x^r W_r) rwkv4(x^k W_k, x^v W_v; decay -exp(time_decay), bonus time_first)) W_o

    x, y [B, T, hidden_size], between them attention_hidden_size channels. Parameters are those of Transformers'
    RwkvSelfAttention. Source: Peng et al., arXiv:2305.13048.

    State: shift [B, hidden_size], the last token, and num, den, max [B, attention_hidden_size], float32.
    """

    def __init__(self, hidden_size: int, *, attention_hidden_size: int | None = None, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = hidden_size if attention_hidden_size is None else attention_hidden_size
        check_sizes("Rwkv4", hidden_size=hidden_size, attention_hidden_size=inner)
        self.hidden_size = hidden_size
        ratio = torch.arange(inner, **factory) / max(inner - 1, 1)
        self.time_decay = nn.Parameter(-5 + 8 * ratio**1.3)
        self.time_first = nn.Parameter(torch.full((inner,), 0.3, **factory).log())
        ramp = (torch.arange(hidden_size, **factory) / hidden_size)[None, None]
        self.time_mix_key, self.time_mix_value = nn.Parameter(ramp.clone()), nn.Parameter(ramp.clone())
        self.time_mix_receptance = nn.Parameter(ramp**0.5)
        for name in ("key", "value", "receptance"):
            self.add_module(name, nn.Linear(hidden_size, inner, bias=False, **factory))
        self.output = nn.Linear(inner, hidden_size, bias=False, **factory)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Rwkv4:
        """Reads a configuration of `model_type` rwkv, or none."""
        c = _families.RWKV4.open(config)
        hidden_size, inner = c["hidden_size"], c["attention_hidden_size"]
        c.close()
        return cls(hidden_size, **{"attention_hidden_size": inner, **options})

    def new_state(self, batch: int) -> State:  # type: ignore[override]
        num, den, most = (zero_state(self.time_decay, batch, len(self.time_decay)) for _ in range(3))
        most.fill_(float("-inf"))
        shift = self.output.weight.new_zeros(batch, self.hidden_size)
        return State(batch, {"shift": shift, "num": num, "den": den, "max": most})

    def forward(self, x: Tensor, state: State | None = None, *, lengths: Any = None) -> Tensor:
        x, lengths = self._check(x, state, State, lengths)
        x = under_autocast(x, self.time_mix_key)
        mixes = (self.time_mix_key, self.time_mix_value, self.time_mix_receptance)
        if state is not None and is_step(x, lengths):  # the operator would take longer than these three
            k, v, r = (torch.lerp(state.shift[:, None], x, mix) for mix in mixes)
        else:
            k, v, r = token_shift(x, None if state is None else state.shift, torch.cat(mixes).flatten(1))
        k, v, r = self.key(k), self.value(v), self.receptance(r)
        decay, bonus = -torch.exp(wide(self.time_decay)), wide(self.time_first)
        if state is None:
            o = heed.torch.rwkv4(k, v, decay, bonus, lengths=lengths)
        else:
            carried = (state.num, state.den, state.max)
            if is_step(x, lengths):
                o = heed.torch.rwkv4_step(k[:, 0], v[:, 0], decay, bonus, carried)[:, None]
            else:
                o, carried = heed.torch.rwkv4(k, v, decay, bonus, initial_state=carried, return_state=True,
                                              lengths=lengths)
            state.tensors.update(zip(("num", "den", "max"), carried))
            counts = torch.full((len(x),), x.shape[1]) if lengths is None else lengths
            every = torch.cat([state.shift[:, None], x], 1)  # the token that is last now, be it the one from before
            state.tensors["shift"] = every[torch.arange(len(x)), counts]
            state.lengths += counts
        return self.output(gated_rows(o, r, activation="sigmoid"))
