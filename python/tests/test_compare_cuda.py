# benchmarks/compare_cuda.py and torch_operators.py: both sides of a line compute the same. Times need a GPU.
import fresh
import pytest
from cli_program import ROOT

pytest.importorskip("torch")
LINES = "flash/causal/4096|cudnn/full/4096/forward|chunks/.*forward|chunks/gated"


def test_both_sides_of_its_lines_agree():
    done = fresh.python(ROOT / "benchmarks/compare_cuda.py", LINES, "--emulated")
    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.splitlines()
    assert "times mean nothing" in head and len(rows) == 8
    assert [row.split()[0] for row in rows if "left out" in row] == ["cudnn/full/4096/forward"]  # no CPU has cuDNN


def test_training_is_compared_without_a_warning():
    """A warning would be an error in a program that fresh.py runs."""
    line = "train/B1H8N512D64/causal/f32/threads:1"
    done = fresh.python(ROOT / "benchmarks/torch_operators.py", line, "--threads", 1, "--rounds", 1)
    assert done.returncode == 0 and line in done.stdout, done.stderr
