# Signatures of the functions and modules that heed.compat replaces, as in their libraries.
"""Names, order and defaults. A module's is that of its constructor, and its methods' follow. Versions: fla 0.5.2,
mamba_ssm 2.3.2, causal_conv1d 1.6.1, flash_attn 2.8.4. Continuation lines are indented."""

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
fla.ops.precond_gated_delta_rule.chunk.chunk_precond_gated_delta_rule(q, k, v, g_atk, g, beta_atk, beta, scale=None,
    initial_state=None, initial_A_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, transpose_state_layout=False, x=1.5, eps=1e-06, log_atk_scale=None)
fla.ops.precond_kda.chunk.chunk_precond_kda(q, k, v, g, g_atk, beta_atk, beta, scale=None, initial_state=None,
    initial_A_state=None, output_final_state=False, use_gate_in_kernel=False, safe_gate=False, lower_bound=None,
    cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, transpose_state_layout=False, x=1.5,
    eps=1e-06, log_atk_scale=None, solve_tril_precision=None, disable_recompute=False,
    return_intermediate_states=False, **kwargs)
fla.ops.retention.chunk.chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, **kwargs)
fla.ops.rwkv6.chunk.chunk_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)
fla.ops.rwkv7.chunk.chunk_rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False,
    cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None,
    lower_bound=None, **kwargs)
fla.ops.simple_gla.chunk.chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
    output_final_state=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)
fla.ops.log_linear_attn.chunk.chunk_log_linear_attn(q, k, v, g, level_scales, initial_state=None,
    output_final_state=False, cu_seqlens=None)
fla.ops.ttt.chunk.chunk_ttt_linear(q, k, v, w, b, eta, scale=None, eps=1e-06, chunk_size=16, initial_state=None,
    initial_state_bias=None, output_final_state=False, cu_seqlens=None, head_first=False)
fla.ops.ttt.fused_chunk.fused_chunk_ttt_linear(q, k, v, w, b, eta, scale=None, eps=1e-06, chunk_size=16,
    initial_state=None, initial_state_bias=None, output_final_state=False, cu_seqlens=None, head_first=False)
fla.ops.mesa_net.chunk.chunk_mesa_net(q, k, v, g, beta, lamb, h_kk_init=None, h_kv_init=None,
    output_final_state=False, max_CG_iteration=30, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None)
fla.ops.mesa_net.decoding_one_step.mesa_net_decoding_one_step(q, k, v, g, lamb, beta, prev_h_kk, prev_h_kv,
    max_CG_iteration=30)
fla.ops.deltaformer.parallel.deltaformer_attn(q, k, v, beta=None, attention_mask=None, cu_seqlens=None, C=512)
fla.ops.parallax.parallel.parallel_parallax(q, r, k, v, scale=None, window_size=None, cu_seqlens=None, **kwargs)
fla.ops.parallax.decode.parallax_decode(q, r, k, v, scale=None, window_size=None, cache_start=None)
fla.ops.parallax.decode.parallax_decode_one_step(q, r, k, v, scale=None, window_size=None, cache_start=None)
fla.ops.path_attn.parallel.parallel_path_attn(q, k, v, w, beta, g=None, scale=None, cu_seqlens=None, use_cache=False)
fla.ops.wall_attn.parallel.parallel_wall_attn(q, k, v, g, *, g_scalar=None, sink_bias=None, scale=None,
    window_size=None, cu_seqlens=None)
fla.ops.attnres.fused.fused_attnres(query, residuals, rms_weight, rms_eps=1e-06, scale=1.0, return_weights=False,
    return_residuals=False)
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
fla.ops.precond_gated_delta_rule.fused_recurrent.fused_recurrent_precond_gated_delta_rule(q, k, v, g=None, gk=None,
    gv=None, beta=None, g_atk=None, beta_atk=None, scale=None, initial_state=None, initial_A_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=True, cu_seqlens=None, transpose_state_layout=False, x=1.5,
    eps=1e-06, log_atk_scale=None)
fla.ops.precond_kda.fused_recurrent.fused_recurrent_precond_kda(q, k, v, g, g_atk, beta_atk, beta, A_log=None,
    dt_bias=None, scale=None, initial_state=None, initial_A_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None,
    transpose_state_layout=False, x=1.5, eps=1e-06, log_atk_scale=None, **kwargs)
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
mamba_ssm.ops.triton.mamba3.mamba3_siso_combined.mamba3_siso_combined(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles,
    D=None, Z=None, Input_States=None, chunk_size=64, return_final_states=False, cu_seqlens=None)
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
fla.modules.layernorm.layer_norm(x, weight, bias, residual=None, eps=1e-05, prenorm=False, residual_in_fp32=False,
    is_rms_norm=False)
