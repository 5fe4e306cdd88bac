# Encoders of Transformers without padding: its rows are left out between the first layer and the last.
"""unpad(): which parts of an encoder are changed, in one instance, and when a call runs without its padding.

The model makes its attention mask once per call. In its place it gets a Packing, which it passes on to every layer as
it would a mask: the first layer takes the rows of padding out, attention reads the offsets of the sequences, and the
last layer puts the rows back. Calls that cannot be packed get Transformers' own mask, and every layer then does what it
did before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import heed.torch
from heed import InvalidArgument, Unsupported
from heed.transformers import _layers
from heed.transformers._accelerate import Acceleration, Left, Replaced, _rebound

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None

# Classes of encoders, and where their layers are.
_LAYERS = {
    "BertModel": "encoder.layer",
    "CamembertModel": "encoder.layer",
    "DistilBertModel": "transformer.layer",
    "ElectraModel": "encoder.layer",
    "MPNetModel": "encoder.layer",
    "ModernBertModel": "layers",
    "RobertaModel": "encoder.layer",
    "XLMRobertaModel": "encoder.layer",
}
_MASK, _WINDOW_MASK = "create_bidirectional_mask", "create_bidirectional_sliding_window_mask"


class Packing:
    """The tokens of [B, T] that are not padding, which a model passes on in the place of an attention mask."""

    __slots__ = ("keep", "rows", "offsets", "window", "padded")

    def __init__(self, keep: Tensor, window: int | None, padded: Callable[[], Tensor | None]) -> None:
        self.keep = keep  # bool [B, T]
        self.rows = keep.flatten().nonzero()[:, 0]  # [total], into B * T
        self.offsets = nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))  # [B + 1], as cu_seqlens
        self.window = window  # keys visible on either side, None if all are
        self.padded = padded  # makes the mask that this object replaces

    def pack(self, x: Tensor) -> Tensor:
        """[1, total, ...] of [B, T, ...], or of [1, T, ...] if all sequences share it."""
        rows = self.rows if len(x) == len(self.keep) else self.rows % x.shape[1]
        return x.flatten(0, 1).index_select(0, rows)[None]

    def pad(self, x: Tensor) -> Tensor:
        """[B, T, ...] of [1, total, ...], with rows of padding 0."""
        padded = x.new_zeros(self.keep.numel(), *x.shape[2:]).index_copy(0, self.rows, x[0])
        return padded.unflatten(0, self.keep.shape)

    def leaves_gaps(self) -> bool:
        """Returns whether a sequence has padding between its tokens, so that packing changes distances."""
        starts = (self.keep[:, 1:] & ~self.keep[:, :-1]).sum(1) + self.keep[:, 0]
        return bool((starts > 1).any())


def _why_padded(inputs_embeds: Tensor, attention_mask: Tensor, others: dict[str, Any]) -> str | None:
    """Returns why a call with this mask runs with its padding; None if it can be packed."""
    if _active_collector is not None and _active_collector.get():
        return "hidden states or attentions are returned"
    if attention_mask.shape != inputs_embeds.shape[:2]:
        return f"attention_mask has shape {list(attention_mask.shape)}, expected {list(inputs_embeds.shape[:2])}"
    for name, value in others.items():
        if value is not None:
            return f"{name} was given, expected None"
    return _layers.refuses((inputs_embeds,), {})


def _mask_function(report: Acceleration, path: str, original: Callable, windowed: bool) -> Callable:
    """The function that a model calls for its mask: it returns a Packing, or what `original` returns.

    All masks of a call are of one kind. `windowed` says that some layers of the model see a window only.
    """

    @functools.wraps(original)
    def make(config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, **others: Any) -> Any:
        padded = functools.partial(original, config, inputs_embeds, attention_mask, **others)
        if attention_mask is None or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return padded()
        reason = _why_padded(inputs_embeds, attention_mask, others)
        if reason is None:
            keep = attention_mask.bool()
            if keep.all() or not keep.any():
                return padded()
            packing = Packing(keep, config.sliding_window if original.__name__ == _WINDOW_MASK else None, padded)
            if not (windowed and packing.leaves_gaps()):
                return packing
            reason = "padding between tokens changes their distances, which windows count"
        report._decline(path, "padding", reason)
        return padded()

    return make


class _Interface:
    """Transformers' table of attention functions, for layers whose mask may be a Packing."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def get_interface(self, name: str, default: Callable) -> Callable:
        return functools.partial(_attention, self.original.get_interface(name, default))


