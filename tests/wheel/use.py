#!/usr/bin/env python3
"""Uses an installed wheel with nothing but its environment on PATH. Usage: use.py CMAKELISTS [--emulated].

CMAKELISTS has the version. Under an emulator times are not measured.
"""
import importlib.metadata
import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path


def run(*args):
    return subprocess.run(args, check=True, capture_output=True, text=True).stdout


def cpu_milliseconds(*args):
    """The least CPU time of a process in ten runs, which depends least on what else the machine does."""
    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = [spent()]
    for _ in range(10):
        run(*args)
        times.append(spent())
    return 1000 * min(after - before for before, after in zip(times, times[1:]))


def check_start():
    numpy = cpu_milliseconds(sys.executable, "-I", "-c", "import numpy")
    both = cpu_milliseconds(sys.executable, "-I", "-c", "import numpy, heed")
    help_page = cpu_milliseconds("heed", "--help")
    print(f"import heed: {both - numpy:.0f} ms beyond NumPy's {numpy:.0f}; heed --help: {help_page:.0f} ms")
    assert both - numpy <= 120 and help_page <= 20


def main():
    for tool in ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja", "make"):
        assert shutil.which(tool) is None, f"{tool} is there: this proves nothing"

    import heed
    import numpy as np

    # The version is that of CMakeLists.txt.
    version = re.search(r"project\(heed VERSION ([0-9.]+)", Path(sys.argv[1]).read_text())[1]
    assert heed.__version__ == importlib.metadata.version("heed-attention") == version
    assert run("heed", "--version").strip() == f"heed {version}"

    # The wheel contains the licence.
    assert importlib.metadata.metadata("heed-attention")["License-Expression"] == "Apache-2.0"
    assert any(file.name == "LICENSE" for file in importlib.metadata.files("heed-attention"))

    # The program of the wheel, on PATH.
    assert Path(shutil.which("heed")).parent == Path(sys.executable).parent
    assert json.loads(run("heed", "info", "--json"))["version"] == version
    assert any(entry["name"] == "attention" for entry in json.loads(run("heed", "list", "--json")))

    # The module is compared with softmax in NumPy.
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 33, 3, 16)) for _ in range(3))
    logits = np.einsum("bihd,bjhd->bhij", q, k) / 4
    logits[..., ~np.tri(33, dtype=bool)] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(heed.attention(q, k, v, causal=True), expected, rtol=0, atol=1e-13)

    # The module's errors, which pass through nanobind's backend, a library of its own.
    try:
        heed.attention(q, k[:, :5], v)
    except heed.InvalidArgument as error:
        assert "expected" in str(error), error
    else:
        raise AssertionError("keys and values of other lengths are accepted")

    # The page of the module is that of the program, in the wheel alone.
    assert heed.view(q, k, tokens=["token"] * 33).html.startswith("<!DOCTYPE html>")

    # The module and the program are there at once.
    if "--emulated" not in sys.argv:
        check_start()

    # The wheel has no file that only a build needs.
    files = [str(file) for file in importlib.metadata.files("heed-attention")]
    assert not [name for name in files if name.endswith((".h", ".a", ".cmake", ".cc"))], files
    python = sys.version.split()[0]
    print(f"{len(files)} files, heed {version} works in Python {python} without a compiler")


if __name__ == "__main__":
    main()
