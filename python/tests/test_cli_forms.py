# Tests of `heed run`, `heed compare` and `heed advise` on mechanisms that no table describes, and of heed.explain.
import heed
import numpy as np
import pytest
from cli_program import document, load, needs_program, random, refused, save
from forms import COUNTED, NAMES, SOFTMAX, STATES, B, H, T, V, arrays, results

KINDS = {np.dtype(np.float32): "F32", np.dtype(np.float64): "F64"}


def save_arrays(path, given):
    return save(path, {name: (KINDS[x.dtype], x) for name, x in given.items()})


@needs_program
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_run_is_the_python_function(tmp_path, name, dtype):
    given, out = arrays(name, dtype), tmp_path / "o.safetensors"
    run = document("run", name, save_arrays(tmp_path / "x.safetensors", given), "-o", out)
    explained = heed.explain(name, **given)
    assert run["kernel"] == f"{explained['kernel']} {explained['target']}" and int(run["flops"]) == explained["flops"]
    assert run["shapes"] == {key: list(x.shape) for key, x in given.items()}
    written, _ = load(out)
    expected = results(name, given)
    assert set(written) == set(expected)
    for key, x in expected.items():
        assert written[key].dtype == x.dtype and (written[key] == x).all(), key


@needs_program
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mesa", "attention_residual")])
def test_run_takes_a_scale(tmp_path, name):
    given, out = arrays(name), tmp_path / "o.npy"
    document("run", name, save_arrays(tmp_path / "x.safetensors", given), "--scale", "0.7", "-o", out)
    assert (np.load(out) == getattr(heed, name)(**given, scale=0.7)).all()


@needs_program
def test_what_a_mechanism_does_not_take_is_refused(tmp_path):
    file = save_arrays(tmp_path / "x.safetensors", arrays("mesa"))
    assert "mesa: scale is given, expected none" in refused(1, "run", "mesa", file, "--scale", "0.7")
    given = arrays("titans")
    del given["theta"]
    file = save_arrays(tmp_path / "y.safetensors", given)
    assert "expected q, k, v, weight, bias, theta, alpha and eta" in refused(1, "run", "titans", file)
    file = save_arrays(tmp_path / "z.safetensors", arrays("ttt_linear") | {"v": random(B, T, H, V)})
    assert "v has shape [2,70,4,5], expected [2,70,4,8]" in refused(1, "run", "ttt_linear", file)


@needs_program
@pytest.mark.parametrize("name", NAMES)
def test_compare_takes_what_the_file_has(tmp_path, name):
    given = arrays(name, optional=False)
    found = document("compare", save_arrays(tmp_path / "x.safetensors", given), "-m", name)
    rows = {row["dtype"]: row for row in found["rows"]}
    assert set(rows) == {"f64", "f32", "bf16", "f16"} and found["assumed"] == {}
    given = arrays(name, np.float32, optional=False)
    states = [x.nbytes for key, x in results(name, given).items() if key.startswith("state")]
    assert rows["f32"]["state_bytes"] == sum(states)
    assert rows["f32"]["workspace_bytes"] == heed.explain(name, **given)["workspace_bytes"]
    if name == "attention_residual":  # no q, k and v: against itself in float64
        assert rows["f32"]["relative_error"] < 1e-6


@needs_program
@pytest.mark.parametrize("name", (*STATES, *SOFTMAX))
def test_advise_ranks_them(tmp_path, name):
    given = arrays(name, np.float32, optional=False)
    file = save_arrays(tmp_path / "x.safetensors", given)
    for purpose in ("prefill", "training", *(("decode",) if name in STATES else ())):
        found = document("advise", file, "-m", name, "--for", purpose, "--seconds", "0.1", "--causal",
                         env={"XDG_CACHE_HOME": str(tmp_path)})
        assert {row["dtype"] for row in found["rows"]} == {"f32", "bf16"} and found["left_out"] == []
        row = next(row for row in found["rows"] if row["dtype"] == "f32")
        assert row["causal"] and not row["assumed"] and (purpose != "decode" or row["state_bytes"] > 0)
        if purpose == "training":
            continue
        call = getattr(heed, name)
        names = {"heed": heed, **given}
        if purpose == "decode":
            past, last = ({key: x[:, at] if x.ndim > 2 else x for key, x in given.items()} for at in (slice(-1), -1))
            names |= {**last, "positions": np.full(B, T - 1), "state": call(**past, return_state=True)[1]}
        o, whole = eval(row["python"], names), call(**given)
        np.testing.assert_allclose(o, whole if purpose == "prefill" else whole[:, -1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_explain(name):
    given = arrays(name, np.float32)
    e, shapes = heed.explain(name, **given), {key: x.shape for key, x in given.items()}
    assert e == heed.explain(name, **shapes) and e["copies"] == [] and not e["invariant"]
    assert e["flops"] > 0 and e["workspace_bytes"] > 0 and (e["visited_pairs"] > 0) == (name in SOFTMAX)
    o = getattr(heed, name)(**given)
    written = o.nbytes + (2 * given["v"].nbytes if name == "deltaformer" else 0)  # u is read again
    assert e["bytes"] == sum(x.nbytes for x in given.values()) + written
    assert heed.explain(name, **shapes, threads=3)["workspace_bytes"] > e["workspace_bytes"] / 2
    first = next(iter(given))
    with pytest.raises(heed.InvalidArgument, match=f"^{name}: "):
        heed.explain(name, **{**shapes, first: shapes[first][1:]})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        heed.explain(name, **shapes, nothing=1)


@pytest.mark.parametrize("name", COUNTED)
def test_positions_without_numbers_are_zero(name):
    given = arrays(name, np.float32)
    _, state = getattr(heed, name)(**given, return_state=True)
    assert heed.explain(name, **given, initial_state=state, positions=(B,)) == heed.explain(
        name, **given, initial_state=state, positions=[0] * B)
