# heed.torch.nn.GroupedQueryAttention: the attention of Llama, Mistral, Qwen2 and Qwen3.
"""GroupedQueryAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument
from heed.torch.nn import _families
from heed.torch.nn._layer import Layer, RMSNorm, attended, check_multiple, check_positions, check_sizes


class GroupedQueryAttention(Layer):
    """Causal attention in which groups of query heads share a key head, with rotary encoding.

        q = rotary(norm(x W_q))   k = rotary(norm(x W_k))   v = x W_v          norm: RMS norm per head, with qk_norm
        y = concat_h softmax(scale q_h k_{h / group}^T) v_{h / group} W_o      scale = head_dim^-1/2

    x, y [B, T, hidden_size]; W_q to num_heads head_dim channels, W_k and W_v to num_kv_heads head_dim. Parameters are
    those of Transformers' LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention and their like. `base`,
    `interleaved`, `rotary_dim` and `scaling` are heed.rotary's; a window of w keys, the newest included, is Mistral's.
    With `Residual` it is the first half of their decoder layers. Sources: Ainslie et al., arXiv:2305.13245; Su et al.,
    arXiv:2104.09864.

    State: a heed.torch.KVCache, which turns keys as they are appended. `options` of a call are those of
    heed.torch.attention, with a state those of its attend.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int | None = None, *,
                 head_dim: int | None = None, bias: bool = False, out_bias: bool | None = None, qk_norm: bool = False,
                 eps: float = 1e-6, base: float = 10000.0, rotary_dim: int | None = None, interleaved: bool = False,
                 scaling: dict[str, Any] | None = None, scale: float | None = None, window: int | None = None,
                 softcap: float | None = None, dropout: float = 0.0, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        name, factory = "GroupedQueryAttention", {"device": device, "dtype": dtype}
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(name, hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads,
                    head_dim=1 if head_dim is None else head_dim, window=1 if window is None else window)
        check_multiple(name, "num_heads", num_heads, "num_kv_heads", num_kv_heads)
        if head_dim is None:
            check_multiple(name, "hidden_size", hidden_size, "num_heads", num_heads)
            head_dim = hidden_size // num_heads
        self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim = (
            hidden_size, num_heads, num_kv_heads, head_dim)
        self.rotary = {"base": base, "dim": rotary_dim, "interleaved": interleaved, "scaling": scaling}
        self.scale, self.dropout = scale, dropout
        self.masks = {} if window is None else {"window": (window - 1, 0)}
        self.masks |= {} if softcap is None else {"softcap": softcap}
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias, **factory)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **factory)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **factory)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias if out_bias is None else out_bias,
                                **factory)
        if qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(head_dim, eps=eps, **factory) for _ in range(2))

    @classmethod
    def from_config(cls, config: Any, layer: int = 0, **options: Any) -> GroupedQueryAttention:
        """Reads a configuration of one of these `model_type`s; `layer` says whose, where layers differ.

        arcee, aria_text, cohere, dots1, emu3_text_model, ernie4_5, gemma, gemma2, granite, granitemoe,
        granitemoeshared, helium, hy_v3, hyperclovax, jais2, llama, ministral, mistral, mixtral, olmo, qwen2, qwen2_moe,
        qwen3, qwen3_moe, smollm3 (layers with rotary encoding), starcoder2, or none.
        """
        if not isinstance(layer, int) or layer < 0:
            raise InvalidArgument(f"{cls.__name__}.from_config: layer is {layer!r}, expected an int of at least 0")
        c = _families.GROUPED_QUERY.open(config)
        hidden_size, heads, head_dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
        check_sizes(c.name, hidden_size=hidden_size, num_attention_heads=heads,
                    head_dim=1 if head_dim is None else head_dim)
        own = {
            "head_dim": head_dim, "dropout": c.get("attention_dropout") or 0.0, "eps": c.get("rms_norm_eps", 1e-6),
            "bias": c.get("attention_bias", c.get("use_bias", c.get("qkv_bias", False))),
            "softcap": c.get("attn_logit_softcapping"), "window": c["sliding_window"] if c.windowed(layer) else None,
            **c.family.options,
        }
        if "attention_multiplier" in c.family.fields:
            own["scale"] = c["attention_multiplier"]
        elif "query_pre_attn_scalar" in c.family.fields:
            own["scale"] = c["query_pre_attn_scalar"] ** -0.5
        if "no_rope_layers" in c.family.fields:
            kept, interval = c["no_rope_layers"], c["no_rope_layer_interval"]
            if not (c.by_layer("no_rope_layers", layer) if kept is not None else (layer + 1) % interval):
                name = "no_rope_layer_interval" if kept is None else "no_rope_layers"
                raise c.refusal(name, f"rotary encoding in layer {layer}")
        own |= c.rotary(head_dim or hidden_size // heads, interleaved=own.get("interleaved", False))
        kv_heads = c["num_key_value_heads"]
        c.close()
        return cls(hidden_size, heads, kv_heads, **{**own, **options})

    def new_state(self, batch: int, **options: Any) -> heed.torch.KVCache:
        """options: those of heed.torch.KVCache."""
        rotary = {key: x for key, x in self.rotary.items() if x is not None}
        return heed.torch.KVCache(batch, self.num_kv_heads, self.head_dim,
                                  **{"dtype": self.k_proj.weight.dtype, "rotary": rotary, **options})

    def forward(self, x: Tensor, state: heed.torch.KVCache | None = None, *, lengths: Any = None, positions: Any = None,
                **options: Any) -> Tensor:
        """positions: int [T] or [B, T], positions in the rotary encoding; without a state, default 0, 1, ..."""
        x, lengths = self._check(x, state, heed.torch.KVCache, lengths)
        check_positions("GroupedQueryAttention", positions, state)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if "q_norm" in self._modules:
            q, k = self.q_norm(q), self.k_norm(k)
        options = {**self.masks, "scale": self.scale, **options}
        if state is not None:
            state.append(k, v, lengths)
            o = attended(state, q, lengths, options)
        else:
            at = torch.arange(x.shape[1]) if positions is None else positions
            q, k = (heed.torch.rotary(rows, at, **self.rotary) for rows in (q, k))
            o = heed.torch.attention(q, k, v, causal=True, key_lengths=lengths, query_lengths=lengths,
                                     dropout=self.dropout if self.training else 0.0, **options)
        return self.o_proj(o.flatten(2))
