#!/usr/bin/env python3
"""Draws docs/images/selection.svg and selection_time.svg from benchmarks/results/dynamic.json, which benchmarks/dynamic_attention.py writes:
what selectors keep beside what they drop, and beside their time.

Usage: selection_chart.py. Pictures have a background of their own and follow the reader's preference for light or dark.
"""
import html
import json
import math
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA, IMAGES = ROOT / "benchmarks/results/dynamic.json", ROOT / "docs/images"
LEFT, TOP, WIDTH, HEIGHT, GAP = 64, 84, 300, 260, 76  # pixels of a panel
LEAST = 1e-4  # of what is dropped, at the lower end
STYLE = """
  .ground { fill: #ffffff } .ink { fill: #1f2328 } .faint { fill: #59636e } .line { stroke: #d1d9e0 } .one { stroke: #59636e }
  .mark { fill: none; stroke-width: 1.6 } text { font: 13px system-ui, sans-serif } .path { fill: none; stroke-width: 1.2 }
  .c0 { stroke: #0969da } .c1 { stroke: #1a7f37 } .c2 { stroke: #bc4c00 } .c3 { stroke: #8250df } .c4 { stroke: #59636e } .c5 { stroke: #cf222e }
  .c6 { stroke: #9a6700 }
  .oracle { stroke-dasharray: 2 3 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } .ink { fill: #f0f6fc } .faint { fill: #9198a1 } .line { stroke: #3d444d } .one { stroke: #9198a1 }
    .c0 { stroke: #58a6ff } .c1 { stroke: #3fb950 } .c2 { stroke: #f0883e } .c3 { stroke: #bc8cff } .c4 { stroke: #9198a1 } .c5 { stroke: #ff7b72 }
    .c6 { stroke: #d29922 }
  }
"""


def text(x, y, said, kind="ink", anchor="start"):
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(said)}</text>'


class Panel:
    """One set of tensors: x from 0 to 1, y given as a share of the height from below."""

    def __init__(self, index, title, ticks):
        self.x0 = LEFT + index * (WIDTH + GAP)
        self.parts = [text(self.x0, TOP - 12, title)]
        for share in (0, 0.25, 0.5, 0.75, 1):
            x = self.x(share)
            self.parts += [f'<path class="line" d="M{x:.1f} {TOP}v{HEIGHT}"/>', text(x, TOP + HEIGHT + 18, f"{share:g}", "faint", "middle")]
        for y, said in ticks:
            self.parts += [f'<path class="line" d="M{self.x0} {self.y(y):.1f}h{WIDTH}"/>', text(self.x0 - 8, self.y(y) + 4, said, "faint", "end")]

    def x(self, share):
        return self.x0 + WIDTH * share

    def y(self, share):
        return TOP + HEIGHT * (1 - share)

    def line(self, kind, points, more=""):
        path = "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<path class="path c{kind} {more}" d="{path}"/>')

    def mark(self, kind, x, y, title):
        self.parts.append(f'<circle class="mark c{kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4.5"><title>{html.escape(title)}</title></circle>')


def level(dropped):
    """On a logarithmic axis from LEAST to 1."""
    return (math.log10(max(dropped, LEAST)) - math.log10(LEAST)) / -math.log10(LEAST)


def write(name, title, across, panels, selectors, more):
    width, height = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 56 + 20 * math.ceil(len(selectors) / 3)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">',
             f'<title id="title">{html.escape(title)}</title>', f"<style>{STYLE}</style>",
             f'<rect class="ground" width="{width}" height="{height}" rx="6"/>', text(16, 26, title), text(16, 46, more, "faint")]
    for panel in panels:
        parts += panel.parts
    parts.append(text(LEFT, TOP + HEIGHT + 40, across, "faint"))
    for i, selector in enumerate(selectors):
        x, y = LEFT + i % 3 * 230, TOP + HEIGHT + 62 + i // 3 * 20
        parts += [f'<circle class="mark c{i}" cx="{x}" cy="{y - 4}" r="4.5"/>', text(x + 12, y, selector)]
    (IMAGES / name).write_text("\n".join(parts + ["</svg>"]) + "\n")


def main():
    measured = json.loads(DATA.read_text())
    rows = [row for row in measured["rows"] if "cache" not in row["data"]]
    sets, selectors = (list(dict.fromkeys(row[key] for row in rows)) for key in ("data", "selector"))
    kept, times = [], []
    most = max(row["time"] for row in rows)
    for i, name in enumerate(sets):
        drops = Panel(i, name, [(level(10**-e), f"{10.0**-e:g}") for e in range(5)])
        takes = Panel(i, name, [(t / math.ceil(most), f"{t}") for t in range(math.ceil(most) + 1)])
        takes.line(4, [(0, 1 / math.ceil(most)), (1, 1 / math.ceil(most))], "oracle")
        for kind, selector in enumerate(selectors):
            own = sorted((row for row in rows if (row["data"], row["selector"]) == (name, selector)), key=lambda row: row["kept"])
            if not own:
                continue
            drops.line(kind, [(row["kept"], level(row["dropped"])) for row in own])
            drops.line(kind, [(row["oracle"], level(row["dropped"])) for row in own], "oracle")
            for row in own:
                said = f"{selector}, {row['setting']}: keeps {row['kept']:.3f}, drops {row['dropped']:.4f}, oracle {row['oracle']:.3f}"
                drops.mark(kind, row["kept"], level(row["dropped"]), said)
                takes.mark(kind, row["kept"], row["time"] / math.ceil(most), f"{said}, time {row['time']:.2f}")
        kept.append(drops)
        times.append(takes)
    across = "share of visible keys that is kept"
    write("selection.svg", "What selectors drop of a row's attention, by what they keep", across, kept, selectors,
          "dotted: the fewest blocks that hold as much of each row (lower and further left is better)")
    write("selection_time.svg", "Time of choice and attention over that of dense attention, by what is kept", across, times, selectors,
          f"dotted: as long as dense attention; {measured['cpu']}")


if __name__ == "__main__":
    main()
