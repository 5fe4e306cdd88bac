# heed.torch.nn.GatedLinearAttention: a block of linear attention around any recurrence of heed, by its name.
"""GatedLinearAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import heed.torch
from heed.torch._layer_rows import gated_rows
from heed.torch.nn._layer import GatedRMSNorm, Layer, State, check_choice, check_multiple, check_sizes, is_step, unit


class _Gate(NamedTuple):
    """An argument of a recurrence besides q, k and v: per head one number ("1"), or as many as a key or a value has."""

    size: str
    map: Callable[[Tensor], Tensor] | None = None
    constant: bool = False  # a parameter, not a projection of the token


def _decay(x: Tensor) -> Tensor:
    return gated_rows(None, x, activation="log_sigmoid", factor=1 / 16)


_DECAY, _DECAYS, _BETA = _Gate("1", _decay), _Gate("K", _decay), _Gate("1", torch.sigmoid)
_QKV, _RKV = ("q", "k", "v"), ("r", "k", "v")

# {name: (arguments of the token's query, key and value, gates)}; k of delta rules has norm 1.
_RECURRENCES: dict[str, tuple[tuple[str, ...], dict[str, _Gate]]] = {
    "linear_attention": (_QKV, {}),
    "based": (_QKV, {}),
    "retention": (_QKV, {}),
    "lightning": (_QKV, {"log_decay": _Gate("1", _decay, constant=True)}),
    "simple_gla": (_QKV, {"log_decay": _DECAY}),
    "gla": (_QKV, {"log_decay": _DECAYS}),
    "hgrn2": (("q", "i"), {"log_decay": _DECAYS}),
    "mlstm": (_QKV, {"i": _Gate("1"), "f": _Gate("1")}),
    "rwkv5": (_RKV, {"log_decay": _Gate("K", _decay, constant=True), "u": _Gate("K", constant=True)}),
    "rwkv6": (_RKV, {"log_decay": _DECAYS, "u": _Gate("K", constant=True)}),
    "delta_rule": (_QKV, {"beta": _BETA}),
    "gated_delta_rule": (_QKV, {"log_decay": _DECAY, "beta": _BETA}),
    "kda": (_QKV, {"log_decay": _DECAYS, "beta": _BETA}),
    "gdn2": (_QKV, {"log_decay": _DECAYS, "erase": _Gate("K", torch.sigmoid), "write": _Gate("V", torch.sigmoid)}),
    "comba": (_QKV, {"p": _Gate("K", unit), "log_decay": _DECAY, "beta": _BETA}),
    "rwkv7": (_RKV, {"log_decay": _DECAYS, "share": _Gate("K", torch.sigmoid)}),
}
_UNIT_KEYS = ("delta_rule", "gated_delta_rule", "kda", "gdn2", "comba", "rwkv7")


class GatedLinearAttention(Layer):
    """Linear attention by any recurrence of heed, between projections, with a gated norm per head.

        q = x W_q   k = x W_k   v = x W_v   each gate: map(x W + b), or a learned constant
        y = (norm_h(recurrence(q, k, v, gates)) silu(x W_g)) W_o                          norm_h: RMS norm per head

    x, y [B, T, hidden_size]; q, k [B, T, num_heads, key_dim], v [B, T, num_heads, value_dim]. `recurrence` is a name of
    heed.torch: linear_attention, based, retention, lightning, simple_gla, gla, hgrn2, mlstm, rwkv5, rwkv6, delta_rule,
    gated_delta_rule, kda, gdn2, comba, rwkv7; its equation is in that function's text. Log decays are logsigmoid / 16,
    rates of delta rules sigmoids, and keys of delta rules have norm 1; rwkv7 removes a share a of what its key finds,
    as a = -k, b = share k. `options` are further settings of the function. Parameters: q_proj, k_proj, v_proj (r_proj,
    i_proj where the function says so), a linear map `<gate>_proj` or a parameter `<gate>` [num_heads, size] for each
    gate, g_proj, norm, o_proj. Source of the block: Yang et al., arXiv:2312.06635.

    State: the function's, by its fields: S [B, num_heads, key_dim, value_dim], z and m, float32.
    """

    def __init__(self, hidden_size: int, num_heads: int, recurrence: str = "gla", *, key_dim: int | None = None,
                 value_dim: int | None = None, eps: float = 1e-6, options: dict[str, Any] | None = None,
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        name, factory = "GatedLinearAttention", {"device": device, "dtype": dtype}
        check_choice(name, "recurrence", recurrence, tuple(_RECURRENCES))
        check_sizes(name, hidden_size=hidden_size, num_heads=num_heads, key_dim=1 if key_dim is None else key_dim,
                    value_dim=1 if value_dim is None else value_dim)
        if key_dim is None or value_dim is None:
            check_multiple(name, "hidden_size", hidden_size, "num_heads", num_heads)
        sizes = {"1": 1, "K": key_dim or hidden_size // num_heads, "V": value_dim or hidden_size // num_heads}
        self.hidden_size, self.num_heads, self.recurrence, self.options = (
            hidden_size, num_heads, recurrence, dict(options or {}))
        self.key_dim, self.value_dim = sizes["K"], sizes["V"]
        rows, gates = _RECURRENCES[recurrence]
        for argument in rows:
            width = sizes["V" if argument in "vi" else "K"]
            self.add_module(f"{argument}_proj", nn.Linear(hidden_size, num_heads * width, bias=False, **factory))
        for argument, gate in gates.items():
            if gate.constant:
                self.register_parameter(argument, nn.Parameter(torch.randn(num_heads, sizes[gate.size], **factory)))
            else:
                self.add_module(f"{argument}_proj",
                                nn.Linear(hidden_size, num_heads * sizes[gate.size], bias=True, **factory))
        self.g_proj = nn.Linear(hidden_size, num_heads * self.value_dim, bias=False, **factory)
        self.norm = GatedRMSNorm(self.value_dim, eps=eps, gate_first=False, **factory)
        self.o_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False, **factory)

    def new_state(self, batch: int) -> State:  # type: ignore[override]
        """The state before the first token."""
        empty = self.o_proj.weight.new_zeros(batch, 0, self.hidden_size)
        with torch.no_grad():
            _, carried = getattr(heed.torch, self.recurrence)(**self._arguments(empty), **self.options,
                                                              return_state=True)
        return State(batch, self._named(carried))

    def _named(self, carried: Any) -> dict[str, Tensor]:
        return carried._asdict() if hasattr(carried, "_asdict") else {"S": carried}

    def _arguments(self, x: Tensor) -> dict[str, Tensor]:
        rows, gates = _RECURRENCES[self.recurrence]
        given = {name: self._modules[f"{name}_proj"](x).unflatten(-1, (self.num_heads, -1))  # type: ignore[misc]
                 for name in rows}
        if self.recurrence in _UNIT_KEYS:
            given["k"] = unit(given["k"])
        for name, gate in gates.items():
            project = self._modules.get(f"{name}_proj")
            value = getattr(self, name) if project is None else project(x).unflatten(-1, (self.num_heads, -1))
            value = value if gate.map is None else gate.map(value)
            given[name] = value.squeeze(-1) if gate.size == "1" else value
        if "share" in given:
            given |= {"a": -given["k"], "b": given["k"] * given.pop("share")}
        return given

    def forward(self, x: Tensor, state: State | None = None, *, lengths: Any = None) -> Tensor:
        x, lengths = self._check(x, state, State, lengths)
        function, given = getattr(heed.torch, self.recurrence), {**self._arguments(x), **self.options}
        if state is None:
            o = function(**given, lengths=lengths)
        else:
            tensors = tuple(state.tensors.values())
            carried = tensors if len(tensors) > 1 else tensors[0]
            if is_step(x, lengths):
                gates, rows = _RECURRENCES[self.recurrence][1], given.items()
                now = {key: value[:, 0] if isinstance(value, Tensor) and not (key in gates and gates[key].constant)
                       else value for key, value in rows}
                o = getattr(heed.torch, f"{self.recurrence}_step")(**now, state=carried)[:, None]
            else:
                o, carried = function(**given, lengths=lengths, initial_state=carried, return_state=True)
                state.tensors = self._named(carried)
            state.lengths += x.shape[1] if lengths is None else lengths
        return self.o_proj(self.norm(o, self.g_proj(x).unflatten(-1, (self.num_heads, -1))).flatten(2))
