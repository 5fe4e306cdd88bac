#!/usr/bin/env python3
# Attention over chosen blocks beside MoBA's plain path in PyTorch and beside heed's own dense attention, interleaved.
"""Every line is heed.select.top_blocks and heed.torch.attention(pattern=...) with its choice; both are timed together.
Lines that begin with `moba` are beside MoBA written in PyTorch from its definition: gates of block means, the best
blocks as a mask, and a softmax over all pairs. Results, and gradients, are compared before anything is timed; a row in
a thousand may differ, because gates that are equal but for rounding are ordered by chance. Lines that begin with
`dense` are beside heed.torch.attention of all pairs, after a comparison with a mask of the chosen ones; `choice` is the
choice alone beside the same. Printed is the peer's time over heed's, and the goal where there is one. One thread is
timed by the CPU time of the process.

Usage: compare_select.py [FILTER] [--json] [--threads 1] [--rounds 5] [--tokens 8192] [--heads 1] [--count 8]
Example: compare_select.py 'moba/d64/forward' --tokens 4096
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import turns

BLOCK = 64
TOLERANCE = 1e-4  # relative
GOALS = {"moba": 10, "dense": 4, "choice": 20}
MOST_ROWS = 1e-3  # share of rows that may choose other blocks


def plain_moba(torch, q, k, v, count):
    """MoBA's attention of [B, T, H, D], the same heads for all three, as its paper defines it."""
    tokens, blocks = q.shape[1], -(-q.shape[1] // BLOCK)
    means = torch.stack([part.mean(1) for part in k.split(BLOCK, 1)], 1)
    own = torch.arange(tokens)[:, None] // BLOCK
    gate = torch.einsum("bthd,bnhd->bhtn", q, means).detach()
    gate = gate.masked_fill(torch.arange(blocks) > own, -torch.inf).masked_fill(torch.arange(blocks) == own, torch.inf)
    chosen = torch.zeros_like(gate, dtype=torch.bool).scatter_(-1, gate.topk(min(count, blocks), -1).indices, True)
    keep = chosen.repeat_interleave(BLOCK, -1)[..., :tokens] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~keep, -torch.inf).softmax(-1), v)


def problem(torch, options, peer, d, kind):
    """Functions without arguments that give lists of tensors: heed's side, the peer's, heed's results, the expected."""
    import heed.torch

    generator = torch.Generator().manual_seed(1)
    shape = 1, options.tokens, options.heads, d
    q, k, v, d_o = (torch.randn(shape, generator=generator) for _ in range(4))

    def choice():
        return heed.select.top_blocks(q, k, count=options.count, block=BLOCK)

    def mask():
        return torch.from_numpy(choice().mask(options.tokens, options.tokens, heads=options.heads, causal=True))

    calls = {
        "ours": lambda: heed.torch.attention(q, k, v, causal=True, pattern=choice()),
        "moba": lambda: plain_moba(torch, q, k, v, options.count),
        "dense": lambda: heed.torch.attention(q, k, v, causal=True),
        "masked": lambda: heed.torch.attention(q, k, v, causal=True, mask=mask()),
    }
    leaves = [x.requires_grad_(kind == "train") for x in (q, k, v)]

    def with_gradients(call):
        def run():
            o = call()
            return [o, *torch.autograd.grad(o, leaves, d_o)]

        return run if kind == "train" else lambda: [call()]

    sides = {name: with_gradients(call) for name, call in calls.items()}
    if peer == "choice":
        return choice, sides["dense"], sides["ours"], sides["masked"]
    return sides["ours"], sides[peer], sides["ours"], sides["moba" if peer == "moba" else "masked"]


def compare(name, mine, other):
    """The relative difference of rows of o, without the few that differ because they chose otherwise."""
    rows = [((a - b).norm(dim=-1) / b.norm(dim=-1)).flatten() for a, b in zip(mine[:1], other[:1], strict=True)][0]
    differing = float((rows > TOLERANCE).double().mean())
    gradients = max((float((a - b).norm() / b.norm()) for a, b in zip(mine[1:], other[1:], strict=True)), default=0)
    if differing > MOST_ROWS or gradients > (TOLERANCE if differing == 0 else 3e-2):
        raise SystemExit(f"{name}: not timed: {differing:.1e} of the rows and gradients by {gradients:.1e} differ")
    return float(rows[rows <= TOLERANCE].max())


def lines(threads):
    """(name, peer, d, forward or train, threads)."""
    return [(f"{peer}/d{d}/{kind}/threads:{t}", peer, d, kind, t) for t in threads for d in (64, 128)
            for peer, kind in (("moba", "forward"), ("moba", "train"), ("dense", "forward"), ("dense", "train"),
                               ("choice", "forward"))]


def measure(torch, line, options):
    name, peer, d, kind, threads = line
    torch.set_num_threads(threads)
    with torch.set_grad_enabled(kind == "train"):
        ours, theirs, mine, expected = problem(torch, options, peer, d, kind)
        error = compare(name, [x.detach() for x in mine()], [x.detach() for x in expected()])
        return turns.timed_beside_peer(name, ours, theirs, threads, options.rounds, error,
                                       GOALS[peer] if d == 64 else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, rounds=5)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens; the peer's scores take their square")
    parser.add_argument("--heads", type=int, default=1, help="heads of q, k and v")
    parser.add_argument("--count", type=int, default=8, help="blocks of 64 keys that a row keeps")
    options = parser.parse_args()
    chosen = turns.chosen_lines(parser, options, lines)
    if min(options.tokens, options.heads, options.count) < 1:
        parser.error("--tokens, --heads and --count are 1 or more")
    try:
        import torch
    except ImportError:
        print("compare_select.py: PyTorch is not installed here: run scripts/setup, then .venv/bin/python",
              file=sys.stderr)
        return 1
    import heed
    installed = {"cpu": turns.cpu_name(), "heed": heed.__version__, "torch": torch.__version__}
    title = f"{options.tokens} tokens, {options.count} blocks of {BLOCK} keys to a row"
    turns.report(installed, title, 32, (measure(torch, line, options) for line in chosen), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
