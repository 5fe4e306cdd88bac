# The norms of fla.modules.
"""fla.modules.layernorm and fla.modules.fused_norm_gate: functions, and modules with the originals' state dicts."""

from __future__ import annotations

from typing import Any

from heed import InvalidArgument
from heed.compat._norms import NormBase, check_gate, norm


def layer_norm(
    x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, is_rms_norm=False
):
    """Layer norm, or RMS norm, of x + residual; with prenorm also that sum."""
    return norm("layer_norm", x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def group_norm(
    x,
    weight,
    bias,
    residual=None,
    eps=1e-5,
    prenorm=False,
    residual_in_fp32=False,
    is_rms_norm=False,
    num_groups=1,
):
    """Layer norm of groups of channels."""
    return norm("group_norm", x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)


def rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
    """RMS norm of x + residual; with prenorm also that sum."""
    return norm("rms_norm", x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def layer_norm_linear(
    x,
    norm_weight,
    norm_bias,
    linear_weight,
    linear_bias,
    residual=None,
    eps=1e-5,
    prenorm=False,
    residual_in_fp32=False,
    is_rms_norm=False,
    num_groups=1,
):
    """A norm, and a product with a matrix."""
    linear = linear_weight, linear_bias
    return norm("layer_norm_linear", x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm,
                num_groups, linear=linear)


def rms_norm_linear(
    x,
    norm_weight,
    norm_bias,
    linear_weight,
    linear_bias,
    residual=None,
    eps=1e-5,
    prenorm=False,
    residual_in_fp32=False,
):
    """An RMS norm, and a product with a matrix."""
    linear = linear_weight, linear_bias
    return norm("rms_norm_linear", x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, True,
                linear=linear)


def layer_norm_gated(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6
):
    """A layer norm times the activation of g: swish, silu or sigmoid."""
    return norm("layer_norm_gated", x, weight, bias, residual, eps, prenorm, residual_in_fp32, False, gate=g,
                activation=activation)


def rms_norm_gated(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6
):
    """An RMS norm times the activation of g: swish, silu or sigmoid."""
    return norm("rms_norm_gated", x, weight, bias, residual, eps, prenorm, residual_in_fp32, True, gate=g,
                activation=activation)


def layer_norm_swish_gate_linear(
    x, g, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, prenorm=False, residual_in_fp32=False,
    eps=1e-6
):
    """A layer norm times silu(g), and a product with a matrix."""
    return norm("layer_norm_swish_gate_linear", x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32,
                False, gate=g, linear=(linear_weight, linear_bias))


def rms_norm_swish_gate_linear(
    x, g, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, prenorm=False, residual_in_fp32=False,
    eps=1e-6
):
    """An RMS norm times silu(g), and a product with a matrix."""
    return norm("rms_norm_swish_gate_linear", x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, True,
                gate=g, linear=(linear_weight, linear_bias))


class _Norm(NormBase):
    rms, groups = False, 1

    def _of(self, x: Any, residual: Any, prenorm: bool, residual_in_fp32: bool, **more: Any) -> Any:
        name = type(self).__name__
        return norm(name, x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32, self.rms,
                    self.groups, **more)


class LayerNorm(_Norm):
    """Layer norm of x + residual."""

    def __init__(self, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        return self._of(x, residual, prenorm, residual_in_fp32)


class RMSNorm(LayerNorm):
    """RMS norm of x + residual."""

    rms = True


class GroupNorm(_Norm):
    """Layer norm, or RMS norm, of groups of channels of x + residual."""

    def __init__(
        self,
        num_groups,
        hidden_size,
        elementwise_affine=True,
        bias=False,
        eps=1e-5,
        is_rms_norm=False,
        device=None,
        dtype=None,
    ):
        if hidden_size % num_groups:
            name = type(self).__name__
            raise InvalidArgument(f"{name}: num_groups is {num_groups}, expected a divisor of hidden_size, "
                                  f"{hidden_size}")
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups = self.groups = num_groups
        self.is_rms_norm = self.rms = is_rms_norm

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        return self._of(x, residual, prenorm, residual_in_fp32)


class LayerNormLinear(LayerNorm):
    """Layer norm of x + residual, and a product with a matrix that the call brings."""

    def forward(self, x, weight, bias, residual=None, prenorm=False, residual_in_fp32=False):
        return self._of(x, residual, prenorm, residual_in_fp32, linear=(weight, bias))


class RMSNormLinear(LayerNormLinear):
    """RMS norm of x + residual, and a product with a matrix that the call brings."""

    rms = True


class GroupNormLinear(GroupNorm):
    """Norm of groups of channels of x + residual, and a product with a matrix that the call brings."""

    def forward(self, x, weight, bias, residual=None, prenorm=False, residual_in_fp32=False):
        return self._of(x, residual, prenorm, residual_in_fp32, linear=(weight, bias))


class _GatedNorm(_Norm):
    def __init__(self, hidden_size, elementwise_affine, bias, activation, eps, device, dtype):
        check_gate(type(self).__name__, activation)
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.activation = activation

    def forward(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
        return self._of(x, residual, prenorm, residual_in_fp32, gate=g, activation=self.activation)


class FusedLayerNormGated(_GatedNorm):
    """Layer norm of x + residual, times the activation of g."""

    def __init__(
        self, hidden_size, elementwise_affine=True, bias=False, activation="swish", eps=1e-5, device=None, dtype=None
    ):
        super().__init__(hidden_size, elementwise_affine, bias, activation, eps, device, dtype)


class FusedRMSNormGated(_GatedNorm):
    """RMS norm of x + residual, times the activation of g."""

    rms = True

    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, activation="swish", device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, False, activation, eps, device, dtype)


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """Layer norm of x + residual, times silu(g)."""

    def __init__(self, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, bias, eps=eps, device=device, dtype=dtype)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """RMS norm of x + residual, times silu(g)."""

    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, eps, device=device, dtype=dtype)


class FusedLayerNormSwishGateLinear(_Norm):
    """Layer norm of x + residual, times silu(g), and a product with a matrix that the call brings."""

    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)

    def forward(self, x, g, weight=None, bias=None, residual=None, prenorm=False, residual_in_fp32=False):
        if weight is None:
            raise InvalidArgument(f"{type(self).__name__}: weight is None, expected a matrix")
        return self._of(x, residual, prenorm, residual_in_fp32, gate=g, linear=(weight, bias))


class FusedRMSNormSwishGateLinear(FusedLayerNormSwishGateLinear):
    """RMS norm of x + residual, times silu(g), and a product with a matrix that the call brings."""

    rms = True


_LAYERNORM = "modules.layernorm"
_GATED = "modules.fused_norm_gate"
PLACES = dict.fromkeys(
    ("GroupNorm", "GroupNormLinear", "LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear", "group_norm",
     "layer_norm", "layer_norm_linear", "rms_norm", "rms_norm_linear"), _LAYERNORM) | dict.fromkeys(
    ("FusedLayerNormGated", "FusedLayerNormSwishGate", "FusedLayerNormSwishGateLinear", "FusedRMSNormGated",
     "FusedRMSNormSwishGate", "FusedRMSNormSwishGateLinear", "layer_norm_gated", "layer_norm_swish_gate_linear",
     "rms_norm_gated", "rms_norm_swish_gate_linear"), _GATED)
