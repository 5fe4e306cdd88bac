# Tests of the program `heed`: every verb, every field of its JSON, every wrong word on its command line.
import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from cli_program import SHIPPED, VERBS, attention, document, heed, load, needs_program, qkv, refused, save

pytestmark = needs_program


def longformer(i, j):  # longformer(4, [0])
    return (abs(i - j) <= 2) | (i == 0) | (j == 0)


@pytest.fixture
def file(tmp_path):
    return save(tmp_path / "x.safetensors", qkv())


# Help, version, usage.

def test_version_is_one_line():
    assert re.fullmatch(r"heed \d+\.\d+\.\d+\n", heed("--version").stdout)


def test_help_names_all_verbs():
    done = heed("--help")
    assert done.returncode == 0 and done.stderr == ""
    assert all(re.search(rf"^  {verb} ", done.stdout, re.MULTILINE) for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_has_an_example(verb):
    done = heed(verb, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert f"Usage: heed {verb}" in done.stdout
    assert re.search(rf"Example:\n  heed {verb}", done.stdout)
    assert "--json" in done.stdout


@pytest.mark.parametrize("args, expected", [
    ([], "no verb, expected list"),
    (["bogus"], "verb is 'bogus', expected list"),
    (["view", "x.safetensors"], "--html is required"),
    (["view", "--html", "a.html"], "no tensors, expected FILE"),
    (["view", "x.safetensors", "--html", ""], "--html: is empty"),
    (["run"], "MECHANISM is required"),
    (["run", "attention"], "no tensors, expected FILE or --q --k --v"),
    (["run", "attention", ""], "FILE: is empty"),
    (["run", "nope", "x.safetensors"], "mechanism is nope, expected one of"),
    (["run", "attention", "--q", "a.npy"], "--k is missing, expected --q, --k and --v together"),
    (["run", "attention", "x.safetensors", "--v", "a.npy"], "both FILE and --q --k --v, expected one of them"),
    (["run", "attention", "a.safetensors", "b.safetensors"], "b.safetensors"),
    (["run", "attention", "x.safetensors", "--bogus"], "--bogus"),
    (["compare"], "no tensors"),
    (["compare", "x.safetensors", "-m", "attention,nope"], "mechanism is nope, expected one of"),
    (["verify", "nope"], "mechanism is nope, expected one of"),
    (["bench", "nope"], "mechanism is nope, expected one of"),
    (["list", "extra"], "extra"),
    (["run", "attention", "x.safetensors", "--causal", "--no-causal"], "--causal"),
])
def test_usage(args, expected):
    assert expected in refused(2, *args)


THREADS = ["0", "-1", "4097", "99999999999999999999", "two", "1.5", "1 ", ""]


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "list"])
@pytest.mark.parametrize("value", THREADS)
def test_bad_threads(verb, value):
    tensors = [SHIPPED] if verb in ("run", "compare", "view") else []
    line = refused(2, verb, *VERBS[verb], *tensors, "--threads", value)
    assert "--threads" in line
    assert f"is '{value}', expected 1 to 4096" in line or not value


@pytest.mark.parametrize("option, values, expected", [
    ("--window", ["3", "1,2,3", "-2,0", "0,-2", "a,b", "1,", ",", "1.5,2", "99999999999999999999,0"], "expected L,R"),
    ("--scale", ["nan", "inf", "-inf", "1e999", "x", "1,5", "0x10"], "expected a finite number"),
    ("--softcap", ["nan", "inf", "-1", "x"], "expected a finite number, 0 or more"),
    ("--dtype", ["i32", "float"], "expected f64, f32, bf16 or f16"),
    ("--isa", ["FOO", "avx", "Avx2"], "expected one of"),
    ("--layer", ["1", "-1", "layers.0", "q"], "expected 0"),
    ("--heads", ["4", "-1", "0,9", "0,,1", "a", "0-1", "99999999999999999999"], "expected 0 to 3"),
])
@pytest.mark.parametrize("verb", ["run", "compare", "view"])
def test_bad_option_values(file, verb, option, values, expected):
    for value in values:
        line = refused(2, verb, *VERBS[verb], file, option, value)
        assert option in line and expected in line
        assert f"'{value}'" in line or option == "--heads"
    assert option in refused(2, verb, *VERBS[verb], file, option, "")
    assert option in refused(2, verb, *VERBS[verb], file, option)


