# Tests of `heed run` and `heed compare` on recurrent mechanisms: input, output, errors.
import re

import heed
import numpy as np
import pytest
import scans
from cli_program import SHIPPED, attention, document, load, needs_program, qkv, random, refused, save
from cli_program import heed as program
from mechanisms import DESCRIPTIONS

pytestmark = needs_program

B, T, H, K, V = 2, 70, 3, 8, 5
C = H * V
STATES = ("state", "state_z", "state_m")  # in files
DECAYS = ((H,), (H, K), (B, T, H), (B, T, H, K))  # one of them is a mechanism's


OPTIONAL = {"retention": {"log_decay"}}  # Python takes these by keyword alone


def call(name, arrays, **options):
    """o and the parts of the state that the Python function gives."""
    o, state = getattr(heed, name)(**arrays, return_state=True, **options)
    return (o, *state) if isinstance(state, tuple) else (o, state)


def inputs(name, dtype=np.float32):
    """{argument: array} of a mechanism; None if it takes others than these tests know."""
    keys, values, gates = (B, T, H, K), (B, T, H, V), (B, T, H)
    shapes = {"q": keys, "r": keys, "k": keys, "v": values, "i": values, "u": (H, K)}
    if "f" in DESCRIPTIONS[name]["inputs"]:
        shapes |= {"i": gates, "f": gates}
    decays = DECAYS
    if DESCRIPTIONS[name]["channels"]:
        shapes, decays = {"k": (B, T, C), "v": (B, T, C), "u": (C,)}, ((C,),)
    optional = set(DESCRIPTIONS[name]["optional"]) - OPTIONAL.get(name, set())
    names = [x for x in DESCRIPTIONS[name]["inputs"] if x not in optional]
    if not set(names) <= {*shapes, "log_decay"}:
        return None
    arrays = {x: random(*shapes[x], seed=i).astype(dtype) if x in shapes else None for i, x in enumerate(names)}
    for shape in decays if "log_decay" in arrays else ():
        arrays["log_decay"] = -0.1 * abs(random(*shape, seed=9)).astype(dtype)
        try:
            call(name, arrays)
            break
        except heed.InvalidArgument:
            continue
    return arrays


NAMES = [name for name in sorted(DESCRIPTIONS) if hasattr(heed, f"{name}_step") and inputs(name)]
SUFFICE = [name for name in NAMES if set(inputs(name)) - OPTIONAL.get(name, set()) == {"q", "k", "v"}]  # for compare


def save_inputs(path, arrays, dtypes=None):
    kinds = {np.dtype(np.float32): "F32", np.dtype(np.float64): "F64", np.dtype(np.float16): "F16"}
    return save(path, {name: (kinds[x.dtype], x) for name, x in arrays.items()}, dtypes)


