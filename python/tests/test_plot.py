# heed.plot: tests read the data, lines, labels and colors of pictures, not their pixels.
import itertools
import json
import pathlib
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from browser import needs_browser
from cli_program import ROOT, SHIPPED, document, needs_program

matplotlib.use("agg")

from matplotlib import pyplot

import heed
import heed.plot
from heed import _palette


@pytest.fixture(autouse=True)
def nothing_stays_open():
    yield
    pyplot.close("all")


def draw(ax):
    """Draws, which finds texts that cannot be drawn."""
    ax.figure.canvas.draw()
    return ax


def texts(ax):
    return [text.get_text() for text in ax.texts]


# Maps.

def weights(q, k, keep, scale=None):
    """[Tq, Tk] of one head in float64; 0 where nothing is kept."""
    s = q.astype(np.float64) @ k.astype(np.float64).T * (q.shape[1] ** -0.5 if scale is None else scale)
    s = np.where(keep, s, -np.inf)
    p = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
    return p / np.maximum(p.sum(-1, keepdims=True), 1e-300)


def test_the_map_is_the_attention_and_masked_pairs_are_masked(rng):
    q = rng.standard_normal((2, 9, 4, 8), dtype=np.float32)
    k = rng.standard_normal((2, 12, 2, 8), dtype=np.float32)
    i, j = np.arange(9)[:, None] + 3, np.arange(12)[None]
    keep = (j <= i) & (j < 10) & (j >= i - 5)
    ax = heed.plot.attention_map(q, k, head=3, causal=True, window=(5, -1), key_lengths=[10, 4], scale=0.7)
    (image,) = ax.images
    shown = image.get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), ~keep)
    np.testing.assert_allclose(shown.filled(0), weights(q[0, :, 3], k[0, :, 1], keep, 0.7), rtol=1e-5, atol=1e-7)
    assert tuple(image.get_extent()) == (-0.5, 11.5, 8.5,
                                         -0.5) and matplotlib.colors.to_hex(ax.get_facecolor()) == _palette.MASKED[0]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title(loc="left")) == ("key", "query", "head 3")
    assert len(draw(ax).figure.axes) == 2, "a bar of colors"


def test_what_is_small_is_not_what_is_masked():
    """A weight that underflows is seen all the same, and a bias or a sink hides no pair."""
    q = np.zeros((1, 3, 1, 4), np.float32)
    q[..., 0] = 1
    k = np.zeros((1, 3, 1, 4), np.float32)
    k[0, 1, 0, 0] = -1000
    bias = np.array([[0, 0, -500]] * 3, np.float32)
    shown = heed.plot.attention_map(q, k, bias=bias, sinks=[0.0], causal=True).images[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), ~np.tri(3, dtype=bool))
    assert shown[2, 1] == shown[2, 2] == 0 and shown[2, 0] == pytest.approx(0.5)


