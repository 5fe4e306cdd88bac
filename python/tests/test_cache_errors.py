# heed's caches: an error names the wrong argument, and the cache is unchanged.
import os
import pickle

import numpy as np
import pytest
from cache_model import new_cache

import heed

K, V, Q = np.ones((2, 3, 2, 8), np.float32), np.ones((2, 3, 2, 6), np.float32), np.ones((2, 3, 4, 8), np.float32)
ROWS = np.ones((2, 3, 8), np.float32)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: heed.KVCache(0, 2, 8), "KVCache: batch is 0, expected an int of at least 1"),
    (lambda: heed.KVCache(1, 2.0, 8), "KVCache: heads is 2.0, expected an int of at least 1"),
    (lambda: heed.KVCache(1, 2, True), "KVCache: dim is True, expected an int"),
    (lambda: heed.KVCache(1, 2, 8, 0), "KVCache: value_dim is 0, expected an int of at least 1"),
    (lambda: heed.KVCache(1, 2, 8, capacity=0), "KVCache: capacity is 0, expected an int of at least 1"),
    (lambda: heed.KVCache(1, 2, 8, page=0), "KVCache: page is 0, expected an int of at least 1"),
    (lambda: heed.KVCache(1, 2, 8, page=None), "KVCache: page is None without a capacity, expected both"),
    (lambda: heed.KVCache(1, 2, 8, dtype="float32"),
     "KVCache: dtype is 'float32', expected 'f64', 'f32', 'bf16' or 'f16'"),
    (lambda: heed.KVCache(1, 2, 8, dtype="i32"), "KVCache: dtype is 'i32', expected 'f64'"),
    (lambda: heed.KVCache(1, 2, 8, dtype=np.float32), "KVCache: dtype is of type type, expected 'f64'"),
    (lambda: heed.KVCache(1, 2, 8, quantize="int4"), "KVCache: quantize is 'int4', expected None or 'int8'"),
    (lambda: heed.KVCache(1, 2, 8, quantize=8), "KVCache: quantize is 8, expected None or 'int8'"),
    (lambda: heed.KVCache(1, 2, 8, dtype="f64", quantize="int8"), "KVCache: dtype is f64, expected f32, bf16 or f16"),
    (lambda: heed.KVCache(1, 2, 2**60), "KVCache: a row of 1152921504606846976 x 4 bytes is too large"),
    (lambda: heed.KVCache(1, 2**70, 2), "KVCache: heads is 1180591620717411303424, expected an int"),
    (lambda: heed.RingKVCache(1, 2, 8, window=0), "RingKVCache: window is 0, expected an int of at least 1"),
    (lambda: heed.RingKVCache(1, 2, 8, window=4, sink_tokens=-1), "RingKVCache: sink_tokens is -1, expected an int of"),
    (lambda: heed.LatentKVCache(1, 0, 4), "LatentKVCache: latent is 0, expected an int of at least 1"),
    (lambda: heed.LatentKVCache(1, 4, -1), "LatentKVCache: rope is -1, expected an int of at least 0"),
    (lambda: heed.LatentKVCache(1, 4, 1, page=None), "LatentKVCache: page is None without a capacity"),
])
def test_wrong_options(make, message):
    with pytest.raises(heed.InvalidArgument, match=f"^{message}"):
        make()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: heed.KVCache(1, 2), r"KVCache\(\) missing required argument: 'dim'"),
    (lambda: heed.KVCache(), r"KVCache\(\) missing required argument: 'batch'"),
    (lambda: heed.KVCache(1, 2, 8, 8, 8), r"KVCache\(\) takes 4 positional arguments but 5 were given"),
    (lambda: heed.KVCache(1, 2, 8, pages=3), r"KVCache\(\) got an unexpected keyword argument 'pages'"),
    (lambda: heed.KVCache(1, 2, 8, dim=8), r"KVCache\(\) got multiple values for argument 'dim'"),
    (lambda: heed.RingKVCache(1, 2, 8), r"RingKVCache\(\) missing required argument: 'window'"),
    (lambda: heed.LatentKVCache(1, 2), r"LatentKVCache\(\) missing required argument: 'rope'"),
    (lambda: heed.KVCacheBase(), "no constructor"),
])
def test_wrong_constructions_are_type_errors(make, message):
    with pytest.raises(TypeError, match=message):
        make()


