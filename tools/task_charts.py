#!/usr/bin/env python3
"""Draws docs/images/length.svg and tasks.svg from benchmarks/results: cost by sequence length, and the results
of the three tasks.

Usage: task_charts.py [FOLDER]. length.json is written by benchmarks/length.py; language.json, image.json and
speech.json by the train.py of examples/byte_lm, digits and speech. Only measured numbers are drawn.
"""
import json
import math
import sys
from pathlib import Path

from svg_chart import GAP, HEIGHT, LEFT, LINES, ROOT, SERIES, TOP, WIDTH, Panel, chart, text

RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"

# The mechanisms that are drawn, each with its colour and line; the tables have all.
DRAWN = {
    "attention, written out": (6, "oracle"),
    "attention": (6, ""), "attention, window": (1, ""), "attention, bigbird": (1, "oracle"),
    "performer": (2, "oracle"), "linear_attention": (2, ""), "gla": (0, ""), "gated_delta_rule": (0, "oracle"),
    "selective_scan": (3, ""), "s4d": (3, "oracle"), "long_convolution": (5, ""), "rg_lru": (5, "oracle")}


def heading(title, more):
    """The parts that a picture begins with: its title and a line below."""
    return [LINES, text(16, 26, title), text(16, 46, more, "faint")]


def axis(values, least=None):
    """The decades from the least to the largest of values, as ends and as ticks."""
    low = math.floor(math.log10(min(values) if least is None else max(least, min(values))))
    high = math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    return low, high, [((e - low) / (high - low), e) for e in range(low, high + 1)]


def seconds(e):
    return f"{10.0**e:g} s" if e >= 0 else f"{10.0 ** (e + 3):g} ms" if e >= -3 else f"{10.0 ** (e + 6):g} us"


def megabytes(e):
    return f"{10.0 ** (e - 3):g} GB" if e >= 3 else f"{10.0**e:g} MB"


def length_chart(measured):
    """Panels of forward, training, and memory of training, on logarithmic axes."""
    rows = [row for row in measured["rows"] if row["mechanism"] in DRAWN]
    tokens = sorted({n for row in rows for n in row["tokens"]})
    first, octaves = math.log2(tokens[0]), max(1, math.log2(tokens[-1] / tokens[0]))
    across = [((math.log2(n) - first) / octaves, f"{n // 1024}k") for n in tokens]
    panels = []
    for index, (title, what, quantity, said) in enumerate((
            ("time, forward", "forward", "seconds", seconds),
            ("time, forward and backward", "training", "seconds", seconds),
            ("memory, forward and backward", "training", "megabytes", megabytes))):
        own = [row for row in rows if row["pass"] == what]
        least = 0.1 if quantity == "megabytes" else None
        low, high, ticks = axis([x for row in own for x in row[quantity]], least)
        panel = Panel(index, title, [(share, said(e)) for share, e in ticks], across)
        for row in own:
            points = [((math.log2(n) - first) / octaves, (math.log10(max(x, 10**low)) - low) / (high - low))
                      for n, x in zip(row["tokens"], row[quantity])]
            kind, more = DRAWN[row["mechanism"]]
            panel.line(kind, points, more)
            for (x, y), n, value in zip(points, row["tokens"], row[quantity]):
                panel.mark(kind, x, y,
                           f"{row['mechanism']}, {n} tokens: {value:.3g} {'s' if quantity == 'seconds' else 'MB'}", 2)
        panels.append(panel)
    title = "One head of 64 channels as sequences grow"
    parts = heading(title, f"float32, {measured['threads']} threads; {measured['cpu']}")
    for panel in panels:
        parts += panel.parts
    parts.append(text(LEFT, TOP + HEIGHT + 40, "tokens", "faint"))
    legend = [name for name in DRAWN if any(row["mechanism"] == name for row in rows)]
    for i, name in enumerate(legend):
        x, y = LEFT + i % 5 * 230, TOP + HEIGHT + 62 + i // 5 * 20
        kind, more = DRAWN[name]
        parts += [f'<path class="path c{kind} {more}" d="M{x - 14} {y - 4}h20"/>', text(x + 12, y, name)]
    height = TOP + HEIGHT + 56 + 20 * math.ceil(len(legend) / 5)
    return chart(LEFT + len(panels) * (WIDTH + GAP), height, title, SERIES, parts)


