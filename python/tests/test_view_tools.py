# The tools of the page of attention, in a browser: finding tokens, choosing and sorting heads, saving the shown map.
import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from browser import Keys, choose, click, needs_browser, readout, shown_map, write
from cli_program import SHIPPED, document, load, needs_program, qkv, save
from test_pages import EVIL
from test_view import CELLS, probabilities, rounded

pytestmark = [needs_program, needs_browser]


@pytest.fixture(scope="module")
def shipped_tokens():
    return json.loads(load(SHIPPED)[1]["tokens"])


# Finding tokens.

FOUND = "const { rows, columns } = heed.found(); return [[...rows], [...columns]]"


def test_found_tokens_are_marked_on_both_axes(browser, shipped, shipped_tokens):
    browser.open(shipped, "#row=0&column=0", ready=False)
    for text, wanted in (("alice", "alice"), ("ALICE", "alice"), (" Rabbit ", "rabbit"), ("##", "##"), ("he", "he")):
        write(browser, "find", text)
        expected = [i for i, token in enumerate(shipped_tokens) if wanted in token]
        assert browser.js(FOUND) == [expected, expected] and len(expected) > 2
        assert browser.text("found") == f"{len(expected)} rows"
        assert browser.js("return [...document.querySelectorAll('#words .found')].map((x) => "
                          "+x.dataset.at)") == expected
    write(browser, "find", "no such token")
    assert browser.text("found") == "nothing found" and browser.js(FOUND) == [[], []]
    assert browser.js("return document.getElementById('find-next').disabled")
    write(browser, "find", " ")
    assert browser.js("return heed.found()") is None and browser.text("found") == ""


def test_a_number_finds_a_position(browser, tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=9, Tk=12))
    document("view", file, "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html", "#find=%235")
    assert browser.js(FOUND) == [[2], [5]]  # query 2 has position 5
    write(browser, "find", "#1")
    assert browser.js(FOUND) == [[], [1]]
    write(browser, "find", "1")  # there are no tokens
    assert browser.js(FOUND) == [[], []]


def test_marks_are_painted_where_the_tokens_are(browser, shipped, shipped_tokens):
    alpha = """const canvas = document.getElementById('overlay'), ratio = canvas.width / canvas.clientWidth;
        const copy = new OffscreenCanvas(canvas.width, canvas.height);
        const context = copy.getContext('2d', { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        return arguments[0].map(([q, k]) => { const [x, y] = heed.centre(q, k);
            return context.getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data[3]; })"""
    browser.open(shipped, "#row=0&column=0", ready=False)
    marked = [i for i, token in enumerate(shipped_tokens) if token == "alice"]
    others = [marked[1] - 9, marked[1] + 9]
    assert not {*others} & {i for m in marked for i in (m - 1, m, m + 1)}
    pairs = [(marked[1], others[0]), (others[1], marked[1]), (marked[1], marked[2]), (others[0], others[1])]
    assert browser.js(alpha, pairs) == [0, 0, 0, 0]
    write(browser, "find", "alice")
    row, column, both, neither = browser.js(alpha, pairs)
    assert neither == 0 < row == column < both
    write(browser, "find", "")
    assert browser.js(alpha, pairs) == [0, 0, 0, 0]


