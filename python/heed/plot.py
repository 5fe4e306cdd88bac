# The module heed.plot: pictures of attention, of costs and of errors, drawn with matplotlib.
"""Pictures with matplotlib: attention as a map with its tokens, cost against length, error against time.

Every function draws into the Axes `ax`, or into those of a new figure, and returns them; none shows or saves anything.
Colors and signs are those of the pages of `heed view` and `heed compare`. The extra `plot` brings matplotlib.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, LogNorm, Normalize, PowerNorm
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter
    from matplotlib.transforms import offset_copy
except ImportError as error:
    if (error.name or "").partition(".")[0] != "matplotlib":
        raise
    raise ImportError("heed.plot needs matplotlib, which is not installed: "
                      "pip install 'heed-attention[plot]'", name=error.name) from None

import numpy as np

import heed
from heed import _palette
from heed._typing import Array

__all__ = ["attention_map", "cost_curves", "crossovers", "error_against_time", "explained_costs"]

_CELLS = 512  # along a side of a map: longer sequences are pooled
_DECADES = 4  # below the strongest share, with norm="log"
_COLORS = [light for light, _ in _palette.SERIES]
_INK, _FAINT, _LINE = (light for light, _ in (_palette.INK, _palette.FAINT, _palette.LINE))
_MASKED = _palette.MASKED[0]
_SHARES = ListedColormap(np.array(_palette.ramp()) / 255, "heed")


def attention_map(
    q: Array, k: Array, *, tokens: Sequence[str] | None = None, head: int = 0,
    norm: Literal["sqrt", "linear", "log"] = "sqrt", ax: Axes | None = None, **options: Any,
) -> Axes:
    """The attention of one head of the first sequence: a row for each query, a column for each key.

    Args:
      q, k: queries [B, Tq, Hq, D] and keys [B, Tk, Hkv, D], as heed.attention takes them
      tokens: a string per key, the labels of both axes; None: positions
      head: of the queries, from 0 on
      norm: of colors: "sqrt", "linear" or "log" of a share of a row's attention
      ax: where to draw; None: a new figure, with a bar of colors
      options: the keywords of heed.attention_weights but `lse`, `rows` and `heads`: `causal`, `window`, `pattern`, ...

    Returns the Axes, whose one image has the shares, pairs that are masked being masked in it. Beyond 512 tokens a cell
    holds several; a row still sums to 1. Raises heed.InvalidArgument.
    """
    name = "plot.attention_map"
    if norm not in ("sqrt", "linear", "log"):
        raise heed.InvalidArgument(f"{name}: norm is {norm!r}, expected 'sqrt', 'linear' or 'log'")
    for keyword in sorted({"lse", "rows", "heads", "size", "reduce"} & set(options)):
        raise heed.InvalidArgument(f"{name}: {keyword} is given, expected no such keyword")
    shapes = [tuple(getattr(x, "shape", ())) for x in (q, k)]
    for argument, shape in zip("qk", shapes):
        if len(shape) != 4 or 0 in shape:
            raise heed.InvalidArgument(f"{name}: {argument} has shape {list(shape)}, expected [B, T, H, D] without a 0")
    (_, Tq, heads, _), (_, Tk, _, _) = shapes
    if isinstance(head, bool) or not isinstance(head, (int, np.integer)) or not 0 <= head < heads:
        raise heed.InvalidArgument(f"{name}: head is {head!r}, expected an int from 0 to {heads - 1}")
    labels = _labels(name, tokens, Tk)
    shares = _shares(q, k, int(head), Tq, Tk, options)

    own_figure = ax is None
    ax = _new_axes(6.4, 6.0) if ax is None else ax
    largest = float(np.ma.filled(shares, 0).max(initial=0)) or 1.0
    scale = {"sqrt": PowerNorm(0.5, 0, largest, clip=True), "linear": Normalize(0, largest, clip=True),
             "log": LogNorm(largest / 10**_DECADES, largest, clip=True)}[norm]
    image = ax.imshow(shares, cmap=_SHARES, norm=scale, interpolation="nearest",
                      extent=(-0.5, Tk - 0.5, Tq - 0.5, -0.5))
    ax.set_facecolor(_MASKED)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    _label_axis(ax, "x", labels, 0, Tk)
    _label_axis(ax, "y", labels, _start(options, Tq, Tk), Tq)
    ax.set(xlabel="key", ylabel="query")
    ax.set_title(f"head {int(head)}", loc="left", color=_INK, fontweight="bold")
    _dress(ax, grid=False)
    if own_figure:
        bar = ax.figure.colorbar(image, ax=ax, shrink=0.6, label="share of the row's attention",
                                 format=PercentFormatter(1))
        bar.outline.set_edgecolor(_LINE)
        bar.ax.tick_params(color=_LINE, labelcolor=_FAINT, labelsize=9)
        bar.ax.yaxis.label.set_color(_FAINT)
    return ax


def error_against_time(rows: Mapping[str, Any] | Iterable[Mapping[str, Any]], *, ax: Axes | None = None) -> Axes:
    """The error of each mechanism against the time of a call, both logarithmic: left is faster, down is closer.

    Args:
      rows: what `heed compare --json` prints, or its `rows`
      ax: where to draw; None: a new figure

    Returns the Axes. A sign is a row, its shape and color the dtype; a line joins the dtypes of one mechanism and its
    options, written beside it. Rows without a time or an error above 0 are left out. Raises heed.InvalidArgument.
    """
    name = "plot.error_against_time"
    rows = _rows(name, rows, ("mechanism", "dtype", "seconds", "relative_error"))
    drawn = [row for row in rows if _is_above_0(row["seconds"]) and _is_above_0(row["relative_error"])]
    for row in drawn:
        if row["dtype"] not in _palette.DTYPES:
            raise heed.InvalidArgument(f"{name}: dtype is {row['dtype']!r}, "
                                       f"expected one of {', '.join(_palette.DTYPES)}")
    ax = _new_axes(8.4, 6.0) if ax is None else ax
    ends = []
    for label, group in _grouped(drawn).items():
        points = [(row["seconds"], row["relative_error"]) for row in group]
        ax.plot(*zip(*points), color=_FAINT, alpha=0.5, linewidth=1, label=label, zorder=2)
        ends.append((label, max(points)))
    for dtype, ((color, _), marker) in _palette.DTYPES.items():
        points = [(row["seconds"], row["relative_error"]) for row in drawn if row["dtype"] == dtype]
        if points:
            ax.scatter(*zip(*points), color=color, marker=marker, s=36, edgecolors="white", linewidths=0.8, label=dtype,
                       zorder=3)
    _log_axes(ax, "time of a call", "rms error", _seconds)
    signs = [Line2D([], [], color=color, marker=marker, linestyle="", label=dtype)
             for dtype, ((color, _), marker) in _palette.DTYPES.items() if any(row["dtype"] == dtype for row in drawn)]
    if signs:
        ax.legend(handles=signs, frameon=False, ncols=len(signs), loc="lower left", bbox_to_anchor=(0, 1),
                  borderaxespad=0.2)
    _label_ends(ax, [(label, end, _INK) for label, end in ends])
    return ax


def cost_curves(
    rows: Mapping[str, Any] | Iterable[Mapping[str, Any]], *, cost: str = "seconds", ax: Axes | None = None,
) -> Axes:
    """Draws the cost of mechanisms against the number of tokens, both logarithmic.

    Args:
      rows: mappings that have `mechanism`, `tokens` and the cost, such as those of explained_costs() or of a
        measurement of your own; or documents of `heed compare --json`, one for each length
      cost: the key of what is drawn: "seconds", "flops", "bytes", "workspace_bytes", "state_bytes", ...
      ax: where to draw; None: a new figure

    Returns the Axes: a line for each mechanism with its options, and for each dtype where there are several, in the
    order in which they come. Rows whose cost is no number above 0 are left out. Raises heed.InvalidArgument.
    """
    rows = _rows("plot.cost_curves", rows, ("mechanism", "tokens", cost))
    several = len({row.get("dtype") for row in rows}) > 1
    ax = _new_axes(8.0, 5.2) if ax is None else ax
    ends = []
    for i, (label, group) in enumerate(_grouped(rows, with_dtype=several).items()):
        points = sorted((row["tokens"], row[cost])
                        for row in group if _is_above_0(row["tokens"]) and _is_above_0(row[cost]))
        if not points:
            continue
        color = _COLORS[i % len(_COLORS)]
        ax.plot(*zip(*points), color=color, marker=_palette.MARKERS[i % len(_palette.MARKERS)], markersize=4.5,
                linewidth=1.6, linestyle=("-", "--", ":", "-.")[i // len(_COLORS) % 4], label=label)
        ends.append((label, points[-1], color))
    words = {"seconds": "time of a call", "bytes": "bytes read and written", "workspace_bytes": "workspace",
             "state_bytes": "state"}
    units = _seconds if cost == "seconds" else _bytes if cost.endswith("bytes") else None
    _log_axes(ax, "tokens", words.get(cost, cost.replace("_", " ")), _count, units)
    lengths = sorted({row["tokens"] for row in rows if _is_above_0(row["tokens"])})
    if 0 < len(lengths) <= 10:
        ax.set_xticks(lengths)
    _label_ends(ax, ends)
    return ax


def crossovers(results: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """Draws, for each pass, the number of tokens from which each mechanism takes less time than exact attention.

    Args:
      results: what `scripts/bench crossover --json` writes, benchmarks/results/crossover.json of the repository
      ax: where to draw; None: a new figure

    Returns the Axes: a line for each mechanism, the first above, with a sign for each pass. An open sign: from the
    shortest length that was tried on. A pass that is missing or never cheaper has none. Raises heed.InvalidArgument.
    """
    name = "plot.crossovers"
    results = results.get("crossover", results) if isinstance(results, Mapping) else results
    if not isinstance(results, Mapping) or not isinstance(results.get("rows"), Sequence):
        raise heed.InvalidArgument(f"{name}: results has no rows, expected what `scripts/bench crossover "
                                   "--json` writes")
    passes = ("forward", "backward", "step")
    rows = [row for row in _rows(name, results["rows"], ("mechanism", *passes))
            if any((row[x] or {}).get("from") for x in passes)]
    ax = _new_axes(6.4, 1.2 + 0.26 * len(rows)) if ax is None else ax
    for i, kind in enumerate(passes):
        points = [(str(row[kind]["from"]), y) for y, row in enumerate(rows) if (row[kind] or {}).get("from")]
        for is_open in (False, True):
            some = [(float(said.removeprefix("<=")), y) for said, y in points if said.startswith("<=") == is_open]
            if some:
                ax.scatter(*zip(*some), marker=_palette.MARKERS[i], s=34, edgecolors=_COLORS[i],
                           zorder=3, linewidths=1.4, facecolors="none" if is_open else _COLORS[i],
                           label=kind if not is_open else f"{kind}, or before")
    ax.set_yticks(range(len(rows)), [row["mechanism"] for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(_count))
    ax.set_xlabel("tokens from which it is cheaper than attention")
    if rows:
        ax.legend(frameon=False, ncols=4, columnspacing=1, handletextpad=0.2, loc="lower left", bbox_to_anchor=(0, 1),
                  borderaxespad=0.2)
    _dress(ax)
    return ax


def explained_costs(
    mechanism: str, lengths: Iterable[int], *, dtype: str = "f32", threads: int | None = None, **arguments: Any,
) -> list[dict[str, Any]]:
    """Rows for cost_curves() of what heed.explain says of a mechanism at each length, without running it.

    Args:
      mechanism: its name
      lengths: numbers of tokens
      dtype, threads: of heed.explain
      arguments: those of heed.explain, shapes in which the word "T" stands for the length: q=(1, "T", 8, 64)

    Returns a dict for each length: mechanism, tokens, dtype, flops, bytes, workspace_bytes and what else heed.explain
    says.
    """
    rows = []
    for length in lengths:
        shapes = {key: tuple(length if size == "T" else size for size in value) if isinstance(value, tuple) else value
                  for key, value in arguments.items()}
        said = heed.explain(mechanism, dtype=dtype, threads=threads, **shapes)
        rows.append({"mechanism": mechanism, "tokens": int(length), "dtype": dtype, **said})
    return rows


# --- rows of JSON documents -------------------------------------------------------------------------------------------


def _rows(name: str, given: Any, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Rows, or those of documents that have them, with the tokens that a document says; each has `keys`."""
    items = [given] if isinstance(given, Mapping) else given
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise heed.InvalidArgument(f"{name}: rows is {given!r:.60}, expected rows, or a document that has them")
    rows: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise heed.InvalidArgument(f"{name}: rows[{i}] is {item!r:.60}, expected a mapping")
        more = {"tokens": item["tokens"]} if "tokens" in item else {}
        rows += [{**more, **row} for row in item["rows"]] if "rows" in item else [dict(item)]
    for i, row in enumerate(rows):
        missing = [key for key in keys if key not in row]
        if missing:
            raise heed.InvalidArgument(f"{name}: row {i} has no {missing[0]!r}, expected {', '.join(keys)}")
    return rows


