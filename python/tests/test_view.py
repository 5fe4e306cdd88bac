# Tests of the pages of `heed view`, in a browser: its numbers against float64, and every way to reach them.
import json
import re

import numpy as np
import pytest
from browser import Keys, browser, needs_browser, one_browser  # noqa: F401
from cli_program import SHIPPED, document, heed, load, needs_program, qkv, random, refused, save

pytestmark = needs_program
EPSILON = 2.0 ** -24  # relative rounding of float32


@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    page = tmp_path_factory.mktemp("view") / "view.html"
    document("view", SHIPPED, "--html", page)
    return page


def rounded(x):
    """[B, T, H, D] as the page has it: float16 after each head is scaled by a power of two to below 2^15."""
    x = x[0].astype(np.float64)
    largest = np.abs(x).max(axis=(0, 2), keepdims=True)
    scale = 2.0 ** (15 - np.frexp(largest)[1])
    return (x * scale).astype(np.float16).astype(np.float64) / scale


def probabilities(q, k, causal=False, scale=None, softcap=0, window=(-1, -1)):
    """[H, Tq, Tk] of [T, H, D] in float64; -1 where a query may not look, and how far float32 may be from each row, relatively."""
    group, D = q.shape[1] // k.shape[1], q.shape[2]
    k = np.repeat(k, group, axis=1)
    scale = D ** -0.5 if scale is None else scale
    s = np.einsum("ihd,jhd->hij", q, k) * scale
    # The page computes logits in float64. lse is float32: its logits are off by at most D + 4 roundings of the sum of
    # |q k| and of the scale; then one exponential, a sum, a logarithm and the rounding of lse itself.
    size = np.einsum("ihd,jhd->hij", np.abs(q), np.abs(k)) * abs(scale)
    bound = EPSILON * ((D + 4) * size.max(-1) + 16)
    if softcap:
        s = softcap * np.tanh(s / softcap)
        bound += EPSILON * 8 * softcap
    Tq, Tk = s.shape[1:]
    i, j = np.arange(Tq)[:, None] + Tk - Tq, np.arange(Tk)[None]
    keep = (j <= i) if causal else np.ones((Tq, Tk), bool)
    keep = keep & ((window[0] < 0) | (j >= i - window[0])) & ((window[1] < 0) | (j <= i + window[1]))
    s = np.where(keep, s, -np.inf)
    top = s.max(-1, initial=-1e300, keepdims=True)
    p = np.exp(s - top)
    total = np.maximum(p.sum(-1, keepdims=True), 1e-300)
    bound += EPSILON * np.abs(top + np.log(total))[..., 0]
    return np.where(keep, p / total, -1), bound


def shown_map(browser, layer, head):
    """What the page computed, whole; -1 where it says that a query may not look."""
    values = browser.js("""
        const [l, h] = arguments, layer = heed.layers[l], out = [];
        for (let q = 0; q < layer.rows; ++q) for (let k = 0; k < layer.cols; ++k)
          out.push(k >= layer.low[q] && k < layer.high[q] ? heed.probability(l, h, q, k) : -1);
        return [layer.rows, layer.cols, out];""", layer, head)
    return np.array(values[2]).reshape(values[:2])


def point_at(browser, q, k):
    """Moves the mouse to a pair and reads what the page says of it."""
    x, y = browser.js("""
        const [x, y] = heed.centre(...arguments), box = document.getElementById('overlay').getBoundingClientRect();
        return [box.left + x, box.top + y];""", q, k)
    browser.point(x, y)
    return readout(browser)


def readout(browser):
    return browser.js("""
        const { query, key, value } = document.getElementById('readout').dataset;
        return { pair: [+query, +key], value: +value, text: document.getElementById('value').textContent,
                 tip: document.getElementById('tip').hidden ? null : document.getElementById('tip-value').textContent };""")


def number(text):
    """0.123 of "12.3 %"."""
    assert text.endswith("%")
    return float(text[:-1].replace("\u2212", "-")) / 100


# Files and errors.

