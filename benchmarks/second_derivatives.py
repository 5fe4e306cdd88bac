#!/usr/bin/env python3
# The time of a second derivative, and of forward mode, relative to a backward pass.
"""Every line times, in turns and on one thread, a backward pass, the derivative of it with respect to all that it
depends on, and for softmax attention a derivative in forward mode; printed are the times of these over that of the
pass.

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
SOFTMAX = ("attention", "longformer", "nsa")  # which forward mode is measured of


def normal(*shape):
    return torch.randn(shape)


def with_last(function, *names):
    """The function with its last arguments, which it takes by name, in order."""

    def call(*tensors):
        return function(*tensors[:-len(names)], **dict(zip(names, tensors[-len(names):])))

    return call


def mechanisms():
    """(name, function, tensors)"""
    q, k, v = (normal(1, T, H, D) for _ in range(3))
    unit, beta = k / k.norm(dim=-1, keepdim=True), torch.sigmoid(normal(1, T, H))
    decay, decays = -0.1 * normal(1, T, H).abs(), -0.1 * normal(1, T, H, D).abs()
    gates, more_gates = (torch.sigmoid(normal(1, T, H, D)) for _ in range(2))
    of = heed.torch
    yield "linear_attention", functools.partial(of.linear_attention, feature_map="identity", normalize=False), (q, k, v)
    yield "linear_attention/normalize", of.linear_attention, (q, k, v)
    yield "simple_gla", of.simple_gla, (q, k, v, decay)
    scales = torch.rand(1, T, H, (T - 1).bit_length() + 1)
    yield "log_linear_attention", with_last(of.log_linear_attention, "log_decay"), (q, k, v, scales, decay)
    yield "mesa", with_last(of.mesa, "log_decay"), (q, unit, v, beta, torch.ones(H, D), decay)
    yield "gla", of.gla, (q, k, v, decays)
    yield "rwkv6", of.rwkv6, (q, k, v, decays, normal(H, D))
    yield "mlstm", of.mlstm, (q, k, v, normal(1, T, H), normal(1, T, H) + 2)
    step = 0.1 * torch.rand(1, T, H) + 0.01
    yield "ssd", with_last(of.ssd, "D"), (v, step, -torch.rand(H) - 0.2, q[:, :, :1], k[:, :, :1], normal(H))
    yield "delta_rule", of.delta_rule, (q, unit, v, beta)
    yield "gated_delta_rule", of.gated_delta_rule, (q, unit, v, decay, beta)
    yield "kda", of.kda, (q, unit, v, decays, beta)
    yield "comba", of.comba, (q, unit, v, unit + 0.1 * v, decay, beta)
    yield "gdn2", of.gdn2, (q, unit, v, decays, gates, more_gates)
    keys, values, betas = unit.unflatten(1, (T // 2, 2)), v.unflatten(1, (T // 2, 2)), beta.unflatten(1, (T // 2, 2))
    yield "delta_product", with_last(functools.partial(of.delta_product, log_decay=None), "beta"), (
        q[:, ::2], keys, values, betas)
    yield "rwkv7", of.rwkv7, (q, decays, 0.1 * k, v, -unit, unit * gates)
    scan = normal(1, 256, T), 0.1 * normal(1, 256, T).abs(), -normal(256, 16).abs(), normal(1, 16, T), normal(1, 16, T)
    yield "selective_scan", of.selective_scan, scan
    yield "selective_scan/mamba", with_last(
        functools.partial(of.selective_scan, delta_softplus=True), "D", "z", "delta_bias"), (
        *scan, normal(256), normal(1, 256, T), normal(256))
    gates, options = torch.sigmoid(normal(1, 4096, H, 3)), dict(block=64, count=16, window=512)
    of_nsa = normal(1, 4096, H, D), normal(1, 4096, 1, D), normal(1, 4096, 1, D)
    for n in (1024, 4096):
        yield f"nsa/N{n}", functools.partial(of.nsa, **options), [x[:, :n] for x in (*of_nsa, gates)]
        yield f"longformer/N{n}", functools.partial(of.longformer, window=512, tokens=range(16)), [
            normal(1, n, H, D) for _ in range(6)]
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
            once, *more = measure(function, tensors, name.startswith(SOFTMAX), options.rounds)
            forward = f", forward mode {more[1] / once:.2f}" if len(more) > 1 else ""
            print(f"{name:<36} pass {1e3 * once:7.2f} ms, its derivative {more[0] / once:5.2f} (goal {GOAL}){forward}",
                  flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
