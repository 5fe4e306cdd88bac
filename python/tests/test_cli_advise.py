# Tests of `heed advise`: ranks and their reasons, errors on the user's tensors, predictions of a cost model, bad input.
import json
import re

import numpy as np
import pytest
from cli_program import SHIPPED, attention, document, heed, load, needs_program, qkv, random, refused, save

pytestmark = needs_program

T = 520  # selectors choose among nine blocks of these tokens


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    tensors = qkv(T=T, H=2, Hkv=1, D=16)
    tensors["q"] = ("F32", 3 * tensors["q"][1])
    return save(tmp_path_factory.mktemp("advise") / "x.safetensors", tensors, {"causal": "true"})


@pytest.fixture(scope="module")
def advice(file, no_model):
    return document("advise", file, "--seconds", "0.3", env=no_model)


@pytest.fixture(scope="module")
def no_model(tmp_path_factory):
    """An environment without a cost model."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A model of this machine, of one mechanism and one thread, as the program writes it."""
    path = tmp_path_factory.mktemp("model") / "model.json"
    found = document("advise", "--calibrate", "-m", "retention", "--seconds", 0, "--threads", 1, "--model", path)
    return path, found


def with_fits(calibrated, path, fits, **changes):
    """A copy of the calibrated model with other fits: {work: {unit: seconds}} in f32 and bf16."""
    model = json.loads(calibrated[0].read_text()) | changes
    model["fits"] = [{"work": work, "dtype": dtype, "threads": 1, "seconds": seconds} for work, seconds in fits.items()
                     for dtype in ("f32", "bf16")]
    path.write_text(json.dumps(model))
    return path


def row_of(advice, mechanism, options=None, dtype="f32"):
    return next(row for row in advice["rows"] if row["mechanism"] == mechanism and row["dtype"] == dtype
                and options in (None, row["options"]))


# Rows.

def test_every_field(advice, file):
    assert list(advice) == ["file", "layer", "for", "shape", "length", "sample_tokens", "threads", "cpu", "target",
                            "budget", "model", "prediction_errors", "rows", "left_out", "remarks"]
    assert (advice["file"], advice["for"], advice["length"], advice["sample_tokens"]) == (str(file), "prefill", T, T)
    assert advice["model"] is None and advice["budget"] == {"memory_bytes": None, "error": None}
    assert len(advice["rows"]) > 20
    for i, row in enumerate(advice["rows"]):
        assert list(row) == ["rank", "mechanism", "options", "python", "dtype",
                             "threads", "seconds", "predicted_seconds", "measured_seconds", "predicted_sample_seconds",
                             "memory_bytes", "workspace_bytes", "state_bytes", "relative_error", "max_error",
                             "kept", "softmax", "causal", "assumed", "within", "frontier", "reason"]
        assert (row["rank"] == i + 1 and row["seconds"] == row["measured_seconds"] > 0
                and row["predicted_seconds"] is None)
        assert row["within"] and row["reason"] and row["memory_bytes"] > row["workspace_bytes"] >= 0
    seconds = [row["seconds"] for row in advice["rows"]]
    assert seconds == sorted(seconds) and advice["rows"][0]["reason"].startswith("fastest")


def test_errors_are_those_of_the_calls_in_python(advice, file):
    """Each row's call, made in Python, is as far from exact attention as the row says."""
    heed = pytest.importorskip("heed")
    tensors, _ = load(file)
    q, k, v = (tensors[name].astype(np.float64).astype(np.float32) for name in "qkv")
    expected = attention(q, k, v, causal=True)
    made = 0
    for row in advice["rows"]:
        if row["dtype"] != "f32" or row["assumed"]:
            continue
        heads = ((q, k, v) if row["softmax"] and row["mechanism"] != "longformer"
                 else (q, *(np.repeat(x, 2, axis=2) for x in (k, v))))
        o = eval(row["python"], {"heed": heed}, dict(zip("qkv", heads)))
        error = np.sqrt(((o - expected) ** 2).sum() / (expected ** 2).sum())
        assert row["relative_error"] == pytest.approx(error, rel=1e-3, abs=2e-7), row["python"]
        assert row["max_error"] == pytest.approx(abs(o - expected).max(), rel=1e-3, abs=2e-6)
        made += 1
    assert made > 12


