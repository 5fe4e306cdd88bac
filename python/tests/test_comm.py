# comm= of NumPy arrays: ranks are threads, whose communicators have the methods of mpi4py's.
import queue
import threading

import mechanisms
import numpy as np
import pytest

import heed

STATEFUL = [name for name in mechanisms.NAMES if mechanisms.DESCRIPTIONS[name]["has_state"]]
OPTIONS = {"performer": {"causal": True}, "linear_attention": {"causal": True}}
TOKENS = 70


class World:
    """The memory of all ranks."""

    def __init__(self, size):
        self.size, self.barrier, self.slots = size, threading.Barrier(size, timeout=60), [None] * size
        self.mail = {(a, b): queue.Queue() for a in range(size) for b in range(size)}


class Comm:
    """A communicator. Buffers are memoryviews of bytes."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.world.size

    def _all(self, given):
        self.world.slots[self.rank] = given
        self.world.barrier.wait()
        slots = list(self.world.slots)
        self.world.barrier.wait()
        return slots

    def Allgather(self, sent, received):
        received[:] = b"".join(self._all(bytes(sent)))

    def Send(self, buffer, dest):
        self.world.mail[self.rank, dest].put(bytes(buffer))

    def Recv(self, buffer, source):
        buffer[:] = self.world.mail[source, self.rank].get(timeout=60)

    def Sendrecv(self, sendbuf, dest, sendtag=0, recvbuf=None, source=-1):
        self.Send(sendbuf, dest)
        self.Recv(recvbuf, source)

    def Alltoallv(self, sent, received):
        buffer, counts = sent
        begins = np.cumsum([0, *counts])
        parts = [bytes(buffer[begin:begin + count]) for begin, count in zip(begins, counts)]
        received[0][:] = b"".join(of[self.rank] for of in self._all(parts))

    def Bcast(self, buffer, root):
        buffer[:] = self._all(bytes(buffer))[root]


def run(size, function):
    """The results of function(comm) on each rank, or its exceptions."""
    world, results = World(size), [None] * size

    def rank(r):
        try:
            results[r] = function(Comm(world, r))
        except Exception as error:
            results[r] = error

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def part(values, axes, begin, end):
    return {key: x if axes[key] is None else np.moveaxis(np.moveaxis(x, axes[key], 0)[begin:end], 0, axes[key])
            for key, x in values.items()}


def error(got, expected):
    return np.abs(got - expected).max(initial=0) / (np.abs(expected).max(initial=0) + 1e-30)


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("name", STATEFUL)
def test_parts_have_the_results_of_the_whole(name, relay):
    values = mechanisms.arguments(name, T=TOKENS)
    axes = {key: 1 if x.ndim > 1 and x.shape[1] == TOKENS else None for key, x in values.items()}
    options = OPTIONS.get(name, {})
    forward, backward = getattr(heed, name), getattr(heed, f"{name}_backward")
    o, state = forward(**values, **options, return_state=True)
    do = np.random.default_rng(0).standard_normal(o.shape)
    gradients = backward(do, **values, **options)._asdict()
    cuts = [0, 30, 30, TOKENS]  # the second rank has no tokens

    def of_rank(comm):
        begin, end = cuts[comm.rank], cuts[comm.rank + 1]
        mine, of_parts = part(values, axes, begin, end), {"comm": comm, "relay": relay, "segment": 16}
        found = forward(**mine, **options, **of_parts, return_state=True)
        return *found, backward(do[:, begin:end], **mine, **options, **of_parts)._asdict()

    results = run(3, of_rank)
    for result in results:
        if isinstance(result, Exception):
            raise result
        states = result[1] if isinstance(result[1], tuple) else (result[1],)
        for got, other in zip(states, results[0][1] if isinstance(results[0][1], tuple) else (results[0][1],)):
            np.testing.assert_array_equal(got, other)
    assert error(np.concatenate([result[0] for result in results], 1), o) < 1e-12
    for key in values:
        if gradients.get(f"d{key}") is None:
            continue
        parts = [result[2][f"d{key}"] for result in results]
        got = sum(parts) if axes[key] is None else np.concatenate(parts, axes[key])
        assert error(got, gradients[f"d{key}"]) < 1e-10, key
    if len(mechanisms.DESCRIPTIONS[name]["state"]) == 1:
        assert error(results[0][1], state) < 1e-12


def arrays(rank=0):
    x = np.random.default_rng(rank).standard_normal((1, 10, 2, 8), np.float32)
    return x, x, x, -np.abs(x)


def test_every_rank_raises_where_calls_differ():
    def of_rank(comm):
        return heed.gla(*arrays(), scale=1.0 + comm.rank, comm=comm)

    for result in run(2, of_rank):
        assert isinstance(result, heed.InvalidArgument)
        assert str(result).startswith("gla: rank 1 calls gla")


@pytest.mark.parametrize("wrong", [{"q": np.zeros(3)}, {"q": np.zeros((1, 10, 2, 8), int)}, {"scale": "1"},
                                   {"initial": 3}, {"v": None}, {"out": np.zeros(1)}, {"threads": 0}])
def test_what_one_rank_refuses_the_others_are_told(wrong):
    """Arguments that never reach the comparison of calls: a wrong type, an unknown keyword, a missing array."""
    values = dict(zip(("q", "k", "v", "log_decay"), arrays()))

    for name in ("gla", "attention"):
        own = {key: x for key, x in values.items() if name == "gla" or key != "log_decay"}
        first, second = run(2, lambda comm: getattr(heed, name)(**own | (wrong if comm.rank else {}), comm=comm))
        assert isinstance(second, (heed.InvalidArgument, TypeError)), second
        assert isinstance(first, heed.InvalidArgument), first
        assert str(first).startswith(f"{name}: rank 1 refused its arguments: {name}"), first


def test_the_errors_of_a_communicator_are_raised():
    class Broken(Comm):
        def Allgather(self, sent, received):
            raise ConnectionError("no network")

    with pytest.raises(ConnectionError, match="no network"):
        heed.gla(*arrays(), comm=Broken(World(2), 0))


def test_what_is_not_a_communicator_is_refused():
    with pytest.raises(heed.InvalidArgument, match="comm is .*expected a communicator of mpi4py"):
        heed.gla(*arrays(), comm="world")
    with pytest.raises(heed.InvalidArgument, match="segment is 0"):
        heed.gla(*arrays(), comm=Comm(World(1), 0), segment=0)
    with pytest.raises(heed.InvalidArgument, match="expected None: explain"):
        heed.explain("gla", q=(1, 8, 2, 4), k=(1, 8, 2, 4), v=(1, 8, 2, 4), log_decay=(1, 8, 2, 4), comm="world")


def test_a_group_of_one():
    np.testing.assert_array_equal(heed.gla(*arrays(), comm=Comm(World(1), 0)), heed.gla(*arrays()))


# --- attention --------------------------------------------------------------------------------------------------------

HEADS, KEY_HEADS, CHANNELS = 6, 3, 8
CUTS = [(0, 30), (30, 30), (30, TOKENS)]  # the second rank has no tokens
CONTIGUOUS = [[cut] for cut in CUTS]
_PARTS = [(TOKENS * i // 6, TOKENS * (i + 1) // 6) for i in range(6)]
ZIGZAG = [[_PARTS[r], _PARTS[5 - r]] for r in range(3)]
ATTENTION = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (20, 0), "sink_tokens": 2},
    "both_sides": {"window": (9, 12), "softcap": 4.0, "scale": 0.3, "key_lengths": [TOKENS, 45]},
    "sinks": {"causal": True, "sinks": np.linspace(-1, 1, HEADS), "alibi": np.full(HEADS, 0.1)},
    "rows": {"bias": np.random.default_rng(3).standard_normal((2, 1, TOKENS, TOKENS)),
             "mask": np.random.default_rng(4).random((TOKENS, TOKENS)) < 0.8},
    "log_decay": {"causal": True, "log_decay": np.full((2, TOKENS, HEADS), -0.05)},
    "segments": {"segments": np.arange(2 * TOKENS).reshape(2, TOKENS) // 23},
    "lengths": {"causal": True, "query_lengths": [TOKENS, 50], "key_starts": [3, 40], "prefix": [9, 0],
                "align": [0, 4]},
    "pattern": {"pattern": heed.patterns.bigbird(16, random=1) | heed.patterns.atrous(5)},
    "dropout": {"causal": True, "dropout": 0.3, "seed": 7},
}
TOKENS_OF = {"segments": 1, "q": 1, "k": 1, "v": 1, "o": 1, "do": 1, "lse": 2, "dlse": 2, "log_decay": 1, "mask": -2,
             "bias": -2}


def of_ranges(values, ranges):
    """The tokens of a rank; what has none is whole."""
    return {key: np.concatenate([x.take(range(*cut), TOKENS_OF[key]) for cut in ranges], TOKENS_OF[key])
            if key in TOKENS_OF else x for key, x in values.items()}


def joined(parts, ranges, axis):
    """The whole array of parts that ranks have."""
    whole = np.full_like(parts[0], np.nan, shape=[TOKENS if i == axis % parts[0].ndim else n
                                                  for i, n in enumerate(parts[0].shape)])
    for one, cuts in zip(parts, ranges):
        index = np.concatenate([np.arange(*cut) for cut in cuts]).astype(int)
        np.moveaxis(whole, axis, 0)[index] = np.moveaxis(one, axis, 0)
    return whole


def tensors(dtype=np.float64):
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, 2, TOKENS, HEADS, CHANNELS)).astype(dtype)
    k, v = rng.standard_normal((2, 2, TOKENS, KEY_HEADS, CHANNELS)).astype(dtype)
    return {"q": q, "k": k, "v": v}, do, rng.standard_normal((2, HEADS, TOKENS)).astype(dtype)


def unpacked(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("how", ["auto", "all_gather", "ulysses", "zigzag"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_to_parts_is_that_of_the_whole(name, how):
    if how == "ulysses" and {"alibi", "mask", "log_decay", "pattern", "dropout"} & set(ATTENTION[name]):
        pytest.skip("refused")
    ranges = ZIGZAG if how == "zigzag" else CONTIGUOUS
    keywords = {"order": "zigzag"} if how == "zigzag" else {"method": how}
    values, do, dlse = tensors()
    options = ATTENTION[name]
    o, lse = heed.attention(**values, **options, return_lse=True)
    of_outputs = {"do": do, "o": o, "lse": lse, "dlse": dlse}
    gradients = heed.attention_backward(**of_outputs, **values, **options, need_dbias="bias" in options)._asdict()

    def of_rank(comm):
        own = of_ranges(values | options, ranges[comm.rank])
        o, lse = heed.attention(**own, return_lse=True, comm=comm, **keywords)
        into = np.full_like(o, np.nan)
        assert heed.attention(**own, out=into, comm=comm, **keywords) is into
        np.testing.assert_array_equal(into, o)
        outputs = of_ranges(of_outputs, ranges[comm.rank]) | {"o": o, "lse": lse}
        return o, lse, heed.attention_backward(**outputs, **own, need_dbias="bias" in own, comm=comm, **keywords)

    results = unpacked(run(3, of_rank))
    np.testing.assert_array_equal(joined([result[0] for result in results], ranges, 1), o)
    np.testing.assert_array_equal(joined([result[1] for result in results], ranges, 2), lse)
    for key, expected in gradients.items():
        parts = [getattr(result[2], key) for result in results]
        if expected is None:
            assert parts == [None] * 3
            continue
        axis = TOKENS_OF.get(key[1:])
        assert error(sum(parts) if axis is None else joined(parts, ranges, axis), expected) < 1e-12, key


@pytest.mark.parametrize(("dtype", "order"), [(np.float64, "zigzag"), (np.float32, "contiguous")])
@pytest.mark.parametrize("name", [name for name in ATTENTION if name not in ("log_decay", "pattern", "dropout")])
def test_attention_on_a_ring(name, dtype, order):
    options = ATTENTION[name] | {"method": "ring", "order": order}
    values, do, dlse = tensors(dtype)
    ranges = ZIGZAG if order == "zigzag" else CONTIGUOUS
    o, lse = heed.attention(**values, **options, return_lse=True)
    bias = {"need_dbias": "bias" in options}
    gradients = heed.attention_backward(do, *values.values(), o, lse, dlse=dlse, **options, **bias)._asdict()

    def of_rank(comm):
        own = of_ranges(values | options, ranges[comm.rank])
        o, lse = heed.attention(**own, return_lse=True, comm=comm)
        outputs = of_ranges({"do": do, "dlse": dlse}, ranges[comm.rank]) | {"o": o, "lse": lse}
        return {"o": o, "lse": lse} | heed.attention_backward(**outputs, **own, **bias, comm=comm)._asdict()

    results = unpacked(run(3, of_rank))
    for key, expected in ({"o": o, "lse": lse} | gradients).items():
        if expected is None:
            continue
        axis = TOKENS_OF.get(key if key in TOKENS_OF else key[1:])
        parts = [result[key] for result in results]
        got = sum(parts) if axis is None else joined(parts, ranges, axis)
        # A row that sees no key has an lse of -inf.
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11 if dtype == np.float64 else 1e-4, err_msg=key)


@pytest.mark.parametrize("how", [{}, {"method": "ulysses"}, {"order": "zigzag"}, {"method": "ring", "order": "zigzag"}])
def test_packed_sequences_are_cut_anywhere(how):
    rng = np.random.default_rng(0)
    do, q = rng.standard_normal((2, TOKENS, HEADS, CHANNELS))
    k, v = rng.standard_normal((2, TOKENS, KEY_HEADS, CHANNELS))
    values = {"q": q, "k": k, "v": v}
    options = {"causal": True, "window": (11, 0), "cu_seqlens_q": [0, 9, 9, 44, TOKENS - 3]}
    o, lse = heed.attention(**values, **options, return_lse=True)
    gradients = heed.attention_backward(do, q, k, v, o, lse, **options)
    ranges = ZIGZAG if "order" in how else CONTIGUOUS

    def take(x, of_rank, axis=0):
        return np.concatenate([x.take(range(*cut), axis) for cut in of_rank], axis)

    def of_rank(comm):
        own = {key: take(x, ranges[comm.rank]) for key, x in values.items()}
        o, lse = heed.attention(**own, **options, **how, return_lse=True, comm=comm)
        return o, lse, *heed.attention_backward(take(do, ranges[comm.rank]), **own, o=o, lse=lse, **options, **how,
                                                comm=comm)[:3]

    results = unpacked(run(3, of_rank))
    for i, (axis, expected) in enumerate(zip([0, 1, 0, 0, 0], [o, lse, *gradients[:3]])):
        got = joined([result[i] for result in results], ranges, axis)
        if i < 2 and how.get("method") != "ring":
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_a_seed_that_is_not_given_is_that_of_one_rank():
    values, _, _ = tensors(np.float32)
    np.random.seed(3)
    results = unpacked(run(3, lambda comm: heed.attention(**of_ranges(values, CONTIGUOUS[comm.rank]), dropout=0.5,
                                                          comm=comm)))
    np.random.seed(3)  # the ranks are threads, which draw from one generator in any order
    seeds = [int.from_bytes(np.random.bytes(8), "little") for _ in range(3)]
    got = np.concatenate(results, 1)
    assert any(np.array_equal(got, heed.attention(**values, dropout=0.5, seed=seed)) for seed in seeds)


def test_caches_of_several_ranks():
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 2, TOKENS, KEY_HEADS, CHANNELS), np.float32)
    q, rows = rng.standard_normal((2, 4, HEADS, CHANNELS), np.float32), 4
    sinks = np.linspace(-1, 1, HEADS)

    def cache_of(begin, end):
        cache = heed.KVCache(2, KEY_HEADS, CHANNELS)
        for first, last in ((begin, min(end, TOKENS - rows)), (max(begin, TOKENS - rows), end)):
            if first < last:
                cache.append(k[:, first:last], v[:, first:last])
        return cache

    for options in ({}, {"softcap": 3.0, "scale": 0.2}, {"sinks": sinks}):
        expected, lse = cache_of(0, TOKENS).attend(q, return_lse=True, **options)
        for got, of_all in unpacked(run(3, lambda comm: cache_of(*CUTS[comm.rank]).attend(
                q, return_lse=True, comm=comm, **options))):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(of_all, lse, rtol=0, atol=1e-5)
    for options, kind, said in (({"window": (3, 0)}, heed.Unsupported, "window is given with a group"),
                                ({"tree": [-1, 0, 1, 2]}, heed.InvalidArgument, "tree is given with comm")):
        for result in run(2, lambda comm: cache_of(*CUTS[2 * comm.rank]).attend(q, comm=comm, **options)):
            assert isinstance(result, kind) and said in str(result), result
    with pytest.raises(heed.InvalidArgument, match="KVCache.quantization_bound: comm is given"):
        cache_of(0, TOKENS).quantization_bound(q, comm=Comm(World(1), 0))


def test_a_rank_may_leave_out_lse():
    values, _, _ = tensors(np.float32)
    expected, lse = heed.attention(**values, causal=True, return_lse=True)

    def of_rank(comm):
        own = of_ranges(values, CONTIGUOUS[comm.rank])
        return heed.attention(**own, causal=True, return_lse=comm.rank == 2, comm=comm, threads=1)

    results = unpacked(run(3, of_rank))
    np.testing.assert_array_equal(np.concatenate([*results[:2], results[2][0]], 1), expected)
    np.testing.assert_array_equal(results[2][1], lse[:, :, 30:])


@pytest.mark.parametrize(("keywords", "kind", "said"), [
    (lambda rank: {"causal": rank == 1}, heed.InvalidArgument, "rank 1 calls attention"),
    (lambda rank: {"method": ("all_gather", "auto")[rank]}, heed.InvalidArgument, "rank 1 calls attention"),
    (lambda rank: {"window": (3 + rank, 0)}, heed.InvalidArgument, "rank 1 calls attention"),
    (lambda rank: {"method": "ulysses"}, heed.InvalidArgument, "method is ulysses with 6 and 3 heads"),
    (lambda rank: {"method": "ulysses", "order": "zigzag"}, heed.InvalidArgument, "method is ulysses"),
    (lambda rank: {"order": "zigzag"}, heed.InvalidArgument, "tokens of ranks are [30,40], expected [35,35]"),
    (lambda rank: {"method": "ring", "log_decay": np.zeros((2, 30 + 10 * rank, HEADS), np.float32), "causal": True},
     heed.Unsupported, "log_decay is given on a ring"),
    (lambda rank: {"method": "ring", "chunk": 8}, heed.Unsupported, "chunk is given on a ring"),
    (lambda rank: {"method": "ring", "sink_tokens": 1, "key_starts": [1, 2]}, heed.Unsupported,
     "sink_tokens with key_starts is given on a ring"),
    (lambda rank: {"method": "ring", "key_lengths": [71, 0]}, heed.InvalidArgument, "key_lengths contains 71"),
    (lambda rank: {"method": "ring", "dropout": 0.5, "seed": 1}, heed.Unsupported, "dropout is given on a ring"),
    (lambda rank: {"dropout": 0.5, "seed": rank}, heed.InvalidArgument, "rank 1 calls attention"),
    (lambda rank: {"segments": np.zeros((2, 30), int)}, heed.InvalidArgument,
     "has shape [2,30], expected [B, T] with the tokens"),
    (lambda rank: {"pattern": heed.patterns.keys(np.zeros((1, 30, 1), int))}, heed.Unsupported, "pattern has keys"),
    (lambda rank: {"method": "ulysses", "pattern": heed.patterns.atrous(2)}, heed.InvalidArgument, "method is ulysses"),
    (lambda rank: {"bias": np.zeros((30 + 10 * rank, 60))}, heed.InvalidArgument, "bias has 30 rows and 60 keys"),
    (lambda rank: {"softcap": -1.0}, heed.InvalidArgument, "softcap is -1"),
])
def test_every_rank_refuses_attention_that_is_not_divided(keywords, kind, said):
    values, _, _ = tensors(np.float32)

    def of_rank(comm):
        own = of_ranges(values, [(0, 30), (30, TOKENS)][comm.rank:comm.rank + 1])
        return heed.attention(**own, comm=comm, **keywords(comm.rank))

    for result in run(2, of_rank):
        assert isinstance(result, kind), result
        assert str(result).startswith("attention: ") and said in str(result), result


def test_what_a_communicator_of_attention_is_not():
    values, do, _ = tensors(np.float32)
    o, lse = heed.attention(**values, return_lse=True, method="ulysses", order="zigzag")
    np.testing.assert_array_equal(o, heed.attention(**values, comm=Comm(World(1), 0)))
    for function, more in ((heed.attention, {}), (heed.attention_backward, {"do": do, "o": o, "lse": lse})):
        with pytest.raises(heed.InvalidArgument, match=f"{function.__name__}: comm is .*expected a communicator"):
            function(**values, **more, comm="world")
        with pytest.raises(heed.InvalidArgument, match=f"{function.__name__}: method is 'rings'"):
            function(**values, **more, method="rings")
        with pytest.raises(heed.InvalidArgument, match=f"{function.__name__}: order is None"):
            function(**values, **more, order=None)
    with pytest.raises(heed.InvalidArgument, match="expected None: explain"):
        heed.explain("attention", q=(1, 8, 2, 4), comm="world")
    with pytest.raises(heed.InvalidArgument, match="q has shape .*expected .T, H, D. or .1, T, H, D. with a group"):
        heed.attention(**values, cu_seqlens_q=[0, TOKENS], comm=Comm(World(1), 0))
    assert "\n  comm " in heed.attention.__doc__
