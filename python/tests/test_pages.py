# Tests of the pages in a browser: every way to reach a number, every width, both themes, hostile files.
import json
import re

import numpy as np
import pytest
from browser import Keys, needs_browser, number, places, point_at, readout
from cli_program import SHIPPED, document, heed, needs_program, qkv, save

pytestmark = [needs_program, needs_browser]


# Bars, text, pickers.

def test_the_text_reads_as_text(browser, shipped):
    browser.open(shipped, ready=False)
    words = browser.text("words")
    assert "alice was beginning to get very tired of sitting by her sister on the bank, and" in words
    assert "she had peeped into the book" in words
    browser.js("document.querySelector('#words [data-at=\"30\"]').click()")
    assert browser.js("return heed.state.q") == 30 and "##ped" in browser.text("row-title")


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

def test_the_keyboard_suffices(browser, shipped):
    browser.open(shipped, "#layer=0&head=0")
    seen = []
    for _ in range(50):
        browser.type(Keys.TAB)
        seen.append(browser.js("const a = document.activeElement; return a.id || a.className"))
        assert browser.js("return getComputedStyle(document.activeElement).outlineStyle") != "none", seen
        if seen[-1] == "thumb":
            break
    assert [name for name in seen if name][:16] == [
        "theme", "save-png", "save-svg", "save-csv", "help-open", "zoom-out", "zoom-reset", "zoom-in", "layer", "head",
        "scale", "norm", "find", "overlay", "looks-at", "looked-at"]
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
    assert number(browser.text("value")) == number(browser.js("return document.querySelector('#bars "
                                                              ".share').textContent"))
    for keys, title in (("]", "Layer 3, head 0"), ("[", "Layer 2, head 11"), ("{", "Layer 1, head 11"),
                        ("}", "Layer 2, head 11"),
                        (Keys.PAGE_DOWN, "Layer 3, head 11"), (Keys.PAGE_UP, "Layer 2, head 11"),
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


@pytest.mark.parametrize("fragment",
                         ["#layer=99&head=-1&row=1e9&column=x", "#layer=&row=999999", "#<img src=x>", "#scale=bogus"])
def test_a_wrong_link_opens_all_the_same(browser, shipped, fragment):
    browser.open(shipped, fragment, ready=False)
    assert browser.text("value").endswith("%")


# Looks.

def test_every_width(browser, shipped):
    for width, scale in ((360, 3), (600, 1), (768, 2), (1024, 1), (1180, 1), (1400, 1.25), (2560, 2), (400, 1)):
        browser.size(width, 900, scale)
        if width == 360:
            browser.open(shipped, "#layer=0&head=0", ready=False)
        browser.wait("""return Math.abs(document.getElementById('heat').width / devicePixelRatio
                        - document.getElementById('stage').clientWidth) < 1""")
        assert browser.js("return document.documentElement.scrollWidth") <= width
        if width > 1100:  # cells of a pixel can be hit
            got = point_at(browser, 123, 45)
            assert got["pair"] == [123, 45]
            assert got["value"] == pytest.approx(browser.js("return heed.probability(0, 0, 123, 45)"))


def test_labels_are_not_cut(browser, shipped):
    """No text on canvases or beside the map is cut off."""
    spy = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": """
        window.written = new Set();
        const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
            written.add(text); write.call(this, text, ...at); }"""})
    try:
        tokens = {"a", "conversations", "##ped"}
        for width in (1024, 1400):
            browser.size(width, 1000)
            browser.open(shipped)
            browser.js("document.querySelectorAll('.thumb')[3].click()")
            written = browser.js("return [...written]")
            assert len(written) > 20 and not [text for text in written if text.endswith("\u2026")]
            for word in tokens:  # under the cursor, at the longest text
                at = browser.js("return heed.layers[0].tokens.indexOf(arguments[0])", word)
                point_at(browser, at, at)
            assert tokens <= set(browser.js("return [...written]"))
            assert browser.js("""return [...document.querySelectorAll('#bars bdi, #bars .share, #stats dt, #stats dd')]
                .filter((x) => x.scrollWidth > x.clientWidth + 1 && x.clientWidth > 0)
                .map((x) => x.textContent)""") == []
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", spy)


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


def test_zoom_by_wheel_and_drag(browser, shipped):
    browser.open(shipped, ready=False)
    x, y = map(round, places(browser, [[100, 200]])[0])
    browser.point(x, y)
    pair = readout(browser)["pair"]
    for _ in range(12):
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent",
                                       {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": -120})
    browser.wait("return parseFloat(document.getElementById('zoom-reset').textContent) > 5")
    assert readout(browser)["pair"] == pair  # the pair under the mouse stays there
    before = browser.js("return heed.centre(100, 200)")
    for kind, dx in (("mousePressed", 0), ("mouseMoved", 15), ("mouseMoved", 30), ("mouseReleased", 30)):
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {
            "type": kind, "x": x + dx, "y": y, "button": "left", "buttons": 1, "clickCount": 1})
    after = browser.js("return heed.centre(100, 200)")
    assert after[0] - before[0] == pytest.approx(30, abs=1) and after[1] == pytest.approx(before[1], abs=1)


# Hostile files.

EVIL = ["</script><script>window.broken=1</script>", "<img src=x onerror=window.broken=1>",
        "\"'`&amp;${window.broken=1}", "a\nb\tc", "\u2028\u2029",
        "x" * 100000, "\U0001f600\U0001d504", "\u202egnp.exe", "", " ", "<!--", "]]>", "\0", "\\u003c", "\ufeff",
        "@SCRIPT@", "constructor", "__proto__", "\u0120the", "</script x", "<!--<script x"]


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
    assert shown[12:] == ["\\u{0}", "\\u003c", "\\u{feff}", "@SCRIPT@", "constructor", "__proto__", "the",
                          "</script x", "<!--<script x"]
    assert browser.js("return window.broken") is None
    assert browser.js("return document.querySelectorAll('img, b[onmouseover]').length") == 0
    assert ("<b onmouseover" in browser.text("map-title")
            and "<script>window.broken=1</script>" in browser.text("subtitle"))


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

@pytest.fixture(scope="session")
def shipped_comparison(tmp_path_factory):
    page = tmp_path_factory.mktemp("compare") / "compare.html"
    return page, document("compare", SHIPPED, "--layer", 2, "--html", page)["rows"]


MARKS = """return [...document.querySelectorAll('#picture .series')].map((series) => ({
    label: series.querySelector('.label')?.textContent.trim(),
    marks: [...series.querySelectorAll('.mark')].map((mark) => {
        const box = mark.getBoundingClientRect();
        return [mark.classList[1], box.left + box.width / 2, box.top + box.height / 2]; }) }))"""


def test_the_compare_page_leads_with_error_against_time(browser, shipped_comparison):
    page, rows = shipped_comparison
    browser.open(page)
    series = browser.js(MARKS)
    marks = [mark for each in series for mark in each["marks"]]
    assert len(marks) == len(rows) and [m[0] for m in marks[:1]] == ["f64"]
    assert browser.js("return document.getElementById('picture').getBoundingClientRect().bottom"
                      " <= document.getElementById('table').getBoundingClientRect().top")
    # Both axes are logarithmic: each point is at its numbers, so that one line passes through all of a band of errors.
    by_name = {}
    for row in rows:
        by_name.setdefault((row["mechanism"], str(row["options"]), row["selector"]), []).append(row)
    bands = {True: [], False: []}
    for group in by_name.values():
        bands[max(row["relative_error"] for row in group) < 0.02] += group
    ordered = bands[False] + bands[True]  # the order of the picture
    np.testing.assert_array_equal([row["dtype"] for row in ordered], [m[0] for m in marks])
    for axis, key, lists in ((1, "seconds", [ordered]), (2, "relative_error", [bands[False], bands[True]])):
        begin = 0
        for some in lists:
            at = np.array([m[axis] for m in marks[begin:begin + len(some)]])
            logs = np.log([row[key] for row in some])
            slope, offset = np.polyfit(logs, at, 1)
            assert (slope > 0) == (axis == 1) and abs(slope * logs + offset - at).max() < 1
            begin += len(some)
    ticks = browser.js("return [...document.querySelectorAll('#picture text')].map((t) => t.textContent)")
    assert ("time of a call" in ticks and "rms error" in ticks and any(t.endswith(" ms") for t in ticks)
            and "10\u207b\u2078" in ticks)


def test_labels_of_the_compare_page_do_not_overlap(browser, shipped_comparison):
    page, _ = shipped_comparison
    for width in (1400, 760):
        browser.size(width, 1000)
        browser.open(page)
        boxes = browser.js("""return [...document.querySelectorAll('#picture .label')]
            .map((t) => t.getBoundingClientRect())
            .map((b) => [b.left, b.right, b.top + 2, b.bottom - 2])""")
        assert len(boxes) >= (14 if width == 1400 else 8)
        for i, (left, right, top, bottom) in enumerate(boxes):
            assert left >= 0 and right <= width
            for other in boxes[:i]:
                assert right <= other[0] or other[1] <= left or bottom <= other[2] or other[3] <= top


def test_points_of_the_compare_page_tell_their_numbers(browser, shipped_comparison):
    page, rows = shipped_comparison
    browser.open(page)
    tip = "const tip = document.querySelector('.tip'); return tip.hidden ? null : tip.innerText"
    assert browser.js(tip) is None
    exact = next(each for each in browser.js(MARKS) if each["label"] == "attention full")
    dtype, x, y = exact["marks"][1]
    browser.point(x, y)
    row = next(row for row in rows if row["mechanism"] == "attention" and row["options"].get("causal") is None
               and row["dtype"] == "f32")
    text = browser.js(tip)
    workspace = f"{row['workspace_bytes'] / 1024:.0f} KiB"  # depends on the CPU
    assert dtype == "f32" and text.startswith("attention full\nin f32") and workspace in text and "1.09 MiB" in text
    mantissa, exponent = re.search(r"rms error\n(\S+) \u00d7 10\u207b(.)", text).groups()
    power = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079".index(exponent)
    assert float(mantissa) / 10 ** power == pytest.approx(row["relative_error"], rel=0.05)
    assert browser.js("return document.querySelector('tr.marked').cells[1].textContent") == "full"
    browser.point(5, 5)
    assert browser.js(tip) is None and browser.js("return document.querySelectorAll('.faint, .marked').length") == 0


def test_dtypes_of_the_compare_page_can_be_left_out(browser, shipped_comparison):
    page, rows = shipped_comparison
    browser.open(page)
    click = "document.querySelectorAll('.dtypes button')[arguments[0]].click()"
    for i in range(4):
        browser.js(click, i)
    assert {mark[0] for each in browser.js(MARKS) for mark in each["marks"]} == {"f16"}, "one is always shown"
    browser.js(click, 1)
    assert {mark[0] for each in browser.js(MARKS) for mark in each["marks"]} == {"f32", "f16"}


def test_the_table_of_the_compare_page_sorts(browser, shipped_comparison):
    page, rows = shipped_comparison
    browser.open(page)
    click = "document.querySelectorAll('#table th button')[arguments[0]].click()"
    cells = "return [...document.querySelectorAll('#table tbody tr')].map((r) => r.cells[arguments[0]].textContent)"
    groups = {(row["mechanism"], str(row["options"]), row["selector"]) for row in rows}
    assert len(browser.js(cells, 0)) == len(groups)
    browser.js(click, 7)
    errors = [float(x) for x in browser.js(cells, 7)]
    assert errors == sorted(errors) and errors[0] < errors[-1]
    browser.js(click, 7)
    assert [float(x) for x in browser.js(cells, 7)] == errors[::-1]
    assert browser.js("return document.querySelectorAll('#table thead tr:last-child "
                      "th')[7].getAttribute('aria-sort')") == "descending"
    browser.js(click, 3)
    seconds = sorted(row["seconds"] for row in rows if row["dtype"] == "f32")
    unit = {"us": 1e-6, "ms": 1e-3, "s": 1}
    shown = [float(x.split()[0]) * unit[x.split()[1]] for x in browser.js(cells, 3)]
    np.testing.assert_allclose(shown, seconds, rtol=6e-3)
    for width in (360, 1400):
        browser.size(width, 900)
        assert browser.js("return document.documentElement.scrollWidth") <= width


def test_the_compare_page_without_scripts(browser, tmp_path):
    page = tmp_path / "a.html"
    assert heed("compare", save(tmp_path / "x.safetensors", qkv()), "--html", page).returncode == 0
    browser.scripts(False)
    browser.open(page, ready=False)
    browser.scripts(True)
    table = browser.js("return document.getElementById('table').innerText")
    assert "rms error" in table and "attention" in table
    assert not browser.js("return document.getElementById('picture').checkVisibility()")


def test_the_compare_page_of_a_hostile_name_and_of_nan(browser, tmp_path):
    folder = tmp_path / "<img src=x onerror=window.broken=1>"
    folder.mkdir()
    tensors = qkv()
    tensors["v"][1][0, 3] = np.nan
    file = save(folder / "'\"&x.safetensors", tensors)
    assert heed("compare", file, "--html", tmp_path / "a.html").returncode == 0
    browser.open(tmp_path / "a.html")
    assert browser.js("return document.querySelectorAll('img').length") == 0 and str(file) in browser.driver.title