@pytest.mark.parametrize("pattern, expected", [
    ("nonsense(2)", "has 'nonsense(2)' at character 1, expected one of sliding_window, "),
    ("atrous(2) | dilated(3", "has the end at character 22, expected ','"),
    ("bigbird(block=0)", "bigbird: block is 0, expected 1 or more"),
    ("\ncaf\u00e9", "has 'caf??' at character 2, expected one of"),
    ("per_head([atrous(2)])", "has 1 heads, expected 4 as q"),
    ("csr([0, 1], [0, 3])", "csr: row_ptr ends with 1, expected 2"),
    ("global_tokens([[1], [2]])", "has global tokens of 2 batch entries, expected 1"),
])
@pytest.mark.parametrize("verb", ["run", "compare", "view"])
def test_bad_patterns(file, verb, pattern, expected):
    line = refused(2, verb, *VERBS[verb], file, "--pattern", pattern)
    assert line.startswith("heed: --pattern: ") and expected in line


def test_only_attention_has_patterns(file):
    assert "--pattern is not an option of retention" in refused(2, "run", "retention", file, "--pattern", "atrous(2)")
    assert "--pattern is not an option of gla, expected attention" in refused(
        2, "verify", "attention", "gla", "--pattern", "atrous(2)")
    assert "heed: --pattern: has '2 atrous' at character 1" in refused(2, "verify", "--pattern", "2 atrous")


def test_bad_isa_in_the_environment():
    line = refused(2, "info", env={"HEED_ISA": "FOO"})
    assert "HEED_ISA" in line and "expected one of" in line
    assert heed("--help", env={"HEED_ISA": "FOO"}).returncode == 0


# list, info.

def test_list():
    rows = document("list")
    assert [row["name"] for row in rows].count("attention") == 1
    for row in rows:
        assert list(row) == ["name", "family", "passes", "dtypes", "flops", "bytes", "state"]
        assert set(row["passes"]) <= {"forward", "backward", "step"} and row["passes"]
        assert set(row["dtypes"]) <= {"f64", "f32", "bf16", "f16"}
        assert all(isinstance(row[key], str) and row[key] for key in ("family", "flops", "bytes", "state"))
    assert "attention" in heed("list").stdout


@pytest.mark.usefixtures("uncapped")
def test_info():
    info = document("info")
    assert list(info) == ["version", "cpu", "threads", "simd", "tiles", "roofs"]
    assert heed("--version").stdout == f"heed {info['version']}\n"
    assert info["threads"] == len(os.sched_getaffinity(0))
    assert info["simd"]["target"] == info["simd"]["available"][0]
    assert isinstance(info["tiles"], bool) and info["roofs"] is None
    assert document("info", "--threads", 3)["threads"] == 3


def test_info_names_the_targets_of_the_build():
    simd = document("info")["simd"]
    assert list(simd) == ["target", "available", "compiled", "heed_targets"]
    assert simd["heed_targets"] == "all" and set(simd["available"]) <= set(simd["compiled"])
    assert f"{' '.join(simd['compiled'])} (HEED_TARGETS=all)" in heed("info").stdout


def test_info_obeys_the_cap():
    for target in document("info")["simd"]["available"]:
        assert document("info", "--isa", target)["simd"]["target"] == target
        assert document("info", env={"HEED_ISA": target})["simd"]["target"] == target
    for theirs, target in (("avx512", "AVX3"), ("avx2", "AVX2"), ("sse2", "SSE2")):
        if target in document("info")["simd"]["available"]:
            assert document("info", "--isa", theirs) == document("info", "--isa", target)


