# Tests of `heed view`: output, errors, and in a browser the numbers of its page against float64.
import json
import re

import numpy as np
import pytest
from browser import choose, needs_browser, number, places, point_at, readout, shown_map
from cli_program import SHIPPED, document, heed, load, needs_program, qkv, random, refused, save

pytestmark = needs_program
EPSILON = 2.0 ** -24  # relative rounding of float32
# The colors of the cells of a map, by query and key.
CELLS = """const [id, centre, T] = arguments;
    const canvas = document.getElementById(id), ratio = canvas.width / canvas.clientWidth;
    const copy = new OffscreenCanvas(canvas.width, canvas.height);
    const context = copy.getContext('2d', { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    return Array.from({ length: T }, (_, q) => Array.from({ length: T }, (_, k) => {
        const [x, y] = heed[centre](q, k);  // beside the middle, where a number may stand
        const pixel = context.getImageData(Math.round((x + 5) * ratio), Math.round((y + 5) * ratio), 1, 1);
        return [...pixel.data].slice(0, 3); }));"""


def rounded(x):
    """[B, T, H, D] as the page has it: float16 after each head is scaled by a power of two to below 2^15."""
    x = x[0].astype(np.float64)
    largest = np.abs(x).max(axis=(0, 2), keepdims=True)
    scale = 2.0 ** (15 - np.frexp(largest)[1])
    return (x * scale).astype(np.float16).astype(np.float64) / scale


