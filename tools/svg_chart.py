# What the charts of the documentation share: a style that follows the reader's preference for light or dark, text, a frame.
"""Parts of SVG pictures. Colors are those of python/heed/_palette.py, which heed.plot and the pages have too."""
import html
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("_palette", ROOT / "python/heed/_palette.py")  # without the package, which is built
palette = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(palette)


def style(rules):
    """A style element of {selector: (property, (on light, on dark))} and of what all charts have."""
    rules = {".ground": ("fill", palette.GROUND), ".ink": ("fill", palette.INK), ".faint": ("fill", palette.FAINT),
             ".line": ("stroke", palette.LINE), ".one": ("stroke", palette.FAINT), **rules}
    light, dark = (" ".join(f"{name} {{ {what}: {colors[i]} }}" for name, (what, colors) in rules.items()) for i in (0, 1))
    return f"<style>text {{ font: 13px system-ui, sans-serif }} {light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"


def text(x, y, said, kind="ink", anchor="start"):
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(said)}</text>'


def chart(width, height, title, rules, parts):
    """A whole picture, on a background of its own; `title` is for those who do not see it."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">',
        f'<title id="title">{html.escape(title)}</title>', style(rules), f'<rect class="ground" width="{width}" height="{height}" rx="6"/>',
        *parts, "</svg>"]) + "\n"
