# heed.torch.attention: the options of heed.attention as arguments of the operator.
"""heed.torch.attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch, _operators

_attention = torch.ops.heed.attention.default


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, out: Tensor | None = None, **keywords: Any
) -> Any:
    if return_lse.__class__ is not bool:
        _dispatch.check_bools("attention", return_lse=return_lse)
    options = _operators.attention_options.given(keywords, attention)
    if out is None:
        o, lse = call_operator(q, k, v, *options)
    else:
        o, lse = out, _into(out, q, k, v, *options)
    return (o, lse) if return_lse else o


def call_operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """torch.ops.heed.attention."""
    try:
        return _dispatch.call("attention", _attention, *arguments)
    except NotImplementedError:  # from PyTorch, for tensors that it does not let reach an operator
        _dispatch.refuse(("q", "k", "v", *_operators.OPTIONS), arguments, "attention")
        raise
    except AttributeError:  # None counts as a tensor for PyTorch
        _dispatch.check_tensors("attention", **dict(zip("qkv", arguments)))
        raise


def _into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """Writes o into `out`, which autograd does not see; returns lse."""
    _dispatch.check_tensors("attention", q=q, k=k, v=v, out=out)
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

In PyTorch. Tensors are on the CPU, or on a CUDA device where heed has kernels for it: alibi and sinks there or on the
CPU. Gradients reach q, k, v, bias, sinks, alibi, log_decay, through lse too; second derivatives (not twice in forward
mode) and forward mode reach the same tensors, on the CPU. seed=None draws from PyTorch's generator. Work runs on
PyTorch's threads, at most `threads` of them. Under autocast q, k, v and o take its dtype. `out` takes part in no
gradient. The operator is torch.ops.heed.attention. Errors are heed.InvalidArgument (a ValueError) and heed.Unsupported
(a RuntimeError)."""
attention.__signature__ = _signatures.of_tensors(heed.attention)
