# Trains the byte-level language model on a book with any mechanism, and says what it beats.
"""Printed are bits per byte on the first nine tenths of the book, which are learned from, and on the last, which is not.
The bar is a table: how often which byte followed which two (CountModel).

    python examples/byte_lm/train.py --mechanism gla --out gla
    build/release/bin/example_byte_lm gla/model.safetensors --prompt "Alice was"
"""

import argparse
import math
import pathlib
import time
from collections import Counter

import torch
import torch.nn.functional as F

from byte_lm import MECHANISMS, ByteModel

BOOK = pathlib.Path(__file__).resolve().parents[2] / "data/alice_in_wonderland.txt"
LENGTH, BATCH, STEPS, RATE = 256, 16, 600, 4e-3


class CountModel:
    """Counts of what followed the last `order` bytes, those of shorter contexts mixed in by Witten and Bell's rule: as
    often as something new has followed."""

    def __init__(self, text: bytes, order: int = 2):
        self.order, self.grams, self.total, self.kinds = order, [], Counter(), Counter()
        for n in range(1, order + 2):
            grams = Counter(text[i : i + n] for i in range(len(text) - n + 1))
            self.grams.append(grams)
            for gram, count in grams.items():
                self.total[gram[:-1]] += count
                self.kinds[gram[:-1]] += 1

    def probability(self, before: bytes, byte: int) -> float:
        p = 1 / 256
        for n, grams in enumerate(self.grams):
            context = before[len(before) - n :]
            if len(context) == n and context in self.total:
                kinds = self.kinds[context]
                p = (grams[context + bytes([byte])] + kinds * p) / (self.total[context] + kinds)
        return p

    def bits(self, text: bytes, begin: int) -> float:
        """Per byte of text[begin:], each after those before it."""
        total = sum(math.log2(self.probability(text[max(0, i - self.order) : i], text[i])) for i in range(begin, len(text)))
        return -total / (len(text) - begin)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def bits_of(model, windows):
    """Per byte, the model knowing only what stands before it in its window."""
    model.eval()
    total = sum(loss_of(model, part).item() * len(part) for part in windows.split(16))
    model.train()
    return total / len(windows) / math.log(2)


def train(model, text, end, steps, batch=BATCH):
    """Learns from text[:end]; gives bits per byte on the rest."""
    book = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = book[end:].unfold(0, LENGTH + 1, LENGTH)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}], RATE)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * i / steps)))
    seen, since, learning, began = [], 0, 0.0, time.perf_counter()
    for step in range(1, steps + 1):
        now = time.perf_counter()
        starts = torch.randint(end - LENGTH, (batch,))
        loss = loss_of(model, torch.stack([book[s : s + LENGTH + 1] for s in starts]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen.append(loss.item())
        learning += time.perf_counter() - now
        since += batch * LENGTH
        if step % 50 == 0 or step in (1, steps):
            bits = bits_of(model, windows)
            print(f"step {step:4}  train {sum(seen) / len(seen) / math.log(2):.3f}  held out {bits:.3f} bits/byte  "
                  f"{since / learning:.0f} bytes/s  {time.perf_counter() - began:.0f} s", flush=True)
            seen, since, learning = [], 0, 0.0
    return bits


def write(model, prompt, count, temperature=0.7):
    """More text after the prompt by one step per byte, and the bytes per second."""
    model.eval()
    text, states, began = list(prompt), model.start(), time.perf_counter()
    for i in range(len(prompt) + count - 1):
        logits = model.step(torch.tensor([text[i]]), states)
        if i + 1 == len(text):
            text.append(int(torch.multinomial((logits[0] / temperature).softmax(0), 1)))
    return bytes(text), (len(text) - 1) / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanism", choices=MECHANISMS, default="gla")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the model to this folder: model.safetensors and config.json")
    options = parser.parse_args()

    text = BOOK.read_bytes()
    end = len(text) * 9 // 10
    bar = CountModel(text[:end]).bits(text, end)
    torch.manual_seed(options.seed)
    model = ByteModel(options.mechanism)
    size = sum(p.numel() for p in model.parameters())
    print(f"{options.mechanism}: {size} weights, {end} bytes to learn from; the bar is {bar:.3f} bits/byte", flush=True)
    bits = train(model, text, end, options.steps)
    if options.out:
        model.save_folder(options.out)
    sample, speed = write(model, b"Alice was ", 400)
    print(f"\n{sample.decode('ascii', 'replace')}\n\n{speed:.0f} bytes/s, one at a time")
    print(f"{options.mechanism}: held out {bits:.3f} bits/byte, counts of three bytes {bar:.3f}: "
          f"{'below' if bits < bar else 'NOT below'} the bar")
    return 0 if bits < bar else 1


if __name__ == "__main__":
    raise SystemExit(main())