def test_json(tmp_path):
    page = tmp_path / "a.html"
    view = document("view", SHIPPED, "--html", page)
    assert view == {"path": str(page), "bytes": page.stat().st_size, "layers": 6, "heads": 12, "tokens": 371}
    view = document("view", SHIPPED, "--html", page, "--layer", 2, "--heads", "7,0")
    assert (view["layers"], view["heads"]) == (1, 2)
    report = heed("view", SHIPPED, "--html", page).stdout
    assert str(page) in report and "371 tokens" in report and "causal false from the file" in report


def test_the_largest_promised_page_is_small_enough(tmp_path):
    tensors = {}
    for layer in range(6):
        tensors |= qkv(T=430, H=12, Hkv=12, D=32, dtype="F16", prefix=f"layers.{layer}.")
    file = save(tmp_path / "x.safetensors", tensors, {"tokens": json.dumps([f"token{i}" for i in range(430)])})
    assert document("view", file, "--html", tmp_path / "a.html")["bytes"] <= 6_000_000
    assert 'id="lse5"' in (tmp_path / "a.html").read_text()  # computed in the page


def test_the_page_is_self_contained(shipped):
    text = shipped.read_text()
    assert text.isascii()
    assert not re.search(r"https?:|//cdn|@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")|src=", text)
    assert "default-src 'none'" in text and "unsafe" not in text


@pytest.mark.parametrize("tokens, expected", [
    ("nonsense", "metadata tokens is 'nonsense', expected a JSON list of strings"),
    ("{}", "expected a JSON list of strings"), ("[1]", "expected a JSON list of strings"),
    ("[" * 100000, "...', expected a JSON list of strings"),
])
def test_wrong_tokens(tmp_path, tokens, expected):
    file = save(tmp_path / "x.safetensors", qkv(), {"tokens": tokens})
    line = refused(1, "view", file, "--html", tmp_path / "a.html")
    assert line.startswith(f"heed: {file}: ") and expected in line and len(line) < 400
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]


def test_other_tokens_than_keys_are_no_labels(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(), {"tokens": '["a", "b"]'})
    assert "2 tokens for 19 keys" in heed("view", file, "--html", tmp_path / "a.html").stdout


@pytest.mark.parametrize("shape", [{"B": 0}, {"H": 0, "Hkv": 0}])
def test_nothing_to_see(tmp_path, shape):
    file = save(tmp_path / "x.safetensors", qkv(**shape))
    assert "expected something to see" in refused(1, "view", file, "--html", tmp_path / "a.html")


@pytest.mark.parametrize("verb", ["view", "compare"])
def test_a_page_is_written_whole_or_not_at_all(tmp_path, verb):
    file = save(tmp_path / "x.safetensors", qkv(), {"scale": "1"})
    bad = save(tmp_path / "bad.safetensors", qkv(), {"scale": "big"})
    before = file.read_bytes()
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "d.html").mkdir()
    (folder / "old.html").write_bytes(b"old")
    for out in (folder / "missing" / "a.html", folder / "d.html"):
        assert refused(1, verb, file, "--html", out).startswith(f"heed: {out}: ")
    refused(1, verb, bad, "--html", folder / "old.html")
    refused(2, verb, file, "--html", folder / "old.html", "--threads", 0)
    assert sorted(p.name for p in folder.iterdir()) == ["d.html", "old.html"]
    assert (folder / "old.html").read_bytes() == b"old"
    assert "expected another file than the input" in refused(2, verb, file, "--html", file)
    assert file.read_bytes() == before
    assert heed(verb, file, "--html", folder / "old.html").returncode == 0
    assert (folder / "old.html").read_text().endswith("</html>\n")