def probabilities(q, k, causal=False, scale=None, softcap=0, window=(-1, -1)):
    """Weights [H, Tq, Tk] of [T, H, D] in float64, -1 where masked, and the relative error of float32 in each row."""
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
        pairs = generator.integers(0, 371, (100, 2)).tolist()
        for (q, k), place in zip(pairs, places(browser, pairs), strict=True):
            browser.point(*place)
            got = readout(browser)
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
    (["--scale", "0.7"], {"scale": 0.7}), (["--scale", "-0.1"], {"scale": -0.1}),
    (["--softcap", "1.5"], {"softcap": 1.5}), (["--causal", "--scale", "2", "--softcap", "3", "--window", "5,5"],
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
    tensors = qkv(T=9, prefix="layers.0.") | qkv(T=300, H=2, Hkv=1, prefix="layers.1.") | qkv(
        T=1, Tk=40, prefix="layers.2.")
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


# Pairs that a pattern keeps.

def longformer(Tq, Tk):
    """[Tq, Tk] of longformer(4, [0, 9])."""
    i, j = np.arange(Tq)[:, None] + Tk - Tq, np.arange(Tk)[None]
    return (abs(i - j) <= 2) | np.isin(i, (0, 9)) | np.isin(j, (0, 9))


def kept_cells(browser, layer, head):
    """The page's shading of pairs, 255 where all are kept."""
    shape = browser.js("return [heed.layers[arguments[0]].rows, heed.layers[arguments[0]].cols]", layer)
    return np.array(browser.js("return [...heed.layers[arguments[0]].keptCells(arguments[1])]", layer,
                               head)).reshape(shape)


def test_the_density_is_printed(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(prefix="layers.0.") | qkv(prefix="layers.1."))
    args = ("view", file, "--html", tmp_path / "a.html", "--pattern", "longformer(4, [0,9])")
    keep = longformer(19, 19)
    view = document(*args)
    assert list(view)[-2:] == ["pattern", "density"]
    assert view["pattern"] == "longformer(window=4, tokens=[0, 9])" and view["density"] == pytest.approx(keep.mean())
    assert document(*args, "--causal")["density"] == pytest.approx(keep[np.tril_indices(19)].mean())
    report = heed(*args).stdout
    assert report.count(f"longformer(window=4, tokens=[0, 9]) keeps {100 * keep.mean():.1f} % of the pairs") == 1
    blobs = r'id="kept\d'
    assert len(re.findall(blobs, (tmp_path / "a.html").read_text())) == 1, "layers that keep the same share it"
    document("view", file, "--html", tmp_path / "a.html")
    assert not re.findall(blobs, (tmp_path / "a.html").read_text())


@needs_browser
@pytest.mark.parametrize("args, options",
                         [([], {}), (["--causal", "--window", "12,-1"], {"causal": True, "window": (12, -1)})])
def test_what_a_pattern_drops_is_shaded_over_the_map_of_attention_without_it(browser, tmp_path, args, options):
    T = 23
    file = save(tmp_path / "x.safetensors", qkv(T=T))
    given, _ = load(file)
    document("view", file, "--html", tmp_path / "a.html", "--pattern", "longformer(4, [0,9])", *args)
    browser.open(tmp_path / "a.html", "#head=1")
    expected, bound = probabilities(rounded(given["q"]), rounded(given["k"]), **options)
    got = shown_map(browser, 0, 1)
    assert (np.abs(got - expected[1])
            <= bound[1][:, None] * np.abs(expected[1])).all(), "the map is that without the pattern"
    keep, sees = longformer(T, T), expected[1] >= 0
    assert (kept_cells(browser, 0, 1)[sees] == 255 * keep[sees]).all()
    shares = [number(x) for x in re.findall(r"\d[\d.]*\u2009%", browser.text("kept-line"))]
    assert shares == pytest.approx([keep[sees].mean(), np.where(keep & sees, expected[1], 0).sum(-1).mean()], rel=6e-3)
    assert "longformer(window=4, tokens=[0, 9])" in browser.text("kept-line")
    # Pixels of what is dropped change with the switch, and those alone.
    shaded = np.array(browser.js(CELLS, "heat", "centre", T))
    choose(browser, "pattern", "hide")
    plain = np.array(browser.js(CELLS, "heat", "centre", T))
    assert ((shaded != plain).any(-1) == (sees & ~keep)).all()
    browser.wait("return location.hash.includes('pattern=hide')")
    assert not browser.js("return document.getElementById('dropped-key').checkVisibility()")
    browser.open(tmp_path / "a.html", "#head=1&pattern=hide")
    np.testing.assert_array_equal(browser.js(CELLS, "heat", "centre", T), plain)


@needs_browser
def test_words_say_what_a_pattern_drops(browser, tmp_path):
    document("view", save(tmp_path / "x.safetensors", qkv(T=23)), "--html", tmp_path / "a.html", "--pattern",
             "atrous(2)", "--causal")
    browser.open(tmp_path / "a.html", "#row=7&column=2")
    assert "the pattern drops this" in browser.text("sentence")
    bars = browser.js("return [...document.querySelectorAll('#bars li')].map((x) => "
                      "[x.querySelector('bdi').textContent, x.querySelector('.bar').classList.contains('dropped')])")
    assert len(bars) == 8 and all(dropped == (int(token) % 2 == 0) for token, dropped in bars)
    point_at(browser, 7, 4)
    assert "the pattern drops this" in browser.text("tip-where")
    for q, k in ((7, 3), (7, 8)):  # kept, and nobody's to keep
        point_at(browser, q, k)
        assert "pattern" not in browser.text("sentence") + browser.text("tip-where")
    choose(browser, "pattern", "hide")
    point_at(browser, 7, 4)
    assert "pattern" not in browser.text("sentence") + browser.text("tip-where")


@needs_browser
def test_heads_have_their_own_sets(browser, tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=21))
    document("view", file, "--html", tmp_path / "a.html", "--pattern",
             "per_head([atrous(1), atrous(2), atrous(3), atrous(4)])")
    browser.open(tmp_path / "a.html")
    i, j = np.arange(21)[:, None], np.arange(21)[None]
    for head in range(4):
        np.testing.assert_array_equal(kept_cells(browser, 0, head), 255 * ((i - j) % (head + 1) == 0))
        choose(browser, "head", head)
        assert f"keeps {100 * ((i - j) % (head + 1) == 0).mean():.0f}" in browser.text("kept-line")


@needs_browser
def test_a_page_without_a_pattern_has_no_switch(browser, shipped):
    browser.open(shipped, "#pattern=hide", ready=False)
    for name in ("pattern-label", "dropped-key", "kept-line"):
        assert not browser.js("return document.getElementById(arguments[0]).checkVisibility()", name)


