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
        heed.gla(*arrays(), segment=0)
    with pytest.raises(heed.InvalidArgument, match="expected None: explain"):
        heed.explain("gla", q=(1, 8, 2, 4), k=(1, 8, 2, 4), v=(1, 8, 2, 4), log_decay=(1, 8, 2, 4), comm="world")


def test_a_group_of_one():
    np.testing.assert_array_equal(heed.gla(*arrays(), comm=Comm(World(1), 0)), heed.gla(*arrays()))
