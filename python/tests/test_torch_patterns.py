# Patterns in heed.torch: gradients, torch.compile, tables that only a call keeps alive.
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import heed  # noqa: E402
import heed.torch  # noqa: E402

P = heed.patterns
PATTERNS = [P.longformer(6, [0]), P.bigbird(4, 1), P.dilated(2, 3) | P.streaming(2, 3),
            P.blocks(np.eye(8, dtype=bool), 4)]
each = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__repr__()[:12])


def tensors(T=24, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, T, heads, 8, dtype=dtype, generator=generator, requires_grad=grad) for heads in (4, 2, 2)]


@each
def test_gradients(pattern):
    q, k, v = tensors(T=12)
    assert torch.autograd.gradcheck(lambda *x: heed.torch.attention(*x, causal=True, pattern=pattern, return_lse=True),
                                    (q, k, v))
    o = heed.torch.attention(q, k, v, pattern=pattern)
    mask = torch.from_numpy(pattern.mask(12, 12, heads=4, batch=2))
    assert torch.equal(o, heed.torch.attention(q, k, v, mask=mask))
    assert np.array_equal(o.detach().numpy(), heed.attention(*(x.detach().numpy() for x in (q, k, v)), pattern=pattern))
    torch.library.opcheck(torch.ops.heed.attention.default, (q, k, v), {"pattern": repr(pattern)})


def test_a_pattern_that_dies_before_the_backward_pass_is_kept_for_it():
    q, k, v = tensors()
    index = np.stack([np.sort(np.random.default_rng(i).choice(24, 3, replace=False))
                      for i in range(48)]).reshape(2, 24, 3)
    large = np.concatenate([index, np.full((2, 24, 200), -1)], -1)  # too large for an expression
    losses = []
    for table in (index, large):
        losses.append(heed.torch.attention(q, k, v, pattern=P.keys(table)).square().sum())
        gc.collect()
    for loss in losses:
        gradients = torch.autograd.grad(loss, (q, k, v))
        mask = torch.from_numpy(P.keys(index).mask(24, 24, heads=4, batch=2))
        expected = torch.autograd.grad(heed.torch.attention(q, k, v, mask=mask).square().sum(), (q, k, v))
        for a, b in zip(gradients, expected, strict=True):  # rows of listed keys have sums of their own
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@each
def test_compiles_without_a_graph_break(pattern):
    def run(*x):
        return heed.torch.attention(*x, causal=True, pattern=pattern).square().sum()

    results = []
    for f in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        x = tensors()
        f(*x).backward()
        results.append([y.grad for y in x])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_vmap_caches_and_errors():
    q, k, v = tensors(grad=False)
    pattern = P.global_tokens([[0], [3]])
    stacked = torch.vmap(lambda x: heed.torch.attention(x, k, v, pattern=pattern))(torch.stack([q, q + 1]))
    assert torch.equal(stacked[1], heed.torch.attention(q + 1, k, v, pattern=pattern))
    cache = heed.torch.KVCache(2, 2, 8, dtype="f64")
    cache.append(k[:, :-1], v[:, :-1])
    cache.append(k[:, -1:], v[:, -1:])
    last = cache.attend(q[:, -1:], pattern=P.atrous(3))
    expected = heed.torch.attention(q[:, -1:], k, v, causal=True, pattern=P.atrous(3), invariant=True)
    assert torch.equal(last, expected)
    with pytest.raises(heed.InvalidArgument, match="attention: pattern is .*, expected a pattern of heed.patterns"):
        heed.torch.attention(q, k, v, pattern=torch.ones(3, 3))