def test_enter_goes_through_what_is_found(browser, shipped, shipped_tokens):
    at = [i for i, token in enumerate(shipped_tokens) if "sister" in token or "book" in token]
    browser.open(shipped, "#row=5&column=7", ready=False)
    browser.js("document.getElementById('overlay').focus()")
    browser.type("/", "book")
    at = [i for i, token in enumerate(shipped_tokens) if "book" in token]
    assert browser.js("return document.activeElement.id") == "find" and browser.js(FOUND)[0] == at and len(at) >= 2
    browser.type(Keys.ENTER)
    assert readout(browser)["pair"] == [at[0], 7] and browser.text("found") == f"1 of {len(at)} rows"
    browser.type(Keys.ENTER)
    assert readout(browser)["pair"] == [at[1], 7]
    browser.chord(Keys.SHIFT, Keys.ENTER)
    browser.chord(Keys.SHIFT, Keys.ENTER)
    assert readout(browser)["pair"] == [at[-1], 7] and browser.text("found") == f"{len(at)} of {len(at)} rows"
    click(browser, "looked-at")
    assert browser.text("found") == f"{len(at)} of {len(at)} columns"
    click(browser, "find-next")
    assert readout(browser)["pair"] == [at[-1], at[0]]
    browser.wait("return location.hash.includes('find=book')")
    browser.open(shipped, browser.js("return location.hash"), ready=False)
    assert browser.js(FOUND)[1] == at and browser.js("return document.getElementById('find').value") == "book"
    browser.js("document.getElementById('find').focus()")
    browser.type(Keys.ESCAPE)
    assert browser.js("return [heed.found(), document.getElementById('find').value]") == [None, ""]


def test_what_is_found_belongs_to_the_layer(browser, tmp_path):
    tensors = qkv(T=3, prefix="layers.0.") | qkv(T=5, prefix="layers.1.")
    facts = {"layers.0.tokens": '["a", "b", "A"]', "layers.1.tokens": '["b", "b", "a", "b", "ab"]'}
    document("view", save(tmp_path / "x.safetensors", tensors, facts), "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html", "#layer=0&head=0&find=a")
    assert browser.js(FOUND)[0] == [0, 2]
    choose(browser, "layer", 1)
    assert browser.js(FOUND)[0] == [2, 4]


