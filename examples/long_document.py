# Trains a model on one long text that several processes share: each holds a part of the tokens.
"""The whole text is one sequence. A layer of gated linear attention, one of windowed attention and one of the gated
delta rule see all of it before each byte, wherever it is held: their states and keys come from the other processes
(`group=`). All else, embeddings, norms, projections and the loss, is computed for each byte alone. Gradients of weights
are summed as in data parallel training. The losses are those of one process, and memory per process falls with their
number.

    python examples/long_document.py [--tokens N] [--steps N]
    torchrun --nproc-per-node 2 examples/long_document.py
"""

import argparse
import os
import pathlib
import resource
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import heed.torch
from heed.torch import distributed

BOOK = pathlib.Path(__file__).resolve().parents[1] / "data/alice_in_wonderland.txt"
WIDTH, HEADS, WINDOW = 128, 4, 256


class Layer(nn.Module):
    def __init__(self, mixing):
        super().__init__()
        self.mixing = mixing
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.beta = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEADS)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, group):
        h = self.norm1(x)
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).unbind(2)
        log_decay = F.logsigmoid(self.gate(h).unflatten(-1, (HEADS, -1)) + 4)
        if self.mixing == "attention":
            o = heed.torch.attention(q, k, v, causal=True, window=(WINDOW - 1, 0), group=group)
        elif self.mixing == "gla":
            o = heed.torch.gla(q, k, v, log_decay, group=group)
        else:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            o = heed.torch.gated_delta_rule(q, k, v, log_decay.mean(-1), self.beta(h).sigmoid(), group=group)
        x = x + self.out(o.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer(mixing) for mixing in ("gla", "attention", "delta"))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids, group):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, group)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    group = None
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    first = group is None or dist.get_rank() == 0

    text = torch.frombuffer(bytearray(BOOK.read_bytes()[: options.tokens + 1]), dtype=torch.uint8).long()[None]
    ids, labels = text[:, :-1], text[:, 1:]
    if group is not None:
        ids, labels = distributed.shard(ids, group), distributed.shard(labels, group)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        logits = model(ids, group)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (text.shape[1] - 1)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if group is not None:
            dist.all_reduce(total)
            for parameter in model.parameters():
                if parameter.grad is None:  # not used by this kind of layer
                    continue
                dist.all_reduce(parameter.grad)
        optimizer.step()
        if first:
            print(f"step {step}  loss {total.item():.6f}  {time.perf_counter() - began:.1f} s", flush=True)
    memory = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    if group is not None:
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        dist.destroy_process_group()
    if first:
        print(f"memory of a process: {memory.item():.0f} MiB at most")


if __name__ == "__main__":
    main()
