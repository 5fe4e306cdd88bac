#!/usr/bin/env python3
# heed.torch on an NVIDIA GPU beside PyTorch's kernels and compiled code, in one process, interleaved.
"""Every line: the peer's output (and gradients) are compared with heed's, then both are timed in turns by events of the
device; printed is the peer's time over heed's, and the goal where there is one. A line that the peer lacks is named and
skipped.

Lines that begin with `flash` and `cudnn` are scaled_dot_product_attention by that backend alone, 16 heads of 128
channels in bfloat16, 16384 tokens in all; `flex` is torch.compile(flex_attention) with a window, with documents, with a
soft cap; both sides read the same memory, [B, H, T, D] contiguous. `chunks` is the chunk form of a recurrence in plain
PyTorch, compiled, with its products in TF32, of 16 heads of 64 channels and 4 sequences of 4096 tokens.

With --emulated all runs once, with few tokens, on the CPU, where the goals and times mean nothing: a test of this
program.

Usage: compare_cuda.py [FILTER] [--json] [--rounds 11] [--emulated]
Example: compare_cuda.py 'cudnn/causal/16384'
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import turns

TOLERANCE = 2e-2  # relative, in bfloat16 on both sides
CHUNK = 64


class Device:
    """The device on which lines run, and its clock."""

    def __init__(self, torch, emulated):
        self.torch, self.emulated, self.name = torch, emulated, "cpu" if emulated else "cuda"

    def normal(self, *shape, dtype="bfloat16", seed=1):
        generator = self.torch.Generator().manual_seed(seed)
        return self.torch.randn(*shape, generator=generator).to(self.name, getattr(self.torch, dtype))

    def tokens(self, tokens):
        return 2 * CHUNK if self.emulated else tokens

    def compiled(self, function):
        return function if self.emulated else self.torch.compile(function, dynamic=False)

    def seconds(self, call):
        if self.emulated:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3


def sides(device, functions, leaves, d_o, kind):
    """Gives the timed function of each side: it computes outputs, or gradients of outputs computed before."""
    if kind == "forward":
        return [lambda f=f: [f(*leaves)] for f in functions]
    leaves = [x.detach().requires_grad_() for x in leaves]
    outputs = [f(*leaves) for f in functions]
    return [lambda o=o: device.torch.autograd.grad(o, leaves, d_o, retain_graph=True) for o in outputs]


def attention_sides(device, peer, options, tokens, kind):
    """`peer` of q, k and v beside heed's attention with these options."""
    import heed.torch

    batch, tokens = max(1, 16384 // tokens) if not device.emulated else 1, device.tokens(tokens)
    q, k, v, d_o = (device.normal(batch, 16, tokens, 128, seed=i) for i in range(4))

    def ours(q, k, v):
        return heed.torch.attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    return sides(device, (ours, peer), (q, k, v), d_o, kind)


def sdpa(device, backend, mask, tokens, kind):
    attention = device.torch.nn.attention
    causal = mask == "causal"

    def theirs(q, k, v):
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            return device.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention_sides(device, theirs, dict(causal=causal), tokens, kind)


def flex(device, what, tokens, kind):
    torch, module = device.torch, device.torch.nn.attention.flex_attention
    tokens_here = device.tokens(tokens)
    documents = torch.arange(tokens_here, device=device.name) // (tokens_here // 8)
    modified, masked, options = None, lambda b, h, q, k: q >= k, dict(causal=True)
    if what == "window":
        masked, options["window"] = lambda b, h, q, k: (q >= k) & (q - k <= 1023), (1023, 0)
    elif what == "documents":
        masked, options["segments"] = (lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]),
                                       documents.cpu()[None])
    else:
        modified, options["softcap"] = lambda score, b, h, q, k: 20 * torch.tanh(score / 20), 20.0
    mask = module.create_block_mask(masked, None, None, tokens_here, tokens_here, device=device.name)
    torch.compiler.reset()  # one line's code is no start for the next
    compiled = device.compiled(module.flex_attention)
    return attention_sides(device, lambda q, k, v: compiled(q, k, v, score_mod=modified, block_mask=mask), options,
                           tokens, kind)


# --- chunk forms ------------------------------------------------------------------------------------------------------


def in_chunks(x):
    """[B, T, H, ...] as [B, H, chunks, CHUNK, ...] of float32."""
    return x.float().transpose(1, 2).unflatten(2, (-1, CHUNK))


