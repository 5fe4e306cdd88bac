# heed beside other threads and processes: the GIL, several callers at once, fork, settings.
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import heed


def problem(seed, T=96, H=4, D=16):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, T, H, D), dtype=np.float32) for _ in range(3)]


def run_at_once(work, count):
    """work(0) to work(count - 1), each in a thread of its own."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_several_python_threads_at_once():
    problems = [problem(seed, T=40 + 17 * seed) for seed in range(6)]
    expected = [heed.attention(*p, causal=True, threads=1) for p in problems]
    failures = []

    def work(offset):
        for i in range(30):
            n = (i + offset) % len(problems)
            o = heed.attention(*problems[n], causal=True, threads=1 + (i + offset) % 3)
            if not np.array_equal(o, expected[n]):
                failures.append(n)

    run_at_once(work, 4)
    assert not failures


def test_other_threads_run_during_a_call():
    q, k, v = problem(0, T=2048, H=8, D=64)
    stop, ticks = threading.Event(), []

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(20):  # until one call is long enough to tell
            begin = time.perf_counter()
            heed.attention(q, k, v, threads=1)
            end = time.perf_counter()
            margin = (end - begin) / 4
            if any(begin + margin < t < end - margin for t in ticks):
                break
        else:
            pytest.fail("no other thread ran in the middle of a call")
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_works_in_a_forked_child():
    q, k, v = problem(3, T=300)
    expected = heed.attention(q, k, v, threads=3)  # the pool has threads now
    pid = os.fork()
    if pid == 0:
        same = all(np.array_equal(heed.attention(q, k, v, threads=n), expected) for n in (1, 3, 2))
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    np.testing.assert_array_equal(heed.attention(q, k, v, threads=3), expected)


def test_number_of_threads():
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert heed.get_num_threads() == usable
    heed.set_num_threads(3)
    assert heed.get_num_threads() == 3
    heed.set_num_threads(None)
    assert heed.get_num_threads() == usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_the_affinity_mask_is_asked_when_it_matters():
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(mask)])
        assert heed.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, mask)
    assert heed.get_num_threads() == len(mask)


def test_exit_while_the_pool_sleeps_is_clean():
    code = "import heed, numpy as np; q = np.ones((1, 300, 4, 8), 'f4'); heed.attention(q, q, q, threads=4)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
