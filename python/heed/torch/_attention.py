# heed.torch.attention: the options of heed.attention as arguments of the operator.
"""heed.torch.attention."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch, _operators

_attention = torch.ops.heed.attention.default


def seed_tensor(seed: int | Tensor | None, operation: str = "attention") -> Tensor:
    """A seed as the operator takes it: 64 bits in an int64 tensor, by default from PyTorch's generator."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgument(f"{operation}: seed is {seed!r}, expected None or an int from 0 to 2^64 - 1")
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device="cpu")


_DEFAULTS = tuple(ast.literal_eval(option.schema.partition("=")[2]) for option in _operators.TABLE)
_PLACES = {name: place for place, name in enumerate(_operators.OPTIONS)}
_NUMBERS = {option.name for option in _operators.TABLE if option.takes_numbers}
_KEYWORDS = {*_PLACES, "segments"} - {"heads_first", "segments_q", "segments_k", "query_starts"}


def _operator_options(keywords: dict[str, Any]) -> list[Any]:
    """What the operator takes for these keywords, up to the last that is given: each argument that PyTorch need not look at
    saves time."""
    given = []
    for name, value in keywords.items():
        if name not in _KEYWORDS:
            raise _dispatch.unexpected("attention", name, inspect.signature(attention).parameters)
        if name == "segments":
            given += zip(("segments_q", "segments_k"), value if isinstance(value, tuple) and len(value) == 2 else (value, value))
        elif name == "align" and value.__class__ is not str:
            given.append(("query_starts", value))
        elif name == "pattern" and value is not None:
            given.append((name, _dispatch.pattern_key(value)))
        elif name == "seed":
            given.append((name, seed_tensor(value) if keywords.get("dropout") else None))
        else:
            given.append((name, value))
    if keywords.get("dropout") and "seed" not in keywords:
        given.append(("seed", seed_tensor(None)))
    options, end = list(_DEFAULTS), 0
    for name, value in given:
        place = _PLACES[name]
        if value is not _DEFAULTS[place]:
            options[place] = _dispatch.numbers("attention", "align" if name == "query_starts" else name, value) if name in _NUMBERS else value
            end = max(end, place + 1)
    return options[:end]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, out: Tensor | None = None, **keywords: Any
) -> Any:
    options = _operator_options(keywords)
    if out is None:
        o, lse = call_operator(q, k, v, *options)
    else:
        o, lse = out, _into(out, q, k, v, *options)
    return (o, lse) if return_lse else o


def call_operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """torch.ops.heed.attention; what PyTorch says of a wrong type becomes an InvalidArgument."""
    try:
        return _attention(*arguments)
    except NotImplementedError:  # from PyTorch, for tensors that it does not let reach an operator
        _dispatch.refuse(("q", "k", "v", *_operators.OPTIONS), arguments, "attention")
        raise
    except AttributeError:  # None counts as a tensor for PyTorch
        _dispatch.check_tensors("attention", **dict(zip("qkv", arguments)))
        raise
    except (RuntimeError, TypeError) as error:
        message = str(error)
        if not message.startswith("heed::attention() "):
            raise
        raise InvalidArgument("attention: " + message.removeprefix("heed::attention() ").splitlines()[0]) from None


def _into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """Writes o into `out`, which autograd does not see; returns lse."""
    tensors = {"out": out, "q": q, "k": k, "v": v, **dict(zip(_operators.OPTIONS, options))}
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument(f"attention: {name} requires a gradient, expected none where `out` is given")
    out, q, k, v, *options = (
        _dispatch.bare("attention", name, x, written=name == "out") for name, x in tensors.items()
    )
    _, lse = _operators.new_results(q, k, v, options)
    _core._torch_attention(q, k, v, out, lse, *options)
    _dispatch.wrote(out)
    return lse


attention.__doc__ = _signatures.text_on_tensors(heed.attention) + """

In PyTorch. Tensors are on the CPU. Gradients reach q, k, v, bias, sinks, alibi,
log_decay, through lse too; there is no second derivative. seed=None draws from PyTorch's generator. Work runs on PyTorch's threads,
at most `threads` of them. Under autocast q, k, v and o take its dtype. `out` takes part in no gradient. The operator is
torch.ops.heed.attention. Errors are heed.InvalidArgument (a ValueError) and heed.Unsupported (a RuntimeError)."""
attention.__signature__ = _signatures.of_tensors(heed.attention)
