# heed.KVCache, RingKVCache and LatentKVCache against lists of rows and attention in float64.
import copy
import itertools

import naive
import numpy as np
import pytest
from cache_model import DTYPES, Model, check, grow, new_cache, normal

import heed

KINDS = ["paged", "contiguous", "ring", "latent"]
LATENT_SCALE = {"latent": {"scale": 0.3}}


def options_of(kind):
    return LATENT_SCALE.get(kind, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_then_tokens(rng, kind, dtype):
    cache, model = new_cache(kind, dtype=dtype)
    for tokens in (9, 1, 1, 3, 70, 1):
        grow(rng, cache, model, tokens)
        check(cache, model, normal(rng, 2, tokens, 4, 8, dtype=dtype), **options_of(kind))


@pytest.mark.parametrize(("heads", "query_heads"), [(1, 1), (1, 8), (2, 6), (3, 3), (1, 24)])
def test_grouped_queries(rng, heads, query_heads):
    cache, model = new_cache("paged", heads=heads, value_dim=20, dim=33)
    for tokens in (67, 1, 2):
        grow(rng, cache, model, tokens)
        check(cache, model, normal(rng, 2, tokens, query_heads, 33))


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_appends(rng, kind):
    cache, model = new_cache(kind, batch=3)
    for tokens, lengths in ((5, [5, 0, 2]), (1, [1, 1, 0]), (4, np.array([2, 4, 1], np.int32)), (3, None),
                            (2, [0, 0, 0])):
        grow(rng, cache, model, tokens, lengths)
        # Rows beyond what was appended give 0.
        rows = max(model.appended)
        for given in {0, min(rows, 1), rows}:
            check(cache, model, normal(rng, 3, given, 2, 8), **options_of(kind))
        with pytest.raises(heed.InvalidArgument,
                           match=f"expected at most {rows}, the tokens that a sequence was given"):
            cache.attend(normal(rng, 3, rows + 1, 2, 8), **options_of(kind))


def test_an_empty_cache_gives_nothing(rng):
    cache, model = new_cache("paged")
    assert cache.lengths.tolist() == cache.appended.tolist() == [0, 0] and cache.nbytes == 0
    with pytest.raises(heed.InvalidArgument, match="q has 3 queries, expected at most 0"):
        cache.attend(normal(rng, 2, 3, 4, 8))
    assert cache.attend(normal(rng, 2, 0, 4, 8)).shape == (2, 0, 4, 6)
    cache.append(normal(rng, 2, 0, 2, 8), normal(rng, 2, 0, 2, 6))
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["paged", "contiguous", "latent"])
def test_without_causal_every_new_row_sees_all(rng, kind):
    cache, model = new_cache(kind)
    grow(rng, cache, model, 6)
    check(cache, model, normal(rng, 2, 6, 2, 8), causal=False, **options_of(kind))


@pytest.mark.parametrize("page", [1, 3, 16, 64, None])
def test_pages_change_no_bit(rng, page):
    whole = heed.KVCache(2, 2, 8, 6)
    other = heed.KVCache(2, 2, 8, 6, page=page, capacity=100)
    k, v, q = normal(rng, 2, 90, 2, 8), normal(rng, 2, 90, 2, 6), normal(rng, 2, 90, 4, 8)
    whole.append(k, v, [90, 41])
    for a, b in itertools.pairwise((0, 7, 8, 40, 90)):
        other.append(k[:, a:b], v[:, a:b], [b - a, max(0, min(b, 41) - a)])
    assert other.lengths.tolist() == [90, 41]
    np.testing.assert_array_equal(other.attend(q[:, 40:])[0], whole.attend(q)[0, 40:])
    expected = heed.attention(q[:1], k[:1], v[:1], causal=True, invariant=True)
    np.testing.assert_array_equal(whole.attend(q, invariant=True)[:1], expected)


