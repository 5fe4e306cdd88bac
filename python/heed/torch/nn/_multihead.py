# heed.torch.nn.MultiheadAttention: self or cross attention with projections, and the residual and layer norm around it.
"""MultiheadAttention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument
from heed.torch.nn import _families
from heed.torch.nn._layer import (Layer, State, attended, check_choice, check_multiple, check_rows, check_sizes,
                                  without_padding)

# The modules' names of query, key, value and output projections, and of the norm.
_NAMES = {
    "bart": ("q_proj", "k_proj", "v_proj", "out_proj", "layer_norm"),
    "bert": ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm"),
}


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root._modules[folder]  # type: ignore[assignment]
    root.add_module(name, module)


class MultiheadAttention(Layer):
    """Attention of several heads, of a sequence to itself or to a memory.

        q = x W_q + b_q    k = m W_k + b_k    v = m W_v + b_v          m = x, or the memory [B, S, memory_size]
        f(x) = concat_h softmax(scale q_h k_h^T) v_h W_o + b_o         causal, or under any mask of heed.torch.attention
        y = f(x);    norm="post": LayerNorm(x + f(x));    norm="pre": x + f(LayerNorm(x))

    x, y [B, T, hidden_size]. Parameters are those of Transformers' BartAttention (names="bart"; the norm is
    layer_norm), of Whisper and others that call them so, or of BertAttention (names="bert"), which is norm="post". With
    memory_size, which may be hidden_size, keys and values are the memory's, which calls with a state that has it leave
    out. Source: Vaswani et al., arXiv:1706.03762.

    State: of causal self attention a heed.torch.KVCache, of cross attention a State of the memory's keys and values.
    `options` of a call are those of heed.torch.attention; with a KVCache those of its attend.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, memory_size: int | None = None, causal: bool = False,
                 bias: bool = True, key_bias: bool | None = None, scale: float | None = None, dropout: float = 0.0,
                 norm: str | None = None, eps: float = 1e-5, out_dropout: float = 0.0, names: str = "bart",
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        name, factory = "MultiheadAttention", {"device": device, "dtype": dtype}
        check_sizes(name, hidden_size=hidden_size, num_heads=num_heads,
                    memory_size=1 if memory_size is None else memory_size)
        check_multiple(name, "hidden_size", hidden_size, "num_heads", num_heads)
        check_choice(name, "norm", norm, (None, "post", "pre"))
        check_choice(name, "names", names, _NAMES)
        if memory_size is not None and causal:
            raise InvalidArgument(f"{name}: causal is True with a memory_size, expected False: "
                                  "a memory has no order beside x")
        self.hidden_size, self.num_heads, self.memory_size = hidden_size, num_heads, memory_size
        self.head_dim, self.causal, self.scale, self.dropout = hidden_size // num_heads, causal, scale, dropout
        self.norm, self.out_dropout, self.names = norm, out_dropout, names
        of_keys = hidden_size if memory_size is None else memory_size
        widths = (hidden_size, of_keys, of_keys, hidden_size)
        biases = (bias, bias if key_bias is None else key_bias, bias, bias)
        for path, width, has_bias in zip(_NAMES[names], widths, biases):
            _put(self, path, nn.Linear(width, hidden_size, bias=has_bias, **factory))
        if norm is not None:
            _put(self, _NAMES[names][-1], nn.LayerNorm(hidden_size, eps=eps, **factory))

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> MultiheadAttention:
        """Reads a configuration of one of these `model_type`s.

        names="bert" and norm="post": align_text_model, bert, bert-generation, camembert, chinese_clip_text_model,
        clap_text_model, data2vec-text, electra, ernie, layoutlm, markuplm, rembert, roberta, roc_bert, splinter,
        xlm-roberta; is_decoder makes the layer causal. names="bart": clip_text_model (causal), clip_vision_model,
        siglip_text_model, siglip_vision_model, or none; and of models with a decoder bart, blenderbot,
        blenderbot-small, m2m_100, marian, mbart, pegasus, plbart, whisper: the encoder's layer, with causal=True or a
        memory_size the decoder's.
        """
        c = _families.MULTIHEAD.open(config)
        of_decoder = options.get("causal", False) or options.get("memory_size") is not None
        if "d_model" in c.family.fields:
            hidden_size, encoding, decoding = c["d_model"], c["encoder_attention_heads"], c["decoder_attention_heads"]
            heads = decoding if of_decoder else encoding
        else:
            hidden_size, heads = c["hidden_size"], c["num_attention_heads"]
        own: dict[str, Any] = {}
        if "attention_probs_dropout_prob" in c.family.fields:
            own = {"dropout": c["attention_probs_dropout_prob"], "out_dropout": c["hidden_dropout_prob"],
                   "eps": c["layer_norm_eps"], "names": "bert", "norm": "post"}
        else:
            own = {"dropout": c["attention_dropout"] or 0.0}
        own |= c.family.options
        if c.get("is_decoder", False) and options.get("memory_size") is None:
            own["causal"] = True
        c.close()
        return cls(hidden_size, heads, **{**own, **options})

    def new_state(self, batch: int, **options: Any) -> Any:
        """options: those of heed.torch.KVCache."""
        if self.memory_size is not None:
            weight = self.get_submodule(_NAMES[self.names][0]).weight
            empty = weight.new_empty(batch, 0, self.num_heads, self.head_dim)
            return State(batch, {"k": empty, "v": empty, "key_lengths": torch.zeros(batch, dtype=torch.int64)})
        if not self.causal:
            return super().new_state(batch)
        weight = self.get_submodule(_NAMES[self.names][0]).weight
        return heed.torch.KVCache(batch, self.num_heads, self.head_dim, **{"dtype": weight.dtype, **options})

    def _heads(self, path: str, x: Tensor) -> Tensor:
        return self.get_submodule(path)(x).unflatten(-1, (self.num_heads, self.head_dim))

    def _attend(self, x: Tensor, memory: Tensor | None, state: Any, lengths: Tensor | None, memory_lengths: Any,
                options: dict[str, Any]) -> Tensor:
        of_q, of_k, of_v, *_ = _NAMES[self.names]
        q = self._heads(of_q, x)
        if state is None or memory is not None:
            k, v = (self._heads(path, x if memory is None else memory) for path in (of_k, of_v))
        if isinstance(state, heed.torch.KVCache):
            state.append(self._heads(of_k, x), self._heads(of_v, x), lengths)
            return attended(state, q, lengths, {"scale": self.scale, **options})
        if state is not None:  # the state of a memory
            if memory is not None:
                rows = torch.full((len(k),), k.shape[1]) if memory_lengths is None else memory_lengths
                state.tensors.update(k=k, v=v, key_lengths=rows)
            k, v, memory_lengths = state.k, state.v, state.key_lengths
        key_lengths = lengths if self.memory_size is None else memory_lengths
        return heed.torch.attention(
            q, k, v, causal=self.causal, scale=self.scale, dropout=self.dropout if self.training else 0.0,
            key_lengths=key_lengths, query_lengths=lengths, **options)

    def forward(self, x: Tensor, state: Any = None, *, memory: Tensor | None = None, lengths: Any = None,
                memory_lengths: Any = None, **options: Any) -> Tensor:
        """memory: [B, S, memory_size] of cross attention, memory_lengths [B] its tokens; None if the state holds it."""
        name = "MultiheadAttention"
        x, lengths = self._check(x, state, heed.torch.KVCache if self.memory_size is None else State, lengths)
        if self.memory_size is None and memory is not None:
            raise InvalidArgument(f"{name}: memory is given, expected none: the layer has no memory_size")
        if memory is not None:
            check_rows(name, "memory", memory, self.memory_size)
            memory, memory_lengths = without_padding(name, "memory_lengths", memory, memory_lengths)
        elif self.memory_size is not None and (state is None or state.k.shape[1] == 0):
            raise InvalidArgument(f"{name}: memory is None, expected [B, S, {self.memory_size}], "
                                  "or a state that has it")
        norm = None if self.norm is None else self.get_submodule(_NAMES[self.names][-1])
        rows = norm(x) if self.norm == "pre" else x
        o = self._attend(rows, memory, state, lengths, memory_lengths, options)
        y = self.get_submodule(_NAMES[self.names][3])(o.flatten(2))
        y = F.dropout(y, self.out_dropout, self.training) if self.out_dropout else y
        if norm is None:
            return y
        return norm(x + y) if self.norm == "post" else x + y
