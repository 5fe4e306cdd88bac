# The hybrids of examples/hybrid_attention.py against plain PyTorch compositions in float64, gradients included.
import importlib.util
from pathlib import Path

import fresh
import pytest

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hybrid_attention.py"
spec = importlib.util.spec_from_file_location("hybrid_attention", EXAMPLE)
hybrids = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hybrids)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def same(ours, theirs, inputs):
    """Values and all gradients of a random functional."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    do = normal(*ours.shape, seed=9).detach()
    found = (torch.autograd.grad((o * do).sum(), inputs) for o in (ours, theirs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def logits_of(q, k):
    return torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5


@pytest.mark.parametrize("T, window", [(40, 8), (40, 1), (5, 8)])
def test_lolcats(T, window):
    q, k, v = (normal(2, T, 3, 6, seed=i) for i in range(3))
    weight_q, weight_k, gate = normal(3, 6, 4, seed=3), normal(3, 6, 4, seed=4), normal(3, seed=5)
    ours = hybrids.lolcats(q, k, v, weight_q, weight_k, gate.sigmoid(), window=window)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    inside = (j <= i) & (j > i - window)
    s = logits_of(q, k).masked_fill(~inside, -torch.inf)
    exact = gate.sigmoid()[:, None, None] * (s - s.amax(-1, keepdim=True)).exp()
    features = torch.einsum("bihf,bjhf->bhij", hybrids.hedgehog(q, weight_q), hybrids.hedgehog(k, weight_k))
    weights = exact + features * (j <= i - window)
    theirs = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v)
    same(ours, theirs, (q, k, v, weight_q, weight_k, gate))


def test_based():
    layers = [tuple(normal(2, 30, 2, 5, seed=3 * n + i) for i in range(3)) for n in range(3)]
    i, j = torch.arange(30)[:, None], torch.arange(30)
    for n, ((q, k, v), ours) in enumerate(zip(layers, hybrids.based(layers, window=7), strict=True)):
        s = logits_of(q, k)
        if n % 2 == 0:
            weights = (1 + s + s * s / 2) * (j <= i)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-12)
        else:
            weights = s.masked_fill((j > i) | (j <= i - 7), -torch.inf).softmax(-1)
        same(ours, torch.einsum("bhij,bjhd->bihd", weights, v), (q, k, v))


@pytest.mark.parametrize("T, segment", [(40, 8), (37, 16), (5, 8)])
def test_infini_attention(T, segment):
    q, k, v, beta = normal(2, T, 3, 6), normal(2, T, 3, 6, seed=1), normal(2, T, 3, 6, seed=2), normal(3, seed=3)
    ours = hybrids.infini_attention(q, k, v, beta, segment=segment)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    own = logits_of(q, k).masked_fill((j > i) | (j // segment != i // segment), -torch.inf).softmax(-1)
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    phi = torch.einsum("bihf,bjhf->bhij", phi_q, phi_k) * (j // segment < i // segment)
    memory = phi / phi.sum(-1, keepdim=True).clamp_min(1e-12)
    share = beta.sigmoid()[:, None, None]
    same(ours, torch.einsum("bhij,bjhd->bihd", share * memory + (1 - share) * own, v), (q, k, v, beta))


def test_the_example_runs():
    done = fresh.python(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == [
        "window of 64 alone", "lolcats", "based, its two layers", "infini-attention"]