CALLS = [
    ("append", (K.astype(np.float64), V), {}, "append: k has dtype f64, expected f32"),
    ("append", (K, V.astype(np.int32)), {}, "append: v has dtype i32, expected "),
    ("append", (K[:1], V), {}, r"append: k has shape \[1,3,2,8\], expected \[2,T,2,8\]"),
    ("append", (K[0], V), {}, r"append: k has shape \[3,2,8\], expected \[2,T,2,8\]"),
    ("append", (K, K), {}, r"append: v has shape \[2,3,2,8\], expected \[2,T,2,6\]"),
    ("append", (K, V[:, :2]), {}, r"append: v has shape \[2,2,2,6\], expected 3 tokens as in k"),
    ("append", ([[1.0]], V), {}, r"append: k is \[\[1.0\]\], expected an array"),
    ("append", (K, None), {}, "append: v is None, expected an array"),
    ("append", (K, V, [1]), {}, r"append: lengths has shape \[1\], expected \[2\], one per sequence"),
    ("append", (K, V, []), {}, r"append: lengths has shape \[0\], expected \[2\]"),
    ("append", (K, V, [[1, 2]]), {}, r"append: lengths has shape \[1,2\], expected \[2\]"),
    ("append", (K, V, [1.0, 2.0]), {}, "append: lengths has dtype f64, expected i32 or i64"),
    ("append", (K, V, 3), {}, "append: lengths is 3, expected an array"),
    ("append", (K, V, [4, 0]), {}, r"append: lengths\[0\] is 4, expected 0 to 3"),
    ("append", (K, V), {"lengths": [0, -1]}, r"append: lengths\[1\] is -1, expected 0 to 3"),
    ("append", (np.ones((2, 9, 2, 8), np.float32), np.ones((2, 9, 2, 6), np.float32), [0, 9]), {},
     "append: sequence 1 would have 13 tokens, expected at most its capacity 12"),
    ("trim", ([4, 5],), {}, r"trim: lengths\[1\] is 5, expected 0 to the present 4"),
    ("trim", ([4, -1],), {}, r"trim: lengths\[1\] is -1, expected 0 to the present 4"),
    ("trim", ([4],), {}, r"trim: lengths has shape \[1\], expected \[2\]"),
    ("trim", (None,), {}, "trim: lengths is None, expected an array"),
    ("reorder", ([0, 2],), {}, r"reorder: indices\[1\] is 2, expected 0 to 1"),
    ("reorder", (["a", "b"],), {}, "reorder: indices has dtype '1w', expected i32 or i64"),
    ("attend", (Q.astype(np.float16),), {}, "attend: q has dtype f16, expected f32 as the cache"),
    ("attend", (Q[0],), {}, r"attend: q has shape \[3,4,8\], expected \[2,T,H,8\]"),
    ("attend", (Q[:1],), {}, r"attend: q has shape \[1,3,4,8\], expected \[2,3,4,8\]"),
    ("attend", (Q[..., :6],), {}, r"attend: q has shape \[2,3,4,6\], expected \[2,3,4,8\]"),
    ("attend", (Q[:, :, :3],), {}, "attend: q has 3 heads, expected a multiple of the cache's 2"),
    ("attend", (Q,), {"align": "top_left"}, "attend: align is given, expected none: the cache knows it"),
    ("attend", (Q,), {"align": [0, 0]}, "attend: align is given, expected none: the cache knows it"),
    ("attend", (Q,), {"key_lengths": [1, 1]}, "attend: key_lengths is given, expected none: the cache knows it"),
    ("attend", (Q,), {"query_lengths": [1, 1]}, "attend: query_lengths is given, expected none"),
    ("attend", (Q,), {"cu_seqlens_q": [0, 1]}, "attend: cu_seqlens_q is given, expected none"),
    ("attend", (Q,), {"dropout": 0.5}, "attend: dropout is 0.5, expected 0"),
    ("attend", (Q,), {"causal": 1}, "attend: causal is 1, expected True or False"),
    ("attend", (Q,), {"window": (-2, 0)}, r"attend: window\[0\] is -2, expected an int of at least -1"),
    ("attend", (Q,), {"softcap": -1}, "attend: softcap is -1, expected a finite number above 0"),
    ("attend", (Q,), {"sinks": [0.0]}, r"attend: sinks has shape \[1\], expected \[4\]"),
    ("attend", (Q,), {"mask": np.ones((3, 9), bool)},
     r"attend: mask has shape \[3,9\], expected one that broadcasts to \[2,4,3,4\]"),
    ("attend", (Q,), {"out": np.ones((2, 3, 4, 8), np.float32)},
     r"attend: out has shape \[2,3,4,8\], expected \[2,3,4,6\]"),
    ("attend", (Q,), {"out": 3}, "attend: out is 3, expected an array"),
    ("attend", (Q,), {"threads": 0}, "attend: threads is 0, expected an int from 1 to 4096"),
    ("attend", (Q,), {"tree": [-1, 0]}, r"attend: tree has shape \[2\], expected \[3\], a parent for each row of q"),
    ("attend", (Q,), {"tree": [-1.0, 0.0, 0.0]}, "attend: tree has dtype f64, expected i32 or i64"),
    ("save", (3,), {}, "save: path is 3, expected a path"),
    ("save", ("a\0b",), {}, "save: path is 'a.*b', expected a path"),
]