def test_there_are_recurrences():
    assert {"linear_attention", "retention", "gla", "hgrn2", "rwkv5", "rwkv6"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_run_is_the_python_function(tmp_path, name, dtype):
    arrays = inputs(name, dtype)
    out = tmp_path / "o.safetensors"
    run = document("run", name, save_inputs(tmp_path / "x.safetensors", arrays), "-o", out)
    assert list(run) == ["mechanism", "file", "layer", "shapes", "dtype", "options", "non_finite", "seconds", "flops",
                         "kernel", "output"]
    assert run["mechanism"] == name and run["shapes"] == {x: list(a.shape) for x, a in arrays.items()}
    tensors, metadata = load(out)
    o, *states = call(name, arrays)
    assert run["output"]["shape"] == list(o.shape) and run["flops"] >= 4 * B * T * C * (K if o.ndim > 3 else 1)
    assert run["seconds"] > 0
    assert metadata["mechanism"] == name and set(tensors) == {"o", *STATES[: len(states)]}
    assert tensors["o"].dtype == dtype and (tensors["o"] == o).all()
    assert all((tensors[key] == x).all() for key, x in zip(STATES, states))


def test_run_takes_a_scale(tmp_path):
    arrays = inputs("gla")
    out = tmp_path / "o.npy"
    document("run", "gla", save_inputs(tmp_path / "x.safetensors", arrays), "--scale", "0.7", "-o", out)
    assert (np.load(out) == heed.gla(**arrays, scale=0.7)).all()


def test_a_scale_in_the_file_is_attentions(tmp_path):
    arrays = inputs("gla")
    out = tmp_path / "o.npy"
    document("run", "gla", save_inputs(tmp_path / "x.safetensors", arrays, {"scale": "3", "causal": "false"}), "-o",
             out)
    assert (np.load(out) == heed.gla(**arrays)).all()


@pytest.mark.parametrize("name", NAMES)
def test_files_without_a_batch(tmp_path, name):
    arrays = inputs(name)
    one = {x: a[0] if a.ndim > 2 else a for x, a in arrays.items()}
    out = tmp_path / "o.safetensors"
    run = document("run", name, save_inputs(tmp_path / "x.safetensors", one), "-o", out)
    tensors, _ = load(out)
    o, *states = call(name, arrays)
    assert run["shapes"] == {x: list(a.shape) for x, a in one.items()} and run["output"]["shape"] == list(o.shape[1:])
    assert (tensors["o"] == o[0]).all()
    assert all((tensors[key] == x[0]).all() for key, x in zip(STATES, states))


def test_decays_may_be_left_out_and_given(tmp_path):
    arrays = inputs("retention")
    out = tmp_path / "o.npy"
    document("run", "retention", save_inputs(tmp_path / "x.safetensors", arrays), "-o", out)
    assert (np.load(out) == heed.retention(**arrays)).all()
    del arrays["log_decay"]
    document("run", "retention", save_inputs(tmp_path / "y.safetensors", arrays), "-o", out)
    assert (np.load(out) == heed.retention(**arrays)).all()


def test_decays_of_columns_may_be_given(tmp_path):
    arrays = inputs("gla") | {"log_decay_v": -0.1 * abs(random(B, T, H, V, seed=7)).astype(np.float32)}
    out = tmp_path / "o.npy"
    run = document("run", "gla", save_inputs(tmp_path / "x.safetensors", arrays), "--heads", "1,2", "-o", out)
    assert run["shapes"]["log_decay_v"] == [B, T, 2, V]
    assert (np.load(out) == heed.gla(**arrays)[:, :, 1:]).all()
    assert not (np.load(out) == heed.gla(**inputs("gla"))[:, :, 1:]).all()


def test_heads_and_layers(tmp_path):
    arrays = inputs("simple_gla")
    prefixed = {f"layers.{i}.{x}": a * (i + 1) for i in range(2) for x, a in arrays.items()}
    file = save_inputs(tmp_path / "x.safetensors", prefixed)
    out = tmp_path / "o.npy"
    run = document("run", "simple_gla", file, "--layer", 1, "--heads", "2,0,2", "-o", out)
    assert run["layer"] == "layers.1" and run["shapes"]["log_decay"] == [B, T, 3]
    expected = heed.simple_gla(**{x: 2 * a for x, a in arrays.items()})
    assert (np.load(out) == expected[:, :, [2, 0, 2]]).all()
    assert "expected 0 to 2" in refused(2, "run", "simple_gla", file, "--heads", "3")


def test_fewer_key_heads_are_read_by_several_queries(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(H=4, Hkv=2))
    given, _ = load(file)
    q, k, v = (given[x] for x in "qkv")
    document("run", "linear_attention", file, "-o", tmp_path / "o.npy")
    expected = heed.linear_attention(q, *(np.repeat(x, 2, axis=2) for x in (k, v)))
    assert (np.load(tmp_path / "o.npy") == expected).all()


def test_more_value_heads_stay(tmp_path):
    arrays = {"q": random(1, T, 2, K), "k": random(1, T, 2, K, seed=1), "v": random(1, T, 4, V, seed=2),
              "log_decay": -abs(random(1, T, 4, seed=3))}
    file = save_inputs(tmp_path / "x.safetensors", arrays)
    run = document("run", "simple_gla", file, "-o", tmp_path / "o.npy")
    assert run["shapes"]["q"] == [1, T, 2, K] and (np.load(tmp_path / "o.npy") == heed.simple_gla(**arrays)).all()


def test_gates_keep_their_digits_beside_16_bits(tmp_path):
    arrays = inputs("simple_gla")
    file = save_inputs(tmp_path / "x.safetensors", arrays)
    document("run", "simple_gla", file, "--dtype", "f16", "-o", tmp_path / "o.npy")
    half = [arrays[x].astype(np.float16) for x in "qkv"]
    assert (np.load(tmp_path / "o.npy") == heed.simple_gla(*half, arrays["log_decay"])).all()


def test_npy_files(tmp_path):
    arrays = inputs("linear_attention")
    args = []
    for name, x in arrays.items():
        np.save(tmp_path / f"{name}.npy", np.asfortranarray(x) if name == "k" else x)
        args += [f"--{name}", tmp_path / f"{name}.npy"]
    document("run", "linear_attention", *args, "-o", tmp_path / "o.npy")
    assert (np.load(tmp_path / "o.npy") == heed.linear_attention(**arrays)).all()
    assert "expected a .safetensors file of q, k, v and log_decay" in refused(1, "run", "gla", *args)


def test_report(tmp_path):
    done = program("run", "gla", save_inputs(tmp_path / "x.safetensors", inputs("gla")), "--threads", 1)
    assert done.returncode == 0 and done.stderr == ""
    for word in ("log_decay [2,70,3,8]", "state [2,3,8,5] f32", "o [2,70,3,5] f32", "FLOP/s", "sha256", "kernel"):
        assert word in done.stdout


@pytest.mark.parametrize("change, expected", [
    ({"log_decay": None}, "expected q, k, v and log_decay, or layers such as layers.0.q"),
    ({"log_decay": (B, T, H)}, "log_decay has shape [2,70,3], expected [B,T,H,K] or [T,H,K]"),
    ({"log_decay": (B, T, H, K + 1)}, "log_decay"),
    ({"k": (B, T, H, K + 1)}, "k"),
    ({"v": (B, T + 1, H, V)}, "v"),
    ({"k": (B, T, H + 1, K)}, "expected a divisor of 4 heads"),
    ({"v": (T, H, V)}, "v has shape [70,3,5], expected [B,T,H,V]"),
])
def test_wrong_tensors(tmp_path, change, expected):
    arrays = inputs("gla")
    for name, shape in change.items():
        arrays[name] = None if shape is None else random(*shape).astype(np.float32)
    file = save_inputs(tmp_path / "x.safetensors", {x: a for x, a in arrays.items() if a is not None})
    line = refused(1, "run", "gla", file, "-o", tmp_path / "o.npy")
    assert line.startswith(f"heed: {file}: ") and expected in line and not (tmp_path / "o.npy").exists()


@pytest.mark.parametrize("name", scans.DESCRIPTIONS)
def test_run_of_a_scan_is_the_python_function(tmp_path, name):
    arrays = scans.arguments(name, np.float32, rank=3 if name == "selective_scan" else None)
    out = tmp_path / "o.safetensors"
    run = document("run", name, save_inputs(tmp_path / "x.safetensors", arrays), "-o", out)
    tensors, _ = load(out)
    assert run["kernel"].split()[0] == heed.explain(name, **arrays)["kernel"]
    if name in scans.STATELESS:
        assert set(tensors) == {"o"} and (tensors["o"] == scans.call(name, arrays)).all()
        return
    o, state = scans.call(name, arrays, return_state=True)
    states = state._asdict() if isinstance(state, tuple) else {"S": state}
    assert (tensors["o"] == o).all() and len(tensors) == 1 + len(states)
    for field, x in states.items():
        assert (tensors["state" if field == "S" else f"state_{field}"] == x).all()


@pytest.mark.parametrize("args", [["--causal"], ["--no-causal"], ["--window", "3,0"], ["--softcap", "2"]])
def test_options_of_attention_are_refused(tmp_path, args):
    file = save_inputs(tmp_path / "x.safetensors", inputs("gla"))
    assert f"{args[0]} is not an option of gla, expected --scale alone" in refused(2, "run", "gla", file, *args)
    assert "expected a finite number" in refused(2, "run", "gla", file, "--scale", "nan")


@pytest.mark.parametrize("shape", [{"B": 0}, {"T": 0}, {"H": 0, "Hkv": 0}, {"T": 1}, {"D": 1}])
def test_edge_shapes(tmp_path, shape):
    sizes = {"B": 1, "T": 4, "H": 2, "Hkv": 2, "D": 3} | shape
    tensors = {x: ("F32", random(sizes["B"], sizes["T"], sizes["H"], sizes["D"])) for x in "qkv"}
    file = save(tmp_path / "x.safetensors", tensors)
    assert len(document("run", "retention", file)["output"]["sha256"]) == 64
    assert {row["mechanism"] for row in document("compare", file)["rows"]} > {"attention", "retention"}


# compare.

def test_compare_has_a_row_for_each_mechanism_or_says_why_not():
    compare = document("compare", SHIPPED, "--dtype", "f32")
    rows, skipped = compare["rows"], {x["mechanism"]: x["reason"] for x in compare["skipped"]}
    state = {row["mechanism"]: row["state_bytes"] for row in rows}
    assert set(state) | set(skipped) == {op["name"] for op in document("list")}
    assert not set(state) & set(skipped)
    assert set(SUFFICE) >= {"linear_attention", "based", "retention"} and set(SUFFICE) <= set(state)
    assert {"linformer", "performer", "gla", "simple_gla", "rwkv5", "rwkv6"} <= set(state)
    assert {"deltaformer", "log_linear_attention", "wall_attention"} <= set(state)
    assert skipped["ssd"] == "no x, dt, A, B and C, expected beside q, k and v"
    assert skipped["hgrn2"] == "no log_decay and i, expected beside q, k and v"
    assert skipped["mesa"] == "no beta and lamb, expected beside q, k and v"
    assert skipped["parallax_attention"] == "no r, expected beside q, k and v"  # not RWKV's, which are queries
    assert skipped["attention_residual"] == "no residuals and query, expected beside q, k and v"
    exact = next(row for row in rows if row["options"].get("causal") and row["mechanism"] == "attention")
    assert exact["state_bytes"] == 371 * 12 * (32 + 32) * 4
    assert (state["linear_attention"] == 12 * (32 * 32 + 32) * 4
            and state["retention"] == state["gla"] == 12 * 32 * 32 * 4)
    # a state for each of ten levels, and the number of tokens
    assert state["log_linear_attention"] == 12 * 10 * 32 * 32 * 4 + 8


def test_compare_says_what_it_assumed(tmp_path):
    """Numbers of a mechanism with gates of its own, and with gates assumed, which other dtypes and mechanisms share."""
    arrays = inputs("gla")
    bare = document("compare", save_inputs(tmp_path / "x.safetensors", {x: arrays[x] for x in "qkv"}))
    assumed = {row["mechanism"]: row["assumed"] for row in bare["rows"]}
    assert assumed["gla"] == ["log_decay"] and assumed["rwkv6"] == ["log_decay",
                                                                    "u"] and assumed["linformer"] == ["e", "f"]
    assert assumed["performer"] == ["projection"] and assumed["attention"] == assumed["retention"] == []
    assert set(bare["assumed"]) == {"log_decay", "u", "e", "f", "projection", "level_scales"}
    text = program("compare", tmp_path / "x.safetensors", "--all").stdout
    assert "assumed, as the file has none: e, f: means of four tokens" in text
    assert re.search(r"^gla +causal, assumed ", text, re.M)
    given = document("compare", save_inputs(tmp_path / "y.safetensors", arrays))
    assert ({row["mechanism"]: row["assumed"] for row in given["rows"]}["gla"] == []
            and "log_decay" not in given["assumed"])
    assert {x["mechanism"]: x["reason"] for x in given["skipped"]}["simple_gla"] == \
        f"log_decay has shape {str([B, T, H, K]).replace(' ', '')}, expected [B,T,H] or [T,H]"
    q, k, v, g = (arrays[x].astype(np.float64) for x in ("q", "k", "v", "log_decay"))
    difference = heed.gla(q, k, v, g) - attention(q, k, v, causal=True)
    rows = {row["dtype"]: row for row in given["rows"] if row["mechanism"] == "gla"}
    assert rows["f64"]["max_error"] == pytest.approx(abs(difference).max(), rel=1e-9)
    drawn = {row["dtype"]: row["relative_error"] for row in bare["rows"] if row["mechanism"] == "gla"}
    assert drawn["f32"] == pytest.approx(drawn["f64"], rel=1e-5) != rows["f64"]["relative_error"]


def test_assumed_projections_are_means_of_stretches(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=37, H=4, Hkv=4))
    given, _ = load(file)
    q, k, v = (given[x].astype(np.float64) for x in "qkv")
    starts = [r * 37 // 10 for r in range(11)]
    e = np.array([[(begin <= t < end) / (end - begin) for t in range(37)]
                  for begin, end in zip(starts, starts[1:], strict=False)])
    difference = heed.linformer(q, k, v, e, e) - attention(q, k, v)
    (row,) = document("compare", file, "-m", "linformer", "--dtype", "f64")["rows"]
    assert row["max_error"] == pytest.approx(abs(difference).max(), rel=1e-9) and row["assumed"] == ["e", "f"]


def test_a_file_of_another_mechanism_is_compared_with_float64(tmp_path):
    """Tensors of Mamba-2: errors are those of rounding alone."""
    arrays = {"x": random(1, T, H, V), "dt": abs(random(1, T, H, seed=1)), "A": -abs(random(H, seed=2)),
              "B": random(1, T, 1, K, seed=3), "C": random(1, T, 1, K, seed=4), "D": random(H, seed=5)}
    file = save(tmp_path / "x.safetensors", {f"layers.3.{x}": ("F32", a) for x, a in arrays.items()})
    compare = document("compare", file)
    assert compare["layer"] == "layers.3" and "itself in float64" in compare["reference"]
    rows = {row["dtype"]: row for row in compare["rows"]}
    assert {row["mechanism"] for row in compare["rows"]} == {"ssd"} and rows["f64"]["max_error"] is None
    assert (0 < rows["f32"]["relative_error"] < 1e-5 < rows["f16"]["relative_error"] < rows["bf16"]["relative_error"]
            < 2e-2)
    assert {x["mechanism"] for x in compare["skipped"]} == {op["name"] for op in document("list")} - {"ssd"}
    assert "layers.3.A, " in refused(1, "compare", file, "-m", "attention")
    assert "expected q, k, v and log_decay" in refused(1, "compare", file, "-m", "ssd,gla")


@pytest.mark.parametrize("hkv", [4, 2])
def test_errors_are_against_exact_attention_of_the_same_causality(tmp_path, hkv):
    file = save(tmp_path / "x.safetensors", qkv(T=50, H=4, Hkv=hkv))
    given, _ = load(file)
    q, k, v = (given[x] for x in "qkv")
    wide = [q.astype(np.float64)] + [np.repeat(x, 4 // hkv, axis=2).astype(np.float64) for x in (k, v)]
    expected = attention(q, k, v, causal=True)
    rows = {row["mechanism"]: row for row in document("compare", file, "--dtype", "f64")["rows"]}
    for name in SUFFICE:
        difference = getattr(heed, name)(*wide) - expected
        assert rows[name]["options"] == {"causal": True}
        assert rows[name]["max_error"] == pytest.approx(abs(difference).max(), rel=1e-9)
        assert rows[name]["relative_error"] == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(expected),
                                                             rel=1e-9)
    causal = {row["mechanism"]: row for row in document("compare", file, "--dtype", "f64", "--causal")["rows"]}
    assert [causal[name]["max_error"] for name in SUFFICE] == [rows[name]["max_error"] for name in SUFFICE]


def test_a_mechanism_that_sees_all_keys_is_compared_with_what_sees_them_too(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=50, H=4, Hkv=4))
    given, _ = load(file)
    q, k, v = (given[x].astype(np.float64) for x in "qkv")
    difference = heed.efficient_attention(q, k, v) - attention(q, k, v)
    for args in ((), ("--causal",)):
        rows = document("compare", file, "-m", "efficient_attention", "--dtype", "f64", *args)["rows"]
        assert [(row["mechanism"], row["options"]) for row in rows] == [("efficient_attention", {})]
        assert rows[0]["max_error"] == pytest.approx(abs(difference).max(), rel=1e-9)


def test_compare_chosen_mechanisms(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv())
    rows = document("compare", file, "-m", "retention", "--dtype", "f32")["rows"]
    assert [row["mechanism"] for row in rows] == ["retention"]
    rows = document("compare", file, "-m", "attention", "--dtype", "f32")["rows"]
    assert [(row["mechanism"], row["options"]) for row in rows] == [("attention", {})]
    assert "no x, dt, A, B and C, expected beside q, k and v" in refused(1, "compare", file, "-m", "gla,ssd")


def test_compare_of_fewer_queries_than_keys_leaves_recurrences_out(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(Tk=31))
    assert {row["mechanism"] for row in document("compare", file)["rows"]} == {"attention", "certified_attention"}
    assert re.search(r"^left out: .*retention.*: k has shape \[1,31,4,8\], expected \[1,19,4,8\]$",
                     program("compare", file, "--all").stdout, re.M)
    assert "k has shape [1,31,4,8], expected [1,19,4,8]" in refused(1, "compare", file, "-m", "retention")


def test_compare_table_names_states(tmp_path):
    text = program("compare", save(tmp_path / "x.safetensors", qkv()), "--dtype", "f32").stdout
    assert re.search(r"^retention +causal .*  1\.00 KiB", text, re.M) and "causal where the row is" in text
