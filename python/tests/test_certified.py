# heed.certified_attention, and attend(epsilon=...) of caches: bounds against float64, and errors.
import numpy as np
import pytest
import torch

import heed
import heed.torch


def topics(rng, tokens, heads=2, dim=32, count=8):
    """Keys in runs near one of `count` centres, values, and queries near one of them."""
    centres = rng.standard_normal((count, dim))
    of = np.arange(tokens) // 128 % count
    k = 2 * centres[of][None, :, None] + 0.3 * rng.standard_normal((1, tokens, heads, dim))
    v = rng.standard_normal((1, tokens, heads, dim))
    q = centres[rng.integers(0, count, (1, 1, 2 * heads))] + 0.1 * rng.standard_normal((1, 1, 2 * heads, dim))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def dense64(q, k, v):
    """Attention in float64, [B, T, H, Dv], and its weights."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", p, v), p


def new_cache(k, v, **options):
    cache = heed.KVCache(1, k.shape[2], k.shape[3], sketch="int8", **options)
    cache.append(k[:, :-1], v[:, :-1])
    cache.append(k[:, -1:], v[:, -1:])
    return cache


def test_boxes_are_a_level_too(rng):
    k = np.repeat(4 * rng.standard_normal((16, 1, 8)), 128, 0)[None].astype(np.float32)   # runs of equal keys
    v = rng.standard_normal(k.shape, dtype=np.float32)
    q = k[:, 700:701]
    cache = new_cache(k, v)
    for o, bound in (cache.attend(q, epsilon=0.05, level="box", return_bound=True),
                     heed.certified_attention(q, k, v, epsilon=0.05, level="box")):
        assert (0 < bound).all() and (bound <= 0.05).all()
        assert np.abs(o - cache.attend(q)).max() <= 2 * bound.max() * np.abs(v).max() + 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_skipping_leaves_values_out_by_row_and_head(rng, causal):
    q, k, v = topics(rng, 2000)
    q = np.repeat(q, 70, 1)
    o, bound, lse = heed.certified_attention(q, k, v, epsilon=0.05, level="skip", causal=causal, return_lse=True)
    assert (bound > 0).any() and (bound <= 0.05).all()
    chosen = heed.select.certified(q, k, epsilon=0.05, level="skip", causal=causal)
    kept = chosen.mask(70, 2000, heads=4, key_heads=2, causal=causal)
    assert kept.mean() < 0.7 and (kept[:, 0] != kept[:, 1]).any()
    whole, whole_lse = heed.attention(q, k, v, causal=causal, return_lse=True)
    assert (1 - np.exp(lse.astype(np.float64) - whole_lse) <= bound + 1e-5).all()
    error = np.abs(o - whole).max(-1).transpose(0, 2, 1)
    assert (error <= 2 * bound * np.abs(v).max() + 1e-5).all()


def test_skipping_needs_no_sketch(rng):
    q, k, v = topics(rng, 2000)
    cache = heed.KVCache(1, 2, 32)
    cache.append(k[:, :-1], v[:, :-1])
    cache.append(k[:, -1:], v[:, -1:])
    o, bound = cache.attend(q, epsilon=0.05, level="skip", return_bound=True)
    expected = heed.certified_attention(q, k, v, epsilon=0.05, level="skip", causal=True)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(bound, expected[1])
    chosen = heed.select.certified(q, cache, epsilon=0.05, level="skip")
    np.testing.assert_allclose(cache.attend(q, pattern=chosen), expected[0], atol=2e-6)
    np.testing.assert_array_equal(cache.attend(q, epsilon=0, level="skip"), cache.attend(q))
    tensors = heed.torch.KVCache(1, 2, 32)
    q, k, v = map(torch.from_numpy, (q, k, v))
    tensors.append(k[:, :-1], v[:, :-1])
    tensors.append(k[:, -1:], v[:, -1:])
    np.testing.assert_array_equal(tensors.attend(q, epsilon=0.05, level="skip").numpy(), expected[0])
    quantized = heed.KVCache(1, 2, 32, quantize="int8")
    quantized.append(k.numpy(), v.numpy())
    with pytest.raises(heed.InvalidArgument,
                       match="attend: cache keeps int8 rows, expected rows of f32, bf16 or f16 at level skip"):
        quantized.attend(q.numpy(), epsilon=0.05, level="skip")


def test_explain():
    shapes = {"q": (1, 4096, 4, 64), "k": (1, 4096, 2, 64), "v": (1, 4096, 2, 64)}
    dense = heed.explain("attention", **shapes, causal=True)
    skip = heed.explain("certified_attention", **shapes, causal=True, level="skip", epsilon=0.01)
    sketch = heed.explain("certified_attention", **shapes, causal=True)
    assert skip["kernel"].startswith("skipping_") and "values of tiles" in skip["why"]
    assert skip["flops"] == sketch["flops"] == dense["flops"]
    assert "a sketch of the keys" in sketch["why"] and sketch["workspace_bytes"] > dense["workspace_bytes"]
    assert heed.explain("certified_attention", **shapes, causal=True, epsilon=0)["kernel"] == dense["kernel"]
    row = heed.explain("certified_attention", q=(1, 1, 4, 64), k=shapes["k"], v=shapes["v"], level="skip", dtype="bf16")
    assert row["kernel"].startswith("skipping_decode_")
    window = heed.explain("certified_attention", **shapes, causal=True, level="skip", epsilon=0.01, window=(255, 0))
    assert window["visited_pairs"] < skip["visited_pairs"] / 4
    with pytest.raises(heed.InvalidArgument,
                       match="certified_attention: dropout is 0.1, expected 0: it drops pairs"):
        heed.explain("certified_attention", **shapes, dropout=0.1)


def some_options(rng, tokens):
    """Options of attention that leave something to leave out of one row of 4 heads at the end of `tokens`."""
    hidden = rng.random(tokens) < 0.8
    return {"window": {"window": (1100, 0), "sink_tokens": 3}, "chunk": {"chunk": 1000},
            "key_starts": {"key_starts": [37]}, "segments": {"segments": ([[1]], [[0] * 300 + [1] * (tokens - 300)])},
            "mask": {"mask": hidden[None, None, None]},
            "pattern": {"pattern": heed.patterns.streaming(64, 1200)}, "sinks": {"sinks": [0.0, -3.0, 4.0, 9.0]},
            "softcap": {"softcap": 20.0}, "alibi": {"alibi": [0.5, 0.01, 0.0, -0.001]},
            "relative_bias": {"relative_bias": rng.standard_normal((4, 300)).astype(np.float32)},
            "bias": {"bias": np.where(hidden, rng.standard_normal((4, 1, tokens)), -np.inf).astype(np.float32)}}


@pytest.mark.parametrize("name", list(some_options(np.random.default_rng(0), 8)))
def test_options_of_attention(rng, name):
    q, k, v = topics(rng, 1500)
    options = some_options(rng, 1500)[name]
    whole, cache = heed.attention(q, k, v, causal=True, **options), new_cache(k, v)
    for level in ("sketch", "box", "skip"):
        given = {"epsilon": 0.05, "level": level, "return_lse": True, **options}
        o, bound, lse = heed.certified_attention(q, k, v, causal=True, **given)
        assert (bound <= 0.05).all() and ((bound > 0).any() or level == "box")
        assert (np.abs(o - whole).max(-1).transpose(0, 2, 1) <= 2 * bound * np.abs(v).max() + 1e-5).all()
        for got, expected in zip(cache.attend(q, return_bound=True, **given), (o, bound, lse)):
            np.testing.assert_allclose(got, expected, rtol=2.5e-7, atol=2e-6)  # an lse of 16 is a multiple of 1.9e-6


def test_left_padding_by_a_mask_or_by_starts_is_the_same_certificate(rng):
    q, k, v = topics(rng, 1024)
    padded = [np.concatenate([np.full_like(x[:, :128], np.nan), x], 1) for x in (k, v)]
    expected = heed.certified_attention(q, k, v, epsilon=0.05, level="skip", causal=True)
    for options in ({"key_starts": [128]}, {"mask": (np.arange(1152) >= 128)[None, None, None]}):
        for got, wanted in zip(heed.certified_attention(q, *padded, epsilon=0.05, level="skip", causal=True, **options),
                               expected):
            np.testing.assert_allclose(got, wanted, rtol=2e-5 if "mask" in options else 0)


@pytest.mark.parametrize("level", ["sketch", "skip"])
def test_rows_may_stand_anywhere(rng, level):
    q, k, v = topics(rng, 700)
    q = np.repeat(q, 800, 1)                                    # more rows than keys: the first rows precede key 0
    for options in ({"window": (-1, 500)}, {"causal": True, "align": np.array([1 << 33])},
                    {"causal": True, "prefix": [600]}):
        o, bound = heed.certified_attention(q, k, v, epsilon=0.1, level=level, **options)
        whole = heed.attention(q, k, v, **options)
        assert ((bound <= 0.1).all()
                and (np.abs(o - whole).max(-1).transpose(0, 2, 1) <= 2 * bound * np.abs(v).max() + 1e-5).all())


@pytest.mark.parametrize("level", ["sketch", "skip"])
def test_packed_sequences(rng, level):
    q, k, v = (x[0] for x in topics(rng, 1500))
    q, options = np.repeat(q, 3, 0), {"epsilon": 0.05, "level": level, "sinks": [0.0] * 4, "return_lse": True}
    packed = heed.certified_attention(q, k, v, cu_seqlens_q=[0, 2, 3], cu_seqlens_k=[0, 900, 1500], **options)
    assert (packed[1].shape, packed[2].shape) == ((4, 3), (4, 3)) and (packed[1] > 0).any()
    for rows, keys in ((slice(0, 2), slice(0, 900)), (slice(2, 3), slice(900, 1500))):
        o, bound, lse = heed.certified_attention(q[None, rows], k[None, keys], v[None, keys], **options)
        np.testing.assert_array_equal(packed[0][rows], o[0])
        np.testing.assert_array_equal(packed[1][:, rows], bound[0])
        np.testing.assert_array_equal(packed[2][:, rows], lse[0])


@pytest.mark.parametrize("epsilon", [0.001, 0.02, 0.3])
def test_a_cache_leaves_out_at_most_what_it_says(rng, epsilon):
    q, k, v = topics(rng, 4096)
    cache = new_cache(k, v)
    o, bound, lse = cache.attend(q, epsilon=epsilon, return_bound=True, return_lse=True)
    assert (o.shape, bound.shape, lse.shape, bound.dtype) == ((1, 1, 4, 32), (1, 4, 1), (1, 4, 1), np.float32)
    assert (bound > 0).all() and (bound <= epsilon).all()
    whole, whole_lse = cache.attend(q, return_lse=True)
    mass = 1 - np.exp(lse.astype(np.float64) - whole_lse)
    assert (mass <= bound + 1e-5).all()
    error = np.abs(o - dense64(q, k, v)[0]).max(-1)
    assert (error.transpose(0, 2, 1) <= 2 * bound * np.abs(v).max() + 1e-5).all()
    np.testing.assert_array_equal(cache.attend(q, epsilon=epsilon), o)
    for got, expected in zip(cache.attend(q, epsilon=epsilon, return_lse=True), (o, lse)):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("causal", [{}, {"causal": True}, {"causal": False}])
def test_rows_of_a_cache_are_causal_by_default(rng, causal):
    _, k, v = topics(rng, 300)
    cache = new_cache(k[:, :260], v[:, :260])
    cache.append(k[:, 260:], v[:, 260:])
    q = rng.standard_normal((1, 40, 4, 32), np.float32)
    expected = cache.attend(q, causal=causal.get("causal", True))
    np.testing.assert_array_equal(cache.attend(q, epsilon=0, **causal), expected)


def test_epsilon_0_and_none_are_dense_attention(rng):
    q, k, v = topics(rng, 1000)
    cache = new_cache(k, v)
    dense = cache.attend(q)
    o, bound = cache.attend(q, epsilon=0, return_bound=True)
    np.testing.assert_array_equal(o, dense)
    assert (bound == 0).all()
    np.testing.assert_array_equal(cache.attend(q, epsilon=None, level="auto", return_bound=False), dense)
    o, bound, lse = heed.certified_attention(q, k, v, epsilon=0.0, causal=True, return_lse=True)
    np.testing.assert_array_equal(o, heed.attention(q, k, v, causal=True))
    assert (bound == 0).all()


def test_given_keys(rng):
    q, k, v = topics(rng, 2000)
    q = np.repeat(q, 70, 1)
    for level in ("auto", "sketch"):
        o, bound = heed.certified_attention(q, k, v, epsilon=0.05, level=level, causal=True, threads=1)
        assert bound.shape == (1, 4, 70) and (bound <= 0.05).all() and (bound > 0).any()
        error = np.abs(o - heed.attention(q, k, v, causal=True)).max(-1).transpose(0, 2, 1)
        assert (error <= 2 * bound * np.abs(v).max() + 1e-5).all()


def test_forks_trims_and_files_keep_the_sketch(rng, tmp_path):
    q, k, v = topics(rng, 1500)
    cache = new_cache(k, v)
    assert cache.sketch == "int8" and "sketch='int8'" in repr(cache) and heed.KVCache(1, 1, 4).sketch is None
    options = {"epsilon": 0.1, "level": "sketch", "return_bound": True}
    expected = cache.attend(q, **options)
    fork = cache.fork()
    fork.trim([1200])
    fork.append(k[:, 1200:-1], v[:, 1200:-1])
    fork.append(k[:, -1:], v[:, -1:])
    cache.save(tmp_path / "x.safetensors")
    loaded = heed.load_cache(tmp_path / "x.safetensors")
    assert loaded.sketch == "int8" and loaded.nbytes == cache.nbytes > new_bytes(k, v)
    for other in (fork, loaded, heed.KVCache.share(cache, 1)):
        for got, wanted in zip(other.attend(q, **options), expected):
            np.testing.assert_array_equal(got, wanted)


def new_bytes(k, v):
    cache = heed.KVCache(1, k.shape[2], k.shape[3])
    cache.append(k, v)
    return cache.nbytes


def test_a_nan_key_is_never_left_out(rng):
    q, k, v = topics(rng, 1500)
    k[0, 700, 1, 3] = np.nan
    cache = new_cache(k, v)
    o, bound = cache.attend(q, epsilon=0.1, level="sketch", return_bound=True)
    assert np.isnan(o[0, 0, 2:]).all() and np.isnan(bound[0, 2:]).all()  # the query heads of the key head with the NaN
    assert np.isfinite(o[0, 0, :2]).all() and (bound[0, :2] <= 0.1).all()


def test_tensors(rng):
    q, k, v = topics(rng, 1500)
    arrays = new_cache(k, v)
    expected = arrays.attend(q, epsilon=0.1, return_bound=True, return_lse=True)
    cache = heed.torch.KVCache(1, 2, 32, sketch="int8")
    q, k, v = map(torch.from_numpy, (q, k, v))
    cache.append(k[:, :-1], v[:, :-1])
    cache.append(k[:, -1:], v[:, -1:])
    for got, wanted in zip(cache.attend(q, epsilon=0.1, return_bound=True, return_lse=True), expected):
        np.testing.assert_array_equal(got.numpy(), wanted)
    np.testing.assert_array_equal(cache.attend(q, epsilon=0.1).numpy(), expected[0])
    with pytest.raises(heed.InvalidArgument, match="return_bound is True, expected its default without epsilon"):
        cache.attend(q, return_bound=True)
    for got, wanted in zip(heed.torch.certified_attention(q, k, v, epsilon=0.1, sinks=torch.zeros(4)),
                           heed.certified_attention(q.numpy(), k.numpy(), v.numpy(), epsilon=0.1, sinks=[0.0] * 4)):
        np.testing.assert_array_equal(got.numpy(), wanted)
    with pytest.raises(heed.InvalidArgument,
                       match="certified_attention: k requires a gradient, which this function does not have"):
        heed.torch.certified_attention(q, k.requires_grad_(), v)


def test_what_is_refused(rng):
    q, k, v = topics(rng, 300)
    cache = new_cache(k, v)
    bare = heed.KVCache(1, 2, 32)
    bare.append(k, v)

    def expect(message, function, *arguments, **options):
        with pytest.raises(heed.InvalidArgument, match=message):
            function(*arguments, **options)

    expect("KVCache.attend: cache has no sketch", bare.attend, q, epsilon=0.1)
    for epsilon in (-0.1, 1, 1.5):
        expect("attend: epsilon is ", cache.attend, q, epsilon=epsilon)
        expect("certified_attention: epsilon is ", heed.certified_attention, q, k, v, epsilon=epsilon)
    for epsilon in (float("nan"), "x", [0.1]):
        expect("attend: epsilon is ", cache.attend, q, epsilon=epsilon)
    expect("level is 'ball', expected 'auto', 'sketch', 'box' or 'skip'", cache.attend, q, epsilon=0.1, level="ball")
    expect("level is 'ball', expected 'auto', 'sketch', 'box' or 'skip'", heed.certified_attention, q, k, v,
           level="ball")
    expect("level is 'sketch', expected its default without epsilon", cache.attend, q, level="sketch")
    expect("tree is given, expected none with epsilon: keys of a draft", cache.attend, q, epsilon=0.1, tree=[-1])
    expect("KVCache.attend: align is given, expected none: the cache knows it", cache.attend, q, epsilon=0.1,
           align="top_left")
    expect("certified_attention: dropout is 0.5, expected 0: it drops pairs after the softmax",
           heed.certified_attention, q, k, v, dropout=0.5)
    expect("certified_attention: log_decay is given, expected none at level skip: ", heed.certified_attention, q, k, v,
           causal=True, level="skip", log_decay=np.zeros((1, 300, 4), np.float32))
    expect("q has dtype f64", heed.certified_attention, *(x.astype(np.float64) for x in (q, k, v)))
    expect("sketch is 'x', expected None or 'int8'", heed.KVCache, 1, 1, 4, sketch="x")
    expect("page is 16, expected a multiple of 64", heed.KVCache, 1, 1, 4, sketch="int8", page=16)
    with pytest.raises(TypeError, match="missing required argument: 'q'"):
        cache.attend(epsilon=0.1)
    with pytest.raises(TypeError, match="epsilon"):
        heed.RingKVCache(1, 1, 4, window=3).attend(np.zeros((1, 0, 1, 4), np.float32), epsilon=0.1)


class TestSelected:
    """heed.select.certified: the blocks that certified attention attends to, as a pattern."""

    @pytest.mark.parametrize("level", ["sketch", "box", "auto", "skip"])
    @pytest.mark.parametrize("causal", [False, True])
    def test_attention_with_the_pattern_is_certified_attention(self, rng, level, causal):
        q, k, v = topics(rng, 1100)
        q = np.concatenate([q] * 70, 1) + 0.05 * rng.standard_normal((1, 70, 4, 32), np.float32)
        options = {"causal": causal, "scale": 0.3, "key_lengths": [1050]}
        p = heed.select.certified(q, k, epsilon=0.1, level=level, **options)
        o, bound = heed.certified_attention(q, k, v, epsilon=0.1, level=level, **options)
        kept = p.mask(70, 1100, heads=4, key_heads=2, causal=causal)
        assert kept.mean() < 0.9 or level == "box"
        np.testing.assert_allclose(heed.attention(q, k, v, pattern=p, **options), o, atol=2e-6)
        dropped = 1 - (dense64(q * np.float32(0.3 * 32**0.5), k[:, :1050], v[:, :1050])[1] * kept[..., :1050]).sum(-1)
        if not causal:
            assert (dropped <= bound + 1e-6).all()

    def test_of_a_cache_it_has_the_bits_of_attend(self, rng):
        q, k, v = topics(rng, 4096)
        cache = new_cache(k, v)
        p = heed.select.certified(q, cache, epsilon=0.1)
        assert 0 < p.mask(1, 4096, heads=4, key_heads=2, causal=True).mean() < 0.5
        np.testing.assert_array_equal(cache.attend(q, pattern=p), cache.attend(q, epsilon=0.1, level="sketch"))
        of_keys = heed.select.certified(q, k, epsilon=0.1).mask(1, 4096, heads=4, key_heads=2, causal=True)
        np.testing.assert_array_equal(of_keys, p.mask(1, 4096, heads=4, key_heads=2, causal=True))

    def test_lengths_and_positions(self, rng):
        q, k, v = topics(rng, 640)
        q, k, v = (np.concatenate([x, x[:, ::-1]]) for x in (np.concatenate([q] * 65, 1), k, v))
        for options in ({"align": "top_left"}, {"align": np.array([575, 500])},
                        {"query_lengths": [64, 3], "key_lengths": [640, 100]}):
            p = heed.select.certified(q, k, epsilon=0.2, **options)
            o, _ = heed.certified_attention(q, k, v, epsilon=0.2, level="sketch", causal=True, **options)
            np.testing.assert_allclose(heed.attention(q, k, v, causal=True, pattern=p, **options), o, atol=4e-6)

    def test_tensors_and_edges(self, rng):
        q, k, v = map(torch.from_numpy, topics(rng, 512))
        p = heed.select.certified(q.requires_grad_(), k.requires_grad_(), epsilon=0.1, threads=1)
        expected = heed.certified_attention(q.detach(), k.detach(), v, epsilon=0.1, level="sketch", causal=True)[0]
        o = heed.torch.attention(q, k, v, causal=True, pattern=p)
        np.testing.assert_allclose(o.detach(), expected, atol=2e-6)
        o.sum().backward()
        everything = heed.select.certified(q, k, epsilon=0).mask(1, 512, heads=4, key_heads=2, causal=True)
        assert everything.all() and q.grad.abs().sum() > 0
        assert heed.select.certified(q[:, :0], k).mask(0, 512, heads=4, key_heads=2).shape == (1, 4, 0, 512)
        assert not heed.select.certified(q[:0], k[:0]).mask(1, 512, heads=4, key_heads=2, batch=0).size

    def test_errors(self, rng):
        q, k, v = topics(rng, 128)
        cache, plain = new_cache(k, v), heed.KVCache(1, 2, 32)
        plain.append(k, v)
        for call, message in (
                (lambda: heed.select.certified(q, k, epsilon=1),
                 "certified: epsilon is 1, expected a number from 0 on and below 1"),
                (lambda: heed.select.certified(q, k, level="all"), "certified: level is 'all', expected"),
                (lambda: heed.select.certified(q[0], k), r"certified: q has shape \[1,4,32\], expected \[B,Tq,Hq,D\]"),
                (lambda: heed.select.certified(q, k[0]),
                 r"certified: k has shape \[128,2,32\], expected \[B,Tk,Hkv,D\]"),
                (lambda: heed.select.certified(q, k[..., :16]), "certified: k has shape"),
                (lambda: heed.select.certified(q.astype(np.float64), k.astype(np.float64)),
                 "certified: q has dtype f64"),
                (lambda: heed.select.certified(q, plain), "certified: k has no sketch"),
                (lambda: heed.select.certified(q, cache, key_lengths=[3]),
                 "certified: key_lengths is given, expected none"),
                (lambda: heed.select.certified(None, k), "certified: q"),
                (lambda: heed.select.certified(q, None), "certified: k"),
                (lambda: heed.select.certified(q, k, align="left"), "certified: align is 'left'"),
                (lambda: heed.select.certified(q, k, threads=0), "certified: threads is 0")):
            with pytest.raises(heed.InvalidArgument, match="^" + message):
                call()
