# Shared parts of the layers of heed.torch.nn: checks, states of recurrences, norms, and the residual around a layer.
"""The base class of layers, State, Residual and small functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument
from heed.torch import _dispatch
from heed.torch._layer_rows import gated_rows


class State:
    """The state of a recurrent layer: `lengths` [B], the number of tokens so far, and tensors by name, batch first."""

    def __init__(self, batch: int, tensors: dict[str, Tensor]) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.tensors = tensors

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("tensors", {})
        if name in tensors:
            return tensors[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def fork(self) -> State:
        """A state with equal content that goes its own way."""
        return self._of({name: x.clone() for name, x in self.tensors.items()}, self.lengths.clone())

    __copy__ = fork

    def __deepcopy__(self, memo: Any) -> State:
        return self.fork()

    def reorder(self, indices: Any) -> None:
        """indices [batch]: for each sequence the one that it becomes."""
        at = torch.as_tensor(indices)
        if at.shape != self.lengths.shape or at.is_floating_point() or not bool(((at >= 0) & (at < self.batch)).all()):
            expected = f"[{self.batch}] ints from 0 to {self.batch - 1}"
            raise InvalidArgument(f"State.reorder: indices is {indices!r}, expected {expected}")
        self.tensors = {name: x[at] for name, x in self.tensors.items()}
        self.lengths = self.lengths[at]

    def _of(self, tensors: dict[str, Tensor], lengths: Tensor) -> State:
        other = State(lengths.shape[0], tensors)
        other.lengths = lengths
        return other

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={list(x.shape)}" for name, x in self.tensors.items())
        return f"<heed.torch.nn.State: lengths={self.lengths.tolist()}, {shapes}>"


class Layer(nn.Module):
    """Rows [B, T, hidden_size] to rows of the same shape."""

    hidden_size: int

    def forward(self, x: Tensor, state: Any = None, *, lengths: Any = None) -> Tensor:
        raise NotImplementedError

    def new_state(self, batch: int, **options: Any) -> Any:
        """The state of `batch` sequences without a token, of which forward and step go on."""
        raise InvalidArgument(f"{type(self).__name__}.new_state: the layer looks ahead, expected one that is causal")

    @torch.no_grad()
    def step(self, x: Tensor, state: Any, **options: Any) -> Tensor:
        """The next token of each sequence: x [B, hidden_size] to y [B, hidden_size]. It updates the state."""
        if not isinstance(x, Tensor) or x.dim() != 2:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgument(f"{type(self).__name__}.step: x has shape {shape}, expected [B, {self.hidden_size}]")
        if state is None:
            raise InvalidArgument(f"{type(self).__name__}.step: state is None, expected what new_state gives")
        return self(x[:, None], state, **options)[:, 0]

    def _check(self, x: Any, state: Any, kind: type, lengths: Any) -> tuple[Tensor, Tensor | None]:
        """Throws InvalidArgument unless x are rows and `state` fits them. Returns what without_padding does."""
        name = type(self).__name__
        check_rows(name, "x", x, self.hidden_size)
        if state is not None:
            if not isinstance(state, kind):
                expected = (f"a {kind.__name__} of new_state" if kind is not type(None)
                            else "None: the layer looks ahead")
                raise InvalidArgument(f"{name}: state is of type {type(state).__name__}, expected {expected}")
            if state.batch != x.shape[0]:
                raise InvalidArgument(f"{name}: state is of {state.batch} sequences, expected {x.shape[0]} as x")
            if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
                expected = "torch.no_grad(): with a state there are none"
                raise InvalidArgument(f"{name}: state is given where gradients are on, expected {expected}")
        return without_padding(name, "lengths", x, lengths)


def check_rows(name: str, argument: str, x: Any, width: int) -> None:
    """Throws InvalidArgument unless x is [B, T, width]."""
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{name}: {argument} is of type {type(x).__name__}, expected a tensor")
    if x.dim() != 3 or x.shape[-1] != width:
        raise InvalidArgument(f"{name}: {argument} has shape {list(x.shape)}, expected [B, T, {width}]")


def without_padding(name: str, argument: str, x: Tensor, lengths: Any) -> tuple[Tensor, Tensor | None]:
    """Rows x [B, T, width] with zeros beyond `lengths`, and those as a tensor. Products of weights and padding have
    gradients of 0, but times NaN."""
    if lengths is None:
        return x, None
    n = torch.as_tensor(lengths)
    if n.shape != x.shape[:1] or n.is_floating_point() or bool(((n < 0) | (n > x.shape[1])).any()):
        raise InvalidArgument(f"{name}: {argument} is {lengths!r}, expected [{x.shape[0]}] ints from 0 to {x.shape[1]}")
    padding = torch.arange(x.shape[1]) >= n[:, None]
    return x.masked_fill(padding[..., None], 0), n.to(torch.int64)


def check_positions(name: str, positions: Any, state: Any) -> None:
    if positions is not None and state is not None:
        raise InvalidArgument(f"{name}: positions is given beside a state, expected none: "
                              "the state knows where tokens stand")


def check_sizes(name: str, **sizes: Any) -> None:
    """Throws InvalidArgument for the first that is not an int of at least 1."""
    for key, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidArgument(f"{name}: {key} is {size!r}, expected an int of at least 1")


def check_multiple(name: str, argument: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        raise InvalidArgument(f"{name}: {argument} is {value}, expected a multiple of {of}, {divisor}")


def check_choice(name: str, argument: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise InvalidArgument(f"{name}: {argument} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def wide(x: Tensor) -> Tensor:
    """In float32, or float64 if it has that dtype, as decays and states have."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def under_autocast(x: Tensor, weight: Tensor) -> Tensor:
    """Under autocast, which leaves elementwise products alone, rows in the dtype of a weight that multiplies them."""
    return x if _dispatch.autocast_dtype(x) is None else x.to(weight.dtype)


