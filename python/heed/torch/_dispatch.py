# Construction of heed's operators in PyTorch: kernels, gradients, and rules for transforms.
"""One way to make an operator, `torch.ops.heed.<name>`, for all that heed computes.

Each has a kernel for CPU tensors, which some have for CUDA tensors too, one for tensors without data, gradients or a
sentence that there are none, and a rule for vmap; every other kind of tensor is refused by name. Registered by hand
instead of through `torch.library.custom_op`: that costs 60 microseconds more per call, refuses torch.func.grad, and
takes derivatives of forward mode for zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, _C
from torch._functorch.utils import enable_single_level_autograd_function

from heed import InvalidArgument, Unsupported, _core

library = torch.library.Library("heed", "DEF")

_PLAIN = _C.DispatchKeySet(_C.DispatchKey.CPU).raw_repr()
_is_plain = {}  # by the keys of a call: nothing but a CPU kernel is left after autograd

_forward_ad = torch.autograd.forward_ad
_any_requires_grad, _is_grad_enabled = _C._any_requires_grad, _C.is_grad_enabled
_is_wrapped = _C._functorch.is_functorch_wrapped_tensor


def _kind(x: Tensor) -> str | None:
    """The property of a tensor that keeps heed from reading it, or None."""
    if x.is_nested:
        return "nested"
    if x.is_quantized:
        return "quantized"
    return None if x.layout == torch.strided and x.device.type == "cpu" else str(x.layout).removeprefix("torch.")


def refuse(names: Sequence[str], arguments: Sequence[Any], operation: str) -> None:
    """Raises InvalidArgument for the first tensor that heed cannot read."""
    for name, x in zip(names, arguments):
        if isinstance(x, Tensor) and _kind(x) is not None:
            raise InvalidArgument(
                f"{operation}: {name} is a {_kind(x)} tensor on {x.device}, expected a strided tensor on cpu"
            )


def bare(operation: str, name: str, value: Any, *, written: bool = False) -> Any:
    """`value` for code that reads memory itself and sees nothing of what PyTorch keeps beside it: graphs, tangents,
    levels of torch.func, signs that a view has not applied yet. Nothing is lost without a word."""
    if not isinstance(value, Tensor):
        if not isinstance(value, (tuple, list)):
            return value
        items = [bare(operation, name, x, written=written) for x in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if value.requires_grad:
        if _is_grad_enabled():
            raise InvalidArgument(
                f"{operation}: {name} requires a gradient, which this function does not have, "
                "expected a detached tensor"
            )
        value = value.detach()
    wrapped = _is_wrapped(value)
    if _forward_ad._current_level >= 0 and (wrapped or _forward_ad.unpack_dual(value).tangent is not None):
        raise Unsupported(f"{operation}: a forward derivative was asked for, which heed does not have")
    if wrapped:
        raise Unsupported(f"{operation}: {name} is inside a transform of torch.func, which this function does "
                          "not support")
    if value.is_neg():  # conjugates are complex, which heed refuses
        if written:
            raise InvalidArgument(f"{operation}: {name} is a view of numbers with other signs, "
                                  "expected memory of its own")
        value = value.resolve_neg()
    return value


def wrote(*values: Any) -> None:
    """Tells autograd that these changed, so that a backward pass that saved one of them raises an error."""
    for value in values:
        if isinstance(value, (tuple, list)):
            wrote(*value)
        elif isinstance(value, Tensor):
            torch.autograd.graph.increment_version(value)


def numbers(operation: str, name: str, value: Any, dtype: Any = None) -> Tensor | None:
    """A list of numbers as a tensor on the CPU, whatever the default device; an empty one has `dtype`.

    Tensors and None are returned as they are.
    """
    if value is None or isinstance(value, Tensor):
        return value
    try:
        tensor = torch.as_tensor(value, device="cpu")
        if dtype is not None and tensor.numel() == 0:
            return tensor.to(dtype)
        return torch.as_tensor(value, dtype=torch.float64, device="cpu") if tensor.is_floating_point() else tensor
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise InvalidArgument(f"{operation}: {name} is of type {kind}, expected a tensor or numbers") from None


def unexpected(function: str, name: str, keywords: Iterable[str]) -> TypeError:
    """The error for a keyword that is none of these, with heed's word for another library's."""
    hint = _core._foreign_keyword(name, list(keywords))
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def num_sequences(operation: str, batch: int, cu_seqlens: Tensor | None) -> int:
    """The number of sequences of a batch, or of packed sequences."""
    if cu_seqlens is None:
        return batch
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise InvalidArgument(f"{operation}: cu_seqlens has shape {list(cu_seqlens.shape)}, expected [B + 1]")
    return cu_seqlens.shape[0] - 1


def check_bools(operation: str, **flags: Any) -> None:
    """Raises InvalidArgument for the first flag that is no bool; PyTorch's operators accept numbers."""
    for name, x in flags.items():
        if not isinstance(x, (bool, np.bool_, torch.SymBool)):
            raise InvalidArgument(f"{operation}: {name} is {x!r}, expected True or False")


