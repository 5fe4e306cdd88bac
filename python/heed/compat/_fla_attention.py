# The functions of fla.ops that are softmax attention, or whose arguments are unlike those of all others.
"""parallel_attn and its relatives, native sparse attention, mixtures of blocks, attention residuals, log-linear
attention, MesaNet, TTT-Linear, PaTH, Wall attention, DeltaFormer, Parallax, Based, RWKV-4."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import heed.patterns
import heed.select
import heed.torch
from heed import InvalidArgument, Unsupported
from heed.compat._door import refuse, speaking
from heed.compat._fla_modules import l2norm
from heed.compat._norms import wide
from heed.torch import _dispatch

# The module of flash-linear-attention that has each function.
PLACES = {
    "attn_decoding_one_step": "attn.decoding",
    "chunk_log_linear_attn": "log_linear_attn.chunk",
    "chunk_mesa_net": "mesa_net.chunk",
    "chunk_ttt_linear": "ttt.chunk",
    "deltaformer_attn": "deltaformer.parallel",
    "fused_attnres": "attnres.fused",
    "fused_chunk_based": "based.fused_chunk",
    "fused_chunk_ttt_linear": "ttt.fused_chunk",
    "fused_recurrent_rwkv4": "rwkv4.fused_recurrent",
    "mesa_net_decoding_one_step": "mesa_net.decoding_one_step",
    "parallax_decode": "parallax.decode",
    "parallax_decode_one_step": "parallax.decode",
    "parallel_attn": "attn.parallel",
    "parallel_based": "based.parallel",
    "parallel_forgetting_attn": "forgetting_attn.parallel",
    "parallel_moba": "moba.parallel",
    "parallel_nsa": "nsa.parallel",
    "parallel_parallax": "parallax.parallel",
    "parallel_path_attn": "path_attn.parallel",
    "parallel_wall_attn": "wall_attn.parallel",
}

_in_their_words = speaking(
    log_decay="g",
    sinks="sink_bias",
    cu_seqlens_q="cu_seqlens",
    window="window_size",
    u="u",
    block="block_size",
    count="block_counts",
    gates="g_cmp, g_slc or g_swa",
)


def _bounds(cu_seqlens: Any) -> list[int]:
    return [int(x) for x in cu_seqlens]


@_in_their_words
def parallel_attn(
    q,
    k,
    v,
    g=None,
    scale=None,
    window_size=None,
    cu_seqlens=None,
    chunk_indices=None,
    *,
    sink_bias=None,
    head_first=False,
):
    """Causal attention with grouped queries; g [B, T, HQ] are log forget gates, sink_bias [HQ] a logit per head."""
    refuse("parallel_attn", "head_first", head_first, False)
    window = None if window_size is None else (window_size - 1, 0)
    return heed.torch.attention(
        q, k, v, scale=scale, causal=True, window=window, log_decay=g, sinks=sink_bias, cu_seqlens_q=cu_seqlens
    )


def parallel_forgetting_attn(q, k, v, g, scale=None, window_size=None, cu_seqlens=None, *, head_first=False):
    """Forgetting attention: parallel_attn with gates."""
    return parallel_attn(q, k, v, g, scale, window_size, cu_seqlens, head_first=head_first)


@_in_their_words
def attn_decoding_one_step(q, k, v, g=None, scale=None, cu_seqlens=None, do_gate_scale=False, *, sink_bias=None):
    """One query per packed sequence of keys, q [1, N, HQ, D]."""
    _dispatch.check_tensors("attn_decoding_one_step", q=q, k=k)
    if cu_seqlens is None:
        raise InvalidArgument("attn_decoding_one_step: cu_seqlens is None, expected the bounds of the sequences of k")
    if g is not None and do_gate_scale:
        g = g * (k.shape[-1] ** -0.5 if scale is None else scale)
    return heed.torch.attention(
        q,
        k,
        v,
        scale=scale,
        causal=True,
        log_decay=g,
        sinks=sink_bias,
        cu_seqlens_q=list(range(len(cu_seqlens))),
        cu_seqlens_k=cu_seqlens,
    )


@speaking(residuals="residuals", weight="rms_weight", eps="rms_eps")
def fused_attnres(
    query, residuals, rms_weight, rms_eps=1e-6, scale=1.0, return_weights=False, return_residuals=False
):
    """Attention residuals: o, then the probabilities and the stacked residuals if requested."""
    stacked = residuals
    if isinstance(residuals, (list, tuple)):
        if not residuals:
            raise InvalidArgument("fused_attnres: residuals is empty, expected at least one source")
        stacked = torch.stack([x.reshape(-1, x.shape[-1]) for x in residuals])
    _dispatch.check_tensors("fused_attnres", query=query, residuals=stacked, rms_weight=rms_weight)
    shape = residuals[0].shape
    rows = stacked.reshape(len(stacked), -1, shape[-1])
    o, p = heed.torch.attention_residual(
        query.flatten(), rows, rms_weight.flatten(), eps=rms_eps, scale=scale, return_weights=True
    )
    results = [o.view(shape)]
    if return_weights:
        results.append(p.view(len(rows), *shape[:-1]))
    if return_residuals:
        results.append(stacked)
    return tuple(results) if len(results) > 1 else results[0]


@speaking(log_decay="g")
def chunk_log_linear_attn(
    q, k, v, g, level_scales, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """Log-linear attention with gates [B, T, HV]; (o, None). States of the original hold its last chunk of tokens, and
    are refused: heed.torch.log_linear_attention has states and steps."""
    refuse("chunk_log_linear_attn", "initial_state", initial_state, None)
    refuse("chunk_log_linear_attn", "output_final_state", output_final_state, False)
    return heed.torch.log_linear_attention(q, k, v, level_scales, log_decay=g, cu_seqlens=cu_seqlens), None


_with_mesa_names = speaking(log_decay="g", iterations="max_CG_iteration", initial_state="h_kk_init")


@_with_mesa_names
def chunk_mesa_net(
    q,
    k,
    v,
    g,
    beta,
    lamb,
    h_kk_init=None,
    h_kv_init=None,
    output_final_state=False,
    max_CG_iteration=30,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
):
    """MesaNet with the solver of the original, which adds 1e-5 to its denominators; (o, h_kk, h_kv)."""
    _dispatch.check_tensors("chunk_mesa_net", q=q, k=k)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    state = None
    for name, other, x, y in (("h_kv_init", "h_kk_init", h_kk_init, h_kv_init),
                              ("h_kk_init", "h_kv_init", h_kv_init, h_kk_init)):
        if x is not None and y is None:
            raise InvalidArgument(f"chunk_mesa_net: {name} is None, expected a tensor beside {other}")
    if h_kk_init is not None:
        _dispatch.check_tensors("chunk_mesa_net", h_kk_init=h_kk_init, h_kv_init=h_kv_init)
        state = torch.cat([h_kk_init, h_kv_init], -1).to(wide(q))
    o, state = heed.torch.mesa(
        q,
        k,
        v,
        beta,
        lamb,
        log_decay=g,
        iterations=max_CG_iteration,
        eps=1e-5,
        initial_state=state,
        cu_seqlens=cu_seqlens,
        return_state=True,
    )
    return (o, *state.split((k.shape[-1], v.shape[-1]), -1)) if output_final_state else (o, None, None)


@_with_mesa_names
def mesa_net_decoding_one_step(q, k, v, g, lamb, beta, prev_h_kk, prev_h_kv, max_CG_iteration=30):
    """One token of MesaNet, [B, H, K]; (o, h_kk, h_kv). The original starts its solver from q / diag(H_kk + lamb), heed
    from 0 as for whole sequences: both converge to one solution."""
    _dispatch.check_tensors("mesa_net_decoding_one_step", q=q, prev_h_kk=prev_h_kk, prev_h_kv=prev_h_kv)
    state = torch.cat([prev_h_kk, prev_h_kv], -1).to(wide(q))
    o = heed.torch.mesa_step(q, k, v, beta, lamb, state, log_decay=g, iterations=max_CG_iteration, eps=1e-5)
    return o, *state.split((prev_h_kk.shape[-1], prev_h_kv.shape[-1]), -1)


def _ttt_linear(name, q, k, v, w, b, eta, scale, eps, chunk_size, initial_state, initial_state_bias,
                output_final_state, cu_seqlens, head_first):
    refuse(name, "head_first", head_first, False)
    _dispatch.check_tensors(name, q=q, k=k)
    if isinstance(eta, float):
        eta = torch.full_like(q[..., :1], eta)
    _dispatch.check_tensors(name, eta=eta)
    if eta.dim() != 4 or eta.shape[-1] != 1:
        raise InvalidArgument(f"{name}: eta has shape {list(eta.shape)}, expected [B, T, H, 1]")
    state, channels = None, k.shape[-1]
    if initial_state is not None or initial_state_bias is not None:
        given = initial_state if initial_state_bias is None else initial_state_bias
        _dispatch.check_tensors(name, initial_state=given)
        sizes = [*given.shape[:2], channels + 1]
        W = given.new_zeros((*sizes[:2], channels, channels)) if initial_state is None else initial_state
        bias = given.new_zeros((*sizes[:2], 1, channels)) if initial_state_bias is None else initial_state_bias
        if W.shape[2:] != (channels, channels) or bias.shape != (*W.shape[:2], 1, channels):
            raise InvalidArgument(f"{name}: initial_state has shape {list(W.shape)} and initial_state_bias "
                                  f"{list(bias.shape)}, expected [B, H, {channels}, {channels}] and "
                                  f"[B, H, 1, {channels}]")
        of_both = torch.cat([W, bias], 2).to(wide(q))
        state = torch.stack([of_both, torch.zeros_like(of_both)], 2)
    o, state = heed.torch.ttt_linear(
        q,
        k,
        v,
        w,
        b,
        eta[..., 0],
        mini_batch=chunk_size,
        eps=eps,
        scale=channels**-0.5 if scale is None else scale,
        residual="output",
        initial_state=state,
        cu_seqlens=cu_seqlens,
        return_state=True,
    )
    if not output_final_state:
        return o, None, None
    # The model after the last token: it need not end a mini-batch.
    if q.shape[1] == 0:
        return o, state[:, :, 0, :-1], state[:, :, 0, -1:]
    last = eta[:, -1, :, 0] if cu_seqlens is None else eta[0, (torch.as_tensor(cu_seqlens)[1:] - 1).clamp(min=0), :, 0]
    model = state[:, :, 0] - last[..., None, None].to(state.dtype) * state[:, :, 1]
    return o, model[:, :, :-1], model[:, :, -1:]


_with_ttt_names = speaking(weight="w", bias="b", mini_batch="chunk_size")


@_with_ttt_names
def chunk_ttt_linear(
    q,
    k,
    v,
    w,
    b,
    eta,
    scale=None,
    eps=1e-6,
    chunk_size=16,
    initial_state=None,
    initial_state_bias=None,
    output_final_state=False,
    cu_seqlens=None,
    head_first=False,
):
    """TTT-Linear with the residual of the original, what the queries read; (o, W, b), both after the last token."""
    return _ttt_linear("chunk_ttt_linear", q, k, v, w, b, eta, scale, eps, chunk_size, initial_state,
                       initial_state_bias, output_final_state, cu_seqlens, head_first)


@_with_ttt_names
def fused_chunk_ttt_linear(
    q,
    k,
    v,
    w,
    b,
    eta,
    scale=None,
    eps=1e-6,
    chunk_size=16,
    initial_state=None,
    initial_state_bias=None,
    output_final_state=False,
    cu_seqlens=None,
    head_first=False,
):
    """chunk_ttt_linear."""
    return _ttt_linear("fused_chunk_ttt_linear", q, k, v, w, b, eta, scale, eps, chunk_size, initial_state,
                       initial_state_bias, output_final_state, cu_seqlens, head_first)


@speaking(log_forget="g")
def parallel_path_attn(q, k, v, w, beta, g=None, scale=None, cu_seqlens=None, use_cache=False):
    """PaTH attention; o, and the keys as they have passed all tokens or None. The original multiplies its log forget
    gates by the scale, as the logits."""
    if cu_seqlens is not None:
        refuse("parallel_path_attn", "use_cache", use_cache, False)
    _dispatch.check_tensors("parallel_path_attn", q=q, k=k, w=w, beta=beta)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    gates = None
    if g is not None:
        _dispatch.check_tensors("parallel_path_attn", g=g)
        gates = g.to(wide(q)) * scale
    o = heed.torch.path_attention(q, k, v, w.to(q.dtype), beta, gates, scale=scale, cu_seqlens=cu_seqlens)
    if not use_cache:
        return o, None
    keys = k.detach().to(wide(k), copy=True)
    heed.torch.path_attention_keys(keys, w.detach().to(q.dtype), beta.detach())
    return o, keys.to(k.dtype)


@speaking(log_decay="g", log_forget="g_scalar")
def parallel_wall_attn(
    q, k, v, g, *, g_scalar=None, sink_bias=None, scale=None, window_size=None, cu_seqlens=None
):
    """Wall attention; g [B, T, HQ, K] are log decays of channels, g_scalar [B, T, HQ] log forget gates, sink_bias [HQ]
    a logit per head."""
    refuse("parallel_wall_attn", "window_size", window_size, None)
    _dispatch.check_tensors("parallel_wall_attn", q=q, k=k, v=v, g=g)
    options = {"scale": scale, "cu_seqlens": cu_seqlens}
    gates = (x if x is None else x.to(wide(q)) for x in (g, g_scalar))
    if sink_bias is None:
        return heed.torch.wall_attention(q, k, v, *gates, **options)
    if sink_bias.shape != (q.shape[2],):
        raise InvalidArgument(f"parallel_wall_attn: sink_bias has shape {list(sink_bias.shape)}, expected "
                              f"[{q.shape[2]}]")
    o, lse = heed.torch.wall_attention(q, k, v, *gates, **options, return_lse=True)
    # The sink takes its part of each row's probability, 1 / (1 + exp(lse - sink)).
    kept = torch.sigmoid(lse - sink_bias.to(lse.dtype)[:, None]).transpose(1, 2)
    return (o * kept[..., None]).to(q.dtype)


def deltaformer_attn(q, k, v, beta=None, attention_mask=None, cu_seqlens=None, C=512):
    """DeltaFormer with w = k. attention_mask [B, T] keeps keys from o and clears rows of o; as in the original, u reads
    all tokens. C, the size of a block, has no effect."""
    _dispatch.check_tensors("deltaformer_attn", q=q, k=k, v=v)
    if attention_mask is None:
        return heed.torch.deltaformer(q, k, v, beta, cu_seqlens=cu_seqlens)
    refuse("deltaformer_attn", "cu_seqlens", cu_seqlens, None)
    _dispatch.check_tensors("deltaformer_attn", attention_mask=attention_mask)
    kept = attention_mask != 0
    _, u = heed.torch.deltaformer(q, k, v, beta, return_u=True)
    o = heed.torch.attention(q, k, u, causal=True, mask=kept[:, None, None])
    return o.masked_fill(~kept[..., None, None], 0)


@speaking(window="window_size")
def parallel_parallax(q, r, k, v, scale=None, window_size=None, cu_seqlens=None, *, head_first=False):
    """Parallax attention."""
    refuse("parallel_parallax", "head_first", head_first, False)
    return heed.torch.parallax_attention(q, r, k, v, scale=scale, window=window_size, cu_seqlens=cu_seqlens)


@speaking(window="window_size", starts="cache_start")
def parallax_decode(q, r, k, v, scale=None, window_size=None, cache_start=None):
    """Parallax attention of the last tokens of k; cache_start [B] is the first key of each sequence."""
    return heed.torch.parallax_attention(q, r, k, v, scale=scale, window=window_size, starts=cache_start)


def parallax_decode_one_step(q, r, k, v, scale=None, window_size=None, cache_start=None):
    """parallax_decode of one token."""
    _dispatch.check_tensors("parallax_decode_one_step", q=q)
    if q.dim() != 4 or q.shape[1] != 1:
        raise InvalidArgument(f"parallax_decode_one_step: q has shape {list(q.shape)}, expected [B, 1, HQ, D]")
    return parallax_decode(q, r, k, v, scale, window_size, cache_start)


# --- sparse attention -------------------------------------------------------------------------------------------------


def _of_each(cu_seqlens: Any, tensors: Any, compute: Callable[..., Tensor]) -> Tensor:
    """`compute` on packed sequences one after the other, or on a batch."""
    if cu_seqlens is None:
        return compute(*tensors)
    spans = [slice(begin, end) for begin, end in itertools.pairwise(_bounds(cu_seqlens))]
    return torch.cat([compute(*(x if x is None else x[:, span] for x in tensors)) for span in spans], 1)


def _keys_of_blocks(index: Tensor, counts: Any, block: int, keys: int) -> Tensor:
    """The keys of the first `counts` blocks in [B, T, H, S]; -1, repeated blocks and what is no key count as none."""
    if isinstance(counts, Tensor):
        index = index.masked_fill(torch.arange(index.shape[-1]) >= counts.unsqueeze(-1), -1)
    index = index.sort(-1).values
    index[..., 1:][index[..., 1:] == index[..., :-1]] = -1
    rows = (index.unsqueeze(-1) * block + torch.arange(block)).masked_fill((index < 0).unsqueeze(-1), -1).flatten(-2)
    return rows.masked_fill(rows >= keys, -1)


def _compressed(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float | None) -> Tensor:
    """Attention to the means of the blocks that end at or before the query. With a row before the first, block b of
    rows sees b means."""
    whole = k.shape[1] // block
    means = (x[:, : whole * block].unflatten(1, (whole, block)).mean(2) for x in (k, v))
    seen = torch.ones(whole + 1, whole, dtype=torch.bool).tril(-1)
    pattern = heed.patterns.blocks(seen.numpy(), (block, 1))
    rows = F.pad(q, (0, 0, 0, 0, 1, 0))
    return heed.torch.attention(rows, *means, scale=scale, align="top_left", pattern=pattern)[:, 1:]


@_in_their_words
def parallel_nsa(
    q,
    k,
    v,
    g_cmp=None,
    g_slc=None,
    g_swa=None,
    block_indices=None,
    block_counts=16,
    block_size=64,
    window_size=0,
    scale=None,
    cu_seqlens=None,
):
    """Native sparse attention, gates [B, T, HQ]; compressed keys are means, and the window has the default scale."""
    _dispatch.check_tensors("parallel_nsa", q=q, k=k, v=v)
    if isinstance(cu_seqlens, tuple):
        if _bounds(cu_seqlens[0]) != _bounds(cu_seqlens[1]):
            raise Unsupported(
                "parallel_nsa: cu_seqlens differs for queries and keys, expected the same: heed has nothing else"
            )
        cu_seqlens = cu_seqlens[0]
    if block_indices is None and (g_cmp is None or isinstance(block_counts, Tensor)):
        given, expected = ("g_cmp is None", "a gate") if g_cmp is None else ("block_counts is a Tensor", "one int")
        raise Unsupported(f"parallel_nsa: {given}, expected {expected} where no block_indices are given")
    if window_size > 0 and g_swa is None:
        raise InvalidArgument("parallel_nsa: g_swa is None, expected a gate where window_size is not 0")

    def compute(q, k, v, g_cmp, g_slc, g_swa, indices, counts):
        o = 0
        one = torch.ones(q.shape[:3], dtype=q.dtype) if g_slc is None else g_slc
        if indices is not None:
            pattern = heed.patterns.keys(_keys_of_blocks(indices, counts, block_size, k.shape[1]))
            o = heed.torch.attention(q, k, v, scale=scale, causal=True, pattern=pattern) * one.unsqueeze(-1)
            if g_cmp is not None:
                o = o + _compressed(q, k, v, block_size, scale) * g_cmp.unsqueeze(-1)
        elif g_cmp is not None:
            gates = torch.stack((g_cmp, one.to(g_cmp.dtype), torch.zeros_like(g_cmp)), -1).to(q.dtype)
            o = heed.torch.nsa(q, k, v, gates, block=block_size, count=counts, window=1, scale=scale)
        if window_size > 0:
            o = o + heed.torch.attention(q, k, v, causal=True, window=(window_size - 1, 0)) * g_swa.unsqueeze(-1)
        return o.to(q.dtype)

    of_rows = isinstance(block_counts, Tensor)
    tensors = (q, k, v, g_cmp, g_slc, g_swa, block_indices, block_counts if of_rows else None)
    return _of_each(cu_seqlens, tensors, lambda *x: compute(*x[:-1], x[-1] if of_rows else block_counts))


@_in_their_words
def parallel_moba(q, k, v, cu_seqlens, max_seqlen, chunk_size, topk):
    """A mixture of blocks: a row of a head sees its own chunk, up to itself, and the topk - 1 that suit it best."""
    _dispatch.check_tensors("parallel_moba", q=q, k=k, v=v)

    def compute(q, k, v):
        pattern = heed.select.top_blocks(q.detach(), k.detach(), count=max(topk, 1), block=chunk_size, share="head")
        return heed.torch.attention(q, k, v, causal=True, pattern=pattern)

    return _of_each(cu_seqlens, (q, k, v), compute)


# --- others -----------------------------------------------------------------------------------------------------------


@_in_their_words
def parallel_based(q, k, v, scale=None, use_norm=True, *, head_first=False):
    """The second-order Taylor map of exp, causal."""
    refuse("parallel_based", "head_first", head_first, False)
    return heed.torch.based(q, k, v, scale=scale, normalize=use_norm, eps=1e-6)


def fused_chunk_based(q, k, v, scale=None, use_norm=True, *, head_first=False):
    """The same function as parallel_based."""
    return parallel_based(q, k, v, scale, use_norm, head_first=head_first)


@_in_their_words
def fused_recurrent_rwkv4(w, u, k, v, state):
    """RWKV-4; w is before -exp. The state [B, 3, 1, C] is numerator, denominator and their exponent, first and last."""
    _dispatch.check_tensors("fused_recurrent_rwkv4", w=w, u=u, k=k, v=v, state=state)
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    initial = tuple(x.squeeze(1) for x in state.to(wide).unbind(1))
    o, final = heed.torch.rwkv4(k, v, -torch.exp(w.to(wide)), u, initial_state=initial, return_state=True)
    return o, torch.stack(tuple(final), 1).unsqueeze(2)
