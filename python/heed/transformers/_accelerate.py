# Recurrences and sparse attention of Transformers' models on heed: their slow functions replaced, in one instance.
"""accelerate(): which layers of a model call a slow function that heed has, and what they call instead.

Transformers writes every recurrence as a function of its modeling file, called by that layer's `forward`. A layer that
is accelerated gets, on the instance, a `forward` of the same code whose global names of these functions mean heed's.
Where the recurrence, or sparse attention, is written into a method, the instance gets that method. Neither module nor
class is touched.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from heed import InvalidArgument, Unsupported
from heed.torch import _dispatch
from heed.transformers import _layers, _sparse


class Replaced(NamedTuple):
    """A call of a layer that heed computes."""

    layer: str  # name in the model
    call: str  # the function or method
    by: str  # heed's function
    note: str = ""  # how its results differ


class Left(NamedTuple):
    """A call of a layer that stays what it was."""

    layer: str
    call: str
    reason: str


class Change(NamedTuple):
    """A method of a layer, and the function that it becomes on the instance."""

    layer: nn.Module
    method: str
    function: Callable


class Acceleration:
    """The changes that `accelerate` or `unpad` made to a model; `undo()`, or the end of a `with` block, reverts them.

    `replaced` lists the calls that run on heed, `left` those that could not be replaced, and `declined`, which grows
    while the model runs, those that heed did not compute for what they were given. Printing it shows all three.
    """

    def __init__(self, model: nn.Module) -> None:
        self.replaced: list[Replaced] = []
        self.left: list[Left] = []
        self.declined: list[Left] = []
        self._model = type(model).__name__
        self._methods: list[tuple[weakref.ref[nn.Module], str, Callable]] = []

    def undo(self) -> None:
        """Makes the model what it was; once or more often."""
        while self._methods:
            reference, name, function = self._methods.pop()
            layer = reference()
            if layer is not None and _is_bound(layer.__dict__.get(name), function):
                delattr(layer, name)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{self._model}: {len(self.replaced)} calls run on heed, {len(self.left)} could not be replaced"]
        lines += [f"  {layer}: {call} -> {by}" + (note and f" ({note})") for layer, call, by, note in self.replaced]
        lines += [f"  {layer}: {call} stays: {reason}" for layer, call, reason in self.left]
        lines += [f"  {layer}: {call} ran as before: {reason}" for layer, call, reason in self.declined]
        return "\n".join(lines)

    def _set(self, layer: nn.Module, name: str, function: Callable) -> None:
        of_layer = {key: call for reference, key, call in self._methods if reference() is layer}
        of_layer.pop("__reduce_ex__", None)
        reduce = functools.partial(_reduce_without, {**of_layer, name: function})
        for key, call in ((name, function), ("__reduce_ex__", reduce)):
            object.__setattr__(layer, key, types.MethodType(call, layer))
            self._methods.append((weakref.ref(layer), key, call))

    def _decline(self, layer: str, call: str, reason: str) -> None:
        entry = Left(layer, call, reason)
        if not torch.compiler.is_compiling() and entry not in self.declined:
            self.declined.append(entry)

    def _dispatch(self, layer: str, name: str, on_heed: Callable, original: Callable, strict: bool = False) -> Callable:
        """The function that is called in the place of `original`: heed's, or `original` where heed declines. With
        `strict` it raises Unsupported there."""

        @functools.wraps(inspect.unwrap(original))
        def call(*args: Any, **kwargs: Any) -> Any:
            reason = _layers.refuses(args, kwargs)
            if reason is None:
                result = on_heed(*args, **kwargs)
                if not isinstance(result, _layers.Declined):
                    return result
                reason = result.reason
            if strict:
                raise Unsupported(f"accelerate: {name} of {layer} is not computed in a group: {reason}")
            self._decline(layer, name, reason)
            return original(*args, **kwargs)

        return call


def _is_bound(method: Any, function: Callable) -> bool:
    return getattr(method, "__func__", None) is function


def _reduce_without(methods: Mapping[str, Callable], layer: nn.Module, protocol: int) -> tuple[Any, ...]:
    """__reduce__ of a layer for copy and pickle: class and attributes without those that a report has set."""
    make, arguments, state, *rest = type(layer).__reduce_ex__(layer, protocol)
    state = {key: value for key, value in state.items()
             if key != "__reduce_ex__" and not (key in methods and _is_bound(value, methods[key]))}
    return make, arguments, state, *rest


def _rebound(function: Callable, names: Mapping[str, Any]) -> Callable | None:
    """A function of the same code, for which these global names mean something else; None if a decorator hides it."""
    inner = getattr(function, "__wrapped__", None)
    closure, names_here = function.__closure__, dict(names)
    if inner is not None:
        of_inner = _rebound(inner, names)
        holds = [cell.cell_contents is inner for cell in closure or ()]
        if of_inner is None or not any(holds):
            return None
        closure = tuple(types.CellType(of_inner) if held else cell for held, cell in zip(holds, closure, strict=True))
        names_here = {}
    # Without a module's name it is not taken for code of that module, by torch.compile for one.
    scope = {key: value for key, value in function.__globals__.items() if key != "__name__"} | names_here
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function, updated=())
    copy.__dict__.pop("__wrapped__", None)
    if inner is not None:
        copy.__wrapped__ = of_inner  # type: ignore[attr-defined]
    return copy


def _called(forward: Callable, names: set[str]) -> dict[str, Callable]:
    """Functions by these names that a method calls, and that are what they are known to be."""
    plain = inspect.unwrap(forward)
    return {name: plain.__globals__[name] for name in plain.__code__.co_names
            if name in names and callable(plain.__globals__.get(name))}


def _parameters(function: Callable) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return tuple(p.name for p in inspect.signature(inspect.unwrap(function)).parameters.values() if p.kind in kinds)


def _why_not(layer: nn.Module, method: str, original: Callable, on_heed: Callable) -> str | None:
    """Returns why `original`, which is this method or called by it, cannot be replaced; None if it can."""
    if method in layer.__dict__:
        return f"{method} has been replaced on this instance already"
    given, expected = _parameters(original), _parameters(on_heed)
    if given != expected[: len(given)]:
        return f"has the parameters {', '.join(given)}, expected {', '.join(expected)}"
    return None


def _change_functions(report: Acceleration, path: str, layer: nn.Module, group: Any = None) -> list[Change]:
    """The change of a layer whose recurrence is a function that `forward` calls."""
    forward = type(layer).forward
    if not inspect.isfunction(inspect.unwrap(forward)):
        return []
    on_heed: dict[str, Callable] = {}
    for name, original in _called(forward, set(_layers.FUNCTIONS)).items():
        function = _layers.FUNCTIONS[name].on_heed
        reason = _why_not(layer, "forward", original, function)
        if group is not None:
            function = _layers.in_group(name, group)
        if reason is None:
            on_heed[name] = report._dispatch(path, name, function, original, group is not None)
        else:
            report.left.append(Left(path, name, reason))
    replacement = _rebound(forward, on_heed) if on_heed else None
    for name in on_heed:
        if replacement is None:
            report.left.append(Left(path, name, "a decorator hides the code of forward"))
        elif group is None or _layers.FUNCTIONS[name].divides:  # the others raise in a group
            report.replaced.append(Replaced(path, name, _layers.FUNCTIONS[name].by))
    return [] if replacement is None else [Change(layer, "forward", replacement)]


def _change_method(
    report: Acceleration, path: str, layer: nn.Module, known: _layers.Method, group: Any = None
) -> list[Change]:
    """The change of a layer whose recurrence or sparse attention is the code of a method."""
    original = getattr(type(layer), known.name)
    reason = _why_not(layer, known.name, original, known.on_heed)
    if reason is not None:
        report.left.append(Left(path, known.name, reason))
        return []
    report.replaced.append(Replaced(path, known.name, known.by, known.note))
    on_heed = known.on_heed if group is None else functools.partial(known.on_heed, group=group)
    return [Change(layer, known.name, report._dispatch(path, known.name, on_heed, original, group is not None))]


def accelerate(
    model: nn.Module, strict: bool = False, *, bigbird: str = "original", group: Any = None
) -> Acceleration:
    """Runs the recurrences and sparse attention of a model of Transformers on heed, in inference, generation and
    training.

    Mamba, Mamba-2, gated DeltaNet, Kimi Linear, RWKV, xLSTM, RecurrentGemma, lightning attention and whatever other
    model has layers that call the same functions; the attention of Longformer, LED, BigBird and BigBird-Pegasus, and
    that of DeepSeek-V4 to compressed keys.
    Weights stay where they are, the model's own caches are used, and nothing but this instance changes, until `undo()`
    of what is returned: a report that names each call that was replaced and each that could not be, with the reason.
    Calls that heed does not compute for what they are given (tensors on another device, say) run as before, and the
    report names them from then on. Copies and pickles of the model are plain, and can be accelerated themselves.

    Results are the same. In evaluation Transformers' BigBird has no random blocks and counts block 0 once more for each
    that is missing; `bigbird="original"` computes that too, `bigbird="paper"` draws blocks instead, the same in
    training and evaluation, by heed.patterns.bigbird.

    With strict=True a call that cannot be replaced, or a model in which there is none to replace, raises
    heed.Unsupported, and the model stays what it was.

    With group=, a ProcessGroup or a DeviceMesh of one dimension, the model computes over sequences whose tokens are
    divided among the ranks: each gives input_ids of its own tokens, in the order of ranks, and gets their logits.
    Attention, recurrences and short convolutions receive what they need of other ranks. Positions are absolute: None,
    or position_ids of the whole sequence. The label of a rank's last token is the first label of the next rank; the
    loss is this rank's part of the mean over all labels, so that losses and gradients are summed over ranks. Llama and
    most decoders like it, Mamba, Mamba-2 and hybrids; heed.Unsupported, on every rank and before anything is changed,
    names the first module of another model that is not known to be divided. Refused by name in a call: padding, several
    sequences in a row, caches and generation, output_attentions, auxiliary losses.

        report = heed.transformers.accelerate(model)
        print(report)
        model.generate(**inputs)
        report.undo()
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise InvalidArgument(f"accelerate: model is {kind}, expected a torch.nn.Module")
    _dispatch.check_bools("accelerate", strict=strict)
    if bigbird not in ("original", "paper"):
        raise InvalidArgument(f"accelerate: bigbird is {bigbird!r}, expected 'original' or 'paper'")
    if group is not None:
        from heed.transformers import _divided

        return _divided.accelerate(model, group)
    report, methods = Acceleration(model), {**_layers.METHODS, **_sparse.methods(bigbird)}
    changes: list[Change] = []
    for path, layer in model.named_modules():
        known = methods.get(type(layer).__name__)
        if known is not None and type(layer).__module__.startswith("transformers.") and known.takes(layer):
            changes += _change_method(report, path, layer, known)
        else:
            changes += _change_functions(report, path, layer)
    if strict and (report.left or not report.replaced):
        why = "; ".join(f"{layer}: {call} {reason}" for layer, call, reason in report.left)
        raise Unsupported(f"accelerate: {type(model).__name__} " + (why or "has no layer that heed knows"))
    for change in changes:
        report._set(*change)
    return report