def test_finding_in_pooled_maps(browser, tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=2301, Tk=2500, H=1, Hkv=1, D=4),
                {"tokens": json.dumps([f"w{i}" for i in range(2500)])})
    document("view", file, "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html", "#find=%231000")
    assert browser.js(FOUND) == [[(1000 - 199) * 512 // 2301], [1000 * 512 // 2500]]
    write(browser, "find", "w1000")  # the word of a stretch is the one that it begins with
    starts = -(-np.arange(512) * 2500 // 512)
    assert browser.js(FOUND)[1] == np.flatnonzero(starts == 1000).tolist()
    write(browser, "find", f"w{starts[77]}")
    assert browser.js(FOUND)[1] == [77]


def test_hostile_texts_are_looked_for_and_nothing_else(browser, tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=len(EVIL)), {"tokens": json.dumps(EVIL)})
    document("view", file, "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    for text in ("<img", "\\u{202e}", "constructor", "__proto__", "]]>", "\\", "(", "x" * 200):
        write(browser, "find", text)
        assert len(browser.js(FOUND)[0]) == (5 if text == "\\" else 1), text
    assert browser.js("return document.querySelectorAll('img').length") == 0


# Heads.

@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    """A page of two layers of four heads, and the probabilities of its heads in order, in float64."""
    folder = tmp_path_factory.mktemp("heads")
    tensors = {name: (dtype, 3 * x) for layer in (0, 1)
               for name, (dtype, x) in qkv(T=19, prefix=f"layers.{layer}.").items()}
    tensors["layers.1.q"] = ("F32", np.roll(tensors["layers.1.q"][1], 3, axis=1))
    file = save(folder / "x.safetensors", tensors)
    document("view", file, "--html", folder / "a.html", "--causal")
    given, _ = load(file)
    maps = [probabilities(rounded(given[f"layers.{layer}.q"]), rounded(given[f"layers.{layer}.k"]), causal=True)[0]
            for layer in (0, 1)]
    return folder / "a.html", np.maximum(np.concatenate(maps), 0)


SHOWN = "return heed.grid.shown.map(({ layer, head }) => 4 * layer + head)"


def measures(p):
    """{measure: [heads]}"""
    i, j = np.arange(p.shape[1])[:, None], np.arange(p.shape[2])[None]
    return {"entropy": -(p * np.log2(np.where(p > 0, p, 1))).sum(-1).mean(-1),
            "distance": (p * abs(i - j)).sum(-1).mean(-1), "first": p[:, :, 0].mean(-1)}


@pytest.mark.parametrize("measure", ["entropy", "distance", "first"])
def test_heads_are_sorted_by_what_they_do(browser, two_layers, measure):
    page, maps = two_layers
    expected = measures(maps)[measure]
    browser.open(page)
    assert browser.js(SHOWN) == list(range(8))
    choose(browser, "order", measure)
    assert browser.js(SHOWN) == np.argsort(-expected).tolist()
    captions = browser.js("return [...document.querySelectorAll('#thumbs .caption')].map((x) => x.textContent)")
    for caption, head in zip(captions, np.argsort(-expected), strict=True):
        name, value = caption.split(" ", 1)
        value = float(re.match(r"[\d.]+", value)[0]) / (100 if measure == "first" else 1)
        assert name == f"{head // 4}.{head % 4}" and value == pytest.approx(expected[head], rel=0.006)
    click(browser, "reverse")
    assert browser.js(SHOWN) == np.argsort(expected).tolist() and browser.attribute("reverse", "aria-pressed") == "true"
    browser.wait("return location.hash.includes('reverse=1')")
    browser.open(page, browser.js("return location.hash"))
    assert browser.js(SHOWN) == np.argsort(expected).tolist()
    choose(browser, "order", "layer")
    assert browser.js(SHOWN) == list(range(8)) and browser.js("return document.getElementById('reverse').disabled")


def test_heads_are_sorted_by_how_much_there_is_to_see(browser, shipped):
    browser.open(shipped, "#order=structure", ready=False)
    structure = browser.js("return heed.layers.map((each) => each.structure).flat()")
    shown = browser.js("return heed.grid.shown.map(({ layer, head }) => 12 * layer + head)")
    assert shown == np.argsort(-np.array(structure), kind="stable").tolist()


@pytest.mark.parametrize("text, expected", [
    ("", range(8)), ("2", [2, 6]), ("0-1", [0, 1, 4, 5]), ("1.2", [6]), ("1.*", [4, 5, 6, 7]), ("*.3", [3, 7]),
    ("0.0, 1.2-3", [0, 6, 7]), (" 0 ,, 3 ", [0, 3, 4, 7]), ("layer 1", [4, 5, 6, 7]), ("9", []), ("5-9", []),
    ("no such words", []), ("<img src=x>", []),
])
def test_heads_are_chosen_by_their_names(browser, two_layers, text, expected):
    page, _ = two_layers
    browser.open(page)
    write(browser, "only", text)
    expected = list(expected)
    assert browser.js(SHOWN) == expected
    assert browser.js("return document.querySelectorAll('#thumbs .thumb').length") == len(expected)
    said = browser.text("shown-heads")
    assert said == ("" if len(expected) == 8 else f"{len(expected)} of 8 heads" if expected
                    else "no head has this name")
    click(browser, "all-heads")
    assert browser.js(SHOWN) == list(range(8)) and browser.js("return document.getElementById('only').value") == ""


def test_heads_are_chosen_by_their_habits(browser, shipped):
    browser.open(shipped, "#only=previous")
    labels = browser.js("return [...document.querySelectorAll('.thumb')].map((b) => b.getAttribute('aria-label'))")
    assert 0 < len(labels) < 72 and all("previous token" in label for label in labels)
    assert browser.text("shown-heads") == f"{len(labels)} of 72 heads"


def test_a_head_is_hidden_and_shown_again(browser, two_layers):
    page, _ = two_layers
    browser.open(page, "#layer=0&head=1")
    browser.type("x")
    assert browser.js(SHOWN) == [0, 2, 3, 4, 5, 6, 7] and browser.text("map-title") == "Layer 0, head 2"
    browser.type("[")  # over the one that is hidden
    assert browser.text("map-title") == "Layer 0, head 0"
    browser.type("]]]")
    assert browser.text("map-title") == "Layer 1, head 0"
    write(browser, "only", "1.*")
    for _ in range(6):
        click(browser, "hide-head")
    assert browser.js(SHOWN) == [7], "the last one stays"
    assert browser.js("return document.getElementById('hide-head').disabled")
    click(browser, "all-heads")
    assert (browser.js(SHOWN) == list(range(8))
            and not browser.js("return document.getElementById('hide-head').disabled"))


def test_keys_move_among_sorted_heads(browser, two_layers):
    page, maps = two_layers
    order = np.argsort(-measures(maps)["distance"]).tolist()
    browser.open(page, "#order=distance")
    choose(browser, "layer", order[2] // 4)
    choose(browser, "head", order[2] % 4)
    across = browser.js("""document.querySelector('.thumb[aria-pressed=true]').focus();
        return getComputedStyle(document.getElementById('thumbs')).gridTemplateColumns.split(' ').length""")
    here = "return 4 * heed.state.layer + heed.state.head"
    browser.type(Keys.ARROW_RIGHT)
    assert (browser.js(here) == order[3]
            and browser.js("return document.activeElement.getAttribute('aria-pressed')") == "true")
    browser.type(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert browser.js(here) == order[0]
    browser.type(Keys.ARROW_DOWN)
    assert browser.js(here) == (order[across] if across < 8 else order[0])
    browser.type(Keys.ARROW_UP, "]")
    assert browser.js(here) == order[1]
    write(browser, "only", "0.*, 1.3")
    choose(browser, "order", "layer")
    browser.js("document.querySelector('.thumb[tabindex=\"0\"]').focus()")
    choose(browser, "layer", 0)
    choose(browser, "head", 3)
    browser.type(Keys.ARROW_DOWN)
    assert browser.js(here) == 7
    browser.type(Keys.ARROW_LEFT)  # no other head of this layer is shown
    assert browser.js(here) == 7


# Saving.

def test_the_saved_table_is_the_map(browser, tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=9, Tk=12),
                {"tokens": json.dumps([*"abcdefgh", "=1+1", 'a "b", c', "\n", ""])})
    document("view", file, "--html", tmp_path / "a.html", "--causal")
    browser.open(tmp_path / "a.html", "#layer=0&head=2")
    browser.downloads(tmp_path)
    click(browser, "save-csv")
    text = browser.saved(tmp_path, "attention-layer0-head2.csv").decode()
    assert text.endswith("\r\n")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    words = [*"abcdefgh", "=1+1", 'a "b", c', "\u21b5", "(empty)"]
    assert rows[0] == ["query\\key", *(f"{i} {word}" for i, word in enumerate(words))]
    assert [row[0] for row in rows[1:]] == [f"{i} {words[i + 3]}" for i in range(9)]
    shown = shown_map(browser, 0, 2).astype(np.float32)
    got = np.array([[np.float32(x) if x else -1 for x in row[1:]] for row in rows[1:]])
    np.testing.assert_array_equal(got, shown)  # to the bit


def test_the_saved_table_of_pooled_maps_and_of_no_numbers(browser, tmp_path):
    tensors = qkv(T=2301, Tk=2500, H=1, Hkv=1, D=4)
    tensors["q"][1][0, 1300] = np.nan
    file = save(tmp_path / "x.safetensors", tensors, {"tokens": json.dumps([f"w{i}" for i in range(2500)])})
    document("view", file, "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    browser.downloads(tmp_path)
    click(browser, "save-csv")
    rows = list(csv.reader(io.StringIO(browser.saved(tmp_path, "attention-layer0-head0.csv").decode(), newline="")))
    assert len(rows) == 513 and rows[0][2] == "5-9 w5" and rows[2][0] == "5-8 w204"
    undefined = [i for i, row in enumerate(rows[1:]) if "NaN" in row]
    assert undefined == [1300 * 512 // 2301] and set(rows[1 + undefined[0]][1:]) == {"NaN"}
    assert sum(map(float, rows[10][1:])) == pytest.approx(1, abs=2e-3)


SPACE = "{http://www.w3.org/2000/svg}"


def painted(svg):
    """{(row, column): color} of all boxes of a saved picture."""
    (plot,) = svg.findall(f"{SPACE}svg")
    cells = {}
    for path in plot.iter(f"{SPACE}path"):
        boxes = re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-(\d+)z", path.get("d"))
        assert "".join("M{} {}h{}v{}h-{}z".format(*box) for box in boxes) == path.get("d")
        for x, y, width, height, back in (map(int, box) for box in boxes):
            assert width == back
            for place in ((i, j) for i in range(y, y + height) for j in range(x, x + width)):
                assert place not in cells
                cells[place] = path.get("fill")
    return plot, cells


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_saved_picture_has_the_colors_and_the_labels_of_the_map(browser, tmp_path, theme):
    T, tokens = 23, [f"t{i}" for i in range(21)] + ["<&>\"'", "\x01\uffff]]>"]
    file = save(tmp_path / "x.safetensors", qkv(T=T), {"tokens": json.dumps(tokens)})
    document("view", file, "--html", tmp_path / "a.html", "--causal", "--pattern", "atrous(3)")
    browser.prefer(theme)
    browser.open(tmp_path / "a.html", "#head=1&norm=row")
    browser.downloads(tmp_path)
    click(browser, "save-svg")
    svg = ElementTree.fromstring(browser.saved(tmp_path, "attention-layer0-head1.svg"))
    plot, cells = painted(svg)
    colors = np.array(browser.js(CELLS, "heat", "centre", T))
    assert cells == {(q, k): "#{:02x}{:02x}{:02x}".format(*colors[q, k]) for q in range(T) for k in range(T)}
    assert plot.get("viewBox") == f"0 0 {T} {T}" and float(plot.get("width")) > 300
    words = [f"t{i}" for i in range(21)] + ["<&>\"'", "\\u{1}\\u{ffff}]]>"]
    for kind in ("row", "column"):
        assert [text.text for text in svg.iter(f"{SPACE}text") if text.get("class") == kind] == words
    assert svg.find(f"{SPACE}title").text.startswith("Layer 0, head 1: ")
    ramp = browser.js("return heed.ramp(arguments[0])", theme == "dark")
    legend = [rect.get("fill") for rect in svg.iter(f"{SPACE}rect") if rect.get("class") == "legend"]
    assert legend == ["#{:02x}{:02x}{:02x}".format(*ramp[int(255 * i / 63 + 0.5)]) for i in range(64)]


def test_the_saved_picture_is_the_part_that_is_shown(browser, shipped, tmp_path):
    browser.open(shipped, "#layer=0&head=0&row=100&column=200", ready=False)
    browser.downloads(tmp_path)
    browser.js("document.getElementById('overlay').focus()")
    browser.type("++++++")
    click(browser, "save-svg")
    plot, cells = painted(ElementTree.fromstring(browser.saved(tmp_path, "attention-layer0-head0.svg")))
    x, y, width, height = map(float, plot.get("viewBox").split())
    zoom = 1.6**6
    assert (width == pytest.approx(371 / zoom) and height == pytest.approx(371 / zoom) and y <= 100 <= y + height
            and x <= 200 <= x + width)
    assert {i for i, _ in cells} == set(range(int(y), int(np.ceil(y + height)))) and (100, 200) in cells


def test_the_saved_picture_of_many_tokens_has_a_bounded_size(browser, tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=1500, H=1, Hkv=1, D=4))
    document("view", file, "--html", tmp_path / "a.html")
    browser.open(tmp_path / "a.html", ready=False)
    browser.downloads(tmp_path)
    click(browser, "save-svg")
    data = browser.saved(tmp_path, "attention-layer0-head0.svg")
    assert len(data) < 8_000_000
    plot, cells = painted(ElementTree.fromstring(data))
    assert len(cells) == 1500 * 1500, "boxes of several cells leave none out"


def test_the_picture_is_saved_as_it_looks(browser, shipped, tmp_path):
    browser.open(shipped, "#layer=3&head=7", ready=False)
    browser.downloads(tmp_path)
    click(browser, "save-png")
    assert browser.saved(tmp_path, "attention-layer3-head7.png").startswith(b"\x89PNG\r\n")