def test_the_frontier_is_what_nothing_is_faster_and_closer_than(advice):
    rows = [row for row in advice["rows"] if row["relative_error"] is not None]
    for row in rows:
        beaten = any(other["seconds"] <= row["seconds"] and other["relative_error"] <= row["relative_error"]
                     and (other["seconds"], other["relative_error"]) != (row["seconds"], row["relative_error"])
                     for other in rows)
        assert row["frontier"] == (not beaten)
    assert 2 <= sum(row["frontier"] for row in rows) < len(rows)


def test_reasons_tell_other_functions_apart(advice):
    retention, dense = row_of(advice, "retention"), row_of(advice, "attention", "causal")
    assert not retention["softmax"] and "another function than softmax attention, untrained here" in retention["reason"]
    assert dense["softmax"] and "another function" not in dense["reason"] and dense["relative_error"] < 1e-6
    assert "sees later tokens" in row_of(advice, "longformer")["reason"]
    assert any("in a model that was trained with it nothing is lost" in line for line in advice["remarks"])


def test_memory_is_arguments_workspace_and_state(advice):
    for dtype, size in (("f32", 4), ("bf16", 2)):
        row = row_of(advice, "attention", "causal", dtype)
        arguments = T * (2 * 16 + 2 * 16 + 2 * 16) * size
        assert (row["state_bytes"] == T * 2 * 16 * size and row["memory_bytes"] == arguments + row["workspace_bytes"]
                + row["state_bytes"])
        assert row_of(advice, "attention", "causal window 255,0", dtype)["state_bytes"] == 256 * 2 * 16 * size
    assert row_of(advice, "retention")["state_bytes"] == 2 * 16 * 16 * 4


@pytest.mark.parametrize("purpose, names", [
    ("training", {"attention", "retention", "longformer"}),
    ("decode", {"attention", "certified_attention", "retention"})])
def test_other_purposes(file, purpose, names, no_model):
    found = document("advise", file, "--for", purpose, "--seconds", "0.3", env=no_model)
    assert found["for"] == purpose and names <= {row["mechanism"] for row in found["rows"]}
    if purpose == "decode":
        assert row_of(found, "attention", "cache")["relative_error"] < 1e-6
        assert 1e-4 < row_of(found, "attention", "int8 cache")["relative_error"] < 0.1
        assert all(row["causal"] for row in found["rows"])
    else:
        assert "certified_attention" not in {row["mechanism"] for row in found["rows"]}
        assert row_of(found, "attention", "causal")["memory_bytes"] > 2 * T * 6 * 16 * 4


def test_the_shipped_tensors_have_a_table(no_model):
    text = heed("advise", SHIPPED, "--layer", 2, "--error", "0.05", "--seconds", 5, "--rows", 3, env=no_model).stdout
    lines = text.splitlines()
    assert lines[0] == f"{SHIPPED} layers.2" and "prefill of 371 tokens" in lines[1]
    header = next(i for i, line in enumerate(lines) if line.startswith("rank  mechanism"))
    assert lines[header].split()[2:6] == ["options", "dtype", "measured", "rms"]
    assert [line.split()[0] for line in lines[header + 1:header + 4]] == ["1", "2", "3"] and lines[header + 4] == ""
    assert "fastest within the error of 0.05" in lines[header + 1]
    assert re.search(r"^\d+ more with --rows 0$", text, re.M) and "rank 1 in Python: heed." in text
    assert "no predictions: heed advise --calibrate" in text and "left out: nsa: needs gates too" in text


def test_a_file_with_more_tensors_has_more_rows(tmp_path, no_model):
    tensors = qkv(T=40, H=2, Hkv=2, D=8)
    tensors["beta"] = ("F32", 1 / (1 + np.exp(-random(1, 40, 2))))
    found = document("advise", save(tmp_path / "x.safetensors", tensors), "-m", "delta_rule", env=no_model)
    assert {row["dtype"] for row in found["rows"]} == {"f32", "bf16"} and found["left_out"] == []


