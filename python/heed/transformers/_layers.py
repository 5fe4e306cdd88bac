# Functions that recurrent layers of Transformers call, computed by heed: one for each in their modeling files.
"""Functions and methods of modeling files, by name, with the parameters that they have there.

Each computes what the original computes, in the types in which it does: most turn their inputs to float32, and so their
rows, results and states are here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import heed.torch
from heed.torch.nn._layer import unit


class Declined(NamedTuple):
    """The result of a function that declines its arguments."""

    reason: str


class Function(NamedTuple):
    on_heed: Callable
    by: str
    divides: bool = False  # takes `group`, whose ranks hold parts of the tokens


class Method(NamedTuple):
    name: str
    on_heed: Callable
    by: str
    note: str = ""  # for the report
    divides: bool = False  # as of functions
    takes: Callable[[nn.Module], bool] = lambda layer: True  # the layers of this class that it is for


def refuses(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Returns why heed computes no call with these arguments; None if it does."""
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        if kwargs.get(name) is not None:
            return f"{name} was given, expected None"
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and x.device.type != "cpu":
            return f"a tensor is on {x.device}, expected the CPU"
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize == 1:
            return f"a tensor has dtype {x.dtype}, expected float64, float32, bfloat16 or float16"
    return None


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _written_to(state: Tensor, *inputs: Tensor | None) -> Declined | None:
    """A state that a step would write to: heed's are float32, and nothing is differentiated through them."""
    if state.dtype != torch.float32:
        return Declined(f"the state has dtype {state.dtype}, expected float32")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (state, *inputs)):
        return Declined("a gradient is wanted through a step, expected torch.no_grad()")
    return None


def _causal_conv1d(hidden_states, weight, bias=None, activation=None, *, group=None, **options):
    if activation not in (None, "silu", "swish"):
        return Declined(f"activation is {activation!r}, expected 'silu', 'swish' or None")
    o = heed.torch.causal_conv1d(hidden_states.to(weight.dtype), weight, bias, activation=activation and "silu",
                                 group=group)
    return o.to(hidden_states.dtype)


def _causal_conv1d_step(hidden_states, conv_state, weight, bias=None, activation=None):
    """conv_state [B, D, S] is the last S >= W - 1 inputs: the step shifts the last W - 1, this function the others."""
    declined = _written_to(conv_state, hidden_states, weight, bias)
    before = conv_state.shape[-1] - (weight.shape[-1] - 1)
    if hidden_states.shape[-1] != 1 or before < 0:
        declined = Declined(f"{hidden_states.shape[-1]} tokens beside a state of {conv_state.shape[-1]}, expected one")
    if activation not in (None, "silu", "swish"):
        declined = Declined(f"activation is {activation!r}, expected 'silu', 'swish' or None")
    if declined is not None:
        return declined
    if before > 0:  # where W is 1 the step's state has no columns, and the token follows at once
        conv_state[..., :before] = torch.cat((conv_state, hidden_states.to(conv_state.dtype)), -1)[..., 1:before + 1]
    o = heed.torch.causal_conv1d_step(hidden_states[..., 0].to(weight.dtype), weight, bias,
                                      state=conv_state[..., before:], activation=activation and "silu")
    return o[..., None].to(hidden_states.dtype)


def _ssd(hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
         dt_limit=(0.0, float("inf")), return_final_states=False, z=None, *, group=None, **options):
    return heed.torch.ssd(
        hidden_states.float(), dt.float(), A.float(), B.float(), C.float(), D=_float(D), z=_float(z),
        dt_bias=_float(dt_bias), dt_softplus=dt_softplus, dt_limit=tuple(dt_limit),
        initial_state=_float(initial_states), return_state=return_final_states, group=group,
    )


def _ssd_step(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **options):
    declined = _written_to(state, hidden_states, dt, A, B, C, D, dt_bias, z)
    per_head = {"dt": dt, "A": A, "D": D, "dt_bias": dt_bias}
    for name, x in per_head.items():
        if x is not None and any(x.stride(axis) for axis in range(2 if name == "dt" else 1, x.dim())):
            declined = Declined(f"{name} differs within a head, expected one number for each")
    if declined is not None:
        return declined
    dt, A, D, dt_bias = (
        None if x is None else x[(...,) + (0,) * (x.dim() - (2 if name == "dt" else 1))].float()
        for name, x in per_head.items()
    )
    o = heed.torch.ssd_step(hidden_states.float(), dt, A, B.float(), C.float(), state, D=D, z=_float(z),
                            dt_bias=dt_bias, dt_softplus=dt_softplus)
    return o.to(hidden_states.dtype)


def _selective_scan(hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                    return_last_state=False, use_mambapy=False, use_associative_scan=False, *, group=None, **options):
    return heed.torch.selective_scan(hidden_states, dt, A, B, C, D, z, delta_bias=delta_bias,
                                     delta_softplus=delta_softplus, return_state=return_last_state, group=group)