@pytest.mark.parametrize(("method", "positional", "keywords", "message"), CALLS, ids=[call[3][:40] for call in CALLS])
def test_wrong_argument_is_named_and_nothing_changes(method, positional, keywords, message):
    cache, _ = new_cache("paged", capacity=12)
    cache.append(K[:, :1], V[:, :1])
    cache.append(K, V)
    before = cache.lengths, cache.appended, cache.nbytes, cache.attend(Q)
    with pytest.raises(heed.InvalidArgument, match=f"^KVCache.{message}"):
        getattr(cache, method)(*positional, **keywords)
    after = cache.lengths, cache.appended, cache.nbytes, cache.attend(Q)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("call", "message"), [
    (lambda c: c.append(K), r"KVCache.append\(\) missing required argument: 'v'"),
    (lambda c: c.append(), r"KVCache.append\(\) missing required argument: 'k'"),
    (lambda c: c.append(K, V, [1, 1], 3), r"KVCache.append\(\) takes 3 positional arguments but 4 were given"),
    (lambda c: c.attend(), r"KVCache.attend\(\) missing required argument: 'q'"),
    (lambda c: c.attend(Q, K), r"KVCache.attend\(\) takes 1 positional arguments but 2 were given"),
    (lambda c: c.attend(Q, k=K), r"KVCache.attend\(\) got an unexpected keyword argument 'k'"),
    (lambda c: c.attend(Q, lse=K), r"KVCache.attend\(\) got an unexpected keyword argument 'lse'"),
    (lambda c: c.trim(), "trim"),
    (lambda c: pickle.dumps(c), r"cannot pickle 'heed.KVCache' object: save\(path\)"),
])
def test_wrong_calls_are_type_errors(call, message):
    with pytest.raises(TypeError, match=message):
        call(new_cache("paged")[0])


def test_errors_of_a_ring():
    ring = heed.RingKVCache(2, 2, 8, 6, window=3, sink_tokens=1)
    for _ in range(4):
        ring.append(K, V)
    with pytest.raises(heed.InvalidArgument,
                       match="^RingKVCache.attend: window lets row 0 of sequence 0 see token 1, "):
        ring.attend(Q, window=(9, 0))
    with pytest.raises(heed.InvalidArgument, match="^RingKVCache.attend: window lets row"):
        ring.attend(Q, sink_tokens=5)
    with pytest.raises(heed.InvalidArgument, match=r"^RingKVCache.trim: lengths\[0\] is 5, expected "):
        ring.trim([5, 12])
    assert ring.lengths.tolist() == [12, 12]
    ring.trim([9, 12])


def test_errors_of_a_latent_cache():
    latent = heed.LatentKVCache(2, 6, 2)
    for wrong, message in ((ROWS[0], r"rows has shape \[3,8\], expected rank 3"),
                           (K, r"rows has shape \[2,3,2,8\], expected rank 3"),
                           (ROWS[..., :6], r"rows has shape \[2,3,6\], expected \[2,T,8\]"),
                           (ROWS.astype(np.float64), "rows has dtype f64, expected f32")):
        with pytest.raises(heed.InvalidArgument, match=f"^LatentKVCache.append: {message}"):
            latent.append(wrong)
    with pytest.raises(TypeError, match=r"LatentKVCache.append\(\) missing required argument: 'rows'"):
        latent.append()
    latent.append(ROWS, [3, 1])
    assert latent.lengths.tolist() == [3, 1]