def check_int(operation: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < least:
        raise InvalidArgument(f"{operation}: {name} is {value!r}, expected an int of at least {least}")


def check_tensors(operation: str, **tensors: Any) -> None:
    """Raises InvalidArgument for the first that is no tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InvalidArgument(f"{operation}: {name} is of type {type(x).__name__}, expected a tensor")


_WRONG_TYPE = re.compile(r"heed::\w+\(\) Expected a value of type '(.*)' for argument '(\w+)' but instead found "
                         r"type '(.*)'.*?Value: (.*?)\n", re.DOTALL)
_IN_WORDS = {"bool": "True or False", "float": "a number", "int": "an int of 64 bits", "str": "a string",
             "List[int]": "ints", "List[float]": "numbers", "Tensor": "a tensor"}


def call(operation: str, operator: Any, *arguments: Any) -> Any:
    """operator(*arguments); what PyTorch says of a wrong type becomes an InvalidArgument of `operation`."""
    try:
        return operator(*arguments)
    except (RuntimeError, TypeError) as error:
        wrong = _WRONG_TYPE.match(str(error))
        if wrong is None:
            raise
        expected, name, found, value = wrong.groups()
        got = value if found in ("int", "float", "str", "bool", "NoneType") and len(value) < 60 else f"of type {found}"
        inside = re.sub(r"Optional\[(.*)\]", r"\1", expected)
        words = _IN_WORDS.get(inside, inside) + (" or None" if inside != expected else "")
        raise InvalidArgument(f"{operation}: {_core._name_in_python(operation, name)} is {got}, "
                              f"expected {words}") from None


def _below_autograd(operator: Any, kernel: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    """Goes on with whatever comes after autograd; where that is the CPU kernel, without another dispatch."""
    plain = _is_plain.get(keyset.raw_repr())
    if plain:
        return kernel(*arguments)
    if plain is None:
        plain = (keyset & _C._after_autograd_keyset).raw_repr() == _PLAIN
        _is_plain[keyset.raw_repr()] = plain
    if plain:
        return kernel(*arguments)
    with _C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & _C._after_autograd_keyset, *arguments)


def _apply(function: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    """Records `function` for this level of torch.func, or of plain autograd."""
    if _is_plain.get(keyset.raw_repr()):
        return function.apply(keyset, *arguments)
    with enable_single_level_autograd_function():
        return function.apply(keyset, *arguments)


def _needs_gradient(arguments: tuple[Any, ...]) -> bool:
    return (_is_grad_enabled() and _any_requires_grad(*arguments)) or _forward_ad._current_level >= 0


def in_forward_mode() -> bool:
    """Returns whether derivatives of forward mode are asked for, of whatever tensors."""
    return _forward_ad._current_level >= 0


def is_plain_memory(*tensors: Tensor) -> bool:
    """Returns whether tensors have data as it stands in memory, and belong to no transform of torch.func."""
    kinds = (Tensor, torch.nn.Parameter)
    return all(x.__class__ in kinds and not _is_wrapped(x) and not x.is_neg() for x in tensors)


def pattern_key(pattern: Any) -> str:
    """The string that represents a pattern of heed.patterns in a schema."""
    return _core._pattern_key(pattern)


pattern_key._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result does, which imports the compiler


def _recorded(
    operator: Any, kernel: Any, public: str, gradients: Any, tangents: Any, keeps_results: bool, unread: Sequence[int],
    constant: Sequence[int],
) -> Any:
    # One level of torch.func at a time, as operators written in C++ do: hence not torch.autograd.Function itself.
    class Recorded(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(ctx, keyset, *arguments):
            if _is_plain.get(keyset.raw_repr()):
                results = kernel(*arguments)
            else:  # an outer level of torch.func records the call too, although PyTorch disables gradients in here
                with torch.enable_grad(), _forward_ad._set_fwd_grad_enabled(True), _C._AutoDispatchBelowAutograd():
                    results = _below_autograd(operator, kernel, keyset, arguments)
            if isinstance(results, list):
                results = tuple(results)
            if constant:
                ctx.mark_non_differentiable(*(results[i] for i in constant))
            kept = arguments
            if keeps_results:
                kept = (*arguments, *(results if isinstance(results, tuple) else (results,)))
            tensors = [x if isinstance(x, Tensor) and i not in unread else None for i, x in enumerate(kept)]
            ctx.save_for_backward(*tensors)
            if tangents is not None:
                ctx.save_for_forward(*tensors)
            ctx.others = [None if isinstance(x, Tensor) else x for x in kept]
            ctx.patterns = [_core._pattern_of(x) for x in kept if x.__class__ is str]  # alive until then
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx, *of_results):
            if gradients is None:
                raise Unsupported(f"{public}: a second derivative was asked for, which heed does not have")
            kept = [other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.others)]
            needed = ctx.needs_input_grad[1:]
            reached = any(x is not None for x in of_results)
            found = gradients(needed, of_results, *kept) if reached else {}
            return (None, *(found.get(i) if need else None for i, need in enumerate(needed)))

        @staticmethod
        def jvp(ctx, _, *of_arguments):
            if tangents is None:
                raise Unsupported(f"{public}: a forward derivative was asked for, which heed does not have")
            # Without their tangents at this level, which the call in `tangents` would meet again.
            saved = [x if x is None else _forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            kept = [other if x is None else x for x, other in zip(saved, ctx.others)]
            return tangents(of_arguments, *kept)

    return Recorded


def over_slices(operator: Any, fake: Any, info: Any, in_dims: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """vmap as a loop: one call per slice. Options mean the same in it, whatever they are."""
    # vmap counts lists of options as axes of their own.
    mapped = [isinstance(x, Tensor) and dim is not None for x, dim in zip(arguments, in_dims)]

    def slices(cut: Callable[[Tensor, int], Tensor]) -> list[Any]:
        return [cut(x, dim) if of else x for x, dim, of in zip(arguments, in_dims, mapped)]

    calls = [operator(*slices(lambda x, dim: x.select(dim, i))) for i in range(info.batch_size)]
    # Without slices, a fake result has the shapes.
    one = calls[0] if calls else fake(*slices(lambda x, dim: x.new_empty(x.movedim(dim, 0).shape[1:])))
    if isinstance(one, Tensor):
        return _stacked(calls, one), 0
    results = [_stacked([call[i] for call in calls], x) for i, x in enumerate(one)]
    return type(one)(results), type(one)([0] * len(results))


def _stacked(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(tensors) if tensors else like.new_empty((0, *like.shape))


_HAVE_AUTOCAST = ("cpu", "cuda")  # among the devices that heed knows


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the tensor's device, or None where autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device in _HAVE_AUTOCAST and torch.is_autocast_enabled(device) else None


def to_autocast(x: Any) -> Any:
    """A tensor in autocast's dtype, unless it has integers or float64; anything else as it is."""
    wide = not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64
    return x if wide or x.device.type not in _HAVE_AUTOCAST else x.to(torch.get_autocast_dtype(x.device.type))


def _autocast(operator: Any, key: Any, arguments: tuple[Any, ...], num_cast: int) -> Any:
    cast = map(to_autocast, arguments[:num_cast])
    with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(key)):
        return operator(*cast, *arguments[num_cast:])


