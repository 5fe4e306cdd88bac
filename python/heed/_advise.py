# heed.advise ranks mechanisms and options for given tensors, a length and a budget.
"""The adviser in Python: its arguments, and what it returns."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Mapping

from heed._core import InvalidArgument, _advise, _cost_model_name

TYPE_CHECKING = False  # typing's own, without the import of typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Literal, NamedTuple

    from heed._typing import Array, FloatName

    class Candidate(NamedTuple):
        rank: int
        mechanism: str
        options: str
        python: str
        dtype: FloatName
        threads: int
        seconds: float
        predicted_seconds: float | None
        measured_seconds: float | None
        predicted_sample_seconds: float | None
        memory_bytes: int
        workspace_bytes: int
        state_bytes: int
        relative_error: float | None
        max_error: float | None
        kept: float
        softmax: bool
        causal: bool
        assumed: tuple[str, ...]
        within: bool
        frontier: bool
        reason: str
        divided: dict[str, Any] | None
else:
    Candidate = namedtuple("Candidate", """rank mechanism options python dtype threads seconds predicted_seconds
        measured_seconds predicted_sample_seconds memory_bytes workspace_bytes state_bytes relative_error max_error kept
        softmax causal assumed within frontier reason divided""", defaults=(None,))

Candidate.__module__ = "heed"
Candidate.__doc__ = """A row of what heed.advise returns.

rank from 1; mechanism and options; python, the call; dtype and threads. seconds is what it is ranked by:
measured_seconds, on the sample, if that has the length that was asked for, else predicted_seconds, at that length;
predicted_sample_seconds is the prediction for what was measured. memory_bytes is inputs, outputs, gradients, workspace
and state, state_bytes what the next token needs. relative_error is the root mean square of the difference from exact
attention in float64, as a share of the output's, and max_error the largest difference, on the sample. kept is the share
of the pairs that were visible which it computed there. softmax: whether it is softmax attention, exact or with keys
left out; causal: whether tokens see none behind them; assumed: names of inputs that were not given. within: the budget;
frontier: nothing is faster and as close. None where nobody knows. reason: why it has this rank. divided, with `ranks`:
methods, a list of predictions, that of the method which heed.torch chooses first, each with method, forward and
backward (bytes that a process receives, and messages in sequence), communication_seconds, computation_seconds, seconds
and memory_bytes, of the process with the largest; refused, why a group does not take the call, else None."""


class Advice(list):
    """The result of heed.advise: a list of heed.Candidate, the best first, which prints as a table.

    length is what they are ranked at, sample_tokens what they ran on, 0 of shapes alone. left_out has mechanisms that
    cannot be called, with reasons. prediction_error is what nine of ten predictions of the cost model are off by at
    most, as a share, on calls that it was not fitted to; None without a model. cluster has ranks, bandwidth and
    latency; None without `ranks`. A second table is printed for it.
    """

    length: int
    sample_tokens: int
    left_out: dict[str, str]
    prediction_error: float | None
    cluster: dict[str, float] | None

    def __str__(self) -> str:
        columns = ("rank", "mechanism", "options", "dtype", "seconds", "error", "memory", "state", "why")
        table = [columns] + [(str(c.rank), c.mechanism, c.options, c.dtype, f"{c.seconds:.3g}", _text(c.relative_error),
                              f"{c.memory_bytes:.3g}", f"{c.state_bytes:.3g}", c.reason) for c in self]
        return _table(table) + (_divided_text(self) if self.cluster else "")


Advice.__module__ = "heed"


def _table(table):
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)


def _divided_text(advice):
    columns = ("rank", "mechanism", "options", "dtype", "method", "received", "backward", "messages", "communication",
               "computation", "seconds", "memory")
    table, refused = [columns], {}
    for c in advice:
        for of in c.divided["methods"]:
            forward, backward = of["forward"], of["backward"]
            numbers = (forward["bytes"], backward["bytes"], forward["messages"] + backward["messages"],
                       of["communication_seconds"], of["computation_seconds"], of["seconds"], of["memory_bytes"])
            table.append((str(c.rank), c.mechanism, c.options, c.dtype, of["method"], *(f"{x:.3g}" for x in numbers)))
        if c.divided["refused"] is not None:
            refused.setdefault(c.divided["refused"], []).append(f"{c.mechanism} {c.options}")
    lines = [f"not divided, as {reason}: {'; '.join(dict.fromkeys(names))}" for reason, names in refused.items()]
    cluster = advice.cluster
    title = (f"{cluster['ranks']} processes, of which each receives {cluster['bandwidth']:g} bytes per second, "
             f"{cluster['latency']:g} seconds per message")
    return "\n\n" + "\n".join([title, *([_table(table)] if len(table) > 1 else []), *lines])


def _text(error):
    return "-" if error is None else f"{error:.1e}"


def _cost_model(threads):
    """The path of the cost model that `heed advise --calibrate` made of this machine, or None if it has not run."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):
        folder = os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(folder, "heed", _cost_model_name(threads))
    return path if os.path.isfile(path) else None


