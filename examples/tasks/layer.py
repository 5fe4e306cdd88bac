# The layer that the examples byte_lm, digits and speech share: a mechanism picked by name, a gate, a perceptron.
"""A layer computes from rows x [B, T, width]:

    u = norm1(x)
    x = x + out(norm_per_head(mechanism(inputs of u)) * silu(gate(u)))
    x = x + down(relu(up(norm2(x)))^2)

A mechanism is one line of a table: what it is called with, and its options. layer.h is this file in C++.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heed.torch

EPS = 1e-6  # in the norms


class Input(NamedTuple):
    """An argument of a mechanism: numbers per head, projected from u, or constants that are learned. `size` says how
    many: "K" channels of a key, "V" of a value, "1"; of constants also "V4", "VK", "VK2", "K2", pairs or several for
    each channel, and "VT", as many as tokens; "MK" and "MT" are matrices of `rows` rows that all heads have in common.
    A map comes with a bias."""

    size: str
    map: Callable[[Tensor], Tensor] | None = None
    constant: bool = False
    rotary: bool = False  # rotated by the position, which encodes distances where no decay does
    unit: bool = False  # has norm 1, as keys of delta rules require
    # Initialises a constant from its sizes; the default is spread values, or 0 without a map.
    start: Callable[..., Tensor] | None = None
    learned: bool = True


class Mechanism(NamedTuple):
    inputs: dict[str, Input]
    options: dict[str, Any] = {}
    key: int = 32  # K
    derive: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None  # arguments from what is projected
    scan: bool = False  # over channels, those of all heads in a row
    function: str = ""  # name in heed.torch; the mechanism's own if empty
    rows: int = 0  # M


def same(x: Tensor) -> Tensor:
    return x


def negative(x: Tensor) -> Tensor:
    return -x


def rate(x: Tensor) -> Tensor:
    return -torch.exp(-x)


def step_size(x: Tensor) -> Tensor:
    return F.softplus(-x)


def share(x: Tensor) -> Tensor:
    return x / 6


KEY, TURNED, VALUE = Input("K"), Input("K", rotary=True), Input("V")
QKV, TURNED_QKV = {"q": KEY, "k": KEY, "v": VALUE}, {"q": TURNED, "k": TURNED, "v": VALUE}

# Mechanisms of more than one example. The first has the short convolution before it that Mamba has.
SELECTIVE_SCAN = Mechanism({"u": VALUE, "filter": Input("V4", share, constant=True), "delta": Input("V", step_size),
                            "A": Input("VK", rate, constant=True), "B": KEY, "C": KEY}, key=16, scan=True)
S4D = Mechanism({"u": VALUE, "log_dt": Input("V", negative, constant=True), "log_A_real": Input("VK", constant=True),
                 "A_imag": Input("VK", same, constant=True), "C": Input("VK2", same, constant=True)}, key=16, scan=True)


class Scan:
    """A scan and its step on numbers per head. The state is a list: the scan's, and the convolution's before it."""

    def __init__(self, name: str, inputs: dict[str, Input]):
        self.inputs, self.tokens_last = inputs, name != "rg_lru"
        self.function, self.one_step = getattr(heed.torch, name), getattr(heed.torch, f"{name}_step", None)

    def channels(self, arguments: dict[str, Tensor], has_tokens: bool) -> dict[str, Tensor]:
        given = {}
        for key, x in arguments.items():
            if self.inputs[key].constant:
                given[key] = x.flatten(0, 1)
            elif self.inputs[key].size == "K":  # shared by the channels of a head
                given[key] = x.permute(0, 2, 3, 1) if has_tokens else x
            else:
                given[key] = x.flatten(-2).transpose(1, 2) if has_tokens and self.tokens_last else x.flatten(-2)
        return given

    def heads(self, o: Tensor, arguments: dict[str, Tensor]) -> Tensor:
        return o.unflatten(-1, next(iter(arguments.values())).shape[-2:])

    def __call__(self, return_state: bool = False, **arguments: Tensor) -> Any:
        given, tail = self.channels(arguments, True), []
        if "filter" in given:
            given["u"], *tail = heed.torch.causal_conv1d(given["u"], given.pop("filter"), activation="silu",
                                                         return_state=True)
        if "a" in given:  # RG-LRU treats a first token otherwise where there is no state: steps have one
            given["initial_state"] = given["x"].new_zeros(given["x"].shape[::2])
        results = self.function(**given, return_state=True) if return_state else (self.function(**given),)
        o = self.heads(results[0].transpose(1, 2) if self.tokens_last else results[0], arguments)
        return (o, [results[1], *tail]) if return_state else o

    def step(self, state: list[Tensor], **arguments: Tensor) -> Tensor:
        given = self.channels(arguments, False)
        if "filter" in given:
            given["u"] = heed.torch.causal_conv1d_step(given["u"], given.pop("filter"), state=state[1],
                                                       activation="silu")
        return self.heads(self.one_step(**given, state=state[0]), arguments)


class Argument(nn.Module):
    """The weights behind an Input. Biases that are mapped begin spread over channels or heads: a sigmoid of 1 forgets
    half of the past in 2 bytes, of 6 in 280."""

    def __init__(self, kind: Input, width: int, shape: list[int]):
        super().__init__()
        self.kind, self.shape = kind, shape
        self.weight = None if kind.constant else nn.Parameter(torch.randn(math.prod(shape), width) * width**-0.5)
        bias = torch.linspace(1, 6, shape[-1]) if kind.map is not None else torch.zeros(shape[-1])
        bias = bias.expand(shape) if kind.start is None else kind.start(*shape)
        bias = nn.Parameter(bias.flatten().clone(), requires_grad=kind.learned)
        self.bias = bias if kind.map is not None or kind.constant else None

    def forward(self, u: Tensor, positions: Tensor) -> Tensor:
        x = self.bias if self.weight is None else F.linear(u, self.weight, self.bias)
        x = x.unflatten(-1, self.shape)
        if self.kind.rotary:
            x = heed.torch.rotary(x, positions, interleaved=False)
        if self.kind.unit:
            x = F.normalize(x, dim=-1)
        return x if self.kind.map is None else self.kind.map(x)


class Layer(nn.Module):
    """`name` is that of `mechanism`, or "none"; `tokens` is the sequence length, for constants that depend on it."""

    def __init__(self, name: str, mechanism: Mechanism, width: int, heads: int, dropout: float, tokens: int = 0):
        super().__init__()
        self.mechanism, function = mechanism, mechanism.function or name
        self.function = (lambda v: v) if name == "none" else getattr(heed.torch, function)
        self.one_step = getattr(heed.torch, f"{function}_step", None)
        if mechanism.scan:
            self.function = Scan(function, mechanism.inputs)
            self.one_step = self.function.step
        self.window = sum(mechanism.options["window"]) + 1 if "window" in mechanism.options else 0
        K, V, M = mechanism.key, width // heads, mechanism.rows
        sizes = {"K": [K], "V": [V], "1": [], "V4": [V, 4], "VK": [V, K], "VK2": [V, K, 2], "K2": [K, 2],
                 "VT": [V, tokens]}
        shapes = {size: [heads, *of_head] for size, of_head in sizes.items()} | {"MK": [M, K], "MT": [M, tokens]}
        self.inputs = nn.ModuleDict(
            {key: Argument(kind, width, shapes[kind.size]) for key, kind in mechanism.inputs.items()})
        self.norm1, self.norm2 = nn.RMSNorm(width, EPS), nn.RMSNorm(width, EPS)
        self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor, memory: list[Any] | None = None) -> Tensor:
        """x is [B, T, width]; with a memory, which is updated, T is 1."""
        u = self.norm1(x)
        arguments = self.arguments(u, positions)
        o = self.function(**arguments, **self.mechanism.options) if memory is None else self.step(arguments, memory)
        o = F.rms_norm(o, o.shape[-1:], eps=EPS).flatten(2)
        x = x + self.dropout(self.out(o * F.silu(self.gate(u))))
        return x + self.dropout(self.down(F.relu(self.up(self.norm2(x))).square()))

    def arguments(self, u: Tensor, positions: Tensor) -> dict[str, Tensor]:
        given = {key: argument(u, positions) for key, argument in self.inputs.items()}
        return given if self.mechanism.derive is None else self.mechanism.derive(given)

    def step(self, arguments: dict[str, Tensor], memory: list[Any]) -> Tensor:
        """The mechanism for one token: by its step, or by attention over the keys and values that are kept."""
        if self.one_step is not None:
            constants = {key for key, kind in self.mechanism.inputs.items() if kind.constant}
            one = {key: x if key in constants else x[:, 0] for key, x in arguments.items()}
            return self.one_step(**one, state=memory[0], **self.mechanism.options)[:, None]
        for i, key in enumerate(("k", "v")[: len(memory)]):
            arguments[key] = memory[i] = torch.cat([memory[i], arguments[key]], 1)[:, -self.window:]
        return self.function(**arguments, **self.mechanism.options)

    def start(self, batch: int) -> list[Any]:
        """The memory before the first token: what no tokens leave behind."""
        nothing = self.arguments(torch.zeros(batch, 0, len(self.norm1.weight)), torch.arange(0))
        if self.one_step is not None:
            return [self.function(**nothing, **self.mechanism.options, return_state=True)[1]]
        return [nothing[key] for key in ("k", "v") if "k" in nothing]