# Budgets.

def test_budgets_order_rows(file, no_model):
    found = document("advise", file, "--error", "1e-5", "--memory", "100M", "--seconds", "0.3", env=no_model)
    assert found["budget"] == {"memory_bytes": 100 * 2**20, "error": 1e-5}
    within = [row["within"] for row in found["rows"]]
    assert within == sorted(within, reverse=True) and 0 < sum(within) < len(within)
    assert all(row["relative_error"] <= 1e-5 for row in found["rows"] if row["within"])
    assert "times the budget" in found["rows"][-1]["reason"]
    assert found["rows"][0]["reason"].startswith("fastest within the error of 1e-05 and the memory of 100 MiB")


def test_a_budget_that_nothing_meets_says_what_would(file, no_model):
    line = refused(1, "advise", file, "--error", "1e-12", "--seconds", "0.3", env=no_model)
    needed = re.fullmatch(r"heed: error is 1e-12, expected (\S+) or more: attention causal in f32 is "
                          r"closest\n", line)[1]
    assert 1e-9 < float(needed) < 1e-5
    line = refused(1, "advise", file, "--memory", 1000, "--seconds", "0.3", env=no_model)
    assert re.fullmatch(r"heed: memory is 1000 B, expected \S+ KiB or more: \S+ .* takes least at this length\n", line)


# Bad input.

@pytest.mark.parametrize("args, expected", [
    ([], "no tensors, expected FILE, --q --k --v, --shape or --calibrate"),
    (["x.safetensors", "--shape", "1,2,3,4"], "both FILE and --shape, expected one of them"),
    (["--shape", "1,2,3,4", "--error", "0.1"], "both --shape and --error, expected a FILE"),
    (["--calibrate", "--shape", "1,2,3,4"], "both --calibrate and --shape, expected one of them"),
    (["x.safetensors", "--calibrate"], "both --calibrate and FILE, expected one of them"),
    (["--calibrate", "--error", "1"], "both --calibrate and --error"),
    (["x.safetensors", "--for", "inference"], "--for is 'inference', expected prefill, training or decode"),
    (["x.safetensors", "-m", "attention,nope"], "mechanism is nope, expected one of"),
    (["--calibrate", "-m", "nope"], "mechanism is nope, expected one of"),
    *((["x.safetensors", "--length", value], f"--length is '{value}', expected 1 to 4294967296")
      for value in ("0", "-1", "x", "1.5", "1e99")),
    *((["x.safetensors", "--error", value], f"--error is '{value}', expected 0 to")
      for value in ("-1", "nan", "x", "inf")),
    *((["x.safetensors", "--memory", value], f"--memory is '{value}', expected bytes above 0") for value in
      ("0", "-1", "x", "G", "1Q", "nan", "inf", "1e999", "1 G", "iB")),
    *((["--shape", value], f"--shape is '{value}', expected ") for value in
      ("1,2,3", "1,2,3,4,5", "0,2,3,4", "1,-2,3,4", "a,b,c,d", "1,2,3x2,4", "1,2,4x2x1,4", "1,2,x,4",
       "1,99999999999,3,4", "")if value),
    *((["x.safetensors", "--ranks", value], f"--ranks is '{value}', expected 1 to 4096") for value in
      ("0", "-1", "x", "2.5", "4097")),
    *((["x.safetensors", "--ranks", "2", "--bandwidth", value],
       f"--bandwidth is '{value}', expected bytes per second above 0") for value in
      ("0", "-1", "x", "G", "1Q", "inf", "nan", "1e999", "1 G", "100MB")),
    *((["x.safetensors", "--ranks", "2", "--latency", value], f"--latency is '{value}', expected seconds of 0 or more")
      for value in ("-1", "-1us", "x", "us", "1h", "inf", "nan")),
    (["x.safetensors", "--bandwidth", "1G"], "--bandwidth without --ranks, expected both"),
    (["x.safetensors", "--latency", "1ms"], "--latency without --ranks, expected both"),
    (["--calibrate", "--ranks", "2"], "both --calibrate and --ranks"),
    (["x.safetensors", "--seconds", "-1"], "--seconds is '-1', expected 0 to"),
    (["x.safetensors", "--rows", "-1"], "--rows is '-1', expected 0 to"),
    (["x.safetensors", "--causal", "--no-causal"], "--causal"),
    (["x.safetensors", "--dtype", "i8"], "expected f64, f32, bf16 or f16"),
])
def test_usage(args, expected):
    assert expected in refused(2, "advise", *args)


