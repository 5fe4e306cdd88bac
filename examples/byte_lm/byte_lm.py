# A byte-level language model whose mechanism is picked by name: whole texts at once to train, byte by byte to write.
"""The model sees each byte with the one before it. A layer is the mechanism, a gate, and a perceptron:

    u = norm1(x)
    x = x + out(norm_per_head(mechanism(inputs of u)) * silu(gate(u)))
    x = x + down(relu(up(norm2(x)))^2)

Without a mechanism ("none") all that is known is two bytes, as in the table of counts that train.py compares with.
"""

import json
import math
import pathlib
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import heed.torch

EPS = 1e-6  # of the norms
WINDOW = 256  # keys that attention sees, and keeps


class Input(NamedTuple):
    """An argument of a mechanism: `size` numbers per head ("K" channels of a key, "V" of a value, or "1"; of constants also
    several for each channel of a value, or pairs), projected from u, or constants that are learned. A map comes with a bias."""

    size: str
    map: Callable[[Tensor], Tensor] | None = None
    constant: bool = False
    rotary: bool = False  # turned by the position: says how far away a key is where no decay does
    unit: bool = False  # of norm 1, as keys of delta rules have to be


class Mechanism(NamedTuple):
    inputs: dict[str, Input]
    options: dict[str, Any] = {}
    key: int = 32  # K
    derive: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None  # arguments from what is projected
    scan: bool = False  # over channels, those of all heads in a row


def _same(x: Tensor) -> Tensor:
    return x