def test_long_sequences_are_pooled_and_rows_still_sum_to_one(rng):
    q, k = (rng.standard_normal((1, T, 2, 4), dtype=np.float32) for T in (700, 1100))
    ax = heed.plot.attention_map(q, k, head=1)
    shown = ax.images[0].get_array()
    assert shown.shape == (512, 512) and tuple(ax.images[0].get_extent()) == (-0.5, 1099.5, 699.5, -0.5)
    p = weights(q[0, :, 1], k[0, :, 1], True)
    starts = [-(-np.arange(512) * T // 512) for T in (700, 1100)]
    expected = np.add.reduceat(np.add.reduceat(p, starts[0], 0), starts[1], 1) / np.diff(starts[0], append=700)[:, None]
    np.testing.assert_allclose(shown, expected, rtol=2e-5)
    np.testing.assert_allclose(shown.sum(-1), 1, rtol=1e-5)
    masked = heed.plot.attention_map(q, k, head=1, key_lengths=[550]).images[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(masked)[0], np.arange(512) >= 256)


@pytest.mark.parametrize("norm, half", [("linear", 0.5), ("sqrt", 0.5**0.5), ("log", 1 + np.log10(0.5) / 4)])
def test_colors_are_where_the_page_has_them(norm, half):
    x = np.zeros((1, 2, 1, 1), np.float32)
    image = heed.plot.attention_map(x, x, norm=norm).images[0]  # all are 0.5
    assert image.norm(0.5) == pytest.approx(1) and image.norm(0.25) == pytest.approx(half) and image.norm(0) == 0


TOKENS = ["the", "\u0120cat", "\u2581sat", "$x^$", "a\nb", "", "\u202e", "\\frac", "{"]


def test_tokens_are_text_whatever_they_hold(rng):
    q = rng.standard_normal((1, 9, 1, 4), dtype=np.float32)
    ax = draw(heed.plot.attention_map(q, q, tokens=TOKENS))
    expected = ["the", "cat", "sat", "$x^$", "a\\u{a}b", "(empty)", "\\u{202e}", "\\frac", "{"]
    for axis in (ax.xaxis, ax.yaxis):
        assert [text.get_text() for text in axis.get_ticklabels()] == expected
        np.testing.assert_array_equal(axis.get_ticklocs(), np.arange(9))


def test_queries_are_labelled_by_where_they_stand(rng):
    q, k = (rng.standard_normal((1, T, 1, 4), dtype=np.float32) for T in (2, 5))
    tokens = list("abcde")
    for align, expected in (("bottom_right", "de"), ("top_left", "ab"), ([2], "cd"), ([4], "e1")):
        ax = heed.plot.attention_map(q, k, tokens=np.array(tokens), align=align)
        assert "".join(text.get_text() for text in ax.get_yticklabels()) == expected


def test_labels_are_as_many_as_can_be_read(rng):
    q = rng.standard_normal((1, 300, 1, 4), dtype=np.float32)
    ax = heed.plot.attention_map(q, q, tokens=[f"t{i}" for i in range(300)])
    labels = [text.get_text() for text in ax.get_xticklabels()]
    assert 20 < len(labels) < 60 and labels == [f"t{int(at)}" for at in ax.get_xticks()]


def test_given_axes_are_drawn_into():
    _, axes = pyplot.subplots(1, 2)
    x = np.zeros((1, 2, 1, 1), np.float32)
    assert heed.plot.attention_map(x, x, ax=axes[1]) is axes[1] and len(axes[1].figure.axes) == 2, "no bar of colors"
    assert not list(axes[0].images)
    assert heed.plot.cost_curves([], ax=axes[0]) is axes[0]


@pytest.mark.parametrize("options, message", [
    ({"norm": "cubic"}, "plot.attention_map: norm is 'cubic', expected 'sqrt', 'linear' or 'log'"),
    ({"head": 2}, "plot.attention_map: head is 2, expected an int from 0 to 1"),
    ({"head": True}, "head is True"), ({"head": 0.0}, "head is 0.0"),
    ({"tokens": "abc"}, "plot.attention_map: tokens is 'abc', expected 3 strings, one per key"),
    ({"tokens": ["a", "b"]}, "tokens has 2 elements, expected 3 strings, one per key"),
    ({"tokens": ["a", 1, "b"]}, r"tokens\[1\] is 1, expected a string"),
    ({"rows": [0]}, "rows is given, expected no such keyword"),
    ({"window": 3}, "attention_weights: window is 3"),
])
def test_wrong_arguments_of_a_map(options, message):
    x = np.zeros((1, 3, 2, 4), np.float32)
    with pytest.raises(heed.InvalidArgument, match=message):
        heed.plot.attention_map(x, x, **options)
    assert pyplot.get_fignums() == [], "a figure was made"


def test_wrong_tensors_of_a_map():
    x = np.zeros((1, 3, 2, 4), np.float32)
    for q, k, message in ((x[0], x, r"q has shape \[3, 2, 4\], expected \[B, T, H, D\]"),
                          (x, x[:, :0], r"k has shape \[1, 0, 2, 4\]"), (3, x, r"q has shape \[\]")):
        with pytest.raises(heed.InvalidArgument, match=message):
            heed.plot.attention_map(q, k)
    with pytest.raises(TypeError, match="windw"):
        heed.plot.attention_map(x, x, windw=(1, 0))


# Errors against time.

ROWS = [
    {"mechanism": "attention", "options": {}, "selector": "", "dtype": "f64", "seconds": 2e-3, "relative_error": 1e-16},
    {"mechanism": "attention", "options": {}, "selector": "", "dtype": "f32", "seconds": 1e-3, "relative_error": 1e-7},
    {"mechanism": "attention", "options": {"causal": True, "window": [127, 0]}, "selector": "", "dtype": "f32",
     "seconds": 4e-4, "relative_error": 0.6},
    {"mechanism": "attention", "options": {"pattern": "atrous(2)"}, "selector": "", "dtype": "f32", "seconds": 5e-4,
     "relative_error": 0.5},
    {"mechanism": "attention", "options": {}, "selector": "top_blocks 3", "dtype": "f32", "seconds": 6e-4,
     "relative_error": 0.2},
    {"mechanism": "retention", "options": {"causal": True}, "selector": "", "dtype": "bf16", "seconds": 1e-4,
     "relative_error": 0.9},
    {"mechanism": "retention", "options": {"causal": True}, "selector": "", "dtype": "f32", "seconds": 2e-4,
     "relative_error": 0.8},
    {"mechanism": "exactly", "options": {}, "selector": "", "dtype": "f32", "seconds": 1e-4, "relative_error": 0},
    {"mechanism": "undefined", "options": {}, "selector": "", "dtype": "f32", "seconds": 1e-4, "relative_error": None},
]
NAMES = ["attention full", "attention causal window 127,0", "attention atrous(2)", "attention top_blocks 3",
         "retention"]


@pytest.mark.parametrize("given", [ROWS, {"rows": ROWS}, iter(ROWS)], ids=["rows", "document", "iterator"])
def test_error_against_time(given):
    ax = draw(heed.plot.error_against_time(given))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [line.get_label() for line in ax.lines] == NAMES
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [(2e-3, 1e-16), (1e-3, 1e-7)])
    signs = {sign.get_label(): sign for sign in ax.collections}
    assert list(signs) == ["f64", "f32", "bf16"]
    np.testing.assert_array_equal(signs["f32"].get_offsets(),
                                  [(r["seconds"], r["relative_error"]) for r in ROWS if r["dtype"] == "f32"][:5])
    for dtype, sign in signs.items():
        assert matplotlib.colors.to_hex(sign.get_facecolor()[0]) == _palette.DTYPES[dtype][0][0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["f64", "f32", "bf16"]
    assert sorted(texts(ax)) == sorted(NAMES)
    assert {text.get_text(): text.xy for text in ax.texts}["retention"] == (2e-4, 0.8), "a label belongs to the slowest"


def test_labels_do_not_touch():
    rows = [{"mechanism": f"m{i}", "dtype": "f32", "seconds": 1e-3, "relative_error": 0.5 + 1e-3 * i}
            for i in range(20)]
    ax = draw(heed.plot.error_against_time(rows))
    boxes = sorted((text.get_window_extent().y0, text.get_window_extent().y1) for text in ax.texts)
    assert len(boxes) == 20 and all(above[0] >= below[1] - 1 for below, above in itertools.pairwise(boxes))
    assert max(text.get_window_extent().x1 for text in ax.texts) <= ax.figure.bbox.x1


@needs_program
def test_what_compare_prints_is_what_is_drawn(tmp_path):
    compared = document("compare", SHIPPED, "--layer", 2, "-m", "attention,retention,based")
    ax = draw(heed.plot.error_against_time(compared))
    offsets = {tuple(x) for sign in ax.collections for x in sign.get_offsets()}
    assert (offsets == {(r["seconds"], r["relative_error"]) for r in compared["rows"] if r["relative_error"]}
            and len(offsets) > 8)
    ax = heed.plot.cost_curves([compared])
    assert compared["tokens"] == 371 and {x for line in ax.lines for x in line.get_xdata()} == {371}


# Costs.

def test_cost_curves_are_the_rows_in_order(rng):
    rows = [{"mechanism": m, "tokens": n, "seconds": s * n, "workspace_bytes": 10 * n}
            for m, s in (("b", 2e-6), ("a", 1e-6)) for n in (1024, 256, 512)]
    rows.append({"mechanism": "c", "tokens": 256, "seconds": None, "workspace_bytes": 0})
    ax = draw(heed.plot.cost_curves(rows))
    assert [line.get_label() for line in ax.lines] == ["b", "a"] and sorted(texts(ax)) == ["a", "b"]
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [(n, 2e-6 * n) for n in (256, 512, 1024)])
    assert [line.get_color() for line in ax.lines] == [_palette.SERIES[0][0], _palette.SERIES[1][0]]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["256", "512", "1,024"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("tokens",
                                                  "time of a call") and ax.get_yticklabels()[0].get_text().endswith("s")
    assert heed.plot.cost_curves(rows, cost="workspace_bytes").get_ylabel() == "workspace"
    for count in (10, 11):  # so many lengths are marked, and no more
        many = [{"mechanism": "a", "tokens": 100 + 7 * i, "seconds": 1e-6} for i in range(count)]
        ticks = heed.plot.cost_curves(many).get_xticks().tolist()
        assert (ticks == [row["tokens"] for row in many]) == (count == 10)


def test_dtypes_and_options_have_lines_of_their_own():
    rows = [{"mechanism": "attention", "options": options, "tokens": n, "dtype": dtype, "seconds": 1e-3}
            for options in ({}, {"causal": True}) for dtype in ("f32", "bf16") for n in (1, 2)]
    lines = [line.get_label() for line in heed.plot.cost_curves(rows).lines]
    assert lines == ["attention full f32", "attention full bf16", "attention causal f32", "attention causal bf16"]


def test_many_mechanisms_have_different_lines():
    rows = [{"mechanism": f"m{i}", "tokens": n, "seconds": n * (i + 1)} for i in range(25) for n in (1, 2)]
    kinds = {(line.get_color(), line.get_marker(), line.get_linestyle())
             for line in draw(heed.plot.cost_curves(rows)).lines}
    assert len(kinds) == 25


def test_explained_costs_are_what_explain_says():
    rows = heed.plot.explained_costs("attention", [64, 128], q=(1, "T", 2, 16), causal=True, window=(31, 0))
    for row, T in zip(rows, (64, 128), strict=True):
        said = heed.explain("attention", q=(1, T, 2, 16), causal=True, window=(31, 0))
        assert row == {"mechanism": "attention", "tokens": T, "dtype": "f32", **said}
    shapes = dict.fromkeys(("q", "k", "v"), (1, "T", 2, 16))
    rows = heed.plot.explained_costs("retention", range(64, 193, 64), dtype="bf16", threads=1, **shapes)
    line = heed.plot.cost_curves(rows, cost="flops").lines[0]
    np.testing.assert_allclose(line.get_ydata() / line.get_xdata(), line.get_ydata()[0] / 64)


def test_crossovers_are_those_of_the_file():
    results = json.loads((ROOT / "benchmarks/results/crossover.json").read_text())
    rows = [row for row in results["crossover"]["rows"] if row["mechanism"] != "attention"]
    for given in (results, results["crossover"]):
        ax = draw(heed.plot.crossovers(given))
        names = [text.get_text() for text in ax.get_yticklabels()]
        assert names == [row["mechanism"] for row in rows]
        shown = {(sign.get_label(), x, names[int(y)]) for sign in ax.collections for x, y in sign.get_offsets()}
        expected = set()
        for row in rows:
            for kind in ("forward", "backward", "step"):
                said = (row[kind] or {}).get("from")
                if said:
                    expected.add((kind + (", or before" if "<" in said else ""), float(said.split()[-1]),
                                  row["mechanism"]))
        assert shown == expected and len(shown) > 20 and ax.get_xscale() == "log"


@pytest.mark.parametrize("call, message", [
    (lambda: heed.plot.error_against_time("rows.json"), "plot.error_against_time: rows is 'rows.json', expected rows, "
     "or a document"), (lambda: heed.plot.error_against_time([3]), r"rows\[0\] is 3, expected a mapping"),
    (lambda: heed.plot.error_against_time([{**ROWS[0], "dtype": "int8"}]), "dtype is 'int8', expected one of f64, f32, "
     "bf16, f16"), (lambda: heed.plot.cost_curves([{"mechanism": "a", "tokens": 3}]),
                    "plot.cost_curves: row 0 has no 'seconds', expected mechanism, tokens, seconds"),
    (lambda: heed.plot.crossovers([]), "plot.crossovers: results has no rows"),
    (lambda: heed.plot.crossovers({"rows": 3}), "results has no rows"),
    (lambda: heed.plot.crossovers({"rows": [{"mechanism": "a"}]}), "row 0 has no 'forward'"),
])
def test_wrong_rows(call, message):
    with pytest.raises(heed.InvalidArgument, match=message):
        call()
    assert pyplot.get_fignums() == []


# Colors, and what is not there.

# Linear RGB as seen without one kind of cone, severity 1. Source: Machado, Oliveira, Fernandes, "A
# physiologically-based model for simulation of color vision deficiency", IEEE Trans. Visualization and Computer
# Graphics 15 (2009), table 1.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lightness_and_hue(color, vision):
    """OKLab of a color as it is seen."""
    rgb = np.array(matplotlib.colors.to_rgb(color))
    linear = np.clip(VISION[vision] @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    cones = np.cbrt(np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                              [0.0883024619, 0.2817188376, 0.6299787005]]) @ linear)
    return np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                     [0.0259040371, 0.7827717662, -0.8086757660]]) @ cones


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
def test_lines_differ_for_every_kind_of_color_vision(vision, ground):
    """0.02 is about the least difference that is noticed: five times that between lines, and more to the ground."""
    seen = [lightness_and_hue(colors[ground], vision) for colors in (*_palette.SERIES, _palette.GROUND)]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.1


