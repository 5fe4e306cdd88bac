# Shared parts of the documentation's charts: a style that follows the reader's light or dark preference, text, a frame.
"""Parts of SVG pictures. Colors are those of python/heed/_palette.py, which heed.plot and the pages have too."""
import html
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The module is loaded from its file, as the package may not be built.
_spec = importlib.util.spec_from_file_location("_palette", ROOT / "python/heed/_palette.py")
palette = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(palette)

# Sizes of panels with lines and marks.
LEFT, TOP, WIDTH, HEIGHT, GAP = 64, 84, 300, 260, 76  # pixels
QUARTERS = [(share, f"{share:g}") for share in (0, 0.25, 0.5, 0.75, 1)]
SERIES = {f".c{i}": ("stroke", colors) for i, colors in enumerate(palette.SERIES)}
LINES = ("<style>.mark { fill: none; stroke-width: 1.6 } .path { fill: none; stroke-width: "
         "1.2 } .oracle { stroke-dasharray: 2 3 }</style>")


def style(rules):
    """A style element of {selector: (property, (on light, on dark))} and of what all charts have."""
    rules = {".ground": ("fill", palette.GROUND), ".ink": ("fill", palette.INK), ".faint": ("fill", palette.FAINT),
             ".line": ("stroke", palette.LINE), ".one": ("stroke", palette.FAINT), **rules}
    light, dark = (" ".join(f"{name} {{ {what}: {colors[i]} }}" for name, (what, colors) in rules.items())
                   for i in (0, 1))
    return (f"<style>text {{ font: 13px system-ui, sans-serif }} {light} @media (prefers-color-scheme: dark) {{ {dark} "
            f"}}</style>")


def text(x, y, said, kind="ink", anchor="start"):
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(said)}</text>'


def chart(width, height, title, rules, parts):
    """A whole picture, on a background of its own; `title` is for those who do not see it."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">',
        f'<title id="title">{html.escape(title)}</title>', style(rules),
        f'<rect class="ground" width="{width}" height="{height}" rx="6"/>', *parts, "</svg>"]) + "\n"


class Panel:
    """Axes to the right of the previous ones: x and y are shares of width and height, ticks are (share, label)."""

    def __init__(self, index, title, ticks, across=QUARTERS):
        self.x0 = LEFT + index * (WIDTH + GAP)
        self.parts = [text(self.x0, TOP - 12, title)]
        for share, said in across:
            x = self.x(share)
            self.parts += [f'<path class="line" d="M{x:.1f} {TOP}v{HEIGHT}"/>',
                           text(x, TOP + HEIGHT + 18, said, "faint", "middle")]
        for y, said in ticks:
            self.parts += [f'<path class="line" d="M{self.x0} {self.y(y):.1f}h{WIDTH}"/>',
                           text(self.x0 - 8, self.y(y) + 4, said, "faint", "end")]

    def x(self, share):
        return self.x0 + WIDTH * share

    def y(self, share):
        return TOP + HEIGHT * (1 - share)

    def line(self, kind, points, more=""):
        path = "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<path class="path c{kind} {more}" d="{path}"/>')

    def mark(self, kind, x, y, title, radius=4.5):
        self.parts.append(f'<circle class="mark c{kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" '
                          f'r="{radius}"><title>{html.escape(title)}</title></circle>')
