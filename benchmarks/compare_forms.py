#!/usr/bin/env python3
# The newest forms of heed beside plain PyTorch and beside the operations that they extend, in turns.
"""There are two kinds of lines. `form/pass/plain`: the form in plain PyTorch, as its paper defines it; outputs and
gradients are compared first; printed is PyTorch's time over heed's. `form/pass/OP`: heed's own OP, which the form
extends, on a problem of the same sizes; printed is the form's rate over OP's, with the flops of heed.explain.

Usage: compare_forms.py [FILTER] [--json] [--threads 1] [--rounds 5] [--tokens 1024]
Example: compare_forms.py 'titans/.*/plain'
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import turns
from form_peers import PLAIN

TOLERANCE = 1e-4  # relative, of sums over thousands of tokens in float32, on both sides
SPAN, LAYERS, WIDTH, RATIO, WINDOW = 256, 16, 1024, 4, 128
HEADS, CHANNELS = 4, 64


def problems(torch, tokens):
    """{form: (function of heed.torch by name, its leaves in order, its options)}, and so for operations."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def uniform(*shape, high=1.0):
        return high * torch.rand(*shape, generator=generator)

    heads, channels, per_token = HEADS, CHANNELS, (1, tokens, HEADS)
    q, k, v = (normal(*per_token, channels) for _ in range(3))
    key = torch.nn.functional.normalize(k, dim=-1)
    decay, channel_decay = -uniform(*per_token, high=0.1), -uniform(*per_token, channels, high=0.1)
    beta = uniform(*per_token)
    norm = 1 + 0.1 * normal(heads, channels), torch.zeros(heads, channels)
    few = 0.02 * uniform(*per_token)
    directions = torch.nn.functional.normalize(normal(*per_token, channels), dim=-1)
    step = torch.nn.functional.softplus(normal(*per_token) - 3)
    rates = -torch.arange(1.0, heads + 1)
    levels = uniform(*per_token, tokens.bit_length() + 1)
    compressed = normal(2, 1, tokens // RATIO, heads, channels)
    return {
        "relative_bias": ("attention", (q, k, v), {"causal": True, "relative_bias": 0.1 * normal(heads, SPAN)}),
        "attention_residual": ("attention_residual", (normal(WIDTH), normal(LAYERS, tokens, WIDTH)), {}),
        "compressed_attention": ("compressed_attention", (q, k, v, *compressed), {"ratio": RATIO, "window": WINDOW}),
        "mamba3": ("mamba3", (*(x[:, :, None] for x in (q, k, v)), step * rates, step, normal(*per_token),
                              uniform(*per_token, channels // 2)), {}),
        "log_linear_attention": ("log_linear_attention", (q, k, v, levels), {"log_decay": decay}),
        "precond_delta_rule": ("precond_delta_rule", (q, key, v, decay, beta, decay, uniform(*per_token)), {}),
        "precond_kda": ("precond_kda", (q, key, v, channel_decay, beta, decay, uniform(*per_token)), {}),
        "titans": ("titans", (q, key, v, *norm, few, few, uniform(*per_token, high=0.9)), {}),
        "path_attention": ("path_attention", (q, k, v, directions, 2 * beta, decay), {}),
        "wall_attention": ("wall_attention", (q, k, v, channel_decay, decay), {}),
        "deltaformer": ("deltaformer", (q, k, v, beta), {}),
        "parallax_attention": ("parallax_attention", (q, 0.1 * normal(*per_token, channels), k, v), {}),
        "attention": ("attention", (q, k, v), {"causal": True}),
        "ssd": ("ssd", (v, step, rates, k, q), {}),
        "simple_gla": ("simple_gla", (q, k, v, decay), {}),
        "gated_delta_rule": ("gated_delta_rule", (q, key, v, decay, beta), {}),
        "kda": ("kda", (q, key, v, channel_decay, beta), {}),
    }


EXTENDS = {"relative_bias": "attention", "compressed_attention": "attention", "mamba3": "ssd",
           "log_linear_attention": "simple_gla", "precond_delta_rule": "gated_delta_rule", "precond_kda": "kda",
           "titans": "gated_delta_rule", "path_attention": "attention", "wall_attention": "attention",
           "deltaformer": "attention", "parallax_attention": "attention"}
# Flops of the forward pass over those of the operation, where they differ: heed.explain.
WORK = {"log_linear_attention": 2, "titans": 11 / 6, "path_attention": 1.5, "deltaformer": 2, "parallax_attention": 2}
GOALS = {("relative_bias", "attention"): 0.95, **{(form, EXTENDS[form]): 0.8 for form in (
    "mamba3", "log_linear_attention", "precond_delta_rule", "precond_kda")}, **{(form, "plain"): 5 for form in PLAIN}}


def lines(threads):
    """(name, form, pass, other side, threads)."""
    return [(f"{form}/{kind}/{other}/threads:{t}", form, kind, other, t) for form in PLAIN
            for kind in ("forward", "train") for other in ("plain", EXTENDS.get(form)) if other for t in threads]


def runner(torch, function, leaves, options, trained):
    """A function that returns o, and the gradients of the leaves if `trained`."""
    leaves = [x.detach().clone().requires_grad_(trained) for x in leaves]
    d_o = []

    def run():
        with torch.set_grad_enabled(trained):
            o = function(*leaves, **options)
        if not trained:
            return [o.numpy()]
        d_o[:] = d_o or [torch.randn(o.shape, generator=torch.Generator().manual_seed(2))]
        return [o.detach().numpy(), *(g.numpy() for g in torch.autograd.grad(o, leaves, d_o[0]))]

    return run


def difference(mine, other):
    """The largest relative difference of two lists of arrays."""
    import numpy as np
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(mine, other, strict=True))


def measure(torch, heed_torch, line, options):
    name, form, kind, other, threads = line
    torch.set_num_threads(threads)
    of = problems(torch, options.tokens)

    def ours(what):
        function, leaves, arguments = of[what]
        function = getattr(heed_torch, function)
        return runner(torch, lambda *x, **more: function(*x, **more, threads=threads), leaves, arguments,
                      kind == "train")

    goal = GOALS.get((form, other))
    if other != "plain":
        row = turns.timed_beside_peer(name, ours(form), ours(other), threads, options.rounds, None, goal)
        scaled = {key: row[key] and row[key] * WORK.get(form, 1) for key in ("ratio", "q1", "q3")}
        return {**row, **scaled}
    _, leaves, arguments = of[form]
    mine, theirs = ours(form), runner(torch, PLAIN[form], leaves, arguments, kind == "train")
    error = difference(mine(), theirs())
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: not timed: results differ by {error:.1e}, expected at most {TOLERANCE:.0e}")
    return turns.timed_beside_peer(name, mine, theirs, threads, options.rounds, error, goal)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, rounds=5)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each problem")
    options = parser.parse_args()
    chosen = turns.chosen_lines(parser, options, lines)
    try:
        import torch
    except ImportError:
        print("compare_forms.py: PyTorch is not installed here: run scripts/setup, then .venv/bin/python",
              file=sys.stderr)
        return 1
    import heed
    import heed.torch
    installed = {"cpu": turns.cpu_name(), "heed": heed.__version__, "torch": torch.__version__}
    turns.report(installed, "float32", 50, (measure(torch, heed.torch, line, options) for line in chosen), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
