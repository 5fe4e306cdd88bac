# heed's caches in several Python threads at once: nothing is lost, nothing crashes.
import contextlib
import threading
import time

import numpy as np
import pytest
from at_once import holds_in_a_child, needs_fork, others_run_during, run_at_once
from cache_model import grow, new_cache, normal

import heed


def test_forks_in_threads_of_their_own(rng):
    prefix = heed.KVCache(1, 2, 16)
    k, v, q = (normal(rng, 1, 130, 2, 16) for _ in range(3))
    prefix.append(k, v)

    def decode(cache, offset):
        results = []
        for i in range(60):
            row = slice((i + offset) % 130, (i + offset) % 130 + 1)
            cache.append(k[:, row], v[:, row])
            results.append(cache.attend(q[:, row], threads=1 + i % 3))
        return np.stack(results)

    expected = [decode(prefix.fork(), offset) for offset in range(4)]
    forks, found = [prefix.fork() for _ in range(4)], {}
    run_at_once(*(lambda i=i: found.__setitem__(i, decode(forks[i], i)) for i in range(4)))
    for i in range(4):
        np.testing.assert_array_equal(found[i], expected[i])


def test_several_threads_may_look_at_one_cache(rng):
    cache = heed.KVCache(1, 2, 16)
    cache.append(normal(rng, 1, 300, 2, 16), normal(rng, 1, 300, 2, 16))
    q = normal(rng, 1, 300, 4, 16)
    expected = cache.attend(q)

    def look():
        for _ in range(20):
            np.testing.assert_array_equal(cache.attend(q, threads=2), expected)
            assert cache.lengths.tolist() == [300] and cache.fork().nbytes == cache.nbytes

    run_at_once(look, look, look)


@pytest.mark.parametrize("make", [lambda: heed.KVCache(2, 1, 8), lambda: heed.RingKVCache(2, 1, 8, window=9)])
def test_misuse_is_harmless(rng, make, tmp_path):
    """Threads that change one cache wait for each other: every call is whole, in some order."""
    cache, n = make(), 100
    k, v = normal(rng, 2, 3, 1, 8), normal(rng, 2, 3, 1, 8)

    def append():
        for _ in range(n):
            cache.append(k, v)

    def shuffle():
        for _ in range(n):
            cache.reorder([1, 0])

    def look():
        for i in range(n):
            o = cache.attend(k[:, : 1 + i % 3])
            assert np.isfinite(o).all() and (cache.lengths % 3 == 0).all() and cache.nbytes >= 0
            repr(cache)

    def fork():
        for i in range(n):
            other = cache.fork()
            other.append(k, v)
            assert other.lengths[0] % 3 == 0
            if i % 20 == 0:
                path = tmp_path / str(threading.get_ident())
                other.save(path)
                heed.load_cache(path)

    run_at_once(append, append, shuffle, look, fork, fork)
    assert cache.lengths.tolist() == [6 * n, 6 * n]


def test_trimming_while_others_attend(rng):
    cache = heed.KVCache(1, 2, 16, page=4)
    k, q = normal(rng, 1, 200, 2, 16), normal(rng, 1, 64, 2, 16)
    stop = threading.Event()

    def change():
        for i in range(200):
            cache.append(k, k)
            cache.trim([i % 7])
        stop.set()

    def look():
        while not stop.is_set():
            with contextlib.suppress(heed.InvalidArgument):  # a trim has just taken the new rows
                assert np.isfinite(cache.attend(q, causal=False)).all()

    run_at_once(change, look, look)


def test_other_threads_run_during_a_call(rng):
    cache = heed.KVCache(1, 8, 64)
    k = normal(rng, 1, 3000, 8, 64)
    cache.append(k, k)

    def look():
        assert cache.lengths.tolist() == [3000]

    assert others_run_during(lambda: cache.attend(k, threads=1), look)


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cache_goes_on_in_a_forked_child(rng):
    cache = heed.KVCache(1, 2, 16)
    k = normal(rng, 1, 100, 2, 16)
    cache.append(k, k)
    expected = cache.attend(k, threads=3)

    def goes_on():
        same = np.array_equal(cache.attend(k, threads=3), expected)
        cache.append(k, k)
        return same and cache.lengths[0] == 200

    assert holds_in_a_child(goes_on) and cache.lengths.tolist() == [100]


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["paged", "contiguous", "ring", "latent"])
def test_a_fork_while_other_threads_use_a_cache(rng, kind):
    """The child finds a whole cache, which no thread uses."""
    cache, model = new_cache(kind, batch=1, capacity=4000) if kind == "contiguous" else new_cache(kind, batch=1)
    rows, q = grow(rng, cache, model, 1000), normal(rng, 1, 300, 2, 8)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            cache.append(*rows)
            cache.trim([1000])

    def look():
        while not stop.is_set():
            with contextlib.suppress(heed.InvalidArgument):  # where a trim has just taken the new rows
                cache.attend(q, scale=1.0)
            cache.fork()

    def goes_on():
        length = cache.lengths[0]
        cache.append(*rows)
        o = cache.attend(q, scale=1.0, threads=2)
        return length in (1000, 2000) and cache.lengths[0] == length + 1000 and np.isfinite(o).all()

    def fork():
        try:
            for _ in range(15):
                assert holds_in_a_child(goes_on)
                time.sleep(0.002)
        finally:
            stop.set()

    run_at_once(change, look, look, fork)


@pytest.mark.parametrize("kind", ["paged", "ring", "latent"])
@pytest.mark.parametrize(("method", "given", "later"), [
    ("trim", [4000, 4000], [1, 1]), ("reorder", [1, 0], [0, 0]), ("append", [1, 0], [0, 1])])
def test_arrays_are_read_before_others_may_write(rng, kind, method, given, later):
    """A call that waits for the cache has the numbers that it was given."""
    cache, model = new_cache(kind, **({"window": 5000} if kind == "ring" else {}))
    rows = grow(rng, cache, model, 4001, lengths=[4001, 4000])
    q, numbers, called = normal(rng, 2, 4000, 8, 8), np.array(given), threading.Event()

    def change():
        called.set()
        getattr(cache, method)(*(rows if method == "append" else ()), numbers)

    def overwrite():
        called.wait()
        time.sleep(0.1)
        numbers[:] = later

    def look():
        cache.attend(q, scale=1.0, threads=1)

    def begin():
        time.sleep(0.05)  # when the cache is in use
        run_at_once(change, overwrite)

    run_at_once(look, begin)
    expected = {"trim": [4000, 4000], "reorder": [4000, 4001], "append": [4002, 4000]}[method]
    assert cache.lengths.tolist() == expected
