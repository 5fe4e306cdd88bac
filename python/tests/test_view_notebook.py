# heed.view: the page of arrays, in a notebook's frame, with every option of attention.
import base64
import csv
import inspect
import io
import json
import re

import naive
import numpy as np
import pytest
from browser import Keys, choose, click, needs_browser, readout, shown_map, write
from cli_program import document, needs_program, qkv, save
from test_view import kept_cells, pool, probabilities, rounded

import heed

TOKENS = [f"w{i}" for i in range(19)]


def arrays(B=1, T=19, Tk=None, H=4, Hkv=2, D=8, dtype=np.float32):
    rng = np.random.default_rng(4)
    return rng.standard_normal((B, T, H, D)).astype(dtype), rng.standard_normal((B, Tk or T, Hkv, D)).astype(dtype)


def data_of(html):
    """The JSON that the page has, and its other data, {id: bytes}."""
    blobs = dict(re.findall(r'<script type="application/octet-stream" id="(\w+)">([^<]*)</script>', html))
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1]), {
        name: base64.b64decode(text) for name, text in blobs.items()}


# The result.

@needs_program
@pytest.mark.parametrize("options, typed", [
    ({}, []), ({"causal": True, "window": (5, 0)}, ["--causal", "--window", "5,0"]),
    ({"scale": 0.5, "softcap": 2.0}, ["--scale", 0.5, "--softcap", 2]),
    ({"pattern": heed.patterns.longformer(4, [0, 9])}, ["--pattern", "longformer(4, [0,9])"])])
def test_it_is_the_page_of_the_command_line(tmp_path, options, typed):
    tensors = qkv()
    file = save(tmp_path / "x.safetensors", tensors, {"tokens": json.dumps(TOKENS)})
    document("view", file, "--html", tmp_path / "a.html", *typed)
    expected = (tmp_path / "a.html").read_text()
    html = heed.view(*(tensors[name][1].astype(np.float32) for name in "qk"), tokens=TOKENS, **options).html
    (page, blobs), (other, other_blobs) = data_of(html), data_of(expected)
    assert blobs == other_blobs and set(blobs) >= {"q0", "k0", "lse0"}
    assert (page["layers"] == other["layers"] and page["tokens"] == TOKENS
            and page.get("pattern") == other.get("pattern"))
    text = [re.sub(r'(?s)<title>.*?</title>|<script type="application.*?</script>', "", x) for x in (html, expected)]
    assert text[0] == text[1] and len(text[0]) > 40_000, "one template, one style, one program"
    assert html.isascii() and "file" not in page


