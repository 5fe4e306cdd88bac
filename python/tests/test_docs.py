# The examples of the documentation run, each alone: Python blocks, `heed` lines of shell blocks, C++ blocks as
# examples/*.cc, and examples/*.py.
import importlib.util
import json
import re
import shlex
import subprocess
import sys

import fresh
import pytest
from cli_program import HEED, ROOT, VERBS, needs_program

import heed

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "heed").rglob("*.md"))]
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.M | re.S)
# Commands that measure for minutes; the test only checks that they accept their options.
SLOW = {"bench", "verify"}


def blocks(page, *languages):
    """(line, text) of the fenced blocks in one of these languages."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(2)) + 1, match[2])
            for match in FENCE.finditer(text) if match[1] in languages]


def pages(*languages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page, *languages)]


def test_every_block_is_of_a_kind_that_is_known():
    kinds = {match[1] for page in PAGES for match in FENCE.finditer(page.read_text())}
    assert kinds <= {"", "python", "cpp", "cmake", "{toctree}"}  # cmake: tests/consumer does what it says


PYTHON = [pytest.param(page, line, text, id=f"{page.relative_to(ROOT)}:{line}")
          for page in PAGES for line, text in blocks(page, "python")]


@pytest.mark.parametrize("page, line, text", PYTHON)
def test_a_python_block_runs_alone_and_prints_what_it_says(page, line, text, tmp_path):
    for package in re.findall(r"^import (?:heed\.)?(torch|transformers)$", text, re.M):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not there")
    packages = [name for name in ("torch", "transformers")
                if re.search(rf"^(import|from) (heed\.)?{name}\b", text, re.M)]
    program = tmp_path / page.name
    program.write_text("\n" * (line - 1) + text)  # a traceback then names the page's line
    if packages:
        result = fresh.python(program, packages=[name for name in packages if name != "torch"], cwd=tmp_path)
    else:
        result = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, cwd=tmp_path,
                                timeout=300)
    assert result.returncode == 0, result.stderr
    printed = iter(result.stdout.splitlines())
    for said in re.findall(r"# -> (.*)$", text, re.M):
        assert said in printed, f"{said!r} is not printed, or not in this order:\n{result.stdout}"


def heed_lines(page):
    """The commands of shell blocks that run heed, without comments."""
    for _, text in blocks(page, "", "sh", "console"):
        for line in text.splitlines():
            if re.match(r"\$ (build/release/bin/)?heed ", line):
                yield shlex.split(line, comments=True)[2:]


COMMANDS = [pytest.param(words, id=f"{page.name}:{' '.join(words)}") for page in PAGES for words in heed_lines(page)]


@needs_program
@pytest.mark.parametrize("words", COMMANDS)
def test_shell_lines_run(words, tmp_path):
    if words[0] in SLOW:
        words = [*words, "--help"]
    # Output goes to tmp_path instead of the page's path.
    words = [str(tmp_path / w.rsplit("/", 1)[-1]) if w.startswith("/tmp/") else w for w in words]
    result = subprocess.run([HEED, *words], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr


def test_there_are_shell_lines():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("page", pages("cpp"))
def test_cpp_programs_are_examples(page):
    """CTest compiles and runs examples/*.cc: a program on a page is one of them, without its opening comment."""
    examples = {"".join(file.read_text().partition("\n")[2:]) for file in (ROOT / "examples").glob("*.cc")}
    programs = [(line, text) for line, text in blocks(page, "cpp") if "int main" in text]
    for line, text in programs:
        assert text in examples, f"{page}:{line} is not a file of examples/"


def test_readme_names_every_mechanism():
    names = {name for name in heed.__all__ if f"{name}_backward" in heed.__all__}
    assert len(names) > 20 and names <= set(re.findall(r"`(\w+)`", (ROOT / "README.md").read_text()))


def test_the_chart_shows_the_table_and_readme_says_its_ends(tmp_path, monkeypatch):
    subprocess.run([sys.executable, ROOT / "tools/speed_chart.py", tmp_path / "speed.svg"], check=True)
    assert (tmp_path / "speed.svg").read_text() == (ROOT / "docs/images/speed.svg").read_text()
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import speed_chart
    calls, passes = speed_chart.read(speed_chart.PAGE.read_text())
    assert len(calls) == 4 and len(passes) == 4
    for target in ("AVX-512", "AVX2"):
        ends = [end for name, cells in passes if name.startswith(target + ",") for pair in cells for end in pair]
        assert len(ends) == 16 and min(ends) > 0
        assert f"\n{min(ends)} to {max(ends)} times as fast with {target}" in (ROOT / "README.md").read_text()


def test_associative_recall_prints_a_loss_that_falls():
    example = ROOT / "examples/associative_recall.py"
    output = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True, timeout=300).stdout
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\d+\.\d+)  right", output, re.M)]
    assert len(losses) == 9 and losses == sorted(losses, reverse=True) and losses[0] > 2 and losses[-1] < 0.05
    assert output.endswith("goal 0.05: reached\n")


@needs_program
def test_every_public_header_has_a_page_that_names_what_it_exports(tmp_path):
    subprocess.run([sys.executable, ROOT / "tools/site_pages.py", tmp_path / "site", HEED], check=True)
    pages = {page.stem: page.read_text() for page in (tmp_path / "site").rglob("*.md")}
    headers = re.findall(r'^#include "(heed/[^"]+)"', (ROOT / "heed/heed.h").read_text(), re.M)
    headers.remove("heed/ops/mechanisms.h")
    for folder in re.findall(r"^heed_add_op\((\S+)\)", (ROOT / "heed/ops/CMakeLists.txt").read_text(), re.M):
        headers.append(f"heed/ops/{folder}/{folder.rsplit('/', 1)[1]}.h")
    assert len(headers) > 15
    for header in headers:
        text = (ROOT / header).read_text()
        page = pages[header.rsplit("/", 1)[1].removesuffix(".h")]
        for name in re.findall(r"^HEED_API [^;(]*?\b(\w+)\(", text, re.M):
            assert re.search(rf"^## .*\b{name}\b", page, re.M), (header, name)
        for comment in re.findall(r"^// (\w[\w ,;-]{20,})$", text, re.M):
            assert comment in page.replace("\\", ""), (header, comment)
    assert all(f"Usage: heed {verb} " in pages["cli"] for verb in VERBS)
    listed = json.loads(subprocess.run([HEED, "list", "--json"], check=True, capture_output=True, text=True).stdout)
    assert len(listed) >= 8
    for row in listed:
        cells = re.search(rf"^\| \[{row['name']}\]\(mechanisms/{row['name']}\.md\) \| "
                          r"(.*) \|$", pages["mechanisms"], re.M)[1]
        assert "`" in cells and row["state"].split()[0] in cells, row["name"]
    assert (r"`S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T`&emsp;S: \[K, V\]<br>`o_t = scale "
            "S_t^T q_t`" in pages["mechanisms"])
    assert "## From softmax to tiles" not in pages["architecture"]
    assert "## From softmax to tiles" in pages["attention"]  # the derivation, below the contract


def test_the_table_of_mechanisms_has_measured_figures_or_none(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from site_pages import mechanism_table
    listed = [{"name": name, "state": "B D", "flops": "4 D"} for name in ("attention", "gla", "linformer")]
    equations = dict.fromkeys(("attention", "gla", "linformer"), "`o`")
    results = {"cpu": "CPU", "command": "bench", "dtype": "f32", "channels": 64, "heads": 4, "threads": 1,
               "tokens": 2048, "rows": [
                   {"mechanism": "attention", "forward": {"seconds_per_token": 2e-6, "from": None}, "backward": None,
                    "step": None},
                   {"mechanism": "gla", "forward": {"seconds_per_token": 1.2345e-7, "from": 300}, "backward": None,
                    "step": {"seconds_per_token": 5.5e-9, "from": "<= 16"}}]}
    table = mechanism_table(listed, equations, results)
    assert "| 2,000, -, - |  |" in table and "| 123, -, 5.5 | 300, -, <= 16 |" in table
    assert table.split("\n")[4].endswith("| `o` | B D | 4 D |  |  |") and "Measured on CPU by `bench`" in table
    assert "No speed has been recorded" in mechanism_table(listed, equations, {})