def test_errors_of_share():
    cache, _ = new_cache("paged")
    one = heed.KVCache(1, 2, 8)
    for prefix, batch, message in (
            (cache, 3, "prefix_cache has batch 2, expected 1"),
            (K, 3, "prefix_cache is of type numpy.ndarray, expected a heed.KVCache"),
            (heed.LatentKVCache(1, 2, 2), 3, "prefix_cache is of type .*LatentKVCache, expected a heed.KVCache"),
            (one, 0, "batch is 0, expected an int of at least 1"), (one, None, "batch is None")):
        with pytest.raises(heed.InvalidArgument, match=f"^KVCache.share: {message}"):
            heed.KVCache.share(prefix, batch)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"k_pool": K[0]}, r"k_pool has shape \[3,2,8\], expected \[pages, tokens, H, D\]"),
    ({"v_pool": V[:1]}, "v_pool has shape .*, expected 2 pages of 3 tokens as in k_pool"),
    ({"v_pool": V.astype(np.float64)}, "v_pool has dtype f64, expected f32"),
    ({"k_pool": K.astype(np.int32), "v_pool": V.astype(np.int32)}, "k_pool has dtype i32, expected "),
    ({"indptr": [1, 2]}, r"indptr\[0\] is 1, expected 0 to 0"),
    ({"indptr": [0, 3]}, r"indptr\[1\] is 3, expected 0 to 2"),
    ({"indptr": [0]}, r"indptr has shape \[1\], expected \[B \+ 1\]"),
    ({"indices": [0, 2]}, r"indices\[1\] is 2, expected 0 to 1"),
    ({"last_page_len": [4]}, r"last_page_len\[0\] is 4, expected 1 to 3"),
    ({"last_page_len": [0]}, r"last_page_len\[0\] is 0, expected 1 to 3"),
    ({"capacity": 4}, "sequence 0 would have 6 tokens, expected at most its capacity 4"),
    ({"page": None}, "page is None without a capacity"),
    ({"heads_first": 1}, "heads_first is 1, expected True or False"),
])
def test_errors_of_import_pages(wrong, message):
    tables = {"k_pool": K, "v_pool": V, "indptr": [0, 2], "indices": [0, 1], "last_page_len": [3]}
    with pytest.raises(heed.InvalidArgument, match=f"^KVCache(.import_pages)?: {message}"):
        heed.KVCache.import_pages(**{**tables, **wrong})


def test_errors_of_files(tmp_path):
    with pytest.raises(heed.FileError, match="^/nowhere/cache: ") as caught:
        heed.load_cache("/nowhere/cache")
    assert isinstance(caught.value, OSError)
    cache, _ = new_cache("paged")
    with pytest.raises(heed.FileError, match="^/nowhere/cache: "):
        cache.save("/nowhere/cache")
    cache.append(K, V)
    path = tmp_path / "cache"
    cache.save(path)
    whole = path.read_bytes()
    for text in (b"", b"text", whole[:-1], whole.replace(b'"kv"', b'"vk"'), os.urandom(300)):
        path.write_bytes(text)
        with pytest.raises(heed.FileError, match=f"^{path}: "):
            heed.load_cache(path)
    path.write_bytes(whole)
    with pytest.raises(heed.FileError, match=f"^{path}: "):
        heed.load_cache(path, max_bytes=100)
    for wrong, message in (({"path": 3}, "path is 3, expected a path"),
                           ({"path": path, "max_bytes": -1}, "max_bytes is -1")):
        with pytest.raises(heed.InvalidArgument, match=f"^load_cache: {message}"):
            heed.load_cache(**wrong)


@pytest.mark.filterwarnings("ignore:nanobind")
def test_an_object_that_was_not_made_properly_is_refused():
    with pytest.raises(TypeError):
        heed.KVCache.__new__(heed.KVCache).append(K, V)

    class Careless(heed.KVCache):
        def __init__(self):
            pass

    with pytest.raises(TypeError):
        Careless().attend(Q)
    cache, _ = new_cache("paged")
    cache.append(K, V)
    with pytest.raises(TypeError):
        cache.__init__(1, 1, 1)
    assert cache.lengths.tolist() == [3, 3]


def test_subclasses_stay_what_they_are():
    class Mine(heed.KVCache):
        pass

    cache = Mine(1, 2, 8, 6)
    assert type(cache.fork()) is Mine and type(heed.KVCache.share(cache, 2)) is Mine and "Mine: batch=1" in repr(cache)


def test_quantised_rows_must_be_finite():
    cache = heed.KVCache(2, 2, 8, 6, quantize="int8")
    cache.append(K, V)
    wrong = V.copy()
    wrong[1, 2, 1, 3] = np.nan
    with pytest.raises(heed.InvalidArgument, match="^KVCache.append: v"):
        cache.append(K, wrong)
    assert cache.lengths.tolist() == [3, 3] and cache.nbytes < 2 * heed.KVCache(2, 2, 8, 6).nbytes + 2 * 64 * 80