@needs_browser
def test_what_a_pattern_keeps_of_pooled_maps(browser, tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=2301, Tk=2500, H=2, Hkv=1, D=4))
    done = heed("view", file, "--html", tmp_path / "a.html", "--pattern", "longformer(4, [0,9])", "--causal")
    assert "pooled into 512 x 512" in done.stdout
    browser.open(tmp_path / "a.html", "#head=1&row=300&column=310")
    i, j = np.arange(2301)[:, None] + 199, np.arange(2500)[None]
    sees = np.broadcast_to(j <= i, (2301, 2500))
    counts = [pool((x & sees)[None].astype(float), 512, 512)[0][0] for x in (longformer(2301, 2500), sees)]
    share = np.divide(255 * counts[0], counts[1], out=np.full((512, 512), 255.0), where=counts[1] > 0)
    got = kept_cells(browser, 0, 1)
    np.testing.assert_allclose(got, share, atol=1.001)
    assert ((got == 0) == (share == 0)).all()
    q, k = np.argwhere((got > 0) & (got < 255))[77]
    browser.open(tmp_path / "a.html", f"#head=1&row={q}&column={k}")
    assert re.search(r"; the pattern keeps \d[\d.]*\u2009% of these pairs", browser.text("sentence"))


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
        for q, k in np.random.default_rng(3).integers(0, 512, (15, 2)):
            got = point_at(browser, int(q), int(k))
            assert got["pair"] == [q, k]
            assert abs(got["value"] - expected[1, q, k]) <= bound * expected[1, q, k]
            assert (got["tip"] == "not allowed to look") <= (expected[1, q, k] == 0)
    sentence = browser.text("sentence")
    first, end = -(-q * 2301 // 512), -(-(q + 1) * 2301 // 512)
    assert f"tokens {first:,}\u2013{end - 1:,} from \u201cw{first + 199}\u201d" in sentence
    sums = browser.js("""return Array.from({ length: 512 }, (_, q) => {
        let sum = 0;
        for (let k = 0; k < 512; ++k) sum += heed.probability(0, 0, q, k);
        return sum; })""")
    np.testing.assert_allclose(sums, 1, atol=2e-3)
    assert not browser.js("return document.getElementById('text-section').checkVisibility()")


@needs_browser
def test_a_hundred_thousand_tokens_open_at_once(browser, tmp_path):
    tensors = {name: ("F16", random(100_000, 1, 16, seed=i)) for i, name in enumerate("qkv")}
    file = save(tmp_path / "x.safetensors", tensors, {"tokens": json.dumps(["word"] * 100_000)})
    # A window keeps the test short; the page is as large as without.
    view = document("view", file, "--html", tmp_path / "a.html", "--causal", "--window", "2000,0")
    assert view["tokens"] == 100_000 and view["bytes"] <= 2_000_000
    assert browser.open(tmp_path / "a.html", ready=False) < 3
    assert browser.text("value").endswith("%") and "100,000 tokens" in browser.text("subtitle")
    got = point_at(browser, 300, 300)
    assert got["pair"] == [300, 300] and 0.03 < got["value"] < 0.07  # half of 195 keys of 2001


def test_too_many_heads_for_one_page(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=50, H=2000, Hkv=1, D=64))
    line = refused(1, "view", file, "--html", tmp_path / "a.html")
    assert "2000 heads in 1 layers, expected fewer in one page: choose with --layer and --heads" in line
    assert document("view", file, "--html", tmp_path / "a.html", "--heads", "0,1")["heads"] == 2


def test_many_heads_are_pooled_into_the_promised_size(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=600, H=120, Hkv=120, D=16),
                {"tokens": json.dumps(["\0" * 300] * 600)})
    done = heed("view", file, "--html", tmp_path / "a.html")
    assert re.search(r"pooled into (\d+) x \1\n", done.stdout)
    assert (tmp_path / "a.html").stat().st_size <= 6_000_000


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