def test_the_package_runs_as_the_program():
    done = subprocess.run([sys.executable, "-m", "heed", "info", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["version"] == document("info")["version"]
    done = subprocess.run([sys.executable, "-m", "heed", "nonsense"], capture_output=True, text=True)
    assert done.returncode == heed("nonsense").returncode != 0 and done.stderr == heed("nonsense").stderr


def test_info_probe():
    roofs = document("info", "--probe")["roofs"]
    assert all(1e6 < roof < 1e15 for roof in roofs.values())
    assert 1.2 < roofs["fma_f32_flops_per_second"] / roofs["fma_f64_flops_per_second"] < 3
    assert "DRAM read" in heed("info", "--probe").stdout


# run.

def test_run(file, tmp_path):
    out = tmp_path / "o.safetensors"
    run = document("run", "attention", file, "-o", out)
    assert list(run) == ["mechanism", "file", "layer", "shapes", "dtype", "options", "non_finite", "seconds", "flops",
                         "kernel", "output"]
    assert run["mechanism"] == "attention" and run["file"] == str(file) and run["layer"] == ""
    assert run["shapes"] == {"q": [1, 19, 4, 8], "k": [1, 19, 2, 8], "v": [1, 19, 2, 8]}
    assert run["dtype"] == "f32" and run["seconds"] > 0 and run["flops"] == 2 * 16 * 19 * 19 * 4
    assert list(run["output"]) == ["shape", "dtype", "path", "sha256"]
    assert run["output"]["shape"] == [1, 19, 4, 8] and run["output"]["dtype"] == "f32"
    assert run["output"]["path"] == str(out)
    tensors, metadata = load(out)
    assert set(tensors) == {"o", "lse"} and metadata["mechanism"] == "attention"
    assert hashlib.sha256(tensors["o"].tobytes()).hexdigest() == run["output"]["sha256"]
    given, _ = load(file)
    np.testing.assert_allclose(tensors["o"], attention(given["q"], given["k"], given["v"]), atol=2e-6)
    assert tensors["lse"].shape == (1, 4, 19) and tensors["lse"].dtype == np.float32


def test_run_without_an_output_file(file):
    assert document("run", "attention", file)["output"]["path"] is None


@pytest.mark.parametrize("args, options", [
    (["--causal"], {"causal": True}),
    (["--window", "3,0"], {"window": (3, 0)}),
    (["--window", "-1,2"], {"window": (-1, 2)}),
    (["--causal", "--window", "4,-1"], {"causal": True, "window": (4, -1)}),
    (["--scale", "0.7"], {"scale": 0.7}),
    (["--scale", "-1e-1"], {"scale": -0.1}),
    (["--softcap", "1.5"], {"softcap": 1.5}),
    (["--causal", "--scale", "2", "--softcap", "3", "--window", "5,5"],
     {"causal": True, "scale": 2, "softcap": 3, "window": (5, 5)}),
    (["--pattern", "longformer(4, [0])"], {"pattern": longformer}),
    (["--pattern", "atrous(3) & sliding_window(9, 9)", "--causal", "--softcap", "1", "--window", "7,-1"],
     {"pattern": lambda i, j: (abs(i - j) % 3 == 0) & (abs(i - j) < 10), "causal": True, "softcap": 1,
      "window": (7, -1)}),
])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_options_mean_what_they_say(file, tmp_path, args, options, dtype):
    out = tmp_path / "o.npy"
    document("run", "attention", file, "-o", out, "--dtype", dtype, *args)
    given, _ = load(file)
    o = np.load(out)
    assert o.dtype == {"f32": np.float32, "f64": np.float64}[dtype]
    np.testing.assert_allclose(o, attention(given["q"], given["k"], given["v"], **options),
                               atol=1e-5 if dtype == "f32" else 1e-12)


def test_options_in_force(file, tmp_path):
    assert document("run", "attention", file)["options"] == {
        "scale": pytest.approx(8 ** -0.5), "causal": False, "window": [-1, -1], "softcap": 0, "pattern": None}
    given = save(tmp_path / "y.safetensors", qkv(), {"scale": "0.25", "causal": "true", "window": "3,0"})
    assert document("run", "attention", given, "--no-causal", "--softcap", 2)["options"] == {
        "scale": 0.25, "causal": False, "window": [3, 0], "softcap": 2, "pattern": None}
    assert document("run", "retention", file)["options"] == {"scale": None, "causal": True}
    assert document("run", "efficient_attention", file, "--scale", 2)["options"] == {"scale": 2, "causal": False}


def test_the_pattern_is_named(file):
    asked = "bigbird(block = 4,random=1) | atrous(3)"
    named = "bigbird(block=4, random=1, seed=0) | atrous(step=3)"
    assert document("run", "attention", file, "--pattern", asked)["options"]["pattern"] == named
    report = heed("run", "attention", file, "--pattern", asked).stdout
    assert re.search(rf"^options +{re.escape(named)}$", report, re.M)
    long = " | ".join(f"atrous({n})" for n in range(2, 40))
    assert document("run", "attention", file, "--pattern", long)["options"]["pattern"].endswith("atrous(step=39)")
    assert max(map(len, heed("run", "attention", file, "--pattern", long).stdout.splitlines())) < 200


@pytest.mark.parametrize("mechanism", ["attention", "retention"])
def test_numbers_that_are_not_finite_are_counted(tmp_path, mechanism):
    tensors = qkv(Hkv=4)
    assert document("run", mechanism, save(tmp_path / "x.safetensors", tensors))["non_finite"] == {}
    assert "not finite" not in heed("run", mechanism, tmp_path / "x.safetensors").stdout
    tensors["k"][1][0, 3, 1, :2] = np.nan, -np.inf
    tensors["v"][1][0, 5] = np.inf
    file = save(tmp_path / "x.safetensors", tensors)
    assert document("run", mechanism, file, "--dtype", "bf16")["non_finite"] == {"k": 2, "v": 32}
    assert re.search(r"^not finite +2 of the numbers of k: NaN or infinite$", heed("run", mechanism, file).stdout, re.M)


def test_heads(file, tmp_path):
    all_heads, some = tmp_path / "all.npy", tmp_path / "some.npy"
    document("run", "attention", file, "-o", all_heads)
    run = document("run", "attention", file, "-o", some, "--heads", "3,0,3")
    assert run["shapes"]["q"] == run["shapes"]["k"] == [1, 19, 3, 8]
    assert (np.load(some) == np.load(all_heads)[:, :, [3, 0, 3]]).all()


def test_three_axes_in_three_axes_out(tmp_path):
    tensors = {name: (dtype, x[0]) for name, (dtype, x) in qkv(Dv=5).items()}
    out = tmp_path / "o.safetensors"
    run = document("run", "attention", save(tmp_path / "x.safetensors", tensors), "-o", out)
    assert run["shapes"]["v"] == [19, 2, 5] and run["output"]["shape"] == [19, 4, 5]
    tensors, _ = load(out)
    assert tensors["o"].shape == (19, 4, 5) and tensors["lse"].shape == (4, 19)


def test_layers_by_name_and_index(tmp_path):
    tensors = {}
    for layer in (10, 2, 0):
        tensors |= qkv(T=layer + 3, prefix=f"model.layers.{layer}.")
    file = save(tmp_path / "x.safetensors", tensors)
    assert document("run", "attention", file)["layer"] == "model.layers.0"
    assert document("run", "attention", file, "--layer", "1")["layer"] == "model.layers.2"
    assert document("run", "attention", file, "--layer", 2)["shapes"]["q"][1] == 13
    assert document("run", "attention", file, "--layer", "model.layers.10")["shapes"]["q"][1] == 13
    line = refused(2, "run", "attention", file, "--layer", "model.layers.1")
    assert "expected 0 to 2 or one of model.layers.0, model.layers.2, model.layers.10" in line


@pytest.mark.parametrize("dtype, computed", [("F64", "f64"), ("F32", "f32"), ("F16", "f32"), ("BF16", "f32")])
def test_dtype_defaults_to_the_files_or_f32(tmp_path, dtype, computed):
    file = save(tmp_path / "x.safetensors", qkv(dtype=dtype))
    run = document("run", "attention", file)
    assert run["dtype"] == run["output"]["dtype"] == computed


def test_bf16_is_widened_exactly(tmp_path):
    wide = {name: ("F32", (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32))
            for name, (_, x) in qkv().items()}
    narrow = {name: ("BF16", x.view(np.uint32) >> 16) for name, (_, x) in wide.items()}
    runs = [document("run", "attention", save(tmp_path / f"{i}.safetensors", x)) for i, x in enumerate((wide, narrow))]
    assert runs[0]["output"]["sha256"] == runs[1]["output"]["sha256"]


def test_npy_files(tmp_path, file):
    arrays, _ = load(file)
    args = []
    for name, x in arrays.items():
        np.save(tmp_path / f"{name}.npy", np.asfortranarray(x) if name == "k" else x)
        args += [f"--{name}", tmp_path / f"{name}.npy"]
    run = document("run", "attention", *args)
    assert run["file"] == ", ".join(map(str, args[1::2]))
    assert run["output"]["sha256"] == document("run", "attention", file)["output"]["sha256"]
    assert "expected 0" in refused(2, "run", "attention", *args, "--layer", "1")


@pytest.mark.parametrize("threads", [2, 3, 8, 64])
def test_bits_do_not_depend_on_threads(threads):
    args = ["run", "attention", SHIPPED, "--layer", 1, "--causal"]
    assert document(*args, "--threads", threads)["output"]["sha256"] == \
        document(*args, "--threads", 1)["output"]["sha256"]


def test_most_threads():
    assert document("run", "attention", SHIPPED, "--heads", "0", "--threads", 4096)["seconds"] > 0


def test_isa_names_the_kernels_target(file):
    for target in document("info")["simd"]["available"]:
        assert target in document("run", "attention", file, "--isa", target)["kernel"]
    document("run", "attention", file, "--isa", "tiles")


@pytest.mark.parametrize("shape", [{"B": 0}, {"T": 1}, {"H": 0, "Hkv": 0}, {"D": 1}, {"T": 1, "Tk": 7}])
def test_edge_shapes(tmp_path, shape):
    run = document("run", "attention", save(tmp_path / "x.safetensors", qkv(**shape)))
    assert len(run["output"]["sha256"]) == 64


def test_report(file, tmp_path):
    done = heed("run", "attention", file, "-o", tmp_path / "o.npy", "--threads", 1)
    assert done.returncode == 0 and done.stderr == ""
    for word in ("q [1,19,4,8]", "f32", "FLOP/s", "1 thread", "sha256", "o.npy", "kernel"):
        assert word in done.stdout


# Metadata.

def test_metadata_is_the_default_and_is_named(tmp_path):
    tensors = qkv(prefix="layers.0.") | qkv(prefix="layers.1.")
    file = save(tmp_path / "x.safetensors", tensors, {
        "scale": "0.25", "causal": "true", "layers.1.scale": "0.5", "layers.1.window": "3,0", "softcap": "2",
        "not_recorded": "mask", "tokens": "[]"})
    given, _ = load(file)
    q, k, v = (given["layers.0." + name] for name in "qkv")
    for args, options in (
            ([], {"scale": 0.25, "causal": True, "softcap": 2}),
            (["--layer", 1], {"scale": 0.5, "causal": True, "softcap": 2, "window": (3, 0)}),
            (["--no-causal", "--scale", 1, "--softcap", 0], {"scale": 1}),
            (["--layer", 1, "--window", "-1,-1"], {"scale": 0.5, "causal": True, "softcap": 2})):
        document("run", "attention", file, "-o", tmp_path / "o.npy", *args)
        np.testing.assert_allclose(np.load(tmp_path / "o.npy"), attention(q, k, v, **options), atol=1e-5)
    report = heed("run", "attention", file).stdout
    assert "scale 0.25 from the file" in report and "causal true from the file" in report
    assert "the model also used mask" in report
    assert "from the file" in heed("compare", file).stdout


@pytest.mark.parametrize("name, value", [("scale", "big"), ("scale", "nan"), ("causal", "maybe"), ("window", "7"),
                                         ("softcap", "-1")])
def test_bad_metadata(tmp_path, name, value):
    file = save(tmp_path / "x.safetensors", qkv(), {name: value})
    line = refused(1, "run", "attention", file)
    assert f"{file}: metadata {name} is '{value}', expected" in line


# compare.

FIELDS = ["mechanism", "options", "selector", "assumed", "dtype", "seconds", "visited_pairs", "workspace_bytes",
          "state_bytes", "max_error", "relative_error",
          "kind", "flops_per_second", "roof"]


def test_compare_on_the_shipped_tensors():
    compare = document("compare", SHIPPED, "--layer", "layers.3")
    assert list(compare) == ["file", "layer", "tokens", "reference", "rows", "assumed", "skipped"]
    assert (compare["file"] == str(SHIPPED) and compare["layer"] == "layers.3" and "float64" in compare["reference"]
            and compare["tokens"] == 371)
    for row in compare["rows"]:
        assert list(row) == FIELDS
        assert row["seconds"] > 0 and row["workspace_bytes"] > 0 and row["flops_per_second"] > 0 and row["roof"] > 0
        assert (row["state_bytes"] == 0) == (row["mechanism"] in (
            "linformer", "longformer", "certified_attention", "efficient_attention", "performer",
            "wall_attention", "deltaformer"))
    exact = [row for row in compare["rows"] if row["mechanism"] == "attention"]
    causal = {row["dtype"]: row for row in exact if "causal" in row["options"]}
    assert list(causal) == ["f64", "f32", "bf16", "f16"] and causal["f64"]["max_error"] < 1e-13
    full = {row["dtype"]: row
            for row in exact if not set(row["options"]) & {"window", "causal"} and not row["selector"]}
    assert list(full) == ["f64", "f32", "bf16", "f16"]
    assert full["f32"]["relative_error"] < full["f16"]["relative_error"] < full["bf16"]["relative_error"] < 1e-2
    assert full["f64"]["max_error"] < 1e-13 and full["f64"]["relative_error"] < 1e-14
    assert 0 < full["f32"]["max_error"] < 1e-5 and full["f32"]["relative_error"] < 2e-6
    assert [full[dtype]["state_bytes"] for dtype in full] == [371 * 12 * 64 * size for size in (8, 4, 2, 2)]
    windows = {tuple(row["options"]["window"]): row["relative_error"] for row in exact
               if "window" in row["options"] and row["dtype"] == "f32"}
    assert list(windows) == [(32, 32), (64, 64), (128, 128)]
    assert all(error > 1e-4 for error in windows.values())


def test_compare_windows_are_narrower_than_the_keys(file):
    assert all("window" not in row["options"] for row in document("compare", file)["rows"])


def test_compare_causal_and_window(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=150))
    rows = [row for row in document("compare", file, "--causal", "-m", "attention")["rows"] if not row["selector"]]
    assert [row["options"].get("window") for row in rows[::4]] == [None, [63, 0], [127, 0]]
    assert all(row["options"]["causal"] for row in rows)
    kept = [min(150, row["options"].get("window", [149])[0] + 1) for row in rows if row["dtype"] == "f32"]
    assert kept == [row["state_bytes"] // (2 * 16 * 4) for row in rows if row["dtype"] == "f32"] == [150, 64, 128]
    rows = document("compare", file, "--causal", "--window", "9,0", "--dtype", "f32", "-m", "attention")["rows"]
    assert [(row["dtype"], row["options"].get("window")) for row in rows] == [("f32", None), ("f32", [9, 0])]
    given, _ = load(file)
    q, k, v = (given[name] for name in "qkv")
    expected, narrow = attention(q, k, v, causal=True), attention(q, k, v, causal=True, window=(9, 0))
    assert rows[0]["max_error"] < 1e-5
    assert rows[1]["max_error"] == pytest.approx(abs(narrow - expected).max(), rel=1e-4)
    assert rows[1]["relative_error"] == pytest.approx(
        np.linalg.norm(narrow - expected) / np.linalg.norm(expected), rel=1e-4)


def test_compare_has_a_row_with_the_pattern_beside_exact_attention(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=700))
    compare = document("compare", file, "-m", "attention,retention", "--window", "90,5", "--pattern",
                       "longformer(4, [0])")
    names = [row["options"] for row in compare["rows"] if row["dtype"] == "f64"]
    assert [sorted(set(options) - {"scale"}) for options in names] == [[], ["causal"], ["pattern", "window"],
                                                                       ["causal"]]
    assert names[2] == {"window": [90, 5], "pattern": "longformer(window=4, tokens=[0])"}
    given, _ = load(file)
    q, k, v = (given[name] for name in "qkv")
    expected, sparse = attention(q, k, v), attention(q, k, v, window=(90, 5), pattern=longformer)
    exact, few = (next(row for row in compare["rows"] if row["dtype"] == "f64" and row["options"] == names[n])
                  for n in (0, 2))
    assert exact["max_error"] < 1e-13
    assert few["max_error"] == pytest.approx(abs(sparse - expected).max(), rel=1e-9)
    assert few["relative_error"] == pytest.approx(np.linalg.norm(sparse - expected) / np.linalg.norm(expected),
                                                  rel=1e-9)
    # Tiles of 64 keys about the diagonal, and the first: at most four of eleven.
    assert exact["visited_pairs"] == 4 * 700 * 700 and 0 < few["visited_pairs"] < 0.4 * exact["visited_pairs"]
    assert all(row["visited_pairs"] is None for row in compare["rows"] if row["mechanism"] == "retention")
    table = heed("compare", file, "-m", "attention", "--pattern", "longformer(4, [0])").stdout
    assert len(re.findall(r"^attention +longformer\(window=4, tokens=\[0\]\) ", table, re.M)) == 2
    assert not re.search("^attention +window", table, re.M), "what is typed stands in place of windows"
    assert re.search(r"^attention +full .* 100\.0 % ", table, re.M)


def test_a_large_problem_with_a_pattern_is_compared_with_attention_without_it(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=2100, H=4, Hkv=4, D=64))
    compare = document("compare", file, "--pattern", "sliding_window(7, 7)", "-m", "attention", "--dtype", "f64")
    assert re.search(r"kernel .* of the scalar reference on \d+ queries", compare["reference"])
    exact, sparse = compare["rows"]
    assert 0 < exact["max_error"] < 1e-13 and sparse["max_error"] > 1e-3