def test_properties_and_repr():
    cache = heed.KVCache(2, 3, 8, capacity=10, page=4, dtype="f16", quantize="int8")
    assert (cache.batch, cache.heads, cache.dim, cache.value_dim, cache.capacity, cache.page, cache.dtype,
            cache.quantize, cache.shared_prefix) == (2, 3, 8, 8, 10, 4, "f16", "int8", 0)
    assert repr(cache) == ("<heed.KVCache: batch=2, heads=3, dim=8, value_dim=8, capacity=10, page=4, dtype='f16', "
                           "quantize='int8', lengths=[0, 0]>")
    cache = heed.KVCache(1, 1, 4, capacity=9, page=None)
    assert cache.page is None and cache.capacity == 9 and cache.quantize is None
    assert heed.KVCache(1, 1, 4).capacity is None and heed.KVCache(1, 1, 4).page == 64
    ring = heed.RingKVCache(9, 1, 4, window=3, sink_tokens=1)
    assert (ring.window, ring.sink_tokens, ring.value_dim) == (3, 1, 4)
    assert repr(ring).endswith("window=3, sink_tokens=1, dtype='f32', lengths=[0, 0, 0, 0, 0, 0, 0, 0, ...]>")
    latent = heed.LatentKVCache(1, 6, 2, dtype="f64")
    assert (latent.latent, latent.rope, latent.heads, latent.dim, latent.value_dim) == (6, 2, 1, 8, 6)
    assert "LatentKVCache: batch=1, latent=6, rope=2, capacity=None, page=64" in repr(latent)
    for cache in (ring, latent):
        assert isinstance(cache, heed.KVCacheBase) and not isinstance(cache, heed.KVCache)
        with pytest.raises(AttributeError):
            cache.batch = 3


def test_lengths_are_a_copy(rng):
    cache, model = new_cache("paged")
    grow(rng, cache, model, 3)
    lengths = cache.lengths
    lengths[:] = 77
    assert cache.lengths.tolist() == [3, 3] and cache.lengths.dtype == np.int64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda cache: cache.fork(), copy.copy, copy.deepcopy])
