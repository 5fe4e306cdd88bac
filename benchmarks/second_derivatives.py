#!/usr/bin/env python3
# The time of a second derivative, and of forward mode, relative to a backward pass.
"""Every line times, in turns and on one thread, a backward pass, the derivative of it with respect to all that it
depends on, and for attention a derivative in forward mode; printed are the times of these over that of the pass.

Usage: second_derivatives.py [FILTER] [--rounds 7]
Example: second_derivatives.py attention
"""

import argparse
import functools
import re
import statistics
import sys
import time

import torch
import turns

import heed.torch

T, H, D = 1024, 4, 64
GOAL = 4


def normal(*shape):
    return torch.randn(shape)


def mechanisms():
    """(name, function, tensors)"""
    q, k, v = (normal(1, T, H, D) for _ in range(3))
    unit, beta = k / k.norm(dim=-1, keepdim=True), torch.sigmoid(normal(1, T, H))
    decay, decays = -0.1 * normal(1, T, H).abs(), -0.1 * normal(1, T, H, D).abs()
    plain = functools.partial(heed.torch.linear_attention, feature_map="identity", normalize=False)
    yield "linear_attention", plain, (q, k, v)
    yield "simple_gla", heed.torch.simple_gla, (q, k, v, decay)
    yield "gla", heed.torch.gla, (q, k, v, decays)
    yield "delta_rule", heed.torch.delta_rule, (q, unit, v, beta)
    yield "kda", heed.torch.kda, (q, unit, v, decays, beta)
    scan = normal(1, 256, T), 0.1 * normal(1, 256, T).abs(), -normal(256, 16).abs(), normal(1, 16, T), normal(1, 16, T)
    yield "selective_scan", heed.torch.selective_scan, scan
    for b, n, h, d in ((8, 64, 8, 64), (4, 256, 8, 64), (1, 1024, 4, 64), (1, 2048, 4, 128), (1, 4096, 2, 64)):
        for causal in (False, True):
            name = f"attention/B{b}H{h}N{n}D{d}/{'causal' if causal else 'full'}"
            yield name, functools.partial(heed.torch.attention, causal=causal), [normal(b, n, h, d) for _ in range(3)]


def measure(function, tensors, in_forward_mode, rounds):
    """Median seconds of the pass, of its derivative and of forward mode."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    o = function(*inputs)
    do = torch.randn_like(o).requires_grad_()
    first = torch.autograd.grad(o, inputs, do, create_graph=True)
    along = tuple(torch.randn_like(x) for x in first)
    passes = [lambda: torch.autograd.grad(o, inputs, do.detach(), retain_graph=True),
              lambda: torch.autograd.grad(first, [do, *inputs], along, retain_graph=True)]
    if in_forward_mode:
        passes.append(lambda: torch.func.jvp(function, tuple(tensors), along))
    for run in passes:
        run()
    taken = [[] for _ in passes]
    for _ in range(rounds):
        for run, seconds in zip(passes, taken):
            start = time.process_time()  # backward passes have a thread of their own
            run()
            seconds.append(time.process_time() - start)
    return [statistics.median(x) for x in taken]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default="", help="regular expression on the names")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{turns.cpu_name()}, heed {heed.__version__}, PyTorch {torch.__version__}, float32, one thread, CPU time",
          flush=True)
    for name, function, tensors in mechanisms():
        if re.search(options.filter, name):
            once, *more = measure(function, tensors, name.startswith("attention"), options.rounds)
            forward = f", forward mode {more[1] / once:.2f}" if len(more) > 1 else ""
            print(f"{name:<36} pass {1e3 * once:7.2f} ms, its derivative {more[0] / once:5.2f} (goal {GOAL}){forward}",
                  flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
