# Pictures as SVG: what the charts of this folder have in common.
"""A picture has a background of its own and follows the reader's preference for light or dark."""
import html
import math

LEFT, TOP, WIDTH, HEIGHT, GAP = 64, 84, 300, 260, 76  # pixels of a panel
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
QUARTERS = [(share, f"{share:g}") for share in (0, 0.25, 0.5, 0.75, 1)]


def text(x, y, said, kind="ink", anchor="start"):
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(said)}</text>'


class Panel:
    """One set of axes: x and y are shares of the width and, from below, of the height. Ticks are (share, what is said there)."""

    def __init__(self, index, title, ticks, across=QUARTERS):
        self.x0 = LEFT + index * (WIDTH + GAP)
        self.parts = [text(self.x0, TOP - 12, title)]
        for share, said in across:
            x = self.x(share)
            self.parts += [f'<path class="line" d="M{x:.1f} {TOP}v{HEIGHT}"/>', text(x, TOP + HEIGHT + 18, said, "faint", "middle")]
        for y, said in ticks:
            self.parts += [f'<path class="line" d="M{self.x0} {self.y(y):.1f}h{WIDTH}"/>', text(self.x0 - 8, self.y(y) + 4, said, "faint", "end")]

    def x(self, share):
        return self.x0 + WIDTH * share

    def y(self, share):
        return TOP + HEIGHT * (1 - share)

    def line(self, kind, points, more=""):
        path = "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<path class="path c{kind} {more}" d="{path}"/>')

    def mark(self, kind, x, y, title, radius=4.5):
        self.parts.append(f'<circle class="mark c{kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}"><title>{html.escape(title)}</title></circle>')


def begin(title, more, width, height):
    """The parts of a picture of this size, its title and a line below."""
    return [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">',
            f'<title id="title">{html.escape(title)}</title>', f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{width}" height="{height}" rx="6"/>', text(16, 26, title), text(16, 46, more, "faint")]


def picture(title, across, panels, legend, more, per_row=3):
    """Panels beside each other; legend is [(what a mark looks like at x, y; what it is)]."""
    width, height = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 56 + 20 * math.ceil(len(legend) / per_row)
    parts = begin(title, more, width, height)
    for panel in panels:
        parts += panel.parts
    parts.append(text(LEFT, TOP + HEIGHT + 40, across, "faint"))
    for i, (sample, said) in enumerate(legend):
        x, y = LEFT + i % per_row * 230, TOP + HEIGHT + 62 + i // per_row * 20
        parts += [sample(x, y - 4), text(x + 12, y, said)]
    return "\n".join(parts + ["</svg>"]) + "\n"


def circle(kind):
    return lambda x, y: f'<circle class="mark c{kind}" cx="{x}" cy="{y}" r="4.5"/>'


def stroke(kind, more=""):
    return lambda x, y: f'<path class="path c{kind} {more}" d="M{x - 14} {y}h20"/>'