def zero_state(weight: Tensor, *sizes: int) -> Tensor:
    """Zeros [sizes] for a state of a layer that has this weight: float32, float64 beside float64, on its device."""
    return weight.new_zeros(sizes, dtype=torch.promote_types(weight.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """Rows of norm 1, nearly: as Gated DeltaNet has them."""
    return gated_rows(x, norm="unit", eps=1e-6)


class RMSNorm(nn.Module):
    """weight x / rms(x), over the last axis."""

    def __init__(self, size: int, *, eps: float, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size, device=device, dtype=dtype)), eps

    def forward(self, x: Tensor) -> Tensor:
        return gated_rows(x, weight=self.weight, norm="rms", eps=self.eps)


def attended(state: Any, q: Tensor, lengths: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Attention of rows over a cache; rows beyond the call's longest sequence are 0 and do not enter the cache."""
    most = q.shape[1] if lengths is None else int(lengths.max()) if len(lengths) else 0
    if most == q.shape[1]:
        return state.attend(q, **options)
    o = q.new_zeros((*q.shape[:3], state.value_dim))
    if most:
        o[:, :most] = state.attend(q[:, :most], **options)
    return o


def is_step(x: Tensor, lengths: Tensor | None) -> bool:
    """Returns whether x is one token of each sequence without gradients, which heed's steps take."""
    return x.shape[1] == 1 and lengths is None and not torch.is_grad_enabled()


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, state: State | None, lengths: Tensor | None) -> Tensor:
    """silu of the causal convolution of x [B, T, C] by weight [C, 1, W], as rows [B, T, C]."""
    weight, channels = weight.squeeze(1), x.transpose(1, 2)
    if state is None:
        return heed.torch.causal_conv1d(channels, weight, bias, activation="silu", lengths=lengths).transpose(1, 2)
    if is_step(x, lengths):
        return heed.torch.causal_conv1d_step(x[:, 0], weight, bias, state=state.conv, activation="silu")[:, None]
    y, state.tensors["conv"] = heed.torch.causal_conv1d(
        channels, weight, bias, activation="silu", initial_state=state.conv, return_state=True, lengths=lengths)
    return y.transpose(1, 2)


def new_convolution(channels: int, taps: int, bias: bool, factory: dict[str, Any]) -> nn.Conv1d:
    """The weights of a depthwise convolution, as modules of Transformers hold them."""
    return nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1, bias=bias, **factory)


def new_steps(size: int, least: float, most: float, floor: float, factory: dict[str, Any]) -> Tensor:
    """Biases whose softplus is spread between two step sizes, evenly by logarithm."""
    dt = torch.exp(torch.rand(size, **factory) * math.log(most / least) + math.log(least)).clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))


class GatedRMSNorm(nn.Module):
    """weight x / rms(x) silu(gate), or with gate_first weight z / rms(z), z = x silu(gate); rms of channel groups."""

    def __init__(self, size: int, *, group: int | None = None, eps: float, gate_first: bool, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **factory))
        self.group, self.eps, self.gate_first = group or size, eps, gate_first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        weight, groups = self.weight, len(self.weight) // self.group
        if groups > 1:
            x, gate, weight = (y.unflatten(-1, (groups, -1)) for y in (x, gate, weight))
        y = gated_rows(x, gate, weight, norm="rms", gate_first=self.gate_first, eps=self.eps)
        return y.flatten(-2) if groups > 1 else y


class Residual(Layer):
    """A layer with its norm and the rows that it is added to.

        pre   y = x + layer(norm(x))
        post  y = norm(x + layer(x))

    Rows [B, T, hidden_size]. `names` are those of the layer and of the norm in the state dict: ("self_attn",
    "input_layernorm") is the first half of Transformers' LlamaDecoderLayer and its like, ("mixer", "norm") is
    MambaBlock, ("self_attn", "self_attn_layer_norm") with norm="layer" and order="post" is of BartEncoderLayer. States
    are the layer's.
    """

    def __init__(self, layer: nn.Module, *, order: str = "pre", norm: str = "rms", eps: float = 1e-6,
                 names: tuple[str, str] = ("self_attn", "input_layernorm"), device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        if not isinstance(layer, nn.Module) or not isinstance(getattr(layer, "hidden_size", None), int):
            raise InvalidArgument(f"Residual: layer is of type {type(layer).__name__}, "
                                  "expected a layer of heed.torch.nn")
        check_choice("Residual", "order", order, ("pre", "post"))
        check_choice("Residual", "norm", norm, ("rms", "layer"))
        if len(names) != 2 or names[0] == names[1] or not all(isinstance(x, str) and x.isidentifier() for x in names):
            raise InvalidArgument(f"Residual: names is {names!r}, expected two different identifiers")
        self.hidden_size, self.order, self.names = layer.hidden_size, order, tuple(names)
        self.add_module(names[0], layer)
        kind = RMSNorm if norm == "rms" else nn.LayerNorm
        self.add_module(names[1], kind(self.hidden_size, eps=eps, device=device, dtype=dtype))

    def new_state(self, batch: int, **options: Any) -> Any:
        return self._modules[self.names[0]].new_state(batch, **options)  # type: ignore[union-attr,operator]

    def forward(self, x: Tensor, state: Any = None, **options: Any) -> Tensor:
        x, _ = self._check(x, None, type(None), options.get("lengths"))
        layer, norm = (self._modules[name] for name in self.names)
        if self.order == "pre":
            return x + layer(norm(x), state, **options)  # type: ignore[misc]
        return norm(x + layer(x, state, **options))  # type: ignore[misc]