def test_files_without_q_k_and_v(tmp_path, no_model):
    file = save(tmp_path / "x.safetensors", {"x": ("F32", random(1, 4, 2, 8))})
    assert refused(1, "advise", file,
                   env=no_model) == f"heed: {file}: holds x, expected q, k and v, or layers such as layers.0.q\n"
    file = save(tmp_path / "y.safetensors", qkv(T=5, Tk=9))
    assert refused(1, "advise", file, env=no_model) == (
        f"heed: {file}: q has 5 tokens and k 9, expected as many: heed compare takes such tensors\n")
    assert "cannot open" in refused(1, "advise", tmp_path / "missing.safetensors", env=no_model)
    (tmp_path / "z.safetensors").write_bytes(b"no tensors")
    assert refused(1, "advise", tmp_path / "z.safetensors",
                   env=no_model).startswith(f"heed: {tmp_path}/z.safetensors: ")


def test_what_a_named_mechanism_needs_is_said(file, no_model):
    line = refused(1, "advise", file, "-m", "delta_rule,nsa", env=no_model)
    assert line == ("heed: nothing to rank: delta_rule needs beta too: give them by these names; "
                    "nsa needs gates too: give them by these names\n")
    assert "none of these mechanisms is there for decode" in refused(1, "advise", file, "-m", "linformer", "--for",
                                                                     "decode", env=no_model)


def test_without_a_model_other_lengths_are_refused(file, no_model):
    for args in ([file, "--length", 99999], ["--shape", "1,64,2,8"]):
        line = refused(1, "advise", *args, env=no_model)
        assert line.endswith("have to be predicted from: run heed advise --calibrate once, in less than two minutes\n")
    line = refused(1, "advise", file, "--seconds", 0, env=no_model)
    assert ("there is no cost model, which times at 520 tokens" in line
            and "or give candidates more seconds to run on all tokens" in line)


# Cost models.

def test_calibration_says_how_far_its_predictions_are_off(calibrated):
    path, found = calibrated
    assert list(found) == ["model", "cpu", "target", "threads", "seconds", "calls", "fits", "prediction_errors",
                           "held_out"]
    assert found["model"] == str(path) and found["threads"] == 1 and found["fits"] == 6  # three purposes, two dtypes
    errors = [abs(call["predicted_seconds"] / call["measured_seconds"] - 1) for call in found["held_out"]]
    assert len(errors) == found["prediction_errors"]["calls"] >= 30 and found["prediction_errors"]["goal"] == 0.2
    assert found["prediction_errors"]["share_within_goal"] == pytest.approx(np.mean(np.array(errors) <= 0.2))
    assert (found["prediction_errors"]["nine_of_ten"]
            == pytest.approx(sorted(errors)[int(np.ceil(0.9 * len(errors))) - 1]))
    model = json.loads(path.read_text())
    assert model["errors"] == pytest.approx(errors) and len(model["fits"]) == 6
    held = {call["what"] for call in found["held_out"]}
    assert all(what.startswith("retention ") for what in held) and any(" decode " in what for what in held)


def test_a_calibration_has_lines_for_people(tmp_path):
    done = heed("advise", "--calibrate", "-m", "retention", "--seconds", 0, "--threads", 1, "--model",
                tmp_path / "m.json")
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"^of \d+ calls that were not fitted, predictions are off by \S+ % in the median and by at most "
                     r"\S+ % for nine of ten; \S+ % are within 20.0 %$", done.stdout, re.M)
    assert done.stdout.endswith(f"written to {tmp_path / 'm.json'}\n")


