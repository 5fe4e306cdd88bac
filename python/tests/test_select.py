# Selectors from NumPy and PyTorch: choices against plain definitions, attention and training with a choice, errors.
import numpy as np
import pytest

import heed
import heed.torch
import torch

S = heed.select
RNG = np.random.default_rng(11)
B, TQ, TK, HQ, HK, D = 2, 100, 160, 4, 2, 16


def inputs(dtype=np.float32, tq=TQ):
    shapes = {"q": (B, tq, HQ, D), "k": (B, TK, HK, D), "v": (B, TK, HK, 24)}
    return {key: RNG.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}


def mask_of(pattern, **options):
    return pattern.mask(TQ, TK, heads=HQ, key_heads=HK, batch=B, causal=True, **options)


def gate(q, k, block, count, box=False, group=True):
    """The blocks [B, H, Tq, nb] of top_blocks under a causal mask, from its definition."""
    nb, groups = -(-TK // block), HQ // HK
    means, low, high = (np.stack([f(k[:, i * block:(i + 1) * block], axis=1) for i in range(nb)], 1)
                        for f in (np.mean, np.min, np.max))
    each = [np.repeat(x, groups, 2) for x in (means, low, high)]
    if box:
        # [B, Tq, nb, Hq]
        scores = np.maximum(q[:, :, None] * each[1][:, None], q[:, :, None] * each[2][:, None]).sum(-1)
    else:
        scores = np.einsum("bthd,bnhd->btnh", q, each[0])
    if group:
        scores = scores.reshape(*scores.shape[:3], HK, groups).sum(-1)
    scores = scores.transpose(0, 3, 1, 2)
    own = (np.arange(TQ) + TK - TQ) // block
    blocks = np.arange(nb)
    scores = np.where(blocks > own[:, None], -np.inf, np.where(blocks == own[:, None], np.inf, scores))
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    kept = np.zeros(scores.shape, bool)
    np.put_along_axis(kept, order, True, -1)
    return kept & (blocks <= own[:, None])


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("share", ["group", "head"])
def test_top_blocks_are_those_of_the_definition(box, share):
    x = inputs(np.float64)
    pattern = S.top_blocks(x["q"], x["k"], count=3, block=16, score="box" if box else "mean", share=share)
    kept = gate(x["q"], x["k"], 16, 3, box, share == "group")
    kept = np.repeat(kept, HQ // kept.shape[1], 1)
    positions = np.arange(TQ)[:, None] + TK - TQ
    expected = np.repeat(kept, 16, -1)[..., :TK] & (np.arange(TK) <= positions)
    assert np.array_equal(mask_of(pattern), expected)


SELECTORS = {
    "top_blocks": lambda x: S.top_blocks(x["q"], x["k"], count=3, block=16),
    "box": lambda x: S.top_blocks(x["q"], x["k"], count=3, block=16, score="box", share="head"),
    "cumulative": lambda x: S.cumulative(x["q"], x["k"], mass=0.5, block=16),
    "vertical_slash": lambda x: S.vertical_slash(x["q"], x["k"], verticals=20, slashes=20, last=16, sinks=2, local=4),
    "indexer": lambda x: S.indexer(x["q"], x["k"][:, :, 0], np.ones_like(x["q"][..., 0]), count=30),
}
each = pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)


@each
def test_attention_with_a_choice_is_that_with_its_mask(selector):
    x = inputs()
    pattern = selector(x)
    o = heed.attention(**x, causal=True, pattern=pattern)
    np.testing.assert_allclose(o, heed.attention(**x, causal=True, mask=mask_of(pattern)), atol=3e-6)
    united = pattern | heed.patterns.streaming(1, 8)
    np.testing.assert_allclose(heed.attention(**x, causal=True, pattern=united),
                               heed.attention(**x, causal=True, mask=mask_of(united)), atol=3e-6)


@each
def test_training_through_a_choice_has_the_gradients_of_its_mask(selector):
    x = {key: torch.tensor(value, requires_grad=True) for key, value in inputs().items()}
    pattern = selector({key: value if key != "q" else value for key, value in x.items()}
                       if selector is not SELECTORS["indexer"]
                       else {key: value.detach().numpy() for key, value in x.items()})
    do = torch.randn(B, TQ, HQ, 24)
    o = heed.torch.attention(x["q"], x["k"], x["v"], causal=True, pattern=pattern)
    gradients = torch.autograd.grad(o, list(x.values()), do)
    masked = heed.torch.attention(x["q"], x["k"], x["v"], causal=True, mask=torch.tensor(mask_of(pattern)))
    for a, b in zip(gradients, torch.autograd.grad(masked, list(x.values()), do), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_tensors_and_arrays_choose_alike():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        q, k = torch.randn(B, TQ, HQ, D).to(dtype), torch.randn(B, TK, HK, D).to(dtype)
        pattern = S.top_blocks(q, k, count=3, block=16)
        assert np.array_equal(mask_of(pattern), mask_of(S.top_blocks(q.requires_grad_(), k, count=3, block=16)))
        if dtype != torch.bfloat16:
            assert np.array_equal(mask_of(pattern),
                                  mask_of(S.top_blocks(q.detach().numpy(), k.numpy(), count=3, block=16)))


def test_padding_threads_and_places_are_those_of_attention():
    x = inputs()
    lengths = [120, 160]
    pattern = S.top_blocks(x["q"], x["k"], count=3, block=16, key_lengths=lengths, align=[20, 60], threads=1)
    again = S.top_blocks(x["q"], x["k"], count=3, block=16, key_lengths=np.array(lengths), align=np.array([20, 60]),
                         threads=2)
    assert np.array_equal(mask_of(pattern, align=[20, 60]), mask_of(again, align=[20, 60]))
    alone = S.top_blocks(x["q"][:1], x["k"][:1, :120], count=3, block=16)
    assert np.array_equal(mask_of(pattern, align=[20, 60])[0, ..., :120],
                          alone.mask(TQ, 120, heads=HQ, key_heads=HK, batch=1, causal=True)[0])
    o = heed.attention(**x, causal=True, align=[20, 60], key_lengths=lengths, pattern=pattern)
    assert np.isfinite(o).all()


def test_all_blocks_are_dense_attention_bit_for_bit():
    x = inputs()
    pattern = S.top_blocks(x["q"], x["k"], count=10, block=16)
    dense = heed.attention(**x, causal=True, invariant=True)  # lists of blocks are not computed with AMX
    assert np.array_equal(heed.attention(**x, causal=True, pattern=pattern), dense)


def test_a_row_at_a_time_chooses_as_all_at_once():
    x = inputs()
    whole = S.top_blocks(x["q"], x["k"], count=3, block=16)
    step = S.top_blocks(x["q"][:, -1:], x["k"], count=3, block=16)
    assert np.array_equal(step.mask(1, TK, heads=HQ, key_heads=HK, batch=B)[:, :, 0],
                          whole.mask(TQ, TK, heads=HQ, key_heads=HK, batch=B)[:, :, -1])


@pytest.mark.parametrize("package", [heed, heed.torch])
def test_caches_choose_by_their_statistics(package):
    x = {key: torch.tensor(value) if package is heed.torch else value for key, value in inputs().items()}
    cache = package.KVCache(B, HK, D, 24, sketch="int8")
    cache.append(x["k"][:, :-3], x["v"][:, :-3])
    cache.append(x["k"][:, -3:], x["v"][:, -3:])
    q = x["q"][:, -3:]
    for select, options in ((S.top_blocks, {"count": 2}), (S.top_blocks, {"count": 2, "score": "box", "share": "head"}),
                            (S.cumulative, {"mass": 0.6})):
        chosen, plain = select(q, cache, **options), select(q, x["k"], **options)
        where = dict(heads=HQ, key_heads=HK, batch=B)
        assert np.array_equal(chosen.mask(3, TK, **where), plain.mask(3, TK, **where))
        expected = package.attention(q, x["k"], x["v"], causal=True, pattern=plain)
        np.testing.assert_allclose(np.asarray(cache.attend(q, pattern=chosen)), np.asarray(expected), atol=3e-6)
    without = package.KVCache(B, HK, D, 24)
    without.append(x["k"], x["v"])
    with pytest.raises(heed.InvalidArgument,
                       match="top_blocks: k has no sketch, expected a cache that was made with one"):
        S.top_blocks(q, without, count=2)
    with pytest.raises(heed.InvalidArgument, match="top_blocks: block is 16, expected a multiple of the 64"):
        S.top_blocks(q, cache, count=2, block=16)
    with pytest.raises(heed.InvalidArgument, match="top_blocks: align is given, expected none: the cache knows it"):
        S.top_blocks(q, cache, count=2, align=[0, 0])


@pytest.mark.parametrize("change, message", [
    ({"count": 0}, "top_blocks: count is 0, expected 1 or more"),
    ({"count": 2.0}, "top_blocks: count is 2.0, expected an int"),
    ({"block": 0}, "top_blocks: block is 0, expected 1 or more"),
    ({"sinks": -1}, "top_blocks: sinks is -1, expected 0 or more"),
    ({"local": -1}, "top_blocks: local is -1, expected 0 or more"),
    ({"score": "max"}, "top_blocks: score is 'max', expected"),
    ({"share": "all"}, "top_blocks: share is 'all', expected"),
    ({"causal": 1}, "top_blocks: causal is 1, expected"),
    ({"align": "left"}, "top_blocks: align is 'left', expected"),
    ({"align": [1, 2, 3]}, "top_blocks: align has shape [3], expected [2]"),
    ({"key_lengths": [1, 161]}, "top_blocks: key_lengths contains 161, expected 0 to 160"),
    ({"key_starts": [-1, 0]}, "top_blocks: key_starts contains -1, expected 0 to 160"),
    ({"threads": 0}, "top_blocks: threads is 0, expected"),
    ({"k": np.zeros((B, TK, 3, D), np.float32)}, "top_blocks: q has 4 heads, expected a multiple of the 3 heads of k"),
    ({"k": np.zeros((B, TK, HK, 8), np.float32)}, "top_blocks: k has shape [2,160,2,8], expected [2,160,2,16]"),
    ({"k": np.zeros((B, TK, HK, D))}, "top_blocks: k has dtype f64, expected f32 as q"),
    ({"q": None}, "top_blocks: q is None"),
])
def test_bad_arguments_are_named(change, message):
    arguments = {**{key: value for key, value in inputs().items() if key != "v"}, "count": 2, **change}
    with pytest.raises(heed.InvalidArgument) as error:
        S.top_blocks(arguments.pop("q"), arguments.pop("k"), **arguments)
    assert str(error.value).startswith(message)


def test_bad_arguments_of_the_others_are_named():
    x = inputs()
    q, k = x["q"], x["k"]
    for mass in (0, -1.0, 1.5, float("nan")):
        with pytest.raises(heed.InvalidArgument, match="cumulative: mass is"):
            S.cumulative(q, k, mass=mass)
    with pytest.raises(heed.InvalidArgument, match="vertical_slash: last is 0, expected 1 or more"):
        S.vertical_slash(q, k, last=0)
    with pytest.raises(heed.InvalidArgument,
                       match=r"indexer: k_index has shape \[2,160,2,16\], expected \[B, Tk, Di\]"):
        S.indexer(q, k, np.ones((B, TQ, HQ), np.float32))
    with pytest.raises(TypeError, match="mask"):
        S.top_blocks(q, k, count=2, mask=None)
