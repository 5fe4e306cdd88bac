# Trains the byte-level language model on a book with any mechanism, and compares it with a baseline.
"""Printed are bits per byte on the first nine tenths of the book, which are learned from, and on the last, which is
not. The bar is a table: how often which byte followed which two (CountModel).

    python examples/byte_lm/train.py --mechanism gla --out gla
    build/release/bin/example_byte_lm gla/model.safetensors --prompt "Alice was"
    python examples/byte_lm/train.py --all
"""

import argparse
import math
import pathlib
import re
import subprocess
import time
from collections import Counter

import torch
import torch.nn.functional as F

from byte_lm import MECHANISMS, WINDOW, ByteModel  # first: it says where the next ones are

import results
import training

BOOK = pathlib.Path(__file__).resolve().parents[2] / "data/alice_in_wonderland.txt"
LENGTH, BATCH, STEPS, RATE = 256, 16, 400, 4e-3


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
        total = sum(math.log2(self.probability(text[max(0, i - self.order) : i], text[i]))
                    for i in range(begin, len(text)))
        return -total / (len(text) - begin)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def bits_of(model, windows):
    """Bits per byte, where the model sees only the bytes before it in its window."""
    total = sum(loss_of(model, part).item() * len(part) for part in windows.split(16))
    return total / len(windows) / math.log(2)


def train(model, text, end, steps, batch=BATCH):
    """Learns from text[:end]; gives bits per byte on the rest."""
    return fitted(model, text, end, steps, batch)[0]


def fitted(model, text, end, steps, batch=BATCH):
    """Trains as train() does; gives bits per byte, the seconds that it took, and bytes per second."""
    book = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = book[end:].unfold(0, LENGTH + 1, LENGTH)

    def draw():
        starts = torch.randint(end - LENGTH, (batch,))
        return loss_of(model, torch.stack([book[s : s + LENGTH + 1] for s in starts])), batch * LENGTH

    def evaluate():
        bits = bits_of(model, windows)
        return bits, f"held out {bits:.3f} bits/byte"

    return training.fit(model, steps, RATE, draw, evaluate, unit="bytes", nats_to=1 / math.log(2))


def write(model, prompt, count, temperature=0.7):
    """More text after the prompt by one step per byte, and the bytes per second."""
    model.eval()
    text, states, began = list(prompt), model.start(), time.perf_counter()
    for i in range(len(prompt) + count - 1):
        logits = model.step(torch.tensor([text[i]]), states)
        if i + 1 == len(text):
            text.append(int(torch.multinomial((logits[0] / temperature).softmax(0), 1)))
    return bytes(text), (len(text) - 1) / (time.perf_counter() - began)


def state_bytes(model):
    """Bytes that a text of WINDOW bytes leaves in memory: what its continuation needs."""
    state = model.start()
    for byte in BOOK.read_bytes()[:WINDOW]:
        model.step(torch.tensor([byte]), state)

    def size(x):
        return x.nbytes if isinstance(x, torch.Tensor) else sum(map(size, x))

    return size(state["layers"])


def bytes_per_second(path):
    """The rate at which the C++ program generates a text byte by byte on one thread: the best of three runs."""
    command = [training.program("example_byte_lm"), path, "--bytes", "2000"]
    said = [subprocess.run(command, capture_output=True, check=True).stderr.decode() for _ in range(3)]
    return max(float(re.fullmatch(r"(\d+) bytes/s, one at a time\n", line)[1]) for line in said)


def row_of(mechanism, text, end, options, out):
    """Trains, writes the model, and lets C++ use it."""
    torch.manual_seed(options.seed)
    model = ByteModel(mechanism)
    weights = sum(p.numel() for p in model.parameters())
    print(f"{mechanism}: {weights} weights, {end} bytes to learn from", flush=True)
    bits, seconds, speed = fitted(model, text, end, options.steps)
    model.save(out)
    written = bytes_per_second(out)
    print(f"{mechanism}: held out {bits:.3f} bits/byte, {written:.0f} bytes/s in C++\n", flush=True)
    return results.row(mechanism, not options.untimed,
                       {"bits": bits, "weights": weights, "state_bytes": state_bytes(model.eval())},
                       {"train_seconds": seconds, "train_per_second": speed, "cpp_per_second": written})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_arguments(parser, MECHANISMS, "language",
                          "write the model to this folder: model.safetensors and config.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()

    text = BOOK.read_bytes()
    end = len(text) * 9 // 10
    bar = CountModel(text[:end]).bits(text, end)
    if options.all:
        training.program("example_byte_lm")
        head = {"bar": bar, "train": end, "held_out": len(text) - end, "tokens": LENGTH, "steps": options.steps}
        return results.run_all(options, "language", head, MECHANISMS,
                               lambda mechanism, out: row_of(mechanism, text, end, options, out))
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