@pytest.mark.parametrize("verb", ["view", "compare"])
def test_a_full_disk_leaves_nothing(tmp_path, verb):
    import resource

    def small_files():
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    file = save(tmp_path / "x.safetensors", qkv())
    out = tmp_path / "a.html"
    assert refused(1, verb, file, "--html", out, preexec_fn=small_files).startswith(f"heed: {out}: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]


# Numbers.

@needs_browser
def test_hovered_pairs_are_the_attention(browser, shipped):
    tensors, _ = load(SHIPPED)
    generator = np.random.default_rng(7)
    for layer, head in ((0, 3), (2, 8), (5, 11)):
        q, k = (tensors[f"layers.{layer}.{name}"][0].astype(np.float64) for name in "qk")
        expected, bound = (x[head] for x in probabilities(q, k))
        browser.open(shipped, f"#layer={layer}&head={head}", ready=False)
        for q, k in zip(*generator.integers(0, 371, (2, 100)), strict=True):
            got = point_at(browser, int(q), int(k))
            assert got["pair"] == [q, k]
            assert abs(got["value"] - expected[q, k]) <= bound[q] * expected[q, k]
            # Three digits, two below 0.1 %.
            assert number(got["text"]) == pytest.approx(got["value"], rel=0.006 if got["value"] >= 1e-3 else 0.06)
            assert got["tip"] == got["text"]


@needs_browser
def test_rows_add_up(browser, shipped):
    browser.open(shipped, ready=False)
    p = shown_map(browser, 4, 5)
    np.testing.assert_allclose(p.sum(-1), 1, atol=3e-5)


OPTIONS = [
    ([], {}), (["--causal"], {"causal": True}), (["--window", "3,0"], {"window": (3, 0)}),
    (["--window", "-1,2"], {"window": (-1, 2)}), (["--causal", "--window", "4,9"], {"causal": True, "window": (4, 9)}),
    (["--scale", "0.7"], {"scale": 0.7}), (["--scale", "-0.1"], {"scale": -0.1}), (["--softcap", "1.5"], {"softcap": 1.5}),
    (["--causal", "--scale", "2", "--softcap", "3", "--window", "5,5"],
     {"causal": True, "scale": 2, "softcap": 3, "window": (5, 5)}),
]


@needs_browser
@pytest.mark.parametrize("shape", [{}, {"Tk": 31}, {"T": 23, "Tk": 12}])
def test_options_and_shapes(browser, tmp_path, shape):
    file = save(tmp_path / "x.safetensors", qkv(**shape))
    given, _ = load(file)
    for args, options in OPTIONS:
        document("view", file, "--html", tmp_path / "a.html", *args)
        browser.open(tmp_path / "a.html")
        expected, bound = probabilities(rounded(given["q"]), rounded(given["k"]), **options)
        for head in (0, 3):
            got = shown_map(browser, 0, head)
            assert (np.abs(got - expected[head]) <= bound[head][:, None] * np.abs(expected[head])).all(), (args, head)


@needs_browser
@pytest.mark.parametrize("dtype, size", [("F64", 1e12), ("F64", 1e-12), ("F32", 1e5), ("F16", 3e4), ("BF16", 1)])
def test_values_that_float16_cannot_hold(browser, tmp_path, dtype, size):
    tensors = qkv()
    tensors["q"] = (dtype, tensors["q"][1] / abs(tensors["q"][1]).max() * size)
    tensors = {name: (dtype, x) for name, (_, x) in tensors.items()}
    if dtype == "BF16":
        tensors = {name: (dtype, x.astype(np.float32).view(np.uint32) >> 16) for name, (_, x) in tensors.items()}
    file = save(tmp_path / "x.safetensors", tensors)
    document("view", file, "--html", tmp_path / "a.html", "--scale", 1 / size)
    given, _ = load(file)
    if dtype == "BF16":
        given = {name: (x.astype(np.uint32) << 16).view(np.float32) for name, x in given.items()}
    expected, bound = probabilities(rounded(given["q"]), rounded(given["k"]), scale=1 / size)
    browser.open(tmp_path / "a.html")
    got = shown_map(browser, 0, 2)
    assert (np.abs(got - expected[2]) <= bound[2][:, None] * expected[2]).all()


@needs_browser
def test_chosen_layer_and_heads(browser, tmp_path):
    document("view", SHIPPED, "--html", tmp_path / "a.html", "--layer", 3, "--heads", "9,2")
    tensors, _ = load(SHIPPED)
    q, k = (tensors[f"layers.3.{name}"][0].astype(np.float64) for name in "qk")
    expected, bound = probabilities(q, k)
    browser.open(tmp_path / "a.html", "#head=1")
    assert browser.text("map-title") == "Layer 3, head 2"
    assert (np.abs(shown_map(browser, 0, 1) - expected[2]) <= bound[2][:, None] * expected[2]).all()


@needs_browser
def test_layers_of_other_shapes_and_no_tokens(browser, tmp_path):
    tensors = qkv(T=9, prefix="layers.0.") | qkv(T=300, H=2, Hkv=1, prefix="layers.1.") | qkv(T=1, Tk=40, prefix="layers.2.")
    document("view", save(tmp_path / "x.safetensors", tensors), "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    for layer, rows, cols in ((0, 9, 9), (1, 300, 300), (2, 1, 40), (0, 9, 9)):
        browser.js("document.getElementById('layer').value = arguments[0];"
                   "document.getElementById('layer').dispatchEvent(new Event('change'))", layer)
        got = point_at(browser, rows - 1, cols - 1)
        assert got["pair"] == [rows - 1, cols - 1]
        assert got["value"] == pytest.approx(browser.js("return heed.probability(...arguments)", layer,
                                                        browser.js("return heed.state.head"), rows - 1, cols - 1))


@needs_browser
def test_not_a_number_is_shown_as_such(browser, tmp_path):
    tensors = qkv()
    tensors["q"][1][0, 3] = np.nan
    document("view", save(tmp_path / "x.safetensors", tensors), "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html", "#row=3&column=5")
    assert "undefined" in browser.text("value")
    browser.open(tmp_path / "a.html", "#row=4&column=5")
    assert number(browser.text("value")) > 0


@needs_browser
def test_a_pair_behind_the_mask(browser, tmp_path):
    document("view", save(tmp_path / "x.safetensors", qkv()), "--html", tmp_path / "a.html", "--causal")
    browser.open(tmp_path / "a.html", "#row=3&column=5")
    assert browser.text("value") == "\u2014" and "not allowed to look" in browser.text("sentence")
    assert point_at(browser, 2, 9)["tip"] == "not allowed to look"
    browser.open(tmp_path / "a.html", "#row=0&column=0")
    assert browser.text("value").startswith("100")


# Pooled maps.

def pool(p, rows, cols):
    """Shares of attention and the strongest pair of [H, Tq, Tk] by bins; masked pairs count as 0."""
    p = np.maximum(p, 0)
    starts = [-(-np.arange(n) * total // n) for n, total in ((rows, p.shape[1]), (cols, p.shape[2]))]
    sums = np.add.reduceat(np.add.reduceat(p, starts[0], 1), starts[1], 2)
    largest = np.maximum.reduceat(np.maximum.reduceat(p, starts[0], 1), starts[1], 2)
    return sums / np.diff(starts[0], append=p.shape[1])[:, None], largest


@needs_browser
@pytest.mark.parametrize("args, options", [
    ([], {}), (["--causal"], {"causal": True}), (["--causal", "--window", "700,-1", "--softcap", "4"],
                                                 {"causal": True, "window": (700, -1), "softcap": 4})])
def test_pooled_maps(browser, tmp_path, args, options):
    tensors = qkv(T=2301, Tk=2500, H=2, Hkv=1, D=4)
    file = save(tmp_path / "x.safetensors", tensors, {"tokens": json.dumps([f"w{i}" for i in range(2500)])})
    done = heed("view", file, "--html", tmp_path / "a.html", *args)
    assert "pooled into 512 x 512" in done.stdout
    q, k = (tensors[name][1][0].astype(np.float32).astype(np.float64) for name in "qk")
    expected, bound = probabilities(q, k, **options)
    # Sums and maxima of values with the row's bound; f32, then f16.
    bound = bound.max() + 2.0 ** -11 + 8 * EPSILON
    shares, largest = pool(expected, 512, 512)
    browser.open(tmp_path / "a.html", "#head=1")
    for measure, expected in (("mean", shares), ("max", largest)):
        browser.js("document.getElementById('measure').value = arguments[0];"
                   "document.getElementById('measure').dispatchEvent(new Event('change'))", measure)
        for q, k in np.random.default_rng(3).integers(0, 512, (40, 2)):
            got = point_at(browser, int(q), int(k))
            assert got["pair"] == [q, k]
            assert abs(got["value"] - expected[1, q, k]) <= bound * expected[1, q, k]
            assert (got["tip"] == "not allowed to look") <= (expected[1, q, k] == 0)
    sentence = browser.text("sentence")
    first, end = -(-q * 2301 // 512), -(-(q + 1) * 2301 // 512)
    assert f"tokens {first:,}\u2013{end - 1:,} from \u201cw{first + 199}\u201d" in sentence
    np.testing.assert_allclose(shown_map(browser, 0, 0).clip(0).sum(-1), 1, atol=2e-3)
    assert not browser.js("return document.getElementById('text-section').checkVisibility()")


def test_too_many_heads_for_one_page(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=50, H=2000, Hkv=1, D=64))
    line = refused(1, "view", file, "--html", tmp_path / "a.html")
    assert "2000 heads in 1 layers, expected fewer in one page: choose with --layer and --heads" in line
    assert document("view", file, "--html", tmp_path / "a.html", "--heads", "0,1")["heads"] == 2


def test_many_heads_are_pooled_into_the_promised_size(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=600, H=120, Hkv=120, D=16), {"tokens": json.dumps(["\0" * 300] * 600)})
    done = heed("view", file, "--html", tmp_path / "a.html")
    assert re.search(r"pooled into (\d+) x \1\n", done.stdout)
    assert (tmp_path / "a.html").stat().st_size <= 6_000_000


# Bars, text, pickers.

@needs_browser
def test_bars_are_the_rows_largest(browser, shipped):
    tensors, metadata = load(SHIPPED)
    tokens = json.loads(metadata["tokens"])
    q, k = (tensors[f"layers.1.{name}"][0].astype(np.float64) for name in "qk")
    expected, _ = probabilities(q, k)
    bars = """return [...document.querySelectorAll('#bars button')].map((b) =>
              [b.querySelector('bdi').textContent, b.querySelector('.share').textContent])"""
    browser.open(shipped, "#layer=1&head=4&row=57&column=0", ready=False)
    row = expected[4, 57]
    assert [token for token, _ in browser.js(bars)] == [tokens[j] for j in np.argsort(-row)[:14]]
    for (_, share), value in zip(browser.js(bars), np.sort(row)[::-1], strict=False):
        assert number(share) == pytest.approx(value, rel=0.006 if value > 0.001 else 0.06)
    browser.js("document.getElementById('looked-at').click()")
    column = expected[4, :, 0]
    assert [token for token, _ in browser.js(bars)] == [tokens[i] for i in np.argsort(-column)[:14]]
    browser.js("document.querySelector('#bars button').click()")
    assert browser.js("return heed.state.q") == np.argmax(column)


@needs_browser
def test_the_text_reads_as_text(browser, shipped):
    browser.open(shipped, ready=False)
    words = browser.text("words")
    assert "alice was beginning to get very tired of sitting by her sister on the bank, and" in words
    assert "she had peeped into the book" in words
    browser.js("document.querySelector('#words [data-at=\"30\"]').click()")
    assert browser.js("return heed.state.q") == 30 and "##ped" in browser.text("row-title")


@needs_browser
def test_every_head_has_a_thumbnail(browser, shipped):
    browser.open(shipped)
    thumbs = browser.js("""return [...document.querySelectorAll('.thumb')].map((b) => [b.getAttribute('aria-label'),
        new Set(b.firstChild.getContext('2d').getImageData(0, 0, 64, 64).data).size])""")
    assert len(thumbs) == 72
    for i, (label, colors) in enumerate(thumbs):
        assert re.fullmatch(rf"Layer {i // 12}, head {i % 12}: .+", label) and colors > 20
    browser.js("document.querySelectorAll('.thumb')[29].click()")
    assert browser.text("map-title") == "Layer 2, head 5"
    assert browser.js("return document.querySelectorAll('.thumb[aria-pressed=true]').length") == 1


# Keys.

@needs_browser
def test_the_keyboard_suffices(browser, shipped):
    browser.open(shipped)
    seen = []
    for _ in range(40):
        browser.type(Keys.TAB)
        seen.append(browser.js("const a = document.activeElement; return a.id || a.className"))
        assert browser.js("return getComputedStyle(document.activeElement).outlineStyle") != "none", seen
        if seen[-1] == "thumb":
            break
    assert [name for name in seen if name] [:13] == [
        "theme", "save", "help-open", "zoom-out", "zoom-reset", "zoom-in", "layer", "head", "scale", "norm", "overlay",
        "looks-at", "looked-at"]
    assert seen[-1] == "thumb"
    browser.type(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert browser.text("map-title") == "Layer 1, head 1"
    assert browser.js("return document.activeElement.getAttribute('aria-pressed')") == "true"

    browser.open(shipped, "#layer=2&head=11&row=10&column=20")
    browser.js("document.getElementById('overlay').focus()")
    browser.type(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_LEFT)
    assert readout(browser)["pair"] == [9, 21]
    browser.type(Keys.HOME)
    assert readout(browser)["pair"] == [9, 0]
    browser.type(Keys.ARROW_LEFT)
    assert readout(browser)["pair"] == [9, 0]
    browser.type(Keys.END)
    browser.chord(Keys.CONTROL, Keys.END)
    assert readout(browser)["pair"] == [370, 370]
    browser.chord(Keys.CONTROL, Keys.HOME)
    assert readout(browser)["pair"] == [0, 370]
    browser.type(Keys.ENTER)
    assert number(browser.text("value")) == number(browser.js("return document.querySelector('#bars .share').textContent"))
    for keys, title in (("]", "Layer 3, head 0"), ("[", "Layer 2, head 11"), ("{", "Layer 1, head 11"),
                        ("}", "Layer 2, head 11"), (Keys.PAGE_DOWN, "Layer 3, head 11"), (Keys.PAGE_UP, "Layer 2, head 11"),
                        ("}}}}}", "Layer 5, head 11"), ("]", "Layer 5, head 11"), ("{{{{{{{", "Layer 0, head 11")):
        browser.type(keys)
        assert browser.text("map-title") == title
    zoom = "return parseFloat(document.getElementById('zoom-reset').textContent)"
    browser.type("++")
    assert browser.js(zoom) > 2
    before = browser.js("return heed.centre(0, 0)")
    browser.chord(Keys.SHIFT, Keys.ARROW_RIGHT)
    assert browser.js("return heed.centre(0, 0)") != before
    browser.type("-")
    assert 1 < browser.js(zoom) < 2
    browser.type("0")
    assert browser.js(zoom) == 1
    browser.type("?")
    assert browser.js("return document.getElementById('help').open")
    browser.type(Keys.ESCAPE)
    assert not browser.js("return document.getElementById('help').open")


@needs_browser
def test_the_pair_is_announced_and_linked(browser, shipped):
    browser.open(shipped, "#layer=2&head=5&row=10&column=20", ready=False)
    browser.js("document.getElementById('overlay').focus()")
    browser.type(Keys.ARROW_DOWN)
    browser.wait("return location.hash.includes('row=11')")
    browser.wait("return document.getElementById('live').textContent !== ''")
    assert re.fullmatch(r"by \(\d+\) gives .+% of its attention to .+ \(20\)".replace(r"by \(\d+\)", r".+ \(11\)"),
                        browser.text("live"))
    shown = readout(browser)
    browser.open(shipped, browser.js("return location.hash"), ready=False)
    assert readout(browser) == shown and browser.text("map-title") == "Layer 2, head 5"


@needs_browser
@pytest.mark.parametrize("fragment", ["#layer=99&head=-1&row=1e9&column=x", "#layer=&row=999999", "#<img src=x>", "#scale=bogus"])
def test_a_wrong_link_opens_all_the_same(browser, shipped, fragment):
    browser.open(shipped, fragment, ready=False)
    assert browser.text("value").endswith("%")


# Looks.

@needs_browser
def test_every_width(browser, shipped):
    for width, scale in ((360, 3), (600, 1), (768, 2), (1024, 1), (1180, 1), (1400, 1.25), (2560, 2), (400, 1)):
        browser.size(width, 900, scale)
        if width == 360:
            browser.open(shipped, ready=False)
        browser.wait("""return Math.abs(document.getElementById('heat').width / devicePixelRatio
                        - document.getElementById('stage').clientWidth) < 1""")
        assert browser.js("return document.documentElement.scrollWidth") <= width
        if width > 1100:  # cells of a pixel can be hit
            got = point_at(browser, 123, 45)
            assert got["pair"] == [123, 45]
            assert got["value"] == pytest.approx(browser.js("return heed.probability(0, 0, 123, 45)"))


@needs_browser
def test_light_and_dark(browser, shipped):
    paper = "return getComputedStyle(document.documentElement).backgroundColor"
    pixel = """const c = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
               c.drawImage(document.getElementById('heat'), 0, 0, 300, 150);
               const d = c.getImageData(60, 60, 200, 80).data;
               return d.reduce((sum, x) => sum + x, 0) / d.length"""

    def brightness():
        return sum(map(int, re.findall(r"\d+", browser.js(paper))[:3])) / 3

    browser.open(shipped)
    assert brightness() > 220
    light = browser.js(pixel)
    browser.prefer("dark")
    browser.wait("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert brightness() < 40
    browser.wait(f"return (() => {{ {pixel} }})() < {0.7 * light}")  # alpha is a quarter
    browser.js("document.getElementById('theme').click()")  # auto, then light
    assert brightness() > 220 and browser.text("theme") == "Theme: light"
    browser.js("document.getElementById('theme').click()")
    assert brightness() < 40 and browser.text("theme") == "Theme: dark"


@needs_browser
def test_zoom_by_wheel_and_drag(browser, shipped):
    browser.open(shipped, ready=False)
    x, y = browser.js("""const [x, y] = heed.centre(100, 200), box = document.getElementById('overlay').getBoundingClientRect();
                         return [Math.round(box.left + x), Math.round(box.top + y)]""")
    browser.point(x, y)
    pair = readout(browser)["pair"]
    for _ in range(12):
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": -120})
    browser.wait("return parseFloat(document.getElementById('zoom-reset').textContent) > 5")
    assert readout(browser)["pair"] == pair  # what is under the mouse stays there
    before = browser.js("return heed.centre(100, 200)")
    for kind, dx in (("mousePressed", 0), ("mouseMoved", 15), ("mouseMoved", 30), ("mouseReleased", 30)):
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {
            "type": kind, "x": x + dx, "y": y, "button": "left", "buttons": 1, "clickCount": 1})
    after = browser.js("return heed.centre(100, 200)")
    assert after[0] - before[0] == pytest.approx(30, abs=1) and after[1] == pytest.approx(before[1], abs=1)


# Hostile files.

EVIL = ["</script><script>window.broken=1</script>", "<img src=x onerror=window.broken=1>", "\"'`&amp;${window.broken=1}", "a\nb\tc",
        "\u2028\u2029", "x" * 100000, "\U0001f600\U0001d504", "\u202egnp.exe", "", " ", "<!--", "]]>", "\0", "\\u003c", "\ufeff",
        "@SCRIPT@", "constructor", "__proto__", "\u0120the"]


@needs_browser
def test_hostile_tokens_are_text(browser, tmp_path):
    folder = tmp_path / "<img src=x onerror=window.broken=1>'\"&"
    folder.mkdir()
    name = "</title><script>window.broken=1<.safetensors".replace("/", "\u2215")
    tensors = qkv(T=len(EVIL), prefix="<b onmouseover=window.broken=1>.")
    file = save(folder / name, tensors, {"tokens": json.dumps(EVIL), "model": "<script>window.broken=1</script>"})
    document("view", file, "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    shown = []
    for q in range(len(EVIL)):
        point_at(browser, q, q)
        shown.append(browser.js("return document.querySelector('#sentence b').textContent"))
        assert browser.text("tip-pair") == f"{shown[-1]} \u2192 {shown[-1]}"
    assert shown[:3] == EVIL[:3]
    assert shown[3] == "a\u21b5b\u21e5c" and shown[4] == "\\u{2028}\\u{2029}"
    assert shown[5] == "x" * 200 + "\u2026"
    assert shown[6] == EVIL[6] and shown[7] == "\\u{202e}gnp.exe"
    assert shown[8:12] == ["(empty)", "\u2423", "<!--", "]]>"]
    assert shown[12:] == ["\\u{0}", "\\u003c", "\\u{feff}", "@SCRIPT@", "constructor", "__proto__", "the"]
    assert browser.js("return window.broken") is None
    assert browser.js("return document.querySelectorAll('img, b[onmouseover]').length") == 0
    assert "<b onmouseover" in browser.text("map-title") and "<script>window.broken=1</script>" in browser.text("subtitle")


@needs_browser
def test_the_policy_runs_nothing_else(one_browser, shipped):
    one_browser.fresh()
    one_browser.open(shipped, ready=False)
    one_browser.js("""
        const script = document.createElement('script');
        script.textContent = 'window.broken = 1';
        document.body.append(script);
        document.body.insertAdjacentHTML('beforeend', '<img src="data:," onerror="window.broken = 2">');""")
    assert one_browser.js("return window.broken") is None
    assert any("Content Security Policy" in entry["message"] for entry in one_browser.console())


# The page of compare.

@needs_browser
def test_the_compare_page(browser, tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=150))
    page = tmp_path / "a.html"
    rows = document("compare", file, "--html", page)["rows"]
    browser.open(page)
    assert browser.js("return document.querySelectorAll('#charts section').length") == 3
    assert browser.js("return document.querySelectorAll('#charts li').length") == 3 * len(rows)
    click = "document.querySelectorAll('#table th button')[arguments[0]].click()"
    cells = "return [...document.querySelectorAll('#table tbody tr')].map((r) => r.cells[arguments[0]].textContent)"
    browser.js(click, 7)
    errors = [float(x) for x in browser.js(cells, 7)]
    assert errors == sorted(errors) and errors[0] < errors[-1]
    browser.js(click, 7)
    assert [float(x) for x in browser.js(cells, 7)] == errors[::-1]
    assert browser.js("return document.querySelectorAll('#table th')[7].getAttribute('aria-sort')") == "descending"
    seconds = sorted(row["seconds"] for row in rows)
    browser.js(click, 3)
    widths = browser.js("return [...document.querySelectorAll('#charts section:first-child .bar')].map((b) => parseFloat(b.style.width))")
    np.testing.assert_allclose(widths, 100 * np.array(seconds) / seconds[-1], rtol=1e-3)
    for width in (360, 1400):
        browser.size(width, 900)
        assert browser.js("return document.documentElement.scrollWidth") <= width


@needs_browser
def test_the_compare_page_without_scripts(browser, tmp_path):
    page = tmp_path / "a.html"
    assert heed("compare", save(tmp_path / "x.safetensors", qkv()), "--html", page).returncode == 0
    browser.scripts(False)
    browser.open(page, ready=False)
    browser.scripts(True)
    table = browser.js("return document.getElementById('table').innerText")
    assert "rms error" in table and "attention" in table
    assert browser.js("return document.querySelectorAll('#charts section').length") == 0


@needs_browser
def test_the_compare_page_of_a_hostile_name_and_of_nan(browser, tmp_path):
    folder = tmp_path / "<img src=x onerror=window.broken=1>"
    folder.mkdir()
    tensors = qkv()
    tensors["v"][1][0, 3] = np.nan
    file = save(folder / "'\"&x.safetensors", tensors)
    assert heed("compare", file, "--html", tmp_path / "a.html").returncode == 0
    browser.open(tmp_path / "a.html")
    assert browser.js("return document.querySelectorAll('img').length") == 0 and str(file) in browser.driver.title
