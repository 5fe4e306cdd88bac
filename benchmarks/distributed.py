#!/usr/bin/env python3
# Bytes and times of sequences that processes share.
"""Each line divides one sequence among processes of this machine, one thread each (gloo). Printed are the bytes that a
rank receives from others in a forward and a backward pass, beside the formulas of docs/distributed.md, and the time of
both passes over that of one process with one thread. Bytes hold for any machine; times include a loopback device.

Usage: distributed.py [FILTER] [--ranks 2] [--tokens 8192] [--rounds 5]
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import heed.torch
from heed.torch import _group, distributed

H, D, N = 8, 64, 16  # heads, channels of a head, states of a scan
SEGMENT = 4096


def lines(T, R):
    """(name, function, tensors, axes of tokens, predicted bytes forward, backward)"""
    q, k, v = (torch.randn(1, T, H, D) for _ in range(3))
    unit, beta = k / k.norm(dim=-1, keepdim=True), torch.sigmoid(torch.randn(1, T, H))
    decay, decays = -0.1 * torch.rand(1, T, H), -0.1 * torch.rand(1, T, H, D)
    own, others, row = T // R, T - T // R, 4 * H * D
    segments = (R - 1) * max(1, -(-own // SEGMENT))
    three = [1, 1, 1]
    for method, forward, backward in (
        ("all_gather", 2 * others * row, 2 * others * row),
        ("ulysses", (3 * others // R + own - own // R) * row + (own - own // R) * 4 * H,
         (3 * others // R + own - own // R) * row),
        ("ring", 2 * others * row, 2 * (others + T) * row),
    ):
        def attention(*x, method=method, group=None):
            return heed.torch.attention(*x, causal=True, group=group, method=method)
        yield f"attention/{method}", attention, (q, k, v), three, forward, backward
    state = H * D * D * 4
    yield ("gla", heed.torch.gla, (q, k, v, decays), [1] * 4, segments * (state + H * D * 4), segments * state)
    yield ("gated_delta_rule", heed.torch.gated_delta_rule, (q, unit, v, decay, beta), [1] * 5, segments * 2 * state,
           segments * state)
    scan = (torch.randn(1, H * D, T), 0.1 * torch.rand(1, H * D, T), -torch.rand(H * D, N), torch.randn(1, N, T),
            torch.randn(1, N, T))
    states = H * D * N * 4
    axes = [2, 2, None, 2, 2]
    yield "selective_scan", heed.torch.selective_scan, scan, axes, segments * 2 * states, segments * states


class Received:
    """Counts the bytes that come from other ranks."""

    def __init__(self):
        self.bytes = 0
        gather, exchange, start, receive = _group._all_gather, dist.all_to_all_single, dist.irecv, dist.recv
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def counted_gather(out, x, **more):
            self.bytes += out.numel() * (ranks - 1) // ranks
            return gather(out, x, **more)

        def counted_exchange(out, x, counts, *more, **options):
            self.bytes += sum(counts) - counts[rank]
            return exchange(out, x, counts, *more, **options)

        def counted_start(x, *more):
            self.bytes += x.numel()
            return start(x, *more)

        def counted_receive(x, *more):
            self.bytes += x.numel()
            return receive(x, *more)

        _group._all_gather, dist.all_to_all_single = counted_gather, counted_exchange
        dist.irecv, dist.recv = counted_start, counted_receive

    def take(self):
        taken, self.bytes = self.bytes, 0
        return taken


def run(rank, ranks, store, options):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group, received = dist.group.WORLD, Received()
    torch.manual_seed(0)
    for name, function, tensors, axes, forward, backward in lines(options.tokens, ranks):
        if not re.search(options.filter, name):
            continue
        own = [x if axis is None else distributed.shard(x, group, dim=axis) for x, axis in zip(tensors, axes)]

        def both(tensors, group):
            tensors = [x.detach().requires_grad_() for x in tensors]
            received.take()
            o = function(*tensors, group=group)
            in_forward = received.take()
            o.backward(torch.ones_like(o))
            return in_forward, received.take()

        seconds = {"shared": [], "alone": []}
        for _ in range(options.rounds):
            dist.barrier()
            began = time.perf_counter()
            counted = both(own, group)
            dist.barrier()
            seconds["shared"].append(time.perf_counter() - began)
            if rank == 0:
                began = time.perf_counter()
                both(tensors, None)
                seconds["alone"].append(time.perf_counter() - began)
            dist.barrier()
        if rank == 0:
            ratio = statistics.median(seconds["shared"]) / statistics.median(seconds["alone"])
            shown = "  ".join(f"{got / 2**20:8.3f} MiB ({got / expected:.3f} of the formula)"
                              for got, expected in zip(counted, (forward, backward)))
            print(f"{name:22} {shown}  time {ratio:.2f}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if "HEED_RANK" in os.environ:
        run(int(os.environ["HEED_RANK"]), options.ranks, os.environ["HEED_STORE"], options)
        return
    print(f"{options.ranks} processes, {options.tokens} tokens, {H} heads of {D}, float32; received by rank 0, forward "
          "and backward; time over one process")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HEED_STORE": str(Path(folder) / "store")}
        command = [sys.executable, __file__, *sys.argv[1:]]
        processes = [subprocess.Popen(command, env=environment | {"HEED_RANK": str(r)}) for r in range(options.ranks)]
        sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
