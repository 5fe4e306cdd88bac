# heed.torch.attention: the options of heed.attention as arguments of the operator.
"""heed.torch.attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import heed
from heed import InvalidArgument, _core, _signatures
from heed.torch import _dispatch, _distributed_attention, _operators

_attention = torch.ops.heed.attention.default
_IN_A_GROUP = {name: default for name, _, default in _signatures.ATTENTION_IN_A_GROUP}


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, out: Tensor | None = None, **keywords: Any
) -> Any:
    if return_lse.__class__ is not bool:
        _dispatch.check_bools("attention", return_lse=return_lse)
    if [key for key in _IN_A_GROUP if key in keywords]:
        group = {key: keywords.pop(key, value) for key, value in _IN_A_GROUP.items()}
        _distributed_attention.check(group["method"], group["order"])
        if group["group"] is not None:
            keywords |= {} if out is None else {"out": out}
            return _distributed_attention.call(attention, q, k, v, return_lse=return_lse, **group, **keywords)
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


attention.__doc__ = _signatures.text_on_tensors(heed.attention, without=_signatures.ATTENTION_OF_ARRAYS) + """

In PyTorch. Tensors are on the CPU, or on a CUDA device where heed has kernels for it: alibi and sinks there or on the
CPU. Gradients reach q, k, v, bias, sinks, alibi, relative_bias, log_decay, through lse too; second derivatives (not
twice in forward mode) and forward mode reach the same tensors, on the CPU. seed=None draws from PyTorch's generator.
Work runs on PyTorch's threads, at most `threads` of them. Under autocast q, k, v and o take its dtype. `out` takes part
in no gradient. The operator is torch.ops.heed.attention. Errors are heed.InvalidArgument (a ValueError) and
heed.Unsupported (a RuntimeError).

With group=, a ProcessGroup or a DeviceMesh of one dimension, each rank gives its part of the tokens of q, k, v,
log_decay and segments, and of the rows of mask and bias, in the order of ranks or as heed.torch.distributed.shard has
it with order="zigzag"; other options are those of the whole sequence, and without a seed that of rank 0 counts.
method="all_gather" sends all keys and values to every rank, "ulysses" exchanges tokens for heads, which "auto" does
where ranks divide the heads and no option has heads or rows, and "ring" moves keys and values from rank to rank, two
parts in memory at a time."""
attention.__signature__ = _signatures.of_tensors(
    heed.attention, without=_signatures.ATTENTION_OF_ARRAYS, keywords=_signatures.ATTENTION_IN_A_GROUP
)
