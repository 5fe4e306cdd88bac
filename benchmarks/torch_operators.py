#!/usr/bin/env python3
# heed.torch beside PyTorch's scaled_dot_product_attention: forward, training, decoding, and the cost of a call.
"""Every line: both sides get the same tensors, are compared with each other (16-bit ones with float64), and then timed
in turns in one process, as compare_torch.py does; printed is PyTorch's time over heed's.

heed is called as PyTorch is, [B, H, T, D] in and out: heed.torch.scaled_dot_product_attention, and heed.torch.attention
where a window or lengths are told. `call` lines time [1, 1, 1, 64] in microseconds: their ratio is the difference.
`provider` lines time torch.nn.functional.scaled_dot_product_attention on both sides, with
torch.nn.attention.activate_flash_attention_impl("heed") and without it.

Usage: torch_operators.py [FILTER] [--json] [--threads 1,2] [--rounds 7]
Example: torch_operators.py 'train/.*causal.*f32.*threads:1'
Example: torch_operators.py provider
"""

import argparse
import json
import os
import re
import statistics
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a spinning pool of one side would slow the other

import compare_torch
import turns

SHAPES = ((1, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 8192, 128), (32, 12, 128, 64), (8, 12, 512, 64), (1, 14, 1000, 80))
# Largest difference between the sides, relative to the largest value: both sum in float32 and round once or twice.
TOLERANCE = {"f32": 3e-5, "bf16": 3e-2, "f16": 4e-3}


def lines(threads):
    """(name, problem) of every line."""
    found = []
    for dtype in TOLERANCE:
        for run in ("forward", "train"):
            for b, h, n, d in SHAPES:
                for kind in ("full", "causal"):
                    found.append((run, dtype, dict(b=b, h=h, n=n, d=d, kind=kind)))
            found.append((run, dtype, dict(b=8, h=12, n=512, d=64, kind="padding")))
            found.append((run, dtype, dict(b=1, h=16, kv=2, n=1000, d=64, kind="causal")))
        for keys in (4096, 32768):
            for h, kv in ((8, 8), (32, 4)):
                found.append(("decode", dtype, dict(b=1, h=h, kv=kv, n=1, keys=keys, d=128, kind="full")))
    for run in ("provider/forward", "provider/train"):
        for b, h, n, d in SHAPES:
            for kind in ("full", "causal"):
                found.append((run, "f32", dict(b=b, h=h, n=n, d=d, kind=kind)))
    named = []
    for run, dtype, p in found:
        size = f"B{p['b']}H{p['h']}" + (f"on{p['kv']}" if "kv" in p else "") + f"N{p.get('keys', p['n'])}D{p['d']}"
        for t in threads:
            named.append((f"{run}/{size}/{p['kind']}/{dtype}/threads:{t}", run, dtype, p, t))
    return named


