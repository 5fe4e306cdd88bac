# Signatures of the functions that heed.compat stands in for, as these libraries have them: names, order, defaults.
"""Versions: fla 0.5.2, mamba_ssm 2.3.2, causal_conv1d 1.6.1, flash_attn 2.8.4. What goes on in a further line is indented."""

import re

_TEXT = """\
fla.ops.attn.decoding.attn_decoding_one_step(q, k, v, g=None, scale=None, cu_seqlens=None, do_gate_scale=False, *,
    sink_bias=None)
fla.ops.comba.chunk.chunk_comba(q, k, v, p, g, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None)
fla.ops.delta_rule.chunk.chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)
fla.ops.generalized_delta_rule.dplr.chunk.chunk_dplr_delta_rule(q, k, v, a, b, gk, scale=None, initial_state=None,
    output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None,
    disable_recompute=False, cp_context=None, lower_bound=None, **kwargs)
fla.ops.gated_delta_product.chunk.chunk_gated_delta_product(q, k, v, g, beta, num_householder, scale=None,
    initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None)
fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs)
fla.ops.gated_delta_rule.chunk.chunk_gdn(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs)
fla.ops.gdn2.chunk.chunk_gdn2(q, k, v, g, b, w, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, **kwargs)
fla.ops.gla.chunk.chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None)
fla.ops.hgrn.chunk.chunk_hgrn(x, g, initial_state=None, output_final_state=False)
fla.ops.generalized_delta_rule.iplr.chunk.chunk_iplr_delta_rule(q, k, v, a, b, scale=None, initial_state=None,
    output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)
fla.ops.kda.chunk.chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, **kwargs)
fla.ops.lightning_attn.chunk.chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None,
    output_final_state=False, cu_seqlens=None, **kwargs)
fla.ops.linear_attn.chunk.chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False,
    normalize=True, cu_seqlens=None)
fla.ops.retention.chunk.chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, **kwargs)
fla.ops.rwkv6.chunk.chunk_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)
fla.ops.rwkv7.chunk.chunk_rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False,
    cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None,
    lower_bound=None, **kwargs)
fla.ops.simple_gla.chunk.chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)
fla.ops.based.fused_chunk.fused_chunk_based(q, k, v, scale=None, use_norm=True, **kwargs)
fla.ops.delta_rule.fused_chunk.fused_chunk_delta_rule(**kwargs)
fla.ops.gla.fused_chunk.fused_chunk_gla(**kwargs)
fla.ops.linear_attn.fused_chunk.fused_chunk_linear_attn(q, k, v, scale=None, initial_state=None,
    output_final_state=False, normalize=True, cu_seqlens=None)
fla.ops.retention.fused_chunk.fused_chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, **kwargs)
fla.ops.simple_gla.fused_chunk.fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, cu_seqlens=None)
fla.ops.gated_delta_rule.gate.fused_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32)
fla.ops.kda.gate.fused_kda_gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32)
fla.ops.rwkv7.fused_recurrent.fused_mul_recurrent_rwkv7(r, w, k, v, kk, a, scale=1.0, initial_state=None,
    output_final_state=False, reverse=False, cu_seqlens=None, **kwargs)
fla.ops.comba.fused_recurrent.fused_recurrent_comba(q, k, p, v, g, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None)
fla.ops.delta_rule.fused_recurrent.fused_recurrent_delta_rule(q, k, v, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None)
fla.ops.generalized_delta_rule.dplr.fused_recurrent.fused_recurrent_dplr_delta_rule(q, k, v, a, b, gk, scale=None,
    initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None)
fla.ops.gated_delta_rule.fused_recurrent.fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None,
    beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, **kwargs)
fla.ops.gated_delta_rule.fused_recurrent.fused_recurrent_gdn(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
    initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    **kwargs)
fla.ops.gdn2.fused_recurrent.fused_recurrent_gdn2(q, k, v, g, b, w, A_log=None, dt_bias=None, scale=None,
    initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs)
fla.ops.gla.fused_recurrent.fused_recurrent_gla(q, k, v, gk=None, gv=None, scale=None, initial_state=None,
    output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs)
fla.ops.hgrn.fused_recurrent.fused_recurrent_hgrn(x, g, initial_state=None, output_final_state=False, cu_seqlens=None)
fla.ops.generalized_delta_rule.iplr.fused_recurrent.fused_recurrent_iplr_delta_rule(q, k, v, a, b, scale=None,
    initial_state=None, output_final_state=False, cu_seqlens=None)
fla.ops.kda.fused_recurrent.fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None,
    initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False, cu_seqlens=None,
    **kwargs)
fla.ops.lightning_attn.fused_recurrent.fused_recurrent_lightning_attn(q, k, v, layer_idx, num_layers, scale=None,
    initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None, **kwargs)
fla.ops.linear_attn.fused_recurrent.fused_recurrent_linear_attn(q, k, v, scale=None, initial_state=None,
    output_final_state=False, reverse=False, normalize=False, cu_seqlens=None)
fla.ops.retention.fused_recurrent.fused_recurrent_retention(q, k, v, scale=None, initial_state=None,
    output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs)
fla.ops.rwkv4.fused_recurrent.fused_recurrent_rwkv4(w, u, k, v, state)
fla.ops.rwkv6.fused_recurrent.fused_recurrent_rwkv6(r, k, v, w, u, scale=None, initial_state=None,
    output_final_state=False, reverse=False, cu_seqlens=None, **kwargs)
fla.ops.rwkv7.fused_recurrent.fused_recurrent_rwkv7(r, w, k, v, a, b, scale=None, initial_state=None,
    output_final_state=True, cu_seqlens=None, **kwargs)
fla.ops.simple_gla.fused_recurrent.fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None,
    initial_state=None, output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs)
fla.ops.attn.parallel.parallel_attn(q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None,
    chunk_indices=None, *, sink_bias=None, **kwargs)
fla.ops.based.parallel.parallel_based(q, k, v, scale=None, use_norm=True, **kwargs)
fla.ops.delta_rule.parallel.parallel_delta_rule(q, k, v, beta, scale=None, output_attentions=False, **kwargs)
fla.ops.forgetting_attn.parallel.parallel_forgetting_attn(q, k, v, g, scale=None, window_size=None, cu_seqlens=None,
    **kwargs)
fla.ops.moba.parallel.parallel_moba(q, k, v, cu_seqlens, max_seqlen, chunk_size, topk)
fla.ops.nsa.parallel.parallel_nsa(q, k, v, g_cmp=None, g_slc=None, g_swa=None, block_indices=None, block_counts=16,
    block_size=64, window_size=0, scale=None, cu_seqlens=None)
fla.ops.retention.parallel.parallel_retention(q, k, v, scale=None, output_attentions=False, cu_seqlens=None, **kwargs)
fla.ops.simple_gla.parallel.parallel_simple_gla(q, k, v, g=None, scale=None, output_attentions=False, cu_seqlens=None,
    cu_seqlens_cpu=None, **kwargs)
mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None,
    initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, inf),
    return_final_states=False, return_varlen_states=False, state_dtype=None)
mamba_ssm.ops.selective_scan_interface.mamba_inner_fn(xz, conv1d_weight, conv1d_bias, x_proj_weight,
    delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None,
    C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None,
    b_c_dt_rms_eps=1e-06)
mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D,
    chunk_size, initial_states=None, seq_idx=None, dt_limit=(0.0, inf), return_final_states=False, activation='silu',
    rmsnorm_weight=None, rmsnorm_eps=1e-06, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1,
    norm_before_gate=True, state_dtype=None)
mamba_ssm.ops.selective_scan_interface.selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None,
    delta_softplus=False, return_last_state=False)
mamba_ssm.ops.triton.selective_state_update.selective_state_update(state, x, dt, A, B, C, D=None, z=None,
    dt_bias=None, dt_softplus=False, state_batch_indices=None)
causal_conv1d.causal_conv1d_interface.causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None,
    return_final_states=False, final_states_out=None, activation=None)
causal_conv1d.causal_conv1d_interface.causal_conv1d_update(x, conv_state, weight, bias=None, activation=None,
    cache_seqlens=None, conv_state_indices=None)
causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states(x, cu_seqlens, state_len)
flash_attn.flash_attn_interface.flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn.flash_attn_interface.flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn.flash_attn_interface.flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn.flash_attn_interface.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None)
flash_attn.flash_attn_interface.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn.flash_attn_interface.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False)
flash_attn.flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None,
    rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None,
    num_splits=0, return_softmax_lse=False)
"""

# {path of the function: text of its parameters}
SIGNATURES = {
    path: " ".join(parameters.split())
    for path, parameters in re.findall(r"^([\w.]+)\((.*?)\)$(?=\n\S|\n?\Z)", _TEXT, re.DOTALL | re.MULTILINE)
}
