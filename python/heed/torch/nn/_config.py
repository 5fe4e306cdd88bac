# Layers of heed.torch.nn read configurations of Transformers: known fields of known families, and no others.
"""Schema and Fields: a layer reads some fields of a configuration, some have no effect, and it refuses the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import heed
from heed import InvalidArgument, Unsupported

REQUIRED = object()  # the default of a field that a configuration must have

# Fields of numbers where null means "as many as there are heads" or "none".
_NULLABLE = frozenset({"num_key_value_heads", "head_dim", "sliding_window", "max_window_layers",
                       "attn_logit_softcapping", "q_lora_rank", "attention_hidden_size", "attention_dropout"})
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")  # types that Transformers gives original_max_position_embeddings


class Family(NamedTuple):
    """Configurations of one `model_type`, as one layer takes them.

    `fields` are those that decide what the layer computes, with Transformers' defaults: from_config reads them, and one
    that it does not read must have this value. `options` are arguments of the constructor that all members share;
    `windowed` says whether layer i has the sliding window where `layer_types` is missing.
    """

    fields: Mapping[str, Any]
    options: Mapping[str, Any] = {}
    windowed: Callable[[Fields, int], bool] | None = None


class Schema(NamedTuple):
    """The input of a layer's from_config: families by `model_type`, "" for a configuration without one, and fields that
    cannot matter to the layer in any of them."""

    layer: str
    families: Mapping[str, Family]
    unrelated: frozenset[str]

    def open(self, config: Any) -> Fields:
        """The fields of a configuration. Throws Unsupported for a family that is not the layer's."""
        return Fields(self, config)


