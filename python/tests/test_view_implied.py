# Tests of the maps that linear mechanisms imply, on the page of `heed view` in a browser, against float64.
import heed as library
import numpy as np
import pytest
from browser import needs_browser, number, readout, shown_map
from cli_program import document, load, needs_program, qkv, save
from test_view import CELLS, rounded

pytestmark = needs_program


def implied_shares(name, q, k, causal, heads):
    """[H, T, T] by the mechanism itself: with unit vectors as values, an output is a row of weights, 0 where masked."""
    q, k = (x[None, :, heads] for x in (q, k))
    v = np.broadcast_to(np.eye(q.shape[1])[None, :, None], (1, q.shape[1], len(heads), q.shape[1]))
    options = {"causal": causal} if name == "linear_attention" else {}
    if name == "retention":
        options["log_decay"] = np.log1p(-2.0 ** (-5 - np.array(heads)))
    weights = getattr(library, name)(q, k, v, **options)[0].transpose(1, 0, 2)
    if name == "retention":
        weights = np.abs(weights) / np.abs(weights).sum(-1, keepdims=True)
    return weights


@needs_browser
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [None, [3, 1]])
def test_implied_rows_are_what_the_mechanism_sums_with(browser, tmp_path, causal, heads):
    T = 23
    tensors = qkv(T=T)
    tensors["q"] = ("F32", 3000 * tensors["q"][1])  # large enough for powers of two to matter
    tensors["k"] = ("F32", tensors["k"][1] / 3000)
    file = save(tmp_path / "x.safetensors", tensors)
    args = [*(["--causal"] if causal else []), *(["--heads", ",".join(map(str, heads))] if heads else [])]
    document("view", file, "--html", tmp_path / "a.html", *args)
    given, _ = load(file)
    q, k = rounded(given["q"]), np.repeat(rounded(given["k"]), 2, axis=1)
    browser.open(tmp_path / "a.html")
    names = browser.js("return heed.layers[0].implied.map((m) => m.name)")
    assert set(names) == {"linear_attention", "based", "retention"}
    assert browser.js("return [...document.getElementById('mechanism').options].map((o) => o.value)") == names
    for m, name in enumerate(names):
        expected = implied_shares(name, q, k, causal, heads or [0, 1, 2, 3])
        for h in range(len(expected)):
            rows = browser.js(f"return Array.from({{ length: {T} }}, (_, i) => heed.implied(0, {h}, {m}, i))")
            for i, row in enumerate(rows):
                assert len(row) == (T if name == "linear_attention" and not causal else i + 1)
                np.testing.assert_allclose(row, expected[h, i, :len(row)], rtol=1e-9, atol=1e-13)
                assert (expected[h, i, len(row):] == 0).all()


def choose_mechanism(browser, name):
    browser.js("document.getElementById('mechanism').value = arguments[0];"
               "document.getElementById('mechanism').dispatchEvent(new Event('change'))", name)
    browser.wait("return document.getElementById('implied').dataset.painted === 'true'")


@needs_browser
@pytest.mark.parametrize("causal", [False, True])
def test_the_implied_map_has_the_colors_and_the_axes_of_the_exact_one(browser, tmp_path, causal):
    T = 23
    document("view", save(tmp_path / "x.safetensors", qkv(T=T)), "--html", tmp_path / "a.html",
             *(["--causal"] if causal else []))
    browser.open(tmp_path / "a.html", "#head=0&row=9&column=4")
    exact, colors = shown_map(browser, 0, 0), np.array(browser.js(CELLS, "heat", "centre", T))
    seen = []
    for m, name in enumerate(browser.js("return heed.layers[0].implied.map((m) => m.name)")):
        choose_mechanism(browser, name)
        implied = np.full((T, T), -1.0)
        for i, row in enumerate(browser.js(f"return Array.from({{ length: {T} }}, (_, i) => "
                                           f"heed.implied(0, 0, {m}, i))")):
            implied[i, :len(row)] = row
        painted = np.array(browser.js(CELLS, "implied", "impliedCentre", T))
        masked = implied < 0
        if causal or name != "linear_attention":
            assert (masked == np.triu(np.ones((T, T), bool), 1)).all() and len(np.unique(painted[masked], axis=0)) == 1
        # Both maps have one scale: larger is darker. Values above the largest of the exact map have its color.
        shares = np.concatenate([exact[exact >= 0], implied[~masked]])
        light = np.concatenate([colors[exact >= 0], painted[~masked]]) @ [0.3, 0.59, 0.11]
        order = np.argsort(shares)
        assert (np.diff(light[order]) <= 1.5).all(), name  # rounded to 8 bits
        strongest = colors[np.unravel_index(exact.argmax(), exact.shape)]
        assert (painted[implied >= exact.max()] == strongest).all()
        # The page shows the total variation distance of the two distributions, over the union of their keys.
        moved = np.abs(np.maximum(exact, 0) - np.maximum(implied, 0)).sum(1).mean() / 2
        assert number(browser.text("distance")) == pytest.approx(moved, rel=0.006)
        shown = browser.js("return document.querySelector('#implied-pair b:last-of-type').textContent")
        assert number(shown) == pytest.approx(implied[9, 4], rel=0.006 if implied[9, 4] >= 1e-3 else 0.06)
        seen.append(painted)
    assert (seen[0] != seen[1]).any() and (seen[1] != seen[2]).any()