def test_the_user_s_cache_is_found(file, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": "/nonexistent"}
    found = document("advise", "--calibrate", "-m", "retention", "--seconds", 0, "--threads", 1, env=env)
    assert found["model"].startswith(f"{tmp_path}/cache/heed/cost-") and found["model"].endswith(".json")
    advice = document("advise", file, "-m", "retention", "--length", 5000, "--threads", 1, "--seconds", "0.3", env=env)
    assert advice["model"] == found["model"] and advice["prediction_errors"] == found["prediction_errors"]
    row = row_of(advice, "retention")
    assert row["seconds"] == row["predicted_seconds"] > row["predicted_sample_seconds"] > 0
    home = document("advise", "--calibrate", "-m", "retention", "--seconds", 0, "--threads", 1,
                    env={"XDG_CACHE_HOME": "", "HOME": str(tmp_path)})
    assert home["model"].startswith(f"{tmp_path}/.cache/heed/cost-")
    assert "neither XDG_CACHE_HOME nor HOME is set, expected --model" in refused(
        1, "advise", file, env={"XDG_CACHE_HOME": "", "HOME": ""})


def test_predictions_follow_the_model(file, calibrated, tmp_path):
    model = with_fits(calibrated, tmp_path / "m.json", {
        "attention prefill": {"call": 1, "pair": 1e-3}, "retention prefill": {"row": 0.5}, "gla prefill": {}})
    found = document("advise", file, "--length", 1000, "--threads", 1, "--seconds", "0.3", "--model", model)
    assert found["length"] == 1000 and found["sample_tokens"] == T
    assert row_of(found, "gla")["seconds"] == 0 and found["rows"][0]["mechanism"] == "gla"
    assert row_of(found, "retention")["predicted_seconds"] == pytest.approx(0.5 * 1000 * 2)
    assert row_of(found, "retention")["predicted_sample_seconds"] == pytest.approx(0.5 * T * 2)
    dense = row_of(found, "attention", "causal")["predicted_seconds"]
    assert 1 + 1e-3 * 1000 * 1001 <= dense <= 1 + 1e-3 * 1000 * 1128  # pairs in tiles, two heads
    assert ["linformer", "the cost model has no prediction for f32 on 1 threads"] in [
        list(x.values()) for x in found["left_out"]]


def test_shapes_alone_are_predicted(calibrated, tmp_path):
    model = with_fits(calibrated, tmp_path / "m.json",
                      {"attention decode": {"byte_256K": 1, "byte_1M": 1, "byte_4M": 1, "byte_16M": 1, "byte_64M": 1},
                       "gla decode": {"call": 3}})
    found = document("advise", "--shape", "2,8192,8x2,64", "--for", "decode", "--threads", 1, "--model", model)
    assert found["shape"] == "B2_T8192_H8x2_D64" and found["sample_tokens"] == 0 and found["file"] == ""
    rows = {(row["mechanism"], row["options"], row["dtype"]): row for row in found["rows"]}
    assert rows["gla", "default", "f32"]["seconds"] == 3 and rows["gla", "default", "f32"]["rank"] <= 2
    # Each byte a second: keys and values of two sequences.
    assert rows["attention", "cache", "f32"]["seconds"] == pytest.approx(2 * 8192 * 2 * 128 * 4)
    assert rows["attention", "ring, window 1024", "bf16"]["seconds"] == pytest.approx(2 * 1024 * 2 * 128 * 2)
    assert all(row["relative_error"] is None and row["measured_seconds"] is None and not row["frontier"]
               for row in found["rows"])


def test_processes_are_predicted(calibrated, tmp_path):
    """Bytes by the table of docs/distributed.md, times from them, from the latency and from one process."""
    model = with_fits(calibrated, tmp_path / "m.json", {
        "attention training": {"call": 8}, "gla training": {"call": 2}, "gated_delta_rule training": {"call": 4},
        "linformer training": {"call": 9}})
    args = ("advise", "--shape", "1,65536,8,64", "--causal", "--for", "training", "--dtype", "f32", "--threads", 1,
            "-m", "attention,gla,gated_delta_rule,linformer", "--model", model,
            "--ranks", 4, "--bandwidth", "100M", "--latency", "1ms")
    found = document(*args)
    assert found["cluster"] == {"ranks": 4, "bandwidth": 1e8, "latency": 1e-3}
    own, state, row = 65536 // 4, 8 * 64 * 64 * 4, 8 * 64 * 4
    summaries = 3 * 4  # four segments of each of the other ranks
    for mechanism, forward, backward in (
            ("gla", summaries * (state + row), summaries * state),
            ("gated_delta_rule", summaries * 2 * state, summaries * state),
            ("attention", (3 * 3 * own // 4 + 3 * own // 4) * row + 3 * own // 4 * 8 * 4,  # and lse
             (3 * own // 4 + 3 * 3 * own // 4) * row)):
        candidate = row_of(found, mechanism, "causal" if mechanism == "attention" else None)
        assert candidate["divided"]["refused"] is None
        best = candidate["divided"]["methods"][0]
        assert best["method"] == ("ulysses" if mechanism == "attention" else "composed")
        assert (best["forward"]["bytes"], best["backward"]["bytes"]) == (forward, backward)
        messages = best["forward"]["messages"] + best["backward"]["messages"]
        assert best["communication_seconds"] == pytest.approx((forward + backward) / 1e8 + messages * 1e-3)
        share = 0.25 if mechanism == "attention" else 0.5
        assert best["computation_seconds"] == pytest.approx(candidate["seconds"] * share)
        assert best["seconds"] == pytest.approx(best["communication_seconds"] + best["computation_seconds"])
        assert 0 < best["memory_bytes"] < candidate["memory_bytes"]
    assert row_of(found, "linformer")["divided"] == {"methods": [], "refused": "the mechanism takes no group"}
    assert {method["method"] for method in row_of(found, "attention", "causal")["divided"]["methods"]} == {
        "ulysses", "all_gather", "all_gather, zigzag", "ring"}
    text = heed(*args).stdout
    assert "the tokens divided among 4 processes, each receives 100 MB/s, a message takes 1.00 ms more" in text
    assert "not divided, as the mechanism takes no group: linformer default" in text
    alone = document(*args[:-6], "--ranks", 1)
    assert alone["cluster"] == {"ranks": 1, "bandwidth": 1.25e9, "latency": 50e-6}
    for candidate in alone["rows"]:
        for method in candidate["divided"]["methods"]:
            assert method["seconds"] == candidate["seconds"] and method["forward"] == {"bytes": 0, "messages": 0}
    assert "cluster" not in document(*args[:-6]) and "divided" not in document(*args[:-6])["rows"][0]


def test_decoding_is_not_divided(file, no_model):
    found = document("advise", file, "--for", "decode", "--seconds", "0.3", "--ranks", 2, env=no_model)
    assert all(row["divided"] == {"methods": [],
                                  "refused": "a group divides the tokens of prefill and training, not of decoding"}
               for row in found["rows"])


def test_a_model_of_another_machine_is_refused(file, calibrated, tmp_path):
    path = tmp_path / "m.json"
    for changes in ({"cpu": "Other"}, {"version": "9.9.9"}, {"threads": 7}, {"target": "OTHER"}):
        with_fits(calibrated, path, {}, **changes)
        line = refused(1, "advise", file, "--threads", 1, "--model", path)
        assert line.startswith(f"heed: {path}: was measured on ") and line.endswith(": calibrate again\n")


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[1]", b"\xff\xfe\x00", b"{" * 100000, b'{"heed_cost_model": 1, "cpu": "a\\nb"}', b" " * (5 << 20),
    b'{"heed_cost_model": 1, "cpu": "c", "version": "v", "target": "t", "threads": 1, "seconds": 1, "errors": [-1], '
    b'"fits": []}'])
def test_hostile_models(file, tmp_path, content):
    path = tmp_path / "m.json"
    path.write_bytes(content)
    assert refused(1, "advise", file, "--model", path).startswith(f"heed: {path}: ")
    assert "cannot open" in refused(1, "advise", file, "--model", tmp_path / "missing.json")


def test_nothing_is_written_where_nothing_can_be(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "file/m.json" in refused(1, "advise", "--calibrate", "-m", "retention", "--seconds", 0, "--threads", 1,
                                    "--model", tmp_path / "file" / "m.json")
    assert (tmp_path / "file").read_text() == "x"