fla.modules.layernorm.group_norm(x, weight, bias, residual=None, eps=1e-05, prenorm=False, residual_in_fp32=False,
    is_rms_norm=False, num_groups=1)
fla.modules.layernorm.rms_norm(x, weight, bias, residual=None, eps=1e-05, prenorm=False, residual_in_fp32=False)
fla.modules.layernorm.layer_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None,
    eps=1e-05, prenorm=False, residual_in_fp32=False, is_rms_norm=False, num_groups=1)
fla.modules.layernorm.rms_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-05,
    prenorm=False, residual_in_fp32=False)
fla.modules.layernorm.LayerNorm(hidden_size, elementwise_affine=True, bias=False, eps=1e-05, device=None, dtype=None)
fla.modules.layernorm.LayerNorm.forward(x, residual=None, prenorm=False, residual_in_fp32=False)
fla.modules.layernorm.GroupNorm(num_groups, hidden_size, elementwise_affine=True, bias=False, eps=1e-05,
    is_rms_norm=False, device=None, dtype=None)
fla.modules.layernorm.GroupNorm.forward(x, residual=None, prenorm=False, residual_in_fp32=False)
fla.modules.layernorm.RMSNorm(hidden_size, elementwise_affine=True, bias=False, eps=1e-05, device=None, dtype=None)
fla.modules.layernorm.RMSNorm.forward(x, residual=None, prenorm=False, residual_in_fp32=False)
fla.modules.layernorm.LayerNormLinear(hidden_size, elementwise_affine=True, bias=False, eps=1e-05, device=None,
    dtype=None)
fla.modules.layernorm.LayerNormLinear.forward(x, weight, bias, residual=None, prenorm=False, residual_in_fp32=False)
fla.modules.layernorm.GroupNormLinear(num_groups, hidden_size, elementwise_affine=True, bias=False, eps=1e-05,
    is_rms_norm=False, device=None, dtype=None)
fla.modules.layernorm.GroupNormLinear.forward(x, weight, bias, residual=None, prenorm=False, residual_in_fp32=False)
fla.modules.layernorm.RMSNormLinear(hidden_size, elementwise_affine=True, bias=False, eps=1e-05, device=None,
    dtype=None)
fla.modules.layernorm.RMSNormLinear.forward(x, weight, bias, residual=None, prenorm=False, residual_in_fp32=False)
fla.modules.fused_norm_gate.layer_norm_gated(x, g, weight, bias, activation='swish', residual=None, prenorm=False,
    residual_in_fp32=False, eps=1e-06)
fla.modules.fused_norm_gate.rms_norm_gated(x, g, weight, bias, activation='swish', residual=None, prenorm=False,
    residual_in_fp32=False, eps=1e-06)
fla.modules.fused_norm_gate.layer_norm_swish_gate_linear(x, g, norm_weight, norm_bias, linear_weight, linear_bias,
    residual=None, prenorm=False, residual_in_fp32=False, eps=1e-06)
fla.modules.fused_norm_gate.rms_norm_swish_gate_linear(x, g, norm_weight, norm_bias, linear_weight, linear_bias,
    residual=None, prenorm=False, residual_in_fp32=False, eps=1e-06)
fla.modules.fused_norm_gate.FusedLayerNormGated(hidden_size, elementwise_affine=True, bias=False, activation='swish',
    eps=1e-05, device=None, dtype=None)
fla.modules.fused_norm_gate.FusedLayerNormGated.forward(x, g, residual=None, prenorm=False, residual_in_fp32=False)
fla.modules.fused_norm_gate.FusedRMSNormGated(hidden_size, elementwise_affine=True, eps=1e-05, activation='swish',
    device=None, dtype=None)
fla.modules.fused_norm_gate.FusedRMSNormGated.forward(x, g, residual=None, prenorm=False, residual_in_fp32=False)
fla.modules.fused_norm_gate.FusedLayerNormSwishGate(hidden_size, elementwise_affine=True, bias=False, eps=1e-05,
    device=None, dtype=None)
fla.modules.fused_norm_gate.FusedRMSNormSwishGate(hidden_size, elementwise_affine=True, eps=1e-05, device=None,
    dtype=None)
