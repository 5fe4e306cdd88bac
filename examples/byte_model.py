# Trains a small decoder from scratch on a book, byte by byte, with heed.torch: a minute on two cores.
"""Every layer attends causally through a window, by attention that torch.compile, autograd and PyTorch's threads see as
an ordinary operator. Printed are bits per byte on bytes that the model has not seen; gzip -9 needs 2.9 for this book,
and the goal is 2.8.

    python examples/byte_model.py [--steps N] [--save FILE.safetensors]
"""

import argparse
import math
import pathlib
import time

import torch
import torch.nn.functional as F
from torch import nn

import heed.torch

BOOK = pathlib.Path(__file__).resolve().parents[1] / "data/alice_in_wonderland.txt"
LAYERS, HEADS, KV_HEADS, WIDTH, LENGTH, WINDOW, BATCH = 4, 8, 2, 192, 256, 128, 16
STEPS, GOAL = 170, 2.8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dim = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, rotary):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.dim))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        o = heed.torch.attention(rotate(q, rotary), rotate(k, rotary), v, causal=True, window=(WINDOW - 1, 0))
        x = x + self.out(o.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def rotate(x, rotary):
    (a, b), (cos, sin) = x.chunk(2, dim=-1), rotary
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class ByteModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(tokens.shape[1]), 10000.0 ** (-torch.arange(half) / half))[:, None]
        rotary = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rotary)
        return self.head(self.norm(x))


def loss_of(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save", help="write the weights to this .safetensors file")
    options = parser.parse_args()

    torch.manual_seed(0)
    book = torch.frombuffer(bytearray(BOOK.read_bytes()), dtype=torch.uint8).long()
    end = len(book) * 9 // 10
    train, held_out = book[:end], book[end:]
    unseen = held_out[: len(held_out) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    model = ByteModel()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}],
        lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, options.steps + 1)

    def held_out_bits():
        with torch.no_grad():
            return sum(float(loss_of(model, part)) * len(part) for part in unseen.split(16)) / len(unseen) / math.log(2)

    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(train) - LENGTH, (BATCH,))
        loss = loss_of(model, torch.stack([train[s:s + LENGTH + 1] for s in starts]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == 1:
            print(f"step {step:4}  {loss.item() / math.log(2):.3f} bits/byte  {time.perf_counter() - began:.0f} s",
                  flush=True)

    bits = held_out_bits()
    if options.save:
        from safetensors.torch import save_file

        save_file(model.state_dict(), options.save)
    print(f"held out: {bits:.3f} bits/byte, goal {GOAL}: {'reached' if bits < GOAL else 'NOT reached'}")
    return 0 if bits < GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
