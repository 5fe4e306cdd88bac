# heed's caches that rotate keys and queries themselves equal heed.rotary followed by attention.
import numpy as np
import pytest
from cache_model import DTYPES, TOLERANCE, normal

import heed

ROTARIES = [
    {"interleaved": False}, {"interleaved": True, "base": 500.0, "dim": 4},
    {"interleaved": False, "dim": None, "scaling": None},
    {"interleaved": True, "scaling": {"rope_type": "linear", "factor": 4.0}},
    {"interleaved": False, "scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {"interleaved": False, "scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
                                       "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
]


@pytest.mark.parametrize("rotary", ROTARIES, ids=lambda rotary: ",".join(map(str, rotary.values()))[:40])
def test_rows_are_turned_by_where_they_stand(rng, rotary, tmp_path):
    cache = heed.KVCache(1, 2, 8, 6, rotary=rotary)
    k, v, q = normal(rng, 1, 50, 2, 8), normal(rng, 1, 50, 2, 6), normal(rng, 1, 50, 4, 8)
    turned_q, turned_k = (heed.rotary(x, np.arange(50), **rotary) for x in (q, k))
    expected = heed.attention(turned_q, turned_k, v, causal=True)
    for begin, end in ((0, 40), (40, 41), (41, 50)):
        cache.append(k[:, begin:end], v[:, begin:end])
        o = cache.attend(q[:, begin:end])
        np.testing.assert_allclose(o, expected[:, begin:end], rtol=4e-6, atol=4e-6)
    assert cache.rotary and repr(cache).endswith("rotary=True, lengths=[50]>")
    cache.save(tmp_path / "cache")
    loaded = heed.load_cache(tmp_path / "cache")
    assert loaded.rotary and loaded.fork().rotary and not heed.KVCache(1, 1, 4).rotary
    np.testing.assert_array_equal(loaded.attend(q[:, 41:]), o)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(rng, dtype):
    cache = heed.KVCache(2, 1, 8, dtype=dtype, rotary={"interleaved": True})
    k, q = normal(rng, 2, 9, 1, 8, dtype=dtype), normal(rng, 2, 9, 2, 8, dtype=dtype)
    cache.append(k, k, [9, 4])
    turned_q, turned_k = (heed.rotary(x.astype(np.float64), np.arange(9), interleaved=True) for x in (q, k))
    for b, n in ((0, 9), (1, 4)):
        expected = heed.attention(turned_q[b:b + 1, :n], turned_k[b:b + 1, :n], k[b:b + 1, :n].astype(np.float64),
                                  causal=True)
        o = cache.attend(q)[b:b + 1, :n].astype(np.float64)
        np.testing.assert_allclose(o, expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize(("window", "sinks"), [(4, 0), (5, 2), (20, 3)])
def test_rings(rng, window, sinks, positions):
    rotary = {"interleaved": False}
    ring = heed.RingKVCache(1, 1, 8, window=window, sink_tokens=sinks, rotary=rotary, positions=positions, dtype="f64")
    assert ring.positions == positions and ring.rotary and f"positions='{positions}'" in repr(ring)
    k, q = normal(rng, 1, 60, 1, 8, dtype="f64"), normal(rng, 1, 60, 2, 8, dtype="f64")
    at = 0
    for tokens in (1, 7, 1, 1, 20, 3, 27):
        ring.append(k[:, at:at + tokens], k[:, at:at + tokens])
        o = ring.attend(q[:, at:at + tokens])
        for i, p in enumerate(range(at, at + tokens)):
            seen = [j for j in range(p + 1) if j < sinks or j > p - window]
            places = seen if positions == "absolute" else range(len(seen))  # the kept tokens as a text of their own
            turned_k = heed.rotary(k[:, seen], list(places), **rotary)
            turned_q = heed.rotary(q[:, p:p + 1], [places[-1]], **rotary)
            expected = heed.attention(turned_q, turned_k, k[:, seen])
            np.testing.assert_allclose(o[:, i:i + 1], expected, rtol=1e-11, atol=1e-11)
        at += tokens


def test_imported_pages_are_turned(rng):
    pool = normal(rng, 3, 4, 2, 8)
    rotary = {"interleaved": True, "base": 100.0}
    pages = heed.KVCache.import_pages(pool, pool, [0, 2], [2, 0], [3], rotary=rotary)
    cache = heed.KVCache(1, 2, 8, rotary=rotary)
    rows = np.concatenate([pool[2], pool[0, :3]])[None]
    cache.append(rows, rows)
    q = normal(rng, 1, 7, 2, 8)
    np.testing.assert_array_equal(pages.attend(q), cache.attend(q))


@pytest.mark.parametrize(("rotary", "message"), [
    (True, "rotary is True, expected a dict of heed.rotary's keywords"),
    ({}, "rotary lacks 'interleaved', expected it"),
    ({"interleaved": 1}, "rotary.interleaved is 1, expected True or False"),
    ({"interleaved": True, "inverse": True},
     "rotary has the key 'inverse', expected heed.rotary's keywords but inverse"),
    ({"interleaved": True, "x": 3}, "rotary has the key 'x', expected"),
    ({"interleaved": True, 3: 3}, "rotary's key is 3, expected a string"),
    ({"interleaved": True, "base": "1"}, "rotary.base is '1', expected a finite number"),
    ({"interleaved": True, "dim": 3}, "rotary dim is 3, expected an even number from 2 to 8"),
    ({"interleaved": True, "dim": 10}, "rotary dim is 10, expected an even number from 2 to 8"),
    ({"interleaved": True, "scaling": {"rope_type": "dynamic", "factor": 2.0}},
     "rotary scaling.rope_type is dynamic, expected"),
    ({"interleaved": True, "scaling": {"rope_type": "wild"}}, ".*wild"),
])
def test_wrong_rotary(rotary, message):
    with pytest.raises(heed.InvalidArgument, match=message if message[0] == "." else f"^KVCache: {message}"):
        heed.KVCache(1, 1, 8, rotary=rotary)


def test_wrong_positions():
    with pytest.raises(heed.InvalidArgument, match="^RingKVCache: positions is 'own', expected 'absolute' or 'cache'"):
        heed.RingKVCache(1, 1, 8, window=3, positions="own")
    with pytest.raises(heed.InvalidArgument, match="^RingKVCache: positions"):
        heed.RingKVCache(1, 1, 8, window=3, positions="cache")
    ring = heed.RingKVCache(1, 1, 8, window=3, rotary={"interleaved": True}, positions="cache")
    ring.append(np.ones((1, 1, 1, 8), np.float32), np.ones((1, 1, 1, 8), np.float32))
    with pytest.raises(heed.InvalidArgument, match="^RingKVCache.attend: alibi"):
        ring.attend(np.ones((1, 1, 1, 8), np.float32), alibi=[0.5])