def _grouped(rows: Iterable[dict[str, Any]], with_dtype: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Rows by mechanism and options, as they are called, in the order in which these come."""
    rows = list(rows)
    variants = {(row["mechanism"], _options(row)) for row in rows}
    of_several = [mechanism for mechanism, _ in variants]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        mechanism = row["mechanism"]
        options = (_options(row) or "full") if of_several.count(mechanism) > 1 else ""
        dtype = row.get("dtype") if with_dtype else ""
        groups.setdefault(" ".join(filter(None, (mechanism, options, dtype))), []).append(row)
    return groups


def _options(row: Mapping[str, Any]) -> str:
    """The options as the program writes them: "causal window 127,0"."""
    words = []
    for key, value in (row.get("options") or {}).items():
        words.append(key if value is True else value if key == "pattern" else
                     f"{key} {','.join(map(str, value)) if isinstance(value, list) else value}")
    return " ".join([*map(str, words), *filter(None, [row.get("selector")])])


def _is_above_0(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and math.isfinite(value) and value > 0


# --- shares of attention ----------------------------------------------------------------------------------------------


def _shares(q: Any, k: Any, head: int, Tq: int, Tk: int, options: dict[str, Any]) -> np.ma.MaskedArray:
    """Shares of one head's attention, pairs that are masked being masked; pooled beyond _CELLS."""
    rows, columns = min(Tq, _CELLS), min(Tk, _CELLS)

    def cells(q: Any, k: Any, reduce: Literal["mean", "max"], options: dict[str, Any]) -> np.ndarray:
        if (rows, columns) == (Tq, Tk):
            return heed.attention_weights(q, k, heads=[head], **options)[0, 0]
        return heed.attention_map(q, k, size=(rows, columns), reduce=reduce, **options)[0, head]

    keys = np.diff(-(-np.arange(columns + 1) * Tk // columns))  # number of keys in each column
    shares = cells(q, k, "mean", options) * keys
    # If all keys are equal, a weight is one over the number of visible keys, and 0 for keys that are masked.
    alike_q, alike_k = (np.zeros((*x.shape[:3], 1), np.float32) for x in (q, k))
    logits = ("scale", "softcap", "bias", "alibi", "sinks", "log_decay", "relative_bias")
    seen = cells(alike_q, alike_k, "max", {key: value for key, value in options.items() if key not in logits})
    return np.ma.masked_array(shares, seen == 0)


def _start(options: Mapping[str, Any], Tq: int, Tk: int) -> int:
    """The position of query 0 of the first sequence."""
    align = options.get("align", "bottom_right")
    return 0 if isinstance(align, str) and align == "top_left" else Tk - Tq if isinstance(align, str) else int(align[0])


def _labels(name: str, tokens: Any, Tk: int) -> list[str] | None:
    if tokens is None:
        return None
    expected = f"{Tk} strings, one per key"
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, (Sequence, np.ndarray)):
        raise heed.InvalidArgument(f"{name}: tokens is {tokens!r:.60}, expected {expected}")
    if len(tokens) != Tk:
        raise heed.InvalidArgument(f"{name}: tokens has {len(tokens)} elements, expected {expected}")
    for i, token in enumerate(tokens):
        if not isinstance(token, str):
            raise heed.InvalidArgument(f"{name}: tokens[{i}] is {token!r:.60}, expected a string")
    return [_plain(token) for token in tokens]


def _plain(token: str) -> str:
    """A token on its own: without the mark of a leading space, and what is invisible spelled."""
    word = token[1:] if len(token) > 1 and token[0] in "\u0120\u2581" else token
    word = {"\n": "\\n", "\u010a": "\\n", "\t": "\\t", "": "(empty)"}.get(word, word)
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(f"\\u{{{ord(c):x}}}" if unicodedata.category(c) in hidden else c for c in word)


# --- axes -------------------------------------------------------------------------------------------------------------


def _new_axes(width: float, height: float) -> Axes:
    from matplotlib import pyplot  # pyplot chooses a backend, so it is imported only when needed

    _, ax = pyplot.subplots(figsize=(width, height), layout="constrained")
    return ax


def _dress(ax: Axes, grid: bool = True) -> None:
    for spine in ax.spines.values():
        spine.set_color(_LINE)
    ax.tick_params(which="both", color=_LINE, labelcolor=_FAINT, labelsize=9)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_color(_FAINT)
    if grid:
        ax.grid(color=_LINE, linestyle=(0, (2, 3)), linewidth=0.8)
        ax.set_axisbelow(True)


def _points(ax: Axes, which: str) -> float:
    """The length of an axis in points."""
    box = ax.get_window_extent()
    return 72 / ax.figure.dpi * (box.width if which == "x" else box.height)


def _label_axis(ax: Axes, which: str, labels: list[str] | None, start: int, n: int) -> None:
    """Labels an axis with as many tokens as are legible, or with positions."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    if labels is None:
        axis.set_major_locator(MaxNLocator(integer=True))
        return
    every = max(1, math.ceil(10 * n / _points(ax, which)))
    places = range(0, n, every)
    words = [labels[i + start] if 0 <= i + start < len(labels) else str(i) for i in places]
    axis.set_ticks(list(places), words, rotation=90 if which == "x" else 0, parse_math=False)


def _log_axes(ax: Axes, across: str, up: str, x_format: Any, y_format: Any = None) -> None:
    """Makes both axes logarithmic, with ticks between powers of ten where there are few; labels are plain numbers."""
    ax.set(xscale="log", yscale="log", xlabel=across, ylabel=up)
    for axis, format_ in ((ax.xaxis, x_format), (ax.yaxis, y_format)):
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        if decades < 2.6 and format_:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1.6 else (1, 3)))
        axis.set_minor_formatter(NullFormatter())
        if format_:
            axis.set_major_formatter(FuncFormatter(format_))
    _dress(ax)


def _label_ends(ax: Axes, ends: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Writes labels [(text, point, color)] beside the axes, near the heights of their points, with lines to them."""
    ax.get_ylim()  # settles the limits
    to_axes = ax.transData + ax.transAxes.inverted()
    beside = offset_copy(ax.transAxes, ax.figure, x=16, units="points")
    gap = 12 / _points(ax, "y")
    order = sorted(ends, key=lambda end: end[1][1])
    places: list[float] = []
    for _, point, _ in order:
        at = float(to_axes.transform(point)[1])
        places.append(max(at, places[-1] + gap) if places else at)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], 1 - gap * (len(places) - 1 - i))
    for (text, point, color), place in zip(order, places):
        ax.annotate(text, xy=point, xytext=(1, place), textcoords=beside, va="center", color=color, fontsize=9,
                    annotation_clip=False, parse_math=False,
                    arrowprops={"arrowstyle": "-", "color": _FAINT, "alpha": 0.45, "linewidth": 0.6, "shrinkA": 1,
                                "shrinkB": 4, "relpos": (0, 0.5)})


def _units(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next((unit for unit in units if value >= 0.9995 * unit[0]), units[-1])
    return f"{value / size:.3g} {unit}"


def _seconds(value: float, _: Any = None) -> str:
    return _units(value, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def _bytes(value: float, _: Any = None) -> str:
    return _units(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def _count(value: float, _: Any = None) -> str:
    return f"{value:,.0f}"
