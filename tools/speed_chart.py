#!/usr/bin/env python3
"""Draws docs/images/speed.svg from the table of docs/performance.md that names this program: ratios as bars, ranges
paler from the lowest on.

Usage: speed_chart.py [OUTPUT]. The table's columns are the calls, its rows a pass on a kind of CPU. The picture has a
background of its own and follows the reader's preference for light or dark.
"""
import re
import sys
from pathlib import Path

from svg_chart import ROOT, chart, palette, text

PAGE, CHART = ROOT / "docs/performance.md", ROOT / "docs/images/speed.svg"
TABLE = re.compile(r"<!-- drawn by tools/speed_chart.py -->\n((?:\|.*\n)+)")
LEFT, TOP, UNIT, BAR = 190, 74, 128, 12  # pixels; UNIT is one time as fast
RULES = {f".bar{i}": ("fill", palette.SERIES[i]) for i in range(4)}


def read(page):
    """(what was called, [(pass, [(lowest, highest) of each])]) of the table."""
    found = TABLE.findall(page)
    if len(found) != 1:
        sys.exit(f"{PAGE}: has {len(found)} tables that name this program, expected one")
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]
    ranges = [(name, [(min(n), max(n)) for n in ([float(x) for x in cell.split(" to ")] for cell in cells)])
              for name, *cells in rows]
    return header[1:], ranges


def words(ends):
    return " to ".join(f"{end:.1f}" for end in sorted(set(ends)))


def bar(i, begin, end, y, more=""):
    return (f'<rect class="bar{i}" x="{LEFT + UNIT * begin:g}" y="{y}" width="{UNIT * (end - begin):g}" '
            f'height="{BAR}"{more}/>')


def draw(calls, passes):
    most = max(high for _, cells in passes for _, high in cells)
    ticks = range(int(most) + 2)
    height = (BAR + 4) * len(passes) + 14  # of the bars of a call
    width, bottom = LEFT + UNIT * ticks[-1] + 40, TOP + height * len(calls)
    title = "Times as fast as PyTorch's scaled_dot_product_attention: " + "; ".join(
        f"{name}: " + ", ".join(f"{call} {words(ends)}" for call, ends in zip(calls, cells)) for name, cells in passes)
    parts = [text(16, 26, "Times as fast as PyTorch's scaled_dot_product_attention, called from PyTorch")]
    for i, (name, _) in enumerate(passes):
        parts += [f'<rect class="bar{i}" x="{16 + 170 * i}" y="40" width="{BAR}" height="{BAR}" rx="2"/>',
                  text(34 + 170 * i, 51, name, "faint")]
    for tick in ticks:
        x = LEFT + UNIT * tick
        parts += [f'<path class="{"one" if tick == 1 else "line"}" d="M{x} {TOP - 6}V{bottom}"/>',
                  text(x, bottom + 20, f"{tick}" if tick != 1 else "1: PyTorch", "faint", "middle")]
    for row, call in enumerate(calls):
        y = TOP + height * row
        parts.append(text(LEFT - 14, y + height // 2, call, anchor="end"))
        for i, (_, cells) in enumerate(passes):
            low, high = cells[row]
            at = y + 4 + (BAR + 4) * i
            parts += [bar(i, 0, low, at), bar(i, low, high, at, ' opacity=".45"'),
                      text(LEFT + UNIT * high + 6, at + 11, words((low, high)), "faint")]
    return chart(width, bottom + 34, title, RULES, parts)


def main():
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else CHART
    output.write_text(draw(*read(PAGE.read_text())))


if __name__ == "__main__":
    main()