def _attention(
    original: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Packing | Tensor | None, scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of [B, H, T, D], packed sequences if the mask is a Packing, else by `original`."""
    if not isinstance(attention_mask, Packing):
        return original(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    width = attention_mask.window
    o = heed.torch.attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scaling, dropout=dropout,
        window=None if width is None else (width, width), cu_seqlens_q=attention_mask.offsets,
    )
    return o, None


def _mpnet_attention(
    layer: Any, hidden_states: Tensor, attention_mask: Packing | Tensor | None = None,
    position_bias: Tensor | None = None, output_attentions: bool = False, **options: Any,
) -> tuple[Tensor, ...]:
    """MPNetSelfAttention.forward. Its bias belongs to positions, so that attention alone is padded."""
    if not isinstance(attention_mask, Packing):
        return type(layer).forward(layer, hidden_states, attention_mask, position_bias, output_attentions, **options)
    heads = (-1, layer.attention_head_size)
    query, key, value = (attention_mask.pad(f(hidden_states).unflatten(2, heads)) for f in (layer.q, layer.k, layer.v))
    o = heed.torch.attention(
        query, key, value, mask=attention_mask.keep[:, None, None], dropout=layer.dropout.p if layer.training else 0.0,
        bias=None if position_bias is None else position_bias[:1],  # all sequences share it
    )
    return (layer.o(attention_mask.pack(o).flatten(2)),)


def _mpnet_encoder(
    decline: Callable, encoder: Any, hidden_states: Tensor, attention_mask: Packing | Tensor | None = None,
    output_attentions: bool = False, output_hidden_states: bool = False, *args: Any, **options: Any,
) -> Any:
    """MPNetEncoder.forward, which alone knows whether hidden states or attentions are returned."""
    if isinstance(attention_mask, Packing) and (output_attentions or output_hidden_states):
        decline("padding", "hidden states or attentions are returned")
        attention_mask = attention_mask.padded()
    return type(encoder).forward(
        encoder, hidden_states, attention_mask, output_attentions, output_hidden_states, *args, **options)


def _layer(original: Callable, first: bool, last: bool) -> Callable:
    """The `forward` of an encoder's layer: the first one packs its input, the last one pads its output."""

    @functools.wraps(original)
    def forward(layer: nn.Module, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **options: Any) -> Any:
        if not isinstance(attention_mask, Packing):
            return original(layer, hidden_states, attention_mask, *args, **options)
        if first:
            hidden_states = attention_mask.pack(hidden_states)
        if options.get("position_embeddings") is not None:  # cosines and sines of positions
            options["position_embeddings"] = tuple(map(attention_mask.pack, options["position_embeddings"]))
        out = original(layer, hidden_states, attention_mask, *args, **options)
        if not last:
            return out
        return (attention_mask.pad(out[0]), *out[1:]) if isinstance(out, tuple) else attention_mask.pad(out)

    return forward


class _Change(NamedTuple):
    """A method of a module that becomes another function; None if the code that it would take is hidden."""

    path: str
    module: Any
    method: str
    function: Any
    attention: str = ""  # of attention layers, what runs without padding


def _changes_of_layers(path: str, layers: nn.ModuleList) -> Iterator[_Change]:
    for i, layer in enumerate(layers):
        yield _Change(f"{path}.{i}", layer, "forward", _layer(type(layer).forward, i == 0, i == len(layers) - 1))
    for where, module in layers.named_modules(prefix=path):
        plain = inspect.unwrap(type(module).forward)
        if type(module).__name__ == "MPNetSelfAttention":
            yield _Change(where, module, "forward", _mpnet_attention, "its linear layers without padding")
        elif inspect.isfunction(plain) and "ALL_ATTENTION_FUNCTIONS" in plain.__code__.co_names:
            names = {"ALL_ATTENTION_FUNCTIONS": _Interface(plain.__globals__["ALL_ATTENTION_FUNCTIONS"])}
            yield _Change(where, module, "forward", _rebound(type(module).forward, names), "without padding")


def _changes(report: Acceleration, path: str, model: Any, layers: str) -> Iterator[_Change]:
    """The methods of an encoder that change: those that make masks, and those of layers and their attention."""
    prefix, where = path and path + ".", path or type(model).__name__
    name = "_create_attention_masks" if hasattr(type(model), "_create_attention_masks") else "forward"
    method = getattr(type(model), name)
    plain = inspect.unwrap(method)
    called = [mask for mask in (_MASK, _WINDOW_MASK) if mask in plain.__code__.co_names]
    masks = {mask: _mask_function(report, where, plain.__globals__[mask], _WINDOW_MASK in called) for mask in called}
    yield _Change(where, model, name, _rebound(method, masks) if masks else None)
    encoder = getattr(model, "encoder", None)
    if type(encoder).__name__ == "MPNetEncoder":
        forward = functools.partial(_mpnet_encoder, functools.partial(report._decline, where))
        yield _Change(prefix + "encoder", encoder, "forward", forward)
    yield from _changes_of_layers(prefix + layers, model.get_submodule(layers))


def _unpad_encoder(report: Acceleration, path: str, model: Any, layers: str) -> None:
    where = f"unpad: {type(model).__name__}" + (path and f" at {path}")
    for name in ("is_decoder", "add_cross_attention", "chunk_size_feed_forward"):
        value = getattr(model.config, name, None)
        if value:
            raise Unsupported(f"{where} has {name}={value!r}, expected {type(value)()!r}")
    changes = list(_changes(report, path, model, layers))
    for change in changes:
        if change.method in change.module.__dict__:
            reason = f"{change.method} has been replaced on this instance already"
            report.left.append(Left(change.path, change.method, reason))
            return
    if any(change.function is None for change in changes) or not any(change.attention for change in changes):
        version = transformers.__version__
        raise Unsupported(f"{where} has other code than that of transformers 5.23; the version is {version}")
    for change in changes:
        report._set(change.module, change.method, change.function)
        if change.attention:
            report.replaced.append(Replaced(change.path, "forward", "attention", change.attention))


def unpad(model: nn.Module) -> Acceleration:
    """Runs the layers of encoders without padding: its rows are left out before the first layer, and put back after
    the last, in inference and in training.

    BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, MPNet and ModernBERT of Transformers, alone or inside of
    another module: a model with a head, a SentenceTransformer, a CrossEncoder. Linear layers, norms and dropout work on
    the tokens of all sequences in one row, [1, total, D]. Attention is heed's on packed sequences (cu_seqlens),
    whatever attention implementation the model has. Embeddings, heads and pooling still work on [B, T, D]. Weights stay
    where they are, and nothing but this instance changes, until `undo()` of what is returned: a report like that of
    `accelerate`. Copies and pickles of the model are plain.

    Results of tokens are the same up to rounding, with padding on the right, on the left or between tokens, and for
    sequences without any token. Rows of padding are 0 after the last layer, where the model would have computed
    something; a pooling that reads them, such as the first row of a sequence with padding on the left, sees zeros.
    Dropout follows torch.manual_seed, with different random numbers. MPNet adds a bias for the positions of a pair:
    its attention is padded, on heed, and everything else is not.

    A call runs as before, to the bit, where nothing is padded, in a graph of torch.compile or torch.export, or if heed
    cannot pack it; `declined` of the report then says why: hidden states or attentions are returned, the mask is not
    [B, T], tensors are on another device, or, in ModernBERT, whose windows count distances, there is padding between
    tokens. Hooks on layers see [1, total, D].

    Raises heed.Unsupported for a model without such an encoder, for decoders, and for chunked feed-forward layers; the
    model stays what it was.

        model = SentenceTransformer(...)
        heed.transformers.unpad(model)
        model.encode(sentences)
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise InvalidArgument(f"unpad: model is {kind}, expected a torch.nn.Module")
    report = Acceleration(model)
    try:
        for path, module in model.named_modules():
            for base in type(module).__mro__:
                if base.__name__ in _LAYERS and base.__module__.startswith("transformers.models."):
                    _unpad_encoder(report, path, module, _LAYERS[base.__name__])
                    break
        if not report.replaced and not report.left:
            expected = ", ".join(_LAYERS)
            raise Unsupported(f"unpad: {type(model).__name__} has no encoder that heed knows, expected {expected}")
    except BaseException:
        report.undo()
        raise
    return report