def carried(torch, q, k, v, inner, last):
    """o = q S + inner, S = last S + k^T v, chunk by chunk; v(i, S) may look at the state."""
    state = q.new_zeros(*q.shape[:2], q.shape[-1], inner.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        values = v(i, state)
        outputs.append(q[:, :, i] @ state + inner[:, :, i] @ values)
        state = last[:, :, i] * state + k[:, :, i].transpose(-1, -2) @ values
    return torch.stack(outputs, 2).flatten(2, 3).transpose(1, 2)


def gla_chunks(torch, scale, q, k, v, log_decay):
    q, k, v, total = in_chunks(q), in_chunks(k), in_chunks(v), in_chunks(log_decay).cumsum(3)
    q, grown, rest = q * scale * total.exp(), k * (-total).exp(), k * (total[..., -1:, :] - total).exp()
    inner = (q @ grown.transpose(-1, -2)).tril()
    return carried(torch, q, rest, lambda i, _: v[:, :, i], inner, total[..., -1, :, None].exp())


def simple_gla_chunks(torch, scale, q, k, v, log_decay):
    q, k, v, total = in_chunks(q) * scale, in_chunks(k), in_chunks(v), in_chunks(log_decay).cumsum(3)
    inner = q @ k.transpose(-1, -2) * (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp()
    from_start, to_end = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    return carried(torch, q * from_start, k * to_end, lambda i, _: v[:, :, i], inner.tril(),
                   total[..., -1].exp()[..., None, None])


def ssd_chunks(torch, scale, x, dt, A, B, C):
    heads = x.shape[2]
    b, c = (t.expand(-1, -1, heads, -1) for t in (B, C))
    return simple_gla_chunks(torch, scale, c, b, x.float() * dt.float().unsqueeze(-1), dt.float() * A.float())


def gated_delta_chunks(torch, scale, q, k, v, log_decay, beta):
    q, k, v, total = in_chunks(q) * scale, in_chunks(k), in_chunks(v), in_chunks(log_decay).cumsum(3)
    beta = in_chunks(beta).unsqueeze(-1)
    decays = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp()
    from_start, to_end = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    erased = (beta * (k @ k.transpose(-1, -2)) * decays).tril(-1) + torch.eye(CHUNK, device=k.device)
    solved = torch.linalg.solve_triangular(erased, torch.cat((beta * v, beta * from_start * k), -1), upper=False)
    of_values, of_keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    inner = (q @ k.transpose(-1, -2) * decays).tril()
    return carried(torch, q * from_start, k * to_end, lambda i, state: of_values[:, :, i] - of_keys[:, :, i] @ state,
                   inner, total[..., -1].exp()[..., None, None])


FORMS = {"gla": gla_chunks, "simple_gla": simple_gla_chunks, "gated_delta_rule": gated_delta_chunks, "ssd": ssd_chunks}


def chunks(device, name, channels, kind):
    import heed.torch

    torch, batch, heads, tokens = device.torch, 1 if device.emulated else 4, 16, device.tokens(4096)
    q, k, v, d_o = (device.normal(batch, tokens, heads, channels, seed=i) for i in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    per_token, scale = device.normal(batch, tokens, heads, seed=5), channels**-0.5
    gates = -0.1 * (q if name == "gla" else per_token).float().sigmoid().flip(1)
    if name == "ssd":
        scale, rates = 1.0, -torch.arange(1, heads + 1, device=device.name) / heads
        leaves = [v, 0.1 * per_token.float().sigmoid(), rates, k[:, :, :1].contiguous(), q[:, :, :1].contiguous()]
    else:
        leaves = [q, k, v, gates, *([per_token.sigmoid()] if name == "gated_delta_rule" else [])]
    torch.set_float32_matmul_precision("high")
    torch.compiler.reset()
    compiled = device.compiled(FORMS[name])
    return sides(device, (getattr(heed.torch, name), lambda *x: compiled(torch, scale, *x).to(v.dtype)), leaves, d_o,
                 kind)


def lines(_):
    """(name, what makes its sides, arguments of that, goal)."""
    found = []
    for peer, backend, goals in (("flash", "FLASH_ATTENTION", (1.0, 0.9)), ("cudnn", "CUDNN_ATTENTION", (0.8, 0.7))):
        found += [(f"{peer}/{mask}/{tokens}/{kind}", sdpa, (backend, mask, tokens, kind), goal)
                  for mask in ("causal", "full") for tokens in (4096, 8192, 16384)
                  for kind, goal in zip(("forward", "backward"), goals, strict=True)]
    found += [(f"flex/{what}/{tokens}/{kind}", flex, (what, tokens, kind), 1.2)
              for what in ("window", "documents", "softcap") for tokens in (8192,) for kind in ("forward", "backward")]
    found += [(f"chunks/{name}/d64/{kind}", chunks, (name, 64, kind), None) for name in FORMS
              for kind in ("forward", "backward")]
    return found


def difference(mine, other):
    """The largest relative difference of two lists of tensors."""
    return max(float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp_min(1e-30))
               for a, b in zip(mine, other, strict=True))


def measure(device, line, rounds):
    name, make, arguments, goal = line
    try:
        ours, theirs = make(device, *arguments)
        result = theirs()
    except RuntimeError as error:
        if type(error).__module__.startswith("heed"):
            raise
        return {"name": name, "skipped": " ".join(str(error).split())[:160]}
    error = difference(ours(), result)
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: not timed: results differ by {error:.1e}, expected at most {TOLERANCE:.0e}")
    del result
    pairs = [(device.seconds(ours), device.seconds(theirs)) for _ in range(rounds)]
    return {"name": name, "samples": rounds, **turns.summary(pairs), "difference": error,
            "goal": None if device.emulated else goal}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, rounds=11)
    parser.add_argument("--emulated", action="store_true", help="once, on the CPU: a test of this program")
    options = parser.parse_args()
    chosen = turns.chosen_lines(parser, options, lines)
    try:
        import torch
        import torch.nn.attention.flex_attention  # noqa: F401
    except ImportError:
        print("compare_cuda.py: PyTorch is not installed here: run scripts/setup, then .venv/bin/python",
              file=sys.stderr)
        return 1
    if not options.emulated and not torch.cuda.is_available():
        print("compare_cuda.py: PyTorch finds no GPU here", file=sys.stderr)
        return 1
    import heed
    device, options.tokens = Device(torch, options.emulated), 16384
    named = turns.cpu_name() + ", not a GPU: times mean nothing" if options.emulated else torch.cuda.get_device_name()
    installed = {"cpu": named, "heed": heed.__version__, "torch": torch.__version__}
    rounds = 1 if options.emulated else options.rounds
    turns.report(installed, "16384 tokens", 48, (measure(device, line, rounds) for line in chosen), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
