# The page of `heed advise` in a browser: the frontier of error against time, all ways to a number, hostile files.
import json

import numpy as np
import pytest
from browser import Keys, needs_browser
from cli_program import document, heed, needs_program, qkv, save

pytestmark = [needs_program, needs_browser]

NO_MODEL = {"XDG_CACHE_HOME": "/nonexistent"}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advise")
    file = save(folder / "x.safetensors", qkv(T=600, H=2, Hkv=2, D=16), {"causal": "true"})
    advice = document("advise", file, "--error", "0.2", "--seconds", 2, "--html", folder / "advise.html", env=NO_MODEL)
    return folder / "advise.html", advice


MARKS = """const marks = [...document.querySelectorAll('#picture .mark')].filter((mark) => mark.closest('.plot'));
return marks.map((mark) => {
    const box = mark.getBoundingClientRect();
    return [mark.classList[1], box.left + box.width / 2, box.top + box.height / 2,
        mark.getAttribute('transform').endsWith('scale(6.5)'), mark.classList.contains('outside')]; })"""


def drawn(advice):
    """Rows in the order of the picture: what is far from exact first, the dtypes of one mechanism together."""
    groups = {}
    for row in advice["rows"]:
        if row["relative_error"]:
            groups.setdefault(json.dumps([row["mechanism"], row["options"], row["assumed"]]), []).append(row)
    bands = {False: [], True: []}
    for rows in groups.values():
        bands[max(row["relative_error"] for row in rows) < 0.02] += rows
    return bands


def test_each_row_is_a_point_where_its_numbers_say(browser, page):
    path, advice = page
    browser.open(path)
    bands = drawn(advice)
    rows, marks = bands[False] + bands[True], browser.js(MARKS)
    assert [row["dtype"] for row in rows] == [mark[0] for mark in marks] and len(rows) > 20
    for axis, key, parts in ((1, "seconds", [rows]), (2, "relative_error", [bands[False], bands[True]])):
        begin = 0
        for part in parts:
            at = np.array([mark[axis] for mark in marks[begin:begin + len(part)]])
            logs = np.log([row[key] for row in part])
            slope, offset = np.polyfit(logs, at, 1)
            assert (slope > 0) == (axis == 1) and abs(slope * logs + offset - at).max() < 1
            begin += len(part)
    assert [mark[4] for mark in marks] == [not row["within"] for row in rows]
    assert [mark[3] for mark in marks] == [row["frontier"] for row in rows]  # are drawn larger


def test_the_frontier_is_a_line_through_its_points(browser, page):
    path, advice = page
    browser.open(path)
    lines = browser.js("return [...document.querySelectorAll('#picture .frontier')].map((line) => "
                       "line.getAttribute('d'))")
    bands = [sorted((row for row in rows if row["frontier"]), key=lambda row: row["seconds"])
             for rows in drawn(advice).values()]
    assert [1 + line.count("H") for line in lines] == [len(rows) for rows in bands if rows]
    assert all(line.startswith("M") and line.count("H") == line.count("V") for line in lines)
    assert browser.js("return document.querySelector('#picture text.limit').textContent") == "error budget 0.200"


def test_arrow_keys_go_from_point_to_point(browser, page):
    path, advice = page
    browser.open(path)
    browser.js("document.querySelector('.plot').focus()")
    tip = "const tip = document.querySelector('.tip'); return tip.hidden ? null : tip.innerText"
    assert browser.js(tip) is None
    shown = sorted((row for row in advice["rows"] if row["relative_error"]), key=lambda row: row["seconds"])
    browser.type(Keys.ARROW_RIGHT)
    assert f"rank\n{shown[0]['rank']}\n" in browser.js(tip).replace("\t", "\n")
    assert browser.js("return document.querySelectorAll('tr.chosen').length") == 1
    said = browser.js("return document.querySelector('#picture [aria-live]').textContent")
    assert shown[0]["reason"] in said and shown[0]["mechanism"] in said
    browser.type(Keys.END)
    last = browser.js(tip).replace("\t", "\n")
    assert f"rank\n{shown[-1]['rank']}\n" in last and shown[-1]["reason"] in last.replace("\n", " ")
    browser.type(Keys.ARROW_RIGHT)
    assert browser.js(tip).replace("\t", "\n") == last
    browser.type(Keys.HOME, Keys.ARROW_LEFT)
    assert f"rank\n{shown[0]['rank']}\n" in browser.js(tip).replace("\t", "\n")
    browser.type(Keys.ESCAPE)
    assert browser.js(tip) is None and browser.js("return document.querySelectorAll('tr.chosen').length") == 0


