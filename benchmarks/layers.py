#!/usr/bin/env python3
# Layers of heed.torch.nn against the operators of heed and the matrix products that they call.
"""A layer runs once while its calls are written down; then the calls of heed and the matrix products among them are
made again, with the same tensors. `over` is the time of the layer over theirs: what is left are norms, gates, copies
and Python. `torch` is the time of every call again, those too: the layer without Python. Forward: 1 x 1024 tokens of
width 512; step: one token of a sequence of 512. float32, without gradients, after the layer has been compared with
itself in float64. Times in turns, medians.

Usage: layers.py [FILTER] [--threads 2] [--rounds 15] [--json]
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import heed.torch.nn as layers

WIDTH, TOKENS, BEFORE = 512, 1024, 512
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
OF_LAYERS = {"heed::gated_rows", "heed::token_shift"}  # operators of heed that a layer adds to those

LAYERS = {
    "multihead": lambda: layers.MultiheadAttention(WIDTH, 8, causal=True),
    "grouped_query": lambda: layers.GroupedQueryAttention(WIDTH, 8, 4),
    "latent": lambda: layers.LatentAttention(WIDTH, 8, kv_lora_rank=128, q_lora_rank=192, qk_nope_head_dim=64,
                                             qk_rope_head_dim=32, v_head_dim=64),
    "longformer": lambda: layers.LongformerAttention(WIDTH, 8, 128),
    "bigbird": lambda: layers.BigBirdAttention(WIDTH, 8),
    "gla": lambda: layers.GatedLinearAttention(WIDTH, 8, "gla"),
    "retention": lambda: layers.MultiScaleRetention(WIDTH, 8),
    "rwkv4": lambda: layers.Rwkv4(WIDTH),
    "mamba": lambda: layers.Mamba(WIDTH),
    "mamba2": lambda: layers.Mamba2(WIDTH, 16, 64),
    "gated_delta": lambda: layers.GatedDeltaNet(WIDTH, 4, 8, key_head_dim=64, value_head_dim=64),
    "h3": lambda: layers.H3(WIDTH, head_dim=8, state_size=16),
}


class Calls(TorchDispatchMode):
    """Writes down what PyTorch dispatches, and calls of heed that pass it by: steps, and what caches do."""

    def __init__(self):
        super().__init__()
        self.calls, self.inside = [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.inside:
            name = function._schema.name
            ours = (name.startswith("heed::") and name not in OF_LAYERS) or name.removeprefix("aten::") in PRODUCTS
            self.calls.append((function, args, kwargs or {}, ours))
        return function(*args, **kwargs or {})

    def wrap(self, owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            self.calls.append((function, args, kwargs, True))
            before, self.inside = self.inside, True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = before

        setattr(owner, name, call)
        return lambda: setattr(owner, name, function)

    def of(self, run):
        owners = [(heed, name) for heed in [layers._layer.heed.torch] for name in dir(heed) if name.endswith("_step")]
        owners += [(cache, name) for cache in (layers._layer.heed.torch.KVCache, layers._layer.heed.torch.LatentKVCache)
                   for name in ("append", "attend")]
        undo = [self.wrap(*owner) for owner in owners]
        try:
            with self:
                run()
        finally:
            for back in undo:
                back()
        return self.calls


def replay(calls):
    def run():
        for function, args, kwargs, _ in calls:
            function(*args, **kwargs)
    return run


def job(name, what):
    """A function that runs the layer once, after it has been compared with float64."""
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    x = torch.randn(1, TOKENS, WIDTH)
    wide = copy.deepcopy(layer).double()
    short = x[:, :256]
    error = float((layer(short) - wide(short.double())).abs().max() / wide(short.double()).abs().max())
    if not error < 1e-3:
        raise SystemExit(f"{name}: differs from float64 by {error:.1e}")
    if what == "forward":
        return lambda: layer(x)
    state = layer.new_state(1)
    layer(x[:, :BEFORE], state)
    return lambda: layer.step(x[:, BEFORE], state)


def seconds(functions, rounds, repeats):
    """Medians over rounds, in turns."""
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times):
            began = time.perf_counter()
            for _ in range(repeats):
                function()
            found.append((time.perf_counter() - began) / repeats)
    return [statistics.median(found) for found in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    with torch.no_grad():
        for name in LAYERS:
            for what in ("forward", "step"):
                if options.filter not in f"{name}/{what}" or (what, name) in (("step", "longformer"),
                                                                              ("step", "bigbird")):
                    continue
                run = job(name, what)
                calls = Calls().of(run)
                parts = [run, replay([call for call in calls if call[3]]), replay(calls)]
                for part in parts:
                    part()
                layer, alone, every = seconds(parts, options.rounds, 1 if what == "forward" else 20)
                rows.append(dict(layer=f"{name}/{what}", seconds=layer, operators=alone, over=layer / alone,
                                 torch=every))
                if not options.json:
                    print(f"{rows[-1]['layer']:24} {1e6 * layer:10.0f} us   operators {1e6 * alone:10.0f} us   over "
                          f"{layer / alone:5.2f}   torch {1e6 * every:10.0f} us", flush=True)
    if options.json:
        json.dump({"threads": options.threads, "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
