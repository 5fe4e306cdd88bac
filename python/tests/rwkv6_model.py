# A plain RWKV-6 language model, token by token from its equations, with the names of the published folders.
"""Transformers has no RWKV-6: its authors publish a module beside the weights. This one has that module's names."""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

LETTERS = "wkvrg"


class TimeMixing(nn.Module):
    def __init__(self, width, inner, head_size, mix_rank, decay_rank, eps):
        super().__init__()
        for letter in "x" + LETTERS:
            self.register_parameter(f"time_maa_{letter}", nn.Parameter(torch.empty(1, 1, width)))
        self.time_maa_w1 = nn.Parameter(torch.empty(width, 5 * mix_rank))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, mix_rank, width))
        self.time_decay = nn.Parameter(torch.empty(1, 1, inner))
        self.time_decay_w1 = nn.Parameter(torch.empty(width, decay_rank))
        self.time_decay_w2 = nn.Parameter(torch.empty(decay_rank, inner))
        self.time_faaaa = nn.Parameter(torch.empty(inner // head_size, head_size))
        for name in ("receptance", "key", "value", "gate"):
            self.add_module(name, nn.Linear(width, inner, bias=False))
        self.output = nn.Linear(inner, width, bias=False)
        self.ln_x = nn.GroupNorm(inner // head_size, inner, eps=eps)

    def forward(self, x):
        heads, size = self.time_faaaa.shape
        rank = self.time_maa_w2.shape[1]
        S = x.new_zeros(len(x), heads, size, size)  # [B, H, K, V]
        rows, before = [], torch.zeros_like(x[:, 0])
        for token in x.unbind(1):
            difference = before - token
            hidden = torch.tanh((token + difference * self.time_maa_x[0, 0]) @ self.time_maa_w1)
            mixed = {}
            for i, letter in enumerate(LETTERS):
                share = (getattr(self, f"time_maa_{letter}")[0, 0]
                         + hidden[:, i * rank:(i + 1) * rank] @ self.time_maa_w2[i])
                mixed[letter] = token + difference * share
            decay = self.time_decay[0, 0] + torch.tanh(mixed["w"] @ self.time_decay_w1) @ self.time_decay_w2
            fade = torch.exp(-torch.exp(decay)).view(-1, heads, size, 1)
            r, k, v = (getattr(self, name)(mixed[name[0]]).view(-1, heads, size)
                       for name in ("receptance", "key", "value"))
            written = k[..., None] * v[:, :, None]
            o = torch.einsum("bhk,bhkv->bhv", r, S + self.time_faaaa[..., None] * written)
            S = fade * S + written
            rows.append(self.output(self.ln_x(o.flatten(1)) * F.silu(self.gate(mixed["g"]))))
            before = token
        return torch.stack(rows, 1)


class ChannelMixing(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.time_maa_k, self.time_maa_r = (nn.Parameter(torch.empty(1, 1, width)) for _ in range(2))
        self.key, self.value = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)

    def forward(self, x):
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
        k, r = (x + (before - x) * mix for mix in (self.time_maa_k, self.time_maa_r))
        return torch.sigmoid(self.receptance(r)) * self.value(torch.relu(self.key(k)) ** 2)


class Block(nn.Module):
    def __init__(self, index, width, eps, time, channel):
        super().__init__()
        if index == 0:
            self.pre_ln = nn.LayerNorm(width, eps=eps)
        self.ln1, self.ln2 = (nn.LayerNorm(width, eps=eps) for _ in range(2))
        self.attention, self.feed_forward = TimeMixing(width, **time), ChannelMixing(width, channel)

    def forward(self, x):
        x = self.pre_ln(x) if hasattr(self, "pre_ln") else x
        x = x + self.attention(self.ln1(x))
        return x + self.feed_forward(self.ln2(x))


class Model(nn.Module):
    """A model with the sizes of config.json; sizes that it omits are those of the published module."""

    def __init__(self, config):
        super().__init__()
        width, self.config = config["hidden_size"], config
        inner, eps = config.get("attention_hidden_size") or width, config.get("layer_norm_epsilon", 1e-5)
        time = {"inner": inner, "head_size": config.get("head_size", 64), "mix_rank": 32, "decay_rank": 64,
                "eps": 1e-5 * config.get("head_size_divisor", 8) ** 2}
        channel = config.get("intermediate_size") or int(width * 3.5 // 32 * 32)
        self.rwkv = nn.Module()
        self.rwkv.embeddings = nn.Embedding(config["vocab_size"], width)
        self.rwkv.blocks = nn.ModuleList(Block(i, width, eps, time, channel)
                                         for i in range(config["num_hidden_layers"]))
        self.rwkv.ln_out = nn.LayerNorm(width)
        self.head = nn.Linear(width, config["vocab_size"], bias=False)

    def forward(self, ids):
        x = self.rwkv.embeddings(ids)
        for block in self.rwkv.blocks:
            x = block(x)
        return self.head(self.rwkv.ln_out(x))

    def save(self, folder, dtype=torch.float32):
        folder.mkdir(exist_ok=True)
        config = {"model_type": "rwkv6", "architectures": ["Rwkv6ForCausalLM"], "tie_word_embeddings": False,
                  **self.config}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: x.to(dtype).contiguous() for name, x in self.state_dict().items()},
                  folder / "model.safetensors")


@torch.no_grad()
def randomise(module, seed):
    """Weights for which everything in a layer matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("w1", "w2")):
            noise *= parameter.shape[-2] ** -0.5
        elif "maa" in name:
            noise = 0.5 + 0.3 * noise
        elif "ln" in name:
            noise = 0.3 * noise + name.endswith("weight")
        elif parameter.dim() == 2:
            noise *= parameter.shape[1] ** -0.5 * (1.5 if "embeddings" in name else 1)
        parameter.copy_(noise)
    return module.eval()
