# A byte-level language model whose mechanism is picked by name: whole texts at once to train, byte by byte to write.
"""The model sees each byte with the one before it, then come layers (../tasks/layer.py) that differ in their mechanism
alone. Without a mechanism ("none") all that is known is two bytes, as in the table of counts that train.py compares
with.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))
from layer import (
    EPS, KEY, QKV, S4D, SELECTIVE_SCAN, TURNED_QKV, VALUE, Input, Layer, Mechanism, negative, rate, same, share)

WINDOW = 256  # keys that attention sees, and keeps


def _one_key(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """RWKV-7 takes away a share of what its key finds: a and b are that key."""
    share = x.pop("share")
    return x | {"a": -x["k"], "b": x["k"] * share}


def _all_heads(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """H3 has the taps of all heads in a row."""
    return x | {"shift": x["shift"].flatten(0, 1)}


UNIT = Input("K", unit=True)
DELTA = {"q": KEY, "k": UNIT, "v": VALUE, "beta": Input("1", torch.sigmoid)}

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
    "mlstm": Mechanism(QKV | {"i": Input("1"), "f": Input("1", same)}),
    "rwkv6": Mechanism({"r": KEY, "k": KEY, "v": VALUE, "log_decay": Input("K", F.logsigmoid),
                        "u": Input("K", constant=True)}),
    "gated_delta_rule": Mechanism(DELTA | {"log_decay": Input("1", F.logsigmoid)}),
    "kda": Mechanism(DELTA | {"log_decay": Input("K", F.logsigmoid)}),
    "rwkv7": Mechanism({"r": KEY, "log_decay": Input("K", F.logsigmoid), "k": UNIT, "v": VALUE,
                        "share": Input("K", torch.sigmoid)},
                       derive=_one_key),
    "selective_scan": SELECTIVE_SCAN,
    "s4d": S4D,
    "h3": Mechanism({"q": VALUE, "k": VALUE, "v": VALUE, "shift": Input("V4", share, constant=True),
                     "log_dt": Input("1", negative, constant=True), "log_A_real": Input("K", constant=True),
                     "A_imag": Input("K", same, constant=True), "C": Input("K2", same, constant=True)}, key=8,
                    derive=_all_heads),
    "rg_lru": Mechanism({"x": VALUE, "input_gate": VALUE, "recurrence_gate": VALUE,
                         "a": Input("V", negative, constant=True)}, scan=True),
    "ssd": Mechanism({"x": VALUE, "dt": Input("1", F.softplus), "A": Input("1", rate, constant=True), "B": KEY,
                      "C": KEY}),
}


class ByteModel(nn.Module):
    def __init__(self, mechanism: str, *, layers: int = 3, width: int = 128, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.mechanism, self.heads = mechanism, heads
        self.byte, self.byte_before = nn.Embedding(256, width), nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(mechanism, MECHANISMS[mechanism], width, heads, dropout)
                                    for _ in range(layers))
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
        """Writes model.safetensors as save() does, and config.json: heed::Model and `heed generate` open the folder."""
        width = len(self.norm.weight)
        config = {"model_type": "heed_byte_lm", "architectures": ["ByteModel"],
                  "mechanism": self.mechanism, "vocab_size": 256,
                  "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": len(self.layers),
                  "num_attention_heads": self.heads, "key_dim": MECHANISMS[self.mechanism].key,
                  "sliding_window": WINDOW, "rms_norm_eps": EPS, "eos_token_id": None}
        folder = Path(path)
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