@needs_browser
def test_the_implied_map_is_pointed_at_and_follows_the_zoom(browser, tmp_path):
    document("view", save(tmp_path / "x.safetensors", qkv(T=23)), "--html", tmp_path / "a.html", "--causal")
    browser.open(tmp_path / "a.html", "#row=9&column=4")
    browser.wait("return document.getElementById('implied').dataset.painted === 'true'")

    def point(q, k):
        x, y = browser.js("""const overlay = document.getElementById('implied-overlay');
            overlay.scrollIntoView({ block: 'center' });
            const box = overlay.getBoundingClientRect(), [x, y] = heed.impliedCentre(...arguments);
            return [box.left + x, box.top + y]""", q, k)
        browser.point(x, y)
        return readout(browser)["pair"]

    assert point(12, 7) == [12, 7] and point(22, 0) == [22, 0]
    assert browser.js("return heed.centre(3, 5)") == pytest.approx(browser.js("return heed.impliedCentre(3, 5)"))
    before = browser.js("return heed.centre(3, 5)")
    browser.js("document.getElementById('zoom-in').click()")
    assert browser.js("return heed.centre(3, 5)") != before
    assert browser.js("return heed.centre(3, 5)") == pytest.approx(browser.js("return heed.impliedCentre(3, 5)"))


@needs_browser
@pytest.mark.parametrize("causal", [False, True])
def test_the_page_opens_on_the_head_with_most_to_see(browser, tmp_path, causal):
    """Heads that are even, local or on one token rank below a head that finds tokens by their content."""
    T = 64
    partner = np.random.default_rng(5).permutation(T)
    partner = np.minimum(partner, np.arange(T)) if causal else partner
    unit, flat = 30 * np.eye(T), np.zeros((T, T))
    sink = flat.copy()
    sink[5] = 30
    heads = [(flat, flat), (unit, unit), (np.ones((T, T)), sink), (30 * np.eye(T)[partner], np.eye(T)), (flat, flat)]
    q, k = (np.stack([head[i] for head in heads], axis=1)[None] for i in range(2))
    tensors = {"layers.0.q": ("F32", q[:, :, :2]), "layers.0.k": ("F32", k[:, :, :2]),
               "layers.0.v": ("F32", k[:, :, :2]), "layers.1.q": ("F32", q[:, :, 2:]),
               "layers.1.k": ("F32", k[:, :, 2:]), "layers.1.v": ("F32", k[:, :, 2:])}
    document("view", save(tmp_path / "x.safetensors", tensors), "--html", tmp_path / "a.html", "--scale", 1,
             *(["--causal"] if causal else []))
    browser.open(tmp_path / "a.html", ready=False)
    assert browser.text("map-title") == "Layer 1, head 1"
    structure = browser.js("return heed.layers.map((each) => each.structure).flat()")
    assert np.argmax(structure) == 3 and structure[3] > 1 and max(structure[:3]) < 0.5
    browser.open(tmp_path / "a.html", "#layer=0&head=1", ready=False)
    assert browser.text("map-title") == "Layer 0, head 1"


@needs_browser
def test_other_queries_than_keys_imply_nothing(browser, tmp_path):
    document("view", save(tmp_path / "x.safetensors", qkv(T=9, Tk=12)), "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    assert not browser.js("return document.getElementById('implied-section').checkVisibility()")