def test_a_mouse_shows_the_numbers_and_marks_the_row(browser, page):
    path, advice = page
    browser.open(path)
    bands = drawn(advice)
    rows, marks = bands[False] + bands[True], browser.js(MARKS)
    browser.js("window.scrollTo(0, 0)")
    places = np.array([mark[1:3] for mark in marks])
    distances = np.linalg.norm(places[:, None] - places[None], axis=-1) + 1e9 * np.eye(len(places))
    visible = np.where(places[:, 1] < 900, distances.min(1), 0)
    i = int(visible.argmax())  # the most isolated mark
    browser.point(*map(round, places[i]))
    text = browser.js("return document.querySelector('.tip').innerText").replace("\t", "\n")
    assert (text.startswith(rows[i]["mechanism"]) and f"rank\n{rows[i]['rank']}\n" in text
            and f"in {rows[i]['dtype']}" in text)
    assert browser.js("return document.querySelector('tr.chosen').cells[0].textContent") == str(rows[i]["rank"])


def test_the_table_has_every_rank_and_is_sorted_by_its_headers(browser, page):
    path, advice = page
    browser.open(path)
    cells = ("return [...document.querySelectorAll('#table tbody tr')].map((tr) => [...tr.cells].map((td) => "
             "td.textContent))")
    rows = browser.js(cells)
    assert [row[:2] for row in rows] == [[str(row["rank"]), row["mechanism"]] for row in advice["rows"]]
    assert all(row[12].startswith(each["reason"]) and row[12].endswith(each["python"])
               for row, each in zip(rows, advice["rows"]))
    assert browser.js("return document.querySelectorAll('#table "
                      "tr.outside').length") == sum(not row["within"] for row in advice["rows"])
    headers = browser.js("return [...document.querySelectorAll('#table th button')].map((b) => b.textContent)")
    assert headers == ["rank", "mechanism", "options", "dtype", "threads", "time", "predicted", "measured", "rms error",
                       "max error", "memory", "state", "why"]
    browser.js("document.querySelectorAll('#table th button')[8].click()")  # rms error
    by_error = [row["rank"] for row in sorted(advice["rows"], key=lambda row: (row["relative_error"], row["rank"]))]
    assert [int(row[0]) for row in browser.js(cells)] == by_error
    assert browser.js("return document.querySelectorAll('#table th')[8].getAttribute('aria-sort')") == "ascending"


@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_nothing_leaves_the_window(browser, page, width):
    browser.size(width, 900)
    browser.open(page[0])
    assert browser.js("return document.documentElement.scrollWidth") <= width
    assert browser.js("return document.querySelectorAll('#picture .label').length") > (3 if width < 600 else 8)


def test_shapes_alone_have_a_table_and_no_picture(browser, tmp_path):
    model = tmp_path / "model.json"
    document("advise", "--calibrate", "-m", "gla", "--seconds", 0, "--threads", 1, "--model", model)
    document("advise", "--shape", "1,512,4,64", "-m", "gla", "--threads", 1, "--model", model, "--html",
             tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    assert browser.js("return document.getElementById('picture').hidden")
    assert browser.js("return document.querySelectorAll('#table tbody tr').length") == 2
    assert "nothing was run" in browser.js("return document.querySelector('.note').textContent")


def test_names_of_files_are_text(browser, tmp_path):
    folder = tmp_path / "<img src=x onerror=window.broken=1>'\"&"
    folder.mkdir()
    tensors = qkv(T=20, prefix="<b onmouseover=window.broken=1>.")
    file = save(folder / "</title><script>window.broken=1<.safetensors".replace("/", "\u2215"), tensors)
    done = heed("advise", file, "-m", "attention", "--html", tmp_path / "a.html", env=NO_MODEL)
    assert done.returncode == 0, done.stderr
    browser.open(tmp_path / "a.html")
    assert browser.js("return window.broken") is None
    assert browser.js("return document.querySelectorAll('img, b[onmouseover]').length") == 0
    assert "<b onmouseover" in browser.js("return document.querySelector('.sub').textContent")


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_run(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv())
    assert heed("advise", file, "--html", tmp_path / "missing" / "a.html", env=NO_MODEL).returncode == 1
    done = heed("advise", file, "--html", file, env=NO_MODEL)
    assert done.returncode == 2 and "--html" in done.stderr and "another file than the input" in done.stderr
