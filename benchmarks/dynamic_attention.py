#!/usr/bin/env python3
# Shares kept and dropped, error and time of attention chosen by content, on queries, keys and values of real models.
"""Two sets of tensors: MiniLM's layers on a page of Alice (data/, 371 tokens, not causal), and the byte model of
examples/byte_lm with attention over all keys, trained here on windows of 2048 bytes of the book, on what it has not
seen. For each selector and setting, means over layers, heads and rows, in float64 from the definition: `kept`, the
share of visible keys; `dropped`, the share of a row's attention that it does without; `oracle`, the share of visible
keys in the fewest blocks of 64 that hold as much of each row; `error`, rms of the output's difference relative to the
output; `bound`, where there is a certificate (at level skip all keys are read, and `kept` are values); `time` of choice
and attention over that of dense attention, medians of turns. Then decoding: one query at a time, from caches of as many
keys as the model has read; and, of made-up keys, what `auto` costs where nothing can be dropped.

Usage: dynamic_attention.py [--model FILE] [--steps 600] [--tokens 2048] [--context 32768] [--threads 1] [--rounds 5]
[--json FILE]
The model is trained and written to FILE where that is not there.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

import heed
import heed.torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples/byte_lm"), str(Path(__file__).parent)]
import byte_lm  # noqa: E402
import turns  # noqa: E402
import train  # noqa: E402

BLOCK = 64
P, S = heed.patterns, heed.select


def byte_model(path, steps, length):
    """The byte model with attention over all keys, trained on windows of `length` bytes, or as it was."""
    byte_lm.MECHANISMS["attention"] = byte_lm.Mechanism(byte_lm.TURNED_QKV, {"causal": True})
    if path is not None and path.exists():
        return byte_lm.load(str(path))
    book = train.BOOK.read_bytes()
    torch.manual_seed(0)
    model = byte_lm.ByteModel("attention")
    train.LENGTH = length
    bits = train.train(model, book, len(book) * 9 // 10, steps, batch=2)
    print(f"byte model: {bits:.3f} bits per byte of windows of {length} that it has not learned from", flush=True)
    if path is not None:
        model.save(str(path))
    return model.eval()


@torch.no_grad()
def layers_of(model, tokens):
    """(q, k, v), [1, T, H, D] each, of every layer as it reads the last `tokens` bytes of the book."""
    book = train.BOOK.read_bytes()
    recorded, attention = [], heed.torch.attention

    def record(q, k, v, **options):
        recorded.append(tuple(x.numpy().copy() for x in (q, k, v)))
        return attention(q, k, v, **options)

    for layer in model.layers:
        layer.function = record
    model(torch.frombuffer(bytearray(book[-tokens:]), dtype=torch.uint8).long()[None])
    for layer in model.layers:
        layer.function = attention
    return recorded


def minilm_layers():
    with safe_open(ROOT / "data/minilm_alice.safetensors", "np") as file:
        count = len({key.split(".")[1] for key in file.keys()})
        return [tuple(np.ascontiguousarray(file.get_tensor(f"layers.{i}.{x}"), np.float32) for x in "qkv")
                for i in range(count)]


def weights_of(q, k, causal):
    """Attention weights of one head in float64, [Tq, Tk], and which pairs are visible."""
    logits = q.astype(np.float64) @ k.astype(np.float64).T / q.shape[-1] ** 0.5
    start = k.shape[0] - q.shape[0]
    seen = np.tril(np.ones(logits.shape, bool), start) if causal else np.ones(logits.shape, bool)
    logits[~seen] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True), seen


def oracle_share(p, seen, dropped):
    """The visible keys in the fewest blocks without which a row drops no more than `dropped`, over all visible ones."""
    borders = np.arange(0, p.shape[1], BLOCK)
    mass, keys = np.add.reduceat(p, borders, 1), np.add.reduceat(seen.astype(np.int64), borders, 1)
    order = np.argsort(-mass, 1, kind="stable")
    held = np.cumsum(np.take_along_axis(mass, order, 1), 1)
    needed = (held < 1 - dropped[:, None] - 1e-12).sum(1) + 1
    chosen = np.arange(len(borders)) < needed[:, None]
    return (np.take_along_axis(keys, order, 1) * chosen).sum() / keys.sum()


def shares(layers, causal, kept_of):
    """kept, dropped, oracle and error of what kept_of(q, k, v) keeps, bool [H, T, T]."""
    rows = []
    for q, k, v in layers:
        kept = kept_of(q, k, v)
        for h in range(q.shape[2]):
            p, seen = weights_of(q[0, :, h], k[0, :, h], causal)
            keep = kept[h] & seen
            held = (p * keep).sum(-1)
            o = p @ v[0, :, h]
            sparse = (p * keep) @ v[0, :, h] / held[:, None]
            dropped = 1 - held
            rows.append((keep.sum() / seen.sum(), dropped.mean(), oracle_share(p, seen, dropped),
                         np.sqrt(((sparse - o) ** 2).mean() / (o**2).mean())))
    return np.mean(rows, 0)


def time_ratio(options, layers, ours, dense):
    """Median over rounds and layers of the time of `ours` over that of `dense`, in turns."""
    ratios = []
    for q, k, v in layers:
        for _ in range(options.rounds):
            times = []
            for call in (ours, dense):
                call(q, k, v)
                began = time.perf_counter()
                call(q, k, v)
                times.append(time.perf_counter() - began)
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def selectors(causal):
    """(name, setting, choose(q, k) -> pattern)."""
    counts = (2, 4, 8, 16) if causal else (1, 2, 3, 4)
    for score in ("mean", "box"):
        for count in counts:
            yield (f"top_blocks, {score}", f"{count} blocks",
                   lambda q, k, score=score, count=count: S.top_blocks(q, k, count=count, score=score, causal=causal))
    for mass in (0.8, 0.95, 0.99):
        yield "cumulative", f"mass {mass}", lambda q, k, mass=mass: S.cumulative(q, k, mass=mass, causal=causal)
    if not causal:
        return
    for verticals, slashes in ((50, 100), (200, 400)):
        yield ("vertical_slash", f"{verticals} columns, {slashes} diagonals",
               lambda q, k, v=verticals, s=slashes: S.vertical_slash(q, k, verticals=v, slashes=s))
    for window in (256, 512):
        yield "streaming, not chosen", f"{BLOCK} first, {window} last", lambda q, k, w=window: P.streaming(BLOCK, w)


def prefill(options, name, layers, causal):
    T, H = layers[0][0].shape[1:3]
    rows = []

    def dense(q, k, v):
        return heed.attention(q, k, v, causal=causal, threads=options.threads)

    for selector, setting, choose in selectors(causal):
        def sparse(q, k, v, choose=choose):
            return heed.attention(q, k, v, causal=causal, pattern=choose(q, k), threads=options.threads)

        kept, dropped, oracle, error = shares(layers, causal,
                                              lambda q, k, v: choose(q, k).mask(T, T, heads=H, causal=causal)[0])
        rows.append(dict(data=name, selector=selector, setting=setting, kept=kept, dropped=dropped, oracle=oracle,
                         error=error, bound=None, time=time_ratio(options, layers, sparse, dense)))
    for level, epsilon in itertools.product(("sketch", "skip"), (0.01, 0.02, 0.1, 0.3)):
        def certified(q, k, v, level=level, epsilon=epsilon):
            return heed.certified_attention(q, k, v, epsilon=epsilon, level=level, causal=causal,
                                            threads=options.threads)

        def kept_of(q, k, v, level=level, epsilon=epsilon):
            chosen = heed.select.certified(q, k, epsilon=epsilon, level=level, causal=causal)
            return chosen.mask(T, T, heads=H, key_heads=k.shape[2], causal=causal)[0]

        kept, dropped, oracle, error = shares(layers, causal, kept_of)
        bound = np.mean([certified(q, k, v)[1].mean() for q, k, v in layers])
        rows.append(dict(data=name, selector=certified_name("certified_attention", level), setting=f"epsilon {epsilon}",
                         kept=kept, dropped=dropped, oracle=oracle, error=error, bound=bound,
                         time=time_ratio(options, layers, certified, dense)))
    return rows


def certified_name(name, level):
    return name if level == "sketch" else f"{name}, level {level}"


def decode(options, layers):
    """One query at a time, the newest of a cache; means over the last positions of each layer."""
    rows, positions = [], 8
    for level, epsilon in itertools.product(("sketch", "skip"), (0.01, 0.02, 0.1)):
        found, ratios = [], []
        for q, k, v in layers:
            T, H, D = q.shape[1:]
            cache = heed.KVCache(1, H, D, v.shape[-1], sketch="int8")
            cache.append(k, v)
            for i in range(positions):
                t = T - 1 - 16 * i
                cache.trim([t])
                cache.append(k[:, t : t + 1], v[:, t : t + 1])
                row = q[:, t : t + 1]

                def certified(row=row):
                    return cache.attend(row, epsilon=epsilon, level=level, return_bound=True, threads=options.threads)

                o, bound = certified()
                kept = heed.select.certified(row, cache, epsilon=epsilon, level=level).mask(
                    1, t + 1, heads=H, key_heads=H, causal=True)
                for h in range(H):
                    p, seen = weights_of(row[0, :, h], k[0, : t + 1, h], True)
                    keep = kept[0, h]
                    dropped = 1 - (p * keep).sum(-1)
                    dense = p @ v[0, : t + 1, h]
                    error = np.sqrt(((o[0, :, h] - dense) ** 2).mean() / (dense**2).mean())
                    found.append((keep.mean(), dropped.mean(), oracle_share(p, seen, dropped), error,
                                  bound[0, h].mean(), oracle_share(p, seen, np.full(1, epsilon))))
                    assert (dropped <= bound[0, h] + 1e-12).all() and bound[0, h].max() <= epsilon
                for _ in range(options.rounds):
                    times = []
                    for call in (certified, lambda: cache.attend(row, threads=options.threads)):
                        began = time.perf_counter()
                        call()
                        times.append(time.perf_counter() - began)
                    ratios.append(times[0] / times[1])
        kept, dropped, oracle, error, bound, least = np.mean(found, 0)
        rows.append(dict(data=f"byte model, a cache of {layers[0][0].shape[1]}",
                         selector=certified_name("attend", level), setting=f"epsilon {epsilon}", kept=kept,
                         dropped=dropped, oracle=oracle, error=error, bound=bound, least=least,
                         time=statistics.median(ratios)))
    return rows


def nothing_to_drop(options):
    """Decodes where all keys have equal weight, so that none can be dropped, and from clusters, where most can."""
    random, (T, H) = np.random.default_rng(0), (options.context, 8)
    rows = []
    for D in (64, 128):
        def normal(*shape, D=D):
            return random.standard_normal((*shape, D), np.float32)

        topics = normal(32, 1)
        clustered = (2 * np.repeat(topics, -(-T // 32), 0)[:T] + 0.3 * normal(T, H))[None]
        for name, q, k in (("keys alike", normal(1, 1, H), normal(1, T, H)),
                           ("32 clusters", np.repeat(topics[None, 7:8], H, 2), clustered)):
            cache = heed.KVCache(1, H, D, sketch="int8")
            cache.append(k[:, :-1], v := normal(1, T - 1, H))
            cache.append(k[:, -1:], v[:, -1:])
            ratios = []
            for _ in range(2 + options.rounds):  # auto learns in two calls
                times = []
                for certified in ({"epsilon": 0.02, "level": "auto"}, {}):
                    began = time.perf_counter()
                    cache.attend(q, threads=options.threads, **certified)
                    times.append(time.perf_counter() - began)
                ratios.append(times[0] / times[1])
            rows.append((f"{name}, {H} heads of {D} channels", statistics.median(ratios[:2]),
                         statistics.median(ratios[2:])))
    print(f"| a cache of {T}, level auto | first two calls | later |\n|---|---|---|")
    for name, first, later in rows:
        print(f"| {name} | {first:.2f} | {later:.2f} |", flush=True)


def table(rows):
    print("| data | selector | setting | kept | dropped | oracle | error | bound | time "
          "|\n|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        bound = "" if r["bound"] is None else f"{r['bound']:.4f}"
        print(f"| {r['data']} | {r['selector']} | {r['setting']} | {r['kept']:.3f} | {r['dropped']:.4f} | "
              f"{r['oracle']:.3f} | {r['error']:.3f} | {bound} | {r['time']:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{turns.cpu_name()}, {options.threads} threads")
    model = byte_model(options.model, options.steps, options.tokens)
    rows = prefill(options, "MiniLM", minilm_layers(), causal=False)
    rows += prefill(options, "byte model", layers_of(model, options.tokens), causal=True)
    rows += decode(options, layers_of(model, options.context))
    table(rows)
    nothing_to_drop(options)
    if options.json:
        options.json.write_text(json.dumps({"cpu": turns.cpu_name(), "rows": rows}, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