def define(
    name: str,
    signature: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gradients: Callable[..., dict[int, Any]] | None = None,
    tangents: Callable[..., Any] | None = None,
    keeps_results: bool = False,
    unread: Sequence[int] = (),
    constant: Sequence[int] = (),
    vmap: Callable[..., Any] | None = None,
    num_cast: int = 0,
    names: Sequence[str] | None = None,
    on_gpus: bool = False,
) -> Any:
    """Makes the operator `heed::<name>` with this signature, "(arguments) -> results".

    `gradients(needed, of_results, *arguments)` gives those that are needed, by the index of the argument; arguments
    that the caller left away are missing, those at `unread` are None if they are tensors, and with `keeps_results` the
    results follow. The results at `constant` are none that a gradient arrives at. Without `gradients` there is none.
    Under autocast the first `num_cast` arguments take its dtype.
    `on_gpus`: the kernel takes tensors of CUDA devices too; which stand on the CPU beside them it says itself.
    `tangents(of_arguments, *arguments)` is the derivative of forward mode. `names` are what messages call the
    arguments.
    """
    library.define(f"{name}{signature}")
    operator = getattr(torch.ops.heed, name).default
    names = names or [argument.name for argument in operator._schema.arguments]
    public = name.removesuffix("_backward")
    recorded = _recorded(operator, kernel, public, gradients, tangents, keeps_results, unread, constant)
    returns_list = signature.endswith("-> Tensor[]")

    def meta(*arguments):
        first, device = None, None
        for of, x in zip(names, arguments):
            if not isinstance(x, Tensor):
                continue
            if first is None:
                first, device = of, x.device
            elif x.device != device and not (on_gpus and device.type == "cuda" and x.device.type == "cpu"):
                raise InvalidArgument(f"{public}: {of} is on {x.device}, expected {device} as {first}")
        return fake(*arguments)

    def autograd(keyset, *arguments):
        if _needs_gradient(arguments):
            results = _apply(recorded, keyset, arguments)
            return list(results) if returns_list else results
        return _below_autograd(operator, kernel, keyset, arguments)

    library.impl(name, kernel, "CPU")
    if on_gpus:
        library.impl(name, kernel, "CUDA")
    library.impl(name, lambda *given: refuse(names, given, public), "CompositeExplicitAutograd")
    library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"heed::{name}", meta, lib=library)
    if num_cast:
        for device in ("CPU", "CUDA"):
            key = getattr(_C.DispatchKey, f"Autocast{device}")
            library.impl(name, lambda *given, key=key: _autocast(operator, key, given, num_cast), f"Autocast{device}")
    rule = vmap or (lambda info, in_dims, *arguments: over_slices(operator, fake, info, in_dims, arguments))
    torch.library.register_vmap(f"heed::{name}", rule, lib=library)
    return operator
