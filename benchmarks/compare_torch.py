#!/usr/bin/env python3
# heed beside PyTorch's scaled_dot_product_attention on the CPU, in one process, interleaved.
"""Every line: both outputs are compared with float64, then timed in turns; printed is PyTorch's time over heed's.

One thread is timed by its CPU time, more by wall time, where a sample counts only if no other process took a CPU.
Both read the same memory, [B, H, T, D] contiguous, which is PyTorch's own layout. Without PyTorch nothing is measured.

Lines that begin with `train` are forward and backward together, in float32: PyTorch by autograd, with fresh gradients
each time; heed by attention and attention_backward. Their gradients are compared with each other first.

Lines that begin with `decode` are one query token against 32768 keys of 8 heads: heed from a cache in pages, PyTorch
from tensors, with enable_gqa or (`view`) with the query heads of a key head as if they were tokens, which reads the
keys once.

Usage: compare_torch.py [FILTER] [--json] [--threads 1,2] [--rounds 7]
Example: compare_torch.py 'N2048/d64/.*threads:1'
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from turns import add_arguments, chosen_lines, cpu_name, timed

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a spinning pool of one side would slow the other

TORCH = "2.13.0"
LENGTHS = {128: 16, 512: 8, 1000: 4, 2048: 4, 8192: 2}  # tokens: heads
CHANNELS = (64, 80, 128)
KINDS = ("full", "causal", "padding62", "gqa14on2")
TOLERANCE = 2e-5  # for float32 on N(0, 1) inputs; both stay well below


def lines(threads):
    """(name, N, d, kind, threads) of every line."""
    return [(f"N{n}/d{d}/{kind}/threads:{t}", n, d, kind, t)
            for n in LENGTHS for d in CHANNELS for kind in KINDS for t in threads]


def train_lines(threads):
    """(name, problem of train_problem, threads)."""
    named = []
    for n in (512, 2048, 8192):
        for d in (64, 128):
            named += [(f"N{n}/d{d}/{kind}", dict(n=n, d=d, kind=kind, heads=4 if n < 8192 else 1))
                      for kind in ("full", "causal")]
            named += [(f"N{n}/d{d}/{kind}/1head", dict(n=n, d=d, kind=kind, heads=1)) for kind in ("full", "causal")]
    named += [("B32/H12/N128/d64/causal", dict(b=32, n=128, d=64, heads=12, kind="causal")),
              ("B4/H8/N1024/d64/bias", dict(b=4, n=1024, d=64, heads=8, kind="bias")),
              ("H8/N2048/d192on128/causal", dict(n=2048, d=192, dv=128, heads=8, kind="causal")),
              ("H8/N8192/d64/window512", dict(n=8192, d=64, heads=8, kind="window512")),
              ("B4/H8/N2048/d64/padding62", dict(b=4, n=2048, d=64, heads=8, kind="padding62"))]
    return [(f"train/{name}/threads:{t}", sizes, t) for name, sizes in named for t in threads]


def decode_lines(threads):
    """(name, dtype, query heads per key head, how PyTorch is called, threads)."""
    return [(f"decode/{dtype}/G{group}/{how}/threads:{t}", dtype, group, how, t)
            for dtype in ("float32", "bfloat16", "float16") for group in (1, 4, 8)
            for how in (("gqa", "view") if group > 1 else ("gqa",)) for t in threads]


def measure_decoding(torch, heed, line, rounds):
    """A dict of one line of one new token."""
    name, dtype, group, how, threads = line
    heads, n, d = 8, 32768, 128
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, t, d, generator=generator).to(getattr(torch, dtype))
               for h, t in ((heads * group, 1), (heads, n), (heads, n)))
    cache = heed.torch.KVCache(1, heads, d, dtype=q.dtype)
    for rows in (slice(0, n - 1), slice(n - 1, n)):
        cache.append(*(x[:, :, rows].transpose(1, 2) for x in (k, v)))
    q1 = q.transpose(1, 2)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def ours():
        return cache.attend(q1, threads=threads)

    def theirs():
        if how == "view":
            return sdpa(q.view(1, heads, group, d), k, v).view(1, heads * group, 1, d)
        return sdpa(q, k, v, enable_gqa=group > 1)

    reference = expected(torch, q, k, v, None, False, [0])
    errors = [float((o.double() - reference).abs().max()) for o in (ours().transpose(1, 2), theirs())]
    tolerance = {"float32": TOLERANCE, "bfloat16": 2e-3, "float16": 2e-4}[dtype]  # outputs are about 0.02
    if not max(errors) <= tolerance:
        raise SystemExit(f"{name}: not timed: error of heed {errors[0]:.1e}, of PyTorch {errors[1]:.1e}, "
                         f"expected at most {tolerance:.0e}")
    return timed(name, ours, theirs, threads, rounds, *errors)


def measure_training(torch, heed, line, rounds):
    """A dict of one line of forward and backward."""
    name, sizes, threads = line
    torch.set_num_threads(threads)
    b, n, d, h = sizes.get("b", 1), sizes["n"], sizes["d"], sizes["heads"]
    dv, kind = sizes.get("dv", d), sizes["kind"]
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(b, h, n, width, generator=generator) for width in (d, d, dv, dv))
    bias = torch.randn(1, h, n, n, generator=generator) if kind == "bias" else None
    leaves = [x.requires_grad_() for x in (q, k, v, bias) if x is not None]
    causal, mask, options = kind == "causal", bias, dict(threads=threads)
    if kind == "causal":
        options["causal"] = True
    elif kind == "bias":
        options["bias"] = bias.detach()
    elif kind == "padding62":
        valid = n * 62 // 100
        mask = (torch.arange(n) < valid).view(1, 1, 1, n)
        options["mask"] = mask
    elif kind == "window512":
        i = torch.arange(n)
        mask = (i[:, None] >= i) & (i[:, None] - i < 512)
        options |= dict(causal=True, window=(511, 0))
    q1, k1, v1, do1 = (x.detach().transpose(1, 2) for x in (q, k, v, do))

    def ours():
        o, lse = heed.attention(q1, k1, v1, return_lse=True, **options)
        return heed.attention_backward(do1, q1, k1, v1, o, lse, need_dbias=bias is not None, **options)

    def theirs():
        for leaf in leaves:
            leaf.grad = None
        with torch.enable_grad():
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            o.backward(do)

    gradients = ours()
    theirs()
    errors = []
    for mine, leaf in zip((gradients.dq, gradients.dk, gradients.dv), (q, k, v)):
        errors.append(float((torch.as_tensor(mine).transpose(1, 2) - leaf.grad).norm() / leaf.grad.norm()))
    if bias is not None:
        errors.append(float((torch.as_tensor(gradients.dbias) - bias.grad).norm() / bias.grad.norm()))
    if not max(errors) <= TOLERANCE:
        raise SystemExit(f"{name}: not timed: gradients differ by {max(errors):.1e}, expected at most {TOLERANCE:.0e}")
    return timed(name, ours, theirs, threads, rounds, errors[0], errors[0])


def problem(torch, n, d, kind):
    """q, k, v [1, H, N, d] and a mask [1, 1, 1, N] or None."""
    heads, kv_heads = (14, 2) if kind == "gqa14on2" else (LENGTHS[n],) * 2
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, n, d, generator=generator) for h in (heads, kv_heads, kv_heads))
    mask = (torch.arange(n) < n * 62 // 100).view(1, 1, 1, n) if kind == "padding62" else None
    return q, k, v, mask


def expected(torch, q, k, v, mask, causal, rows):
    """The rows of exact attention in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = q[:, :, rows].double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    keep = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool) if mask is None else mask
    if causal:
        keep = keep & (torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[rows, None])
    return s.masked_fill(~keep, -float("inf")).softmax(-1) @ v