def test_a_large_problem_is_compared_with_a_kernel_that_is_checked_itself(tmp_path):
    file = save(tmp_path / "x.safetensors", qkv(T=2100, H=4, Hkv=4, D=64))
    compare = document("compare", file, "--window", "7,7", "-m", "attention")
    assert re.search(r"kernel .* of the scalar reference on \d+ queries", compare["reference"])
    exact, single, brief, half, *windows = compare["rows"]
    assert [row["dtype"] for row in (exact, single, brief, half)] == ["f64", "f32", "bf16", "f16"]
    assert 0 < exact["max_error"] < 1e-13 < single["max_error"] < 1e-5
    assert all(row["max_error"] > 1e-3 for row in windows)


def test_compare_table_and_page(file, tmp_path):
    page = tmp_path / "a.html"
    done = heed("compare", file, "-m", "attention", "--html", page, "--scale", "0.5")
    assert done.returncode == 0 and done.stderr == ""
    errors, times, shares = re.split("\n(?:time of a call|speed as a share)", done.stdout)
    for text, last in ((errors, "max error"), (times, "visited +workspace +state"), (shares, "speed +roof")):
        assert re.search(rf"^mechanism +options +f64 +f32 +bf16 +f16 +{last}$", text, re.M)
        assert len(re.findall(r"^attention +full +", text, re.M)) == 1, "dtypes are columns"
    assert re.search(r"^attention +full +(\S+ % +){4}\S+ [MG]FLOP/s +\S+ [GT]FLOP/s$", shares, re.M)
    assert re.search(r"^attention +full +(\S+ [mu]?s +){4}\S+ % +\S+ KiB +\S+ KiB$", times, re.M)
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>") and "<td" in text and not re.search("https?:", text)
    refused(1, "compare", file, "--html", tmp_path / "missing" / "a.html")