def test_a_view_is_saved_whole_or_not_at_all(tmp_path):
    view = heed.view(*arrays())
    assert view.save(tmp_path / "a.html") is None and (tmp_path / "a.html").read_text() == view.html
    view.save(str(tmp_path / "b.html"))
    with pytest.raises(heed.FileError, match="missing"):
        view.save(tmp_path / "missing" / "a.html")
    with pytest.raises(heed.InvalidArgument, match="View.save: path is 3, expected a path"):
        view.save(3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_a_view_has_a_height():
    view = heed.view(*arrays())
    assert view.height == 900 and "height: 900px" in view._repr_html_()
    view.height = 555
    assert "height: 555px" in view._repr_html_()
    for height in (0, "5", None, 2.5):
        with pytest.raises(heed.InvalidArgument, match="View: height is"):
            view.height = height
    assert list(inspect.signature(heed.View).parameters) == []
    with pytest.raises(TypeError):
        heed.View()


def test_any_arrays_and_dtypes():
    q, k = arrays()
    expected = data_of(heed.view(q, k).html)
    assert data_of(heed.view(memoryview(q), memoryview(k)).html) == expected
    assert (data_of(heed.view(q.transpose(1, 0, 2, 3).copy().transpose(1, 0, 2, 3), k[:, ::-1].copy()[:, ::-1]).html)
            == expected)
    torch = pytest.importorskip("torch")
    assert data_of(heed.view(torch.from_numpy(q), torch.from_numpy(k)).html) == expected
    for dtype in (np.float64, np.float16):
        assert set(data_of(heed.view(q.astype(dtype), k.astype(dtype)).html)[1]) == {"q0", "k0", "lse0"}
    heed.set_num_threads(1)
    assert data_of(heed.view(q, k, threads=2).html) == expected


# Wrong arguments.

@pytest.mark.parametrize("options, message", [
    ({"tokens": "a" * 19}, "view: tokens is 'a+', expected a sequence of 19 strings, one per key"),
    ({"tokens": ["a"] * 18}, "view: tokens has 18 elements, expected a sequence of 19 strings, one per key"),
    ({"tokens": ["a"] * 18 + [1]}, r"view: tokens\[18\] is 1, expected a string"), ({"tokens": 3}, "view: tokens is 3"),
    ({"tokens": {"a": 1}}, "view: tokens is"), ({"scale": "1"}, "view: scale is '1'"),
    ({"window": 3}, "view: window is 3"), ({"key_lengths": [1, 2]}, "view: key_lengths has shape"),
    ({"align": [1, 2, 3]}, "view: align has shape"), ({"mask": np.zeros((3, 3), bool)}, "view: mask has shape"),
    ({"bias": np.zeros(7, np.float32)}, "view: bias has shape"), ({"pattern": 3}, "view: pattern is 3"),
    ({"pattern": heed.patterns.per_head([heed.patterns.atrous(1)])}, "view: pattern"),
    ({"log_decay": np.zeros((1, 19, 4), np.float32)}, "view: log_decay"), ({"threads": 0}, "view: threads is 0"),
])
def test_wrong_options(options, message):
    with pytest.raises(heed.InvalidArgument, match=message):
        heed.view(*arrays(), **options)


def test_wrong_tensors_and_keywords():
    q, k = arrays()
    for a, b, message in ((q[0], k, r"view: q has shape \[19,4,8\], expected \[B, T, Hq, D\]"),
                          (q[:, :0], k, r"view: q has shape \[1,0,4,8\], expected at least one"),
                          (q, k[:0], "view: k has shape"), (q, k[..., :4], "view: k has shape"),
                          (q.astype(np.int32), k, "view: q has dtype"), (q, "k", "view: k")):
        with pytest.raises(heed.InvalidArgument, match=message):
            heed.view(a, b)
    for options, message in (({"windw": 3}, "windw"), ({"cu_seqlens_q": [0, 3]}, "cu_seqlens_q"),
                             ({"rows": [0]}, "rows")):
        with pytest.raises((TypeError, heed.InvalidArgument), match=message):
            heed.view(q, k, **options)
    with pytest.raises(TypeError):
        heed.view(q)


def test_too_many_heads_for_one_page():
    q, k = arrays(T=50, H=2000, Hkv=1, D=64)
    with pytest.raises(heed.InvalidArgument, match="view: q has 2000 heads, expected fewer in one page"):
        heed.view(q, k)
    assert heed.view(q[:, :, :2], k).html


# In a notebook.

@pytest.fixture
def notebook(browser, tmp_path):
    """Opens a page that shows a view as notebooks do, and enters its frame, whose errors do not reach the console."""

    def show(view):
        page = tmp_path / "notebook.html"
        page.write_text("<!DOCTYPE html><meta charset=utf-8><link rel=icon "
                        f"href=data:,><h1>Notebook</h1><div>{view._repr_html_()}</div>")
        browser.open(page, ready=False)
        browser.driver.switch_to.frame(browser.driver.find_element("tag name", "iframe"))
        browser.wait("return document.documentElement.dataset.ready === 'true'")
        browser.js("window.errors = []; addEventListener('error', (event) => errors.push(event.message))")

    yield show
    browser.driver.switch_to.default_content()
    browser.driver.switch_to.frame(browser.driver.find_element("tag name", "iframe"))
    errors = browser.js("return window.errors")
    browser.driver.switch_to.default_content()
    assert errors == []


@needs_browser
def test_the_page_works_inside_a_notebook(browser, notebook, tmp_path):
    q, k = arrays()
    browser.downloads(tmp_path)
    notebook(heed.view(q, k, tokens=TOKENS, causal=True))
    expected, bound = probabilities(rounded(q), rounded(k), causal=True)
    for head in range(4):
        got = shown_map(browser, 0, head)
        assert (np.abs(got - expected[head]) <= bound[head][:, None] * np.abs(expected[head])).all()
    browser.js("document.getElementById('overlay').focus()")
    browser.type(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    pair = readout(browser)["pair"]
    assert pair[1] == 1 and "w1" in browser.text("sentence")
    write(browser, "find", "W1")
    assert browser.text("found") == "10 rows"
    choose(browser, "order", "entropy")
    p = np.maximum(expected, 0)
    entropy = -(p * np.log2(np.where(p > 0, p, 1))).sum(-1).mean(-1)
    assert browser.js("return heed.grid.shown.map(({ head }) => head)") == np.argsort(-entropy).tolist()
    browser.js("return new Promise((done) => setTimeout(done, 300))")  # a link would be written by now
    assert browser.js("return [location.href, window.errors]") == ["about:srcdoc", []]
    choose(browser, "head", 2)
    click(browser, "save-csv")
    rows = list(csv.reader(io.StringIO(browser.saved(tmp_path, "attention-layer0-head2.csv").decode(), newline="")))
    assert rows[0][1:] == [row[0] for row in rows[1:]] == [f"{i} w{i}" for i in range(19)]
    saved = np.array([[float(x) if x else -1 for x in row[1:]] for row in rows[1:]])
    np.testing.assert_allclose(saved, expected[2], rtol=1e-4)


@needs_browser
def test_the_frame_reaches_nothing_of_the_notebook(browser, notebook):
    evil = ["</script><script>top.broken=1</script>", "\"></iframe><img src=x onerror=window.broken=1>", "&quot;", "'",
            "\ud800", *TOKENS[5:]]
    notebook(heed.view(*arrays(), tokens=evil))
    assert browser.js("try { return String(window.parent.document) } catch (error) { return "
                      "error.name }") == "SecurityError"
    assert browser.js("return window.origin") == "null"
    assert browser.js("return heed.layers[0].tokens")[:5] == [*evil[:4], "\ufffd\ufffd\ufffd"]
    browser.driver.switch_to.default_content()
    assert browser.js("return [window.broken ?? null, document.querySelectorAll('img').length, "
                      "document.querySelectorAll('iframe').length]") == [None, 0, 1]


# Options that the page does not know itself: maps of what attention gives.

def expected_maps(q, k, **options):
    """[H, Tq, Tk] of the first sequence by naive attention with unit vectors as values; -1 where a pair is masked."""
    Tk = k.shape[1]
    v = np.broadcast_to(np.eye(Tk)[None, :, None], (*k.shape[:2], k.shape[2], Tk))
    o, _ = naive.attention(q, k, v, **options)
    masks = {key: x for key, x in options.items() if key not in ("scale", "softcap", "bias", "alibi", "sinks",
                                                                 "log_decay", "relative_bias")}
    seen = np.stack([s > -np.inf for b, *_, s, _, _ in naive._heads(q, k, v, **masks) if b == 0])
    return np.where(seen, o[0].transpose(1, 0, 2), -1)


GENERATOR = np.random.default_rng(11)
OPTIONS = {
    "mask": {"mask": GENERATOR.random((1, 4, 19, 19)) < 0.6},
    "mask of all heads": {"mask": GENERATOR.random((19, 19)) < 0.6, "causal": True},
    "bias": {"bias": GENERATOR.standard_normal((4, 19, 19)).astype(np.float32)},
    "lengths": {"key_lengths": [11], "key_starts": [2], "query_lengths": [15]},
    "segments": {"segments": np.repeat([[0, 1, -1, 2]], [5, 6, 3, 5], axis=1)},
    "alibi": {"alibi": [0.5, 0.25, 0.1, 0.0], "causal": True}, "sinks": {"sinks": [0.3, -1.0, 2.0, 0.0]},
    "relative_bias": {"relative_bias": GENERATOR.standard_normal((4, 6)).astype(np.float32), "causal": True},
    "chunk": {"chunk": 5, "causal": True}, "prefix": {"prefix": [6], "causal": True},
    "sink tokens": {"sink_tokens": 2, "window": (3, 0), "causal": True},
    "bias that leaves nothing": {
        "bias": np.where(GENERATOR.random((19, 19)) < 0.3, -500, 0).astype(np.float32), "key_lengths": [15]},
    "log_decay": {"log_decay": -np.abs(GENERATOR.standard_normal((1, 19, 4))).astype(np.float32), "causal": True},
    "all": {"mask": GENERATOR.random((19, 19)) < 0.8, "bias": GENERATOR.standard_normal((19, 19)).astype(np.float32),
            "softcap": 3.0, "scale": 0.7, "sinks": [0.3, -1.0, 2.0, 0.0], "window": (9, 2), "align": [1]},
}


@needs_browser
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_attention(browser, tmp_path, name):
    q, k = arrays()
    heed.view(q, k, tokens=TOKENS, **OPTIONS[name]).save(tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    expected = expected_maps(q, k, **OPTIONS[name])
    for head in range(4):
        got = shown_map(browser, 0, head)
        np.testing.assert_array_equal(got < 0, expected[head] < 0)
        # The tolerances are those of float16 values and of float32 attention.
        np.testing.assert_allclose(got, expected[head], rtol=2.0**-10, atol=1e-6)
    masked = np.argwhere(expected[browser.js("return heed.state.head")] < 0)
    if len(masked):
        row, column = masked[len(masked) // 2]
        browser.open(tmp_path / "a.html", f"#head={browser.js('return heed.state.head')}&row={row}&column={column}")
        assert browser.text("value") == "\u2014" and "not allowed to look" in browser.text("sentence")
        assert browser.js("return document.getElementById('masked-key').checkVisibility()")
    assert ("rounded to 16-bit floats" in browser.text("notes")
            and ("sink" in browser.text("how")) == ("sinks" in OPTIONS[name]))
    assert not browser.js("return document.getElementById('implied-section').checkVisibility()")
    assert browser.js("return document.getElementById('text-section').checkVisibility()"), "cells are single tokens"


@needs_browser
@pytest.mark.parametrize("align, start", [("top_left", 0), ([3], 3), ("bottom_right", 5)])
def test_where_queries_stand_is_computed_in_the_page(browser, tmp_path, align, start):
    q, k = arrays(T=14, Tk=19)
    heed.view(q, k, tokens=TOKENS, causal=True, align=align).save(tmp_path / "a.html")
    browser.open(tmp_path / "a.html", "#row=2&column=1")
    expected = expected_maps(rounded(q)[None], rounded(k)[None], causal=True, align=align)
    np.testing.assert_allclose(shown_map(browser, 0, 1), expected[1], rtol=1e-5)
    assert set(data_of((tmp_path / "a.html").read_text())[1]) == {"q0", "k0", "lse0"}
    assert f"w{2 + start}" in browser.text("sentence")


@needs_browser
def test_a_pattern_lies_over_the_map_but_is_a_mask_beside_other_options(browser, tmp_path):
    q, k = arrays()
    pattern = heed.patterns.longformer(4, [0, 9])
    i, j = np.arange(19)[:, None], np.arange(19)[None]
    keep = (abs(i - j) <= 2) | np.isin(i, (0, 9)) | np.isin(j, (0, 9))
    heed.view(q, k, pattern=pattern).save(tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    np.testing.assert_array_equal(kept_cells(browser, 0, 0), 255 * keep)
    heed.view(q, k, pattern=pattern, key_lengths=[15]).save(tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    expected = expected_maps(q, k, mask=keep, key_lengths=[15])
    np.testing.assert_allclose(shown_map(browser, 0, 2), expected[2], rtol=2.0**-10, atol=1e-6)
    assert not browser.js("return document.getElementById('kept-line').checkVisibility()")


@needs_browser
def test_the_first_of_several_sequences_is_shown(browser, tmp_path):
    q, k = arrays(B=3)
    options = {"key_lengths": [7, 19, 3], "mask": GENERATOR.random((3, 1, 19, 19)) < 0.7}
    for each in ({}, {"causal": True, "align": [2, 0, 1]}, options):
        heed.view(q, k, **each).save(tmp_path / "a.html")
        browser.open(tmp_path / "a.html")
        np.testing.assert_allclose(shown_map(browser, 0, 3), expected_maps(q, k, **each)[3], rtol=2e-3, atol=1e-5)
        assert "the first of 3 sequences is shown" in browser.text("notes")
    tables = np.random.default_rng(3).random((3, 4, 5, 5)) < 0.5
    heed.view(q, k, pattern=heed.patterns.blocks(tables, block=4)).save(tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    np.testing.assert_array_equal(kept_cells(browser, 0, 1), 255 * np.kron(tables[0, 1], np.ones((4, 4)))[:19, :19])


@needs_browser
def test_masks_of_pooled_maps(browser, tmp_path):
    q, k = arrays(T=2301, Tk=2500, H=1, Hkv=1, D=4)
    segments = (np.repeat([[0, 1]], [1000, 1301], axis=1), np.repeat([[0, 1, -1]], [1100, 1200, 200], axis=1))
    heed.view(q, k, segments=segments, tokens=[f"w{i}" for i in range(2500)]).save(tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    allowed = (segments[0].T == segments[1]) & (segments[0].T >= 0)
    p = np.where(allowed, np.exp(q[0, :, 0].astype(np.float64) @ k[0, :, 0].T.astype(np.float64) / 2), 0)
    shares, _ = pool((p / p.sum(-1, keepdims=True))[None], 512, 512)
    seen = pool(allowed[None].astype(float), 512, 512)[1][0] > 0
    got = shown_map(browser, 0, 0)
    np.testing.assert_array_equal(got < 0, ~seen)
    np.testing.assert_allclose(got[seen], shares[0][seen], rtol=2e-3, atol=1e-7)