def _one_key(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """RWKV-7 takes away a share of what its key finds: a and b are that key."""
    share = x.pop("share")
    return x | {"a": -x["k"], "b": x["k"] * share}


def _all_heads(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """H3 has the taps of all heads in a row."""
    return x | {"shift": x["shift"].flatten(0, 1)}


def _rate(x: Tensor) -> Tensor:
    return -torch.exp(-x)


def _negative(x: Tensor) -> Tensor:
    return -x


def _step(x: Tensor) -> Tensor:
    return F.softplus(-x)


def _share(x: Tensor) -> Tensor:
    return x / 6


KEY, TURNED, VALUE = Input("K"), Input("K", rotary=True), Input("V")
UNIT = Input("K", unit=True)
DELTA = {"q": KEY, "k": UNIT, "v": VALUE, "beta": Input("1", torch.sigmoid)}
QKV, TURNED_QKV = {"q": KEY, "k": KEY, "v": VALUE}, {"q": TURNED, "k": TURNED, "v": VALUE}

# The mechanisms, each with what it takes; what is not said is heed's default. mechanisms.h has the same table.
MECHANISMS = {
    "none": Mechanism({"v": VALUE}),
    "attention": Mechanism(TURNED_QKV, {"causal": True, "window": (WINDOW - 1, 0)}),
    "linear_attention": Mechanism(TURNED_QKV),
    "based": Mechanism(TURNED_QKV, key=16),
    "retention": Mechanism(TURNED_QKV),
    "lightning": Mechanism(QKV | {"log_decay": Input("1", F.logsigmoid, constant=True)}),
    "simple_gla": Mechanism(QKV | {"log_decay": Input("1", F.logsigmoid)}),
    "gla": Mechanism(QKV | {"log_decay": Input("K", F.logsigmoid)}),
    "hgrn2": Mechanism({"q": KEY, "log_decay": Input("K", F.logsigmoid), "i": VALUE}),
    "mlstm": Mechanism(QKV | {"i": Input("1"), "f": Input("1", _same)}),
    "rwkv6": Mechanism({"r": KEY, "k": KEY, "v": VALUE, "log_decay": Input("K", F.logsigmoid), "u": Input("K", constant=True)}),
    "gated_delta_rule": Mechanism(DELTA | {"log_decay": Input("1", F.logsigmoid)}),
    "kda": Mechanism(DELTA | {"log_decay": Input("K", F.logsigmoid)}),
    "rwkv7": Mechanism({"r": KEY, "log_decay": Input("K", F.logsigmoid), "k": UNIT, "v": VALUE, "share": Input("K", torch.sigmoid)},
                       derive=_one_key),
    # With the short convolution before it that Mamba has.
    "selective_scan": Mechanism({"u": VALUE, "filter": Input("V4", _share, constant=True), "delta": Input("V", _step),
                                 "A": Input("VK", _rate, constant=True), "B": KEY, "C": KEY}, key=16, scan=True),
    "s4d": Mechanism({"u": VALUE, "log_dt": Input("V", _negative, constant=True), "log_A_real": Input("VK", constant=True),
                      "A_imag": Input("VK", _same, constant=True), "C": Input("VK2", _same, constant=True)}, key=16, scan=True),
    "h3": Mechanism({"q": VALUE, "k": VALUE, "v": VALUE, "shift": Input("V4", _share, constant=True),
                     "log_dt": Input("1", _negative, constant=True), "log_A_real": Input("K", constant=True),
                     "A_imag": Input("K", _same, constant=True), "C": Input("K2", _same, constant=True)}, key=8, derive=_all_heads),
    "rg_lru": Mechanism({"x": VALUE, "input_gate": VALUE, "recurrence_gate": VALUE, "a": Input("V", _negative, constant=True)}, scan=True),
    "ssd": Mechanism({"x": VALUE, "dt": Input("1", F.softplus), "A": Input("1", _rate, constant=True), "B": KEY, "C": KEY}),
}


class Scan:
    """A scan and its step on numbers per head. Its state is a list: the scan's, and that of the convolution before it."""

    def __init__(self, name: str, inputs: dict[str, Input]):
        self.inputs, self.tokens_last = inputs, name != "rg_lru"
        self.function, self.one_step = getattr(heed.torch, name), getattr(heed.torch, f"{name}_step")

    def channels(self, arguments: dict[str, Tensor], has_tokens: bool) -> dict[str, Tensor]:
        given = {}
        for key, x in arguments.items():
            if self.inputs[key].constant:
                given[key] = x.flatten(0, 1)
            elif self.inputs[key].size == "K":  # what the channels of a head have in common
                given[key] = x.permute(0, 2, 3, 1) if has_tokens else x
            else:
                given[key] = x.flatten(-2).transpose(1, 2) if has_tokens and self.tokens_last else x.flatten(-2)
        return given

    def heads(self, o: Tensor, arguments: dict[str, Tensor]) -> Tensor:
        return o.unflatten(-1, next(iter(arguments.values())).shape[-2:])

    def __call__(self, return_state: bool = False, **arguments: Tensor) -> Any:
        given, tail = self.channels(arguments, True), []
        if "filter" in given:
            given["u"], *tail = heed.torch.causal_conv1d(given["u"], given.pop("filter"), activation="silu", return_state=True)
        if "a" in given:  # RG-LRU treats a first token otherwise where there is no state: steps have one
            given["initial_state"] = given["x"].new_zeros(given["x"].shape[::2])
        o, state = self.function(**given, return_state=True)
        o = self.heads(o.transpose(1, 2) if self.tokens_last else o, arguments)
        return (o, [state, *tail]) if return_state else o

    def step(self, state: list[Tensor], **arguments: Tensor) -> Tensor:
        given = self.channels(arguments, False)
        if "filter" in given:
            given["u"] = heed.torch.causal_conv1d_step(given["u"], given.pop("filter"), state=state[1], activation="silu")
        return self.heads(self.one_step(**given, state=state[0]), arguments)


class Argument(nn.Module):
    """The weights behind an Input. Biases that are mapped begin spread over channels or heads: a sigmoid of 1 forgets half of
    the past in 2 bytes, of 6 in 280."""

    def __init__(self, kind: Input, width: int, heads: int, *sizes: int):
        super().__init__()
        self.kind, self.shape = kind, (heads, *sizes)
        self.weight = None if kind.constant else nn.Parameter(torch.randn(math.prod(self.shape), width) * width**-0.5)
        spread = torch.linspace(1, 6, self.shape[-1]) if kind.map is not None else torch.zeros(self.shape[-1])
        self.bias = nn.Parameter(spread.expand(self.shape).flatten().clone()) if kind.map is not None or kind.constant else None

    def forward(self, u: Tensor, positions: Tensor) -> Tensor:
        x = self.bias if self.weight is None else F.linear(u, self.weight, self.bias)
        x = x.unflatten(-1, self.shape)
        if self.kind.rotary:
            x = heed.torch.rotary(x, positions, interleaved=False)
        if self.kind.unit:
            x = F.normalize(x, dim=-1)
        return x if self.kind.map is None else self.kind.map(x)


class Layer(nn.Module):
    def __init__(self, name: str, width: int, heads: int, dropout: float):
        super().__init__()
        self.mechanism = MECHANISMS[name]
        self.function = (lambda v: v) if name == "none" else getattr(heed.torch, name)
        self.one_step = getattr(heed.torch, f"{name}_step", None)
        if self.mechanism.scan:
            self.function = Scan(name, self.mechanism.inputs)
            self.one_step = self.function.step
        K, V = self.mechanism.key, width // heads
        sizes = {"K": [K], "V": [V], "1": [], "V4": [V, 4], "VK": [V, K], "VK2": [V, K, 2], "K2": [K, 2]}
        self.inputs = nn.ModuleDict(
            {key: Argument(kind, width, heads, *sizes[kind.size]) for key, kind in self.mechanism.inputs.items()})
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
        """The mechanism for one byte: by its step, or by attention over the keys and values that are kept."""
        if self.one_step is not None:
            constants = {key for key, kind in self.mechanism.inputs.items() if kind.constant}
            one = {key: x if key in constants else x[:, 0] for key, x in arguments.items()}
            return self.one_step(**one, state=memory[0], **self.mechanism.options)[:, None]
        for i, key in enumerate(("k", "v")[: len(memory)]):
            arguments[key] = memory[i] = torch.cat([memory[i], arguments[key]], 1)[:, -WINDOW:]
        return self.function(**arguments, **self.mechanism.options)

    def start(self, batch: int) -> list[Any]:
        """The memory before the first byte: what no bytes leave behind."""
        nothing = self.arguments(torch.zeros(batch, 0, len(self.norm1.weight)), torch.arange(0))
        if self.one_step is not None:
            return [self.function(**nothing, **self.mechanism.options, return_state=True)[1]]
        return [nothing[key] for key in ("k", "v") if "k" in nothing]


class ByteModel(nn.Module):
    def __init__(self, mechanism: str, *, layers: int = 3, width: int = 128, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.mechanism, self.heads = mechanism, heads
        self.byte, self.byte_before = nn.Embedding(256, width), nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(mechanism, width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, EPS), nn.Linear(width, 256, bias=False)
        for table in (self.byte, self.byte_before):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Logits [B, T, 256] of the bytes after each of `text`, [B, T]."""
        x = self.byte(text) + F.pad(self.byte_before(text[:, :-1]), (0, 0, 1, 0))
        positions = torch.arange(text.shape[1])
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))

    @torch.no_grad()
    def start(self, batch: int = 1) -> dict[str, Any]:
        return {"position": 0, "before": None, "layers": [layer.start(batch) for layer in self.layers]}

    @torch.no_grad()
    def step(self, byte: Tensor, state: dict[str, Any]) -> Tensor:
        """Logits [B, 256] after one more byte of each text, [B]; updates the state."""
        x = self.byte(byte)[:, None]
        if state["before"] is not None:
            x = x + self.byte_before(state["before"])[:, None]
        positions = torch.tensor([state["position"]])
        for layer, memory in zip(self.layers, state["layers"]):
            x = layer(x, positions, memory)
        state.update(position=state["position"] + 1, before=byte)
        return self.head(self.norm(x))[:, 0]

    def save(self, path: str) -> None:
        """One file with everything that generate.cc needs. Sizes are those of its tensors."""
        metadata = {"mechanism": self.mechanism, "heads": str(self.heads), "window": str(WINDOW)}
        save_file(self.state_dict(), path, metadata)

    def save_folder(self, path: str) -> None:
        """That file as model.safetensors, and config.json beside it: what heed::Model opens, and `heed generate`."""
        width = len(self.norm.weight)
        config = {"model_type": "heed_byte_lm", "architectures": ["ByteModel"], "mechanism": self.mechanism, "vocab_size": 256,
                  "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": len(self.layers),
                  "num_attention_heads": self.heads, "key_dim": MECHANISMS[self.mechanism].key, "sliding_window": WINDOW,
                  "rms_norm_eps": EPS, "eos_token_id": None}
        folder = pathlib.Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.save(str(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(path: str) -> ByteModel:
    with safe_open(path, "pt") as file:
        metadata, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    width = state["byte.weight"].shape[1]
    model = ByteModel(metadata["mechanism"], layers=layers, width=width, heads=int(metadata["heads"]))
    model.load_state_dict(state)
    return model.eval()