def test_forks_diverge(rng, kind, make):
    cache, model = new_cache(kind)
    grow(rng, cache, model, 7, [7, 3])
    other, other_model = make(cache), model.fork()
    assert type(other) is type(cache) and other is not cache and other.nbytes == cache.nbytes
    for tokens in (1, 4, 66):
        grow(rng, cache, model, tokens)
        grow(rng, other, other_model, tokens)
        q = normal(rng, 2, tokens, 2, 8)
        check(cache, model, q, **options_of(kind))
        check(other, other_model, q, **options_of(kind))
    del cache
    check(other, other_model, q, **options_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_trim(rng, kind):
    cache, model = new_cache(kind)
    grow(rng, cache, model, 70 if kind != "ring" else 4)
    grow(rng, cache, model, 4)
    lengths = [n - cut for n, cut in zip(model.lengths, (3, 0), strict=True)]
    cache.trim(lengths)
    model.trim(lengths)
    check(cache, model, normal(rng, 2, 4, 2, 8), **options_of(kind))
    grow(rng, cache, model, 2, [1, 2])
    check(cache, model, normal(rng, 2, 2, 2, 8), **options_of(kind))
    if kind != "ring":
        cache.trim(np.zeros(2, np.int32))
        assert cache.nbytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_reorder_as_beam_search_does(rng, kind):
    cache, model = new_cache(kind, batch=4)
    grow(rng, cache, model, 5, [5, 3, 4, 1])
    for indices in ([2, 2, 0, 0], np.array([1, 0, 3, 2]), (3, 3, 3, 3)):
        cache.reorder(indices)
        model.reorder(list(indices))
        grow(rng, cache, model, 1)
        check(cache, model, normal(rng, 4, 1, 2, 8), **options_of(kind))


@pytest.mark.parametrize("kind", ["paged", "contiguous", "latent"])
def test_share_a_prefix(rng, kind):
    prefix, model = new_cache(kind, batch=1)
    grow(rng, prefix, model, 100)
    shared = type(prefix).share(prefix, 3)
    many = Model(0, model.latent)
    many.tokens, many.appended = [list(model.tokens[0]) for _ in range(3)], [100] * 3
    assert type(shared) is type(prefix) and shared.batch == 3 and shared.shared_prefix == 100
    assert shared.nbytes == prefix.nbytes
    for tokens in (1, 2):
        grow(rng, shared, many, tokens)
        check(shared, many, normal(rng, 3, tokens, 2, 8), **options_of(kind))
    assert prefix.lengths.tolist() == [100] and shared.shared_prefix == 100
    shared.trim([101, 50, 101])
    assert shared.shared_prefix == 50


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(rng, tmp_path, kind, dtype):
    cache, model = new_cache(kind, dtype=dtype)
    grow(rng, cache, model, 80)
    grow(rng, cache, model, 3, [3, 1])
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    loaded = heed.load_cache(str(path))
    assert type(loaded) is type(cache) and repr(loaded) == repr(cache) and loaded.nbytes == cache.nbytes
    q = normal(rng, 2, 3, 2, 8, dtype=dtype)
    np.testing.assert_array_equal(loaded.attend(q, **options_of(kind)), cache.attend(q, **options_of(kind)))
    loaded.save(bytes(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    model = model.fork()
    grow(rng, loaded, model, 2)
    check(loaded, model, normal(rng, 2, 2, 2, 8, dtype=dtype), **options_of(kind))


@pytest.mark.parametrize(("window", "sink_tokens"), [(1, 0), (4, 0), (4, 3), (64, 1), (100, 70)])
def test_a_ring_is_a_window(rng, window, sink_tokens):
    """A ring has the bits of a cache that keeps all tokens, under attention's window."""
    ring = heed.RingKVCache(1, 2, 8, window=window, sink_tokens=sink_tokens)
    whole = heed.KVCache(1, 2, 8)
    options = {"window": (window - 1, 0), "sink_tokens": sink_tokens}
    for tokens in (3, 150, 1, 1, 40, 1, 200, 1):
        k, v, q = normal(rng, 1, tokens, 2, 8), normal(rng, 1, tokens, 2, 8), normal(rng, 1, tokens, 4, 8)
        ring.append(k, v)
        whole.append(k, v)
        np.testing.assert_array_equal(ring.attend(q), whole.attend(q, **options))
        narrower = {"window": (max(window // 2 - 1, 0), 0), "sink_tokens": 0}
        np.testing.assert_array_equal(ring.attend(q, **narrower), whole.attend(q, **narrower))
    np.testing.assert_array_equal(ring.attend(q, window=None), ring.attend(q, **options))
    assert ring.lengths.tolist() == whole.lengths.tolist()
    for _ in range(300):
        ring.append(k[:, :1], v[:, :1])
    assert ring.nbytes < 6 * 64 * 2 * 16 * 4


def test_latent_scale_is_needed(rng):
    cache, model = new_cache("latent", dtype="f64")
    grow(rng, cache, model, 9)
    q = normal(rng, 2, 9, 3, 8, dtype="f64")
    check(cache, model, q, scale=0.125)
    with pytest.raises(TypeError, match=r"LatentKVCache.attend\(\) missing required argument: 'scale'"):
        cache.attend(q)
    with pytest.raises(heed.InvalidArgument, match="LatentKVCache.attend: scale is None, expected a finite number"):
        cache.attend(q, scale=None)


OPTIONS = [
    {"scale": 0.7}, {"window": (6, 0)}, {"window": (3, 0), "sink_tokens": 2}, {"chunk": 5}, {"key_starts": [3, 0]},
    {"prefix": [16, 0]}, {"alibi": [0.5, 0.25, 0.125, 0.0]}, {"softcap": 2.0}, {"sinks": [0.0, 1.0, -1.0, 2.0]},
    {"invariant": True}, {"precision": "high"}, {"threads": 1}, {"causal": False}, {"causal": False, "window": (2, 3)},
    {"mask": np.random.default_rng(1).random((2, 1, 3, 17)) < 0.7},
    {"bias": np.random.default_rng(2).standard_normal((4, 3, 17))},
    {"relative_bias": np.random.default_rng(3).standard_normal((4, 6))},
    {"segments": (np.zeros((2, 3), np.int64), np.arange(34).reshape(2, 17) % 3 - 1)},
    {"align": "bottom_right", "dropout": 0.0, "seed": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
def test_options_are_those_of_attention(rng, options):
    cache = heed.KVCache(2, 2, 8, 6, page=4)
    k, v, q = normal(rng, 2, 17, 2, 8), normal(rng, 2, 17, 2, 6), normal(rng, 2, 3, 4, 8)
    cache.append(k[:, :14], v[:, :14])
    cache.append(k[:, 14:], v[:, 14:])
    causal = {"causal": True, **options}
    o, lse = cache.attend(q, return_lse=True, **options)
    expected, expected_lse = heed.attention(q, k, v, return_lse=True, **causal,
                                            **({} if "invariant" in causal else {"invariant": True}))
    np.testing.assert_allclose(o, expected, rtol=4e-6, atol=4e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=4e-6, atol=4e-6)
    true, true_lse = naive.attention(q, k, v, **causal)
    np.testing.assert_allclose(o, true, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)
    out = np.full((2, 3, 4, 6), np.nan, np.float32)
    assert cache.attend(q=q, out=out, **options) is out
    np.testing.assert_array_equal(out, o)


def test_arrays_of_any_kind_and_strides(rng):
    cache, model = new_cache("paged")
    k, v = normal(rng, 4, 2, 10, 8)[::2].transpose(0, 2, 1, 3), normal(rng, 2, 2, 6, 10).transpose(0, 3, 1, 2)[:, ::-1]
    assert not v.flags.c_contiguous and v.strides[-1] != 4
    cache.append(k, v)
    model.append(k, v)
    check(cache, model, normal(rng, 2, 4, 10, 8).transpose(0, 2, 1, 3)[:, :10:2])
    k, v = normal(rng, 2, 1, 2, 8), normal(rng, 2, 1, 2, 6)
    cache.append(memoryview(k), memoryview(v))
    model.append(k, v)
    q = normal(rng, 2, 1, 2, 8)
    np.testing.assert_array_equal(cache.attend(memoryview(q)), check(cache, model, q))


@pytest.mark.parametrize("heads_first", [False, True])
def test_import_pages(rng, heads_first):
    k_pool, v_pool = normal(rng, 9, 4, 2, 8), normal(rng, 9, 4, 2, 6)
    indptr, indices, last = [0, 3, 3, 5], [7, 0, 2, 1, 7], np.array([2, 0, 4], np.int32)
    k_pool[3:7], v_pool[3:7] = np.nan, np.nan  # no table entry refers to these
    pools = (k_pool, v_pool)
    if heads_first:
        pools = tuple(pool.swapaxes(1, 2).copy() for pool in pools)
    cache = heed.KVCache.import_pages(*pools, indptr, indices, last, heads_first=heads_first, page=16, capacity=40)
    assert (cache.batch, cache.heads, cache.dim, cache.value_dim, cache.page, cache.capacity) == (3, 2, 8, 6, 16, 40)
    model = Model(3)
    model.tokens = [[(k_pool[p, t], v_pool[p, t]) for p in pages for t in range(4)]
                    for pages in ([7, 0, 2], [], [1, 7])]
    model.tokens[0] = model.tokens[0][:10]
    model.appended = model.lengths
    check(cache, model, normal(rng, 3, 10, 4, 8))
    grow(rng, cache, model, 2)
    check(cache, model, normal(rng, 3, 2, 4, 8))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_int8_rows(rng, dtype):
    """The rows that are kept are x / scale rounded, and what that changes is bounded."""
    cache, exact = new_cache("paged", dim=32, value_dim=16, dtype=dtype, quantize="int8")
    model = Model(2)
    for tokens in (40, 1, 3):
        k, v = grow(rng, cache, exact, tokens)
        kept = []
        for x in (k, v):
            x = np.asarray(x, np.float32)
            scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
            kept.append(np.rint(x / scale).astype(np.float64) * scale)
        model.append(*kept)
        q = normal(rng, 2, tokens, 4, 32, dtype=dtype)
        o = check(cache, model, q)
        logit, output = cache.quantization_bound(q)
        assert 0 < logit < 1 and np.abs(np.asarray(o, float) - exact.attend(q)[0]).max() < output < 3
    whole = heed.KVCache(2, 2, 32, 16, dtype=dtype)
    whole.append(normal(rng, 2, 44, 2, 32, dtype=dtype), normal(rng, 2, 44, 2, 16, dtype=dtype))
    assert cache.nbytes < whole.nbytes
    fork = cache.fork()
    np.testing.assert_array_equal(fork.attend(q), o)
    with pytest.raises(heed.InvalidArgument, match="^KVCache.quantization_bound: cache is not quantised"):
        whole.quantization_bound(q)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("tree", [[-1, 0, 1, 0, 3, -1, 5], [-1] * 7, [-1, 0, 1, 2, 3, 4, 5]])
def test_a_row_of_a_draft_has_the_bits_of_its_branch(rng, tree, quantize):
    cache = heed.KVCache(1, 2, 8, 6, quantize=quantize)
    cache.append(normal(rng, 1, 70, 2, 8), normal(rng, 1, 70, 2, 6))
    k, v, q = normal(rng, 1, 7, 2, 8), normal(rng, 1, 7, 2, 6), normal(rng, 1, 7, 4, 8)
    options = {"alibi": [0.5, 0.25, 0.125, 0.0], "window": (50, 0)}
    draft = cache.fork()
    draft.append(k, v)
    o, lse = draft.attend(q, tree=tree, return_lse=True, **options)
    np.testing.assert_array_equal(draft.attend(q, tree=np.array(tree, np.int32), **options), o)
    for i in range(7):
        branch, j = [i], tree[i]
        while j != -1:
            branch, j = [j, *branch], tree[j]
        alone = cache.fork()
        for j in branch:
            alone.append(k[:, j : j + 1], v[:, j : j + 1])
        one, one_lse = alone.attend(q[:, i : i + 1], return_lse=True, **options)
        np.testing.assert_array_equal(o[:, i], one[:, 0])
        np.testing.assert_array_equal(lse[:, :, i], one_lse[:, :, 0])
    for wrong in ([0] * 7, [-1, 1, 0, 0, 0, 0, 0], [-2] * 7, [-1] * 6):
        with pytest.raises(heed.InvalidArgument, match="^KVCache.attend: tree"):
            draft.attend(q, tree=wrong)
    assert heed.explain("attend", cache=draft, q=q,
                        tree=tree)["flops"] <= heed.explain("attend", cache=draft, q=q)["flops"]


def test_explain(rng):
    cache, model = new_cache("paged")
    grow(rng, cache, model, 50)
    grow(rng, cache, model, 1)
    q = normal(rng, 2, 1, 4, 8)
    report = heed.explain("attend", cache=cache, q=q, threads=1)
    assert report == heed.explain("attend", cache=cache, q=(2, 1, 4, 8), threads=1, causal=True)
    assert report["flops"] == 2 * (8 + 6) * 2 * 4 * 51 and report["copies"] == [] and report["kernel"]
    assert report["bytes"] == 4 * (2 * 51 * 2 * (8 + 6) + 2 * 4 * (8 + 6))
    short = heed.explain("attend", cache=cache, q=q, window=(3, 0), out=(2, 1, 4, 6), return_lse=True, alibi=[0.1] * 4)
    assert short["flops"] == 2 * (8 + 6) * 2 * 4 * 4
    wide, _ = new_cache("paged", dtype="f64")
    assert heed.explain("attend", cache=wide, q=(2, 0, 4, 8))["flops"] == 0
    with pytest.raises(heed.InvalidArgument, match=r"^KVCache.attend: q has shape \[2,1,8\], expected \[2,T,H,8\]"):
        heed.explain("attend", cache=cache, q=(2, 1, 8))
    with pytest.raises(heed.InvalidArgument, match="^explain: cache is 3, expected a cache"):
        heed.explain("attend", cache=3, q=q)
    with pytest.raises(TypeError, match="missing required argument: 'cache'"):
        heed.explain("attend", q=q)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_random_operations(kind, seed, tmp_path):
    rng = np.random.default_rng(seed)
    options = {"page": int(rng.integers(1, 9))} if kind in ("paged", "latent") else {}
    if kind == "ring":
        options = {"window": int(rng.integers(1, 12)), "sink_tokens": int(rng.integers(0, 4))}
    pairs = [new_cache(kind, batch=3, dtype="f64", **options)]
    for _ in range(60):
        at = int(rng.integers(len(pairs)))
        cache, model = pairs[at]
        action = rng.choice(["append", "append", "append", "trim", "reorder", "fork", "save", "drop", "refused"])
        if action == "append" and max(model.lengths) < 180:
            tokens = int(rng.integers(0, 9))
            grow(rng, cache, model, tokens, rng.integers(0, tokens + 1, 3) if rng.random() < 0.6 else None)
        elif action == "trim":
            lengths = [int(rng.integers(n + 1)) for n in model.lengths]
            if kind == "ring":  # a ring always allows to trim nothing, or to where the last append began
                lengths = [n - a * int(rng.integers(2)) for n, a in zip(model.lengths, model.appended, strict=True)]
            cache.trim(lengths)
            model.trim(lengths)
        elif action == "reorder":
            indices = rng.integers(0, 3, 3)
            cache.reorder(indices)
            model.reorder(indices)
        elif action == "fork" and len(pairs) < 4:
            pairs.append((cache.fork(), model.fork()))
        elif action == "save":
            cache.save(tmp_path / "cache")
            pairs[at] = heed.load_cache(tmp_path / "cache"), model
        elif action == "drop" and len(pairs) > 1:
            del pairs[at]
            continue
        elif action == "refused":
            with pytest.raises(heed.InvalidArgument):
                cache.trim([n + 1 for n in model.lengths])
            with pytest.raises(heed.InvalidArgument):
                grow(rng, cache, Model(3), 2, [1, 3, 0])
        cache, model = pairs[at]
        rows = max(model.appended)
        check(cache, model, normal(rng, 3, rows, 2, 8, dtype="f64"), **options_of(kind))
