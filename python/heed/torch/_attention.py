# heed.torch.attention: the options of heed.attention as arguments of the operator.
"""heed.torch.attention."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch, _operators

_attention = torch.ops.heed.attention.default


def _tensor(name: str, value: Any) -> Tensor | None:
    """A list of numbers (int64 or float64, as in NumPy) or an array as a tensor; a tensor, or None, as it is."""
    return _dispatch.numbers("attention", name, value)


def seed_tensor(seed: int | Tensor | None, operation: str = "attention") -> Tensor:
    """A seed as the operator takes it: 64 bits in an int64 tensor, by default from PyTorch's generator."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgument(f"{operation}: seed is {seed!r}, expected None or an int from 0 to 2^64 - 1")
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device="cpu")


def _with_foreign_words(function: Any) -> Any:
    """`function`, whose complaint of an unknown keyword says what another library's is called here."""
    keywords = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in keywords:
                raise _dispatch.unexpected(function.__name__, name, keywords)
        return function(*args, **kwargs)

    return call


@_with_foreign_words
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: Any = "bottom_right",
    window: tuple[int, int] | None = None,
    sink_tokens: int = 0,
    prefix: Any = None,
    chunk: int | None = None,
    segments: Any = None,
    key_lengths: Any = None,
    key_starts: Any = None,
    query_lengths: Any = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    log_decay: Tensor | None = None,
    pattern: Any = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    dropout_offset: int = 0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    precision: str = "highest",
    invariant: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    threads: int | None = None,
) -> Any:
    query_starts = None
    if align.__class__ is not str:
        query_starts, align = _tensor("align", align), "bottom_right"
    if (
        out is segments is key_lengths is key_starts is query_lengths is prefix is None
        and log_decay is mask is pattern is chunk is cu_seqlens_q is cu_seqlens_k is threads is None
        and sink_tokens == dropout == dropout_offset == 0
        and precision == "highest"
        and invariant is False
    ):
        rest: tuple[Any, ...] = ()  # most calls: each argument that PyTorch need not look at saves time
    else:
        segments_q, segments_k = segments if isinstance(segments, tuple) and len(segments) == 2 else (segments, segments)
        rest = (
            _tensor("key_lengths", key_lengths),
            _tensor("key_starts", key_starts),
            _tensor("query_lengths", query_lengths),
            mask,
            _tensor("segments_q", segments_q),
            _tensor("segments_k", segments_k),
            _tensor("prefix", prefix),
            chunk,
            sink_tokens,
            dropout,
            seed_tensor(seed) if dropout else None,
            dropout_offset,
            log_decay,
            _tensor("cu_seqlens_q", cu_seqlens_q),
            _tensor("cu_seqlens_k", cu_seqlens_k),
            None if pattern is None else _dispatch.pattern_key(pattern),
            precision,
            invariant,
            threads,
        )
    options = (
        False,  # heads first
        scale,
        causal,
        align,
        window,
        query_starts,
        bias,
        _tensor("sinks", sinks),
        _tensor("alibi", alibi),
        softcap,
        *rest,
    )
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
