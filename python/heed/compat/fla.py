# heed.compat.fla: the operators of flash-linear-attention on heed, and the modules that model files import with them.
"""Functions of `fla.ops`, as of version 0.5.2: [B, T, H, D], states [N, H, K, V], `cu_seqlens` beside a batch of 1.

Norms, short convolutions, rotary positions and losses of `fla.modules` and the padding of `fla.layers.utils` are here
too.

Each gives what the original gives, `(o, final_state)` where it has states. There is one kernel for chunk_*,
fused_chunk_*, fused_recurrent_* and parallel_* here. All take float32 and float64; states of another dtype become
float32. Functions for which heed has no mechanism exist by name, and a call raises heed.Unsupported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import heed.torch
from heed import InvalidArgument, Unsupported, _core
from heed.compat import _fla_attention, _fla_modules, _fla_norms, _fla_padding
from heed.compat._door import Arguments, door, in_words_of, lacking
from heed.torch import _dispatch

__version__ = "0.5.2"  # whose functions these are


# --- what several functions ask for beside their recurrence -----------------------------------------------------------


def _unit(x: Tensor) -> Tensor:
    """Rows of length 1, as in a kernel that normalises q and k itself."""
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True, dtype=_wide(x)) + 1e-6)).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def fused_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """Log decays [..., H] of pre-activations: -exp(A_log) softplus(g + dt_bias), in float32; A_log and dt_bias [H]."""
    g = g.to(_wide(g))
    g = g if dt_bias is None else g + dt_bias
    return (-A_log.to(g.dtype).exp() * F.softplus(g)).to(output_dtype)


def fused_kda_gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32):
    """Log decays [..., H, K]; A_log has H, dt_bias H * K numbers. With a bound: lower_bound sigmoid(exp(A_log) g)."""
    g = g.to(_wide(g))
    g = g if dt_bias is None else g + dt_bias.reshape(g.shape[-2:])
    rate = 1.0 if A_log is None else A_log.to(g.dtype).exp().reshape(-1, 1)
    return (-rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)).to(output_dtype)


def _activate(name: str, a: Arguments) -> None:
    """Applies what the original kernels do to their inputs: unit rows, gates and beta from pre-activations."""
    if a.pop("use_qk_l2norm_in_kernel", False):
        a.update({key: _unit(a[key]) for key in ("q", "k", "p") if key in a})
    activates = a.pop("use_beta_sigmoid_in_kernel", False)
    twice = a.pop("allow_neg_eigval", False)
    if twice and not activates:
        raise InvalidArgument(f"{name}: allow_neg_eigval is True, expected use_beta_sigmoid_in_kernel=True with it")
    if activates:
        a["beta"] = torch.sigmoid(a["beta"].to(_wide(a["beta"]))) * (2 if twice else 1)
    raw, A_log, dt_bias = (a.pop(key, None) for key in ("use_gate_in_kernel", "A_log", "dt_bias"))
    bound = a.pop("lower_bound", None)  # of a gate computed here; otherwise a bound that the caller's gate satisfies
    if raw:
        _dispatch.check_tensors(name, g=a["g"])
        g, wide = a["g"], _wide(a["g"])
        if A_log is None and bound is None:
            raise InvalidArgument(f"{name}: A_log is None, expected a tensor where use_gate_in_kernel is True")
        per_head = g.dim() == 3
        a["g"] = fused_gdn_gate(g, A_log, dt_bias, wide) if per_head else fused_kda_gate(g, A_log, dt_bias, bound, wide)


def _states(a: Arguments, like: Tensor) -> Any:
    """(K, V) states for heed, of whatever order and dtype."""
    initial = a.pop("initial_state", None)
    turn = a.pop("state_v_first", False) | a.pop("transpose_state_layout", False)
    if isinstance(initial, (tuple, list)):
        return tuple(x if x is None else x.to(_wide(like)) for x in initial), turn
    if isinstance(initial, Tensor):
        initial = (initial.transpose(-1, -2) if turn else initial).to(_wide(like))
    return initial, turn


# --- which mechanism a call means -------------------------------------------------------------------------------------
# Each takes its inputs out of the arguments and gives heed's function, the names of its inputs, the inputs and options.

_UNGATED = {"feature_map": "identity", "normalize": False}


def _qkv(a: Arguments) -> tuple[Any, Any, Any]:
    return a.pop("q"), a.pop("k"), a.pop("v")


def _scalar_gates(a: Arguments) -> Any:
    qkv, g, of_head = _qkv(a), a.pop("g"), a.pop("g_gamma", None)
    if g is None and of_head is None:
        return "linear_attention", "q k v", qkv, _UNGATED
    if g is None:
        return "lightning", "q k v g_gamma", (*qkv, of_head), {}
    return "simple_gla", "q k v g", (*qkv, g if of_head is None else g + of_head), {}


def _gates_of_both_sides(a: Arguments) -> Any:
    (q, k, v), gk, gv = _qkv(a), a.pop("gk"), a.pop("gv")
    if gk is None and gv is None:
        return "linear_attention", "q k v", (q, k, v), _UNGATED
    gk = torch.zeros_like(k, dtype=gv.dtype) if gk is None else gk
    if gv is None:
        return "gla", "q k v gk", (q, k, v, gk), {}
    return "gla", "q k v gk", (q, k, v, gk), {"log_decay_v": gv}


def _ladder(a: Arguments) -> Any:
    """Lightning attention, whose log decays fall from head to head, less steeply in later layers."""
    (q, k, v), layer, layers = _qkv(a), a.pop("layer_idx"), a.pop("num_layers")
    steps = torch.arange(q.shape[2], dtype=_wide(q))
    return "lightning", "q k v layer_idx", (q, k, v, -8 / q.shape[2] * (1 - layer / layers) * steps), {}


def _normalised(a: Arguments) -> Any:
    """The normaliser's state has an axis more than heed's, [N, 1, H, K]; without one it begins at 0."""
    (q, k, v), normalize, initial = _qkv(a), a.pop("normalize"), a["initial_state"]
    if normalize and initial is not None:
        S, z = initial if isinstance(initial, (tuple, list)) else (initial, None)
        a["initial_state"] = S, torch.zeros_like(S[..., 0]) if z is None else z.squeeze(1)
    return (
        "linear_attention",
        "q k v",
        (q, k, v),
        {**_UNGATED, "normalize": normalize, "eps": 1e-10 if normalize else 1e-6},
    )


def _ones(beta: Tensor | None, v: Tensor) -> Tensor:
    return torch.ones_like(v[..., 0]) if beta is None else beta


def _delta(a: Arguments) -> Any:
    q, k, v = _qkv(a)
    return "delta_rule", "q k v beta", (q, k, v, _ones(a.pop("beta"), v)), {}


def _gated_delta(a: Arguments) -> Any:
    (q, k, v), g, gk, beta = _qkv(a), a.pop("g"), a.pop("gk"), a.pop("beta")
    beta = _ones(beta, v)
    if gk is not None:
        return "kda", "q k v gk beta", (q, k, v, gk if g is None else gk + g[..., None], beta), {}
    if g is None:
        return "delta_rule", "q k v beta", (q, k, v, beta), {}
    return "gated_delta_rule", "q k v g beta", (q, k, v, g, beta), {}


def _comba(a: Arguments) -> Any:
    (q, k, v), p, g, beta = _qkv(a), a.pop("p"), a.pop("g"), a.pop("beta")
    return "comba", "q k v p g beta", (q, k, v, p, g, _ones(beta, v)), {}


def _product(a: Arguments) -> Any:
    """The n delta steps of a token are consecutive among T * n rows."""
    (q, k, v), g, beta, n = _qkv(a), a.pop("g"), a.pop("beta"), a.pop("num_householder")
    for key, x in (("k", k), ("v", v), ("beta", beta)):
        if x.dim() < 3 or x.shape[1] != q.shape[1] * n:
            raise InvalidArgument(
                f"chunk_gated_delta_product: {key} has shape {list(x.shape)}, expected {q.shape[1]} * {n} rows"
            )
    k, v, beta = (x.unflatten(1, (q.shape[1], n)) for x in (k, v, beta))
    return "delta_product", "q k v g beta", (q, k, v, g, beta), {}


def _identity_plus_low_rank(a: Arguments) -> Any:
    q, k, v = _qkv(a)
    return "rwkv7", "q _ k v a b", (q, torch.zeros_like(k), k, v, a.pop("a"), a.pop("b")), {}


def _rwkv7_of_layer(a: Arguments) -> Any:
    kk, rate = a.pop("kk"), a.pop("a")
    return "rwkv7", "r w k v kk a", (a.pop("r"), a.pop("w"), a.pop("k"), a.pop("v"), -kk, kk * rate), {}


# --- the table --------------------------------------------------------------------------------------------------------
# name: (module under fla.ops, signature, heed's function of the arguments that are its inputs, or which one is meant).
# fused_chunk_gla and fused_chunk_delta_rule are as they were before the library dropped them.

_STATES = "scale=None, initial_state=None, output_final_state=False"
_PACKED = "cu_seqlens=None, cu_seqlens_cpu=None"
_UNLISTED = "*, chunk_size=None, head_first=False"
_TURNED = "*, head_first=False, transpose_state_layout=False"
_OF_GATE = "use_gate_in_kernel=False, A_log=None, dt_bias=None"
_FUSED_STATES = "scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False"
_DPLR = (
    f"scale=None, initial_state=None, output_final_state=False, {_PACKED}, safe_gate=False, chunk_size=None, "
    "disable_recompute=False, cp_context=None, lower_bound=None, *, head_first=False"
)
_CHUNK_GDN = (
    f"q, k, v, g, beta, {_FUSED_STATES}, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
    f"state_v_first=False, {_PACKED}, chunk_indices=None, cp_context=None, *, {_OF_GATE}, chunk_size=64, "
    "head_first=False, transpose_state_layout=False"
)
_RECURRENT_GDN = (
    f"q, k, v, g=None, gk=None, gv=None, beta=None, {_FUSED_STATES}, {_OF_GATE}, "
    "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, "
    "*, head_first=False, transpose_state_layout=False"
)

_TABLE: dict[str, tuple[str, str, str | Callable[[Arguments], Any]]] = {
    "chunk_gla": ("gla.chunk", f"q, k, v, g, {_STATES}, state_v_first=False, {_PACKED}", "gla(q k v g)"),
    "fused_chunk_gla": ("gla.fused_chunk", f"q, k, v, g, {_STATES}, *, head_first=False", "gla(q k v g)"),
    "fused_recurrent_gla": (
        "gla.fused_recurrent",
        f"q, k, v, gk=None, gv=None, {_STATES}, reverse=False, state_v_first=False, cu_seqlens=None, {_TURNED}",
        _gates_of_both_sides,
    ),
    "chunk_simple_gla": (
        "simple_gla.chunk",
        f"q, k, v, g=None, g_gamma=None, {_STATES}, state_v_first=False, {_PACKED}, {_UNLISTED}",
        _scalar_gates,
    ),
    "fused_chunk_simple_gla": (
        "simple_gla.fused_chunk",
        f"q, k, v, g=None, g_gamma=None, {_STATES}, cu_seqlens=None",
        _scalar_gates,
    ),
    "fused_recurrent_simple_gla": (
        "simple_gla.fused_recurrent",
        f"q, k, v, g=None, g_gamma=None, {_STATES}, reverse=False, state_v_first=False, cu_seqlens=None, {_TURNED}",
        _scalar_gates,
    ),
    "parallel_simple_gla": (
        "simple_gla.parallel",
        f"q, k, v, g=None, scale=None, output_attentions=False, {_PACKED}, *, head_first=False",
        _scalar_gates,
    ),
    "chunk_retention": ("retention.chunk", f"q, k, v, {_STATES}, cu_seqlens=None, {_UNLISTED}", "retention(q k v)"),
    "fused_chunk_retention": (
        "retention.fused_chunk",
        f"q, k, v, {_STATES}, cu_seqlens=None, {_UNLISTED}",
        "retention(q k v)",
    ),
    "fused_recurrent_retention": (
        "retention.fused_recurrent",
        f"q, k, v, {_STATES}, reverse=False, state_v_first=False, cu_seqlens=None, {_TURNED}",
        "retention(q k v)",
    ),
    "parallel_retention": (
        "retention.parallel",
        "q, k, v, scale=None, output_attentions=False, cu_seqlens=None, *, head_first=False",
        "retention(q k v)",
    ),
    "chunk_lightning_attn": (
        "lightning_attn.chunk",
        f"q, k, v, layer_idx, num_layers, {_STATES}, cu_seqlens=None, {_UNLISTED}",
        _ladder,
    ),
    "fused_recurrent_lightning_attn": (
        "lightning_attn.fused_recurrent",
        f"q, k, v, layer_idx, num_layers, {_STATES}, reverse=False, cu_seqlens=None, *, head_first=False",
        _ladder,
    ),
    "chunk_linear_attn": ("linear_attn.chunk", f"q, k, v, {_STATES}, normalize=True, cu_seqlens=None", _normalised),
    "fused_chunk_linear_attn": (
        "linear_attn.fused_chunk",
        f"q, k, v, {_STATES}, normalize=True, cu_seqlens=None",
        _normalised,
    ),
    "fused_recurrent_linear_attn": (
        "linear_attn.fused_recurrent",
        f"q, k, v, {_STATES}, reverse=False, normalize=False, cu_seqlens=None",
        _normalised,
    ),
    "chunk_delta_rule": (
        "delta_rule.chunk",
        f"q, k, v, beta, {_FUSED_STATES}, {_PACKED}, {_UNLISTED}",
        "delta_rule(q k v beta)",
    ),
    "fused_chunk_delta_rule": (
        "delta_rule.fused_chunk",
        f"q, k, v, beta, {_STATES}, *, head_first=False",
        "delta_rule(q k v beta)",
    ),
    "fused_recurrent_delta_rule": (
        "delta_rule.fused_recurrent",
        f"q, k, v, beta=None, {_FUSED_STATES}, cu_seqlens=None",
        _delta,
    ),
    "parallel_delta_rule": (
        "delta_rule.parallel",
        "q, k, v, beta, scale=None, output_attentions=False, *, head_first=False",
        "delta_rule(q k v beta)",
    ),
    "chunk_gated_delta_rule": ("gated_delta_rule.chunk", _CHUNK_GDN, "gated_delta_rule(q k v g beta)"),
    "chunk_gdn": ("gated_delta_rule.chunk", _CHUNK_GDN, "gated_delta_rule(q k v g beta)"),
    "fused_recurrent_gated_delta_rule": ("gated_delta_rule.fused_recurrent", _RECURRENT_GDN, _gated_delta),
    "fused_recurrent_gdn": ("gated_delta_rule.fused_recurrent", _RECURRENT_GDN, _gated_delta),
    "chunk_kda": (
        "kda.chunk",
        (f"q, k, v, g, beta, {_FUSED_STATES}, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
         "allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False, "
         f"return_intermediate_states=False, state_v_first=False, {_PACKED}, cp_context=None, *, A_log=None, "
         "dt_bias=None, chunk_size=64, head_first=False, transpose_state_layout=False"),
        "kda(q k v g beta)",
    ),
    "fused_recurrent_kda": (
        "kda.fused_recurrent",
        (f"q, k, v, g, beta, A_log=None, dt_bias=None, {_FUSED_STATES}, use_gate_in_kernel=False, "
         "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False, "
         f"cu_seqlens=None, {_TURNED}"),
        "kda(q k v g beta)",
    ),
    "chunk_gdn2": (
        "gdn2.chunk",
        (f"q, k, v, g, b, w, {_FUSED_STATES}, use_gate_in_kernel=False, {_PACKED}, safe_gate=False, lower_bound=None, "
         "disable_recompute=False, return_intermediate_states=False, state_v_first=False, *, A_log=None, dt_bias=None, "
         "chunk_size=64, head_first=False, transpose_state_layout=False"),
        "gdn2(q k v g b w)",
    ),
    "fused_recurrent_gdn2": (
        "gdn2.fused_recurrent",
        (f"q, k, v, g, b, w, A_log=None, dt_bias=None, {_FUSED_STATES}, use_gate_in_kernel=False, lower_bound=None, "
         f"state_v_first=False, cu_seqlens=None, {_TURNED}"),
        "gdn2(q k v g b w)",
    ),
    "chunk_comba": ("comba.chunk", f"q, k, v, p, g, beta=None, {_FUSED_STATES}, {_PACKED}", _comba),
    "fused_recurrent_comba": (
        "comba.fused_recurrent",
        f"q, k, p, v, g, beta=None, {_FUSED_STATES}, cu_seqlens=None",
        _comba,
    ),
    "chunk_gated_delta_product": (
        "gated_delta_product.chunk",
        f"q, k, v, g, beta, num_householder, {_FUSED_STATES}, {_PACKED}",
        _product,
    ),
    "chunk_dplr_delta_rule": (
        "generalized_delta_rule.dplr.chunk",
        f"q, k, v, a, b, gk, {_DPLR}",
        "rwkv7(q gk k v a b)",
    ),
    "fused_recurrent_dplr_delta_rule": (
        "generalized_delta_rule.dplr.fused_recurrent",
        f"q, k, v, a, b, gk, {_STATES}, reverse=False, cu_seqlens=None",
        "rwkv7(q gk k v a b)",
    ),
    "chunk_iplr_delta_rule": (
        "generalized_delta_rule.iplr.chunk",
        f"q, k, v, a, b, {_STATES}, {_PACKED}, {_UNLISTED}",
        _identity_plus_low_rank,
    ),
    "fused_recurrent_iplr_delta_rule": (
        "generalized_delta_rule.iplr.fused_recurrent",
        f"q, k, v, a, b, {_STATES}, cu_seqlens=None",
        _identity_plus_low_rank,
    ),
    "chunk_rwkv6": ("rwkv6.chunk", f"r, k, v, w, u, {_STATES}, {_PACKED}, {_UNLISTED}", "rwkv6(r k v w u)"),
    "fused_recurrent_rwkv6": (
        "rwkv6.fused_recurrent",
        f"r, k, v, w, u, {_STATES}, reverse=False, cu_seqlens=None, *, head_first=False",
        "rwkv6(r k v w u)",
    ),
    "chunk_rwkv7": (
        "rwkv7.chunk",
        f"r, w, k, v, a, b, {_DPLR}".replace("scale=None", "scale=1.0"),
        "rwkv7(r w k v a b)",
    ),
    "fused_recurrent_rwkv7": (
        "rwkv7.fused_recurrent",
        "r, w, k, v, a, b, scale=None, initial_state=None, output_final_state=True, cu_seqlens=None, *, "
        "head_first=False",
        "rwkv7(r w k v a b)",
    ),
    "fused_mul_recurrent_rwkv7": (
        "rwkv7.fused_recurrent",
        ("r, w, k, v, kk, a, scale=1.0, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None, "
         "*, head_first=False"),
        _rwkv7_of_layer,
    ),
    "chunk_hgrn": ("hgrn.chunk", "x, g, initial_state=None, output_final_state=False", "hgrn(x g)"),
    "fused_recurrent_hgrn": (
        "hgrn.fused_recurrent",
        "x, g, initial_state=None, output_final_state=False, cu_seqlens=None",
        "hgrn(x g)",
    ),
}

# Functions with preconditioned keys return A, a state of its own, beside the other. In chunk_precond_kda rows of q and
# k always have length 1.
_OF_KEYS = "x=1.5, eps=1e-6, log_atk_scale=None"
_STATES_WITH_A = "scale=None, initial_state=None, initial_A_state=None, output_final_state=False"
_PRECONDITIONED = {
    "chunk_precond_gated_delta_rule": (
        "precond_gated_delta_rule.chunk",
        (f"q, k, v, g_atk, g, beta_atk, beta, {_STATES_WITH_A}, use_qk_l2norm_in_kernel=True, {_PACKED}, "
         f"cp_context=None, transpose_state_layout=False, {_OF_KEYS}"),
    ),
    "fused_recurrent_precond_gated_delta_rule": (
        "precond_gated_delta_rule.fused_recurrent",
        ("q, k, v, g=None, gk=None, gv=None, beta=None, g_atk=None, beta_atk=None, "
         f"{_STATES_WITH_A}, use_qk_l2norm_in_kernel=True, cu_seqlens=None, transpose_state_layout=False, {_OF_KEYS}"),
    ),
    "chunk_precond_kda": (
        "precond_kda.chunk",
        (f"q, k, v, g, g_atk, beta_atk, beta, {_STATES_WITH_A}, use_gate_in_kernel=False, safe_gate=False, "
         f"lower_bound=None, {_PACKED}, chunk_indices=None, cp_context=None, transpose_state_layout=False, {_OF_KEYS}, "
         "solve_tril_precision=None, disable_recompute=False, return_intermediate_states=False, *, A_log=None, "
         "dt_bias=None"),
    ),
    "fused_recurrent_precond_kda": (
        "precond_kda.fused_recurrent",
        (f"q, k, v, g, g_atk, beta_atk, beta, A_log=None, dt_bias=None, {_STATES_WITH_A}, "
         "use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None, "
         f"transpose_state_layout=False, {_OF_KEYS}"),
    ),
}

# Functions of fla.ops that heed has no mechanism for, or computes something else.
_LACKING = {
    "chunk_abc": "abc.chunk",
    "chunk_gated_oja_rule": "gated_oja_rule.chunk",
    "chunk_gsa": "gsa.chunk",
    "chunk_titans_linear": "titans.naive",
    "fused_recurrent_gated_oja_rule": "gated_oja_rule.fused_recurrent",
    "fused_recurrent_gsa": "gsa.fused_recurrent",
    "parallel_rebased": "rebased.parallel",
    "parallel_wall_attn_decode": "wall_attn.decode",
}

_WHY = {"chunk_titans_linear": "its step is not the gradient of its loss, which heed.torch.titans takes: one term is "
        "multiplied by the number of channels instead of divided by the standard deviation"}

_LACKING_MODULES = {
    "BitLinear": "modules.fused_bitlinear",
    "FusedBitLinear": "modules.fused_bitlinear",
    "FusedKLDivLoss": "modules.fused_kl_div",
    "ImplicitLongConvolution": "modules.convolution",
    "LongConvolution": "modules.convolution",
    "TokenShift": "modules.token_shift",
}


# --- functions from the table -----------------------------------------------------------------------------------------


def _prepare(name: str, mechanism: Any, keeps_state: bool, a: Arguments) -> Callable[[], Any]:
    if "p" in a and a["p"] is None:
        a["p"] = a["k"]
    _dispatch.check_tensors(name, **{key: a[key] for key in ("q", "r", "k", "v", "x") if key in a})
    _activate(name, a)
    if callable(mechanism):
        operation, names, inputs, options = mechanism(a)
    else:
        operation, names = mechanism[:-1].split("(")
        inputs, options = tuple(a.pop(key) for key in names.split()), {}
    rows = inputs[0]
    initial, turn = _states(a, rows)
    if "scale" in a:
        scale = a.pop("scale")
        options = {**options, "scale": rows.shape[-1] ** -0.5 if scale is None else scale}
    wanted = a.pop("output_final_state", False)
    options = {
        **options,
        "initial_state": initial,
        "return_state": bool(wanted),
        **{key: a.pop(key) for key in ("reverse", "cu_seqlens") if key in a},
    }

    def call() -> Any:
        try:
            result = getattr(heed.torch, operation)(*inputs, **options)
        except (InvalidArgument, Unsupported) as error:
            of_heed = dict(zip(_core._mechanisms[operation]["inputs"], names.split()))
            raise in_words_of(name, {**of_heed, "log_decay_v": "gv"}, error) from None
        if not keeps_state:
            return result, None  # no attention weights
        o, state = result if wanted else (result, None)
        if isinstance(state, tuple):
            state = state[0], state[1].unsqueeze(1)
        elif turn and state is not None:
            state = state.transpose(-1, -2)
        return o, state

    return call


def _from_table(name: str, signature: str, mechanism: Any) -> Any:
    prepare = functools.partial(_prepare, name, mechanism, "output_final_state" in signature)
    runs = mechanism if isinstance(mechanism, str) else f"what heed.torch has for `{mechanism.__name__.strip('_')}`"
    return door(name, signature, prepare, f"{name} of fla.ops on the CPU, by heed: {runs}. See heed.compat.fla.")


def _prepare_preconditioned(name: str, a: Arguments) -> Callable[[], Any]:
    _dispatch.check_tensors(name, **{key: a[key] for key in ("q", "k", "v", "g_atk", "beta_atk")})
    a.setdefault("use_qk_l2norm_in_kernel", True)
    _activate(name, a)
    (q, k, v), g, gk = _qkv(a), a.pop("g"), a.pop("gk", None)
    if gk is not None:
        g = gk if g is None else gk + g[..., None]
    g = torch.zeros_like(v[..., 0]) if g is None else g
    given = [g, _ones(a.pop("beta"), v), a.pop("g_atk"), a.pop("beta_atk")]
    (initial, turn), A = _states(a, q), a.pop("initial_A_state")
    center, scale, wanted = a.pop("log_atk_scale"), a.pop("scale"), bool(a.pop("output_final_state"))
    if isinstance(center, (int, float)):
        center = torch.full((k.shape[2],), center, dtype=_wide(k))
    options = {
        "center": center,
        "bound": a.pop("x"),
        "eps": a.pop("eps"),
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "initial_state": (initial, A if A is None else A.to(_wide(k))),
        "return_state": wanted,
        "cu_seqlens": a.pop("cu_seqlens"),
    }
    operation = heed.torch.precond_delta_rule if g.dim() == 3 else heed.torch.precond_kda
    words = {"log_decay": "g", "log_decay_A": "g_atk", "beta_A": "beta_atk", "center": "log_atk_scale", "bound": "x"}

    def call() -> Any:
        try:
            result = operation(q, k, v, *given, **options)
        except (InvalidArgument, Unsupported) as error:
            raise in_words_of(name, words, error) from None
        if not wanted:
            return result, None, None
        o, (S, A) = result
        return o, S.transpose(-1, -2) if turn else S, A

    return call


for _name, (_, _signature) in _PRECONDITIONED.items():
    _text = f"{_name} of fla.ops on the CPU, by heed: precond_delta_rule or precond_kda. See heed.compat.fla."
    globals()[_name] = door(_name, _signature, functools.partial(_prepare_preconditioned, _name), _text)

_OPERATORS = {name: of[0] for name, of in (_TABLE | _PRECONDITIONED).items()} | _fla_attention.PLACES | _LACKING
_OPERATORS |= {"fused_gdn_gate": "gated_delta_rule.gate", "fused_kda_gate": "kda.gate"}
PLACES: dict[str, str | tuple[str, ...]] = {name: f"ops.{place}" for name, place in _OPERATORS.items()}
PLACES |= _fla_norms.PLACES | _fla_modules.PLACES | _fla_padding.PLACES | _LACKING_MODULES  # where the library has each

for _name, (_, _signature, _mechanism) in _TABLE.items():
    globals()[_name] = _from_table(_name, _signature, _mechanism)
for _of in (_fla_attention, _fla_norms, _fla_modules, _fla_padding):
    globals().update({_name: getattr(_of, _name) for _name in _of.PLACES})
for _name in _LACKING | _LACKING_MODULES:
    globals()[_name] = lacking(_name, _WHY.get(_name))
for _name in PLACES:
    if callable(globals()[_name]):
        globals()[_name].__module__ = __name__

__all__: list[str] = []
__all__ += sorted(PLACES)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"heed.compat.fla has no {name!r}")
