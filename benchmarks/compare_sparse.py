#!/usr/bin/env python3
# Sparse attention of heed beside PyTorch's, and layers of Transformers before and after accelerate, interleaved.
"""Every line: the peer's output (and gradients) are compared with heed's, then both are timed in turns; printed is the
peer's time over heed's, and the goal where there is one. A line that the peer lacks is named and skipped.

Lines that begin with `flex` are heed.torch.attention(pattern=...) and torch.compile(flex_attention) of the same pairs,
on the same memory, [B, H, T, D] contiguous, which is FlexAttention's layout; its block masks have the blocks of the
pattern, or 128. On a CPU it has no backward pass, so that `sdpa` has training lines too: scaled_dot_product_attention
with the pairs as a dense mask. Lines that begin with `attention` are the layers of Longformer (window 512, one global
token) and BigBird (blocks of 64, three random ones) with 12 heads of 64, half as many tokens, their projections
replaced by multiplications with a number; in `layer` with their projections. One thread is timed by the CPU time of the
process.

Usage: compare_sparse.py [FILTER] [--json] [--threads 1] [--rounds 5] [--tokens 8192] [--heads N]
Example: compare_sparse.py 'flex/window/d64/float32' --tokens 2048
"""

import argparse
import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import turns

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative
HEADS = {64: 4, 128: 2}
LAYERS = ("longformer", "bigbird")


class Missing(Exception):
    """The peer lacks what this line needs."""


def rows_of(torch, mask_mod, heads, tokens, begin, count):
    """The pairs that mask_mod keeps in `count` rows from `begin`, bool [heads, rows, tokens]."""
    rows = torch.arange(begin, min(begin + count, tokens))[:, None]
    keep = mask_mod(torch.tensor(0), torch.arange(heads)[:, None, None], rows, torch.arange(tokens))
    return keep.expand(heads, len(rows), tokens)