@pytest.mark.parametrize("vision", VISION)
def test_more_is_always_darker(vision):
    lightness = [lightness_and_hue(np.array(color) / 255, vision)[0] for color in _palette.ramp()]
    assert (np.diff(lightness) < 0.002).all() and lightness[0] - lightness[-1] > 0.65


def test_dtypes_have_the_colors_of_the_compare_page():
    css = (ROOT / "heed/pages/web/compare.css").read_text()
    for dtype, ((light, dark), _) in _palette.DTYPES.items():
        assert f".{dtype} {{ fill: light-dark({light}, {dark}); }}" in css
    base = (ROOT / "heed/pages/web/base.css").read_text()
    for name, (light, dark) in {"ink": _palette.INK, "muted": _palette.FAINT, "line": _palette.LINE,
                                "masked": _palette.MASKED}.items():
        assert f"--{name}: light-dark({light}, {dark});" in base


@needs_program
@needs_browser
def test_shares_have_the_colors_of_the_view_page(browser, shipped):
    browser.open(shipped, ready=False)
    for dark in (False, True):
        np.testing.assert_allclose(browser.js("return heed.ramp(arguments[0])", dark), _palette.ramp(dark), atol=1)


@pytest.mark.parametrize("missing", ["matplotlib", "matplotlib.axes"])
def test_without_matplotlib_one_sentence_says_what_to_do(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import heed; import heed.plot"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = result.stderr.strip().splitlines()[-1]
    assert last.endswith("Error: heed.plot needs matplotlib, which is not installed: "
                         "pip install 'heed-attention[plot]'") and result.returncode == 1


def test_the_extra_is_there():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(each.startswith("matplotlib") for each in extras["plot"]) and "heed-attention[plot]" in extras["test"]


def test_importing_it_shows_nothing_and_chooses_no_backend():
    code = "import sys, heed.plot; print('matplotlib.pyplot' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            cwd=pathlib.Path(heed.__file__).parent.parent)
    assert result.stdout.strip() == "False"