def _selective_scan_step(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **options):
    declined = _written_to(state, hidden_states, dt, A, B, C, D, dt_bias, z)
    if declined is not None:
        return declined
    return heed.torch.selective_scan_step(hidden_states, dt, A, B[:, None], C[:, None], state, D, z, delta_bias=dt_bias,
                                          delta_softplus=dt_softplus)


def _rg_lru(self, activations, position_ids):
    """RecurrentGemmaRglru.forward: a sequence begins where its position is 0."""
    begins = position_ids == 0
    if bool(begins[:, 1:].any()) or bool(begins[:, 0].any()) != bool(begins[:, 0].all()):
        return Declined("a position is 0 inside of a row, or at the first token of some rows alone: several sequences")
    heads = activations.unflatten(-1, (self.num_attention_heads, self.block_width))
    input_gate, recurrence_gate = (
        (torch.einsum("bthw,hwv->bthv", heads, weight) + bias).flatten(2)
        for weight, bias in ((self.input_gate_weight, self.input_gate_bias),
                             (self.recurrent_gate_weight, self.recurrent_gate_bias))
    )
    initial = None
    if not bool(begins[:, 0].all()):
        shape = (activations.shape[0], activations.shape[2])
        initial = (activations.new_zeros(shape, dtype=torch.float32) if self.recurrent_states is None
                   else self.recurrent_states)
    o, self.recurrent_states = heed.torch.rg_lru(activations, input_gate, recurrence_gate, self.recurrent_param,
                                                 initial_state=initial, return_state=True)
    return o


def _delta(name: str, query, key, value, g, beta, initial_state, output_final_state, normalised, one_token=False,
           group=None):
    q, k = query.float(), key.float()
    if normalised:
        q, k = unit(q), unit(k)
    if one_token and q.shape[1] == 1 and initial_state is not None and not torch.is_grad_enabled():
        state = initial_state.float().clone()  # originals leave it alone
        step = getattr(heed.torch, f"{name}_step")
        o = step(*(x[:, 0].float() for x in (q, k, value, g, beta)), state)
        return o[:, None].to(query.dtype), state if output_final_state else None
    o, state = getattr(heed.torch, name)(q, k, value.float(), g.float(), beta.float(),
                                         initial_state=_float(initial_state), return_state=True, group=group)
    return o.to(query.dtype), state if output_final_state else None


def _chunks(name: str) -> Callable:
    """The form for whole sequences of a delta rule of heed."""

    def chunks(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
               use_qk_l2norm_in_kernel=False, *, group=None, **options):
        return _delta(name, query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                      group=group)

    return chunks


def _tokens(name: str) -> Callable:
    """The form for a token or a few."""

    def tokens(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
               **options):
        return _delta(name, query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                      one_token=True)

    return tokens


def _rwkv4(time_decay, time_first, key, value, state=None, return_state=False):
    o, last = heed.torch.rwkv4(
        key, value, -torch.exp(time_decay.float()), time_first.float(),
        initial_state=None if state is None else tuple(x.float().contiguous() for x in state), return_state=True,
    )
    return o, list(last) if return_state or state is not None else None


def _mlstm(self, query, key, value, igate, fgate, c_initial=None, n_initial=None, m_initial=None,
           return_last_states=None, mode=None):
    """xLSTMBackend.forward, whose axis of heads precedes that of tokens."""
    inference = "inference" in (self.config.mode if mode is None else mode)
    if not inference and return_last_states is None:
        return_last_states = self.config.return_last_states
    initial = None
    if c_initial is not None:
        initial = (c_initial.float(), n_initial.float(), m_initial.float()[..., 0])
    o, (S, z, m) = heed.torch.mlstm(
        *(x.transpose(1, 2).float() for x in (query, key, value, igate, fgate)), eps=self.config.eps,
        initial_state=initial, return_state=True,
    )
    o = o.transpose(1, 2).to(query.dtype)
    return (o, (S, z, m[..., None])) if inference or return_last_states else o


def _lightning(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, *, group=None,
               **options):
    """MiniMaxLightningAttention.forward."""
    shape = (*hidden_states.shape[:2], self.num_attention_heads, 3 * self.head_dim)
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = qkv.masked_fill((attention_mask == 0)[:, :, None], 0)
    q, k, v = qkv.view(shape).split(self.head_dim, -1)
    state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    o, state = heed.torch.lightning(q, k, v, -self.slope_rate.float().flatten(), scale=1.0, initial_state=_float(state),
                                    return_state=True, group=group)
    o = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(o.flatten(2))
    if past_key_values is not None:
        past_key_values.set_linear_cache(self.layer_idx, state)
    return self.out_proj(o), state


