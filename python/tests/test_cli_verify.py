# Tests of `heed verify` and `heed bench`.
import json
import os
import pty
import re
import subprocess
import time

import pytest
from cli_program import HEED, document, heed, needs_program, refused

pytestmark = needs_program


def verified(*args):
    """The names that `verify` reports as verified."""
    verify = document("verify", *args)
    assert list(verify) == ["ok", "rows"] and verify["ok"] is True
    for row in verify["rows"]:
        assert list(row) == ["mechanism", "pass", "target", "dtype", "max_error", "tolerance", "ok"]
        assert row["ok"] is True and 0 <= row["max_error"] <= row["tolerance"]
    return {(r["mechanism"], r["pass"], r["target"], r["dtype"]) for r in verify["rows"]}


def test_verify_of_everything():  # on one target and in one dtype, as the tests in C++ are of all
    lowest = document("info")["simd"]["available"][-1]
    assert verified("--isa", lowest, "--dtype", "f32", "--random",
                    9) == {(op["name"], p, lowest, "f32") for op in document("list") for p in op["passes"]}


@pytest.mark.usefixtures("uncapped")
def test_verify():
    info, names = document("info"), ["attention", "hgrn2", "hgrn"]
    found = verified(*names, "--random", 20)
    expected = {(op["name"], p, target, dtype) for op in document("list") if op["name"] in names for p in op["passes"]
                for target in info["simd"]["available"] for dtype in op["dtypes"]}
    assert expected <= found
    assert {(target, dtype) for _, _, target, dtype in found - expected} <= {
        ("AVX3_ZEN4", "bf16"), ("tiles", "f32"), ("tiles", "bf16"), ("tiles", "f16")}
    assert info["tiles"] == any(target == "tiles" for _, _, target, _ in found)


def test_verify_obeys_its_options():
    lowest = document("info")["simd"]["available"][-1]
    rows = document("verify", "attention", "--isa", lowest, "--dtype", "f64")["rows"]
    passes = next(op["passes"] for op in document("list") if op["name"] == "attention")
    assert [(row["pass"], row["target"], row["dtype"]) for row in rows] == [(p, lowest, "f64") for p in passes]
    assert "ok" in heed("verify", "attention", "--dtype", "f64").stdout


def test_verify_under_a_pattern():
    lowest = document("info")["simd"]["available"][-1]
    verify = document("verify", "--pattern", "bigbird(block=16, random=1)", "--isa", lowest, "--dtype", "f32")
    assert list(verify) == ["ok", "rows", "pattern", "left_out"]
    assert verify["ok"] and verify["left_out"] < 20 and verify["pattern"] == "bigbird(block=16, random=1, seed=0)"
    assert [(row["mechanism"], row["pass"]) for row in verify["rows"]] == [
        ("attention", p) for p in ("forward", "backward", "step")]
    # Problems with four heads, and passes that have one.
    some = document("verify", "--pattern", "per_head([atrous(2), atrous(3), fixed(8, 2), neighborhood(5)])", "--isa",
                    lowest, "--dtype", "f64")
    assert some["ok"] and some["rows"] and some["left_out"] > 100
    text = heed("verify", "--pattern", "per_head([atrous(2), atrous(3), atrous(4)])", "--isa", lowest, "--dtype",
                "f64").stdout
    assert re.search(r"^left out: \d+ of \d+ problems, the last as its pattern has 3 heads, expected \d+ as q$", text,
                     re.M)
    line = refused(2, "verify", "--dtype", "f64", "--pattern", f"per_head([{', '.join(['atrous(2)'] * 97)}])")
    assert re.match(r"heed: --pattern: pattern has 97 heads, expected \d+ as q, and fits none of \d+ problems$", line)


def lines_as_they_come(*args):
    """[(seconds, line)] of standard output, a pipe, and the exit status."""
    start = time.monotonic()
    with subprocess.Popen([HEED, *args], stdout=subprocess.PIPE, text=True) as process:
        lines = [(time.monotonic() - start, line) for line in process.stdout]
    return lines, process.returncode


@pytest.mark.usefixtures("uncapped")
def test_rows_are_printed_as_they_come():
    lines, status = lines_as_they_come("verify", "linear_attention", "retention", "--threads", "1", "--random", "50")
    assert status == 0 and lines[0][1].startswith("mechanism")
    targets = len(document("info")["simd"]["available"])
    assert len(lines) > 1 + 2 * 3 * 3 * targets
    assert lines[0][0] < 0.2 * lines[-1][0] and lines[1][0] < 0.5 * lines[-1][0]
    ends = {len(line.rstrip().removesuffix("ok")) for _, line in lines}
    assert len(ends) == 1, "columns keep their places"


def on_a_terminal(*args):
    """The text that a process writes to standard error, where that is a terminal."""
    master, slave = pty.openpty()
    done = subprocess.run([HEED, *args], stdout=subprocess.PIPE, stderr=slave, text=True, check=True)
    os.close(slave)
    said = b""
    try:
        while piece := os.read(master, 65536):
            said += piece
    except OSError:  # no process holds the other end any more
        pass
    os.close(master)
    return done.stdout, said.decode()


def test_a_terminal_sees_a_count_and_the_time_left():
    out, said = on_a_terminal("verify", "retention", "--dtype", "f32", "--threads", "1", "--json")
    json.loads(out)
    shown = [re.sub(r"\x1b\[K", "", x) for x in said.split("\r") if x.strip("\x1b[K")]
    assert re.fullmatch(r"1 of \d+: retention f32", shown[0])
    total = int(shown[0].split()[2].rstrip(":"))
    counts = [int(x.split()[0]) for x in shown]
    assert counts == sorted(counts) and counts[-1] <= total
    assert all(re.fullmatch(rf"\d+ of {total}, \d+ (s|min) left: retention f32", x) for x in shown[1:])
    assert said.endswith("\r\x1b[K"), "and is gone in the end"


def test_bench():
    bench = document("bench", "attention", "--dtype", "f32", "--causal", "--threads", 1)
    assert list(bench) == ["probes", "rows"]
    assert bench["rows"]
    for row in bench["rows"]:
        assert list(row) == ["mechanism", "pass", "dtype", "shape", "threads", "seconds", "flops_per_second",
                             "bytes_per_second", "roof", "fraction"]
        assert row["threads"] == 1 and row["dtype"] == "f32" and "causal" in row["shape"]
        in_cache = row["pass"] == "step"  # keys and values, where the roof is that of memory
        assert row["seconds"] > 0 and row["fraction"] > 0 and (in_cache or row["fraction"] < 1.2)
        assert row["fraction"] == pytest.approx(row["flops_per_second"] / row["roof"], rel=0.5)


def test_bench_of_all_is_brief():
    rows = document("bench", "--threads", 1, "--seconds", 0)["rows"]
    assert [(row["mechanism"], row["pass"]) for row in rows] == [(op["name"], p) for op in document("list")
                                                                 for p in op["passes"]]
    assert {(row["dtype"], row["shape"]) for row in rows} == {("f32", "B1_T512_H8_D64")}
