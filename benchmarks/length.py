#!/usr/bin/env python3
# Time and memory of one head of each mechanism as sequences grow to 65536 tokens: N^2 against N.
"""One head of 64 channels, one sequence, float32, called from PyTorch: `forward`, and `training`, which is forward and
backward with gradients of all inputs. `seconds` is the median of some calls. `megabytes` is what a process that makes
the call once holds at its peak beyond what it held before there was any tensor: inputs, outputs, gradients and
workspace. Each mechanism runs in processes of its own, after it has been compared with itself in float64. "written out"
is attention as its equation says it, in PyTorch, with its matrix of N^2.

Usage: length.py [FILTER] [--threads N] [--most 65536] [--limit SECONDS] [--seconds SECONDS] [--json FILE]
What FILE has already is not measured again. Without it rows are printed alone.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from turns import cpu_name

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

CHANNELS, STATES, WINDOW, FEATURES, RANKS = 64, 16, 512, 128, 256
TOKENS = [1 << i for i in range(10, 17)]
WRITTEN_OUT, WRITTEN_OUT_MOST = "attention, written out", 16384  # 1 GiB for each of its matrices
PASSES = ("forward", "training")


class Case(NamedTuple):
    """A function that makes the inputs for a number of tokens, and the call on them."""

    family: str
    inputs: Callable[[int], dict[str, Any]]
    call: Callable[..., Any]


def cases() -> dict[str, Case]:
    import torch
    import torch.nn.functional as F

    import heed
    import heed.torch as ht

    def rows(n, *sizes):
        return torch.randn(1, n, 1, *sizes)

    def qkv(n):
        return {x: rows(n, CHANNELS) for x in "qkv"}

    def decay(n, *sizes):
        return {"log_decay": F.logsigmoid(rows(n, *sizes) + 3)}

    def written_out(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        logits = (q @ k.transpose(2, 3) * CHANNELS**-0.5).masked_fill(later, -torch.inf)
        return (logits.softmax(-1) @ v).transpose(1, 2)

    def scan(n):
        return {"u": torch.randn(1, CHANNELS, n)}

    def modes():
        return {"log_dt": torch.linspace(-6, -1, CHANNELS), "log_A_real": torch.zeros(CHANNELS, STATES),
                "A_imag": 3.14 * torch.arange(STATES).expand(CHANNELS, -1).contiguous(),
                "C": torch.randn(CHANNELS, STATES, 2)}

    def of(function, **options):
        return lambda **given: function(**given, **options)

    def unit(n):
        return qkv(n) | {"k": F.normalize(rows(n, CHANNELS), dim=-1), "beta": torch.rand(1, n, 1)}

    return {
        WRITTEN_OUT: Case("exact", qkv, written_out),
        "attention": Case("exact", qkv, of(ht.attention, causal=True)),
        "attention, window": Case("sparse", qkv, of(ht.attention, causal=True, window=(WINDOW - 1, 0))),
        "attention, bigbird": Case("sparse", qkv, of(ht.attention, pattern=heed.patterns.bigbird())),
        "linformer": Case("linear", lambda n: qkv(n) | {x: torch.randn(RANKS, n) * n**-0.5 for x in "ef"},
                          of(ht.linformer)),
        "performer": Case("linear", lambda n: qkv(n) | {"projection": ht.orthogonal_features(FEATURES, CHANNELS, seed=0)
                                                        .float()}, of(ht.performer, causal=True)),
        "linear_attention": Case("linear", qkv, of(ht.linear_attention)),
        "retention": Case("gated", qkv, of(ht.retention)),
        "gla": Case("gated", lambda n: qkv(n) | decay(n, CHANNELS), of(ht.gla)),
        "ssd": Case("gated", lambda n: {"x": rows(n, CHANNELS), "dt": F.softplus(rows(n)), "A": -torch.ones(1),
                                        "B": rows(n, CHANNELS), "C": rows(n, CHANNELS)}, of(ht.ssd)),
        "gated_delta_rule": Case("delta", lambda n: unit(n) | decay(n), of(ht.gated_delta_rule)),
        "rg_lru": Case("scan", lambda n: {
            **{x: torch.randn(1, n, CHANNELS) for x in ("x", "input_gate", "recurrence_gate")},
            "a": torch.randn(CHANNELS)}, of(ht.rg_lru)),
        "selective_scan": Case("scan", lambda n: scan(n) | {
            "delta": torch.rand(1, CHANNELS, n), "A": -torch.rand(CHANNELS, STATES), "B": torch.randn(1, STATES, n),
            "C": torch.randn(1, STATES, n)}, of(ht.selective_scan)),
        "s4d": Case("scan", lambda n: scan(n) | modes(), of(ht.s4d)),
        "long_convolution": Case("scan", lambda n: scan(n) | {"kernel": torch.randn(CHANNELS, n) * n**-0.5},
                                 of(ht.long_convolution)),
    }


def call_of(case: Case, inputs: dict[str, Any], what: str) -> Callable[[], Any]:
    if what == "forward":
        return lambda: case.call(**inputs)
    for x in inputs.values():
        x.requires_grad_(True)

    def both():
        for x in inputs.values():
            x.grad = None
        case.call(**inputs).square().mean().backward()

    return both


def compare(name: str, case: Case) -> None:
    """Refuses a mechanism that does not compute in float32 what it computes in float64."""
    given = case.inputs(TOKENS[0])
    expected = case.call(**{key: x.double() for key, x in given.items()})
    error = float((case.call(**given) - expected).abs().max() / expected.abs().max())
    if not error < 1e-3:
        raise SystemExit(f"length.py: {name} differs from float64 by {error:.1e}")


def status(field: str) -> int:
    """Bytes of this process, as the system counts them."""
    return 1024 * int(re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1])


def measure(name: str, what: str, quantity: str, tokens: list[int], limit: float, seconds: float) -> None:
    """Runs in its own process and prints a number for each length, while a call is expected to stay below the limit."""
    import torch

    case = cases()[name]
    torch.manual_seed(0)
    compare(name, case)
    call_of(case, case.inputs(64), what)()  # threads are there now
    before = status("VmRSS")
    for n in tokens:
        with torch.set_grad_enabled(what == "training"):
            call = call_of(case, case.inputs(n), what)
            began = time.perf_counter()
            if quantity == "megabytes":
                Path("/proc/self/clear_refs").write_text("5")  # resets the peak
                call()
                print(json.dumps((status("VmHWM") - before) / 1e6), flush=True)
                took = time.perf_counter() - began
            else:
                call()
                took = time.perf_counter() - began
                times = []
                while not times or (len(times) < 15 and sum(times) + took < seconds):
                    began = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - began)
                print(json.dumps(statistics.median(times)), flush=True)
        if took * 5 > limit:
            return


def child(name: str, what: str, quantity: str, tokens: list[int], options: argparse.Namespace) -> list[float]:
    """Runs measure() in a child process and gives the numbers that it prints.

    The child's allocator returns freed memory to the system at once, so that no length reuses that of another.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    if quantity == "megabytes":
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, name, "--child", f"{what},{quantity}", "--most", str(max(tokens)), "--limit",
               str(options.limit), "--seconds", str(options.seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"length.py: {name}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default=".", help="regular expression of the mechanisms to measure")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--most", type=int, default=TOKENS[-1], help="tokens, at least 1024")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a call may be expected to take")
    parser.add_argument("--seconds", type=float, default=1,
                        help="that calls of one length may take, of which the median is kept")
    parser.add_argument("--json", type=Path, help="write the rows there, and leave out those that it has")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = [n for n in TOKENS if n <= options.most]
    if options.threads < 1 or not tokens:
        parser.error(f"--threads is {options.threads} and --most {options.most}, expected at least 1 and {TOKENS[0]}")
    if options.child:
        return measure(options.filter, *options.child.split(","), tokens, options.limit, options.seconds)

    try:
        chosen = {name: case for name, case in cases().items() if re.search(options.filter, name)}
    except re.error as error:
        parser.error(f"filter is {options.filter!r}: {error}")
    document = {"cpu": cpu_name(), "threads": options.threads, "channels": CHANNELS, "heads": 1, "dtype": "f32",
                "rows": []}
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text())
        if {**kept, "rows": []} == document:
            document = kept
    have = {(row["mechanism"], row["pass"]) for row in document["rows"]}
    for name, case in chosen.items():
        for what in PASSES:
            if (name, what) in have:
                continue
            lengths = [n for n in tokens if name != WRITTEN_OUT or n <= WRITTEN_OUT_MOST]
            found = {quantity: child(name, what, quantity, lengths, options) for quantity in ("seconds", "megabytes")}
            measured = min(map(len, found.values()))
            row = {"mechanism": name, "family": case.family, "pass": what, "tokens": lengths[:measured],
                   **{quantity: values[:measured] for quantity, values in found.items()}}
            document["rows"].append(row)
            print(f"{name:24} {what:9} " + "  ".join(f"{n}: {1e3 * s:.4g} ms {m:.4g} MB" for n, s, m in zip(
                row["tokens"], row["seconds"], row["megabytes"])), flush=True)
            if options.json:
                new = options.json.with_suffix(".new")
                new.write_text(json.dumps(document, indent=1) + "\n")
                os.replace(new, options.json)


if __name__ == "__main__":
    main()