def test_compare_tells_functions_of_another_nature_apart():
    """Three sections, in this order, whose rows the document marks. Errors of the last are printed with --all."""
    brief, full = heed("compare", SHIPPED).stdout, heed("compare", SHIPPED, "--all").stdout
    compare = document("compare", SHIPPED, "--dtype", "f32")
    kinds = {}
    for row in compare["rows"]:
        kinds.setdefault(row["kind"], set()).add(row["mechanism"])
    assert kinds["exact"] == {"attention"}
    assert kinds["approximate"] == {"attention", "longformer", "certified_attention"}
    assert kinds["other"] > {"retention", "linear_attention", "gla", "performer", "linformer"}
    assert all(row["kind"] == "approximate" for row in compare["rows"] if row["selector"] or "window" in row["options"])
    for text in (brief, full):
        assert max(map(len, text.splitlines()[1:])) <= 120  # after the path
        exact, approximate, other = re.split(r"\n(?:Approximations|Other functions): ", text)
        for section, kind in ((exact, "exact"), (approximate, "approximate"), (other, "other")):
            assert set(re.findall(r"^(?!mechanism )([a-z_0-9]+) {2,}\S", section, re.M)) == kinds[kind]
        assert other.startswith("only training makes their outputs comparable with those of attention")
        assert "rms error" in exact and "rms error" in approximate and ("rms error" in other) == (text == full)
    left_out = [line for line in brief.splitlines() if "left out" in line]
    assert left_out == [f"left out: {len(compare['skipped'])} mechanisms that do not take these tensors; "
                        "--all prints which and why"]
    assert "assumed, as the file has none" not in brief and "assumed, as the file has none" in full
    named = {name for line in re.findall(r"^left out: (.*?): ", full, re.M) for name in line.split(", ")}
    assert named == {x["mechanism"] for x in compare["skipped"]} and "--all" not in full
    assert "rms error" in heed("compare", SHIPPED, "-m", "retention").stdout, "what is named is printed in full"


def test_the_page_escapes_names(tmp_path):
    folder = tmp_path / "<b>&"
    folder.mkdir()
    file = save(folder / "x.safetensors", qkv())
    assert heed("compare", file, "--html", tmp_path / "a.html").returncode == 0
    text = (tmp_path / "a.html").read_text()
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text


def test_nan_in_the_tensors_is_null_in_the_json(tmp_path):
    tensors = qkv()
    tensors["v"][1][0, 3] = np.nan
    compare = document("compare", save(tmp_path / "x.safetensors", tensors), "-m", "attention")
    assert all(row["max_error"] in (None, 0) or row["max_error"] < 1e-5 for row in compare["rows"])
