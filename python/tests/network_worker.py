# One of two processes with a network between them, for test_torch_network.py:
#   python network_worker.py CHECK RANK ADDRESS TIMEOUT
# CHECK is `measure`, which prints a line of JSON for each call, or `until_the_end`.
import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

import heed.torch
from heed.torch import _group, distributed

TOKENS, HEADS, CHANNELS = 2048, 8, 64


def calls():
    """(name, function, tensors of the whole sequence, whether outputs have the bits of one process)."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, TOKENS, HEADS, CHANNELS, generator=generator)
    log_decay, beta = -0.1 * torch.rand(2, 1, TOKENS, HEADS, generator=generator)
    unit = k / k.norm(dim=-1, keepdim=True)

    def attention(method):
        return lambda *x, group=None: heed.torch.attention(*x, causal=True, group=group, method=method)

    for method in ("all_gather", "ulysses", "ring"):
        yield method, attention(method), (q, k, v), method != "ring"
    yield "gated_delta_rule", heed.torch.gated_delta_rule, (q, unit, v, log_decay, 1 + beta), False


def both_passes(function, tensors, group):
    tensors = [x.detach().requires_grad_() for x in tensors]
    o = function(*tensors, group=group)
    return o.detach(), torch.autograd.grad(o, tensors, torch.ones_like(o))


def measure():
    world = dist.group.WORLD
    started = _group.Transport.Isend, _group.Transport.Irecv
    for name, function, whole, same_bits in calls():
        own = [distributed.shard(x, world) for x in whole]
        expected, gradients = both_passes(function, whole, None)
        for overlaps in (True, False) if name == "ring" else (True,):
            if not overlaps:
                del _group.Transport.Isend, _group.Transport.Irecv
            seconds = []
            for _ in range(3):
                dist.barrier()
                began = time.perf_counter()
                o, of_own = both_passes(function, own, world)
                dist.barrier()
                seconds.append(time.perf_counter() - began)
            _group.Transport.Isend, _group.Transport.Irecv = started
            here = distributed.shard(expected, world)
            assert torch.equal(o, here) or not same_bits, name
            torch.testing.assert_close(o, here, rtol=1e-4, atol=1e-4)
            for x, gradient in zip(of_own, gradients):
                torch.testing.assert_close(x, distributed.shard(gradient, world), rtol=1e-3, atol=1e-3)
            if dist.get_rank() == 0:
                print(json.dumps({"name": name, "overlaps": overlaps, "seconds": min(seconds)}), flush=True)


def until_the_end():
    """Calls until one raises, and says how long that call took."""
    method = os.environ["HEED_METHOD"]
    name, function, tensors, _ = next(call for call in calls() if call[0] == method)
    own = [distributed.shard(x, dist.group.WORLD) for x in tensors]
    for round_ in range(10000):
        began = time.perf_counter()
        try:
            both_passes(function, own, dist.group.WORLD)
        except RuntimeError as error:
            print(json.dumps({"raised": str(error)[:200], "seconds": time.perf_counter() - began}), flush=True)
            os._exit(0)  # the group does not end without the other process
        if round_ == 1:
            print(json.dumps({"ready": True}), flush=True)


if __name__ == "__main__":
    check, rank, address, timeout = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=timeout))
    globals()[check]()
    dist.destroy_process_group()