def advise(q: Array | tuple[int, ...], k: Array | tuple[int, ...], v: Array | tuple[int, ...], *,
           length: int | None = None, memory: float | None = None,
           error: float | None = None, purpose: Literal["prefill", "training", "decode"] = "prefill",
           causal: bool = False, scale: float | None = None, softcap: float | None = None,
           window: tuple[int, int] | None = None, tensors: Mapping[str, Array] | None = None,
           mechanisms: Sequence[str] | None = None, dtypes: Sequence[FloatName] | None = None, seconds: float = 10.0,
           model: str | os.PathLike[str] | None = None, threads: int | None = None, ranks: int | None = None,
           bandwidth: float | None = None, latency: float | None = None) -> Advice:
    """Ranks mechanisms and their options for these tensors, a length and a budget, each with the reason for its rank.

    Exact attention in several dtypes and under windows, with patterns that content chooses, certified attention, caches
    of rows and of bytes, and every other mechanism that these tensors suffice for are planned at the length, predicted
    by the cost model that `heed advise --calibrate` has made of this machine, and run on the tensors: timed, and
    compared with exact attention in float64. A mechanism other than softmax attention is another function: its error is
    that of putting it in the place of softmax attention as it is; in a model that was trained with it nothing is lost.

    Args:
      q: [B, T, Hq, D], or this shape as a tuple, as k and v then: nothing runs, so that errors are not known
      k: [B, T, Hkv, D]
      v: [B, T, Hkv, Dv]
      length: tokens that calls will have; None: those of the tensors. In decoding these are the tokens before, with the
        new one
      memory: bytes that a call may take; None: any
      error: root mean square error that is allowed, as a share of the output's; None: any
      purpose: 'prefill', 'training', outputs and gradients, or 'decode', one token of each sequence
      causal: whether exact attention is; in decoding it is
      scale: factor of its logits; None: D^-1/2
      softcap: bound of its logits; None: none
      window: (left, right) keys that it sees besides a query's own, -1 is unlimited; None: all
      tensors: what mechanisms take besides, by their names there: log_decay, beta, ...
      mechanisms: only these, by name; None: all
      dtypes: of 'f64', 'f32', 'bf16' and 'f16'; None: f32 and bf16
      seconds: about how long candidates may run; a sample of the first tokens keeps to it
      model: path of a cost model; None: that of the user's cache, if there is one. Without, only times that were
        measured are ranked, at the tensors' own length
      threads: how many; None: heed.set_num_threads, or as many as the process may use
      ranks: processes of a group that divide the tokens: each candidate also has the bytes, times and memory that are
        predicted for one of them; order and budget remain those of one process. None: no prediction
      bandwidth: bytes per second that a process of `ranks` receives; None: 1.25e9, 10 Gbit/s
      latency: seconds per message of `ranks`; None: 50e-6

    Returns:
      heed.Advice: a list of heed.Candidate, the best first

    Raises heed.InvalidArgument, saying what to do, for what is out of range and for a budget that nothing meets, and
    heed.FileError for a cost model that cannot be read or is another machine's.

    Example:

      >>> import heed, numpy as np
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 256, 2, 16), np.float32)
      >>> best = heed.advise(q, k, v, causal=True, error=1e-5, mechanisms=["attention"])[0]
      >>> best.mechanism, best.dtype
      ('attention', 'f32')
    """
    given = {"q": q, "k": k, "v": v}
    if tensors is not None and not isinstance(tensors, Mapping):
        raise InvalidArgument(f"advise: tensors is of type {type(tensors).__name__}, expected a dict of arrays or None")
    for name, x in (tensors or {}).items():
        if name in given:
            raise InvalidArgument(f"advise: tensors has {name!r}, expected names other than q, k and v")
        given[name] = x
    given = {name: x.detach() if getattr(x, "requires_grad", False) is True else x for name, x in given.items()}
    if not isinstance(model, (str, os.PathLike, type(None))):
        raise InvalidArgument(f"advise: model is of type {type(model).__name__}, expected a path or None")
    path = _cost_model(threads) if model is None else os.fspath(model)
    found = _advise(given, {
        "length": length, "memory": memory, "error": error, "purpose": purpose, "causal": causal, "scale": scale,
        "softcap": softcap, "window": window, "mechanisms": mechanisms, "dtypes": dtypes, "seconds": seconds,
        "model": path, "threads": threads, "ranks": ranks, "bandwidth": bandwidth, "latency": latency})
    advice = Advice(Candidate(**row) for row in found.pop("rows"))
    vars(advice).update(found)
    return advice


advise.__module__ = "heed"