def _sees_windows(attention_mask: Tensor | None, rows: int, window: int) -> tuple[bool, Tensor | None]:
    """Returns whether the last `rows` tokens see the `window` tokens up to themselves alone, and the lengths of
    sequences whose padding on the right sees anything else."""
    if attention_mask is None:  # all keys, of which a cache holds no more than a window before the first row
        return rows == 1, None
    keep = attention_mask if attention_mask.dtype is torch.bool else attention_mask == 0
    keys = keep.shape[-1]
    before = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    same = (keep == ((before >= 0) & (before < window))).all(-1)
    if bool(same.all()):
        return True, None
    if rows != keys or keep.dim() != 4 or keep.shape[1] != 1:
        return False, None
    lengths = keep.diagonal(dim1=-2, dim2=-1).sum(-1)  # [B, 1]: a token sees itself unless it is padding
    return bool((same | (torch.arange(rows) >= lengths[..., None])).all()), lengths[:, 0]


def _deepseek_v4(self, hidden_states, position_embeddings, position_ids, attention_mask, past_key_values=None,
                 **options):
    """DeepseekV4Attention.forward: windows and compressed keys in one softmax, which no mask describes."""
    from heed.transformers._attention import _wants_weights

    rows = hidden_states.shape[1]
    start = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
    if _wants_weights(options):
        return Declined("attention weights are wanted, expected outputs alone")
    if self.training and self.attention_dropout:
        return Declined(f"attention_dropout is {self.attention_dropout}, expected 0 in training")
    if not bool((position_ids == torch.arange(start, start + rows)).all()):
        return Declined("positions do not count the tokens of a row, as where one has padding")
    sees_windows, lengths = _sees_windows(attention_mask, rows, self.sliding_window)
    if not sees_windows:
        return Declined("the mask is not that of the layer's windows, as where a row has padding on the left")
    rotated = sys.modules[type(self).__module__].apply_rotary_pos_emb
    cos, sin = position_embeddings[self.rope_layer_type]
    q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
    q = self.q_b_norm(self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim)))
    q = rotated(q, cos, sin, unsqueeze_dim=2)
    kv = rotated(self.kv_norm(self.kv_proj(hidden_states))[:, None], cos, sin)
    if past_key_values is not None:
        kv = past_key_values.update(kv, kv, self.layer_idx)[0]
    chosen: list[Tensor] = []
    indexer = getattr(self.compressor, "indexer", None)
    hook = indexer and indexer.register_forward_hook(lambda module, inputs, keys: chosen.append(keys))
    try:
        compressed = self.compressor(hidden_states, q_residual, position_ids, past_key_values, self.layer_idx)[0]
    finally:
        if hook is not None:
            hook.remove()
    kv, compressed = kv.transpose(1, 2), compressed.transpose(1, 2)
    o = heed.torch.compressed_attention(
        q, kv, kv, compressed, compressed, ratio=self.compressor.compress_rate, window=self.sliding_window,
        chosen=chosen[0] if chosen else None, sinks=self.sinks, start=start, scale=self.scaling,
        lengths=None if lengths is None else lengths.expand(len(q)),
    )
    o = rotated(o, cos, -sin, unsqueeze_dim=2)
    return self.o_b_proj(self.o_a_proj(o.flatten(2).unflatten(2, (self.config.o_groups, -1))).flatten(2)), None


FUNCTIONS = {
    "causal_conv1d_fn": Function(_causal_conv1d, "causal_conv1d", divides=True),
    "causal_conv1d_update": Function(_causal_conv1d_step, "causal_conv1d_step"),
    "mamba_selective_scan": Function(_selective_scan, "selective_scan", divides=True),
    "mamba_selective_state_update": Function(_selective_scan_step, "selective_scan_step"),
    "mamba2_chunk_scan": Function(_ssd, "ssd", divides=True),
    "mamba2_selective_state_update": Function(_ssd_step, "ssd_step"),
    "torch_chunk_gated_delta_rule": Function(_chunks("gated_delta_rule"), "gated_delta_rule", divides=True),
    "torch_recurrent_gated_delta_rule": Function(_tokens("gated_delta_rule"), "gated_delta_rule_step"),
    "chunk_kimi_delta_attention": Function(_chunks("kda"), "kda", divides=True),
    "recurrent_kimi_delta_attention": Function(_tokens("kda"), "kda_step"),
    "rwkv_linear_attention": Function(_rwkv4, "rwkv4"),
}


def in_group(name: str, group: Any) -> Callable:
    """A function of FUNCTIONS for tokens that the ranks of a group hold in parts."""
    known = FUNCTIONS[name]
    if known.divides:
        return functools.partial(known.on_heed, group=group)
    return lambda *args, **kwargs: Declined("it goes on from a state, expected a call on the tokens of all ranks")


# By class of layer.
METHODS = {
    "xLSTMBackend": Method("forward", _mlstm, "mlstm"),
    "RecurrentGemmaRglru": Method("forward", _rg_lru, "rg_lru"),
    "MiniMaxLightningAttention": Method("forward", _lightning, "lightning", divides=True),
    "DeepseekV4Attention": Method("forward", _deepseek_v4, "compressed_attention",
                                  takes=lambda layer: layer.compressor is not None),
}