def _decoded(x: Any) -> Any:
    """A value of config.json, in which Transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(x, Mapping):
        return float(x["__float__"]) if set(x) == {"__float__"} else {key: _decoded(value) for key, value in x.items()}
    return [_decoded(item) for item in x] if isinstance(x, (list, tuple)) else x


def _values(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return _decoded(config)
    if callable(getattr(config, "to_dict", None)) and not isinstance(config, type):
        return dict(config.to_dict())
    return dict(getattr(config, "__dict__", {}))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


class Fields:
    """The fields of a configuration: an object, or a mapping as in config.json. `close` refuses fields left unread."""

    def __init__(self, schema: Schema, config: Any) -> None:
        self.name, self._schema, self._config = f"{schema.layer}.from_config", schema, config
        self.given = _values(config)
        model_type = self.given.get("model_type", getattr(config, "model_type", None)) or ""
        if not isinstance(model_type, str) or model_type not in schema.families:
            known = ", ".join(repr(family) for family in sorted(schema.families) if family)
            raise Unsupported(f"{self.name}: model_type is {model_type!r}, expected one of {known}")
        self.model_type, self.family = model_type, schema.families[model_type]
        if not isinstance(config, Mapping):  # attributes of a class, such as properties
            of_class = [x for x in self.family.fields if x not in self.given and hasattr(config, x)]
            self.given |= {x: getattr(config, x) for x in of_class}
        self._read = {"model_type"}

    def __getitem__(self, name: str) -> Any:
        """A field of the family: what is given, else the family's default."""
        default = self.family.fields[name]
        self._read.add(name)
        value = self.given.get(name, default)
        if value is REQUIRED:
            kind = type(self._config).__name__
            raise InvalidArgument(f"{self.name}: config is a {kind} without {name}, expected one with it")
        if value is None and (default is None or default is not REQUIRED and name in _NULLABLE):
            return value
        kinds: Any = {bool: bool, int: int, float: (int, float)}.get(int if default is REQUIRED else type(default))
        if kinds and (not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool)):
            raise self.refusal(name, {bool: "True or False", float: "a number"}.get(type(default), "an int"))
        return value

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The field if the family has it, else `otherwise`, and `close` refuses the field if it is given."""
        return self[name] if name in self.family.fields else otherwise

    def only(self, name: str, *values: Any) -> None:
        """Throws Unsupported unless a field of the family has one of these values."""
        if name in self.family.fields and not any(_same(self[name], value) for value in values):
            raise self.refusal(name, " or ".join(map(repr, values)))

    def refusal(self, name: str, expected: str) -> Unsupported:
        value = self.given.get(name, self.family.fields.get(name))
        of = f" for model_type {self.model_type!r}" if self.model_type else ""
        return Unsupported(f"{self.name}: {name} is {value!r}, expected {expected}{of}")

    def windowed(self, layer: int) -> bool:
        """Returns whether this layer has the sliding window, in a family in which all, some or no layers have it."""
        used, types, window = self.get("use_sliding_window", True), self.get("layer_types"), self.get("sliding_window")
        self.get("max_window_layers")
        if types is None:
            if not used and "layer_types" not in self.family.fields and self.given.get("sliding_window") is not None:
                raise self.refusal("use_sliding_window", f"True beside sliding_window={window!r}")
            return used and window is not None and (self.family.windowed is None or self.family.windowed(self, layer))
        kind = self.by_layer("layer_types", layer)
        if kind not in ("full_attention", "sliding_attention"):
            raise self.refusal("layer_types", f"'full_attention' or 'sliding_attention' for layer {layer}")
        if kind == "sliding_attention" and not (used and window is not None):
            raise self.refusal("layer_types", f"'full_attention' for layer {layer} without sliding_window")
        return kind == "sliding_attention"

    def by_layer(self, name: str, layer: int) -> Any:
        """The entry of this layer in a field that is a list over layers."""
        values = self[name]
        if not isinstance(values, (list, tuple)) or not 0 <= layer < len(values):
            raise self.refusal(name, f"a list that has layer {layer}")
        return values[layer]

    def rotary(self, dim: int, *, interleaved: bool) -> dict[str, Any]:
        """base and scaling of heed.rotary over `dim` channels, from the present spelling (rope_parameters) or that of
        Transformers 4 (rope_theta and rope_scaling, which wins if both are given), as Transformers 5 puts them
        together."""
        old, new, base, part = (self[x]
                                for x in ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor"))
        source, rope = ("rope_scaling", old) if old and old != new else ("rope_parameters", new or {})
        if not isinstance(rope, Mapping):
            raise self.refusal(source, "a dict")
        scaling = {key: x for key, x in rope.items() if key != "type"}
        kind = scaling.setdefault("rope_type", rope.get("type", "default"))
        if kind not in _ROPE_TYPES:
            raise Unsupported(f"{self.name}: {source} has rope_type {kind!r}, expected one of {', '.join(_ROPE_TYPES)}")
        base, part = scaling.pop("rope_theta", base), scaling.pop("partial_rotary_factor", part)
        if not isinstance(base, (int, float)):
            raise Unsupported(f"{self.name}: rope_theta is {base!r}, expected a number")
        if part not in (None, 1):
            raise Unsupported(f"{self.name}: partial_rotary_factor is {part!r}, expected 1")
        most, original = self["max_position_embeddings"], self["original_max_position_embeddings"]
        within = scaling.pop("original_max_position_embeddings", None)
        if kind in _WITH_ORIGINAL:
            scaling["original_max_position_embeddings"] = original or within or most
        if kind != "default":
            scaling["max_position_embeddings"] = most
        try:
            heed.rotary(np.zeros((1, 1, 1, dim), np.float32), [0], base=base, interleaved=interleaved, scaling=scaling)
        except InvalidArgument as error:
            raise Unsupported(f"{self.name}: {source} is {dict(rope)!r}, rope_theta {base!r}: {error}") from None
        return {"base": float(base), "scaling": None if kind == "default" else scaling}

    def close(self) -> None:
        """Throws Unsupported for the first field that was not read, can matter and has not the family's default."""
        for name, value in self.given.items():
            if name in self._read or name.startswith("_"):
                continue
            if name in self.family.fields:
                if not _same(value, self.family.fields[name]):
                    raise self.refusal(name, repr(self.family.fields[name]))
            elif name not in self._schema.unrelated and value is not None and not _same(value, self._default(name)):
                raise self.refusal(name, "none: the layer does not read it")

    def _default(self, name: str) -> Any:
        """The default in Transformers' own configuration class of a field that is in none of heed's lists."""
        kind = type(self._config)
        parameters = inspect.signature(kind).parameters if kind.__module__.startswith("transformers.") else {}
        return parameters[name].default if name in parameters else None