def problem(torch, dtype, b, h, n, d, kind, kv=None, keys=None):
    """q, k, v, do [B, H, T, D], a mask or None."""
    generator = torch.Generator().manual_seed(1)
    kv, keys = kv or h, keys or n
    shapes = (b, h, n, d), (b, kv, keys, d), (b, kv, keys, d), (b, h, n, d)
    q, k, v, do = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = None
    if kind == "padding":
        lengths = torch.randint(keys // 4, keys + 1, (b,), generator=generator)
        mask = (torch.arange(keys) < lengths[:, None])[:, None, None]
    return q, k, v, do, mask


def measure(torch, heed, line, rounds):
    """A dict of one line."""
    name, run, dtype, sizes, threads = line
    torch.set_num_threads(threads)
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    q, k, v, do, mask = problem(torch, dtypes[dtype], **sizes)
    trains = run.endswith("train")
    leaves = [x.requires_grad_(trains) for x in (q, k, v)]
    options = dict(attn_mask=mask, is_causal=sizes["kind"] == "causal", enable_gqa="kv" in sizes)

    def call(function):
        if not trains:
            with torch.no_grad():
                return (function(q, k, v, **options),)
        o = function(q, k, v, **options)
        return (o, *torch.autograd.grad(o, leaves, do))

    theirs = lambda: call(torch.nn.functional.scaled_dot_product_attention)  # noqa: E731
    if run.startswith("provider"):
        ours, switch = theirs, Switch(torch)
    else:
        ours, switch = lambda: call(heed.torch.scaled_dot_product_attention), lambda: None
    results = []
    for side in (ours, theirs):
        results.append([x.detach().double() for x in side()])
        switch()
    pairs = list(zip(*results))
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    if not max(errors) <= TOLERANCE[dtype]:
        raise SystemExit(f"{name}: not timed: the sides differ by {max(errors):.1e}, "
                         f"expected at most {TOLERANCE[dtype]:.0e}")
    try:
        return turns.timed(name, ours, theirs, threads, rounds, max(errors), max(errors), switch=switch)
    finally:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


class Switch:
    """heed below PyTorch's operator: on from the beginning, then off and on again with each call."""

    def __init__(self, torch):
        self.attention, self.on = torch.nn.attention, False
        self()

    def __call__(self):
        self.on = not self.on
        if self.on:
            self.attention.activate_flash_attention_impl("heed")
        else:
            self.attention.restore_flash_attention_impl()


def call_costs(torch, heed, rounds, pattern):
    """Microseconds of a call on [1, 1, 1, 64], of both sides in turns: (name, heed's, PyTorch's, difference)."""
    torch.set_num_threads(1)
    q, k, v, do = (torch.randn(1, 1, 1, 64) for _ in range(4))
    functional = torch.nn.functional.scaled_dot_product_attention
    # The function and the goals of a call and of a training step in microseconds.
    sides = {"heed.torch.attention": (heed.torch.attention, 8, 40),
             "heed.torch.scaled_dot_product_attention": (heed.torch.scaled_dot_product_attention, 8, 40),
             "provider": (functional, 4, 4)}

    def microseconds(call, count=2000):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count * 1e6

    def trained(function):
        function(q, k, v).backward(do)
        q.grad = k.grad = v.grad = None

    rows = []
    for name, (function, *goals) in sides.items():
        for train, goal in zip((False, True), goals):
            row = f"call/{name}/{'train' if train else 'forward'}"
            if not re.search(pattern, row):
                continue
            for x in (q, k, v):
                x.requires_grad_(train)
            ours = (lambda f=function: trained(f)) if train else (lambda f=function: f(q, k, v))
            theirs = (lambda: trained(functional)) if train else (lambda: functional(q, k, v))
            switch = Switch(torch) if name == "provider" else lambda: None

            def turn(call, count=2000, switch=switch):
                taken = microseconds(call, count)
                switch()
                return taken

            turn(ours, 200), turn(theirs, 200)
            pairs = [(turn(ours), turn(theirs)) for _ in range(rounds)]
            torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
            a, b = (statistics.median(side) for side in zip(*pairs))
            rows.append({"name": row, "heed_microseconds": a, "torch_microseconds": b, "difference": a - b,
                         "goal": goal})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default=".", help="regular expression of the lines to measure")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--threads", default="1,2" if len(os.sched_getaffinity(0)) > 1 else "1", help="thread counts")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each side")
    options = parser.parse_args()
    import torch

    import heed.torch

    chosen = [x for x in lines([int(word) for word in options.threads.split(",")]) if re.search(options.filter, x[0])]
    if not options.json:
        print(f"{turns.cpu_name()}, heed {heed.__version__}, PyTorch {torch.__version__}", flush=True)
    calls = call_costs(torch, heed, options.rounds, options.filter)
    for row in calls if not options.json else ():
        print(f"{row['name']:<56} {row['heed_microseconds']:6.1f} us, PyTorch {row['torch_microseconds']:6.1f} us, "
              f"difference {row['difference']:5.1f} (goal {row['goal']})", flush=True)
    rows = []
    for line in chosen:
        rows.append(measure(torch, heed, line, options.rounds))
        if not options.json:
            print(compare_torch.show(rows[-1]), flush=True)
    if options.json:
        versions = {"cpu": turns.cpu_name(), "heed": heed.__version__, "torch": torch.__version__}
        print(json.dumps({**versions, "calls": calls, "lines": rows}, indent=2))
    elif rows:
        timed = [row for row in rows if row["ratio"] is not None]
        print(f"\nfaster in {sum(row['ratio'] > 1 for row in timed)} of {len(timed)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