def _percent(x):
    return f"{x:.0%}"


def _right(x):
    return f"{x:.1%}"


def _baselines(document):
    return document["baselines"]


# Each task has a file, a title, the drawn number of a row, the formats of rows and ticks, and the baselines.
TASKS = (
    ("language", "Language: bits per byte of a book, less is better", lambda row: row["bits"], "{:.3f}".format,
     "{:.2f}".format, lambda document: {"counts of three bytes": document["bar"]}),
    ("image", "Image: digits that are right", lambda row: row["right"], _right, _percent, _baselines),
    ("speech", "Speech: words of unheard voices that are right", lambda row: row["right"], _right, _percent,
     _baselines),
)
NAMES_OF_TASKS = [task[0] for task in TASKS]
NAMES, QUALITY, TIMES, ROW = 190, 420, 300, 20  # pixels


def section(task, document, top):
    """The lines of one task below each other from `top` on, and where the next one begins."""
    _, title, value, digits, said, bars = task
    rows = sorted(document["rows"], key=lambda row: -value(row) if "bits" in row else value(row))
    values = [value(row) for row in rows] + list(bars(document).values())
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if (max(values) - min(values)) / s <= 7)
    low, high = math.floor(min(values) / step), max(math.ceil(max(values) / step), math.floor(min(values) / step) + 1)
    x0, bottom = LEFT + NAMES, top + ROW * len(rows)
    t0 = x0 + QUALITY + 60
    slowest = max(row["train_seconds"] or 0 for row in rows)

    def x(v):
        return x0 + QUALITY * (v / step - low) / (high - low)

    parts = [text(16, top - 14, title),
             text(x0 + QUALITY, bottom + 34, "dotted: " + ", ".join(bars(document)), "faint", "end")]
    for tick in range(low, high + 1):
        at = x(tick * step)
        parts += [f'<path class="line" d="M{at:.1f} {top}V{bottom}"/>',
                  text(at, bottom + 16, said(tick * step), "faint", "middle")]
    for name, bar in bars(document).items():
        parts.append(f'<path class="path c6 oracle" d="M{x(bar):.1f} {top - 4}V{bottom}"><title>{name}: '
                     f'{bar:.3f}</title></path>')
    if slowest:
        parts.append(text(t0, top - 14, "training, seconds"))
    for i, row in enumerate(rows):
        y = top + ROW * i + 10
        shown = f"{row['mechanism']}: {digits(value(row))}"
        parts += [text(x0 - 14, y + 4, row["mechanism"], anchor="end"),
                  f'<circle class="mark c0" cx="{x(value(row)):.1f}" cy="{y}" r="4.5"><title>{shown}</title></circle>']
        if row["train_seconds"]:
            end = TIMES * row["train_seconds"] / slowest
            parts += [f'<path class="path c1" d="M{t0} {y}h{end:.1f}" style="stroke-width: 6"/>',
                      text(t0 + end + 6, y + 4, f"{row['train_seconds']:.0f}", "faint")]
    return parts, bottom + 74


def tasks_chart(documents):
    """A line for each mechanism of each task: how good, beside the bars to beat, and how long the training took."""
    drawn, top = [], 84
    for task in TASKS:
        if task[0] in documents:
            parts, top = section(task, documents[task[0]], top)
            drawn += parts
    where = sorted({f"{row['cpu']}, {row['threads']} threads" for name in NAMES_OF_TASKS
                    for row in documents.get(name, {"rows": []})["rows"] if row["cpu"]})
    title = "Three tasks, many mechanisms"
    parts = heading(title, "; ".join(where) or "times have not been measured") + drawn
    return chart(LEFT + NAMES + QUALITY + TIMES + 130, top - 20, title, SERIES, parts)


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    documents = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    if "length" in documents:
        (folder / "length.svg").write_text(length_chart(documents["length"]))
    if any(name in documents for name in NAMES_OF_TASKS):
        (folder / "tasks.svg").write_text(tasks_chart(documents))


if __name__ == "__main__":
    main()
