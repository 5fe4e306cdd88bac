# benchmarks/length.py: every case computes the mechanism of its name, and measured results are kept.
import json
import sys

import fresh
import pytest
from cli_program import ROOT

torch = pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "benchmarks"))

import length  # noqa: E402

CASES = length.cases()
CAUSAL = [name for name in CASES if name not in ("attention, bigbird", "linformer")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_gradients_of_all_inputs_and_agrees_with_float64(name, monkeypatch):
    monkeypatch.setattr(length, "TOKENS", [96])
    length.compare(name, CASES[name])
    inputs = CASES[name].inputs(96)
    o = CASES[name].call(**inputs)
    assert o.numel() == 96 * length.CHANNELS and torch.isfinite(o).all()
    both = length.call_of(CASES[name], inputs, "training")
    both()
    first = {key: x.grad.clone() for key, x in inputs.items()}
    assert all(grad.abs().max() > 0 for grad in first.values())
    both()  # each call resets the gradients
    assert all(torch.allclose(x.grad, first[key], rtol=1e-3, atol=1e-6) for key, x in inputs.items())


@pytest.mark.parametrize("name", CAUSAL)
def test_what_comes_later_changes_nothing_before(name):
    inputs = CASES[name].inputs(96)
    before = CASES[name].call(**inputs)
    main = next(iter(inputs))  # q, u or x
    with torch.no_grad():
        for key in {main, "k", "v"} & inputs.keys():
            time = -1 if key == "u" else 1
            inputs[key].select(time, 95).add_(1)
    after = CASES[name].call(**inputs)
    time = -1 if main == "u" else 1
    assert torch.allclose(before.narrow(time, 0, 95), after.narrow(time, 0, 95), atol=1e-4)
    assert (before - after).abs().max() > 1e-3


def test_attention_written_out_is_attention():
    inputs = CASES["attention"].inputs(200)
    assert torch.allclose(CASES["attention"].call(**inputs), CASES[length.WRITTEN_OUT].call(**inputs), atol=1e-5)


def test_a_mechanism_that_differs_from_float64_is_refused():
    wrong = length.Case("", lambda n: {"x": torch.rand(n)}, lambda x: x * (1 + 0.01 * (x.dtype == torch.float32)))
    with pytest.raises(SystemExit, match="wrong differs from float64 by"):
        length.compare("wrong", wrong)


def run(*args):
    return fresh.python(ROOT / "benchmarks/length.py", *args)


def test_what_has_been_measured_is_kept_and_not_measured_again(tmp_path):
    file = tmp_path / "length.json"
    done = run("^(retention|attention, written out)$", "--most", 2048, "--threads", 1, "--seconds", 0.05, "--json",
               file)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["threads"] == 1 and document["cpu"] and len(done.stdout.splitlines()) == 4
    rows = {(row["mechanism"], row["pass"]): row for row in document["rows"]}
    assert set(rows) == {(name, what) for name in ("attention, written out", "retention") for what in length.PASSES}
    for row in rows.values():
        assert (row["tokens"] == [1024, 2048] and len(row["seconds"]) == len(row["megabytes"]) == 2
                and min(row["seconds"]) > 0)
    # Four tensors of 64 channels, and of what is written out at least one matrix of all pairs besides.
    short, long = rows["attention, written out", "training"]["megabytes"]
    assert 4e-6 * 2048**2 < long < 100e-6 * 2048**2 and long > 2 * short
    assert rows["retention", "forward"]["megabytes"][1] < 4e-6 * 2048**2
    again = run("^retention$", "--most", 2048, "--threads", 1, "--json", file)
    assert (again.returncode, again.stdout) == (0, "") and json.loads(file.read_text()) == document

    for arguments, said in ((("--most", 100), "expected at least 1 and 1024"),
                            (("--threads", 0), "expected at least 1"), (("(",), "filter is '('")):
        wrong = run(*arguments)
        assert wrong.returncode == 2 and said in wrong.stderr
