# heed.torch.nn.LatentAttention: multi-head latent attention (MLA), as DeepSeek-V2 and V3 have it.
"""LatentAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument
from heed.torch.nn import _families
from heed.torch.nn._layer import Layer, RMSNorm, attended, check_positions, check_sizes


class LatentAttention(Layer):
    """Attention whose keys and values are made from one latent row per token, which is all that a cache keeps.

        [q_n, q_r]_h = x W_q, or norm(x W_qa) W_qb         [c, r] = x W_kva;  c~ = norm(c)         norm: RMS norm
        [k_n, v]_h   = c~ W_kvb                            q_r, r: rotary; all heads share r
        y = concat_h softmax(scale ([q_n, rotary(q_r)] [k_n, rotary(r)]^T)) v W_o

    With a state, decoding never makes keys or values: W_kvb = [W_uk, W_uv]_h is absorbed, as <q_n, c~ W_uk> = <q_n
    W_uk^T, c~>, and W_uv follows the sum over latents. x, y [B, T, hidden_size]. Parameters are those of Transformers'
    DeepseekV3Attention, and of DeepseekV2Attention. scale: (qk_nope_head_dim + qk_rope_head_dim)^-1/2, times YaRN's
    factor for a scaling that has mscale_all_dim. Source: DeepSeek-AI, arXiv:2405.04434.

    State: a heed.torch.LatentKVCache. `options` of a call are those of heed.torch.attention, with a state those of its
    attend.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, kv_lora_rank: int, qk_nope_head_dim: int,
                 qk_rope_head_dim: int, v_head_dim: int, q_lora_rank: int | None = None, bias: bool = False,
                 base: float = 10000.0, interleaved: bool = True, scaling: dict[str, Any] | None = None,
                 scale: float | None = None, eps: float = 1e-6, dropout: float = 0.0, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        check_sizes("LatentAttention", hidden_size=hidden_size, num_heads=num_heads, kv_lora_rank=kv_lora_rank,
                    qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim, v_head_dim=v_head_dim,
                    q_lora_rank=1 if q_lora_rank is None else q_lora_rank)
        self.hidden_size, self.num_heads, self.kv_lora_rank, self.q_lora_rank = (
            hidden_size, num_heads, kv_lora_rank, q_lora_rank)
        self.parts = (qk_nope_head_dim, qk_rope_head_dim)
        self.v_head_dim, self.dropout = v_head_dim, dropout
        self.rotary = {"base": base, "interleaved": interleaved, "scaling": scaling}
        if scale is None:
            scale = sum(self.parts) ** -0.5
            of_all, factor = ((scaling or {}).get(key) for key in ("mscale_all_dim", "factor"))
            if of_all and factor is None:
                raise InvalidArgument("LatentAttention: scaling has no factor beside mscale_all_dim, expected one")
            if of_all and factor > 1:  # type: ignore[operator]
                scale *= (0.1 * of_all * math.log(factor) + 1) ** 2  # type: ignore[arg-type]
        self.scale = scale
        width = num_heads * sum(self.parts)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, width, bias=False, **factory)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=bias, **factory)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps=eps, **factory)
            self.q_b_proj = nn.Linear(q_lora_rank, width, bias=False, **factory)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=bias, **factory)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps=eps, **factory)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False, **factory)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=bias, **factory)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> LatentAttention:
        """Reads a configuration of `model_type` axk1, deepseek_v2, deepseek_v3, glm4_moe_lite, youtu, or none."""
        c = _families.LATENT.open(config)
        sizes = {name: c[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                                            "q_lora_rank")}
        hidden_size, heads = c["hidden_size"], c["num_attention_heads"]
        c.only("num_key_value_heads", None, heads)
        c.only("head_dim", None, sizes["qk_rope_head_dim"])
        own = {**sizes, "bias": c["attention_bias"], "interleaved": c.get("rope_interleave", True),
               "dropout": c["attention_dropout"] or 0.0}
        own |= c.rotary(sizes["qk_rope_head_dim"], interleaved=own["interleaved"])
        c.close()
        return cls(hidden_size, heads, **{**own, **options})

    def new_state(self, batch: int, **options: Any) -> heed.torch.LatentKVCache:
        """options: those of heed.torch.LatentKVCache."""
        options = {"dtype": self.kv_b_proj.weight.dtype, **options}
        return heed.torch.LatentKVCache(batch, self.kv_lora_rank, self.parts[1], **options)

    def _expanded(self, q: Tensor, latent: Tensor, k_r: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention over keys and values that are made."""
        kv = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))
        k_n, v = kv.split((self.parts[0], self.v_head_dim), -1)
        k = torch.cat([k_n, k_r.expand(-1, -1, self.num_heads, -1)], -1)
        return heed.torch.attention(q, k, v, causal=True, scale=self.scale, **options)

    def _absorbed(self, q: Tensor, state: Any, lengths: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Attention over the latents of a cache."""
        to_k, to_v = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split((self.parts[0], self.v_head_dim), 1)
        q_n, q_r = q.split(self.parts, -1)
        q = torch.cat([torch.einsum("bthn,hnr->bthr", q_n, to_k), q_r], -1)
        return torch.einsum("bthr,hvr->bthv", attended(state, q, lengths, {"scale": self.scale, **options}), to_v)

    def forward(self, x: Tensor, state: heed.torch.LatentKVCache | None = None, *, lengths: Any = None,
                positions: Any = None, **options: Any) -> Tensor:
        """positions: int [T] or [B, T], positions in the rotary encoding; without a state, default 0, 1, ..."""
        x, lengths = self._check(x, state, heed.torch.LatentKVCache, lengths)
        check_positions("LatentAttention", positions, state)
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.num_heads, -1))
        latent, k_r = self.kv_a_proj_with_mqa(x).split((self.kv_lora_rank, self.parts[1]), -1)
        latent = self.kv_a_layernorm(latent)
        at = torch.arange(x.shape[1]) if positions is None else positions
        before = None if state is None else state.lengths
        if before is not None and bool(before.any()):
            at = before[:, None] + torch.arange(x.shape[1])
        q_r, k_r = (heed.torch.rotary(rows, at, **self.rotary) for rows in (q[..., self.parts[0]:], k_r[:, :, None]))
        q[..., self.parts[0]:] = q_r  # in place: no other tensor shares these rows
        if state is not None:
            state.append(torch.cat([latent, k_r[:, :, 0]], -1), lengths)
        if before is not None and (x.shape[1] == 1 or bool(before.any())):
            o = self._absorbed(q, state, lengths, options)
        else:  # a whole sequence, for which making keys costs less than attention to latents
            options = {"dropout": self.dropout if self.training else 0.0, **options}
            o = self._expanded(q, latent, k_r, {"key_lengths": lengths, "query_lengths": lengths, **options})
        return self.o_proj(o.flatten(2))