def measure(torch, heed, line, rounds):
    """A dict of one line."""
    name, n, d, kind, threads = line
    torch.set_num_threads(threads)
    q, k, v, mask = problem(torch, n, d, kind)
    causal = kind == "causal"
    q1, k1, v1 = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def ours():
        return heed.attention(q1, k1, v1, causal=causal, mask=mask, threads=threads)

    def theirs():
        return sdpa(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=kind == "gqa14on2")

    rows = sorted({*range(min(n, 32)), *range(n // 2, min(n, n // 2 + 32)), *range(max(n - 32, 0), n)})
    reference = expected(torch, q, k, v, mask, causal, rows)
    errors = [float((o[:, :, rows].double() - reference).abs().max())
              for o in (torch.as_tensor(ours()).transpose(1, 2), theirs())]
    if not max(errors) <= TOLERANCE:
        raise SystemExit(f"{name}: not timed: error of heed {errors[0]:.1e}, of PyTorch {errors[1]:.1e}, "
                         f"expected at most {TOLERANCE:.0e}")

    return timed(name, ours, theirs, threads, rounds, *errors)


RUNS = {"train": measure_training, "decode": measure_decoding}  # by how a line's name begins


def show(row):
    """One line of text."""
    if row["ratio"] is None:
        return f"{row['name']:<36} {'noisy':>10}"
    noisy = 2 * row["rejected"] > row["samples"]
    verdict = "noisy" if noisy else "" if row["ratio"] > 1 else "SLOWER"
    return (f"{row['name']:<36} {1e3 * row['heed_seconds']:>8.2f} ms {1e3 * row['torch_seconds']:>8.2f} ms "
            f"{row['ratio']:>6.2f}x  {row['q1']:.2f} - {row['q3']:.2f}  {row['samples']:>2} {verdict}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rounds=7, threads="1,2" if len(os.sched_getaffinity(0)) > 1 else "1")
    options = parser.parse_args()
    chosen = chosen_lines(parser, options,
                          lambda threads: lines(threads) + train_lines(threads) + decode_lines(threads))
    try:
        import torch
    except ImportError:
        skipped = f"skipped: PyTorch is not installed (pip install torch=={TORCH})"
        print(json.dumps({"skipped": skipped, "lines": []}) if options.json else skipped)
        return 0
    try:
        import heed
        import heed.torch  # noqa: F401
    except ImportError:
        print("compare_torch.py: heed is not installed here: run scripts/setup, then .venv/bin/python", file=sys.stderr)
        return 1

    with torch.no_grad():
        if not options.json:
            other = "" if torch.__version__.startswith(TORCH) else f" (levels were taken with {TORCH})"
            print(f"{cpu_name()}, heed {heed.__version__}, PyTorch {torch.__version__}{other}\n"
                  f"{'float32':<36} {'heed':>11} {'PyTorch':>11} {'ratio':>7}  quartiles  samples", flush=True)
        rows = []
        for line in chosen:
            run = RUNS.get(line[0].split("/")[0], measure)
            rows.append(run(torch, heed, line, options.rounds))
            if not options.json:
                print(show(rows[-1]), flush=True)
    if options.json:
        versions = {"cpu": cpu_name(), "heed": heed.__version__, "torch": torch.__version__}
        print(json.dumps({**versions, "lines": rows}, indent=2))
    else:
        timed = [row for row in rows if row["ratio"] is not None]
        print(f"\nfaster in {sum(row['ratio'] > 1 for row in timed)} of {len(timed)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