def block_mask(torch, mask_mod, heads, tokens, size):
    """The result of create_block_mask, built one row of blocks at a time, without a table of all pairs."""
    flex = torch.nn.attention.flex_attention
    blocks = -(-tokens // size)
    some, every = (torch.zeros(heads, blocks, blocks, dtype=torch.bool) for _ in range(2))
    for i in range(blocks):
        keep = rows_of(torch, mask_mod, heads, tokens, i * size, size)
        for j, columns in enumerate(keep.split(size, -1)):
            some[:, i, j], every[:, i, j] = columns.flatten(1).any(1), columns.flatten(1).all(1)

    def lists(table):
        return (table.sum(-1, dtype=torch.int32)[None],
                table.logical_not().int().argsort(dim=-1, stable=True).int()[None])

    return flex.BlockMask.from_kv_blocks(*lists(some & ~every), *lists(every), BLOCK_SIZE=size, mask_mod=mask_mod,
                                         seq_lengths=(tokens, tokens))


def longformer(torch, patterns, heads, tokens):
    """heed's pattern, the mask function of the same pairs, the heads of its mask, and the size of its blocks."""
    return patterns.longformer(512, [0, 1]), lambda b, h, q, k: ((q - k).abs() <= 256) | (q < 2) | (k < 2), 1, 128


def window(torch, patterns, heads, tokens):
    return patterns.sliding_window(511), lambda b, h, q, k: (q >= k) & (q - k < 512), 1, 128


def bigbird(torch, patterns, heads, tokens):
    # Blocks of one token are drawn as those of 64 are: the table of blocks.
    table = torch.from_numpy(patterns.bigbird(1, 3).mask(-(-tokens // 64), -(-tokens // 64), heads=heads)[0])
    return patterns.bigbird(64, 3), lambda b, h, q, k: table[h, q // 64, k // 64], heads, 64


def blocks(torch, patterns, heads, tokens):
    """A tenth of all blocks of 128, those of the diagonal among them."""
    number = -(-tokens // 128)
    table = torch.rand(heads, number, number, generator=torch.Generator().manual_seed(3)) < 0.1 - 0.9 / number
    table |= torch.eye(number, dtype=torch.bool)
    return patterns.blocks(table.numpy(), 128), lambda b, h, q, k: table[h, q // 128, k // 128], heads, 128


PATTERNS = {"longformer": longformer, "bigbird": bigbird, "blocks": blocks, "window": window}


def training(torch, call, leaves, d_o):
    """A function that gives o and the gradients of the leaves."""
    def run():
        o = call()
        return [o, *torch.autograd.grad(o, leaves, d_o)]

    return run


def pattern_problem(torch, options, peer, name, d, dtype, kind):
    """heed's side and PyTorch's, functions of nothing that give lists of tensors."""
    import heed.torch

    tokens, heads = options.tokens, options.heads or HEADS[d]
    pattern, mask_mod, mask_heads, size = PATTERNS[name](torch, heed.patterns, heads, tokens)
    generator = torch.Generator().manual_seed(1)
    q, k, v, d_o = (torch.randn(1, heads, tokens, d, generator=generator).to(getattr(torch, dtype)) for _ in range(4))
    if peer == "flex":
        mask = block_mask(torch, mask_mod, mask_heads, tokens, size)
        torch.compiler.reset()  # one line's code is no start for the next
        compiled = torch.compile(torch.nn.attention.flex_attention.flex_attention, dynamic=False)
    else:
        mask = torch.empty(1, mask_heads, tokens, tokens, dtype=torch.bool)
        for i in range(0, tokens, size):
            mask[0, :, i : i + size] = rows_of(torch, mask_mod, mask_heads, tokens, i, size)

    def ours():
        return heed.torch.attention(*(x.transpose(1, 2) for x in (q, k, v)), pattern=pattern).transpose(1, 2)

    def theirs():
        if peer == "flex":
            return compiled(q, k, v, block_mask=mask)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    if kind == "forward":
        return lambda: [ours()], lambda: [theirs()]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return training(torch, ours, leaves, d_o), training(torch, theirs, leaves, d_o)


def layer_problem(torch, options, name, whole, kind):
    """The two sides of a layer of Transformers, which is accelerated on heed's side."""
    try:
        import transformers
        from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
    except ImportError as error:
        raise Missing(f"transformers: {error}") from error
    import heed.transformers

    class Scaled(torch.nn.Module):
        """In the place of a projection."""

        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    tokens, sizes = options.tokens // 2, dict(hidden_size=768, num_attention_heads=12)
    torch.manual_seed(1)
    if name == "longformer":
        config = transformers.LongformerConfig(**sizes, attention_window=[512], attention_probs_dropout_prob=0.0)
        layer = LongformerSelfAttention(config, 0)
        mask = torch.zeros(1, tokens)
        mask[:, 0] = 10000.0
        arguments = dict(attention_mask=mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0,
                         is_global_attn=True)
    else:
        config = transformers.BigBirdConfig(**sizes, max_position_embeddings=4096)
        layer = BigBirdBlockSparseAttention(config, seed=0)
        blocked, band, rows, keys = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, tokens),
                                                                                    config.block_size)
        arguments = dict(band_mask=band, from_mask=rows, to_mask=keys, from_blocked_mask=blocked,
                         to_blocked_mask=blocked)
    if not whole:
        for i, (part, _) in enumerate(list(layer.named_children())):
            setattr(layer, part, Scaled(0.5 + 0.25 * i))
    layer.train(kind == "train")
    fast = copy.deepcopy(layer)
    heed.transformers.accelerate(fast, strict=True)
    x = torch.randn(1, tokens, 768, requires_grad=kind == "train")
    d_o = torch.randn(1, tokens, 768)
    sides = []
    for side in (fast, layer):
        def call(side=side):
            return side(x, **arguments)[0]

        leaves = [x, *side.parameters()]
        sides.append(training(torch, call, leaves, d_o) if kind == "train" else lambda call=call: [call()])
    return sides


def lines(threads):
    """(name, what makes its problem, arguments of that, tolerance, goal, threads)."""
    found = []
    for t in threads:
        found += [(f"{peer}/{name}/d{d}/{dtype}/{kind}/threads:{t}", pattern_problem, (peer, name, d, dtype, kind),
                   TOLERANCE[dtype], 4 if peer == "flex" else None, t)
                  for name in PATTERNS for d in HEADS for dtype in TOLERANCE
                  for peer, kind in (("flex", "forward"), ("flex", "train"), ("sdpa", "train"))]
        found += [(f"{part}/{name}/{kind}/threads:{t}", layer_problem, (name, part == "layer", kind),
                   TOLERANCE["float32"], None if part == "layer" else 5, t)
                  for part in ("attention", "layer") for name in LAYERS for kind in ("forward", "train")]
    return found


def difference(mine, other):
    """The largest relative difference of two lists of tensors: those that are nearly 0 beside others, as gradients of
    keys' biases are but for rounding, count by the largest."""
    norms = [float(x.detach().double().norm()) for x in other]
    return max(float((a.detach().double() - b.detach().double()).norm()) / max(norm, 1e-3 * max(norms))
               for a, b, norm in zip(mine, other, norms, strict=True))


def measure(torch, line, options):
    name, problem, arguments, tolerance, goal, threads = line
    torch.set_num_threads(threads)
    with torch.set_grad_enabled("train" in arguments):
        try:
            ours, theirs = problem(torch, options, *arguments)
            result = theirs()
        except (Missing, NotImplementedError) as error:
            return {"name": name, "skipped": str(error).splitlines()[0]}
        except Exception as error:  # the compiler's errors are of many types
            if type(error).__module__.startswith("torch._"):
                return {"name": name, "skipped": " ".join(str(error).split())[:160]}
            raise
        error = difference(ours(), result)
        if not error <= tolerance:
            raise SystemExit(f"{name}: not timed: results differ by {error:.1e}, expected at most {tolerance:.0e}")
        del result
        return turns.timed_beside_peer(name, ours, theirs, threads, options.rounds, error, goal)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, rounds=5)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens, of layers half as many: a multiple of 2048")
    parser.add_argument("--heads", type=int, default=None, help="heads of `flex`; 4 of 64 channels, 2 of 128")
    options = parser.parse_args()
    chosen = turns.chosen_lines(parser, options, lines)
    if options.tokens < 2048 or options.tokens % 2048:
        parser.error(f"--tokens is {options.tokens}, expected a multiple of 2048")
    try:
        import torch
        import torch.nn.attention.flex_attention  # noqa: F401
    except ImportError:
        print("compare_sparse.py: PyTorch is not installed here: run scripts/setup, then .venv/bin/python",
              file=sys.stderr)
        return 1
    import heed
    installed = {"cpu": turns.cpu_name(), "heed": heed.__version__, "torch": torch.__version__}
    try:
        import transformers
        installed["transformers"] = transformers.__version__
    except ImportError:
        installed["transformers"] = None
    turns.report(installed, f"{options.tokens} tokens", 48, (measure(torch, line, options) for line in chosen), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
