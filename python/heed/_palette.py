# Colors and signs of pictures: heed.plot's, and those of the charts of the documentation, which read this file alone.
"""Colors and signs of pictures, each color as (on light, on dark)."""

import math

INK, FAINT, LINE, GROUND = (("#1f1c25", "#eceaf1"), ("#625e6b", "#a5a1b0"), ("#e3e0da", "#34313e"),
                            ("#ffffff", "#1b1a22"))
MASKED = ("#e9e7e3", "#24222c")  # pairs that may not look

# The colors of lines, in this order. Any two differ for every kind of color vision: test_plot.py measures it.
SERIES = (
    ("#00667d", "#57c8de"), ("#c2573f", "#f0916b"), ("#a25fe6", "#8770f7"), ("#41220d", "#f6ea92"),
    ("#399ea1", "#aef3f1"), ("#07078e", "#b47e9a"), ("#923630", "#e4483e"),
)
MARKERS = ("o", "s", "D", "^", "v", "P", "X")  # matplotlib's, in the same order

# A color and a sign for each dtype, as on the page of `heed compare`.
DTYPES = {"f64": (("#5b3b8c", "#b79cf0"), "s"), "f32": (("#00667d", "#57c8de"), "o"),
          "bf16": (("#c2573f", "#f0916b"), "D"), "f16": (("#8f7300", "#e0c14a"), "^")}


def oklch(lightness: float, chroma: float, hue: float) -> tuple[int, ...]:
    """OKLCH, in which equal steps look equal, as 8-bit sRGB.

    Source: Ottosson, "A perceptual color space for image processing", 2020.
    """
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
              -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
              -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short)
    clipped = (min(1.0, max(0.0, x)) for x in linear)
    return tuple(math.floor(255 * (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055) + 0.5)
                 for x in clipped)


def ramp(dark: bool = False) -> list[tuple[int, ...]]:
    """256 colors of shares, in even steps of lightness from the paper to the strongest, as in the page of a view."""
    colors = []
    for i in range(256):
        t = i / 255
        if dark:
            bow = math.sin(math.pi * min(1, 0.03 + 0.97 * t) ** 0.9)
            colors.append(oklch(0.205 + 0.745 * t, 0.012 + 0.165 * bow, 295 + 165 * t**0.8))
        else:
            colors.append(oklch(0.992 - 0.732 * t, 0.004 + 0.165 * math.sin(math.pi * t**0.78 * 0.86),
                                88 - 140 * t**1.05))
    return colors
