#!/usr/bin/env python3
"""Draws docs/images/selection.svg and selection_time.svg from benchmarks/results/dynamic.json, which
benchmarks/dynamic_attention.py writes: what selectors keep beside what they drop, and beside their time.

Usage: selection_chart.py. Pictures have a background of their own and follow the reader's preference for light or dark.
"""
import json
import math

from svg_chart import GAP, HEIGHT, LEFT, LINES, ROOT, SERIES, TOP, WIDTH, Panel, chart, palette, text

DATA, IMAGES = ROOT / "benchmarks/results/dynamic.json", ROOT / "docs/images"
LEAST = 1e-4  # dropped share at the lower end of the axis
RULES = {**SERIES, ".cdense": ("stroke", palette.FAINT)}


def level(dropped):
    """The position on a logarithmic axis from LEAST to 1."""
    return (math.log10(max(dropped, LEAST)) - math.log10(LEAST)) / -math.log10(LEAST)


def write(name, title, across, panels, selectors, more):
    width, height = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 56 + 20 * math.ceil(len(selectors) / 3)
    parts = [LINES, text(16, 26, title), text(16, 46, more, "faint")]
    for panel in panels:
        parts += panel.parts
    parts.append(text(LEFT, TOP + HEIGHT + 40, across, "faint"))
    for i, selector in enumerate(selectors):
        x, y = LEFT + i % 3 * 230, TOP + HEIGHT + 62 + i // 3 * 20
        parts += [f'<circle class="mark c{i}" cx="{x}" cy="{y - 4}" r="4.5"/>', text(x + 12, y, selector)]
    (IMAGES / name).write_text(chart(width, height, title, RULES, parts))


def main():
    measured = json.loads(DATA.read_text())
    rows = [row for row in measured["rows"] if "cache" not in row["data"]]
    sets, selectors = (list(dict.fromkeys(row[key] for row in rows)) for key in ("data", "selector"))
    kept, times = [], []
    most = max(row["time"] for row in rows)
    for i, name in enumerate(sets):
        drops = Panel(i, name, [(level(10**-e), f"{10.0**-e:g}") for e in range(5)])
        takes = Panel(i, name, [(t / math.ceil(most), f"{t}") for t in range(math.ceil(most) + 1)])
        takes.line("dense", [(0, 1 / math.ceil(most)), (1, 1 / math.ceil(most))], "oracle")
        for kind, selector in enumerate(selectors):
            own = sorted((row for row in rows if (row["data"], row["selector"]) == (name, selector)),
                         key=lambda row: row["kept"])
            if not own:
                continue
            drops.line(kind, [(row["kept"], level(row["dropped"])) for row in own])
            drops.line(kind, [(row["oracle"], level(row["dropped"])) for row in own], "oracle")
            for row in own:
                said = (f"{selector}, {row['setting']}: keeps {row['kept']:.3f}, drops {row['dropped']:.4f}, "
                        f"oracle {row['oracle']:.3f}")
                drops.mark(kind, row["kept"], level(row["dropped"]), said)
                takes.mark(kind, row["kept"], row["time"] / math.ceil(most), f"{said}, time {row['time']:.2f}")
        kept.append(drops)
        times.append(takes)
    across = "share of visible keys that is kept"
    write("selection.svg", "What selectors drop of a row's attention, by what they keep", across, kept, selectors,
          "dotted: the fewest blocks that hold as much of each row (lower and further left is better)")
    write("selection_time.svg", "Time of choice and attention over that of dense attention, by what is kept", across,
          times, selectors, f"dotted: as long as dense attention; {measured['cpu']}")


if __name__ == "__main__":
    main()