fla.modules.fused_norm_gate.FusedLayerNormSwishGateLinear(hidden_size, elementwise_affine=True, eps=1e-05,
    device=None, dtype=None)
fla.modules.fused_norm_gate.FusedRMSNormSwishGateLinear(hidden_size, elementwise_affine=True, eps=1e-05, device=None,
    dtype=None)
fla.modules.convolution.ShortConvolution(hidden_size, kernel_size, bias=False, activation='silu', backend='triton',
    device=None, dtype=None, **kwargs)
fla.modules.convolution.ShortConvolution.forward(x, residual=None, mask=None, cache=None, output_final_state=False,
    cu_seqlens=None, chunk_indices=None, **kwargs)
fla.modules.convolution.ShortConvolution.step(x, residual, cache, output_final_state=False, cu_seqlens=None)
fla.modules.convolution.causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None,
    output_final_state=False, activation=None, backend='triton', cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, **kwargs)
fla.modules.convolution.causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None)
fla.modules.l2norm.l2norm(x, eps=1e-06, output_dtype=None)
fla.modules.l2norm.L2Norm(eps=1e-06, output_dtype=None)
fla.modules.l2norm.L2Norm.forward(x)
fla.modules.mlp.GatedMLP(hidden_size, hidden_ratio=None, intermediate_size=None, hidden_act='swish', fuse_swiglu=True,
    powglu_power=3.0)
fla.modules.mlp.GatedMLP.forward(x, **kwargs)
fla.modules.rotary.rotary_embedding(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None,
    chunk_indices=None)
fla.modules.rotary.RotaryEmbedding(dim, base=10000.0, scale_base=None, interleaved=False, pos_idx_in_fp32=True,
    device=None)
fla.modules.rotary.RotaryEmbedding.forward(q, k, seqlen_offset=0, cu_seqlens=None, max_seqlen=None,
    chunk_indices=None)
fla.modules.token_shift.token_shift(x, cu_seqlens=None, cache=None, output_cache=False, chunk_indices=None)
fla.modules.activations.logsigmoid(x, temperature=1.0)
fla.modules.activations.swiglu_linear(x, y, weight, bias)
fla.modules.fused_cross_entropy.cross_entropy_loss(logits, target, label_smoothing=0.0, logit_scale=1.0,
    lse_square_scale=0.0, logit_softcapping=None, ignore_index=-100, inplace_backward=False, process_group=None)
fla.modules.fused_cross_entropy.FusedCrossEntropyLoss(ignore_index=-100, reduction='mean', label_smoothing=0.0,
    logit_scale=1.0, lse_square_scale=0.0, logit_softcapping=None, inplace_backward=False, process_group=None,
    return_z_loss=False)
fla.modules.fused_cross_entropy.FusedCrossEntropyLoss.forward(input, target)
fla.modules.fused_linear_cross_entropy.fused_linear_cross_entropy_loss(x, target, weight, bias=None,
    ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, logit_softcapping=None, num_chunks=8, reduction='mean',
    use_l2warp=False, l2_penalty_factor=0.0001, accumulate_grad_in_fp32=True)
fla.modules.fused_linear_cross_entropy.FusedLinearCrossEntropyLoss(ignore_index=-100, label_smoothing=0.0,
    logit_scale=1.0, logit_softcapping=None, num_chunks=8, reduction='mean', use_l2warp=False,
    l2_penalty_factor=0.0001, accumulate_grad_in_fp32=True)
fla.modules.fused_linear_cross_entropy.FusedLinearCrossEntropyLoss.forward(x, target, weight, bias=None)
fla.layers.utils.get_unpad_data(attention_mask)
fla.layers.utils.unpad_input(q, states, attention_mask, q_len, keepdim=False)
fla.layers.utils.pad_input(hidden_states, indices, batch_size, seq_len)
fla.ops.utils.index.prepare_lens(cu_seqlens)
fla.ops.utils.index.prepare_lens_from_mask(mask)
fla.ops.utils.index.prepare_cu_seqlens_from_lens(lens, dtype=torch.int32)
fla.ops.utils.index.prepare_cu_seqlens_from_mask(mask, dtype=torch.int32)
fla.ops.utils.index.prepare_position_ids(cu_seqlens, cu_seqlens_cpu=None)
fla.ops.utils.index.prepare_sequence_ids(cu_seqlens, cu_seqlens_cpu=None)
fla.ops.utils.index.prepare_token_indices(cu_seqlens, cu_seqlens_cpu=None)
mamba_ssm.ops.triton.layernorm_gated.layernorm_fn(x, weight, bias, z=None, eps=1e-06, group_size=None,
    norm_before_gate=True, is_rms_norm=False)
mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn(x, weight, bias, z=None, eps=1e-06, group_size=None,
    norm_before_gate=True)
mamba_ssm.ops.triton.layernorm_gated.LayerNorm(hidden_size, eps=1e-05, group_size=None, norm_before_gate=True,
    device=None, dtype=None)
mamba_ssm.ops.triton.layernorm_gated.LayerNorm.forward(x, z=None)
mamba_ssm.ops.triton.layernorm_gated.RMSNorm(hidden_size, eps=1e-05, group_size=None, norm_before_gate=True,
    device=None, dtype=None)
mamba_ssm.ops.triton.layernorm_gated.RMSNorm.forward(x, z=None)
mamba_ssm.ops.triton.layer_norm.layer_norm_fn(x, weight, bias, residual=None, x1=None, weight1=None, bias1=None,
    eps=1e-06, dropout_p=0.0, rowscale=None, prenorm=False, residual_in_fp32=False, is_rms_norm=False,
    return_dropout_mask=False)
mamba_ssm.ops.triton.layer_norm.rms_norm_fn(x, weight, bias, residual=None, x1=None, weight1=None, bias1=None,
    eps=1e-06, dropout_p=0.0, rowscale=None, prenorm=False, residual_in_fp32=False, return_dropout_mask=False)
mamba_ssm.ops.triton.layer_norm.RMSNorm(hidden_size, eps=1e-05, dropout_p=0.0, device=None, dtype=None)
mamba_ssm.ops.triton.layer_norm.RMSNorm.forward(x, residual=None, prenorm=False, residual_in_fp32=False)
mamba_ssm.modules.mamba_simple.Mamba(d_model, d_state=16, d_conv=4, expand=2, dt_rank='auto', dt_min=0.001,
    dt_max=0.1, dt_init='random', dt_scale=1.0, dt_init_floor=0.0001, conv_bias=True, bias=False, use_fast_path=True,
    layer_idx=None, device=None, dtype=None)
mamba_ssm.modules.mamba_simple.Mamba.forward(hidden_states, inference_params=None)
mamba_ssm.modules.mamba_simple.Mamba.step(hidden_states, conv_state, ssm_state)
mamba_ssm.modules.mamba2.Mamba2(d_model, d_state=128, d_conv=4, conv_init=None, expand=2, headdim=64, d_ssm=None,
    ngroups=1, A_init_range=(1, 16), D_has_hdim=False, rmsnorm=True, norm_before_gate=False, dt_min=0.001, dt_max=0.1,
    dt_init_floor=0.0001, dt_limit=(0.0, inf), bias=False, conv_bias=True, chunk_size=256,
    use_mem_eff_path=True, layer_idx=None, process_group=None, sequence_parallel=True, device=None, dtype=None)
mamba_ssm.modules.mamba2.Mamba2.forward(u, seqlen=None, seq_idx=None, cu_seqlens=None, inference_params=None)
mamba_ssm.modules.mamba2.Mamba2.step(hidden_states, conv_state, ssm_state)
flash_attn.bert_padding.unpad_input(hidden_states, attention_mask, unused_mask=None)
flash_attn.bert_padding.unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length)
flash_attn.bert_padding.pad_input(hidden_states, indices, batch, seqlen)
flash_attn.layers.rotary.apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0,
    cu_seqlens=None, max_seqlen=None)
fla.modules.activations.bias_gelu_impl(x, bias)
fla.modules.activations.fast_gelu_impl(x)
fla.modules.activations.sigmoid(x)
fla.modules.activations.sqrelu(x)
fla.modules.activations.swiglu(x, y)
fla.modules.activations.swish(x)
fla.layers.utils.index_first_axis(x, indices)
fla.layers.utils.index_put_first_axis(x, indices, first_axis_dim)
flash_attn.bert_padding.index_first_axis(input, indices)
flash_attn.bert_padding.index_first_axis_residual(input, indices)
flash_attn.bert_padding.index_put_first_axis(values, indices, first_axis_dim)
"""

# {path of the function, class or method: text of its parameters}
SIGNATURES = {
    path: " ".join(parameters.split())
    for path, parameters in re.findall(r"^([\w.]+)\((.*?)\)$(?=\n\S|\n?\Z)", _TEXT, re.DOTALL | re.MULTILINE)
}
