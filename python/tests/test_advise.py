# heed.advise: rows for arrays and shapes, budgets, cost models, errors.
import json
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cli_program import HEED, attention, needs_program

import heed

T = 192
rng = np.random.default_rng(3)
q, k, v = (rng.standard_normal((2, T, h, 16)).astype(np.float32) for h in (4, 2, 2))
QUICK = {"seconds": 1.0}


@pytest.fixture(autouse=True)
def no_model(monkeypatch, tmp_path):
    """There is no cost model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def find(advice, mechanism, options, dtype="f32"):
    return next(c for c in advice if (c.mechanism, c.options, c.dtype) == (mechanism, options, dtype))


def test_rows_are_ranked_named_tuples():
    advice = heed.advise(q, k, v, causal=True, **QUICK)
    assert isinstance(advice, list) and isinstance(advice, heed.Advice) and advice.length == advice.sample_tokens == T
    assert [c.rank for c in advice] == list(range(1, len(advice) + 1)) and advice.prediction_error is None
    assert all(isinstance(c, heed.Candidate) and c.seconds == c.measured_seconds and c.predicted_seconds is None
               for c in advice)
    assert [c.seconds for c in advice] == sorted(c.seconds for c in advice)
    assert advice.left_out["delta_rule"] == "needs beta too: give them by these names"
    assert {c.dtype for c in advice} == {"f32", "bf16"}
    window = find(advice, "attention", "causal window 95,0")
    expected = attention(q, k, v, causal=True)
    o = heed.attention(q, k, v, causal=True, window=(95, 0))
    assert window.relative_error == pytest.approx(np.sqrt(((o - expected) ** 2).sum() / (expected ** 2).sum()),
                                                  rel=1e-4)
    assert window.max_error == pytest.approx(abs(o - expected).max(),
                                             rel=1e-4) and window.python.endswith("window=(95, 0))")


def test_it_prints_as_a_table():
    advice = heed.advise(q, k, v, mechanisms=["attention", "retention"], **QUICK)
    lines = str(advice).splitlines()
    assert lines[0].split() == ["rank", "mechanism", "options", "dtype", "seconds", "error", "memory", "state", "why"]
    assert len(lines) == len(advice) + 1 and lines[1].startswith("1 ") and advice[0].reason in lines[1]
    assert pickle.loads(pickle.dumps(advice[0])) == advice[0]


def test_budgets():
    advice = heed.advise(q, k, v, causal=True, error=1e-5, memory=2e9, **QUICK)
    assert (advice[0].within and advice[0].dtype == "f32"
            and "the error of 1e-05 and the memory of 1.86 GiB" in advice[0].reason)
    assert not advice[-1].within and "times the budget" in advice[-1].reason
    with pytest.raises(heed.InvalidArgument,
                       match=r"advise: error is 1e-12, expected \S+ or more: attention full in f32 is closest"):
        heed.advise(q, k, v, error=1e-12, **QUICK)
    with pytest.raises(heed.InvalidArgument,
                       match="advise: memory is 5 B, expected .* or more: .* takes least at this length"):
        heed.advise(q, k, v, memory=5, **QUICK)


@pytest.mark.parametrize("purpose", ["prefill", "training", "decode"])
def test_purposes_threads_and_dtypes(purpose):
    advice = heed.advise(q, k, v, purpose=purpose, threads=1, dtypes=("f64",), mechanisms=["attention", "gla"], **QUICK)
    assert {c.threads for c in advice} == {1} and {c.dtype for c in advice} == {"f64"}
    assert {c.mechanism for c in advice} == {"attention", "gla"}
    assert find(advice, "attention", "cache" if purpose == "decode" else "full", "f64").relative_error < 1e-12


def test_what_mechanisms_take_besides_is_given_by_name():
    beta = rng.random((2, T, 4), np.float32)
    advice = heed.advise(q, k, v, tensors={"beta": beta}, mechanisms=["delta_rule"], **QUICK)
    assert {c.mechanism for c in advice} == {"delta_rule"} and advice.left_out == {}
    log_decay = -0.1 * rng.random((2, T, 4, 16), np.float32)
    assumed = heed.advise(q, k, v, mechanisms=["gla"], **QUICK)[0]
    given = heed.advise(q, k, v, tensors={"log_decay": log_decay}, mechanisms=["gla"], **QUICK)[0]
    assert assumed.assumed == ("log_decay",) and given.assumed == () and assumed.relative_error != given.relative_error


def test_any_arrays_will_do():
    torch = pytest.importorskip("torch")
    expected = find(heed.advise(q, k, v, mechanisms=["attention"], **QUICK), "attention", "full").relative_error
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    strided = [np.asfortranarray(x) for x in (q, k, v)]
    for arrays in (tensors, strided):
        assert find(heed.advise(*arrays, mechanisms=["attention"], **QUICK), "attention",
                    "full").relative_error == pytest.approx(expected)
    one = heed.advise(q[0], k[0], v[0], mechanisms=["attention"], **QUICK)  # without a batch
    assert find(one, "attention", "full").relative_error < 1e-6


WRONG = [
    ({"purpose": "inference"}, "purpose is 'inference', expected one of"),
    ({"length": 0}, "length is 0, expected an int"),
    ({"length": 1.5}, "length is 1.5"), ({"memory": -1}, "memory is -1, expected bytes, 1 or more"),
    ({"memory": float("nan")}, "memory is nan"), ({"error": -0.1}, "error is -0.1, expected a number of 0 or more"),
    ({"error": "x"}, "error is 'x'"), ({"seconds": -1}, "seconds is -1"),
    ({"threads": 0}, "threads is 0"), ({"causal": 1}, "causal is 1"), ({"scale": float("inf")}, "scale is inf"),
    ({"softcap": -1.0}, "softcap is -1.0"), ({"window": (1,)}, "window is .1,., expected"),
    ({"window": (-2, 0)}, "window is -2"), ({"mechanisms": "gla"}, "mechanisms is 'gla', expected a list of names"),
    ({"mechanisms": ["nope"]}, "mechanism is nope, expected one of"),
    ({"dtypes": []}, "dtypes is .., expected one or more of"), ({"dtypes": ["f8"]}, "dtypes is 'f8'"),
    ({"ranks": 0}, "ranks is 0, expected an int"), ({"ranks": 4097}, "ranks is 4097"), ({"ranks": 2.0}, "ranks is 2.0"),
    ({"bandwidth": 1e9}, "bandwidth is 1000000000.0, expected None without ranks"),
    ({"latency": 0.0}, "latency is 0.0, expected None without ranks"),
    ({"ranks": 2, "bandwidth": 0}, "bandwidth is 0, expected bytes per second, above 0"),
    ({"ranks": 2, "latency": -1e-6}, "latency is -1e-06, expected seconds, 0 or more"),
    ({"tensors": {"q": q}}, "tensors has 'q', expected names other than q, k and v"),
    ({"mechanisms": ["nsa"]}, "nothing to rank: nsa needs gates too"),
    ({"length": 10**6}, "there is no cost model, which times at 1000000 tokens")]


@pytest.mark.parametrize("options, message", WRONG,
                         ids=[str(list(options)) + str(i) for i, (options, _) in enumerate(WRONG)])
def test_refusals_name_the_argument(options, message):
    with pytest.raises(heed.InvalidArgument, match="^advise: " + message):
        heed.advise(q, k, v, **{**QUICK, **options})


def test_shapes_that_do_not_fit_are_refused():
    for arrays, message in (
        ((q, k, v[:, :5]), "v has shape"), ((q, k[:, :9], v[:, :9]), "q has 192 tokens and k 9, expected as many"),
        (((1, 64, 4, 8), (1, 64, 3, 8), (1, 64, 3, 8)), "k has 3 heads, expected a divisor of q's 4"),
        (((1, 64, 4, 8), (1, 64, 2, 8), (1, 65, 2, 8)), "v has shape .1,65,2,8., expected .1,64,2,8."),
        (((64, 4, 8),) * 3, r"k has shape .64,4,8., expected .B,T,H,D."), ((q, k, 3), "v is 3, expected an array"),
        (((1, 0, 4, 8),) * 3, "expected 1 or more")):
        with pytest.raises(heed.InvalidArgument, match=f"advise: .*{message}"):
            heed.advise(*arrays, **QUICK)
    with pytest.raises(heed.InvalidArgument,
                       match="advise: error is 0.1, expected none: of shapes alone nothing is computed"):
        heed.advise(*((1, 64, 4, 8),) * 3, error=0.1)
    with pytest.raises(TypeError):
        heed.advise(q, k, v, None, 5)


@needs_program
def test_models_of_the_program_are_read(no_model):
    """heed.advise finds the model that `heed advise --calibrate` wrote into the user's cache, and predicts by it."""
    env = {**os.environ, "XDG_CACHE_HOME": str(no_model)}
    done = subprocess.run([HEED, "advise", "--calibrate", "-m", "gla", "--seconds", "0", "--threads", "1", "--json"],
                          env=env, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    shapes = [(1, 5000, h, 32) for h in (4, 2, 2)]
    advice = heed.advise(*shapes, mechanisms=["gla"], threads=1)
    assert (advice.prediction_error == pytest.approx(found["prediction_errors"]["nine_of_ten"])
            and advice.sample_tokens == 0)
    assert all(c.seconds == c.predicted_seconds > 0 and c.relative_error is None for c in advice)
    longer = heed.advise(q, k, v, length=10**6, mechanisms=["gla"], threads=1, **QUICK)
    assert longer[0].predicted_seconds > 100 * longer[0].predicted_sample_seconds and longer.length == 10**6
    path = no_model / "other.json"
    model = json.loads(Path(found["model"]).read_text())
    model["fits"] = [{"work": "gla prefill", "dtype": "f32", "threads": 1, "seconds": {"call": 1.0, "row": 0.001}}]
    path.write_text(json.dumps(model))
    assert heed.advise(*shapes, mechanisms=["gla"], threads=1,
                       model=path)[0].seconds == pytest.approx(1 + 0.001 * 5000 * 4)
    path.write_text(json.dumps({**model, "cpu": "another"}))
    with pytest.raises(heed.FileError, match="was measured on another, .*: calibrate again"):
        heed.advise(*shapes, threads=1, model=str(path))
    path.write_text("{")
    with pytest.raises(heed.FileError, match="is no JSON"):
        heed.advise(*shapes, threads=1, model=path)
    with pytest.raises(heed.FileError, match="cannot open"):
        heed.advise(*shapes, threads=1, model=no_model / "missing")


@needs_program
@pytest.mark.parametrize("purpose", ["prefill", "training"])
def test_processes_are_predicted_as_by_the_command(no_model, purpose):
    """The same model, shapes and cluster: the same predictions, by the names of the command's JSON."""
    model = no_model / "m.json"
    subprocess.run([HEED, "advise", "--calibrate", "-m", "retention", "--seconds", "0", "--threads", "1", "--model",
                    str(model)], check=True, capture_output=True)
    content = json.loads(model.read_text())
    content["fits"] = [{"work": f"{name} {purpose}", "dtype": "f32", "threads": 1, "seconds": {"call": 3.0}}
                       for name in ("attention", "gla", "linformer")]
    model.write_text(json.dumps(content))
    names = ["attention", "gla", "linformer"]
    done = subprocess.run([HEED, "advise", "--shape", "1,8192,8,64", "--causal", "--for", purpose, "--dtype", "f32",
                           "--threads", "1", "-m", ",".join(names), "--model", str(model), "--ranks", "4",
                           "--bandwidth", "100M", "--latency", "1ms", "--json"], check=True, capture_output=True,
                          text=True)
    expected = json.loads(done.stdout)
    call = {"causal": True, "purpose": purpose, "dtypes": ["f32"], "threads": 1, "mechanisms": names, "model": model}
    shapes = ((1, 8192, 8, 64),) * 3
    advice = heed.advise(*shapes, **call, ranks=4, bandwidth=1e8, latency=1e-3)
    assert advice.cluster == expected["cluster"] == {"ranks": 4, "bandwidth": 1e8, "latency": 1e-3}
    of_command = {(row["mechanism"], row["options"], row["dtype"]): row["divided"] for row in expected["rows"]}
    assert of_command == {(c.mechanism, c.options, c.dtype): c.divided for c in advice}
    assert {bool(c.divided["methods"]) for c in advice} == {True, False}
    text = str(advice)
    assert "4 processes, of which each receives 1e+08 bytes per second, 0.001 seconds per message" in text
    assert "not divided, as the mechanism takes no group: linformer default" in text
    default = heed.advise(*shapes, **call, ranks=2)
    assert default.cluster == {"ranks": 2, "bandwidth": 1.25e9, "latency": 50e-6}
    alone = heed.advise(*shapes, **call)
    assert alone.cluster is None and all(c.divided is None for c in alone) and "processes" not in str(alone)
